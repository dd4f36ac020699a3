"""The smallest server around the plug: what SGLang's scheduler and model runner hold and hand over.

Requests own rows of the table of slots, and get pages in a shuffled order. A prefix is shared by
pointing at the same slots, as the radix cache does. Every token's key and value is remembered, so
that each step can be compared with the exact answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from attn_backends.conformance.oracle import Extras, Sequence
from attn_backends.conformance.tolerance import Expected, expect
from attn_backends.engines.sglang.registration import create
from attn_backends.spec import AttentionSpec

SETTINGS = dict(
    speculative_algorithm=None,
    dllm_algorithm=None,
    dcp_size=1,
    attn_cp_size=1,
    enable_unified_memory=False,
    enable_hisparse=False,
    enable_mis=False,
    enable_deterministic_inference=False,
    attention_backend="attn_backends",
    prefill_attention_backend=None,
    decode_attention_backend=None,
)


def append(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Rows after rows; float8 is joined as bytes, which every device can."""
    if old.dtype.itemsize > 1:
        return torch.cat([old, new])
    return torch.cat([old.view(torch.uint8), new.view(torch.uint8)]).view(old.dtype)


@dataclass
class Request:
    """One request: its row of the table, and what every layer has seen of it."""

    row: int
    length: int = 0
    pages: list[int] = field(default_factory=list)
    k: list[torch.Tensor] = field(default_factory=list)
    v: list[torch.Tensor] = field(default_factory=list)


class Server:
    """Pools, layers and a backend.

    Args:
        page_size: Tokens per page.
        heads: H.
        kv_heads: HK.
        dim: D.
        dim_v: DV.
        layers: Further arguments of ``RadixAttention``, one mapping per layer.
        dtype: Of queries.
        kv_dtype: Of the pool.
        windows: Ids of layers that live in a pool for sliding windows.
        context: Most tokens of a request.
        device: Where it runs.
        settings: Of the server.
        runner: Further attributes of the model runner, of its model's configuration too.
    """

    def __init__(
        self,
        *,
        page_size: int = 1,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 16,
        dim_v: int | None = None,
        layers: tuple[dict[str, Any], ...] = ({},),
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        windows: tuple[int, ...] = (),
        context: int = 256,
        device: str = "cpu",
        settings: dict[str, Any] | None = None,
        runner: dict[str, Any] | None = None,
        hf_config: Any = None,
        build: bool = True,
    ) -> None:
        self.page_size, self.dtype, self.device = page_size, dtype, device
        self.kv_dtype = dtype if kv_dtype is None else kv_dtype
        self.random = torch.Generator().manual_seed(0)
        self.layers = [self._layer(i, heads, kv_heads, dim, dim_v, x) for i, x in enumerate(layers)]
        pages = 8 * -(-context // page_size)
        self.table = ReqToTokenPool(8, context, device, False)
        self.pool = self._pool(pages * page_size, kv_heads, dim, dim_v, windows)
        order = torch.randperm(pages, generator=self.random) + 1  # page 0 is for padding
        self.free: list[int] = order.tolist()
        self.requests: dict[str, Request] = {}
        self.model = torch.nn.ModuleList(self.layers)
        config = SimpleNamespace(
            dtype=dtype, is_encoder_decoder=False, hf_config=hf_config, context_len=context
        )
        self.runner = SimpleNamespace(
            model=self.model,
            model_config=config,
            server_args=SimpleNamespace(**{**SETTINGS, **(settings or {})}),
            token_to_kv_pool=self.pool,
            req_to_token_pool=self.table,
            kv_index_translator=None,
            kv_cache_dtype=self.kv_dtype,
            page_size=page_size,
            use_mla_backend=False,
            device=device,
        )
        vars(self.runner).update(runner or {})
        self.backend = create(self.runner) if build else None

    def _layer(self, index, heads, kv_heads, dim, dim_v, extra) -> RadixAttention:
        extra = dict(extra)
        scales = extra.pop("scales", (None, None))
        if isinstance(extra.get("attn_type"), str):
            extra["attn_type"] = AttentionType(extra["attn_type"])
        named = {"scaling": dim**-0.5, "num_kv_heads": kv_heads, "layer_id": index, **extra}
        layer = RadixAttention(heads, dim, v_head_dim=-1 if dim_v is None else dim_v, **named)
        layer.k_scale, layer.v_scale = scales
        return layer

    def _pool(self, size, kv_heads, dim, dim_v, windows) -> Any:
        wide = {} if dim_v is None else {"v_head_dim": dim_v}
        facts = dict(
            page_size=self.page_size,
            dtype=self.kv_dtype,
            head_num=kv_heads,
            head_dim=dim,
            device=self.device,
            enable_memory_saver=False,
            **wide,
        )
        count = len(self.layers)
        if windows:
            others = [i for i in range(count) if i not in windows]
            pool = SWAKVPool(
                size=size,
                size_swa=size,
                swa_attention_layer_ids=list(windows),
                full_attention_layer_ids=others,
                **facts,
            )
            # Another order of pages than in the pool for full attention; 0 leads to 0.
            moved = torch.randperm(size // self.page_size, generator=self.random) + 1
            first = torch.cat([torch.zeros(1, dtype=torch.long), moved]) * self.page_size
            slots = (first[:, None] + torch.arange(self.page_size)).reshape(-1)
            pool.register_mapping(torch.cat([slots, torch.tensor([-1])]).to(self.device))
        else:
            pool = MHATokenToKVPool(size=size, layer_num=count, **facts)
        for layer in self.layers:  # memory that must not be read
            for buffer in pool.get_kv_buffer(layer.layer_id):
                if buffer.dtype.itemsize == 1:
                    buffer.view(torch.uint8).fill_(0x7F)
                else:
                    buffer.fill_(float("nan"))
        return pool

    # Requests

    def request(self, name: str) -> Request:
        """A request by its name, new if there is none."""
        if name not in self.requests:
            self.requests[name] = Request(row=len(self.requests) + 1)
        return self.requests[name]

    def share(self, source: str, target: str, length: int) -> None:
        """Start a request with the first tokens of another, in the same slots."""
        assert length % self.page_size == 0, "the radix cache shares whole pages"
        old, new = self.request(source), self.request(target)
        self.table.req_to_token[new.row, :length] = self.table.req_to_token[old.row, :length]
        new.length, new.pages = length, old.pages[: length // self.page_size]
        new.k, new.v = [k[:length] for k in old.k], [v[:length] for v in old.v]

    def _take(self, request: Request, tokens: int) -> torch.Tensor:
        """Give a request slots for more tokens; returns them."""
        end, size = request.length + tokens, self.page_size
        while len(request.pages) * size < end:
            request.pages.append(self.free.pop())
        slots = [request.pages[i // size] * size + i % size for i in range(request.length, end)]
        taken = torch.tensor(slots, dtype=torch.int64, device=self.device)
        self.table.req_to_token[request.row, request.length : end] = taken.int()
        request.length = end
        return taken

    # Steps

    def batch(self, mode: str, tokens: dict[str, int], **extra: Any) -> ForwardBatch:
        """A step of SGLang: so many new tokens of each request."""
        requests = [self.request(name) for name in tokens]
        before = [r.length for r in requests]
        locs = [self._take(r, n) for r, n in zip(requests, tokens.values())]
        lens = torch.tensor([r.length for r in requests], dtype=torch.int64)
        facts: dict[str, Any] = dict(
            forward_mode=ForwardMode[mode],
            batch_size=len(requests),
            input_ids=torch.zeros(sum(tokens.values()), dtype=torch.int64, device=self.device),
            req_pool_indices=torch.tensor([r.row for r in requests], device=self.device),
            seq_lens=lens.to(self.device),
            seq_lens_cpu=lens,
            seq_lens_sum=int(lens.sum()),
            out_cache_loc=torch.cat(locs) if locs else torch.zeros(0, dtype=torch.int64),
        )
        if mode != "DECODE":
            counts = list(tokens.values())
            facts |= dict(
                extend_num_tokens=sum(counts),
                extend_seq_lens=torch.tensor(counts, dtype=torch.int32, device=self.device),
                extend_prefix_lens=torch.tensor(before, dtype=torch.int32, device=self.device),
                extend_seq_lens_cpu=counts,
                extend_prefix_lens_cpu=before,
            )
        return ForwardBatch(**{**facts, **extra})

    def draw(self, layer: RadixAttention, tokens: int) -> list[torch.Tensor]:
        """Random ``q [T, H * D]``, ``k [T, HK, D]``, ``v [T, HK, DV]`` of a layer."""
        shapes = (
            (tokens, layer.tp_q_head_num * layer.qk_head_dim),
            (tokens, layer.tp_k_head_num, layer.qk_head_dim),
            (tokens, layer.tp_v_head_num, layer.v_head_dim),
        )
        made = [torch.randn(s, generator=self.random) for s in shapes]
        return [x.to(device=self.device, dtype=self.dtype) for x in made]

    def remember(
        self, layer: RadixAttention, tokens: dict[str, int], k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Append a step's keys and values, as the pool stores them, to each request's own."""
        k, v = (self._stored(x, scale) for x, scale in ((k, layer.k_scale), (v, layer.v_scale)))
        index = layer.layer_id
        for name, part_k, part_v in zip(
            tokens, k.split(list(tokens.values())), v.split(list(tokens.values()))
        ):
            request = self.request(name)
            if len(request.k) == index:
                request.k.append(part_k)
                request.v.append(part_v)
            else:
                request.k[index] = append(request.k[index], part_k)
                request.v[index] = append(request.v[index], part_v)

    def _stored(self, x: torch.Tensor, scale: Any) -> torch.Tensor:
        if self.kv_dtype == self.dtype:
            return x.clone()
        return (x if scale is None else x / scale).to(self.kv_dtype)

    def asked(self, layer: RadixAttention) -> AttentionSpec:
        """What a layer asks for, read anew from SGLang's attributes."""
        before = layer.sliding_window_size
        decoder = layer.attn_type == AttentionType.DECODER
        return AttentionSpec(
            num_heads=layer.tp_q_head_num,
            num_kv_heads=layer.tp_k_head_num,
            head_dim=layer.qk_head_dim,
            head_dim_v=layer.v_head_dim,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            causal=decoder,
            window=None if before == -1 else (before, 0 if decoder else before),
            softcap=layer.logit_cap if layer.logit_cap > 0 else None,
            sm_scale=layer.scaling,
        )

    def exact(
        self,
        layer: RadixAttention,
        tokens: dict[str, int],
        q: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> Expected:
        """The right answer of a layer whose keys have been remembered, with its tolerance."""
        spec = self.asked(layer)
        q = q.view(-1, spec.num_heads, spec.head_dim)
        sequences, row = [], 0
        for name, count in tokens.items():
            request = self.request(name)
            sequences.append(
                Sequence(
                    q[row : row + count],
                    request.k[layer.layer_id],
                    request.v[layer.layer_id],
                )
            )
            row += count
        scales = (self._factor(s, spec.num_kv_heads) for s in (layer.k_scale, layer.v_scale))
        sinks = None if sinks is None else sinks.detach().float()
        return expect(spec, sequences, Extras(sinks, None, *scales))

    def _factor(self, scale: Any, heads: int) -> torch.Tensor | None:
        if scale is None or self.kv_dtype == self.dtype:
            return None
        return torch.full((heads,), float(scale), device=self.device)

    def step(
        self,
        mode: str,
        tokens: dict[str, int],
        *,
        sinks: torch.Tensor | None = None,
        lse: bool = False,
        **extra: Any,
    ) -> None:
        """Run a step through every layer, and hold each against the exact answer."""
        batch = self.batch(mode, tokens, **extra)
        self.backend.init_forward_metadata(batch)
        for layer in self.layers:
            q, k, v = self.draw(layer, sum(tokens.values()))
            kept = [x.clone() for x in (q, k, v)]
            kwargs = {} if sinks is None else {"sinks": sinks}
            if lse:
                kwargs["return_lse"] = True
            got = self.backend.forward(q, k, v, layer, batch, **kwargs)
            for x, before in zip((q, k, v), kept):
                assert torch.equal(x, before), "the plug changed its input"
            self.remember(layer, tokens, k, v)
            self.check(got, self.exact(layer, tokens, q, sinks), lse)

    def check(self, got: Any, want: Expected, lse: bool = False) -> None:
        """Hold a result in SGLang's form against the exact answer."""
        rows, heads, width = want.o.shape
        if lse:
            o, sums = got
            assert o.shape == (rows, heads, width)
            assert sums.shape == (rows, heads) and sums.dtype == torch.float32
            wrong = (sums.double() - want.lse).abs() > want.lse_tol
            assert not bool(wrong.any())
        else:
            o = got
            assert o.shape == (rows, heads * width)
        o = o.reshape(rows, heads, width).double()
        assert not bool(o.isnan().any())
        assert bool(((o - want.o).abs() <= want.o_tol[..., None]).all())


class Graph:
    """The life of a decode graph as SGLang's runner leads it, with or without a GPU.

    Without one, a replay calls the layers again over the same tensors, without new metadata.

    Args:
        server: Whose backend it captures.
        size: Requests of the graph; a step with fewer is padded.
    """

    def __init__(self, server: Server, size: int) -> None:
        self.server, self.size, self.device = server, size, server.device

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=self.device)

        fill = server.backend.get_cuda_graph_seq_len_fill_value()
        self.fill = fill
        self.rows, self.lens, self.loc = zeros(size), zeros(size) + fill, zeros(size)
        self.host_lens = torch.full((size,), fill)
        self.inputs = [server.draw(layer, size) for layer in server.layers]
        self.outputs: list[torch.Tensor] = []
        self.batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=size,
            input_ids=zeros(size),
            req_pool_indices=self.rows,
            seq_lens=self.lens,
            seq_lens_cpu=self.host_lens,
            seq_lens_sum=size * fill,
            out_cache_loc=self.loc,
        )
        server.backend.init_forward_metadata_out_graph(self.batch, in_capture=True)
        self.graph = self._record() if self.device != "cpu" else None

    def _forward(self) -> None:
        backend = self.server.backend
        backend.init_forward_metadata_in_graph(self.batch)
        self.outputs = [
            backend.forward(*x, layer, self.batch)
            for x, layer in zip(self.inputs, self.server.layers)
        ]

    def _record(self) -> Any:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._forward()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._forward()
        return graph

    def replay(self, names: list[str], *, mirror: bool = True) -> None:
        """One decode step of some requests, held against the exact answer.

        Args:
            names: At most as many requests as the graph has.
            mirror: Whether SGLang has the lengths on the host.
        """
        server, tokens = self.server, dict.fromkeys(names, 1)
        step = server.batch("DECODE", tokens)
        num = step.batch_size
        self.rows.zero_()
        self.lens.fill_(self.fill)
        self.host_lens.fill_(self.fill)
        self.loc.zero_()
        for target, source in (
            (self.rows, step.req_pool_indices),
            (self.lens, step.seq_lens),
            (self.host_lens, step.seq_lens_cpu),
            (self.loc, step.out_cache_loc),
        ):
            target[:num].copy_(source)
        view = SimpleNamespace(
            batch_size=self.size,
            forward_mode=ForwardMode.DECODE,
            actual_forward_mode=step.forward_mode,
            req_pool_indices=self.rows,
            seq_lens=self.lens,
            seq_lens_sum=None,
            seq_lens_cpu=self.host_lens if mirror else None,
            encoder_lens=None,
            out_cache_loc=step.out_cache_loc,
            spec_info=None,
        )
        fresh = []
        for layer, kept in zip(server.layers, self.inputs):
            drawn = server.draw(layer, self.size)
            fresh.append([x.clone() for x in drawn])
            for target, source in zip(kept, drawn):
                target.copy_(source)
        server.backend.init_forward_metadata_out_graph(view)
        if self.graph is None:
            # Without a graph the runner's batch stands for what was recorded.
            self._forward()
        else:
            for out in self.outputs:
                out.fill_(float("nan"))
            self.graph.replay()
        for layer, (q, k, v), out in zip(server.layers, fresh, self.outputs):
            server.remember(layer, tokens, k[:num], v[:num])
            server.check(out[:num], server.exact(layer, tokens, q[:num]))
