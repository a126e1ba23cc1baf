"""An embedding model: texts → token embeddings without padding → embeddings; and its folder, written and read.

The packed input module makes flat batches in sentence-transformers' own form (`cu_seq_lens_q` and its kin), so its
pooling, losses and cached gradients run on packed tokens unchanged. The folder loads with `SentenceTransformer(path)`,
without our code.

Letters: T packed tokens, S samples, N texts, A anchors, B rows of a piece, C columns, D width.
"""

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from huggingface_hub import ModelCardData
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import InputModule, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Dense, Pooling
from sentence_transformers.util import batch_to_device
from torch import Tensor, nn

from biphase import console
from biphase.corpus.tokenizer import load_tokenizer
from biphase.device import choose_dtype, to_device
from biphase.embedding.pairs import PIECE_ROWS, to_arrow
from biphase.embedding.recipe import EmbeddingRecipe, HardNegatives
from biphase.encoder.attention import PAD_TO_MULTIPLE_OF, choose_inference_backend, lay_out
from biphase.encoder.lora import has_adapters, transformer_blocks
from biphase.encoder.models import find_folder, hash_model, unreplaced
from biphase.encoder.network import PaddedBackbone, copy_in, load_backbone, save_network
from biphase.encoder.packed import packed_hidden
from biphase.encoder.search import find_nearest, in_pieces
from biphase.errors import InputError, clipped, told_as
from biphase.exporting.card import render_card
from biphase.exporting.golden import write_golden
from biphase.exporting.model import close_texts, save_encoder, write_sentence_transformer
from biphase.exporting.plain import list_module_files, load_sentence_transformer, read_embedder_file, read_modules
from biphase.files import content_hash, file_hash, make_once, own_folder, write_json, write_text
from biphase.finetuning.encoding import most_tokens, split_by_tokens, take_samples
from biphase.finetuning.heads import copy_backbone, load_encoder
from biphase.hub import output_width
from biphase.pretraining.optimizer import autocast


class PackedTransformer(InputModule):
    """A packed network and its tokenizer, in place of sentence-transformers' `Transformer`."""

    config_file_name = "packed_transformer.json"
    config_keys: list[str] = ["max_seq_length"]  # noqa: RUF012
    save_in_root = True

    tokenizer: Any

    def __init__(self, backbone: nn.Module, tokenizer: Any, max_seq_length: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.tokenizer = tokenizer
        self.max_seq_length = max_seq_length

    @property
    def network(self) -> Any:
        """The network, as transformers knows it."""
        return self.backbone.network if isinstance(self.backbone, PaddedBackbone) else self.backbone

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **_: Any) -> dict[str, Any]:
        """Tokenize texts, close each as in training, cut it at `max_seq_length`, and lay them end to end.

        Texts of 7, 1 and 6 tokens have `cu_seq_lens_q` 0, 7, 8, 14, and `seq_idx` seven times 0, once 1, six times 2.
        `cu_seq_lens_q` is an array, which stays on the CPU when tensors move to a device, because attention is laid out
        and batches are divided there.
        """
        other = next((text for text in inputs if not isinstance(text, str)), "")
        if not isinstance(other, str):
            raise InputError(f"an embedding model takes single texts, not {clipped(repr(other))}")
        texts = [prompt + text for text in inputs] if prompt else list(inputs)
        encoded = self.tokenizer(texts, truncation=True, max_length=self.max_seq_length)["input_ids"]
        samples = [torch.tensor(ids, dtype=torch.long) for ids in encoded]
        bounds_S1 = np.cumsum([0, *map(len, samples)], dtype=np.int32)
        return {
            "input_ids": torch.cat(samples)[None],
            "position_ids": torch.cat([torch.arange(len(tokens)) for tokens in samples])[None],
            "seq_idx": torch.cat([torch.full_like(tokens, index) for index, tokens in enumerate(samples)])[None],
            "cu_seq_lens_q": bounds_S1,
        }

    def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Add `token_embeddings` [1, T, D] to the features, and place `cu_seq_lens_q` on their device. A tensor of a
        caller's own as `cu_seq_lens_q` is read back from its device."""
        tokens_T, positions_T = features["input_ids"][0], features["position_ids"][0]
        device = tokens_T.device
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else self.network.dtype
        bounds_S1 = features["cu_seq_lens_q"]
        bounds_S1 = bounds_S1.cpu().numpy() if isinstance(bounds_S1, Tensor) else bounds_S1
        hidden_TD = self.compute_hidden(tokens_T, positions_T, bounds_S1, dtype).float()
        # A new dictionary: the cached losses embed the same features twice.
        on_device = to_device(bounds_S1.astype(np.int32), device)
        return {**features, "cu_seq_lens_q": on_device, "token_embeddings": hidden_TD[None]}

    def compute_hidden(self, tokens_T: Tensor, positions_T: Tensor, bounds_S1: np.ndarray, dtype: Any) -> Tensor:
        """Compute the last hidden states [T, D] by arithmetic of that type."""
        computing: dict[str, Any] = {"device": tokens_T.device, "dtype": dtype}
        layout = lay_out(bounds_S1, causal=False, pad_to_multiple_of=PAD_TO_MULTIPLE_OF, **computing)
        return packed_hidden(self.backbone, tokens_T, positions_T, layout)

    def get_embedding_dimension(self) -> int:
        return output_width(self.network.config)

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Save a checkpoint of training, without the network if only adapters beside it train. `write_embedder` writes
        the folder for users."""
        if not has_adapters(self.network):
            save_network(self.network, Path(output_path))
        self.save_tokenizer(output_path)
        self.save_config(output_path)

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", *_: Any, **__: Any) -> "PackedTransformer":
        """Load a checkpoint that `save` wrote."""
        folder = Path(model_name_or_path, subfolder)
        settings = cls.load_config(model_name_or_path, subfolder=subfolder)
        return cls(load_backbone(folder), load_tokenizer(folder), **settings)


class InferenceTransformer(PackedTransformer):
    """A packed network that only embeds, as fast as it can: its weights are converted to the type of the arithmetic
    once, and its attention is the fastest without gradients. Scores of studies are computed as in training instead, so
    that they equal earlier ones to the last bit."""

    def __init__(self, backbone: nn.Module, tokenizer: Any, max_seq_length: int) -> None:
        super().__init__(backbone, tokenizer, max_seq_length)
        self.copies: dict[tuple[torch.device, torch.dtype], nn.Module] = {}
        self.inference_batch_size = max(32, min(256, 2**17 // max_seq_length))
        """The number of texts to embed at a time: many short ones, few that may be long."""

    def compute_hidden(self, tokens_T: Tensor, positions_T: Tensor, bounds_S1: np.ndarray, dtype: Any) -> Tensor:
        device = tokens_T.device
        if dtype != self.network.dtype and (device, dtype) not in self.copies:
            self.copies[device, dtype] = copy_in(self.backbone, dtype)
        backbone = self.copies.get((device, dtype), self.backbone)
        computing: dict[str, Any] = {"device": device, "backend": choose_inference_backend(device, dtype)}
        hidden_TD = torch.empty(len(tokens_T), self.get_embedding_dimension(), device=device)
        # Attention is fastest if samples of one length are neighbours.
        lengths_S = np.diff(bounds_S1)
        for samples in split_by_tokens(np.argsort(lengths_S, kind="stable"), lengths_S, most_tokens(device)):
            indices_T, part_S1 = take_samples(bounds_S1, samples)
            layout = lay_out(part_S1, causal=False, pad_to_multiple_of=PAD_TO_MULTIPLE_OF, **computing)
            part_T = to_device(indices_T, device)
            hidden_TD[part_T] = packed_hidden(backbone, tokens_T[part_T], positions_T[part_T], layout).float()
        return hidden_TD


@torch.no_grad()
def scale_token_embeddings(packed: PackedTransformer, rms: float, *, whiten: bool = False) -> None:
    """Scale the table of token embeddings to a root mean square; `whiten` first makes its directions equally strong.
    Raises `InputError` for a network that normalises them, or adds positions to them, before its first layer."""
    table: Any = packed.network.get_input_embeddings().weight
    factor = rms / table.square().mean().sqrt()
    inputs: list[Tensor] = []

    def keep(_: nn.Module, arguments: tuple[Any, ...], named_arguments: dict[str, Any]) -> None:
        inputs.append(arguments[0] if arguments else named_arguments["hidden_states"])

    hook = transformer_blocks(packed.network)[0].register_forward_pre_hook(keep, with_kwargs=True)
    features = batch_to_device(packed.preprocess(["a text"]), table.device)
    packed(features)
    table.mul_(factor)
    packed(features)
    hook.remove()
    if not torch.allclose(factor * inputs[0], inputs[1], rtol=1e-3):
        class_name = type(packed.network).__name__
        raise InputError(f"token_embedding_rms: leave it out, {class_name} changes embeddings before its first layer")
    if whiten:
        table.copy_(whitened(table))
        table.mul_(rms / table.square().mean().sqrt())


def whitened(rows_ND: Tensor) -> Tensor:
    """Multiply rows by the inverse square root of their second moments (ZCA). All directions become equally strong, and
    each row moves as little as possible. Directions that no row has stay empty."""
    rows = rows_ND.cpu().double()  # not every accelerator has doubles
    moments_D, directions_DD = torch.linalg.eigh(rows.T @ rows)
    scales_D = torch.where(moments_D > 1e-10 * moments_D[-1], moments_D.clamp(min=1e-300).rsqrt(), 0.0)
    return (rows @ (directions_DD * scales_D) @ directions_DD.T).to(rows_ND)


def width_of(model: SentenceTransformer) -> int:
    width = model.get_embedding_dimension()
    assert width is not None
    return width


def make_embedder(
    model: str, max_seq_length: int | None, pooling: str, *, dense: bool = False, weights: Any = "pretrained"
) -> Any:
    """Make a `SentenceTransformer` on the packed network behind a name: token embeddings → pooling → length 1.

    Args:
        model: `RUN[@STEP]`, a model folder or a Hub id. A decoder becomes bidirectional.
        max_seq_length: tokens after which texts are cut; None for the positions of the network.
        dense: add a linear map after pooling, which begins as the identity.
        weights: `pretrained`, or `random` ones from torch's generator.

    Raises:
        InputError: an unknown model, one that cannot be an encoder, or a `max_seq_length` beyond its positions.
    """
    encoder = load_encoder(model)
    if max_seq_length is not None and max_seq_length > encoder.max_length:
        raise InputError(f"max_length {max_seq_length}: {model} has positions for {encoder.max_length}; leave it out")
    shared: Any = encoder.backbone
    tokenizer = copy.deepcopy(encoder.tokenizer.pretrained)
    close_texts(tokenizer)
    if tokenizer.pad_token_id >= shared.config.vocab_size:
        tokenizer.pad_token = tokenizer.eos_token  # our padding token has no embedding, and other libraries look it up
    backbone = copy_backbone(encoder.backbone, [], weights)
    packed = PackedTransformer(backbone, tokenizer, max_seq_length or encoder.max_length)
    width = packed.get_embedding_dimension()
    modules: list[nn.Module] = [packed, Pooling(width, pooling_mode=pooling), Normalize()]
    if dense:
        identity = torch.eye(width)
        modules.insert(2, Dense(width, width, bias=False, activation_function=nn.Identity(), init_weight=identity))
    return SentenceTransformer(modules=modules, similarity_fn_name="cosine")


DOCUMENT_PROMPTS = ("document", "passage", "corpus")
"""The names of the prompt of documents in sentence-transformers, in order of preference."""


def tell_unused_parts(recipe: EmbeddingRecipe) -> str:
    """Print the parts of an embedding model beside its network, because training starts without them. Returns the name
    of the model before training, which is not that model if it has such parts."""
    folder = find_folder(recipe.model)
    left_out = []
    for module in read_modules(folder):
        class_name = module.type.rpartition(".")[2]
        if class_name == "Pooling":
            mode = Pooling.load(str(folder), subfolder=module.path).pooling_mode
            left_out += [f"its pooling {mode} (pooling is {recipe.pooling})"] if mode != recipe.pooling else []
        elif class_name not in ("Transformer", "Normalize"):
            left_out.append(f"its {class_name}")
    saved, given = read_embedder_file(folder), recipe.prompts.model_dump()
    named = {name: text for name, text in (saved.prompts or {}).items() if text}
    document = next((name for name in DOCUMENT_PROMPTS if name in named), "document")
    named = {"document" if name == document else name: text for name, text in named.items()}
    prompts = {name: text for name, text in named.items() if text not in given.values()}
    if prompts:
        quoted = {name: json.dumps(text, ensure_ascii=False) for name, text in prompts.items()}
        keys = ", ".join(f"{name}: {quoted[name]}" for name in given if name in quoted)
        left_out.append("its prompts" + (f" (give prompts: {{{keys}}} to keep them)" if keys else ""))
    if saved.similarity_fn_name not in (None, "cosine"):
        left_out.append(f"its similarity {saved.similarity_fn_name} (cosine is trained)")
    if left_out:
        console.err.print(f"{recipe.model}: the network alone is trained, without {', '.join(left_out)}")
    return "the network before training" if left_out else "before training"


ENCODE_TEXTS = 64
"""The number of texts that pass through the network at a time."""
PIECE_TEXTS = 512
"""The most texts between two reports of progress."""
CUT_TEXTS = 100
"""The approximate number of texts that show how many a model cuts."""


Encode = Callable[..., Any]
"""A method of an embedding model that embeds texts: as queries, as documents, or as neither."""


def encoder_of(model: SentenceTransformer, side: Literal["query", "document"]) -> Encode:
    """Return the method that embeds queries or documents as the model compares them: at length 1 for cosine."""
    encode = model.encode_query if side == "query" else model.encode_document
    return partial(encode, normalize_embeddings=model.similarity_fn_name == "cosine")


def fast_encoder_of(model: SentenceTransformer, side: Literal["query", "document"]) -> Encode:
    """Return what `encoder_of` does, in bf16 on devices with units for it, for embeddings that no score is made of."""
    encode, dtype = encoder_of(model, side), choose_dtype("auto", model.device)
    size = {"batch_size": model[0].inference_batch_size} if isinstance(model[0], InferenceTransformer) else {}
    return lambda texts, **settings: embed_in(model, dtype, encode, texts, **settings | size)


def embed_in(model: Any, dtype: torch.dtype, encode: Encode, texts: Sequence[str], **settings: Any) -> Any:
    """Embed texts by arithmetic of a type; return fp32. A last linear layer in bf16 rounds embeddings, so those of
    length 1 are brought to length 1 again."""
    with autocast(model.device, dtype):
        vectors = encode(texts, **settings).float()
    is_rounded = dtype != torch.float32 and any(isinstance(module, Dense) for module in model)
    return nn.functional.normalize(vectors, dim=-1) if is_rounded and isinstance(model[-1], Normalize) else vectors


def check_prompt(model: SentenceTransformer, prompt_name: str | None) -> None:
    """Raise `InputError` if a model has no prompt of that name. Print a line if it has some, and texts get none."""
    named = [name for name, text in model.prompts.items() if text]
    if prompt_name is not None and prompt_name not in model.prompts:
        raise InputError(f"prompt_name is '{prompt_name}': the model's prompts are {', '.join(model.prompts)}")
    if named and prompt_name is None and model.default_prompt_name is None:
        names = " or ".join(f"'{name}'" for name in named)
        console.err.print(f"texts are embedded without a prompt; the model has some (prompt_name: {names})")


def encode_batch(encode: Encode, texts: Sequence[str]) -> Tensor:
    """Embed texts, on the device of the model."""
    return encode(texts, batch_size=ENCODE_TEXTS, convert_to_tensor=True, show_progress_bar=False)


def embed_pieces(encode: Encode, texts: Iterable[str], num_texts: int, label: str) -> Iterator[Tensor]:
    """Embed texts, a piece at a time, on the device of the model."""
    remaining = iter(texts)
    size = ENCODE_TEXTS  # few at first, for an early report
    with console.track(label, num_texts, "texts") as progress:
        while piece := list(islice(remaining, size)):
            yield encode_batch(encode, piece)
            progress.advance(len(piece))
            size = min(2 * size, PIECE_TEXTS)


def embed_texts(encode: Encode, texts: Sequence[str], label: str) -> Tensor:
    """Embed texts: [N, D]."""
    return torch.cat(list(embed_pieces(encode, texts, len(texts), label)))


def find_similar(
    model: SentenceTransformer, queries_QD: Tensor, documents_ND: Tensor, top: int, chosen_N: np.ndarray | None = None
) -> list[list[tuple[int, float]]]:
    """Find the `top` documents of each query by the model's own similarity: their indices and scores, best first. The
    embeddings must come from `encoder_of`. `chosen_N` are the indices to search among; None for all."""
    similarity: dict[str, Any] = {} if model.similarity_fn_name == "cosine" else {"similarity": model.similarity}
    return find_nearest(queries_QD, in_pieces(documents_ND, chosen_N), top, **similarity)


def create_vectors(path: Path, num_rows: int, width: int) -> np.memmap:
    """Create a file of embeddings, fp32, mapped into memory."""
    return np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(num_rows, width))


def embed_into(rows_ND: np.ndarray, chosen: np.ndarray, encode: Encode, texts: Iterable[str], label: str) -> None:
    """Write the embeddings of texts into the chosen rows."""
    remaining = iter(chosen)
    for piece_ND in embed_pieces(encode, texts, len(chosen), label):
        rows_ND[list(islice(remaining, len(piece_ND)))] = piece_ND.cpu().numpy()


def tell_cut(model: SentenceTransformer, texts: Iterable[str], num_texts: int) -> None:
    """Print the share of `num_texts` texts that a model cuts at its `max_seq_length`, by about a hundred of them."""
    first: Any = model[0]
    if not isinstance(first, PackedTransformer | Transformer) or first.max_seq_length is None:
        return  # such as a table of words, which cuts nothing
    sample = [*islice(texts, None, None, max(1, num_texts // CUT_TEXTS))]
    encoded = first.tokenizer(sample, truncation=False, verbose=False)["input_ids"]
    if share := sum(len(ids) > first.max_seq_length for ids in encoded) / len(sample):
        longest = f"the model's {first.max_seq_length:,} tokens"
        console.err.print(f"about {share:.0%} of the passages are longer than {longest}: it reads their beginnings")


# Tables that a model extends, made once and kept as files


def table_once(path: Path, schema: pa.Schema, pieces: Iterable[pa.Table]) -> Dataset:
    """Write pieces of a table to a file, once, and map the file into memory."""

    def write(part: Path) -> None:
        with pa.ipc.new_stream(part, schema) as writer:
            for piece in pieces:
                writer.write_table(piece)

    make_once(path, write)
    return Dataset.from_file(str(path))


def teach_once(table: Dataset, teacher: SentenceTransformer, stage: str, path: Path) -> Dataset:
    """Add the teacher's embeddings of the texts to a table, as labels of `EmbedDistillLoss`, [C, D] for a row. The
    teacher reads each text once, and once more if it is a query and a document.

    The teacher's own prompts apply: anchors are queries, positives and negatives are documents, and the two sides of
    scored pairs are neither. To save memory, files hold the embeddings of different texts meanwhile.
    """
    columns = [column for column in table.column_names if column != "score"]
    sides: list[tuple[list[str], Encode]] = [
        (columns[:1], teacher.encode_query),
        (columns[1:], teacher.encode_document),
    ]
    if "score" in table.column_names:
        sides = [(columns, teacher.encode)]
    width = width_of(teacher)
    rows_CD = pa.list_(pa.list_(pa.float32(), width), len(columns))
    schema = pa.schema([*((column, pa.string()) for column in columns), ("label", rows_CD)])

    def teach() -> Iterator[pa.Table]:
        # 1. The embeddings of each side's different texts, and their rows there.
        vectors: dict[str, np.memmap] = {}
        rows: dict[str, dict[str, int]] = {}
        paths = [path.with_suffix(f".{number}.npy") for number in range(len(sides))]
        for (names, encode), file in zip(sides, paths, strict=True):
            texts = dict.fromkeys(chain.from_iterable(table.data.column(name).to_pylist() for name in names))
            vectors_ND = create_vectors(file, len(texts), width)
            embed_into(vectors_ND, np.arange(len(texts)), encode, texts, f"teach {stage}")
            rows_of_texts = {text: row for row, text in enumerate(texts)}
            for name in names:
                vectors[name], rows[name] = vectors_ND, rows_of_texts
        # 2. Those of the table's rows.
        for piece in table.select_columns(columns).iter(PIECE_TEXTS):
            embeddings = [vectors[name][[rows[name][text] for text in piece[name]]] for name in columns]
            flat = pa.array(np.stack(embeddings, axis=1).ravel())
            rows_BC = pa.FixedSizeListArray.from_arrays(flat, width)
            rows_BCD = pa.FixedSizeListArray.from_arrays(rows_BC, len(columns))
            yield pa.table([*piece.values(), rows_BCD], schema=schema)
        for file in paths:
            file.unlink()

    return table_once(path, schema, teach())


def mine_once(table: Dataset, model: SentenceTransformer, stage: str, settings: HardNegatives, path: Path) -> Dataset:
    """Add hard negatives to the rows of a table, and leave out rows that have too few. Prints how many rows remain,
    and how many do not. Raises `InputError` if none remains."""
    names = ["anchor", "positive", *(f"negative_{index + 1}" for index in range(settings.number))]

    def mine() -> Iterator[pa.Table]:
        negatives = mine_negatives(table, model, settings, f"mine for {stage}", path.with_suffix(".npy"))
        if not any(len(texts) == settings.number for texts in negatives.values()):
            reach = f"{settings.number} negatives within rank {settings.last_rank} and margin {settings.margin}"
            raise InputError(f"hard_negatives: no anchor has {reach}: lower number or margin, or raise last_rank")
        for texts in table.iter(PIECE_ROWS):
            pairs = zip(texts["anchor"], texts["positive"], strict=True)
            rows = [(*pair, *negatives[pair[0]]) for pair in pairs if len(negatives[pair[0]]) == settings.number]
            yield to_arrow(rows, names)

    mined = table_once(path, pa.schema([(name, pa.string()) for name in names]), mine())
    lacking = f"; the other {num_lacking:,} are not trained on" if (num_lacking := len(table) - len(mined)) else ""
    message = f"{len(mined):,} of {len(table):,} pairs have {settings.number} hard negatives{lacking}"
    console.err.print(f"stage {stage}: {message}")
    return mined


def mine_negatives(
    table: Dataset, model: SentenceTransformer, settings: HardNegatives, label: str, path: Path
) -> dict[str, list[str]]:
    """Choose for each anchor up to `settings.number` positives of other anchors that the model ranks high, as
    `mine_hard_negatives` of sentence-transformers does.

    A negative scores below the worst positive of its anchor by at least the margin; only such passages have ranks. To
    save memory, the file `path` holds the embeddings of passages meanwhile, and anchors come in pieces.
    """
    # 1. Each anchor's own passages, as indices.
    anchors = table.data.column("anchor").to_pylist()
    positives = table.data.column("positive").to_pylist()
    passages = list(dict.fromkeys(positives))
    indices = {text: index for index, text in enumerate(passages)}
    relevant: dict[str, set[int]] = {}
    for anchor, positive in zip(anchors, positives, strict=True):
        relevant.setdefault(anchor, set()).add(indices[positive])
    # 2. The embeddings of all passages.
    rows = create_vectors(path, len(passages), width_of(model))
    encode = partial(model.encode_document, normalize_embeddings=True)
    embed_into(rows, np.arange(len(rows)), encode, passages, f"{label}: passages")
    rows_ND = torch.from_numpy(rows)
    # 3. The nearest passages of each anchor that are not its own and score low enough.
    top = settings.last_rank + max(map(len, relevant.values()))
    chosen: dict[str, list[str]] = {}
    remaining = iter(relevant.items())
    encode = partial(model.encode_query, normalize_embeddings=True)
    for piece_AD in embed_pieces(encode, relevant, len(relevant), f"{label}: anchors"):
        nearest_A = find_nearest(piece_AD, in_pieces(rows_ND), top)
        own = islice(remaining, len(piece_AD))
        for (anchor, own_passages), row_D, hits in zip(own, piece_AD.cpu(), nearest_A, strict=True):
            worst = float((rows_ND[sorted(own_passages)] @ row_D).min())
            most = worst - abs(worst) * settings.margin
            negatives = [index for index, score in hits if score <= most and index not in own_passages]
            ranked = negatives[settings.first_rank : settings.last_rank]
            chosen[anchor] = [passages[index] for index in ranked[: settings.number]]
    path.unlink()
    return chosen


# Its folder


TOLERANCE = 1e-4
"""The largest difference in any dimension between an embedding of length 1 from the packed network and from
sentence-transformers alone."""
UNPACKED_SETTINGS = ("query_length", "document_length", "query_expansion", "processing_kwargs")
"""The settings of sentence-transformers' `Transformer` that a `PackedTransformer` lacks."""
LONG_PROBE = 20
"""The number of sentences in a text that is longer than the window of most networks with local attention."""


def write_embedder(
    model: SentenceTransformer, recipe: EmbeddingRecipe, facts: dict[str, Any], texts: Sequence[str], out: Path
) -> None:
    """Write the folder with its card, and prove on `texts` that sentence-transformers alone gives the packed network's
    embeddings. Raises `InputError` for a folder that holds anything else."""
    packed: Any = model[0]
    tokenizer = copy.deepcopy(packed.tokenizer)
    tokenizer.model_max_length = packed.max_seq_length
    tokenizer.backend_tokenizer.no_truncation()  # else the file would keep the truncation of the last call
    with own_folder(out, "embedding model") as part:
        save_encoder(part, packed.network, tokenizer)
        further = [type(module).__name__ for module in list(model)[2:]]
        prompts = recipe.prompts.model_dump()
        write_sentence_transformer(
            part, packed.network, packed.max_seq_length, pooling=recipe.pooling, further=further, prompts=prompts
        )
        if recipe.dense:
            dense: Any = model[2]
            (part / "2_Dense").mkdir()
            dense.save(str(part / "2_Dense"))
            # Only the keys that every version of sentence-transformers knows.
            keys = ("in_features", "out_features", "bias", "activation_function")
            write_json(part / "2_Dense" / "config.json", {key: dense.get_config_dict()[key] for key in keys})
        # As a user would load it.
        again = load_sentence_transformer(part, "cpu")
        gap = np.abs(probe_embeddings(model, texts, texts) - probe_embeddings(again, texts, texts)).max()
        assert gap < TOLERANCE, f"the saved model computes something else: embeddings differ by {gap:.1e}"
        write_golden(part)
        head = ModelCardData(
            library_name="sentence-transformers",
            pipeline_tag="sentence-similarity",
            tags=["sentence-transformers", "feature-extraction", "biphase"],
            language=list(recipe.languages) or None,
            license=recipe.license,
        )
        template = Path(__file__).with_name("card.md.j2")
        write_text(part / "README.md", render_card(template, head, name=out.name, model=model, recipe=recipe, **facts))


def load_embedder(name: str) -> SentenceTransformer:
    """Load the embedding model behind a name, packed if its first module is a plain transformers network.

    A run, or a folder without sentence-transformers' files, gets mean pooling. If packing changes the embeddings, as in
    a decoder that stays causal, sentence-transformers alone runs the model, and a line says so.

    Raises `InputError` for a model that cannot be loaded, or needs its own code or a pickle.
    """
    console.err.print(f"loading {name}")
    with unreplaced(find_folder(name)) as folder:
        if not (folder / "modules.json").exists():
            return make_embedder(name, None, "mean")
        return load_modules(folder, name)


def load_for_inference(name: str) -> SentenceTransformer:
    """Load an embedding model as `load_embedder` does, and let an `InferenceTransformer` compute it."""
    model = load_embedder(name)
    first: Any = model[0]
    if isinstance(first, PackedTransformer):
        model[0] = InferenceTransformer(first.backbone, first.tokenizer, first.max_seq_length)
    return model


def load_modules(folder: Path, name: str) -> SentenceTransformer:
    """Load the modules of an embedding model, with a packed network if that gives the same embeddings."""
    text = "What a text of some more words says."
    texts: Any = ["a", text], [" ".join([text] * LONG_PROBE)]
    plain = load_sentence_transformer(folder)
    with told_as(f"{name} cannot be loaded as an embedding model"):
        expected_ND = probe_embeddings(plain, *texts)
    first: Any = plain[0]
    if type(first) is not Transformer or first.do_lower_case:
        return plain
    if not any(getattr(first, setting) for setting in UNPACKED_SETTINGS):
        place = folder / read_modules(folder)[0].path
        plain[0] = PackedTransformer(load_backbone(place), first.tokenizer, first.max_seq_length).to(plain.device)
        if np.abs(probe_embeddings(plain, *texts) - expected_ND).max() < TOLERANCE:
            return plain
        plain[0] = first
    console.err.print(f"{name}: sentence-transformers alone runs it, because packing would change its embeddings")
    return plain


def probe_embeddings(model: SentenceTransformer, queries: Sequence[str], documents: Sequence[str]) -> np.ndarray:
    """Embed queries, then documents, to length 1."""
    sides = (model.encode_query, queries), (model.encode_document, documents)
    settings: Any = {"normalize_embeddings": True, "show_progress_bar": False}
    return np.concatenate([np.asarray(encode(list(texts), **settings)) for encode, texts in sides])


def hash_embedder(name: str) -> str:
    """Hash all files that decide embeddings: network, tokenizer, further modules and prompts."""
    folder = find_folder(name)
    further = sorted([*folder.glob("modules.json"), *folder.glob("*sentence*.json"), *list_module_files(folder)])
    return content_hash([hash_model(folder), *(file_hash(path) for path in further)])
