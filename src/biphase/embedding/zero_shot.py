"""A pretrained network and the recipe that a study has for all → an embedding model, its zero-shot scores as cells.

Nothing is chosen on validation, as a recipe has one rate; so a score has the same values for both splits.
"""

import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer

from biphase.config import parse_config
from biphase.device import choose_device, describe_machine
from biphase.embedding.embed import train_embedder
from biphase.embedding.evaluation import Judged, read_judged, score_bm25, score_embedder
from biphase.embedding.folder import load_embedder
from biphase.embedding.pairs import hash_pairs
from biphase.embedding.recipe import EmbeddingRecipe
from biphase.files import content_hash
from biphase.finetuning.config import EVALUATED_SPLITS, PLACEMENT, PROTOCOL, FinetuneConfig
from biphase.finetuning.fit import write_cell
from biphase.finetuning.metrics.ranking import BM25
from biphase.finetuning.models import identify
from biphase.finetuning.scores import Score, read_score


def score_embedding(
    model: str,
    label: str,
    recipe: Mapping[str, Any],
    judged: Mapping[str, str],
    trained_on: str,
    config: FinetuneConfig,
    out: Path,
) -> list[Score]:
    """Train what is missing, keep the embedding model in `out`, and score it on every set (name → place).

    `trained_on` names the recipe; `config` says the seed, and whether weights are random.
    """
    model_hash = identify(model).hash
    settings = config.model_dump(mode="json", exclude=PLACEMENT)
    hashes = {name: content_hash([PROTOCOL, model_hash, trained_on, name, settings]) for name in judged}
    folders = {name: out / f"{name.replace(':', '-')}-{digest[:16]}" for name, digest in hashes.items()}
    missing = [name for name, folder in folders.items() if not (folder / "score.json").exists()]
    if missing:
        started = time.perf_counter()
        own = f"{trained_on.replace(':', '-')}-{config.weights}-{config.seed}"
        given = {"name": own, "model": model, "seed": config.seed, "weights": config.weights, "out": str(out / own)}
        settled = parse_config(EmbeddingRecipe, {**recipe, **given}, origin="evaluation.embed")
        sets = {name: read_judged(Path(judged[name])) for name in missing}
        pairs = [hash_pairs(source) for stage in settled.stages for source in stage.data]
        kept, facts = train_embedder(settled, out / "runs")
        embedder, seconds = load_embedder(str(kept)), time.perf_counter() - started
        machine = describe_machine(choose_device(settled.device))
        known = {"model": label, "model_hash": model_hash, "trained_on": trained_on}
        for name in missing:
            own_facts = known | {"task": name, "source": judged[name], "cell": hashes[name]}
            own_facts["data_hash"] = content_hash([sets[name].hash, pairs])
            score_set(embedder, sets[name], folders[name], facts, seconds, config=config, machine=machine, **own_facts)
    return [read_score(folder) for folder in folders.values()]


@cache
def score_words(place: str) -> float:
    """BM25's nDCG@10 on a set: once in a process, as it is the same beside every model."""
    return score_bm25(read_judged(Path(place)))["ndcg_at_10"]


def score_set(
    embedder: SentenceTransformer, judged: Judged, folder: Path, facts: dict[str, Any], seconds: float, **known: Any
) -> None:
    """Write the cell of one set: what is `known` of it, and the scores of a model that was trained in `seconds`."""
    started = time.perf_counter()
    metrics, judgements = score_embedder(embedder, judged)
    if judged.documents:
        metrics = metrics | {BM25: score_words(known["source"])}
    rows = list(judgements)
    spent = {"train": seconds, "evaluate": time.perf_counter() - started}
    losses = [logged["loss"] for stage in facts["stages"] for logged in stage["losses"]]
    score = Score(
        **known,
        protocol=PROTOCOL,
        metric=judged.metric,
        metrics=dict.fromkeys(EVALUATED_SPLITS, metrics),
        num_examples=dict.fromkeys(EVALUATED_SPLITS, len(rows)),
        num_truncated={},
        num_left_out=0,
        num_steps=sum(stage["steps"] for stage in facts["stages"]),
        diverged=False,
        diverged_at_step=None,
        final_loss=losses[-1] if losses else None,
        seconds={part: round(value, 3) for part, value in spent.items()},
        tokens_per_second={},
        peak_memory_bytes=0,
    )
    write_cell(folder, score, losses, {"test": rows})
