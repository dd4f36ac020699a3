"""A way to see the LSE, for which transformers' attention interface has no slot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_sinks: ContextVar[tuple[list[torch.Tensor], ...]] = ContextVar("attn_backends_lse", default=())


@contextmanager
def capture_lse() -> Iterator[list[torch.Tensor]]:
    """Collect the LSE of every attention call in the block.

    Example:
        >>> with capture_lse() as lses:
        ...     model(input_ids)
        >>> lses[0].shape  # the first layer's, [B, Sq, H]

    Yields:
        A list that grows by one float32 tensor ``[B, Sq, H]`` per call, in the order of calls:
        natural log of the sum of exp(score), attention sinks included, ``-inf`` for a query that
        sees no key. Calls of other threads are not collected, nor those of ``generate_batch``.
    """
    sink: list[torch.Tensor] = []
    token = _sinks.set((*_sinks.get(), sink))
    try:
        yield sink
    finally:
        _sinks.reset(token)


def record(lse: torch.Tensor) -> None:
    """Give one call's LSE ``[B, Sq, H]`` to every capture around it."""
    for sink in _sinks.get():
        sink.append(lse)


__all__ = ["capture_lse", "record"]
