"""Continuous batching one step at a time, on plain lists: what the compiled engine must agree with.

Only the seconds of a step are shared (`stage_seconds`, tested by itself against the estimator).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hetplan.simulator.clock import Clock, stage_seconds

BLOCK = 16


@dataclass
class Job:
    number: int
    arrival_s: float
    prompt: int
    answer: int
    cached: int = 0
    computed: int = 0
    emitted: int = 0
    blocks: int = 0
    flying: int = 0
    preemptions: int = 0
    first_s: float = math.nan
    finish_s: float = math.nan
    refused: bool = False

    @property
    def tokens(self) -> int:
        return self.prompt + self.emitted


@dataclass
class Step:
    end_s: float
    jobs: list[tuple[Job, bool]]


@dataclass
class Replica:
    clock: Clock
    first_stage: int
    stages: int
    max_num_seqs: int
    max_step_tokens: int
    blocks: int
    running: list[Job] = field(default_factory=list)
    waiting: list[Job] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    stage_free_s: list[float] = field(default_factory=list)
    free: int = 0

    def __post_init__(self) -> None:
        self.free = self.blocks
        self.stage_free_s = [0.0] * self.stages

    def arrive(self, job: Job) -> None:
        if -(-(job.prompt + job.answer) // BLOCK) > self.blocks:
            job.refused = True
            return
        self.waiting.append(job)

    def fill(self, now_s: float) -> None:
        while len(self.steps) < self.stages and self.one_step(now_s):
            pass

    def one_step(self, now_s: float) -> bool:
        budget, taken, preempted = self.max_step_tokens, [], False
        for job in list(self.running):
            if job not in self.running or budget == 0:
                continue
            new = min(job.tokens - job.computed, budget)
            if new <= 0:
                continue
            need = -(-(job.computed + new) // BLOCK) - job.blocks
            while need > self.free:
                at = self.running.index(job)
                younger = [one for one in self.running[at + 1 :] if one.flying == 0]
                if not younger and job.flying:
                    break
                victim = younger[-1] if younger else job
                self.running.remove(victim)
                self.free += victim.blocks
                victim.blocks = victim.computed = 0
                victim.preemptions += 1
                self.waiting.insert(0, victim)
                preempted = True
                if victim is job:
                    break
            if job not in self.running or need > self.free:
                continue
            taken.append((job, new, job.computed))
            self.give(job, new, need)
            budget -= new
        while self.waiting and not preempted and budget > 0 and len(self.running) < self.max_num_seqs:
            job = self.waiting[0]
            if job.computed == 0:
                job.computed = min(job.cached, job.tokens - 1)
            new = min(job.tokens - job.computed, budget)
            need = -(-(job.computed + new) // BLOCK) - job.blocks
            if need > self.free:
                break
            self.running.append(self.waiting.pop(0))
            taken.append((job, new, job.computed))
            self.give(job, new, need)
            budget -= new
        if not taken:
            return False
        decoding = [before for job, new, before in taken if new == 1 and before >= job.prompt]
        prompts = [(new, before) for job, new, before in taken if not (new == 1 and before >= job.prompt)]
        prompt_tokens = sum(new for new, _ in prompts)
        reach = 0.0
        if prompts:
            pairs = sum(new * (new / 2 + before) for new, before in prompts)
            reach = max(pairs / prompt_tokens - prompt_tokens / len(prompts) / 2, 0.0)
        context = sum(decoding) / len(decoding) if decoding else 0.0
        at_s = now_s
        for s in range(self.stages):
            at_s = max(at_s, self.stage_free_s[s])
            at_s += stage_seconds(
                self.clock, self.first_stage + s, len(prompts), prompt_tokens, reach, len(decoding), context
            )
            at_s += self.clock.send_s[self.first_stage + s, prompt_tokens + len(decoding)]
            self.stage_free_s[s] = at_s
        self.steps.append(Step(at_s, [(job, job.computed == job.tokens) for job, _, _ in taken]))
        return True

    def give(self, job: Job, new: int, need: int) -> None:
        job.computed += new
        job.blocks += need
        job.flying += 1
        self.free -= need

    def end_step(self, now_s: float) -> None:
        for step in [one for one in self.steps if one.end_s == now_s]:
            self.steps.remove(step)
            for job, sampled in step.jobs:
                job.flying -= 1
                if not sampled:
                    continue
                job.emitted += 1
                if math.isnan(job.first_s):
                    job.first_s = now_s
                if job.emitted == job.answer:
                    job.finish_s = now_s
                    self.running.remove(job)
                    self.free += job.blocks
                    job.blocks = 0
        self.fill(now_s)


def run(replicas: list[Replica], weights: list[float], jobs: list[Job], *, least_loaded: bool = False) -> None:
    """Send jobs to replicas by weight, in turn or where least is to do, until all are answered."""
    sent, now_s = [0] * len(replicas), 0.0
    coming = sorted(jobs, key=lambda job: (job.arrival_s, job.number))
    # Where something came: looked at when all of the same time is there.
    touched: set[int] = set()
    while True:
        step_s = min((step.end_s for replica in replicas for step in replica.steps), default=math.inf)
        arrival_s = coming[0].arrival_s if coming else math.inf
        if touched and arrival_s > now_s:
            for number in sorted(touched):
                replicas[number].end_step(now_s)
            touched.clear()
            continue
        if min(step_s, arrival_s) == math.inf:
            return
        now_s = min(step_s, arrival_s)
        if arrival_s <= step_s:
            counts = [len(r.running) + len(r.waiting) for r in replicas] if least_loaded else sent
            chosen = min(range(len(replicas)), key=lambda r: ((counts[r] + 1) / weights[r], r))
            sent[chosen] += 1
            replicas[chosen].arrive(coming.pop(0))
            touched.add(chosen)
            continue
        for replica in replicas:
            if any(step.end_s == step_s for step in replica.steps):
                replica.end_step(step_s)
                break
