"""JSON and YAML texts → trees of plain values that everything can work with: bounded in depth and size, no key twice.

What Python's readers let through, or end with errors of other kinds over, is refused as an error of the format: values
so deep that a later walk through them fails, numbers of thousands of digits, halves of surrogate pairs, keys that stand
twice, of which the last would win unseen, aliases that grow to billions of values, numbers that YAML 1.1 reads to
another base than they are written in.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import yaml

MAX_DEPTH = 100
"""Nothing that biphase reads is nested deeper. Python's own walks through a value end some hundred levels further."""

MAX_YAML_CHARACTERS = 2_000_000
"""A file that people write is shorter. PyYAML reads a megabyte in ten seconds."""

MAX_YAML_VALUES = 200_000
"""How many values aliases may stand for in all."""

DEEP = f"nested more than {MAX_DEPTH} deep"
DIGITS = "a number of thousands of digits"
HALF = "half of a surrogate pair, which is no character"

TAG = "tag:yaml.org,2002:"
KEY_TAGS = {TAG + kind for kind in ("str", "int", "float", "bool", "null", "merge", "value")}
OTHER_BASE = re.compile(r"[-+]?0[0-9_]+|.*:.*")
"""What YAML 1.1 takes for a number to the base of 8 (`0100` is 64) or 60 (`1:30` is 90), among its numbers."""


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises `json.JSONDecodeError`."""
    try:
        value = READER.decode(text)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError(DEEP, text, 0) from None
    except RepeatedKeyError as error:
        raise json.JSONDecodeError(f"the key '{error}' stands twice", text, 0) from None
    except ValueError:
        raise json.JSONDecodeError(DIGITS, text, 0) from None
    if text.count("[") + text.count("{") > MAX_DEPTH and is_deep(value):
        raise json.JSONDecodeError(DEEP, text, 0)
    if "\\u" in text and "\\ud" in text.lower() and has_surrogates(value):
        raise json.JSONDecodeError(HALF, text, text.lower().find("\\ud"))
    return value


class RepeatedKeyError(ValueError):
    """A key that stands twice in an object."""


def make_object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise RepeatedKeyError(Counter(key for key, _ in pairs).most_common(1)[0][0])
    return value


READER = json.JSONDecoder(object_pairs_hook=make_object)


def is_deep(value: Any) -> bool:
    """Whether lists and mappings stand in one another further than `MAX_DEPTH`."""
    level = [value]
    for _ in range(MAX_DEPTH):
        nested = [item for item in level if isinstance(item, list | dict)]
        level = [child for item in nested for child in (item.values() if isinstance(item, dict) else item)]
    return any(isinstance(item, list | dict) for item in level)


def has_surrogates(value: Any) -> bool:
    """Whether a text in a tree cannot be written as UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return True
    return False


def parse_yaml(text: str) -> Any:
    """The value of a YAML text of one document. Raises `yaml.YAMLError`."""
    if len(text) > MAX_YAML_CHARACTERS:
        raise yaml.YAMLError(f"it has more than {MAX_YAML_CHARACTERS:,} characters")
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        count_values(node, {}, 0)
        value = loader.construct_document(node)
    except RecursionError:
        raise yaml.YAMLError(DEEP) from None
    except (ValueError, OverflowError) as error:  # a date that is none, a number of thousands of digits
        raise yaml.YAMLError(DIGITS if "digits" in str(error) else str(error)) from None
    finally:
        loader.dispose()
    if has_surrogates(value):
        raise yaml.YAMLError(HALF)
    return value


def count_values(node: yaml.Node, counted: dict[int, int], depth: int) -> int:
    """How many values a node stands for, with what its aliases repeat.

    Args:
        counted: the counts of nodes that were met before, by `id`; 0 for those that are being counted.

    Raises:
        yaml.YAMLError: it holds itself, a key twice, a number to another base, or is too deep or too large.
    """
    if id(node) in counted:
        if counted[id(node)] == 0:
            raise yaml.YAMLError(f"line {line_of(node)}: a value that holds itself")
        return counted[id(node)]
    if depth > MAX_DEPTH:
        raise yaml.YAMLError(DEEP)
    counted[id(node)] = 0
    children: list[yaml.Node] = []
    if isinstance(node, yaml.ScalarNode):
        refuse_base(node)
    elif isinstance(node, yaml.MappingNode):
        refuse_keys(node)
        children = [child for pair in node.value for child in pair]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    total = 1 + sum(count_values(child, counted, depth + 1) for child in children)
    if total > MAX_YAML_VALUES:
        raise yaml.YAMLError(f"line {line_of(node)}: aliases that stand for more than {MAX_YAML_VALUES:,} values")
    counted[id(node)] = total
    return total


def refuse_base(node: yaml.ScalarNode) -> None:
    """Raise `yaml.YAMLError` for a number that YAML 1.1 reads to another base than people do."""
    if node.tag in (TAG + "int", TAG + "float") and node.style is None and OTHER_BASE.fullmatch(node.value):
        base = "60" if ":" in node.value else "8"
        raise yaml.YAMLError(
            f"line {line_of(node)}: {node.value} is a number to the base of {base} in YAML; write it to the base of "
            "10, or a text in quotes"
        )


def refuse_keys(node: yaml.MappingNode) -> None:
    """Raise `yaml.YAMLError` for a mapping in which a key stands twice, naming it and both lines, or is a date."""
    lines: dict[tuple[str, str], int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        if key.tag not in KEY_TAGS:
            raise yaml.YAMLError(f"line {line_of(key)}: the key {key.value} is no text; put it in quotes")
        name = (key.tag, key.value)
        if name in lines:
            raise yaml.YAMLError(f"the key '{key.value}' stands twice, in lines {lines[name]} and {line_of(key)}")
        lines[name] = line_of(key)


def line_of(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
