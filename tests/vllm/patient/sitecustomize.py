"""For engines that share a few cores: vLLM's processes wait for each other without a core of their own.

They spin for a second after each message, which on two cores takes from whoever they wait for the time to answer.

With HETPLAN_TESTS_FORK they are forked as vLLM's are on GPUs. Its CPU build has each import everything anew: three
quarters of an engine's start.
"""

from __future__ import annotations

import multiprocessing
import os
import time

os.sched_yield = lambda: time.sleep(0.0002)

if os.environ.get("HETPLAN_TESTS_FORK"):
    _get_context = multiprocessing.get_context

    def _forking(method: str | None = None) -> object:
        return _get_context("fork" if method == "spawn" else method)

    multiprocessing.get_context = _forking
