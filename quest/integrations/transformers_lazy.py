"""K and V that `QuestLayer.update` gives back: tensors to all who look at them, made dense only then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from quest.integrations.transformers_layer import QuestLayer


class Source:
    """What the K and V of one `update` are made of."""

    __slots__ = ("columns", "dense", "epoch", "layer")

    def __init__(self, columns: int, epoch: int) -> None:
        self.layer: QuestLayer
        self.columns = columns
        self.epoch = epoch  # of the store, at that time
        self.dense: tuple[Tensor, Tensor] | None = None  # K and V once they are made


class LazyStates(torch.Tensor):
    """K or V [batch, num_kv_heads, columns, head_dim] of a layer as they were after one `update`.

    Shape, dtype and device at once; the numbers are made when one of the pair is looked at.
    """

    __slots__ = ("source",)
    source: Source
    which: int

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without func
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func._schema.is_mutable and args and isinstance(args[0], LazyStates):
            raise TypeError(f"{func}: K and V that QuestCache.update gave back can't be written to; clone them first")
        args, kwargs = tree_map_only(LazyStates, LazyStates.dense, (args, kwargs or {}))
        return func(*args, **kwargs)

    def dense(self) -> Tensor:
        source = self.source
        if source.dense is None:
            if source.epoch != source.layer.store.epoch:
                raise RuntimeError(
                    "QuestCache: K and V of an earlier update, first looked at after the cache was cropped, reordered "
                    "or reset, are gone"
                )
            k, v = source.layer.states()
            source.dense = k[:, :, : source.columns], v[:, :, : source.columns]
        return source.dense[self.which]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(layer {self.source.layer.index}, shape={[*self.shape]}, {self.dtype})"


class LazyKeys(LazyStates):
    __slots__ = ()
    which = 0


class LazyValues(LazyStates):
    __slots__ = ()
    which = 1


class LazyPairs:
    """The K and V of a step, for all layers at once.

    Layers of a model call one after the other, each with the processor's caches full of weights: what runs once per
    layer is fetched from memory again and again. Pairs that the first layer makes for all of them, in one loop, take
    each a third of the time.
    """

    def __init__(self) -> None:
        self.like: tuple[Any, ...] = ()
        self._made: list[tuple[LazyKeys, LazyValues]] = []
        self._taken = 0  # of those alike

    def renew(self, like: tuple[Any, ...]) -> None:
        """From now on for (columns before, epoch of the store, shapes of the new K and V, dtype, device)."""
        self._made.clear()
        self._make(like, self._taken)
        self.like, self._taken = like, 0

    def _make(self, like: tuple[Any, ...], count: int) -> None:
        start, epoch, (batch, heads, q_len, dim), (*_, v_dim), dtype, device = like
        columns, make = start + q_len, torch.Tensor._make_wrapper_subclass
        for _ in range(count):
            keys = make(LazyKeys, (batch, heads, columns, dim), dtype=dtype, device=device)
            values = make(LazyValues, (batch, heads, columns, v_dim), dtype=dtype, device=device)
            keys.source = values.source = Source(columns, epoch)
            self._made.append((keys, values))

    def take(self, layer: QuestLayer) -> tuple[LazyKeys, LazyValues]:
        if not self._made:
            self._make(self.like, 1)
        self._taken += 1
        keys, values = self._made.pop()
        keys.source.layer = layer
        return keys, values

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyPairs:
        return LazyPairs()
