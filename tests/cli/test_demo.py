"""The demo from end to end, with little training."""

from pathlib import Path

import pytest

from biphase.cli import demo
from biphase.cli.demo import Result, compare_arms, gain, verdict

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


RESULTS = [
    Result("clm", "genre", (60.0, 61.0, 62.0)),
    Result("mlm", "genre", (50.5, 50.0, 52.0)),
    Result("random", "genre", (50.0, 51.0, 51.5)),
]


def test_the_verdict_says_no_more_than_the_intervals() -> None:
    assert gain(RESULTS, "clm", "genre").mean == pytest.approx(61 - 152.5 / 3)
    text = verdict(RESULTS)
    assert "Clearly better than random weights: clm on genre; mlm on no task." in text
    assert "clm leads on genre by 10.2" in text and "more than noise" in text
    better = [Result("mlm", "genre", (60.5, 60.0, 62.5)) if r.model == "mlm" else r for r in RESULTS]
    assert verdict(better).startswith("Pretraining pays: every arm beats random weights on every task")
    assert "within noise" in compare_arms(better)
    noise = [Result(name, "genre", scores) for name, scores in (("clm", (1.0, 9.0, 2.0)), ("random", (3.0, 2.0, 4.0)))]
    noise.insert(1, Result("mlm", "genre", (2.0, 2.0, 2.0)))
    assert verdict(noise).startswith("No gain over random weights is clear of zero")
