"""A Ray cluster: joined, or started on this machine; its head, and how its nodes are cut up."""

import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from textwrap import shorten
from typing import Any

from biphase.engine.local import Engine
from biphase.errors import InputError, StoppedError

JOIN_SECONDS = 60.0
"""Until an address that does not answer is given up."""
HEAD_SECONDS = 30.0
"""How long the head of a cluster may be gone: a minute later, Ray itself would end this process."""


@contextmanager
def kept_to_this_machine() -> Iterator[None]:
    """Have a cluster that is started in the block listen on the loopback interface alone, and to nobody without its
    token.

    Ray itself listens on all interfaces, and runs whatever it is sent. A token is drawn unless the user has said how to
    authenticate, or has loaded Ray before; Ray before 2.52 knows none.
    """
    loaded: Any = sys.modules.get("ray")
    if loaded is not None and loaded.is_initialized():
        yield  # by the caller, who knows where
        return
    variables = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # on all systems: the address of a node is 127.0.0.1
    is_said = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    if not is_said and loaded is None:  # Ray that is loaded has read already that there is no token
        variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ.update(variables)
    reaches_others = sys.platform == "linux"  # what Ray means unless told
    if loaded is not None:  # it has read the variable when it was imported
        reaches_others = loaded._private.ray_constants.ENABLE_RAY_CLUSTER
        loaded._private.ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        for variable in variables:
            os.environ.pop(variable, None)
        loaded = sys.modules.get("ray")
        if loaded is not None:  # a cluster that this process joins later is one of several machines
            loaded._private.ray_constants.ENABLE_RAY_CLUSTER = reaches_others


@contextmanager
def tamed() -> Iterator[None]:
    """Have Ray not print what raylets say of a lost node, in pages on stdout: `RayPool` tells it in a line. And have it
    start no cluster in place of one that was lost."""
    from ray._private import auto_init_hook, worker

    before = worker.print_to_stdstream, auto_init_hook.enable_auto_connect
    worker.print_to_stdstream, auto_init_hook.enable_auto_connect = lambda *_, **__: None, False
    try:
        yield
    finally:
        worker.print_to_stdstream, auto_init_hook.enable_auto_connect = before


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
            *_, last = re.split(r"(?m)^(?=[\w.]+(?:Error|Exception): )", error.stderr)  # of several lines, it may be
            problem = last.strip() or f"exit code {error.returncode}"
        if problem:
            raise InputError(
                f"no Ray cluster at '{address}': {shorten(problem, 300)}; has it the same versions of Ray and Python "
                "as are here? Where it wants a token, set RAY_AUTH_MODE=token here and on all nodes, and "
                "RAY_AUTH_TOKEN unless ~/.ray/auth_token has it"
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


def has_client() -> bool:
    """Whether this process has reached its cluster through `ray://`."""
    from ray.util import client

    return client.ray.is_connected()


class Head:
    """The head of a cluster, looked after: when it has been gone for a minute, Ray ends this process in code that says
    nothing of use and lets nobody else say it."""

    def __init__(self, address: str) -> None:
        """
        Args:
            address: where it listens, HOST:PORT; through `ray://`, where nothing else knows, the empty string.
        """
        self.address, self.is_there = address, True
        self.looked = self.answered = time.monotonic()

    def look(self) -> None:
        """Raises `InputError` when it has been gone for too long."""
        now = time.monotonic()
        if now < self.looked + 5.0 or not self.address:
            return
        self.looked = now
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=2.0).close()
            self.answered = now
        except OSError as error:
            if now > self.answered + HEAD_SECONDS:
                raise self.gone(error.strerror or str(error)) from None

    @contextmanager
    def needed(self) -> Iterator[None]:
        """Through `ray://`, what goes wrong in the block means that it is gone, but for what Ray says of a worker."""
        import ray

        try:
            yield
        except (InputError, StoppedError, ray.exceptions.RayError):
            raise
        except Exception as error:  # of the many kinds that Ray's client and gRPC have for it
            if self.address:
                raise
            raise self.gone(str(error)) from None

    def gone(self, reason: str) -> InputError:
        self.is_there = False
        place = f"the head of the Ray cluster at {self.address}" if self.address else "the Ray cluster"
        return InputError(
            f"{place} is gone ({shorten(reason, 200)}); what was finished is kept: start a cluster and run the same "
            "command again"
        )
