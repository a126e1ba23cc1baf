"""What Python's readers of JSON and YAML let through, and what of it is refused."""

import json

import pytest
import yaml

from biphase.files import parse_json, parse_yaml

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)


@pytest.mark.parametrize("value", [{"a": [1, 2.5, None, True, "ä 😀 [[[["]}, "x", [[[]]], {"text": "{" * 500}])
def test_json_reads_as_python_does(value: object) -> None:
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value, ensure_ascii=False)) == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "nested more than 100 deep"),
        ("[" * 200 + "]" * 200, "nested more than 100 deep"),
        ('{"a":' * 200 + "1" + "}" * 200, "nested more than 100 deep"),
        ("9" * 5000, "4300 digits"),
        (r'"\ud800"', "surrogate"),
        (r'{"\uDC00": 1}', "surrogate"),
        ('[{"text": 1, "id": 2, "text": 3}]', "the key 'text' occurs twice"),
        ("[1,", "Expecting value"),
    ],
)
def test_json_that_is_refused(text: str, reason: str) -> None:
    with pytest.raises(json.JSONDecodeError, match=reason):
        parse_json(text)


def test_yaml_reads_as_pyyaml_does() -> None:
    text = "a: &x {b: 1, c: [1, 2]}\nd: &y {<<: *x, e: 2}\ne:\n  <<: *y\n  b: 3\n1: 2020-02-03\n"
    assert parse_yaml(text) == yaml.safe_load(text)
    assert parse_yaml("") is None
    text = "[0, 0x10, 1_000, 0.05, -0.5, 08, '0100', '1:30', 10:30 o'clock, 1.e+3]"
    assert parse_yaml(text) == yaml.safe_load(text)


def test_numbers_to_another_base_are_texts() -> None:
    assert parse_yaml("[0100, 1:30, -1:30.5, 0x10]") == ["0100", "1:30", "-1:30.5", 16]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 1: the key 'a' occurs twice"),
        ("a:\n  b: 1\n  'b': 2\n", "line 2: the key 'b' occurs twice"),
        (BOMB, "expands to more than 200,000 values"),
        ("a: &a [*a]\n", "expands to more than 200,000 values"),
        ("a: " + "[" * 5000 + "]" * 5000, "nested more than 100 deep"),
        ("a: " + "9" * 5000, "line 1: '9{40}…' is not a valid int"),
        ("a: 1\nb: 2020-99-99\n", "line 2: '2020-99-99' is not a valid timestamp; write a text in quotes"),
        ("a: !!bool x\n", "line 1: 'x' is not a valid bool"),
        ("a: !!int ''\n", "line 1: '' is not a valid int"),
        ("a: !!timestamp x\n", "line 1: 'x' is not a valid timestamp"),
        ('a: "\\ud800"\n', "surrogate"),
        ("a: !!python/object/apply:os.system ['true']\n", "could not determine a constructor"),
        ("x" * 2_000_001, "2,000,000 characters"),
        ("2024-01-01: 3\n", "keys must be str"),
        ("!!binary aGk=: 3\n", "keys must be str"),
    ],
)
def test_yaml_that_is_refused(text: str, reason: str) -> None:
    with pytest.raises(yaml.YAMLError, match=reason):
        parse_yaml(text)
