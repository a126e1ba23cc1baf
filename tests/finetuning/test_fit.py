import itertools
import json
import math
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from transformers import get_linear_schedule_with_warmup

from biphase.encoder.models import Encoder, identify
from biphase.errors import InputError
from biphase.files import locked
from biphase.finetuning import encoding, fit
from biphase.finetuning.config import PROTOCOL, FinetuneConfig, plan_cell, plan_cells, resolve_precision
from biphase.finetuning.encoding import CellContext
from biphase.finetuning.encoding_cache import load_encoded
from biphase.finetuning.fit import (
    fit_cells,
    train_network,
)
from biphase.finetuning.heads import build_network, load_encoder
from biphase.finetuning.scores import Score, read_examples, read_score, read_scores
from biphase.tasks.sources import find_task_sources
from biphase.tasks.spec import EVALUATED_SPLITS, TaskSplit, find_task, task_table
from biphase.tasks.splits import draw_indices

from .conftest import fit_cell, make_cell, predict_split, write_jsonl

ONE_PER_FAMILY = ("snli", "wnut17", "squad_v2", "squad_retrieval")
Dirs = dict[str, Path]


def encoded_for(encoder: Encoder, cell: CellContext, data_dirs: Dirs) -> dict[TaskSplit, Any]:
    return load_encoded(find_task_sources(cell.task.name, data_dirs)[0], encoder, cell.config)[0]


def fresh(encoder: Encoder, cell: CellContext) -> torch.nn.Module:
    torch.manual_seed(0)
    return build_network(encoder, cell, [])


def fit_quickly(model_folder: Path, task: str, data_dirs: Dirs, out: Path | None = None, **settings: object) -> Score:
    return fit_cell(str(model_folder), task, make_cell(task, **settings).config, out, data_dirs[task])


def test_learning_rate_at_every_step() -> None:
    def shares(warmup_ratio: float, num_steps: int) -> list[float]:
        schedule = FinetuneConfig(warmup_ratio=warmup_ratio).schedule(num_steps)
        return [schedule.share_of_peak(step, num_steps) for step in range(num_steps)]

    assert shares(0.2, 10) == pytest.approx([1 / 2, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])
    assert shares(0, 2) == [1, 1 / 2]
    assert shares(1, 4)[-1] == 1
    assert shares(0.1, 1) == [1]


def test_decay_is_that_of_transformers() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=5e-5)
    theirs = get_linear_schedule_with_warmup(optimizer, 100, 1000)
    ours = FinetuneConfig().schedule(1000)
    for step in range(1000):
        ahead = step if step >= 100 else step + 1
        assert ours.share_of_peak(step, 1000) == pytest.approx(theirs.lr_lambdas[0](ahead))


@pytest.mark.parametrize("head", ["span", "token"])
@pytest.mark.parametrize("task", ONE_PER_FAMILY)
def test_packed_evaluation_equals_one_by_one(encoder: Encoder, data_dirs: Dirs, task: str, head: str) -> None:
    cell = make_cell(task, qa_head=head)
    split = encoded_for(encoder, cell, data_dirs)["test"]
    model = fresh(encoder, cell)
    alone = make_cell(task, qa_head=head, microbatch_tokens=1)
    packed, single = (predict_split(model, split, each) for each in (cell, alone))
    (metrics, rows), (others, expected) = (split.judge(predicted, cell) for predicted in (packed, single))
    assert metrics == pytest.approx(others)
    for ours, theirs in zip(rows, expected, strict=True):
        assert ours["id"] == theirs["id"] and ours.get("score") == pytest.approx(theirs.get("score"))


@pytest.mark.parametrize(
    ("task", "settings", "reached"),
    [
        ("snli", {}, 1.0),
        ("wnut17", {}, 1.0),
        pytest.param("squad_v2", {"epochs": 60}, 0.9, marks=[pytest.mark.slow, pytest.mark.minutes]),
        pytest.param(
            "squad_v2", {"epochs": 100, "qa_head": "token"}, 0.9, marks=[pytest.mark.slow, pytest.mark.minutes]
        ),
        pytest.param("squad_retrieval", {}, None, marks=[pytest.mark.slow, pytest.mark.minutes]),
    ],
)
def test_overfits_a_few_examples(
    encoder: Encoder, data_dirs: Dirs, task: str, settings: dict, reached: float | None
) -> None:
    given = {"epochs": 40, "learning_rate": 5e-3, "head_dropout": 0.0, "weight_decay": 0.0}
    cell = make_cell(task, **given | settings)
    encoded = encoded_for(encoder, cell, data_dirs)
    model = fresh(encoder, cell)
    losses, training = train_network(model, encoded["train"], cell)
    assert training["final_loss"] < 0.1 < losses[0]
    split = encoded["train"]
    if task == "squad_v2":
        split = replace(split, contexts=contexts_of(encoder, split))
    if reached is not None:
        scores = split.judge(predict_split(model, split, cell), cell)[0]
        assert scores[cell.task.metric] >= reached


def contexts_of(encoder: Encoder, split: Any) -> list[str]:
    """The contexts of a train split, which are not kept, out of its tokens."""
    bounds = split.texts.bounds_S1
    texts = [
        encoder.tokenizer.pretrained.decode(split.texts.tokens_T[a : b - 1]) for a, b in itertools.pairwise(bounds)
    ]
    return [text.partition("\nContext: ")[2] for text in texts]


@pytest.mark.parametrize("task", ONE_PER_FAMILY)
def test_same_cell_twice_is_the_same_to_the_last_bit(model_folder: Path, data_dirs: Dirs, task: str) -> None:
    first, second = (fit_quickly(model_folder, task, data_dirs) for _ in range(2))
    assert first.final_loss == second.final_loss is not None
    assert first.metrics == second.metrics and first.metrics["test"][first.metric] >= 0
    other = fit_quickly(model_folder, task, data_dirs, seed=1)
    assert other.final_loss != first.final_loss and other.cell != first.cell


def test_a_cell_leaves_the_shared_encoder_alone(model_folder: Path, data_dirs: Dirs) -> None:
    shared = load_encoder(str(model_folder))
    before = {name: value.clone() for name, value in shared.backbone.state_dict().items()}
    state = torch.get_rng_state()
    fit_quickly(model_folder, "snli", data_dirs)
    assert load_encoder(str(model_folder)) is shared
    assert all(torch.equal(before[name], value) for name, value in shared.backbone.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("task", ONE_PER_FAMILY)
def test_folder_of_a_cell(
    model_folder: Path, data_dirs: Dirs, tmp_path: Path, capsys: pytest.CaptureFixture, task: str
) -> None:
    score = fit_quickly(model_folder, task, data_dirs, tmp_path, keep_texts=True)
    assert score.folder == tmp_path / f"{task}-{score.cell[:16]}"
    files = ["losses.json", "score.json", "test.jsonl", "test.npz", "validation.jsonl", "validation.npz"]
    assert sorted(file.name for file in score.folder.iterdir()) == files
    assert read_score(score.folder) == score
    assert len(json.loads((score.folder / "losses.json").read_text())) == score.num_steps
    rows = [json.loads(line) for line in (score.folder / "test.jsonl").read_text().splitlines()]
    assert len(rows) == score.num_examples["test"] == len({row["id"] for row in rows})
    inputs = [row["input"] for row in rows]
    assert all(inputs) and (task != "wnut17" or [*map(len, inputs)] == [len(row["gold"]) for row in rows])
    if task == "wnut17":
        right = [gold == found for row in rows for gold, found in zip(row["gold"], row["predicted"], strict=True)]
        assert score.metrics["test"]["accuracy"] == pytest.approx(np.mean(right))
    else:
        assert score.metrics["test"][score.metric] == pytest.approx(np.mean([row["score"] for row in rows]))
    again = fit_quickly(model_folder, task, data_dirs, tmp_path)
    assert again == score and again.seconds == score.seconds


def test_two_processes_do_not_make_the_same_cell(model_folder: Path, data_dirs: Dirs, tmp_path: Path) -> None:
    config = resolve_precision(make_cell("snli").config)
    plan = plan_cell(identify(str(model_folder)), *find_task_sources("snli", data_dirs), config)
    claim = tmp_path / ".locks" / plan.folder(tmp_path).name
    with locked(claim), pytest.raises(InputError, match="made by another process"):
        fit_quickly(model_folder, "snli", data_dirs, tmp_path)
    assert fit_quickly(model_folder, "snli", data_dirs, tmp_path).folder == plan.folder(tmp_path)


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_are_replaced_under_a_cell_make_none(
    frozen: bool, model_folder: Path, data_dirs: Dirs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place, so that what is mapped changes. Nothing that was made of them is used later."""
    folder = shutil.copytree(model_folder, tmp_path / "model")
    file = folder / "model.safetensors"
    written, build = file.read_bytes(), fit.build_network

    def replace_weights(*arguments: Any) -> Any:
        with open(file, "r+b") as opened:
            opened.seek(len(written) // 2)
            opened.write(written[: len(written) // 4])
        return build(*arguments)

    monkeypatch.setattr(fit, "build_network", replace_weights)
    settings = {"frozen": frozen} if frozen else {}
    with pytest.raises(InputError, match="were replaced while a cell was computed with them"):
        fit_quickly(folder, "snli", data_dirs, tmp_path / "scores", **settings)
    assert not [*(tmp_path / "scores").glob("*/score.json")]
    monkeypatch.undo()
    file.write_bytes(written)
    score, clean = (fit_quickly(place, "snli", data_dirs, **settings) for place in (folder, model_folder))
    assert (score.cell, score.metrics, score.final_loss) == (clean.cell, clean.metrics, clean.final_loss)


def name_of(model: str, task: str, data_dirs: Dirs, **settings: object) -> str:
    config = resolve_precision(make_cell(task, **settings).config)
    return plan_cell(identify(model), *find_task_sources(task, data_dirs), config).hash


def test_the_name_of_a_cell_follows_bm25_only_if_it_finds_candidates(
    model_folder: Path, data_dirs: Dirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = set[str]()
    for version in (3, 4):
        monkeypatch.setattr("biphase.finetuning.config.BM25_VERSION", version)
        names |= {
            name_of(str(model_folder), "squad_retrieval", data_dirs, ranking=by) for by in ("embeddings", "pairs")
        }
    assert len(names) == 3


def test_the_name_of_a_cell(model_folder: Path, data_dirs: Dirs, tmp_path: Path) -> None:
    model = str(model_folder)
    name = name_of(model, "snli", data_dirs)
    elsewhere, copied = tmp_path / "data", tmp_path / "model"
    shutil.copytree(data_dirs["snli"], elsewhere)
    shutil.copytree(model_folder, copied)
    assert name_of(str(copied), "snli", {"snli": elsewhere}) == name
    irrelevant = ({"microbatch_tokens": 7}, {"qa_head": "token"}, {"scale": 5.0}, {"head_dropout": 0.5})
    for settings in (*irrelevant, {"max_length": 9999}):  # the network has 256 positions
        assert name_of(model, "snli", data_dirs, **settings) == name
    changes = (
        {"seed": 1},
        {"learning_rate": 1e-3},
        {"weights": "random"},
        {"max_length": 20},
        {"weight_dtype": "bf16"},
    )
    for change in changes:
        assert name_of(model, "snli", data_dirs, **change) != name
    assert name_of(model, "snli", {}) != name
    questions = [name_of(model, "squad_v2", data_dirs, qa_head=head) for head in ("span", "token")]
    assert questions[0] != questions[1]
    tokenizer = json.loads((copied / "tokenizer.json").read_text())
    (copied / "tokenizer.json").write_text(json.dumps(tokenizer | {"version": "1.0 "}))
    assert name_of(str(copied), "snli", data_dirs) != name


@pytest.mark.parametrize(
    ("task", "metric"),
    [
        (task, metric)
        for task in ONE_PER_FAMILY
        for metric in find_task(task).kind.metrics
        if (task, metric) != ("wnut17", "macro_f1")  # for tags that are no entities: test_kinds.py
    ],
)
def test_predictions_say_what_each_example_contributes(
    model_folder: Path, data_dirs: Dirs, tmp_path: Path, task: str, metric: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To any metric that may choose a rate; `read_examples` compares with the score itself."""
    found, folder = find_task(task), data_dirs[task]
    changes: dict[str, object] = {"metric": metric}
    if (found.family, metric) == ("sequence_classification", "f1"):
        changes["classes"], folder = found.classes[:2], tmp_path
        for path in data_dirs[task].iterdir():
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            write_jsonl(tmp_path / path.name, [row | {"label": row["label"] % 2} for row in rows])
    monkeypatch.setitem(task_table(), task, found.model_copy(update=changes))
    score = fit_quickly(model_folder, task, {task: folder}, tmp_path / "scores", epochs=4)
    for split in EVALUATED_SPLITS:
        assert read_examples(score, split).values_SN.shape[1] == score.num_examples[split]


def test_a_score_has_the_configuration_that_decided_it(model_folder: Path, data_dirs: Dirs) -> None:
    plain = fit_quickly(model_folder, "snli", data_dirs)
    odd = fit_quickly(model_folder, "snli", data_dirs, max_length=9999, qa_head="token", scale=5.0)
    assert odd.config == plain.config and odd.cell == plain.cell
    assert (odd.config.max_length, odd.config.qa_head, odd.config.device) == (256, "span", "cpu")
    assert odd.classes == ("entailment", "neutral", "contradiction") and odd.protocol == PROTOCOL


def test_a_training_is_tracked(model_folder: Path, data_dirs: Dirs, tmp_path: Path) -> None:
    """TensorBoard has the loss of every step and validation's scores; the cell is the same as without."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    plain = fit_quickly(model_folder, "snli", data_dirs, tmp_path / "plain")
    score = fit_quickly(model_folder, "snli", data_dirs, tmp_path / "out", tracking="tensorboard")
    assert score.cell == plain.cell and score.metrics == plain.metrics and score.folder
    [folder] = (tmp_path / "out" / "tracking").glob(f"*-snli-lr*-seed0-{score.cell[:8]}/tensorboard")
    events = reader.EventAccumulator(str(folder))
    events.Reload()
    losses = json.loads((score.folder / "losses.json").read_text())
    assert [event.value for event in events.Scalars("train/snli_loss")] == pytest.approx(losses, rel=1e-6)
    [accuracy] = events.Scalars("eval/snli_accuracy")
    assert (accuracy.step, accuracy.value) == (score.num_steps, pytest.approx(score.metrics["validation"]["accuracy"]))
    assert not (tmp_path / "plain" / "tracking").exists()
    assert [read.cell for read in read_scores(tmp_path / "out").scores] == [score.cell]


def test_one_training_for_several_tasks(
    model_folder: Path, data_dirs: Dirs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NQ is evaluated on the model that was trained on MS MARCO."""
    folders = {"msmarco": tmp_path / "msmarco", "nq": data_dirs["squad_retrieval"]}
    shutil.copytree(data_dirs["squad_retrieval"], folders["msmarco"])
    judged = folders["msmarco"] / "qrels"
    (judged / "dev.tsv").write_text("".join((judged / "test.tsv").read_text().splitlines(keepends=True)[:-1]))
    calls = []
    monkeypatch.setattr(fit, "train_network", lambda *given: calls.append(1) or train_network(*given))
    config = make_cell("msmarco").config

    def fit_tasks(tasks: list[str], out: Path | None = None) -> list[Score]:
        with TemporaryDirectory() as folder:
            return fit_cells(plan_cells(str(model_folder), tasks, config, folders), out or Path(folder))

    both = fit_tasks(["msmarco", "nq"], tmp_path / "scores")
    assert len(calls) == 1 and [score.task for score in both] == ["msmarco", "nq"]
    assert {score.trained_on for score in both} == {"msmarco"}
    assert both[0].final_loss == both[1].final_loss and both[0].metrics != both[1].metrics
    alone = fit_tasks(["nq"])[0]
    assert alone.metrics == both[1].metrics and alone.cell == both[1].cell
    turned = fit_tasks(["nq", "msmarco"])
    assert [score.metrics for score in turned] == [both[1].metrics, both[0].metrics]
    calls.pop()
    fit_tasks(["msmarco", "nq"], tmp_path / "scores")
    assert len(calls) == 2


def test_a_last_update_that_breaks_the_weights_is_divergence(model_folder: Path, data_dirs: Dirs) -> None:
    for task in ONE_PER_FAMILY:
        score = fit_quickly(model_folder, task, data_dirs, max_steps=1, learning_rate=1e38, warmup_ratio=0.0)
        assert score.diverged and score.diverged_at_step == 0 and score.metrics == {}


def test_a_folder_without_a_tokenizer(model_folder: Path, data_dirs: Dirs, tmp_path: Path) -> None:
    shutil.copytree(model_folder, tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").unlink()
    with pytest.raises(InputError, match="has no tokenizer files"):
        fit_quickly(tmp_path / "bare", "snli", data_dirs)
    with pytest.raises(InputError, match="leaves no room for text"):
        fit_quickly(model_folder, "squad_v2", data_dirs, max_length=2)


def test_divergence_is_a_result(model_folder: Path, data_dirs: Dirs, tmp_path: Path) -> None:
    settings = {"learning_rate": 1e30, "warmup_ratio": 0.0}
    score = fit_quickly(model_folder, "snli", data_dirs, tmp_path, **settings)
    assert score.diverged and score.metrics == {} and score.final_loss is None
    assert score.folder is not None
    losses = json.loads((score.folder / "losses.json").read_text())
    assert score.diverged_at_step == len(losses) < score.num_steps
    assert all(math.isfinite(loss) for loss in losses)
    assert fit_quickly(model_folder, "snli", data_dirs, tmp_path, **settings) == score
    assert "diverged at step" in score.headline()


def test_without_memory_the_key_is_named(model_folder: Path, data_dirs: Dirs, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(fit, "train_network", train)
    with pytest.raises(InputError, match=r"Tried to allocate 2.00 GiB\): lower microbatch_tokens"):
        fit_quickly(model_folder, "snli", data_dirs)


def test_random_weights_are_the_same_network_without_its_training(encoder: Encoder) -> None:
    cell = make_cell("snli", weights="random")
    built = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        built.append(build_network(encoder, cell, []).backbone.state_dict())
    pretrained = encoder.backbone.state_dict()
    name = next(name for name in pretrained if "q_proj" in name)
    assert {key: value.shape for key, value in built[0].items()} == {key: v.shape for key, v in pretrained.items()}
    assert torch.equal(built[0][name], built[1][name])
    assert not torch.equal(built[0][name], built[2][name])
    assert not torch.equal(built[0][name], pretrained[name])


@pytest.mark.parametrize("task", ONE_PER_FAMILY[:3])
def test_microbatches_leave_the_gradient_unchanged(encoder: Encoder, data_dirs: Dirs, task: str) -> None:
    results = []
    for budget in (65_536, 40):
        cell = make_cell(task, microbatch_tokens=budget, head_dropout=0.0)
        model = fresh(encoder, cell)
        split, items = encoded_for(encoder, cell, data_dirs)["train"], np.arange(9)
        loss = split.accumulate_gradients(model, items, split.pack_items(items, cell), cell)
        results.append((loss, [parameter.grad.clone() for parameter in model.parameters()]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-6)


def test_batches_are_packed_in_a_thread_that_ends_with_the_training(
    encoder: Encoder, data_dirs: Dirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if an error ends the training, which comes out as it is: of the packing, or of a step."""
    packers: list[threading.Thread] = []
    cell = make_cell("snli")
    split, pack = encoded_for(encoder, cell, data_dirs)["train"], encoding.pack

    def watched(*args: Any) -> Any:
        packers.append(threading.current_thread())
        if len(packers) == 4:
            raise InputError("a batch cannot be packed")
        return pack(*args)

    monkeypatch.setattr(encoding, "pack", watched)
    with pytest.raises(InputError, match=r"^a batch cannot be packed$") as told:
        train_network(fresh(encoder, cell), split, cell)
    assert len(packers) == 4 and len({*packers}) == 1 and threading.main_thread() not in packers
    assert told.traceback and not packers[0].is_alive()
    network = fresh(encoder, cell)
    network.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt) as stopped:
        train_network(network, split, cell)
    assert stopped.traceback and packers[-1] is not packers[0] and not packers[-1].is_alive()


def stop(*_: Any) -> None:
    raise KeyboardInterrupt


def test_training_on_a_subset(encoder: Encoder, data_dirs: Dirs) -> None:
    chosen = draw_indices(100, 10)
    assert len(set(chosen)) == 10 and (np.diff(chosen) > 0).all()
    assert (draw_indices(7, 10) == np.arange(7)).all()
    cell = make_cell("snli", max_train_examples=9, epochs=1)
    _, training = train_network(build_network(encoder, cell, []), encoded_for(encoder, cell, data_dirs)["train"], cell)
    assert training["num_steps"] == 2


def test_a_subset_of_questions_has_all_their_windows(encoder: Encoder, data_dirs: Dirs) -> None:
    cell = make_cell("squad_v2", max_train_examples=5, max_length=32, doc_stride=4, epochs=1, batch_size=1)
    encoded = encoded_for(encoder, cell, data_dirs)
    split = encoded["train"]
    questions = draw_indices(split.num_examples, 5)
    windows = split.items_of(questions)
    assert len(windows) > 5 and set(split.questions_W[windows]) == set(questions)
    assert len(windows) == np.isin(split.questions_W, questions).sum()
    assert train_network(fresh(encoder, cell), split, cell)[1]["num_steps"] == len(windows)


def test_bf16_arithmetic_keeps_fp32_weights(encoder: Encoder, data_dirs: Dirs) -> None:
    losses = {}
    for dtype in (torch.bfloat16, torch.float32):
        cell = make_cell("wnut17", dtype)
        model = fresh(encoder, cell)
        losses[dtype] = train_network(model, encoded_for(encoder, cell, data_dirs)["train"], cell)[0]
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert losses[torch.bfloat16] == pytest.approx(losses[torch.float32], rel=0.05)
    assert losses[torch.bfloat16] != losses[torch.float32]


@pytest.mark.parametrize("task", ONE_PER_FAMILY)
def test_bf16_weights_lose_small_updates(encoder: Encoder, data_dirs: Dirs, task: str) -> None:
    """The paper's confounder: at a low rate most weights do not move at all."""
    unmoved = {}
    for kind in ("bf16", "fp32"):
        dtype = torch.bfloat16 if kind == "bf16" else torch.float32
        cell = make_cell(task, dtype, weight_dtype=kind, learning_rate=1e-6, epochs=1)
        model = fresh(encoder, cell)
        before = {name: value.clone() for name, value in model.named_parameters() if "proj" in name}
        assert train_network(model, encoded_for(encoder, cell, data_dirs)["train"], cell)[1]["diverged"] is False
        after = dict(model.named_parameters())
        unmoved[kind] = np.mean([(before[name] == after[name]).float().mean().item() for name in before])
    assert unmoved["bf16"] > 0.5 > 0.2 > unmoved["fp32"]


def test_long_inputs_are_cut_and_counted(model_folder: Path, data_dirs: Dirs, capsys: pytest.CaptureFixture) -> None:
    score = fit_quickly(model_folder, "wnut17", data_dirs, max_length=5)
    assert 0 < score.num_truncated["test"] <= 23
    assert "cut at 5 tokens" in capsys.readouterr().err
    assert {"precision", "recall", "f1", "strict_f1", "accuracy", "paper_f1"} == score.metrics["test"].keys()


def test_bad_models(tmp_path: Path, model_folder: Path) -> None:
    with pytest.raises(InputError, match="has no config"):
        fit_cell(str(tmp_path), "snli", FinetuneConfig())
    with pytest.raises(InputError, match="neither a run, nor a folder, nor a Hub id"):
        fit_cell("/no/such/folder", "snli", FinetuneConfig())
    shutil.copy(model_folder / "config.json", tmp_path)
    with pytest.raises(InputError, match="has no weights"):
        fit_cell(str(tmp_path), "snli", FinetuneConfig())
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(InputError, match="has no weights"):
        fit_cell(str(tmp_path), "snli", FinetuneConfig())


def test_unknown_task_and_setting(model_folder: Path) -> None:
    with pytest.raises(InputError, match=r"did you mean 'snli'\?"):
        fit_cell(str(model_folder), "snl", FinetuneConfig())
    with pytest.raises(ValueError, match="Extra inputs"):
        FinetuneConfig.model_validate({"lr": 1})


def test_headline_names_what_counts(model_folder: Path, data_dirs: Dirs) -> None:
    score = fit_quickly(model_folder, "snli", data_dirs)
    line = score.headline()
    assert "accuracy validation" in line and "tokens/s" in line and "seed 0" in line
    assert f"({score.num_steps} steps, 2 epochs, " in line
    whole = score.config.model_copy(update={"max_steps": score.num_steps})
    assert f"({score.num_steps} steps, " in (line := score.model_copy(update={"config": whole}).headline())
    assert "epoch" not in line
