"""A repeated run hands the Hopper prefill addresses, as it does the plain kernels."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from attn_backends import driver
from attn_backends.backend import RunExtras
from attn_backends.output import AttentionOutput
from attn_backends.triton_native import repeat as module
from attn_backends.triton_native.call import Step

NONE = RunExtras()


class Form:
    """A compiled plain kernel whose launches are written down."""

    def __init__(self, log: list, name: str) -> None:
        self.log, self.name = log, name

    def launch(self, grid, values, changing):
        return lambda stream, *args: self.log.append((self.name, *args))


@pytest.fixture
def made(monkeypatch):
    """``make(extras, known)``: a repeat of split, prefill and merge, and what it launches."""
    monkeypatch.setattr(driver, "current_device", lambda: None)
    monkeypatch.setattr(driver, "current_stream", lambda index: 7)
    monkeypatch.setattr(module, "is_hooked", lambda: False)
    monkeypatch.setattr(
        module,
        "empty",
        lambda shape, stride, dtype, i: torch.empty_strided(shape, stride, dtype=dtype),
    )

    def make(extras=NONE, known=True):
        log: list = []
        launchers = {
            n: SimpleNamespace(form=lambda key, n=n: Form(log, n), values=())
            for n in ("split", "prefill", "merge")
        }
        steps = [
            Step(launchers["split"], (3, 1, 1), tuple, (1600,), (), False),
            Step(launchers["prefill"], (3, 1, 1), tuple, (3200,), (), False),
            Step(launchers["merge"], (2, 1, 1), tuple, (4800,), (), True),
        ]

        def kept(q, work, table):
            assert (work, table) == ("work", "table")
            return (lambda stream, *args: log.append(("hopper", *args))) if known else None

        call = SimpleNamespace(
            steps=steps, hopper=SimpleNamespace(kept=kept), prefill=launchers["prefill"],
            bytes=False, scale=0.5, softcap=1.0, key="key",
            plan=SimpleNamespace(
                mask_indptr=None, hopper_work="work", batch=SimpleNamespace(page_table="table")
            ),
        )  # fmt: skip
        out = AttentionOutput(torch.empty(4, 2, 16), torch.empty(4, 2))
        return module.repeat_of(call, qkv(), extras, out, False), log

    return make


def qkv():
    return torch.randn(4, 2, 16), torch.randn(9, 1, 16), torch.randn(9, 1, 16)


def test_the_kernels_of_a_step_keep_their_order_and_take_the_same_addresses(made):
    repeat, log = made()
    q, k, v = qkv()
    o, lse = repeat(q, k, v, None, None)
    at = [x.data_ptr() for x in (q, k, v, o, lse)]
    assert log == [("split", *at), ("hopper", *at), ("merge", *at[3:])]


def test_sinks_reach_every_kernel_of_a_mixed_batch(made):
    sinks = torch.randn(2)
    repeat, log = made(RunExtras(sinks=sinks))
    other = torch.randn(2)
    repeat(*qkv(), (other, None, None, None, None), None)
    assert [x[0] for x in log] == ["split", "hopper", "merge"]
    assert all(other.data_ptr() in x for x in log)
    assert log[1][-1] == other.data_ptr() and len(log[1]) == 7


def test_nothing_is_repeated_before_the_kernel_is_known(made):
    assert made(known=False)[0] is None
