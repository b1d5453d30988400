"""Why an engine ended: the first error of its log, as the later ones only say that there was one."""

from __future__ import annotations

import re

# vLLM's processes begin their lines with their name, and errors with where they were logged.
_PREFIX = re.compile(r"^(?:\([^)]*\)\s*)?(?:ERROR \S+ \S+ \[[^\]]*\]\s*)?")
_ERROR = re.compile(r"^(?:[\w.]*(?:Error|Exception|Interrupt|Exit)\b:? ?.*|\S*error: .*)")
# These say that another process failed.
_OF_ANOTHER = re.compile(r"[Rr]oot cause|initialization failed|process died|died unexpectedly|EngineDeadError")
_LONGEST = 300


def cause_of(log: str) -> str:
    """The first error in the end of a log; its last words where no line is one.

    Examples
    --------
    >>> cause_of("(EngineCore pid=7) ERROR 12-01 01:02:54 [core.py:9] ValueError: no weights\\nRuntimeError: died")
    'ValueError: no weights'
    """
    lines = [_PREFIX.sub("", line).strip() for line in log.splitlines()]
    errors = [line for line in lines if _ERROR.match(line)]
    own = [line for line in errors if not _OF_ANOTHER.search(line)]
    found = (own or errors or [log.strip()[-_LONGEST:]])[0]
    return found[:_LONGEST]
