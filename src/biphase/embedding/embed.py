"""A recipe → an embedding model in one folder: sources checked, stages trained one after the other, the best kept safe.

runs/NAME-HASH8/  config.yaml  stages/NAME/{trainer/, negatives-N.parquet, model/, done.json}  done.json

Each stage is written last, renamed and marked done; a stage that was interrupted goes on from its last checkpoint.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import Dataset
from sentence_transformers import SentenceTransformer

from biphase import console
from biphase.device import choose_device, choose_dtype
from biphase.embedding.evaluation import Judged, read_judged, score_bm25, score_embedder
from biphase.embedding.folder import hash_embedder, write_embedder
from biphase.embedding.packed_module import PackedTransformer, make_embedder
from biphase.embedding.pairs import Pairs, check_stage, read_pairs
from biphase.embedding.recipe import EmbeddingRecipe, EmbeddingStage
from biphase.embedding.training import (
    add_teacher,
    load_teacher,
    loss_name,
    make_loss,
    matryoshka_dims,
    mine,
    to_table,
    train_stage,
)
from biphase.encoder.attention import explain_computing
from biphase.encoder.load import load_backbone
from biphase.encoder.merging import layer_cosines, merge_weights
from biphase.errors import InputError
from biphase.files import locked, read_json, refuse_foreign, whole_folder, write_json, write_text
from biphase.tracking import check_tracking

EMBEDDER_MAX_LENGTH = 512


@dataclass(frozen=True)
class Embedding:
    """A recipe with all that it names, read and checked; where it runs."""

    recipe: EmbeddingRecipe
    sources: dict[str, list[Pairs]]
    """By stage."""
    judged: list[Judged]
    folder: Path
    device: torch.device
    bf16: bool


def train_embedder(recipe: EmbeddingRecipe, runs: Path) -> tuple[Path, dict[str, Any]]:
    """Train what is missing and write the folder `recipe.out`; the same call goes on after a kill.

    Returns: the folder, and what is in its card.

    Raises:
        InputError: before anything trains, for what is wrong with the recipe, its sources, its model or its folder.
    """
    out = Path(recipe.out)
    check_tracking(recipe.tracking)
    refuse_foreign(out, "embedding model")
    device = choose_device(recipe.device)
    dtype = choose_dtype(recipe.precision, device)
    console.err.print(f"{explain_computing(recipe.precision, device)} · not compiled (too short a run)")
    before = new_embedder(recipe)
    sources = read_sources(recipe, before)
    judged = [read_judged(Path(path)) for path in recipe.evaluation]
    hashes = [pairs.hash for found in sources.values() for pairs in found]
    identity = recipe.identity(hash_embedder(recipe.model), [*hashes, str(dtype)])
    folder = runs / f"{recipe.name}-{identity[:8]}"
    folder.mkdir(parents=True, exist_ok=True)
    job = Embedding(recipe, sources, judged, folder, device, dtype == torch.bfloat16)
    with locked(folder / "lock"):
        write_text(folder / "config.yaml", yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))
        model, records = train_stages(job)
        return out, finish(job, model, before, records, out)


def new_embedder(recipe: EmbeddingRecipe) -> SentenceTransformer:
    """The network before any training, from the recipe's seed where it is random."""
    torch.manual_seed(recipe.seed)
    model: Any = make_embedder(recipe.model, recipe.max_length, recipe.pooling, weights=recipe.weights)
    if recipe.max_length is None:
        model.max_seq_length = min(EMBEDDER_MAX_LENGTH, model.max_seq_length)
    model.prompts = recipe.prompts.model_dump()
    return model


def read_sources(recipe: EmbeddingRecipe, model: SentenceTransformer) -> dict[str, list[Pairs]]:
    """All sources of all stages, and a first look at each loss: what is wrong is said before anything trains."""
    width = model.get_embedding_dimension()
    assert width is not None
    sources: dict[str, list[Pairs]] = {}
    for stage in recipe.stages:
        found = sources[stage.name] = [read_pairs(source, recipe.seed) for source in stage.data]
        check_stage(stage.name, found, stage.batch_size)
        if len({pairs.columns for pairs in found if pairs.kind == "pairs"}) > 1 and stage.hard_negatives is None:
            console.err.print(f"stage {stage.name}: its sources have unlike numbers of negatives", markup=False)
        load_teacher(stage, width)
        for kind in {pairs.kind for pairs in found}:
            make_loss(model, stage, kind, recipe.matryoshka)
            if stage.hard_negatives is not None and kind == "scored":
                raise InputError(f"stage {stage.name}: hard_negatives are mined for pairs, not for scored ones")
        for pairs in found:
            console.err.print(f"stage {stage.name}: {pairs.name}: {pairs.made}", markup=False)
    return sources


def train_stages(job: Embedding) -> tuple[SentenceTransformer, list[dict[str, Any]]]:
    """The network after the last stage, on the device, and what each stage was."""
    model: Any = new_embedder(job.recipe).to(job.device)
    records = []
    for stage in job.recipe.stages:
        folder = job.folder / "stages" / stage.name
        if (folder / "done.json").exists():
            packed = PackedTransformer(load_backbone(folder / "model"), model[0].tokenizer, model.max_seq_length)
            modules = [packed, *list(model)[1:]]
            model = SentenceTransformer(modules=modules, prompts=model.prompts, similarity_fn_name="cosine")
            model = model.to(job.device)
            records.append(read_json(folder / "done.json"))
            console.err.print(f"stage {stage.name}: done before", markup=False)
            continue
        folder.mkdir(parents=True, exist_ok=True)
        record = run_stage(job, stage, model, folder)
        with whole_folder(folder / "model") as part:
            model[0].network.save_pretrained(part)
        write_json(folder / "done.json", record)
        records.append(record)
        for checkpoint in (folder / "trainer").glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
    return model, records


def run_stage(job: Embedding, stage: EmbeddingStage, model: SentenceTransformer, folder: Path) -> dict[str, Any]:
    """Train one stage; hard negatives are mined once, and kept."""
    width = model.get_embedding_dimension()
    assert width is not None
    teacher = load_teacher(stage, width)
    tables: dict[str, tuple[str, Dataset]] = {}
    for number, (source, pairs) in enumerate(zip(stage.data, job.sources[stage.name], strict=True)):
        table = to_table(pairs, source.weight, job.recipe.seed)
        if stage.hard_negatives is not None:
            kept = folder / f"negatives-{number}.parquet"
            if not kept.exists():
                mined = mine(table, model, stage.hard_negatives, job.recipe.prompts, job.recipe.seed)
                part = kept.with_suffix(".part")
                mined.to_parquet(str(part))
                part.rename(kept)
            mined = Dataset.from_parquet(str(kept), cache_dir=str(folder / "cache"))
            console.err.print(
                f"stage {stage.name}: {len(mined):,} of {len(table):,} pairs have {stage.hard_negatives.number} hard "
                "negatives",
                markup=False,
            )
            table = mined
        tables[f"source_{number}"] = pairs.kind, add_teacher(table, teacher) if teacher else table
    found = train_stage(model, job.recipe, stage, tables, folder / "trainer", bf16=job.bf16, device=job.device)
    return {
        "name": stage.name,
        "data": [f"{Path(pairs.name).name}: {pairs.made}" for pairs in job.sources[stage.name]],
        "loss": ", ".join(sorted({loss_name(stage, kind) for kind, _ in tables.values()})),
        "last_loss": found["losses"][-1]["loss"] if found["losses"] else float("nan"),
        **found,
    }


def finish(
    job: Embedding,
    model: SentenceTransformer,
    before: SentenceTransformer,
    records: Sequence[dict[str, Any]],
    out: Path,
) -> dict[str, Any]:
    """Merge, evaluate, tell how far each layer moved, and write the folder."""
    recipe = job.recipe
    trained, old = model[0], before[0]
    cosines = layer_cosines(trained, old)
    if recipe.merge:
        merge_weights(trained, old, recipe.merge)
    model.eval()
    scores: dict[str, dict[str, dict[str, float]]] = {}
    for judged in job.judged:
        scores[judged.name] = {
            "this model": score_embedder(model, judged),
            "before training": score_embedder(before, judged),
        }
        if judged.documents:
            scores[judged.name]["BM25"] = score_bm25(judged)
    width = model.get_embedding_dimension()
    assert width is not None
    facts = {
        "stages": list(records),
        "dims": matryoshka_dims(width, recipe.matryoshka),
        "cosines": cosines,
        "scores": scores,
    }
    texts = [row[1] for pairs in job.sources[recipe.stages[0].name] for row in pairs.rows[:8]]
    write_embedder(model, recipe, facts, [*texts, "a"], out)
    write_json(job.folder / "done.json", facts | {"out": str(out)})
    return facts
