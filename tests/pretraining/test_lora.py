"""Training with LoRA: beside peft's own loop, resumed, branched, and with merged checkpoints that need no peft."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode
from training_runs import MakeRecipe, digests, loader_of, losses, numbers, only, shorter, train_until, weights_at
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from biphase.errors import InputError
from biphase.exporting.model import export_checkpoint
from biphase.files import file_hash
from biphase.pretraining.job import load_network, load_state
from biphase.pretraining.loop import train
from biphase.pretraining.objectives import make_microbatches
from biphase.recipe import Recipe
from biphase.run import Run, read_checkpoint_manifest


def save_decoder(folder: Path, is_tied: bool) -> Path:
    """A Llama that lacks the last two tokens of the tests' vocabulary, with weights larger than usual."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=382, num_key_value_heads=2, tie_word_embeddings=is_tied, initializer_range=0.1, **sizes
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_decoder(tmp_path_factory.mktemp("base") / "llama", is_tied=True)


def adapt(make: MakeRecipe, model: Path, *overrides: str, lora: str = "{r: 4}") -> Recipe:
    """Six updates of MLM at a constant rate."""
    origin = f"init={{model: {model}, lora: {lora}}}"
    return make(*only("mlm", 6, "validation.every_steps=0", "schedule.peak_lr=2e-2", *overrides), origin)


@pytest.mark.parametrize("targets", ["all-linear", "[q_proj, mlp.down_proj]"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_losses_and_weights_are_those_of_pefts_own_loop(
    is_tied: bool, targets: str, tiny_recipe: MakeRecipe, tmp_path: Path
) -> None:
    """On each sample alone, of unequal lengths, with torch's AdamW. The weights of the base stay as they are."""
    folder = save_decoder(tmp_path / "llama", is_tied)
    before = file_hash(folder / "model.safetensors")
    recipe = adapt(tiny_recipe, folder, lora=f"{{r: 4, lora_alpha: 6, target_modules: {targets}}}")
    run = train(recipe, tmp_path / "runs")
    assert file_hash(folder / "model.safetensors") == before

    job, batches = loader_of(recipe)
    mask_id = job.text.main.manifest.mask_id
    network = load_network(recipe, job.origin, job.text.main)
    network.set_attn_implementation("eager")
    network.config.is_causal = False
    started = {name: weight.clone() for name, weight in network.state_dict().items()}
    named = targets if targets == "all-linear" else ["q_proj", "down_proj"]
    rows = sorted({mask_id, *range(382, 384)})
    torch.manual_seed(recipe.seed)
    config = LoraConfig(r=4, lora_alpha=6, target_modules=named, trainable_token_indices=rows)
    theirs: Any = get_peft_model(network, config)
    trained = [weight for weight in theirs.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-2, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)
    expected, lengths = [], set[int]()
    for step in range(6):
        total, count = torch.zeros(()), 0
        for part in make_microbatches(job, batches, recipe.curriculum[0], step):
            sizes = part.lengths_S.tolist()
            alone = [theirs(input_ids=x[None]).logits[0] for x in part.inputs_T[: sum(sizes)].split(sizes)]
            logits_NV = torch.cat(alone)[part.target_positions_N]
            total = total + torch.nn.functional.cross_entropy(logits_NV, part.targets_N, reduction="sum")
            count, lengths = count + len(part.targets_N), lengths | {*sizes}
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(total.detach()) / count)
    assert len(lengths) > 4
    assert losses(run) == pytest.approx(expected, rel=2e-5)
    assert expected[0] - expected[-1] > 0.1

    merged = theirs.merge_and_unload().state_dict()
    ours = weights_at(run, 6)
    assert {*ours} == {*merged} - ({"lm_head.weight"} if is_tied else set())
    for name, weight in ours.items():
        moved = float((weight - started[name]).abs().max())
        is_trained = "_proj" in name and (targets == "all-linear" or "q_proj" in name or "down_proj" in name)
        assert (moved > 0) == (is_trained or "embed_tokens" in name), name
        torch.testing.assert_close(weight, merged[name], rtol=0, atol=1e-3 * moved, msg=name)
    others = [token for token in range(384) if token not in rows]
    assert torch.equal(ours["model.embed_tokens.weight"][others], started["model.embed_tokens.weight"][others])


@pytest.mark.parametrize("settings", ["adamw", "muon"])
def test_a_run_with_adapters_resumes_bit_exactly(
    settings: str, base: Path, tiny_recipe: MakeRecipe, tmp_path: Path
) -> None:
    """With dropout, which draws the same numbers again."""
    lora = "{r: 4, lora_dropout: 0.2}"
    recipe = adapt(tiny_recipe, base, f"optimizer.name={settings}", lora=lora)
    whole = train(recipe, tmp_path / "whole")
    path = train_until(4, recipe, tmp_path / "parts")
    run = train(recipe, tmp_path / "parts")
    assert run.path == path and digests(run, 6) == digests(whole, 6) and numbers(run) == numbers(whole)
    assert file_hash(run.steps / "6" / "model" / "config.json") == file_hash(
        whole.steps / "6" / "model" / "config.json"
    )
    assert losses(run) != losses(train(adapt(tiny_recipe, base, f"optimizer.name={settings}"), tmp_path / "without"))
    stored = load_file(run.steps / "6" / "optimizer.safetensors")
    assert all(".lora_" in name or "rows_KD" in name for name in stored), "frozen weights have no moments"


def test_a_checkpoint_is_a_plain_model(base: Path, tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    """Its logits are those of the network that trained; it is exported, and trains on without adapters."""
    recipe = adapt(tiny_recipe, base)
    run = train(recipe, tmp_path / "runs")
    job, _ = loader_of(recipe)
    trained = load_state(job.__class__(recipe, run, job.world, job.text, job.origin), 6).model.network.eval()
    trained.set_attn_implementation("eager")
    tokens = torch.arange(340, 384)[None]
    plain = AutoModelForCausalLM.from_pretrained(run.steps / "6" / "model", attn_implementation="eager").eval()
    trained.config.is_causal = False
    with torch.no_grad():
        expected = trained(input_ids=tokens).logits
        torch.testing.assert_close(plain(input_ids=tokens).logits, expected, rtol=1e-5, atol=1e-5 * expected.std())
    assert "bidirectional" in export_checkpoint(str(run.path), tmp_path / "exported", merge=0.5)
    told = "no AdamW state for .*use init.carry_optimizer=false"
    with pytest.raises(InputError, match=told):
        train(tiny_recipe(*only("mlm", 1), f"init={{checkpoint: {run.path}}}"), tmp_path / "branch")
    branch = tiny_recipe(*only("mlm", 1), f"init={{checkpoint: {run.path}, carry_optimizer: false}}")
    assert read_checkpoint_manifest(train(branch, tmp_path / "branch").steps / "7").carried[0] == "weights"


def test_new_adapters_go_on_from_merged_ones(base: Path, tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    """Resumed bit for bit, but not beside other weights than those with which they began."""
    long = train(adapt(tiny_recipe, base, "curriculum.0.steps=7", "checkpoints.keep=[6]"), tmp_path / "long")
    parent = Run(shutil.copytree(long.path, tmp_path / "parents" / long.path.name))
    origin = f"init={{checkpoint: {parent.path}@6, carry_optimizer: false, lora: {{r: 2}}}}"
    recipe = tiny_recipe(*only("mlm", 3, origin, "validation.every_steps=0"))
    whole = train(recipe, tmp_path / "whole")
    assert losses(whole)[0] == pytest.approx(losses(long)[6], rel=1e-5)
    train_until(2, recipe, tmp_path / "parts")
    shutil.copytree(tmp_path / "parts", tmp_path / "more")
    assert digests(train(recipe, tmp_path / "parts"), 9) == digests(whole, 9)
    shutil.rmtree(parent.steps / "6")
    with pytest.raises(InputError, match=r"steps/6/model, beside which the adapters of .* train, is gone: put it back"):
        train(recipe, tmp_path / "more")


def test_flops_are_those_that_torch_counts(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    """Frozen weights have no gradients, and a tied head has one for all rows."""
    for is_tied in (True, False):
        folder = save_decoder(tmp_path / str(is_tied), is_tied)
        job, batches = loader_of(adapt(tiny_recipe, folder))
        state = load_state(job, 0)
        (part, *_) = make_microbatches(job, batches, job.recipe.curriculum[0], 0)
        planned = state.flops.batch(part.lengths_S, len(part.targets_N), causal=False)
        with FlopCounterMode(display=False) as counted:
            loss, _, _ = state.model(
                part.inputs_T, part.positions_T, part.layout, part.target_positions_N, part.targets_N
            )
            loss.backward()
        assert counted.get_total_flops() == pytest.approx(planned, rel=0.005)


def test_what_is_refused(base: Path, tiny_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="random weights of a preset as they are; leave lora out"):
        tiny_recipe("init.lora.r=4")
    with pytest.raises(InputError, match=r"'init.lora.r' is 0: input should be greater than or equal to 1"):
        adapt(tiny_recipe, base, lora="{r: 0}")
    with pytest.raises(InputError, match="which have no moments yet; say carry_optimizer: false"):
        tiny_recipe("init={checkpoint: run, lora: {r: 4}}")
    with pytest.raises(InputError, match="lora would leave the random weights of a new_head"):
        tiny_recipe("init={model: name, new_head: true, lora: {r: 4}}")
    with pytest.raises(InputError, match=r"init\.lora needs whole matrices; use compute.parallel=ddp"):
        adapt(tiny_recipe, base, "compute.parallel=fsdp")
    with pytest.raises(
        InputError, match=r"no linear layer of the blocks is called 'proj'; known: down_proj, gate_proj"
    ):
        train(adapt(tiny_recipe, base, lora="{r: 4, target_modules: proj}"), tmp_path)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InputError, match=r"^lora needs peft: pip install 'biphase\[lora\]'$"):
        train(adapt(tiny_recipe, base), tmp_path)
    assert not [*tmp_path.iterdir()], "a run that cannot start leaves nothing"


def test_a_run_without_lora_keeps_its_name(tiny_recipe: MakeRecipe) -> None:
    recipe = tiny_recipe(*shorter())
    assert "lora" not in json.dumps(recipe.weights_tree)
    other = tiny_recipe(*shorter("init={model: name, lora: {r: 4}}"))
    assert other.weights_tree["init"]["lora"]["r"] == 4
