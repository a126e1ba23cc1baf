"""How much there is to read in the package, by folder, and in tests, benchmarks and scripts; and how it was at an
earlier revision.

    python scripts/measure_house.py [--since REVISION] [--line] [--check]

Code is what is neither blank, nor comment, nor docstring. A helper with one caller is a function at the top of a module
whose name stands once outside its definition. `--since` is the last tag, or the commit before, unless given. `--line`
prints the package's sums alone. `--check` prints the sums with their caps and the depth of three paths, and fails above
a cap.

A path is what a reader walks who follows all calls of a function in the order in which they are written, each function
once. Its depth is the number of times that the reader comes back to a file that he had left.
"""

import argparse
import ast
import io
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

PACKAGE = Path("src/biphase")
BESIDE = ("tests", "benchmarks", "scripts")
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
LAYOUT |= {tokenize.ENDMARKER, tokenize.ENCODING}
MEASURES = ("code", "modules", "functions", "classes", "one caller")
PATHS = {
    "a recipe into train": ("pretraining.loop", "train"),
    "a cell into its score": ("finetuning.fit", "fit_cells"),
    "a plan into its page": ("studies.report", "report_study"),
}
"""Path → the module and the function where it begins."""
CAPS = {
    "code": 28_611,
    "modules": 148,
    "import lines": 3_016,
    "longest function": 53,
    "a recipe into train": 88,
    "a cell into its score": 77,
    "a plan into its page": 144,
}
"""A feature may raise a cap in the commit that brings it, with the reason; it may not raise the depth of a path."""


def code_lines(text: str, tree: ast.AST) -> set[int]:
    """The numbers of the lines with a token that is neither layout, nor comment, nor docstring."""
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - docstrings


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
        counts["code"] += len(code_lines(text, tree))
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


Function = ast.FunctionDef | ast.AsyncFunctionDef


class Calls:
    """The functions of the package, by module and name (`Class.method` for methods), and what each of them names."""

    def __init__(self, package: Path) -> None:
        self.functions: dict[tuple[str, str], Function] = {}
        self.imports: dict[str, dict[str, tuple[str, str]]] = {}  # module → a name in it → where that is defined
        self.import_lines = self.longest = 0
        for path in sorted(package.rglob("*.py")):
            module = ".".join(path.relative_to(package).with_suffix("").parts)
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
            lines = code_lines(text, tree)
            for top in tree.body:
                for inner in top.body if isinstance(top, ast.ClassDef) else [top]:
                    if isinstance(inner, Function):
                        name = f"{top.name}.{inner.name}" if isinstance(top, ast.ClassDef) else inner.name
                        self.functions[module, name] = inner
                        length = len(lines & {*range(inner.lineno, (inner.end_lineno or inner.lineno) + 1)})
                        self.longest = max(self.longest, length)
            imported = self.imports[module] = {}
            for node in ast.walk(tree):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    self.import_lines += (node.end_lineno or node.lineno) - node.lineno + 1
                if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "biphase":
                    source = (node.module or "").partition(".")[2]
                    imported |= {alias.asname or alias.name: (source, alias.name) for alias in node.names}

    def list_named(self, place: tuple[str, str]) -> Iterator[tuple[str, str]]:
        """Yield the functions that a function names, in the order of its text: functions and classes by their own name
        or as `module.name`, and methods of `self` and of parameters whose annotation names a class."""
        (module, name), function = place, self.functions[place]
        imported, types = self.imports[module], {"self": (module, name.partition(".")[0])}
        for argument in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]:
            if kinds := [node.id for node in ast.walk(argument) if isinstance(node, ast.Name)]:
                types[argument.arg] = imported.get(kinds[0], (module, kinds[0]))
        nodes = [node for node in ast.walk(function) if isinstance(node, ast.Name | ast.Attribute)]
        for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
            if isinstance(node, ast.Name):
                where, what = imported.get(node.id, (module, node.id))
                yield from (found for found in [(where, what), (where, f"{what}.__init__")] if found in self.functions)
            elif isinstance(node.value, ast.Name):
                of_type, of_module = types.get(node.value.id, ("", "")), imported.get(node.value.id, ("", ""))
                methods = [(of_type[0], f"{of_type[1]}.{node.attr}"), (".".join(filter(None, of_module)), node.attr)]
                yield from (found for found in methods if found in self.functions)

    def count_returns(self, start: tuple[str, str]) -> int:
        """Count how often a reader of the path that begins at a function comes back to a file."""
        stays, seen = [start[0]], {start}
        rest = [self.list_named(start)]
        while rest:
            place = next((place for place in rest[-1] if place not in seen), None)
            if place is None:
                rest.pop()
                continue
            seen.add(place)
            stays += [place[0]] if stays[-1] != place[0] else []
            rest.append(self.list_named(place))
        return len(stays) - len({*stays})


def measure_caps(root: Path) -> dict[str, int]:
    """The measures that have a cap."""
    calls, sums = Calls(root / PACKAGE), measure_all(root)["all"]
    values = {"code": sums["code"], "modules": sums["modules"], "import lines": calls.import_lines}
    values["longest function"] = calls.longest
    return values | {path: calls.count_returns(start) for path, start in PATHS.items()}


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
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    if asked.check:
        values = measure_caps(Path())
        for what, value in values.items():
            print(f"{what}: {value:,}, cap {CAPS[what]:,}" + (" · ABOVE" if value > CAPS[what] else ""))
        sys.exit(any(value > CAPS[what] for what, value in values.items()))
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
