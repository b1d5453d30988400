"""What the controller knows, on disk: enough to find everything again after it was killed."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field

from hetplan.base import Frozen
from hetplan.errors import InvalidInputError, SchemaVersionError

MachinePhase = Literal["wanted", "booting", "ready", "releasing"]
PipelinePhase = Literal["starting", "serving", "leaving"]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
Number = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Fingerprint = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
SCHEMA: Literal["hetplan.controller/2"] = "hetplan.controller/2"
# Of the folder of the state: what is served and was.
SERVINGS = "servings"
_FAMILY = "hetplan.controller/"


class Machine(Frozen):
    """A machine from when it is wanted until it is given back.

    Attributes
    ----------
    name : str
        The controller's own, and the provider's key: asking twice for one name rents one machine.
    offer : str
    phase : "wanted", "booting", "ready" or "releasing"
        Wanted: the provider may not know of it yet. Ready: its agent answers.
    address : str or None
    lost : bool
        It is gone, or was never had; ``why`` says what is known.
    deadline_s : float or None
        When it is taken, in seconds since 1970; None without a notice.
    give_back : bool
        A cheaper one is to take its place.
    spare : bool
        It is held although no pipeline needs it yet.
    """

    name: Name
    offer: str
    phase: MachinePhase = "wanted"
    address: str | None = None
    lost: bool = False
    deadline_s: float | None = None
    give_back: bool = False
    spare: bool = False
    why: str = ""

    @property
    def stays(self) -> bool:
        """Whether new engines may be put on it."""
        return not self.lost and self.deadline_s is None and not self.give_back and self.phase != "releasing"


class Generation(Frozen):
    """One start of a pipeline's engines. A new one serves before the old one ends.

    Attributes
    ----------
    pipeline, generation : int
    machines : tuple of str or None
        By the rank of the pipeline's nodes; None where one is missing.
    port : int
    phase : "starting", "serving" or "leaving"
        Once its engines have ended it is no longer listed.
    loaded : tuple of int
        Ranks whose machine holds the weights.
    started : bool
        Its engines were told to start.
    failed : bool
        Its engines are not to be waited for: one has ended, or a machine is lost.
    healthy_s : float or None
        When its engines answered first, in seconds since 1970.
    """

    pipeline: Number
    generation: Number
    machines: tuple[str | None, ...]
    port: Annotated[int, Field(ge=1, le=65_535)]
    phase: PipelinePhase = "starting"
    loaded: tuple[int, ...] = ()
    started: bool = False
    failed: bool = False
    healthy_s: float | None = None
    why: str = ""

    @property
    def key(self) -> tuple[int, int]:
        """What names it."""
        return self.pipeline, self.generation


class Origin(Frozen):
    """Where a pipeline comes from: pipeline ``number`` of a plan (by its place) of what is served.

    ``started_as`` is the fingerprint of all that its machines run: two pipelines with one are the same.
    """

    serving: Fingerprint
    plan: Count
    number: Number
    model: str
    weight: Annotated[float, Field(gt=0)]
    started_as: Fingerprint


class SlotState(Frozen):
    """What is remembered of a pipeline over its generations, and why it stands still.

    Attributes
    ----------
    origin : Origin or None
        Of the plan in force, or of the last one that had it; None where nothing was adopted yet.
    failures, deaths : int
        Starts that failed in a row, and engines in a row that ended soon after they had become healthy.
    not_before_s, away_since_s : float or None
        It is not started again before; it has served, and since then nothing does. In seconds since 1970.
    """

    pipeline: Number
    origin: Origin | None = None
    generations: int = 0
    failures: int = 0
    deaths: int = 0
    not_before_s: float | None = None
    away_since_s: float | None = None
    why: str = ""


class Counters(Frozen):
    """What has happened so far; ``last_return_s`` is how long the last pipeline was away that is back."""

    shunts: Count = 0
    generations: Count = 0
    failures: Count = 0
    adoptions: Count = 0
    last_return_s: float | None = None


class ControllerState(Frozen):
    """All of it. ``targets`` are what the router has confirmed, as its ``revision``.

    Attributes
    ----------
    given : str
        Fingerprint of what was given to be served.
    serving : str
        Of what is served now; another than ``given`` once another plan was adopted.
    servings : tuple of str
        Those that pipelines and machines may still be of, the latest last.
    returns_to : str or None
        What is served when machines can be had again that were missing; None where nothing stands in.
    told : str or None
        Whose routes and weights the router has.
    short_until_s : tuple
        Offers that had no machine, and until when (seconds since 1970) they are not asked again.
    """

    schema_name: Literal["hetplan.controller/2"] = SCHEMA
    given: Fingerprint
    serving: Fingerprint
    servings: tuple[Fingerprint, ...] = ()
    returns_to: Fingerprint | None = None
    machines: tuple[Machine, ...] = ()
    generations: tuple[Generation, ...] = ()
    slots: tuple[SlotState, ...] = ()
    targets: tuple[tuple[int, int], ...] = ()
    told: Fingerprint | None = None
    revision: Count = 0
    machines_named: Count = 0
    pipelines_numbered: Count = 0
    ports_used: Count = 0
    short_until_s: tuple[tuple[str, float], ...] = ()
    counters: Counters = Counters()
    draining: bool = False

    def machine(self, name: str) -> Machine | None:
        """The machine of that name, if it is still listed."""
        return next((m for m in self.machines if m.name == name), None)

    def slot(self, pipeline: int) -> SlotState:
        """What is remembered of a pipeline."""
        return next((s for s in self.slots if s.pipeline == pipeline), SlotState(pipeline=pipeline))

    def newest(self, pipeline: int) -> Generation | None:
        """The latest generation of a pipeline that is starting or serving and has not failed."""
        live = [g for g in self.generations if g.pipeline == pipeline and g.phase != "leaving" and not g.failed]
        return max(live, key=lambda g: g.generation, default=None)

    def confirmed(self, pipeline: int) -> int | None:
        """The newest generation of a pipeline that serves and that the router has confirmed."""
        found = [
            g.generation
            for g in self.generations
            if g.pipeline == pipeline and g.phase == "serving" and not g.failed and g.key in self.targets
        ]
        return max(found, default=None)

    def with_machine(self, machine: Machine) -> Self:
        """With this one in place of the one of its name, or added."""
        if self.machine(machine.name) is None:
            return self.replace(machines=(*self.machines, machine))
        return self.replace(machines=tuple(machine if m.name == machine.name else m for m in self.machines))

    def with_generation(self, generation: Generation) -> Self:
        """With this one in place of the one of its key, or added."""
        if all(g.key != generation.key for g in self.generations):
            return self.replace(generations=(*self.generations, generation))
        return self.replace(generations=tuple(generation if g.key == generation.key else g for g in self.generations))

    def with_slot(self, slot: SlotState) -> Self:
        """With this one in place of the one of its pipeline, or added."""
        others = tuple(s for s in self.slots if s.pipeline != slot.pipeline)
        return self.replace(slots=tuple(sorted((*others, slot), key=lambda s: s.pipeline)))


def save(state: ControllerState, path: Path) -> None:
    """Write it so that a reader finds the old one or the new one, whole, and nobody else reads it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(state.model_dump_json(indent=1))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise


def load(path: Path) -> ControllerState | None:
    """What was saved; None where nothing was.

    Raises
    ------
    InvalidInputError
        If the file is not what `save` writes.
    SchemaVersionError
        If another version wrote it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"cannot read {path}: {error}. Give another --state folder") from None
    _refuse_other_schemas(text, path)
    return ControllerState.from_json(text)


def _refuse_other_schemas(text: str, path: Path) -> None:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return
    name = content.get("schema_name") if isinstance(content, dict) else None
    if isinstance(name, str) and name.startswith(_FAMILY) and name != SCHEMA:
        raise SchemaVersionError(
            f"{path} has schema {name!r}; this hetplan reads {SCHEMA!r}. Drain it with the version that wrote it, or "
            "give another --state folder"
        )
