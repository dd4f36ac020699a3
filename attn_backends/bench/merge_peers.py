"""Other libraries' merges, on the same inputs; absent ones say why.

Each maker takes the inputs and returns ``call(i)``, which merges copy i into outputs of its own.
What a library wants in another form (base-2 logarithms, ``[H, T]``) is converted beforehand.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

LOG2E = 1.4426950408889634
Call = Callable[[int], Any]


class PairInputs(NamedTuple):
    """Copies of the two states, and room for their merge; first dim: copies."""

    o_a: torch.Tensor  # [copies, T, H, D]
    lse_a: torch.Tensor  # [copies, T, H]
    o_b: torch.Tensor
    lse_b: torch.Tensor
    o: torch.Tensor
    lse: torch.Tensor


def _first(*names: str) -> Any:
    """The first attribute, given as ``module:name``, that can be imported."""
    errors = []
    for name in names:
        module, attribute = name.split(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except Exception as error:  # a foreign import may raise anything
            cause = "" if error.__cause__ is None else f" ({error.__cause__})"
            errors.append(f"{type(error).__name__}: {error}{cause}")
    raise ImportError("; ".join(errors))


def copies_of(*tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """The copies along the first dim; slicing inside a call would count as its host time."""
    return [x.unbind(0) for x in tensors]


def _keep(call: Call) -> Call:
    """Hold the last result of each copy, so that a graph writes each to memory of its own."""
    kept: dict[int, Any] = {}

    def run(i: int) -> Any:
        kept[i] = call(i)
        return kept[i]

    return run


def flashinfer(x: PairInputs) -> Call:
    """``flashinfer.merge_state``: contiguous, base-2 logarithms."""
    merge = _first("flashinfer:merge_state", "flashinfer.cascade:merge_state")
    o_a, s_a, o_b, s_b = copies_of(
        x.o_a, x.lse_a.contiguous() * LOG2E, x.o_b, x.lse_b.contiguous() * LOG2E
    )
    return _keep(lambda i: merge(o_a[i], s_a[i], o_b[i], s_b[i]))


def _vllm(x: PairInputs, merge: Any) -> Call:
    heads_first = x.lse_a.mT.contiguous(), x.lse_b.mT.contiguous()  # [copies, H, T]
    out = torch.empty_like(heads_first[0])
    o, o_a, a, o_b, b, lse, back = copies_of(
        x.o, x.o_a, heads_first[0], x.o_b, heads_first[1], out, out.mT
    )

    def run(i: int) -> Any:
        merge(o[i], o_a[i], a[i], o_b[i], b[i], lse[i])
        return o[i], back[i]

    return run


def vllm_triton(x: PairInputs) -> Call:
    """The Triton kernel of vLLM: LSEs ``[H, T]``."""
    return _vllm(
        x,
        _first(
            "vllm.v1.attention.ops.triton_merge_attn_states:merge_attn_states",
            "vllm.attention.ops.triton_merge_attn_states:merge_attn_states",
            "triton_merge_attn_states:merge_attn_states",
        ),
    )


def vllm_cuda(x: PairInputs) -> Call:
    """The compiled operator of vLLM: LSEs ``[H, T]``."""
    return _vllm(x, _first("vllm._custom_ops:merge_attn_states"))


def sglang_triton(x: PairInputs) -> Call:
    """SGLang's Triton kernel: contiguous, LSEs ``[T, H]``."""
    merge = _first(
        "sglang.kernels.ops.attention.merge_state:merge_state_triton",
        "sglang.srt.layers.attention.triton_ops.merge_state:merge_state_triton",
        "merge_state:merge_state_triton",
    )
    o_a, a, o_b, b, o, lse = copies_of(
        x.o_a, x.lse_a.contiguous(), x.o_b, x.lse_b.contiguous(), x.o, x.lse
    )
    return lambda i: merge(o_a[i], a[i], o_b[i], b[i], o[i], lse[i])


def sglang_cuda(x: PairInputs) -> Call:
    """SGLang's compiled operator: contiguous, LSEs ``[T, H]``."""
    merge = _first("sgl_kernel:merge_state_v2")
    o_a, a, o_b, b, o, lse = copies_of(
        x.o_a, x.lse_a.contiguous(), x.o_b, x.lse_b.contiguous(), x.o, x.lse
    )
    return lambda i: merge(o_a[i], a[i], o_b[i], b[i], o[i], lse[i])


def flashinfer_states(o: torch.Tensor, lse: torch.Tensor) -> Call:
    """``flashinfer.merge_states`` on copies of ``o [n, T, H, D]``: states after tokens, base 2."""
    merge = _first("flashinfer:merge_states", "flashinfer.cascade:merge_states")
    v = o.transpose(1, 2).contiguous()  # [copies, T, n, H, D]
    s = lse.transpose(1, 2).contiguous() * LOG2E
    return _keep(lambda i: merge(v[i], s[i]))


PEERS: dict[str, Callable[[PairInputs], Call]] = {
    "flashinfer": flashinfer,
    "vllm-triton": vllm_triton,
    "vllm-cuda": vllm_cuda,
    "sglang-triton": sglang_triton,
    "sglang-cuda": sglang_cuda,
}

__all__ = ["PEERS", "PairInputs", "copies_of", "flashinfer_states"]
