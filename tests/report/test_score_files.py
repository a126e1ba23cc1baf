"""Names of columns in tables of other people's scores, and the forms of EuroEval's and EncodEval's results."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import biphase
from biphase.errors import InputError

Rows = list[dict[str, Any]]


def two_methods(**more: Any) -> Rows:
    """Scores of two methods with three seeds each, and more columns."""
    return [
        {"method": method, "task": "t", "seed": seed, "score": level + 0.01 * ((3 * seed + place) % 5)} | more
        for place, (method, level) in enumerate((("a", 0.5), ("b", 0.6)))
        for seed in range(3)
    ]


def test_euroevals_first_metric_counts_for_encoders_and_for_generative_models(tmp_path: Path) -> None:
    """`Trainer.evaluate` writes the loss first; generative models have no prefix. `log_scores` of EuroEval writes the
    means of the task's metrics, the first of which ranks models."""
    lines, means = [], {}
    for model, level, prefix in (("encoder", 0.7, "test_"), ("generative", 0.5, "")):
        scores = [level + (7 * step if prefix else step) % 10 / 100 for step in range(10)]
        means[model] = float(np.mean(scores))
        raw = [{f"{prefix}mcc": score, f"{prefix}macro_f1": 0.1} for score in scores]
        if prefix:
            raw = [{"test_loss": 1 - level, **values, "test_runtime": 2.5} for values in raw]
        total = {"test_mcc": 100 * means[model], "test_mcc_se": 1.9, "test_macro_f1": 10.0, "test_macro_f1_se": 0.0}
        results = {"raw": raw, "total": total | {"num_failed_instances": 0.0}}
        lines.append(json.dumps({"model": model, "dataset": "angry-tweets", "results": results}))
    path = tmp_path / "euroeval_benchmark_results.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    standing = biphase.equivalent(path)
    read = {name: scores["angry-tweets"].mean for name, scores in standing.results.scores.items()}
    assert read == pytest.approx(means) and standing.places["encoder"] == (1, 1)
    path.write_text(json.dumps({"model": "m", "dataset": "d", "results": {"raw": [{"test_loss": 1}], "total": {}}}))
    with pytest.raises(InputError, match=r"jsonl:1: not a line of EuroEval's results \(.*results\.total\)"):
        biphase.equivalent(path)


def write_cell(folder: Path, rate: str, seed: int, validation: float, test: float) -> None:
    path = folder / "SC" / "sst2" / f"lr{rate}_sd{seed}" / "results.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    splits = {
        "validation": {"score": validation, "scores_i": [validation]},
        "test": {"score": test, "scores_i": [test]},
    }
    text = json.dumps(splits).replace("[NaN]", "[0]")
    path.write_text(text, encoding="utf-8")


def test_no_rate_wins_by_its_survivors_in_folders_of_encodeval(tmp_path: Path) -> None:
    """One seed of three is left at the better rate, as at high rates of the authors; and a seed without any score at
    the rate of the others is told."""
    for method in ("a", "b"):
        for seed in range(3):
            write_cell(tmp_path / method, "1e-04", seed, 0.5, 0.4 + seed / 100)
        write_cell(tmp_path / method, "5e-04", 0, 0.9, 0.8)
    standing = biphase.equivalent(tmp_path)
    assert standing.results.scores["a"]["sst2"].samples == pytest.approx((0.4, 0.41, 0.42))
    assert not any("no score at their chosen rate" in note for note in standing.notes)
    write_cell(tmp_path / "a", "1e-04", 2, math.nan, math.nan)
    lacking = biphase.equivalent(tmp_path)
    assert lacking.results.scores["a"]["sst2"].samples == pytest.approx((0.4, 0.41))
    told = (
        "Some seeds have no score at their chosen rate, so these scores are means over the others: a on sst2 (1 seed)."
    )
    assert told in lacking.notes and told in biphase.equivalent(tmp_path, over="tasks").notes


def test_columns_are_found_in_any_case_and_with_blanks() -> None:
    """But columns of compute and of examples have that very name: others mean something else by `Tokens`."""
    rows = two_methods(tokens=1e9)
    expected = biphase.equivalent(rows)
    for spell in (str.title, str.upper, " {} ".format):
        spelled = [{spell(name) if name != "tokens" else " tokens ": row[name] for name in row} for row in rows]
        standing = biphase.equivalent(spelled)
        assert str(standing) == str(expected) and [arm.tokens for arm in standing.results.models] == [1e9, 1e9]
    biphase.equivalent(two_methods(Tokens="2T", Examples=872))
    beside = [{**row, "Task": index} for index, row in enumerate(rows)]
    assert str(biphase.equivalent(beside)) == str(expected), "a column has that very name"
    with pytest.raises(InputError, match="row 0: the column task is named twice"):
        biphase.equivalent(
            [{"TASK" if name == "task" else name: row[name] for name in row} | {"Task": 1} for row in rows]
        )


def test_a_renamed_column_that_no_row_has_is_refused() -> None:
    with pytest.raises(InputError, match="rename: column 'sede'; did you mean 'seed'"):
        biphase.equivalent(two_methods(), rename={"sede": "pretraining_seed"})


def test_the_name_of_a_file_is_the_method_of_rows_without_one(tmp_path: Path) -> None:
    (tmp_path / "two.csv").write_text("method,score\n ,0.6\n")
    (tmp_path / "one.csv").write_text("method,score\n,0.5\n")
    standing = biphase.equivalent([tmp_path / "one.csv", tmp_path / "two.csv"])
    assert {arm.name for arm in standing.results.models} == {"one", "two"}
