"""The verb that measures a device, or fits tables that others measured. The command line adds it to its own verbs."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hetplan.catalog.calibration import Calibration
from hetplan.errors import InvalidInputError

if TYPE_CHECKING:
    from hetplan.calibration.measure import Progress
    from hetplan.calibration.raw_run import CalibrationRun

Answer = Callable[[Callable[[], Any], bool], None]
FOLDER = Path("calibrations")


def add_calibrate(app: typer.Typer, *, answer: Answer, console: Console, today: Callable[[], datetime.date]) -> None:
    """Add this verb to the command line, which lends its way of answering, its console and its calendar."""

    @app.command()
    def calibrate(
        out: Annotated[
            Path | None, typer.Option(help="File to write; calibrations/<GPU>.json.", show_default=False)
        ] = None,
        force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
        from_tables: Annotated[
            Path | None, typer.Option(help="Fit the kernel tables (CSV) of this folder instead of measuring.")
        ] = None,
        gpu: Annotated[str | None, typer.Option(help="Which GPU it is; by default the device's own name.")] = None,
        engine: Annotated[
            str | None, typer.Option(help="Measured: torch or vllm. From tables: whose kernels, such as vllm.")
        ] = None,
        device: Annotated[str | None, typer.Option(help="As torch names it: cuda, cuda:1, cpu.")] = None,
        dtype: Annotated[list[str] | None, typer.Option(help="Number format; repeat for several.")] = None,
        operation: Annotated[
            list[str] | None, typer.Option(help="gemm, gemv, attention_prefill ...; repeat for several.")
        ] = None,
        raw: Annotated[
            Path | None, typer.Option(help="File that takes each point; a run cut short goes on from it.")
        ] = None,
        time_limit: Annotated[float | None, typer.Option(help="Seconds after which no new point is begun.")] = None,
        point_limit: Annotated[float | None, typer.Option(help="Seconds of samples of one point; 1.")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print exactly one JSON document on stdout.")] = False,
    ) -> None:
        """Measure the GPU or CPU at hand and write its calibration, for predict and optimize."""

        def run() -> dict[str, Any]:
            began = time.perf_counter()
            if from_tables is not None:
                measuring = {
                    "--device": device,
                    "--dtype": dtype,
                    "--operation": operation,
                    "--raw": raw,
                    "--time-limit": time_limit,
                    "--point-limit": point_limit,
                }
                wrong = [name for name, value in measuring.items() if value]
                if wrong:
                    raise InvalidInputError(f"--from-tables measures nothing: leave out {', '.join(wrong)}")
                if gpu is None:
                    raise InvalidInputError("--from-tables needs --gpu NAME: whose tables to take")
                from hetplan.catalog.tables import gpu_name

                path = _free_path(out, gpu_name(gpu), force)
                calibration = Calibration.fit(gpu, from_tables, engine=engine)
                measured = None
            else:
                path, calibration, measured = _measured(
                    out, force, gpu, engine, device, dtype, operation, raw, time_limit, point_limit, today(), console
                )
            _save(calibration, path)
            document = _document(calibration, path, measured, time.perf_counter() - began)
            _show(document, calibration, console)
            return document

        answer(run, as_json)


def _measured(
    out: Path | None,
    force: bool,
    gpu: str | None,
    engine: str | None,
    device: str | None,
    dtypes: Sequence[str] | None,
    operations: Sequence[str] | None,
    raw: Path | None,
    time_limit_s: float | None,
    point_limit_s: float | None,
    today: datetime.date,
    console: Console,
) -> tuple[Path, Calibration, CalibrationRun]:
    from hetplan.calibration.device_names import gpu_of
    from hetplan.calibration.engine_steps import SMALL_DECODERS, fit_step_overheads
    from hetplan.calibration.fit_run import fit_run
    from hetplan.calibration.measure import ENGINES, POINT_LIMIT_S, measure
    from hetplan.calibration.torch_backend import TorchBackend
    from hetplan.calibration.vllm_decoder import time_decoders
    from hetplan.errors import UnknownNameError

    chosen = engine or "torch"
    if chosen not in ENGINES:
        raise UnknownNameError("engine", chosen, ENGINES)
    backend = TorchBackend(device, chosen)  # type: ignore[arg-type]
    # Before minutes of measuring: is it known, and may the file be written?
    path = _free_path(out, gpu or gpu_of(backend.facts), force)
    console.print(f"measuring {backend.facts.name}, {backend.facts.engine}")
    with _progress(console) as on_progress:
        run = measure(
            backend=backend,
            dtypes=dtypes or None,  # type: ignore[arg-type]
            operations=operations or None,  # type: ignore[arg-type]
            raw_path=raw,
            on_progress=on_progress,
            time_limit_s=time_limit_s,
            point_limit_s=POINT_LIMIT_S if point_limit_s is None else point_limit_s,
            today=today,
        )
    calibration = fit_run(run, gpu)
    if chosen == "vllm":
        console.print(f"timing whole steps of {len(SMALL_DECODERS)} small decoders in vLLM")
        timings = time_decoders(SMALL_DECODERS, threads=run.device.threads or 1)
        calibration = calibration.replace(step_overheads=(fit_step_overheads(calibration, timings),))
    return path, calibration, run


def _free_path(out: Path | None, gpu: str, force: bool) -> Path:
    path = FOLDER / f"{gpu}.json" if out is None else out
    if path.exists() and not force:
        raise InvalidInputError(f"{path} is there already; give --force to overwrite it, or another --out")
    return path


def _save(calibration: Calibration, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        calibration.save(path)
    except OSError as error:
        raise InvalidInputError(f"cannot write {path}: {error.strerror}. Choose another --out") from None


def _document(calibration: Calibration, path: Path, run: CalibrationRun | None, seconds: float) -> dict[str, Any]:
    spreads = [p.relative_spread for p in calibration.points if p.relative_spread is not None]
    return {
        "path": str(path),
        "gpu": calibration.gpu,
        "device": calibration.device,
        "driver": calibration.driver,
        "engine": calibration.engine,
        "points": len(calibration.points),
        "skipped": [] if run is None else list(run.skipped),
        "remaining": 0 if run is None else len(run.remaining),
        "elapsed_s": seconds,
        "median_spread": median(spreads) if spreads else None,
        "worst_spread": max(spreads) if spreads else None,
        "compute_flops": {d: q.model_dump(mode="json") for d, q in calibration.compute_flops.items()},
        "memory_bytes_per_s": calibration.memory_bytes_per_s.model_dump(mode="json"),
        "kernel_s": calibration.kernel_s.model_dump(mode="json"),
        "gemms": [fit.dtype for fit in calibration.gemms],
        "attention": [
            name
            for name, fit in (("prefill", calibration.prefill_attention), ("decode", calibration.decode_attention))
            if fit is not None
        ],
        "all_reduces": [curve.tensor_parallel for curve in calibration.all_reduces],
        "step_overheads": [o.model_dump(mode="json") for o in calibration.step_overheads],
        "sha256": calibration.sha256,
    }


def _show(document: dict[str, Any], calibration: Calibration, console: Console) -> None:
    table = Table(title=f"calibration of {calibration.gpu}", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name in ("device", "driver", "engine"):
        if document[name] is not None:
            table.add_row(name, document[name])
    if calibration.points:
        table.add_row("points", str(document["points"]))
    if document["median_spread"] is not None:
        table.add_row("spread", f"median {document['median_spread']:.1%}, worst {document['worst_spread']:.1%}")
    table.add_row("seconds", f"{document['elapsed_s']:.0f} (the paper: 204-500 s a GPU)")
    for dtype, rate in calibration.compute_flops.items():
        table.add_row(f"{dtype} compute", f"{rate.value / 1e12:.4g} TFLOP/s, {rate.source}")
    memory = calibration.memory_bytes_per_s
    table.add_row("memory", f"{memory.value / 1e9:.4g} GB/s, {memory.source}")
    table.add_row("small kernel", f"{calibration.kernel_s.value * 1e6:.3g} us, {calibration.kernel_s.source}")
    table.add_row("attention", ", ".join(document["attention"]) or "from the rates")
    for curve in calibration.all_reduces:
        table.add_row(f"all-reduce of {curve.tensor_parallel}", curve.library)
    for one in calibration.step_overheads:
        table.add_row(f"steps of {one.engine}", f"{one.step_s * 1e3:.3g} ms, and {one.layer_s * 1e3:.3g} ms a layer")
    table.add_row("sha256", document["sha256"])
    console.print(table)
    for reason in document["skipped"]:
        console.print(f"skipped {reason}")
    if document["remaining"]:
        console.print(f"{document['remaining']} points left by the time limit; give --raw FILE to go on from there")
    console.print(f"written to {document['path']}")


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[Progress], None]]:
    """A bar over the points, and which comes next; drawn on a terminal only."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def on_progress(progress: Progress) -> None:
            bar.update(task, completed=progress.done, total=progress.total, description=progress.what)

        yield on_progress
