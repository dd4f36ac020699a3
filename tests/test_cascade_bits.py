"""What of a cascade is equal bit by bit: the promises of the page on determinism."""

from __future__ import annotations

import pytest
import torch

import attn_backends as ab
from attn_backends.cascade import plan_cascade

PAGE = 4


def tensors(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    cache = lambda: torch.randn(40, PAGE, 2, 16, generator=g)  # noqa: E731
    return torch.randn(tokens, 4, 16, generator=g), cache(), cache()


def levels(groups: list[list[int]], shared: list[list[int]]) -> list[ab.Batch]:
    """Groups of sequences with one query each.

    ``groups[g]`` are own key counts, ``shared[g]`` the shared pages.
    """
    own = [n for group in groups for n in group]
    table = [[20 + 2 * i, 21 + 2 * i] for i in range(len(own))]
    width = max(map(len, shared))
    rows = [pages + [-1] * (width - len(pages)) for pages in shared]
    return [
        ab.Batch.from_lengths(
            [len(g) for g in groups], [len(s) * PAGE for s in shared], page_table=rows
        ),
        ab.Batch.from_lengths([1] * len(own), own, page_table=table),
    ]


def run(batches: list[ab.Batch], backend: str, rows: int) -> ab.AttentionOutput:
    spec = ab.AttentionSpec(4, 2, 16, dtype=torch.float32, page_size=PAGE, batch_invariant=True)
    q, k, v = tensors(8)
    return plan_cascade(spec, batches, backend=backend).run(q[:rows], k, v)


@pytest.mark.parametrize("backend", ["torch_native", "triton"])
def test_other_groups_move_no_bit_under_batch_invariance(backend: str) -> None:
    both = run(levels([[3, 5], [8, 1]], [[0, 1, 2], [3, 4]]), backend, 4)
    alone = run(levels([[3, 5]], [[0, 1, 2]]), backend, 2)
    assert torch.equal(both.o[:2], alone.o) and torch.equal(both.lse[:2], alone.lse)


def test_group_mates_move_no_bit_of_the_invariant_triton_backend() -> None:
    three = run(levels([[3, 5, 7]], [[0, 1, 2]]), "triton", 3)
    one = run(levels([[3]], [[0, 1, 2]]), "triton", 1)
    assert torch.equal(three.o[:1], one.o) and torch.equal(three.lse[:1], one.lse)


@pytest.mark.parametrize("invariant, asked", [(True, {"torch"}), (False, {None})])
def test_invariant_cascades_and_chunks_merge_on_a_path_that_does_not_follow_the_size(
    invariant: bool, asked: set, monkeypatch
) -> None:
    from attn_backends import cascade, running

    paths = set()

    def spied(merge):
        def call(*args, path=None, **kwargs):
            paths.add(path)
            return merge(*args, path=path, **kwargs)

        return call

    monkeypatch.setattr(cascade, "merge_states", spied(cascade.merge_states))
    monkeypatch.setattr(running, "merge_state", spied(running.merge_state))
    monkeypatch.setattr(running, "merge_states", spied(running.merge_states))
    spec = ab.AttentionSpec(
        4, 2, 16, dtype=torch.float32, page_size=PAGE, batch_invariant=invariant
    )
    q, k, v = tensors(2)
    plan_cascade(spec, levels([[3, 5]], [[0, 1, 2]]), backend="torch_native").run(q, k, v)
    batch = ab.Batch.from_lengths([1, 1], [38, 9], page_table=torch.arange(20).view(2, 10))
    ab.plan_chunked(spec, batch, chunk_size=PAGE, backend="torch_native").run(q, k, v)
    assert paths == asked


def test_a_cascade_plan_gives_the_same_bits_in_every_layer() -> None:
    spec = ab.AttentionSpec(4, 2, 16, dtype=torch.float32, page_size=PAGE)
    batches = levels([[3, 5], [8, 1]], [[0, 1, 2], [3, 4]])
    plan, again = (plan_cascade(spec, batches, backend="torch_native") for _ in range(2))
    q, k, v = tensors(4)
    first = plan.run(q, k, v)
    plan.run(q + 1, v, k)  # another layer in between
    for other in (plan.run(q, k, v), again.run(q, k, v)):
        assert torch.equal(first.o, other.o) and torch.equal(first.lse, other.lse)
