"""Who holds what: engines share one copy, borrow what is free, and lose everything but the weights when they die."""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from store_process import (
    ROOT,
    RunningStore,
    attach,
    drop,
    make_shards,
    names_of,
    require_intact,
    rows_of,
    run_http,
    run_store,
    wait_until,
)

from hetplan.errors import StoreError
from hetplan.runtime.tensor_store.client import Mapping
from hetplan.runtime.tensor_store.manifest import Manifest

ENGINE = """
import sys, time
from hetplan.runtime.tensor_store.client import Mapping, connect
store = connect(sys.argv[1])
attached = store.attach(
    model=sys.argv[2], engine="vllm-0.32.0", config_sha256="c" * 64, tensor_parallel=1, rank=0,
    tensors=sys.argv[3].split(","), hold_bytes=1_000, what="an engine",
)
granted = store.borrow(1, 2_000)
mappings = [Mapping(part) for part in attached.parts]
for mapping in mappings:
    sum(mapping.memory[::4096])
print(attached.fetched_bytes, granted, flush=True)
time.sleep(600)
"""


@pytest.fixture
def shards(tmp_path: Path) -> tuple[Path, Manifest]:
    folder = tmp_path / "shards"
    return folder, make_shards(folder)


@contextmanager
def run_engine(running: RunningStore, manifest: Manifest) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that attaches to everything, borrows, and stays; and what it says."""
    names = ",".join(row.name for row in rows_of(manifest))
    command = [sys.executable, "-c", ENGINE, str(running.socket), manifest.model, names]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def whole(manifest: Manifest) -> int:
    return sum(row.bytes for row in rows_of(manifest))


# ---- sealed and shared


def test_nobody_can_change_what_others_read(shards: tuple[Path, Manifest]) -> None:
    folder, manifest = shards
    with run_store(folder) as running, running.connect() as store, running.connect() as other:
        names = ["model.layers.0.mlp.weight"]
        (part,), (same,) = attach(store, manifest, names).parts, attach(other, manifest, names).parts
        assert part.fd is not None
        with pytest.raises(PermissionError):
            os.pwrite(part.fd, b"x", 0)
        for size in (0, part.bytes + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(part.fd, size)
        with pytest.raises(PermissionError):
            mmap.mmap(part.fd, part.bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        mine, theirs = Mapping(part), Mapping(same)
        before = bytes(theirs.memory)
        mine.tensor(names[0])[:4] = b"mine"
        assert bytes(mine.tensor(names[0])[:4]) == b"mine"
        assert bytes(theirs.memory) == before
        assert bytes(Mapping(part).memory) == before
        for one in (part, same):
            os.close(one.fd or -1)


def test_a_protected_mapping_can_be_read_and_no_more_written(shards: tuple[Path, Manifest]) -> None:
    folder, _ = shards
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from store_process import *
store = connect(sys.argv[1])
(part,) = store.attach(model="tiny-llama", engine=ENGINE, config_sha256=CONFIG, tensor_parallel=1, rank=0,
                       tensors=["model.layers.0.mlp.weight"]).parts
mapping = Mapping(part)
view = mapping.tensor("model.layers.0.mlp.weight")
view[0] = 7
mapping.protect()
print(view[0], flush=True)
view[0] = 8
print("written")
"""
    with run_store(folder) as running:
        done = subprocess.run(
            [sys.executable, "-c", code, str(running.socket)], cwd=ROOT, capture_output=True, text=True, check=False
        )
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "7\n"), done.stderr


def proportional_bytes(pid: int) -> int:
    """This process's share of the weights that it has mapped."""
    text = Path(f"/proc/{pid}/smaps").read_text()
    # An entry begins with its addresses and name, and has a line Pss.
    entries = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", text, flags=re.MULTILINE)
    found = [re.search(r"^Pss:\s+(\d+) kB", e, re.MULTILINE) for e in entries if "memfd:hetplan-weights" in e]
    return sum(int(line[1]) * 1024 for line in found if line)


def test_weights_are_in_memory_once(tmp_path: Path) -> None:
    manifest = make_shards(tmp_path / "shards", layers=4, weight_bytes=4_000_000)
    with run_store(tmp_path / "shards") as running, run_engine(running, manifest) as (one, _):
        with run_engine(running, manifest) as (two, said), running.connect() as store:
            assert said == "0 2000"
            weights = sum(part["bytes"] for part in store.status()["parts"])
            shares = [proportional_bytes(pid) for pid in (running.process.pid, one.pid, two.pid)]
        assert weights > 16_000_000
        assert 0.95 * weights <= sum(shares) <= 1.05 * weights, shares


def test_two_that_come_at_once_load_once(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    manifest = make_shards(folder, layers=6, weight_bytes=2_000_000)
    # Room for the weights once: who waits for the other's parts takes none for them.
    with (
        run_http(folder) as served,
        run_store(served.url, allow_hosts=["127.0.0.1"], memory_bytes=whole(manifest) + 10_000) as running,
    ):
        together = threading.Barrier(4)
        seen: list[set[str]] = []

        def engine() -> None:
            with running.connect() as store:
                together.wait(10)
                attached = attach(store, manifest, hold_bytes=1_000)
                seen.append(require_intact(attached, manifest))
                drop(attached)

        engines = [threading.Thread(target=engine) for _ in range(4)]
        for thread in engines:
            thread.start()
        for thread in engines:
            thread.join(30)
        assert seen == [{row.name for row in rows_of(manifest)}] * 4
        assert served.tensor_bytes() == whole(manifest)


def test_one_that_fails_does_not_take_the_other_along(tmp_path: Path) -> None:
    """Whoever waits for parts of a request that fails before it comes to them loads them itself."""
    folder = tmp_path / "shards"
    manifest = make_shards(folder, layers=8, weight_bytes=1_000_000)
    bad = next(row for row in rows_of(manifest) if row.name == "model.layers.2.mlp.weight")
    (folder / "tensors" / f"{bad.sha256}.bin").write_bytes(b"")
    with run_http(folder) as served, run_store(served.url, allow_hosts=["127.0.0.1"], threads=1) as running:
        for _ in range(5):
            together = threading.Barrier(2)
            outcomes: dict[str, Any] = {}

            def engine(who: str, start: int, stop: int, together: Any = together, outcomes: Any = outcomes) -> None:
                with running.connect() as store:
                    together.wait(10)
                    try:
                        attached = attach(store, manifest, names_of(manifest, start, stop))
                        outcomes[who] = len(require_intact(attached, manifest))
                        drop(attached)
                    except StoreError as error:
                        outcomes[who] = error.code

            engines = [threading.Thread(target=engine, args=args) for args in (("whole", 0, 8), ("behind", 3, 8))]
            for thread in engines:
                thread.start()
            for thread in engines:
                thread.join(30)
            assert outcomes == {"whole": "truncated", "behind": 10}
            with running.connect() as store:
                store.evict()


def test_hundreds_of_parts_with_few_files_allowed_at_first(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    manifest = make_shards(folder, layers=300, weight_bytes=64)
    lowered = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 4096))"
    with run_store(folder, prelude=lowered) as running, running.connect() as store:
        attached = attach(store, manifest)
        assert len(attached.parts) == 303
        assert len(require_intact(attached, manifest)) == 603
        drop(attached)
        # The connection is still in step.
        assert len(store.status()["parts"]) == 303


# ---- deaths


def test_when_the_store_dies_weights_stay_and_the_next_request_says_so(shards: tuple[Path, Manifest]) -> None:
    folder, manifest = shards
    with run_store(folder) as running, running.connect() as store:
        attached = attach(store, manifest)
        mappings = [Mapping(part) for part in attached.parts]
        drop(attached)
        assert store.lives()
        running.process.kill()
        running.process.wait()
        assert not store.lives()
        known = {row.name: row.sha256 for row in rows_of(manifest)}
        for mapping in mappings:
            for name in mapping.part.tensors:
                assert hashlib.sha256(mapping.tensor(name)).hexdigest() == known[name]
        for _ in range(2):
            with pytest.raises(StoreError, match="is gone") as gone:
                store.borrow(0, 1)
            assert gone.value.code == "store_gone"
        assert not store.lives()
        with pytest.raises(StoreError, match="hetplan store serve") as gone:
            running.connect()
        assert gone.value.code == "store_gone"


def test_when_an_engine_dies_its_memory_comes_back_and_its_weights_stay(shards: tuple[Path, Manifest]) -> None:
    folder, manifest = shards
    with run_store(folder, memory_bytes=100_000_000) as running, running.connect() as store:
        with run_engine(running, manifest) as (process, said):
            assert said == f"{whole(manifest)} 2000"
            status = store.status()
            assert status["leases"] == [
                {
                    "holder": {"pid": process.pid, "what": "an engine"},
                    "device": "cpu",
                    "hold_bytes": 1_000,
                    "borrowed_bytes": 2_000,
                    "parts": 7,
                }
            ]
            assert {part["leases"] for part in status["parts"]} == {1}
            account = status["devices"]["cpu"]
            assert account["free_bytes"] == 100_000_000 - account["weights_bytes"] - 3_000
            os.kill(process.pid, signal.SIGKILL)
            wait_until(lambda: store.status()["leases"] == [])
        status = store.status()
        assert len(status["parts"]) == 7
        assert {part["leases"] for part in status["parts"]} == {0}
        assert (status["devices"]["cpu"]["held_bytes"], status["devices"]["cpu"]["borrowed_bytes"]) == (0, 0)
        with run_engine(running, manifest) as (_, said):
            assert said == "0 2000"


# ---- room


def test_an_engine_beside_another_gets_a_slice_and_grows_later(shards: tuple[Path, Manifest]) -> None:
    folder, manifest = shards
    with run_store(folder, memory_bytes=1_000_000) as running, running.connect() as new:
        with running.connect() as old:
            drop(attach(old, manifest, hold_bytes=100_000, what="the old engine"))
            weights = old.status()["devices"]["cpu"]["weights_bytes"]
            assert old.borrow(1, 500_000) == 500_000
            drop(attach(new, manifest, hold_bytes=50_000, what="the new engine"))
            free = 1_000_000 - weights - 650_000
            with pytest.raises(StoreError) as refused:
                new.borrow(free + 1, 400_000)
            assert refused.value.code == "no_room"
            for value in (free + 1, 400_000, free, 1_000_000, "the old engine", 100_000, 500_000, weights):
                assert str(value) in str(refused.value)
            assert new.borrow(1_000, 400_000) == free
            # Asking again for what it has is no growth, and giving back is one request.
            assert new.borrow(free, 400_000) == free
            assert new.borrow(0, 10) == 10
            assert new.borrow(free, free) == free
        wait_until(lambda: len(new.status()["leases"]) == 1)
        assert new.borrow(1_000, 400_000) == 400_000
        assert new.borrow(0, 2**40) == 1_000_000 - weights - 50_000
    with run_store(folder) as running, running.connect() as store:
        with pytest.raises(StoreError, match="attach first") as refused:
            store.borrow(0, 1)
        assert refused.value.code == "no_lease"
        drop(attach(store, manifest))
        assert store.borrow(1, 2**40) == 2**40


def test_room_is_made_of_what_nobody_uses_and_not_of_more(tmp_path: Path) -> None:
    first = make_shards(tmp_path / "first", model="first", layers=2, weight_bytes=100_000)
    second = make_shards(tmp_path / "second", model="second", layers=2, weight_bytes=100_000)
    with (
        run_store(tmp_path / "first", tmp_path / "second", memory_bytes=350_000) as running,
        running.connect() as store,
    ):
        with running.connect() as early:
            drop(attach(early, first, names_of(first, 0, 1)))
            store.load(model="first", tensor_parallel=1, ranks=[0], layers=(1, 2))
            store.load(model="second", tensor_parallel=1, ranks=[0], layers=(0, 1))
            # The one loaded longest ago without a lease goes; the one with a lease stays.
            brought = store.load(model="second", tensor_parallel=1, ranks=[0], layers=(1, 2))
            assert brought["fetched_bytes"] == 100_400
            left = {(part["model"], part["layer"]) for part in store.status()["parts"]}
            assert left == {("first", 0), ("second", 0), ("second", 1)}
            with running.connect() as late, pytest.raises(StoreError) as refused:
                attach(late, second, hold_bytes=300_000, what="too large")
            assert refused.value.code == "no_room"
            # Nothing was given up for what did not fit anyway.
            assert {(part["model"], part["layer"]) for part in store.status()["parts"]} == left
            assert len(store.status()["leases"]) == 1
            weights = store.status()["devices"]["cpu"]["weights_bytes"]
            freed = store.evict()["freed_bytes"]
            assert freed == weights - store.status()["devices"]["cpu"]["weights_bytes"] > 200_000
            assert [(part["model"], part["layer"]) for part in store.status()["parts"]] == [("first", 0)]
        wait_until(lambda: store.status()["leases"] == [])
        store.evict()
        assert store.status()["devices"]["cpu"]["free_bytes"] == 350_000


def test_a_lease_may_attach_to_more_and_keeps_what_it_has_when_that_fails(shards: tuple[Path, Manifest]) -> None:
    folder, manifest = shards
    with run_store(folder, memory_bytes=100_000) as running, running.connect() as store:
        drop(attach(store, manifest, names_of(manifest, 0, 1), hold_bytes=10))
        with pytest.raises(StoreError, match="no room"):
            attach(store, manifest, hold_bytes=20)
        drop(attach(store, manifest, names_of(manifest, 0, 2), hold_bytes=30))
        (lease,) = store.status()["leases"]
        assert (lease["hold_bytes"], lease["parts"]) == (30, 2)
        with pytest.raises(StoreError, match="no room"):
            attach(store, manifest, hold_bytes=20)
        (lease,) = store.status()["leases"]
        assert (lease["hold_bytes"], lease["parts"]) == (30, 2)
        assert store.evict() == {"freed_bytes": 0}


def test_load_before_engines_come(shards: tuple[Path, Manifest]) -> None:
    folder, manifest = shards
    with run_store(folder) as running, running.connect() as store:

        def loaded() -> list[tuple[int | None, str | None]]:
            parts = store.status()["parts"]
            assert {(part["tensor_parallel"], part["leases"]) for part in parts} == {(2, 0)}
            return [(part["layer"], part["name"]) for part in parts if part["rank"] == 0]

        brought = store.load(model="tiny-llama", tensor_parallel=2, ranks=[0, 1], layers=(0, 2), first=True)
        assert loaded() == [(None, "model.embed_tokens.weight"), (0, None), (1, None)]
        # The norms of rank 1 are those of rank 0.
        assert (brought["fetched_bytes"], brought["reused_bytes"]) == (2 * (4_000 + 2 * 20_000) + 2 * 400, 2 * 400)
        store.load(model="tiny-llama", tensor_parallel=2, ranks=[0], layers=(4, 4), last=True)
        assert loaded()[3:] == [(None, "model.norm.weight"), (None, "lm_head.weight")]
        attached = attach(store, manifest, names_of(manifest, 0, 2), tensor_parallel=2, rank=1)
        assert (attached.fetched_bytes, attached.reused_bytes) == (0, 0)
        drop(attached)
        with pytest.raises(StoreError, match="has 4"):
            store.load(model="tiny-llama", tensor_parallel=2, ranks=[0], layers=(0, 5))
        with pytest.raises(StoreError, match="rank 2 of tensor_parallel 2"):
            store.load(model="tiny-llama", tensor_parallel=2, ranks=[0, 2], layers=(0, 1))


def test_without_a_head_the_embedding_is_at_both_ends(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    full = make_shards(folder, layers=1)
    tied = Manifest.of(
        model="tied",
        engine=full.engine,
        config_sha256=full.config_sha256,
        layers=1,
        tensors=[row for row in full.tensors if row.name != "lm_head.weight"],
    )
    tied.write(folder)
    with run_store(folder) as running, running.connect() as store:
        store.load(model="tied", tensor_parallel=1, ranks=[0], layers=(0, 0), last=True)
        assert {part["name"] for part in store.status()["parts"]} == {"model.embed_tokens.weight", "model.norm.weight"}
