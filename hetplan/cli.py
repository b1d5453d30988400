"""The command line (over 500 lines: most of them are the verbs' options): verbs with the names of the API.

Tables and progress go to stderr, data to stdout.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from hetplan import __version__
from hetplan.cli_calibrate import add_calibrate
from hetplan.cli_compare import add_compare
from hetplan.cli_measure import add_commands
from hetplan.cli_models import models_given
from hetplan.cli_router import add_router
from hetplan.cli_serve import add_serve
from hetplan.cli_shard import add_shard
from hetplan.cli_simulate import add_simulate
from hetplan.cli_store import add_store
from hetplan.errors import HetplanError, InfeasibleError, InvalidInputError, NoSolutionError, RouterError, StoreError

app = typer.Typer(
    name="hetplan",
    help="Plan LLM serving on heterogeneous GPUs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# markup and highlighting off: names of models and machines are data, not markup.
_console = Console(stderr=True, markup=False, highlight=False)
if not _console.is_terminal:
    _console = Console(stderr=True, markup=False, highlight=False, width=100)

# Options of `optimize` that say how a problem is solved, of whatever kind it is.
_SOLVING = ("solver", "time_limit_s", "seed")

# An unknown option, a missing argument, a value of the wrong type: wherever this typer keeps the class.
_USAGE_ERROR: type[BaseException] = typer.BadParameter.__mro__[1]

Json = Annotated[bool, typer.Option("--json", help="Print exactly one JSON document on stdout.")]


class Exit(IntEnum):
    """Exit codes."""

    FINE = 0
    OUR_FAULT = 1
    BAD_INPUT = 2
    INFEASIBLE = 3
    VIOLATIONS = 4
    NO_SOLUTION = 5


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def optimize(
    problem: Annotated[Path | None, typer.Argument(help="Problem file (YAML).", show_default=False)] = None,
    model: Annotated[str | None, typer.Option(help="Model name, Hugging Face id or config.json.")] = None,
    machine: Annotated[list[str] | None, typer.Option(help="TYPE=COUNT; repeat for each machine type.")] = None,
    region: Annotated[str | None, typer.Option(help="Region of --machine; us-west-2.")] = None,
    market: Annotated[str | None, typer.Option(help="on_demand or spot, of --machine; on_demand.")] = None,
    provider: Annotated[str | None, typer.Option(help="Provider of --machine; aws.")] = None,
    input_tokens: Annotated[float | None, typer.Option(help="Mean prompt tokens, with --model; 763.")] = None,
    output_tokens: Annotated[float | None, typer.Option(help="Mean output tokens, with --model; 232.")] = None,
    requests_per_s: Annotated[
        float | None, typer.Option(help="Demand, with --model; needed by objective cost.")
    ] = None,
    objective: Annotated[str | None, typer.Option(help="throughput, throughput_per_cost, (expected_)cost.")] = None,
    solver: Annotated[
        str | None,
        typer.Option(
            help="auto, exact, dp-beam, even, alpaserve, helix, hexgen or spotserve; "
            "of an allocation problem auto, milp, gh or agh."
        ),
    ] = None,
    search: Annotated[str | None, typer.Option(help="dp-beam's search: default or paper.")] = None,
    beam_width: Annotated[int | None, typer.Option(help="dp-beam's k.")] = None,
    estimator: Annotated[str | None, typer.Option(help="calibrated or paper.")] = None,
    engine: Annotated[str | None, typer.Option(help="Plan within an engine's limits, such as vllm-0.32.")] = None,
    weight_dtype: Annotated[str | None, typer.Option(help="Quantise the weights, such as fp8.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt + answer, tokens.")] = None,
    handover_sequences: Annotated[
        int | None, typer.Option(help="Keep room for a second engine with so many of the longest sequences; 0.")
    ] = None,
    handover_layers: Annotated[
        int | None, typer.Option(help="And for so many layers more in each of its stages; 0.")
    ] = None,
    time_limit: Annotated[float | None, typer.Option(help="Seconds.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of random choices.")] = None,
    calibration: Annotated[
        list[Path] | None, typer.Option(help="Own calibration of a GPU; repeat for several.")
    ] = None,
    robust_scenarios: Annotated[
        int | None, typer.Option(help="Make an allocation plan against so many scenarios; 20.")
    ] = None,
    robust_stress: Annotated[float | None, typer.Option(help="Factor on delays and errors in them; 1.")] = None,
    max_extra_cost: Annotated[
        float | None, typer.Option(help="What such a plan may cost more as planned, as a share; 0.05.")
    ] = None,
    max_violation_rate: Annotated[
        float | None, typer.Option(help="Most (scenario, query type) of such a plan with over 1% unserved.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Find a plan for a problem file, or for a model and machines given as options."""

    def run() -> dict[str, Any]:
        import hetplan as hp
        from hetplan.problem.files import read_calibrations, read_problem_file
        from hetplan.report import plan_tables

        described = {
            "--model": model,
            "--machine": machine or None,
            "--region": region,
            "--market": market,
            "--provider": provider,
            "--input-tokens": input_tokens,
            "--output-tokens": output_tokens,
            "--requests-per-s": requests_per_s,
        }
        if problem is not None:
            twice = [name for name, value in described.items() if value is not None]
            if twice:
                raise InvalidInputError(f"{problem} says it already: leave out {', '.join(twice)}, or the problem file")
            arguments = read_problem_file(problem)
        else:
            if model is None or not machine:
                raise InvalidInputError("give a problem file, or --model and at least one --machine TYPE=COUNT")
            arguments = {
                "model": model,
                "cluster": _counts(machine),
                "region": region or "us-west-2",
                "market": market or "on_demand",
                "provider": provider or "aws",
                "workload": hp.Workload(
                    input_tokens=763 if input_tokens is None else input_tokens,
                    output_tokens=232 if output_tokens is None else output_tokens,
                    requests_per_s=requests_per_s,
                ),
            }
        given = {
            "objective": objective,
            "solver": solver,
            "estimator": estimator,
            "engine": engine,
            "weight_dtype": weight_dtype,
            "max_model_len": max_model_len,
            "handover_sequences": handover_sequences,
            "handover_layers": handover_layers,
            "time_limit_s": time_limit,
            "seed": seed,
            "search": search,
            "beam_width": beam_width,
        }
        if "problem" in arguments:
            placing = [n for n, value in given.items() if value is not None and n not in _SOLVING]
            placing += ["calibration"] if calibration else []
            if placing:
                raise InvalidInputError(
                    f"{problem} is an allocation problem, which --{placing[0].replace('_', '-')} does not belong to; "
                    "leave it out"
                )
        arguments |= {name: value for name, value in given.items() if value is not None}
        trained = {
            "scenarios": robust_scenarios,
            "stress": robust_stress,
            "max_extra_cost": max_extra_cost,
            "max_violation_rate": max_violation_rate,
        }
        trained = {name: value for name, value in trained.items() if value is not None}
        if trained:
            arguments["robust"] = hp.Robust(**trained)
        if calibration:
            arguments["calibrations"] = arguments.get("calibrations", {}) | read_calibrations(calibration)
        with _progress(arguments.get("time_limit_s", 60.0)) as on_incumbent:
            plan = hp.optimize(**arguments, on_incumbent=on_incumbent)
            free = hp.optimize(**(arguments | {"engine": None})) if arguments.get("engine") is not None else None
        if out is not None:
            _write(plan.save, out)
        _console.print(plan_tables(plan))
        if free is not None and plan.placement.engine is not None:
            change = plan.objective / free.objective - 1
            _console.print(
                f"Within the limits of {plan.placement.engine.name}: {plan.objective_name} {plan.objective:.4g}; "
                f"without them {free.objective:.4g} ({change:+.1%})"
            )
        if out is not None:
            _console.print(f"written to {out}")
        document: dict[str, Any] = json.loads(plan.to_json())
        return document

    _answer(run, as_json)


@app.command()
def predict(
    model: Annotated[str, typer.Argument(help="Model name, Hugging Face id or config.json.")],
    gpu: Annotated[str, typer.Argument(help="GPU name or alias.")],
    tensor_parallel: Annotated[int, typer.Option("--tensor-parallel", "--tp", help="GPUs of a stage.")] = 1,
    pipeline_parallel: Annotated[int, typer.Option("--pipeline-parallel", "--pp", help="Stages.")] = 1,
    batch: Annotated[int, typer.Option(help="Sequences in the batch, in flight, or clients.")] = 8,
    input_tokens: Annotated[float, typer.Option(help="Prompt tokens of each.")] = 763,
    output_tokens: Annotated[float, typer.Option(help="Output tokens of each.")] = 232,
    schedule: Annotated[str, typer.Option(help="static, in_flight or closed_loop.")] = "static",
    weight_dtype: Annotated[str | None, typer.Option(help="Quantise the weights, such as fp8.")] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="Format of the KV cache.")] = None,
    instance_type: Annotated[str | None, typer.Option(help="Host, for its links.")] = None,
    estimator: Annotated[str, typer.Option(help="calibrated or paper.")] = "calibrated",
    calibration: Annotated[
        list[Path] | None, typer.Option(help="Own calibration of a GPU; repeat for several.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Whose steps, such as vllm; those that the calibration holds.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict how fast one replica is: a static batch, sequences kept in flight, or a closed loop of clients."""

    def run() -> dict[str, Any]:
        import hetplan as hp
        from hetplan.catalog.tables import gpu_name
        from hetplan.problem.files import read_calibrations
        from hetplan.report import replica_table

        own = None
        if calibration:
            found = read_calibrations(calibration)
            own = found.get(gpu_name(gpu))
            if own is None:
                raise InvalidInputError(f"no calibration of {gpu_name(gpu)}: the files are of {', '.join(found)}")
        timed = own.step_overheads[0].engine if own is not None and own.step_overheads else None
        prediction = hp.predict(
            model,
            gpu,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
            batch=batch,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            schedule=schedule,  # type: ignore[arg-type]
            weight_dtype=weight_dtype,
            kv_dtype=kv_dtype,
            instance_type=instance_type,
            calibration=own,
            engine=engine or timed,
            estimator=estimator,  # type: ignore[arg-type]
        )
        _console.print(replica_table(prediction))
        return prediction.model_dump(mode="json")

    _answer(run, as_json)


@app.command()
def verify(
    plan: Annotated[Path, typer.Argument(help="Plan file.")],
    max_price_age: Annotated[int, typer.Option(help="Days after which a price is called old.")] = 90,
    as_json: Json = False,
) -> None:
    """Check a plan against its own problem: feasibility, memory, objective, cost, bound."""

    def run() -> tuple[dict[str, Any], Exit]:
        import hetplan as hp
        from hetplan.api import simulated_percentiles
        from hetplan.catalog.clusters import price_warnings
        from hetplan.verification import examine_plan

        loaded = hp.Plan.load(plan)
        violations, confirmed = examine_plan(loaded, simulate=simulated_percentiles)
        used = {offer for d in loaded.deployments for p in d.pipelines for offer in p.nodes}
        asked = loaded.problem
        listed = (
            [tier.offer for tier in asked.tiers if tier.offer is not None]
            if isinstance(asked, hp.AllocationProblem)
            else [pool.offer for pool in asked.cluster.pools]
        )
        offers = [offer for offer in listed if offer.name in used]
        warnings = price_warnings(offers, _today(), max_age_days=max_price_age)
        for warning in warnings:
            _console.print(f"warning: {warning}")
        for violation in violations:
            _console.print(f"violation: {violation}")
        bound = "no bound stated" if loaded.bound is None else "bound not confirmed"
        _console.print(f"{plan}: {'faulty' if violations else 'sound'}; {confirmed or bound}")
        document = {
            "violations": [v.model_dump(mode="json") for v in violations],
            "warnings": warnings,
            "bound_confirmed": loaded.bound if confirmed is not None and not violations else None,
        }
        return document, Exit.VIOLATIONS if violations else Exit.FINE

    _answer(run, as_json)


@app.command()
def estimate(plan: Annotated[Path, typer.Argument(help="Plan file.")], as_json: Json = False) -> None:
    """Estimate what a plan does under its own workload."""

    def run() -> dict[str, Any]:
        import hetplan as hp

        result = hp.estimate(hp.Plan.load(plan))
        _console.print(
            f"{result.requests_per_s:.3f} req/s, {result.output_tokens_per_s:,.0f} output tokens/s, "
            f"{result.cost_usd_per_hour:.4f} $/h, "
            f"{result.usd_per_million_output_tokens:.3f} $ per million output tokens"
        )
        return result.model_dump(mode="json")

    _answer(run, as_json)


@app.command()
def launch(
    plan: Annotated[Path, typer.Argument(help="Plan file.")],
    out: Annotated[Path, typer.Option(help="New or empty folder.")] = Path("out"),
    target: Annotated[str, typer.Option(help="shell.")] = "shell",
    engine: Annotated[str | None, typer.Option(help="Engine version, such as vllm-0.32.")] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Path or id that the engine loads; NAME=PATH for each of several models."),
    ] = None,
    first_port: Annotated[int, typer.Option(help="HTTP port of the first pipeline.")] = 8000,
    kv_connector: Annotated[
        str | None, typer.Option(help="Caches move between engines: ExampleConnector or NixlConnector.")
    ] = None,
    kv_storage: Annotated[Path | None, typer.Option(help="Folder of ExampleConnector, an absolute path.")] = None,
    store: Annotated[
        str | None, typer.Option(help="Folder or URL of the shards that tensor stores serve; with engine hetplan.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and list, write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Write the scripts that start a plan."""

    def run() -> dict[str, Any]:
        import hetplan as hp

        launched = hp.Plan.load(plan)
        paths = hp.launch(
            launched,
            target,
            out,
            engine=engine,
            model=models_given(model or [], {deployment.model for deployment in launched.deployments}),
            first_port=first_port,
            kv_connector=kv_connector,
            kv_storage=kv_storage,
            store=store,
            dry_run=dry_run,
        )
        for path in paths:
            _console.print(f"{'would write' if dry_run else 'wrote'} {path}")
        return {"paths": [str(path) for path in paths], "written": not dry_run}

    _answer(run, as_json)


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(help="Plan file.")],
    after: Annotated[Path, typer.Argument(help="Plan file.")],
    as_json: Json = False,
) -> None:
    """What changes from one plan to another."""

    def run() -> dict[str, Any]:
        import hetplan as hp

        change = hp.Plan.load(before).diff(hp.Plan.load(after))
        _console.print(str(change))
        return change.model_dump(mode="json")

    _answer(run, as_json)


@app.command()
def catalog(
    what: Annotated[str, typer.Argument(help="models, gpus, instances or offers.")] = "models",
    match: Annotated[str, typer.Option(help="Show names that contain this.")] = "",
    region: Annotated[str | None, typer.Option(help="Offers of this region.")] = None,
    as_json: Json = False,
) -> None:
    """List what the catalogue holds, with sources."""

    def run() -> list[dict[str, Any]]:
        rows = _catalog_rows(what, match.lower(), region)
        _print_rows(what, rows)
        return rows

    _answer(run, as_json)


@app.command()
def prices(
    provider: Annotated[list[str] | None, typer.Option(help="Provider; repeat for several. aws.")] = None,
    out: Annotated[Path, typer.Option(help="CSV file of offers to write.")] = Path("offers.csv"),
    as_json: Json = False,
) -> None:
    """Write fresh prices as an offers file (needs the extra "prices")."""

    def run() -> dict[str, Any]:
        from hetplan.catalog.refresh import refreshed_offers

        text = refreshed_offers(provider or ["aws"], _today())
        _write(lambda path: path.write_text(text, encoding="utf-8"), out)
        offers = text.count("\n") - 1
        _console.print(f"{offers} offers written to {out}; edit the counts and give the file as a cluster")
        return {"path": str(out), "offers": offers}

    _answer(run, as_json)


def _catalog_rows(what: str, match: str, region: str | None) -> list[dict[str, Any]]:
    from hetplan.catalog import tables
    from hetplan.catalog.model import ModelSpec
    from hetplan.catalog.models import list_models

    if what == "models":
        specs = [(name, ModelSpec.get(name)) for name in list_models() if match in name]
        return [
            {
                "name": name,
                "parameters": spec.parameter_count,
                "active": spec.active_parameter_count,
                "layers": spec.layer_count,
                "weight_dtype": spec.weight_dtype,
                "weight_bytes": spec.weight_bytes,
                "kv_bytes_per_token": spec.kv_bytes_per_token(),
                "source": spec.source,
            }
            for name, spec in specs
        ]
    if what == "gpus":
        found = [tables.get_gpu(name) for name in tables.list_gpus() if match in name.lower()]
        return [
            {
                "name": gpu.name,
                "memory_bytes": gpu.memory_bytes,
                "bandwidth_bytes_per_s": gpu.bandwidth_bytes_per_s,
                "dense_16_bit_flops": max(gpu.dense_flops.get("bf16", 0.0), gpu.dense_flops.get("fp16", 0.0)),
                "calibration": tables.get_calibration(gpu.name).memory_bytes_per_s.source,
                "source": gpu.source,
            }
            for gpu in found
        ]
    if what == "instances":
        types = [tables.get_instance_type(name) for name in tables.list_instance_types() if match in name.lower()]
        return [
            {
                "name": t.name,
                "provider": t.provider,
                "gpu": t.gpu.name,
                "gpu_count": t.gpu_count,
                "network_bytes_per_s": t.inter_node_link.bytes_per_s,
                "source": t.source,
            }
            for t in types
        ]
    if what == "offers":
        offers = [o for o in tables.list_offers() if match in o.name.lower() and region in (None, o.region)]
        return [
            {
                "name": o.name,
                "price_usd_per_hour": o.price_usd_per_hour,
                "observed_on": None if o.observed_on is None else o.observed_on.isoformat(),
                "age_days": o.age_days(_today()),
                "source": o.source,
            }
            for o in offers
        ]
    raise InvalidInputError(f"the catalogue holds models, gpus, instances and offers, not {what!r}")


def _print_rows(title: str, rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    if not rows:
        _console.print(f"no {title} match")
        return
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*("" if v is None else f"{v:,}" if isinstance(v, int) else str(v) for v in row.values()))
    _console.print(table)


def _today() -> datetime.date:
    """The one place where the command line reads the calendar."""
    return datetime.datetime.now(datetime.UTC).date()


def _counts(machines: list[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for text in machines:
        name, separator, count = text.partition("=")
        if not separator or not (count.isascii() and count.isdigit()):
            raise InvalidInputError(f"--machine takes TYPE=COUNT, such as g6.12xlarge=3; got {text!r}")
        counts[name] = counts.get(name, 0) + int(count)
    return counts


def _write(save: Callable[[Path], object], path: Path) -> None:
    try:
        save(path)
    except OSError as error:
        raise InvalidInputError(f"cannot write {path}: {error.strerror}. Choose another --out") from None


@contextmanager
def _progress(time_limit_s: float) -> Iterator[Callable[[Any], None]]:
    """A bar over the time limit, with the best objective and bound so far; drawn on a terminal only."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("solving"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[best]}"))
    with Progress(*columns, console=_console, transient=True, disable=not _console.is_terminal) as bar:
        task = bar.add_task("solve", total=time_limit_s or 1.0, best="")

        def on_incumbent(progress: Any) -> None:
            shown = {"best": progress.objective, "bound": progress.bound}
            said = ", ".join(f"{name} {value:.4g}" for name, value in shown.items() if value is not None)
            bar.update(task, completed=progress.elapsed_s, best=said)

        yield on_incumbent


def _answer(run: Callable[[], Any], as_json: bool) -> None:
    """Run a verb, print its document when asked, and leave with the right code."""
    try:
        result = run()
    except HetplanError as error:
        code = _code(error)
        if as_json:
            typer.echo(json.dumps({"error": _error_document(error)}))
        else:
            _console.print(f"error: {error}")
        raise typer.Exit(code) from None
    document, code = result if isinstance(result, tuple) else (result, Exit.FINE)
    if as_json:
        typer.echo(json.dumps(document))
    raise typer.Exit(code)


add_simulate(app, answer=_answer, console=_console)
add_router(app, answer=_answer)
add_serve(app, answer=_answer, console=_console)
add_store(app, answer=_answer, console=_console)
add_shard(app, answer=_answer, console=_console)
add_compare(app, answer=_answer, console=_console)
add_calibrate(app, answer=_answer, console=_console, today=_today)
add_commands(app, answer=_answer, console=_console, today=_today, version=__version__)


def _code(error: HetplanError) -> Exit:
    if isinstance(error, InfeasibleError):
        return Exit.INFEASIBLE
    if isinstance(error, NoSolutionError):
        return Exit.NO_SOLUTION
    return Exit.BAD_INPUT if isinstance(error, InvalidInputError | RouterError | StoreError) else Exit.OUR_FAULT


def _error_document(error: HetplanError) -> dict[str, Any]:
    document: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, InfeasibleError):
        document["reasons"] = [
            {
                "constraint": r.constraint,
                "subject": r.subject,
                "needed": r.needed,
                "available": r.available,
                "unit": r.unit,
            }
            for r in error.reasons
        ]
    return document


def _fail(kind: str, label: str, message: str, code: Exit) -> NoReturn:
    """Leave with an error that no verb has answered: as a document when one was asked for, else as a line."""
    if "--json" in sys.argv:
        typer.echo(json.dumps({"error": {"type": kind, "message": message}}))
    else:
        _console.print(f"{label}: {message}")
    sys.exit(code)


def main() -> None:
    """Entry point of the ``hetplan`` command."""
    try:
        code = app(standalone_mode=False)
    except typer.Abort:
        sys.exit(Exit.OUR_FAULT)
    except _USAGE_ERROR as error:
        if not str(error):
            # No command given: the help has been shown.
            sys.exit(Exit.BAD_INPUT)
        said: str = error.format_message()  # type: ignore[attr-defined]
        _fail("UsageError", "error", f"{said.rstrip('.')}. See --help", Exit.BAD_INPUT)
    except Exception as error:
        said = f"{type(error).__name__}: {error}. Please report it with the command you ran"
        _fail("InternalError", "internal error", said, Exit.OUR_FAULT)
    sys.exit(code or Exit.FINE)
