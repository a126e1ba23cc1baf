"""What every test of training needs: helpers that can be imported, one finished run."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from biphase.pretraining.loop import train
from biphase.recipe import Recipe
from biphase.run import Run

sys.path.append(str(Path(__file__).parent))  # for training_runs.py: pytest's importlib mode adds nothing itself


@pytest.fixture(scope="session")
def finished(tiny_recipe: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Ten steps CLM and ten MLM, with a checkpoint every five. Not to be changed."""
    recipe = tiny_recipe("checkpoints.every_steps=5", "checkpoints.keep_last=0")
    return train(recipe, tmp_path_factory.mktemp("finished"))


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as a Hugging Face folder, without a tokenizer."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("decoder") / "llama"
    config = LlamaConfig(
        vocab_size=384,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        attention_dropout=0.1,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
