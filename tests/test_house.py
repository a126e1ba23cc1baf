"""How the house is built: the order of the folders is the path of the data, and what can do without torch does."""

import ast
import re
import runpy
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from biphase import OFFERED

SOURCE = Path(__file__).parents[1] / "src" / "biphase"

ORDER = [
    # What everything stands on ...
    ("errors",),
    ("files", "console", "machine"),
    ("config", "presets", "schedule", "curriculum", "recipe", "run", "flops", "device", "hub", "style"),
    ("distributed", "engine"),
    # ... and the path of the data.
    ("corpus",),
    ("tasks",),
    ("encoder",),
    ("pretraining",),
    ("exporting",),
    ("finetuning",),
    ("embedding",),
    ("report",),
    ("deploying",),
    ("studies",),
    # ... which Python and the command line go along.
    ("api",),
    ("cli",),
    ("__main__",),
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}

MODULES = sorted(path for path in SOURCE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in MODULES}


def name_of(path: Path) -> str:
    """`corpus/shards.py` → `corpus.shards`, `corpus/__init__.py` → `corpus`."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Modules of ours that a file imports, without `biphase.`, and whether at the time of its own import."""
    late = {
        id(inner)
        for node in ast.walk(TREES[path])
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_type_checking(node)
        for inner in ast.walk(node)
    }
    known = {name_of(module) for module in MODULES}
    for node in ast.walk(TREES[path]):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            names = [f"{module}.{a.name}" if f"{module}.{a.name}"[8:] in known else module for a in node.names]
        for name in names:
            if name.startswith("biphase."):
                yield name.removeprefix("biphase."), id(node) not in late


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_with_the_path_of_the_data(path: Path) -> None:
    """A later folder may import an earlier one, never the reverse, not even inside a function."""
    if not name_of(path):
        return
    own = name_of(path).partition(".")[0]
    assert own in RANK, f"{own} has no place in the order of DESIGN.md; give it one in ORDER"
    for name, _ in imports(path):
        folder = name.partition(".")[0]
        assert RANK[folder] <= RANK[own], f"{name_of(path)} imports {name}, which comes later"


def test_no_import_cycles() -> None:
    graph = {name_of(path): {name for name, _ in imports(path)} for path in MODULES}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import cycle: {' → '.join([*trail[trail.index(name) :], name])}"
        if name not in done:
            for other in graph.get(name, ()):
                visit(other, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


PLANNING = (
    "machine",
    "run",
    "flops",
    "finetuning.grid",
    "encoder.models",
    "finetuning.config",
    "finetuning.kept",
    "embedding.pairs",
    "api.finetuning",
    "api.networks",
    "api.folders",
)


def test_what_does_without_torch() -> None:
    """Neither by name, nor by what is imported: what prepares text, plans work and reports on it. So workers that
    tokenize start fast, mistakes in a command are told at once, and tables are made on any laptop."""
    light = [
        path
        for path in MODULES
        if name_of(path) in PLANNING or name_of(path).partition(".")[0] in ("corpus", "tasks", "report", "studies")
    ]
    for path in light:
        words = {alias.name.partition(".")[0] for node in ast.walk(TREES[path]) for alias in names_in(node)}
        assert "torch" not in words, f"{name_of(path)} imports torch"
    lines = [f"import biphase.{name_of(path)}" for path in light] + ["import biphase.cli.app, sys"]
    code = "; ".join([*lines, "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"])
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def names_in(node: ast.AST) -> list[ast.alias]:
    if isinstance(node, ast.Import):
        return node.names
    return [ast.alias(node.module or "")] if isinstance(node, ast.ImportFrom) else []


def test_one_module_talks_to_other_processes() -> None:
    for path in MODULES:
        imported = {alias.name for node in ast.walk(TREES[path]) for alias in names_in(node)}
        names_groups = imported & {"torch.distributed", "torch.distributed.device_mesh"}
        assert not names_groups or name_of(path) == "distributed", f"{name_of(path)} imports {names_groups}"


def test_every_promise_names_its_test() -> None:
    text = (SOURCE.parents[1] / "docs" / "promises.md").read_text(encoding="utf-8")
    claims = text.split("\n- ")[1:]
    assert len(claims) >= 6
    for claim in claims:
        named = re.findall(r"`([\w/]+(?:\.py|/))`", claim)
        assert named, f"a promise names no test: {claim}"
        for name in named:
            assert (SOURCE.parents[1] / "tests" / name).exists(), f"docs/promises.md: no tests/{name}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_say_what_they_are(path: Path) -> None:
    tree = TREES[path]
    if tree.body and name_of(path) != "__main__":
        assert ast.get_docstring(tree), f"{name_of(path)} has no docstring"
    assert not {"utils", "helpers", "common", "base"} & set(name_of(path).split("."))


def test_a_test_is_named_by_its_module_or_says_its_subject() -> None:
    """tests/ROOM/test_FILE.py is about ROOM/FILE.py, or about all of ROOM. What several modules do together has the
    name of its subject, and a docstring that says it."""
    tests = Path(__file__).parent
    for path in tests.rglob("test_*.py"):
        room, name = path.parent.relative_to(tests), path.stem.removeprefix("test_")
        if not any((SOURCE / each).with_suffix(".py").is_file() for each in (room / name, room)):
            assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{room / path.name}: which subject?"


def definitions(kind: str) -> dict[str, set[str]]:
    """Names at the top of modules → the modules that define them. Of the roles of a protocol (`finetuning.families`),
    every member has one."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in MODULES:
        for node in TREES[path].body:
            names: list[str] = []
            if isinstance(node, ast.FunctionDef if kind == "function" else ast.ClassDef) and kind != "constant":
                names = [node.name]
            elif kind != "function" and isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                assigned = [target.id for target in targets if isinstance(target, ast.Name) and target.id[0].isupper()]
                names = [name for name in assigned if name.isupper() == (kind == "constant")]  # else a type's alias
            for name in names:
                found[name].add(name_of(path))
    return found


@pytest.mark.parametrize("kind", ["class", "constant", "function"])
def test_one_meaning_per_name(kind: str) -> None:
    """A name at the top of a module, also an alias of a type, is that of one thing, but for the roles that all families
    of tasks have, and for the functions of the package and the commands, which users call as they call what does the
    work."""
    for name, modules in definitions(kind).items():
        modules = {module for module in modules if not (name in OFFERED and module.partition(".")[0] == "api")}
        modules = modules - {"cli.commands"} if len(modules) > 1 else modules
        if all(module.startswith("finetuning.families.") for module in modules):
            continue
        assert len(modules) == 1, f"{kind} '{name}' has {len(modules)} meanings: {', '.join(sorted(modules))}"


PLAIN_TYPES = {"seed": {"int", "Count"}, "rate": {"float"}, "budget": {"int", "float"}, "worker": {"int"}}
"""Words of the glossary whose things are numbers. `Any` is for what a file or a user may give."""
OTHER_NAMES = {
    "curriculum": {"Phase"},
    "ladder": {"Rungs"},
    "moments": {"Tensor"},
    "origin": {"Start"},
    "pretraining_seed": {"int"},
    "score": {"Result", "float"},
    "study": {"AnyPath", "Path"},
    "run": {"ModelName"},
    "sweep": {"int", "float"},
    "objective": {"Literal"},
}
"""Types of the glossary's things that do not have its word in their own names."""


def test_parameters_and_fields_are_what_the_glossary_says() -> None:
    """A parameter or a field that is called by a word of the glossary is that thing: its type says so, or it is the
    thing's name (`str`)."""
    table = (SOURCE.parents[1] / "docs" / "glossary.md").read_text("utf-8").splitlines()
    words = {
        word.strip().replace(" ", "_") for line in table if line[:2] == "| " for word in line.split("|")[1].split(",")
    }
    assert {"arm", "cell", "run", "seed", "unit"} <= words
    for path in MODULES:
        for node in ast.walk(TREES[path]):
            match node:
                case ast.arg(arg=name, annotation=annotation) if annotation is not None:
                    pass
                case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                    pass
                case _:
                    continue
            if name in words:
                types = set(re.findall(r"\w+", ast.unparse(annotation)))
                right = {"str", "Any"} | PLAIN_TYPES.get(name, set()) | OTHER_NAMES.get(name, set())
                is_named = any(name.replace("_", "") in type_.lower() for type_ in types)
                where = f"{name_of(path)}:{node.lineno}"
                assert is_named or types & right, (
                    f"{where}: {name}: {ast.unparse(annotation)} is not what docs/glossary.md says"
                )


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_can_be_read(path: Path) -> None:
    """Docstrings are sentences of their own, functions fit on a screen and modules into a head."""
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text_of = str(node.value.value)
            assert not text_of.startswith("Of "), f"line {node.lineno}: a docstring is a sentence with a subject"
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, f"{node.name} is long: it has more than one job"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 600, "is this one room or two?"


def test_the_map_is_true() -> None:
    """A newcomer finds each folder in docs/path_of_data.md, and no file there that is gone."""
    text = (SOURCE.parents[1] / "docs" / "path_of_data.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(?:[a-z_]+/)*([a-z_0-9]+\.py|[a-z_]+/)`", text))
    folders = {f"{path.parent.name}/" for path in MODULES if path.parent != SOURCE}
    assert folders <= named, f"docs/path_of_data.md does not name {sorted(folders - named)}"
    gone = named - folders - {path.name for path in MODULES} - {"test_house.py"}
    assert not gone, f"docs/path_of_data.md names {sorted(gone)}, which are not here"


def test_a_path_is_as_deep_as_its_reader_comes_back(tmp_path: Path) -> None:
    """one.start → two.middle → three.end, back in one by `last`, then three again by a method."""
    modules = {
        "one": "from biphase import three\nfrom biphase.two import middle\n"
        "def start(thing: three.Thing):\n    middle()\n    last(thing)\n"
        "def last(thing: three.Thing):\n    three.end()\n    three.late()\n",
        "two": "from biphase.three import end\ndef middle():\n    end()\n",
        "three": "class Thing:\n    pass\ndef end():\n    pass\ndef late():\n    pass\n",
    }
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    calls = runpy.run_path(str(SOURCE.parents[1] / "scripts" / "measure_house.py"))["Calls"](tmp_path)
    assert calls.count_returns(("two", "middle")) == 0
    assert calls.count_returns(("one", "last")) == 0, "three.end and three.late are one stay"
    assert calls.count_returns(("one", "start")) == 2, "in one again, and in three again"
