"""The ops on CUDA tensors: Triton packs, scores and selects, CUDA C++ appends and attends, or Triton where that can't.

What `quest._C_cuda` can't do is decided by shapes and the card alone, never by values: nothing here waits for the
device, and all of it can be captured in a CUDA graph. Triton is imported at the first use.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_wanted = "auto"  # which kernels append and attend: "auto", or "cuda" or "triton" while `using` says so


@cache
def triton_kernels() -> ModuleType:
    import quest.triton_kernels

    return quest.triton_kernels


@cache
def extension_archs() -> str:
    """The architectures that quest._C_cuda holds code for, such as "80;90;120+PTX"; "" where it isn't installed."""
    if importlib.util.find_spec("quest._C_cuda") is None:
        return ""
    import quest._C_cuda  # noqa: F401  # registers the ops

    return torch.ops.quest_cuda.archs()


def triton_missing() -> str:
    """One sentence if Triton isn't installed, else ""."""
    return "" if importlib.util.find_spec("triton") else "triton is not installed (CUDA builds of torch bring it)"


def extension_missing(device: torch.device | None = None) -> str:
    """One sentence if quest._C_cuda can't run on a device (default: the current one), else ""."""
    archs = extension_archs()
    if not archs:
        return "quest was built without its CUDA extension (QUEST_CUDA=1 builds it)"
    major, minor = torch.cuda.get_device_capability(device)
    if any(_runs_on(arch, major, minor) for arch in archs.split(";")):
        return ""
    return f"quest._C_cuda has no machine code for this card, sm_{major}{minor} (it has {archs})"


def _runs_on(arch: str, major: int, minor: int) -> bool:
    """Machine code serves cards of its own generation from its version on; PTX serves every later one."""
    number = int(arch.removesuffix("+PTX"))
    same = number // 10 == major and number % 10 <= minor
    return same or (arch.endswith("+PTX") and number <= 10 * major + minor)


@contextlib.contextmanager
def using(name: str) -> Iterator[None]:
    """Append and attend with "cuda" (or fail) or with "triton" instead of what "auto" takes."""
    global _wanted
    before, _wanted = _wanted, name
    try:
        yield
    finally:
        _wanted = before


def side_of(query: Tensor, k_cache: Tensor, v_cache: Tensor) -> Any:
    """Whose `append`, `summarise`, `append_summarise`, `attend` run for such tensors: the extension's or Triton's."""
    if _wanted != "triton":
        reason = extension_missing(query.device) or torch.ops.quest_cuda.reason(query, k_cache, v_cache)
        if not reason:
            return torch.ops.quest_cuda
        if _wanted == "cuda":
            raise ValueError(f"decode: backend cuda can't run: {reason}")
    return triton_kernels()


def reads_all(budget: int, budget_fraction: float, k_cache: Tensor, block_table: Tensor) -> bool:
    """Whether every row reads all it sees, whatever its length: nothing need be scored then."""
    return budget_fraction >= 1 or budget >= block_table.shape[1] * k_cache.shape[2]


# --- the ops, as registration.cpp declares them -----------------------------------------------------------------------


def append(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> None:
    side_of(key, k_cache, v_cache).append(key, value, k_cache, v_cache, *rest)


def summarise(k_cache: Tensor, *rest: Any) -> None:
    side_of(k_cache, k_cache, k_cache).summarise(k_cache, *rest)


def attend(query: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return side_of(query, k_cache, v_cache).attend(query, k_cache, v_cache, *rest)


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    in_cuda = _wanted != "triton" and not extension_missing(out_a.device)
    return (torch.ops.quest_cuda if in_cuda else triton_kernels()).merge(out_a, lse_a, out_b, lse_b)


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_min: Tensor,
    page_max: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    dense: bool,
    softmax_scale: float,
    budget: int,
    budget_fraction: float,
    sink_pages: int,
    recent_pages: int,
    max_selected: int,
    slack: float,
    group_rule: str,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    window: int = -1,
    check: bool = True,
    *,
    heads_first: bool = False,
) -> tuple[Tensor, Tensor]:
    if heads_first:
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    triton, side = triton_kernels(), side_of(query, k_cache, v_cache)
    rows, page_size = (block_table, seq_lens), k_cache.shape[2] // page_min.shape[2]
    side.append_summarise(key, value, k_cache, v_cache, page_min, page_max, *rows, slot_mapping)
    page_idx = None
    if not (dense or reads_all(budget, budget_fraction, k_cache, block_table)):
        scores = triton.score(
            query, page_min, page_max, *rows, page_size, softmax_scale, slack, group_rule, window, False
        )
        forced = sink_pages, recent_pages
        page_idx, _ = triton.select(
            scores, seq_lens, page_size, budget, budget_fraction, *forced, window, max_selected, False
        )
    logits = softmax_scale, softcap, sinks, window
    return side.attend(query, k_cache, v_cache, *rows, page_idx, page_size, *logits, False)


def decode_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    packed: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    page_size: int,
    coarse_size: int,
    bits: int,
    coarse_keep: float,
    coarse_limit: int,
    coarse_slack: float,
    dense: bool,
    softmax_scale: float,
    budget: int,
    budget_fraction: float,
    sink_pages: int,
    recent_pages: int,
    max_selected: int,
    slack: float,
    group_rule: str,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    window: int = -1,
    check: bool = True,
    *,
    heads_first: bool = False,
) -> tuple[Tensor, Tensor]:
    if heads_first:
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    triton, side = triton_kernels(), side_of(query, k_cache, v_cache)
    rows, layout = (block_table, seq_lens), (page_size, coarse_size, bits)
    side.append(key, value, k_cache, v_cache, slot_mapping, False)
    triton.pack_new(k_cache, packed, *rows, slot_mapping, *layout, sink_pages)
    page_idx = None
    if not (dense or reads_all(budget, budget_fraction, k_cache, block_table)):
        read = budget, budget_fraction, sink_pages, recent_pages
        agree = softmax_scale, slack, coarse_slack, group_rule
        page_idx, _ = triton.select_packed(
            query, k_cache, packed, *rows, *layout, coarse_keep, coarse_limit, *read, *agree, window, max_selected
        )
    logits = softmax_scale, softcap, sinks, window
    return side.attend(query, k_cache, v_cache, *rows, page_idx, page_size, *logits, False)


def _of_triton(verb: str) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return getattr(triton_kernels(), verb)(*args)

    return run


OPS: dict[str, Callable[..., Any]] = {
    "append": append,
    "summarise": summarise,
    "pack": _of_triton("pack"),
    "score": _of_triton("score"),
    "score_packed": _of_triton("score_packed"),
    "select": _of_triton("select"),
    "attend": attend,
    "merge": merge,
    "decode": decode,
    "decode_packed": decode_packed,
}


def register(key: str = "CUDA") -> torch.library.Library:
    """Make these the ops' kernels for a dispatch key, until the library that comes back is destroyed."""
    library = torch.library.Library("quest", "IMPL")
    for name, function in OPS.items():
        library.impl(name, _where_they_lie(function), key)
    return library


def _where_they_lie(function: Callable[..., Any]) -> Callable[..., Any]:
    """Triton launches on the current device, which need not be that of the tensors."""

    def run(first: Tensor, *args: Any, **options: Any) -> Any:
        with torch.cuda.device_of(first):
            return function(first, *args, **options)

    return run
