"""Sequences side by side on later layers: views that were found once, and the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..layouts import maker, restride
from ..output import AttentionOutput
from .adapter import Attend, state_of
from .padded import Padded
from .tensors import aligned

#: Shape and strides.
Layout = tuple[tuple[int, ...], tuple[int, ...]]


class Kernel(NamedTuple):
    """What computes sequences side by side, with everything that layers share.

    Attributes:
        function: Of query ``[n, H, L, D]``, key and value; gives o and the LSE first.
        named: Its other arguments.
        heads_each: How often heads of keys are repeated before.
        narrow: The LSE ``[n, H, L]`` as a view of what ``function`` gave, from its first element
            on.
    """

    function: Callable[..., Any]
    named: dict[str, Any] = {}
    heads_each: int = 1
    narrow: Callable[[torch.Tensor], torch.Tensor] = lambda lse: lse

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(o [n, H, L, DV], lse [n, H, L])``."""
        if self.heads_each > 1:
            k, v = (x.repeat_interleave(self.heads_each, dim=1) for x in (k, v))
        found = self.function(q, k, v, **self.named)
        return found[0], self.narrow(found[1])


class Found(NamedTuple):
    """A kernel on tensors that it took as they came, and what it gave.

    Attributes:
        kernel: The kernel.
        views: Query, key and value as ``Padded`` gave them.
        o: ``[n, H, L, DV]``.
        lse: ``[n, H, L]``.
    """

    kernel: Kernel
    views: tuple[torch.Tensor, ...]
    o: torch.Tensor
    lse: torch.Tensor


def straight(padded: Padded, found: Found) -> Attend | None:
    """Attend to tensors laid out like these, with views in place of all copies that can be spared.

    What cannot be spared is a copy of the pages of K and V, and one of the LSE, whose rows
    ``[n, L]`` no stride joins if there are several of both.

    Args:
        padded: Sequences of a batch.
        found: A run of the kernel on them; its outputs have the same layout every time.

    Returns:
        What attends; None if there is more to do than views: lengths or keys to be gathered, rows
        at no multiples of 16 bytes.
    """
    pages, views = padded.pages, found.views
    if not padded.whole or not (padded.dense_views or pages is not None):
        return None
    if any(aligned(x) is not x for x in views):
        return None
    shape_q, shape_k, shape_v = (tuple(x.shape) for x in views)
    stride_q, stride_k, stride_v = (x.stride() for x in views)
    first = 0 if pages is None else pages.start  # keys start somewhere in pages taken whole
    start_k, start_v = first * stride_k[2], first * stride_v[2]
    function, named, heads_each, _ = found.kernel
    rows_o, apart_o, new_o = rows_of(found.o)
    rows_lse, apart_lse, new_lse = rows_of(found.lse)

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: AttentionOutput | None = None
    ) -> AttentionOutput:
        if pages is not None:
            k, v = pages.take(k), pages.take(v)
        q = restride(q, shape_q, stride_q)
        k, v = restride(k, shape_k, stride_k, start_k), restride(v, shape_v, stride_v, start_v)
        if heads_each > 1:
            k, v = k.repeat_interleave(heads_each, dim=1), v.repeat_interleave(heads_each, dim=1)
        given = function(q, k, v, **named)
        o, lse = given[0], given[1]
        if new_lse is not None:
            lse = new_lse().copy_(restride(lse, *apart_lse))
        if new_o is not None:
            o = new_o().copy_(restride(o, *apart_o))
        return state_of(restride(o, *rows_o), restride(lse, *rows_lse), out)

    return attend


def rows_of(x: torch.Tensor) -> tuple[Layout, Layout, Callable[[], torch.Tensor] | None]:
    """How tensors laid out like ``x [n, H, L, ...]`` become ``[n * L, H, ...]``.

    Returns:
        The layout of the rows; that of ``[n, L, H, ...]``; and, where no stride joins n and L, what
        makes the tensor that the latter is copied to first.
    """
    x = x.transpose(1, 2)
    shape, stride, new = tuple(x.shape), x.stride(), None
    rows, length = (shape[0] * shape[1], *shape[2:]), shape[1]
    joined = (stride[0] if length == 1 else stride[1], *stride[2:])
    if shape[0] > 1 and length > 1 and stride[0] != length * stride[1]:
        new = maker(shape, x.dtype, x.device)
        joined = new().stride()[1:]
    return (rows, joined), (shape, stride), new


__all__ = ["Found", "Kernel", "straight"]
