"""What the site says that the code already says: written when the site is built, so that it cannot go stale.

A page asks for it by a comment, `<!-- commands -->`, `<!-- python -->`, `<!-- tasks -->` or
`<!-- keys: biphase.recipe.Recipe -->`. Notebooks are pages too. mkdocs calls `on_files` and `on_page_markdown` (see
`hooks` in mkdocs.yml).
"""

import ast
import importlib
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import biphase
from biphase.cli.app import app
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
    schema = kind.model_json_schema()
    titles = {cls.__name__: key for cls, key in models_below(kind).items()}
    leads = {key: inspect.getdoc(cls) or "" for cls, key in models_below(kind).items()}
    for cls, title in models_below(kind).items():
        own = schema if cls is kind else schema["$defs"][cls.__name__]
        properties, required = own["properties"], own.get("required", ())
        yield f"\n### {title}\n" if title else ""
        yield inspect.cleandoc(cls.__doc__ or "") + "\n"
        yield "| key | value | default | meaning |\n| --- | --- | --- | --- |"
        meanings = docstrings(cls)
        for key, form in properties.items():
            default = "*required*" if key in required else shown_default(form.get("default"))
            cells = (
                f"`{key}`",
                shown_form(form, titles),
                default,
                meanings.get(key) or leads.get(key, "").partition(". ")[0],
            )
            yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def models_below(kind: type[BaseModel]) -> dict[type[BaseModel], str]:
    """The model and those in its fields, each with the key under which it is met first."""
    found: dict[type[BaseModel], str] = {}

    def visit(annotation: Any, key: str) -> None:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            if annotation not in found:
                found[annotation] = key
                for name, field in annotation.model_fields.items():
                    visit(field.annotation, name)
            return
        for inner in getattr(annotation, "__args__", ()):
            visit(inner, key)

    visit(kind, "")
    return found


def docstrings(cls: type[BaseModel]) -> dict[str, str]:
    """What stands below each field in the source, those of parents included."""
    found: dict[str, str] = {}
    for parent in reversed(cls.__mro__):
        if not issubclass(parent, BaseModel) or parent is BaseModel:
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(parent))).body
        assert isinstance(node, ast.ClassDef)
        for field, below in zip(node.body, node.body[1:], strict=False):
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
                found[alias_of(parent, field.target.id)] = " ".join(str(below.value.value).split())  # type: ignore[attr-defined]
    return found


def alias_of(cls: type[BaseModel], name: str) -> str:
    field = cls.model_fields.get(name)
    return (field.alias if field else None) or name


def shown_form(form: dict[str, Any], titles: dict[str, str]) -> str:
    """What may stand there, read off its JSON schema."""
    if "$ref" in form:
        title = titles[form["$ref"].rpartition("/")[2]]
        return f"[keys](#{title})"
    if "enum" in form or "const" in form:
        return " · ".join(f"`{value}`" for value in form.get("enum", [form.get("const")]))
    for several in ("anyOf", "oneOf", "allOf"):
        if several in form:
            return ", or ".join(
                dict.fromkeys(shown_form(one, titles) for one in form[several] if one.get("type") != "null")
            )
    match form.get("type"):
        case "array" if "prefixItems" in form:
            return ", ".join(shown_form(one, titles) for one in form["prefixItems"])
        case "array":
            return f"list of {shown_form(form['items'], titles)}"
        case "object":
            return "mapping"
        case "integer" | "number" as kind:
            low, above = form.get("minimum"), form.get("exclusiveMinimum")
            high, below = form.get("maximum"), form.get("exclusiveMaximum")
            bounds = [f"≥ {low:g}"] if low is not None else [f"> {above:g}"] if above is not None else []
            if high is not None and high < 2**53:
                bounds.append(f"≤ {high:g}")
            bounds += [f"< {below:g}"] if below is not None else []
            return " ".join([{"integer": "whole number", "number": "number"}[kind], *bounds])
        case "boolean":
            return "true or false"
        case "string":
            return "text"
    return "anything"


def shown_default(value: Any) -> str:
    """A default as YAML has it; nothing for none, and for what is a table of its own."""
    if value is None or value in ("", [], {}) or isinstance(value, dict):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


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
