"""What every case shares: a parameter of given values, and a scaler on the CPU."""

import pytest
import torch
from torch import nn

import halfstep


@pytest.fixture
def param():
    """A parameter holding these values, in this dtype."""

    def make(values, dtype=torch.float32):
        return nn.Parameter(torch.tensor(values, dtype=dtype))

    return make


@pytest.fixture
def make_scaler():
    """halfstep's scaler on the CPU, built like torch's."""

    def make(**options):
        return halfstep.GradScaler("cpu", **options)

    return make
