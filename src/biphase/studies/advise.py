"""Text and a compute budget → a recipe ready to run. Each choice has a reason and a source.

The advice is to continue a public encoder if the budget is below the compute that trained it. Otherwise every preset
gets the tokens that the budget buys, a scaling law ranks the presets, and the smallest of the best wins. The curriculum
comes from the user's own study if there is one; all else follows from rules of thumb (`rules.yaml`).
"""

import math
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

from biphase.config import parse_config, read_yaml
from biphase.corpus.shards import ShardSet, is_shard_set
from biphase.corpus.text import find_language, find_text_sources, read_documents, spread
from biphase.curriculum import OBJECTIVES, ObjectiveName, Phase
from biphase.errors import SOURCE, InputError
from biphase.flops import SampleLengths, Shape, flops_per_token, shape_of, update_flops
from biphase.presets import PRESETS
from biphase.recipe import Optimizer, Recipe
from biphase.report.formats import (
    format_bytes,
    show_count,
    show_estimate,
    show_list,
    show_power,
    show_share,
    show_tokens,
    write_steps,
)
from biphase.studies.cost import Machine, fit_memory
from biphase.studies.spec import curriculum_label, fill_budget, read_curriculum

FRESH_EPOCHS, MOST_EPOCHS = 4, 40
"""The numbers of passes over a text up to which the scaling law counts repeated text as nearly as good as new text, and
beyond which it counts further passes as worth nothing."""
CLM_EPOCHS = 16
"""The most passes over a text under CLM. Masking makes better use of further passes (arXiv 2512.14549)."""
WITHIN_NOISE = 0.01
"""The relative difference up to which two predicted losses count as equal. Among equals the smaller network wins,
because it is cheaper to use."""


@dataclass(frozen=True)
class Choice:
    """A choice of the advice, with its reason and source in words."""

    what: str
    value: str
    reason: str
    source: str


@cache
def read_rules() -> dict[str, Any]:
    """Read `rules.yaml`. `encoders`: language → the encoder to continue; `presets`: their settings; `best_use` and its
    `languages`: sentences; `rules`: choice → cases with value, reason and source; `beside_words`: family → tokens →
    a sentence; `caveats`; `sources`: short names."""
    return read_yaml(SOURCE / "studies" / "rules.yaml")


SHOWN = {"tokens": show_tokens, "estimate": show_estimate, "power": show_power}
"""Formats of facts in the texts of rules, in addition to Python's own: `{chosen.tokens:tokens}` → `3.4M`."""
SHOWN["millions"] = lambda value: show_estimate(value / 1e6)


class FactFormatter(string.Formatter):
    """A `str.format` that also knows the formats of `SHOWN`."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return SHOWN[format_spec](value) if format_spec in SHOWN else format(value, format_spec)


fill_in = FactFormatter().format


def apply_rule(rule: str, case: str, **facts: Any) -> Choice:
    """Return a choice by a case of its rule, with the facts filled in."""
    tree = read_rules()
    cases, limits = tree["rules"][rule], {"fresh": FRESH_EPOCHS, "most": MOST_EPOCHS, "noise": WITHIN_NOISE}
    cells = {"value": cases.get("value"), **cases[case]}
    return Choice(rule, **{key: fill_in(text, **tree["sources"], **limits, **facts) for key, text in cells.items()})


# The scaling law
#
# Muennighoff et al. 2023 (arXiv 2305.16264, appendix A): Chinchilla's law with one exponent,
#
#     loss = FLOOR + A / parameters ^ EXPONENT + B / tokens ^ EXPONENT
#
# Repeated text counts as fewer tokens, and parameters in excess of the text count as fewer parameters. The constants
# were fitted on decoders of 10M to 9B parameters; no such law is published for encoders. So the losses can only rank
# candidates.

A, B, FLOOR = math.exp(6.255414), math.exp(7.3049974), math.exp(0.6254804)
EXPONENT = 0.3526596
TOKENS_DECAY, PARAMETERS_DECAY = 15.387756, 5.309743
"""The number of repeats of the text, and of multiples of the parameters, after which a further one counts only 1/e."""


def predict_loss(parameters: float, tokens: float, unique_tokens: float) -> float:
    """Predict the loss of a network trained on `tokens`, with at most `unique_tokens` of different text."""
    read = min(tokens, unique_tokens)
    # A text that is read four times has tokens / read - 1 = 3 repeats. Each repeat counts less than the one before.
    effective_tokens = discounted(read, tokens / read - 1, TOKENS_DECAY)
    # With one exponent for both, the optimal number of parameters is proportional to the tokens.
    filled = min(parameters, read * (A / B) ** (1 / EXPONENT))
    effective_parameters = discounted(filled, parameters / filled - 1, PARAMETERS_DECAY)
    return FLOOR + A / effective_parameters**EXPONENT + B / effective_tokens**EXPONENT


def discounted(amount: float, excess: float, decay: float) -> float:
    """Return `amount` plus `excess` further times `amount`, of which the n-th counts about exp(-n / decay)."""
    return amount * (1 + decay * (1 - math.exp(-excess / decay)))


# The amount of text

BYTES_PER_TOKEN = {4096: 3.4, 8192: 3.9, 32_768: 4.5, 128_256: 4.7}
"""Vocabulary size → bytes per token, measured on held-out English text with byte-level BPE. 128,256 is the size of
Llama 3's vocabulary."""
SAMPLED_SOURCES, SAMPLED_BYTES = 8, 16e6
"""The number of sources to sample when measuring a text, and the bytes of text to read from each."""
JUDGED_TEXTS = 25
"""The number of a source's texts that decide its language. If a source has n > 25 texts, √(25 n) of them decide."""


@dataclass(frozen=True)
class TextAmount:
    """An amount of text: in tokens if the text is prepared, else in bytes."""

    text_bytes: float | None = None
    tokens: float | None = None
    vocab_size: int | None = None
    shards: str | None = None
    """The folder of a prepared shard set."""
    language: str | None = None
    """A code of `corpus.text`; None if the language was not measured."""

    def unique_tokens(self, vocab_size: int) -> float:
        """Return its tokens, or estimate them from its bytes with the measured vocabulary nearest in size."""
        if self.tokens is not None:
            return self.tokens
        assert self.text_bytes is not None
        nearest_size = min(BYTES_PER_TOKEN, key=lambda size: abs(math.log(size / vocab_size)))
        return self.text_bytes / BYTES_PER_TOKEN[nearest_size]


def measure_text(text: Any, text_field: str = "text") -> TextAmount:
    """Measure the amount of text in shards, in a file or folder, or in memory. Read only the beginning of large files.

    Raises:
        InputError: if there is no readable text, and for a Hub data set, whose size is unknown before it is read.
    """
    if isinstance(text, str | Path) and is_shard_set(text):
        shards = ShardSet(text, "train")
        indices = range(0, shards.num_documents, math.ceil(shards.num_documents / (SAMPLED_SOURCES * JUDGED_TEXTS)))
        tokenizer = shards.tokenizer
        pieces = (piece for index in indices for piece in spread(shards.document(index)))
        language = find_language(str(tokenizer.decode(tokens, skip_special_tokens=True)) for tokens in pieces)
        return TextAmount(None, float(shards.num_tokens), shards.manifest.vocab_size, str(text), language)
    sources = find_text_sources(text)
    hub = next((source.name for source in sources if source.num_bytes is None and source.rows is None), None)
    if hub is not None:
        raise InputError(f"{hub}: the size of a Hub data set is unknown here; give its tokens")
    # Sample sources at equal distances. Their beginnings show how many bytes of text a byte of a (perhaps compressed)
    # file holds, and so how many bytes of text all files hold.
    distance = math.ceil(len(sources) / SAMPLED_SOURCES)
    text_bytes, file_bytes, texts = 0, 0, list[str]()
    for source in sources[::distance]:
        before, first = text_bytes, len(texts)
        for index, document in enumerate(read_documents(source, text_field)):
            text_bytes += len(document.text.encode())
            if (len(texts) - first) ** 2 <= JUDGED_TEXTS * index:
                texts.append(document.text)
            if source.rows is None and text_bytes - before >= SAMPLED_BYTES:
                file_bytes += document.num_bytes
                break
        else:
            file_bytes += source.num_bytes or 0
    if not text_bytes:
        raise InputError("there is no text to advise on: give some, or leave it out")
    total_bytes = sum(source.num_bytes or 0 for source in sources)
    estimate = text_bytes * total_bytes / file_bytes if total_bytes else text_bytes
    return TextAmount(text_bytes=estimate, language=find_language(texts))


LEAST_TOKENS = 100_000
"""The fewest training tokens for which the advice names a network: a rule of ours."""
LEAST_CONTINUED = 1_000_000
"""The fewest training tokens for which the advice is to continue a public encoder: a rule of ours."""
OPTIMIZERS: dict[str, dict[str, Any]] = {"small network": {"name": "muon", "eps": 1e-8}}
"""Case of a candidate in the rules → its optimizer; the other cases have AdamW."""


@dataclass(frozen=True)
class Candidate:
    """A preset or public encoder, with the training that the budget buys for it."""

    name: str
    """The preset, or the encoder's name on the Hub."""
    shape: Shape = field(repr=False)
    context: int
    """The longest sample, in tokens."""
    curriculum: str
    mask: float
    """The masking probability."""
    tokens: float
    """Training tokens, including repeats."""
    epochs: float
    """Training tokens divided by the tokens of the text; 0 for unlimited text."""
    loss: float
    """The loss that the scaling law predicts, useful only for comparing presets; nan for a public encoder."""
    flops: float

    @property
    def tokens_per_parameter(self) -> float:
        """Training tokens per parameter, without the language model head. The law's optimum is about 20."""
        return self.tokens / self.shape.parameters_without_head

    @property
    def is_guess(self) -> bool:
        """Whether the law predicts a loss no better than that of a network that knows nothing."""
        return self.loss >= math.log(self.shape.vocab_size)

    @property
    def kind(self) -> str:
        """Its case in the rules: `continued`, `the paper's size`, or `small network`, for sizes at which nothing is
        published about random weights."""
        preset = read_rules()["presets"].get(self.name)
        return str(preset["kind"]) if preset else "continued"


def make_candidate(name: str, usual: Mapping[str, Any], text: TextAmount | None, budget: float) -> Candidate:
    """Spend the budget, or all of the text, on a preset or public encoder with its usual settings."""
    if "shape" in usual:
        shape = Shape(**usual["shape"])
    else:
        shape = shape_of(name, {}, (text.vocab_size if text else None) or usual["vocab_size"])
    curriculum, mask, context = usual["curriculum"], usual["mask"], usual["context"]
    unique = text.unique_tokens(shape.vocab_size) if text else math.inf
    training = mean_token_flops(shape, scale_curriculum(curriculum, mask, 10_000), context)
    update = update_flops(Optimizer(**OPTIMIZERS.get(usual.get("kind", ""), {})), shape.matrices)
    token_flops, tokens, loss = training, math.inf, math.nan
    for _ in range(3):  # fewer tokens get smaller batches, and so more updates each
        tokens = min(budget / token_flops, MOST_EPOCHS * unique)
        token_flops = training + update / choose_steps(tokens, context)[1]
    if name in PRESETS:
        # The law ignores the vocabulary; a network that has learned nothing guesses uniformly over it.
        loss = min(predict_loss(shape.parameters_without_head, tokens, unique), math.log(shape.vocab_size))
    return Candidate(name, shape, context, curriculum, mask, tokens, tokens / unique, loss, tokens * token_flops)


def choose_candidate(candidates: Sequence[Candidate], budget: float) -> Candidate:
    """Choose the smallest candidate within noise of the lowest loss; or the smallest of all if each is a guess, because
    their losses then differ only by vocabulary. `candidates` are sorted from large to small. Raises `InputError` if the
    budget or the text is too small for all of them, or if none is left."""
    if not candidates:
        raise InputError("no preset fits into the memory of the device; give a device with more memory")
    possible, smallest = [item for item in candidates if item.tokens >= LEAST_TOKENS], candidates[-1]
    if not possible:
        reading = f" and the text given, read {show_estimate(smallest.epochs)} times," if smallest.epochs else ""
        least = smallest.flops / smallest.tokens * LEAST_TOKENS
        remedy = f"give at least {LEAST_TOKENS:,} tokens, which cost {show_power(least)} FLOPs"
        amount = f"{smallest.tokens:,.0f} tokens for the smallest preset, too few to learn from"
        raise InputError(f"{show_power(budget)} FLOPs{reading} are {amount}; {remedy}")
    if all(item.is_guess for item in possible):
        return possible[-1]
    lowest = min(item.loss for item in possible)
    return next(item for item in reversed(possible) if item.loss <= lowest * (1 + WITHIN_NOISE))


def scale_curriculum(curriculum: str, mask: float, steps: int, epochs: float = 0) -> tuple[Phase, ...]:
    """Scale the phases of a curriculum to a number of steps, even if the curriculum states its own steps.

    With `epochs` passes over the text, CLM gets at most `CLM_EPOCHS` of them; the last phase gets the other steps.
    """
    templates = read_curriculum(curriculum, {}, mask)
    total = sum(phase.steps for phase, _ in templates)
    scaled = [(phase, share or Fraction(phase.steps, total)) for phase, share in templates]
    causal = sum(share for phase, share in scaled if phase.objective == "clm")
    last, _ = scaled[-1]
    if causal * epochs > CLM_EPOCHS and last.objective != "clm":
        less = Fraction(CLM_EPOCHS / epochs) / causal
        scaled = [(phase, share * less if phase.objective == "clm" else share) for phase, share in scaled]
        scaled[-1] = last, Fraction(1 - sum(share for _, share in scaled[:-1]))
    return fill_budget(tuple(scaled), steps, f"curriculum '{curriculum}'")


def mean_token_flops(shape: Shape, phases: Sequence[Phase], context: int) -> float:
    """Return the mean FLOPs per token of training, without optimizer, for samples of half of the longest length."""
    samples = SampleLengths(context / 2, context / 2, "assumed")
    total = sum(phase.steps for phase in phases)
    return sum(phase.steps / total * flops_per_token(shape.flops, phase, samples) for phase in phases)


# The advice

DEMO_TOKENS, DEMO_BATCH_TOKENS = 1.2e6, 2048
PAPER_TOKENS, PAPER_BATCH_TOKENS = 99.1e9, 2_359_296
"""Training tokens and batch sizes (in tokens) that worked, in our demo and in the paper."""
MEASURED_PRESET, MEASURED_TOKENS = "1m", 900 * 2048
"""The network and the number of training tokens with which our study `price` compares curricula."""
PAPER_LEAST_TOKENS = 12_000 * PAPER_BATCH_TOKENS
"""The training tokens of the paper's smallest budget, 12,000 steps."""
WORDS_TOKENS = 14e6
"""The most training tokens of a small network at which we know a task where words alone are as good (study regime)."""
CONTINUED_RATE = 1e-4
"""The peak learning rate for a public encoder."""
MOST_FLOPS = 1e30
"""The largest budget, ten thousand times the largest published training. Above it, a float no longer counts steps
exactly."""


@dataclass(frozen=True)
class Evidence:
    """The mean score of a curriculum in the user's own study, in %."""

    curriculum: str
    mean: float
    half_width: float
    """Half of the 95 % interval over seeds, as in the study's report; nan for a single seed."""
    is_behind: bool = False
    """Whether the study's best encoder is ahead of it by more than noise, by the test behind all verdicts."""
    tokens: float = math.inf
    """The number of training tokens."""
    mask: float = 0.4
    """The masking probability of its masked phases that state none."""

    @property
    def score(self) -> str:
        """The score in words: `61.2 ± 0.8`; for a single seed `61.2`."""
        return f"{self.mean:.1f}" + ("" if math.isnan(self.half_width) else f" ± {self.half_width:.1f}")

    @property
    def objectives(self) -> list[ObjectiveName]:
        """The objectives of its phases, in order."""
        return [phase.objective for phase, _ in read_curriculum(self.curriculum, {}, 0.4)]


@dataclass(frozen=True)
class WordsAlone:
    """The score of words alone on the user's task."""

    task: str
    family: str = field(repr=False)
    name: str
    """The baseline, such as `TF-IDF + linear`."""
    metric: str
    value: float
    """Its score on the test examples."""
    num_examples: int
    """The number of test examples."""

    def tell(self, chosen: Candidate) -> str:
        """Write the score, and what a network may reach beside it: `Words alone: TF-IDF + linear reaches 80.56 %
        accuracy on genre (1,250 test examples). Nothing better is to be expected from this budget: [...]`."""
        rules, outlook = read_rules()["beside_words"], ""
        if chosen.kind == "small network":
            outlook = next((text for most, text in rules.get(self.family, {}).items() if chosen.tokens < most), "")
        score = f"Words alone: {self.name} reaches {show_share(self.value)} % {self.metric} on {self.task}"
        examples = f"({show_count(self.num_examples, 'test example')})"
        remedy = "`biphase finetune` prints how far a network is from that"
        return f"{score} {examples}. {outlook or rules['otherwise']}; {remedy}."


@dataclass(frozen=True)
class Advice:
    """A recipe for a budget, with its reasons."""

    best_use: str = field(repr=False)
    """The best use of the budget in a few sentences; except for `as it is`, the recipe follows it."""
    recipe: Recipe = field(repr=False)
    vocab_size: int
    flops: float
    """The cost of the recipe; less than the budget if the text is used up."""
    machine: Machine | None = field(repr=False)
    choices: tuple[Choice, ...] = field(repr=False)
    candidates: tuple[Candidate, ...] = field(repr=False)
    """The presets from large to small; () if the recipe continues a public encoder."""
    chosen: Candidate
    caveats: tuple[str, ...] = field(repr=False)
    text: TextAmount | None = field(default=None, repr=False)
    words: WordsAlone | None = None
    """The score of words alone on the user's task; None without one."""


def advise(
    text: TextAmount | None = None,
    *,
    flops: float | None = None,
    hours: float | None = None,
    machine: Machine | None = None,
    evidence: Sequence[Evidence] = (),
    from_scratch: bool = False,
    words: WordsAlone | None = None,
) -> Advice:
    """Find a recipe for a budget: `flops`, or `hours` on all devices of `machine`. Without a `text`, text is unlimited.

    `from_scratch` asks for random weights; so does `evidence`, because the user's study compares networks with those.

    Raises:
        InputError: for no budget or two, hours without a machine, and a budget or memory too small to train anything.
    """
    budget, rules, language = count_budget(flops, hours, machine), read_rules(), text.language if text else None
    encoder = rules["encoders"].get(language, rules["encoders"]["other"])
    continued = make_candidate(encoder["name"], encoder, text, budget)
    # Roughly the cost of the encoder's own training.
    encoder_flops = encoder["tokens"] * continued.shape.flops.token(continued.context, continued.mask)
    evident = choose_curriculum(evidence)
    own = {"curriculum": evident.value, "mask": evidence[0].mask} if evident else {}
    candidates = tuple(make_candidate(name, rules["presets"][name] | own, text, budget) for name in PRESETS)
    unfit, chosen = list[str](), choose_candidate(candidates, budget)
    while (recipe := write_recipe(chosen, machine, text)) is None:
        unfit.append(chosen.name)
        chosen = choose_candidate([item for item in candidates if item.name not in unfit], budget)
    case, times = "continued", (encoder_flops + continued.flops) / chosen.flops
    if chosen.flops >= encoder_flops:
        case, times = "random weights", chosen.flops / encoder_flops
    elif from_scratch or evidence:
        case = "asked"
    elif continued.tokens < LEAST_CONTINUED:
        case = "as it is"
    elif (own_recipe := write_recipe(continued, machine, text)) is None:
        case = "unfit"
    else:
        chosen, recipe, candidates, unfit = continued, own_recipe, (), []
    facts = {"chosen": chosen, "continued": continued, "encoder": encoder, "machine": machine, "least": LEAST_CONTINUED}
    facts |= {"option": "--study" if evidence else "--from-scratch", "language": tell_language(language, encoder)}
    facts["times"] = show_estimate(times) if times < 1000 else "over 1,000"
    spent = recipe.tokens_before(recipe.num_steps) * mean_token_flops(chosen.shape, recipe.curriculum, chosen.context)
    spent += recipe.num_steps * update_flops(recipe.optimizer, chosen.shape.matrices)
    advice = Advice(
        best_use=fill_in(rules["best_use"][case], **facts),
        recipe=recipe,
        vocab_size=chosen.shape.vocab_size,
        flops=spent,
        machine=machine,
        choices=(),
        candidates=candidates,
        chosen=chosen,
        caveats=(),
        text=text,
        words=words,
    )
    caveats = list_caveats(advice, budget, evidence if evident else (), unfit)
    return replace(advice, choices=tuple(explain_choices(advice, evident)), caveats=tuple(caveats))


def tell_language(language: str | None, encoder: Mapping[str, Any]) -> str:
    """Write the language of the text, and how much text in it the source of the encoder's training has."""
    sentences, amount = read_rules()["languages"], encoder.get("read", {}).get(language)
    sentence = sentences.get(language or "none", sentences["unread" if amount is None else "other"])
    return str(sentence.format(code=language, read=format_bytes(1e9 * (amount or 0))))


def list_caveats(advice: Advice, budget: float, evidence: Sequence[Evidence], unfit: Sequence[str]) -> Iterator[str]:
    """Yield the caveats that apply, a sentence each. `unfit`: the presets that do not fit into memory."""
    chosen, text, spent = advice.chosen, advice.text, advice.flops
    is_new, is_small = chosen.kind != "continued", chosen.kind == "small network"
    tested = max((item.tokens for item in evidence), default=0.0)
    applies = {
        "random weights": not is_new,
        "other presets": bool(unfit),
        "extrapolated": is_new and not evidence and (is_small or chosen.tokens < PAPER_LEAST_TOKENS),
        "words alone": advice.words is None and is_small and chosen.tokens <= WORDS_TOKENS,
        "beyond your study": 0 < 2 * tested < chosen.tokens,
        "beyond the law": is_new and (is_small or chosen.tokens_per_parameter < 20),
        "tokens guessed": text is not None and text.tokens is None,
        "budget left": text is not None and spent < 0.8 * budget,
        "decoders": is_new,
    }
    facts: dict[str, Any] = {"names": show_list(unfit), "machine": advice.machine, "fresh": FRESH_EPOCHS}
    facts |= {"tested": tested, "times": chosen.tokens / (tested or math.inf)}
    if text is not None:
        given = text.tokens or text.text_bytes or 0.0
        amounts = (given, given * chosen.epochs / FRESH_EPOCHS * budget / spent)
        shown = [f"{show_tokens(amount)} tokens" if text.tokens else format_bytes(amount) for amount in amounts]
        used = f"{spent / budget:.0%}" if spent >= 0.01 * budget else "less than 1 %"
        facts |= {"given": shown[0], "wanted": shown[1], "used": used}
    for name, is_so in applies.items():
        if is_so:
            yield fill_in(read_rules()["caveats"][name], **facts)


def count_budget(flops: float | None, hours: float | None, machine: Machine | None) -> float:
    if (flops is None) == (hours is None):
        raise InputError("give a budget, either in FLOPs or in hours on a device")
    amount, budget = f"{show_power(flops or 0)} FLOPs", flops or 0.0
    if hours is not None:
        if machine is None:
            raise InputError("hours need a device, such as H100")
        amount, budget = f"{hours:g} hours", hours * 3600 * machine.devices * machine.peak_flops * machine.efficiency
    if not 0 < budget <= MOST_FLOPS:
        raise InputError(f"{amount} are not a budget: give more than 0, and at most {show_power(MOST_FLOPS)} FLOPs")
    return budget


def choose_steps(tokens: float, context: int) -> tuple[int, int]:
    """Return the number of steps and the tokens of a batch: a power of all tokens, fitted to two budgets that work."""
    exponent = math.log(PAPER_BATCH_TOKENS / DEMO_BATCH_TOKENS) / math.log(PAPER_TOKENS / DEMO_TOKENS)
    ideal = DEMO_BATCH_TOKENS * (tokens / DEMO_TOKENS) ** exponent
    batch = PAPER_BATCH_TOKENS if ideal >= 0.99 * PAPER_BATCH_TOKENS else 2 ** round(math.log2(ideal))
    batch = max(batch, DEMO_BATCH_TOKENS, 4 * context)
    return max(round(tokens / batch), 1), batch


def choose_curriculum(evidence: Sequence[Evidence]) -> Choice | None:
    """Choose the study's best curriculum for an encoder, or CLM then MLM if that is not clearly worse. Return None
    without evidence about encoders."""
    ranked = sorted(evidence, key=lambda item: -item.mean)
    encoders = [item for item in ranked if not OBJECTIVES[item.objectives[-1]].is_causal]
    if not encoders:
        return None
    best, *others = encoders
    # The paper's best split comes first if the study has it; the other splits follow from best to worst.
    splits = [item for item in encoders if item.objectives == ["clm", "mlm"]]
    splits.sort(key=lambda item: item.curriculum != "25/75")
    preferred = next((item for item in splits if item is best or not item.is_behind), best)
    facts = {"curriculum": preferred.curriculum, "best": best, "preferred": preferred}
    if preferred is not best:
        return apply_rule("curriculum", "not told apart", **facts)
    num_close = sum(not item.is_behind for item in others)
    facts["close"] = f", {num_close} of the others within noise of it" if num_close else ""
    case = "best" if best is ranked[0] else "no encoder"
    return apply_rule("curriculum", case, ahead=ranked[0], num_compared=len(evidence), **facts)


def write_recipe(chosen: Candidate, machine: Machine | None, text: TextAmount | None) -> Recipe | None:
    """Write the recipe by the rules in `rules.yaml`, for existing shards or for shards yet to prepare. Return None if
    the network does not fit into the memory of the machine's devices."""
    context, shape = chosen.context, chosen.shape
    is_small, is_continued = chosen.kind == "small network", chosen.kind == "continued"
    steps, batch = choose_steps(chosen.tokens, context)
    # The paper's rate from a width of 768 on, and up to four times that below; Muon gets one and a half times the rate.
    rate = min(5e-4 * max(1.0, 768 / shape.width), 2e-3) * (1.5 if is_small else 1)
    rate = CONTINUED_RATE if is_continued else float(f"{rate:.1g}")
    # 2,000 steps of warm-up and of decay, but at most 5 % and 20 % of all steps; the decay has at least 10 %.
    warmup = min(2000, math.ceil(0.05 * steps))
    decay = min(steps - warmup, max(min(2000, round(0.2 * steps)), round(0.1 * steps)))
    short, shards = chosen.name.rpartition("/")[2], text.shards if text else None
    if is_continued and (text is None or text.vocab_size != shape.vocab_size):
        shards = f"shards-{short}"  # with its own tokenizer
    phases = scale_curriculum(chosen.curriculum, chosen.mask, steps, chosen.epochs)
    is_cut = phases != scale_curriculum(chosen.curriculum, chosen.mask, steps)
    label = "-".join(phase.objective for phase in phases) if is_cut else curriculum_label(chosen.curriculum)
    least_tokens = 4096 if machine is not None and machine.name == "CPU" else 32_768
    every = {"every_steps": max(1, steps // 20)}
    tree = {
        "name": f"{short}-{label}-{write_steps(steps)}",
        "init": {"model" if is_continued else "preset": chosen.name},
        "data": {"shards": shards or "shards", "max_sample_tokens": context},
        "curriculum": phases,
        "schedule": {"peak_lr": rate, "warmup_steps": warmup, "decay_steps": decay},
        "batch_tokens": batch,
        "optimizer": OPTIMIZERS.get(chosen.kind, {}),
        "validation": every,
        "checkpoints": every,
        "compute": {"microbatch_tokens": min(batch, max(context, least_tokens))},
    }
    recipe = parse_config(Recipe, tree, origin="advice")
    return recipe if machine is None else fit_memory(shape, recipe, machine)


def explain_choices(advice: Advice, evident: Choice | None) -> Iterator[Choice]:
    """Yield each choice by its rule, in the order of the rules. `evident`: the choice of a curriculum by the user's own
    study."""
    chosen, recipe, text, kind = advice.chosen, advice.recipe, advice.text, advice.chosen.kind
    # The reason for the usual curriculum was measured at one size and number of tokens; for all others, say so.
    is_near = chosen.name == MEASURED_PRESET and 0.5 <= chosen.tokens / MEASURED_TOKENS <= 2
    reach = "" if is_near else fill_in(read_rules()["reach"], chosen=chosen)
    curriculum = evident or apply_rule("curriculum", kind, curriculum=chosen.curriculum, reach=reach)
    possible = [item for item in advice.candidates if item.tokens >= LEAST_TOKENS]
    cases = {"schedule": "any"} | ({"masking": "your study"} if evident else {})
    if len(possible) == 1:
        cases["size"] = "one"
    elif possible and chosen.is_guess:
        cases["size"] = "beyond the law"
    elif possible:
        cases["size"] = "lowest" if chosen.loss == min(item.loss for item in possible) else "near the lowest"
    if text is None:
        cases["tokens"] = "any text"
    elif chosen.epochs >= MOST_EPOCHS:
        cases["tokens"] = "used up"
    else:
        cases["tokens"] = "repeated" if chosen.epochs > FRESH_EPOCHS else "fresh"
    if text is not None and text.vocab_size is not None and kind != "continued":
        cases["vocabulary"] = "of the shards"
    if recipe.curriculum != scale_curriculum(chosen.curriculum, chosen.mask, recipe.num_steps):
        phases = " + ".join(f"{phase.steps} {phase.objective}" for phase in recipe.curriculum)
        curriculum = apply_rule("curriculum", "cut", before=curriculum, phases=phases, most_clm=CLM_EPOCHS)
    losses = [f"{item.name} {item.loss:.2f}" for item in possible if item != chosen and not item.is_guess]
    masks = show_list([*dict.fromkeys(f"{phase.masked}%" for phase in recipe.curriculum if phase.masked)])
    facts = {"chosen": chosen, "recipe": recipe, "others": ", ".join(losses), "masks": masks}
    for rule in read_rules()["rules"]:
        yield curriculum if rule == "curriculum" else apply_rule(rule, cases.get(rule, kind), **facts)
