"""What of the Hopper launcher can be seen without a GPU: reasons, variants, and its kept maps."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_backends.spec import AttentionSpec
from attn_backends.triton_native import hopper_compat, hopper_launch
from attn_backends.triton_native.hopper_prefill import (
    Variant,
    choose_variant,
    compile_arguments,
    hopper_prefill,
    hopper_reasons,
    pack_size,
    sources,
    split_lanes,
)

SPEC = AttentionSpec(32, 8, 128, dtype=torch.bfloat16)
CPU = torch.device("cpu")


def _arguments(reasons) -> set[str]:
    return {r.argument for r in reasons}


def test_a_plain_spec_has_no_reason_against_it():
    assert hopper_reasons(SPEC) == []
    for size in (1, 3, 16, 48, 256):
        paged = dataclasses.replace(SPEC, page_size=size, window=(100, None), softcap=30.0)
        assert hopper_reasons(paged) == []
    assert hopper_reasons(dataclasses.replace(SPEC, head_dim=192, head_dim_v=128)) == []


@pytest.mark.parametrize(
    "changes, argument",
    [
        ({"dtype": torch.float32}, "dtype"),
        ({"head_dim": 96}, "head_dim"),
        ({"head_dim": 64, "head_dim_v": 128}, "head_dim_v"),
        ({"head_dim": 192}, "head_dim_v"),
        ({"kv_dtype": torch.float8_e4m3fn}, "kv_dtype"),
        ({"has_alibi": True}, "has_alibi"),
        ({"has_mask": True}, "has_mask"),
    ],
)
def test_what_the_kernel_cannot_do_is_named(changes, argument):
    assert _arguments(hopper_reasons(dataclasses.replace(SPEC, **changes))) == {argument}


def test_another_device_is_named():
    assert "device" in _arguments(hopper_reasons(SPEC, CPU))


def test_every_reason_is_collected():
    spec = dataclasses.replace(SPEC, head_dim=96, has_alibi=True, has_mask=True)
    assert _arguments(hopper_reasons(spec)) == {"head_dim", "has_alibi", "has_mask"}


def test_tensors_that_tma_cannot_address_are_named():
    buffer = torch.zeros(64 * 40 * 132, dtype=torch.bfloat16)
    base = buffer.data_ptr() % 16
    assert base == 0
    good = buffer[: 10 * 4 * 128].view(10, 4, 128)
    assert hopper_reasons(SPEC, q=good, k=good, v=good) == []
    odd = buffer[4 : 4 + 10 * 4 * 128].view(10, 4, 128)
    assert _arguments(hopper_reasons(SPEC, q=odd)) == {"q.data_ptr() % 16"}
    wide = buffer[: 10 * 4 * 132].view(10, 4, 132)[..., :128]
    assert _arguments(hopper_reasons(SPEC, k=wide)) == {"k.stride(0)", "k.stride(1)"} - (
        {"k.stride(0)"} if wide.stride(0) % 8 == 0 else set()
    )
    crossed = buffer[: 10 * 4 * 128].view(10, 128, 4).transpose(1, 2)
    assert "v.stride(-1)" in _arguments(hopper_reasons(SPEC, v=crossed))
    flat = good[:1].expand(10, 4, 128)
    assert _arguments(hopper_reasons(SPEC, k=flat)) == {"k.stride(0)"}


@pytest.mark.parametrize("group, size", [(1, 1), (2, 2), (4, 4), (7, 8), (8, 8), (12, 16)])
def test_packed_heads_take_the_next_power_of_two(group, size):
    assert pack_size(group) == size


def _choose(q: int, batch: int, dim: int = 128, heads: int = 32, kv_heads: int = 8) -> Variant:
    return choose_variant(
        head_dim=dim, num_heads=heads, num_kv_heads=kv_heads, max_seqlen_q=q, total_q=q * batch,
        num_seqs=batch, num_sms=132,
    )  # fmt: skip


def test_long_prompts_take_whole_tiles_and_short_extends_pack_heads():
    assert _choose(4096, 4).pack == 1 and _choose(4096, 4).consumers == 2
    assert _choose(64, 64).pack == 4
    assert _choose(16, 8, heads=28, kv_heads=4).pack == 8
    assert _choose(64, 64, heads=8, kv_heads=8).pack == 1
    assert _choose(4096, 4, dim=256).block_n == 64


def test_a_batch_invariant_variant_depends_on_the_head_dim_only():
    shapes = [(64, 64), (1, 1), (4096, 4)]
    for dim in (64, 128, 256):
        found = {
            choose_variant(
                head_dim=dim, num_heads=32, num_kv_heads=8, max_seqlen_q=q, total_q=q * batch,
                num_seqs=batch, num_sms=sms, batch_invariant=True,
            )
            for q, batch in shapes for sms in (16, 132)
        }  # fmt: skip
        assert len(found) == 1


@pytest.mark.parametrize("variant", [Variant(), Variant(consumers=1), Variant(consumers=3)])
@pytest.mark.parametrize("page_size", [None, 1, 16])
def test_registers_never_exceed_what_the_launch_reserves(variant, page_size):
    constants = compile_arguments(variant, 128, 128, page_size, True, None, None)
    consumer, producer = constants["CONSUMER_REGS"], constants["PRODUCER_REGS"]
    groups = variant.consumers + 1
    assert variant.consumers * consumer + producer <= groups * variant.max_registers
    assert consumer % 8 == producer % 8 == 0


@pytest.mark.parametrize(
    "page_size, narrow, wide",
    [
        (None, False, False), (1, True, True), (8, True, True), (16, False, False),
        (48, True, True), (64, False, False), (128, False, False), (192, False, True),
        (256, False, False),
    ],
)  # fmt: skip
def test_pages_are_gathered_where_boxes_cannot_tile_them(page_size, narrow, wide):
    assert Variant(block_n=64).gathers(page_size) is narrow
    assert Variant(block_n=128).gathers(page_size) is wide


@pytest.mark.parametrize("dim, lanes", [(64, (64, 0)), (128, (128, 0)), (192, (128, 64))])
def test_lanes_are_copied_in_powers_of_two(dim, lanes):
    assert split_lanes(dim) == lanes


def test_second_lanes_start_where_the_first_end():
    q = torch.zeros(5, 4, 192, dtype=torch.bfloat16)
    k = torch.zeros(7, 2, 192, dtype=torch.bfloat16)
    v = torch.zeros(7, 2, 128, dtype=torch.bfloat16)
    first, second, keys, more, values = sources(q, k, v, Variant(), None)
    assert first.shape == (5, 4, 128) and second.shape == (5, 4, 64)
    assert second.key[0] - first.key[0] == more.key[0] - keys.key[0] == 256
    assert keys.shape == (1, 7, 2, 128) and more.shape == (1, 7, 2, 64)
    assert values.shape == (1, 7, 2, 128) and first.strides == (768, 192, 1)
    cache = torch.zeros(3, 5, 2, 192, dtype=torch.bfloat16)
    gathered = sources(q, cache, cache[..., :128], Variant(), 5)
    assert gathered[2] is cache and gathered[3] is None


class _FakeKernel:
    """Stands for the jitted kernel: launches end in Triton's own wrapper around a recorder."""

    def __init__(self, calls: list[tuple]) -> None:
        from triton.backends.nvidia import driver

        meta = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 1, 64],
                "fp4_padded": False}  # fmt: skip
        maps = (0, 2, 4)
        signature = {
            i: "tensordesc<bf16[64, 1, 128],x>" if i in maps else "constexpr" for i in range(5)
        }
        record = lambda *a: calls.append(a)  # noqa: E731
        inner = driver.wrap_handle_tensordesc(record, signature, [meta] * 3)
        self.compiled = SimpleNamespace(
            function=7, packed_metadata=("packed",),
            run=SimpleNamespace(
                launch=inner, global_scratch_size=0, profile_scratch_size=0,
                launch_cooperative_grid=False, launch_pdl=False, num_ctas=1,
            ),
        )  # fmt: skip

    def __getitem__(self, grid: tuple[int]) -> Any:
        def call(*arguments: Any, num_warps: int, maxnreg: int, **constants: Any) -> Any:
            base = (grid[0], 1, 1, 5, 7, False, False, None, None, ("packed",), None, None, None)
            self.compiled.run.launch(*base, *arguments, *constants.values())
            return self.compiled

        return call


def test_kept_maps_launch_with_the_arguments_that_triton_would_pass(monkeypatch):
    if hopper_compat.triton_version() != (3, 6):
        assert hopper_launch._c_launcher(SimpleNamespace(run=None)) is None
        return
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver

    encodings: list[tuple] = []

    def encode(*arguments: Any) -> tuple:
        encodings.append(arguments)
        return ("map", *map(str, arguments))

    active = SimpleNamespace(
        utils=SimpleNamespace(fill_tma_descriptor=encode), get_current_stream=lambda device: 5
    )
    monkeypatch.setattr(nvidia.triton.runtime.driver, "_active", active, raising=False)
    monkeypatch.setattr(driver, "_active", active, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(hopper_launch, "_maps", {})
    monkeypatch.setattr(hopper_launch, "_kernels", {})

    calls: list[tuple] = []
    kernel = _FakeKernel(calls)
    tensors = tuple(torch.zeros(8) for _ in range(4))

    def run(x: torch.Tensor) -> None:
        view = hopper_launch.Map(x, tuple(x.shape), x.stride(), (64, 1, 128))
        hopper_launch.launch(
            kernel, 9, (view, None, view, None, view), tensors,
            (1.0, 2.0, 3.0, 4.0, 5, 6, 7, 8, 9, 10), (11, 12, 13, 14),
            {"D": 128, "DYNAMIC": True}, 168,
        )  # fmt: skip

    def plain(call: tuple) -> list:
        return [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in call]

    x, y = (torch.zeros(70, 1, 128, dtype=torch.bfloat16) for _ in range(2))
    run(x)
    assert len(encodings) == 3
    run(x)
    assert len(encodings) == 4  # the first use of the kept way encodes once more, for all three
    run(x)
    assert len(encodings) == 4
    assert plain(calls[0]) == plain(calls[1]) == plain(calls[2])
    run(y)
    assert len(encodings) == 5
    assert plain(calls[3]) != plain(calls[0])


def test_the_kernel_and_the_work_list_agree_on_the_layout():
    if hopper_compat.REASON is not None:
        pytest.skip(str(hopper_compat.REASON))
    from attn_backends.triton_native import hopper_parts, hopper_work

    assert hopper_parts.WORK_HEADER.value == hopper_work.HEADER
    assert hopper_parts.WORK_FIELDS.value == hopper_work.FIELDS


def test_heads_are_only_packed_into_tiles_that_hold_the_whole_group():
    q = torch.zeros(4, 8, 128, dtype=torch.bfloat16)
    k = torch.zeros(4, 1, 128, dtype=torch.bfloat16)
    with pytest.raises(AssertionError):
        hopper_prefill(
            q, k, k, cu_seqlens_q=torch.tensor([0, 4]), seqlens_k=torch.tensor([4]),
            cu_seqlens_k=torch.tensor([0, 4]), max_seqlen_q=4, scale=1.0, causal=True,
            o=torch.zeros_like(q), lse=torch.zeros(4, 8), variant=Variant(pack=4),
        )  # fmt: skip
