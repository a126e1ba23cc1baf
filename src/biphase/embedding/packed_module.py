"""Texts → token embeddings without padding, as the input module of a sentence-transformers model.

What goes between the modules is sentence-transformers' own form of flat batches (`cu_seq_lens_q` and its kin), so that
its pooling, its losses and its cached gradients run on packed tokens as they are.

Letters: T packed tokens, S samples, D width.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import InputModule, Normalize
from sentence_transformers.sentence_transformer.modules import Dense, Pooling
from torch import Tensor, nn

from biphase.corpus.tokenizer import load_tokenizer
from biphase.encoder.attention import PAD_TO_MULTIPLE_OF, choose_backend, lay_out
from biphase.encoder.load import load_backbone
from biphase.encoder.packed import PaddedBackbone, packed_hidden
from biphase.errors import InputError
from biphase.export.model import close_texts
from biphase.finetuning.encoders import copy_backbone, load_encoder
from biphase.pretraining.optimizer import transformer_blocks


class PackedTransformer(InputModule):
    """A network of ours and its tokenizer; stands where sentence-transformers has its `Transformer`."""

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
        """The network of transformers."""
        return self.backbone.network if isinstance(self.backbone, PaddedBackbone) else self.backbone

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **_: Any) -> dict[str, Tensor]:
        """Texts → tokens laid end to end, each text closed as training closed it, cut at `max_seq_length`.

        Texts of 7, 1 and 6 tokens have `cu_seq_lens_q` 0, 7, 8, 14, and `seq_idx` seven times 0, once 1, six times 2.
        """
        if not all(isinstance(text, str) for text in inputs):
            raise InputError("an embedding model takes single texts, no pairs")
        texts = [prompt + text for text in inputs] if prompt else list(inputs)
        encoded = self.tokenizer(
            texts,
            truncation=True,
            max_length=self.max_seq_length,
            return_attention_mask=False,
            return_token_type_ids=False,
        )["input_ids"]
        lengths_S = np.array([len(ids) for ids in encoded], dtype=np.int64)
        bounds_S1 = np.concatenate([[0], np.cumsum(lengths_S)])
        positions_T = np.arange(bounds_S1[-1]) - np.repeat(bounds_S1[:-1], lengths_S)
        tokens_T = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in encoded])
        return {
            "input_ids": torch.from_numpy(tokens_T)[None],
            "position_ids": torch.from_numpy(positions_T)[None],
            "seq_idx": torch.from_numpy(np.repeat(np.arange(len(texts)), lengths_S))[None],
            "cu_seq_lens_q": torch.from_numpy(bounds_S1.astype(np.int32)),
        }

    def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Adds `token_embeddings` [1, T, D]."""
        tokens_T, positions_T = features["input_ids"][0], features["position_ids"][0]
        device = tokens_T.device
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else self.network.dtype
        layout = lay_out(
            features["cu_seq_lens_q"].cpu().numpy(),
            causal=False,
            device=device,
            backend=choose_backend(device, dtype),
            pad_to_multiple_of=PAD_TO_MULTIPLE_OF,
        )
        hidden_TD = packed_hidden(self.backbone, tokens_T, positions_T, layout)
        # A new dictionary: the cached losses embed the same features twice.
        return {**features, "token_embeddings": hidden_TD[None]}

    def get_embedding_dimension(self) -> int:
        return self.network.config.hidden_size

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """What a checkpoint of training holds; the folder that users get is written by `embedding.folder`."""
        self.network.save_pretrained(output_path)
        self.save_tokenizer(output_path)
        self.save_config(output_path)

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", *_: Any, **__: Any) -> "PackedTransformer":
        """What `save` wrote."""
        folder = Path(model_name_or_path, subfolder)
        return cls(
            load_backbone(folder), load_tokenizer(folder), **cls.load_config(model_name_or_path, subfolder=subfolder)
        )


@torch.no_grad()
def scale_token_embeddings(packed: PackedTransformer, rms: float, *, whiten: bool = False) -> None:
    """Give the table of token embeddings a root mean square, and with it their share of what goes along the layers;
    `whiten` makes all its directions equally strong first.

    Raises `InputError` for a network that normalises them, or adds positions to them, before its first layer.
    """
    table: Any = packed.network.get_input_embeddings().weight
    factor = rms / table.square().mean().sqrt()
    inputs: list[Tensor] = []

    def keep(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        inputs.append(given[0] if given else named["hidden_states"])

    hook = transformer_blocks(packed.network)[0].register_forward_pre_hook(keep, with_kwargs=True)
    features = {name: value.to(table.device) for name, value in packed.preprocess(["a text"]).items()}
    packed(features)
    table.mul_(factor)
    packed(features)
    hook.remove()
    if not torch.allclose(factor * inputs[0], inputs[1], rtol=1e-3):
        raise InputError(
            f"token_embedding_rms: {type(packed.network).__name__} normalises token embeddings, or adds positions to "
            "them, before its first layer; leave it out"
        )
    if whiten:
        table.copy_(whitened(table))
        table.mul_(rms / table.square().mean().sqrt())


def whitened(rows_ND: Tensor) -> Tensor:
    """The rows multiplied by the inverse square root of their second moments: what varies little counts as much as what
    varies most, and each row stays as near to itself as that allows (ZCA). Directions that no row has stay empty.
    """
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
    """A `SentenceTransformer` on the packed network behind a name: token embeddings → pooling → length 1.

    Args:
        model: `RUN[@STEP]`, a model folder or a hub id, a decoder too (it comes out bidirectional).
        max_seq_length: tokens after which texts are cut; None for what the network has positions for.
        dense: a linear map between pooling and length 1, which begins as the identity.
        weights: `pretrained`, or `random` ones from torch's generator.

    Raises:
        InputError: no such model, one that cannot be an encoder, or texts longer than its positions.
    """
    encoder = load_encoder(model)
    if max_seq_length is not None and max_seq_length > encoder.max_length:
        raise InputError(
            f"max_length {max_seq_length} is above the {encoder.max_length} tokens that {model} has positions for; "
            "leave it out to take those"
        )
    shared: Any = encoder.backbone
    tokenizer = copy.deepcopy(encoder.tokenizer.pretrained)
    close_texts(tokenizer)
    if tokenizer.pad_token_id >= shared.config.vocab_size:
        tokenizer.pad_token = tokenizer.eos_token  # padding was added by us, and others will look it up
    backbone = copy_backbone(encoder.backbone, [], weights)
    packed = PackedTransformer(backbone, tokenizer, max_seq_length or encoder.max_length)
    width = packed.get_embedding_dimension()
    modules: list[nn.Module] = [packed, Pooling(width, pooling_mode=pooling), Normalize()]
    if dense:
        identity = torch.eye(width)
        modules.insert(2, Dense(width, width, bias=False, activation_function=nn.Identity(), init_weight=identity))
    return SentenceTransformer(modules=modules, similarity_fn_name="cosine")
