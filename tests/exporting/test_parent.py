"""An encoder is averaged with the decoder that it came from, weight by weight, and with nothing else."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cosine_similarity
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from biphase.corpus.shards import read_shard_manifest
from biphase.encoder.network import load_model
from biphase.errors import InputError
from biphase.exporting.model import export_checkpoint
from biphase.pretraining.loop import train
from biphase.recipe import Recipe
from biphase.run import find_checkpoint

NO_ENDS = ("schedule.warmup_steps=0", "schedule.decay_steps=0", "schedule.peak_lr=1e-2")
MLM = ("curriculum=[{objective: mlm, steps: 2}]", *NO_ENDS)
CLM = ("curriculum=[{objective: clm, steps: 2}]", *NO_ENDS)


@pytest.fixture
def decoder(tiny_recipe: Callable[..., Recipe], tmp_path: Path) -> Path:
    """A decoder whose vocabulary lacks two of the shards' special tokens."""
    manifest = read_shard_manifest(Path(tiny_recipe().data.shards))
    tokens = {"vocab_size": manifest.vocab_size - 2, "eos_token_id": manifest.eos_id, "pad_token_id": manifest.pad_id}
    torch.manual_seed(0)
    config = LlamaConfig(**tiny_recipe().init.architecture, **tokens, bos_token_id=None, max_position_embeddings=512)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "decoder")
    return tmp_path / "decoder"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_the_average_is_that_of_each_weight(tiny_recipe: Callable[..., Recipe], decoder: Path, tmp_path: Path) -> None:
    """Rows of tokens that the decoder lacks are as training began with; the cosines are PyTorch's."""
    recipe = tiny_recipe(*MLM, f"init={{model: {decoder}}}")
    run = train(recipe, tmp_path / "runs").path
    told = export_checkpoint(str(run), tmp_path / "model", 0.25)
    trained, published = weights(find_checkpoint(str(run)) / "model"), weights(decoder)
    vocab_size = len(trained["lm_head.weight"])
    before = load_model(decoder, vocab_size=vocab_size, seed=recipe.seed).state_dict()
    merged = weights(tmp_path / "model")
    assert merged.keys() == trained.keys() == before.keys()
    for name, weight in before.items():
        torch.testing.assert_close(merged[name], 0.75 * trained[name] + 0.25 * weight)
    assert torch.equal(before["lm_head.weight"][: vocab_size - 2], published["lm_head.weight"])
    layer = [name for name in before if ".layers.1." in name]
    one, other = (torch.cat([each[name].flatten() for name in layer]).double() for each in (trained, before))
    expected = f"1 {cosine_similarity(one, other, dim=0):.4f}"
    card = (tmp_path / "model" / "README.md").read_text()
    for text in (told, card):
        assert expected in text
        assert "25% of it is decoder;" in text
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.is_causal is False
    assert "Then merged" in card
    assert "Then merged" not in export_text(str(run), tmp_path / "plain")


def export_text(run: str, folder: Path) -> str:
    export_checkpoint(run, folder)
    return (folder / "README.md").read_text()


def test_the_parent_is_the_last_that_looked_back_only(tiny_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """CLM → MLM → MLM in three runs: the average is with the first."""
    first = train(tiny_recipe(*CLM), tmp_path / "runs").path
    second = train(tiny_recipe(*MLM, f"init={{checkpoint: {first}}}"), tmp_path / "runs").path
    third = train(tiny_recipe(*MLM, f"init={{checkpoint: {second}}}"), tmp_path / "runs").path
    told = export_checkpoint(f"{third}", tmp_path / "model", 0.5)
    assert f"50% of it is {first.name}@2;" in told
    old, new = (weights(find_checkpoint(str(run)) / "model") for run in (first, third))
    for name, weight in weights(tmp_path / "model").items():
        torch.testing.assert_close(weight, (old[name] + new[name]) / 2)
    with pytest.raises(InputError, match="looks back only"):
        export_checkpoint(str(first), tmp_path / "other", 0.5)
    with pytest.raises(InputError, match="merge 1 is not a share"):
        export_checkpoint(str(third), tmp_path / "other", 1.0)
    assert not (tmp_path / "other").exists()


def test_nothing_else_is_merged_with(tiny_recipe: Callable[..., Recipe], decoder: Path, tmp_path: Path) -> None:
    """Not with random weights, not with a folder that has changed since or is gone."""
    scratch = train(tiny_recipe(*MLM), tmp_path / "runs").path
    with pytest.raises(InputError, match="began with random weights"):
        export_checkpoint(str(scratch), tmp_path / "model", 0.5)
    run = train(tiny_recipe(*MLM, f"init={{model: {decoder}}}"), tmp_path / "runs").path
    changed = {name: weight + 1 for name, weight in weights(decoder).items()}
    save_file(changed, decoder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="files have changed since"):
        export_checkpoint(str(run), tmp_path / "model", 0.5)
    shutil.rmtree(decoder)
    with pytest.raises(InputError, match="there is no such folder"):
        export_checkpoint(str(run), tmp_path / "model", 0.5)
    assert not (tmp_path / "model").exists()
