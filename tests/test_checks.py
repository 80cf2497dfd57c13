"""Wrong input: an error of the right type that names op, argument, rule and what came, before anything is written."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from cases import Case, make, memory

import quest
from quest import QuestConfig

ROWS, TOKENS, HEADS, KV_HEADS, DIM, V_DIM, PAGE, BLOCK = 2, 3, 6, 2, 16, 24, 4, 8
CONFIG = QuestConfig(page_size=PAGE, block_size=BLOCK, budget=12, sink_tokens=4, recent_tokens=4)
POOLS = ("k_cache", "v_cache", "page_min", "page_max")


def case_of() -> Case:
    case = make("page_8", seq_lens=(19, 9), q_len=TOKENS, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM,
                v_head_dim=V_DIM, page_size=PAGE, block_size=BLOCK)  # fmt: skip
    return case.before(0.0)


def arguments(op: str, case: Case) -> dict[str, Any]:
    """A right call of each op."""
    cache = {name: getattr(case, name) for name in ("k_cache", "v_cache", "block_table", "seq_lens")}
    summary = {name: getattr(case, name) for name in ("page_min", "page_max")}
    rows = {name: getattr(case, name) for name in ("key", "value", "slot_mapping")}
    sequence = {name: cache[name] for name in ("block_table", "seq_lens")}
    max_pages = case.block_table.shape[1] * 2
    if op == "append":
        return {"k_cache": case.k_cache, "v_cache": case.v_cache, **rows}
    if op == "summarise":
        num_new = torch.full_like(case.seq_lens, TOKENS)
        return {"k_cache": case.k_cache, **summary, **sequence, "num_new": num_new}
    if op == "score":
        return {"query": case.query, **summary, **sequence, "page_size": PAGE, "slack": 0.5, "group_rule": "softmax",
                "softmax_scale": 1.0, "window": 9}  # fmt: skip
    if op == "select":
        return {"scores": torch.zeros(ROWS, TOKENS, KV_HEADS, max_pages), "seq_lens": case.seq_lens, "page_size": PAGE,
                "budget": 12, "sink_tokens": 4, "recent_tokens": 8, "window": 9}  # fmt: skip
    if op == "attend":
        page_idx = torch.tensor([0, 1, -1], dtype=torch.int32).repeat(ROWS, TOKENS, KV_HEADS, 1)
        return {"query": case.query, **cache, "page_idx": page_idx, "page_size": PAGE, "softmax_scale": 1.0,
                "softcap": 2.0, "sinks": torch.zeros(HEADS), "window": 9}  # fmt: skip
    if op == "merge":
        return {
            "out_a": torch.zeros(5, 8),
            "lse_a": torch.zeros(5),
            "out_b": torch.zeros(5, 8),
            "lse_b": torch.zeros(5),
        }
    assert op == "decode"
    return {"query": case.query, **cache, **summary, **rows, "softmax_scale": 1.0, "softcap": 2.0, "window": 9,
            "sinks": torch.zeros(HEADS), "layer_idx": 0, "config": CONFIG}  # fmt: skip


OPS = ("append", "summarise", "score", "select", "attend", "merge", "decode")
# decode by each backend: none may write before everything has been looked at
CALLS = (*OPS, "decode by verbs", "decode by reference")


def call(what: str, args: dict[str, Any]) -> Any:
    op, _, backend = what.partition(" by ")
    return getattr(quest, op)(**args, **({"backend": backend} if backend else {}))


def set_at(x: torch.Tensor, at: tuple[int, ...], value: int) -> torch.Tensor:
    x = x.clone()
    x[at] = value
    return x


def every_other(x: torch.Tensor) -> torch.Tensor:
    """The same values, not contiguous in the last dimension."""
    return torch.stack([x, x], -1).flatten(-2)[..., ::2]


V, T = ValueError, TypeError
# argument, what is wrong with it, error, message; for every op that has the argument
WRONG: list[tuple[str, Any, type[Exception], str]] = [
    # types
    *[(name, lambda x: x.tolist(), T, "must be a tensor, got list") for name in
      ("query", "key", "value", *POOLS, "block_table", "seq_lens", "slot_mapping", "num_new", "scores", "page_idx",
       "sinks", "out_a", "out_b", "lse_a", "lse_b")],
    ("query", lambda x: None, T, "must be a tensor, got NoneType"),
    # dtypes
    *[(name, lambda x: x.double(), T, "must have dtype float32 or bfloat16 or float16, got float64") for name in
      ("query", "key", "value", *POOLS, "out_a", "out_b", "sinks")],
    *[(name, lambda x: x.bfloat16(), T, "must have the dtype of (k_cache|page_min|out_a), float32, got bfloat16")
      for name in ("key", "value", "v_cache", "page_max", "out_b")],
    *[(name, lambda x: x.half(), T, "must have dtype float32, got float16") for name in ("scores", "lse_a", "lse_b")],
    *[(name, lambda x: x.long(), T, "must have dtype int32, got int64") for name in
      ("block_table", "seq_lens", "num_new", "page_idx")],
    ("slot_mapping", lambda x: x.int(), T, "must have dtype int64, got int32"),
    # shapes
    ("query", lambda x: x[0, 0], V, r"must be \[batch, q_len, num_heads, head_dim\], got shape \[6, 16\]"),
    ("query", lambda x: x[..., :5, :], V, "must have a multiple of 2 heads .num_kv_heads., got 5"),
    ("query", lambda x: x[..., :0, :], V, "must have a multiple of 2 heads .num_kv_heads., got 0"),
    *[(name, lambda x: x[..., :8], V, r"must be \[.*\] with head_dim") for name in ("key", "page_min", "page_max")],
    ("value", lambda x: x[..., :8], V, r"must be \[.*\] with v_head_dim 24 as in v_cache, got shape \[2, 3, 2, 8\]"),
    *[(name, lambda x: x[:, :1], V, "") for name in ("key", "value", "page_max", "v_cache")],
    *[(name, lambda x: x[:1], V, "") for name in ("key", "value", "page_max", "v_cache", "seq_lens", "num_new",
                                                 "page_idx", "out_b", "lse_a", "lse_b", "sinks")],
    *[(name, lambda x: x[None], V, r"must be \[.*\], got shape \[1, ") for name in
      ("block_table", "seq_lens", "slot_mapping", "num_new", "lse_a", "lse_b", "sinks")],
    ("slot_mapping", lambda x: x.flatten()[:-1], V, "must have one slot for each token of key, got shape .5."),
    ("page_idx", lambda x: x.repeat(1, 1, 2, 1), V, "must have num_kv_heads or num_heads heads, got 4"),
    *[(name, lambda x: x[..., :0], V, "") for name in ("k_cache", "v_cache", "page_min")],
    # strides
    *[(name, every_other, V, "must be contiguous in its last dimension, got strides") for name in
      ("query", "key", "value", *POOLS, "block_table", "seq_lens", "num_new", "page_idx")],
    # grad
    *[(name, lambda x: x.clone().requires_grad_(), V, "must not require grad .no backward here")
      for name in ("query", "key", "value", *POOLS, "scores", "sinks", "out_a", "out_b", "lse_a")],
    # devices
    *[(name, lambda x: x.to("meta"), V, "must be on the device of [a-z_]*, (cpu|meta), got (cpu|meta)") for name in
      ("query", "key", "value", *POOLS, "block_table", "seq_lens", "slot_mapping", "num_new", "page_idx", "sinks",
       "scores", "out_a", "out_b", "lse_a", "lse_b")],
    # values of tensors
    ("seq_lens", lambda x: set_at(x, (1,), -1), V, r"seq_lens\[1\]: must .*, got -1"),
    ("seq_lens", lambda x: set_at(x, (1,), 99), V, ""),
    ("slot_mapping", lambda x: set_at(x, (1, 2), 10**9), V, r"slot of token 5 must be .* in \[0, 64\), got 1000000000"),
    ("slot_mapping", lambda x: set_at(x, (0, 1), -2), V, r"slot of token 1 must be .*, got -2"),
    ("page_idx", lambda x: set_at(x, (1, 2, 1, 1), 0), V, r"page_idx\[1, 2, 1, 1\]: .* must be ascending in .*, got 0"),
    ("page_idx", lambda x: set_at(x, (0, 0, 0, 0), 2), V, r"page_idx\[0, 0, 0, 1\]: pages must be ascending"),
    ("page_idx", lambda x: set_at(x, (0, 0, 0, 2), 99), V, r"page_idx\[0, 0, 0, 2\]: .* in \[0, \d+\).*, got 99"),
    ("page_idx", lambda x: set_at(x, (0, 0, 0, 0), -1), V, r"page_idx\[0, 0, 0, 1\]: .* then -1, got 1"),
    ("page_idx", lambda x: set_at(x, (0, 0, 0, 0), -5), V, "got -5"),
    # numbers
    *[(name, lambda x: 0, V, "must be (at least 1|positive and finite), got 0") for name in
      ("page_size", "window", "softcap", "softmax_scale")],
    *[(name, lambda x: 2.5, T, "must be an int, got 2.5") for name in
      ("page_size", "window", "sink_tokens", "recent_tokens", "layer_idx")],
    *[(name, lambda x: "4", T, "must be (an int|a number), got '4'") for name in
      ("page_size", "window", "softcap", "softmax_scale", "slack", "sink_tokens", "layer_idx")],
    *[(name, lambda x: float("nan"), V, "got nan") for name in ("softcap", "softmax_scale", "slack")],
    *[(name, lambda x: float("inf"), V, "must be positive and finite, got inf") for name in
      ("softcap", "softmax_scale")],
    ("slack", lambda x: 1.5, V, r"must be in \[0, 1\], got 1.5"),
    ("group_rule", lambda x: "mean", V, "must be one of softmax, relative, per_head, got 'mean'"),
    ("budget", lambda x: 11, V, "must hold the forced pages: 1 sink . 2 recent pages of 4 tokens = 12 .* budget 11"),
    ("budget", lambda x: 1.01, V, "as a fraction of the context must be in .0, 1., got 1.01"),
    ("budget", lambda x: None, T, "must be a number of tokens"),
    ("sink_tokens", lambda x: -1, V, "must be at least 0, got -1"),
    ("config", lambda x: None, T, "must be a QuestConfig, got NoneType"),
    ("config", lambda x: QuestConfig(page_size=8, budget=64), V, "must have the page_size of the summaries, 4, got 8"),
]  # fmt: skip


def cases() -> list[Any]:
    found = []
    for what in CALLS:
        known = arguments(what.split()[0], case_of())
        for i, (name, change, kind, message) in enumerate(WRONG):
            if name in known:
                found.append(pytest.param(what, name, change, kind, message, id=f"{what}-{name}-{i}"))
    return found


@pytest.mark.parametrize("what", CALLS)
def test_the_right_call(what):
    call(what, arguments(what.split()[0], case_of()))


@pytest.mark.parametrize(("what", "name", "change", "kind", "message"), cases())
def test_wrong_argument(what, name, change, kind, message):
    case, op = case_of(), what.split()[0]
    args = arguments(op, case)
    args[name] = change(args[name])
    before = memory(*case.pools)
    with pytest.raises(kind) as error:
        call(what, args)
    text = str(error.value)
    assert type(error.value) is kind
    assert text.startswith(f"{op}: "), text
    assert re.search(message, text), text
    blamed = re.match(r"\w+: (\w+)", text)[1]
    # Of two that contradict each other, or of a table and a length, either may be named, the other with it.
    assert blamed == name or name in text or (name, blamed) in {("seq_lens", "block_table")}, text
    assert memory(*case.pools) == before


WITH_TABLE = ("summarise", "score", "attend", "decode", "decode by verbs", "decode by reference")


@pytest.mark.parametrize("what", WITH_TABLE)
def test_c03_table_too_narrow(what):
    case, op = case_of(), what.split()[0]
    args = arguments(op, case)
    args["block_table"] = case.block_table[:, :2].contiguous()
    before = memory(*case.pools)
    with pytest.raises(
        ValueError, match=rf"{op}: block_table: 2 blocks of 8 tokens are too narrow for seq_lens.0.\D+19"
    ):
        call(what, args)
    assert memory(*case.pools) == before


@pytest.mark.parametrize("block", [-1, -7, 8, 2**31 - 1])
@pytest.mark.parametrize("what", WITH_TABLE)
def test_c03_block_id_out_of_range(what, block):
    case, op = case_of(), what.split()[0]
    args = arguments(op, case)
    args["block_table"] = set_at(case.block_table, (1, 1), block)
    before = memory(*case.pools)
    assert len(case.k_cache) == 8
    with pytest.raises(ValueError, match=rf"{op}: block_table.1, 1.: block id must be in .0, 8. .*, got {block}"):
        call(what, args)
    assert memory(*case.pools) == before
    args["block_table"] = set_at(case.block_table, (1, 2), block)  # behind the row: nobody's business
    call(what, args)


def test_c01_heads_not_divisible():
    case = make("dim_8", num_heads=3, num_kv_heads=3)
    with pytest.raises(ValueError, match=r"query must have a multiple of 3 heads \(num_kv_heads\), got 2"):
        quest.attend(case.query[:, :, :2], *case.cache)


def test_c02_head_dims_that_are_not_supported():
    for dim in (0, 1025):
        x = torch.zeros(1, 1, 16, dim)
        table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        with pytest.raises(ValueError, match=rf"must have head_dim in \[1, 1024\], got {dim}"):
            quest.attend(torch.zeros(1, 1, dim), x, x, table, lens)
        with pytest.raises(ValueError, match=r"must have head_dim in \[1, 1024\], got"):
            quest.score(torch.zeros(1, 1, dim), x, x, table, lens, page_size=1)


def test_c41_mixed_devices_name_both():
    case = case_of()
    with pytest.raises(ValueError, match="k_cache must be on the device of query, meta, got cpu"):
        quest.attend(case.query.to("meta"), *case.cache)


def test_tensors_that_require_grad_are_fine_without_grad():
    case = case_of()
    args = arguments("attend", case)
    args["query"] = args["query"].clone().requires_grad_()
    with torch.no_grad():
        out, _ = quest.attend(**args)
    assert not out.requires_grad


def test_raw_ops_refuse_what_would_read_out_of_bounds():
    """`torch.ops.quest.*` itself, called without the public functions: as a compiled graph does."""
    case = case_of()
    op, query = torch.ops.quest, case.query
    rest = (PAGE, 1.0)
    wrong = [
        lambda: op.attend(query[..., :8], *case.cache, None, *rest),
        lambda: op.attend(query[:1], *case.cache, None, *rest),
        lambda: op.attend(query[:, :, :0], *case.cache, None, *rest),
        lambda: op.attend(query[:, :, :3], *case.cache, None, *rest),
        lambda: op.attend(query.double(), *case.cache, None, *rest),
        lambda: op.attend(query, *case.cache, None, 3, 1.0),
        lambda: op.attend(query, *case.cache, None, 0, 1.0),
        lambda: op.attend(query, *case.cache, torch.zeros(1, 1, 1, 1, dtype=torch.int32), *rest),
        lambda: op.attend(query, *case.cache, None, *rest, 0.0, torch.zeros(5)),
        lambda: op.attend(query, case.k_cache, case.v_cache[:3], *case.cache[2:], None, *rest),
        lambda: op.score(query[:, :, :0], *case.summary, *rest, 1.0, "softmax"),
        lambda: op.score(query, *case.summary, *rest, 1.0, "mean"),
        lambda: op.score(query, case.page_min, case.page_max[:3], *case.summary[2:], *rest, 1.0, "softmax"),
        lambda: op.select(torch.zeros(1, 2, 3), case.seq_lens, PAGE, 9, 0.0, 0, 1, -1, 3),
        lambda: op.select(torch.zeros(2, 1, 2, 3), case.seq_lens[:1], PAGE, 9, 0.0, 0, 1, -1, 3),
        lambda: op.select(torch.zeros(2, 1, 2, 3), case.seq_lens, PAGE, 9, 0.0, 0, 1, -1, -3),
        lambda: op.append(case.key[:, :, :1], case.value, case.k_cache, case.v_cache, case.slot_mapping),
        lambda: op.append(case.key, case.value, case.k_cache, case.v_cache, case.slot_mapping[:1]),
        lambda: op.summarise(case.k_cache, case.page_min[:, :, :0], case.page_max, case.block_table, case.seq_lens,
                             case.seq_lens),
        lambda: op.merge(torch.zeros(3, 4), torch.zeros(2), torch.zeros(3, 4), torch.zeros(3)),
        lambda: op.merge(torch.zeros(4, 3).t(), torch.zeros(3), torch.zeros(4, 3).t(), torch.zeros(3)),
    ]  # fmt: skip
    for call in wrong:
        with pytest.raises((ValueError, RuntimeError)):
            call()
