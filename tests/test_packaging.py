"""What `pip install biphase` brings: the wheel is built, looked into and used in an empty folder, without network."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from biphase import __version__
from biphase.config import BUNDLED

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    missing = [name for name in ("hatchling", "hatch_fancy_pypi_readme") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"the wheel cannot be built without {', '.join(missing)}: pip install -e '.[dev]'")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_everything_is_in_the_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    source = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src" / "biphase").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert source <= names
    assert {name.partition("/")[0] for name in names} == {"biphase", f"biphase-{__version__}.dist-info"}
    assert {"recipes", "studies", "tasks"} <= {path.parent.name for path in BUNDLED.glob("*/*.yaml")}


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["version"] == __version__ and citation["license"] == project["license"]
    assert citation["abstract"] == project["description"] and citation["keywords"] == project["keywords"]


def test_names_of_what_is_bundled_are_of_one_thing() -> None:
    names = [path.stem for path in BUNDLED.glob("*/*.yaml")]
    assert len(names) == len(set(names))


def test_the_index_shows_no_dead_links(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"biphase-{__version__}.dist-info/METADATA").decode()
    about, _, readme = text.partition("\n\n")
    assert f"Version: {__version__}" in about and "# biphase" in readme
    assert all(target.startswith("https://") for target in re.findall(r"\]\(([^)]*)\)", readme))


USE = """
import sys, biphase
assert biphase.__file__.startswith(sys.argv[1]), biphase.__file__
from biphase.errors import DOCS
assert str(DOCS).startswith(sys.argv[1]) and (DOCS / "LOG.md").exists(), DOCS
from biphase.cli.app import run_command
for words in ("init recipe --out mine.yaml", "init study --out own.yaml", "init task --out task.yaml", "demo --help",
              "study plan price", "study plan own.yaml", "study plan studies/demo.yaml"):
    run_command(words.split())
"""


@pytest.mark.slow
@pytest.mark.minutes
def test_the_wheel_is_used_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    (tmp_path / "empty").mkdir()
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", USE, str(tmp_path / "site")]
    subprocess.run(command, cwd=tmp_path / "empty", env=environment, check=True, capture_output=True, timeout=120)
    assert {path.name for path in (tmp_path / "empty").iterdir()} == {"mine.yaml", "own.yaml", "task.yaml"}
