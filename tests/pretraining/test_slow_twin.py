"""Each objective beside a plain loop over tokens, with transformers' own forward under a mask that is written out."""

import copy
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_runs import MakeRecipe, loader_of, losses, only

from biphase.curriculum import OBJECTIVES
from biphase.files import read_json
from biphase.pretraining.job import load_state
from biphase.pretraining.loop import train
from biphase.pretraining.objectives import label_batch, make_microbatches

GOLDEN = Path(__file__).parents[1] / "golden" / "objectives.json"
LOOKS_AHEAD = {"clm": False, "meap": False, "causal-mlm": False, "mntp": True, "mlm": True}
"""By hand, as everything here: nothing asks the facts of an objective."""


def set_up(tiny_recipe: MakeRecipe, objective: str) -> tuple[Any, Any, Any, Any]:
    """A job, its batches, its network with weights large enough that tokens matter, and the same one as it comes."""
    job, batches = loader_of(tiny_recipe(*only(objective, 1, "batch_tokens=1600", "compute.microbatch_tokens=800")))
    ours = load_state(job, 0).model.eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter) / parameter.shape[-1] ** 0.25)
    theirs = copy.deepcopy(ours.network)
    theirs.set_attn_implementation("eager")
    return job, batches, ours, theirs


def logits_by_transformers(theirs: Any, inputs: list[int], samples: list[list[int]], looks_ahead: bool) -> torch.Tensor:
    """Logits [T, V] of samples that lie end to end; `samples` are the places of each one's tokens."""
    mask = np.full((len(inputs), len(inputs)), torch.finfo(torch.float32).min, dtype=np.float32)  # quick to fill
    positions = [0] * len(inputs)
    for places in samples:
        for number, reader in enumerate(places):
            positions[reader] = number
            for other, read in enumerate(places):
                if looks_ahead or other <= number:
                    mask[reader, read] = 0.0
    where = torch.tensor([positions])
    mask_1TT = torch.from_numpy(mask)[None, None]
    return theirs(input_ids=torch.tensor([inputs]), position_ids=where, attention_mask=mask_1TT).logits[0]


def places_of(batch: Any) -> list[list[int]]:
    bounds = batch.bounds_S1.tolist()
    return [list(range(first, end)) for first, end in itertools.pairwise(bounds)]


def targets_by_hand(objective: str, tokens: list[int], inputs: list[int], samples: list[list[int]]) -> dict[int, int]:
    """Positions → the place in the text whose token they must predict."""
    asked = {}
    for places in samples:
        for number, place in enumerate(places):
            is_masked = inputs[place] != tokens[place]
            if objective in ("clm", "meap") and number + 1 < len(places):
                asked[place] = places[number + 1]
            if objective in ("mlm", "causal-mlm") and is_masked:
                asked[place] = place
            if objective == "mntp" and is_masked:
                assert number > 0, "no position of the sample is before its first token"
                asked[places[number - 1]] = place
    return asked


@pytest.mark.parametrize("objective", LOOKS_AHEAD)
def test_an_objective_is_a_plain_loop_over_tokens(objective: str, tiny_recipe: MakeRecipe) -> None:
    """Losses and gradients of two packed microbatches of unequal samples."""
    job, batches, ours, theirs = set_up(tiny_recipe, objective)
    phase, loss, lengths, num_masked = job.recipe.curriculum[0], torch.zeros(()), [], 0
    microbatches = make_microbatches(job, batches, phase, 0)
    for part, micro in enumerate(microbatches):
        batch = batches.batch(0, part, len(microbatches))
        tokens, inputs, samples = (
            batch.tokens_T.tolist(),
            micro.inputs_T[: len(batch.tokens_T)].tolist(),
            places_of(batch),
        )
        asked = targets_by_hand(objective, tokens, inputs, samples)
        logits_TV = logits_by_transformers(theirs, inputs, samples, LOOKS_AHEAD[objective])
        plain = torch.zeros(())
        for place, target in asked.items():
            plain = plain + torch.logsumexp(logits_TV[place], 0) - logits_TV[place, tokens[target]]
        found, _, _ = ours(micro.inputs_T, micro.positions_T, micro.layout, micro.target_positions_N, micro.targets_N)
        assert len(micro.targets_N) == len(asked) > 20
        assert float(found.detach()) == pytest.approx(float(plain.detach()), rel=1e-5)
        found.backward()
        loss = loss + plain
        lengths += [len(places) for places in samples]
        num_masked += sum(a != b for a, b in zip(tokens, inputs, strict=True))
    assert len(microbatches) == 2 and len({*lengths}) > 4
    assert (num_masked > 100) == (objective != "clm")
    assert float(loss.detach()) > 1.2 * math.log(384) * 100, "the weights are too small for a difference to be seen"
    loss.backward()
    for (name, mine), other in zip(ours.network.named_parameters(), theirs.parameters(), strict=True):
        scale = float(other.grad.abs().max())
        assert scale > 0, name
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=1e-4 * scale, msg=name)


@pytest.mark.parametrize("objective", LOOKS_AHEAD)
def test_no_position_is_shown_what_it_must_predict(objective: str, tiny_recipe: MakeRecipe) -> None:
    """Another token as target, in the text itself, moves no logit of the position that predicts it."""
    job, batches, _, theirs = set_up(tiny_recipe, objective)
    phase, manifest, batch = job.recipe.curriculum[0], job.text.main.manifest, batches.batch(0, 0, 2)
    samples, special = places_of(batch), {*manifest.special_ids}

    def label() -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
        inputs_T, positions_N, targets_N = label_batch(phase, batch, manifest, job.recipe.seed)
        with torch.no_grad():
            logits_TV = logits_by_transformers(theirs, inputs_T.tolist(), samples, LOOKS_AHEAD[objective])
        return logits_TV, positions_N, targets_N

    logits_TV, positions_N, targets_N = label()
    shift, tried, moved_any = int(objective in ("clm", "meap", "mntp")), 0, False
    for position, target in list(zip(positions_N.tolist(), targets_N.tolist(), strict=True))[3::41]:
        if target in special:
            continue
        batch.tokens_T[position + shift] = 40 + (target == 40)
        changed_TV, again_N, _ = label()
        batch.tokens_T[position + shift] = target
        assert again_N.tolist() == positions_N.tolist(), "which tokens are masked hangs on the tokens"
        torch.testing.assert_close(changed_TV[position], logits_TV[position], rtol=0, atol=0)
        moved_any |= bool((changed_TV != logits_TV).any())
        tried += 1
    assert tried >= 4
    assert moved_any == (objective in ("clm", "meap")), "only there does a later position see a target"


def test_golden_losses_of_each_objective(tiny_recipe: MakeRecipe, tmp_path: Path, update_golden: bool) -> None:
    """Two steps of each one in a row, of 15 % masked tokens; the same losses as when they were written."""
    phases = ", ".join(f"{{objective: {name}, steps: 2, mask_probability: 0.15}}" for name in OBJECTIVES)
    found = losses(train(tiny_recipe(*only("clm", 1, f"curriculum=[{phases}]")), tmp_path))
    if update_golden:
        GOLDEN.write_text(json.dumps({"loss": found}, indent=1) + "\n")
    assert found == pytest.approx(read_json(GOLDEN)["loss"], rel=1e-4)
