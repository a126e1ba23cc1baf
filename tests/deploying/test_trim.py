"""A smaller vocabulary changes neither the tokens of a text nor what transformers computes for it, by tokenizers and
transformers themselves, for each kind of tokenizer and of model; and nothing is written where it would."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import biphase
from biphase.cli.app import run_command
from biphase.corpus.tokenizer import load_tokenizer
from biphase.deploying import trim as trimming
from biphase.encoder.proofs import FailedProofError
from biphase.errors import InputError
from biphase.files import MARK

from ..conftest import mostly_later

OZ = (Path(__file__).parents[1] / "data" / "land_of_oz.txt").read_text(encoding="utf-8")
PARAGRAPHS = [paragraph for paragraph in OZ.split("\n\n") if paragraph.strip()]
TEXTS, UNSEEN = PARAGRAPHS[:25], PARAGRAPHS[60:80]
NAMES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROLES = {f"{name[1:-1].lower()}_token": name for name in NAMES}
KINDS = ("wordpiece", "unigram", "bytes", "bytes of ranks", "byte fallback")


def make_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Train a tokenizer by the official library on a whole book, as its kind's first models were."""
    if kind == "wordpiece":
        backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        trainer: Any = trainers.WordPieceTrainer(vocab_size=2000, special_tokens=NAMES, show_progress=False)
    elif kind == "unigram":
        backend = Tokenizer(models.Unigram())
        backend.normalizer, backend.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=1500, special_tokens=NAMES, unk_token="[UNK]", show_progress=False)
    elif kind == "byte fallback":
        backend = Tokenizer(models.BPE(unk_token="[UNK]", byte_fallback=True, fuse_unk=True))
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        names = NAMES + [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=1500, special_tokens=names, show_progress=False)
    else:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=1500, special_tokens=NAMES, initial_alphabet=alphabet, show_progress=False
        )
    backend.train_from_iterator(PARAGRAPHS, trainer)
    state = json.loads(backend.to_str())
    if kind == "byte fallback":  # in published files bytes are no added tokens
        state["added_tokens"] = state["added_tokens"][: len(NAMES)]
    if kind == "bytes of ranks":  # as Llama 3's: each cut of a token into two tokens is a merge, words are taken whole
        vocab = state["model"]["vocab"]
        pairs = [(word[:at], word[at:]) for word in sorted(vocab, key=vocab.get) for at in range(1, len(word))]
        state["model"]["merges"] = [pair for pair in pairs if {*pair} <= vocab.keys() and "".join(pair) not in NAMES]
        state["model"]["ignore_merges"] = True
    backend = Tokenizer.from_str(json.dumps(state))
    marks = [(name, backend.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=marks
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **ROLES)


def make_model(folder: Path, tokenizer: Any, name: str, head: str = "ForMaskedLM", **settings: Any) -> Path:
    widths = {
        "hidden_size": 32,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
    }
    ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("pad", "cls", "sep", "mask")}
    ids |= {"bos_token_id": tokenizer.cls_token_id, "eos_token_id": tokenizer.sep_token_id}
    config = transformers.AutoConfig.for_model(name, **widths | ids | settings, vocab_size=len(tokenizer))
    torch.manual_seed(0)
    network = getattr(transformers, f"AutoModel{head}").from_config(config)
    with torch.no_grad():
        for weight in network.parameters():  # biases of logits too: else a row for another token would not be seen
            weight.add_(0.02 * torch.randn_like(weight))
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def outputs(folder: Path, head: str, texts: list[str], ids: torch.Tensor | None = None) -> tuple[Any, Any]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(texts, padding=True, truncation=True, max_length=100, return_tensors="pt")
    network = getattr(transformers, f"AutoModel{head}").from_pretrained(folder).eval()
    logits = network(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])[0]
    return logits[batch["attention_mask"].bool()] if logits.ndim > 2 else logits, batch


def kept_ids(before: Path, after: Path) -> list[int]:
    """The old ids of the tokens that are kept, in the order of the new ones, by the names of tokens alone."""
    old, new = (AutoTokenizer.from_pretrained(folder).get_vocab() for folder in (before, after))
    return [old[token] for token in sorted(new, key=new.get)]


@pytest.mark.parametrize("kind", mostly_later(KINDS, "wordpiece", "bytes"))
def test_each_kind_of_tokenizer_reads_texts_as_before(kind: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(kind)
    source = make_model(tmp_path / "source", tokenizer, "eurobert")
    folder = biphase.trim(source, TEXTS, tmp_path / "out", validation=UNSEEN)
    smaller = Tokenizer.from_file(str(folder / "tokenizer.json"))
    whole = Tokenizer.from_file(str(source / "tokenizer.json"))
    assert smaller.get_vocab_size() < 0.9 * whole.get_vocab_size()
    assert [smaller.encode(text).tokens for text in TEXTS] == [whole.encode(text).tokens for text in TEXTS]
    assert smaller.encode("Tip", "Oz").tokens == whole.encode("Tip", "Oz").tokens
    assert sorted(smaller.get_vocab().values()) == list(range(smaller.get_vocab_size()))
    for text in UNSEEN:  # more tokens, none of them unknown
        assert len(smaller.encode(text).ids) >= len(whole.encode(text).ids)
        assert "[UNK]" not in smaller.encode(text).tokens
    if kind.startswith("byte"):
        assert "[UNK]" not in smaller.encode("東京 жзи").tokens
    (before, _), (after, _) = (outputs(place, "ForMaskedLM", TEXTS) for place in (source, folder))
    assert torch.allclose(after, before[:, kept_ids(source, folder)], atol=1e-5 * float(before.abs().mean()))
    assert (folder / "README.md").read_text(encoding="utf-8").startswith("# out\n\n## Vocabulary\n")
    golden = json.loads((folder / "golden.json").read_text())
    assert golden["ids"][1] == smaller.encode("Rain.").ids


FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "BERT": ("bert", "ForMaskedLM", {}),
    "BERT, untied": ("bert", "ForMaskedLM", {"tie_word_embeddings": False}),
    "BERT, as wide as its vocabulary": ("bert", "ForMaskedLM", {"intermediate_size": 2000}),
    "RoBERTa": ("roberta", "ForMaskedLM", {}),
    "ModernBERT": ("modernbert", "ForMaskedLM", {}),
    "DeBERTa": ("deberta-v2", "ForMaskedLM", {}),
    "ELECTRA": ("electra", "ForMaskedLM", {"embedding_size": 16}),
    "Llama": ("llama", "ForCausalLM", {"tie_word_embeddings": False}),
    "Qwen, tied": ("qwen3", "ForCausalLM", {"tie_word_embeddings": True, "head_dim": 16}),
    "Gemma": ("gemma3_text", "ForCausalLM", {"head_dim": 16}),
    "a classifier": ("bert", "ForSequenceClassification", {"num_labels": 3}),
    "a classifier of Llama": ("llama", "ForSequenceClassification", {"num_labels": 3}),
    "a tagger": ("modernbert", "ForTokenClassification", {"num_labels": 5}),
    "hidden states": ("xlm-roberta", "", {}),
}


FEW = ("BERT, untied", "ModernBERT", "Qwen, tied", "a classifier of Llama", "hidden states")


@pytest.fixture(scope="module")
def wordpiece() -> Iterator[PreTrainedTokenizerFast]:
    yield make_tokenizer("wordpiece")


@pytest.mark.parametrize("family", mostly_later(FAMILIES, *FEW))
def test_each_family_computes_what_it_computed(family: str, wordpiece: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    name, head, settings = FAMILIES[family]
    kind = make_tokenizer("unigram") if name == "xlm-roberta" else wordpiece
    source = make_model(tmp_path / "source", kind, name, head, **settings)
    folder = biphase.trim(source, TEXTS, tmp_path / "out")
    (before, old), (after, new) = (outputs(place, head, TEXTS) for place in (source, folder))
    kept = kept_ids(source, folder)
    assert old["input_ids"].tolist() == [[kept[id] for id in row] for row in new["input_ids"].tolist()]
    expected = before[:, kept] if head.endswith("LM") else before
    assert torch.allclose(after, expected, atol=1e-5 * float(before.abs().mean()))
    config = transformers.AutoConfig.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (config.vocab_size, config.pad_token_id) == (len(kept), tokenizer.pad_token_id)
    old_weights, new_weights = (load_file(place / "model.safetensors") for place in (source, folder))
    assert old_weights.keys() == new_weights.keys()
    tables = ("embeddings.weight", "embed_tokens.weight", "decoder", "lm_head", "predictions.bias")
    untouched = [key for key in old_weights if not any(table in key for table in tables) or "position" in key]
    assert untouched and all(torch.equal(old_weights[key], new_weights[key]) for key in untouched)


def test_rare_tokens_go_and_other_texts_are_read_all_the_same(wordpiece: Any, tmp_path: Path) -> None:
    source = make_model(tmp_path / "source", wordpiece, "bert", hidden_size=128)
    begin = "A bidirectional `BertForMaskedLM` of {:.1f}M parameters."
    (source / "README.md").write_text(f"# source\n\n{begin.format(9.9)}\n")
    often = biphase.trim(source, TEXTS, tmp_path / "often", minimum_count=3)
    (old, new) = (load_tokenizer(folder) for folder in (source, often))
    assert len(new) < len(load_tokenizer(biphase.trim(source, TEXTS, tmp_path / "all")))
    kept = set(new.get_vocab())
    texts = TEXTS + [" ".join(text.split()[:3]) for text in TEXTS]
    same = [text for text in texts if {*old.tokenize(text)} <= kept]
    assert 2 < len(same) < len(texts)
    assert [new.tokenize(text) for text in same] == [old.tokenize(text) for text in same]
    card = (often / "README.md").read_text(encoding="utf-8")
    assert f"occur at least 3 times in {len(TEXTS)} texts (in memory)" in card
    assert f"Of these texts, {sum(text in TEXTS for text in same)} have the same tokens" in card
    size = transformers.AutoModelForMaskedLM.from_pretrained(often).num_parameters() / 1e6
    assert card.startswith(f"# often\n\n{begin.format(size)}\n")
    assert "fast" not in card  # only the table of embeddings is smaller


def test_single_characters_of_the_scripts_that_occur_stay(tmp_path: Path) -> None:
    letters = [f"{prefix}{letter}" for prefix in ("", "##") for letter in "abcdéžжи東京1;"]
    vocab = {token: id for id, token in enumerate([*NAMES, *letters, "bad", "##dab"])}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    state = json.loads(backend.to_str())
    kept = {token for token, id in vocab.items() if id in trimming.choose_tokens(state, {vocab["bad"], vocab["и"]})}
    assert kept == {*vocab} - {"東", "京", "##東", "##京", "##dab"} - {*NAMES} | {"[UNK]"}


def test_prompts_and_templates_keep_their_tokens(wordpiece: Any, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    source = make_model(tmp_path / "source", wordpiece, "bert")
    prompts = {"query": "Mombi , the witch : ", "document": "throne "}
    embedder = SentenceTransformer(str(source), device="cpu", prompts=prompts)
    embedder.save(str(tmp_path / "embedder"))
    folder = biphase.trim(tmp_path / "embedder", [*TEXTS[:5], *TEXTS[:3]], tmp_path / "out", minimum_count=2)
    smaller = SentenceTransformer(str(folder), device="cpu")
    known = [text for text in TEXTS[:5] if {*load_tokenizer(source).tokenize(text)} <= {*load_tokenizer(folder).vocab}]
    assert known
    before, after = (model.encode(known, prompt_name="query") for model in (embedder, smaller))
    assert abs(before - after).max() < 1e-5
    assert "Mombi".lower() in " ".join(load_tokenizer(folder).tokenize(prompts["query"])).replace(" ##", "")


def test_a_token_counts_as_often_as_it_occurs(wordpiece: Any) -> None:
    """However many prompts are read with the texts too; counted anew by `tokenizers`."""
    backend, prompts = wordpiece.backend_tokenizer, ["Mombi : ", "throne "]
    texts = [text[: trimming.OPENING] for text in TEXTS]
    expected = Counter(id for text in texts for id in backend.encode(text, add_special_tokens=False).ids)
    counts = trimming.count_tokens(backend, texts, prompts)
    for id in {id for prompt in prompts for id in backend.encode(prompt, add_special_tokens=False).ids}:
        expected.pop(id, None)
        assert counts.pop(id) >= len(texts)
    assert counts == expected


def test_ids_in_configurations_follow_their_tokens(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("bytes")
    source = make_model(tmp_path / "source", tokenizer, "llama", "ForCausalLM")
    last = tokenizer.convert_ids_to_tokens(len(tokenizer) - 1)
    generation = {"eos_token_id": [tokenizer.sep_token_id, len(tokenizer) - 1], "suppress_tokens": [5], "top_k": 5}
    (source / "generation_config.json").write_text(json.dumps(generation))
    (source / "merges.txt").write_text("old")
    folder = biphase.trim(source, TEXTS, tmp_path / "out")
    smaller = AutoTokenizer.from_pretrained(folder)
    written = json.loads((folder / "generation_config.json").read_text())
    assert smaller.convert_ids_to_tokens(written["eos_token_id"]) == ["[SEP]", last]
    assert smaller.convert_ids_to_tokens(written["suppress_tokens"]) == [tokenizer.convert_ids_to_tokens(5)]
    assert written["top_k"] == 5
    assert not (folder / "merges.txt").exists()
    assert json.loads((folder / MARK).read_text())["biphase"] == "model"
    assert biphase.inspect(folder, verify=True)["verified"] == "every hash agrees"


def test_a_special_token_without_a_row_goes(tmp_path: Path) -> None:
    """As Gemma's image token in the folder of its text network. A token of the template needs its row."""
    tokenizer = make_tokenizer("bytes")
    source = make_model(tmp_path / "source", tokenizer, "llama", "ForCausalLM")
    rows = len(tokenizer)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<image_soft_token>"]})
    tokenizer.backend_tokenizer.enable_padding(pad_id=rows, pad_token="<image_soft_token>")
    tokenizer.save_pretrained(source)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    named = {"image_token": "<image_soft_token>", "model_specific_special_tokens": {"image": "<image_soft_token>"}}
    (source / "tokenizer_config.json").write_text(json.dumps(settings | named))
    assert "<image_soft_token>" in (source / "tokenizer.json").read_text()
    folder = biphase.trim(source, TEXTS, tmp_path / "out")
    assert "<image_soft_token>" not in (folder / "tokenizer.json").read_text()
    old, new = (AutoTokenizer.from_pretrained(place) for place in (source, folder))
    assert len(new) <= transformers.AutoConfig.from_pretrained(folder).vocab_size < len(old)
    for text in TEXTS:
        read = [tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) for tokenizer in (old, new)]
        assert read[0] == read[1]
    mark = ("<image_soft_token>", rows)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<image_soft_token> $A", special_tokens=[mark]
    )
    tokenizer.save_pretrained(source)
    with pytest.raises(InputError, match=f"it has token ids up to {rows:,}, and {rows:,} rows"):
        biphase.trim(source, TEXTS, tmp_path / "other")


def test_the_command_does_not_load_the_copy_again(
    wordpiece: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, text = make_model(tmp_path / "source", wordpiece, "bert"), tmp_path / "text.txt"
    text.write_text("\n\n".join(TEXTS), encoding="utf-8")
    monkeypatch.setattr("biphase.deploying.inspection.examine_model", lambda folder: pytest.fail("loaded again"))
    out = str(tmp_path / "out")
    run_command(["trim", str(source), "--text", str(text), "--out", out, "--format", "json"])
    facts = json.loads(capsys.readouterr().out)
    assert (facts["kind"], facts["path"], facts["vocab_size"] < 2000) == ("model", out, True)


def test_weights_in_parts_are_sliced_all(wordpiece: Any, tmp_path: Path) -> None:
    source = make_model(tmp_path / "source", wordpiece, "bert")
    network = transformers.AutoModelForMaskedLM.from_pretrained(source)
    (source / "model.safetensors").unlink()
    network.save_pretrained(source, max_shard_size="100KB")
    folder = biphase.trim(source, TEXTS, tmp_path / "out")
    assert len(list(source.glob("*.safetensors"))) > 1
    assert [path.name for path in folder.glob("*.safetensors*")] == ["model.safetensors"]  # small enough for one
    (before, _), (after, _) = (outputs(place, "ForMaskedLM", TEXTS) for place in (source, folder))
    assert torch.allclose(after, before[:, kept_ids(source, folder)], atol=1e-5)


def test_a_kept_model_is_scored_before_and_after(wordpiece: Any, tmp_path: Path) -> None:
    encoder = make_model(tmp_path / "encoder", wordpiece, "bert")
    rows = [{"text": text[:200], "label": ("boy", "girl")[number % 2]} for number, text in enumerate(TEXTS)]
    data = {"train": rows, "validation": rows[:8], "test": rows[8:]}
    settings = {"max_steps": 2, "learning_rate": 1e-3, "device": "cpu", "template": "Mombi writes: {text}"}
    score = biphase.finetune(encoder, "who", data=data, scores=tmp_path / "scores", keep=tmp_path / "kept", **settings)
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[8:]), encoding="utf-8")
    assert trimming.list_prompts(tmp_path / "kept") == ["Mombi writes: "]
    folder = biphase.trim(tmp_path / "kept", TEXTS, tmp_path / "out", test=tmp_path / "test.jsonl")
    accuracy = f"{100 * score.metrics['test']['accuracy']:.2f}"
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert f"accuracy 0.00 points ({accuracy} → {accuracy}, {len(rows) - 8} test examples of who" in card
    before, after = (biphase.predict(place, tmp_path / "test.jsonl") for place in (tmp_path / "kept", folder))
    assert before.equals(after)


# What is refused


def break_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trimming, "merge_steps", lambda word, ranks: [])


def break_rows(monkeypatch: pytest.MonkeyPatch) -> None:

    sliced = trimming.trim_weights
    monkeypatch.setattr(trimming, "trim_weights", lambda part, ids: sliced(part, dict.fromkeys([*ids][::-1])))


def break_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    def save(weights: Any, part: Path) -> None:
        biases = {name: rows.flip(0) for name, rows in weights.items() if name.endswith("bias") and len(rows) > 100}
        save_torch_state_dict(weights | biases, part)

    monkeypatch.setattr(trimming, "save_torch_state_dict", save)


@pytest.mark.parametrize(
    "broken, words",
    [
        (break_merges, "would read '.*' differently"),
        (break_rows, "computes something else"),
        (break_bias, "computes something else"),
    ],
)
def test_what_is_not_proved_is_not_written(
    broken: Callable[[pytest.MonkeyPatch], None], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_model(tmp_path / "source", make_tokenizer("bytes"), "bert")
    broken(monkeypatch)
    with pytest.raises(FailedProofError, match=words):
        biphase.trim(source, TEXTS, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_classifier_without_a_padding_token_is_told(wordpiece: Any, tmp_path: Path) -> None:
    source = make_model(tmp_path / "source", wordpiece, "llama", "ForSequenceClassification", pad_token_id=None)
    with pytest.raises(FailedProofError, match=r"^LlamaForSequenceClassification cannot .*`pad_token_id`.*no padding"):
        biphase.trim(source, TEXTS, tmp_path / "out")


@pytest.mark.parametrize("architectures", [None, ["OddForMaskedLM"]])
def test_a_model_whose_class_is_not_named(architectures: Any, wordpiece: Any, tmp_path: Path) -> None:
    source = make_model(tmp_path / "source", wordpiece, "bert", "")
    path = source / "config.json"
    config = json.loads(path.read_text()) | {"architectures": architectures}
    path.write_text(json.dumps(config))
    folder = biphase.trim(source, TEXTS, tmp_path / "out")
    assert json.loads((folder / "config.json").read_text())["vocab_size"] < config["vocab_size"]
    for dtype in (0, "hub"):
        path.write_text(json.dumps(config | {"dtype": dtype}))
        with pytest.raises(InputError, match=r"config\.json is damaged \(dtype"):
            biphase.trim(source, TEXTS, tmp_path / "again")


def test_refusals(wordpiece: Any, tmp_path: Path) -> None:
    source = make_model(tmp_path / "source", wordpiece, "bert")
    (tmp_path / "blank.txt").write_text("\n\n")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "thai.txt").write_text("ภาษาไทย สวัสดี ขอบคุณ", encoding="utf-8")
    (tmp_path / "one.txt").write_text("Tip", encoding="utf-8")
    names = ("slow", "words", "wide", "stale")
    slow, words, wide, stale = (make_model(tmp_path / name, wordpiece, "bert") for name in names)
    (stale / "model.gguf").touch()
    (slow / "tokenizer.json").rename(slow / "vocab.txt")
    level = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=level).save_pretrained(words)
    wordpiece_and_more = PreTrainedTokenizerFast.from_pretrained(wide)
    wordpiece_and_more.add_tokens(["<new>"])
    wordpiece_and_more.save_pretrained(wide)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    for model, text, settings, said in (
        (source, TEXTS, {"out": tmp_path / "full"}, "full is not an empty folder"),
        (source, tmp_path / "empty.txt", {}, "empty.txt is empty"),
        (source, tmp_path / "blank.txt", {}, "text: there is none in these sources"),
        (source, tmp_path / "nowhere.txt", {}, "nowhere.txt does not exist"),
        (
            source,
            tmp_path / "thai.txt",
            {},
            r"100% of its tokens are unknown: this model does not read its script",
        ),
        (source, TEXTS, {"minimum_count": 0}, "`minimum_count` is 0"),
        (source, tmp_path / "one.txt", {"minimum_count": 9}, "minimum_count 9: no token of these texts is so frequent"),
        (source, TEXTS, {"test": tmp_path / "nowhere"}, "test: .*nowhere does not exist"),
        (source, TEXTS, {"test": tmp_path}, "scores fine-tuned and embedding models, and this model is neither"),
        (tmp_path / "full", TEXTS, {}, "has no config.json"),
        (tmp_path / "run", TEXTS, {}, "run is a run; export it first"),
        (f"{tmp_path / 'run'}@5", TEXTS, {}, "run@5 is a run; export it first"),
        (slow, TEXTS, {}, "has no fast tokenizer"),
        (words, TEXTS, {}, "has a WordLevel tokenizer"),
        (wide, TEXTS, {}, "it has token ids up to"),
        (stale, TEXTS, {}, r"has a GGUF file already \(in model\.gguf\): give the folder it was made from"),
    ):
        with pytest.raises(InputError, match=said):
            biphase.trim(model, text, **{"out": tmp_path / "out"} | settings)
        assert not (tmp_path / "out").exists()
    folder = biphase.trim(source, TEXTS, tmp_path / "out")
    with pytest.raises(InputError, match=r"need all .* tokens of"):
        biphase.trim(folder, TEXTS, tmp_path / "again")
