"""Shared set-up: one thread (two stall when both cores are busy) and a fixed seed."""

import os

import pytest
import torch

os.environ.pop("COLUMNS", None)  # several worker processes inherit the terminal's width, one does not
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def pytest_addoption(parser):
    parser.addoption("--exhaustive", action="store_true", help="every fp32 pattern where a sample is tested otherwise")


def pytest_collection_modifyitems(items):
    """Scalers that step 16-bit weights without masters say so; many tests of something else do it on purpose."""
    mark = pytest.mark.filterwarnings("ignore:.*steps 16-bit weights without masters")
    for item in items:
        if item.path.parent.name in ("scaling", "cases"):
            item.add_marker(mark, append=False)
