"""Figures of the source, for docs/LOG.md: how much there is to read, and how many nouns and verbs to learn.

    python scripts/measure_house.py [FOLDER]

Counts Python files alone. Code is what is neither blank, nor comment, nor docstring.
"""

import ast
import io
import statistics
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


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


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "src/biphase")
    classes: Counter[str] = Counter()
    functions: dict[str, set[Path]] = defaultdict(set)
    constants: dict[str, set[Path]] = defaultdict(set)
    sizes, imports, totals, vague, long_ones, clauses = [], [], [0, 0, 0, 0], 0, [], 0
    files = sorted(root.rglob("*.py"))
    for path in files:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        totals = [a + b for a, b in zip(totals, count_lines(text, tree), strict=True)]
        vague += sum(str(doc.value).startswith("Of ") for doc in docstrings(tree))
        modules = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name] += 1
            elif isinstance(node, FUNCTIONS):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                sizes.append(length)
                long_ones += [f"{path.relative_to(root)}:{node.name} {length}"] * (length > 40)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(root.name):
                modules.add(node.module)
            elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
                clauses += len(node.generators) + sum(len(part.ifs) for part in node.generators) > 2
        imports.append(len(modules))
        for node in tree.body:
            if isinstance(node, FUNCTIONS):
                functions[node.name].add(path)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name) and target.id.isupper():
                        constants[target.id].add(path)
    lines, blank, comments, described = totals
    code = lines - blank - comments - described
    print(f"modules                            {len(files):6}")
    print(f"lines                              {lines:6}")
    print(f"lines of code                      {code:6}")
    print(f"comments per 1,000 lines           {1000 * comments / lines:6.0f}")
    print(f"classes                            {sum(classes.values()):6}")
    print(f"functions at the top of a module   {sum(map(len, functions.values())):6}, names {len(functions)}")
    print(f"function length, median and p90    {statistics.median(sizes):6.0f}, {statistics.quantiles(sizes, n=10)[-1]:.0f}")
    print(f"functions over 40 lines            {len(long_ones):6}")
    print(f"internal imports a module          {statistics.mean(imports):6.1f}, most {max(imports)}")
    print(f"docstrings that begin with 'Of'    {vague:6}")
    print(f"comprehensions of three clauses    {clauses:6}")
    for what, twice in (
        ("classes", sorted(name for name, count in classes.items() if count > 1)),
        ("constants", sorted(name for name, places in constants.items() if len(places) > 1)),
        ("functions", sorted(name for name, places in functions.items() if len(places) > 1)),
        ("files over 400 lines", sorted(p.name for p in files if p.read_text(encoding="utf-8").count("\n") > 400)),
    ):
        title = what if what.startswith("files") else f"{what} of one name"
        print(f"{title:34} {len(twice):6}  {', '.join(twice)}")


if __name__ == "__main__":
    main()
