"""Agents as Ray actors: each pinned to its machine, named and detached, so that another controller finds them."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any, Protocol

from hetplan.errors import HetplanError, InvalidInputError
from hetplan.runtime.controller import loopback_ray
from hetplan.runtime.controller.agent import NodeAgent
from hetplan.runtime.controller.processes import Detached

LOOPBACK = "127.0.0.1"
_CALL_S = 15.0
_HELLO_S = 60.0
_OBJECT_STORE_BYTES = 80_000_000


class AgentGoneError(HetplanError):
    """An agent has ended, or its machine has."""

    def __init__(self, machine: str, why: str) -> None:
        self.machine = machine
        super().__init__(f"the agent of {machine} {why}")


class Agents(Protocol):
    """The agents of all machines."""

    async def begin(self, machine: str, config: dict[str, Any]) -> str | None:
        """Have a machine's agent running; its address, or None while the machine is not there."""
        ...

    async def call(self, machine: str, request: dict[str, Any], *, timeout_s: float | None = _CALL_S) -> dict[str, Any]:
        """Ask an agent. Raises `AgentGoneError` if it is gone, TimeoutError, and InvalidInputError if it refuses."""
        ...

    async def end(self, machine: str) -> None:
        """End an agent and all that it keeps."""
        ...


def make_token(path: Path) -> None:
    """A token for a new cluster, which only this user can read; one that is there stays."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32))


def ray_environment(token: Path) -> dict[str, str]:
    """Variables for every process of a cluster: a token is asked for, nothing is reported to Ray's makers."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Actors without GPUs are not to hide them from the engines that they start.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # Ray's workers give way to every other process, and what agents start would too: engines among it.
        "RAY_worker_niceness": "0",
        # A machine that does not answer for some twenty seconds is gone: a busy one may take several to answer, and one
        # that is taken for lost costs a start of its engines. What the provider says of it counts at once.
        "RAY_health_check_initial_delay_ms": "2000",
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "5000",
        "RAY_health_check_failure_threshold": "4",
    }


def require_token() -> None:
    """Refuse to speak to a cluster, or to start one, without token authentication.

    Raises
    ------
    InvalidInputError
        If the environment has no token, or one that others can read.
    """
    if os.environ.get("RAY_AUTH_MODE") != "token":
        raise InvalidInputError(
            f"RAY_AUTH_MODE is {os.environ.get('RAY_AUTH_MODE')!r}; whoever reaches a Ray cluster runs what he likes "
            "there. Set it to 'token', and RAY_AUTH_TOKEN_PATH to the token's file"
        )
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if path is None and not os.environ.get("RAY_AUTH_TOKEN"):
        raise InvalidInputError("neither RAY_AUTH_TOKEN_PATH nor RAY_AUTH_TOKEN is set; give the cluster's token")
    if path is not None:
        try:
            found = Path(path).stat()
        except OSError as error:
            raise InvalidInputError(f"RAY_AUTH_TOKEN_PATH {path} cannot be read: {error.strerror}") from None
        if found.st_mode & 0o077:
            raise InvalidInputError(f"RAY_AUTH_TOKEN_PATH {path} can be read by others; chmod 600 it")


def raylet_command(*, head: bool, address: str, resources: dict[str, float], folder: Path) -> list[str]:
    """The argv of a Ray node on the loopback address, which stays in the foreground."""
    port = address.rpartition(":")[2]
    where = ["--head", f"--port={port}", f"--temp-dir={folder}"] if head else [f"--address={address}"]
    return [
        *(sys.executable, "-m", "hetplan.runtime.controller.loopback_ray", "start", *where),
        f"--node-ip-address={LOOPBACK}",
        f"--num-cpus={0 if head else 1}",
        "--num-gpus=0",
        f"--object-store-memory={_OBJECT_STORE_BYTES}",
        f"--resources={json.dumps(resources)}",
        "--include-log-monitor=false",
        "--disable-usage-stats",
        *(["--include-dashboard=false"] if head else []),
        "--block",
    ]


class LoopbackHead:
    """The head of a Ray cluster on this machine, which outlives the controller.

    Parameters
    ----------
    folder : path
        Short: Ray makes sockets below it.
    """

    def __init__(self, folder: Path, address: str) -> None:
        self.address = address
        self._folder = folder
        self._process = Detached(folder / "head.log")

    def start(self) -> None:
        """Start it, unless it runs."""
        require_token()
        command = raylet_command(head=True, address=self.address, resources={}, folder=self._folder / "ray")
        self._process.start(command, os.environ)

    def runs(self) -> bool:
        """Whether it does."""
        return self._process.pid() is not None

    def tail(self) -> str:
        """The end of what it has said."""
        return self._process.tail()

    def end(self) -> None:
        """End it."""
        self._process.end(3.0)


def resource_of(machine: str) -> str:
    """The resource that pins an agent to its machine."""
    return f"hetplan-{machine}"


class RayAgents:
    """Agents over Ray; see `Agents`.

    Parameters
    ----------
    address : str
        Of the cluster's head.
    fleet : str
        Ray's namespace: the name of all machines of one controller.
    """

    def __init__(self, address: str, fleet: str) -> None:
        require_token()
        self.address, self.fleet = address, fleet

    def connect(self) -> None:
        """Join the cluster; blocks.

        Raises
        ------
        InvalidInputError
            If there is none, or it does not take the token.
        """
        import ray

        options: dict[str, Any] = {}
        if self.address.startswith(LOOPBACK):
            loopback_ray.bind()
            options["_node_ip_address"] = LOOPBACK
        try:
            ray.init(
                address=self.address,
                namespace=self.fleet,
                log_to_driver=False,
                logging_level=40,
                configure_logging=False,
                **options,
            )
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.AuthenticationError) as error:
            raise InvalidInputError(f"cannot join the Ray cluster at {self.address}: {error}") from None

    def disconnect(self) -> None:
        """Leave the cluster; agents stay."""
        import ray

        ray.shutdown()

    async def begin(self, machine: str, config: dict[str, Any]) -> str | None:
        address = await asyncio.to_thread(self._node_address, machine)
        if address is None:
            return None
        await asyncio.to_thread(self._create, machine, {**config, "machine": machine, "fleet": self.fleet})
        await self.call(machine, {"op": "hello"}, timeout_s=_HELLO_S)
        return address

    async def call(self, machine: str, request: dict[str, Any], *, timeout_s: float | None = _CALL_S) -> dict[str, Any]:
        import ray

        try:
            actor: Any = await asyncio.to_thread(ray.get_actor, machine, self.fleet)
            answer = await asyncio.wait_for(_bytes(actor.call.remote(json.dumps(request).encode())), timeout_s)
        except ValueError:
            raise AgentGoneError(machine, "is gone") from None
        except ray.exceptions.ActorUnavailableError as error:
            raise TimeoutError(str(error)) from None
        except ray.exceptions.RayActorError:
            raise AgentGoneError(machine, "has died") from None
        content: dict[str, Any] = json.loads(answer)
        if "error" in content:
            raise InvalidInputError(f"{machine}: {content['error']}")
        return content

    async def end(self, machine: str) -> None:
        import ray

        def kill() -> None:
            try:
                ray.kill(ray.get_actor(machine, self.fleet), no_restart=True)
            except ValueError:
                return

        await asyncio.to_thread(kill)

    def _node_address(self, machine: str) -> str | None:
        import ray

        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        for node in nodes:
            if node["Alive"] and resource_of(machine) in node["Resources"]:
                return str(node["NodeManagerAddress"])
        return None

    def _create(self, machine: str, config: dict[str, Any]) -> None:
        import ray

        actor: Any = ray.remote(NodeAgent)
        actor.options(
            name=machine,
            namespace=self.fleet,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            resources={resource_of(machine): 0.001},
            max_restarts=0,
            max_concurrency=16,
        ).remote(json.dumps(config).encode())


async def _bytes(reference: Any) -> bytes:
    answer: bytes = await reference
    return answer
