"""Packed summaries: codes rounded outward, two levels of scores, and the decode step that reads them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import BF16, DTYPES, F16, NAN, Case, Shape, assert_near, check_attend, make, memory, same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import quest
from quest import Packing, PagedKVCache, QuestConfig, backends, packing_of, reference, reference_packed

RULES = ("per_head", "softmax", "relative")

# page_size, coarse_size, block_size: fine and coarse pages in runs of every length a kernel knows
FORMATS = [
    (4, 16, 64),
    (4, None, 16),
    (2, 16, 128),
    (1, 16, 64),
    (1, 32, 128),
    (1, None, 48),
    (8, None, 64),
    (4, 128, 512),
]


def instruction_sets() -> Iterator[str]:
    """The kernels of each in turn, where the reference, which is slow, runs once for all of them."""
    try:
        for name in backends.isas():
            backends.use_isa(name)
            yield name
    finally:
        backends.use_isa(None)


def case_of(packing: Packing, seq_lens: tuple[int, ...] | None = None, **changes: Any) -> Case:
    """By default, the longest row has more coarse pages than are kept."""
    seq_lens = seq_lens or (150, 64, 3, 0, max(400, 2 * packing.block_size + 76))
    shape = Shape("packed", seq_lens=seq_lens, page_size=packing.page_size, block_size=packing.block_size)
    return make(shape, **{"num_heads": 6, "num_kv_heads": 2, "head_dim": 40, **changes})


def packed_of(case: Case, packing: Packing, sink_tokens: int = 0, fill: int = 0xA5) -> Tensor:
    """What the reference packs, between bytes that no kernel may write."""
    blocks, heads, _, head_dim = case.k_cache.shape
    size = packing.num_bytes(head_dim)
    packed = torch.full((blocks, heads, size + 64), fill, dtype=torch.uint8)[..., :size]
    rows = case.block_table, case.seq_lens, case.seq_lens
    reference_packed.pack(case.k_cache, packed, *rows, packing=packing, sink_tokens=sink_tokens)
    return packed


def formats() -> list[Packing]:
    return [Packing(page, block, coarse, bits) for page, coarse, block in FORMATS for bits in (8, 4, 2)]


def ranges(packed: Tensor, head_dim: int, packing: Packing, level: str = "") -> tuple[Tensor, Tensor]:
    """What the codes say: minima and maxima [..., pages, head_dim]."""
    codes = reference_packed.unpack(packed, head_dim, packing)
    lo, step = codes["lo"].unsqueeze(-2), codes["step"].unsqueeze(-2)
    low, high = lo + step * codes[level + "low"], lo + step * (codes[level + "high"] + 1)
    return low[..., :head_dim], high[..., :head_dim]


# ---- pack ----


@pytest.mark.parametrize("packing", formats(), ids=str)
def test_pack_equals_the_reference_bit_for_bit(packing):
    """The bytes behind those of a head are left alone."""
    for dtype, layout, head_dim in ((torch.float32, "padded", 40), (BF16, "interleaved", 64), (F16, "token_major", 7)):
        case = case_of(packing, dtype=dtype, layout=layout, head_dim=head_dim)
        for sink in (0, 5, 70):
            expected = packed_of(case, packing, sink)
            for name in instruction_sets():
                got = packed_of(case.replace(seq_lens=case.seq_lens * 0), packing)
                rows = case.block_table, case.seq_lens, case.seq_lens
                quest.pack(case.k_cache, got, *rows, packing=packing, sink_tokens=sink)
                assert memory(got) == memory(expected), name


def test_a_block_is_packed_when_a_group_of_its_pages_is_complete(isa):
    """Not in between: groups are of 16 tokens, blocks of 64."""
    packing = Packing(4, 64, 16, 4)
    case = case_of(packing, (64, 130, 127, 200, 144, 15))
    packed = torch.full((len(case.k_cache), 2, packing.num_bytes(40)), 7, dtype=torch.uint8)
    before, num_new = packed.clone(), torch.tensor([1, 1, 70, 9, 1, 15], dtype=torch.int32)
    quest.pack(case.k_cache, packed, case.block_table, case.seq_lens, num_new, packing=packing)
    written = [block for block in range(len(packed)) if not packed[block].equal(before[block])]
    table = case.block_table.tolist()
    assert sorted(written) == sorted([table[0][0], table[2][0], table[2][1], table[3][2], table[4][2]])


@st.composite
def keys(draw: st.DrawFn) -> Tensor:
    """A block of 32 keys whose channels are of every kind: constant, one-sided, with an outlier, tiny, huge."""
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = torch.tensor([draw(st.sampled_from([1e-42, 1e-30, 1e-3, 1.0, 40.0, 1e30, 3e37])) for _ in range(8)])
    shift = torch.tensor([draw(st.sampled_from([0.0, 1.0, -3.0])) for _ in range(8)])
    spread = torch.tensor([draw(st.sampled_from([0.0, 1e-6, 1.0])) for _ in range(8)])
    k = (torch.randn(32, 8, generator=rng).clamp(-3, 3) * spread + shift).clamp(-3, 3) * scale
    if draw(st.booleans()):
        k[draw(st.integers(0, 31)), draw(st.integers(0, 7))] = draw(st.sampled_from([1e4, -1e4, 0.0, 9e37, -9e37]))
    return k.to(draw(st.sampled_from([torch.float32, BF16])))


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(
    keys(),
    st.sampled_from([8, 4, 2]),
    st.sampled_from([(1, 16), (2, 8), (1, None), (4, None)]),
    st.integers(0, 3),
    st.sampled_from([1.0, 0.4, 0.0]),
)
def test_ranges_hold_their_pages_and_bounds_hold(k, bits, sizes, sink, slack):
    """Every range holds its page's, coarse ones too; none is wider than a cell on either side; and the score at slack 1
    is never below a q . k of the page."""
    page_size, coarse_size = sizes
    packing = Packing(page_size, 64 if coarse_size == 16 else 32, coarse_size, bits)
    k = k.repeat(packing.block_size // 32, 1)
    table, length = torch.tensor([[0]], dtype=torch.int32), torch.tensor([len(k)], dtype=torch.int32)
    cache = k[None, None]
    packed = torch.zeros(1, 1, packing.num_bytes(8), dtype=torch.uint8)
    quest.pack(cache, packed, table, length, length, packing=packing, sink_tokens=sink)
    codes = reference_packed.unpack(packed, 8, packing)
    lo, step = (codes[name][0, 0, :8].double() for name in ("lo", "step"))
    low, high = lo + step * codes["low"][0, 0, :, :8], lo + step * (codes["high"][0, 0, :, :8] + 1)
    wide = k.double().unflatten(0, (-1, page_size))
    first = -(-sink // page_size)
    true_low, true_high = wide.amin(1)[first:], wide.amax(1)[first:]
    # an edge is computed in fp32, whose smallest number is 1.4e-45
    rounding = 2**-22 * torch.maximum(true_low.abs(), true_high.abs()) + 3e-45
    assert (low[first:] <= true_low + rounding).all()
    assert (high[first:] >= true_high - rounding).all()
    assert (true_low - low[first:] <= step + rounding).all()
    assert (high[first:] - true_high <= step + rounding).all()
    widest = true_high.amax(0) - true_low.amin(0)
    assert (step * packing.cells <= widest * 1.01 + true_low.abs().amax(0) * 0.01 + 3e-38).all(), "no cell is wasteful"
    if coarse_size:
        of = torch.arange(first, len(low)) // packing.group_pages
        coarse_low = lo + step * codes["coarse_low"][0, 0, of, :8]
        coarse_high = lo + step * (codes["coarse_high"][0, 0, of, :8] + 1)
        assert (coarse_low <= low[first:]).all()
        assert (coarse_high >= high[first:]).all()

    query = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(bits)) / wide.abs().amax().clamp_min(1e-30)
    options: dict[str, Any] = dict(packing=packing, sink_tokens=sink, group_rule="per_head")
    rows = cache, packed, table, length
    bound = quest.score_packed(query.float(), *rows, slack=1.0, **options)[0].double()
    true = (query.float().double()[0] @ wide.flatten(0, 1).T).unflatten(1, (-1, page_size)).amax(2)
    size = query.double().abs()[0] @ torch.maximum(low.abs(), high.abs()).T
    assert (bound >= true - 1e-5 * size - 1e-30)[:, first:-1].all()
    assert (bound[:, :first] == -math.inf).all(), "forced pages have no score"
    got, expected = (v.score_packed(query.float(), *rows, slack=slack, **options) for v in (quest, reference_packed))
    assert_near(got, expected.double(), expected, "score", size=size.max().item())


def test_a_constant_block_is_exact():
    """A step of zero: no NaN, and the score is that of the one value."""
    packing = Packing(4, 16, None, 4)
    cache = torch.full((1, 1, 16, 8), 1.5, dtype=BF16)
    table, length = torch.tensor([[0]], dtype=torch.int32), torch.tensor([16], dtype=torch.int32)
    packed = torch.full((1, 1, packing.num_bytes(8)), 255, dtype=torch.uint8)
    quest.pack(cache, packed, table, length, length, packing=packing)
    query = torch.tensor([1.0, -2, 3, 0, 0, 0, 0, 0.5]).view(1, 1, 8)
    scores = quest.score_packed(query, cache, packed, table, length, packing=packing, group_rule="per_head")
    assert scores.tolist() == [[[3.75, 3.75, 3.75, -math.inf]]]  # the newest page is forced


def test_an_outlier_among_the_sinks_spoils_no_range():
    """The first token's key is out of all proportion: left out of the bounds, the others' codes stay fine."""
    packing = Packing(4, 64, None, 4)
    torch.manual_seed(0)
    cache = torch.randn(1, 1, 64, 16)
    cache[0, 0, 0] = 1000
    table, length = torch.tensor([[0]], dtype=torch.int32), torch.tensor([64], dtype=torch.int32)
    steps = []
    for sink in (0, 4):
        packed = torch.zeros(1, 1, packing.num_bytes(16), dtype=torch.uint8)
        quest.pack(cache, packed, table, length, length, packing=packing, sink_tokens=sink)
        steps.append(reference_packed.unpack(packed, 16, packing)["step"].max().item())
    assert steps[0] > 60 > 1 > steps[1]


# ---- score ----


@pytest.mark.parametrize("packing", formats(), ids=str)
def test_scores_equal_the_reference(packing):
    """The same pages have a score, and the same one; pages of the sink, of the open block, of coarse pages not kept."""
    for heads, dim, dtype, q_len, window, sink in (
        ((6, 2), 40, torch.float32, 1, None, 0),
        ((8, 1), 64, BF16, 2, None, 9),
        ((5, 5), 128, F16, 1, 150, 4),
        ((7, 1), 16, BF16, 1, None, 0),
    ):
        case = case_of(packing, num_heads=heads[0], num_kv_heads=heads[1], head_dim=dim, dtype=dtype, q_len=q_len)
        packed = packed_of(case, packing, sink)
        rows = case.query, case.k_cache, packed, case.block_table, case.seq_lens
        for rule in RULES:  # the first one's scores say how large numbers are
            options: dict[str, Any] = dict(
                packing=packing, coarse_keep=0.1, sink_tokens=sink, slack=0.4, coarse_slack=0.2, window=window
            )
            options |= dict(group_rule=rule, budget=sink + 64, recent_tokens=8)
            expected = reference_packed.score_packed(*rows, **options)
            if rule == RULES[0]:
                size = expected[expected.isfinite()].abs().max().item()
            for name in instruction_sets():
                got = quest.score_packed(*rows, **options)
                assert_near(got, expected.double(), expected, f"{rule} {heads} {name}", size=128 * size)


def test_coarse_pages_decide_whose_pages_are_scored():
    """One coarse page holds the key that the query looks for: it is kept with as few others as the floor asks for."""
    packing = Packing(4, 64, 16, 4)
    torch.manual_seed(1)
    tokens = 64 * 40
    cache = torch.randn(40, 1, 64, 32) * 0.1
    query = torch.randn(1, 1, 32)
    cache[17, 0, 33] = query[0, 0]
    table, length = torch.arange(40, dtype=torch.int32)[None], torch.tensor([tokens], dtype=torch.int32)
    packed = torch.zeros(40, 1, packing.num_bytes(32), dtype=torch.uint8)
    quest.pack(cache, packed, table, length, length, packing=packing)
    options: dict[str, Any] = dict(packing=packing, budget=64, recent_tokens=4, slack=0.4, group_rule="relative")
    for keep, coarse in ((0.01, 2 * 64 // 16 + 2), (0.25, 40), (1.0, 160)):
        scores = quest.score_packed(query, cache, packed, table, length, coarse_keep=keep, **options)[0, 0]
        assert 4 * coarse - 1 <= scores.isfinite().sum() <= 4 * coarse  # the newest page is forced, and has no score
        assert scores.argmax() == (17 * 64 + 33) // 4


def test_a_token_is_scored_by_nothing_after_it():
    """Codes of a block that a later token of the same step fills are not used for the tokens before."""
    packing = Packing(4, 64, 16, 4)
    case = case_of(packing, (128,), q_len=3)
    packed = packed_of(case, packing)
    options: dict[str, Any] = dict(packing=packing, group_rule="per_head")
    rows = case.k_cache, packed, case.block_table, case.seq_lens
    scores = quest.score_packed(case.query, *rows, **options)
    spoilt = packed.clone()
    spoilt[case.block_table[0, 1].long()] = 255
    other = quest.score_packed(case.query, case.k_cache, spoilt, *rows[2:], **options)
    assert other[:, :2].equal(scores[:, :2])
    assert not same(other[:, 2], scores[:, 2])


# ---- decode ----


def config_of(packing: Packing, **changes: Any) -> QuestConfig:
    config: dict[str, Any] = dict(
        page_size=packing.page_size,
        block_size=packing.block_size,
        coarse_size=packing.coarse_size,
        summary_bits=packing.bits,
        budget=96,
        sink_tokens=16,
        recent_tokens=16,
        coarse_keep=0.1,
        slack=0.4,
    )
    return QuestConfig(**config | changes)


def step_of(case: Case, packed: Tensor) -> tuple[Tensor, ...]:
    return (*case.step[:5], packed, *case.step[7:])


@pytest.mark.parametrize("packing", formats(), ids=str)
def test_fused_equals_the_verbs_bit_for_bit(packing):
    for q_len, dtype, options in ((1, BF16, {}), (3, torch.float32, {"window": 200, "softcap": 5.0})):
        case = case_of(packing, q_len=q_len, dtype=dtype)
        packed = packed_of(case, packing, 16)
        start = packed_of(case.replace(seq_lens=(case.seq_lens - q_len).clamp_min(0)), packing, 16)
        lengths = zip(case.block_table, case.seq_lens.tolist())
        full = [int(block) for row, length in lengths for block in row[: length // packing.block_size]]

        def step(config: QuestConfig, backend: str) -> tuple[Tensor, Tensor]:
            state, mine = case.before(), start.clone()  # noqa: B023
            result = quest.decode_packed(*step_of(state, mine), config=config, backend=backend, **options)  # noqa: B023
            assert same(state.k_cache, case.k_cache)  # noqa: B023
            assert mine[full].equal(packed[full])  # noqa: B023
            return result

        for rule in RULES:
            config = config_of(packing, group_rule=rule)
            expected = step(config, "reference")[0]
            score: dict[str, Any] = dict(budget=96, sink_tokens=16, recent_tokens=16, window=options.get("window"))
            levels: dict[str, Any] = dict(coarse_keep=0.1, slack=0.4, coarse_slack=0.2, group_rule=rule)
            rows = case.query, case.k_cache, packed, case.block_table, case.seq_lens
            scores = reference_packed.score_packed(*rows, packing=packing, **levels, **score)
            wanted, _ = reference.select(scores, case.seq_lens, page_size=packing.page_size, **score)
            for _ in instruction_sets():
                results = [step(config, backend) for backend in ("cpu", "verbs")]
                assert all(map(torch.equal, *results))
                scores = quest.score_packed(*rows, packing=packing, **levels, **score)
                page_idx, _ = quest.select(scores, case.seq_lens, page_size=packing.page_size, **score)
                check_attend(results[0], case, page_idx, **options)
                equal = (page_idx == wanted).all(-1)  # not where two scores are as good as equal
                assert equal.float().mean() > 0.9
                equal = equal.repeat_interleave(6 // equal.shape[2], 2)
                assert_near(results[0][0][equal], expected[equal].double(), expected[equal], "out", dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_full_budget_is_dense_attention(isa, dtype):
    packing = Packing(4, 64, 16, 4)
    case = case_of(packing, dtype=dtype, num_heads=7, num_kv_heads=1)
    for budget in (2048, 1.0):
        packed = packed_of(case, packing)
        check_attend(
            quest.decode_packed(*step_of(case.before(), packed), config=config_of(packing, budget=budget)), case
        )


def test_any_number_of_threads(isa, threads):
    packing = Packing(4, 64, 16, 4)
    case = case_of(packing, (3000,), num_heads=4, num_kv_heads=1, head_dim=64)
    config, packed = config_of(packing, coarse_keep=0.25), packed_of(case, packing, 16)
    results = []
    for count in (1, 2, 3, 8):
        torch.set_num_threads(count)
        results.append(quest.decode_packed(*step_of(case.before(), packed), config=config))
    for out, lse in results[1:]:
        assert torch.allclose(out, results[0][0], rtol=1e-5, atol=1e-6)
        assert torch.allclose(lse, results[0][1], rtol=1e-6)


def test_rows_do_not_touch_each_other(isa):
    packing = Packing(4, 64, 16, 4)
    case = case_of(packing, (300, 64, 3, 0, 1100))
    config, packed = config_of(packing), packed_of(case, packing, 16)
    out, lse = quest.decode_packed(*step_of(case.before(), packed), config=config)
    for row in range(5):
        pick = slice(row, row + 1)
        args = [x[pick] for x in case.step[:3]], [x[pick] for x in case.step[7:]]
        alone = quest.decode_packed(*args[0], case.k_cache, case.v_cache, packed, *args[1], config=config)
        assert torch.allclose(alone[0], out[pick], rtol=1e-5, atol=1e-6)
    assert not out[3].any()
    assert (lse[3] == -math.inf).all()


@pytest.mark.parametrize("value", [math.inf, -math.inf, NAN, 2e38])
def test_keys_that_have_no_codes_are_refused(value):
    """Before anything is written, whatever `check` says."""
    packing = Packing(4, 64, 16, 4)
    case = case_of(packing).before()
    packed = packed_of(case, packing)
    key = case.key.clone()
    key[1, 0, 1, 5] = value
    before = memory(case.k_cache, case.v_cache, packed)
    args = case.query, key, case.value, case.k_cache, case.v_cache, packed, *case.step[7:]
    for check in (True, False):
        with pytest.raises(ValueError, match=r"decode_packed: key: must be finite .* in token 1, KV head 1"):
            quest.decode_packed(*args, config=config_of(packing), check=check)
    assert memory(case.k_cache, case.v_cache, packed) == before
    cache = PagedKVCache(1, config=config_of(packing))
    step = cache.extend(1)
    bad = torch.full((1, 1, 2, 8), value)
    with pytest.raises(ValueError, match="append: key must be finite"):
        cache.append(0, bad, bad, step)


def test_bad_arguments_are_named():
    packing = Packing(4, 64, 16, 4)
    case = case_of(packing)
    packed = packed_of(case, packing)
    args = step_of(case, packed)

    def refused(match: str, kind: type[Exception] = ValueError, config: Any = None, **changes: Any) -> None:
        names = ("query", "key", "value", "k_cache", "v_cache", "packed", "block_table", "seq_lens", "slot_mapping")
        given = [changes.get(name, x) for name, x in zip(names, args)]
        with pytest.raises(kind, match=match):
            quest.decode_packed(*given, config=config or config_of(packing))

    refused("packed must have dtype uint8, got int8", TypeError, packed=packed.view(torch.int8))
    refused("packed must have 1536 bytes", packed=packed[..., :-4])
    refused("packed must be .*num_kv_heads", packed=packed[:, :1])
    refused("config must have summary_bits", config=QuestConfig(page_size=16))
    refused("packing must have k_cache's block_size, 64, got 128", config=config_of(packing, block_size=128))
    refused("packed must have 2816 bytes", config=config_of(packing, summary_bits=8))
    rows = case.query, case.k_cache, packed, case.block_table, case.seq_lens
    for wrong in (0, 2.0):
        with pytest.raises(ValueError, match="coarse_keep"):
            quest.score_packed(*rows, packing=packing, coarse_keep=wrong)
    with pytest.raises(ValueError, match="decode: config must have summary_bits None"):
        quest.decode(*case.step, config=config_of(packing))
    table = case.block_table.clone()
    table[4, 0] = 99
    refused(r"decode_packed: block_table\[4, 0\]", block_table=table)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize(("page_size", "coarse_size"), [(1, None), (1, 16), (2, 8), (4, 16), (4, None), (16, 64)])
def test_both_languages_count_the_same_bytes(page_size, coarse_size, bits):
    """The ops take what `Packing.num_bytes` says, and not a byte less."""
    packing = Packing(page_size, 256, coarse_size, bits)
    table, length = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([256], dtype=torch.int32)
    for head_dim in (7, 64, 80, 128, 256):
        cache, size = torch.randn(1, 1, 256, head_dim), packing.num_bytes(head_dim)
        packed, less = (torch.empty(1, 1, n, dtype=torch.uint8) for n in (size, size - 1))
        settings = (page_size, coarse_size or 0, bits, 0, True)
        torch.ops.quest.pack(cache, packed, table, length, length, *settings)
        for codes in reference_packed.unpack(packed, head_dim, packing).values():
            assert codes.shape[-1] == -(-head_dim // 32) * 32
        with pytest.raises(ValueError, match="pack: packed: expected uint8"):
            torch.ops.quest.pack(cache, less, table, length, length, *settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(summary_bits=3), "summary_bits must be None, 8, 4, 2, got 3"),
        (dict(page_size=16, coarse_size=64), "coarse_size needs summary_bits"),
        (dict(coarse_size=8), r"coarse_size must be a power of two of pages \(16, 32, 64 tokens\), got 8"),
        (dict(summary_bits=4, page_size=4, coarse_size=24), "coarse_size must be a power of two of pages"),
        (dict(summary_bits=4, page_size=4, coarse_size=16, block_size=96), r"multiple of 4 coarse pages \(64\)"),
        (dict(summary_bits=4, page_size=4, block_size=24), r"multiple of 4 pages \(16\)"),
        (dict(summary_bits=4, coarse_keep=0.0), "coarse_keep must be in"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit(settings, message):
    with pytest.raises(ValueError, match=message):
        QuestConfig(**settings)


def test_default_block_sizes():
    assert QuestConfig(page_size=4, summary_bits=4, coarse_size=None).block_size == 64
    two = QuestConfig(page_size=4, summary_bits=4, coarse_size=16)
    assert two.block_size == 256
    assert two.replace(coarse_size=32).block_size == 512
    assert packing_of(two) == Packing(4, 256, 16, 4)


# ---- the cache ----


HEADS, DIM = 2, 8


def filled(config: QuestConfig, keys: Tensor) -> PagedKVCache:
    """A cache of one row that stored `keys` [tokens, heads, dim] (its values too) at once."""
    cache = PagedKVCache(1, config=config)
    cache.append(0, keys[None], keys[None], cache.extend(len(keys)))
    return cache


def output(cache: PagedKVCache, row: int, key: Tensor, seed: int) -> Tensor:
    """One step's result, on a copy of the cache."""
    cache = cache.__deepcopy__({})
    query = torch.randn(1, 1, 2 * HEADS, DIM, generator=torch.Generator().manual_seed(seed))
    rows = cache.batch_size
    repeat = (rows, 1, 1, 1)
    out, _ = cache.decode(0, query.repeat(repeat), key[None, None].repeat(repeat), key[None, None].repeat(repeat),
                          cache.extend(1))  # fmt: skip
    return out[row]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(st.data())
def test_any_history_reads_like_a_fresh_cache(data: st.DataObject) -> None:
    """After extends, crops and forks, in one go or token by token: codes of full blocks and a step's result are those
    of a cache that was given the same keys at once."""
    bits = data.draw(st.sampled_from([8, 4, 2]))
    config = QuestConfig(page_size=2, coarse_size=8, summary_bits=bits, block_size=32, budget=16, sink_tokens=2,
                         recent_tokens=2, coarse_keep=0.1)  # fmt: skip
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    new = lambda n: torch.randn(n, HEADS, DIM, generator=rng)  # noqa: E731
    cache, rows = PagedKVCache(1, config=config), [new(0)]
    for _ in range(data.draw(st.integers(1, 8))):
        kind = data.draw(st.sampled_from(["prompt", "steps", "crop", "fork"]))
        if kind == "fork":
            indices = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=3))
            cache.fork(indices)
            rows = [rows[i] for i in indices]
        elif kind == "crop":
            ends = [data.draw(st.integers(0, len(row))) for row in rows]
            cache.crop(ends)
            rows = [row[:end] for row, end in zip(rows, ends)]
        else:
            counts = [data.draw(st.integers(1, 50))] if kind == "prompt" else [1] * data.draw(st.integers(1, 5))
            for count in counts:
                fresh = [new(count) for _ in rows]
                batch = torch.stack(fresh)
                cache.append(0, batch, batch, cache.extend(count))
                rows = [torch.cat(pair) for pair in zip(rows, fresh)]
    packed, packing = cache.summaries[0][0], packing_of(config)
    if packed is None:
        return
    extra = new(1)[0]
    for row, keys in enumerate(rows):
        if not len(keys):
            continue
        alone = filled(config, keys)
        for i in range(-(-(len(keys) // 8 * 8) // 32)):
            mine = packed[int(cache.block_table[row, i])]
            assert mine.equal(alone.summaries[0][0][int(alone.block_table[0, i])]), packing
        assert torch.allclose(output(cache, row, extra, row), output(alone, 0, extra, row), rtol=1e-5, atol=1e-6)


def test_padding_may_hold_anything():
    """Keys that no slot takes are neither stored nor looked at."""
    config = QuestConfig(page_size=4, coarse_size=16, summary_bits=4, block_size=64, budget=64, sink_tokens=4,
                         recent_tokens=4)  # fmt: skip
    keys = torch.randn(1, 70, HEADS, DIM)
    keys[:, :6] = NAN
    cache = PagedKVCache(1, config=config)
    cache.append(0, keys, keys, cache.extend(torch.arange(70)[None] >= 6))
    assert cache.lengths == [64]
    assert cache.dense(0)[0].equal(keys[:, 6:].transpose(1, 2))


def test_a_shared_block_is_not_packed_for_a_row_that_stores_nothing():
    """Rows share an open block; one grows past it. The other's block is as it was."""
    config = QuestConfig(page_size=4, coarse_size=16, summary_bits=4, block_size=64, budget=64, sink_tokens=4,
                         recent_tokens=4)  # fmt: skip
    keys = torch.randn(60, HEADS, DIM, generator=torch.Generator().manual_seed(0))
    cache = filled(config, keys)
    cache.fork([0, 0])
    grown = torch.randn(2, 8, HEADS, DIM)
    cache.append(0, grown, grown, cache.extend([8, 0]))
    assert cache.lengths == [68, 60]
    assert cache.block_table[0, 0] != cache.block_table[1, 0]
    assert cache.dense(0)[0][1, :, :60].equal(keys.transpose(0, 1))


# ---- torch.compile ----


def test_opcheck():
    packing = Packing(4, 64, 16, 4)
    case = case_of(packing, layout="plain")
    packed = packed_of(case, packing).contiguous()
    rows = case.block_table, case.seq_lens
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    ops = torch.ops.quest
    settings = 4, 16, 4
    torch.library.opcheck(
        ops.pack.default, (case.k_cache, packed, *rows, case.seq_lens, *settings, 4, True), test_utils=checks
    )
    score = (0.25, 1 << 20, 96, 0.0, 4, 4, 0.125, 0.4, 0.2, "relative", -1, True)
    query = case.query.contiguous()
    torch.library.opcheck(
        ops.score_packed.default, (query, case.k_cache, packed, *rows, *settings, *score), test_utils=checks
    )
    step = (query, case.key.contiguous(), case.value.contiguous(), case.k_cache, case.v_cache, packed, *rows)
    rest = (0.25, 1 << 20, 0.2, False, 0.125, 96, 0.0, 4, 4, 25, 0.4, "relative")
    torch.library.opcheck(
        ops.decode_packed.default, (*step, case.slot_mapping.contiguous(), *settings, *rest), test_utils=checks
    )


def test_compiled_equals_eager():
    packing = Packing(4, 64, 16, 4)
    case = case_of(packing, (200, 130), layout="plain")
    config = config_of(packing)
    packed = packed_of(case, packing, 16).contiguous()
    eager = quest.decode_packed(*step_of(case, packed.clone()), config=config)
    compiled = torch.compile(quest.decode_packed, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, compiled(*step_of(case, packed), config=config), eager))


@pytest.mark.parametrize("name", backends.isas())
def test_every_instruction_set_selects_the_same(name):
    """Integer products: scores of all sets differ in the last bits of a float, so that selections are equal."""
    packing = Packing(4, 64, 16, 4)
    case = case_of(packing, (1500, 700), num_heads=8, num_kv_heads=2, head_dim=64, dtype=BF16)
    packed = packed_of(case, packing, 16)
    rows = case.query, case.k_cache, packed, case.block_table, case.seq_lens
    common: dict[str, Any] = dict(budget=96, sink_tokens=16, recent_tokens=16)
    score: dict[str, Any] = dict(
        packing=packing, coarse_keep=0.2, slack=0.4, coarse_slack=0.2, group_rule="relative", **common
    )
    try:
        backends.use_isa(name)
        got = quest.select(quest.score_packed(*rows, **score), case.seq_lens, page_size=4, **common)
    finally:
        backends.use_isa(None)
    expected = reference.select(reference_packed.score_packed(*rows, **score), case.seq_lens, page_size=4, **common)
    assert all(map(torch.equal, got, expected))
