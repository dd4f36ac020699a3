"""Declared sets of ints hold what they print."""

from __future__ import annotations

import pytest

from attn_backends.capabilities import Capabilities, IntSet


@pytest.mark.parametrize(
    ("values", "text", "inside", "outside"),
    [
        (IntSet(), "any >= 1", [1, 10**9], [0, -1, "16", 1.0, None]),
        (IntSet(low=1, high=576), "1..576", [1, 576], [0, 577]),
        (IntSet(multiple_of=256), "multiples of 256", [256, 512], [0, 16, 257]),
        (IntSet(multiple_of=8, high=256), "multiples of 8 up to 256", [8, 256], [4, 264]),
        (IntSet(values=(64, 128, 256)), "64, 128, 256", [64, 256], [65, 0]),
        (IntSet(values=(1, 2, 3, 4, 576)), "1..4, 576", [1, 3, 576], [5, 575]),
        (IntSet(values=(2, 1)), "1, 2", [1, 2], [3]),
    ],
)
def test_a_set_of_ints_prints_and_holds_the_same(values, text, inside, outside) -> None:
    assert str(values) == text
    assert all(x in values for x in inside)
    assert not any(x in values for x in outside)


def test_an_unknown_feature_cannot_be_declared() -> None:
    with pytest.raises(ValueError, match="sofcap"):
        Capabilities(devices=("cpu",), dtypes=(), features=frozenset({"sofcap"}))
