"""Model cards: fields for the Hub and a template; the history of a run in words, and its loss curves."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import transformers
import yaml
from huggingface_hub import ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from transformers import PreTrainedModel

from biphase import __version__, console
from biphase.curriculum import OBJECTIVES, phases_between
from biphase.encoder.network import language_model_class
from biphase.encoder.proofs import window_of
from biphase.errors import InputError
from biphase.files import write_text
from biphase.run import (
    CheckpointManifest,
    Run,
    find_checkpoint,
    read_checkpoint_manifest,
    read_metrics,
    read_recipe,
    split_reference,
)
from biphase.style import LOOKS, PLOT_STYLE, plot_losses

FLOOR = "5.17"
"""The first version of transformers in which all adapted decoders are bidirectional."""

MISREAD = (
    "AutoTokenizer takes {chosen} for type '{type}', which splits texts differently than in training: load the "
    "tokenizer with PreTrainedTokenizerFast.from_pretrained"
)


def render_card(template: Path, head: ModelCardData, **facts: Any) -> str:
    """Render a model card as Markdown: the fields for the Hub, and a template filled with `facts`."""
    shared = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=shared, trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
    environment.globals |= {"harmless": harmless, "window_of": window_of}
    environment.filters["yaml"] = partial(yaml.safe_dump, sort_keys=False, allow_unicode=True)
    facts |= {"version": __version__, "transformers_version": transformers.__version__, "floor": FLOOR}
    text = environment.from_string(template.read_text(encoding="utf-8")).render(facts)
    return f"---\n{head.to_yaml()}\n---\n\n{text}"


def describe_export(
    run: Run, manifest: CheckpointManifest, name: str, network: PreTrainedModel, eos: str, merged: str, misread_as: str
) -> str:
    """Write the model card of a checkpoint.

    Args:
        eos: the end-of-text token.
        merged: a line about the decoder that the network was averaged with, or "".
        misread_as: the class that `AutoTokenizer` loads, if it splits texts differently than in training, or "".
    """
    base, history = tell_history(run, manifest)
    auto_class = language_model_class(network.config).__name__
    objective = OBJECTIVES[manifest.objective]
    # The pipeline fill-mask accepts no decoder, and no pipeline reads the position before a mask, as MNTP needs.
    fills = (manifest.objective, auto_class) == ("mlm", "AutoModelForMaskedLM")
    pipeline_tag = "text-generation" if objective.is_dense else "fill-mask" if fills else "feature-extraction"
    tags = ["biphase", network.config.model_type]
    head = ModelCardData(library_name="transformers", pipeline_tag=pipeline_tag, base_model=base, tags=tags)
    config = read_recipe(run).model_dump(mode="json")  # without the paths of this machine
    texts = [(member, "path") for member in config["data"].get("mixture") or ()]
    config["data"]["shards"] = Path(config["data"]["shards"]).name
    for settings, key in ((config["init"], "model"), (config["init"], "checkpoint"), *texts):
        if settings[key] and Path(settings[key]).is_absolute():
            settings[key] = Path(settings[key]).name
    return render_card(
        Path(__file__).with_name("card.md.j2"),
        head,
        title=harmless(name),
        name=json.dumps(name, ensure_ascii=False)[1:-1],
        network=network,
        auto_class=auto_class,
        misread=misread_as and MISREAD.format(chosen=misread_as, type=network.config.model_type),
        eos=eos,
        history=history,
        manifest=manifest,
        objective=objective,
        merged=merged,
        validation=[row for row in read_metrics(run, "validation") if row["step"] <= manifest.run_step],
        recipe=config,
    )


def add_chapter(folder: Path, title: str, lines: Sequence[str]) -> None:
    """Add a chapter to the card of a model folder, or begin a card with it, and print its paragraphs."""
    card = folder / "README.md"
    name = folder.name.removeprefix(".").removesuffix(".part")  # while it is written
    before = card.read_text(encoding="utf-8") if card.exists() else f"# {name}\n"
    write_text(card, "\n\n".join([before.rstrip("\n"), f"## {title}", *lines]) + "\n")
    for line in lines:
        console.out.prose(line.replace("`", ""))


def with_network(card: str, network: PreTrainedModel) -> str:
    """Return the card of a checkpoint, as `describe_export` begins it, with the class and the size of another
    network."""
    told = f"`{type(network).__name__}` of {network.num_parameters() / 1e6:.1f}M parameters"
    return re.sub(r"^(A (causal|bidirectional)) `\w+` of [\d.]+M parameters", rf"\1 {told}", card, flags=re.MULTILINE)


def harmless(text: str) -> str:
    """Make a user's text safe in a card: quote it as code if it has characters of Markdown or HTML."""
    if re.fullmatch(r"[\w ./@:+(),%-]*", text):
        return text
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{text!r}{fence}"


def tell_history(run: Run, manifest: CheckpointManifest) -> tuple[str | None, list[str]]:
    """Describe the history of a checkpoint: return the Hub id of the model at its beginning, if any, and a line for the
    beginning and for each run since, as far back as its parents still exist unchanged."""
    recipe = read_recipe(run)
    init = recipe.init
    trained = phases_between(recipe.curriculum, 0, manifest.run_step)
    phases = [f"{phase.steps:,} steps of {phase.words}" for phase in trained]
    inherited = f", with the parent's {' and '.join(manifest.carried)}" if manifest.parent else ""
    settings = f"{recipe.batch_label} tokens a step, peak rate {recipe.schedule.peak_lr}"
    line = f"`{run.path.name}`: {' → '.join(phases)}, {settings}{inherited}."
    base: str | None = None
    before = [f"Random weights of preset `{init.preset}`."]
    if init.model:
        base = find_hub_id(init.model) if "@" in (init.reference or "") else None  # a folder has no commit
        before = [f"The model `{init.model if base else Path(init.model).name}`."]
    elif init.checkpoint:
        base, before = tell_parent(init.checkpoint, manifest.parent or "")
    return base, [*before, line]


def find_hub_id(model: str) -> str | None:
    """Find the Hub id in a model's name, without its revision; None for a path."""
    id = model.partition("@")[0]
    is_path = any(place.exists() for place in (Path(model), Path(id), *Path(id).parents[:-1]))
    return id if re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", id) and not is_path else None


def tell_parent(reference: str, content: str) -> tuple[str | None, list[str]]:
    """Describe the history of RUN@STEP with this content hash; if its checkpoint is gone, use the run's last one."""
    path, step = split_reference(reference)
    run = Run(Path(path))
    try:
        parent = read_checkpoint_manifest(find_checkpoint(reference), check_files=False)
    except InputError:
        try:
            last = read_checkpoint_manifest(find_checkpoint(path), check_files=False)
        except InputError:
            return None, [f"`{run.path.name}`, which is not here any more (`{content[:16]}`)."]
        passed = last.run_step - (last.step - int(step))
        base, [*before, line] = tell_history(run, replace(last, step=int(step), run_step=passed))
        return base, [*before, f"{line.removesuffix('.')}; this checkpoint (`{content[:16]}`) is not here any more."]
    if parent.content != content:
        return None, [f"`{run.path.name}` as it was (`{content[:16]}`): it has been trained again since."]
    return tell_history(run, parent)


def draw_curves(run: Run, last_step: int, path: Path) -> None:
    """Draw training and validation loss over steps as a PNG, with a colour per objective."""
    from matplotlib import style
    from matplotlib.figure import Figure

    rows = [row for row in (*read_metrics(run, "train"), *read_metrics(run, "validation")) if row["step"] <= last_step]
    with style.context(PLOT_STYLE):
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot()
        for objective in dict.fromkeys(row["objective"] for row in rows if row["kind"] == "train"):
            labels = f"{OBJECTIVES[objective].title}, training", f"{OBJECTIVES[objective].title}, validation"
            plot_losses([row for row in rows if row["objective"] == objective], LOOKS[objective], labels, axes)
        axes.legend()
        figure.savefig(path, dpi=150, facecolor="white")
