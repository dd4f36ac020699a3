"""Shared by the merge tests: the paths that run here, random states, and a float64 oracle.

Without a GPU, ``triton`` means its interpreter, which handles float32 and float16; with one, all
three paths run on the GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INTERPRETED = DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"


def cases() -> list[Any]:
    """``(path, dtype)`` of everything that runs here; GPU cases are shown as skipped elsewhere."""
    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    found = []
    for path in ("torch", "triton", "cuda"):
        for name, dtype in dtypes.items():
            # The interpreter is wrong for bfloat16; that it is refused is tested elsewhere.
            here = path == "torch" or DEVICE.type == "cuda" or (path == "triton" and INTERPRETED)
            if path == "triton" and DEVICE.type == "cpu" and name == "bf16":
                here = False
            marks = [] if here else [pytest.mark.gpu]
            found.append(pytest.param((path, dtype), id=f"{path}-{name}", marks=marks))
    return found


@pytest.fixture(params=cases())
def case(request: pytest.FixtureRequest) -> tuple[str, torch.dtype]:
    """Each merge path with each dtype."""
    return request.param


@pytest.fixture
def path(case: tuple[str, torch.dtype]) -> str:
    """The path of ``case``."""
    return case[0]


@pytest.fixture
def dtype(case: tuple[str, torch.dtype]) -> torch.dtype:
    """The dtype of ``case``."""
    return case[1]


@pytest.fixture(params=[c for c in cases() if c.id.endswith("fp32")])
def each_path(request: pytest.FixtureRequest) -> str:
    """Each merge path once, for tests in float32."""
    return request.param[0]


@pytest.fixture
def device() -> torch.device:
    """Where the tests run."""
    return DEVICE


@pytest.fixture
def make_state() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """``make_state(T, H, D, dtype=..., layout=..., spread=...)``: a random ``(o, lse)``."""

    def make(
        tokens: int,
        heads: int,
        dim: int,
        dtype: torch.dtype = torch.float32,
        layout: str = "plain",
        spread: float = 3.0,
        seed: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        g = torch.Generator().manual_seed(seed)
        o = torch.randn(tokens, heads, dim, generator=g)
        lse = torch.randn(tokens, heads, generator=g) * spread
        return relayout(o.to(DEVICE, dtype), lse.to(DEVICE), layout)

    return make


def relayout(o: torch.Tensor, lse: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The same values in other memory; what lies between them is NaN."""
    tokens, heads, dim = o.shape
    if layout == "plain":
        return o, lse
    nan = float("nan")
    if layout == "padded":  # V padded to a wider head; an LSE with room after each row
        wide = torch.full((tokens, heads, dim + 64), nan, device=o.device, dtype=o.dtype)
        room = torch.full((tokens, heads + 3), nan, device=o.device)
        o_view, lse_view = wide[..., :dim], room[:, :heads]
    elif layout == "head_major":  # [H, T, D] and [H, T]
        o_view = torch.empty(heads, tokens, dim, device=o.device, dtype=o.dtype).transpose(0, 1)
        lse_view = torch.empty(heads, tokens, device=o.device).mT
    elif layout == "every_other":  # a token stride of two rows
        o_view = torch.full((2 * tokens, heads, dim), nan, device=o.device, dtype=o.dtype)[::2]
        lse_view = torch.full((2 * tokens, heads), nan, device=o.device)[::2]
    else:
        raise AssertionError(layout)
    o_view.copy_(o)
    lse_view.copy_(lse)
    return o_view, lse_view


@pytest.fixture
def arrange() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """``arrange(o, lse, layout)``: the same values in other memory."""
    return relayout


@pytest.fixture
def oracle() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """``oracle(states)``: the merge in float64, written directly from its definition."""

    def merge(states: list[tuple[Any, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
        lses = torch.stack([lse.double() for _, lse in states])
        lses = torch.where(lses == float("inf"), -float("inf"), lses)
        lse = torch.logsumexp(lses, 0)
        o = torch.zeros(states[0][0].shape, dtype=torch.float64, device=lse.device)
        for (o_i, _), lse_i in zip(states, lses):
            seen = lse_i > -float("inf")
            w = torch.where(seen, torch.exp(lse_i - lse), 0.0)[..., None]
            o += torch.where(w > 0, w * o_i.double(), 0.0)
        return o, lse

    return merge


@pytest.fixture
def assert_merged() -> Callable[..., None]:
    """``assert_merged(result, oracle_result, states)``: within the precision that is promised.

    float32: 1e-6 of the mass of the summands. Half types: one unit in the last place of the
    correctly rounded result, or the float32 bound where summands cancel and that unit is smaller.
    LSE: 1e-6 beyond the rounding of float32 itself.
    """

    def check(result: Any, expected: Any, states: list[tuple[Any, Any]]) -> None:
        o, lse = result
        o_64, lse_64 = expected
        assert lse.dtype == torch.float32
        slack = 1e-6 + half_ulp(lse_64)
        close = (lse.double() - lse_64).abs() <= slack
        same = (lse.double() == lse_64) | (lse.isnan() & lse_64.isnan())
        assert bool((close | same).all()), f"lse off by {(lse.double() - lse_64).abs().max()}"
        mass = sum(weight(lse_i, lse_64) * zero_nan(o_i) for o_i, lse_i in states)
        error = (o.double() - o_64).abs()
        fits = error <= 1e-6 * mass + 1e-30
        if o.dtype != torch.float32:
            fits |= ulps(o, o_64.to(o.dtype)) <= 1
        assert bool(fits.all()), f"o off by {error[~fits].max()}"

    return check


def weight(lse_i: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Weights ``[T, H, 1]`` of a state within the merged one, in float64."""
    w = torch.exp(lse_i.double() - lse)
    return torch.where(lse_i.isfinite(), w, 0.0)[..., None]


def zero_nan(o: torch.Tensor) -> torch.Tensor:
    """Magnitudes in float64, NaN as 0."""
    return o.double().abs().nan_to_num(0.0)


def half_ulp(x: torch.Tensor) -> torch.Tensor:
    """Half the spacing of float32 around float64 values."""
    return torch.where(x.isfinite(), x.abs(), 0.0) * 2.0**-24


def ulps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Distance of two half-type tensors in units in the last place."""

    def order(x: torch.Tensor) -> torch.Tensor:
        bits = x.contiguous().view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)  # both zeros are 0

    return (order(a) - order(b)).abs()
