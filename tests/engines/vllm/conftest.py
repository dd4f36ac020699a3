"""A small engine that drives the plug as vLLM does: blocks, slots, metadata, layers."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

PAGE = 4
BLOCKS = 64
WIDTH = 12
MAX_TOKENS = 64


def has_vllm() -> bool:
    """Whether the real vLLM is installed, with the classes that backends are made of."""
    module = sys.modules.get("vllm")
    if module is not None and getattr(module, "__file__", None) is None:
        return False
    try:
        return importlib.util.find_spec("vllm.v1.attention.backend") is not None
    except ImportError:
        return False


def _standin() -> Any:
    name = "attn_backends_tests_vllm_standin"
    if name not in sys.modules:
        path = Path(__file__).with_name("standin.py")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


#: Modules of the plug that are made of vLLM's classes.
_OF_VLLM = tuple(f"attn_backends.engines.vllm.{name}" for name in ("backend", "builder", "impl"))


@pytest.fixture(scope="module", autouse=True)
def vllm_or_standin() -> Iterator[None]:
    """The real vLLM, or a stand-in that goes away with the last of a file's tests."""
    if has_vllm():
        yield
        return
    _standin().install()
    yield
    for name in list(sys.modules):
        if name.split(".")[0] == "vllm" or name in _OF_VLLM:
            del sys.modules[name]


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("engine") and not has_vllm():
            item.add_marker(pytest.mark.skip(reason="needs vLLM installed beside the library"))


@dataclass
class Layer:
    """What the plug reads of vLLM's ``Attention``."""

    impl: Any
    head_size_v: int
    kv_cache: torch.Tensor = field(default_factory=lambda: torch.tensor([]))
    _k_scale: torch.Tensor = field(default_factory=lambda: torch.tensor(1.0))
    _v_scale: torch.Tensor = field(default_factory=lambda: torch.tensor(1.0))


@dataclass
class Request:
    """Keys and values of one request, and where its blocks lie."""

    k: torch.Tensor
    v: torch.Tensor
    blocks: list[int]
    computed: int = 0


class Engine:
    """One attention layer, its paged cache, and steps over requests.

    Args:
        monkeypatch: Takes the place of vLLM's current configuration.
        generation: ``0.20`` or ``0.33``: the shape of the cache.
        dtype: Of queries.
        heads: H.
        kv_heads: HK.
        dim: D.
        speculative: Tokens that speculation adds to a decode request.
        device: Where it runs.
        layer: Further arguments of the layer.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        generation: str = "0.20",
        dtype: torch.dtype = torch.float32,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 16,
        speculative: int = 0,
        device: str = "cpu",
        **layer: Any,
    ) -> None:
        from attn_backends.engines.vllm import builder, impl

        self.generation, self.dtype, self.device = generation, dtype, torch.device(device)
        layer = {k: v.to(device) if torch.is_tensor(v) else v for k, v in layer.items()}
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        spec_config = SimpleNamespace(num_speculative_tokens=speculative, parallel_drafting=False)
        self.config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context={}),
            speculative_config=spec_config if speculative else None,
            scheduler_config=SimpleNamespace(max_num_batched_tokens=MAX_TOKENS),
            model_config=SimpleNamespace(max_model_len=WIDTH * PAGE),
            parallel_config=SimpleNamespace(
                decode_context_parallel_size=1, cp_kv_cache_interleave_size=1
            ),
            device_config=SimpleNamespace(device=device),
            use_v2_model_runner=False,
        )
        monkeypatch.setattr(impl, "get_current_vllm_config", lambda: self.config)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)  # as vLLM does while it builds a model
        try:
            self.impl = impl.Impl(heads, dim, dim**-0.5, kv_heads, **layer)
        finally:
            torch.set_default_dtype(before)
        self.layer = Layer(self.impl, dim)
        self.layer._k_scale, self.layer._v_scale = torch.ones(2, device=device).unbind()
        self.config.compilation_config.static_forward_context["layer"] = self.layer
        self.asked = layer
        self.builder_class = builder.Builder
        self.generator = torch.Generator().manual_seed(7)
        self.cache = self._cache(layer.get("kv_cache_dtype", "auto"))
        self.layer.kv_cache = self.cache
        self.requests: list[Request] = []
        self._free = list(range(1, BLOCKS))
        self._built: Any = None

    @property
    def builder(self) -> Any:
        """The builder of the layer's group, made when first asked for."""
        if self._built is None:
            kv_spec = SimpleNamespace(block_size=PAGE)
            self._built = self.builder_class(kv_spec, ["layer"], self.config, self.device)
        return self._built

    def _cache(self, name: str) -> torch.Tensor:
        dtype = torch.uint8 if name.startswith("fp8") else self.dtype
        if self.generation == "0.20":
            shape: tuple[int, ...] = (BLOCKS, 2, PAGE, self.kv_heads, self.dim)
        else:
            shape = (BLOCKS, self.kv_heads, PAGE, 2 * self.dim)
        # What no request wrote must not be read: 0x7f is NaN in float8 too.
        if dtype == torch.uint8:
            return torch.full(shape, 0x7F, dtype=dtype, device=self.device)
        return torch.full(shape, float("nan"), dtype=dtype, device=self.device)

    def random(self, *shape: int) -> torch.Tensor:
        """Normal numbers in the dtype of the layer."""
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def request(self, length: int, share: Request | None = None, shared: int = 0) -> Request:
        """A request of ``length`` tokens; its first ``shared`` blocks are another's, computed."""
        k, v = (self.random(length, self.kv_heads, self.dim) for _ in "kv")
        blocks = [] if share is None else share.blocks[:shared]
        if share is not None:
            k[: shared * PAGE], v[: shared * PAGE] = (
                x[: shared * PAGE] for x in (share.k, share.v)
            )
        blocks = blocks + [self._free.pop(0) for _ in range(-(-length // PAGE) - len(blocks))]
        made = Request(k, v, blocks, shared * PAGE)
        self.requests.append(made)
        return made

    def metadata(
        self,
        news: list[tuple[Request, int]],
        *,
        num_reqs: int | None = None,
        rows: int | None = None,
    ) -> Any:
        """vLLM's metadata of a step that computes ``n`` more tokens of each request."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        lens = [n for _, n in news]
        keys = [request.computed + n for request, n in news]
        num_reqs = len(news) if num_reqs is None else num_reqs
        pad = num_reqs - len(news)
        starts = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()] + [sum(lens)] * pad)
        table = torch.zeros(num_reqs, WIDTH, dtype=torch.int32)
        slots = []
        for i, (request, n) in enumerate(news):
            table[i, : len(request.blocks)] = torch.tensor(request.blocks)
            for at in range(request.computed, request.computed + n):
                slots.append(request.blocks[at // PAGE] * PAGE + at % PAGE)
        rows = sum(lens) if rows is None else rows
        slots += [-1] * (rows - len(slots))
        seq_lens = torch.tensor(keys + [0] * pad, dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts.to(self.device, torch.int32),
            query_start_loc_cpu=starts.to(torch.int32),
            seq_lens=seq_lens.to(self.device),
            num_reqs=num_reqs,
            num_actual_tokens=rows,
            max_query_len=max(lens),
            max_seq_len=max(keys),
            block_table_tensor=table.to(self.device),
            slot_mapping=torch.tensor(slots, device=self.device),
            seq_lens_cpu_upper_bound=seq_lens.clone(),
        )

    def inputs(
        self, news: list[tuple[Request, int]], rows: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of a step, with random rows behind."""
        q = self.random(rows, self.heads, self.dim)
        k, v = (self.random(rows, self.kv_heads, self.dim) for _ in "kv")
        at = 0
        for request, n in news:
            new = slice(request.computed, request.computed + n)
            k[at : at + n], v[at : at + n] = request.k[new], request.v[new]
            at += n
        return q, k, v

    def step(
        self,
        news: list[tuple[Request, int]],
        *,
        metadata: Any = None,
        padding: int = 0,
        build: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer over a step; returns its output and what it should be."""
        common = self.metadata(news) if metadata is None else metadata
        tokens = sum(n for _, n in news)
        q, k, v = self.inputs(news, common.num_actual_tokens + padding)
        self.impl.do_kv_cache_update(self.layer, k, v, self.cache, common.slot_mapping)
        step = self.builder.build(0, common) if build is None else build(common)
        out = torch.full_like(q, float("nan"))
        with torch.no_grad():
            self.impl.forward(self.layer, q, k, v, self.cache, step, out)
        want = self.expected(q[:tokens], news)
        for request, n in news:
            request.computed += n
        return out, want

    def expected(self, q: torch.Tensor, news: list[tuple[Request, int]]) -> torch.Tensor:
        """Attention written out, in float64, over what the requests hold."""
        outs, at = [], 0
        for request, n in news:
            keys = request.computed + n
            outs.append(self._one(q[at : at + n].double(), request, keys))
            at += n
        return torch.cat(outs)

    def _one(self, q: torch.Tensor, request: Request, keys: int) -> torch.Tensor:
        group = self.heads // self.kv_heads
        k, v = request.k[:keys], request.v[:keys]
        if self.asked.get("kv_cache_dtype", "auto") != "auto":
            k, v = (
                (x.float() / s).to(torch.float8_e4m3fn).double() * s.double()
                for x, s in ((k, self.layer._k_scale), (v, self.layer._v_scale))
            )
        k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.dim**-0.5
        if cap := self.asked.get("logits_soft_cap"):
            scores = cap * torch.tanh(scores / cap)
        i = torch.arange(keys - len(q), keys, device=q.device)[:, None]
        j = torch.arange(keys, device=q.device)[None]
        if slopes := self.asked.get("alibi_slopes"):
            scores = (
                scores
                - torch.tensor(slopes, device=q.device).double()[:, None, None] * (i - j).abs()
            )
        hidden = j > i
        if width := self.asked.get("sliding_window"):
            hidden = hidden | (j <= i - width)  # W tokens, the query's own included
        scores = scores.masked_fill(hidden, float("-inf"))
        sinks = self.asked.get("sinks")
        if sinks is not None:
            column = sinks.double()[:, None, None].expand(-1, len(q), 1)
            weights = torch.cat((scores, column), 2).softmax(2)[..., :-1]
        else:
            weights = scores.softmax(2)
        return torch.einsum("hqk,khd->qhd", weights, v)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes engines, with the backends that the settings name."""

    def make(backend: str = "torch_native", decode: str | None = None, **kwargs: Any) -> Engine:
        monkeypatch.setenv("ATTN_BACKENDS_PREFILL", backend)
        monkeypatch.setenv("ATTN_BACKENDS_DECODE", decode or backend)
        return Engine(monkeypatch, **kwargs)

    return make
