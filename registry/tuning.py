"""The tuning file: medians measured on one machine, which go before the shipped ranking."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..config import stamp
from ..errors import InvalidInputError
from .target import invalid_fields


class TuningRow(BaseModel):
    """What was measured for one device, phase and kind of shape."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    device: str = Field(min_length=1)
    """Name of the device as torch gives it, or ``cpu``."""
    phase: Literal["prefill", "decode"]
    """Which of the two was measured."""
    bucket: str = Field(min_length=1)
    """What ``shape_bucket(spec)`` gives."""
    median_us: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(min_length=1)
    """Median time in microseconds, by backend name."""


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


__all__ = ["TuningFile", "TuningRow", "load_tuning"]
