"""Guards tell layouts apart by everything but addresses, with torch's comparison and without."""

from __future__ import annotations

import pytest
import torch

from attn_backends import layouts


@pytest.fixture(params=["torch", "plain"])
def guard(request, monkeypatch):
    if request.param == "torch" and not layouts._COMPILED:
        pytest.skip("this torch has no such comparison")
    monkeypatch.setattr(layouts, "_COMPILED", request.param == "torch")
    return layouts.guard


def test_the_comparison_of_this_torch_is_used():
    assert layouts._COMPILED  # else merges and runs cost microseconds more, and nothing says so


def test_other_tensors_of_the_same_layout_fit(guard):
    a, b = torch.zeros(2, 3), torch.zeros(4, 2, dtype=torch.float16).mT
    fits = guard(a, b)
    assert fits(torch.ones(2, 3), torch.ones(4, 2, dtype=torch.float16).mT)
    assert fits(a[:, :], b)
    with torch.no_grad():
        assert fits(a, b)


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(2, 4),
        torch.zeros(2, 3, 1),
        torch.zeros(3, 2).mT,
        torch.zeros(2, 6)[:, ::2],
        torch.zeros(2, 3).double(),
        torch.zeros(2, 3, dtype=torch.int32),
        torch.zeros(2, 3, device="meta"),
        torch.zeros(2, 3, requires_grad=True),
        torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False),
    ],
    ids=["shape", "rank", "order", "stride", "dtype", "int", "device", "grad", "subclass"],
)
def test_every_difference_counts(guard, other):
    a = torch.zeros(2, 3)
    assert not guard(a, torch.ones(1))(other, torch.ones(1))
    assert not guard(torch.ones(1), a)(torch.ones(1), other)


def test_no_guard_for_what_needs_a_look_each_time(guard):
    a = torch.zeros(2, 3)
    assert guard(a, torch.zeros(2, requires_grad=True)) is None
    assert guard(torch.nn.Parameter(a)) is None
    assert guard(a, None) is None
    assert guard(a)(None) is False


@pytest.mark.parametrize("plain", [False, True])
def test_a_remembered_view_is_that_of_each_tensor(
    plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if plain:
        monkeypatch.setattr(layouts, "restride", layouts._as_strided)
    view = layouts.remembered(lambda x: x.unsqueeze(1).transpose(0, 2))
    for _ in range(3):
        whole = torch.rand(4, 5, 7)
        x = whole[:, 1:, ::2]  # strides of its own, and not the first element of its memory
        got = view(x)
        assert torch.equal(got, x.unsqueeze(1).transpose(0, 2))
        assert got.data_ptr() == x.data_ptr()
