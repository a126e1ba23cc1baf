"""What does contrastive training make of an encoder: how many right passages are among its first ten, beside BM25?

    python scripts/embedding_evidence.py encoder --out evidence          # an encoder of `biphase export`

One recipe for every arm: pairs of plain text, then questions of SQuAD and entailments of SNLI, for the pretrained
network, the same network from random weights, and static embeddings of its tokens. Beside them: the export as it is and
BM25. Judged are all test queries of SQuAD's passages, Cranfield and long Wikipedia articles over whole collections. No
test query, and no passage that a test query asks for, is trained on: what would be is left out here, and counted. The
same command goes on where it was stopped.

Reads `../shared/data` beside the repository, which is not part of it; without it, give --data.
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
JUDGED = ("squad_retrieval", "cranfield", "wiki_longdoc_ict")


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def read_qrels(path: Path) -> list[tuple[str, str]]:
    """Query and document of each judgement above 0."""
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    return [(query, document) for query, document, grade in rows if int(grade) > 0]


def write_squad(data: Path, out: Path) -> str:
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
    return write_rows(out / "squad.jsonl", rows)


def write_snli(data: Path, out: Path) -> str:
    """Premises with what follows from them and what contradicts them."""
    by_premise: dict[str, dict[int, str]] = {}
    for row in read_rows(data / "snli" / "validation.jsonl"):
        by_premise.setdefault(row["premise"], {})[row["label"]] = row["hypothesis"]
    rows = [
        {"anchor": premise, "positive": found[0], "negative": found[2]}
        for premise, found in by_premise.items()
        if 0 in found and 2 in found
    ]
    return write_rows(out / "snli.jsonl", rows)


def recipe_tree(options: argparse.Namespace, seed: int, weights: str, squad: str, snli: str) -> dict[str, Any]:
    """The recipe of an arm; pairs of text, then pairs of people."""
    shards = sorted((options.data / "corpus").glob("train-*.jsonl.zst"))[: options.shards]
    crops = [{"from_text": str(path), "pairs": "crops", "limit": options.text_pairs // len(shards)} for path in shards]
    return {
        "name": f"evidence-{weights}-{seed}",
        "model": options.model,
        "out": str(options.out / f"{weights}-{seed}"),
        "weights": weights,
        "seed": seed,
        "max_length": options.max_length,
        "stages": [
            {"name": "text", "data": crops, "batch_size": options.batch_size, "learning_rate": options.rate},
            {
                "name": "people",
                "data": [{"path": squad}, {"path": snli}],
                "batch_size": options.batch_size,
                "learning_rate": options.rate / 2,
                "epochs": options.epochs,
            },
        ],
    }


def train_static(options: argparse.Namespace, seed: int, tree: dict[str, Any]) -> Any:
    """Static embeddings of the model's tokens, by the same stages; a gradient cache is of no use to them."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    from biphase.config import parse_config
    from biphase.embedding.pairs import read_pairs
    from biphase.embedding.recipe import EmbeddingRecipe
    from biphase.embedding.training import to_table, train_stage
    from biphase.finetuning.encoders import load_encoder

    rates = (f"stages.{number}.learning_rate=0.01" for number in range(2))
    losses = (f"stages.{number}.loss=mnrl" for number in range(2))
    recipe = parse_config(EmbeddingRecipe, tree, [*rates, *losses], origin="static")
    encoder = load_encoder(options.model)
    torch.manual_seed(seed)
    width = encoder.backbone.config.hidden_size  # type: ignore[union-attr]
    backend = encoder.tokenizer.pretrained.backend_tokenizer
    model = SentenceTransformer(modules=[StaticEmbedding(backend, embedding_dim=width)], similarity_fn_name="cosine")  # type: ignore[arg-type]
    for stage in recipe.stages:
        found = [read_pairs(source, seed) for source in stage.data]
        tables = {f"s{number}": (pairs.kind, to_table(pairs, 1.0, seed)) for number, pairs in enumerate(found)}
        folder = options.out / f"static-{seed}" / stage.name
        train_stage(model, recipe, stage, tables, folder, bf16=False, device=torch.device("cpu"))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an exported encoder, or RUN[@STEP]")
    parser.add_argument("--data", type=Path, default=SHARED)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--arms", nargs="+", default=["pretrained", "random", "static"])
    parser.add_argument("--shards", type=int, default=10, help="files of the corpus to make pairs of")
    parser.add_argument("--text-pairs", type=int, default=200_000)
    parser.add_argument("--epochs", type=float, default=4, help="over the pairs of people")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--max-length", type=int, default=256)
    options = parser.parse_args()
    if not options.data.is_dir():
        parser.error(f"{options.data} is not here: give --data")

    from biphase.config import parse_config
    from biphase.embedding.embed import train_embedder
    from biphase.embedding.evaluation import read_judged, score_bm25, score_embedder
    from biphase.embedding.folder import load_embedder
    from biphase.embedding.recipe import EmbeddingRecipe
    from biphase.files import write_json

    options.out.mkdir(parents=True, exist_ok=True)
    squad, snli = write_squad(options.data, options.out), write_snli(options.data, options.out)
    judged = [read_judged(options.data / name) for name in JUDGED]
    export = load_embedder(options.model)
    shown = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    kept = options.out / "scores.json"
    before = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {"options": shown, "scores": {}}
    changed = [key for key in shown.keys() - {"seeds", "arms"} if before["options"].get(key) != shown[key]]
    if changed:
        parser.error(f"{kept} was made with another {changed[0].replace('_', '-')}: give another --out")
    scores: dict[str, Any] = before["scores"]
    if "export" not in scores:
        scores["BM25"] = {each.name: score_bm25(each) for each in judged}
        scores["export"] = {each.name: score_embedder(export, each) for each in judged}
        write_json(kept, {"options": shown, "scores": scores})
    for seed, arm in itertools.product(options.seeds, options.arms):
        if f"{arm}-{seed}" not in scores:
            tree = recipe_tree(options, seed, "pretrained" if arm == "static" else arm, squad, snli)
            if arm == "static":
                model = train_static(options, seed, tree)
            else:
                folder, _ = train_embedder(parse_config(EmbeddingRecipe, tree, (), origin=arm), options.out / "runs")
                model = load_embedder(str(folder))
            scores[f"{arm}-{seed}"] = {each.name: score_embedder(model, each) for each in judged}
            write_json(kept, {"options": shown, "scores": scores})
    for arm, sets in scores.items():
        print(arm, {name: f"recall@10 {metrics['recall_at_10']:.3f}" for name, metrics in sets.items()})


if __name__ == "__main__":
    main()
