"""The page is complete in itself, escapes what it is given, shows everything, and sorts (in Chromium, if there)."""

import csv
import math
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from biphase import style
from biphase.errors import SOURCE, InputError
from biphase.report.claims import judge_claims, tell_finding
from biphase.report.contrasts import with_averages
from biphase.report.figures import FIGURES, FigurePart, Panel, list_figures, plot_panel, save_figure
from biphase.report.formats import show_difference, show_estimate, show_p_value, show_points, show_superscript
from biphase.report.page import (
    PageText,
    count_verdicts,
    find_ticks,
    inline_svg,
    list_effects,
    list_leads,
    name_labels,
    split_stubs,
    tell_arm,
    tell_evidence,
    write_report,
)
from biphase.report.paper import judge_paper, measure_findings, read_reference, report_paper
from biphase.report.results import ReportArm, Result, ResultSet
from biphase.report.statistics import Interval
from biphase.report.tables import wide_table
from biphase.style import SERIES

VOID = {"meta", "link", "br", "hr", "img", "input", "path", "use", "line", "circle", "rect"}


@dataclass
class Page(HTMLParser):
    """What a browser would see: tags with their attributes, words outside of styles and scripts, and tags left open."""

    tags: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    cells: list[str] = field(default_factory=list)
    """The words that stand in a cell of a table, apart from small print."""
    open_tags: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {key: value or "" for key, value in attrs}))
        if tag not in VOID:
            self.open_tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {key: value or "" for key, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open_tags[-1:]):
            self.words.append(data)
        if {"td", "u"} & set(self.open_tags[-1:]):
            self.cells.append(data)

    def all(self, tag: str, **attributes: str) -> list[dict[str, str]]:
        return [
            found
            for name, found in self.tags
            if name == tag and all(found.get(key.rstrip("_")) == value for key, value in attributes.items())
        ]


def parse(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    page.close()
    assert page.open_tags == []
    return page


@pytest.fixture(scope="module", autouse=True)
def quick_fonts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fonts that are not subset: half of the time."""
    quick = tmp_path_factory.mktemp("style") / "quick.mplstyle"
    quick.write_text(style.PLOT_STYLE.read_text().replace("pdf.fonttype: 42", "pdf.fonttype: 3"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("biphase.report.figures.PLOT_STYLE", quick)
        yield


@pytest.fixture(scope="module")
def paper_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report_paper(tmp_path_factory.mktemp("report") / "paper").page


@pytest.fixture(scope="module")
def paper(paper_file: Path) -> Page:
    return parse(paper_file)


@pytest.fixture(scope="module")
def part() -> ResultSet:
    """Little to draw: one comparison on one family, without its CLM."""
    results = read_reference().select("SC", setup="efficiency", pretrain_steps=1000).results
    return with_averages(ResultSet(results))


def test_nothing_is_loaded(paper: Page, paper_file: Path) -> None:
    """No address anywhere that a browser would fetch; and a policy that forbids it."""
    for tag, attributes in paper.tags:
        for key in ("src", "srcset", "data", "action", "poster", "background"):
            assert key not in attributes, f"<{tag} {key}>"
        for key in ("href", "xlink:href"):
            address = attributes.get(key, "#")
            assert re.fullmatch(r"#[\w.-]+|#|(figures|tables)/[\w.-]+", address), f"<{tag} {key}={address}>"
    assert not paper.all("link") and not paper.all("iframe") and not paper.all("img")
    text = paper_file.read_text()
    assert "@import" not in text and not re.search(r"url\((?!#)", text)
    (policy,) = (meta["content"] for meta in paper.all("meta") if "http-equiv" in meta)
    assert policy.startswith("default-src 'none'")


def test_links_lead_somewhere(paper: Page, paper_file: Path) -> None:
    ids = [attributes["id"] for _, attributes in paper.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in paper.tags:
        address = attributes.get("href") or attributes.get("xlink:href") or ""
        if address.startswith("#"):
            assert address[1:] in ids, address
        elif address:
            assert (paper_file.parent / address).is_file(), address


def test_every_published_cell_is_on_the_page(paper: Page, paper_file: Path) -> None:
    """Each model once, in whichever tables of the paper it is, with the mean over all tasks, which is not published;
    and that mean once more where its compute-equivalent is told."""
    scores = Counter(word.strip() for word in paper.cells if re.fullmatch(r"[0-9]+[.][0-9]{2} ?", word))
    published = {(one.arm.name, one.family, one.dataset): one for one in read_reference().results}.values()
    prices, by_task = (
        (paper_file.parent / "tables" / f"compute-equivalents-610M{ending}.md").read_text()
        for ending in ("", "-by-task")
    )
    rows = csv.DictReader((paper_file.parent / "tables" / "all-paper.csv").read_text().splitlines())
    relative = Counter({row["arm"]: row["relative_flops"] for row in rows}.values())
    relative += Counter(re.findall(r"^\| 610m-.*? \| [\d,]+ \| ([\d.]+) ", prices + by_task, re.MULTILINE))
    scores -= relative
    found = scores - Counter(f"{100 * one.mean:.2f}" for one in published)
    num_means = len({one.arm.name for one in published}) + prices.count("| 610m-")
    assert scores.total() == len(published) + num_means and found.total() == num_means
    widths = Counter(word for word in paper.words if word.startswith("± "))
    assert not Counter(f"± {100 * one.interval.half_width:.2f}" for one in published) - widths


def test_findings_and_figures_are_there(paper: Page) -> None:
    text = " ".join(paper.words)
    for finding in judge_claims(measure_findings(read_reference())):
        assert finding.statement in text
        assert bool(paper.all("article", id=finding.key)) == finding.is_tested == (finding.key not in ("F5", "F7"))
        if finding.is_tested:
            assert finding.rule in text
        for claim in finding.claims if finding.is_tested else ():
            assert claim.statement in text
            for inequality in claim.inequalities:
                assert inequality.label in text and show_points(inequality.estimate) in text
    missing = {"rate-spread", "masking-after-clm"}
    for name in FIGURES:
        assert bool(paper.all("figure", id=f"figure-{name}")) == (name not in missing)
    assert "No figure: “Spread over fine-tuning rates” needs" in text
    assert "200 of 200 averages equal the mean over their datasets" in text
    assert "F5 cannot be tested" in text and "hgissbkh/EncodEval" in text


def test_compute_equivalents_are_on_the_page(paper: Page, paper_file: Path) -> None:
    text = " ".join(" ".join(paper.words).split())
    assert (
        "from 0.82 [0.71, 0.95] for CLM for 11,000 steps, then MLM for 11,000 (610m-clm-11k-mlm40-22k) to 1.6" in text
    )
    assert "interval over fine-tuning seeds only; each model was pretrained once" in text
    assert "79.91 ± 0.96" in text and "79.91 ± 1.33" not in text, "one interval, as in the table of all models"
    assert paper.all("section", id="compute-equivalents") and paper.all("figure", id="figure-compute-equivalents")
    for suffix in (".md", ".tex", ".csv"):
        table = (paper_file.parent / "tables" / f"compute-equivalents-610M{suffix}").read_text()
        assert "610m-clm-11k-mlm40-22k" in table


def test_a_page_is_small(paper_file: Path) -> None:
    """46 models, 19 columns and nine figures; before, their drawings alone were 600 kB."""
    assert paper_file.stat().st_size < 400_000


def test_tables_can_be_sorted_by_keyboard(paper: Page) -> None:
    tables = paper.all("table", class_="scores sortable")
    assert [table["id"] for table in tables] == [
        "all-paper",
        *(f"compute-equivalents-610M{end}" for end in ("", "-by-task")),
    ]
    headers = [header for header in paper.all("th") if "aria-sort" in header]
    assert headers and {(header["aria-sort"], header["scope"]) for header in headers} == {("none", "col")}
    assert len(paper.all("button", type="button")) == len(headers)
    assert len(paper.all("script")) == 1


def test_what_is_given_is_escaped_and_shown(part: ResultSet, tmp_path: Path) -> None:
    hostile = "<script>alert('x')</script> & \"quotes\""
    told = PageText(
        hostile,
        hostile,
        costs=[{"stage": hostile, "device": f"8 × {hostile}", "device hours": "1.2e+03"}],
        commands=[f"echo {hostile}"],
        plan_svg='<svg width="9pt" viewBox="0 0 9 9"><g id="g_1"><path id="tree"/><use href="#tree"/></g></svg>',
        missing=[hostile],
    )
    file, *_ = write_report(part, tmp_path / "report", told)
    page = parse(file)
    assert len(page.all("script")) == 1
    assert "".join(page.words).count("alert('x')") == 8  # title (2), question, costs (3), command, missing line
    assert page.all("path", id="tree") and page.all("use", href="#tree") and not page.all("g", id="g_1")
    assert page.all("section", id="costs") and page.all("section", id="reproduce") and page.all("section", id="plan")


def test_an_earlier_report_is_replaced_and_nothing_else(part: ResultSet, tmp_path: Path) -> None:
    out = tmp_path / "report"
    page, *_ = write_report(part, out, PageText("one", ""))
    assert write_report(part, out, PageText("two", ""))[0] == page
    assert "<h1>two</h1>" in page.read_text()
    (out / "tables" / "notes.csv").write_text("mine")
    with pytest.raises(InputError, match=r"notes\.csv is not as biphase wrote it"):
        write_report(part, out, PageText("three", ""))
    assert (out / "tables" / "notes.csv").read_text() == "mine" and "<h1>two</h1>" in page.read_text()
    other = tmp_path / "work"
    other.mkdir()
    (other / "index.html").write_text("<html>my own page</html>")
    for folder, said in ((other, "has files that biphase did not write"), (other / "index.html", "is a file")):
        with pytest.raises(InputError, match=said):
            write_report(part, folder, PageText("three", ""))
    assert (other / "index.html").read_text() == "<html>my own page</html>"


def test_no_scores_no_report(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no finished score"):
        write_report(ResultSet(()), tmp_path / "report", PageText("", ""))
    assert not (tmp_path / "report").exists()


def test_a_report_without_claims_has_no_verdicts(part: ResultSet, tmp_path: Path) -> None:
    page = parse(write_report(part, tmp_path / "report", PageText("plain", ""))[0])
    assert not page.all("section", id="verdicts") and not page.all("a", href="#verdicts")
    assert page.all("section", id="tables")


def test_inline_svg() -> None:
    """As it was drawn, in colours of the page; no size, no declarations, no ids of groups; what repeats is a class."""
    text = (
        '<?xml version="1.0"?>\n<!DOCTYPE svg>\n<svg xmlns="http://www.w3.org/2000/svg" '
        'xmlns:xlink="http://www.w3.org/1999/xlink" width="10pt" height="20pt" viewBox="0 0 1 1">'
        '<metadata>m</metadata><defs><style type="text/css">*{color:red}</style></defs><clipPath id="p1"/>'
        '<g id="axes_1"><g id="line2d_1" clip-path="url(#p1)" style="stroke: #1a1a1a; fill: #dcdcdc">'
        '<use xlink:href="#m2" x="1.2345" width="3"/></g></g><path id="m2" style="stroke: #1a1a1a; fill: #dcdcdc"/>'
        "<text>0.1234</text></svg>"
    )
    styles = {"fill: none": "s0"}
    assert inline_svg([FigurePart("whole", text)], styles) == (
        '<svg class="whole" viewBox="0 0 1 1"><clipPath id="p1"/><g><g clip-path="url(#p1)" class="s1">'
        '<use href="#m2" x="1.2" width="3"/></g></g><path id="m2" class="s1"/><text>0.1234</text></svg>'
    )
    assert styles == {"fill: none": "s0", "stroke: currentColor; fill: var(--grid)": "s1"}


def test_panels_are_parts_that_may_be_stacked(paper_file: Path, tmp_path: Path) -> None:
    """A legend and a part for each panel, which have all words of the file and no name that leads nowhere."""
    text = (paper_file.parent / "figures" / "splits.svg").read_text()
    plots, _ = list_figures(read_reference())
    parts = inline_svg(save_figure("splits", plots["splits"], tmp_path), {})
    assert re.findall(r'<svg class="(\w+)"', parts) == ["legend", *["panel"] * 4]
    words = re.compile(r"<text[^>]*>([^<]+)</text>")
    assert sorted(words.findall(parts)) == sorted(words.findall(text))
    named = set(re.findall(r"(?:url\(|href=\")#([\w-]+)", parts))
    ids = re.findall(r' id="([^"]+)"', parts)
    assert named and named <= set(ids) and len(ids) == len(set(ids))
    assert len(parts) < 0.6 * len(text)


def test_panels_have_equal_boxes_with_all_words_inside(tmp_path: Path) -> None:
    """Labels of six digits and of two, as Chromium would see them: no label is cut, and all axes are as wide."""
    wide = [
        Panel("lines", [("a", SERIES[0], [(x, Interval(x, x, x), 5.0)])], {"ylabel": "y"}) for x in (0.5, 5e3, 1, 2)
    ]
    legend, *panels = save_figure("wide", [partial(plot_panel, panel) for panel in wide], tmp_path)
    boxes = [[float(word) for word in re.findall(r'viewBox="([^"]+)"', part.svg)[0].split()] for part in panels]
    assert legend.kind == "legend" and len({(width, height) for _, _, width, height in boxes}) == 1
    for part, (left, top, width, height) in zip(panels, boxes, strict=True):
        places = re.findall(r'<text [^>]*x="([-0-9.]+)" y="([-0-9.]+)"', part.svg)
        assert places
        for x, y in places:
            assert left < float(x) < left + width and top < float(y) < top + height


def test_an_estimate_has_two_digits() -> None:
    values = (0.0, 0.0213, 0.56, 1.5, 9.96, 12.5, 99.6, 648_000)
    assert [show_estimate(value) for value in values] == ["0", "0.021", "0.56", "1.5", "10.0", "12", "100", "650,000"]


def test_hypotheses_are_shown_as_verdicts_are(part: ResultSet, tmp_path: Path) -> None:
    """Each with its p-value and what would decide it, so that nobody has to guess why it is undecided."""
    findings = judge_claims(measure_findings(read_reference()))
    page_text = PageText("plain", "", hypotheses=(findings, ["declared today", "Replaced: others"]))
    page = parse(write_report(part, tmp_path / "report", page_text)[0])
    text = " ".join(page.words)
    inequalities = [one for finding in findings for one in finding.inequalities]
    assert len(inequalities) > 5 and not page.all("section", id="verdicts")
    for one in inequalities:
        assert one.label in text and show_p_value(one.adjusted) in page.words
    assert all(line in text for finding in findings for line in finding.needs)
    assert "declared today" in text and "Replaced: others" in text
    assert "cannot prove that the author did not rewrite it" in " ".join(text.split())
    assert page.words.count("How verdicts are made") == 1


def test_the_first_screen_has_each_verdict_once_and_arms_in_words() -> None:
    """A verdict stands as a sign in a list, with what it rests on; the paper's, behind its first sentence."""
    declared = judge_claims(measure_findings(read_reference()))
    told = [*map(tell_finding, declared), "610m-clm-42k is ahead."]
    assert list_leads(told, PageText("", "", hypotheses=(declared, ()))) == ["610m-clm-42k is ahead."]
    verdicts = judge_paper(measure_findings(read_reference()))
    (lead,) = list_leads([verdicts[1]], PageText("", "", verdicts))
    assert verdicts[1].startswith(lead) and lead.endswith("6 findings tested.") and "F1" not in lead
    assert tell_evidence(declared[0]).startswith("+") and declared[0].statement not in tell_evidence(declared[0])
    assert count_verdicts(declared) == "Of 8 hypotheses, 2 are supported, none is contradicted and 6 are undecided."


def test_a_picture_shows_all_hypotheses_on_one_scale() -> None:
    """Each by the difference that its verdict rests on; a few also by task."""
    declared = judge_claims(measure_findings(read_reference()))
    effects, ends = list_effects(declared)
    assert [len(rows) for rows in effects] == [len(finding.by_unit) for finding in declared]  # none is about losses
    for finding, rows in zip(declared, effects, strict=True):
        for row in rows:
            assert f"{show_points(row.estimate)} points" in tell_evidence(finding)
            assert ends[0] <= row.interval.low <= row.interval.high <= ends[1] and ends[0] <= min(0, row.bound)
    split = next(finding for finding in declared if len(finding.by_unit[0][0].by_task) > 1)
    (mean, *of_tasks), *_ = list_effects([split])[0]
    assert not mean.task and [row.task for row in of_tasks] == [*split.by_unit[0][0].by_task]
    assert {row.bound for row in of_tasks} == {mean.bound}
    assert list_effects([replace(declared[0], claims=())]) == ([[]], pytest.approx((math.nan, math.nan), nan_ok=True))


@pytest.mark.parametrize(
    ("ends", "ticks"),
    [
        ((-0.172, 0.109), [-0.15, -0.1, -0.05, 0, 0.05, 0.1]),
        ((0.0, 0.02), [0, 0.005, 0.01, 0.015, 0.02]),
        ((-0.004, 0.6), [0, 0.2, 0.4, 0.6]),
        ((0.0, 0.0), []),
        ((math.nan, math.nan), []),
    ],
)
def test_ticks_are_round_and_few(ends: tuple[float, float], ticks: list[float]) -> None:
    assert find_ticks(ends) == pytest.approx(ticks, abs=1e-12)


COSTS = [
    {"device": device, "device hours": hours}
    for device, hours in (("1 × cpu", "1"), ("2 × cpu", "2"), ("8 × H100", "0.5"))
]


def test_the_control_does_not_stretch_the_scale_of_scores(tmp_path: Path) -> None:
    """It has a mark at its end instead; and the page says what was compared, and what is not shown."""

    def result(name: str, objective: Any, score: float) -> Result:
        arm = ReportArm(name, "ratio", "1m", objective, pretrain_steps=100, tokens=2e6 if objective != "none" else None)
        return Result(arm, "SC", "genre", "standard", (score, score + 0.01), seeds=(0, 1))

    results = ResultSet((result("a-1", "mlm", 0.8), result("b-1", "clm", 0.82), result("r-1", "none", 0.3)))
    page = parse(write_report(with_averages(results), tmp_path / "report", PageText("t", "q", costs=COSTS))[0])
    (axis,) = [svg["aria-label"] for svg in page.all("svg", role="img") if "to" in svg["aria-label"]]
    assert float(re.findall(r"[\d.]+", axis)[0]) > 60 and page.words.count("◂") == 1
    text = " ".join(" ".join(page.words).split())
    assert "compared 3 models on 1 dataset" in text and "training 2M tokens" in text
    assert "cost 3.0 hours of a CPU thread and 0.50 hours of one H100" in text
    assert (
        "not shown how another pretraining would come out (each model was pretrained once), or anything after" in text
    )


def test_an_arm_is_told_in_words() -> None:
    arm = ReportArm("1m-40-60-100", "ratio", "1m", "clm+mlm", 40, 2000, 800, 1200)
    then = ReportArm("1m-clm-2k-then-9", "cpt", "1m", "clm", 40, 2000, 2000, 0, 9)
    mixed = replace(arm, name="1m-mix", curriculum="MLM with 25 % CLM")
    arms = (arm, then, mixed, replace(arm, name="base", objective="none"), replace(arm, name="x-1", objective=""))
    assert [tell_arm(one) for one in arms] == [
        "CLM for 800 steps, then MLM for 1,200",
        "CLM for 2,000 steps, then MLM for 9",
        "MLM with 25 % CLM for 2,000 steps",
        "random weights",
        "",
    ]
    assert tell_arm(then, is_short=True) == "CLM\xa02k, then MLM\xa09"
    other = replace(arm, curriculum="MEAP → MLM", phases=(("MEAP", 800), ("MLM", 1200)))
    assert tell_arm(other) == "MEAP for 800 steps, then MLM for 1,200"
    label = name_labels(arms, ["genre", "uner_en_ewt"])
    first, second = label("<1m-mix> beats base"), label("1m-mix, not 1m-mix-2 or x-1.")
    assert first == '&lt;MLM with 25 % CLM for 2,000 steps <span class="label">(1m-mix)</span>&gt; beats base'
    assert second == '<span class="label">1m-mix</span>, not 1m-mix-2 or <span class="label">x-1</span>.'
    tagged, again = label("base on uner_en_ewt"), label("on uner_en_ewt, not wnut17")
    assert tagged == 'base on named entities <span class="label">(uner_en_ewt)</span>'
    assert again == "on named entities, not wnut17"


def test_what_is_the_same_for_all_models_stands_once(paper: Page) -> None:
    table = wide_table(read_reference().select(size="1B", mask_percent=40), "paper")
    assert split_stubs(table) == ([0], "network 1B, steps 42k, masked 40 %, relative FLOPs 1.00")
    heads = [word for word in paper.words if word in ("model", "network", "steps", "objective", "masked")]
    assert heads[:4] == ["model", "network", "steps", "masked"], "words of the model say its objective"


def test_what_a_finding_lacks_has_no_remedy_for_hypotheses() -> None:
    alone = ResultSet(tuple(one for one in read_reference().results if one.arm.size == "210M"))
    untested = [
        line for finding in judge_claims(measure_findings(alone)) for claim in finding.claims for line in claim.untested
    ]
    assert "a second model or budget is needed, because here all names are one arm" in untested


def test_numbers_as_words() -> None:
    powers = [show_superscript(text) for text in ("7.25e14", "3e5", "1 × cpu", "not known", "4h19m")]
    assert powers == ["7.25 × 10¹⁴", "3 × 10⁵", "1 × cpu", "not known", "4h19m"]
    assert (show_points(0.0123), show_points(-0.2), show_points(float("nan"))) == ("+1.23", "−20.00", "–")
    assert (show_points(-1e-9), show_p_value(0.04996), show_p_value(0.0504)) == ("0.00", "0.04996", "0.050")
    ends = [show_difference(Interval(0.0, low, 0.024)) for low in (3e-5, -3e-5)]
    assert ends == ["0.00 points [+0.00, +2.40]", "0.00 points [−0.00, +2.40]"], "the sides of zero"
    assert (show_p_value(0.00099), show_p_value(0.0496), show_p_value(float("nan"))) == ("< 0.001", "0.0496", "–")


PROBE = """
<script>
let errors = 0;
addEventListener("error", () => { errors += 1; });
addEventListener("load", () => {
  const table = document.querySelector("table.sortable");
  const sorted = 6;
  const shown = () => [...table.tBodies[0].rows].map((row) => parseFloat(row.cells[sorted].textContent)).join(" ");
  const button = table.tHead.rows[0].cells[sorted].querySelector("button");
  const states = [shown()];
  for (let click = 0; click < 3; click++) {
    button.click();
    states.push(table.tHead.rows[0].cells[sorted].getAttribute("aria-sort") + " " + shown());
  }
  for (const column of [1, 3]) {
    table.tHead.rows[0].cells[column].querySelector("button").click();
    const words = [...table.tBodies[0].rows].map((row) => row.cells[column].textContent);
    states.push([...new Set(words)].join(" "));
  }
  const seen = (picture) => picture.getBoundingClientRect().height > 100;
  const pictures = [...document.querySelectorAll(".picture")].filter(seen);
  const root = document.documentElement;
  const column = document.querySelector("h2").getBoundingClientRect();
  const isMisplaced = ({ left, right }) => Math.abs(left - column.left) > 1 || right > root.clientWidth;
  const tables = [...document.querySelectorAll(".scroll:has(table)")];
  const isCut = (one) => one.scrollHeight > one.clientHeight;
  const misplaced = tables.filter((one) => isCut(one) || isMisplaced(one.getBoundingClientRect()));
  const overflow = root.scrollWidth - root.clientWidth;
  // Words of neighbouring headers, between which an arrow stands.
  const places = (row) => [...row.cells].map((cell) => {
    const range = document.createRange();
    range.selectNodeContents(cell);
    return range.getBoundingClientRect();
  }).filter((place) => place.width > 1);
  const touching = [...document.querySelectorAll("thead tr")].map(places).filter(
    (row) => row.some((place, column) => column && place.left - row[column - 1].right < 10));
  const result = [errors, pictures.length, overflow, misplaced.length, touching.length, ...states].join("|");
  parent.postMessage(result, "*");
});
</script>
"""


def find_browser() -> str:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        pytest.skip("no Chromium on the path")
    return browser


def show(page: str, tmp_path: Path, width: int, *options: str) -> tuple[str, str]:
    """What the page leaves in its element `result` in a window of a width, and what the browser complains of."""
    frame, copy = tmp_path / "frame.html", tmp_path / "index.html"
    copy.write_text(page)
    # A window is 500 pixels wide at least; a frame is as narrow as it is asked to be.
    frame.write_text(
        f'<iframe src="index.html" style="width:{width}px;height:900px"></iframe><pre id="result"></pre><script>'
        'addEventListener("message", (told) => { document.querySelector("pre").textContent = told.data; });</script>'
    )
    command = [find_browser(), "--headless", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", *options]
    command += ["--no-sandbox"] if os.geteuid() == 0 else []
    command += ["--window-size=1600,1000", "--virtual-time-budget=20000", "--dump-dom", frame.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    found = re.search(r'<pre id="result">([^<]*)</pre>', done.stdout)
    assert found and found[1], done.stdout[-500:]
    return unescape(found[1]), done.stderr


@pytest.mark.parametrize("width", [1400, 390])
def test_in_chromium(paper_file: Path, tmp_path: Path, width: int) -> None:
    page = paper_file.read_text().replace("</title>", f"</title>{PROBE}", 1)
    told, complaints = show(page, tmp_path, width)
    errors, pictures, overflow, misplaced, touching, *states = told.split("|")
    # All figures but three, for which nothing is published, and that of compute-equivalents.
    assert (errors, pictures, overflow, misplaced, touching) == ("0", str(len(FIGURES) - 1), "0", "0", "0")
    assert "CONSOLE" not in complaints
    plain = states[0].split()
    assert len(plain) == 46
    assert states[1].split() == ["descending", *sorted(plain, key=float, reverse=True)]
    assert states[2].split() == ["ascending", *sorted(plain, key=float)]
    assert states[3].split() == ["none", *plain]
    assert states[4:] == ["210M 610M 1B", "20 % 30 % 40 % 50 % –"], "by number, what has none at the end"


@pytest.mark.parametrize(
    "descending",
    [
        ["1h02m", "2m41s", "2m07s", "15s"],
        ["1.15e16", "7.25e14", "6e13"],
        ["−48.10 ± 2.00", "−50.00 ± 1.20", "-51.00 ± 0.10"],
        ["1B", "610M", "210M"],
    ],
)
def test_columns_are_sorted_by_their_numbers(descending: list[str], tmp_path: Path) -> None:
    """Durations, powers without a sign, numbers below zero with either sign, and counts."""
    rows = "".join(f'<tr><td class="num">{text}</td></tr>' for text in sorted(descending))
    head = '<thead><tr><th aria-sort="none"><button></button></th></tr></thead>'
    table = f'<table class="sortable">{head}<tbody>{rows}</tbody></table>'
    script = (SOURCE / "report" / "page.js").read_text()
    tell = """document.querySelector("button").click();
        const sorted = [...document.querySelectorAll("td")].map((cell) => cell.textContent);
        addEventListener("load", () => parent.postMessage(sorted.join("|"), "*"));"""
    told, _ = show(f"<meta charset=utf-8>{table}<script>{script}</script><script>{tell}</script>", tmp_path, 1400)
    assert told.split("|") == descending


AXE = Path(os.environ.get("AXE", "node_modules/axe-core/axe.min.js"))
"""axe-core, which judges whether a page can be used by everybody: `npm install axe-core`, here or where AXE says."""


@pytest.mark.parametrize(("width", "is_dark"), [(1400, False), (390, True)])
def test_everybody_can_use_the_page(paper_file: Path, tmp_path: Path, width: int, is_dark: bool) -> None:
    if not AXE.exists():
        pytest.skip("no axe-core: npm install axe-core")
    judge = """<script>addEventListener("load", async () => {
        const { violations } = await axe.run();
        const told = violations.map((one) => `${one.id}: ${one.nodes.map((node) => node.html.slice(0, 200))}`);
        const dark = matchMedia("(prefers-color-scheme: dark)").matches;
        parent.postMessage([dark, ...told].join(" | "), "*");
    });</script>"""
    script = AXE.resolve().read_text()
    page = paper_file.read_text().replace("</body>", f"<script>{script}</script>{judge}</body>", 1)
    told, _ = show(page, tmp_path, width, f"--blink-settings=preferredColorScheme={0 if is_dark else 1}")
    assert told == str(is_dark).lower()
