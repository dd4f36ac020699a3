"""The backends that ship with the library. This table is the only place that names them all."""

from __future__ import annotations

from .entry import BackendEntry

_ADAPTERS = "attn_backends.adapters"

#: Name, target, and what to do if the target itself cannot be imported.
_TABLE: tuple[tuple[str, str, str | None], ...] = (
    ("torch_native", "attn_backends.torch_native.backend:TorchNativeBackend", None),
    ("triton", "attn_backends.triton_native.backend:TritonBackend", "pip install triton"),
    ("flash_attention", f"{_ADAPTERS}.flash_attention:FlashAttentionBackend", None),
    ("flashinfer", f"{_ADAPTERS}.flashinfer:FlashInferBackend", None),
    ("torch_varlen", f"{_ADAPTERS}.torch_varlen:TorchVarlenBackend", "update torch"),
    ("torch_flex", f"{_ADAPTERS}.torch_flex:TorchFlexBackend", "update torch"),
    ("torch_sdpa", f"{_ADAPTERS}.torch_sdpa:TorchSdpaBackend", "update torch"),
)


def builtin_entries() -> dict[str, BackendEntry]:
    """Entries of the shipped backends, in order; nothing is imported."""
    return {
        name: BackendEntry(name, target, "builtin", install_hint)
        for name, target, install_hint in _TABLE
    }


__all__ = ["builtin_entries"]
