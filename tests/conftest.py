"""Fixtures: the implementations that are held to the same tests."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import gpu_kernels
import pytest
import torch

import quest
from quest import backends
from quest.slots import SlotResidency

gpu_kernels.interpret()


@pytest.fixture(params=backends.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kernels of each instruction set in turn."""
    backends.use_isa(request.param)
    yield request.param
    backends.use_isa(None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU, and torch sees none here"))


def _device_mark(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.gpu) if name == "device" else name


@pytest.fixture(params=[*backends.isas(), *map(_device_mark, gpu_kernels.NAMES)])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """The CPU kernels of each instruction set, and the GPU's in their place (see gpu_kernels.py)."""
    if request.param in gpu_kernels.NAMES:
        with gpu_kernels.in_place_of_cpu(request.param):
            yield request.param
        return
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
def slots_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches with `Offload` on the CPU do what those on a GPU do."""
    on_cpu = lambda *args: SlotResidency(*args, torch.device("cpu"))  # noqa: E731
    monkeypatch.setattr("quest.pools.Residency", on_cpu)


@pytest.fixture(params=["files", "slots"])
def tier(request: pytest.FixtureRequest) -> str:
    """Where K and V are that are not in the memory of a cache with `Offload`."""
    if request.param == "slots":
        request.getfixturevalue("slots_on_cpu")
    return request.param


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts the number of threads back that a test changes."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
