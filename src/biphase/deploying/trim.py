"""A model folder and typical texts → a copy with the part of its vocabulary that such texts need.

The copy has slices of the tables of embeddings and logits; the tokenizer, and all token ids in configurations, follow.
A text of kept tokens has the same tokens as before, by construction: a smaller WordPiece vocabulary adds no match, a
smaller Unigram one no likelier cut, and a smaller BPE one has each merge that such a text goes through. All the same,
this module proves it: with `tokenizers` on every text, and with transformers on kept tokens. Bytes or single characters
spell all other text.

Letters: L tokens of a text, V kept tokens.
"""

import copy
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from itertools import islice, pairwise
from math import inf
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers
from torch import Tensor
from transformers import AutoModel

from biphase.console import told_if_slow
from biphase.corpus.text import cut_words, join_words
from biphase.corpus.tokenizer import load_auto_tokenizer, load_pretrained_tokenizer
from biphase.deploying.copying import copy_model
from biphase.deploying.worth import find_task_data, tell_loss
from biphase.encoder.models import stamp_model, unreplaced
from biphase.encoder.network import load_weights, pad_batch
from biphase.encoder.proofs import FailedProofError, agree, foreign_errors_fail
from biphase.errors import InputError, clipped, told_as
from biphase.exporting.card import add_chapter, with_network
from biphase.exporting.golden import write_golden
from biphase.exporting.plain import UNPADDED, network_class, read_named_prompts
from biphase.exporting.push import CARD_NAME
from biphase.files import read_json_as, write_json, write_text
from biphase.finetuning.kept import RECORD, read_task
from biphase.hub import count_positions, load_model_config
from biphase.report.formats import format_bytes, show_count

NAMES_ID = re.compile(r"\w*token_ids?|\w*token_index|\w*suppress_tokens|bad_words_ids|pad_id|ids|sep|cls")
"""Keys whose numbers are token ids, in configurations and in a tokenizer's padding and post-processor."""
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
OTHER_SPELLINGS = ("vocab.*", "merges.txt", "added_tokens.json", "*.model")
"""Files that repeat the vocabulary of `tokenizer.json`."""
TEXTS_AT_ONCE, OPENING, PASSAGE = 32, 100, 8
"""The texts of a batch, the characters of a text to read after a prompt, and the words of a passage."""
SAMPLE_LENGTHS = (9, 256, 40, 1, 120, 23, 77, 5)
"""The lengths of the proof's texts."""
MOST_UNKNOWN = 0.5
"""The largest share of unknown tokens in texts that are for the model."""


def load_backends(folder: Path) -> list[Tokenizer]:
    """Load a folder's tokenizer, then the one that `AutoTokenizer` makes for the type if it differs. Neither truncates
    nor pads."""
    if not (folder / "tokenizer.json").exists():
        remedy = "AutoTokenizer.from_pretrained(…).save_pretrained(…) writes one for many"
        raise InputError(f"{folder} has no fast tokenizer (tokenizer.json); {remedy}")
    backends: dict[str, Tokenizer] = {}
    with told_as(f"tokenizer {folder} cannot be used"):
        for tokenizer in (load_pretrained_tokenizer(folder), load_auto_tokenizer(folder)):
            backend = copy.deepcopy(tokenizer.backend_tokenizer)
            backend.no_padding()
            backend.no_truncation()
            backends.setdefault(backend.to_str(), backend)
    for backend in backends.values():
        name, model = type(backend.model).__name__, backend.model
        is_marked = name == "BPE" and (model.continuing_subword_prefix or model.end_of_word_suffix)
        if is_marked or name not in ("BPE", "WordPiece", "Unigram"):
            raise InputError(f"{folder} has a {name} tokenizer; WordPiece, Unigram and BPE without affixes are trimmed")
    return [*backends.values()]


def choose_ids(source: Path, texts: Iterable[str], minimum_count: int) -> dict[int, int]:
    """Choose the tokens that a model needs for texts; return old ids → new ids, in order.

    Raises `InputError` for a tokenizer that is not fast or of an unknown kind, and for texts that decide nothing.
    """
    backends = load_backends(source)
    size = load_model_config(source).vocab_size
    prompts = list_prompts(source)
    tokenizer = backends[0]
    state = json.loads(tokenizer.to_str())
    counts = count_tokens(tokenizer, texts, prompts)
    if not counts:
        raise InputError("text: there is none in these sources: give texts of the kind that the model is for")
    if (share := counts[unknown_id(state)] / counts.total()) > MOST_UNKNOWN:
        raise InputError(f"text: {share:.0%} of its tokens are unknown: this model does not read its script")
    enough = {id for id, count in counts.items() if count >= minimum_count}
    if not enough:
        raise InputError(f"minimum_count {minimum_count}: no token of these texts is so frequent; give a lower one")
    kept = choose_tokens(state, enough.union(*(tokenizer.encode(prompt).ids for prompt in prompts)))
    added = {id: token for backend in backends for id, token in backend.get_added_tokens_decoder().items()}
    kept.update(added)
    renumber([*read_id_records(source).values()], kept.add)
    # Special tokens that no template adds need no rows. Gemma's image token has none, and goes.
    used = {
        id for backend in backends for id in backend.get_vocab().values() if id not in added or not added[id].special
    }
    renumber(state["post_processor"], used.add)
    highest = max(used)
    if highest >= size:
        raise InputError(f"{source} cannot be trimmed: it has token ids up to {highest:,}, and {size:,} rows")
    ids = {old: new for new, old in enumerate(sorted(kept & {*range(size)}))}
    if len(ids) == size:
        raise InputError(f"these texts need all {size:,} tokens of {source}: give a `minimum_count`, or less text")
    return ids


def list_prompts(folder: Path) -> list[str]:
    """List the fixed words of a model's inputs: an embedding model's prompts, else a kept model's templates."""
    prompts = [*read_named_prompts(folder).values()]
    if not prompts and (folder / RECORD).exists():
        task = read_task(folder)
        templates = (task.query_template, task.document_template) if task.kind.is_search else (task.template,)
        prompts = [re.sub(r"\{\w+\}", "", template) for template in templates]
    return list(filter(None, prompts))


def in_batches(texts: Iterable[str]) -> Iterator[list[str]]:
    stream = iter(texts)
    while batch := list(islice(stream, TEXTS_AT_ONCE)):
        yield batch


def count_tokens(tokenizer: Tokenizer, texts: Iterable[str], prompts: list[str]) -> Counter[Any]:
    """Count the tokens of texts, and those of their beginnings after each prompt; return the largest count of each
    token."""
    counts, *counts_after = (Counter[Any]() for _ in ("", *prompts))
    with told_if_slow("counting tokens"):
        for batch in in_batches(texts):
            openings = [[prompt + text[:OPENING] for text in batch] for prompt in prompts]
            for counted, read in zip((counts, *counts_after), (batch, *openings), strict=True):
                for encoding in tokenizer.encode_batch_fast(read, add_special_tokens=False):
                    counted.update(encoding.ids)
    for counted in counts_after:
        counts |= counted
    return counts


def unknown_id(state: Any) -> int | None:
    model = state["model"]
    unknown: int | None = model["unk_id"] if model["type"] == "Unigram" else model["vocab"].get(model["unk_token"])
    return unknown


def choose_tokens(state: Any, enough: Set[int]) -> set[int]:
    """Find the ids that a tokenizer must keep besides its added tokens.

    They are the tokens that occur often `enough`, the tokens that BPE merges to them, the tokens that the tokenizer
    names, and those that spell any other text: bytes, or single characters. Letters of absent scripts are left out.
    """
    model, kept = state["model"], {*enough}
    is_unigram = model["type"] == "Unigram"
    pieces = [entry[0] for entry in model["vocab"]] if is_unigram else model["vocab"]
    ids = {piece: id for id, piece in enumerate(pieces)} if is_unigram else model["vocab"]
    renumber([state["post_processor"], state["padding"]], kept.add)
    if (unknown := unknown_id(state)) is not None:
        kept.add(unknown)
    words = [piece for piece, id in ids.items() if id in kept]
    if "ByteLevel" in json.dumps([state["normalizer"], state["pre_tokenizer"]]):
        kept.update(ids[letter] for letter in pre_tokenizers.ByteLevel.alphabet() if letter in ids)
    elif model.get("byte_fallback"):
        kept.update(id for piece, id in ids.items() if BYTE_TOKEN.fullmatch(piece))
    else:
        prefix = model.get("continuing_subword_prefix") or ""
        scripts = {script_of(letter) for word in words for letter in word.removeprefix(prefix)}
        singles = [piece for piece in ids if len(piece.removeprefix(prefix)) == 1]
        kept.update(ids[piece] for piece in singles if script_of(piece[-1]) in scripts | {""})
    if is_unigram:  # Unigram makes unknown text less likely than its least likely token, so keep that token
        kept.add(min(range(len(pieces)), key=lambda id: model["vocab"][id][1]))
    elif model["type"] == "BPE":
        ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}
        kept.update(ids[piece] for word in words for piece in merge_steps(word, ranks) if piece in ids)
    return kept


def script_of(letter: str) -> str:
    """Return a letter's script, the first word of its Unicode name (`LATIN`, `CJK`); "" for other characters."""
    return unicodedata.name(letter, "").partition(" ")[0] if unicodedata.category(letter)[0] in "LM" else ""


def merge_steps(word: str, ranks: dict[Any, int]) -> list[str]:
    """List the intermediate tokens by which BPE merges a word to one token; empty if merges do not lead to it.

    The steps are the same inside a longer text: a merge across the ends of the token would have destroyed it.
    """
    parts, steps = list(word), list(word)
    while len(parts) > 1:
        rank, at = min((ranks.get(pair, inf), at) for at, pair in enumerate(pairwise(parts)))
        if rank == inf:
            return []
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        steps.append(parts[at])
    return steps


def renumber(tree: Any, change: Any, key: str = "") -> Any:
    """Copy a JSON tree with `change(id)` in place of each token id."""
    if isinstance(tree, dict):
        return {name: renumber(inner, change, str(name)) for name, inner in tree.items()}
    if isinstance(tree, list | tuple):
        return [renumber(inner, change, key) for inner in tree]
    return change(tree) if type(tree) is int and NAMES_ID.fullmatch(key) else tree


def read_id_records(folder: Path) -> dict[str, Any]:
    """Read the files in which a network's settings name tokens, by file name, with the defaults of its type."""
    defaults = load_model_config(folder).to_dict()
    named = {key: value for key, value in defaults.items() if NAMES_ID.fullmatch(key) and value is not None}
    records = {"config.json": read_json_as(folder / "config.json", dict[str, Any]) | named}
    if (path := folder / "generation_config.json").exists():
        records[path.name] = read_json_as(path, dict[str, Any])
    return records


def trim_id_records(part: Path, ids: dict[int, int]) -> None:
    """Write the configurations with new ids."""
    for name, record in renumber(read_id_records(part), ids.get).items():
        write_json(part / name, record | ({"vocab_size": len(ids)} if name == "config.json" else {}))


def trim_tokenizer(part: Path, ids: dict[int, int]) -> None:
    """Write a folder's tokenizer with new ids; remove files with the old ones."""
    path = part / "tokenizer.json"
    state: Any = json.loads(Tokenizer.from_file(str(path)).to_str())
    model = state["model"]
    if model["type"] == "Unigram":
        model["vocab"] = [entry for id, entry in enumerate(model["vocab"]) if id in ids]
        model["unk_id"] = ids.get(model["unk_id"])
    else:
        vocab = model["vocab"] = {piece: ids[id] for piece, id in model["vocab"].items() if id in ids}
        if "merges" in model:
            model["merges"] = [pair for pair in model["merges"] if {*pair, "".join(pair)} <= vocab.keys()]
    removed = {entry["content"] for entry in state["added_tokens"] if entry["id"] not in ids}
    state["added_tokens"] = [entry | {"id": ids[entry["id"]]} for entry in state["added_tokens"] if entry["id"] in ids]
    if (padding := state["padding"]) and padding["pad_id"] not in ids:
        state["padding"] = None  # its token has no row either
    state |= {key: renumber(state[key], ids.get) for key in ("post_processor", "padding")}
    Tokenizer.from_str(json.dumps(state)).save(str(path))
    for pattern in OTHER_SPELLINGS:
        for other in part.glob(pattern):
            other.unlink()
    if (settings_path := part / "tokenizer_config.json").exists():
        settings = without_tokens(read_json_as(settings_path, dict[str, Any]), removed)
        if decoder := settings.get("added_tokens_decoder"):
            settings["added_tokens_decoder"] = {
                str(ids[int(id)]): entry for id, entry in decoder.items() if int(id) in ids
            }
        write_json(settings_path, settings)


def without_tokens(tree: Any, removed: Set[str]) -> Any:
    """Copy a tokenizer's settings without the tokens that were removed, each named by a key or in a list, as text or as
    an entry with `content`. Transformers would add them again."""

    def is_kept(value: Any) -> bool:
        content = value.get("content") if isinstance(value, dict) else value
        return not (isinstance(content, str) and content in removed)

    if isinstance(tree, dict):
        return {key: without_tokens(value, removed) for key, value in tree.items() if is_kept(value)}
    return [without_tokens(value, removed) for value in tree if is_kept(value)] if isinstance(tree, list) else tree


def trim_weights(part: Path, ids: dict[int, int]) -> tuple[int, int]:
    """Write the weights with only the kept rows of each token table; return the number of parameters before and
    after."""
    config = load_model_config(part)
    rows_V = torch.tensor([*ids])
    others = fixed_names(config)
    weights: dict[str, Tensor] = {}
    for path in part.glob("*.safetensors"):
        with told_as(f"the weights {path.name} cannot be read"):
            weights |= load_file(path)
    before = sum(weight.numel() for weight in weights.values())
    for name, weight in weights.items():
        is_other = any(f".{name}".endswith(f".{other}") or other.endswith(f".{name}") for other in others)
        if [*weight.shape[:1]] == [config.vocab_size] and not is_other:
            weights[name] = weight[rows_V]
    save_torch_state_dict(weights, part)
    return before, sum(weight.numel() for weight in weights.values())


def fixed_names(config: Any) -> list[str]:
    """List the weights that have as many rows as tokens only by chance: another token adds no row to them."""
    larger = copy.deepcopy(config)
    larger.vocab_size += 1
    kind: Any = network_class(config)
    make = kind.from_config if kind is AutoModel else kind._from_config
    with told_as(f"transformers cannot make a network of type '{config.model_type}'"), torch.device("meta"):
        network: Any = make(larger)
    return [name for name, weight in network.state_dict().items() if [*weight.shape[:1]] == [config.vocab_size]]


def compare_texts(
    source: Path, part: Path, texts: Iterable[str], ids: dict[int, int]
) -> Iterator[tuple[list[int | None], list[int]]]:
    """Tokenize texts before and after trimming; yield both in new ids, with None for a dropped token.

    For a text with a dropped token, also compare each passage of a few words. Raises `FailedProofError` if the tokens
    of a text of kept and known tokens differ.
    """
    before, after = load_backends(source), load_backends(part)
    known = ids.keys() - {unknown_id(json.loads(backend.to_str())) for backend in before}
    for batch in in_batches(texts):
        for backends in dict.fromkeys([(before[0], after[0]), (before[-1], after[-1])]):
            read = read_both(*backends, batch, known, ids)
            others = [text for text, (old, _) in zip(batch, read, strict=True) if None in old]
            passages = [join_words(words) for text in others for words in cut_words(text, PASSAGE)]
            read_both(*backends, passages, known, ids)
        yield from read


def read_both(
    before: Tokenizer, after: Tokenizer, texts: list[str], known: Set[int], ids: dict[int, int]
) -> list[tuple[list[int | None], list[int]]]:
    pairs = []
    for text, *encodings in zip(texts, *(backend.encode_batch_fast(texts) for backend in (before, after)), strict=True):
        old, new = (encoding.ids for encoding in encodings)
        expected = [ids.get(id) for id in old]
        if expected != new and known >= {*old}:
            reason = f"its tokenizer would read '{clipped(text, 60)}' differently"
            raise FailedProofError(f"the vocabulary cannot be trimmed: {reason}; nothing is written")
        pairs.append((expected, new))
    return pairs


def load_plain(folder: Path) -> Any:
    """Load the network of a folder by the transformers class that its configuration names."""
    config = load_model_config(folder)
    return load_weights(network_class(config), folder, config, attention=None).eval()


@torch.no_grad()
def prove_network(before: Any, after: Any, ids: dict[int, int]) -> float:
    """Prove that both networks compute the same for a padded batch of kept tokens, with texts of unequal lengths.

    Returns the largest difference, in units of an output's mean size. Raises `FailedProofError` for more than rounding.
    """
    kept_V, generator = torch.tensor([*ids]), torch.Generator().manual_seed(0)
    lengths = [min(length, count_positions(after.config)) for length in SAMPLE_LENGTHS]
    samples = [torch.randint(len(kept_V), (length,), generator=generator) for length in lengths]
    new = pad_batch(samples, after.config.pad_token_id or 0)
    old = new | {"input_ids": kept_V[new["input_ids"]]}
    with foreign_errors_fail(UNPADDED.format(kind=type(after).__name__)):
        expected, computed = before(**old)[0], after(**new)[0]
    if expected.shape[-1] != computed.shape[-1]:  # logits of tokens
        expected = expected[..., kept_V]
    if expected.shape[:2] == new["input_ids"].shape:
        expected, computed = (rows[new["attention_mask"].bool()] for rows in (expected, computed))
    tables = [network.get_input_embeddings().weight for network in (before, after)]
    if not (torch.equal(tables[0][kept_V], tables[1]) and agree(computed, expected)):
        reason = f"with another vocabulary this {type(after).__name__} computes something else"
        raise FailedProofError(f"the vocabulary cannot be trimmed: {reason}; nothing is written")
    return float((computed - expected).abs().max() / expected.abs().mean())


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

    @unreplaced(source, stamps)
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
        card = part / CARD_NAME
        write_text(card, with_network(card.read_text(encoding="utf-8"), networks[1]))

    copy_model(source, folder, trim_copy)


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
