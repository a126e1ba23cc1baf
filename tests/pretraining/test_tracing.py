"""What a GPU needs and can be proved without one: compiled blocks are one graph in each direction, whatever the batch,
as a whole network with its loss would be, and an update waits for its device once.

Both are traced with the attention of CUDA (`varlen`) on fake tensors, which have shapes and no values, so that no
kernel has to run.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import loader_of
from transformers import EuroBertForMaskedLM, Gemma2Config, Gemma2ForCausalLM

import biphase.pretraining.loop as loop
from biphase.distributed import World
from biphase.encoder.attention import attend, lay_out
from biphase.encoder.buckets import bucket_attention, bucket_attention_backward
from biphase.encoder.lora import transformer_blocks
from biphase.encoder.network import TokenIds, make_model
from biphase.encoder.packed import PackedModel
from biphase.pretraining.objectives import make_microbatches
from biphase.recipe import Recipe

SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@pytest.mark.slow
@pytest.mark.minutes
@pytest.mark.parametrize(("compiled", "num_layers", "num_batches"), [("blocks", 2, 8), ("network and loss", 1, 3)])
def test_one_graph_per_direction_whatever_the_batch(compiled: str, num_layers: int, num_batches: int) -> None:
    """Blocks are what runs compile. The rest of a step, to the loss, has nothing that would break a graph, either; it
    goes through the targets in a loop, so that another number of them, and that alone, would be another graph."""
    graphs: Counter[str] = Counter()
    operations: set[str] = set()

    def count(gm: Any, inputs: Any) -> Any:
        def compile_one(kind: str) -> Callable[..., Any]:
            def compile_graph(graph: Any, _: Any) -> Any:
                graphs[kind] += 1
                operations.update(str(node.target) for node in graph.graph.nodes)
                return make_boxed_func(graph.forward)

            return compile_graph

        return aot_module_simplified(
            gm, inputs, fw_compiler=compile_one("forward"), bw_compiler=compile_one("backward")
        )

    torch._dynamo.reset()
    counters.clear()
    config: Any = make_model(
        "1m", SMALL | {"num_hidden_layers": num_layers}, TokenIds(384, 4, 0, 2, None), 512, 0
    ).config
    with FakeTensorMode() as mode:
        model = PackedModel(EuroBertForMaskedLM(config))
    for part in transformer_blocks(model) if compiled == "blocks" else [model]:
        part.compile(dynamic=True, backend=count)
    rng = np.random.default_rng(0)
    for number in range(num_batches):
        lengths = rng.integers(12, 300, size=rng.integers(3, 12))
        bounds_S1 = np.append(0, np.cumsum(lengths))
        layout = lay_out(bounds_S1, causal=number % 2 == 0, backend="varlen", pad_to_multiple_of=32)
        with mode, torch.autocast("cpu", torch.bfloat16):
            for name in ("bounds_S1", "bounds_F1", "sizes_3B", "plan_PS"):  # frozen for users, not for this
                real = getattr(layout, name)
                object.__setattr__(layout, name, torch.empty(real.shape, dtype=real.dtype))
            tokens_T = torch.empty(int(bounds_S1[-1]), dtype=torch.long)
            targets_N = torch.empty(50, dtype=torch.long)
            model(tokens_T, torch.empty_like(tokens_T), layout, targets_N, targets_N)[0].backward()
        if number == 1:  # both directions of looking have been seen
            after_two = dict(graphs)
    assert after_two == {"forward": 2, "backward": 2}, "one graph each way, causal and bidirectional"
    assert graphs == after_two, "a batch of another size was compiled anew"
    assert not counters["graph_break"]
    # Compiled scaled_dot_product_attention gave NaN from 65,536 tokens on (pytorch#171389): there is none to meet.
    assert any("varlen_attn" in each for each in operations)
    assert not any("scaled_dot_product" in each for each in operations)


OPAQUE = {each._name: each._init_fn for each in (bucket_attention, bucket_attention_backward)}


class CountedReads(TorchDispatchMode):
    """Counts operations that, on a GPU, wait for what it was given before: their result's shape, or a number that the
    CPU is to have, depends on values. It looks inside of our own operators."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in OPAQUE:
            with self:
                return OPAQUE[name](*args, **(kwargs or {}))
        waits = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.intersection(function.tags)
        if name in ("index", "index_put", "index_put_"):  # by numbers it does not wait, by flags it does
            waits = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        if waits:
            self.found[name] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("with_sinks", [True, False])
@pytest.mark.parametrize(("causal", "window"), [(True, 0), (False, 0), (False, 5)])
def test_no_layer_waits_for_its_device(causal: bool, window: int, with_sinks: bool, softcap: float) -> None:
    """The buckets too, which on a GPU compute what flash attention cannot, forward and backward."""
    layout = lay_out(np.array([0, 3, 40, 41]), causal=causal, pad_to_multiple_of=32)
    q, k, v = (torch.randn(64, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    sinks = torch.zeros(4, requires_grad=True) if with_sinks else None
    with CountedReads(found := Counter()):
        attend(q, k, v, layout, 0.3, window, softcap, sinks).sum().backward()
    assert not found
    with CountedReads(found):
        q[q > 0].sum().item()
    assert found == {"index": 1, "_local_scalar_dense": 1}, "the counter counts"


def test_batches_go_to_a_gpu_from_pinned_copies(
    tiny_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tensor, while the CPU goes on. Where the copy lies nobody else writes: `pin_memory` makes one each time."""
    pinned: list[torch.Tensor] = []
    sent: list[tuple[int, Any]] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    def send(tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
        assert device.type == "cuda" and non_blocking
        sent.append(next(number for number, each in enumerate(pinned) if each is tensor))
        return tensor

    job, batches = loader_of(tiny_recipe())
    plain = make_microbatches(job, batches, job.recipe.curriculum[0], 0)[0]
    on_gpu = replace(job, world=World(0, 1, torch.device("cuda")))
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", send)
    found = make_microbatches(on_gpu, batches, job.recipe.curriculum[0], 0)[0]
    assert sent[:7] == list(range(7)), "inputs, positions, targets, where they are, and three of the layout"
    for name in ("inputs_T", "positions_T", "target_positions_N", "targets_N"):
        assert torch.equal(getattr(found, name), getattr(plain, name))
    for name in ("bounds_S1", "bounds_F1", "plan_PS"):
        assert torch.equal(getattr(found.layout, name), getattr(plain.layout, name))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder with caps on its scores, a window in every other layer and half as many key-value heads."""
    sizes = SMALL | {"hidden_size": 32, "head_dim": 16, "num_key_value_heads": 1}
    folder = tmp_path_factory.mktemp("decoder") / "gemma2"
    torch.manual_seed(0)
    Gemma2ForCausalLM(Gemma2Config(vocab_size=384, sliding_window=16, **sizes)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("optimizer", "precision", "is_gemma"),
    [("adamw", "bf16", True), ("adamw", "fp32", False), ("muon", "bf16", False), ("muon", "fp32", True)],
)
def test_an_update_waits_for_its_device_once(
    optimizer: str,
    precision: str,
    is_gemma: bool,
    gemma: Path,
    tiny_recipe: Callable[..., Recipe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To read all numbers at a time, by `tolist`; neither layers, nor loss, nor clipping, nor the optimizer reads one
    itself, in several microbatches."""
    reads: list[Counter[str]] = []
    original, to_list = loop.update, torch.Tensor.tolist

    def update(*args: Any) -> Any:
        assert len(args[2]) > 1, "microbatches"
        reads.append(found := Counter())

        def counted(tensor: torch.Tensor) -> Any:
            found["tolist"] += tensor.is_floating_point()  # the sizes of buckets are integers, and on the CPU anyway
            return to_list(tensor)

        with monkeypatch.context() as patch, CountedReads(found):
            patch.setattr(torch.Tensor, "tolist", counted)
            return original(*args)

    monkeypatch.setattr(loop, "update", update)
    phases = "curriculum=[{objective: clm, steps: 2}, {objective: mlm, steps: 2}]"
    recipe = tiny_recipe(
        phases, "schedule.warmup_steps=0", "schedule.decay_steps=0", "validation.every_steps=0",
        f"optimizer.name={optimizer}", f"compute.precision={precision}", "compute.microbatch_tokens=128",
        *([f"init={{model: {gemma}}}"] if is_gemma else []),
    )  # fmt: skip
    loop.train(recipe, tmp_path)
    assert reads == [Counter(tolist=1)] * 4
