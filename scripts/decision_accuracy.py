"""Does the share of CLM that is best at a small budget stay the best at a large one? Decision accuracy, by the scores
of a study whose curricula are the same at several budgets.

    python scripts/decision_accuracy.py study-price_share --out studies/results/price_share/decisions.json

One pretraining seed decides, at a budget; the mean of the others at the largest budget is the truth, so no network and
no order of the data is on both sides. Decision accuracy is the share of pairs of curricula that the two put in the same
order (arXiv 2504.11393). The loss is how many points the curriculum that the seed chose scores less than the
best, by that truth. The line of the largest budget itself says what noise alone leaves.
"""

import argparse
import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from biphase.report.contrasts import with_averages
from biphase.studies.cost import measure_sizes
from biphase.studies.folder import read_state
from biphase.studies.plan import plan_study
from biphase.studies.report import collect_results
from biphase.studies.spec import load_study


def read_scores(folder: Path) -> dict[str, dict[int, dict[str, np.ndarray]]]:
    """Read test scores in points: task or family → steps → curriculum → the scores by pretraining seed, which all
    arms must have alike."""
    plan = plan_study(load_study(folder / "study.yaml"))
    results = with_averages(collect_results(plan, read_state(plan, folder).scores, measure_sizes(plan)))
    scores: dict[str, dict[int, dict[str, np.ndarray]]] = {}
    seeds = np.unique(results.results[0].pretraining_seeds)
    for name, by_task in results.scores.items():
        arm = plan.of_first_seed.arms.get(name)
        if arm and arm.parent is None:
            for task, result in by_task.items():
                by_budget = scores.setdefault(task, {}).setdefault(arm.recipe.num_steps, {})
                if not np.array_equal(np.unique(result.pretraining_seeds), seeds):
                    raise SystemExit(f"{name} on {task} lacks pretraining seeds that others have: finish the study")
                by_budget[arm.curriculum] = 100 * result.repeated
    return scores


def judge_decisions(small: np.ndarray, large: np.ndarray) -> dict[str, Any]:
    """Judge the decisions of each seed at a small budget by the other seeds at the largest.

    Args:
        small, large: scores of the same curricula, of shape (curricula, seeds).
    """
    accuracies, losses, chosen = [], [], []
    for seed in range(small.shape[1]):
        decided, truth = small[:, seed], np.delete(large, seed, axis=1).mean(1)
        pairs = [*combinations(range(len(truth)), 2)]
        accuracies.append(np.mean([(decided[a] > decided[b]) == (truth[a] > truth[b]) for a, b in pairs]))
        chosen.append(int(decided.argmax()))
        losses.append(truth.max() - truth[chosen[-1]])
    return {"accuracy": np.mean(accuracies), "by_seed": accuracies, "loss": np.mean(losses), "chosen": chosen}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder of a study, with two pretraining seeds or more")
    parser.add_argument("--out", type=Path, help="a JSON file")
    arguments = parser.parse_args()
    lines = []
    for task, by_budget in read_scores(arguments.folder).items():
        largest = max(budget for budget, by_curriculum in by_budget.items() if len(by_curriculum) > 1)
        for budget, small in sorted(by_budget.items()):
            shared = [name for name in small if name in by_budget[largest]]
            if len(shared) > 1:
                judged = judge_decisions(
                    np.stack([small[name] for name in shared]), np.stack([by_budget[largest][name] for name in shared])
                )
                chosen = [shared[index] for index in judged.pop("chosen")]
                lines.append({"task": task, "steps": budget, "judged_at": largest, "chosen": chosen, **judged})
                verdict = f"accuracy {judged['accuracy']:4.0%}, loss {judged['loss']:.1f} points"
                print(f"{task:14} {budget:>6,} steps: {verdict}, chosen {', '.join(chosen)}")
    if arguments.out:
        arguments.out.write_text(json.dumps(lines, indent=1, default=float) + "\n")


if __name__ == "__main__":
    main()
