"""Whole networks of seven families on packed tokens: who influences whom, against transformers' own arithmetic."""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_families import make_tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AlbertConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    CamembertConfig,
    DistilBertConfig,
    ElectraConfig,
    EsmConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    ModernBertConfig,
    Olmo2Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    RobertaConfig,
    RoCBertConfig,
    XLMRobertaConfig,
)

import biphase.encoder.network as load
from biphase.encoder.attention import ATTENTION, Backend, PackedLayout, explain_computing, lay_out, reference_attention
from biphase.encoder.network import TokenIds, load_backbone, load_model, make_model
from biphase.encoder.packed import LanguageModelHead, PackedModel, count_flops, packed_hidden
from biphase.encoder.proofs import FailedProofError, check_head, find_first_position, probe_causality
from biphase.errors import InputError
from biphase.flops import shape_of
from biphase.presets import PRESETS

V = 96
TINY = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
NO_GROUPS = {key: value for key, value in TINY.items() if key != "num_key_value_heads"}
TOKENS = TokenIds(V, mask_token_id=1, eos_token_id=2, pad_token_id=2, bos_token_id=None)
SMALL = {key: TINY[key] for key in list(TINY)[1:6]}

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**TINY),
    "qwen3": lambda: Qwen3Config(**TINY, head_dim=8),
    "gemma3": lambda: Gemma3TextConfig(
        **TINY, head_dim=8, sliding_window=3, layer_types=["sliding_attention", "full_attention"]
    ),
    "olmo2": lambda: Olmo2Config(**TINY),
    "gpt_neox": lambda: GPTNeoXConfig(**NO_GROUPS),
    "gpt2": lambda: GPT2Config(vocab_size=V, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "mistral_window": lambda: MistralConfig(**TINY, sliding_window=3),
}
REACH = {("mistral_window", True): 4, ("mistral_window", False): 6}
"""How far two layers carry: twice the window, less one each when causal, as transformers counts."""

LENGTHS = [7, 1, 6]
BOUNDS = np.array([0, 7, 8, 14])
POSITIONS = torch.tensor([0, 1, 2, 3, 4, 5, 6, 0, 0, 1, 2, 3, 4, 5])


def make_family(family: str) -> PreTrainedModel:
    """A tiny network with larger random weights than usual, so that each influence is far above rounding."""
    torch.manual_seed(0)
    if family == "eurobert":
        model = make_model("1m", SMALL | {"initializer_range": 0.2}, TOKENS, 64, seed=0)
    else:
        config = FAMILIES[family]()
        config.initializer_range, config.use_cache = 0.2, False
        for key in [key for key in config.to_dict() if "dropout" in key or key.endswith("_pdrop")]:
            if hasattr(config, key):
                setattr(config, key, 0.0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    return model.train()


def influence(model: PreTrainedModel, layout: PackedLayout) -> Tensor:
    """[T, T]: how strongly the output at t moves with the input embedding at s."""
    embedding: Any = model.get_input_embeddings()
    tokens_T = torch.arange(5, 5 + len(POSITIONS)) * 5 % V
    inputs_TD = embedding(tokens_T).detach().requires_grad_()
    output = model.base_model(
        inputs_embeds=inputs_TD[None], position_ids=POSITIONS[None], layout=layout, use_cache=False
    ).last_hidden_state[0]
    direction_D = torch.randn(output.shape[1], generator=torch.Generator().manual_seed(3))
    rows = [
        torch.autograd.grad(output[t] @ direction_D, inputs_TD, retain_graph=True)[0].norm(dim=-1)
        for t in range(len(output))
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("backend", ["buckets", "sdpa", "reference"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("family", ["eurobert", *FAMILIES])
def test_gradient_influence(family: str, causal: bool, backend: Backend) -> None:
    """Exactly zero across samples and, when causal, from the right; never zero where the objective may look."""
    places = np.arange(14)
    sample_T = np.searchsorted(BOUNDS, places, side="right")
    distance_TT = places[:, None] - places
    may_TT = (sample_T[:, None] == sample_T) & (np.abs(distance_TT) <= REACH.get((family, causal), 14))
    if causal:
        may_TT &= distance_TT >= 0
    influence_TT = influence(make_family(family), lay_out(BOUNDS, causal=causal, backend=backend))
    assert (influence_TT > 0).tolist() == may_TT.tolist()
    assert influence_TT[torch.from_numpy(may_TT)].min() > 1e-6


@pytest.mark.parametrize("backend", ["buckets", "sdpa"])
@pytest.mark.parametrize("family", ["eurobert", *FAMILIES])
def test_packed_is_alone_and_is_transformers(family: str, backend: Backend) -> None:
    """Each sample of a packed batch comes out as alone, and as transformers' own attention computes it.

    Of the families' own, EuroBERT's is bidirectional and the others' are causal.
    """
    model = make_family(family).eval()
    tokens_T = torch.arange(14) * 11 % V
    theirs = make_family(family).eval()
    theirs.load_state_dict(model.state_dict())
    theirs.set_attn_implementation("eager")
    with torch.no_grad():
        for causal in (True, False):
            layout = lay_out(BOUNDS, causal=causal, backend=backend)
            packed_TD = packed_hidden(model.base_model, tokens_T, POSITIONS, layout)
            for first, end in itertools.pairwise(BOUNDS):
                alone = lay_out(np.array([0, end - first]), causal=causal, backend=backend)
                part = slice(first, end)
                alone_TD = packed_hidden(model.base_model, tokens_T[part], POSITIONS[part], alone)
                torch.testing.assert_close(packed_TD[part], alone_TD, rtol=1e-4, atol=1e-5)
                if causal == (family != "eurobert"):
                    reference = theirs.base_model(input_ids=tokens_T[part][None], use_cache=False).last_hidden_state
                    torch.testing.assert_close(packed_TD[part], reference[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["buckets", "sdpa", "reference"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("family", ["eurobert", *FAMILIES])
def test_padding_changes_nothing(family: str, causal: bool, backend: Backend) -> None:
    """Neither the outputs nor the gradient of any weight."""
    found = []
    for pad_to_multiple_of in (1, 32):
        model = make_family(family)
        layout = lay_out(BOUNDS, causal=causal, backend=backend, pad_to_multiple_of=pad_to_multiple_of)
        hidden_TD = packed_hidden(model.base_model, torch.arange(14) * 11 % V, POSITIONS, layout)
        (hidden_TD * torch.randn(hidden_TD.shape, generator=torch.Generator().manual_seed(3))).sum().backward()
        gradients = [p.grad for p in model.base_model.parameters() if p.grad is not None]
        found.append([hidden_TD.detach(), *gradients])
    for filled, plain in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(filled, plain, rtol=0, atol=1e-5 * float(plain.abs().max()))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [("gemma2", "a cap on the scores"), ("gpt_oss", "sinks"), ("wide", "heads of width 264"), ("gemma4", "width 512")],
)
def test_what_varlen_cannot_do_is_computed_in_buckets_and_said(
    kind: str, reason: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU too, with the gradients of the slow twin; a layer that the kernel can do is left to it."""
    widths: list[int] = []

    def kernel(*args: Any) -> Tensor:
        widths.append(args[0].shape[2])
        return reference_attention(*args)

    monkeypatch.setattr("biphase.encoder.attention.varlen_attention", kernel)
    own = {
        "wide": LlamaConfig(**TINY, head_dim=264, initializer_range=0.2),
        "gemma4": Gemma4TextConfig(
            **TINY, head_dim=8, global_head_dim=512, layer_types=["sliding_attention", "full_attention"],
            vocab_size_per_layer_input=V, hidden_size_per_layer_input=8, initializer_range=0.2,
        ),
    }  # fmt: skip
    network: Any = AutoModel.from_config(own[kind]) if kind in own else make_tiny(kind).base_model
    network.eval().set_attn_implementation(ATTENTION)
    network.config.is_causal = causal
    assert not find_first_position(network, causal)

    def run(backend: Backend) -> list[Tensor]:
        layout = lay_out(BOUNDS, causal=causal, backend=backend, pad_to_multiple_of=32)
        hidden_TD = packed_hidden(network, torch.arange(5, 19) * 5 % V, POSITIONS, layout)
        weights = [weight for name, weight in network.named_parameters() if "self_attn" in name]
        return [hidden_TD, *torch.autograd.grad(hidden_TD.square().sum(), weights)]

    for found, expected in zip(run("varlen"), run("reference"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5 * float(expected.detach().abs().max()) + 1e-5)
    assert widths == ([8] if kind == "gemma4" else [])
    monkeypatch.setattr("biphase.encoder.attention.lacks_varlen", lambda device, dtype: "")
    line = explain_computing(torch.bfloat16, torch.device("cuda"), network)
    assert "attention: buckets" in line and reason in line


@pytest.mark.parametrize("family", ["eurobert", *FAMILIES])
def test_probe_and_head_of_each_family(family: str) -> None:
    model: Any = make_family(family)
    check_head(model)
    for causal in (True, False):
        probe_causality(partial(packed_hidden, model.base_model), causal, model.base_model)


def test_probe_catches_each_leak() -> None:
    base = make_family("llama").base_model

    def probe(causal: bool, change: Callable[[PackedLayout], PackedLayout]) -> None:
        def hidden_of(tokens_T: Tensor, positions_T: Tensor, layout: PackedLayout) -> Tensor:
            with torch.no_grad():
                return packed_hidden(base, tokens_T, positions_T, change(layout))

        probe_causality(hidden_of, causal, base)

    def flipped(layout: PackedLayout) -> PackedLayout:
        return lay_out(layout.bounds_S1.numpy(), causal=not layout.causal)

    def without_bounds(layout: PackedLayout) -> PackedLayout:
        return lay_out(layout.bounds_S1.numpy()[[0, -1]], causal=layout.causal)

    def blind(layout: PackedLayout) -> PackedLayout:
        return lay_out(np.arange(17), causal=layout.causal)

    probe(True, lambda layout: layout)
    with pytest.raises(FailedProofError, match="sees later tokens"):
        probe(True, flipped)
    with pytest.raises(FailedProofError, match="does not see later tokens"):
        probe(False, flipped)
    with pytest.raises(FailedProofError, match="see each other"):
        probe(True, without_bounds)
    with pytest.raises(FailedProofError, match="does not reach"):
        probe(True, blind)


def test_a_preset_is_the_papers_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parameters are counted in test_flops.py."""
    monkeypatch.setattr(load, "train_padding_row", lambda model: None)  # it looks at values; here are none
    with torch.device("meta"):
        model = make_model("210m", {}, TokenIds(128_256, 128_002, 128_001, 128_001, 128_000), 2048, seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == shape_of("210m", {}, 128_256).parameters
    assert all(len(parameter.shape) != 1 or "norm" in name for name, parameter in model.named_parameters()), "no biases"
    assert not any("bias" in name for name, _ in model.named_parameters())
    config = model.config
    assert (config.rms_norm_eps, config.rope_parameters["rope_theta"], config.hidden_act) == (1e-5, 10_000.0, "silu")
    assert not config.tie_word_embeddings


def test_initial_weights() -> None:
    model = make_model("1m", {}, TokenIds(2048, 1, 2, 2, None), 64, seed=5)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all()
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.03), name
            assert abs(parameter.mean().item()) < 0.001, name
    again = make_model("1m", {}, TokenIds(2048, 1, 2, 2, None), 64, seed=5)
    other = make_model("1m", {}, TokenIds(2048, 1, 2, 2, None), 64, seed=6)
    name, weight = next(iter(model.named_parameters()))
    assert torch.equal(weight, dict(again.named_parameters())[name])
    assert not torch.equal(weight, dict(other.named_parameters())[name])


def test_end_of_text_learns_where_it_is_the_padding_token() -> None:
    """In transformers, the embedding row of the padding token starts at zero and never gets a gradient."""
    model = PackedModel(make_family("eurobert"))
    tokens_T = torch.tensor([5, 6, 7, TOKENS.eos_token_id])
    loss, _, _ = model(
        tokens_T, torch.arange(4), lay_out(np.array([0, 4]), causal=False), torch.tensor([1]), torch.tensor([6])
    )
    loss.backward()
    embedding: Any = model.network.get_input_embeddings()
    assert embedding.weight[TOKENS.eos_token_id].any()
    assert embedding.weight.grad[TOKENS.eos_token_id].any()


@pytest.mark.parametrize("causal", [True, False])
def test_loss_is_that_of_all_logits(causal: bool) -> None:
    network = make_family("gpt_neox")
    model = PackedModel(network)
    tokens_T, layout = torch.arange(14) * 11 % V, lay_out(BOUNDS, causal=causal)
    at_N = torch.tensor([0, 3, 7, 13])
    loss, losses_N, _ = model(tokens_T, POSITIONS, layout, at_N, tokens_T[at_N])
    logits = network(input_ids=tokens_T[None], position_ids=POSITIONS[None], layout=layout).logits[0]
    expected = torch.nn.functional.cross_entropy(logits[at_N], tokens_T[at_N], reduction="none")
    torch.testing.assert_close(losses_N, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss, losses_N.sum())


class Products(TorchDispatchMode):
    """The types that matrix products are formed in."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[torch.dtype] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in str(function):
            self.types |= {x.dtype for x in args if isinstance(x, Tensor) and x.ndim == 2 and V in x.shape}
        return function(*args, **(kwargs or {}))


def test_head_computes_in_the_type_of_autocast() -> None:
    """The last norm leaves fp32; the products over the vocabulary must not be in fp32, forward or backward."""
    model = PackedModel(make_family("eurobert"))
    tokens_T, layout = torch.arange(14) * 11 % V, lay_out(BOUNDS, causal=False)
    with Products() as products:
        with torch.autocast("cpu", torch.bfloat16):
            loss, _, _ = model(tokens_T, POSITIONS, layout, torch.arange(14), tokens_T)
        loss.backward()
    assert products.types == {torch.bfloat16}
    exact, _, _ = model(tokens_T, POSITIONS, layout, torch.arange(14), tokens_T)
    assert loss.item() == pytest.approx(exact.item(), rel=0.02)


MASKED: dict[str, PretrainedConfig] = {
    "albert": AlbertConfig(**NO_GROUPS, embedding_size=16),
    "bert": BertConfig(**NO_GROUPS),
    "camembert": CamembertConfig(**NO_GROUPS),
    "distilbert": DistilBertConfig(vocab_size=V, dim=32, n_layers=2, n_heads=4, hidden_dim=64, pad_token_id=0),
    "electra": ElectraConfig(**NO_GROUPS, embedding_size=16),
    "esm": EsmConfig(**NO_GROUPS, mask_token_id=4),
    "modernbert": ModernBertConfig(**NO_GROUPS, local_attention=16),
    "roberta": RobertaConfig(**NO_GROUPS),
    "roc_bert": RoCBertConfig(**NO_GROUPS, enable_pronunciation=False, enable_shape=False),
    "xlm-roberta": XLMRobertaConfig(**NO_GROUPS),
}


@pytest.mark.parametrize("family", MASKED)
def test_the_transform_of_a_masked_head(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours gives the network's own losses; left out, it is noticed."""
    config = MASKED[family]
    config.initializer_range = 0.2
    torch.manual_seed(0)
    saved = AutoModelForMaskedLM.from_config(config)
    saved.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    assert type(model) is type(saved)
    assert model.base_model.first_position == (1 if family in ("camembert", "esm", "roberta", "xlm-roberta") else 0)
    check_head(model)
    flops = count_flops(model)
    width = model.get_output_embeddings().weight.shape[1]
    assert flops.per_target == 6 * (32 * width + width * V)
    monkeypatch.setattr(LanguageModelHead, "__call__", lambda head, hidden_ND: hidden_ND)
    with pytest.raises(InputError, match=r"ForMaskedLM: its head (gives token \d of 8 a loss of|needs output emb)"):
        check_head(model)


def test_a_head_that_scales_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale is part of the loss; left out, it is noticed, even where fresh logits are small."""
    config = GraniteConfig(**TINY, logits_scaling=8.0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    check_head(model)
    monkeypatch.setattr(LanguageModelHead, "__call__", lambda head, hidden_ND: hidden_ND)
    with pytest.raises(InputError, match="GraniteForCausalLM: its head gives token"):
        check_head(model)


def test_flops_are_six_per_weight_and_token() -> None:
    flops = count_flops(make_family("eurobert"))
    width, ffn, layers, kv = 32, 48, 2, 2 * 8
    blocks = layers * (2 * width * width + 2 * width * kv + 3 * width * ffn)
    assert flops.per_token == 6 * blocks
    assert flops.per_target == 6 * width * V
    lengths = np.array([10, 20])
    pairs = 12 * layers * width * (10**2 + 20**2)
    assert flops.batch(lengths, 5, causal=False) == 6 * blocks * 30 + pairs + 5 * 6 * width * V
    assert flops.batch(lengths, 0, causal=True) == 6 * blocks * 30 + pairs / 2


def test_load_model(tmp_path: Path) -> None:
    saved = make_family("llama")
    saved.config.attention_dropout = 0.1
    saved.save_pretrained(tmp_path / "llama")
    loaded = load_model(tmp_path / "llama", vocab_size=V + 1)
    assert loaded.config.attention_dropout == 0
    assert loaded.config._attn_implementation == ATTENTION
    assert loaded.get_input_embeddings().weight.shape == loaded.get_output_embeddings().weight.shape == (V + 1, 32)
    assert torch.equal(loaded.get_input_embeddings().weight[1:V], saved.get_input_embeddings().weight[1:])
    assert loaded.get_input_embeddings().weight[0].any(), "the padding row learns too"
    assert all(parameter.dtype == torch.float32 for parameter in loaded.parameters())
    assert load_backbone(tmp_path / "llama").config._attn_implementation == ATTENTION


def test_load_model_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no such folder"):
        load_model(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="cannot read a model configuration"):
        load_model(tmp_path / "empty")
    model = make_family("llama")
    model.save_pretrained(tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(InputError, match="cannot load weights"):
        load_model(tmp_path / "cut")
    state = model.state_dict()
    del state["model.layers.1.mlp.up_proj.weight"]
    model.save_pretrained(tmp_path / "lacking", state_dict=state)
    with pytest.raises(InputError, match=r"lacks 1 weights of LlamaForCausalLM, such as 'model.layers.1.mlp.up_proj"):
        load_model(tmp_path / "lacking")


def test_make_model_names_what_is_wrong() -> None:
    with pytest.raises(InputError, match="unknown preset '210n'; did you mean '210m'"):
        make_model("210n", {}, TOKENS, 64, 0)
    with pytest.raises(InputError, match="unknown key 'num_layers'; did you mean 'num_hidden_layers'"):
        make_model("1m", {"num_layers": 3}, TOKENS, 64, 0)
    with pytest.raises(InputError, match=r"init.architecture makes no network .*number of attention heads \(5\)"):
        make_model("1m", {"num_attention_heads": 5}, TOKENS, 64, 0)
    with pytest.raises(InputError, match=r"3 key-value heads do not divide 4 query heads"):
        make_model("1m", {"num_key_value_heads": 3}, TOKENS, 64, 0)
    with pytest.raises(InputError, match=r"'hidden_size' is 'wide'; it must be a whole number"):
        make_model("1m", {"hidden_size": "wide"}, TOKENS, 64, 0)
    with pytest.raises(InputError, match=r"num_hidden_layers 100000; at most 1,000 are allowed"):
        make_model("1m", {"num_hidden_layers": 100_000}, TOKENS, 64, 0)
    with pytest.raises(InputError, match=r"init.architecture makes no network .*hidden_act"):
        make_model("1m", {"hidden_act": 3}, TOKENS, 64, 0)
    with pytest.raises(InputError, match=r"max_position_embeddings is 16; set data.max_sample_tokens=16 or lower"):
        make_model("1m", {"max_position_embeddings": 16}, TOKENS, 64, 0)
    assert set(PRESETS) >= {"210m", "610m", "1b"}
