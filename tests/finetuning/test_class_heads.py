"""The head of a network's class in transformers is trained where it differs from the paper's: what is kept, loaded by
transformers alone, computes what was scored."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence

import biphase
from biphase.corpus.tokenizer import PAD
from biphase.encoder.proofs import looks_both_ways
from biphase.errors import InputError
from biphase.finetuning.config import CellPlan, FinetuneConfig, plan_cells
from biphase.finetuning.encoding import CellContext, pack
from biphase.finetuning.encoding_cache import encode_source
from biphase.finetuning.fit import train_network
from biphase.finetuning.heads import ClassNetwork, auto_class, build_network, load_encoder
from biphase.finetuning.keeping import keep_network, plan_to_keep, to_transformers
from biphase.finetuning.scores import read_scores
from biphase.tasks.spec import find_task

from ..conftest import DEVICE, mostly_later
from ..encoder.tiny_families import tiny_config
from .conftest import NOUNS, fit_cell, with_pairs_of_roberta
from .test_kinds import sentences, write_task

TYPES = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "electra", "modernbert", "deberta-v2")
DECODERS = ("llama", "qwen3", "mistral", "gemma3_text", "gpt2")
SETTINGS = {"precision": "fp32", "device": DEVICE, "batch_size": 8, "max_length": 100}


def save_network(model_type: str, model_folder: Path, folder: Path, vocab_size: int = 400) -> Path:
    """A tiny network with random weights, and the tokenizer of the tests."""
    config = tiny_config(model_type)
    config.vocab_size = vocab_size
    torch.manual_seed(0)
    network: Any = transformers.AutoModel.from_config(config)
    with torch.no_grad():
        for weight in network.parameters():
            weight += torch.randn(weight.shape) * 0.2
    network.save_pretrained(folder)
    load_encoder(str(model_folder)).tokenizer.pretrained.save_pretrained(folder)
    return folder


def forget_padding(folder: Path) -> None:
    """Take the pad token from the tokenizer of a network with 300 rows."""
    for file in folder.glob("tokenizer*.json"):
        content = json.loads(file.read_text().replace(PAD, "<|spare|>"))
        content.pop("pad_token", None)
        file.write_text(json.dumps(content))
    assert load_encoder(str(folder)).tokenizer.pretrained.pad_token_id == 300


def plan(model: Path, task: str, data: Path, **settings: Any) -> CellPlan:
    config = FinetuneConfig.model_validate(SETTINGS | settings)
    return plan_cells(str(model), [task], config, {find_task(task).name: data})[0]


def train_and_keep(plan: CellPlan, folder: Path) -> None:
    """Train a few steps, keep the network, and hold the logits of the folder, which transformers alone computes in one
    batch of unequal lengths, against those that are scored."""
    encoder, device = load_encoder(plan.model.name), torch.device(DEVICE)
    cell = CellContext(plan.task, plan.config, device, torch.float32)
    splits, _ = encode_source(plan.evaluation, encoder.tokenizer, plan.config)
    torch.manual_seed(0)
    network = build_network(encoder, cell, splits.values()).to(device)
    train_network(network, splits["train"], cell)
    test = splits["test"]
    with torch.no_grad():
        scored = test.texts.predict(network.eval(), cell)
        metrics, _ = test.judge(test.predict(network, cell), cell)
    score: Any = type(
        "Score", (), {"cell": "", "source": "", "headline": str, "model_copy": lambda self, update: self}
    )()
    keep_network(to_transformers(network, encoder, cell), encoder, cell, folder, score, test)

    model = auto_class(plan.task).from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    samples = [torch.from_numpy(part).long() for part in np.split(test.texts.tokens_T, test.texts.bounds_S1[1:-1])]
    assert len({len(sample) for sample in samples}) > 1
    ids = pad_sequence(samples, batch_first=True, padding_value=tokenizer.pad_token_id)
    mask = pad_sequence([torch.ones_like(sample) for sample in samples], batch_first=True)
    with torch.no_grad():
        output = model(input_ids=ids, attention_mask=mask)
    logits = torch.stack([output.start_logits, output.end_logits], -1) if "start_logits" in output else output.logits
    logits = logits[mask.bool()] if logits.ndim == 3 else logits
    assert np.ptp(scored, axis=0).min() > 1e-3, "the logits tell texts apart"
    assert looks_both_ways(model.base_model)
    assert np.abs(logits.numpy() - scored).max() <= 1e-4 * max(1, np.abs(scored).max())
    recomputed, _ = test.judge(test.predict(lambda batch: loaded_logits(logits, batch, test.texts), cell), cell)
    assert recomputed == pytest.approx(metrics, rel=1e-4, abs=1e-5)


def loaded_logits(logits: torch.Tensor, batch: Any, texts: Any) -> torch.Tensor:
    return logits[batch.indices_T if len(logits) == len(texts.tokens_T) else batch.samples]


@pytest.mark.parametrize("task", ["snli", "wnut17", "squad_v2"])
@pytest.mark.parametrize("model_type", mostly_later(TYPES + DECODERS, "bert", "modernbert", "llama", "gemma3_text"))
def test_transformers_computes_what_was_scored(
    model_type: str, task: str, model_folder: Path, data_dirs: dict[str, Path], tmp_path: Path
) -> None:
    folder = save_network(model_type, model_folder, tmp_path / "model")
    asked = plan(folder, task, data_dirs[task], learning_rate=3e-3, max_steps=4)
    if model_type == "gemma3_text" and task != "snli":
        with pytest.raises(InputError, match=r"transformers has no class for .* by a network of type 'gemma3_text'"):
            plan_to_keep(asked)
        return
    planned = plan_to_keep(asked)
    has_other_head = task == "snli" or model_type == "modernbert"
    assert planned.config.head == ("transformers" if has_other_head else "paper")
    assert (planned.hash == asked.hash) == (not has_other_head)
    train_and_keep(planned, tmp_path / "kept")


def kind_of_task(kind: str, folder: Path) -> Path:
    """A task of a kind beside those of one class."""
    rows: list[dict[str, Any]] = []
    for number, words in enumerate(sentences(np.random.default_rng(0), 72)):
        text = " ".join(words[: 2 + number % 4])
        labels = [name for name in NOUNS[:3] if name in words]
        row = {"text": text, "number": str(len(labels)), "labels": labels, "choices": words[:3], "answer": number % 3}
        rows.append(row)
    shared = {"family": "sequence_classification", "template": "{text}"}
    keys: dict[str, Any] = {
        "number": shared | {"problem_type": "regression", "metric": "spearman", "label": "number"},
        "set": shared
        | {"problem_type": "multi_label_classification", "metric": "micro_f1", "label": "labels", "classes": NOUNS[:3]},
        "choice": {
            "family": "multiple_choice",
            "metric": "accuracy",
            "template": "{text} : {choice}",
            "label": "answer",
        }
        | {"classes": ["0", "1", "2"], "choices": ["choices"]},
    }
    return write_task(folder, rows, **keys[kind])


@pytest.mark.parametrize("kind", ["number", "set", "choice", "pairs"])
@pytest.mark.parametrize("model_type", mostly_later(["bert", "modernbert", "deberta-v2", "llama"], "bert"))
def test_every_kind_of_task_is_kept(
    model_type: str, kind: str, model_folder: Path, data_dirs: dict[str, Path], tmp_path: Path
) -> None:
    folder = save_network(model_type, model_folder, tmp_path / "model")
    task, data = "squad_retrieval", data_dirs["squad_retrieval"]
    if kind != "pairs":
        task, data = str(kind_of_task(kind, tmp_path)), tmp_path
    ranking = "pairs" if kind == "pairs" else "embeddings"
    planned = plan_to_keep(plan(folder, task, data, learning_rate=3e-3, max_steps=4, ranking=ranking))
    assert planned.config.head == "transformers"
    train_and_keep(planned, tmp_path / "kept")


@pytest.mark.parametrize("model_type", mostly_later(["bert", "llama"], "bert"))
def test_the_head_of_a_class_learns(
    model_type: str, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user's way: a table, `--keep`, and predictions for rows, which are transformers' own."""
    folder = save_network(model_type, model_folder, tmp_path / "model")
    words = sentences(np.random.default_rng(0), 300)
    rows = [
        {"text": " ".join(row[: 2 + n % 4]), "label": "yes" if "dog" in row[:2] else "no"}
        for n, row in enumerate(words)
    ]
    splits = {"train": rows[:200], "validation": rows[200:250], "test": rows[250:]}
    asked: dict[str, Any] = {
        "data": splits,
        "scores": tmp_path / "scores",
        "learning_rate": 3e-3,
        "epochs": 8,
        "batch_size": 8,
        "eps": 1e-8,
    }
    score = biphase.finetune(folder, "dogs", keep=tmp_path / "kept", device=DEVICE, precision="fp32", **asked)
    assert score.metrics["test"]["accuracy"] > 0.9  # "no" alone: 0.8
    assert "· head=transformers" in score.headline() and score.config.head == "transformers"
    kind = {"bert": "BertForSequenceClassification", "llama": "LlamaForSequenceClassification"}[model_type]
    assert f"{kind} has another head than the paper's" in " ".join(capsys.readouterr().err.split())
    predicted = biphase.predict(tmp_path / "kept", rows[250:], device=DEVICE)
    classify = transformers.pipeline("text-classification", str(tmp_path / "kept"), device="cpu")
    said = classify([row["text"] for row in rows[250:]], batch_size=16)
    assert predicted["predicted"].tolist() == [answer["label"] for answer in said]
    assert predicted["probability"].tolist() == pytest.approx([answer["score"] for answer in said], abs=1e-4)
    assert np.mean([answer["label"] == row["label"] for answer, row in zip(said, rows[250:], strict=True)]) == (
        pytest.approx(score.metrics["test"]["accuracy"])
    )


@pytest.mark.parametrize("model_type", ["bert", "llama", "roberta"])
def test_a_cross_encoder_is_of_any_type(
    model_type: str, model_folder: Path, data_dirs: dict[str, Path], tmp_path: Path
) -> None:
    """RoBERTa has its tokenizer's own pairs, with two separators between the texts."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    folder, data = save_network(model_type, model_folder, tmp_path / "model"), data_dirs["squad_retrieval"]
    if model_type == "roberta":
        with_pairs_of_roberta(load_encoder(str(folder)).tokenizer.pretrained).save_pretrained(folder)
    config = FinetuneConfig.model_validate(SETTINGS | {"ranking": "pairs", "learning_rate": 3e-3})
    fit_cell(str(folder), "squad_retrieval", config, tmp_path / "scores", data, keep=tmp_path / "kept")
    pairs = [("dog cat", "a dog near a cat ."), ("cat", "a train near a stone near a river near a house .")]
    theirs = sentence_transformers.CrossEncoder(str(tmp_path / "kept"), device="cpu").predict(pairs)
    rows = [{"query": query, "document": document} for query, document in pairs]
    ours = biphase.predict(tmp_path / "kept", rows, device=DEVICE)["predicted"]
    assert ours.tolist() == pytest.approx(theirs.tolist(), abs=1e-4) and len({*ours}) == 2


@pytest.mark.parametrize("model_type", ["mpnet", "llama"])
def test_an_embedding_model_is_of_any_type(
    model_type: str, model_folder: Path, data_dirs: dict[str, Path], tmp_path: Path
) -> None:
    """MPNet runs on padded batches. The decoder has no embedding of the pad token that biphase gives its tokenizer."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    folder, data = save_network(model_type, model_folder, tmp_path / "model", 300), data_dirs["squad_retrieval"]
    if model_type == "llama":
        forget_padding(folder)
    config = FinetuneConfig.model_validate(SETTINGS | {"learning_rate": 3e-3, "max_steps": 4})
    score = fit_cell(str(folder), "squad_retrieval", config, tmp_path / "scores", data, keep=tmp_path / "kept")
    assert score.folder is not None
    scored = json.loads((score.folder / "test.jsonl").read_text().splitlines()[0])
    tables = ([json.loads(line) for line in (data / name).open()] for name in ("queries.jsonl", "corpus.jsonl"))
    queries, documents = ({row["_id"]: row["text"] for row in rows} for rows in tables)
    texts = [f"Query: {queries[scored['id']]}", *(f"Document: {documents[id]}" for id in scored["predicted"])]
    for embedder in (
        sentence_transformers.SentenceTransformer(str(tmp_path / "kept"), device="cpu").encode,
        partial(biphase.encode, tmp_path / "kept", device="cpu"),
    ):
        query, *found = embedder(texts)
        cosines = [query @ row / np.linalg.norm(query) / np.linalg.norm(row) for row in found]
        assert cosines == pytest.approx(scored["scores"], abs=1e-4)
    assert all(check.is_equal for check in biphase.check(tmp_path / "kept"))


def test_an_embedding_model_that_padding_changes_is_refused(
    model_folder: Path, data_dirs: dict[str, Path], tmp_path: Path
) -> None:
    folder = save_network("fnet", model_folder, tmp_path / "model")
    with pytest.raises(InputError, match="FNetModel gives a text another embedding beside a longer one"):
        plan_to_keep(plan(folder, "squad_retrieval", data_dirs["squad_retrieval"]))


def test_dropout_is_that_of_the_head_alone(model_folder: Path, data_dirs: dict[str, Path], tmp_path: Path) -> None:
    folder = save_network("bert", model_folder, tmp_path / "model")
    planned = plan(folder, "snli", data_dirs["snli"], head="transformers")
    encoder, cell = (
        load_encoder(str(folder)),
        CellContext(planned.task, planned.config, torch.device("cpu"), torch.float32),
    )
    network: Any = build_network(encoder, cell, [])
    assert isinstance(network, ClassNetwork) and network.model.dropout.p == 0.1
    batch = pack(encoder.tokenizer.encode_texts(["a dog", "the cat sees"], 100), np.arange(2), cell)
    network.train()
    hidden = [network.backbone(input_ids=batch.tokens_T[None]).last_hidden_state for _ in range(2)]
    assert torch.equal(*hidden) and not torch.equal(network(batch), network(batch))


@pytest.mark.parametrize("model_type", ["bert", "deberta-v2", "llama"])
def test_the_rows_in_use_are_all_that_a_class_needs(
    model_type: str, model_folder: Path, data_dirs: dict[str, Path], tmp_path: Path
) -> None:
    """Padding is among them: the tokenizer's, which is not that of the configuration here."""
    folder = save_network(model_type, model_folder, tmp_path / "model")
    planned = plan(folder, "snli", data_dirs["snli"], head="transformers", learning_rate=3e-3)
    encoder, cell = (
        load_encoder(str(folder)),
        CellContext(planned.task, planned.config, torch.device("cpu"), torch.float32),
    )
    assert encoder.tokenizer.pretrained.pad_token_id != tiny_config(model_type).pad_token_id
    splits, _ = encode_source(planned.evaluation, encoder.tokenizer, planned.config)
    networks: list[Any] = []
    losses = []
    for given in (splits.values(), []):
        torch.manual_seed(0)
        networks.append(build_network(encoder, cell, given))
        losses.append(train_network(networks[-1], splits["train"], cell)[0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    used, whole = (network.backbone.get_input_embeddings().weight for network in networks)
    assert len(used) < len(whole)
    kept = to_transformers(networks[0], encoder, cell).get_input_embeddings().weight
    rows = torch.from_numpy(np.unique(np.concatenate([split.texts.tokens_T for split in splits.values()]))).long()
    torch.testing.assert_close(kept[rows], whole[rows], rtol=1e-4, atol=1e-4)


def test_a_decoder_without_padding_is_padded_with_the_end_of_text(
    model_folder: Path, data_dirs: dict[str, Path], tmp_path: Path
) -> None:
    """biphase gives the tokenizer a pad token, of which the network has no embedding."""
    folder = save_network("llama", model_folder, tmp_path / "model", vocab_size=300)
    forget_padding(folder)
    planned = plan_to_keep(plan(folder, "snli", data_dirs["snli"], learning_rate=3e-3, max_steps=4))
    train_and_keep(planned, tmp_path / "kept")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "kept")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id


@pytest.mark.slow
@pytest.mark.minutes
def test_what_no_class_keeps_is_refused_with_the_reason(
    model_folder: Path, data_dirs: dict[str, Path], tmp_path: Path
) -> None:
    folder = save_network("bert", model_folder, tmp_path / "model")
    data = data_dirs["snli"]
    with pytest.raises(
        InputError, match=r"a linear probe cannot be kept .* BertForSequenceClassification has more than"
    ):
        plan_to_keep(plan(folder, "snli", data, frozen=True))
    with pytest.raises(InputError, match=r"BertForSequenceClassification has .*; head=transformers trains and"):
        plan_to_keep(plan(folder, "snli", data, head="paper"))
    with pytest.raises(InputError, match="head=transformers: frozen is for the paper's head"):
        plan(folder, "snli", data, head="transformers", frozen=True)
    with pytest.raises(InputError, match="head=transformers: qa_head=token is for the paper's head"):
        plan(folder, "squad_v2", data_dirs["squad_v2"], head="transformers", qa_head="token")
    # `evaluate` scores the paper's head unless it is told otherwise, and does not keep what it does not score.
    grid: dict[str, Any] = {"learning_rates": [3e-3], "seeds": [0], "data": {"snli": data}, "workers": 1}
    grid |= {"scores": tmp_path / "scores", "keep": tmp_path / "kept", **SETTINGS}
    with pytest.raises(InputError, match="head=transformers trains and scores its own"):
        biphase.evaluate(folder, ["snli"], **grid)
    assert not (tmp_path / "scores").exists()
    biphase.evaluate(folder, ["snli"], head="transformers", **grid)
    assert (tmp_path / "kept" / "model-snli" / "model.safetensors").exists()
    assert [score.config.head for score in read_scores(tmp_path / "scores").scores] == ["transformers"]


def test_only_a_head_names_a_cell_by_it(model_folder: Path, data_dirs: dict[str, Path]) -> None:
    data = data_dirs["squad_retrieval"]
    embedder, asked = (plan(model_folder, "squad_retrieval", data, head=head) for head in ("paper", "transformers"))
    assert embedder.hash == asked.hash and "head" not in embedder.config.model_dump()
