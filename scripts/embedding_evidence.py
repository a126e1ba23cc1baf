"""Beside the study `embedding`: the pairs of people that it trains on, and what stands beside its networks.

    python scripts/embedding_evidence.py pairs --out .               # writes squad.jsonl and snli.jsonl
    biphase study run embedding
    python scripts/embedding_evidence.py beside MODEL --out beside   # MODEL: one of its networks, RUN[@STEP]

No test query of SQuAD's passages, and no passage that a test query asks for, is among the pairs: what would be is left
out, and counted. Beside the networks stand BM25, the network as it is, and static embeddings of its tokens trained by
the study's recipe, each on all test queries over whole collections. The same command goes on where it was stopped.

Reads `../shared/data` beside the repository, which is not part of it; without it, give --data.
"""

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"
STUDY = ROOT / "src" / "biphase" / "bundled" / "studies" / "embedding.yaml"
STATIC_RATE = 0.01
"""A table of vectors wants ten times the rate of a network."""


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def read_qrels(path: Path) -> list[tuple[str, str]]:
    """Query and document of each judgement above 0."""
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    return [(query, document) for query, document, grade in rows if int(grade) > 0]


def write_squad(data: Path, out: Path) -> None:
    """Training questions with their passages, without any question or passage of the test judgements."""
    folder = data / "squad_retrieval"
    test = read_qrels(folder / "qrels" / "test.tsv")
    queries = {row["_id"]: row["text"] for row in read_rows(folder / "queries.jsonl")}
    passages = {row["_id"]: row["text"] for row in read_rows(folder / "corpus.jsonl")}
    hidden = {queries[query] for query, _ in test} | {passages[document] for _, document in test}
    rows, left_out = [], 0
    for query, document in read_qrels(folder / "qrels" / "train.tsv"):
        if queries[query] in hidden or passages[document] in hidden:
            left_out += 1
        else:
            rows.append({"anchor": queries[query], "positive": passages[document]})
    print(f"SQuAD: {len(rows):,} pairs, {left_out} left out")
    write_rows(out / "squad.jsonl", rows)


def write_snli(data: Path, out: Path) -> None:
    """Premises with what follows from them and what contradicts them."""
    by_premise: dict[str, dict[int, str]] = {}
    for row in read_rows(data / "snli" / "validation.jsonl"):
        by_premise.setdefault(row["premise"], {})[row["label"]] = row["hypothesis"]
    rows = [
        {"anchor": premise, "positive": found[0], "negative": found[2]}
        for premise, found in by_premise.items()
        if 0 in found and 2 in found
    ]
    write_rows(out / "snli.jsonl", rows)


def train_static(recipe: Any, out: Path, width: int | None) -> Any:
    """Static embeddings of the model's tokens, by the recipe's stages; as wide as the network unless given."""
    import torch
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    from biphase.embedding.pairs import read_pairs
    from biphase.embedding.training import StageRun, train_stage
    from biphase.finetuning.heads import load_encoder

    encoder = load_encoder(recipe.model)
    torch.manual_seed(recipe.seed)
    network: Any = encoder.backbone
    backend = encoder.tokenizer.pretrained.backend_tokenizer
    model = SentenceTransformer(
        modules=[StaticEmbedding(backend, embedding_dim=width or network.config.hidden_size)],
        similarity_fn_name="cosine",
    )
    for stage in recipe.stages:
        found = [read_pairs(source, recipe.seed) for source in stage.data]
        tables = {f"s{number}": (pairs.kind, Dataset(InMemoryTable(pairs.table))) for number, pairs in enumerate(found)}
        stage = stage.model_copy(update={"learning_rate": STATIC_RATE})
        train_stage(StageRun(recipe, stage, model, out / recipe.name / stage.name), tables)
    return model


def score_beside(options: argparse.Namespace) -> None:
    from biphase.embedding.evaluation import read_judged_set, score_bm25, score_embedder
    from biphase.embedding.model import load_embedder
    from biphase.files import write_json
    from biphase.studies.spec import load_study

    evaluation = load_study(options.study).evaluation
    embed = evaluation.embed if evaluation else None
    if embed is None:
        raise SystemExit(f"{options.study} has no evaluation.embed")
    judged = [read_judged_set(Path(path)) for path in embed.data]
    kept = options.out / "scores.json"
    scores: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    for name in ["BM25", "export", *(f"static{options.width or ''}-{seed}" for seed in options.seeds)]:
        if name in scores:
            continue
        if name == "BM25":
            scores[name] = {each.name: score_bm25(each) for each in judged}
        else:
            own = {"name": name, "model": options.model, "seed": int(name.partition("-")[2] or 0)}
            recipe = embed.settle().model_copy(update=own)
            model = (
                load_embedder(options.model) if name == "export" else train_static(recipe, options.out, options.width)
            )
            scores[name] = {each.name: score_embedder(model, each)[0] for each in judged}
        write_json(kept, scores)
    for name, sets in scores.items():
        print(name, {each: f"recall@10 {metrics['recall_at_10']:.3f}" for each, metrics in sets.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    pairs = parts.add_parser("pairs")
    pairs.add_argument("--data", type=Path, default=SHARED)
    beside = parts.add_parser("beside")
    beside.add_argument("model", help="a network of the study, RUN[@STEP], or an exported encoder")
    beside.add_argument("--study", type=Path, default=STUDY)
    beside.add_argument("--width", type=int, help="of the static embeddings; that of the network unless given")
    beside.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    for part in (pairs, beside):
        part.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.part == "beside":
        return score_beside(options)
    if not options.data.is_dir():
        parser.error(f"{options.data} is not here: give --data")
    write_squad(options.data, options.out)
    write_snli(options.data, options.out)


if __name__ == "__main__":
    main()
