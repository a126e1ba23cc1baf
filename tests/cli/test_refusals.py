"""Mistakes that can be seen without PyTorch are told before it is loaded, which takes seconds."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from biphase.corpus.prepare import prepare
from biphase.corpus.tokenizer import save_tokenizer, train_tokenizer

from ..conftest import mostly_later, write_manifest

COMMANDS = """
pretrian tiny                                     | pretrian
pretrain                                          | RECIPE
prepare text.txt --outt made                      | --outt
doctor --format xml                               | Invalid value "xml" for --format
init task --family poem                           | Invalid value "poem" for --family
inspect nowhere                                   | model nowhere is not a folder here
tokenizer train text.txt --out full               | full has files that biphase did not write
tokenizer from full --out made                    | tokenizer full has no tokenizer files
prepare text.txt --tokenizer full --out made      | tokenizer full has no tokenizer files
pretrain nowhere.yaml                             | nowhere.yaml does not exist
pretrain tiny schedule.peak_rl=1e-3               | unknown key 'schedule.peak_rl'; did you mean 'peak_lr'?
pretrain tiny schedule.warmup_steps=9999          | do not fit into
pretrain tiny data.shards=full                    | full is not a shard set
pretrain tiny data.shards=shards init.preset=2m   | unknown preset '2m'
pretrain adapt.yaml                               | model ../nowhere: there is no such folder
export full made                                  | full is not a run folder
export run@7 made                                 | run has no checkpoint '@7'
export run full                                   | full is not an empty folder
export run made --to-hub name                     | name is not a repository name
export run made --to-hub a/b --language en        | the card of run has no license: give --license, or
trim full --text text.txt --out made              | full has no config.json
trim encoder --text nowhere.txt --out made        | nowhere.txt does not exist
trim encoder --text text.txt --out full           | full is not an empty folder
push full user/name                               | full is not a model folder
convert encoder full                              | full has files that biphase did not write
finetune full genre                               | full has no config.json
finetune encoder genre --keep full                | full is not an empty folder
finetune encoder snli --data-dir full             | full: task 'snli' needs train.jsonl
predict encoder text.txt                          | fine-tune it first: `biphase finetune encoder TASK --keep FOLDER`
predict kept table.csv                            | no column 'text'; the columns are: a, c; rename the column that
predict table.csv kept                            | does not take here; try `biphase predict MODEL table.csv`
predict encoder.index table.csv                   | did you mean 'encoder'?
tokenizer compare table.csv full                  | tokenizer full has no tokenizer files
score shards table.csv                            | shards is a folder of shards, which `biphase score` does not take
finetune encoder table.csv                        | does not take here; try `biphase init task table.csv`
finetune encoder genre --seed 3                   | Settings are words without dashes: seed=…
evaluate encoder genre                            | try `biphase evaluate MODEL --tasks genre`
export encoder made                               | encoder is a model folder already: with --onnx, --gguf or --as
pretrain mini                                     | mini is a study, which `biphase pretrain` does not take here; try
pretrain encoder                                  | try `biphase init recipe --model encoder`
embed adapt.yaml                                  | adapt.yaml is a recipe, which `biphase embed` does not
study plan adapt.yaml                             | try `biphase pretrain adapt.yaml`
study run nosuch                                  | nosuch is neither a file nor one of the bundled studies; known:
predict kept text.txt --out new.ods               | new.ods: name a .jsonl, .parquet, .csv, .tsv or .xlsx file
predict kept full                                 | full is a folder; name a file of rows in it
predict kept text.txt --template {a}              | leave --template out
evaluate full --tasks genre                       | full has no config.json
evaluate encoder --tasks zero-shot:nowhere        | nowhere does not exist
evaluate ../nowhere --tasks zero-shot:full        | nowhere is neither a run
embed embed.yaml model=full                       | full has no config.json
embed embed.yaml out=full                         | full has files that biphase did not write
embed embed.yaml stages.0.data.0.path=no.csv      | no.csv does not exist
embed embed.yaml stages.0.data.0.columns=[a,b]    | no column 'b'; it has a, c
embed embed.yaml evaluation=[nowhere]             | evaluation: nowhere does not exist
search nowhere.txt asked --model encoder          | nowhere.txt does not exist
search text.txt asked --where year --model encoder | where 'year': give a column and a value
search text.txt                                   | no question is given: give one, or a file of them as questions
search text.txt --questions blank.txt             | blank.txt has no question
search text.txt asked --rerank encoder            | which has no head with one score for a pair of texts
search text.txt asked --by words                  | Invalid value "words" for --by
search text.txt asked --where a b                 | 'b': too many words; put quotes around a value with blanks
settings prepare                                  | Its options are in `biphase prepare -h`
tokenizer trian text.jsonl --out t                | Did you mean "train"
search text.txt asked --model full                | full has no config.json
search text.txt asked --model encoder --index full | full has files that biphase did not write
study run demo recipe.data.shards=full            | full is not a shard set
study advise --flops 1e15 --recipe table.csv      | table.csv already exists; choose another name
judge nowhere.csv --baseline a --candidate b      | nowhere.csv does not exist
judge table.csv --baseline a --candidate b        | no column 'method'; the columns are: a, c
judge table.csv --baseline a                      | judge: --candidate is missing (see -h)
report results none.csv                           | no rows of scores in none.csv
prepare text.txt --tokenizer tokenizer --out table.csv | table.csv is a file where a folder is needed; fix this
tokenizer train packed.jsonl --out made           | packed.jsonl is gzip (add the ending .gz), not a text
pretrain tiny schedule.steps=6                    | did you mean 'decay_steps', or 'curriculum.0.steps'?
pretrain tiny checkpoints.steps=6                 | did you mean 'every_steps', or 'curriculum.0.steps'?
pretrain tiny schedule.warmup_steps=1,000         | write 1000, without commas
judge table.csv --baseline a --candidate          | judge: --candidate has no value (see -h)
pretrain tiny --schedule.peak_lr=1e-3             | Settings are words without dashes: schedule.peak_lr=…
pretrain tiny schedule.peak_lr=0,001              | decimals have a point, as in 0.001
pretrain tiny name=a/b                            | use letters (a to z, A to Z), digits, dots, dashes
finetune broken genre                             | is not valid JSON (
task check task.yaml                              | give the folder with its data as --data-dir
study plan demo arms.0.curricula=[clm,mlm]        | the line names an unknown arm '40/60'
study run tiny                                    | tiny is a recipe, which `biphase study run` does not take here; try
pretrain tiny tensorboard=true                    | did you mean 'tracking=tensorboard'?
finetune encoder genre class_weights=balance      | give `balanced`, or a mapping of classes to weights
"""

IN_TURN = """
import json, sys
from biphase.cli import app
told = []
for command in json.load(sys.stdin):
    sys.argv = ["biphase", *command.split()]
    try:
        app.main()
    except SystemExit as end:
        code = end.code
    told.append([command, code, "torch" in sys.modules])
    print("---", file=sys.stderr, flush=True)
json.dump(told, sys.stdout)
"""


def fill_folder(folder: Path) -> None:
    """What the commands name: all of it is files, and no network."""
    (folder / "blank.txt").write_text("\n")
    (folder / "text.txt").write_text("The ship of the old captain left the harbour.\n" * 20)
    (folder / "table.csv").write_text("a,c\nx,y\n")
    (folder / "none.csv").write_text("method,score\n")
    (folder / "packed.jsonl").write_bytes(gzip.compress(b"{}"))
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{")
    tokenizer = train_tokenizer(["The ship of the old captain left the harbour."], 300)
    save_tokenizer(tokenizer, folder / "tokenizer")
    prepare([folder / "text.txt"], folder / "tokenizer", folder / "shards", validation_fraction=0.0)
    (folder / "full").mkdir()
    (folder / "full" / "mine").touch()
    (folder / "run" / "steps" / "5").mkdir(parents=True)
    (folder / "run" / "config.yaml").touch()
    write_manifest(folder / "run" / "steps" / "5")
    task = {"name": "mine", "family": "sequence_classification", "metric": "accuracy", "template": "{text}"}
    task |= {"classes": ["a", "b"]}
    (folder / "task.yaml").write_text(yaml.safe_dump(task))
    record = {"task": task, "config": {}}
    for name, kind in (("encoder", "EuroBertForMaskedLM"), ("kept", "EuroBertForSequenceClassification")):
        save_tokenizer(tokenizer, folder / name)
        config = {"architectures": [kind], "model_type": "eurobert", "max_position_embeddings": 64, "pad_token_id": 0}
        (folder / name / "config.json").write_text(json.dumps(config))
        (folder / name / "model.safetensors").touch()
    (folder / "kept" / "biphase.json").write_text(json.dumps(record))
    adapted: dict[str, Any] = {"name": "a", "init": {"model": "../nowhere"}, "data": {"shards": "shards"}}
    curriculum = {"curriculum": [{"objective": "mlm", "steps": 5000}]}
    (folder / "adapt.yaml").write_text(yaml.safe_dump(adapted | curriculum))
    stage = {"name": "s", "data": [{"path": "table.csv"}]}
    embedded = {"name": "e", "model": "encoder", "out": "made", "stages": [stage]}
    (folder / "embed.yaml").write_text(yaml.safe_dump(embedded))


def test_mistakes_are_told_before_pytorch_is_loaded(tmp_path: Path) -> None:
    fill_folder(tmp_path)
    cases = [tuple(part.strip() for part in line.split(" | ")) for line in COMMANDS.strip().splitlines()]
    done = subprocess.run(
        [sys.executable, "-c", IN_TURN],
        input=json.dumps([command for command, _ in cases]),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [part.strip().splitlines() for part in done.stderr.split("---\n")]
    for (command, expected), said, (_, code, is_loaded) in zip(cases, lines, json.loads(done.stdout), strict=False):
        assert code == 2 and expected in said[-1] and said[-1].startswith("biphase: "), f"{command}: {said}"
        assert not is_loaded, f"{command}: PyTorch was loaded before {said[-1]}"
    assert not (tmp_path / "made").exists() and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "words",
    mostly_later(
        ["pretrain tiny data.shards=shards", "finetune encoder genre", "export run made"], "finetune encoder genre"
    ),
)
def test_the_first_line_comes_before_pytorch(words: str, tmp_path: Path) -> None:
    """Loading it takes seconds. What comes before takes less than three of the processor."""
    fill_folder(tmp_path)
    (tmp_path / "torch.py").write_text("import os, time; print(time.process_time(), flush=True); os._exit(0)")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import biphase.cli.app as cli; cli.main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *words.split()], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stderr == f"biphase {words.split()[0]}: loading PyTorch\n"
    assert float(done.stdout) < 3
