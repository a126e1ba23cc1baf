"""Two processes compute what one does, and fail together: DDP and FSDP2 over gloo, and a run that changes its number
of processes.

This file is also the script that the two processes run: `test_distributed.py JOBS.json`.
"""

import errno
import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import RobertaConfig, RobertaForMaskedLM

from biphase.distributed import join_world
from biphase.errors import StoppedError
from biphase.pretraining.checkpoint import read_checkpoint_manifest
from biphase.pretraining.loop import train
from biphase.recipe import Recipe
from biphase.run import Run, read_metrics, whole_steps

pytestmark = pytest.mark.slow

Jobs = dict[str, Run]


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def start(rank: int, jobs: Path) -> subprocess.Popen[str]:
    """One process with the environment that torchrun would give it."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    environment = os.environ | {key: str(value) for key, value in variables.items()} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(jobs)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def save_roberta(folder: Path) -> Path:
    """A network whose output weights and their bias are tied, and whose head has matrices outside of the blocks."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    roles = {"pad_token_id": 2, "eos_token_id": 0, "bos_token_id": None}
    torch.manual_seed(0)
    config = RobertaConfig(vocab_size=384, max_position_embeddings=80, **sizes, **roles)
    RobertaForMaskedLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(tiny_recipe: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """The same run by one process, by two with DDP and with FSDP2; by two that are stopped at step 5, and by two of
    which the first finds its disk full, at a checkpoint or at a line of metrics.jsonl."""
    folder = tmp_path_factory.mktemp("distributed")
    phase = "curriculum=[{objective: mlm, steps: 20}]"
    masked = tiny_recipe(phase, f"init={{model: {save_roberta(folder / 'roberta')}}}", "validation.tokens=50")
    recipes = {
        # Four microbatches a process, and a small validation set of which one process gets an empty part.
        "ddp": tiny_recipe("compute.microbatch_tokens=64", "validation.tokens=50"),
        "fsdp": tiny_recipe("compute.microbatch_tokens=64", "validation.tokens=50", "compute.parallel=fsdp"),
        "stopped": tiny_recipe("compute.parallel=fsdp", "validation.tokens=50"),
        "full": tiny_recipe("compute.parallel=fsdp", "validation.tokens=50"),
        "unlogged": tiny_recipe("validation.tokens=50"),
        "masked-ddp": masked,
        "masked-fsdp": masked.model_copy(update={"compute": masked.compute.model_copy(update={"parallel": "fsdp"})}),
        # Begun by one process, resumed by two.
        "resumed-ddp": tiny_recipe("validation.tokens=50"),
        "resumed-fsdp": tiny_recipe("validation.tokens=50", "compute.parallel=fsdp"),
        "resumed-muon": tiny_recipe("validation.tokens=50", "optimizer.name=muon"),
    }
    for name in ("resumed-ddp", "resumed-fsdp", "resumed-muon"):
        begin(recipes[name], folder / name)
    # A port for each: the faster process must not meet the slower one's store of the job before.
    jobs = [
        {"root": str(folder / name), "recipe": recipe.model_dump(mode="json"), "port": free_port()}
        for name, recipe in recipes.items()
    ]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    processes = [start(rank, folder / "jobs.json") for rank in range(2)]
    try:
        outputs = [process.communicate(timeout=400)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    alone = {
        "alone": train(recipes["ddp"], folder / "alone"),
        "masked": train(masked, folder / "masked"),
        "muon": train(recipes["resumed-muon"], folder / "muon"),
    }
    return alone | {name: Run(next((folder / name).iterdir())) for name in recipes}


def begin(recipe: Recipe, root: Path) -> None:
    """Five steps by this process alone, ended by a signal."""
    import biphase.pretraining.loop as loop

    update, done = loop.update, []

    def update_and_stop(*args: Any) -> Any:
        done.append(1)
        if len(done) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(*args)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(StoppedError, match="stopped at step 5"):
        patch.setattr(loop, "update", update_and_stop)
        train(recipe, root)


def losses(run: Run, kind: str = "train") -> list[float]:
    return [row["loss"] for row in read_metrics(run, kind)]


PAIRS = [("alone", "ddp"), ("alone", "fsdp"), ("masked", "masked-ddp"), ("masked", "masked-fsdp")]


@pytest.mark.parametrize(("one", "parallel"), PAIRS)
def test_two_processes_compute_what_one_does(one: str, parallel: str, trained: Jobs) -> None:
    alone, two = trained[one], trained[parallel]
    assert two.path.name == alone.path.name
    assert losses(two) == pytest.approx(losses(alone), rel=1e-5)
    assert losses(two, "validation") == pytest.approx(losses(alone, "validation"), rel=1e-5)
    for key in ("tokens", "targets", "lr", "tokens_seen"):
        rows = [read_metrics(run, "train") for run in (alone, two)]
        assert [row[key] for row in rows[0]] == [row[key] for row in rows[1]]
    norms = [[row["grad_norm"] for row in read_metrics(run, "train")] for run in (alone, two)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
    assert json.loads((two.path / "environment.json").read_text())["processes"] == 2


@pytest.mark.parametrize(("one", "parallel"), PAIRS)
def test_checkpoints_of_two_processes_are_whole(one: str, parallel: str, trained: Jobs) -> None:
    folders = [trained[name].steps / "20" for name in (one, parallel)]
    assert read_checkpoint_manifest(folders[0]).files.keys() == read_checkpoint_manifest(folders[1]).files.keys()
    for name in ("model/model.safetensors", "optimizer.safetensors"):
        expected, found = (load_file(folder / name) for folder in folders)
        assert {key: value.shape for key, value in found.items()} == {k: v.shape for k, v in expected.items()}
        for key, value in expected.items():
            if ".key.bias" in key:  # moves no softmax: its gradient is rounding and nothing else
                continue
            assert (found[key] - value).abs().max() <= 2e-3 * value.abs().max(), key


def test_one_process_resumes_what_two_began(trained: Jobs, tiny_recipe: Callable[..., Recipe]) -> None:
    """A signal to one of the two stopped both, after the same step."""
    run = trained["stopped"]
    assert not run.is_done
    assert len(losses(run)) == 5
    assert train(tiny_recipe("validation.tokens=50"), run.path.parent) == run
    assert losses(run) == pytest.approx(losses(trained["alone"]), rel=1e-5)


RESUMED = [("alone", "resumed-ddp"), ("alone", "resumed-fsdp"), ("muon", "resumed-muon")]


@pytest.mark.parametrize(("one", "resumed"), RESUMED)
def test_two_processes_resume_what_one_began(one: str, resumed: str, trained: Jobs) -> None:
    """The second one takes the moments from the first: it may not read the file (`train_as_told`)."""
    assert losses(trained[resumed]) == pytest.approx(losses(trained[one]), rel=1e-5)
    expected, found = (load_file(trained[name].steps / "20" / "optimizer.safetensors") for name in (one, resumed))
    assert {key: value.shape for key, value in found.items()} == {k: v.shape for k, v in expected.items()}
    for key, value in expected.items():
        assert (found[key] - value).abs().max() <= 2e-3 * value.abs().max(), key


def test_all_processes_end_when_the_first_cannot_save(trained: Jobs) -> None:
    """Each with its own error (`train_as_told` looks), and none waits for the other."""
    assert whole_steps(trained["full"]) == []
    assert len(losses(trained["full"])) == 10


def test_all_processes_end_when_the_first_cannot_log(trained: Jobs, tiny_recipe: Callable[..., Recipe]) -> None:
    run = trained["unlogged"]
    assert len(losses(run)) == 3 and whole_steps(run) == []
    train(tiny_recipe("validation.tokens=50"), run.path.parent)
    assert losses(run) == pytest.approx(losses(trained["alone"]), rel=1e-5)


def test_one_process_is_a_world() -> None:
    with join_world("cpu") as world:
        assert (world.rank, world.size, world.is_main) == (0, 1, True)
        assert world.sum(1, 2.5) == [1.0, 2.5]
        assert world.any(True)
        assert not world.any(False)


def train_as_told(jobs: list[dict[str, Any]]) -> None:
    """What each of the two processes does."""
    import biphase.pretraining.checkpoint as checkpoint
    import biphase.pretraining.loop as loop
    import biphase.pretraining.metrics as metrics
    from biphase.errors import InputError

    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(300, exit=True)
    metrics.peak_flops = lambda device, dtype: 1e12
    update, done = loop.update, []

    def update_and_stop(*args: Any) -> Any:
        done.append(1)
        if len(done) == 5 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return update(*args)

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def log_three(run: Run, record: dict[str, Any]) -> None:
        return full() if record["step"] > 3 else log(run, record)

    log = Run.log
    is_first = os.environ["RANK"] == "0"
    if not is_first:
        checkpoint.load_file = lambda path: pytest.fail("more than one process reads the moments")
        checkpoint.file_hash = lambda path: pytest.fail("more than one process reads all files")
    ends: dict[str, tuple[type[Exception], str]] = {
        "stopped": (StoppedError, "stopped at step 5"),
        "full": (OSError, "No space left") if is_first else (InputError, "steps/10 could not be written; the first"),
        "unlogged": (OSError, "No space left") if is_first else (InputError, "metrics.jsonl could not be written; the"),
    }
    kept = []
    for job in jobs:
        recipe = Recipe.model_validate(job["recipe"])
        os.environ["MASTER_PORT"] = str(job["port"])
        name = Path(job["root"]).name
        if name not in ends:
            train(recipe, Path(job["root"]))
            continue
        kind, message = ends[name]
        with pytest.MonkeyPatch.context() as patch, pytest.raises(kind, match=message) as caught:
            kept.append(caught)
            if name == "stopped":
                patch.setattr(loop, "update", update_and_stop)
            elif name == "full":
                patch.setattr(checkpoint, "save_file", full)
            else:
                patch.setattr(Run, "log", log_three)
            train(recipe, Path(job["root"]))
    # A failed run's frames hold its process group. Its end may wait for a thread that waits for this one, so that what
    # was raised is kept, and left to the end of the process, as in a command.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    train_as_told(json.loads(Path(sys.argv[1]).read_text()))
