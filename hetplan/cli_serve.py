"""The verbs that serve a plan and say how it goes. The command line adds them to its own."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import os
import secrets
import shlex
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetplan.cli_models import models_given
from hetplan.cli_router import write_event
from hetplan.errors import InvalidInputError

if TYPE_CHECKING:
    from rich.console import Console, Group

    from hetplan.plan import Plan
    from hetplan.runtime.controller.controller import Controller
    from hetplan.runtime.controller.fleet import Fleet
    from hetplan.runtime.controller.programs import Programs
    from hetplan.runtime.controller.ray_agents import LoopbackHead
    from hetplan.runtime.controller.router_process import RouterProcess
    from hetplan.runtime.controller.serving import Serving

Answer = Callable[[Callable[[], Any], bool], None]
_DRAIN_S = 120.0


def add_serve(app: typer.Typer, *, answer: Answer, console: Console) -> None:
    """Add these verbs to the command line, which lends its way of answering."""

    @app.command()
    def serve(
        plan: Annotated[Path, typer.Argument(help="Plan, as `optimize --out` writes it.")],
        model: Annotated[
            list[str] | None,
            typer.Option(help="Path or Hugging Face id that engines load; NAME=PATH for each of several models."),
        ] = None,
        store: Annotated[
            str | None, typer.Option(help="Shards of the model: engines take their weights from a store.")
        ] = None,
        state: Annotated[
            Path | None, typer.Option(help="Folder for what is remembered; ~/.local/state/hetplan/NAME by default.")
        ] = None,
        port: Annotated[int, typer.Option(min=1, max=65_535, help="Where clients ask, on loopback.")] = 8080,
        policy: Annotated[str, typer.Option(help="What is done about interruptions.")] = "hetplan",
        first_port: Annotated[int, typer.Option(min=1024, max=30_000, help="First port of the engines.")] = 8000,
        vllm: Annotated[str, typer.Option(help="The engine's program.")] = "vllm",
        resolve_every: Annotated[
            float, typer.Option(min=0, max=86_400, help="Look at the demand every so many seconds; 0 never looks.")
        ] = 0.0,
    ) -> None:
        """Start a plan on this host's machines and keep it served until SIGTERM or Ctrl-C, which drains.

        A controller that was killed goes on when it is started again with the same plan and folder. With
        --resolve-every it plans anew when demand has moved, and serves the other plan where that is worth it. Events
        are written on stderr, a JSON object a line.
        """

        def run() -> None:
            found = (state or _default_state(plan)).absolute()
            _serve(plan, _Options(model or [], store, found, port, policy, first_port, vllm, resolve_every))

        answer(run, False)

    @app.command()
    def status(
        state: Annotated[
            Path | None, typer.Argument(help="Folder of `hetplan serve --state`; by default the latest of this user.")
        ] = None,
        watch: Annotated[float, typer.Option(min=0, help="Look again every so many seconds; 0 looks once.")] = 0.0,
        as_json: Annotated[bool, typer.Option("--json", help="Print exactly one JSON document on stdout.")] = False,
    ) -> None:
        """What is served: pipelines and their stages, machines and their notices, streams in flight, demand.

        HETPLAN_ADMIN_KEY is the router's key, where it is not the one in the folder.
        """

        def run() -> dict[str, Any]:
            from rich.live import Live

            from hetplan.runtime.controller.status import read_status

            key = os.environ.get("HETPLAN_ADMIN_KEY")
            folder = state or _latest_state()
            found = asyncio.run(read_status(folder, key))
            if watch <= 0 or as_json:
                console.print(_status_view(found))
                return found
            with Live(_status_view(found), console=console, auto_refresh=False) as live, suppress(KeyboardInterrupt):
                while True:
                    time.sleep(watch)
                    found = asyncio.run(read_status(folder, key))
                    live.update(_status_view(found), refresh=True)
            return found

        answer(run, as_json)


def _status_view(found: dict[str, Any]) -> Group:
    """Tables of what `read_status` says."""
    from rich.console import Group
    from rich.table import Table

    router = found["router"]
    said = f"router {router['url']}" if router["answers"] else f"the router does not answer: {router['why']}"
    pipelines = Table(
        "pipeline", "engines", "router", "in flight", "stages", title=f"{', '.join(found['models'])}, {said}"
    )
    for one in found["pipelines"]:
        stages = ", ".join(
            f"{s['layers'][0]}-{s['layers'][1] - 1} TP{s['tensor_parallel']} {s['machine'] or 'no machine'}"
            + (" (loading)" if one["phase"] == "starting" and not s["weights"] else "")
            for s in one["stages"]
        )
        number = str(one["pipeline"]) + ("" if one["generation"] is None else f".{one['generation']}")
        phase = one["phase"] + (f": {one['why']}" if one["why"] else "")
        phase += "" if one["wanted"] else " (of the plan before)"
        running = one.get("running")
        pipelines.add_row(
            number, phase, one.get("router") or "-", "-" if running is None else str(running), stages or "-"
        )
    machines = Table("machine", "offer", "state", "address", "taken in")
    for one in found["machines"]:
        left = one["taken_in_s"]
        phase = one["phase"] + (f": {one['why']}" if one["why"] else "")
        machines.add_row(
            one["machine"], one["offer"], phase, one["address"] or "-", "-" if left is None else f"{left:.0f} s"
        )
    tables = [pipelines, machines]
    if found["demand"]:
        demand = Table("query type", "requests/s", "in flight", "mean input", "mean output")
        for line in found["demand"]:
            demand.add_row(
                line["query_type"] or "-",
                f"{line['requests_per_s']:.2f}",
                str(line["in_flight"]),
                *(
                    "-" if line[name] is None else f"{line[name]:.0f}"
                    for name in ("mean_input_tokens", "mean_output_tokens")
                ),
            )
        tables.append(demand)
    return Group(*tables)


@dataclass(frozen=True)
class _Options:
    """How a plan is to be served, as given."""

    model: Sequence[str]
    store: str | None
    state: Path
    port: int
    policy: str
    first_port: int
    vllm: str
    resolve_every_s: float


def _serve(path: Path, options: _Options) -> None:
    missing = [name for name in ("ray", "aiohttp") if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidInputError(f"serve needs {missing[0]}; pip install 'hetplan[runtime]'")
    from hetplan.api import optimize, placement_plans, verify
    from hetplan.plan import Plan
    from hetplan.policies import policy
    from hetplan.problem.allocation import AllocationProblem
    from hetplan.resolving import allocation_resolver, allocation_serving, placement_resolver, replanner
    from hetplan.runtime.controller.controller import Controller
    from hetplan.runtime.controller.fleet import Fleet
    from hetplan.runtime.controller.provider import LocalProvider
    from hetplan.runtime.controller.ray_agents import LoopbackHead, RayAgents, make_token, ray_environment
    from hetplan.runtime.controller.router_process import RouterProcess
    from hetplan.runtime.controller.serving import Serving
    from hetplan.runtime.controller.status import KEY, say_router

    plan, state = Plan.load(path), options.state
    violations = verify(plan)
    if violations:
        raise InvalidInputError(f"the plan is not sound: {violations[0]} (and {len(violations) - 1} more)")
    placed = placement_plans(plan)
    _refuse_other_hosts(placed)
    if isinstance(plan.problem, AllocationProblem):
        serving = allocation_serving(plan, placed)
        resolve = allocation_resolver(optimize, verify, placement_plans)
    else:
        serving = Serving.of(plan)
        resolve = placement_resolver(optimize, verify)
    fleet = Fleet(_programs(serving.models, options), policy(options.policy), first_port=options.first_port)
    _look_first(serving, fleet, options)
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    say_router(state, f"http://127.0.0.1:{options.port}")
    make_token(state / "token")
    # Ray reads these when it is imported into each of its processes.
    os.environ.update(ray_environment(state / "token"))
    name = f"fleet-{hashlib.sha256(str(state).encode()).hexdigest()[:12]}"
    head = LoopbackHead(_short_folder(name), _address(state / "ray-address"))
    key = _key(state / KEY)
    router = RouterProcess(state / "router", serving.models[0], host="127.0.0.1", port=options.port, key=key)
    typer.echo(f"starting {', '.join(serving.models)}; how it goes: hetplan status {shlex.quote(str(state))}")
    _start_head(head)
    agents = RayAgents(head.address, name)
    agents.connect()
    controller = Controller(
        serving,
        fleet,
        state,
        provider=LocalProvider(head.address, state / "machines"),
        agents=agents,
        router=router,
        on_event=_teller(serving.models, options.port),
        replan=replanner(optimize, verify),
        resolve=resolve,
        resolve_every_s=options.resolve_every_s,
    )
    why = asyncio.run(_until_drained(controller, router))
    agents.disconnect()
    head.end()
    write_event("ended", {})
    if why:
        raise InvalidInputError(
            "nothing is served, as no pipeline starts: "
            + "; ".join(f"pipeline {number}: {said}" for number, said in why.items())
            + ". Mend that and start again"
        )


def _refuse_other_hosts(plans: Sequence[Plan]) -> None:
    pools = [pool for plan in plans for pool in plan.placement.cluster.pools]
    away = sorted({pool.offer.name for pool in pools if pool.offer.provider != "local"})
    if away:
        raise InvalidInputError(
            f"serve starts machines of this host only, and the plan has {away[0]}; plan for machines of provider "
            "'local', or run a Controller with the AwsProvider"
        )


def _programs(models: Sequence[str], options: _Options) -> Callable[[Plan], Programs]:
    """What is started for a plan of one of the models."""
    from hetplan.catalog.engines import DEFAULT_ENGINE, get_engine
    from hetplan.launchers.stores import shard_source
    from hetplan.launchers.vllm import sources_of
    from hetplan.runtime.controller.programs import Programs

    loaded = sources_of(models, models_given(options.model, models))
    if options.store is not None and len(models) > 1:
        raise InvalidInputError(f"a store's shards are of one model, and the plan has {', '.join(models)}")
    vllm = (*shlex.split(options.vllm), "serve")

    def programs_of(plan: Plan) -> Programs:
        engine = plan.placement.engine or get_engine(DEFAULT_ENGINE)
        source = shard_source(options.store, engine)
        return Programs(plan, engine, model=loaded.get(plan.placement.model.name), source=source, vllm=vllm)

    return programs_of


def _look_first(serving: Serving, fleet: Fleet, options: _Options) -> None:
    """Refuse what is missing, before anything is started."""
    from hetplan.launchers.vllm import model_source
    from hetplan.runtime.controller.preflight import check_engine, check_model, check_ports
    from hetplan.runtime.controller.state import load

    count = len(fleet.pipelines(serving))
    for number, plan in enumerate(serving.plans):
        programs = fleet.programs(serving, number)
        check_engine(programs.vllm, programs.engine, programs.all_nodes())
        check_model(model_source(plan.placement.model, programs.model))
    before = load(options.state / "state.json")
    if before is None or not before.machines:
        # Otherwise these may be its own.
        check_ports([options.port, *range(options.first_port, options.first_port + count)])


def _teller(models: Sequence[str], port: int) -> Callable[[str, dict[str, Any]], None]:
    """Events on stderr, and on stdout once where clients ask."""
    told: set[str] = set()

    def tell(name: str, values: dict[str, Any]) -> None:
        write_event(name, values)
        if name == "shunt" and values["targets"] and not told:
            told.add(name)
            typer.echo(f"serving {', '.join(models)} at http://127.0.0.1:{port}/v1; Ctrl-C ends it in peace")

    return tell


async def _until_drained(controller: Controller, router: RouterProcess) -> dict[int, str]:
    """Pipelines that do not start and why, where that is all of them; nothing when somebody has ended it."""
    loop = asyncio.get_running_loop()
    draining: list[asyncio.Task[None]] = []
    hopeless: dict[int, str] = {}

    async def drain() -> None:
        write_event("draining", {})
        await router.end(_DRAIN_S)
        controller.drain()

    def asked() -> None:
        # Once: whoever asks again waits for the same end.
        if not draining:
            draining.append(asyncio.create_task(drain()))

    async def give_up() -> None:
        while not draining:
            await asyncio.sleep(1.0)
            hopeless.update(controller.given_up())
            if hopeless:
                asked()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked)
    giving_up = asyncio.create_task(give_up())
    await controller.run()
    giving_up.cancel()
    return hopeless


def _start_head(head: LoopbackHead) -> None:
    head.start()
    port = int(head.address.rpartition(":")[2])
    end = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            break
        except OSError:
            if not head.runs() or time.monotonic() > end:
                raise InvalidInputError(f"Ray did not start: {head.tail()[-500:].strip()}") from None
            time.sleep(0.2)
    write_event("ray", {"address": head.address})


def _states() -> Path:
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return base / "hetplan"


def _default_state(plan: Path) -> Path:
    return _states() / (plan.stem or "plan")


def _latest_state() -> Path:
    """The folder in which something was written last."""
    found = sorted(_states().glob("*/state.json"), key=lambda file: file.stat().st_mtime)
    if not found:
        raise InvalidInputError(f"nothing was served from {_states()}; give the --state of `hetplan serve`")
    return found[-1].parent


def _short_folder(fleet: str) -> Path:
    """Ray makes sockets in it, whose paths are limited to 107 bytes."""
    from hetplan.runtime.controller.agent import own_folder

    folder = own_folder() / fleet
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _address(path: Path) -> str:
    """The head's address: what it was, or a free port of loopback."""
    if not path.exists():
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            path.write_text(f"127.0.0.1:{listening.getsockname()[1]}", "utf-8")
    return path.read_text("utf-8").strip()


def _key(path: Path) -> str:
    """The router's key for administration, made once."""
    given = os.environ.get("HETPLAN_ADMIN_KEY")
    if given:
        return given
    if not path.exists():
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(32))
    return path.read_text("utf-8").strip()
