"""One set or several with weights: the data order is a function of seed and step, and a branch goes on in it."""

import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from biphase.corpus.packing import Batches, PackedSet, cut_documents, cut_stream, open_text
from biphase.corpus.prepare import prepare
from biphase.corpus.shards import ShardSet
from biphase.errors import InputError
from biphase.pretraining.loop import train
from biphase.run import find_checkpoint, read_checkpoint_manifest


class Stream:
    """Shards whose token at offset i is i."""

    split = "train"

    def __init__(self, lengths: np.ndarray) -> None:
        self.document_ends = np.cumsum(lengths)

    def read(self, start: int, stop: int) -> np.ndarray:
        return np.arange(start, stop)


LENGTHS = np.random.default_rng(5).integers(1, 300, 120)


def same(left: Any, right: Any) -> bool:
    return all(np.array_equal(getattr(left, key), getattr(right, key)) for key in vars(left))


@pytest.mark.parametrize(("kind", "digest"), [("documents", "3645672306949aca"), ("stream", "c162afafbd3e113f")])
def test_orders_of_runs_that_exist_stay(kind: str, digest: str) -> None:
    stream: Any = Stream(LENGTHS)
    stream_samples = cut_stream(int(stream.document_ends[-1]), 12, 64, 42)
    samples = stream_samples if kind == "stream" else cut_documents(stream.document_ends, 12, 64)
    batches = Batches([PackedSet(stream, samples, 42)], lambda step: 500 * step)
    tokens = np.concatenate([batches.batch(step).tokens_T for step in range(90)])
    assert xxhash.xxh3_64_hexdigest(tokens.astype("<i8").tobytes()) == digest


def make_sets(corpus: Any, tmp_path: Path) -> tuple[Path, Path]:
    """Two sets, each of one half of the tests' text."""
    rows = (corpus.shards.parent / "train.jsonl").read_text().splitlines(keepends=True)
    for name, part in (("a", rows[: len(rows) // 2]), ("b", rows[len(rows) // 2 :])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
        prepare([tmp_path / f"{name}.jsonl"], corpus.tokenizer, tmp_path / name, workers=1, validation_fraction=0.1)
    return tmp_path / "a", tmp_path / "b"


def test_a_lost_shard_is_made_again_and_must_be_the_same(corpus: Any, tmp_path: Path) -> None:
    def files_of(folder: Path) -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    folder, _ = make_sets(corpus, tmp_path)
    whole = files_of(folder)
    shutil.rmtree(next(folder.glob("shards/a.jsonl*")))
    (folder / "token_bytes.npy").unlink()
    with pytest.raises(InputError, match=r"is missing: delete .* biphase prepare again"):
        ShardSet(folder)
    prepare([tmp_path / "a.jsonl"], corpus.tokenizer, folder, workers=1, validation_fraction=0.1)
    assert files_of(folder) == whole
    shutil.rmtree(folder / "tokenizer")
    with pytest.raises(
        InputError, match=r"tokenizer is damaged, .* or delete the folder and run the same biphase prep"
    ):
        assert ShardSet(folder).tokenizer
    prepare([tmp_path / "a.jsonl"], corpus.tokenizer, folder, workers=1, validation_fraction=0.1)
    assert files_of(folder) == whole
    file = folder / "tokenizer" / "tokenizer.json"
    file.write_text(file.read_text().replace('"!"', '"¡!"', 1))
    with pytest.raises(InputError, match=r"tokenizer.json is not as biphase wrote it; .* or delete this one first"):
        prepare([tmp_path / "a.jsonl"], corpus.tokenizer, folder, workers=1, validation_fraction=0.1)


def test_new_text_is_a_set_of_its_own(corpus: Any, tiny_recipe: Any, tmp_path: Path) -> None:
    """A branch over the same text goes on in the data order; one over a mixture with new text begins anew in it."""
    folder, new = make_sets(corpus, tmp_path)
    with pytest.raises(InputError, match="finished shard set with other sources: choose another folder, or delete"):
        prepare([tmp_path / "b.jsonl"], corpus.tokenizer, folder, workers=1, validation_fraction=0.1)
    run = train(tiny_recipe(f"data.shards={folder}"), tmp_path / "runs")
    branch = f"data.shards={folder}", "init={}", f"init.checkpoint={run.path}@20", "name=longer"
    mixture = f"data.mixture=[{{path: {folder}, weight: 1}}, {{path: {new}, weight: 1}}]"
    position = {}
    for change in ((), (mixture,)):
        longer = train(tiny_recipe(*branch, *change), tmp_path / "runs")
        manifest = read_checkpoint_manifest(find_checkpoint(str(longer.path)))
        position[change] = manifest.data_position
        assert ("data position" in manifest.carried) == (change == ())
    assert position == {(): 40 * 512, (mixture,): 20 * 512}


# Several sets


def test_a_mixture_has_its_shares(corpus: Any, tmp_path: Path) -> None:
    """In each batch, within a sample for each set and part, and over all of them exactly."""
    streams: list[Any] = [Stream(LENGTHS[:60]), Stream(LENGTHS[60:] + 13)]
    weights = [Fraction("0.3"), Fraction("0.7")]
    sets = [PackedSet(s, cut_documents(s.document_ends, 12, 64), n) for n, s in enumerate(streams)]
    mixed = Batches(sets, lambda step: 1000 * step, weights)
    counts = np.zeros(2)
    for step in range(60):
        batch = mixed.batch(step)
        number = batch.sample_ids_S >> 40
        tokens = [int(batch.lengths_S[number == n].sum()) for n in range(2)]
        assert abs(tokens[0] - 300) < 64 and abs(tokens[1] - 700) < 64
        counts += tokens
        parts = [mixed.batch(step, part, 7) for part in range(7)]
        for name in ("tokens_T", "positions_T", "sample_ids_S", "epochs_S"):
            assert np.array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(batch, name))
    assert np.abs(counts / 60_000 - [0.3, 0.7]).max() < 64 / 60_000
    # Each set goes through its own epochs: one is begun anew only when all of it was seen.
    for n, packed in enumerate(sets):
        whole = [mixed.batch(step) for step in range(60)]
        ids = np.concatenate([b.sample_ids_S[b.sample_ids_S >> 40 == n] - (n << 40) for b in whole])
        epochs = np.concatenate([b.epochs_S[b.sample_ids_S >> 40 == n] for b in whole])
        assert (np.diff(epochs) >= 0).all() and epochs.max() >= 1
        assert np.array_equal(np.sort(ids[epochs == 0]), np.arange(packed.samples.num_samples))


def test_a_run_over_a_mixture(corpus: Any, tiny_recipe: Any, tmp_path: Path) -> None:
    folder, _ = make_sets(corpus, tmp_path)
    mixture = f"data.mixture=[{{path: {folder}, weight: 3}}, {{path: {tmp_path / 'b'}, weight: 1}}]"
    run = train(tiny_recipe(mixture), tmp_path / "runs")
    manifest = read_checkpoint_manifest(find_checkpoint(str(run.path)))
    assert manifest.data_fingerprint == open_text(tiny_recipe(mixture).data).fingerprint
    assert len(manifest.texts) == 2 and manifest.validation_text == ShardSet(corpus.shards).fingerprint
    with pytest.raises(
        InputError, match=rf"^{run.path} was validated on other text .* or give the recipe another name"
    ):
        train(tiny_recipe(mixture, f"data.shards={folder}"), tmp_path / "runs")
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
