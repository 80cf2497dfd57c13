"""`QuestCache`: a transformers cache whose layers with full attention live in one `PagedKVCache`."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from quest.cache import PagedKVCache
from quest.config import QuestConfig
from quest.integrations.transformers_layer import QuestLayer
from quest.integrations.transformers_store import Store
from quest.offload import Offload
from quest.pools import Pools
from quest.stats import Stats


class QuestCache(Cache):
    """A cache for `generate` or a model's forward pass, in place of `DynamicCache`.

    With `attn_implementation="quest"` prompts are read densely and decode steps sparsely, as `config` says. With any
    other attention implementation it is a (slower) dense cache. Layers that the model marks as sliding, linear,
    shared or otherwise special keep transformers' own cache layers; but with `prefix_cache` sliding ones are paged too,
    and keep the tokens that have left their window: a prefix may end anywhere. They read their window densely.

    Args:
        model_config: the model's config.
        config: page size, budget and the rest.
        prefix_cache: pools to share with other caches of the same model, whose config and offload then hold: what one
            has remembered, another begins with.
        offload: keep K and V of the paged layers within a budget of memory, the rest in files (`quest.Offload`).

    >>> quest.integrations.transformers.register()
    >>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="quest")
    >>> model.generate(**inputs, past_key_values=QuestCache(model.config, config=QuestConfig(budget=512)))

    A system prompt that is computed once:

    >>> prefixes = quest.Pools(model.config.num_hidden_layers, config=QuestConfig(budget=512), max_blocks=1024)
    >>> cache = QuestCache(model.config, prefix_cache=prefixes)
    >>> cache.begin(**inputs)  # finds the tokens that are there already
    >>> ids = model.generate(**inputs, past_key_values=cache)
    >>> cache.remember(ids)

    A serving loop of its own: the rows are sequences of `open()`, chosen step by step.

    >>> paged = cache.open()
    >>> paged.add(), paged.select(running), paged.suspend(late)  # and so on
    >>> cache.align()
    >>> model(input_ids, position_ids=paged.seq_lens[:, None], past_key_values=cache)
    """

    def __init__(
        self,
        model_config: PreTrainedConfig,
        *,
        config: QuestConfig | None = None,
        prefix_cache: Pools | None = None,
        offload: Offload | None = None,
    ) -> None:
        if not isinstance(model_config, PreTrainedConfig):
            raise TypeError(
                f"QuestCache: model_config must be a model's config (model.config), got {type(model_config).__name__}"
            )
        if config is not None and not isinstance(config, QuestConfig):
            raise TypeError(f"QuestCache: config must be a QuestConfig, got {type(config).__name__}")
        layers = DynamicCache(config=model_config).layers
        if offload is not None and not isinstance(offload, Offload):
            raise TypeError(f"QuestCache: offload must be an Offload or None, got {type(offload).__name__}")
        if prefix_cache is not None:
            if offload is not None:
                raise ValueError("QuestCache: offload must be None together with prefix_cache: give it to the pools")
            self._check_pools(prefix_cache, config, len(layers))
            config = prefix_cache.config
        config = QuestConfig() if config is None else config
        windows = {} if prefix_cache is None else _windows(model_config, layers)
        if windows:
            dense = {i: {**config.layers.get(i, {}), "dense": True} for i in windows}
            config = config.replace(layers={**config.layers, **dense})
        self.store = Store(len(layers), config, prefix_cache, offload)
        paged = [type(layer) is DynamicLayer or i in windows for i, layer in enumerate(layers)]
        super().__init__(
            layers=[QuestLayer(i, self.store, windows.get(i)) if paged[i] else x for i, x in enumerate(layers)]
        )
        if prefix_cache is not None:
            self._check_all_paged("QuestCache", "prefix_cache")

    @staticmethod
    def _check_pools(pools: Any, config: QuestConfig | None, num_layers: int) -> None:
        if not isinstance(pools, Pools):
            raise TypeError(f"QuestCache: prefix_cache must be quest.Pools, got {type(pools).__name__}")
        if config is not None and config != pools.config:
            raise ValueError(f"QuestCache: config must be that of prefix_cache or None, got {config}")
        if pools.num_layers != num_layers:
            raise ValueError(
                f"QuestCache: prefix_cache must have the model's {num_layers} layers, got {pools.num_layers}"
            )

    def _check_all_paged(self, op: str, what: str) -> None:
        others = {type(layer) for layer in self.layers if not isinstance(layer, QuestLayer)}
        if others:
            names = ", ".join(sorted(other.__name__ for other in others))
            if self.store.pools is None and others == {DynamicSlidingWindowLayer}:
                names += ": give QuestCache a prefix_cache, and they do"
            raise ValueError(f"{op}: {what} needs a cache whose layers all keep every token, got {names}")

    # --- prefixes and sequences --------------------------------------------------------------------------------------

    def begin(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, extra_keys: Sequence[Hashable] = ()
    ) -> int:
        """Empty the cache, and take over what the pools remember of these prompts, before `generate` computes the rest.

        At least two tokens of every prompt are left to compute: they are read densely, as the whole prompt is without
        this. Of a batch, all rows take over as many columns as the row that finds least.

        Args:
            input_ids: [batch, columns] or [columns], as `generate` gets them.
            attention_mask: [batch, columns], 0 for padding, which must be on the left; None: there is none.
            extra_keys: as in `PagedSequences.reuse`.

        Returns:
            Columns that need not be computed; `generate` leaves them out by itself.
        """
        self._check_all_paged("begin", "a prefix")
        ids, real = _prompt("begin", input_ids, attention_mask)
        self.reset()
        paged = self.store.open(len(ids), input_ids.device)
        pads = (~real).sum(1).tolist()
        found = [
            pad + paged.reuse(row[pad:-1], row=i, extra_keys=extra_keys) for i, (row, pad) in enumerate(zip(ids, pads))
        ]
        columns = min(found)
        lengths = [max(0, columns - pad) for pad in pads]
        paged.crop(lengths)
        columns = columns if any(lengths) else 0
        self._align(columns)
        return columns

    def remember(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, extra_keys: Sequence[Hashable] = ()
    ) -> int:
        """Make the full blocks of all rows findable by their tokens.

        Args:
            input_ids: [batch, columns] or [columns], the prompts and what `generate` has added; columns that the cache
                does not hold (the last one, which no step has read) don't count.
            attention_mask: of the prompts, as `begin` had it.

        Returns:
            How many blocks were not known before.
        """
        self._check_all_paged("remember", "a prefix")
        self._settle()
        if (paged := self.store.paged) is None:
            raise ValueError("remember: the cache must hold tokens, got an empty one")
        ids, real = _prompt("remember", input_ids, attention_mask)
        if len(ids) != paged.batch_size:
            raise ValueError(f"remember: input_ids must have the cache's {paged.batch_size} rows, got {len(ids)}")
        new = 0
        for i, (row, pad) in enumerate(zip(ids, (~real).sum(1).tolist())):
            new += paged.remember(row[pad:][: paged.lengths[i]], row=i, extra_keys=extra_keys)
        return new

    def open(self, device: torch.device | str = "cpu") -> PagedKVCache:
        """The sequences, of which there are none at first: for a loop that adds, selects, suspends and removes them."""
        self._check_all_paged("open", "a choice of sequences")
        return self.store.open(0, torch.device(device))

    def align(self) -> None:
        """Take the rows of `paged` as they are, after sequences were added, selected, removed: the next step's batch.

        A ragged batch is one with padding on the left, as long as its longest row.

        Raises:
            ValueError: a layer holds tokens of the batch before, which no attention of this package has read.
        """
        late = [layer.index for layer in self.paged_layers if layer.pending is not None]
        if late and not self.store.is_aligned():
            raise ValueError(
                f"align: every token must have been attended to by 'quest' attention, not so in layers {late}"
            )
        self._align()

    def undo(self, lengths: Sequence[int]) -> None:
        """Take back a forward pass that has failed part-way, whichever layers have stored its tokens.

        Args:
            lengths: the rows' tokens before it.
        """
        for layer in self.paged_layers:
            layer.pending = None
        if self.store.paged is not None:
            self.store.paged.crop(lengths)
            self._align()

    def _align(self, columns: int | None = None) -> None:
        self._settle()
        self.store.align(columns)
        for layer in self.paged_layers:
            layer.columns = self.store.columns

    def _settle(self) -> None:
        for layer in self.paged_layers:
            layer.settle()

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


def _windows(model_config: PreTrainedConfig, layers: Sequence[Any]) -> dict[int, int]:
    """Tokens that sliding layers see, by layer. Layers that see chunks have the same class, but no window."""
    text_config = model_config.get_text_config(decoder=True)
    kinds = getattr(text_config, "layer_types", None)
    if kinds is None:
        chunked = getattr(text_config, "sliding_window", None) is None
        kinds = ["chunked_attention" if chunked else "sliding_attention"] * len(layers)
    return {
        i: layer.sliding_window
        for i, (layer, kind) in enumerate(zip(layers, kinds, strict=True))
        if type(layer) is DynamicSlidingWindowLayer and kind == "sliding_attention"
    }


def _prompt(op: str, input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Token ids [batch, columns], and which of them are tokens: those after the padding on the left."""
    ids = input_ids[None] if input_ids.dim() == 1 else input_ids
    if ids.dim() != 2 or ids.is_floating_point():
        raise ValueError(f"{op}: input_ids must be integers [batch, columns], got {ids.dtype} {[*input_ids.shape]}")
    real = torch.ones_like(ids, dtype=torch.bool)
    if attention_mask is not None:
        given = attention_mask[None] if attention_mask.dim() == 1 else attention_mask
        if given.dim() != 2 or len(given) != len(ids) or given.shape[1] > ids.shape[1]:
            raise ValueError(f"{op}: attention_mask must be {[*ids.shape]}, got {[*attention_mask.shape]}")
        real[:, : given.shape[1]] = given != 0
        if bool((real[:, :-1] & ~real[:, 1:]).any()):
            raise ValueError(f"{op}: attention_mask must have its padding on the left, got padding after tokens")
    return ids, real


def _cropped(columns: int, tokens_to_remove: int) -> int:
    """Columns that `DynamicLayer.crop` of the installed transformers leaves; its errors too."""
    if not columns:
        return 0
    layer = DynamicLayer()
    layer.keys = layer.values = torch.empty(1).expand(1, 1, columns, 1)
    layer.is_initialized = True
    layer.crop(tokens_to_remove)
    return layer.keys.shape[2]
