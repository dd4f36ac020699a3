"""Memory: what may be read, what must be written, where it may lie."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...batch import Batch
from ...output import AttentionOutput
from ..cases import LAYOUTS, Case, case
from ..grid import FP8
from ..inputs import Inputs
from ..target import Target, require, require_lse, require_o, require_same_bits
from .base import check

POISONS = {"nan": float("nan"), "inf": float("inf")}


def _fill(x: torch.Tensor, where: torch.Tensor, value: float) -> None:
    """Write poison to ``[slots] -> [heads, width]`` of a cache; fp8 knows only NaN."""
    if x.dtype.itemsize == 1:
        x.view(torch.uint8)[where] = 0x7F
    else:
        x[where] = value


def _poison_cases(level: str) -> list[Case]:
    found = []
    for kind in POISONS:
        for part in ("k", "v", "kv"):
            tags = {"kind": kind, "part": part}
            found.append(
                case(f"tail-{part}-{kind}", (1, 2), (13, 5), keys="paged", page_size=4, tags=tags)
            )
        tags = {"kind": kind, "part": "kv"}
        found += [
            case(f"base-page-{kind}", (1, 3), (13, 37), keys="paged", tags=tags, spare=2),
            case(f"ragged-room-{kind}", (1, 1), (1, 3), keys="ragged", spare=2, tags=tags),
            case(
                f"expired-window-{kind}",
                (1, 1),
                (40, 9),
                keys="paged",
                window=(3, 0),
                tags=tags | {"expired": 3},
            ),
        ]
    fp8 = {"kv_dtype": FP8, "tags": {"kind": "nan", "part": "kv"}, "keys": "paged"}
    found.append(case("fp8", (1, 2), (13, 5), **fp8))
    if level == "full":
        tags = {"kind": "nan", "part": "kv"}
        found += [
            case("long", (1, 40), (700, 333), keys="paged", tags=tags),
            case("long-ragged", (1, 70), (200, 70), keys="ragged", spare=37, tags=tags),
            case("not-causal", (3, 1), (13, 37), keys="paged", causal=False, tags=tags),
            case("padding-length-0", (1, 1), (13, 0), keys="paged", tags=tags),
        ]
    return found


@check("poison", _poison_cases)
def check_poison(target: Target, case: Case) -> None:
    """NaN and inf in slots that no query sees never reach a result, not in one bit.

    Such slots are the tail of the last page, pages of nobody, the room after a ragged sequence,
    and keys that a window has left behind.
    """
    clean = target.call(target.inputs(case))
    inputs = target.inputs(case)
    value, part = POISONS[case.tag("kind")], case.tag("part")
    unused = ~inputs.used
    if case.tag("expired") is not None:
        unused |= _expired(inputs, case.tag("expired"))
    if "k" in part:
        _fill(inputs.k, unused, value)
    if "v" in part and inputs.v is not None:
        _fill(inputs.v, unused, value)
    got = target.call(inputs)
    require(not bool(got.o.isnan().any()), "NaN from an unused slot reached o")
    require(not bool(got.lse.isnan().any()), "NaN from an unused slot reached lse")
    require_same_bits("poison in unused slots", got, clean)
    require_o(got.o, target.expected(case), inputs.spec)


def _expired(inputs: Inputs, left: int) -> torch.Tensor:
    """Slots that a decode query's window has left behind, as a mask like ``inputs.used``."""
    gone = torch.zeros_like(inputs.used)
    table, size = inputs.batch.host_page_table, inputs.spec.page_size
    assert table is not None and size is not None and inputs.batch.kv_lens is not None
    for row, n in zip(table.to(gone.device).long(), inputs.batch.kv_lens):
        position = torch.arange(max(0, n - 1 - left), device=gone.device)
        gone[row[position // size], position % size] = True
    return gone


def _nan_cases(level: str) -> list[Case]:
    return [
        case("value", (1, 3), (9, 12), keys="paged", tags={"part": "v"}),
        case("key", (1, 3), (9, 12), keys="ragged", tags={"part": "k"}),
        case("query", (1, 3), (9, 12), tags={"part": "q"}),
    ]


@check("visible_nan", _nan_cases)
def check_visible_nan(target: Target, case: Case) -> None:
    """NaN in an input that a query does see stays visible in that query's output.

    It stays with its sequence and its KV head: other sequences and other heads are unmoved.
    """
    clean = target.call(target.inputs(case))
    inputs, nan = target.inputs(case), float("nan")
    seq, heads = 1, slice(0, inputs.spec.group_size)
    first = case.q_lens[0]
    if case.tag("part") == "q":
        inputs.q[first:, heads] = nan
    else:  # the first key of the second sequence, KV head 0
        store = inputs.v if case.tag("part") == "v" else inputs.k
        assert store is not None
        if inputs.batch.host_page_table is not None:
            store[int(inputs.batch.host_page_table[seq, 0]), 0, 0] = nan
        else:
            store[case.kv_lens[0], 0] = nan
    got = target.call(inputs)
    require(bool(got.o[first:, heads].isnan().all()), "a query that sees a NaN hides it")
    untouched = AttentionOutput(got.o.clone(), got.lse.clone())
    untouched.o[first:, heads] = clean.o[first:, heads]
    untouched.lse[first:, heads] = clean.lse[first:, heads]
    require_same_bits("a NaN in another sequence or head", untouched, clean)


def _layout_cases(level: str) -> list[Case]:
    found = []
    for layout in LAYOUTS[1:]:
        for keys in ("ragged", "paged"):
            found.append(case(f"{layout}-{keys}", (3, 1), (20, 7), keys=keys, layout=layout))
        if level == "full":
            own = {"layout": layout, "keys": "paged"}
            found.append(case(f"{layout}-decode", (1, 1), (20, 7), **own))
            found.append(case(f"{layout}-long", (70, 1), (200, 300), **own))
            found.append(case(f"{layout}-fp8", (1, 1), (20, 7), kv_dtype=FP8, **own))
            dims = {"head_dim": 192, "head_dim_v": 128}
            found.append(case(f"{layout}-dims", (3,), (20,), layout=layout, keys="ragged", **dims))
    found.append(case("int64-index", (3, 1), (20, 7), keys="paged", int64=True))
    found.append(case("int64-index-ragged", (3, 1), (20, 7), keys="ragged", int64=True, spare=2))
    return found


@check("strides", _layout_cases)
def check_strides(target: Target, case: Case) -> None:
    """Strided, transposed and sliced inputs and int64 index tensors give the same bits.

    Heads first (HND), K and V in one buffer, rows cut from wider rows, rows at odd addresses, every
    second row.
    """
    inputs = target.inputs(case)
    got = target.call(inputs)
    require_o(got.o, target.expected(case), inputs.spec)
    require_lse(got.lse, target.expected(case))
    plain = target.call(target.inputs(replace(case, layout="plain", int64=False)))
    require_same_bits(f"layout {case.name}", got, plain)


def _permutation_cases(level: str) -> list[Case]:
    return [
        case("decode", (1, 1), (40, 9), keys="paged"),
        case("extend", (5, 2), (40, 9), keys="paged", spare=3),
        case("one-slot-pages", (2, 1), (5, 3), page_size=1),
    ]


@check("page_order", _permutation_cases)
def check_page_order(target: Target, case: Case) -> None:
    """Where pages lie, how wide the table is, and who shares a page change no bit."""
    first = target.inputs(case)
    backend = target.make(first.spec)
    want = target.call(first, backend=backend)
    require_o(want.o, target.expected(case), first.spec)
    table = first.batch.host_page_table
    assert table is not None and first.v is not None and first.spec.page_size is not None
    num_pages = first.k.shape[0]
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(7))
    moved = torch.where((table >= 0) & (table < num_pages), 0, table)
    real = (table >= 0) & (table < num_pages)
    moved[real] = order[table[real].long()].to(moved.dtype)
    k, v = torch.empty_like(first.k), torch.empty_like(first.v)
    k[order.to(k.device)], v[order.to(v.device)] = first.k, first.v
    batch = Batch.from_lengths(case.q_lens, case.kv_lens, page_table=moved, device=target.device)
    got = target.call(replace(first, k=k, v=v, batch=batch), backend=backend)
    require_same_bits("pages in another order", got, want)

    # The second sequence over the first one's pages: as if it had copies of its own.
    size = first.spec.page_size
    shared = table.clone()
    shared[1] = shared[0]
    lens = (case.kv_lens[0], case.kv_lens[0] - case.kv_lens[0] % size or 1)

    def make(page_table: torch.Tensor) -> Batch:
        return Batch.from_lengths(case.q_lens, lens, page_table=page_table, device=target.device)

    both = make(shared)
    got = target.call(replace(first, batch=both), backend=backend)
    count = -(-lens[1] // size)
    own = table.clone()
    spare = [p for p in range(num_pages) if p not in set(table[0].tolist())]
    if len(spare) < count:
        extra = count - len(spare)
        spare += range(num_pages, num_pages + extra)
        k, v = (torch.cat([x, x[:extra].clone()]) for x in (first.k, first.v))
    else:
        k, v = first.k.clone(), first.v.clone()
    for n in range(count):
        own[1, n] = spare[n]
        k[spare[n]], v[spare[n]] = first.k[int(table[0, n])], first.v[int(table[0, n])]
    copied = make(own)
    want = target.call(replace(first, k=k, v=v, batch=copied), backend=backend)
    require_same_bits("pages shared by two sequences", got, want)


OUTS = ("wide", "heads_first", "rows", "lse_transposed")


def _out_cases(level: str) -> list[Case]:
    found = []
    for form in OUTS:
        tags = {"out": form}
        found.append(case(f"{form}-extend", (3, 1), (20, 7), tags=tags))
        found.append(case(f"{form}-decode", (1, 1, 1), (20, 0, 9), keys="paged", tags=tags))
        if level == "full":
            found.append(case(f"{form}-sinks", (3, 1), (20, 7), sinks=True, tags=tags))
            found.append(case(f"{form}-long", (1, 70), (900, 70), keys="paged", tags=tags))
    found.append(case("no-keys", (1, 2), (0, 0), tags={"out": "wide"}))
    return found


@check("out", _out_cases)
def check_out(target: Target, case: Case) -> None:
    """``out=`` views of any strides are written in full, and nothing outside them is touched."""
    inputs = target.inputs(case)
    backend = target.make(inputs.spec)
    plan = backend.plan(inputs.batch)
    want = backend.run(inputs.q, inputs.k, inputs.v, plan, **inputs.kwargs)
    o, o_buffer = _guarded(want.o, case.tag("out"))
    lse, lse_buffer = _guarded_lse(want.lse, case.tag("out"))
    got = backend.run(inputs.q, inputs.k, inputs.v, plan, **inputs.kwargs, out=(o, lse))
    for name, a, b in (("o", got.o, o), ("lse", got.lse, lse)):
        same = a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.shape == b.shape
        require(same, f"{name} of the result is not the tensor given as out")
    require_same_bits("out= views", AttentionOutput(o, lse), want)
    for name, view, buffer in (("o", o, o_buffer), ("lse", lse, lse_buffer)):
        view.fill_(GUARD)
        require(bool((buffer == GUARD).all()), f"something outside out.{name} was written")


GUARD = 777.0


def _guarded(like: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads, width = like.shape
    shape = {
        "wide": (rows + 2, heads, width + 16),
        "heads_first": (heads + 2, rows, width),
        "rows": (2 * rows + 2, heads, width),
        "lse_transposed": (rows + 2, heads, width),
    }[form]
    buffer = torch.full(shape, GUARD, dtype=like.dtype, device=like.device)
    if form == "wide":
        return buffer[1:-1, :, 8:-8], buffer
    if form == "heads_first":
        return buffer[1:-1].transpose(0, 1), buffer
    return (buffer[1:-1] if form == "lse_transposed" else buffer[1:-1:2]), buffer


def _guarded_lse(like: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads = like.shape
    if form in ("lse_transposed", "heads_first"):
        buffer = torch.full((heads + 2, rows + 3), GUARD, device=like.device)
        return buffer[1:-1, : rows or None].transpose(0, 1)[:rows], buffer
    buffer = torch.full((rows + 2, 2 * heads), GUARD, device=like.device)
    return buffer[1:-1, ::2], buffer


def _input_cases(level: str) -> list[Case]:
    return [
        case("extend", (3, 1), (20, 7), layout="wide", sinks=True),
        case("decode", (1, 1), (20, 7), keys="paged", layout="packed"),
        case("alibi", (3, 1), (20, 7), has_alibi=True),
        case("mask", (3, 1), (20, 7), has_mask=True, causal=False),
        case("fp8", (1, 1), (20, 7), keys="paged", kv_dtype=FP8, kv_scale="head"),
    ]


@check("inputs_unchanged", _input_cases)
def check_inputs_unchanged(target: Target, case: Case) -> None:
    """No input is written: queries, caches, index tensors, slopes, masks, scales, sinks."""
    inputs = target.inputs(case)
    before = {name: _bytes(x) for name, x in inputs.tensors.items()}
    target.call(inputs)
    for name, x in inputs.tensors.items():
        require(torch.equal(_bytes(x), before[name]), f"{name} was written")


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().view(torch.uint8).clone()


def _far_cases(level: str) -> list[Case]:
    if level != "full":
        return []
    found = []
    for name, q_lens in (("decode", (1, 1, 1)), ("extend", (3, 1, 2))):
        for what in ("queries", "outputs", "keys", "pages"):
            keys = {"keys": "ragged", "pages": "paged"}.get(what, "any")
            tags = {"far": what}
            found.append(case(f"{what}-{name}", q_lens, (20, 5, 9), keys=keys, tags=tags))
    inside = {"far": "pages", "inside": True}
    found.append(case("inside-a-page", (1, 1, 1), (20, 5, 9), keys="paged", tags=inside))
    return found


@check("offsets_64bit", _far_cases)
def check_offsets(target: Target, case: Case) -> None:
    """Offsets beyond 2^31 elements reach the right memory: pages, query rows, key rows, outputs."""
    inputs, far = target.inputs(case), case.tag("far")
    if far == "pages":
        inputs = _with_last_page(inputs, case)
    backend = target.make(inputs.spec)
    plan = backend.plan(inputs.batch)
    want = backend.run(inputs.q, inputs.k, inputs.v, plan)
    q, k, v, out = inputs.q, inputs.k, inputs.v, None
    assert v is not None
    inside = bool(case.tag("inside"))
    if far == "queries":
        (q,) = _stretch([q], inside)
    elif far == "outputs":
        (o,) = _stretch([torch.full_like(want.o, float("nan"))], inside)
        out = (o, torch.full_like(want.lse, float("nan")))
    else:
        k, v = _stretch([k, v], inside)
    got = backend.run(q, k, v, plan, out=out)
    require_same_bits("offsets beyond 2^31", got, want)


def _with_last_page(inputs: Inputs, case: Case) -> Inputs:
    """The same data, with the first sequence's first page stored last in the cache."""
    table, last = inputs.batch.host_page_table, inputs.k.shape[0] - 1
    assert table is not None and inputs.v is not None
    first = int(table[0, 0])
    swapped = torch.where(table == first, last, torch.where(table == last, first, table))
    order = torch.arange(last + 1, device=inputs.k.device)
    order[first], order[last] = last, first
    batch = Batch.from_lengths(
        case.q_lens, case.kv_lens, page_table=swapped, device=inputs.k.device
    )
    return replace(inputs, k=inputs.k[order], v=inputs.v[order], batch=batch)


def _stretch(tensors: list[torch.Tensor], inside: bool) -> list[torch.Tensor]:
    """Copies in one storage whose last rows start past 2^31 elements, or just before (inside)."""
    rows = tensors[0].shape[0]
    widths = [x[0].numel() for x in tensors]
    last = 2**31 - widths[0] // 2 if inside else 2**31 + 4096
    step = last // (rows - 1) // 64 * 64  # vector loads want aligned rows
    start = last // 64 * 64 - step * (rows - 1)
    like = tensors[0]
    size = (start + step * (rows - 1) + sum(widths)) * like.dtype.itemsize
    storage = torch.UntypedStorage(size, device=like.device)  # type: ignore[no-untyped-call]
    flat = torch.empty(0, dtype=like.dtype, device=like.device).set_(storage)
    far = []
    for x, width in zip(tensors, widths):
        strides = (step, *_contiguous_strides(x.shape[1:]))
        view = flat.as_strided(x.shape, strides, start)
        view.copy_(x)
        far.append(view)
        start += width
    return far


def _contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


__all__ = [
    "check_inputs_unchanged",
    "check_offsets",
    "check_out",
    "check_page_order",
    "check_poison",
    "check_strides",
    "check_visible_nan",
]
