"""A network prepared for its processes (activation checkpointing → compile → DDP or FSDP2), and its optimizers: AdamW
with the paper's settings, or Muon for the matrices inside the blocks; and the speed of their updates on a CPU.

Muon (Jordan et al. 2024) orthogonalises momentum. PyTorch's Muon always does so in bf16, which a CPU without bf16 units
emulates at a hundredth of its speed. This one takes the type as an argument, and updates all matrices of one shape in
one batched product.
"""

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from biphase.device import choose_dtype, missing_for_compile
from biphase.distributed import World
from biphase.encoder.attention import lay_out
from biphase.encoder.lora import transformer_blocks
from biphase.encoder.network import TokenIds, make_model
from biphase.encoder.packed import PackedModel, count_flops
from biphase.errors import InputError
from biphase.recipe import MATRIX_UPDATES, ComputeConfig, Optimizer
from biphase.schedule import Schedule

COMPILE_PAYS_AFTER = 150.0
"""The seconds without compiling from which compiling pays on a CPU in bf16: it takes 15 to 50 s of a core, 5 to 10 s
with PyTorch's cache, and makes a step up to 1.4 times as fast. In fp32 the products take almost all of a step."""

UNCOMPILED_SPEED = 2e11
"""The FLOP/s of a thread with bf16 units without compiling, on processors with AVX-512 and with AMX. Nothing is
measured, so a run that resumes chooses as it did before."""

MOST_GRAPHS = 64
"""The most compiled graphs of a block. Gemma 3 needs 8: two kinds of layers, both directions, training and
validation."""


def parallelize(model: PackedModel, compute: ComputeConfig, world: World, *, compiles: bool) -> nn.Module:
    """Move a model to its device and wrap it as `compute` says; parameters stay fp32.

    A model on the meta device stays there, for `fill_parts`.
    """
    if not next(model.parameters()).is_meta:
        model.to(world.device)
    blocks = transformer_blocks(model)
    if compute.activation_checkpointing:  # recompute each block in the backward pass
        network: Any = model.network
        old_name = network.gradient_checkpointing_enable  # transformers 5.17 has only this name
        enable = getattr(network, "activation_checkpointing_enable", old_name)
        try:
            enable({"use_reentrant": False})
        except ValueError as error:
            remedy = "use compute.activation_checkpointing=false"
            raise InputError(f"compute.activation_checkpointing: {error}; {remedy}") from None
    if compiles:
        # All blocks share one code object, and dynamo compiles a graph of it for each kind of layer, each direction,
        # with and without gradients. Beyond its limit blocks would run uncompiled, and earlier networks count too.
        torch._dynamo.reset()
        config: Any = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, MOST_GRAPHS)
        for block in blocks:
            block.compile(dynamic=True)
        model.compiles_loss = True
    if world.size == 1:
        return model
    if compute.parallel == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    mesh, param_dtype = world.mesh(), None if world.dtype == torch.float32 else world.dtype
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype=torch.float32, output_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype))
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def outline_network(
    load: Callable[[], PreTrainedModel], world: World
) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """Make a network without values, to be divided among processes. Every process must call it.

    Only the first process calls `load`, which draws or reads the network, and proves it. That process gets the whole
    network back beside the outline, so that it is in memory only once, and not on a device.
    """
    whole = None
    with world.fail_together():
        if world.is_main:
            whole = load()
    outline: Any = None
    if whole is not None:
        # deepcopy looks into this dictionary for the copies that it has already made. There it finds an empty tensor
        # for each.
        shapes: dict[int, Tensor] = {id(buffer): buffer.to("meta") for buffer in whole.buffers()}
        for weight in whole.parameters():
            shapes[id(weight)] = nn.Parameter(weight.to("meta"), weight.requires_grad)
        outline = copy.deepcopy(whole, shapes)
    return world.broadcast(outline), whole


def fill_parts(model: nn.Module, whole: PreTrainedModel | None, world: World) -> None:
    """Give a wrapped outline its values, one tensor at a time; each process keeps its own part.

    Every process must call it.
    """
    model.to_empty(device=world.device)
    packed: Any = model
    packed.network.tie_weights()  # `to_empty` has untied them
    values = {} if whole is None else PackedModel(whole).state_dict()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, values, options=options)
    buffers = {} if whole is None else dict(whole.named_buffers())
    for name, buffer in packed.network.named_buffers():  # buffers of positions are in no state_dict
        if world.is_main:
            buffer.copy_(buffers[name])
        world.broadcast_into(buffer)


def decide_compile(compute: ComputeConfig, device: torch.device, dtype: torch.dtype, work: float) -> tuple[bool, str]:
    """Decide whether the blocks are compiled in a run of `work` FLOPs on this device, and give the reason in words.

    `work` counts the whole run, even if it was resumed, so that the choice never changes midway.
    """
    missing = "" if compute.compile == "off" else missing_for_compile(device)
    if compute.compile == "on" and missing:
        raise InputError(f"compute.compile is on, but {missing} or use compute.compile=off")
    is_long = work > COMPILE_PAYS_AFTER * UNCOMPILED_SPEED * torch.get_num_threads()
    if compute.compile != "auto":
        compiles, reason = compute.compile == "on", "compute.compile"
    elif device.type == "cpu" and dtype != torch.bfloat16:
        compiles, reason = False, "fp32 on a CPU: it would save next to nothing"
    elif missing:
        compiles, reason = False, missing
    elif device.type == "cpu":
        compiles, reason = is_long, f"bf16 on a CPU, {'a long' if is_long else 'too short a'} run"
    else:
        compiles, reason = True, "CUDA"
    return compiles, f"{'compiled' if compiles else 'not compiled'} ({reason})"


def unwrap(model: nn.Module) -> Any:
    """Return the `PackedModel` inside."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def autocast(device: torch.device, dtype: torch.dtype) -> Any:
    """Open a context in which products are formed in `dtype`."""
    return torch.autocast(device.type, dtype) if dtype != torch.float32 else nullcontext()


QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients that pull singular values into about 0.7..1.2 in five iterations."""


def make_optimizers(
    settings: Optimizer, model: nn.Module, *, dtype: torch.dtype = torch.float32, sharded: bool = False
) -> list[torch.optim.Optimizer]:
    """Make the optimizers of all trainable parameters, each parameter in exactly one.

    `dtype` is the type of the arithmetic. Every group has an `lr_scale`: its rate as a multiple of the schedule's.
    """
    everything = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = block_matrices(model) if settings.name == "muon" else []
    in_muon = {id(parameter) for parameter in matrices}
    rest = [parameter for parameter in everything if id(parameter) not in in_muon]
    assert len(rest) + len(matrices) == len(everything)
    adamw = torch.optim.AdamW(
        [{"params": rest, "lr_scale": 1.0}],
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    if not matrices:
        return [adamw]
    if sharded:
        raise InputError("optimizer.name muon needs whole matrices; use compute.parallel=ddp or optimizer.name=adamw")
    groups = [{"params": matrices, "lr_scale": settings.muon_lr_scale}]
    decay = settings.weight_decay if settings.muon_weight_decay is None else settings.muon_weight_decay
    return [adamw, Muon(groups, weight_decay=decay, dtype=dtype)]


def block_matrices(model: nn.Module) -> list[nn.Parameter]:
    """List the matrices of the repeated layers, which include no embedding and no output layer."""
    parameters = [parameter for block in transformer_blocks(model) for parameter in block.parameters()]
    return [parameter for parameter in parameters if parameter.ndim == 2 and parameter.requires_grad]


def set_rate(optimizers: list[torch.optim.Optimizer], schedule: Schedule, step: int, num_steps: int) -> float:
    """Set the rate of update `step` in every group, times the group's scale, and return the schedule's rate."""
    rate = schedule.peak_lr * schedule.share_of_peak(step, num_steps)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"]
    return rate


class Muon(torch.optim.Optimizer):
    """Muon with decoupled weight decay, whose updates have AdamW's root mean square (Liu et al. 2025), so rates carry
    over."""

    def __init__(
        self, params: Iterable[Any], *, momentum: float = 0.95, weight_decay: float = 0.1, dtype: torch.dtype
    ) -> None:
        super().__init__(params, {"lr": 1e-3, "momentum": momentum, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for parameters in by_shape.values():
                self.step_together(parameters, group)

    def step_together(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Update matrices of one shape. Its temporary tensors are freed before the next shape (`flops.plan_memory`)."""
        updates = orthogonalize(torch.stack([self.nesterov(p, group["momentum"]) for p in parameters]), self.dtype)
        scale = 0.2 * max(parameters[0].shape) ** 0.5
        for parameter, update in zip(parameters, updates, strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(update.to(parameter.dtype), alpha=-group["lr"] * scale)

    def nesterov(self, parameter: Tensor, momentum: float) -> Tensor:
        """Return the gradient with Nesterov momentum."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(state["momentum_buffer"], momentum)


STATE_KEYS = {
    torch.optim.AdamW: {"step", *MATRIX_UPDATES["adamw"].moments},
    Muon: {*MATRIX_UPDATES["muon"].moments},
}
"""The names of the tensors that each optimizer keeps for a parameter."""


def orthogonalize(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Give matrices [n, A, B] singular values near 1 and leave their singular vectors, by Newton–Schulz iteration."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if tall else matrices).to(dtype)
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = QUINTIC
    for _ in range(MATRIX_UPDATES["muon"].iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def measure_updates(preset: str, seconds: float) -> tuple[float, int, float]:
    """Update a small network on the CPU for some seconds. Return the FLOP/s, the threads, and the seconds taken."""
    device, vocab_size = torch.device("cpu"), 8192
    dtype = choose_dtype("auto", device)
    model = PackedModel(make_model(preset, {}, TokenIds(vocab_size, 0, 1, 2, None), 256, seed=0))
    optimizers = make_optimizers(Optimizer(), model)
    # Four samples of 256 random tokens; every third token is a target.
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
    flops = count_flops(model.network).batch(np.diff(bounds_S1), len(targets_N), causal=False)
    speed = float(flops / median(durations[1:]))  # the first update does not count, because it takes longer
    return speed, torch.get_num_threads(), sum(durations)
