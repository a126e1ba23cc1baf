"""A YAML file and `key.sub=value` overrides → a frozen, typed tree; an unknown key is an error."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_args

import pydantic
import yaml
from pydantic_core import PydanticCustomError, to_jsonable_python

from biphase.errors import SOURCE, InputError, clipped, nearest, told_as
from biphase.files import parse_yaml, reading

MAX_COUNT = 2**53
"""The largest count, which is exact as a float too. A larger one is surely a typo."""

MOST_REPEATS = 1_000
"""The largest number of seeds for one training."""

Count = Annotated[int, pydantic.Field(ge=0, le=MAX_COUNT)]
PositiveCount = Annotated[int, pydantic.Field(ge=1, le=MAX_COUNT)]
Seed = Count
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
FolderName = Annotated[str, pydantic.Field(pattern=NAME_PATTERN)]
"""A name of a recipe, model, study or task, which becomes the name of a folder."""
Share = Annotated[float, pydantic.Field(ge=0, le=1)]
Beta = Annotated[float, pydantic.Field(ge=0, lt=1)]

FLOAT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")
Setting = Annotated[
    bool | int | float | str,
    pydantic.BeforeValidator(lambda item: float(item) if isinstance(item, str) and FLOAT.fullmatch(item) else item),
]
"""A value of any kind. `1e-6`, which YAML 1.1 reads as text, is a number here."""


@dataclass(frozen=True)
class OnCommandLine:
    """An annotation for a parameter that takes several types in Python."""

    type: Any
    """The type that the command line reads; None if the command line lacks the parameter."""


AnyPath = Annotated[str | Path, OnCommandLine(Path)]
ModelName = Annotated[str | Path, OnCommandLine(str)]
"""A run, a model folder or a Hub id."""
PythonOnly = OnCommandLine(None)

Config = TypeVar("Config", bound="Strict")

BUNDLED = SOURCE / "bundled"
"""Text, tasks, recipes and studies that come with biphase."""


class Strict(pydantic.BaseModel):
    """A frozen model in which an unknown key is an error.

    Names of runs, cells and tasks are hashes of such trees, and must not change. So a class lists in `later` the keys
    that it got later. With their default values they stay out of the tree, which leaves the names as they were.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    later: ClassVar[frozenset[str]] = frozenset()

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def is_no_boolean(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        """Refuse booleans for numbers: YAML reads yes, no, on and off as booleans, which are 1 and 0 in Python."""
        if any(isinstance(item, bool) for item in (value if isinstance(value, list | tuple) else (value,))):
            kinds = {*nested_types(cls.model_fields[str(info.field_name)].annotation)}
            if kinds & {int, float} and bool not in kinds:
                raise PydanticCustomError("number", "input should be a number")
        return value

    @pydantic.model_serializer(mode="wrap")
    def without_unused(self, serialize: pydantic.SerializerFunctionWrapHandler) -> dict[str, Any]:
        unused = {key for key in self.later if getattr(self, key) == type(self).model_fields[key].default}
        return {key: value for key, value in serialize(self).items() if key not in unused}


def load_config(kind: type[Config], path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read the YAML file at `path` (see `find_yaml`), changed by `key.sub=value` overrides, checked against `kind`.

    Raises:
        InputError: missing file, broken YAML, unknown key (with the nearest valid one), wrong type or value.
    """
    return parse_config(kind, read_yaml(find_yaml(path)), overrides, origin=str(path))


def find_yaml(path: Path, kind: str = "recipes") -> Path:
    """Find the user's file, else the bundled one of this name: `tiny` or `recipes/tiny.yaml`.

    Args:
        kind: the bundled folder of a bare name: recipes or studies.

    Raises:
        InputError: a bare name that is neither.
    """
    if path.is_file():
        return path
    if path.suffix or len(path.parts) > 1:
        return BUNDLED / path if (BUNDLED / path).is_file() else path
    names = {file.stem: file for file in (BUNDLED / kind).glob("*.yaml")}
    if str(path) not in names:
        raise InputError(f"{path} is neither a file nor one of the bundled {kind}{nearest(str(path), names)}")
    return names[str(path)]


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the mapping that a YAML file holds. Raises `InputError` naming the file."""
    with reading(path, "give a YAML file"):
        content = path.read_bytes()
    with told_as(f"{path} is not valid YAML"):
        tree = parse_yaml(content.decode())
    if not isinstance(tree, dict):
        raise InputError(f"{path} must be a mapping of keys to values")
    return tree


def parse_config(kind: type[Config], tree: dict[str, Any], overrides: Sequence[str] = (), *, origin: str) -> Config:
    """Check a tree in memory as `load_config` checks a file. `origin` is its name in errors."""
    for override in overrides:
        tree = apply_override(tree, override)
    return check_tree(kind, tree, overrides, origin=origin)


def check_tree(kind: type[Config], tree: dict[str, Any], overrides: Sequence[str], *, origin: str) -> Config:
    """Check a tree to which the overrides were applied, so that errors name the override that set a wrong value."""
    try:
        return kind.model_validate(tree)
    except pydantic.ValidationError as error:
        # pydantic also calls a list too short when its items are wrong: only the items are to blame then.
        blamed = [item["loc"] for item in error.errors() if item["type"] != "too_short"]
        mistakes: dict[str, list[str]] = {}
        for item in error.errors():
            location = item["loc"]
            if item["type"] == "too_short" and any(key[: len(location)] == location for key in blamed):
                continue
            key, giver = ".".join(str(step) for step in location), origin
            for override in overrides:  # the last change that set the wrong value
                if f"{key}.".startswith(override.partition("=")[0] + "."):
                    giver = override
            mistakes.setdefault(giver, []).append(explain(kind, item))
        raise InputError("; ".join(f"{giver}: {'; '.join(lines)}" for giver, lines in mistakes.items())) from None


def apply_override(tree: Any, override: str) -> Any:
    """Apply `curriculum.0.steps=10` to a copy of `tree`; the value is read as YAML."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise InputError(f"'{override}' is not of the form key=value")
    with told_as(f"the value in '{clipped(override)}' is not valid YAML"):
        value = parse_yaml(text)

    def replaced(node: Any, path: list[str]) -> Any:
        if not path:
            return value
        if isinstance(node, list):
            if not path[0].isdecimal() or int(path[0]) >= len(node):
                raise InputError(f"'{override}': '{path[0]}' is not one of the {len(node)} positions of a list")
            at = int(path[0])
            return [*node[:at], replaced(node[at], path[1:]), *node[at + 1 :]]
        if node is not None and not isinstance(node, dict):
            raise InputError(f"'{override}': '{path[0]}' lies inside a single value")
        return {**(node or {}), path[0]: replaced((node or {}).get(path[0]), path[1:])}

    return replaced(tree, key.split("."))


def by_commas(text: str) -> list[str]:
    """Split a text at commas: `snli, genre,` → ["snli", "genre"]."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise InputError(f"'{text}' has nothing but commas; leave the option out, or name something")
    return words


def nested_types(annotation: Any) -> Iterator[type]:
    """Yield the classes inside an annotation such as `tuple[Phase, ...]` or `int | BatchRamp`."""
    if isinstance(annotation, type):
        yield annotation
    for inner in get_args(annotation):
        yield from nested_types(inner)


def keys_below(kind: type[Strict]) -> Iterator[tuple[str, Any]]:
    """Yield all keys of a tree with their types: `seed`, `schedule.peak_lr`, `curriculum.0.steps`."""
    for name, field in kind.model_fields.items():
        key = field.alias or name
        yield key, field.annotation
        at = f"{key}.0" if "tuple[" in str(field.annotation) else key
        for inner in nested_types(field.annotation):
            if issubclass(inner, Strict):
                yield from ((f"{at}.{below}", annotation) for below, annotation in keys_below(inner))


def choices_of(annotation: Any) -> Iterator[Any]:
    """Yield the words of `Literal` inside an annotation."""
    for inner in get_args(annotation):
        yield from [inner] if isinstance(inner, str) else choices_of(inner)


def could_take(annotation: Any, value: Any) -> bool:
    """Tell whether a key of this type takes a single value. Assume that it takes any list or mapping."""
    if isinstance(value, dict | list):
        return True
    try:
        pydantic.TypeAdapter(annotation).validate_python(value)
    except pydantic.ValidationError:
        return False
    return True


def words_of_key(key: str) -> set[str]:
    """Return the words of a key and their initials: `learning_rate` → learning, rate and lr."""
    words = key.rpartition(".")[2].split("_")
    return {*words, *(["".join(word[:1] for word in words)] if len(words) > 1 else [])}


def nearest_key(word: str, value: Any, kind: type[Strict]) -> str:
    """Give a hint for an unknown key.

    The hint is the key that has the word among its choices (`tracking=tensorboard` for `tensorboard`). Otherwise it is
    the key, among those that take the value, with a similar spelling or the most words in common (`schedule.peak_lr`
    for `learning_rate`).
    """
    types, words = dict(keys_below(kind)), words_of_key(word)
    for key, annotation in types.items():
        if word in choices_of(annotation):
            return f"; did you mean '{key}={word}'?"
    fitting = [key for key, annotation in types.items() if could_take(annotation, value)]
    alike = {key: len(words & words_of_key(key)) / len(words | words_of_key(key)) for key in fitting}
    best = max(fitting, key=lambda key: alike[key], default="")
    close = get_close_matches(word, [key for key in fitting if "." not in key], n=1)
    if close or (best and alike[best]):
        return f"; did you mean '{(close or [best])[0]}'?"
    return f"; known: {', '.join(sorted(key for key in types if '.' not in key))}"


def explain(kind: type[Strict], error: Any) -> str:
    """Describe one of pydantic's errors: the key, what is wrong, and what to write instead."""
    location = [step for step in error["loc"] if step not in ("number", "ramp")]
    key = ".".join(str(step) for step in location)
    if error["type"] == "extra_forbidden":
        word, value = str(location[-1]), error["input"]
        alike = ((name, type_) for name, type_ in keys_below(kind) if name.rpartition(".")[2] == word)
        elsewhere = next((name for name, type_ in alike if could_take(type_, value)), "")  # the same key at its place
        # Find the model at that place in the tree of `kind`, whose keys are valid there.
        for step in location[:-1]:
            if isinstance(step, str):
                field: Any = kind.model_fields[step].annotation
                kind = next(item for item in nested_types(field) if issubclass(item, Strict))
        hint = nearest_key(word, value, kind)
        if elsewhere and elsewhere not in hint:
            also = hint.removesuffix("?") + ", or" if "did you mean" in hint else "; did you mean"
            hint = f"{also} '{elsewhere}'?"
        return f"unknown key '{key}'{hint}"
    if error["type"] == "missing":
        return f"'{key}' is required"
    message = error["msg"].removeprefix("Value error, ").replace("valid tuple", "list")
    message = message[0].lower() + message[1:]
    if error["type"] == "value_error":
        return f"{key}: {message}" if key else message
    if error["type"] == "string_type":
        message += '; put a text in quotes that YAML takes for something else, as in "yes"'
    if "," in str(error["input"]):
        by_type = {"float_parsing": "decimals have a point, as in 0.001", "int_parsing": "write 1000, without commas"}
        message = by_type.get(error["type"], message)
    if error["type"] == "string_pattern_mismatch" and error["ctx"]["pattern"] == NAME_PATTERN:
        message = "use letters (a to z, A to Z), digits, dots, dashes and underscores; begin with a letter or a digit"
    return f"'{key}' is {clipped(' '.join(repr(error['input']).split()))}: {message}"


Changes = Sequence[str] | Mapping[str, Any]
"""Settings to override: `{"schedule.peak_lr": 1e-3}`, or as on the command line `["schedule.peak_lr=1e-3"]`."""


def read_settings(kind: type[Config], source: Any, changes: Changes) -> Config:
    """Read a configuration from a YAML file, a tree in memory or another configuration, change single keys, and check
    the result. Keys that are not set stay so."""
    overrides = list_changes(changes)
    if isinstance(source, kind):
        source = source.model_dump(mode="json", exclude_unset=True)
    if isinstance(source, Mapping):
        return parse_config(kind, dict(source), overrides, origin=kind.__name__)
    return load_config(kind, Path(str(source)), overrides)


def list_changes(changes: Changes | None) -> list[str]:
    """List changes in the form of the command line, `KEY=VALUE`."""
    if isinstance(changes, Mapping):
        return [f"{key}={write_value(value)}" for key, value in changes.items()]
    return [changes] if isinstance(changes, str) else list(changes or ())


def write_value(value: Any) -> str:
    """Write a value as one line of YAML, with quotes where they are needed."""
    value = to_jsonable_python(value, fallback=plain_value)
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True, sort_keys=False)
    return text.removesuffix("...\n").strip()


def plain_value(value: Any) -> Any:
    """Convert a NumPy value, a range, a path or a date for JSON and YAML."""
    if isinstance(value, range):
        return list(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)
