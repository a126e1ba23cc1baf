"""The workers of a Ray cluster, each a process of its own beside an actor."""

import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from biphase.engine.local import GRACE_SECONDS, Engine, WorkerMessage, WorkerProcess, end_processes, share_threads
from biphase.errors import InputError


class RayActor:
    """A Ray actor that holds one worker process: units get the main thread, their own signals and a clean death.

    Its methods run beside each other, in threads, so that `stop` is heard while `receive` waits.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        import ray

        theirs = Path(ray.__file__).parent  # Ray's own vendored packages must not hide those of the user
        paths = [path for path in sys.path if not Path(path).is_relative_to(theirs)]
        self.process = WorkerProcess({**os.environ, **environment}, paths)

    def run(self, payload: bytes) -> bytes:
        self.process.send(payload)
        return self.process.receive_bytes()

    def receive(self) -> bytes:
        return self.process.receive_bytes()

    def stop(self) -> None:
        end_processes([self.process], lambda line: None)


class RayWorker:
    """A `RayActor` as the scheduler sees it, with the call to it that is under way."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.pending = actor.receive.remote()
        self.answers = False

    def send(self, payload: bytes) -> None:
        self.pending = self.actor.run.remote(payload)

    def receive(self) -> WorkerMessage:
        import ray

        pending, self.pending = self.pending, None
        try:
            message: WorkerMessage = pickle.loads(ray.get(pending))  # from a worker that this run started
        except ray.exceptions.RayError as error:
            self.answers = False
            lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            text = lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
            return WorkerMessage(error=f"worker was lost: {shorten(text, 300)}", traceback=str(error), is_last=True)
        self.answers = True
        if message.is_progress:
            self.pending = self.actor.receive.remote()
        return message


class RayPool:
    """Workers on a Ray cluster: joined, or started on this machine for this run."""

    def __init__(self, engine: Engine, num_units: int) -> None:
        ray = import_ray()
        self.is_ours = not ray.is_initialized()
        if self.is_ours:
            connect_ray(engine.address)
        try:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            self.limit, cpus, gpus = share_nodes(nodes, engine, num_units)
        except BaseException:  # Ctrl-C too: a cluster that was started here must not stay behind
            self.close()
            raise
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if engine.device == "cpu" else {}
        self.environment = {**share_threads(cpus), **hidden}
        self.actor = ray.remote(RayActor).options(num_cpus=cpus, num_gpus=gpus, max_restarts=0, max_concurrency=2)

    def start(self, number: int) -> RayWorker:
        return RayWorker(self.actor.remote(self.environment))

    def wait(self, workers: list[RayWorker]) -> list[RayWorker]:
        import ray

        pending = {worker.pending: worker for worker in workers if worker.pending is not None}
        if not pending:  # all are idle, until a postponed unit is tried again
            time.sleep(1.0)
            return []
        heard, _ = ray.wait(list(pending), num_returns=1, timeout=1.0)
        return [pending[reference] for reference in heard]

    def end(self, workers: list[RayWorker]) -> None:
        import ray

        try:
            stopping = [worker.actor.stop.remote() for worker in workers if worker.answers]
            if stopping:
                ray.wait(stopping, num_returns=len(stopping), timeout=GRACE_SECONDS + 5)
        finally:
            for worker in workers:
                ray.kill(worker.actor)

    def close(self) -> None:
        import ray

        if self.is_ours:
            ray.shutdown()


JOIN_SECONDS = 60.0
"""Until an address that does not answer is given up."""

JOIN = "import sys, ray; ray.init(sys.argv[1], log_to_driver=False, logging_level=40, include_dashboard=False)"


def import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise InputError("the engine is ray, but Ray is not installed: pip install 'biphase[cluster]'") from None
    return ray


def connect_ray(address: str | None) -> None:
    import ray

    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():  # Ray itself tries for minutes
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            raise InputError(f"no Ray cluster at '{address}': {error.strerror or error}") from None
    if address is not None:
        try_to_join(address)
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    except (ConnectionError, RuntimeError, ValueError, ImportError) as error:
        problem = " ".join(str(error).split())
        raise InputError(f"no Ray cluster at '{address}': {problem}" if address else f"Ray: {problem}") from None
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)  # `ray.init` put its own in its place


def try_to_join(address: str) -> None:
    """Join in a process that can be ended: where something listens but does not answer as a cluster, Ray tries for
    minutes, in code that no signal interrupts. Raises `InputError` then, and for whatever Ray says."""
    command = [sys.executable, "-P", "-c", JOIN, address]
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=JOIN_SECONDS, check=True)
        return
    except subprocess.TimeoutExpired:
        problem = f"no answer within {JOIN_SECONDS:.0f} s"
    except subprocess.CalledProcessError as error:
        problem = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
    raise InputError(
        f"no Ray cluster at '{address}': {shorten(problem, 300)}; is it of the same version of Ray, and RAY_AUTH_TOKEN "
        "its token, where it wants one?"
    )


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
