"""Every form of the CUDA merge kernels once, small, for NVIDIA's compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --report-api-errors no \\
        --kernel-name kernel_substring=merge_ python tests/merge/sanitize.py

and the same with ``racecheck`` and ``initcheck``. Results are compared with the torch path; the
exit status says whether all agree. Inputs are copied from the host, since ``initcheck`` does not
see what kernels write that it does not watch.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from attn_backends.merge import apply_sinks, default_path, merge_state, merge_state_, merge_states

FORMS = ("plain", "padded", "head_major")
DTYPES = (torch.bfloat16, torch.float32)
TOKENS, HEADS = 13, 5

State = tuple[torch.Tensor, torch.Tensor]


def make(dim: int, dtype: torch.dtype, form: str, states: int = 0) -> Callable[[], State]:
    """A random state, or a stack of them, some of it empty; each call copies it to the GPU."""
    lead = (states,) if states else ()
    o = torch.randn(*lead, TOKENS, HEADS, dim).to(dtype)
    lse = torch.randn(*lead, TOKENS, HEADS)
    lse[torch.rand(lse.shape) < 0.2] = -float("inf")
    if form == "padded":
        wide = torch.zeros(*o.shape[:-1], dim + 8, dtype=dtype)
        room = torch.zeros(*lse.shape[:-1], HEADS + 3)
        wide[..., :dim], room[..., :HEADS] = o, lse
        return lambda: (wide.cuda()[..., :dim], room.cuda()[..., :HEADS])
    if form == "head_major":
        turned = lse.mT.contiguous()
        return lambda: (o.cuda(), turned.cuda().mT)
    return lambda: (o.cuda(), lse.cuda())


def calls(dtype: torch.dtype, form: str, dim: int) -> Iterator[Callable[[], Any]]:
    """Merges to compare, as functions without arguments."""
    a, b, c = (make(dim, dtype, form) for _ in range(3))
    sinks = torch.randn(HEADS)
    yield lambda: merge_state(*a(), *b())
    yield lambda: merge_state(*a(), *b(), num_tokens_with_prefix=7)
    yield lambda: merge_state_(*a(), *b())
    yield lambda: merge_states([a(), b(), c()])
    yield lambda: apply_sinks(a(), sinks.cuda())
    for n in (2, 8, 20, 130):
        stack = make(dim, dtype, form, n)
        counts = torch.arange(TOKENS, dtype=torch.int32) % (n + 1)
        yield lambda stack=stack: merge_states(stack())
        yield lambda stack=stack, counts=counts: merge_states(stack(), counts=counts.cuda())
        yield lambda stack=stack: merge_states(pair := stack(), out=(pair[0][1], pair[1][1]))


def on(path: str, call: Callable[[], Any]) -> Any:
    """The result of ``call`` on a path."""
    token = default_path.set(path)
    try:
        return call()
    finally:
        default_path.reset(token)


def same(got: Any, want: Any) -> bool:
    """Whether two results agree as far as their dtype can tell."""
    bound = 4e-2 if got.o.dtype == torch.bfloat16 else 1e-5
    return all(torch.allclose(x.float(), y.float(), atol=bound) for x, y in zip(got, want))


def main() -> int:
    """Run all; 1 if a result is wrong."""
    torch.manual_seed(0)
    wrong = done = 0
    for dtype, form, dim in itertools.product(DTYPES, FORMS, (64, 80)):
        for call in calls(dtype, form, dim):
            done += 1
            wrong += not same(on("cuda", call), on("torch", call))
    torch.cuda.synchronize()
    print(f"{done} merges, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
