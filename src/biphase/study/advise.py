"""Text and a compute budget → a recipe ready to run, each choice with its reason and where the reason is from.

F1 to F8 are the findings of arXiv 2507.00994. It trained 210M to 1.2B parameters on 28 to 99 billion tokens, and says
nothing about other sizes, batches or rates: what stands here for those is a scaling law of decoders or a rule of our
own, and is called that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import yaml
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from biphase.config import Checkpoints, ComputeConfig, Data, Init, Optimizer, Phase, Recipe, Schedule, Validation
from biphase.corpus.shards import ShardSet
from biphase.corpus.text import find_text_sources, read_documents
from biphase.encoder.presets import PRESETS
from biphase.errors import InputError
from biphase.study.cost import Machine
from biphase.study.describe import number
from biphase.study.shapes import Shape, Text, flops_per_token, shape_of
from biphase.study.spec import curriculum_label, fill, read_curriculum, write_steps

PAPER = "arXiv 2507.00994"
LAW = "Muennighoff et al. 2023 (arXiv 2305.16264), a law of decoders' loss; none is published for encoders"
OURS = "a rule of ours, not a finding"
MEASURED = "docs/LOG.md: one seed, preset 1m only"

BYTES_PER_TOKEN = {4096: 3.4, 8192: 3.9, 32_768: 4.5, 128_256: 4.7}
"""Held-out English text over the tokens of byte-level BPE of that size (128,256: Llama 3's). Measured here."""
USUAL_VOCABULARIES = {"1m": 8192, "3m": 8192, "11m": 32_768, "36m": 32_768}
USUAL_CONTEXTS = {"1m": 256, "3m": 256, "11m": 512, "36m": 1024}
PAPER_SIZES = ("210m", "610m", "1b")

FRESH_EPOCHS, MOST_EPOCHS = 4, 16
"""Up to the first, repeated text is worth nearly as much as new text; from the second on, little is gained (`LAW`)."""
LEAST_TOKENS = 100_000
SMALL, LARGE = (1.2e6, 2048), (99.1e9, 2_359_296)
"""(tokens of training, tokens of a batch) that worked: our demo's and the paper's."""
DEFAULT_CURRICULUM = "25/75"
SMALLEST_FOR_40_PERCENT = "610m"

A, B, E = math.exp(6.255414), math.exp(7.3049974), math.exp(0.6254804)
EXPONENT = 0.3526596
TOKENS_DECAY, PARAMETERS_DECAY = 15.387756, 5.309743
"""The fitted constants of `LAW`, its appendix A."""

WITHIN_NOISE = 0.01
"""Predicted losses this close, as a share, count as equal: then the smaller network is better, being cheaper to use."""

SAMPLED_SOURCES, SAMPLED_BYTES = 8, 16e6
"""Sources that are looked into for how much text there is, and bytes of text that are read in each."""


@dataclass(frozen=True)
class Amount:
    """Of text: as tokens where it is prepared, else as bytes."""

    text_bytes: float | None = None
    tokens: float | None = None
    vocab_size: int | None = None


@dataclass(frozen=True)
class Evidence:
    """A mean score of the user's own study for one curriculum, with half of its 95 % interval."""

    curriculum: str
    mean: float
    half_width: float


@dataclass(frozen=True)
class Choice:
    what: str
    value: str
    reason: str
    source: str


@dataclass(frozen=True)
class Candidate:
    """What the budget buys with one preset."""

    preset: str
    parameters: int
    vocab_size: int
    tokens: float
    epochs: float
    loss: float
    """Predicted by `LAW`, for comparing candidates and nothing else."""
    flops: float

    @property
    def tokens_per_parameter(self) -> float:
        return self.tokens / self.parameters


@dataclass(frozen=True)
class Advice:
    recipe: Recipe
    vocab_size: int
    flops: float
    """Of the recipe; less than the budget where the text is used up."""
    machine: Machine | None
    choices: tuple[Choice, ...]
    candidates: tuple[Candidate, ...]
    chosen: Candidate
    caveats: tuple[str, ...]


def measure_text(path: Path) -> Amount:
    """How much text a shard set, or a file or folder of documents, holds; large ones are judged by their beginnings.

    Raises:
        InputError: nothing readable there, or a hub data set, whose size is not known before it is read.
    """
    if (path / "manifest.json").exists():
        shards = ShardSet.open(path, "train")
        return Amount(tokens=float(shards.num_tokens), vocab_size=shards.manifest.vocab_size)
    sources = find_text_sources([path])
    hub = next((source.name for source in sources if source.num_bytes is None), None)
    if hub is not None:
        raise InputError(f"{hub}: the size of a hub data set is not known here; give its tokens")
    text, read = 0.0, 0
    for source in sources[:: -(-len(sources) // SAMPLED_SOURCES)]:
        reader, begun = read_documents(source), text
        for document in reader:
            text += len(document.text.encode())
            if text - begun >= SAMPLED_BYTES:
                break
        else:
            reader.bytes_read = source.num_bytes or 0
        read += reader.bytes_read
    return Amount(text_bytes=text * sum(source.num_bytes or 0 for source in sources) / read)


def advise(
    text: Amount | None = None,
    *,
    flops: float | None = None,
    hours: float | None = None,
    machine: Machine | None = None,
    shards: str = "shards",
    evidence: Sequence[Evidence] = (),
) -> Advice:
    """A recipe for a budget: `flops`, or `hours` on all devices of `machine`. Without `text`, there is enough of it.

    Raises:
        InputError: no budget or two, hours without a machine, or a budget too small to train anything.
    """
    budget = budget_flops(flops, hours, machine)
    curriculum, why = choose_curriculum(evidence)
    candidates = [candidate(preset, text, budget, curriculum) for preset in PRESETS]
    possible = [item for item in candidates if item.tokens >= LEAST_TOKENS]
    if not possible:
        tokens = candidates[-1].tokens
        raise InputError(
            f"{budget:.3g} FLOPs and the text given are {tokens:,.0f} tokens for the smallest preset, too few to learn "
            f"from; {LEAST_TOKENS:,} are the least, which cost {candidates[-1].flops / tokens * LEAST_TOKENS:.2g} FLOPs"
        )
    lowest = min(item.loss for item in possible)
    chosen = next(item for item in reversed(possible) if item.loss <= lowest * (1 + WITHIN_NOISE))
    recipe = write_recipe(chosen, curriculum, shards, machine)
    spent = recipe_flops(recipe, shape_of(chosen.preset, {}, chosen.vocab_size))
    return Advice(
        recipe=recipe,
        vocab_size=chosen.vocab_size,
        flops=spent,
        machine=machine,
        choices=(
            choose_size(chosen, possible),
            choose_data(chosen, text),
            Choice("curriculum", curriculum, *why),
            choose_mask(chosen.preset, curriculum),
            *choose_rest(recipe, chosen, text),
        ),
        candidates=tuple(candidates),
        chosen=chosen,
        caveats=tuple(list_caveats(chosen, text, budget, spent, evidence)),
    )


def budget_flops(flops: float | None, hours: float | None, machine: Machine | None) -> float:
    if (flops is None) == (hours is None):
        raise InputError("give a budget, either in FLOPs or in hours on a device")
    if flops is None and machine is None:
        raise InputError("hours need a device, such as H100")
    if hours is not None:
        assert machine is not None
        flops = hours * 3600 * machine.devices * machine.peak_flops * machine.efficiency
    assert flops is not None
    if not (math.isfinite(flops) and flops > 0):
        raise InputError(f"a budget of {flops:g} FLOPs buys nothing; give a number above 0")
    return flops


def candidate(preset: str, text: Amount | None, budget: float, curriculum: str) -> Candidate:
    vocab_size = (text.vocab_size if text else None) or USUAL_VOCABULARIES.get(preset, 128_256)
    unique = unique_tokens(text, vocab_size)
    shape = shape_of(preset, {}, vocab_size)
    each = sum(
        phase.steps / 10_000 * flops_per_token(shape, phase, sample_text(context_of(preset)))
        for phase in fill_curriculum(curriculum, preset, 10_000)
    )
    tokens = min(budget / each, MOST_EPOCHS * unique)
    parameters = shape.parameters_without_head
    loss = predict_loss(parameters, tokens, unique)
    return Candidate(preset, parameters, vocab_size, tokens, tokens / unique, loss, tokens * each)


def context_of(preset: str) -> int:
    return USUAL_CONTEXTS.get(preset, 2048)


def mask_of(preset: str) -> float:
    names = list(PRESETS)
    return 0.4 if names.index(preset) <= names.index(SMALLEST_FOR_40_PERCENT) else 0.3


def fill_curriculum(curriculum: str, preset: str, steps: int) -> tuple[Phase, ...]:
    """The phases of a curriculum, one that is given in steps too, scaled to a number of steps."""
    portions = read_curriculum(curriculum, {}, mask_of(preset))
    total = sum(portion.steps or 0 for portion in portions)
    shares = [replace(part, steps=None, share=part.share or Fraction(part.steps or 0, total)) for part in portions]
    return fill(tuple(shares), steps, f"curriculum '{curriculum}'")


def unique_tokens(text: Amount | None, vocab_size: int) -> float:
    if text is None:
        return math.inf
    if text.tokens is not None:
        return text.tokens
    if text.text_bytes is None:
        return math.inf
    nearest_size = min(BYTES_PER_TOKEN, key=lambda size: abs(math.log(size / vocab_size)))
    return text.text_bytes / BYTES_PER_TOKEN[nearest_size]


def sample_text(context: int) -> Text:
    return Text(context / 2, context / 2, "assumed")


def recipe_flops(recipe: Recipe, shape: Shape) -> float:
    text = sample_text(recipe.data.max_sample_tokens)
    return sum(phase.steps * recipe.batch_tokens * flops_per_token(shape, phase, text) for phase in recipe.curriculum)


def predict_loss(parameters: float, tokens: float, unique: float) -> float:
    """`LAW`: parameters beyond what the text can fill, and text beyond its first reading, count for less and less."""
    read = min(tokens, unique)
    repeats = tokens / read - 1
    effective_tokens = read * (1 + TOKENS_DECAY * (1 - math.exp(-repeats / TOKENS_DECAY)))
    # Parameters that are optimal for `read` tokens; both exponents are the same, so it is a fixed share of them.
    filled = min(parameters, read * (A / B) ** (1 / EXPONENT))
    excess = parameters / filled - 1
    effective_parameters = filled * (1 + PARAMETERS_DECAY * (1 - math.exp(-excess / PARAMETERS_DECAY)))
    return E + A / effective_parameters**EXPONENT + B / effective_tokens**EXPONENT


def choose_steps(tokens: float, context: int) -> tuple[int, int]:
    """Steps and tokens of a batch: a power of the tokens of training, through what worked at two budgets."""
    exponent = math.log(LARGE[1] / SMALL[1]) / math.log(LARGE[0] / SMALL[0])
    wanted = SMALL[1] * (tokens / SMALL[0]) ** exponent
    batch = LARGE[1] if wanted >= 0.99 * LARGE[1] else 2 ** round(math.log2(wanted))
    batch = max(batch, 2048, 4 * context)
    return max(round(tokens / batch), 1), batch


def choose_curriculum(evidence: Sequence[Evidence]) -> tuple[str, tuple[str, str]]:
    """The curriculum, and reason and source."""
    paper = (
        "CLM, then MLM beats MLM alone at a fixed budget (F6); the mean of all four task families over 12k, 22k and "
        "42k steps is 77.8 for 25/75, 77.2 for 50/50, 76.8 for 75/25, 76.2 for MLM and 72.7 for CLM, at 610M",
        PAPER,
    )
    if not evidence:
        return DEFAULT_CURRICULUM, paper
    ranked = sorted(evidence, key=lambda item: -item.mean)
    best = ranked[0]
    # CLM then MLM where the study cannot tell it from the best: the default split if it has it, else its best split.
    biphasic = sorted(
        (item for item in ranked if is_biphasic(item)), key=lambda item: item.curriculum != DEFAULT_CURRICULUM
    )
    for item in biphasic:
        if item is not best and best.mean - item.mean <= math.hypot(best.half_width, item.half_width):
            reason = (
                f"your study has {best.curriculum} at {best.mean:.4g} ± {best.half_width:.2g} and {item.curriculum} at "
                f"{item.mean:.4g} ± {item.half_width:.2g}, no clear difference, so F6 decides"
            )
            return item.curriculum, (reason, f"your study, {PAPER}")
        if item is best:
            break
    reason = f"best of {len(evidence)} in your study ({best.mean:.4g} ± {best.half_width:.2g})"
    return best.curriculum, (reason, "your study")


def is_biphasic(item: Evidence) -> bool:
    """Whether its curriculum is CLM, then MLM."""
    return [portion.settings["objective"] for portion in read_curriculum(item.curriculum, {}, 0.4)] == ["clm", "mlm"]


def write_recipe(chosen: Candidate, curriculum: str, shards: str, machine: Machine | None) -> Recipe:
    context = context_of(chosen.preset)
    steps, batch = choose_steps(chosen.tokens, context)
    is_small = chosen.preset not in PAPER_SIZES
    width = PRESETS[chosen.preset]["hidden_size"]
    rate = float(f"{min(5e-4 * max(1.0, 768 / width), 2e-3) * (3 if is_small else 1):.1g}")
    warmup = min(2000, math.ceil(0.05 * steps))
    decay = min(steps - warmup, max(min(2000, round(0.2 * steps)), round(0.05 * steps)))
    on_cpu = machine is not None and machine.name == "CPU"
    return Recipe(
        name=f"{chosen.preset}-{curriculum_label(curriculum)}-{write_steps(steps)}",
        init=Init(preset=chosen.preset),
        data=Data(shards=shards, max_sample_tokens=context),
        curriculum=fill_curriculum(curriculum, chosen.preset, steps),
        schedule=Schedule(peak_lr=rate, warmup_steps=warmup, decay_steps=decay),
        batch_tokens=batch,
        optimizer=Optimizer(name="muon", eps=1e-8) if is_small else Optimizer(),
        validation=Validation(every_steps=max(1, steps // 20)),
        checkpoints=Checkpoints(every_steps=max(1, steps // 20)),
        compute=ComputeConfig(microbatch_tokens=min(batch, max(context, 4096 if on_cpu else 32_768))),
    )


def choose_size(chosen: Candidate, possible: Sequence[Candidate]) -> Choice:
    value = f"{chosen.preset}, {chosen.parameters / 1e6:,.3g}M parameters without head"
    others = ", ".join(f"{item.preset} {item.loss:.3f}" for item in possible if item.preset != chosen.preset)
    if not others:
        return Choice("size", value, "the only one that the budget can train", "arithmetic")
    is_lowest = chosen.loss == min(item.loss for item in possible)
    reason = (
        "lowest loss by the law" if is_lowest else f"smallest within {WITHIN_NOISE:.0%} of the lowest loss by the law"
    )
    return Choice("size", value, f"{reason} ({chosen.loss:.3f}; {others})", LAW)


def choose_data(chosen: Candidate, text: Amount | None) -> Choice:
    value = f"{chosen.tokens:.3g} tokens, {chosen.tokens_per_parameter:,.3g} for each parameter"
    if text is None:
        return Choice("tokens", value, "what the budget buys; enough text is taken for granted", "arithmetic")
    value += f", {chosen.epochs:.2g} times the text"
    if chosen.epochs >= MOST_EPOCHS:
        reason = (
            f"repeating the text more than {MOST_EPOCHS} times gains little: the text, not the budget, is the limit"
        )
        return Choice("tokens", value, reason, LAW)
    if chosen.epochs > FRESH_EPOCHS:
        return Choice("tokens", value, f"beyond {FRESH_EPOCHS} times, more text would be worth more than repeats", LAW)
    return Choice("tokens", value, f"up to {FRESH_EPOCHS} times, repeated text is nearly as good as new text", LAW)


def choose_mask(preset: str, curriculum: str) -> Choice:
    value = f"{mask_of(preset):.0%}"
    if preset not in PAPER_SIZES:
        reason = "below 210M nothing is published; 30 % is best on average at 210M, and the margins are small"
        return Choice("masking", value, reason, f"{PAPER} (F3), extrapolated")
    reason = "no ratio is best everywhere: larger models and retrieval like more, small models less (F3)"
    if curriculum != "mlm":
        reason += "; after CLM it matters less (F7)"
    return Choice("masking", value, reason, PAPER)


def choose_rest(recipe: Recipe, chosen: Candidate, text: Amount | None) -> list[Choice]:
    is_small = chosen.preset not in PAPER_SIZES
    schedule, context = recipe.schedule, recipe.data.max_sample_tokens
    ends = f"{schedule.warmup_steps:,} steps up, {schedule.decay_steps:,} down"
    batch = f"{recipe.batch_tokens:,} tokens, {recipe.num_steps:,} steps"
    size = f"{chosen.vocab_size:,} tokens"
    choices = [
        Choice("batch", batch, "a power of the tokens of training through 1.2M → 2,048 and 99B → 2.36M", OURS),
        Choice(
            "schedule", ends, "2,000 and 2,000 where there is room, else 5 % and 20 % of the steps", f"{PAPER}; {OURS}"
        ),
    ]
    if is_small:
        rate_reason = "rises as the width falls below 768; three times AdamW's, as in our demo"
        choices += [
            Choice("rate", f"{schedule.peak_lr:g}", rate_reason, f"{OURS}, through {MEASURED}"),
            Choice("optimizer", "Muon", "gets further on few tokens than AdamW in our runs", MEASURED),
            Choice("context", f"{context:,} tokens", "short for a small network", OURS),
        ]
    else:
        choices += [
            Choice("rate", f"{schedule.peak_lr:g}", "searched at these sizes, with batches of 2.36M tokens", PAPER),
            Choice("optimizer", "AdamW", "the paper's settings", PAPER),
            Choice("context", f"{context:,} tokens", "the paper's", PAPER),
        ]
    if text is not None and text.vocab_size is not None:
        return [*choices, Choice("vocabulary", size, "of the shards", "given")]
    if is_small:
        return [*choices, Choice("vocabulary", size, "so that embeddings do not outweigh the blocks by far", OURS)]
    return [*choices, Choice("vocabulary", size, "the paper's, of Llama 3", PAPER)]


def list_caveats(
    chosen: Candidate, text: Amount | None, budget: float, spent: float, evidence: Sequence[Evidence]
) -> list[str]:
    caveats = []
    if not evidence and (chosen.preset not in PAPER_SIZES or chosen.tokens < 12_000 * LARGE[1]):
        caveats.append(
            "the paper begins at 210M parameters and 28 billion tokens: that 25/75 is best here too is an "
            "extrapolation; studies/mini.yaml tests it on your text"
        )
    if chosen.preset not in PAPER_SIZES or chosen.tokens_per_parameter < 20:
        caveats.append("the law is fitted on decoders of 10M to 9B parameters; read its losses as a ranking, roughly")
    if text is not None and text.tokens is None:
        caveats.append("tokens are guessed from bytes of English text; `biphase prepare` counts them")
    if spent < 0.8 * budget:
        caveats.append(
            f"this uses {spent / budget:.0%} of the budget: with the text given, the rest would be wasted; more text "
            "helps"
        )
    caveats.append(
        "a good decoder for your text and size is a better start than random weights: continue it with MLM (F8), as in "
        "recipes/adapt.yaml"
    )
    return caveats


def recipe_yaml(advice: Advice) -> str:
    """The recipe with its reasons as comments, for `biphase pretrain`."""
    recipe = advice.recipe
    lines = [f"# {choice.what}: {choice.value}. {choice.reason} [{choice.source}]" for choice in advice.choices]
    lines += [f"# note: {caveat}" for caveat in advice.caveats]
    lines.append(f"#   biphase tokenizer train TEXT --vocab-size {advice.vocab_size} --out tokenizer")
    lines.append(f"#   biphase prepare TEXT --tokenizer tokenizer --out {recipe.data.shards}")
    tree = recipe.model_dump(mode="json", exclude_defaults=True)
    tree["curriculum"] = [
        {key: value for key, value in phase.items() if key in ("objective", "steps") or phase["objective"] != "clm"}
        for phase in tree["curriculum"]
    ]
    body = yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=120)
    return "\n".join(lines) + "\n" + body


def describe_advice(advice: Advice) -> RenderableType:
    """The choices with their reasons, what other sizes would give, and what to keep in mind."""
    choices = Table(title=f"Advice: {advice.recipe.name}", show_lines=True)
    for name in ("what", "choice", "reason", "source"):
        choices.add_column(name)
    for choice in advice.choices:
        choices.add_row(*(escape(text) for text in (choice.what, choice.value, choice.reason, choice.source)))
    sizes = Table(title="What the budget buys by size")
    for name in ("preset", "tokens", "per parameter", "epochs", "loss by the law"):
        sizes.add_column(name, justify="left" if name == "preset" else "right")
    for item in advice.candidates:
        if item.tokens < LEAST_TOKENS:
            sizes.add_row(item.preset, f"{item.tokens:.3g}", "", "", "too few tokens")
            continue
        mark = "  ← chosen" if item == advice.chosen else ""
        row = (f"{item.tokens:.3g}", f"{item.tokens_per_parameter:.3g}", f"{item.epochs:.2g}", f"{item.loss:.3f}")
        sizes.add_row(item.preset + mark, *row)
    cost = f"cost: {advice.flops:.3g} FLOPs"
    if advice.machine:
        machine = advice.machine
        hours = machine.device_hours(advice.flops) / machine.devices
        cost += f", {number(hours)} hours on {machine.devices} × {machine.name} at {machine.efficiency:.0%} of peak"
        cost += f" ({machine.source})"
    return Group(choices, "", sizes, "", cost, *(escape(f"note: {caveat}") for caveat in advice.caveats))
