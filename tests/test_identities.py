"""What must not move while the house is rebuilt: the names that decide whether work that is done counts as done.

Recipes, tasks, cells and the plans of all studies in the repository are hashed and held against
`golden/identities.json`. A name that changes for a good reason is written anew with `--update-golden`, and
the commit says why.
"""

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from biphase.config import BUNDLED, load_config
from biphase.encoder.models import Encoder
from biphase.files import content_hash
from biphase.finetuning.config import FinetuneConfig, plan_cell
from biphase.recipe import Recipe
from biphase.studies.plan import plan_study
from biphase.studies.spec import load_study
from biphase.tasks.sources import definition, find_task_sources
from biphase.tasks.spec import task_table

GOLDEN = Path(__file__).parent / "golden" / "identities.json"
STUDIES = sorted((BUNDLED / "studies").glob("*.yaml"))
BUNDLED_TASKS = sorted(name for name, task in task_table().items() if task.bundled)


FOLLOWING = {"pooled_name", "begin", "trunk", "first", "last"}
"""Fields of arms and models that came after the hashes here, and follow from the others and from the runs."""


def as_tree(value: Any) -> Any:
    """Plain data of what a plan holds, by the names of its fields, so that a class may get another name. A field that
    stands at its default is left out, so that a class may get a new one."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value):
        given = {field: getattr(value, field.name) for field in fields(value) if field.name not in FOLLOWING}
        return {field.name: as_tree(content) for field, content in given.items() if content != field.default}
    if isinstance(value, dict):
        return {str(key): as_tree(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [as_tree(inner) for inner in value]
    return value


def identities() -> Iterator[tuple[str, Any]]:
    for path in sorted((BUNDLED / "recipes").glob("*.yaml")):
        if path.stem.startswith("embed"):  # of another kind; what its runs are named by is tested where they are made
            continue
        recipe = load_config(Recipe, path)
        yield f"recipe {path.stem}", recipe.identity("data", "parent", "torch.float32")
        yield f"recipe {path.stem}, whole", content_hash(recipe.model_dump(mode="json"))
    for name, task in sorted(task_table().items()):
        yield f"task {name}", content_hash(definition(task))
        yield f"task {name}, whole", content_hash(task.model_dump(mode="json"))
    for name in BUNDLED_TASKS:
        for precision in ("fp32", "bf16"):
            config = FinetuneConfig(precision=precision, learning_rate=2e-5, seed=3)
            plan = plan_cell(Encoder("m", "model", 512), *find_task_sources(name, {}), config)
            yield f"cell {name} {precision}", plan.folder(Path()).name
    for path in STUDIES:
        plan = plan_study(load_study(path))
        yield f"study {path.stem}, steps", plan.steps
        yield f"study {path.stem}, longest chain", plan.longest_chain
        yield f"study {path.stem}, numbers", [len(plan.arms), len(plan.runs), len(plan.models), len(plan.cells)]
        yield (
            f"study {path.stem}, runs",
            content_hash({name: [run.key, list(run.kept)] for name, run in plan.runs.items()}),
        )
        yield f"study {path.stem}, cells", content_hash([[cell.name, as_tree(cell.config)] for cell in plan.cells])
        for part in ("arms", "segments", "models"):
            yield f"study {path.stem}, {part}", content_hash(as_tree(getattr(plan, part)))
        checkpoints = [{"run": run, "step": step, **users} for (run, step), users in plan.checkpoints.items()]
        yield f"study {path.stem}, checkpoints", content_hash(checkpoints)


def test_nothing_that_is_done_gets_another_name(update_golden: bool) -> None:
    found = dict(identities())
    if update_golden:
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    expected = json.loads(GOLDEN.read_text(encoding="utf-8"))
    moved = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    assert not moved, f"names that moved (python -m pytest {Path(__file__).name} --update-golden accepts them): {moved}"


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_plan_is_a_function_of_its_file(path: Path) -> None:
    assert as_tree(plan_study(load_study(path))) == as_tree(plan_study(load_study(path)))
