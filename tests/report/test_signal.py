"""How far a task tells models apart, where the answer is known, and what would decide a difference."""

from typing import Any

import numpy as np
import pytest
from scipy import stats

from biphase.finetuning.predictions import ExampleTable
from biphase.report.contrasts import Contrast
from biphase.report.results import ReportArm, Result, ResultSet, measured
from biphase.report.signal import is_enough, measure_signal, what_decides
from biphase.report.tables import make_tables, show_signal, to_latex, to_markdown


def model(name: str, values: list[float], **more: Any) -> Result:
    arm = ReportArm(name, "other", "1m", "mlm", 40, 100, 0, 100)
    return measured(arm, "SC", str(more.pop("dataset", "a")), "standard", values, **more)


def test_signal_of_known_noise() -> None:
    """Four models 0.1 apart, five seeds of noise 0.02: spread 0.129, standard error 0.02/√5, a ratio of about 14."""
    rng = np.random.default_rng(0)
    known = measure_signal([model(str(at), rng.normal(0.5 + 0.1 * at, 0.02, 5).tolist()) for at in range(4)])
    assert known and known.needs == ""
    assert known.noise == pytest.approx(0.02 / 5**0.5, rel=0.4) and known.spread == pytest.approx(0.129, rel=0.15)
    ratios, decided = [], 0
    for _ in range(60):
        equal = measure_signal([model(str(at), rng.normal(0.5, 0.02, 5).tolist()) for at in range(4)])
        assert equal is not None
        ratios.append(equal.ratio)
        decided += not equal.needs
    assert 0.7 < np.median(ratios) < 1.5 and decided <= 8
    # Of many models with few seeds, no pair may be told apart, corrected for all pairs; that they differ is plain.
    many = measure_signal([model(str(at), rng.normal(0.5 + 0.01 * at, 0.02, 3).tolist()) for at in range(18)])
    assert many and not many.needs
    assert measure_signal([model("one", [0.5, 0.6])]) is None
    assert measure_signal([model("x", [0.5]), model("y", [0.6])]) is None, "one seed knows no noise"


def test_what_decides_has_the_power_it_promises() -> None:
    """Seeds where they suffice; examples where these are what is lacking; both where neither alone is enough."""
    seeds = Contrast(0.01, 0.01, 4, 0.8, "paired t", 5, 1, 2000, 0.9e-4, 0.1e-4)
    assert "seeds instead of 5" in what_decides(seeds, 0.0, 0.05)
    few = Contrast(0.01, 0.01, 900, 0.8, "paired t", 5, 1, 1000, 1e-7, 0.999e-4)
    text = what_decides(few, 0.0, 0.05)
    assert text.startswith("about ") and "test examples instead of 1,000" in text and "seeds" not in text
    named = int(text.split()[1].replace(",", ""))
    # The z test: (1.96 + 0.84)² times the squared error over the squared difference.
    assert named == pytest.approx(1000 * (stats.norm.isf(0.025) + stats.norm.isf(0.2)) ** 2, rel=0.08)
    both = Contrast(0.004, 0.02, 9, 0.8, "paired t", 5, 1, 1000, 2e-4, 2e-4)
    text = what_decides(both, 0.0, 0.05)
    assert "seeds instead of 5 and" in text and "test examples instead of 1,000" in text
    times = int(text.split()[1]) / 5
    assert is_enough(both, 0.0, 0.05, times, times)
    assert what_decides(Contrast(1e-9, 0.01, 4, 0.8, "Welch", 5), 0.0, 0.05).startswith("not even 1,000 seeds")


def test_tables_say_which_tasks_decide() -> None:
    """Task a tells the two apart, b does not; in c one model says the same for every example."""

    class Kept:
        table = ExampleTable("c", np.array([[1.0, 0.0, 1.0, 1.0]] * 3), num_degenerate=3)

    cells = [
        *(model(name, [mean, mean + 0.01, mean + 0.02], dataset="a") for name, mean in (("x", 0.5), ("y", 0.7))),
        *(model(name, scores, dataset="b") for name, scores in (("x", [0.5, 0.6, 0.7]), ("y", [0.6, 0.55, 0.68]))),
    ]
    cells = [*cells[:1], model("y", [0.7, 0.712, 0.719], dataset="a"), *cells[2:]]
    cells += [model("x", [0.75] * 3, dataset="c", examples=Kept()), model("y", [0.76, 0.77, 0.75], dataset="c")]
    (table,) = make_tables(ResultSet(tuple(cells)))
    assert [bool(signal and not signal.needs) for signal in table.signals[:2]] == [True, False]
    assert show_signal(table.signals[1]).startswith("(")
    text = to_markdown(table)
    assert "| signal ÷ noise |" in text and "75.00†" in text and "b decides nothing here; what would: " in text
    assert r"signal $\div$ noise" in to_latex(table) and r"75.00$\dagger$" in to_latex(table)
