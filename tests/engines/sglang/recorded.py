"""The parts of SGLang that the plug touches, as recorded from the version named here.

``test_standin.py`` holds the stand-in of ordinary test runs to this record, and
``test_contract.py`` holds the record to an installed SGLang.
"""

from __future__ import annotations

#: Where the record was taken.
SGLANG = "0.5.23"

_BASE = "sglang.srt.layers.attention.base_attn_backend:AttentionBackend"
_POOL = "sglang.srt.mem_cache.memory_pool"
_WINDOWS = "sglang.srt.mem_cache.swa_memory_pool:SWAKVPool"

#: Parameters that the plug or its tests pass, in order; the original may have more after them.
PARAMETERS: dict[str, tuple[str, ...]] = {
    "sglang.srt.layers.attention.attention_registry:register_attention_backend": ("name",),
    f"{_BASE}.init_forward_metadata": ("self", "forward_batch"),
    f"{_BASE}.init_forward_metadata_out_graph": ("self", "forward_batch", "in_capture"),
    f"{_BASE}.init_forward_metadata_in_graph": ("self", "forward_batch"),
    f"{_BASE}.init_cuda_graph_state": ("self", "max_bs", "max_num_tokens"),
    f"{_BASE}.get_cuda_graph_seq_len_fill_value": ("self",),
    f"{_BASE}.forward": ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
    f"{_BASE}.forward_decode": ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
    f"{_BASE}.forward_extend": ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
    "sglang.srt.layers.radix_attention:RadixAttention.__init__": (
        "self",
        "num_heads",
        "head_dim",
        "scaling",
        "num_kv_heads",
        "layer_id",
        "logit_cap",
        "v_head_dim",
        "sliding_window_size",
        "is_cross_attention",
        "pos_encoding_mode",
        "logit_capping_method",
        "quant_config",
        "attn_type",
        "use_irope",
    ),
    f"{_POOL}:ReqToTokenPool.__init__": (
        "self",
        "size",
        "max_context_len",
        "device",
        "enable_memory_saver",
    ),
    f"{_POOL}:MHATokenToKVPool.__init__": (
        "self",
        "size",
        "page_size",
        "dtype",
        "head_num",
        "head_dim",
        "layer_num",
        "device",
        "enable_memory_saver",
        "v_head_dim",
    ),
    f"{_POOL}:MHATokenToKVPool.get_kv_buffer": ("self", "layer_id"),
    f"{_POOL}:MHATokenToKVPool.set_kv_buffer": (
        "self",
        "layer",
        "loc_info",
        "cache_k",
        "cache_v",
        "k_scale",
        "v_scale",
        "layer_id_override",
    ),
    f"{_WINDOWS}.__init__": (
        "self",
        "size",
        "size_swa",
        "page_size",
        "dtype",
        "head_num",
        "head_dim",
        "swa_attention_layer_ids",
        "full_attention_layer_ids",
        "device",
    ),
    f"{_WINDOWS}.get_kv_buffer": ("self", "layer_id"),
    f"{_WINDOWS}.register_mapping": ("self", "full_to_swa_index_mapping"),
    f"{_WINDOWS}.translate_loc_from_full_to_swa": ("self", "kv_indices"),
    f"{_WINDOWS}.set_kv_buffer": (
        "self",
        "layer",
        "loc_info",
        "cache_k",
        "cache_v",
        "k_scale",
        "v_scale",
    ),
    f"{_POOL}:KVWriteLoc.for_batch": ("forward_batch", "swa_loc"),
}

#: Fields of dataclasses, and names that must exist.
FIELDS: dict[str, tuple[str, ...]] = {
    "sglang.srt.model_executor.forward_batch_info:ForwardBatch": (
        "forward_mode",
        "batch_size",
        "input_ids",
        "req_pool_indices",
        "seq_lens",
        "out_cache_loc",
        "seq_lens_sum",
        "out_cache_loc_is_physical",
        "encoder_lens",
        "seq_lens_cpu",
        "multi_item_delimiter_indices",
        "spec_info",
        "extend_num_tokens",
        "extend_seq_lens",
        "extend_prefix_lens",
        "extend_prefix_lens_cpu",
        "extend_seq_lens_cpu",
    ),
    f"{_POOL}:KVWriteLoc": ("loc", "swa_loc", "full_loc", "physical"),
}
NAMES: dict[str, tuple[str, ...]] = {
    "sglang.srt.layers.attention.attention_registry": ("ATTENTION_BACKENDS",),
    "sglang.srt.arg_groups.choices": (
        "ATTENTION_BACKEND_CHOICES",
        "add_attention_backend_choices",
        "DETERMINISTIC_ATTENTION_BACKEND_CHOICES",
        "add_deterministic_attention_backend_choices",
    ),
    "sglang.srt.model_executor.forward_batch_info:ForwardBatch": ("mha_return_lse",),
    "sglang.srt.model_executor.forward_batch_info:ForwardMode": (
        "EXTEND",
        "DECODE",
        "MIXED",
        "IDLE",
        "TARGET_VERIFY",
        "DRAFT_EXTEND_V2",
        "PREBUILT",
        "SPLIT_PREFILL",
        "DLLM_EXTEND",
        "is_extend",
        "is_decode",
        "is_idle",
        "is_decode_or_idle",
        "is_target_verify",
        "is_dllm_extend",
    ),
    "sglang.srt.layers.radix_attention:AttentionType": (
        "DECODER",
        "DECODER_BIDIRECTIONAL",
        "ENCODER_ONLY",
    ),
}
#: Settings of the server that the plug looks at.
SETTINGS = (
    "speculative_algorithm",
    "dllm_algorithm",
    "dcp_size",
    "attn_cp_size",
    "enable_unified_memory",
    "enable_hisparse",
    "enable_mis",
    "enable_deterministic_inference",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
)
#: Attributes of the model runner that the plug reads; found in its source.
RUNNER = (
    "use_mla_backend",
    "model_config",
    "server_args",
    "token_to_kv_pool",
    "req_to_token_pool",
    "kv_index_translator",
    "page_size",
    "device",
    "model",
)
