"""How often a loop of experiments that obeys `biphase judge` keeps an idea that is no better, and one that is.

    python scripts/simulate_nights.py --nights 500 --out benchmarks/results/DATE-judge-nights.json

A night tries 100 ideas, one after another. It draws one seed at a time, as the verdict asks. An idea adds its gain to
the score of the baseline of its time: nothing, or, with a share of the ideas, `gain` standard deviations over seeds. A
kept candidate becomes the baseline, and gets as many seeds as the first baseline had.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing import Pool
from pathlib import Path

import numpy as np

from biphase.report.referee import SeedScore, list_looks


@dataclass(frozen=True)
class World:
    """What the loop does, and what chance makes of it."""

    share: float = 0.0
    """The share of ideas that are better."""
    gain: float = 0.0
    """By how many standard deviations over seeds."""
    is_known: bool = True
    """Whether the loop knows the spread, or learns it from the seeds in its table."""
    num_baseline_seeds: int = 8
    up_to: int = 8
    num_ideas: int = 100
    loudness: float = 1.0
    """The standard deviation over seeds of an idea, as a multiple of the baseline's."""


@dataclass(frozen=True)
class Night:
    """What was kept, and what it cost."""

    false_keeps: int
    true_keeps: int
    better: int
    """The ideas that are better."""
    seeds_of_better: int
    seeds_of_others: int


def live_through(world: World, seed: int) -> Night:
    """Simulate a night."""
    rng = np.random.default_rng(seed)
    gains = np.where(rng.random(world.num_ideas) < world.share, world.gain, 0.0)
    baseline, level, begin = "baseline", 0.0, -1
    seeds = [SeedScore(baseline, value) for value in rng.normal(level, 1, world.num_baseline_seeds)]
    kept, num_seeds = np.zeros(world.num_ideas, bool), np.zeros(world.num_ideas, int)
    for index, gain in enumerate(gains.tolist()):
        name = f"idea {index}"
        while True:
            seeds.append(SeedScore(name, rng.normal(level + gain, world.loudness)))
            spread = 1.0 if world.is_known else None
            *_, ruling = list_looks(seeds, baseline, name, index - begin, world.up_to, spread)
            if ruling.verdict != "one more seed":
                break
        num_seeds[index] = ruling.num_seeds
        if ruling.verdict == "keep":
            kept[index], baseline, level, begin = True, name, level + gain, index
            lacking = max(world.num_baseline_seeds - ruling.num_seeds, 0)
            seeds += [SeedScore(name, value) for value in rng.normal(level, world.loudness, lacking)]
    is_better = gains > 0
    return Night(
        int(kept[~is_better].sum()),
        int(kept[is_better].sum()),
        int(is_better.sum()),
        int(num_seeds[is_better].sum()),
        int(num_seeds[~is_better].sum()),
    )


def summarize_nights(world: World, nights: list[Night]) -> dict[str, float | int | bool | None]:
    """Return the shares of wrong and right verdicts over all nights."""
    false, true, better, of_better, of_others = (
        np.array([getattr(night, name) for night in nights]) for name in Night.__dataclass_fields__
    )
    others = len(nights) * world.num_ideas - better.sum()
    return asdict(world) | {
        "nights": len(nights),
        "nights_with_a_false_keep": float((false > 0).mean()),
        "false_keeps": int(false.sum()),
        "true_keeps": int(true.sum()),
        "false_discovery_rate": float((false / np.maximum(false + true, 1)).mean()),
        "false_keeps_of_all_and_one": float(false.mean() / ((false + true).mean() + 1)),
        "power": float(true.sum() / better.sum()) if better.sum() else None,
        "seeds_of_a_better_idea": float(of_better.sum() / better.sum()) if better.sum() else None,
        "seeds_of_another_idea": float(of_others.sum() / others),
    }


def list_worlds() -> Iterator[World]:
    for is_known in (True, False):
        for num in (8, 16):
            yield World(is_known=is_known, num_baseline_seeds=num)
            for gain in (1.5, 2.0, 3.0):
                yield World(0.1, gain, is_known, num)
    for num in (2, 3):
        yield World(is_known=False, num_baseline_seeds=num)
    yield World(up_to=3)
    yield World(0.1, 3.0, up_to=3)
    for loudness in (1.25, 1.5, 2.0):
        yield World(is_known=False, loudness=loudness)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nights", type=int, default=500)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    lines = []
    with Pool(asked.workers) as pool:
        for world in list_worlds():
            nights = pool.starmap(live_through, [(world, seed) for seed in range(asked.nights)], chunksize=20)
            lines.append(json.dumps(summarize_nights(world, nights)))
            print(lines[-1], flush=True)
    if asked.out is not None:
        asked.out.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
