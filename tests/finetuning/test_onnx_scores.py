"""What onnxruntime predicts for the test split with the file of a kept model is what was scored when it was trained."""

import json
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")

from biphase.deploying.onnx import ONNX_FILE, OnnxNetwork, write_onnx
from biphase.deploying.worth import find_task_data
from biphase.hub import load_model_config

from .conftest import fit_cell, make_cell


@pytest.mark.slow
@pytest.mark.minutes
@pytest.mark.parametrize(
    "task, settings",
    [("snli", {}), ("wnut17", {}), ("squad_v2", {"max_length": 128}), ("squad_retrieval", {"ranking": "pairs"})],
)
def test_a_file_predicts_what_was_scored(
    task: str, settings: dict, model_folder: Path, data_dirs: dict[str, Path], tmp_path: Path
) -> None:
    config, kept = make_cell(task, **settings).config, tmp_path / "kept"
    score = fit_cell(str(model_folder), task, config, tmp_path / "scores", data_dirs[task], keep=kept)
    write_onnx(kept)
    scored = find_task_data(kept, data_dirs[task])
    assert scored is not None
    rows = scored.judge(OnnxNetwork(kept / ONNX_FILE, load_model_config(kept)))
    assert score.folder is not None
    lines = [json.loads(line) for line in (score.folder / "test.jsonl").read_text().splitlines()]
    for key in ("id", "predicted", "score"):
        assert [row.get(key) for row in rows] == [line.get(key) for line in lines]
