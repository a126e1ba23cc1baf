"""A Ray cluster that this process joins or starts, the division of its nodes, and its workers, each an actor.

Another engine is a module like this one, a name in `units.EngineKind`, and a line in `scheduler.schedule`.
"""

import logging
import os
import pickle
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, chdir, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import Any

from biphase import __version__
from biphase.console import err, silence
from biphase.engine.local import WorkerProcess, end_processes
from biphase.engine.units import Engine, Message, Outcome
from biphase.errors import SOURCE, InputError, StoppedError, told_as
from biphase.files import content_hash, file_hash, is_locked, locked
from biphase.machine import grace, python_process

JOIN_SECONDS = 60.0
"""The longest wait for an answer from an address."""
HEAD_SECONDS = 30.0
"""The longest absence of a cluster's head. After a minute, Ray itself would end this process."""
LAST_SECONDS = 15.0
"""The time that the main thread then has to report the loss itself, because its calls of Ray may wait for the head."""


@contextmanager
def kept_to_this_machine() -> Iterator[None]:
    """Make a cluster that starts in the block listen on the loopback interface only, and require a token.

    By default, Ray listens on all interfaces and runs whatever it receives. biphase sets a random token unless the user
    has configured authentication or loaded Ray before; Ray before 2.52 has no tokens.
    """
    loaded = sys.modules.get("ray")
    variables = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # on all systems: the address of a node is 127.0.0.1
    is_set = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    if not is_set and loaded is None:  # a loaded Ray has already read that there is no token
        variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ.update(variables)
    import ray

    constants: Any = ray._private.ray_constants  # Ray reads the first variable only at its import
    reaches_others = sys.platform == "linux" if loaded is None else constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:  # a cluster that this process joins later has its own token, or none
        for variable in {*variables, "RAY_AUTH_MODE"} - is_set:  # Ray 2.60 also sets the mode
            os.environ.pop(variable, None)
        constants.ENABLE_RAY_CLUSTER = reaches_others
        raylet: Any = ray._raylet
        if hasattr(raylet, "AuthenticationTokenLoader"):  # it caches the variables
            raylet.Config.initialize("")
            raylet.AuthenticationTokenLoader.instance().reset_cache()


def connect_ray(address: str | None) -> None:
    """Join the cluster at an address or at `RAY_ADDRESS`; without either, start one on this machine.

    By default, Ray would join any cluster whose address file it finds, even another user's. Raises `InputError` if no
    cluster answers at the address.
    """
    import ray

    address = address or os.environ.get("RAY_ADDRESS")
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():  # Ray itself would try for minutes
        with told_as(f"no Ray cluster at '{address}'"):
            socket.create_connection((host, int(port)), timeout=10).close()
    if address is not None:
        # First join in a process that can be killed. If something else listens there, Ray tries for minutes, in code
        # that no signal interrupts.
        join = "import sys, ray; ray.init(sys.argv[1], log_to_driver=False, logging_level=40, include_dashboard=False)"
        problem, joining = "", python_process("-c", join, address)
        try:
            subprocess.run(**joining, capture_output=True, text=True, timeout=JOIN_SECONDS, check=True)
        except subprocess.TimeoutExpired:
            problem = f"no answer within {JOIN_SECONDS:.0f} s"
        except subprocess.CalledProcessError as error:
            *_, last = re.split(r"(?m)^(?=[\w.]+(?:Error|Exception): )", error.stderr)  # may have several lines
            problem = last.strip() or f"exit code {error.returncode}"
        if problem:
            reason = f"{shorten(problem, 300)}; use the same versions of Ray and Python on all nodes"
            token = "set RAY_AUTH_MODE=token here and on all nodes, and RAY_AUTH_TOKEN unless ~/.ray/auth_token has it"
            raise InputError(f"no Ray cluster at '{address}': {reason}. If it requires a token, {token}")
    handler = signal.getsignal(signal.SIGTERM)
    problem = f"no Ray cluster at '{address}'" if address else "Ray does not start here"
    with told_as(problem), chdir(os.sep):  # Ray's processes import modules from the folder in which it starts
        ray.init(address=address or "local", log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # `ray.init` replaced it


def divide_nodes(nodes: Sequence[dict[str, float]], engine: Engine, num_units: int) -> tuple[int, int, float]:
    """Divide a cluster: return the number of workers, and the CPUs and GPUs per worker.

    With GPUs, the workers of a node share its CPUs, and the node with the fewest CPUs per worker decides for all.
    Without GPUs, each worker gets as many CPUs as possible while all workers have a place.
    """
    with_gpus = [node for node in nodes if node.get("GPU", 0) >= 1]
    if engine.device != "cpu" and with_gpus:
        gpus_each = engine.devices_per_worker
        with_gpus = [node for node in with_gpus if node["GPU"] >= gpus_each]
        if not with_gpus:
            raise InputError(f"{gpus_each} devices for each worker, but no Ray node has so many GPUs")
        places = [int(node["GPU"]) // gpus_each * engine.workers_per_gpu for node in with_gpus]
        cpus = min(int(node.get("CPU", 0)) // count for node, count in zip(with_gpus, places, strict=True))
        return min(engine.workers or sum(places), num_units), cpus, gpus_each / engine.workers_per_gpu
    if engine.device == "cuda":
        raise InputError(f"device is cuda, but none of the {len(nodes)} Ray nodes has a GPU; use cpu")
    cores = [int(node.get("CPU", 0)) for node in nodes]
    if not sum(cores):
        raise InputError(f"none of the {len(nodes)} Ray nodes offers a CPU; start one with `ray start --num-cpus`")
    workers = min(engine.workers or sum(count // engine.devices_per_worker for count in cores) or 1, num_units)
    fitting = [cpus for cpus in range(1, max(cores) + 1) if sum(count // cpus for count in cores) >= workers]
    return workers, max(fitting, default=1), 0


@dataclass
class Head:
    """A watch over the head of a cluster. A minute after the head is gone, Ray ends this process without saying why.
    The watch says why before that."""

    address: str
    """The HOST:PORT of the head; empty through `ray://`, which hides it."""
    is_there: bool = True
    answered: float = field(default_factory=time.monotonic)
    """The time of its last answer."""
    is_over: threading.Event = field(default_factory=threading.Event)
    """An event for the end of the watch."""

    def watch(self) -> None:
        """Watch from a thread. If the head is gone and the main thread does not report it, end this process."""
        try:
            while not self.is_over.wait(1.0):
                self.look()
        except InputError as error:
            if not self.is_over.wait(LAST_SECONDS):
                err.print(f"biphase: {error}")
                os._exit(2)

    def look(self) -> None:
        """Ask the head for an answer. Raises `InputError` if it has been gone for too long."""
        now = time.monotonic()
        if now < self.answered + 5.0 or not self.address:
            return
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=2.0).close()
            self.answered = now
        except OSError as error:
            if now > self.answered + HEAD_SECONDS:
                raise self.gone(error.strerror or str(error)) from None

    @contextmanager
    def needed(self) -> Iterator[None]:
        """Report errors of the block as the loss of a head with an unknown address (`ray://`), except Ray's errors
        about a worker."""
        import ray

        try:
            yield
        except (InputError, StoppedError, ray.exceptions.RayError):
            raise
        except Exception as error:  # Ray's client and gRPC have many error types for it
            if not self.address:
                raise self.gone(str(error)) from None
            raise

    def gone(self, reason: str) -> InputError:
        self.is_there = False
        lost = f"the head of the Ray cluster at {self.address}" if self.address else "the Ray cluster"
        remedy = "finished work is kept: start a cluster and run the same command again"
        return InputError(f"{lost} is gone ({shorten(reason, 200)}); {remedy}")


SEEN_SECONDS = 10.0
"""The longest time until a node sees a file of this command."""
PLACE_SECONDS, LEFT_SECONDS = 30.0, 300.0
"""The wait for a place in the cluster until a message, and until the end of the run if no remaining node has room. New
nodes may arrive in the meantime."""


class RayWorker(WorkerProcess):
    """A worker process that an actor starts on its node, in the current folder of this command.

    On a node without the code or the files of this command, it sends a refusal and starts nothing.
    """

    def __init__(self, threads: int, gpus: str | None, current: str, code: str, mark: str | None) -> None:
        """
        Args:
            current: the current folder of this command.
            code: the `hash_code` of this command.
            mark: a file that exists while this command runs.
        """
        self.refusal = find_difference(current, code, mark)
        if not self.refusal:
            os.chdir(current)
            super().__init__(threads, gpus)

    def node(self) -> str:
        import ray

        return ray.util.get_node_ip_address()

    def receive(self) -> bytes:
        if self.refusal:
            return pickle.dumps(("refused", self.refusal))
        return super().receive()

    def stop(self) -> None:
        """End the process without a line: nobody reads the output of an actor."""
        if not self.refusal:
            silence()
            end_processes([self])


LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
"""The packages whose versions decide the weights and the scores of networks."""


def find_difference(current: str, code: str, mark: str | None) -> str:
    """Return the reason why units would have other results on this node than in this command, or "".

    A shared file system may take some seconds to show a new file on all machines.
    """
    if hash_code() != code:
        versions = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
        unlike = f"has another biphase ({__version__}, {SOURCE}) than this command, or another version of a library"
        return f"{unlike} (it has {versions}): install the same on all nodes"
    if not Path(current).is_dir():
        return f"has no folder {current}, the current folder of this command: run it in a folder that all nodes share"
    deadline = time.monotonic() + SEEN_SECONDS
    while mark is not None and not Path(mark).exists():
        if time.monotonic() > deadline:
            return f"does not see new files in {Path(mark).parent}: choose a folder that all nodes share"
        time.sleep(0.1)
    return ""


def hash_code() -> str:
    """Hash the files of this package, because its version does not change with edits in a working copy, and the
    versions of `LIBRARIES`, of builds for CPUs and for GPUs alike."""
    versions = [version(name).partition("+")[0] for name in LIBRARIES]
    files = sorted(path for suffix in ("py", "yaml") for path in SOURCE.rglob(f"*.{suffix}"))
    return content_hash([versions, *([str(path.relative_to(SOURCE)), file_hash(path)] for path in files)])


class RayPool:
    """Workers on a Ray cluster that this process joins or starts, a `Pool`."""

    def __init__(self, engine: Engine, num_units: int, folder: Path | None = None) -> None:
        """
        Args:
            folder: the folder into which units write; all nodes must see it.
        """
        if find_spec("ray") is None:
            raise InputError("the engine is ray, but Ray is not installed: pip install 'biphase[cluster]'")
        os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # start no new cluster in place of a lost one
        self.actors: dict[int, Any] = {}
        self.nodes: dict[int, Future[str]] = {}
        """The address of each worker's node, done once the worker has a place; without lost workers."""
        self.pending: dict[int, Future[bytes]] = {}
        """The next message of each worker."""
        self.waiting_since, self.is_told = time.monotonic(), False
        """The time since which no worker has had a place, and whether the message about it is out."""
        with ExitStack() as held:  # no cluster that we started may remain, even after Ctrl-C
            loaded: Any = sys.modules.get("ray")
            is_joined = loaded is not None and loaded.is_initialized()  # by the caller
            if not (is_joined or engine.address or os.environ.get("RAY_ADDRESS")):
                held.enter_context(kept_to_this_machine())
            import ray

            if not is_joined:
                from ray._private import worker

                # Raylets write pages about a lost node to stdout; `listen` reports it in a line.
                held.callback(setattr, worker, "print_to_stdstream", worker.print_to_stdstream)
                worker.print_to_stdstream = lambda *_, **__: None
                held.callback(ray.shutdown)
                connect_ray(engine.address)
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            self.limit, self.cpus, self.gpus = divide_nodes(nodes, engine, num_units)
            mark = None if folder is None else held.enter_context(visible_file(folder.resolve()))
            is_client = ray.util.client.ray.is_connected()  # through `ray://`
            self.head = Head("" if is_client else ray.get_runtime_context().gcs_address)
            threading.Thread(target=self.head.watch, daemon=True).start()
            self.cleared = held.pop_all()
        self.arguments = self.cpus, "" if engine.device == "cpu" else None, os.getcwd(), hash_code(), mark
        options = {"num_cpus": self.cpus, "num_gpus": self.gpus, "max_restarts": 0, "max_concurrency": 2}
        self.actor = ray.remote(RayWorker).options(**options)

    def start(self, worker: int) -> None:
        with self.head.needed():
            self.actors[worker] = self.actor.remote(*self.arguments)
            self.nodes[worker] = self.actors[worker].node.remote().future()
            self.pending[worker] = self.actors[worker].receive.remote().future()

    def send(self, worker: int, payload: bytes) -> None:
        with self.head.needed():
            self.actors[worker].send.remote(payload)

    def listen(self) -> Iterator[tuple[int, Message]]:
        import ray

        self.head.look()
        with self.head.needed():
            self.look_for_places()
            # Not `ray.wait`, which changes exceptions of signal handlers.
            ready, _ = wait(self.pending.values(), timeout=1.0, return_when=FIRST_COMPLETED)
            for worker in [worker for worker, call in self.pending.items() if call in ready]:
                try:
                    kind, body = pickle.loads(self.pending.pop(worker).result())  # from a worker of this run
                except ray.exceptions.RayError as error:
                    lost = describe_loss(error, self.nodes.pop(worker, None))
                    kind, body = "ended", Outcome("", None, lost, worker_died=True)
                if kind == "refused":
                    raise InputError(f"the Ray node {self.nodes[worker].result()} {body}")
                if kind != "ended":
                    self.pending[worker] = self.actors[worker].receive.remote().future()
                yield worker, (kind, body)

    def look_for_places(self) -> None:
        """Print a line, once, if all workers wait for a place in the cluster. Raises `InputError` if no place will
        come."""
        import ray

        if not self.nodes or any(node.done() for node in self.nodes.values()):
            self.waiting_since, self.is_told = time.monotonic(), False
        if time.monotonic() - self.waiting_since <= (LEFT_SECONDS if self.is_told else PLACE_SECONDS):
            return
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        has_room = any(node.get("CPU", 0) >= self.cpus and node.get("GPU", 0) >= self.gpus for node in nodes)
        resources = f"{self.cpus} CPUs" + (f" and {self.gpus:g} GPUs" if self.gpus else "")
        if self.is_told and not has_room:
            lack = f"none of the {len(nodes)} remaining Ray nodes has them"
            remedy = "run the same command again: it uses the nodes that are left"
            raise InputError(f"each worker needs {resources}, and {lack}; {remedy}")
        if not self.is_told:
            why = "others use them" if has_room else "no remaining node has them"
            err.print(f"waiting for a place on the Ray cluster: each worker needs {resources}, and {why}")
        self.is_told = True

    def end(self, workers: list[int]) -> None:
        import ray

        try:
            if self.head.is_there or self.head.address:  # only `ray://` needs the head to reach workers
                running = [worker for worker in workers if worker in self.nodes and self.nodes[worker].done()]
                wait([self.actors[worker].stop.remote().future() for worker in running], timeout=grace() + 5)
        finally:
            for worker in workers:
                actor = self.actors.pop(worker)
                if self.head.is_there:  # without a head, the actor ends with this process
                    ray.kill(actor)
                self.nodes.pop(worker, None)
                self.pending.pop(worker, None)

    def close(self) -> None:
        try:
            self.end(list(self.actors))
        finally:
            self.cleared.close()
            self.head.is_over.set()


def describe_loss(error: Exception, address: "Future[str] | None") -> str:
    """Describe the loss of a worker in one line, with its node."""
    import ray

    node = ""
    if address is not None and address.done() and address.exception() is None:
        node = f" on node {address.result()}"
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        return f"worker was lost{node}: nothing answers there"
    *_, last = str(error).strip().splitlines() or [type(error).__name__]
    return f"worker was lost{node}: {shorten(last.partition(' Worker exit type:')[0], 300)}"


@contextmanager
def visible_file(folder: Path) -> Iterator[str]:
    """Keep a file in a folder while the block runs, so that other machines can look for it. Remove such files of killed
    processes."""
    for stale_path in folder.glob(".seen-*"):
        if not is_locked(stale_path):
            stale_path.unlink(missing_ok=True)
    path = folder / f".seen-{secrets.token_hex(8)}"
    with locked(path):
        try:
            yield str(path)
        finally:
            path.unlink(missing_ok=True)
