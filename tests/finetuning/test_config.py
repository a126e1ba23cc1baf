"""What decides a result: two configurations that ask for the same become one."""

from typing import Literal, get_args, get_origin, get_type_hints

import pytest
from pydantic import TypeAdapter

from biphase.errors import InputError
from biphase.finetuning.config import PAPER_SEARCH, FinetuneConfig, FinetuneSettings, GridSettings, settle_config
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
    defaults = FinetuneConfig(seed=3, **PAPER_SEARCH)
    assert {key for key, value in settled if value != getattr(defaults, key)} == kept
    assert all(getattr(settled, key) == getattr(asked, key) for key in kept)
    assert settle_config(settled, find_task(task), 10**6) == settled


def test_a_cross_encoder_has_no_templates() -> None:
    """A template is refused, unless it is the one that each task has for embeddings."""
    config, task = FinetuneConfig(ranking="pairs"), find_task("nq")
    assert settle_config(config, task, 512).ranking == "pairs"
    own = task.model_copy(update={"query_template": "query: {text}", "document_template": "passage: {text}"})
    told = "ranking=pairs reads .* as they are, .*: leave query_template and document_template out of nq"
    with pytest.raises(InputError, match=told):
        settle_config(config, own, 512)
    assert settle_config(FinetuneConfig(), own, 512).ranking == "embeddings"


def test_no_more_tokens_than_positions() -> None:
    assert [settle_config(FinetuneConfig(), find_task("sst2"), limit).max_length for limit in (512, 10**6)] == [
        512,
        2028,
    ]
    assert settle_config(FinetuneConfig(max_length=100), find_task("sst2"), 512).max_length == 100


def test_what_is_settled_are_settings() -> None:
    for task in ("sst2", "conll2003", "squad", "nq"):
        assert (
            settle_config(FinetuneConfig(), find_task(task), 512).__dict__.keys() == FinetuneConfig.model_fields.keys()
        )


def test_only_the_papers_tasks_search_judged_documents_and_short_answers_unasked() -> None:
    found, asked = find_task("msmarco"), find_task("squad")
    assert settle_config(FinetuneConfig(), found, 512).judged_only is True
    assert settle_config(FinetuneConfig(), found.model_copy(update={"name": "mine"}), 512).judged_only is False
    assert settle_config(FinetuneConfig(), find_task("cranfield"), 512).judged_only is False
    assert settle_config(FinetuneConfig(), asked, 512).max_answer_tokens == 30
    assert settle_config(FinetuneConfig(), asked.model_copy(update={"name": "mine"}), 512).max_answer_tokens is None


def test_python_names_each_setting_with_its_type() -> None:
    """`finetune` and `evaluate` name their settings for editors; the names and types are those of the configuration."""
    fields = FinetuneConfig.model_fields
    assert FinetuneSettings.__annotations__.keys() == fields.keys()
    assert fields.keys() - GridSettings.__annotations__.keys() == {"learning_rate", "seed"}
    for name, kind in get_type_hints(FinetuneSettings).items():
        default = fields[name].default
        assert TypeAdapter(kind).validate_python(default, strict=True) == default, name
        assert (type(None) in get_args(kind)) == (type(None) in get_args(fields[name].annotation)), name
        if get_origin(fields[name].annotation) is Literal:
            assert kind == fields[name].annotation, name
