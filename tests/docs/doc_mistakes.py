"""Mistakes that people make, each committed on purpose, for the page about troubleshooting."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

import attn_backends as ab

MISTAKES: list[Callable[[Path], object]] = []


def mistake(function: Callable[[Path], object]) -> Callable[[Path], object]:
    MISTAKES.append(function)
    return function


def message(function: Callable[[Path], object], folder: Path) -> str:
    """What the library says to a mistake: the text of its error, or of its warning."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            function(folder)
        except (ab.AttnBackendsError, ValueError) as error:
            return str(error)
    assert len(warned) == 1, f"{function.__name__} went through without a word"
    return str(warned[0].message)


def spec(**changes: object) -> ab.AttentionSpec:
    given = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.float32}
    return ab.AttentionSpec(**{**given, **changes})


def layer(**changes: object) -> ab.AttentionBackend:
    return ab.select(spec(**changes), phase="prefill", device="cpu", backend="torch_native").backend


def ragged(q_len: int = 3, kv_len: int = 5) -> ab.Batch:
    return ab.Batch.from_lengths([q_len], [kv_len])


def qkv(q_len: int = 3, kv_len: int = 5) -> tuple[torch.Tensor, ...]:
    return torch.randn(q_len, 8, 64), torch.randn(kv_len, 2, 64), torch.randn(kv_len, 2, 64)


@contextmanager
def variable(name: str, value: str):
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


# Layers


@mistake
def unbounded_window_as_in_flash_attention(folder: Path) -> object:
    return spec(window=(-1, 0))


@mistake
def softcap_of_zero_for_off(folder: Path) -> object:
    return spec(softcap=0)


@mistake
def heads_that_do_not_divide(folder: Path) -> object:
    return ab.AttentionSpec(num_heads=33, num_kv_heads=2, head_dim=64)


@mistake
def cache_in_another_wide_dtype(folder: Path) -> object:
    return spec(kv_dtype=torch.float16)


# Choosing


@mistake
def misspelled_backend(folder: Path) -> object:
    return ab.select(spec(), backend="flashattention3", device="cpu")


@mistake
def backend_that_cannot_do_the_call(folder: Path) -> object:
    return ab.select(spec(softcap=30.0), backend="torch_sdpa", device="cpu")


@mistake
def backend_without_its_package(folder: Path) -> object:
    ab.register_attention_backend(
        "needs_a_package", "package_that_is_not_there.attention:Backend",
        install_hint="pip install package-that-is-not-there", override=True,
    )  # fmt: skip
    return ab.select(spec(), backend="needs_a_package", device="cpu")


@mistake
def nothing_is_left(folder: Path) -> object:
    config = ab.AttentionConfig(allow=("torch_sdpa", "torch_varlen"))
    return ab.select(spec(softcap=30.0), device="cpu", config=config)


@mistake
def a_name_that_is_taken(folder: Path) -> object:
    return ab.register_attention_backend("triton", "my_package.fast:Backend")


# Settings


@mistake
def unknown_field(folder: Path) -> object:
    path = folder / "attention.toml"
    path.write_text('bakend = "triton"\n')
    return ab.AttentionConfig.from_file(path)


@mistake
def unknown_option(folder: Path) -> object:
    config = ab.AttentionConfig(options={"torch_native": {"tile": 128}})
    return ab.select(spec(), device="cpu", config=config)


@mistake
def unknown_variable(folder: Path) -> object:
    with variable("ATTN_BACKENDS_BACKED", "triton"):
        return ab.select(spec(), device="cpu")


@mistake
def empty_variable(folder: Path) -> object:
    with variable("ATTN_BACKENDS_MERGE", ""):
        return ab.select(spec(), device="cpu")


@mistake
def tuning_file_that_is_not_there(folder: Path) -> object:
    config = ab.AttentionConfig(tuning_file=str(folder / "tuning.json"))
    return ab.select(spec(), device="cpu", config=config)


# Planning


@mistake
def lengths_that_disagree(folder: Path) -> object:
    return ab.Batch.from_lengths([1, 1], [8])


@mistake
def table_too_narrow(folder: Path) -> object:
    batch = ab.Batch.from_lengths([1], [40], page_table=[[0, 1]])
    return layer(page_size=16).plan(batch)


@mistake
def ragged_batch_for_a_paged_layer(folder: Path) -> object:
    return layer(page_size=16).plan(ragged())


@mistake
def capacity_for_a_backend_without_graphs(folder: Path) -> object:
    capacity = ab.Capacity(num_seqs=1, total_q=3, max_seqlen_q=3, max_seqlen_k=5)
    return layer().plan(ragged(), capacity)


@mistake
def batch_that_outgrew_its_graph(folder: Path) -> object:
    from attn_backends.torch_native.backend import TorchNativeBackend

    class Capturable(TorchNativeBackend):
        capabilities = replace(
            TorchNativeBackend.capabilities,
            features=TorchNativeBackend.capabilities.features | {"cuda_graph"},
        )

        def _plan(self, batch: ab.Batch, capacity: ab.Capacity | None) -> ab.Plan:
            return ab.Plan(self, batch, capacity)

    capacity = ab.Capacity(num_seqs=8, total_q=8, max_seqlen_q=1, max_seqlen_k=64)
    plan = Capturable(spec()).plan(ragged(1, 5), capacity)
    return plan.update(ab.Batch.from_lengths([1] * 9, [5] * 9))


# Running


@mistake
def page_outside_the_cache(folder: Path) -> object:
    backend = layer(page_size=16)
    plan = backend.plan(ab.Batch.from_lengths([1], [20], page_table=[[0, 7]]))
    cache = torch.zeros(4, 16, 2, 64)
    return backend.run(torch.zeros(1, 8, 64), cache, cache, plan)


@mistake
def another_dtype(folder: Path) -> object:
    q, k, v = qkv()
    return layer().run(q.half(), k, v, layer().plan(ragged()))


@mistake
def another_number_of_queries(folder: Path) -> object:
    q, k, v = qkv(q_len=4)
    return layer().run(q, k, v, layer().plan(ragged()))


@mistake
def strided_last_dim(folder: Path) -> object:
    q, _, v = qkv()
    wide = torch.zeros(5, 2, 128)
    return layer().run(q, wide[..., ::2], v, layer().plan(ragged()))


@mistake
def gradients(folder: Path) -> object:
    q, k, v = qkv()
    return ab.attention(q.requires_grad_(), k, v)


@mistake
def plan_of_another_layer(folder: Path) -> object:
    return layer().run(*qkv(), layer(causal=False).plan(ragged()))


@mistake
def scale_without_fp8(folder: Path) -> object:
    return layer().run(*qkv(), layer().plan(ragged()), k_scale=0.5)


@mistake
def mask_that_the_layer_does_not_have(folder: Path) -> object:
    mask = torch.ones(15, dtype=torch.bool)
    return layer().run(*qkv(), layer().plan(ragged()), mask=mask)


@mistake
def slopes_that_are_missing(folder: Path) -> object:
    backend = layer(has_alibi=True)
    return backend.run(*qkv(), backend.plan(ragged()))


@mistake
def padding_mask_of_other_libraries(folder: Path) -> object:
    x = torch.randn(2, 4, 8, 64)
    return ab.attention(x, x, x, mask=torch.ones(2, 4, dtype=torch.bool))


@mistake
def bound_that_nobody_gave(folder: Path) -> object:
    starts, lens = torch.tensor([0, 1]), torch.tensor([5])
    return ab.Batch(starts, lens, page_table=torch.zeros(1, 2).int(), total_q=1, max_seqlen_q=1)


@mistake
def lengths_on_the_device_are_wrong(folder: Path) -> object:
    """Seen only by the checks that ``ATTN_BACKENDS_VALIDATE=1`` adds."""
    i32 = torch.int32
    batch = ab.Batch(
        torch.tensor([0, 1], dtype=i32), torch.tensor([50], dtype=i32),
        page_table=torch.zeros(1, 2, dtype=i32), total_q=1, max_seqlen_q=1, max_seqlen_k=50,
    )  # fmt: skip
    with variable("ATTN_BACKENDS_VALIDATE", "1"):
        return layer(page_size=16).plan(batch)


@mistake
def workspace_that_is_too_small(folder: Path) -> object:
    """What the adapter makes of the library's own complaint."""
    from attn_backends.adapters.flashinfer_wrappers import explain_workspace

    text = "Failed to allocate memory for batch_prefill_tmp_v in AlignedAllocator"
    raise explain_workspace(RuntimeError(text), 16)


# Merging


@mistake
def lse_head_major(folder: Path) -> object:
    o, lse = torch.randn(3, 8, 64), torch.randn(8, 3)
    return ab.merge_state(o, lse, o, lse)


@mistake
def lse_in_half(folder: Path) -> object:
    o, lse = torch.randn(3, 8, 64), torch.randn(3, 8).half()
    return ab.merge_state(o, lse, o, lse)


@mistake
def path_without_its_device(folder: Path) -> object:
    o, lse = torch.randn(3, 8, 64), torch.randn(3, 8)
    return ab.merge_state(o, lse, o, lse, path="cuda")


@mistake
def window_over_shared_keys(folder: Path) -> object:
    from attn_backends.cascade import plan_cascade

    return plan_cascade(spec(window=(127, 0)), [ragged(), ragged()])


@mistake
def graph_of_levels_that_may_change(folder: Path) -> object:
    from attn_backends.cascade import plan_cascade

    batch = ab.Batch.from_lengths([1, 1], [20, 20], page_table=[[0, 1], [0, 2]])
    capacity = ab.Capacity(num_seqs=2, total_q=2, max_seqlen_q=1, max_seqlen_k=32, max_pages=2)
    return plan_cascade(spec(page_size=16), batch, capacities=[capacity])


@mistake
def fp8_result_without_a_scale(folder: Path) -> object:
    o, lse = torch.randn(3, 8, 64), torch.randn(3, 8)
    out = torch.empty(3, 8, 64, dtype=torch.float8_e4m3fn), torch.empty(3, 8)
    return ab.merge_state(o, lse, o, lse, out=out)


@mistake
def result_over_a_part_of_an_input(folder: Path) -> object:
    rows, lse = torch.randn(4, 8, 64), torch.randn(3, 8)
    return ab.merge_state(rows[:3], lse, rows[:3].clone(), lse, out=(rows[1:], lse.clone()))


# Engines


@mistake
def name_that_transformers_takes(folder: Path) -> object:
    from attn_backends.engines.transformers import enable

    return enable("sdpa")
