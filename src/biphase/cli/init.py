"""`biphase init`: write a recipe, a study or a task to start from, by filling in a bundled file."""

import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from cyclopts import Parameter
from rich.prompt import Prompt

from biphase import console
from biphase.cli.show import parse_data_dirs
from biphase.config import BUNDLED, by_commas, parse_config, write_value
from biphase.corpus.rows import column, rows_of_file
from biphase.embedding.recipe import EmbeddingRecipe
from biphase.errors import InputError, nearest
from biphase.files import new_file, parse_yaml, refuse_existing
from biphase.presets import PRESETS
from biphase.recipe import Recipe
from biphase.run import find_checkpoint, is_run_folder, name_run, split_reference
from biphase.tasks.families import KINDS, Family, ProblemType
from biphase.tasks.own import describe_data, form_of
from biphase.tasks.sources import name_data_dirs
from biphase.tasks.spec import Task, find_task

BUNDLED_NAMES = {
    kind: sorted(path.stem for path in (BUNDLED / kind).glob("*.yaml")) for kind in ("recipes", "studies", "tasks")
}
"""Kind → the names of its bundled files."""
MOST_JOBS = 1_000
SHARDS_QUESTION = "Folder of shards (from `biphase prepare`)"


def init_recipe(
    name: Annotated[str | None, Parameter(help=f"A bundled recipe: {', '.join(BUNDLED_NAMES['recipes'])}.")] = None,
    /,
    *,
    shards: str | None = None,
    model: Annotated[
        str | None, Parameter(help=f"A preset ({', '.join(PRESETS)}), RUN[@STEP], a folder or a Hub id (ID@REVISION).")
    ] = None,
    out: Path = Path("recipe.yaml"),
) -> None:
    """Write a recipe to start from. On a terminal, the command asks for missing options.

    Example: `biphase init recipe --shards shards --model 11m --out mine.yaml`

    Args:
        shards: The folder that `biphase prepare` wrote.
        out: The file to write.
    """
    refuse_existing(out)
    model = ask_user(model, f"Model ({', '.join(PRESETS)}, a run, a folder or a Hub id)", None if name else "1m")
    origin = origin_of(model, name == "branch") if model else {}
    name = name or {"model": "adapt", "checkpoint": "branch"}.get(next(iter(origin)), "tiny")
    text = starting_text("recipes", name)
    tree = parse_yaml(text)
    changes: dict[str, Any] = {"name": out.stem}
    kind: type[Recipe | EmbeddingRecipe] = Recipe
    verb, comments = "pretrain", list[str]()
    if "stages" in tree:
        kind, verb = EmbeddingRecipe, "embed"
        if shards:
            raise InputError(f"--shards: {name} trains on pairs or plain text, not shards; change its stages instead")
        changes |= {"model": model} if model else {}
    else:
        changes |= {"init": origin} if origin else {}
        changes["data.shards"] = ask_user(shards, SHARDS_QUESTION, tree["data"]["shards"])
        fitting, comments = fit_to_text(parse_config(Recipe, tree, origin=name), Path(changes["data.shards"] or ""))
        changes |= fitting
    text = with_values(text, changes)
    parse_config(kind, parse_yaml(text), origin=str(out))
    write_start(out, f"recipes/{name}.yaml", "".join([*comments, text]), ["biphase", verb, str(out)])


def has_shards(folder: Path) -> bool:
    """Tell whether a folder is a set of shards; if not, print the command that makes one."""
    if not (is_set := (folder / "manifest.json").exists()):
        made = f"`biphase prepare TEXT --tokenizer TOKENIZER --out {folder}` makes them"
        console.err.print(f"{folder} holds no shards yet: {made}")
    return is_set


def fit_to_text(recipe: Recipe, shards: Path) -> tuple[dict[str, Any], list[str]]:
    """Return changes with which a recipe reads the text no more often than `biphase study advise` recommends, and a
    comment that says how often it does; return neither if there are no shards yet."""
    from biphase.corpus.shards import read_shard_manifest
    from biphase.studies.advise import MOST_EPOCHS, choose_steps

    if not has_shards(shards):
        return {}, []
    text_tokens, tokens = read_shard_manifest(shards).splits["train"].tokens, recipe.tokens_before(recipe.num_steps)
    changes, most, hint = dict[str, Any](), MOST_EPOCHS * text_tokens, ""
    if tokens > most and isinstance(recipe.batch_tokens, int):
        batch = min(recipe.batch_tokens, choose_steps(most, recipe.data.max_sample_tokens)[1])
        share = most / batch / recipe.num_steps
        steps = [math.ceil(share * phase.steps) for phase in recipe.curriculum]
        changes = {f"curriculum.{number}.steps": count for number, count in enumerate(steps)} | {"batch_tokens": batch}
        scaled = "schedule.warmup_steps", "schedule.decay_steps", "validation.every_steps", "checkpoints.every_steps"
        changes |= {key: math.floor(share * attrgetter(key)(recipe)) for key in scaled}
        tokens, hint = batch * sum(steps), "; reading it more often would gain nothing"
    times = console.plain_number(tokens / text_tokens)
    return changes, [f"# It reads the {text_tokens:,} tokens of the text {times} times{hint}.\n"]


def init_study(
    name: Annotated[str, Parameter(help=f"A bundled study: {', '.join(BUNDLED_NAMES['studies'])}.")] = "demo",
    /,
    *,
    shards: str | None = None,
    model: Annotated[
        str | None, Parameter(help=f"A preset that replaces the study's models: {', '.join(PRESETS)}.")
    ] = None,
    tasks: str | None = None,
    data_dir: list[str] | None = None,
    out: Path = Path("study.yaml"),
) -> None:
    """Write a study to start from. On a terminal, the command asks for the shards unless `--shards` is given.

    Example: `biphase init study --shards shards --tasks snli,reviews.yaml --data-dir reviews.yaml=reviews/`

    Args:
        shards: The folder that `biphase prepare` wrote.
        tasks: Tasks or YAML files, separated by commas, that replace the study's tasks; not for embedding studies.
        data_dir: TASK=FOLDER: the task's original data files. May be repeated.
        out: The file to write.
    """
    from biphase.studies.plan import plan_study
    from biphase.studies.spec import Study

    refuse_existing(out)
    text = starting_text("studies", name)
    tree = parse_yaml(text)
    study = parse_config(Study, tree, origin=name)
    shards = ask_user(shards, SHARDS_QUESTION, study.recipe["data"]["shards"])
    changes: dict[str, Any] = {"name": out.stem, "title": out.stem, "recipe.data.shards": shards}
    if study.notes:  # they are about the bundled study's text and tasks
        changes["notes"] = []
    for index, group in enumerate(study.arms):
        if model and group.parents:
            raise InputError(f"{name} has arms that continue others by name; change the model in the file")
        if model and group.models:
            changes[f"arms.{index}.models"] = [model]
    names = list(study.evaluation.tasks) if study.evaluation else []
    if tasks and study.evaluation:
        names = changes["evaluation.tasks"] = by_commas(tasks)
        if settings := study.evaluation.per_task:
            changes["evaluation.per_task"] = {task: settings[task] for task in settings if task in names}
    if shards and has_shards(Path(shards)) and "planning" in tree:  # the shards have a vocabulary size of their own
        changes["planning"] = {key: value for key, value in tree["planning"].items() if key != "vocab_size"}
    pairs = parse_data_dirs(data_dir or (), names)
    given = name_data_dirs(pairs, names, "--data-dir")
    if study.evaluation and (own := study.evaluation.data_dirs):
        kept = {find_task(task).name for task in names} - given.keys()
        folders_kept = {task: folder for task, folder in own.items() if find_task(task).name in kept}
        changes["evaluation.data_dirs"] = folders_kept | dict(pairs)
    text = with_values(text, changes)
    if pairs and "evaluation.data_dirs" not in changes:
        folders = write_value(dict(pairs))
        text = re.sub(r"(?m)^( +)tasks: .*\n", lambda line: f"{line[0]}{line[1]}data_dirs: {folders}\n", text)
    plan_study(parse_config(Study, parse_yaml(text), origin=str(out)))
    commands = [["biphase", "study", verb, str(out)] for verb in ("plan", "run", "report")]
    write_start(out, f"studies/{name}.yaml", text, *commands)


def init_task(
    data: Path | None = None,
    /,
    *,
    label: str | None = None,
    family: Literal[Family, ProblemType] | None = None,
    group: str | None = None,
    template: str | None = None,
    out: Path = Path("task.yaml"),
) -> None:
    """Write a task to start from. If data is given, the columns and classes are filled in.

    Example: `biphase init task data/reviews-train.csv --label stars --out reviews.yaml`

    Args:
        data: The file to train on, or a folder in BEIR's layout.
        label: The column with the label; needed only if it is not named `label` or similar.
        family: The kind of task, if the data does not show it.
        group: The column (such as page or patient) whose equal values must stay in the same split.
        template: The input, with columns in braces, such as `{title}\\n{body}` (`\\n` ends a line); by default, all
            text columns.
        out: The file to write.
    """
    refuse_existing(out)
    template = template and template.replace("\\n", "\n")
    keys: dict[str, Any] = {"family": family or "sequence_classification"}
    if data is not None:
        keys = describe_data(data, label, family, template)
        if family not in (None, keys.get("problem_type", keys["family"])):
            raise InputError(f"{data} looks like {keys['family']}, not {family}; leave --family out")
    kind = KINDS[keys.pop("problem_type", keys["family"])]
    family = keys.pop("family")
    if template is not None and not (kind.is_of_texts or kind.has_choices):
        raise InputError(f"--template is for texts, not for {family}: leave it out")
    keys |= {"name": out.stem} | ({} if template is None else {"template": template})
    if group is not None:
        if data is not None and not data.is_dir():
            column(*next(rows_of_file(data, form_of(data))), group, "name one as --group")
        keys["group"] = group
    text = starting_text("tasks", kind.example)
    added = {key: keys.pop(key) for key in ("labels", "missing", "group") if key in keys and f"\n{key}:" not in text}
    text = with_values(text, keys)
    lines = "".join(f"\n{key}: {write_value(value)}" for key, value in added.items())
    text = text.replace("\nfiles:", f"{lines}\nfiles:")
    parse_config(Task, parse_yaml(text), origin=str(out))
    folder = "DATA" if data is None else str(data if data.is_dir() else data.parent)
    check = ["biphase", "task", "check", str(out), "--data-dir", folder]
    write_start(out, f"tasks/{kind.example}.yaml", text, check)


def init_slurm(study: Path, folder: Path, /, *, jobs: int = 8, out: Path = Path("slurm.sh")) -> None:
    """Write a Slurm script whose array jobs share the work on a study. Add your partition and account to it.

    Example: `biphase init slurm study.yaml /shared/study --jobs 4`

    Args:
        study: The study's file.
        folder: The study's folder, on a disk that all nodes share.
        jobs: The number of array jobs, each on a node of its own.
        out: The file to write.
    """
    from biphase.studies.spec import load_study

    if not 1 <= jobs <= MOST_JOBS:
        raise InputError(f"--jobs {jobs}: give 1 to {MOST_JOBS:,}, the longest array that Slurm takes by default")
    load_study(study)
    command = shlex.join(["sbatch", f"--array=0-{jobs - 1}", str(out), str(study), str(folder)])
    shebang, newline, text = (BUNDLED / "studies" / "slurm.sh").read_text(encoding="utf-8").partition("\n")
    with new_file(out) as file:
        file.write(f"{shebang}{newline}{as_comment(command)}\n{text}")
    out.chmod(0o755)
    console.err.print(f"{out}: next, `{command}`")
    console.out.print(str(out))


def origin_of(model: str, is_run: bool) -> dict[str, str]:
    """Return a recipe's `init` for a preset, a run, a folder or a Hub id (`ID@REVISION`). Raises `InputError` for a run
    that does not exist."""
    model = name_run(model) if is_run else model
    path, version = split_reference(model)
    if is_run or version.isdecimal() or is_run_folder(Path(path)):
        find_checkpoint(model)
        return {"checkpoint": model}
    if version and path.count("/") == 1 and path[0] not in "./~" and not Path(path).exists():
        return {"model": path, "revision": version}
    return {"preset": model} if model in PRESETS else {"model": model}


def ask_user(value: str | None, question: str, default: str | None) -> str | None:
    """Return the value if there is one; or else, on a terminal, the user's answer; or else the default."""
    if value is not None or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return default if value is None else value
    return Prompt.ask(question, default=default or "", console=console.err) or None


def starting_text(kind: str, name: str) -> str:
    """Read a bundled file without the comments above its first key."""
    names = BUNDLED_NAMES[kind]
    if name not in names:
        remedy = "; name the file to write as --out" if name.endswith((".yaml", ".yml")) else nearest(name, names)
        raise InputError(f"'{name}' is not one of the bundled {kind}{remedy}")
    return re.sub(r"\A(#.*\n)+", "", (BUNDLED / kind / f"{name}.yaml").read_text(encoding="utf-8"))


def with_values(text: str, changes: Mapping[str, Any]) -> str:
    """Change the values of keys such as `arms.0.models` in YAML text; keep everything else, including comments."""
    for key, value in changes.items():
        node: Any = yaml.compose(text, yaml.SafeLoader)
        for step in key.split("."):
            if isinstance(node, yaml.SequenceNode):
                node = node.value[int(step)]
                continue
            inner = {name.value: child for name, child in node.value}
            if step not in inner:
                raise InputError(f"the bundled file has no '{key}'; start from another, or add it to the file")
            node = inner[step]
        begin, end = node.start_mark.index, node.end_mark.index
        space = text[len(text[:end].rstrip()) : end]  # a block reaches to the next key
        text = f"{text[:begin].rstrip()} {write_value(value)}{space}{text[end:]}"
    return text


def as_comment(command: str) -> str:
    """Write a command as a comment. Raises `InputError` for a line end in it, which would end the comment."""
    if "".join(command.splitlines()) != command:
        raise InputError(f"{command!r}: a name has a line end; choose another name")
    return f"# {command}"


def write_start(path: Path, origin: str, text: str, *commands: Sequence[str]) -> None:
    """Write a new file, with its commands, given as lists of words, as comments, and print the next command. Never
    overwrite a file."""
    lines = [shlex.join(command) for command in commands]
    head = [f"# Made from {origin}, which comes with biphase.", *(as_comment(f"  {line}") for line in lines)]
    with new_file(path) as file:
        file.write("\n".join([*head, text]))
    console.err.print(f"{path}: next, `{lines[0]}`")
    console.out.print(str(path))
