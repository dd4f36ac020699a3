"""Keys and values through tensor maps: the same answer, whatever the layout, and nothing leaks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from attn_backends.spec import AttentionSpec
from attn_backends.triton_native.maps import KeyMaps

HALF = torch.float16
#: A tile of the prefill kernel that takes maps: the fields of ``PrefillConfig``.
TILE = (64, 32, 4, 2, True, True, True, False, 0, True)


@pytest.fixture
def described(monkeypatch) -> list[int]:
    """How many layouts were given maps."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs tensor maps, which Hopper has first")
    seen: list[int] = []
    shipped = KeyMaps.__init__

    def count(self, k, v, rows):
        seen.append(rows)
        shipped(self, k, v, rows)

    monkeypatch.setattr(KeyMaps, "__init__", count)
    return seen


@pytest.mark.parametrize(
    "fields",
    [{}, {"causal": False}, {"window": (40, 0)}, {"softcap": 20.0}, {"has_alibi": True}],
    ids=str,
)
def test_maps_give_the_same_answer_and_never_what_follows_a_sequence(
    lab: SimpleNamespace, described: list[int], fields: dict
) -> None:
    # Lengths that end with a tile, within one and before the first; NaN between sequences.
    spec = AttentionSpec(4, 2, 64, dtype=HALF, **fields)
    p = lab.Problem(spec, [64, 0, 33, 1, 100], [96, 5, 64, 9, 233])
    p.check(lab.run(p, prefill_config=TILE, short_rows=0))
    assert described


@pytest.mark.parametrize("layout", ["heads first", "fused", "one head"])
def test_maps_reach_heads_wherever_they_lie(
    lab: SimpleNamespace, described: list[int], layout: str
) -> None:
    heads = 1 if layout == "one head" else 2
    p = lab.Problem(AttentionSpec(4, heads, 64, dtype=HALF), [70, 3], [130, 90])
    if layout == "heads first":
        p.k, p.v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (p.k, p.v))
    elif layout == "fused":
        packed = torch.full((p.k.shape[0], 3 * heads, 64), float("nan"), dtype=HALF)
        packed[:, :heads], packed[:, 2 * heads :] = p.k.cpu(), p.v.cpu()
        packed = packed.to(p.device)
        p.k, p.v = packed[:, :heads], packed[:, 2 * heads :]
    p.check(lab.run(p, prefill_config=TILE, short_rows=0))
    assert described


def test_layouts_that_maps_cannot_describe_are_read_by_address(
    lab: SimpleNamespace, described: list[int]
) -> None:
    p = lab.Problem(AttentionSpec(4, 2, 64, dtype=HALF), [70], [130])
    shifted = torch.full((p.k.numel() + 4,), float("nan"), dtype=HALF, device=p.device)
    shifted[4:] = p.k.flatten()
    p.k = shifted[4:].view(p.k.shape)  # begins 8 bytes off
    p.check(lab.run(p, prefill_config=TILE, short_rows=0))
    odd = torch.full((p.v.shape[0], 2, 68), float("nan"), dtype=HALF, device=p.device)
    odd[..., :64] = p.v
    p.v = odd[..., :64]  # heads are 136 bytes apart
    p.check(lab.run(p, prefill_config=TILE, short_rows=0))
    for fields in ({"head_dim": 48}, {"page_size": 16}):
        known = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": HALF}
        p = lab.Problem(AttentionSpec(**(known | fields)), [70], [130])
        p.check(lab.run(p, prefill_config=TILE, short_rows=0))
    assert not described


def test_one_plan_serves_caches_of_several_sizes(
    lab: SimpleNamespace, described: list[int]
) -> None:
    p = lab.Problem(AttentionSpec(4, 2, 64, dtype=HALF), [70], [130])
    backend = lab.Backend(
        p.spec, device=p.device, options=lab.Options(prefill_config=TILE, short_rows=0)
    )
    plan = backend.plan(p.batch)
    p.check(backend.run(p.q, p.k, p.v, plan))
    p.k, p.v = (torch.cat([x, x]) for x in (p.k, p.v))
    for _ in range(3):
        p.check(backend.run(p.q, p.k, p.v, plan))
    assert described


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("fields", [{}, {"page_size": 16}, {"window": (300, 0)}], ids=str)
def test_layers_of_prefilled_rows_repeat_on_a_gpu(
    lab: SimpleNamespace, dtype: torch.dtype, head_dim: int, fields: dict
) -> None:
    """Plain kernels alone, whose first arguments may be absent, with and without options."""
    spec = AttentionSpec(9, 3, head_dim, dtype=dtype, **fields)
    p = lab.Problem(spec, [700, 130, 1100], [700, 333, 1700])
    backend = lab.Backend(spec, device=p.device, options=lab.Options(hopper=False))
    plan = backend.plan(p.batch)
    for _ in range(4):  # compiled, kept, repeated
        p.check(backend.run(p.q, p.k, p.v, plan))
    assert plan.repeat is not None
    p.k, p.v = p.k.clone(), p.v.clone()  # as another layer
    p.check(backend.run(p.q, p.k, p.v, plan))
    out = backend.run(p.q, p.k, p.v, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = backend.run(p.q, p.k, p.v, plan)
    captured.o.zero_()
    graph.replay()
    assert torch.equal(captured.o, out.o) and torch.equal(captured.lse, out.lse)
    p.with_sinks()
    for _ in range(3):
        p.check(backend.run(p.q, p.k, p.v, plan, **p.extras))
