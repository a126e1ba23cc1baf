"""Panels → matplotlib's axes: lines through means, bars of differences, points of spreads, all with their intervals."""

from typing import TYPE_CHECKING, Any

from biphase.report.panels import Panel
from biphase.style import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_panel(panel: Panel, axes: "Axes") -> None:
    {"lines": plot_lines, "bars": plot_bars, "points": plot_points, "rings": plot_points}[panel.kind](panel, axes)
    if panel.is_logarithmic:
        axes.set_xscale("log")
    axes.set_xticks(panel.ticks, panel.tick_labels)
    if panel.is_logarithmic:
        axes.minorticks_off()
    if panel.x_margin is not None:
        axes.set_xlim(min(panel.ticks) - panel.x_margin, max(panel.ticks) + panel.x_margin)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.set_title(panel.title)


def plot_lines(panel: Panel, axes: "Axes") -> None:
    """A line through the marks of each series."""
    for series in panel.series:
        if series.marks:
            axes.errorbar(
                [mark.x for mark in series.marks],
                [mark.value for mark in series.marks],
                yerr=[[mark.down for mark in series.marks], [mark.up for mark in series.marks]],
                color=series.look.color,
                marker=series.look.marker,
                linestyle=series.look.line,
                elinewidth=0.9,
                label=series.label,
            )


def plot_bars(panel: Panel, axes: "Axes") -> None:
    """Bars from zero, side by side in each group."""
    width = 0.8 / max(len(panel.series), 1)
    for number, series in enumerate(panel.series):
        shift = width * (number - (len(panel.series) - 1) / 2)
        axes.bar(
            [mark.x + shift for mark in series.marks],
            [mark.value for mark in series.marks],
            min(0.9 * width, 0.5),
            yerr=[mark.up for mark in series.marks],
            facecolor=lighten(series.look.color),
            edgecolor=INK,
            linewidth=0.6,
            hatch=series.look.hatch,
            label=series.label,
            error_kw={"elinewidth": 0.9, "ecolor": INK},
        )
        for mark in series.marks:
            if mark.dots:
                axes.plot([mark.x + shift for _ in mark.dots], mark.dots, ".", color=INK, markersize=4)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.margins(y=0.1)
    axes.grid(False, axis="x")


def plot_points(panel: Panel, axes: "Axes") -> None:
    """Marks that no line connects; the size of each is its own."""
    hollow: dict[str, Any] = {"markerfacecolor": "none"} if panel.kind == "rings" else {}
    for series in panel.series:
        for number, mark in enumerate(series.marks):
            axes.errorbar(
                mark.x,
                mark.value,
                yerr=[[mark.down], [mark.up]],
                fmt=series.look.marker,
                color=series.look.color,
                markersize=mark.size,
                elinewidth=0.9,
                label=series.label if number == 0 else None,
                **hollow,
            )
    if panel.kind == "points":
        axes.set_ylim(bottom=0)


def lighten(color: str) -> str:
    """A third of the way to white, so that intervals are seen on it."""
    channels = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(channel + (255 - channel) / 3):02x}" for channel in channels)
