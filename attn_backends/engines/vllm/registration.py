"""Telling vLLM the name and the path of the backend class.

vLLM calls ``register`` in every process, and an exception would end it even where nobody wants
this backend; so what stands against registering is logged, and the name then stays unknown.
"""

from __future__ import annotations

import logging
from typing import Any

#: The member of vLLM's enumeration that is kept free for others; it is all that 0.20 has.
SPARE = "CUSTOM"
#: The name of our own, where vLLM lets a plug add one.
OWN = "ATTN_BACKENDS"
TARGET = "attn_backends.engines.vllm.backend.Backend"

logger = logging.getLogger("vllm.attn_backends")


def backend_name() -> str:
    """The ``--attention-backend`` of this vLLM that leads here.

    Raises:
        ImportError: vLLM is missing, or has no registry of attention backends.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return OWN if hasattr(AttentionBackendEnum, "register") else SPARE


def register() -> None:
    """Register the backend under ``backend_name()``; again is harmless."""
    try:
        from vllm.v1.attention.backends import registry

        members = registry.AttentionBackendEnum.__members__
        name = backend_name()
        known = members.get(name)
        holder = None if known is None else _path(known)
        if holder == TARGET:
            return
        if holder is not None:
            logger.warning(
                "attn_backends: --attention-backend %s already belongs to %s; not registered",
                name,
                holder,
            )
            return
        registry.register_backend(name if known is None else known, TARGET)
    except Exception as error:  # an unknown vLLM may fail in any way
        logger.warning(
            "attn_backends: not registered, this vLLM has another registry (supported: >= 0.20): "
            "%s: %s",
            type(error).__name__,
            error,
        )


def _path(member: Any) -> str | None:
    """The class that a member leads to, or None if it is still free."""
    try:
        path: str = member.get_path()
    except ValueError:
        return None
    return path


__all__ = ["OWN", "SPARE", "TARGET", "backend_name", "register"]
