"""What is exported loads with transformers alone, computes the same, and looks the way it should."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tokenizers.processors import BertProcessing, TemplateProcessing
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    Gemma3nTextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    RoCBertConfig,
    RoCBertForMaskedLM,
    pipeline,
)

from biphase.api.folders import inspect
from biphase.api.networks import encode, load
from biphase.corpus.shards import read_shard_manifest
from biphase.corpus.tokenizer import load_tokenizer, tokenizer_hash
from biphase.curriculum import OBJECTIVES
from biphase.encoder.attention import lay_out
from biphase.encoder.models import Encoder
from biphase.encoder.network import load_model
from biphase.encoder.packed import LanguageModelHead, packed_hidden
from biphase.encoder.proofs import FailedProofError
from biphase.errors import InputError
from biphase.exporting.card import draw_curves, find_hub_id
from biphase.exporting.model import check_export, close_texts, export_checkpoint, set_direction
from biphase.files import MARK, remove_folder
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoding import CellContext, pack
from biphase.finetuning.heads import TaskNetwork, load_encoder
from biphase.pretraining.loop import train
from biphase.recipe import Recipe
from biphase.run import find_checkpoint
from biphase.tasks.spec import task_table

from ..conftest import mostly_later

TOKENS_T = torch.arange(3, 43)
NO_ENDS = ("schedule.warmup_steps=0", "schedule.decay_steps=0")
CLM = ("curriculum=[{objective: clm, steps: 2}]", *NO_ENDS)
MLM = ("curriculum=[{objective: mlm, steps: 2}]", *NO_ENDS)


def trained(recipe: Recipe, runs: Path) -> str:
    return str(train(recipe, runs).path)


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
FAMILIES: dict[str, Callable[..., PreTrainedModel]] = {
    "llama-tied": lambda **tokens: LlamaForCausalLM(
        LlamaConfig(**SIZES, **tokens, num_key_value_heads=2, tie_word_embeddings=True)
    ),
    "mistral-window": lambda **tokens: MistralForCausalLM(
        MistralConfig(**SIZES, **tokens, num_key_value_heads=2, sliding_window=8)
    ),
    "qwen2": lambda **tokens: Qwen2ForCausalLM(Qwen2Config(**SIZES, **tokens, num_key_value_heads=2)),
    "opt-narrow": lambda **tokens: OPTForCausalLM(OPTConfig(**SIZES, **tokens, ffn_dim=48, word_embed_proj_dim=24)),
    "bert": lambda **tokens: BertForMaskedLM(BertConfig(**SIZES, **tokens)),
    "roberta": lambda **tokens: RobertaForMaskedLM(RobertaConfig(**SIZES, **tokens)),
    "modernbert": lambda **tokens: ModernBertForMaskedLM(
        ModernBertConfig(**SIZES, **tokens, cls_token_id=None, sep_token_id=None, local_attention=8)
    ),
    "roc_bert": lambda **tokens: RoCBertForMaskedLM(
        RoCBertConfig(**SIZES, **tokens, enable_pronunciation=False, enable_shape=False)
    ),
    "neomme": lambda **tokens: newest("neomme", **tokens, num_key_value_heads=2, head_dim=16, embedding_rank=24),
    "ultrabert": lambda **tokens: newest("ultrabert", **tokens, num_key_value_heads=4, head_dim=8, sliding_window=8),
}


def newest(model_type: str, **settings: Any) -> PreTrainedModel:
    """A network of a type that older versions of transformers lack."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers has no {model_type} yet")
    network = AutoModelForMaskedLM.from_config(CONFIG_MAPPING[model_type](**SIZES, **settings))
    for weight in network.parameters():  # NeoMME's blocks begin with zeros, so that no token would reach another
        weight.data += 0.1 * torch.randn(weight.shape)
    return network


def adapted(family: str, tiny_recipe: Callable[..., Recipe], folder: Path) -> Recipe:
    """A recipe that goes on from a random model whose vocabulary lacks two of the shards' special tokens."""
    manifest = read_shard_manifest(Path(tiny_recipe().data.shards))
    tokens = {"vocab_size": manifest.vocab_size - 2, "bos_token_id": None, "eos_token_id": manifest.eos_id}
    torch.manual_seed(0)
    FAMILIES[family](**tokens, pad_token_id=manifest.pad_id).save_pretrained(folder / family)
    return tiny_recipe(*MLM, f"init={{model: {folder / family}}}")


def hidden_by_us(reference: str, causal: bool) -> torch.Tensor:
    network = load_model(find_checkpoint(reference) / "model").eval()
    layout = lay_out(torch.tensor([0, len(TOKENS_T)]).numpy(), causal=causal)
    with torch.no_grad():
        return packed_hidden(network.base_model, TOKENS_T, torch.arange(len(TOKENS_T)), layout)


def hidden_reloaded(folder: Path, tokens_T: torch.Tensor = TOKENS_T) -> torch.Tensor:
    with torch.no_grad():
        return AutoModel.from_pretrained(folder).eval()(input_ids=tokens_T[None]).last_hidden_state[0]


def test_a_card_tells_all_trainings_by_name(tiny_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """From random weights on, and no place of this machine; a parent that is gone is named."""
    first = trained(tiny_recipe("curriculum=[{objective: clm, steps: 2}]", "name=clm", *NO_ENDS), tmp_path / "runs")
    changes = ("curriculum=[{objective: mlm, steps: 3}]", f"init={{checkpoint: {first}}}", "name=then-mlm")
    second = trained(tiny_recipe(*changes, *NO_ENDS), tmp_path / "runs")
    export_checkpoint(second, tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text()
    told = [
        f"`{Path(first).name}`: 2 steps of CLM",
        f"`{Path(second).name}`: 3 steps of MLM",
        "with the parent's weights",
    ]
    assert all(line in card for line in ["1. Random weights of preset", *told]) and str(tmp_path) not in card
    (Path(first) / "config.yaml").unlink()
    export_checkpoint(second, tmp_path / "again")
    assert f"1. `{Path(first).name}`, which is not here any more" in (tmp_path / "again" / "README.md").read_text()


def test_a_folder_that_is_gone_is_no_hub_model(
    tiny_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = adapted("roberta", tiny_recipe, Path("models"))
    run = trained(recipe, tmp_path / "runs")
    monkeypatch.chdir(tmp_path / "runs")
    export_checkpoint(run, tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text()
    assert "base_model" not in card and "1. The model `roberta`." in card


@pytest.mark.parametrize(
    ("model", "id"),
    [
        *(("org/model", "org/model"), ("org/model@v1", "org/model"), ("bert-base-uncased", "bert-base-uncased")),
        *(("here", None), ("here/gone", None), ("../gone", None), ("/data/gone", None), ("./gone", None)),
    ],
)
def test_a_base_is_a_hub_id(model: str, id: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    assert find_hub_id(model) == id


def test_a_card_tells_a_parent_whose_checkpoint_was_dropped(tiny_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """As a study drops the steps that its arms have branched off from; the run says what it trained up to there."""
    phases = "curriculum=[{objective: clm, steps: 3}, {objective: mlm, steps: 1}]"
    first = trained(tiny_recipe(phases, "name=clm", "checkpoints.keep=[2]", *NO_ENDS), tmp_path / "runs")
    changes = ("curriculum=[{objective: mlm, steps: 3}]", f"init={{checkpoint: {first}@2}}", "name=then-mlm")
    second = trained(tiny_recipe(*changes, *NO_ENDS), tmp_path / "runs")
    export_checkpoint(second, tmp_path / "model")
    complete = (tmp_path / "model" / "README.md").read_text()
    remove_folder(Path(first) / "steps" / "2")
    export_checkpoint(second, tmp_path / "again")
    card = (tmp_path / "again" / "README.md").read_text()
    (line,) = [line for line in complete.splitlines() if "2 steps of CLM" in line]
    assert line.startswith(f"2. `{Path(first).name}`: ") and f"{line[:-1]}; this checkpoint (`" in card
    assert "`) is not here any more.\n3. `" in card and "1. Random weights of preset" in card


def check_head_of_card(folder: Path, task: str) -> None:
    """What the hub reads names a pipeline that loads the folder."""
    head = yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])
    model_type = AutoConfig.from_pretrained(folder).model_type
    assert head == {"library_name": "transformers", "pipeline_tag": task, "tags": ["biphase", model_type]}
    assert pipeline(task, str(folder)).model.config.model_type == model_type


def looks_ahead(folder: Path) -> bool:
    changed_T = torch.cat([TOKENS_T[:-1], TOKENS_T[-1:] + 1])
    return bool((hidden_reloaded(folder, changed_T)[:-1] != hidden_reloaded(folder)[:-1]).any())


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports have their picture."""
    monkeypatch.setattr("biphase.exporting.model.draw_curves", draw_curves)


@pytest.mark.usefixtures("curves")
@pytest.mark.parametrize(
    ("objective", "kind", "name", "task"),
    [
        ("mlm", AutoModelForMaskedLM, "EuroBertForMaskedLM", "fill-mask"),
        pytest.param(
            "mntp",
            AutoModelForMaskedLM,
            "EuroBertForMaskedLM",
            "feature-extraction",
            marks=[pytest.mark.slow, pytest.mark.minutes],
        ),
        ("clm", AutoModelForCausalLM, "LlamaForCausalLM", "text-generation"),
        pytest.param(
            "meap",
            AutoModelForCausalLM,
            "LlamaForCausalLM",
            "text-generation",
            marks=[pytest.mark.slow, pytest.mark.minutes],
        ),
        pytest.param(
            "causal-mlm",
            AutoModelForCausalLM,
            "LlamaForCausalLM",
            "feature-extraction",
            marks=[pytest.mark.slow, pytest.mark.minutes],
        ),
    ],
)
def test_a_preset_reloads_as_the_last_objective_left_it(
    tiny_recipe: Callable[..., Recipe], tmp_path: Path, objective: str, kind: type, name: str, task: str
) -> None:
    recipe = tiny_recipe(f"curriculum=[{{objective: {objective}, steps: 2}}]", *NO_ENDS)
    run = trained(recipe, tmp_path / "runs")
    export_checkpoint(run, tmp_path / "model")
    model = kind.from_pretrained(tmp_path / "model")  # type: ignore[attr-defined]
    assert type(model).__name__ == name
    causal = objective in ("clm", "meap", "causal-mlm")
    torch.testing.assert_close(hidden_reloaded(tmp_path / "model"), hidden_by_us(run, causal), rtol=1e-4, atol=1e-5)
    assert looks_ahead(tmp_path / "model") != causal
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.mask_token is not None
    card = (tmp_path / "model" / "README.md").read_text()
    assert f"2 steps of {OBJECTIVES[objective].title}" in card  # type: ignore[index]
    assert f"A {'causal' if causal else 'bidirectional'} `{name}`" in card
    check_head_of_card(tmp_path / "model", task)
    # What generates is no sentence transformer: a prompt must stay open.
    assert (tmp_path / "model" / "modules.json").exists() == ("SentenceTransformer" in card) == (not causal)
    assert (tokenizer.eos_token_id in tokenizer("Ozma").input_ids) == (not causal)
    assert len(tokenizer("Ozma " * 100, truncation=True).input_ids) == tokenizer.model_max_length == 64
    assert (tmp_path / "model" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert inspect(tmp_path / "model")["architectures"] == [name]
    assert inspect(run, verify=True)["state"] == "done"
    checkpoint = inspect(f"{run}@2")  # whose network in its folder looks both ways
    assert (checkpoint["kind"], checkpoint["objective"], "direction" in checkpoint) == ("checkpoint", objective, False)
    with pytest.raises(InputError, match="not an empty folder"):
        export_checkpoint(run, tmp_path / "model")


def test_a_place_that_another_process_fills_meanwhile_is_its(
    tiny_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, theirs = train(tiny_recipe(*MLM), tmp_path / "runs"), tmp_path / "model" / "theirs"

    def fill(source: Path) -> Any:
        theirs.parent.mkdir()
        theirs.touch()
        return load_model(source)

    monkeypatch.setattr("biphase.exporting.model.load_model", fill)
    with pytest.raises(InputError, match="not an empty folder"):
        export_checkpoint(str(run.path), tmp_path / "model")
    assert [*theirs.parent.iterdir()] == [theirs]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "runs"]
    remove_folder(theirs.parent)
    monkeypatch.undo()
    with pytest.raises(InputError, match=r"model-\d+ is the new encoder, because its place has other files by now"):
        export_checkpoint(str(run.path), tmp_path / "model", complete=fill)
    assert [*theirs.parent.iterdir()] == [theirs]
    assert len([*tmp_path.glob("model-*/model.safetensors")]) == 1


TEXTS = ["Glinda sat in her palace.", "", "Tip, who was a strong and sturdy lad, " * 12, "Ozma of Oz"]


def embeddings_by_us(run: str) -> torch.Tensor:
    """As evaluation reads texts and pools them."""
    encoder = load_encoder(run)
    texts = encoder.tokenizer.encode_texts(TEXTS, max_length=encoder.max_length)
    cell = CellContext(task_table()["squad_retrieval"], FinetuneConfig(), torch.device("cpu"), torch.float32)
    with torch.no_grad():
        return TaskNetwork(encoder.backbone, cell)(pack(texts, np.arange(len(TEXTS)), cell))


@pytest.mark.parametrize("family", mostly_later(["preset", "llama-tied", "roberta", "opt-narrow"], "preset", "roberta"))
def test_sentence_transformers_gives_our_embeddings(
    tiny_recipe: Callable[..., Recipe], tmp_path: Path, family: str
) -> None:
    """The end-of-text token included, texts cut where evaluation cuts them."""
    library = pytest.importorskip("sentence_transformers")
    recipe = tiny_recipe(*MLM) if family == "preset" else adapted(family, tiny_recipe, tmp_path)
    run = trained(recipe, tmp_path / "runs")
    export_checkpoint(run, tmp_path / "model")
    loaded = library.SentenceTransformer(str(tmp_path / "model"), device="cpu")
    theirs = torch.from_numpy(loaded.encode(TEXTS))
    assert loaded.get_embedding_dimension() == theirs.shape[1] == (24 if family == "opt-narrow" else 32)
    np.testing.assert_allclose(encode(tmp_path / "model", TEXTS, device="cpu"), theirs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(theirs, embeddings_by_us(run), rtol=1e-4, atol=1e-5)
    assert loaded.max_seq_length == load_encoder(run).max_length
    assert loaded.similarity_fn_name == "cosine"
    assert "SentenceTransformer(" in (tmp_path / "model" / "README.md").read_text()


def test_another_pooling_than_the_mean_is_obeyed(tiny_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    export_checkpoint(trained(tiny_recipe(*MLM), tmp_path / "runs"), tmp_path / "model")
    path = tmp_path / "model" / "1_Pooling" / "config.json"
    settings = json.loads(path.read_text()) | {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}
    path.write_text(json.dumps(settings))
    (tmp_path / "model" / MARK).unlink()
    theirs = library.SentenceTransformer(str(tmp_path / "model"), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(encode(load(tmp_path / "model"), TEXTS, device="cpu"), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("adds_nothing", [False, True])
def test_a_tokenizer_with_a_classification_token_opens_and_closes_texts(corpus: Any, adds_nothing: bool) -> None:
    """BERT's kind, whether or not the tokenizer does so itself: as evaluation reads texts too."""
    backend = load_tokenizer(corpus.tokenizer).backend_tokenizer
    nothing = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    backend.post_processor = nothing if adds_nothing else BertProcessing(("<|mask|>", 1), ("<|pad|>", 2))
    roles = {"cls_token": "<|pad|>", "sep_token": "<|mask|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **roles)
    close_texts(tokenizer)
    ids = tokenizer("Ozma").input_ids
    assert (ids[0], ids[-1], len(ids) > 2) == (2, 1, True)


def test_a_long_text_is_cut_at_its_end(corpus: Any) -> None:
    """As evaluation cuts it, whatever the tokenizer of the model at the beginning did."""
    tokenizer = load_tokenizer(corpus.tokenizer)
    whole = tokenizer("Ozma and Tip", add_special_tokens=False).input_ids
    tokenizer.truncation_side = "left"
    close_texts(tokenizer)
    ids = tokenizer("Ozma and Tip", truncation=True, max_length=3).input_ids
    assert ids == [*whole[:2], tokenizer.eos_token_id] and len(whole) > 2


@pytest.mark.parametrize("token", ["<|end_of_text|>", "\n</s>\n", "<eos> x", "a:1", "$A"])
def test_the_closing_token_has_its_own_name_in_the_template(corpus: Any, token: str) -> None:
    """transformers.js looks it up by that name, which a template cannot have where a colon or a dollar is in it."""
    tokenizer = load_tokenizer(corpus.tokenizer)
    tokenizer.add_special_tokens({"eos_token": token})
    close_texts(tokenizer)
    one, other, end = (tokenizer(text, add_special_tokens=False).input_ids for text in ("Ozma", "Tip", token))
    assert end == [tokenizer.eos_token_id]
    assert tokenizer("Ozma").input_ids == one + end
    assert tokenizer("Ozma", "Tip").input_ids == one + end + other + end
    template = json.loads(tokenizer.backend_tokenizer.to_str())["post_processor"]
    assert list(template["special_tokens"]) == ["EOS" if set(token) & {":", "$"} else token]


def test_a_batch_is_continued_as_each_text_alone(tiny_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    export_checkpoint(trained(tiny_recipe(*CLM), tmp_path / "runs"), tmp_path / "model")
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"  # transformers 4 knows it too
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.padding_side == "left"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()

    def continued(texts: list[str]) -> list[list[int]]:
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        made = model.generate(**batch, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        return made[:, batch["input_ids"].shape[1] :].tolist()

    texts = ["The", "Once upon a time there was a little girl"]
    assert continued(texts) == [*continued(texts[:1]), *continued(texts[1:])]


def test_a_run_that_is_not_at_its_end_is_told(tiny_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    run = trained(tiny_recipe(*MLM, "checkpoints.every_steps=1"), tmp_path / "runs")
    assert "step" not in export_checkpoint(run, tmp_path / "whole")
    assert f"{run}@1 is at step 1 of 2, before the end of the decay" in export_checkpoint(f"{run}@1", tmp_path / "half")


def test_a_damaged_export_is_not_evaluated(tiny_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    export_checkpoint(trained(tiny_recipe(*MLM), tmp_path / "runs"), tmp_path / "model")
    (tmp_path / "model" / "README.md").write_text("a card of the user's own")
    load_encoder(str(tmp_path / "model"))
    weights = tmp_path / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(InputError, match=r"model\.safetensors is damaged"):
        load_encoder(str(tmp_path / "model"))


def test_a_window_is_exported_as_it_is(tmp_path: Path) -> None:
    """Gemma 3n writes another window beside the key that servers read."""
    config = Gemma3nTextConfig(sliding_window=20)
    set_direction(config, causal=False)
    again = Gemma3nTextConfig.from_dict(config.to_dict())
    assert (again.sliding_window, again.is_causal) == (20, False)
    FAMILIES["mistral-window"](vocab_size=64).save_pretrained(tmp_path)
    network = load_model(tmp_path)
    network.config.sliding_window = 20
    with pytest.raises(FailedProofError, match="its window differs from that in training"):
        check_export(tmp_path, AutoModelForCausalLM, network, causal=True)


@pytest.mark.parametrize("family", ["llama-tied", "mistral-window"])
def test_an_adapted_decoder_becomes_bidirectional(
    tiny_recipe: Callable[..., Recipe], tmp_path: Path, family: str
) -> None:
    """Tied embeddings, a vocabulary that grows by the special tokens, a window shorter than the text."""
    run = trained(adapted(family, tiny_recipe, tmp_path), tmp_path / "runs")
    export_checkpoint(run, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.is_causal is False
    assert model.config.use_bidirectional_attention is True  # which other tools read
    card = " ".join((tmp_path / "model" / "README.md").read_text().split())
    assert "transformers 5.17 and later" in card
    assert ("only texts of up to 8 tokens come out the same" in card) == (family == "mistral-window")
    described = json.loads((tmp_path / "model" / "config_sentence_transformers.json").read_text())
    assert described["requirements"] == {"transformers": ">=5.17"}
    assert isinstance(load(tmp_path / "model"), Encoder)
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "TokenizersBackend"  # transformers 4, which would look left only, refuses it
    check_head_of_card(tmp_path / "model", "feature-extraction")  # fill-mask takes no class of a decoder
    assert model.config.pad_token_id is not None
    torch.testing.assert_close(
        hidden_reloaded(tmp_path / "model"), hidden_by_us(run, causal=False), rtol=1e-4, atol=1e-5
    )
    assert looks_ahead(tmp_path / "model")


def test_tokens_that_were_never_trained_prove_nothing(tiny_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """The rows of bytes in a vocabulary of SentencePiece are alike, and a small rate leaves them so."""
    recipe = adapted("llama-tied", tiny_recipe, tmp_path)
    model = LlamaForCausalLM.from_pretrained(recipe.init.model)
    model.model.embed_tokens.weight.data[:300] = model.model.embed_tokens.weight.data[300]
    model.save_pretrained(recipe.init.model)
    run = trained(
        recipe.model_copy(update={"schedule": recipe.schedule.model_copy(update={"peak_lr": 1e-6})}), tmp_path
    )
    assert "bidirectional" in export_checkpoint(run, tmp_path / "model")


def test_a_tokenizer_that_transformers_would_take_for_another_is_told(
    tiny_recipe: Callable[..., Recipe], corpus: Any, tmp_path: Path
) -> None:
    """For Qwen 2's type it takes Qwen 2's split, whatever a folder says."""
    run = trained(adapted("qwen2", tiny_recipe, tmp_path), tmp_path / "runs")
    told, folder = export_checkpoint(run, tmp_path / "model"), tmp_path / "model"
    card = (folder / "README.md").read_text()
    assert tokenizer_hash(load_tokenizer(folder)) == tokenizer_hash(load_tokenizer(corpus.tokenizer))
    for text in (told, card):
        assert "AutoTokenizer takes Qwen2Tokenizer for type 'qwen2'" in text
    assert 'PreTrainedTokenizerFast.from_pretrained("model")' in card
    assert not (folder / "modules.json").exists()
    assert "SentenceTransformer" not in card


@pytest.mark.parametrize(
    "family", mostly_later(["bert", "roberta", "modernbert", "roc_bert", "neomme", "ultrabert"], "bert", "modernbert")
)
def test_a_masked_language_model_keeps_its_class(
    tiny_recipe: Callable[..., Recipe], tmp_path: Path, family: str
) -> None:
    """The same logits from each sample alone as our head gives for packed ones, positions and token types included."""
    run = trained(adapted(family, tiny_recipe, tmp_path), tmp_path / "runs")
    assert "load it with AutoModelForMaskedLM" in export_checkpoint(run, tmp_path / "model")
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "model").eval()
    network = load_model(find_checkpoint(run) / "model").eval()
    assert type(model) is type(network)
    layout = lay_out(np.array([0, 15, 40]), causal=False)
    positions_T = torch.cat([torch.arange(15), torch.arange(25)])
    with torch.no_grad():
        ours_TD = packed_hidden(network.base_model, TOKENS_T, positions_T, layout)
        ours_TV = network.get_output_embeddings()(LanguageModelHead(network)(ours_TD))
        theirs = [model(input_ids=part[None]).logits[0] for part in TOKENS_T.split([15, 25])]
    torch.testing.assert_close(ours_TV, torch.cat(theirs), rtol=1e-4, atol=1e-5)
