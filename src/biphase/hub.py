"""A Hub id → the folder of its files and its configuration, or the rows of a data set, at one commit.

A model's cached commit wins over a newer one, so that a restarted run, even without a network, finds the model that it
began with. Pickled weights are refused, and code is never run.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from biphase import console
from biphase.errors import InputError, clipped, find_stop, first_line, is_raised_here, told_as
from biphase.files import Stored, content_hash, hash_path, read_json, read_json_as, validate_record

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from biphase.recipe import Recipe

CARD = "README.md"
FILES = {"tokenizer": ["*.json", "*.model", "*.txt"], "model": ["*.json", "*.model", "*.txt", "*.safetensors", CARD]}
"""The files to fetch: neither code nor pickles."""
OTHER_FORMS = ["consolidated*.safetensors", "*.fp16.safetensors"]
SKIPPED_FILES = {"tokenizer": ["*/*"], "model": ["[!0-9]*/*", "*/*/*", *OTHER_FORMS]}
"""The files to skip: other forms of the same weights, and folders, but for those of an embedding model's modules, such
as `1_Pooling`."""

KNOWN_FILES = ("config.json", "tokenizer_config.json", "tokenizer.json", "modules.json")
"""Files that reveal a cached repository: not every tokenizer or embedding model has a config.json at the top level."""

INDEX = "model.safetensors.index.json"
"""The file that lists the parts of large weights."""

TOKENIZER_CLASS = r"^\w*(Tokenizer|TokenizerFast|Backend)$"
"""The names of classes for tokenizers; transformers would load any class of its own."""
NAMED = "save the model again without this setting: biphase runs and opens nothing else that a model folder names"
"""The remedy for a value in a file of a model folder that biphase does not accept."""

Activation = Annotated[
    str,
    Field(pattern=r"^torch\.nn\.(modules\.[a-z]+\.)?(ELU|GELU|Identity|LeakyReLU|ReLU|SiLU|Sigmoid|Softplus|Tanh)$"),
]
"""An activation function that a model folder may name."""

OTHER_FILES = ("configuration_files", "gguf_file", "transformers_weights")
"""Keys by which transformers opens another file than biphase reads and hashes."""
IMPLEMENTATIONS = (
    *(None, "batched_mm", "eager", "flash_attention_2", "flash_attention_3", "flex_attention", "grouped_mm", "sdpa"),
)
"""The implementations of attention and experts that a model folder may name. transformers runs any other name as a
kernel of the Hub."""
Dtype = Annotated[str, Field(pattern=r"^b?float\d+\w*$")]

MADE_ONE_BY_ONE, MOST_MADE = re.compile(r"(layers?|groups?|experts?|blocks?|group_num)$"), 1_000
"""Names of counts in a configuration, and the largest count that is accepted: transformers would make any number of
parts, even if that took forever."""


def fetch_model(id: str, revision: str | None = None, kind: Literal["model", "tokenizer"] = "model") -> Path:
    """Return a folder itself, or the folder of a Hub repository (`ID` or `ID@REVISION`), named by its commit. Downloads
    files that are not in the cache; for a tokenizer, no weights.

    Raises:
        InputError: no such repository or revision, or neither network nor cache has it. A path, and a name inside a
            local folder, fail without asking the Hub.
    """
    if Path(id).is_dir():
        return Path(id)
    if revision is None:
        id, _, named = id.partition("@")
        revision = named or None
    path = Path(id)
    refuse_missing(id, kind)
    from huggingface_hub import snapshot_download

    named = f"{id} at revision {revision}" if revision else id
    problem = f"{kind} {named} is not a folder here and cannot be fetched from the Hub"
    here = {folder.name: folder for parent in (Path("runs"), Path()) for folder in parent.glob("*/")}
    close = get_close_matches(path.name, here, n=1)
    with told_by_hub(problem, f"did you mean '{here[close[0]]}'?" if close else "give a folder, or try again"):
        held = find_cached(id, revision)
        cached = held.name if held else None
        if cached is None and path.parent.name and path.parent.is_dir():
            raise NotADirectoryError(f"{path.parent} is a folder here, and only that was looked into")
        patterns = {"allow_patterns": FILES[kind], "ignore_patterns": SKIPPED_FILES[kind]}
        fetch = partial(snapshot_download, id, revision=cached or revision, **patterns)
        try:
            folder = Path(fetch())
        except Exception as error:  # of any kind; the cache may suffice without the Hub
            if cached is None or find_stop(error):
                raise
            folder = Path(fetch(local_files_only=True))  # raises when files are known to be missing
    if revision != folder.name:
        console.err.print(f"{kind} {id}: commit {folder.name}")
    return folder


def find_cached(id: str, revision: str | None) -> Path | None:
    """Return the folder of a Hub repository in the cache, named by its commit, without asking the Hub; None if it is
    not there. Raises `ValueError` for a name that is no Hub id."""
    from huggingface_hub import try_to_load_from_cache

    files = [try_to_load_from_cache(id, name, revision=revision) for name in KNOWN_FILES]
    return next((Path(file).parent for file in files if isinstance(file, str)), None)


def refuse_missing(name: str, kind: str = "model") -> None:
    """Raise `InputError` for a name that can only be a path, not a Hub id, if its folder is missing."""
    is_path = name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1
    if is_path and not Path(name).is_dir():
        raise InputError(f"{kind} {name}: there is no such folder")


@lru_cache
def pin_commit(id: str, revision: str | None) -> str:
    """Find the commit of a data set's revision, by default the newest. When the Hub does not answer, use the commit of
    its last answer; a revision that is a commit needs no answer."""
    from huggingface_hub import HfApi

    with told_by_hub(f"{id}: its {revision or 'newest'} revision cannot be fetched from the Hub", DATA_REMEDY):
        return HfApi().resolve_revision(id, repo_type="dataset", revision=revision).resolved


def read_languages(folder: Path) -> tuple[str, ...]:
    """Read the languages that a model's card names, such as `en`; () if it names none, or says `multilingual`."""
    from huggingface_hub import ModelCard
    from yaml import YAMLError

    if not (folder / CARD).exists():
        return ()
    try:
        named: Any = ModelCard.load(folder / CARD, ignore_metadata_errors=True).data.language
    except (ValueError, TypeError, YAMLError):  # a card is free text, and no reader depends on it
        return ()
    codes = [str(code).lower().partition("-")[0] for code in ([named] if isinstance(named, str) else named or ())]
    return () if {"multilingual", "mul"} & {*codes} else tuple(codes)


def load_rows(id: str, config: str | None, split: str, commit: str, streaming: bool = False) -> Any:
    """Load the rows of a data set's split at a commit by `datasets`, which never runs the data set's code.

    When the Hub does not answer, `datasets` uses the data that it prepared last; refuse another commit or
    configuration.
    """
    import datasets
    from datasets.packaged_modules.cache.cache import Cache
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCard, try_to_load_from_cache

    with told_by_hub(f"{id}: split '{split}' cannot be read from the Hub", DATA_REMEDY):
        builder = datasets.load_dataset_builder(id, config, revision=commit)
        if isinstance(builder, Cache):
            card = try_to_load_from_cache(id, "README.md", repo_type="dataset", revision=commit)
            content: Any = DatasetCard.load(card).data if isinstance(card, str) else {}
            name = config or MetadataConfigs.from_dataset_card_data(content).get_default_config_name() or "default"
            cached = f"configuration '{builder.config.name}' of commit {builder.hash}"
            if cached != f"configuration '{name}' of commit {commit}":
                raise OSError(f"the Hub did not answer, and the cache has {cached}, not '{name}' of {commit}")
        if streaming:
            return builder.as_streaming_dataset(split=split)
        builder.download_and_prepare()
        return builder.as_dataset(split=split)


DATA_REMEDY = "give a folder with a copy of the data, or try again"


@contextmanager
def told_by_hub(problem: str, remedy: str) -> Iterator[None]:
    """Turn errors of the Hub, the network or a file reader in the block into an `InputError`: PROBLEM (REASON);
    REMEDY."""
    try:
        yield
    except Exception as error:  # each library has error types of its own
        if stop := find_stop(error):
            raise stop from None
        raise InputError(f"{problem} ({hub_says(error)}); {remedy}") from None


def hub_says(error: BaseException) -> str:
    """Explain an error of the Hub in one line, with a remedy. Raises bugs of ours again, with their traceback."""
    if is_raised_here(error) and not isinstance(error, OSError):
        raise error
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    sign_in = "run `hf auth login`, or set HF_TOKEN"
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    for cause in causes:
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if isinstance(cause, GatedRepoError) and status == 403:
            return "it is gated; this account has no access: ask for it on its page"
        if isinstance(cause, GatedRepoError):
            return f"it is gated; {sign_in}, with access to it"
        if isinstance(cause, RepositoryNotFoundError):
            return f"there is none of this name, or it is private: check the name; for a private one {sign_in}"
        if isinstance(cause, RevisionNotFoundError):
            return "it has no such revision"
        if status == 401:
            return f"there is no token, or it is not valid: {sign_in}"
    if "scripts are no longer supported" in str(error) or "trust_remote_code" in str(error):
        return "it needs remote code, which is never run"
    return first_line(error if "OfflineMode" in type(causes[-1]).__name__ else causes[-1])


def model_fingerprint(source: str, folder: Path) -> str:
    """Identify the weights of a model: on the Hub by its commit (the folder's name), else by its files' content."""
    if not Path(source).is_dir():
        return content_hash({"model": source, "revision": folder.name})
    files = sorted([*folder.glob("*.safetensors"), *folder.glob(INDEX), *folder.glob("config.json")])
    return content_hash({path.name: hash_path(path) for path in files})


def model_name(source: str | Path) -> str:
    """Return a model's name for a user: for a folder of the Hub's cache, the Hub id."""
    *_, repository, inner, _ = ("", "", "", *Path(source).parts)
    is_cached = inner == "snapshots" and repository.startswith("models--")
    return repository.removeprefix("models--").replace("--", "/") if is_cached else str(source)


@dataclass(frozen=True)
class RankerSettings:
    """What sentence-transformers writes into the config.json of a cross-encoder."""

    activation_fn: Activation | None = None


@dataclass(frozen=True)
class ConfigFile:
    """The keys of a model's config.json that biphase reads, and those by which another library runs something."""

    architectures: list[str] | None = None
    auto_map: Any = None
    """Code of the repository, which is never run."""
    model_type: str | None = None
    rope_theta: Any = None
    rope_parameters: Any = None
    id2label: dict[str, str | int] | None = None
    dtype: Dtype | None = None
    torch_dtype: Dtype | None = None
    tokenizer_class: Annotated[str, Field(pattern=TOKENIZER_CLASS)] | None = None
    sentence_transformers: RankerSettings | None = None
    sbert_ce_default_activation_function: Activation | None = None

    @property
    def kind(self) -> str:
        """The name of its class; "" if it has none."""
        return next(iter(self.architectures or []), "")


def read_config(folder: Path) -> ConfigFile:
    """Read the config.json of a model folder. Raises `InputError` for a damaged one, and for one that names another
    file, a kernel of the Hub or an unknown activation function."""
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(f"cannot read a model configuration from {folder}: it has no config.json")
    content = read_model_file(path, dict[str, Any])
    config = validate_record(path, content, ConfigFile, NAMED)
    refuse_named(path, content)
    return config


def read_model_file(path: Path, kind: type[Stored]) -> Stored:
    """Read a JSON file of a model folder. Raises `InputError` for a damaged file, and for a value that its kind does
    not allow."""
    return validate_record(path, read_json(path, "save the model again"), kind, NAMED)


def refuse_named(path: Path, content: dict[str, Any]) -> None:
    """Raise `InputError` for settings, also nested ones, that name another file or a kernel of the Hub."""
    for key, value in content.items():
        if key in OTHER_FILES and value:
            raise InputError(f"{path} names another file ({key}: {clipped(str(value), 60)}); {NAMED}")
        if key.endswith("_implementation"):
            for name in value.values() if isinstance(value, dict) else [value]:
                if name not in IMPLEMENTATIONS:
                    raise InputError(f"{path} names a kernel of the Hub ({key}: {clipped(str(name), 60)}); {NAMED}")
        elif isinstance(value, dict):
            refuse_named(path, value)


def load_model_config(source: str | Path) -> "PretrainedConfig":
    """Load the configuration of a model's text network.

    Raises:
        InputError: for a configuration that cannot be read, an encoder-decoder, a text network with parts for images or
            sound, an adapter, and quantized weights.
    """
    published, name = load_whole_config(source), model_name(source)
    config = published.get_text_config()
    if not hasattr(config, "vocab_size"):
        raise InputError(f"{name} is a '{config.model_type}' model, which does not read tokens of text")
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(f"{name} is an encoder-decoder ({config.model_type}), which is not supported")
    refuse_endless(name, config)
    if has_other_parts(published):
        raise InputError(f"{name} reads images or sound beside text; convert it first: biphase convert {name} FOLDER")
    return config


def refuse_endless(name: str, config: Any) -> None:
    """Raise `InputError` for the configuration of a network with too many parts."""
    for key, count in config.to_dict().items():
        if MADE_ONE_BY_ONE.search(key) and isinstance(count, int) and count > MOST_MADE:
            raise InputError(f"{name} has {key} {count}; at most {MOST_MADE:,} are allowed")


def load_whole_config(source: str | Path) -> "PretrainedConfig":
    """Load the configuration of all parts of a model. Raises `InputError` for one that cannot be read, an adapter, and
    quantized weights."""
    refuse_missing(str(source))
    if (Path(source) / "adapter_config.json").exists():  # transformers would follow it elsewhere, or ignore it
        raise InputError(f"{source} is a LoRA adapter: merge it into its model first, with merge_and_unload")
    name = model_name(source)
    refuse_own_code(name, read_config(Path(source)))
    from transformers import AutoConfig

    with told_as(f"cannot read a model configuration from {name}"):
        published: PretrainedConfig = AutoConfig.from_pretrained(str(source), trust_remote_code=False)
        config = published.get_text_config()
    quantized = getattr(published, "quantization_config", None) or getattr(config, "quantization_config", None)
    if quantized:
        method = quantized.get("quant_method", "in a way that it does not name")
        raise InputError(f"{name} is quantized ({method}): give a model that is not")
    return published


def has_other_parts(published: "PretrainedConfig") -> bool:
    """Return whether a model that writes text has parts for images or sound beside its text network."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

    return published.get_text_config() is not published and type(published) in MODEL_FOR_MULTIMODAL_LM_MAPPING


def refuse_own_code(name: str, config: ConfigFile) -> None:
    """Raise `InputError` for a config.json that needs the repository's own code (`auto_map`), which is never run."""
    if not config.auto_map:
        return
    from transformers import CONFIG_MAPPING

    model_type = config.model_type
    if model_type == "eurobert" and config.rope_theta is None and config.rope_parameters is None:
        # Without a RoPE base in it, its own code and transformers assume different ones.
        raise InputError(f"{name} is a EuroBERT with its own code; convert it first: biphase convert {name} FOLDER")
    if model_type not in CONFIG_MAPPING:
        reason = f"{name} needs its own code (type '{model_type}', auto_map in its config.json), which is never run"
        raise InputError(f"{reason}; choose a model of a type that transformers knows")


AFTER_PADDING = {
    *("camembert", "data2vec-text", "esm", "ibert", "longformer", "luke", "mpnet", "roberta", "roberta-prelayernorm"),
    *("xlm-roberta", "xlm-roberta-xl", "xmod"),
}
"""Types of networks whose positions begin after the padding index; they do not use the first ones."""


def longest_text(config: Any) -> int | None:
    """Return the longest text that a network, by its configuration, reads in the same way as shorter ones; None for no
    limit.

    Long-rope (Phi-3 128k) rotates by other angles once a text exceeds its original limit, and transformers decides this
    for a whole batch: beyond the limit one text would change the others.
    """
    limit = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for settings in (rope, *(settings for settings in rope.values() if isinstance(settings, Mapping))):
        if settings.get("rope_type", settings.get("type")) in ("longrope", "su"):  # `su` is its older name
            original = settings.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None) or limit
            limit = min((length for length in (limit, original) if length), default=0)
    return limit if limit and limit > 0 else None


def count_positions(config: Any) -> int:
    """Count the positions of a network by its configuration; its type decides which position is the first."""
    positions = longest_text(config)
    if not positions:
        return 2**31
    return positions - ((config.pad_token_id or 0) + 1 if config.model_type in AFTER_PADDING else 0)


def read_config_here(model: str | None) -> dict[str, Any]:
    """Read the config.json of a model in a folder here, as it is; {} for anything else."""
    path = None if model is None else Path(model) / "config.json"
    return read_json_as(path, dict[str, Any], "save the model anew") if path is not None and path.is_file() else {}


def find_positions(settings: Mapping[str, Any]) -> int:
    """Count the positions of a network by its config.json, without transformers; 2³¹ without a limit."""
    return count_positions(SimpleNamespace(**{"model_type": None, "pad_token_id": None, **settings}))


def fit_samples(recipe: "Recipe", positions: int) -> "Recipe":
    """Return a recipe with samples that fit into so many positions, unless it sets their length."""
    if "max_sample_tokens" in recipe.data.model_fields_set:
        return recipe
    longest = min(recipe.data.max_sample_tokens, positions)
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_sample_tokens": longest})})


def output_width(config: Any) -> int:
    """Return the width of a network's last hidden states, which for a few types is not `hidden_size`."""
    keys = {"opt": "word_embed_proj_dim", "embedding_gemma2_text": "embedding_dim"}
    width = int(getattr(config, keys.get(config.model_type, "hidden_size")))
    return 2 * width if config.model_type == "reformer" else width  # its reversible layers have two streams


def position_limit(network: Any) -> int | None:
    """Return the longest sample that fits a network's positions, from the first one that its proof (`encoder.proofs`)
    found; None for no limit."""
    limit = longest_text(network.config)
    return limit - getattr(network.base_model, "first_position", 0) if limit else None


def refuse_pickles(source: str | Path) -> None:
    """Refuse a folder whose weights are not safetensors files in it.

    Raises:
        InputError: no weights, or only pickles; or an index that names anything but safetensors files in the same
            folder, because transformers would open whatever it names.
    """
    folder = Path(source)
    index, weight_files = folder / INDEX, {path.name for path in folder.glob("*.safetensors")}
    if index.exists():
        weight_map = read_json_as(index, dict[str, Any], "save the model again").get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise InputError(f"{index} is damaged (it has no weight_map); save the model again")
        for name in sorted({str(name) for name in weight_map.values()} - weight_files):
            raise InputError(f"{index} names '{name}', which is no *.safetensors file beside it; save the model again")
    if not index.exists() and "model.safetensors" not in weight_files:
        remedy = "choose a folder or revision that has them (refs/pr may), or write them by model.save_pretrained"
        problem = f"{model_name(source)} has no weights (model.safetensors), and pickles are never opened"
        raise InputError(f"{problem}: {remedy}")
