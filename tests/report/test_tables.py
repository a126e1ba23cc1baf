"""Every published cell is in the tables as it was printed; marks, gaps and foreign characters."""

import csv
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from biphase.finetuning.scores import ExampleTable, KeptExamples
from biphase.report.contrasts import with_averages
from biphase.report.figures import fill_panels
from biphase.report.paper import read_reference, report_paper
from biphase.report.results import ReportArm, Result, ResultSet
from biphase.report.statistics import Interval
from biphase.report.tables import CSV_COLUMNS, Table, make_tables, relative_flops, table_files, wide_table

CLM = ReportArm("clm", "objective", "1m", "clm", None, 1000, 1000, 0)
MLM = ReportArm("mlm", "objective", "1m", "mlm", 40, 1000, 0, 1000)


def known_mean(arm: ReportArm, mean: float, half_width: float, num: int = 5) -> Result:
    """A score of which the mean ± is known."""
    return Result(arm, "SC", "a", "paper", summary=Interval(mean, mean - half_width, mean + half_width, num=num))


def to_markdown(table: Table) -> str:
    return table_files([table])[f"tables/{table.name}.md"]


def to_latex(table: Table) -> str:
    return table_files([table])[f"tables/{table.name}.tex"]


def to_csv(table: Table) -> str:
    return table_files([table])[f"tables/{table.name}.csv"]


@pytest.fixture(scope="module")
def published() -> list[Table]:
    return make_tables(read_reference())


def test_published_tables_are_2_to_17(published: list[Table]) -> None:
    assert [int(table.name.split("-")[1]) for table in published] == list(range(2, 18))
    assert [(table.name, len(table.rows)) for table in published[::5]] == [
        ("table-02-objective-sc-paper", 15),
        ("table-07-efficiency-tc-paper", 12),
        ("table-12-ratio-qa-paper", 15),
        ("table-17-cpt-ir-paper", 8),
    ]
    assert published[0].columns == ("SST-2", "QQP", "MNLI", "Average")


def test_every_published_cell_is_there_unchanged(published: list[Table]) -> None:
    printed = [(100 * result.mean, 100 * result.interval.half_width) for result in read_reference().results]
    wanted = sorted((f"{mean:.2f}", f"{half_width:.2f}") for mean, half_width in printed)
    assert len(wanted) == 800
    markdown = r"(\d+\.\d\d)(?:\*\*)? \(± (\d+\.\d\d)\)"
    assert sorted(pair for table in published for pair in re.findall(markdown, to_markdown(table))) == wanted
    latex = r"(\d+\.\d\d)\}?(?:\$\^\{=\}\$)? \{\\scriptsize\(\$\\pm\$\\,(\d+\.\d\d)\)\}"
    assert sorted(pair for table in published for pair in re.findall(latex, to_latex(table))) == wanted
    rows = [row for table in published for row in csv.DictReader(to_csv(table).splitlines())]
    assert sorted((row["mean"], row["half_width"]) for row in rows) == wanted


def test_cells_stand_where_they_belong(published: list[Table]) -> None:
    """CLM 10,000 of 42,000 steps on SQuAD: 79.20 ± 0.22, the best of its budget."""
    row = next(line for line in to_markdown(published[10]).splitlines() if line.startswith("| 610M | 42,000 | 10,000"))
    assert row == (
        "| 610M | 42,000 | 10,000 | 32,000 | 1.02 | **79.20** (± 0.22) | **72.33** (± 0.81) | **51.79** (± 1.50) | "
        "**67.77** (± 0.53) |"
    )
    line = r"610M & 42,000 & 10,000 & 32,000 & 1.02 & \textbf{79.20} {\scriptsize($\pm$\,0.22)} & "
    assert line in to_latex(published[10])
    rows = csv.DictReader(to_csv(published[10]).splitlines())
    assert {"arm": "610m-clm-10k-mlm40-42k", "dataset": "SQuAD", "mean": "79.20", "mark": "best"}.items() <= next(
        row for row in rows if row["arm"] == "610m-clm-10k-mlm40-42k"
    ).items()


@pytest.mark.parametrize(
    ("other", "marks"),
    [
        ((0.50, 0.51, 0.52), ["best", ""]),  # always 0.1 below, so beyond noise
        ((0.75, 0.51, 0.48), ["best", "tied"]),
        ((0.50,), ["best", "tied"]),  # nothing is known about its noise
    ],
)
def test_marks(other: tuple[float, ...], marks: list[str]) -> None:
    scores = [Result(CLM, "SC", "a", "standard", (0.60, 0.611, 0.62)), Result(MLM, "SC", "a", "standard", other)]
    (table,) = make_tables(ResultSet(tuple(scores)))
    assert table.columns == ("a",)
    assert [row.cells[0].mark for row in table.rows] == marks


def test_marks_by_means_and_half_widths() -> None:
    """0.60 ± 0.02 against 0.57 ± 0.02, five seeds: the difference has an interval of 0.03 ± 2.306 · 0.0144."""

    def table_of(mean: float) -> Table:
        cells = [known_mean(arm, value, 0.02) for arm, value in ((CLM, 0.60), (MLM, mean))]
        return make_tables(ResultSet(tuple(cells)))[0]

    assert [row.cells[0].mark for row in table_of(0.57).rows] == ["best", "tied"]
    assert [row.cells[0].mark for row in table_of(0.56).rows] == ["best", ""]


def test_blocks_compete_alone(published: list[Table]) -> None:
    for table in published:
        for block in {row.block for row in table.rows}:
            for column in range(len(table.columns)):
                cells = [row.cells[column] for row in table.rows if row.block == block]
                best = [cell.score for cell in cells if cell.mark == "best"]
                if not any(cell.score.mean for cell in cells if cell.score):
                    assert not best, "zero is no best score"
                    continue
                assert len(best) == 1 and best[0]
                assert all(cell.score.mean <= best[0].mean for cell in cells if cell.score)


def test_gaps_are_shown_and_listed() -> None:
    cells = [Result(CLM, "SC", name, "standard", (0.5, 0.6)) for name in ("a", "b")]
    cells += [Result(MLM, "SC", "a", "standard", (0.5, 0.6)), Result(MLM, "QA", "c", "standard", (0.5, 0.6))]
    tables = make_tables(with_averages(ResultSet(cells)))
    assert [table.name for table in tables] == ["table-02-objective-sc-standard", "table-04-objective-qa-standard"]
    text = to_markdown(tables[0])
    assert "Missing: mlm: b; mlm: Average." in text
    assert "| mlm | 1m | MLM | 40 % | 55.00 (± 63.53) = | – | – |" in text, "by the study's own name"
    assert "paper" not in tables[0].whole_title
    assert "-- & --" in to_latex(tables[0])
    assert len(to_csv(tables[0]).splitlines()) == 1 + 4


def test_metrics_have_tables_of_their_own() -> None:
    cells = [Result(CLM, "TC", "a", metric, (0.5, 0.6)) for metric in ("standard", "paper")]  # type: ignore[arg-type]
    tables = make_tables(ResultSet(tuple(cells)))
    assert [table.name for table in tables] == ["table-03-objective-tc-standard", "table-03-objective-tc-paper"]
    assert "F1 of entities" in tables[0].measures and "macro-F1" in tables[1].measures


def test_flops_are_relative_to_mlm_with_as_many_tokens_in_every_table() -> None:
    """The usual ratio is the baseline wherever it stands, whatever the number of steps; without MLM it is the first;
    and what has no FLOPs has no share."""
    arms = {
        replace(CLM, name="clm", flops=1.3): "1.30",
        replace(MLM, name="mlm", flops=1.0): "1.00",
        replace(MLM, name="mlm20", mask_percent=20, flops=1.02): "1.02",
        replace(MLM, name="mlm-2k", pretrain_steps=2000, mlm_steps=2000, flops=2.0): "1.00",
        replace(MLM, name="odd", setup="other", is_plain=False, pretrain_steps=400, tokens=1e6, flops=1.152): "1.15",
        replace(CLM, name="clm-500", setup="other", pretrain_steps=500, flops=0.5): "1.00",
        replace(MLM, name="mix-500", setup="other", pretrain_steps=500, is_plain=False, flops=0.6): "1.20",
        ReportArm("random", "control", "1m"): "–",
    }
    arms = {replace(arm, tokens=arm.tokens or 1000.0 * arm.pretrain_steps): told for arm, told in arms.items()}
    results = ResultSet([Result(arm, "SC", "a", "standard", (0.5, 0.6)) for arm in arms])
    shown = {}
    for table in [wide_table(results, "standard"), *make_tables(results)]:
        column = table.stub.index("relative FLOPs")
        shown |= {(table.name, row.stub[0]): row.stub[column] for row in table.rows}
        assert "Relative FLOPs: " in table.notes[1]
        lines = list(csv.DictReader(to_csv(table).splitlines()))
        assert all(line["relative_flops"] == arms_by_name(arms)[line["arm"]].strip("–") for line in lines)
    assert len(shown) == 2 * len(arms)
    assert all(told == arms_by_name(arms)[name] for (_, name), told in shown.items())
    rungs = [arm for arm in arms if arm.name in ("mlm", "mlm-2k")]
    told = {arm.name: relative_flops(arm, rungs, 40) for arm in arms if arm.name in ("clm", "clm-500", "mix-500")}
    assert told == {"clm": "1.30", "clm-500": "–", "mix-500": "–"}, "no rung of the ladder has 500 steps' tokens"
    unknown = ResultSet([replace(result, arm=replace(result.arm, flops=None)) for result in results.results])
    assert "relative FLOPs" not in wide_table(unknown, "standard").stub


def arms_by_name(arms: dict[ReportArm, str]) -> dict[str, str]:
    return {arm.name: told for arm, told in arms.items()}


def test_captions_say_what_was_Result() -> None:
    """cola's Matthews correlation stands beside genre's accuracy, and their average is of both."""

    def make(*measures: str) -> ResultSet:
        cells = [
            Result(arm, "SC", dataset, "standard", (0.5, 0.6), measure=measure)
            for arm in (CLM, MLM)
            for dataset, measure in zip(("genre", "cola"), measures, strict=False)
        ]
        return with_averages(ResultSet(cells))

    mixed = "accuracy on genre and Matthews correlation on cola, which averages mix"
    for measures, told in ((("accuracy", "mcc"), mixed), (("mcc", "mcc"), "Matthews correlation")):
        results = make(*measures)
        (table,) = make_tables(results)
        assert f", sequence classification ({told})" in table.whole_title
        assert f"(sequence classification: {told})" in wide_table(results, "standard").whole_title
        labels = {panel.settings["ylabel"].replace("\n", " ") for panel in fill_panels("objective-by-size", results)}
        assert labels == {"mean of accuracy and Matthews correlation (%)" if told is mixed else f"{told} (%)"}
    known, unknown = make("accuracy", "accuracy"), make("", "")
    assert make_tables(known)[0].whole_title == make_tables(unknown)[0].whole_title
    assert "(accuracy)" in make_tables(known)[0].whole_title


def test_one_seed_has_no_half_width() -> None:
    (table,) = make_tables(ResultSet((Result(CLM, "SC", "a", "standard", (0.5,)),)))
    assert "50.00 (± –)" in to_markdown(table)
    assert r"50.00 {\scriptsize($\pm$\,--)}" in to_latex(table)
    (row,) = csv.DictReader(to_csv(table).splitlines())
    assert (row["half_width"], row["num_seeds"]) == ("", "1")
    (table,) = make_tables(ResultSet((Result(CLM, "SC", "a", "standard", (0.5, 0.5)),)))
    assert "50.00 (± –)" in to_markdown(table), "two equal seeds are not certain"


def test_each_score_of_a_csv_has_a_place_of_its_own() -> None:
    """Means over a family and over all tasks stand under the heads of their columns."""
    tasks: tuple[tuple[str, str], ...] = (("SC", "a"), ("SC", "b"), ("TC", "c"))
    cells = [Result(arm, *place, "standard", (0.5, 0.6)) for arm in (CLM, MLM) for place in tasks]
    rows = list(csv.DictReader(to_csv(wide_table(with_averages(ResultSet(cells)), "standard")).splitlines()))
    places = [(row["arm"], row["family"], row["dataset"]) for row in rows]
    assert len(set(places)) == len(places)
    assert [place[1:] for place in places if place[0] == CLM.name] == [
        *(("", "all tasks"), ("SC", "SC mean"), ("SC", "a"), ("SC", "b"), ("TC", "c"))
    ]


def test_mixed_batches_and_falling_masks_are_labelled_as_such() -> None:
    arm = replace(MLM, setup="other", objective="clm+mlm", curriculum="MLM with 25 % CLM", masks="40–15")
    table = wide_table(ResultSet((Result(arm, "SC", "a", "standard", (0.5, 0.6)),)), "standard")
    assert "| MLM with 25 % CLM | 40–15 % |" in to_markdown(table)
    assert r"MLM with 25 \% CLM & 40--15 \%" in to_latex(table)
    (row,) = csv.DictReader(to_csv(table).splitlines())
    assert (row["objective"], row["mask_percent"]) == ("MLM with 25 % CLM", "40–15")


def test_one_and_the_same_for_all_is_marked_by_every_metric_and_is_never_the_best() -> None:
    """A tagger that says O everywhere has 0 by entities and 66.87 by the paper's metric, which keeps no examples."""
    kept = KeptExamples((), ExampleTable("a", np.zeros((2, 4)), num_degenerate=2))
    for metric, score, known in (("standard", 0.0, "examples"), ("paper", 0.6687, "predicted")):
        scores = [Result(arm, "TC", "a", metric, (score, score), **{known: kept}) for arm in (CLM, MLM)]  # type: ignore[arg-type]
        cells = [cell for row in wide_table(ResultSet(scores), metric).rows for cell in row.cells]
        assert [(cell.text, cell.mark) for cell in cells] == [(f"{100 * score:.2f}†", "")] * 2


def test_names_cannot_break_a_table() -> None:
    arm = replace(CLM, name="a|b, 50 % \\ {x}", setup="other")
    (table,) = make_tables(ResultSet((Result(arm, "SC", "a_b&c", "standard", (0.5, 0.6)),)))
    assert r"a\|b, 50 % \ {x}" in to_markdown(table)
    assert r"a\_b\&c" in to_latex(table) and r"50 \% \textbackslash{} \{x\}" in to_latex(table)
    (row,) = csv.DictReader(to_csv(table).splitlines())
    assert row["arm"] == "a|b, 50 % \\ {x}"
    assert tuple(row) == CSV_COLUMNS


def test_latex_is_balanced(published: list[Table]) -> None:
    for table in published:
        text = to_latex(table)
        assert text.count("{") == text.count("}") and text.count("$") % 2 == 0
        columns = len(table.stub) + len(table.columns)
        body = text.split(r"\midrule", 1)[1].split(r"\bottomrule")[0]
        assert {line.count(" & ") for line in body.splitlines() if line.endswith(r"\\")} == {columns - 1}


@pytest.fixture(scope="module")
def latex_files(published: list[Table], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all tables that a report on the paper's scores has, and of one with signs in its names."""
    folder = tmp_path_factory.mktemp("latex")
    arm = replace(CLM, name="[a] <b|c> 50 % → √2·² “x” # ~ ^ & $ _ \\ é", setup="other")
    cells = [Result(arm, "SC", name, "standard", (0.5, 0.6)) for name in ("[a_b]", "≤ × ≥ − ≈ ÷ ± † …")]
    with pytest.MonkeyPatch.context() as patch:  # figures take four fifths of the time
        patch.setattr("biphase.report.page.list_figures", lambda *_: ({}, []))
        report_paper(folder / "report")
    (folder / "signs" / "tables").mkdir(parents=True)
    tables = make_tables(ResultSet(tuple(cells)))
    for name, text in table_files(tables).items():
        (folder / "signs" / name).write_text(text)
    return folder


def test_latex_has_no_sign_that_pdflatex_stops_at(latex_files: Path) -> None:
    files = sorted(latex_files.glob("*/tables/*.tex"))
    assert len(files) > 18
    for file in files:
        assert set(re.findall(r"[^\x00-\x7f]", file.read_text())) <= {"é"}, file.name


@pytest.mark.parametrize("compiler", ["pdflatex", "lualatex"])
@pytest.mark.parametrize("name", ["report", "signs"])
def test_latex_compiles_and_fits_the_page(latex_files: Path, name: str, compiler: str, tmp_path: Path) -> None:
    """`document.tex`, which has all tables, and says how it is compiled."""
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    folder = latex_files / name / "tables"
    files = {file.stem for file in folder.glob("*.tex")} - {"document"}
    command = [compiler, "-halt-on-error", "-interaction=nonstopmode", f"-output-directory={tmp_path}", "document.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not re.search("Overfull|too large", done.stdout), done.stdout[-2000:]
    assert {Path(read).stem for read in re.findall(r"\((?:\./)?([\w.-]+\.tex)", done.stdout)} >= files
    assert (tmp_path / "document.pdf").stat().st_size > 10_000


def test_captions_are_short(latex_files: Path) -> None:
    for file in (latex_files / "report" / "tables").glob("*.tex"):
        for caption in re.findall(r"\\caption\{(.*)\}", file.read_text()):
            assert len(caption) < 160, (file.name, caption)


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_the_methods_are_two_pages(tmp_path: Path) -> None:
    text = Path(__file__).parents[2] / "docs" / "methods.tex"
    command = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", f"-output-directory={tmp_path}", str(text)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "(2 pages" in done.stdout and "Overfull" not in done.stdout, done.stdout[-2000:]


def test_wide_latex_is_in_parts(latex_files: Path) -> None:
    """The means come first, then the datasets of each family."""
    first, *parts = (latex_files / "report/tables/all-paper.tex").read_text().split(r"\toprule")[1:]
    heads = [part.strip().partition("\n")[0] for part in (first, *parts)]
    stub = r"model & network & steps & objective & masked & relative FLOPs & "
    assert heads[0] == rf"{stub}all tasks & SC mean & TC mean & QA mean & IR mean \\"
    assert heads[1] == rf"{stub}SST-2 & QQP & MNLI \\" and len(heads) == 5
    assert "part 2 of 5" in first


def test_tables_without_numbers_are_named_by_what_they_compare() -> None:
    (table,) = make_tables(ResultSet((Result(replace(CLM, setup="other"), "TC", "a", "standard", (0.5, 0.6)),)))
    assert (table.name, "paper's table" in table.whole_title) == ("table-other-tc-standard", False)


def test_files(published: list[Table]) -> None:
    files = table_files(published[:2])
    assert list(files)[:3] == [f"tables/{published[0].name}{suffix}" for suffix in (".md", ".tex", ".csv")]
    assert len(files) == 7 and all(files.values())
