"""A serving loop: continuous batching over a paged cache, with prefix reuse and CUDA graphs.

Each step computes one new token of every running request and, within a budget of tokens, parts of
prompts; the library sees lengths and a page table. Requests that begin alike share pages, and
where that moves less memory their shared keys are read once per group (a cascade). Decoding on a
GPU replays one captured graph per size of batch.

What a real engine has beyond this: sampling, cancelling, streaming, several GPUs. The pages of a
request's whole life are reserved when it starts, so that none has to be thrown out half way.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from llama import Attend, PagedLlama
from pages import PagePool

import attn_backends as ab
from attn_backends.cascade import plan_cascade
from attn_backends.prefixes import estimate_cascade, find_prefix_groups, split_prefixes


@dataclass(eq=False)
class Request:
    """A prompt and what became of it."""

    tokens: list[int]  # the prompt, then the new tokens
    prompt_len: int
    limit: int  # tokens at which it ends
    stop: frozenset[int]  # tokens that end it
    computed: int = 0  # tokens whose keys are in the cache
    reused: int = 0  # of those, how many were there before
    pages: list[int] = field(default_factory=list)  # for its whole life, in order

    @property
    def answer(self) -> list[int]:
        """The new tokens."""
        return self.tokens[self.prompt_len :]

    @property
    def done(self) -> bool:
        """Whether the token just added was the last one."""
        return len(self.tokens) >= self.limit or self.tokens[-1] in self.stop


class Engine:
    """Serves requests greedily.

    Args:
        model: The model and its cache.
        max_tokens: Most tokens computed in a step; ``max_requests`` run at once.
        backend: Name of a backend; None leaves it to the configuration.
        cascade: Read shared keys once per group: True always, False never, None if it pays.
        graphs: Decode through CUDA graphs, which are without a cascade.
    """

    def __init__(
        self, model: PagedLlama, *, max_tokens: int = 512, max_requests: int = 64,
        backend: str | None = None, cascade: bool | None = None, graphs: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.backend, self.cascade, self.graphs = model, backend, cascade, graphs
        self.max_tokens, self.max_requests = max_tokens, min(max_requests, max_tokens)
        self.max_len = model.cos.shape[0]
        self.pool = PagePool(model.cache.shape[2], model.cache.shape[3])
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.captured: dict[int, CapturedDecode] = {}
        self.steps = {"prefill": 0, "decode": 0, "cascade": 0, "graph": 0}

    def add(self, prompt: list[int], max_new_tokens: int, stop: frozenset[int]) -> Request:
        """Queue a prompt; ValueError if it is empty or never fits."""
        limit = len(prompt) + max_new_tokens
        room = min(self.max_len, len(self.pool.users) * self.pool.page_size)
        if not prompt or max_new_tokens < 1 or limit > room:
            raise ValueError(f"{len(prompt)} + {max_new_tokens} tokens, 1 + 1 to {room} are served")
        self.waiting.append(Request(list(prompt), len(prompt), limit, stop))
        return self.waiting[-1]

    def _admit(self) -> None:
        """Start requests that there is room for, in order of arrival."""
        pool, later = self.pool, []
        while self.waiting and len(self.running) < self.max_requests:
            request = self.waiting.popleft()
            known = pool.match(request.tokens)
            if known is None:  # its next page is on its way: wait, rather than compute it twice
                later.append(request)
                continue
            pool.use(known)
            missing = -(-request.limit // pool.page_size) - len(known)
            if missing > pool.available:
                pool.release(known)
                later.append(request)
                break
            request.pages = known + pool.take(missing)
            request.computed = request.reused = len(known) * pool.page_size
            pool.coming.update(pool.prefixes(request.tokens, len(request.tokens))[len(known) :])
            self.running.append(request)
        self.waiting.extendleft(reversed(later))

    def step(self) -> None:
        """Compute one step of every running request that the budget has room for."""
        self._admit()
        pool, size, budget, work = self.pool, self.pool.page_size, self.max_tokens, []
        for request in sorted(self.running, key=lambda r: len(r.tokens) - r.computed):
            if count := min(len(request.tokens) - request.computed, budget):
                work.append((request, count))
                budget -= count
        work.sort(key=lambda item: item[0].pages)  # those that share pages lie side by side
        for (request, count), token in zip(work, self._compute(work)):
            first, request.computed = request.computed // size, request.computed + count
            for page in range(first, request.computed // size):
                pool.publish(request.pages[page], tuple(request.tokens[: (page + 1) * size]))
            if request.computed == len(request.tokens):
                request.tokens.append(token)
                if request.done:
                    pool.release(request.pages)
                    self.running.remove(request)

    def run(self) -> None:
        """Step until every request is answered."""
        while self.waiting or self.running:
            self.step()

    def _compute(self, work: list[tuple[Request, int]]) -> list[int]:
        """The most likely token after each request's last one; meaningless inside a prompt."""
        model, size = self.model, self.pool.page_size
        q_lens = [count for _, count in work]
        ends = [request.computed + count for request, count in work]
        spots = [(r, at) for (r, _), end in zip(work, ends) for at in range(r.computed, end)]
        width = max(-(-end // size) for end in ends)
        table = [(r.pages + [0] * width)[:width] for r, _ in work]
        batch = ab.Batch.from_lengths(q_lens, ends, page_table=table, device=model.device)
        inputs = torch.tensor(
            [(r.tokens[at], at, r.pages[at // size] * size + at % size) for r, at in spots],
            device=model.device,
        ).T.contiguous()  # [3, T]: ids, positions, slots
        phase = "decode" if max(q_lens) == 1 else "prefill"
        self.steps[phase] += 1
        if phase == "decode" and self.graphs:
            self.steps["graph"] += 1
            bucket = 1 << (len(work) - 1).bit_length()
            if bucket not in self.captured:
                self.captured[bucket] = CapturedDecode(self, bucket, batch)
            return self.captured[bucket].replay(batch, inputs)
        rows = torch.tensor(q_lens, device=model.device).cumsum(0) - 1
        return model.forward(*inputs, rows, self._plan(batch, phase)).argmax(-1).tolist()

    def _plan(self, batch: ab.Batch, phase: str) -> Attend:
        """Attention of a step; planned here once, called by every layer."""
        groups = find_prefix_groups(batch, self.pool.page_size)
        estimate = estimate_cascade(self.model.spec, batch, groups)
        if groups and (estimate.pays if self.cascade is None else self.cascade):
            self.steps["cascade"] += 1
            levels = split_prefixes(batch, self.pool.page_size)
            shared = plan_cascade(self.model.spec, levels, backend=self.backend)
            return lambda q, k, v: shared.run(q, k, v).o
        plan = (backend := self.select(phase)).plan(batch)
        return lambda q, k, v: backend.run(q, k, v, plan).o

    def select(self, phase: str) -> ab.AttentionBackend:
        """The backend of a phase."""
        spec, device = self.model.spec, self.model.device
        return ab.select(spec, phase=phase, device=device, backend=self.backend).backend


class CapturedDecode:
    """One decode step as a CUDA graph, for at most ``size`` requests.

    All that it reads is kept, and has a fixed place: inputs and rows here, lengths and pages in the
    plan. Rows beyond the batch write nowhere (slot -1) and see no keys.
    """

    def __init__(self, engine: Engine, size: int, batch: ab.Batch) -> None:
        model, page_size = engine.model, engine.pool.page_size
        self.inputs = torch.tensor([[0], [0], [-1]], device=model.device).repeat(1, size)
        backend, pages = engine.select("decode"), -(-engine.max_len // page_size)
        self.plan = backend.plan(batch, ab.Capacity(size, size, 1, pages * page_size, pages))
        self.rows = torch.arange(size, device=model.device)
        attend: Attend = lambda q, k, v: backend.run(q, k, v, self.plan).o  # noqa: E731
        compute = lambda: model.forward(*self.inputs, self.rows, attend).argmax(-1)  # noqa: E731
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compile and allocate before the capture
            compute()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.tokens = compute()

    def replay(self, batch: ab.Batch, inputs: torch.Tensor) -> list[int]:
        """The next token of each request."""
        count = inputs.shape[1]
        self.inputs[:, :count].copy_(inputs)
        self.inputs[2, count:] = -1  # tokens and positions of earlier steps do no harm there
        self.plan.update(batch)
        self.graph.replay()
        return self.tokens[:count].tolist()
