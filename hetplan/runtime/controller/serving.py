"""What is served: a plan for each model, and which share of a query type goes to which; kept in a folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field

from hetplan.base import Frozen
from hetplan.errors import InvalidInputError
from hetplan.plan import Plan
from hetplan.runtime.router.settings import MAX_ROUTES, RouteSettings

_MAX_FILE_BYTES = 256 * 2**20
_NAME = re.compile(r"[0-9a-f]{64}")


class Load(Frozen):
    """What is asked of a model by a query type; by all of them together where that is None."""

    model: str
    query_type: str | None = None
    requests_per_s: Annotated[float, Field(ge=0)]
    mean_input_tokens: Annotated[float, Field(ge=0)] | None = None
    mean_output_tokens: Annotated[float, Field(ge=0)] | None = None


class Serving(Frozen):
    """Placement plans, and the routes of query types over their models.

    Attributes
    ----------
    plans : tuple of Plan
        Of placement problems.
    routes : tuple of RouteSettings
        Without any a request goes to the pipelines of the model that it names.
    planned : tuple of Load
        What the plans were made for; a model that is not listed was planned for no rate.
    allocation : Plan or None
        Of the allocation problem that decided on the plans and routes; None where there was none.
    """

    schema_name: Literal["hetplan.serving/1"] = "hetplan.serving/1"
    plans: Annotated[tuple[Plan, ...], Field(min_length=1)]
    routes: Annotated[tuple[RouteSettings, ...], Field(max_length=MAX_ROUTES)] = ()
    planned: tuple[Load, ...] = ()
    allocation: Plan | None = None

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """One placement plan, for the rate of its workload where that states one."""
        problem = plan.placement
        workload = problem.workload
        if workload.requests_per_s is None:
            return cls(plans=(plan,))
        load = Load(
            model=problem.model.name,
            requests_per_s=workload.requests_per_s,
            mean_input_tokens=workload.mean_input_tokens,
            mean_output_tokens=workload.mean_output_tokens,
        )
        return cls(plans=(plan,), planned=(load,))

    @cached_property
    def fingerprint(self) -> str:
        """What tells it from others."""
        return hashlib.sha256(self.content()).hexdigest()

    @property
    def models(self) -> tuple[str, ...]:
        """What is served, each once; clients get the first where they name none."""
        return tuple(dict.fromkeys(plan.placement.model.name for plan in self.plans))

    def content(self) -> bytes:
        """As it is kept."""
        return self.model_dump_json().encode()


def changes(old: Serving, new: Serving) -> dict[str, list[str]]:
    """Pipelines kept, removed and added, as `Plan.diff` tells them, over the plans of each model in turn."""
    found: dict[str, list[str]] = {"kept": [], "removed": [], "added": []}
    left = list(new.plans)
    for plan in old.plans:
        heir = next((other for other in left if other.placement.model.name == plan.placement.model.name), None)
        if heir is None:
            found["removed"] += plan.diff(plan).kept
            continue
        left.remove(heir)
        diff = plan.diff(heir)
        for name, lines in (("kept", diff.kept), ("removed", diff.removed), ("added", diff.added)):
            found[name] += lines
    for plan in left:
        found["added"] += plan.diff(plan).kept
    return found


def routes_over(routes: Sequence[RouteSettings], models: Collection[str]) -> tuple[RouteSettings, ...]:
    """The routes that lead to these models; a query type that would go nowhere has none."""
    there = [route for route in routes if route.model in models]
    lead = {route.query_type for route in there if route.fraction > 0}
    return tuple(route for route in there if route.query_type in lead)


class ServingFiles:
    """A folder of them, each under its fingerprint.

    Parameters
    ----------
    folder : Path
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, serving: Serving) -> None:
        """Keep one."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._path(serving.fingerprint)
        fresh = path.with_suffix(f".{os.getpid()}.new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(fresh, flags, 0o600), "wb") as file:
            file.write(serving.content())
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)

    def read(self, fingerprint: str) -> Serving:
        """The one of a fingerprint.

        Raises
        ------
        InvalidInputError
            If it is not there, or the file does not hold what it is named for.
        """
        path = self._path(fingerprint)
        try:
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise InvalidInputError(f"{path} is no file. Give another --state folder")
                content = file.read(_MAX_FILE_BYTES + 1)
        except OSError as error:
            raise InvalidInputError(f"cannot read {path}: {error.strerror}. Give another --state folder") from None
        if hashlib.sha256(content).hexdigest() != fingerprint:
            raise InvalidInputError(f"{path} does not hold what it is named for. Give another --state folder")
        return Serving.from_json(content)

    def keep(self, fingerprints: Collection[str]) -> None:
        """Remove all others."""
        for path in self._folder.glob("*.json"):
            if _NAME.fullmatch(path.stem) and path.stem not in fingerprints:
                with contextlib.suppress(OSError):
                    path.unlink()

    def _path(self, fingerprint: str) -> Path:
        if not _NAME.fullmatch(fingerprint):
            raise InvalidInputError(f"{fingerprint[:80]!r} is no fingerprint; there are 64 digits of 0 to f")
        return self._folder / f"{fingerprint}.json"
