"""`biphase embed`: stages, resume after a kill, the folder that users load, what is refused before anything trains."""

import json
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sentence_transformers")

from datasets import Dataset
from safetensors.torch import load_file, save_file
from scipy.linalg import polar
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Dense, Pooling
from sentence_transformers.util import mine_hard_negatives
from torch import nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, Qwen2Config

import biphase
from biphase.config import parse_config
from biphase.corpus.tokenizer import load_tokenizer
from biphase.embedding import model as encode
from biphase.embedding import training
from biphase.embedding.model import hash_embedder, load_embedder, teach_once, tell_unused_parts, whitened
from biphase.embedding.pairs import read_pairs
from biphase.embedding.recipe import EmbeddingRecipe, HardNegatives, PairSource
from biphase.embedding.training import make_loss, train_embedder
from biphase.encoder import search
from biphase.errors import InputError, StoppedError
from biphase.files import MARK, read_json

from ..conftest import DEVICE, flip_bit, mostly_later, replace_before

Make = Callable[..., EmbeddingRecipe]


@pytest.fixture
def make(encoder_folder: Path, pairs: list[dict[str, str]], tmp_path: Path) -> Make:
    return make_in(tmp_path, encoder_folder, pairs)


@pytest.fixture(scope="module")
def whole(encoder_folder: Path, pairs: list[dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the recipe, trained without a break."""
    folder = tmp_path_factory.mktemp("whole")
    return train_embedder(make_in(folder, encoder_folder, pairs)(), folder / "runs")[0]


def make_in(folder: Path, encoder_folder: Path, pairs: list[dict[str, str]]) -> Make:
    """A recipe of one stage of four steps on pairs of a file, changed by overrides."""
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs), encoding="utf-8")
    tree = {
        "name": "tiny",
        "model": str(encoder_folder),
        "out": str(folder / "out"),
        "max_length": 48,
        "precision": "fp32",
        "device": DEVICE,
        "stages": [
            {
                "name": "pairs",
                "data": [{"path": str(folder / "pairs.jsonl")}],
                "batch_size": 8,
                "max_steps": 4,
                "save_steps": 2,
                "learning_rate": 1e-2,
            }
        ],
    }
    return lambda *overrides: parse_config(EmbeddingRecipe, tree, overrides, origin="test")


class KilledError(Exception):
    pass


def kill_and_go_on(recipe: EmbeddingRecipe, runs: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Train up to the third step, then the rest, to the weights of what was trained `whole`; returns what is told."""
    kill_at_third_step(recipe, runs, monkeypatch)
    return go_on(recipe, runs, whole)


def kill_at_third_step(recipe: EmbeddingRecipe, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(self: Any, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == 3:
            raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(training.StageRun, "on_step_begin", die, raising=False)
        with pytest.raises(KilledError):
            train_embedder(recipe, runs)


def go_on(recipe: EmbeddingRecipe, runs: Path, whole: Path) -> dict[str, Any]:
    """Train the rest, to the weights of what was trained `whole`; returns what is told."""
    again, facts = train_embedder(recipe, runs)
    ours, theirs = weights(again), weights(whole)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-6)
    return facts


def test_nothing_is_written_through_a_link(make: Make, tmp_path: Path) -> None:
    """Checkpoints behind one would be cleared, whosever they are."""
    recipe = make("stages.0.max_steps=1")
    train_embedder(recipe, tmp_path / "runs")
    [stage] = (tmp_path / "runs").glob("*/stages/pairs")
    shutil.rmtree(stage)
    stage.mkdir()
    (tmp_path / "mine" / "checkpoint-9").mkdir(parents=True)
    (stage / "trainer").symlink_to(tmp_path / "mine")
    with pytest.raises(InputError, match="trainer is a link"):
        train_embedder(recipe, tmp_path / "runs")
    assert (tmp_path / "mine" / "checkpoint-9").is_dir()


def test_a_model_that_is_replaced_before_it_is_hashed_is_refused(
    make: Make, encoder_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run would go by the name of another model's."""
    model, new = (shutil.copytree(encoder_folder, tmp_path / name) for name in ("model", "new"))
    replace_before("biphase.embedding.training.open_stages", model, new, monkeypatch)
    with pytest.raises(InputError, match=f"files of {model} were replaced while it was read"):
        train_embedder(make(f"model={model}"), tmp_path / "runs")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in SentenceTransformer(str(folder)).state_dict().items()}


def test_the_folder_loads_without_our_code(
    make: Make, tmp_path: Path, documents: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    out, facts = train_embedder(
        make("prompts={query: 'q: ', document: 'd: '}", "license=mit", "languages=[en]", "precision=bf16"),
        tmp_path / "runs",
    )
    theirs, ours = SentenceTransformer(str(out)), load_embedder(str(out))
    assert type(ours[0]).__name__ == "PackedTransformer"
    texts = documents[:5]
    for method in ("encode", "encode_query", "encode_document"):
        one, other = getattr(theirs, method)(texts), getattr(ours, method)(texts)
        assert one == pytest.approx(other, abs=1e-5)
    assert theirs.prompts["query"] == "q: "
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "license: mit" in card and "- en" in card and "cached_mnrl" in card
    assert card.split("---\n", 2)[2].startswith("\n# out\n\nAn embedding model: texts become 32 numbers")
    assert facts["stages"][0]["steps"] == 4
    assert all(0 < cosine < 1 for cosine in facts["cosines"].values())
    assert "widget" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "pooling", mostly_later(["mean", "cls", "lasttoken", "max", "weightedmean"], "mean", "lasttoken")
)
def test_the_folder_is_spelt_as_older_versions_and_other_programs_read_it(
    pooling: str, make: Make, tmp_path: Path, documents: list[str]
) -> None:
    recipe = make(f"pooling={pooling}", "dense=true", "prompts={query: 'q: '}", "stages.0.max_steps=1")
    out, _ = train_embedder(recipe, tmp_path / "runs")

    def read(name: str) -> Any:
        return json.loads((out / name).read_text())

    kinds = ["Transformer", "Pooling", "Dense", "Normalize"]
    assert [module["type"] for module in read("modules.json")] == [f"sentence_transformers.models.{k}" for k in kinds]
    assert read("sentence_bert_config.json") == {"max_seq_length": 48, "do_lower_case": False}
    modes = read("1_Pooling/config.json")
    key = {"cls": "cls_token", "lasttoken": "lasttoken"}.get(pooling, f"{pooling}_tokens")
    assert {"pooling_mode_cls_token", "pooling_mode_mean_tokens"} <= modes.keys()
    assert [name for name, value in modes.items() if value is True] == [f"pooling_mode_{key}"]
    assert read("2_Dense/config.json").keys() == {"in_features", "out_features", "bias", "activation_function"}
    theirs, ours = SentenceTransformer(str(out)), load_embedder(str(out))
    assert [type(module).__name__ for module in theirs] == kinds and theirs.max_seq_length == 48
    assert theirs.encode_query(documents[:5]) == pytest.approx(ours.encode_query(documents[:5]), abs=1e-5)


@pytest.mark.parametrize("kind", ["causal", "without prompts", "shortened"])
def test_what_others_saved_is_embedded_as_they_embed_it(
    kind: str, encoder_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A decoder that stays one, prompts that are not pooled, embeddings cut short."""
    folder = encoder_folder
    if kind == "causal":
        vocab_size = len(AutoTokenizer.from_pretrained(encoder_folder))
        shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        torch.manual_seed(0)
        folder = tmp_path / "decoder"
        AutoModel.from_config(AutoConfig.for_model("llama", vocab_size=vocab_size, **shape)).save_pretrained(folder)
        AutoTokenizer.from_pretrained(encoder_folder).save_pretrained(folder)
    pooling = Pooling(32, pooling_mode="mean", include_prompt=kind != "without prompts")
    prompts = {"query": "a long prompt before each: ", "document": ""}
    truncate_dim = 8 if kind == "shortened" else None
    modules: Any = [Transformer(str(folder)), pooling]
    saved = str(tmp_path / "x")
    SentenceTransformer(modules=modules, prompts=prompts, truncate_dim=truncate_dim).save_pretrained(saved)
    ours, theirs = load_embedder(saved), SentenceTransformer(saved)
    texts = ["what did Tip make?", "Tip", "a pumpkin head, of wood and of all that he found in the field"]
    np.testing.assert_allclose(ours.encode_query(texts), theirs.encode_query(texts), atol=1e-5)
    np.testing.assert_allclose(ours.encode_document(texts), theirs.encode_document(texts), atol=1e-5)
    assert ("because packing would change its embeddings" in capsys.readouterr().err) == (kind != "shortened")


def place_dense(model: Path, place: str) -> Path:
    """Move the folder of the linear map, and say so in modules.json."""
    (model / place).parent.mkdir(parents=True, exist_ok=True)
    (model / "2_Dense").rename(model / place)
    modules = (model / "modules.json").read_text()
    (model / "modules.json").write_text(modules.replace("2_Dense", place))
    return model / place


@pytest.mark.parametrize("place", ["2_Dense", "dense", "further/dense"])
def test_a_pickle_among_the_modules_is_refused(wide_teacher: Path, place: str) -> None:
    dense = place_dense(wide_teacher, place)
    (dense / "model.safetensors").rename(dense / "pytorch_model.bin")
    with pytest.raises(InputError, match=f"{place} has no weights .*, and pickles are never opened"):
        load_embedder(str(wide_teacher))


def test_a_pickle_that_the_settings_ask_for_is_refused(wide_teacher: Path) -> None:
    torch.save({}, wide_teacher / "pytorch_model.bin")
    path = wide_teacher / "sentence_bert_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_args": {"use_safetensors": False}}))
    for read in (load_embedder, hash_embedder):
        with pytest.raises(InputError, match=r"sentence_bert_config\.json is damaged \(model_args.use_safetensors"):
            read(str(wide_teacher))
    dense = wide_teacher / "2_Dense"
    (dense / "model.safetensors").rename(dense / "other.safetensors")
    torch.save({}, dense / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"2_Dense has no weights .*, and pickles are never opened"):
        hash_embedder(str(wide_teacher))


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("2_Dense/config.json", {"activation_function": "torch.nn.modules.module.Module"}, "activation_function"),
        ("config_sentence_transformers.json", {"prompts": [{}]}, "prompts"),
        ("config_sentence_transformers.json", {"prompts": {"query": 3}}, r"prompts\.query"),
        ("config_sentence_transformers.json", {"prompts": "query: "}, "prompts"),
    ],
)
def test_settings_of_modules_are_typed_and_name_known_functions(
    file: str, change: dict[str, Any], words: str, wide_teacher: Path
) -> None:
    path = wide_teacher / file
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=rf"{file} is damaged \({words}"):
        load_embedder(str(wide_teacher))


def test_a_module_elsewhere_and_modules_of_another_form_are_refused(wide_teacher: Path) -> None:
    (wide_teacher / "linked").symlink_to(place_dense(wide_teacher, "../dense"))
    for text in ((wide_teacher / "modules.json").read_text(), '[{"path": "linked", "type": "x"}]'):
        (wide_teacher / "modules.json").write_text(text)
        for read in (load_embedder, hash_embedder):
            with pytest.raises(InputError, match=r"its module '(../dense|linked)' is not in the folder"):
                read(str(wide_teacher))
    for text in ("null", "[5]", '[{"path": 5}]'):
        (wide_teacher / "modules.json").write_text(text)
        with pytest.raises(InputError, match=r"modules\.json is damaged"):
            load_embedder(str(wide_teacher))


def test_a_killed_training_goes_on_as_if_it_had_not_been(
    make: Make, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorBoard's curve goes on too: each step once, the scores at the end. So does the clock."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setattr(training, "LOGGING_STEPS", 1)
    rows = [f"text {number},another {number},{number / 9}\n" for number in range(9)]
    (tmp_path / "sts.csv").write_text("sentence1,sentence2,score\n" + "".join(rows))
    tracked = ("tracking=tensorboard", f"evaluation=[{tmp_path / 'sts.csv'}]")
    recipe = make(*tracked)
    kill_at_third_step(recipe, tmp_path / "b", monkeypatch)
    [clock] = (tmp_path / "b").glob("*/clock.json")
    clock.write_text(str(read_json(clock) + 1000))
    facts = go_on(recipe, tmp_path / "b", whole)
    assert 1000 < read_json(clock) < 1100 and 1000 < facts["seconds"] < 1100
    events = reader.EventAccumulator(str(next((tmp_path / "b").glob("*/tensorboard"))))
    events.Reload()
    curve = [(event.step, event.value) for event in events.Scalars("train/pairs_loss")]
    assert [step for step, _ in curve] == [1, 2, 3, 4]
    told = [logged["loss"] for logged in facts["stages"][0]["losses"]]
    assert [loss for _, loss in curve] == pytest.approx(told, rel=1e-5)
    [score] = events.Scalars("eval/sts/spearman")
    assert score.step == 4 and score.value == pytest.approx(facts["scores"]["sts"]["this model"]["spearman"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.minutes
def test_a_stage_goes_on_with_the_pairs_it_began_on_alone(
    make: Make, documents: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.txt").write_text("\n\n".join(documents), encoding="utf-8")
    source = f"{{from_text: {tmp_path / 'notes.txt'}, passage_words: 20}}"
    recipe = make(f"stages.0.data=[{source}]", f"out={tmp_path / 'whole'}")
    whole, _ = train_embedder(recipe, tmp_path / "a")
    again = recipe.model_copy(update={"out": str(tmp_path / "again")})
    kill_and_go_on(again, tmp_path / "b", whole, monkeypatch)
    next((tmp_path / "b").glob("*/stages/pairs/done.json")).unlink()
    monkeypatch.setattr("biphase.embedding.pairs.SHORTEST_PASSAGE", 12)
    with pytest.raises(InputError, match="stage pairs began on pairs that were made in another way"):
        train_embedder(again, tmp_path / "b")


def test_a_training_that_is_asked_to_stop_keeps_every_step(
    make: Make, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By real signals, between two checkpoints; one during the last step changes nothing."""
    recipe = make("stages.0.save_steps=100")
    signals = {0: signal.SIGTERM, 2: signal.SIGINT, 3: signal.SIGTERM}

    def ask(self: Any, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step in signals:
            signal.raise_signal(signals[state.global_step])

    monkeypatch.setattr(training.StageRun, "on_step_begin", ask, raising=False)
    for at in (1, 3):
        with pytest.raises(StoppedError, match=rf"pairs: stopped at step {at} of 4; run the same command to continue"):
            train_embedder(recipe, tmp_path / "b")
        [kept] = (tmp_path / "b").glob("*/stages/pairs/trainer/checkpoint-*")
        assert kept.name == f"checkpoint-{at}"
    facts = go_on(recipe, tmp_path / "b", whole)
    assert [logged["step"] for logged in facts["stages"][0]["losses"]] == [1, 3, 4]
    # A stage that is left does not begin.
    signals.clear()
    signals[0] = signal.SIGTERM
    [stage] = recipe.model_dump(mode="json")["stages"]
    stages = json.dumps([stage | {"name": name, "max_steps": 1} for name in ("first", "second")])
    with pytest.raises(StoppedError, match="stopped before stage second; run the same command to continue"):
        train_embedder(make(f"stages={stages}"), tmp_path / "c")
    assert len(train_embedder(make(f"stages={stages}"), tmp_path / "c")[1]["stages"]) == 2


@pytest.mark.parametrize(
    "wanted",
    [{"number": 2, "margin": 0.0, "last_rank": 12}, {"number": 1, "margin": 0.002, "first_rank": 2, "last_rank": 9}],
)
def test_negatives_are_those_of_sentence_transformers_miner(
    wanted: dict[str, Any],
    encoder_folder: Path,
    pairs: list[dict[str, str]],
    tmp_path: Path,
    monkeypatch: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In pieces too, and for an anchor with two positives; a row that is there twice stays so."""
    monkeypatch.setattr(encode, "PIECE_TEXTS", 5)
    monkeypatch.setattr(search, "SEARCH_DOCUMENTS", 7)
    rows = [*pairs, pairs[3], {"anchor": pairs[0]["anchor"], "positive": pairs[9]["positive"]}]
    table, model = Dataset.from_list(rows), load_embedder(str(encoder_folder))
    settings = HardNegatives(**wanted)
    negatives = encode.mine_negatives(table, model, settings, "mine", tmp_path / "rows.npy")
    mined = encode.mine_once(table, model, "mine", settings, tmp_path / "mined.arrow")
    told = f"the other {len(rows) - len(mined)} are not trained on"
    assert told in " ".join(capsys.readouterr().err.split())
    ours = [tuple(row.values()) for row in mined]
    theirs = mine_hard_negatives(
        table,
        model,
        range_min=settings.first_rank,
        range_max=settings.last_rank,
        relative_margin=settings.margin,
        num_negatives=settings.number,
        output_format="n-tuple",
        verbose=False,
    )
    assert set(ours) == {tuple(row.values()) for row in theirs}
    assert 3 < len(set(ours)) < len(rows) - 1 and not (tmp_path / "rows.npy").exists()
    assert len(ours) - len(set(ours)) == (len(negatives[pairs[3]["anchor"]]) == settings.number)


def test_stages_follow_each_other_and_mine_negatives(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = str(tmp_path / "pairs.jsonl")
    stages = (
        f"stages=[{{name: a, data: [{{path: {pairs}}}], batch_size: 4, max_steps: 2}},"
        f" {{name: b, data: [{{path: {pairs}}}], batch_size: 4, max_steps: 2,"
        " hard_negatives: {number: 1, margin: 0.0, last_rank: 20}}]"
    )
    monkeypatch.setattr("biphase.embedding.pairs.MOST_TOLD", 1.01)  # so that a line is printed
    out, facts = train_embedder(make(stages, "merge=0.5"), tmp_path / "runs")
    told = " ".join(capsys.readouterr().err.split())
    assert "of the rows are read in an epoch" in told.partition("have 1 hard negatives")[2]
    assert [stage["steps"] for stage in facts["stages"]] == [2, 2]
    folder = next((tmp_path / "runs").iterdir())
    assert (folder / "stages" / "b" / "negatives-0.arrow").exists()
    first, tokenizer = weights(out), (out / "tokenizer.json").read_bytes()
    monkeypatch.setattr("biphase.embedding.training.run_stage", lambda *_, **__: pytest.fail("trained again"))
    again = weights(train_embedder(make(stages, "merge=0.5"), tmp_path / "runs")[0])
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert (out / "tokenizer.json").read_bytes() == tokenizer, "whether anything was encoded since"
    flip_bit(folder / "stages" / "b" / "model" / "model.safetensors")
    with pytest.raises(InputError, match=rf"model.safetensors is damaged .*delete {folder / 'stages' / 'b'} and rerun"):
        train_embedder(make(stages, "merge=0.5"), tmp_path / "runs")


def test_a_damaged_checkpoint_is_told_and_not_gone_on_from(make: Make, tmp_path: Path, monkeypatch: Any) -> None:
    recipe = make()
    kill_at_third_step(recipe, tmp_path / "runs", monkeypatch)
    [last] = tmp_path.glob("runs/*/stages/pairs/trainer/checkpoint-2")
    for name in ("model.safetensors", "optimizer.pt", "trainer_state.json"):
        flip_bit(last / name)
        with pytest.raises(InputError, match=rf"{name} is damaged .*delete {last} and rerun"):
            train_embedder(recipe, tmp_path / "runs")
        flip_bit(last / name)


def test_a_program_s_texts_are_encoded(make: Make, encoder_folder: Path, tmp_path: Path) -> None:
    """The empty one too; an embedding model on the device that is named."""
    embedder = biphase.embed(make("stages.0.max_steps=2"), runs=tmp_path / "runs")
    for model in (encoder_folder, embedder):
        vectors = biphase.encode(model, ["", "a text"], device="cpu")
        np.testing.assert_allclose(vectors[1], biphase.encode(model, "a text")[0], atol=1e-5)
        assert vectors.shape == (2, 32) and np.isfinite(vectors).all()
        rounded = biphase.encode(model, ["", "a text"], device="cpu", precision="bf16")
        gap = np.abs(rounded - vectors).max() / np.abs(vectors).mean()
        assert rounded.dtype == np.float32 and 1e-6 < gap < 0.1  # bf16 has 8 bits: a step is 0.4 %
        with pytest.raises(InputError, match="device is cuda"):
            biphase.encode(model, ["a text"], device="cuda")
        with pytest.raises(InputError, match="precision 'fp16': give auto, bf16 or fp32"):
            biphase.encode(model, ["a text"], device="cpu", precision="fp16")


def test_merging_all_but_nothing_gives_the_network_before(make: Make, encoder_folder: Path, tmp_path: Path) -> None:
    out, _ = train_embedder(make("merge=0.999999"), tmp_path / "runs")
    before = load_embedder(str(encoder_folder))
    assert SentenceTransformer(str(out)).encode("a text") == pytest.approx(
        before.encode("a text", normalize_embeddings=True), abs=1e-3
    )


def test_token_embeddings_are_scaled_where_they_meet_the_layers_alone(
    make: Make, encoder_folder: Path, tmp_path: Path
) -> None:
    make_table = make("token_embedding_rms=2", "stages.0.learning_rate=1e-12", "matryoshka=false")
    out, facts = train_embedder(make_table, tmp_path / "runs")
    new = load_file(out / "model.safetensors")["embed_tokens.weight"]
    old = load_file(encoder_folder / "model.safetensors")["model.embed_tokens.weight"]
    assert new.square().mean().sqrt() == pytest.approx(2, rel=1e-5)
    torch.testing.assert_close(new / new.norm(), old / old.norm())
    assert facts["cosines"]["embeddings"] == pytest.approx(1)
    with pytest.raises(InputError, match="leave one out"):
        make("token_embedding_rms=2", "merge=0.5")


def test_whitened_rows_are_the_nearest_whose_directions_are_equally_strong(
    make: Make, encoder_folder: Path, tmp_path: Path
) -> None:
    """The polar factor, which `scipy` computes another way."""
    rows = torch.from_numpy(np.random.default_rng(0).normal(size=(50, 8)) * 2.0 ** np.arange(8))
    torch.testing.assert_close(whitened(rows), torch.from_numpy(polar(rows.numpy())[0]), rtol=0, atol=1e-9)
    rows[:, 0] = 0
    assert whitened(rows)[:, 0].abs().max() < 1e-9 and torch.isfinite(whitened(rows)).all()

    white = make("token_embedding_rms=2", "whiten_token_embeddings=true", "stages.0.learning_rate=1e-12")
    out, _ = train_embedder(white, tmp_path / "runs")
    new = load_file(out / "model.safetensors")["embed_tokens.weight"].double()
    old = load_file(encoder_folder / "model.safetensors")["model.embed_tokens.weight"].double()
    assert new.square().mean().sqrt() == pytest.approx(2, rel=1e-4)
    near = torch.from_numpy(polar(old.numpy())[0])
    torch.testing.assert_close(new / new.norm(), near / near.norm(), rtol=0, atol=1e-5)
    with pytest.raises(InputError, match="leaves the size open"):
        make("whiten_token_embeddings=true")


@pytest.mark.slow
@pytest.mark.minutes
def test_a_linear_map_is_learnt_kept_and_gone_on_with(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = {**make().model_dump(mode="json")["stages"][0], "name": "second", "max_steps": 2}
    recipe = make("dense=true", f"out={tmp_path / 'whole'}")
    recipe = recipe.model_copy(update={"stages": (*recipe.stages, recipe.stages[0].model_validate(second))})
    whole, _ = train_embedder(recipe, tmp_path / "a")
    linear: Any = SentenceTransformer(str(whole))[2]
    assert type(linear) is Dense and not torch.allclose(linear.linear.weight, torch.eye(32), atol=1e-3)
    assert next(iter(load_embedder(str(whole))[2].parameters())).equal(linear.linear.weight)

    again = recipe.model_copy(update={"out": str(tmp_path / "again")})
    kill_and_go_on(again, tmp_path / "b", whole, monkeypatch)
    learnt = load_file(tmp_path / "again" / "2_Dense" / "model.safetensors")["linear.weight"]
    torch.testing.assert_close(learnt, linear.linear.weight.detach(), rtol=0, atol=1e-6)

    shutil.rmtree(tmp_path / "again")
    shutil.rmtree(next((tmp_path / "b").glob("*/stages/second")))
    train_embedder(again, tmp_path / "b")  # from the stage before, as it was kept
    learnt = load_file(tmp_path / "again" / "2_Dense" / "model.safetensors")["linear.weight"]
    torch.testing.assert_close(learnt, linear.linear.weight.detach(), rtol=0, atol=1e-6)
    with pytest.raises(InputError, match="has no such map"):
        make("dense=true", "merge=0.5")


@pytest.mark.parametrize("kind", ["bert", "modernbert", "gpt2"])
def test_token_embeddings_that_are_changed_before_the_layers_are_not_scaled(
    kind: str, make: Make, encoder_folder: Path, tmp_path: Path
) -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    vocab_size = len(AutoTokenizer.from_pretrained(encoder_folder))
    config = AutoConfig.for_model(kind, vocab_size=vocab_size, pad_token_id=0, bos_token_id=1, eos_token_id=1, **shape)
    folder = tmp_path / kind
    AutoModel.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(encoder_folder).save_pretrained(folder)
    with pytest.raises(InputError, match="before its first layer"):
        train_embedder(make("token_embedding_rms=2", f"model={folder}"), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def wide_teacher(encoder_folder: Path, tmp_path: Path) -> Path:
    """The encoder with a linear map to 48 dimensions, and prompts of its own."""
    plain = SentenceTransformer(str(encoder_folder))
    torch.manual_seed(0)
    dense = Dense(32, 48, activation_function=nn.Identity())
    prompts = {"query": "asked: ", "document": "said: "}
    SentenceTransformer(modules=[*plain, dense], prompts=prompts).save_pretrained(str(tmp_path / "teacher"))
    return tmp_path / "teacher"


@pytest.mark.slow
@pytest.mark.minutes
def test_a_teacher_is_followed_through_a_kill(
    make: Make, wide_teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The map to its dimension is learnt, and kept in checkpoints; its embeddings are learnt whole."""
    distil = ("stages.0.loss=distill", f"stages.0.teacher={wide_teacher}", "stages.0.projection=true")
    whole, facts = train_embedder(make(*distil, f"out={tmp_path / 'whole'}"), tmp_path / "a")
    assert facts["stages"][0]["loss"] == "distill" and facts["dims"] == [32]
    kill_at_third_step(make(*distil), tmp_path / "b", monkeypatch)
    go_on(make(*distil), tmp_path / "b", whole)


def test_a_checkpoint_without_a_mark_was_not_finished(
    make: Make, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stage begins anew: nobody knows what is in there."""
    kill_at_third_step(make(), tmp_path / "b", monkeypatch)
    [last] = tmp_path.glob("b/*/stages/pairs/trainer/checkpoint-2")
    (last / MARK).unlink()
    (last / "model.safetensors").write_bytes(b"half")
    go_on(make(), tmp_path / "b", whole)
    assert "stage pairs: starts over, because its checkpoint was not finished" in capsys.readouterr().err


def test_a_teacher_reads_with_its_own_prompts(wide_teacher: Path, tmp_path: Path) -> None:
    teacher = load_embedder(str(wide_teacher))
    table = Dataset.from_dict({"anchor": ["who?", "where?"], "positive": ["Tip", "in Oz"]})
    taught = teach_once(table, teacher, "a", tmp_path / "pairs.arrow")
    first, second = (np.array(column) for column in zip(*taught["label"], strict=True))
    theirs = SentenceTransformer(str(wide_teacher))
    np.testing.assert_allclose(first, theirs.encode(["asked: who?", "asked: where?"]), atol=1e-5)
    np.testing.assert_allclose(second, theirs.encode(["said: Tip", "said: in Oz"]), atol=1e-5)
    scored = table.add_column("score", [0.1, 0.9])
    assert teach_once(scored, teacher, "a", tmp_path / "scored.arrow")["label"][0][0] == pytest.approx(
        theirs.encode("who?"), abs=1e-5
    )


def test_a_run_is_named_by_contents(make: Make) -> None:
    """Neither by paths nor by devices."""
    distil = "stages.0.loss=distill", "stages.0.teacher=a", "device=auto", "precision=auto"
    first = make(*distil).identity("model", ["data", "teacher", "torch.float32"])
    for change in ("stages.0.teacher=elsewhere/a", "stages.0.data.0.path=b.csv", "device=cpu", "precision=fp32"):
        assert make(*distil, change).identity("model", ["data", "teacher", "torch.float32"]) == first
    assert make(*distil).identity("model", ["data", "other", "torch.float32"]) != first
    assert make(*distil, "stages.0.learning_rate=1").identity("model", ["data", "teacher", "torch.float32"]) != first


def test_a_teacher_reads_each_text_once(wide_teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On each side, because prompts may differ; mined negatives are positives of other rows."""
    columns = {"anchor": ["who?", "who?", "where?"], "positive": ["Tip", "in Oz", "Tip"]}
    table = Dataset.from_dict(columns | {"negative_1": ["in Oz", "Jack", "who?"]})
    read, embed = list[str](), encode.encode_batch
    monkeypatch.setattr(encode, "encode_batch", lambda encoder, texts: read.extend(texts) or embed(encoder, texts))
    taught = teach_once(table, load_embedder(str(wide_teacher)), "a", tmp_path / "taught.arrow")
    assert read == ["who?", "where?", "Tip", "in Oz", "Jack", "who?"]
    theirs = SentenceTransformer(str(wide_teacher))
    for row in taught:
        texts = [f"asked: {row['anchor']}", f"said: {row['positive']}", f"said: {row['negative_1']}"]
        np.testing.assert_allclose(row["label"], theirs.encode(texts), atol=1e-5)
    assert [path.name for path in tmp_path.glob("taught*")] == ["taught.arrow"]


def test_a_score_names_the_teacher_among_its_data(make: Make, wide_teacher: Path) -> None:
    distilled = make("stages.0.loss=distill", f"stages.0.teacher={wide_teacher}")
    pairs = [read_pairs(source, 0).hash for source in distilled.stages[0].data]
    assert training.hash_trained_on(make()) == pairs
    assert training.hash_trained_on(distilled) == [*pairs, hash_embedder(str(wide_teacher))]


def test_a_teacher_reads_repeated_rows_once(make: Make, wide_teacher: Path, tmp_path: Path) -> None:
    recipe = make("stages.0.loss=distill", f"stages.0.teacher={wide_teacher}", "stages.0.data.0.weight=2.5")
    [stage], teacher, model = recipe.stages, load_embedder(str(wide_teacher)), SimpleNamespace()
    sources = [read_pairs(source, 0) for source in stage.data]
    run = training.StageRun(recipe, stage, model, tmp_path, sources, teacher)  # type: ignore[arg-type]
    [(_, taught)] = training.stage_tables(run).values()
    [(_, plain)] = training.stage_tables(replace(run, teacher=None)).values()
    assert taught.remove_columns("label").to_dict() == plain.to_dict()
    again = teach_once(plain, teacher, "all", tmp_path / "all.arrow")
    np.testing.assert_allclose(taught["label"], again["label"], atol=1e-5)
    num_rows = len(sources[0].rows)
    assert len(Dataset.from_file(str(tmp_path / "taught-0.arrow"))) == num_rows < len(taught) / 2


def test_a_teacher_takes_no_memory_of_the_device_while_its_stage_trains(
    make: Make, wide_teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is on the recipe's device while it reads the texts, and on the CPU before and after."""
    recipe = make("stages.0.loss=distill", f"stages.0.teacher={wide_teacher}", "stages.0.projection=true")
    _, model = training.open_models(recipe)
    teacher, moves = load_embedder(str(wide_teacher)), list[str]()
    monkeypatch.setattr(encode, "load_embedder", lambda _: teacher)
    monkeypatch.setattr(encode, "teach_once", lambda table, *_: moves.append("taught") or table)
    monkeypatch.setattr(teacher, "to", lambda device: moves.append(str(device)) or teacher)
    monkeypatch.setattr(training, "choose_device", lambda name: f"the recipe's {name}")
    [run] = training.open_stages(recipe, model)
    training.stage_tables(replace(run, folder=tmp_path))
    assert moves == ["cpu", "the recipe's cpu", "taught", "cpu"]


def test_what_is_left_out_of_an_embedding_model_is_told(
    make: Make, wide_teacher: Path, encoder_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = wide_teacher / "config_sentence_transformers.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"similarity_fn_name": "dot"}))
    assert tell_unused_parts(make(f"model={wide_teacher}", "pooling=cls")) == "the network before training"
    told = " ".join(capsys.readouterr().err.split())
    assert "the network alone is trained, without its pooling mean (pooling is cls), its Dense, its prompts" in told
    kept = 'prompts: {query: "asked: ", document: "said: "}'
    assert f"(give {kept} to keep them), its similarity dot" in told
    tell_unused_parts(make(f"model={wide_teacher}", kept.replace(": ", "=", 1)))
    assert "its prompts" not in capsys.readouterr().err
    file.write_text(json.dumps(json.loads(file.read_text()) | {"prompts": {"query": "asked: ", "passage": "said: "}}))
    tell_unused_parts(make(f"model={wide_teacher}"))
    assert f"(give {kept} to keep them)" in " ".join(capsys.readouterr().err.split())
    assert tell_unused_parts(make(f"model={encoder_folder}")) == "before training"
    assert not capsys.readouterr().err


def test_a_prompt_is_put_before_texts_by_its_name(
    wide_teacher: Path, encoder_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As sentence-transformers does; a line says so if there are prompts and none is named."""
    model = load_embedder(str(wide_teacher))
    for name, text in (("query", "asked: a text"), ("document", "said: a text")):
        capsys.readouterr()
        vectors = biphase.encode(model, ["a text"], device="cpu", prompt_name=name)
        assert "prompt" not in capsys.readouterr().err
        np.testing.assert_allclose(vectors, biphase.encode(model, [text], device="cpu"), atol=1e-5)
        told = " ".join(capsys.readouterr().err.split())
        assert "texts are embedded without a prompt; the model has some (prompt_name: 'query' or 'document')" in told
    with pytest.raises(InputError, match="prompt_name is 'passage': the model's prompts are query, document"):
        biphase.encode(model, ["a text"], device="cpu", prompt_name="passage")
    with pytest.raises(InputError, match="the model has no prompts: leave it out"):
        biphase.encode(encoder_folder, ["a text"], device="cpu", prompt_name="query")


@pytest.mark.parametrize("name", ["2_Dense", "dense"])
def test_a_teacher_that_has_changed_is_another(wide_teacher: Path, name: str) -> None:
    place = place_dense(wide_teacher, name) / "model.safetensors"
    before = hash_embedder(str(wide_teacher))
    save_file({name: 2 * weight for name, weight in load_file(place).items()}, place)
    assert hash_embedder(str(wide_teacher)) != before


def test_of_several_gpus_one_trains_with_the_batch_of_the_recipe(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    recipe = make()
    tables = {"p": ("pairs", Dataset.from_dict({"anchor": ["a"], "positive": ["b"]}))}
    model: Any = SimpleNamespace(device=torch.device("cuda"))
    run = training.StageRun(recipe, recipe.stages[0], model, tmp_path)
    found = training.arguments_of(run, tables)
    assert (found.train_batch_size, found.parallel_mode.name) == (8, "NOT_PARALLEL")


def test_prompts_are_those_of_pairs_beside_scored_ones(make: Make) -> None:
    recipe = make("prompts={query: 'q: ', document: 'd: '}")

    def given(**kinds: str) -> Any:
        table = Dataset.from_dict({"anchor": ["a"], "positive": ["b"], "negative_2": ["c"]})
        tables = {name: (kind, table) for name, kind in kinds.items()}
        model: Any = SimpleNamespace(device=torch.device("cpu"))
        return training.arguments_of(training.StageRun(recipe, recipe.stages[0], model, Path("x")), tables)

    alone, both, scored = given(s0="pairs"), given(s0="pairs", s1="scored"), given(s0="scored")
    assert alone.prompts["s0"]["anchor"] == "q: " and alone.prompts["s0"]["negative_2"] == "d: "
    assert both.prompts == alone.prompts and both.batch_sampler == alone.batch_sampler == "no_duplicates"
    assert scored.prompts is None and scored.batch_sampler == "batch_sampler"


@pytest.mark.parametrize(
    ("rows", "overrides", "told"),
    [
        ([{"anchor": "a b", "positive": " "}], (), "pairs.jsonl:1: 'positive' is empty"),
        ([{"x": 1, "y": 2}], (), "which columns"),
        ([{"anchor": f"a {n}", "positive": f"b {n % 3}"} for n in range(9)], (), "3 different positives"),
        ([{"anchor": f"a {n % 3}", "positive": f"b {n}"} for n in range(9)], (), "3 different anchors"),
        (None, ("stages.0.data.0.weight=0.001",), "0 different pairs at weight 0.001"),
        (None, ("stages.0.hard_negatives={number: 60, last_rank: 50}",), "do not hold 60 negatives"),
        ([{"sentence1": "a", "sentence2": "b", "score": 7}], (), "from 0 to 1"),
        ([{"sentence1": "a", "sentence2": "b", "score": 1}] * 9, (), "all scores are 1"),
        (
            [{"anchor": f"a {n}", "positive": f"b {n}", "negative": "c"} for n in range(9)],
            ("stages.0.hard_negatives={number: 1}", "stages.0.batch_size=2"),
            "negatives of its own",
        ),
        (None, ("stages.0.loss=cosent",), "scored pairs"),
        (None, ("stages.0.loss_settings={hardnes_mode: x}",), "loss_settings: .*'hardnes_mode'"),
        (None, ("max_length=100000",), "positions"),
        (None, ("matryoshka=[64]",), "above the 32"),
        (None, ("stages.0.data.0.path=nothing.csv",), "nothing.csv"),
        (None, ("stages.0.loss=distill",), "belong together"),
        (None, ("stages.0.projection=true",), "belong together"),
        (None, ("stages.0.warmup_ratio=1.0",), "less than 1"),
        (None, ("matryoshka=[]",), "at least 1 item"),
        (None, ("evaluation=[a/sts.csv, b/sts.csv]",), "judged texts: sts is named twice"),
        ([{"premise": f"a {n}", "hypothesis": f"b {n}", "label": n % 3} for n in range(9)], (), "a score or a class"),
        (None, ("stages.0.batch_siz=3",), "did you mean 'batch_size'"),
    ],
)
def test_what_is_wrong_is_told_before_anything_trains(
    rows: Any, overrides: tuple[str, ...], told: str, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("biphase.embedding.training.run_stage", lambda *_, **__: pytest.fail("trained"))
    if rows is not None:
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with pytest.raises(InputError, match=told):
        train_embedder(make(*overrides), tmp_path / "runs")


def test_a_tokenizer_that_sentence_transformers_would_take_for_another(
    make: Make, encoder_folder: Path, tmp_path: Path
) -> None:
    sizes = {"vocab_size": 384, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=2)
    AutoModel.from_config(config).save_pretrained(tmp_path / "qwen")
    load_tokenizer(encoder_folder).save_pretrained(tmp_path / "qwen")
    with pytest.raises(InputError, match="sentence-transformers would take Qwen2Tokenizer for its type 'qwen2'"):
        train_embedder(make(f"model={tmp_path / 'qwen'}"), tmp_path / "runs")


def test_an_embedding_model_has_the_dropout_of_its_model(make: Make, encoder_folder: Path, tmp_path: Path) -> None:
    """Embedding training uses none, but those who fine-tune the model draw what they would draw in the model before."""
    sizes = {"vocab_size": 384, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = AutoConfig.for_model("bert", **sizes, num_attention_heads=2, pad_token_id=2)
    AutoModel.from_config(config).save_pretrained(tmp_path / "bert")
    load_tokenizer(encoder_folder).save_pretrained(tmp_path / "bert")
    recipe = make(f"model={tmp_path / 'bert'}", "stages.0.max_steps=1")
    out, _ = train_embedder(recipe, tmp_path / "runs")
    encode.make_embedder(str(out), 48, "mean").save_pretrained(str(tmp_path / "checkpoint"))
    [stage] = (tmp_path / "runs").glob("*/stages/pairs/model")
    for folder in (stage, out, tmp_path / "checkpoint"):
        assert AutoConfig.from_pretrained(folder).hidden_dropout_prob == 0.1, folder


def test_a_network_that_padding_changes_is_refused(make: Make, encoder_folder: Path, tmp_path: Path) -> None:
    sizes = {"vocab_size": 384, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    AutoModel.from_config(AutoConfig.for_model("fnet", **sizes)).save_pretrained(tmp_path / "fnet")
    load_tokenizer(encoder_folder).save_pretrained(tmp_path / "fnet")
    with pytest.raises(InputError, match="FNetModel gives a text another embedding beside a longer one"):
        train_embedder(make(f"model={tmp_path / 'fnet'}"), tmp_path / "runs")


def test_what_is_trained_is_not_written_over(
    make: Make, encoder_folder: Path, wide_teacher: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="is the model that is trained"):
        train_embedder(make(f"out={encoder_folder}"), tmp_path / "runs")
    distil = "stages.0.loss=distill", f"stages.0.teacher={wide_teacher}"
    with pytest.raises(InputError, match=f"out: {wide_teacher} is the model that is trained, or a teacher: give"):
        train_embedder(make(*distil, f"out={wide_teacher}"), tmp_path / "runs")


def test_a_ragged_table_is_told_with_its_line(make: Make, tmp_path: Path) -> None:
    (tmp_path / "pairs.csv").write_text('anchor,positive\na,"b\nc"\nd,e,f\n')
    with pytest.raises(InputError, match=r"pairs\.csv:4: 3 fields"):
        train_embedder(make(f"stages.0.data.0.path={tmp_path / 'pairs.csv'}"), tmp_path / "runs")


def test_a_teacher_of_another_dimension_is_refused(make: Make, encoder_folder: Path, tmp_path: Path) -> None:
    wide = SentenceTransformer(str(encoder_folder))
    wide.append(Dense(32, 16))
    wide.save_pretrained(str(tmp_path / "teacher"))
    overrides = ("stages.0.loss=distill", f"stages.0.teacher={tmp_path / 'teacher'}")
    with pytest.raises(InputError, match="has 16 dimensions, the model 32"):
        train_embedder(make(*overrides), tmp_path / "runs")


def test_pairs_of_plain_text(make: Make, documents: list[str], tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"Chapter {number}\n{text}"}) + "\n" for number, text in enumerate(documents)]
    (tmp_path / "text.jsonl").write_text("".join(rows), encoding="utf-8")
    for pairs in ("crops", "neighbours", "titles"):
        source = PairSource(from_text=str(tmp_path / "text.jsonl"), pairs=pairs, passage_words=40)  # type: ignore[arg-type]
        found = read_pairs(source, seed=0)
        assert found == read_pairs(source, seed=0)
        assert len(found.rows) >= 8 and pairs in found.description
        for anchor, positive in found.rows:
            whole = [" ".join(f"Chapter {number} {text}".split()) for number, text in enumerate(documents)]
            assert any(positive in text for text in whole)
            assert anchor.startswith("Chapter") if pairs == "titles" else any(anchor in text for text in whole)
    sources = [f"{{from_text: {tmp_path / 'text.jsonl'}, pairs: {pairs}}}" for pairs in ("crops", "titles")]
    _, facts = train_embedder(make(f"stages.0.data=[{', '.join(sources)}]"), tmp_path / "runs")
    assert facts["stages"][0]["steps"] == 4


@pytest.mark.parametrize("kind", ["pairs", "scored"])
def test_the_orthogonal_regularizer_counts_by_its_weight(kind: str, make: Make, encoder_folder: Path) -> None:
    """By its formula (arXiv 1708.06320, equation 6): the mean of other texts' cosines, squared, and what their mean
    square is above 1 / D, for anchors and for positives."""
    model = SentenceTransformer(str(encoder_folder))
    texts = [["a red fox", "the sea", "bread"], ["foxes", "waves roll in", "a loaf of rye"]]
    columns = [model.preprocess(column) for column in texts]
    labels = torch.tensor([1.0, 0.0, 0.5])
    recipes = [make("matryoshka=false", f"stages.0.orthogonal_weight={weight}") for weight in (1e-9, 0.5)]
    plain, added = (make_loss(training.StageRun(recipe, recipe.stages[0], model), kind) for recipe in recipes)
    expected = 0.0
    for column in columns:
        rows = torch.nn.functional.normalize(model(column)["sentence_embedding"].detach().double(), dim=-1)
        others = (rows @ rows.T)[~torch.eye(len(rows), dtype=torch.bool)]
        expected += float(others.mean() ** 2 + (others**2).mean().sub(1 / rows.shape[1]).clamp(min=0)) / len(columns)
    difference = float((added(columns, labels) - plain(columns, labels)).detach())
    assert difference == pytest.approx(0.5 * expected, rel=1e-4) and expected > 0.01
    with pytest.raises(InputError, match="goes with mnrl and cosent, not with cached_mnrl"):
        make("stages.0.orthogonal_weight=0.5", "stages.0.loss=cached_mnrl")


def test_batches_are_made_in_a_thread_that_ends_with_the_training(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each epoch's in turn, also if the training is interrupted; an error of the making comes out as it is."""
    makers: list[threading.Thread] = []
    preprocess = encode.PackedTransformer.preprocess

    def watched(self: Any, *args: Any, **named: Any) -> Any:
        makers.append(threading.current_thread())
        return preprocess(self, *args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(encode.PackedTransformer, "preprocess", watched)
        kill_at_third_step(make(), tmp_path / "runs", monkeypatch)
        threads = {*makers} - {threading.main_thread()}
        assert threads and not any(thread.is_alive() for thread in threads)

    def fail(self: Any, inputs: Any, *args: Any, **named: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            makers.append(threading.current_thread())
            raise InputError("pairs.jsonl:3: no text")
        return preprocess(self, inputs, *args, **named)

    monkeypatch.setattr(encode.PackedTransformer, "preprocess", fail)
    with pytest.raises(InputError, match=r"^pairs\.jsonl:3: no text$"):
        train_embedder(make("name=other"), tmp_path / "runs")
    assert not makers[-1].is_alive() and makers[-1] not in threads


def test_a_training_that_diverges_is_no_model(make: Make, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="diverged; lower its learning_rate"):
        train_embedder(make("stages.0.learning_rate=1e30", "stages.0.warmup_ratio=0"), tmp_path / "runs")
    assert [path.name for path in tmp_path.glob("runs/*/stages/pairs/*")] == ["pairs.json"]
    assert not (tmp_path / "out").exists()


def test_without_memory_the_key_is_named(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("biphase.embedding.training.train_stage", train)
    for loss, key in (("auto", r"mini_batch_tokens \(16,384\)"), ("mnrl", r"batch_size \(8\)")):
        with pytest.raises(InputError, match=rf"\(CUDA out of memory\): stage pairs: lower {key}"):
            train_embedder(make(f"stages.0.loss={loss}"), tmp_path / "runs")


def test_a_folder_with_files_of_others_is_left_alone(make: Make, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="did not write"):
        train_embedder(make(), tmp_path / "runs")
