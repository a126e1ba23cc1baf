"""Studies, advice for a compute budget, and verdicts on results from elsewhere."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic_core import to_jsonable_python

from biphase import console
from biphase.api.finetuning import by_task, place_data, place_task, raise_failures
from biphase.config import AnyPath, Changes, OnCommandLine, PythonOnly, list_changes, parse_config, plain_value
from biphase.corpus.text import are_names
from biphase.engine.units import Engine, EngineKind
from biphase.errors import InputError

if TYPE_CHECKING:
    import pandas

    from biphase.report.foreign import Standing
    from biphase.report.referee import Ruling
    from biphase.studies.advise import Advice, WordsAlone
    from biphase.studies.cost import Estimate, Machine
    from biphase.studies.describe import Begun
    from biphase.studies.plan import Plan
    from biphase.studies.run import StudyStatus


def study(
    file: Annotated[str | Path | Mapping[str, Any], OnCommandLine(str)],
    changes: Changes | None = (),
    folder: Annotated[str | Path | None, PythonOnly] = None,
    *,
    data: Annotated[Mapping[str, Any] | None, PythonOnly] = None,
) -> "OpenStudy":
    """Open a controlled study: one file defines its plan, runs and report. Its hypotheses must be about its own arms
    and tasks.

    `file` may also be a mapping of the same keys.

    Args:
        file: A YAML file, the name of a bundled study, such as mini, or the folder of a study.
        changes: Settings to override, such as pretraining_seeds=3.
        folder: The study's folder; by default FILE if it is one, or else study-NAME.
        data: Task in `evaluation.tasks` → the folder with its published data, or rows as `finetune` takes them, which
            are copied into the study's folder.
    """
    from biphase.studies.plan import plan_study
    from biphase.studies.spec import load_study, move_tasks
    from biphase.tasks.spec import find_task

    overrides = list_changes(changes)
    keys = to_jsonable_python(dict(file), fallback=plain_value) if isinstance(file, Mapping) else None
    place = Path(str(file)) if keys is None and (Path(str(file)) / "study.yaml").is_file() else None
    source = Path(str(file)) if keys is None else keys
    settings = load_study(place / "study.yaml" if place else source, overrides)
    study_folder = (place or Path(f"study-{settings.name}")) if folder is None else Path(folder)
    if rows := by_task(data):
        evaluation = settings.evaluation
        if evaluation is None or rows.keys() - {*evaluation.tasks}:
            unnamed = rows.keys() - {*(evaluation.tasks if evaluation else ())}
            raise InputError(f"data: {min(unnamed)} is not in `evaluation.tasks`: add it")
        tasks, folders = place_data(rows, [*evaluation.tasks], study_folder)
        files = {find_task(file).name: file for file in tasks if file not in evaluation.tasks}
        tree = move_tasks(settings.model_dump(mode="json"), lambda name: files.get(name, name))
        tree["evaluation"]["data_dirs"] |= {files.get(name, name): folder for name, folder in folders}
        settings = settings.model_validate(tree)
    planned = plan_study(settings)
    words = (str(study_folder / "study.yaml"),) if keys is not None or rows else (str(file), *overrides)
    return OpenStudy(planned, study_folder, words if folder is None else (*words, "--folder", str(folder)))


@dataclass(frozen=True)
class OpenStudy:
    """A planned study and its folder."""

    planned: "Plan" = field(repr=False)
    folder: Path
    words: tuple[str, ...]
    """The file, changes and folder as words of the command line; for a study from memory, the file in its folder."""
    made_by: str = field(default="", repr=False)
    """The command that makes the whole study, text included, such as `biphase demo`; empty for other studies."""

    def command(self, verb: str) -> str:
        """Return the command `biphase study VERB` for this study."""
        return shlex.join(["biphase", "study", verb, *self.words])

    def list_commands(self) -> list[str]:
        """Return the commands that make the study again: its shards, its scores and its report."""
        from biphase.studies.folder import read_runs
        from biphase.studies.report import list_texts

        if self.made_by:
            return [self.made_by]
        return [*list_texts(read_runs(self.planned, self.folder)), self.command("run"), self.command("report")]

    def estimate(self, device: str | None = None, efficiency: float | None = None) -> "Estimate":
        from biphase.studies.cost import estimate, study_machine

        return estimate(self.planned, study_machine(self.planned.study, device, efficiency))

    def read_begun(self) -> "Begun":
        """Read what the study's folder says of its tests: the spread of finished scores, and the looks of reports."""
        from biphase.studies.declarations import hash_hypotheses, planned_seeds, read_declared
        from biphase.studies.describe import Begun
        from biphase.studies.report import measure_example_variances

        if not self.folder.exists():
            return Begun()
        record, variances = read_declared(self.folder), measure_example_variances(self.planned, self.folder)
        if not record.looks:
            return Begun(variances)
        _, up_to = planned_seeds(record, self.planned, hash_hypotheses(self.planned))
        return Begun(variances, frozenset(look.seeds for look in record.looks), up_to)

    def plan(self, device: str | None = None, efficiency: float | None = None) -> "pandas.DataFrame":
        """Return the size and cost of the study: a row for each group of arms, and one for evaluation. Print the
        differences that it can detect.

        Args:
            device: The device, such as H100 or CPU, or a run whose measured speed is used.
            efficiency: Useful FLOP/s as a share of the device's peak.
        """
        import pandas

        from biphase.studies.describe import describe_power

        if (evaluation := self.planned.study.evaluation) is not None:
            for line in describe_power(self.planned, evaluation, self.read_begun()):
                console.err.print(line)
        return pandas.DataFrame(self.estimate(device, efficiency).groups)

    def run(
        self,
        *,
        engine: EngineKind = "local",
        address: str | None = None,
        workers: int | None = None,
        workers_per_gpu: int = 1,
        processes: int = 1,
        unit: str | None = None,
    ) -> Path:
        """Train and evaluate whatever is missing; return the study's folder. The same call continues after an
        interruption, and several processes may share the work.

        Args:
            engine: Run on this machine (local) or on several (ray).
            address: The address of a Ray cluster; `auto` finds one that is running.
            workers: The number of units that run side by side (a unit is a training run or a cell, that is, one
                fine-tuning); one per core or GPU by default.
            workers_per_gpu: The number of units that share a GPU.
            processes: The number of devices for each training run, with torchrun. Each fine-tuning would reserve
                as many but use only one, so run `--unit train` with this option and `--unit cells` without it.
            unit: Limit the work to training runs (train), cells of trained models (cells), or one unit, such as
                'train 1m-clm-400'.
        """
        from biphase.studies.folder import claim_study_folder
        from biphase.studies.run import run_study

        chosen = {"kind": engine, "address": address, "workers": workers, "workers_per_gpu": workers_per_gpu}
        engine_settings = parse_config(Engine, chosen | {"devices_per_worker": processes}, (), origin="study run")
        if processes > 1 and unit is None and self.planned.cells:
            remedy = "run `--unit train`, then `--unit cells` without `--processes`"
            console.err.print(f"each cell reserves {processes} devices and uses one; to use all, {remedy}")
        study_folder = claim_study_folder(self.folder, self.planned.study)
        raise_failures(run_study(self.planned, study_folder, engine_settings, processes, unit))
        message = f"{self.folder}: done; `{self.command('report')}` writes the report"
        console.out.print(message if unit is None else f"{unit}: done")
        return self.folder

    def declare(self) -> dict[str, Any]:
        """Record the hypotheses in the study's folder, as `run` does when it begins. Return them with their hash, which
        also covers their arms, budgets and tasks, and with sentences about when they were declared."""
        from biphase.studies.declarations import DECLARED, declare, list_words, tell_declaration
        from biphase.studies.folder import claim_study_folder

        planned = self.planned
        if not planned.study.hypotheses:
            raise InputError(f"the study '{planned.study.name}' has no hypotheses to declare")
        declare(planned, claim_study_folder(self.folder, planned.study))
        digest, told = tell_declaration(planned, self.folder)
        words = list_words(planned.study.hypotheses)
        remedy = "before training, publish the words and the hash somewhere that dates them"
        console.err.print(f"{self.folder / DECLARED} is plain text, which its author can change: {remedy}")
        return {"study": planned.study.name, "hash": digest, "hypotheses": words, "declared": told}

    def progress(self) -> "StudyStatus":
        """Return the study's progress and failures."""
        from biphase.studies.folder import read_state
        from biphase.studies.run import status

        return status(read_state(self.planned, self.folder))

    def status(self) -> "pandas.DataFrame":
        """Return how many units are done, begun and failed: a row for the training runs and one for each task.
        `seconds_left` is for one worker."""
        import pandas

        return pandas.DataFrame(self.progress().lines)

    def report(self, out: AnyPath | None = None) -> Path:
        """Write tables, figures, verdicts and one HTML page from what is finished so far; return the path of the page.

        Args:
            out: The folder for the report; report/ in the study's folder by default.
        """
        from biphase.report.page import print_results
        from biphase.studies.report import report_study

        report_folder = self.folder / "report" if out is None else Path(out)
        written = report_study(self.planned, self.folder, report_folder, self.list_commands())
        notes = [f"note: {note}" for note in (*written.text.missing, *written.text.notes)]
        declared = written.text.hypotheses[1] if written.text.hypotheses else ()
        print_results(written.table, [*notes, *written.sentences, *declared])
        console.out.print(str(written.page))
        return written.page

    def bundle(self, out: AnyPath | None = None) -> Path:
        """Write an archive with the report and everything that it is made from; return its path. Unpacked, it is a
        study's folder, from which `report` rebuilds the page without shards or weights.

        Args:
            out: The .tar.gz or .tar.xz file to write; study-NAME.tar.gz by default.
        """
        from biphase.studies.bundle import bundle_study
        from biphase.studies.folder import read_state

        archive = Path(f"study-{self.planned.study.name}.tar.gz") if out is None else Path(out)
        console.out.print(str(bundle_study(read_state(self.planned, self.folder), archive, self.list_commands())))
        return archive


def advise(
    text: Annotated[Any, OnCommandLine(str | None)] = None,
    *,
    hours: float | None = None,
    device: str | None = None,
    devices: int | None = None,
    efficiency: float | None = None,
    flops: float | None = None,
    study: AnyPath | None = None,
    from_scratch: bool = False,
    text_field: str = "text",
    task: str | None = None,
    data: Annotated[Any, OnCommandLine(str | None)] = None,
) -> "Advice":
    """Find the best use of a compute budget: a public encoder to continue, or a size to train from scratch, with
    curriculum, batch and steps, the reason for each, and a recipe ready for `pretrain`.

    `text` may also be texts or rows in memory, and `data` rows as `finetune` takes them.

    Args:
        text: Your text: shards, a file or a folder. Shards give an exact number of tokens.
        hours: The compute budget in hours.
        device: The device, such as H100, or a run whose measured speed is used. By default this machine's CPU,
            whose speed is measured for ten seconds.
        devices: The number of devices; by default 1, or all threads of a measured CPU.
        efficiency: Useful FLOP/s as a share of the device's peak.
        flops: A budget in FLOPs instead of hours and a device.
        study: The folder of one of your studies, whose scores choose the curriculum for training from scratch.
        from_scratch: Train from scratch even if a public model could be continued.
        text_field: The JSON field or column that holds the text, or a template of several, such as `{title}\\n{body}`.
        task: The task that the encoder is for, by name or YAML file: the advice then says what words alone reach on it.
        data: The folder with the task's original data, or a file of labelled rows; without it, the package's or the
            Hub's.
    """
    from biphase.studies.advise import advise as choose
    from biphase.studies.advise import measure_text
    from biphase.studies.cost import find_machine
    from biphase.studies.report import read_evidence

    machine_options = {"device": device, "devices": devices, "efficiency": efficiency}
    if needless := [name for name, value in machine_options.items() if value is not None and hours is None]:
        raise InputError(f"`{needless[0]}` only counts with `hours`: give both, or leave it out")
    if are_names(text) and not isinstance(text, str | Path):
        if len(text) > 1:
            raise InputError(f"advice is about one text, but there are {len(text)}: give the folder that holds them")
        text = text[0] if text else text
    amount = None if text is None else measure_text(text, text_field)
    evidence = () if study is None else read_evidence(Path(study))
    machine = None
    if hours is not None:
        machine = find_machine(device or "CPU", devices, efficiency)
        if machine.name == "CPU" and machine.source == "assumed":
            machine = measure_cpu(devices)
    words = None if task is None and data is None else measure_words(task, data)
    asked: dict[str, Any] = {"evidence": evidence, "from_scratch": from_scratch, "words": words}
    return choose(amount, flops=flops, hours=hours, machine=machine, **asked)


def measure_words(task: str | None, data: Any) -> "WordsAlone | None":
    """Score words alone on the test examples of a task; None if the package for its baseline is missing."""
    from biphase.finetuning.config import FinetuneConfig
    from biphase.finetuning.words import score_words
    from biphase.studies.advise import WordsAlone
    from biphase.tasks.sources import find_task_sources

    with TemporaryDirectory() as folder:
        task, folders = place_task(task, data, Path(folder))
        train, evaluation = find_task_sources(task, folders)
        name, family = evaluation.task.name, evaluation.task.family
        if not evaluation.task.kind.words:
            told = f"{name} is {family.replace('_', ' ')}, which has no baseline by words alone"
            raise InputError(f"task: {told}: leave it out")
        scores = score_words(train, evaluation, [FinetuneConfig()], Path(folder))
    found = [(one.model, one.metric, one.metrics["test"][one.metric], one.num_examples["test"]) for one in scores]
    return WordsAlone(name, family, *found[0]) if found else None


MEASURED = "3m"
"""The preset that measures a CPU, small enough for a few steps on a slow or busy one."""


def measure_cpu(cores: int | None = None, seconds: float = 10) -> "Machine":
    """Measure this machine's CPU by training a small network. Return a machine with `cores` such cores, or with all
    cores of this machine."""
    from biphase.pretraining.optimizer import measure_updates
    from biphase.report.formats import show_count
    from biphase.studies.cost import Machine

    speed, threads, took = measure_updates(MEASURED, seconds)
    on = f"preset {MEASURED} and {show_count(threads, 'thread')}"
    source = f"measured here for {took:.0f} s with {on}, beside everything else that was running"
    return Machine("CPU", cores or threads, speed / threads, 1.0, source)


def equivalent(
    table: Any,
    *,
    baseline: str | None = None,
    scale: Literal["share", "percent"] | None = None,
    lower_is_better: bool = False,
    over: Literal["seeds", "tasks"] = "seeds",
    rename: Mapping[str, str] | None = None,
) -> "Standing":
    """Judge results from elsewhere: which methods differ by more than noise, their ranks with intervals, and the share
    of a baseline's compute at which they reach its score.

    `table` may also be rows, such as a DataFrame.

    Args:
        table: Files with one score per row (.csv, .tsv, .jsonl, .parquet; EuroEval's .jsonl), or a folder of results of
            MTEB or EncodEval. Columns: method, task, score; optionally seed or pretraining_seed; flops or tokens; and
            examples, a list of numbers whose mean is the score.
        baseline: The method to measure compute against. By default, the method with three or more budgets, if there
            is exactly one.
        scale: The unit of the scores: percent, or share (fractions from 0 to 1). By default, share if no score is above
            1, and percent if every task has a score above 1; for other tables you must give it.
        lower_is_better: Treat scores as losses; tables show them with a minus sign.
        over: The source of noise: seeds, or tasks (each treated as one seed).
        rename: The table's column names → ours.
    """
    from biphase.report.foreign import judge_table

    return judge_table(table, baseline, scale, lower_is_better, over, rename or {})


def judge(
    table: Any,
    *,
    baseline: str,
    candidate: str,
    spread: float | None = None,
    up_to: int = 8,
    lower_is_better: bool = False,
    scale: Literal["share", "percent"] | None = None,
    rename: Mapping[str, str] | None = None,
) -> "Ruling":
    """Judge a candidate in a loop of experiments by the seeds that it has so far: keep it, drop it, or run one more
    seed. If no candidate is better than the baseline, the probability that any is kept is at most 5 %, although there
    are many and each is judged after every seed.

    The order of rows is the order of runs: the loop adds each run at the end, and a kept candidate becomes the next
    baseline. `table` may also be rows, such as a DataFrame.

    Args:
        table: Files with one score per row, or a folder, as `report results` takes them. Columns: method, score;
            optionally task and seed. A seed's score is its mean over all tasks.
        baseline: The method that the candidate would replace. Only its rows above the candidate's last row are used.
        candidate: The method to judge. Its first row comes after the baseline's first row.
        spread: The standard deviation of a score over seeds, if you know it. By default, it is learned from the seeds
            of all methods in the table, as if it were the same for all.
        up_to: The maximum number of seeds per candidate, the same for the whole loop. Later seeds are ignored.
        lower_is_better: Treat scores as losses.
        scale: The unit of all scores, percent or share (fractions from 0 to 1), if the table seems to mix them.
        rename: The table's column names → ours.
    """
    from biphase.report.referee import judge_candidate

    return judge_candidate(table, baseline, candidate, spread, up_to, lower_is_better, scale, rename or {})


def report_paper(*, results: AnyPath | None = None, out: AnyPath = "paper-report") -> Path:
    """Report on arXiv 2507.00994: its tables and figures, and our verdicts on its findings, from its 800 published
    scores or from all fine-tunings of its authors. Return the path of the page.

    Args:
        results: The authors' folder results/ (hgissbkh/EncodEval on GitHub, branch MLM_vs_CLM), or a part of it. By
            default, the published scores.
        out: The folder to write.
    """
    from biphase.report.encodeval import report_cells
    from biphase.report.paper import report_paper as report_scores

    written = report_scores(Path(out)) if results is None else report_cells(Path(results), Path(out))
    for line in (*written.sentences, str(written.page)):
        console.out.prose(line)
    return written.page
