"""In which order ``auto`` tries backends: measured where there is a row, declared elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..errors import Reason
from ..spec import AttentionSpec
from .registry import TABLE
from .shipped import MEASURED
from .tuning import TuningRow, load_tuning

_PYTORCH = ("torch_varlen", "torch_flex", "torch_sdpa", "torch_native")
_REFERENCE_FIRST = ("torch_native", "torch_sdpa", "torch_flex", "torch_varlen")

#: Declared by architecture and phase: on sm90 from docs/results/h200 (decode, prefill, extend: the
#: libraries called directly beside ``triton``), elsewhere from what the libraries publish.
_DECLARED: dict[str, dict[str, tuple[str, ...]]] = {
    "cpu": {"prefill": _REFERENCE_FIRST, "decode": _REFERENCE_FIRST},
    "sm80": {
        "prefill": ("flash_attention", "flashinfer", "triton", *_PYTORCH),
        "decode": ("flashinfer", "flash_attention", "triton", *_PYTORCH),
    },
    "sm90": {
        "prefill": ("triton", "flash_attention", "flashinfer", *_PYTORCH),
        "decode": ("triton", "flashinfer", "flash_attention", *_PYTORCH),
    },
    "sm100": {
        "prefill": ("flash_attention", "flashinfer", "triton", *_PYTORCH),
        "decode": ("flashinfer", "triton", "flash_attention", *_PYTORCH),
    },
    "cuda": {
        "prefill": ("triton", "flashinfer", *_PYTORCH),
        "decode": ("triton", "flashinfer", *_PYTORCH),
    },
    "other": {"prefill": _REFERENCE_FIRST, "decode": _REFERENCE_FIRST},
}


#: Where an order that no tuning file gave was measured otherwise; the others are declared.
_OTHERWISE = {"sm90": "measured on an H200 (docs/results/h200)"}


def _shipped() -> dict[str, dict[str, tuple[str, ...]]]:
    """The measured orders, with what was not measured behind, in the declared order."""
    found = {key: dict(phases) for key, phases in _DECLARED.items()}
    for key, measured in MEASURED.items():
        for phase, order in measured.orders.items():
            found[key][phase] = tuple(dict.fromkeys((*order, *_DECLARED[key][phase])))
    return found


#: Order by architecture and phase: what ``attn-backends tune`` measured for this release, else
#: what is declared. A tuning file goes before it. Backends not named come last, so that ``auto``
#: takes one that nobody has ranked or measured only when no other can do the call.
SHIPPED = _shipped()


def source_of(key: str) -> str:
    """Whether an order of ``SHIPPED`` was measured, and where."""
    if key in MEASURED:
        found = MEASURED[key]
        return f"measured on {found.gpu}, {found.date} ({found.file})"
    return _OTHERWISE.get(key, "declared, not measured")


def shipped_order(key: str, phase: str, bucket: str) -> tuple[str, ...]:
    """The shipped order for a kind of shape: that of its own row, if there is one, goes first."""
    row = MEASURED[key].rows.get((phase, bucket), {}) if key in MEASURED else {}
    fastest = sorted(row, key=row.__getitem__)
    if not fastest:
        return SHIPPED[key][phase]
    *others, last = SHIPPED[key][phase]  # the reference, whatever its time
    return tuple(dict.fromkeys((*(n for n in fastest if n != last), *others, last)))


def architecture(device: torch.device) -> str:
    """The key of a device in ``SHIPPED``; asks the driver if it is a CUDA device."""
    if device.type != "cuda":
        return "cpu" if device.type == "cpu" else "other"
    if not torch.cuda.is_available():
        return "cuda"
    major, _ = torch.cuda.get_device_capability(device)
    return {8: "sm80", 9: "sm90", 10: "sm100", 12: "sm100"}.get(major, "cuda")


def device_name(device: torch.device) -> str:
    """The name of a device in tuning files."""
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name(device)
    return device.type


def shape_bucket(spec: AttentionSpec) -> str:
    """The kind of shape that a tuning row is for.

    When a backend is chosen only the spec is known, so the bucket holds what a spec tells about
    speed: widths, group size, dtypes, and whether the cache is paged. Lengths are not in it.

    Args:
        spec: What the layer fixes.

    Returns:
        For example ``D128-G4-bfloat16-paged``.
    """
    width = f"D{spec.head_dim}" + (f"-DV{spec.dv}" if spec.dv != spec.head_dim else "")
    dtype = str(spec.dtype).removeprefix("torch.")
    if spec.kv != spec.dtype:
        dtype += "-kv-" + str(spec.kv).removeprefix("torch.")
    layout = "ragged" if spec.page_size is None else "paged"
    return f"{width}-G{spec.group_size}-{dtype}-{layout}"


@dataclass(frozen=True)
class Ranking:
    """An order of backends, and where it comes from.

    Attributes:
        row: The measured row, if the tuning file has one for the call.
        shipped: The order that ships.
        source: Where the order comes from, in words.
    """

    row: TuningRow | None
    shipped: tuple[str, ...]
    source: str

    def __iter__(self) -> Iterator[str]:
        """All names, best first. Plugins are looked for only after the ranked ones."""
        done: list[str] = []
        measured = {} if self.row is None else self.row.median_us
        fastest = sorted(measured, key=measured.__getitem__)
        if any(name not in TABLE.entries for name in fastest):
            TABLE.scan_plugins()
        for name in (*fastest, *self.shipped):
            if name in TABLE.entries and name not in done:
                done.append(name)
                yield name
        TABLE.scan_plugins()
        yield from (name for name in tuple(TABLE.entries) if name not in done)

    def not_first(self, name: str, chosen: str) -> Reason:
        """Why a backend that could do the call was passed over for the chosen one."""
        if self.row is not None and chosen in self.row.median_us:
            best = self.row.median_us[chosen]
            got = self.row.median_us.get(name)
            text, how = ("not measured", "") if got is None else (f"{got:g}", " faster")
            return Reason("median_us", text, f"< {best:g}", f"{chosen} was measured{how}")
        order = list(self)
        place, first = order.index(name) + 1, order.index(chosen) + 1
        return Reason("rank", str(place), f"{first}", f"able, but {chosen} comes before it")


def ranking(
    spec: AttentionSpec, phase: str, device: torch.device, tuning_file: str | None
) -> Ranking:
    """The order in which ``auto`` tries backends for a call.

    Raises:
        InvalidInputError: The tuning file cannot be read.
    """
    key = architecture(device)
    shipped = shipped_order(key, phase, shape_bucket(spec))
    source = f"shipped ranking for {key}, {source_of(key)}"
    row = None
    if tuning_file is not None:
        name, bucket = device_name(device), shape_bucket(spec)
        row = load_tuning(tuning_file).find(name, phase, bucket)
        if row is None:
            source += f" (no row for {name}, {phase}, {bucket} in {tuning_file})"
        else:
            times = ", ".join(f"{n} {t:g} us" for n, t in sorted(row.median_us.items()))
            source = f"measured on {name}, {phase}, {bucket}: {times} ({tuning_file})"
    return Ranking(row, shipped, source)


__all__ = ["SHIPPED", "Ranking", "architecture", "device_name", "ranking", "shape_bucket"]
__all__ += ["shipped_order", "source_of"]
