"""A YAML file → what an embedding model is trained on, stage by stage. Inert, like `biphase.config`."""

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from biphase.config import PositiveCount, Strict
from biphase.console import TrackingName
from biphase.corpus.rows import Delimiter
from biphase.errors import InputError, refuse_doubles
from biphase.files import content_hash

PositiveFloat = Annotated[float, Field(gt=0)]
LossName = Literal["auto", "cached_mnrl", "mnrl", "cosent", "distill"]
LOSSES: dict[str, str] = {
    "cached_mnrl": "CachedMultipleNegativesRankingLoss",
    "mnrl": "MultipleNegativesRankingLoss",
    "cosent": "CoSENTLoss",
    "distill": "EmbedDistillLoss",
}
"""The names of losses → classes of sentence-transformers. `auto`: cached_mnrl, and cosent for scored pairs."""


class PairSource(Strict):
    """A source of texts that belong together: exactly one of `path` and `from_text`."""

    later: ClassVar[frozenset[str]] = frozenset({"quotes", "delimiter"})

    path: str | None = None
    """A .csv, .tsv, .jsonl (.gz, .zst) or .parquet file with pairs, triplets or scored pairs, or a hub data set."""
    columns: tuple[str, ...] = ()
    """Its columns: anchor, positive, then negatives, or two texts and a score. Not given: guessed, and told."""
    quotes: bool | None = None
    """Whether fields of a .tsv may stand in quotes. None: what the header shows, or an error where it shows nothing."""
    delimiter: Delimiter | None = None
    """What divides the fields of a .csv. None: a comma, or a semicolon where the header has one and no comma."""
    from_text: str | None = None
    """Files or a folder of texts, out of which pairs are made."""
    pairs: Literal["crops", "neighbours", "titles"] = "crops"
    """How, with `from_text`: two crops of one document; a passage and the one after it; a document's first line and a
    passage below it."""
    passage_words: PositiveCount = 100
    """With `from_text`: about how long a passage is, and the longest crop."""
    text_field: str = "text"
    limit: PositiveCount | None = None
    """At most so many pairs, the first ones."""
    weight: PositiveFloat = 1.0
    """How often an epoch goes through it; 0.5: through half of it, drawn with the seed."""

    @model_validator(mode="after")
    def one_source(self) -> "PairSource":
        if (self.path is None) == (self.from_text is None):
            raise ValueError("give exactly one of path and from_text")
        if self.from_text is not None and self.columns:
            raise ValueError("columns are those of a path; from_text has text_field")
        return self


class HardNegatives(Strict):
    """Passages that the network before a stage ranks high for an anchor without being its positive."""

    number: PositiveCount = 3
    margin: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """How much lower than the positive's a negative's score must be, as a share of it: nearer ones may be right."""
    first_rank: Annotated[int, Field(ge=0)] = 0
    last_rank: PositiveCount = 50


class EmbeddingStage(Strict):
    """A training of the network, from where the stage before left it."""

    later: ClassVar[frozenset[str]] = frozenset({"orthogonal_weight"})

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    data: Annotated[tuple[PairSource, ...], Field(min_length=1)]
    loss: LossName = "auto"
    loss_settings: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the loss under sentence-transformers' names, such as `hardness_mode: hard_negatives` with
    `hardness_strength: 5`."""
    temperature: PositiveFloat = 0.05
    """Scores are divided by it, in losses that have one."""
    orthogonal_weight: Annotated[float, Field(ge=0)] = 0.0
    """How much the global orthogonal regularizer (arXiv 1708.06320, 2509.20354) counts beside `mnrl` or `cosent`: texts
    of one column that do not belong together are to lie at right angles. `auto` is then `mnrl`."""
    teacher: str | None = None
    """With `loss: distill`: the embedding model to learn from, a folder or a hub id."""
    projection: bool = False
    """With `teacher`: learn a map to its dimension where it has another one."""
    hard_negatives: HardNegatives | None = None
    epochs: PositiveFloat = 1.0
    max_steps: PositiveCount | None = None
    batch_size: Annotated[int, Field(ge=2)] = 128
    """Anchors of a step: each has the positives of all others as negatives."""
    mini_batch_tokens: PositiveCount = 16_384
    """With cached_mnrl: how many tokens are in the network at a time; decides memory, not the result."""
    learning_rate: PositiveFloat = 2e-4
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.1
    weight_decay: float = 0.01
    save_steps: PositiveCount = 200

    @model_validator(mode="after")
    def loss_fits(self) -> "EmbeddingStage":
        if (self.loss == "distill") != (self.teacher is not None):
            raise ValueError("loss: distill and teacher belong together")
        if self.projection and self.teacher is None:
            raise ValueError("projection maps to a teacher's dimension, and there is no teacher")
        if self.orthogonal_weight and self.loss in ("cached_mnrl", "distill"):
            raise ValueError(f"orthogonal_weight goes with mnrl and cosent, not with {self.loss}")
        return self


class Prompts(Strict):
    """Words put before queries and before documents. Saved with the model: `encode_query`, `encode_document`."""

    query: str = ""
    document: str = ""


def set_name(path: str) -> str:
    """Name judged texts by their file: `data/sts.jsonl.gz` → `sts`."""
    return re.sub(r"\.(csv|tsv|jsonl|ndjson|json|parquet)(\.gz|\.zst)?$", "", Path(path).name)


def refuse_equal_names(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Raise `InputError` where two sets of judged texts have one name: their scores would be taken for each other's."""
    by_name: dict[str, str] = {}
    for path in paths:
        if path != by_name.setdefault(set_name(path), path):
            raise InputError(f"{by_name[set_name(path)]} and {path} would both be called {set_name(path)}: rename one")
    return paths


JudgedPaths = Annotated[tuple[str, ...], AfterValidator(refuse_equal_names)]
"""Folders in BEIR's layout and files of scored pairs."""


class EmbeddingRecipe(Strict):
    """A recipe of an embedding model: a network, stages, the folder that it is written to."""

    later: ClassVar[frozenset[str]] = frozenset({"token_embedding_rms", "whiten_token_embeddings", "dense"})

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    model: str
    """`RUN[@STEP]`, a model folder or a hub id; a decoder comes out bidirectional."""
    out: str
    stages: Annotated[tuple[EmbeddingStage, ...], Field(min_length=1)]
    weights: Literal["pretrained", "random"] = "pretrained"
    """`random`: the same network untrained, as a control."""
    max_length: PositiveCount | None = None
    """Tokens after which a text is cut; not given: 512, or what the network has positions for."""
    pooling: Literal["mean", "cls", "lasttoken", "max", "weightedmean"] = "mean"
    prompts: Prompts = Prompts()
    token_embedding_rms: PositiveFloat | None = None
    """The root mean square that the table of token embeddings is scaled to before training. Pretraining leaves it small
    beside what the layers add, so that an embedding model learns slowly which words texts share; larger is faster."""
    whiten_token_embeddings: bool = False
    """With `token_embedding_rms`: all directions of the table are made equally strong first. Pretraining crowds tokens
    into few of them, so that they are hard to tell apart."""
    dense: bool = False
    """A linear map after pooling, learnt with the rest: networks end in a norm that gives every token of a text the
    same weight in the mean, and the map can make those small that say little. sentence-transformers' `2_Dense`."""
    matryoshka: bool | Annotated[tuple[PositiveCount, ...], Field(min_length=1)] = True
    """Train the first dimensions of embeddings to serve alone: halves down to 32, or the ones given."""
    merge: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of the network before training in the one that is written: against forgetting (BidirLM: 0.5)."""
    seed: int = 0
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    languages: tuple[str, ...] = ()
    license: str | None = None
    """For the model card."""
    evaluation: JudgedPaths = ()
    """Folders in BEIR's layout, or files of scored pairs, that are scored before and after training, for the card."""
    tracking: TrackingName | None = None
    """As in a recipe of pretraining: the loss of each stage over the steps of all, at the end the scores."""

    @model_validator(mode="after")
    def stages_fit(self) -> "EmbeddingRecipe":
        refuse_doubles("stages: the name", [stage.name for stage in self.stages])
        if self.merge and self.token_embedding_rms is not None:
            raise ValueError("merge and token_embedding_rms: token embeddings before had another size; leave one out")
        if self.merge and self.dense:
            raise ValueError("merge and dense: the network before had no such map; leave one out")
        if self.whiten_token_embeddings and self.token_embedding_rms is None:
            raise ValueError("whiten_token_embeddings needs token_embedding_rms: whitening leaves the size open")
        return self

    def identity(self, model_hash: str, data_hashes: list[str]) -> str:
        """Hash everything that decides the weights. Paths are replaced by what they hold."""
        tree = self.model_dump(
            mode="json", exclude={"name", "out", "languages", "license", "evaluation", "tracking", "merge"}
        )
        tree["model"] = model_hash
        for stage in tree["stages"]:
            stage.pop("save_steps"), stage.pop("mini_batch_tokens")
            for source in stage["data"]:
                source["path"] = source["from_text"] = None
        return content_hash([tree, data_hashes])
