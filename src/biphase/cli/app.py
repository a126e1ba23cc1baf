"""The command line: verbs, their options and dispatch; errors → exit codes.

A verb says what its words mean and calls what does it. Heavy imports happen inside the verb that needs them.
"""

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from biphase import __version__
from biphase.cli.embed import embed_command
from biphase.cli.export import convert_command, export_command
from biphase.cli.init import init_app
from biphase.cli.inspect import inspect_command
from biphase.cli.predict import predict_command
from biphase.cli.search import search_command
from biphase.cli.study import AddressOption, EngineOption, Overrides, study_app
from biphase.console import FirstLine, err, is_one_of_several, out, silence, take_turn
from biphase.errors import EXIT_BUSY, BusyError, InputError, StoppedError, clipped
from biphase.machine import prepare_process


class Verbs(TyperGroup):
    """The verbs. Typer would end a command in silence that a file which is cut short, or Ctrl-C, breaks off."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except EOFError as error:
            raise AssertionError("a file ended early where nobody was ready for it") from error
        except KeyboardInterrupt:
            complain(INTERRUPTED, EXIT_INTERRUPTED)


app = typer.Typer(
    name="biphase",
    cls=Verbs,
    help="From text, or a decoder, and a compute budget to the best text encoder that the budget can buy.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
tokenizer_app = typer.Typer(no_args_is_help=True, help="Train a tokenizer, or take an existing one.")
app.add_typer(tokenizer_app, name="tokenizer")
app.add_typer(init_app, name="init")
app.add_typer(study_app, name="study")
task_app = typer.Typer(no_args_is_help=True, help="Tasks: published ones and your own.")
app.add_typer(task_app, name="task")
report_app = typer.Typer(no_args_is_help=True, help="Reports on published scores.")
app.add_typer(report_app, name="report")

# Arguments and options that several verbs have.
SourceArguments = Annotated[
    list[str],
    typer.Argument(
        help="Files (.txt, .jsonl, .jsonl.gz, .jsonl.zst, .parquet), folders, globs, or hub data sets "
        "(HuggingFaceFW/fineweb-edu:sample-10BT)."
    ),
]
OutOption = Annotated[Path, typer.Option("--out", help="The folder to write.")]
TextFieldOption = Annotated[str, typer.Option(help="The JSON field or parquet column with the text.")]
TxtDocumentsOption = Annotated[str, typer.Option(help="What a document is in .txt files: file, paragraphs or lines.")]
ScoresOption = Annotated[Path, typer.Option("--out", help="Where finished cells are kept.")]

EXIT_INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended: 128 and the number of the signal, as shells count."""

MOST_CHARACTERS = 2000
"""The longest line of a complaint: what it quotes may be a file without line ends."""

INTERRUPTED = "interrupted; what was finished is kept, rerun to go on"


def show_version(wanted: bool) -> None:
    if wanted:
        out.print(f"biphase {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


@app.command("demo")
def demo_command(
    folder: Annotated[Path, typer.Argument(help="Where to work; finished parts are kept.")] = Path("biphase-demo"),
) -> None:
    """The whole path on bundled text and tasks, in minutes on a laptop: does pretraining CLM → MLM pay?

    Example: `biphase demo`
    """
    from biphase.cli.demo import run_demo

    run_demo(folder)


@tokenizer_app.command("train")
def tokenizer_train_command(
    sources: SourceArguments,
    out_folder: OutOption,
    vocab_size: Annotated[int, typer.Option(help="Tokens, special ones included.")] = 32_768,
    limit_mb: Annotated[float | None, typer.Option(help="Train on at most this many MB of text.")] = 1000.0,
    text_field: TextFieldOption = "text",
    txt_documents: TxtDocumentsOption = "file",
) -> None:
    """Train a byte-level BPE tokenizer on text.

    Example: `biphase tokenizer train corpus/*.jsonl.zst --vocab-size 32768 --out tokenizer`
    """
    from biphase.corpus.text import find_text_sources, sample_texts
    from biphase.corpus.tokenizer import save_tokenizer, train_tokenizer

    texts = sample_texts(find_text_sources(sources), text_field, txt_documents, limit_mb)  # type: ignore[arg-type]
    tokenizer = train_tokenizer(texts, vocab_size)
    save_tokenizer(tokenizer, out_folder)
    out.print(f"{out_folder}: {len(tokenizer):,} tokens")


@tokenizer_app.command("from")
def tokenizer_from_command(
    source: Annotated[str, typer.Argument(help="A hub id, a folder, or a Llama 3 tokenizer.model file.")],
    out_folder: OutOption,
) -> None:
    """Take an existing tokenizer and make sure that it has mask, end-of-text and padding tokens.

    Example: `biphase tokenizer from EuroBERT/EuroBERT-210m --out tokenizer`
    """
    from biphase.corpus.tokenizer import load_tokenizer, save_tokenizer

    tokenizer = load_tokenizer(source)
    save_tokenizer(tokenizer, out_folder)
    special = ", ".join(f"{role} {getattr(tokenizer, role + '_token')}" for role in ("mask", "eos", "pad"))
    out.print(f"{out_folder}: {len(tokenizer):,} tokens, {special}")


@app.command("prepare")
def prepare_command(
    sources: SourceArguments,
    tokenizer: Annotated[str, typer.Option(help="A tokenizer folder, hub id or Llama 3 tokenizer.model.")],
    out_folder: OutOption,
    validation: Annotated[list[str] | None, typer.Option(help="Sources whose documents are for validation.")] = None,
    validation_fraction: Annotated[float | None, typer.Option(help="Or this share of all documents.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes; one for four cores unless given.")] = None,
    engine: EngineOption = "local",
    address: AddressOption = None,
    text_field: TextFieldOption = "text",
    id_field: Annotated[str, typer.Option(help="The JSON field or parquet column with the document's name.")] = "id",
    txt_documents: TxtDocumentsOption = "file",
    seed: Annotated[int, typer.Option(help="Of the validation split.")] = 0,
    append: Annotated[
        bool, typer.Option("--append", help="Add to a finished set; what is there stays as it is.")
    ] = False,
) -> None:
    """Tokenize text into memory-mapped shards. Killed? The same command goes on where it stopped.

    Example: `biphase prepare corpus/ --tokenizer tokenizer --out shards`

    Example: `biphase prepare news/ --tokenizer tokenizer --out shards --append`
    """
    from biphase.config import parse_config
    from biphase.corpus.prepare import prepare as prepare_shards
    from biphase.engine.local import Engine

    manifest = prepare_shards(
        sources,
        tokenizer,
        out_folder,
        validation_fraction=validation_fraction,
        validation_sources=validation or (),
        workers=workers,
        engine=parse_config(Engine, {"kind": engine, "address": address}, (), origin="prepare"),
        seed=seed,
        text_field=text_field,
        id_field=id_field,
        txt_documents=txt_documents,  # type: ignore[arg-type]
        append=append,
    )
    for name, split in manifest.splits.items():
        left_out = f", {split.empty_texts:,} empty texts left out" if split.empty_texts else ""
        out.print(
            f"{out_folder} {name}: {split.documents:,} documents, {split.tokens:,} tokens{left_out}", markup=False
        )
    if manifest.duplicates is not None and any(manifest.duplicates.model_dump().values()):
        out.print(f"{out_folder}: {manifest.duplicates.line}", markup=False)


@app.command("pretrain")
def pretrain_command(
    recipe: Annotated[Path, typer.Argument(help="A YAML file, or the name of one that comes with biphase: tiny.")],
    overrides: Overrides = None,
    runs: Annotated[Path, typer.Option("--runs", help="Where run folders are.")] = Path("runs"),
) -> None:
    """Pretrain, continue or adapt as a recipe says. The same command resumes; torchrun spreads it over devices.

    Example: `biphase pretrain recipes/tiny.yaml data.shards=shards schedule.peak_lr=1e-3`

    Several processes: `torchrun --nproc-per-node 8 -m biphase pretrain recipes/210m.yaml compute.parallel=fsdp`
    """
    from biphase.config import load_config
    from biphase.recipe import Recipe

    parsed = load_config(Recipe, recipe, overrides or ())
    from biphase.pretraining.loop import train  # takes seconds to load: a mistake in the recipe is told before

    run = train(parsed, runs)
    out.print(str(run.path))


app.command("export")(export_command)
app.command("convert")(convert_command)


@task_app.command("check")
def task_check_command(
    task: Annotated[str, typer.Argument(help="A task of docs/tasks.md, or a YAML file that describes one.")],
    data_dir: Annotated[Path | None, typer.Option(help="The task's data as published, in place of the hub.")] = None,
) -> None:
    """Say what would be read of a task's data: counts, labels, lengths, what train and test share. Trains nothing.

    Example: `biphase task check reviews.yaml --data-dir reviews/`
    """
    from biphase.cli.task import check_task

    check_task(task, data_dir)


@app.command("finetune")
def finetune_command(
    model: Annotated[str, typer.Argument(help="RUN[@STEP], a model folder, or a hub id (ID@REVISION).")],
    task: Annotated[str, typer.Argument(help="A task of docs/tasks.md, or a YAML file that describes one.")],
    overrides: Overrides = None,
    scores: ScoresOption = Path("scores"),
    data_dir: Annotated[Path | None, typer.Option(help="The task's data as published, in place of the hub.")] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Write the fine-tuned model to this folder, for transformers' pipelines.")
    ] = None,
) -> None:
    """Fine-tune one model on one task with one rate and seed, and score it on validation and test.

    Example: `biphase finetune runs/tiny-1a2b3c4d snli learning_rate=1e-4 seed=3 --keep snli-model`
    """
    from biphase.config import parse_config
    from biphase.finetuning.config import FinetuneConfig
    from biphase.finetuning.fit import fit_cell

    fit_cell(model, task, parse_config(FinetuneConfig, {}, overrides or (), origin=task), scores, data_dir, keep)


app.command("embed")(embed_command)
app.command("predict")(predict_command)
app.command("search")(search_command)


@app.command("evaluate")
def evaluate_command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]... [KEY=VALUE]...",
            help="RUN[@STEP], model folders or hub ids (ID@REVISION); then changes to single settings of all cells. "
            "Without a model: what is in --out already.",
        ),
    ] = None,
    tasks: Annotated[
        str, typer.Option(help="Names or YAML files, by commas; `paper` stands for its twelve.")
    ] = "paper",
    learning_rates: Annotated[str, typer.Option(help="By commas.")] = "1e-5,2e-5,5e-5,1e-4,2e-4,5e-4",
    seeds: Annotated[str, typer.Option(help="By commas, or a range such as 0-4.")] = "0-4",
    scores: ScoresOption = Path("scores"),
    data_dir: Annotated[
        list[str] | None, typer.Option(help="TASK=FOLDER with the task's data as published; may be repeated.")
    ] = None,
    engine: EngineOption = "local",
    address: AddressOption = None,
    workers: Annotated[int | None, typer.Option(help="Cells side by side; one per core or GPU unless given.")] = None,
    workers_per_gpu: Annotated[int, typer.Option(help="Cells that share a GPU.")] = 1,
    part: Annotated[str | None, typer.Option(help="NUMBER/TOTAL: only this part of the cells (a Slurm array).")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say which cells are missing and how long they take.")
    ] = False,
    compare: Annotated[
        tuple[str, str] | None, typer.Option(help="Two models: who wins where, and is it more than noise?")
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Write the best fine-tuned model of each task, by validation, below here.")
    ] = None,
) -> None:
    """Fine-tune and score models on tasks with every rate and seed; the rate is chosen on validation.

    Finished cells are never run again: the same command goes on after a kill, and adds what is new.

    Example: `biphase evaluate encoder --tasks snli,uner_en_ewt --learning-rates 1e-4,5e-4 --seeds 0-2`

    Example: `biphase evaluate --compare encoder-a encoder-b`
    """
    from biphase.cli.evaluate import run_evaluation

    run_evaluation(
        list(models or ()),
        tasks=tasks,
        learning_rates=learning_rates,
        seeds=seeds,
        out=scores,
        data_dirs=data_dir or (),
        engine={"kind": engine, "address": address, "workers": workers, "workers_per_gpu": workers_per_gpu},
        part=part,
        dry_run=dry_run,
        pair=compare,
        keep=keep,
    )


@report_app.command("paper")
def report_paper_command(
    folder: Annotated[Path, typer.Option("--out", help="The folder to write.")] = Path("paper-report"),
) -> None:
    """The paper's 800 published scores: its tables, its figures, and its findings judged by our code.

    Example: `biphase report paper`
    """
    from biphase.paper.findings import report_paper as write

    out.print(str(write(folder)))


app.command("inspect")(inspect_command)


@app.command("doctor")
def doctor_command(
    folder: Annotated[
        Path, typer.Argument(help="Where you mean to work: its disk and its locks are looked at.")
    ] = Path(),
    form: Annotated[str, typer.Option("--format", help="text or json.")] = "text",
) -> None:
    """Versions, devices, what `auto` chooses and why, disk, locks, hub: for bug reports. `!` marks what is wrong.

    Example: `biphase doctor /shared/runs`
    """
    from biphase.cli.doctor import examine, show

    out.print(show(examine(folder), form), markup=False)


def main() -> Any:
    """The `biphase` command. Exit code 2 and one line for what the user can mend, 75 while another process is at the
    same work, 143 after a saved stop, 130 after Ctrl-C; 1 and a traceback for what is a mistake of ours."""
    prepare_process()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    if is_one_of_several() and os.environ.get("LOCAL_RANK", "0") != "0":
        silence()  # one of the processes of a machine tells what is wrong with the command
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, FirstLine(" ".join(["biphase", *sys.argv[1:2]])))
    try:
        return app()
    except BusyError as error:
        complain(str(error), EXIT_BUSY)
    except InputError as error:
        complain(str(error))
    except StoppedError as error:
        complain(str(error), 143)
    except OSError as error:  # a full disk, a folder in place of a file, a name that is too long: never our mistake
        if error.errno is None:
            raise
        complain(f"{error.strerror}: {error.filename or 'while writing'}; what was finished is kept, rerun to go on")


def complain(line: str, code: int = 2) -> None:
    """One line and the exit code."""
    take_turn()
    err.print(f"biphase: {clipped(' '.join(line.split()), MOST_CHARACTERS)}")
    sys.exit(code)


def interrupt(signum: int, frame: FrameType | None) -> None:
    """Ctrl-C. While a module is loaded, which takes seconds, the process ends here: loading PyTorch swallows errors."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os.write(2, f"biphase: {INTERRUPTED}\n".encode())
            os._exit(EXIT_INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
