from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

# Times on a shared machine say nothing, hence no deadline. CI repeats the same examples, so that a
# red run means a change; other runs draw new ones.
settings.register_profile(
    "dsv32", deadline=None, print_blob=True, derandomize=os.environ.get("CI") == "true"
)
settings.load_profile("dsv32")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU (torch.cuda.is_available() is False)")


@pytest.fixture
def gpus2() -> tuple[torch.device, torch.device]:
    """Two different GPUs; skips where there are fewer. Use with the marker `gpu`."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, found {torch.cuda.device_count()}")
    return torch.device("cuda", 0), torch.device("cuda", 1)
