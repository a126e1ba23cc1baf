"""New text arrives: what was made and seen stays what it was, and what comes then is a function of seed, step and the
places where the set grew."""

import os
import shutil
import signal
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from biphase.corpus.manifest import read_shard_manifest
from biphase.corpus.mixture import TrainingText, make_batches, open_text
from biphase.corpus.order import Growth
from biphase.corpus.packing import Batches, DocumentSamples, PackedSet, StreamSamples, join_batches
from biphase.corpus.prepare import prepare
from biphase.corpus.shards import ShardSet
from biphase.corpus.tokenizer import save_tokenizer, train_tokenizer
from biphase.distributed import World
from biphase.errors import InputError
from biphase.pretraining.checkpoint import read_checkpoint_manifest
from biphase.pretraining.job import open_job
from biphase.pretraining.loop import train
from biphase.recipe import Data, Recipe
from biphase.run import find_checkpoint


class Stream:
    """Shards whose token at offset i is i."""

    split = "train"

    def __init__(self, lengths: np.ndarray) -> None:
        self.document_ends = np.cumsum(lengths)

    def read(self, start: int, stop: int) -> np.ndarray:
        return np.arange(start, stop)


LENGTHS = np.random.default_rng(5).integers(1, 300, 120)


def grown_batches(num_documents: int, growth: list[tuple[int, int]], seed: int = 3, kind: str = "documents") -> Batches:
    """Batches of 500 tokens over the first documents; `growth`: (position, number of documents before)."""
    stream: Any = Stream(LENGTHS[:num_documents])
    total = int(stream.document_ends[-1])
    samples = (
        DocumentSamples(stream.document_ends, 12, 64) if kind == "documents" else StreamSamples(total, 12, 64, seed)
    )
    steps = [Growth(at, samples.num_first(known, int(LENGTHS[:known].sum()))) for at, known in growth]
    return Batches([PackedSet(stream, samples, seed, steps)], lambda step: 500 * step)


def same(left: Any, right: Any) -> bool:
    return all(np.array_equal(getattr(left, key), getattr(right, key)) for key in vars(left))


@pytest.mark.parametrize("kind", ["documents", "stream"])
@pytest.mark.parametrize("at", [0, 3, 7, 25, 60])
def test_what_was_seen_stays_and_the_rest_comes_once(kind: str, at: int) -> None:
    before, after = grown_batches(50, [], kind=kind), grown_batches(120, [(500 * at, 50)], kind=kind)
    for step in range(at):
        assert same(before.batch(step), after.batch(step)), "a batch before the growth is another one"
    seen = [before.batch(step) for step in range(at)]
    # All samples are seen equally often in the end, but for those of whole epochs before the new ones came.
    epochs = {int(number) for batch in seen for number in batch.epochs_S}
    opening = max(epochs, default=0) + 1
    order, samples = after.sets[0].order, after.sets[0].samples
    tokens = int(order.block_starts(order.stretches[1].opening)[-1])
    ids, numbers = order.between(500 * at, 500 * at + tokens)
    assert set(numbers) == {opening} and len(set(ids)) == len(ids)
    last = [i for batch in seen for i, e in zip(batch.sample_ids_S, batch.epochs_S, strict=True) if e == opening - 1]
    assert sorted([*last, *ids]) == list(range(samples.num_samples)), "one epoch: what was left and what is new"
    ids, numbers = order.between(500 * at + tokens, 500 * at + tokens + samples.num_tokens)
    assert np.array_equal(np.sort(ids), np.arange(samples.num_samples)) and set(numbers) == {opening + 1}


def test_a_set_may_grow_again_before_the_rest_was_seen() -> None:
    places = [(2000, 20), (2500, 50), (2500, 80), (9000, 100)]
    stages = [grown_batches(size, places[:number]) for number, size in enumerate([20, 50, 80, 100, 120])]
    grown = stages[-1]
    for step in range(40):
        stage = stages[sum(500 * step >= at for at, _ in places)]
        assert same(stage.batch(step), grown.batch(step))
        parts = [grown_batches(120, places).batch(step, part, 3) for part in range(3)]
        assert same(join_batches(parts), grown.batch(step))
    assert not same(grown_batches(120, places, seed=4).batch(30), grown.batch(30))
    assert not same(grown_batches(120, [(2000, 20)]).batch(30), grown.batch(30))


@pytest.mark.parametrize(("kind", "digest"), [("documents", "3645672306949aca"), ("stream", "c162afafbd3e113f")])
def test_orders_of_runs_that_exist_stay(kind: str, digest: str) -> None:
    """Pinned before sets could grow."""
    batches = grown_batches(120, [], seed=42, kind=kind)
    tokens = np.concatenate([batches.batch(step).tokens_T for step in range(90)])
    assert xxhash.xxh3_64_hexdigest(tokens.astype("<i8").tobytes()) == digest


def make_set(corpus: Any, tmp_path: Path) -> tuple[list[Path], Path]:
    """Two source files of the tests' text, and a set of the first."""
    rows = (corpus.shards.parent / "train.jsonl").read_text().splitlines(keepends=True)
    sources = [tmp_path / "text" / "a.jsonl", tmp_path / "text" / "b.jsonl"]
    sources[0].parent.mkdir()
    sources[0].write_text("".join(rows[: len(rows) // 2]))
    sources[1].write_text("".join(rows[len(rows) // 2 :]))
    prepare(sources[:1], corpus.tokenizer, tmp_path / "set", workers=1, validation_fraction=0.1)
    return sources, tmp_path / "set"


def files_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_append_leaves_what_is_there(corpus: Any, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    sources, folder = make_set(corpus, tmp_path)
    first, before = read_shard_manifest(folder), files_of(folder)
    old = ShardSet.open(folder)
    tokens = old.read(0, old.num_tokens).copy()
    manifest = prepare([tmp_path / "text"], corpus.tokenizer, folder, workers=1, validation_fraction=0.1, append=True)
    assert "1 of the sources are in the set already" in capsys.readouterr().err
    assert before.items() <= files_of(folder).items()
    whole = prepare(sources, corpus.tokenizer, tmp_path / "whole", workers=1, validation_fraction=0.1)
    assert manifest.fingerprint == whole.fingerprint != first.fingerprint
    assert manifest.splits == whole.splits and manifest.duplicates == whole.duplicates
    assert [stage.fingerprint for stage in manifest.stages] == [first.fingerprint, whole.fingerprint]
    then, now = ShardSet.open(folder, content=first.fingerprint[:8]), ShardSet.open(folder)
    assert then.fingerprint == first.fingerprint and then.num_tokens == old.num_tokens < now.num_tokens
    np.testing.assert_array_equal(then.read(0, then.num_tokens), tokens)
    np.testing.assert_array_equal(now.read(0, then.num_tokens), tokens)
    for given, append in ((sources[:1], False), (sources[1:], True), ([tmp_path / "text"], True)):
        assert (
            prepare(given, corpus.tokenizer, folder, validation_fraction=0.1, append=append).fingerprint
            == whole.fingerprint
        )
    with pytest.raises(InputError, match="never had the content 00000000; it had"):
        ShardSet.open(folder, content="00000000")
    with pytest.raises(InputError, match="other sources: append to it, choose another folder"):
        prepare(sources[1:], corpus.tokenizer, folder, validation_fraction=0.1)
    with pytest.raises(InputError, match="no finished shard set that could grow"):
        prepare(sources, corpus.tokenizer, tmp_path / "none", append=True)


def test_a_file_that_changed_is_not_appended_a_second_time(corpus: Any, tmp_path: Path) -> None:
    sources, folder = make_set(corpus, tmp_path)
    before = files_of(folder)
    with open(sources[0], "a", encoding="utf-8") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(InputError, match=r"a\.jsonl has changed since the set took it"):
        prepare(sources, corpus.tokenizer, folder, workers=1, validation_fraction=0.1, append=True)
    assert files_of(folder) == before


def test_append_takes_the_same_tokenizer_only(corpus: Any, tmp_path: Path) -> None:
    sources, folder = make_set(corpus, tmp_path)
    save_tokenizer(train_tokenizer(["another text " * 20], 270), tmp_path / "other")
    with pytest.raises(InputError, match="finished shard set of other tokenizer: choose another folder"):
        prepare(sources[1:], tmp_path / "other", folder, append=True)


KILLED = """
import os, signal, sys
from pathlib import Path
import biphase.corpus.prepare as preparing
preparing.write_hashed = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
preparing.prepare([sys.argv[1]], sys.argv[2], Path(sys.argv[3]), workers=1, validation_fraction=0.1, append=True)
"""


def test_a_killed_append_leaves_the_set_as_it_was(corpus: Any, tmp_path: Path) -> None:
    sources, folder = make_set(corpus, tmp_path)
    first, before = read_shard_manifest(folder), files_of(folder)
    arguments = [str(sources[1]), str(corpus.tokenizer), str(folder)]
    killed = subprocess.run([sys.executable, "-c", KILLED, *arguments], check=False, env=os.environ)
    assert killed.returncode == -signal.SIGKILL
    assert read_shard_manifest(folder) == first and before.items() <= files_of(folder).items()
    ShardSet.open(folder).verify()
    manifest = prepare(sources[1:], corpus.tokenizer, folder, workers=1, validation_fraction=0.1, append=True)
    assert len(manifest.shards) == 2


def test_a_lost_shard_is_made_again_and_must_be_the_same(corpus: Any, tmp_path: Path) -> None:
    sources, folder = make_set(corpus, tmp_path)
    prepare(sources[1:], corpus.tokenizer, folder, workers=1, validation_fraction=0.1, append=True)
    whole = files_of(folder)
    shutil.rmtree(next(folder.glob("shards/b.jsonl*")))
    (folder / "token_bytes.npy").unlink()
    with pytest.raises(InputError, match=r"is missing: delete .* biphase prepare again"):
        ShardSet.open(folder)
    prepare(sources[1:], corpus.tokenizer, folder, workers=1, validation_fraction=0.1, append=True)
    assert {name: data for name, (_, data) in files_of(folder).items()} == {n: data for n, (_, data) in whole.items()}


def test_a_run_goes_on_over_a_set_that_grew(corpus: Any, tiny_recipe: Any, tmp_path: Path, capsys: Any) -> None:
    sources, folder = make_set(corpus, tmp_path)
    first = read_shard_manifest(folder).fingerprint
    on = f"data.shards={folder}"
    run = train(tiny_recipe(on), tmp_path / "runs")
    checkpoint = f"{run.path}@20"
    prepare(sources[1:], corpus.tokenizer, folder, workers=1, validation_fraction=0.1, append=True)
    second = read_shard_manifest(folder).fingerprint
    recipe = tiny_recipe(on, "init={}", f"init.checkpoint={checkpoint}", "name=longer")
    longer = train(recipe, tmp_path / "runs")
    manifest = read_checkpoint_manifest(find_checkpoint(str(longer.path)))
    assert manifest.data_history == [(0, (first,)), (20 * 512, (second,))]
    assert manifest.carried == ["weights", "optimizer", "data position"] and manifest.data_position == 40 * 512

    # Every batch of both runs again, from what the last checkpoint says.
    def batches(text: TrainingText, history: Any) -> Any:
        return make_batches(recipe.data, text, lambda step: 512 * step, origin=0, history=tuple(history))

    text = open_text(recipe.data)
    replayed, plain = batches(text, manifest.data_history), batches(text, ())
    began = batches(open_text(Data(shards=str(folder), max_sample_tokens=64, content=first)), ())
    assert all(same(replayed.batch(step), began.batch(step)) for step in range(20))
    assert not any(same(replayed.batch(step), began.batch(step)) for step in range(20, 40))
    assert not same(replayed.batch(0), plain.batch(0))
    # As it was, the set still gives the run its name; nothing is begun anew in silence, and no recipe half-way.
    assert train(tiny_recipe(on, f"data.content={first}"), tmp_path / "runs").path == run.path
    assert "has grown since" not in capsys.readouterr().err
    (anew,) = heed(tiny_recipe(on), tmp_path / "runs", capsys)
    assert f"set init.checkpoint={checkpoint} and a curriculum" in anew and f"data.content={first[:16]}" in anew
    (run.path / "done.json").unlink()
    with pytest.raises(InputError, match=r"is not done, and .*set has grown since: to go on .*@20 .*data\.content="):
        heed(tiny_recipe(on), tmp_path / "runs", capsys)
    shutil.copytree(run.steps / "20", run.steps / "21")  # a later one that is damaged hides none before it
    (run.steps / "21" / "manifest.json").write_text("{")
    with pytest.raises(InputError, match=r"is not done, and .*set has grown since: to go on .*@20 "):
        heed(tiny_recipe(on), tmp_path / "runs", capsys)


def heed(recipe: Recipe, runs: Path, capsys: Any) -> list[str]:
    """What a start of the recipe tells."""
    open_job(recipe, runs, World(0, 1, torch.device("cpu")))
    return [line for line in capsys.readouterr().err.splitlines() if "has grown since" in line]


# Several sets


def test_a_mixture_has_its_shares(corpus: Any, tmp_path: Path) -> None:
    """In each batch, within a sample for each set and part, and over all of them exactly."""
    streams: list[Any] = [Stream(LENGTHS[:60]), Stream(LENGTHS[60:] + 13)]
    weights = [Fraction("0.3"), Fraction("0.7")]
    sets = [PackedSet(s, DocumentSamples(s.document_ends, 12, 64), n) for n, s in enumerate(streams)]
    mixed = Batches(sets, lambda step: 1000 * step, weights)
    counts = np.zeros(2)
    for step in range(60):
        batch = mixed.batch(step)
        number = batch.sample_ids_S >> 40
        tokens = [int(batch.lengths_S[number == n].sum()) for n in range(2)]
        assert abs(tokens[0] - 300) < 64 and abs(tokens[1] - 700) < 64
        counts += tokens
        assert same(join_batches([mixed.batch(step, part, 7) for part in range(7)]), batch)
    assert np.abs(counts / 60_000 - [0.3, 0.7]).max() < 64 / 60_000
    # Each set goes through its own epochs: one is begun anew only when all of it was seen.
    for n, packed in enumerate(sets):
        whole = [mixed.batch(step) for step in range(60)]
        ids = np.concatenate([b.sample_ids_S[b.sample_ids_S >> 40 == n] - (n << 40) for b in whole])
        epochs = np.concatenate([b.epochs_S[b.sample_ids_S >> 40 == n] for b in whole])
        assert (np.diff(epochs) >= 0).all() and epochs.max() >= 1
        assert np.array_equal(np.sort(ids[epochs == 0]), np.arange(packed.samples.num_samples))


def test_a_run_over_a_mixture(corpus: Any, tiny_recipe: Any, tmp_path: Path, capsys: Any) -> None:
    sources, folder = make_set(corpus, tmp_path)
    prepare(sources[1:], corpus.tokenizer, tmp_path / "b", workers=1, validation_fraction=0)
    mixture = f"data.mixture=[{{path: {folder}, weight: 3}}, {{path: {tmp_path / 'b'}, weight: 1}}]"
    run = train(tiny_recipe(mixture), tmp_path / "runs")
    manifest = read_checkpoint_manifest(find_checkpoint(str(run.path)))
    assert manifest.data_fingerprint == open_text(tiny_recipe(mixture).data).fingerprint
    assert len(manifest.data_history[0][1]) == 2
    scaled = mixture.replace("weight: 3", "weight: 1.5").replace("weight: 1}", "weight: 0.5}")
    assert train(tiny_recipe(scaled), tmp_path / "runs").path == run.path, "the weights are shares"
    other = train(tiny_recipe(mixture.replace("weight: 3", "weight: 2")), tmp_path / "runs")
    assert other.path != run.path
    on = train(tiny_recipe(mixture, "init={}", f"init.checkpoint={run.path}", "name=later"), tmp_path / "runs")
    assert "data position" in read_checkpoint_manifest(find_checkpoint(str(on.path))).carried
    with pytest.raises(InputError, match="names a text twice"):
        open_text(tiny_recipe(mixture.replace(str(tmp_path / "b"), str(folder))).data)
    plain = tiny_recipe().model_dump(mode="json")["data"]
    assert set(plain) == {"shards", "packing", "min_sample_tokens", "max_sample_tokens", "order_seed"}
    assert heed(tiny_recipe(mixture), tmp_path / "runs", capsys) == []
    prepare(sources[1:], corpus.tokenizer, folder, workers=1, validation_fraction=0.1, append=True)
    (anew,) = heed(tiny_recipe(mixture), tmp_path / "runs", capsys)
    assert f"a text of data.mixture has grown since {run.path} was done" in anew
    assert manifest.data_history[0][1][0][:16] in anew.partition("content in the parts of data.mixture: ")[2]
