"""Three texts and what a model folder gives for them, in a small file beside its weights, with which the answers of
whatever else opens the folder are compared.

The numbers are those of transformers, or of sentence-transformers where a folder is one of its own, for each text
alone: an embedding, or the logits of a head. What a network would give that looks the other way, pools otherwise or
does not close its texts tells by which mistake another program's answer came about.

Letters: L tokens of a text, D width.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from biphase.corpus.tokenizer import load_pretrained_tokenizer
from biphase.encoder.attention import ATTENTION, lay_out
from biphase.encoder.network import pad_batch
from biphase.encoder.proofs import FailedProofError, foreign_errors_fail, looks_both_ways
from biphase.exporting.plain import NamedOutputs, load_named, read_answers, read_modules, read_pooling
from biphase.files import read_json_as, write_json
from biphase.hub import count_positions, load_model_config

GOLDEN = "golden.json"
TEXTS = (
    "The keeper of the lighthouse counted the ships that passed before dawn.",
    "Rain.",
    "Größe, naïve café, 東京, Москва: 3.14 % of 1,024 words; and what stands at the end of a text decides how its "
    "beginning is read, does it not?",
)
"""Texts of unequal lengths, in several scripts, the longest not the first: padding and tokenizer show in them."""
ROUNDED_TO = 6
"""The decimals of a number in the file."""

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
    values: list[list[float] | list[list[float]]]
    """An embedding [D] of each text, or its logits: one for each class, of a network for tokens so for each token."""


def load_answering(folder: Path, attention: str | None = None) -> NamedOutputs:
    """Load the network of a folder; sentence-transformers only where an embedding is not just the mean over a text's
    tokens."""
    takes_mean = read_pooling(folder) == ["mean"] and len(read_modules(folder)) == 2
    return load_named(folder, attention, pooled=not takes_mean)[0]


def split_texts(folder: Path, texts: Sequence[str], **settings: Any) -> list[list[int]]:
    """Tokenize texts as a folder's tokenizer does, cut where it or the network ends."""
    tokenizer = load_pretrained_tokenizer(folder)
    longest = min(tokenizer.model_max_length, count_positions(load_model_config(folder)))
    rows: list[list[int]] = tokenizer(list(texts), truncation=True, max_length=longest, **settings)["input_ids"]
    return rows


@torch.no_grad()
def make_golden(folder: Path) -> Golden:
    """Compute what a folder gives for the texts, each alone. Raises `FailedProofError` where that are no numbers."""
    network, rows = load_answering(folder), split_texts(folder, TEXTS)
    with foreign_errors_fail(f"{folder} cannot read what its tokenizer gives"):
        outputs = [network.outputs(pad_batch([torch.tensor(row)], 0)) for row in rows]
    values = [read_answers(output, [len(row)])[0] for output, row in zip(outputs, rows, strict=True)]
    if not all(np.isfinite(part).all() for part in values):
        raise FailedProofError(f"{folder} computes no numbers (NaN): its weights are damaged, or its training diverged")
    kind: Any = "embedding" if "last_hidden_state" in outputs[0] else "logits"
    return Golden(kind, list(TEXTS), rows, [part.astype(float).round(ROUNDED_TO).tolist() for part in values])


def write_golden(folder: Path) -> None:
    """Write `golden.json` into a model folder."""
    write_json(folder / GOLDEN, asdict(make_golden(folder)))


@torch.no_grad()
def other_answers(folder: Path, golden: Golden) -> list[tuple[str, list[np.ndarray]]]:
    """Compute what a server would answer that makes a mistake or several, each with words for them, such as `a causal
    network would by the last token`."""
    readings = {
        "": golden.ids,
        " with texts that are not opened and closed": split_texts(folder, golden.texts, add_special_tokens=False),
    }
    for name, prompt in read_named_prompts(folder).items():
        readings[f" with the prompt '{name}'"] = split_texts(folder, [prompt + text for text in golden.texts])
    readings = {words: rows for words, rows in readings.items() if all(rows)}
    network = load_answering(folder)
    is_causal = not looks_both_ways(network.network.base_model)
    who = "one that looks both ways" if is_causal else "a causal network"
    answers: list[tuple[str, str, list[dict[str, np.ndarray]]]] = []
    for words, rows in readings.items():
        batches: list[Any] = [pad_batch([torch.tensor(row)], 0) for row in rows]
        answers.append(("this network", words, [answer_by_ways(network, batch) for batch in batches]))
    with suppress(FailedProofError), foreign_errors_fail("its attention is not ours to turn"):
        turned = load_answering(folder, ATTENTION)
        for words, rows in readings.items():
            layouts = [lay_out(np.array([0, len(row)]), causal=not is_causal) for row in rows]
            batches = [
                {"input_ids": torch.tensor([row]), "layout": layout} for row, layout in zip(rows, layouts, strict=True)
            ]
            answers.append((who, words, [answer_by_ways(turned, batch) for batch in batches]))
    return [
        (f"{who} would{way}{words}", [part[way] for part in parts]) for who, words, parts in answers for way in parts[0]
    ]


def answer_by_ways(network: NamedOutputs, features: Any) -> dict[str, np.ndarray]:
    """Answer a text as a folder says and, where that is an embedding, pooled in each of the `WAYS`."""
    outputs = network.outputs(features)
    answers = {"": read_answers(outputs, [features["input_ids"].shape[1]])[0]}
    for words, pool in WAYS.items() if "last_hidden_state" in outputs else ():
        pooled: Any = {"sentence_embedding": pool(outputs["last_hidden_state"][0])[None]}
        for module in network.pooling[1:]:
            pooled = module(pooled)
        answers[f" by {words}"] = pooled["sentence_embedding"][0].numpy()
    return answers


def read_named_prompts(folder: Path) -> dict[str, str]:
    """Read the prompts, by name, that sentence-transformers puts before texts of a folder."""
    path = folder / "config_sentence_transformers.json"
    prompts = read_json_as(path, dict[str, Any]).get("prompts") if path.exists() else None
    return {name: text for name, text in (prompts or {}).items() if text}
