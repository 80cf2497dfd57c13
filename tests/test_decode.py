"""decode: the five verbs in one call, by every backend."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from cases import BF16, DTYPES, NAN, SHAPES, Case, Shape, check_attend, make, same

import quest
from quest import QuestConfig, reference
from quest.decode import op_settings

OPTIONS = [
    {},
    {"softmax_scale": 0.7, "softcap": 5.0},
    {"window": 21},
    {"sinks": True, "window": 40, "softmax_scale": 0.2},
]


def config_of(case: Case, **changes) -> QuestConfig:
    """A budget of three pages, one of them the newest."""
    shape = case.shape
    settings = {"budget": 3 * shape.page_size, "sink_tokens": 0, "recent_tokens": 1} | changes
    return QuestConfig(page_size=shape.page_size, block_size=shape.block_size or shape.page_size, **settings)


def run(case: Case, config: QuestConfig, **options) -> tuple[tuple[torch.Tensor, torch.Tensor], Case]:
    """The result, and the state behind it."""
    state = case.before()
    return quest.decode(*state.step, config=config, **options), state


def options_of(case: Case, options: dict) -> dict:
    if "sinks" not in options:
        return options
    return options | {"sinks": torch.linspace(-1, 1, case.shape.num_heads)}


def check_state(state: Case, case: Case) -> None:
    """Every new row in its slot, every summary recomputed, nothing else written."""
    for got, expected in zip(state.pools, case.pools):
        assert same(got, expected)


def selection(case: Case, config: QuestConfig, **options) -> torch.Tensor | None:
    """The pages that the verbs choose."""
    layer = config.layer(0)
    window, scale = options.get("window"), options.get("softmax_scale")
    scores = quest.score(case.query, *case.summary, page_size=case.page_size, softmax_scale=scale, slack=layer.slack,
                         group_rule=layer.group_rule, window=window)  # fmt: skip
    return quest.select(scores, case.seq_lens, page_size=case.page_size, budget=layer.budget, window=window,
                        sink_tokens=layer.sink_tokens, recent_tokens=layer.recent_tokens)[0]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fused_equals_the_verbs_bit_for_bit(isa, shape):
    case = make(shape)
    for rule in ("softmax", "relative", "per_head"):
        config = config_of(case, group_rule=rule, slack=0.7)
        (fused, state), (verbs, other) = (run(case, config, backend=name) for name in ("cpu", "verbs"))
        assert fused[0].equal(verbs[0])
        assert fused[1].equal(verbs[1])
        check_state(state, case)
        check_state(other, case)
    check_attend(fused, case, selection(case, config))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", ["ragged", "group_7", "many_tokens", "page_8"])
def test_options(isa, shape, options):
    case = make(shape)
    options = options_of(case, options)
    config = config_of(case)
    fused, _ = run(case, config, **options)
    verbs, _ = run(case, config, backend="verbs", **options)
    assert all(map(torch.equal, fused, verbs))
    check_attend(fused, case, selection(case, config, **options), **options)


@pytest.mark.parametrize("shape", ["ragged", "group_3", "many_tokens", "mla", "page_24"])
def test_equals_the_reference(isa, shape):
    """The whole step against the whole reference, selection included."""
    case = make(shape, dtype=torch.float32)
    for options in OPTIONS:
        options = options_of(case, options)
        config = config_of(case, group_rule="relative", slack=0.5)
        got, state = run(case, config, **options)
        expected, other = run(case, config, backend="reference", **options)
        assert torch.allclose(got[0], expected[0], rtol=1e-5, atol=1e-5)
        assert torch.allclose(got[1], expected[1], rtol=1e-5, atol=1e-5)
        check_state(other, state)


@pytest.mark.parametrize("shape", ["ragged", "many_tokens", "group_7", "page_8", "mla_absorbed", "all_rows_empty"])
def test_dense_layers_and_full_budgets_are_dense_bit_for_bit(isa, shape):
    case = make(shape)
    for options in OPTIONS:
        options = options_of(case, options)
        dense = quest.attend(case.query, *case.cache, page_size=case.page_size, **options)
        most = max(case.shape.seq_lens)
        for config in (
            config_of(case, dense_layers=(0,)),
            config_of(case, layers={0: {"dense": True}}),
            config_of(case, budget=max(most, case.page_size)),
            config_of(case, budget=1.0),
            config_of(case, budget=2**40, group_rule="softmax"),
        ):
            assert all(map(torch.equal, run(case, config, **options)[0], dense))


def test_layers_have_settings_of_their_own(isa):
    case = make("ragged", seq_lens=(300, 200))
    config = config_of(case, dense_layers=(1,), layers={2: {"budget": 96, "slack": 1.0, "group_rule": "per_head"}})
    for layer_idx, same_as in ((1, config_of(case, dense_layers=(0,))), (0, config_of(case)),
                               (2, config_of(case, budget=96, slack=1.0, group_rule="per_head"))):  # fmt: skip
        got, _ = run(case, config, layer_idx=layer_idx)
        assert all(map(torch.equal, got, run(case, same_as)[0]))


def test_three_dimensions(kernels):
    case = make("group_3")
    config = config_of(case)
    (out, lse), _ = run(case, config)
    state = case.before()
    query, key, value, *rest, slots = state.step
    got = quest.decode(query[:, 0], key[:, 0], value[:, 0], *rest, slots[:, 0], config=config)
    assert got[0].equal(out[:, 0])
    assert got[1].equal(lse[:, 0])
    check_state(state, case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_c19_ragged_batch(isa, dtype):
    """Each row as in a batch of its own, with the same pages; permuted rows give permuted results."""
    lengths = (1, 16, 17, 100, 0)
    case = make("ragged", dtype=dtype)
    config = config_of(case, budget=32)
    (out, lse), state = run(case, config)
    pages = selection(state, config)
    for row in range(len(lengths)):
        part = {name: getattr(case, name)[row : row + 1] for name in
                ("query", "key", "value", "block_table", "seq_lens", "slot_mapping")}  # fmt: skip
        alone = case.replace(**part)
        got, _ = run(alone, config)
        assert torch.allclose(got[0], out[row : row + 1], rtol=0, atol=1e-6)
        assert torch.allclose(got[1], lse[row : row + 1], rtol=0, atol=1e-6)
        mine = alone.replace(**dict(zip(("k_cache", "v_cache", "page_min", "page_max"), state.pools)))
        assert selection(mine, config).equal(pages[row : row + 1])
    assert not out[4].any()
    order = torch.tensor([3, 0, 4, 2, 1])
    part = {name: getattr(case, name)[order] for name in
            ("query", "key", "value", "block_table", "seq_lens", "slot_mapping")}  # fmt: skip
    got, _ = run(case.replace(**part), config)
    assert got[0].equal(out[order])
    assert got[1].equal(lse[order])


@pytest.mark.parametrize("shape", ["ragged", "many_tokens_bf16", "group_7"])
@pytest.mark.parametrize("dense", [False, True])
def test_the_op_takes_heads_first(isa, shape, dense):
    """The same numbers at the same strides as with the tokens first, and the result has them first."""
    case = make(shape)
    results = []
    for heads_first in (False, True):
        state = case.before()
        new = [x.transpose(1, 2) if heads_first else x for x in state.step[:3]]
        settings = op_settings(case.query, case.block_table, config_of(case), 0, 0.3, None, None, None, True)
        settings = (dense, *settings[1:])
        op = torch.ops.quest.decode.default
        results.append(op(*new, *state.step[3:-1], case.slot_mapping.contiguous(), *settings, heads_first=heads_first))
        check_state(state, case)
    assert all(map(same, *results))


def test_a_skipped_row_writes_nothing(kernels):
    """Slot -1: the row attends to what it has, and leaves its summaries alone, whose blocks it may share."""
    case = make("ragged", seq_lens=(37, 37))
    state = case.before()
    slots = case.slot_mapping.clone()
    slots[1] = -1
    lens = torch.tensor([37, 36], dtype=torch.int32)
    given = state.replace(slot_mapping=slots, seq_lens=lens)
    dense = config_of(case, dense_layers=(0,))
    marked = case.block_table[1, 2]
    given.page_min[marked] = given.page_max[marked] = 123.0
    out, lse = quest.decode(*given.step, config=dense)
    assert given.k_cache[marked, :, 4].isnan().all()
    assert (given.page_min[marked] == 123).all()
    assert (given.page_max[marked] == 123).all()
    check_attend((out, lse), given)


@pytest.mark.parametrize("shape", ["many_tokens", "many_tokens_bf16"])
def test_later_tokens_change_nothing_before_them(isa, shape):
    """Causality, bit for bit: other queries, keys and values from token t on leave the results before t alone."""
    case = make(shape)
    for rule in ("softmax", "relative", "per_head"):
        config = config_of(case, group_rule=rule)
        (out, lse), _ = run(case, config)
        for t in range(1, case.shape.q_len):
            later = [x.clone() for x in (case.query, case.key, case.value)]
            for x in later:
                x[:, t:] = torch.randn_like(x[:, t:]) * 100
            got, _ = run(case.replace(**dict(zip(("query", "key", "value"), later))), config)
            assert got[0][:, :t].equal(out[:, :t])
            assert got[1][:, :t].equal(lse[:, :t])


@pytest.mark.parametrize("rule", ["softmax", "relative", "per_head"])
def test_c15_a_key_that_holds_nan(kernels, rule):
    """Its page ranks last: read only where it must be or when everything is."""
    case = make("ragged", seq_lens=(160,))
    case.k_cache[case.block_table[0, 4].long(), :, 3, 7] = NAN
    quest.summarise(case.k_cache, *case.summary, case.seq_lens)
    for pages, nan in ((3, False), (9, False), (10, True)):
        config = config_of(case, budget=16 * pages, group_rule=rule, slack=1.0)
        chosen = selection(case, config)
        assert (chosen == 4).any() == nan
        assert ((chosen >= 0) & (chosen < 10)).sum(-1).eq(pages).all()
        (out, _), _ = run(case, config)
        assert out.isnan().any() == nan


def test_new_tokens_of_a_long_step_are_all_read(isa):
    """A step longer than the budget: every token reads all that is new before it."""
    case = make(Shape("", seq_lens=(200, 90), q_len=90, page_size=8, head_dim=16))
    config = config_of(case, budget=24, group_rule="per_head")
    (out, lse), state = run(case, config)
    pages = selection(state, config)
    for t in (0, 7, 8, 50, 89):
        own = range(110 // 8, (110 + t) // 8 + 1)
        assert all(set(own) <= set(pages[0, t, h].tolist()) for h in range(4))
    check_attend((out, lse), case, pages)
    dense, dense_lse = quest.attend(case.query, *case.cache, page_size=8)  # row 1 is all new
    assert torch.allclose(out[1], dense[1], rtol=1e-5, atol=1e-6)
    assert torch.allclose(lse[1], dense_lse[1], rtol=1e-6)


def test_threads_and_repeats(isa, threads):
    """The same selection and, up to fp32 rounding, the same result on 1, 2 and 4 threads; 20 repeats bit for bit."""
    case = make("group_3", seq_lens=(1500, 900), dtype=BF16, head_dim=16)
    config = config_of(case, budget=1024, group_rule="softmax")
    results = {}
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        results[count], state = run(case, config)
        for _ in range(20 if count == 2 else 2):
            again = quest.decode(*state.step, config=config)  # writes the same rows once more
            assert all(map(torch.equal, again, results[count]))
        check_attend(results[count], case, selection(case, config))


@pytest.mark.parametrize(
    "case",
    [
        dict(seq_lens=(2600,), num_heads=5, num_kv_heads=1),  # one KV head on many threads
        dict(seq_lens=(2600,), num_heads=3, num_kv_heads=3),  # three on two
        dict(seq_lens=(2600, 3, 0, 700), num_heads=9, num_kv_heads=9),  # a ragged batch, two bands of heads
        dict(seq_lens=(900, 300), num_heads=4, num_kv_heads=2, q_len=5),
    ],
    ids=["one_head", "three_heads", "ragged", "several_tokens"],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_work_on_any_number_of_threads(isa, threads, case, dtype):
    """Whatever the shape, however many threads: the same selection, and the reference's result over it."""
    case = make(Shape("", head_dim=32, page_size=4, dtype=dtype, **case))
    config = config_of(case, budget=160)
    chosen = selection(case, config)
    for count in (1, 2, 3, 8):
        torch.set_num_threads(count)
        result, state = run(case, config)
        check_attend(result, case, chosen)
        check_state(state, case)


@pytest.mark.parametrize(
    ("settings", "heads", "length"), [("page_size=16, budget=2048", 8, 32768), ("budget=512", 4, 131072)]
)
def test_memory_of_a_step(threads, settings, heads, length):
    """A step needs its outputs and the scores: below one percent of the cache."""
    code = f"""
import resource, torch, quest
config = quest.QuestConfig({settings})
size, packing = config.block_size, quest.packing_of(config)
heads, length = {heads}, {length}
blocks = length // size
pools = [torch.ones(blocks, heads, size, 128, dtype=torch.bfloat16) for _ in range(2)]
if packing is None:
    pools += [torch.ones(blocks, heads, 1, 128, dtype=torch.bfloat16) for _ in range(2)]
    decode = quest.decode
else:
    pools.append(torch.ones(blocks, heads, packing.num_bytes(128), dtype=torch.uint8))
    decode = quest.decode_packed
table = torch.arange(blocks, dtype=torch.int32)[None]
lens, slots = torch.tensor([length], dtype=torch.int32), torch.tensor([[length - 1]])
query, new = torch.ones(1, 1, 4 * heads, 128).bfloat16(), torch.ones(1, 1, heads, 128).bfloat16()
tail = table[:, :4].clone(), torch.tensor([4 * size], dtype=torch.int32), torch.tensor([[4 * size - 1]])
for _ in range(20):  # what the first calls of a process load is not the step's
    decode(query, new, new, *pools, *tail, config=config.replace(budget=48))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(20):
    decode(query, new, new, *pools, table, lens, slots, config=config)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
cache = sum(x.nbytes for x in pools)
assert (after - before) * 1024 < cache // 100, ((after - before) * 1024, cache)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_steps_from_an_empty_cache(isa):
    """Tokens one by one, pools full of NaN at the start: every step equals dense attention over the tokens so far."""
    torch.manual_seed(0)
    heads, kv_heads, dim, steps = 6, 2, 24, 40
    pools = [torch.full((8, kv_heads, 8, dim), NAN) for _ in range(2)]
    summaries = [torch.full((8, kv_heads, 2, dim), NAN) for _ in range(2)]
    table = torch.randperm(8, dtype=torch.int32)[None]
    query, key, value = (torch.randn(steps, 1, h, dim) for h in (heads, kv_heads, kv_heads))
    config = QuestConfig(page_size=4, block_size=8, budget=1.0)
    for n in range(steps):
        slot = table[0, n // 8].long() * 8 + n % 8
        lens = torch.tensor([n + 1], dtype=torch.int32)
        step = (query[n], key[n], value[n], *pools, *summaries, table, lens, slot[None])
        out, _ = quest.decode(*step, config=config)
        k, v = (x[: n + 1, 0].transpose(0, 1).repeat_interleave(3, 0) for x in (key, value))
        dense = torch.nn.functional.scaled_dot_product_attention(query[n, 0][:, None], k, v)
        assert torch.allclose(out[0], dense[:, 0], rtol=1e-5, atol=1e-5)
    expected = [torch.full_like(x, NAN) for x in summaries]
    reference.summarise(pools[0], *expected, table, lens, lens)
    assert all(map(same, summaries, expected))


def test_backend_names():
    case = make("dim_2")
    with pytest.raises(
        ValueError, match="decode: backend must be auto or one of cuda, triton, cpu, verbs, reference, got 'gpu'"
    ):
        run(case, config_of(case), backend="gpu")
    with pytest.raises(ValueError, match="decode: backend cuda can't run: "):
        run(case, config_of(case), backend="cuda")
