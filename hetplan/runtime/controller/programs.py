"""What is started where: a plan's engines and stores as argv and environment, for a port and addresses."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetplan.catalog.engines import EngineProfile
from hetplan.errors import InvalidInputError
from hetplan.launchers.commands import engine_command, store_command, store_loads
from hetplan.launchers.stores import ShardSource
from hetplan.launchers.vllm import Node, address_variable, model_source, nodes_of
from hetplan.plan import Plan


@dataclass(frozen=True, slots=True)
class Program:
    """A process of a machine."""

    argv: list[str]
    variables: dict[str, str]


@dataclass(frozen=True)
class Programs:
    """Of one plan.

    Attributes
    ----------
    plan : Plan
    engine : EngineProfile
    model : str or None
        Path or id that engines load; by default the model's own id.
    source : ShardSource or None
        Where stores read weights; without one there are no stores.
    vllm, hetplan : sequence of str
        How the two are called on every machine.
    variables : mapping
        For engines, beside their own.
    """

    plan: Plan
    engine: EngineProfile
    model: str | None = None
    source: ShardSource | None = None
    vllm: Sequence[str] = ("vllm", "serve")
    hetplan: Sequence[str] = (sys.executable, "-m", "hetplan")
    variables: Mapping[str, str] = field(default_factory=dict)

    def all_nodes(self) -> list[Node]:
        """Every machine of the plan."""
        return nodes_of(self.plan, self.engine, source=self.source)

    def nodes(self, pipeline: int, port: int) -> list[Node]:
        """The machines of a pipeline whose HTTP port is to be ``port``, by rank.

        Raises
        ------
        InvalidInputError
            If the plan has no such pipeline.
        """
        found = nodes_of(self.plan, self.engine, first_port=port - pipeline + 1, source=self.source)
        nodes = sorted((node for node in found if node.pipeline == pipeline), key=lambda node: node.rank)
        if not nodes:
            raise InvalidInputError(f"the plan has no pipeline {pipeline}; it has {len({n.pipeline for n in found})}")
        return nodes

    def start_engine(self, node: Node, addresses: Sequence[str], socket: str) -> Program:
        """An engine's process, where ``addresses`` are those of the pipeline's machines by rank."""
        known = {address_variable(node.pipeline, rank): address for rank, address in enumerate(addresses)}
        model = model_source(self.plan.placement.model, self.model)
        command = engine_command(node, model=model, addresses=known, socket=socket)
        return Program([*self.vllm, *command.arguments], {**self.variables, **command.variables})

    def start_store(self, node: Node, socket: str) -> Program | None:
        """A store's process; None without stores."""
        if node.store is None or self.source is None:
            return None
        return Program(
            [*self.hetplan, "store", "serve", *store_command(node.store, self.source, socket=socket).arguments], {}
        )

    def load(self, node: Node) -> dict[str, Any]:
        """What a machine's agent is asked to have loaded."""
        model = self.plan.placement.model
        return {"op": "load", "model": model.name, "loads": store_loads(node, model.layer_count)}
