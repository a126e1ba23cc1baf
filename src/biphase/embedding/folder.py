"""A trained embedding model → one folder that `SentenceTransformer(path)` loads without our code, and back.

Letters: D width.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer

from biphase import console
from biphase.embedding.packed_module import PackedTransformer, make_embedder
from biphase.embedding.recipe import EmbeddingRecipe
from biphase.encoder.load import load_backbone
from biphase.errors import InputError, first_line
from biphase.export.model import set_direction, write_sentence_transformer
from biphase.files import content_hash, file_hash, own_folder, write_json, write_text
from biphase.finetuning.models import find_folder, hash_files, stamp_files
from biphase.hub import refuse_pickles

TOLERANCE = 1e-4
"""How far an embedding of length 1 may be from the packed network's, in any dimension."""
EMBEDDER_CARD = """\
# {name}

An embedding model: texts become {width} numbers, compared by cosine. Texts are cut at {max_length:,} tokens.

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{name}")
scores = model.similarity(model.encode_query(["a question"]), model.encode_document(["a passage"]))
```
{dims}
## How it was trained

From `{model}` ({weights} weights), with pooling `{pooling}`{merge}.

| stage | data | loss | steps | last loss |
|---|---|---|---:|---:|
{stages}

## What it scores

{scores}

## How far it moved

Cosine between the weights before and after, by layer: {cosines}

<details><summary>Recipe</summary>

```yaml
{recipe}```

</details>

Made with biphase {version}.
"""


def write_embedder(
    model: SentenceTransformer, recipe: EmbeddingRecipe, facts: dict[str, Any], texts: Sequence[str], out: Path
) -> None:
    """Write the folder, and prove on `texts` that sentence-transformers alone gives the packed network's embeddings.

    Raises `InputError` where the folder has something that we did not write.
    """
    packed: Any = model[0]
    tokenizer = copy.deepcopy(packed.tokenizer)
    tokenizer.model_max_length = packed.max_seq_length
    tokenizer.backend_tokenizer.no_truncation()  # what was encoded last, and whether anything was, would be kept
    if getattr(packed.network.config, "is_causal", True) is False:
        set_direction(packed.network.config, causal=False)
    with own_folder(out, "embedding model") as part:
        packed.network.save_pretrained(part)
        tokenizer.save_pretrained(part)
        further = [type(module).__name__ for module in list(model)[2:]]
        limit, prompts = packed.max_seq_length, recipe.prompts.model_dump()
        write_sentence_transformer(
            part, packed.network, limit, pooling=recipe.pooling, further=further, prompts=prompts
        )
        if recipe.dense:
            write_dense(model[2], part / "2_Dense")
        # As a user would load it.
        again = SentenceTransformer(str(part), trust_remote_code=False, device="cpu")
        gap = embedding_gap(model, again, texts)
        assert gap < TOLERANCE, f"the saved model computes something else: embeddings differ by {gap:.1e}"
        write_text(part / "README.md", describe(model, recipe, facts))


def write_dense(dense: Any, folder: Path) -> None:
    """The map as `Dense` saves it, described by the keys that each version knows; what others say is not used."""
    folder.mkdir()
    dense.save(str(folder))
    known = ("in_features", "out_features", "bias", "activation_function")
    write_json(folder / "config.json", {key: dense.get_config_dict()[key] for key in known})


def load_embedder(name: str) -> SentenceTransformer:
    """An embedding model behind a name, packed where its first module is a plain network of transformers.

    A run or a folder without sentence-transformers' files becomes the mean over its tokens. What a packed network
    would compute otherwise, such as a decoder that stays causal, is left to sentence-transformers, and told.

    Raises `InputError` for what cannot be loaded, and for what would need its own code, or a pickle.
    """
    console.err.print(f"loading {name}")
    folder = find_folder(name)
    if not (folder / "modules.json").exists():
        return make_embedder(name, None, "mean")
    for pickled in sorted(folder.glob("[0-9]*/pytorch_model*.bin")):  # of modules such as `2_Dense`
        refuse_pickles(pickled.parent)
    try:
        plain = SentenceTransformer(str(folder), trust_remote_code=False, model_kwargs={"dtype": torch.float32})
    except (OSError, ValueError) as error:
        raise InputError(f"{name} is no embedding model that can be loaded ({first_line(error)})") from None
    first: Any = plain[0]
    if type(first) is not Transformer or first.do_lower_case or not (folder / "config.json").exists():
        return plain
    packed = PackedTransformer(load_backbone(folder), first.tokenizer, first.max_seq_length)
    prompts: Any = plain.prompts
    ours = SentenceTransformer(
        modules=[packed, *list(plain)[1:]],
        prompts=prompts,
        default_prompt_name=plain.default_prompt_name,
        similarity_fn_name=plain.similarity_fn_name,
        truncate_dim=plain.truncate_dim,
    )
    if embedding_gap(ours, plain, ["a", "What a text of some more words says."]) < TOLERANCE:
        return ours
    console.err.print(f"{name}: embedded by sentence-transformers alone, as packed it would differ", markup=False)
    return plain


def embedding_gap(ours: SentenceTransformer, theirs: SentenceTransformer, texts: Sequence[str]) -> float:
    """How far two models are apart, in any dimension of the embeddings of length 1, prompts included."""
    given = list(texts)
    first, second = (
        each.encode_query(given, normalize_embeddings=True, show_progress_bar=False) for each in (ours, theirs)
    )
    return float(np.abs(first.astype(np.float64) - second).max())


def hash_embedder(name: str) -> str:
    """Names what an embedding model computes: network, tokenizer, further modules and prompts."""
    folder = find_folder(name)
    others = sorted(
        [
            *folder.glob("*/config.json"),
            *folder.glob("modules.json"),
            *folder.glob("*sentence*.json"),
            *folder.glob("[0-9]*/*.safetensors"),
        ]
    )
    return content_hash([hash_files(stamp_files(folder)), *(file_hash(path) for path in others)])


def describe(model: SentenceTransformer, recipe: EmbeddingRecipe, facts: dict[str, Any]) -> str:
    """The model card as Markdown, with the fields that the hub reads."""
    from biphase import __version__

    head: dict[str, Any] = {
        "library_name": "sentence-transformers",
        "pipeline_tag": "sentence-similarity",
        "tags": ["sentence-transformers", "feature-extraction", "biphase"],
    }
    head |= {"language": list(recipe.languages)} if recipe.languages else {}
    head |= {"license": recipe.license} if recipe.license else {}
    dims: list[int] = facts["dims"]
    shorter = ", ".join(map(str, dims[1:]))
    tree = recipe.model_dump(mode="json", exclude_defaults=True)
    return f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n" + EMBEDDER_CARD.format(
        name=Path(recipe.out).name,
        width=model.get_embedding_dimension(),
        max_length=model.max_seq_length,
        dims=f"\nThe first {shorter} of them serve alone too: `truncate_dim={dims[-1]}`.\n" if shorter else "",
        model=recipe.model,
        weights=recipe.weights,
        pooling=recipe.pooling,
        merge=f", mixed with {recipe.merge:.0%} of the network before" if recipe.merge else "",
        stages="\n".join(
            "| {name} | {data} | {loss} | {steps:,} | {last_loss:.4f} |".format(
                **each | {"data": "; ".join(each["data"])}
            )
            for each in facts["stages"]
        ),
        scores=score_table(facts["scores"]),
        cosines=", ".join(f"{layer} {cosine:.4f}" for layer, cosine in facts["cosines"].items()),
        recipe=yaml.safe_dump(tree, sort_keys=False, allow_unicode=True),
        version=__version__,
    )


def score_table(scores: dict[str, dict[str, dict[str, float]]]) -> str:
    """Scores by set, then by what was scored, then by metric."""
    if not scores:
        return "Not evaluated: name folders or files under `evaluation` in the recipe."
    lines = ["| set | what | score |", "|---|---|---|"]
    for name, arms in scores.items():
        for arm, metrics in arms.items():
            told = ", ".join(f"{metric} {value:.4f}" for metric, value in metrics.items())
            lines.append(f"| {name} | {arm} | {told} |")
    return "\n".join(lines)
