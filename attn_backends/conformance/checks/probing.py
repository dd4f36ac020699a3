"""Probes: lengths, masks, windows, head maps and page tables, with answers known by counting."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..cases import Case, case
from ..grid import GROUPS, PAGE_SIZES
from ..inputs import Inputs, on_device_only
from ..probes import probe_answers
from ..target import Target, require, require_lse, require_o
from ..tolerance import Expected, unit_roundoff
from .base import check


def _probe(name: str, q_lens: object, kv_lens: object, **fields: object) -> Case:
    return case(name, q_lens, kv_lens, data="probe", **fields)


def _run_probe(target: Target, case: Case) -> None:
    spec = case.spec(target.base)
    want = probe_answers(spec, case.q_lens, case.kv_lens, target.device)
    got = target.call(target.inputs(case))
    require_o(got.o, want, spec)
    require_lse(got.lse, want)
    _require_exact_empties(got.o, got.lse, want)


def _require_exact_empties(o: torch.Tensor, lse: torch.Tensor, want: Expected) -> None:
    empty = torch.isinf(want.lse)
    require(bool((o[empty] == 0).all()), "o of a row that sees no key is not exactly 0")
    require(bool((lse[empty] == float("-inf")).all()), "lse of a row that sees no key is not -inf")


def _empty_cases(level: str) -> list[Case]:
    found = []
    for keys in ("ragged", "paged"):
        found += [
            _probe(f"{keys}-more-queries-than-keys", (5, 3), (2, 1), keys=keys),
            _probe(f"{keys}-decode-with-padding", (1, 1, 1, 1), (5, 9, 3, 0), keys=keys),
            _probe(f"{keys}-middle-empty", (1, 1, 1), (5, 0, 7), keys=keys),
            _probe(f"{keys}-chunk-without-keys", (2, 3), (0, 4), keys=keys, causal=False),
        ]
    found += [
        _probe("all-empty", (1, 1, 1), (0, 0, 0)),
        _probe("all-empty-full", (2, 3), (0, 0), causal=False, keys="paged"),
        _probe("first-empty", (1, 1, 1), (0, 5, 7), num_heads=2, num_kv_heads=2),
        _probe("last-empty", (1, 1, 1), (5, 7, 0), num_heads=2, num_kv_heads=2),
        _probe("window-beyond-keys", (4, 1), (1, 3), window=(1, 0)),
    ]
    return found


@check("empty_rows", _empty_cases)
def check_empty_rows(target: Target, case: Case) -> None:
    """A query that sees no key has ``o = 0`` exactly and ``lse = -inf``.

    Its neighbors are unmoved.
    """
    _run_probe(target, case)


def _padding_cases(level: str) -> list[Case]:
    return [
        _probe("decode", (1, 1), (5, 9), keys="paged", tags={"rows": 5}),
        _probe("extend", (3, 2), (5, 2), tags={"rows": 9}),
    ]


@check("padding_rows", _padding_cases)
def check_padding_rows(target: Target, case: Case) -> None:
    """Query rows past the last sequence get the state of no keys."""
    spec, rows = case.spec(target.base), case.tag("rows")
    want = probe_answers(spec, case.q_lens, case.kv_lens, target.device)
    inputs = target.inputs(case)
    live = inputs.q.shape[0]
    padding = torch.full((rows - live, *inputs.q.shape[1:]), 1.0).to(inputs.q)
    batch = replace(on_device_only(inputs.batch), total_q=rows)
    padded: Inputs = replace(inputs, q=torch.cat([inputs.q, padding]), batch=batch)
    got = target.call(padded)
    require_o(got.o[:live], want, spec)
    require_lse(got.lse[:live], want)
    require(bool((got.o[live:] == 0).all()), "o of a padding row is not 0")
    require(bool((got.lse[live:] == float("-inf")).all()), "lse of a padding row is not -inf")


def _length_cases(level: str) -> list[Case]:
    found = [
        _probe("square", (6,), (6,)),
        _probe("prefix", (2,), (5,)),
        _probe("one-query", (1,), (5,)),
        _probe("one-key", (1, 1), (1, 1), keys="paged"),
        _probe("unequal-one-token", (1, 0, 1), (3, 0, 5), num_heads=9, num_kv_heads=3),
        _probe("no-sequence", (), ()),
        _probe("no-query", (0, 0), (3, 2)),
        _probe("no-query-paged", (0, 0), (3, 2), keys="paged"),
        _probe("around-16", (1, 1, 1, 1, 1), (15, 16, 17, 31, 33), keys="paged"),
        _probe("several-tokens-per-row", (2, 4, 3), (9, 4, 17), keys="paged"),
    ]
    if level == "full":
        found += [
            _probe("around-64", (63, 64, 65, 1), (63, 64, 65, 127)),
            _probe("around-128", (127, 128, 129), (127, 128, 129), keys="paged"),
            _probe("many-sequences", [1] * 67, [(7 * n) % 41 for n in range(67)], keys="paged"),
            _probe("one-of-each", range(12), [n * n % 13 for n in range(12)]),
            _probe("full-square", (33, 17), (33, 40), causal=False),
        ]
    return found


@check("lengths", _length_cases)
def check_lengths(target: Target, case: Case) -> None:
    """Lengths alone decide what is visible: 0, 1, odd, B = 0, T = 0, several queries over a prefix.

    Causal is bottom-right: query i sees keys up to i + kv_len - q_len.
    """
    _run_probe(target, case)


def _window_cases(level: str) -> list[Case]:
    found = [_probe(f"causal-{w}-tokens", (6,), (6,), window=(w - 1, 0)) for w in (1, 3, 6, 7)]
    found += [
        _probe("decode-3-tokens", (1,), (6,), window=(2, 0), keys="paged"),
        _probe("masked-tiles-first", (1,), (200,), window=(3, 0)),
        _probe("full-left", (4,), (12,), causal=False, window=(2, None)),
        _probe("full-right", (4,), (12,), causal=False, window=(None, 1), keys="paged"),
        _probe("full-both", (5, 2), (12, 2), causal=False, window=(1, 2)),
        _probe("several-rows", (7, 3), (40, 9), window=(4, 0), keys="paged"),
    ]
    if level == "full":
        found += [
            _probe("long", (130, 1), (256, 256), window=(31, 0)),
            _probe("long-full", (66,), (250,), causal=False, window=(3, 5), keys="paged"),
            _probe("right-beyond-keys", (30,), (10,), causal=False, window=(None, 10)),
            _probe("left-with-few-keys", (30,), (10,), causal=False, window=(4, None)),
        ]
    return found


@check("windows", _window_cases)
def check_windows(target: Target, case: Case) -> None:
    """Window bounds are inclusive around ``i + kv_len - q_len``, for each row."""
    _run_probe(target, case)


def _group_cases(level: str) -> list[Case]:
    groups = GROUPS if level == "full" else ((3, 1), (6, 2), (8, 1), (12, 2))
    dims = (16, 64, 128) if level == "full" else (64,)
    found = []
    for heads, kv_heads in groups:
        for dim in dims:
            pair = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim}
            tag = f"H{heads}-HK{kv_heads}-D{dim}"
            found.append(case(f"{tag}-prefill", (3, 5), (3, 9), keys="ragged", **pair))
            found.append(case(f"{tag}-decode", (1, 1), (9, 20), keys="paged", **pair))
    return found


@check("grouped_heads", _group_cases)
def check_grouped_heads(target: Target, case: Case) -> None:
    """Query head h uses KV head ``h // (H / HK)`` at any ratio, with q = 0 and v = the KV head."""
    spec = case.spec(target.base)
    inputs = target.inputs(case)
    assert inputs.v is not None
    inputs.q.zero_()
    numbers = torch.arange(spec.num_kv_heads, dtype=torch.float32, device=target.device)
    inputs.v.copy_(numbers[:, None].expand(inputs.v.shape).to(inputs.v.dtype))
    got = target.call(inputs)
    head = torch.arange(spec.num_heads, device=target.device) // spec.group_size
    want = head.double()[None, :, None].expand(got.o.shape)
    off = (got.o.double() - want).abs()
    # One float32 division: exact in half types, a unit in the last place in float32.
    bound = want * (2**-22 if spec.dtype.itemsize > 2 else 0.0)
    if bool((off > bound).any()) or bool(got.o.isnan().any()):
        heads = [round(float(x), 4) for x in got.o[0, :, 0].double()]
        require(False, f"head map is {heads}, not {head.tolist()}")


def _page_cases(level: str) -> list[Case]:
    found = []
    sizes = PAGE_SIZES if level == "full" else (1, 3, 16, 64)
    for size in sizes:
        lens = sorted({0, 1, size - 1, size, size + 1, 3 * size})
        lens = [n for n in lens if n <= (2000 if level == "full" else 80)]
        ones = [1] * len(lens)
        found.append(_probe(f"P{size}", ones, lens, page_size=size, spare=1))
    found.append(_probe("wide-table", (1, 2), (5, 9), keys="paged", spare=40))
    return found


@check("page_sizes", _page_cases)
def check_page_sizes(target: Target, case: Case) -> None:
    """Any page size, shuffled pages, wide tables and junk past the length give the same answer."""
    spec = case.spec(target.base)
    if spec.page_size is not None and max(case.kv_lens) > 250 and spec.dtype.itemsize < 4:
        # Positions beyond 256 are no whole numbers in bf16: count modulo 64 instead.
        return _page_counts(target, case)
    _run_probe(target, case)


def _page_counts(target: Target, case: Case) -> None:
    spec = case.spec(target.base)
    inputs = target.inputs(case)
    size, table = spec.page_size, inputs.batch.host_page_table
    assert inputs.v is not None and table is not None and size is not None
    mean = []
    for b, n in enumerate(case.kv_lens):
        position = torch.arange(n, device=target.device)
        value = (position % 64).float()
        mean.append(float(value.mean()) if n else 0.0)
        pages = table[b].to(target.device).long()[position // size]
        inputs.v[pages, position % size] = (
            value[:, None, None].expand(n, *inputs.v.shape[2:]).to(inputs.v.dtype)
        )
    want = probe_answers(spec, case.q_lens, case.kv_lens, target.device)
    means = torch.tensor(mean, dtype=torch.float64, device=target.device)
    o = means[:, None, None].expand(want.o.shape)
    step = 2 * unit_roundoff(spec.out_dtype) * o[..., 0]
    want = replace(want, o=o, o_tol=step + 8 * 64 * unit_roundoff(torch.float32), step=step)
    got = target.call(inputs)
    require_o(got.o, want, spec)
    require_lse(got.lse, want)


__all__ = [
    "check_empty_rows",
    "check_grouped_heads",
    "check_lengths",
    "check_padding_rows",
    "check_page_sizes",
    "check_windows",
]
