"""Continuous batching (``generate_batch``) gives the tokens of one request at a time."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import continuous_api

from attn_backends import (
    AttentionConfig,
    BackendUnavailableError,
    InvalidInputError,
    UnsupportedCallError,
    configure,
    register_attention_backend,
)
from attn_backends.capabilities import IntSet
from attn_backends.cli.generation import recorded_choices
from attn_backends.engines.transformers import attention as plug
from attn_backends.engines.transformers import enable, paged
from attn_backends.engines.transformers.attention import Attention
from attn_backends.engines.transformers.packed import PackedLengths, update_cache
from attn_backends.engines.transformers.paged import ARGUMENT, Pages, page_table

NEW = 4
PAGE = 8
HAS_INFERENCE_MODE = "use_inference_mode" in inspect.getsource(continuous_api)  # after 5.20
HAS_PAGED_NAMES = "paged|sdpa" in AttentionInterface._global_mapping  # until 5.18
SINKS = {"gemma2": "paged|eager", "gpt_oss": "paged|eager"}  # sdpa has no softcap and no sinks
FULL = {"llama": 1.0, "mistral": 0.0, "qwen3": 0.5, "gemma2": 0.5, "gemma3": 0.5, "gpt_oss": 0.5}


def batch(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """The new tokens of each prompt; 16 tokens a step, so prompts are cut and joined by decodes."""
    config = ContinuousBatchingConfig(block_size=PAGE, num_blocks=64, max_batch_tokens=16)
    if hasattr(config, "auto_switch_to_flash"):
        config.auto_switch_to_flash = False
    settings = GenerationConfig(
        max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    out = model.generate_batch(
        prompts,
        generation_config=settings,
        continuous_batching_config=config,
        progress_bar=False,
    )
    order = sorted(out, key=lambda request: int(request.rsplit("_", 1)[1]))
    assert not any(out[request].error for request in order)
    return [list(out[request].generated_tokens) for request in order]


def one_by_one(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy decoding by eager attention, without generate()."""
    answers = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(NEW):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        answers.append(ids[len(prompt) :])
    return answers


@pytest.fixture
def prompts(tokens) -> list[list[int]]:
    """Four lengths, and two prompts that begin with the same two pages."""
    shared = tokens(2 * PAGE, seed=3).tolist()
    lengths = [tokens(length, seed=length).tolist() for length in (5, 19, 1, 3)]
    return [*lengths, [*shared, 7, 9], [*shared, 8]]


@pytest.fixture
def calls(monkeypatch) -> list[PackedLengths]:
    """The lengths of every call of the plug."""
    seen: list[PackedLengths] = []
    make = plug.packed_lengths

    def spy(*arguments: Any) -> Any:
        seen.append(made := make(*arguments))
        return made

    monkeypatch.setattr(plug, "packed_lengths", spy)
    return seen


@pytest.fixture
def gathers(monkeypatch) -> list[int]:
    """Keys that transformers copied out of its cache."""
    seen: list[int] = []
    select = torch.index_select

    def spy(x: torch.Tensor, dim: int, index: torch.Tensor, **more: Any) -> torch.Tensor:
        seen.append(index.numel())
        return select(x, dim, index, **more)

    monkeypatch.setattr(torch, "index_select", spy)
    return seen


@pytest.mark.parametrize(
    "name, read_pages", [*((name, True) for name in FULL), ("llama", False), ("gpt_oss", False)]
)
def test_overridden_names_give_the_tokens_of_eager(
    model_of, prompts, calls, gathers, name, read_pages
):
    want = one_by_one(model_of(name), prompts)
    override = SINKS.get(name, "sdpa")
    with enable(backend="torch_native", override=(override,), paged=read_pages) as handle:
        assert handle.paged == read_pages
        got = batch(model_of(name, override.removeprefix("paged|")), prompts)
    assert got == want
    assert len({token for answer in got for token in answer}) > 5
    assert calls and all(lengths.paged for lengths in calls)
    # A step without earlier keys needs neither pages nor a copy.
    with_pages = [lengths for lengths in calls if lengths.page_size == PAGE]
    if read_pages and FULL[name]:
        assert all(lengths.sliding_window is None for lengths in with_pages)
        assert 0.25 * FULL[name] < len(with_pages) / len(calls) <= FULL[name]
    else:
        assert not with_pages
    assert bool(gathers) == (not read_pages or FULL[name] < 1)


def test_our_own_name_works_where_the_release_has_paged_names(model_of, prompts, calls, gathers):
    with enable(backend="torch_native") as handle:
        model = model_of("llama", handle.name)
        if HAS_PAGED_NAMES:
            assert batch(model, prompts) == one_by_one(model_of("llama"), prompts)
            assert any(lengths.page_size == PAGE for lengths in calls) and not gathers
        else:
            with pytest.raises(ValueError, match="not supported for continuous batching"):
                batch(model, prompts)
    assert not any("attn_backends" in name for name in AttentionInterface._global_mapping)


def test_the_triton_kernels_read_the_pages(model_of, prompts, calls):
    pytest.importorskip("triton")
    with enable(backend="triton", override=("sdpa",)):
        got = batch(model_of("llama", "sdpa"), prompts[:2])
    assert got == one_by_one(model_of("llama"), prompts[:2])
    read = {lengths.max_q_len for lengths in calls if lengths.page_size == PAGE}
    assert 1 in read and max(read) > 1  # decode, and a chunk behind earlier keys


def test_prefill_and_decode_take_the_backends_of_the_configuration(model_of, prompts):
    before = configure(AttentionConfig(prefill="torch_native", decode="torch_sdpa"))
    try:
        with enable(override=("sdpa",)), recorded_choices() as choices:
            got = batch(model_of("llama", "sdpa"), prompts)
    finally:
        configure(before)
    assert got == one_by_one(model_of("llama"), prompts)
    assert set(choices) == {("prefill", "torch_native"), ("decode", "torch_sdpa")}


def test_a_backend_that_cannot_take_the_pages_says_so(model_of, prompts, monkeypatch):
    from attn_backends.registry.registry import TABLE
    from attn_backends.torch_native.backend import TorchNativeBackend

    class LargePages(TorchNativeBackend):
        name = "large_pages"
        capabilities = replace(TorchNativeBackend.capabilities, page_sizes=IntSet(multiple_of=256))

    monkeypatch.setattr(TABLE, "entries", dict(TABLE.entries))
    register_attention_backend("large_pages")(LargePages)
    want = one_by_one(model_of("llama"), prompts[:2])
    with enable(backend="large_pages", override=("sdpa",), paged=False):
        assert batch(model_of("llama", "sdpa"), prompts[:2]) == want
    attention = Attention("name", "large_pages")
    spec = plug._spec(
        4, 2, 16, 16, torch.float32, torch.float32, True, None, None, None, PAGE, False
    )
    with pytest.raises(UnsupportedCallError, match=r"page_size=8 .*enable\(paged=False\)"):
        attention._select(spec, "decode", torch.device("cpu"))


@pytest.mark.parametrize("inference", [False, True] if HAS_INFERENCE_MODE else [False])
def test_layers_of_a_step_share_a_plan_and_steps_do_not(model_of, prompts, monkeypatch, inference):
    planned, calls = [], []
    make, spec = PackedLengths.batch, plug._spec
    monkeypatch.setattr(
        PackedLengths, "batch", lambda self, *a: planned.append(self) or make(self, *a)
    )
    monkeypatch.setattr(plug, "_spec", lambda *a: calls.append(a) or spec(*a))
    want = one_by_one(model_of("llama", num_hidden_layers=3), prompts)
    model = model_of("llama", "sdpa", num_hidden_layers=3)
    with enable(backend="torch_native", override=("sdpa",)), torch.inference_mode(inference):
        assert batch(model, prompts) == want
    assert len(calls) == 3 * len(planned)
    assert len(planned) >= NEW


def test_lengths_that_were_written_to_are_not_the_same():
    starts = torch.tensor([0, 2, 3], dtype=torch.int32)
    rows = torch.tensor([8, 9, 24])

    def make(**change: Any) -> PackedLengths:
        more = {"rows": rows, "page_size": 8, **change}
        return PackedLengths(starts, starts, 3, 3, 2, 2, True, None, **more)

    first = make()
    assert first == make() and hash(first) == hash(make())
    assert first != make(capturing=True)  # a plan from before a capture is not part of it
    assert first != make(page_size=4) and first != make(rows=rows.clone())
    rows[2] = 25
    assert first != make()
    first = make()
    starts[1] = 1
    assert first != make()
    with torch.inference_mode():  # such tensors do not count their writes
        starts = torch.tensor([0, 2, 3], dtype=torch.int32)
        assert make() != make()
        step: list[Any] = [rows]
        assert make(step=step) == make(step=step) != make(step=[rows])


class _Cache:
    """The update of 5.17 and 5.18 (``read_index``), or of 5.19 and 5.20 (the arguments whole)."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}


class _IndexCache(_Cache):
    def update(self, key_states, value_states, layer_idx, read_index, write_index):
        self.seen = dict(layer_idx=layer_idx, read_index=read_index, write_index=write_index)
        return key_states[0].transpose(0, 1) + 1, value_states[0].transpose(0, 1) + 2


class _KwargsCache(_Cache):
    def update(self, key_states, value_states, layer_idx, kwargs):
        self.seen = dict(layer_idx=layer_idx, **kwargs)
        kwargs["cu_seq_lens_k"] = kwargs["cu_seq_lens_k"]["full_attention"]
        return key_states + 1, value_states + 2


def layer_of(index: int, **config: Any) -> torch.nn.Module:
    module = torch.nn.Module()
    module.layer_idx, module.config = index, type("Config", (), config)()
    return module


@pytest.mark.parametrize("kind", [_IndexCache, _KwargsCache])
def test_caches_that_leave_the_update_to_us_are_updated(kind):
    cache, starts = kind(), torch.tensor([0, 3])
    kwargs = dict(
        cache=cache,
        read_index=["r"],
        write_index=["w"],
        cu_seq_lens_k={"full_attention": starts, "sliding_attention": None},
    )
    key, value = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4)
    k, v, pages = update_cache("name", layer_of(7), key, value, kwargs, True)
    assert cache.seen["layer_idx"] == 7 and pages is None
    assert cache.seen["read_index"] == ["r"] and cache.seen["write_index"] == ["w"]
    assert torch.equal(k, key + 1) and torch.equal(v, value + 2)
    assert kwargs["cu_seq_lens_k"] is starts


def test_layer_types_that_lengths_cannot_say_are_refused():
    module = layer_of(0, layer_types=["chunked_attention"])
    arguments = dict(cache=_IndexCache(), read_index=[], write_index=[], cu_seq_lens_k={})
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(UnsupportedCallError, match="layer_type=chunked_attention"):
        update_cache("name", module, x, x, arguments)


def test_keys_that_the_model_changed_after_writing_them_are_refused():
    key = torch.zeros(1, 2, 3, 4)
    pages = Pages(torch.zeros(2, 8, 2, 4), torch.zeros(2, 8, 2, 4), torch.arange(3), key)
    arguments = {ARGUMENT: pages, "read_index": [pages.rows]}
    assert update_cache("name", layer_of(0), key, key, dict(arguments))[2] is pages
    with pytest.raises(UnsupportedCallError, match=r"key=changed .*enable\(paged=False\)"):
        update_cache("name", layer_of(0), key * 2, key, arguments)


def test_a_page_table_names_the_page_of_every_key():
    lens, size, generator = [1, 8, 9, 0, 23], 8, torch.Generator().manual_seed(0)
    ids = torch.randperm(40, generator=generator).tolist()
    tables = [[ids.pop() for _ in range(-(-n // size))] for n in lens]
    rows = [t[j // size] * size + j % size for t, n in zip(tables, lens) for j in range(n)]
    padded = torch.tensor([*rows, 0, 0, 0])  # as for a CUDA graph: rows of no sequence
    starts = torch.tensor([0, *lens], dtype=torch.int32).cumsum(0).int()
    for bound in (23, 24, 64):
        table = page_table(padded, starts, bound, size)
        assert table.shape == (5, -(-bound // size)) and table.dtype == torch.int32
        assert [row[: len(t)].tolist() for row, t in zip(table, tables)] == tables
        assert 0 <= table.min() and table.max() < 40


class _Pages:
    """A cache of 5.17: pages of 8, the last two for padding."""

    block_size = PAGE

    def __init__(self, pages: int) -> None:
        shape = ((pages + 2) * PAGE, 2, 16)
        generator = torch.Generator().manual_seed(1)
        self.key_cache = [torch.randn(shape, generator=generator)]
        self.value_cache = [torch.randn(shape, generator=generator)]
        self.layer_index_to_group_indices, self.sliding_windows = {0: (0, 0)}, {0: 1}
        self.read_trash, self.write_trash = pages * PAGE, (pages + 1) * PAGE

    def update(self, key_states, value_states, layer_idx, read_index, write_index):
        raise AssertionError("pages are read where they lie")


@pytest.mark.parametrize("backend", ["torch_native", "triton"])
def test_padding_rows_of_a_cuda_graph_give_zeros(backend):
    """Queries, keys and sequences are padded to fixed sizes; lengths alone say what is real."""
    if backend == "triton":
        pytest.importorskip("triton")
    cache, generator = _Pages(6), torch.Generator().manual_seed(2)
    real_q, real_k, padded_q, padded_seqs = [3, 1], [11, 5], 8, 5
    tables = [[4, 2], [0]]
    rows = [t[j // PAGE] * PAGE + j % PAGE for t, n in zip(tables, real_k) for j in range(n)]
    ends = [sum(real_k[: i + 1]) for i in range(2)]
    slots = [r for end, n in zip(ends, real_q) for r in rows[end - n : end]]

    def padded(values: list[int], size: int, fill: int) -> torch.Tensor:
        return torch.tensor([*values, *[fill] * (size - len(values))])

    def starts(lens: list[int]) -> torch.Tensor:
        return torch.tensor([0, *lens, *[0] * (padded_seqs - len(lens))]).cumsum(0).int()

    q = torch.randn(1, 4, padded_q, 16, generator=generator)
    key = torch.randn(1, 2, padded_q, 16, generator=generator)
    module = layer_of(0)
    function = Attention("name", backend).function()
    out, _ = function(
        module, q, key, key + 1, None, scaling=0.25, is_causal=True, cache=cache,
        read_index=[padded(rows, 32, cache.read_trash)],
        write_index=[padded(slots, padded_q, cache.write_trash)],
        cu_seq_lens_q=starts(real_q), cu_seq_lens_k=starts(real_k),
        max_seqlen_q=padded_q, max_seqlen_k=32,
    )  # fmt: skip
    assert out.shape == (1, padded_q, 4, 16)
    assert (out[:, 4:] == 0).all()
    keys, values = cache.key_cache[0], cache.value_cache[0]
    assert torch.equal(keys[slots], key[0, :, :4].transpose(0, 1))
    begin = 0
    for end, q_len, kv_len, first in zip(ends, real_q, real_k, [0, real_k[0]]):
        own = rows[first:end]
        k, v = (x[own].transpose(0, 1).repeat_interleave(2, 0)[None] for x in (keys, values))
        mask = torch.ones(q_len, kv_len).tril(kv_len - q_len).bool()
        part = q[:, :, begin : begin + q_len]
        want = torch.nn.functional.scaled_dot_product_attention(part, k, v, mask, scale=0.25)
        got = out[:, begin : begin + q_len].transpose(1, 2)
        assert (got - want).abs().max() < 1e-5
        begin += q_len


def test_the_cache_is_wrapped_only_while_a_handle_asks_for_it(monkeypatch):
    cache = paged._cache_class()
    before = cache.__dict__["update"]
    with enable(override=("sdpa",), paged=False), enable():
        assert cache.__dict__["update"] is before
    first, second = enable(override=("sdpa",)), enable(override=("sdpa",))
    wrapped = cache.__dict__["update"]
    assert (wrapped is before) == HAS_PAGED_NAMES
    first.disable()
    assert cache.__dict__["update"] is wrapped
    second.disable()
    assert cache.__dict__["update"] is before
    first.disable()
    with monkeypatch.context() as patch:
        patch.delattr(cache, "update")
        with pytest.raises(BackendUnavailableError, match=r"enable\(paged=False\)"):
            enable(override=("sdpa",))
    assert "attn_backends" not in AttentionInterface._global_mapping


def test_other_models_keep_their_gather_while_the_cache_is_wrapped(
    model_of, prompts, gathers, calls
):
    with enable(override=("paged|eager",), backend="torch_native"):
        got = batch(model_of("llama", "sdpa"), prompts)
    assert got == one_by_one(model_of("llama"), prompts)
    assert gathers and not calls


def test_paged_is_a_switch():
    with pytest.raises(InvalidInputError, match="paged="):
        enable(paged="yes")
