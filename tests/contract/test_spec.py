"""The spec: every bad field is named with its value and range; only None switches an option off."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_backends.errors import InvalidInputError
from attn_backends.spec import AttentionSpec

GOOD = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}

BAD = [  # F32
    ({"num_heads": 3}, "num_kv_heads=2 "),
    ({"num_heads": 33}, "num_kv_heads=2 "),
    ({"num_heads": 0, "num_kv_heads": 1}, "num_heads=0 "),
    ({"num_kv_heads": 0}, "num_kv_heads=0 "),
    ({"num_heads": -4}, "num_heads=-4 "),
    ({"num_heads": True}, "num_heads=True "),
    ({"num_heads": "4"}, "num_heads='4' "),
    ({"head_dim": 0}, "head_dim=0 "),
    ({"head_dim": 64.0}, "head_dim=64.0 "),
    ({"head_dim_v": 0}, "head_dim_v=0 "),
    ({"softcap": 0}, "softcap=0 "),
    ({"softcap": 0.0}, "softcap=0.0 "),
    ({"softcap": -1}, "softcap=-1 "),
    ({"softcap": math.nan}, "softcap=nan "),
    ({"softcap": math.inf}, "softcap=inf "),
    ({"softcap": "20"}, "softcap='20' "),
    ({"softcap": True}, "softcap=True "),
    ({"sm_scale": math.nan}, "sm_scale=nan "),
    ({"sm_scale": math.inf}, "sm_scale=inf "),
    ({"sm_scale": -0.5}, "sm_scale=-0.5 "),
    ({"window": (-2, 0)}, "window=(-2, 0) "),
    ({"window": (3, -2)}, "window=(3, -2) "),
    ({"window": (-1, 0)}, "window=(-1, 0) "),
    ({"window": 4}, "window=4 "),
    ({"window": (1, 2, 3)}, "window=(1, 2, 3) "),
    ({"window": (1.0, 0)}, "window=(1.0, 0) "),
    ({"page_size": 0}, "page_size=0 "),
    ({"page_size": -1}, "page_size=-1 "),
    ({"page_size": "16"}, "page_size='16' "),
    ({"dtype": torch.int8}, "dtype=torch.int8 "),
    ({"dtype": "bfloat16"}, "dtype='bfloat16' (allowed: torch.float16, torch.bfloat16, "),
    ({"kv_dtype": torch.float16}, "kv_dtype=torch.float16 "),
    ({"kv_dtype": "bfloat16"}, "kv_dtype='bfloat16' (allowed: dtype=torch.bfloat16, "),
    ({"causal": 1}, "causal=1 "),
    ({"has_mask": None}, "has_mask=None "),
]


@pytest.mark.parametrize(("change", "start"), BAD, ids=[start.strip() for _, start in BAD])
def test_a_bad_field_is_named_with_value_and_range(change, start):
    with pytest.raises(InvalidInputError) as error:
        AttentionSpec(**{**GOOD, **change})
    assert str(error.value).startswith(start)
    assert "(allowed: " in str(error.value)
    assert isinstance(error.value, ValueError)


def test_an_unknown_field_is_refused():
    with pytest.raises(TypeError, match="sofcap"):
        AttentionSpec(**GOOD, sofcap=20.0)


def test_none_alone_switches_options_off_and_a_scale_of_zero_is_a_scale():
    spec = AttentionSpec(**GOOD)
    assert spec.window is None and spec.softcap is None
    assert spec.scale == 1 / 8
    assert AttentionSpec(**GOOD, sm_scale=0).scale == 0


def test_defaults_follow_from_other_fields():
    spec = AttentionSpec(**GOOD)
    assert (spec.dv, spec.kv, spec.out_dtype) == (64, torch.bfloat16, torch.bfloat16)
    fp8 = AttentionSpec(**GOOD, dtype=torch.float8_e4m3fn, head_dim_v=32)
    assert (fp8.dv, fp8.kv, fp8.out_dtype) == (32, torch.float8_e4m3fn, torch.bfloat16)
    assert AttentionSpec(6, 2, 8).group_size == 3


@pytest.mark.parametrize(
    ("causal", "window", "stored", "bounds"),
    [
        (True, None, None, (None, 0)),
        (True, (3, None), (3, 0), (3, 0)),
        (True, (3, 7), (3, 0), (3, 0)),
        (True, (None, 7), None, (None, 0)),
        (False, None, None, (None, None)),
        (False, (None, None), None, (None, None)),
        (False, (3, None), (3, None), (3, None)),
        (False, [0, 2], (0, 2), (0, 2)),
    ],
)
def test_causality_bounds_windows_on_the_right(causal, window, stored, bounds):
    spec = AttentionSpec(**GOOD, causal=causal, window=window)
    assert spec.window == stored and spec.bounds == bounds


def test_equal_specs_are_equal_and_hash_alike_and_no_spec_changes():
    a, b = AttentionSpec(**GOOD, softcap=20), AttentionSpec(**GOOD, softcap=20.0)
    assert a == b and hash(a) == hash(b) and len({a, b}) == 1
    assert replace(a, softcap=None) != a
    assert hash(replace(a, softcap=None)) == hash(AttentionSpec(**GOOD))
    with pytest.raises(FrozenInstanceError):
        a.softcap = None  # type: ignore[misc]


bounds = st.none() | st.integers(-3, 9)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(
    heads=st.integers(-1, 40),
    kv_heads=st.integers(-1, 40),
    window=st.none() | st.tuples(bounds, bounds),
    softcap=st.none() | st.floats(),
    scale=st.none() | st.floats(),
    page_size=st.none() | st.integers(-2, 9),
)
def test_a_spec_exists_if_and_only_if_all_its_fields_are_in_range(
    heads, kv_heads, window, softcap, scale, page_size
):
    good = heads >= 1 and kv_heads >= 1 and heads % kv_heads == 0
    good &= window is None or all(x is None or x >= 0 for x in window)
    good &= softcap is None or (math.isfinite(softcap) and softcap > 0)
    good &= scale is None or (math.isfinite(scale) and scale >= 0)
    good &= page_size is None or page_size >= 1
    fields = {"window": window, "softcap": softcap, "sm_scale": scale, "page_size": page_size}
    if good:
        spec = AttentionSpec(heads, kv_heads, 64, **fields)
        assert spec.group_size * kv_heads == heads
    else:
        with pytest.raises(InvalidInputError, match=r"=.*\(allowed: "):
            AttentionSpec(heads, kv_heads, 64, **fields)
