"""A model folder gets a smaller vocabulary, and its card says what that saves and costs."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from biphase.api.worth import find_task_data, tell_loss, time_batches
from biphase.corpus.text import TextSource, TxtDocuments, sample_texts
from biphase.export.card import add_chapter
from biphase.export.trim import Trimmed, trim_model
from biphase.report.formats import format_bytes, show_count

Texts = tuple[Sequence[TextSource], str, TxtDocuments]
"""Sources, and how `sample_texts` reads them."""


def trim_folder(source: Path, folder: Path, texts: Texts, unseen: Texts, minimum_count: int, test: Path | None) -> None:
    """Write a copy of a model folder with the tokens that texts need: all of it or nothing. Of `unseen` texts the card
    says how much longer they are."""
    task = find_task_data(source, test)
    often = "occur" if minimum_count == 1 else f"occur at least {minimum_count} times"
    names = ", ".join(part.record_name for part in texts[0])

    def complete(part: Path, trimmed: Trimmed) -> None:
        sizes = [sum(path.stat().st_size for path in weighed_files(place)) for place in (source, part)]
        lines = describe(trimmed, f"{often} in {show_count(trimmed.reading.num_texts, 'text')} ({names})", sizes)
        whole, smaller = trimmed.networks
        loss, small_task = "Its loss on a task was not measured", find_task_data(part, test)  # by its own tokenizer
        if task is not None and small_task is not None:
            loss = tell_loss(task, task.judge(whole), small_task.judge(smaller))
        seconds = [time_batches(*pair) for pair in zip(trimmed.networks, trimmed.batches, strict=True)]
        saved = f"{seconds[0] / seconds[1]:.1f} times as fast here, {sizes[0] / sizes[1]:.1f} times smaller"
        add_chapter(part, "Vocabulary", [*lines, f"{loss}; {saved}."])

    read_unseen = partial(sample_texts, *unseen) if unseen[0] else tuple
    trim_model(source, folder, partial(sample_texts, *texts), read_unseen, minimum_count, complete)


def describe(trimmed: Trimmed, which: str, sizes: Sequence[int]) -> list[str]:
    """Say which tokens are kept, what that saves, and what texts are now."""
    reading, unseen, (whole, smaller) = trimmed.reading, trimmed.unseen, trimmed.vocabulary
    same = "all" if reading.num_same == reading.num_texts else f"{reading.num_same:,}"
    lengths = f"Tokens a text: {show_means(reading.mean_tokens)}"
    if unseen.num_texts:
        lengths += f"; of {show_count(unseen.num_texts, 'unseen text')}: {show_means(unseen.mean_tokens)}"
    return [
        f"{smaller:,} of {whole:,} tokens are kept: those that {which}, what they are made of, special ones, and bytes "
        f"or single characters for what is in no text. {trimmed.parameters[0]:,} → {trimmed.parameters[1]:,} "
        f"parameters; weights and tokenizer {format_bytes(sizes[0])} → {format_bytes(sizes[1])}.",
        f"Of these texts {same} are the same tokens as before; for kept tokens transformers computes the same, at most "
        f"{trimmed.gap:.1e} of an output's mean size apart. {lengths}.",
    ]


def show_means(means: tuple[float, float]) -> str:
    """Show the mean before and after: `153.2 → 158.0 (+3.1 %)`."""
    return f"{means[0]:,.1f} → {means[1]:,.1f} ({means[1] / means[0] - 1:+.1%})"


def weighed_files(folder: Path) -> list[Path]:
    """List the files of a model whose size the vocabulary decides."""
    return [*folder.glob("*.safetensors"), folder / "tokenizer.json"]
