"""The plug into SGLang.

SGLang calls ``register`` through the entry point group ``sglang.srt.plugins``; then
``--attention-backend attn_backends`` leads here. Nothing here imports SGLang before that.
"""

from __future__ import annotations

from .registration import NAME, register

__all__ = ["NAME", "register"]
