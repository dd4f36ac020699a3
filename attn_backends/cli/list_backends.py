"""``attn-backends list``: every backend, whether it works here, and what it can do."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..capabilities import Capabilities, IntSet
from ..registry import BackendInfo, list_backends
from .console import JsonFlag, guarded, print_json, stdout, table
from .options import short_dtype

NAME = "list"


@guarded
def command(as_json: JsonFlag = False) -> None:
    """List every backend: available or why not, versions, and declared capabilities.

    Loads each backend and the packages it needs, but starts no CUDA and runs no kernel: `doctor`
    does.
    """
    infos = list_backends()
    if as_json:
        print_json({"backends": [to_dict(info) for info in infos]})
        return
    out = stdout()
    head = ["backend", "available", "dtypes", "head dim", "page size", "phases", "features"]
    out.print(table("Attention backends", head, [_row(info) for info in infos]))
    for info in infos:
        out.print(f"{info.name}: {info.summary or 'no description'}", soft_wrap=True)
        out.print(f"  from {info.origin}, {info.target}", soft_wrap=True)
        versions = [f"{name} {version}" for name, version in info.versions.items() if version]
        if versions:
            out.print(f"  with {', '.join(versions)}", soft_wrap=True)
        for reason in info.reasons:
            out.print(f"  not available: {reason}", style="yellow", soft_wrap=True)


def to_dict(info: BackendInfo) -> dict[str, Any]:
    """What is known of a backend, as plain data."""
    declared = None if info.capabilities is None else capabilities_dict(info.capabilities)
    return {**info.to_dict(), "capabilities": declared}


def capabilities_dict(declared: Capabilities) -> dict[str, Any]:
    """Declared capabilities as plain data; sets of ints in words."""
    result: dict[str, Any] = {}
    for field in dataclasses.fields(declared):
        value = getattr(declared, field.name)
        if field.name in ("dtypes", "fp8_kv_dtypes"):
            value = [str(dtype).removeprefix("torch.") for dtype in value]
        elif isinstance(value, IntSet):
            value = str(value)
        result[field.name] = value
    return result


def _row(info: BackendInfo) -> list[str]:
    available = "yes" if info.available else "no"
    c = info.capabilities
    if c is None:
        return [info.name, available, "", "", "", "", ""]
    dims = str(c.head_dims)
    if c.head_dim_pairs:
        dims += "; " + ", ".join(f"{d}/{dv}" for d, dv in c.head_dim_pairs)
    features = sorted(c.features) + (["fused sinks"] if c.fused_sinks else [])
    dtypes = ", ".join(short_dtype(d) for d in c.dtypes)
    if c.fp8_kv_dtypes:
        dtypes += "; fp8 cache"
    pages = str(c.page_sizes) if "paged" in c.features else "ragged only"
    return [info.name, available, dtypes, dims, pages, ", ".join(c.phases), ", ".join(features)]


__all__ = ["NAME", "capabilities_dict", "command", "to_dict"]
