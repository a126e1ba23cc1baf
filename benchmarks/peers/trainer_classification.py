"""Peer of `grid.py`: Hugging Face Trainer with `datasets`, as run_glue.py and run_ner.py have them; F1 by seqeval.

Imported in the process of its cells alone, when the allocator is set: what it loads is a part of its time.

Letters: B samples of a batch, L its longest sample.
"""

import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import load_dataset
from grid_job import SPLITS, Cell, GridJob, changes_of_config, shared_arguments, timed
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)


def fit_classifier(job: GridJob, cell: Cell) -> dict[str, Any]:
    """As run_glue.py and run_ner.py do it, apart from the heads, which are biphase's."""
    task = job.grid.tasks[cell.task]
    is_tagging = task["family"] == "token_classification"
    seconds: dict[str, float] = {}
    with timed(seconds, "load"):
        set_seed(cell.seed)
        tokenizer = AutoTokenizer.from_pretrained(job.grid.model)
        network = make_network(job.grid.model, len(task["classes"]), is_tagging, job.grid.config["head_dropout"])
    with timed(seconds, "tokenize"):
        data = read_tokenized(task, tokenizer, job)
    with tempfile.TemporaryDirectory() as folder:
        with timed(seconds, "train"):
            trainer = Trainer(
                network,
                TrainingArguments(**shared_arguments(job, cell, folder)),
                train_dataset=data["train"],
                data_collator=(DataCollatorForTokenClassification if is_tagging else DataCollatorWithPadding)(
                    tokenizer
                ),
                preprocess_logits_for_metrics=lambda logits, _: logits.argmax(-1),
            )
            trainer.train()
        scores = {}
        with timed(seconds, "evaluate"):
            for split in SPLITS:
                predicted = trainer.predict(data[split]).predictions
                scores[split] = (score_tags if is_tagging else score_labels)(data[split], predicted, task)
    return asdict(cell) | {"scores": scores, "steps": trainer.state.global_step, "seconds": seconds}


def make_network(model: str, num_labels: int, is_tagging: bool, head_dropout: float) -> Any:
    """The pretrained network with biphase's head, for padded batches."""
    config = AutoConfig.from_pretrained(model, **changes_of_config(model))
    backbone = AutoModel.from_pretrained(model, config=config, dtype=torch.float32)
    width = config.hidden_size
    if is_tagging:
        head = nn.Sequential(nn.Dropout(head_dropout), nn.Linear(width, num_labels))
    else:
        head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, num_labels))
    for layer in head:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=config.initializer_range)
            nn.init.zeros_(layer.bias)

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = backbone, head

        def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> dict[str, Any]:
            hidden = self.backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            if not is_tagging:
                is_token_BL1 = attention_mask[..., None]
                hidden = (hidden.float() * is_token_BL1).sum(1) / is_token_BL1.sum(1)
            logits = self.head(hidden).float()
            return {"loss": nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten()), "logits": logits}

    return Network()


def read_tokenized(task: dict[str, Any], tokenizer: Any, job: GridJob) -> Any:
    """The splits with `input_ids` and `labels`; of tagged words also what `score_tags` needs."""
    files = {split: str(Path(task["folder"]) / f"{split}.jsonl") for split in ("train", *SPLITS)}
    raw = load_dataset("json", data_files=files, cache_dir=job.cache)
    has_pair = tokenizer.cls_token_id is not None and tokenizer.sep_token_id is not None
    opening = [tokenizer.cls_token_id] if has_pair else []
    closing = [tokenizer.sep_token_id if has_pair else tokenizer.eos_token_id]
    room = job.grid.config["max_length"] - len(opening) - len(closing)
    numbers = {name: number for number, name in enumerate(task["classes"])}

    def number_of(label: str | int) -> int:
        return numbers[label] if isinstance(label, str) else label

    def encode(texts: Sequence[str], **options: Any) -> Any:
        return tokenizer(texts, add_special_tokens=False, truncation=True, max_length=room, **options)

    def encode_texts(rows: dict[str, list[Any]]) -> dict[str, Any]:
        texts = [
            task["template"].format(**dict(zip(rows, row, strict=True))) for row in zip(*rows.values(), strict=True)
        ]
        return {
            "input_ids": [opening + ids + closing for ids in encode(texts)["input_ids"]],
            "labels": [number_of(label) for label in rows[task["label"]]],
        }

    def encode_words(rows: dict[str, list[Any]]) -> dict[str, Any]:
        made: dict[str, list[Any]] = defaultdict(list)
        encoded = encode([" ".join(words) for words in rows[task["words"]]], return_offsets_mapping=True)
        columns = (rows[task["words"]], rows[task["label"]], encoded["input_ids"], encoded["offset_mapping"])
        for words, labels, ids, spans in zip(*columns, strict=True):
            tags = [number_of(label) for label in labels]
            word_at = [i for i, word in enumerate(words) for _ in range(len(word) + (i > 0))]  # a space: the next word
            places = [word_at[max(end - 1, begin)] for begin, end in spans]
            made["input_ids"].append(opening + ids + closing)
            made["labels"].append([-100] * len(opening) + [tags[place] for place in places] + [-100])
            made["word_of_token"].append([-1] * len(opening) + places + [-1])
            made["word_tags"].append(tags)
        return dict(made)

    is_tagging = task["family"] == "token_classification"
    encode_rows = encode_words if is_tagging else encode_texts
    return raw.map(encode_rows, batched=True, remove_columns=raw["train"].column_names)


def score_labels(data: Any, predicted: Any, task: dict[str, Any]) -> float:
    return float((np.array(data["labels"]) == predicted).mean())


def score_tags(data: Any, predicted: Any, task: dict[str, Any]) -> float:
    """seqeval's F1 over entities; of each word's tokens the majority decides, the first of equals."""
    from seqeval.metrics import f1_score

    names, gold, voted = task["classes"], [], []
    for tags, words, labels in zip(data["word_tags"], data["word_of_token"], predicted.tolist(), strict=True):
        votes: dict[int, Counter[int]] = defaultdict(Counter)
        for word, label in zip(words, labels, strict=False):  # behind the words' tokens there is padding
            votes[word][label] += 1
        gold.append([names[tag] for tag in tags])
        voted.append([names[votes[i].most_common(1)[0][0]] if i in votes else "O" for i in range(len(tags))])
    return float(f1_score(gold, voted))
