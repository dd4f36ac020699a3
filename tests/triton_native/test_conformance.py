"""The Triton backend conforms: in the interpreter without a GPU, on the GPU with one."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from attn_backends.conformance import BackendConformance


class TestTriton(BackendConformance):
    """Every rule at the level of a minute."""

    @pytest.fixture
    def backend(self) -> str:
        return "triton"
