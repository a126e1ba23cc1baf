"""The command: help with examples; one line; exit code 2 for what a user can fix, 75 while busy, 143 when stopped."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas
import pytest
import yaml

import biphase.cli.app as cli
from biphase import __version__
from biphase.console import out
from biphase.errors import DOCS, BusyError, InputError, StoppedError, first_line
from biphase.recipe import Recipe
from biphase.run import Run, read_metrics, whole_steps


def verbs(app: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every verb as its words."""
    for name, sub in app.resolved_commands().items():
        if not name.startswith("-"):
            yield from [(*path, name)] if sub.default_command else verbs(sub, (*path, name))


VERBS = sorted(verbs(cli.app))


@pytest.fixture
def run_main(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Calls the command in this process: exit code, stdout, stderr."""
    monkeypatch.setattr(cli, "prepare_process", lambda: None)

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["biphase", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def help_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def read(*words: str, columns: int = 80) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        cli.run_command(words)
        return capsys.readouterr().out

    return read


@pytest.fixture
def recipe_file(tiny_recipe: Callable[..., Recipe], tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_recipe().model_dump(mode="json")))
    return path


def refused(result: tuple[int, str, str]) -> str:
    """The one line behind exit code 2."""
    code, out, err = result
    assert code == 2
    assert out == ""
    assert err.startswith("biphase: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_help_of_every_verb(verb: tuple[str, ...], help_of: Callable[..., str]) -> None:
    """It has an example. Neither names nor defaults are cut at 80 columns, and every parameter says what it is."""
    assert f"biphase {' '.join(verb)}" in help_of(*verb, "--help", columns=200).partition("Example:")[2]
    text = help_of(*verb, "-h")
    assert not re.findall(r"\S…", text)
    assert not re.findall(r"│ [ *] [A-Z-]+ *(\[|│)", text)
    assert not re.findall(r"│ [ *]? ?--[a-z-]+( STR| INT| FLOAT| PATH)? *│", text)


def test_text_fields_may_be_templates_in_every_verb(help_of: Callable[..., str]) -> None:
    texts = [text for verb in VERBS if "--text-field" in (text := help_of(*verb, "-h", columns=400))]
    assert len(texts) == 6
    for text in texts:
        assert "The JSON field or column that holds the text, or a template of several, such as `{title}" in text


def test_verbs_stand_in_the_order_of_the_path(help_of: Callable[..., str]) -> None:
    """Every verb has its place, `-h` is help everywhere, and what completes words in a shell can be installed."""
    text = help_of("-h")
    order = [text.index(f"│ {verb} ") for verbs in cli.PATH.values() for verb in verbs]
    assert order == sorted(order)
    assert {verb[0] for verb in VERBS} == {verb for verbs in cli.PATH.values() for verb in verbs}
    assert [text.index(f"─ {title} ─") for title in cli.PATH] == sorted(
        text.index(f"─ {title} ─") for title in cli.PATH
    )
    assert "--install-completion" in text
    assert "biphase init recipe" in text
    for group in cli.GROUPS:
        assert help_of(group, "-h").rpartition("Example: `biphase ")[2].startswith(f"{group} ")
    assert (DOCS / "index.md").is_file() and str(DOCS / "index.md") in help_of("-h", columns=200)
    assert "Example" in help_of("study", "plan", "-h")


def test_help_loads_no_command() -> None:
    code = "import sys; from biphase.cli.app import run_command; run_command(['-h']); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"pydantic", "numpy", "pandas", "torch", "biphase.cli.commands"}.intersection(loaded)


def test_version(run_main: Any) -> None:
    assert run_main("--version") == (0, f"biphase {__version__}\n", "")


def test_help_where_the_locale_is_ascii() -> None:
    variables = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "biphase", "demo", "--help"]
    done = subprocess.run(command, env=variables, capture_output=True, check=False)
    assert done.returncode == 0 and "╭─ Arguments" in done.stdout.decode()


def test_quiet_leaves_the_result_and_errors(run_main: Any, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Some words, and others. " * 200)
    command = ["tokenizer", "train", str(tmp_path / "text.txt"), "--vocab-size", "300", "--out"]
    told = run_main(*command, str(tmp_path / "loud"))
    quiet = run_main("--quiet", *command, str(tmp_path / "quiet"))
    assert told[0] == quiet[0] == 0 and told[1].replace("loud", "quiet") == quiet[1] != "" and not quiet[2]
    code, _, errors = run_main("--quiet", "inspect", str(tmp_path / "nowhere"))
    assert code == 2 and "nowhere" in errors
    assert "loud: " in run_main(*command, str(tmp_path / "loud"))[1]


def test_options_that_people_guess_are_understood(run_main: Any, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Some words, and others. " * 200)
    out = tmp_path / "tokenizer"
    code, told, _ = run_main("tokenizer", "train", str(tmp_path / "text.txt"), f"--output={out}", "--vocab-size", "300")
    assert code == 0 and str(out) in told and (out / "tokenizer.json").exists()
    assert (
        run_main("search", "nowhere", "who?", "--filter", "year")[2]
        == run_main("search", "nowhere", "who?", "--where", "year")[2]
    )
    assert (
        run_main("advise", "--flops", "none")[2].partition(":")[2]
        == run_main("study", "advise", "--flops", "none")[2].partition(":")[2]
    )


def test_what_a_library_says_is_not_cut_at_a_colon() -> None:
    error = ValueError("No backend from one of: \n(1) a file, \n(2) a slow tokenizer")
    assert first_line(error) == "No backend from one of: (1) a file, (2) a slow tokenizer"
    assert first_line(ValueError("\n one\ntwo")) == "one" and first_line(KeyError("x")) == "KeyError 'x'"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (InputError("a\nline  broken in two"), 2, "biphase: a line broken in two\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/x"),
            2,
            "biphase: No space left on device: runs/x; fix",
        ),
        (
            OSError(errno.EDQUOT, "Disk quota exceeded"),
            2,
            "biphase: Disk quota exceeded: while writing; fix this, or ",
        ),
        (OSError(errno.ENOENT, "No such file", "/no/a/.x.yaml.part"), 2, "biphase: No such file: /no/a/x.yaml; fix"),
        (OSError(errno.ENOSPC, "No space left", "a/x", None, "b/.y.part/x"), 2, "biphase: No space left: b/y/x; fix"),
        (
            OSError(errno.ENOTDIR, "Not a directory", "file/.x.12.part"),
            2,
            "biphase: Not a directory: file/x; fix this",
        ),
        (BusyError("runs/a is in use by another process"), 75, "biphase: runs/a is in use"),
        (StoppedError("stopped at step 5 of 20; run the same"), 143, "biphase: stopped at step 5 of 20; run the same"),
        (StoppedError(signum=signal.SIGINT), 130, "biphase: stopped; run the same command to continue"),
        (Exception("missing"), 2, "biphase: a tokenizer or a model is damaged (missing); replace its files"),
        (type("PanicException", (BaseException,), {})("a key"), 2, "biphase: a tokenizer or a model is damaged (a k"),
        (
            ImportError("libtorch_cpu.so: failed to map segment from shared object"),
            2,
            "biphase: out of memory (libtorch_cpu.so: failed to map segment from shared object): end other",
        ),
        (MemoryError("Unable to allocate 7 PiB"), 2, "biphase: out of memory (Unable to allocate 7 PiB): end other"),
    ],
)
def test_exit_codes(error: BaseException, code: int, line: str, run_main: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(words: list[str]) -> None:
        raise error

    monkeypatch.setattr(cli, "run_command", fail)
    found, out, err = run_main()
    assert (found, out) == (code, "")
    assert err.startswith(line)
    assert err.count("\n") == 1


def test_a_link_to_itself_is_told(run_main: Any, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    told = refused(run_main("doctor", tmp_path / "loop"))
    assert "loop" in told and "; fix this, or choose another place" in told


def test_a_word_that_is_not_utf_8_is_told(run_main: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a folder could be made, but not all libraries write into it. Relative names begin with the current one."""
    assert "is not UTF-8" in refused(run_main("export", "runs/x", os.fsdecode(b"b\xff")))
    monkeypatch.setattr(os, "getcwd", lambda: os.fsdecode(b"/caf\xe9"))
    assert "'/caf\\udce9', is not UTF-8" in refused(run_main("export", "runs/x", "b"))


def test_parameters_of_verbs_are_options_here(run_main: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An error names what the user typed."""
    assert "--limit-mb is 0 and" in refused(run_main("tokenizer", "train", "x", "--limit-mb", 0, "--out", tmp_path))
    assert "--device only counts with --hours" in refused(run_main("study", "advise", "--device", "H100"))

    def refuse(**_: Any) -> None:
        raise InputError("`hours` as in `x`, `make it`")

    monkeypatch.setattr("biphase.api.studies.advise", refuse)
    assert refused(run_main("study", "advise")) == "biphase: --hours as in `x`, `make it`\n"


def test_our_own_mistakes_keep_their_traceback(run_main: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (
        AssertionError("ours"),
        ImportError("ours"),
        KeyError("ours"),
        OSError("without a number"),
        RuntimeError("ours"),
    ):

        def fail(words: list[str], error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(cli, "run_command", fail)
        with pytest.raises(type(error)):
            cli.main()


def test_ctrl_c(run_main: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """One line and 130; while a module is loaded too, where errors may be swallowed. The tests themselves may have been
    started by a shell that has its background processes pass Ctrl-C over."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    def interrupted(*_: Any, **__: Any) -> None:
        signal.raise_signal(signal.SIGINT)  # to this thread: another one may take that of `os.kill`, and later

    line = "biphase: stopped; run the same command to continue\n"
    monkeypatch.setattr("biphase.api.networks.train_tokenizer", interrupted)
    assert run_main("demo", tmp_path) == (130, "", f"[1/5] train a tokenizer on the bundled text\n{line}")
    lines = ["import signal, time", "try:", " signal.raise_signal(signal.SIGINT)", " time.sleep(60)"]
    (tmp_path / "swallows.py").write_text("\n".join([*lines, "except BaseException:", " pass"]))
    (tmp_path / "cyclopts.py").write_text("import swallows")  # from the first module on
    done = subprocess.run([sys.executable, "-m", "biphase"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, line)
    (tmp_path / "cyclopts.py").unlink()
    run = "import biphase.cli.app as cli; from biphase.__main__ import start_command; {}; start_command()"
    kill = "import os; os.kill(os.getpid(), 2)"
    for code in (
        "cli.run_command = lambda words: __import__('swallows')",
        f"cli.prepare_process = lambda: exec('{kill}')",
    ):
        code = run.format(code)
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (130, line)
    code = "import sys; before = {*sys.modules}; import biphase.__main__; print(*{*sys.modules} - before)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"ctypes", "inspect", "pathlib", "subprocess", "threading", "typing"}.intersection(loaded)


@pytest.mark.slow
@pytest.mark.minutes
def test_a_stop_of_the_real_command(recipe_file: Path, tmp_path: Path) -> None:
    """SIGTERM to the process: it saves, says so and exits with 143. No noise of libraries."""
    command = [sys.executable, "-m", "biphase", "pretrain", str(recipe_file), "--runs", str(tmp_path / "runs")]
    command += ["curriculum.0.steps=4000", "curriculum.1.steps=1", "schedule.decay_steps=0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics: list[Path] = []
    while not metrics and process.poll() is None:
        time.sleep(0.05)
        metrics = list((tmp_path / "runs").glob("*/metrics.jsonl"))
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    assert out == ""
    assert "stopped at step" in err.splitlines()[-1]
    assert "Writing model shards" not in err
    assert "Loading weights" not in err
    run = Run(metrics[0].parent)
    (step,) = whole_steps(run)
    assert [row["step"] for row in read_metrics(run, "train")] == list(range(1, step + 1))


def test_what_a_verb_answers_is_json_where_asked(
    run_main: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing else stands on standard output."""
    passages = pandas.DataFrame([{"by": "BM25", "rank": 1, "score": float("nan"), "id": "a.txt", "text": "leaves"}])
    monkeypatch.setattr("biphase.api.networks.search", lambda **_: passages)
    monkeypatch.setattr("biphase.api.finetuning.predict_rows", lambda *_, **__: (None, [{"text": "é", "label": 1}]))
    monkeypatch.setattr("biphase.api.networks.export", lambda **given: out.print("told") or given["folder"])
    monkeypatch.setattr("biphase.api.folders.read_folder", lambda folder: {"kind": "model", "path": str(folder)})
    asked = {
        ("search", "texts", "leaves?"): [{"by": "BM25", "rank": 1, "score": None, "id": "a.txt", "text": "leaves"}],
        ("predict", "kept", "rows.csv"): [{"text": "é", "label": 1}],
        ("export", "first", "encoder"): {"kind": "model", "path": "encoder"},
    }
    for words, answer in asked.items():
        code, told, _ = run_main(*words, "--format", "json")
        assert (code, json.loads(told)) == (0, answer)


def test_passages_are_shown_with_their_columns(
    run_main: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    passage = {"question_id": "1", "question": "leaves?", "by": "BM25", "rank": 1, "score": 0.5, "id": "a#0"}
    found = [passage | {"text": "leaves fall", "year": 2020}, passage | {"rank": 2, "text": "trees", "source": "oz"}]
    monkeypatch.setattr("biphase.api.networks.search", lambda **_: pandas.DataFrame(found, dtype=object))
    code, told, _ = run_main("search", "texts", "--questions", "asked.txt", "--where", "year>1", "--where", "a=b")
    assert code == 0 and told.split() == [
        *["leaves?", "·", "BM25", "1", "0.5000", "a#0", "year", "2020", "leaves", "fall"],
        *["2", "0.5000", "a#0", "source", "oz", "trees"],
    ]


def test_a_study_that_has_not_begun_has_a_status(
    run_main: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, printed, _ = run_main("study", "status", "demo", "--format", "json")
    lines = {line["name"]: (line["done"], line["total"]) for line in json.loads(printed)["lines"]}
    assert (code, lines) == (0, {"train": (0, 2), "genre": (0, 15), "uner_en_ewt": (0, 15)})
    code, printed, _ = run_main("study", "status", "demo")
    assert code == 0 and re.search(r"uner_en_ewt\W+0\W+0\W+0\W+15\b", printed)
    assert run_main("study", "plan", "demo", "--folder", "mine")[0] == 0
    bundled = run_main("study", "bundle", "demo", "--folder", "mine", "--out", "mine.tar.gz")
    assert "the study's folder mine has no finished score" in refused(bundled)
