"""A fine-tuned model folder and the rows of a file → the rows with predictions, streamed.

A folder that `finetune --keep` wrote describes its inputs, and predicts as it did when it was scored. Any other folder
with a head for classification goes through transformers' pipelines.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from biphase.console import err
from biphase.corpus.forms import PlacedRow, Row
from biphase.corpus.rows import LONGEST_TEXT
from biphase.corpus.tokenizer import load_tokenizer
from biphase.encoder.models import unreplaced
from biphase.encoder.network import load_weights
from biphase.errors import InputError, clipped
from biphase.files import reading
from biphase.finetuning.encoding import CellContext, HashedTokenizer
from biphase.finetuning.families import family_module, predict_inputs
from biphase.finetuning.families.question_answering import encode_questions
from biphase.finetuning.heads import auto_class
from biphase.finetuning.kept import KeptModel, count_trained, read_trained, with_task_names
from biphase.finetuning.metrics import Metrics, Rows
from biphase.hub import position_limit
from biphase.tasks.splits import Collection, TaskData

ROWS_AT_ONCE = 512
"""The number of rows to read, sort by length and predict together; fewer if they reach `LONGEST_TEXT` characters."""

SPELLED = "biphase reads these names as letters, as in training; other programs may read them as the tokens"


@torch.no_grad()
def predict_placed(model: KeptModel, rows: Iterator[PlacedRow], name: str, device: torch.device) -> Iterator[Row]:
    """Yield the rows of the file `name` with their predictions, in order, on demand.

    Prints at the end how many rows were cut, have no text, name special tokens, or trained the model. Raises
    `InputError` for a row that lacks a column, or has one with the name of a prediction.
    """
    trained_hashes, tokens = read_trained(model.folder), list_read_tokens(model.folder) if model.is_ours else []
    network, tokenizer = load_kept(model, device)
    predict = family_module(model.task, model.config).predict
    counts = Counter[str]()
    for chunk in in_chunks(rows):
        named = [(location, with_task_names(model.task, model.layout, row)) for location, row in chunk]
        predicted = predict(model, network, tokenizer, named)
        num_naming = sum(any(token in str(row) for token in tokens) for _, row in chunk)
        num_trained = count_trained(predicted.inputs, trained_hashes)
        counts.update(rows=len(chunk), cut=predicted.num_cut, naming=num_naming, trained=num_trained)
        for (location, row), prediction in zip(chunk, predicted.rows, strict=True):
            if doubles := sorted(row.keys() & prediction.keys()):
                raise InputError(f"{location}: the file has a column '{doubles[0]}' already; rename it")
            counts["empty"] += prediction.get("predicted", "") is None
            yield row | prediction
    endings = {
        "empty": ("has", "have", "no text: `predicted` is empty there"),
        "cut": ("was", "were", f"too long and cut at {tokenizer.pretrained.model_max_length:,} tokens"),
        "naming": ("names", "name", f"special tokens ({clipped(', '.join(tokens))}): {SPELLED}"),
        "trained": ("trained", "trained", "or validated this model, which may know their answers"),
    }
    for key, (verb_of_one, verb, ending) in endings.items():
        if counts[key]:
            verb = verb_of_one if counts[key] == 1 else verb
            err.print(f"{name}: {counts[key]:,} of {counts['rows']:,} rows {verb} {ending}")


def list_read_tokens(folder: Path) -> list[str]:
    """List the special tokens that programs find in texts by `tokenizer.json` alone. `kept.spell_special_tokens` leaves
    none but those that a Unigram model lacks; a folder of an earlier version has all."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return []
    with reading(path, "copy it again from an intact one"):
        added = Tokenizer.from_file(str(path)).get_added_tokens_decoder()
    return [token.content for token in added.values() if token.special]


def load_kept(model: KeptModel, device: torch.device) -> tuple[Any, HashedTokenizer]:
    """Load a fine-tuned network and its tokenizer, whose `model_max_length` is the longest input of the network. Raises
    `InputError` for weights that are not finite, and for files that were replaced since the record was read."""
    with unreplaced(model.folder, model.stamps):
        network: Any = load_weights(auto_class(model.task), model.folder, attention=None).eval().to(device)
        tokenizer = HashedTokenizer(load_tokenizer(model.folder))
    if not all(bool(weight.isfinite().all()) for weight in network.parameters()):
        raise InputError(f"{model.folder} has weights that are not finite numbers; copy it again from an intact one")
    limit = position_limit(network) or tokenizer.pretrained.model_max_length  # many tokenizers name none
    tokenizer.pretrained.model_max_length = min(limit, tokenizer.pretrained.model_max_length)
    return network, tokenizer


@torch.no_grad()
def judge_test(
    model: KeptModel, data: TaskData | Collection, device: torch.device, network: Any = None
) -> tuple[Metrics, Rows, int]:
    """Predict and score test examples by a kept model, or by a `network` in place of its own. Returns every metric of
    the family, a row for each example, and the number of examples that were cut."""
    own, tokenizer = load_kept(model, device)
    if isinstance(data, TaskData) and model.task.kind.is_answering:
        split = encode_questions(model.task, data.test, tokenizer, model.config, model.has_unanswerable)
    else:
        split = family_module(model.task, model.config).encode(data, tokenizer, model.config)["test"]
    cell = CellContext(model.task, model.config, device, torch.float32, calibration=model.calibration)
    metrics, rows = split.judge(predict_inputs(model, network or own, split), cell)
    return metrics, rows, split.num_truncated


def in_chunks(rows: Iterable[PlacedRow]) -> Iterator[list[PlacedRow]]:
    """Yield chunks of rows to predict together."""
    chunk: list[PlacedRow] = []
    num_chars = 0
    for placed in rows:
        chunk.append(placed)
        num_chars += len(str(placed[1]))
        if len(chunk) == ROWS_AT_ONCE or num_chars >= LONGEST_TEXT:
            yield chunk
            chunk, num_chars = [], 0
    if chunk:
        yield chunk
