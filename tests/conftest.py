"""One small shard set and one tiny recipe, shared by the tests that need text; one thread, so that sums are repeatable.

The text is the beginning of L. Frank Baum's "The Marvelous Land of Oz" (1904), in the public domain.
"""

import gc
import json
import os
import resource
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc import locate
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import Tensor

DEVICE = os.environ.get("BIPHASE_TEST_DEVICE", "cpu")
"""Where tests compute that would on any device: `cuda` on a GPU, or a simulated one."""


def mostly_later(cases: Iterable[Any], *now: Any) -> list[Any]:
    """Parameters of a test: `make test` tries the cases `now`, and `make test-minutes` the others."""
    later = (pytest.mark.slow, pytest.mark.minutes)
    return [pytest.param(case, marks=() if case in now else later) for case in cases]


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """No file may grow past so many bytes in the block, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def replace_before(target: str, folder: Path, new: Path, patch: pytest.MonkeyPatch) -> None:
    """Let the folder `new` take the place of another one when a function, named by its module, is first called."""
    work: Any = locate(target)

    def replace_first(*arguments: Any, **settings: Any) -> Any:
        if new.exists():
            folder.rename(folder.with_name(f"{folder.name}.old"))
            new.rename(folder)
        return work(*arguments, **settings)

    patch.setattr(target, replace_first)


def flip_bit(path: Path) -> None:
    """Change one bit in the middle of a file; a second time, it is as it was."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


PROSE = Path(__file__).parent / "data" / "land_of_oz.txt"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew instead of comparing")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    with suppress(ModuleNotFoundError):  # `make newest` has no PyTorch
        import torch

        torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def own_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the tests encode is not kept in the user's folder, and their processes have one thread too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BIPHASE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session", autouse=True)
def no_curves() -> Iterator[None]:
    """To draw the picture of an export takes as long as much of the rest. `exporting/test_model.py` draws it."""
    with pytest.MonkeyPatch.context() as patch:
        with suppress(ImportError):  # `make newest` has no PyTorch
            patch.setattr("biphase.exporting.model.draw_curves", lambda run, last_step, path: path.write_bytes(b"PNG"))
        yield


@pytest.fixture(scope="session", autouse=True)
def stated_peak() -> Iterator[None]:
    """Measuring the peak of the machine takes longer than most runs here. A test that starts a process measures it."""
    with pytest.MonkeyPatch.context() as patch:
        with suppress(ImportError):  # `make newest` has no PyTorch
            patch.setattr("biphase.pretraining.loop.peak_flops", lambda device, dtype: 1e12)
        yield


def pytest_collection_finish() -> None:
    """Keep the modules out of the garbage collections that follow, of which accelerate asks for many."""
    gc.collect()
    gc.freeze()


def reference_loss(
    hidden_ND: "Tensor", weight_VD: "Tensor", bias_V: "Tensor | None", targets_N: "Tensor", softcap: float | None = None
) -> "Tensor":
    """The slow twin of `language_model_loss`: the sum over targets with all logits at once."""
    import torch

    logits_NV = torch.nn.functional.linear(hidden_ND, weight_VD.to(hidden_ND.dtype), bias_V).float()
    if softcap:
        logits_NV = softcap * torch.tanh(logits_NV / softcap)
    return torch.nn.functional.cross_entropy(logits_NV, targets_N, reduction="sum")


@dataclass(frozen=True)
class Corpus:
    """A tokenizer folder and a shard set made with it."""

    tokenizer: Path
    shards: Path


@pytest.fixture(scope="session")
def documents() -> list[str]:
    """The text as documents of one to seven paragraphs: some longer than a sample, some too short for one."""
    paragraphs = PROSE.read_text(encoding="utf-8").split("\n\n")
    made, sizes = [], (1, 3, 1, 7, 2)
    while paragraphs:
        size = sizes[len(made) % len(sizes)]
        made.append("\n\n".join(paragraphs[:size]))
        paragraphs = paragraphs[size:]
    return made


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, documents: list[str]) -> Corpus:
    from biphase.corpus.tokenizer import save_tokenizer, train_tokenizer

    folder = tmp_path_factory.mktemp("corpus")
    save_tokenizer(train_tokenizer(documents, 384), folder / "tokenizer")
    return prepare_texts(folder, train=documents[6:], validation=documents[:6])


def prepare_texts(folder: Path, **splits: list[str]) -> Corpus:
    """Shards of these texts, in a folder that has the tokenizer."""
    from biphase.corpus.prepare import prepare

    for name, texts in splits.items():
        rows = [{"id": f"{name}-{number}", "text": text} for number, text in enumerate(texts)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    prepare(
        [folder / "train.jsonl"],
        folder / "tokenizer",
        folder / "shards",
        validation=[folder / "validation.jsonl"],
        workers=1,
    )
    return Corpus(folder / "tokenizer", folder / "shards")


@pytest.fixture(scope="session")
def tiny_recipe(corpus: Corpus) -> Callable[..., Any]:
    """A recipe of a second or less, 10 steps CLM and 10 steps MLM, changed by `key.sub=value` overrides."""
    from biphase.config import parse_config
    from biphase.recipe import Recipe

    tree = {
        "name": "tiny",
        "init": {
            "preset": "1m",
            "architecture": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
            },
        },
        "data": {"shards": str(corpus.shards), "max_sample_tokens": 64},
        "curriculum": [{"objective": "clm", "steps": 10}, {"objective": "mlm", "steps": 10}],
        "schedule": {"peak_lr": 1e-2, "warmup_steps": 2, "decay_steps": 5},
        "batch_tokens": 512,
        "compute": {"microbatch_tokens": 256, "precision": "fp32", "compile": "off", "device": DEVICE},
        "validation": {"every_steps": 10, "tokens": 1000},
        "checkpoints": {"every_steps": 0},
    }

    def make(*overrides: str) -> Any:
        return parse_config(Recipe, tree, overrides, origin="tests/conftest.py")

    return make


@pytest.fixture(scope="session")
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))


def write_manifest(folder: Path) -> None:
    """Write the manifest of a checkpoint of which nothing else is there, RUN/steps/STEP."""
    from biphase.files import write_hashed
    from biphase.run import CheckpointManifest

    step, files = int(folder.name), {"model/config.json": ""}
    run = folder.parent.parent.name
    manifest = CheckpointManifest(step, step, 0, 0, "", "", "mlm", False, None, [], (), run, files=files)
    write_hashed(folder / "manifest.json", asdict(manifest))


# Finished cells as they lie on disk, with the scores and predictions that a test wants


@pytest.fixture
def write_cell(tmp_path: Path) -> Callable[..., Path]:
    """Write a cell below `tmp_path/scores`; `test=None` diverged. Returns its folder."""

    def write(
        model: str,
        task: str = "genre",
        rate: float = 5e-5,
        seed: int = 0,
        test: float | None = 0.5,
        validation: float = 0.5,
        metric: str = "accuracy",
        lines: Sequence[dict[str, Any]] | None = None,
        validation_lines: Sequence[dict[str, Any]] | None = None,
        model_hash: str = "a" * 64,
        data_hash: str = "d" * 64,
        name: str = "",
        classes: tuple[str, ...] = (),
        num_examples: dict[str, int] | None = None,
        **settings: Any,
    ) -> Path:
        from biphase.files import content_hash, write_hashed
        from biphase.finetuning.config import PROTOCOL, FinetuneConfig
        from biphase.finetuning.scores import Score

        config = FinetuneConfig(learning_rate=rate, seed=seed, **settings)
        cell = f"{model} {model_hash} {task} {data_hash} {config} {name}"
        folder = tmp_path / "scores" / (name or f"{task}-{content_hash(cell)[:12]}")
        folder.mkdir(parents=True)
        values = {"validation": validation, "test": test}
        score = Score(
            protocol=PROTOCOL,
            cell=cell,
            model=model,
            model_hash=model_hash,
            task=task,
            trained_on=task,
            source="biphase",
            data_hash=data_hash,
            metric=metric,
            classes=classes,
            config=config,
            metrics={} if test is None else {split: {metric: value, "other": 0.1} for split, value in values.items()},
            num_examples=num_examples or {},
            num_truncated={},
            num_left_out=0,
            num_steps=10,
            diverged=test is None,
            diverged_at_step=3 if test is None else None,
            final_loss=None if test is None else 1.0,
            seconds={},
            tokens_per_second={},
            peak_memory_bytes=0,
            machine={},
        )
        write_hashed(folder / "score.json", score.model_dump(mode="json"))
        for split, rows in (("test", lines), ("validation", validation_lines)):
            if rows is not None:
                text = "".join(json.dumps(row) + "\n" for row in rows)
                (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")
        return folder

    return write


@pytest.fixture
def scores_folder(tmp_path: Path) -> Path:
    return tmp_path / "scores"
