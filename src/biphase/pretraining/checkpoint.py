"""A checkpoint on disk, whole or absent: a model folder, the optimizer's moments, and a manifest, which is written
last.

The model is a transformers folder, the moments are a safetensors file: nothing is ever unpickled. Both hold whole
tensors, so that a run resumes with any number of processes. Tensors that FSDP2 divides are gathered and written one at
a time: no process ever holds all weights or all moments, and each reads only its own part of the moments.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from biphase.distributed import World
from biphase.encoder.network import save_network
from biphase.encoder.packed import PackedModel
from biphase.errors import InputError, told_as
from biphase.files import hash_below, sync, whole_folder, write_hashed
from biphase.pretraining.optimizer import STATE_KEYS
from biphase.run import CheckpointManifest, Run

ADAPTER = "weight"
"""The name of an adapter's weight beside its moments. A run with LoRA resumes with it, because `model/` is merged."""


def save_checkpoint(
    run: Run,
    manifest: CheckpointManifest,
    model: PackedModel,
    optimizers: list[torch.optim.Optimizer],
    tokenizer: Any,
    world: World,
) -> None:
    """Write `steps/STEP`. Every process must call it; the first one writes.

    Raises:
        InputError: in all processes if the first one cannot write, for example to a full disk. The first one's error
            has the reason.
    """
    target = run.steps / str(manifest.step)
    weights = model.network.state_dict(keep_vars=True)  # here FSDP2 divides again what validation has left whole
    parted = {weight: name for name, weight in weights.items() if isinstance(weight, DTensor)}  # each tied weight once
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    moments: dict[str, Tensor] = {}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            moments |= {f"{names[parameter]}/{key}": tensor for key, tensor in state.items()}
            if names[parameter].removeprefix("network.") not in weights:  # an adapter, which the model has merged
                moments[f"{names[parameter]}/{ADAPTER}"] = parameter
    moments = dict(sorted(moments.items()))  # the same order in all processes
    # Whole tensors, one by one. All processes must take part in gathering a divided one.
    wholes = (value.full_tensor() if isinstance(value, DTensor) else value for value in (*parted, *moments.values()))
    told = told_as(f"cannot write {target}", "earlier checkpoints are kept, rerun to continue")
    with world.fail_together():
        try:
            if world.is_main:
                with told, whole_folder(target, is_lasting=True) as folder:  # older ones are removed after this
                    if run.metrics.exists():  # a run that goes on from here does not log the records before it again
                        sync(run.metrics)
                    whole = store_parted(weights, parted, folder / "parted", wholes)
                    save_network(model.network, folder / "model", state_dict=whole)
                    tokenizer.save_pretrained(folder / "model")
                    write_tensors(folder / "optimizer.safetensors", moments, wholes)
                    write_hashed(folder / "manifest.json", asdict(manifest) | {"files": hash_below(folder)})
        finally:
            for _ in wholes:  # every process takes part in gathering each, also when the first one cannot write
                pass


def store_parted(
    weights: dict[str, Tensor], parted: dict[DTensor, str], file: Path, wholes: Iterator[Tensor]
) -> dict[str, Tensor]:
    """Return all weights by name. The divided ones, if any, are memory-mapped from a file that is already deleted.

    So transformers writes them under its own names and in its own order, without holding them in memory.
    """
    write_tensors(file, {name: weight for weight, name in parted.items()}, wholes)
    stored = load_file(file)  # mapped, not held
    file.unlink()
    return {
        name: stored[parted[weight]] if isinstance(weight, DTensor) else weight.detach()
        for name, weight in weights.items()
    }


def write_tensors(path: Path, named: dict[str, Tensor], wholes: Iterator[Tensor]) -> None:
    """Write fp32 tensors to a safetensors file; `wholes` yields their whole values, one in memory at a time.

    The format: the header's length in 8 bytes; the header, JSON padded with spaces; then all numbers, row by row.
    """
    header = {}
    end = 0
    for name, tensor in named.items():
        begin = end
        end = begin + 4 * tensor.numel()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for whole in itertools.islice(wholes, len(named)):
            assert whole.dtype == torch.float32
            file.write(whole.detach().reshape(-1).cpu().numpy().data)


def load_optimizer(folder: Path, model: PackedModel, optimizers: list[torch.optim.Optimizer], world: World) -> None:
    """Load the moments of a checkpoint into optimizers that have not stepped yet, and adapters into their network. They
    are divided like their parameters.

    Every process must call it.
    """
    path = folder / "optimizer.safetensors"
    names = {parameter: name for name, parameter in model.named_parameters()}
    with world.fail_together(), told_as(f"{path} cannot be read"), safe_open(path, framework="pt") as stored:
        names_stored = set(stored.keys())
        for optimizer in optimizers:
            kind = type(optimizer)
            for parameter in itertools.chain(*(group["params"] for group in optimizer.param_groups)):
                keys = {key: f"{names[parameter]}/{key}" for key in STATE_KEYS[kind]}
                if not names_stored.issuperset(keys.values()):
                    lack = f"{folder} holds no {kind.__name__} state for '{names[parameter]}'"
                    raise InputError(f"{lack}; use init.carry_optimizer=false")
                optimizer.state[parameter] = {key: read_part(stored, name, parameter) for key, name in keys.items()}
                if (adapter := f"{names[parameter]}/{ADAPTER}") in names_stored:
                    parameter.data.copy_(read_part(stored, adapter, parameter))


def read_part(stored: Any, name: str, parameter: nn.Parameter) -> Tensor:
    """Read a tensor that an optimizer keeps for a parameter; if FSDP2 divides it, read this process's rows.

    FSDP2 gives each process ceil(rows / processes) rows, until none are left:

        7 rows, 4 processes → 0:2, 2:4, 4:6, 6:7
    """
    rows = stored.get_slice(name)
    if not rows.get_shape():  # the number of updates
        return stored.get_tensor(name).to(parameter.device)
    assert tuple(rows.get_shape()) == parameter.shape, name
    moment = torch.empty_like(parameter)
    if not isinstance(moment, DTensor):
        return moment.copy_(stored.get_tensor(name))
    local_rows = moment.to_local()
    begin = moment.device_mesh.get_local_rank() * -(-len(parameter) // moment.device_mesh.size())
    if len(local_rows):
        local_rows.copy_(rows[begin : begin + len(local_rows)])
    return moment
