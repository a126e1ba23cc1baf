"""A step on disk: model folder, optimizer moments, and a manifest that is written last. Whole or absent.

The model part is a transformers folder (safetensors), the moments a safetensors file: nothing is ever unpickled. Both
hold whole tensors, gathered from however many processes trained, so a run resumes at any world size.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from biphase.distributed import World
from biphase.encoder.packed import PackedModel
from biphase.errors import InputError
from biphase.files import content_hash, file_hash, read_json_as, whole_folder, write_json
from biphase.pretraining.muon import Muon
from biphase.run import Run

STATE_KEYS = {torch.optim.AdamW: {"step", "exp_avg", "exp_avg_sq"}, Muon: {"momentum_buffer"}}
"""What each optimizer keeps for a parameter."""


@dataclass(frozen=True)
class CheckpointManifest:
    """What a checkpoint is and where it comes from."""

    step: int
    """Updates since random weights (or since the foreign model), over all parents."""
    run_step: int
    """Updates in this run, as its metrics.jsonl counts them."""
    tokens_seen: int
    data_position: int
    """Tokens of the data order that are behind: where the next batch begins."""
    data_fingerprint: str
    tokenizer_hash: str
    objective: str
    is_decayed: bool
    """Whether the learning rate has begun to fall: a branch from here does not join at full rate."""
    parent: str | None
    """Content hash of the checkpoint or model that the run started from."""
    carried: list[str]
    """What was taken over from it: weights, optimizer, data position."""
    files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each file."""

    @property
    def content(self) -> str:
        """Names the weights: two checkpoints with one content hash hold the same model."""
        return content_hash({name: digest for name, digest in self.files.items() if name.startswith("model/")})


def save_checkpoint(
    run: Run,
    manifest: CheckpointManifest,
    model: PackedModel,
    optimizers: list[torch.optim.Optimizer],
    tokenizer: Any,
    world: World,
) -> None:
    """Write `steps/STEP`. Every process must call it; the first one writes, and where it cannot, all of them raise.

    Raises:
        OSError, InputError: in the first process, such as on a full disk; `InputError` in the others.
    """
    target = run.steps / str(manifest.step)
    weights = whole_weights(model.network, world.is_main)
    moments = optimizer_tensors(model, optimizers, world.is_main)
    failure: OSError | InputError | None = None
    if world.is_main:
        try:
            with whole_folder(target) as folder:
                model.network.save_pretrained(folder / "model", state_dict=weights)
                tokenizer.save_pretrained(folder / "model")
                save_file(moments, folder / "optimizer.safetensors")
                files = sorted(path for path in folder.rglob("*") if path.is_file())
                digests = {str(path.relative_to(folder)): file_hash(path) for path in files}
                write_json(folder / "manifest.json", asdict(manifest) | {"files": digests})
        except OSError as error:
            failure = error
        except SafetensorError as error:  # how safetensors reports a full disk
            failure = InputError(f"cannot write {target}: {error}; earlier checkpoints are kept, rerun to go on")
    world.raise_any(failure, f"{target} could not be written; the first process says why")


def whole_weights(network: nn.Module, keep: bool) -> dict[str, Tensor]:
    """The state of a network by name. Tied weights stay one tensor, so that they are gathered and written once."""
    named = network.state_dict(keep_vars=True)
    gathered = {id(tensor): whole(tensor, keep) for tensor in {id(t): t for t in named.values()}.values()}
    return {name: gathered[id(tensor)] for name, tensor in named.items()}


def optimizer_tensors(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], keep: bool = True
) -> dict[str, Tensor]:
    """The state of every parameter as `NAME/KEY` → whole tensor on the CPU."""
    tensors = {}
    for name, parameter in model.named_parameters():
        for optimizer in optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"{name}/{key}"] = whole(value, keep)
    return tensors


def whole(tensor: Tensor, keep: bool) -> Tensor:
    """The gathered tensor, on the CPU of the process that keeps it. A collective."""
    gathered = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return gathered.detach().cpu().contiguous() if keep else gathered.detach()


def load_optimizer(folder: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Put the moments of a checkpoint into optimizers that have not stepped yet, sharded as their parameters are."""
    try:
        tensors = load_file(folder / "optimizer.safetensors")
    except (OSError, SafetensorError) as error:
        raise InputError(f"{folder / 'optimizer.safetensors'} cannot be read: {error}") from None
    states: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, part = key.rpartition("/")
        states.setdefault(name, {})[part] = tensor
    for name, parameter in model.named_parameters():
        owner = next(o for o in optimizers if any(p is parameter for g in o.param_groups for p in g["params"]))
        if set(states.get(name, ())) != STATE_KEYS[type(owner)]:
            kind = type(owner).__name__
            raise InputError(f"{folder} holds no {kind} state for '{name}'; use init.carry_optimizer=false")
        for part, tensor in states[name].items():
            owner.state[parameter][part] = placed_like(tensor, parameter)


def placed_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    if tensor.ndim == 0:
        return tensor.to(parameter.device)
    if isinstance(parameter, DTensor):
        return distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements)
    return tensor.to(parameter.device)


def read_manifest(folder: Path) -> CheckpointManifest:
    """The manifest of a checkpoint whose files are all there and unchanged."""
    manifest = read_json_as(folder / "manifest.json", CheckpointManifest)
    if not manifest.files:
        raise InputError(f"checkpoint {folder} is damaged: manifest.json lists no files; delete the folder and rerun")
    for name, digest in manifest.files.items():
        if not (folder / name).is_file():
            raise InputError(f"checkpoint {folder} is damaged: {name} is missing; delete the folder and rerun")
        if file_hash(folder / name) != digest:
            raise InputError(f"checkpoint {folder} is damaged: {name} has changed or is cut short; delete and rerun")
    return manifest
