"""Replicas that serve requests step by step, compiled (over 500 lines: one state that all of it changes).

A step first gives each running sequence, oldest first, its next token or the next part of its prompt, then admits
waiting ones in the order of their arrival, within the step's tokens, the sequences in flight and the blocks of KV
cache. Where blocks run out, the youngest running sequence is preempted and computed again later. With S stages, S
steps are in flight: what one of them works on, no other touches.

While all that runs decodes and nothing can join, steps differ in their context alone: such a *stretch* is one event,
cut where something arrives. So cost grows with requests and not with tokens; the next event of R replicas is found by
looking at all of them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from hetplan.simulator.clock import Clock, stage_seconds

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
# An array of records: one argument of a compiled function instead of a column each.
Table = NDArray[np.void]

BLOCK_TOKENS = 16
# What a request is: not there yet, waiting (at a replica, or for one), running, answered, or refused.
UNBORN, WAITING, RUNNING, DONE, REFUSED = range(5)
# How the router chooses.
ROUND_ROBIN, LEAST_LOADED = range(2)
# A stretch is cut where its context has grown by so much: its steps are taken as evenly longer.
_STRETCH_GROWTH, _STRETCH_LEAST = 0.25, 32


# Columns over requests, in the order in which they come.
REQUEST = np.dtype(
    [
        ("arrival_s", "f8"),
        ("started_s", "f8"),  # first in a step
        ("first_s", "f8"),
        ("finish_s", "f8"),
        ("prompt", "i8"),
        ("answer", "i8"),
        ("cached", "i8"),  # prompt tokens that the prefix cache holds
        ("query_type", "i8"),
        ("status", "i8"),
        ("computed", "i8"),  # tokens whose keys and values are there, or in a step that is on its way
        ("emitted", "i8"),
        ("blocks", "i8"),
        ("replica", "i8"),
        ("in_steps", "i8"),  # steps on their way that hold it
        ("behind", "i8"),  # the next in the queue, or -1
        ("preemptions", "i8"),
        ("recomputed", "i8"),  # tokens
        ("moves", "i8"),
    ]
)
# Columns over replicas.
REPLICA = np.dtype(
    [
        ("open", "i8"),  # takes new requests
        ("first_stage", "i8"),
        ("stages", "i8"),
        ("max_num_seqs", "i8"),
        ("max_step_tokens", "i8"),
        ("blocks", "i8"),
        ("free", "i8"),
        ("running_count", "i8"),
        ("head", "i8"),
        ("tail", "i8"),
        ("waiting", "i8"),
        ("load", "i8"),  # requests that are there
        ("next_s", "f8"),  # its next event
        ("stretch", "i8"),  # steps of the stretch that is on its way, or 0
        ("stretch_start_s", "f8"),
        ("stretch_first_s", "f8"),  # seconds of its first step
        ("stretch_growth_s", "f8"),  # by how much each step is longer than the one before
        ("busy_since_s", "f8"),  # NaN while it has nothing to do
        ("busy_s", "f8"),
        ("steps", "i8"),
        ("tokens", "i8"),
    ]
)
# What comes later: a request, to a replica or (-1) to where the router sends it.
LATER = np.dtype([("s", "f8"), ("request", "i8"), ("replica", "i8")])
STEP = np.dtype(
    [("start_s", "f8"), ("end_s", "f8"), ("replica", "i8"), ("prompt", "i8"), ("sequences", "i8"), ("steps", "i8")]
)


class Replicas(NamedTuple):
    """Replicas with what they run; M sequences, S stages and as many steps in flight at most."""

    row: Table  # (R,) of REPLICA
    running: IntArray  # (R, M) oldest first
    stage_free_s: FloatArray  # (R, S)
    step_end_s: FloatArray  # (R, S) infinite where there is none
    step_size: IntArray  # (R, S)
    step_member: IntArray  # (R, S, M) a request, or its complement where it gets no token


class Router(NamedTuple):
    """Who is sent where, and what has not come yet.

    ``numbers``: way of choosing; the next request of the list; size of the heap; head and tail of those that no replica
    takes; clients of a closed loop, 0 where requests come by themselves; steps logged.
    """

    weight: FloatArray  # (query type, replica)
    sent: FloatArray
    numbers: IntArray
    heap: Table  # (N,) of LATER
    log: Table  # (L,) of STEP


WAY, NEXT, HEAP, HELD_HEAD, HELD_TAIL, CLIENTS, LOGGED = range(7)

_jit = njit(cache=True, error_model="numpy")
# A number written out is a type of its own to the compiler: functions called with one would be compiled once more.
_int64: Any = np.int64


# ---- time of a step


@_jit  # type: ignore[untyped-decorator, unused-ignore]
def _decode_step_s(clock: Clock, p: Replicas, r: int, sequences: int, context: float) -> float:
    """Seconds of one step through all stages that holds nothing but decoding sequences."""
    seconds, none = 0.0, _int64(0)
    first, count = p.row[r].first_stage, p.row[r].stages
    for s in range(first, first + count):
        seconds += stage_seconds(clock, s, none, none, 0.0, sequences, context) + clock.send_s[s, sequences]
    return seconds


@_jit  # type: ignore[untyped-decorator, unused-ignore]
def _stretch_s(p: Replicas, r: int, steps: int) -> float:
    """Seconds of the first steps of a stretch."""
    return float(steps * p.row[r].stretch_first_s + p.row[r].stretch_growth_s * steps * (steps - 1) / 2)


@_jit  # type: ignore[untyped-decorator, unused-ignore]
def _steps_by(p: Replicas, r: int, t: float) -> int:
    """Whole steps of the stretch that are over at a time."""
    low, high = 0, p.row[r].stretch
    span = t - p.row[r].stretch_start_s
    while low < high:
        middle = (low + high + 1) // 2
        if _stretch_s(p, r, middle) <= span:
            low = middle
        else:
            high = middle - 1
    return low


@_jit  # type: ignore[untyped-decorator, unused-ignore]
def _log(q: Router, r: int, start_s: float, end_s: float, prompt: int, sequences: int, steps: int) -> None:
    at = q.numbers[LOGGED]
    if at < len(q.log):
        q.log[at].replica, q.log[at].start_s, q.log[at].end_s = r, start_s, end_s
        q.log[at].prompt, q.log[at].sequences, q.log[at].steps = prompt, sequences, steps
        q.numbers[LOGGED] = at + 1


# ---- queues


@_jit  # type: ignore[untyped-decorator, unused-ignore]
def _push(q: Router, t: float, request: int, replica: int) -> None:
    """Onto the heap of what comes later; ties go by the request's number."""
    at = q.numbers[HEAP]
    q.numbers[HEAP] = at + 1
    while at > 0:
        above = (at - 1) // 2
        if (q.heap[above].s, q.heap[above].request) <= (t, request):
            break
        q.heap[at].s, q.heap[at].request = q.heap[above].s, q.heap[above].request
        q.heap[at].replica = q.heap[above].replica
        at = above
    q.heap[at].s, q.heap[at].request, q.heap[at].replica = t, request, replica


@_jit  # type: ignore[untyped-decorator, unused-ignore]
def _pop(q: Router) -> tuple[int, int]:
    """The earliest of the heap, and the replica that it is for."""
    request, replica = q.heap[0].request, q.heap[0].replica
    size = q.numbers[HEAP] - 1
    q.numbers[HEAP] = size
    t, last, where = q.heap[size].s, q.heap[size].request, q.heap[size].replica
    at = 0
    while True:
        below = 2 * at + 1
        if below >= size:
            break
        if below + 1 < size and (q.heap[below + 1].s, q.heap[below + 1].request) < (
            q.heap[below].s,
            q.heap[below].request,
        ):
            below += 1
        if (t, last) <= (q.heap[below].s, q.heap[below].request):
            break
        q.heap[at].s, q.heap[at].request = q.heap[below].s, q.heap[below].request
        q.heap[at].replica = q.heap[below].replica
        at = below
    q.heap[at].s, q.heap[at].request, q.heap[at].replica = t, last, where
    return request, replica


@_jit  # type: ignore[untyped-decorator, unused-ignore]
def _enqueue(a: Table, p: Replicas, r: int, i: int) -> None:
    """Last in line at a replica."""
    a[i].status, a[i].replica, a[i].behind = WAITING, r, -1
    if p.row[r].head < 0:
        p.row[r].head = i
    else:
        a[p.row[r].tail].behind = i
    p.row[r].tail = i
    p.row[r].waiting += 1


@_jit  # type: ignore[untyped-decorator, unused-ignore]
def _enqueue_first(a: Table, p: Replicas, r: int, i: int) -> None:
    a[i].status, a[i].replica, a[i].behind = WAITING, r, p.row[r].head
    if p.row[r].head < 0:
        p.row[r].tail = i
    p.row[r].head = i
    p.row[r].waiting += 1


@_jit  # type: ignore[untyped-decorator, unused-ignore]
def _dequeue(a: Table, p: Replicas, r: int) -> int:
    i = p.row[r].head
    p.row[r].head = a[i].behind
    if p.row[r].head < 0:
        p.row[r].tail = -1
    p.row[r].waiting -= 1
    return int(i)


@_jit  # type: ignore[untyped-decorator, unused-ignore]
def _leave(p: Replicas, r: int, place: int) -> None:
    """Take a place out of the running ones, their order kept."""
    for at in range(place, p.row[r].running_count - 1):
        p.running[r, at] = p.running[r, at + 1]
    p.row[r].running_count -= 1


# ---- the scheduler


@_jit  # type: ignore[untyped-decorator, unused-ignore]
def _blocks_for(tokens: int) -> int:
    return (tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS


@_jit  # type: ignore[untyped-decorator, unused-ignore]
def _preempt(a: Table, p: Replicas, r: int, place: int) -> None:
    """Give a running sequence's blocks back; it waits first in line, to be computed again."""
    i = p.running[r, place]
    _leave(p, r, place)
    p.row[r].free += a[i].blocks
    a[i].recomputed += a[i].computed
    a[i].blocks = 0
    a[i].computed = 0
    a[i].preemptions += 1
    _enqueue_first(a, p, r, i)


@_jit  # type: ignore[untyped-decorator, unused-ignore]
def _form_step(clock: Clock, a: Table, p: Replicas, q: Router, r: int, slot: int, t: float) -> bool:
    """Schedule one step at a time; whether there was anything for it."""
    budget = p.row[r].max_step_tokens
    none = _int64(0)
    prompts, prompt_tokens, pairs = none, none, 0.0
    sequences, context = none, none
    size = none
    preempted = False
    place = none
    while place < p.row[r].running_count and budget > 0:
        i = p.running[r, place]
        new = min(a[i].prompt + a[i].emitted - a[i].computed, budget)
        if new <= 0:
            place += 1
            continue
        need = _blocks_for(a[i].computed + new) - a[i].blocks
        while need > p.row[r].free:
            victim = p.row[r].running_count - 1
            while victim > place and a[p.running[r, victim]].in_steps > 0:
                victim -= 1
            if victim == place and a[i].in_steps > 0:
                break
            preempted = True
            _preempt(a, p, r, victim)
            if victim == place:
                break
        if need > p.row[r].free:
            if place < p.row[r].running_count and p.running[r, place] == i:
                place += 1
            continue
        if place >= p.row[r].running_count or p.running[r, place] != i:
            continue
        prompts, prompt_tokens, pairs, sequences, context = _take(
            a, p, r, i, new, need, prompts, prompt_tokens, pairs, sequences, context
        )
        budget -= new
        size = _join(a, p, r, slot, size, i)
        place += 1
    while not preempted and p.row[r].head >= 0 and budget > 0 and p.row[r].running_count < p.row[r].max_num_seqs:
        i = p.row[r].head
        if a[i].computed == 0:
            # What the prefix cache holds is not computed; the last token always is.
            a[i].computed = min(a[i].cached, a[i].prompt + a[i].emitted - 1)
        new = min(a[i].prompt + a[i].emitted - a[i].computed, budget)
        need = _blocks_for(a[i].computed + new)
        if need > p.row[r].free:
            break
        _dequeue(a, p, r)
        a[i].status = RUNNING
        p.running[r, p.row[r].running_count] = i
        p.row[r].running_count += 1
        if math.isnan(a[i].started_s):
            a[i].started_s = t
        prompts, prompt_tokens, pairs, sequences, context = _take(
            a, p, r, i, new, need, prompts, prompt_tokens, pairs, sequences, context
        )
        budget -= new
        size = _join(a, p, r, slot, size, i)
    if size == 0:
        return False
    reach = max(pairs / prompt_tokens - prompt_tokens / prompts / 2, 0.0) if prompts > 0 else 0.0
    mean_context = context / sequences if sequences > 0 else 0.0
    now = t
    tokens = prompt_tokens + sequences
    first = p.row[r].first_stage
    for s in range(p.row[r].stages):
        begin = max(now, p.stage_free_s[r, s])
        spent = stage_seconds(clock, first + s, prompts, prompt_tokens, reach, sequences, mean_context)
        now = begin + spent + clock.send_s[first + s, tokens]
        p.stage_free_s[r, s] = now
    p.step_end_s[r, slot] = now
    p.step_size[r, slot] = size
    p.row[r].steps += 1
    _log(q, r, t, now, prompt_tokens, sequences, _int64(1))
    return True


@_jit  # type: ignore[untyped-decorator, unused-ignore]
def _take(
    a: Table,
    p: Replicas,
    r: int,
    i: int,
    new: int,
    need: int,
    prompts: int,
    prompt_tokens: int,
    pairs: float,
    sequences: int,
    context: int,
) -> tuple[int, int, float, int, int]:
    """Count a request's part of a step: a sequence that decodes, or a prompt."""
    before = a[i].computed
    if new == 1 and before >= a[i].prompt:
        sequences += 1
        context += before
    else:
        prompts += 1
        prompt_tokens += new
        pairs += new * (new / 2 + before)
    a[i].computed = before + new
    a[i].blocks += need
    p.row[r].free -= need
    return prompts, prompt_tokens, pairs, sequences, context


@_jit  # type: ignore[untyped-decorator, unused-ignore]
def _join(a: Table, p: Replicas, r: int, slot: int, size: int, i: int) -> int:
    a[i].in_steps += 1
    p.step_member[r, slot, size] = i if a[i].computed == a[i].prompt + a[i].emitted else ~i
    return size + 1


@_jit  # type: ignore[untyped-decorator, unused-ignore]
def _start_stretch(clock: Clock, a: Table, p: Replicas, r: int, t: float) -> bool:
    """Begin steps that only decode, where all that runs does so and nothing that waits can join before one ends."""
    count = p.row[r].running_count
    if count == 0:
        return False
    steps, context = 1 << 60, 0
    for place in range(count):
        i = p.running[r, place]
        if a[i].emitted == 0 or a[i].computed != a[i].prompt + a[i].emitted - 1 or a[i].computed < a[i].prompt:
            return False
        steps = min(steps, a[i].answer - a[i].emitted)
        context += a[i].computed
    if p.row[r].head >= 0 and count < p.row[r].max_num_seqs and count < p.row[r].max_step_tokens:
        i = p.row[r].head
        before = a[i].computed if a[i].computed > 0 else min(a[i].cached, a[i].prompt + a[i].emitted - 1)
        new = min(a[i].prompt + a[i].emitted - before, p.row[r].max_step_tokens - count)
        if _blocks_for(before + new) <= p.row[r].free:
            return False
    if count > p.row[r].max_step_tokens:
        return False
    mean = context / count
    steps = min(steps, max(_STRETCH_LEAST, int(mean * _STRETCH_GROWTH)))
    while steps > 1:
        need = 0
        for place in range(count):
            i = p.running[r, place]
            need += _blocks_for(a[i].computed + steps) - a[i].blocks
        if need <= p.row[r].free:
            break
        steps = steps // 2
    if steps < 2:
        return False
    first = _decode_step_s(clock, p, r, count, mean)
    last = _decode_step_s(clock, p, r, count, mean + steps - 1)
    p.row[r].stretch = steps
    p.row[r].stretch_start_s = t
    p.row[r].stretch_first_s = first
    p.row[r].stretch_growth_s = (last - first) / (steps - 1)
    p.row[r].next_s = t + _stretch_s(p, r, steps)
    return True


@_jit  # type: ignore[untyped-decorator, unused-ignore]
def _commit_steps(clock: Clock, a: Table, p: Replicas, q: Router, r: int, steps: int) -> None:
    """Steps of the stretch that are over: a token each for all that runs."""
    if steps == 0:
        return
    end_s = p.row[r].stretch_start_s + _stretch_s(p, r, steps)
    place = _int64(0)
    _log(q, r, p.row[r].stretch_start_s, end_s, _int64(0), p.row[r].running_count, steps)
    p.row[r].steps += steps
    while place < p.row[r].running_count:
        i = p.running[r, place]
        a[i].computed += steps
        a[i].emitted += steps
        p.row[r].tokens += steps
        need = _blocks_for(a[i].computed) - a[i].blocks
        a[i].blocks += need
        p.row[r].free -= need
        if a[i].emitted == a[i].answer:
            _finish(a, p, q, r, place, end_s)
        else:
            place += 1


@_jit  # type: ignore[untyped-decorator, unused-ignore]
def _finish(a: Table, p: Replicas, q: Router, r: int, place: int, t: float) -> None:
    i = p.running[r, place]
    _leave(p, r, place)
    p.row[r].free += a[i].blocks
    a[i].blocks = 0
    a[i].status = DONE
    a[i].finish_s = t
    p.row[r].load -= 1
    _answered(a, q, t)


@_jit  # type: ignore[untyped-decorator, unused-ignore]
def _answered(a: Table, q: Router, t: float) -> None:
    """In a closed loop the client that was answered sends its next request."""
    following = q.numbers[NEXT]
    if q.numbers[CLIENTS] > 0 and following < len(a):
        q.numbers[NEXT] = following + 1
        # Until then its time of arrival is how long the client thinks.
        a[following].arrival_s += t
        _push(q, a[following].arrival_s, following, _int64(-1))


@_jit  # type: ignore[untyped-decorator, unused-ignore]
def settle(clock: Clock, a: Table, p: Replicas, q: Router, r: int, t: float) -> None:
    """End a replica's stretch at a time: whole steps are done, the one that is going on stays in flight."""
    if p.row[r].stretch == 0:
        return
    done = min(_steps_by(p, r, t), p.row[r].stretch - 1)
    begin_s = p.row[r].stretch_start_s + _stretch_s(p, r, done)
    end_s = p.row[r].stretch_start_s + _stretch_s(p, r, done + 1)
    _commit_steps(clock, a, p, q, r, done)
    count, context = p.row[r].running_count, 0
    for place in range(count):
        i = p.running[r, place]
        context += a[i].computed
        a[i].computed += 1
        need = _blocks_for(a[i].computed) - a[i].blocks
        a[i].blocks += need
        p.row[r].free -= need
        a[i].in_steps = 1
        p.step_member[r, 0, place] = i
    now = begin_s
    first = p.row[r].first_stage
    for s in range(p.row[r].stages):
        spent = stage_seconds(clock, first + s, _int64(0), _int64(0), 0.0, count, context / count)
        now += spent + clock.send_s[first + s, count]
        p.stage_free_s[r, s] = min(now, end_s)
    p.row[r].steps += 1
    p.row[r].stretch = 0
    p.step_end_s[r, 0] = end_s
    p.step_size[r, 0] = count
    _log(q, r, begin_s, end_s, _int64(0), count, _int64(1))
    p.row[r].next_s = end_s


@_jit  # type: ignore[untyped-decorator, unused-ignore]
def _schedule(clock: Clock, a: Table, p: Replicas, q: Router, r: int, t: float) -> None:
    """Fill the steps that a replica may have in flight, and say when its next event is."""
    slots, busy = p.row[r].stages, 0
    for slot in range(slots):
        if p.step_end_s[r, slot] < math.inf:
            busy += 1
    if busy == 0 and _start_stretch(clock, a, p, r, t):
        return
    for slot in range(slots):
        if p.step_end_s[r, slot] == math.inf and not _form_step(clock, a, p, q, r, slot, t):
            break
    p.row[r].next_s = p.step_end_s[r, :slots].min()
    if p.row[r].next_s == math.inf:
        _rest(p, r, t)
    elif math.isnan(p.row[r].busy_since_s):
        p.row[r].busy_since_s = t


@_jit  # type: ignore[untyped-decorator, unused-ignore]
def _rest(p: Replicas, r: int, t: float) -> None:
    """Nothing to do from now on."""
    if not math.isnan(p.row[r].busy_since_s):
        p.row[r].busy_s += t - p.row[r].busy_since_s
        p.row[r].busy_since_s = math.nan


@_jit  # type: ignore[untyped-decorator, unused-ignore]
def _end_step(a: Table, p: Replicas, q: Router, r: int, slot: int, t: float) -> None:
    """A step is over: those whose last token it held get the next one."""
    p.step_end_s[r, slot] = math.inf
    finished = False
    for at in range(p.step_size[r, slot]):
        member = p.step_member[r, slot, at]
        i = member if member >= 0 else ~member
        a[i].in_steps -= 1
        if member < 0:
            continue
        a[i].emitted += 1
        p.row[r].tokens += 1
        if math.isnan(a[i].first_s):
            a[i].first_s = t
        finished = finished or a[i].emitted == a[i].answer
    p.step_size[r, slot] = 0
    if finished:
        place = _int64(0)
        while place < p.row[r].running_count:
            i = p.running[r, place]
            if a[i].emitted == a[i].answer:
                _finish(a, p, q, r, place, t)
            else:
                place += 1


# ---- the router


@_jit  # type: ignore[untyped-decorator, unused-ignore]
def _choose(p: Replicas, q: Router, query_type: int) -> int:
    """The replica that is furthest behind its share, or that has least to do for its weight; -1 where none is open."""
    best, least = -1, math.inf
    for r in range(len(p.row)):
        weight = q.weight[query_type, r]
        if p.row[r].open == 0 or weight <= 0:
            continue
        count = float(p.row[r].load) if q.numbers[WAY] == LEAST_LOADED else q.sent[query_type, r]
        if (count + 1) / weight < least:
            best, least = r, (count + 1) / weight
    return best


@_jit  # type: ignore[untyped-decorator, unused-ignore]
def _hold(a: Table, q: Router, i: int) -> None:
    a[i].status, a[i].replica, a[i].behind = WAITING, -1, -1
    if q.numbers[HELD_HEAD] < 0:
        q.numbers[HELD_HEAD] = i
    else:
        a[q.numbers[HELD_TAIL]].behind = i
    q.numbers[HELD_TAIL] = i


@_jit  # type: ignore[untyped-decorator, unused-ignore]
def _arrive(clock: Clock, a: Table, p: Replicas, q: Router, i: int, wanted: int, t: float) -> None:
    r = wanted if wanted >= 0 and p.row[wanted].open == 1 else _choose(p, q, a[i].query_type)
    if r < 0:
        # Keys and values that were on their way to a replica that is gone are gone as well.
        a[i].computed = 0
        _hold(a, q, i)
        return
    if wanted < 0:
        q.sent[a[i].query_type, r] += 1
    elif r != wanted:
        a[i].computed = 0
    if _blocks_for(a[i].prompt + a[i].answer) > p.row[r].blocks:
        a[i].status = REFUSED
        a[i].finish_s = t
        _answered(a, q, t)
        return
    crowded = p.row[r].waiting > 0 or p.row[r].running_count >= p.row[r].max_num_seqs
    _enqueue(a, p, r, i)
    p.row[r].load += 1
    if p.row[r].stretch > 0:
        if crowded:
            return
        settle(clock, a, p, q, r, t)
    # Scheduled when all that comes at this time is there, as an engine looks at its queue between steps.
    p.row[r].next_s = t


@_jit  # type: ignore[untyped-decorator, unused-ignore]
def release_held(clock: Clock, a: Table, p: Replicas, q: Router, t: float) -> None:
    """Send what no replica took to those that are open now, in the order in which it came."""
    i = q.numbers[HELD_HEAD]
    q.numbers[HELD_HEAD] = q.numbers[HELD_TAIL] = -1
    while i >= 0:
        following = a[i].behind
        _arrive(clock, a, p, q, i, _int64(-1), t)
        i = following


@_jit  # type: ignore[untyped-decorator, unused-ignore]
def advance(clock: Clock, a: Table, p: Replicas, q: Router, until_s: float) -> float:
    """Let everything happen up to a time.

    Returns
    -------
    float
        Time of the last event; infinity with nothing left to do is `until_s` = infinity's own end.
    """
    now = 0.0
    while True:
        r, t = _int64(0), math.inf
        for one in range(len(p.row)):
            if p.row[one].next_s < t:
                r, t = one, p.row[one].next_s
        listed = math.inf
        if q.numbers[CLIENTS] == 0 and q.numbers[NEXT] < len(a):
            listed = a[q.numbers[NEXT]].arrival_s
        later = q.heap[0].s if q.numbers[HEAP] > 0 else math.inf
        arrival = min(listed, later)
        if min(arrival, t) > until_s or min(arrival, t) == math.inf:
            return now
        if arrival <= t:
            now = arrival
            if later <= listed:
                i, wanted = _pop(q)
                _arrive(clock, a, p, q, i, wanted, arrival)
            else:
                i = q.numbers[NEXT]
                q.numbers[NEXT] = i + 1
                _arrive(clock, a, p, q, i, _int64(-1), arrival)
            continue
        now = t
        if p.row[r].stretch > 0:
            steps = p.row[r].stretch
            _commit_steps(clock, a, p, q, r, steps)
            p.row[r].stretch = 0
            for s in range(p.row[r].stages):
                p.stage_free_s[r, s] = t
        else:
            for slot in range(p.row[r].stages):
                if p.step_end_s[r, slot] == t:
                    _end_step(a, p, q, r, slot, t)
        _schedule(clock, a, p, q, r, t)


@_jit  # type: ignore[untyped-decorator, unused-ignore]
def stop(clock: Clock, a: Table, p: Replicas, q: Router, r: int, t: float) -> IntArray:
    """Take a replica away: what steps in flight would have given is lost, and its requests are nobody's.

    Returns
    -------
    (M,) int array
        Its requests, running ones first, oldest first, with what they had emitted.
    """
    settle(clock, a, p, q, r, t)
    found = np.empty(p.row[r].load, dtype=np.int64)
    size = 0
    for place in range(p.row[r].running_count):
        found[size] = p.running[r, place]
        size += 1
    i = p.row[r].head
    while i >= 0:
        found[size] = i
        size += 1
        i = a[i].behind
    for i in found[:size]:
        # A token that was on its way is not there.
        a[i].computed = min(a[i].computed, a[i].prompt + a[i].emitted - 1)
        a[i].status, a[i].replica, a[i].behind, a[i].in_steps, a[i].blocks = WAITING, -1, -1, 0, 0
    p.row[r].open = p.row[r].running_count = p.row[r].waiting = p.row[r].load = 0
    p.row[r].head = p.row[r].tail = -1
    p.row[r].free = p.row[r].blocks
    p.step_end_s[r, :] = math.inf
    p.step_size[r, :] = 0
    p.row[r].next_s = math.inf
    _rest(p, r, t)
    return found[:size]


@_jit  # type: ignore[untyped-decorator, unused-ignore]
def submit(a: Table, q: Router, requests: IntArray, times_s: FloatArray, replica: IntArray) -> None:
    """Requests that come (again) at a time, to a replica or, with -1, to where the router sends them."""
    for at in range(len(requests)):
        _push(q, times_s[at], requests[at], replica[at])
