"""The demo from end to end, with little training."""

from pathlib import Path

import pytest

from biphase.cli.commands import demo

SHORT = (
    "arms.0.budgets=[10]",
    "recipe.schedule={peak_lr: 3e-3, warmup_steps: 2, decay_steps: 2}",
    "recipe.batch_tokens=512",
    "recipe.validation.tokens=2000",
    "evaluation.finetune={eps: 1e-8, batch_size: 8, precision: fp32, max_train_examples: 16, max_eval_examples: 20}",
    "evaluation.per_task={}",
    "evaluation.seeds=2",
)


@pytest.mark.slow
@pytest.mark.minutes
def test_the_whole_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "demo"
    demo(folder, changes=SHORT)
    out = capsys.readouterr().out
    assert all(word in out for word in ("genre", "uner_en_ewt", "1m-40-60-10", "1m-random", "took"))
    assert out.count(": Pretraining pays, whichever way") == out.count(": CLM followed by MLM beats MLM alone") == 1
    assert "before anything was trained" in out
    assert len(list((folder / "study" / "scores").glob("*/*/score.json"))) == 3 * 2 * 2
    page = (folder / "report" / "index.html").read_text(encoding="utf-8")
    assert "Compared with random weights" in page and "CLM alone is left out" in page
    assert "\nbiphase demo arms.0.budgets=[10]" in page.replace("&#39;", "").replace("'", "")
    assert not any(words in page for words in ("biphase study run", "tokenizer train", str(tmp_path)))
    (encoder,) = folder.glob("encoder-*")
    from transformers import AutoModelForMaskedLM

    assert AutoModelForMaskedLM.from_pretrained(encoder).config.model_type == "eurobert"
