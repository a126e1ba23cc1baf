import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from biphase.errors import InputError
from biphase.files import RECORD_HASH, content_hash, write_hashed
from biphase.finetuning.choosing import choose_for_each_seed, choose_rate, find_scored_model
from biphase.finetuning.config import PROTOCOL
from biphase.finetuning.metrics import contributions, count_tags, macro_f1, micro_f1
from biphase.finetuning.scores import read_examples, read_score, read_scores, show_rate
from biphase.report.results import select_rate
from biphase.report.verdicts import summarize

WriteCell = Callable[..., Path]


def edit(path: Path, old: str, new: str) -> None:
    """Write another text into a score, with the hash of that."""
    tree = json.loads(path.read_text().replace(old, new))
    del tree[RECORD_HASH]
    write_hashed(path, tree)


def test_reading_names_what_is_broken_and_goes_on(write_cell: WriteCell, scores_folder: Path) -> None:
    write_cell("m", seed=0)
    write_cell("m", seed=1, test=None)
    cut = write_cell("m", seed=2, name="cut") / "score.json"
    cut.write_text(cut.read_text()[:40])
    nan = write_cell("m", seed=3, test=0.625, name="nan") / "score.json"
    edit(nan, "0.625", "NaN")
    (write_cell("m", seed=4, name="old") / "score.json").write_text('{"cell": "x"}')
    (write_cell("m", seed=5, name="list") / "score.json").write_text("[]")
    write_cell("m", seed=6, name="nested/deep/cell")
    write_cell("m", seed=7, name="renamed-metric")
    renamed = scores_folder / "renamed-metric" / "score.json"
    edit(renamed, '"metric": "accuracy"', '"metric": "f1"')
    write_cell("m", seed=8, name=".unfinished.part")
    scores = read_scores(scores_folder)
    assert sorted(score.config.seed for score in scores.scores) == [0, 1, 6]
    reasons = {path.parent.name: reason for path, reason in scores.broken.items()}
    assert set(reasons) == {"cut", "nan", "old", "list", "renamed-metric"}
    assert "not valid JSON" in reasons["cut"] and "finite number" in reasons["nan"]
    assert reasons["renamed-metric"] == "its f1 on validation is missing"
    assert not any("\n" in reason for reason in reasons.values())


def test_a_notebook_shows_a_score_in_few_words(write_cell: WriteCell) -> None:
    folder = write_cell("m", test=0.625)
    score = read_score(folder)
    name, outcome, point, place = repr(score).splitlines()
    assert repr(score) == str(score) and (name, outcome) == ("genre · m", "accuracy validation 50.00% · test 62.50%")
    assert point.startswith("lr 5e-5 · seed 0 · ") and place == str(folder)
    diverged = repr(read_score(write_cell("m", test=None, seed=1))).splitlines()
    assert diverged[1].startswith("diverged at step") and diverged[2] == "lr 5e-5 · seed 1"


def test_a_score_that_was_edited_is_none(write_cell: WriteCell, scores_folder: Path) -> None:
    """A share lies between 0 and 1, a correlation between -1 and 1; a hash tells the rest, where there is one."""
    write_cell("m", metric="mcc", test=-0.5, name="correlation")
    write_cell("m", test=7.0, name="large")
    write_cell("m", test=-0.5, name="negative")
    path = write_cell("m", test=0.625, name="edited") / "score.json"
    assert len(read_scores(scores_folder).scores) == 2
    path.write_text(path.read_text().replace("0.625", "0.99"))
    broken = {path.parent.name: reason for path, reason in read_scores(scores_folder).broken.items()}
    assert broken == {
        "large": "its accuracy on test is 7, which is out of its range",
        "negative": "its accuracy on test is -0.5, which is out of its range",
        "edited": "is damaged (it is not what was written, by its own hash); delete its folder and rerun",
    }


def test_a_score_in_the_folder_of_another_cell_is_none(write_cell: WriteCell, scores_folder: Path) -> None:
    """A copy of one seed's cell over another's; a folder that a user has named may hold any."""
    digest = content_hash("cell")
    edit(write_cell("m", seed=1, name=f"genre-{digest[:16]}") / "score.json", '"cell": "', f'"cell": "{digest} ')
    write_cell("m", seed=2, name=f"genre-{content_hash('other')[:16]}")
    write_cell("m", seed=3, name="mine")
    scores = read_scores(scores_folder)
    assert sorted(score.config.seed for score in scores.scores) == [1, 3]
    [reason] = scores.broken.values()
    assert reason.startswith("is the score of another cell (m aaaa") and "delete its folder" in reason


def test_a_score_without_a_hash_is_left_out(write_cell: WriteCell, scores_folder: Path) -> None:
    """Whatever its predictions say."""
    rows = [{"id": "a", "score": 1.0}, {"id": "b", "score": 0.0}]
    path = write_cell("m", lines=rows, test=0.5) / "score.json"
    tree = json.loads(path.read_text())
    del tree[RECORD_HASH]
    path.write_text(json.dumps(tree))
    scores = read_scores(scores_folder)
    assert scores.scores == ()
    [reason] = scores.broken.values()
    assert reason == "is damaged (it is not what was written, by its own hash); delete its folder and rerun"


def test_no_score_is_read_inside_folders_of_wandb(write_cell: WriteCell, scores_folder: Path) -> None:
    """They hold links. A model may have the name of the folder for tracking."""
    cell = write_cell("m", name="genre")
    write_cell("tracking", name="tracking/genre")
    for out in (scores_folder, scores_folder / "m"):
        inside = out / "tracking" / "genre-12345678" / "wandb" / "latest-run"
        inside.mkdir(parents=True)
        (inside / "score.json").symlink_to(cell / "score.json")
    scores = read_scores(scores_folder)
    assert (scores.models, scores.broken) == (("m", "tracking"), {}) and len(scores.scores) == 2


def test_no_folder_and_no_scores(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a folder"):
        read_scores(tmp_path / "nowhere")
    assert read_scores(tmp_path).models == ()


def test_best_mean_wins() -> None:
    """Means 0.70, 0.72 and 0.71; the single best seed is at another rate. More seeds are no merit."""
    assert choose_rate({1e-5: [0.70, 0.70], 2e-5: [0.72, 0.72], 5e-5: [0.80, 0.62]}) == 2e-5
    assert choose_rate({1e-5: [0.70, 0.70, 0.70], 2e-5: [0.72], 5e-5: [0.71, 0.71]}) == 2e-5


def test_ties_go_to_the_lower_rate_whatever_the_order_of_seeds() -> None:
    assert 0.1 + 0.2 + 0.3 != 0.3 + 0.2 + 0.1
    assert choose_rate({2e-5: [0.1, 0.2, 0.3], 1e-5: [0.3, 0.2, 0.1]}) == 1e-5
    assert choose_rate({1e-5: [0.1, 0.2, 0.3], 2e-5: [0.3, 0.2, 0.1]}) == 1e-5


def test_diverged_seeds_rank_a_rate_last() -> None:
    assert choose_rate({1e-5: [0.5, 0.5], 1e-4: [0.9, None]}) == 1e-5
    assert choose_rate({1e-4: [0.9, None, None], 2e-4: [0.6, 0.6, None]}) == 2e-4
    assert choose_rate({1e-4: [None, None], 2e-4: [0.6, None]}) == 2e-4


@pytest.mark.parametrize("validation", [{1e-4: [None, None], 2e-4: [None]}, {1e-4: []}, {}])
def test_nothing_to_choose_from(validation: dict) -> None:
    with pytest.raises(InputError, match="diverged at every learning rate"):
        choose_rate(validation)


def test_selection_by_hand(write_cell: WriteCell, scores_folder: Path) -> None:
    """Validation chooses 2e-5, though test prefers 1e-5; another model shows that the grid has a seed 2 and a rate of
    9e-5."""
    for rate, seed, validation, test in (
        *((1e-5, 1, 0.60, 0.91), (1e-5, 0, 0.60, 0.90)),
        *((2e-5, 1, 0.72, 0.81), (2e-5, 0, 0.70, 0.80)),
        *((5e-5, 0, 0.99, 0.99), (5e-5, 1, 0.0, None)),
    ):
        write_cell("m", rate=rate, seed=seed, validation=validation, test=test)
    write_cell("other", rate=9e-5, seed=2)
    chosen = select_rate(read_scores(scores_folder), "m", "genre")
    assert chosen.rate == 2e-5 and chosen.seeds == (0, 1)
    assert chosen.samples == (0.80, 0.81)
    assert chosen.examples and [score.config.seed for score in chosen.examples.scores] == [0, 1]
    assert chosen.num_diverged == 0
    [row] = [row for row in summarize(read_scores(scores_folder)) if row.score.arm.name == "m"]
    assert row.missing == (
        (1e-5, 2),
        (2e-5, 2),
        (5e-5, 2),
        (9e-5, 0),
        (9e-5, 1),
        (9e-5, 2),
    )
    assert (chosen.num, chosen.num_runs) == (2, 6)
    assert (chosen.mean, chosen.std) == (pytest.approx(0.805), pytest.approx(0.01 / math.sqrt(2)))
    by_rate = {1e-5: (0.90, 0.91, math.nan), 2e-5: (0.80, 0.81, math.nan), 5e-5: (0.99, math.nan, math.nan)}
    by_rate[9e-5] = (math.nan,) * 3
    assert chosen.by_rate and list(chosen.by_rate) == list(by_rate)
    for rate, values in by_rate.items():
        assert chosen.by_rate[rate] == pytest.approx(values, nan_ok=True)


def test_no_seed_chooses_its_own_rate() -> None:
    """Each seed is best where it was lucky: the others send it elsewhere. For a seed alone, or whose others diverged,
    other pretraining seeds choose, among the rates that it has; without any it chooses for itself."""
    lucky = {1e-5: {0: 0.9, 1: 0.5, 2: 0.6}, 2e-5: {0: 0.5, 1: 0.9, 2: 0.5}}
    peers = {1e-5: [0.6, 0.7], 2e-5: [0.5, 0.6], 3e-5: [0.9, 0.9]}
    assert choose_for_each_seed(lucky, peers) == {0: 2e-5, 1: 1e-5, 2: 1e-5}
    for own in ({1e-5: {0: 0.5}, 2e-5: {0: 0.9}}, {1e-5: {0: 0.5, 1: None}, 2e-5: {0: 0.9, 1: None}}):
        assert set(choose_for_each_seed(own, {}).values()) == {2e-5}
        assert choose_for_each_seed(own, peers)[0] == 1e-5
        assert choose_for_each_seed(own, {3e-5: [0.9], 1e-5: [None]})[0] == 2e-5


def test_the_papers_way_tests_all_seeds_at_one_rate(write_cell: WriteCell, scores_folder: Path) -> None:
    for rate, seed, score in ((1e-5, 0, 0.9), (1e-5, 1, 0.5), (2e-5, 0, 0.6), (2e-5, 1, 0.7)):
        write_cell("m", rate=rate, seed=seed, validation=score, test=score)
    scores = read_scores(scores_folder)
    ours, papers = (select_rate(scores, "m", "genre", is_papers_way=way) for way in (False, True))
    assert (ours.rate, ours.samples) == (1e-5, (0.6, 0.5))
    assert ours.examples and [score.config.learning_rate for score in ours.examples.scores] == [2e-5, 1e-5]
    assert (papers.rate, papers.samples) == (1e-5, (0.9, 0.5)) and ours.by_rate and ours.by_rate[1e-5] == papers.samples


def test_selection_by_another_metric(write_cell: WriteCell, scores_folder: Path) -> None:
    write_cell("m", test=0.9)
    scores = read_scores(scores_folder)
    assert select_rate(scores, "m", "genre", "other").samples == (0.1,)
    with pytest.raises(InputError, match="no metric 'acuracy'; did you mean 'accuracy'"):
        select_rate(scores, "m", "genre", "acuracy")
    with pytest.raises(InputError, match="no scores of m on task 'snli'"):
        select_rate(scores, "m", "snli")


def test_selection_where_everything_diverged(write_cell: WriteCell, scores_folder: Path) -> None:
    write_cell("m", test=None)
    with pytest.raises(InputError, match="m on genre: training diverged at every"):
        select_rate(read_scores(scores_folder), "m", "genre")
    for rate, seed, test in ((1e-5, 1, None), (1e-5, 2, 0.9), (2e-5, 1, 0.8), (2e-5, 2, None)):
        write_cell("crossed", rate=rate, seed=seed, test=test)
    with pytest.raises(InputError, match="crossed on genre: no seed finished at the rate that the others chose"):
        select_rate(read_scores(scores_folder), "crossed", "genre")
    assert [row.score.rate for row in summarize(read_scores(scores_folder))] == [None, None]


def test_a_control_is_a_model_of_its_own(write_cell: WriteCell, scores_folder: Path) -> None:
    """Settings that differ on one task name the model on all of them; those that only differ between tasks do not."""
    for weights in ("pretrained", "random"):
        write_cell("runs/m/", "genre", weights=weights, batch_size=8)
    write_cell("runs/m", "snli", weights="random", batch_size=16)
    write_cell("runs/other", "genre", batch_size=64)
    scores = read_scores(scores_folder)
    assert set(scores.cells) == {
        ("runs/m", "genre"),
        ("runs/m [weights=random]", "genre"),
        ("runs/m [weights=random]", "snli"),
        ("runs/other", "genre"),
    }
    assert (
        find_scored_model(scores, "m") == "runs/m"
        and find_scored_model(scores, "m [weights=random]") == "runs/m [weights=random]"
    )


def test_what_does_not_change_scores_makes_no_other_model(write_cell: WriteCell, scores_folder: Path) -> None:
    write_cell("m", seed=0, microbatch_tokens=4096)
    write_cell("m", seed=1, microbatch_tokens=8192)
    assert read_scores(scores_folder).models == ("m",)


def test_new_weights_and_new_data_under_an_old_name(write_cell: WriteCell, scores_folder: Path) -> None:
    write_cell("m", seed=0, model_hash="b" * 64)
    write_cell("m", seed=1, model_hash="c" * 64)
    write_cell("n", seed=0, data_hash="e" * 64)
    write_cell("n", seed=1, data_hash="f" * 64)
    expected = ("m@bbbbbbbb", "m@cccccccc", "n [data=eeeeeeee]", "n [data=ffffffff]")
    assert read_scores(scores_folder).models == expected


def test_two_scores_for_one_cell_of_the_grid(write_cell: WriteCell, scores_folder: Path) -> None:
    write_cell("m", name="first")
    write_cell("m", name="second")
    with pytest.raises(InputError, match=r"first and .*second are two scores of m on genre at rate 5e-5 and seed 0"):
        _ = read_scores(scores_folder).cells


def test_a_copied_score_counts_once(write_cell: WriteCell, scores_folder: Path) -> None:
    folder = write_cell("m")
    (scores_folder / "copy").mkdir()
    (scores_folder / "copy" / "score.json").write_text((folder / "score.json").read_text())
    assert select_rate(read_scores(scores_folder), "m", "genre").seeds == (0,)


def test_finding_a_model(write_cell: WriteCell, scores_folder: Path) -> None:
    for model in ("runs/a/mlm", "runs/b/mlm", "runs/clm25"):
        write_cell(model)
    scores = read_scores(scores_folder)
    assert (
        find_scored_model(scores, "runs/a/mlm/") == "runs/a/mlm" and find_scored_model(scores, "clm25") == "runs/clm25"
    )
    with pytest.raises(InputError, match="'mlm' could be any of 'runs/a/mlm', 'runs/b/mlm'"):
        find_scored_model(scores, "mlm")
    with pytest.raises(InputError, match="no scores of a model 'clm52'; did you mean 'clm25'"):
        find_scored_model(scores, "clm52")


def test_examples_with_scores(write_cell: WriteCell, scores_folder: Path) -> None:
    lines = [{"id": "a", "score": 1.0, "gold": "x"}, {"id": "b", "score": 0.5}]
    examples = read_examples(read_score(write_cell("m", seed=0, test=0.75, lines=lines)))
    assert examples.values_SN.tolist() == [[1.0, 0.5]]
    turned = read_examples(read_score(write_cell("m", seed=1, test=0.75, lines=lines[::-1])))
    assert turned.fingerprint != examples.fingerprint


TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")


def test_examples_with_tags_by_hand(write_cell: WriteCell) -> None:
    """One entity found; one too long; a stray I- that begins an entity as in conlleval. F1 = 2·2/(3+3)."""
    lines = [
        {"id": "0", "gold": ["B-PER", "I-PER", "O", "B-LOC"], "predicted": ["B-PER", "I-PER", "B-LOC", "I-LOC"]},
        {"id": "1", "gold": ["O", "O"], "predicted": ["O", "O"]},
        {"id": "2", "gold": ["B-LOC"], "predicted": ["I-LOC"]},
    ]
    path = write_cell("m", metric="f1", test=4 / 6, lines=lines, classes=TAGS)
    assert read_examples(read_score(path)).num_degenerate == 0
    assert contributions(lines, "f1", TAGS)[0].tolist() == [[1, 2, 2], [0, 0, 0], [1, 1, 1]]


def test_strict_entities_begin_with_b(write_cell: WriteCell) -> None:
    """The stray I-LOC is none in strict mode: found 1 of 1 predicted and 2 in gold."""
    lines = [{"id": "0", "gold": ["B-PER", "O", "B-LOC"], "predicted": ["B-PER", "O", "I-LOC"]}]
    assert contributions(lines, "f1", TAGS)[0].tolist() == [[2, 2, 2]]
    assert contributions(lines, "strict_f1", TAGS)[0].tolist() == [[1, 1, 2]]
    for metric, score in (("f1", 1.0), ("strict_f1", 2 / 3)):
        read_examples(read_score(write_cell(metric, metric=metric, test=score, lines=lines, classes=TAGS)))


def labelled(*pairs: tuple[str, str]) -> list[dict]:
    return [
        {"id": str(number), "gold": gold, "predicted": predicted, "score": float(gold == predicted)}
        for number, (gold, predicted) in enumerate(pairs)
    ]


def test_labels_by_hand(write_cell: WriteCell) -> None:
    """F1 of no: 2·1/(1+2), of yes: 2·2/(3+2); accuracy 3/4."""
    lines = labelled(("no", "no"), ("yes", "yes"), ("yes", "yes"), ("yes", "no"))
    yes, no = 4 / 5, 2 / 3
    known = {"lines": lines, "classes": ("no", "yes")}
    for metric, score in (("f1", yes), ("macro_f1", (yes + no) / 2), ("accuracy", 0.75)):
        read_examples(read_score(write_cell(metric, metric=metric, test=score, **known)))
    values, statistic = contributions(lines, "f1", ("no", "yes"))
    assert values.tolist() == [[0, 0, 0], [1, 1, 1], [1, 1, 1], [0, 0, 1]] and statistic is micro_f1
    values, statistic = contributions(lines, "macro_f1", ("no", "yes"))
    assert values.tolist() == [[1, 0, 2, 0], [0, 1, 0, 2], [0, 1, 0, 2], [0, 0, 1, 1]] and statistic is macro_f1
    values, statistic = contributions(lines, "accuracy", ("no", "yes"))
    assert values.tolist() == [1, 1, 1, 0] and statistic is None
    for name, classes in (("d", ()), ("e", ("yes", "maybe"))):
        with pytest.raises(InputError, match=r"test.jsonl does not say what each example contributes to f1 \(.*no"):
            read_examples(read_score(write_cell(name, metric="f1", test=yes, lines=lines, classes=classes)))


def test_exact_answers(write_cell: WriteCell) -> None:
    """By version 2.0's rules, as one question has no answer: an answer of which nothing is left does not count."""
    lines = [
        {"id": "0", "gold": ["the dog", "a cat"], "predicted": "Cat.", "score": 1.0},
        {"id": "1", "gold": [], "predicted": "", "score": 1.0},
        {"id": "2", "gold": ["red stone"], "predicted": "stone", "score": 2 / 3},
        {"id": "3", "gold": ["the"], "predicted": "stone", "score": 0.0},
    ]
    exact = read_examples(read_score(write_cell("m", metric="exact", test=0.5, lines=lines)))
    assert exact.values_SN.tolist() == [[1, 1, 0, 0]]
    with pytest.raises(InputError, match=r"test.jsonl does not say what each example contributes to exact"):
        read_examples(read_score(write_cell("n", metric="exact", test=0.5, lines=[{"id": "0", "score": 1.0}])))


def test_entities_are_those_of_seqeval() -> None:
    from seqeval.metrics import f1_score
    from seqeval.metrics.sequence_labeling import get_entities

    rng = np.random.default_rng(0)
    tags = np.array(["O", "O", "B-PER", "I-PER", "B-LOC", "I-LOC"])
    rows = []
    for length in rng.integers(1, 9, 200):
        gold, predicted = (tags[rng.integers(0, 6, length)].tolist() for _ in range(2))
        rows.append({"gold": gold, "predicted": predicted})
    counts, statistic = count_tags(rows, "f1", tags.tolist())
    assert statistic is micro_f1
    for row, (found, predicted, gold) in zip(rows, counts.tolist(), strict=True):
        sets = set(get_entities(row["predicted"])), set(get_entities(row["gold"]))
        assert (found, predicted, gold) == (len(sets[0] & sets[1]), len(sets[0]), len(sets[1]))
    found, predicted, gold = counts.sum(axis=0)
    theirs = f1_score([row["gold"] for row in rows], [row["predicted"] for row in rows])
    assert 2 * found / (predicted + gold) == pytest.approx(theirs)


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([{"id": "a", "score": 0.2}], r"gives accuracy 0.2000 where score.json says 0.5000"),
        ([{"id": "a", "score": float("nan")}], r"gives accuracy nan where score.json says 0.5000"),
        ([{"id": "a", "score": "good"}], r"does not say .* accuracy \(.*could not convert string to float: 'good'\)"),
        ([{"score": 0.5}], r"does not say .*'id'"),
        (["a"], r"does not say"),
        ([{"id": "a", "gold": "O", "predicted": "O"}], r"does not say .*'score'\); rerun its cell"),
        ([{"id": "a", "gold": [], "predicted": []}], r"does not say .*a sentence has no word"),
        ([], "is empty"),
        (None, "has no per-example predictions"),
    ],
)
def test_examples_that_cannot_be_used(write_cell: WriteCell, lines: list | None, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        read_examples(read_score(write_cell("m", test=0.5, lines=lines)))


def test_tags_that_do_not_match(write_cell: WriteCell) -> None:
    folder = write_cell("m", metric="f1", lines=[{"id": "0", "gold": ["O"], "predicted": ["O"]}])
    with (folder / "test.jsonl").open("a") as file:
        file.write(json.dumps({"id": "1", "gold": ["O", "O"], "predicted": ["O"]}) + "\n")
    with pytest.raises(InputError, match=r"test.jsonl does not say what each example contributes to f1"):
        read_examples(read_score(folder))
    (folder / "test.jsonl").write_text('{"id": "0", "sco')
    with pytest.raises(InputError, match=r"test.jsonl does not say what each example contributes to f1"):
        read_examples(read_score(folder))


def test_rates_as_people_write_them() -> None:
    assert [show_rate(rate) for rate in (1e-5, 0.0001, 1.5e-4, 2e-3)] == ["1e-5", "1e-4", "1.5e-4", "2e-3"]


def test_scores_of_an_older_protocol_stand_apart(write_cell: WriteCell, scores_folder: Path) -> None:
    for name, protocol in (("old", 3), ("new", PROTOCOL)):
        edit(write_cell("m", name=name) / "score.json", f'"protocol": {PROTOCOL}', f'"protocol": {protocol}')
    assert read_scores(scores_folder).models == ("m", "m [protocol=3]")
