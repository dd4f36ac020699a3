"""Backends that hand the work to other libraries' kernels, behind the same contract."""

from __future__ import annotations

if __name__ == "adapters":
    # The folder lies at the root of a checkout; a bare import would make a second copy.
    raise ImportError("import attn_backends.adapters instead of adapters")
