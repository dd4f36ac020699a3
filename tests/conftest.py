"""Shared test set-up: the interpreter without a GPU, marks, and poisoned allocations."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    # Triton decides at import whether its kernels run in the interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

for name in [n for n in os.environ if n.startswith("ATTN_BACKENDS_")]:
    del os.environ[name]  # a developer's settings must not decide what the tests see


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    need = {
        "gpu": (HAS_CUDA, "needs a CUDA GPU"),
        "multi_gpu": (HAS_CUDA and torch.cuda.device_count() > 1, "needs two CUDA GPUs"),
    }
    for item in items:
        for mark, (present, why) in need.items():
            if item.get_closest_marker(mark) and not present:
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill what the package gets from ``torch.empty`` and its kin with NaN, so that an output
    that nobody wrote is seen. Calls from elsewhere are left alone."""

    def poison(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            if torch.compiler.is_compiling():
                return make(*args, **kwargs)
            result = make(*args, **kwargs)
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.startswith("attn_backends") and not _is_fake(result):
                _fill(result)
            return result

        return made

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poison(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))
    yield


def _is_fake(x: torch.Tensor) -> bool:
    return type(x) is not torch.Tensor or x.device.type == "meta"


def _fill(x: torch.Tensor) -> None:
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    if x.dtype.is_floating_point:
        if x.dtype.itemsize == 1:
            x.view(torch.uint8).fill_(0x7F)
        else:
            x.fill_(float("nan"))
    elif x.dtype in (torch.int32, torch.int64):
        x.fill_(torch.iinfo(x.dtype).max)
