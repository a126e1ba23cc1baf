"""Texts become flat token ids, the splits of a task are made of them, and packed batches of those, without padding.

An input is its text and the tokenizer's end-of-text token; where a tokenizer opens inputs with a classification token
(BERT's), that comes first. Names of special tokens inside a text are read as ordinary text.

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
from biphase.device import to_device
from biphase.encoder.attention import PAD_TO_MULTIPLE_OF, PackedLayout, lay_out
from biphase.errors import told_as
from biphase.finetuning.calibration import AS_THEY_ARE, Calibration
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.metrics import Judgement
from biphase.tasks.examples import FilledText
from biphase.tasks.spec import Task, TaskSplit

TEXTS_PER_CALL = 50_000
"""How many texts the tokenizer gets at a time, so that its own records of a large task never fill the memory."""

BatchModel = Callable[["Batch"], Tensor]
"""What gives outputs for a batch: a network with a head, or one of transformers behind `heads.padded_logits`."""


@dataclass(frozen=True)
class HashedTokenizer:
    """A tokenizer and the hash of what it does, by which encoded texts are kept."""

    pretrained: Any = field(repr=False)
    """The tokenizer of transformers."""

    @cached_property
    def hash(self) -> str:
        return tokenizer_hash(self.pretrained)

    @property
    def opening(self) -> list[int]:
        """The tokens before every text: the classification token of a tokenizer that has one."""
        has_pair = self.pretrained.cls_token_id is not None and self.pretrained.sep_token_id is not None
        return [self.pretrained.cls_token_id] if has_pair else []

    @property
    def closing(self) -> int:
        """The token after every text."""
        return self.pretrained.sep_token_id if self.opening else self.pretrained.eos_token_id

    def room(self, max_length: int) -> int:
        """Count the tokens of a text that fit into an input of `max_length` tokens."""
        return max_length - len(self.opening) - 1

    def tokenize(self, texts: Sequence[str], *, with_spans: bool = False) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Tokenize each text, in order, neither opened nor closed nor cut.

        With each comes where its tokens begin and end, [T, 2], in characters; nothing is in there without `with_spans`.
        """
        backend = Tokenizer.from_str(self.pretrained.backend_tokenizer.to_str())
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True
        encode = backend.encode_batch if with_spans else backend.encode_batch_fast
        for begin in range(0, len(texts), TEXTS_PER_CALL):
            with told_as("the tokenizer cannot read a text", "take its tokenizer.json from where it is whole"):
                encodings = encode(texts[begin : begin + TEXTS_PER_CALL], add_special_tokens=False)
            for encoding in encodings:
                spans_T2 = np.array(encoding.offsets if with_spans else [], dtype=np.int32).reshape(-1, 2)
                yield np.array(encoding.ids, dtype=np.int32), spans_T2

    def concatenate(self, parts: Iterable[np.ndarray], max_length: int) -> "TokenizedTexts":
        """Lay samples of at most `max_length` tokens, opened and closed, end to end."""
        opening, closing = np.array(self.opening, np.int32), np.array([self.closing], np.int32)
        room = self.room(max_length)
        assert room >= 1
        pieces, lengths, truncated = [], [], []
        for index, ids in enumerate(parts):
            if len(ids) > room:
                truncated.append(index)
            pieces += [opening, ids[:room], closing]
            lengths.append(len(opening) + min(len(ids), room) + len(closing))
        tokens_T = np.concatenate([np.zeros(0, np.int32), *pieces])
        return TokenizedTexts(tokens_T, to_bounds(lengths), np.array(truncated, dtype=np.int64))

    def encode_texts(self, texts: Sequence[str], max_length: int) -> "TokenizedTexts":
        return self.concatenate((ids for ids, _ in self.tokenize(texts)), max_length)

    def encode_filled(self, filled: Sequence[FilledText], max_length: int) -> "TokenizedTexts":
        """Encode texts that may be made of several columns: of one that is too long, the longest columns are cut, as
        transformers' `longest_first` does; what stands around them is kept."""
        room = self.room(max_length)
        texts, columns = [text for text, _ in filled], [columns for _, columns in filled]
        parts = [ids for ids, _ in self.tokenize(texts)]
        long = [index for index, ids in enumerate(parts) if len(ids) > room and len(columns[index]) > 1]
        spans = self.tokenize([texts[index] for index in long], with_spans=True)
        for index, (ids, spans_T2) in zip(long, spans, strict=True):
            parts[index] = ids[cut_longest(spans_T2, columns[index], room)]
        encoded = self.concatenate(parts, max_length)
        return replace(encoded, truncated=np.union1d(encoded.truncated, np.array(long, dtype=np.int64)))


@dataclass(frozen=True)
class TokenizedTexts:
    """Samples as token ids, end to end."""

    tokens_T: np.ndarray
    """int32."""
    bounds_S1: np.ndarray
    """int64: sample s is `tokens_T[bounds_S1[s] : bounds_S1[s + 1]]` (flash attention's cu_seqlens)."""
    truncated: np.ndarray
    """The samples that were cut, ascending."""

    @property
    def num_samples(self) -> int:
        return len(self.bounds_S1) - 1

    @cached_property
    def lengths_S(self) -> np.ndarray:
        return np.diff(self.bounds_S1)

    @cached_property
    def used_U(self) -> np.ndarray:
        """The tokens that occur, ascending."""
        is_used = np.zeros(int(self.tokens_T.max(initial=0)) + 1, dtype=bool)
        is_used[self.tokens_T] = True
        return np.flatnonzero(is_used)

    def compute(self, model: "BatchModel", samples: np.ndarray, cell: "CellContext") -> tuple["Batch", Tensor]:
        """Compute the model's output for the given samples as one batch; return both."""
        batch = pack(self, samples, cell)
        with torch.autocast(cell.device.type, cell.dtype, enabled=cell.dtype != torch.float32):
            return batch, model(batch)

    def outputs(
        self, model: "BatchModel", samples: np.ndarray, cell: "CellContext"
    ) -> Iterator[tuple["Batch", Tensor]]:
        """The model's output for the given samples, longest first, batch by batch. Call under `torch.no_grad`."""
        most = cell.config.microbatch_tokens
        if cell.device.type == "cpu":
            most = min(4096, most)  # what its caches hold
        ordered = samples[np.argsort(-self.lengths_S[samples], kind="stable")]
        for part in split_by_tokens(ordered, self.lengths_S, most):
            yield self.compute(model, part, cell)

    def predict(self, model: "BatchModel", cell: "CellContext", width: int | None = None) -> np.ndarray:
        """Compute the model's outputs for each sample, [S, C], or, in families of tokens, for each token, [T, C], fp32.
        Call under `torch.no_grad`. `width` is C where that is not `cell.num_outputs`."""
        num_rows = len(self.tokens_T) if cell.is_of_tokens else self.num_samples
        outputs_XC = np.zeros((num_rows, width or cell.num_outputs), dtype=np.float32)
        for batch, output in self.outputs(model, np.arange(self.num_samples), cell):
            outputs_XC[batch.indices_T if cell.is_of_tokens else batch.samples] = output.cpu().numpy()
        return outputs_XC


@dataclass(frozen=True)
class EncodedSplit(ABC):
    """One split of a task as token ids. Each family of tasks adds its targets to it, its loss, what it predicts and how
    that is scored; it knows neither where data is from nor how training goes.

    What training draws its batches from are *items*: mostly the examples themselves.
    """

    ids: list[str]
    """The ids that predictions are named by."""
    texts: TokenizedTexts
    num_examples: int
    num_truncated: int

    @property
    def strata(self) -> np.ndarray:
        """The class of each example, where few shots are drawn from each class; else one for all."""
        return np.zeros(self.num_examples, dtype=np.int64)

    def balanced_weights(self, items: np.ndarray, cell: "CellContext") -> np.ndarray:
        """The weights, [C], that balance the classes of some training items, in families of classes."""
        raise AssertionError(f"{cell.task.name} has no classes to weigh: `settle_config` refuses them")

    def items_of(self, examples: np.ndarray) -> np.ndarray:
        """The training items of examples."""
        return examples

    @cached_property
    def lengths_I(self) -> np.ndarray:
        """The tokens of each training item."""
        return self.texts.lengths_S

    @abstractmethod
    def accumulate_gradients(self, model: nn.Module, items: np.ndarray, cell: "CellContext") -> Tensor:
        """The mean loss over some training items, and its gradient added to that of the parameters, over microbatches
        that fit into memory. Under `torch.no_grad` a split with a loss that adds up has the loss alone."""

    def predict(self, model: "BatchModel", cell: "CellContext") -> Any:
        """The predictions for all examples, unless a family has its own the outputs for each sample, [S, C]. Called
        under `torch.no_grad`, with a model in evaluation mode."""
        return self.texts.predict(model, cell)

    @property
    def class_indices(self) -> np.ndarray:
        """The number of every class, or tag, of every example; empty where the task has no classes."""
        return np.zeros(0, dtype=np.int64)

    def calibrate(self, model: "BatchModel", cell: "CellContext") -> Calibration | None:
        """What this split, of validation, tells to do to outputs, for a task with classes. None in families without."""
        return None

    @abstractmethod
    def judge(self, predictions: Any, cell: "CellContext") -> Judgement:
        """Every metric of the family by its name, as a share between 0 and 1; and a row for each example, as it is
        written to `test.jsonl`: its id, what was predicted, and its score."""


@dataclass(frozen=True)
class AdditiveSplit(EncodedSplit):
    """A split whose loss adds up over its items, so that each microbatch has its share in it."""

    def samples_of(self, items: np.ndarray) -> np.ndarray:
        """The samples of training items, which stand in one batch."""
        return items

    def accumulate_gradients(self, model: nn.Module, items: np.ndarray, cell: "CellContext") -> Tensor:
        total = torch.zeros((), device=cell.device)
        for part in split_by_tokens(items, self.lengths_I, cell.config.microbatch_tokens):
            batch, output = self.texts.compute(model, self.samples_of(part), cell)
            loss = self.loss(output, batch, items, cell)
            if torch.is_grad_enabled():
                loss.backward()
            total += loss.detach()
        return total

    @abstractmethod
    def loss(self, output: Tensor, batch: "Batch", items: np.ndarray, cell: "CellContext") -> Tensor:
        """The share that a batch of some of these training items has in the mean loss over all of them."""


EncodedTask = tuple[dict[TaskSplit, Any], int]
"""The splits of a task as token ids, and the number of its rows without a gold label."""


def cut_longest(spans_T2: np.ndarray, columns: Sequence[tuple[int, int]], room: int) -> np.ndarray:
    """Choose the tokens to keep of a text of several columns, ascending, at most `room`."""
    last_T = np.maximum(spans_T2[:, 1] - 1, spans_T2[:, 0])  # the character by which a token belongs to a column
    inside = [np.flatnonzero((last_T >= begin) & (last_T < end)) for begin, end in columns]
    lengths = [len(tokens) for tokens in inside]
    caps = share_room(lengths, room - (len(last_T) - sum(lengths)))
    cut = np.concatenate([tokens[cap:] for tokens, cap in zip(inside, caps, strict=True)])
    return np.delete(np.arange(len(last_T)), cut)[:room]


def share_room(lengths: Sequence[int], room: int) -> list[int]:
    """Share `room` among the parts of a text: return how many tokens each keeps.

    Parts of 9, 2 and 6 tokens keep 5, 2 and 5 of 12: going up in length, each gets its share of what is left, and what
    a short one does not need goes to those after it.
    """
    caps, left = list(lengths), max(room, 0)
    for rank, part in enumerate(np.argsort(lengths, kind="stable").tolist()):
        caps[part] = min(lengths[part], left // (len(lengths) - rank))
        left -= caps[part]
    return caps


def balance_classes(counts_C: np.ndarray) -> np.ndarray:
    """Weights as scikit-learn's `balanced`: of n targets of k classes, n / (k · n_c). A class without any weighs 1."""
    weights_C = counts_C.sum() / (np.count_nonzero(counts_C) * np.maximum(counts_C, 1))
    return np.where(counts_C > 0, weights_C, 1.0)


def count_touched(bounds_G1: np.ndarray, samples: np.ndarray) -> int:
    """Count the groups of neighbouring samples, between these bounds, that hold one of the given samples."""
    return len(np.unique(np.searchsorted(bounds_G1, samples, side="right")))


def to_bounds(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the bounds of parts laid end to end, int64, from 0: lengths 3, 2 give 0, 3, 5."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def segment_logsumexp(logits_TC: Tensor, bounds_S1: Tensor) -> Tensor:
    """[S, C], over the rows of each segment."""
    segments_T = torch.repeat_interleave(torch.arange(len(bounds_S1) - 1, device=logits_TC.device), bounds_S1.diff())
    highest = torch.segment_reduce(logits_TC.detach(), "max", offsets=bounds_S1, axis=0)
    sums = torch.zeros_like(highest).index_add(0, segments_T, (logits_TC - highest[segments_T]).exp())
    return sums.log() + highest


@dataclass(frozen=True)
class CellContext:
    """The context of a cell says what it is about, and where and in which type it computes: the same throughout it."""

    task: Task
    config: FinetuneConfig
    device: torch.device
    dtype: torch.dtype
    """The type of the arithmetic; autocast from the type of the weights."""
    class_weights_C: Tensor | None = None
    """What each class weighs in the loss, fp32, once it is known what is trained on (`with_class_weights`)."""

    def with_class_weights(self, balanced_C: np.ndarray) -> "CellContext":
        """Weigh the classes as the configuration says; `balanced_C` are the weights that balance them."""
        weights_C = balanced_C
        if self.config.class_weights != "balanced":
            weights = dict(self.config.class_weights or ())
            weights_C = np.array([weights.get(name, 1.0) for name in self.task.classes])
        return replace(self, class_weights_C=self.on_device(weights_C.astype(np.float32)))

    def cross_entropy(self, logits_XC: Tensor, targets_X: np.ndarray, all_targets: np.ndarray) -> Tensor:
        """The share of some targets (-100: none) in the cross-entropy of all targets of a batch: torch's weighted and
        smoothed mean over these."""
        weights_C, targets = self.class_weights_C, self.on_device(targets_X)
        smoothing = self.config.label_smoothing
        loss = nn.functional.cross_entropy(logits_XC, targets, weights_C, reduction="sum", label_smoothing=smoothing)
        if weights_C is None or len(all_targets) == 0:
            return loss / max(len(all_targets), 1)
        return loss / weights_C[self.on_device(all_targets)].sum()

    calibration: Calibration = AS_THEY_ARE
    """How outputs are read: as they are, unless a network is kept."""

    @property
    def is_embedder(self) -> bool:
        """Whether the network gives embeddings, and has no head."""
        return self.task.kind.is_search and self.config.ranking == "embeddings"

    @property
    def is_of_tokens(self) -> bool:
        """Whether the network gives something for each token, not for each sample."""
        return self.task.kind.has_token_outputs

    @property
    def num_outputs(self) -> int:
        """Count the numbers that a head gives for a sample or a token: one for each class, one where texts are scored,
        two where answers are found."""
        return self.task.kind.num_outputs or len(self.task.classes)

    def on_device(self, targets: np.ndarray) -> Tensor:
        """Targets as int64, or fp32 where they are fractions."""
        kind = np.float32 if np.issubdtype(targets.dtype, np.floating) else np.int64
        return to_device(np.ascontiguousarray(targets, dtype=kind), self.device)


@dataclass(frozen=True)
class Batch:
    """Samples laid end to end, on the device."""

    tokens_T: Tensor
    positions_T: Tensor
    layout: PackedLayout
    texts: TokenizedTexts
    """The texts that the samples are from."""
    samples: np.ndarray
    """The numbers of the samples in these texts."""
    indices_T: np.ndarray
    """Where each token stands in `TokenizedTexts.tokens_T`, so that targets are looked up as `targets[indices_T]`."""


def pack(texts: TokenizedTexts, samples: np.ndarray, cell: CellContext) -> Batch:
    """The given samples in the given order.

    Of texts with the bounds 0, 3, 5, 9, the samples 2 and 0 give bounds 0, 4, 7, positions 0 1 2 3 0 1 2 and indices
    5 6 7 8 0 1 2.
    """
    lengths = texts.lengths_S[samples]
    bounds = to_bounds(lengths)
    positions_T = np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths)
    indices_T = np.repeat(texts.bounds_S1[samples], lengths) + positions_T
    layout = lay_out(bounds, causal=False, device=cell.device, dtype=cell.dtype, pad_to_multiple_of=PAD_TO_MULTIPLE_OF)
    return Batch(
        tokens_T=to_device(texts.tokens_T[indices_T].astype(np.int64), cell.device),
        positions_T=to_device(positions_T, cell.device),
        layout=layout,
        texts=texts,
        samples=samples,
        indices_T=indices_T,
    )


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
