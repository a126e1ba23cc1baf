"""What a run was, for people: the curves of its losses and the model card of its export."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import transformers
import yaml
from transformers import PreTrainedModel

from biphase import __version__
from biphase.errors import InputError
from biphase.pretraining.checkpoint import CheckpointManifest, read_checkpoint_manifest
from biphase.run import Run, find_checkpoint, read_metrics, read_recipe, split_reference
from biphase.style import LOOKS, plot_losses

PREDICTS = {
    "clm": "the next token, from the tokens before it",
    "mlm": "masked tokens in place, from both sides",
    "mntp": "masked tokens, from the position before each and both sides",
}
CARD = """\
{head}
# {title}

A {direction} `{kind_of_network}` of {millions:.1f}M parameters. It predicts {predicts}.

```python
from transformers import {auto_class}, {tokenizer_class}

tokenizer = {tokenizer_class}.from_pretrained("{name}")
model = {auto_class}.from_pretrained("{name}")
```
{misread}{both_ways}
`AutoModel` gives the network without the language model head, whose weight it reports as unexpected. Training samples
were text followed by the end-of-text token `{eos}`, without a token in front.
{embeddings}
## How it was trained

{curriculum}

{tokens_seen:,} tokens seen in {step:,} updates in all; the last data `{data}` (content hash), tokenizer `{tokenizer}`.
{merged}
![Losses over the steps](curves.png)

| step | objective | validation loss (nats) | accuracy | bits per byte |
|---:|---|---:|---:|---:|
{validation}

<details><summary>Recipe</summary>

```yaml
{recipe}```

</details>

Made with biphase {version}.
"""

FLOOR = "5.17"
"""The first version of transformers in which every decoder that is adapted here looks both ways."""

BOTH_WAYS = f"""
It looks both ways in transformers {FLOOR} and later; it was made with {transformers.__version__}. transformers 4 passes
over `is_causal` in its configuration: there it looks left only, and computes something else without a word.
transformers 5.3 and 5.5 were tried too, and are wrong for some types (OLMo 3, OPT, Gemma 2).
"""
"""What the card of an adapted decoder says, whose class is a causal one."""

WINDOW = """
A token sees {window} others to each side. text-embeddings-inference limits the left side alone: there, only texts of up
to {window} tokens come out the same.
"""
"""What follows where it has a window; by the code of that server, of July 2026."""

PADDED_RIGHT = """
Batches are padded on the right (`tokenizer.padding_side`).
"""
EMBEDDINGS = """
With sentence-transformers, a text becomes the mean of its tokens' hidden states. These have not been trained to be
compared: train them on pairs of texts first (`biphase embed`).

```python
from sentence_transformers import SentenceTransformer

embeddings = SentenceTransformer("{name}").encode(["A text.", "Another one."])
```
"""
"""What the card of a model says that looks both ways and reads texts under sentence-transformers as it was trained."""

MISREAD = (
    "AutoTokenizer takes {chosen} for type '{type}', which splits texts otherwise than in training: load the tokenizer "
    "with PreTrainedTokenizerFast.from_pretrained"
)

MERGED = """
Then merged with the decoder that it came from: {line}. Losses and accuracies below are of the network before that.
"""


@dataclass(frozen=True)
class CardNotes:
    """What the card tells of an export that neither its run nor its network says."""

    eos: str
    """The end-of-text token."""
    merged: str = ""
    """What the network was averaged with."""
    misread_as: str = ""
    """The class that `AutoTokenizer` takes, where it reads texts otherwise."""


def tell_direction(config: Any) -> str:
    """In which versions and where else a decoder looks both ways, "" for any other network."""
    if getattr(config, "is_causal", True) is not False:
        return ""
    window = getattr(config, "sliding_window", None)
    return BOTH_WAYS + (WINDOW.format(window=window) if window else "")


def write_card(
    run: Run,
    manifest: CheckpointManifest,
    name: str,
    auto_class: str,
    network: PreTrainedModel,
    notes: CardNotes,
) -> str:
    """The model card as Markdown, with the fields that the hub reads."""
    base, history = tell_history(run, manifest)
    pipeline_tag = choose_pipeline(manifest.objective, auto_class)
    title, name = harmless(name), json.dumps(name, ensure_ascii=False)[1:-1]
    misread = MISREAD.format(chosen=notes.misread_as, type=network.config.model_type)
    embeddings = "" if notes.misread_as else EMBEDDINGS.format(name=name)
    return CARD.format(
        head=write_head("transformers", pipeline_tag, base, ["biphase", network.config.model_type]),
        title=title,
        name=name,
        direction="causal" if manifest.objective == "clm" else "bidirectional",
        kind_of_network=type(network).__name__,
        millions=sum(parameter.numel() for parameter in network.parameters()) / 1e6,
        predicts=PREDICTS[manifest.objective],
        auto_class=auto_class,
        eos=notes.eos,
        tokenizer_class="PreTrainedTokenizerFast" if notes.misread_as else "AutoTokenizer",
        misread=f"\n{misread}.\n" if notes.misread_as else "",
        both_ways=tell_direction(network.config),
        embeddings="" if manifest.objective == "clm" else PADDED_RIGHT + embeddings,
        curriculum="\n".join(f"{number}. {line}" for number, line in enumerate(history, 1)),
        tokens_seen=manifest.tokens_seen,
        step=manifest.step,
        merged=MERGED.format(line=notes.merged) if notes.merged else "",
        data=manifest.data_fingerprint[:16],
        tokenizer=manifest.tokenizer_hash[:16],
        validation=tabulate_validation(run, manifest.run_step),
        recipe=yaml.safe_dump(recipe_elsewhere(run), sort_keys=False, allow_unicode=True),
        version=__version__,
    )


def harmless(text: str) -> str:
    """A user's text for a card: as code, whatever signs of Markdown, of HTML or of a terminal it holds."""
    if re.fullmatch(r"[\w ./@:+(),%-]*", text):
        return text
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{text!r}{fence}"


def write_head(library: str, pipeline_tag: str, base: str | None, tags: list[str], dataset: str | None = None) -> str:
    """The lines at the top of a card that the hub reads; `base` and `dataset` are hub ids."""
    head: dict[str, Any] = {"library_name": library, "pipeline_tag": pipeline_tag}
    head |= {"base_model": base} if base else {}
    head |= {"datasets": [dataset]} if dataset else {}
    return f"---\n{yaml.safe_dump({**head, 'tags': tags}, sort_keys=False)}---\n"


def choose_pipeline(objective: str, auto_class: str) -> str:
    """The pipeline of transformers that loads the network and gives what was trained: fill-mask takes no class of a
    decoder, and none looks at the position before a mask."""
    if objective == "clm":
        return "text-generation"
    return "fill-mask" if (objective, auto_class) == ("mlm", "AutoModelForMaskedLM") else "feature-extraction"


def tabulate_validation(run: Run, last_step: int) -> str:
    """What was validated up to a step, as rows of a table in Markdown."""
    rows = [
        f"| {r['step']} | {r['objective']} | {r['loss']:.3f} | {r['accuracy']:.1%} | {r['bits_per_byte']:.3f} |"
        for r in read_metrics(run, "validation")
        if r["step"] <= last_step
    ]
    return "\n".join(rows) or "| | no validation text | | | |"


def recipe_elsewhere(run: Run) -> dict[str, Any]:
    """A run's recipe without the paths of this machine."""
    config = read_recipe(run).model_dump(mode="json")
    texts = [(part, "path") for part in config["data"].get("mixture") or ()]
    config["data"]["shards"] = Path(config["data"]["shards"]).name
    for places, key in ((config["init"], "model"), (config["init"], "checkpoint"), *texts):
        if places[key] and Path(places[key]).is_absolute():
            places[key] = Path(places[key]).name
    return config


def tell_history(run: Run, manifest: CheckpointManifest) -> tuple[str | None, list[str]]:
    """The hub id of the model of others that it all began with, where there is one; and a line for the beginning and
    for each run since, as far as the parents are here as they were."""
    recipe = read_recipe(run)
    init = recipe.init
    phases = describe_phases([phase.model_dump(mode="json") for phase in recipe.curriculum], manifest.run_step)
    taken = f", with the parent's {' and '.join(manifest.carried)}" if manifest.parent else ""
    own = (
        f"`{run.path.name}`: {phases}, {recipe.batch_label} tokens a step, peak rate {recipe.schedule.peak_lr}{taken}."
    )
    if init.preset:
        return None, [f"Random weights of preset `{init.preset}`.", own]
    if init.model:
        is_place = Path(init.model).is_dir()
        return None if is_place else init.model, [
            f"The model `{Path(init.model).name if is_place else init.model}`.",
            own,
        ]
    assert init.checkpoint is not None
    place = Path(split_reference(init.checkpoint)[0]).name
    try:
        folder = find_checkpoint(init.checkpoint)
        parent = read_checkpoint_manifest(folder, check_files=False)
    except InputError:
        base, before = tell_dropped(init.checkpoint, manifest.parent or "")
        return base, [*before, own]
    if parent.content != manifest.parent:
        return None, [f"`{place}` as it was (`{(manifest.parent or '')[:16]}`): it has been trained anew since.", own]
    base, before = tell_history(Run(folder.parent.parent), parent)
    return base, [*before, own]


def tell_dropped(reference: str, content: str) -> tuple[str | None, list[str]]:
    """What `tell_history` says of RUN@STEP whose checkpoint is gone: all, where the run has a later one."""
    path, at = split_reference(reference)
    run = Run(Path(path))
    try:
        last = read_checkpoint_manifest(find_checkpoint(path), check_files=False)
    except InputError:
        return None, [f"`{run.path.name}`, which is not here any more (`{content[:16]}`)."]
    passed = last.run_step - (last.step - int(at))
    base, before = tell_history(run, replace(last, step=int(at), run_step=passed))
    return base, [
        *before[:-1],
        f"{before[-1].removesuffix('.')}; this checkpoint (`{content[:16]}`) is not here any more.",
    ]


def describe_phases(curriculum: list[dict[str, Any]], num_steps: int) -> str:
    """The first `num_steps` of a curriculum in words."""
    parts = []
    for phase in curriculum:
        steps = min(phase["steps"], num_steps)
        num_steps -= steps
        mixed = f" ({phase['clm_share']:.0%} of them CLM)" if phase["clm_share"] else ""
        if steps > 0:
            parts.append(f"{steps:,} steps of {phase['objective'].upper()}{mixed}")
    return " → ".join(parts)


def draw_curves(run: Run, last_step: int, path: Path) -> None:
    """Write training and validation loss over the steps, a colour for each objective, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    rows = [row for kind in ("train", "validation") for row in read_metrics(run, kind) if row["step"] <= last_step]
    for objective in dict.fromkeys(row["objective"] for row in rows if row["kind"] == "train"):
        labels = f"{objective.upper()}, training", f"{objective.upper()}, validation"
        plot_losses([row for row in rows if row["objective"] == objective], LOOKS[objective], labels, axes)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
