"""Attention and head alone, forward and backward: how long, in how much memory, how far from the exact answer.

    python benchmarks/kernels.py                                       # an NVIDIA GPU
    python benchmarks/kernels.py --device cpu --tokens 2048 --vocab 4096   # a first look
    python benchmarks/kernels.py --device cpu --reading --threads 2        # where no gradient is formed

Attention: our backends beside FlexAttention, plain and with what `varlen` cannot do, caps of scores (Gemma 2) and sinks
(gpt-oss). Head: ours beside PyTorch's `linear_cross_entropy` and all logits at once.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, get_args

from measuring import Found, describe_setup, make_document, result_path, save, say

WIDTH, HEADS, KV_HEADS, HEAD_WIDTH = 768, 12, 12, 64
CASES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "bidirectional": {"causal": False},
    "bidirectional, window 128": {"causal": False, "window": 128},
    "causal, capped": {"causal": True, "softcap": 50.0},
    "causal, sinks": {"causal": True, "sinks": True},
}
FLEX_BLOCK = 128


def make_flex_mask(layout: Any, window: int) -> Any:
    """Who is in whose sample and window and, when causal, before whom: made of the bounds, without a look at pairs."""
    import torch
    from torch.nn.attention.flex_attention import BlockMask

    most = window - layout.causal if window else layout.max_seqlen
    bounds, device, num_tokens = layout.bounds_F1.long(), layout.bounds_F1.device, int(layout.bounds_F1[-1])
    sample_T = torch.searchsorted(bounds, torch.arange(num_tokens, device=device), right=True) - 1
    # A block of queries meets the blocks from where its first sample begins to where its last one ends, or the window.
    firsts_B = torch.arange(0, num_tokens, FLEX_BLOCK, device=device)
    lasts_B = (firsts_B + FLEX_BLOCK - 1).clamp(max=num_tokens - 1)
    begins_B = torch.maximum(bounds[sample_T[firsts_B]], firsts_B - most) // FLEX_BLOCK
    sample_ends_B = bounds[sample_T[lasts_B] + 1] - 1
    ends_B = (lasts_B if layout.causal else torch.minimum(sample_ends_B, lasts_B + most)) // FLEX_BLOCK + 1
    blocks_BB = (begins_B[:, None] + torch.arange(len(firsts_B), device=device)).clamp(max=len(firsts_B) - 1)

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
        is_near = (sample_T[query] == sample_T[key]) & ((query - key).abs() <= most)
        return is_near & (query >= key) if layout.causal else is_near

    counts_11B, blocks_11BB = (ends_B - begins_B).int()[None, None], blocks_BB.int()[None, None]
    lengths = (num_tokens, num_tokens)
    return BlockMask.from_kv_blocks(counts_11B, blocks_11BB, BLOCK_SIZE=FLEX_BLOCK, mask_mod=sees, seq_lengths=lengths)


def flex_attend(q_THK: Any, k_TGK: Any, v_TGK: Any, mask: Any, softcap: float, sinks_H: Any) -> Any:
    """What `attend` computes, by FlexAttention."""
    import torch
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def cap(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return softcap * torch.tanh(score / softcap) if softcap else score

    attention: Any = torch.compile(flex_attention, dynamic=True) if q_THK.is_cuda else flex_attention
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THK, k_TGK, v_TGK))
    out, aux = attention(q, k, v, score_mod=cap, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
    if sinks_H is not None:  # softmax with the sink = softmax without it · (1 - what goes to the sink)
        out = out * torch.sigmoid(aux.lse - sinks_H[:, None])[..., None].to(out.dtype)
    return out[0].transpose(0, 1)


def measure(function: Callable[..., Any], inputs: list[Any], expected: list[Any], options: argparse.Namespace) -> Found:
    """Milliseconds, memory, and how far output and gradients are from the exact ones, in units of their mean size."""
    import torch

    from biphase.device import synchronize

    device = torch.device(options.device)
    leaves = [x.detach().requires_grad_(options.with_backward) for x in inputs]
    times: list[float] = []
    found: list[Any] = []
    for _ in range(options.repeats + 1):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        synchronize(device)
        started = time.perf_counter()
        out = function(*leaves)
        gradients = torch.autograd.grad(out.float().square().sum(), leaves) if options.with_backward else ()
        synchronize(device)
        times.append(time.perf_counter() - started)
        found = [out, *gradients]
    distances = [
        float((x.detach().float() - e).abs().max() / e.abs().mean()) for x, e in zip(found, expected, strict=False)
    ]
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    return {
        "milliseconds": 1000 * statistics.median(times[1:]),
        "distance": max(distances, default=None),
        "peak_gib": peak,
    }


Exact = Callable[[list[Any]], list[Any]]
"""Inputs → output and gradients in fp32: the answer, which is not measured."""


def in_fp32(function: Callable[..., Any], inputs: list[Any]) -> list[Any]:
    import torch

    leaves = [x.detach().float().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def by_kv_heads(attend: Callable[..., Any], sinks_H: Any, inputs: list[Any]) -> list[Any]:
    """As `in_fp32`, a key-value head at a time: the slow twin has a score for each pair of tokens, 1 GB a head."""
    import torch

    found, shared = [], HEADS // KV_HEADS
    for head in range(KV_HEADS):
        queries = slice(head * shared, (head + 1) * shared)
        parts = [x[:, where] for x, where in zip(inputs, (queries, [head], [head]), strict=True)]
        found.append(in_fp32(partial(attend, sinks_H=None if sinks_H is None else sinks_H[queries]), parts))
    return [torch.cat(parts, 1) for parts in zip(*found, strict=True)]


def compare(
    arms: dict[str, Callable[..., Any]], exact: Exact, inputs: list[Any], options: argparse.Namespace
) -> dict[str, Found]:
    """Each arm, or why it failed; without an answer no distance."""
    import torch

    measured: dict[str, Found] = {}

    def fail(name: str, error: Exception) -> None:
        measured[name] = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:200]}
        say(f"    {name}: {measured[name]['error']}")

    try:
        expected = exact(inputs)
    except RuntimeError as error:  # no memory is left
        expected = []
        fail("exact", error)
    for name, arm in arms.items():
        torch._dynamo.reset()
        with_backward = argparse.Namespace(**vars(options), with_backward=options.device == "cuda" or name != "flex")
        try:
            measured[name] = measure(arm, inputs, expected, with_backward)
            distance = measured[name]["distance"]
            told = "" if distance is None else f", off by {distance:.1e}"
            say(f"    {name}: {measured[name]['milliseconds']:.1f} ms{told}")
        except Exception as error:  # what a kernel cannot do it says in many ways
            fail(name, error)
    return measured


def measure_attention(options: argparse.Namespace) -> Iterator[Found]:
    import numpy as np
    import torch

    from biphase.encoder.attention import Backend, attend, beyond_varlen, lay_out

    lengths = np.exp(np.random.default_rng(0).uniform(np.log(12), np.log(2048), options.tokens))
    bounds = np.append(0, lengths.astype(int).cumsum())
    bounds = np.append(bounds[bounds < options.tokens], options.tokens)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    shapes = ((options.tokens, heads, HEAD_WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS))
    inputs = [torch.randn(shape, device=options.device).to(dtype) for shape in shapes]
    for what, case in CASES.items():
        say(f"  attention, {what}")
        causal, window, softcap = case["causal"], case.get("window", 0), case.get("softcap", 0.0)
        sinks = torch.linspace(-1, 3, HEADS, device=options.device) if "sinks" in case else None
        arms: dict[str, Callable[..., Any]] = {}
        for backend in get_args(Backend):
            layout = lay_out(bounds, causal=causal, device=options.device, backend=backend)
            settings: dict[str, Any] = {"scale": HEAD_WIDTH**-0.5, "window": window, "softcap": softcap}
            arms[backend] = partial(attend, layout=layout, sinks_H=sinks, **settings)
        exact = partial(by_kv_heads, arms.pop("reference"), sinks)
        if beyond_varlen(softcap, sinks is not None, HEAD_WIDTH):  # it would be the buckets once more
            del arms["varlen"]
        mask = make_flex_mask(lay_out(bounds, causal=causal, device=options.device, backend="reference"), window)
        arms["flex"] = partial(flex_attend, mask=mask, softcap=softcap, sinks_H=sinks)
        yield {"what": f"attention, {what}", "arms": compare(arms, exact, inputs, options)}


READ = {"long": (440, 512, 7), "middle": (90, 120, 32), "short": (12, 20, 200)}
"""The texts that are read together: their least and most tokens, and their number."""


def measure_reading(options: argparse.Namespace) -> Iterator[Found]:
    """Attention without gradients over texts sorted by length: PyTorch's kernel for batches, and buckets."""
    from biphase.machine import prepare_process

    prepare_process()  # the allocator of our commands
    import numpy as np
    import torch

    from biphase.encoder.attention import attend, lay_out

    torch.set_num_threads(options.threads)
    random = np.random.default_rng(0)
    without = argparse.Namespace(**vars(options), with_backward=False)
    for (heads, width), (what, (least, most, num)) in product(((4, 32), (12, 32), (12, 64)), READ.items()):
        bounds = np.append(0, np.sort(random.integers(least, most, num)).cumsum())
        for dtype in (torch.bfloat16, torch.float32):
            name = f"reading, {heads} heads of {width}, {what} texts, {str(dtype).removeprefix('torch.')}"
            inputs = [torch.randn(int(bounds[-1]), heads, width, dtype=dtype) for _ in range(3)]
            arms: dict[str, Found] = {}
            with torch.inference_mode():
                for arm in ("sdpa", "buckets"):
                    layout = lay_out(bounds, causal=False, dtype=dtype, backend=arm)
                    settings: dict[str, Any] = {"layout": layout, "scale": width**-0.5}
                    exact = partial(attend, **settings)(*(x.float() for x in inputs))
                    arms[arm] = measure(partial(attend, **settings), inputs, [exact], without)
            told = ", ".join(f"{arm} {found['milliseconds']:.1f} ms" for arm, found in arms.items())
            say(f"  {name}: {told}")
            yield {"what": name, "arms": arms}


def measure_head(options: argparse.Namespace) -> Found:
    import torch
    from torch.nn.functional import cross_entropy, linear

    from biphase.encoder.packed import language_model_loss

    say("  head and loss")
    num = options.tokens // 4
    targets = torch.randint(0, options.vocab, (num,), device=options.device)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    hidden = torch.randn(num, WIDTH, device=options.device).to(dtype)
    weight = torch.randn(options.vocab, WIDTH, device=options.device).to(dtype) / WIDTH**0.5
    arms: dict[str, Callable[..., Any]] = {
        "biphase": lambda h, w: language_model_loss(h, w, None, targets, compiles=options.device == "cuda")[0] / num,
        "biphase, not compiled": lambda h, w: language_model_loss(h, w, None, targets)[0] / num,
        "linear_cross_entropy": lambda h, w: torch.nn.functional.linear_cross_entropy(h, w, targets),
        "all logits": lambda h, w: cross_entropy(linear(h, w).float(), targets),
    }
    what = f"head, {num:,} targets of {options.vocab:,}"
    exact = partial(in_fp32, arms["all logits"])
    return {"what": what, "arms": compare(arms, exact, [hidden, weight], options)}


def measure_all(options: argparse.Namespace) -> Iterator[Found]:
    yield measure_head(options)
    yield from measure_attention(options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--reading", action="store_true", help="attention on a CPU without gradients, nothing else")
    parser.add_argument("--threads", type=int, default=1, help="of --reading")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    started = time.monotonic()
    machine = describe_setup(options.device, threads=options.threads)
    out = options.out or result_path("kernels", machine["device"], options.threads)
    results: list[Found] = []
    for result in measure_reading(options) if options.reading else measure_all(options):
        results.append(result)
        shown = {key: value for key, value in vars(options).items() if key != "out"}
        document = make_document("kernels alone", machine, shown, time.monotonic() - started)
        save(out, document | {"results": results})  # what is measured stays where the rest takes too long
    print(f"written to {out}")


if __name__ == "__main__":
    main()
