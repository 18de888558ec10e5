"""Shared set-up: one thread (two stall when both cores are busy) and a fixed seed."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def pytest_addoption(parser):
    parser.addoption("--exhaustive", action="store_true", help="every fp32 pattern where a sample is tested otherwise")
