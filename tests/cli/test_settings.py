"""`biphase settings`: what is listed of the classes that commands read."""

import json
from typing import get_args

import pytest

from biphase.cli.app import run_command
from biphase.cli.settings import CLASSES, Subject, find_settings
from biphase.errors import InputError
from biphase.finetuning.config import FinetuneConfig
from biphase.recipe import Lora


@pytest.mark.parametrize("subject", get_args(Subject))
def test_every_key_of_a_class_is_listed_once(subject: Subject) -> None:
    sections = find_settings(subject)
    assert sections[0].title == "" and len({section.title for section in sections}) == len(sections)
    for section in sections:
        keys = [one.key for one in section.settings]
        assert keys and len({*keys}) == len(keys)
    assert CLASSES.keys() == {*get_args(Subject)}


def test_settings_of_a_fine_tuning_have_meanings_and_defaults() -> None:
    section, adapters = find_settings("finetune")
    assert adapters.title == "lora" and [one.key for one in adapters.settings] == [*Lora.model_fields]
    found = {one.key: one for one in section.settings}
    assert found.keys() == FinetuneConfig.model_fields.keys()
    assert all(one.meaning for one in found.values())
    assert (found["learning_rate"].value, found["learning_rate"].default) == ("number > 0", "`5e-5`")
    assert (found["frozen"].value, found["frozen"].default) == ("true or false", "`false`")
    assert found["shots"].default == ""


def test_a_word_chooses_a_section_or_the_keys_that_contain_it() -> None:
    (schedule,) = [section for section in find_settings("pretrain", "schedule") if section.title == "schedule"]
    assert [one.key for one in schedule.settings] == ["peak_lr", "warmup_steps", "decay_steps"]
    (rate,) = find_settings("pretrain", "schedule.peak_lr")
    assert [one.key for one in rate.settings] == ["peak_lr"]
    section, adapters = find_settings("finetune", "Dropout")
    assert {one.key for one in section.settings} == {"head_dropout", "head", "seed"}
    assert [one.key for one in adapters.settings] == ["lora_dropout"]
    with pytest.raises(InputError, match="no setting of embed contains 'xyz'; `biphase settings embed` lists all"):
        find_settings("embed", "xyz")


def test_settings_on_a_terminal_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    run_command(["settings", "study", "hypotheses"])
    shown = capsys.readouterr().out
    assert "hypotheses:\n  name  (text · required)\n" in shown
    assert max(map(len, shown.splitlines())) <= 100
    run_command(["settings", "pretrain", "peak_lr", "--format", "json"])
    (section,) = json.loads(capsys.readouterr().out)
    (one,) = section["settings"]
    assert one["key"] == "peak_lr" and one["meaning"].startswith("The learning rate between")
