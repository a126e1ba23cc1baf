"""Which device a process takes, where PyTorch says that there are GPUs; items that a thread makes ahead."""

import itertools
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from biphase.device import choose_device, prefetch
from biphase.encoder.attention import choose_backend, explain_backend
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
        with pytest.raises(InputError, match="the local rank 2 sees 2 GPUs: start one process for each"):
            choose_device(wanted, 2)
    for wanted in ("cuda:1", "gpu", "mps"):
        with pytest.raises(InputError, match=f"device '{wanted}': give auto, cpu or cuda"):
            choose_device(wanted)


def test_fp32_on_a_gpu_is_told_as_the_reason() -> None:
    assert "here: cuda in fp32" in explain_backend(torch.device("cuda"), torch.float32)
    assert "compute capability 8.0 and bf16; here: cpu)" in explain_backend(torch.device("cpu"), torch.bfloat16)


@pytest.mark.parametrize(
    ("capability", "hip", "backend"),
    [((7, 5), None, "buckets"), ((8, 0), None, "varlen"), ((9, 0), None, "varlen"), ((1, 0), "6.4", "varlen")],
)
def test_varlen_runs_on_gpus_that_have_its_kernels(
    capability: tuple[int, int], hip: str | None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr("biphase.encoder.attention.newest_flash", lambda device: "FA2")
    device = torch.device("cuda", 0)
    assert choose_backend(device, torch.bfloat16) == backend
    assert ("here: compute capability 7.5)" in explain_backend(device, torch.bfloat16)) == (backend == "buckets")


def test_the_next_item_is_made_in_a_thread_meanwhile() -> None:
    makers: list[threading.Thread] = []
    made = [threading.Event() for _ in range(3)]

    def make() -> Iterator[int]:
        for index, event in enumerate(made):
            makers.append(threading.current_thread())
            event.set()
            yield index

    for index in prefetch(make()):
        assert all(event.wait(10) for event in made[: index + 2])
        assert not any(event.is_set() for event in made[index + 2 :])
    assert len({*makers}) == 1 and threading.main_thread() not in makers
    assert not makers[0].is_alive()


def test_an_error_of_making_comes_where_the_item_is_due() -> None:
    def make() -> Iterator[int]:
        yield from range(2)
        raise InputError("rows.jsonl:3: no label")

    items = prefetch(make())
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(InputError, match=r"^rows\.jsonl:3: no label$"):
        next(items)


def test_a_loop_that_an_error_ends_leaves_no_thread() -> None:
    before = {*threading.enumerate()}
    with pytest.raises(KeyboardInterrupt) as told, closing(prefetch(itertools.count())) as numbers:
        for number in numbers:
            if number == 3:
                raise KeyboardInterrupt
    assert told.traceback and {*threading.enumerate()} == before
