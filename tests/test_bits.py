"""What of one backend is equal bit by bit: promises of the page on determinism."""

from __future__ import annotations

import pytest
import torch

import attn_backends as ab
from attn_backends.triton_native.backend import TritonBackend, TritonOptions, interpreted

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPEC = ab.AttentionSpec(4, 2, 16, dtype=torch.float16, batch_invariant=True)


@pytest.fixture
def backend() -> TritonBackend:
    if DEVICE == "cpu" and not interpreted():
        pytest.skip("needs a GPU or Triton's interpreter")
    return TritonBackend(SPEC, device=torch.device(DEVICE))


def test_a_plan_of_fixed_capacity_has_the_bits_of_any_other(backend: TritonBackend) -> None:
    gen = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(n, h, 16, generator=gen).half() for n, h in ((3, 4), (700, 2), (700, 2)))
    q, k, v = q.to(DEVICE), k.to(DEVICE), v.to(DEVICE)
    batch = ab.Batch.from_lengths([1, 2], [600, 100], device=DEVICE)
    want = backend.run(q, k, v, backend.plan(batch))
    for room in (1, 3):
        capacity = ab.Capacity(
            num_seqs=1 + room, total_q=2 + room, max_seqlen_q=1 + room, max_seqlen_k=600 * room
        )
        plan = backend.plan(ab.Batch.from_lengths([1], [5], device=DEVICE), capacity)
        plan.update(batch)
        padded = torch.full((2 + room, 4, 16), float("nan"), dtype=torch.float16, device=DEVICE)
        padded[:3] = q
        got = backend.run(padded, k, v, plan)
        assert torch.equal(got.o[:3], want.o) and torch.equal(got.lse[:3], want.lse)


@pytest.mark.parametrize("options", [{"num_splits": 5}, {"split_keys": 48}, {"short_rows": 0}])
def test_options_that_move_cuts_are_refused_where_cuts_are_fixed(options: dict[str, int]) -> None:
    (name,) = options
    given = TritonOptions(**options)
    with pytest.raises(ab.UnsupportedCallError, match=f"{name}=.* None with batch_invariant"):
        TritonBackend(SPEC, device=torch.device(DEVICE), options=given)
    free = ab.AttentionSpec(4, 2, 16, dtype=torch.float16)
    reasons = TritonBackend.unsupported_reasons(free, options=given)
    assert not any(reason.argument == name for reason in reasons)
