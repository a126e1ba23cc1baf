"""Copy a model folder with a smaller vocabulary, and state in its card what that saves and costs."""

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from biphase.api.worth import find_task_data, tell_loss
from biphase.console import told_if_slow
from biphase.encoder.models import stamp_model, unreplaced
from biphase.exporting.card import add_chapter
from biphase.exporting.golden import write_golden
from biphase.exporting.onnx import copy_model
from biphase.exporting.trim import (
    choose_ids,
    compare_texts,
    load_plain,
    prove_network,
    trim_id_records,
    trim_tokenizer,
    trim_weights,
)
from biphase.report.formats import format_bytes, show_count

Texts = Callable[[], Iterable[str]]


def trim_folder(
    source: Path, folder: Path, read_texts: Texts, read_unseen: Texts, names: str, minimum_count: int, test: Path | None
) -> None:
    """Write a copy of a model folder with the tokens that occur at least `minimum_count` times in texts.

    Args:
        read_texts: The function that reads these texts; it is called twice.
        read_unseen: The function that reads further texts; the card says how many tokens they take.
        names: The names of the texts, for the card.

    Raises:
        InputError: no fast tokenizer of a known kind, or unsuitable texts.
        FailedProofError: the copy tokenizes a text of kept tokens differently, or computes another output for it.
    """
    task = find_task_data(source, test)
    stamps = stamp_model(source)
    ids = choose_ids(source, read_texts(), minimum_count)

    def trim(part: Path) -> None:
        with unreplaced(source, stamps):
            trim_copy(part)

    def trim_copy(part: Path) -> None:
        whole, smaller = trim_weights(part, ids)
        trim_tokenizer(part, ids)
        trim_id_records(part, ids)
        with told_if_slow("comparing the tokenizers and the networks on the texts"):
            texts = measure_texts(compare_texts(source, part, read_texts(), ids))
            unseen = measure_texts(compare_texts(source, part, read_unseen(), ids))
            networks = load_plain(source), load_plain(part)
            gap = prove_network(*networks, ids)
        loss = "Its loss on a task was not measured"
        if task is not None:
            loss = tell_loss(task, task.judge(), task.judge(folder=part))
        sizes = [
            sum(path.stat().st_size for path in (*place.glob("*.safetensors"), place / "tokenizer.json"))
            for place in (source, part)
        ]
        often = "occur" if minimum_count == 1 else f"occur at least {minimum_count} times"
        same = "all" if texts["same"] == texts["number"] else f"{texts['same']:,}"
        lengths = f"Tokens a text: {show_means(texts)}"
        if unseen["number"]:
            lengths += f"; of {show_count(unseen['number'], 'unseen text')}: {show_means(unseen)}"
        lines = [
            f"{len(ids):,} of {networks[0].config.vocab_size:,} tokens are kept: those that {often} in "
            f"{show_count(texts['number'], 'text')} ({names}), their parts, special tokens, and bytes or single "
            f"characters for all other text. {whole:,} → {smaller:,} parameters; weights and tokenizer "
            f"{format_bytes(sizes[0])} → {format_bytes(sizes[1])}.",
            f"Of these texts, {same} have the same tokens as before; for kept tokens transformers' outputs differ by "
            f"at most {gap:.1e} of their mean size. {lengths}.",
            f"{loss}; {sizes[0] / sizes[1]:.1f} times smaller.",
        ]
        write_golden(part)
        add_chapter(part, "Vocabulary", lines)

    copy_model(source, folder, trim)


def measure_texts(read: Iterable[tuple[list[int | None], list[int]]]) -> Counter[str]:
    """Count the texts, the texts with the same tokens as before, and the tokens before and after."""
    counts = Counter[str]()
    for old, new in read:
        counts.update(number=1, same=old == new, before=len(old), after=len(new))
    return counts


def show_means(counts: Counter[str]) -> str:
    """Show the mean number of tokens before and after: `153.2 → 158.0 (+3.1 %)`."""
    before, after = (counts[key] / counts["number"] for key in ("before", "after"))
    return f"{before:,.1f} → {after:,.1f} ({after / before - 1:+.1%})"
