"""What a folder holds, for people: shards, a run, a checkpoint or a model."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from biphase.console import out
from biphase.corpus.duplicates import count_near_copies
from biphase.corpus.manifest import SHARD_SPLITS
from biphase.corpus.shards import ShardSet, describe_shards
from biphase.errors import InputError
from biphase.files import read_json_as
from biphase.run import Run, read_done, read_metrics, read_recipe, whole_steps


def inspect_command(
    path: Annotated[Path, typer.Argument(help="Shards, a run, a checkpoint or a model folder.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte and compare hashes.")] = False,
    near_copies: Annotated[bool, typer.Option("--near-copies", help="Count like documents of shards.")] = False,
) -> None:
    """Say what is in a folder, and check that it is whole.

    Example: `biphase inspect shards --verify`
    """
    out.print(describe_path(path, verify=verify, near_copies=near_copies), markup=False)


def describe_path(path: Path, *, verify: bool = False, near_copies: bool = False) -> str:
    """Lines about a folder, for a person; with `verify`, every hash is compared first, and with `near_copies`
    documents of a shard set with each other.

    Raises:
        InputError: no such folder, not one of ours, or damaged (the message names the file).
    """
    if not path.is_dir():
        raise InputError(f"{path} is not a folder")
    if (path / "config.yaml").exists():
        return describe_run_folder(Run(path), verify=verify)
    if (path / "manifest.json").exists() and (path / "model").is_dir():
        return describe_checkpoint(path)
    if (path / "manifest.json").exists():
        if verify:
            for split in SHARD_SPLITS:
                ShardSet.open(path, split).verify()
        lines = [describe_shards(path)]
        if near_copies:
            lines += [count_near_copies(ShardSet.open(path, split)) for split in SHARD_SPLITS]
        return "\n".join([*lines, *(["verified: every hash agrees"] if verify else [])])
    if (path / "config.json").exists():
        config = read_json_as(path / "config.json", dict[str, Any])
        shown = ("architectures", "model_type", "is_causal", "hidden_size", "num_hidden_layers", "vocab_size")
        facts = ", ".join(f"{key} {json.dumps(config[key])}" for key in shown if key in config)
        return f"model {path}: {facts}"
    raise InputError(f"{path} holds no shards (manifest.json), run (config.yaml) or model (config.json)")


def describe_run_folder(run: Run, *, verify: bool) -> str:
    recipe, done = read_recipe(run), read_done(run)
    train, steps = read_metrics(run, "train"), whole_steps(run)
    at = train[-1]["step"] if train else 0
    lines = [
        f"run {run.path}: {f'step {at} of {recipe.num_steps}' if done is None else 'done'}",
        "curriculum: " + " → ".join(f"{phase.label} {phase.steps}" for phase in recipe.curriculum),
        "checkpoints: " + (", ".join(f"@{step}" for step in steps) or "none"),
    ]
    if train:
        last = train[-1]
        lines.append(f"last loss {last['loss']:.3f} ({last['objective']}), {last['tokens_seen']:,} tokens seen")
    lines += [
        f"validation at {row['step']}: {row['objective']} loss {row['loss']:.3f}, accuracy {row['accuracy']:.1%}, "
        f"{row['bits_per_byte']:.3f} bits per byte"
        for row in read_metrics(run, "validation")[-3:]
    ]
    if verify:
        read_json_as(run.path / "environment.json", dict[str, Any])
        for step in steps:
            describe_checkpoint(run.steps / str(step))
        lines.append(f"verified: {len(steps)} checkpoints are whole")
    return "\n".join(lines)


def describe_checkpoint(folder: Path) -> str:
    """Reads and compares every file: a checkpoint that is described is whole."""
    from biphase.pretraining.checkpoint import read_checkpoint_manifest

    manifest = read_checkpoint_manifest(folder)
    state = "in decay" if manifest.is_decayed else "undecayed"
    parent = f"{manifest.parent[:16]} (carried: {', '.join(manifest.carried)})" if manifest.parent else "none"
    return "\n".join(
        [
            f"checkpoint {folder}: whole, step {manifest.step}, {state}",
            f"objective {manifest.objective}, {manifest.tokens_seen:,} tokens seen",
            f"content {manifest.content[:16]}, data {manifest.data_fingerprint[:16]}, "
            f"tokenizer {manifest.tokenizer_hash[:16]}",
            f"parent: {parent}",
        ]
    )
