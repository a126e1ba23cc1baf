"""All that a GPU's first day needs, in minutes: its tests, three sizes beside Trainer, kernels, cells that share it.

    make gpu                                           # every part, at most 9 minutes, one JSON
    python benchmarks/gpu.py --only 610m 1b            # some parts
    python benchmarks/gpu.py --out $OUT/gpu.json       # where the JSON goes

Each part runs in a process of its own and may fail, or run out of time, without stopping the others. The JSON is
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
from dataclasses import dataclass
from pathlib import Path

from measuring import HERE, Found, describe_setup, make_document, result_path, save, say

RUN = [sys.executable, str(HERE / "pretraining.py"), "--device", "cuda", "--no-breakdown", "--memory-tokens", "0"]
RUN += ["--rounds", "1", "--warmup-steps", "5", "--steps", "10", "--accumulate", "4"]
SHARED = ["--rounds", "1", "--arms", "biphase", "trainer-loop", "--workers-per-gpu", "8"]
SHARED += ["--seeds", "0", "1", "--steps", "100"]


@dataclass(frozen=True)
class Part:
    what: str
    command: list[str]
    """Told with `--out FILE` where to write what it measured; tests tell by what they print."""
    seconds: int
    """How long it may take."""


def pretrain(preset: str, microbatch_tokens: int, *arms: str, seconds: int) -> Part:
    what = f"{preset}, {microbatch_tokens:,} tokens a forward pass: tokens/s, MFU, memory"
    settings = ["--presets", preset, "--microbatch-tokens", str(microbatch_tokens), "--arms", *arms]
    return Part(what, [*RUN, *settings], seconds)


PARTS = {
    "tests": Part("GPU tests", [sys.executable, "-m", "pytest", "-m", "gpu", str(HERE.parent / "tests")], 150),
    "210m": pretrain("210m", 32_768, "biphase", "trainer", "trainer-heap-compile", seconds=120),
    "610m": pretrain("610m", 32_768, "biphase", "trainer", seconds=90),
    "1b": pretrain("1b", 16_384, "biphase", "trainer", seconds=90),
    "kernels": Part("attention and head alone", [sys.executable, str(HERE / "kernels.py")], 60),
    "cells": Part("8 cells that share the GPU", [sys.executable, str(HERE / "grid.py"), *SHARED], 90),
    "210m-small": pretrain("210m", 8192, "biphase", "biphase-eager", seconds=60),
    "210m-large": pretrain("210m", 131_072, "biphase", seconds=60),
    "1b-large": pretrain("1b", 65_536, "biphase", seconds=60),
}
"""The most important first: what does not fit into the time is left out, and `--only` runs it."""


def run_part(name: str, part: Part, seconds: float, answer: Path) -> Found:
    """What a part measured, or `error` with the last line that it wrote."""
    is_tests = name == "tests"
    command = part.command if is_tests else [*part.command, "--out", str(answer)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    try:
        printed, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {seconds:.0f} s"}
    finally:
        if process.poll() is None:  # with the processes of its arms, which would go on beside the next part
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    lines = printed.strip().splitlines() or [f"exit code {process.returncode}"]
    if is_tests:
        counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", lines[-1])}
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        found = {"counts": counts, "failed": failed, "last_line": lines[-1]}
        return found if counts.get("passed") and not process.returncode else found | {"error": lines[-1]}
    if process.returncode or not answer.exists():
        return {"error": lines[-1]}
    return {"measured": json.loads(answer.read_text())}


def describe(found: Found) -> str:
    if "error" in found:
        return f"failed: {found['error']}"
    if "counts" in found:
        return found["last_line"]
    told = []
    for result in found["measured"].get("results", ()):
        for arm, seen in result["arms"].items():
            if "milliseconds" in seen:
                told.append(f"{result['what']}, {arm} {seen['milliseconds']:.1f} ms")
                continue
            rate = f"{seen['tokens_per_second']:,.0f} tokens/s" if "error" not in seen else seen["error"]
            share = f", MFU {seen['useful_share_of_peak']:.1%}" if "error" not in seen else ""
            told.append(f"{arm} {rate}{share}")
    return "; ".join(told) or "done"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts together")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    started = time.monotonic()
    machine = describe_setup("auto", os.cpu_count() or 1)
    out = options.out or result_path("gpu", machine["device"], 1)
    parts: dict[str, Found] = {}
    for name in options.only:
        left = 60 * options.minutes - (time.monotonic() - started)
        part = PARTS[name]
        say(f"{name}: {part.what}")
        begun = time.monotonic()
        answer = out.with_name(f"{out.stem}-{name}.json")
        enough = left > part.seconds / 2
        found = run_part(name, part, min(left, part.seconds), answer) if enough else {"error": "no time was left"}
        parts[name] = {"what": part.what, "seconds": time.monotonic() - begun, **found}
        answer.unlink(missing_ok=True)
        say(f"  {describe(found)}")
        document = make_document("a GPU's first day", machine, vars(options), time.monotonic() - started)
        save(out, document | {"parts": parts})
    print(f"written to {out}")
    sys.exit(any("error" in found for found in parts.values()))


if __name__ == "__main__":
    main()
