"""What `make gpu` keeps when a part fails, takes too long, or all of it is stopped: nobody may be able to repeat it."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Collection, Iterable
from dataclasses import replace
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
ANSWER = "import json, sys, time; out = sys.argv[-1]; arm = {'tokens_per_second': 7.0, 'useful_share_of_peak': 0.5, "
ANSWER += "'peak_memory_gib': 1.0}; put = lambda x: open(out, 'w').write(json.dumps({'results': [{'arms': x}]})); "


TOO_SHORT = 5


class Impatient(subprocess.Popen):
    """A process whose time is over as soon as it has written something, where that time is short."""

    def wait(self, timeout: float | None = None) -> int:
        if timeout is None or timeout > TOO_SHORT:
            return super().wait(timeout)
        answer = Path(self.args[-1])
        while not answer.exists() or not answer.stat().st_size:  # it is there before anything is written into it
            time.sleep(0.01)
        raise subprocess.TimeoutExpired(self.args, timeout)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("gpu")
    machine = {"commit": "c", "device": "cpu", "torch": "2", "transformers": "5"}
    monkeypatch.setattr(module, "describe_setup", lambda *_: machine)
    monkeypatch.setattr(subprocess, "Popen", Impatient)
    before = signal.getsignal(signal.SIGTERM)
    yield module
    signal.signal(signal.SIGTERM, before)


WITHOUT_BIPHASE = """
import runpy, sys
sys.path = [place for place in sys.path if not place.endswith("/src")]
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
sys.path.insert(0, {folder!r})
sys.argv = ["gpu.py", "--minutes", "0", "--out", {out!r}]
runpy.run_path({folder!r} + "/gpu.py", run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.minutes
def test_biphase_need_not_be_installed(tmp_path: Path) -> None:
    """The head of gpu.py, which describes the machine, where only this checkout has biphase."""
    code = WITHOUT_BIPHASE.format(folder=str(BENCHMARKS), out=str(tmp_path / "gpu.json"))
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("0 of ")


def test_of_several_gpus_one_is_measured(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    code = f"import os; open({str(tmp_path / 'seen')!r}, 'w').write(os.environ['CUDA_VISIBLE_DEVICES']); "
    part = gpu.Part("", [sys.executable, "-c", ANSWER + code + "put({'biphase': arm})"], 60)
    monkeypatch.setattr(gpu, "PARTS", {"one": part})
    run(gpu, tmp_path / "out.json")
    assert (tmp_path / "seen").read_text() == "3"


def run(gpu: Any, out: Path, *given: str) -> tuple[Any, dict[str, Any]]:
    with pytest.raises(SystemExit) as ended:
        sys.argv = ["gpu.py", "--out", str(out), *given]
        gpu.main()
    return ended.value.code, json.loads(out.read_text())["parts"]


def test_a_part_that_fails_stops_nothing_and_the_next_call_goes_on(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = tmp_path / "ran"
    part = {
        "good": f"open({str(ran)!r}, 'a').write('x'); put({{'biphase': arm}})",
        "slow": "put({'biphase': arm}); time.sleep(60)",
        "wrong": "print('first'); raise ValueError('a bad day')",
        "no arm": "put({'trainer': {'error': 'out of memory'}})",
    }
    parts = {name: gpu.Part(name, [sys.executable, "-c", ANSWER + code], 60) for name, code in part.items()}
    parts["slow"] = replace(parts["slow"], seconds=TOO_SHORT)
    tests = "print('tests/a.py::one[x 1] PASSED [ 50%]'); print('tests/a.py::two FAILED'); sys.exit(1)"
    parts["tests"] = gpu.Part("tests", [sys.executable, "-c", "import sys; " + tests], 60)
    monkeypatch.setattr(gpu, "PARTS", parts)
    code, found = run(gpu, tmp_path / "out.json")
    assert code and list(found) == list(parts)
    assert found["good"]["measured"]["results"] and "error" not in found["good"]
    assert found["slow"]["error"] == f"not done after {TOO_SHORT} s" and found["slow"]["measured"]["results"], (
        "what it had stays"
    )
    assert found["wrong"]["error"] == "exit code 1" and found["wrong"]["printed"][-1] == "ValueError: a bad day"
    assert found["no arm"]["error"] == "out of memory"
    assert (found["tests"]["counts"], found["tests"]["failed"]) == ({"passed": 1, "failed": 1}, ["tests/a.py::two"])
    assert "7 tokens/s, MFU 50.0%, 1 GiB" in capsys.readouterr().err

    parts["wrong"] = parts["good"]
    parts["new"] = parts["good"]
    _, found = run(gpu, tmp_path / "out.json")
    assert "error" not in found["wrong"] and len(ran.read_text()) == 3, "what is done is not done again"
    told = capsys.readouterr().err
    assert told.index("new:") < told.index("wrong:"), "what was not tried yet comes first"

    (tmp_path / "out.json").rename(tmp_path / "earlier.json")
    parts["newer"] = parts["good"]
    _, found = run(gpu, tmp_path / "out.json", "--earlier", str(tmp_path / "earlier.json"))
    assert set(found) == set(parts), "an empty folder: what JSONs of earlier calls have is in the new one too"
    assert len(ran.read_text()) == 4, "and is not done again"

    earlier = json.loads((tmp_path / "earlier.json").read_text())
    earlier["machine"]["device"] = "H200"
    (tmp_path / "earlier.json").write_text(json.dumps(earlier))
    _, found = run(gpu, tmp_path / "other.json", "--earlier", str(tmp_path / "earlier.json"), "--only", "good")
    assert list(found) == ["good"] and "is of H200, 2, 5, and this is cpu, 2, 5: its parts" in capsys.readouterr().err


def test_what_stops_it_stops_its_part_and_keeps_the_others(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child"
    good = gpu.Part("good", [sys.executable, "-c", ANSWER + "put({'biphase': arm})"], 60)
    endless = f"import os, time; open({str(child)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    monkeypatch.setattr(gpu, "PARTS", {"good": good, "endless": gpu.Part("", [sys.executable, "-c", endless], 60)})

    def stop() -> None:
        while not (child.exists() and child.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    code, found = run(gpu, tmp_path / "out.json")
    assert "goes on" in code and list(found) == ["good"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(child.read_text()), 0)


def needed_by(names: Iterable[str], but: Collection[str] = ()) -> set[str]:
    """These packages and all that they need, but for some and what these alone need."""
    found: set[str] = set()
    pending = {canonicalize_name(name) for name in names}
    while pending:
        found |= (new := pending - found - set(but))
        told = [Requirement(line) for name in new for line in requires(name) or ()]
        pending = {canonicalize_name(each.name) for each in told if not each.marker or each.marker.evaluate(EXTRA)}
    return found


EXTRA = {"extra": ""}
THERE = ("torch", "transformers", "pandas", "scipy", "matplotlib", "pyarrow", "rich", "xxhash", "attrs")
"""What a machine that computes on a GPU has, with all that these need."""


def test_the_readme_names_the_wheels_that_a_machine_with_pytorch_lacks() -> None:
    readme = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    named = " ".join(re.findall(r'^packages="(?:\$packages )?([^"]*)"$', readme, re.MULTILINE)).split()
    wheels = {*named, *needed_by(["pydantic"])}
    project = tomllib.loads((BENCHMARKS.parent / "pyproject.toml").read_text())["project"]
    needed = needed_by(Requirement(line).name for line in project["dependencies"])
    assert needed - needed_by(THERE, but=wheels) == wheels


def test_packages_that_are_not_there_are_named_before_anything_runs(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    there = gpu.version
    monkeypatch.setattr(gpu, "version", lambda name: there("no such package" if name == "pydantic" else name))
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit, match="lacks pydantic; benchmarks/README"):
        gpu.main()


# growth.py: how costs grow with the work


@pytest.fixture
def growth(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("growth")


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_the_exponent_of_a_cost_is_found_above_its_start(growth: Any, exponent: float) -> None:
    sizes = [10, 100, 1000]
    start = {"cpu_seconds": 3.0, "wall_seconds": 4.0, "peak_mib": 200.0}
    costs = [0.1 * size**exponent for size in sizes]
    runs = [{"cpu_seconds": 3 + cost, "wall_seconds": 4 + cost, "peak_mib": 200.0} for cost in costs]
    row = growth.make_row("it", "rows", sizes, start, runs)
    assert row["cpu_seconds_exponent"] == pytest.approx(exponent)
    assert row["peak_mib_exponent"] == pytest.approx(0), "what does not grow has the exponent 0"


def test_what_a_process_costs_includes_its_children(growth: Any) -> None:
    """The child holds 200 MiB and spends a second of processor time."""
    child = "import time; held = bytearray(b'x') * (200 * 2**20)\nwhile time.process_time() < 1: pass"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True); print('{{}}')"
    found = growth.spend(["-c", parent])
    assert found["cpu_seconds"] > 1
    assert found["peak_mib"] > 200
    assert found["answer"] == {}
    with pytest.raises(SystemExit, match="no good"):
        growth.spend(["-c", "raise ValueError('no good')"])


def test_texts_that_are_repeated_hold_no_copies(growth: Any, tmp_path: Path) -> None:
    """Each size has about its bytes, and the files of a larger one begin with those of a smaller one."""
    source = tmp_path / "source.jsonl"
    source.write_text("".join(json.dumps({"text": f"{number} word " * 20}) + "\n" for number in range(50)))
    files = growth.write_texts([str(source)], [0.02, 0.04, 0.1], tmp_path / "texts")
    texts = [json.loads(line)["text"] for path in files[0.1] for line in path.open()]
    assert len(set(texts)) == len(texts) > 50
    assert sum(len(text) for text in texts) == pytest.approx(100_000, rel=0.15)
    assert files[0.02] == files[0.1][: len(files[0.02])]
