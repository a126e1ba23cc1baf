"""The recipe of an embedding model, as a YAML file describes it: a network, and stages of training."""

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from biphase.config import FolderName, PositiveCount, Strict
from biphase.console import TrackingName
from biphase.corpus.rows import Delimiter
from biphase.errors import refuse_doubles
from biphase.files import content_hash
from biphase.recipe import Lora

PositiveFloat = Annotated[float, Field(gt=0)]
LossName = Literal["auto", "cached_mnrl", "mnrl", "cosent", "distill"]
LOSSES: dict[str, str] = {
    "cached_mnrl": "CachedMultipleNegativesRankingLoss",
    "mnrl": "MultipleNegativesRankingLoss",
    "cosent": "CoSENTLoss",
    "distill": "EmbedDistillLoss",
}
"""Names of losses → classes of sentence-transformers. `auto` takes cached_mnrl, and cosent for scored pairs."""


class PairSource(Strict):
    """A source of texts that belong together. Give exactly one of `path` and `from_text`."""

    later: ClassVar[frozenset[str]] = frozenset({"quotes", "delimiter"})

    path: str | None = None
    """A Hub data set, or a .csv, .tsv, .jsonl (.gz, .zst) or .parquet file, of pairs, triplets or scored pairs."""
    columns: tuple[str, ...] = ()
    """The columns of `path`: anchor, positive and negatives, or two texts and a score. By default, biphase guesses and
    prints them."""
    quotes: bool | None = None
    """Whether fields of a .tsv may be in quotes. None: the header decides, and doubt is an error."""
    delimiter: Delimiter | None = None
    """The delimiter of a .csv. None: a comma, or a semicolon if the header has one and no comma."""
    from_text: str | None = None
    """Files or a folder of texts from which to make pairs."""
    pairs: Literal["crops", "neighbours", "titles"] = "crops"
    """The pairs made by `from_text`: `crops` are two crops of one passage, `neighbours` a passage and the next one,
    `titles` the first line of a document and a passage below it."""
    passage_words: PositiveCount = 100
    """With `from_text`: the approximate number of words of a passage, and so the most of a crop."""
    text_field: str = "text"
    limit: PositiveCount | None = None
    """The number of first pairs to take. None: all."""
    weight: PositiveFloat = 1.0
    """The number of times that an epoch goes through the source: 0.5 takes half of it, drawn with the seed."""

    @model_validator(mode="after")
    def one_source(self) -> "PairSource":
        if (self.path is None) == (self.from_text is None):
            raise ValueError("give exactly one of path and from_text")
        if self.from_text is not None and self.columns:
            raise ValueError("columns are those of a path; from_text has text_field")
        return self


class HardNegatives(Strict):
    """Passages that the network ranks high for an anchor before a stage, but that are not its positive."""

    number: PositiveCount = 3
    margin: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """The least distance of a negative below the positive, as a share of the positive's score: a nearer passage may be
    relevant."""
    first_rank: Annotated[int, Field(ge=0)] = 0
    last_rank: PositiveCount = 50


class EmbeddingStage(Strict):
    """One stage of training, which continues where the stage before it ended."""

    later: ClassVar[frozenset[str]] = frozenset({"orthogonal_weight"})

    name: FolderName
    data: Annotated[tuple[PairSource, ...], Field(min_length=1)]
    loss: LossName = "auto"
    loss_settings: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the loss by sentence-transformers' names, such as `hardness_mode: hard_negatives` with
    `hardness_strength: 5`."""
    temperature: PositiveFloat = 0.05
    """The divisor of the scores, in losses that have a temperature."""
    orthogonal_weight: Annotated[float, Field(ge=0)] = 0.0
    """The weight of the global orthogonal regularizer (arXiv 1708.06320, 2509.20354) beside `mnrl` or `cosent`. It
    pushes the texts of one column towards right angles to each other. `auto` then takes `mnrl`."""
    teacher: str | None = None
    """With `loss: distill`: the embedding model to imitate, a folder or a Hub id."""
    projection: bool = False
    """With `teacher`: whether to learn a linear map to its dimension, which may then differ."""
    hard_negatives: HardNegatives | None = None
    epochs: PositiveFloat = 1.0
    max_steps: PositiveCount | None = None
    batch_size: Annotated[int, Field(ge=2)] = 128
    """The anchors of a step. Each has the positives of all others as negatives."""
    mini_batch_tokens: PositiveCount = 16_384
    """With cached_mnrl: the tokens that pass through the network at a time. They change memory, not the result."""
    learning_rate: PositiveFloat = 2e-4
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.1
    weight_decay: float = 0.01
    save_steps: PositiveCount = 200

    @model_validator(mode="after")
    def loss_fits(self) -> "EmbeddingStage":
        if (self.loss == "distill") != (self.teacher is not None) or (self.projection and self.teacher is None):
            raise ValueError("loss: distill and teacher belong together, and projection with both")
        if self.orthogonal_weight and self.loss in ("cached_mnrl", "distill"):
            raise ValueError(f"orthogonal_weight goes with mnrl and cosent, not with {self.loss}")
        return self


class Prompts(Strict):
    """The words before queries and before documents, saved for `encode_query` and `encode_document`."""

    query: str = ""
    document: str = ""


def set_name(path: str) -> str:
    """Name judged texts by their file: `data/sts.jsonl.gz` is `sts`."""
    return re.sub(r"\.(csv|tsv|jsonl|ndjson|json|parquet)(\.gz|\.zst)?$", "", Path(path).name)


def refuse_equal_names(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Raise `InputError` if two sets of judged texts have one name, because their scores would mix."""
    refuse_doubles("judged texts:", [set_name(path) for path in dict.fromkeys(paths)])
    return paths


JudgedPaths = Annotated[tuple[str, ...], AfterValidator(refuse_equal_names)]
"""Folders in BEIR's layout and files of scored pairs."""


class EmbeddingRecipe(Strict):
    """The recipe of an embedding model: its network, its stages and its folder."""

    later: ClassVar[frozenset[str]] = frozenset({"token_embedding_rms", "whiten_token_embeddings", "dense", "lora"})

    name: FolderName
    model: str
    """`RUN[@STEP]`, a model folder or a Hub id. A decoder becomes bidirectional."""
    out: str
    stages: Annotated[tuple[EmbeddingStage, ...], Field(min_length=1)]
    weights: Literal["pretrained", "random"] = "pretrained"
    """`random`: the same network with random weights, as a control."""
    max_length: PositiveCount | None = None
    """The longest text in tokens; the rest is cut. None: 512, or the positions of the network if they are fewer."""
    pooling: Literal["mean", "cls", "lasttoken", "max", "weightedmean"] = "mean"
    prompts: Prompts = Prompts()
    token_embedding_rms: PositiveFloat | None = None
    """The root mean square to which the table of token embeddings is scaled before training. Pretraining leaves it
    small beside the outputs of the layers, so that an embedding model is slow to learn which words texts share. A
    larger one speeds this up."""
    whiten_token_embeddings: bool = False
    """With `token_embedding_rms`: whether to make all directions of the table equally strong first. Pretraining crowds
    tokens into few directions, in which they are hard to tell apart."""
    dense: bool = False
    """Whether to learn a linear map after pooling (sentence-transformers' `2_Dense`). Networks end in a norm, so every
    token weighs the same in the mean; the map can shrink tokens that say little."""
    matryoshka: bool | Annotated[tuple[PositiveCount, ...], Field(min_length=1)] = True
    """The numbers of first dimensions to train for use without the others; `true`: halves of the width down to 32."""
    merge: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of the original weights in the final weights, against forgetting (BidirLM: 0.5)."""
    lora: Lora | None = None
    """LoRA: adapters to train in place of the network's weights (`lora.r=16`), which takes less memory. Each stage has
    its own; at its end they are merged into the network. Needs `pip install 'biphase[lora]'`."""
    seed: int = 0
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    languages: tuple[str, ...] = ()
    license: str | None = None
    """The license on the model card."""
    evaluation: JudgedPaths = ()
    """Folders in BEIR's layout, or files of scored pairs. The card has their scores before and after training."""
    tracking: TrackingName | None = None
    """The receiver of every tenth step's loss, counted over all stages, and of the final scores, as in pretraining
    recipes."""

    @property
    def teachers(self) -> tuple[str, ...]:
        """The teachers of its stages."""
        return tuple(stage.teacher for stage in self.stages if stage.teacher is not None)

    @model_validator(mode="after")
    def stages_fit(self) -> "EmbeddingRecipe":
        refuse_doubles("stages: the name", [stage.name for stage in self.stages])
        if self.merge and self.token_embedding_rms is not None:
            raise ValueError("merge and token_embedding_rms: the original embeddings have another size; leave one out")
        if self.merge and self.dense:
            raise ValueError("merge and dense: the original network has no such map; leave one out")
        if self.lora is not None and self.weights == "random":
            raise ValueError("lora: adapters would leave random weights as they are; leave one of them out")
        if self.whiten_token_embeddings and self.token_embedding_rms is None:
            raise ValueError("whiten_token_embeddings needs token_embedding_rms: whitening leaves the size open")
        return self

    def identity(self, model_hash: str, data_hashes: list[str]) -> str:
        """Hash everything that decides the weights: contents, not paths or devices. `data_hashes`: those of sources and
        teachers, and the precision that is computed in."""
        elsewhere = {"name", "out", "languages", "license", "evaluation", "tracking", "merge"}
        tree = self.model_dump(mode="json", exclude=elsewhere)
        tree |= {"model": model_hash, "device": "auto", "precision": "auto"}  # `data_hashes` have the precision
        for stage in tree["stages"]:
            stage.pop("save_steps"), stage.pop("mini_batch_tokens")
            stage["teacher"] = None
            for source in stage["data"]:
                source["path"] = source["from_text"] = None
        return content_hash([tree, data_hashes])
