import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.processors import RobertaProcessing

from biphase.corpus.tokenizer import train_tokenizer
from biphase.encoder.models import Encoder
from biphase.encoder.network import TokenIds, make_model
from biphase.finetuning.config import FinetuneConfig, plan_cells, settle_config
from biphase.finetuning.encoding import CellContext, EncodedSplit
from biphase.finetuning.fit import fit_cells
from biphase.finetuning.heads import load_encoder
from biphase.finetuning.keeping import fit_and_keep, plan_to_keep
from biphase.finetuning.scores import Score
from biphase.tasks.spec import find_task, task_table

from ..conftest import DEVICE

NOUNS = ["dog", "cat", "boy", "girl", "tree", "house", "river", "train", "paper", "stone"]
SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def make_cell(task: str, dtype: torch.dtype = torch.float32, **settings: object) -> CellContext:
    """A quick cell."""
    given = {
        "precision": "fp32",
        "device": DEVICE,
        "learning_rate": 3e-3,
        "batch_size": 8,
        "epochs": 2,
        "max_length": 256,
    }
    config = FinetuneConfig.model_validate(given | settings)
    own = task_table()[task]
    return CellContext(own, settle_config(config, own, 10**6), torch.device(DEVICE), dtype)


def fit_cell(
    model: str,
    task: str,
    config: FinetuneConfig,
    out: Path | None = None,
    data_dir: str | Path | None = None,
    keep: Path | None = None,
) -> Score:
    """One cell alone, planned and fitted."""
    plans = plan_cells(model, [task], config, {} if data_dir is None else {find_task(task).name: data_dir})
    if keep is not None:
        plans = [*map(plan_to_keep, plans)]
    with TemporaryDirectory() as folder:
        if keep is not None:
            return fit_and_keep(plans[0], out or Path(folder), keep)
        return fit_cells(plans, out or Path(folder))[0]


def predict_split(model: torch.nn.Module, split: EncodedSplit, cell: CellContext) -> Any:
    """What the cell's family predicts, as a finished training leaves it to."""
    with torch.no_grad():
        return split.predict(model.eval(), cell)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny network with random weights and its tokenizer."""
    texts = [f"Premise: the {a} sees a {b} .\nHypothesis: a {b} is near the {a} ." for a in NOUNS for b in NOUNS]
    tokenizer = train_tokenizer(texts, 300)
    ids = TokenIds(len(tokenizer), tokenizer.mask_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, None)
    folder = tmp_path_factory.mktemp("model")
    make_model("1m", SHAPE, ids, max_len=256, seed=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def encoder(model_folder: Path) -> Encoder:
    return load_encoder(str(model_folder))


def with_pairs_of_roberta(tokenizer: Any) -> Any:
    """The tokenizer with RoBERTa's marks around a text and between two."""
    tokenizer.add_special_tokens({"cls_token": "<s>", "sep_token": "</s>"})
    opening, closing = (("<s>", tokenizer.cls_token_id), ("</s>", tokenizer.sep_token_id))
    tokenizer.backend_tokenizer.post_processor = RobertaProcessing(closing, opening)
    return tokenizer


def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def pair(rng: np.random.Generator, number: int) -> dict:
    first, second, other = rng.choice(NOUNS, 3, replace=False)
    label = int(rng.integers(3))
    said = {0: f"the {second} is there", 1: f"the {other} is big", 2: f"no {first} is there"}[label]
    return {"premise": f"a {first} and a {second} in the garden", "hypothesis": said, "label": label}


def sentence(rng: np.random.Generator, number: int) -> dict:
    words = [str(word) for word in rng.choice(NOUNS, rng.integers(2, 9))]
    tags = ["B-location" if word in NOUNS[:2] else "O" for word in words]
    return {"tokens": words, "ner_tags": tags}


def question(rng: np.random.Generator, number: int) -> dict:
    """What stands behind a noun? Every fifth question has no answer."""
    words = [str(word) for word in rng.permutation(NOUNS)]
    context = " ".join(words)
    at = int(rng.integers(len(words) - 1))
    answer = words[at + 1]
    known = number % 5 != 4
    return {
        "id": f"q{number}",
        "title": "nouns",
        "context": context,
        "question": f"after {words[at]}" if known else "after the moon",
        "answers": {"text": [answer] * known, "answer_start": [context.index(answer)] * known},
    }


@pytest.fixture(scope="session")
def data_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Made-up data of one task per family: 32 train, 20 validation and 23 test examples, in the tasks' own formats."""
    root = tmp_path_factory.mktemp("data")
    folders = {}
    for task, make in (("snli", pair), ("wnut17", sentence)):
        folders[task] = root / task
        folders[task].mkdir()
        rng = np.random.default_rng(0)
        for split, size in (("train", 32), ("validation", 20), ("test", 23)):
            write_jsonl(folders[task] / f"{split}.jsonl", [make(rng, number) for number in range(size)])
    folders["squad_v2"] = write_questions(root / "squad_v2")
    folders["squad_retrieval"] = write_collection(root / "squad_retrieval")
    return folders


def write_questions(folder: Path) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name, size in (("train-v2.0.json", 40), ("dev-v2.0.json", 23)):
        paragraphs = []
        for number in range(size):
            row = question(rng, number)
            starts = zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)
            answers = [{"text": text, "answer_start": start} for text, start in starts]
            asked = {"id": row["id"], "question": row["question"], "answers": answers, "is_impossible": not answers}
            paragraphs.append({"context": row["context"], "qas": [asked]})
        content = {"version": "v2.0", "data": [{"title": "nouns", "paragraphs": paragraphs}]}
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def write_collection(folder: Path) -> Path:
    """BEIR's layout: a document for each pair of nouns, queries that name both; some documents answer two queries."""
    (folder / "qrels").mkdir(parents=True)
    pairs = [(a, b) for a in NOUNS for b in NOUNS if a < b]
    documents = [{"_id": f"d{n}", "title": "", "text": f"a {a} near a {b} ."} for n, (a, b) in enumerate(pairs)]
    queries, judged = [], {"train": [], "test": []}
    for number, (a, b) in enumerate(pairs):
        for turn, text in enumerate((f"{a} {b}", f"{b} and {a}")):
            queries.append({"_id": f"q{number}-{turn}", "text": text})
            judged["test" if number % 3 == 0 else "train"].append(f"q{number}-{turn}\td{number}\t1")
    write_jsonl(folder / "corpus.jsonl", documents)
    write_jsonl(folder / "queries.jsonl", queries)
    for split, lines in judged.items():
        (folder / "qrels" / f"{split}.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *lines]) + "\n")
    return folder
