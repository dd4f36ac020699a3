"""Every backend that works here, and a short way to make the calls of the field cases."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from attn_backends import ATTENTION_BACKENDS
from attn_backends.backend import AttentionBackend
from attn_backends.batch import Batch
from attn_backends.errors import UnsupportedCallError
from attn_backends.output import AttentionOutput
from attn_backends.spec import AttentionSpec

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
SPLITS = {"triton": (None, 1, 2, 4, 7)}


def _loaded() -> dict[str, type[AttentionBackend]]:
    found = {}
    for name, entry in ATTENTION_BACKENDS.items():
        try:
            found[name] = entry.load()
        except Exception:  # what does not load is listed with its error elsewhere
            continue
    if "triton" not in found:
        try:
            from attn_backends.triton_native.backend import TritonBackend
        except ImportError:
            return found
        found["triton"] = TritonBackend
    return found


def _works(backend: type[AttentionBackend]) -> bool:
    missing = list(backend.dependency_reasons())
    return not missing and not list(backend.capabilities.device_reasons(DEVICE))


BACKENDS = {name: cls for name, cls in _loaded().items() if _works(cls)}


class Field:
    """A backend, and calls of it whose answers are known.

    Attributes:
        cls: The backend class.
        device: The GPU if there is one.
        num_splits: Splits asked for, where the backend has such an option; None leaves it alone.
    """

    def __init__(self, cls: type[AttentionBackend], num_splits: int | None = None) -> None:
        self.cls, self.device, self.num_splits = cls, DEVICE, num_splits
        self.name = cls.name

    @property
    def interpreted(self) -> bool:
        """Whether kernels run in an interpreter, where large inputs take too long."""
        return self.name == "triton" and self.device.type == "cpu"

    def spec(self, heads=(2, 2), dim=16, **fields: Any) -> AttentionSpec:
        """A spec in the widest dtype the backend takes, up to float32."""
        dtypes = [torch.float32, torch.float16, torch.bfloat16]
        dtype = next((d for d in dtypes if d in self.cls.capabilities.dtypes), torch.float32)
        fields = {"dtype": dtype, "causal": True, **fields}
        return AttentionSpec(num_heads=heads[0], num_kv_heads=heads[1], head_dim=dim, **fields)

    def bind(self, spec: AttentionSpec, phase: str | None = None) -> AttentionBackend:
        """The backend for a spec. A refusal is asserted to be one, and ends the test."""
        options = None
        if self.num_splits is not None:
            options = self.cls.Options(num_splits=self.num_splits)
        reasons = self.cls.unsupported_reasons(spec, phase, self.device, options)
        if not reasons:
            return self.cls(spec, device=self.device, options=options)
        with pytest.raises(UnsupportedCallError) as error:
            self.cls(spec, device=self.device, options=options)
        assert error.value.backend == self.name
        for reason in reasons:
            assert str(reason) in str(error.value)
            assert " (supported: " in str(reason)
        pytest.skip(f"refused, as asserted: {'; '.join(map(str, reasons))}")

    def ragged(self, q_lens, kv_lens, **kwargs: Any) -> Batch:
        """A ragged batch."""
        return Batch.from_lengths(q_lens, kv_lens, device=self.device, **kwargs)

    def probe(
        self, q_lens, kv_lens, spec: AttentionSpec, *, first: int = 0, **kwargs: Any
    ) -> AttentionOutput:
        """q = 0 and ``v[j] = first + j``, ragged, or paged over shuffled pages."""
        backend = self.bind(spec, "decode" if max(q_lens, default=0) <= 1 else "prefill")
        q = torch.zeros(sum(q_lens), spec.num_heads, spec.head_dim).to(spec.dtype)
        sequences = [counting(n, spec, first) for n in kv_lens]
        k = [torch.zeros(n, spec.num_kv_heads, spec.head_dim).to(spec.kv) for n in kv_lens]
        return self.run(backend, q, k, sequences, q_lens, **kwargs)

    def run(
        self, backend: AttentionBackend, q, keys, values, q_lens, *, poison=math.nan, **kwargs: Any
    ) -> AttentionOutput:
        """Run over per-sequence keys and values; ragged, or paged with poison wherever unused."""
        spec, device = backend.spec, self.device
        kv_lens = [len(k) for k in keys]
        if spec.page_size is None:
            batch = self.ragged(q_lens, kv_lens)
            cat = lambda parts, like: torch.cat(parts) if parts else like  # noqa: E731
            k = cat(keys, torch.zeros(0, spec.num_kv_heads, spec.head_dim).to(spec.kv))
            v = cat(values, torch.zeros(0, spec.num_kv_heads, spec.dv).to(spec.kv))
        else:
            k, v, table = paged(keys, values, spec, poison)
            batch = Batch.from_lengths(q_lens, kv_lens, page_table=table, device=device)
        kwargs = {n: x.to(device) if torch.is_tensor(x) else x for n, x in kwargs.items()}
        o = torch.full((len(q), spec.num_heads, spec.dv), math.nan, dtype=spec.out_dtype)
        lse = torch.full((len(q), spec.num_heads), math.nan)
        out = (o.to(device), lse.to(device))
        plan = backend.plan(batch)
        return backend.run(q.to(device), k.to(device), v.to(device), plan, out=out, **kwargs)


def counting(n: int, spec: AttentionSpec, first: int = 0) -> torch.Tensor:
    """``v[j] = first + j``: ``[n, HK, DV]``."""
    j = torch.arange(first, first + n, dtype=torch.float32)
    return j[:, None, None].repeat(1, spec.num_kv_heads, spec.dv).to(spec.kv)


def paged(keys, values, spec: AttentionSpec, poison: float, *, spare: int = 1):
    """Caches full of poison but for the keys, in shuffled pages, and the table with a junk tail."""
    size, gen = spec.page_size, torch.Generator().manual_seed(3)
    counts = [-(-len(k) // size) for k in keys]
    order = torch.randperm(sum(counts) + 3, generator=gen).tolist()
    shape = (len(order), size, spec.num_kv_heads)
    store = [torch.full((*shape, d), poison).to(spec.kv) for d in (spec.head_dim, spec.dv)]
    table = torch.full((len(keys), max(counts, default=0) + spare), 2**31 - 1, dtype=torch.int32)
    for b, rows in enumerate(zip(keys, values)):
        for n in range(counts[b]):
            table[b, n] = page = order.pop()
            for cache, x in zip(store, rows):
                part = x[n * size : (n + 1) * size]
                cache[page, : len(part)] = part
    return (*store, table)


def check(out: AttentionOutput, o, lse) -> None:
    """Compare per-token answers (all heads and lanes alike), to the rounding of the dtypes.

    ``o`` may be off by two steps of its dtype and ``lse`` by a few of float32; rows without keys
    must be exact.
    """
    o, lse = torch.tensor(o).double(), torch.tensor(lse).double()
    got, got_lse = out.o.cpu().double(), out.lse.cpu().double()
    assert out.lse.dtype == torch.float32
    assert got.shape[:2] == got_lse.shape and got.shape[0] == len(o)
    finite = ~lse.isinf()
    # A sum of n float32 numbers errs by a part of n steps, and two roundings to the output follow.
    keys = torch.where(finite, lse.exp(), 0.0)[:, None, None]
    step = 2 * torch.finfo(out.o.dtype).eps + 2**-24 * (16 + keys / 4)
    want = o[:, None, None].expand(got.shape)
    assert bool(((got - want).abs() <= step * want.abs()).all()), got
    want_lse = lse[:, None].expand(got_lse.shape)
    assert bool((got_lse[~finite] == want_lse[~finite]).all()), got_lse
    error = (got_lse[finite] - want_lse[finite]).abs()
    assert bool((error <= 1e-6 * want_lse[finite].abs().clamp_min(1)).all()), got_lse
    assert bool((got[~finite] == 0).all())


def ln(*counts: int) -> list[float]:
    """Logarithms; 0 gives -inf."""
    return [math.log(n) if n else -math.inf for n in counts]


@pytest.fixture(params=BACKENDS)
def field(request: pytest.FixtureRequest) -> Field:
    """Each backend that works here."""
    return Field(BACKENDS[request.param])


SPLIT_PAIRS = [(name, n) for name in BACKENDS for n in SPLITS.get(name, (None,))]


@pytest.fixture(params=SPLIT_PAIRS, ids=lambda p: f"{p[0]}-splits{p[1] or ''}")
def split_field(request: pytest.FixtureRequest) -> Field:
    """Each backend, with each number of splits that it can be told to use."""
    name, splits = request.param
    return Field(BACKENDS[name], splits)
