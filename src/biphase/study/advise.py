"""Text and a compute budget → a recipe ready to run, each choice with its reason and where the reason is from.

Every preset gets what the budget buys of tokens; a scaling law ranks them, and the smallest of the best is chosen. The
rest follows from rules of thumb (`study.rules`), the curriculum from the user's own study where there is one.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import yaml
from rich.console import Group, RenderableType
from rich.table import Table

from biphase.encoder.presets import PRESETS, shape_of
from biphase.errors import InputError
from biphase.flops import SampleLengths, Shape, flops_per_token
from biphase.recipe import Checkpoints, ComputeConfig, Data, Init, Optimizer, Phase, Recipe, Schedule, Validation
from biphase.report.formats import show_estimate
from biphase.study.curricula import curriculum_label, fill_budget, read_curriculum, write_steps
from biphase.study.describe import describe_hours
from biphase.study.devices import Machine
from biphase.study.rules import (
    FRESH_EPOCHS,
    MOST_EPOCHS,
    PAPER_SIZES,
    PUBLIC_ENCODER_FLOPS,
    PUBLIC_ENCODER_TOKENS,
    WITHIN_NOISE,
    Choice,
    TextAmount,
    apply_rule,
    predict_loss,
    read_rules,
)

USUAL_VOCABULARIES = {"1m": 8192, "3m": 8192, "11m": 32_768, "36m": 32_768}
USUAL_CONTEXTS = {"1m": 256, "3m": 256, "11m": 512, "36m": 1024}
PAPER_VOCABULARY, PAPER_CONTEXT = 128_256, 2048
"""Tokens of a vocabulary, and of the longest sample: ours below the paper's sizes, and the paper's."""

LEAST_TOKENS = 100_000
"""With fewer tokens of training a network learns nothing worth having."""
DEMO_TOKENS, DEMO_BATCH_TOKENS = 1.2e6, 2048
PAPER_TOKENS, PAPER_BATCH_TOKENS = 99.1e9, 2_359_296
"""Tokens of training, and of a batch, that worked: at our demo's budget and at the paper's."""
PAPER_LEAST_TOKENS = 12_000 * PAPER_BATCH_TOKENS
"""The paper's smallest budget is 12,000 of its steps."""
DEFAULT_CURRICULUM = "25/75"
MOST_FLOPS = 1e30
"""Ten thousand times what any published training took; beyond it, steps are no counts any more."""


@dataclass(frozen=True)
class Evidence:
    """A mean score of the user's own study for one curriculum, in %, with half of its 95 % interval."""

    curriculum: str
    mean: float
    half_width: float
    """Over seeds, as the study's report has it; nan where these do not differ."""
    is_behind: bool = False
    """Whether the best of the study is ahead of it by more than noise, by the test of all verdicts."""
    foretold: tuple[int, int] = (0, 0)
    """Pairs of this and another curriculum at the study's smaller budgets: those in the order of its largest, and all
    (decision accuracy, arXiv 2504.11393)."""

    @property
    def score(self) -> str:
        """`61.2 ± 0.8`; with a single seed `61.2`."""
        return f"{self.mean:.1f}" + ("" if math.isnan(self.half_width) else f" ± {self.half_width:.1f}")


@dataclass(frozen=True)
class Candidate:
    """What the budget buys with one preset."""

    preset: str
    parameters: int
    """Parameters without the language model head."""
    vocab_size: int
    context: int
    """The longest sample, in tokens."""
    mask: float
    """The masking probability."""
    tokens: float
    """Tokens of training; read `epochs` times, where the text is known."""
    epochs: float
    loss: float
    """What the scaling law predicts, for comparing candidates and nothing else."""
    flops: float

    @property
    def tokens_per_parameter(self) -> float:
        """With unique text, the law wants about 20."""
        return self.tokens / self.parameters

    @property
    def is_guess(self) -> bool:
        """Whether the law expects no more of it than of a network that has learned nothing."""
        return self.loss >= math.log(self.vocab_size)

    @property
    def is_small(self) -> bool:
        """Whether nothing is published about networks of this size."""
        return self.preset not in PAPER_SIZES


@dataclass(frozen=True)
class Advice:
    """A recipe for a budget, and why it is that one."""

    recipe: Recipe = field(repr=False)
    vocab_size: int
    flops: float
    """What the recipe costs; less than the budget where the text is used up."""
    machine: Machine | None = field(repr=False)
    choices: tuple[Choice, ...] = field(repr=False)
    candidates: tuple[Candidate, ...] = field(repr=False)
    chosen: Candidate
    caveats: tuple[str, ...] = field(repr=False)
    text: TextAmount | None = field(default=None, repr=False)


def advise(
    text: TextAmount | None = None,
    *,
    flops: float | None = None,
    hours: float | None = None,
    machine: Machine | None = None,
    evidence: Sequence[Evidence] = (),
) -> Advice:
    """A recipe for a budget: `flops`, or `hours` on all devices of `machine`. Without `text`, there is enough of it.

    Raises:
        InputError: no budget or two, hours without a machine, or a budget too small to train anything.
    """
    budget = count_budget(flops, hours, machine)
    curriculum = choose_curriculum(evidence)
    candidates = tuple(make_candidate(preset, text, budget, curriculum.value) for preset in PRESETS)
    chosen = choose_candidate(candidates, budget)
    if chosen.is_small and not evidence:
        curriculum = apply_rule("curriculum", "small network", curriculum=DEFAULT_CURRICULUM)
    recipe = write_recipe(chosen, curriculum.value, machine, text.shards if text else None)
    shape = shape_of(chosen.preset, {}, chosen.vocab_size)
    spent = recipe.tokens_before(recipe.num_steps) * mean_token_flops(shape, recipe.curriculum, chosen.context)
    return Advice(
        recipe=recipe,
        vocab_size=chosen.vocab_size,
        flops=spent,
        machine=machine,
        choices=tuple(explain_choices(chosen, candidates, recipe, curriculum, text)),
        candidates=candidates,
        chosen=chosen,
        caveats=tuple(list_caveats(chosen, budget, spent, text, bool(evidence))),
        text=text,
    )


def list_caveats(
    chosen: Candidate, budget: float, spent: float, text: TextAmount | None, has_evidence: bool
) -> Iterator[str]:
    """What to keep in mind, a sentence each."""
    holds = {
        "extrapolated": not has_evidence and (chosen.is_small or chosen.tokens < PAPER_LEAST_TOKENS),
        "beyond the law": chosen.is_small or chosen.tokens_per_parameter < 20,
        "tokens guessed": text is not None and text.tokens is None,
        "budget left": spent < 0.8 * budget,
        "decoders": True,
        "public encoder": budget >= PUBLIC_ENCODER_FLOPS and chosen.tokens < PUBLIC_ENCODER_TOKENS,
    }
    for name in holds:
        if holds[name]:
            yield read_rules()["caveats"][name].format(used=spent / budget)


def count_budget(flops: float | None, hours: float | None, machine: Machine | None) -> float:
    if (flops is None) == (hours is None):
        raise InputError("give a budget, either in FLOPs or in hours on a device")
    if hours is not None and machine is None:
        raise InputError("hours need a device, such as H100")
    if hours is not None and not 0 < hours < math.inf:
        raise InputError(f"{hours:g} hours are no budget; give a number above 0")
    budget = machine.flops_in(hours) if machine and hours is not None else flops or 0.0
    if budget > MOST_FLOPS:
        raise InputError(f"a budget of {budget:.3g} FLOPs is more than anybody has; {MOST_FLOPS:.0e} are the most")
    if not (math.isfinite(budget) and budget > 0):
        raise InputError(f"a budget of {budget:g} FLOPs buys nothing; give a number above 0")
    return budget


def make_candidate(preset: str, text: TextAmount | None, budget: float, curriculum: str) -> Candidate:
    """What the budget, or all of the text, trains of a preset."""
    vocab_size = (text.vocab_size if text else None) or USUAL_VOCABULARIES.get(preset, PAPER_VOCABULARY)
    unique = text.unique_tokens(vocab_size) if text else math.inf
    context = USUAL_CONTEXTS.get(preset, PAPER_CONTEXT)
    mask = 0.3 if preset == "210m" else 0.4
    shape = shape_of(preset, {}, vocab_size)
    each = mean_token_flops(shape, scale_curriculum(curriculum, mask, 10_000), context)
    tokens = min(budget / each, MOST_EPOCHS * unique)
    return Candidate(
        preset=preset,
        parameters=shape.parameters_without_head,
        vocab_size=vocab_size,
        context=context,
        mask=mask,
        tokens=tokens,
        epochs=tokens / unique,
        # The law knows no vocabulary; a network that has learned nothing spreads its guess over all of it.
        loss=min(predict_loss(shape.parameters_without_head, tokens, unique), math.log(vocab_size)),
        flops=tokens * each,
    )


def choose_candidate(candidates: Sequence[Candidate], budget: float) -> Candidate:
    """The smallest of those that the law cannot tell from the best; they stand from large to small. Where it expects
    nothing of any, what differs is their vocabulary alone."""
    possible = [item for item in candidates if item.tokens >= LEAST_TOKENS]
    if not possible:
        tokens, epochs = candidates[-1].tokens, candidates[-1].epochs
        given = f" and the text given, read {epochs:.2g} times," if epochs else ""
        raise InputError(
            f"{budget:.3g} FLOPs{given} are {tokens:,.0f} tokens for the smallest preset, too few to learn from; "
            f"{LEAST_TOKENS:,} are the least, which cost {candidates[-1].flops / tokens * LEAST_TOKENS:.2g} FLOPs"
        )
    if all(item.is_guess for item in possible):
        return possible[-1]
    lowest = min(item.loss for item in possible)
    return next(item for item in reversed(possible) if item.loss <= lowest * (1 + WITHIN_NOISE))


def scale_curriculum(curriculum: str, mask: float, steps: int) -> tuple[Phase, ...]:
    """The phases of a curriculum within a number of steps, by their proportions where it is given in steps too."""
    templates = read_curriculum(curriculum, {}, mask)
    total = sum(phase.steps for phase, _ in templates)
    shares = tuple((phase, share or Fraction(phase.steps, total)) for phase, share in templates)
    return fill_budget(shares, steps, f"curriculum '{curriculum}'")


def mean_token_flops(shape: Shape, phases: Sequence[Phase], context: int) -> float:
    """FLOPs of a token of training, averaged over the phases; the text is not looked into."""
    samples = SampleLengths(context / 2, context / 2, "assumed")
    total = sum(phase.steps for phase in phases)
    return sum(phase.steps / total * flops_per_token(shape.flops, phase, samples) for phase in phases)


def choose_steps(tokens: float, context: int) -> tuple[int, int]:
    """Steps and tokens of a batch: a power of the tokens of training, through what worked at two budgets."""
    exponent = math.log(PAPER_BATCH_TOKENS / DEMO_BATCH_TOKENS) / math.log(PAPER_TOKENS / DEMO_TOKENS)
    wanted = DEMO_BATCH_TOKENS * (tokens / DEMO_TOKENS) ** exponent
    batch = PAPER_BATCH_TOKENS if wanted >= 0.99 * PAPER_BATCH_TOKENS else 2 ** round(math.log2(wanted))
    batch = max(batch, DEMO_BATCH_TOKENS, 4 * context)
    return max(round(tokens / batch), 1), batch


def choose_curriculum(evidence: Sequence[Evidence]) -> Choice:
    """The best of the user's study; CLM then MLM where that is not clearly worse, or where there is no study."""
    if not evidence:
        return apply_rule("curriculum", "by the paper", curriculum=DEFAULT_CURRICULUM)
    ranked = sorted(evidence, key=lambda item: -item.mean)
    best = ranked[0]
    # The default split first, if the study has it, and then its other splits from the best to the worst.
    splits = []
    for item in ranked:
        phases = [phase.objective for phase, _ in read_curriculum(item.curriculum, {}, 0.4)]
        if phases == ["clm", "mlm"]:
            splits.append(item)
    for item in sorted(splits, key=lambda item: item.curriculum != DEFAULT_CURRICULUM):
        if item is best:
            break
        if not item.is_behind:
            facts = {"curriculum": item.curriculum, "best": best, "preferred": item}
            return apply_rule("curriculum", "not told apart", **facts)
    right, pairs = best.foretold
    foretold = f"; its smaller budgets foretold the better of two in {right} of {pairs} pairs with it" if pairs else ""
    num_close = sum(not item.is_behind for item in ranked[1:])
    close = f", {num_close} of the others within noise of it" if num_close else ""
    facts = {"curriculum": best.curriculum, "best": best, "num_compared": len(evidence)}
    facts |= {"close": close, "foretold": foretold}
    return apply_rule("curriculum", "best", **facts)


def write_recipe(chosen: Candidate, curriculum: str, machine: Machine | None, shards: str | None = None) -> Recipe:
    """The recipe by the rules that `study.rules` tells of, for `shards` or those that are to be prepared."""
    context, is_small = chosen.context, chosen.is_small
    steps, batch = choose_steps(chosen.tokens, context)
    # The paper's rate at a width of 768 and more, up to four times that below; Muon takes half as much again.
    width = PRESETS[chosen.preset]["hidden_size"]
    rate = min(5e-4 * max(1.0, 768 / width), 2e-3) * (1.5 if is_small else 1)
    # 2,000 steps up and down, if they are no more than 5 % and 20 % of all; the decay has 10 % at least.
    warmup = min(2000, math.ceil(0.05 * steps))
    decay = max(min(2000, round(0.2 * steps)), round(0.1 * steps))
    on_cpu = machine is not None and machine.name == "CPU"
    return Recipe(
        name=f"{chosen.preset}-{curriculum_label(curriculum)}-{write_steps(steps)}",
        init=Init(preset=chosen.preset),
        data=Data(shards=shards or "shards", max_sample_tokens=context),
        curriculum=scale_curriculum(curriculum, chosen.mask, steps),
        schedule=Schedule(peak_lr=float(f"{rate:.1g}"), warmup_steps=warmup, decay_steps=min(steps - warmup, decay)),
        batch_tokens=batch,
        optimizer=Optimizer(name="muon", eps=1e-8) if is_small else Optimizer(),
        validation=Validation(every_steps=max(1, steps // 20)),
        checkpoints=Checkpoints(every_steps=max(1, steps // 20)),
        compute=ComputeConfig(microbatch_tokens=min(batch, max(context, 4096 if on_cpu else 32_768))),
    )


def explain_choices(
    chosen: Candidate, candidates: Sequence[Candidate], recipe: Recipe, curriculum: Choice, text: TextAmount | None
) -> Iterator[Choice]:
    """The rule that holds for each thing that is chosen, in their order."""
    possible = [item for item in candidates if item.tokens >= LEAST_TOKENS]
    by_size = "small network" if chosen.is_small else "the paper's size"
    others = ", ".join(f"{item.preset} {item.loss:.2f}" for item in possible if item.preset != chosen.preset)
    if not others:
        size = "one"
    elif all(item.is_guess for item in possible):
        size = "beyond the law"
    else:
        size = "lowest" if chosen.loss == min(item.loss for item in possible) else "near the lowest"
    if text is None:
        tokens = "any text"
    elif chosen.epochs >= MOST_EPOCHS:
        tokens = "used up"
    else:
        tokens = "repeated" if chosen.epochs > FRESH_EPOCHS else "fresh"
    cases = {
        "size": size,
        "tokens": tokens,
        "masking": by_size if chosen.is_small else "MLM alone" if curriculum.value == "mlm" else "after CLM",
        "batch": by_size,
        "schedule": "any",
        "rate": by_size,
        "optimizer": by_size,
        "context": by_size,
        "vocabulary": "of the shards" if text is not None and text.vocab_size is not None else by_size,
    }
    for what in read_rules()["rules"]:
        if what == "curriculum":
            yield curriculum
        else:
            millions = chosen.parameters / 1e6
            yield apply_rule(what, cases[what], chosen=chosen, millions=millions, others=others, recipe=recipe)


def recipe_yaml(advice: Advice) -> str:
    """The recipe with its reasons as comments, for `biphase pretrain`."""
    recipe = advice.recipe
    lines = [f"# {choice.what}: {choice.value}. {choice.reason} [{choice.source}]" for choice in advice.choices]
    lines += [f"# note: {caveat}" for caveat in advice.caveats]
    if advice.text is None or advice.text.shards is None:
        lines.append(f"#   biphase tokenizer train TEXT --vocab-size {advice.vocab_size} --out tokenizer")
        lines.append(f"#   biphase prepare TEXT --tokenizer tokenizer --out {recipe.data.shards}")
    tree = recipe.model_dump(mode="json", exclude_defaults=True)
    body = yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=120)
    return "\n".join(lines) + "\n" + body


def describe_advice(advice: Advice) -> RenderableType:
    """The choices with their reasons, what other sizes would give, and what to keep in mind."""
    choices = Table(title=f"Advice: {advice.recipe.name}", show_lines=True)
    for name in ("what", "choice", "reason", "source"):
        choices.add_column(name)
    for choice in advice.choices:
        choices.add_row(choice.what, choice.value, choice.reason, choice.source)
    sizes = Table(title="What the budget buys by size")
    for name in ("preset", "tokens", "per parameter", "epochs", "loss by the law"):
        sizes.add_column(name, justify="left" if name == "preset" else "right")
    for item in advice.candidates:
        if item.tokens < LEAST_TOKENS:
            sizes.add_row(item.preset, f"{item.tokens:.2g}", "", "", "too few tokens")
            continue
        mark = "  ← chosen" if item == advice.chosen else ""
        epochs = show_estimate(item.epochs) if advice.text else ""
        row = (f"{item.tokens:.2g}", show_estimate(item.tokens_per_parameter), epochs, f"{item.loss:.2f}")
        sizes.add_row(item.preset + mark, *row)
    cost = f"cost: {advice.flops:.3g} FLOPs"
    if advice.machine:
        machine = advice.machine
        hours = machine.device_hours(advice.flops) / machine.devices
        cost += f", {describe_hours(hours)} on {machine.devices} × {machine.name}"
        cost += f" at {machine.efficiency:.0%} of peak ({machine.source})"
    return Group(choices, "", sizes, "", cost, *(f"note: {caveat}" for caveat in advice.caveats))
