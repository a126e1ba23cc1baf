"""What `--keep` writes is loaded by transformers and sentence-transformers alone, and predicts what was scored."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import yaml
from tokenizers import Tokenizer

import biphase
from biphase.corpus.tokenizer import load_tokenizer, train_tokenizer
from biphase.encoder.models import identify
from biphase.errors import InputError
from biphase.files import MARK, RECORD_HASH, write_hashed
from biphase.finetuning.config import FinetuneConfig, settle_config
from biphase.finetuning.encoding import CellContext
from biphase.finetuning.heads import TaskNetwork, copy_backbone, load_encoder
from biphase.finetuning.keeping import check_keepable, keep_network, spell_special_tokens, to_transformers
from biphase.finetuning.kept import RECORD, find_kept
from biphase.finetuning.predict import list_read_tokens
from biphase.tasks.examples import input_of, load_examples
from biphase.tasks.sources import find_source
from biphase.tasks.spec import Task, task_table

from ..conftest import DEVICE, flip_bit, mostly_later, replace_before
from .conftest import fit_cell, make_cell


def keep_untrained(task: Task, model: Path, folder: Path, inputs: Iterable[Any] = (), **settings: Any) -> Path:
    """A kept folder of a task, whose head is as random numbers made it; `inputs` as if they had trained it."""
    encoder = load_encoder(str(model))
    config = settle_config(FinetuneConfig(device=DEVICE, precision="fp32", **settings), task, 256)
    cell = CellContext(task, config, torch.device(DEVICE), torch.float32)
    torch.manual_seed(0)
    network = TaskNetwork(copy_backbone(encoder.backbone, []), cell)
    score: Any = SimpleNamespace(cell="", source="", headline=lambda: "not trained", model_copy=lambda update: score)
    keep_network(to_transformers(network, encoder, cell), encoder, cell, folder, score, None, inputs)
    return folder


def fit_and_keep(task: str, model: Path, data: Path, tmp_path: Path, **settings: Any) -> tuple[Any, Any, list[Any]]:
    """The kept folder, the task's examples, and the rows of test.jsonl."""
    config = make_cell(task, **settings).config
    score = fit_cell(str(model), task, config, tmp_path / "scores", data, keep=tmp_path / "kept")
    assert score.folder is not None
    rows = [json.loads(line) for line in (score.folder / "test.jsonl").read_text().splitlines()]
    return tmp_path / "kept", load_examples(find_source(task_table()[task], data), judged_only=True), rows


def test_a_pipeline_classifies_texts_as_scored(model_folder: Path, data_dirs: dict[str, Path], tmp_path: Path) -> None:
    kept, data, rows = fit_and_keep("snli", model_folder, data_dirs["snli"], tmp_path, learning_rate=3e-3)
    classify = transformers.pipeline("text-classification", str(kept), device="cpu")
    said = [classify([input_of(example)])[0]["label"] for example in data.test]
    assert said == [row["predicted"] for row in rows]
    assert type(classify.model).__name__ == "EuroBertForSequenceClassification"
    card = (kept / "README.md").read_text()
    assert "one string, not a pair (`text_pair`)" in card, "the template has two columns"
    assert yaml.safe_load(card.split("---\n")[1]) == {
        "library_name": "transformers",
        "pipeline_tag": "text-classification",
        "tags": ["biphase", "eurobert"],
    }
    before = (tmp_path / "scores").glob("*/score.json")
    stamps = {path: path.stat().st_mtime_ns for path in before}
    fit_cell(
        str(model_folder),
        "snli",
        make_cell("snli", learning_rate=3e-3).config,
        tmp_path / "scores",
        data_dirs["snli"],
        keep=tmp_path / "again",
    )
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (kept / "model.safetensors").read_bytes()


def test_a_finished_cell_whose_new_training_scores_otherwise_is_told(
    model_folder: Path, data_dirs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a GPU. Its score stays; the same score is not told."""
    settings: dict[str, Any] = {"max_steps": 1, "learning_rate": 1e-4}
    kept, *_ = fit_and_keep("snli", model_folder, data_dirs["snli"], tmp_path, **settings)
    assert "trained again" not in capsys.readouterr().err
    [file] = (tmp_path / "scores").glob("*/score.json")
    score = json.loads(file.read_text())
    del score[RECORD_HASH]
    score["metrics"]["test"]["accuracy"] = 0.125
    write_hashed(file, score)
    shutil.rmtree(kept)
    fit_and_keep("snli", model_folder, data_dirs["snli"], tmp_path, **settings)
    said = " ".join(capsys.readouterr().err.split())
    assert "snli: trained again, with another score: the kept model has accuracy validation" in said
    assert "the cell, which was finished before, accuracy validation" in said and "test 12.50%" in said
    assert json.loads(file.read_text())["metrics"]["test"]["accuracy"] == 0.125 and (kept / RECORD).exists()


def test_files_that_came_while_a_network_trained_stay(model_folder: Path, tmp_path: Path) -> None:
    notes, rows = tmp_path / "kept" / "notes", tmp_path / "rows.jsonl"
    notes.parent.mkdir()
    for file in (notes, rows):
        file.write_text("{}")
    with pytest.raises(InputError, match=r"kept-\d+ is the new fine-tuned model, because its .* did not write"):
        keep_untrained(task_table()["snli"], model_folder, notes.parent)
    (other,) = tmp_path.glob("kept-*")
    assert notes.read_text() == "{}" and find_kept(str(other), rows).is_ours


def test_a_kept_model_that_has_changed_does_not_predict(model_folder: Path, tmp_path: Path) -> None:
    """Its card may. One without hashes has the classes of its configuration at least."""
    odd = {"licence": "</code><script>", "template": "``[x](javascript:1)\u202e {premise}"}
    kept = keep_untrained(task_table()["snli"].model_copy(update=odd), model_folder, tmp_path / "kept")
    card = (kept / "README.md").read_text()
    assert "`'</code><script>'`" in card and "```'``[x](javascript:1)\\u202e {premise}'```" in card
    assert str(model_folder) not in card, "no path of this machine"
    assert "text_pair" not in card, "the template has one column"
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}")
    (kept / "README.md").write_text("mine")
    assert find_kept(str(kept), rows).is_ours
    flip_bit(kept / "model.safetensors")
    with pytest.raises(InputError, match=r"safetensors is damaged .*or delete .biphase.json where you changed it"):
        find_kept(str(kept), rows)
    with pytest.raises(InputError, match=r"safetensors is damaged"):
        biphase.inspect(kept, verify=True)
    with pytest.raises(InputError, match=r"safetensors is damaged"):
        identify(str(kept))  # whatever reads it: fine-tuning goes on from it too
    (kept / MARK).unlink()
    assert find_kept(str(kept), rows).is_ours
    record = json.loads((kept / RECORD).read_text())
    record["task"]["classes"].reverse()
    (kept / RECORD).write_text(json.dumps(record))
    with pytest.raises(InputError, match=r"names other classes than config.json"):
        find_kept(str(kept), rows)


def make_tokenizer(kind: str) -> Any:
    """Make a small tokenizer of a type's own class, as transformers would."""
    texts = ["the dog sees a cat and the boys see girls", "[MASK] <s> </s> <|endoftext|>"]
    if kind == "bert":
        names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        letters = sorted({*"".join(texts).replace(" ", "").lower(), *"it.~"})
        pieces = [*names, *letters, *(f"##{letter}" for letter in letters), "dog", "cat"]
        return transformers.BertTokenizer(vocab={piece: id for id, piece in enumerate(pieces)})
    tokenizer = train_tokenizer(texts, 280)
    if kind == "eurobert":
        return tokenizer
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    first = {"gpt2": ["<|endoftext|>"], "qwen2": []}[kind]  # Qwen's special tokens are in no vocabulary
    pieces = first + [piece for piece in model["vocab"] if not piece.startswith("<|")]
    merges = [tuple(pair) for pair in model["merges"]]
    make = {"gpt2": transformers.GPT2Tokenizer, "qwen2": transformers.Qwen2Tokenizer}[kind]
    made: Any = make(vocab={piece: id for id, piece in enumerate(pieces)}, merges=merges)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return made


@pytest.mark.parametrize("kind", mostly_later(["bert", "eurobert", "gpt2", "qwen2"], "bert"))
def test_names_of_special_tokens_are_letters_for_every_program(kind: str, tmp_path: Path) -> None:
    """As they were in training, and all other texts are read as before."""
    onnxruntime = pytest.importorskip("onnxruntime")
    tokenizer = make_tokenizer(kind)
    widths = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    widths |= {"n_embd": 16, "n_head": 2, "intermediate_size": 32, "num_hidden_layers": 2, "n_layer": 2}
    ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("pad", "cls", "sep", "bos", "eos")}
    if kind == "gpt2":
        widths = {key: value for key, value in widths.items() if key.startswith("n_")}
    config = transformers.AutoConfig.for_model(kind, **widths, **ids, vocab_size=len(tokenizer) + 2)
    torch.manual_seed(0)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"text": f"{text} {number}", "label": text} for text in ("boys", "girls") for number in range(8)]
    data = {"train": rows, "validation": rows[::3], "test": rows[::2]}
    settings = {"max_steps": 1, "learning_rate": 1e-2, "device": "cpu", "scores": tmp_path / "scores"}
    biphase.finetune(tmp_path / "model", "who", data=data, keep=tmp_path / "kept", **settings)
    plain = ["the dog sees a cat", "a"]
    names = [str(token) for token in tokenizer.all_special_tokens]
    texts = [*plain, *names, " ".join(names), f"it{names[0]}.", "[MASK] [SEP] <s> </s> <|endoftext|> <|mask|>"]
    served = biphase.export(tmp_path / "kept", tmp_path / "served", onnx=True)
    predicted = biphase.predict(tmp_path / "kept", texts)["probabilities"]
    classify = transformers.pipeline("text-classification", str(served), device="cpu", top_k=None)
    session = onnxruntime.InferenceSession(str(served / "onnx" / "model.onnx"))
    alone = Tokenizer.from_file(str(served / "tokenizer.json"))
    for text, ours, theirs in zip(texts, predicted, classify(texts), strict=True):
        assert {part["label"]: part["score"] for part in theirs} == pytest.approx(ours, abs=2e-5)
        read = np.array([alone.encode(text).ids])
        [logits] = session.run(["logits"], {"input_ids": read, "attention_mask": np.ones_like(read)})
        shares = np.exp(logits[0]) / np.exp(logits[0]).sum()
        assert dict(zip(config_labels(served), shares.tolist(), strict=True)) == pytest.approx(ours, abs=2e-5)
    before = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    again = transformers.AutoTokenizer.from_pretrained(served)
    for text in plain:
        spelled = again(text, add_special_tokens=False)["input_ids"]
        assert spelled == before(text, add_special_tokens=False)["input_ids"]
    assert all(again.convert_tokens_to_ids(name) == before.convert_tokens_to_ids(name) for name in names)


def test_special_tokens_that_stay_are_counted(model_folder: Path, tmp_path: Path, capsys: Any) -> None:
    """A Unigram model cannot take up a token, and a folder of an earlier version has all of them in its list."""
    names = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
    pieces = [*((name, 0.0) for name in names), *((letter, -9.0) for letter in "▁[]MASKdog")]
    transformers.DebertaV2Tokenizer(vocab=pieces).save_pretrained(tmp_path / "deberta")
    spell_special_tokens(tmp_path / "deberta")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "deberta")
    assert tokenizer.mask_token_id not in tokenizer("dog [MASK]")["input_ids"]
    assert list_read_tokens(tmp_path / "deberta") == ["[MASK]"]
    kept = keep_untrained(task_table()["snli"], model_folder, tmp_path / "kept")
    rows = [{"premise": f"a dog {name}", "hypothesis": "a cat"} for name in ("", "<|mask|>", "<|pad|><|mask|>")]
    given = biphase.predict(kept, rows, device=DEVICE)
    assert "special tokens" not in capsys.readouterr().err
    load_tokenizer(model_folder).save_pretrained(kept)
    (kept / MARK).unlink()
    assert biphase.predict(kept, rows, device=DEVICE).equals(given)
    assert "2 of 3 rows name special tokens (<|end_of_text|>, <|mask|>" in " ".join(capsys.readouterr().err.split())


def config_labels(folder: Path) -> list[str]:
    return list(json.loads((folder / "config.json").read_text())["id2label"].values())


READERS: dict[str, tuple[str, Callable[[Path, Path], Any]]] = {
    "predict": ("biphase.finetuning.predict.load_weights", lambda kept, rows: biphase.predict(kept, rows)),
    "score": ("biphase.finetuning.predict.load_weights", lambda kept, rows: biphase.score(kept, rows)),
    "check": ("biphase.exporting.plain.load_named", lambda kept, rows: biphase.check(kept)),
    "encode": ("biphase.finetuning.heads.load_backbone", lambda kept, rows: biphase.encode(kept, ["a dog"])),
    "finetune": (
        "biphase.finetuning.heads.load_backbone",
        lambda kept, rows: biphase.finetune(kept, "snli", data=rows.parent, scores=rows.parent / "made"),
    ),
    "trim": (
        "biphase.deploying.trim.copy_model",
        lambda kept, rows: biphase.trim(kept, str(rows), rows.parent / "made", text_field="premise"),
    ),
    "export": (
        "biphase.api.networks.add_forms",
        lambda kept, rows: biphase.export(kept, rows.parent / "made", onnx=True),
    ),
}
"""Reader of a model folder → the function before which another model takes its place, and the call."""


@pytest.mark.parametrize("reader", READERS)
def test_a_model_that_is_replaced_while_it_is_read_is_refused(
    reader: str, model_folder: Path, data_dirs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one with the classes in another order, between the reading of its record and that of its weights."""
    data = shutil.copytree(data_dirs["snli"], tmp_path / "data")
    task = task_table()["snli"]
    kept = keep_untrained(task, model_folder, tmp_path / "kept")
    other = task.model_copy(update={"classes": task.classes[::-1]})
    keep_untrained(other, model_folder, tmp_path / "new")
    target, read = READERS[reader]
    if reader == "export":
        monkeypatch.setattr(target, lambda *_, **__: None)
    replace_before(target, kept, tmp_path / "new", monkeypatch)
    with pytest.raises(InputError, match=f"^files of {kept} were replaced while it was read: run the command again$"):
        read(kept, data / "test.jsonl")
    written = [path for path in tmp_path.glob("data/made/**/*.json") if ".words" not in path.parts]
    assert (tmp_path / "kept.old").exists() and not written


@pytest.mark.slow
@pytest.mark.minutes
def test_a_process_that_predicts_refuses_a_model_that_took_the_place(
    model_folder: Path, data_dirs: dict[str, Path], tmp_path: Path
) -> None:
    """The process has read the record, and is loading PyTorch."""
    kept = keep_untrained(task_table()["snli"], model_folder, tmp_path / "kept")
    shutil.copytree(kept, tmp_path / "new")
    rows = str(data_dirs["snli"] / "test.jsonl")
    command = [sys.executable, "-m", "biphase", "predict", str(kept), rows, "--out", str(tmp_path / "out.csv")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text() and process.poll() is None:
            time.sleep(0.01)
        kept.rename(tmp_path / "old")
        (tmp_path / "new").rename(kept)
        said = process.communicate()[1]
    assert f"files of {kept} were replaced while it was read: run the command again" in " ".join(said.split())
    assert process.returncode == 2 and not (tmp_path / "out.csv").exists()


@pytest.fixture
def modernbert(model_folder: Path, tmp_path: Path) -> Path:
    config = transformers.ModernBertConfig(
        vocab_size=400,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        pad_token_id=1,
        reference_compile=False,
    )
    torch.manual_seed(0)
    network = transformers.ModernBertModel(config)
    torch.nn.init.uniform_(network.final_norm.weight, -2, 2)
    network.save_pretrained(tmp_path / "modernbert")
    load_encoder(str(model_folder)).tokenizer.pretrained.save_pretrained(tmp_path / "modernbert")
    return tmp_path / "modernbert"


def test_modernbert_answers_with_its_own_class(modernbert: Path, data_dirs: dict[str, Path], tmp_path: Path) -> None:
    kept, _, rows = fit_and_keep("squad_v2", modernbert, data_dirs["squad_v2"], tmp_path, learning_rate=1e-2)
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(kept)
    assert type(model).__name__ == "ModernBertForQuestionAnswering"
    predicted = biphase.predict(kept, data_dirs["squad_v2"] / "dev-v2.0.json", device=DEVICE).set_index("id")
    scored = {row["id"]: row for row in rows}
    assert [scored[id]["predicted"] for id in predicted.index] == predicted["predicted"].to_list()
    probabilities = [scored[id]["probability"] for id in predicted.index]
    assert len(set(probabilities)) > 1 and predicted["probability"].to_list() == pytest.approx(probabilities, abs=1e-4)


@pytest.mark.parametrize("network", ["model_folder", "modernbert"])
def test_a_pipeline_tags_tokens_as_scored(
    network: str, data_dirs: dict[str, Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The majority of a word's tokens, as the pipeline labels them, is what was scored."""
    folder = request.getfixturevalue(network)
    kept, data, rows = fit_and_keep("wnut17", folder, data_dirs["wnut17"], tmp_path, epochs=30, learning_rate=1e-2)
    tag = transformers.pipeline("token-classification", str(kept), device="cpu", ignore_labels=[])
    for example, row in zip(data.test, rows, strict=True):
        found = tag(" ".join(example.words))
        ends = np.cumsum([len(word) + 1 for word in example.words]) - 1
        votes: list[list[str]] = [[] for _ in example.words]
        for token in found:
            if token["end"] > token["start"]:
                votes[int(np.searchsorted(ends, token["end"] - 1, side="right"))].append(token["entity"])
        assert [max(labels, key=labels.count) for labels in votes] == row["predicted"]
    assert {tag for row in rows for tag in row["predicted"]} == {"O", "B-location"}


def test_retrieval_is_kept_for_sentence_transformers(
    model_folder: Path, data_dirs: dict[str, Path], tmp_path: Path
) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    kept, data, rows = fit_and_keep("squad_retrieval", model_folder, data_dirs["squad_retrieval"], tmp_path)
    model = sentence_transformers.SentenceTransformer(str(kept), device="cpu")
    ids = list(data.documents)
    documents = model.encode(list(data.documents.values()), prompt_name="document", normalize_embeddings=True)
    for row in rows[:10]:
        query = model.encode([data.queries[row["id"]]], prompt_name="query", normalize_embeddings=True)[0]
        cosines = dict(zip(ids, (documents @ query).tolist(), strict=True))
        assert [cosines[id] for id in row["predicted"]] == pytest.approx(row["scores"], abs=1e-4)
        assert max(cosines.values()) == pytest.approx(row["scores"][0], abs=1e-4)


def test_an_embedding_model_cuts_and_prompts_as_it_was_scored(model_folder: Path, tmp_path: Path) -> None:
    tree = {"name": "mine", "family": "retrieval", "metric": "ndcg_at_10", "query_template": "ask: {text}"}
    kept = keep_untrained(Task.model_validate(tree), model_folder, tmp_path / "kept", max_length=16)
    assert json.loads((kept / "sentence_bert_config.json").read_text())["max_seq_length"] == 16
    prompts = json.loads((kept / "config_sentence_transformers.json").read_text())["prompts"]
    assert prompts == {"query": "ask: ", "document": "Document: "}
    task = Task.model_validate(tree | {"document_template": "{text} is asked"})
    with pytest.raises(InputError, match="is asked' must end with"):
        check_keepable(load_encoder(str(model_folder)), task, FinetuneConfig())


def test_a_tokenizer_that_a_pipeline_would_take_for_another(
    model_folder: Path, data_dirs: dict[str, Path], tmp_path: Path
) -> None:
    sizes = {"vocab_size": 400, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=2)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path / "qwen")
    load_tokenizer(model_folder).save_pretrained(tmp_path / "qwen")
    with pytest.raises(InputError, match="transformers would take Qwen2Tokenizer for the type 'qwen2'"):
        fit_and_keep("snli", tmp_path / "qwen", data_dirs["snli"], tmp_path)


def test_what_cannot_be_kept_is_refused_before_training(
    model_folder: Path, data_dirs: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="transformers has no class with the token head"):
        fit_and_keep("squad_v2", model_folder, data_dirs["squad_v2"], tmp_path, qa_head="token")
    assert not (tmp_path / "kept").exists() and not list((tmp_path / "scores").glob("*/score.json"))
