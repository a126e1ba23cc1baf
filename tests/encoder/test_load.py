"""Networks of many families, tiny and random: packed = alone, bidirectional, or refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AlbertConfig,
    AutoConfig,
    AutoModel,
    BertConfig,
    BloomConfig,
    CodeGenConfig,
    DebertaV2Config,
    DistilBertConfig,
    ElectraConfig,
    FNetConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    ModernBertConfig,
    MPNetConfig,
    MptConfig,
    PretrainedConfig,
    Qwen3Config,
    RobertaConfig,
    T5Config,
    XLMRobertaConfig,
    YosoConfig,
)

from biphase.encoder.attention import PAD_TO_MULTIPLE_OF, lay_out
from biphase.encoder.load import fresh_backbone, load_backbone
from biphase.encoder.packed import PaddedBackbone, packed_hidden
from biphase.errors import InputError

SMALL = {
    "vocab_size": 120,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 160,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 8}
PACKED: dict[str, PretrainedConfig] = {
    "bert": BertConfig(**SMALL),
    "roberta": RobertaConfig(**SMALL),
    "xlm-roberta": XLMRobertaConfig(**SMALL),
    "modernbert": ModernBertConfig(**SMALL, cls_token_id=2, sep_token_id=3, local_attention=16),
    "electra": ElectraConfig(**SMALL, embedding_size=16),
    "albert": AlbertConfig(**SMALL, embedding_size=16),
    "distilbert": DistilBertConfig(vocab_size=120, dim=32, n_layers=2, n_heads=4, hidden_dim=64),
    "llama": LlamaConfig(**GROUPED),
    "qwen3": Qwen3Config(**GROUPED),
    "gemma3": Gemma3TextConfig(**GROUPED, sliding_window=8, query_pre_attn_scalar=8),
    "gpt2": GPT2Config(vocab_size=120, n_embd=32, n_layer=2, n_head=4, n_positions=160, bos_token_id=2, eos_token_id=3),
    "gpt-neox": GPTNeoXConfig(**SMALL),
}
SHORT = {"vocab_size": 120, "n_head": 4}
PADDED: dict[str, PretrainedConfig] = {
    "bloom": BloomConfig(**SHORT, hidden_size=32, n_layer=2),
    "codegen": CodeGenConfig(**SHORT, n_embd=32, n_layer=2, rotary_dim=4, n_positions=160),
    "deberta-v2": DebertaV2Config(**SMALL),
    "mpnet": MPNetConfig(**SMALL),
}
EVERY = PACKED | PADDED
REFUSED: dict[str, PretrainedConfig] = {
    "gpt-neo": GPTNeoConfig(
        vocab_size=120, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
    ),
    "mamba": MambaConfig(vocab_size=120, hidden_size=32, num_hidden_layers=2, state_size=4),
    "mpt": MptConfig(vocab_size=120, d_model=32, n_layers=2, n_heads=4, max_seq_len=160),
}


def save(config: PretrainedConfig, folder: Path) -> Path:
    torch.manual_seed(0)
    AutoModel.from_config(config).save_pretrained(folder)
    return folder


def hidden(backbone: torch.nn.Module, lengths: list[int], tokens: torch.Tensor) -> torch.Tensor:
    positions = torch.cat([torch.arange(length) for length in lengths])
    layout = lay_out(np.cumsum([0, *lengths]), causal=False, pad_to_multiple_of=PAD_TO_MULTIPLE_OF)
    with torch.no_grad():
        return packed_hidden(backbone.eval(), tokens, positions, layout)


@pytest.mark.parametrize("family", EVERY)
def test_packed_equals_what_transformers_computes_alone(family: str, tmp_path: Path) -> None:
    folder = save(EVERY[family], tmp_path)
    backbone = load_backbone(folder)
    assert isinstance(backbone, PaddedBackbone) == (family in PADDED)
    lengths = [40, 1, 13, 40]
    tokens = 4 + torch.randint(110, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    config = AutoConfig.from_pretrained(folder)
    config.is_causal = False
    theirs = AutoModel.from_pretrained(folder, attn_implementation="eager", config=config).eval()
    with torch.no_grad():
        alone = torch.cat([theirs(input_ids=part[None]).last_hidden_state[0] for part in tokens.split(lengths)])
    torch.testing.assert_close(hidden(backbone, lengths, tokens), alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", EVERY)
def test_every_network_becomes_bidirectional(family: str, tmp_path: Path) -> None:
    backbone = load_backbone(save(EVERY[family], tmp_path))
    tokens = 4 + torch.arange(12)
    changed = tokens.clone()
    changed[10] = 99
    assert (hidden(backbone, [6, 6], changed) != hidden(backbone, [6, 6], tokens)).any(1).tolist() == [False] * 6 + [
        True
    ] * 6


@pytest.mark.parametrize("family", ["roberta", "mpnet"])
def test_fresh_weights_are_of_the_same_kind(family: str, tmp_path: Path) -> None:
    backbone = load_backbone(save(EVERY[family], tmp_path))
    fresh = fresh_backbone(backbone)
    assert type(fresh) is type(backbone)
    tokens = 4 + torch.arange(12)
    ours, theirs = hidden(fresh, [5, 7], tokens), hidden(backbone, [5, 7], tokens)
    assert ours.shape == theirs.shape and not torch.equal(ours, theirs)
    torch.testing.assert_close(hidden(fresh, [5], tokens[:5]), ours[:5])


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gpt-neo", "GPTNeoModel: a bidirectional objective does not see later tokens"),
        ("mamba", "MambaModel: a bidirectional objective does not see later tokens"),
        ("mpt", "cannot be made a bidirectional encoder"),
    ],
)
def test_decoders_and_oddities_that_stay_as_they_are(family: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        load_backbone(save(REFUSED[family], tmp_path))
    assert "\n" not in str(caught.value)


def test_what_is_refused(tmp_path: Path) -> None:
    folder = save(BertConfig(**SMALL), tmp_path / "bert")
    (folder / "model.safetensors").rename(folder / "elsewhere")
    with pytest.raises(InputError, match="has no weights"):
        load_backbone(folder)
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(InputError, match="as a pickle only"):
        load_backbone(folder)
    small = {"vocab_size": 100, "d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2}
    with pytest.raises(InputError, match="encoder-decoder"):
        load_backbone(save(T5Config(**small), tmp_path / "t5"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="cannot read a model configuration"):
        load_backbone(tmp_path / "empty")


@pytest.mark.parametrize("kind", [FNetConfig, YosoConfig])
def test_who_depends_on_its_neighbours_lengths_reads_equal_ones_together(kind: type, tmp_path: Path) -> None:
    backbone = load_backbone(save(kind(**SMALL), tmp_path))
    assert isinstance(backbone, PaddedBackbone) and backbone.equal_lengths
    tokens = 4 + torch.arange(60) * 3 % 110
    together = hidden(backbone, [20, 7, 20, 13], tokens)
    alone = torch.cat([hidden(backbone, [len(part)], part) for part in tokens.split([20, 7, 20, 13])])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    assert fresh_backbone(backbone).equal_lengths


@pytest.mark.parametrize("kind", [BertConfig, MPNetConfig])
def test_two_loads_of_a_folder_are_equal(kind: type, tmp_path: Path) -> None:
    """The padding row, too, which is zero in fresh weights."""
    folder = save(kind(**SMALL), tmp_path)
    first, second = load_backbone(folder), load_backbone(folder)
    for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert not first.get_input_embeddings().weight[1].any()
