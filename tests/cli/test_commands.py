"""`biphase evaluate` from the command line's words to its table, and the demo from end to end."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import biphase.api.finetuning as verbs
import biphase.cli.app as cli
from biphase.cli.commands import demo, finetune
from biphase.cli.show import parse_data_dirs, parse_seeds
from biphase.config import parse_config
from biphase.corpus.tokenizer import train_tokenizer
from biphase.encoder.network import TokenIds, make_model
from biphase.errors import InputError
from biphase.files import write_mark
from biphase.finetuning.config import FinetuneConfig, plan_cells
from biphase.finetuning.grid import keep_best_networks
from biphase.tasks.sources import name_data_dirs

NOUNS = ["dog", "cat", "boy", "girl", "tree", "house"]
SHAPE = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny encoders, `a` and `b`."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = train_tokenizer([f"the {a} sees a {b} ." for a in NOUNS for b in NOUNS], 290)
    ids = TokenIds(len(tokenizer), tokenizer.mask_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, None)
    for seed, name in enumerate("ab"):
        shape = SHAPE | {"num_key_value_heads": 2}
        make_model("1m", shape, ids, max_len=64, seed=seed).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    rows = [{"tokens": [a, b], "ner_tags": ["B-location", "O"]} for a in NOUNS for b in NOUNS]
    for split in ("train", "validation", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        rows = rows[1:]
    return folder


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: Path, tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.setattr(cli, "prepare_process", lambda: None)

    def run(*arguments: object, data: Path = words) -> tuple[int, str, str]:
        grid = ["--tasks", "wnut17", "--learning-rates", "1e-3,3e-3", "--seeds", "0-1", "--workers", "0"]
        common = [*grid, "--data-dir", f"wnut17={data}", "--out", str(tmp_path / "scores")]
        monkeypatch.setattr(sys, "argv", ["biphase", "evaluate", *map(str, arguments), *common])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    return run


def test_a_grid_its_summary_and_a_comparison(call: Any, models: Path) -> None:
    code, out, err = call(models / "a", models / "b", "batch_size=8", "device=cpu", "--dry-run")
    assert code == 0 and "their tasks have no finished cell" in out and "4" in out
    code, out, err = call(models / "a", models / "b", "batch_size=8", "device=cpu")
    assert code == 0 and "8 cells, 0 of them finished" in err
    assert "wnut17" in out and "±" in out
    headlines = [line for line in (out + err).splitlines() if "steps, " in line]
    assert len(headlines) == len(set(headlines)) == 8
    code, out, err = call(models / "a", models / "b", "batch_size=8", "device=cpu", "--compare", "a", "b")
    assert code == 0 and "8 cells, 8 of them finished" in err
    assert "wnut17 (f1)" in out
    code, out, err = call(models / "a", models / "b", "batch_size=8", "device=cpu", "--dry-run")
    assert "seconds of one worker: 0s\n" in out and "unknown trainings: 0\n" in out and code == 0


def test_the_best_of_each_task_is_kept(
    call: Any, models: Path, words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept"
    code, _, err = call(models / "a", "batch_size=8", "device=cpu", "--keep", kept)
    assert code == 0, err
    scores = [json.loads(file.read_text()) for file in (tmp_path / "scores").glob("*/score.json")]
    by_rate: dict[float, list[dict[str, Any]]] = {}
    for score in scores:
        by_rate.setdefault(score["config"]["learning_rate"], []).append(score)
    value = lambda score: score["metrics"]["validation"]["f1"]  # noqa: E731
    rate = max(by_rate, key=lambda rate: (sum(map(value, by_rate[rate])), -rate))
    record = json.loads((kept / "a-wnut17" / "biphase.json").read_text())
    assert record["config"]["learning_rate"] == rate
    best = max(map(value, by_rate[rate]))
    assert value(next(s for s in by_rate[rate] if s["config"]["seed"] == record["config"]["seed"])) == best
    assert (kept / "a-wnut17" / "model.safetensors").exists()
    # The same call goes on: the best stays, a network of another of the cells is replaced, one of another grid stays,
    # which may be better, and a foreign folder is refused. The last two are refused before anything trains.
    weights = kept / "a-wnut17" / "model.safetensors"
    stamp = weights.stat().st_mtime_ns
    code, _, err = call(models / "a", "batch_size=8", "device=cpu", "--keep", kept)
    assert code == 0 and "a-wnut17: already holds the best network" in err and weights.stat().st_mtime_ns == stamp
    again = (models / "a", models / "b", "batch_size=8", "device=cpu", "--keep", kept)
    other = "a-wnut17 holds a network of other settings or data"
    for cell in ("another", ""):
        (kept / "a-wnut17" / "biphase.json").write_text(json.dumps(record | {"cell": cell}))
        code, _, err = call(*again)
        assert code == 2 and f"{other}: give --keep another folder, or remove it" in err
    assert weights.stat().st_mtime_ns == stamp and len([*(tmp_path / "scores").glob("*/score.json")]) == 4
    cells = plan_cells(str(models / "a"), ["wnut17"], FinetuneConfig(**scores[0]["config"]), {"wnut17": words})
    keep_best_networks({kept / "a-wnut17": cells}, tmp_path / "scores")
    assert "a-wnut17: not replaced, it holds a network of other" in capsys.readouterr().err, "kept there meanwhile"
    changed = record | {"cell": next(score["cell"] for score in scores if score["cell"] != record["cell"])}
    (kept / "a-wnut17" / "biphase.json").write_text(json.dumps(changed))
    write_mark(kept / "a-wnut17", "fine-tuned model")
    code, _, err = call(models / "a", "batch_size=8", "device=cpu", "--keep", kept)
    assert code == 0 and "a-wnut17: kept, learning rate" in err and weights.stat().st_mtime_ns > stamp
    assert json.loads((kept / "a-wnut17" / "biphase.json").read_text()) == record
    (kept / "b-wnut17").mkdir()
    (kept / "b-wnut17" / "notes.txt").touch()
    code, _, err = call(*again)
    assert code == 2 and "b-wnut17 is not an empty folder" in err
    assert len(list((tmp_path / "scores").glob("*/score.json"))) == 4
    # Nothing is chosen from a part of the cells.
    place = tmp_path / "fewer" / "a-wnut17"
    [cell] = plan_cells(
        str(models / "a"), ["wnut17"], FinetuneConfig(learning_rate=9e-3, device="cpu"), {"wnut17": words}
    )
    keep_best_networks({place: [cell]}, tmp_path / "scores")
    assert f"a-wnut17: not kept, 1 of 1 cells of {models / 'a'} on wnut17 are missing" in capsys.readouterr().err
    assert not place.exists()
    code, _, err = call("--keep", kept)
    assert code == 2 and "--keep needs a model to fine-tune, and does not go with --part" in err
    code, _, err = call(models / "a", "--engine", "ray", "--keep", kept)
    assert (
        code == 2
        and "--keep would train on this machine, not on the cluster: run the grid without --keep first;" in err
    )
    assert "the same command without --engine and with the cells' precision=…" in err


def test_failed_cells_are_exit_code_two(call: Any, models: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    for split in ("train", "validation", "test"):
        (bad / f"{split}.jsonl").write_text(f'{{"tokens": ["{split}"], "ner_tags": ["O", "O"]}}\n')
    code, _, err = call(models / "a", "device=cpu", data=bad)
    assert code == 2 and err.splitlines()[-1].startswith("biphase: ")
    assert "train.jsonl:1: 2 tags for 1 words" in err.splitlines()[-1]
    code, _, err = call(models / "a", "device=cpu")
    assert code == 0 and "4 cells, 0 of them finished" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["batch_size=8"], "name a model too"),
        (["MODEL", "seed=3"], "give --seeds"),
        (["MODEL", "batchsize=8"], "did you mean 'batch_size'?"),
        (["MODEL", "--tasks", "nope"], "unknown task 'nope'"),  # beside the options that all calls have
        (["MODEL", "--seeds", "1-3"], "seed 1 is named twice"),
        (["MODEL", "batch_size=8", "batch_size=9"], "key batch_size is named twice"),
        (["MODEL", "--learning-rates", "3e-3"], "rate 0.003 is named twice"),
        (["MODEL", "--part", "9/3"], "must be NUMBER/TOTAL"),
        (["MODEL", "--data-dir", "wnut17="], "must be TASK=FOLDER"),
        (["MODEL", "--data-dir", "wnut=x"], "--data-dir: unknown task 'wnut'; did you mean 'wnut17'?"),
    ],
)
def test_bad_words(call: Any, models: Path, arguments: list[str], said: str) -> None:
    code, _, err = call(*[str(models / "a") if word == "MODEL" else word for word in arguments])
    assert code == 2 and said in err and err.count("\n") == 1


def test_a_missing_model_is_told_before_data_is_fetched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So is the size of a grid with data of the Hub, and of no other."""
    with pytest.raises(InputError, match="/no/such/model is neither"):
        verbs.evaluate("/no/such/model", "paper", scores=tmp_path, data={"sst2": "."})
    told = " ".join(capsys.readouterr().err.split())
    assert told.startswith("360 trainings (models × tasks × rates × seeds: 1 × 12 × 6 × 5); the data of mnli, qqp, ")
    assert "comes from the Hub; --dry-run shows" in told
    with pytest.raises(InputError, match="/no/such/model is neither"):
        verbs.evaluate("/no/such/model", ["genre", "squad"], scores=tmp_path, data={"squad": "."})
    assert capsys.readouterr().err == ""


def test_a_setting_that_equals_its_default_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a table of the user's own does not get another value instead."""
    given: dict[str, Any] = {}

    def note(**options: Any) -> None:
        given.update(options)
        raise InputError("not run")

    monkeypatch.setattr(verbs, "finetune", note)
    changes = ("load_best_model_at_end=false", "head=paper", "lora.r=4", "class_weights={b: 2, a: 1}")
    with pytest.raises(InputError, match="not run"):
        finetune("model", "snli", *changes)
    settings = {name: given[name] for name in given.keys() & FinetuneConfig.model_fields.keys()}
    assert settings.keys() == {"load_best_model_at_end", "head", "lora", "class_weights"}
    config = parse_config(FinetuneConfig, settings, origin="snli")
    assert config == parse_config(FinetuneConfig, {}, changes, origin="snli")
    assert config.model_fields_set == settings.keys()


def test_words_of_the_options() -> None:
    assert parse_seeds("0-4") == (0, 1, 2, 3, 4) and parse_seeds("7") == (7,) and parse_seeds("0-1, 3") == (0, 1, 3)
    with pytest.raises(InputError, match="0-x: give numbers"):
        parse_seeds("0-x")
    assert len(parse_seeds("5-1004")) == 1000
    with pytest.raises(InputError, match=r"0-1000000000000: give numbers .* of at most 1,000,"):
        parse_seeds("0-1000000000000")
    assert parse_data_dirs(["snli=a=b"], ["snli"]) == [("snli", "a=b")]
    assert parse_data_dirs(["a"], ["snli"]) == [("snli", "a")]
    for tasks in (["snli", "nq"], ["paper"]):
        with pytest.raises(InputError, match="--data-dir a must be TASK=FOLDER"):
            parse_data_dirs(["a"], tasks)


def test_which_tasks_data_is_given_for(tmp_path: Path) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text("{name: own, family: sequence_classification, metric: accuracy, template: '{text}', ")
    with own.open("a") as file:
        file.write("classes: [a, b], files: [{train: a.tsv, test: b.tsv}]}")
    tasks = ["nq", str(own)]

    def named(*pairs: str) -> dict[str, str]:
        return name_data_dirs(parse_data_dirs(pairs, tasks), tasks, "data")

    assert named("own=x", "nq=y", "msmarco=z") == {"own": "x", "nq": "y", "msmarco": "z"}
    assert named(f"{own}=x") == {"own": "x"}
    with pytest.raises(InputError, match=r"unknown task 'snli'; known: msmarco, nq, own"):
        named("snli=x")
    with pytest.raises(InputError, match=r"data: task nq is given two folders, a and b; drop one"):
        named("nq=a", "nq=b")


def test_a_cpu_grid_asks_for_no_gpu(models: Path, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = []
    monkeypatch.setattr(verbs, "run_grid", lambda grid, trainings, engine: engines.append(engine) or [])
    (tmp_path / "scores").mkdir()
    for device in ("cpu", "auto"):
        where = {"scores": tmp_path / "scores", "data": {"wnut17": words}, "engine": "ray", "precision": "fp32"}
        verbs.evaluate(models / "a", "wnut17", learning_rates=[1e-3], seeds=[0], device=device, **where)
    assert [(engine.kind, engine.device) for engine in engines] == [("ray", "cpu"), ("ray", "auto")]


SHORT = (
    "arms.0.budgets=[10]",
    "recipe.schedule={peak_lr: 3e-3, warmup_steps: 2, decay_steps: 2}",
    "recipe.batch_tokens=512",
    "recipe.validation.tokens=2000",
    "evaluation.finetune={eps: 1e-8, batch_size: 8, precision: fp32, max_train_examples: 16, max_eval_examples: 20}",
    "evaluation.per_task={}",
    "evaluation.seeds=2",
)


@pytest.mark.slow
@pytest.mark.minutes
def test_the_whole_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "demo"
    demo(folder, changes=SHORT)
    out = capsys.readouterr().out
    assert all(word in out for word in ("genre", "uner_en_ewt", "1m-40-60-10", "1m-random", "took"))
    assert out.count(": Pretraining pays, whichever way") == out.count(": CLM followed by MLM beats MLM alone") == 1
    assert "before anything was trained" in out
    assert len(list((folder / "study" / "scores").glob("[!.]*/*/score.json"))) == 3 * 2 * 2
    page = (folder / "report" / "index.html").read_text(encoding="utf-8")
    assert "Compared with random weights" in page and "CLM alone is left out" in page
    assert "\nbiphase demo arms.0.budgets=[10]" in page.replace("&#39;", "").replace("'", "")
    assert not any(words in page for words in ("biphase study run", "tokenizer train", str(tmp_path)))
    (encoder,) = folder.glob("encoder-*")
    from transformers import AutoModelForMaskedLM

    assert AutoModelForMaskedLM.from_pretrained(encoder).config.model_type == "eurobert"
