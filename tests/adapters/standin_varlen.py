"""Stand-ins of ``torch.nn.attention.varlen`` in its releases, on the CPU."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from standin_flash import _fa2_varlen


class AuxRequest(NamedTuple):
    lse: bool = False


def varlen(release: str, *, heads_first: bool = True) -> ModuleType:
    """The module of PyTorch 2.10, 2.11 or 2.13; ``heads_first``: the LSE is ``[H, T]``."""
    module = ModuleType("torch.nn.attention.varlen")
    module.AuxRequest = AuxRequest
    module.calls = []

    def body(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, return_aux, scale, window,
             seqused_k=None, block_table=None):  # fmt: skip
        if query.device.type == "meta":
            shape = (query.shape[1], query.shape[0])
            lse = query.new_empty(shape if heads_first else shape[::-1], dtype=torch.float32)
            return query, lse
        module.calls.append((max_q, max_k))
        lengths = (cu_seq_k.diff() if seqused_k is None else seqused_k).tolist()
        starts = None if cu_seq_k is None else cu_seq_k.tolist()
        causal = tuple(window) == (-1, 0)
        o, lse = _fa2_varlen(
            query, key, value, cu_seq_q, starts, lengths, max_q, max_k, scale, causal,
            tuple(window), 0.0, None, block_table,
        )  # fmt: skip
        return o, (lse if heads_first else lse.T.contiguous())

    if release == "2.10":

        def varlen_attn(
            *, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False,
            return_aux=None, scale=None,
        ):  # fmt: skip
            window = (-1, 0) if is_causal else (-1, -1)
            return body(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, return_aux, scale,
                        window)  # fmt: skip

    elif release == "2.11":

        def varlen_attn(
            *, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, return_aux=None, scale=None,
            window_size=(-1, -1),
        ):  # fmt: skip
            return body(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, return_aux, scale,
                        window_size)  # fmt: skip

    else:

        def varlen_attn(
            *, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, return_aux=None, scale=None,
            window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None,
            num_splits=None,
        ):  # fmt: skip
            heads = key.shape[-2]
            assert enable_gqa or query.shape[1] == heads
            assert block_table is None or (seqused_k is not None and key.shape[1] % 256 == 0)
            return body(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, return_aux, scale,
                        window_size, seqused_k, block_table)  # fmt: skip

    module.varlen_attn = varlen_attn
    return module
