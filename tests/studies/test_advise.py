"""Budget → recipe: it loads, it costs what was given, each choice has a source, evidence decides where it is clear."""

import csv
import json
import math
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from rich.console import Console
from scipy import stats

import biphase
from biphase.api.studies import measure_cpu
from biphase.config import load_config
from biphase.errors import InputError
from biphase.flops import DEVICES, SampleLengths, flops_between, update_flops
from biphase.presets import PRESETS
from biphase.recipe import Recipe
from biphase.report.contrasts import Terms, with_averages
from biphase.report.paper import judge_paper, measure_findings, read_reference
from biphase.report.results import ReportArm, Result
from biphase.run import Run
from biphase.studies.advise import (
    MOST_EPOCHS,
    Advice,
    Choice,
    Evidence,
    TextAmount,
    WordsAlone,
    advise,
    apply_rule,
    choose_curriculum,
    choose_steps,
    list_caveats,
    measure_text,
    predict_loss,
    read_rules,
)
from biphase.studies.cost import Machine, find_machine, fits
from biphase.studies.describe import describe_advice, recipe_yaml
from biphase.studies.report import weigh_evidence

H100 = find_machine("H100", efficiency=0.4)

BUDGETS: list[dict[str, Any]] = [
    {"flops": 6e12},
    {"hours": 0.2, "machine": find_machine("CPU", 2), "text": TextAmount(text_bytes=2e8)},
    {"hours": 1, "machine": H100, "text": TextAmount(text_bytes=2e8)},
    {"flops": 1e20, "text": TextAmount(tokens=1e10, vocab_size=50_000)},
    {"flops": 1e21},
    {"hours": 24, "machine": find_machine("MI250X", 192)},
]


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_recipe_loads_and_stays_within_its_budget(budget: dict[str, Any], tmp_path: Path) -> None:
    advice = advise(**budget, from_scratch=True)
    (tmp_path / "recipe.yaml").write_text(recipe_yaml(advice))
    assert load_config(Recipe, tmp_path / "recipe.yaml") == advice.recipe
    assert all(f"# note: {caveat}" in recipe_yaml(advice) for caveat in advice.caveats)
    limit = budget.get("flops") or budget["hours"] * 3600 * (
        budget["machine"].devices * budget["machine"].peak_flops * budget["machine"].efficiency
    )
    shape, samples = advice.chosen.shape, SampleLengths(advice.chosen.context / 2, advice.chosen.context / 2, "assumed")
    flops = replace(shape.flops, per_update=update_flops(advice.recipe.optimizer, shape.matrices))
    counted = flops_between(advice.recipe, flops, samples, 0, advice.recipe.num_steps)
    assert advice.flops == pytest.approx(sum(counted.values()))
    assert advice.flops <= 1.02 * limit
    assert advice.flops >= 0.98 * limit or advice.chosen.epochs == MOST_EPOCHS
    trained = advice.recipe.num_steps * advice.recipe.batch_tokens
    assert trained == pytest.approx(advice.chosen.tokens, rel=0.01)
    assert [phase.objective for phase in advice.recipe.curriculum] == ["clm", "mlm"]
    share = 2 if advice.chosen.kind == "small network" else 4
    causal = min(1 / share, 16 / (advice.chosen.epochs or 1))
    assert advice.recipe.curriculum[0].steps == pytest.approx(causal * advice.recipe.num_steps, rel=0.01)
    assert all(choice.reason and choice.source for choice in advice.choices)


def test_more_budget_buys_a_larger_network() -> None:
    sizes = list(reversed(PRESETS))
    chosen = [
        sizes.index(advise(flops=flops, from_scratch=True).chosen.name) for flops in (1e14, 1e16, 1e18, 1e20, 1e22)
    ]
    assert chosen == sorted(chosen) and chosen[0] == 0 and chosen[-1] == len(sizes) - 1


def test_little_text_limits_what_is_spent() -> None:
    """Parameters that it cannot fill are left out, and how much of it the budget would read is told."""
    advice = advise(TextAmount(tokens=1e6), flops=1e18, from_scratch=True)
    assert advice.chosen.epochs == MOST_EPOCHS and advice.flops < 1e17
    assert advice.chosen.name in ("1m", "3m", "11m")
    [told] = [caveat for caveat in advice.caveats if "the text is the limit" in caveat]
    assert "you gave 1M tokens" in told and re.search(r"would read [\d.]+[MB] tokens of text 4 times", told)
    assert "the text, not the budget" in next(c.reason for c in advice.choices if c.what == "tokens")


CAVEATS: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({}, {}, []),
    ({"tokens": 2e10}, {}, ["an extrapolation"]),
    ({"tokens": 2e10}, {"evidence": [Evidence("25/75", 60.0, 1.5, tokens=1e10)]}, []),
    ({"tokens": 2e10}, {"evidence": [Evidence("25/75", 60.0, 1.5, tokens=1e9)]}, ["has 20 times as many"]),
    ({"name": "11m"}, {}, ["an extrapolation", "read its losses as a rough ranking"]),
    ({"tokens": 3e9}, {"evidence": [Evidence("mlm", 60.0, 1.5, tokens=3e9)]}, ["read its losses as a rough ranking"]),
    ({}, {"text": TextAmount(text_bytes=1e12)}, ["a guess from the bytes"]),
    ({}, {"text": TextAmount(tokens=1e12)}, []),
    ({}, {"text": TextAmount(tokens=1e9), "flops": 7e13}, ["uses 70% of the budget"]),
    ({}, {"unfit": ["1b"], "machine": find_machine("T4")}, ["the memory of T4: 1b"]),
]


@pytest.mark.parametrize(("candidate", "settings", "expected"), CAVEATS)
def test_what_to_keep_in_mind(candidate: dict[str, Any], settings: dict[str, Any], expected: list[str]) -> None:
    """Of 210m and 5e10 tokens; decoders are always named where random weights are trained."""
    advice = advise(flops=1e21, from_scratch=True)
    chosen = next(item for item in advice.candidates if item.name == "210m")
    evidence, unfit = settings.pop("evidence", ()), settings.pop("unfit", ())
    advice = replace(advice, chosen=replace(chosen, **{"tokens": 5e10} | candidate), **{"flops": 1e14} | settings)
    *told, last = list_caveats(advice, 1e14, evidence, unfit)
    assert last.startswith("a good decoder") and "biphase init recipe adapt" in last
    assert len(told) == len(expected) and all(words in caveat for words, caveat in zip(expected, told, strict=True))


@pytest.mark.parametrize(("tokens", "is_told"), [(1e6, True), (13e6, True), (1e8, False)])
def test_a_small_network_with_few_tokens_is_compared_with_words(tokens: float, is_told: bool) -> None:
    advice = advise(flops=1e14, from_scratch=True)
    assert advice.chosen.kind == "small network"
    advice = replace(advice, chosen=replace(advice.chosen, tokens=tokens))
    told = [caveat for caveat in list_caveats(advice, 1e14, (), ()) if "words alone" in caveat]
    assert bool(told) == is_told
    assert not any("words alone" in caveat for caveat in advise(flops=1e21, from_scratch=True).caveats)


OUTLOOKS: list[tuple[str, str, float, str]] = [
    ("sequence_classification", "1m", 2e6, "no network with 1M parameters and up to 13.9M tokens was ahead"),
    ("sequence_classification", "1m", 1e8, "We have not measured"),
    ("token_classification", "1m", 2e6, "Nothing better is to be expected from this budget: on named entities"),
    ("token_classification", "3m", 5e6, "Little more is to be expected"),
    ("token_classification", "1m", 13e6, "More is to be expected"),
    ("token_classification", "210m", 1e6, "We have not measured"),
    ("retrieval", "1m", 1e6, "We have not measured"),
]


@pytest.mark.parametrize(("family", "preset", "tokens", "told"), OUTLOOKS)
def test_what_to_expect_beside_words_on_a_task(family: str, preset: str, tokens: float, told: str) -> None:
    words = WordsAlone("mine", family, "TF-IDF + linear", "accuracy", 0.8056, 1250)
    candidates = {item.name: item for item in advise(flops=1e21, from_scratch=True).candidates}
    sentence = words.tell(replace(candidates[preset], tokens=tokens))
    assert sentence.startswith("Words alone: TF-IDF + linear reaches 80.56 % accuracy on mine (1,250 test examples). ")
    assert told in sentence and sentence.endswith("; `biphase finetune` prints how far a network is from that.")


def test_words_alone_are_scored_on_the_task_that_is_given(tmp_path: Path) -> None:
    """A label that one word tells: words reach it, and the advice leaves out the general note."""
    rows = [{"text": f"a {word} here {index}", "label": word[0]} for index in range(60) for word in ("cat", "dog")]
    advice = biphase.advise(flops=1e13, from_scratch=True, data=rows)
    assert advice.words is not None and advice.words.value == 1.0 and advice.words.name == "TF-IDF + linear"
    sentence = advice.words.tell(advice.chosen)
    assert " ".join(sentence.split()) in " ".join(printed(advice).split())
    assert f"\n# {sentence}\n" in recipe_yaml(advice)
    assert any("words alone" in caveat for caveat in biphase.advise(flops=1e13, from_scratch=True).caveats)
    assert not any("words alone" in caveat for caveat in advice.caveats)
    answers = [{"question": "who?", "context": "a cat", "answers": {"text": ["cat"], "answer_start": [2]}}] * 20
    with pytest.raises(InputError, match="task: own is question answering, which has no baseline by words alone"):
        biphase.advise(flops=1e13, data=answers)
    with pytest.raises(InputError, match="which task"):
        biphase.advise(flops=1e13, data=tmp_path)


GERMAN, ENGLISH, CODE = (TextAmount(text_bytes=1e8, language=name) for name in ("de", "en", "code"))
USES: list[tuple[TextAmount | None, dict[str, Any], str, str]] = [
    (ENGLISH, {"hours": 8, "machine": H100}, "answerdotai/ModernBERT-base", "Continue answerdotai/ModernBERT-base"),
    (
        GERMAN,
        {"hours": 8, "machine": H100},
        "jhu-clsp/mmBERT-base",
        "Your text is in the language 'de' (ISO 639). FineWeb2, the source of the encoder's text in this language, has "
        "1.7 TB of it.",
    ),
    (
        replace(GERMAN, language="tlh"),
        {"hours": 8, "machine": H100},
        "jhu-clsp/mmBERT-base",
        "'tlh' (ISO 639). Whether the encoder was trained on it, biphase does not know.",
    ),
    (CODE, {"flops": 1e18}, "EuroBERT/EuroBERT-210m", "program code"),
    (replace(GERMAN, language="unknown"), {"flops": 1e18}, "jhu-clsp/mmBERT-base", "is not recognised"),
    (None, {"flops": 1e18}, "jhu-clsp/mmBERT-base", "No text is given"),
    (
        GERMAN,
        {"flops": 1e14},
        "1m",
        "as it is: this budget and text cover only 89,000 tokens, and it was trained on 3T.",
    ),
    (ENGLISH, {"flops": 1e18, "from_scratch": True}, "11m", "leave --from-scratch out"),
    (ENGLISH, {"flops": 1e18, "evidence": [Evidence("25/75", 60.0, 1.5)]}, "11m", "leave --study out"),
    (None, {"flops": 1e23}, "1b", "from random weights: with this budget and text it gets 27 times"),
    (None, {"flops": 1e23, "from_scratch": True}, "1b", "from random weights: with this budget and text"),
]


@pytest.mark.parametrize(("text", "budget", "start", "words"), USES)
def test_the_first_line_is_the_best_use_and_the_recipe_is_its(
    text: TextAmount | None, budget: dict[str, Any], start: str, words: str
) -> None:
    """The public encoder of the text's language, unless the budget is too small to change it or exceeds its own."""
    advice = advise(text, **budget)
    assert advice.chosen.name == start == (advice.recipe.init.model or advice.recipe.init.preset)
    assert words in advice.best_use and recipe_yaml(advice).startswith(f"# {advice.best_use}\n")
    if advice.chosen.kind == "continued":
        written = recipe_yaml(advice, has_reasons=False)
        assert [phase.objective for phase in advice.recipe.curriculum] == ["mlm"]
        assert f"biphase tokenizer from {start} --out" in written and f"--out {advice.recipe.data.shards}\n" in written
        assert advice.choices[0].reason not in written, "the table has it"
    if text is GERMAN:
        assert "nglish" not in advice.best_use


def test_shards_of_the_encoders_own_tokenizer_are_used_as_they_are() -> None:
    text = TextAmount(tokens=1e8, vocab_size=50_368, shards="mine", language="en")
    assert advise(text, flops=1e18).recipe.data.shards == "mine"
    assert advise(replace(text, vocab_size=8192), flops=1e18).recipe.data.shards == "shards-ModernBERT-base"


def test_what_does_not_fit_the_device_is_not_advised() -> None:
    """A 4090 has 24 GiB: 1b is left out, and what is chosen has microbatches with which it fits."""
    machine = find_machine("RTX 4090")
    advice = advise(hours=7000, machine=machine, from_scratch=True)
    assert advice.chosen.name == "610m" and any("RTX 4090: 1b" in caveat for caveat in advice.caveats)
    assert fits(advice.chosen.shape, advice.recipe, machine)
    assert not fits(advice.chosen.shape, advise(flops=advice.flops, from_scratch=True).recipe, machine)


def test_a_device_on_which_no_preset_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "T4", (8.1e12, 0.01, 70))
    with pytest.raises(InputError, match=r"^no preset fits into the memory of the device; give a device with more"):
        advise(hours=1, machine=find_machine("T4"))


def test_clm_reads_a_text_sixteen_times_at_most() -> None:
    """Of 40 times; the rest is MLM's. A study that likes much CLM does not change that."""
    advice = advise(TextAmount(tokens=1e6), flops=1e18, evidence=[Evidence("75/25", 60.0, 1.5)])
    clm, mlm = advice.recipe.curriculum
    assert advice.chosen.epochs == 40 and clm.steps / (clm.steps + mlm.steps) == pytest.approx(16 / 40, abs=0.01)
    told = next(choice for choice in advice.choices if choice.what == "curriculum")
    assert told.value == f"{clm.steps} clm + {mlm.steps} mlm" and "fewer steps than in 75/25" in told.reason
    assert "75-25" not in advice.recipe.name, "a name says what is trained"


def test_a_study_without_an_encoder_takes_no_caveat_away() -> None:
    """Its curricula were not chosen from, so what holds without a study holds."""
    decoder = Evidence("clm", 60.0, 1.5, tokens=1e6)
    assert advise(flops=1e16, evidence=[decoder]).caveats == advise(flops=1e16, from_scratch=True).caveats


def test_where_the_law_says_nothing_the_smallest_is_taken() -> None:
    """Of 1m with 4,096 words and 1b with 128,256, none is better for knowing fewer words."""
    advice = advise(TextAmount(tokens=1e5, vocab_size=4096), flops=1e19, from_scratch=True)
    assert advice.chosen.name == list(PRESETS)[-1] and advice.chosen.is_guess
    assert "predicts no gain from a larger one" in next(c.reason for c in advice.choices if c.what == "size")
    assert "loss by the law" not in printed(advice), "no choice among losses of networks that learned nothing"


def test_the_law_is_chinchillas_without_repeats() -> None:
    """With unique text, 20 tokens for a parameter are best at a fixed budget (up to what 6ND leaves out)."""
    budget = 6e18
    sizes = [10 ** (7 + i / 50) for i in range(150)]
    best = min(sizes, key=lambda size: predict_loss(size, budget / 6 / size, math.inf))
    assert 15 < budget / 6 / best**2 < 25
    # Repeats are worth less than new tokens, four times nearly as much, and never harm.
    new, four, forty = (predict_loss(1e8, 4e9, unique) for unique in (4e9, 1e9, 1e8))
    assert new < four < forty and four - new < 0.05
    assert predict_loss(1e8, 4e10, 1e8) <= forty


def test_batches_go_through_the_two_settings_that_worked() -> None:
    assert choose_steps(1.2e6, 256) == (586, 2048)
    assert choose_steps(99.1e9, 2048) == (42_004, 2_359_296)
    steps, batch = choose_steps(3e9, 2048)
    assert batch & (batch - 1) == 0 and 2048 < batch < 2_359_296 and steps * batch == pytest.approx(3e9, rel=1e-3)


def test_the_users_own_study_decides_where_it_is_clear() -> None:
    def choose(evidence: Sequence[Evidence]) -> Choice:
        choice = choose_curriculum(evidence)
        assert choice is not None
        return choice

    clear = [Evidence("25/75", 60.0, 0.5, True), Evidence("50/50", 63.0, 0.5), Evidence("mlm", 59.0, 0.5, True)]
    assert choose(clear).value == "50/50"
    unclear = [Evidence("25/75", 60.0, 1.5), Evidence("mlm", 61.0, 1.5)]
    choice = choose(unclear)
    assert choice.value == "25/75" and "no clear difference" in choice.reason and "your study" in choice.source
    without = [Evidence("mlm", 61.0, 1.5), Evidence("50/50", 60.0, 1.5), Evidence("75/25", 59.5, 1.5)]
    assert choose(without).value == "50/50", "its best split, where the default is not in it"
    choice = choose([Evidence("70/30", 61.0, 1.5), Evidence("mlm", 60.0, 1.5), Evidence("clm", 50.0, 1, True)])
    assert choice.reason == "best of 3 in your study (61.0 ± 1.5), 1 of the others within noise of it"
    assert choose([Evidence("mlm", 70.0, math.nan)]).reason.endswith("(70.0)"), "a single seed has no interval"
    choice = choose([Evidence("clm", 70.0, 1.5), Evidence("mlm", 60.0, 0.5)])
    assert choice.value == "mlm" and "clm scores more (70.0 ± 1.5), but looks left only" in choice.reason
    assert choose_curriculum([Evidence("clm", 70.0, 1.5)]) is None, "a decoder, which nobody asked for"
    for best, shares in (("mlm", [1.0]), ("1k+3k", [0.25, 0.75])):
        recipe = advise(flops=1e16, evidence=[Evidence(best, 60.0, 0.5)]).recipe
        assert [phase.steps / recipe.num_steps for phase in recipe.curriculum] == pytest.approx(shares, abs=1e-3)


@pytest.mark.parametrize(("curriculum", "told"), [("25/75", "20%"), ("50% mlm30-15 + 50% mlm", "30–15% and 20%")])
def test_the_masking_is_that_of_the_users_own_study(curriculum: str, told: str) -> None:
    advice = advise(flops=1e21, evidence=[Evidence(curriculum, 60.0, 0.5, mask=0.2)])
    choice = next(choice for choice in advice.choices if choice.what == "masking")
    assert (choice.value, choice.source) == (told, "your study")
    assert advice.recipe.curriculum[-1].mask_at(1) == 0.2


def test_evidence_is_over_pretraining_seeds() -> None:
    """The second curriculum is 4 points behind with each fine-tuning seed: clear, unless its pretraining seeds differ
    by 8. The third is as good as the first."""
    arm = ReportArm("any", "other", "1m", "mlm", 40, 100, 0, 100)

    def found(by_pretraining: tuple[float, ...]) -> tuple[bool, ...]:
        def score(offsets: Sequence[float]) -> Terms:
            pairs = [(mean + one, seed) for seed, mean in enumerate(offsets) for one in (-0.001, 0.001)]
            values, seeds = zip(*pairs, strict=True)
            return [(1.0, Result(arm, "SC", "a", "standard", values, seeds=[0, 1] * 3, pretraining_seeds=seeds))]

        level = (0.701, 0.7, 0.699)
        evidence = weigh_evidence({"mlm": score(level[::-1]), "25/75": score(by_pretraining), "50/50": score(level)})
        half_width = 100 * stats.t.ppf(0.975, 2) * np.std(by_pretraining, ddof=1) / 3**0.5
        assert evidence[1].half_width == pytest.approx(half_width)
        return tuple(item.is_behind for item in evidence)

    assert found((0.661, 0.66, 0.659)) == (False, True, False)
    assert found((0.70, 0.66, 0.62)) == (False, False, False)


def test_what_is_said_of_the_paper_is_in_its_scores() -> None:
    reference = Path(__file__).parents[2] / "src" / "biphase" / "bundled" / "paper" / "paper_scores.csv"
    means = mean_by_curriculum(reference)
    reason = apply_rule("curriculum", "the paper's size", curriculum="25/75").reason
    for name, share in (("25/75", 0.25), ("50/50", 0.5), ("75/25", 0.75), ("MLM", 0.0), ("CLM", 1.0)):
        assert f"{means[share]:.1f} for {name}" in reason


def test_what_is_said_of_small_networks_is_in_our_scores() -> None:
    """The shares of MLM's FLOPs are in the report's table, by its columns; what more CLM scores is in its means."""
    results = Path(__file__).parents[2] / "studies" / "results"

    def read_rows(name: str, study: str = "price") -> dict[str, dict[str, str]]:
        lines = (results / study / "tables" / name).read_text().splitlines()
        head, _, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines if line.startswith("|")]
        return {row[0]: dict(zip(head, row, strict=True)) for row in rows if row[0].startswith("1m")}

    reason = apply_rule("curriculum", "small network", curriculum="50/50", reach="").reason
    shares = read_rows("compute-equivalents-1m-by-task.md")
    ours, control = (shares[f"1m-{name}-900"]["TC mean"] for name in ("50-50", "twice"))
    assert f"need {ours} of the FLOPs that MLM needs, and" in reason and f"the control, {control}" in reason
    assert shares["1m-50-50-900"]["genre"] not in reason, "the control has as much there"
    later = read_rows("compute-equivalents-1m-by-task.md", "regime")
    half, whole = (later[f"1m-50-50-{steps}"]["uner_en_ewt"] for steps in (850, 1700))
    assert f"with {half} of MLM's FLOPs at 3.5M tokens; at 7M tokens it is {whole}, no saving" in reason
    alone, mlm = (
        float(read_rows("all-standard.md", "regime")[f"1m-{name}-850"]["uner_en_ewt"].strip("* ").split()[0].strip("*"))
        for name in ("clm", "mlm")
    )
    assert f"is {alone - mlm:.1f} points ahead of MLM" in " ".join(reason.split())
    by_model = read_rows("all-standard.md", "regime")

    def score(model: str, task: str) -> float:
        return float(by_model[model][task].strip("* ").split()[0].strip("*"))

    beside = read_rules()["beside_words"]
    for sentence, steps in zip(beside["token_classification"].values(), (425, 850, 1700), strict=True):
        assert f"{score(f'1m-mlm-{steps}', 'uner_en_ewt'):.1f} %" in sentence
        assert steps == 425 or f"{score(f'1m-50-50-{steps}', 'uner_en_ewt'):.1f} %" in sentence
    best = max(score(name, "genre") for name in by_model)
    assert f"{best:.1f} % at most" in next(iter(beside["sequence_classification"].values()))
    scores = read_rows("all-standard.md")
    split, more = (
        {task: float(re.sub(r"[^\d.].*", "", cell.strip("*"))) for task, cell in scores[name].items() if "±" in cell}
        for name in ("1m-50-50-900", "1m-mostly-clm-900")
    )
    assert more["pos_ewt"] < split["pos_ewt"] and all(more[kind] >= split[kind] for kind in ("TC mean", "genre"))


@pytest.mark.parametrize(("flops", "told"), [(2e13, ""), (1e18, "; for 36m and 3.33B tokens that is an extrapolation")])
def test_what_small_networks_showed_is_no_reason_for_larger_ones(flops: float, told: str) -> None:
    advice = advise(flops=flops, from_scratch=True)
    reason = next(choice.reason for choice in advice.choices if choice.what == "curriculum")
    assert reason.startswith("measured at preset 1m with 1.8M tokens") and reason.endswith(f"four seeds){told}")


def test_findings_are_cited_as_our_page_judges_them() -> None:
    """Each `F6` in the rules and how-tos says its verdict, and what the paper's scores cannot test is called that."""
    findings = judge_paper(measure_findings(with_averages(read_reference())))[0]
    verdicts = {finding.key: finding.verdict if finding.is_tested else "not tested" for finding in findings}
    root = Path(__file__).parents[2]
    files = [root / "README.md", root / "src/biphase/studies/rules.yaml", *(root / "docs/how_to").glob("*.md")]
    cited = [
        found for file in files for found in re.findall(r"(?<!–)\b(F[1-8])\b(?!–)(.{12})", file.read_text("utf-8"))
    ]
    assert len(cited) >= 6
    for key, rest in cited:
        assert rest.startswith(f", {verdicts[key]}"[:12]), f"{key}{rest}"
    gains = [line.estimate for finding in findings if finding.key == "F6" for line in finding.inequalities][:3]
    told = apply_rule("curriculum", "the paper's size", curriculum="25/75").reason
    assert "by {:+.2f}, {:+.2f} and {:+.2f} points".format(*(100 * gain for gain in gains)) in told


def mean_by_curriculum(path: Path) -> dict[float, float]:
    """Mean over families and budgets of the averages of the ratio experiment, by the nearest quarter of CLM."""
    scores: dict[float, list[float]] = {}
    with open(path, encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["setup"] == "ratio" and row["dataset"] == "Average":
                share = round(4 * int(row["clm_steps"]) / int(row["pretrain_steps"])) / 4
                scores.setdefault(share, []).append(float(row["mean"]))
    return {share: sum(values) / len(values) for share, values in scores.items()}


def test_every_row_of_the_table_is_reached_and_none_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    reached = set()

    def watched(what: str, case: str, **facts: Any) -> Choice:
        reached.add((what, case))
        return apply_rule(what, case, **facts)

    monkeypatch.setattr("biphase.studies.advise.apply_rule", watched)
    split, alone = Evidence("25/75", 60.0, 1.5), Evidence("mlm", 61.0, 1.5)
    texts = (None, TextAmount(tokens=1e6), TextAmount(tokens=2e9), TextAmount(tokens=1e12, vocab_size=8192))
    for text in texts:
        for flops in (2e12, 1e16, 1e19, 1e22):
            for evidence in ((), (alone,), (split, alone), (replace(split, curriculum="clm", mean=70.0), alone)):
                advise(text, flops=flops, evidence=evidence)
            advise(text, flops=flops, from_scratch=True)
    rules = read_rules()["rules"]
    assert reached == {(what, case) for what, cases in rules.items() for case in cases if case != "value"}


def test_text_is_measured_where_it_lies(corpus: Any, tmp_path: Path) -> None:
    measured = measure_text(corpus.shards)
    assert measured.vocab_size == 384 and measured.tokens and measured.tokens > 1000
    written = recipe_yaml(advise(measured, flops=1e15, from_scratch=True))
    assert yaml.safe_load(written)["data"]["shards"] == str(corpus.shards) and "prepare" not in written
    texts = ["One small document.", "Zwei Wörter."]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert measure_text(tmp_path).text_bytes == sum(len(text.encode()) for text in texts)
    with pytest.raises(InputError, match="does not exist"):
        measure_text(tmp_path / "b.jsonl")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_the_language_is_that_of_the_whole_text(tmp_path: Path, name: str) -> None:
    """Also where a file begins with a licence in another language; and in memory."""
    licence = ["You may copy this book, give it away or use it again under the terms of its licence."] * 40
    texts = [*licence, *["Der alte Mann sucht am Morgen den Brief aus der Stadt, den er vergessen hat."] * 5000]
    lines = texts if name == "a.txt" else [json.dumps({"text": text}) for text in texts]
    (tmp_path / name).write_text("\n".join(lines))
    assert measure_text(tmp_path).language == measure_text(pd.DataFrame({"text": texts})).language == "de"


def test_a_parquet_file_of_one_row_group_is_judged_by_the_rows_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["word " * (1 + row * 7919 % 400) for row in range(10_000)]
    pd.DataFrame({"text": texts}).to_parquet(tmp_path / "one.parquet")
    monkeypatch.setattr("biphase.studies.advise.SAMPLED_BYTES", 100_000)
    assert measure_text(tmp_path).text_bytes == pytest.approx(sum(map(len, texts)), rel=0.05)


@pytest.mark.parametrize("ending", [".csv", ".csv.gz"])
def test_a_table_is_judged_by_the_part_of_its_file_that_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """It holds other columns too, a character may have two bytes, and one of a packed file is less than a byte."""
    draw = random.Random(1)
    rows = [{"key": draw.randbytes(60).hex(), "text": "".join(draw.choices("абвг\n", k=120))} for _ in range(4000)]
    table = tmp_path / f"a{ending}"
    pd.DataFrame(rows).to_csv(table, index=False)
    monkeypatch.setattr("biphase.studies.advise.SAMPLED_BYTES", 400_000)
    monkeypatch.setattr("biphase.corpus.rows.BUFFER_BYTES", 1 << 14)
    assert measure_text(table).text_bytes == pytest.approx(sum(len(row["text"].encode()) for row in rows), rel=0.1)


def test_long_sources_are_judged_by_their_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = json.dumps({"text": "word " * 200}) + "\n"
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.jsonl").write_text(line * 10_000)
    monkeypatch.setattr("biphase.studies.advise.SAMPLED_SOURCES", 2)
    monkeypatch.setattr("biphase.studies.advise.SAMPLED_BYTES", 5e6)
    assert measure_text(tmp_path).text_bytes == pytest.approx(3e7, rel=0.2)


def printed(advice: Advice) -> str:
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(describe_advice(advice))
    return console.export_text()


def test_the_description_names_choices_sizes_and_caveats() -> None:
    text = printed(advise(TextAmount(tokens=2e9), hours=24, machine=H100, from_scratch=True))
    facts = (
        "curriculum",
        "F6",
        "← chosen",
        "on 1 × H100 (989 TFLOP/s, 40% of them used, stated)",
        "M with the",
    )
    for fact in facts:
        assert fact in text, fact


def test_the_cpu_of_a_run_has_all_threads_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    (tmp_path / "environment.json").write_text('{"device": "cpu", "threads": 2}')
    for step in range(4):
        record = {"kind": "train", "step": step, "objective": "clm", "loss": 2.5, "tokens_seen": 9}
        Run(tmp_path).log(record | {"flops_per_second": 4e10})
    for asked, devices in ((None, 2), (1, 1)):
        machine = biphase.advise(hours=1, device=str(tmp_path), devices=asked).machine
        assert machine is not None and (machine.devices, machine.peak_flops) == (devices, 2e10)


def test_devices_are_for_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU of this machine is measured, unless its efficiency is stated."""
    for name, value in (("device", "H100"), ("devices", 4), ("efficiency", 0.4)):
        with pytest.raises(InputError, match=f"`{name}` only counts with `hours`: give both"):
            biphase.advise(flops=1e18, **{name: value})
    measured = Machine("CPU", 2, 2e10, 1.0, "measured here")
    monkeypatch.setattr("biphase.api.studies.measure_cpu", lambda cores: replace(measured, devices=cores or 2))
    assert biphase.advise(hours=1).machine == measured
    assert biphase.advise(hours=1, device="cpu", devices=4).machine == replace(measured, devices=4)
    assert biphase.advise(hours=1, efficiency=0.5).machine == find_machine("CPU", 1, 0.5)
    assert "(20 GFLOP/s, measured here)" in printed(biphase.advise(hours=1))
    with pytest.raises(InputError, match="'devices' is 0: input should be greater than or equal to 1"):
        biphase.advise(hours=1, devices=0)
    assert biphase.advise(flops=1e30).chosen.name == "1b"


@pytest.mark.slow
def test_a_cpu_is_measured_by_steps_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("biphase.api.studies.MEASURED", "1m")
    machine = measure_cpu(cores=3, seconds=0)
    assert (machine.name, machine.devices, machine.efficiency) == ("CPU", 3, 1.0) and machine.peak_flops > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give a budget"),
        ({"flops": 1e18, "hours": 1, "machine": H100}, "either in FLOPs or in hours"),
        ({"hours": 1}, "hours need a device"),
        ({"flops": 0.0}, "0 FLOPs are not a budget: give more than 0, and at most 1e30 FLOPs"),
        ({"flops": math.nan}, "nan FLOPs are not a budget"),
        ({"flops": 1e40}, "1e40 FLOPs are not a budget"),
        ({"hours": -8, "machine": H100}, "-8 hours are not a budget"),
        ({"hours": math.inf, "machine": H100}, "inf hours are not a budget"),
        ({"flops": 1e10}, "too few to learn from; give at least 100,000 tokens"),
    ],
)
def test_bad_budgets_are_one_clear_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        advise(**arguments)
