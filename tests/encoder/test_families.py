"""Every model type of transformers, tiny and random: equal to plain transformers on each text alone, or refused.

`pytest tests/encoder/test_families.py -m "slow or not slow"` goes through all of them (`make families`), and writes
docs/families.md anew with `--update-golden`, and the sentence of docs/promises.md from it. Without `slow`, a few of
each kind.
"""

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from tiny_families import SEVERAL_PARTS, layer_kinds, make_tiny, model_types, save_tiny, tiny_config
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM, Gemma2Config

from biphase.encoder.attention import ATTENTION, lay_out
from biphase.encoder.network import PaddedBackbone, load_backbone, load_model
from biphase.encoder.packed import PackedModel, count_flops, packed_hidden
from biphase.encoder.proofs import check_directions, check_head
from biphase.errors import InputError
from biphase.flops import LLAMA_SHAPED, read_shape
from biphase.hub import output_width

ROOT = Path(__file__).parents[2]
DOCS, PROMISES = ROOT / "docs" / "families.md", ROOT / "docs" / "promises.md"
CLAIM = re.compile(r"- \*\*Correct, or rejected\..*?(?=\n- )", re.DOTALL)
WAYS = ("packed", "padded", "equal lengths")
QUICK = (
    *("bert", "deberta-v2", "fnet", "gemma2", "gpt2", "gpt_oss", "lfm2_moe", "llama", "modernbert", "qwen3_moe"),
    *("roberta", "t5"),
)
LENGTHS = [21, 2, 5, 40, 13, 40]
TOLERANCE = 1e-4
"""In units of the hidden states' mean size."""


@dataclass(frozen=True)
class Row:
    """What becomes of a type: `packed`, `padded`, `equal lengths`, or the reason of a refusal."""

    pretrain: str
    evaluate: str


def alone(network: Any, texts: Sequence[Tensor], what: str = "last_hidden_state") -> Tensor:
    """Plain transformers, each text alone; PyTorch's attention where the eager one takes no mask for an error."""
    with torch.no_grad():
        try:
            network.set_attn_implementation("eager")
            return torch.cat([network(input_ids=text[None])[what][0] for text in texts])
        except TypeError:
            network.set_attn_implementation("sdpa")
            return torch.cat([network(input_ids=text[None])[what][0] for text in texts])


def as_published_or_switched(network: Any, folder: Path) -> Any:
    """The same weights in plain transformers, with `is_causal` where ours was given it."""
    config = AutoConfig.from_pretrained(folder).get_text_config()
    if network.config.__dict__.get("is_causal") is False:
        config.is_causal = False
    return AutoModel.from_pretrained(folder, attn_implementation="eager", config=config).eval()


def evaluate(folder: Path, tokens: Tensor) -> str:
    backbone: Any = load_backbone(folder)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    layout = lay_out(np.cumsum([0, *LENGTHS]), causal=False, pad_to_multiple_of=32)
    with torch.no_grad():
        ours = packed_hidden(backbone.eval(), tokens, positions, layout)
    assert ours.shape[1] == output_width(backbone.config)
    is_padded = isinstance(backbone, PaddedBackbone)
    theirs = as_published_or_switched(backbone.network if is_padded else backbone, folder)
    expected = alone(theirs, tokens.split(LENGTHS))
    size = float(expected.abs().mean())
    assert float((ours - expected).abs().max()) < TOLERANCE * size
    changed = tokens[: LENGTHS[0]].clone()
    changed[20] = 4 + (changed[20] - 3) % 110  # the last token of the first text: the ones before it must move
    moved = (alone(theirs, [changed]) - expected[: LENGTHS[0]]).abs().amax(-1) / size
    assert (moved[13:20] > 1e-5).all(), "it looks back only"
    if is_padded:
        return "equal lengths" if backbone.equal_lengths else "padded"
    return "packed"


def pretrain(folder: Path, tokens: Tensor) -> str:
    """Each target's loss, against the logits of the model's own forward pass on each text alone."""
    model = load_model(folder)
    check_head(model)
    published = model.config.__dict__.get("is_causal")
    is_decoder = "CausalLM" in type(model).__name__ or "LMHead" in type(model).__name__
    if is_decoder:
        check_directions(model, (False, True))
    assert count_flops(model).token(keys=16, targets=1) == pytest.approx(3 * plain_flops(model, 16) / 16, rel=0.03)
    model.save_pretrained(folder / "written")
    if is_decoder and published is not False:
        compare_losses(model, tokens, folder / "written", causal=True)
    compare_losses(model, tokens, folder / "written", causal=False, is_switched=is_decoder)
    return "packed"


def compare_losses(model: Any, tokens: Tensor, folder: Path, causal: bool, is_switched: bool = False) -> None:
    """Ours with the configuration that training has, theirs of what is written, with the switch of an export."""
    targets, positions = tokens.roll(-1), torch.cat([torch.arange(length) for length in LENGTHS])
    with torch.no_grad():
        layout = lay_out(np.cumsum([0, *LENGTHS]), causal=causal)
        ours = PackedModel(model).eval()(tokens, positions, layout, torch.arange(len(tokens)), targets)[1]
    config = AutoConfig.from_pretrained(folder)
    if is_switched:
        config.is_causal = False
    logits = alone(type(model).from_pretrained(folder, config=config).eval(), tokens.split(LENGTHS), "logits")
    expected = nn.functional.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4 * float(logits.std()) + 1e-5)


def plain_flops(model: Any, length: int) -> int:
    """What PyTorch's counter counts while plain transformers reads a text, its experts one by one."""
    implementations = model.config._attn_implementation, model.config._experts_implementation
    model.set_attn_implementation("eager")
    model.config._experts_implementation = "eager"
    with FlopCounterMode(display=False) as counted:
        model(input_ids=torch.arange(length)[None] * 7 % model.config.vocab_size)
    model.set_attn_implementation(implementations[0])
    model.config._experts_implementation = implementations[1]
    return counted.get_total_flops()


def outcome(model_type: str, folder: Path) -> Row:
    save_tiny(model_type, folder)
    tokens = 4 + torch.randint(110, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    found = []
    for verb in (pretrain, evaluate):
        try:
            found.append(verb(folder, tokens))
        except InputError as error:
            line = str(error).replace(str(folder), "the folder")
            assert "\n" not in line
            found.append(line)
    return Row(*found)


@pytest.mark.parametrize("model_type", QUICK)
def test_a_few_of_each_kind(model_type: str, tmp_path: Path) -> None:
    row, documented = outcome(model_type, tmp_path), read_rows(DOCS.read_text(encoding="utf-8"))[model_type]
    assert (shown(row.pretrain), shown(row.evaluate)) == (documented.pretrain, documented.evaluate)


def test_what_looks_back_whatever_its_configuration_says_is_trained_as_it_is_exported(tmp_path: Path) -> None:
    """Gemma 2's attention modules heed `use_bidirectional_attention`, its masks do not."""
    sizes: dict[str, Any] = {
        "vocab_size": 120,
        "hidden_size": 32,
        "intermediate_size": 48,
        "head_dim": 16,
        "pad_token_id": 0,
    }
    layers: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Gemma2Config(**sizes, **layers, sliding_window=8, use_bidirectional_attention=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokens = 4 + torch.arange(sum(LENGTHS)) * 7 % 110
    assert pretrain(tmp_path, tokens) == evaluate(tmp_path, tokens) == "packed"


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3"])
def test_types_of_llamas_shape(model_type: str) -> None:
    check_shape(model_type)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(LLAMA_SHAPED & {*model_types()}))
def test_all_types_of_llamas_shape(model_type: str) -> None:
    check_shape(model_type)


def check_shape(model_type: str) -> None:
    """What a configuration tells of parameters and FLOPs is what the network has."""
    model = make_tiny(model_type)
    model.set_attn_implementation(ATTENTION)
    shape = read_shape(model.config.to_dict())
    assert shape.flops == replace(count_flops(model), windows=()), "a shape has no windows"
    assert shape.parameters == pytest.approx(sum(weight.numel() for weight in model.parameters()), rel=0.02)


@pytest.mark.slow
@pytest.mark.minutes
@pytest.mark.parametrize("part", range(4))
def test_every_type_is_right_or_refused(part: int, tmp_path: Path, update_golden: bool) -> None:
    """As the table says, which one part writes; the others run beside each other."""
    if update_golden and part > 0:
        pytest.skip("with --update-golden the first part tries every type and writes the whole table")
    names = model_types() if update_golden else sorted({*model_types()} - {*QUICK})[part::4]
    rows = {name: outcome(name, tmp_path / name) for name in names}
    if update_golden:
        DOCS.write_text(as_page(rows), encoding="utf-8")
        claimed = CLAIM.sub(lambda _: as_claim(DOCS.read_text(encoding="utf-8")), PROMISES.read_text(encoding="utf-8"))
        PROMISES.write_text(claimed, encoding="utf-8")
    page = DOCS.read_text(encoding="utf-8")
    if f"with transformers {transformers.__version__} and" in page:
        documented = read_rows(page)
        found = {name: Row(shown(row.pretrain), shown(row.evaluate)) for name, row in rows.items()}
        assert found == {name: documented[name] for name in rows}


@pytest.mark.slow
@pytest.mark.minutes
def test_a_tiny_network_has_each_kind_of_layer_of_its_type() -> None:
    """The table would else be of networks that nobody has: an LFM2 without a convolution could be trained."""
    lacking = {name: layer_kinds(CONFIG_MAPPING[name]()) - layer_kinds(tiny_config(name)) for name in model_types()}
    assert {name: kinds for name, kinds in lacking.items() if kinds} == {}


def test_the_table_and_the_claim_are_not_stale() -> None:
    """The promise says what the table says, and the table has the types of the newest transformers that it was tried
    with. Stale: `make families`."""
    page = DOCS.read_text(encoding="utf-8")
    found = CLAIM.search(PROMISES.read_text(encoding="utf-8"))
    assert found is not None
    assert found[0] == as_claim(page), "docs/promises.md says something else than docs/families.md: make families"
    tried, here = Version(re.findall(r"transformers ([\d.]+) and", page)[0]), Version(transformers.__version__)
    assert here <= tried, f"docs/families.md is of transformers {tried}, and {here} is installed: make families"
    if here == tried:
        assert sorted(read_rows(page)) == model_types(), "docs/families.md lacks types, or has too many: make families"
        assert all(name in page for name in SEVERAL_PARTS)


def read_rows(page: str) -> dict[str, Row]:
    """The table of the docs, read back."""
    cells = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return {name: Row(pretrained, evaluated) for name, pretrained, evaluated in cells[1:]}


def as_claim(page: str) -> str:
    """The sentence of the promise, counted in the table."""
    rows = read_rows(page).values()
    evaluated = sum(row.evaluate in WAYS for row in rows)
    day, version = re.findall(r"as of ([\d-]+) with transformers ([\d.]+)", page)[0]
    refused = sum(row.pretrain not in WAYS and row.evaluate not in WAYS for row in rows)
    text = (
        f"- **Correct, or rejected.** Of the {len(rows)} text model types in transformers {version}, "
        f"{sum(row.pretrain in WAYS for row in rows)} can be pretrained or adapted and "
        f"{evaluated} can be evaluated, each tested to match plain transformers; {refused} are rejected for both, "
        f"with a reason (as of {day}: [all of them](families.md)). `encoder/test_families.py`"
    )
    return textwrap.fill(text, 120, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


def as_page(rows: dict[str, Row]) -> str:
    """The table of the docs."""
    pretrained = sum(row.pretrain == "packed" for row in rows.values())
    evaluated = sum(row.evaluate in WAYS for row in rows.values())
    lines = [
        "# Model types of transformers",
        "",
        f"Of the {len(rows)} types that have a language model head or are made for text, {pretrained} can be "
        f"pretrained or adapted and {evaluated} can be evaluated, as of {date.today():%Y-%m-%d} with transformers "
        f"{transformers.__version__} and PyTorch {torch.__version__.partition('+')[0]}. `make families` writes this "
        "page. It compares a tiny random network of each type with plain transformers (eager attention, each text "
        "alone, unequal lengths, fp32), and checks that changing a token changes the output of every earlier one.",
        "",
        "*packed*: flat tokens, no padding. *padded*: correct, but slower (docs/LOG.md). *equal lengths*: texts of one "
        "length at a time, because padding changes the outputs. Any other entry is the reason for a rejection. "
        "In decoders, layers other than attention (recurrences, convolutions) still look back only. "
        "A mixture of experts is trained without its auxiliary load-balancing loss, because its router was already "
        "trained with that loss, and comparisons use the loss of the objective alone. A PhiMoE model whose attention "
        "window is shorter than its maximum length is rejected for pretraining.",
        "",
        "If a model also reads images or sound (Gemma 3, Llama 4, Qwen-VL …), run `biphase convert` first: it writes "
        "the model's text network to a folder. The table lists the types of such text networks. The types of the whole "
        f"models were not tried: {', '.join(SEVERAL_PARTS)}.",
        "",
        "| type | pretrain | evaluate |",
        "|---|---|---|",
        *(f"| {name} | {shown(row.pretrain)} | {shown(row.evaluate)} |" for name, row in rows.items()),
    ]
    return "\n".join(lines) + "\n"


def shown(cell: str) -> str:
    """A reason without what each of its kind says."""
    for words in ("the folder: ", "the folder "):
        cell = cell.replace(words, "")
    cell = re.sub(r"no proof that packing changes nothing for (\w+)", r"\1", cell)
    return cell.replace("|", "/")
