"""The commands. Each takes its parameters, defaults and descriptions from Python functions, and shows their results.

`cli.app` lists the commands, and loads this module when one of them is called.
"""

import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import wraps
from inspect import Parameter as PythonParameter
from inspect import Signature, getdoc, signature
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from cyclopts import Parameter
from docstring_parser import parse
from rich.console import RenderableType

from biphase import console
from biphase.api import finetuning, folders, networks, studies
from biphase.api.finetuning import to_json
from biphase.api.studies import OpenStudy
from biphase.cli import show
from biphase.cli.doctor import examine
from biphase.cli.settings import find_settings, show_settings
from biphase.cli.show import parse_rates, parse_seeds
from biphase.config import BUNDLED, OnCommandLine, by_commas, parse_config
from biphase.corpus.prepare import prepare as prepare_text
from biphase.deploying import checking
from biphase.errors import InputError, refuse_doubles
from biphase.exporting.push import push as push_model
from biphase.files import new_file, refuse_foreign
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.grid import Grid
from biphase.finetuning.scores import show_rate
from biphase.hub import fetch_model


def in_one_word(read: Callable[[str], Any], description: str) -> Parameter:
    """Make an option that takes values separated by commas; if it is repeated, the values add up."""
    return Parameter(
        converter=lambda _, tokens: read(",".join(token.value for token in tokens)), n_tokens=1, help=description
    )


Form = Annotated[
    Literal["text", "json"], Parameter(name="--format", help="Print text for people, or JSON for programs.")
]
KeyValues = Annotated[
    Sequence[str], Parameter(name="KEY=VALUE", help="Settings to override; `biphase settings COMMAND` lists them.")
]
DataDir = Annotated[
    Path | None,
    Parameter(name="--data-dir", help="The folder of the task's files; without it, the package's data or the Hub's."),
]
Rename = Annotated[list[str] | None, Parameter(help="THEIRS=OURS: read column THEIRS as OURS. May be repeated.")]
OutFolder = Annotated[Path | None, Parameter(name=["--folder", "--out"])]
ScoresFolder = Annotated[Path, Parameter(name="--out")]


def like(
    *functions: Callable[..., Any],
    arguments: str = "",
    shows: Callable[[Any], str | None] | None = None,
    fails: Callable[[Any], str] | None = None,
) -> Callable[..., Any]:
    """Return a decorator that turns a function into a command. The command takes the parameters of other functions,
    with their types, defaults and descriptions, and then its own; its own annotations override theirs. A function
    without parameters provides only a description, and its command calls the first of the others.

    Args:
        functions: The functions that parameters come from.
        arguments: The names of positional arguments; all others are options.
        shows: The function that prints the answer for people; with it, the command also has `--format json`.
        fails: The function that returns why an answer ends the command with code 2, or "".
    """

    def make_command(written: Callable[..., Any]) -> Callable[..., Any]:
        declared, parameters = signature(written).parameters, dict[str, PythonParameter]()
        for function in (*functions, written):
            descriptions = {entry.arg_name: entry.description or "" for entry in parse(getdoc(function) or "").params}
            for name, parameter in signature(function).parameters.items():
                annotation = declared.get(name, parameter).annotation
                is_typed = annotation is not parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
                type_, settings = split_annotation(annotation)
                if is_typed and type_ is not None and name not in parameters:
                    settings.insert(0, Parameter(help=" ".join(descriptions.get(name, "").split())))
                    parameters[name] = as_option(parameter, type_, settings, name in arguments.split())
        if shows is not None:
            parameters["form"] = PythonParameter("form", PythonParameter.KEYWORD_ONLY, default="text", annotation=Form)
        shape = Signature(sorted(parameters.values(), key=lambda parameter: parameter.kind))

        @wraps(written)
        def command(*words: Any, **options: Any) -> None:
            bound = shape.bind(*words, **options)
            bound.apply_defaults()
            is_json = shows is not None and bound.arguments.pop("form") == "json"
            with console.out.capture() if is_json else nullcontext():  # nothing else stands beside the JSON
                answer = (written if declared else functions[0])(**bound.arguments)
            failure = "" if fails is None else fails(answer)
            if shows is not None:
                answer = to_json(answer) if is_json else shows(answer)
            if answer is not None and not isinstance(answer, Path):
                console.out.print(answer)
            if failure:
                raise InputError(failure)

        command.__signature__ = shape  # type: ignore[attr-defined]
        command.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
        return command

    return make_command


def split_annotation(annotation: Any) -> tuple[Any, list[Parameter]]:
    """Return the type that the command line reads (None for a parameter that only Python has), and the settings for
    cyclopts."""
    if get_origin(annotation) is Annotated:
        type_, *marks = get_args(annotation)
        types = [mark.type for mark in marks if isinstance(mark, OnCommandLine)]
        return (types or [type_])[0], [mark for mark in marks if isinstance(mark, Parameter)]
    if get_origin(annotation) in (Union, UnionType):
        [type_] = {*get_args(annotation)} - {type(None)}  # a union of several types needs `OnCommandLine`
        return split_annotation(type_)[0] | None, []
    return annotation, []


def as_option(parameter: PythonParameter, type_: Any, settings: list[Parameter], is_argument: bool) -> PythonParameter:
    """Turn a parameter of a Python function into a parameter of the command line."""
    default = parameter.default
    if default is False or default == ():
        settings.append(Parameter(show_default=False))
    elif isinstance(default, tuple):
        shown = (show_rate(value) if isinstance(value, float) else str(value) for value in default)
        settings.append(Parameter(show_default=", ".join(shown)))
    passing: Any = parameter.POSITIONAL_ONLY if is_argument else parameter.KEYWORD_ONLY
    if is_argument and get_origin(type_) is Sequence:  # as `*words`, so that options may stand between them
        settings.append(Parameter(required=default is parameter.empty))
        type_, passing, default = str, parameter.VAR_POSITIONAL, parameter.empty
    annotation: Any = Annotated[(type_, *settings)]
    return parameter.replace(kind=passing, annotation=annotation, default=default)


def demo(
    folder: Path = Path("biphase-demo"), /, *, changes: Annotated[Sequence[str], Parameter(parse=False)] = ()
) -> None:
    """Run the whole pipeline on bundled text and tasks in minutes, and see whether next-token pretraining followed by
    masked-token pretraining pays off.

    Example: `biphase demo`

    Args:
        folder: The folder to work in; a second run continues there.
        changes: Changes to the study, as on the command line of `biphase study run`.
    """
    from biphase.studies.folder import find_record

    started = time.monotonic()
    corpus = BUNDLED / "corpus"
    console.err.print("[1/5] train a tokenizer on the bundled text")
    if not (folder / "tokenizer").exists():
        networks.train_tokenizer(corpus / "train.jsonl.zst", folder / "tokenizer", vocab_size=4096)
    console.err.print("[2/5] tokenize it into shards")
    shards, held_out = folder / "shards", corpus / "validation.jsonl.zst"
    prepare_text(corpus / "train.jsonl.zst", folder / "tokenizer", shards, validation=held_out)
    study = studies.study("demo", [f"recipe.data.shards={shards}", *changes], folder / "study")
    study = replace(study, made_by=shlex.join(["biphase", "demo", *changes]))
    plan, names = study.planned, ", ".join(study.planned.arms)
    console.err.print(f"[3/5] pretrain {names}; fine-tune each and random weights: {len(plan.cells)} cells")
    study.run()
    console.err.print("[4/5] export the biphasic encoder for transformers")
    last = next(model for model in plan.models if model.name == list(plan.arms)[-1])
    record = find_record(study.folder, plan.runs[last.run])
    assert record is not None
    encoder = folder / f"encoder-{record.folder.rpartition('-')[2]}"
    if not encoder.exists():
        networks.export(f"{(study.folder / 'runs' / record.folder).resolve()}@{last.step}", encoder)
    console.err.print("[5/5] report")
    study.report(folder / "report")
    console.out.print(f"encoder: {encoder} · took {console.duration(time.monotonic() - started)}")


@like(find_settings, arguments="subject word", shows=show_settings)
def settings() -> None:
    """List the settings of a command, or the keys of a file: values, defaults and meanings.

    Example: `biphase settings finetune rate`
    """


@like(examine, arguments="folder", shows=show.print_facts)
def doctor() -> None:
    """Show what a bug report needs: versions, devices, automatic choices, disk space, whether file locks work and
    whether the Hub answers. `!` marks a problem.

    Example: `biphase doctor /shared/runs`
    """


@like(networks.train_tokenizer, arguments="sources")
def tokenizer_train() -> None:
    """Train a byte-level BPE tokenizer on text.

    Example: `biphase tokenizer train corpus/*.jsonl.zst --vocab-size 32768 --out tokenizer`
    """


def tokenizer_from(source: str, /, *, out: Path) -> None:
    """Copy an existing tokenizer, and add mask, end-of-text and padding tokens where missing.

    Example: `biphase tokenizer from EuroBERT/EuroBERT-210m --out tokenizer`

    Args:
        source: A Hub id (ID@REVISION), a folder or a Llama 3 tokenizer.model file.
        out: The folder to write.
    """
    from biphase.corpus.tokenizer import load_tokenizer, save_tokenizer

    tokenizer = load_tokenizer(source)
    save_tokenizer(tokenizer, out)
    special = f"mask {tokenizer.mask_token}, eos {tokenizer.eos_token}, pad {tokenizer.pad_token}"
    console.out.print(f"{out}: {len(tokenizer):,} tokens, {special}")


@like(networks.compare_tokenizers, arguments="text tokenizers", shows=show.print_tokenizers)
def tokenizer_compare(**options: Any) -> Any:
    """Compare tokenizers on your text: tokens per word, bytes per token, the share of unknown tokens.

    Example: `biphase tokenizer compare corpus/ tokenizer FacebookAI/xlm-roberta-base`
    """
    return networks.compare_tokenizers(**options).to_dict("records")


@like(prepare_text, arguments="sources")
def prepare() -> None:
    """Tokenize text into memory-mapped shards. Run the same command again to continue after an interruption.

    Example: `biphase prepare corpus/ --tokenizer tokenizer --out shards`
    """


@like(networks.pretrain, arguments="recipe changes")
def pretrain(changes: KeyValues, **options: Any) -> None:
    """Pretrain, continue or adapt a model according to a recipe. Run the same command again to resume.

    Example: `biphase pretrain tiny data.shards=shards schedule.peak_lr=1e-3`

    On 8 devices: `python -P -m biphase.distributed --nproc-per-node 8 -m biphase pretrain 210m compute.parallel=fsdp`
    """
    run = networks.pretrain(changes=changes, **options)
    console.err.print(f"next: biphase export {run} encoder")


@like(folders.inspect, arguments="folder", shows=show.print_folder)
def inspect() -> None:
    """Show what a folder holds and check that it is complete.

    For a model, also check that transformers loads every weight and that the model attends in the configured direction.

    Example: `biphase inspect shards --verify`
    """


@like(checking.check, arguments="folder", shows=show.print_checks, fails=checking.tell_unequal)
def check() -> None:
    """Compare the outputs of transformers, an ONNX file or a server with the reference outputs (golden vectors) in a
    model folder.

    Example: `biphase check encoder --server http://localhost:8080`
    """


@like(networks.export, arguments="run folder", shows=lambda facts: None)
def export(**options: Any) -> dict[str, Any]:
    """Write a checkpoint as a folder that transformers can load, with a model card.

    Example: `biphase export tiny encoder`

    Example: `biphase export runs/adapt-1a2b3c4d encoder --merge 0.5`
    """
    return folders.read_folder(networks.export(**options))


@like(networks.trim, arguments="model", shows=lambda facts: None)
def trim(text: Annotated[list[str], Parameter(consume_multiple=True)], **options: Any) -> dict[str, Any]:
    """Write a smaller copy of a model, with only the vocabulary that your text needs.

    Example: `biphase trim encoder --text corpus/*.jsonl --out small --test reviews.csv`
    """
    return folders.read_folder(networks.trim(text=text, **options))


@like(push_model, arguments="source repo")
def push() -> None:
    """Upload a model to the Hugging Face Hub: only the model's files, its card and its training curves.

    A finished run's last checkpoint goes to `main`, every other one to a branch `step-N`.

    Example: `biphase push encoder user/encoder --license apache-2.0 --language en --dry-run`
    """


def convert(model: str, folder: Path, /) -> None:
    """Extract the text network of a multimodal model, or convert an old EuroBERT that needs remote code.

    Multimodal models include Gemma 3, Qwen-VL and Mistral Small. Remote code is never run.

    Example: `biphase convert google/gemma-3-4b-pt gemma-3-4b-text`

    Args:
        model: A folder or a Hub id (ID@REVISION).
        folder: The folder to write.
    """
    refuse_foreign(folder, "converted model")
    fetch_model(model)
    from biphase.exporting.convert import convert_checkpoint

    console.out.print(convert_checkpoint(model, folder))


@like(folders.check_task, arguments="task", shows=show.print_task)
def task_check(task: str, data: DataDir = None) -> dict[str, Any]:
    """Check a task's data: show counts, labels, lengths, and examples that train and test share.

    Example: `biphase task check reviews.yaml --data-dir reviews/`
    """
    return folders.check_task(task, data)


@like(finetuning.finetune, arguments="model task changes", shows=lambda facts: None)
def finetune(
    task: Annotated[str, Parameter(required=True)],
    data: DataDir,
    scores: ScoresFolder,
    changes: KeyValues = (),
    **options: Any,
) -> dict[str, Any]:
    """Fine-tune one model on one task with one seed, and score it on validation and test.

    Example: `biphase finetune runs/tiny-1a2b3c4d snli learning_rate=1e-4 seed=3 --keep snli-model`
    """
    given = parse_config(FinetuneConfig, {}, changes, origin=task)
    settings: Any = {name: getattr(given, name) for name in given.model_fields_set}  # also one that equals its default
    score = finetuning.finetune(task=task, data=data, scores=scores, **options, **settings)
    assert score.folder is not None
    return folders.inspect(score.folder)


@like(finetuning.predict, arguments="model data")
def predict(model: str, data: Path, out: Path | None, form: Form = "text", **options: Any) -> str | None:
    """Predict labels, spans or answers for every row of a file, and add them to the row.

    Example: `biphase predict snli-model pairs.csv --out predicted.csv`
    """
    if form == "json" and out is None:
        return to_json([*finetuning.predict_rows(model, data, **options)[1]])
    finetuning.write_predictions(model, data, out or sys.stdout, **options)
    return to_json({"file": str(out)}) if form == "json" else None


@like(finetuning.score, arguments="model data", shows=show.print_file_score)
def score() -> None:
    """Score a fine-tuned model on a file of labelled rows: overall, with confidence intervals, and per class.

    Example: `biphase score snli-model labelled.csv --picture confusion.png`
    """


MODELS = (
    "Models: RUN[@STEP], model folders or Hub ids (ID@REVISION), followed by settings to override for all cells; for "
    "zero-shot:FOLDER also search indexes. Without a model, summarize the scores in --out."
)
TASKS = (
    "Names or YAML files, separated by commas; zero-shot:FOLDER or mteb:NAME. By default, the twelve tasks of "
    "arXiv 2507.00994."
)


@like(finetuning.evaluate, arguments="models")
def evaluate(
    models: Annotated[Sequence[str], Parameter(name="MODEL|KEY=VALUE", help=MODELS)],
    tasks: Annotated[list[str] | None, in_one_word(by_commas, TASKS)],
    data: Annotated[
        list[str] | None,
        Parameter(name="--data-dir", help="TASK=FOLDER: the task's files; for a single task, FOLDER. May be repeated."),
    ],
    learning_rates: Annotated[tuple[float, ...], in_one_word(parse_rates, "Learning rates, separated by commas.")],
    seeds: Annotated[tuple[int, ...], in_one_word(parse_seeds, "Seeds, separated by commas, or ranges such as 0-4.")],
    scores: ScoresFolder,
    compare: Annotated[
        tuple[str, str] | None, Parameter(help="Compare two models on each task: is the difference more than noise?")
    ] = None,
    form: Form = "text",
    **options: Any,
) -> None:
    """Fine-tune and score models on tasks with every learning rate and seed; the rate is chosen on validation data.

    Finished cells are not run again: use the same command to continue, or to add models, tasks, rates or seeds.

    Example: `biphase evaluate encoder --tasks snli,uner_en_ewt --learning-rates 1e-4,5e-4 --seeds 0-2`

    Example: `biphase evaluate --compare encoder-a encoder-b`
    """
    settings = [word for word in models if re.match(r"[a-z_.0-9]+=", word)]
    names = [word for word in models if word not in settings]
    if settings and not names:
        raise InputError(f"only settings are given ({' '.join(settings)}): name a model too")
    refuse_doubles("key", [setting.partition("=")[0] for setting in settings])
    config = parse_config(FinetuneConfig, {}, settings, origin="evaluate")
    grid = Grid(tuple(names), tuple(tasks or ["paper"]), config, Path(scores), learning_rates, seeds)
    answer = finetuning.run_evaluation(grid, show.parse_data_dirs(data or (), grid.tasks), pair=compare, **options)
    if form == "json":
        console.out.print(to_json(finetuning.evaluation_json(answer)))
    else:
        show.print_evaluation(answer)
    if isinstance(answer, finetuning.ScoreSummary):
        finetuning.raise_failures(answer.failures)


@like(networks.embed, arguments="recipe changes")
def embed(changes: KeyValues, **options: Any) -> None:
    """Turn an encoder or a decoder into an embedding model for sentence-transformers.

    Run the same command again to resume.

    Example: `biphase embed embed model=encoder out=embedder`
    """
    networks.embed(changes=changes, **options)


@like(networks.search, arguments="source question", shows=show.print_passages)
def search(**options: Any) -> Any:
    """Find passages that answer a question, with BM25 and an embedding model.

    Documents are embedded once and stored in an index; later searches embed only those that changed.

    Example: `biphase search documents/ "how are leaves shed?" --model embedder`

    Example: `biphase search papers.jsonl --questions questions.txt --where "year>=2020" --rerank ranker`
    """
    return networks.search(**options).to_dict("records")


@like(studies.study, OpenStudy.plan, arguments="file changes")
def study_plan(
    file: str,
    changes: KeyValues,
    folder: OutFolder,
    form: Form = "text",
    picture: Annotated[
        Path | None, Parameter(help="Save a drawing of the tree of runs to this .svg, .pdf or .png file.")
    ] = None,
    **options: Any,
) -> RenderableType:
    """Show what a study trains and evaluates, what it costs, and how much compute shared runs save. Trains nothing.

    Example: `biphase study plan paper --device MI250X`
    """
    from biphase.studies.describe import describe_plan, draw_plan, plan_json

    study = studies.study(file, changes, folder)
    if picture is not None:
        draw_plan(study.planned, picture)
        console.err.print(str(picture))
    estimate = study.estimate(**options)
    if form == "json":
        return to_json(plan_json(study.planned, estimate))
    return describe_plan(study.planned, estimate, study.read_begun())


@like(studies.study, arguments="file changes", shows=show.print_facts)
def study_declare(file: str, changes: KeyValues, folder: OutFolder) -> dict[str, Any]:
    """Record a study's hypotheses before it runs, and print them with a hash to publish.

    Example: `biphase study declare mini`
    """
    return studies.study(file, changes, folder).declare()


@like(studies.study, OpenStudy.run, arguments="file changes")
def study_run(file: str, changes: KeyValues, folder: OutFolder, **options: Any) -> None:
    """Train and evaluate whatever is missing. Run the same command again to continue.

    You can run the same command in several processes at once; they share the work.

    Example: `biphase study run mini`
    """
    studies.study(file, changes, folder).run(**options)


@like(studies.study, arguments="file changes", shows=lambda status: show.print_facts(vars(status)))
def study_status(file: str, changes: KeyValues, folder: OutFolder) -> Any:
    """Show what is done, begun and failed, and how long the rest will take.

    Example: `biphase study status mini`
    """
    return studies.study(file, changes, folder).progress()


@like(studies.study, OpenStudy.report, arguments="file changes")
def study_report(
    file: str, changes: KeyValues, folder: OutFolder, out: Annotated[Path | None, Parameter(name="--report")]
) -> None:
    """Write tables, figures, verdicts and one HTML page from what is finished so far.

    Example: `biphase study report mini`
    """
    studies.study(file, changes, folder).report(out)


@like(studies.study, OpenStudy.bundle, arguments="file changes")
def study_bundle(
    file: str, changes: KeyValues, folder: Path | None, out: Annotated[Path | None, Parameter(name="--out")]
) -> None:
    """Write one archive to publish, with the study file, records, scores, losses and report.

    `biphase study report` rebuilds the page from it.

    Example: `biphase study bundle mini --out mini.tar.xz`
    """
    studies.study(file, changes, folder).bundle(out)


@like(studies.advise)
def study_advise(
    recipe: Annotated[Path | None, Parameter(help="Write the recipe to this file.")] = None,
    form: Form = "text",
    **options: Any,
) -> None:
    """Find the best use of a compute budget: use a public encoder as it is, continue its pretraining, or train a model
    of some size from scratch.

    The advice comes with reasons and a recipe.

    Example: `biphase study advise --text corpus/ --hours 8 --device H100 --recipe recipe.yaml`
    """
    from biphase.studies.describe import describe_advice, recipe_yaml

    with nullcontext() if recipe is None else new_file(recipe) as file:
        advice = studies.advise(**options)
        console.out.print(to_json(advice) if form == "json" else describe_advice(advice))
        if file is not None:
            file.write(recipe_yaml(advice))
            console.err.print(str(recipe))
        elif form == "text":
            console.out.print(recipe_yaml(advice, has_reasons=False))


@like(studies.report_paper)
def report_paper() -> None:
    """Report on arXiv 2507.00994: its tables and figures, and our verdicts on its findings, from its 800 published
    scores or from all fine-tunings of its authors.

    Example: `biphase report paper`
    """


@like(studies.equivalent, arguments="table")
def report_results(
    table: Sequence[str], rename: Rename = None, out: Path = Path("results-report"), **options: Any
) -> None:
    """Report on results from files: which methods differ by more than noise, how they rank, and how much
    compute a given score takes.

    Example: `biphase report results scores.csv --rename model=method`

    Args:
        out: The folder to write.
    """
    from biphase.report.tables import print_table

    standing = studies.equivalent(list(table), rename=show.parse_names(rename), **options)
    page = standing.report(out)
    for listed in standing.tables:
        print_table(listed)
    for line in (*standing.sentences, *(f"note: {note}" for note in standing.notes), str(page)):
        console.out.prose(line)


@like(studies.judge, arguments="table")
def judge(table: Sequence[str], rename: Rename = None, form: Form = "text", **options: Any) -> None:
    """Judge a candidate in a loop of experiments by the seeds that it has so far: keep it, drop it, or run one more
    seed.

    If no idea is better and all scatter alike, the probability of keeping any is at most 5 %, with a look at each seed.

    Exit codes: 0 keep, 3 drop, 4 one more seed; 2 for a mistake, as everywhere.

    Example: `biphase judge runs.csv --baseline main --candidate wider --lower-is-better`
    """
    ruling = studies.judge(list(table), rename=show.parse_names(rename), **options)
    console.out.print(to_json(ruling, indent=None) if form == "json" else str(ruling))
    if ruling.exit_code:
        sys.exit(ruling.exit_code)
