"""A run folder: one process at a time, and a log that survives a kill."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from biphase import inspect
from biphase.errors import InputError
from biphase.files import read_json
from biphase.recipe import Recipe
from biphase.run import Run, claim_run, name_run, open_run, read_done, read_metrics, read_recipe

KINDS: tuple[Literal["train", "validation"], ...] = ("train", "validation")
TRAINED = {"kind": "train", "objective": "mlm", "loss": 2.5, "tokens_seen": 9, "flops_per_second": 3}
VALIDATED = {"kind": "validation", "objective": "mlm", "loss": 2.5, "accuracy": 0.1, "bits_per_byte": 1.5}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Killed while it wrote the line of step 3."""
    made = Run(tmp_path)
    for step in (1, 2):
        made.log(TRAINED | {"step": step})
        made.log(VALIDATED | {"step": step})
    with open(made.metrics, "a") as file:
        file.write('{"kind": "train", "st')
    return made


def test_a_line_cut_short_does_not_count(run: Run) -> None:
    assert [row["step"] for row in read_metrics(run, "train")] == [1, 2]


def test_what_is_logged_again_is_forgotten(run: Run) -> None:
    run.forget_after(1)
    run.log(TRAINED | {"step": 2, "again": True})
    assert read_metrics(run, "train") == [TRAINED | {"step": 1}, TRAINED | {"step": 2, "again": True}]
    assert read_metrics(run, "validation") == [VALIDATED | {"step": 1}]


@pytest.mark.parametrize("line", ["[3]", "3", '{"kind": "train"}', '{"kind": "train", "step": "3"}'])
def test_a_line_that_is_no_record_does_not_count(line: str, run: Run) -> None:
    run.metrics.write_bytes(run.metrics.read_bytes() + b"\n\xff\xfe\n" + line.encode() + b"\n")
    assert [row["step"] for row in read_metrics(run, "train")] == [1, 2]
    run.forget_after(1)
    assert [row["step"] for row in read_metrics(run, "train")] == [1]


@pytest.mark.parametrize(
    ("record", "changes", "told"),
    [
        ("train", {"objective": None}, "the train record of step 3 is left out (objective: Field required)"),
        ("train", {"objective": "sop"}, "(objective: Input should be 'clm', 'mlm', 'mntp', 'meap' or 'causal-mlm')"),
        ("train", {"tokens_seen": None}, "(tokens_seen: Field required)"),
        ("train", {"loss": "1.5"}, "(loss: Input should be a valid number)"),
        ("train", {"flops_per_second": None}, "(flops_per_second: Field required)"),
        ("validation", {"accuracy": None}, "the validation record of step 3 is left out (accuracy: Field required)"),
        ("validation", {"bits_per_byte": [1]}, "(bits_per_byte: Input should be a valid number)"),
    ],
)
def test_a_spoiled_record_is_left_out_and_told_once(
    record: Literal["train", "validation"],
    changes: dict[str, Any],
    told: str,
    run: Run,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = (TRAINED if record == "train" else VALIDATED) | {"step": 3} | changes
    with open(run.metrics, "a") as file:
        file.write("\n" + json.dumps({key: value for key, value in whole.items() if value is not None}) + "\n")
    for _ in range(2):
        assert [row["step"] for kind in KINDS for row in read_metrics(run, kind)] == [1, 2, 1, 2]
    printed = " ".join(capsys.readouterr().err.split())
    assert printed.startswith(f"{run.metrics}:5: no record of a step; it is left out {run.metrics}: ")
    assert printed.endswith(told) and printed.count("left out") == 2


def test_claim_writes_what_the_run_is(tmp_path: Path, tiny_recipe: Callable[..., Recipe]) -> None:
    run, recipe = Run(tmp_path / "name-01234567"), tiny_recipe()
    config = recipe.model_dump(mode="json")
    with claim_run(run, config, {"torch": "2"}):
        assert read_recipe(open_run(run.path)) == recipe
        assert read_json(run.path / "environment.json") == {"torch": "2", "run": "name-01234567"}
        with pytest.raises(InputError, match="in use by another process"), claim_run(run, {}, {}):
            pass
    with claim_run(run, config | {"seed": 5}, {}):
        assert read_recipe(run) == recipe.model_copy(update={"seed": 5})


def test_a_run_that_goes_on_elsewhere_remembers_where_it_was(tmp_path: Path) -> None:
    """Once each, and without an attempt that trained nothing."""
    run = Run(tmp_path / "name-01234567")
    named = [{"device": name, "run": run.path.name} for name in ("lost", "cpu", "H100", "A100")]
    for used, earlier in (("lost", ""), ("cpu", ""), ("H100", "1"), ("cpu", "2"), ("A100", "21"), ("A100", "21")):
        with claim_run(run, {}, {"device": used}):
            if used != "lost":
                run.log(TRAINED | {"step": 1})
        before = [named[int(number)] for number in earlier]
        expected = {"device": used, "run": run.path.name} | ({"earlier": before} if before else {})
        assert read_json(run.environment) == expected


def test_a_run_is_named_by_its_name_or_the_beginning_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for at, name in enumerate(("first-aaaa1111", "first-bbbb2222", "first-long-cccc3333", "second-dddd4444")):
        run = Run(Path("runs") / name)
        (run.steps / "20").mkdir(parents=True)
        (run.steps / "20" / "manifest.json").touch()
        run.log({"kind": "train", "step": 20})
        os.utime(run.metrics, (at % 2, at % 2))
    for given, meant in {
        "first": "runs/first-bbbb2222",
        "runs/first@10": "runs/first-bbbb2222@10",
        "first-aa": "runs/first-aaaa1111",
        "runs/first-aaaa1111": "runs/first-aaaa1111",
        "s": "runs/second-dddd4444",
        "third": "third",
    }.items():
        assert name_run(given) == meant
    assert "first: runs/first-bbbb2222, the last trained of 2 runs of this name\n" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"fir is the beginning of runs/first-aaaa1111, .*: name one"):
        name_run("fir")


def test_a_start_that_did_nothing_leaves_nothing_but_what_was_there(tmp_path: Path) -> None:
    run, note = Run(tmp_path / "name-01234567"), tmp_path / "name-01234567" / "note.txt"
    with pytest.raises(KeyboardInterrupt), claim_run(run, {}, {}):
        raise KeyboardInterrupt
    assert not run.path.exists()
    run.path.mkdir()
    note.write_text("of someone else")
    with pytest.raises(KeyboardInterrupt), claim_run(run, {}, {}):
        raise KeyboardInterrupt
    assert note.exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.yaml", b"name: [", "is not valid YAML"),
        ("config.yaml", b"\xff\xfe", "is not valid YAML"),
        ("config.yaml", b"- 1", "must be a mapping"),
        ("config.yaml", b"name: a", "'init' is required"),
        ("config.yaml", b"curriculum: 3", "'curriculum' is 3"),
        ("done.json", b'{"step": 1', "is not valid JSON"),
        ("done.json", b"[]", "is damaged (it holds [], not a mapping of keys)"),
        ("done.json", b'{"step": "x"}', "is damaged (step: "),
        ("environment.json", b"{", "is not valid JSON"),
        ("environment.json", b"null", "is damaged (it holds null, not a mapping of keys)"),
    ],
)
def test_a_damaged_run_is_named(
    name: str, content: bytes, message: str, tmp_path: Path, tiny_recipe: Callable[..., Recipe]
) -> None:
    """One line with the file and the remedy, from whoever reads it."""
    run = Run(tmp_path)
    with claim_run(run, tiny_recipe().model_dump(mode="json"), {"torch": "2"}):
        run.mark_done({"step": 1, "tokens_seen": 2})
    assert inspect(tmp_path, verify=True)["state"] == "done"
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        inspect(tmp_path, verify=True)
    line = str(caught.value)
    assert line.startswith(f"{tmp_path / name}") and message in line and "delete it" in line
    assert "\n" not in line


def test_done_mark(run: Run) -> None:
    assert not run.is_done
    assert read_done(run) is None
    run.mark_done({"step": 2})
    assert run.is_done
    assert read_done(run) == {"step": 2}


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a run folder"):
        open_run(tmp_path)
