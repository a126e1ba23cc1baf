"""Decision accuracy with a known answer: each seed decides, the other seeds say what is true."""

import runpy
from pathlib import Path

import numpy as np
import pytest

judge_decisions = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "decision_accuracy.py"))["judge_decisions"]


def test_each_seed_decides_and_the_others_judge() -> None:
    """By seed 0 the third of three curricula is best, by the others the second: 1 of its 3 pairs is in their order, and
    its choice is 4 points behind. Seed 1 is judged by a mean in which seed 0 is one of two."""
    small = np.array([[1.0, 1.0, 1.0], [2.0, 3.0, 3.0], [3.0, 2.0, 2.0]])
    large = np.array([[50.0, 51.0, 51.0], [54.0, 54.0, 54.0], [70.0, 50.0, 50.0]])
    judged = judge_decisions(small, large)
    assert judged["chosen"] == [2, 1, 1]
    # The truth of seed 0: 51, 54, 50. Of the two others: 50.5, 54, 60.
    assert judged["by_seed"] == pytest.approx([1 / 3, 2 / 3, 2 / 3]) and judged["accuracy"] == pytest.approx(5 / 9)
    assert judged["loss"] == pytest.approx((4 + 6 + 6) / 3)
