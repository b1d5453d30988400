"""What the router adds: python -m benchmarks.router [section ...].

Sections: streams, idle; both by default. A recorded stream stands in for the engine, so that the router is what is
measured; server, router and client are a process each and share the machine's cores. A token's latency is from the
moment before the server writes it to the moment at which the client has read it, on one clock.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.stream_client import Load, starts_s
from hetplan.units import MIB

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "runtime"))

TOKENS_PER_S = 20.0
RAMP_S = 2.0
# Streams, and seconds after the ramp.
LOADS = ((50, 10.0), (100, 20.0), (150, 10.0), (200, 10.0))
ROUNDS = 3
MEDIAN_BAR_S, P99_BAR_S, DELIVERED_BAR = 1e-3, 5e-3, 0.9
IDLE_STREAMS, IDLE_BAR_BYTES = 1_000, 500 * MIB
IDLE_RAMP_S, IDLE_S = 10.0, 15.0


@dataclass(frozen=True, slots=True)
class Figures:
    """One run: seconds of latency, tokens that came of those that were due, and the router's share of a core."""

    median_s: float
    p99_s: float
    delivered: float
    cpu: float = 0.0


# ---- what is run


def client(load: Load) -> subprocess.Popen[str]:
    """The client, under way."""
    command = [sys.executable, "-m", "benchmarks.stream_client", json.dumps(asdict(load))]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def measure(engine_port: int, port: int, streams: int, lasts_s: float, first_sequence: int, pid: int | None) -> Figures:
    """One load on one port, the engine's own or the router's."""
    ends_s = RAMP_S + lasts_s
    load = Load(port, streams, TOKENS_PER_S, 10_000, RAMP_S, ends_s, first_sequence)
    spent_s, began = cpu_s(pid), time.perf_counter()
    answer, _ = client(load).communicate()
    cpu = (cpu_s(pid) - spent_s) / (time.perf_counter() - began)
    arrived = json.loads(answer)
    if arrived["refused"]:
        raise SystemExit(f"{len(arrived['refused'])} streams were refused, the first with {arrived['refused'][0]}")
    sent_ns = get(engine_port, "/sent")
    pairs = [
        (came, sent)
        for sequence, times in arrived["arrived_ns"].items()
        # Of a stream that was dropped some are on their way, and of one that came to no engine there are none.
        for came, sent in zip(times, sent_ns.get(sequence, []), strict=False)
    ]
    due = sum((ends_s - start_s) * TOKENS_PER_S for start_s in starts_s(load))
    whole = np.subtract(*np.array(pairs).T) * 1e-9
    return Figures(float(np.median(whole)), float(np.percentile(whole, 99)), len(whole) / due, cpu)


def get(port: int, path: str) -> dict[str, list[int]]:
    """What the recorded stream tells of itself."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as told:
        found: dict[str, list[int]] = json.load(told)
    return found


def cpu_s(pid: int | None) -> float:
    """Processor time of a process so far."""
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pss_bytes(pid: int) -> int:
    """Memory of a process, what it shares in its share."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    found = re.search(r"^Pss:\s+(\d+) kB$", rollup, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def best(rounds: list[Figures]) -> Figures:
    """The best of each figure."""
    return Figures(
        min(one.median_s for one in rounds),
        min(one.p99_s for one in rounds),
        max(one.delivered for one in rounds),
        min(one.cpu for one in rounds),
    )


# ---- tables


def yes(met: bool) -> str:
    """Whether a bar is met."""
    return "yes" if met else "no"


def streams() -> None:
    """Latency and what is delivered under growing loads, through the router and directly, in turns."""
    from recorded_stream import recorded_stream
    from router_process import run_router

    print(
        f"\n## Router: streams of {TOKENS_PER_S:g} tokens/s, a chunk each, through it and directly in turns, best of"
        f" {ROUNDS}\n\nBars: with 100 streams it adds at most {P99_BAR_S * 1e3:g} ms at P99 and"
        f" {MEDIAN_BAR_S * 1e3:g} ms in the median; it delivers {DELIVERED_BAR:.0%} of what comes without it.\n"
    )
    print(
        "| chunks/s | streams | direct: median ms | P99 ms | delivered | router: median ms | P99 ms | delivered "
        "| cores | adds: median ms | P99 ms | keeps | met |\n|" + "---|" * 13,
        flush=True,
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        recorded_stream(tokens_per_s=TOKENS_PER_S) as (_, engine_port),
        run_router(Path(folder), [engine_port]) as (process, port),
    ):
        sequence = 1_000
        for count, lasts_s in LOADS:
            alone, through = [], []
            for _ in range(ROUNDS):
                for rounds, at, pid in ((alone, engine_port, None), (through, port, process.pid)):
                    rounds.append(measure(engine_port, at, count, lasts_s, sequence, pid))
                    sequence += count
            one, other = best(alone), best(through)
            adds = (other.median_s - one.median_s, other.p99_s - one.p99_s)
            keeps = other.delivered / one.delivered
            met = keeps >= DELIVERED_BAR and (count != 100 or (adds[0] <= MEDIAN_BAR_S and adds[1] <= P99_BAR_S))
            print(
                f"| {count * TOKENS_PER_S:,.0f} | {count} | {one.median_s * 1e3:.2f} | {one.p99_s * 1e3:.2f} "
                f"| {one.delivered:.1%} | {other.median_s * 1e3:.2f} | {other.p99_s * 1e3:.2f} | {other.delivered:.1%} "
                f"| {other.cpu:.2f} | {adds[0] * 1e3:.2f} | {adds[1] * 1e3:.2f} | {keeps:.1%} | {yes(met)} |",
                flush=True,
            )


def idle() -> None:
    """Memory of a router whose streams wait for their first tokens."""
    from recorded_stream import recorded_stream
    from router_process import run_router

    print(f"\n## Router: {IDLE_STREAMS:,} streams that wait (bar: {IDLE_BAR_BYTES / MIB:.0f} MiB)\n")
    print("| streams | MiB before | MiB | KiB a stream | met |\n|---|---|---|---|---|")
    with (
        tempfile.TemporaryDirectory() as folder,
        recorded_stream(tokens_per_s=0) as (_, engine_port),
        run_router(Path(folder), [engine_port]) as (process, port),
    ):
        before = pss_bytes(process.pid)
        load = Load(port, IDLE_STREAMS, 0.0, 1_000, IDLE_RAMP_S, IDLE_RAMP_S + IDLE_S)
        waiting = client(load)
        time.sleep(IDLE_RAMP_S + IDLE_S - 5)
        held, running = pss_bytes(process.pid), get(engine_port, "/running")["running"]
        waiting.communicate()
        print(
            f"| {running:,} | {before / MIB:.0f} | {held / MIB:.0f} | {(held - before) / 1024 / IDLE_STREAMS:.0f} "
            f"| {yes(held < IDLE_BAR_BYTES and running == IDLE_STREAMS)} |",
            flush=True,
        )


SECTIONS: dict[str, Callable[[], None]] = {f.__name__: f for f in (streams, idle)}


def router() -> None:
    """All sections."""
    for section in SECTIONS.values():
        section()


def main() -> None:
    """Those named on the command line, or all."""
    unknown = [name for name in sys.argv[1:] if name not in SECTIONS]
    if unknown:
        raise SystemExit(f"no section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    for name in sys.argv[1:] or SECTIONS:
        SECTIONS[name]()


if __name__ == "__main__":
    main()
