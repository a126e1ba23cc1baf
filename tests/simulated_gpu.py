"""A CUDA device where there is none: `PYTHONPATH=tests pytest -p simulated_gpu`.

Its tensors say that they lie on `cuda:0` and compute on the CPU. They refuse what CUDA refuses, so that the mistakes of
a first day on a GPU are met without one: to meet a tensor of the CPU, to become an array, to be drawn by a generator of
the CPU. `WAITS` lists the operations for which the CPU would have waited. PyTorch's variable-length attention is
computed in fp32, and its arguments are held against what the kernel takes. There is no torch.compile and no NCCL here;
speed, memory and rounding are those of nothing.

Needs g++: PyTorch's CPU build must be told, before it is loaded, that there is a device (its guard and its hooks).
"""

import ctypes
import importlib.util
import inspect
import os
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

CODE = r"""
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace at {
using c10::Device; using c10::DeviceIndex; using c10::Stream;
struct Guard : public c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  static Stream only() { return Stream(Stream::DEFAULT, Device(c10::DeviceType::CUDA, 0)); }
  Device exchangeDevice(Device) const override { return Device(c10::DeviceType::CUDA, 0); }
  Device getDevice() const override { return Device(c10::DeviceType::CUDA, 0); }
  Stream getStream(Device) const noexcept override { return only(); }
  Stream getDefaultStream(Device) const override { return only(); }
  Stream getNewStream(Device, int) const override { return only(); }
  Stream exchangeStream(Stream) const noexcept override { return only(); }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};
struct CUDAHooks : public CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  int getNumGPUs() const override { return 1; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
}
using at::Guard;
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
"""


def load_device() -> None:
    """Compile the above once for each PyTorch, and load it before PyTorch asks whether there is a GPU."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0]).resolve()
    name = f"{root}{(root / 'version.py').stat().st_mtime_ns}{CODE}"
    built = Path(tempfile.gettempdir()) / f"simulated-gpu-{os.getuid()}-{sha256(name.encode()).hexdigest()[:16]}.so"
    if not built.exists():
        with tempfile.TemporaryDirectory(dir=built.parent) as folder:
            (source := Path(folder) / "device.cpp").write_text(CODE)
            part = Path(folder) / "device.so"
            where = [f"-I{root}/include", f"-L{root}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root}/lib"]
            subprocess.run(["g++", "-shared", "-fPIC", "-std=c++20", source, *where, "-o", part], check=True)
            os.replace(part, built)
    ctypes.CDLL(str(built), ctypes.RTLD_GLOBAL)


load_device()

import torch  # noqa: E402
from torch.nn.attention import varlen  # noqa: E402

GPU = torch.device("cuda", 0)
MOVING = {"_to_copy", "copy_"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
MULTIPLYING = {"mm", "addmm", "bmm", "baddbmm"}
SCALARS_MEET = {"fill_", "where", "masked_fill", "masked_fill_", "lerp_", "_fused_adamw_"}
"""Operations besides pointwise ones that take a single number of the CPU."""

WAITS: list[str] = []
"""The operations after which the CPU waits for all that the device was given: it reads a value, or needs one for the
shape of a result, or sends memory that is not pinned, or waits until it is sent."""


class GpuTensor(torch.Tensor):
    """A tensor of the device: everything but its values, which `elem` has."""

    elem: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, elem: Any, requires_grad: bool = False) -> Any:
        layout = {"strides": elem.stride(), "storage_offset": elem.storage_offset(), "dtype": elem.dtype}
        tensor = torch.Tensor._make_wrapper_subclass(cls, elem.size(), **layout, device=GPU)  # type: ignore[attr-defined]
        tensor.elem = elem
        return tensor

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(function, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{self.elem!r} on {GPU}"

    def __deepcopy__(self, memo: Any) -> Any:
        copied = self.detach().clone()
        is_parameter = isinstance(self, torch.nn.Parameter)
        copied = torch.nn.Parameter(copied, self.requires_grad) if is_parameter else copied
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().cpu().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy; use Tensor.cpu()")

    def data_ptr(self) -> int:
        return self.elem.data_ptr()

    def untyped_storage(self) -> Any:
        """Where it is and how large, for those who look for weights that are one."""
        raw = self.elem.untyped_storage()
        return SimpleNamespace(
            data_ptr=raw.data_ptr, nbytes=raw.nbytes, size=raw.size, __len__=raw.size, device=GPU, _cdata=raw._cdata
        )

    storage = untyped_storage


class Operation(NamedTuple):
    """What is asked of an operation each time, which PyTorch is slow to tell."""

    name: str
    namespace: str
    changes_arguments: bool
    meets_scalars: bool


@cache
def describe(function: Any) -> Operation:
    name = function.overloadpacket.__name__
    meets = torch.Tag.pointwise in function.tags or name.startswith("_foreach") or name in SCALARS_MEET
    return Operation(name, function.namespace, function._schema.is_mutable, meets)


def bare(value: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """An argument with tensors of the CPU for those of the device; each tensor is noted beside what stands for it."""
    if isinstance(value, torch.Tensor):
        raw = value.elem if isinstance(value, GpuTensor) else value
        pairs.append((value, raw))
        return raw
    return type(value)([bare(each, pairs) for each in value]) if type(value) in (list, tuple) else value


def on_gpu(value: Any, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()) -> Any:
    """A result on the device; what was changed in place is what was given."""
    if isinstance(value, torch.Tensor):
        for given, raw in pairs:
            if raw is value:
                return given
        return value if isinstance(value, GpuTensor) else GpuTensor(value)
    return type(value)([on_gpu(each, pairs) for each in value]) if isinstance(value, list | tuple) else value


def run(function: Any, args: Any, kwargs: Any) -> Any:
    """An operation on tensors of the device, or one that makes such."""
    operation, device = describe(function), kwargs.get("device")
    name = operation.name
    if operation.namespace == "biphase":  # our own operators do what they do by others, which are looked at
        from biphase.encoder.buckets import bucket_attention, bucket_attention_backward

        ours = {each._name: each._init_fn for each in (bucket_attention, bucket_attention_backward)}
        return ours[name](*args, **kwargs)
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    given, named = bare(tuple(args), pairs), {key: bare(value, pairs) for key, value in kwargs.items()}
    is_here = any(tensor is not raw for tensor, raw in pairs)
    stays = is_here if device is None else torch.device(device).type == "cuda"
    if is_here and name not in MOVING:
        refuse_strangers(function, operation, args, [tensor for tensor, raw in pairs if tensor is raw])
    if stays and any(isinstance(value, torch.Generator) for value in kwargs.values()):
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    if name == "is_pinned":
        return False
    if (stays and waits_for(function, name, args, kwargs)) or (is_here and not stays):
        WAITS.append(name)
    if name == "mm" and args[0].shape == (8192, 8192):  # the peak is measured by it
        return args[0]
    if device is not None:
        named.pop("pin_memory", None)
        named["device"] = torch.device("cpu")
    if name == "histc":  # of integers, which the CPU does not count
        given = (given[0].float(), *given[1:])
    if operation.namespace == "torch_attn":
        return on_gpu(attend(name, *given, **named))
    found = multiply(function, given, named) if name in MULTIPLYING else function(*given, **named)
    if not stays:
        return found
    return on_gpu(found, pairs if operation.changes_arguments else ())


def waits_for(function: Any, name: str, args: Any, kwargs: Any) -> bool:
    """Whether an operation whose result is on the device waits for it."""
    if name in MOVING:
        source = args[-1] if name == "copy_" and isinstance(args[-1], torch.Tensor) else args[name == "copy_"]
        is_sent = not isinstance(source, GpuTensor) and source.numel() > 0
        return is_sent and not (kwargs.get("non_blocking") and hasattr(source, "is_pinned_copy"))
    if name in ("index", "index_put", "index_put_"):  # by numbers it does not wait, by flags it does
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if name == "repeat_interleave" and kwargs.get("output_size") is not None:
        return False
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.intersection(function.tags))


def pin(tensor: Any, *_: Any) -> Any:
    pinned = tensor.clone()
    pinned.is_pinned_copy = True
    return pinned


def multiply(function: Any, given: Any, named: Any) -> Any:
    """A product of matrices; of 16 bits in fp32 and rounded once: a CPU that has none for 16 bits is slow at it."""
    tensors = [each for each in given if isinstance(each, torch.Tensor)]
    if named or any(tensor.dtype != torch.bfloat16 for tensor in tensors):
        return function(*given, **named)
    return function(*(each.float() if isinstance(each, torch.Tensor) else each for each in given)).bfloat16()


def refuse_strangers(function: Any, operation: Operation, args: Any, strangers: list[torch.Tensor]) -> None:
    """As CUDA does, where tensors of the CPU meet those of the device."""
    if operation.meets_scalars:
        strangers = [tensor for tensor in strangers if tensor.dim() > 0]
    if strangers and operation.name in INDEXING and isinstance(args[0], GpuTensor):
        indices = [index for index in args[1] if index is not None]
        strangers = [tensor for tensor in strangers if not any(tensor is index for index in indices)]
        strangers = [tensor for tensor in strangers if operation.name == "index" or tensor.numel() > 1]
    if strangers:
        shapes = [tuple(tensor.shape) for tensor in strangers]
        raise RuntimeError(f"Expected all tensors to be on the same device: {function} met {GPU} and cpu, {shapes}")


def attend_alone(q: Any, k: Any, v: Any, grad: Any, window: list[int], scale: float) -> list[Any]:
    """One sample, in fp32: what comes out and the logarithm of the softmax's sum, or with `grad` what goes back.

    -1 is no limit of the window to that side.
    """
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    sees = ((distance <= window[0]) | (window[0] < 0)) & ((-distance <= window[1]) | (window[1] < 0))
    scores = (torch.einsum("thk,shk->hts", q, k) * scale).masked_fill(~sees, float("-inf"))
    weights = scores.softmax(-1)
    if grad is None:
        return [torch.einsum("hts,shk->thk", weights, v), scores.logsumexp(-1).T]
    grad_weights = torch.einsum("thk,shk->hts", grad, v)
    grad_scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True)) * scale
    return [
        torch.einsum("hts,shk->thk", grad_scores, k),
        torch.einsum("hts,thk->shk", grad_scores, q),
        torch.einsum("hts,thk->shk", weights, grad),
    ]


def attend(name: str, *args: Any, **kwargs: Any) -> Any:
    """PyTorch's variable-length attention, forward or backward, on what its kernel takes."""
    bound = inspect.signature(getattr(varlen, name)._init_fn).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    q, k, v, bounds = given["query"], given["key"], given["value"], given["cu_seq_q"]
    assert q.dtype in (torch.bfloat16, torch.float16) and q.dtype == k.dtype == v.dtype, "16 bits"
    assert all(each.is_contiguous() for each in (q, k, v)), "contiguous"
    assert bounds.dtype == torch.int32 and torch.equal(bounds, given["cu_seq_k"]) and int(bounds[-1]) == len(q)
    assert int(bounds.diff().max()) <= given["max_q"], "max_seqlen"
    assert q.shape[2] == v.shape[2] <= 256 and q.shape[2] % 8 == 0, "head width"
    window = list(given.get("window_size") or (-1, -1))
    window[1] = 0 if given.get("is_causal") else window[1]
    scale, repeats = given.get("scale") or q.shape[-1] ** -0.5, q.shape[1] // k.shape[1]
    grad = given.get("grad_out")
    wide = [q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1), *([] if grad is None else [grad])]
    samples = zip(*(each.float().tensor_split(bounds[1:-1].long()) for each in wide), strict=True)
    alone = [attend_alone(*sample[:3], sample[3] if sample[3:] else None, window, scale) for sample in samples]
    found = [torch.cat(parts) for parts in zip(*alone, strict=True)]
    if grad is None:
        return found[0].to(q.dtype), found[1].T.contiguous(), torch.zeros(2, dtype=torch.uint64)
    found[1:] = [each.unflatten(1, (-1, repeats)).sum(2) for each in found[1:]]
    return tuple(each.to(q.dtype) for each in found)


def scaled_dot_product_attention(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, float("-inf"))
    args = (q, k, v, attn_mask, dropout_p, is_causal, None)
    return torch.ops.aten._scaled_dot_product_attention_math(*args, scale=scale, enable_gqa=enable_gqa)[0]


def register() -> list[torch.library.Library]:
    """Operators for the device: all by `run`, also those whose tensors come without a look at their class."""
    others, own = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    others.fallback(lambda function, *args, **kwargs: run(function, args, kwargs), "CUDA")
    for name in (
        *("arange", "linspace", "logspace", "eye", "randperm", "tril_indices", "triu_indices"),  # they resize a result
        *("copy_", "_to_copy", "fill_", "zero_"),
    ):
        packet = getattr(torch.ops.aten, name)
        for each in (getattr(packet, overload) for overload in packet.overloads() if "out" not in overload):
            own.impl(each, lambda *args, each=each, **kwargs: run(each, args, kwargs), "CUDA")
    for key in ("AutogradCUDA", "CUDA"):
        own.impl("scaled_dot_product_attention", scaled_dot_product_attention, key)
    return [others, own]


def pretend() -> None:
    """One H200 for all that asks `torch.cuda`."""
    cuda: Any = torch.cuda
    properties = SimpleNamespace(
        name="NVIDIA H200", total_memory=140 * 2**30, multi_processor_count=132, major=9, minor=0
    )
    answers = {
        "_lazy_init": None, "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0,
        "set_device": None, "get_device_name": properties.name, "get_device_capability": (9, 0),
        "get_device_properties": properties, "is_bf16_supported": True, "synchronize": None,
        "reset_peak_memory_stats": None, "empty_cache": None, "ipc_collect": None, "manual_seed": None,
        "manual_seed_all": None, "max_memory_allocated": 2**20, "memory_allocated": 2**20,
        "max_memory_reserved": 2**20, "memory_reserved": 2**20, "mem_get_info": (139 * 2**30, 140 * 2**30),
        "memory_stats": {}, "_is_in_bad_fork": False,
        "_exchange_device": 0, "_maybe_exchange_device": 0,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(cuda, name, lambda *_, answer=answer, **__: answer)
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda *_: torch.get_rng_state()
        module.get_rng_state_all = lambda: [torch.get_rng_state()]
        module.set_rng_state = module.set_rng_state_all = lambda *_: None
    torch._C._cuda_getDevice = lambda: 0  # type: ignore[attr-defined]
    torch.Tensor.pin_memory = pin  # type: ignore[method-assign, assignment]
    torch.nn.Module.compile = lambda self, *_, **__: None  # type: ignore[method-assign]
    # A parameter moved to the device becomes another object there, whose values `.data` does not carry.
    torch.__future__.set_swap_module_params_on_conversion(True)


pretend()
REGISTERED = register()
