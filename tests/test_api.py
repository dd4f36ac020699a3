"""The one-call form: dense, ragged and paged, eager and compiled."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import attn_backends as ab
from attn_backends.config import PROCESS

INF = float("inf")


@pytest.fixture(autouse=True)
def isolated() -> Iterator[None]:
    before = ab.configure(None)
    yield
    ab.configure(before)
    PROCESS.environment = None


def make(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def direct(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rules: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence by the definition: q [S, H, D], k [Sk, HK, D]; float64."""
    rows, keys, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scale = rules.get("sm_scale")
    s = torch.einsum("ihd,jhd->hij", q.double(), k)
    s = s * (q.shape[-1] ** -0.5 if scale is None else scale)
    if rules.get("softcap") is not None:
        s = rules["softcap"] * torch.tanh(s / rules["softcap"])
    place = torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)[None]  # distance back
    if rules.get("alibi_slopes") is not None:
        s = s - rules["alibi_slopes"].double()[:, None, None] * place.abs()
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if rules.get("causal"):
        seen &= place >= 0
    left, right = rules.get("window") or (None, None)
    if left is not None:
        seen &= place <= left
    if right is not None:
        seen &= -place <= right
    if rules.get("mask") is not None:
        seen &= rules["mask"]
    s = s.masked_fill(~seen, -INF)
    if rules.get("sinks") is not None:
        s = torch.cat([s, rules["sinks"].double()[:, None, None].expand(-1, rows, 1)], -1)
        v = torch.cat([v, torch.zeros(1, *v.shape[1:], dtype=torch.float64)])
    lse = s.logsumexp(-1)
    p = (s - lse.masked_fill(lse == -INF, 0.0)[..., None]).exp()
    return torch.einsum("hij,jhd->ihd", p, v), lse.T


def agree(state: Any, want: tuple[torch.Tensor, torch.Tensor]) -> None:
    o, lse = state
    assert not o.isnan().any() and not lse.isnan().any()
    torch.testing.assert_close(o.double(), want[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), want[1], atol=1e-5, rtol=1e-5)


RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "softcap": {"softcap": 3.0, "causal": True},
    "scale": {"sm_scale": 0.5},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0]), "causal": True},
    "causal-window": {"causal": True, "window": (3, 5)},
}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize(("rows", "keys"), [(5, 7), (1, 4), (6, 3), (1, 1)])
def test_dense_follows_every_rule(rules: dict[str, Any], rows: int, keys: int) -> None:
    q, k, v = make(2, rows, 4, 8), make(2, keys, 2, 8, seed=1), make(2, keys, 2, 12, seed=2)
    state = ab.attention(q, k, v, **rules)
    assert state.o.shape == (2, rows, 4, 12) and state.lse.shape == (2, rows, 4)
    for b in range(2):
        agree((state.o[b], state.lse[b]), direct(q[b], k[b], v[b], **rules))


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("rules", [RULES["plain"], RULES["causal"], RULES["alibi"]])
def test_dense_lengths_hide_padding(as_tensor: bool, rules: dict[str, Any]) -> None:
    q, k, v = make(3, 4, 4, 8), make(3, 6, 2, 8, seed=1), make(3, 6, 2, 8, seed=2)
    q_lens, kv_lens = [4, 0, 2], [3, 6, 0]
    for b in range(3):  # padding is never read
        q[b, q_lens[b] :] = k[b, kv_lens[b] :] = v[b, kv_lens[b] :] = float("nan")
    given: list[Any] = [torch.tensor(x) if as_tensor else x for x in (q_lens, kv_lens)]
    o, lse = ab.attention(q, k, v, q_lens=given[0], kv_lens=given[1], **rules)
    for b, (n, m) in enumerate(zip(q_lens, kv_lens)):
        agree((o[b, :n], lse[b, :n]), direct(q[b, :n], k[b, :m], v[b, :m], **rules))
        assert not o[b, n:].any() and (lse[b, n:] == -INF).all()
    only_keys = ab.attention(q.nan_to_num(), k, v, kv_lens=given[1], **rules)
    for b, m in enumerate(kv_lens):
        want = direct(q[b].nan_to_num(), k[b, :m], v[b, :m], **rules)
        agree((only_keys.o[b], only_keys.lse[b]), want)


@pytest.mark.parametrize("form", ["lens", "starts", "tensors", "mixed"])
def test_ragged_takes_lengths_or_starts(form: str) -> None:
    q_lens, kv_lens = [2, 0, 3, 1], [3, 2, 5, 0]
    q, k, v = make(6, 4, 8), make(10, 2, 8, seed=1), make(10, 2, 8, seed=2)
    q_starts, k_starts = [0, 2, 2, 5, 6], [0, 3, 5, 10, 10]
    arguments: dict[str, Any] = {
        "lens": {"q_lens": q_lens, "kv_lens": kv_lens},
        "starts": {"cu_seqlens_q": q_starts, "cu_seqlens_k": k_starts},
        "tensors": {
            "cu_seqlens_q": torch.tensor(q_starts, dtype=torch.int32),
            "cu_seqlens_k": torch.tensor(k_starts),
            "seqlens_k": torch.tensor(kv_lens),
        },
        "mixed": {"q_lens": torch.tensor(q_lens), "cu_seqlens_k": tuple(k_starts)},
    }[form]
    o, lse = ab.attention(q, k, v, causal=True, **arguments)
    for b in range(4):
        rows, keys = slice(q_starts[b], q_starts[b + 1]), slice(k_starts[b], k_starts[b + 1])
        agree((o[rows], lse[rows]), direct(q[rows], k[keys], v[keys], causal=True))


def test_ragged_without_lengths_is_one_sequence() -> None:
    q, k = make(3, 4, 8), make(5, 2, 8, seed=1)
    agree(ab.attention(q, k, k, causal=True), direct(q, k, k, causal=True))


def test_room_between_ragged_sequences_is_not_read() -> None:
    q, k = make(2, 4, 8), make(8, 2, 8, seed=1)
    k[2:5] = float("nan")
    o, lse = ab.attention(
        q, k, k, q_lens=[1, 1], cu_seqlens_k=[0, 5, 8], kv_lens=torch.tensor([2, 3])
    )
    agree((o[:1], lse[:1]), direct(q[:1], k[:2], k[:2]))
    agree((o[1:], lse[1:]), direct(q[1:], k[5:], k[5:]))


@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
@pytest.mark.parametrize("dense_q", [False, True])
def test_paged_finds_its_keys_through_the_table(page_size: int, dense_q: bool) -> None:
    kv_lens = [5, 0, 3]
    width = -(-5 // page_size)
    pages = torch.randperm(3 * width + 2, generator=torch.Generator().manual_seed(3))
    table = pages[: 3 * width].reshape(3, width)
    cache = torch.full((3 * width + 2, page_size, 2, 8), float("nan"))
    keys = [make(n, 2, 8, seed=n) for n in kv_lens]
    for b, rows in enumerate(keys):
        for j, row in enumerate(rows):
            cache[table[b, j // page_size], j % page_size] = row
    q = make(3, 2, 4, 8)
    for call in range(3):
        if call == 0:  # one query per sequence, no lengths needed
            o, lse = ab.attention(
                q[:, 0], cache, cache, page_table=table, kv_lens=kv_lens, causal=True
            )
            o, lse, rows = o[:, None], lse[:, None], 1
        elif dense_q:
            o, lse = ab.attention(q, cache, cache, page_table=table, seqlens_k=kv_lens, causal=True)
            rows = 2
        else:
            o, lse = ab.attention(
                q.flatten(0, 1),
                cache,
                cache,
                page_table=table,
                kv_lens=torch.tensor(kv_lens),
                q_lens=[2, 2, 2],
                causal=True,
            )
            o, lse, rows = o.view(3, 2, 4, 8), lse.view(3, 2, 4), 2
        for b in range(3):
            want = direct(q[b, :rows], keys[b], keys[b], causal=True)
            agree((o[b], lse[b]), want)


def test_paged_dense_queries_may_be_padded() -> None:
    cache = make(4, 2, 2, 8)
    table = torch.tensor([[2, 0], [1, 3]])
    q = make(2, 3, 4, 8)
    o, lse = ab.attention(
        q, cache, cache, page_table=table, q_lens=[1, 3], kv_lens=[3, 4], causal=True
    )
    keys = [cache[table[b]].flatten(0, 1)[:n] for b, n in enumerate((3, 4))]
    agree((o[0, :1], lse[0, :1]), direct(q[0, :1], keys[0], keys[0], causal=True))
    agree((o[1], lse[1]), direct(q[1], keys[1], keys[1], causal=True))
    assert not o[0, 1:].any() and (lse[0, 1:] == -INF).all()


@pytest.mark.parametrize("rows, keys", [(1, 1), (1, 5), (3, 5)])
def test_dense_masks_may_have_any_strides(rows: int, keys: int) -> None:
    q, k = make(2, rows, 4, 8, seed=1), make(2, keys, 2, 8, seed=2)
    mask = make(2, rows, keys, seed=3) > 0
    wide = torch.zeros(2, rows, 2 * keys, dtype=torch.bool)
    wide[..., ::2] = mask

    def same(given: torch.Tensor, as_this: torch.Tensor) -> bool:
        got, want = (ab.attention(q, k, k, mask=m) for m in (given, as_this.clone()))
        return torch.equal(got.o, want.o) and torch.equal(got.lse, want.lse)

    assert same(wide[..., ::2], mask)
    assert same(mask.mT.contiguous().mT, mask)
    assert same(mask[0], mask[:1].repeat(2, 1, 1))


def test_masks_come_in_the_shape_of_the_call() -> None:
    q, k = make(2, 3, 4, 8), make(2, 5, 2, 8, seed=1)
    mask = make(2, 3, 5, seed=4) > 0
    state = ab.attention(q, k, k, mask=mask)
    for b in range(2):
        agree((state.o[b], state.lse[b]), direct(q[b], k[b], k[b], mask=mask[b]))
    flat = ab.attention(q, k, k, mask=mask.flatten())
    assert torch.equal(flat.o, state.o)
    shared = ab.attention(q, k, k, mask=mask[0])
    agree((shared.o[1], shared.lse[1]), direct(q[1], k[1], k[1], mask=mask[0]))
    ragged = torch.cat([mask[0, :2, :4].flatten(), mask[1, :1, :5].flatten()])
    o, lse = ab.attention(q, k, k, mask=ragged, q_lens=[2, 1], kv_lens=[4, 5])
    agree((o[0, :2], lse[0, :2]), direct(q[0, :2], k[0, :4], k[0, :4], mask=mask[0, :2, :4]))
    agree((o[1, :1], lse[1, :1]), direct(q[1, :1], k[1], k[1], mask=mask[1, :1]))


def test_missing_values_are_the_first_lanes_of_the_keys() -> None:
    q, k = make(1, 2, 4, 8), make(1, 5, 1, 8, seed=1)
    state = ab.attention(q, k, head_dim_v=6)
    agree((state.o[0], state.lse[0]), direct(q[0], k[0], k[0, ..., :6]))
    assert ab.attention(q, k).o.shape == (1, 2, 4, 8)


def test_fp8_scales_are_applied() -> None:
    k = torch.tensor([0.0, 4.0]).to(torch.float8_e4m3fn)[None, :, None, None].expand(1, 2, 1, 64)
    v = torch.tensor([0.0, 2.0]).to(torch.float8_e4m3fn)[None, :, None, None].expand(1, 2, 1, 64)
    q = torch.zeros(1, 1, 1, 64)
    q[..., 0] = 1
    for scale in (0.5, torch.tensor(0.5)):
        o, lse = ab.attention(
            q, k.contiguous(), v.contiguous(), sm_scale=1.0, k_scale=scale, v_scale=scale
        )
        assert o[0, 0, 0, 0].item() == pytest.approx(0.880797, abs=1e-6)
        assert lse.item() == pytest.approx(2.126928, abs=1e-6)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
@pytest.mark.parametrize("keys", [0, 4])
def test_nothing_in_nothing_out(shape: tuple[int, int], keys: int) -> None:
    q, k = torch.zeros(*shape, 4, 8), torch.zeros(shape[0], keys, 2, 8)
    o, lse = ab.attention(q, k, k, causal=True)
    assert o.shape == (*shape, 4, 8) and lse.shape == (*shape, 4) and lse.dtype == torch.float32


def test_no_keys_give_the_empty_state() -> None:
    o, lse = ab.attention(torch.ones(2, 3, 4, 8), torch.ones(2, 0, 2, 8), torch.ones(2, 0, 2, 8))
    assert not o.any() and (lse == -INF).all()


def test_strided_views_give_the_same_bits() -> None:
    packed = make(2, 5, 4 + 2 + 2, 8)
    q, k, v = packed[:, :, :4], packed[:, :, 4:6], packed[:, :, 6:]
    kept = packed.clone()
    views = ab.attention(q, k, v, causal=True)
    copies = ab.attention(q.contiguous(), k.contiguous(), v.contiguous(), causal=True)
    assert torch.equal(views.o, copies.o) and torch.equal(views.lse, copies.lse)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(ab.attention(*heads_first, causal=True).o, copies.o)
    assert torch.equal(packed, kept)


@pytest.mark.parametrize("layout", ["contiguous", "rows", "heads_first"])
def test_out_is_written_and_returned(layout: str) -> None:
    q, k = make(2, 3, 4, 8), make(2, 5, 2, 8, seed=1)
    want = ab.attention(q, k, k)
    if layout == "contiguous":
        out = torch.full((2, 3, 4, 8), 7.0), torch.full((2, 3, 4), 7.0)
        around = None
    elif layout == "rows":  # sequences lie further apart than their rows: no flat view exists
        around = torch.full((2, 5, 4, 8), 7.0)
        out = around[:, 1:4], torch.full((2, 5, 4), 7.0)[:, 1:4]
    else:
        around = None
        out = torch.full((2, 4, 3, 8), 7.0).transpose(1, 2), torch.full((2, 3, 4), 7.0)
    state = ab.attention(q, k, k, out=out)
    assert state.o is out[0] and state.lse is out[1]
    assert torch.equal(out[0], want.o) and torch.equal(out[1], want.lse)
    if around is not None:
        assert (around[:, 0] == 7).all() and (around[:, 4] == 7).all()
    flat = torch.empty(6, 4, 8), torch.empty(6, 4)
    ragged = ab.attention(
        q.flatten(0, 1), k.flatten(0, 1), k.flatten(0, 1), q_lens=[3, 3], kv_lens=[5, 5], out=flat
    )
    assert ragged.o is flat[0] and torch.equal(flat[0], want.o.flatten(0, 1))


Q, K = torch.zeros(2, 3, 4, 8), torch.zeros(2, 5, 2, 8)
RAGGED_Q, RAGGED_K = Q.flatten(0, 1), K.flatten(0, 1)
TABLE = torch.tensor([[0], [1]])
WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "q is no tensor": ((1, K, K), {}, "q=int"),
    "q has two dims": ((Q[0, 0], K, K), {}, r"q.shape=\[4, 8\]"),
    "k is ragged": ((Q, RAGGED_K, RAGGED_K), {}, r"k.shape=\[10, 2, 8\]"),
    "v is shorter": ((Q, K, K[:, :4]), {}, r"v.shape=\[2, 4, 2, 8\]"),
    "another batch": ((Q, K[:1], K[:1]), {}, r"k.shape\[0\]=1"),
    "heads": ((Q, torch.zeros(2, 5, 3, 8), torch.zeros(2, 5, 3, 8)), {}, "num_kv_heads=3"),
    "width": ((Q, torch.zeros(2, 5, 2, 9), torch.zeros(2, 5, 2, 8)), {}, r"k.shape=\[10, 2, 9\]"),
    "k dtype": ((Q, K.half(), K.half()), {}, "kv_dtype=torch.float16"),
    "v dtype": ((Q, K, K.half()), {}, "v.dtype=torch.float16"),
    "device": ((Q, K.to("meta"), K), {}, "k.device=meta"),
    "softcap": ((Q, K, K), {"softcap": 0}, "softcap=0"),
    "sm_scale": ((Q, K, K), {"sm_scale": INF}, "sm_scale=inf"),
    "window": ((Q, K, K), {"window": (-2, 0)}, r"window=\(-2, 0\)"),
    "causal": ((Q, K, K), {"causal": 1}, "causal=1"),
    "sinks": ((Q, K, K), {"sinks": torch.zeros(3)}, r"sinks.shape=\[3\]"),
    "slopes": ((Q, K, K), {"alibi_slopes": torch.zeros(3)}, r"alibi_slopes.shape=\[3\]"),
    "mask shape": ((Q, K, K), {"mask": torch.ones(2, 5, 3).bool()}, r"mask.shape=\[2, 5, 3\]"),
    "mask dtype": ((Q, K, K), {"mask": torch.ones(3, 5)}, "mask.dtype=torch.float32"),
    "mask with lengths": (
        (Q, K, K),
        {"mask": torch.ones(3, 5).bool(), "kv_lens": [1, 2]},
        r"mask.shape=\[3, 5\]",
    ),
    "scale without fp8": ((Q, K, K), {"k_scale": 0.5}, "k_scale=0.5"),
    "q_lens count": ((Q, K, K), {"q_lens": [1]}, r"q_lens.shape=\[1\]"),
    "q_lens range": ((Q, K, K), {"q_lens": [1, 4]}, r"q_lens\[1\]=4 \(allowed: 0..3\)"),
    "kv_lens range": ((Q, K, K), {"kv_lens": [6, 1]}, r"kv_lens\[0\]=6 \(allowed: 0..5\)"),
    "negative": ((Q, K, K), {"seqlens_k": [-1, 1]}, r"seqlens_k\[0\]=-1"),
    "float lengths": ((Q, K, K), {"kv_lens": [1.0, 2]}, r"kv_lens\[0\]=1.0"),
    "float tensor": ((Q, K, K), {"kv_lens": torch.ones(2)}, "kv_lens.dtype=torch.float32"),
    "text": ((Q, K, K), {"kv_lens": "12"}, "kv_lens=str"),
    "said twice": ((Q, K, K), {"kv_lens": [1, 2], "seqlens_k": [1, 2]}, "kv_lens, seqlens_k=both"),
    "starts of dense q": ((Q, K, K), {"cu_seqlens_q": [0, 3, 6]}, "cu_seqlens_q=given"),
    "starts of dense k": ((Q, K, K), {"cu_seqlens_k": [0, 5, 10]}, "cu_seqlens_k=given"),
    "falling": (
        (RAGGED_Q, RAGGED_K, RAGGED_K),
        {"cu_seqlens_q": [0, 4, 2, 6], "kv_lens": [1, 1, 1]},
        r"cu_seqlens_q\[2\]=2",
    ),
    "not from 0": (
        (RAGGED_Q, RAGGED_K, RAGGED_K),
        {"cu_seqlens_q": [1, 6], "kv_lens": [10]},
        r"cu_seqlens_q\[0\]=1",
    ),
    "too few rows": (
        (RAGGED_Q, RAGGED_K, RAGGED_K),
        {"q_lens": [3, 2], "kv_lens": [5, 5]},
        r"q.shape\[0\]=6",
    ),
    "keys beyond": (
        (RAGGED_Q, RAGGED_K, RAGGED_K),
        {"q_lens": [3, 3], "cu_seqlens_k": [0, 5, 11]},
        r"k.shape\[0\]=10",
    ),
    "keys unsaid": ((RAGGED_Q, RAGGED_K, RAGGED_K), {"q_lens": [3, 3]}, "kv_lens=None"),
    "queries unsaid": ((RAGGED_Q, RAGGED_K, RAGGED_K), {"kv_lens": [5, 5]}, "q_lens=None"),
    "bound": ((Q, K, K), {"kv_lens": [5, 1], "max_seqlen_k": 4}, "max_seqlen_k=4"),
    "paged k": ((Q, RAGGED_K, RAGGED_K), {"page_table": TABLE, "kv_lens": [1, 1]}, "page_size"),
    "paged lengths": ((Q, K, K), {"page_table": TABLE}, "kv_lens=None"),
    "paged queries": ((RAGGED_Q, K, K), {"page_table": TABLE, "kv_lens": [1, 1]}, "q_lens=None"),
    "paged range": (
        (Q, K, K),
        {"page_table": TABLE, "kv_lens": [6, 1]},
        r"kv_lens\[0\]=6 \(allowed: 0..5\)",
    ),
    "page id": (
        (Q, K, K),
        {"page_table": torch.tensor([[0], [2]]), "kv_lens": [1, 1]},
        "page_table=2",
    ),
    "table dtype": ((Q, K, K), {"page_table": TABLE.float(), "kv_lens": [1, 1]}, "page_table="),
    "table and starts": (
        (Q, K, K),
        {"page_table": TABLE, "kv_lens": [1, 1], "cu_seqlens_k": [0, 1, 2]},
        "cu_seqlens_k=given",
    ),
    "value width": ((Q, K, K), {"head_dim_v": 4}, "head_dim_v=4"),
    "no pair": ((Q, K, K), {"out": Q}, "out=Tensor"),
    "out shape": ((Q, K, K), {"out": (RAGGED_Q, torch.zeros(2, 3, 4))}, r"out.o.shape"),
    "out lse": ((Q, K, K), {"out": (Q.clone(), torch.zeros(2, 4, 3))}, r"out.lse.shape"),
    "out dtype": ((Q, K, K), {"out": (Q.half(), torch.zeros(2, 3, 4))}, "out.o.dtype"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_input_is_refused_by_name(case: str) -> None:
    arguments, options, words = WRONG[case]
    with pytest.raises(ab.InvalidInputError, match=words):
        ab.attention(*arguments, **options)


def test_gradients_are_refused() -> None:
    q = Q.clone().requires_grad_()
    with pytest.raises(ab.InvalidInputError, match=r"q.requires_grad=True.*forward only"):
        ab.attention(q, K, K)
    with torch.no_grad():
        assert not ab.attention(q, K, K).o.requires_grad
    assert (
        ab.attention(q.detach(), torch.nn.Parameter(K, requires_grad=False), K).o.shape == Q.shape
    )


def test_the_choice_of_backend_is_that_of_select(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ab.UnknownBackendError):
        ab.attention(Q, K, K, backend="nope")
    denied = ab.AttentionConfig(deny=list(ab.ATTENTION_BACKENDS))
    with pytest.raises(ab.UnsupportedCallError, match="phase=prefill"):
        ab.attention(Q, K, K, config=denied)
    with pytest.raises(ab.UnsupportedCallError, match="phase=decode"):
        ab.attention(Q[:, :1], K, K, config=denied)
    monkeypatch.setenv("ATTN_BACKENDS_BACKEND", "nope")
    with pytest.raises(ab.UnknownBackendError):
        ab.attention(Q, K, K)


# ---- compiled


def compiled(call: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    """``call`` compiled whole, and a list that grows with every compilation."""
    graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(len(inputs))
        return graph.forward

    torch._dynamo.reset()
    return torch.compile(call, fullgraph=True, dynamic=True, backend=backend), graphs


def same(got: Any, want: Any) -> None:
    for a, b in zip(got, want):
        assert torch.equal(a, b)
        assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()


# F30
def test_dense_compiles_once_for_all_lengths() -> None:
    def call(packed: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return ab.attention(packed[:, :, :4], k, v, causal=True, window=(5, None))

    fast, graphs = compiled(call)
    for rows, keys in ((7, 9), (64, 70), (5, 3), (11, 100)):
        inputs = make(2, rows, 6, 8), make(2, keys, 2, 8, seed=1), make(2, keys, 2, 12, seed=2)
        same(fast(*inputs), call(*inputs))
    assert len(graphs) == 1
    one = make(2, 1, 6, 8), make(2, 9, 2, 8, seed=1), make(2, 9, 2, 12, seed=2)
    same(fast(*one), call(*one))  # torch gives size 1 a graph of its own
    assert len(graphs) <= 2


def test_ragged_compiles_once_for_all_lengths() -> None:
    def call(q: torch.Tensor, k: torch.Tensor, starts: torch.Tensor, lens: torch.Tensor) -> Any:
        return ab.attention(
            q, k, k, causal=True, cu_seqlens_q=starts, cu_seqlens_k=starts, seqlens_k=lens
        )

    fast, graphs = compiled(call)
    # The first sizes differ from each other: torch takes equal ones for the same symbol.
    for q_lens in ([9, 3, 1, 0, 4], [2, 3], [7, 0, 4], [1, 1, 1, 1], [60, 4]):
        lens = torch.tensor(q_lens)
        starts = torch.tensor([0, *itertools.accumulate(q_lens)], dtype=torch.int32)
        total = sum(q_lens)
        inputs = make(total, 4, 8), make(total, 2, 8, seed=1), starts, lens
        same(fast(*inputs), call(*inputs))
    assert len(graphs) == 1


def test_paged_compiles_once_for_all_lengths() -> None:
    def call(q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lens: torch.Tensor) -> Any:
        return ab.attention(q, cache, cache, page_table=table, seqlens_k=lens, causal=True)

    fast, graphs = compiled(call)
    cache = make(17, 4, 2, 8)
    for kv_lens, width in (([3, 8, 0, 1, 2], 3), ([1, 0, 11], 3), ([4, 4], 4)):
        table = torch.arange(len(kv_lens) * width).reshape(len(kv_lens), width)
        inputs = make(len(kv_lens), 4, 8), cache, table, torch.tensor(kv_lens)
        same(fast(*inputs), call(*inputs))
    assert len(graphs) == 1


def test_every_option_survives_compilation() -> None:
    slopes, sinks = torch.tensor([0.5, 0.25, 0.1, 0.0]), torch.tensor([0.5, -1.0, 2.0, 0.0])
    mask = make(2, 3, 5, seed=4) > 0
    q, k, v = make(2, 3, 4, 8), make(2, 5, 2, 8, seed=1), make(2, 5, 2, 12, seed=2)
    lens = torch.tensor([2, 3]), torch.tensor([5, 1])
    eighth = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    calls: list[Callable[[], Any]] = [
        lambda: ab.attention(q, k, v, softcap=3.0, sm_scale=0.5, alibi_slopes=slopes),
        lambda: ab.attention(q, k, v, sinks=sinks, mask=mask, batch_invariant=True),
        lambda: ab.attention(q, k, v, q_lens=lens[0], kv_lens=lens[1], causal=True),
        lambda: ab.attention(q, k, head_dim_v=6, window=(1, 1), max_seqlen_k=9),
        lambda: ab.attention(q, *eighth, k_scale=0.5, v_scale=sinks[2]),
        lambda: ab.attention(q, k, v, q_lens=[1, 2], kv_lens=[5, 4]),
        lambda: ab.attention(
            q, k, v, out=(torch.zeros(2, 4, 3, 12).transpose(1, 2), torch.zeros(2, 3, 4))
        ),
        lambda: ab.attention(q, k, v, config=ab_config, backend="torch_native"),
    ]
    ab_config = ab.AttentionConfig(options={"torch_native": {"tile_k": 2}})
    for call in calls:
        fast, _ = compiled(call)
        same(fast(), call())


def test_settings_that_change_after_compilation_are_honoured() -> None:
    fast, graphs = compiled(lambda: ab.attention(Q, K, K))
    fast()
    ab.configure(ab.AttentionConfig(deny=list(ab.ATTENTION_BACKENDS)))
    with pytest.raises(ab.UnsupportedCallError):
        fast()
    ab.configure(None)
    fast()
    with ab.use("torch_native"):
        fast()
    assert len(graphs) == 1


def test_a_config_is_not_taken_for_another_after_compilation() -> None:
    fast, _ = compiled(lambda c: ab.attention(Q, K, K, config=c))
    fast(ab.AttentionConfig())
    with pytest.raises(ab.UnsupportedCallError):
        fast(ab.AttentionConfig(deny=list(ab.ATTENTION_BACKENDS)))
    fast(ab.AttentionConfig(backend="torch_native"))


def test_a_graph_around_it_is_functionalised_to_the_eager_result() -> None:
    def call(q: torch.Tensor, k: torch.Tensor) -> Any:
        o, lse = ab.attention(q.transpose(1, 2) * 1.0, k, k, causal=True)
        return o * 2, lse

    torch._dynamo.reset()
    fast = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (7, 12):
        inputs = make(2, 4, rows, 8), make(2, 15, 2, 8, seed=1)
        for a, b in zip(fast(*inputs), call(*inputs)):
            torch.testing.assert_close(a, b)
            assert a.dtype == b.dtype


OP_CASES: dict[str, dict[str, Any]] = {
    "ragged": {},
    "sinks-softcap": {"sinks": torch.zeros(4), "softcap": 3.0, "causal": True},
    "alibi-window": {"alibi_slopes": torch.ones(4), "window": (2, None)},
    "paged": {"paged": True},
    "mask": {"mask": torch.ones(4 * 5 + 2 * 3, dtype=torch.bool)},
    "half": {"dtype": torch.float16},
}


@pytest.mark.parametrize("case", OP_CASES)
def test_the_operator_passes_opcheck(case: str) -> None:
    from attn_backends import ops  # noqa: F401  (registers the operator)

    options = dict(OP_CASES[case])
    dtype = options.pop("dtype", torch.float32)
    paged = options.pop("paged", False)
    left, right = options.pop("window", (None, None))
    packed = make(6, 6, 8).to(dtype)
    k = make(3, 4, 2, 8, seed=1).to(dtype) if paged else make(8, 2, 8, seed=1).to(dtype)
    arguments = (
        packed[:, :4],
        k,
        k[..., :6],
        torch.tensor([0, 4, 6]),
        torch.tensor([5, 3]),
        None if paged else torch.tensor([0, 5, 8]),
        torch.tensor([[0, 2], [1, 1]]) if paged else None,
        4,
        5,
        6,
        options.get("causal", False),
        left,
        right,
        options.get("softcap"),
        None,
        False,
        options.get("sinks"),
        options.get("alibi_slopes"),
        options.get("mask"),
        None,
        None,
        None,
        None,
        None,
        None,
    )
    torch.library.opcheck(torch.ops.attn_backends.attention.default, arguments)


@pytest.mark.gpu
def test_lengths_on_the_device_are_not_read_back() -> None:
    q, k = make(6, 4, 64).cuda().bfloat16(), make(10, 2, 64, seed=1).cuda().bfloat16()
    starts = torch.tensor([0, 2, 6], device="cuda"), torch.tensor([0, 3, 10], device="cuda")
    call = lambda: ab.attention(  # noqa: E731
        q, k, k, causal=True, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], backend="triton"
    )
    want = call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        state = call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(state.o, want.o)
    host = ab.attention(q, k, k, causal=True, q_lens=[2, 4], kv_lens=[3, 7], backend="torch_native")
    torch.testing.assert_close(state.o, host.o, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(state.lse, host.lse, atol=1e-3, rtol=1e-3)


@pytest.mark.gpu
def test_the_compiled_call_equals_the_eager_one_on_a_gpu() -> None:
    def call(q: torch.Tensor, k: torch.Tensor) -> Any:
        return ab.attention(q, k, k, causal=True)

    torch._dynamo.reset()
    fast = torch.compile(call, fullgraph=True, dynamic=True)
    for rows in (7, 64):
        q = make(2, rows, 4, 64).cuda().bfloat16()
        k = make(2, rows + 3, 2, 64, seed=1).cuda().bfloat16()
        for a, b in zip(fast(q, k), call(q, k)):
            assert torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype
