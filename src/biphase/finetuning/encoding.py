"""Texts → flat token ids → the splits of a task → packed batches, without padding.

An input is its text and the tokenizer's end-of-text token. If the tokenizer has a classification token (BERT's), it
comes first. Names of special tokens inside a text are ordinary text.

Letters: T tokens, S samples, I training items, U tokens in use.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from biphase.corpus.tokenizer import tokenizer_hash
from biphase.device import prefetch, to_device
from biphase.encoder.attention import PAD_TO_MULTIPLE_OF, Backend, PackedLayout, lay_out
from biphase.errors import told_as
from biphase.finetuning.calibration import AS_THEY_ARE, Calibration
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.metrics import Judgement
from biphase.tasks.examples import FilledText
from biphase.tasks.spec import Task, TaskSplit

TEXTS_PER_CALL = 50_000
"""The number of texts per call of the tokenizer, so that its records of a large task do not fill the memory."""

BatchModel = Callable[["Batch"], Tensor]
"""A network with a head, or one of transformers behind `heads.padded_logits`: a batch → its outputs."""


@dataclass(frozen=True)
class CellContext:
    """The constants of a cell: its task and settings, its device and type of arithmetic."""

    task: Task
    config: FinetuneConfig
    device: torch.device
    dtype: torch.dtype
    """The type of the arithmetic; autocast from the type of the weights."""
    class_weights_C: Tensor | None = None
    """The weight of each class in the loss, or of a number's error, fp32 (`loss.weigh_classes`)."""
    calibration: Calibration = AS_THEY_ARE
    """The calibration of a kept network. The default changes nothing."""
    backend: Backend | None = None
    """The backend of attention. The default is that of training, which also computes all scores."""

    @property
    def is_embedder(self) -> bool:
        """Whether the network computes embeddings, without a head."""
        return self.task.kind.is_search and self.config.ranking == "embeddings"

    @property
    def is_of_tokens(self) -> bool:
        """Whether the network has an output for each token, not for each sample."""
        return self.task.kind.is_tagging or self.task.kind.is_answering

    @property
    def num_outputs(self) -> int:
        """The width of the head's output: the number of classes; 1 for a score; 2 for the start and end of answers."""
        return self.task.kind.num_outputs or len(self.task.classes)

    def on_device(self, targets: np.ndarray) -> Tensor:
        """Copy targets to the device, as int64, or fp32 for fractions."""
        dtype = np.float32 if np.issubdtype(targets.dtype, np.floating) else np.int64
        return to_device(np.ascontiguousarray(targets, dtype=dtype), self.device)


@dataclass(frozen=True)
class HashedTokenizer:
    """A tokenizer and its hash, which names encoded texts."""

    pretrained: Any = field(repr=False)
    """The tokenizer of transformers."""

    @cached_property
    def hash(self) -> str:
        return tokenizer_hash(self.pretrained)

    @cached_property
    def backend(self) -> Tokenizer:
        """A copy for whole texts without special tokens. Made once: a large vocabulary takes longer than many texts."""
        backend = Tokenizer.from_str(self.pretrained.backend_tokenizer.to_str())
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True
        return backend

    @property
    def opening(self) -> list[int]:
        """The tokens before every text: the classification token of a tokenizer that has one."""
        has_pair = self.pretrained.cls_token_id is not None and self.pretrained.sep_token_id is not None
        return [self.pretrained.cls_token_id] if has_pair else []

    @property
    def closing(self) -> int:
        """The token after every text."""
        return self.pretrained.sep_token_id if self.opening else self.pretrained.eos_token_id

    @cached_property
    def between(self) -> list[int]:
        """The tokens between the texts of a pair, as in a kept model (`exporting.model.close_texts`): the closing
        token, or the tokenizer's own ones if it opens and closes texts itself, such as RoBERTa's two separators."""
        pair = self.pretrained("a", "b")
        added = [id for id, text in zip(pair["input_ids"], pair.sequence_ids(0), strict=True) if text is None]
        is_closed = bool(self.opening) and (added[:1], added[-1:]) == (self.opening, [self.closing])
        return (added[1:-1] if is_closed else []) or [self.closing]

    def room(self, max_length: int) -> int:
        """Count the tokens of a text that fit into an input of `max_length` tokens."""
        return max_length - len(self.opening) - 1

    def tokenize(self, texts: Sequence[str], *, with_spans: bool = False) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Tokenize texts in order, without opening, closing or cutting them.

        Yields the ids of each text and the span of each token in characters, [T, 2]; no spans without `with_spans`.
        """
        encode = self.backend.encode_batch if with_spans else self.backend.encode_batch_fast
        for begin in range(0, len(texts), TEXTS_PER_CALL):
            with told_as("the tokenizer cannot read a text", "copy its tokenizer.json again from an intact one"):
                encodings = encode(texts[begin : begin + TEXTS_PER_CALL], add_special_tokens=False)
            for encoding in encodings:
                spans_T2 = np.array(encoding.offsets if with_spans else [], dtype=np.int32).reshape(-1, 2)
                yield np.array(encoding.ids, dtype=np.int32), spans_T2

    def concatenate(self, parts: Iterable[np.ndarray], max_length: int) -> "TokenizedTexts":
        """Open, close and cut samples to `max_length` tokens, and lay them end to end."""
        opening = np.array(self.opening, np.int32)
        closing = np.array([self.closing], np.int32)
        room = self.room(max_length)
        assert room >= 1
        lengths = []
        pieces = [np.zeros(0, np.int32)]
        for ids in parts:
            lengths.append(len(ids))
            pieces += [opening, ids[:room], closing]
        lengths_S = np.array(lengths, dtype=np.int64)
        bounds_S1 = to_bounds(np.minimum(lengths_S, room) + len(opening) + 1)
        return TokenizedTexts(np.concatenate(pieces), bounds_S1, np.flatnonzero(lengths_S > room))

    def encode_texts(self, texts: Sequence[str], max_length: int) -> "TokenizedTexts":
        return self.concatenate((ids for ids, _ in self.tokenize(texts)), max_length)

    def encode_filled(self, filled: Sequence[FilledText], max_length: int) -> "TokenizedTexts":
        """Encode filled templates. If one is too long, cut its longest columns, as transformers' `longest_first` does,
        but not the text around them."""
        room = self.room(max_length)
        parts = [ids for ids, _ in self.tokenize([text for text, _ in filled])]
        long = []
        for index, (ids, (text, columns)) in enumerate(zip(parts, filled, strict=True)):
            if len(ids) > room and columns and (len(columns) > 1 or columns[-1][1] < len(text)):
                long.append(index)
        tokenized = self.tokenize([filled[index][0] for index in long], with_spans=True)
        for index, (ids, spans_T2) in zip(long, tokenized, strict=True):
            parts[index] = ids[cut_longest(spans_T2, filled[index][1], room)]
        encoded = self.concatenate(parts, max_length)
        return replace(encoded, truncated=np.union1d(encoded.truncated, np.array(long, dtype=np.int64)))


@dataclass(frozen=True, eq=False)
class TokenizedTexts:
    """Samples as token ids, end to end."""

    tokens_T: np.ndarray
    """The token ids, int32."""
    bounds_S1: np.ndarray
    """The bounds of the samples, int64: sample s is `tokens_T[bounds_S1[s] : bounds_S1[s + 1]]` (flash attention's
    cu_seqlens)."""
    truncated: np.ndarray
    """The samples that were cut, ascending."""

    @property
    def num_samples(self) -> int:
        return len(self.bounds_S1) - 1

    @cached_property
    def lengths_S(self) -> np.ndarray:
        return np.diff(self.bounds_S1)

    def count_cut(self, bounds_G1: np.ndarray) -> int:
        """Count the groups of neighbouring samples, between these bounds, with a sample that was cut."""
        return len(np.unique(np.searchsorted(bounds_G1, self.truncated, side="right")))

    def in_batches(self, samples: np.ndarray, most_tokens: int, cell: CellContext) -> Iterator["Batch"]:
        """Pack `samples` into consecutive batches, each of at most `most_tokens` tokens or of one sample."""
        return (pack(self, part, cell) for part in split_by_tokens(samples, self.lengths_S, most_tokens))

    @cached_property
    def used_U(self) -> np.ndarray:
        """The ids that occur, ascending."""
        is_used = np.zeros(int(self.tokens_T.max(initial=0)) + 1, dtype=bool)
        is_used[self.tokens_T] = True
        return np.flatnonzero(is_used)

    def outputs(self, model: "BatchModel", samples: np.ndarray, cell: CellContext) -> Iterator[tuple["Batch", Tensor]]:
        """Yield batches of some samples, longest first, with the model's outputs. Call under `torch.no_grad`."""
        most = min(cell.config.microbatch_tokens, most_tokens(cell.device))
        in_order = samples[np.argsort(-self.lengths_S[samples], kind="stable")]
        for batch in prefetch(self.in_batches(in_order, most, cell)):
            yield batch, batch.compute(model, cell)

    def predict(self, model: "BatchModel", cell: CellContext, width: int | None = None) -> np.ndarray:
        """Compute the model's outputs in fp32: [S, C], or [T, C] in families of tokens. Call under `torch.no_grad`. C
        is `width`, or else `cell.num_outputs`."""
        num_rows = len(self.tokens_T) if cell.is_of_tokens else self.num_samples
        outputs_XC = np.zeros((num_rows, width or cell.num_outputs), dtype=np.float32)
        for batch, output in self.outputs(model, np.arange(self.num_samples), cell):
            outputs_XC[batch.indices_T if cell.is_of_tokens else batch.samples] = output.cpu().numpy()
        return outputs_XC


NO_TEXTS = TokenizedTexts(np.zeros(0, np.int32), np.zeros(1, np.int64), np.zeros(0, np.int64))


@dataclass(frozen=True)
class EncodedSplit(ABC):
    """One split of a task as token ids. Each family of tasks adds its targets, its loss, its predictions and their
    scores.

    Training draws batches of *items*, which are mostly the examples themselves.
    """

    ids: list[str]
    """The ids of the predictions."""
    texts: TokenizedTexts
    num_examples: int
    num_truncated: int

    @property
    def strata(self) -> np.ndarray:
        """The class of each example, from which few shots are drawn; the same for all examples in families without
        classes of texts."""
        return np.zeros(self.num_examples, dtype=np.int64)

    def balanced_weights(self, items: np.ndarray, cell: CellContext) -> np.ndarray:
        """Compute the weights, [C], that balance the classes of some training items, or the weight of a number."""
        raise AssertionError(f"{cell.task.name} has no classes to weigh: `settle_config` refuses them")

    def set_unit(self, network: nn.Module, items: np.ndarray) -> None:
        """Let a network learn the labels of these training items in a unit of their own; families of numbers do."""
        return None

    def items_of(self, examples: np.ndarray) -> np.ndarray:
        """List the training items of some examples."""
        return examples

    def samples_of(self, items: np.ndarray) -> np.ndarray:
        """List the samples of some training items."""
        return items

    @cached_property
    def lengths_I(self) -> np.ndarray:
        """The tokens of each training item."""
        return self.texts.lengths_S

    def pack_items(self, items: np.ndarray, cell: CellContext) -> list["Batch"]:
        """Pack some training items into microbatches that fit into memory."""
        pieces = split_by_tokens(items, self.lengths_I, cell.config.microbatch_tokens)
        return [pack(self.texts, self.samples_of(piece), cell) for piece in pieces]

    def accumulate_gradients(
        self, model: nn.Module, items: np.ndarray, batches: list["Batch"], cell: CellContext
    ) -> Tensor:
        """Compute the mean loss over some training items, of which `pack_items` made the batches, and add its gradient
        to the parameters'."""
        total = torch.zeros((), device=cell.device)
        for batch in batches:
            loss = self.loss(batch.compute(model, cell), batch, items, cell)
            if torch.is_grad_enabled():
                loss.backward()
            total += loss.detach()
        return total

    def loss(self, output: Tensor, batch: "Batch", items: np.ndarray, cell: CellContext) -> Tensor:
        """Compute what a batch of some of these items adds to the mean loss over all of them."""
        raise AssertionError("a family whose loss is no sum over items accumulates gradients itself")

    def predict(self, model: "BatchModel", cell: CellContext) -> Any:
        """Predict all examples: the outputs of each sample, [S, C], unless the family has its own predictions. Call
        under `torch.no_grad`, with a model in evaluation mode."""
        return self.texts.predict(model, cell)

    def classes_of(self, examples: np.ndarray) -> np.ndarray:
        """List the index of every class or tag of some examples; none for a task without classes."""
        return np.zeros(0, dtype=np.int64)

    def calibrate(self, predictions: Any, cell: CellContext) -> Calibration | None:
        """Calibrate by the predictions for this split, which is validation. None in families without classes."""
        return None

    @abstractmethod
    def judge(self, predictions: Any, cell: CellContext) -> Judgement:
        """Score predictions: every metric of the family by name; and a row for each example, as in
        `test.jsonl`: its id, prediction and score."""


EncodedTask = tuple[dict[TaskSplit, Any], int]
"""The splits of a task as token ids, and the number of rows without a gold label."""


def cut_longest(spans_T2: np.ndarray, columns: Sequence[tuple[int, int]], room: int) -> np.ndarray:
    """Choose at most `room` tokens of a text with several columns, ascending."""
    last_T = np.maximum(spans_T2[:, 1] - 1, spans_T2[:, 0])  # a token belongs to the column of its last character
    inside = [np.flatnonzero((last_T >= begin) & (last_T < end)) for begin, end in columns]
    lengths = [len(tokens) for tokens in inside]
    caps = share_room(lengths, room - (len(last_T) - sum(lengths)))
    cut = np.concatenate([tokens[cap:] for tokens, cap in zip(inside, caps, strict=True)])
    return np.delete(np.arange(len(last_T)), cut)[:room]


def share_room(lengths: Sequence[int], room: int) -> list[int]:
    """Divide `room` among the parts of a text: return how many tokens each keeps.

    Parts of 9, 2 and 6 tokens keep 5, 2 and 5 of 12. From the shortest to the longest, each gets an equal part of the
    room that is left; a short part leaves its surplus to those after it.
    """
    caps = list(lengths)
    left = max(room, 0)
    for rank, index in enumerate(np.argsort(lengths, kind="stable").tolist()):
        caps[index] = min(lengths[index], left // (len(lengths) - rank))
        left -= caps[index]
    return caps


def to_bounds(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the bounds of parts laid end to end, int64, from 0: lengths 3, 2 give 0, 3, 5."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


@dataclass(frozen=True)
class Batch:
    """Samples laid end to end, on the device."""

    tokens_T: Tensor
    positions_T: Tensor
    layout: PackedLayout
    texts: TokenizedTexts
    """The texts of the samples."""
    samples: np.ndarray
    """The indices of the samples in these texts."""
    indices_T: np.ndarray
    """The index of each token in `TokenizedTexts.tokens_T`: `targets[indices_T]` are its targets."""

    def compute(self, model: BatchModel, cell: CellContext) -> Tensor:
        """Compute the model's output."""
        with torch.autocast(cell.device.type, cell.dtype, enabled=cell.dtype != torch.float32):
            return model(self)


def take_samples(bounds_S1: np.ndarray, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the tokens of some samples, and the bounds of these samples end to end.

    Of the bounds 0, 3, 5, 9, the samples 2 and 0 have the indices 5 6 7 8 0 1 2 and the bounds 0, 4, 7.
    """
    starts, lengths = bounds_S1[samples], np.diff(bounds_S1)[samples]
    bounds = to_bounds(lengths)
    return np.arange(bounds[-1]) + np.repeat(starts - bounds[:-1], lengths), bounds


def pack(texts: TokenizedTexts, samples: np.ndarray, cell: CellContext) -> Batch:
    """Pack samples, in the given order.

    If texts have the bounds 0, 3, 5, 9, their samples 2 and 0 have bounds 0, 4, 7, positions 0 1 2 3 0 1 2 and indices
    5 6 7 8 0 1 2.
    """
    indices_T, bounds = take_samples(texts.bounds_S1, samples)
    positions_T = indices_T - np.repeat(texts.bounds_S1[samples], np.diff(bounds))
    computing: dict[str, Any] = {"device": cell.device, "dtype": cell.dtype, "backend": cell.backend}
    layout = lay_out(bounds, causal=False, pad_to_multiple_of=PAD_TO_MULTIPLE_OF, **computing)
    return Batch(
        tokens_T=to_device(texts.tokens_T[indices_T].astype(np.int64), cell.device),
        positions_T=to_device(positions_T, cell.device),
        layout=layout,
        texts=texts,
        samples=samples,
        indices_T=indices_T,
    )


def most_tokens(device: torch.device) -> int:
    """Return the number of tokens above which a batch without gradients is no faster: more than 4,096 leave the caches
    of a CPU."""
    return 4096 if device.type == "cpu" else 65536


def split_by_tokens(samples: np.ndarray, lengths_S: np.ndarray, most_tokens: int) -> list[np.ndarray]:
    """Cut `samples` into consecutive parts, each of at most `most_tokens` tokens or of one sample."""
    ends = np.cumsum(lengths_S[samples])
    parts, begin = [], 0
    while begin < len(samples):
        before = ends[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, before + most_tokens, side="right")))
        parts.append(samples[begin:end])
        begin = end
    return parts
