"""Write the table of tasks in docs/tasks.md anew, from src/biphase/tasks/tasks.yaml.

    python scripts/make_tasks_table.py

A test says when the table is stale.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from biphase.tasks.spec import PAPER_TASKS, TASK_SPLITS, Task, task_table

DOCS = Path(__file__).resolve().parent.parent / "docs" / "tasks.md"
MARKED = re.compile(r"(?<=<!-- made by scripts/make_tasks_table.py -->\n).*(?=<!-- end -->)", re.DOTALL)
COLUMNS = ("task", "family", "metric", "hub", "licence", "train · validation · test")


def main() -> None:
    DOCS.write_text(with_table(DOCS.read_text(encoding="utf-8")), encoding="utf-8")


def with_table(text: str) -> str:
    """The text of docs/tasks.md with what stands between the marks made anew."""
    tasks = sorted(task_table().values(), key=lambda task: task.name not in PAPER_TASKS)
    lines = [row(COLUMNS), row(["---"] * len(COLUMNS)), *(row(cells(task)) for task in tasks), ""]
    lines += [f"- {shown_name(task)}: {' '.join(remarks(task))}" for task in tasks]
    return MARKED.sub(lambda _: "\n".join(lines) + "\n", text)


def row(values: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(values)} |"


def shown_name(task: Task) -> str:
    return f"**{task.name}**" if task.name in PAPER_TASKS else task.name


def cells(task: Task) -> list[str]:
    places = ["*bundled*"] if task.bundled else []
    if task.hub is not None:
        is_pinned = re.fullmatch(r"[0-9a-f]{40}", task.hub.revision or "")
        places.append(task.hub.id + ("" if is_pinned else ", not pinned"))
    family = task.family.replace("_", " ")
    return [shown_name(task), family, task.metric, "; ".join(places), task.licence, " · ".join(split_places(task))]


def split_places(task: Task) -> tuple[str, ...]:
    """Where each split is from: its name there (of files without folder and ending), or what it is drawn from."""
    splits = task.files[0] if task.bundled or task.hub is None else task.hub.splits
    own: dict[str, str] = {
        name: Path(place).stem for name in TASK_SPLITS if (place := getattr(splits, name)) is not None
    }
    if task.trained_on is not None:
        drawn = {"train": f"that of {task.trained_on}", "validation": "half of test's queries"}
        own["test"] = own["test"] if "validation" in own else "the other half"
    elif "train" not in own:
        drawn = {"train": "half of the queries", "validation": "a quarter"}
        own["test"] = "a quarter"
    elif task.family == "retrieval":
        drawn = {"validation": "5 % of train's queries, at least 100"}
    else:
        drawn = {"validation": "5 % of train"}
    places = drawn | own
    return tuple(places[name] for name in TASK_SPLITS)


def remarks(task: Task) -> Iterator[str]:
    if task.note:
        yield task.note
    yield f"({task.citation})"


if __name__ == "__main__":
    main()
