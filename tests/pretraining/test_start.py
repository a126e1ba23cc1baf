"""Decoders and masked language models of others become encoders."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_runs import MakeRecipe, digests, loader_of, losses, only, other_shards, shorter, train_until
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    ModernBertConfig,
    ModernBertForMaskedLM,
    Qwen3MoeConfig,
    RobertaConfig,
    RobertaForMaskedLM,
)

from biphase.config import BUNDLED, load_config
from biphase.corpus.shards import ShardSet
from biphase.corpus.tokenizer import load_tokenizer, save_tokenizer
from biphase.encoder.attention import lay_out
from biphase.encoder.network import PaddedBackbone, dropout_shares, fresh_backbone, load_backbone
from biphase.encoder.packed import packed_hidden
from biphase.errors import InputError
from biphase.exporting.model import export_checkpoint, save_encoder
from biphase.files import read_json
from biphase.hub import load_model_config
from biphase.pretraining.loop import train
from biphase.pretraining.objectives import make_microbatches
from biphase.pretraining.start import begin_with_model
from biphase.recipe import Recipe
from biphase.run import read_checkpoint_manifest, read_metrics

from ..conftest import mostly_later, prepare_texts

STORIES = Path(__file__).parents[2].parent / "shared/data/decoder_stories260K"


def looks_ahead(model: Any) -> bool:
    """Whether an early output of a transformers model moves when a later token is changed."""
    tokens = torch.arange(10, 22)[None]
    changed = tokens.clone()
    changed[0, 9] = 5
    with torch.no_grad():
        outputs = [
            model(input_ids=x, attention_mask=torch.ones_like(x)).last_hidden_state[0, 0] for x in (tokens, changed)
        ]
    return bool((outputs[0] - outputs[1]).abs().max() > 1e-6)


def test_a_decoder_becomes_an_encoder(decoder: Path, tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = tiny_recipe(f"init={{model: {decoder}}}", *shorter("curriculum.1.steps=9", "schedule.peak_lr=3e-3"))
    run = train(recipe, tmp_path)
    assert np.mean(losses(run)[-3:]) < losses(run)[3]
    manifest = read_checkpoint_manifest(run.steps / "12")
    assert manifest.carried == ["weights"]
    assert manifest.parent is not None
    for step, causal in ((3, True), (12, False)):
        folder = run.steps / str(step) / "model"
        assert read_json(folder / "config.json")["is_causal"] is causal
        reloaded = AutoModel.from_pretrained(folder).eval()
        assert looks_ahead(reloaded) is not causal
    ours, theirs = load_backbone(run.steps / "12" / "model").eval(), AutoModel.from_pretrained(folder).eval()
    tokens_T = torch.arange(40, 70)
    with torch.no_grad():
        packed_TD = packed_hidden(ours, tokens_T, torch.arange(30), lay_out(np.array([0, 30]), causal=False))
        torch.testing.assert_close(
            packed_TD, theirs(input_ids=tokens_T[None]).last_hidden_state[0], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("last", ["objective: meap", "attention: causal, mask_probability: 0.4"])
def test_what_ends_causal_is_exported_so(last: str, decoder: Path, tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    phases = f"curriculum=[{{objective: mlm, steps: 1}}, {{{last}, steps: 1}}]"
    run = train(tiny_recipe(*only("mlm", 1, phases), f"init={{model: {decoder}}}"), tmp_path / "runs")
    assert "causal" in export_checkpoint(str(run.path), tmp_path / "exported")
    assert read_json(tmp_path / "exported" / "config.json")["is_causal"] is True
    assert not looks_ahead(AutoModel.from_pretrained(tmp_path / "exported").eval())
    assert looks_ahead(AutoModel.from_pretrained(run.steps / "1" / "model").eval())


@pytest.mark.parametrize("kind", [MixtralConfig, Qwen3MoeConfig])
def test_a_mixture_of_experts_becomes_an_encoder(kind: Any, tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    """A changed token regroups the products of the experts, and moves other samples by rounding."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_local_experts": 4} if kind is MixtralConfig else {"num_experts": 4, "moe_intermediate_size": 24}
    config = kind(vocab_size=384, num_key_value_heads=2, num_experts_per_tok=2, head_dim=8, **sizes, **experts)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "mixture")
    run = train(tiny_recipe(f"init={{model: {tmp_path / 'mixture'}}}", *shorter("curriculum.1.steps=3")), tmp_path)
    assert "bidirectional" in export_checkpoint(str(run.path), tmp_path / "encoder")
    assert not isinstance(load_backbone(tmp_path / "encoder"), PaddedBackbone)


def test_adaptation_resumes_bit_exactly(decoder: Path, tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = tiny_recipe(f"init={{model: {decoder}}}", *shorter())
    whole = train(recipe, tmp_path / "whole")
    train_until(4, recipe, tmp_path / "parts")
    assert digests(train(recipe, tmp_path / "parts"), 6) == digests(whole, 6)


def test_a_hub_model_is_its_commit(
    decoder: Path, tiny_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named, or by `main`, the same commit is the same run; another commit is another run."""
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub" / "models--some--decoder"
    commits = ["a" * 40, "b" * 40]
    for commit in commits:
        shutil.copytree(decoder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()

    def adapt(**init: str) -> Path:
        recipe = tiny_recipe(*only("mlm", 1), f"init={json.dumps({'model': 'some/decoder', **init})}")
        return train(recipe, tmp_path / "runs").path

    found = []
    for commit in commits:
        (repository / "refs" / "main").write_text(commit)
        found.append(adapt())
        assert adapt(revision=commit) == found[-1]
    assert found[0] != found[1]
    with pytest.raises(InputError, match=r"model some/decoder at revision v2 is not a folder here and cannot be"):
        adapt(revision="v2")
    # An unfinished run is not begun anew at another commit, as after the cache was emptied.
    (repository / "refs" / "main").write_text(commits[0])
    recipe = tiny_recipe(*only("mlm", 3), "init={model: some/decoder}")
    begun = train_until(1, recipe, tmp_path / "parts")
    (repository / "refs" / "main").write_text(commits[1])
    told = rf"^{begun} began with another commit of some/decoder than b{{40}}: say init.revision=a{{40}} to continue"
    with pytest.raises(InputError, match=told):
        train(recipe, tmp_path / "parts")
    named = tiny_recipe(*only("mlm", 3), f"init={{model: some/decoder, revision: {commits[0]}}}")
    assert train(named, tmp_path / "parts").path == begun
    assert train(recipe, tmp_path / "parts").path != begun, "a finished run stands in nobody's way"


MASKED_FAMILIES = {
    "bert": (BertConfig, BertForMaskedLM),
    "roberta": (RobertaConfig, RobertaForMaskedLM),
    "modernbert": (ModernBertConfig, ModernBertForMaskedLM),
}


def save_masked(family: str, folder: Path, **settings: Any) -> Path:
    """A tiny masked language model, weights larger than usual, with the dropout of its kind and 90 positions."""
    config, kind = MASKED_FAMILIES[family]
    roles = {"pad_token_id": 2, "eos_token_id": 0, "bos_token_id": None, "cls_token_id": None, "sep_token_id": None}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    settings = {"vocab_size": 384, "max_position_embeddings": 90, "initializer_range": 0.1} | roles | sizes | settings
    model = kind(config(**settings))
    with torch.no_grad():  # a row of zeros is drawn anew, see `train_padding_row`
        model.get_input_embeddings().weight[settings["pad_token_id"]].normal_(std=0.1)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", mostly_later(MASKED_FAMILIES, "modernbert"))
def test_a_masked_language_model_goes_on(family: str, tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    """The first loss is the network's own on each sample alone, without dropout; batches exceed its positions."""
    folder = save_masked(family, tmp_path / family)
    recipe = tiny_recipe(f"init={{model: {folder}}}", *only("mlm", 12), "schedule.peak_lr=3e-3")
    whole = train(recipe, tmp_path / "whole")
    assert np.mean(losses(whole)[-3:]) < losses(whole)[0] - 0.3
    network = AutoModelForMaskedLM.from_pretrained(folder, attn_implementation="eager").eval()
    total, count = 0.0, 0
    for part in make_microbatches(*loader_of(recipe), recipe.curriculum[0], 0):
        assert len(part.inputs_T) > 90
        with torch.no_grad():
            alone = [
                network(input_ids=sample[None]).logits[0] for sample in part.inputs_T.split(part.lengths_S.tolist())
            ]
        logits_NV = torch.cat(alone)[part.target_positions_N]
        total += float(torch.nn.functional.cross_entropy(logits_NV, part.targets_N, reduction="sum"))
        count += len(part.targets_N)
    assert losses(whole)[0] == pytest.approx(total / count, rel=1e-5)
    train_until(4, recipe, tmp_path / "parts")
    assert digests(train(recipe, tmp_path / "parts"), 12) == digests(whole, 12)


def test_a_run_hands_on_the_dropout_of_its_model(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    """Pretraining uses none, but those who fine-tune its model draw what they would draw in the model before."""
    folder, runs = save_masked("bert", tmp_path / "bert"), tmp_path / "runs"
    recipe = tiny_recipe(f"init={{model: {folder}}}", *only("mlm", 4))
    train_until(2, recipe, runs)
    run = train(recipe, runs)
    export_checkpoint(str(run.path), tmp_path / "export")
    network: Any = load_backbone(tmp_path / "export")
    assert network.config.hidden_dropout_prob == 0 and {m.p for m in network.modules() if hasattr(m, "p")} == {0}
    torch.manual_seed(0)
    embedder: Any = fresh_backbone(network)
    save_encoder(tmp_path / "embedder", embedder, load_tokenizer(tmp_path / "export"))
    assert embedder.config.hidden_dropout_prob == 0
    places = [*(run.steps / step / "model" for step in "24"), tmp_path / "export", tmp_path / "embedder"]
    shares = [dropout_shares(load_model_config(place)) for place in [folder, *places]]
    assert shares == [{"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}] * 5


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_model_without_a_head_gets_a_new_one(
    is_tied: bool, decoder: Path, tiny_recipe: MakeRecipe, tmp_path: Path
) -> None:
    """As embedding models are published. It is tied where its class ties it, drawn once from the seed, and not anew
    where the run goes on."""
    folder = tmp_path / "headless"
    if is_tied:
        AutoModel.from_pretrained(save_masked("bert", tmp_path / "whole")).save_pretrained(folder)
    else:
        AutoModel.from_pretrained(decoder, tie_word_embeddings=False).save_pretrained(folder)

    def recipe(model: Path, *overrides: str, new_head: str = "true") -> Recipe:
        return tiny_recipe(f"init={{model: {model}, new_head: {new_head}}}", *only("mlm", 4), *overrides)

    lacks = f"{folder} is an embedding model without a language model head; init.new_head: true adds one"
    with pytest.raises(InputError, match=re.escape(lacks)):
        train(recipe(folder, new_head="false"), tmp_path / "runs")
    with pytest.raises(InputError, match="has a language model head: leave out init"):
        train(recipe(decoder), tmp_path / "runs")
    run = train(recipe(folder), tmp_path / "runs")
    assert losses(run)[-1] < losses(run)[0]
    assert losses(train(recipe(folder, "seed=1"), tmp_path / "runs"))[0] != losses(run)[0]
    train_until(2, recipe(folder), tmp_path / "parts")
    assert digests(train(recipe(folder), tmp_path / "parts"), 4) == digests(run, 4)
    network = AutoModelForMaskedLM if is_tied else AutoModelForCausalLM
    exported = network.from_pretrained(run.steps / "4" / "model")
    assert (exported.get_output_embeddings().weight is exported.get_input_embeddings().weight) == is_tied


def test_what_a_masked_language_model_cannot(tiny_recipe: MakeRecipe, corpus: Any, tmp_path: Path) -> None:
    def go_on(folder: Path, *overrides: str) -> None:
        train(tiny_recipe(*only("mlm", 1), f"init={{model: {folder}}}", *overrides), tmp_path / "runs")

    with pytest.raises(InputError, match=r"BertForMaskedLM as bidirectional only; leave clm out of the curriculum"):
        go_on(save_masked("bert", tmp_path / "bert"), "curriculum.0.objective=clm")
    with pytest.raises(InputError, match=r"leave causal-mlm out of the curriculum, or start from a decoder"):
        go_on(tmp_path / "bert", "curriculum.0.objective=causal-mlm")
    with pytest.raises(InputError, match=r"takes 47 positions; set data.max_sample_tokens=47"):
        go_on(save_masked("roberta", tmp_path / "short", max_position_embeddings=50))
    short = save_masked("roberta", tmp_path / "fits", max_position_embeddings=50)
    adapt = load_config(Recipe, BUNDLED / "recipes" / "adapt.yaml", [f"init.model={short}"])
    recipe, _ = begin_with_model(adapt, ShardSet(corpus.shards))
    assert recipe.data.max_sample_tokens == 47  # as many as its network takes
    with pytest.raises(InputError, match=r"from after its padding token 5, and that of the shards is 2: prepare"):
        go_on(save_masked("roberta", tmp_path / "padding", pad_token_id=5))


def test_a_foreign_model_must_fit(decoder: Path, tiny_recipe: MakeRecipe, corpus: Any, tmp_path: Path) -> None:
    def adapt(model: Path, *overrides: str) -> None:
        train(tiny_recipe(f"init={{model: {model}}}", *only("mlm", 1), *overrides), tmp_path / "runs")

    with pytest.raises(InputError, match=r"takes 128 positions; set data.max_sample_tokens=128"):
        adapt(decoder, "data.max_sample_tokens=200")
    with_other = shutil.copytree(decoder, tmp_path / "with_other")
    other_shards(corpus, tmp_path)
    shutil.copytree(tmp_path / "other_tokenizer", with_other, dirs_exist_ok=True)
    with pytest.raises(InputError, match="was made with tokenizer"):
        adapt(with_other)
    with_same = shutil.copytree(decoder, tmp_path / "with_same")
    shutil.copytree(corpus.tokenizer, with_same, dirs_exist_ok=True)
    adapt(with_same)
    small = tmp_path / "small"
    LlamaForCausalLM(LlamaConfig.from_pretrained(decoder, vocab_size=256)).save_pretrained(small)
    with pytest.raises(InputError, match="has 256 tokens and the shards have 384"):
        adapt(small)


STORY = """Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her \
friends. One day, she saw a big red ball. She wanted to play with it, but it was too high. Her mom said, "Lily, let's \
find a way to get the ball." Lily was happy. They found a long stick and the ball fell down. Lily and her mom played."""


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory, documents: list[str]) -> Path:
    """Shards in the vocabulary of the real decoder: llama2.c's pieces and scores as a BPE with byte fallback."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    pieces = [piece for piece, _ in read_json(STORIES / "tok512.json")]
    vocab = {piece.replace(" ", "▁"): number for number, piece in enumerate(pieces)}
    words = list(vocab)[259:]
    merges = [(w[:at], w[at:]) for w in words for at in range(1, len(w)) if w[:at] in vocab and w[at:] in vocab]
    backend = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    folder = tmp_path_factory.mktemp("stories")
    roles = {"unk_token": "<unk>", "bos_token": pieces[1], "eos_token": pieces[2]}
    PreTrainedTokenizerFast(tokenizer_object=backend, **roles).save_pretrained(folder / "plain")
    save_tokenizer(load_tokenizer(folder / "plain"), folder / "tokenizer")
    return prepare_texts(folder, train=documents, validation=[STORY]).shards


@pytest.mark.skipif(not STORIES.exists(), reason="../shared/data/decoder_stories260K is not here")
def test_a_real_decoder_becomes_an_encoder(stories: Path, tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = tiny_recipe(
        f"init={{model: {STORIES / 'hf'}}}",
        f"data.shards={stories}",
        "curriculum=[{objective: clm, steps: 1}, {objective: mlm, steps: 30, mask_probability: 0.2}]",
        "schedule={peak_lr: 3e-3, warmup_steps: 5, decay_steps: 10}",
        "validation.every_steps=0",
    )
    run = train(recipe, tmp_path)
    found, validation = losses(run), read_metrics(run, "validation")
    assert found[0] < 4.8, "a pretrained decoder predicts another book better than chance (6.2)"
    assert validation[0]["loss"] < 1.8, "and a story like those that it was trained on much better"
    assert np.mean(found[-5:]) < np.mean(found[1:4]) - 0.5
    folder = run.steps / "31" / "model"
    assert read_json(folder / "config.json")["is_causal"] is False
    assert looks_ahead(AutoModel.from_pretrained(folder).eval())
    assert not looks_ahead(AutoModel.from_pretrained(run.steps / "1" / "model").eval())
    assert AutoModelForCausalLM.from_pretrained(folder).lm_head.weight.shape[0] == 514  # 512, mask and pad
