"""`QuestCache`: a transformers cache whose full-attention layers live in one `PagedKVCache`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer

from quest.cache import PagedKVCache
from quest.config import QuestConfig
from quest.integrations.transformers_layer import QuestLayer
from quest.integrations.transformers_store import Store
from quest.stats import Stats


class QuestCache(Cache):
    """A cache for `generate` or a model's forward pass, in place of `DynamicCache`.

    With `attn_implementation="quest"` prompts are read densely and decode steps sparsely, as `config` says. With any
    other attention implementation it is a (slower) dense cache. Layers that the model marks as sliding, linear,
    shared or otherwise special keep transformers' own cache layers.

    Args:
        model_config: the model's config.
        config: page size, budget and the rest.

    >>> quest.integrations.transformers.register()
    >>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="quest")
    >>> model.generate(**inputs, past_key_values=QuestCache(model.config, config=QuestConfig(budget=512)))
    """

    def __init__(self, model_config: PreTrainedConfig, *, config: QuestConfig | None = None) -> None:
        if not isinstance(model_config, PreTrainedConfig):
            raise TypeError(
                f"QuestCache: model_config must be a model's config (model.config), got {type(model_config).__name__}"
            )
        if config is not None and not isinstance(config, QuestConfig):
            raise TypeError(f"QuestCache: config must be a QuestConfig, got {type(config).__name__}")
        layers = DynamicCache(config=model_config).layers
        self.store = Store(len(layers), QuestConfig() if config is None else config)
        super().__init__(
            layers=[QuestLayer(i, self.store) if type(x) is DynamicLayer else x for i, x in enumerate(layers)]
        )

    @property
    def config(self) -> QuestConfig:
        return self.store.config

    @property
    def paged(self) -> PagedKVCache | None:
        """The pages, None before the first tokens."""
        return self.store.paged

    @property
    def stats(self) -> Stats:
        """What decode steps of the paged layers have read, `reset` of the cache or not: `stats.reset()` starts anew."""
        return self.store.stats

    @property
    def paged_layers(self) -> list[QuestLayer]:
        return [layer for layer in self.layers if isinstance(layer, QuestLayer)]

    def _change(self, method: str, *args: Any) -> None:
        """Call a method of the layers that are not paged, and store what the paged ones hold back."""
        for layer in self.layers:
            if isinstance(layer, QuestLayer):
                layer.settle()
            else:
                getattr(layer, method)(*args)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last columns; what a number means, `DynamicLayer.crop` of the installed version says."""
        left = {layer: _cropped(layer.get_seq_length(), tokens_to_remove) for layer in self.paged_layers}
        self._change("crop", tokens_to_remove)
        self.store.crop(max(left.values(), default=0))
        for layer, columns in left.items():
            layer.columns = columns

    def reset(self) -> None:
        for layer in self.layers:
            if isinstance(layer, QuestLayer):
                layer.columns, layer.pending, layer.is_initialized = 0, None, False
            else:
                layer.reset()
        self.store.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes the old row `beam_idx[i]`: full blocks are shared, a part-filled one is copied when written."""
        self._change("reorder_cache", beam_idx)
        self.store.fork(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change("batch_repeat_interleave", repeats)
        self.store.fork(self._rows().repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change("batch_select_indices", indices)
        self.store.fork(self._rows()[indices.cpu() if isinstance(indices, Tensor) else indices])

    def _rows(self) -> Tensor:
        return torch.arange(self.store.paged.batch_size if self.store.paged is not None else 0)

    def activate_past_recording(self) -> None:
        """Draft tokens follow, which `crop` may take back: they are read sparsely, each token its own pages."""
        for layer in self.layers:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, Tensor | None]]:
        for layer in self.layers:
            yield layer.keys, layer.values, getattr(layer, "_sliding_window_tensor", None)


def _cropped(columns: int, tokens_to_remove: int) -> int:
    """Columns that `DynamicLayer.crop` of the installed transformers leaves; its errors too."""
    if not columns:
        return 0
    layer = DynamicLayer()
    layer.keys = layer.values = torch.empty(1).expand(1, 1, columns, 1)
    layer.is_initialized = True
    layer.crop(tokens_to_remove)
    return layer.keys.shape[2]
