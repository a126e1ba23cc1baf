"""The look of all plots: one palette, one set of matplotlib's settings, and loss curves for cards and reports.

Every series has its colour (from Okabe and Ito's palette, which colour-blind readers can tell apart), marker, line and
hatch, so that it survives black-and-white print. This module imports no torch, and matplotlib only to draw.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from biphase.errors import SOURCE, InputError
from biphase.files import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GRID = "#1a1a1a", "#dcdcdc"
"""The colours of text and axes, and of grid lines; a page with a dark background replaces both."""

PLOT_STYLE = SOURCE / "plots.mplstyle"
"""Matplotlib's settings for all figures."""


@dataclass(frozen=True)
class Look:
    """The look of a series."""

    color: str
    marker: str
    line: str
    hatch: str


LOOKS = {
    "clm": Look("#0072B2", "o", "-", ""),
    "mlm": Look("#D55E00", "s", "--", "//"),
    "clm+mlm": Look("#009E73", "D", "-.", "\\\\"),
    "mntp": Look("#CC79A7", "v", ":", "xx"),
    "meap": Look("#56B4E9", "^", (0, (5, 1)), "--"),  # type: ignore[arg-type]
    "causal-mlm": Look("#E69F00", "P", (0, (1, 1)), ".."),  # type: ignore[arg-type]
}
"""The looks of the objectives."""

SERIES = (
    Look("#0072B2", "o", "-", ""),
    Look("#E69F00", "s", "--", "//"),
    Look("#009E73", "D", "-.", "\\\\"),
    Look("#CC79A7", "^", ":", "xx"),
    Look("#56B4E9", "v", (0, (5, 1)), "--"),  # type: ignore[arg-type]
)
"""The looks of series without an objective, in turn, and the markers, lines and hatches of further ones."""


CURVE_POINTS = 300
PICTURE_FORMATS = (".svg", ".png", ".pdf")


def check_picture(path: Path) -> None:
    """Raise `InputError` for a file name without a picture's ending."""
    if path.suffix not in PICTURE_FORMATS:
        raise InputError(f"{path}: a picture ends in {', '.join(PICTURE_FORMATS)}")


def save_picture(figure: "Figure", path: Path) -> None:
    """Write a whole picture, in the format of the ending; equal figures give equal bytes of SVG."""
    content, metadata = BytesIO(), {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(content, format=path.suffix[1:], dpi=150, metadata=metadata)
    with whole_file(path) as file:
        file.buffer.write(content.getbuffer())


def plot_losses(
    records: Iterable[Mapping[str, Any]], look: Look, labels: tuple[str | None, str | None], axes: "Axes"
) -> None:
    """Draw the loss against the step, training as a line and validation as markers.

    Several seeds become their mean, with a band from the lowest to the highest, over their common steps.

    Args:
        records: records of one objective, as in metrics.jsonl: `kind` (train, validation), `step`, `loss`, and a `seed`
            if there are several.
        labels: the legend's labels for training and for validation.
    """
    rows = list(records)
    for kind, style, label in (
        ("train", {"linestyle": look.line}, labels[0]),
        ("validation", {"linestyle": "", "marker": look.marker}, labels[1]),
    ):
        seeds: dict[object, dict[int, float]] = defaultdict(dict)
        for row in rows:
            if row["kind"] == kind:
                seeds[row.get("seed")][row["step"]] = row["loss"]
        steps = sorted(set.intersection(*map(set, seeds.values()))) if seeds else []
        if steps:
            curves = [thin([(step, losses[step]) for step in steps]) for losses in seeds.values()]
            steps_N, losses_SN = curves[0][0], np.array([losses_N for _, losses_N in curves])
            means_N = losses_SN.mean(axis=0)
            axes.plot(steps_N, means_N, color=look.color, linewidth=1, markersize=4, label=label, **style)  # type: ignore[arg-type]
            if len(curves) > 1:
                ends_N = losses_SN.min(axis=0), losses_SN.max(axis=0)
                axes.fill_between(steps_N, *ends_N, color=look.color, alpha=0.2, linewidth=0)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per target)")


def thin(points: Sequence[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Return at most `CURVE_POINTS` points of a curve, each the mean of the same number of neighbours."""
    points_N2 = np.array(points, dtype=np.float64).reshape(-1, 2)
    size = math.ceil(len(points_N2) / CURVE_POINTS)
    means = [points_N2[begin : begin + size].mean(axis=0) for begin in range(0, len(points_N2), max(size, 1))]
    return np.array([mean[0] for mean in means]), np.array([mean[1] for mean in means])
