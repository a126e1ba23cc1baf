"""A recipe → an embedding model in one folder: sources checked, stages trained one after the other, the best kept safe.

runs/NAME-HASH8/  config.yaml  stages/NAME/{FILES}  done.json

A stage's FILES: pairs.json, trainer/, negatives-N.arrow, taught-N.arrow, model/, done.json.

Each stage is written last, renamed and marked done; a stage that was interrupted goes on from its last checkpoint.

A study has one recipe for all its models: a pretrained network and that recipe → an embedding model, its scores as
cells.
"""

import copy
import random
import shutil
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import yaml
from datasets import Dataset, disable_progress_bars
from datasets.table import InMemoryTable
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import nn

from biphase import console, files
from biphase.config import parse_config
from biphase.corpus.tokenizer import misreading_class
from biphase.device import choose_device, choose_dtype, describe_machine
from biphase.embedding import model as embedders
from biphase.embedding import training
from biphase.embedding.evaluation import JudgedSet, read_judged_set, score_arms, score_bm25, score_embedder
from biphase.embedding.pairs import Pairs, check_paths, check_stage, hash_pairs, read_pairs
from biphase.embedding.recipe import EmbeddingRecipe
from biphase.embedding.training import StageRun
from biphase.encoder.network import layer_cosines, load_backbone, merge_weights
from biphase.encoder.packed import explain_computing
from biphase.errors import InputError, memory_told
from biphase.files import content_hash, read_json, write_json
from biphase.finetuning.cells import find_folder, identify
from biphase.finetuning.config import EVALUATED_SPLITS, PLACEMENT, PROTOCOL, FinetuneConfig
from biphase.finetuning.metrics import BM25
from biphase.finetuning.scores import Score, read_score, write_cell

EMBEDDER_MAX_LENGTH = 512
TRAINED = "this model"
FURTHER_MODULES = "modules.safetensors"
Sources = dict[str, list[Pairs]]
"""The sources of each stage, by its name."""
NOTED_ROWS = 1000
"""The first rows of a source, and their number, tell one way of making pairs from another."""


def train_embedder(recipe: EmbeddingRecipe, runs: Path) -> tuple[Path, dict[str, Any]]:
    """Train what is missing and write the folder `recipe.out`; the same call goes on after a stop or a kill.

    Returns: the folder, and what is in its card.

    Raises:
        InputError: before anything trains, for what is wrong with the recipe, its sources, its model or its folder.
        StoppedError: after SIGTERM or SIGINT while a stage trains, once its state is saved.
    """
    out = Path(recipe.out)
    console.check_tracking(recipe.tracking)
    check_paths(recipe)
    device = choose_device(recipe.device)
    dtype = choose_dtype(recipe.precision, device)
    before, model = open_models(recipe)
    computing = explain_computing(recipe.precision, device, before[0].network)
    console.err.print(f"{computing} · not compiled (too short a run)")
    sources = read_sources(recipe, before)
    datasets = [read_judged_set(Path(path)) for path in recipe.evaluation]
    hashes = [pairs.hash for of_stage in sources.values() for pairs in of_stage]
    hashes += [embedders.hash_embedder(stage.teacher) for stage in recipe.stages if stage.teacher is not None]
    identity = recipe.identity(embedders.hash_embedder(recipe.model), [*hashes, str(dtype)])
    folder = runs / f"{recipe.name}-{identity[:8]}"
    stage_folders = [folder / "stages" / stage.name for stage in recipe.stages]
    written = [part / name for part in stage_folders for name in ("trainer", "model")]
    files.refuse_links(folder / "stages", *stage_folders, *written)
    with files.locked(folder / "lock"):
        settings = recipe.model_dump(mode="json")
        files.write_text(folder / "config.yaml", yaml.safe_dump(settings, sort_keys=False))
        tracking = None if (folder / "done.json").exists() else recipe.tracking
        with console.open_tracking(tracking, folder, settings, steps_done(recipe, folder) + 1) as send:
            bf16 = dtype == torch.bfloat16
            records = run_stages(recipe, sources, model.to(device), folder, bf16, send)
            facts = {"stages": records} | finish(recipe, model, before, datasets)
            record: dict[str, Any] = {"kind": "validation", "step": sum(stage["steps"] for stage in records)}
            for name, arms in facts["scores"].items():
                record |= {f"{name}/{metric}": score for metric, score in arms[TRAINED].items()}
            send(record)
        texts = [text for pairs in sources[recipe.stages[0].name] for text in pairs.table["positive"][:8].to_pylist()]
        embedders.write_embedder(model, recipe, facts, [*texts, "a"], out)
        write_json(folder / "done.json", facts | {"out": str(out)})
    return out, facts


def open_models(recipe: EmbeddingRecipe) -> tuple[Any, Any]:
    """Make the network before training, from the recipe's seed where it is random, and its copy to train. Raises
    `InputError` where no folder for sentence-transformers could be written, or token embeddings cannot be scaled."""
    console.err.print(f"loading {recipe.model}")
    tell_unused_modules(recipe)
    torch.manual_seed(recipe.seed)
    before: Any = embedders.make_embedder(
        recipe.model, recipe.max_length, recipe.pooling, dense=recipe.dense, weights=recipe.weights
    )
    if recipe.max_length is None:
        before.max_seq_length = min(EMBEDDER_MAX_LENGTH, before.max_seq_length)
    before.prompts = recipe.prompts.model_dump()
    config = before[0].network.config
    if misread_as := misreading_class(before[0].tokenizer, config):
        message = f"sentence-transformers would take {misread_as} for its type '{config.model_type}'"
        raise InputError(f"{recipe.model}: {message}, and split texts otherwise: take another network or tokenizer")
    model = copy.deepcopy(before)
    if recipe.token_embedding_rms is not None:
        embedders.scale_token_embeddings(model[0], recipe.token_embedding_rms, whiten=recipe.whiten_token_embeddings)
    return before, model


def tell_unused_modules(recipe: EmbeddingRecipe) -> None:
    """Tell what an embedding model has beside its network, which alone is trained."""
    folder = find_folder(recipe.model)
    left_out = []
    for module in read_json(folder / "modules.json") if (folder / "modules.json").exists() else ():
        kind = module["type"].rpartition(".")[2]
        if kind == "Pooling":
            mode = Pooling.load(str(folder), subfolder=module["path"]).pooling_mode
            left_out += [f"its pooling {mode} (pooling is {recipe.pooling})"] if mode != recipe.pooling else []
        elif kind not in ("Transformer", "Normalize"):
            left_out.append(f"its {kind}")
    if left_out:
        console.err.print(f"{recipe.model}: the network alone is trained, without {', '.join(left_out)}")


def read_sources(recipe: EmbeddingRecipe, model: SentenceTransformer) -> Sources:
    """Read all sources of all stages, and make each loss once: mistakes are reported before anything trains."""
    sources: Sources = {}
    for stage in recipe.stages:
        tables = sources[stage.name] = [read_pairs(source, recipe.seed) for source in stage.data]
        check_stage(stage, tables)
        if (
            len({len(pairs.table.columns) for pairs in tables if pairs.kind == "pairs"}) > 1
            and stage.hard_negatives is None
        ):
            console.err.print(f"stage {stage.name}: its sources have unlike numbers of negatives", markup=False)
        training.load_teacher(stage, embedders.width_of(model))
        for kind in {pairs.kind for pairs in tables}:
            training.make_loss(model, stage, kind, recipe.matryoshka)
        for pairs in tables:
            if stage.hard_negatives is not None and len(pairs.table.columns) > 2:
                message = f"hard_negatives are for pairs alone, and {pairs.name} has scores or negatives of its own"
                raise InputError(f"stage {stage.name}: {message}: leave hard_negatives out, or name two of its columns")
            console.err.print(f"stage {stage.name}: {pairs.name}: {pairs.origin}", markup=False)
    return sources


def steps_done(recipe: EmbeddingRecipe, folder: Path) -> int:
    """Count the steps of the stages that are trained, and of an interrupted one up to its last checkpoint."""
    steps = 0
    for stage_folder in (folder / "stages" / stage.name for stage in recipe.stages):
        last = training.last_checkpoint(stage_folder / "trainer")
        if (stage_folder / "done.json").exists():
            steps += int(read_json(stage_folder / "done.json")["steps"])
        elif last is not None:
            steps += int(last.name.partition("-")[2])
    return steps


def run_stages(
    recipe: EmbeddingRecipe, sources: Sources, model: SentenceTransformer, folder: Path, bf16: bool, send: console.Send
) -> list[dict[str, Any]]:
    """Train the stages that are not done, one after the other; returns the record of each."""
    records: list[dict[str, Any]] = []
    network: Any = model[0]
    for stage in recipe.stages:
        stage_folder = folder / "stages" / stage.name
        if (stage_folder / "done.json").exists():
            files.refuse_damaged(stage_folder / "model", f"delete {stage_folder} and rerun")
            network.backbone = load_backbone(stage_folder / "model").to(model.device)
            if recipe.dense:
                further_modules(model).load_state_dict(load_file(stage_folder / "model" / FURTHER_MODULES))
            console.err.print(f"stage {stage.name}: done before", markup=False)
            records.append(read_json(stage_folder / "done.json"))
        else:
            before = sum(record["steps"] for record in records)
            run = StageRun(recipe, stage, model, stage_folder, bf16, send, before)
            records.append(run_stage(run, sources[stage.name]))
    return records


def further_modules(model: SentenceTransformer) -> nn.Module:
    """Return the modules behind the network."""
    return nn.Sequential(*list(model)[1:])


def run_stage(run: StageRun, sources: Sequence[Pairs]) -> dict[str, Any]:
    """Train the model in place, keep it, and return the record of the stage. Raises `InputError` where the stage began
    on other pairs."""
    stage, folder = run.stage, run.folder
    disable_progress_bars()
    folder.mkdir(parents=True, exist_ok=True)
    # The same text may have been cut in another way when the stage began.
    begun = content_hash([[len(pairs.table), pairs.table.slice(0, NOTED_ROWS).to_pydict()] for pairs in sources])
    if (folder / "pairs.json").exists() and read_json(folder / "pairs.json") != begun:
        raise InputError(f"stage {stage.name} began on pairs that were made in another way: delete {folder}")
    write_json(folder / "pairs.json", begun)
    tables = stage_tables(run, sources)
    names = {training.loss_name(stage, kind) for kind, _ in tables.values()}
    is_cached = any(name.startswith("cached") for name in names)
    key = f"mini_batch_tokens ({stage.mini_batch_tokens:,})" if is_cached else f"batch_size ({stage.batch_size:,})"
    with memory_told(f"stage {stage.name}: lower {key}"):
        trained = training.train_stage(run, tables)
    record = {
        "name": stage.name,
        "data": [f"{Path(pairs.name).name}: {pairs.origin}" for pairs in sources],
        "loss": ", ".join(sorted(names)),
        "last_loss": trained["losses"][-1]["loss"] if trained["losses"] else float("nan"),
        **trained,
    }
    with files.whole_folder(folder / "model") as whole:
        network: Any = run.model[0]
        network.network.save_pretrained(whole)
        if run.recipe.dense:
            save_file(further_modules(run.model).state_dict(), whole / FURTHER_MODULES)
        files.write_mark(whole, "model")
    write_json(folder / "done.json", record)
    for checkpoint in (folder / "trainer").glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    for taught in folder.glob("*taught-*.arrow*"):
        taught.unlink()
    return record


def stage_tables(run: StageRun, sources: Sequence[Pairs]) -> dict[str, tuple[str, Dataset]]:
    """Make the tables that a stage trains on: of each source, its kind and its rows, with hard negatives or a teacher's
    embeddings. Both are made once and kept in the folder."""
    stage, teacher = run.stage, training.load_teacher(run.stage, embedders.width_of(run.model))
    tables: dict[str, tuple[str, Dataset]] = {}
    for number, (source, pairs) in enumerate(zip(stage.data, sources, strict=True)):
        # An epoch goes through all rows `weight` times: through a fraction that is drawn with the seed, in order.
        whole, part = divmod(source.weight, 1)
        num_rows, seed = len(pairs.table), run.recipe.seed
        is_drawn = np.zeros(num_rows, dtype=bool)
        is_drawn[random.Random(seed).sample(range(num_rows), round(part * num_rows))] = True
        rows = pa.concat_tables([*[pairs.table] * int(whole), pairs.table.filter(pa.array(is_drawn))])
        # With a fingerprint, as `datasets` would make one of all texts, copied.
        fingerprint = content_hash([pairs.hash, source.weight, seed])[:16]
        table = Dataset(InMemoryTable(rows), fingerprint=fingerprint)
        if stage.hard_negatives is not None:
            path = run.folder / f"negatives-{number}.arrow"
            table = training.mine_once(table, run.model, stage.name, stage.hard_negatives, path)
        if teacher is not None:
            table = training.teach_once(table, teacher, stage.name, run.folder / f"taught-{number}.arrow")
        tables[f"source_{number}"] = pairs.kind, table
    return tables


def finish(
    recipe: EmbeddingRecipe, model: SentenceTransformer, before: SentenceTransformer, datasets: Sequence[JudgedSet]
) -> dict[str, Any]:
    """Merge the network with what it was before, and say how far each layer moved and what both score."""
    cosines = layer_cosines(model[0], before[0])
    if recipe.merge:
        merge_weights(model[0], before[0], recipe.merge)
    model.eval()
    models = {TRAINED: model, "before training": before}
    is_whole = recipe.stages[-1].loss == "distill"  # a teacher's embeddings are learnt in all dimensions at once
    return {
        "dims": training.matryoshka_dims(embedders.width_of(model), recipe.matryoshka and not is_whole),
        "cosines": cosines,
        "scores": {dataset.name: score_arms(models, dataset) for dataset in datasets},
    }


def score_embedding(
    model: str,
    label: str,
    recipe: Mapping[str, Any],
    paths: Mapping[str, str],
    trained_on: str,
    config: FinetuneConfig,
    out: Path,
) -> list[Score]:
    """Train what is missing, keep the embedding model in `out`, and score it on every set (`paths`: name → path).

    `trained_on` names the recipe; `config` says the seed, and whether weights are random.
    """
    model_hash = identify(model).hash
    settings = config.model_dump(mode="json", exclude=PLACEMENT)
    hashes = {name: content_hash([PROTOCOL, model_hash, trained_on, name, settings]) for name in paths}
    folders = {name: out / f"{name.replace(':', '-')}-{digest[:16]}" for name, digest in hashes.items()}
    unscored = [name for name, folder in folders.items() if not (folder / "score.json").exists()]
    if unscored:
        started = time.perf_counter()
        run_name = f"{trained_on.replace(':', '-')}-{config.weights}-{config.seed}"
        changes = {"name": run_name, "model": model, "seed": config.seed, "weights": config.weights}
        changes["out"] = str(out / run_name)
        embedding_recipe = parse_config(EmbeddingRecipe, {**recipe, **changes}, origin="evaluation.embed")
        sets = {name: read_judged_set(Path(paths[name])) for name in unscored}
        pairs = [hash_pairs(source) for stage in embedding_recipe.stages for source in stage.data]
        embedder_folder, facts = train_embedder(embedding_recipe, out / "runs")
        embedder, seconds = embedders.load_embedder(str(embedder_folder)), time.perf_counter() - started
        losses = [logged["loss"] for stage in facts["stages"] for logged in stage["losses"]]
        for name, judged in sets.items():
            started = time.perf_counter()
            metrics, judgements = score_embedder(embedder, judged)
            rows = list(judgements)
            spent = {"train": seconds, "evaluate": time.perf_counter() - started}
            score = Score(
                protocol=PROTOCOL,
                cell=hashes[name],
                model=label,
                model_hash=model_hash,
                task=name,
                trained_on=trained_on,
                source=paths[name],
                data_hash=content_hash([judged.hash, pairs]),
                metric=judged.metric,
                config=config,
                metrics=dict.fromkeys(EVALUATED_SPLITS, metrics | score_words(paths[name])),
                num_examples=dict.fromkeys(EVALUATED_SPLITS, len(rows)),
                num_steps=sum(stage["steps"] for stage in facts["stages"]),
                final_loss=losses[-1] if losses else None,
                seconds={part: round(value, 3) for part, value in spent.items()},
                machine=describe_machine(choose_device(embedding_recipe.device)),
            )
            write_cell(folders[name], score, losses, {"test": rows})
    return [read_score(folder) for folder in folders.values()]


@cache
def score_words(path: str) -> dict[str, float]:
    """Score BM25 (nDCG@10) on a set of documents: once in a process, as it is the same beside every model. Pairs of
    texts have no such score."""
    judged = read_judged_set(Path(path))
    return {BM25: score_bm25(judged)["ndcg_at_10"]} if judged.documents else {}
