"""Functions with the arguments of two engines' kernels, computed by the oracle.

What the arguments mean is written here once more, apart from the adapters, so that the suite
can tell an adapter that translates wrongly from a kernel that computes wrongly.
"""

from __future__ import annotations

import torch

import attn_backends as ab
from attn_backends.conformance.oracle import Extras, Sequence, attend


def _state(q, k, v, *, causal=True, window=None, softcap=0.0, scale=1.0, mask=None, **extras):  # type: ignore[no-untyped-def]
    """The exact state of one sequence, ``[n, H, DV]`` and ``[n, H]``."""
    spec = ab.AttentionSpec(
        num_heads=q.shape[1], num_kv_heads=k.shape[1], head_dim=q.shape[2], head_dim_v=v.shape[2],
        dtype=torch.float32, causal=causal, window=window, softcap=softcap or None,
        sm_scale=float(scale), has_alibi="slopes" in extras, has_mask=mask is not None,
    )  # fmt: skip
    if window is not None:  # what no query sees is not even multiplied by 0
        first = max(0, len(k) - len(q) - window[0])
        k, v = k[first:], v[first:]
    tensors = (x.float() for x in (q, k, v))
    given = Extras(**{n: x for n, x in extras.items() if x is not None})
    found = attend(spec, Sequence(*tensors, mask=mask), given)
    return found.o, found.lse


def sglang_decode(q, k_buffer, v_buffer, o, kv_indptr, kv_indices, attn_logits, attn_lse,
                  num_kv_splits, max_kv_splits, sm_scale, k_scale, v_scale, logit_cap=0.0,
                  sinks=None, has_mla=False):  # type: ignore[no-untyped-def] # fmt: skip
    """Query b attends the slots ``kv_indices[kv_indptr[b]:kv_indptr[b + 1]]``."""
    assert attn_logits.shape[2] == max_kv_splits and q.shape[0] == len(kv_indptr) - 1
    for b in range(q.shape[0]):
        slots = kv_indices[kv_indptr[b] : kv_indptr[b + 1]]
        k, v = k_buffer[slots] * k_scale, v_buffer[slots] * v_scale
        call = {"softcap": logit_cap, "scale": sm_scale}
        o[b] = _state(q[b : b + 1], k, v, sinks=sinks, **call)[0][0]
        attn_lse[b, :, 0] = _state(q[b : b + 1], k, v, **call)[1][0]  # the parts know no sink


def sglang_extend(q_extend, k_extend, v_extend, o_extend, k_buffer, v_buffer, qo_indptr, kv_indptr,
                  kv_indices, custom_mask, is_causal, mask_indptr, max_len_extend, k_scale,
                  v_scale, sm_scale=None, logit_cap=0.0, skip_prefix_custom_mask=True,
                  sliding_window_size=-1, sinks=None, lse_extend=None):  # type: ignore[no-untyped-def] # fmt: skip
    """Queries attend slots of the pool first, then the rows of their own chunk."""
    assert k_extend.is_contiguous() and v_extend.is_contiguous()
    for b in range(len(qo_indptr) - 1):
        rows = slice(int(qo_indptr[b]), int(qo_indptr[b + 1]))
        n = rows.stop - rows.start
        assert n <= max_len_extend
        slots = kv_indices[kv_indptr[b] : kv_indptr[b + 1]]
        k = torch.cat([k_buffer[slots] * k_scale, k_extend[rows]])
        v = torch.cat([v_buffer[slots] * v_scale, v_extend[rows]])
        mask = None
        if custom_mask is not None:
            assert not skip_prefix_custom_mask
            start = int(mask_indptr[b])
            mask = custom_mask[start : start + n * len(k)].view(n, len(k)) != 0
        width = sliding_window_size if sliding_window_size > 0 else None
        window = None if width is None else (width, 0 if is_causal else width)
        causal = bool(is_causal) and mask is None
        call = {"causal": causal, "window": window, "softcap": logit_cap, "mask": mask}
        o, lse = _state(q_extend[rows], k, v, scale=sm_scale, sinks=sinks, **call)
        o_extend[rows], lse_extend[rows] = o.to(o_extend.dtype), lse.float()


def vllm_unified(*, q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k,
                 softmax_scale, causal, window_size, block_table, softcap, q_descale, k_descale,
                 v_descale, seq_threshold_3D, num_par_softmax_segments, softmax_segm_output,
                 softmax_segm_max, softmax_segm_expsum, alibi_slopes, sinks, kv_quant_mode):  # type: ignore[no-untyped-def] # fmt: skip
    """Maxima and sums are left in scratch, as if every sequence had been split."""
    assert softmax_segm_max.shape[2] == num_par_softmax_segments and q_descale is None
    for b in range(len(seqused_k)):
        rows = slice(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
        assert rows.stop - rows.start <= max_seqlen_q and seqused_k[b] <= max_seqlen_k
        keys, values = (_pages(x, block_table[b], int(seqused_k[b])) for x in (k, v))
        left = window_size[0]
        window = None if left < 0 else (left, 0 if causal else left)
        extras = {"slopes": alibi_slopes} if alibi_slopes is not None else {}
        call = {"causal": causal, "window": window, "softcap": softcap, "sinks": sinks, **extras}
        o, lse = _state(q[rows], keys * k_descale, values * v_descale, scale=softmax_scale, **call)
        out[rows] = o.to(out.dtype)
        softmax_segm_max[rows, :, 0], softmax_segm_expsum[rows, :, 0] = lse.float(), 1.0


def vllm_decode(q, k_buffer, v_buffer, o, lse, req_to_token, b_seq_len, attn_logits, num_kv_splits,
                sm_scale, page_size=1, logit_cap=0.0, k_scale=None, v_scale=None, is_mla=False):  # type: ignore[no-untyped-def] # fmt: skip
    """One query for each sequence."""
    assert attn_logits.shape[2:] == (num_kv_splits, v_buffer.shape[-1] + 1)
    assert k_buffer.shape[1] == page_size
    for b in range(q.shape[0]):
        length = int(b_seq_len[b])
        k, v = (_pages(x, req_to_token[b], length) for x in (k_buffer, v_buffer))
        call = {"softcap": logit_cap, "scale": sm_scale}
        found = _state(q[b : b + 1], k * k_scale, v * v_scale, **call)
        o[b], lse[b] = found[0][0], found[1][0]


def _pages(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    position = torch.arange(length)
    size = cache.shape[1]
    return cache[table[position // size].long(), position % size].float()
