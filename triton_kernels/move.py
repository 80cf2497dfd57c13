"""move: units of K or V between a device's memory and the host's, which the device reads and writes in place."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .primitives import DTYPES, Launch, verb

WORDS = 1024  # that one program moves


@triton.jit(do_not_specialize=["num_units", "parts"])
def move_units(source, target, places, num_units, words, parts, WORDS: tl.constexpr):
    """A few programs for each unit. places [2, num_units]: where from, and where to."""
    unit, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    i = part * WORDS + tl.arange(0, WORDS)
    start = tl.load(places + unit) * words
    x = tl.load(source + start + i, mask=i < words)
    tl.store(target + tl.load(places + num_units + unit) * words + i, x, mask=i < words)


@verb
def move(source: Tensor, target: Tensor, places: Tensor) -> tuple[list[Launch], None]:
    """`target[places[1]] = source[places[0]]` for [units, tokens, head_dim], contiguous; places: int64 [2, num_units].

    One of the two may lie in pinned memory of the host.
    """
    source, target = (_words(x) for x in (source, target))
    parts, num_units = triton.cdiv(source.shape[1], WORDS), places.shape[1]
    launch = Launch(
        move_units,
        num_units * parts,
        source=source,
        target=target,
        places=places,
        num_units=num_units,
        words=source.shape[1],
        parts=parts,
        WORDS=WORDS,
        num_warps=4,
    )
    return [launch], None


def _words(units: Tensor) -> Tensor:
    """[units, words]: numbers do not matter here, and 16 bits is the narrowest of all dtypes."""
    flat = units.flatten(1)
    return flat.view(torch.int16 if flat.shape[1] * flat.itemsize % 4 else torch.int32)


def configurations() -> Iterator[Launch]:
    places = torch.empty(2, 64, dtype=torch.int64, device="meta")
    for dtype in DTYPES:
        units = torch.empty(64, 16, 128, dtype=dtype, device="meta")
        yield from move.plan(units, units, places)[0]
    odd = torch.empty(64, 3, 17, dtype=torch.bfloat16, device="meta")
    yield from move.plan(odd, odd, places)[0]
