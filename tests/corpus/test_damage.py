"""What is read for results is what was written: each kind of damage to a shard set is one line that names the file."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from biphase.cli.app import main
from biphase.corpus.packing import Batches, PackedSet, cut_documents
from biphase.corpus.shards import ShardSet, read_shard_manifest
from biphase.errors import InputError
from biphase.pretraining.loop import train


@pytest.fixture
def shards(corpus: Any, tmp_path: Path) -> Path:
    shutil.copytree(corpus.shards, tmp_path / "set")
    return tmp_path / "set"


def read_everything(folder: Path) -> np.ndarray:
    """All that a run reads of a set."""
    shards = ShardSet(folder)
    assert shards.tokenizer
    shards.token_bytes()
    samples = cut_documents(shards.document_ends, 12, 64)
    batches = Batches([PackedSet(shards, samples, seed=1)], lambda step: 512 * step)
    return np.concatenate([batches.batch(step).tokens_T for step in range(samples.num_tokens // 512 + 1)])


def one(shards: Path, pattern: str) -> Path:
    return next(iter(sorted(shards.glob(pattern))))


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def zero(path: Path, start: int, num: int) -> None:
    data = bytearray(path.read_bytes())
    data[start : start + num] = bytes(num)
    path.write_bytes(data)


def change_manifest(shards: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = shards / "manifest.json"
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))


def absurd_end(tree: dict[str, Any]) -> None:
    tree["eos_id"] = 5


def other_bytes(tree: dict[str, Any]) -> None:
    for part in (tree["splits"], next(shard["parts"] for shard in tree["shards"] if shard["parts"]["train"]["tokens"])):
        part["train"]["text_bytes"] += 1


def other_words(shards: Path) -> None:
    """As many tokens in each document, with the right hashes: nothing but the manifest knows that they are others."""
    folder = one(shards, "shards/train*/train.tokens").parent
    tokens_T = np.fromfile(folder / "train.tokens", dtype="<u2")
    tokens_T[:5] = tokens_T[4::-1]
    tokens_T.tofile(folder / "train.tokens")
    ends_D = np.fromfile(folder / "train.ends", dtype="<i8")
    documents = np.split(tokens_T, ends_D[:-1])
    np.array([xxhash.xxh3_64_intdigest(tokens.data) for tokens in documents], "<u8").tofile(folder / "train.hashes")


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a bit of a token": (
        lambda s: flip(one(s, "shards/train*/train.tokens"), 1001),
        r"train\.tokens is damaged.*delete",
    ),
    "zeros for tokens": (lambda s: zero(one(s, "shards/train*/train.tokens"), 2048, 512), r"train\.tokens is damaged"),
    "a bit of an end": (lambda s: flip(one(s, "shards/train*/train.ends"), 8), r"train\.ends is damaged.*delete"),
    "zeros for ends": (lambda s: zero(one(s, "shards/train*/train.ends"), 16, 8), r"train\.ends is damaged"),
    "a bit of a hash": (lambda s: flip(one(s, "shards/train*/train.hashes"), 9, 7), r"train\.hashes is damaged"),
    "the words of another set": (other_words, r"train\.hashes is damaged.*delete"),
    "hashes cut short": (
        lambda s: one(s, "shards/train*/train.hashes").write_bytes(b"1"),
        r"train\.hashes has 1 bytes",
    ),
    "another end-of-text id": (lambda s: change_manifest(s, absurd_end), r"manifest\.json is damaged.*delete"),
    "other byte counts": (lambda s: change_manifest(s, other_bytes), r"manifest\.json is damaged.*delete"),
    "a bit of token_bytes": (lambda s: flip(s / "token_bytes.npy", 300), r"token_bytes\.npy is damaged.*delete"),
    "token_bytes is text": (lambda s: (s / "token_bytes.npy").write_text("no"), r"token_bytes\.npy is damaged"),
    "no token_bytes": (
        lambda s: (s / "token_bytes.npy").unlink(),
        r"token_bytes\.npy is damaged or missing.*prepare again",
    ),
    "another tokenizer": (
        lambda s: (s / "tokenizer" / "tokenizer.json").write_text(
            (s / "tokenizer" / "tokenizer.json").read_text().replace('"!"', '"¡!"', 1)
        ),
        r"tokenizer is damaged, or not the tokenizer of this set",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_never_trained_on(damage: str, shards: Path) -> None:
    before = read_everything(shards)
    np.testing.assert_array_equal(before, read_everything(shards))
    change, message = DAMAGE[damage]
    change(shards)
    with pytest.raises(InputError, match=message) as caught:
        read_everything(shards)
    assert "\n" not in str(caught.value)


def test_a_run_ends_with_one_line(shards: Path, tiny_recipe: Any, tmp_path: Path, monkeypatch, capsys) -> None:
    flip(one(shards, "shards/train*/train.tokens"), 4001, 3)
    recipe = tiny_recipe(f"data.shards={shards}")
    with pytest.raises(InputError, match=r"train\.tokens is damaged: document \d+ .* delete .* biphase prepare again"):
        train(recipe, tmp_path / "runs")
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["biphase", "inspect", str(shards), "--verify"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_tokenizer_is_missed_before_anything_trains(shards: Path, tiny_recipe: Any, tmp_path: Path) -> None:
    """Each checkpoint contains it."""
    shutil.rmtree(shards / "tokenizer")
    with pytest.raises(InputError, match=r"set/tokenizer is damaged, or not the tokenizer of this set: restore"):
        train(tiny_recipe(f"data.shards={shards}"), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_documents_are_checked_once(shards: Path, monkeypatch) -> None:
    opened = ShardSet(shards)
    opened.read(0, 100)
    hashed: list[bytes] = []
    digest = xxhash.xxh3_64_intdigest
    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", lambda data: digest(hashed.append(data) or data))
    opened.read(0, 100)
    assert not hashed
    opened.read(0, opened.num_tokens)
    assert 0 < len(hashed) < opened.num_documents
    opened.read(0, opened.num_tokens)
    assert len(hashed) < opened.num_documents


def test_a_manifest_may_be_written_in_another_order(shards: Path) -> None:
    """Its hash is taken over what is in the file, not over what this version would write."""
    tree = json.loads((shards / "manifest.json").read_text())
    (shards / "manifest.json").write_text(json.dumps(tree, sort_keys=True))
    assert read_shard_manifest(shards).fingerprint
