"""Compiled searches side by side: they run without the interpreter's lock, so threads are enough."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

# More threads than this have too little to do each.
_MOST = 8


@functools.cache
def count() -> int:
    """Threads that a search uses: one for each processor that it may run on."""
    return max(1, min(_MOST, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=count(), thread_name_prefix="hetplan")


def each(function: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
    """The function's results for all items, in their order."""
    listed = list(items)
    if len(listed) < 2 or count() == 1:
        return [function(item) for item in listed]
    return list(_pool().map(function, listed))


def dealt(items: list[_Item]) -> list[list[_Item]]:
    """The items in as many hands as there are threads, every hand with some."""
    return [hand for start in range(count()) if (hand := items[start :: count()])]
