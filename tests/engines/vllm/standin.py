"""A stand-in for the parts of vLLM that the plug touches, where vLLM itself is not installed.

Written from the interfaces of 0.20.0: names, signatures and defaults that the plug relies on, and
nothing else. The tests marked ``engine`` hold the same plug against the real classes.
"""

from __future__ import annotations

import enum
import sys
import types
from abc import ABC
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any, ClassVar, Generic, TypeVar

import torch

T = TypeVar("T")


class AttentionType(str, enum.Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class MultipleOf:
    def __init__(self, base: int) -> None:
        self.base = base


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionBackend(ABC):  # noqa: B024
    supported_dtypes: ClassVar[list[torch.dtype]] = []
    supported_kv_cache_dtypes: ClassVar[list[str]] = []
    forward_includes_kv_cache_update = True

    @classmethod
    def validate_configuration(
        cls, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse,
        use_mm_prefix, use_per_head_quant_scales, device_capability, attn_type,
    ):  # fmt: skip
        reasons = [] if attn_type == "decoder" else [f"attention type {attn_type} not supported"]
        combination = cls.supports_combination(
            head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse,
            device_capability,
        )  # fmt: skip
        return reasons + ([combination] if combination else [])


class AttentionImpl(ABC, Generic[T]):
    def __new__(cls, *args, **kwargs):
        self = super().__new__(cls)
        self.dcp_world_size, self.dcp_rank = 1, 0
        return self


class AttentionMetadataBuilder(ABC, Generic[T]):
    reorder_batch_threshold: int | None = None

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device

    def _init_reorder_batch_threshold(
        self, threshold=1, supports_spec_as_decode=False, supports_dcp_with_varlen=False
    ):
        self.reorder_batch_threshold = threshold
        speculative = self.vllm_config.speculative_config
        if speculative is not None and supports_spec_as_decode:
            self.reorder_batch_threshold = 1 + speculative.num_speculative_tokens


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool = True
    seq_lens_cpu_upper_bound: torch.Tensor | None = None


class AttentionBackendEnum(enum.Enum):
    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    CUSTOM = None

    def get_path(self):
        path = OVERRIDES.get(self, self.value)
        if not path:
            raise ValueError(f"Backend {self.name} must be registered before use")
        return path


OVERRIDES: dict[AttentionBackendEnum, str] = {}


def register_backend(backend, class_path):
    OVERRIDES[backend] = class_path


def get_dcp_local_seq_lens(seq_lens, dcp_size=1, dcp_rank=None, interleave=1):
    whole = seq_lens // (interleave * dcp_size) * interleave
    rest = seq_lens - whole * dcp_size - dcp_rank * interleave
    return (whole + rest.clamp(0, interleave)).to(torch.int32)


class _Logger:
    def info_once(self, message: str, *args: Any) -> None:
        _ = message % args


def _module(name: str, **members: Any) -> None:
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.__dict__.update(members)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


def install() -> None:
    """Put the stand-in where ``import vllm`` finds it."""
    here = globals()
    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
        _module(name, __path__=[])
    for name in ("vllm.distributed", "vllm.v1.attention.ops"):
        _module(name, __path__=[])
    _module("vllm.envs", VLLM_BATCH_INVARIANT=False)
    _module("vllm.config", get_current_vllm_config=lambda: SimpleNamespace())
    _module("vllm.logger", init_logger=lambda name: _Logger())
    _module("vllm.distributed.parallel_state", get_dcp_group=None)
    _module("vllm.v1.attention.ops.common", cp_lse_ag_out_rs=None)
    names = ("AttentionBackend", "AttentionCGSupport", "AttentionImpl", "AttentionType")
    names += ("AttentionMetadataBuilder", "CommonAttentionMetadata", "MultipleOf")
    _module("vllm.v1.attention.backend", **{name: here[name] for name in names})
    names = ("AttentionBackendEnum", "register_backend")
    members = {name: here[name] for name in names}
    _module("vllm.v1.attention.backends.registry", **members, _ATTN_OVERRIDES=OVERRIDES)
    utils = {"get_dcp_local_seq_lens": get_dcp_local_seq_lens, "get_kv_cache_layout": lambda: "NHD"}
    _module("vllm.v1.attention.backends.utils", **utils)
