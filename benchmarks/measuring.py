"""What all benchmarks share: the machine in words, arms in processes of their own, rounds, ratios, the JSON.

Light: torch, transformers and most of biphase are imported inside functions, so that an arm can set its allocator and
its threads first, and so that what a library takes to load counts where it is used.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "src"
BUNDLED_TEXT = SOURCE / "biphase" / "bundled" / "corpus" / "train.jsonl.zst"
GIB = 2**30
Found = dict[str, Any]
"""What was measured of one arm once; or `error` and why."""

# What is measured is this folder's biphase, installed or not, here and in the processes of the arms.
sys.path.insert(0, str(SOURCE))
os.environ["PYTHONPATH"] = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def describe_setup(device_name: str, threads: int) -> dict[str, Any]:
    """The machine, the versions and the commit, before anything is measured."""
    from importlib.metadata import version

    from biphase.device import choose_device, describe_machine
    from biphase.machine import num_cores

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    return describe_machine(choose_device(device_name)) | {
        "threads": threads,
        "cores": num_cores(),
        "memory_gib": round(memory, 1),
        "load_before": os.getloadavg()[0],
        "accelerate": version("accelerate"),
        "commit": git_commit(),
    }


def git_commit() -> str:
    git = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(git, cwd=HERE, capture_output=True, text=True) if shutil.which("git") else None
    return (done.stdout.strip() if done else "") or "unknown"


@contextmanager
def clocked(found: Found) -> Iterator[None]:
    """Note the seconds of the block by the clock, and the processor time of the processes that start and end in it."""
    import resource

    def cpu_seconds() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    cpu, started = cpu_seconds(), time.perf_counter()
    yield
    found["wall_seconds"], found["cpu_seconds"] = time.perf_counter() - started, cpu_seconds() - cpu


def one_gpu() -> dict[str, str]:
    """The environment of what is measured: of several GPUs the first alone, since Trainer would take them all."""
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}


def call(command: list[str], environment: dict[str, str]) -> None:
    """Run a command to its end, on one GPU. Raises `CalledProcessError` with what the process wrote."""
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    variables = os.environ | quiet | one_gpu() | environment
    subprocess.run(command, check=True, env=variables, capture_output=True, text=True)


def run_job(script: str, job: Any, threads: int, environment: dict[str, str]) -> Any:
    """What `script` answers to a job (a dataclass) in a process of its own, with so many threads.

    The script gets `--job` with the job as JSON, and `--answer` with the file for its answer. Raises as `call` does.
    """
    counts = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    with tempfile.NamedTemporaryFile("r", suffix=".json") as answer:
        command = [sys.executable, script, "--job", json.dumps(asdict(job)), "--answer", answer.name]
        call(command, counts | environment)
        return json.loads(answer.read())


def error_of(failed: subprocess.CalledProcessError) -> Found:
    """The last lines of a process that failed, as what was found of its arm; the other arms go on."""
    code = failed.returncode
    lines = failed.stderr.strip().splitlines() or [f"ended by signal {-code}" if code < 0 else f"exit code {code}"]
    return {"error": lines[-1], "printed": lines[-40:]}


def take_turns(
    arms: Sequence[str], rounds: int, measure: Callable[[str, int], Found], rate: Callable[[Found], str]
) -> list[dict[str, Found]]:
    """All arms once in each round, each result told as it comes."""
    measured: list[dict[str, Found]] = []
    for number in range(rounds):
        measured.append({})
        for arm in arms:
            found = measured[-1][arm] = measure(arm, number)
            say(f"  round {number + 1}/{rounds} {arm}: {found['error'] if 'error' in found else rate(found)}")
    return measured


def whole_pairs(rounds: list[dict[str, Found]], ours: str, theirs: str) -> list[tuple[Found, Found]]:
    """What two arms found in the rounds in which neither failed."""
    pairs = [(each[ours], each[theirs]) for each in rounds]
    return [pair for pair in pairs if "error" not in pair[0] and "error" not in pair[1]]


def summarize_ratios(ratios: list[float], by_cpu_seconds: list[float]) -> dict[str, float]:
    return {
        "median": statistics.median(ratios),
        "min": min(ratios),
        "max": max(ratios),
        "median_by_cpu_seconds": statistics.median(by_cpu_seconds),
    }


def medians_of(found: list[Found], keys: Sequence[str]) -> dict[str, float]:
    return {key: statistics.median(each[key] for each in found) for key in keys}


def result_path(what: str, machine: object, threads: int) -> Path:
    """Where the JSON goes unless told otherwise."""
    label = re.sub(r"[^a-z0-9]+", "-", str(machine).lower()).strip("-")
    return HERE / "results" / f"{date.today().isoformat()}-{what}-{label}-{threads}-threads.json"


def make_document(what: str, machine: dict[str, Any], options: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The head of a JSON: what was asked, when, where, how."""
    return {
        "what": what,
        "date": date.today().isoformat(),
        "machine": machine | {"load_after": os.getloadavg()[0]},
        "options": {key: str(value) if isinstance(value, Path) else value for key, value in options.items()},
        "minutes": seconds / 60,
    }


def save(path: Path, document: dict[str, Any]) -> None:
    from biphase.files import write_json

    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, document)
