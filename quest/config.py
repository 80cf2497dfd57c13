"""Settings of sparse reads: how the cache is cut into pages and how many of them a step may read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

GROUP_RULES = ("softmax", "relative", "per_head")
MAX_PAGE_SIZE = 1024
SUMMARY_BITS = (8, 4, 2)
COARSE_PAGES = (4, 8, 16, 32, 64)  # pages that a coarse page may hold; 16 at least of one token


@dataclass(frozen=True)
class LayerConfig:
    """What one layer does in a decode step: `QuestConfig` with that layer's overrides applied."""

    dense: bool
    budget: int | float
    sink_tokens: int
    recent_tokens: int
    slack: float
    group_rule: str
    coarse_keep: float
    coarse_limit: int
    coarse_slack: float


OVERRIDES = tuple(f.name for f in dataclasses.fields(LayerConfig))


# What QuestConfig takes where it is not told: as measured best on two models (`quest bench accuracy`), and where pages
# of a size are asked for, the minimum and maximum of each.
TOKENS: Mapping[str, Any] = dict(
    page_size=1, summary_bits=2, coarse_size=16, slack=0.0, sink_tokens=4, recent_tokens=16
)
PAGES: Mapping[str, Any] = dict(slack=0.4, sink_tokens=16, recent_tokens=32)


@dataclass(frozen=True)
class QuestConfig:
    """How a model's KV cache is summarised and read.

    Without a `page_size` the summary is a code of 2 bits per key and channel, in two levels: 16 tokens at a time are
    scored first, then the tokens of the best of those one by one. With one, it is the minimum and maximum of each page
    in K's dtype, or in codes with `summary_bits`.

    Args:
        page_size: tokens per page, the unit that is summarised, scored and read; 1 if None.
        block_size: tokens per block, the unit that is allocated; a multiple of `page_size`. If None it is `page_size`,
            and 16 pages (16 coarse ones if there are any) with `summary_bits`.
        budget: tokens read per KV head and step, forced pages included: a number of tokens (int), or a fraction of
            the context (float in (0, 1]). A budget at or above the context length is exactly dense attention.
        sink_tokens: oldest tokens that are always read, rounded up to pages.
        recent_tokens: newest tokens that are always read, rounded up to pages (the open page counts as one and is
            always read).
        dense_layers: layers that read everything.
        slack: 1.0 scores a page by Quest's upper bound of `q.k` (arXiv 2406.10774, equation 1); smaller values
            trust the page's range less: `sum_d max_d (q_d + slack |q_d|)/2 + min_d (q_d - slack |q_d|)/2`.
        group_rule: how the query heads that share a KV head agree on pages. "softmax": mean over the heads of the
            softmax of their page scores; "relative": maximum over the heads of the score minus the head's best;
            "per_head": no agreement, each query head reads its own pages (the paper's; reads up to group times more).
        summary_bits: 8, 4 or 2 keeps the pages of a block as codes of so many bits, never narrower than they are:
            see `quest.packing`. Keys must then be finite. None keeps a page's minimum and maximum in K's dtype.
        coarse_size: with `summary_bits`, tokens of a coarse page, 4 to 64 pages; None = one level only. Coarse pages
            are scored first, and only the pages of the best of them are scored themselves.
        coarse_keep: fraction of the coarse pages whose pages are scored.
        coarse_limit: tokens that they hold at most, whatever the fraction; twice the budget is kept in any case.
        coarse_slack: `slack` of the coarse pages' scores.
        layers: overrides by layer index, e.g. `{3: {"budget": 2048}, 7: {"dense": True}}`.

    Raises:
        ValueError, TypeError: a setting is out of its range or of the wrong type; the message names it.
    """

    page_size: int = None  # type: ignore[assignment]  # resolved: TOKENS or PAGES
    block_size: int = None  # type: ignore[assignment]  # resolved to page_size
    budget: int | float = 1024
    sink_tokens: int = None  # type: ignore[assignment]
    recent_tokens: int = None  # type: ignore[assignment]
    dense_layers: tuple[int, ...] = ()
    slack: float = None  # type: ignore[assignment]
    group_rule: str = "relative"
    summary_bits: int | None = None
    coarse_size: int | None = None
    coarse_keep: float = 0.25
    coarse_limit: int = 4096
    coarse_slack: float = 0.2
    layers: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def paper(cls, **changes: Any) -> QuestConfig:
        """Quest as published: 16-token pages, the upper bound as score, each query head its own pages, the first two
        layers dense; the first page and the newest two are forced, as its inference code (not its simulator) does."""
        preset: dict[str, Any] = dict(
            page_size=16,
            slack=1.0,
            group_rule="per_head",
            dense_layers=(0, 1),
            sink_tokens=16,
            recent_tokens=32,
        )
        return cls(**(preset | changes))

    @classmethod
    def long(cls, **changes: Any) -> QuestConfig:
        """For very long contexts: half the default's bytes, from coarse pages of 32 tokens and fewer of them kept."""
        return cls(**(dict(coarse_size=32, coarse_keep=0.125, coarse_limit=4096) | changes))

    def __post_init__(self) -> None:
        for name, value in (TOKENS if self.page_size is None else PAGES).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        _check_int("page_size", self.page_size, 1, MAX_PAGE_SIZE)
        self._check_summaries()
        if self.block_size is None:
            object.__setattr__(self, "block_size", self._default_block_size())
        _check_int("block_size", self.block_size, 1, 1 << 20)
        unit, name = self._block_unit()
        if self.block_size % unit:
            raise ValueError(f"QuestConfig: block_size must be a multiple of {name} ({unit}), got {self.block_size}")
        if isinstance(self.dense_layers, str) or not isinstance(self.dense_layers, Iterable):
            raise TypeError(f"QuestConfig: dense_layers must be a sequence of ints, got {self.dense_layers!r}")
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))
        for i in self.dense_layers:
            _check_int("dense_layers", i, 0, 1 << 20)
        if not isinstance(self.layers, Mapping):
            raise TypeError(f"QuestConfig: layers must map a layer's index to its settings, got {self.layers!r}")
        for i, override in self.layers.items():
            _check_int("layers (key)", i, 0, 1 << 20)
            if not isinstance(override, Mapping):
                raise TypeError(f"QuestConfig: layers[{i}] must be a mapping of settings, got {override!r}")
        object.__setattr__(self, "layers", {i: dict(override) for i, override in self.layers.items()})
        plain = LayerConfig(
            False,
            self.budget,
            self.sink_tokens,
            self.recent_tokens,
            self.slack,
            self.group_rule,
            self.coarse_keep,
            self.coarse_limit,
            self.coarse_slack,
        )
        resolved = {i: dataclasses.replace(plain, dense=True) for i in self.dense_layers}
        for i, override in self.layers.items():
            if unknown := set(override) - set(OVERRIDES):
                raise ValueError(
                    f"QuestConfig: layers[{i}] has unknown settings {sorted(unknown)}; known: {', '.join(OVERRIDES)}"
                )
            resolved[i] = dataclasses.replace(resolved.get(i, plain), **override)
        for layer in (plain, *resolved.values()):
            check_layer(layer, self.page_size)
        object.__setattr__(self, "_plain", plain)
        object.__setattr__(self, "_resolved", resolved)

    def _check_summaries(self) -> None:
        if self.summary_bits is not None and self.summary_bits not in SUMMARY_BITS:
            raise ValueError(
                f"QuestConfig: summary_bits must be None, {', '.join(map(str, SUMMARY_BITS))}, "
                f"got {self.summary_bits!r}"
            )
        if self.coarse_size is None:
            return
        _check_int("coarse_size", self.coarse_size, 1, 1 << 20)
        if self.summary_bits is None:
            raise ValueError(
                f"QuestConfig: coarse_size needs summary_bits (summaries in K's dtype have one level), "
                f"got coarse_size {self.coarse_size} and summary_bits None"
            )
        allowed = [pages * self.page_size for pages in COARSE_PAGES if pages >= 16 or self.page_size > 1]
        if self.coarse_size not in allowed:
            raise ValueError(
                f"QuestConfig: coarse_size must be a power of two of pages ({', '.join(map(str, allowed))} tokens), "
                f"got {self.coarse_size}"
            )

    def _block_unit(self) -> tuple[int, str]:
        """What a block must be a multiple of."""
        if self.summary_bits is None:
            return self.page_size, "page_size"
        if self.coarse_size is None:
            return (16, "16 pages") if self.page_size == 1 else (4 * self.page_size, "4 pages")
        return 4 * self.coarse_size, "4 coarse pages"

    def _default_block_size(self) -> int:
        return self.page_size if self.summary_bits is None else 16 * (self.coarse_size or self.page_size)

    def __hash__(self) -> int:
        return hash((self._plain, self.summary_bits, tuple(sorted(self._resolved.items()))))  # type: ignore[attr-defined]

    def layer(self, layer_idx: int) -> LayerConfig:
        """The settings of one layer, its overrides applied."""
        return self._resolved.get(layer_idx, self._plain)  # type: ignore[attr-defined]

    def replace(self, **changes: Any) -> QuestConfig:
        """A copy with some settings changed; a `block_size` that was the default stays the default."""
        if "block_size" not in changes and self.block_size == self._default_block_size():
            changes["block_size"] = None
        return dataclasses.replace(self, **changes)


def forced_pages(sink_tokens: int, recent_tokens: int, page_size: int) -> tuple[int, int]:
    """Forced pages at the old and at the new end: (sink pages, recent pages)."""
    return -(-sink_tokens // page_size), max(1, -(-recent_tokens // page_size))


def max_selected(
    max_pages: Any, q_len: Any, page_size: int, budget: int | float, sink: int, recent: int, window: int | None
) -> Any:
    """The most pages that `select` can name, the width of `page_idx`. `sink` and `recent` are pages."""
    if isinstance(budget, float):
        by_budget = -(-math.ceil(budget * page_size * max_pages) // page_size)
    else:
        by_budget = -(-budget // page_size)
    by_budget += window is not None  # a window may start inside a page
    by_force = sink + (recent if q_len == 1 else max(recent, (q_len - 2) // page_size + 2))
    return min(max_pages, max(by_budget, by_force))


def check_layer(layer: LayerConfig, page_size: int, op: str = "QuestConfig") -> None:
    """Raise on a setting out of range, or on a budget in tokens that cannot hold the forced pages."""
    _check_int("sink_tokens", layer.sink_tokens, 0, 1 << 30, op)
    _check_int("recent_tokens", layer.recent_tokens, 0, 1 << 30, op)
    if layer.group_rule not in GROUP_RULES:
        raise ValueError(f"{op}: group_rule must be one of {', '.join(GROUP_RULES)}, got {layer.group_rule!r}")
    if not isinstance(layer.dense, bool):
        raise TypeError(f"{op}: dense must be a bool, got {layer.dense!r}")
    for name in ("slack", "coarse_slack"):
        value = getattr(layer, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{op}: {name} must be a number, got {value!r}")
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{op}: {name} must be in [0, 1], got {value}")
    if isinstance(layer.coarse_keep, bool) or not isinstance(layer.coarse_keep, (int, float)):
        raise TypeError(f"{op}: coarse_keep must be a number, got {layer.coarse_keep!r}")
    if not 0.0 < layer.coarse_keep <= 1.0:
        raise ValueError(f"{op}: coarse_keep must be in (0, 1], got {layer.coarse_keep}")
    _check_int("coarse_limit", layer.coarse_limit, 1, 1 << 30, op)
    check_budget(layer.budget, layer.sink_tokens, layer.recent_tokens, page_size, op)


def check_budget(budget: int | float, sink_tokens: int, recent_tokens: int, page_size: int, op: str) -> None:
    """Raise unless `budget` is a fraction in (0, 1] or a number of tokens that holds the forced pages."""
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise TypeError(f"{op}: budget must be a number of tokens (int) or a fraction (float), got {budget!r}")
    if isinstance(budget, float):
        if not 0.0 < budget <= 1.0:
            raise ValueError(f"{op}: budget as a fraction of the context must be in (0, 1], got {budget}")
        return
    sink, recent = forced_pages(sink_tokens, recent_tokens, page_size)
    if budget // page_size < sink + recent:
        raise ValueError(
            f"{op}: budget must hold the forced pages: {sink} sink + {recent} recent pages of {page_size} tokens = "
            f"{(sink + recent) * page_size} tokens, got budget {budget}"
        )


def _check_int(name: str, value: Any, low: int, high: int, op: str = "QuestConfig") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{op}: {name} must be an int, got {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{op}: {name} must be in [{low}, {high}], got {value}")
