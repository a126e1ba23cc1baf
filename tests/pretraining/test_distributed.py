"""Two processes compute what one does, and fail together: DDP and FSDP2 over gloo, and a run that changes its number
of processes. Parts of a network have the bytes that are planned for them; none has all moments, none gathers all
weights to save them, and the first alone has them to load them.

This file is also the script of the processes, forks of one that has loaded PyTorch: `test_distributed.py JOBS.json`.
"""

import errno
import faulthandler
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from transformers import RobertaConfig, RobertaForMaskedLM

from biphase.console import err
from biphase.distributed import join_world
from biphase.encoder.attention import lay_out
from biphase.encoder.packed import PackedModel
from biphase.errors import InputError, StoppedError
from biphase.flops import plan_memory, shape_of
from biphase.pretraining.loop import train
from biphase.pretraining.optimizer import autocast
from biphase.recipe import ComputeConfig, Recipe
from biphase.run import Run, read_checkpoint_manifest, read_metrics, whole_steps

pytestmark = [pytest.mark.slow, pytest.mark.minutes]  # each of two fixtures trains for half a minute or more

Jobs = dict[str, Run]


def run_script(jobs: list[dict[str, Any]], folder: Path) -> None:
    """This file in a process of its own, which does what the jobs say; nothing of it is left."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    process = subprocess.Popen(
        [sys.executable, __file__, str(folder / "jobs.json")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=400)[0]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output


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
    roberta = save_roberta(folder / "roberta")
    masked = tiny_recipe(phase, f"init={{model: {roberta}}}", "validation.tokens=50")
    adapted = tiny_recipe(phase, f"init={{model: {roberta}, lora: {{r: 4}}}}", "validation.tokens=50")
    recipes = {
        # Four microbatches a process, and a small validation set of which one process gets an empty part.
        "ddp": tiny_recipe("compute.microbatch_tokens=64", "validation.tokens=50"),
        "fsdp": tiny_recipe("compute.microbatch_tokens=64", "validation.tokens=50", "compute.parallel=fsdp"),
        "stopped": tiny_recipe("compute.parallel=fsdp", "validation.tokens=50"),
        "full": tiny_recipe("compute.parallel=fsdp", "validation.tokens=50"),
        "unlogged": tiny_recipe("validation.tokens=50"),
        "masked-ddp": masked,
        "masked-fsdp": masked.model_copy(update={"compute": masked.compute.model_copy(update={"parallel": "fsdp"})}),
        "adapted-ddp": adapted,
        # Begun by one process, resumed by two.
        "resumed-ddp": tiny_recipe("validation.tokens=50"),
        "resumed-fsdp": tiny_recipe("validation.tokens=50", "compute.parallel=fsdp"),
        "resumed-muon": tiny_recipe("validation.tokens=50", "optimizer.name=muon"),
    }
    for name in ("resumed-ddp", "resumed-fsdp", "resumed-muon"):
        begin(recipes[name], folder / name)
    jobs = [{"root": str(folder / name), "recipe": recipe.model_dump(mode="json")} for name, recipe in recipes.items()]
    jobs.append({"root": str(folder / "unlike"), "recipe": masked.model_dump(mode="json")})
    run_script(jobs, folder)
    assert not (folder / "unlike").exists()
    alone = {
        "alone": train(recipes["ddp"], folder / "alone"),
        "masked": train(masked, folder / "masked"),
        "adapted": train(adapted, folder / "adapted"),
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
            signal.raise_signal(signal.SIGTERM)
        return update(*args)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(StoppedError, match="stopped at step 5"):
        patch.setattr(loop, "update", update_and_stop)
        train(recipe, root)


def losses(run: Run, kind: str = "train") -> list[float]:
    return [row["loss"] for row in read_metrics(run, kind)]


PAIRS = [
    ("alone", "ddp"),
    ("alone", "fsdp"),
    ("masked", "masked-ddp"),
    ("masked", "masked-fsdp"),
    ("adapted", "adapted-ddp"),
]


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
    assert len({(folder / "model" / "config.json").read_text() for folder in folders}) == 1
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
    assert losses(trained[resumed]) == pytest.approx(losses(trained[one]), rel=1e-5)
    expected, found = (load_file(trained[name].steps / "20" / "optimizer.safetensors") for name in (one, resumed))
    assert {key: value.shape for key, value in found.items()} == {k: v.shape for k, v in expected.items()}
    for key, value in expected.items():
        assert (found[key] - value).abs().max() <= 2e-3 * value.abs().max(), key


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
SIX_LAYERS = {"num_hidden_layers": 6, "hidden_size": 256, "intermediate_size": 512} | HEADS
SIZES = (1, 2, 4, 1)
"""How many processes go through the same checkpoint, one group after the other."""


@pytest.fixture(scope="module")
def handed_on(corpus: Any, tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, float]]]:
    """What each process of each group had in memory, in bytes; the checkpoints that they wrote are steps 0 to 3."""
    folder = tmp_path_factory.mktemp("handed-on")
    common = {"root": str(folder), "tokenizer": str(corpus.tokenizer)}
    jobs = [{**common, "size": size, "step": step} for step, size in enumerate(SIZES)]
    run_script(jobs, folder)
    written = [[folder / f"{step}-{rank}.json" for rank in range(size)] for step, size in enumerate(SIZES)]
    steps = [folder / "steps" / str(step) for step in range(len(SIZES))]
    assert len({(step / "optimizer.safetensors").read_bytes() for step in steps}) == 1, "whoever read and wrote them"
    # The weights of all but the first are those of the start, the last ones written by one process.
    assert len({read_checkpoint_manifest(step).content for step in steps[1:]}) == 1
    return [[json.loads(path.read_text()) for path in group] for group in written]


def test_no_process_has_all_moments_or_all_weights(handed_on: list[list[dict[str, float]]]) -> None:
    """A part of four of the moments, and where anything is written one tensor at a time, of weights and moments. The
    first process alone makes the network whole."""
    weights, whole = (handed_on[0][0][name] for name in ("weights", "moments"))
    for group in handed_on[1:3]:
        first, *others = (found["making"] - found["weights"] for found in group)
        assert first < 1.3 * weights
        # Besides its part, tensors on their way: one, or some where a busy machine lets them wait; never all.
        assert max(others) < 0.8 * weights
    for found in handed_on[SIZES.index(4)]:
        assert found["loading"] < 0.3 * whole
        assert found["saving"] < 0.2 * whole


@pytest.mark.parametrize("number", range(3))
def test_planned_memory_beside_what_is_allocated(
    number: int, handed_on: list[list[dict[str, float]]], tiny_recipe: Callable[..., Recipe]
) -> None:
    """Parts are as planned, and all that an update allocates is no more than that, and not much less. Where processes
    exchange tensors on a busy machine, weights and gradients of one more block may wait to be freed."""
    found = handed_on[number][0]
    batch = f"batch_tokens={128 * SIZES[number]}"
    recipe = tiny_recipe(batch, "compute.microbatch_tokens=128", "compute.parallel=fsdp")
    planned = plan_memory(shape_of("1m", SIX_LAYERS, 384), recipe, SIZES[number])
    for name in ("weights", "gradients", "moments"):
        assert found[name] == pytest.approx(planned[name], rel=1e-3), name
    block = 4 * (4 * 256 * 256 + 3 * 256 * 512)  # in fp32, as gathered
    waiting = 2 * block if SIZES[number] > 1 else 0
    assert 0.65 * planned["total"] < found["update"] < planned["total"] + waiting


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
    with join_world(ComputeConfig(device="cpu")) as world:
        assert (world.rank, world.size, world.is_main) == (0, 1, True)
        assert world.sum(1, 2.5) == [1.0, 2.5]
        assert world.on_first(lambda: "value") == "value"
        with pytest.raises(InputError, match=r"^here"), world.fail_together():
            raise InputError("here")


# The script


def fork_processes(size: int, work: Callable[[], None], port: str = "") -> None:
    """`work` in so many forks, with the environment that torchrun would give them, until all have ended well."""
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
            os.environ |= {key: str(value) for key, value in variables.items()}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
            faulthandler.dump_traceback_later(300, exit=True)
            try:
                work()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            # A failed run's frames hold its process group. Its end may wait for a thread that waits for this one, so
            # that what was raised is left to the end of the process, as in a command.
            os._exit(0)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert not any(codes), codes


def train_as_told(jobs: list[dict[str, Any]]) -> None:
    """What each of the two processes does."""
    import biphase.pretraining.checkpoint as checkpoint
    import biphase.pretraining.loop as loop

    loop.peak_flops = lambda device, dtype: 1e12
    update, done = loop.update, []

    def update_and_stop(*args: Any) -> Any:
        done.append(1)
        if len(done) == 5 and os.environ["RANK"] == "1":
            signal.raise_signal(signal.SIGTERM)
        return update(*args)

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def log_three(run: Run, record: dict[str, Any]) -> None:
        return full() if record["step"] > 3 else log(run, record)

    log = Run.log
    is_first = os.environ["RANK"] == "0"
    if not is_first:
        checkpoint.refuse_changed = lambda *args: pytest.fail("more than one process reads all files")
        loop.whole_steps = lambda run: []  # over NFS it may see an older state of the folder
    elsewhere = (InputError, "another process of this run says why")
    ends: dict[str, tuple[type[Exception], str]] = {
        "stopped": (StoppedError, "stopped at step 5"),
        "full": (InputError, "No space left") if is_first else elsewhere,
        "unlogged": (OSError, "No space left") if is_first else elsewhere,
        "unlike": (InputError, r"the processes would train different runs \(\w{8}, \w{8}\)"),
    }
    kept = []
    for job in jobs:
        recipe = Recipe.model_validate(job["recipe"])
        os.environ["MASTER_PORT"] = job["port"]
        name = Path(job["root"]).name
        if name not in ends:
            train(recipe, Path(job["root"]))
            continue
        kind, message = ends[name]
        with pytest.MonkeyPatch.context() as patch, pytest.raises(kind, match=message) as caught:
            kept.append(caught)
            if name == "stopped":
                patch.setattr(loop, "update", update_and_stop)
            elif name == "unlike":  # on two machines
                patch.setenv("LOCAL_RANK", "0")
                recipe = recipe.model_copy(update={"seed": int(os.environ["RANK"])})
            elif name == "full":
                patch.setattr(checkpoint, "write_tensors", full)
            else:
                patch.setattr(Run, "log", log_three)
            train(recipe, Path(job["root"]))
        assert err.quiet == (not is_first and name != "unlike"), "one process of each machine says why it ends"


def hand_on(job: dict[str, Any]) -> None:
    """What one of several processes does: take over the checkpoint of the step before, and write the next one.

    The first group begins with an update. All end with one that goes nowhere. It tells the most that each needed
    besides what it had, and after that update what there is.
    """
    from test_checkpoint import MANIFEST

    from biphase.corpus.tokenizer import load_tokenizer
    from biphase.encoder.network import TokenIds, make_model
    from biphase.pretraining.checkpoint import load_optimizer, save_checkpoint
    from biphase.pretraining.optimizer import fill_parts, make_optimizers, outline_network, parallelize
    from biphase.recipe import Optimizer

    run, step, tokenizer = Run(Path(job["root"])), job["step"], load_tokenizer(job["tokenizer"])
    compute = ComputeConfig(device="cpu", precision="bf16", parallel="fsdp", compile="off")
    with join_world(compute) as world:
        load = partial(make_model, "1m", SIX_LAYERS, TokenIds(384, 1, 0, 2, None), 64, seed=0)
        model: Any = None
        found = {}

        def make() -> None:
            nonlocal model
            network, whole = outline_network(load, world) if world.size > 1 else (load(), None)
            model = parallelize(PackedModel(network), compute, world, compiles=False)
            if world.size > 1:
                fill_parts(model, whole, world)

        found["making"] = most_allocated(make)
        optimizers = make_optimizers(Optimizer(), model, sharded=world.size > 1)

        def update() -> None:
            tokens = torch.arange(128)
            with autocast(world.device, world.dtype):
                layout = lay_out(np.arange(0, 129, 32), causal=True)
                loss, _, _ = model(tokens, tokens % 32, layout, tokens, tokens)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()

        if step:
            before = run.steps / str(step - 1)
            found["loading"] = most_allocated(lambda: load_optimizer(before, model, optimizers, world))
            found["loading"] -= (before / "optimizer.safetensors").stat().st_size  # mapped, not held
        else:
            update()
            model.zero_grad(set_to_none=True)
        manifest = replace(MANIFEST, step=step)
        found["saving"] = most_allocated(lambda: save_checkpoint(run, manifest, model, optimizers, tokenizer, world))
        if world.size > 1 and world.is_main:  # mapped, not held
            found["saving"] -= (run.steps / str(step) / "model" / "model.safetensors").stat().st_size
        found["update"] = most_allocated(update)
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        found["weights"] = local_bytes(model.parameters())
        found["gradients"] = local_bytes(parameter.grad for parameter in model.parameters())
        found["moments"] = local_bytes(tensor for state in states for tensor in state.values())
        found["update"] += found["weights"] + found["moments"]
        (run.path / f"{step}-{world.rank}.json").write_text(json.dumps(found))


def local_bytes(tensors: Iterable[Any]) -> int:
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(part.numel() * part.element_size() for part in parts)


def most_allocated(work: Callable[[], object]) -> int:
    """The most bytes of tensors that were there at once, without those that were there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as traced:
        work()
    events = [event for event in traced.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events), default=0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    told = json.loads(Path(sys.argv[1]).read_text())
    # The processes of each job meet in a store that is there before them, as torchrun's is. A port that is only looked
    # up here may be taken before they listen; in a store of the job before, the faster process meets the slower one.
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in told]
    told = [{**each, "port": str(store.port)} for each, store in zip(told, stores, strict=True)]
    if "recipe" in told[0]:
        fork_processes(2, partial(train_as_told, told))
    else:
        for each in told:
            fork_processes(each["size"], partial(hand_on, each), each["port"])
