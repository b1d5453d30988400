"""Weights arrive as they are, only those that are missing, and only from where they may come."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from router_process import free_port
from store_process import (
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

from hetplan.errors import InvalidInputError, StoreError
from hetplan.runtime.tensor_store.fetch import RANGE_BYTES
from hetplan.runtime.tensor_store.hosts import HostRules
from hetplan.runtime.tensor_store.manifest import Manifest, file_of
from hetplan.runtime.tensor_store.sources import open_source

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
# The service asks who one is, and does not check the signature.
SIGNED = {"Authorization": "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request, SignedHeaders=host"}


@pytest.fixture
def shards(tmp_path: Path) -> tuple[Path, Manifest]:
    folder = tmp_path / "shards"
    return folder, make_shards(folder)


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The address of an S3 service on this machine."""
    port = free_port()
    with subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            wait_until(lambda: listens(port), 30)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def listens(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


def put(url: str, content: bytes = b"") -> None:
    headers = {**SIGNED, "Content-Type": "application/octet-stream"}
    urllib.request.urlopen(urllib.request.Request(url, content, headers, method="PUT"), timeout=10).close()


def upload(address: str, bucket: str, folder: Path) -> None:
    put(f"{address}/{bucket}")
    for path in folder.rglob("*"):
        if path.is_file():
            put(f"{address}/{bucket}/shards/{path.relative_to(folder)}", path.read_bytes())


# ---- whole


def test_from_a_folder(tmp_path: Path) -> None:
    manifest = make_shards(tmp_path / "shards", layers=2, weight_bytes=2 * RANGE_BYTES + 8)
    with run_store(f"file://{tmp_path}/shards") as running, running.connect() as store:
        attached = attach(store, manifest)
        assert require_intact(attached, manifest) == {row.name for row in rows_of(manifest)}
        assert attached.fingerprint == manifest.fingerprint
        assert attached.fetched_bytes == sum(row.bytes for row in rows_of(manifest))
        drop(attached)


def test_over_http_in_ranges(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    manifest = make_shards(folder, layers=2, weight_bytes=2 * RANGE_BYTES + 8)
    with (
        run_http(folder) as served,
        run_store(served.url, allow_hosts=["127.0.0.1"]) as running,
        running.connect() as store,
    ):
        for rank in (0, 1):
            attached = attach(store, manifest, tensor_parallel=2, rank=rank)
            assert require_intact(attached, manifest, 2, rank) == {row.name for row in rows_of(manifest)}
            drop(attached)
        attached = attach(store, manifest)
        require_intact(attached, manifest)
        drop(attached)


def test_from_s3(tmp_path: Path, s3: str) -> None:
    folder = tmp_path / "shards"
    manifest = make_shards(folder, layers=2, weight_bytes=RANGE_BYTES + 8)
    upload(s3, "weights", folder)
    options = {"allow_hosts": ["s3://weights", "127.0.0.1"], "secrets": {**KEYS, "AWS_ENDPOINT_URL": s3}}
    with run_store("s3://weights/shards", **options) as running, running.connect() as store:
        attached = attach(store, manifest)
        assert require_intact(attached, manifest) == {row.name for row in rows_of(manifest)}
        drop(attached)
        # The file of a later request is cut before its second range, and then gone.
        halves = [row for row in rows_of(manifest, 2, 1) if row.layer is not None]
        put(f"{s3}/weights/shards/{file_of(halves[0].sha256)}", b"\0" * 100)
        with pytest.raises(StoreError, match=rf"layer 0, {halves[0].name}.*ends at or before byte 100 of") as refused:
            attach(store, manifest, [halves[0].name], tensor_parallel=2, rank=1)
        assert refused.value.code == "truncated"
        gone = urllib.request.Request(
            f"{s3}/weights/shards/{file_of(halves[0].sha256)}", headers=SIGNED, method="DELETE"
        )
        urllib.request.urlopen(gone, timeout=10).close()
        with pytest.raises(StoreError, match="is not there") as refused:
            attach(store, manifest, [halves[0].name], tensor_parallel=2, rank=1)
        assert refused.value.code == "missing_shard"


def test_s3_that_is_not_allowed(s3: str) -> None:
    for allowed, told in (
        (["127.0.0.1"], "s3://weights is not on the list"),
        (["s3://other", "127.0.0.1"], "s3://weights is not on the list"),
        (["s3://weights"], "127.0.0.1 is not on the list"),
    ):
        with (
            pytest.raises(RuntimeError, match=told),
            run_store("s3://weights/shards", allow_hosts=allowed, secrets={**KEYS, "AWS_ENDPOINT_URL": s3}),
        ):
            pass


# ---- only what is missing


def test_another_partition_fetches_the_missing_layers_alone(shards: tuple[Path, Manifest]) -> None:
    folder, manifest = shards
    with (
        run_http(folder) as served,
        run_store(served.url, allow_hosts=["127.0.0.1"]) as running,
        running.connect() as store,
    ):
        drop(attach(store, manifest, names_of(manifest, 0, 2)))
        before = served.tensor_bytes()
        assert before == sum(row.bytes for row in rows_of(manifest) if row.layer in (0, 1))
        with running.connect() as other:
            attached = attach(other, manifest, names_of(manifest, 1, 4))
        missing = sum(row.bytes for row in rows_of(manifest) if row.layer in (2, 3))
        assert served.tensor_bytes() - before == missing == attached.fetched_bytes
        assert attached.held_bytes >= sum(row.bytes for row in rows_of(manifest) if row.layer == 1)
        drop(attached)


def test_one_name_brings_its_whole_layer(shards: tuple[Path, Manifest]) -> None:
    folder, manifest = shards
    with run_store(folder) as running, running.connect() as store:
        attached = attach(store, manifest, ["model.layers.2.norm.weight"])
        assert [set(part.tensors) for part in attached.parts] == [set(names_of(manifest, 2, 3))]
        drop(attached)


def test_another_degree_fetches_only_contents_that_are_not_loaded(shards: tuple[Path, Manifest]) -> None:
    folder, manifest = shards
    with (
        run_http(folder) as served,
        run_store(served.url, allow_hosts=["127.0.0.1"]) as running,
        running.connect() as store,
    ):
        drop(attach(store, manifest))
        loaded = {row.sha256 for row in rows_of(manifest)}
        for rank in (0, 1):
            before = served.tensor_bytes()
            new = {row.sha256: row.bytes for row in rows_of(manifest, 2, rank) if row.sha256 not in loaded}
            with running.connect() as other:
                attached = attach(other, manifest, tensor_parallel=2, rank=rank)
                require_intact(attached, manifest, 2, rank)
            assert served.tensor_bytes() - before == sum(new.values()) == attached.fetched_bytes
            assert attached.reused_bytes == sum(row.bytes for row in rows_of(manifest, 2, rank)) - sum(new.values()) > 0
            loaded |= new.keys()
            drop(attached)
        status = store.status()
        assert status["fetched_bytes"] == served.tensor_bytes()
        assert status["reused_bytes"] > 0


def test_equal_tensors_of_one_layer_are_fetched_once(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    rows = [row.model_dump() for row in make_shards(folder, layers=1).tensors]
    twin = next(row for row in rows if row["layer"] == 0) | {"name": "model.layers.0.twin"}
    manifest = Manifest.of(
        model="tiny-llama", engine="vllm-0.32.0", config_sha256="c" * 64, layers=1, tensors=[*rows, twin]
    )
    manifest.write(folder)
    with run_store(folder) as running, running.connect() as store:
        attached = attach(store, manifest)
        assert "model.layers.0.twin" in require_intact(attached, manifest)
        assert attached.reused_bytes == twin["bytes"]
        drop(attached)


# ---- damaged


def spoil(path: Path, how: str) -> None:
    content = path.read_bytes()
    changed = {
        "corrupted": content[:-1] + bytes([content[-1] ^ 1]),
        "truncated": content[:-4],
        "empty": b"",
        "too_long": content + b"\0",
    }
    if how == "missing_shard":
        path.unlink()
    else:
        path.write_bytes(changed[how])


@pytest.mark.parametrize("over_http", [False, True], ids=["folder", "http"])
def test_a_damaged_file_is_refused_by_name_and_leaves_nothing(shards: tuple[Path, Manifest], over_http: bool) -> None:
    folder, manifest = shards
    (row,) = [row for row in rows_of(manifest) if row.name == "model.layers.1.mlp.weight"]
    path = folder / file_of(row.sha256)
    good = path.read_bytes()
    with (
        run_http(folder) as served,
        run_store(served.url if over_http else folder, allow_hosts=["127.0.0.1"]) as running,
        running.connect() as store,
    ):
        for how in ("corrupted", "truncated", "empty", "too_long", "missing_shard"):
            spoil(path, how)
            with pytest.raises(StoreError, match=r"layer 1, model\.layers\.1\.mlp\.weight") as refused:
                attach(store, manifest, names_of(manifest, 0, 4), hold_bytes=5)
            assert refused.value.code == ("truncated" if how == "empty" else how)
            assert path.name in str(refused.value)
            status = store.status()
            assert 1 not in [part["layer"] for part in status["parts"]]
            assert status["leases"] == []
            account = status["devices"]["cpu"]
            assert account["weights_bytes"] == sum(part["bytes"] for part in status["parts"])
            assert account["held_bytes"] == 0
            path.write_bytes(good)
        attached = attach(store, manifest)
        assert len(require_intact(attached, manifest)) == len(rows_of(manifest))
        drop(attached)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"engine": "vllm-0.33.0"}, "wrong_engine"),
        ({"config_sha256": "d" * 64}, "wrong_config"),
        ({"fingerprint": "e" * 64}, "wrong_fingerprint"),
        ({"model": "other"}, "unknown_model"),
        ({"tensor_parallel": 4, "rank": 3}, "unknown_shards"),
        ({"names": ["model.layers.0.mlp.weight", "model.layers.9.mlp.weight"]}, "unknown_tensors"),
        ({"device": "cuda:0"}, "unknown_device"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_values(
    shards: tuple[Path, Manifest], change: dict[str, Any], code: str
) -> None:
    folder, manifest = shards
    with run_store(folder) as running, running.connect() as store:
        with pytest.raises(StoreError) as refused:
            attach(store, manifest, **change)
        assert refused.value.code == code
        said = str(refused.value)
        expected = {
            "wrong_engine": ["vllm-0.33.0", "vllm-0.32.0"],
            "wrong_config": ["d" * 64, manifest.config_sha256],
            "wrong_fingerprint": ["e" * 64, manifest.fingerprint],
            "unknown_model": ["other", "tiny-llama"],
            "unknown_shards": ["4", "1, 2"],
            "unknown_tensors": ["model.layers.9.mlp.weight"],
            "unknown_device": ["cuda:0", "cpu"],
        }
        assert all(value in said for value in expected[code]), said
        assert store.status()["parts"] == []
        drop(attach(store, manifest, fingerprint=manifest.fingerprint))


# ---- hosts


@pytest.mark.parametrize(
    ("host", "addresses", "allowed"),
    [
        ("weights.example", ["198.51.100.7"], True),
        ("weights.example", ["10.0.0.5", "fd00::5"], True),
        ("weights.example", ["198.51.100.7", "169.254.169.254"], False),
        ("weights.example", ["fe80::1%eth0"], False),
        ("weights.example", ["::ffff:169.254.169.254"], False),
        ("weights.example", ["64:ff9b::a9fe:a9fe"], False),
        ("weights.example", ["fd00:ec2::254"], False),
        ("weights.example", ["127.0.0.1"], False),
        ("weights.example", ["::1"], False),
        ("weights.example", ["::ffff:127.0.0.1"], False),
        ("weights.example", ["0.0.0.0"], False),
        ("other.example", ["198.51.100.7"], False),
        ("weights.example.evil.example", ["198.51.100.7"], False),
        ("169.254.169.254", ["169.254.169.254"], False),
        ("localhost", ["127.0.0.1", "::1"], True),
        ("127.0.0.1", ["127.0.0.1"], True),
    ],
)
def test_hosts_and_their_addresses(host: str, addresses: list[str], allowed: bool) -> None:
    names = ["weights.example", "localhost", "127.0.0.1", "169.254.169.254"]
    rules = HostRules(names, lambda name, port: addresses)
    if allowed:
        assert rules.require_host(host, 443) == addresses
    else:
        with pytest.raises(StoreError) as refused:
            rules.require_host(host, 443)
        assert refused.value.code == "refused_host"
        assert host in str(refused.value)


def test_a_bucket_allows_amazons_hosts_to_s3_alone() -> None:
    rules = HostRules(["s3://weights"], lambda host, port: ["198.51.100.7"])
    with pytest.raises(StoreError, match="is not on the list"):
        open_source("http://ec2-1-2-3-4.compute.amazonaws.com/shards", rules, 1)
    for host, allowed in (
        ("weights.s3.eu-west-1.amazonaws.com", True),
        ("notamazonaws.com", False),
        ("s3.amazonaws.com.evil.example", False),
    ):
        answer = asyncio.run(outcome(rules.resolver((".amazonaws.com",)).resolve(host, 443)))
        assert (answer == "198.51.100.7") == allowed, answer


async def outcome(resolving: Any) -> str:
    """The address, or why there is none."""
    try:
        return str((await resolving)[0]["host"])
    except StoreError as error:
        return error.code


def test_nothing_is_allowed_by_default() -> None:
    for location in ("http://127.0.0.1:1/shards", "https://weights.example/shards", "s3://weights/shards"):
        with pytest.raises(StoreError, match="is not on the list"):
            open_source(location, HostRules(()), 1)


@pytest.mark.parametrize(
    ("location", "told"),
    [
        ("ftp://weights.example/shards", "folder, file, http"),
        ("http://user:secret@weights.example/shards", "no user"),
        ("https://weights.example/shards?X-Amz-Signature=secret", "no user, query"),
        ("file://elsewhere/shards", "three slashes"),
        ("http:///shards", "a host"),
    ],
)
def test_addresses_that_are_none(location: str, told: str) -> None:
    with pytest.raises(InvalidInputError, match=told) as refused:
        open_source(location, HostRules(["weights.example"]), 1)
    assert "secret" not in str(refused.value).replace("secrets", "")


REBINDING = """
answers = iter(["198.51.100.7", {later!r}, {later!r}, {later!r}, {later!r}])
extra["resolve"] = lambda host, port: [next(answers)]
"""


@pytest.mark.parametrize("later", ["169.254.169.254", "127.0.0.1"])
def test_a_name_that_changes_its_address_before_the_connection(shards: tuple[Path, Manifest], later: str) -> None:
    with (
        run_http(shards[0]) as served,
        pytest.raises(RuntimeError, match=f"weights.example is {later}"),
        run_store(
            f"http://weights.example:{served.port}",
            allow_hosts=["weights.example"],
            prelude=REBINDING.format(later=later),
        ),
    ):
        pass
    assert served.bytes_by_file == {}


def test_an_endpoint_of_s3_that_changes_its_address(s3: str) -> None:
    secrets = {**KEYS, "AWS_ENDPOINT_URL": f"http://s3.example:{s3.rpartition(':')[2]}"}
    with (
        pytest.raises(RuntimeError, match=r"s3\.example is 169\.254\.169\.254"),
        run_store(
            "s3://weights/shards",
            allow_hosts=["s3://weights", "s3.example"],
            secrets=secrets,
            prelude="""
answers = iter(["198.51.100.7"])
extra["resolve"] = lambda host, port: [next(answers, "169.254.169.254")]
""",
        ),
    ):
        pass


def test_a_redirect_is_refused_and_not_followed(shards: tuple[Path, Manifest]) -> None:
    folder, manifest = shards
    (row,) = [row for row in rows_of(manifest) if row.name == "model.layers.0.mlp.weight"]
    name = file_of(row.sha256)
    with (
        run_http(folder) as served,
        run_http(folder) as elsewhere,
        run_store(served.url, allow_hosts=["127.0.0.1"]) as running,
        running.connect() as store,
    ):
        served.redirects[name] = f"{elsewhere.url}/{name}"
        with pytest.raises(StoreError, match=r"layer 0.*redirected to 127\.0\.0\.1") as refused:
            attach(store, manifest)
        assert refused.value.code == "refused_host"
        assert elsewhere.bytes_by_file == {}
        served.redirects.clear()
        drop(attach(store, manifest))


def test_a_connection_that_breaks_is_tried_again_and_not_for_ever(shards: tuple[Path, Manifest]) -> None:
    folder, manifest = shards
    with (
        run_http(folder) as served,
        run_store(served.url, allow_hosts=["127.0.0.1"], threads=1) as running,
        running.connect() as store,
    ):
        served.cuts = 2
        attached = attach(store, manifest, ["lm_head.weight"])
        require_intact(attached, manifest)
        drop(attached)
        served.cuts = 100
        with pytest.raises(StoreError, match=r"model\.norm\.weight") as refused:
            attach(store, manifest, ["model.norm.weight"])
        assert refused.value.code == "unreachable"
        assert served.cuts == 100 - 3


def test_a_server_without_ranges_serves_small_files_only(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    manifest = make_shards(folder, layers=1, weight_bytes=RANGE_BYTES + 8)
    with (
        run_http(folder) as served,
        run_store(served.url, allow_hosts=["127.0.0.1"]) as running,
        running.connect() as store,
    ):
        served.without_ranges = True
        drop(attach(store, manifest, ["model.norm.weight"]))
        with pytest.raises(StoreError, match="must answer ranges"):
            attach(store, manifest)
