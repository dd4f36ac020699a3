"""A small stand-in for SGLang, for machines where it is not installed.

It has the classes that the plug touches, with the signatures in ``recorded.py`` and the behavior
that SGLang documents or shows, written anew: pools that write at slots and divide what they are
about to convert in place, a table of slots, modes, and the base class that sends a call to
``forward_extend`` or ``forward_decode``. It has no scheduler, no models and no kernels.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from types import ModuleType
from typing import Any

import torch

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class ForwardMode(IntEnum):
    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()
    TARGET_VERIFY = auto()
    DRAFT_EXTEND_V2 = auto()
    PREBUILT = auto()
    SPLIT_PREFILL = auto()
    DLLM_EXTEND = auto()

    def is_extend(self, include_draft_extend_v2: bool = False) -> bool:
        names = ["EXTEND", "MIXED", "TARGET_VERIFY", "SPLIT_PREFILL", "DLLM_EXTEND"]
        return self.name in names + ["DRAFT_EXTEND_V2"] * include_draft_extend_v2

    def is_decode(self) -> bool:
        return self.name == "DECODE"

    def is_idle(self) -> bool:
        return self.name == "IDLE"

    def is_decode_or_idle(self) -> bool:
        return self.is_decode() or self.is_idle()

    def is_target_verify(self) -> bool:
        return self.name == "TARGET_VERIFY"

    def is_dllm_extend(self) -> bool:
        return self.name == "DLLM_EXTEND"


@dataclass
class ForwardBatch:
    forward_mode: ForwardMode
    batch_size: int
    input_ids: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    out_cache_loc: torch.Tensor
    seq_lens_sum: int
    out_cache_loc_is_physical: bool = False
    encoder_lens: torch.Tensor | None = None
    seq_lens_cpu: torch.Tensor | None = None
    multi_item_delimiter_indices: list[torch.Tensor] | None = None
    spec_info: Any = None
    extend_num_tokens: int | None = None
    extend_seq_lens: torch.Tensor | None = None
    extend_prefix_lens: torch.Tensor | None = None
    extend_prefix_lens_cpu: list[int] | None = None
    extend_seq_lens_cpu: list[int] | None = None
    mha_return_lse = None


class AttentionType(Enum):
    DECODER = "decoder"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"
    ENCODER_ONLY = "encoder_only"


class RadixAttention(torch.nn.Module):
    def __init__(
        self,
        num_heads,
        head_dim,
        scaling,
        num_kv_heads,
        layer_id,
        logit_cap=0.0,
        v_head_dim=-1,
        sliding_window_size=-1,
        is_cross_attention=False,
        pos_encoding_mode="NONE",
        logit_capping_method="tanh",
        quant_config=None,
        attn_type=AttentionType.DECODER,
        use_irope=False,
    ):
        super().__init__()
        self.tp_q_head_num = num_heads
        self.tp_k_head_num = self.tp_v_head_num = num_kv_heads
        self.head_dim = self.qk_head_dim = head_dim
        self.v_head_dim = head_dim if v_head_dim == -1 else v_head_dim
        self.scaling, self.layer_id, self.logit_cap = scaling, layer_id, logit_cap
        self.sliding_window_size = sliding_window_size or -1
        self.is_cross_attention, self.attn_type = is_cross_attention, attn_type
        self.pos_encoding_mode = pos_encoding_mode
        self.logit_capping_method, self.use_irope = logit_capping_method, use_irope
        self.k_scale = self.v_scale = None
        self.xai_temperature_len = -1


class AttentionBackend:
    def init_forward_metadata(self, forward_batch):
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        pass

    def init_forward_metadata_in_graph(self, forward_batch):
        pass

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        raise NotImplementedError

    def get_cuda_graph_seq_len_fill_value(self):
        raise NotImplementedError

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        run = self.forward_decode if mode.is_decode() else self.forward_extend
        return run(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        raise NotImplementedError

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        raise NotImplementedError


@dataclass
class KVWriteLoc:
    loc: torch.Tensor
    swa_loc: torch.Tensor | None = None
    full_loc: torch.Tensor | None = None
    physical: bool = False

    @classmethod
    def for_batch(cls, forward_batch, *, swa_loc=None, full_loc=None):
        physical = forward_batch.out_cache_loc_is_physical
        return cls(forward_batch.out_cache_loc, swa_loc, full_loc, physical)

    def __post_init__(self):
        if self.swa_loc is not None:
            self.swa_loc = self.swa_loc[: self.loc.shape[0]]


class ReqToTokenPool:
    def __init__(self, size, max_context_len, device, enable_memory_saver):
        self.size, self.max_context_len = size, max_context_len
        shape = (size + 1, max_context_len)  # row 0 is for padding
        self.req_to_token = torch.zeros(shape, dtype=torch.int32, device=device)


class MHATokenToKVPool:
    kv_cache_layout = "nhd"

    def __init__(
        self,
        size,
        page_size,
        dtype,
        head_num,
        head_dim,
        layer_num,
        device,
        enable_memory_saver,
        v_head_dim=None,
    ):
        self.size, self.page_size, self.dtype = size, page_size, dtype
        # Indexed writes of float8 tensors do not exist; bytes are stored instead.
        self.store_dtype = torch.uint8 if dtype in FP8 else dtype
        widths = (head_dim, head_dim if v_head_dim is None else v_head_dim)

        def buffers(width):
            shape = (size + page_size, head_num, width)  # page 0 is for padding
            made = [torch.zeros(shape, dtype=self.store_dtype, device=device)]
            return made + [torch.zeros_like(made[0]) for _ in range(layer_num - 1)]

        self.k_buffer, self.v_buffer = buffers(widths[0]), buffers(widths[1])

    def get_kv_buffer(self, layer_id):
        pair = self.k_buffer[layer_id], self.v_buffer[layer_id]
        return tuple(x.view(self.dtype) for x in pair)

    def set_kv_buffer(
        self,
        layer,
        loc_info,
        cache_k,
        cache_v,
        k_scale=None,
        v_scale=None,
        layer_id_override=None,
    ):
        loc = loc_info.loc if isinstance(loc_info, KVWriteLoc) else loc_info
        index = layer.layer_id if layer_id_override is None else layer_id_override
        for buffer, x, scale in (
            (self.k_buffer[index], cache_k, k_scale),
            (self.v_buffer[index], cache_v, v_scale),
        ):
            if x.dtype != self.dtype and scale is not None:
                x.div_(scale)  # in place, as the original does
            buffer[loc] = x.to(self.dtype).view(self.store_dtype)


class SWAKVPool:
    def __init__(
        self,
        size,
        size_swa,
        page_size,
        dtype,
        head_num,
        head_dim,
        swa_attention_layer_ids,
        full_attention_layer_ids,
        device,
        enable_memory_saver=False,
        **kwargs,
    ):
        def pool(rows, ids):
            return MHATokenToKVPool(
                rows, page_size, dtype, head_num, head_dim, len(ids), device, False, **kwargs
            )

        self.size, self.page_size, self.dtype = size, page_size, dtype
        self.full_kv_pool = pool(size, full_attention_layer_ids)
        self.swa_kv_pool = pool(size_swa, swa_attention_layer_ids)
        self.layers_mapping = {n: (i, False) for i, n in enumerate(full_attention_layer_ids)}
        self.layers_mapping |= {n: (i, True) for i, n in enumerate(swa_attention_layer_ids)}
        self.full_to_swa_index_mapping = None

    def register_mapping(self, full_to_swa_index_mapping):
        self.full_to_swa_index_mapping = full_to_swa_index_mapping

    def translate_loc_from_full_to_swa(self, kv_indices):
        return self.full_to_swa_index_mapping[kv_indices]

    def get_kv_buffer(self, layer_id):
        index, windowed = self.layers_mapping[layer_id]
        return (self.swa_kv_pool if windowed else self.full_kv_pool).get_kv_buffer(index)

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, k_scale=1.0, v_scale=1.0):
        index, windowed = self.layers_mapping[layer.layer_id]
        pool = self.swa_kv_pool if windowed else self.full_kv_pool
        loc = loc_info.loc
        if windowed:
            assert loc_info.swa_loc is not None
            loc = loc_info.swa_loc
        pool.set_kv_buffer(None, loc, cache_k, cache_v, k_scale, v_scale, layer_id_override=index)


def modules() -> dict[str, ModuleType]:
    """The stand-in as modules, by the names that they have in SGLang."""
    table: dict[str, Any] = {}

    def register_attention_backend(name):
        def keep(factory):
            table[name] = factory
            return factory

        return keep

    names = ["triton", "torch_native", "flashinfer", "fa3"]
    deterministic = ["flashinfer", "fa3", "triton"]
    contents: dict[str, dict[str, Any]] = {
        "sglang.srt.layers.attention.attention_registry": {
            "ATTENTION_BACKENDS": table,
            "register_attention_backend": register_attention_backend,
        },
        "sglang.srt.arg_groups.choices": {
            "ATTENTION_BACKEND_CHOICES": names,
            "add_attention_backend_choices": names.extend,
            "DETERMINISTIC_ATTENTION_BACKEND_CHOICES": deterministic,
            "add_deterministic_attention_backend_choices": deterministic.extend,
        },
        "sglang.srt.layers.attention.base_attn_backend": {"AttentionBackend": AttentionBackend},
        "sglang.srt.layers.radix_attention": {
            "RadixAttention": RadixAttention,
            "AttentionType": AttentionType,
        },
        "sglang.srt.mem_cache.memory_pool": {
            "KVWriteLoc": KVWriteLoc,
            "MHATokenToKVPool": MHATokenToKVPool,
            "ReqToTokenPool": ReqToTokenPool,
        },
        "sglang.srt.mem_cache.swa_memory_pool": {"SWAKVPool": SWAKVPool},
        "sglang.srt.model_executor.forward_batch_info": {
            "ForwardBatch": ForwardBatch,
            "ForwardMode": ForwardMode,
        },
    }
    made: dict[str, ModuleType] = {}
    for path, content in contents.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in made:
                made[name] = ModuleType(name)
                made[name].__path__ = []
                if end > 1:
                    setattr(made[".".join(parts[: end - 1])], parts[end - 1], made[name])
        vars(made[path]).update(content)
    return made


def install() -> list[str]:
    """Put the stand-in where imports of SGLang find it; returns the names to take out again."""
    made = modules()
    sys.modules.update(made)
    return list(made)
