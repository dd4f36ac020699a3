"""Kept merges: which calls are repeated without checks, with which addresses, at what cost."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch._C._dynamo.guards import _empty_strided_cpu

from attn_backends import driver, layouts
from attn_backends.merge import pair as pairs
from attn_backends.merge.kept import FRESH, GIVEN, MAX_ALIKE, MAX_PLACES


@pytest.fixture
def calls(monkeypatch):
    """The kept pairs, none at first; launches go nowhere, and the CPU is the current device."""
    monkeypatch.setattr(driver, "current_device", lambda: None)
    monkeypatch.setattr(driver, "current_stream", lambda index: 5)
    monkeypatch.setattr(layouts, "_empty_strided_cuda", _empty_strided_cpu)
    pairs.forget()
    yield pairs._CALLS
    pairs.forget()


def fresh(inputs):
    return torch.empty_like(inputs[0]), torch.empty_like(inputs[1])


class FakeLaunch:
    """A launch that writes down its arguments, those that were filled in before among them."""

    def __init__(self, log, name):
        self.log, self.name, self.code = log, name, 0

    def __call__(self, *args):
        self.log.append((self.name, args))

    def filled(self, *args):
        def call(*args):
            self(*args)
            return self.code

        return driver.Filled(args, SimpleNamespace(_call=call))


class Kept:
    """A prepared merge that writes down its launches, and what it was asked to settle."""

    def __init__(self, in_place=False, pack=None):
        self.log, self.settled, self.in_place = [], [], in_place
        self.ready = [FakeLaunch(self.log, False), FakeLaunch(self.log, True)]
        if pack is not None:
            self.pack = pack

    def settle(self, place):
        self.settled.append(place)
        return self.in_place


def pair(seed=0):
    torch.manual_seed(seed)
    return tuple(torch.randn(s) for s in ((3, 2, 8), (3, 2), (3, 2, 8), (3, 2)))


def keep(calls, inputs, kept, out=None, asked=None, path="cuda"):
    make = pairs.fresh(inputs[0].shape, inputs[0].dtype, None)
    calls.keep(inputs[0].shape, asked, path, kept, inputs, out, kept.settle, make)


def repeat(inputs, out=None, asked=None):
    return pairs._repeat(*inputs, out, asked)


def addresses(*tensors):
    return tuple(x.data_ptr() for x in tensors)


def test_a_kept_merge_is_repeated_with_other_addresses(calls):
    kept = Kept()
    keep(calls, pair(), kept)
    inputs = pair(1)
    o, lse = repeat(inputs)
    assert kept.log == [(False, (5, *addresses(*inputs, o, lse)))]
    assert repeat(inputs, asked="cuda") is None  # asked for otherwise
    out = fresh(inputs)
    assert repeat(inputs, out) is None  # another form
    other = (inputs[0].half(), *inputs[1:])
    assert repeat(other) is None
    calls.forget()
    assert repeat(inputs) is None and len(kept.log) == 1


def test_outputs_are_settled_once_per_addresses(calls):
    kept = Kept()
    inputs, out = pair(), fresh(pair())
    keep(calls, inputs, kept, out)
    for _ in range(3):
        result = repeat(inputs, out)
        assert result.o is out[0] and result.lse is out[1]
    assert kept.settled == [addresses(*inputs, *out)] and len(kept.log) == 3
    holder = []
    for _ in range(MAX_PLACES + 5):
        holder.append(fresh(inputs))
        repeat(inputs, holder[-1])
    (call,) = calls.known[GIVEN][inputs[0].shape]
    assert len(call.places) <= MAX_PLACES


def test_what_comes_again_is_written_once_for_each_stream(calls, monkeypatch):
    kept = Kept()
    inputs, out = pair(), fresh(pair())
    keep(calls, inputs, kept, out)
    for stream in (5, 6, 5, 6, 5, 6):
        monkeypatch.setattr(driver, "current_stream", lambda index, stream=stream: stream)
        repeat(inputs, out)
    args = addresses(*inputs, *out)
    assert [entry for _, entry in kept.log] == [(stream, *args) for stream in (5, 6, 5, 6, 5, 6)]
    (call,) = calls.known[GIVEN][inputs[0].shape]
    assert {type(x) for x in call.places.values()} == {driver.Filled}
    assert set(call.places) == {(5, args), (6, args)}


def test_a_launch_that_the_driver_refuses_raises(calls, monkeypatch):
    kept = Kept()
    inputs, out = pair(), fresh(pair())
    keep(calls, inputs, kept, out)
    for _ in range(3):
        repeat(inputs, out)
    kept.ready[0].code = 700
    monkeypatch.setattr(driver, "_words", lambda code: f"words of {code}")
    with pytest.raises(RuntimeError, match="words of 700"):
        repeat(inputs, out)


def test_addresses_that_need_a_closer_look_are_not_repeated(calls):
    kept = Kept(in_place=None)
    inputs, out = pair(), fresh(pair())
    keep(calls, inputs, kept, out)
    assert repeat(inputs, out) is None and not kept.log


def test_merging_in_place_takes_the_other_launch(calls):
    kept = Kept(in_place=True)
    inputs = pair()
    keep(calls, inputs, kept, inputs[:2])
    result = repeat(inputs, inputs[:2])
    assert result.o is inputs[0] and kept.log[0][0] is True
    kept.ready[1] = None  # not compiled yet: the ordinary way compiles
    assert repeat(inputs, inputs[:2]) is None


def test_arguments_are_packed_where_a_kernel_wants_them_otherwise(calls):
    kept = Kept(pack=lambda *at: at[::-1])
    inputs = pair()
    keep(calls, inputs, kept)
    o, lse = repeat(inputs)
    assert kept.log == [(False, (5, *addresses(*inputs, o, lse)[::-1]))]


def test_nothing_is_kept_that_could_not_be_repeated(calls):
    inputs = pair()
    kept = Kept()
    kept.ready = [None, None]
    keep(calls, inputs, kept)
    calls.keep(inputs[0].shape, None, "torch", print, inputs, None, kept.settle, fresh)
    keep(calls, (inputs[0].clone().requires_grad_(), *inputs[1:]), Kept())
    assert not any(calls.known)


def test_few_are_kept_per_shape_and_none_twice(calls):
    inputs = pair()
    kept = Kept()
    for _ in range(3):
        keep(calls, inputs, kept)
    assert len(calls.known[FRESH][inputs[0].shape]) == 1
    for _ in range(MAX_ALIKE + 3):
        keep(calls, inputs, Kept())
    assert len(calls.known[FRESH][inputs[0].shape]) == MAX_ALIKE


def test_profilers_and_other_devices_take_the_ordinary_way(calls, monkeypatch):
    compiled = pytest.importorskip("attn_backends.triton_compiled")
    hooked = SimpleNamespace(now=False)
    monkeypatch.setattr(compiled, "is_hooked", lambda: hooked.now)
    inputs, kept = pair(), Kept()
    keep(calls, inputs, kept, path="triton")
    assert repeat(inputs) is not None
    hooked.now = True
    assert repeat(inputs) is None
    hooked.now = False
    monkeypatch.setattr(driver, "current_device", lambda: 1)
    assert repeat(inputs) is None and len(kept.log) == 1


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
    for _ in range(2):
        repeat(inputs, out)
    # Six addresses, one comparison, device, stream, launch; the fake launch is four of them.
    assert count_calls(lambda: repeat(inputs, out)) <= 20
