"""What stays the same throughout one cell: its task, its configuration, where and in which types it computes."""

from dataclasses import dataclass

import torch

from biphase.encoder.attention import Backend, choose_backend
from biphase.finetuning.config import FinetuneConfig
from biphase.tasks.spec import Task


@dataclass(frozen=True)
class Runtime:
    device: torch.device
    dtype: torch.dtype
    """Of the arithmetic; autocast from the type of the weights."""
    microbatch_tokens: int

    @property
    def backend(self) -> Backend:
        return choose_backend(self.device, self.dtype)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)


@dataclass(frozen=True)
class CellContext:
    task: Task
    config: FinetuneConfig
    compute: Runtime
