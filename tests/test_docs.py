"""The docs say what works: blocks of code are run on a little text, or marked as not run and still parsed; keys and
commands on the site come from the code."""

import ast
import inspect
import re
import runpy
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

import biphase
from biphase.cli.app import app, run_command
from biphase.config import BUNDLED, parse_config
from biphase.embedding.recipe import EmbeddingRecipe
from biphase.recipe import Recipe
from biphase.studies.plan import plan_study
from biphase.studies.spec import Study
from biphase.tasks.spec import Task

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(?:<!-- not run: ([^>]+) -->\n)?^( *)```(\w*)\n(.*?)^\2```", re.MULTILINE | re.DOTALL)
PAGES = sorted(
    [*ROOT.glob("docs/**/*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md"))]
)
PAGES.sort(key=lambda page: page.name != "index.md")  # what the start makes is there for the others
TINY = {
    "pretrain": (
        "batch_tokens=512",
        "data.max_sample_tokens=64",
        "validation.tokens=1000",
        "init.architecture={num_hidden_layers: 1}",
        *("curriculum.0.steps=2", "curriculum.1.steps=2", "schedule={peak_lr: 1e-3, warmup_steps: 0, decay_steps: 1}"),
    ),
    "finetune": ("max_steps=2", "max_train_examples=16", "max_eval_examples=16"),
}
"""Further changes to a verb's settings, so that it takes a second."""


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    code: str
    reason: str | None
    """Why it is not run."""


def blocks() -> Iterator[Block]:
    for page in PAGES:
        for reason, _, language, code in BLOCK.findall(page.read_text(encoding="utf-8")):
            code = re.sub(r'--8<-- "(.*?)"', lambda found: (ROOT / found[1]).read_text(encoding="utf-8"), code)
            yield Block(str(page.relative_to(ROOT)), language, code, reason or None)


def calls(code: str) -> Iterator[list[str]]:
    """The words behind `biphase` in a block, also below a launcher; what needs a shell is left out."""
    for line in code.splitlines():
        words = shlex.split(line, comments=True)
        if "-m biphase" in line:
            yield words[words.index("biphase") + 1 :]
        elif words[:1] == ["biphase"] and "$" not in line:
            yield words[1:]


def test_every_block_is_run_or_says_why_not() -> None:
    found = list(blocks())
    assert len(found) > 20
    for block in found:
        assert block.language in ("bash", "python", "yaml", "text"), f"{block.page}: ```{block.language}"
        if block.language in ("bash", "python") and block.reason is None:
            lines = [line for line in block.code.splitlines() if line.strip() and not line.lstrip().startswith("#")]
            assert len(lines) == len(list(calls(block.code))), f"{block.page}: what is run is biphase alone: {lines}"


def test_shares_of_compute_are_in_the_tables_of_our_studies() -> None:
    """So no page keeps an interval of an older computation; the log has the digits of its time."""
    tables = "".join(path.read_text() for path in ROOT.glob("studies/results/*/tables/compute-equivalents-*.md"))
    told = [
        (page.name, share)
        for page in (ROOT / "docs/demo.md", ROOT / "docs/how_to/objective.md", ROOT / "src/biphase/studies/rules.yaml")
        for share in re.findall(r"(?<!\S)\d\.\d\d \[\d\.\d\d, \d\.\d\d\]", " ".join(page.read_text().split()))
    ]
    assert len(told) > 10
    assert [row for row in told if row[1] not in tables] == []


def test_entries_of_the_log_are_newest_first() -> None:
    dates = re.findall(r"^## (\d{4}-\d\d-\d\d): ", (ROOT / "docs" / "LOG.md").read_text(), re.MULTILINE)
    assert len(dates) > 50 and dates == sorted(dates, reverse=True)


def test_a_link_to_the_log_names_an_entry() -> None:
    pages = [*PAGES, *ROOT.glob("docs/**/*.ipynb")]
    bare = re.compile(r"\]\([^)\s]*LOG\.md\)|^\[[^\]]+\]: \S*LOG\.md$", re.MULTILINE)
    assert [page.name for page in pages if bare.search(page.read_text(encoding="utf-8"))] == []


def test_commands_that_are_not_run_exist() -> None:
    for block in blocks():
        if block.language == "bash":
            for words in calls(block.code):
                app.parse_args(words, exit_on_error=False, print_error=False)


def test_a_page_begins_each_file_once() -> None:
    """`init` refuses a file that exists, so a second `init` stops a reader who follows the page from the top."""
    begun = [
        (block.page, words[words.index("--out") + 1])
        for block in blocks()
        if block.language == "bash" and block.reason != "writes the same file again"
        for words in calls(block.code)
        if words[0] == "init" and "--out" in words
    ]
    assert len(begun) > 10 and len(begun) == len({*begun})


def test_python_that_is_not_run_calls_what_there_is() -> None:
    for block in blocks():
        for node in ast.walk(ast.parse(block.code)) if block.language == "python" else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name = ast.unparse(node.func)
                if name.startswith("biphase."):
                    verb = getattr(biphase, node.func.attr)
                    inspect.signature(verb).bind(*node.args, **{str(one.arg): None for one in node.keywords})


def test_commands_do_what_they_are_shown_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Page after page in one folder, with a small text and training of a few steps."""
    monkeypatch.chdir(tmp_path)
    for name in ("corpus", "reviews", "tickets"):
        Path(name).mkdir()
    shutil.copy(BUNDLED / "corpus" / "validation.jsonl.zst", "corpus")
    for name in ("nanochat.csv", "night.csv"):
        shutil.copy(ROOT / "docs" / "how_to" / name, ".")
    for name in ("questions.csv", "new_reviews.csv"):
        Path(name).write_text("text\nOnce upon a time\n", encoding="utf-8")
    rows = "".join(f"a review of {number} words,{number % 2}\n" for number in range(60))
    Path("reviews/train.csv").write_text(f"text,stars\n{rows}", encoding="utf-8")
    tickets = "".join(f"a ticket of {n} words;{('Mail', 'mail ', 'Net', '')[n % 4]}\n" for n in range(60))
    Path("tickets/tickets.csv").write_text(f"\ufeffmessage;Category\n{tickets}", encoding="utf-8")
    for block in blocks():
        if block.language != "bash" or block.reason is not None:
            continue
        code = re.sub(r"--vocab-size \d+", "--vocab-size 384", block.code)
        for words in calls(code):
            run_command([*words, *TINY.get(words[0], ())])
    assert Path("predicted.csv").read_text().startswith("text,predicted")
    for path, kind in ((Path("recipe.yaml"), Recipe), (Path("mine.yaml"), Study), (Path("reviews.yaml"), Task)):
        parse_config(kind, yaml.safe_load(path.read_text()), origin=str(path))


@pytest.mark.parametrize(
    "block", [block for block in blocks() if block.language == "yaml"], ids=lambda block: block.page
)
def test_files_that_are_shown_are_valid(block: Block) -> None:
    """Whole files, and parts of a study in the smallest one of the paper's shape."""
    tree = yaml.safe_load(block.code)
    kinds = {"family": Task, "curriculum": Recipe, "stages": EmbeddingRecipe, "recipe": Study}
    kind = next((kind for key, kind in kinds.items() if key in tree), None)
    if kind is not None:
        parse_config(kind, tree, origin=block.page)
        return
    part = tree if isinstance(tree, dict) else {"arms": tree, "intermediate": []}
    mini = yaml.safe_load((BUNDLED / "studies" / "mini.yaml").read_text(encoding="utf-8"))
    plan_study(parse_config(Study, mini | part, origin=block.page))


def test_the_site_shows_every_key_and_command() -> None:
    made = runpy.run_path(str(ROOT / "scripts" / "docs_site.py"))["made"]
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for kind in (Recipe, Study, Task, EmbeddingRecipe):
        name = f"{kind.__module__}.{kind.__name__}"
        assert f"<!-- keys: {name} -->" in pages
        shown = "\n".join(made("keys", name))
        assert all(f"| `{key}` |" in shown for key in kind.model_fields)
    recipe = "\n".join(made("keys", "biphase.recipe.Recipe"))
    assert "| `mask_probability` | number > 0 < 1, or [keys](#mask_probability) | `0.4` | The share" in recipe
    assert "| `from` |" in recipe and "### optimizer" in recipe
    functions = "\n".join(made("python", None))
    assert all(f"### biphase.{name}\n" in functions for name in biphase.OFFERED) and "biphase.pretrain(\n" in functions
    commands = "\n".join(made("commands", None))
    assert "## biphase study plan" in commands and "--dry-run" in commands


def test_who_reads_a_page_as_a_file_learns_where_its_lists_are() -> None:
    """Below each comment that the site fills stands a line for readers of the file; the site puts the list there."""
    fill = runpy.run_path(str(ROOT / "scripts" / "docs_site.py"))["on_page_markdown"]
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        below = re.findall(r"^<!-- (?:commands|python|tasks|keys)\b.*-->\n(.*)$", text, re.MULTILINE)
        for line in below:
            assert line, f"{page}: where else is it?"
            assert all((page.parent / link).is_file() for link in re.findall(r"\]\(([^)]*)\)", line))
        if below:
            assert not any(line in fill(text) for line in below)
