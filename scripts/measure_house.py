"""How much there is to read in the package, by folder, and in tests, benchmarks and scripts; and how it was at an
earlier revision.

    python scripts/measure_house.py [--since REVISION] [--line]

Code is what is neither blank, nor comment, nor docstring. A helper with one caller is a function at the top of a module
whose name stands once outside its definition. `--since` is the last tag, or the commit before, unless given. `--line`
prints the package's sums alone.
"""

import argparse
import ast
import io
import subprocess
import tarfile
import tokenize
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

PACKAGE = Path("src/biphase")
BESIDE = ("tests", "benchmarks", "scripts")
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
LAYOUT |= {tokenize.ENDMARKER, tokenize.ENCODING}
MEASURES = ("code", "modules", "functions", "classes", "one caller")


def code_lines(text: str, tree: ast.AST) -> int:
    """The lines with a token that is neither layout, nor comment, nor docstring."""
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def measure(root: Path) -> dict[str, Counter[str]]:
    """Each folder's measures; files beside the folders count as `(root)`."""
    folders: dict[str, Counter[str]] = {}
    helpers: dict[str, str] = {}
    mentions: Counter[str] = Counter()
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        inside = path.relative_to(root).parts
        folder = inside[0] if len(inside) > 1 else "(root)"
        counts = folders.setdefault(folder, Counter())
        counts["code"] += code_lines(text, tree)
        counts["modules"] += 1
        for node in ast.walk(tree):
            counts["functions"] += isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            counts["classes"] += isinstance(node, ast.ClassDef)
            if isinstance(node, ast.Name | ast.Attribute):
                mentions[node.id if isinstance(node, ast.Name) else node.attr] += 1
        helpers |= {node.name: folder for node in tree.body if isinstance(node, ast.FunctionDef)}
    for name, folder in helpers.items():
        folders[folder]["one caller"] += mentions[name] == 1
    return folders


def measure_all(root: Path) -> dict[str, Counter[str]]:
    """The measures of the package by folder, `all` of them, and those of what stands beside it."""
    folders = measure(root / PACKAGE)
    folders["all"] = sum(folders.values(), Counter())
    return folders | {name: sum(measure(root / name).values(), Counter()) for name in BESIDE}


def git(*words: str) -> bytes:
    return subprocess.run(["git", *words], capture_output=True, check=True).stdout


def measure_revision(revision: str) -> dict[str, Counter[str]]:
    """The measures of the house as it was at a revision."""
    with TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(git("archive", revision, str(PACKAGE), *BESIDE))) as archive:
            archive.extractall(folder, filter="data")
        return measure_all(Path(folder))


def find_earlier() -> str | None:
    """The last tag, or else the commit before; None where the history is not here."""
    for words in (("describe", "--tags", "--abbrev=0"), ("rev-parse", "--short", "HEAD~1")):
        try:
            return git(*words).decode().strip()
        except (subprocess.CalledProcessError, FileNotFoundError):
            continue
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since")
    parser.add_argument("--line", action="store_true")
    asked = parser.parse_args()
    since = asked.since or find_earlier()
    now, before = measure_all(Path()), measure_revision(since) if since else {"all": Counter[str]()}
    if asked.line:
        sums = [f"{what} {before['all'][what]:,} → {now['all'][what]:,}" for what in MEASURES]
        print(f"since {since}: {', '.join(sums)}")
        return
    print(f"since {since!s:8}" + "".join(f"{what:>18}" for what in MEASURES))
    for folder in sorted({*now, *before}, key=lambda name: (name in BESIDE, name == "all", name)):
        old, new = before.get(folder, Counter()), now.get(folder, Counter())
        print(f"{folder:14}" + "".join(f"{old[what]:>8,} → {new[what]:>7,}" for what in MEASURES))


if __name__ == "__main__":
    main()
