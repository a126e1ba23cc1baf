"""Text and a compute budget → a recipe ready to run, each choice with its reason and where the reason is from.

A public encoder is continued where the budget cannot reach what it was trained with. Else every preset gets what the
budget buys of tokens; a scaling law ranks them, and the smallest of the best is chosen. The rest follows from rules of
thumb (`study.rules`), the curriculum from the user's own study where there is one.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from biphase.encoder.presets import PRESETS
from biphase.errors import InputError
from biphase.recipe import Checkpoints, ComputeConfig, Data, Init, Optimizer, Recipe, Schedule, Validation
from biphase.report.formats import format_bytes, show_estimate, show_list
from biphase.study.cost import fit_memory
from biphase.study.describe import describe_hours
from biphase.study.rules import (
    CLM_EPOCHS,
    FRESH_EPOCHS,
    LEAST_CONTINUED,
    LEAST_TOKENS,
    MOST_EPOCHS,
    PAPER_SIZES,
    Candidate,
    Choice,
    TextAmount,
    apply_rule,
    choose_candidate,
    continue_encoder,
    find_encoder,
    make_candidate,
    mean_token_flops,
    read_rules,
    scale_curriculum,
)
from biphase.study.sizes import Machine
from biphase.study.spec import curriculum_label, read_curriculum, write_steps

DEMO_TOKENS, DEMO_BATCH_TOKENS = 1.2e6, 2048
PAPER_TOKENS, PAPER_BATCH_TOKENS = 99.1e9, 2_359_296
"""Tokens of training, and of a batch, that worked: at our demo's budget and at the paper's."""
PAPER_LEAST_TOKENS = 12_000 * PAPER_BATCH_TOKENS
"""The paper's smallest budget is 12,000 of its steps."""
CONTINUED_RATE = 1e-4
"""The peak rate of a public encoder that is continued."""
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
    tokens: float = math.inf
    """What its network was trained on."""

    @property
    def score(self) -> str:
        """`61.2 ± 0.8`; with a single seed `61.2`."""
        return f"{self.mean:.1f}" + ("" if math.isnan(self.half_width) else f" ± {self.half_width:.1f}")

    @property
    def objectives(self) -> list[str]:
        """The objectives of its phases, in their order."""
        return [phase.objective for phase, _ in read_curriculum(self.curriculum, {}, 0.4)]


@dataclass(frozen=True)
class Advice:
    """A recipe for a budget, and why it is that one."""

    best_use: str = field(repr=False)
    """The best use of the budget, in a sentence or two: what the recipe is for."""
    recipe: Recipe = field(repr=False)
    vocab_size: int
    flops: float
    """What the recipe costs; less than the budget where the text is used up."""
    machine: Machine | None = field(repr=False)
    choices: tuple[Choice, ...] = field(repr=False)
    candidates: tuple[Candidate, ...] = field(repr=False)
    """What each preset would get, from large to small; none where a public encoder is continued."""
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
    from_scratch: bool = False,
) -> Advice:
    """A recipe for a budget: `flops`, or `hours` on all devices of `machine`. Without `text`, there is enough of it.
    `from_scratch` asks for random weights, and so does `evidence`, which is about these.

    Raises:
        InputError: no budget or two, hours without a machine, or a budget too small to train anything.
    """
    budget = count_budget(flops, hours, machine)
    encoder = find_encoder(text.language if text else None)
    continued = continue_encoder(encoder, text, budget)
    own = choose_curriculum(evidence)
    candidates = tuple(
        make_candidate(preset, text, budget, own.value if own else "25/75" if preset in PAPER_SIZES else "50/50")
        for preset in PRESETS
    )
    recipe, unfit = None, list[str]()
    while recipe is None:
        chosen = choose_candidate([item for item in candidates if item.name not in unfit], budget)
        recipe = write_recipe(chosen, machine, text)
        unfit += [chosen.name] if recipe is None else []
    case, times = "continued", (encoder.flops + continued.flops) / chosen.flops
    if chosen.flops >= encoder.flops:
        case, times = "random weights", chosen.flops / encoder.flops
    elif from_scratch or evidence:
        case = "asked"
    elif continued.tokens < LEAST_CONTINUED:
        case = "as it is"
    elif (own_recipe := write_recipe(continued, machine, text)) is None:
        case = "unfit"
    else:
        chosen, recipe, candidates, unfit = continued, own_recipe, (), []
    facts: dict[str, Any] = {"chosen": chosen, "encoder": encoder, "machine": machine, "least": LEAST_CONTINUED}
    facts["option"] = "--study" if evidence else "--from-scratch"
    facts["times"] = show_estimate(times) if times < 1000 else "over 1,000"
    facts |= {"tokens": show_estimate(continued.tokens), "language": tell_language(text)}
    tokens = recipe.tokens_before(recipe.num_steps)
    spent = tokens * mean_token_flops(chosen.shape, recipe.curriculum, chosen.context)
    by_size = apply_rule("curriculum", chosen.kind, curriculum=chosen.curriculum)
    return Advice(
        best_use=read_rules()["best_use"][case].format(**facts),
        recipe=recipe,
        vocab_size=chosen.shape.vocab_size,
        flops=spent,
        machine=machine,
        choices=tuple(explain_choices(chosen, candidates, recipe, own or by_size, text)),
        candidates=candidates,
        chosen=chosen,
        caveats=tuple(list_caveats(chosen, budget, spent, text, evidence if own else (), unfit, machine)),
        text=text,
    )


def tell_language(text: TextAmount | None) -> str:
    """What is known of the language of a text, in a sentence."""
    code, sentences = text.language if text else None, read_rules()["languages"]
    return str(sentences.get(code or "none", sentences["other"]).format(code=code))


def list_caveats(
    chosen: Candidate,
    budget: float,
    spent: float,
    text: TextAmount | None,
    evidence: Sequence[Evidence] = (),
    unfit: Sequence[str] = (),
    machine: Machine | None = None,
) -> Iterator[str]:
    """What to keep in mind, a sentence each; `unfit` are presets without the memory that they need."""
    is_new, tested = not chosen.is_continued, max((item.tokens for item in evidence), default=0.0)
    holds = {
        "random weights": not is_new,
        "other presets": bool(unfit),
        "extrapolated": is_new and not evidence and (chosen.is_small or chosen.tokens < PAPER_LEAST_TOKENS),
        "beyond your study": 0 < 2 * tested < chosen.tokens,
        "beyond the law": is_new and (chosen.is_small or chosen.tokens_per_parameter < 20),
        "tokens guessed": text is not None and text.tokens is None,
        "budget left": text is not None and spent < 0.8 * budget,
        "decoders": is_new,
    }
    facts: dict[str, Any] = {"names": show_list(unfit), "machine": machine, "fresh": FRESH_EPOCHS}
    facts |= {"evidence": tested, "times": show_estimate(chosen.tokens / (tested or math.inf))}
    if text is not None:
        share, wanted = spent / budget, budget / spent * chosen.tokens / FRESH_EPOCHS
        given = f"{text.tokens:.2g} tokens" if text.tokens else format_bytes(text.text_bytes or 0)
        each = (text.text_bytes or 0) / text.unique_tokens(chosen.shape.vocab_size)
        facts |= {"wanted": format_bytes(wanted * each) if each else f"{wanted:.2g} tokens", "given": given}
        facts["used"] = f"{share:.0%}" if share >= 0.01 else "less than 1 %"
    for name in holds:
        if holds[name]:
            yield read_rules()["caveats"][name].format(**facts)


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


def choose_steps(tokens: float, context: int) -> tuple[int, int]:
    """Steps and tokens of a batch: a power of the tokens of training, through what worked at two budgets."""
    exponent = math.log(PAPER_BATCH_TOKENS / DEMO_BATCH_TOKENS) / math.log(PAPER_TOKENS / DEMO_TOKENS)
    wanted = DEMO_BATCH_TOKENS * (tokens / DEMO_TOKENS) ** exponent
    batch = PAPER_BATCH_TOKENS if wanted >= 0.99 * PAPER_BATCH_TOKENS else 2 ** round(math.log2(wanted))
    batch = max(batch, DEMO_BATCH_TOKENS, 4 * context)
    return max(round(tokens / batch), 1), batch


def choose_curriculum(evidence: Sequence[Evidence]) -> Choice | None:
    """The best of the user's study that makes an encoder; CLM then MLM where that is not clearly worse. None where no
    study says anything of encoders."""
    ranked = sorted(evidence, key=lambda item: -item.mean)
    encoders = [item for item in ranked if item.objectives[-1] != "clm"]
    if not encoders:
        return None
    best = encoders[0]
    # The paper's best split first, if the study has it, and then its other splits from the best to the worst.
    splits = [item for item in encoders if item.objectives == ["clm", "mlm"]]
    for item in sorted(splits, key=lambda item: item.curriculum != "25/75"):
        if item is best:
            break
        if not item.is_behind:
            facts = {"curriculum": item.curriculum, "best": best, "preferred": item}
            return apply_rule("curriculum", "not told apart", **facts)
    num_close = sum(not item.is_behind for item in encoders[1:])
    close = f", {num_close} of the others within noise of it" if num_close else ""
    facts = {"curriculum": best.curriculum, "best": best, "num_compared": len(evidence), "close": close}
    return apply_rule("curriculum", "best" if best is ranked[0] else "no encoder", ahead=ranked[0], **facts)


def write_recipe(chosen: Candidate, machine: Machine | None, text: TextAmount | None) -> Recipe | None:
    """The recipe by the rules that `study.rules` tells of, for the shards that are there or those that are to be
    prepared. None where its network fits into no device in any way."""
    context, is_small, shape = chosen.context, chosen.is_small, chosen.shape
    steps, batch = choose_steps(chosen.tokens, context)
    # The paper's rate at a width of 768 and more, up to four times that below; Muon takes half as much again.
    rate = min(5e-4 * max(1.0, 768 / shape.width), 2e-3) * (1.5 if is_small else 1)
    # 2,000 steps up and down, if they are no more than 5 % and 20 % of all; the decay has 10 % at least.
    warmup = min(2000, math.ceil(0.05 * steps))
    decay = max(min(2000, round(0.2 * steps)), round(0.1 * steps))
    on_cpu = machine is not None and machine.name == "CPU"
    short, shards = chosen.name.rpartition("/")[2], text.shards if text else None
    if chosen.is_continued and (text is None or text.vocab_size != shape.vocab_size):
        shards = f"shards-{short}"  # of its own tokenizer
    phases = scale_curriculum(chosen.curriculum, chosen.mask, steps, chosen.epochs)
    is_cut = phases != scale_curriculum(chosen.curriculum, chosen.mask, steps)
    label = "-".join(phase.objective for phase in phases) if is_cut else curriculum_label(chosen.curriculum)
    recipe = Recipe(
        name=f"{short}-{label}-{write_steps(steps)}",
        init=Init(model=chosen.name) if chosen.is_continued else Init(preset=chosen.name),
        data=Data(shards=shards or "shards", max_sample_tokens=context),
        curriculum=phases,
        schedule=Schedule(
            peak_lr=CONTINUED_RATE if chosen.is_continued else float(f"{rate:.1g}"),
            warmup_steps=warmup,
            decay_steps=min(steps - warmup, decay),
        ),
        batch_tokens=batch,
        optimizer=Optimizer(name="muon", eps=1e-8) if is_small else Optimizer(),
        validation=Validation(every_steps=max(1, steps // 20)),
        checkpoints=Checkpoints(every_steps=max(1, steps // 20)),
        compute=ComputeConfig(microbatch_tokens=min(batch, max(context, 4096 if on_cpu else 32_768))),
    )
    return recipe if machine is None else fit_memory(shape, recipe, machine)


def explain_choices(
    chosen: Candidate, candidates: Sequence[Candidate], recipe: Recipe, curriculum: Choice, text: TextAmount | None
) -> Iterator[Choice]:
    """The rule that holds for each thing that is chosen, in their order."""
    possible = [item for item in candidates if item.tokens >= LEAST_TOKENS]
    kind = chosen.kind
    others = ", ".join(f"{item.name} {item.loss:.2f}" for item in possible if item != chosen and not item.is_guess)
    if chosen.is_continued:
        size = kind
    elif len(possible) == 1:
        size = "one"
    elif chosen.is_guess:
        size = "beyond the law"
    else:
        size = "lowest" if chosen.loss == min(item.loss for item in possible) else "near the lowest"
    if text is None:
        tokens = "any text"
    elif chosen.epochs >= MOST_EPOCHS:
        tokens = "used up"
    else:
        tokens = "repeated" if chosen.epochs > FRESH_EPOCHS else "fresh"
    masking = "MLM alone" if curriculum.value == "mlm" else "after CLM"
    is_given = text is not None and text.vocab_size is not None and not chosen.is_continued
    cases = {
        "size": size,
        "tokens": tokens,
        "masking": masking if kind == "the paper's size" else kind,
        "schedule": "any",
        "vocabulary": "of the shards" if is_given else kind,
    }
    millions, blocks = (show_estimate(each / 1e6) for each in (chosen.parameters, chosen.shape.block_weights))
    sizes = {"millions": millions, "blocks": blocks, "others": others}
    if recipe.curriculum != scale_curriculum(chosen.curriculum, chosen.mask, recipe.num_steps):
        phases = " + ".join(f"{phase.steps} {phase.objective}" for phase in recipe.curriculum)
        curriculum = apply_rule("curriculum", "cut", before=curriculum, phases=phases, most_clm=CLM_EPOCHS)
    for what in read_rules()["rules"]:
        if what == "curriculum":
            yield curriculum
        else:
            yield apply_rule(what, cases.get(what, kind), chosen=chosen, recipe=recipe, **sizes)


def recipe_yaml(advice: Advice, has_reasons: bool = True) -> str:
    """The recipe for `biphase pretrain`, with the commands before it and its reasons as comments."""
    recipe, lines = advice.recipe, [f"# {advice.best_use}"]
    lines += [f"# {choice.what}: {choice.value}. {choice.reason} [{choice.source}]" for choice in advice.choices]
    lines += [f"# note: {caveat}" for caveat in advice.caveats]
    lines = lines if has_reasons else []
    if advice.text is None or advice.text.shards != recipe.data.shards:
        tokenizer = f"train TEXT --vocab-size {advice.vocab_size} --out tokenizer"
        if advice.chosen.is_continued:
            tokenizer = f"from {advice.chosen.name} --out tokenizer"
        lines.append(f"#   biphase tokenizer {tokenizer}")
        lines.append(f"#   biphase prepare TEXT --tokenizer tokenizer --out {recipe.data.shards}")
    tree = recipe.model_dump(mode="json", exclude_defaults=True)
    body = yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=120)
    return "\n".join([*lines, body])


def describe_advice(advice: Advice) -> RenderableType:
    """The best use of the budget, the choices with their reasons, what other sizes would give, and what to keep in
    mind."""
    choices = Table(title=f"The recipe: {advice.recipe.name}", show_lines=True)
    for name in ("what", "choice", "reason", "source"):
        choices.add_column(name, overflow="fold")
    for choice in advice.choices:
        choices.add_row(choice.what, choice.value, choice.reason, choice.source)
    told: list[RenderableType] = [Text(advice.best_use, style="bold"), "", choices, ""]
    if any(not item.is_guess for item in advice.candidates):
        told += [describe_sizes(advice), ""]
    cost = f"cost: {advice.flops:.3g} FLOPs"
    if advice.machine:
        machine = advice.machine
        hours = machine.device_hours(advice.flops) / machine.devices
        cost += f", {describe_hours(hours)} on {machine.devices} × {machine.name} ({machine.speed})"
    return Group(*told, cost, *(f"note: {caveat}" for caveat in advice.caveats))


def describe_sizes(advice: Advice) -> Table:
    """What each preset would get of the budget."""
    sizes = Table(title="What the budget buys by size")
    for name in ("preset", "tokens", "per parameter", "epochs", "loss by the law"):
        sizes.add_column(name, justify="left" if name == "preset" else "right")
    for item in advice.candidates:
        if item.tokens < LEAST_TOKENS:
            sizes.add_row(item.name, f"{item.tokens:.2g}", "", "", "too few tokens")
            continue
        mark = "  ← chosen" if item == advice.chosen else ""
        epochs = show_estimate(item.epochs) if advice.text else ""
        loss = "nothing learned" if item.is_guess else f"{item.loss:.2f}"
        sizes.add_row(item.name + mark, f"{item.tokens:.2g}", show_estimate(item.tokens_per_parameter), epochs, loss)
    return sizes
