"""Properties that hold for any input, searched for a counterexample by hypothesis."""

from __future__ import annotations

import torch
from cases import DTYPES, INF, NAN, Shape, check_attend, check_score, copy_pools, make, memory, same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_select import best_pages

import quest
from quest import Packing, QuestConfig, backends, packing_of, reference

LAYOUTS = ("plain", "padded", "token_major", "interleaved")


few = settings(
    max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


@st.composite
def shapes(draw, **fixed) -> Shape:
    """A small decode step of any kind."""
    page_size = draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
    kv_heads = draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from([1, 5, 8, 16, 24, 33, 64, 80]))
    found = dict(
        name="any",
        seq_lens=tuple(draw(st.lists(st.integers(0, 60), min_size=1, max_size=3))),
        q_len=draw(st.sampled_from([1, 1, 2, 5, 17])),
        num_kv_heads=kv_heads,
        num_heads=kv_heads * draw(st.sampled_from([1, 2, 3, 5, 7])),
        head_dim=head_dim,
        v_head_dim=draw(st.sampled_from([None, 3, 16, 40])),
        page_size=page_size,
        block_size=page_size * draw(st.integers(1, 3)),
        dtype=draw(st.sampled_from(DTYPES)),
        query_dtype=draw(st.sampled_from([None, *DTYPES])),
        layout=draw(st.sampled_from(LAYOUTS)),
    )
    return Shape(**(found | fixed))


@st.composite
def configs(draw, shape: Shape) -> QuestConfig:
    pages = st.integers(0, 3)
    sink, recent = (draw(pages) * shape.page_size for _ in range(2))
    least = sink + max(recent, shape.page_size)
    budget = draw(st.one_of(st.integers(least, least + 60), st.floats(0.01, 1.0)))
    return QuestConfig(
        page_size=shape.page_size,
        block_size=shape.block_size,
        budget=budget,
        sink_tokens=sink,
        recent_tokens=recent,
        slack=draw(st.sampled_from([0.0, 0.4, 1.0])),
        group_rule=draw(st.sampled_from(["softmax", "relative", "per_head"])),
    )


@st.composite
def attention_options(draw, shape: Shape) -> dict:
    options = {
        "softmax_scale": draw(st.sampled_from([None, 0.3])),
        "softcap": draw(st.sampled_from([None, 4.0])),
        "window": draw(st.sampled_from([None, None, 1, 7, 16, 40])),
        "sinks": torch.linspace(-2, 2, shape.num_heads) if draw(st.booleans()) else None,
    }
    return {name: value for name, value in options.items() if value is not None}


@few
@given(st.data())
def test_slack_1_is_never_below_a_dot_product_of_the_page(data):
    """As stored, for queries and keys of either sign, constant channels and outliers; fp32 rounding aside."""
    dtype = data.draw(st.sampled_from(DTYPES))
    tokens, dim, page_size = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 40)), 4
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    keys = torch.randn(tokens, dim, generator=rng)
    keys += data.draw(st.sampled_from([0.0, 10.0, -10.0]))  # one-sided channels
    keys[:, data.draw(st.integers(0, dim - 1))] = data.draw(st.sampled_from([0.0, -3.0, 7.0]))  # a constant one
    outlier = data.draw(st.sampled_from([1.0, -60000.0, 1e-7] + [1e30] * (dtype != torch.float16)))
    keys[data.draw(st.integers(0, tokens - 1)), data.draw(st.integers(0, dim - 1))] = outlier
    query = torch.randn(1, 1, dim, generator=rng) * data.draw(st.sampled_from([1.0, 30.0, -1e-3]))
    query[query.abs() < data.draw(st.sampled_from([0.0, 0.5]))] = 0.0

    pages = -(-tokens // page_size)
    cache = torch.full((pages, 1, page_size, dim), NAN, dtype=dtype)
    cache.flatten(0, 2)[:tokens] = keys.to(dtype)
    summaries = [torch.zeros(pages, 1, 1, dim, dtype=dtype) for _ in range(2)]
    table, lens = torch.arange(pages, dtype=torch.int32)[None], torch.tensor([tokens], dtype=torch.int32)
    for isa in backends.isas():
        backends.use_isa(isa)
        quest.summarise(cache, *summaries, table, lens, lens)
        scores = quest.score(query, *summaries, table, lens, page_size=page_size, group_rule="per_head", slack=1.0)
        for page in range(pages):
            stored = cache[page, 0, : tokens - page * page_size].double()
            exact = stored @ query[0, 0].double()
            largest = torch.maximum(*(x[page, 0, 0].double().abs() for x in summaries))
            rounding = 4e-6 * (query[0, 0].double().abs() * largest).sum()
            assert scores[0, 0, page] >= exact.max() - rounding
    backends.use_isa(None)


@few
@given(st.data())
def test_the_selection_is_the_exact_best_set(data):
    """Ascending, in range, the exact count, the lower page on ties; NaN and infinities are ranked as all else."""
    numbers = st.one_of(st.sampled_from([NAN, INF, -INF, 0.0, -0.0, 1.0]), st.floats(width=32))
    page_size, q_len = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([1, 1, 3]))
    max_pages = data.draw(st.integers(1, 24))
    lengths = data.draw(st.lists(st.integers(0, max_pages * page_size), min_size=1, max_size=3))
    sink, recent = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))
    least = -(-sink // page_size) + max(1, -(-recent // page_size))
    budget = data.draw(st.one_of(st.integers(least * page_size, 200), st.floats(1e-3, 1.0)))
    options = {"page_size": page_size, "budget": budget, "sink_tokens": sink, "recent_tokens": recent}
    options["window"] = data.draw(st.one_of(st.none(), st.integers(1, 60)))
    row = st.lists(numbers, min_size=max_pages, max_size=max_pages)
    scores = torch.tensor(data.draw(st.lists(row, min_size=q_len, max_size=q_len)))
    scores = scores[None, :, None].repeat(len(lengths), 1, 1, 1)
    lens = torch.tensor(lengths, dtype=torch.int32)
    expected = reference.select(scores, lens, **options)
    for isa in backends.isas():
        backends.use_isa(isa)
        page_idx, counts = quest.select(scores, lens, **options)
        assert page_idx.equal(expected[0])
        assert counts.equal(expected[1])
    backends.use_isa(None)
    for b, length in enumerate(lengths):
        for t in range(q_len):
            pages = best_pages(scores[b, t, 0].tolist(), length, q_len=q_len, t=t, **options)
            assert page_idx[b, t, 0].tolist() == pages + [-1] * (page_idx.shape[-1] - len(pages))
            assert counts[b, t, 0] == len(pages)


@few
@given(st.data())
def test_every_verb_on_any_input(data):
    """Each against the reference in fp64, the fused op against the verbs bit for bit, on one instruction set each."""
    shape = data.draw(shapes())
    case, config = make(shape, seed=data.draw(st.integers(0, 9))), data.draw(configs(shape))
    options = data.draw(attention_options(shape))
    backends.use_isa(data.draw(st.sampled_from(backends.isas())))
    states, results = [], []
    for backend in ("cpu", "verbs"):
        states.append(case.before())
        results.append(quest.decode(*states[-1].step, config=config, backend=backend, **options))
        assert all(map(same, states[-1].pools, case.pools))
    assert all(map(torch.equal, *results))

    layer = config.layer(0)
    scoring = {"slack": layer.slack, "group_rule": layer.group_rule, "window": options.get("window")}
    scoring["softmax_scale"] = options.get("softmax_scale")
    scores = quest.score(case.query, *case.summary, page_size=case.page_size, **scoring)
    check_score(scores, case, **scoring)
    picking = {"page_size": case.page_size, "budget": layer.budget, "window": options.get("window")}
    picking |= {"sink_tokens": layer.sink_tokens, "recent_tokens": layer.recent_tokens}
    page_idx, counts = quest.select(scores, case.seq_lens, **picking)
    assert all(map(torch.equal, (page_idx, counts), reference.select(scores, case.seq_lens, **picking)))
    check_attend(results[0], case, page_idx, **options)
    backends.use_isa(None)


@few
@given(st.data())
def test_a_full_budget_is_dense_bit_for_bit(data):
    shape = data.draw(shapes())
    case, options = make(shape), data.draw(attention_options(shape))
    backends.use_isa(data.draw(st.sampled_from(backends.isas())))
    budget = data.draw(st.sampled_from([max(max(shape.seq_lens), shape.page_size), 1.0, 10**9]))
    config = data.draw(configs(shape)).replace(budget=budget, sink_tokens=0, recent_tokens=0, group_rule="softmax")
    got = quest.decode(*case.before().step, config=config, **options)
    dense = quest.attend(case.query, *case.cache, page_size=case.page_size, **options)
    assert all(map(torch.equal, got, dense))
    backends.use_isa(None)


@few
@given(st.data())
def test_summaries_equal_a_recompute_after_any_history(data):
    """append, overwrite and crop in any order, each followed by summarise of what it touched."""
    page_size, pages_per_block, dim = data.draw(st.sampled_from([1, 3, 4])), data.draw(st.integers(1, 2)), 5
    block_size, rows, blocks = page_size * pages_per_block, 2, 6
    dtype = data.draw(st.sampled_from(DTYPES))
    rng = torch.Generator().manual_seed(0)
    pools = [torch.full((rows * blocks, 2, block_size, dim), NAN, dtype=dtype) for _ in range(2)]
    summaries = [torch.full((rows * blocks, 2, pages_per_block, dim), NAN, dtype=dtype) for _ in range(2)]
    table = torch.randperm(rows * blocks, generator=rng).int().view(rows, blocks)
    lengths = [0] * rows
    steps = data.draw(st.lists(st.tuples(st.sampled_from(["append", "crop", "overwrite"]), st.integers(0, 1),
                                         st.integers(1, 9)), max_size=12))  # fmt: skip
    for kind, row, count in steps:
        if kind == "crop":
            lengths[row] = max(0, lengths[row] - count)
            touched = lengths[row] % page_size  # the page that lost some of its tokens
        else:
            start = lengths[row] if kind == "append" else max(0, lengths[row] - count)
            count = min(count, blocks * block_size - start)
            tokens = torch.arange(start, start + count)
            slots = table[row, tokens // block_size].long() * block_size + tokens % block_size
            keys = torch.randn(count, 2, dim, generator=rng).to(dtype)
            quest.append(keys, keys, *pools, slots)
            lengths[row], touched = max(lengths[row], start + count), count
        num_new = torch.zeros(rows, dtype=torch.int32)
        num_new[row] = touched
        quest.summarise(pools[0], *summaries, table, torch.tensor(lengths, dtype=torch.int32), num_new)
    expected = [torch.full_like(x, NAN) for x in summaries]
    lens = torch.tensor(lengths, dtype=torch.int32)
    reference.summarise(pools[0], *expected, table, lens, lens)
    for got, fresh in zip(summaries, expected):
        present = ~fresh.isnan()
        assert got[present].equal(fresh[present])
        assert present.flatten(1).any(1).sum() == sum(-(-length // block_size) for length in lengths)


@few
@given(st.data())
def test_merge_of_any_split_is_the_whole(data):
    shape = data.draw(shapes(query_dtype=torch.float32))
    case, options = make(shape), data.draw(attention_options(shape))
    options.pop("sinks", None)  # a sink would count once per part
    max_pages = case.block_table.shape[1] * case.k_cache.shape[2] // case.page_size
    owner = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=max_pages, max_size=max_pages)))
    whole = None
    for part in range(3):
        idx = (owner == part).nonzero().flatten().int().expand(*case.query.shape[:2], shape.num_kv_heads, -1)
        result = quest.attend(case.query, *case.cache, idx, page_size=case.page_size, **options)
        whole = result if whole is None else quest.merge(*whole, *result)
    check_attend(whole, case, **options)


HOSTILE_32 = st.sampled_from([-(2**31), -5, -2, -1, 0, 1, 3, 7, 10**6, 2**31 - 1])
HOSTILE_64 = st.sampled_from([-(2**63), -(2**31), -2, -1, 0, 5, 10**6, 2**40, 2**63 - 1])


def hostile(data, like: torch.Tensor, values) -> torch.Tensor:
    flat = data.draw(st.lists(values, min_size=like.numel(), max_size=like.numel()))
    return torch.tensor(flat, dtype=like.dtype).view(like.shape)


@settings(few, max_examples=200)
@given(st.data())
def test_unchecked_hostile_input_writes_nothing_outside(data):
    """Any lengths, block ids, slots and pages with check=False: no crash, and the memory between rows stays."""
    shape = data.draw(shapes(layout=data.draw(st.sampled_from(["padded", "token_major"])), query_dtype=None))
    case, config = make(shape), data.draw(configs(shape))
    backends.use_isa(data.draw(st.sampled_from(backends.isas())))
    state = case.copy().replace(
        block_table=hostile(data, case.block_table[:, :3], HOSTILE_32),
        seq_lens=hostile(data, case.seq_lens, HOSTILE_32),
        slot_mapping=hostile(data, case.slot_mapping, HOSTILE_64),
    )
    guards = guards_of(state.pools)
    options = data.draw(attention_options(shape))
    for backend in ("cpu", "verbs"):
        out, _ = quest.decode(*state.step, config=config, backend=backend, check=False, **options)
        assert out.shape == (*case.query.shape[:3], case.v_cache.shape[-1])
    num_new = hostile(data, case.seq_lens, HOSTILE_32)
    quest.summarise(state.k_cache, *state.summary, num_new, check=False)
    page_idx = torch.zeros(*case.query.shape[:2], shape.num_kv_heads, 4, dtype=torch.int32)
    quest.attend(case.query, *state.cache, hostile(data, page_idx, HOSTILE_32), page_size=case.page_size, check=False)
    scores = torch.randn(*case.query.shape[:2], 2, 7)
    page_idx, counts = quest.select(scores, state.seq_lens, page_size=case.page_size, budget=0.4, check=False)
    assert page_idx.max() < 7
    assert page_idx.min() >= -1
    assert counts.equal((page_idx >= 0).sum(-1).int())
    assert guards_of(state.pools) == guards
    backends.use_isa(None)


@settings(few, max_examples=200)
@given(st.data())
def test_unchecked_hostile_input_of_packed_summaries(data):
    """The same with codes, of one level and of two."""
    page_size, coarse_size, block_size = data.draw(
        st.sampled_from([(1, 16, 64), (1, None, 16), (2, 8, 32), (3, None, 12)])
    )
    packing = Packing(page_size, block_size, coarse_size, data.draw(st.sampled_from([8, 4, 2])))
    shape = data.draw(shapes(page_size=page_size, block_size=block_size, query_dtype=None, layout="padded"))
    sizes = dict(page_size=page_size, coarse_size=coarse_size, block_size=block_size, summary_bits=packing.bits)
    config = data.draw(configs(shape)).replace(coarse_keep=data.draw(st.sampled_from([0.01, 1.0])), **sizes)
    case = make(shape)
    backends.use_isa(data.draw(st.sampled_from(backends.isas())))
    state = case.copy().replace(
        key=case.key.nan_to_num(),
        block_table=hostile(data, case.block_table[:, :3], HOSTILE_32),
        seq_lens=hostile(data, case.seq_lens, HOSTILE_32),
        slot_mapping=hostile(data, case.slot_mapping, HOSTILE_64),
    )
    blocks, kv_heads, _, head_dim = state.k_cache.shape
    size = packing.num_bytes(head_dim)
    room = torch.full((blocks, kv_heads, size + 12), 0xA5, dtype=torch.uint8)
    step = (*state.step[:5], room[..., :size], *state.step[7:])
    guards, options = guards_of(state.pools), data.draw(attention_options(shape))
    for backend in ("cpu", "verbs"):
        out, _ = quest.decode_packed(*step, config=config, backend=backend, check=False, **options)
        assert out.shape == (*case.query.shape[:3], case.v_cache.shape[-1])
    rows = state.k_cache, step[5], state.block_table, state.seq_lens
    quest.pack(*rows, hostile(data, case.seq_lens, HOSTILE_32), packing=packing, check=False)
    for sink, recent in ((0, 1), (10**6, 1), (0, 10**6)):
        forced = dict(sink_tokens=sink, recent_tokens=recent, coarse_keep=0.01, window=options.get("window"))
        scores = quest.score_packed(case.query, *rows, packing=packing, check=False, **forced)
        assert scores.shape[-1] == state.block_table.shape[1] * packing.pages
    assert guards_of(state.pools) == guards
    assert (room[..., size:] == 0xA5).all()
    backends.use_isa(None)


def guards_of(pools) -> list[bytes]:
    """The memory between the rows of pools that are laid out with some."""
    copies = copy_pools(pools)
    for x in copies:
        x.zero_()
    return memory(*copies)


@few
@given(st.data())
def test_the_order_of_rows_does_not_matter(data):
    shape = data.draw(shapes(seq_lens=(40, 3, 0, 17), q_len=data.draw(st.sampled_from([1, 4]))))
    case, config = make(shape), data.draw(configs(shape))
    order = torch.tensor(data.draw(st.permutations(range(4))))
    names = ("query", "key", "value", "block_table", "seq_lens", "slot_mapping")
    other = case.replace(**{name: getattr(case, name)[order] for name in names})
    got, expected = (quest.decode(*c.before().step, config=config) for c in (other, case))
    assert got[0].equal(expected[0][order])
    assert got[1].equal(expected[1][order])


def test_hostile_input_on_an_empty_pool(isa):
    """No block at all, but lengths and ids that claim some."""
    case = make(Shape("none", seq_lens=(0, 0)))
    empty = case.replace(**{n: getattr(case, n)[:0] for n in ("k_cache", "v_cache", "page_min", "page_max")})
    state = empty.replace(seq_lens=torch.tensor([9, 2**31 - 1], dtype=torch.int32),
                          block_table=torch.tensor([[0, 5], [-9, 2**31 - 1]], dtype=torch.int32),
                          slot_mapping=torch.tensor([[0], [99]]))  # fmt: skip
    for backend in ("cpu", "verbs"):
        for rule in ("relative", "per_head"):
            config = QuestConfig(page_size=16, budget=48, group_rule=rule)
            out, lse = quest.decode(*state.step, config=config, backend=backend, check=False)
            assert not out.any()
            assert (lse == -INF).all()
            config = QuestConfig(block_size=64, budget=48, group_rule=rule)
            pools = [x.new_empty(0, 2, 64, 64) for x in state.pools[:2]]
            packed = torch.empty(0, 2, packing_of(config).num_bytes(64), dtype=torch.uint8)
            step = (state.query, *(x.nan_to_num() for x in state.step[1:3]), *pools, packed, *state.step[7:])
            out, lse = quest.decode_packed(*step, config=config, backend=backend, check=False)
            assert not out.any()
            assert (lse == -INF).all()
