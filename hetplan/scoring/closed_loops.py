"""Closed loops of clients that others measured, simulated: the mean TTFT and TPOT of each row.

What a loop's clients do is part of what is measured, and of the first token's time most of it: whether they begin all
at once, how many more of them there are than the engine has slots, how their lengths vary. See `LoadGenerator`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hetplan.catalog.models import get_model
from hetplan.catalog.tables import default_instance_type, get_calibration, get_gpu
from hetplan.errors import InvalidInputError
from hetplan.estimator.replica import Replica, make_replica
from hetplan.files import parse_csv, read_text
from hetplan.scoring.runs import MAX_TABLE_BYTES, MeasuredRun, read_runs
from hetplan.simulator.engine import DONE
from hetplan.simulator.fleet import Fleet, kind_of_replica
from hetplan.simulator.traffic import Traffic
from hetplan.workload.requests import Workload

IntArray = NDArray[np.int64]

MEMORY_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class LoadGenerator:
    """The clients of a closed loop.

    Attributes
    ----------
    name : str
    clients_beyond_slots : int
        Clients more than the sequences that the engine runs at a time, which are the row's concurrency.
    requests_per_client : int
    think_s : float
        Mean seconds between an answer and the client's next request.
    least_length_share : float
        Prompts and answers are evenly distributed from this share of the row's length to all of it.
    source : str
    """

    name: str
    clients_beyond_slots: int
    requests_per_client: int
    think_s: float
    least_length_share: float
    source: str


# Nothing assumed: as many clients as slots, who all begin at once.
PLAIN = LoadGenerator("plain", 0, 10, 0.0, 1.0, "assumed: as many clients as slots, all at once, equal lengths")
INFERENCEMAX = LoadGenerator(
    "InferenceMAX", 0, 10, 0.0, 0.8,
    "InferenceMAX's published client: ten prompts per client, lengths from 0.8 of the row's to all of it, all at once",
)  # fmt: skip
# No client is published for these rows. Their TTFT grows with the answer's length by about the time of an answer over
# the concurrency, as it does where one client waits for a slot at any time.
ONE_WAITS = LoadGenerator(
    "one waits", 1, 10, 0.010, 1.0,
    "inferred from the very rows: their TTFT grows with the answer's length as if one client more came than there are "
    "slots; 10 ms of thinking chosen",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A measured row: the run, its mean TTFT and TPOT in seconds, and the clients that it is taken to have had."""

    run: MeasuredRun
    row_id: str
    backend: str
    ttft_s: float
    tpot_s: float
    clients: LoadGenerator

    @property
    def slots(self) -> int:
        """Sequences that the engine runs at a time."""
        return int(self.run.batch)


def read_closed_loops(path: Path) -> list[ClosedLoop]:
    """The rows of a table of silicon samples (aiconfigurator's e2e_online_silicon.csv), with TTFT and TPOT.

    Raises
    ------
    InvalidInputError
        If the table is not such a one, or a value is wrong; the line is named.
    """
    runs = {run.line: run for run in read_runs(path)}
    text = read_text(path, MAX_TABLE_BYTES)
    header = {name.strip() for name in text.split("\n", 1)[0].split(",")}
    lacking = sorted({"id", "backend", "ttft_ms", "tpot_ms"} - header)
    if lacking:
        raise InvalidInputError(f"{path}: no column {lacking[0]}; give a table of silicon samples")
    found = []
    for line, row in parse_csv(text, str(path), sorted(header)):
        run = runs[line]
        try:
            ttft_s, tpot_s = float(row["ttft_ms"]) * 1e-3, float(row["tpot_ms"]) * 1e-3
        except ValueError as error:
            raise InvalidInputError(f"{path}, line {line}: {error}") from None
        clients = clients_of(row["id"], row["backend"])
        found.append(ClosedLoop(run, row["id"], row["backend"], ttft_s, tpot_s, clients))
    return found


def clients_of(row_id: str, backend: str) -> LoadGenerator:
    """Whose clients a row had, by its identifier: InferenceMAX's samples begin with their date."""
    if row_id.startswith("2026_04_06"):
        return INFERENCEMAX
    return ONE_WAITS if backend == "trtllm" else PLAIN


def replica_of(run: MeasuredRun) -> Replica:
    """The replica that was measured."""
    gpu = get_gpu(run.gpu)
    return make_replica(
        get_model(run.model).with_dtypes(weight_dtype=run.weight_dtype, kv_dtype=run.kv_dtype),
        default_instance_type(gpu),
        get_calibration(gpu),
        tensor_parallel=run.tensor_parallel,
        pipeline_parallel=run.pipeline_parallel,
        schedule=run.schedule,
        engine=run.engine,
        estimator="calibrated",
        gpu_memory_utilization=MEMORY_SHARE,
    )


def simulate_closed_loop(
    loop: ClosedLoop, clients: LoadGenerator | None = None, *, seed: int = 0
) -> tuple[float, float]:
    """Mean TTFT and TPOT of a row, simulated.

    Parameters
    ----------
    loop : ClosedLoop
    clients : LoadGenerator, optional
        Instead of the row's own.
    seed : int
        Of lengths and of thinking.

    Returns
    -------
    ttft_s, tpot_s : float
        NaN where the KV cache holds no such request.
    """
    run, who = loop.run, loop.clients if clients is None else clients
    replica = replica_of(run)
    load = Workload(input_tokens=run.input_tokens, output_tokens=run.output_tokens)
    slots = min(loop.slots, replica.problem.step_overheads.max_num_seqs)
    count = loop.slots + who.clients_beyond_slots
    traffic = Traffic.closed_loop(
        load, clients=count, requests=count * who.requests_per_client, think_s=who.think_s, seed=seed
    )
    if who.least_length_share < 1:
        rng = np.random.default_rng(seed)
        traffic = dataclasses.replace(
            traffic,
            input_tokens=_shortened(traffic.input_tokens, who.least_length_share, rng),
            output_tokens=_shortened(traffic.output_tokens, who.least_length_share, rng),
        )
    fleet = Fleet([kind_of_replica(replica, load, max_num_seqs=slots)], traffic)
    fleet.add(0)
    fleet.advance(math.inf)
    done = fleet.requests[fleet.requests["status"] == DONE]
    if not done.size:
        return math.nan, math.nan
    ttft = done["first_s"] - done["arrival_s"]
    tpot = (done["finish_s"] - done["first_s"]) / np.maximum(done["answer"] - 1, 1)
    return float(ttft.mean()), float(tpot.mean())


def _shortened(tokens: IntArray, share: float, rng: np.random.Generator) -> IntArray:
    least = np.maximum((tokens * share).astype(np.int64), 1)
    drawn: IntArray = rng.integers(least, tokens + 1)
    return drawn
