"""The tuning file: medians measured on one machine, which go before the shipped ranking."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..config import stamp
from ..errors import InvalidInputError
from .target import invalid_fields

Microseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class TuningPoint(BaseModel):
    """What was measured for one batch."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    batch: int = Field(ge=1)
    """Sequences."""
    q_len: int = Field(ge=1)
    """Queries of each."""
    kv_len: int = Field(ge=1)
    """Keys of each."""
    num_heads: int = Field(ge=1)
    """Query heads; the bucket fixes their ratio to KV heads."""
    median_us: dict[str, Microseconds]
    """Median time in microseconds, by backend name."""
    mode: dict[str, str] = Field(default_factory=dict)
    """How each was timed: ``graph_cold`` or ``eager``."""
    refused: dict[str, str] = Field(default_factory=dict)
    """Why a backend has no time here."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """What tells points of a bucket apart."""
        return self.batch, self.q_len, self.kv_len, self.num_heads


class TuningRow(BaseModel):
    """What was measured for one device, phase and kind of shape."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    device: str = Field(min_length=1)
    """Name of the device as torch gives it, or ``cpu``."""
    phase: Literal["prefill", "decode"]
    """Which of the two was measured."""
    bucket: str = Field(min_length=1)
    """What ``shape_bucket(spec)`` gives."""
    median_us: dict[str, Microseconds] = Field(min_length=1)
    """Microseconds by backend name: what ``auto`` goes by. Over several points it is the geometric
    mean of their medians, of the backends that have a time wherever any has."""
    points: tuple[TuningPoint, ...] = ()
    """The batches behind it."""

    @classmethod
    def of(
        cls, device: str, phase: Literal["prefill", "decode"], bucket: str,
        points: Sequence[TuningPoint],
    ) -> TuningRow | None:  # fmt: skip
        """Sum up points that have times; None if no backend has one at all of them.

        Args:
            device: As the field.
            phase: As the field.
            bucket: As the field.
            points: Batches that were measured.

        Returns:
            The row, or None.
        """
        timed = [p for p in points if p.median_us]
        means = {
            name: math.exp(sum(math.log(p.median_us[name]) for p in timed) / len(timed))
            for name in (timed[0].median_us if timed else ())
            if all(name in p.median_us for p in timed)
        }
        if not means:
            return None
        median_us = {name: round(mean, 3) or mean for name, mean in means.items()}
        return cls(
            device=device, phase=phase, bucket=bucket, median_us=median_us, points=tuple(points)
        )


class TuningFile(BaseModel):
    """A whole file, as ``attn-backends tune`` writes it with ``model_dump_json``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: Literal[1] = 1
    """Version of this layout."""
    meta: dict[str, Any] = Field(default_factory=dict)
    """How it was measured: command, date, versions."""
    rows: list[TuningRow]
    """At most one row for each device, phase and bucket."""

    @model_validator(mode="after")
    def _rows_are_distinct(self) -> TuningFile:
        seen = set()
        for i, row in enumerate(self.rows):
            key = (row.device, row.phase, row.bucket)
            if key in seen:
                raise ValueError(f"rows.{i} repeats device, phase and bucket {key}")
            seen.add(key)
        return self

    def find(self, device: str, phase: str, bucket: str) -> TuningRow | None:
        """The row that fits, or None.

        Args:
            device: Name of the device as torch gives it, or ``cpu``.
            phase: ``"prefill"`` or ``"decode"``.
            bucket: What ``shape_bucket(spec)`` gives.

        Returns:
            The row of exactly these three, or None.
        """
        for row in self.rows:
            if (row.device, row.phase, row.bucket) == (device, phase, bucket):
                return row
        return None

    def with_row(self, row: TuningRow) -> TuningFile:
        """The same file with a row added, in place of that for the same device and bucket.

        Args:
            row: What was measured.

        Returns:
            A new file; this one does not change.
        """
        key = (row.device, row.phase, row.bucket)
        rows = [r for r in self.rows if (r.device, r.phase, r.bucket) != key]
        return self.model_copy(update={"rows": [*rows, row]})


_loaded: dict[str, tuple[Any, TuningFile]] = {}


def load_tuning(path: str | os.PathLike[str]) -> TuningFile:
    """Read and check a tuning file; read again only when the file changed.

    Args:
        path: A JSON file as ``attn-backends tune`` writes it; ``~`` is the home folder.

    Returns:
        Its rows and where they come from.

    Raises:
        InvalidInputError: The file cannot be read, or a field is wrong; names file and field.
    """
    name = os.path.expanduser(os.fspath(path))
    now = stamp(name)
    known = _loaded.get(name)
    if known is not None and known[0] == now and now is not None:
        return known[1]
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError.of("tuning_file", name, "a readable file", str(error)) from None
    try:
        tuning = TuningFile.model_validate_json(text)
    except ValidationError as error:
        raise InvalidInputError(f"{name}: {invalid_fields(error, '', TuningFile)}") from None
    _loaded[name] = (now, tuning)
    return tuning


def write_tuning(path: str | os.PathLike[str], tuning: TuningFile) -> None:
    """Write a tuning file; whoever reads meanwhile finds the old one or the new, never a part.

    Args:
        path: Where; folders are made.
        tuning: What to write.

    Raises:
        InvalidInputError: The file cannot be written.
    """
    target = Path(os.path.expanduser(os.fspath(path)))
    name = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(tuning.model_dump_json(indent=1) + "\n")
        os.chmod(name, 0o644)  # made for its owner alone
        os.replace(name, target)
    except OSError as error:
        if name is not None:
            Path(name).unlink(missing_ok=True)
        allowed = "a file that can be written"
        raise InvalidInputError.of("tuning_file", str(path), allowed, str(error)) from None


__all__ = ["TuningFile", "TuningPoint", "TuningRow", "load_tuning", "write_tuning"]
