"""The account of attention's traffic, work and floors, against figures worked out by hand."""

from __future__ import annotations

import pytest

from attn_backends.bench.roofline import GPUS, MODELS, Gpu, ModelShape, Roofline, roofline
from attn_backends.errors import InvalidInputError

GIB = 2**30


def llama(length: int = 8192) -> Roofline:
    return roofline(MODELS["llama3-8b"], length, "fp16", GPUS["h100"])


def test_score_matrix_is_4_gib_at_8k_and_64_gib_at_32k() -> None:
    assert llama().score_bytes_per_layer == 4 * GIB
    assert llama(32768).score_bytes_per_layer == 64 * GIB


def test_score_matrix_does_not_depend_on_the_head_dim() -> None:
    narrow = ModelShape("narrow", 32, 8, 64, 32)
    account = roofline(narrow, 8192, "fp16", GPUS["h100"])
    assert account.score_bytes_per_layer == llama().score_bytes_per_layer


def test_textbook_traffic_is_16_156_gib_a_layer_and_takes_5_18_ms() -> None:
    textbook = llama().textbook
    assert textbook.bytes_per_layer / GIB == 16.15625
    assert textbook.memory_ms_per_layer == pytest.approx(5.18, abs=0.005)
    assert textbook.floor_ms_per_layer == textbook.memory_ms_per_layer
    assert textbook.floor_ms_model == pytest.approx(165.7, abs=0.05)
    assert textbook.bound == "memory"


def test_work_is_1_0995e12_flop_a_layer_and_its_floor_35_6_ms() -> None:
    account = llama()
    assert account.fused.flop_per_layer == account.textbook.flop_per_layer == 4 * 32 * 8192**2 * 128
    assert account.fused.flop_per_layer == pytest.approx(1.0995e12, rel=5e-5)
    assert account.fused.floor_ms_model == pytest.approx(35.6, abs=0.05)
    assert account.fused.bound == "compute"
    slowdown = account.textbook.floor_ms_model / account.fused.floor_ms_model
    assert slowdown == pytest.approx(4.7, abs=0.05)


def test_intensities_are_63_and_6553_6_around_a_ridge_of_295() -> None:
    account = llama()
    assert round(account.textbook.flop_per_byte) == 63
    assert account.fused.flop_per_byte == pytest.approx(6553.6, abs=1e-9)
    assert round(account.intensity_ratio) == 103
    assert round(account.ridge_flop_per_byte) == 295
    assert account.ridge_flop_per_byte / account.textbook.flop_per_byte == pytest.approx(
        4.7, abs=0.05
    )
    assert round(account.fused.flop_per_byte / account.ridge_flop_per_byte) == 22


def test_one_head_with_its_own_keys_moves_545_3_mb_for_34_36_gflop() -> None:
    account = roofline(ModelShape("head", 1, 1, 128, 1), 8192, "fp16", GPUS["h100"])
    assert account.textbook.bytes_per_layer / 1e6 == pytest.approx(545.3, abs=0.05)
    assert account.textbook.flop_per_layer / 1e9 == pytest.approx(34.36, abs=0.005)
    assert account.textbook.flop_per_byte == pytest.approx(8192 * 128 / (2 * (8192 + 128)))
    assert account.fused.flop_per_byte == pytest.approx(8192 / 2)


@pytest.mark.parametrize("length", [1, 17, 8192, 131072])
def test_decode_has_an_intensity_of_4_whatever_the_context(length: int) -> None:
    decode = llama(length).decode
    assert decode.flop_per_byte == 4.0
    assert decode.bound == "memory"
    assert decode.bytes_per_layer == 2 * length * 8 * 128 * 2


def test_a_merge_moves_776_bytes_for_half_a_flop_each() -> None:
    merge = roofline(MODELS["llama3-8b"], 1, "bf16", GPUS["h100"]).merge
    assert merge.bytes_per_token_head == 776
    assert merge.flop_per_token_head == 390
    assert merge.flop_per_byte == pytest.approx(0.5, abs=0.005)


def test_latent_attention_reads_its_values_out_of_its_keys() -> None:
    account = roofline(MODELS["deepseek-v3-mla"], 4096, "bf16", GPUS["h200"])
    assert account.decode.bytes_per_layer == 4096 * 576 * 2
    assert account.decode.flop_per_layer == 2 * 128 * 4096 * (576 + 512)
    assert account.fused.bytes_per_layer == 4096 * 2 * (128 * (576 + 512) + 576)


def test_causality_halves_the_work_but_not_the_textbook_traffic() -> None:
    full = llama()
    causal = roofline(MODELS["llama3-8b"], 8192, "fp16", GPUS["h100"], causal=True)
    assert causal.fused.flop_per_layer == 2 * 32 * (8192 * 8193 // 2) * 256
    assert causal.textbook.bytes_per_layer == full.textbook.bytes_per_layer


@pytest.mark.parametrize("name", list(GPUS))
def test_every_gpu_states_rates_for_half_types_and_a_source(name: str) -> None:
    gpu = GPUS[name]
    assert gpu.peak("fp16") == gpu.peak("bf16") > 1e13
    assert gpu.bandwidth_tbs > 0 and gpu.source


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: llama(0), "length"),
        (lambda: roofline(MODELS["llama3-8b"], 8, "int3", GPUS["h100"]), "dtype"),
        (lambda: roofline(MODELS["llama3-8b"], 8, "fp8", GPUS["a100"]), "dtype"),
        (lambda: ModelShape("odd", 9, 2, 64, 1), "num_kv_heads"),
        (lambda: ModelShape("none", 0, 1, 64, 1), "num_heads"),
    ],
)
def test_what_cannot_be_counted_is_refused_by_name(call, field) -> None:
    with pytest.raises(InvalidInputError, match=field):
        call()


def test_a_given_gpu_decides_the_times() -> None:
    slow = roofline(MODELS["llama3-8b"], 8192, "fp16", Gpu("slow", 0.335, {"fp16": 98.94}, "here"))
    assert slow.textbook.floor_ms_model == pytest.approx(10 * llama().textbook.floor_ms_model)
    assert slow.ridge_flop_per_byte == pytest.approx(llama().ridge_flop_per_byte)
