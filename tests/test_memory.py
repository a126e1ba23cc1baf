"""Bytes per device: the plan beside the parts that FSDP2 really makes of networks, in groups of 1 to 64 processes.

The networks are on the meta device and the group is PyTorch's fake one: one process, no memory, real partitioning.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import EuroBertConfig, EuroBertForMaskedLM, LlamaConfig, LlamaForCausalLM

from biphase import flops
from biphase.encoder import buckets
from biphase.encoder.attention import ATTENTION, lay_out
from biphase.encoder.lora import adapt_network
from biphase.encoder.packed import PackedModel, language_model_loss
from biphase.flops import CHUNK_LOGITS, PART_LOGITS, Shape, plan_memory, read_shape, shape_of
from biphase.presets import PRESETS
from biphase.pretraining.optimizer import make_optimizers
from biphase.recipe import Lora, Optimizer, Recipe

LLAMA_3B = {
    "num_hidden_layers": 28,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
    "tie_word_embeddings": True,
}
"""Llama 3.2 3B's published sizes."""


def networks() -> list[Any]:
    presets = [
        pytest.param(EuroBertForMaskedLM, EuroBertConfig, {**PRESETS[name], "vocab_size": 128_256}, id=name)
        for name in ("210m", "1b")
    ]
    return [*presets, pytest.param(LlamaForCausalLM, LlamaConfig, LLAMA_3B, id="3b")]


def plan(shape: Shape, devices: int, *, microbatch: int, num: int = 1, on_cpu: bool = False, **more: Any) -> Any:
    """The memory of a recipe whose devices go through `num` microbatches for an update."""
    origin = {"preset": "1m"} if (lora := more.pop("lora", None)) is None else {"model": "base", "lora": lora}
    tree: dict[str, Any] = {"name": "planned", "init": origin, "data": {"shards": "nowhere"}}
    tree |= {"curriculum": [{"objective": "mlm", "steps": 1}], "schedule": {"warmup_steps": 0, "decay_steps": 0}}
    tree["data"]["max_sample_tokens"] = more.pop("max_sample_tokens", 2048)
    recipe = Recipe.model_validate(tree | {"optimizer": {"name": more.pop("optimizer", "adamw")}})
    batch_tokens = more.pop("batch_tokens", num * devices * microbatch)
    compute = {"microbatch_tokens": microbatch, "parallel": "fsdp", "precision": "bf16", **more}
    changes = {"batch_tokens": batch_tokens, "compute": recipe.compute.model_copy(update=compute)}
    return plan_memory(shape, recipe.model_copy(update=changes), devices, on_cpu=on_cpu)


def local_bytes(tensors: Any) -> int:
    return sum(tensor.to_local().numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("devices", [2, 64])
@pytest.mark.parametrize(("kind", "config", "sizes"), networks())
def test_parts_of_weights_gradients_and_moments(kind: Any, config: Any, sizes: dict[str, Any], devices: int) -> None:
    """Each device has its share of every matrix; FSDP2 parts rows, so that the first has up to a row more of each."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        network = kind(config(**sizes))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=devices)
    try:
        mesh = init_device_mesh("cpu", (devices,))
        for block in network.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(network, mesh=mesh)
        parameters = list(network.parameters())
        optimizer = torch.optim.AdamW(parameters)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        moments = [entry[key] for entry in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        planned = plan(read_shape(sizes), devices, microbatch=8192)
        assert local_bytes(parameters) == pytest.approx(planned["weights"], rel=1e-3)
        assert local_bytes(parameter.grad for parameter in parameters) == pytest.approx(planned["gradients"], rel=1e-3)
        assert local_bytes(moments) == pytest.approx(planned["moments"], rel=1e-3)
    finally:
        dist.destroy_process_group()


def test_what_several_microbatches_add() -> None:
    shape = shape_of("1b", {}, 128_256)
    weights = 4.0 * shape.parameters
    one = plan(shape, 8, microbatch=8192)
    more = plan(shape, 8, microbatch=8192, num=2)
    assert more["total"] - one["total"] == weights
    alone = plan(shape, 1, microbatch=8192)
    assert alone["weights"] + alone["gradients"] + alone["moments"] == 4 * weights
    for num in (1, 2):
        under_ddp = plan(shape, 8, microbatch=8192, num=num, parallel="ddp")
        assert under_ddp["total"] - alone["total"] == (num - 1) * weights


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(("width", "ffn", "layers"), [(256, 768, 2), (256, 2048, 2), (512, 768, 3)])
def test_activations_and_copies_beside_the_tensors_that_blocks_keep(
    width: int, ffn: int, layers: int, precision: str
) -> None:
    """What backward keeps of transformers' blocks; under autocast, with the copies of the weights."""
    sizes: dict[str, Any] = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": ffn}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512}
    network = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="sdpa")).model
    own = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"), hooks:
        output = network(torch.zeros(1, 512, dtype=torch.long)).last_hidden_state
    assert output.requires_grad
    planned = plan(read_shape(sizes), 1, microbatch=512, precision=precision, on_cpu=True)
    found = sum(storage.nbytes() for place, storage in kept.items() if place not in own)
    assert found == pytest.approx(planned["activations"] + planned["copies"], rel=0.05)


class MostBytes(TorchDispatchMode):
    """The most bytes that were alive at once of what is made in the block."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.alive: dict[Any, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        storages = [leaf.untyped_storage() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.alive |= {StorageWeakRef(each): each.nbytes() for each in storages if each.data_ptr() not in self.known}
        self.alive = {storage: size for storage, size in self.alive.items() if not storage.expired()}
        self.most = max(self.most, sum(self.alive.values()))
        return out


@pytest.mark.parametrize(("width", "ffn", "kv_heads"), [(64, 256, 2), (64, 64, 4), (96, 144, 1)])
def test_what_muon_makes_of_the_gradients(width: int, ffn: int, kv_heads: int) -> None:
    sizes: dict[str, Any] = {"num_hidden_layers": 3, "hidden_size": width, "intermediate_size": ffn, "vocab_size": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": kv_heads}
    network = LlamaForCausalLM(LlamaConfig(**sizes))
    _, muon = make_optimizers(Optimizer(name="muon"), network, dtype=torch.bfloat16)
    for parameter in network.parameters():
        parameter.grad = torch.randn_like(parameter)
    muon.step()
    moments = [entry["momentum_buffer"] for entry in muon.state.values()]
    with MostBytes(*network.parameters(), *moments) as found:
        muon.step()
    planned = plan(read_shape(sizes), 1, microbatch=1, optimizer="muon")
    assert found.most == pytest.approx(planned["update"], rel=0.02)
    assert 4 * sum(moment.numel() for moment in moments) == 8 * read_shape(sizes).parameters - planned["moments"]


@pytest.mark.parametrize("targets", [64, 512])
def test_what_the_head_holds_in_forward_and_backward(targets: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own gradient, which stays, counts among those of all weights."""
    vocab, width = 2048, 64
    for limits, rows in ((CHUNK_LOGITS, 256), (PART_LOGITS, 128)):
        monkeypatch.setitem(limits, "cpu", rows * vocab)
    hidden = torch.randn(targets, width, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, width, requires_grad=True)
    labels = torch.randint(0, vocab, (targets,))
    with MostBytes(hidden, weight, labels) as found:
        language_model_loss(hidden, weight, None, labels)[0].backward()
    sizes = PRESETS["1m"] | {"hidden_size": width, "vocab_size": vocab}
    planned = plan(read_shape(sizes), 1, microbatch=targets, on_cpu=True)
    assert 0.7 * (planned["logits"] + planned["head"]) < found.most < 1.05 * (planned["logits"] + planned["head"])


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("length", [64, 512, 2048])
def test_attention_of_short_and_long_samples(length: int, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a batch's forward and backward pass holds on a CPU. The softmax weights of samples of 64 and 512 tokens
    are stored, and those of longer ones computed again, for some queries at a time."""
    monkeypatch.setattr(flops, "BLOCK_BYTES", 2**20)
    monkeypatch.setattr(buckets, "BLOCK_BYTES", 2**20)
    num_tokens = 2048
    sizes: dict[str, Any] = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": num_tokens}
    model = PackedModel(LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation=ATTENTION)))
    tokens = torch.randint(0, 512, (num_tokens,))
    targets = torch.arange(0, num_tokens, 2)
    with MostBytes(*model.parameters()) as found, torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        layout = lay_out(np.arange(0, num_tokens + 1, length), causal=False, dtype=dtype)
        loss, _, _ = model(tokens, torch.arange(num_tokens) % length, layout, targets, tokens[targets])
        loss.backward()
    planned = plan(
        read_shape(sizes), 1, microbatch=num_tokens, precision=precision, on_cpu=True, max_sample_tokens=length
    )
    most = planned["total"] - planned["weights"] - planned["moments"]
    assert 0.45 * most < found.most < 1.02 * most


def test_a_batch_that_is_smaller_than_a_microbatch() -> None:
    """What training holds of one sample more than the batch, and validation of a whole microbatch."""
    batch, longest, microbatch = 512, 128, 2048
    sizes: dict[str, Any] = {"num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": longest}
    model = PackedModel(LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation=ATTENTION)))
    most = {}
    for num_tokens, trains in ((batch + longest, True), (microbatch, False)):
        tokens, targets = torch.randint(0, 512, (num_tokens,)), torch.arange(0, num_tokens, 2)
        with MostBytes(*model.parameters()) as found, torch.set_grad_enabled(trains):
            layout = lay_out(np.arange(0, num_tokens + 1, longest), causal=False, dtype=torch.float32)
            loss, _, _ = model(tokens, torch.arange(num_tokens) % longest, layout, targets, tokens[targets])
            if trains:
                loss.backward()
        most[trains] = found.most
    common: dict[str, Any] = {"precision": "fp32", "on_cpu": True, "max_sample_tokens": longest}
    shape = read_shape(sizes)
    planned, whole = (plan(shape, 1, microbatch=microbatch, batch_tokens=num, **common) for num in (batch, microbatch))
    needed = planned["total"] - planned["weights"] - planned["moments"]
    assert 0.45 * needed < most[True] < 1.02 * needed and most[False] < needed
    assert whole["total"] - planned["total"] > 2 * most[True]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_gpu_in_fp32_attends_in_buckets_too(precision: str) -> None:
    """And holds numbers of four bytes; `auto` is bf16 there."""
    shape = shape_of("210m", {}, 32_768)
    gpu, cpu = (plan(shape, 1, microbatch=8192, precision=precision, on_cpu=on_cpu) for on_cpu in (False, True))
    assert gpu["attention"] == (cpu["attention"] if precision == "fp32" else 0)
    assert all(gpu[part] == cpu[part] for part in ("copies", "activations", "head"))
    auto = plan(shape, 1, microbatch=8192, precision="auto")
    assert (auto == gpu) == (precision == "bf16")


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "lora", [{"r": 16}, {"r": 16, "target_modules": ["q_proj", "v_proj"]}, {"r": 16, "lora_dropout": 0.1}]
)
def test_what_adapters_need(lora: dict[str, Any], precision: str) -> None:
    """Weights, gradients and moments to the byte; what backward keeps of the blocks, with copies of frozen weights."""
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 768}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    network = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="sdpa"))
    adapt_network(network, Lora.model_validate(lora), {7}, seed=0)
    planned = plan(read_shape(sizes), 1, microbatch=512, precision=precision, on_cpu=True, lora=lora)
    optimizers = make_optimizers(Optimizer(), network)
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    own = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"), hooks:
        output = network.model.train()(torch.zeros(1, 512, dtype=torch.long)).last_hidden_state
    found = sum(storage.nbytes() for place, storage in kept.items() if place not in own)
    bound = planned["activations"] + planned["copies"]
    assert 0.68 * bound < found < 1.01 * bound, "frozen norms and layers without adapters do not keep their inputs"
    output.sum().backward()
    optimizers[0].step()
    parameters = list(network.parameters())
    assert planned["weights"] == 4 * sum(parameter.numel() for parameter in parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    assert planned["gradients"] == 4 * sum(gradient.numel() for gradient in gradients)
    moments = [entry[key] for entry in optimizers[0].state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert planned["moments"] == 4 * sum(moment.numel() for moment in moments)


@pytest.mark.parametrize("is_tied", [True, False])
def test_what_the_head_holds_beside_adapters(is_tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole table, copied, with a gradient where it is tied."""
    vocab, width, targets = 4096, 64, 64
    for limits, rows in ((CHUNK_LOGITS, 64), (PART_LOGITS, 32)):
        monkeypatch.setitem(limits, "cpu", rows * vocab)
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": width, "intermediate_size": 16}
    sizes |= {"num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": vocab, "tie_word_embeddings": is_tied}
    network = LlamaForCausalLM(LlamaConfig(**sizes))
    adapt_network(network, Lora(r=1), {7}, seed=0)
    packed: Any = PackedModel(network)
    hidden = torch.randn(targets, width, requires_grad=True)
    labels = torch.randint(0, vocab, (targets,))
    with MostBytes(hidden, labels, *network.parameters()) as found:
        embedded = network.get_input_embeddings()(labels)
        loss = language_model_loss((hidden + embedded).bfloat16(), *packed.head.weights(), labels)[0]
        loss.backward()
    planned = plan(read_shape(sizes), 1, microbatch=targets, on_cpu=True, lora={"r": 1})
    assert 0.6 * (planned["logits"] + planned["head"]) < found.most < 1.05 * (planned["logits"] + planned["head"])
