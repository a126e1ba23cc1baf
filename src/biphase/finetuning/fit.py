"""One cell: (encoder, task, configuration with rate and seed) → one `Score` with per-example predictions.

The protocol is the paper's: 1,000 steps of 32 examples or one epoch, 10 % warm-up, linear decay, no early stopping.
What many cells share (weights on disk, encoded tasks) is loaded once per process and never changed; a cell trains a
copy.
"""

import copy
import json
import math
import re
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from biphase import console
from biphase.corpus.tokenizer import load_tokenizer, tokenizer_hash, vocabulary_size
from biphase.device import choose_device, choose_dtype, describe_machine
from biphase.encoder.attention import Backend, choose_backend
from biphase.encoder.backbone import check_causality, load_backbone, train_padding_row
from biphase.errors import InputError
from biphase.files import content_hash, file_hash, whole_folder, write_json
from biphase.finetuning.batches import (
    EncodedSplit,
    EncodedTask,
    KeyedTokenizer,
    count_targets,
    cut,
    encode_task,
    evaluation_order,
    make_batch,
    training_order,
    vote,
)
from biphase.finetuning.heads import SequenceClassifier, TokenClassifier, classification_loss
from biphase.finetuning.metrics import sequence_metrics, token_metrics
from biphase.finetuning.score import EVALUATED_SPLITS, FinetuneConfig, Score, read_score
from biphase.finetuning.tasks import Task, find_task, read_task

PROTOCOL = 1
"""Part of every cell's name: raise it when the same configuration no longer gives the same scores."""

CHECK_EVERY_STEPS = 25
"""How often the losses are fetched from the device and looked at."""


@dataclass(frozen=True)
class Encoder:
    """A pretrained network and its tokenizer. Shared by cells: copied, never trained."""

    name: str
    hash: str
    """Of configuration and weights."""
    backbone: PreTrainedModel = field(compare=False, repr=False)
    keyed: KeyedTokenizer


def fit_cell(model: str, task: str, config: FinetuneConfig, out: Path | None = None) -> Score:
    """Fine-tune `model` (a Hugging Face folder or hub id) on a task of the table and evaluate it.

    With `out`, the result appears as the folder `out/TASK-HASH` when it is finished, and a finished cell is read, not
    rerun. On a CPU the same cell gives the same scores to the last bit. Training that diverges is a result, not an
    error. Many cells in one process load the model and encode the task once.
    """
    encoder = load_encoder(model, config.revision)
    encoded = load_encoded(find_task(task), config.data_dir, encoder.keyed, length_limit(encoder, config))
    cell = cell_hash(encoder, encoded, config)
    folder = None if out is None else out / f"{task}-{cell[:16]}"
    if folder is not None and (folder / "score.json").exists():
        score = read_score(folder)
        console.out.print(f"{score.headline()} · finished before", markup=False)
        return score
    score, predictions = run_cell(encoder, encoded, config, cell)
    if folder is not None:
        write_cell(folder, score, encoded, predictions)
        score = score.model_copy(update={"folder": folder})
    console.out.print(score.headline(), markup=False)
    return score


def load_encoder(model: str, revision: str | None = None) -> Encoder:
    folder = find_model(model, revision)
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    stamps = tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files if path.exists())
    return _load_encoder(model, folder, stamps)


@lru_cache(maxsize=1)
def _load_encoder(name: str, folder: Path, stamps: tuple[tuple[str, int, int], ...]) -> Encoder:
    backbone = load_backbone(folder)
    train_padding_row(backbone)
    tokenizer = load_tokenizer(folder)
    size = backbone.config.vocab_size
    if vocabulary_size(tokenizer) > size:
        raise InputError(
            f"{name}: its tokenizer has {vocabulary_size(tokenizer):,} tokens, its network only {size:,}; "
            "they do not belong together"
        )
    check_causality(backbone, causal=False, vocab_size=size)
    digest = content_hash([file_hash(Path(path)) for path, _, _ in stamps])
    return Encoder(name, digest, backbone, KeyedTokenizer(tokenizer_hash(tokenizer), tokenizer))


def find_model(model: str, revision: str | None) -> Path:
    """The folder of a model; one from the hub is downloaded once, without code and pickles."""
    if Path(model).is_dir():
        if not (Path(model) / "config.json").exists():
            raise InputError(f"{model} has no config.json: it is not a Hugging Face model folder")
        return Path(model)
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", model):
        raise InputError(f"{model} is neither a folder nor a hub id")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors", "*.model", "*.txt"]
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=wanted))
    except (OSError, HTTPError, LocalEntryNotFoundError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"model {model} is no folder here and cannot be had from the hub ({reason})") from None


@lru_cache(maxsize=4)
def load_encoded(task: Task, data_dir: str | None, keyed: KeyedTokenizer, max_length: int) -> EncodedTask:
    data = read_task(task, None if data_dir is None else Path(data_dir))
    encoded = encode_task(data, keyed, max_length)
    if data.left_out:
        console.err.print(f"{task.name}: {data.left_out:,} rows without a gold label are left out")
    truncated = {split: getattr(encoded, split).num_truncated for split in ("train", *EVALUATED_SPLITS)}
    if any(truncated.values()):
        counts = ", ".join(f"{count:,} of {split}" for split, count in truncated.items() if count)
        console.err.print(f"{task.name}: cut at {max_length:,} tokens: {counts}")
    return encoded


def length_limit(encoder: Encoder, config: FinetuneConfig) -> int:
    positions = getattr(encoder.backbone.config, "max_position_embeddings", None) or config.max_length
    return min(config.max_length, positions)


def cell_hash(encoder: Encoder, encoded: EncodedTask, config: FinetuneConfig) -> str:
    """A hash of everything that decides the result: paths are replaced by what they hold, `auto` by what it means."""
    settings = config.model_dump(mode="json", exclude={"data_dir", "revision", "device", "microbatch_tokens"})
    settings["precision"] = str(choose_dtype(config.precision, choose_device(config.device)))
    settings["max_length"] = length_limit(encoder, config)
    return content_hash([PROTOCOL, encoder.hash, encoder.keyed.hash, encoded.data.fingerprint, settings])


def run_cell(
    encoder: Encoder, encoded: EncodedTask, config: FinetuneConfig, cell: str
) -> tuple[Score, dict[str, np.ndarray]]:
    """Train and evaluate; also returns the predicted label of every unit, by split (nothing when it diverged)."""
    device = choose_device(config.device)
    compute = Compute(device, choose_dtype(config.precision, device), config.microbatch_tokens)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(config.seed)
        model = build(encoder, encoded.data.task, config).to(device)
        training = train(model, encoded, config, compute)
    started = time.perf_counter()
    predictions = {}
    if training.diverged_at is None:
        predictions = {split: predict(model, encoded, split, compute) for split in EVALUATED_SPLITS}
    metrics = {split: measure(encoded, split, predicted) for split, predicted in predictions.items()}
    seconds = {"train": training.seconds, "evaluate": time.perf_counter() - started}
    num_evaluated = sum(len(getattr(encoded, split).tokens_T) for split in predictions)
    splits = {split: getattr(encoded, split) for split in ("train", *EVALUATED_SPLITS)}
    score = Score(
        cell=cell,
        model=encoder.name,
        model_hash=encoder.hash,
        task=encoded.data.task.name,
        data_hash=encoded.data.fingerprint,
        metric=encoded.data.task.metric,
        config=config,
        metrics=metrics,
        num_examples={name: split.num_samples for name, split in splits.items()},
        num_truncated={name: split.num_truncated for name, split in splits.items()},
        num_steps=training.num_steps,
        diverged=training.diverged_at is not None,
        diverged_at_step=training.diverged_at,
        train_losses=tuple(training.losses),
        seconds={name: round(value, 3) for name, value in seconds.items()},
        tokens_per_second={
            "train": round(training.num_tokens / seconds["train"], 1),
            "evaluate": round(num_evaluated / seconds["evaluate"], 1),
        },
        peak_memory_bytes=peak_memory_bytes(device),
        machine=describe_machine(device),
    )
    return score, predictions


@dataclass(frozen=True)
class Compute:
    """Where and in which type a cell computes."""

    device: torch.device
    dtype: torch.dtype
    microbatch_tokens: int

    @property
    def backend(self) -> Backend:
        return choose_backend(self.device, self.dtype)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)


def build(encoder: Encoder, task: Task, config: FinetuneConfig) -> nn.Module:
    """The network with a new head; weights that are not pretrained come from torch's generator."""
    if config.weights == "random":
        backbone = type(encoder.backbone)(copy.deepcopy(encoder.backbone.config))
        train_padding_row(backbone)
    else:
        backbone = copy.deepcopy(encoder.backbone)
    if task.family == "sequence_classification":
        return SequenceClassifier(backbone, len(task.labels))
    return TokenClassifier(backbone, len(task.labels), config.head_dropout)


@dataclass(frozen=True)
class Training:
    losses: list[float]
    num_steps: int
    num_tokens: int
    seconds: float
    diverged_at: int | None


def train(model: nn.Module, encoded: EncodedTask, config: FinetuneConfig, compute: Compute) -> Training:
    """Update `model` in place. Stops early only when a loss or a gradient is not finite."""
    split = encoded.train
    chosen = choose_examples(split.num_samples, config.max_train_examples)
    num_steps = min(config.max_steps, config.epochs * math.ceil(len(chosen) / config.batch_size))
    optimizer = make_optimizer(model, config)
    model.train()
    vitals: list[Tensor] = []
    losses: list[float] = []
    diverged_at = None
    num_tokens = 0
    started = time.perf_counter()
    with console.track(f"fine-tune {encoded.data.task.name}", num_steps, "steps") as progress:
        for step, places in enumerate(training_order(len(chosen), config.batch_size, num_steps, config.seed)):
            samples = chosen[places]
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, step, num_steps)
            loss = accumulate_gradients(model, split, samples, compute)
            norm = nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            vitals.append(torch.stack([loss, norm]))
            num_tokens += int(split.lengths_S[samples].sum())
            if len(vitals) == CHECK_EVERY_STEPS or step + 1 == num_steps:
                diverged_at = collect(vitals, losses)
                progress.advance(len(vitals), f"loss {losses[-1]:.3f}" if losses else "")
                vitals.clear()
            if diverged_at is not None:
                break
    return Training(losses, num_steps, num_tokens, time.perf_counter() - started, diverged_at)


def choose_examples(num_samples: int, wanted: int | None) -> np.ndarray:
    """All training examples, or a fixed random subset of them in file order."""
    if wanted is None or wanted >= num_samples:
        return np.arange(num_samples)
    return np.sort(np.random.default_rng(42).permutation(num_samples)[:wanted])


def learning_rate(config: FinetuneConfig, step: int, num_steps: int) -> float:
    """The rate of update `step` (from 0): up to the peak in equal steps, then down to 0 after the last update.

    The decay equals that of transformers' linear schedule; the warm-up is ahead of it by one step, whose first update
    has rate 0.
    """
    assert 0 <= step < num_steps
    warmup_steps = math.ceil(config.warmup_ratio * num_steps)
    climbing = (step + 1) / warmup_steps if warmup_steps else 1.0
    falling = (num_steps - step) / (num_steps - warmup_steps) if warmup_steps < num_steps else 1.0
    return config.learning_rate * min(climbing, falling, 1.0)


def make_optimizer(model: nn.Module, config: FinetuneConfig) -> torch.optim.AdamW:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)


def accumulate_gradients(model: nn.Module, split: EncodedSplit, samples: np.ndarray, compute: Compute) -> Tensor:
    """The mean loss over the targets of `samples`, and its gradient, by microbatches that fit into memory."""
    num_targets = max(count_targets(split, samples), 1)
    total = torch.zeros((), device=compute.device)
    for part in cut(samples, split.lengths_S, compute.microbatch_tokens):
        batch = make_batch(split, part, compute.device, compute.backend)
        with compute.autocast():
            logits = model(batch.tokens_T, batch.positions_T, batch.layout)
        loss = classification_loss(logits, batch.targets) / num_targets
        loss.backward()
        total += loss.detach()
    return total


def collect(vitals: Sequence[Tensor], losses: list[float]) -> int | None:
    """Append the losses of finished steps up to the first that is not finite, in loss or gradient; its step number."""
    for loss, norm in torch.stack(list(vitals)).tolist():
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return len(losses)
        losses.append(loss)
    return None


@torch.no_grad()
def predict(model: nn.Module, encoded: EncodedTask, split_name: str, compute: Compute) -> np.ndarray:
    """The predicted label of each unit of a split."""
    split: EncodedSplit = getattr(encoded, split_name)
    labels = encoded.data.task.labels
    model.eval()
    num_rows = split.num_samples if split.units_T is None else len(split.tokens_T)
    predicted = np.zeros(num_rows, dtype=np.int64)
    with console.track(f"evaluate {encoded.data.task.name} {split_name}", len(split.tokens_T), "tokens") as progress:
        for samples in evaluation_order(split.lengths_S, evaluation_tokens(compute)):
            batch = make_batch(split, samples, compute.device, compute.backend)
            with compute.autocast():
                logits = model(batch.tokens_T, batch.positions_T, batch.layout)
            predicted[batch.rows] = logits.argmax(-1).cpu().numpy()
            progress.advance(len(batch.tokens_T))
    if split.units_T is None:
        return predicted
    return vote(predicted, split.units_T, len(split.gold_U), len(labels), default=labels.index("O"))


def evaluation_tokens(compute: Compute) -> int:
    """Tokens per batch of evaluation: on a CPU, what its caches hold."""
    return compute.microbatch_tokens if compute.device.type == "cuda" else min(4096, compute.microbatch_tokens)


def measure(encoded: EncodedTask, split_name: str, predicted_U: np.ndarray) -> dict[str, float]:
    split: EncodedSplit = getattr(encoded, split_name)
    if encoded.data.task.family == "sequence_classification":
        return sequence_metrics(split.gold_U, predicted_U)
    return token_metrics(split.gold_U, predicted_U, split.unit_bounds_S1, encoded.data.task.labels)


def peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def write_cell(folder: Path, score: Score, encoded: EncodedTask, predictions: dict[str, np.ndarray]) -> None:
    with whole_folder(folder) as part:
        for split, predicted in predictions.items():
            lines = prediction_lines(encoded, split, predicted)
            (part / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        write_json(part / "score.json", score.model_dump(mode="json"))


def prediction_lines(encoded: EncodedTask, split_name: str, predicted_U: np.ndarray) -> list[str]:
    """One JSON object per example: its id, and gold and predicted label (or the lists of tags) by name."""
    split: EncodedSplit = getattr(encoded, split_name)
    names = np.array(encoded.data.task.labels, dtype=object)
    gold, predicted = names[split.gold_U].tolist(), names[predicted_U].tolist()
    bounds = split.unit_bounds_S1.tolist()
    is_text = split.units_T is None
    return [
        json.dumps(
            {
                "id": id,
                "gold": gold[begin] if is_text else gold[begin:end],
                "predicted": predicted[begin] if is_text else predicted[begin:end],
            },
            ensure_ascii=False,
        )
        + "\n"
        for id, (begin, end) in zip(split.ids, pairwise(bounds), strict=True)
    ]
