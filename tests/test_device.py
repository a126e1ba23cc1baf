"""Which device a process takes, where PyTorch says that there are GPUs."""

import pytest
import torch

from biphase.device import choose_device
from biphase.encoder.attention import explain_backend
from biphase.errors import InputError


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)


def test_each_process_takes_a_gpu_of_its_own(two_gpus: None) -> None:
    assert choose_device("auto", 1) == choose_device("cuda", 1) == torch.device("cuda", 1)
    assert choose_device("cpu", 2) == torch.device("cpu")
    for wanted in ("auto", "cuda"):
        with pytest.raises(InputError, match="than it has GPUs; start one for each: torchrun --nproc-per-node 2"):
            choose_device(wanted, 2)


def test_fp32_on_a_gpu_is_told_as_the_reason() -> None:
    assert "here is cuda in fp32" in explain_backend(torch.device("cuda"), torch.float32)
    assert "here is cpu)" in explain_backend(torch.device("cpu"), torch.bfloat16)
