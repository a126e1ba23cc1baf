"""A Ray cluster: joined, or started on this machine; how its nodes are shared out; and its workers, each an actor."""

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
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import Any

from biphase import __version__
from biphase.console import err, silence
from biphase.engine.local import Engine, Message, Outcome, WorkerProcess, end_processes
from biphase.errors import SOURCE, InputError, StoppedError, told_as
from biphase.files import content_hash, file_hash, is_locked, locked
from biphase.machine import grace, python_process

JOIN_SECONDS = 60.0
"""Until an address that does not answer is given up."""
HEAD_SECONDS = 30.0
"""How long the head of a cluster may be gone: after a minute, Ray itself would end this process."""
LAST_SECONDS = 15.0
"""How long after that the main thread may need to say so: calls of Ray may wait for the head."""


@contextmanager
def kept_to_this_machine() -> Iterator[None]:
    """Have a cluster that is started in the block listen on the loopback interface alone, and to nobody without its
    token.

    Ray itself listens on all interfaces, and runs whatever it is sent. A token is drawn unless the user has said how to
    authenticate, or has loaded Ray before; Ray before 2.52 knows none.
    """
    loaded = sys.modules.get("ray")
    variables = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # on all systems: the address of a node is 127.0.0.1
    is_said = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    if not is_said and loaded is None:  # Ray that is loaded has read already that there is no token
        variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ.update(variables)
    import ray

    constants: Any = ray._private.ray_constants  # Ray reads the first variable when it is imported, and never again
    reaches_others = sys.platform == "linux" if loaded is None else constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:  # a cluster that is joined later is one of several machines, and has a token of its own or none
        for variable in {*variables, "RAY_AUTH_MODE"} - is_said:  # Ray 2.60 sets the mode on its own
            os.environ.pop(variable, None)
        constants.ENABLE_RAY_CLUSTER = reaches_others
        raylet: Any = ray._raylet
        if hasattr(raylet, "AuthenticationTokenLoader"):  # it keeps what it read of the variables
            raylet.Config.initialize("")
            raylet.AuthenticationTokenLoader.instance().reset_cache()


def connect_ray(address: str | None) -> None:
    """Join the cluster at an address (else at `RAY_ADDRESS`), or start one of this machine alone.

    Ray left to itself would join any cluster whose address file it finds, another user's too. Raises `InputError` when
    there is no cluster at the address, or when it does not answer.
    """
    import ray

    address = address or os.environ.get("RAY_ADDRESS")
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():  # Ray itself tries for minutes
        with told_as(f"no Ray cluster at '{address}'"):
            socket.create_connection((host, int(port)), timeout=10).close()
    if address is not None:
        # Join in a process that can be ended first: where something listens but does not answer as a cluster, Ray
        # tries for minutes, in code that no signal interrupts.
        join = "import sys, ray; ray.init(sys.argv[1], log_to_driver=False, logging_level=40, include_dashboard=False)"
        problem, joining = "", python_process("-c", join, address)
        try:
            subprocess.run(**joining, capture_output=True, text=True, timeout=JOIN_SECONDS, check=True)
        except subprocess.TimeoutExpired:
            problem = f"no answer within {JOIN_SECONDS:.0f} s"
        except subprocess.CalledProcessError as error:
            *_, last = re.split(r"(?m)^(?=[\w.]+(?:Error|Exception): )", error.stderr)  # of several lines, it may be
            problem = last.strip() or f"exit code {error.returncode}"
        if problem:
            reason = f"{shorten(problem, 300)}; has it the same versions of Ray and Python as are here"
            token = "set RAY_AUTH_MODE=token here and on all nodes, and RAY_AUTH_TOKEN unless ~/.ray/auth_token has it"
            raise InputError(f"no Ray cluster at '{address}': {reason}? Where it wants a token, {token}")
    handler = signal.getsignal(signal.SIGTERM)
    problem = f"no Ray cluster at '{address}'" if address else "Ray does not start here"
    with told_as(problem), chdir(os.sep):  # Ray has its processes import modules from the folder in which it is begun
        ray.init(address=address or "local", log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # `ray.init` put its own in its place


def share_nodes(nodes: Sequence[dict[str, float]], engine: Engine, num_units: int) -> tuple[int, int, float]:
    """Cut a cluster up: the number of workers, and the CPUs and GPUs that each of them holds.

    With GPUs, the CPUs of a node are divided among its GPUs, and the node with the fewest sets the number. Without,
    each worker holds as many CPUs as still let all workers find a place.
    """
    with_gpus = [node for node in nodes if node.get("GPU", 0) >= 1]
    if engine.device != "cpu" and with_gpus:
        gpus_each = engine.devices_per_worker
        with_gpus = [node for node in with_gpus if node["GPU"] >= gpus_each]
        if not with_gpus:
            raise InputError(f"{gpus_each} devices for each worker, but no Ray node has so many GPUs")
        places = [int(node["GPU"]) // gpus_each * engine.workers_per_gpu for node in with_gpus]
        cpus = min(int(node.get("CPU", 0)) // number for node, number in zip(with_gpus, places, strict=True))
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
    """The head of a cluster, looked after: when it has been gone for a minute, Ray ends this process in code that says
    nothing of use and lets nobody else say it."""

    address: str
    """The HOST:PORT where it listens; through `ray://`, where nothing else knows, the empty string."""
    is_there: bool = True
    answered: float = field(default_factory=time.monotonic)
    is_over: threading.Event = field(default_factory=threading.Event)
    """Set when nobody needs it any more."""

    def watch(self) -> None:
        """End this process with a line, from a thread, where the head is gone and the main thread does not say so."""
        try:
            while not self.is_over.wait(1.0):
                self.look()
        except InputError as error:
            if not self.is_over.wait(LAST_SECONDS):
                err.print(f"biphase: {error}")
                os._exit(2)

    def look(self) -> None:
        """Raises `InputError` when it has been gone for too long."""
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
        """Take what goes wrong in the block for its loss where it is reached through `ray://` and has no address here,
        but for what Ray says of a worker."""
        import ray

        try:
            yield
        except (InputError, StoppedError, ray.exceptions.RayError):
            raise
        except Exception as error:  # of the many kinds that Ray's client and gRPC have for it
            if not self.address:
                raise self.gone(str(error)) from None
            raise

    def gone(self, reason: str) -> InputError:
        self.is_there = False
        lost = f"the head of the Ray cluster at {self.address}" if self.address else "the Ray cluster"
        remedy = "what was finished is kept: start a cluster and run the same command again"
        return InputError(f"{lost} is gone ({shorten(reason, 200)}); {remedy}")


SEEN_SECONDS = 10.0
"""Until a node that does not see a file of this command's is given up."""
PLACE_SECONDS, LEFT_SECONDS = 30.0, 300.0
"""How long workers wait for a place in the cluster until that is said, and until it is given up where no node that is
left has room for one: a new node may be on its way."""


class RayWorker(WorkerProcess):
    """A worker process that an actor starts on its node, where it stands in the folder of this command.

    Where that node has not the code and the files of this command, it says so in place of starting.
    """

    def __init__(self, threads: int, gpus: str | None, standing: str, code: str, mark: str | None) -> None:
        """
        Args:
            standing: the current folder of the process that runs units.
            code: what `hash_code` says there.
            mark: a file that is there while it runs.
        """
        self.refusal = find_difference(standing, code, mark)
        if not self.refusal:
            os.chdir(standing)
            super().__init__(threads, gpus)

    def node(self) -> str:
        import ray

        return ray.util.get_node_ip_address()

    def receive(self) -> bytes:
        if self.refusal:
            return pickle.dumps(("refused", self.refusal))
        return super().receive()

    def stop(self) -> None:
        """End it; nobody reads the lines of an actor."""
        if not self.refusal:
            silence()
            end_processes([self])


def find_difference(standing: str, code: str, mark: str | None) -> str:
    """Tell why units would do something else on this node than where they come from; nothing where they would not.

    A file may take some seconds until all machines that share its file system see it.
    """
    if hash_code() != code:
        return f"has another biphase ({__version__}, {SOURCE}) than this command: install the same on all nodes"
    if not Path(standing).is_dir():
        return f"has no folder {standing}, where this command stands: stand in one that all nodes see"
    deadline = time.monotonic() + SEEN_SECONDS
    while mark is not None and not Path(mark).exists():
        if time.monotonic() > deadline:
            return f"does not see what is written into {Path(mark).parent}: choose a folder that all nodes share"
        time.sleep(0.1)
    return ""


def hash_code() -> str:
    """Hash what this package consists of: its version alone would not tell of changes in a working copy."""
    files = sorted(path for suffix in ("py", "yaml") for path in SOURCE.rglob(f"*.{suffix}"))
    return content_hash([[str(path.relative_to(SOURCE)), file_hash(path)] for path in files])


class RayPool:
    """Workers on a Ray cluster, joined or started on this machine for this run; its methods are `LocalPool`'s."""

    def __init__(self, engine: Engine, num_units: int, folder: Path | None = None) -> None:
        """
        Args:
            folder: where units write, which all nodes must see.
        """
        if find_spec("ray") is None:
            raise InputError("the engine is ray, but Ray is not installed: pip install 'biphase[cluster]'")
        os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # no new cluster in place of one that was lost
        self.actors: dict[int, Any] = {}
        self.nodes: dict[int, Future[str]] = {}
        """The address of each worker's node, once it has one; not of a worker that was lost."""
        self.pending: dict[int, Future[bytes]] = {}
        """The next message of each worker."""
        self.waiting_since, self.is_told = time.monotonic(), False
        """Since when no worker has a place, and whether that was said."""
        with ExitStack() as held:  # a cluster that was started here must not stay behind, after Ctrl-C neither
            loaded: Any = sys.modules.get("ray")
            is_joined = loaded is not None and loaded.is_initialized()  # by the caller, who knows where
            if not (is_joined or engine.address or os.environ.get("RAY_ADDRESS")):
                held.enter_context(kept_to_this_machine())
            import ray

            if not is_joined:
                from ray._private import worker

                # What raylets say of a lost node, in pages on stdout, is told in a line by `listen`.
                held.callback(setattr, worker, "print_to_stdstream", worker.print_to_stdstream)
                worker.print_to_stdstream = lambda *_, **__: None
                held.callback(ray.shutdown)
                connect_ray(engine.address)
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            self.limit, self.cpus, self.gpus = share_nodes(nodes, engine, num_units)
            mark = None if folder is None else held.enter_context(visible_file(folder.resolve()))
            is_client = ray.util.client.ray.is_connected()  # through `ray://`
            self.head = Head("" if is_client else ray.get_runtime_context().gcs_address)
            threading.Thread(target=self.head.watch, daemon=True).start()
            self.cleared = held.pop_all()
        self.arguments = self.cpus, "" if engine.device == "cpu" else None, os.getcwd(), hash_code(), mark
        options = {"num_cpus": self.cpus, "num_gpus": self.gpus, "max_restarts": 0, "max_concurrency": 2}
        self.actor = ray.remote(RayWorker).options(**options)

    def start(self, number: int) -> None:
        with self.head.needed():
            self.actors[number] = self.actor.remote(*self.arguments)
            self.nodes[number] = self.actors[number].node.remote().future()
            self.pending[number] = self.actors[number].receive.remote().future()

    def send(self, number: int, payload: bytes) -> None:
        with self.head.needed():
            self.actors[number].send.remote(payload)

    def listen(self) -> Iterator[tuple[int, Message]]:
        import ray

        self.head.look()
        with self.head.needed():
            self.look_for_places()
            # Not `ray.wait`, out of which no exception of a signal handler comes as it was raised.
            heard, _ = wait(self.pending.values(), timeout=1.0, return_when=FIRST_COMPLETED)
            for number in [number for number, call in self.pending.items() if call in heard]:
                try:
                    kind, body = pickle.loads(self.pending.pop(number).result())  # from a worker of this run
                except ray.exceptions.RayError as error:
                    lost = describe_loss(error, self.nodes.pop(number, None))
                    kind, body = "ended", Outcome("", None, lost, traceback=str(error), worker_died=True)
                if kind == "refused":
                    raise InputError(f"the Ray node {self.nodes[number].result()} {body}")
                if kind != "ended":
                    self.pending[number] = self.actors[number].receive.remote().future()
                yield number, (kind, body)

    def look_for_places(self) -> None:
        """Say, once, that all workers wait for a place in the cluster. Raises `InputError` where none will come."""
        import ray

        if not self.nodes or any(node.done() for node in self.nodes.values()):
            self.waiting_since, self.is_told = time.monotonic(), False
        if time.monotonic() - self.waiting_since <= (LEFT_SECONDS if self.is_told else PLACE_SECONDS):
            return
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        has_room = any(node.get("CPU", 0) >= self.cpus and node.get("GPU", 0) >= self.gpus for node in nodes)
        resources = f"{self.cpus} CPUs" + (f" and {self.gpus:g} GPUs" if self.gpus else "")
        if self.is_told and not has_room:
            lack = f"none of the {len(nodes)} Ray nodes that are left has them"
            remedy = "the same command makes do with what there is"
            raise InputError(f"each worker was to hold {resources}, and {lack}; {remedy}")
        if not self.is_told:
            why = "others hold them" if has_room else "no node that is left has them"
            err.print(f"waiting for a place on the Ray cluster: each worker wants {resources}, and {why}")
        self.is_told = True

    def end(self, numbers: list[int]) -> None:
        import ray

        try:
            if self.head.is_there or self.head.address:  # they are reached without it, but for `ray://`
                running = [number for number in numbers if number in self.nodes and self.nodes[number].done()]
                wait([self.actors[number].stop.remote().future() for number in running], timeout=grace() + 5)
        finally:
            for number in numbers:
                actor = self.actors.pop(number)
                if self.head.is_there:  # else it ends with this process
                    ray.kill(actor)
                self.nodes.pop(number, None)
                self.pending.pop(number, None)

    def close(self) -> None:
        try:
            self.end(list(self.actors))
        finally:
            self.cleared.close()
            self.head.is_over.set()


def describe_loss(error: Exception, address: "Future[str] | None") -> str:
    """Tell in one line that a worker was lost, and on which node."""
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
    """Keep a file in a folder while the block runs, for others to look whether they see it. What killed processes left
    of theirs is removed."""
    for stale_path in folder.glob(".seen-*"):
        if not is_locked(stale_path):
            stale_path.unlink(missing_ok=True)
    path = folder / f".seen-{secrets.token_hex(8)}"
    with locked(path):
        try:
            yield str(path)
        finally:
            path.unlink(missing_ok=True)
