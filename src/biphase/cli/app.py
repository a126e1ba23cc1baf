"""The command line: its commands and its errors.

The commands themselves are functions in `MODULES`. A module is loaded only when one of its commands is called, so help
and errors about mistyped names appear at once.
"""

import ast
import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from inspect import cleandoc
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Literal, NoReturn

from cyclopts import (
    App,
    CycloptsError,
    Group,
    MissingArgumentError,
    Parameter,
    UnknownOptionError,
    UnusedCliTokensError,
)

from biphase import __version__
from biphase.console import announce_loading, describe_copies, err, is_one_of_several, silence, take_turn
from biphase.errors import (
    DOCS,
    EXIT_BUSY,
    STOPPED,
    BusyError,
    InputError,
    StoppedError,
    clipped,
    first_line,
    is_raised_in_rust,
    memory_told,
    refuse_doubles,
    told_as,
)
from biphase.machine import environment_number, prepare_process, refuse_versions

PATH = {
    "Get started": ("demo", "init", "settings", "doctor"),
    "Text and tokens": ("tokenizer", "prepare"),
    "Pretraining": ("pretrain", "inspect", "export", "trim", "check", "push", "convert"),
    "Tasks": ("task", "finetune", "predict", "score", "evaluate"),
    "Embeddings": ("embed", "search"),
    "Studies and reports": ("study", "report", "judge"),
}
"""Title of a section of the help → its commands, in the order in which a text becomes a score."""
GROUPS = {
    "init": ("Write a recipe, a study, a task or a Slurm script to start from.", "init task reviews.csv"),
    "tokenizer": ("Train a tokenizer or copy an existing one.", "tokenizer train corpus/ --out tokenizer"),
    "task": (
        "Check the data of a published task or of a task of your own.",
        "task check reviews.yaml --data-dir reviews/",
    ),
    "study": ("Run a controlled study: one file defines its plan, runs and report.", "study plan mini"),
    "report": ("Report on scores: those published with arXiv 2507.00994, or your own.", "report results scores.csv"),
}
"""First word of two-word commands → its description and an example."""
MODULES = ("commands", "init")
"""The modules beside this one whose functions are commands: `demo`, or `study_plan` for `study plan`."""
GUESSED = {"--output": "--out", "--output-dir": "--out", "--filter": "--where", "--top-k": "--top"}
"""Option that people guess → the option that it means."""
OPTIONS: dict[str, str] = {}
"""Parameter of the running command → its option, which error messages name instead."""

NOT_UTF8 = "not UTF-8, the only encoding that all libraries accept"
MOST_CHARACTERS = 2000
"""The most characters of an error message, which may quote a file without line ends."""


def make_app() -> App:
    """Make the app with all commands. Read their names and descriptions from the source of `MODULES` without importing
    them."""
    app = App(
        name="biphase",
        help="Turn text or a decoder into a text encoder within a compute budget, and measure how good it is.",
        help_epilogue="Examples: `biphase demo` · `biphase init recipe --out my.yaml` · `biphase pretrain -h`\n\n"
        "With `--quiet`, every command prints nothing but its result and errors.\n\n"
        f"Documentation: {DOCS / 'index.md'}",
        help_format="plaintext",
        version=f"biphase {__version__}",
        default_parameter=Parameter(negative=()),
        group_commands=Group("Options"),
        group_parameters=Group("Options"),
    )
    app.register_install_completion_command(name="--install-completion")

    @app.command(name="--show-completion")
    def show_completion(shell: Literal["bash", "zsh", "fish"] | None = None) -> None:
        """Print the completion script for the current shell, to copy or customize it."""
        print(app.generate_completion(shell=shell))

    sections: dict[str, dict[str, Any]] = {}
    for number, (title, names) in enumerate(PATH.items()):
        section = Group(title, sort_key=number)
        for name in names:
            sections[name] = {"group": section, "sort_key": len(sections)}
    for name, (line, example) in GROUPS.items():
        shown = f"Example: `biphase {example}`"
        app.command(App(name=name, help=line, help_epilogue=shown, group_commands=Group("Commands"), **sections[name]))
    for module in MODULES:
        source = Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
        for node in ast.parse(source).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            first, _, second = node.name.partition("_")
            if first not in sections or (first in GROUPS) != bool(second):
                continue
            description, _, _ = cleandoc(ast.get_docstring(node) or "").partition("\n\nArgs:")
            texts = {"help": description, "help_epilogue": ""}
            import_path = f"biphase.cli.{module}:{node.name}"
            if second:
                app[first].command(import_path, name=second, sort_key=node.lineno, **texts)
            else:
                app.command(import_path, name=first, **sections[first], **texts)
    return app


app = make_app()


def run_command(words: Sequence[str]) -> None:
    """Run the command given by the words after `biphase`. Raises `InputError` for words that no command accepts."""
    for word in words:
        with told_as(f"'{word}' is {NOT_UTF8}", "choose another name"):
            word.encode()
    words = ["study", *words] if words[:1] == ["advise"] else words
    words = [re.sub(r"^--[\w-]+", lambda option: GUESSED.get(option[0], option[0]), word) for word in words]
    try:
        command, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    except UnknownOptionError as error:
        key = (error.token.keyword or error.token.value).partition("=")[0].lstrip("-").replace("-", "_")
        takes_settings = any("KEY=VALUE" in argument.name for argument in error.argument_collection)
        raise InputError(f"{error}{f' Settings are words without dashes: {key}=…' if takes_settings else ''}") from None
    except UnusedCliTokensError as error:
        left = " ".join(map(repr, error.unused_tokens or ()))
        raise InputError(f"{left}: too many words; put quotes around a value with blanks (see -h)") from None
    except MissingArgumentError as error:
        missing = f"{error.argument and error.argument.name} is missing"
        lack = f"{error.keyword} has no value" if error.keyword else missing
        raise InputError(f"{' '.join(error.command_chain or ())}: {lack} (see -h)") from None
    except CycloptsError as error:
        has_no_keys = words[:1] == ["settings"] and len(words) > 1 and words[1] in app
        remedy = f" Its options are in `biphase {words[1]} -h`." if has_no_keys else ""
        raise InputError(f"{error}{remedy}") from None
    *_, last = app.parse_commands(words)[1]
    if command is last.default_command:
        OPTIONS.update((argument.field_info.name, argument.name) for argument in last.assemble_argument_collection())
    refuse_versions()
    if command.__name__ not in ("doctor", "help_print", "version_print"):
        with suppress(FileNotFoundError):  # somebody may have removed the current folder, where relative names begin
            folder = os.getcwd()
            with told_as(f"the current folder, '{folder}', is {NOT_UTF8}", "run biphase in another one"):
                folder.encode()
    refuse_doubles("key", [change.partition("=")[0] for change in bound.arguments.get("changes", ())])
    command(*bound.args, **bound.kwargs)
    if command.__name__ == "help_print" and not {"-h", "--help"}.intersection(words):
        sys.exit(2)


def main() -> NoReturn:
    """Run the `biphase` command and exit. The exit code is 2, with one line, for an error that the user can fix; 75
    while another process does the same work; 128 plus the number of the signal that stopped it (130 after Ctrl-C, 143
    after SIGTERM); 1, with a traceback, for a bug in biphase."""
    prepare_process()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(encoding="utf-8")  # with LC_ALL=C, an arrow in a help text would end the command
    words = [word for word in sys.argv[1:] if word != "--quiet"]
    err.quiet = len(words) < len(sys.argv[1:])
    if "torch" not in sys.modules:
        announce_loading(" ".join(["biphase", *words[:1]]))
    try:
        if is_one_of_several() and environment_number("LOCAL_RANK", 0) > 0:
            silence()  # only one of a machine's processes reports errors in the command
        with memory_told("end other programs that take memory, or use a larger machine"):
            run_command(words)
            sys.exit()
    except KeyboardInterrupt:
        complain(STOPPED, 128 + signal.SIGINT)
    except BusyError as error:
        complain(f"{error}{describe_copies()}", EXIT_BUSY)
    except InputError as error:
        from biphase.cli.meant import find_meant

        first, *others = words or [""]
        is_command = first in app and not (first in GROUPS and others and others[0] not in app[first])
        complain((find_meant(words) if is_command else None) or str(error))
    except StoppedError as error:
        complain(str(error), error.exit_code)
    except (OSError, RuntimeError) as error:
        complain(explain_system_error(error))
    except BaseException as error:
        if not is_raised_in_rust(error):
            raise
        complain(f"a tokenizer or a model is damaged ({first_line(error)}); replace its files with undamaged ones")


def explain_system_error(error: OSError | RuntimeError) -> str:
    """Explain an error of the system (a full disk, a folder in place of a file, a name that is too long), where it
    occurred, and what to do about it. Raise any other error again, because it is a bug in biphase."""
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop"):
        reason = str(error)  # from `Path.resolve` in Python 3.11 and 3.12; in 3.13, opening the file raises an OSError
    elif isinstance(error, RuntimeError) or error.errno is None:
        raise error
    else:
        name = str(error.filename2 or error.filename or "while writing")  # a copy's target is the second
        name = re.sub(r"(^|/)\.([^/]+?)(\.\d+)?\.part(?=/|$)", r"\1\2", name)  # what is not yet renamed
        reason = f"{error.strerror}: {name}"
        if isinstance(error, FileExistsError | NotADirectoryError):
            above = (path for path in (Path(name), *Path(name).parents) if path.is_file())
            reason = next((f"{path} is a file where a folder is needed" for path in above), reason)
    return f"{reason}; fix this, or choose another place: finished work is kept, so rerun to continue"


def complain(line: str, code: int = 2) -> NoReturn:
    """Print the line, with options in place of the command's parameters, and end the process."""
    err.quiet = err.quiet and is_one_of_several()  # --quiet does not hide an error
    take_turn(is_shared=code > 128)
    text = re.sub(r"`(\w+)`", lambda name: OPTIONS.get(name[1], name[0]), " ".join(line.split()))
    err.print(f"biphase: {clipped(text, MOST_CHARACTERS)}")
    sys.exit(code)


if __name__ == "__main__":
    main()
