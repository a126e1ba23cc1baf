"""Do runs on other numbers of processes differ by rounding alone? One recipe, trained in several ways, loss by loss.

`python benchmarks/rounding.py RECIPE.yaml FOLDER [KEY=VALUE]...` trains it by one process; by one whose first weight
begins one unit in the last place higher; with microbatches of half the size; and by two processes under DDP, under
FSDP2, and under each in turn, resumed at a third and at two thirds. If the others part from the first as the one with
the changed weight does, from as small a beginning and as fast, then they differ by rounding.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml

from biphase.config import load_config
from biphase.pretraining import job, loop
from biphase.recipe import Recipe
from biphase.run import Run, read_metrics

STEPS = (1, 50, 100, 150, 200, 250, 300, 350, 400)


def nudge_one_weight(network: Any) -> Any:
    weight = next(parameter for parameter in network.parameters() if parameter.ndim == 2).data
    weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(torch.inf))
    return network


def train_alone(recipe: Recipe, root: Path, *, is_nudged: bool = False) -> list[float]:
    loop.peak_flops = lambda device, dtype: 1e12  # type: ignore[assignment]
    patched: Any = job
    original = patched.load_network
    if is_nudged:
        patched.load_network = lambda *arguments: nudge_one_weight(original(*arguments))
    try:
        return losses(loop.train(recipe, root))
    finally:
        patched.load_network = original


def losses(run: Run) -> list[float]:
    return [record["loss"] for record in read_metrics(run, "train")]


def train_by_two(recipe: Recipe, root: Path, parallels: tuple[str, ...]) -> list[float]:
    """Each of `parallels` does an equal part of the run; all but the last stop there."""
    root.mkdir(parents=True, exist_ok=True)
    for number, parallel in enumerate(parallels, 1):
        compute = recipe.compute.model_copy(update={"parallel": parallel})
        file = root / "recipe.yaml"
        file.write_text(yaml.safe_dump(recipe.model_copy(update={"compute": compute}).model_dump(mode="json")))
        variables = {"STOP_AT": str(recipe.num_steps * number // len(parallels)), "OMP_NUM_THREADS": "1"}
        launcher = [sys.executable, "-m", "biphase.distributed", "--standalone", "--nproc-per-node=2"]
        command = [*launcher, __file__, "--rank", str(file), str(root / "runs")]
        code = subprocess.run(command, env=os.environ | variables, check=False).returncode
        assert code in (0, 143), f"exit code {code}"
    return losses(Run(next((root / "runs").iterdir())))


def train_as_rank(file: Path, root: Path) -> None:
    """What each of two processes does: train, and save and stop after update `STOP_AT`."""
    from biphase.errors import StoppedError

    loop.peak_flops = lambda device, dtype: 1e12  # type: ignore[assignment]
    torch.set_num_threads(1)
    patched: Any = loop
    original, stop = patched.update, int(os.environ["STOP_AT"])

    def update(task: Any, state: Any, microbatches: Any, step: int, flags: Any) -> Any:
        is_last = step + 1 == stop < task.recipe.num_steps
        return original(task, state, microbatches, step, lambda: (is_last, False))

    patched.update = update
    try:
        loop.train(load_config(Recipe, file), root)
    except StoppedError:
        sys.exit(143)


def main() -> None:
    if sys.argv[1] == "--rank":
        return train_as_rank(Path(sys.argv[2]), Path(sys.argv[3]))
    torch.set_num_threads(1)
    recipe, folder = load_config(Recipe, Path(sys.argv[1]), sys.argv[3:]), Path(sys.argv[2])
    half = recipe.compute.model_copy(update={"microbatch_tokens": recipe.compute.microbatch_tokens // 2})
    first = train_alone(recipe, folder / "alone")
    others = {
        "one weight, one ulp": train_alone(recipe, folder / "nudged", is_nudged=True),
        "half microbatches": train_alone(recipe.model_copy(update={"compute": half}), folder / "half"),
    }
    for parallels in (("ddp",), ("fsdp",), ("fsdp", "ddp", "fsdp")):
        others[" → ".join(parallels)] = train_by_two(recipe, folder / "-".join(parallels), parallels)
    steps = [step for step in STEPS if step <= len(first)]
    print("| largest difference of the loss up to step | " + " | ".join(map(str, steps)) + " |")
    for name, theirs in others.items():
        apart = [abs(mine - other) for mine, other in zip(first, theirs, strict=True)]
        print(f"| {name} | " + " | ".join(f"{max(apart[:step]):.0e}" for step in steps) + " |")
    (folder / "losses.json").write_text(json.dumps({"alone": first, **others}))


if __name__ == "__main__":
    main()
