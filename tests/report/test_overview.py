"""What a report says first, held against models that are known to be equally good."""

import numpy as np
from scipy import stats

from biphase.report.averages import with_averages
from biphase.report.overview import answer_sentences, list_means
from biphase.report.results import ReportArm, measured

CONTROL = ReportArm("1m-random", "control", "1m", "none", None, 0, 0, 0)


def test_the_best_of_many_is_not_ahead_for_having_been_chosen() -> None:
    """Twelve arms as good as each other and as the control: the best of them is said to be ahead of another, or of the
    control, in 5 % of studies at most. Not corrected, it is ahead of the control in three times as many."""
    rng = np.random.default_rng(0)
    clm = [ReportArm(f"clm-{at}", "objective", "1m", "clm", None, 100, 100, 0) for at in range(6)]
    mlm = [ReportArm(f"mlm-{at}", "objective", "1m", "mlm", 40, 100, 0, 100) for at in range(6)]
    hits = np.zeros(2)
    for _ in range(250):
        arms = (*clm, *mlm, CONTROL)
        scores = [measured(arm, "SC", "a", "standard", rng.normal(0.7, 0.02, 5).tolist()) for arm in arms]
        results = with_averages(scores)
        told = list(answer_sentences(results, list_means(results)))
        assert len(told) == 2 and "corrected for choosing the best of 12" in told[1]
        hits += ["is ahead of" in sentence for sentence in told]
    assert (hits <= stats.binom.isf(1e-3, 250, 0.05)).all()
