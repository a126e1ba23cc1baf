"""The folder `results/` of the paper's authors, simulated: their names and layout, with scores that are known to differ
or not.

    python tests/simulated_cells.py FOLDER

writes one on the scale of the real folder: 18,483 cells with as many examples as the real data sets have (4 GB).
"""

import json
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path

import numpy as np
from scipy.special import ndtri

from biphase.report.encodeval import parse_model
from biphase.report.paper import read_findings, read_reference
from biphase.report.results import ReportArm

RATES = ("1e-05", "2e-05", "5e-05", "1e-04", "2e-04", "5e-04")
SIZES = {"sst2": (3367, 872), "qqp": (18193, 40430), "mnli_m": (19635, 9815), "conll2003_en": (3250, 3453)}
SIZES |= {"ontonotes": (8528, 8262), "uner_en": (2001, 2077), "squad": (4380, 10570), "squad_v2": (6516, 11873)}
SIZES |= {"record": (5036, 10000), "nq": (1726, 1726), "msmarco": (6980, 43), "mldr_en": (200, 800), "qed": (387, 739)}
"""Task → its numbers of validation and test examples."""
NAMES = {"SC": "sst2 qqp mnli_m", "TC": "conll2003_en ontonotes uner_en", "QA": "squad squad_v2 record qed"}
NAMES |= {"IR": "nq msmarco mldr_en"}
FAMILIES = {task: family for family, tasks in NAMES.items() for task in tasks.split()}
MODELS = [*dict.fromkeys(arm.name for arm in read_reference().arms)]
MODELS += [f"610m-clm-40k-mlm{mask}-42k" for mask in (20, 30, 40, 50)]
NUM_CELLS = 18_483

Truth = Callable[[ReportArm, str], float]
"""The score of a model on a family (as a share) at its best rate, without noise."""


def write_cells(
    folder: Path,
    truth: Truth,
    *,
    models: Sequence[str] = MODELS,
    sizes: Mapping[str, tuple[int, int]] = SIZES,
    rates: Sequence[str] = RATES,
    num_seeds: int = 5,
    seed: int = 0,
    holes: Iterable[tuple[str, str, str, int]] = (),
    seed_noise: float = 0.004,
    clm_slope: float = 0.01,
    mlm_slope: float = 0.01,
) -> int:
    """Write a cell for each model, task, rate and seed but `holes`; return their number.

    A score is best at 5e-5, and falls by `clm_slope` or `mlm_slope` times the squared distance in powers of ten. Each
    seed of a cell adds noise with the standard deviation `seed_noise`. An example has the same difficulty for all
    models, except on nq, whose questions are new in each cell.
    """
    left_out, num = {*holes}, 0
    for name, (task, numbers) in product(models, sizes.items()):
        arm, family = parse_model(name), FAMILIES[task]
        assert arm
        slope = clm_slope if arm.objective == "clm" and not arm.cpt_steps else mlm_slope
        for rate, run in product(rates, range(num_seeds)):
            if (name, task, rate, run) in left_out:
                continue
            rng = np.random.default_rng([seed, *(zlib.crc32(text.encode()) for text in (name, task, rate)), run])
            score = truth(arm, family) - slope * np.log10(float(rate) / 5e-5) ** 2 + rng.normal(0, seed_noise)
            splits = {}
            for number, split in zip(numbers, ("validation", "test"), strict=True):
                drawn = [seed, zlib.crc32(f"{task} {number}".encode())]
                drawn += [zlib.crc32(f"{name} {rate} {run}".encode())] if task == "nq" else []
                difficulty_N = np.random.default_rng(drawn).normal(size=number)
                splits[split] = draw_examples(score, difficulty_N, rng, has_parts=family != "SC")
            path = folder / name / family / task / f"{'msmarco_pairs_' * (family == 'IR')}lr{rate}_sd{run}/results.json"
            path.parent.mkdir(parents=True)
            path.write_text(write_cell(splits, family))
            num += 1
    return num


def draw_examples(score: float, difficulty_N: np.ndarray, rng: np.random.Generator, has_parts: bool) -> np.ndarray:
    """Draw the scores of examples, whose expected mean is `score`: 0 or 1, and if it `has_parts`, a number between them
    for a third of the others."""
    share = (score - 1 / 6) / (1 - 1 / 6) if has_parts else score
    number = len(difficulty_N)
    is_right_N = np.sqrt(0.5) * (difficulty_N + rng.normal(size=number)) < ndtri(min(max(share, 0.001), 0.999))
    parts_N = (rng.random(number) < 1 / 3) * rng.integers(1, 1000, number) / 1000
    return np.where(is_right_N, 1.0, parts_N * has_parts)


WORDS = np.array(
    [json.dumps(number / 1000 / 1.0000000001 if 0 < number < 1000 else number / 1000) for number in range(1001)]
)
"""The texts of numbers, most of them with 16 digits, as in the authors' files."""


def write_cell(splits: Mapping[str, np.ndarray], family: str) -> str:
    """Write a file as `json.dumps` with an indent of 4 does, which would take long for so many."""
    texts = []
    for split, values_N in splits.items():
        words = WORDS[np.round(1000 * values_N).astype(int)].tolist()
        lines = [word.removesuffix(".0") for word in words] if family == "SC" else words
        examples = ",\n            ".join(lines)
        score = json.dumps(float(np.mean(np.array(words, dtype=float))))
        inner = f'        "score": {score},\n        "scores_i": [\n            {examples}\n        ]\n'
        texts.append(f'    "{split}": {{\n{inner}    }}')
    return "{\n" + ",\n".join(texts) + "\n}"


PUBLISHED = read_reference().scores


def published_score(arm: ReportArm, family: str) -> float:
    """The paper's average, or for the four models in none of its tables that of 610m-clm-32k-mlm40-42k."""
    return PUBLISHED.get(arm.name, PUBLISHED["610m-clm-32k-mlm40-42k"])[family].mean


def main() -> None:
    cells = list(product(MODELS, SIZES, ("5e-04",), range(5)))
    num_holes = len(MODELS) * len(SIZES) * len(RATES) * 5 - NUM_CELLS
    holes = [cells[index] for index in np.random.default_rng(0).permutation(len(cells))[:num_holes]]
    print(write_cells(Path(sys.argv[1]), published_score, holes=holes, clm_slope=0.005, mlm_slope=0.02))


if __name__ == "__main__":
    assert {*read_findings()["tasks"]} == SIZES.keys() - {"qed"}
    main()
