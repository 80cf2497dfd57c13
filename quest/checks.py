"""Argument checks of the public functions: `ValueError`/`TypeError` that name op, argument, rule and what came.

They look at shapes, dtypes, strides and devices only, so they cost no synchronisation and vanish under torch.compile.
What needs a look at values (lengths, block ids, slots, page indices) the kernels check when `check=True`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 1024
MAX_NUMBER = torch.finfo(torch.float32).max  # the kernels' numbers are float32


class Args:
    """The tensors of one call. A dimension's name stands for one size in all of them.

    >>> args = Args("score")
    >>> args.add("query", query, "batch q_len num_heads head_dim", FLOATS)
    >>> args.add("page_min", page_min, "num_blocks num_kv_heads pages head_dim", FLOATS)  # head_dim as in query
    """

    def __init__(self, op: str) -> None:
        self.op = op
        self.sizes: dict[str, tuple[Any, str]] = {}  # dimension -> size, and the argument that set it
        self.first: tuple[str, Tensor] | None = None

    def __getitem__(self, dim: str) -> Any:
        return self.sizes[dim][0]

    def fail(self, name: str, rule: str, got: object, kind: type[Exception] = ValueError) -> None:
        raise kind(f"{self.op}: {name} {rule}, got {got}")

    def tensor(self, name: str, x: Any) -> Tensor:
        if not isinstance(x, Tensor):
            self.fail(name, "must be a tensor", type(x).__name__, TypeError)
        return x

    def add(
        self, name: str, x: Any, dims: str, dtypes: tuple[torch.dtype, ...], like: tuple[str, Tensor] | None = None
    ) -> None:
        """Check a tensor: type, dtype (in `dtypes`, and that of the argument `like`), device, shape, last stride."""
        self.tensor(name, x)
        if x.dtype not in dtypes:
            self.fail(name, f"must have dtype {' or '.join(map(_short, dtypes))}", _short(x.dtype), TypeError)
        if like is not None and x.dtype != like[1].dtype:
            self.fail(name, f"must have the dtype of {like[0]}, {_short(like[1].dtype)}", _short(x.dtype), TypeError)
        if self.first is None:
            self.first = (name, x)
        elif x.device != self.first[1].device:
            self.fail(name, f"must be on the device of {self.first[0]}, {self.first[1].device}", x.device)
        names = dims.split()
        if x.dim() != len(names):
            self.fail(name, f"must be [{', '.join(names)}]", f"shape {_shape(x)}")
        for dim, size in zip(names, x.shape, strict=True):
            if dim not in self.sizes:
                self.sizes[dim] = (size, name)
            elif self.sizes[dim][0] != size:
                known, of = self.sizes[dim]
                self.fail(name, f"must be [{', '.join(names)}] with {dim} {known} as in {of}", f"shape {_shape(x)}")
        if x.dim() and x.shape[-1] > 1 and x.stride(-1) != 1:
            self.fail(name, "must be contiguous in its last dimension", f"strides {tuple(x.stride())}")
        if x.requires_grad and torch.is_grad_enabled():
            self.fail(name, "must not require grad (no backward here: use torch.no_grad())", "requires_grad=True")

    def heads(self) -> None:
        heads, kv_heads = self["num_heads"], self["num_kv_heads"]
        if kv_heads < 1 or heads < 1 or heads % kv_heads:
            self.fail("query", f"must have a multiple of {kv_heads} heads (num_kv_heads)", heads)

    def head_dim(self, dim: str = "head_dim") -> None:
        if not 1 <= self[dim] <= MAX_HEAD_DIM:
            self.fail(self.sizes[dim][1], f"must have {dim} in [1, {MAX_HEAD_DIM}]", self[dim])

    def page_size(self, page_size: Any) -> None:
        self.at_least("page_size", page_size, 1)
        if self["block_size"] % page_size:
            self.fail("page_size", f"must divide block_size {self['block_size']}", page_size)

    def at_least(self, name: str, value: Any, low: int) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
            self.fail(name, "must be an int", repr(value), TypeError)
        if value < low:
            self.fail(name, f"must be at least {low}", value)

    def number(self, name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
            self.fail(name, "must be a number", repr(value), TypeError)

    def positive(self, name: str, value: Any) -> None:
        """Check a number or None: above 0 and finite."""
        if value is not None:
            self.number(name, value)
            if not 0 < value <= MAX_NUMBER:
                self.fail(name, "must be positive and finite", value)

    def window(self, window: Any) -> None:
        if window is not None:
            self.at_least("window", window, 1)

    def slack(self, slack: Any, name: str = "slack") -> None:
        self.number(name, slack)
        if not 0 <= slack <= 1:
            self.fail(name, "must be in [0, 1]", slack)

    def sinks(self, sinks: Any) -> Tensor | None:
        """The attention sink logits as a kernel takes them, contiguous float32."""
        if sinks is None:
            return None
        self.add("sinks", sinks, "num_heads", FLOATS)
        return sinks.float().contiguous()


def check_values(op: str, k_cache: Tensor, block_table: Tensor, seq_lens: Tensor, slot_mapping: Tensor) -> None:
    """What the fused op looks at before it writes, for backends that write verb by verb."""
    args, (blocks, _, block_size, _) = Args(op), k_cache.shape
    for i, slot in enumerate(slot_mapping.flatten().tolist()):
        if not -1 <= slot < blocks * block_size:
            args.fail("slot_mapping:", f"slot of token {i} must be -1 (skip) or in [0, {blocks * block_size})", slot)
    for row, (length, ids) in enumerate(zip(seq_lens.tolist(), block_table.tolist())):
        if length < 0:
            args.fail(f"seq_lens[{row}]:", "must not be negative", length)
        if length > len(ids) * block_size:
            args.fail(
                "block_table:", f"{len(ids)} blocks of {block_size} tokens are too narrow for seq_lens[{row}]", length
            )
        for i, block in enumerate(ids[: -(-length // block_size)]):
            if not 0 <= block < blocks:
                rule = f"block id must be in [0, {blocks}) for seq_lens[{row}] = {length}"
                args.fail(f"block_table[{row}, {i}]:", rule, block)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(x: Tensor) -> str:
    return str(list(x.shape))
