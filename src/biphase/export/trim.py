"""A model folder, and texts of the kind that it is for → a copy with those rows of its vocabulary that such texts need.

The tables of embeddings and of logits are sliced, the tokenizer and all ids by which configurations name tokens follow.
Texts of kept tokens are the same tokens as before, by construction: a subset of a WordPiece vocabulary has no longer
match, one of Unigram no likelier cut, and one of BPE has each merge that such a text went through. It is proved all the
same, by `tokenizers` on every text and by transformers on some of them. What is in no text is spelled by bytes or by
single characters.

Letters: S texts of a batch, L tokens of the longest of them, V tokens of the vocabulary.
"""

import copy
import functools
import json
import operator
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, pairwise
from math import inf
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, pre_tokenizers
from torch import Tensor
from transformers import AutoModel, AutoTokenizer
from transformers.utils import ModelOutput

from biphase.console import told_if_slow
from biphase.corpus.text import cut_words, join_words
from biphase.corpus.tokenizer import load_pretrained_tokenizer
from biphase.encoder.network import language_model_class, load_weights
from biphase.encoder.proofs import FailedProofError, agree
from biphase.errors import InputError, clipped, told_as
from biphase.export.onnx import Features, NamedOutputs, copy_model, load_named
from biphase.files import read_json_as, write_json
from biphase.hub import INDEX, load_model_config

NAMES_ID = re.compile(r"\w*token_ids?|\w*token_index|\w*suppress_tokens|bad_words_ids|pad_id|ids|sep|cls")
"""Keys of configurations, and of a tokenizer's padding and post-processor, behind which numbers are ids of tokens."""
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
OTHER_SPELLINGS = ("vocab.*", "merges.txt", "added_tokens.json", "*.model")
"""Files that hold the whole vocabulary once more; `tokenizer.json` has all that they say."""
GENERATION = "generation_config.json"
TEXTS_AT_ONCE, OPENING, PASSAGE = 32, 100, 8
"""Texts that are encoded together; the characters of a text that are read behind a prompt; the words of a passage."""
PROOF_TEXTS, PROOF_TOKENS, PROOF_LENGTHS = 16, 256, (9, 40, 5, 1, 23)
"""The proof's texts and their longest; and the lengths of a second batch of them."""
MOST_UNKNOWN = 0.5
"""Texts of which a larger share of tokens is unknown are no texts for the model."""


class PlainNetwork:
    """A model folder, computed by transformers or sentence-transformers and called as a network of transformers is."""

    device = torch.device("cpu")

    def __init__(self, folder: Path) -> None:
        self.named, self.outputs = load_named(folder)
        self.config = self.named.network.config
        classes = read_json_as(folder / "config.json", dict[str, Any]).get("architectures") or [""]
        if str(classes[0]).endswith(("ForMaskedLM", "ForCausalLM", "LMHeadModel")):
            config = load_model_config(folder)
            language_model = load_weights(language_model_class(config), folder, config, attention=None).eval()
            states, words = self.outputs, NamedOutputs(language_model, self.named.tokenizer)
            self.outputs = lambda features: states(features) | words.outputs(features)

    @torch.no_grad()
    def __call__(self, **features: Tensor) -> Any:
        return ModelOutput(self.outputs(features))


@dataclass(frozen=True)
class Trimmed:
    """What a smaller vocabulary saves, and how it was proved; pairs are before and after."""

    vocabulary: tuple[int, int]
    parameters: tuple[int, int]
    reading: "Reading"
    unseen: "Reading"
    gap: float
    """The largest difference of an output, in units of its mean size."""
    networks: tuple[PlainNetwork, PlainNetwork]
    batches: tuple[list[Features], list[Features]] = field(repr=False)
    """The texts of the proof, with the ids of each vocabulary."""


def trim_model(
    source: Path,
    folder: Path,
    read_texts: Callable[[], Iterable[str]],
    read_unseen: Callable[[], Iterable[str]],
    minimum_count: int,
    complete: Callable[[Path, Trimmed], None],
) -> None:
    """Write a copy of a model folder with the tokens that occur so often in texts, which are read twice; let `complete`
    add to it. Of unseen texts is said how many tokens they are.

    Raises:
        InputError: no fast tokenizer of a known kind, or texts that say nothing of what is needed.
        FailedProofError: the copy reads or computes a text of kept tokens otherwise: nothing is written.
    """
    backends, config = load_backends(source), load_model_config(source)
    prompts = read_prompts(source)
    with told_if_slow("counting tokens"):
        counts = count_tokens(backends, read_texts(), prompts)
    enough = {id for id, count in counts.items() if count >= minimum_count}
    if not enough:
        raise InputError(f"minimum_count {minimum_count}: no token of these texts is so frequent; give a lower one")
    enough.update(id for prompt in prompts for backend in backends for id in backend.encode(prompt).ids)
    kept = set[int]()
    for backend in backends:
        kept |= choose_tokens(json.loads(backend.to_str()), enough)
    for record in (config.to_dict(), read_generation(source)):
        renumber(record, kept.add)
    highest = max(max(backend.get_vocab().values()) for backend in backends)
    if highest >= config.vocab_size:
        reason = f"its tokenizer has ids up to {highest:,}, its network {config.vocab_size:,} rows for them"
        raise InputError(f"{source} cannot be trimmed: {reason}")
    ids = {old: new for new, old in enumerate(sorted(kept & {*range(config.vocab_size)}))}
    if len(ids) == config.vocab_size:
        remedy = "give a `minimum_count`, or less text"
        raise InputError(f"these texts need all {len(ids):,} tokens of {source}: nothing would be trimmed; {remedy}")

    def write(part: Path) -> None:
        trim_tokenizer(part, ids)
        parameters = trim_weights(source, part, ids, config)
        trim_settings(part, ids, config)
        with told_if_slow("comparing what the tokenizers and the networks make of the texts"):
            read = partial(compare_readings, backends, load_backends(part), prompts=prompts, ids=ids)
            reading, unseen = read(read_texts()), read(read_unseen())
            networks = PlainNetwork(source), PlainNetwork(part)
            gap, batches = prove_network(*networks, reading.samples, ids)
        vocabulary = config.vocab_size, len(ids)
        complete(part, Trimmed(vocabulary, parameters, reading, unseen, gap, networks, batches))

    copy_model(source, folder, write)


def load_backends(folder: Path) -> list[Tokenizer]:
    """Load the tokenizer of a folder as it stands and as `AutoTokenizer` has it, which makes some anew for their type:
    the same one twice where both are alike. Neither cuts nor pads."""
    if not (folder / "tokenizer.json").exists():
        remedy = "AutoTokenizer.from_pretrained(…).save_pretrained(…) writes one for many"
        raise InputError(f"{folder} has no fast tokenizer (tokenizer.json), and only these are trimmed; {remedy}")
    backends: list[Tokenizer] = []
    with told_as(f"tokenizer {folder} cannot be used"):
        chosen = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        for tokenizer in (load_pretrained_tokenizer(folder), chosen):
            backend = copy.deepcopy(tokenizer.backend_tokenizer)
            backend.no_padding()
            backend.no_truncation()
            is_same = bool(backends) and backends[0].to_str() == backend.to_str()
            backends.append(backends[0] if is_same else backend)
    for backend in backends:
        kind = type(backend.model).__name__
        if kind not in ("BPE", "WordPiece", "Unigram"):
            raise InputError(f"{folder} has a {kind} tokenizer; only BPE, WordPiece and Unigram are trimmed")
        if kind == "BPE" and (backend.model.continuing_subword_prefix or backend.model.end_of_word_suffix):
            raise InputError(f"{folder} has a BPE that marks where words begin or end by affixes, which is not trimmed")
    return backends


def read_prompts(folder: Path) -> list[str]:
    """List what a model's inputs say beside the texts: an embedding model's prompts, a kept model's template."""
    found: list[str] = []
    for name, keys in (("config_sentence_transformers.json", ["prompts"]), ("biphase.json", ["task", "config"])):
        record = read_json_as(folder / name, dict[str, Any]) if (folder / name).exists() else {}
        fields = [item for key in keys for item in (record.get(key) or {}).items()]
        found += [str(text) for key, text in fields if text and (keys == ["prompts"] or key.endswith("template"))]
    prompts = [re.sub(r"\{\w+\}", "", prompt) for prompt in found]
    return [prompt for prompt in prompts if prompt.strip()]


def in_batches(texts: Iterable[str], prompts: Sequence[str]) -> Iterator[tuple[list[str], int]]:
    """Yield some texts at a time, and their number; behind them stands, with each prompt before it, the beginning of
    each."""
    stream = iter(texts)
    while batch := list(islice(stream, TEXTS_AT_ONCE)):
        yield batch + [prompt + text[:OPENING] for prompt in prompts for text in batch], len(batch)


def count_tokens(backends: Sequence[Tokenizer], texts: Iterable[str], prompts: Sequence[str]) -> Counter[Any]:
    """Count how often texts have each token. Raises `InputError` for texts without any, or mostly of unknown ones."""
    found = {backend: Counter[Any]() for backend in backends}
    for batch, _ in in_batches(texts, prompts):
        for backend, counts in found.items():
            for encoding in backend.encode_batch_fast(batch, add_special_tokens=False):
                counts.update(encoding.ids)
    for backend, counts in found.items():
        if not counts:
            raise InputError("text: there is none in these sources: give texts of the kind that the model is for")
        share = counts[unknown_id(json.loads(backend.to_str()))] / counts.total()
        if share > MOST_UNKNOWN:
            reason = f"{share:.0%} of its tokens are unknown to the tokenizer"
            raise InputError(f"text: {reason}: it is in a script that this model does not read")
    return functools.reduce(operator.or_, found.values())


def unknown_id(state: Any) -> int | None:
    model = state["model"]
    unknown: int | None = model["unk_id"] if model["type"] == "Unigram" else model["vocab"].get(model["unk_token"])
    return unknown


def choose_tokens(state: Any, enough: set[int]) -> set[int]:
    """Find the ids that a tokenizer must keep: those that occur often `enough`, what BPE makes them of, added tokens,
    those that it names, and what spells other text: bytes, or the single characters of the scripts that occur, and all
    that are no letters."""
    model, kept = state["model"], {*enough}
    is_unigram = model["type"] == "Unigram"
    pieces = [entry[0] for entry in model["vocab"]] if is_unigram else model["vocab"]
    ids = {piece: id for id, piece in enumerate(pieces)} if is_unigram else model["vocab"]
    kept.update(entry["id"] for entry in state["added_tokens"])
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
    if is_unigram:  # what is unknown is less likely than the least likely token: it must stay so
        kept.add(min(range(len(pieces)), key=lambda id: model["vocab"][id][1]))
    elif model["type"] == "BPE":
        ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}
        kept.update(ids[piece] for word in words for piece in merge_steps(word, ranks) if piece in ids)
    return kept


def script_of(letter: str) -> str:
    """Name the script of a letter as Unicode's name of it begins: `LATIN`, `CJK`; "" for what is no letter."""
    return unicodedata.name(letter, "").partition(" ")[0] if unicodedata.category(letter)[0] in "LM" else ""


def merge_steps(word: str, ranks: dict[Any, int]) -> list[str]:
    """List the tokens that BPE goes through up to a token; nothing where merges do not lead to it.

    Within a longer text they are the same: a merge across the ends of a token would not have left the token.
    """
    parts, steps = list(word), list(word)
    while len(parts) > 1:
        rank, at = min((ranks.get(pair, inf), at) for at, pair in enumerate(pairwise(parts)))
        if rank == inf:
            return []
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        steps.append(parts[at])
    return steps


def renumber(record: Any, number: Callable[[int], Any], key: str = "") -> Any:
    """Copy a tree of JSON with another number for each id of a token in it."""
    if isinstance(record, dict):
        return {name: renumber(inner, number, str(name)) for name, inner in record.items()}
    if isinstance(record, list | tuple):
        return [renumber(inner, number, key) for inner in record]
    return number(record) if type(record) is int and NAMES_ID.fullmatch(key) else record


def trim_tokenizer(part: Path, ids: dict[int, int]) -> None:
    """Write the tokenizer of a folder anew, with new ids, and take away files with the old ones."""
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
    for entry in state["added_tokens"]:
        entry["id"] = ids[entry["id"]]
    state |= {key: renumber(state[key], ids.get) for key in ("post_processor", "padding")}
    Tokenizer.from_str(json.dumps(state)).save(str(path))
    for pattern in OTHER_SPELLINGS:
        for other in part.glob(pattern):
            other.unlink()
    if (settings_path := part / "tokenizer_config.json").exists():
        settings = read_json_as(settings_path, dict[str, Any])
        if decoder := settings.get("added_tokens_decoder"):
            settings["added_tokens_decoder"] = {str(ids[int(id)]): entry for id, entry in decoder.items()}
            write_json(settings_path, settings)


def trim_weights(source: Path, part: Path, ids: dict[int, int], config: Any) -> tuple[int, int]:
    """Write the weights anew, of each table with a row for each token the rows that are kept; returns the parameters
    before and after."""
    others, before, after, size = fixed_names(config), 0, 0, 0
    rows = torch.tensor([*ids])
    for path in sorted(part.glob("*.safetensors")):
        with told_as(f"{source / path.name} cannot be read"), safe_open(source / path.name, "pt") as file:
            metadata, weights = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        before += sum(weight.numel() for weight in weights.values())
        for name, weight in weights.items():
            is_other = any(f".{name}".endswith(f".{other}") or other.endswith(f".{name}") for other in others)
            if [*weight.shape[:1]] == [config.vocab_size] and not is_other:
                weights[name] = weight[rows]
        after += sum(weight.numel() for weight in weights.values())
        size += sum(weight.nbytes for weight in weights.values())
        save_file(weights, path, metadata)
    if (part / INDEX).exists():
        index = read_json_as(part / INDEX, dict[str, Any])
        write_json(part / INDEX, index | {"metadata": {**index.get("metadata", {}), "total_size": size}})
    return before, after


def fixed_names(config: Any) -> list[str]:
    """List the weights that have as many rows as there are tokens by chance: with one token more they have no more."""
    larger = copy.deepcopy(config)
    larger.vocab_size += 1
    with torch.device("meta"):
        network: Any = (language_model_class(config) or AutoModel).from_config(larger)
    return [name for name, weight in network.state_dict().items() if [*weight.shape[:1]] == [config.vocab_size]]


def trim_settings(part: Path, ids: dict[int, int], config: Any) -> None:
    """Write the ids in the configurations anew, those also that a type of network has unless its file says another."""
    named = {key: value for key, value in config.to_dict().items() if NAMES_ID.fullmatch(key) and value is not None}
    record = read_json_as(part / "config.json", dict[str, Any])
    write_json(part / "config.json", renumber(record | named, ids.get) | {"vocab_size": len(ids)})
    if generation := read_generation(part):
        write_json(part / GENERATION, renumber(generation, ids.get))


def read_generation(folder: Path) -> dict[str, Any]:
    path = folder / GENERATION
    return read_json_as(path, dict[str, Any]) if path.exists() else {}


@dataclass
class Reading:
    """What two tokenizers make of texts."""

    num_texts: int = 0
    num_same: int = 0
    num_tokens: list[int] = field(default_factory=lambda: [0, 0])
    samples: list[Tensor] = field(default_factory=list)
    """The first kept tokens of some texts, with the ids from before."""

    @property
    def mean_tokens(self) -> tuple[float, float]:
        return self.num_tokens[0] / self.num_texts, self.num_tokens[1] / self.num_texts


def compare_readings(
    before: Sequence[Tokenizer],
    after: Sequence[Tokenizer],
    texts: Iterable[str],
    prompts: Sequence[str],
    ids: dict[int, int],
) -> Reading:
    """Read texts by the tokenizers from before and by those of today, and of a text with a token that is not kept each
    passage of a few words too. Raises `FailedProofError` where one of kept tokens is not the same tokens; one with what
    is unknown may become known."""
    reading = Reading()
    known = ids.keys() - {unknown_id(json.loads(backend.to_str())) for backend in before}
    for batch, num_texts in in_batches(texts, prompts):
        for backends in dict.fromkeys(zip(before, after, strict=True)):
            first, second, are_same = read_both(backends, batch, known, ids)
            others = [text for text, old in zip(batch, first, strict=True) if not known >= {*old}]
            read_both(
                backends, [join_words(words) for text in others for words in cut_words(text, PASSAGE)], known, ids
            )
        # The tokens of texts are counted without their prompts, by the tokenizer that `AutoTokenizer` gives.
        reading.num_texts += num_texts
        reading.num_same += sum(are_same[:num_texts])
        for index, rows in enumerate((first, second)):
            reading.num_tokens[index] += sum(map(len, rows[:num_texts]))
        rows = [[id for id in old if id in ids][:PROOF_TOKENS] for old in first]
        reading.samples += [torch.tensor(row) for row in rows if len(row) > 1][: PROOF_TEXTS - len(reading.samples)]
    return reading


def read_both(
    backends: tuple[Tokenizer, Tokenizer], texts: list[str], known: Set[int], ids: dict[int, int]
) -> tuple[list[list[int]], list[list[int]], list[bool]]:
    """Return the tokens of texts by two tokenizers, and whether they are the same. Raises `FailedProofError` where they
    are not, and all of them are known."""
    first, second = ([encoding.ids for encoding in backend.encode_batch_fast(texts)] for backend in backends)
    are_same = [[ids.get(id) for id in old] == new for old, new in zip(first, second, strict=True)]
    for text, old, is_same in zip(texts, first, are_same, strict=True):
        if not is_same and known >= {*old}:
            reason = f"its tokenizer would read '{clipped(text, 60)}' otherwise than before"
            raise FailedProofError(f"the vocabulary cannot be trimmed: {reason}; nothing is written")
    return first, second, are_same


def prove_network(
    before: PlainNetwork, after: PlainNetwork, samples: list[Tensor], ids: dict[int, int]
) -> tuple[float, tuple[list[Features], list[Features]]]:
    """Return the largest difference of what is computed with the two vocabularies, in units of an output's mean size,
    for padded texts of unequal lengths; and these batches. Raises `FailedProofError` for more than rounding."""
    kept_V, new_V, gap = torch.tensor([*ids]), torch.zeros(before.config.vocab_size, dtype=torch.long), 0.0
    new_V[kept_V] = torch.arange(len(ids))
    tables = (network.named.network.get_input_embeddings().weight for network in (before, after))
    is_equal = torch.equal(next(tables)[kept_V], next(tables))
    lengths = ((), PROOF_LENGTHS)
    batches = [before.named.batch([row[: before.named.longest] for row in samples], part) for part in lengths]
    new_batches = [features | {"input_ids": new_V[features["input_ids"]]} for features in batches]
    for features, new_features in zip(batches, new_batches, strict=True):
        computed, expected = after(**new_features), before(**features)
        for name, rows in expected.items():
            if rows.shape[-1] == before.config.vocab_size and name == "logits":
                rows = rows[..., kept_V]
            is_of_tokens = rows.shape[:2] == features["input_ids"].shape
            part_of = features["attention_mask"].bool() if is_of_tokens else ...
            is_equal = is_equal and agree(computed[name][part_of], rows[part_of])
            if not is_equal:
                raise FailedProofError(
                    f"with another vocabulary this {type(before.named.network).__name__} computes another {name}: "
                    "nothing is written"
                )
            gap = max(gap, float((computed[name] - rows)[part_of].abs().max() / rows[part_of].abs().mean()))
    return gap, (batches, new_batches)
