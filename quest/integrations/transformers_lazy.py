"""K and V that `QuestLayer.update` gives back: tensors to all who look at them, made dense only then."""

from __future__ import annotations

from sys import getrefcount
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from quest.integrations.transformers_layer import QuestLayer


class Source:
    """What the K and V of one `update` are made of."""

    __slots__ = ("columns", "dense", "epoch", "layer")

    def __init__(self, columns: int, epoch: int) -> None:
        self.layer: ref[QuestLayer]
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
            layer = source.layer()
            if layer is None or layer.store.epoch != source.epoch:
                raise RuntimeError(
                    "QuestCache: K and V of an earlier update, first looked at after the cache was cropped, reordered "
                    "or reset, or is no more, are gone"
                )
            layer.store.lazy = LazyPair()  # these are no longer for the layers that follow
            k, v = layer.states()
            source.dense = k[:, :, : source.columns], v[:, :, : source.columns]
        return source.dense[self.which]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        layer = self.source.layer()
        name = "deleted" if layer is None else f"layer {layer.index}"
        return f"{type(self).__name__}({name}, shape={[*self.shape]}, {self.dtype})"


class LazyKeys(LazyStates):
    __slots__ = ()
    which = 0


class LazyValues(LazyStates):
    __slots__ = ()
    which = 1


class LazyPair:
    """The K and V of a step: a layer takes over those of the one before, if nobody has looked at them or keeps them.

    Layers of a model call one after the other, each with the processor's caches full of weights: what a layer makes
    takes several times as long as in a loop of its own.
    """

    def __init__(self) -> None:
        self._like: tuple[Any, ...] = ()
        self._keys: LazyKeys
        self._values: LazyValues
        self._source: Source

    def take(self, layer: QuestLayer, like: tuple[Any, ...]) -> tuple[LazyKeys, LazyValues]:
        """For (columns before, epoch of the store, shapes of the new K and V, the layer's dtype and device)."""
        # Of what nobody else keeps, one reference is that of `self` and one that of the argument.
        if like != self._like or getrefcount(self._keys) > 2 or getrefcount(self._values) > 2:
            layer.check_states(*like[2:4])
            self._make(*like)
            self._like = like
        self._source.layer = ref(layer)  # no reference back to what holds this pair
        return self._keys, self._values

    def _make(self, start: int, epoch: int, key_shape: Any, value_shape: Any, dtype: Any, device: Any) -> None:
        batch, heads, q_len, dim = key_shape
        columns, make = start + q_len, torch.Tensor._make_wrapper_subclass
        self._keys = make(LazyKeys, (batch, heads, columns, dim), dtype=dtype, device=device)
        self._values = make(LazyValues, (batch, heads, columns, value_shape[3]), dtype=dtype, device=device)
        self._source = self._keys.source = self._values.source = Source(columns, epoch)

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyPair:
        return LazyPair()
