"""Peer of `grid.py --retrieval`: Sentence Transformers' own trainer and evaluator, as its examples for pairs have them.

Imported in the process of its cells alone, when the allocator is set: what it loads is a part of its time.
"""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from grid_job import SPLITS, Cell, GridJob, changes_of_config, shared_arguments, timed
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from transformers import set_seed


def fit_retriever(job: GridJob, cell: Cell) -> dict[str, Any]:
    """As Sentence Transformers' own training examples for pairs do it."""
    task, config = job.grid.tasks[cell.task], job.grid.config
    folder_of_data = Path(task["peer_folder"])
    seconds: dict[str, float] = {}
    with timed(seconds, "load"):
        set_seed(cell.seed)
        changes = changes_of_config(job.grid.model)
        model = SentenceTransformer(job.grid.model, config_kwargs=changes, model_kwargs={"dtype": torch.float32})
        model.max_seq_length = config["max_length"]
    with timed(seconds, "tokenize"):  # reading only: texts are tokenized batch by batch
        pairs = load_dataset("json", data_files=str(folder_of_data / "train.jsonl"), cache_dir=job.cache)["train"]
        judged = {split: json.loads((folder_of_data / f"{split}.json").read_text()) for split in SPLITS}
    with tempfile.TemporaryDirectory() as folder, timed(seconds, "train"):
        arguments = SentenceTransformerTrainingArguments(
            **shared_arguments(job, cell, folder), batch_sampler="no_duplicates"
        )
        loss = MultipleNegativesRankingLoss(model, scale=config["scale"])
        trainer = SentenceTransformerTrainer(model, arguments, train_dataset=pairs, loss=loss)
        trainer.train()
    scores = {}
    with timed(seconds, "evaluate"):
        for split, found in judged.items():
            relevant = {query: set(documents) for query, documents in found["relevance"].items()}
            evaluator = InformationRetrievalEvaluator(
                found["queries"], found["documents"], relevant, batch_size=config["batch_size"], write_csv=False
            )
            with torch.autocast(model.device.type, torch.bfloat16, enabled=arguments.bf16):
                metrics = evaluator(model)
            scores[split] = next(value for name, value in metrics.items() if name.endswith("cosine_ndcg@10"))
    return asdict(cell) | {"scores": scores, "steps": trainer.state.global_step, "seconds": seconds}
