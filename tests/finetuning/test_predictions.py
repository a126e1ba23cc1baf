"""What each test example contributes to a score: its mean is the score, its spread the noise of the test set."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from biphase.errors import InputError, StoppedError
from biphase.finetuning import fit
from biphase.finetuning.metrics import Statistic, is_one_for_all, macro_f1, micro_f1, share
from biphase.finetuning.scores import KeptExamples, linearize, read_examples, read_score


def test_shares_are_their_own_contributions() -> None:
    values = np.array([0.0, 1.0, 0.25])
    assert linearize(values, None).tolist() == values.tolist()


@pytest.mark.parametrize(("statistic", "counts"), [(micro_f1, [1, 2, 1]), (share, [3, 4]), (macro_f1, [1, 2])])
def test_one_example_is_its_own_score(statistic: Statistic, counts: list[int]) -> None:
    with warnings.catch_warnings(action="error"):
        assert linearize(np.array([counts]), statistic).tolist() == [statistic(np.array(counts))]


@pytest.mark.parametrize("name", ["micro_f1", "macro_f1"])
def test_linearized_noise_is_the_bootstraps(name: str) -> None:
    """The standard error from linearized contributions is that of resampling sentences, and their mean the score."""
    rng = np.random.default_rng(0)
    gold = rng.poisson(1.5, 400)
    found = rng.binomial(gold, 0.6)
    counts_NC = np.stack([found, found + rng.poisson(0.3, 400), gold], axis=1)
    statistic = micro_f1
    if name == "macro_f1":
        labels = np.eye(3)[rng.choice(3, 400, p=[0.7, 0.2, 0.1])]
        predicted = np.where((rng.random(400) < 0.7)[:, None], labels, np.eye(3)[rng.integers(0, 3, 400)])
        counts_NC, statistic = np.concatenate([labels * predicted, labels + predicted], axis=1), macro_f1
    values_N = linearize(counts_NC, statistic)
    assert values_N.mean() == pytest.approx(float(statistic(counts_NC.sum(axis=0))))
    weights_BN = rng.multinomial(400, np.full(400, 1 / 400), 4000)
    bootstrap = statistic(weights_BN @ counts_NC).std(ddof=1)
    assert values_N.std(ddof=1) / 20 == pytest.approx(bootstrap, rel=0.06)


def test_kept_examples_are_read_when_asked_for(write_cell: Callable[..., Path]) -> None:
    lines = [{"id": str(number), "score": float(number < 3)} for number in range(4)]
    scores = [read_score(write_cell("m", seed=seed, test=0.75, lines=lines)) for seed in (0, 1)]
    table = KeptExamples(tuple(scores)).read()
    assert table.values_SN.tolist() == [[1, 1, 1, 0]] * 2 and table.fingerprint == read_examples(scores[0]).fingerprint
    other = read_score(write_cell("m", seed=2, test=0.75, lines=[{**row, "id": f"x{row['id']}"} for row in lines]))
    lost = read_score(write_cell("m", seed=3))
    for kept, why in (((*scores, other), "not the same"), ((*scores, lost), "no per-example predictions")):
        assert why in KeptExamples(kept).read().why_unknown


OWN_IDS, LOCATIONS = ("item-{}", "7{}"), ("{}", "test.tsv:{}", "test.parquet: row {}")


@pytest.mark.parametrize("form", [*OWN_IDS, *LOCATIONS])
def test_only_ids_of_their_own_pair_the_examples_of_two_tasks(write_cell: Callable[..., Path], form: str) -> None:
    lines = [{"id": form.format(number), "score": 1.0} for number in range(4)]
    scores = [read_score(write_cell("m", task=task, seed=0, test=1.0, lines=lines)) for task in ("a", "b")]
    for most in (None, 2):
        assert len({read_examples(score, most=most).fingerprint for score in scores}) == (1 if form in OWN_IDS else 2)


def test_predictions_that_were_edited_are_none(write_cell: Callable[..., Path], tmp_path: Path) -> None:
    """Whatever is changed: what is predicted, where the score of the row stays, too."""
    rows = [{"id": str(number), "gold": "a", "predicted": "b", "score": 0.0} for number in range(4)]
    fit.write_cell(tmp_path / "cell", read_score(write_cell("m", test=0.0)), [], {"test": rows})
    score, path = read_score(tmp_path / "cell"), tmp_path / "cell" / "test.jsonl"
    assert read_examples(score).values_SN.tolist() == [[0.0] * 4]
    path.write_text(path.read_text().replace('"b"', '"a"'))
    with pytest.raises(InputError, match=f"^{path} is damaged"):
        read_examples(score)


def test_contributions_of_other_predictions_are_not_used(write_cell: Callable[..., Path], tmp_path: Path) -> None:
    """Nor damaged ones: they are made again."""
    gold = "a\u2028b\x85"  # which end a line for Python, not for JSON
    rows = [{"id": str(number), "gold": gold, "predicted": "b", "score": float(number > 0)} for number in range(4)]
    fit.write_cell(tmp_path / "cell", read_score(write_cell("m", test=0.75)), [], {"test": rows})
    other = read_score(write_cell("other", test=0.0))
    fit.write_cell(tmp_path / "other", other, [], {"test": [row | {"score": 0.0} for row in rows]})
    score, path = read_score(tmp_path / "cell"), tmp_path / "cell" / "test.npz"
    written = path.read_bytes()
    rng = np.random.default_rng(0)
    spoiled = [np.frombuffer(written, np.uint8).copy() for _ in range(60)]
    for content_B in spoiled:
        content_B[rng.integers(len(written))] ^= 1 << rng.integers(8)
    others = (tmp_path / "other" / "test.npz").read_bytes(), written[:-9], b""
    for content in (written, *others, *map(np.ndarray.tobytes, spoiled)):
        path.write_bytes(content)
        assert read_examples(score).values_SN.tolist() == [[0, 1, 1, 1]]
        assert read_examples(score, most=2).values_SN.tolist() == [[0, 1]]
    with np.load(tmp_path / "other" / "test.npz") as saved:
        assert saved["values"].tolist() == [0] * 4


def test_a_stop_while_contributions_are_read_is_no_damage(
    write_cell: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    score = read_score(write_cell("m", test=0.5, lines=[{"id": "0", "score": 0.5}]))

    def stop(*_: Any, **options: Any) -> None:
        raise StoppedError

    monkeypatch.setattr(np, "load", stop)
    with pytest.raises(StoppedError):
        read_examples(score)


def test_one_answer_for_all_is_degenerate(write_cell: Callable[..., Path]) -> None:
    """One class, tags all O, one answer; not where the right ones are all the same, or nothing was kept of them."""

    def is_degenerate(predicted: list[Any], gold: list[Any], **settings: Any) -> bool:
        pairs = enumerate(zip(predicted, gold, strict=True))
        lines = [{"id": str(i), "predicted": p, "gold": g, "score": 0.5} for i, (p, g) in pairs]
        score = read_score(write_cell("m", lines=lines, name=str(next(names)), **settings))
        return read_examples(score).num_degenerate == 1

    names = iter(range(12))
    assert is_degenerate(["no", "no"], ["no", "yes"]) and not is_degenerate(["no", "yes"], ["no", "yes"])
    assert not is_degenerate(["no", "no"], ["no", "no"])
    assert is_degenerate([["O"], ["O", "O"]], [["O"], ["B-X", "O"]])
    assert not is_degenerate([["O"], ["B-X", "O"]], [["O"], ["B-X", "O"]])
    assert is_degenerate(["", ""], [["the cat"], ["a dog"]])
    assert not is_degenerate([["d1"], ["d1"]], [[], []])
    assert is_degenerate([2.0, 2.001], [1.0, 2.0]) and not is_degenerate([2.0, 2.002], [1.0, 2.0])
    assert not is_degenerate([2.0, 2.0], [1.0, 1.0])
    sets = [{"gold": gold, "predicted": ["a", "b"], "probabilities": {"a": 1.0, "b": 1.0}} for gold in (["a"], ["b"])]
    assert is_one_for_all(sets) and not is_one_for_all([*sets, sets[0] | {"predicted": []}])


def test_micro_f1_by_hand() -> None:
    """Two of three predicted entities are right, four are in gold: F1 = 2·2/(3+4). None anywhere: 0."""
    assert micro_f1(np.array([[2, 3, 4], [0, 0, 0]])).tolist() == [4 / 7, 0]


def test_macro_f1_is_that_of_scikit_learn() -> None:
    """Of each resample; a label that is nowhere does not count."""
    from sklearn.metrics import f1_score

    rng = np.random.default_rng(0)
    for num_labels in (2, 3, 6):
        gold, predicted = rng.integers(0, num_labels, (2, 5))
        onehot = np.eye(num_labels, dtype=int)
        counts = np.concatenate([onehot[gold] * onehot[predicted], onehot[gold] + onehot[predicted]], axis=1)
        theirs = f1_score(gold, predicted, average="macro")
        assert macro_f1(counts.sum(axis=0)) == pytest.approx(theirs)
        assert macro_f1(np.stack([counts.sum(axis=0)] * 2)[None]).shape == (1, 2)
