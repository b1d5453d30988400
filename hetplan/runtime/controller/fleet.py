"""From what is served to what is started and wanted: the programs of each plan, and the pipelines of all of them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from hetplan.catalog.offers import Offer
from hetplan.errors import InvalidInputError
from hetplan.plan import Plan
from hetplan.policies import Policy
from hetplan.runtime.controller.desired import Desired, Slot
from hetplan.runtime.controller.programs import Programs
from hetplan.runtime.controller.serving import Serving
from hetplan.runtime.controller.state import ControllerState, Origin

# What two pipelines are compared at: whatever else differs between them is a difference.
_PORT, _SOCKET = 8000, "/socket"


class Fleet:
    """How plans are served.

    Parameters
    ----------
    programs_of : callable
        The programs of a placement plan.
    policy : Policy
        What is done about interruptions.
    fallbacks : sequence of Offer
        Offers beyond the plans' own, such as on-demand ones for plans of spot machines.
    first_port : int
        Of engines.
    start_s : float
        Predicted seconds from renting a machine to its pipeline serving.
    drain_s : float
        Longest that engines may go on with their streams once the router has a new target.
    retry_s : float
        How long an offer without a machine is not asked again.
    """

    def __init__(
        self,
        programs_of: Callable[[Plan], Programs],
        policy: Policy,
        *,
        fallbacks: Sequence[Offer] = (),
        first_port: int = 8000,
        start_s: float = 120.0,
        drain_s: float = 120.0,
        retry_s: float = 60.0,
    ) -> None:
        self._policy, self._fallbacks = policy, {offer.name: offer for offer in fallbacks}
        self._first_port, self._retry_s = first_port, retry_s
        self.start_s, self.drain_s = start_s, drain_s
        self._programs_of = programs_of
        self._programs: dict[tuple[str, int], Programs] = {}

    def programs(self, serving: Serving, plan: int) -> Programs:
        """Those of one of its plans, by its place."""
        key = serving.fingerprint, plan
        if key not in self._programs:
            self._programs[key] = self._programs_of(serving.plans[plan])
        return self._programs[key]

    def pipelines(self, serving: Serving) -> tuple[Origin, ...]:
        """Every pipeline copy of every plan.

        Raises
        ------
        InvalidInputError
            If an offer is two things, or an engine cannot run a pipeline.
        """
        self._own_offers(serving)
        found = []
        for place, plan in enumerate(serving.plans):
            programs = self.programs(serving, place)
            rates = [
                pipeline.predictions.requests_per_s.value
                for deployment in plan.deployments
                for pipeline in deployment.pipelines
                for _ in range(pipeline.count)
            ]
            for number, rate in enumerate(rates, start=1):
                found.append(
                    Origin(
                        serving=serving.fingerprint,
                        plan=place,
                        number=number,
                        model=plan.placement.model.name,
                        weight=rate,
                        started_as=_started_as(programs, number),
                    )
                )
        return tuple(found)

    def offers_of(self, serving: Serving, origin: Origin) -> tuple[Offer, ...]:
        """The offer of each machine of a pipeline, by rank."""
        offers = self._own_offers(serving)[0]
        return tuple(offers[node.offer] for node in self.programs(serving, origin.plan).nodes(origin.number, _PORT))

    def desired(self, state: ControllerState, servings: Mapping[str, Serving]) -> Desired:
        """What the state's plan in force wants.

        Offers of plans before it are known too, but nothing is rented of them.
        """
        serving = servings[state.serving]
        offers, counts = self._own_offers(serving)
        for fingerprint in reversed(state.servings):
            for name, offer in self._own_offers(servings[fingerprint])[0].items():
                if name not in offers:
                    offers[name], counts[name] = offer, 0
        slots = tuple(
            Slot(s.pipeline, tuple(o.name for o in self.offers_of(serving, s.origin)), s.origin.model)
            for s in state.slots
            if s.origin is not None and s.origin.serving == state.serving
        )
        all_programs = [self.programs(serving, place) for place in range(len(serving.plans))]
        nodes = [node for programs in all_programs for node in programs.all_nodes()]
        room = all(stage.start_kv_cache_bytes > 0 for node in nodes for stage in node.stages)
        return Desired(
            slots=slots,
            offers=offers,
            counts=counts,
            policy=self._policy,
            stores=any(programs.source is not None for programs in all_programs),
            beside=room and all(programs.source is not None for programs in all_programs),
            first_port=self._first_port,
            start_s=self.start_s,
            drain_s=self.drain_s,
            retry_s=self._retry_s,
        )

    def has_offer(self, serving: Serving, offer: str) -> bool:
        """Whether it may rent machines of an offer."""
        return offer in self._own_offers(serving)[0]

    def counts(self, serving: Serving) -> dict[str, int]:
        """How many machines of each offer its plans may have."""
        return self._own_offers(serving)[1]

    def _own_offers(self, serving: Serving) -> tuple[dict[str, Offer], dict[str, int]]:
        """What may be rented, by name, and how many of each."""
        offers: dict[str, Offer] = {}
        counts: Counter[str] = Counter()
        for plan in serving.plans:
            for pool in plan.placement.cluster.pools:
                known = offers.setdefault(pool.offer.name, pool.offer)
                if known != pool.offer:
                    raise InvalidInputError(f"two plans say different things of {known.name!r}; plan them together")
                counts[known.name] += pool.count
        offers |= self._fallbacks
        desired = Desired((), offers, self._policy)
        for name in offers:
            other = desired.offer_of(desired.pool(name), desired.market(name))
            if other != name:
                raise InvalidInputError(f"offers {other!r} and {name!r} are one pool and market; leave one of them out")
        return offers, dict(counts)


def _started_as(programs: Programs, number: int) -> str:
    """A fingerprint of what a pipeline's machines are and run, wherever it is started."""
    nodes = programs.nodes(number, _PORT)
    addresses = [f"rank-{node.rank}" for node in nodes]
    runs = []
    for node in nodes:
        engine, store = programs.start_engine(node, addresses, _SOCKET), programs.start_store(node, _SOCKET)
        stored = None if store is None else [store.argv, programs.load(node)]
        runs.append([node.offer, engine.argv, engine.variables, stored])
    return hashlib.sha256(json.dumps(runs, sort_keys=True, default=str).encode()).hexdigest()
