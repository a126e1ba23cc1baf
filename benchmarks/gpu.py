"""What a GPU is lent for minutes for: its tests, cells that share it, three sizes beside Trainer, kernels.

    make gpu                                           # the most valuable parts, at most 9 minutes, one JSON
    make gpu                                           # again, where there is time: the parts that are left
    python benchmarks/gpu.py --only 610m 1b            # some parts, also those that are done
    python benchmarks/gpu.py --out FOLDER/gpu.json     # where the JSON goes
    python benchmarks/gpu.py --out FOLDER/gpu.json --earlier first.json   # goes on from JSONs that were moved away

Each part runs in processes of its own and may fail, or run out of time, without stopping the others. The JSON is
written after every part, so what was measured stays when the machine is taken away.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from measuring import HERE, Found, describe_setup, make_document, one_gpu, result_path, save, say

TESTS = [
    sys.executable,
    "-m",
    "pytest",
    "-m",
    "gpu",
    "-vv",
    "-rfE",
    "--tb=short",
    str(HERE.parent / "tests/test_gpu.py"),
]
RUN = [sys.executable, str(HERE / "pretraining.py"), "--device", "cuda", "--no-breakdown", "--memory-tokens", "0"]
RUN += ["--rounds", "1", "--warmup-steps", "5", "--steps", "10"]
CELLS = [sys.executable, str(HERE / "grid.py"), "--rounds", "1", "--workers-per-gpu", "8"]
CELLS += ["--seeds", "0", "1", "--steps", "100"]
SAME = ("device", "torch", "transformers")
"""What two calls must have in common for their parts to stand in one JSON."""
TOLD_LINES = 80
"""How many of the last lines of a part that failed are kept: nobody may be able to run it once more."""


@dataclass(frozen=True)
class Part:
    what: str
    command: list[str]
    """Told with `--out FILE` where to write what it measured; tests tell by what they print."""
    seconds: int
    """How long it may take."""


def pretrain(preset: str, microbatch_tokens: int, seconds: int, *, accumulate: int = 4, arm: str = "biphase") -> Part:
    settings = ["--presets", preset, "--microbatch-tokens", str(microbatch_tokens), "--accumulate", str(accumulate)]
    what = f"{preset}, {microbatch_tokens:,} tokens a forward pass, {arm}: tokens/s, MFU, memory"
    return Part(what, [*RUN, *settings, "--arms", arm], seconds)


def pretrain_padded(preset: str, samples: int, seconds: int, arm: str = "trainer") -> Part:
    settings = ["--presets", preset, "--batch-samples", str(samples), "--accumulate", str(128 // samples)]
    return Part(f"{preset}, {samples} padded samples a forward pass, {arm}", [*RUN, *settings, "--arms", arm], seconds)


PARTS = {
    "tests": Part("GPU tests", TESTS, 200),
    "210m": pretrain("210m", 32_768, 120),
    "cells": Part("8 cells that share the GPU", [*CELLS, "--arms", "biphase"], 90),
    "610m": pretrain("610m", 32_768, 120),
    "210m-trainer": pretrain_padded("210m", 16, 90),
    "kernels": Part("attention and head alone", [sys.executable, str(HERE / "kernels.py")], 120),
    "1b": pretrain("1b", 16_384, 120),
    "610m-trainer": pretrain_padded("610m", 8, 90),
    "1b-trainer": pretrain_padded("1b", 8, 90),
    "cells-trainer": Part("the same cells by Trainer, one after the other", [*CELLS, "--arms", "trainer-loop"], 150),
    "210m-large": pretrain("210m", 65_536, 90, accumulate=2),
    "210m-small": pretrain("210m", 8192, 60, accumulate=16),
    "210m-eager": pretrain("210m", 32_768, 60, arm="biphase-eager"),
    "210m-trainer-compile": pretrain_padded("210m", 16, 240, "trainer-heap-compile"),
}
"""The most important first, about 128 documents an update, all within 80 GB: what does not fit into the time is for the
next call, if there is one."""


def run_part(name: str, part: Part, seconds: float, answer: Path) -> Found:
    """What a part measured, as far as it came; with `error` and its last lines where it failed or was not done."""
    command = part.command if name == "tests" else [*part.command, "--out", str(answer)]
    told = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONUNBUFFERED": "1"}
    environment = os.environ | told | one_gpu()
    log = answer.with_suffix(".log")
    with open(log, "w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment, process_group=0)
        try:
            code = process.wait(seconds)
            error = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            error = f"not done after {seconds:.0f} s"
        finally:
            if process.poll() is None:  # with the processes of its arms, which would go on beside the next part
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    lines = log.read_text(errors="replace").strip().splitlines()
    found = read_tests(lines) if name == "tests" else read_answer(answer)
    error = error or found.pop("error", "")
    log.unlink()
    answer.unlink(missing_ok=True)
    return found | ({"error": error, "printed": lines[-TOLD_LINES:]} if error else {})


def read_tests(lines: list[str]) -> Found:
    """How many tests passed, failed, …, as pytest told one after the other, and which failed."""
    told = [match for line in lines if (match := re.match(r"(\S+::.+) (PASSED|FAILED|SKIPPED|ERROR)\b", line))]
    failed = [match[1] for match in told if match[2] in ("FAILED", "ERROR")]
    counts = Counter(match[2].lower() for match in told)
    return {"counts": counts, "failed": failed} | ({} if counts["passed"] else {"error": "no test passed"})


def read_answer(answer: Path) -> Found:
    """What a part has written; an error where it is nothing, or where no arm of it could be measured."""
    if not answer.exists():
        return {"error": "nothing was measured"}
    measured = json.loads(answer.read_text())
    errors = [arm.get("error") for result in measured["results"] for arm in result["arms"].values()]
    return {"measured": measured} | ({"error": errors[0]} if errors and all(errors) else {})


def describe(found: Found) -> str:
    told = [f"failed: {found['error']}"] if "error" in found else []
    told += [f"{number} {outcome}" for outcome, number in found.get("counts", {}).items()]
    for result in found.get("measured", {}).get("results", ()):
        told += [describe_arm(result.get("what", name), seen, name) for name, seen in result["arms"].items()]
    return "; ".join(told)


def describe_arm(what: str, seen: Found, arm: str) -> str:
    if "error" in seen:
        return f"{arm}: {seen['error']}"
    if "milliseconds" in seen:
        return f"{what}, {arm} {seen['milliseconds']:.1f} ms"
    if "cells_per_hour" in seen:
        return f"{arm} {seen['cells_per_hour']:,.0f} cells/h"
    share, memory = seen["useful_share_of_peak"], seen["peak_memory_gib"]
    return f"{arm} {seen['tokens_per_second']:,.0f} tokens/s, MFU {share:.1%}, {memory:.0f} GiB"


def find_missing() -> list[str]:
    """What of the packages that biphase needs this Python does not have."""
    project: Any = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    missing = []
    for requirement in [*project["dependencies"], "pytest", "accelerate"]:
        name = re.split(r"[^\w.-]", requirement)[0]
        try:
            version(name)
        except PackageNotFoundError:
            missing.append(name)
    return missing


def read_earlier(answers: list[Path], machine: dict[str, Any]) -> dict[str, Found]:
    """The parts that earlier calls have measured on such a machine. A JSON of another one is told and left out."""
    parts: dict[str, Found] = {}
    for answer in answers:
        earlier = json.loads(answer.read_text())
        told = [", ".join(str(where[key]) for key in SAME) for where in (earlier["machine"], machine)]
        if told[0] != told[1]:
            say(f"{answer} is of {told[0]}, and this is {told[1]}: its parts are left out")
            continue
        parts |= {name: found for name, found in earlier["parts"].items() if "error" not in found or name not in parts}
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts together")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--earlier", nargs="+", default=[], metavar="JSON", help="what earlier calls have written, to go on from"
    )
    options = parser.parse_args()
    if absent := [answer for answer in options.earlier if not Path(answer).is_file()]:
        sys.exit(f"--earlier: there is no {', '.join(absent)}")
    if missing := find_missing():
        sys.exit(f"{sys.executable} lacks {', '.join(missing)}; benchmarks/README.md says how to bring them as wheels")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; the same command goes on"))
    started = time.monotonic()
    machine = describe_setup("auto", os.cpu_count() or 1)
    out = options.out or result_path("gpu", machine["device"], 1)
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.exists() and any(json.loads(out.read_text())["machine"][key] != machine[key] for key in SAME):
        sys.exit(f"{out} is of another machine, and would be written over; give another --out")
    parts = read_earlier([*map(Path, options.earlier), *([out] if out.exists() else [])], machine)
    left_over = [name for name in PARTS if "error" in parts.get(name, {"error": ""})]
    for name in options.only or sorted(left_over, key=lambda name: name in parts):  # failed ones once more, at last
        part = PARTS[name]
        left = 60 * options.minutes - (time.monotonic() - started)
        if left < part.seconds / 2:
            say(f"{name}: left for the next call")
            continue
        say(f"{name}: {part.what}")
        begun = time.monotonic()
        found = run_part(name, part, min(left, part.seconds), out.with_name(f"{out.stem}-{name}.json"))
        seconds = time.monotonic() - begun
        parts[name] = {"what": part.what, "commit": machine["commit"], "seconds": seconds, **found}
        say(f"  {describe(found)} ({seconds:.0f} s)")
        document = make_document("a GPU's first day", machine, vars(options), time.monotonic() - started)
        save(out, document | {"parts": parts})
    print(f"{sum('error' not in found for found in parts.values())} of {len(PARTS)} parts are in {out}")
    sys.exit(any("error" in found for found in parts.values()))


if __name__ == "__main__":
    main()
