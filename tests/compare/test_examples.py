"""The examples in the docstrings run."""

import doctest
import importlib
import pkgutil

import pytest

import halfstep.compare

MODULES = [module.name for module in pkgutil.iter_modules(halfstep.compare.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    assert doctest.testmod(importlib.import_module(f"halfstep.compare.{name}")).failed == 0
