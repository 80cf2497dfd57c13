"""Triton's `pack`, `score_packed` and `select_packed`, interpreted, against the reference: few shapes, adversarial."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from cases import BF16, F16, INF, NAN, Case, assert_near, memory
from test_packed import RULES, case_of, formats, packed_of
from torch import Tensor

from quest import Packing, reference, reference_packed
from quest.config import forced_pages, max_selected

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("runs the same tests on the GPU: see gpu_kernels.py", allow_module_level=True)

from quest import triton_kernels

F32 = torch.float32
TWO_LEVELS, ONE_LEVEL, TOKENS = Packing(4, 64, 16, 4), Packing(8, 64, None, 8), Packing(1, 64, 16, 2)


def layout(packing: Packing) -> tuple[int, int, int]:
    return packing.page_size, packing.coarse_size or 0, packing.bits


def small_case(packing: Packing, **changes: Any) -> Case:
    """A row with more coarse pages than are kept, one with a whole block, and one of none."""
    size, group = packing.block_size, packing.group_size
    longest = max(10 * group, size + group) + packing.page_size + 1
    return case_of(packing, (longest, size, 0), **{"num_heads": 3, "num_kv_heads": 1, **changes})


def pack(case: Case, packed: Tensor, packing: Packing, sink_tokens: int = 0) -> None:
    rows = case.block_table, case.seq_lens, case.seq_lens
    sink_pages = -(-sink_tokens // packing.page_size)
    triton_kernels.pack(case.k_cache, packed, *rows, *layout(packing), sink_pages, False)


# ---- pack ----


@pytest.mark.parametrize("packing", formats(), ids=str)
def test_pack_equals_the_reference_bit_for_bit(packing):
    """The bytes behind those of a head are left alone."""
    kinds = [(F32, "padded", 40, 0), (BF16, "interleaved", 64, 5), (F16, "token_major", 7, 70), (BF16, "plain", 96, 9)]
    dtype, order, head_dim, sink = kinds[formats().index(packing) % len(kinds)]
    case = small_case(packing, dtype=dtype, layout=order, head_dim=head_dim, num_heads=2, num_kv_heads=2)
    expected = packed_of(case, packing, sink)
    got = packed_of(case.replace(seq_lens=case.seq_lens * 0), packing)
    pack(case, got, packing, sink)
    assert memory(got) == memory(expected)


def test_pack_of_every_kind_of_channel():
    """Constant, one-sided, tiny, huge; an outlier in one of them, and both zeros."""
    rng = torch.Generator().manual_seed(0)
    scale = torch.tensor([1e-42, 1e-30, 1e-3, 1.0, 40.0, 1e30, 3e37, 0.0])
    keys = (torch.randn(64, 8, generator=rng).clamp(-3, 3) + torch.tensor([0.0, 3.0] * 4)).clamp(-3, 3) * scale
    keys[::3, 4], keys[7, 3], keys[9, 5] = -0.5, 1e4, -9e37
    table, length = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([64], dtype=torch.int32)
    for sizes in ((1, 16), (4, None)):
        for bits in (8, 4, 2):
            packing = Packing(sizes[0], 64, sizes[1], bits)
            got, expected = torch.zeros(2, 1, 1, packing.num_bytes(8), dtype=torch.uint8)
            triton_kernels.pack(keys[None, None], got, table, length, length, *layout(packing), 0, False)
            reference_packed.pack(keys[None, None], expected, table, length, length, packing=packing)
            assert got.equal(expected), packing


@pytest.mark.parametrize("q_len", [1, 9, 70])
def test_pack_new_packs_blocks_in_which_a_group_was_completed(q_len):
    """A row that stores nothing is left alone, one whose first new tokens are padding isn't."""
    lengths = (64, 130, 127, 200, 144, 15, 144)
    case = case_of(TWO_LEVELS, lengths, q_len=q_len, head_dim=8, num_heads=1, num_kv_heads=1)
    slots = case.slot_mapping.clone()
    slots[4], slots[6, : q_len - 1] = -1, -1
    num_new = torch.where((slots >= 0).any(1), q_len, 0).int()
    got, expected = torch.full((2, len(case.k_cache), 1, TWO_LEVELS.num_bytes(8)), 7, dtype=torch.uint8)
    triton_kernels.pack_new(case.k_cache, got, case.block_table, case.seq_lens, slots, *layout(TWO_LEVELS), 1)
    rows = case.block_table, case.seq_lens, num_new
    reference_packed.pack(case.k_cache, expected, *rows, packing=TWO_LEVELS, sink_tokens=4)
    assert got.equal(expected)
    assert (got != 7).flatten(1).any(1).sum() >= 2


def test_pack_new_has_few_programs():
    """One for each row and head where a step completes one group, whatever the length."""
    case = case_of(TWO_LEVELS, (1000, 64), num_heads=2, num_kv_heads=2)
    packed = packed_of(case, TWO_LEVELS)
    rows = case.block_table, case.seq_lens
    for q_len, blocks in ((1, 1), (16, 1), (17, 2), (64, 2), (80, 2), (81, 3)):
        slots = torch.full((2, q_len), -1)
        launches, _ = triton_kernels.pack_new.plan(case.k_cache, packed, *rows, slots, *layout(TWO_LEVELS), 0)
        assert [launch.programs for launch in launches] == [2 * 2 * blocks]


# ---- score and select ----


def both(case: Case, packed: Tensor, packing: Packing, **options: Any) -> tuple[Tensor, Tensor]:
    """Scores of the kernels and of the reference; what is selected straight from candidates is checked on the way."""
    options = dict(coarse_keep=0.1, sink_tokens=0, recent_tokens=8, slack=0.4, coarse_slack=0.2, window=None) | options
    budget, window = options["budget"], options["window"]
    rows = case.query, case.k_cache, packed, case.block_table, case.seq_lens
    expected = reference_packed.score_packed(*rows, packing=packing, **options)
    forced = forced_pages(options["sink_tokens"], options["recent_tokens"], packing.page_size)
    tokens, fraction = (0, budget) if isinstance(budget, float) else (budget, 0.0)
    settings = (options["coarse_keep"], 1 << 30, tokens, fraction, *forced, case.query.shape[-1] ** -0.5)
    settings += options["slack"], options["coarse_slack"], options["group_rule"], window or -1
    got = triton_kernels.score_packed(*rows, *layout(packing), *settings, False)
    page_size, q_len = packing.page_size, case.query.shape[1]
    width = max_selected(got.shape[3], q_len, page_size, budget, *forced, window)
    selected = triton_kernels.select_packed(*rows, *layout(packing), *settings, width)
    read = {name: options[name] for name in ("budget", "sink_tokens", "recent_tokens", "window")}
    wanted = reference.select(got, case.seq_lens, page_size=page_size, **read)
    assert all(map(torch.equal, selected, wanted))
    return got, expected


KINDS: list[dict[str, Any]] = [
    dict(num_heads=3, num_kv_heads=1, head_dim=40, dtype=F32),
    dict(num_heads=8, num_kv_heads=1, head_dim=64, dtype=BF16, q_len=2, sink=9),
    dict(num_heads=2, num_kv_heads=2, head_dim=96, dtype=F16, window=150, sink=4),
    dict(num_heads=1, num_kv_heads=1, head_dim=16, dtype=BF16, q_len=1, sink=1),
]


@pytest.mark.parametrize("packing", formats(), ids=str)
def test_scores_equal_the_reference(packing):
    """To the integer unit: only the float sums differ. The codes of other blocks would be NaN."""
    index = formats().index(packing)
    kind = dict(KINDS[index % len(KINDS)])
    sink, window = kind.pop("sink", 0), kind.pop("window", None)
    case = small_case(packing, **kind)
    packed = packed_of(case, packing, sink, fill=0xFF)
    budget, rule = max(sink + 16, packing.group_size), RULES[(index + index // 3) % 3]
    got, expected = both(case, packed, packing, sink_tokens=sink, budget=budget, window=window, group_rule=rule)
    size = (case.query.float().abs().sum(-1).max() * case.k_cache.float().nan_to_num().abs().max()).item()
    assert_near(got, expected.double(), expected, rule, size=size)


@pytest.mark.parametrize("packing", [TWO_LEVELS, ONE_LEVEL, TOKENS], ids=str)
def test_weights_at_their_limits(packing):
    """The largest weight, 16 bits; queries whose reciprocals overflow; a query of zeros."""
    case = small_case(packing, num_heads=4, num_kv_heads=1, head_dim=8)
    packed = packed_of(case, packing)
    query = torch.zeros_like(case.query)
    query[:, :, 0, 3], query[:, :, 1] = 1.0, case.query[:, :, 1] * 1e-36
    query[:, :, 2], query[:, :, 2, 0] = case.query[:, :, 2] * 1e-3, -1e30
    got, expected = both(
        case.replace(query=query), packed, packing, group_rule="per_head", budget=64, slack=1.0, coarse_slack=1.0
    )
    for head in range(4):
        known = expected[:, :, head].isfinite()
        assert torch.equal(got[:, :, head].isfinite(), known)
        size = expected[:, :, head][known].abs().max()
        assert (got - expected)[:, :, head][known].abs().max() <= 1e-6 * size, head


def test_budget_as_a_fraction():
    case = small_case(TOKENS, head_dim=8)
    got, expected = both(case, packed_of(case, TOKENS), TOKENS, budget=0.15, group_rule="softmax", coarse_keep=0.3)
    assert_near(got, expected.double(), expected, "softmax")


def test_a_query_without_numbers():
    """NaN where a head's score is; the other heads are as ever."""
    case = small_case(TWO_LEVELS, head_dim=8)
    case.query[0, 0, 1, 2], case.query[1, 0, 2, 0] = NAN, INF
    packed = packed_of(case, TWO_LEVELS)
    rows = case.query, case.k_cache, packed, case.block_table, case.seq_lens
    settings = 1.0, 1 << 30, 64, 0.0, 0, 2, 0.3, 0.4, 0.2
    got = triton_kernels.score_packed(*rows, *layout(TWO_LEVELS), *settings, "per_head", -1, False)
    expected = reference_packed.score_packed(
        *rows, packing=TWO_LEVELS, budget=64, recent_tokens=8, slack=0.4, group_rule="per_head"
    )
    assert got.isnan().equal(expected.isnan())
    assert got.isnan().any()
    got = triton_kernels.score_packed(*rows, *layout(TWO_LEVELS), *settings, "softmax", -1, False)
    assert got[0].isnan().equal(expected[0].isnan().any(1, keepdim=True))


def test_nothing_leads_out_of_bounds():
    """Blocks that don't exist are neither read nor written; lengths end where the block table does."""
    case = small_case(TWO_LEVELS, head_dim=8)
    packed = packed_of(case, TWO_LEVELS)
    table = case.block_table.clone()
    table[0, 1], table[0, 2], table[1, 0] = -1, len(case.k_cache), -(2**31)
    lengths = torch.tensor([2**31 - 1, 64, -5], dtype=torch.int32)
    before = packed.clone()
    pack(case.replace(block_table=table, seq_lens=lengths.clamp(max=192)), packed, TWO_LEVELS)
    changed = (packed != before).flatten(1).any(1)
    changed[table[0, 0].long()] = False
    assert not changed.any()

    rows = case.query, case.k_cache, packed, table, lengths
    settings = *layout(TWO_LEVELS), 1.0, 1 << 30, 32, 0.0, 0, 1, 0.3, 0.4, 0.2, "relative", -1
    scores = triton_kernels.score_packed(*rows, *settings, False)
    assert scores[0, 0, 0, :16].isfinite().all()
    assert (scores[0, 0, 0, 16:48] == -INF).all()
    assert (scores[2] == -INF).all()
    page_idx, counts = triton_kernels.select_packed(*rows, *settings, 8)
    assert page_idx.max() < scores.shape[3]
    assert counts.flatten().tolist() == [8, 8, 0]


def test_launches_depend_on_shapes_alone():
    """Tensors without memory are enough to plan them."""
    for name in ("pack", "score_packed"):
        module = importlib.import_module(f"quest.triton_kernels.{name}")
        assert all(launch.programs > 0 for launch in module.configurations())
