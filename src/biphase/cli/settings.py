"""`biphase settings`: the keys of a command or a file, with values, defaults and meanings, read from their classes."""

import ast
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import BaseModel

from biphase.errors import InputError

Subject = Literal["pretrain", "finetune", "evaluate", "embed", "study", "task"]
"""The command or file whose keys are shown: `pretrain` is a recipe, `study` and `task` are files."""

CLASSES: dict[Subject, str] = {
    "pretrain": "biphase.recipe.Recipe",
    "finetune": "biphase.finetuning.config.FinetuneConfig",
    "evaluate": "biphase.finetuning.config.FinetuneConfig",
    "embed": "biphase.embedding.recipe.EmbeddingRecipe",
    "study": "biphase.studies.spec.Study",
    "task": "biphase.tasks.spec.Task",
}

REQUIRED = "*required*"


@dataclass(frozen=True)
class KeyFacts:
    """A key; the last three are words."""

    key: str
    value: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Section:
    """A class of keys: the key under which it stands, "" for the whole file; its docstring; its keys."""

    title: str
    text: str
    settings: list[KeyFacts]


def find_settings(subject: Subject, word: str | None = None) -> list[Section]:
    """List the keys of a command or a file. Raises `InputError` if none contains the word.

    Args:
        subject: The command or the file. `pretrain` is a recipe.
        word: Show only the keys of this section, or those that contain this word, also in their meaning.
    """
    module, _, name = CLASSES[subject].rpartition(".")
    sections = [*list_sections(getattr(importlib.import_module(module), name), "keys of `{}`".format)]
    if word is None:
        return sections
    wanted = word.lower().rpartition(".")[2]
    found = []
    for section in sections:
        is_named = section.title == wanted
        kept = [one for one in section.settings if is_named or wanted in f"{one.key} {one.meaning}".lower()]
        if kept:
            found.append(replace(section, settings=kept))
    if not found:
        raise InputError(f"no setting of {subject} contains '{word}'; `biphase settings {subject}` lists all")
    return found


def show_settings(sections: list[Section]) -> str:
    """Write the sections for a terminal: each key with its values and its default, and its meaning below."""
    lines = []
    for section in sections:
        lines += ["", f"{section.title}:"] if section.title else []
        margin = "  " * bool(section.title)
        for one in section.settings:
            default = one.default.strip("*") if one.default == REQUIRED else one.default and f"default {one.default}"
            facts = " · ".join(filter(None, [one.value, default])).replace("`", "")
            lines.append(f"{margin}{one.key}  ({facts})")
            indent = margin + " " * 6
            lines += textwrap.wrap(one.meaning.replace("`", "'"), 98, initial_indent=indent, subsequent_indent=indent)
    return "\n".join(lines).strip("\n")


def list_sections(kind: type[BaseModel], leads: Callable[[str], str]) -> Iterator[Section]:
    """Yield the keys of a class and of each class that it leads to. `leads` writes where the keys of a section are."""
    schema, below = kind.model_json_schema(), models_below(kind)
    places = {cls.__name__: leads(key) for cls, key in below.items()}
    texts = {key: inspect.getdoc(cls) or "" for cls, key in below.items()}
    for cls, title in below.items():
        own = schema if cls is kind else schema["$defs"][cls.__name__]
        meanings, settings = docstrings(cls), []
        for key, form in own["properties"].items():
            default = REQUIRED if key in own.get("required", ()) else show_default(form.get("default"))
            meaning = meanings.get(key) or texts.get(key, "").partition(". ")[0]
            settings.append(KeyFacts(key, show_form(form, places), default, meaning))
        yield Section(title, inspect.cleandoc(cls.__doc__ or ""), settings)


def models_below(kind: type[BaseModel]) -> dict[type[BaseModel], str]:
    """Return the class and those in its fields, each with the key under which it is met first."""
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
    """Return what stands below each field in the source, those of parents included."""
    found: dict[str, str] = {}
    for parent in reversed(cls.__mro__):
        if not issubclass(parent, BaseModel) or parent is BaseModel:
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(parent))).body
        assert isinstance(node, ast.ClassDef)
        for field, below in zip(node.body, node.body[1:], strict=False):
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
                known = parent.model_fields.get(field.target.id)
                alias = (known.alias if known else None) or field.target.id
                found[alias] = " ".join(str(below.value.value).split())  # type: ignore[attr-defined]
    return found


def show_form(form: dict[str, Any], places: Mapping[str, str]) -> str:
    """Write what values a key takes, from its JSON schema. `places`: name of a class → where its keys are, in words."""
    if "$ref" in form:
        return places[form["$ref"].rpartition("/")[2]]
    if "enum" in form or "const" in form:
        return " · ".join(f"`{value}`" for value in form.get("enum", [form.get("const")]))
    for several in ("anyOf", "oneOf", "allOf"):
        if several in form:
            kinds = [show_form(one, places) for one in form[several] if one.get("type") != "null"]
            return ", or ".join(dict.fromkeys(kinds))
    match form.get("type"):
        case "array" if "prefixItems" in form:
            return ", ".join(show_form(one, places) for one in form["prefixItems"])
        case "array":
            return f"list of {show_form(form['items'], places)}"
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


def show_default(value: Any) -> str:
    """Write a default as YAML has it; nothing for none, and for what is a section of its own."""
    if value is None or value in ("", [], {}) or isinstance(value, dict):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`".replace("e-0", "e-") if isinstance(value, float) else f"`{value}`"
