"""A machine is announced to go: each of its streams stays to its end, is recomputed elsewhere, or has its cache sent.

A stream that is recomputed goes on where it is while the pipeline that takes over reads its tokens for the first time
(they are then in its prefix cache): its client waits for the few tokens that came meanwhile, not for all of them.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import aiohttp

from hetplan.runtime.kv_transfer import KvTransfer, Nixl, SharedStorage, TransferError
from hetplan.runtime.recovery import ObservedCosts, Recovery, RunningRequest, TransferCost, choose_recovery
from hetplan.runtime.router.engine import EngineRefusedError, Engines, InterruptedAttempt
from hetplan.runtime.router.sequence import Sequence
from hetplan.runtime.router.settings import KvTransferSettings
from hetplan.runtime.router.targets import Target, Targets

# Left of the grace for those that stayed and did not end: to be sent elsewhere while their engine still answers.
_MARGIN_S = 2.0
_WARM_TIMEOUT_S = 60.0
# Where nothing says what may still come, a stream is taken to go on for long.
_UNKNOWN_TOKENS = 2**20


class Handover:
    """What the router does on notices.

    Parameters
    ----------
    targets : Targets
    engines : Engines
    costs : ObservedCosts
        What prefills and steps were seen to take.
    transfer : KvTransferSettings, optional
        How caches are sent; by default they are not.
    session : aiohttp.ClientSession
        For engines that are asked to send.
    """

    def __init__(
        self,
        targets: Targets,
        engines: Engines,
        costs: ObservedCosts,
        transfer: KvTransferSettings | None,
        session: aiohttp.ClientSession,
    ) -> None:
        self._targets, self._engines, self._costs, self._session = targets, engines, costs, session
        self._transfer: KvTransfer | None = None
        self._transfer_cost: TransferCost | None = None
        if transfer is not None:
            self._transfer = (
                Nixl()
                if transfer.storage is None
                else SharedStorage(Path(transfer.storage), transfer.block_tokens, transfer.layers)
            )
            self._transfer_cost = TransferCost(
                latency_s=transfer.latency_s,
                cache_bytes_per_token=transfer.cache_bytes_per_token,
                bytes_per_s=transfer.bytes_per_s,
                source=transfer.source,
            )
        self._tasks: dict[Target, set[asyncio.Task[None]]] = {}

    def move(self, target: Target, grace_s: float, sequences: list[Sequence]) -> dict[str, int]:
        """Deal with each stream of a target that leaves. What was told of it before holds no more.

        Parameters
        ----------
        target : Target
        grace_s : float
            Seconds until it may be lost. A stream that has nowhere to go stays for longer.
        sequences : list of Sequence
            All that run on it.

        Returns
        -------
        dict of str to int
            How many streams stay, are recomputed and are sent.
        """
        self.recall(target)
        tasks = self._tasks[target] = set()
        end = time.monotonic() + grace_s
        by_name = {f"{sequence.entry.request_id}/{sequence.choice}": sequence for sequence in sequences}
        running = [
            RunningRequest(
                request_id=name,
                context_tokens=max(1, sequence.context_tokens),
                remaining_tokens=_UNKNOWN_TOKENS if sequence.remaining_tokens is None else sequence.remaining_tokens,
                sendable=sequence.transport == "completions" and sequence.continues,
            )
            for name, sequence in by_name.items()
        ]
        choices = choose_recovery(running, max(0.0, grace_s - _MARGIN_S), self._costs.costs(self._transfer_cost))
        counts = {"stay": 0, "recompute": 0, "transfer": 0}
        for name, choice in choices.items():
            counts[choice.move] += 1
            task = asyncio.create_task(self._move(by_name[name], target, choice, end))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        return counts

    def recall(self, target: Target) -> None:
        """The target stays: so do its streams that have not moved."""
        for task in self._tasks.pop(target, ()):
            task.cancel()

    async def stop(self) -> None:
        """Give up what is under way."""
        tasks = [task for moves in self._tasks.values() for task in moves]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _move(self, sequence: Sequence, target: Target, choice: Recovery, end: float) -> None:
        move = choice.move
        if move == "stay":
            # What was predicted may be wrong: in time for all others it goes as well.
            recompute_s = choice.recompute_s or 0.0
            await asyncio.sleep(max(0.0, end - time.monotonic() - _MARGIN_S - recompute_s))
            move = "recompute"
        heir = await self._heir(sequence, target, end)
        if heir is not None:
            if move == "transfer":
                sequence.handover = self._sender(target, end)
            else:
                await self._warm(sequence, heir, end)
        attempt = sequence.attempt
        if attempt is not None and attempt.target is target:
            attempt.leave("notice")

    async def _heir(self, sequence: Sequence, leaving: Target, end: float) -> Target | None:
        """The pipeline that takes a stream over, once it has the time; None where the stream ended, or has to go now.

        A stream goes on where it is for as long as no other pipeline could take it, beyond the grace too: while its
        engine lives that is better than to wait.
        """
        while _runs_on(sequence, leaving):
            tokens = sequence.context_tokens
            left = end - time.monotonic() - _MARGIN_S
            if left > 0:
                # Not to one that leaves next, if there is another.
                avoid = [target for target in self._targets.all if not target.wanted]
                heir = self._targets.choose(sequence.model, tokens=tokens + 1, avoid=avoid, paced_tokens=tokens)
                if heir is not None:
                    return heir
            elif self._targets.candidates(sequence.model, tokens=tokens + 1):
                return None
            await self._targets.change(min(left, 1.0) if left > 0 else 1.0)
        return None

    async def _warm(self, sequence: Sequence, heir: Target, end: float) -> None:
        """Let the next pipeline read the tokens so far while the old one goes on, for as long as the grace lasts."""
        if sequence.transport != "completions" or not sequence.continues or not sequence.token_ids:
            return
        tokens = sequence.context_tokens
        sequence.preferred = heir
        body = {
            "model": heir.served_model,
            "prompt": sequence.context(),
            "max_tokens": 1,
            "temperature": 0,
        }
        heir.paced_tokens += tokens
        timeout_s = min(_WARM_TIMEOUT_S, max(0.0, end - time.monotonic()))
        try:
            await self._engines.ask(heir, "/v1/completions", body, timeout_s)
        except (InterruptedAttempt, EngineRefusedError):
            sequence.preferred = None
        finally:
            heir.paced_tokens -= tokens
            self._targets.freed()

    def _sender(self, source: Target, end: float) -> Any:
        async def send(sequence: Sequence) -> tuple[dict[str, Any] | None, Any]:
            assert self._transfer is not None  # noqa: S101
            ids = sequence.context()
            try:
                sent = await self._transfer.send(
                    self._session,
                    source.url,
                    ids,
                    model=source.served_model or source.model,
                    timeout_s=max(0.1, end - time.monotonic()),
                )
            except TransferError:
                return None, None
            return sent.params, lambda: self._transfer.forget(ids) if self._transfer is not None else None

        return send


def _runs_on(sequence: Sequence, target: Target) -> bool:
    return not sequence.finished and sequence.attempt is not None and sequence.attempt.target is target
