"""What attention must move and compute, and the time a GPU needs for it at best.

Counted per layer, for one sequence of T queries and T keys, b bytes an element::

    S            [H, T, T]: the score matrix, h T^2 b bytes, whatever the head dim
    textbook     three kernels (Q K^T, softmax, P V): Q, K, V, O once, and S/P four times
                 (write S, read S, write P, read P)
    fused        Q, K, V, O once: the compulsory traffic, S never leaves the chip
    FLOP         2 h D per score and 2 h DV per weighted value: 4 h T^2 d when D = DV = d
    decode       one query reads all keys and values; Q and O are left out as negligible

A time is a floor: the larger of bytes over bandwidth and FLOP over peak. The ridge,
peak / bandwidth, is the intensity (FLOP/byte) at which both are equal. Nothing here is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import InvalidInputError

#: Bytes of one element.
DTYPE_BYTES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


@dataclass(frozen=True)
class ModelShape:
    """Attention shapes of a model.

    Attributes:
        name: What the tables call it.
        num_heads: H, query heads.
        num_kv_heads: HK, key and value heads.
        head_dim: D, width of queries and keys.
        num_layers: Layers, all alike.
        head_dim_v: DV, width of values; None means D.
        v_in_k: Values are the first DV lanes of the keys (MLA) and cost no bytes of their own.
        note: What the account leaves out for this model.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    head_dim_v: int | None = None
    v_in_k: bool = False
    note: str = ""

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim", "num_layers", "head_dim_v"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidInputError.of(name, value, "an int >= 1")
        if self.num_heads % self.num_kv_heads:
            allowed = f"a divisor of num_heads={self.num_heads}"
            raise InvalidInputError.of("num_kv_heads", self.num_kv_heads, allowed)

    @property
    def dv(self) -> int:
        """``head_dim_v`` with its default filled in."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def kv_width(self) -> int:
        """Elements of keys and values together, per token, over all KV heads."""
        return self.num_kv_heads * (self.head_dim + (0 if self.v_in_k else self.dv))


@dataclass(frozen=True)
class Gpu:
    """Peak rates of a GPU, as its vendor states them.

    Attributes:
        name: What the tables call it.
        bandwidth_tbs: Device memory bandwidth in TB/s (10^12 bytes).
        tflops: Dense TFLOP/s (10^12) by dtype, tensor cores without sparsity; fp32 on CUDA cores.
        source: Where the figures come from.
    """

    name: str
    bandwidth_tbs: float
    tflops: Mapping[str, float]
    source: str

    def peak(self, dtype: str) -> float:
        """FLOP/s for ``dtype``."""
        if dtype not in self.tflops:
            allowed = ", ".join(self.tflops)
            raise InvalidInputError.of(
                f"dtype (on {self.name})", dtype, allowed, "give the TFLOP/s"
            )
        return self.tflops[dtype] * 1e12


_LOCAL = "every second layer has a window; counted here as full"
_MOSTLY_LOCAL = "five of six layers have a window; counted here as full"
MODELS = {
    m.name: m
    for m in (
        ModelShape("llama3-8b", 32, 8, 128, 32),
        ModelShape("llama3-70b", 64, 8, 128, 80),
        ModelShape("qwen2.5-7b", 28, 4, 128, 28),
        ModelShape("qwen3-32b", 64, 8, 128, 64),
        ModelShape(
            "mistral-7b", 32, 8, 128, 32, note="window of v0.1 not counted; later have none"
        ),
        ModelShape("gemma2-9b", 16, 8, 256, 42, note=_LOCAL),
        ModelShape("gemma3-12b", 16, 8, 256, 48, note=_MOSTLY_LOCAL),
        ModelShape("gpt-oss-120b", 64, 8, 64, 36, note=_LOCAL),
        ModelShape("smollm2-135m", 9, 3, 64, 30),
        ModelShape(
            "deepseek-v3-mla", 128, 1, 576, 61, head_dim_v=512, v_in_k=True, note="absorbed form"
        ),
        ModelShape("deepseek-v3-mha", 128, 128, 192, 61, head_dim_v=128, note="expanded form"),
    )
}

_HOPPER = {"fp64": 66.9, "fp32": 66.9, "fp16": 989.4, "bf16": 989.4, "fp8": 1978.9}
_ADA = "NVIDIA Ada architecture white paper, fp32 accumulation"
GPUS = {
    g.name: g
    for g in (
        Gpu("h100", 3.35, _HOPPER, "NVIDIA H100 architecture white paper, SXM5 80 GB"),
        Gpu("h200", 4.8, _HOPPER, "NVIDIA H200 data sheet, SXM 141 GB; rates as H100 SXM5"),
        Gpu(
            "a100",
            2.039,
            {"fp64": 19.5, "fp32": 19.5, "fp16": 312.0, "bf16": 312.0},
            "NVIDIA A100 data sheet, SXM4 80 GB",
        ),
        Gpu(
            "b200",
            8.0,
            {"fp64": 40.0, "fp32": 80.0, "fp16": 2250.0, "bf16": 2250.0, "fp8": 4500.0},
            "NVIDIA Blackwell architecture technical brief, HGX B200 at 1000 W",
        ),
        Gpu(
            "l4",
            0.3,
            {"fp32": 30.3, "fp16": 121.0, "bf16": 121.0, "fp8": 242.5},
            "NVIDIA L4 data sheet; its sparse tensor rates halved",
        ),
        Gpu(
            "rtx4090",
            1.008,
            {"fp32": 82.6, "fp16": 165.2, "bf16": 165.2, "fp8": 330.3},
            _ADA,
        ),
    )
}


#: Names that CUDA gives to the GPUs of the table; other forms of them have other rates.
_CUDA_NAMES = {
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA B200": "b200",
    "NVIDIA L4": "l4",
    "NVIDIA GeForce RTX 4090": "rtx4090",
}


def find_gpu(name: str) -> Gpu | None:
    """The GPU that CUDA calls ``name``; None if its rates are not known."""
    return GPUS.get(_CUDA_NAMES.get(name, ""))


@dataclass(frozen=True)
class Pass:
    """Traffic, work and best time of one way to compute attention.

    Attributes:
        bytes_per_layer: Traffic to and from device memory.
        flop_per_layer: Floating point operations.
        flop_per_byte: Intensity, their ratio.
        memory_ms_per_layer: Traffic over bandwidth.
        compute_ms_per_layer: Work over peak.
        floor_ms_per_layer: The larger of the two.
        floor_ms_model: The same for all layers.
        bound: Which of them it is, ``"memory"`` or ``"compute"``.
    """

    bytes_per_layer: int
    flop_per_layer: int
    flop_per_byte: float
    memory_ms_per_layer: float
    compute_ms_per_layer: float
    floor_ms_per_layer: float
    floor_ms_model: float
    bound: str

    @classmethod
    def of(cls, bytes_: int, flop: int, layers: int, bandwidth: float, peak: float) -> Pass:
        """Fill in times from bytes, FLOP, bandwidth in byte/s and peak in FLOP/s."""
        memory, compute = bytes_ / bandwidth * 1e3, flop / peak * 1e3
        floor = max(memory, compute)
        bound = "memory" if memory >= compute else "compute"
        return cls(bytes_, flop, flop / bytes_, memory, compute, floor, floor * layers, bound)


@dataclass(frozen=True)
class Merge:
    """Cost of merging two states of one head and token: two (O, LSE) in, one O out."""

    bytes_per_token_head: int
    flop_per_token_head: int
    flop_per_byte: float


@dataclass(frozen=True)
class Roofline:
    """The account of one model, length, dtype and GPU; see the module's text for what is counted.

    Attributes:
        score_bytes_per_layer: Size of S, written once.
        ridge_flop_per_byte: Peak over bandwidth.
        textbook: Prefill in three kernels, S in memory.
        fused: Prefill with compulsory traffic only.
        intensity_ratio: Intensity of fused over textbook.
        decode: One new token of one sequence with ``length`` keys.
        merge: Merging two states.
    """

    model: ModelShape
    length: int
    dtype: str
    causal: bool
    gpu: str
    gpu_source: str
    bandwidth_tbs: float
    tflops: float
    score_bytes_per_layer: int
    ridge_flop_per_byte: float
    textbook: Pass
    fused: Pass
    intensity_ratio: float
    decode: Pass
    merge: Merge

    def to_dict(self) -> dict[str, Any]:
        """Plain data, units in the names."""
        return asdict(self)


def roofline(
    model: ModelShape, length: int, dtype: str, gpu: Gpu, *, causal: bool = False
) -> Roofline:
    """Account for attention over one sequence.

    Args:
        model: Shapes of the layers.
        length: T, queries and keys of a prefill, or keys of a decode step.
        dtype: One of ``DTYPE_BYTES``; S and P of the textbook form have it too.
        gpu: Peak rates.
        causal: Count only the visible T (T + 1) / 2 scores as work. The textbook form still
            moves all of S.

    Returns:
        Bytes, FLOP, intensities and floors.

    Raises:
        InvalidInputError: The length or dtype is out of range, or the GPU has no rate for it.
    """
    if length < 1:
        raise InvalidInputError.of("length", length, "an int >= 1")
    if dtype not in DTYPE_BYTES:
        raise InvalidInputError.of("dtype", dtype, ", ".join(DTYPE_BYTES))
    size, heads, dims = DTYPE_BYTES[dtype], model.num_heads, model.head_dim + model.dv
    bandwidth, peak = gpu.bandwidth_tbs * 1e12, gpu.peak(dtype)
    scores = length * (length + 1) // 2 if causal else length * length
    flop = 2 * heads * scores * dims
    score_bytes = heads * length * length * size
    compulsory = length * (heads * dims + model.kv_width) * size
    rates = (model.num_layers, bandwidth, peak)
    textbook = Pass.of(compulsory + 4 * score_bytes, flop, *rates)
    fused = Pass.of(compulsory, flop, *rates)
    decode = Pass.of(length * model.kv_width * size, 2 * heads * length * dims, *rates)
    return Roofline(
        model=model,
        length=length,
        dtype=dtype,
        causal=causal,
        gpu=gpu.name,
        gpu_source=gpu.source,
        bandwidth_tbs=gpu.bandwidth_tbs,
        tflops=peak / 1e12,
        score_bytes_per_layer=score_bytes,
        ridge_flop_per_byte=peak / bandwidth,
        textbook=textbook,
        fused=fused,
        intensity_ratio=fused.flop_per_byte / textbook.flop_per_byte,
        decode=decode,
        merge=_merge(model.dv, size),
    )


def _merge(dv: int, size: int) -> Merge:
    # Per lane two products and a sum; per row maximum, two differences, a sum, two divisions.
    bytes_, flop = 3 * dv * size + 2 * 4, 3 * dv + 6
    return Merge(bytes_, flop, flop / bytes_)


__all__ = [
    "DTYPE_BYTES",
    "GPUS",
    "MODELS",
    "Gpu",
    "Merge",
    "ModelShape",
    "Pass",
    "Roofline",
    "find_gpu",
    "roofline",
]
