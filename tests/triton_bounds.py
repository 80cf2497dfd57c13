"""Triton's interpreter reads and writes wherever a kernel says; under `checked` only in the memory of its arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for x in value:
            yield from _tensors(x)


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Every address that a launched kernel loads or stores lies in the storage of one of its tensors."""
    from triton.runtime.interpreter import InterpreterBuilder

    from quest.triton_kernels.primitives import Launch

    memory: list[tuple[int, int]] = []
    launch, load, store = Launch.__call__, InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def check(pointers: Any, mask: Any) -> None:
        at = pointers.data[np.broadcast_to(mask.data.astype(bool), pointers.data.shape)].astype(np.int64)
        end = at + pointers.get_element_ty().primitive_bitwidth // 8
        inside = [(at >= first) & (end <= last) for first, last in memory]
        assert np.any(inside, axis=0).all(), "a kernel left the memory of its arguments"

    def launch_checked(self: Any) -> None:
        storages = [x.untyped_storage() for value in self.arguments.values() for x in _tensors(value)]
        memory[:] = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]
        launch(self)

    def load_checked(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return load(self, pointers, mask, *rest)

    def store_checked(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    with (
        mock.patch.object(Launch, "__call__", launch_checked),
        mock.patch.object(InterpreterBuilder, "create_masked_load", load_checked),
        mock.patch.object(InterpreterBuilder, "create_masked_store", store_checked),
    ):
        yield
