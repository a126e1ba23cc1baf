"""One small shard set and one tiny recipe, shared by the tests that need text; one thread, so that sums are repeatable.

The text is the beginning of L. Frank Baum's "The Marvelous Land of Oz" (1904), in the public domain.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PROSE = Path(__file__).parent / "data" / "land_of_oz.txt"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew instead of comparing")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the tests encode is not kept in the user's folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BIPHASE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


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
    from biphase.corpus.prepare import prepare
    from biphase.corpus.tokenizer import save_tokenizer, train_tokenizer

    folder = tmp_path_factory.mktemp("corpus")
    save_tokenizer(train_tokenizer(documents, 384), folder / "tokenizer")
    for name, part in (("train", documents[6:]), ("validation", documents[:6])):
        rows = [{"id": f"{name}-{number}", "text": text} for number, text in enumerate(part)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    prepare(
        [folder / "train.jsonl"],
        folder / "tokenizer",
        folder / "shards",
        validation_sources=[folder / "validation.jsonl"],
        workers=1,
    )
    return Corpus(folder / "tokenizer", folder / "shards")


@pytest.fixture(scope="session")
def tiny_recipe(corpus: Corpus) -> Callable[..., Any]:
    """A recipe of a second or less, 10 steps CLM and 10 steps MLM, changed by `key.sub=value` overrides."""
    from biphase.config import Recipe, parse_config

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
        "compute": {"microbatch_tokens": 256, "precision": "fp32", "compile": "off", "device": "cpu"},
        "validation": {"every_steps": 10, "tokens": 1000},
        "checkpoints": {"every_steps": 0},
    }

    def make(*overrides: str) -> Any:
        return parse_config(Recipe, tree, overrides, origin="tests/conftest.py")

    return make


@pytest.fixture(scope="session")
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))
