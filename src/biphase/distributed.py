"""The other processes of a run, as torchrun sets them up. The only module that names process groups.

`python -m biphase.distributed` is torchrun that ends as its processes did: torchrun's own exit code is 1 whatever
happened, and whoever started it must tell a run that another process is at (75) from one that cannot be trained.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from biphase.console import err, silence
from biphase.device import choose_device
from biphase.errors import InputError


@dataclass(frozen=True)
class World:
    """This process among all: `rank` of `size`, and the device it computes on."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Each value summed over all processes, in double precision. A collective: every process must call it."""
        if self.size == 1:
            return [float(value) for value in values]
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process. A collective."""
        return flag if self.size == 1 else self.sum(float(flag))[0] > 0

    def raise_any(self, failure: Exception | None, elsewhere: str) -> None:
        """Where one process failed, all end: it with its own failure, the others with `InputError(elsewhere)`.

        A collective.
        """
        if self.any(failure is not None):
            raise failure or InputError(elsewhere)

    def tell(self, line: str) -> None:
        """A line for the person who watches, from one process."""
        if self.is_main:
            err.print(line, markup=False)

    def barrier(self) -> None:
        self.sum(0.0)

    def mesh(self) -> DeviceMesh:
        return init_device_mesh(self.device.type, (self.size,))


@contextmanager
def join_world(device: str) -> Iterator[World]:
    """The processes that torchrun started (its environment variables tell), or this one alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    chosen = choose_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    if size == 1:
        yield World(0, 1, chosen)
        return
    dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    if dist.get_rank() > 0:
        silence()
    try:
        yield World(dist.get_rank(), size, chosen)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun()
    except ChildFailedError as failed:
        sys.exit(failed.get_first_failure()[1].exitcode)
