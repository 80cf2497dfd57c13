"""What a mask of transformers says about columns: which new ones are padding, and whether old ones are hidden.

A column is one token position of the batch as transformers counts them, padding included. Masks are [batch or 1,
heads or 1, q_len or 1, columns]: bool (True = visible), or float to be added to the logits (0 = visible, -inf or the
dtype's lowest number = hidden).
"""

from __future__ import annotations

import torch
from torch import Tensor


def as_bool(mask: Tensor) -> Tensor:
    """The mask as True for visible; a bias counts as visible."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise TypeError(f"quest attention: attention_mask must be bool or float with 4 dimensions, got {mask.dtype}")
    return mask > torch.finfo(mask.dtype).min / 2


def real_columns(mask: Tensor, start: int, count: int, batch: int) -> Tensor | None:
    """Which of the columns [start, start + count) are tokens, bool [batch, count]; None if all are.

    A column is padding if it may not even see itself.
    """
    if mask.dim() != 4 or mask.shape[-1] < start + count or mask.shape[-2] not in (1, count):
        raise ValueError(
            f"quest attention: attention_mask must be [batch, heads, {count}, {start + count}], got {[*mask.shape]}"
        )
    new = mask[..., start : start + count]
    new = new.diagonal(dim1=-2, dim2=-1) if mask.shape[-2] == count else new[..., 0, :]
    real = as_bool(new).any(1).expand(batch, count)
    return None if bool(real.all()) else real


def visible_columns(
    q_len: int,
    columns: int,
    device: torch.device,
    *,
    causal: bool = True,
    window: int | None = None,
    real: Tensor | None = None,
) -> Tensor:
    """What the last q_len of `columns` may see, bool [batch or 1, 1, q_len, columns]: no later column (`causal`), none
    before the sliding window, no padding (`real` [batch, columns] is False there)."""
    column = torch.arange(columns, device=device)
    query = column[columns - q_len :, None]
    visible = column <= query if causal else torch.ones(q_len, columns, dtype=torch.bool, device=device)
    if window is not None:
        visible &= column > query - window
    return visible[None, None] if real is None else visible & real[:, None, None, :]


def restrict(mask: Tensor, visible: Tensor) -> Tensor:
    """The mask, with what is not `visible` hidden too."""
    return mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, torch.finfo(mask.dtype).min)


def is_plain(mask: Tensor, window: int | None, stored: Tensor | None, new: Tensor | None, start: int) -> bool:
    """Whether the mask of a sparse step hides just padding, later columns and what is outside the window.

    Args:
        mask: [batch or 1, heads or 1, q_len, start + q_len].
        stored, new: which columns are tokens, bool [batch, start] and [batch, q_len]; None if all are.

    Raises:
        ValueError: it hides more, or is a bias, and q_len is 1: a step of one token is always sparse.
    """
    q_len, columns = mask.shape[2], mask.shape[3]
    seen = as_bool(mask)
    biased = mask.is_floating_point() and bool((seen & (mask != 0)).any())
    if q_len == 1:
        if biased:
            raise ValueError(
                "quest attention: attention_mask must be 0 or hidden (-inf) in a sparse step, got other numbers: page "
                "selection knows no bias. Use another attention implementation for this model"
            )
        expected = visible_columns(1, columns, mask.device, window=window)[..., :start]
        if stored is not None:
            expected = expected & stored[:, None, None, :start]
        if hidden := int((expected & ~seen[..., :start]).sum()):
            raise ValueError(
                f"quest attention: attention_mask must not hide stored tokens in a sparse step, but hides {hidden}: "
                "page selection knows no masks. Crop the cache, or use attn_implementation='sdpa'"
            )
        return True
    if biased:
        return False
    expected = visible_columns(q_len, columns, mask.device, window=window)
    if stored is not None or new is not None:
        batch = (stored if stored is not None else new).shape[0]  # type: ignore[union-attr]
        every = torch.ones(batch, columns, dtype=torch.bool, device=mask.device)
        old, fresh = every[:, :start] if stored is None else stored[:, :start], every[:, start:] if new is None else new
        real = torch.cat([old, fresh], 1)[:, None, None, :]
        expected, seen = (x & real & fresh[:, None, :, None] for x in (expected, seen))  # padding may see anything
    return bool((expected == seen).all())
