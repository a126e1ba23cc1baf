"""What the site says that the code already says: written when the site is built, so that it cannot go stale.

A page asks for it by a comment, `<!-- commands -->`, `<!-- python -->`, `<!-- tasks -->` or
`<!-- keys: biphase.recipe.Recipe -->`. Notebooks are pages too. mkdocs calls `on_files` and `on_page_markdown` (see
`hooks` in mkdocs.yml).
"""

import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import biphase
from biphase.cli.app import app
from biphase.cli.settings import list_sections
from biphase.tasks.spec import PAPER_TASKS, TASK_SPLITS, Task, task_table

ROOT = Path(__file__).resolve().parents[1]
ASKED = re.compile(r"<!-- (commands|python|tasks|keys)(?:: ([\w.]+))? -->(?:\n.+)*")
"""The comment, and the lines right below it, which are for those who read the page as a file."""
LINKED = re.compile(r"\]\((?:\.\./)+((?:src|scripts|benchmarks|tests|studies)/[^)]*)\)")
"""Links to files of the repository, which the site does not have: their paths stand there instead."""


def on_files(files: Any, config: Any) -> Any:
    """Each notebook becomes a page: its texts, its code, and the results that the repository has of it."""
    from mkdocs.structure.files import File

    for path in sorted(ROOT.glob("docs/notebooks/*.ipynb")):
        files.remove(files.get_file_from_path(f"notebooks/{path.name}"))
        text = "\n\n".join(notebook_blocks(json.loads(path.read_text(encoding="utf-8"))))
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
    return files


def notebook_blocks(notebook: dict[str, Any]) -> Iterator[str]:
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        yield text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"
        for output in cell.get("outputs", ()):
            yield f"```text\n{''.join(output['data']['text/plain'])}\n```"


def on_page_markdown(markdown: str, **_: Any) -> str:
    markdown = markdown.replace(".ipynb)", ".md)")
    # A table that was drawn with characters is not wrapped on a narrow screen: site.css.
    markdown = re.sub(r"^```text\n(?=[^`]*[─━])", "```{ .text .drawn }\n", markdown, flags=re.MULTILINE)
    markdown = re.sub(r"\[([^\]]*)" + LINKED.pattern, lambda found: f"`{found[2]}`", markdown)
    return ASKED.sub(lambda found: "\n".join(made(found[1], found[2])), markdown)


def made(kind: str, name: str | None) -> Iterator[str]:
    if kind == "commands":
        yield from commands()
    elif kind == "python":
        yield from functions()
    elif kind == "tasks":
        yield from tasks()
    else:
        module, _, kind_name = str(name).rpartition(".")
        yield from keys(getattr(importlib.import_module(module), kind_name))


def commands() -> Iterator[str]:
    """The command line, as its help has it."""
    _, begin, verbs = app.generate_docs(flatten_commands=True, heading_level=2).partition("\n## biphase init")
    yield begin.lstrip() + verbs


def functions() -> Iterator[str]:
    """What `import biphase` offers, with its signatures."""
    for name in biphase.OFFERED:
        offered = getattr(biphase, name)
        yield f"\n### biphase.{name}\n"
        if not inspect.isclass(offered):
            parameters = "".join(f"    {one},\n" for one in with_star(inspect.signature(offered)))
            yield f"```python\nbiphase.{name}(\n{parameters})\n```\n"
        text = re.sub(r"^ {4}(\w+): ", r"- `\1`: ", inspect.getdoc(offered) or "", flags=re.MULTILINE)
        yield re.sub(r"^(Args|Returns|Raises):\n", r"\1:\n\n", text, flags=re.MULTILINE)


def with_star(signature: inspect.Signature) -> Iterator[str]:
    """Parameters as they are written, with the star before those that are given by name alone."""
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    first = kinds.index(inspect.Parameter.KEYWORD_ONLY) if inspect.Parameter.KEYWORD_ONLY in kinds else None
    for at, parameter in enumerate(signature.parameters.values()):
        if at == first and inspect.Parameter.VAR_POSITIONAL not in kinds:
            yield "*"
        plain = getattr(parameter.annotation, "__origin__", parameter.annotation)  # without what `Annotated` adds
        is_annotated = hasattr(parameter.annotation, "__metadata__")
        yield str(parameter.replace(annotation=plain) if is_annotated else parameter)


# Keys of YAML files


def keys(kind: type[BaseModel]) -> Iterator[str]:
    """A table for a model, and one for each model that it leads to."""
    for section in list_sections(kind, "[keys](#{})".format):
        yield f"\n### {section.title}\n" if section.title else ""
        yield section.text + "\n"
        yield "| key | value | default | meaning |\n| --- | --- | --- | --- |"
        for one in section.settings:
            words = (f"`{one.key}`", one.value, one.default, one.meaning)
            yield f"| {' | '.join(word.replace('|', chr(92) + '|') for word in words)} |"


# Tasks

COLUMNS = ("task", "family", "metric", "hub", "licence", "train · validation · test")


def tasks() -> Iterator[str]:
    """The table of tasks, the paper's first, and what is to be said of each."""
    known = sorted(task_table().values(), key=lambda task: task.name not in PAPER_TASKS)
    yield from (row(COLUMNS), row(["---"] * len(COLUMNS)), *(row(cells(task)) for task in known), "")
    yield from (f"- {shown_name(task)}: {' '.join(remarks(task))}" for task in known)


def row(values: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(values)} |"


def shown_name(task: Task) -> str:
    return f"**{task.name}**" if task.name in PAPER_TASKS else task.name


def cells(task: Task) -> list[str]:
    places = ["*bundled*"] if task.bundled else []
    if task.hub is not None:
        is_pinned = re.fullmatch(r"[0-9a-f]{40}", task.hub.revision or "")
        places.append(task.hub.id + ("" if is_pinned else ", not pinned"))
    family = task.family.replace("_", " ")
    return [shown_name(task), family, task.metric, "; ".join(places), task.licence, " · ".join(split_places(task))]


def split_places(task: Task) -> tuple[str, ...]:
    """Where each split is from: its name there (of files without folder and ending), or what it is drawn from."""
    splits = task.files[0] if task.bundled or task.hub is None else task.hub.splits
    own: dict[str, str] = {
        name: Path(place).stem for name in TASK_SPLITS if (place := getattr(splits, name)) is not None
    }
    if task.trained_on is not None:
        drawn = {"train": f"that of {task.trained_on}", "validation": "half of test's queries"}
        own["test"] = own["test"] if "validation" in own else "the other half"
    elif "train" not in own:
        drawn = {"train": "half of the queries", "validation": "a quarter"}
        own["test"] = "a quarter"
    elif task.family == "retrieval":
        drawn = {"validation": "5 % of train's queries, at least 100"}
    else:
        drawn = {"validation": "5 % of train"}
    places = drawn | own
    return tuple(places[name] for name in TASK_SPLITS)


def remarks(task: Task) -> Iterator[str]:
    if task.note:
        yield task.note
    yield f"({task.citation})"
