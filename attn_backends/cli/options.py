"""Options that several commands share, and their translation into the library's words."""

from __future__ import annotations

import torch

from ..errors import InvalidInputError
from ..spec import check_device, check_present

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}


def parse_dtype(name: str, *, field: str = "dtype") -> torch.dtype:
    """A dtype by its short name or torch's."""
    for short, dtype in DTYPES.items():
        if name in (short, str(dtype).removeprefix("torch.")):
            return dtype
    raise InvalidInputError.of(field, repr(name), f"{', '.join(DTYPES)}, or torch's names")


def short_dtype(dtype: torch.dtype) -> str:
    """The short name of a dtype."""
    names = {value: key for key, value in DTYPES.items()}
    return names.get(dtype, str(dtype).removeprefix("torch."))


def parse_window(text: str | None) -> tuple[int | None, int | None] | None:
    """``LEFT`` or ``LEFT,RIGHT``; each a number of tokens, or ``none`` for unbounded."""
    if text is None:
        return None
    parts = [part.strip().lower() for part in text.split(",")]
    allowed = "LEFT or LEFT,RIGHT, each an int >= 0 or none"
    if len(parts) > 2:
        raise InvalidInputError.of("window", repr(text), allowed)
    bounds: list[int | None] = []
    for part in parts:
        if part == "none":
            bounds.append(None)
        elif part.isdigit():
            bounds.append(int(part))
        else:
            fix = "a window of W tokens is LEFT = W - 1; unbounded is none"
            raise InvalidInputError.of("window", repr(text), allowed, fix)
    return bounds[0], bounds[1] if len(bounds) == 2 else None


def parse_device(name: str | None) -> torch.device:
    """A device that is there; without a name CUDA if visible, else the CPU."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = check_device(name)
    check_present(device)
    return device


__all__ = ["DTYPES", "parse_device", "parse_dtype", "parse_window", "short_dtype"]
