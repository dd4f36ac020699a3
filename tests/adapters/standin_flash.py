"""Stand-ins of the FlashAttention packages: their signatures, conventions and traps, in torch.

Every function takes keywords only, so that a call by position fails here.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import torch
from standin_kernel import attend, pages

INF = float("inf")


def _fa2_bounds(window: tuple[int, int], causal: bool, max_k: int) -> tuple[int, int]:
    """FlashAttention 2 rewrites its window by the longest key count."""
    left, right = window
    left, right = (-1 if left >= max_k else left), (-1 if right >= max_k else right)
    if causal:
        right = 0
    if left < 0 <= right and not (causal and left < 0):
        left = max_k
    if right < 0 <= left:
        right = max_k
    return left, right


def _none(bound: int) -> int | None:
    return None if bound < 0 else bound


def _alibi(slopes: torch.Tensor | None, q_len: int, kv_len: int, causal_kernel: bool):
    if slopes is None:
        return None
    i = torch.arange(q_len)[:, None] + kv_len - q_len
    j = torch.arange(kv_len)[None, :]
    if causal_kernel:
        return slopes[:, None, None] * j  # the same softmax, another LSE
    return -slopes[:, None, None] * (i - j).abs()


def _check_half(q, k, v, multiple=8, high=256):
    assert q.dtype in (torch.float16, torch.bfloat16) and q.dtype == k.dtype == v.dtype
    for x in (q, k, v):
        assert x.stride(-1) == 1 and x.shape[-1] % multiple == 0 and x.shape[-1] <= high, x.shape
        assert x.data_ptr() % 16 == 0
        for size, stride in zip(x.shape[:-1], x.stride()[:-1]):
            assert size <= 1 or stride * x.element_size() % 16 == 0, "rows of 16 bytes"


def _fa2_varlen(
    q, k, v, cu_q, starts_k, lengths, max_q, max_k, scale, causal, window, softcap, slopes, table
):
    """One body for both varlen entry points. Returns o [T, H, D], lse [H, T]."""
    _check_half(q, k, v)
    assert q.shape[-1] == k.shape[-1] == v.shape[-1], "one width for all"
    num = len(cu_q) - 1
    assert num > 0, "batch size must be positive"
    q_lens = cu_q.diff().tolist()
    assert max_q >= max(q_lens) and max_k >= max(lengths)
    left, right = _fa2_bounds(window, causal, max_k)
    swapped = max_q == 1 and q.shape[1] > k.shape[-2] and left < 0 and right <= 0 and slopes is None
    if swapped:
        assert all(n == 1 for n in q_lens), "shape is invalid for input"
        assert table is None, "the LSE of one-query batches over pages comes back permuted"
    o = torch.full((q.shape[0], q.shape[1], v.shape[-1]), float("nan"), dtype=q.dtype)
    lse = torch.full((q.shape[1], q.shape[0]), float("nan"))
    for b in range(num):
        rows = slice(int(cu_q[b]), int(cu_q[b + 1]))
        n = lengths[b]
        if table is None:
            keys, values = k[starts_k[b] : starts_k[b] + n], v[starts_k[b] : starts_k[b] + n]
        else:
            keys, values = pages(k, table[b], n), pages(v, table[b], n)
        causal_kernel = left < 0 and right == 0
        bias = _alibi(slopes, q_lens[b], n, causal_kernel)
        got, own = attend(
            q[rows], keys, values,
            scale=scale, left=_none(left), right=_none(right), softcap=softcap, bias=bias,
        )  # fmt: skip
        if table is not None and q_lens[b]:
            assert not bool((own == -INF).all(dim=-1)[0]), "a tile without keys writes astray"
        lse[:, rows] = torch.where(own == -INF, INF, own).T
        o[rows] = got.to(o.dtype)
    return o, lse


def flash_attn_2(page_multiple: int = 256, *, operators: bool = False) -> ModuleType:
    """``flash_attn`` 2.8; with ``operators`` also what lies beneath its varlen function."""
    module = ModuleType("flash_attn")
    module.__version__ = "2.8.3"
    module.calls = []

    def flash_attn_varlen_func(
        *, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
        softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
        deterministic=False, return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        module.calls.append("varlen")
        if block_table is not None:
            assert k.shape[1] % page_multiple == 0
        lengths = cu_seqlens_k.diff().tolist()
        o, lse = _fa2_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k.tolist(), lengths, max_seqlen_q, max_seqlen_k,
            softmax_scale, causal, window_size, softcap, alibi_slopes, block_table,
        )  # fmt: skip
        return (o, lse, None) if return_attn_probs else o

    def flash_attn_with_kvcache(
        *, q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None,
        cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None,
        softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
    ):  # fmt: skip
        module.calls.append("kvcache")
        _check_half(q, k_cache, v_cache)
        assert isinstance(cache_seqlens, torch.Tensor) and k_cache.shape[1] % page_multiple == 0
        room = block_table.shape[1] * k_cache.shape[1]
        left, right = _fa2_bounds(window_size, causal, room)
        o = torch.empty(*q.shape[:3], v_cache.shape[-1], dtype=q.dtype)
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1])
        for b, n in enumerate(cache_seqlens.tolist()):
            causal_kernel = left < 0 and right == 0
            bias = _alibi(alibi_slopes, q.shape[1], n, causal_kernel)
            got, own = attend(
                q[b], pages(k_cache, block_table[b], n), pages(v_cache, block_table[b], n),
                scale=softmax_scale, left=_none(left), right=_none(right), softcap=softcap,
                bias=bias,
            )  # fmt: skip
            o[b], lse[b] = got.to(o.dtype), torch.where(own == -INF, INF, own).T
        return (o, lse) if return_softmax_lse else o

    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    if operators:
        module.flash_attn_interface = ModuleType("flash_attn.flash_attn_interface")
        module.flash_attn_interface._flash_attn_varlen_forward = _fa2_operator
    return module


@torch.library.custom_op("standin_flash_attn::_flash_attn_varlen_forward", mutates_args=())
def _fa2_operator(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
    softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None, return_softmax: bool = False,
    block_table: torch.Tensor | None = None, leftpad_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None, zero_tensors: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    OPERATOR_CALLS.append("ragged" if block_table is None else "paged")
    assert dropout_p == 0.0 and leftpad_k is seqused_k is None and not return_softmax
    o, lse = _fa2_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k.tolist(), cu_seqlens_k.diff().tolist(), max_seqlen_q,
        max_seqlen_k, softmax_scale, causal, (window_size_left, window_size_right), softcap,
        alibi_slopes, block_table,
    )  # fmt: skip
    return o, lse, q.new_empty(0), q.new_empty(0)


def _fa3_body(
    q, k, v, cu_q, starts_k, lengths, scale, causal, window, softcap, table, qv, k_scale, v_scale,
    whole_pages,
):  # fmt: skip
    fp8 = q.dtype == torch.float8_e4m3fn
    assert q.dtype == k.dtype == v.dtype
    d, dv = q.shape[-1], v.shape[-1]
    assert d % (16 if fp8 else 8) == 0 and d <= 256, f"head_size {d}"
    wide = qv is not None or d <= 64 < dv <= 512 or (128 < d <= 192 and 96 < dv <= 128)
    assert d == dv or wide, f"{d}/{dv}"
    left, right = window
    if causal:
        right = 0
    o = torch.full((q.shape[0], q.shape[1], dv), float("nan"))
    lse = torch.full((q.shape[1], q.shape[0]), float("nan"))
    no_keys = k.shape[0] == 0
    for b in range(len(cu_q) - 1):
        rows, n = slice(int(cu_q[b]), int(cu_q[b + 1])), lengths[b]
        if table is None:
            keys, values = k[starts_k[b] : starts_k[b] + n], v[starts_k[b] : starts_k[b] + n]
        else:
            keys, values = pages(k, table[b], n), pages(v, table[b], n)
        queries = q[rows].float()
        keys, values = keys.float(), values.float()
        if qv is not None:
            queries = torch.cat([queries, qv[rows].float()], dim=-1)
            keys = torch.cat([keys, values], dim=-1)
        if k_scale is not None:
            keys = keys * k_scale[b][:, None]
        if v_scale is not None:
            values = values * v_scale[b][:, None]
        got, own = attend(
            queries, keys, values,
            scale=scale, left=_none(left), right=_none(right), softcap=softcap,
        )  # fmt: skip
        if whole_pages and n and rows.stop > rows.start:
            tail = pages(v, table[b], -(-n // v.shape[1]) * v.shape[1])[n:].float()
            got = got + 0 * tail.sum()
        o[rows], lse[:, rows] = got, own.T
    if no_keys:
        lse.fill_(INF)
    return o.to(torch.bfloat16 if fp8 else q.dtype), lse


def flash_attn_3(
    flags: dict[str, bool] | None = None, *, operators: bool = False
) -> tuple[ModuleType, ModuleType]:
    """``flash_attn_interface`` and ``flash_attn_config``; ``operators`` as for version 2."""
    module, config = ModuleType("flash_attn_interface"), ModuleType("flash_attn_config")
    module.__version__ = "3.0.0"
    config.CONFIG = {"build_flags": flags or {}}
    module.calls = []

    def flash_attn_varlen_func(
        *, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
        seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
        v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
        pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
    ):  # fmt: skip
        module.calls.append(("varlen", max_seqlen_q, num_splits))
        assert max_seqlen_q >= max(cu_seqlens_q.diff().tolist())
        lengths = (cu_seqlens_k.diff() if seqused_k is None else seqused_k).tolist()
        o, lse = _fa3_body(
            q, k, v, cu_seqlens_q, cu_seqlens_k.tolist(), lengths, softmax_scale, causal,
            window_size, softcap, None, qv, k_descale, v_descale, False,
        )  # fmt: skip
        return (o, lse) if return_attn_probs else o

    def flash_attn_with_kvcache(
        *, q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
        cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None,
        cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
        q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
        return_softmax_lse=False,
    ):  # fmt: skip
        module.calls.append(("kvcache", max_seqlen_q, num_splits))
        assert max_seqlen_q is not None and cache_seqlens.dtype == torch.int32
        o, lse = _fa3_body(
            q, k_cache, v_cache, cu_seqlens_q, None, cache_seqlens.tolist(), softmax_scale, causal,
            window_size, softcap, page_table, qv, k_descale, v_descale,
            k_cache.shape[1] % 128 == 0 and cache_leftpad is None,
        )  # fmt: skip
        nothing = torch.tensor([])
        return (o, lse, nothing, nothing) if return_softmax_lse else o

    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    if operators:
        module.flash_attn_3_gpu = _FA3_OPERATORS
    return module, config


#: The schema of FlashAttention 3's operator, without the aliases of outputs.
_FA3_SCHEMA = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? v_new=None, Tensor? q_v=None, "
    "Tensor? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
    "int? max_seqlen_q=None, int? max_seqlen_k=None, Tensor? page_table=None, "
    "Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, "
    "Tensor? k_descale=None, Tensor? v_descale=None, float? softmax_scale=None, "
    "bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    "int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False, "
    "Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0, "
    "Tensor? sinks=None) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _fa3_operator(*args, schema, **kwargs):
    given = {x.name: x.default_value for x in schema.arguments[3:]}
    given |= dict(zip(given, args[3:]), **kwargs)  # torch leaves out what equals a default
    absent = ("k_new", "v_new", "q_v", "out", "seqused_q", "kv_batch_idx", "scheduler_metadata")
    assert all(given[name] is None for name in absent) and not given["sm_margin"]
    assert given.get("cp_world_size", 1) == 1 and not given.get("cp_rank")
    q, k, v = args[:3]
    starts, lengths, table = given["cu_seqlens_k"], given["seqused_k"], given["page_table"]
    OPERATOR_CALLS.append("paged" if starts is None else "ragged")
    o, lse = _fa3_body(
        q, k, v, given["cu_seqlens_q"], None if starts is None else starts.tolist(),
        (starts.diff() if lengths is None else lengths).tolist(), given["softmax_scale"],
        given["is_causal"], (given["window_size_left"], given["window_size_right"]),
        given["softcap"], table, None, given["k_descale"], given["v_descale"],
        table is not None and k.shape[1] % 128 == 0 and given["leftpad_k"] is None,
    )  # fmt: skip
    return o, lse, q.new_empty(0, dtype=torch.float32), q.new_empty(0, dtype=torch.float32)


#: Those of vLLM 0.20, which have no defaults.
_VLLM_FA2_SCHEMA = (
    "varlen_fwd(Tensor q, Tensor k, Tensor v, Tensor? out, Tensor cu_seqlens_q, "
    "Tensor cu_seqlens_k, Tensor? seqused_k, Tensor? leftpad_k, Tensor? block_table, "
    "Tensor? alibi_slopes, int max_seqlen_q, int max_seqlen_k, float p_dropout, "
    "float softmax_scale, bool zero_tensors, bool is_causal, int window_size_left, "
    "int window_size_right, float softcap, bool return_softmax, int num_splits, Generator? gen) "
    "-> Tensor[]"
)
_VLLM_FA3_SCHEMA = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor? out, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, "
    "Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, "
    "Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, "
    "Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "float softmax_scale, bool is_causal, int window_size_left, int window_size_right, "
    "float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, "
    "bool? pack_gqa, int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, "
    "Tensor? cp_tot_seqused_k) -> Tensor[]"
)


def _vllm_fa2_operator(
    q, k, v, out, cu_q, cu_k, used_k, leftpad, table, slopes, max_q, max_k, dropout, scale, zero,
    causal, left, right, softcap, return_softmax, num_splits, gen,
):  # fmt: skip
    assert out is leftpad is gen is None and not (zero or return_softmax or dropout or num_splits)
    OPERATOR_CALLS.append("ragged" if table is None else "paged")
    lengths = (cu_k.diff() if used_k is None else used_k).tolist()
    o, lse = _fa2_varlen(
        q, k, v, cu_q, cu_k.tolist(), lengths, max_q, max_k, scale, causal, (left, right), softcap,
        slopes, table,
    )  # fmt: skip
    return [o, lse]


def _define(schema, function):
    """An operator of a schema; Python functions are told theirs."""
    namespace = f"standin_{function.__name__}_{len(_LIBRARIES)}"
    library = torch.library.Library(namespace, "DEF")
    _LIBRARIES.append(library)  # its end would be the operator's
    library.define(schema)
    name = schema.split("(")[0]
    operator = getattr(getattr(torch.ops, namespace), name)
    if function is _fa3_operator:
        known = operator.default._schema
        whole = _VLLM_FA3_SCHEMA is schema

        def call(*args, **kwargs):
            found = function(*args, schema=known, **kwargs)
            return list(found) if whole else found

        library.impl(name, call, "CompositeExplicitAutograd")
    else:
        library.impl(name, function, "CompositeExplicitAutograd")
    return operator


#: What operators were called for.
OPERATOR_CALLS: list[str] = []
_LIBRARIES: list[torch.library.Library] = []
_FA3_OPERATORS = SimpleNamespace(fwd=_define(_FA3_SCHEMA, _fa3_operator))
VLLM_OPERATORS = {
    2: _define(_VLLM_FA2_SCHEMA, _vllm_fa2_operator).default,
    3: _define(_VLLM_FA3_SCHEMA, _fa3_operator).default,
}


def flash_attn_4(*, operators: bool = False) -> ModuleType:
    """``flash_attn.cute``: -1 is a literal bound, and the LSE is ``[H, T]``."""
    module = ModuleType("flash_attn.cute")

    def flash_attn_varlen_func(
        *, q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
        max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None,
        gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False,
        window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
        deterministic=False, return_lse=False,
    ):  # fmt: skip
        _check_half(q, k, v, high=128)
        assert all(bound is None or bound >= 0 for bound in window_size), "a literal bound"
        window = tuple(-1 if bound is None else bound for bound in window_size)
        assert page_table is None or cu_seqlens_k is None
        if page_table is not None and k.shape[1] < 64:
            assert q.shape[-1] % 16 == 0 == v.shape[-1] % 16, "irregular head dim"
        lengths = (cu_seqlens_k.diff() if seqused_k is None else seqused_k).tolist()
        starts = None if cu_seqlens_k is None else cu_seqlens_k.tolist()
        o = torch.full((q.shape[0], q.shape[1], v.shape[-1]), float("nan"), dtype=q.dtype)
        lse = torch.full((q.shape[1], q.shape[0]), float("nan"))
        for b, n in enumerate(lengths):
            rows = slice(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
            if page_table is None:
                keys, values = k[starts[b] : starts[b] + n], v[starts[b] : starts[b] + n]
            else:
                keys, values = pages(k, page_table[b], n), pages(v, page_table[b], n)
            left, right = window
            got, own = attend(
                q[rows], keys, values, scale=softmax_scale, left=_none(left),
                right=0 if causal else _none(right), softcap=softcap,
            )  # fmt: skip
            o[rows], lse[:, rows] = got.to(o.dtype), own.T
        return o, (lse if return_lse else None)

    def _flash_attn_fwd(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
        max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None,
        softmax_scale=None, causal=False, softcap=None, window_size_left=None,
        window_size_right=None, learnable_sink=None, tile_mn=None, num_threads=384, num_splits=1,
        return_lse=False, out=None,
    ):  # fmt: skip
        assert tile_mn is out is None and num_threads == 384
        OPERATOR_CALLS.append("ragged" if page_table is None else "paged")
        o, lse = flash_attn_varlen_func(
            q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            seqused_k=seqused_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
            page_table=page_table, softmax_scale=softmax_scale, causal=causal, softcap=softcap,
            window_size=(window_size_left, window_size_right), num_splits=num_splits,
            return_lse=return_lse,
        )  # fmt: skip
        return o, lse, None, None, None

    module.flash_attn_varlen_func = flash_attn_varlen_func
    if operators:
        module.interface = SimpleNamespace(_flash_attn_fwd=_flash_attn_fwd)
    return module


def vllm() -> dict[str, ModuleType]:
    """``vllm.vllm_flash_attn`` with its FlashAttention 2 and 3."""
    names = ("vllm", "vllm.vllm_flash_attn", "vllm.vllm_flash_attn.flash_attn_interface")
    top, module, interface = (ModuleType(name) for name in names)
    top.__version__, top.__path__, module.__path__ = "0.20.0", [], []
    for version in (2, 3):
        setattr(interface, f"FA{version}_AVAILABLE", True)
        setattr(interface, f"FA{version}_UNAVAILABLE_REASON", None)

    def flash_attn_varlen_func(
        *, q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None,
        q_v=None, dropout_p=0.0, softmax_scale=None, causal=False, window_size=None, softcap=0.0,
        alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None,
        return_softmax_lse=False, out=None, scheduler_metadata=None, q_descale=None,
        k_descale=None, v_descale=None, num_splits=0, fa_version=2, s_aux=None,
    ):  # fmt: skip
        assert (cu_seqlens_k is None) != (seqused_k is None)
        assert block_table is None or seqused_k is not None
        lengths = (cu_seqlens_k.diff() if seqused_k is None else seqused_k).tolist()
        starts = None if cu_seqlens_k is None else cu_seqlens_k.tolist()
        window = (-1, -1) if window_size is None else tuple(window_size)
        if fa_version == 2:
            assert (num_splits <= 1 and block_table is None) or k.shape[1] % 16 == 0
            o, lse = _fa2_varlen(
                q, k, v, cu_seqlens_q, starts, lengths, max_seqlen_q, max_seqlen_k, softmax_scale,
                causal, window, softcap, alibi_slopes, block_table,
            )  # fmt: skip
        else:
            assert alibi_slopes is None
            o, lse = _fa3_body(
                q, k, v, cu_seqlens_q, starts, lengths, softmax_scale, causal, window, softcap,
                block_table, q_v, k_descale, v_descale,
                block_table is not None and k.shape[1] % 128 == 0,
            )  # fmt: skip
        return (o, lse) if return_softmax_lse else o

    module.flash_attn_varlen_func = flash_attn_varlen_func
    return dict(zip(names, (top, module, interface)))
