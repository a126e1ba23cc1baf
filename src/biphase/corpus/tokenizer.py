"""Text ↔ token ids: train a tokenizer, or load one from the Hub, a folder or a file and complete it for biphase.

The result is a transformers tokenizer that saves and loads anywhere, with a mask, an end-of-text and a padding token.
`corpus.prepare` adds no special tokens but end-of-text, which it appends to each document.
"""

import base64
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from biphase import console
from biphase.errors import InputError, told_as
from biphase.files import Stamp, content_hash, own_folder, parse_json, stamp_of, validate_record
from biphase.hub import NAMED, TOKENIZER_CLASS, fetch_model

if TYPE_CHECKING:  # they are slow to import, and tokenizing workers do not need them
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

MASK, EOS, PAD = "<|mask|>", "<|end_of_text|>", "<|pad|>"
TRAINED_SPECIALS = [EOS, MASK, PAD]
MIN_VOCAB_SIZE = 256 + len(TRAINED_SPECIALS)
MAX_VOCAB_SIZE = 10_000_000
"""The largest vocabulary, far above any real tokenizer's: training reserves memory for it before it begins."""

TRAINED_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{M}\p{N}]?[\p{L}\p{M}]+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Llama 3's pattern, with marks as parts of words: otherwise the vowel signs of Devanagari, Tamil, Thai or pointed
Arabic would split every word. The rest suits English and code: contractions in any case, numbers in groups of at most
three digits, indentation separate from the next word, punctuation together with its line end."""

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_RANKS, LLAMA3_VOCAB_SIZE = 128_000, 128_256
LLAMA3_NAMED_SLOTS = {
    0: "<|begin_of_text|>",
    1: EOS,
    2: MASK,
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "<|eot_id|>",
}

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
KNOWN_NAMES = {
    "eos_token": (EOS, "<|endoftext|>", "</s>", "<eos>", "[SEP]"),
    "mask_token": (MASK, "<mask>", "[MASK]"),
    "pad_token": (PAD, "<pad>", "[PAD]", "<|finetune_right_pad_id|>"),
}
NEW_NAMES = {"eos_token": EOS, "mask_token": MASK, "pad_token": PAD}
RESERVED_SLOT = re.compile(r"<\|?(?:reserved[\w ]*|unused|extra_|dummy_|SPECIAL_)_?\d+\|?>|\[unused\d+\]")
TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.*")
"""The files of tokenizers. A model folder needs one: without any, transformers invents an empty tokenizer."""
SPLIT_TEXTS = [
    "Ozma's 1234567 ROOMS, that THEY'LL see",
    "  two  spaces\n\n\tand a tab ",
    "naïve nai\u0308ve ﬁne Ⅷ",
    "x==y;//{}",
    "हिन्दी ภาษาไทย",
    "東京は12月",
    "عَرَبِيّ",
    "🙂👩‍🚀",
    "",
]
"""Texts that tokenizers split differently: contractions, numbers, blanks, marks, forms to normalize, scripts."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerFast":
    """Train byte-level BPE of at most `vocab_size` tokens: end-of-text, mask and pad (ids 0 to 2), 256 bytes, merges.

    The same texts give the same tokenizer. Any text survives encoding and decoding unchanged: nothing is normalized.
    Raises `InputError` for a `vocab_size` too small for the bytes and special tokens, or absurdly large, and for too
    little text.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    if not MIN_VOCAB_SIZE <= vocab_size <= MAX_VOCAB_SIZE:
        raise InputError(f"`vocab_size` is {vocab_size}: give {MIN_VOCAB_SIZE} (bytes, specials) to {MAX_VOCAB_SIZE:,}")
    backend = byte_level(Tokenizer(models.BPE()), TRAINED_SPLIT)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=TRAINED_SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    reached = backend.get_vocab_size()
    if reached == MIN_VOCAB_SIZE < vocab_size:
        raise InputError("there is too little text to train a tokenizer on: no pair of bytes was seen twice")
    if reached < vocab_size:
        console.err.print(f"tokenizer: {reached:,} tokens of the {vocab_size:,} asked for; more text gives more")
    return wrap_backend(backend, NEW_NAMES)


def byte_level(backend: "Tokenizer", split: str) -> "Tokenizer":
    from tokenizers import Regex, decoders, pre_tokenizers

    to_words = pre_tokenizers.Split(Regex(split), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([to_words, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def wrap_backend(backend: "Tokenizer", roles: dict[str, str]) -> "PreTrainedTokenizerFast":
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **roles)


def load_tokenizer(source: str | Path) -> "PreTrainedTokenizerFast":
    """Load a tokenizer from a Hub id, a folder, a `tokenizer.json`, or a Llama 3 `tokenizer.model` (tiktoken ranks).

    If the end-of-text, mask or pad token is missing, a token with a well-known name takes the role, else an unused
    reserved slot under a new name, else a new token; a line says so. The Llama 3 file has the layout of the paper:
    128,256 tokens, end-of-text = pad = 128001, mask in slot 128002.

    Never runs the repository's own code, and opens no pickle. Raises `InputError` when loading fails.
    """
    path = Path(source).expanduser()
    if path.is_file() and path.name == "tokenizer.json" and (path.parent / "tokenizer_config.json").exists():
        source = path = path.parent
    if is_tiktoken_file(path):
        return load_llama3(path)
    if path.is_file():
        from tokenizers import Tokenizer

        with told_as(f"{path} is neither a tokenizer.json nor a Llama 3 tokenizer.model (base64 and a rank a line)"):
            check_tokenizer_file(path, stamp_of(path))
            backend = Tokenizer.from_file(str(path))
            refuse_ids(backend, path)
            return with_all_roles(wrap_backend(backend, {}), str(path))
    tokenizer = find_tokenizer(fetch_model(os.path.expanduser(source), kind="tokenizer"), str(source))  # `./x` as it is
    if tokenizer is None:
        raise InputError(f"tokenizer {source} has no tokenizer files (tokenizer.json or the like)")
    return tokenizer


def find_tokenizer(folder: Path, name: str) -> "PreTrainedTokenizerFast | None":
    """Load the tokenizer in a folder, completed as in `load_tokenizer`; None if there is none. `name` is for
    messages."""
    if not any(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)):
        return None
    if not (folder / "tokenizer.json").exists() and is_tiktoken_file(folder / "tokenizer.model"):
        return load_llama3(folder / "tokenizer.model")
    with told_as(f"tokenizer {name} cannot be used"):
        return with_all_roles(load_pretrained_tokenizer(folder), name)


def load_pretrained_tokenizer(folder: Path) -> "PreTrainedTokenizerFast":
    """Load `tokenizer.json` unchanged; without one, load transformers' conversion of the other files."""
    from transformers import PreTrainedTokenizerFast

    if (folder / "tokenizer.json").exists():
        check_tokenizer_files(folder)
        with told_as(f"tokenizer {folder} cannot be loaded"):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=False)
    else:
        tokenizer = load_auto_tokenizer(folder)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise InputError(f"tokenizer {folder} is a {type(tokenizer).__name__}, without a fast version (tokenizer.json)")
    refuse_ids(tokenizer.backend_tokenizer, folder)
    return tokenizer


def load_auto_tokenizer(folder: Path) -> Any:
    """Load the tokenizer that `AutoTokenizer` chooses. Raises `InputError` for one that is code of the folder, or that
    `check_tokenizer_files` refuses."""
    from transformers import AutoTokenizer  # imports torch, so import it late

    check_tokenizer_files(folder)
    with told_as(f"tokenizer {folder} cannot be loaded"):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


@dataclass(frozen=True)
class TextChange:
    """A normalizer or decoder of a tokenizer.json, or a sequence of them."""

    type: str = ""
    normalizers: list["TextChange"] = field(default_factory=list)
    decoders: list["TextChange"] = field(default_factory=list)
    prepend: str = ""
    pattern: dict[str, str] = field(default_factory=dict)
    content: str = ""
    precompiled_charsmap: str | None = None

    def growth(self) -> float:
        """Return how many times as long it makes a text at most."""
        growth: float = GROWTH.get(self.type, 1) * (1 + len(self.prepend))
        if self.type == "Replace":  # an empty match of a regular expression adds the content to each character
            growth = max(1.0, len(self.content) / max(1, len(self.pattern.get("String", ""))))
            growth += "String" not in self.pattern
        if self.precompiled_charsmap:  # replacements, each closed by a zero, after a table and its size
            blob = base64.b64decode(self.precompiled_charsmap)
            texts = blob[4 + int.from_bytes(blob[:4], "little") :].split(b"\0")
            growth = max(1, *(len(text.decode(errors="replace")) for text in texts))
        return growth * prod(change.growth() for change in (*self.normalizers, *self.decoders))


GROWTH = {"BertNormalizer": 3, "ByteLevel": 4, "NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18}
"""How many characters each of these normalizers makes of one at most."""
MOST_GROWTH = 1_000
"""The most times as long as it is that a tokenizer may make a text: a short chain of replacements can fill all
memory."""


@dataclass(frozen=True)
class TokenizerFile:
    """The parts of a tokenizer.json that change texts, or the keys of a tokenizer_config.json that choose a class or a
    length."""

    normalizer: TextChange | None = None
    decoder: TextChange | None = None
    tokenizer_class: Annotated[str, Field(pattern=TOKENIZER_CLASS)] | None = None
    processor_class: Annotated[str, Field(pattern=r"^\w+Processor$")] | None = None
    model_max_length: float | None = None


def check_tokenizer_files(folder: Path) -> None:
    """Raise `InputError` for damaged settings of a folder's tokenizer, for a class that is no tokenizer, and for texts
    that would grow without a bound."""
    with told_as(f"tokenizer {folder} cannot be loaded"):
        stamps = {path: stamp_of(path) for path in folder.glob("tokenizer*.json")}
        for path, stamp in stamps.items():
            with told_as(f"{path} cannot be read", NAMED):
                check_tokenizer_file(path, stamp)


@lru_cache
def check_tokenizer_file(path: Path, stamp: Stamp) -> None:
    """Raise `InputError` for a file with a wrong key, or by which a text may become more than `MOST_GROWTH` times as
    long, and the errors of a JSON reader for one that is damaged."""
    file = validate_record(path, parse_json(path.read_text(encoding="utf-8")), TokenizerFile, NAMED)
    for change in (file.normalizer, file.decoder):
        if change and (growth := change.growth()) > MOST_GROWTH:
            raise InputError(f"{path} may make a text {growth:.1g} times as long; give one without such replacements")


def refuse_ids(backend: "Tokenizer", path: Path) -> None:
    """Raise `InputError` for ids on which `tokenizers` fails later: none, a duplicate, or one so high that the ids
    below it fill all memory."""
    ids = backend.get_vocab(with_added_tokens=False).values()
    if not ids or len({*ids}) < len(ids) or max(ids) >= MAX_VOCAB_SIZE:
        raise InputError(f"tokenizer {path} is damaged: each token needs an id of its own below {MAX_VOCAB_SIZE:,}")


def with_all_roles(tokenizer: "PreTrainedTokenizerFast", name: str) -> "PreTrainedTokenizerFast":
    """Add missing end-of-text, mask and pad tokens to a tokenizer; its ids for text stay the same."""
    from tokenizers import AddedToken, Tokenizer

    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    roles = {role: str(getattr(tokenizer, role)) for role in ROLES if getattr(tokenizer, role, None)}
    done = []
    for role in [role for role in NEW_NAMES if role not in roles]:
        ids, short = backend.get_vocab(), role.removesuffix("_token")
        token = next((token for token in KNOWN_NAMES[role] if token in ids), None)
        if token is not None:
            roles[role] = token
            done.append(f"{short} is its token {token} ({ids[token]})")
            continue
        new = roles[role] = NEW_NAMES[role]
        # The unused reserved token of the lowest id, such as <|reserved_special_token_0|>, gets the new name.
        slots = [token for token in ids if RESERVED_SLOT.fullmatch(token) and token not in roles.values()]
        slot = min(slots, key=ids.__getitem__, default=None)
        if slot is not None:
            state = backend.to_str().replace(json.dumps(slot, ensure_ascii=False), json.dumps(new))
            backend = Tokenizer.from_str(state)
        backend.add_special_tokens([AddedToken(new, normalized=False, special=True)])
        id = backend.token_to_id(new)
        if slot is None:
            assert id is not None
            if id in ids.values():
                why = f"its ids have gaps, and the new token {new} would get an id in use ({id})"
                raise InputError(f"tokenizer {name} has no {short} token: {why}; give one with such a token")
            done.append(f"{short} is the new token {new} ({id}), the vocabulary grows to {id + 1}")
        else:
            assert id == ids[slot]
            done.append(f"{short} takes the reserved slot {slot} ({id}) as {new}")
    if not done:
        return tokenizer
    console.err.print(f"tokenizer {name}: {'; '.join(done)}")
    completed = wrap_backend(backend, roles)
    completed.chat_template = tokenizer.chat_template
    return completed


def is_tiktoken_file(path: Path) -> bool:
    """Return whether the first line of a file is a token in base64 and its rank."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return re.fullmatch(rb"[A-Za-z0-9+/]+=* \d+\r?\n?", file.readline(1000)) is not None


def load_llama3(path: Path) -> "PreTrainedTokenizerFast":
    """Make a BPE tokenizer from ranks, with the same ids as Llama 3's own.

    tiktoken has no list of merges: it joins the neighbours whose union has the lowest rank. Here every way to split a
    token into two tokens is a merge, in the order of the union's rank; a word that is a token stays whole.
    """
    from tokenizers import AddedToken, Tokenizer, models
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    ranks: dict[bytes, int] = {}
    with suppress(ValueError):  # a damaged line leaves too few ranks
        for line in path.read_bytes().splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    if list(ranks.values()) != list(range(LLAMA3_RANKS)):
        raise InputError(f"{path} is damaged or not Llama 3's: it needs {LLAMA3_RANKS:,} base64 tokens ranked in order")
    letters = bytes_to_unicode()
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges: list[tuple[str, str]] = []
    for token in ranks:  # in the order of rank
        cuts = [(token[:at], token[at:]) for at in range(1, len(token)) if token[:at] in ranks and token[at:] in ranks]
        cuts.sort(key=lambda cut: (ranks[cut[0]], ranks[cut[1]]))
        merges += [(spelled[left], spelled[right]) for left, right in cuts]
    vocab = {spelled[token]: rank for token, rank in ranks.items()}
    backend = byte_level(Tokenizer(models.BPE(vocab, merges, ignore_merges=True)), LLAMA3_SPLIT)
    # Tokens 128000..128255. Slot 128002 is <|reserved_special_token_0|> in the original; the mask takes it.
    reserved = iter(range(1, 256))
    names = [LLAMA3_NAMED_SLOTS.get(slot) or f"<|reserved_special_token_{next(reserved)}|>" for slot in range(256)]
    backend.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    assert backend.get_vocab_size() == LLAMA3_VOCAB_SIZE
    roles = {"bos_token": "<|begin_of_text|>", "eos_token": EOS, "pad_token": EOS, "mask_token": MASK}
    return wrap_backend(backend, roles)


def save_tokenizer(tokenizer: "PreTrainedTokenizerFast", folder: Path) -> None:
    """Write a folder that `load_tokenizer` and `AutoTokenizer` load. It appears whole or not at all.

    Raises `InputError` rather than replace anything but an unchanged tokenizer that biphase wrote.
    """
    file = folder / "tokenizer.json"
    before = file.read_bytes() if file.is_file() else b""
    with own_folder(folder, "tokenizer") as part:
        tokenizer.save_pretrained(part)
    if before and file.read_bytes() != before:
        console.err.print(f"{folder}: replaced an earlier tokenizer")


def misreading_class(tokenizer: "PreTrainedTokenizerFast", config: Any) -> str:
    """Name the class that `AutoTokenizer` loads beside a network of this configuration, if its ids for texts differ
    from the tokenizer's; else return "".

    For some types (Qwen 2's) transformers ignores a folder's tokenizer, and splits texts as their first models did.
    """
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        chosen = load_auto_tokenizer(Path(folder))
    return "" if chosen(SPLIT_TEXTS)["input_ids"] == tokenizer(SPLIT_TEXTS)["input_ids"] else type(chosen).__name__


def tell_misreading(folder: Path, tokenizer: "PreTrainedTokenizerFast") -> str:
    """Write how `AutoTokenizer` reads texts if not as a folder's `tokenizer.json`, which is `tokenizer`: as a class
    with a splitter of its own, which the folder names, or not at all; "" if it gives the same ids."""
    try:
        with told_as("AutoTokenizer cannot read texts with its tokenizer files"):
            chosen = load_auto_tokenizer(folder)
            is_same = chosen(SPLIT_TEXTS)["input_ids"] == tokenizer(SPLIT_TEXTS)["input_ids"]
    except InputError as error:
        return str(error)
    taken = f"AutoTokenizer takes {type(chosen).__name__}"
    return "" if is_same else f"{taken}, which splits texts differently than its tokenizer.json"


def tokenizer_hash(tokenizer: "PreTrainedTokenizerFast") -> str:
    """Hash everything that decides a text's ids: splitting, vocabulary, merges, added tokens, end-of-text and mask."""
    from tokenizers import Tokenizer

    backend = tokenizer.backend_tokenizer
    bare = Tokenizer(backend.model)
    bare.normalizer, bare.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
    digest = hashlib.sha256(bare.to_str().encode()).hexdigest()
    added = [[id, repr(token)] for id, token in sorted(backend.get_added_tokens_decoder().items())]
    return content_hash([digest, added, tokenizer.eos_token_id, tokenizer.mask_token_id])


def special_ids(tokenizer: "PreTrainedTokenizerFast") -> list[int]:
    """List the ids of all special tokens, ascending, unused reserved ones included. No objective masks them."""
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return sorted({id for id, token in added.items() if token.special} | set(tokenizer.all_special_ids))


def token_byte_lengths(tokenizer: "PreTrainedTokenizerFast") -> np.ndarray:
    """Count the UTF-8 bytes of each id's text, uint16 [V]; 0 for special tokens and for ids without a token.

    Exact for byte-level BPE: the counts of a text's ids sum to `len(text.encode())`. SentencePiece with byte fallback
    may add a space before the text; for tokenizers that normalize (BERT's), the counts are estimates.
    """
    backend = tokenizer.backend_tokenizer
    is_byte_level = "ByteLevel(" in f"{backend.decoder} {backend.pre_tokenizer}"
    ids = tokenizer.get_vocab()
    added = backend.get_added_tokens_decoder()
    lengths_V = np.zeros(max(ids.values()) + 1, dtype=np.uint16)
    for name, id in ids.items():
        if id in added:
            lengths_V[id] = len(name.encode())
        elif is_byte_level:
            lengths_V[id] = len(name)
        elif re.fullmatch(r"<0x[0-9A-F]{2}>", name):
            lengths_V[id] = 1
        else:
            lengths_V[id] = len(name.removeprefix("##").replace("▁", " ").encode())
    lengths_V[special_ids(tokenizer)] = 0
    return lengths_V
