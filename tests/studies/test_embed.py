"""A study that makes embedding models of its arms by one recipe: which pretraining embeds best."""

import json
import math
import re
import shutil
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sentence_transformers")

from biphase.api.studies import study
from biphase.config import parse_config
from biphase.embedding import training
from biphase.embedding.evaluation import read_judged_set, score_bm25
from biphase.engine.units import Engine
from biphase.errors import BusyError, InputError
from biphase.studies import run as worker
from biphase.studies.bundle import bundle_study
from biphase.studies.cost import cell_costs, count_embedded, estimate, measure_sizes
from biphase.studies.folder import StudyState, claim_study_folder, read_state
from biphase.studies.plan import plan_study
from biphase.studies.report import collect_results, report_study
from biphase.studies.run import look_for_data, run_study, status
from biphase.studies.spec import Evaluation, Study, scored_as, trainings

HERE = Engine(workers=0)


@pytest.fixture
def tree(tiny_recipe: Any, documents: list[str], tmp_path: Path) -> dict[str, Any]:
    recipe = tiny_recipe().model_dump(mode="json")
    network = {"name": "tiny", "preset": "1m", "architecture": recipe["init"]["architecture"]}
    words = [text.split()[:24] for text in documents if len(text.split()) > 12][:16]
    beir = tmp_path / "passages"
    (beir / "qrels").mkdir(parents=True)
    rows = [{"anchor": " ".join(some[:6]), "positive": " ".join(some[6:])} for some in words]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, key in (("corpus", "positive"), ("queries", "anchor")):
        texts = [json.dumps({"_id": str(number), "text": row[key]}) for number, row in enumerate(rows)]
        (beir / f"{name}.jsonl").write_text("\n".join(texts))
    qrels = "".join(f"{number}\t{number}\t1\n" for number in range(len(rows)))
    (beir / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + qrels)
    stage = {"name": "pairs", "data": [{"path": str(tmp_path / "pairs.jsonl")}], "batch_size": 8, "max_steps": 2}
    recipe["schedule"] |= {"warmup_steps": 1, "decay_steps": 1}
    return {
        "name": "embedding",
        "recipe": {key: recipe[key] for key in recipe if key not in ("name", "init", "curriculum")},
        "models": [network],
        "arms": [{"group": "all", "models": ["tiny"], "curricula": ["clm", "mlm40"], "budgets": [4]}],
        "evaluation": {
            "seeds": 2,
            "random_weights": True,
            "embed": {"recipe": {"stages": [stage], "device": "cpu"}, "data": [str(beir)]},
        },
        "hypotheses": [{"name": "mlm", "says": "MLM embeds better.", "holds": "mlm40 - clm > 0 on embedding"}],
    }


@pytest.mark.slow
@pytest.mark.minutes
def test_which_pretraining_embeds_best(tree: dict[str, Any], tmp_path: Path) -> None:
    plan = plan_study(parse_config(Study, tree, origin="test"))
    place = claim_study_folder(tmp_path / "study", plan.study)
    assert run_study(plan, place, HERE) == []
    state = read_state(plan, place)
    assert [(line["done"], line["total"]) for line in status(state).lines] == [(2, 2), (6, 6)]
    collected = collect_results(plan, state.scores, measure_sizes(plan))
    results, planned = collected.select(setup="objective").results, collected.planned_runs
    assert {(r.arm.objective, r.family, r.dataset, r.metric, r.num) for r in results} == {
        (objective, "EM", "zero-shot:passages", "standard", 2) for objective in ("clm", "mlm")
    }
    assert all(one.num_runs == planned[one.arm.name, one.dataset] == 2 for one in results)
    assert all(one.interval.half_width > 0 and one.examples and not one.examples.read().why_unknown for one in results)
    page, told, *_ = report_study(plan, place, tmp_path / "report", [])
    assert ">passages</button>" in page.read_text() and told.hypotheses and told.hypotheses[0][0].key == "mlm"
    bm25 = 100 * score_bm25(read_judged_set(tmp_path / "passages"))["ndcg_at_10"]
    assert re.search(rf">words alone \(no arm\)<.*>{bm25:.2f}</td></tr>", page.read_text())
    # An archive has no paths of this machine, and so another name of the recipe, which its scores have too.
    archive = bundle_study(state, tmp_path / "study.tar.gz", [])
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path / "unpacked", filter="data")
    unpacked = study(tmp_path / "unpacked" / "study-embedding")
    assert len(read_state(unpacked.planned, unpacked.folder).scored) == 6
    assert unpacked.planned.cells[0].task != plan.cells[0].task
    # What its data hold is known: an arm that is scored anew on another set is not compared with the rest.
    shutil.rmtree(place / "scores" / "tiny-clm-4")
    with open(tmp_path / "pairs.jsonl", "a") as pairs:
        pairs.write('{"anchor": "one more", "positive": "pair of texts"}\n')
    assert run_study(plan, place, HERE) == []
    with pytest.raises(InputError, match="scores on zero-shot:passages were made with different data"):
        collect_results(plan, read_state(plan, place).scores, measure_sizes(plan))
    # Another recipe is another family of scores; keys that the study decides are refused.
    embed = tree["evaluation"]["embed"]
    embed["recipe"]["stages"][0]["max_steps"] = 3
    other = plan_study(parse_config(Study, tree, origin="test"))
    assert not read_state(other, place).scored
    embed["recipe"]["seed"] = 1
    with pytest.raises(InputError, match="'seed' follows from the study"):
        plan_study(parse_config(Study, tree, origin="test"))


def test_what_embedding_costs_is_counted_where_it_can_be(tree: dict[str, Any], tmp_path: Path) -> None:
    first = tree["evaluation"]["embed"]["recipe"]["stages"][0]
    texts = {"name": "texts", "data": [{"from_text": "corpus/", "limit": 100, "weight": 0.5}], "batch_size": 20}
    pairs = 300
    limited = first["data"][0] | {"limit": pairs}
    for stages, counted in (
        ([first], (2, 16, [])),  # 2 steps of 8
        (
            [first | {"max_steps": None, "epochs": 3, "data": [limited]}, texts],
            (math.ceil(3 * pairs / 8) + 3, 3 * pairs + 50, []),
        ),
        ([first, texts | {"data": [{"from_text": "corpus/"}]}], (2 + 1000, 16 + 1000 * 20, ["texts"])),
    ):
        tree["evaluation"]["embed"]["recipe"]["stages"] = stages
        plan = plan_study(parse_config(Study, tree, origin="test"))
        assert plan.study.evaluation and plan.study.evaluation.embed
        assert count_embedded(plan.study.evaluation.embed) == counted
        guess = "embedding: 1,000 updates in texts, without max_steps or limits of data"
        assert (guess in estimate(plan).assumptions) == bool(counted[2])
        cell = cell_costs(plan, measure_sizes(plan))
        assert next(cell)[:2] == (counted[0], counted[1] * 120)


def test_mistakes_in_its_recipe_are_told_before_anything_trains(tree: dict[str, Any], tmp_path: Path) -> None:
    recipe = tree["evaluation"]["embed"]["recipe"]
    stage = recipe["stages"][0]
    missing = str(tmp_path / "missing")
    for change in ({"data": [{"path": missing}]}, {"loss": "distill", "teacher": missing}):
        recipe["stages"] = [stage | change]
        plan = plan_study(parse_config(Study, tree, origin="test"))
        with pytest.raises(InputError, match=f"{missing}(: there is no such folder| does not exist)"):
            look_for_data(plan, {cell.training for cell in plan.cells})
    tree["evaluation"]["embed"]["recipe"] = recipe | {"stages": [stage], "lora": {"r": 2}}
    with pytest.raises(InputError, match="lora: adapters would leave random weights as they are"):
        plan_study(parse_config(Study, tree, origin="test"))


def test_scores_on_scored_pairs_count(tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the metric of a regression, but not its protocol. Only the training is made up."""
    rows = [{"sentence1": f"a {index}", "sentence2": f"b {index}", "score": float(index)} for index in range(4)]
    (tmp_path / "sts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree["evaluation"]["embed"]["data"] = [str(tmp_path / "sts.jsonl")]
    plan = plan_study(parse_config(Study, tree, origin="test"))
    model = SimpleNamespace(hash="a" * 64, max_length=2048)
    judged = [{"id": str(index), "gold": row["score"], "predicted": 0.1 * index} for index, row in enumerate(rows)]
    monkeypatch.setattr(training, "identify", lambda name: model)
    monkeypatch.setattr(training, "refuse_replaced", lambda model: None)
    monkeypatch.setattr(training, "train_embedder", lambda recipe, runs: (runs, {"stages": [], "seconds": 1.0}))
    monkeypatch.setattr(training.embedders, "load_embedder", lambda folder: None)
    monkeypatch.setattr(worker, "reach_step", lambda *_: "made up")
    monkeypatch.setattr(StudyState, "identify", lambda state, run, step: (model.hash, model.max_length))
    runs = {model.name: plan.runs[model.run] for model in plan.models}
    assert plan.study.evaluation is not None

    def score(embedder: Any, dataset: Any) -> Any:
        with pytest.raises(BusyError, match=f"^another process works on {cell.name}$"):  # also after the training
            worker.score_unit(cell, runs[cell.model], 4, tmp_path, plan.study.evaluation)
        return {"spearman": 1.0}, judged

    monkeypatch.setattr(training, "score_embedder", score)
    for cell in plan.cells:
        worker.score_unit(cell, runs[cell.model], 4, tmp_path, plan.study.evaluation)
    state = read_state(plan, tmp_path)
    assert state.scored == {cell.name for cell in plan.cells}
    results = collect_results(plan, state.scores, measure_sizes(plan)).results
    assert {(one.dataset, one.measure) for one in results} == {("zero-shot:sts", "spearman")}


def test_tests_of_one_file_share_its_training(tree: dict[str, Any], tmp_path: Path) -> None:
    """Their data is that of the task."""
    file = tmp_path / "nli.yaml"
    files = [{"train": "train.tsv", "test": {"de": "de.tsv", "fr": "fr.tsv"}}]
    keys = {"name": "nli", "family": "sequence_classification", "metric": "accuracy", "template": "{text}"}
    file.write_text(json.dumps({**keys, "classes": ["a", "b"], "files": files}))
    tests = (f"{file}:de", f"{file}:fr")
    evaluation = Evaluation(tasks=(*tests, "snli"), learning_rates=(1e-4,), seeds=(0,))
    assert trainings(evaluation) == {str(file): tests, "snli": ("snli",)}
    assert scored_as(str(file)) == "nli"
    for split in ("train", "de", "fr"):
        (tmp_path / f"{split}.tsv").write_text("text\tlabel\n")
    tree["evaluation"] |= {"tasks": list(tests), "learning_rates": [1e-4], "data_dirs": {"nli": str(tmp_path)}}
    plan = plan_study(parse_config(Study, tree | {"hypotheses": []}, origin="test"))
    look_for_data(plan, {cell.training for cell in plan.cells})
    assert {cell.evaluates for cell in plan.cells} == {tests, ("zero-shot:passages",)}
