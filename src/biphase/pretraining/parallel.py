"""One network made ready for its processes: activation checkpointing → compile → DDP or FSDP2, in that order."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from biphase.device import missing_for_compile
from biphase.distributed import World
from biphase.encoder.load import describe_network, empty_network
from biphase.encoder.packed import PackedModel
from biphase.errors import InputError
from biphase.recipe import ComputeConfig

COMPILE_PAYS_AFTER_FLOPS = 3e14
"""On a CPU, compiling takes up to a minute and saves time in bf16; in fp32 the products are all that counts."""

MOST_GRAPHS = 64
"""Gemma 3, whose layers are of two kinds, comes to 8 with both directions and validation."""


def parallelize(
    model: nn.Module, compute: ComputeConfig, dtype: torch.dtype, world: World, *, work: float
) -> nn.Module:
    """`model` (a PackedModel) on its device, wrapped as `compute` says; parameters stay fp32. One on the meta device
    stays there, for `fill_parts`.

    `work` is the number of FLOPs of the whole run, resumed or not, so that the choice to compile never changes midway.
    """
    if not next(model.parameters()).is_meta:
        model.to(world.device)
    blocks = transformer_blocks(model)
    if compute.activation_checkpointing:
        checkpoint_activations(model.network)
    if decide_compile(compute, world.device, dtype, work)[0]:
        compile_blocks(blocks)
    if world.size == 1:
        return model
    if compute.parallel == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    mesh = world.mesh()
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if dtype != torch.float32 else None, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype))
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def compile_blocks(blocks: list[nn.Module]) -> None:
    """Compile each block when it is first called. All share a code object, of which dynamo keeps a graph for each kind
    of layer, direction, and with or without gradients: at its limit the rest would run uncompiled."""
    torch._dynamo.reset()  # else graphs of networks that this process trained before count too
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, MOST_GRAPHS)
    for block in blocks:
        block.compile(dynamic=True)


def outline_network(
    load: Callable[[], PreTrainedModel], world: World
) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """A network without values, to be wrapped in parts, and in the first process what `load` gives beside it.

    The first process alone has it whole, once and not on its device: there it is drawn, or read and proved, as by one
    process. Every process must call it.
    """
    whole = world.first(load, "the network could not be made; the first process says why")
    described = world.share("" if whole is None else describe_network(whole))
    network = empty_network(described, None if whole is None else whole.config)
    if whole is not None and whole.can_generate():
        network.generation_config = whole.generation_config
    return network, whole


def fill_parts(model: nn.Module, whole: PreTrainedModel | None, world: World) -> None:
    """Give a wrapped outline its values, a tensor at a time: beside it, each process keeps its own part alone.

    Every process must call it.
    """
    model.to_empty(device=world.device)
    packed: Any = model
    packed.network.tie_weights()  # they were emptied one by one
    values = {} if whole is None else PackedModel(whole).state_dict()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, values, options=options)
    buffers = {} if whole is None else dict(whole.named_buffers())
    for name, buffer in packed.network.named_buffers():  # those of positions are in no state_dict
        if world.is_main:
            buffer.copy_(buffers[name])
        world.fill(buffer)


def checkpoint_activations(network: Any) -> None:
    """Recompute each block in the backward pass. Raises `InputError` for a network that cannot."""
    old_name = network.gradient_checkpointing_enable  # all that transformers 5.17 has
    enable = getattr(network, "activation_checkpointing_enable", old_name)
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise InputError(
            f"compute.activation_checkpointing: {error}; use compute.activation_checkpointing=false"
        ) from None


def decide_compile(compute: ComputeConfig, device: torch.device, dtype: torch.dtype, work: float) -> tuple[bool, str]:
    """Whether the blocks are compiled in a run of `work` FLOPs on this device, and that with the reason in words."""
    missing = "" if compute.compile == "off" else missing_for_compile(device)
    if compute.compile == "on" and missing:
        raise InputError(f"compute.compile is on, but {missing} or use compute.compile=off")
    is_long = work > COMPILE_PAYS_AFTER_FLOPS
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


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated layers of a transformers model: its longest module list, of layers that say that they are some where
    there are any."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    layers = [members for members in lists if all(isinstance(each, GradientCheckpointingLayer) for each in members)]
    return max(layers or lists, key=len)


def unwrap(model: nn.Module) -> Any:
    """The `PackedModel` inside."""
    return model.module if isinstance(model, DistributedDataParallel) else model


@contextmanager
def gradient_sync(model: nn.Module, *, now: bool) -> Iterator[None]:
    """Gradients of all microbatches but the last stay on their process."""
    if isinstance(model, DistributedDataParallel) and not now:
        with model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
    yield


def autocast(device: torch.device, dtype: torch.dtype) -> Any:
    """A context in which products are formed in `dtype`."""
    return torch.autocast(device.type, dtype) if dtype != torch.float32 else nullcontext()
