"""The CUDA C++ kernels, thread for thread on the CPU (tests/emulator): every size they are made for, in any order of
threads and blocks. The tests of the verbs run on them too, see tests/gpu_kernels.py.

Pools are laid out as an engine's, with NaN behind every row.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Any

import emulated
import pytest
import torch
from cases import BF16, DTYPES, F16, INF, NAN, Case, Shape, assert_near, check_attend, copy_pools, make, memory, same
from test_attend import pages_of
from test_offsets import BLOCK, BLOCKS, DIM, KV_HEADS, LAST, pools_of, reserve
from torch import Tensor

from quest import reference

GAP = 8  # elements between rows: a copy of 16 bytes, or two


@pytest.fixture(autouse=True)
def forward() -> None:
    emulated.configure("forward")


@pytest.fixture(params=emulated.ORDERS)
def order(request: pytest.FixtureRequest) -> str:
    emulated.configure(request.param, seed=3)
    return request.param


def in_engine(case: Case) -> Case:
    """The case with K and V in one tensor [num_blocks, 2, block_size, num_kv_heads, room for a row]."""
    blocks, heads, block_size, _ = case.k_cache.shape
    width = max(case.k_cache.shape[3], case.v_cache.shape[3]) + GAP
    room = torch.full((blocks, 2, block_size, heads, width), NAN, dtype=case.k_cache.dtype)
    pools = []
    for pool, part in zip((case.k_cache, case.v_cache), room.unbind(1)):
        pools.append(part.transpose(1, 2)[..., : pool.shape[3]].copy_(pool))
    return case.replace(k_cache=pools[0], v_cache=pools[1])


def case_of(**shape: Any) -> Case:
    return in_engine(make(Shape("", layout="plain", **shape)))


def attend(case: Case, page_idx: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    sinks = options.get("sinks")
    return torch.ops.quest_cuda.attend(
        case.query,
        *case.cache,
        page_idx,
        case.page_size,
        options.get("softmax_scale") or case.query.shape[-1] ** -0.5,
        options.get("softcap") or 0.0,
        None if sinks is None else sinks.float(),
        options.get("window") or -1,
        False,
    )


def check(case: Case, **options: Any) -> None:
    """All pages, pages chosen by KV head, pages chosen by query head."""
    heads = case.shape
    for page_idx in (None, pages_of(case, heads.num_kv_heads), pages_of(case, heads.num_heads, seed=1)):
        check_attend(attend(case, page_idx, **options), case, page_idx, **options)


# ---- attend ----


@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 16, 24, 32, 64])
def test_page_sizes(order, page_size):
    for block_size in (page_size, 4 * page_size):
        check(case_of(page_size=page_size, block_size=block_size, seq_lens=(83, 1, 0), dtype=BF16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (40, 200), (256, 256)], ids=str)
def test_head_dims(dims, dtype):
    check(case_of(head_dim=dims[0], v_head_dim=dims[1], seq_lens=(70, 33), dtype=dtype))


@pytest.mark.parametrize("group", [1, 3, 7, 8, 16, 17, 40])
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_groups(group, dtype):
    check(case_of(num_heads=2 * group, num_kv_heads=2, seq_lens=(37,), dtype=dtype))


@pytest.mark.parametrize("q_len", [2, 3, 8])
def test_many_tokens(order, q_len):
    check(case_of(q_len=q_len, seq_lens=(29, q_len, 1), page_size=4, block_size=8, dtype=F16), window=9)


OPTIONS: list[dict[str, Any]] = [
    {"softmax_scale": 1.0},
    {"softcap": 3.0},
    {"window": 20},
    {"window": 1},
    {"sinks": torch.tensor([0.5, -2.0, 3.0, -INF])},
    {"softmax_scale": 0.5, "softcap": 2.0, "sinks": torch.tensor([0.0, 9.0, -9.0, 1.0]), "window": 18},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_options(options, dtype):
    case = case_of(seq_lens=(1, 16, 17, 60, 0), dtype=dtype)
    check(case, **options | {k: v.to(dtype) for k, v in options.items() if k == "sinks"})


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 270, "softcap": 4.0, "sinks": torch.tensor([1.0, -2.0])}], ids=str)
def test_splits(order, dtype, options):
    """Rows so long and so few that their pages are split: the last block of a row adds up what all have found."""
    case = case_of(seq_lens=(700, 90), num_heads=2, num_kv_heads=1, dtype=dtype, head_dim=32)
    check(case, **options | {k: v.to(dtype) for k, v in options.items() if k == "sinks"})


def test_splits_of_tiles_and_tokens():
    check(case_of(seq_lens=(500,), num_heads=18, num_kv_heads=1, q_len=2, dtype=F16, head_dim=32))


def test_split_of_keys_without_weight():
    """Of one split all logits are -inf, then of all."""
    case = case_of(seq_lens=(600,), num_heads=1, num_kv_heads=1, head_dim=32, page_size=16)
    case.query[..., 0] = 1.0
    for blocks in (case.block_table[0, :20], case.block_table[0, :38]):
        case.k_cache[blocks.long(), :, :, 0] = -INF
        check_attend(attend(case), case)


def test_orders_agree_bit_for_bit():
    for shape in (dict(dtype=BF16), dict(dtype=torch.float32), dict(dtype=F16, head_dim=192)):
        case = case_of(seq_lens=(300, 45), num_heads=6, num_kv_heads=2, **shape)
        results = []
        for order, seed in (("forward", 1), ("reverse", 1), ("shuffled", 1), ("shuffled", 2), ("shuffled", 3)):
            emulated.configure(order, seed)
            results.append(attend(case))
        assert all(out.equal(results[0][0]) and lse.equal(results[0][1]) for out, lse in results)


@pytest.mark.parametrize("poison", [0.0, INF, 1e4])
def test_what_must_not_be_read_does_not_change_a_bit(poison):
    results = []
    for value in (NAN, poison):
        case = make(
            Shape("", layout="plain", seq_lens=(45, 3, 130), dtype=BF16, page_size=4, block_size=16), poison=value
        )
        results.append([attend(case, page_idx, window=50) for page_idx in (None, pages_of(case, 2))])
    for got, expected in zip(*results):
        assert all(map(torch.equal, got, expected))
        assert all(x.isfinite().all() for x in got[:1])


def test_blocks_and_pages_that_do_not_exist():
    """Read as if they had not been named, whatever their number."""
    case = case_of(seq_lens=(100, 60), page_size=16, dtype=BF16)
    pages = pages_of(case, 2)
    missing = case.block_table.clone()
    for block in (-1, -(2**31), case.k_cache.shape[0], 2**31 - 1):
        missing[0, 2] = missing[1, 1] = block
        without = torch.where(torch.tensor([2, 1]).view(2, 1, 1, 1) == pages, 99, pages)
        got = attend(case.replace(block_table=missing), pages)
        check_attend(got, case, without)
    hostile = torch.tensor([5, -7, 2**31 - 1, 9, 1, -(2**31), 2**28, 0], dtype=torch.int32).expand(2, 1, 2, 8)
    check_attend(attend(case, hostile), case, torch.tensor([0, 1, 5], dtype=torch.int32).expand(2, 1, 2, 3))
    long = torch.full_like(case.seq_lens, 2**31 - 1)  # beyond the table: as long as that
    capacity = torch.full_like(case.seq_lens, case.block_table.shape[1] * 16)
    table = torch.where(case.block_table < 0, case.block_table[:1, :1], case.block_table)
    full = in_engine(make(Shape("", layout="plain", seq_lens=(100, 60), dtype=BF16), poison=0.0)).replace(
        block_table=table
    )
    got, expected = (attend(full.replace(seq_lens=lens)) for lens in (long, capacity))
    assert all(map(torch.equal, got, expected))


def test_nan_reaches_the_heads_that_read_it_and_no_others():
    case = case_of(num_heads=6, seq_lens=(45,), dtype=BF16)
    block = case.block_table[0, 1]
    case.v_cache[block, 0, 3, 0] = NAN
    case.k_cache[block, 1, 2, 1] = NAN
    out, lse = (x[0, 0] for x in attend(case))
    assert out[:3].isnan().nonzero().tolist() == [[0, 0], [1, 0], [2, 0]]
    assert out[3:].isnan().all()
    assert lse.isnan().tolist() == [False] * 3 + [True] * 3
    chosen = torch.tensor([0, 2], dtype=torch.int32).expand(1, 1, 2, 2)
    assert all(x.isfinite().all() for x in attend(case, chosen))


def test_empty_rows():
    case = case_of(seq_lens=(0, 5, 0), q_len=2)
    for options in ({}, {"sinks": torch.ones(4)}):
        out, lse = attend(case, **options)
        assert not out[::2].any()
        assert (lse[::2] == -INF).all()
    out, lse = attend(case, torch.full((3, 2, 2, 0), -1, dtype=torch.int32))
    assert not out.any()
    assert (lse == -INF).all()
    assert attend(case_of(seq_lens=()))[0].shape == (0, 1, 4, 64)


def test_a_query_of_another_dtype():
    for query_dtype in (BF16, F16):
        check(case_of(query_dtype=query_dtype, seq_lens=(37, 5)))


def test_what_attend_refuses():
    case = case_of(seq_lens=(37, 5), dtype=BF16)
    assert torch.ops.quest_cuda.reason(case.query, case.k_cache, case.v_cache) == ""
    odd = make("ragged_bf16", layout="padded")
    for other, why in (
        (case_of(head_dim=264), "head_dim is above 256"),
        (case.replace(query=case.query.float()), "a 16-bit cache needs a query of its dtype"),
        (odd, "k_cache: rows must be multiples of 16 bytes"),
        (case.replace(v_cache=make("ragged_bf16", head_dim=60, seq_lens=(37, 5)).v_cache), "v_cache: rows must"),
    ):
        assert torch.ops.quest_cuda.reason(other.query, other.k_cache, other.v_cache).startswith(why)
        with pytest.raises(ValueError, match=f"attend: the CUDA kernel can't run: {why}"):
            attend(other)


# ---- append, summarise, merge ----


@pytest.mark.parametrize("shape", ["many_tokens", "many_tokens_bf16", "page_1", "page_24", "dim_7", "mla", "group_3"])
def test_append_and_summarise(order, shape):
    """Apart and in one launch, the memory between rows untouched."""
    case = make(shape)
    ops, new = torch.ops.quest_cuda, torch.full_like(case.seq_lens, case.shape.q_len)
    expected, apart, together = (case.before() for _ in range(3))
    reference.append(case.key, case.value, expected.k_cache, expected.v_cache, case.slot_mapping)
    tables = (case.block_table, case.seq_lens)
    reference.summarise(expected.k_cache, expected.page_min, expected.page_max, *tables, new)
    ops.append(case.key, case.value, apart.k_cache, apart.v_cache, case.slot_mapping)
    ops.summarise(apart.k_cache, apart.page_min, apart.page_max, *tables, new)
    ops.append_summarise(case.key, case.value, *together.pools, *tables, case.slot_mapping)
    for got in (apart, together):
        assert all(map(same, got.pools, expected.pools))
        assert memory(*got.pools) == memory(*expected.pools)


def test_append_of_64_tokens():
    case = make("many_tokens_bf16", q_len=64, seq_lens=(64, 130, 70))
    got = case.before()
    tables = (case.block_table, case.seq_lens, case.slot_mapping)
    torch.ops.quest_cuda.append_summarise(case.key, case.value, *got.pools, *tables)
    assert all(map(same, got.pools, case.pools))


def test_a_row_that_stores_nothing_keeps_its_summaries():
    case = make("page_8", seq_lens=(37, 100), num_heads=2)
    slots = case.slot_mapping.clone()
    slots[0] = -1
    got = case.before(poison=5.0)
    expected = got.copy()
    tables = (case.block_table, case.seq_lens)
    torch.ops.quest_cuda.append_summarise(case.key, case.value, *got.pools, *tables, slots)
    reference.append(case.key, case.value, expected.k_cache, expected.v_cache, slots)
    new = torch.tensor([0, 1], dtype=torch.int32)
    reference.summarise(expected.k_cache, expected.page_min, expected.page_max, *tables, new)
    assert memory(*got.pools) == memory(*expected.pools)


def test_slots_and_blocks_that_do_not_exist():
    case = make("page_8", seq_lens=(37, 100), num_heads=2)
    blocks, _, block_size, _ = case.k_cache.shape
    pools = copy_pools(case.pools)
    before = memory(*pools)
    slots = torch.tensor([[-(2**63)], [blocks * block_size]])
    torch.ops.quest_cuda.append(case.key, case.value, *pools[:2], slots, False)
    assert memory(*pools) == before
    table = torch.tensor([-5, blocks, 2**31 - 1], dtype=torch.int32).repeat(2, 4)
    lens = torch.tensor([2**31 - 1, -4], dtype=torch.int32)
    torch.ops.quest_cuda.summarise(pools[0], *pools[2:], table, lens, lens, False)
    torch.ops.quest_cuda.append_summarise(case.key, case.value, *pools, table, lens, slots)
    assert memory(*pools) == before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_summaries_of_special_values(dtype):
    """NaN stays in its channel; infinities, zeros of both signs and subnormals are numbers as all others."""
    tiny = torch.finfo(dtype).smallest_normal / 4
    keys = torch.randn(1, 2, 16, 37).to(dtype)
    keys[0, :, 3, 0], keys[0, :, 5, 1], keys[0, :, 6, 1] = NAN, INF, -INF
    keys[0, :, :, 3], keys[0, :, 9, 3] = tiny, -tiny
    page_min, page_max = torch.zeros(2, 1, 2, 4, 37, dtype=dtype)
    lens = torch.tensor([15], dtype=torch.int32)
    torch.ops.quest_cuda.summarise(keys, page_min, page_max, torch.zeros(1, 1, dtype=torch.int32), lens, lens)
    pages = keys[:, :, :15].split(4, dim=2)
    assert same(page_min, torch.stack([p.amin(2) for p in pages], 2))
    assert same(page_max, torch.stack([p.amax(2) for p in pages], 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge(order, dtype):
    rng = torch.Generator().manual_seed(0)
    values = torch.tensor([-INF, -1e30, -5.0, 0.0, 5.0, 1e30, INF, NAN])
    lse_a, lse_b = (x.flatten() for x in torch.meshgrid(values, values, indexing="ij"))
    out_a, out_b = (torch.randn(64, 37, generator=rng).to(dtype) for _ in range(2))
    out_a[0] = NAN  # no part of it
    got = torch.ops.quest_cuda.merge(out_a, lse_a, out_b, lse_b)
    expected = reference.merge(out_a, lse_a, out_b, lse_b)
    assert got[0].dtype == dtype
    assert same(got[0].isnan(), expected[0].isnan())
    known = ~expected[0].isnan().any(1)
    truth = reference.merge(out_a.double(), lse_a.double(), out_b.double(), lse_b.double())[0]
    assert_near(got[0][known], truth[known], expected[0][known], "out", dtype)
    assert torch.allclose(got[1], expected[1], equal_nan=True)


def test_addresses_beyond_32_bits():
    """The same step in block 0 of a small pool and in block 65536 of one with more than 2**31 elements."""
    size = BLOCKS * (2 * BLOCK + 2) * KV_HEADS * DIM
    large, small = pools_of(reserve(size, BF16), BLOCKS), pools_of(torch.zeros(size // BLOCKS).bfloat16(), 1)
    for pool in large:
        pool[0], pool[LAST] = 0, 0
    rng = torch.Generator().manual_seed(0)
    key, value = (torch.randn(1, 13, KV_HEADS, DIM, generator=rng).bfloat16() for _ in range(2))
    query = torch.randn(1, 1, 16, DIM, generator=rng).bfloat16()
    lens, slots, ops = torch.tensor([13], dtype=torch.int32), torch.arange(13), torch.ops.quest_cuda
    results = []
    for pools, block in ((small, 0), (large, LAST)):
        table = torch.tensor([[block]], dtype=torch.int32)
        ops.append(key[:, :5], value[:, :5], *pools[:2], slots[:5] + block * BLOCK)
        ops.append_summarise(key[:, 5:], value[:, 5:], *pools, table, lens, slots[5:] + block * BLOCK)
        out = ops.attend(query, *pools[:2], table, lens, None, BLOCK, DIM**-0.5)
        results.append([*out, *(pool[block].clone() for pool in pools)])
    assert all(map(torch.equal, *results))
    assert results[0][0].any()
    assert not large[0][0].any()  # where 32 bits would have wrapped to


# ---- rounding ----


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_every_16_bit_value(dtype):
    """All bit patterns pass through merge unchanged, and fp32 values round to nearest, ties to even."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(256, 256)
    none, all_of_it = torch.full((256,), -INF), torch.zeros(256)
    assert same(torch.ops.quest_cuda.merge(values, all_of_it, values, none)[0], values)
    low = torch.arange(2**15 - 1, dtype=torch.int32).to(torch.int16).view(dtype)
    low = low[low.isfinite()]
    low, high = low[: len(low) // 128 * 128].view(-1, 128), torch.roll(low, -1)[: len(low) // 128 * 128].view(-1, 128)
    half = torch.zeros(len(low))
    middle = (low.float() * 0.5 + high.float() * 0.5).to(dtype)
    assert same(torch.ops.quest_cuda.merge(low, half, high, half)[0], middle)


# ---- the emulator and the build ----

FAULTS = {
    "missing_barrier": "wrong result",
    "divergent_barrier": "divergent __syncthreads: tests/emulator/faults.cpp",
    "barrier_not_reached": "deadlock in block 0: thread",
    "different_warp_functions": "lanes in",
    "copy_not_waited_for": "never waited for",
    "copy_read_too_early": "wrong result",
    "misaligned_copy": "cp.async: address not aligned",
    "beyond_shared_memory": "shared memory was written beyond its end",
    "too_much_shared_memory": "launch refused: too much shared memory",
    "order_of_blocks": "wrong result",
    "said_too_early": "wrong result",
}
FAULTLESS = ("barrier", "copy_read_after_waiting", "said_in_time")


@pytest.fixture(scope="module")
def faults() -> str:
    build = emulated.Build("emulated-faults")
    program = build.link("faults", [build.compile("tests/emulator/faults.cpp", emulated.KERNEL)])
    build.run()
    return str(program)


@pytest.mark.parametrize("name", [*FAULTS, *FAULTLESS])
def test_emulator_finds(faults, name):
    """In one order or another; and nothing where nothing is wrong."""
    said = [subprocess.run([faults, name, str(seed)], capture_output=True, text=True).stdout for seed in range(1, 21)]
    if name in FAULTS:
        assert any(FAULTS[name] in x for x in said), said
    else:
        assert set(said) == {"nothing found\n"}


def test_address_sanitizer():
    """The kernels read and write nothing beyond any tensor, scratch or shared memory, and do nothing undefined."""
    flags = ["-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=all", "-g1"]
    build = emulated.Build("emulated-asan")
    objects = [build.compile("tests/native/cuda_kernels.cpp", [*emulated.KERNEL, *flags]), *build.kernels(*flags)]
    program = build.link("cuda_kernels", objects, *flags)
    build.run()
    for seed in map(str, range(1, 11)):
        env = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}
        done = subprocess.run([program, seed], capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stdout + done.stderr


def test_import_starts_no_cuda():
    if not importlib.util.find_spec("quest._C_cuda"):
        pytest.skip("built without CUDA")
    code = "import torch, quest._C_cuda; print(torch.ops.quest_cuda.archs(), torch.cuda.is_initialized())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split()[1:] == ["False"], done.stderr
