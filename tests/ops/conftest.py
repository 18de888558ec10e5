"""What the tests of the stable functions share: the measurements, and how many bytes autograd keeps."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

# By path: the tests are no package. Registered first, because its dataclass looks its own module up.
_spec = importlib.util.spec_from_file_location("ops_errors", Path(__file__).with_name("errors.py"))
_errors = importlib.util.module_from_spec(_spec)
sys.modules["ops_errors"] = _errors
_spec.loader.exec_module(_errors)


@pytest.fixture
def errors():
    """The module of measurements."""
    return _errors


@pytest.fixture
def saved():
    """A function that runs another one and returns the tensors that autograd keeps for its backward."""

    def of(function):
        kept = []

        def pack(tensor):
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = function()
        assert result.requires_grad
        return {t.data_ptr(): t for t in kept}.values()

    return of
