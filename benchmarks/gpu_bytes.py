"""What a training step on a GPU reads and writes, counted without a GPU: the blocks compiled one by one, as in runs,
and the whole backbone compiled as one graph.

    python benchmarks/gpu_bytes.py                                # 210m, 610m and 1b; six minutes of a core
    python benchmarks/gpu_bytes.py --presets 210m --layers 2 4    # one size, deeper

Needs g++. Fake tensors of a simulated GPU (`tests/simulated_gpu.py`) pass through dynamo, AOTAutograd and inductor's
scheduler for CUDA, up to the point where kernels would be written. Each kernel counts what it must read and write once
(inductor's own `get_read_write_buffer_accesses`). Blocks of one kind share a graph. The backbone's graph repeats, so a
layer of it is the difference between two depths.
"""

import argparse
import copy
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from measuring import HERE, Found, describe_setup, make_document, result_path, save, say

sys.path.insert(0, str(HERE.parent / "tests"))

H100 = SimpleNamespace(
    name="NVIDIA H100", total_memory=80 * 2**30, multi_processor_count=132, major=9, minor=0, warp_size=32,
    regs_per_multiprocessor=65_536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block=49_152, shared_memory_per_block_optin=232_448, L2_cache_size=50 * 2**20, gcnArchName="",
)  # fmt: skip
BANDWIDTH = 3.35e12
"""Bytes per second of an H100's memory, by NVIDIA's data sheet."""
REACHED = {"products": 0.70, "attention": 0.40, "bandwidth": 0.80}
"""The shares of the peaks that kernels are assumed to reach. They are assumptions, not measurements."""
VOCABULARY, TARGETS, UPDATE_TOKENS = 128_256, 0.4, 131_072
"""The vocabulary of Llama 3, the share of tokens with a loss, and the tokens of an update."""


class CountedError(Exception):
    """Ends inductor's work on a graph, whose kernels have been counted."""


class Scheduled:
    """A backend for torch.compile: inductor up to its kernels, whose bytes count at each call of the graph."""

    def __init__(self) -> None:
        self.graphs: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __call__(self, gm: Any, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(gm, inputs, inner_compile=self.schedule)

    def schedule(self, gm: Any, inputs: Any, **settings: Any) -> Any:
        from unittest.mock import patch

        from torch._functorch.aot_autograd import make_boxed_func
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.exc import InductorError
        from torch._inductor.graph import GraphLowering

        counted: Counter[str] = Counter()
        direction = "backward" if settings.get("is_backward") else "forward"

        def count(graph: Any) -> None:
            graph._update_scheduler()
            for node in graph.scheduler.nodes:
                counted[f"{direction}, {kind_of(node)}"] += node.get_read_write_buffers_sizes()
            raise CountedError

        plain = copy.deepcopy(gm)  # inductor changes what it is given
        try:
            with patch.object(GraphLowering, "compile_to_module", count):
                compile_fx_inner(gm, inputs, **settings)
        except InductorError as error:
            if not isinstance(error.inner_exception, CountedError):
                raise
        assert counted, "a graph that inductor has not scheduled"
        self.graphs[direction] += 1

        def run(*args: Any) -> Any:
            self.bytes.update(counted)
            return plain.forward(*args)

        return make_boxed_func(run)


def kind_of(node: Any) -> str:
    """`fused` for a kernel that inductor writes, else the library's product or attention."""
    if not node.is_extern():
        return "fused"
    return "attention" if "varlen_attn" in str(getattr(node.node, "op_overload", "")) else "products"


def simulate() -> None:
    """Load a simulated GPU that can be compiled for."""
    import simulated_gpu  # before torch asks whether there is a GPU
    import torch
    from torch._dynamo.device_interface import CudaInterface
    from torch._functorch import config as functorch_config
    from torch._inductor import config, scheduler

    assert simulated_gpu.REGISTERED

    def compile_module(module: Any, **settings: Any) -> None:  # the simulated GPU has replaced PyTorch's own
        module._compiled_call_impl = torch.compile(module._call_impl, **settings)

    inductor: Any = config
    patched: Any = scheduler
    module_class: Any = torch.nn.Module
    interface: Any = CudaInterface
    module_class.compile = compile_module
    interface.get_device_properties = staticmethod(lambda *_: H100)
    interface.current_device = staticmethod(lambda *_: 0)
    torch.cuda.get_device_properties = lambda *_: H100  # type: ignore[assignment]
    patched.has_triton = lambda: True  # nothing is written, so nothing is missing
    inductor.fx_graph_cache = inductor.joint_graph_constant_folding = False  # both need real storage
    functorch_config.enable_autograd_cache = False


BATCHES = ((0, 0, False), (-1, 0, True), (-2, -7, False), (-3, -1, True))
"""Samples more than asked for, tokens more in each, causal or not: the bytes are those of the first microbatch, and the
others show whether anything is compiled anew."""


def count_bytes(preset: str, region: str, layers: int, tokens: int, length: int, num_batches: int) -> Found:
    """Count bytes per token, graphs, graph breaks and processor time of a network with so many layers."""
    import numpy as np
    import torch
    from torch._dynamo.utils import counters
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import EuroBertForMaskedLM

    from biphase.encoder.attention import lay_out
    from biphase.encoder.lora import transformer_blocks
    from biphase.encoder.network import TokenIds, make_model
    from biphase.encoder.packed import PackedModel
    from biphase.presets import PRESETS

    torch._dynamo.reset()
    counters.clear()
    config: Any = make_model("1m", {}, TokenIds(384, 4, 0, 2, None), 2048, 0).config
    for name, value in (PRESETS[preset] | {"num_hidden_layers": layers}).items():
        setattr(config, name, value)
    config.head_dim = config.hidden_size // config.num_attention_heads
    scheduled, gpu = Scheduled(), torch.device("cuda", 0)
    with (mode := FakeTensorMode()), gpu:
        model = PackedModel(EuroBertForMaskedLM(config))
    for part in transformer_blocks(model) if region == "blocks" else [model.network.base_model]:
        part.compile(dynamic=True, backend=scheduled)
    first: Found = {}
    begin = time.process_time()
    for index, (samples, each, causal) in enumerate(BATCHES[:num_batches]):
        bounds_S1 = np.arange(tokens // length + samples + 1) * (length + each)
        layout = lay_out(bounds_S1, causal=causal, backend="varlen", pad_to_multiple_of=32)
        with mode, torch.autocast("cuda", torch.bfloat16):
            for name in ("bounds_S1", "bounds_F1", "sizes_3B", "plan_PS"):  # frozen for users, not for this
                real = getattr(layout, name)
                device = "cpu" if name == "sizes_3B" else gpu
                object.__setattr__(layout, name, torch.empty(real.shape, dtype=real.dtype, device=device))
            inputs_T = torch.empty(int(bounds_S1[-1]), dtype=torch.long, device=gpu)
            targets_N = torch.empty(64, dtype=torch.long, device=gpu)
            model(inputs_T, torch.empty_like(inputs_T), layout, targets_N, targets_N)[0].backward()
        if index == 0:
            first = {kind: total / tokens for kind, total in sorted(scheduled.bytes.items())}
            first = {"bytes_per_token": first, "cpu_seconds_of_one_direction": time.process_time() - begin}
    graph_breaks = sum(counters["graph_break"].values())
    return first | {"graphs": dict(scheduled.graphs), "graph_breaks": graph_breaks}


def compare(preset: str, depths: list[int], tokens: int, length: int) -> Found:
    """Count both regions, and give the bytes of a layer of each, in total and for each unit of the width."""
    from biphase.presets import PRESETS

    width, num_layers = PRESETS[preset]["hidden_size"], PRESETS[preset]["num_hidden_layers"]
    arms: dict[str, Found] = {}
    few, many = depths
    for region, between in (("blocks", many), ("backbone", many - few)):  # all blocks share a graph
        counted = {many: count_bytes(preset, region, many, tokens, length, len(BATCHES))}
        shallow: Found = {"bytes_per_token": {}, "cpu_seconds_of_one_direction": 0.0}
        if between < many:
            shallow = counted[few] = count_bytes(preset, region, few, tokens, length, 1)
        layer = {
            kind: (total - shallow["bytes_per_token"].get(kind, 0.0)) / between
            for kind, total in counted[many]["bytes_per_token"].items()
        }
        fused = sum(value for kind, value in layer.items() if kind.endswith("fused"))
        seconds = counted[many]["cpu_seconds_of_one_direction"]
        more = (seconds - shallow["cpu_seconds_of_one_direction"]) / between if region == "backbone" else 0.0
        arms[region] = {
            "layer_bytes_per_token": layer,
            "layer_fused_bytes_per_token_and_width": fused / width,
            "layer_all_bytes_per_token_and_width": sum(layer.values()) / width,
            "compile_cpu_seconds": seconds + more * (num_layers - many),
            "estimate": estimate(preset, fused, tokens, length),
            "depths": {str(depth): found for depth, found in counted.items()},
        }
        say(f"{preset}, {region}: {fused / width:.1f} bytes per token, layer and unit of width in fused kernels")
    return {"what": preset, "residual": "fp32", "arms": arms}


def estimate(preset: str, layer_fused: float, tokens: int, length: int) -> Found:
    """Estimate the microseconds per token, and the MFU, on an H100 from FLOPs and bytes: nothing overlaps."""
    from biphase.flops import CHUNK_LOGITS, PEAK_FLOPS
    from biphase.presets import PRESETS

    size = PRESETS[preset]
    width, num_layers, heads = size["hidden_size"], size["num_hidden_layers"], size["num_attention_heads"]
    kv_width = width * size["num_key_value_heads"] // heads
    weights = num_layers * (2 * width * (width + kv_width) + 3 * width * size["intermediate_size"])
    head = VOCABULARY * width
    products, attention = 6 * weights + 6 * head * TARGETS, 12 * num_layers * width * length
    chunks = TARGETS * VOCABULARY / CHUNK_LOGITS["cuda"]  # of each token
    moved = {
        "blocks": num_layers * layer_fused,
        # Compiled, the loss reads logits three times and writes them once. Each chunk adds to a gradient in fp32.
        "loss": TARGETS * VOCABULARY * 2 * 4 + chunks * head * (2 + 4 + 4),
        "accumulated gradients": 12 * (weights + 2 * head) / tokens,
        # Clipping reads gradients twice and writes them once; AdamW reads four numbers in fp32 and writes three.
        "update": (12 + 28) * (weights + 2 * head) / UPDATE_TOKENS,
    }
    peak = PEAK_FLOPS["H100"]
    parts = {
        "products": products / peak / REACHED["products"],
        "attention": attention * 7 / 6 / peak / REACHED["attention"],  # flash attention recomputes the scores
        **{what: each / BANDWIDTH / REACHED["bandwidth"] for what, each in moved.items()},
    }
    seconds = sum(parts.values())
    microseconds = {what: 1e6 * each for what, each in parts.items()}
    return {"microseconds_per_token": microseconds, "mfu": (products + attention) / peak / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["210m", "610m", "1b"])
    parser.add_argument("--layers", nargs=2, type=int, default=[1, 2], metavar=("FEW", "MANY"))
    parser.add_argument("--tokens", type=int, default=32_768, help="of a forward pass")
    parser.add_argument("--length", type=int, default=512, help="of a sample")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    simulate()
    machine, started = describe_setup("cpu", 1), time.monotonic()
    results = [compare(preset, options.layers, options.tokens, options.length) for preset in options.presets]
    shown = {key: value for key, value in vars(options).items() if key != "out"}
    document = make_document("bytes of a GPU's step", machine, shown, time.monotonic() - started)
    save(options.out or result_path("gpu-bytes", "simulated", 1), document | {"results": results})
    print("| preset | region | fused | all | graphs | breaks | compiling, CPU s | MFU, estimated |")
    print("|---|---|--:|--:|--:|--:|--:|--:|")
    for result in results:
        for region, arm in result["arms"].items():
            deep = arm["depths"][str(options.layers[1])]
            fused, total = (arm[f"layer_{what}_bytes_per_token_and_width"] for what in ("fused", "all"))
            graphs, breaks = sum(deep["graphs"].values()), deep["graph_breaks"]
            cost, mfu = arm["compile_cpu_seconds"], arm["estimate"]["mfu"]
            row = f"{fused:.1f} | {total:.1f} | {graphs} | {breaks} | {cost:.0f} | {mfu:.1%}"
            print(f"| {result['what']} | {region} | {row} |")


if __name__ == "__main__":
    main()
