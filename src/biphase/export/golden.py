"""Three texts and what a model folder gives for them, in a small file beside its weights, with which the answers of
whatever else opens the folder are compared.

The numbers are those of transformers, or of sentence-transformers where a folder is one of its own, for each text
alone: an embedding, or the logits of a head. What a network would give that looks the other way, pools otherwise or
does not close its texts tells by which mistake another program's answer came about.

Letters: L tokens of a text, D width.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from biphase.corpus.tokenizer import load_pretrained_tokenizer
from biphase.encoder.attention import ATTENTION, lay_out
from biphase.encoder.network import load_weights, pad_batch
from biphase.encoder.proofs import FailedProofError, foreign_errors_fail, looks_both_ways
from biphase.files import read_json_as, write_json
from biphase.hub import count_positions, load_model_config
from biphase.tasks.families import KINDS

GOLDEN = "golden.json"
TEXTS = (
    "The keeper of the lighthouse counted the ships that passed before dawn.",
    "Rain.",
    "Größe, naïve café, 東京, Москва: 3.14 % of 1,024 words; and what stands at the end of a text decides how its "
    "beginning is read, does it not?",
)
"""Texts of unequal lengths, in several scripts, the longest not the first: padding and tokenizer show in them."""
DIGITS = 6
"""The significant digits of a number in the file."""

WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "the mean over the tokens": lambda hidden_LD: hidden_LD.mean(0),
    "the first token": lambda hidden_LD: hidden_LD[0],
    "the last token": lambda hidden_LD: hidden_LD[-1],
    "the largest value of each dimension": lambda hidden_LD: hidden_LD.amax(0),
}
"""Ways to make one row of the hidden states [L, D] of a text."""


@dataclass(frozen=True)
class Golden:
    """What a folder gives for some texts."""

    output: Literal["embedding", "logits"]
    texts: list[str]
    ids: list[list[int]]
    """The tokens of each text, closed as the folder's tokenizer closes it."""
    values: list[Any]
    """An embedding [D] of each text, or its logits: one for each class, of a network for tokens so for each token."""


class PlainModel:
    """A model folder as transformers alone, or sentence-transformers, computes with it, in fp32 on the CPU.

    With our own `attention`, a layout says which way the network looks. Raises `InputError` where transformers cannot
    load the folder.
    """

    def __init__(self, folder: Path, attention: str | None = None) -> None:
        names = read_json_as(folder / "config.json", dict[str, Any]).get("architectures") or []
        heads = (kind.head for kind in KINDS.values() if any(str(name).endswith(kind.head) for name in names))
        self.head = next(heads, "")
        kind = getattr(transformers, f"AutoModel{self.head}")
        self.network: Any = load_weights(kind, folder, attention=attention).eval()
        self.modules: list[nn.Module] = []
        """What follows the network in sentence-transformers, where that is more than the mean over the tokens."""
        if not self.head and not takes_mean(folder):
            from sentence_transformers import SentenceTransformer

            settings: dict[str, Any] = {"trust_remote_code": False, "model_kwargs": {"dtype": torch.float32}}
            self.modules = list(SentenceTransformer(str(folder), device="cpu", **settings))[1:]

    @torch.no_grad()
    def read(self, rows: Sequence[Sequence[int]], layout: Any = None) -> list[Tensor]:
        """Compute the hidden states [L, D] of each text, or its logits, of one padded batch; with a layout, of one
        text."""
        batch: dict[str, Any] = pad_batch([torch.tensor(row) for row in rows], self.network.config.pad_token_id or 0)
        if layout is not None:
            batch = {"input_ids": batch["input_ids"], "layout": layout}
        output = self.network(**batch)
        is_span = "start_logits" in output
        states = torch.stack([output.start_logits, output.end_logits], -1) if is_span else output[0]
        return [part[: len(row)] if states.ndim == 3 else part for part, row in zip(states, rows, strict=True)]

    @torch.no_grad()
    def pool(self, hidden_LD: Tensor, way: str | None = None) -> Tensor:
        """Make the embedding [D] of a text's hidden states, as the folder says or another way."""
        if self.head:
            return hidden_LD
        if not self.modules:
            return WAYS[way or "the mean over the tokens"](hidden_LD)
        features = {"token_embeddings": hidden_LD[None], "attention_mask": torch.ones(1, len(hidden_LD))}
        if way is not None:
            features["sentence_embedding"] = WAYS[way](hidden_LD)[None]
        for module in self.modules if way is None else self.modules[1:]:
            features = module(features)
        return features["sentence_embedding"][0]

    def answer(self, rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Answer texts in one padded batch, by their tokens."""
        return [self.pool(part).numpy() for part in self.read(rows)]


def read_pooling(folder: Path) -> list[str]:
    """Read how sentence-transformers pools a folder's tokens, such as `mean`; rows of several lie side by side."""
    modes: list[str] = []
    for path in sorted(folder.glob("*_Pooling/config.json")):
        content = read_json_as(path, dict[str, Any], "save the model anew")
        named = content.get("pooling_mode") or []
        modes += [named] if isinstance(named, str) else named
        keys = [key for key, value in content.items() if key.startswith("pooling_mode_") and value is True]
        modes += [key.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token") for key in keys]
    return modes


def takes_mean(folder: Path) -> bool:
    """Tell whether an embedding of a folder is the mean over a text's tokens, and nothing follows."""
    path = folder / "modules.json"
    return not path.exists() or (read_pooling(folder) == ["mean"] and len(read_json_as(path, list[Any])) == 2)


def split_texts(folder: Path, texts: Sequence[str], **settings: Any) -> list[list[int]]:
    """Tokenize texts as a folder's tokenizer does, cut where it or the network ends."""
    tokenizer = load_pretrained_tokenizer(folder)
    longest = min(tokenizer.model_max_length, count_positions(load_model_config(folder)))
    rows: list[list[int]] = tokenizer(list(texts), truncation=True, max_length=longest, **settings)["input_ids"]
    return rows


def make_golden(folder: Path) -> Golden:
    """Compute what a folder gives for the texts, each alone. Raises `FailedProofError` where that are no numbers."""
    model, ids = PlainModel(folder), split_texts(folder, TEXTS)
    values = [model.answer([row])[0] for row in ids]
    if not all(np.isfinite(part).all() for part in values):
        raise FailedProofError(f"{folder} computes no numbers (NaN): its weights are damaged, or its training diverged")
    return Golden(
        "logits" if model.head else "embedding", list(TEXTS), ids, [rounded(part.tolist()) for part in values]
    )


def rounded(values: Any) -> Any:
    return [rounded(part) for part in values] if isinstance(values, list) else float(f"{values:.{DIGITS}g}")


def write_golden(folder: Path) -> None:
    """Write `golden.json` into a model folder."""
    write_json(folder / GOLDEN, asdict(make_golden(folder)))


def other_answers(folder: Path, golden: Golden) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Give what a server would answer that makes a mistake or several, with words for them."""
    plain = PlainModel(folder)
    readings: dict[str, list[list[int]]] = {"": golden.ids}
    readings["texts that are not opened and closed"] = split_texts(folder, golden.texts, add_special_tokens=False)
    for name, prompt in read_prompts(folder).items():
        readings[f"the prompt '{name}'"] = split_texts(folder, [prompt + text for text in golden.texts])
    readings = {words: rows for words, rows in readings.items() if all(rows)}
    is_causal = not looks_both_ways(plain.network.base_model)
    who = "one that looks both ways" if is_causal else "a causal network"
    ways: list[str | None] = [None] if plain.head else [None, *WAYS]
    with suppress(FailedProofError), foreign_errors_fail("its attention is not ours to turn"):
        turned = PlainModel(folder, ATTENTION)
        for words, rows in readings.items():
            layouts = [lay_out(np.array([0, len(row)]), causal=not is_causal) for row in rows]
            states = [turned.read([row], layout)[0] for row, layout in zip(rows, layouts, strict=True)]
            for way in ways:
                yield tell_mistakes(who, way, words), [turned.pool(part, way).numpy() for part in states]
    for words, rows in readings.items():
        states = [plain.read([row])[0] for row in rows]
        for way in ways:
            yield tell_mistakes("this network", way, words), [plain.pool(part, way).numpy() for part in states]


def tell_mistakes(who: str, way: str | None, reading: str) -> str:
    """Say which network gives an answer, and how: `a causal network would, by the last token`."""
    said = [f"by {way}" if way else "", f"with {reading}" if reading else ""]
    return " ".join([f"{who} would", *filter(None, said)])


def read_prompts(folder: Path) -> Mapping[str, str]:
    """Read the prompts, by name, that sentence-transformers puts before texts of a folder."""
    path = folder / "config_sentence_transformers.json"
    prompts = read_json_as(path, dict[str, Any]).get("prompts") if path.exists() else None
    return {name: text for name, text in (prompts or {}).items() if text}
