"""The points that attention is measured at, and their inputs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ..batch import Batch
from ..errors import InvalidInputError
from ..spec import AttentionSpec
from .graph_timer import copies_for
from .presets import Preset
from .roofline import find_gpu
from .runner import Point

DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One point: equal lengths, or ``ragged`` ones drawn from 128..kv_len with a fixed seed."""

    bench: str
    batch: int
    q_len: int
    kv_len: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    head_dim_v: int = 128
    page_size: int | None = 16
    dtype: str = "bf16"
    kv_dtype: str = "bf16"
    causal: bool = True
    ragged: bool = False
    batch_invariant: bool = False

    @property
    def label(self) -> str:
        """A short name for tables."""
        name = f"{self.batch}x{self.q_len}/{self.kv_len}" if self.q_len > 1 else ""
        name = name or f"{self.batch}x{self.kv_len}"
        extra = "r" if self.ragged else ""
        return f"{name}{extra} H{self.num_heads}/{self.num_kv_heads} D{self.head_dim}"

    def lengths(self) -> tuple[list[int], list[int]]:
        """Query and key lengths per sequence."""
        kv = [self.kv_len] * self.batch
        if self.ragged:
            rng = random.Random(0)
            kv = [rng.randint(128, self.kv_len) for _ in range(self.batch)]
        return [self.q_len] * self.batch, kv

    @property
    def phase(self) -> str:
        """The phase that a backend is chosen for."""
        return "decode" if self.q_len == 1 else "prefill"

    @property
    def spec(self) -> AttentionSpec:
        """What a layer of this case fixes."""
        return AttentionSpec(
            self.num_heads, self.num_kv_heads, self.head_dim,
            head_dim_v=self.head_dim_v, dtype=DTYPES[self.dtype], kv_dtype=DTYPES[self.kv_dtype],
            page_size=self.page_size, causal=self.causal, batch_invariant=self.batch_invariant,
        )  # fmt: skip

    def row(self) -> dict[str, Any]:
        """The case as it stands in results files."""
        return {k: v for k, v in asdict(self).items() if k != "bench"}


class Inputs:
    """Random inputs of a case; on a GPU as many copies of keys and values as keep L2 cold."""

    def __init__(self, case: Case, *, seed: int = 0, device: torch.device | str = "cuda") -> None:
        torch.manual_seed(seed)
        self.device = device = torch.device(device)
        self.case = case
        self.q_lens, self.kv_lens = case.lengths()
        self.share = case.head_dim == 576
        self.spec = spec = case.spec
        size, heads = case.page_size, case.num_kv_heads
        keys = sum(self.kv_lens)
        if size is None:
            shape: tuple[int, ...] = (keys,)
            self.table = None
        else:
            width = max(-(-n // size) for n in self.kv_lens)
            pages = case.batch * width
            self.table = torch.randperm(pages, device=device).int().view(case.batch, width)
            shape = (pages, size)
        lanes = case.head_dim + (0 if self.share else case.head_dim_v)
        self.kv_bytes = keys * heads * lanes * spec.kv.itemsize
        self.copies = copies_for(self.kv_bytes) if device.type == "cuda" else 1
        tokens = sum(self.q_lens)

        def rand(*dims: int) -> torch.Tensor:
            x = torch.randn(dims, device=device, dtype=torch.bfloat16)
            return x.to(spec.kv)

        self.q = [
            torch.randn(tokens, case.num_heads, case.head_dim, device=device).to(spec.dtype)
            for _ in range(self.copies)
        ]
        self.k = [rand(*shape, heads, case.head_dim) for _ in range(self.copies)]
        self.v = [None if self.share else rand(*shape, heads, case.head_dim_v) for _ in self.k]
        self.batch = Batch.from_lengths(
            self.q_lens, self.kv_lens, page_table=self.table, device=device
        )
        out_bytes = tokens * case.num_heads * (case.head_dim_v * 2 + 4)
        self.bytes = self.kv_bytes + self.q[0].numel() * self.q[0].element_size() + out_bytes

    @property
    def flops(self) -> int:
        """Multiply-adds times two over the visible pairs, counted exactly."""
        case = self.case
        pairs = 0
        for q, kv in zip(self.q_lens, self.kv_lens):
            pairs += sum(max(0, i + 1 + kv - q) for i in range(q)) if case.causal else q * kv
        return 2 * pairs * case.num_heads * (case.head_dim + case.head_dim_v)

    def point(self) -> Point:
        """The same for the runner."""
        case = self.case
        gpu = None
        if self.device.type == "cuda":
            gpu = find_gpu(torch.cuda.get_device_name(self.device))
        return Point(
            case.bench, case.row(), case.label, self.bytes, self.flops, case.dtype, self.copies,
            self.device, gpu,
        )  # fmt: skip


def cases(bench: str, **changes: Any) -> list[Case]:
    """The points of a benchmark, with fields replaced by ``changes``."""
    if bench == "decode":
        points = [
            (1, 1024), (1, 4096), (1, 8192), (1, 131072), (8, 8192), (16, 1024), (32, 4096),
            (64, 4096), (256, 2048),
        ]  # fmt: skip
        found = [Case(bench, b, 1, n) for b, n in points]
        found.append(Case(bench, 64, 1, 8192, ragged=True))
    elif bench == "prefill":
        points = [(16, 1024), (4, 4096), (2, 8192), (1, 16384)]
        found = [Case(bench, b, n, n, page_size=None) for b, n in points]
    elif bench == "extend":
        lens = [(64, 64, 4096), (32, 128, 4096), (8, 512, 8192), (2, 2048, 32768)]
        found = [Case(bench, b, q, q + n) for b, q, n in lens]
    elif bench == "mla":
        mla = Case(bench, 1, 1, 1, 16, 1, 576, 512, 64)
        points = [(1, 4096), (1, 32768), (32, 8192), (128, 4096), (1, 65536), (8, 16384)]
        found = [replace(mla, batch=b, kv_len=n, num_heads=h) for h in (16, 128) for b, n in points]
    else:
        raise ValueError(f"bench={bench} (allowed: decode, prefill, extend, mla)")
    return [replace(c, **changes) for c in found]


#: Head geometries, dtypes and page sizes that decode is measured at beside the standard one.
SHAPES: dict[str, dict[str, Any]] = {
    "group 7": {"num_heads": 28, "num_kv_heads": 4},
    "group 8": {"num_heads": 64},
    "head dim 64": {"head_dim": 64, "head_dim_v": 64},
    "head dim 256": {"num_heads": 16, "num_kv_heads": 4, "head_dim": 256, "head_dim_v": 256},
    "page 1": {"page_size": 1},
    "page 64": {"page_size": 64},
    "fp8 keys": {"kv_dtype": "fp8"},
}


def shape_cases() -> list[Case]:
    """Decode at every shape of ``SHAPES``, point by point."""
    by_shape = [cases("decode", **changes) for changes in SHAPES.values()]
    return [case for row in zip(*by_shape) for case in row]


#: Points that a CPU gets through in seconds: (batch, query length, key length).
_SMALL = {
    "decode": [(1, 1, 64), (1, 1, 256), (4, 1, 256)],
    "prefill": [(1, 64, 64), (1, 128, 128), (2, 64, 64)],
    "extend": [(1, 16, 128), (2, 32, 256)],
    "mla": [(1, 1, 64), (2, 1, 128)],
}


def shape_of(bench: str, preset: Preset) -> dict[str, Any]:
    """The fields of a case that a preset fixes.

    Raises:
        InvalidInputError: The benchmark is of MLA, and the model has none.
    """
    if bench == "mla" and not preset.is_mla:
        fix = "measure its decode"
        raise InvalidInputError.of("preset", preset.model.name, "deepseek, for mla", fix)
    model = preset.prefill if bench == "prefill" else preset.model
    return {
        "num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim, "head_dim_v": model.dv,
        "page_size": None if bench == "prefill" else preset.page_size,
    }  # fmt: skip


def points(
    bench: str,
    shape: dict[str, Any],
    device: torch.device,
    batches: Sequence[int] = (),
    lengths: Sequence[int] = (),
    q_len: int | None = None,
) -> list[Case]:
    """The points of a command: a grid if batches or lengths are given, else the standard ones.

    Args:
        bench: ``prefill``, ``extend``, ``decode`` or ``mla``.
        shape: Fields of every case.
        device: Decides which points are standard: few and short ones on a CPU.
        batches: Numbers of sequences; empty is 1.
        lengths: Keys of a sequence; empty is 1024, or 128 on a CPU.
        q_len: Queries of a sequence in ``extend``; None is 128, or 16 on a CPU.

    Raises:
        InvalidInputError: A number is not positive, or ``q_len`` exceeds a length.
    """
    cpu = device.type != "cuda"
    given = {"batch": batches, "length": lengths, "q_len": () if q_len is None else (q_len,)}
    for name, numbers in given.items():
        if numbers and min(numbers) < 1:
            raise InvalidInputError.of(name, min(numbers), "an int >= 1")
    if q_len is not None and bench != "extend":
        raise InvalidInputError.of("q_len", q_len, f"None: {bench} decides it")
    if not batches and not lengths and q_len is None:
        if cpu:
            return [Case(bench, *numbers, **shape) for numbers in _SMALL[bench]]
        standard = cases(bench, **shape)
        return list(dict.fromkeys(standard))  # mla has each point for two numbers of heads
    new = (16 if cpu else 128) if q_len is None else q_len
    found = []
    for b in batches or (1,):
        for n in lengths or (128 if cpu else 1024,):
            q = {"decode": 1, "mla": 1, "prefill": n, "extend": new}[bench]
            if q > n:
                raise InvalidInputError.of("q_len", q, f"1..{n}, the length")
            found.append(Case(bench, b, q, n, **shape))
    return found


__all__ = ["DTYPES", "SHAPES", "Case", "Inputs", "cases", "points", "shape_cases", "shape_of"]
