"""Results → what their scores measure, in words, for captions and axes."""

from biphase.report.formats import show_list
from biphase.report.results import AVERAGE, MEASURES, ResultSet

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
