"""The scores of a plan → results in the paper's terms; a study's folder, finished or not → its report,
with BibTeX entries to cite it."""

import json
import math
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, pairwise
from operator import itemgetter
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from biphase import __version__
from biphase.corpus.shards import read_shard_manifest
from biphase.curriculum import OBJECTIVES, Phase, join_phases
from biphase.engine.scheduler import Failure
from biphase.errors import InputError, first_of
from biphase.exporting.push import without_folders
from biphase.files import read_hashed
from biphase.finetuning.metrics import BM25
from biphase.finetuning.scores import TASK_SETTINGS, Score, ScoreSet, has_lost_predictions
from biphase.report.claims import Claim, Finding, judge_claims
from biphase.report.contrasts import Terms, contrast, difference, seed_interval, with_averages
from biphase.report.figures import figure_pool
from biphase.report.formats import csv_text, show_count, show_list
from biphase.report.hypotheses import measure_claim
from biphase.report.page import PageText, WrittenReport, write_report
from biphase.report.paper import judge_paper, measure_findings, place_arms
from biphase.report.results import LOSS, OBJECTIVE_NAMES, ReportArm, Result, ResultSet, pool, select_rate, with_cohorts
from biphase.report.tables import LATEX
from biphase.run import Run, read_metrics
from biphase.studies.advise import Evidence
from biphase.studies.arms import Arm
from biphase.studies.cost import RunSize, list_costs, measure_sizes, measure_training
from biphase.studies.declarations import count_looks, tell_declaration
from biphase.studies.folder import TRAINING, StudyState, find_text, read_state, refuse_unlike_validation
from biphase.studies.plan import EvaluatedModel, Plan, history, plan_study
from biphase.studies.spec import Study, load_study
from biphase.tasks.families import KINDS
from biphase.tasks.spec import find_task

PAPER_METRICS = {kind.code: kind.paper_metric for kind in KINDS.values()}


def collect_results(plan: Plan, scores: dict[str, ScoreSet], sizes: Mapping[str, RunSize]) -> ResultSet:
    """Collect the results of every arm on every task, by the standard metric and by the paper's, together with the
    tasks and fine-tunings that the plan expects.

    Pool the pretraining seeds of each arm. `sizes`: those of all runs. Raises `InputError` like `refuse_unlike_scores`.
    """
    refuse_unlike_scores(scores)
    pooled_names = {model.name: model.pooled_name for model in plan.models}
    names = {task: find_task(task).name for task in plan.study.evaluation.tasks} if plan.study.evaluation else {}
    tried = ((pooled_names[cell.model], task) for cell in plan.cells for task in cell.evaluates)
    points = Counter((model, names.get(task, task)) for model, task in tried)
    models: dict[str, list[EvaluatedModel]] = {}
    for model in plan.models:
        models.setdefault(model.pooled_name, []).append(model)
    arms: list[ReportArm] = []
    pooled: dict[str, list[Result]] = {}
    for seeded in models.values():
        arm = arm_of_model(plan, seeded[0], sizes)
        by_seed: dict[tuple[str, str], list[Result]] = {}
        for model in seeded:
            is_drawn = model.kind == "random" and plan.num_seeds > 1
            seed = None if is_drawn else plan.arms[model.arm].recipe.seed
            peers = [score for peer in seeded if peer is not model for score in scores[peer.name].scores]
            for result in collect_model(arm, seed, scores[model.name], plan.families, peers):
                by_seed.setdefault((result.dataset, result.metric), []).append(result)
        arms.append(arm)
        pooled[arm.name] = [pool(results) for results in by_seed.values()]
    results = tuple(replace(result, arm=arm) for arm in place_arms(arms) for result in pooled[arm.name])
    return ResultSet(with_cohorts(results), planned_tasks=plan.families, planned_runs=points)


def refuse_unlike_scores(scores: Mapping[str, ScoreSet]) -> None:
    """Raise `InputError` if a model's scores on a task have different settings, or if models were scored on different
    data: then differences between scores are not differences between models. The message names a cell for each value
    of the first setting that differs."""
    groups: dict[tuple[str | None, str], list[Score]] = defaultdict(list)
    for model, model_scores in scores.items():
        for score in model_scores.scores:
            groups[model, score.task].append(score)
            groups[None, score.task].append(score)  # the scores of all models
    for (of_model, task), group in groups.items():
        for key, cells in list_unlike((str(score.folder), score.settings) for score in group):
            if of_model is None and key not in TASK_SETTINGS:
                continue
            examples = " and ".join(f"{value} ({folders[0]})" for value, folders in cells.items())
            pinned = " or pin it with evaluation.finetune.precision" if key == "precision" else ""
            remedy = f"delete the folders of all but one{pinned}, and run the study again"
            raise InputError(f"scores on {task} were made with different {key}, {examples}: {remedy}")


def list_unlike(facts: Iterable[tuple[str, Mapping[str, str]]]) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Yield each setting that has several known values, with the names by value. `facts` are pairs of a name and its
    settings; a name may occur several times."""
    values: dict[str, dict[str, dict[str, None]]] = {}
    for name, settings in facts:
        for key, value in settings.items():
            if value:
                values.setdefault(key, {}).setdefault(value, {})[name] = None
    for key, names_of in values.items():
        if len(names_of) > 1:
            yield key, {value: [*names] for value, names in names_of.items()}


def collect_model(
    arm: ReportArm, pretraining_seed: int | None, scores: ScoreSet, families: Mapping[str, str], peers: Sequence[Score]
) -> Iterator[Result]:
    """Collect a model's results on every task, by both metrics.

    `peers` are the scores of the arm's other pretraining seeds, which help to choose the rate for a single fine-tuning
    seed. `pretraining_seed` is None for random weights: each fine-tuning draws new ones, so it counts as a pretraining
    seed of its own. Its number is below zero, because no arm's seed can be paired with it.
    """
    for task in sorted(scores.grids):
        name = next(model for model in scores.models if (model, task) in scores.cells)  # there is only one
        rivals = [score for score in peers if score.task == task]
        for metric in dict.fromkeys((None, PAPER_METRICS.get(families[task]))):
            try:
                result = select_rate(scores, name, task, metric, is_papers_way=metric is not None, peers=rivals)
            except InputError:
                continue  # the model diverged at all rates; the page lists its score as missing
            seeds = [-1 - s if pretraining_seed is None else pretraining_seed for s in result.seeds]
            yield replace(result, arm=arm, family=families[task], pretraining_seeds=seeds)


def with_losses(plan: Plan, results: ResultSet, losses: Mapping[str, Sequence[Mapping[str, Any]]]) -> ResultSet:
    """Add each arm's held-out loss at its last step, with a sample for each pretraining seed; `losses` as of
    `read_losses`, of which only those of recorded runs count. Only hypotheses read it: it belongs to no family, so it
    is no part of an average."""
    arms, added, planned = {arm.name: arm for arm in results.models}, [], dict(results.planned_runs)
    ends = defaultdict[str, dict[int, float]](dict)
    for model in plan.models:
        if model.kind == "final" and model.pooled_name in arms:
            # An arm without steps of its own is a checkpoint of another arm's run.
            rows, end = losses.get(plan.arms[model.run].pooled_name, ()), ("validation", model.step, model.seed, True)
            facts = itemgetter("kind", "step", "seed", "is_recorded")
            found = [row["loss"] for row in rows if facts(row) == end]
            # Of a mixed phase, the first is the masked objective's.
            ends[model.pooled_name].update((model.seed, loss) for loss in found[:1])
    for name, by_seed in ends.items():
        planned[name, LOSS] = sum(arm.pooled_name == name for arm in plan.arms.values())
        if by_seed:
            result = Result(arms[name], "", LOSS, results.primary_metric, [*by_seed.values()], num_runs=len(by_seed))
            added.append(replace(result, seeds=[0] * len(by_seed), pretraining_seeds=[*by_seed]))
    return replace(results, results=(*results.results, *added), planned_runs=planned)


def measure_example_variances(plan: Plan, folder: Path) -> dict[str, float]:
    """Return, for each task, the variance of the difference between two trained models on one example: the median over
    neighbours among the finished scores in a study's folder."""
    results = collect_results(plan, read_state(plan, folder).scores, measure_sizes(plan)).results
    by_task: dict[str, dict[str, Result]] = defaultdict(dict)
    for result in results:
        if result.metric == "standard" and result.arm.objective != "none":
            by_task[result.dataset][result.arm.name] = result
    variances = {}
    for task, scored in by_task.items():
        gaps = [difference(a, b) for a, b in pairwise(scored.values())]
        if known := [gap.example_variance * gap.num_examples for gap in gaps if gap.num_examples]:
            variances[task] = median(known)
    return variances


def read_evidence(folder: Path) -> list[Evidence]:
    """Compare the curricula of the study in a folder by their mean test score in % over all tasks, for the network with
    the most curricula, at its largest budget. Leave out adapted models, arms that lack a score on some task or whose
    recipe is not their network's usual one, and curricula without a short form. Raises `InputError` if none is left."""
    if not (folder / "study.yaml").exists():
        raise InputError(f"{folder} is not the folder of a study: it has no study.yaml; give the folder of `study run`")
    plan = plan_study(load_study(folder / "study.yaml"))
    results = collect_results(plan, read_state(plan, folder).scores, measure_sizes(plan)).results
    tasks = dict.fromkeys(result.dataset for result in results)
    scores = {(r.arm.name, r.dataset): r for r in results if r.metric == "standard"}
    tables = {table.name for table in plan.study.curricula}
    by_spot: dict[tuple[str, int], dict[str, Terms]] = {}
    for arm in plan.of_first_seed.arms.values():
        is_usual = arm.recipe_key == plan.usual_recipes.get((arm.model, False), arm.recipe_key)
        terms: Terms = [(1 / len(tasks), scores[arm.name, task]) for task in tasks if (arm.name, task) in scores]
        is_alike = arm.parent is None and arm.recipe.init.model is None and not arm.settings and is_usual
        if is_alike and arm.curriculum not in tables and len(terms) == len(tasks) > 0:
            spot = arm.model, arm.recipe.tokens_before(arm.recipe.num_steps)
            by_spot.setdefault(spot, {}).setdefault(arm.curriculum, terms)
    if not by_spot:
        lack = "no curriculum with a score on every task yet for a network from random weights"
        raise InputError(f"{folder} has {lack}; finish it with study run, or leave the study out")
    network, tokens = max(by_spot, key=lambda spot: (len(by_spot[spot]), spot[1]))
    facts: dict[str, Any] = {"tokens": tokens, "mask": plan.study.mask_probability}
    return [replace(item, **facts) for item in weigh_evidence(by_spot[network, tokens])]


def weigh_evidence(curricula: Mapping[str, Terms]) -> list[Evidence]:
    """Turn the scores of each curriculum into evidence: the mean, and whether the best encoder is ahead of it by the
    test behind all verdicts."""
    means = {name: seed_interval(terms) for name, terms in curricula.items()}
    evidence = [Evidence(name, 100 * mean.value, 100 * mean.half_width) for name, mean in means.items()]
    encoders = [item for item in evidence if not OBJECTIVES[item.objectives[-1]].is_causal] or evidence
    best = curricula[max(encoders, key=lambda item: item.mean).curriculum]
    compared = []
    for item in evidence:
        minus = [(-weight, score) for weight, score in curricula[item.curriculum]]
        compared.append(replace(item, is_behind=contrast([*best, *minus]).side == "above"))
    return compared


def arm_of_model(plan: Plan, model: EvaluatedModel, sizes: Mapping[str, RunSize]) -> ReportArm:
    """Describe a model in the paper's terms. All pretraining seeds of an arm share one description."""
    arm = plan.arms[model.arm]
    if model.kind == "random":
        return ReportArm(model.name, "control", arm.model)
    *ancestors, _ = plan.lineage(arm.name)
    phases = history(plan, model)
    scratch = join_phases(phase for parent in ancestors for phase in parent.recipe.curriculum) or phases
    continued = arm.recipe.curriculum if ancestors else ()
    # A mixed phase counts by its shares, and all masked objectives count as MLM.
    shares = [single.steps * share for phase in scratch for single, share in phase.parts if single.objective == "clm"]
    steps = sum(phase.steps for phase in scratch)
    clm_steps = round(sum(shares))
    is_masked_alike = not any(phase.is_ramped or phase.mask_passes != 1 or phase.corruption for phase in phases)
    is_of_the_paper = is_masked_alike and has_paper_form(arm, scratch, continued)
    is_intermediate = model.kind == "intermediate"
    tokens, flops = measure_training(plan, model, sizes)
    words: dict[str, Any] = {**tell_masking(continued or phases), **tell_curriculum(phases)}
    return ReportArm(
        name=model.pooled_name,
        setup="efficiency" if is_intermediate else "objective" if is_of_the_paper else "other",
        size=arm.model,
        objective="clm" if clm_steps == steps else "clm+mlm" if clm_steps else "mlm",
        pretrain_steps=steps,
        clm_steps=clm_steps,
        mlm_steps=steps - clm_steps,
        cpt_steps=sum(phase.steps for phase in phases) - steps if ancestors else 0,
        parent=arm.pooled_name if is_intermediate else ancestors[-1].pooled_name if ancestors else None,
        is_plain=is_of_the_paper and arm.recipe_key == plan.usual_recipes.get((arm.model, arm.parent is not None)),
        flops=flops,
        tokens=tokens,
        **words,
    )


def has_paper_form(arm: Arm, scratch: Iterable[Phase], continued: Iterable[Phase]) -> bool:
    """Tell whether an arm has one of the paper's four kinds of curriculum: CLM, MLM, CLM then MLM, and MLM that
    continues one of these; with batches of one size and no settings of its own."""
    first = [single.objective for phase in scratch for single, _ in phase.parts]
    later = [single.objective for phase in continued for single, _ in phase.parts]
    has_objectives = first in (["clm"], ["mlm"], ["clm", "mlm"]) and later in ([], ["mlm"])
    return has_objectives and isinstance(arm.recipe.batch_tokens, int) and not arm.settings


def tell_curriculum(phases: Iterable[Phase]) -> dict[str, Any]:
    """Return the fields of `ReportArm` about objectives in words; none if `whole_objective` names them."""
    groups = groupby(phases, key=lambda phase: phase.predicted)
    steps_of = [(words, sum(phase.steps for phase in group)) for words, group in groups]
    predicted = [words for words, _ in steps_of]
    if len(predicted) > 3:
        return {"curriculum": f"{show_list(sorted({*predicted}))} in turns"}
    curriculum = " → ".join(predicted)
    return {} if curriculum in OBJECTIVE_NAMES.values() else {"curriculum": curriculum, "phases": tuple(steps_of)}


def tell_masking(phases: Iterable[Phase]) -> dict[str, Any]:
    """Return the fields of `ReportArm` about the masks of these phases: one ratio in percent; several ratios, or one
    with other tokens than the mask token, in words."""
    masked = [phase for phase in phases if phase.masked]
    told = dict.fromkeys(f"{phase.masked} {phase.corruption}".strip() for phase in masked)
    has_one = len({phase.masked for phase in masked}) == 1 and not masked[0].is_ramped
    is_plain = has_one and not any(phase.corruption for phase in masked)
    percent = {"mask_percent": round(100 * masked[0].mask_at(1))} if has_one else {}
    return percent if is_plain else percent | {"masks": ", ".join(told)}


HOW_JUDGED = "Supported if every inequality is, contradicted if one is; corrected (Holm) for all declared hypotheses."


def measure_hypotheses(plan: Plan, results: ResultSet) -> tuple[list[Finding], tuple[Finding, ...]]:
    """Measure all hypotheses, and the paper's findings, by the primary metric. A hypothesis needs complete scores on
    all its tasks in the plan; otherwise it will be undecided. `results` include averages, and the tasks and
    fine-tunings that the plan expects."""
    results = results.select(metric=results.primary_metric)
    measured = measure_findings(results)
    cited, findings = {finding.key: finding.claims for finding in measured}, []
    for hypothesis, conditions in zip(plan.study.hypotheses, plan.hypotheses, strict=True):
        claims: list[Claim] = []
        for condition in conditions:
            claims += cited[condition] if isinstance(condition, str) else [measure_claim(condition, results)]
        findings.append(Finding(hypothesis.name, hypothesis.says, HOW_JUDGED, tuple(claims)))
    return findings, measured


def list_equivalents(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Map each arm with a hypothesis about its compute equivalent to the arms of its baseline."""
    bound = chain.from_iterable(chain(*groups) for groups in chain(*plan.hypotheses) if not isinstance(groups, str))
    return {asked.operands[0].arms[0]: asked.baseline for asked in bound if asked.baseline}


def propose_looks(plan: Plan, findings: Iterable[Finding]) -> Iterator[str]:
    """Yield a sentence on how to declare a number of seeds that may grow, if hypotheses are undecided for want of
    them."""
    planned, undecided = plan.study.pretraining_seeds, any(finding.verdict == "undecided" for finding in findings)
    if undecided and plan.num_seeds > 1 and planned.up_to is None:
        form = f"pretraining_seeds: {{count: {plan.num_seeds}, up_to: {2 * plan.num_seeds + 2}}}"
        yield (
            "More seeds after a report find differences between equals too often: in 14.6 % at looks after 3 to 8 "
            f"seeds, not in 5 %. A study that may grow declares `{form}`; then its looks share the 5 %."
        )


def hypotheses_json(plan: Plan, digest: str, declared: Sequence[str], findings: Sequence[Finding]) -> str:
    """Return the hypotheses with their verdicts as JSON. `digest`: their hash; `declared`: the sentences of
    `tell_declaration`."""
    records = []
    for hypothesis, finding in zip(plan.study.hypotheses, findings, strict=True):
        inequalities: list[dict[str, object]] = []
        for one in finding.inequalities:
            interval = one.interval
            numbers = {"estimate": one.estimate, "low": interval.low, "high": interval.high, "bound": one.bound}
            numbers |= {"level": interval.level, "p": one.p_value, "adjusted_p": one.adjusted}
            finite = {key: None if math.isnan(value) else value for key, value in numbers.items()}  # JSON has no nan
            words = {"compute": one.compute, "carried": one.carriers, "alone": one.alone, "seeds": one.seeds}
            told = {key: text.lstrip(", ") for key, text in words.items() if text}
            inequalities.append({"label": one.label, **finite, "verdict": one.verdict, **told})
        record = hypothesis.model_dump(mode="json") | {"verdict": finding.verdict, "inequalities": inequalities}
        records.append(record | {"needs": finding.needs} | ({"looks": finding.scope} if finding.scope else {}))
    tree = {"hash": digest, "declared": " ".join(declared), "hypotheses": records}
    return json.dumps(tree, indent=1, ensure_ascii=False) + "\n"


SOFTWARE = ("biphase", "torch", "transformers")
BUNDLE = "bundle.json"


@dataclass(frozen=True)
class BundleRecord:
    """The facts that a study's archive records because it has no weights and no shards."""

    biphase: str
    commit: str
    sizes: Mapping[str, RunSize]
    """Name of a run → its sizes."""
    commands: tuple[str, ...]
    """The commands that reproduce the results from the text."""


def read_bundle(folder: Path) -> BundleRecord | None:
    """Read the record in the folder of an unpacked archive; return None for any other folder."""
    path = folder / BUNDLE
    return read_hashed(path, BundleRecord, "unpack the archive again") if path.exists() else None


def list_notes(state: StudyState, sizes: Mapping[str, RunSize]) -> Iterator[str]:
    """Yield sentences about facts that differ between arms, are assumed, or cannot be checked."""
    assumed = {lengths.source: lengths for _, lengths in sizes.values() if lengths.source.startswith("assumed")}
    for source, lengths in assumed.items():
        yield f"FLOPs, and shares of them, assume samples of {lengths.mean_tokens:,.0f} tokens ({source})."
    if shapeless := [name for name, (shape, _) in sizes.items() if shape is None]:
        yield f"FLOPs are unknown for networks whose shape or vocabulary is not known here: {first_of(shapeless)}."
    if state.plan.has_one_order:
        yield "All pretraining seeds saw the data in the same order: results may differ for another order."
    yield from tell_unlike(state)
    broken = chain.from_iterable(own.broken.items() for own in state.scores.values())
    yield from (f"Left out: {path} ({reason})." for path, reason in broken)
    if lost := [score for own in state.scores.values() for score in own.scores if has_lost_predictions(score)]:
        models = first_of(sorted({score.model for score in lost}))
        unknown = "tests of their differences cannot account for the choice of test examples"
        yield f"The predictions of {show_count(len(lost), 'score')} were deleted ({models}): {unknown}."


def tell_unlike(state: StudyState) -> Iterator[str]:
    """Yield a sentence for each setting, device or software that differs between trainings, or between fine-tunings on
    a task; equal differences on several tasks share a sentence."""
    groups: dict[tuple[str, str], list[tuple[str, dict[str, str]]]] = defaultdict(list)
    for name, last in state.environments.items():
        for made in (*last.get("earlier", ()), last):
            groups["trained", ""].append((name, {"precision": made.get("precision", ""), **describe_place(made)}))
    for name, record in state.records.items():
        if (start := state.plan.runs[name].recipe.init.reference) and record.parent:
            groups["trained", ""].append((name, {f"weights of {start}": record.parent[:8]}))
    for model, own in state.scores.items():
        for score in own.scores:
            facts = {key: value for key, value in score.settings.items() if key not in (*TASK_SETTINGS, "weights")}
            groups["fine-tuned", score.task].append((model, facts | describe_place(score.machine)))
    merged: dict[tuple[str, str], dict[str, dict[str, None]]] = {}
    for (verb, _), group in groups.items():
        for key, names_of in list_unlike(group):
            for value, names in names_of.items():
                merged.setdefault((verb, key), {}).setdefault(value, {}).update(dict.fromkeys(names))
    for (verb, key), by_value in merged.items():
        values = ", ".join(f"{value} ({first_of([*names])})" for value, names in sorted(by_value.items()))
        yield f"Not all were {verb} with the same {key}: {values}; this may explain differences between them."


def describe_place(machine: Mapping[str, Any]) -> dict[str, str]:
    """Return the device, the processor and the versions of software in a record of a machine; "" for missing facts."""
    software = " ".join(f"{name} {machine[name]}" for name in SOFTWARE if name in machine)
    return {key: str(machine.get(key, "")) for key in ("device", "processor")} | {"software": software}


CELL_COLUMNS = ("model", "task", "learning_rate", "seed", "metric", "steps", "seconds")


def report_study(plan: Plan, folder: Path, out: Path, commands: Sequence[str]) -> WrittenReport:
    """Write tables, figures, verdicts and the page about all finished results into the folder `out`.

    `commands`: those that reproduce the results once the software is installed, in order. Paths of this machine become
    their last names.
    """
    bundle = read_bundle(folder)
    with figure_pool() as pool:
        picture = pool.submit(plan_svg, replace(plan, cells=()))  # while this process reads scores
        state = read_state(plan, folder)
        refuse_unlike_validation(state)
        sizes = measure_sizes(plan) | (dict(bundle.sizes) if bundle else {})
        results = with_averages(collect_results(plan, state.scores, sizes))
        if not results.results:
            raise InputError(f"the study's folder {folder} has no finished score to report on yet")
        losses = read_losses(state)
        hypotheses, of_paper = measure_hypotheses(plan, with_losses(plan, results, losses))
        looks = count_looks(plan, folder, {one.key: one.num_seeds for one in hypotheses})
        digest, declared = tell_declaration(plan, folder) if plan.hypotheses else ("", [])
        hypotheses = [replace(one, looks=looks[one.key][0], scope=looks[one.key][1]) for one in hypotheses]
        findings = judge_claims(hypotheses)
        declared += propose_looks(plan, findings)
        files = {"hypotheses.json": hypotheses_json(plan, digest, declared, findings)} if findings else {}
        files |= {"scores.csv": cells_csv(state.scores), "citation.bib": write_citation(plan.study, declared)}
        tests = [(s.task, s.metrics.get("test", {})) for scores in state.scores.values() for s in scores.scores]
        page_text = PageText(
            title=plan.study.title or f"The study {plan.study.name}",
            question=plan.study.question,
            verdicts=judge_paper(of_paper),
            hypotheses=(findings, declared) if findings else None,
            declared=list_equivalents(plan),
            commands=[*chain(*map(as_published, bundle.commands))] if bundle else list_commands(state, commands),
            words=state.words,
            bm25={task: values[BM25] for task, values in tests if BM25 in values},
            plan_svg=picture.result(),
            losses=losses,
            files=files,
            missing=list(map(without_folders, list_missing(state, state.read_failures(), losses))),
            notes=list(map(without_folders, [*plan.study.notes, *list_notes(state, sizes)])),
            costs=list_costs(state, sizes),
        )
        return write_report(results, out, page_text, pool)


def install_commands(machine: Mapping[str, Any]) -> Iterator[str]:
    """Yield the commands that install the versions in a record of a machine. Builds of PyTorch for CPUs or for one
    version of CUDA have their own index."""
    versions = {name: str(machine[name]) for name in SOFTWARE if name in machine}
    number, _, build = versions.pop("torch", "").partition("+")
    is_published = re.fullmatch(r"cpu|cu\d+|rocm[\d.]+|xpu", build)
    if number:
        index = f" --index-url https://download.pytorch.org/whl/{build}" if is_published else ""
        yield f"pip install torch=={number}{index}"
    if biphase := versions.pop("biphase", ""):
        others = "".join(f" {name}=={version}" for name, version in versions.items())
        yield f"pip install .{others}  # in a checkout of biphase {biphase}"


def as_published(command: str) -> Iterator[str]:
    """Yield a command of an archive without paths of its author's machine. Versions before the first one on an index
    wrote `pip install biphase==…`, which becomes an installation in a checkout."""
    if command.startswith("pip install biphase=="):
        yield from install_commands(dict(word.split("==") for word in command.split()[2:]))
    else:
        yield without_folders(command)


def list_commands(state: StudyState, commands: Sequence[str]) -> list[str]:
    """Return the commands that install the software of a study's runs, and then `commands`, without paths of this
    machine."""
    installing = dict.fromkeys(chain(*map(install_commands, state.environments.values())))
    return [*installing, *map(without_folders, commands)]


def list_texts(state: StudyState) -> Iterator[str]:
    """Yield the commands that make the shards of a study's runs, and a comment for each folder with the data of a task.
    A missing shard set gets only a comment. Each tokenizer is made once; shards do not record how, so one that no model
    of the study has is marked as a guess."""
    texts, tokenizers = dict[tuple[str, str], None](), dict[str, str]()
    for name, record in state.records.items():
        texts |= dict.fromkeys(zip(state.plan.runs[name].recipe.data.sets, record.text or (), strict=False))
    inits = [(path, run.recipe.init) for run in state.plan.runs.values() for path in run.recipe.data.sets]
    models = {path: init.reference for path, init in inits if init.reference}
    for path, content in texts:
        if find_text(path) != content:
            yield f"# trained on {path}: fingerprint {content[:16]}"
            continue
        manifest = read_shard_manifest(Path(path))
        text, tokenizer = manifest.splits["train"], manifest.tokenizer_hash[:16]
        size = f"{show_count(text.documents, 'document')}, {show_count(text.tokens, 'token')}"
        yield f"# trained on {path}: {size}, fingerprint {content[:16]}; tokenizer {tokenizer}"
        sources: dict[bool, dict[str, None]] = {False: {}, True: {}}
        for shard in manifest.shards:
            is_held_out = not (manifest.options.validation_fraction or shard.parts["train"].documents)
            sources[is_held_out] |= dict.fromkeys(shard.sources)
        train, held_out = (shlex.join(names) if len(names) < 5 else "TEXT" for names in sources.values())
        if tokenizer not in tokenizers:
            place = tokenizers[tokenizer] = f"tokenizer-{len(tokenizers) + 1}" if tokenizers else "tokenizer"
            trained = f"train {train} --vocab-size {manifest.vocab_size}", "  # if it was trained on this text"
            made, guess = (f"from {shlex.quote(models[path])}", "") if path in models else trained
            yield f"biphase tokenizer {made} --out {place}{guess}"
        words = [f"biphase prepare {train} --tokenizer {tokenizers[tokenizer]} --out {shlex.quote(path)}"]
        words += [f"--validation {held_out}"] if held_out else []
        unused = {"validation_fraction"} if held_out else set()
        for key, value in manifest.options.model_dump(exclude_defaults=True, exclude=unused).items():
            words.append(f"--{key.replace('_', '-')}{'' if value is True else f' {shlex.quote(str(value))}'}")
        yield " ".join(words)
    evaluation = state.plan.study.evaluation
    for task, place in evaluation.data_dirs.items() if evaluation else ():
        if (shown := without_folders(place)) != place:
            yield f"# {shown}: your copy of the data of {Path(task).stem}"


def plan_svg(plan: Plan) -> str:
    from biphase.studies.describe import draw_plan  # only the process that draws loads matplotlib

    with TemporaryDirectory() as folder:
        picture = Path(folder) / "plan.svg"
        draw_plan(plan, picture)
        return picture.read_text(encoding="utf-8")


def read_losses(state: StudyState) -> dict[str, list[dict[str, Any]]]:
    """Read the logged losses of all runs that have a record or are not done: name of an arm → its records, each with a
    pretraining seed, and with `is_recorded` if its run has a record. Steps count from random weights, so a branch
    begins where it leaves its trunk."""
    losses, root = defaultdict[str, list[dict[str, Any]]](list), state.folder / "runs"
    for name, planned in state.plan.runs.items():
        record = state.records.get(name)
        # A run that is done without a record had another recipe.
        begun = [path for path in root.glob(f"{name}-????????") if not Run(path).is_done]
        folders = [root / record.folder] if record else begun
        runs = [Run(path) for path in folders if (path / "metrics.jsonl").exists()]
        logs = [[*read_metrics(run, "train"), *read_metrics(run, "validation")] for run in runs]
        if rows := max(logs, key=len, default=[]):
            arm = state.plan.arms[name]
            facts = {"seed": arm.seed, "is_recorded": record is not None}
            losses[arm.pooled_name] += [row | facts | {"step": planned.first + row["step"]} for row in rows]
    return losses


def cells_csv(scores: dict[str, ScoreSet]) -> str:
    """Return the scores of all cells, from 0 to 1, as CSV: a row for each model, task, rate and seed. Diverged cells
    have no scores."""
    rows: list[dict[str, object]] = []
    for model, score_set in scores.items():
        for score in sorted(score_set.scores, key=lambda s: (s.task, s.config.learning_rate, s.config.seed)):
            config, seconds = score.config, round(sum(score.seconds.values()), 1)
            facts = (model, score.task, config.learning_rate, config.seed, score.metric, score.num_steps, seconds)
            row: dict[str, object] = dict(zip(CELL_COLUMNS, facts, strict=True))
            for split, values in score.metrics.items():
                row |= {f"{split} {metric}": f"{value:.6f}" for metric, value in values.items()}
            rows.append(row)
    columns = (*CELL_COLUMNS, *sorted({key for row in rows for key in row}.difference(CELL_COLUMNS)))
    return csv_text([columns, *([row.get(column, "") for column in columns] for row in rows)])


def write_citation(study: Study, declared: Sequence[str]) -> str:
    """Return BibTeX entries for the study and for biphase."""
    fields = {"author": " and ".join(study.authors), "title": f"{{{study.title or study.name}}}"}
    fields["note"] = ". ".join([f"Made with biphase {__version__}", *declared[:1]])
    software = {"author": "{The biphase authors}", "title": "{biphase}", "version": __version__}
    signs, entries = str.maketrans({sign: text for sign, text in LATEX.items() if sign not in "{}"}), ""
    for head, texts in ((f"@misc{{{study.name}", fields), ("@software{biphase", software)):
        lines = [f"  {key} = {{{text.translate(signs)}}}" for key, text in texts.items() if text]
        entries += ",\n".join([head, *lines]) + "\n}\n"
    return entries


def list_missing(
    state: StudyState, failures: Iterable[Failure], losses: Mapping[str, Iterable[Mapping[str, Any]]]
) -> Iterator[str]:
    """Yield sentences about unfinished, failed and diverged units, and about finished runs without losses."""
    logged = {(arm, row["seed"]) for arm, rows in losses.items() for row in rows}
    for name in sorted(state.trained):
        arm = state.plan.arms[name]
        if (arm.pooled_name, arm.seed) not in logged:
            log = f"runs/{state.records[name].folder}/metrics.jsonl"
            yield f"{name} is trained, but {log} has no losses: restore it, or delete its folder and train it again."
    kinds, done = state.kinds, state.done
    left = Counter(kind for unit, kind in kinds.items() if unit not in done)
    for kind, total in Counter(kinds.values()).items():
        if left[kind]:
            noun, are = "runs" if kind == TRAINING else f"cells of {kind}", "is" if left[kind] == 1 else "are"
            yield f"{left[kind]} of {total} {noun} {are} not finished."
    for failure in failures:
        if not failure.is_blocked:
            yield f"Failed: {failure.unit}: {failure.reason}"
    for scores in state.scores.values():
        if diverged := [score for score in scores.scores if score.diverged]:
            points = ", ".join(f"{s.task} at {s.config.learning_rate:g} seed {s.config.seed}" for s in diverged)
            yield f"{diverged[0].model}: training diverged on {points}."
