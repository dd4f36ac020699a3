"""One wheel for all tests of this folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from building import EPOCH, build


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under xdist one worker takes them all, and the wheel is built once."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("wheel"))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of these sources."""
    pytest.importorskip("setuptools", minversion="77")
    return build(tmp_path_factory.mktemp("wheel"), EPOCH)
