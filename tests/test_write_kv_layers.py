"""Layers after the first write as the last one did: only what may differ between them is new."""

from __future__ import annotations

import os

import pytest
import torch

from attn_backends import kv_cache
from attn_backends.kv_cache import write_kv

kv_write = pytest.importorskip("attn_backends.triton_native.kv_write")
from attn_backends.layouts import guard  # noqa: E402

E4M3 = torch.float8_e4m3fn


def tensors(count: int = 6, heads: int = 2, dim: int = 16, kv: torch.dtype = torch.float32):
    """k, v, both caches as engines interleave them, and slots."""
    k, v = torch.randn(2, count, heads, dim).unbind()
    both = torch.zeros(3, 2, 4, heads, dim).to(kv)
    return [k, v, both[:, 0], both[:, 1], torch.arange(count)]


@pytest.fixture
def kept(monkeypatch):
    """A remembered write of ``tensors()`` with a scale on the device and one of 0.5."""
    launched = []
    scale = torch.ones(())
    fits = guard(*tensors(), scale)
    kept = kv_write._Kept(("what",), fits, (None, 0.5), 0, lambda *args: launched.append(args))
    monkeypatch.setattr(kv_write, "_kept", [kept])
    monkeypatch.setattr(kv_write.driver, "current_device", lambda: 0)
    monkeypatch.setattr(kv_write.driver, "current_stream", lambda index: 77)
    monkeypatch.setattr(kv_write, "is_hooked", lambda: False)
    return launched


def test_tensors_laid_out_alike_are_launched_by_address(kept):
    for _ in range(2):
        asked, scale = tensors(), torch.ones(())
        assert kv_write.again(*asked, scale, 0.5)
        assert kept.pop() == (77, *[x.data_ptr() for x in (*asked, scale, asked[0])])


@pytest.mark.parametrize(
    "change",
    [
        {"count": 7},
        {"heads": 1},
        {"dim": 8},
        {"kv": torch.float16},
    ],
    ids=str,
)
def test_other_layouts_take_the_ordinary_way(kept, change):
    assert not kv_write.again(*tensors(**change), torch.ones(()), 0.5)
    assert kept == []


@pytest.mark.parametrize(
    "scales",
    [
        (1.0, 0.5),
        (None, 0.5),
        (torch.ones(1), 0.5),
        (torch.ones((), dtype=torch.float64), 0.5),
        (torch.ones(()), 0.25),
        (torch.ones(()), None),
        (torch.ones(()), True),
        (torch.ones(()), torch.ones(())),
    ],
    ids=str,
)
def test_other_scales_take_the_ordinary_way(kept, scales):
    assert not kv_write.again(*tensors(), *scales)
    assert kept == []


def test_unfit_addresses_devices_and_hooks_take_the_ordinary_way(kept, monkeypatch):
    k, *rest = tensors()
    shifted = torch.zeros(k.numel() + 1)[1:].view(k.shape)
    assert not kv_write.again(shifted, *rest, torch.ones(()), 0.5)
    assert not kv_write.again(k.requires_grad_(), *rest, torch.ones(()), 0.5)
    assert not kv_write.again(None, *rest, torch.ones(()), 0.5)
    monkeypatch.setattr(kv_write, "is_hooked", lambda: True)
    assert not kv_write.again(*tensors(), torch.ones(()), 0.5)
    monkeypatch.setattr(kv_write, "is_hooked", lambda: False)
    monkeypatch.setattr(kv_write.driver, "current_device", lambda: 1)
    assert not kv_write.again(*tensors(), torch.ones(()), 0.5)
    monkeypatch.setattr(kv_write, "_kept", [])
    assert not kv_write.again(*tensors(), torch.ones(()), 0.5)
    assert kept == []


def test_the_debug_switch_checks_every_write(kept, monkeypatch):
    monkeypatch.setattr(kv_cache, "_again", kv_write.again)
    k, v, k_cache, v_cache, slots = tensors()
    write_kv(k, v, k_cache, v_cache, slots, torch.ones(()), 0.5)
    assert len(kept) == 1
    monkeypatch.setenv("ATTN_BACKENDS_VALIDATE", "1")
    with pytest.raises(kv_cache.InvalidInputError, match="k_scale"):  # of a cache as wide as keys
        write_kv(k, v, k_cache, v_cache, slots, torch.ones(()), 0.5)
    monkeypatch.delenv("ATTN_BACKENDS_VALIDATE")
    with pytest.raises(kv_cache.InvalidInputError, match="k_scale"):
        write_kv(k, v, k_cache, v_cache, slots, torch.ones(()), 0.5, path="torch")
    assert len(kept) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("kv", [torch.bfloat16, E4M3], ids=str)
def test_every_layer_of_every_step_writes_what_torch_writes(kv):
    layers = 5
    caches = [torch.zeros(9, 2, 16, 2, 64, device="cuda").to(kv) for _ in range(layers)]
    wanted = [cache.clone() for cache in caches]
    scales = [torch.full((), 0.5 + i, device="cuda") for i in range(layers)]
    launches = []
    for count in (40, 7, 7, 1, 40):
        slots = torch.randperm(9 * 16, device="cuda")[:count]
        slots[::5] = -1
        for i in range(layers):
            both = torch.randn(count, 4, 64, device="cuda", dtype=torch.bfloat16)
            scale = (scales[i], scales[i]) if kv is E4M3 else (None, None)
            new = both.split(2, dim=1)
            for path, cache in ((None, caches[i]), ("torch", wanted[i])):
                write_kv(*new, *cache.unbind(1), slots, *scale, path=path)
            launches.append(kv_write._kept[0].launch)
    torch.cuda.synchronize()
    for cache, want in zip(caches, wanted):
        assert torch.equal(cache.view(torch.uint8), want.view(torch.uint8))
    assert (
        launches[2] is not None and launches[2] is launches[4]
    )  # repeated from the third layer on


def test_a_first_write_remembers_nothing_to_repeat(monkeypatch):
    if os.environ.get("TRITON_INTERPRET") != "1" or torch.cuda.is_available():
        pytest.skip("drives the kernel on a CPU")
    monkeypatch.setattr(kv_write, "_kept", [])
    for _ in range(2):  # in the interpreter no launch is known
        write_kv(*tensors(), path="triton")
        assert not kv_write.again(*tensors(), None, None)
