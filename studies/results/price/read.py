"""Make the archives of price, price_share and price_3m readable: complete the records of runs and hypotheses.

python read.py STUDY FOLDER     for example: python read.py price study-price
"""

import json
import sys
from pathlib import Path

from biphase.files import write_hashed
from biphase.studies.declarations import DECLARED, Declaration, DeclarationRecord, hash_hypotheses
from biphase.studies.folder import study_text
from biphase.studies.plan import plan_study
from biphase.studies.spec import load_study

plan, folder = plan_study(load_study(Path(sys.argv[1]))), Path(sys.argv[2])
(folder / "study.yaml").write_text(study_text(plan.study))
for name, run in plan.runs.items():
    path = folder / "trained" / f"{name}.json"
    record = json.loads(path.read_text())
    assert record["key"] == run.key, f"{name} is not the run of the plan"
    write_hashed(path, record | {"placeless_key": run.placeless_key})
if (folder / DECLARED).exists():
    [entry] = json.loads((folder / DECLARED).read_text())
    assert entry["hash"] == hash_hypotheses(plan), "the hypotheses are not those of the plan"
    assert entry["units_done"] == 0
    declared = Declaration(entry["hash"], entry["when"], plan.study.hypotheses, runs=0, scores=0)
    DeclarationRecord((declared,)).write(folder)
