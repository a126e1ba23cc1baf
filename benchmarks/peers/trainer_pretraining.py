"""Peer of `pretraining.py`: Hugging Face Trainer with `DataCollatorForLanguageModeling`, as run_mlm.py has them.

Imported in the process of its arm alone, when the allocator and the threads are set.

Letters: B samples of a batch, L its longest sample.
"""

import tempfile
from typing import Any

import numpy as np
import torch
from pretraining_job import Ledger, PretrainingJob, measured_peak, note_step, recipe_of, summarize_steps
from transformers import DataCollatorForLanguageModeling, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import is_flash_attn_2_available

from biphase.corpus.packing import make_samples
from biphase.corpus.shards import ShardSet
from biphase.encoder.packed import count_flops
from biphase.pretraining.job import load_network
from biphase.pretraining.start import Start
from biphase.recipe import Recipe


class SampleList:
    """The samples of biphase as a data set of lists, as `run_mlm.py` makes them (with their special-token masks)."""

    def __init__(self, shards: Any, samples: Any, special_ids: tuple[int, ...]) -> None:
        self.shards, self.samples, self.special_ids = shards, samples, set(special_ids)

    def __len__(self) -> int:
        return self.samples.num_samples

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if index >= len(self):  # ends iteration, by which Trainer learns the lengths
            raise IndexError(index)
        start, stop = self.samples.spans(np.array([index]))
        ids = self.shards.read(int(start[0]), int(stop[0])).astype(np.int64).tolist()
        return {"input_ids": ids, "special_tokens_mask": [int(token in self.special_ids) for token in ids]}


def run_trainer(job: PretrainingJob) -> dict[str, Any]:
    """The same recipe and samples by Trainer, padded to the longest sample of each batch."""
    device, dtype, peak = measured_peak(job)
    recipe, shards = recipe_of(job), ShardSet(job.shards)
    model = load_network(recipe, Start(), shards)
    model.config.use_cache = False
    flops, ledger = count_flops(model), Ledger([], [])  # before it attends otherwise
    attention = trainer_attention(device)
    model.set_attn_implementation(attention)
    collate = DataCollatorForLanguageModeling(
        shards.tokenizer, mlm_probability=0.4, mask_replace_prob=1.0, random_replace_prob=0.0
    )

    def weighed(features: list[dict[str, Any]]) -> Any:
        batch = collate(features)
        lengths_B, (num, longest) = batch["attention_mask"].sum(1), batch["input_ids"].shape
        targets, slots = int((batch["labels"] != -100).sum()), num * longest
        pairs = num * longest**2
        ledger.passes.append(
            {
                "tokens": int(lengths_B.sum()),
                "slots": slots,
                "targets": targets,
                "flops": flops.batch(lengths_B.numpy(), targets, causal=False),
                "executed_flops": (flops.per_token + flops.per_target) * slots + flops.per_token_and_key * pairs,
            }
        )
        return batch

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            note_step(ledger, device)

    with tempfile.TemporaryDirectory() as folder:
        arguments = training_arguments(job, recipe, device, dtype, folder)
        data = SampleList(shards, make_samples(recipe.data, shards), shards.manifest.special_ids)
        trainer = Trainer(model, arguments, train_dataset=data, data_collator=weighed, callbacks=[Clock()])
        trainer.train()
    ledger.passes = ledger.passes[: job.num_steps * job.accumulate]  # the loader reads one batch ahead
    return summarize_steps(job, ledger, peak, device) | {
        "per_device_train_batch_size": job.batch_samples,
        "gradient_accumulation_steps": job.accumulate,
        "dtype": str(dtype),
        "attention": attention,
        "optimizer": str(arguments.optim),
        "data_loader_workers": arguments.dataloader_num_workers,
    }


def training_arguments(
    job: PretrainingJob, recipe: Recipe, device: torch.device, dtype: torch.dtype, folder: str
) -> TrainingArguments:
    """The recipe's settings under Trainer's names; all else is as it is shipped."""
    return TrainingArguments(
        output_dir=folder,
        max_steps=job.num_steps,
        per_device_train_batch_size=job.batch_samples,
        gradient_accumulation_steps=job.accumulate,
        learning_rate=recipe.schedule.peak_lr,
        lr_scheduler_type="constant",
        adam_beta1=recipe.optimizer.betas[0],
        adam_beta2=recipe.optimizer.betas[1],
        adam_epsilon=recipe.optimizer.eps,
        weight_decay=recipe.optimizer.weight_decay,
        max_grad_norm=recipe.optimizer.max_grad_norm,
        bf16=dtype == torch.bfloat16,
        use_cpu=device.type == "cpu",
        torch_compile="compile" in job.arm,
        train_sampling_strategy="group_by_length" if "sorted" in job.arm else "random",
        seed=job.seed,
        remove_unused_columns=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def trainer_attention(device: Any) -> str:
    """The fastest that is at hand: flash-attn (which drops the padding in attention) on CUDA, else SDPA."""
    return "flash_attention_2" if device.type == "cuda" and is_flash_attn_2_available() else "sdpa"
