"""Settings of a process, in a process of its own."""

import subprocess
import sys

CODE = """
import atexit, gc
atexit.register(lambda: print(gc.get_freeze_count() > 0))  # the last to be called
from biphase.machine import prepare_process
prepare_process()
before = gc.get_stats()[0]["collections"]
kept = [[] for _ in range(50_000)]
print(gc.get_stats()[0]["collections"] == before)
cycle = []
cycle.append(cycle)
del cycle
print(gc.collect() > 0)
"""


def test_garbage_is_looked_for_rarely_and_not_at_the_end() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * 3
