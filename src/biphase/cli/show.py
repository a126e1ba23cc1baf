"""Print the results of commands, and parse values of their options."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from biphase.api.finetuning import FileScore, ScoreSummary, fields_of
from biphase.api.networks import ZeroShot, print_zero_shot
from biphase.config import MOST_REPEATS
from biphase.console import duration, out, print_rows
from biphase.deploying.checking import AnswerCheck
from biphase.embedding.questions import ANSWER_COLUMNS
from biphase.engine.scheduler import Failure
from biphase.errors import InputError, first_of
from biphase.finetuning.class_report import ClassReport, print_report
from biphase.finetuning.grid import MissingCells
from biphase.report import verdicts
from biphase.tasks.families import KINDS
from biphase.tasks.spec import find_task, task_table

LONG_CHARACTERS = 60
"""The most characters in a part of a fact; if a part is longer, each part gets its own line."""
PASSAGE_CHARACTERS = 300
"""The number of characters shown of a passage."""
MOST_LABELS = 12
"""The number of labels shown of a split, the most frequent first."""


def print_facts(facts: Mapping[str, Any]) -> None:
    """Print named facts: records as a table, nested or long facts with a line for each part, others on one line."""
    for key, value in facts.items():
        name = name_fact(key)
        items: list[Any] = []
        if isinstance(value, dict | list):
            items = list(value.values()) if isinstance(value, dict) else value
        is_long = any(isinstance(item, dict) or len(str(item)) > LONG_CHARACTERS for item in items)
        if isinstance(value, dict) and is_long:
            print_facts({f"{name} {inner}": item for inner, item in value.items()})
        elif items and all(isinstance(item, dict) for item in items):
            rows = [[tell_fact(*cell) for cell in record.items()] for record in items]
            print_rows([name_fact(head) for head in items[0]], rows, name)
        elif value not in (None, [], {}, ()):
            for item in items if is_long else [value]:
                out.prose(f"{name}: {tell_fact(key, item)}")


def print_folder(facts: Mapping[str, Any]) -> None:
    """Print the facts about a folder, its warnings, and for a cell the scores per class."""
    report = facts.get("classes")
    if not isinstance(report, ClassReport):
        print_facts({**facts, "warnings": None})
        for warning in facts.get("warnings", ()):
            out.prose(f"! {warning}")
        return
    print_facts({**facts, "classes": None, "never_predicted": None})
    print_report(report, facts["never_predicted"].get("test", {}))


def print_checks(checks: Sequence[AnswerCheck]) -> None:
    """Print the distance of each answer from the golden vectors, and the verdicts."""
    for check in checks:
        rows = [[tell_fact(*cell) for cell in {**row, "cosine": f"{row['cosine']:.6f}"}.items()] for row in check.texts]
        if rows:
            print_rows(["text", "tokens", "cosine", "largest difference"], rows, check.by)
        out.prose(f"{check.by}: {check.verdict}")


def print_file_score(score: FileScore) -> None:
    """Print a fine-tuned model's metrics on a file, the primary one first, and its scores per class."""
    print_facts(fields_of(score, "model task num_examples num_left_out num_truncated num_trained"))
    for metric in sorted(score.metrics, key=lambda name: name != score.metric):
        out.print(score.show(metric))
    if score.classes is not None:
        print_report(score.classes, {})
    if score.words is not None:
        out.prose(score.words.sentence)


def name_fact(key: str) -> str:
    """Turn a key into words; leave the name of an environment variable unchanged."""
    return key.removeprefix("num_").replace("_", " ") if key.islower() else key


def tell_fact(name: str, value: Any) -> str:
    """Write a fact as text; a number whose name begins with `seconds` becomes a duration."""
    match value:
        case None:
            return ""
        case Failure():
            return f"{value.unit}: {value.reason}"
        case dict():
            return " · ".join(f"{name_fact(key)} {tell_fact(key, item)}" for key, item in value.items())
        case list() | tuple():
            return ", ".join(tell_fact(name, item) for item in value)
        case bool():
            return "yes" if value else "no"
        case int() | float() if name.startswith("seconds"):
            return duration(value)
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.4g}".replace("e-0", "e-") if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


def print_evaluation(answer: ZeroShot | MissingCells | ScoreSummary) -> None:
    """Print the result of `evaluate`."""
    if isinstance(answer, MissingCells):
        print_facts(vars(answer))
        if answer.unknown_trainings:
            out.print("unknown trainings: their tasks have no finished cell yet; run one seed to get an estimate")
    elif isinstance(answer, ScoreSummary):
        verdicts.print_summary(answer.rows, answer.scores.broken)
        searches = [score for score in answer.scores.scores if score.metric in KINDS["retrieval"].metrics]
        if easier := sorted({score.task for score in searches if score.config.judged_only}):
            out.print(f"ranked among judged documents only, which gives higher scores: {', '.join(easier)}")
        if answer.comparison:
            verdicts.print_comparison(answer.comparison)
    else:
        print_zero_shot(answer)


def print_task(facts: dict[str, Any]) -> None:
    """Print the facts of `check_task`, the most frequent labels of each split, and warnings about leaks."""
    shared = {split: number for split, number in facts["also_in_train"].items() if number}
    lines: dict[str, Any] = {**facts, "labels": None, "classes": len(facts["classes"]), "also_in_train": shared}
    for split, counts in facts["labels"].items():
        labels = [f"{label} {number:,}" for label, number in counts.items()]
        absent = [name for name in facts["classes"] if name not in counts]
        never = f"; never: {', '.join(absent)}" if absent else ""
        lines[f"labels of {split}"] = f"{first_of(labels, MOST_LABELS)}{never}"
    print_facts(lines)
    for split in shared:
        out.prose(f"inputs of {split} are also in train: the scores on {split} may be too high")
    if shared and facts["task"] not in task_table():
        out.prose("`duplicates: drop` in the task file leaves copies out")


def print_tokenizers(compared: list[dict[str, Any]]) -> None:
    """Print a row for each tokenizer."""
    heads = ("name", "tokens", "tokens per word", "bytes per token", "unknown")
    numbers = ((row["tokens_per_word"], row["bytes_per_token"], row["unknown"]) for row in compared)
    cells = [(f"{words:.2f}", f"{size:.2f}", f"{unknown:.2%}") for words, size, unknown in numbers]
    named = ((row["tokenizer"], f"{row['vocab_size']:,}") for row in compared)
    print_rows(heads, [(*name, *cell) for name, cell in zip(named, cells, strict=True)])


def print_passages(passages: list[dict[str, Any]]) -> None:
    """Print the passages for each question, with the columns of their documents."""
    for passage in passages:
        text = passage["text"]
        if passage["rank"] == 1:
            heads = [passage[key] for key in ("question", "by") if key in passage]
            out.print(f"\n{' · '.join(heads)}", style="bold")
        out.print(f"{passage['rank']:>2}  {passage['score']:.4f}  {passage['id']}")
        # NaN differs from itself: the document lacks this column.
        columns = [key for key in passage if key not in ANSWER_COLUMNS and passage[key] == passage[key]]
        if columns:
            out.prose(f"    {' · '.join(f'{key} {passage[key]}' for key in columns)}")
        out.prose(f"    {text[:PASSAGE_CHARACTERS]}{' …' if len(text) > PASSAGE_CHARACTERS else ''}")


def parse_data_dirs(pairs: Sequence[str], tasks: Sequence[str]) -> list[tuple[str, str]]:
    """Split each pair such as `snli=path` into ("snli", "path"); a folder alone is that of a single task."""
    folders = []
    for pair in pairs:
        task, _, folder = pair.partition("=")
        if "=" not in pair and len(tasks) == 1 and tasks[0] != "paper":
            task, folder = find_task(tasks[0]).name, pair
        elif not folder:
            raise InputError(f"--data-dir {pair} must be TASK=FOLDER, such as snli=data")
        folders.append((task, folder))
    return folders


def parse_names(pairs: Sequence[str] | None) -> dict[str, str]:
    """Parse `THEIRS=OURS` pairs."""
    return {theirs: ours for theirs, _, ours in (pair.partition("=") for pair in pairs or ())}


def parse_rates(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in text.split(","))


def parse_seeds(text: str) -> tuple[int, ...]:
    """Parse `0-4`, `0,1,5`, or `0-4,7`."""
    seeds: list[int] = []
    for word in text.split(","):
        span = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", word)
        first, last = (int(span[1]), int(span[2] or span[1])) if span else (1, 0)
        if not 0 <= last - first < MOST_REPEATS:
            form = f"numbers from 0, or ranges such as 0-4 of at most {MOST_REPEATS:,}, separated by commas"
            raise InputError(f"{text}: give {form}")
        seeds += range(first, last + 1)
    return tuple(seeds)
