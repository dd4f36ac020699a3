"""The suite as tests of the backend that ``--attn-backend`` names; see ``plugin``."""

from __future__ import annotations

from typing import Any

import pytest

from .base import BackendConformance


class TestConformance(BackendConformance):
    """The backend named on the command line."""

    @pytest.fixture
    def backend(self, request: pytest.FixtureRequest) -> Any:
        """The value of ``--attn-backend``."""
        name = request.config.getoption("--attn-backend", None)
        if name is None:
            pytest.fail("give a backend: --attn-backend NAME or module:Class", pytrace=False)
        return name
