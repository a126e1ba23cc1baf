"""A tiny encoder as a model folder, and pairs of texts of unequal lengths from the prose of the tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def encoder_folder(tiny_recipe: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    from biphase.exporting.model import export_checkpoint
    from biphase.pretraining.loop import train

    folder = tmp_path_factory.mktemp("encoder")
    recipe = tiny_recipe("curriculum=[{objective: mlm, steps: 4}]", "schedule.warmup_steps=0", "schedule.decay_steps=0")
    export_checkpoint(str(train(recipe, folder / "runs").path), folder / "encoder")
    return folder / "encoder"


@pytest.fixture(scope="session")
def pairs(documents: list[str]) -> list[dict[str, str]]:
    """Beginnings of documents and what follows there, of 3 to 400 characters."""
    made = []
    for number, text in enumerate(documents[:24]):
        words = text.split()
        cut = 2 + number % 9
        made.append({"anchor": " ".join(words[:cut]), "positive": " ".join(words[cut : cut + 3 * number + 4])})
    return [row for row in made if row["positive"]]
