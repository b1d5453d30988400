"""Helix's program against other ways to the same flow, and its pipelines against every plan there is."""

from __future__ import annotations

import itertools
import math

import networkx as nx
import pytest
from brute import TINY, best_plan, mixture_problem, tiny_problem
from builders import verified

import hetplan as hp
from hetplan.estimator.base import make_estimator
from hetplan.solvers.placement.chain import Chains, machine_sets
from hetplan.solvers.placement.flow import Node, Placed, even_placement, link_rate, nodes_of, paths, place
from hetplan.solvers.placement.helix import Helix

PROBLEMS = {**{name: lambda name=name: tiny_problem(name) for name in TINY}, "mixture": mixture_problem}
EVERY_PROBLEM = pytest.mark.parametrize("name", PROBLEMS)


def program(name: str, weight_share: float = 1.0) -> tuple[Chains, list[Node]]:
    problem = PROBLEMS[name]()
    chains = Chains(problem, make_estimator(problem))
    left = [pool.count for pool in problem.cluster.pools]
    return chains, nodes_of(chains, machine_sets(problem)[0], left, weight_share)


def max_flow(chains: Chains, placed: list[Placed]) -> float:
    """networkx's maximum flow of a placement: a node is an arc of its rate, an edge joins where layers meet."""
    graph = nx.DiGraph()
    graph.add_nodes_from(["source", "sink"])
    for i, one in enumerate(placed):
        graph.add_edge(("in", i), ("out", i), capacity=one.rate)
        if one.start == 0:
            graph.add_edge("source", ("in", i))
        if one.end == chains.layer_count:
            graph.add_edge(("out", i), "sink")
        for j, other in enumerate(placed):
            if one.end == other.start:
                rate = link_rate(chains, one.node.pool, other.node.pool)
                graph.add_edge(("out", i), ("in", j), capacity=rate)
    return float(nx.maximum_flow_value(graph, "source", "sink"))


@EVERY_PROBLEM
def test_the_program_s_flow_is_the_maximum_flow_of_its_placement(name: str) -> None:
    chains, nodes = program(name)
    flow, placed = place(chains, nodes, start=even_placement(nodes, chains.layer_count), time_limit_s=60)
    assert flow > 0
    assert flow == pytest.approx(max_flow(chains, placed), rel=1e-6)


@EVERY_PROBLEM
def test_no_placement_has_more_flow(name: str) -> None:
    """Every start and number of layers of every machine, tried with networkx."""
    chains, nodes = program(name)
    layers = chains.layer_count
    spots = [
        [Placed(node, start, start + k) for k, rate in enumerate(node.rates) if rate for start in range(layers - k + 1)]
        for node in nodes
    ]
    best = 0.0
    for placed in itertools.product(*spots):
        if min(one.start for one in placed) == 0 and max(one.end for one in placed) == layers:
            best = max(best, max_flow(chains, list(placed)))
    flow, _ = place(chains, nodes, time_limit_s=60)
    assert flow == pytest.approx(best, rel=1e-6)


@EVERY_PROBLEM
def test_a_start_does_not_change_the_best_flow(name: str) -> None:
    chains, nodes = program(name)
    begun, _ = place(chains, nodes, start=even_placement(nodes, chains.layer_count), time_limit_s=60)
    assert begun == pytest.approx(place(chains, nodes, time_limit_s=60)[0], rel=1e-6)


@EVERY_PROBLEM
def test_paths_are_disjoint_pipelines_and_the_widest_comes_first(name: str) -> None:
    chains, nodes = program(name)
    _, placed = place(chains, nodes, time_limit_s=60)
    found = paths(chains, placed)
    assert found
    for path in found:
        assert [one.start for one in path] == [0, *(one.end for one in path[:-1])]
        assert path[-1].end == chains.layer_count
    widths = [min(one.rate for one in path) for path in found]
    assert widths == sorted(widths, reverse=True)
    for pool in {node.pool for node in nodes}:
        used = sum(one.node.pool == pool for path in found for one in path)
        assert used <= sum(node.pool == pool for node in nodes)


def test_a_path_is_as_wide_as_its_narrowest_machine_and_takes_the_wider_way() -> None:
    chains, _ = program("alike")
    wide, narrow = Node(0, 1, 1, (0, 9, 8, 7, 6)), Node(0, 1, 1, (0, 5, 4, 3, 2))
    placed = [Placed(narrow, 0, 2), Placed(wide, 0, 2), Placed(wide, 2, 4), Placed(narrow, 0, 4)]
    assert paths(chains, placed) == [[placed[1], placed[2]], [placed[3]]]


def test_weights_keep_to_their_share() -> None:
    chains, whole = program("all unlike", 1.0)
    _, tenth = program("all unlike", 0.1)
    assert sum(node.most for node in tenth) < sum(node.most for node in whole)
    for node in tenth:
        option = chains.option[node.pool, node.degree]
        weights = math.ceil(node.most / node.groups) * int(chains.tables.weight_bytes[option].max())
        assert weights <= 0.1 * chains.tables.room_bytes[option, 0]


# ---- plans


@pytest.mark.parametrize("name", TINY)
def test_no_plan_beats_the_best_there_is(name: str) -> None:
    plan = verified(hp.optimize(tiny_problem(name), solver="helix"))
    assert 0 < plan.objective <= best_plan(name) * (1 + 1e-9)
    assert (plan.bound, plan.gap) == (None, None)


@EVERY_PROBLEM
def test_the_plan_states_the_program_s_flow(name: str) -> None:
    chains, nodes = program(name, 1.0)
    plan = hp.optimize(PROBLEMS[name](), solver="helix", weight_share=1.0)
    flow, _ = place(chains, nodes, time_limit_s=60)
    assert plan.provenance.parameters["flow_requests_per_s"] == pytest.approx(flow, rel=1e-6)


@EVERY_PROBLEM
def test_the_same_seed_gives_the_same_plan(name: str) -> None:
    problem = PROBLEMS[name]()
    assert len({hp.optimize(problem, solver="helix", seed=2).to_json() for _ in range(2)}) == 1


def test_without_time_there_are_even_pipelines_and_no_flow() -> None:
    plan = verified(hp.optimize(tiny_problem("one fast"), solver="helix", time_limit_s=0))
    assert plan.provenance.parameters["flow_requests_per_s"] is None


def test_a_plan_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    hp.optimize(tiny_problem("one fast"), solver="helix")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("share", [0, -1, 1.1, True, "half", math.nan])
def test_the_share_of_weights_is_a_share(share: object) -> None:
    with pytest.raises(hp.InvalidInputError, match="weight_share"):
        Helix(weight_share=share)  # type: ignore[arg-type]
