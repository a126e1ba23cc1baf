"""What decides a result: two configurations that ask for the same become one."""

import pytest

from biphase.finetuning.config import FAMILY_SETTINGS, QA_HEAD_SETTINGS, FinetuneConfig, settle_config
from biphase.tasks.spec import find_task

ODD = FinetuneConfig(head_dropout=0.5, doc_stride=7, max_answer_tokens=9, scale=5.0, judged_only=False)
"""Every setting of one family only, but for `qa_head`, away from its default."""


@pytest.mark.parametrize(
    ("task", "head", "kept"),
    [
        ("sst2", "token", set()),
        ("conll2003", "token", {"head_dropout"}),
        ("squad", "span", {"doc_stride", "max_answer_tokens"}),
        ("squad", "token", {"head_dropout", "max_answer_tokens", "qa_head"}),
        ("nq", "token", {"scale", "judged_only"}),
    ],
)
def test_what_does_not_matter_stands_at_its_default(task: str, head: str, kept: set[str]) -> None:
    asked = ODD.model_copy(update={"qa_head": head, "seed": 3})
    settled = settle_config(asked, find_task(task), 10**6)
    defaults = FinetuneConfig(seed=3)
    assert {key for key, value in settled if value != getattr(defaults, key)} == kept
    assert all(getattr(settled, key) == getattr(asked, key) for key in kept)
    assert settle_config(settled, find_task(task), 10**6) == settled


def test_no_more_tokens_than_positions() -> None:
    assert [settle_config(FinetuneConfig(), find_task("sst2"), limit).max_length for limit in (512, 10**6)] == [
        512,
        2028,
    ]
    assert settle_config(FinetuneConfig(max_length=100), find_task("sst2"), 512).max_length == 100


def test_the_table_names_settings() -> None:
    named = {name for names in (*FAMILY_SETTINGS.values(), *QA_HEAD_SETTINGS.values()) for name in names}
    assert named <= FinetuneConfig.model_fields.keys()
