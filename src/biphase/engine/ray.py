"""The workers of a Ray cluster, each the process of an actor."""

import logging
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from textwrap import shorten
from typing import Any

from biphase.engine.local import Engine, Message, WorkerProcess
from biphase.engine.units import Outcome
from biphase.errors import InputError
from biphase.machine import grace

JOIN_SECONDS = 60.0
"""Until an address that does not answer is given up."""


class RayPool:
    """Workers on a Ray cluster, joined or started on this machine for this run; its methods are `LocalPool`'s."""

    def __init__(self, engine: Engine, num_units: int) -> None:
        self.variables: dict[str, str] = {}
        if not (engine.address or os.environ.get("RAY_ADDRESS")):
            self.variables = keep_to_this_machine()
        try:
            import ray
        except ImportError:
            raise InputError("the engine is ray, but Ray is not installed: pip install 'biphase[cluster]'") from None
        self.is_ours = not ray.is_initialized()
        self.actors: dict[int, Any] = {}
        self.pending: dict[int, Any] = {}
        """The call for the next message of each worker that has one to give."""
        self.answering: set[int] = set()
        if self.is_ours:
            connect_ray(engine.address)
        try:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            self.limit, cpus, gpus = share_nodes(nodes, engine, num_units)
        except BaseException:  # Ctrl-C too: a cluster that was started here must not stay behind
            self.close()
            raise
        self.arguments = cpus, "" if engine.device == "cpu" else None
        self.actor = ray.remote(WorkerProcess).options(num_cpus=cpus, num_gpus=gpus, max_restarts=0, max_concurrency=2)

    def start(self, number: int) -> None:
        self.actors[number] = self.actor.remote(*self.arguments)
        self.pending[number] = self.actors[number].receive.remote()

    def send(self, number: int, payload: bytes) -> None:
        self.actors[number].send.remote(payload)
        self.pending[number] = self.actors[number].receive.remote()

    def listen(self) -> Iterator[tuple[int, Message]]:
        import ray

        if not self.pending:  # all are idle, until a postponed unit is tried again
            time.sleep(1.0)
            return
        heard, _ = ray.wait(list(self.pending.values()), num_returns=1, timeout=1.0)
        for number in [number for number, call in self.pending.items() if call in heard]:
            try:
                # What is unpickled is from a worker that this run started.
                message: Message = pickle.loads(ray.get(self.pending.pop(number)))
            except ray.exceptions.RayError as error:
                self.answering.discard(number)
                lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
                text = lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
                lost = f"worker was lost: {shorten(text, 300)}"
                yield number, ("ended", Outcome("", None, lost, 0.0, str(error), worker_died=True))
                continue
            self.answering.add(number)
            if message[0] == "progress":
                self.pending[number] = self.actors[number].receive.remote()
            yield number, message

    def end(self, numbers: list[int]) -> None:
        import ray

        actors = [self.actors.pop(number) for number in numbers]
        try:
            stopping = [actor.stop.remote() for actor, n in zip(actors, numbers, strict=True) if n in self.answering]
            if stopping:
                ray.wait(stopping, num_returns=len(stopping), timeout=grace() + 5)
        finally:
            for number, actor in zip(numbers, actors, strict=True):
                ray.kill(actor)
                self.pending.pop(number, None)
                self.answering.discard(number)

    def close(self) -> None:
        import ray

        try:
            self.end(list(self.actors))
        finally:
            if self.is_ours:
                ray.shutdown()
            for variable in self.variables:
                os.environ.pop(variable, None)


def keep_to_this_machine() -> dict[str, str]:
    """Have a cluster that is started here listen on the loopback interface alone, and to nobody without its token.

    Ray itself listens on all interfaces, and runs whatever it is sent. Returns the environment variables that are set:
    a token is drawn unless the user has said how to authenticate, or has loaded Ray before; Ray before 2.52 knows none.
    """
    loaded: Any = sys.modules.get("ray")
    if loaded is not None and loaded.is_initialized():
        return {}  # by the caller, who knows where
    variables = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # on all systems: the address of a node is 127.0.0.1
    is_said = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    if not is_said and loaded is None:  # Ray that is loaded has read already that there is no token
        variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ.update(variables)
    if loaded is not None:  # it has read the variable when it was imported
        loaded._private.ray_constants.ENABLE_RAY_CLUSTER = False
    return variables


def connect_ray(address: str | None) -> None:
    """Join the cluster at an address (else at `RAY_ADDRESS`), or start one of this machine alone.

    Ray left to itself would join any cluster whose address file it finds, another user's too. Raises `InputError` when
    there is no cluster at the address, or when it does not answer.
    """
    import ray

    address = address or os.environ.get("RAY_ADDRESS")
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():  # Ray itself tries for minutes
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            raise InputError(f"no Ray cluster at '{address}': {error.strerror or error}") from None
    if address is not None:
        # Join in a process that can be ended first: where something listens but does not answer as a cluster, Ray
        # tries for minutes, in code that no signal interrupts.
        join = "import sys, ray; ray.init(sys.argv[1], log_to_driver=False, logging_level=40, include_dashboard=False)"
        problem = ""
        try:
            command = [sys.executable, "-P", "-c", join, address]
            subprocess.run(command, capture_output=True, text=True, timeout=JOIN_SECONDS, check=True)
        except subprocess.TimeoutExpired:
            problem = f"no answer within {JOIN_SECONDS:.0f} s"
        except subprocess.CalledProcessError as error:
            problem = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
        if problem:
            raise InputError(
                f"no Ray cluster at '{address}': {shorten(problem, 300)}; is it of the same version of Ray, and "
                "RAY_AUTH_TOKEN its token, where it wants one?"
            )
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address or "local", log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    except (ConnectionError, RuntimeError, ValueError, ImportError) as error:
        problem = " ".join(str(error).split())
        raise InputError(f"no Ray cluster at '{address}': {problem}" if address else f"Ray: {problem}") from None
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)  # `ray.init` put its own in its place


def share_nodes(nodes: Sequence[dict[str, float]], engine: Engine, num_units: int) -> tuple[int, int, float]:
    """How a cluster is cut up: number of workers, and the CPUs and GPUs that each of them holds.

    With GPUs, the CPUs of a node are divided among its GPUs, and the node with the fewest sets the number. Without,
    each worker holds as many CPUs as still let all workers find a place.
    """
    with_gpus = [node for node in nodes if node.get("GPU", 0) >= 1]
    if engine.device != "cpu" and with_gpus:
        each = engine.devices_per_worker
        with_gpus = [node for node in with_gpus if node["GPU"] >= each]
        if not with_gpus:
            raise InputError(f"{each} devices for each worker, but no Ray node has so many GPUs")
        places = [int(node["GPU"]) // each * engine.workers_per_gpu for node in with_gpus]
        cpus = min(int(node.get("CPU", 0)) // number for node, number in zip(with_gpus, places, strict=True))
        return min(engine.workers or sum(places), num_units), cpus, each / engine.workers_per_gpu
    if engine.device == "cuda":
        raise InputError(f"device is cuda, but none of the {len(nodes)} Ray nodes has a GPU; use cpu")
    cores = [int(node.get("CPU", 0)) for node in nodes]
    if not sum(cores):
        raise InputError(f"none of the {len(nodes)} Ray nodes offers a CPU; start one with `ray start --num-cpus`")
    workers = min(engine.workers or sum(count // engine.devices_per_worker for count in cores) or 1, num_units)
    fitting = [cpus for cpus in range(1, max(cores) + 1) if sum(count // cpus for count in cores) >= workers]
    return workers, max(fitting, default=1), 0
