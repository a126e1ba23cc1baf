"""The command line: verbs, their options and dispatch; errors → exit codes.

A verb says what its words mean and calls what does it. Heavy imports happen inside the verb that needs them.
"""

import errno
import re
import signal
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from biphase import __version__
from biphase.api import folders, networks, text
from biphase.api.grids import to_json
from biphase.cli.evaluate import finetuning_app
from biphase.cli.init import init_app
from biphase.cli.study import AddressOption, EngineOption, FormatOption, Overrides, study_app
from biphase.console import FirstLine, describe_copies, err, is_one_of_several, launched_as, out, silence, take_turn
from biphase.corpus.text import TxtDocuments
from biphase.errors import EXIT_BUSY, BusyError, InputError, StoppedError, clipped, memory_told
from biphase.files import refuse_foreign
from biphase.hub import fetch_model
from biphase.machine import prepare_process

networks_app = typer.Typer()

LicenseOption = Annotated[str | None, typer.Option(help="Such as apache-2.0, for a card that says none.")]
LanguageOption = Annotated[str | None, typer.Option(help="Such as en, or en,de, for a card that says none.")]
RunsOption = Annotated[Path, typer.Option("--runs", help="Where run folders are.")]

SHOWN_CHARACTERS = 300
"""How much of a passage is shown."""


@networks_app.command("pretrain")
def pretrain_command(
    recipe: Annotated[Path, typer.Argument(help="A YAML file, or the name of one that comes with biphase: tiny.")],
    overrides: Overrides = None,
    runs: RunsOption = Path("runs"),
) -> None:
    """Pretrain, continue or adapt as a recipe says. The same command resumes; torchrun spreads it over devices.

    Example: `biphase pretrain tiny data.shards=shards schedule.peak_lr=1e-3`

    Several processes: `torchrun --nproc-per-node 8 -m biphase pretrain 210m compute.parallel=fsdp`
    """
    run = networks.pretrain(recipe, overrides or (), runs=runs)
    err.print(f"next: biphase export {run} encoder")


@networks_app.command("export")
def export_command(
    run: Annotated[
        str, typer.Argument(metavar="RUN[@STEP]", help="A run's folder or name; its last step unless given.")
    ],
    folder: Annotated[Path, typer.Argument(help="The folder to write.")],
    merge: Annotated[
        float | None, typer.Option(help="Average with the decoder that it came from; this share is the decoder's.")
    ] = None,
    to_hub: Annotated[str | None, typer.Option(metavar="USER/NAME", help="Push the folder there too, private.")] = None,
    license: LicenseOption = None,
    language: LanguageOption = None,
    form: FormatOption = "text",
) -> None:
    """Write a checkpoint as a folder that transformers loads, with a model card.

    Example: `biphase export tiny encoder`

    Example: `biphase export runs/adapt-1a2b3c4d encoder --merge 0.5`
    """
    out.quiet = form == "json"
    networks.export(run, folder, merge, to_hub=to_hub, license=license, language=language)
    out.quiet = False
    if form == "json":
        out.print(to_json(folders.inspect(folder)))


@networks_app.command("push")
def push_command(
    source: Annotated[str, typer.Argument(metavar="FOLDER", help="A model folder, or RUN[@STEP].")],
    repo: Annotated[str, typer.Argument(metavar="USER/NAME", help="A repository on the Hugging Face hub.")],
    public: Annotated[bool, typer.Option("--public", help="Make it public; it is private otherwise.")] = False,
    license: LicenseOption = None,
    language: LanguageOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go; send nothing.")] = False,
) -> None:
    """Send a model to the Hugging Face hub: weights, configuration, tokenizer and card, nothing else.

    Of a run, its end goes to `main`, and each earlier checkpoint to a branch `step-N`.

    Example: `biphase push encoder user/encoder --license apache-2.0 --language en --dry-run`
    """
    networks.push(source, repo, public=public, license=license, language=language, dry_run=dry_run)


@networks_app.command("convert")
def convert_command(
    model: Annotated[str, typer.Argument(help="A folder, or a hub id (ID@REVISION).")],
    folder: Annotated[Path, typer.Argument(help="The folder to write.")],
) -> None:
    """Write the text network of a model that reads images or sound too (Gemma 3, Qwen-VL, Mistral Small) as a folder of
    its own; or an old EuroBERT, made for code of its own, as one that transformers loads, without running that code.

    Example: `biphase convert google/gemma-3-4b-pt gemma-3-4b-text`
    """
    refuse_foreign(folder, "converted model")
    if not Path(model).is_dir():
        fetch_model(model)
    from biphase.export.convert import convert_checkpoint

    out.print(convert_checkpoint(model, folder))


@networks_app.command("embed")
def embed_command(
    recipe: Annotated[Path, typer.Argument(help="A YAML file, or the name of one that comes with biphase: embed.")],
    overrides: Overrides = None,
    runs: RunsOption = Path("runs"),
) -> None:
    """Train an encoder or a decoder into an embedding model for sentence-transformers. The same command resumes.

    Example: `biphase embed embed model=encoder out=embedder`
    """
    networks.embed(recipe, overrides or (), runs=runs)


@networks_app.command("search")
def search_command(
    source: Annotated[str, typer.Argument(metavar="INDEX_OR_TEXT", help="An index, or files to make one of.")],
    question: Annotated[str, typer.Argument(help="What to look for.")],
    model: Annotated[str | None, typer.Option(help="An embedding model: a folder or a hub id.")] = None,
    index: Annotated[Path | None, typer.Option(help="Where the index of a text is kept (TEXT.index).")] = None,
    top: Annotated[int, typer.Option(min=1, help="Passages to show.")] = 5,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Make the index anew.")] = False,
    text_field: Annotated[str, typer.Option(help="The JSON field or the column with the text.")] = "text",
    form: FormatOption = "text",
) -> None:
    """Find passages for a question, by an embedding model and by BM25. Documents are embedded once and kept.

    Example: `biphase search documents/ "how are leaves shed?" --model embedder`
    """
    options = locals()
    del options["form"]
    found = networks.search(**options)
    if form == "json":
        out.print(to_json(found.to_dict("records")))
        return
    for name, passages in found.groupby("by", sort=False):
        out.print(f"\n{name}", style="bold")
        for passage in passages.itertuples():
            text = passage.text if len(passage.text) <= SHOWN_CHARACTERS else passage.text[:SHOWN_CHARACTERS] + " …"
            out.print(f"{passage.rank:>2}  {passage.score:.3f}  {passage.id}")
            out.prose(f"    {text}")


PATH = {
    "Begin": ("demo", "init", "doctor"),
    "Text and tokens": ("tokenizer", "prepare"),
    "Pretraining": ("pretrain", "inspect", "export", "push", "convert"),
    "Tasks": ("task", "finetune", "predict", "evaluate"),
    "Embeddings": ("embed", "search"),
    "Studies and reports": ("study", "report"),
}
"""The verbs in the order in which a text becomes a score."""


class Verbs(TyperGroup):
    """The verbs. Typer would end a command in silence that a file which is cut short, or Ctrl-C, breaks off."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        for title, verbs in PATH.items():
            for verb in verbs:
                self.commands[verb].rich_help_panel = title  # type: ignore[attr-defined]
        return [verb for verbs in PATH.values() for verb in verbs]

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except EOFError as error:
            raise AssertionError("a file ended early where nobody was ready for it") from error
        except KeyboardInterrupt:
            raise StoppedError(signum=signal.SIGINT) from None


app = typer.Typer(
    name="biphase",
    cls=Verbs,
    help="From text, or a decoder, and a compute budget to the best text encoder that the budget can buy.",
    epilog="Examples: `biphase demo` · `biphase init recipe --out my.yaml` · `biphase pretrain -h`",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
tokenizer_app = typer.Typer(no_args_is_help=True, help="Train a tokenizer, or take an existing one.")
app.add_typer(tokenizer_app, name="tokenizer")
app.add_typer(networks_app)
app.add_typer(finetuning_app)
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
        help="Files (.txt, .md, .jsonl, also .gz, .zst; .parquet, .arrow), folders, globs, hub data sets (ID:SUBSET)."
    ),
]
OutOption = Annotated[Path, typer.Option("--out", help="The folder to write.")]
TextFieldOption = Annotated[str, typer.Option(help="The JSON field or the column with the text.")]
TxtDocumentsOption = Annotated[
    TxtDocuments,
    typer.Option(metavar="UNIT", help="What a document is in .txt and .md files: file, paragraphs or lines."),
]

MOST_CHARACTERS = 2000
"""The longest line of a complaint: what it quotes may be a file without line ends."""

PARAMETERS = {
    **{name: f"--{name}" for name in ("device", "devices", "efficiency", "hours", "keep", "label", "part", "seeds")},
    **{name: f"--{name}" for name in ("language", "license")},
    **{name: f"--{name.replace('_', '-')}" for name in ("learning_rates", "limit_mb", "text_field")},
    "data": "--data-dir",
}
"""What verbs name as `parameter` in an error, and the option that it is here."""


def show_version(wanted: bool) -> None:
    if wanted:
        out.print(f"biphase {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
    ] = False,
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
    out: OutOption,
    vocab_size: Annotated[int, typer.Option(help="Tokens, special ones included.")] = 32_768,
    limit_mb: Annotated[float | None, typer.Option(help="Train on at most this many MB of text.")] = 1000.0,
    text_field: TextFieldOption = "text",
    txt_documents: TxtDocumentsOption = "file",
) -> None:
    """Train a byte-level BPE tokenizer on text.

    Example: `biphase tokenizer train corpus/*.jsonl.zst --vocab-size 32768 --out tokenizer`
    """
    text.train_tokenizer(**locals())


@tokenizer_app.command("from")
def tokenizer_from_command(
    source: Annotated[str, typer.Argument(help="A hub id (ID@REVISION), a folder, or a Llama 3 tokenizer.model file.")],
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
    out: OutOption,
    validation: Annotated[list[str] | None, typer.Option(help="Sources whose documents are for validation.")] = None,
    validation_fraction: Annotated[
        float | None, typer.Option(help="The share of all documents for validation; by default 0.01.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of processes; by default one for every four cores.")
    ] = None,
    engine: EngineOption = "local",
    address: AddressOption = None,
    text_field: TextFieldOption = "text",
    id_field: Annotated[str, typer.Option(help="The JSON field or the column with the document's name.")] = "id",
    txt_documents: TxtDocumentsOption = "file",
    seed: Annotated[int, typer.Option(help="The seed that draws the validation split.")] = 0,
    drop_copies: Annotated[
        bool, typer.Option("--drop-copies", help="Leave out documents with exactly the text of an earlier one.")
    ] = False,
) -> None:
    """Tokenize text into memory-mapped shards. Killed? The same command goes on where it stopped.

    Example: `biphase prepare corpus/ --tokenizer tokenizer --out shards`
    """
    text.prepare(**locals())


@task_app.command("check")
def task_check_command(
    task: Annotated[str, typer.Argument(help="A name such as snli, or a YAML file that describes one.")],
    data_dir: Annotated[Path | None, typer.Option(help="The task's data as published, in place of the hub.")] = None,
    form: FormatOption = "text",
) -> None:
    """Check a task's data: show counts, labels, lengths and what train and test share. Trains nothing.

    Example: `biphase task check reviews.yaml --data-dir reviews/`
    """
    from biphase.cli.evaluate import check_task, show_task

    facts = check_task(task, data_dir)
    out.print(to_json(facts)) if form == "json" else show_task(facts)


@report_app.command("paper")
def report_paper_command(
    folder: Annotated[Path, typer.Option("--out", help="The folder to write.")] = Path("paper-report"),
) -> None:
    """The paper's 800 published scores: its tables, its figures, and its findings judged by our code.

    Example: `biphase report paper`
    """
    from biphase.report.paper import report_paper as write

    out.print(str(write(folder)))


@app.command("inspect")
def inspect_command(
    path: Annotated[Path, typer.Argument(help="Any folder that biphase wrote: shards, a run, a model, a study, …")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte and compare hashes.")] = False,
    near_copies: Annotated[
        bool, typer.Option("--near-copies", help="Also count documents of shards that are nearly copies.")
    ] = False,
    form: FormatOption = "text",
) -> None:
    """Show what is in a folder, and check that it is whole.

    Example: `biphase inspect shards --verify`
    """
    from biphase.api import folders

    facts = folders.inspect(path, verify=verify, near_copies=near_copies)
    out.print(to_json(facts) if form == "json" else folders.tell_facts(facts))


@app.command("doctor")
def doctor_command(
    folder: Annotated[
        Path, typer.Argument(help="Where you mean to work: its disk and its locks are looked at.")
    ] = Path(),
    form: FormatOption = "text",
) -> None:
    """Versions, devices, what `auto` chooses and why, disk, locks, hub: for bug reports. `!` marks what is wrong.

    Example: `biphase doctor /shared/runs`
    """
    from biphase.cli.doctor import examine, show

    out.print(show(examine(folder), form == "json"))


def main() -> Any:
    """The `biphase` command. Exit code 2 and one line for what the user can mend, 75 while another process is at the
    same work, 130 after Ctrl-C, 143 after SIGTERM; 1 and a traceback for what is a mistake of ours."""
    prepare_process()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(encoding="utf-8")  # LC_ALL=C: else an arrow in a help text ends the command
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, FirstLine(" ".join(["biphase", *sys.argv[1:2]])))
    try:
        if is_one_of_several() and launched_as("LOCAL_RANK", 0) > 0:
            silence()  # one of the processes of a machine tells what is wrong with the command
        with memory_told("end what else takes memory here, or take a larger machine"):
            return app()
    except BusyError as error:
        complain(f"{error}{describe_copies()}", EXIT_BUSY)
    except InputError as error:
        complain(str(error))
    except StoppedError as error:
        complain(str(error), error.exit_code)
    except (OSError, RuntimeError) as error:
        complain(explain_system_error(error))


LINK_LOOP = "Symlink loop from "
"""What Python 3.11 and 3.12 say where `Path.resolve` finds no end; 3.13 raises an OSError."""
PLACE_ERRORS = {errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS}
"""What the same command would meet again."""


def explain_system_error(error: OSError | RuntimeError) -> str:
    """What the system refused (a full disk, a folder in place of a file, a name that is too long), where, and what to
    do about it. Any other error, which is a mistake of ours, is raised again."""
    if isinstance(error, RuntimeError):
        if not str(error).startswith(LINK_LOOP):
            raise error
        return f"a link leads back to itself: {str(error).removeprefix(LINK_LOOP)}; give another place, or remove it"
    if error.errno is None:
        raise error
    name = error.filename
    if error.errno not in PLACE_ERRORS or not isinstance(name, str):
        return f"{error.strerror}: {name or 'while writing'}; what was finished is kept, rerun to go on"
    place = Path(name)
    missing = [folder for folder in place.parents if not folder.exists()]
    if error.errno == errno.ENOENT and missing:
        return f"the folder {missing[0]} does not exist; make it, or give another place"
    if place.name.startswith(".") and place.suffix == ".part":  # a file on its way to its name
        place = place.with_name(re.sub(r"\.\d+$", "", place.stem).removeprefix("."))
    return f"{error.strerror}: {place}; give another place, or mend this one"


def complain(line: str, code: int = 2) -> None:
    take_turn(is_shared=code > 128)
    told = re.sub(r"`(\w+)`", lambda found: PARAMETERS.get(found[1], found[0]), " ".join(line.split()))
    err.print(f"biphase: {clipped(told, MOST_CHARACTERS)}")
    sys.exit(code)


if __name__ == "__main__":
    main()
