"""This machine's CPU → what it computes in an hour, by a few seconds of training."""

import time
from statistics import median

import numpy as np
import torch

from biphase.device import choose_dtype
from biphase.encoder.attention import lay_out
from biphase.encoder.network import TokenIds, make_model
from biphase.encoder.packed import PackedModel, count_flops
from biphase.pretraining.optimizer import autocast, make_optimizers
from biphase.recipe import Optimizer
from biphase.report.formats import show_count
from biphase.study.cost import Machine

MEASURED = "3m"
"""The preset that a CPU is measured with: small enough for a few steps on a slow or busy one."""


def measure_cpu(cores: int | None = None, seconds: float = 10) -> Machine:
    """Measure this machine's CPU by training a small network, and return a machine of so many such cores; of all that
    this one has, unless given."""

    device, vocab_size = torch.device("cpu"), 8192
    dtype = choose_dtype("auto", device)
    model = PackedModel(make_model(MEASURED, {}, TokenIds(vocab_size, 0, 1, 2, None), 256, seed=0))
    flops, optimizers = count_flops(model.network), make_optimizers(Optimizer(), model)
    # Four samples of 256 random tokens, of which every third is predicted.
    bounds_S1, tokens_T = np.arange(0, 1025, 256), torch.randint(3, vocab_size, (1024,))
    positions_T, targets_N = torch.arange(1024) % 256, torch.arange(0, 1024, 3)
    layout = lay_out(bounds_S1, causal=False)

    def train_step() -> float:
        begin = time.perf_counter()
        with autocast(device, dtype):
            loss_sum, _, _ = model(tokens_T, positions_T, layout, targets_N, tokens_T[targets_N])
        (loss_sum / len(targets_N)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - begin

    durations = [train_step()]  # the first one, which takes longer, does not count
    while len(durations) < 3 or sum(durations) < seconds:
        durations.append(train_step())
    threads = torch.get_num_threads()
    speed = flops.batch(np.diff(bounds_S1), len(targets_N), causal=False) / median(durations[1:]) / threads
    on = f"preset {MEASURED} and {show_count(threads, 'thread')}"
    source = f"measured here for {sum(durations):.0f} s with {on}, and with everything else that was running"
    return Machine("CPU", cores or threads, float(speed), 1.0, source)
