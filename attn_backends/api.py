"""``attention``: one call from tensors to a state, for people and for compiled models.

What decides over it is here too: ``select``, ``explain``, ``use``, ``configure``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import ops
from .backend import RunExtras
from .config import AttentionConfig, configure
from .errors import InvalidInputError
from .forms import Given, lengths, uniform_batch
from .output import AttentionOutput
from .registry import explain, list_backends, select, use
from .spec import check_window
from .validation import check_is_tensor, check_no_grad, check_pair

Ints = Sequence[int] | torch.Tensor


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sm_scale: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    q_lens: Ints | None = None,
    kv_lens: Ints | None = None,
    cu_seqlens_q: Ints | None = None,
    cu_seqlens_k: Ints | None = None,
    page_table: torch.Tensor | None = None,
    seqlens_k: Ints | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    head_dim_v: int | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    backend: str | None = None,
    config: AttentionConfig | None = None,
    batch_invariant: bool = False,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> AttentionOutput:
    """Attention over dense, ragged or paged keys, through the backend that ``select`` chooses.

    Three forms, told apart by ``page_table`` and the number of dims:

    * dense: ``q [B, S, H, D]``, ``k [B, Sk, HK, D]``. ``q_lens`` and ``kv_lens`` say how many
      rows at the start of each sequence are real; padding rows get ``o = 0``, ``lse = -inf``.
    * ragged: ``q [T, H, D]``, ``k [Tk, HK, D]``, split by lengths or starts; without any, one
      sequence.
    * paged: ``k`` and ``v`` are caches ``[num_pages, page_size, HK, D]``, with ``page_table`` and
      ``kv_lens``; ``q`` is dense or ragged. Ragged ``q`` without lengths is one query each.

    Lengths in lists or CPU tensors are checked; tensors on another device are not read back, so
    bounds are taken from shapes, or from ``max_seqlen_q`` and ``max_seqlen_k``. Under
    ``torch.compile`` the call is one operator, and the backend is chosen when it runs.

    Args:
        q: ``[B, S, H, D]`` or ``[T, H, D]`` queries.
        k: Keys, as above; HK divides H.
        v: The same with width DV; None takes the first ``head_dim_v`` lanes of ``k`` (MLA).
        causal: Bottom-right causal.
        window: ``(left, right)`` inclusive bounds, None = unbounded; W tokens are left = W - 1.
        softcap: c in ``c * tanh(s / c)``.
        sm_scale: Factor on ``q . k``; default ``1 / sqrt(D)``.
        sinks: ``[H]`` float32 logits; ``o`` and ``lse`` then include them.
        alibi_slopes: ``[H]`` float32.
        mask: Bool, True = visible. Dense without lengths: ``[S, Sk]`` or ``[B, S, Sk]``. Else
            flat, ``q_len * kv_len`` per sequence, row-major.
        q_lens: B query counts.
        kv_lens: B key counts.
        cu_seqlens_q: B + 1 starts of ragged queries, in place of ``q_lens``.
        cu_seqlens_k: B + 1 starts of ragged keys; ``kv_lens`` may be less than the room.
        page_table: ``[B, max_pages]`` page ids.
        seqlens_k: Another name of ``kv_lens``.
        max_seqlen_q: Longest query count, or an upper bound.
        max_seqlen_k: Longest key count, or an upper bound.
        head_dim_v: DV where ``v`` is None; default D.
        k_scale: For fp8 keys: what a stored key is multiplied by; a number, or float32 ``[]``,
            ``[1]`` or ``[HK]``.
        v_scale: The same for values.
        backend: Name of a backend; see ``select``.
        config: Configuration of this call; see ``select``.
        batch_invariant: The bits of a sequence must not depend on the others.
        out: ``(o, lse)`` to write, of the shapes below; ``lse`` is float32.

    Returns:
        ``o [B, S, H, DV]`` and ``lse [B, S, H]``, or ``[T, H, DV]`` and ``[T, H]``, as ``q``.

    Raises:
        InvalidInputError: An input is malformed; the message names it.
        UnsupportedCallError: No backend, or not the one asked for, can do the call.
        UnknownBackendError: No backend has the name.
        BackendUnavailableError: The backend asked for does not work here.
    """
    _check_tensors(q, k, v, page_table)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x is not None:
            check_no_grad(name, x)
    paged, dense_q = page_table is not None, q.dim() == 4
    dense_k = not paged and k.dim() == 4
    given = Given(
        q_lens=q_lens,
        kv_lens=kv_lens,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqlens_k=seqlens_k,
        page_table=page_table,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )
    plain = dense_q and dense_k and given.is_open
    layer = ops.Layer(
        head_dim_v=_value_dim(k, v, head_dim_v),
        causal=causal,
        window=check_window(window),
        softcap=softcap,
        sm_scale=sm_scale,
        batch_invariant=batch_invariant,
    )
    extras = RunExtras(sinks, alibi_slopes, _flat_mask(mask, q, k, plain), k_scale, v_scale)
    flat_q = q.flatten(0, 1) if dense_q else q
    flat_k = k.flatten(0, 1) if dense_k else k
    flat_v = v.flatten(0, 1) if v is not None and dense_k else v
    if torch.compiler.is_compiling() or type(q) not in (torch.Tensor, torch.nn.Parameter):
        where = lengths(q, k, given)
        state = ops.call(flat_q, flat_k, flat_v, where, layer, extras, backend, config)
        return _finish(state, q, out, written=False)
    if plain:
        batch = uniform_batch(q.shape[0], q.shape[1], k.shape[1], q.device)
    else:
        batch = lengths(q, k, given).batch(q.device, flat_q.shape[0])
    spec = ops.layer_spec(
        q, k, layer, paged=paged, has_alibi=alibi_slopes is not None, has_mask=mask is not None
    )
    flat_out = _flat_out(out, q)
    state = ops.run(flat_q, flat_k, flat_v, batch, spec, extras, backend, config, flat_out)
    return _finish(state, q, out, written=flat_out is not None)


def _check_tensors(q: Any, k: Any, v: Any, page_table: Any) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if name != "v" or x is not None:
            check_is_tensor(name, x)
    if q.dim() not in (3, 4):
        raise InvalidInputError.of("q.shape", list(q.shape), "[B, S, H, D] or [T, H, D]")
    if page_table is not None:
        want, dims = "[num_pages, page_size, HK, D], beside a page_table", (4,)
    elif q.dim() == 4:
        want, dims = "[B, Sk, HK, D], as q is [B, S, H, D]", (4,)
    else:
        want, dims = "[Tk, HK, D], as q is [T, H, D] and there is no page_table", (3,)
    for name, x in (("k", k), ("v", v)):
        if x is not None and x.dim() not in dims:
            raise InvalidInputError.of(f"{name}.shape", list(x.shape), want)
    if v is not None and v.shape[:-1] != k.shape[:-1]:
        allowed = f"{list(k.shape[:-1])} and any width, as k"
        raise InvalidInputError.of("v.shape", list(v.shape), allowed)
    if page_table is None and q.dim() == 4 and k.shape[0] != q.shape[0]:
        raise InvalidInputError.of("k.shape[0]", k.shape[0], f"B={q.shape[0]}, as q")
    for name, x in (("k", k), ("v", v)):
        if x is not None and x.device != q.device:
            raise InvalidInputError.of(f"{name}.device", x.device, f"{q.device}, as q")
        if x is not None and x.dtype != k.dtype:
            raise InvalidInputError.of(f"{name}.dtype", x.dtype, f"{k.dtype}, as k")


def _value_dim(k: torch.Tensor, v: torch.Tensor | None, head_dim_v: int | None) -> int:
    if v is None:
        return k.shape[-1] if head_dim_v is None else head_dim_v
    if head_dim_v is not None and head_dim_v != v.shape[-1]:
        raise InvalidInputError.of("head_dim_v", head_dim_v, f"{v.shape[-1]}, the width of v")
    return v.shape[-1]


def _flat_mask(
    mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, plain: bool
) -> torch.Tensor | None:
    """The mask in the flat form of the contract."""
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor):
        raise InvalidInputError.of("mask", type(mask).__name__, "a bool tensor")
    if not plain:
        if mask.dim() != 1:
            allowed = "flat, q_len * kv_len per sequence, unless the call is dense without lengths"
            raise InvalidInputError.of("mask.shape", list(mask.shape), allowed)
        return mask
    batch, rows, keys = q.shape[0], q.shape[1], k.shape[1]
    if mask.dim() == 2 and mask.shape == (rows, keys):
        mask = mask.expand(batch, rows, keys)
    if mask.dim() == 3 and mask.shape == (batch, rows, keys):
        return mask.contiguous().view(-1)  # flat of any other layout may still be a strided view
    if mask.dim() == 1 and mask.shape[0] == batch * rows * keys:
        return mask
    allowed = f"[{rows}, {keys}] or [{batch}, {rows}, {keys}]"
    raise InvalidInputError.of("mask.shape", list(mask.shape), allowed)


def _flat_out(out: Any, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The caller's output as ``[T, H, DV]`` and ``[T, H]`` views; None if there are no such views.

    Raises:
        InvalidInputError: ``out`` is not a pair of tensors over the rows of q.
    """
    if out is None:
        return None
    _check_out(out, q)
    o, lse = out
    if q.dim() == 3:
        return o, lse
    try:
        return o.view(-1, *o.shape[2:]), lse.view(-1, lse.shape[2])
    except RuntimeError:  # rows of different sequences are not evenly spaced: copied afterwards
        return None


def _check_out(out: Any, q: torch.Tensor) -> None:
    check_pair(out)
    for name, x, width in (("out.o", out[0], 1), ("out.lse", out[1], 0)):
        want = list(q.shape[:-1])
        if x.dim() != len(want) + width or list(x.shape[: len(want)]) != want:
            text = f"{want} and DV" if width else f"{want}"
            raise InvalidInputError.of(f"{name}.shape", list(x.shape), text)


def _finish(state: AttentionOutput, q: torch.Tensor, out: Any, *, written: bool) -> AttentionOutput:
    """The state in the shape of q, and in the caller's output."""
    o, lse = state
    if q.dim() == 4:
        o, lse = o.view(*q.shape[:2], *o.shape[1:]), lse.view(*q.shape[:2], lse.shape[1])
    if out is None:
        return AttentionOutput(o, lse)
    if not written:
        _check_out(out, q)
        if out[0].dtype != o.dtype or out[1].dtype != lse.dtype:
            got = f"{out[0].dtype}, {out[1].dtype}"
            raise InvalidInputError.of("out.dtype", got, f"{o.dtype}, {lse.dtype}")
        out[0].copy_(o)
        out[1].copy_(lse)
    return AttentionOutput(*out)


__all__ = ["attention", "configure", "explain", "list_backends", "select", "use"]
