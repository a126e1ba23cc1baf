"""Fresh processes that need not load modules: each call is a fork of one process that has loaded them.

`Forks("import biphase.hub", environment).run("import biphase.hub; print(biphase.hub.FILES)").stdout`. What modules read
of the environment while they are loaded is that of `Forks`; what they read later may be given to each call.
"""

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

SECONDS = 240
"""After so long a call is ended by SIGALRM."""


class Forks:
    """A process that runs `imports` first, and a fork of it for each call."""

    def __init__(self, imports: str, environment: Mapping[str, str]) -> None:
        command = [sys.executable, __file__, imports]
        self.server = subprocess.Popen(command, env=dict(environment), stdin=-1, stdout=-1, text=True)

    def close(self) -> None:
        self.server.communicate()

    def run(self, code: str, *words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        """Run code to its end, as `python -c CODE WORDS` would."""
        assert self.server.stdin is not None and self.server.stdout is not None
        with TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            call = {"code": code, "words": words, "environment": environment, "out": str(out), "err": str(err)}
            self.server.stdin.write(json.dumps(call) + "\n")
            self.server.stdin.flush()
            returncode = int(self.server.stdout.readline())
            return subprocess.CompletedProcess(words, returncode, out.read_text(), err.read_text())


def run_call(code: str, words: list[str], environment: dict[str, str], out: str, err: str) -> NoReturn:
    """What a fork does: the rest of its life."""
    signal.alarm(SECONDS)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT), 2)
    os.environ.update(environment)
    sys.argv = ["-c", *words]
    returncode = 0
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit as error:
        returncode = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        returncode = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(returncode)


if __name__ == "__main__":
    exec(sys.argv[1])
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run_call(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
