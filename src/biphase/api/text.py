"""Text → a tokenizer; text and a budget → advice."""

import math
import time
from numbers import Integral, Real
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from biphase.console import out as console
from biphase.corpus.text import TxtDocuments, are_names, find_text_sources, sample_texts
from biphase.errors import InputError
from biphase.files import refuse_foreign

if TYPE_CHECKING:
    from biphase.study.advise import Advice
    from biphase.study.cost import Machine

MEASURED = "3m"
"""The preset that a CPU is measured with: small enough for a few steps on a slow or busy one."""


def train_tokenizer(
    sources: Any,
    out: str | Path,
    *,
    vocab_size: int = 32_768,
    limit_mb: float | None = 1000.0,
    text_field: str = "text",
    txt_documents: TxtDocuments = "file",
) -> Path:
    """Train a byte-level BPE tokenizer on text; returns its folder.

    Args:
        sources: files (.txt, .md, .jsonl, also .gz, .zst; .parquet, .arrow), folders, globs, hub data sets (ID:SUBSET);
            in Python also a `datasets.Dataset`, a DataFrame, texts or rows in memory.
        out: the folder to write.
        vocab_size: tokens, special ones included.
        limit_mb: train on at most this many MB of text.
        text_field: the JSON field or the column with the text.
        txt_documents: what a document is in .txt and .md files: file, paragraphs or lines.
    """
    from biphase.corpus.tokenizer import save_tokenizer
    from biphase.corpus.tokenizer import train_tokenizer as train

    check_numbers(Integral, vocab_size=vocab_size)
    check_numbers(Real, limit_mb=limit_mb)
    if limit_mb is not None and not limit_mb > 0:
        raise InputError(f"`limit_mb` is {limit_mb:g} and leaves no text to train on: give more than 0")
    refuse_foreign(Path(out), "tokenizer")
    limit = math.inf if limit_mb is None else limit_mb
    tokenizer = train(sample_texts(find_text_sources(sources), text_field, txt_documents, limit), vocab_size)
    save_tokenizer(tokenizer, Path(out))
    console.print(f"{out}: {len(tokenizer):,} tokens")
    return Path(out)


def check_numbers(kind: Any, **settings: Any) -> None:
    """Raise `InputError` for a setting that is given and is no number of this kind."""
    for name, value in settings.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
            raise InputError(f"`{name}` is {value!r}: give a {'whole ' if kind is Integral else ''}number")


def advise(
    text: Any = None,
    *,
    hours: float | None = None,
    device: str | None = None,
    devices: int | None = None,
    efficiency: float | None = None,
    flops: float | None = None,
    study: str | Path | None = None,
    from_scratch: bool = False,
    text_field: str = "text",
) -> "Advice":
    """Find the best use of a budget: a public encoder to continue, or a size from random weights; with curriculum,
    batch and steps, each with its reason, as a recipe ready for `pretrain`.

    Args:
        text: your text: shards, whose tokens are known, or a file or a folder; in Python also texts or rows in memory.
        hours: how long the devices may work.
        device: such as H100, or a run to measure by; this machine's CPU, measured for ten seconds, unless given.
        devices: how many; 1, or all cores, unless given.
        efficiency: useful FLOP/s as a share of the device's peak.
        flops: a budget in FLOPs in place of hours and device.
        study: the folder of a study of yours, whose scores choose the curriculum from random weights.
        from_scratch: start from random weights, even where a model could be continued.
        text_field: the JSON field or the column with the text.
    """
    check_numbers(Real, hours=hours, devices=devices, efficiency=efficiency, flops=flops)
    from biphase.study import cost as machines
    from biphase.study.advise import advise as choose
    from biphase.study.advise import measure_text
    from biphase.study.report import read_evidence

    machine_options = {"device": device, "devices": devices, "efficiency": efficiency}
    if needless := [name for name, value in machine_options.items() if value is not None and hours is None]:
        raise InputError(f"`{needless[0]}` says what computes in `hours`: give these too, or leave it out")
    if are_names(text) and not isinstance(text, str | Path):
        if len(text) > 1:
            raise InputError(f"advice is about one text, and {len(text)} are named: give the folder that they are in")
        text = text[0] if text else text
    amount = None if text is None else measure_text(text, text_field)
    evidence = () if study is None else read_evidence(Path(study))
    machine = None
    if hours is not None:
        machine = machines.find_machine(device or "CPU", 1 if devices is None else devices, efficiency)
        if machine.name == "CPU" and machine.source == "assumed":
            machine = measure_cpu(devices)
    return choose(amount, flops=flops, hours=hours, machine=machine, evidence=evidence, from_scratch=from_scratch)


def measure_cpu(cores: int | None = None, seconds: float = 10) -> "Machine":
    """Measure this machine's CPU by training a small network, and return a machine of so many such cores; of all that
    this one has, unless given."""
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

    device, vocab_size = torch.device("cpu"), 8192
    dtype = choose_dtype("auto", device)
    model = PackedModel(make_model(MEASURED, {}, TokenIds(vocab_size, 0, 1, 2, None), 256, seed=0))
    optimizers = make_optimizers(Optimizer(), model)
    # Four samples of 256 random tokens, of which every third is predicted.
    bounds_S1, tokens_T = np.arange(0, 1025, 256), torch.randint(3, vocab_size, (1024,))
    positions_T, targets_N = torch.arange(1024) % 256, torch.arange(0, 1024, 3)
    layout = lay_out(bounds_S1, causal=False)
    durations: list[float] = []
    while len(durations) < 3 or sum(durations) < seconds:
        begin = time.perf_counter()
        with autocast(device, dtype):
            loss_sum, _, _ = model(tokens_T, positions_T, layout, targets_N, tokens_T[targets_N])
        (loss_sum / len(targets_N)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        durations.append(time.perf_counter() - begin)
    threads = torch.get_num_threads()
    flops = count_flops(model.network).batch(np.diff(bounds_S1), len(targets_N), causal=False)
    speed = flops / median(durations[1:]) / threads  # the first step takes longer, and does not count
    on = f"preset {MEASURED} and {show_count(threads, 'thread')}"
    source = f"measured here for {sum(durations):.0f} s with {on}, and with everything else that was running"
    return Machine("CPU", cores or threads, float(speed), 1.0, source)
