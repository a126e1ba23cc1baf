"""A slice of the campaign of broken and hostile input: `make fuzz` has the whole."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from fuzzing import LOST, campaign


@pytest.mark.slow
def test_a_slice_of_broken_inputs(tmp_path: Path) -> None:
    """Each ends with the right result or one line: no traceback, no hang, no damage that nobody noticed."""
    made = list(campaign(count=60, seed=0, folder=tmp_path))
    assert len(made) == 60
    lost = [json.dumps(asdict(one)) for one in made if one.outcome in LOST]
    assert not lost, "\n".join(lost)
