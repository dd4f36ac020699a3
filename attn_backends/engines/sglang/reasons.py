"""What SGLang may ask for and the plug cannot do; every reason is found before the first token."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import Reason, UnsupportedCallError
from ...spec import FP8_DTYPES
from .registration import NAME

#: Settings of the server, with the value that asks for nothing, and what to do about the others.
_SETTINGS: tuple[tuple[str, Any, str], ...] = (
    ("speculative_algorithm", None, "SGLang keeps closed lists of draft backends"),
    ("dllm_algorithm", None, "diffusion models need attention within a canvas"),
    ("dcp_size", 1, "context parallel decode"),
    ("attn_cp_size", 1, "context parallel prefill"),
    ("enable_unified_memory", False, "slots would have to be translated in every table"),
    ("enable_hisparse", False, "the keys of a request would not all be in the pool"),
    ("enable_mis", False, "items of one request need masks of their own"),
)
_GRAPHS = ("cuda_graph_backend_prefill", "full", "breakable, disabled")

#: Kinds of pools whose layout is known.
POOLS = ("MHATokenToKVPool", "SWAKVPool")
LAYOUTS = ("nhd", "hnd")
ATTN_TYPES = ("decoder", "encoder_only")


def refusal(*reasons: Reason) -> UnsupportedCallError:
    """The error of a server or a call that the plug cannot serve."""
    text = f"--attention-backend {NAME} cannot do this: {'; '.join(map(str, reasons))}"
    return UnsupportedCallError(text, backend=NAME, reasons=reasons)


def runner_reasons(runner: Any) -> list[Reason]:
    """Reasons against a model runner, layers left aside."""
    reasons = []
    if getattr(runner, "use_mla_backend", False):
        reasons.append(Reason("attention_arch", "MLA", "MHA, GQA, MQA"))
    if getattr(runner.model_config, "is_encoder_decoder", False):
        reasons.append(Reason("is_encoder_decoder", "True", "False"))
    args = runner.server_args
    for name, neutral, why in _SETTINGS:
        value = getattr(args, name, neutral)
        if value != neutral and value is not None:
            reasons.append(Reason(name, str(value), str(neutral), why))
    name, bad, good = _GRAPHS
    backend = getattr(args, name, None)
    if str(getattr(backend, "value", backend)) == bad:
        reasons.append(Reason(name, bad, good, "prefill plans follow each step's lengths"))
    return reasons + pool_reasons(runner.token_to_kv_pool, runner.model_config.dtype)


def pool_reasons(pool: Any, dtype: torch.dtype) -> list[Reason]:
    """Reasons against a KV pool, and against its dtype beside queries of ``dtype``."""
    kind = type(pool).__name__
    if kind not in POOLS:
        return [Reason("token_to_kv_pool", kind, ", ".join(POOLS))]
    parts = [pool]
    reasons = []
    if kind == "SWAKVPool":
        parts = [pool.full_kv_pool, pool.swa_kv_pool]
        for name in ("swa_req_ring_size", "request_window"):
            if (value := getattr(pool, name, None)) is not None:
                reasons.append(Reason(name, _show(value), "None"))
    for part in parts:
        if type(part).__name__ != "MHATokenToKVPool":
            reasons.append(Reason("token_to_kv_pool", type(part).__name__, "MHATokenToKVPool"))
            continue
        if (layout := getattr(part, "kv_cache_layout", "nhd")) not in LAYOUTS:
            reasons.append(Reason("kv_cache_layout", layout, ", ".join(LAYOUTS)))
        method = getattr(getattr(part, "quant_method", None), "name", "unquantized")
        if method != "unquantized":
            reasons.append(Reason("kv_cache_dtype", str(method), "auto, fp8_e4m3"))
        elif part.dtype not in (dtype, *FP8_DTYPES):
            want = f"{dtype}, as the model, or float8"
            reasons.append(Reason("kv_cache_dtype", str(part.dtype), want))
    return list(dict.fromkeys(reasons))


def layer_reasons(layer: Any, chunked: bool) -> list[Reason]:
    """Reasons against a ``RadixAttention`` layer.

    Args:
        layer: SGLang's layer.
        chunked: Whether the model cuts attention into chunks in layers with ``use_irope``.
    """
    reasons = []
    if layer.is_cross_attention:
        reasons.append(Reason("is_cross_attention", "True", "False"))
    kind = str(getattr(layer.attn_type, "value", layer.attn_type))
    if kind not in ATTN_TYPES:
        reasons.append(Reason("attn_type", kind, ", ".join(ATTN_TYPES)))
    if layer.tp_k_head_num != layer.tp_v_head_num:
        got = f"{layer.tp_k_head_num} and {layer.tp_v_head_num}"
        reasons.append(Reason("tp_k_head_num, tp_v_head_num", got, "equal numbers"))
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        reasons.append(Reason("logit_capping_method", str(layer.logit_capping_method), "tanh"))
    if getattr(layer, "xai_temperature_len", -1) > 0:
        reasons.append(Reason("xai_temperature_len", str(layer.xai_temperature_len), "-1"))
    if (encoding := getattr(layer, "pos_encoding_mode", "NONE")) != "NONE":
        reasons.append(Reason("pos_encoding_mode", str(encoding), "NONE"))
    if chunked and getattr(layer, "use_irope", False):
        reasons.append(Reason("attention_chunk_size", "set", "None in a layer with use_irope"))
    return reasons


def call_reasons(arguments: dict[str, Any]) -> list[Reason]:
    """Reasons against a call, from the arguments that nobody here reads."""
    return [
        Reason(name, _show(value), "None")
        for name, value in arguments.items()
        if value is not None and value is not False
    ]


def batch_reasons(batch: Any) -> list[Reason]:
    """Reasons against SGLang's ``ForwardBatch``, whose kind the server's settings do not tell."""
    reasons = []
    for name in ("encoder_lens", "spec_info", "multi_item_delimiter_indices"):
        if (value := getattr(batch, name, None)) is not None:
            reasons.append(Reason(name, _show(value), "None"))
    mode = batch.forward_mode
    if mode.is_target_verify() or mode.is_dllm_extend() or not _known(mode):
        want = "EXTEND, MIXED, SPLIT_PREFILL, DECODE, IDLE"
        reasons.append(Reason("forward_mode", str(getattr(mode, "name", mode)), want))
    return reasons


def _known(mode: Any) -> bool:
    return bool(mode.is_decode_or_idle() or mode.is_extend())


def _show(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"Tensor{list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 40 else type(value).__name__


__all__ = [
    "batch_reasons",
    "call_reasons",
    "layer_reasons",
    "pool_reasons",
    "refusal",
    "runner_reasons",
]
