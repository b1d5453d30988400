"""An interruption that a controller lived through beside what three earlier ones of the same cluster predict of it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "vllm"))

# Three are measured, the next one is predicted.
MEASURED = 3
GRACE_S = 120.0
WITHIN = 0.3


def interruptions() -> None:
    """Real vLLM over Ray nodes of this host; events and the figure are written to out/."""
    from environment import shards_of, tiny_model, vllm_environment
    from interruption import Interruption, live_through

    from hetplan.report_simulation import interruption_figure
    from hetplan.simulator.timelines import interruption_timelines, measured_start_times, read_events

    out = ROOT / "out"
    out.mkdir(exist_ok=True)
    path = out / "interruptions.jsonl"
    environment = vllm_environment()
    model = tiny_model(environment)
    asked = [Interruption(f"notice {number}", "notice", grace_s=GRACE_S) for number in range(1, MEASURED + 2)]
    print(f"\n## {len(asked)} notices of {GRACE_S:.0f} s: the last beside what the others predict\n", flush=True)
    with path.open("w") as file:

        def write(event: dict[str, object]) -> None:
            file.write(json.dumps(event) + "\n")
            file.flush()

        began = time.perf_counter()
        lived = live_through(environment, model, shards_of(environment, model, 1, 2), asked, on_event=write)
    print(lived.summary())
    found = interruption_timelines(read_events(path))
    before = [event for event in read_events(path) if event["at_s"] < found[MEASURED].begun_s]
    starts, last = measured_start_times(before), found[MEASURED]
    print(f"\nin {time.perf_counter() - began:.0f} s; from the first {MEASURED}: {starts}\n")
    print("| phase | ends after, s | predicted, s | ratio | takes, s | predicted, s |")
    print("|---|---|---|---|---|---|")
    predicted, begins = starts.expected_ends_s(), (0.0, 0.0)
    for phase, end_s in last.ends_s.items():
        ends = (end_s, predicted[phase])
        took = [end - begin for begin, end in zip(begins, ends, strict=True)]
        print(f"| {phase} | {ends[0]:.2f} | {ends[1]:.2f} | {ends[0] / ends[1]:.2f} | {took[0]:.2f} | {took[1]:.2f} |")
        begins = ends
    figure = interruption_figure(last, starts)
    figure.savefig(out / "interruption.png", dpi=150)
    print(f"\n{path} and {out / 'interruption.png'}")
    faults = [phase for phase, end_s in last.ends_s.items() if abs(end_s / predicted[phase] - 1) > WITHIN]
    if faults:
        raise SystemExit(f"predicted further off than {WITHIN:.0%}: {', '.join(faults)}")
    if lived.errors or any(answer.ids != lived.alone for answer in lived.answers):
        raise SystemExit("a stream was broken")
