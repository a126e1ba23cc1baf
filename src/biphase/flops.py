"""The shape of a network → its parameters, the FLOPs of training it, and the bytes that it needs on each device.

One formula serves the training loop (its share of peak), the plan of a study (hours and prices) and advice. It needs no
torch; tests tie it to the parameters and the tensors of real networks.

Training on one token costs 6 FLOPs per weight (forward and backward: 3 · 2 · multiply-adds), without recomputation:

    6 · W  +  12 · layers · heads · head width · keys  +  6 · H · targets

W is the number of weights in the blocks, keys the number of tokens that a token sees (half of its sample when causal,
else all of it, and those in its window where a layer has one), H the number of weights in the language model head, and
targets the share of tokens with a loss: the head computes no others. Muon adds products of its own to every update,
whatever the batch (`update_flops`).

Bytes: master weights, gradients and the optimizer's moments are fp32. With FSDP2 each device keeps a part of them, and
for a while a whole block, gathered in the type of the arithmetic, beside the embedding and the head. With several
microbatches, each device holds whole gradients until the last one, when they are summed and divided. With DDP each
device holds as much as a single device would. Its buckets hold the gradients; with several microbatches, the gradients
that are not summed yet take the same space again.

Activations are the numbers in the blocks that the backward pass needs: for each token, in the type of the arithmetic,

    a · width  +  2 · (heads + kv heads) · head width  +  4 · ffn       of each layer
    b · width                                                           of each, with activation checkpointing
    c · width                                                           before and after the blocks

as eager blocks keep them, residuals and norms in fp32: a, b, c are 13, 2, 5 in bf16, and 6, 1, 3 in fp32. This is an
upper bound: compiled blocks keep less.

On a CPU, and on a GPU in fp32, attention also stores its softmax weights, if a token sees `KEPT_KEYS` keys or fewer on
average; there are as many as heads · keys for each token and layer. It computes scores for at most `BLOCK_BYTES` at
once beside these, or for a bucket of short samples, and in the backward pass as many of their gradients, twice.

The head, of vocabulary · width, has its gradient in fp32 from the forward pass on. It also needs a copy of the weights
and a product, both in the type of the arithmetic, and in the backward pass a scaled copy of the gradient.

Muon updates all matrices of one shape at once, after the activations are gone. For n matrices of a · b with a ≤ b this
takes, in numbers,

    n · a · b  in fp32, and  n · max(4 · a · b + a², 2 · a · b + 4 · a²)  in the type of the arithmetic

AdamW updates in place.

LoRA (`init.lora`): the adapters come on top of the weights, and gradients and moments are theirs and that of the mask
token's embedding. The head has a gradient only where it is tied to that embedding, whose whole table is then copied, to
put the row in, and gets a gradient.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from biphase.curriculum import Phase, phases_between
from biphase.errors import InputError
from biphase.machine import has_bf16_cores
from biphase.presets import PRESETS, SHAPE_KEYS
from biphase.recipe import Init, Lora, Optimizer, Recipe

DEVICES = {
    "GB200": (2500e12, 186, 0),
    "B200": (2250e12, 180, 1000),
    "GH200": (989e12, 96, 0),
    "H200": (989e12, 141, 700),
    "H200 NVL": (835e12, 141, 600),
    "H100": (989e12, 80, 700),
    "H100 NVL": (835e12, 94, 400),
    "H100 PCIe": (756e12, 80, 350),
    "A100": (312e12, 40, 400),
    "MI300X": (1307e12, 192, 750),
    "MI250X": (191.5e12, 64, 280),
    "MI250": (181e12, 64, 280),
    "L40S": (362e12, 48, 350),
    "L40": (181e12, 48, 300),
    "L4": (121e12, 24, 72),
    "A10": (125e12, 24, 150),
    "A10G": (70e12, 24, 0),
    "V100": (15.7e12, 16, 300),
    "V100 PCIe": (14e12, 16, 250),
    "T4": (8.1e12, 16, 70),
    "RTX 4090": (165e12, 24, 450),
    "RTX 3090": (71e12, 24, 350),
    "CPU": (64e9, 0, 0),
}
"""Peak FLOP/s, GiB of memory and watts of one device. The peak is for dense bf16 with sums in fp32 (`WITHOUT_BF16`:
fp32), by the vendors' data sheets, and for the RTX cards by NVIDIA's whitepapers of Ada (165.2) and GA102 (71). Figures
"with sparsity" are halved. Where a device has two sizes of memory, this is the smaller. Watts are a board's highest
power, 0 if it is unknown. MI250 and MI250X: one of their two dies, each a device to programs, with half of the board's
power. CPU: one core, fp32 with AVX2 as measured on an EPYC (a core with bf16 matrix units reaches 20 times as much);
its memory is the machine's."""

WITHOUT_BF16 = {"V100", "V100 PCIe", "T4"}
"""GPUs without units for bf16, on which the precision `auto` is fp32."""

EFFICIENCY, CPU_EFFICIENCY = 0.4, 0.6
"""The share of a device's peak that training reaches. For GPUs it is a round figure for good bf16 training, not
measured; for CPUs it is that of our own runs (docs/LOG.md)."""

WATTS = {name: watts for name, (_, _, watts) in DEVICES.items()}
PEAK_FLOPS = {name: peak for name, (peak, _, _) in DEVICES.items()}

VARIANT = re.compile(r"\b(laptop|mobile|max-q|mig|super|ti|d)\b", re.IGNORECASE)
"""Words in a device's name that mean another device, or a part of one."""


def known_device(name: str) -> str | None:
    """Find the key of `PEAK_FLOPS` in a device's name: `NVIDIA A100-SXM4-80GB` → `A100`."""
    if VARIANT.search(name):
        return None
    for key in sorted(PEAK_FLOPS, key=len, reverse=True):  # an H100 NVL is not a plain H100
        words = re.sub(r"[\s_-]+", r"[\\s_-]*", key)  # RTX 4090, RTX4090
        if re.search(rf"(?<![^\W_]){words}(?![^\W_])", name, re.IGNORECASE):
            return key
    return None


def settle_precision(recipe: Recipe, device: str) -> Recipe:
    """Return a recipe with the precision that `auto` means on a GPU of this name, if it has no units for bf16."""
    compute = recipe.compute
    if compute.precision == "auto" and known_device(device) in WITHOUT_BF16:
        compute = compute.model_copy(update={"precision": "fp32"})
    return recipe.model_copy(update={"compute": compute})


LLAMA_SHAPED = {
    *("bitnet", "cohere", "cohere2", "cohere_compass_text", "cwm", "ernie4_5", "eurobert", "exaone4", "gemma"),
    *("gemma2", "gemma3_text", "glm", "glm4", "granite", "granite_swa", "helium", "hunyuan_v1_dense", "hyperclovax"),
    *("internlm3", "iquestcoder", "llama", "ministral", "ministral3", "mistral", "olmo", "olmo2", "olmo3", "phi3"),
    *("qwen2", "qwen3", "seed_oss", "smollm3", "vaultgemma"),
}
"""Types of networks that a `Shape` describes, except for norms and biases: each token passes through all of their gated
feed-forward layers."""

TIED = {
    *("cohere", "cohere2", "cohere_compass_text", "ernie4_5", "gemma", "gemma2", "gemma3_text", "granite_swa"),
    *("smollm3", "vaultgemma"),
}
"""Those among them whose head is tied to the embeddings unless their configuration denies it."""

LLAMA_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The names of the matrices of a Llama's block, in the order of `Shape.matrices`."""


@dataclass(frozen=True)
class FlopCount:
    """The floating-point operations of training one network."""

    per_token: float
    """6 · the weights of the blocks."""
    per_token_and_key: float
    """12 · layers · heads · head width, for each key that a query meets."""
    per_target: float
    """6 · the weights of the head (vocabulary · width, and its transform), for each token with a loss."""
    per_update: float = 0.0
    """The products that the optimizer adds to each update (`update_flops`)."""
    windows: tuple[tuple[int, float], ...] = ()
    """The sliding windows of layers, each with these layers' share of `per_token_and_key`. Those of a `Shape` are not
    known, so that plans count FLOPs that are an upper bound."""

    def batch(self, lengths_S: np.ndarray, num_targets: int, causal: bool) -> float:
        """Count the operations of one packed batch from the lengths of its samples."""
        pairs = float((lengths_S.astype(np.float64) ** 2).sum()) / (2 if causal else 1)
        all_keys = self.per_token * lengths_S.sum() + self.per_token_and_key * pairs + self.per_target * num_targets
        return all_keys - self.outside_windows(lengths_S, causal)

    def outside_windows(self, lengths_S: np.ndarray, causal: bool) -> float:
        """Count the operations that sliding windows save in samples of these lengths."""
        saved = 0.0
        for window, share in self.windows:
            # The last token of a sample misses so many of the first ones, the token before it one fewer, …
            missed_S = np.maximum(lengths_S - window - (not causal), 0.0)
            saved += share * float((missed_S * (missed_S + 1)).sum()) / (2 if causal else 1)
        return self.per_token_and_key * saved

    def token(self, keys: float, targets: float) -> float:
        """Count the operations of one token that sees `keys` tokens and has a loss with probability `targets`."""
        return self.per_token + self.per_token_and_key * keys + self.per_target * targets

    def with_adapters(self, num_weights: float, *, is_tied: bool) -> "FlopCount":
        """Count the operations of training adapters of so many weights instead: frozen weights have no gradients, which
        are a third of the work. A head that is tied to learned embeddings has one."""
        per_target = self.per_target if is_tied else self.per_target * 2 / 3
        return replace(self, per_token=self.per_token * 2 / 3 + 6.0 * num_weights, per_target=per_target)


def training_flops(block_weights: float, attention_width: float, head_weights: float) -> FlopCount:
    """Apply the formula at the top of this file; `attention_width` is layers · heads · head width."""
    return FlopCount(6.0 * block_weights, 12.0 * attention_width, 6.0 * head_weights)


def update_flops(optimizer: Optimizer, matrices: Iterable[Sequence[int]]) -> float:
    """Count the FLOPs of the optimizer's products in one update, for matrices of these sizes in the blocks.

    A Newton–Schulz iteration on x [short, long] forms x·xᵀ, its square, and the product of both with x.
    """
    sides = [sorted(matrix) for matrix in matrices]
    products = sum((2.0 * short * short * (2 * long + short) for short, long in sides), start=0.0)
    return optimizer.matrix_update.iterations * products


@dataclass(frozen=True)
class Shape:
    """The sizes of a pre-norm network with gated feed-forward layers and no biases: EuroBERT's, which is Llama's."""

    layers: int
    width: int
    ffn: int
    heads: int
    kv_heads: int
    head_width: int
    vocab_size: int
    is_tied: bool = False

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """The sizes of all matrices inside the blocks."""
        query, key, width, ffn = self.heads * self.head_width, self.kv_heads * self.head_width, self.width, self.ffn
        attention = [(query, width), (key, width), (key, width), (width, query)]
        return [*attention, (ffn, width), (ffn, width), (width, ffn)] * self.layers

    @property
    def block_weights(self) -> int:
        """The number of weights in these matrices."""
        return sum(rows * columns for rows, columns in self.matrices)

    @property
    def parameters_without_head(self) -> int:
        """The parameters that fine-tuning starts from: embedding, blocks and norms."""
        return self.vocab_size * self.width + self.block_weights + (2 * self.layers + 1) * self.width

    @property
    def parameters(self) -> int:
        """All parameters, the language model head included."""
        return self.parameters_without_head + (0 if self.is_tied else self.vocab_size * self.width)

    @property
    def flops(self) -> FlopCount:
        attention_width, head_weights = self.layers * self.heads * self.head_width, self.width * self.vocab_size
        return training_flops(self.block_weights, attention_width, head_weights)


def read_shape(settings: Mapping[str, Any]) -> Shape:
    """Read the shape that a Llama-like configuration describes, under transformers' names.

    Raises `InputError` for a size that is not a whole number above 0.
    """
    head_dim = () if settings.get("head_dim") is None else ("head_dim",)
    for key in (*SHAPE_KEYS, "vocab_size", *head_dim):
        if not isinstance(settings[key], int) or isinstance(settings[key], bool) or settings[key] < 1:
            raise InputError(f"architecture: '{key}' is {settings[key]!r}; it must be a whole number of 1 or more")
    layers, width, ffn, heads, kv_heads = (settings[key] for key in SHAPE_KEYS)
    is_tied = bool(settings.get("tie_word_embeddings", settings.get("model_type") in TIED))
    head_width = settings.get("head_dim") or width // heads
    return Shape(layers, width, ffn, heads, kv_heads, head_width, settings["vocab_size"], is_tied)


def shape_of(preset: str, architecture: Mapping[str, Any], vocab_size: int) -> Shape:
    """Return the shape of a preset with changes under transformers' names."""
    return read_shape({"vocab_size": vocab_size, **PRESETS[preset], **architecture})


def model_shape(model: Init, settings: Mapping[str, Any], vocab_size: int | None) -> Shape | None:
    """Find the shape of a preset, or of a model by its config.json (`settings`) if that is Llama-like. Return None for
    other types, without settings, and for an unknown vocabulary."""
    if vocab_size is None:
        return None
    if model.preset is not None:
        return shape_of(model.preset, model.architecture, vocab_size)
    if settings.get("model_type") not in LLAMA_SHAPED or any(key not in settings for key in SHAPE_KEYS):
        return None
    return read_shape({**settings, "vocab_size": max(vocab_size, settings.get("vocab_size", 0))})


@dataclass(frozen=True)
class SampleLengths:
    """The lengths of the samples of a training run, on which the cost of attention and CLM depends."""

    mean_tokens: float
    """The mean length of a sample."""
    mean_keys: float
    """The length of a token's sample, averaged over tokens: sum of squared lengths / sum of lengths."""
    source: str
    """The source of the two numbers, in words."""


def flops_per_token(flops: FlopCount, phase: Phase, lengths: SampleLengths) -> float:
    """Count the FLOPs of training on one token of a phase, on average; a mixed phase costs the mean of its parts.

    Dense objectives have a loss on all tokens of a sample but one; other objectives on a share of them,
    `mask_probability` (for a ramp, its mean). A token of a causal objective sees half of the keys.
    """
    if phase.clm_share:
        return sum(share * flops_per_token(flops, pure, lengths) for pure, share in phase.parts)
    keys = lengths.mean_keys / 2 if phase.is_causal else lengths.mean_keys
    targets = 1 - 1 / lengths.mean_tokens if phase.facts.is_dense else phase.mask_at(0.5)
    saved = flops.outside_windows(np.array([lengths.mean_keys]), phase.is_causal) / lengths.mean_keys
    return flops.token(keys, targets) - saved


def flops_between(
    recipe: Recipe, flops: FlopCount, lengths: SampleLengths, begin: int, stop: int, origin_step: int = 0
) -> dict[str, float]:
    """Count the FLOPs of a run's updates from `begin` to `stop`, by objective. `origin_step` counts its parents'
    updates, which batch ramps include."""
    spent: dict[str, float] = {}
    last = origin_step + begin
    for phase in phases_between(recipe.curriculum, begin, stop):
        first, last = last, last + phase.steps
        tokens = recipe.tokens_before(last) - recipe.tokens_before(first)
        for pure, share in phase.parts:
            work = tokens * flops_per_token(flops, pure, lengths) + phase.steps * flops.per_update
            spent[pure.objective] = spent.get(pure.objective, 0.0) + share * work
    return spent


FLOAT32, BFLOAT16 = 4, 2
"""Bytes of a number."""


def adapted_matrices(shape: Shape, lora: Lora) -> list[tuple[int, int]]:
    """List the sizes of the matrices beside which adapters stand: all, unless `target_modules` names some of a
    Llama's."""
    targets = {target.rpartition(".")[2] for target in lora.target_modules}
    if not targets <= {*LLAMA_LAYERS}:
        return shape.matrices
    names = LLAMA_LAYERS * shape.layers
    return [matrix for name, matrix in zip(names, shape.matrices, strict=True) if name in targets]


def trained_matrices(shape: Shape, lora: Lora | None) -> list[tuple[int, int]]:
    """List the sizes of the matrices inside the blocks that train: all, or the two of each adapter."""
    if lora is None:
        return shape.matrices
    return [part for rows, columns in adapted_matrices(shape, lora) for part in ((lora.r, columns), (rows, lora.r))]


def count_trained_weights(shape: Shape, lora: Lora | None) -> tuple[float, float]:
    """Count the weights that train, inside the blocks and outside of them. With adapters, these are only the embedding
    of the mask token."""
    inside = sum(rows * columns for rows, columns in trained_matrices(shape, lora))
    return inside, shape.parameters - shape.block_weights if lora is None else shape.width


def moment_bytes(shape: Shape, recipe: Recipe) -> float:
    """Return the bytes of an optimizer's moments; weights outside of the blocks have two."""
    inside, outside = count_trained_weights(shape, recipe.init.lora)
    return float(FLOAT32 * (len(recipe.optimizer.matrix_update.moments) * inside + 2 * outside))


WIDTHS_KEPT = {BFLOAT16: (13, 2, 5), FLOAT32: (6, 1, 3)}
"""The factors a, b and c of the activations (see above), by the bytes of a number."""
CHUNK_LOGITS = {"cpu": 2**25, "cuda": 2**29}
"""The most logits that the head holds at once, in the type of the arithmetic: 64 MB in bf16 on a CPU, 1 GB on a GPU.
Each chunk adds to a gradient as large as the weights, so that small chunks cost more than they save."""
KEPT_KEYS = 512
"""The largest average number of keys per token for which attention in buckets stores its softmax weights from the
forward to the backward pass. More weights would outweigh everything else that a block stores, so they are computed
again."""
BUCKET_BYTES = 2**20
"""The most bytes of attention scores per head of samples that are batched: more would leave the cache between two
operations."""
BLOCK_BYTES = 2**26
"""The most bytes of attention scores that are computed at once and not stored."""
PART_LOGITS = {"cpu": 2**20, "cuda": 2**28}
"""The most logits that are fp32 at once: on a CPU, as many as its caches hold from one operation to the next."""


def plan_memory(
    shape: Shape, recipe: Recipe, devices: int = 1, parallel: str | None = None, on_cpu: bool = False
) -> dict[str, float]:
    """Estimate the bytes that each of `devices` holds when they share a recipe's largest batch, by purpose and in
    `total`.

    Args:
        parallel: `ddp` or `fsdp`, in place of the recipe's.
        on_cpu: whether the devices are cores, not GPUs.

    Returns:
        `weights`, `gradients` and `moments` last from step to step. The computation of a batch adds `copies` of weights
        in the type of the arithmetic, `activations`, scores of `attention`, `logits` and the gradient of the `head`.
        After it, the optimizer's `update` adds temporary tensors.
    """
    # 1. The arithmetic, and the microbatches of the largest batch.
    compute = recipe.compute
    is_bf16 = compute.precision == "bf16" or (compute.precision == "auto" and (not on_cpu or has_bf16_cores()))
    number_bytes = BFLOAT16 if is_bf16 else FLOAT32
    batch = recipe.batch_tokens
    most_tokens = batch if isinstance(batch, int) else max(batch.start, batch.to)
    num_microbatches = math.ceil(most_tokens / (devices * compute.microbatch_tokens))
    # All have the same share of the batch, and the sample with which the share ends may reach beyond it.
    reached = math.ceil(most_tokens / (devices * num_microbatches)) + recipe.data.max_sample_tokens
    tokens = min(compute.microbatch_tokens, reached)
    # 2. What lasts: FSDP2 divides it among the devices, except gradients that are not summed yet.
    parts = devices if (parallel or compute.parallel) == "fsdp" else 1
    lora = recipe.init.lora
    trained = sum(count_trained_weights(shape, lora))
    gradients = float(FLOAT32 * trained)
    resident = {
        "weights": FLOAT32 * (shape.parameters + (trained if lora is not None else 0)) / parts,
        "gradients": gradients / parts + (gradients if devices > 1 and num_microbatches > 1 else 0),
        "moments": moment_bytes(shape, recipe) / parts,
    }
    # 3. What a microbatch needs.
    device = "cpu" if on_cpu else "cuda"
    logits = tokens * shape.vocab_size
    per_token = activations_per_token(shape, number_bytes, recomputes=compute.activation_checkpointing)
    head = 2 * shape.vocab_size * shape.width
    if lora is not None:  # the outputs of A, of dropout, and its mask, which is fp32 on a CPU; the table that learns
        adapted, mask_bytes = adapted_matrices(shape, lora), FLOAT32 if on_cpu else 1
        per_token += lora.r * len(adapted)
        if lora.lora_dropout:
            per_token += (1 + mask_bytes / number_bytes) * sum(columns for _, columns in adapted)
        head = (3 if shape.is_tied else 1) * shape.vocab_size * shape.width
    # Validation fills whole microbatches, and keeps what one block computes.
    of_block = activations_per_token(replace(shape, layers=1), number_bytes, recomputes=False)
    activations = max(tokens * per_token, compute.microbatch_tokens * of_block)
    computing = {
        "copies": float(number_bytes * count_copied(shape, is_fsdp=parts > 1, is_bf16=is_bf16)),
        "activations": float(number_bytes * activations),
        "attention": attention_bytes(shape, recipe, tokens, number_bytes) if on_cpu or not is_bf16 else 0.0,
        "logits": float(number_bytes * min(logits, CHUNK_LOGITS[device]) + FLOAT32 * min(logits, PART_LOGITS[device])),
        "head": float(FLOAT32 * head),
    }
    # 4. The update comes after that, when the memory of the microbatch is free again.
    update = update_bytes(trained_matrices(shape, lora), recipe.optimizer, number_bytes)
    total = sum(resident.values()) + max(sum(computing.values()), update)
    return resident | computing | {"update": update, "total": total}


def count_copied(shape: Shape, *, is_fsdp: bool, is_bf16: bool) -> float:
    """Count the weights that a device also holds in the type of the arithmetic.

    FSDP2 gathers the embedding, the head and two blocks: one computes while the next is on its way. Without it,
    autocast copies the matrices of all blocks to bf16.
    """
    if not is_fsdp:
        return shape.block_weights if is_bf16 else 0
    block = shape.block_weights / shape.layers + 2 * shape.width
    return shape.parameters - shape.layers * block + 2 * block


def activations_per_token(shape: Shape, number_bytes: int, *, recomputes: bool) -> float:
    """Count the numbers per token that the backward pass needs, in the type of the arithmetic (see above)."""
    of_layer, of_input, of_ends = WIDTHS_KEPT[number_bytes]
    of_block = of_layer * shape.width + 2 * shape.head_width * (shape.heads + shape.kv_heads) + 4 * shape.ffn
    # With checkpointing, each block keeps its input in fp32, and only one block at a time keeps everything that it
    # computes.
    of_blocks = shape.layers * of_input * shape.width + of_block if recomputes else shape.layers * of_block
    return of_blocks + of_ends * shape.width


def attention_bytes(shape: Shape, recipe: Recipe, num_tokens: int, number_bytes: int) -> float:
    """Return the most bytes of attention scores in buckets for so many tokens, whatever the lengths of the samples (see
    above)."""
    longest = min(recipe.data.max_sample_tokens, num_tokens)
    num_layers = 1 if recipe.compute.activation_checkpointing else shape.layers
    kept = number_bytes * num_layers * shape.heads * num_tokens * min(longest, KEPT_KEYS)
    # A bucket has at most the scores of all samples, of which those of two tokens are padded to 16, and its waste.
    of_all = number_bytes * (num_tokens * max(longest, 128) + 2**13)
    in_bucket = shape.heads * min(of_all, max(BUCKET_BYTES, number_bytes * longest**2))
    return float(kept + 3 * min(in_bucket, max(BLOCK_BYTES, shape.heads * BUCKET_BYTES)))


def update_bytes(matrices: Sequence[tuple[int, int]], optimizer: Optimizer, number_bytes: int) -> float:
    """Return the bytes of an update's temporary tensors: `Muon.step_together` takes all of these matrices that have one
    size at once."""
    if optimizer.matrix_update.iterations == 0:
        return 0.0
    needed = []
    for matrix, count in Counter(matrices).items():
        short, long = sorted(matrix)
        in_products = max(4 * short * long + short**2, 2 * short * long + 4 * short**2)
        needed.append(count * (FLOAT32 * short * long + number_bytes * in_products))
    return float(max(needed))
