"""A paged layer of a `QuestCache`, and the K and V that its `update` gives back.

A forward pass calls `update(key, value)` and then the attention function. `update` gives back K and V as a
`DynamicLayer` would, but lazily: the attention function of this package finds the layer behind them and reads pages;
anything else that looks at them gets dense tensors. New tokens wait in `QuestLayer.pending` until the attention
function has said, by its mask, which of them are padding; whoever else needs the layer first takes them all as tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from quest.integrations.transformers_lazy import LazyKeys, LazyStates, LazyValues
from quest.integrations.transformers_masks import is_plain, real_columns, restrict, visible_columns
from quest.integrations.transformers_store import Store
from quest.sequences import Step

__all__ = ["LazyKeys", "LazyStates", "LazyValues", "QuestLayer"]

MAX_DRAFT_TOKENS = 64  # with past recording, as in assisted decoding, more new tokens than these count as a prompt


class QuestLayer(CacheLayerMixin):
    """A layer of a `QuestCache` with all its tokens. Rows, lengths and pads belong to the cache: crop it, not a layer.

    Args:
        window: how many tokens its attention sees, whatever the attention function is told; None: as it is told.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, index: int, store: Store, window: int | None = None) -> None:
        self.index = index
        self.store = store
        self.window = window
        self.columns = 0  # stored columns, padding included
        self.pending: tuple[Tensor, Tensor] | None = None  # K and V of the columns after those
        self.record_past = False
        self.is_initialized = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[LazyKeys, LazyValues]:
        """Add K and V [batch, num_kv_heads, q_len, head_dim]; gives back K and V of all columns, lazily."""
        if self.pending is not None:
            self.settle()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        store = self.store
        like = self.columns, store.epoch, key_states.shape, value_states.shape, self.dtype, self.device
        lazy = store.lazy.take(self, like)
        self.pending = key_states, value_states
        return lazy

    def check_states(self, key: Sequence[int], value: Sequence[int]) -> None:
        """Raise unless these may be the shapes of `key_states` and `value_states`."""
        batch = key[0] if self.store.paged is None else len(self.store.paged.lengths)
        if len(key) != 4 or key[:3] != value[:3] or key[0] != batch:
            raise ValueError(
                f"QuestCache.update: key_states and value_states must be [{batch}, num_kv_heads, q_len, head_dim], got "
                f"{[*key]} and {[*value]}"
            )

    def sparse_step(
        self,
        query: Tensor,
        mask: Tensor | None,
        window: int | None,
        softmax_scale: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor | None:
        """Store the pending tokens and attend to the pages that query [batch, num_heads, q_len, head_dim] selects.

        Returns:
            [batch, q_len, num_heads, v_head_dim], or None if this is no sparse step, but a prompt: see `dense_step`.

        Raises:
            ValueError: the mask hides a stored token, or is a bias: selection does not know it.
        """
        q_len, store, start = query.shape[2], self.store, self.columns
        window = self.window or window
        if q_len > 1 and not (self.record_past and start and q_len <= MAX_DRAFT_TOKENS):
            return None
        if self.pending is None:  # K and V of another layer, which has stored them and whose mask was looked at
            options: dict[str, Any] = dict(softmax_scale=softmax_scale, softcap=softcap, sinks=sinks, window=window)
            out, _ = store.paged.attend(self.index, query.transpose(1, 2), **options)  # type: ignore[union-attr]
            return out
        key, value = self.pending
        real = None if mask is None else self._real(mask)
        if window is not None and not (store.left_padded and (real is None or bool(real.all()))):
            return None  # a window is counted in columns, the pages in tokens
        if mask is not None and not store.knows(mask, window, start):
            if not is_plain(mask[..., : start + q_len], window, store.real, real, start):
                return None
            store.remember(mask, window, start)
        if real is not None and q_len > 1 and bool((real[:, :-1] & ~real[:, 1:]).any()):
            return None  # padding between the new tokens
        step: Any = store.reserved if store.span == (start, start + q_len) else self._step(key, real)
        out, _ = store.paged.decode(  # type: ignore[union-attr]
            self.index,
            query,
            key,
            value,
            step,
            softmax_scale=softmax_scale,
            softcap=softcap,
            sinks=sinks,
            window=window,
            heads_first=True,
        )
        self.columns, self.pending = start + q_len, None
        return out

    def dense_step(
        self, query: Tensor, mask: Tensor | None, window: int | None, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Store the pending tokens of a prompt, or of whatever `sparse_step` left.

        Returns:
            K, V [batch, num_kv_heads, columns, head_dim] and the mask for them; None: the plain causal one, or (not
            `causal`) none at all, and as many columns as queries.
        """
        q_len, given = query.shape[2], self.pending if not self.columns else None
        window = self.window or window
        self.settle(self._real(mask))
        k, v = given or self.states()
        columns, real = k.shape[2], self.store.real
        real = None if real is None else real[:, :columns]
        if mask is not None:
            mask = mask[..., :columns]
            if window is None and real is None:
                return k, v, mask
            visible = visible_columns(q_len, columns, k.device, causal=False, window=window, real=real)
            return k, v, restrict(mask, visible)
        if window is None and real is None and columns == q_len:
            return k, v, None
        return k, v, visible_columns(q_len, columns, k.device, causal=causal, window=window, real=real)

    def _real(self, mask: Tensor | None) -> Tensor | None:
        """Which of the pending columns are tokens [batch, q_len], None if all are."""
        if mask is None or self.pending is None:
            return None
        batch, _, count, _ = self.pending[0].shape
        start, end = self.columns, self.columns + count
        if self.store.has_step(start, count):  # another layer has looked
            return None if self.store.real is None else self.store.real[:, start:end]
        return real_columns(mask, start, count, batch)

    def settle(self, real: Tensor | None = None) -> None:
        """Store the pending tokens; `real` bool [batch, q_len] says which are no padding, None that all are tokens."""
        if self.pending is not None:
            key, value = self.pending
            step = self._step(key, real)
            k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (key.transpose(1, 2), value.transpose(1, 2)))
            self.store.paged.append(self.index, k, v, step)  # type: ignore[union-attr]
            self.columns, self.pending = self.columns + key.shape[2], None

    def _step(self, key: Tensor, real: Tensor | None) -> Step:
        try:
            return self.store.step(self.columns, key, real)
        except BaseException:  # out of blocks, say: then nothing has happened, and the step can be taken again
            self.pending = None
            raise

    def states(self) -> tuple[Tensor, Tensor]:
        """K and V of all columns, [batch, num_kv_heads, columns, head_dim], dense; stored padding is zero."""
        if not self.columns:
            if self.pending is None:
                raise ValueError(f"QuestCache: layer {self.index} has no keys yet")
            return self.pending
        stored = self.store.dense(self.index, self.columns)
        if self.pending is None:
            return stored
        k, v = (torch.cat(pair, 2) for pair in zip(stored, self.pending, strict=True))
        return k, v

    @property
    def keys(self) -> Tensor | None:
        """K of all columns, made dense for the caller; None while there is none."""
        return self.states()[0] if self.get_seq_length() else None

    @property
    def values(self) -> Tensor | None:
        """V of all columns, made dense for the caller; None while there is none."""
        return self.states()[1] if self.get_seq_length() else None

    def get_seq_length(self) -> int:
        """Columns, padding included."""
        return self.columns + (0 if self.pending is None else self.pending[0].shape[2])

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """(columns with the coming ones, 0). Early versions pass positions instead of their number."""
        q_len = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.get_seq_length() + q_len, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def activate_past_recording(self) -> None:
        self.record_past = True

    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "QuestLayer: the layers of a QuestCache share one block table; call the cache's method"
        )

    reset = reorder_cache = crop = batch_repeat_interleave = batch_select_indices = offload = prefetch = _refuse
