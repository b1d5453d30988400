"""The manifest of a model's shards: which tensors there are at which degree and rank, and where their bytes are.

A folder (or an address) holds ``manifest.json`` and ``tensors/<sha256>.bin``: the raw little-endian bytes of one tensor
as one rank of one engine version holds it. Files are named by their content, so that what ranks or degrees have in
common is one file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from hetplan.base import Frozen
from hetplan.errors import InvalidInputError
from hetplan.units import MIB

SCHEMA = "hetplan.shards/1"
FILE = "manifest.json"
MAX_MANIFEST_BYTES = 64 * MIB
DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

_WORD = r"[A-Za-z0-9_][A-Za-z0-9._-]*"

# Numbers are whole JSON numbers: text and true are refused, not read as numbers.
Natural = Annotated[int, Field(strict=True, ge=0, le=2**60)]
Positive = Annotated[int, Field(strict=True, ge=1, le=2**31)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
ModelName = Annotated[str, Field(pattern=rf"^{_WORD}(/{_WORD})?$", max_length=256)]
TensorName = Annotated[str, Field(pattern=rf"^{_WORD}$", max_length=512)]
EngineName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9]*-[0-9][A-Za-z0-9.+_-]*$", max_length=64)]


def file_of(sha256: str) -> str:
    """Where a tensor's bytes are, below the manifest's folder."""
    return f"tensors/{sha256}.bin"


class TensorShard(Frozen):
    """One tensor as one rank holds it.

    Attributes
    ----------
    name : str
        As the engine calls the parameter.
    layer : int or None
        None for what is outside the layers: embedding, final norm, head.
    tensor_parallel, rank : int
    dtype : str
    shape : tuple of int
        Of this shard.
    bytes : int
    sha256 : str
        Of the bytes; names the file.
    """

    name: TensorName
    layer: Natural | None
    tensor_parallel: Positive
    rank: Natural
    dtype: str
    shape: Annotated[tuple[Natural, ...], Field(max_length=8)]
    bytes: Natural
    sha256: Sha256

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if ".." in self.name:
            raise ValueError(f"{self.name!r}: a name has no '..'")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"{self.name}: no dtype {self.dtype!r}; one of {', '.join(DTYPE_BYTES)}")
        expected = math.prod(self.shape) * DTYPE_BYTES[self.dtype]
        if self.bytes != expected:
            raise ValueError(f"{self.name}: {self.bytes} bytes, but {self.dtype} {list(self.shape)} has {expected}")
        if self.rank >= self.tensor_parallel:
            raise ValueError(f"{self.name}: rank {self.rank} of {self.tensor_parallel}; ranks count from 0")
        return self


class Manifest(Frozen):
    """The shards of one model for one engine version.

    Attributes
    ----------
    schema : str
    model : str
    engine : str
        Whose layout it is, such as ``"vllm-0.32.0"``.
    config_sha256 : str
        Of the model's config.json.
    layers : int
    tensors : tuple of TensorShard
    fingerprint : str
        sha256 of the canonical JSON of everything else.
    """

    schema_: Annotated[Literal["hetplan.shards/1"], Field(alias="schema")]
    model: ModelName
    engine: EngineName
    config_sha256: Sha256
    layers: Positive
    tensors: Annotated[tuple[TensorShard, ...], Field(min_length=1)]
    fingerprint: Sha256

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if ".." in self.model:
            raise ValueError(f"{self.model!r}: a name has no '..'")
        seen: set[tuple[str, int, int]] = set()
        sizes: dict[str, int] = {}
        for shard in self.tensors:
            key = (shard.name, shard.tensor_parallel, shard.rank)
            if key in seen:
                raise ValueError(f"{shard.name}: twice at tensor_parallel {key[1]}, rank {key[2]}")
            seen.add(key)
            if shard.layer is not None and shard.layer >= self.layers:
                raise ValueError(f"{shard.name}: layer {shard.layer} of {self.layers}; layers count from 0")
            if sizes.setdefault(shard.sha256, shard.bytes) != shard.bytes:
                raise ValueError(f"{shard.name}: {shard.bytes} bytes, and {sizes[shard.sha256]} with the same sha256")
        found = _fingerprint(self.model_dump(mode="json", by_alias=True, exclude={"fingerprint"}))
        if self.fingerprint != found:
            raise ValueError(f"the content has fingerprint {found}, not {self.fingerprint}; it was changed")
        return self

    @classmethod
    def of(
        cls,
        *,
        model: str,
        engine: str,
        config_sha256: str,
        layers: int,
        tensors: Iterable[TensorShard | Mapping[str, Any]],
    ) -> Self:
        """A manifest with these rows, and its fingerprint.

        Parameters
        ----------
        model, engine, config_sha256, layers
            As in `Manifest`.
        tensors : iterable of TensorShard or dict

        Returns
        -------
        Manifest

        Raises
        ------
        InvalidInputError
            If a field is wrong; the message names the row.
        """
        rows = [row if isinstance(row, TensorShard) else TensorShard.from_dict(row) for row in tensors]
        content = {
            "schema": SCHEMA,
            "model": model,
            "engine": engine,
            "config_sha256": config_sha256,
            "layers": layers,
            "tensors": [row.model_dump(mode="json") for row in rows],
        }
        return cls.from_dict(content | {"fingerprint": _fingerprint(content)})

    @classmethod
    def parse(cls, text: bytes, source: str) -> Self:
        """Read a manifest; an error begins with ``source``.

        Raises
        ------
        InvalidInputError
            If it is too large or a field is wrong.
        """
        if len(text) > MAX_MANIFEST_BYTES:
            raise InvalidInputError(f"{source}: more than {MAX_MANIFEST_BYTES} bytes; it is no {FILE}")
        try:
            return cls.from_json(text)
        except InvalidInputError as error:
            raise InvalidInputError(f"{source}: {error}") from None

    def write(self, folder: str | Path) -> Path:
        """Write ``manifest.json`` into a folder, whole or not at all.

        Raises
        ------
        InvalidInputError
            If it would be larger than what is read.
        """
        text = json.dumps(self.model_dump(mode="json", by_alias=True), separators=(",", ":")).encode()
        if len(text) > MAX_MANIFEST_BYTES:
            raise InvalidInputError(
                f"the manifest of {self.model} has {len(text)} bytes, at most {MAX_MANIFEST_BYTES} are read; write "
                "fewer degrees into one folder"
            )
        path = Path(folder) / FILE
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{FILE}.", delete=False) as file:
            try:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
                # As any file of the folder: a web server may read it.
                Path(file.name).chmod(0o644)
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
        return path


def _fingerprint(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
