"""What a client may ask, checked."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from hetplan.base import Frozen, explain
from hetplan.errors import StoreError
from hetplan.runtime.tensor_store.manifest import EngineName, ModelName, Natural, Positive, Sha256, TensorName

Device = Annotated[str, Field(pattern=r"^(cpu|cuda:[0-9]{1,2})$")]


class Holder(Frozen):
    """Who has a lease, for people; what may be done does not depend on it."""

    pid: Natural
    what: Annotated[str, Field(pattern=r"^[ -~]*$", max_length=200)]


class AttachRequest(Frozen):
    """See `client.Store.attach`."""

    op: Literal["attach"]
    model: ModelName
    engine: EngineName
    config_sha256: Sha256
    fingerprint: Sha256 | None = None
    tensor_parallel: Positive
    rank: Natural
    tensors: Annotated[tuple[TensorName, ...], Field(min_length=1, max_length=2**20)]
    device: Device
    hold_bytes: Natural
    holder: Holder


class BorrowRequest(Frozen):
    """See `client.Store.borrow`."""

    op: Literal["borrow"]
    at_least_bytes: Annotated[Natural, Field(alias="at_least")]
    at_most_bytes: Annotated[Natural, Field(alias="at_most")]

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.at_least_bytes > self.at_most_bytes:
            raise ValueError(f"at_least {self.at_least_bytes} is more than at_most {self.at_most_bytes}")
        return self


class LoadRequest(Frozen):
    """See `client.Store.load`."""

    op: Literal["load"]
    model: ModelName
    fingerprint: Sha256 | None = None
    tensor_parallel: Positive
    ranks: Annotated[tuple[Natural, ...], Field(min_length=1, max_length=1024)]
    layers: tuple[Natural, Natural]
    first: bool = False
    last: bool = False
    device: Device = "cpu"


class StatusRequest(Frozen):
    """See `client.Store.status`."""

    op: Literal["status"]


class EvictRequest(Frozen):
    """See `client.Store.evict`."""

    op: Literal["evict"]


Request = AttachRequest | BorrowRequest | LoadRequest | StatusRequest | EvictRequest
_ANY: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="op")])


def parse_request(message: dict[str, Any]) -> Request:
    """One request.

    Raises
    ------
    StoreError
        With code ``"bad_request"``, naming the field.
    """
    try:
        return _ANY.validate_python(message)
    except ValidationError as error:
        raise StoreError("bad_request", str(explain(error, "request"))) from None
