"""Numbers and measures as people read them: percent, points, intervals, p-values; tables of them as md, tex and csv."""

import csv
import io
import math
from collections.abc import Iterable, Sequence

from biphase.report.results import AVERAGE, MEASURES, ResultSet
from biphase.report.statistics import SIGNIFICANCE, Interval

MISSING = "–"
"""What stands where a number is not known."""


def show_share(share: float) -> str:
    """A share as a percentage, two decimals as in the paper: `81.20`."""
    return MISSING if math.isnan(share) else f"{100 * share:.2f}"


def show_points(value: float) -> str:
    """A difference of shares in percentage points, signed: `+1.20`; `0.00` has no sign."""
    shown = f"{100 * value:+.2f}"
    return MISSING if math.isnan(value) else shown[1:] if float(shown) == 0 else shown.replace("-", "−")


def show_estimate(value: float) -> str:
    """The two digits that an estimate knows: `0.021`, `1.5`, `12`, `81,000`."""
    digits = 1 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{round(value, digits):,.{max(digits, 0)}f}"


def show_p_value(p_value: float) -> str:
    """`0.031`, `< 0.001`; near the level of all tests as many digits as tell the side: `0.0496`."""
    if math.isnan(p_value):
        return MISSING
    if p_value < 0.001:
        return "< 0.001"
    shown = (f"{p_value:.{digits}f}" for digits in range(3, 18))
    return next(digits for digits in shown if (float(digits) < SIGNIFICANCE) == (p_value < SIGNIFICANCE))


def show_interval(interval: Interval) -> str:
    """`81.20 ± 0.93`; with a single value `81.20 ±    –`."""
    return MISSING if interval.num == 0 else f"{show_share(interval.value)} ± {show_share(interval.half_width):>4}"


def show_difference(difference: Interval) -> str:
    """`+1.20 ± 0.93`, with the half-width of an interval by Student's t."""
    return f"{100 * difference.value:+.2f} ± {show_share(difference.half_width):>4}"


def show_spread(spread: Interval | None) -> str:
    """`1.20 [0.93, 1.41]`."""
    if spread is None or math.isnan(spread.value):
        return MISSING
    ends = "" if math.isnan(spread.low) else f" [{show_share(spread.low)}, {show_share(spread.high)}]"
    return show_share(spread.value) + ends


def show_list(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def show_noise(noise: Sequence[str]) -> str:
    """What a test accounts for: `fine-tuning seeds only`, `pretraining seeds and test examples`."""
    return show_list(noise) + (" only" if len(noise) == 1 else "")


def show_count(number: int, noun: str, nouns: str = "") -> str:
    """`1 seed`, `2,000 seeds`, `2 inequalities`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {nouns or noun + 's'}"


def format_bytes(num_bytes: float) -> str:
    """`7 B`, `1.23 kB`, `3e+04 TB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if num_bytes < 1000 or unit == "TB":
            break
        num_bytes /= 1000
    return f"{num_bytes:.3g} {unit}"


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def markdown_text(
    title: str, header: Sequence[str], rows: Iterable[Sequence[str]], num_stub: int, notes: Iterable[str]
) -> str:
    """A table under its title and above its notes; its first `num_stub` columns are words, the others numbers."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (header, *rows)]
    lines.insert(1, "|" + ":---|" * num_stub + "---:|" * (len(header) - num_stub))
    return "\n".join([f"**{title}**", "", *lines, *(line for note in notes for line in ("", note))]) + "\n"


def latex_text(
    name: str, caption: str, header: Sequence[str], rows: Iterable[Sequence[str] | None], num_stub: int
) -> str:
    """The same for `booktabs`, without document preamble. Cells of `rows` are LaTeX; None is a line across."""
    lines = [r"\midrule" if row is None else " & ".join(row) + r" \\" for row in rows]
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering\small",
            rf"\caption{{{escape_latex(caption)}}}",
            rf"\label{{tab:{name}}}",
            rf"\begin{{tabular}}{{{'l' * num_stub}{'r' * (len(header) - num_stub)}}}",
            r"\toprule",
            " & ".join(map(escape_latex, header)) + r" \\",
            *(r"\midrule", *lines, r"\bottomrule"),
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


LATEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "→": r"$\to$",
    "–": "--",
    "†": r"$\dagger$",
    "÷": r"$\div$",
    "…": r"\ldots{}",
    "“": "``",
    "”": "''",
}


def escape_latex(text: str) -> str:
    return "".join(LATEX.get(sign, sign) for sign in text)


MEASURE_NAMES: dict[str, dict[str, str]] = {
    "SC": {
        "accuracy": "accuracy",
        "macro_f1": "macro-F1",
        "micro_f1": "micro-F1",
        "f1": "F1 of the second class",
        "mcc": "Matthews correlation",
        "spearman": "Spearman correlation",
        "pearson": "Pearson correlation",
    },
    "TC": {
        "f1": "F1 of entities",
        "strict_f1": "strict F1 of entities",
        "accuracy": "accuracy of tags",
        "macro_f1": "macro-F1 of tags",
    },
    "QA": {"f1": "F1 of answers", "exact": "exact match"},
    "IR": {
        "ndcg_at_10": "nDCG@10",
        "map_at_100": "MAP@100",
        "mrr_at_10": "MRR@10",
        "recall_at_100": "recall@100",
    },
    "EM": {"ndcg_at_10": "nDCG@10, zero-shot", "spearman": "rank correlation, zero-shot"},
}
"""Family → the standard metrics of its tasks, the usual one first, in words."""


def group_measures(results: ResultSet, family: str, metric: str) -> dict[str, list[str]]:
    """What the scores of a family measure, in words → the datasets whose scores do. Where all are by the usual metric,
    or it is not known by which, that is `MEASURES`."""
    names = MEASURE_NAMES[family]
    usual = next(iter(names))
    datasets: dict[str, dict[str, None]] = {}
    for one in results.select(family, metric=metric).results:
        if one.dataset != AVERAGE:
            measure = usual if metric == "paper" else one.measure or usual
            datasets.setdefault(measure, {})[one.dataset] = None
    if datasets.keys() <= {usual}:
        return {MEASURES[metric][family]: [name for own in datasets.values() for name in own]}
    return {names.get(measure, measure): list(own) for measure, own in datasets.items()}


def tell_measures(results: ResultSet, family: str, metric: str) -> str:
    """`accuracy`; `accuracy on genre and Matthews correlation on cola, which averages mix`."""
    found = group_measures(results, family, metric)
    if len(found) == 1:
        return next(iter(found))
    return f"{show_list([f'{words} on {show_list(own)}' for words, own in found.items()])}, which averages mix"


def label_measures(results: ResultSet, family: str, metric: str) -> str:
    """The same for the axis of a family's average: `accuracy (%)`; `mean of accuracy and Matthews correlation (%)`."""
    names = [words.partition(",")[0] for words in group_measures(results, family, metric)]
    return f"{'mean of ' if len(names) > 1 else ''}{show_list(names)} (%)"
