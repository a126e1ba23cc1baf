"""What a change of the code's shape must leave alone, written to files that can be compared before and after.

    python scripts/record_surface.py OUT && git diff --no-index OUT_BEFORE OUT

Plans of the bundled studies and `study advise` as JSON, the paper's report to the byte, the text of `--help` of every
command, and the sentences of all refusals in the source. `tests/golden/` holds the rest: identities, losses, scores.
"""

import argparse
import ast
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "biphase"
ENVIRONMENT = {"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb", "HF_HUB_OFFLINE": "1"}
BUDGETS = ("0.3", "6", "72", "2000")
"""Hours of one H100."""


def ask(*words: str) -> str:
    """What the command writes to both streams, and its exit code."""
    made = subprocess.run(
        [sys.executable, "-m", "biphase", *words], capture_output=True, text=True, env=os.environ | ENVIRONMENT
    )
    return f"{made.stdout}{made.stderr}exit code {made.returncode}\n"


def list_commands(words: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every command and group, found in the help of the group above it."""
    names = re.findall(r"^│ ([a-z][a-z-]*) {2,}[A-Z]", ask(*words, "--help"), re.MULTILINE)
    return [words, *(command for name in names for command in list_commands((*words, name)))]


def list_refusals() -> list[str]:
    """The sentences of all `raise InputError(…)`, without the names of what stands in braces."""
    sentences = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith("Error") and node.args:
                parts = [part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant)]
                sentences.append("…".join(part for part in parts if isinstance(part, str)))
    return sorted(sentences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    out.mkdir(parents=True)
    for file in sorted((SOURCE / "bundled" / "studies").glob("*.yaml")):
        plan = ask("study", "plan", file.stem, "--device", "H100", "--format", "json")
        (out / f"plan-{file.stem}.json").write_text(plan)
    text = str(SOURCE / "bundled" / "corpus" / "train.jsonl.zst")
    for hours in BUDGETS:
        advice = ask("study", "advise", "--text", text, "--hours", hours, "--device", "H100", "--format", "json")
        (out / f"advise-{hours}.json").write_text(advice)
    (out / "help.txt").write_text(
        "".join(f"== {' '.join(words)}\n{ask(*words, '--help')}" for words in list_commands())
    )
    (out / "refusals.txt").write_text("\n".join(list_refusals()) + "\n")
    ask("report", "paper", "--out", str(out / "paper"))
    files = sorted(path for path in (out / "paper").rglob("*") if path.is_file())
    hashes = [f"{hashlib.sha256(path.read_bytes()).hexdigest()[:16]} {path.relative_to(out)}" for path in files]
    (out / "paper.txt").write_text("\n".join(hashes) + "\n")


if __name__ == "__main__":
    main()
