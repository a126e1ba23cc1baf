"""A plan and the scores of its models → results in the paper's terms: what each model is, and what it scored."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from biphase.errors import InputError
from biphase.finetuning.metrics.ranking import BM25
from biphase.finetuning.scores import TASK_SETTINGS, UNKNOWN_DATA, Score, ScoreSet, differing, settings_of
from biphase.finetuning.selection import select_rate
from biphase.paper.published import place_arms
from biphase.report.contrasts import Terms, combine, contrast, seed_interval
from biphase.report.results import ReportArm, Result, measured, pool
from biphase.study.advise import Evidence
from biphase.study.folder import StudyFolder, read_state
from biphase.study.plan import EvaluatedModel, Plan, history, plan_study
from biphase.study.sizes import Sizes, measure_sizes
from biphase.study.spec import load_study, task_families
from biphase.study.trunks import PlannedRun

PAPER_METRICS = {"SC": "accuracy", "TC": "paper_f1", "QA": "paper_f1", "IR": "paper_ndcg_at_10"}


def collect_results(plan: Plan, scores: dict[str, ScoreSet]) -> Iterator[Result]:
    """Every arm on every task, by the standard metric and by the paper's, in each of its comparisons.

    Models of one name but for their seed are one arm that was pretrained several times: their results are pooled, each
    with the seed of its recipe as pretraining seed.

    Raises `InputError` as `refuse_mixtures` does.
    """
    refuse_mixtures(scores)
    families = task_families(plan.study.evaluation)
    sizes = measure_sizes(plan)
    models: dict[str, list[EvaluatedModel]] = {}
    for model in plan.models:
        models.setdefault(model.pooled_name, []).append(model)
    results: dict[ReportArm, list[Result]] = {}
    for some in models.values():
        arm = arm_of_model(plan, some[0], sizes)
        found: dict[tuple[str, str], list[Result]] = {}
        for model in some:
            is_drawn = model.kind == "random" and plan.num_seeds > 1
            seed = None if is_drawn else plan.arms[model.arm].recipe.seed
            peers = [score for other in some if other is not model for score in scores[other.name].scores]
            for result in collect_model(arm, seed, scores[model.name], families, peers):
                found.setdefault((result.dataset, result.metric), []).append(result)
        results[arm] = list(map(pool, found.values()))
    by_name = {arm.name: own for arm, own in results.items()}
    for arm in place_arms(results):
        yield from (replace(result, arm=arm) for result in by_name[arm.name])


def refuse_mixtures(scores: Mapping[str, ScoreSet]) -> None:
    """Raises `InputError` where a model's scores on a task were made with different settings, or those of all models
    on different data: they are no samples of one thing, and no difference between them is one between models."""
    by_task: dict[str, list[Score]] = {}
    for found in scores.values():
        own: dict[str, list[Score]] = {}
        for score in found.scores:
            own.setdefault(score.task, []).append(score)
        for task, some in own.items():
            first = some[0]
            other = next((one for one in some if (one.model, one.model_hash) != (first.model, first.model_hash)), None)
            if other is not None:
                raise InputError(
                    f"{first.folder} and {other.folder} are scores of different models, {first.model} and "
                    f"{other.model}, in the folder of one: remove the one that does not belong there"
                )
            refuse_differing(some, differing([settings_of(score) for score in some]))
            by_task.setdefault(task, []).extend(some)
    for some in by_task.values():
        changed = differing([settings_of(score) for score in some])
        refuse_differing(some, [key for key in changed if key in TASK_SETTINGS])


def refuse_differing(scores: Sequence[Score], changed: Sequence[str]) -> None:
    """Raises `InputError` where settings have changed among scores; it names a cell for each value of the first."""
    if not changed:
        return
    key, cells = changed[0], dict[str, Score]()
    for score in scores:
        cells.setdefault(settings_of(score)[key], score)
    cells.pop(UNKNOWN_DATA, None)
    shown = " and ".join(f"{value} ({score.folder})" for value, score in cells.items())
    pinned = " or pin it with evaluation.finetune.precision" if key == "precision" else ""
    raise InputError(
        f"scores on {scores[0].task} were made with different {key}, {shown}: delete the folders of all but one"
        f"{pinned}, and run the study again"
    )


def collect_model(
    arm: ReportArm, pretraining_seed: int | None, found: ScoreSet, families: Mapping[str, str], peers: Sequence[Score]
) -> Iterator[Result]:
    """A model's results on every task, by both metrics. Test examples are known for the metric that chose the rate.

    `peers` are the scores of the arm's other pretraining seeds, which choose the rate for a single fine-tuning seed.

    Random weights beside several pretraining seeds have none: each fine-tuning draws them anew, and so repeats what a
    pretraining seed repeats. They are numbered below zero, for they share nothing with an arm's that could be paired.
    """
    for task in found.tasks:
        (name,) = (model for model in found.models if (model, task) in found.cells)  # by `refuse_mixtures`
        family = families[task]
        own = next(iter(found.cells[name, task].values())).metric
        for kind, metric in (("standard", own), ("paper", PAPER_METRICS.get(family))):
            if metric is None:
                continue
            try:
                own_peers = [score for score in peers if score.task == task]
                chosen = select_rate(found, name, task, metric, is_papers_way=kind == "paper", peers=own_peers)
            except InputError:
                continue  # diverged everywhere: told as missing
            yield measured(
                arm,
                family,  # type: ignore[arg-type]
                task,
                kind,  # type: ignore[arg-type]
                chosen.test,
                chosen.test_by_rate,
                chosen.seeds,
                [-1 - seed if pretraining_seed is None else pretraining_seed for seed in chosen.seeds],
                chosen.examples if metric == own else None,
                num_runs=len(found.cells[name, task]),
                num_diverged=chosen.num_diverged,
                measure=metric,
                choice=chosen.choice,
            )


def find_bm25(scores: dict[str, ScoreSet]) -> dict[str, float]:
    """What BM25 scores on the tasks that search, by their names."""
    cells = [score for found in scores.values() for score in found.scores]
    return {score.task: score.metrics["test"][BM25] for score in cells if BM25 in score.metrics.get("test", {})}


def read_evidence(folder: Path) -> list[Evidence]:
    """What the study in a folder says of curricula. Raises `InputError` when it says nothing yet."""
    if not (folder / "study.yaml").exists():
        raise InputError(f"{folder} is not the folder of a study (it has no study.yaml); give what study run wrote")
    evidence = compare_curricula(plan_study(load_study(folder / "study.yaml")), StudyFolder(folder))
    if not evidence:
        raise InputError(f"{folder} has no curriculum with a score on every task yet; finish it with study run")
    return evidence


def compare_curricula(plan: Plan, place: StudyFolder) -> list[Evidence]:
    """How the curricula of a study did: mean test score in % over all tasks, at the largest budget of the network that
    has most of them. Left out are arms with a task missing and curricula that have no short form."""
    results = list(collect_results(plan, read_state(plan, place).scores))
    tasks = {result.dataset for result in results}
    scores = {(r.arm.name, r.dataset): r for r in results if r.metric == "standard"}
    tables = {table.name for table in plan.study.curricula}
    found: dict[tuple[str, int], dict[str, Terms]] = {}
    for arm in plan.of_first_seed.arms.values():
        own = [scores[arm.name, task] for task in tasks if (arm.name, task) in scores]
        if arm.parent is None and not arm.settings and arm.curriculum not in tables and len(own) == len(tasks) > 0:
            terms: Terms = [(1 / len(own), score) for score in own]
            found.setdefault((arm.model, arm.recipe.tokens_before(arm.recipe.num_steps)), {})[arm.curriculum] = terms
    if not found:
        return []
    network, tokens = max(found, key=lambda spot: (len(found[spot]), spot[1]))
    return [replace(item, tokens=tokens) for item in weigh_evidence(found[network, tokens])]


def weigh_evidence(curricula: Mapping[str, Terms]) -> list[Evidence]:
    """Curricula with their mean scores as weighted sums, each told apart from the best that makes an encoder or not, by
    the test of all verdicts: over seeds of pretraining and fine-tuning and over test examples, as far as they are
    known."""
    means = {name: seed_interval(terms) for name, terms in curricula.items()}
    found = [Evidence(name, 100 * mean.value, 100 * mean.half_width) for name, mean in means.items()]
    encoders = [item for item in found if item.objectives[-1] != "clm"] or found
    best = curricula[max(encoders, key=lambda item: item.mean).curriculum]
    return [
        replace(item, is_behind=contrast(combine((1, best), (-1, curricula[item.curriculum]))).side == "above")
        for item in found
    ]


def arm_of_model(plan: Plan, model: EvaluatedModel, sizes: Sizes) -> ReportArm:
    """A model as the paper would describe it; the pretraining seeds of one arm are described alike."""
    arm = plan.arms[model.arm]
    above = None if arm.parent is None else plan.arms[arm.parent].pooled_name
    if model.kind == "random":
        return ReportArm(model.name, "control", arm.model, "none", None, pretrain_steps=0, clm_steps=0, mlm_steps=0)
    phases = history(plan, model)
    parent = None if arm.parent is None else next(other for other in plan.models if other.name == arm.parent)
    before = () if parent is None else history(plan, parent)
    num_before = sum(phase.steps for phase in before)
    pretraining, rest = before or phases, arm.recipe.curriculum if before else ()
    clm_steps = 0.0
    for phase in pretraining:
        clm_steps += sum(phase.steps * share for part, share in phase.parts if part.objective == "clm")
    clm = round(clm_steps)
    mlm = sum(phase.steps for phase in pretraining) - clm
    later = sum(phase.steps for phase in phases) - num_before if parent is not None else 0
    masks = [phase.mask_at(1) for phase in phases if phase.objective != "clm"]
    is_intermediate = model.kind == "intermediate"
    # The paper has CLM, MLM, or CLM and then MLM; and MLM that continues one of these.
    kinds, later_kinds = ([part.objective for p in some for part, _ in p.parts] for some in (pretraining, rest))
    is_constant = all(not phase.is_ramped and phase.mask_passes == 1 for phase in phases)
    is_as_usual = is_constant and isinstance(arm.recipe.batch_tokens, int) and not arm.settings
    has_usual_recipe = arm.recipe_key == plan.usual_recipes.get((arm.model, arm.parent is not None))
    is_of_the_paper = kinds in (["clm"], ["mlm"], ["clm", "mlm"]) and later_kinds in ([], ["mlm"]) and is_as_usual
    return ReportArm(
        name=model.pooled_name,
        setup="efficiency" if is_intermediate else "objective" if is_of_the_paper else "other",
        size=arm.model,
        objective="clm" if not mlm else "mlm" if not clm else "clm+mlm",
        mask_percent=round(100 * masks[-1]) if masks else None,
        pretrain_steps=clm + mlm,
        clm_steps=clm,
        mlm_steps=mlm,
        cpt_steps=later,
        parent=arm.pooled_name if is_intermediate else above,
        is_plain=is_of_the_paper and has_usual_recipe,
        flops=sum_runs(plan, model, lambda run, end: sum(sizes.flops(run, end).values())),
        tokens=sum_runs(plan, model, count_tokens),
    )


def count_tokens(run: PlannedRun, end: int) -> float:
    """The tokens of its own steps up to `end`: its parent may have had other batches."""
    return float(run.recipe.tokens_before(end) - run.recipe.tokens_before(run.first))


def sum_runs(plan: Plan, model: EvaluatedModel, cost: Callable[[PlannedRun, int], float | None]) -> float | None:
    """What all training of a model cost, from the beginning to its step, its parents' included; None where the cost of
    a run up to a step is not known."""
    total, name, end = 0.0, model.run, model.step
    while True:
        run = plan.runs[name]
        spent = cost(run, end)
        if not spent:
            return None
        total += spent
        if run.parent is None:
            return total
        name, end = run.parent, run.first
