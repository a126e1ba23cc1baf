"""`biphase init`: a recipe, a study or a task to start from, filled in: the text of one that comes with biphase."""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import yaml
from cyclopts import Parameter
from rich.prompt import Prompt

from biphase.api.own_task import by_commas, write_value
from biphase.cli.evaluate import parse_data_dirs
from biphase.config import BUNDLED, find_yaml, parse_config
from biphase.console import err
from biphase.console import out as console
from biphase.embedding.recipe import EmbeddingRecipe
from biphase.encoder.presets import PRESETS
from biphase.errors import InputError, nearest
from biphase.files import parse_yaml
from biphase.recipe import Recipe
from biphase.run import find_checkpoint, name_run, split_reference
from biphase.tasks.sources import name_data_dirs
from biphase.tasks.spec import Task

if TYPE_CHECKING:
    from biphase.study.spec import Study


def names_of(kind: str) -> list[str]:
    return sorted(path.stem for path in (BUNDLED / kind).glob("*.yaml"))


SHARDS_QUESTION = "Shards (what `biphase prepare` wrote)"
SCALED_KEYS = (
    *(("schedule", "warmup_steps"), ("schedule", "decay_steps"), ("batch_tokens", "steps")),
    *(("validation", "every_steps"), ("checkpoints", "every_steps")),
)
"""What of a recipe is counted in updates, beside its phases."""


def init_recipe(
    name: Annotated[str | None, Parameter(help=f"start from: {', '.join(names_of('recipes'))}.")] = None,
    shards: str | None = None,
    model: Annotated[
        str | None, Parameter(help=f"a preset ({', '.join(PRESETS)}), RUN[@STEP], a folder or a hub id (ID@REVISION).")
    ] = None,
    steps: int | None = None,
    out: Path = Path("recipe.yaml"),
) -> None:
    """Write a recipe to start from. On a terminal, it asks for what no option says.

    Args:
        shards: what `biphase prepare` wrote.
        steps: the budget in updates: phases, schedule and intervals follow, batch_tokens and rates stay.
        out: the file to write.
    """
    refuse_existing(out)
    model = asked(model, f"Model ({', '.join(PRESETS)}, a run, a folder or a hub id)", None if name else "1m")
    origin = init_origin(model, name == "branch") if model else {}
    name = name or {"model": "adapt", "checkpoint": "branch"}.get(next(iter(origin)), "tiny")
    text = starting_text("recipes", name)
    tree = parse_yaml(text)
    is_embedding = "stages" in tree
    if model:
        text = with_value(text, *(("model", model) if is_embedding else ("init", origin)))
    if not is_embedding:
        shards = asked(shards, SHARDS_QUESTION, tree["data"]["shards"])
    elif shards:
        raise InputError(f"--shards: {name} trains on pairs or plain text, not shards; name them in its stages")
    if shards:
        text = with_value(text, "data.shards", shards)
    if steps is not None and is_embedding:
        raise InputError(f"--steps: {name} counts epochs, not steps; change its stages in the file")
    if steps is not None:
        text = with_steps(text, tree, steps)
    text = with_value(text, "name", out.stem)
    parse_config(EmbeddingRecipe if is_embedding else Recipe, parse_yaml(text), origin=str(out))
    verb = "embed" if is_embedding else "pretrain"
    write_start(out, f"recipes/{name}.yaml", text, [f"biphase {verb} {out}"])


def init_study(
    name: Annotated[str, Parameter(help=f"start from: {', '.join(names_of('studies'))}.")] = "demo",
    shards: str | None = None,
    model: Annotated[
        str | None, Parameter(help=f"a preset, in place of the study's models: {', '.join(PRESETS)}.")
    ] = None,
    tasks: str | None = None,
    data_dir: list[str] | None = None,
    out: Path = Path("study.yaml"),
) -> None:
    """Write a study to start from. On a terminal, it asks for the shards where no option names them.

    Args:
        shards: what `biphase prepare` wrote.
        tasks: by commas: tasks, or YAML files of yours, in place of the study's; not for embedding.
        data_dir: TASK=FOLDER with the task's data as published; may be repeated.
        out: the file to write.
    """
    from biphase.study.hypotheses import ask
    from biphase.study.plan import plan_study
    from biphase.study.spec import Study

    refuse_existing(out)
    text = starting_text("studies", name)
    study = parse_config(Study, parse_yaml(text), origin=name)
    shards = asked(shards, SHARDS_QUESTION, study.recipe["data"]["shards"])
    text = with_value(text, "recipe.data.shards", shards)
    if model and any(group.parents for group in study.arms):
        raise InputError(f"{name} has arms that continue others by name; change the model in the file")
    if model:
        for at, group in enumerate(study.arms):
            if group.models:
                text = with_value(text, f"arms.{at}.models", [model])
    if tasks:
        text = with_tasks(text, study, by_commas(tasks))
    text = with_data(text, data_dir or (), shards)
    text = with_value(with_value(text, "name", out.stem), "title", out.stem)
    ask(plan_study(parse_config(Study, parse_yaml(text), origin=str(out))))
    commands = [f"biphase study {verb} {out}" for verb in ("plan", "run", "report")]
    write_start(out, f"studies/{name}.yaml", text, commands)


def init_task(
    data: Path | None = None, label: str | None = None, family: str | None = None, out: Path = Path("task.yaml")
) -> None:
    """Write a task to start from: with data, its columns and classes as they stand there.

    Args:
        data: the file to train on, or a folder in BEIR's layout.
        label: the column with the label, where it is not called `label` or the like.
        family: the kind of task, where the data does not tell: sequence_classification, regression, …
        out: the file to write.
    """
    from biphase.api.own_task import EXAMPLES, describe_data

    refuse_existing(out)
    if family is not None and family not in EXAMPLES:
        raise InputError(f"--family: unknown family '{family}'{nearest(family, EXAMPLES)}")
    found: dict[str, Any] = {"family": family or "sequence_classification"}
    if data is not None:
        found = describe_data(data, label, family)
        if family not in (None, found.get("problem_type", found["family"])):
            raise InputError(f"{data} looks like {found['family']}, not {family}; leave --family out")
    own_family = found.pop("family")
    example = EXAMPLES[found.pop("problem_type", own_family)]
    text = starting_text("tasks", example)
    for key, value in {**found, "name": out.stem}.items():
        text = with_value(text, key, value)
    parse_config(Task, parse_yaml(text), origin=str(out))
    folder = "DATA" if data is None else str(data if data.is_dir() else data.parent)
    write_start(out, f"tasks/{example}.yaml", text, [f"biphase task check {out} --data-dir {folder}"])


def init_origin(model: str, is_run: bool) -> dict[str, str]:
    """What a recipe's `init` says of a preset, a run, a folder or a hub id (`ID@REVISION`). Raises `InputError` for a
    run that is not there."""
    model = name_run(model) if is_run else model
    path, at = split_reference(model)
    if is_run or at.isdecimal() or (Path(path) / "config.yaml").exists():
        find_checkpoint(model)
        return {"checkpoint": model}
    if at and path.count("/") == 1 and path[0] not in "./~" and not Path(path).exists():
        return {"model": path, "revision": at}
    return {"preset": model} if model in PRESETS else {"model": model}


def asked(value: str | None, question: str, default: str | None) -> str | None:
    """The value, or on a terminal what the user answers, or the default."""
    if value is not None or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return default if value is None else value
    return Prompt.ask(question, default=default or "", console=err) or None


def refuse_existing(path: Path) -> None:
    if path.exists():
        raise InputError(f"{path} is there already; give another --out")


def starting_text(kind: str, name: str) -> str:
    """The text of a bundled file, without the comments above its first key."""
    known = names_of(kind)
    if name not in known:
        remedy = "; the file to write is --out" if name.endswith((".yaml", ".yml")) else nearest(name, known)
        raise InputError(f"'{name}' is none of the {kind} that come with biphase{remedy}")
    lines = find_yaml(Path(kind) / f"{name}.yaml").read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(lines[next(at for at, line in enumerate(lines) if not line.startswith("#")) :])


def with_value(text: str, key: str, value: Any) -> str:
    """YAML text in which the value at `arms.0.models` is another one; all else, comments too, stays as it is."""
    node: Any = yaml.compose(text, yaml.SafeLoader)
    for part in key.split("."):
        found = (
            dict(enumerate(node.value)).get(int(part))
            if isinstance(node, yaml.SequenceNode)
            else next((inner for name, inner in node.value if name.value == part), None)
        )
        if found is None:
            raise InputError(f"what is started from has no '{key}'; start from another, or add it in the file")
        node = found
    old = text[node.start_mark.index : node.end_mark.index]
    space = old[len(old.rstrip()) :]  # a block reaches to the next key
    return f"{text[: node.start_mark.index].rstrip()} {write_value(value)}{space}{text[node.end_mark.index :]}"


def with_steps(text: str, recipe: dict[str, Any], steps: int) -> str:
    """A recipe of so many steps in all: what is counted in steps has its share, at least one, and the longest phase the
    rest. An interval never grows: what a kill costs stays small."""
    phases = [phase["steps"] for phase in recipe["curriculum"]]
    if steps < len(phases):
        raise InputError(f"--steps: {steps} are fewer than the {len(phases)} phases")
    shared = [max(1, steps * own // sum(phases)) for own in phases]
    shared[phases.index(max(phases))] += steps - sum(shared)
    for at, number in enumerate(shared):
        text = with_value(text, f"curriculum.{at}.steps", number)
    for section, key in SCALED_KEYS:
        settings = recipe.get(section)
        if isinstance(settings, Mapping) and (own := settings.get(key)):
            scaled = max(0 if section == "schedule" else 1, steps * own // sum(phases))
            text = with_value(text, f"{section}.{key}", min(own, scaled) if key == "every_steps" else scaled)
    return text


def with_tasks(text: str, study: "Study", tasks: list[str]) -> str:
    """A study that is judged on these tasks; what it says of some of them stays."""
    if study.evaluation is None:
        return text
    text = with_value(text, "evaluation.tasks", tasks)
    if study.evaluation.per_task:
        kept = {task: own for task, own in study.evaluation.per_task.items() if task in tasks}
        text = with_value(text, "evaluation.per_task", kept)
    return text


def with_data(text: str, data_dirs: Sequence[str], shards: str | None) -> str:
    """A study with the folders of its tasks' data, and without the size of a vocabulary that the shards say."""
    study = parse_yaml(text)
    tasks = study.get("evaluation", {}).get("tasks", ())
    pairs = parse_data_dirs(data_dirs)
    name_data_dirs(pairs, tasks, "--data-dir")
    if pairs:
        folders = write_value(dict(pairs))
        text = re.sub(r"(?m)^( +)tasks: .*\n", lambda line: f"{line[0]}{line[1]}data_dirs: {folders}\n", text)
    if shards and (Path(shards) / "manifest.json").exists() and "planning" in study:
        own = {key: value for key, value in study["planning"].items() if key != "vocab_size"}
        text = with_value(text, "planning", own)
    return text


def write_start(path: Path, origin: str, text: str, commands: Sequence[str]) -> None:
    """Write the file, never over another one, and say what comes next."""
    head = [f"# Made from {origin}, which comes with biphase.", *(f"#   {command}" for command in commands)]
    with open(path, "x", encoding="utf-8") as file:
        file.write("\n".join([*head, text]))
    err.print(f"{path}: next, `{commands[0]}`")
    console.print(str(path))
