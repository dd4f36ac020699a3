"""What arrives beside the tensors of an attention call, and what of it is refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ...errors import Reason, UnsupportedCallError

#: Arguments that models pass along and that do not change what attention computes.
IGNORED = frozenset(
    {
        "cache_position",
        "deterministic",
        "labels",
        "logits_indices",
        "logits_processor_args",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "seq_idx",
        "use_cache",
    }
)

#: Arguments that the plug reads itself.
PACKED = frozenset(
    {
        "attn_backends_pages",
        "block_table",
        "cache",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "k_cache",
        "max_length_k",
        "max_length_q",
        "max_seqlen_k",
        "max_seqlen_q",
        "read_index",
        "v_cache",
        "write_index",
    }
)

_FIXES = {
    "head_mask": "use attn_implementation='eager' to mask heads",
    "output_attentions": "weights are never formed; use attn_implementation='eager'",
    "position_bias": "scores take no additive bias; use attn_implementation='sdpa'",
}


def argument_reasons(
    dropout: float,
    tensors: Iterable[torch.Tensor],
    kwargs: dict[str, Any],
    ignore: frozenset[str],
) -> list[Reason]:
    """Reasons against a call, from everything but its shapes.

    Args:
        dropout: Probability of dropping a weight.
        tensors: Query, key and value.
        kwargs: What the attention function does not name.
        ignore: Further names that the user declared harmless.
    """
    reasons = []
    if dropout:
        reasons.append(Reason("dropout", str(dropout), "0.0", "call model.eval()"))
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        fix = "forward only: call under torch.no_grad(), or train with attn_implementation='sdpa'"
        reasons.append(Reason("requires_grad", "True", "False", fix))
    for name, value in kwargs.items():
        if value is None or name in IGNORED or name in PACKED or name in ignore:
            continue
        if name == "output_attentions" and value is False:
            continue
        fix = _FIXES.get(name, f"if it changes nothing, enable(ignore=({name!r},)) says so")
        want = "False" if isinstance(value, bool) and name in _FIXES else "None"
        reasons.append(Reason(name, _show(value), want, fix))
    return reasons


def _show(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"Tensor{list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 40 else type(value).__name__


def refusal(name: str, *reasons: Reason) -> UnsupportedCallError:
    """The error of a call that ``attn_implementation=name`` cannot do."""
    text = f"attn_implementation={name!r} cannot do this call: {'; '.join(map(str, reasons))}"
    return UnsupportedCallError(text, backend=name, reasons=reasons)


__all__ = ["IGNORED", "PACKED", "argument_reasons", "refusal"]
