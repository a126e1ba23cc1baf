"""The demo from end to end, with little training."""

from pathlib import Path

import pytest

from biphase.cli import demo
from biphase.cli.demo_scores import draw_scores, gain, verdict
from biphase.report.results import ReportArm, Result, measured

SHORT = (
    "arms.0.budgets=[10]",
    "recipe.schedule={peak_lr: 6e-3, warmup_steps: 2, decay_steps: 2}",
    "evaluation.finetune={eps: 1e-8, batch_size: 8, max_train_examples: 64, max_eval_examples: 50}",
    "evaluation.per_task={}",
)


@pytest.mark.slow
def test_the_whole_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "demo"
    demo.run_demo(folder, SHORT)
    out = capsys.readouterr().out
    assert all(word in out for word in ("genre", "uner_en_ewt", "1m-40-60-10", "1m-random", "took"))
    assert (folder / "demo.png").stat().st_size > 10_000
    assert len(list((folder / "study" / "scores").glob("*/*/score.json"))) == 4 * 2 * 3
    page = (folder / "report" / "index.html").read_text(encoding="utf-8")
    assert "Beside random weights" in page and "biphase demo" in page
    (encoder,) = folder.glob("encoder-*")
    from transformers import AutoModelForMaskedLM

    assert AutoModelForMaskedLM.from_pretrained(encoder).config.model_type == "eurobert"


def results(**scores: tuple[float, ...]) -> dict[tuple[str, str], Result]:
    """Scores in percent of each model on one task; random weights last."""
    made = {}
    for model, values in scores.items():
        arm = ReportArm(model, "objective", "1m", "clm", None, 10, 10, 0)
        made[model, "genre"] = measured(arm, "SC", "genre", "standard", [value / 100 for value in values])
    return made


RANDOM = (50.0, 51.0, 51.5)


def test_the_verdict_says_no_more_than_the_intervals() -> None:
    clear = results(clm=(60.0, 61.0, 62.0), mlm=(50.5, 50.0, 52.0), random=RANDOM)
    assert 100 * gain(clear, "clm", "genre").estimate == pytest.approx(61 - 152.5 / 3)
    text = verdict(clear)
    assert "Clearly better than random weights: clm on genre; mlm on no task." in text
    assert "clm leads on genre by 10.2" in text and "more than noise" in text
    better = results(clm=(60.0, 61.0, 62.0), mlm=(60.5, 60.0, 62.5), random=RANDOM)
    assert verdict(better).startswith("Pretraining pays: every arm beats random weights on every task")
    assert "within noise" in verdict(better)
    noise = results(clm=(1.0, 9.0, 2.0), mlm=(2.0, 2.0, 2.0), random=(3.0, 2.0, 4.0))
    assert verdict(noise).startswith("No gain over random weights is clear of zero")
    assert "nan" not in verdict(results(clm=(60.0,), mlm=(50.0,), random=(40.0,)))


def test_scores_are_drawn_with_every_seed(tmp_path: Path) -> None:
    draw_scores(results(clm=(60.0, 61.0, 62.0), mlm=(50.5, 50.0, 52.0), random=RANDOM), tmp_path / "demo.png")
    assert (tmp_path / "demo.png").stat().st_size > 10_000
