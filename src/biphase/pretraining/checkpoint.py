"""A step on disk: model folder, optimizer moments, and a manifest that is written last. Whole or absent.

The model part is a transformers folder (safetensors), the moments a safetensors file: nothing is ever unpickled. Both
hold whole tensors, gathered from however many processes trained, so a run resumes at any world size. Only the first
process ever holds, or reads, all moments.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

from biphase.distributed import World
from biphase.encoder.packed import PackedModel
from biphase.errors import InputError, told_as
from biphase.files import content_hash, file_hash, read_hashed, whole_folder, write_hashed
from biphase.pretraining.optimizer import Muon
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
    data_history: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    """As `corpus.mixture.TextHistory`; empty in checkpoints of runs over one set that were written without it."""
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
    # The optimizers' state as PARAMETER/KEY → whole tensor, on the CPU of the first process.
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: Any = get_optimizer_state_dict(model, optimizers, options=options).get("state", {})
    moments = {f"{name}/{key}": tensor for name, entry in state.items() for key, tensor in entry.items()}
    failure: OSError | InputError | None = None
    if world.is_main:
        try:
            with whole_folder(target) as folder:
                model.network.save_pretrained(folder / "model", state_dict=weights)
                tokenizer.save_pretrained(folder / "model")
                save_file(moments, folder / "optimizer.safetensors")
                files = sorted(path for path in folder.rglob("*") if path.is_file())
                digests = {str(path.relative_to(folder)): file_hash(path) for path in files}
                write_hashed(folder / "manifest.json", asdict(manifest) | {"files": digests})
        except OSError as error:
            failure = error
        except SafetensorError as error:  # how safetensors reports a full disk
            failure = InputError(f"cannot write {target}: {error}; earlier checkpoints are kept, rerun to go on")
    world.raise_any(failure, f"{target} could not be written; the first process says why")


def whole_weights(network: nn.Module, is_main: bool) -> dict[str, Tensor]:
    """The weights of a network by name, whole, on the CPU of the first process; nothing in the others. A collective.

    Tied weights stay one tensor, so that they are gathered and written once.
    """
    named = network.state_dict(keep_vars=True)
    gathered: dict[int, Tensor] = {}
    for tensor in named.values():
        if id(tensor) not in gathered:
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            gathered[id(tensor)] = full.detach().cpu().contiguous() if is_main else full.new_empty(0)
    return {name: gathered[id(tensor)] for name, tensor in named.items()} if is_main else {}


def load_optimizer(folder: Path, model: PackedModel, optimizers: list[torch.optim.Optimizer], world: World) -> None:
    """Put the moments of a checkpoint into optimizers that have not stepped yet, sharded as their parameters are.

    The first process reads the file and hands each tensor to the others. Every process must call it.
    """
    path = folder / "optimizer.safetensors"
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups: list[dict[str, list[str]]] = []
    kinds: dict[str, type[torch.optim.Optimizer]] = {}  # the optimizer of each parameter
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            groups.append({"params": [names[id(parameter)] for parameter in group["params"]]})
            kinds.update(dict.fromkeys(groups[-1]["params"], type(optimizer)))
    moments: dict[str, dict[str, Tensor]] = {}
    failure: InputError | None = None
    if world.is_main:
        try:
            with told_as(f"{path} cannot be read"):
                stored = load_file(path)
            for key, tensor in stored.items():
                name, _, part = key.rpartition("/")
                moments.setdefault(name, {})[part] = tensor
            for name, kind in kinds.items():
                if set(moments.get(name, ())) != STATE_KEYS[kind]:
                    raise InputError(
                        f"{folder} holds no {kind.__name__} state for '{name}'; use init.carry_optimizer=false"
                    )
        except InputError as error:
            failure = error
    world.raise_any(failure, f"{path} cannot be taken over; the first process says why")
    state = {"state": moments, "param_groups": groups} if world.is_main else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=world.size > 1)
    set_optimizer_state_dict(model, optimizers, state, options=options)  # type: ignore[arg-type]


def read_checkpoint_manifest(folder: Path, *, check_files: bool = True) -> CheckpointManifest:
    """The manifest of a checkpoint, as it was written, and of files that are all there and unchanged; without
    `check_files`, nobody looks at these."""
    manifest = read_hashed(folder / "manifest.json", CheckpointManifest, "delete the folder and rerun")
    if not manifest.files:
        raise InputError(f"checkpoint {folder} is damaged: manifest.json lists no files; delete the folder and rerun")
    for name, digest in manifest.files.items() if check_files else ():
        if not (folder / name).is_file():
            raise InputError(f"checkpoint {folder} is damaged: {name} is missing; delete the folder and rerun")
        if file_hash(folder / name) != digest:
            raise InputError(f"checkpoint {folder} is damaged: {name} has changed or is cut short; delete and rerun")
    return manifest
