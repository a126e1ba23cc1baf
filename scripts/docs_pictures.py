"""Draw the figures of docs/explanation into docs/pictures, by the functions that pack, plan and interpolate.

python scripts/docs_pictures.py
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from biphase.config import parse_config
from biphase.corpus.packing import cut_documents, permute
from biphase.studies.describe import draw_plan
from biphase.studies.plan import plan_study
from biphase.studies.spec import Study
from biphase.style import GRID, INK, LOOKS, PLOT_STYLE, SERIES

TARGET = Path(__file__).resolve().parents[1] / "docs" / "pictures"
DOCUMENTS = (100, 130, 40, 70, 5, 95)
BATCH = 150
STUDY = {
    "name": "branching",
    "title": "Four models, trained with 2,000 updates in place of 3,200",
    "recipe": {
        "data": {"shards": "shards"},
        "schedule": {"peak_lr": 3e-3, "warmup_steps": 40, "decay_steps": 100},
        "batch_tokens": 2048,
    },
    "arms": [{"models": ["1m"], "curricula": ["clm", "75/25", "50/50", "25/75"], "budgets": [800]}],
    "evaluation": {"tasks": ["genre"], "learning_rates": [1e-3]},
}
MLM = {600: 57.2, 1200: 62.9, 1800: 66.4, 2400: 68.7}
"""Accuracy of tagging after so many updates of MLM, and 50/50 after 900, each of which costs 1.06 times as much: the
study `price` (docs/LOG.md, 2026-11-27)."""
ARM, ARM_SCORE = 900 * 1.06, 65.0


def draw_packing(axes: Axes) -> None:
    """Show documents, their samples, and the samples in an epoch's order with the bounds of batches."""
    ends = np.cumsum(DOCUMENTS)
    samples = cut_documents(ends, 12, 64)
    ids = np.arange(samples.num_samples)
    begins, stops = samples.spans(ids)
    document_of = np.searchsorted(ends, begins, side="right")
    order = permute(ids, samples.num_samples, seed=0, epoch=0)
    colors = [look.color for look in (*SERIES, LOOKS["mlm"])]

    def bar(left: float, width: float, height: float, document: int, label: str) -> None:
        axes.barh(height, width, 0.5, left, color=colors[document], edgecolor="white", linewidth=1.5)
        axes.text(left + width / 2, height, label, color="white", ha="center", va="center", fontsize=7)

    for document, end in enumerate(ends):
        bar(end - DOCUMENTS[document], DOCUMENTS[document], 2, document, str(DOCUMENTS[document]))
    for begin, stop, document in zip(begins, stops, document_of, strict=True):
        bar(begin, stop - begin, 1, document, str(stop - begin))
    lengths = (stops - begins)[order]
    starts = np.cumsum(lengths) - lengths
    for start, length, sample in zip(starts, lengths, order, strict=True):
        bar(start, length, 0, document_of[sample], str(length))
    for batch in range(samples.num_tokens // BATCH + 1):
        first = starts[np.searchsorted(starts, batch * BATCH)]
        axes.vlines(first, -0.42, 0.42, color=INK, linewidth=1.5)
        axes.text(first + 2, -0.6, f"batch {batch}", color=INK, fontsize=8)
    axes.set_yticks([2, 1, 0], ["documents", "samples", "an epoch's order"])
    axes.set(xlabel="tokens", ylim=(-0.8, 2.5), xlim=(-2, ends[-1] + 2))
    axes.grid(visible=False)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)


def draw_share(axes: Axes) -> None:
    """Show how a share of compute is read off the baseline's ladder."""
    budgets, scores = np.array([*MLM]), np.array([*MLM.values()])
    same = float(np.exp(np.interp(ARM_SCORE, scores, np.log(budgets))))
    mlm, arm = LOOKS["mlm"], LOOKS["clm+mlm"]
    axes.plot(budgets, scores, color=mlm.color, marker=mlm.marker, label="MLM alone, four budgets")
    axes.plot([ARM], [ARM_SCORE], color=arm.color, marker=arm.marker, linestyle="none", label="50/50, 900 updates")
    axes.annotate("", (same, ARM_SCORE), (ARM, ARM_SCORE), arrowprops={"arrowstyle": "->", "color": arm.color})
    axes.vlines([ARM, same], 55.5, ARM_SCORE, color=INK, linestyle=":", linewidth=0.8)
    axes.text(ARM * 1.01, 55.8, f"{ARM:,.0f}", ha="left", fontsize=8)
    axes.text(same * 1.01, 55.8, f"{same:,.0f}", ha="left", fontsize=8)
    axes.text(same * 1.04, ARM_SCORE - 1.6, f"share {ARM:,.0f} / {same:,.0f} = {ARM / same:.2f}", fontsize=9)
    axes.set_xscale("log")
    axes.set_xticks(budgets, [f"{budget:,}" for budget in budgets], minor=False)
    axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.set(xlabel="compute, in updates of MLM (logarithmic)", ylabel="tagging (%)", ylim=(55.5, 70))
    axes.grid(color=GRID)
    axes.legend(loc="upper left", frameon=False)


def save(name: str, size: tuple[float, float], draw: Callable[[Axes], None]) -> None:
    settings: Any = {"svg.hashsalt": name, "svg.fonttype": "none"}
    with matplotlib.rc_context(settings, PLOT_STYLE):
        figure = Figure(size, layout="constrained")
        draw(figure.subplots())
        figure.savefig(TARGET / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    save("packing", (7.6, 2.4), draw_packing)
    save("share", (6.2, 3.4), draw_share)
    draw_plan(plan_study(parse_config(Study, STUDY, origin="scripts/docs_pictures.py")), TARGET / "branching.svg")
