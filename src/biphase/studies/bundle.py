"""A study's folder → an archive to publish: the report, and everything that it is made from.

study-NAME/  study.yaml  bundle.json  hypotheses.json  failed/  own-tasks/NAME.yaml  report/
             trained/NAME.json  runs/NAME-HASH8/{config.yaml, environment.json, done.json, metrics.jsonl}
             scores/MODEL/TASK-HASH16/{score.json, validation.npz, test.npz}

The archive has no weights, predictions or shards; the records and bundle.json state the facts about them that a report
needs. Of a path on this machine it has only the last name, and a number if another path shares that name. Equal folders
give archives with equal bytes. An archive holds plain files below one folder, nothing else.
"""

import gzip
import json
import lzma
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import IO, Any, Literal

from pydantic_core import to_jsonable_python

from biphase import __version__, files
from biphase.console import err
from biphase.errors import SOURCE, InputError
from biphase.exporting.push import LOCAL_PATH, PARENT_PATH, without_folders
from biphase.report.formats import show_count
from biphase.run import Run
from biphase.studies.cost import measure_sizes
from biphase.studies.declarations import DECLARED
from biphase.studies.folder import StudyState, read_state, study_text
from biphase.studies.plan import Plan, plan_study
from biphase.studies.report import BUNDLE, BundleRecord, as_published, list_commands, read_bundle, report_study
from biphase.studies.spec import load_study, move_tasks
from biphase.tasks.spec import find_task, split_name

DATE = 946_684_800
"""The time of every file in an archive: the year 2000, because `tar` warns about older times."""


def bundle_study(state: StudyState, out: Path, commands: Sequence[str]) -> Path:
    """Write the archive of a study, finished or not, and return its path. `commands` are those of `report_study`.

    Raises `InputError` if the file exists, if its ending is neither .tar.gz nor .tar.xz, and for a study without a
    score.
    """
    if not out.name.endswith((".tar.gz", ".tar.xz")):
        raise InputError(f"{out}: the name of an archive ends in .tar.gz or .tar.xz")
    files.refuse_existing(out)
    if not any(kept.scores for kept in state.scores.values()):
        raise InputError(f"the study's folder {state.folder} has no finished score to publish yet")
    if left := len(state.kinds.keys() - state.done):
        err.print(f"{show_count(left, 'unit')} of {len(state.kinds)} not done: the archive has only finished units")
    with files.claimed(out, "staged.part") as place, files.new_file(out) as file:
        staged = place / f"study-{state.plan.study.name}"
        for path in list_kept(state):
            copy = staged / path.relative_to(state.folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        plan = write_records(state, staged, commands)
        names = name_embedding(state.plan), name_embedding(plan)
        hide_places(staged, *names)
        kept = read_state(plan, staged)
        scored = {name.replace(*names) for name in state.scored}
        if lost := len(scored - kept.scored):  # an earlier version did not record the hashes of models
            raise InputError(f"{state.folder}: {show_count(lost, 'cell')} cannot be identified without model weights")
        report_study(plan, staged, staged / "report", commands)
        if (staged / DECLARED).exists():  # the report in the archive is a look
            files.write_text(state.folder / DECLARED, (staged / DECLARED).read_text(encoding="utf-8"))
        write_archive(staged, file.buffer, lzma.LZMAFile if out.suffix == ".xz" else gzip_file)
    return out


def name_embedding(plan: Plan) -> str:
    """Return the name of the study's embedding recipe, or "" without one."""
    evaluation = plan.study.evaluation
    return evaluation.embed.name if evaluation and evaluation.embed else ""


def hide_places(staged: Path, embedding: str, staged_embedding: str) -> None:
    """Write the last name of each path of this machine into the recipes, scores and failures of a staged study, and the
    new name of its embedding recipe, which is a hash that covers paths."""
    for path in (*staged.glob("runs/*/config.yaml"), *staged.glob("failed/*.json")):
        text = without_folders(path.read_text(encoding="utf-8"))
        files.write_text(path, text.replace(embedding, staged_embedding))
    for path in staged.glob("scores/*/*/score.json"):
        score = files.read_json_as(path, dict[str, Any])
        hidden = {"source": without_folders(score["source"])}
        hidden |= {"trained_on": staged_embedding} if score["trained_on"] == embedding else {}
        if score | hidden != score:
            score.pop(files.RECORD_HASH, None)
            files.write_hashed(path, score | hidden)


def list_kept(state: StudyState) -> Iterator[Path]:
    """Yield the files in a study's folder that go into its archive unchanged."""
    folder = state.folder
    for name in state.plan.runs:
        record = state.records.get(name)
        for path in [folder / "runs" / record.folder] if record else sorted(folder.glob(f"runs/{name}-????????")):
            run = Run(path)
            yield from filter(Path.is_file, (path / "config.yaml", run.environment, path / "done.json", run.metrics))
    for scores in (*(own.scores for own in state.scores.values()), state.words):
        for score in scores:
            assert score.folder is not None
            yield score.folder / "score.json"
            yield from score.folder.glob("*.npz")
    yield from [path for path in files.files_below(folder / "failed") if path.suffix == ".json"]
    yield from filter(Path.is_file, [folder / DECLARED])


def write_records(state: StudyState, staged: Path, commands: Sequence[str]) -> Plan:
    """Write the study file and the user's own tasks beside it, the records of its runs with the identities of their
    models, and bundle.json. Return the plan of that study file, which has no paths of this machine."""
    moved = dict[str, str]()
    for name in state.plan.study.evaluation.tasks if state.plan.study.evaluation else ():
        file, test = split_name(name)
        if file.endswith((".yaml", ".yml")):
            beside = f"own-tasks/{find_task(file).name}.yaml"
            moved |= {file: beside, name: f"{beside}:{test}" if test else beside}
            (staged / "own-tasks").mkdir(exist_ok=True)
            shutil.copyfile(file, staged / beside)
    tree = move_tasks(state.plan.study.model_dump(mode="json"), lambda name: moved.get(name, name))
    files.write_text(staged / "study.yaml", hide_folders(study_text(state.plan.study.model_validate(tree))))
    plan = plan_study(load_study(staged / "study.yaml"))
    (staged / "trained").mkdir(exist_ok=True)
    for name, record in state.records.items():
        models = {model.step: state.identify(name, model.step) for model in state.plan.models if model.run == name}
        known = dict(record.models) | {step: identity for step, identity in models.items() if identity}
        record = replace(record, key=plan.runs[name].key, models=known)
        files.write_hashed(staged / "trained" / f"{name}.json", to_jsonable_python(record))
    bundle = read_bundle(state.folder)
    sizes, made = measure_sizes(state.plan), list_commands(state, commands)
    if bundle is not None:  # the study itself came as an archive
        sizes, made = sizes | dict(bundle.sizes), [*chain(*map(as_published, bundle.commands))]
    tree = to_jsonable_python(BundleRecord(__version__, find_commit(), sizes, tuple(made)))
    files.write_hashed(staged / BUNDLE, json.loads(without_folders(json.dumps(tree, ensure_ascii=False))))
    return plan


OWN_PATH = re.compile(f"{LOCAL_PATH.pattern}|{PARENT_PATH.pattern}")


def hide_folders(text: str) -> str:
    """Return the text of a study with the last name of each path that only its author has, as `without_folders` does.
    Paths that share their last name get a number, because arms may differ in nothing else: /en/shards and /de/shards
    become ../1/shards and ../2/shards, of which a page shows ./shards as of the first two."""
    sharing = dict[str, dict[str, int]]()
    for match in OWN_PATH.finditer(text):
        paths = sharing.setdefault(without_folders(match[0]), {})
        paths.setdefault(match[0], len(paths) + 1)

    def rename(match: re.Match[str]) -> str:
        hidden = without_folders(match[0])
        is_alone = len(sharing[hidden]) == 1 and not re.search(rf"(?<![\w./-]){re.escape(hidden)}(?![\w./-])", text)
        return hidden if is_alone else f"../{sharing[hidden][match[0]]}/{hidden[2:]}"

    return OWN_PATH.sub(rename, text)


def find_commit() -> str:
    """Return the commit of this code, or "" outside a clone."""
    command = ["git", "-C", str(SOURCE), "log", "-1", "--format=%H", "--", "."]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


def gzip_file(file: IO[bytes], mode: Literal["wb"]) -> gzip.GzipFile:
    """Open a gzip file without its name and time."""
    return gzip.GzipFile("", mode, fileobj=file, mtime=DATE)


def write_archive(folder: Path, file: IO[bytes], pack: Callable[..., Any]) -> None:
    """Write all files below a folder into an archive, in order, all with the same time, owner and mode."""
    with pack(file, "wb") as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for path in files.files_below(folder):
            entry = tarfile.TarInfo(f"{folder.name}/{path.relative_to(folder)}")
            entry.size, entry.mtime = path.stat().st_size, DATE
            with open(path, "rb") as content:
                archive.addfile(entry, content)
