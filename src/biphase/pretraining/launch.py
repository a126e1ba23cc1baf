"""`biphase pretrain` in several processes, as a program: torchrun that ends as its processes did.

torchrun's own exit code is 1 whatever happened; whoever started it must tell a run that another process is at (75) from
one that cannot be trained.
"""

import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def run_torchrun() -> None:
    """torchrun with these arguments. Exits with the code of the process that failed first."""
    try:
        torchrun()
    except ChildFailedError as error:
        sys.exit(error.get_first_failure()[1].exitcode)


if __name__ == "__main__":
    run_torchrun()
