"""What a GPU would be given, on a simulated one: training, fine-tuning, prediction, embedding, export."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
CHOSEN = {
    # There is no NCCL, and no compiler; with groups of heads, a window and a cap there is all that is there without.
    "what only a GPU can show, adapted and exported": {
        "test_gpu.py": "not fsdp and not on- and not 4-4 and not 6-2-0 and not None",
        "exporting/test_parent.py": "average",
        "pretraining/test_start.py": "encoder or bit_exactly",
    },
    "fine-tuned and kept, embedding models": {
        "test_waits.py": "waits",
        "finetuning/test_keeping.py": "classifies_texts or tags_tokens or is_kept_for",
        "finetuning/test_predict.py": "answers_as_scored or words_as_scored or is_kept_for or with_a_head",
        "embedding/test_training.py": (
            "without_our_code or others_saved or stages_follow or teacher_is_followed or left_out"
        ),
    },
}
"""What is run there of some files, a way of each kind: an operation takes several times as long as on a CPU."""
CODE = """
import simulated_gpu, torch
x = torch.arange(6.0, device="cuda").reshape(2, 3).requires_grad_()
(x @ torch.ones(3, 1).to("cuda")).sum().backward()
assert str(x.grad.device) == "cuda:0" and x.grad.tolist() == [[1.0] * 3] * 2
for mistake in (lambda: x + torch.ones(3), lambda: torch.ones(2)[x[:, 0] > 0], lambda: x.detach().numpy()):
    try:
        mistake()
    except (RuntimeError, TypeError) as error:
        print(type(error).__name__)
"""

DEMO = """
from pathlib import Path
from biphase.cli.commands import demo
demo(Path("demo"), changes=[
    "arms.0.budgets=[6]", "arms.0.curricula=[40/60]", "hypotheses=[]",
    "recipe.schedule={peak_lr: 6e-3, warmup_steps: 2, decay_steps: 2}",
    "recipe.validation.tokens=2000", "recipe.compute.precision=bf16", "evaluation.seeds=1",
    "evaluation.finetune.precision=bf16", "evaluation.finetune.max_eval_examples=50",
    "evaluation.tasks=[genre]", "evaluation.per_task={genre: {max_train_examples: 32}}",
])
"""

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch has a device of its own"),
]


def run(*arguments: str, beside: Path = TESTS, cwd: Path = TESTS.parent) -> str:
    path = os.pathsep.join([str(beside), str(TESTS), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "BIPHASE_TEST_DEVICE": "cuda"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.minutes
def test_the_device_refuses_what_cuda_refuses() -> None:
    assert run("-c", CODE).split() == ["RuntimeError", "RuntimeError", "TypeError"]


@pytest.mark.slow
@pytest.mark.minutes
@pytest.mark.parametrize("what", CHOSEN)
def test_on_a_simulated_gpu(what: str) -> None:
    selected = " or ".join(f"({Path(name).name} and ({words}))" for name, words in CHOSEN[what].items())
    options = ("-p", "simulated_gpu", "-p", "no:cacheprovider", "--tb=short", "-k", selected)
    run("-m", "pytest", *options, *(str(TESTS / name) for name in CHOSEN[what]))


@pytest.mark.slow
@pytest.mark.minutes
def test_a_study_in_workers_on_a_simulated_gpu(tmp_path: Path) -> None:
    """Each process of it is given the device."""
    (tmp_path / "sitecustomize.py").write_text("import simulated_gpu\n")
    run("-c", DEMO, beside=tmp_path, cwd=tmp_path)
    environments = list((tmp_path / "demo").rglob("environment.json"))
    assert environments and all(json.loads(path.read_text())["device"] == "NVIDIA H200" for path in environments)
