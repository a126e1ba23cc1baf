"""Golden vectors: a few texts and a model folder's answers to them, in a small file beside the weights, to check other
programs that open the folder.

transformers, or sentence-transformers for its own folders, computes them for each text alone: an embedding, or the
logits of a head. `other_answers` computes the answers of common mistakes (the other direction, another pooling,
unclosed texts), to explain a wrong answer.

Letters: L tokens of a text, D width.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from biphase.corpus.tokenizer import MAX_VOCAB_SIZE, load_pretrained_tokenizer
from biphase.encoder.attention import ATTENTION, lay_out
from biphase.encoder.network import pad_batch
from biphase.encoder.proofs import FailedProofError, foreign_errors_fail, looks_both_ways
from biphase.errors import InputError
from biphase.exporting import plain
from biphase.files import ANEW, read_json_as, write_json

GOLDEN = "golden.json"
TEXTS = (
    "The keeper of the lighthouse counted the ships that passed before dawn.",
    "Rain.",
    "Größe, naïve café, 東京, Москва: 3.14 % of 1,024 words; and what stands at the end of a text decides how its "
    "beginning is read, does it not?",
)
"""Texts of unequal lengths in several scripts, the longest not first, to reveal mistakes in padding and tokenizers."""
MOST_CUT = 512
"""The longest cut that a golden text shows: a text that is cut must be longer."""
ROUNDED_TO = 6
"""The decimals of a number in the file."""

WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "the mean over the tokens": lambda hidden_LD: hidden_LD.mean(0),
    "the first token": lambda hidden_LD: hidden_LD[0],
    "the last token": lambda hidden_LD: hidden_LD[-1],
    "the largest value of each dimension": lambda hidden_LD: hidden_LD.amax(0),
}
"""Ways to pool the hidden states [L, D] of a text."""


@dataclass(frozen=True)
class Golden:
    """A folder's answers to some texts."""

    output: Literal["embedding", "logits"]
    texts: list[str]
    ids: list[list[Annotated[int, Field(ge=0, lt=MAX_VOCAB_SIZE)]]]
    """The tokens of each text, with the special tokens of the folder's tokenizer."""
    values: list[list[float] | list[list[float]]]
    """The embedding [D] of each text, or its logits: one per class, or in networks for tokens, one per token and
    class."""
    cut_at: Annotated[int, Field(gt=0)] | None = None
    """The number of tokens at which the last text is cut; None if no text is."""


def read_golden(path: Path) -> Golden:
    """Read golden vectors. Raises `InputError` for damaged ones, and for lists of unequal lengths."""
    golden = read_json_as(path, Golden)
    values: list[Any] = golden.values
    has_rows = {isinstance(value[0], list) if value else None for value in values}  # a row for each token
    widths = {len(row) for value in values for row in (value if has_rows == {True} else [value])}
    fit = len(golden.texts) == len(golden.ids) == len(golden.values) > bool(golden.cut_at) and all(golden.ids)
    if not fit or len(has_rows) != 1 or len(widths) != 1 or 0 in widths:
        raise InputError(f"{path} is damaged (its texts, ids and values do not fit together); {ANEW}")
    return golden


def load_answering(folder: Path, attention: str | None = None) -> plain.NamedOutputs:
    """Load the network of a folder, by sentence-transformers only if an embedding is more than the mean over a text's
    tokens."""
    return plain.load_named(folder, attention, pooled=not plain.takes_mean(folder))[0]


def split_texts(tokenizer: Any, texts: Sequence[str], longest: int, **settings: Any) -> list[list[int]]:
    """Tokenize texts, truncated to `longest` tokens."""
    rows: list[list[int]] = tokenizer(list(texts), truncation=True, max_length=longest, **settings)["input_ids"]
    return rows


@torch.no_grad()
def make_golden(folder: Path) -> Golden:
    """Compute a folder's answers to the texts, each alone; the last one, if it cuts texts early, is one that it cuts.
    Raises `FailedProofError` if they are not finite."""
    network, tokenizer, texts = load_answering(folder), load_pretrained_tokenizer(folder), [*TEXTS]
    longest = min(plain.text_limits(folder, tokenizer).values(), default=plain.LEAST_LIMIT)
    cut_at = longest if longest <= MOST_CUT else None
    if cut_at is not None:
        [ids] = split_texts(tokenizer, TEXTS[:1], MOST_CUT)
        texts.append(" ".join([TEXTS[0]] * (2 + 2 * cut_at // len(ids))))
    rows = split_texts(tokenizer, texts, longest)
    with foreign_errors_fail(f"{folder} cannot read what its tokenizer gives"):
        outputs = [network.outputs(pad_batch([torch.tensor(row)], 0)) for row in rows]
    values = [plain.read_answers(output, [len(row)])[0] for output, row in zip(outputs, rows, strict=True)]
    if not all(np.isfinite(value).all() for value in values):
        raise FailedProofError(f"{folder} computes no numbers (NaN): its weights are damaged, or its training diverged")
    kind: Any = "embedding" if "last_hidden_state" in outputs[0] else "logits"
    return Golden(kind, texts, rows, [value.astype(float).round(ROUNDED_TO).tolist() for value in values], cut_at)


def write_golden(folder: Path) -> None:
    """Write `golden.json` into a model folder."""
    write_json(folder / GOLDEN, asdict(make_golden(folder)))


@torch.no_grad()
def other_answers(folder: Path, golden: Golden) -> list[tuple[str, list[np.ndarray]]]:
    """Compute the answers of servers that make common mistakes, each with a description such as `a causal network would
    give with pooling by the last token`."""
    tokenizer = load_pretrained_tokenizer(folder)
    limits = plain.text_limits(folder, tokenizer)
    longest = min(limits.values(), default=plain.LEAST_LIMIT)
    readings = {
        "": golden.ids,
        " with the special tokens left out": split_texts(tokenizer, golden.texts, longest, add_special_tokens=False),
    }
    for name, prompt in plain.read_named_prompts(folder).items():
        readings[f" with the prompt '{name}'"] = split_texts(
            tokenizer, [prompt + text for text in golden.texts], longest
        )
    for limit in sorted({*limits.values()} - {longest}) if golden.cut_at else ():
        readings[f" with texts cut at {limit:,} tokens"] = split_texts(tokenizer, golden.texts, limit)
    readings = {words: rows for words, rows in readings.items() if all(rows)}
    network = load_answering(folder)
    is_causal = not looks_both_ways(network.network.base_model)
    answers: list[tuple[str, list[np.ndarray]]] = []

    def answer(who: str, network: plain.NamedOutputs, features_of: Callable[[list[int]], Any]) -> None:
        for words, rows in readings.items():
            texts = [answer_by_ways(network, features_of(row)) for row in rows]
            answers.extend((f"{who} would give{way}{words}", [text[way] for text in texts]) for way in texts[0])

    def turn(row: list[int]) -> Any:
        return {"input_ids": torch.tensor([row]), "layout": lay_out(np.array([0, len(row)]), causal=not is_causal)}

    answer("this network", network, lambda row: pad_batch([torch.tensor(row)], 0))
    with suppress(FailedProofError), foreign_errors_fail("its attention is not ours to turn"):
        other = "one that looks both ways" if is_causal else "a causal network"
        answer(other, load_answering(folder, ATTENTION), turn)
    return answers


def answer_by_ways(network: plain.NamedOutputs, features: Any) -> dict[str, np.ndarray]:
    """Answer a text as the folder does; pool an embedding also in each of the `WAYS`."""
    outputs = network.outputs(features)
    answers = {"": plain.read_answers(outputs, [features["input_ids"].shape[1]])[0]}
    for words, pool in WAYS.items() if "last_hidden_state" in outputs else ():
        pooled: Any = {"sentence_embedding": pool(outputs["last_hidden_state"][0])[None]}
        for module in network.pooling[1:]:
            pooled = module(pooled)
        answers[f" with pooling by {words}"] = pooled["sentence_embedding"][0].numpy()
    return answers
