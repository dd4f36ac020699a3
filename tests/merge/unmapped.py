"""Merge a state half of whose output has no memory behind its addresses; see ``test_unread.py``.

python tests/merge/unmapped.py cuda empty
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from cuda.bindings import driver

from attn_backends.merge import merge_state, merge_states

HEADS, DIM = 4, 128


def call(function: Any, *args: Any) -> Any:
    """Call the driver and return what it gives beside its status."""
    code, *rest = function(*args)
    assert int(code) == 0, code
    return rest[0] if rest else None


def half_mapped() -> tuple[torch.Tensor, int]:
    """Outputs ``[T, 4, 128]`` float32 of which the first T / 2 tokens have memory, and T / 2."""
    kind = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    place = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop = driver.CUmemAllocationProp()
    prop.type, prop.location.type, prop.location.id = kind, place, 0
    least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    size = call(driver.cuMemGetAllocationGranularity, prop, least)
    address = int(call(driver.cuMemAddressReserve, 2 * size, 0, 0, 0))
    call(driver.cuMemMap, address, size, 0, call(driver.cuMemCreate, size, prop, 0), 0)
    access = driver.CUmemAccessDesc()
    access.location = prop.location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    call(driver.cuMemSetAccess, address, size, [access], 1)
    tokens = size // (HEADS * DIM * 4)
    shape = (2 * tokens, HEADS, DIM)
    array = {"shape": shape, "typestr": "<f4", "data": (address, False), "version": 2}
    holder = type("Holder", (), {"__cuda_array_interface__": array})()
    return torch.as_tensor(holder, device="cuda"), tokens


def main(path: str, form: str) -> None:
    """Merge, and compare with the merge of what there is."""
    torch.zeros(1, device="cuda")
    o, half = half_mapped()
    o[:half].normal_()
    lse = torch.randn(2 * half, HEADS, device="cuda")
    others = [(torch.randn(o.shape, device="cuda"), torch.randn_like(lse)) for _ in range(2)]
    b, c = others
    options = {"num_tokens_with_prefix": half} if form == "prefix" else {}
    if form in ("empty", "many"):
        lse[half : half + half // 2] = -float("inf")
        lse[half + half // 2 :] = -1e4
    for _ in range(3):  # the third may have been started early, beside the one before
        if form == "many":
            merged = merge_states([(o, lse), b, c], path=path)
        else:
            merged = merge_state(o, lse, *b, path=path, **options)
    torch.cuda.synchronize()
    rest = b if form != "many" else merge_states([b, c], path="torch")
    torch.testing.assert_close(merged.o[half:], rest[0][half:], atol=1e-6, rtol=1e-6)
    there = [(x[:half], y[:half]) for x, y in ((o, lse), *others)]
    want = merge_states(there if form == "many" else there[:2], path="torch")
    torch.testing.assert_close(merged.o[:half], want.o, atol=2e-6, rtol=1e-6)


if __name__ == "__main__":
    main(*sys.argv[1:])
