"""What the controller knows, on disk: enough to find everything again after it was killed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field

from hetplan.base import Frozen
from hetplan.errors import InvalidInputError

MachinePhase = Literal["wanted", "booting", "ready", "releasing"]
PipelinePhase = Literal["starting", "serving", "leaving"]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
Number = Annotated[int, Field(ge=1)]


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
    """

    pipeline: Number
    generation: Number
    machines: tuple[str | None, ...]
    port: Annotated[int, Field(ge=1, le=65_535)]
    phase: PipelinePhase = "starting"
    loaded: tuple[int, ...] = ()
    started: bool = False
    failed: bool = False
    why: str = ""

    @property
    def key(self) -> tuple[int, int]:
        """What names it."""
        return self.pipeline, self.generation


class SlotState(Frozen):
    """What is remembered of a pipeline over its generations: starts that failed in a row, and why it stands still."""

    pipeline: Number
    generations: int = 0
    failures: int = 0
    why: str = ""


class ControllerState(Frozen):
    """All of it. ``targets`` are what the router has confirmed, as its ``revision``.

    ``short_until_s`` names offers that had no machine, and until when (seconds since 1970) they are not asked again.
    """

    schema_name: Literal["hetplan.controller/1"] = "hetplan.controller/1"
    plan_fingerprint: str
    machines: tuple[Machine, ...] = ()
    generations: tuple[Generation, ...] = ()
    slots: tuple[SlotState, ...] = ()
    targets: tuple[tuple[int, int], ...] = ()
    revision: Annotated[int, Field(ge=0)] = 0
    machines_named: Annotated[int, Field(ge=0)] = 0
    ports_used: Annotated[int, Field(ge=0)] = 0
    short_until_s: tuple[tuple[str, float], ...] = ()
    draining: bool = False

    def machine(self, name: str) -> Machine | None:
        """The machine of that name, if it is still listed."""
        return next((m for m in self.machines if m.name == name), None)

    def slot(self, pipeline: int) -> SlotState:
        """What is remembered of a pipeline."""
        return next((s for s in self.slots if s.pipeline == pipeline), SlotState(pipeline=pipeline))

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
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"cannot read {path}: {error}. Give another --state folder") from None
    return ControllerState.from_json(text)
