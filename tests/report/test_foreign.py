"""A table of other people's scores: verdicts as scipy's tests give them, ranks and shares that hold in worlds whose
truth is known, the files of other programs, and what is refused."""

import csv
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import biphase
from biphase.cli.app import run_command
from biphase.errors import InputError
from biphase.report.equivalents import ladder_panel
from biphase.report.foreign import Standing, judge_table

Rows = list[dict[str, Any]]


def draw_table(rng: np.random.Generator, means: list[float], spreads: list[float], num_seeds: int = 5) -> Rows:
    """Scores on three tasks: seeds have something in common over tasks, and methods their own spread."""
    rows = []
    for number, (mean, spread) in enumerate(zip(means, spreads, strict=True)):
        for seed, shift in enumerate(rng.normal(0, spread / 2, num_seeds)):
            for task in range(3):
                score = 0.6 + 0.1 * task + mean + shift + rng.normal(0, spread)
                rows.append({"method": f"m{number}", "task": f"t{task}", "seed": seed, "score": score})
    return rows


def test_verdicts_are_scipys(tmp_path: Path) -> None:
    rows = draw_table(np.random.default_rng(1), [0, 0.01, 0.05], [0.01, 0.01, 0.02])
    means = np.array([[row["score"] for row in rows if row["method"] == f"m{number}"] for number in range(3)])
    by_seed = means.reshape(3, 5, 3).mean(axis=2)
    raw = {(f"m{a}", f"m{b}"): stats.ttest_rel(by_seed[a], by_seed[b]).pvalue for a, b in ((1, 0), (2, 0), (2, 1))}
    largest = 0.0
    expected = {}
    for rank, (pair, p_value) in enumerate(sorted(raw.items(), key=lambda item: item[1])):
        largest = max(largest, min(1, p_value * (3 - rank)))
        expected[frozenset(pair)] = largest
    standing = biphase.equivalent(rows)
    assert {frozenset((p.a.arm.name, p.b.arm.name)): p.p_value for p in standing.pairs} == pytest.approx(expected)
    frame = standing.frames["ranks"].set_index("method")
    assert frame.percent.to_list() == pytest.approx(sorted(100 * by_seed.mean(axis=1), reverse=True))
    with (tmp_path / "rows.csv").open("w") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    assert str(biphase.equivalent(tmp_path / "rows.csv")) == str(standing)


def test_over_tasks_is_the_paired_test_over_tasks() -> None:
    rng = np.random.default_rng(2)
    scores = rng.uniform(0.3, 0.8, 41) + rng.normal(0.02, 0.03, (2, 41))
    rows = [{"method": m, "task": t, "score": scores[m, t]} for m in range(2) for t in range(41)]
    alone = biphase.equivalent(rows)
    assert "No verdict on 2 methods" in alone.sentences[0] and "`over` tasks may allow one." in str(alone)
    (pair,) = biphase.equivalent(rows, over="tasks").pairs
    assert pair.p_value == pytest.approx(stats.ttest_rel(*scores).pvalue)


def hold_together(standing: Standing, true_means: list[float], *, is_corrected: bool = True) -> bool:
    """Tell whether the intervals of all pairs contain the true differences."""
    held = []
    for pair in standing.pairs:
        assert pair.contrast
        gap = pair.difference if is_corrected else pair.contrast.against()
        assert gap and (gap.level == pair.level or not is_corrected)
        if is_corrected:  # an interval agrees with its verdict
            assert (gap.low <= 0 <= gap.high) == (pair.verdict == "within noise") == (pair.p_value >= 0.05)
        a, b = (true_means[int(side.arm.name[1:])] for side in (pair.a, pair.b))
        held.append(gap.low <= a - b <= gap.high)
    return all(held)


@pytest.mark.slow
@pytest.mark.minutes
@pytest.mark.parametrize("spreads", [[0.01] * 5, [0.005, 0.01, 0.02, 0.01, 0.01]])
def test_worlds_without_differences_and_ranks_that_hold(spreads: list[float]) -> None:
    """Of equally good methods any verdict is false: in at most 6 % of worlds, as in at most 6 % a rank's interval lacks
    the truth; where methods differ, some ranks are found. In 94 % of worlds of equals the intervals of all pairs
    contain the truth, where uncorrected ones do in less than 80 %; in 90 % where methods differ."""
    rng = np.random.default_rng(3)
    true_means = [0.0, 0.0, 0.01, 0.03, 0.08]
    num_false = num_wrong = num_found = 0
    num_equal, num_apart, num_uncorrected = 0, 0, 0
    num_worlds = 200
    for _ in range(num_worlds):
        equal = biphase.equivalent(draw_table(rng, [0.0] * 5, spreads))
        num_false += any(pair.verdict == "A better" for pair in equal.pairs)
        num_equal += hold_together(equal, [0.0] * 5)
        num_uncorrected += hold_together(equal, [0.0] * 5, is_corrected=False)
        apart = biphase.equivalent(draw_table(rng, true_means, spreads))
        num_apart += hold_together(apart, true_means)
        places = apart.places
        for number, mean in enumerate(true_means):
            least, most = sum(other > mean for other in true_means) + 1, sum(other >= mean for other in true_means)
            low, high = places[f"m{number}"]
            if not low <= least <= most <= high:
                num_wrong += 1
                break
        num_found += places["m4"] == (1, 1)
    assert num_false / num_worlds <= 0.06 and num_wrong / num_worlds <= 0.06
    assert num_found / num_worlds > 0.5
    assert num_equal / num_worlds >= 0.94 and num_uncorrected / num_worlds < 0.8 and num_apart / num_worlds >= 0.9


def ladder(rng: np.random.Generator, share: float, unit: float = 1.0) -> Rows:
    """A baseline with four budgets, and a method that needs `share` of its compute."""

    def scores(method: str, flops: float, worth: float, seed: int) -> Iterator[dict[str, Any]]:
        for task in ("a", "b"):
            score = unit * (0.5 + 0.05 * np.log2(worth / 1e18) + rng.normal(0, 0.004))
            yield {"method": method, "task": task, "pretraining_seed": seed, "flops": flops, "score": score}

    rows = []
    for seed in range(4):
        for budget in (1e18, 2e18, 4e18, 8e18):
            rows += scores("base", budget, budget, seed)
        rows += scores("new", 2e18, 2e18 / share, seed)
    return rows


@pytest.mark.slow
@pytest.mark.minutes
def test_shares_of_compute_hold_the_truth() -> None:
    rng = np.random.default_rng(4)
    covered = 0
    for _ in range(40):
        ((price,),) = (listed.prices for listed in biphase.equivalent(ladder(rng, 0.6)).prices)
        covered += price.mean[0].low <= 0.6 <= price.mean[0].high
    assert covered >= 35  # 95 % of 40, less what chance takes in 1 of 100
    told = biphase.equivalent(ladder(rng, 0.6)).sentences
    assert told[0].startswith("At 2e18 FLOPs: new is the best of 2 methods") and "of its FLOPs" in told[1]
    losses = ladder(rng, 0.6, unit=-1.0)
    ((price,),) = (listed.prices for listed in biphase.equivalent(losses, lower_is_better=True).prices)
    assert price.mean[0].share == pytest.approx(0.6, abs=0.1)


@pytest.mark.parametrize(
    "name",
    ["Average", "avg", "MEAN", "Avg.", "Overall", "Average ⬆️", "Mean (Task)", "macro-avg", "SC mean", "all tasks"],
)
def test_a_tables_own_average_is_no_task(name: str) -> None:
    rows = draw_table(np.random.default_rng(4), [0, 0.02], [0.01, 0.01])
    own = [row | {"task": name, "score": row["score"] + 0.3} for row in rows if row["task"] == "t0"]
    for settings in ({}, {"over": "tasks"}):
        expected, seen = biphase.equivalent(rows, **settings), biphase.equivalent(rows + own, **settings)
        assert seen.sentences == expected.sentences and set(seen.notes) - set(expected.notes) == {
            f"The table's own means over tasks do not count as tasks: {name}. Rename them if they are tasks."
        }
        assert [pair.p_value for pair in seen.pairs] == [pair.p_value for pair in expected.pairs]
    third = [row | {"method": "third", "task": name} for row in own if row["method"] == own[0]["method"]]
    assert any("lack tasks" in note and "third" in note for note in biphase.equivalent(rows + own + third).notes)
    alone = biphase.equivalent(own)
    (pair,) = alone.pairs
    assert pair.p_value == biphase.equivalent([row | {"task": "a"} for row in own]).pairs[0].p_value
    assert not any("means over tasks" in note for note in alone.notes)


def test_a_task_whose_name_has_more_words_than_a_mean_is_a_task() -> None:
    rows = draw_table(np.random.default_rng(4), [0, 0.02], [0.01, 0.01])
    named = [row | {"task": {"t0": "grand mean", "t1": "Mean reversal"}.get(row["task"], row["task"])} for row in rows]
    assert str(biphase.equivalent(named)) == str(biphase.equivalent(rows))
    alone = biphase.equivalent([row | {"task": "All tasks"} for row in rows if row["task"] == "t0"])
    assert alone.results.datasets == {"OT": ["mean over all tasks"]} and len(alone.pairs) == 1


def test_compute_is_known_for_all_rows_of_a_method_or_for_none() -> None:
    """A row without it would be another budget of its method, and a method without it is compared with no budget."""
    rows = ladder(np.random.default_rng(8), 0.6)
    holed = [*rows[:5], rows[5] | {"flops": None}, *rows[6:]]
    told = "row 5: base has no flops here, but at row 0; give flops for all of its rows, or for none"
    with pytest.raises(InputError, match=told):
        biphase.equivalent(holed)
    unknown = [{key: row[key] for key in row if key != "flops"} for row in rows if row["method"] == "new"]
    others = [row | {"method": "other"} for row in unknown]
    beside = biphase.equivalent([*rows, *others])
    note = "Not compared with methods at a budget, because their compute is unknown: other."
    assert note in beside.notes and note not in biphase.equivalent(rows).notes
    assert not any("compute is unknown" in line for line in biphase.equivalent([*unknown, *others]).notes)


def test_examples_and_what_cannot_be_known(tmp_path: Path) -> None:
    rng, rows = np.random.default_rng(5), []
    for method, right in (("a", 0.9), ("b", 0.6)):
        for seed in range(3):
            examples = (rng.random(400) < right).astype(float).tolist()
            rows.append({"method": method, "task": "t", "seed": seed, "score": np.mean(examples), "examples": examples})
    standing = biphase.equivalent(rows)
    assert standing.pairs[0].contrast and standing.pairs[0].contrast.num_examples == 400
    assert not any("test example" in note for note in standing.notes) and "a is the best" in str(standing)
    (one,) = biphase.equivalent([row for row in rows if row["seed"] == 0]).pairs
    assert one.verdict == "cannot be told" and "these runs do differ on the test examples" in one.notes[-1]
    between = [row | {"method": "c"} for row in rows if row["method"] == "b"]
    single = biphase.equivalent([row for row in [*rows, *between] if row["seed"] == 0])
    assert "0 of 3 pairs separated (2 cannot be told), 0 of 2 neighbours" in str(single)
    assert "`over` tasks" not in str(single), "there is one task"
    assert "not adjusted, and separates no pair" in single.report(tmp_path / "single").read_text(encoding="utf-8")
    without = biphase.equivalent([{key: row[key] for key in row if key != "examples"} for row in rows])
    assert any("test example" in note for note in without.notes) and any(
        "fine-tuning" in note for note in without.notes
    )
    page = standing.report(tmp_path / "report").read_text(encoding="utf-8")
    assert "a better" in page and "fine-tuning seeds and test examples" in page and "1 to" not in page
    assert "not adjusted" not in page and "cannot be told" not in str(standing)
    assert not any(word in page for word in ("random", "CLM → MLM", "No figure"))


def test_one_scale() -> None:
    def rows(**scores: float) -> Rows:
        tables = [{"method": m, "task": t, "score": s + m / 10} for t, s in scores.items() for m in (0, 1)]
        return tables

    (share,) = biphase.equivalent(rows(a=0.5)).pairs
    (percent,) = biphase.equivalent(rows(a=50.0)).pairs
    assert share.a.mean == pytest.approx(0.6) and percent.a.mean == pytest.approx(0.501)
    (told,) = biphase.equivalent(rows(a=0.5), scale="percent").pairs
    assert told.a.mean == pytest.approx(0.006)
    for mixed in (rows(a=50.0, b=0.5), rows(a=345.0)):
        with pytest.raises(InputError, match="neither all shares nor all percent"):
            biphase.equivalent(mixed)


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def test_files_of_other_programs(tmp_path: Path) -> None:
    for number, model in enumerate(("org__a", "org__b")):
        runs = [{"accuracy": 0.5 + number / 10 + seed / 100, "f1": 0.1} for seed in range(10)]
        part = {"hf_subset": "default", "accuracy": 0.545 + number / 10, "main_score": 0.545 + number / 10}
        write(
            tmp_path / "mteb" / model / "0" / "Banking.json",
            {"task_name": "Banking", "scores": {"test": [part | {"scores_per_experiment": runs}]}},
        )
        pair = [{"hf_subset": name, "main_score": 0.7} for name in ("en-de", "en-fr")]
        write(tmp_path / "mteb" / model / "0" / "STS.json", {"task_name": "STS", "scores": {"test": pair}})
        write(tmp_path / "mteb" / model / "0" / "model_meta.json", {"name": model})
        for rate, shift in (("1e-05", 0.0), ("1e-04", 0.2)):
            for seed in range(3):
                examples = [shift + number / 10] * 3 + [seed / 100]
                splits = {
                    "validation": {"score": 1 - shift, "scores_i": [1 - shift]},
                    "test": {"score": np.mean(examples), "scores_i": examples},
                }
                write(tmp_path / "encod" / model / "SC" / "sst2" / f"lr{rate}_sd{seed}" / "results.json", splits)
    mteb = biphase.equivalent(tmp_path / "mteb").results.scores
    assert mteb["org/a"]["Banking"].samples == pytest.approx([0.5 + seed / 100 for seed in range(10)])
    assert mteb["org/b"].keys() >= {"Banking", "STS (en-de)", "STS (en-fr)"}
    encod = biphase.equivalent(tmp_path / "encod").results.scores["org__b"]["sst2"]  # the rate is that of validation
    assert encod.samples == pytest.approx([0.075, 0.0775, 0.08]) and encod.seeds == (0, 1, 2) and encod.examples
    lines = []
    for model in ("x", "y"):
        raw = [{"test_mcc": 70.0 + step, "test_macro_f1": 5.0} for step in range(10)]
        lines.append(
            json.dumps({"model": model, "dataset": "angry", "results": {"raw": raw, "total": {"test_mcc": 74.5}}})
        )
    write(tmp_path / "euroeval.jsonl", "\n".join(lines))
    euro = biphase.equivalent(tmp_path / "euroeval.jsonl").results.scores["x"]["angry"]
    assert euro.samples == pytest.approx([0.70 + step / 100 for step in range(10)])
    for name in ("base", "new"):  # nanochat's series: a file for each
        write(tmp_path / f"{name}.csv", "depth,tokens_trained,core_score\n12,1e9,0.12\n14,2e9,0.15\n16,4e9,0.18\n")
    files = [tmp_path / "base.csv", tmp_path / "new.csv"]
    series = biphase.equivalent(files, rename={"tokens_trained": "tokens", "core_score": "score"}, baseline="base")
    assert series.results.datasets["OT"] == ["core_score"] and len(series.prices[0].prices) == 3


def test_scores_of_mteb_are_of_the_split_that_all_files_of_a_task_have(tmp_path: Path) -> None:
    """A model with scores on test too is compared with the others on dev; without a common split, it is not."""
    scores = {
        "a": {"MSMARCO": {"train": 0.350, "dev": 0.365, "test": 0.637}, "Own": {"train": 0.1, "dev": 0.2}},
        "b": {"MSMARCO": {"dev": 0.410}, "Own": {"train": 0.9, "test": 0.3}},
        "c": {"MSMARCO": {"dev": 0.420, "train": 0.9}, "Own": {"train": 0.4}, "Empty": {}},
    }
    for model, (task, by_split) in ((model, item) for model, tasks in scores.items() for item in tasks.items()):
        parts = {split: [{"hf_subset": "default", "main_score": value}] for split, value in by_split.items()}
        write(tmp_path / model / "0" / f"{task}.json", {"task_name": task, "scores": {"test": []} | parts})
    standing = biphase.equivalent(tmp_path)
    seen = {name: {task: known[task].samples for task in known} for name, known in standing.results.scores.items()}
    assert seen == {
        "a": {"MSMARCO (dev)": (0.365,), "Own (dev)": (0.2,)},
        "b": {"MSMARCO (dev)": (0.410,), "Own": (0.3,)},
        "c": {"MSMARCO (dev)": (0.420,), "Own (train)": (0.4,)},
    }
    assert "Not ranked, because they lack tasks that others have: a, b, c." in [note.strip() for note in standing.notes]


def test_evaluations_of_euroeval_that_differ_are_not_compared(tmp_path: Path) -> None:
    """On validation, without examples in the prompt, or by another metric, also in another file."""

    def line(model: str, metrics: tuple[str, ...] = ("test_mcc", "test_macro_f1"), **facts: Any) -> str:
        raw = [{name: 70.0 + seed for name in metrics} for seed in range(3)]
        results = {"raw": raw, "total": dict.fromkeys(metrics, 71.0)}
        return json.dumps({"model": model, "dataset": "angry", "results": results, **facts})

    usual = {"validation_split": False, "few_shot": True, "generative": True}
    lines = [
        line("x", **usual),
        line("old"),
        line("encoder", **usual | {"few_shot": False, "generative": False}),
        line("x", **usual | {"validation_split": True}),
        line("y", **usual | {"few_shot": False}),
    ]
    write(tmp_path / "one.jsonl", "\n".join(lines))
    write(tmp_path / "two.jsonl", line("z", ("test_macro_f1", "test_mcc"), **usual))
    standing = biphase.equivalent([tmp_path / "one.jsonl", tmp_path / "two.jsonl"])
    assert {name: [*known] for name, known in standing.results.scores.items()} == {
        "x": ["angry", "angry (validation)"],
        "old": ["angry"],
        "encoder": ["angry"],
        "y": ["angry (zero-shot)"],
        "z": ["angry (macro_f1)"],
    }
    assert any("Not ranked, because they lack tasks" in note and "y" in note for note in standing.notes)


HEAD = "method,task,seed,score\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("method,task,seed\na,t,0\n", r"table.csv:2: there is no column 'score'.*--rename THEIRS=score"),
        (HEAD + "a,t,0,0.5\nb,t,0,good\n", r"table.csv:3: 'score' is \"good\", not a number"),
        (HEAD + "a,t,0,0.5\nb,t,0,\n", "not a number: fix the row or remove it"),
        ("method,task,score,tokens\na,t,0.5,1\nb,t,1,many\n", r"csv:3: 'tokens' is \"many\", not a number"),
        (
            HEAD + "a,t,0,0.5\na,t,0,0.6\nb,t,0,1\n",
            r"csv:3: a second score of a on t, also with seed 0 \(.*csv:2",
        ),
        (HEAD + "a,t,0,0.5\na,t, 0.0,0.6\nb,t,0,1\n", r"csv:3: a second score of a on t, also with seed 0"),
        ("method,task,score\na,t,0.5\na,t,0.6\nb,t,1\n", "a second score of a on t, without a `seed`"),
        (
            "method,task,metric,score\na,t,f1,0.5\na,t,mcc,0.6\nb,t,f1,1\n",
            r"without a `seed` \(.*csv:2\); they differ in metric: give each a `seed`, or drop one, or rename",
        ),
        (HEAD + "a,t,0,0.5\n,t,0,0.6\n", r"csv:3: column 'method' is empty; fill it in, or remove the row"),
        (HEAD + "a,t,0,0.5\nb, ,0,0.6\n", r"csv:3: column 'task' is empty"),
        (HEAD + "a,t,0,0.5\na,OT,0,0.6\n", r"csv:3: reports call the mean over tasks OT; rename this task"),
        (HEAD + "a,t,0,0.5\na,t,1,0.6\n", r"1 method \(a\): there is nothing to compare"),
        ('method,task,score,examples\na,t,0.5,"[1, 1]"\nb,t,1,[1]\n', "'examples' is not the score 0.5"),
        ("method,task,score,examples\na,t,0.5,some\nb,t,1,[1]\n", "'examples' is not the score 0.5"),
    ],
)
def test_refusals(tmp_path: Path, text: str, told: str) -> None:
    write(tmp_path / "table.csv", text)
    with pytest.raises(InputError, match=told):
        run_command(["report", "results", str(tmp_path / "table.csv"), "--out", str(tmp_path / "report")])
    assert not (tmp_path / "report").exists()


HUGE = "1" + "0" * 400


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("t.jsonl", f'{{"method": "a", "task": "t", "score": {HUGE}}}', "'score' is 10*, not a number"),
        ("t.jsonl", f'{{"method": "a", "task": "t", "score": 1, "flops": {HUGE}}}', "'flops' is 10*, not a number"),
        ("t.jsonl", f'{{"method": "a", "task": "t", "score": 1, "examples": [{HUGE}]}}', "is not the score 1"),
        ("t.jsonl", '{"method": "a", "score": 1, "examples": "' + "[" * 200 + '"}', "is not the score 1"),
        (
            "a/SC/t/lr1_sd0/results.json",
            f'{{"test": {{"score": 1, "scores_i": [{HUGE}]}}}}',
            "is not a cell of EncodEval",
        ),
        (
            "a/SC/t/lr1_sd0/results.json",
            '{"test": {"score": 1, "scores_i": [1]}, "validation": {"score": null, "scores_i": [1]}}',
            "'validation.score' is null, not a number",
        ),
    ],
)
def test_numbers_that_no_float_holds_are_refused(name: str, text: str, told: str, tmp_path: Path) -> None:
    write(tmp_path / "results" / name, text)
    with pytest.raises(InputError, match=told):
        biphase.equivalent(tmp_path / "results" / ("" if "/" in name else name))


def test_the_other_seeds_choose_a_rate_in_folders_of_encodeval(tmp_path: Path) -> None:
    """Each seed is best on validation and on test at a rate of its own. Rates that all seeds chose together, or that a
    seed chose for itself, would test it at its luck; the verdict also counts the noise of the choice."""
    lucky = {("1e-05", 0): 0.9, ("2e-05", 1): 0.8, ("5e-05", 2): 0.7}
    for rate, seed in itertools.product(("1e-05", "2e-05", "5e-05"), range(3)):
        score = lucky.get((rate, seed), 0.5)
        for method, value, examples in (("a", score, [1, 0]), ("b", score - 0.25, [0, 0.5])):
            split = {"score": value, "scores_i": examples}
            path = tmp_path / method / "SC" / "t" / f"lr{rate}_sd{seed}" / "results.json"
            write(path, json.dumps({"validation": split, "test": split}))
    (a, b) = (
        result for result in judge_table(tmp_path, None, None, False, "seeds", {}).results.results if not result.cells
    )
    assert a.samples == (0.5, 0.5, 0.5) and b.samples == (0.25, 0.25, 0.25)
    assert a.choice and a.choice.draw_noise().variance > 0 and a.examples


def test_the_tables_of_a_report_hold_no_formulas(tmp_path: Path) -> None:
    method = "=cmd|' /C calc'!A0"
    rows = [
        row | {"method": method if row["method"] == "m0" else "＝x"}
        for row in draw_table(np.random.default_rng(0), [0, 0.1], [1, 1])
    ]
    biphase.equivalent(rows).report(tmp_path / "report")
    texts = [field for path in (tmp_path / "report").rglob("*.csv") for row in csv.reader(path.open()) for field in row]
    assert f"'{method}" in texts and "'＝x" in texts and not any(text.startswith(("=", "＝")) for text in texts)


def test_seeds_are_paired_in_any_spelling() -> None:
    """pandas writes a column of integers with a gap as floats."""
    rng = np.random.default_rng(11)
    levels, gaps = rng.normal(0.5, 0.05, 5), rng.uniform(0.01, 0.014, 5)
    told = set()
    for spell in (int, float, str, " {}".format, "{}.0".format):
        rows = [{"method": "a", "task": "t", "seed": seed, "score": level} for seed, level in enumerate(levels)]
        better = [{**row, "method": "b", "score": row["score"] + gap} for row, gap in zip(rows, gaps, strict=True)]
        told.add(str(biphase.equivalent([*rows, *({**row, "seed": spell(row["seed"])} for row in better)])))
    (only,) = told
    assert only.startswith("b is the best of 2 methods; 1 of 1 pair separated")


def test_seeds_of_a_budget_may_differ_by_some_percent() -> None:
    """FLOPs that differ by 1 % between seeds: the same verdicts, and one share with an interval."""
    rows = ladder(np.random.default_rng(12), 0.6)
    factors = 0.995, 1.0, 1.004, 1.009
    jittered = [row | {"flops": row["flops"] * factors[row["pretraining_seed"]]} for row in rows]
    equal, near = biphase.equivalent(rows), biphase.equivalent(jittered)
    assert [arm.flops for arm in near.results.models] == [1e18, 2e18, 4.01e18, 8.02e18, 2e18]
    assert near.sentences[0] == equal.sentences[0].replace("8e18", "8.02e18")
    ((price,),), ((exact,),) = ([listed.prices for listed in standing.prices] for standing in (near, equal))
    assert price.mean[0].share == pytest.approx(exact.mean[0].share, rel=0.01)
    assert "Budgets of a method that differ by at most 5 % count as one, with their mean: base, new." in near.notes
    assert not any("5 %" in note for note in equal.notes)
    spaced = [{"method": "log", "score": 0.5, "tokens": 1e6 * 1.03**step} for step in range(4)]
    assert len(biphase.equivalent([*spaced, {"method": "b", "score": 0.6}]).results.models) == 5, "one run's log"


def test_refusals_of_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = draw_table(np.random.default_rng(6), [0, 0.1], [0.01, 0.01])
    with pytest.raises(InputError, match="baseline 'm3'; known: m0, m1"):
        biphase.equivalent(rows, baseline="m3")
    write(tmp_path / "rows.jsonl", "\n".join(map(json.dumps, rows)))
    with pytest.raises(InputError, match=r"rename: column ''; known: .*method"):
        run_command(["report", "results", str(tmp_path / "rows.jsonl"), "--rename", "score"])
    run_command(["report", "results", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "report")])
    assert "m1 is the best of 2 methods" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(InputError, match="row 0: the column score is named twice"):
        biphase.equivalent([{"method": "a", "score": 1, "f1": 2}], rename={"f1": "score"})
    two = ladder(np.random.default_rng(7), 0.5)
    two += [row | {"method": "other"} for row in two if row["method"] == "base"]
    assert "name a `baseline`" in biphase.equivalent(two).notes[-1]


def test_what_is_odd_in_a_table_is_told() -> None:
    """Blanks around names do not count; names that differ in case, seeds that lack tasks, and odd signs are told."""
    rows = draw_table(np.random.default_rng(3), [0, 0.01], [0.01, 0.01])
    spelled = [row | {"method": f" {row['method']} "} if index % 2 else row for index, row in enumerate(rows)]
    assert str(biphase.equivalent(spelled)) == str(biphase.equivalent(rows))
    (partial,) = biphase.equivalent(rows[:-1]).notes[-1:]
    assert partial.startswith("Some seeds lack tasks.") and partial.strip().endswith(": m1 (1 seed).")
    cased = [row | {"task": "T1"} if row["task"] == "t1" and row["method"] == "m1" else row for row in rows]
    assert "differ only in case, and count as different: t1." in str(biphase.equivalent(cased))
    assert "Some scores are below 0" in str(biphase.equivalent([rows[0] | {"score": -0.6}, *rows[1:]]))
    assert "below 0" not in str(biphase.equivalent(rows))


def test_over_tasks_only_methods_with_all_tasks_are_ranked() -> None:
    """Counts of tasks do not tell: both of three methods have two tasks, and only some the same."""
    lacking = {"c": ("t0", "t1"), "d": tuple(f"t{task}" for task in range(11))}
    rows = [
        {"method": method, "task": f"t{task}", "score": 0.5 + 0.1 * place + 0.01 * ((7 * task + place) % 5)}
        for place, method in enumerate("abcd")
        for task in range(12)
        if f"t{task}" in lacking.get(method, (f"t{task}",))
    ]
    standing = biphase.equivalent(rows, over="tasks")
    assert [*standing.places] == ["b", "a"]
    assert "Not ranked, because they lack tasks that others have: c, d." in standing.notes
    with pytest.raises(InputError, match="no method has scores on all 3 tasks"):
        biphase.equivalent([{"method": m, "task": t, "score": 0.5} for m, t in ("ax", "ay", "bx", "bz")], over="tasks")


def test_losses_have_as_many_decimals_as_their_noise_needs(capsys: pytest.CaptureFixture[str]) -> None:
    """Bits per byte: two decimals would show each half width as 0.00."""
    rng = np.random.default_rng(5)
    rows = [
        {"method": f"m{number}", "seed": seed, "score": 1.06 + 0.01 * number + 0.001 * rng.normal()}
        for number in range(3)
        for seed in range(3)
    ]
    standing = biphase.equivalent(rows, lower_is_better=True)
    ranks, pairs = standing.tables
    mean = np.mean([row["score"] for row in rows[:3]])
    assert ranks.columns[0] == "score" and ranks.rows[0].cells[0].text == f"{-mean:.4f}"
    assert all(float(row.cells[0].reach) > 0 and len(row.cells[0].reach) == 6 for row in ranks.rows)
    assert all(re.fullmatch(r"\+0\.0\d{3}", row.cells[0].text) for row in pairs.rows)
    usual = biphase.equivalent([row | {"score": 0.1 * row["score"]} for row in rows]).tables[0]
    assert usual.columns[0] == "score (%)" and re.fullmatch(r"\d+\.\d\d", usual.rows[0].cells[0].text)


def test_losses_are_no_percent_in_any_output(tmp_path: Path) -> None:
    losses = biphase.equivalent(ladder(np.random.default_rng(4), 0.6, unit=-1.0), lower_is_better=True)
    scores = biphase.equivalent(ladder(np.random.default_rng(4), 0.6))
    for standing, is_percent in ((losses, False), (scores, True)):
        for head in ("points", "difference"):
            assert (head in standing.frames["pairs"]) == (head in standing.tables[1].columns)
            assert (head in standing.frames["pairs"]) == (is_percent == (head == "points"))
        assert ("percent" in standing.frames["ranks"]) == is_percent != ("score" in standing.frames["ranks"])
        assert ("(%)" in ladder_panel(standing.prices[0]).settings["ylabel"]) == is_percent
        assert ("score (%)" in standing.tables[-2].columns) == is_percent
        page = standing.report(tmp_path / str(is_percent))
        assert ("Test scores in %" in page.read_text(encoding="utf-8")) == is_percent
        tex = [path.read_text(encoding="utf-8") for path in (page.parent / "tables").glob("*.tex")]
        assert any(r"in \%, " in text for text in tex) == is_percent


def test_error_rates_with_a_scale_are_percent_and_a_column_of_losses_has_no_nats() -> None:
    rows = [
        {"method": m, "seed": seed, "loss": value + 0.001 * seed}
        for m, value in (("a", 0.1), ("b", 0.2))
        for seed in (0, 1)
    ]
    rename = {"loss": "score"}
    errors = biphase.equivalent(rows, lower_is_better=True, scale="share", rename=rename)
    assert errors.frames["ranks"].percent.to_list() == pytest.approx([-10.05, -20.05])
    assert errors.tables[0].columns[0] == "score (%)" and errors.frames["pairs"].points.to_list() == pytest.approx([10])
    (pair,) = biphase.equivalent(rows, lower_is_better=True, rename=rename).pairs
    assert pair.contrast and pair.contrast.unit == "points" and pair.a.arm.name == "a"


def test_nothing_speaks_of_seeds_where_tasks_are_repeated(tmp_path: Path) -> None:
    """Neither the table, with what would decide, nor the shares of compute; what one pretraining means is unknown."""
    spent = {
        ("base", 1e18): 0.5,
        ("base", 2e18): 0.55,
        ("base", 4e18): 0.6,
        ("new", 2e18): 0.551,
        ("third", 2e18): 0.552,
    }
    rows = [
        {"method": method, "task": f"t{task}", "seed": seed, "flops": flops}
        | {"score": mean + 0.02 * ((7 * task + place) % 5) + 0.003 * ((seed * (7 + task) + place) % 5)}
        for place, ((method, flops), mean) in enumerate(spent.items())
        for task, seed in itertools.product(range(6), range(3))
    ]
    told = dict[str, str]()
    for over in ("tasks", "seeds"):
        standing = biphase.equivalent(rows, over=over)
        page = standing.report(tmp_path / over)
        html = page.read_text(encoding="utf-8").replace("Each task counts as a seed: ", "")
        texts = [re.sub("<style>.*?</style>|<script>.*?</script>", "", html, flags=re.DOTALL), *standing.sentences]
        texts += [path.read_text(encoding="utf-8") for path in (page.parent / "tables").iterdir()]
        told[over] = " ".join(" ".join(texts).split())
    for phrase in ("95 % interval over {}", "variation over {}", "half of a score's 95 % interval over {}"):
        assert phrase.format("tasks") in told["tasks"] and phrase.format("seeds") in told["seeds"]
    assert "interval over tasks only)" in told["tasks"] and "pretrained once" in told["seeds"]
    assert " tasks instead of 6, if" in told["tasks"]
    assert "pretrained" not in told["tasks"] and not re.search(r"\bseeds\b", told["tasks"])


def test_a_page_names_only_parts_that_it_has(tmp_path: Path) -> None:
    page = biphase.equivalent(draw_table(np.random.default_rng(2), [0, 0.02], [0.01, 0.01])).report(tmp_path / "report")
    html = page.read_text(encoding="utf-8")
    assert "How verdicts are made" not in html and "part of the plan" not in html
    assert "every method here has every task" in html


def test_a_page_over_tasks_counts_tasks(tmp_path: Path) -> None:
    rows = draw_table(np.random.default_rng(2), [0, 0.02], [0.01, 0.01], num_seeds=1)
    page = biphase.equivalent(rows, over="tasks").report(tmp_path / "report").read_text(encoding="utf-8")
    assert "2 models on 3 tasks" in page and "mean over tasks" in page
    assert "fine-tuning seeds" not in page.partition("</header>")[0] and "mean over seeds" not in page


def test_names_of_methods_stay_whole(tmp_path: Path) -> None:
    """A name may be a number, begin with a star, which LaTeX would read after the end of a row, or have brackets."""
    rows = ladder(np.random.default_rng(4), 0.6)
    names = {"base": "GPT-2 (124M)", "new": "*ours"}
    rows = [row | {"method": names[row["method"]]} for row in rows]
    rows += [row | {"method": name} for row in rows if row["method"] == "*ours" for name in ("2024", "0012")]
    standing = biphase.equivalent(rows)
    page = standing.report(tmp_path / "report")
    html = page.read_text(encoding="utf-8")
    assert "2,024" not in html and ">2024<" in html and ">0012<" in html
    assert '<span class="title">Compute-equivalents: baseline GPT-2 (124M) with 4 budgets</span>' in html
    tex = (page.parent / "tables" / "compute-equivalents-methods.tex").read_text(encoding="utf-8")
    assert r"\caption{Compute-equivalents: baseline GPT-2 (124M) with 4 budgets.}" in tex
    assert "{*}ours" in tex and "\n*" not in tex


def test_a_ladder_that_falls_and_losses_that_are_given_as_they_are() -> None:
    """A method below the ladder's mean may lie above one of its budgets. Losses of any size are no percent."""
    spent = {("mlm", 1e15): 0.70, ("mlm", 2e15): 0.62, ("mlm", 4e15): 0.66, ("new", 2e15): 0.645}
    rows = [
        {"method": method, "seed": seed, "flops": flops, "score": mean + 0.001 * ((7 * seed) % 5)}
        for (method, flops), mean in spent.items()
        for seed in range(4)
    ]
    told = str(biphase.equivalent(rows))
    assert "new lies below the ladder of mlm, whose scores do not rise with each budget" in told
    assert "at all of its budgets" not in told
    steady = [row | {"score": row["score"] - 0.05} if row["method"] == "new" else row for row in rows]
    assert "new scores below mlm at all of its budgets" in str(biphase.equivalent(steady))
    losses = [
        {"method": m, "task": t, "score": v} for m in "ab" for t, v in (("wiki", 0.95), ("code", 1.35), ("x", 310))
    ]
    standing = biphase.equivalent([row | {"seed": s} for s in (0, 1) for row in losses], lower_is_better=True)
    assert {100 * mean.mean for mean in (scores["x"] for scores in standing.results.scores.values())} == {-310.0}


def test_budgets_of_equal_flops_and_other_tokens_are_kept_apart() -> None:
    spent = {("A", 1e9): 0.5, ("A", 2e9): 0.7, ("B", 1e9): 0.6}
    rows = [
        {"method": method, "seed": seed, "flops": 1e18, "tokens": tokens, "score": mean + 0.002 * ((7 * seed) % 5)}
        for (method, tokens), mean in spent.items()
        for seed in range(4)
    ]
    names = {arm.name for arm in biphase.equivalent(rows).results.models}
    assert names == {"A @ 1e18 FLOPs, 1e9 tokens", "A @ 1e18 FLOPs, 2e9 tokens", "B"}


def test_shares_of_one_method_beside_percent_of_another_are_refused() -> None:
    rows = draw_table(np.random.default_rng(4), [0, 0], [0.01, 0.01])
    mixed = [row | {"score": 100 * row["score"]} if row["method"] == "m1" else row for row in rows]
    for judged in (biphase.equivalent, lambda table: biphase.judge(table, baseline="m0", candidate="m1")):
        with pytest.raises(InputError, match=r"m1 has scores up to 8\d.*, and m0 none above 1: are these shares"):
            judged(mixed)
    assert biphase.equivalent(mixed, scale="percent"), "a method that collapsed may have less than 1 %"
    assert biphase.judge(mixed, baseline="m0", candidate="m1", scale="percent")
    losses = [row | {"score": 3 * row["score"]} if row["method"] == "m1" else row for row in rows]
    assert biphase.judge(losses, baseline="m0", candidate="m1", lower_is_better=True)
