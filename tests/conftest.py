"""Fixtures: the implementations that are held to the same tests."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

import quest
from quest import backends


@pytest.fixture(params=backends.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kernels of each instruction set in turn."""
    backends.use_isa(request.param)
    yield request.param
    backends.use_isa(None)


@pytest.fixture(params=["reference", *backends.isas()])
def verbs(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The reference, and `quest` on each instruction set: for tables computed by hand."""
    if request.param == "reference":
        yield quest.reference
        return
    backends.use_isa(request.param)
    yield quest
    backends.use_isa(None)


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts the number of threads back that a test changes."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
