"""Real engines on a tensor store: what they fetch, what they share, and what survives whom."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import launched, local_plan
from environment import PATIENT, large_model, shards_of, small_model
from pairs import run_pair
from servers import READY_S, Cluster, complete, stream
from staging import NodeStore, blocks_at_start, planned_blocks, staged_plan, store_command, total_pss_bytes

import hetplan as hp
from hetplan.runtime.tensor_store.manifest import Manifest
from hetplan.units import format_bytes

PROMPTS = [list(range(start, start + 20)) for start in (10, 50, 200, 300)]
TOKENS = 60


def manifest_of(shards: Path) -> Manifest:
    return Manifest.parse((shards / "manifest.json").read_bytes(), str(shards))


def bytes_of(shards: Path, degree: int, ranks: Sequence[int], layers: range, *outside: str) -> int:
    """What the shards of these layers, and of these tensors outside them, add up to."""
    return sum(
        tensor.bytes
        for tensor in manifest_of(shards).tensors
        if tensor.tensor_parallel == degree
        and tensor.rank in ranks
        and (tensor.layer in layers if tensor.layer is not None else any(name in tensor.name for name in outside))
    )


def launch(plan: hp.Plan, out: Path, model: Path, shards: Path | None, port: int, engine: str | None = None) -> Path:
    store = None if shards is None else str(shards)
    hp.launch(plan, out=out, model=str(model), first_port=port, store=store, engine=engine)
    return out


def answers(port: int) -> list[list[int]]:
    return [complete(port, prompt, TOKENS) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def shards(environment: Path, model: Path) -> Path:
    return shards_of(environment, model, 1, 2)


class Node(NamedTuple):
    """A store and an engine of two stages on it: three layers on two processes, five on one."""

    store: NodeStore
    staged: Cluster
    expected: list[list[int]]
    fetched_bytes: int


@pytest.fixture(scope="module")
def node(environment: Path, model: Path, shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("node")
    for cluster in launched(local_plan(model, [[8]]), folder / "stock", environment, model):
        expected = answers(8000)
        cluster.stop()
    plan = staged_plan(model, [(3, 2, 0), (5, 1, 0)])
    out = launch(plan, folder / "staged", model, shards, 8060)
    socket = folder / "s" / "store"
    with NodeStore(socket, store_command(shards, socket)) as store:
        staged = Cluster(out, environment, PATIENT | {"HETPLAN_STORE": str(socket)})
        try:
            staged.start()
            yield Node(store, staged, expected, store.status()["fetched_bytes"])
        finally:
            staged.stop()


@pytest.fixture(scope="module")
def single(
    node: Node, environment: Path, model: Path, shards: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """An engine of one process on the same store."""
    out = launch(staged_plan(model, [(8, 1, 0)]), tmp_path_factory.mktemp("single") / "out", model, shards, 8061)
    cluster = Cluster(out, environment, PATIENT | {"HETPLAN_STORE": str(node.store.socket)})
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def test_stages_fetch_their_own_parts(node: Node, shards: Path) -> None:
    assert answers(8060) == node.expected
    wanted = bytes_of(shards, 2, [0, 1], range(3), "embed") + bytes_of(shards, 1, [0], range(3, 8), "norm", "lm_head")
    status = node.store.status()
    assert status["fetched_bytes"] + status["reused_bytes"] == wanted
    # Norms and scales are alike on all ranks and in all layers of this model: they are read once.
    assert status["reused_bytes"] < 0.01 * wanted


def test_another_partition_fetches_what_is_missing(node: Node, single: Cluster, shards: Path) -> None:
    """The five layers at degree 1 are there; three, and the embedding, are not."""
    assert answers(8061) == node.expected
    status = node.store.status()
    brought = status["fetched_bytes"] + status["reused_bytes"]
    before = bytes_of(shards, 2, [0, 1], range(3), "embed") + bytes_of(shards, 1, [0], range(3, 8), "norm", "lm_head")
    assert brought - before == bytes_of(shards, 1, [0], range(3), "embed")


def test_an_engine_is_killed_and_the_next_finds_the_weights(node: Node, single: Cluster, environment: Path) -> None:
    before = node.store.status()
    single.stop()
    deadline = time.monotonic() + 30
    while len(node.store.status()["leases"]) > 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    left = node.store.status()
    assert len(left["leases"]) == 3
    assert [part["bytes"] for part in left["parts"]] == [part["bytes"] for part in before["parts"]]
    single.start()
    after = node.store.status()
    assert (after["fetched_bytes"], after["reused_bytes"]) == (before["fetched_bytes"], before["reused_bytes"])
    assert answers(8061) == node.expected


def test_the_store_is_killed_and_engines_serve_on(node: Node, single: Cluster) -> None:
    node.store.kill()
    assert answers(8060) == node.expected
    assert answers(8061) == node.expected
    node.store.start()
    assert node.store.status()["leases"] == []
    assert answers(8060) == node.expected


@pytest.mark.parametrize("broken", ["corrupted", "truncated", "of another model"])
def test_wrong_shards_are_refused_by_name(
    broken: str, environment: Path, model: Path, shards: Path, tmp_path: Path
) -> None:
    """The engine does not start, and says which tensor, or what is unlike."""
    folder = tmp_path / "shards"
    shutil.copytree(shards, folder)
    wrong = next(t for t in manifest_of(folder).tensors if t.name.startswith("model.layers.5.mlp.gate_up"))
    path = folder / "tensors" / f"{wrong.sha256}.bin"
    content = path.read_bytes()
    if broken == "corrupted":
        path.write_bytes(content[:1000] + bytes([content[1000] ^ 1]) + content[1001:])
        said = wrong.name
    elif broken == "truncated":
        path.write_bytes(content[:-1])
        said = wrong.name
    else:
        model = small_model(environment)
        said = "config"
    plan = staged_plan(model, [(8, 1, 0)], memory_share=0.4)
    out = launch(plan, tmp_path / "out", model, folder, 8062)
    socket = tmp_path / "s" / "store"
    with NodeStore(socket, store_command(folder, socket)):
        variables = {"HETPLAN_STORE": str(socket), "HETPLAN_STORE_MODEL": manifest_of(folder).model}
        script = out / "pipeline-1-node-0.sh"
        script.write_text(re.sub(r"export HETPLAN_STORE_MODEL=.*", "", script.read_text("utf-8")), encoding="utf-8")
        cluster = Cluster(out, environment, variables)
        try:
            cluster.begin()
            assert cluster.head().wait(READY_S) != 0
        finally:
            cluster.stop()
    refusals = [line for line in cluster.log(script.name).splitlines() if "hetplan.errors.StoreError:" in line]
    assert refusals
    assert all(said in line for line in refusals)


def test_two_engines_hold_the_weights_once(environment: Path, tmp_path: Path) -> None:
    model = large_model(environment)
    folder = shards_of(environment, model, 1)
    own = run_pair(environment, tmp_path / "own", model, None)
    shared = run_pair(environment, tmp_path / "shared", model, folder)
    weights = bytes_of(folder, 1, [0], range(8), "")
    faster = min(own.load_s) / min(shared.load_s)
    print(
        f"\nweights {format_bytes(weights)}; two engines that load them: {format_bytes(own.pss_bytes)}, on a store "
        f"{format_bytes(shared.pss_bytes)} ({shared.pss_bytes / own.pss_bytes:.2f}), of which the store's pages "
        f"{format_bytes(shared.weights_pss_bytes)} ({shared.weights_pss_bytes / weights:.3f} of the weights); "
        f"loading took {min(own.load_s):.2f} s, attaching {min(shared.load_s):.3f} s ({faster:.0f}x)"
    )
    assert shared.weights_pss_bytes <= 1.05 * weights
    assert shared.pss_bytes <= 0.6 * own.pss_bytes
    assert faster >= 2


def test_a_second_engine_starts_beside_the_first_and_grows_when_it_has_gone(
    environment: Path, model: Path, shards: Path, tmp_path: Path
) -> None:
    """On one node within its budget: both engines' needs, the weights once, a whole cache and a slice."""
    plan = staged_plan(model, [(3, 1, 0), (5, 1, 0)], memory_share=0.1, handover_sequences=2)
    out = [launch(plan, tmp_path / f"out-{number}", model, shards, 8066 + number) for number in range(2)]
    socket = tmp_path / "s" / "store"
    old, new = (Cluster(folder, environment, PATIENT | {"HETPLAN_STORE": str(socket)}) for folder in out)
    with NodeStore.of(out[0], socket) as store:
        budget = store.status()["devices"]["cpu"]["budget_bytes"]
        peak = Peak(store)
        try:
            old.start()
            assert blocks_at_start(8066) == planned_blocks(plan)
            peak.start(old, new)
            new.start()
            slice_blocks = blocks_at_start(8067)
            # Two sequences of 1,024 tokens, and the block that an engine keeps empty.
            assert 17 <= slice_blocks < planned_blocks(plan)
            expected = [complete(8066, prompt, 900) for prompt in PROMPTS[:2]]
            running: list[list[int]] = [[], []]
            clients = [
                threading.Thread(target=stream, args=(8067, prompt, 900, into))
                for prompt, into in zip(PROMPTS, running, strict=False)
            ]
            for client in clients:
                client.start()
            old.stop()
            for client in clients:
                client.join(180)
            assert running == expected
            grown = wait_for_growth(new)
            assert grown == (slice_blocks, planned_blocks(plan))
            assert [complete(8067, prompt, 900) for prompt in PROMPTS[:2]] == expected
        finally:
            peak.stop()
            old.stop()
            new.stop()
    print(
        f"\nhand-over: budget {format_bytes(budget)}; accounted at most {format_bytes(peak.accounted_bytes)}; "
        f"resident, with the processes' own code and libraries, at most {format_bytes(peak.resident_bytes)} of "
        f"{format_bytes(2 * plan.placement.cluster.instance_types[0].gpu.memory_bytes)}"
    )
    assert 0.9 * budget <= peak.accounted_bytes <= budget


def wait_for_growth(cluster: Cluster) -> tuple[int, int]:
    """From how many blocks to how many an engine's cache grew, by its log."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        found = re.findall(r"the cache grew from (\d+) to (\d+) blocks", cluster.log("pipeline-1-node-0.sh"))
        if found:
            return int(found[-1][0]), int(found[-1][1])
        time.sleep(0.5)
    raise AssertionError("the cache did not grow")


class Peak:
    """The most memory that a node's store has accounted for, and that its processes have held, while it watches."""

    def __init__(self, store: NodeStore) -> None:
        self._store = store
        self._clusters: tuple[Cluster, ...] = ()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.accounted_bytes = self.resident_bytes = 0

    def start(self, *clusters: Cluster) -> None:
        self._clusters = clusters
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join(30)

    def _watch(self) -> None:
        while not self._done.wait(0.5):
            account = self._store.status()["devices"]["cpu"]
            taken = account["weights_bytes"] + account["held_bytes"] + account["borrowed_bytes"]
            self.accounted_bytes = max(self.accounted_bytes, taken)
            sessions = {p.pid for cluster in self._clusters for p in cluster.processes.values()}
            resident = total_pss_bytes({*sessions, self._store.process.pid})  # type: ignore[union-attr]
            self.resident_bytes = max(self.resident_bytes, resident)
