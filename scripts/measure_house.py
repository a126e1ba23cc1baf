"""Figures of the source, for docs/LOG.md: how much there is to read, and how many nouns and verbs to learn.

    python scripts/measure_house.py [FOLDER]

Counts Python files alone. Code is what is neither blank, nor comment, nor docstring.
"""

import argparse
import ast
import io
import statistics
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Of modules, classes and functions, and of the fields of classes, which stand behind their field."""
    for node in ast.walk(tree):
        for statement in getattr(node, "body", ()) if isinstance(getattr(node, "body", None), list) else ():
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if is_text and isinstance(statement.value.value, str):
                yield statement.value


def count_lines(text: str, tree: ast.AST) -> tuple[int, int, int, int]:
    """Lines in all, blank ones, those with a comment, those of docstrings."""
    lines = text.splitlines()
    described = {line for doc in docstrings(tree) for line in range(doc.lineno, (doc.end_lineno or doc.lineno) + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    blank = sum(not line.strip() for number, line in enumerate(lines, 1) if number not in described)
    return len(lines), blank, len(comments), len(described)


@dataclass
class House:
    """What is counted while walking through the files of a folder."""

    root: Path
    totals: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    sizes: list[int] = field(default_factory=list)
    imports: list[int] = field(default_factory=list)
    num_vague: int = 0
    num_tangled: int = 0
    classes: dict[str, list[Path]] = field(default_factory=lambda: defaultdict(list))
    functions: dict[str, list[Path]] = field(default_factory=lambda: defaultdict(list))
    constants: dict[str, list[Path]] = field(default_factory=lambda: defaultdict(list))

    def count(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        self.totals = [a + b for a, b in zip(self.totals, count_lines(text, tree), strict=True)]
        self.num_vague += sum(str(doc.value).startswith("Of ") for doc in docstrings(tree))
        modules = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                self.classes[node.name].append(path)
            elif isinstance(node, FUNCTIONS):
                self.sizes.append((node.end_lineno or node.lineno) - node.lineno + 1)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(self.root.name):
                modules.add(node.module)
            elif isinstance(node, COMPREHENSIONS):
                self.num_tangled += len(node.generators) + sum(len(part.ifs) for part in node.generators) > 2
        self.imports.append(len(modules))
        for statement in tree.body:
            self.count_top(statement, path)

    def count_top(self, statement: ast.stmt, path: Path) -> None:
        if isinstance(statement, FUNCTIONS):
            self.functions[statement.name].append(path)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                if isinstance(target, ast.Name) and target.id.isupper():
                    self.constants[target.id].append(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("src/biphase"))
    house = House(parser.parse_args().folder)
    files = sorted(house.root.rglob("*.py"))
    for path in files:
        house.count(path)
    lines, blank, comments, described = house.totals
    rows = [
        ("modules", len(files)),
        ("lines", lines),
        ("lines of code", lines - blank - comments - described),
        ("comments per 1,000 lines", round(1000 * comments / lines)),
        ("classes", sum(map(len, house.classes.values()))),
        ("names of functions", len(house.functions)),
        ("function length, median", round(statistics.median(house.sizes))),
        ("function length, 90th percentile", round(statistics.quantiles(house.sizes, n=10)[-1])),
        ("functions over 40 lines", sum(size > 40 for size in house.sizes)),
        ("internal imports a module, mean", round(statistics.mean(house.imports), 1)),
        ("internal imports a module, most", max(house.imports)),
        ("docstrings that begin with 'Of'", house.num_vague),
        ("comprehensions of three clauses", house.num_tangled),
        ("files over 400 lines", sum(path.read_text(encoding="utf-8").count("\n") > 400 for path in files)),
    ]
    for what, value in rows:
        print(f"{what:34} {value:>7,}")
    for what in ("classes", "constants", "functions"):
        twice = sorted(name for name, places in getattr(house, what).items() if len(places) > 1)
        print(f"{what + ' with a name used twice':34} {len(twice):>7}  {', '.join(twice)}")


if __name__ == "__main__":
    main()
