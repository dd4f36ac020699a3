"""What of the Hopper launcher can be seen without a GPU: reasons, variants, and its kept maps."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from attn_backends import driver
from attn_backends.errors import InvalidInputError
from attn_backends.spec import AttentionSpec
from attn_backends.triton_native import hopper_compat, hopper_launch, hopper_maps
from attn_backends.triton_native.hopper_call import sources
from attn_backends.triton_native.hopper_launch import HopperLauncher, Source, formats_of
from attn_backends.triton_native.hopper_maps import MapForm
from attn_backends.triton_native.hopper_prefill import hopper_prefill, hopper_reasons
from attn_backends.triton_native.hopper_variant import (
    Variant,
    choose_variant,
    compile_arguments,
    pack_size,
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


def test_two_waves_of_causal_tiles_run_forth_and_back_and_short_keys_take_half_tiles():
    shape = {"head_dim": 128, "num_heads": 32, "num_kv_heads": 8, "num_sms": 132}
    one = choose_variant(**shape, max_seqlen_q=1024, total_q=1024, num_seqs=1, max_seqlen_k=1024)
    assert one.snake and not one.dynamic and one.consumers == 2
    many = choose_variant(**shape, max_seqlen_q=1024, total_q=4096, num_seqs=4, max_seqlen_k=1024)
    assert many.dynamic and many.consumers == 2
    full = choose_variant(
        **shape, max_seqlen_q=1024, total_q=1024, num_seqs=1, max_seqlen_k=1024, causal=False
    )
    assert full.dynamic
    short = choose_variant(**shape, max_seqlen_q=256, total_q=16384, num_seqs=64, max_seqlen_k=256)
    assert short.consumers == 1 and short.block_n == 64
    assert short.warp_registers(False) == (232, 24)


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


@pytest.mark.parametrize("variant", [Variant(), Variant(consumers=1), Variant(pack=8)])
@pytest.mark.parametrize("page_size", [None, 1, 16])
def test_registers_never_exceed_what_the_launch_reserves(variant, page_size):
    constants = compile_arguments(variant, 128, 128, page_size, True, None, None)
    consumer, producer = constants["CONSUMER_REGS"], constants["PRODUCER_REGS"]
    groups = variant.consumers + 1
    assert variant.consumers * consumer + producer <= groups * variant.max_registers
    assert consumer % 8 == producer % 8 == 0


@pytest.mark.parametrize(
    "dim, dv, half", [(64, 64, 32), (128, 128, 64), (192, 128, 64), (256, 256, 128)]
)
def test_held_lanes_are_none_or_half_of_what_the_first_product_reads(dim, dv, half):
    def held(lanes):
        return compile_arguments(Variant(held=lanes), dim, dv, None, True, None, None)["HELD"]

    assert (held(0), held(half)) == (0, half)
    for lanes in (-half, half // 2, 2 * half, 4 * half):
        text = rf"variant.held={lanes} \(allowed: 0 or {half} with head_dim={dim}\)"
        with pytest.raises(InvalidInputError, match=text):
            held(lanes)


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
    found = sources(q, k, v, 128, Variant(), None)
    first, second, keys, more, values = (source.form for source in found)
    assert [source.operand for source in found] == [0, 0, 1, 1, 2]
    assert first.shape == (5, 4, 128) and second.shape == (5, 4, 64)
    assert (first.first, second.first, keys.first, more.first) == (0, 128, 0, 128)
    assert keys.shape == (1, 7, 2, 128) and more.shape == (1, 7, 2, 64)
    assert values.shape == (1, 7, 2, 128) and first.strides == (768, 192, 1)
    cache = torch.zeros(3, 5, 2, 192, dtype=torch.bfloat16)
    gathered = sources(q, cache, cache, 128, Variant(), 5)
    assert gathered[2:] == (Source(1, None), None, Source(2, None))
    shared = sources(q, cache, cache, 128, Variant(), 16)[4].form
    assert shared.shape == (3, 5, 2, 128) and shared.strides == (1920, 384, 192, 1)


SIGNATURE = {
    "q": "tensordesc<bf16[64, 1, 128],layout[0]>", "q1": "constexpr",
    "k": "tensordesc<bf16[1, 16, 1, 128],layout[0]>", "k1": "constexpr", "v": "*bf16",
    "o": "*bf16", "lse": "*fp32", "work": "*i32", "table": "*i32", "sinks": "*fp32",
    "scale": "fp32", "lse_scale": "fp32", "softcap_in": "fp32", "softcap_out": "fp32",
    "stride_ot": "i64", "stride_oh": "i64", "stride_lt": "i64", "stride_lh": "constexpr",
    "heads": "i32", "D": "constexpr",
}  # fmt: skip
FORMATS = "MiiiqqqMiiiiqqqqQQQQQQffffqqqi"


def _known(formats: str) -> list[tuple[int, int]]:
    return [(at, driver.SIZES[f]) for at, f in zip(driver.offsets(formats), formats)]


def test_arguments_are_laid_out_as_the_compiled_kernel_has_them():
    assert driver.offsets("QMiM") == [0, 64, 192, 256]
    for scratch in range(3):
        text = FORMATS + "Q" * scratch
        formats, found = formats_of(SIGNATURE, _known(text))
        assert "".join(formats) == FORMATS and found == scratch and formats[1] == ""
    assert formats_of(SIGNATURE, _known(FORMATS[:-1])) is None
    assert formats_of(SIGNATURE, _known(FORMATS + "QQQ")) is None
    assert formats_of(SIGNATURE, _known(FORMATS[:-1] + "q")) is None
    # ptxas counts from the start of a bank that is no multiple of 64: only sizes are ours.
    moved = [(at + 48, size) for at, size in _known(FORMATS)]
    assert formats_of(SIGNATURE, moved) is not None
    assert formats_of({**SIGNATURE, "heads": "fp64"}, _known(FORMATS)) is None


@pytest.fixture
def launched(monkeypatch):
    """``(make, log)``: launchers on the CPU; ``log`` has what Triton and the driver were given."""
    log: list[tuple] = []
    meta = {"swizzle": 3, "block_size": [64, 1, 64], "fp4_padded": False}
    compiled = SimpleNamespace(
        function=7, run=None, src=SimpleNamespace(signature=SIGNATURE),
        metadata=SimpleNamespace(
            tensordesc_meta=[meta, {**meta, "block_size": [1, 16, 1, 64]}],
            global_scratch_size=0, profile_scratch_size=0, num_ctas=1, num_warps=12, shared=99,
            launch_cooperative_grid=False, launch_pdl=False,
        ),
    )  # fmt: skip

    class Kernel:
        def __getitem__(self, grid):
            def call(*arguments, num_warps, maxnreg, **constants):
                log.append(("triton", grid, num_warps, maxnreg, arguments, constants))
                return compiled

            return call

    class Launch:
        def __init__(self, function, grid, threads, formats, values, changing, **more):
            assert len(formats) == len(values)
            self.what = (function, grid, threads, formats, values[changing:], more["shared"])

        def __call__(self, stream, *values):
            log.append(("driver", *self.what[:4], (*values, *self.what[4]), stream))

    monkeypatch.setattr(hopper_launch, "_known", {})
    monkeypatch.setattr(hopper_launch, "is_hooked", lambda: False)
    monkeypatch.setattr(driver, "available", lambda: True)
    monkeypatch.setattr(driver, "parameters", lambda function: _known(FORMATS + "Q"))
    monkeypatch.setattr(driver, "current_device", lambda: 0)
    monkeypatch.setattr(driver, "current_stream", lambda index: 5)
    monkeypatch.setattr(driver, "tensor_map", lambda *a: repr(a).encode())
    monkeypatch.setattr(driver, "Launch", Launch)
    monkeypatch.setattr(hopper_maps.MapForm, "descriptor", lambda form, x: (form, x.data_ptr()))

    def make(q, k):
        def form(x, box):
            return MapForm.of(x, x.shape, x.stride(), box)

        given = (
            Source(0, form(q, (64, 1, 128))), None, Source(1, form(k, (1, 16, 1, 128))), None,
            Source(2, None),
        )  # fmt: skip
        return HopperLauncher(
            Kernel(), 9, given, (1.0, 2.0, 3.0, 4.0, 5), (11, 12, 13, 1), {"D": 128}, 168
        )

    return make, log


def _operands() -> tuple[torch.Tensor, ...]:
    q, k, v = (torch.zeros(n, 16, 1, 128, dtype=torch.bfloat16) for n in (70, 3, 3))
    return q[:, 0], k, v


def test_a_launch_is_handed_to_the_driver_once_its_kernel_is_known(launched):
    make, log = launched
    operands, tensors = _operands(), tuple(torch.zeros(8) for _ in range(5))
    launcher = make(*operands[:2])
    launcher.launch(operands, tensors)
    assert [x[0] for x in log] == ["triton"]
    _, grid, warps, registers, arguments, constants = log[0]
    assert (grid, warps, registers, constants) == ((9,), 4, 168, {"D": 128})
    assert arguments[1] is arguments[3] is None and arguments[4] is operands[2]
    assert arguments[10:] == (1.0, 2.0, 3.0, 4.0, 11, 12, 13, 1, 5)

    launcher.launch(operands, tensors)
    kind, function, grid, threads, formats, values, stream = log[1]
    assert (kind, function, grid, threads, stream) == ("driver", 7, (9, 1, 1), 12 * 32, 5)
    assert formats == FORMATS + "Q"
    q, k, v = (x.data_ptr() for x in operands)
    q_map = repr((q, 9, (70, 1, 128), [4096, 32], (64, 1, 64), 3)).encode()
    k_map = repr((k, 9, (3, 16, 1, 128), [4096, 256, 32], (1, 16, 1, 64), 3)).encode()
    assert values == (
        q_map, 70, 1, 128, 2048, 16, 1, k_map, 3, 16, 1, 128, 2048, 128, 16, 1, v,
        *(x.data_ptr() for x in tensors), 1.0, 2.0, 3.0, 4.0, 11, 12, 13, 5, 0,
    )  # fmt: skip


def test_maps_are_encoded_once_per_address(launched, monkeypatch):
    make, log = launched
    encoded: list[int] = []
    monkeypatch.setattr(driver, "tensor_map", lambda at, *a: encoded.append(at) or b"map")
    monkeypatch.setattr(hopper_maps, "_encoder", hopper_maps.Encoder)
    operands, tensors = _operands(), tuple(torch.zeros(8) for _ in range(5))
    launcher = make(*operands[:2])
    launcher.launch(operands, tensors)
    kept = launcher.kept(torch.bfloat16, 32, 48)
    for _ in range(3):
        kept(5, *(x.data_ptr() for x in operands), 16, 64)
    assert encoded == [operands[0].data_ptr(), operands[1].data_ptr()]
    kept(5, 4096, 8192, 16, 16, 64, 80)
    assert encoded[2:] == [4096, 8192]
    assert log[-1][5][-14:-9] == (16, 64, 32, 48, 80)


def test_odd_addresses_hooks_and_foreign_kernels_are_left_to_triton(launched, monkeypatch):
    make, log = launched
    operands, tensors = _operands(), tuple(torch.zeros(8) for _ in range(5))
    launcher = make(*operands[:2])
    odd = (*tensors[:4], torch.zeros(9)[1:])
    for _ in range(2):
        launcher.launch(operands, odd)
    launcher.launch(operands, tensors)
    monkeypatch.setattr(hopper_launch, "is_hooked", lambda: True)
    launcher.launch(operands, tensors)
    monkeypatch.setattr(hopper_launch, "is_hooked", lambda: False)
    monkeypatch.setattr(hopper_launch, "ENABLED", False)
    launcher.launch(operands, tensors)
    monkeypatch.setattr(hopper_launch, "ENABLED", True)
    monkeypatch.setattr(hopper_launch, "_known", {})
    monkeypatch.setattr(driver, "parameters", lambda function: _known("QQ"))
    for _ in range(2):
        launcher.launch(operands, tensors)
    assert [x[0] for x in log] == ["triton"] * 7


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
