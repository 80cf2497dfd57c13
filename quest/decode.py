"""One decode step of one layer. Read this first: the verbs in order.

    append     write the new K, V rows into their slots
    summarise  refresh minimum and maximum of the pages they touched
    score      query x summaries: one score per page and KV head
    select     forced pages and the best others under the budget
    attend     exact attention over those pages only

A cache with packed summaries (`quest.packing`) has `pack` and `score_packed` in place of `summarise` and `score`.

On the CPU the five are one op, `torch.ops.quest.decode`: one dispatch per layer and step, no result in between but the
scores. `backend="verbs"` calls them one by one, and `backend="reference"` the plain PyTorch of `quest.reference`. On a
GPU the same op is a few launches, see `quest.gpu`.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from quest import backends, gpu, ops, ops_packed, reference, reference_packed
from quest.checks import FLOATS, MAX_NUMBER, Args, check_values
from quest.config import QuestConfig, forced_pages, max_selected
from quest.packing import packing_of

_IS_CPU, _REQUIRES_GRAD = attrgetter("is_cpu"), attrgetter("requires_grad")


class Options(NamedTuple):
    """The arguments of `decode` that say what attention is computed."""

    softmax_scale: float | None
    softcap: float | None
    sinks: Tensor | None
    window: int | None


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
    *,
    config: QuestConfig,
    layer_idx: int = 0,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
    check: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Append the new tokens of a layer and attend to the pages that the query selects.

    Equivalent to dense attention over everything when the budget is at or above the context length, or when
    `config.layer(layer_idx).dense`.

    Args:
        query: [batch, q_len, num_heads, head_dim], or [batch, num_heads, head_dim] with key and value likewise.
        key, value: [batch, q_len, num_kv_heads, head_dim]: the new tokens, the last q_len of each row.
        k_cache, v_cache, page_min, page_max: written in place.
        seq_lens: int32 [batch], lengths after the append.
        slot_mapping: int64 [batch, q_len], -1 = skip.
        config: page_size must be block_size / summaries per block; budget, forced pages, slack and group rule.
        softmax_scale, softcap, sinks, window: as in `quest.attend`; the window bounds scoring and selection too.
        check: False leaves values of lengths, ids and slots unchecked (see `quest.ops`); on a GPU they always are, as a
            look would wait for the device, and what is out of range is skipped.
        backend: "auto", or a name that `quest info` lists: it runs, or the error says all reasons why it can't.

    Returns:
        out [batch, q_len, num_heads, v_head_dim] in the query's dtype, lse float32 [batch, q_len, num_heads].
    """
    tensors = (query, key, value, k_cache, v_cache, page_min, page_max, block_table, seq_lens, slot_mapping)
    return _decode(tensors, config, layer_idx, Options(softmax_scale, softcap, sinks, window), check, backend)


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
    *,
    config: QuestConfig,
    layer_idx: int = 0,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
    check: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`decode` for a cache with packed summaries: `pack` and `score_packed` take the places of `summarise` and `score`.

    Args:
        key: finite, at most 1e38 in size, whatever `check` says.
        packed: uint8 [num_blocks, num_kv_heads, num_bytes] as `config.summary_bits`, `page_size`, `coarse_size` and
            `block_size` ask for (`quest.packing`), written in place.

    The other arguments and what comes back are those of `decode`.
    """
    tensors = (query, key, value, k_cache, v_cache, packed, block_table, seq_lens, slot_mapping)
    return _decode(tensors, config, layer_idx, Options(softmax_scale, softcap, sinks, window), check, backend)


class Fetch(Protocol):
    """Brings K and V to memory before a step reads or writes them there (`quest.residency`)."""

    def before_append(self) -> None: ...

    def before_attend(self, page_idx: Tensor | None) -> None:
        """`page_idx` as `quest.attend` takes it."""


def decode_fetched(
    fetch: Fetch,
    tensors: tuple[Tensor, ...],
    *,
    config: QuestConfig,
    layer_idx: int,
    softmax_scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    window: int | None,
    check: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """`decode`, or `decode_packed` with its nine tensors, where K and V are not all in memory.

    The verbs one by one, for what is selected must be fetched before it is attended to; another backend than "auto" and
    "verbs" has everything fetched.
    """
    return _decode(tensors, config, layer_idx, Options(softmax_scale, softcap, sinks, window), check, backend, fetch)


def _decode(
    tensors: tuple[Tensor, ...],
    config: QuestConfig,
    layer_idx: int,
    options: Options,
    check: bool,
    backend: str,
    fetch: Fetch | None = None,
) -> tuple[Tensor, Tensor]:
    """Ten tensors with page_min and page_max, nine with packed summaries."""
    given, query = tensors, tensors[0]
    try:
        if fetch is not None and backend == "auto":
            backend = "verbs"
        chosen = backends.choose(backend, query.device)
        if chosen != "cpu" or not _as_usual(tensors, config, layer_idx, options):
            check_decode(tensors, config, layer_idx, options)
        if query.dim() == 3:
            tensors = (*(x.unsqueeze(1) for x in tensors[:3]), *tensors[3:])
        if fetch is not None and chosen != "verbs":
            fetch.before_append()
            fetch.before_attend(None)
        if chosen == "cpu" or backend == "auto":
            out, lse = _fused(tensors, config, layer_idx, options, check)
        elif chosen in ("cuda", "triton"):
            if torch.compiler.is_compiling():
                raise ValueError(f"decode: backend must be auto under torch.compile, got {backend!r}")
            with gpu.using(chosen):
                out, lse = _fused(tensors, config, layer_idx, options, check)
        else:
            if check and not torch.compiler.is_compiling():
                check_values(_name(tensors), tensors[3], *tensors[-3:])
            if chosen == "reference":
                spec = reference.decode if len(tensors) == 10 else reference_packed.decode_packed
                out, lse = spec(*tensors, config=config, layer_idx=layer_idx, **options._asdict())
            else:
                out, lse = _verbs(tensors, config, layer_idx, options, check, fetch)
    except Exception:
        # The op has looked before it wrote. What is wrong with an argument, the checks say better.
        check_decode(given, config, layer_idx, options)
        raise
    return (out.squeeze(1), lse.squeeze(1)) if query.dim() == 3 else (out, lse)


def _name(tensors: tuple[Tensor, ...]) -> str:
    return "decode" if len(tensors) == 10 else "decode_packed"


def _as_usual(tensors: tuple[Tensor, ...], config: QuestConfig, layer_idx: int, options: Options) -> bool:
    """A glance at what the op can't see; the checks of every call would cost as much as a short context's attention."""
    if torch.compiler.is_compiling():  # checks cost nothing then, and the op is not there to look
        return False
    query, key, _, k_cache, _, summary, *_, slot_mapping = tensors
    softmax_scale, softcap, sinks, window = options
    if sinks is not None:
        tensors += (sinks,)
        if sinks.shape != query.shape[-2:-1] or sinks.dtype not in FLOATS:
            return False
    return (
        _fits(config, k_cache, summary)
        and type(layer_idx) is int
        and layer_idx >= 0
        and (softmax_scale is None or (type(softmax_scale) is float and 0 < softmax_scale <= MAX_NUMBER))
        and (softcap is None or (type(softcap) is float and 0 < softcap <= MAX_NUMBER))
        and (window is None or (type(window) is int and window >= 1))
        and slot_mapping.shape == key.shape[:-2]
        and all(map(_IS_CPU, tensors))
        and not (torch.is_grad_enabled() and any(map(_REQUIRES_GRAD, tensors)))
    )


def _fits(config: QuestConfig, k_cache: Tensor, summary: Tensor) -> bool:
    """Whether summaries (page_min or packed ones) are as the config says; of what sizes, the op looks."""
    if summary.dtype == torch.uint8:
        return config.summary_bits is not None and config.block_size == k_cache.shape[2]
    return config.summary_bits is None and config.page_size * summary.shape[2] == k_cache.shape[2]


def check_decode(tensors: tuple[Tensor, ...], config: QuestConfig, layer_idx: int, options: Options) -> None:
    """Raise if an argument is wrong, whatever its values are."""
    query, key, value, k_cache, v_cache, *summaries, block_table, seq_lens, slot_mapping = tensors
    args = Args(_name(tensors))
    if args.tensor("query", query).dim() == 3:
        query = query.unsqueeze(1)
        key, value = (args.tensor(name, x).unsqueeze(1) for name, x in (("key", key), ("value", value)))
    args.add("query", query, ops.QUERY, FLOATS)
    ops._append_args(args, key, value, k_cache, v_cache, slot_mapping)
    args.heads()
    if not isinstance(config, QuestConfig):
        args.fail("config", "must be a QuestConfig", type(config).__name__, TypeError)
    packing = packing_of(config)
    if len(summaries) == 1:
        if packing is None:
            args.fail("config", "must have summary_bits where summaries are packed", "summary_bits None")
        else:
            ops_packed._packed_arg(args, summaries[0], packing)
    else:
        if packing is not None:
            args.fail(
                "config", "must have summary_bits None where summaries are page_min and page_max", config.summary_bits
            )
        page_min, page_max = summaries
        ops._summary_args(args, page_min, page_max, k_cache)
    ops._sequence_args(args, block_table, seq_lens)
    args.positive("softmax_scale", options.softmax_scale)
    args.positive("softcap", options.softcap)
    args.window(options.window)
    args.sinks(options.sinks)
    args.at_least("layer_idx", layer_idx, 0)
    if packing is None and config.page_size != (page_size := args["block_size"] // args["pages_per_block"]):
        args.fail("config", f"must have the page_size of the summaries, {page_size}", config.page_size)


def _verbs(
    tensors: tuple[Tensor, ...],
    config: QuestConfig,
    layer_idx: int,
    options: Options,
    check: bool,
    fetch: Fetch | None,
) -> tuple[Tensor, Tensor]:
    query, key, value, k_cache, v_cache, *summaries, block_table, seq_lens, slot_mapping = tensors
    if fetch is not None:
        fetch.before_append()
    ops.append(key, value, k_cache, v_cache, slot_mapping, check=check)

    q_len = query.shape[1]
    stores = slot_mapping.reshape(len(seq_lens), q_len) >= 0
    num_new = stores.any(1).int() * q_len  # a row that stores nothing is left alone
    which: dict[str, Any] = dict(config=config, layer_idx=layer_idx, check=check)
    refresh(k_cache, summaries, block_table, seq_lens, num_new, **which)

    page_idx = None
    if not config.layer(layer_idx).dense:
        scored: dict[str, Any] = dict(softmax_scale=options.softmax_scale, window=options.window)
        page_idx = choose_pages(query, k_cache, summaries, block_table, seq_lens, **which, **scored)

    if fetch is not None:
        fetch.before_attend(page_idx)
    logits: dict[str, Any] = options._asdict() | dict(page_size=config.page_size, check=check)
    return ops.attend(query, k_cache, v_cache, block_table, seq_lens, page_idx, **logits)


def refresh(
    k_cache: Tensor,
    summaries: Sequence[Tensor],
    block_table: Tensor,
    seq_lens: Tensor,
    num_new: Tensor,
    *,
    config: QuestConfig,
    layer_idx: int,
    check: bool = False,
) -> None:
    """`summarise` or `pack`, whichever the summaries (page_min and page_max, or packed) need."""
    rows = k_cache, *summaries, block_table, seq_lens, num_new
    if (packing := packing_of(config)) is None:
        ops.summarise(*rows, check=check)
    else:
        sink_tokens = config.layer(layer_idx).sink_tokens
        ops_packed.pack(*rows, packing=packing, sink_tokens=sink_tokens, check=check)


def choose_pages(
    query: Tensor,
    k_cache: Tensor,
    summaries: Sequence[Tensor],
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    config: QuestConfig,
    layer_idx: int,
    softmax_scale: float | None,
    window: int | None,
    check: bool = False,
) -> Tensor:
    """`score` or `score_packed`, then `select`: page_idx."""
    layer = config.layer(layer_idx)
    seen: dict[str, Any] = dict(window=window, check=check)
    agree: dict[str, Any] = dict(softmax_scale=softmax_scale, slack=layer.slack, group_rule=layer.group_rule)
    forced: dict[str, Any] = dict(sink_tokens=layer.sink_tokens, recent_tokens=layer.recent_tokens)
    forced["budget"] = layer.budget
    if (packing := packing_of(config)) is None:
        page_min, page_max = summaries
        scores = ops.score(
            query, page_min, page_max, block_table, seq_lens, page_size=config.page_size, **agree, **seen
        )
    else:
        agree |= dict(packing=packing, coarse_keep=layer.coarse_keep, coarse_limit=layer.coarse_limit)
        agree["coarse_slack"] = layer.coarse_slack
        (packed,) = summaries
        scores = ops_packed.score_packed(query, k_cache, packed, block_table, seq_lens, **agree, **forced, **seen)
    return ops.select(scores, seq_lens, page_size=config.page_size, **forced, **seen)[0]


def _fused(
    tensors: tuple[Tensor, ...], config: QuestConfig, layer_idx: int, options: Options, check: bool
) -> tuple[Tensor, Tensor]:
    settings = op_settings(tensors[0], tensors[-3], config, layer_idx, *options, check)
    op = torch.ops.quest.decode if len(tensors) == 10 else torch.ops.quest.decode_packed
    return op.default(*tensors[:-1], tensors[-1].contiguous(), *settings)


def op_settings(
    query: Tensor,
    block_table: Tensor,
    config: QuestConfig,
    layer_idx: int,
    softmax_scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    window: int | None,
    check: bool,
) -> tuple[Any, ...]:
    """What `torch.ops.quest.decode` or `decode_packed` takes after its tensors; of those given only shapes matter."""
    layer, packing, page_size = config.layer(layer_idx), packing_of(config), config.page_size
    max_pages = block_table.shape[1] * (config.block_size // page_size)
    sink, recent = forced_pages(layer.sink_tokens, layer.recent_tokens, page_size)
    summaries = (
        ()
        if packing is None
        else (*ops_packed._settings(packing), float(layer.coarse_keep), layer.coarse_limit, layer.coarse_slack)
    )
    return (
        *summaries,
        layer.dense,
        ops._scale(softmax_scale, query),
        *ops.split_budget(layer.budget),
        sink,
        recent,
        max_selected(max_pages, query.shape[1], page_size, layer.budget, sink, recent, window),
        layer.slack,
        layer.group_rule,
        softcap or 0.0,
        None if sinks is None else sinks.float().contiguous(),
        window or -1,
        check,
    )
