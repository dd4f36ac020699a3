"""Kept merges: which calls are repeated without checks, with which addresses, at what cost."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from attn_backends import driver
from attn_backends.merge.kept import MAX_ALIKE, MAX_PLACES, Calls


@pytest.fixture
def calls(monkeypatch):
    """An empty store whose launches go nowhere; the CPU passes for the current device."""
    monkeypatch.setattr(driver, "current_device", lambda: None)
    monkeypatch.setattr(driver, "current_stream", lambda index: 5)
    return Calls()


def fresh(inputs):
    return torch.empty_like(inputs[0]), torch.empty_like(inputs[1])


class Kept:
    """A prepared merge that writes down its launches, and what it was asked to settle."""

    def __init__(self, in_place=False, pack=None):
        self.log, self.settled, self.in_place = [], [], in_place
        self.ready = [lambda *a: self.log.append((False, a)), lambda *a: self.log.append((True, a))]
        if pack is not None:
            self.pack = pack

    def settle(self, place):
        self.settled.append(place)
        return self.in_place


def pair(seed=0):
    torch.manual_seed(seed)
    return tuple(torch.randn(s) for s in ((3, 2, 8), (3, 2), (3, 2, 8), (3, 2)))


def keep(calls, inputs, kept, out=None, asked=None, path="cuda"):
    calls.keep(inputs[0].shape, asked, path, kept, inputs, out, kept.settle, fresh)


def addresses(*tensors):
    return tuple(x.data_ptr() for x in tensors)


def test_a_kept_merge_is_repeated_with_other_addresses(calls):
    kept = Kept()
    keep(calls, pair(), kept)
    inputs = pair(1)
    o, lse = calls.repeat(inputs[0].shape, None, inputs, None)
    assert kept.log == [(False, (5, *addresses(*inputs, o, lse)))]
    assert calls.repeat(inputs[0].shape, "cuda", inputs, None) is None  # asked for otherwise
    out = fresh(inputs)
    assert calls.repeat(inputs[0].shape, None, inputs, out) is None  # another form
    other = (inputs[0].half(), *inputs[1:])
    assert calls.repeat(inputs[0].shape, None, other, None) is None
    calls.forget()
    assert calls.repeat(inputs[0].shape, None, inputs, None) is None and len(kept.log) == 1


def test_outputs_are_settled_once_per_addresses(calls):
    kept = Kept()
    inputs, out = pair(), fresh(pair())
    keep(calls, inputs, kept, out)
    for _ in range(3):
        result = calls.repeat(inputs[0].shape, None, inputs, out)
        assert result.o is out[0] and result.lse is out[1]
    assert kept.settled == [addresses(*inputs, *out)] and len(kept.log) == 3
    holder = []
    for _ in range(MAX_PLACES + 5):
        holder.append(fresh(inputs))
        calls.repeat(inputs[0].shape, None, inputs, holder[-1])
    (call,) = calls._known[(inputs[0].shape, 2)]
    assert len(call._places) <= MAX_PLACES


def test_addresses_that_need_a_closer_look_are_not_repeated(calls):
    kept = Kept(in_place=None)
    inputs, out = pair(), fresh(pair())
    keep(calls, inputs, kept, out)
    assert calls.repeat(inputs[0].shape, None, inputs, out) is None and not kept.log


def test_merging_in_place_takes_the_other_launch(calls):
    kept = Kept(in_place=True)
    inputs = pair()
    keep(calls, inputs, kept, inputs[:2])
    result = calls.repeat(inputs[0].shape, None, inputs, inputs[:2])
    assert result.o is inputs[0] and kept.log[0][0] is True
    kept.ready[1] = None  # not compiled yet: the ordinary way compiles
    assert calls.repeat(inputs[0].shape, None, inputs, inputs[:2]) is None


def test_arguments_are_packed_where_a_kernel_wants_them_otherwise(calls):
    kept = Kept(pack=lambda *at: at[::-1])
    inputs = pair()
    keep(calls, inputs, kept)
    o, lse = calls.repeat(inputs[0].shape, None, inputs, None)
    assert kept.log == [(False, (5, *addresses(*inputs, o, lse)[::-1]))]


def test_nothing_is_kept_that_could_not_be_repeated(calls):
    inputs = pair()
    kept = Kept()
    kept.ready = [None, None]
    keep(calls, inputs, kept)
    calls.keep(inputs[0].shape, None, "torch", print, inputs, None, kept.settle, fresh)
    keep(calls, (inputs[0].clone().requires_grad_(), *inputs[1:]), Kept())
    assert not calls._known


def test_few_are_kept_per_shape_and_none_twice(calls):
    inputs = pair()
    kept = Kept()
    for _ in range(3):
        keep(calls, inputs, kept)
    assert len(calls._known[(inputs[0].shape, 0)]) == 1
    for _ in range(MAX_ALIKE + 3):
        keep(calls, inputs, Kept())
    assert len(calls._known[(inputs[0].shape, 0)]) == MAX_ALIKE


def test_profilers_and_other_devices_take_the_ordinary_way(calls, monkeypatch):
    compiled = pytest.importorskip("attn_backends.triton_compiled")
    hooked = SimpleNamespace(now=False)
    monkeypatch.setattr(compiled, "is_hooked", lambda: hooked.now)
    inputs, kept = pair(), Kept()
    keep(calls, inputs, kept, path="triton")
    assert calls.repeat(inputs[0].shape, None, inputs, None) is not None
    hooked.now = True
    assert calls.repeat(inputs[0].shape, None, inputs, None) is None
    hooked.now = False
    monkeypatch.setattr(driver, "current_device", lambda: 1)
    assert calls.repeat(inputs[0].shape, None, inputs, None) is None and len(kept.log) == 1


def count_calls(function) -> int:
    """Functions called, in Python and in C: a cost that does not depend on the machine."""
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_a_repeat_costs_few_calls(calls):
    inputs, out = pair(), fresh(pair())
    kept = Kept()
    keep(calls, inputs, kept, out)
    repeat = lambda: calls.repeat(inputs[0].shape, None, inputs, out)  # noqa: E731
    repeat()
    assert count_calls(repeat) <= 20  # six addresses, one comparison, device, stream, launch
