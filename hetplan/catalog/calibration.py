"""What was measured on a GPU, as data: one file per GPU, each number with its source."""

from __future__ import annotations

import datetime
import hashlib
import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hetplan.base import Frozen
from hetplan.catalog.dtypes import Dtype
from hetplan.catalog.kernels import AllReduceCurve, DecodeAttentionFit, GemmFit, PrefillAttentionFit
from hetplan.catalog.steps import StepOverheads
from hetplan.errors import InvalidInputError, SchemaVersionError

SCHEMA: Literal["hetplan.calibration/2"] = "hetplan.calibration/2"
Source = Literal["measured", "published", "datasheet", "assumed"]


class Quantity(Frozen):
    """A number and where it comes from.

    ``source``: measured (by a calibration run or from measurements made by others), published (a
    paper's scalar), datasheet (the vendor's peak) or assumed.
    """

    value: Annotated[float, Field(gt=0)]
    source: Source
    reference: str
    observed_on: datetime.date | None = None


class CalibrationPoint(Frozen):
    """One measured operation: its shape by name (m, n, k; batch, tokens, heads ...), seconds and spread."""

    operation: Literal["gemm", "gemv", "attention_prefill", "attention_decode", "all_reduce", "norm"]
    dtype: Dtype
    shape: dict[str, int]
    seconds: Annotated[float, Field(gt=0)]
    relative_spread: Annotated[float, Field(ge=0)] | None = None


class Calibration(Frozen):
    """What one GPU reaches: rates, and fitted kernels where they were measured.

    Attributes
    ----------
    compute_flops : dict of str to Quantity
        FLOP/s of large GEMMs, per type in which the GPU multiplies.
    memory_bytes_per_s : Quantity
        Bytes/s of a weight-streaming GEMV.
    kernel_s : Quantity
        Seconds of launching one small kernel inside a step.
    gemms : tuple of GemmFit
        One per type; a type without one is derived from the rates.
    prefill_attention, decode_attention : optional
        Fitted attention kernels; derived from the rates when missing.
    all_reduces : tuple of AllReduceCurve
        Collectives measured on hosts of this GPU; they go before the host's own link.
    step_overheads : tuple of StepOverheads
        Engines timed on this machine, instead of the catalogue's.
    points : tuple of CalibrationPoint
        The measurements behind the fits.
    """

    schema_version: Literal["hetplan.calibration/2"] = SCHEMA
    gpu: str
    compute_flops: dict[Dtype, Quantity]
    memory_bytes_per_s: Quantity
    kernel_s: Quantity
    gemms: tuple[GemmFit, ...] = ()
    prefill_attention: PrefillAttentionFit | None = None
    decode_attention: DecodeAttentionFit | None = None
    all_reduces: tuple[AllReduceCurve, ...] = ()
    step_overheads: tuple[StepOverheads, ...] = ()
    points: tuple[CalibrationPoint, ...] = ()
    device: str | None = None
    driver: str | None = None
    engine: str | None = None
    measured_on: datetime.date | None = None

    @property
    def sha256(self) -> str:
        """Digest of the content, stated in files and plans so that a change shows."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def datasheet_parts(self) -> tuple[str, ...]:
        """Names of the rates that are datasheet values, not measurements."""
        compute = tuple(f"{d} compute" for d, q in self.compute_flops.items() if q.source == "datasheet")
        return compute + (("memory bandwidth",) if self.memory_bytes_per_s.source == "datasheet" else ())

    def save(self, path: str | Path) -> None:
        """Write as JSON, with the digest of the content."""
        content = self.model_dump(mode="json") | {"sha256": self.sha256}
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read a calibration file and check its digest.

        Raises
        ------
        InvalidInputError
            If the file is not a calibration, or was changed after it was written.
        SchemaVersionError
            If it has another schema version.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidInputError(f"{path}: not a readable calibration file: {error}") from None
        if not isinstance(content, dict):
            raise InvalidInputError(f"{path}: a calibration file holds one JSON object")
        version = content.get("schema_version")
        if version != SCHEMA:
            raise SchemaVersionError(f"{path} has schema {version!r}; this hetplan reads {SCHEMA!r}. Calibrate again")
        stated = content.pop("sha256", None)
        calibration = cls.from_dict(content)
        if stated != calibration.sha256:
            raise InvalidInputError(
                f"{path}: sha256 is {stated}, the content has {calibration.sha256}: it was changed by hand. "
                "Save it again through Calibration.save once the change is meant"
            )
        return calibration

    @classmethod
    def fit(
        cls,
        gpu: str,
        tables: str | Path,
        *,
        engine: str | None = None,
    ) -> Calibration:
        """Fit a calibration from kernel tables in CSV form.

        Parameters
        ----------
        gpu : str
            A catalogued GPU or alias.
        tables : path
            A folder with ``gemm_<GPU>.csv``, ``attn_prefill_<GPU>.csv``, ``attn_decode_<GPU>.csv`` and
            ``comm_<GPU>.csv``, whichever there are; docs/calibration.md gives their columns.
        engine : str, optional
            Whose kernels to take where a table holds several; by default vLLM's.

        Returns
        -------
        Calibration

        Raises
        ------
        InvalidInputError
            If the folder holds no table of the GPU, or a table lacks a column.
        """
        from hetplan.calibration.fit import fit_tables

        return fit_tables(gpu, Path(tables), engine=engine)
