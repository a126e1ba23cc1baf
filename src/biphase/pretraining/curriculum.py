"""Which objective each step of a run has. A curriculum is a list of mixtures; a mixture gives each step one pure phase.

A mixture is a phase as the recipe writes it: one objective, or a masked one and CLM in turn (`clm_share`). A pure phase
has one objective.
"""

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from math import floor

from biphase.config import Phase


def mixture_ends(curriculum: Sequence[Phase]) -> list[int]:
    """The number of updates that are done when each mixture ends."""
    return list(accumulate(mixture.steps for mixture in curriculum))


def mixture_number(curriculum: Sequence[Phase], run_step: int) -> int:
    """Which mixture update `run_step` (from 0) belongs to."""
    return bisect_right(mixture_ends(curriculum), run_step)


def pure_phase(mixture: Phase, step: int) -> Phase:
    """The pure phase of update `step`, counted from 0 over all parents, so that branches of a trunk agree."""
    share = Fraction(str(mixture.clm_share))
    # CLM falls where the running count of its steps grows: a share of 0.4 gives the steps 2, 4, 7, 9, 12 ...
    is_clm = floor((step + 1) * share) > floor(step * share)
    return mixture.parts[1 if is_clm else 0][0]
