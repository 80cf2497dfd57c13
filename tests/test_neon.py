"""The NEON kernels, cross-compiled and run in an emulator: held to the reference like those of any instruction set.

tests/native/kernels.cpp runs one case. It gives every array memory of its own, behind which lies a page that may not be
touched: a kernel that reads beyond an array ends the driver.
"""

from __future__ import annotations

import ast
import fcntl
import os
import platform
import shutil
import subprocess
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import (
    BF16,
    DTYPES,
    F16,
    INF,
    NAN,
    SHAPES,
    Case,
    Shape,
    assert_near,
    check_attend,
    check_score,
    make,
    memory,
    same,
)
from test_attend import pages_of
from test_packed import case_of, packed_of
from test_select import random_scores
from torch import Tensor

from quest import Packing, reference, reference_packed
from quest.config import GROUP_RULES, forced_pages, max_selected
from quest.ops import split_budget

ROOT = Path(__file__).resolve().parents[1]
COMPILER = "aarch64-linux-gnu-g++"
EMULATORS = ("qemu-aarch64", "qemu-aarch64-static")
RULES = ("softmax", "relative", "per_head")  # as in params.h


# ---- the driver ----


def span(x: Tensor) -> np.ndarray:
    """The bytes of a tensor from its first element to its last, those between rows included; not a copy."""
    count = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride())) if x.numel() else 0
    begin = x.storage_offset() * x.element_size()
    storage = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
    return storage.numpy()[begin : begin + count * x.element_size()]


def pack(name: str, x: Tensor | float | int) -> bytes:
    """An array as the driver reads it."""
    if not isinstance(x, Tensor):
        x = torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else torch.int64)
    data = span(x).tobytes()
    kind = str(x.dtype).removeprefix("torch.")
    return " ".join(map(str, (name, kind, x.dim(), *x.shape, *x.stride(), len(data)))).encode() + b"\n" + data


def unpack(data: bytes) -> dict[str, Tensor]:
    """The arrays that the driver wrote."""
    arrays, at = {}, 0
    while at < len(data):
        start = data.index(b"\n", at) + 1
        name, kind, dims, *numbers = data[at:start].decode().split()
        *layout, size = map(int, numbers)
        at = start + size
        flat = torch.tensor(np.frombuffer(data[start:at], np.uint8)).view(getattr(torch, kind))
        arrays[name] = flat.as_strided(layout[: int(dims)], layout[int(dims) :])
    return arrays


class Emulated:
    """The verbs as `quest` has them, each call one run of the driver."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.command, self.folder = command, folder

    def run(self, verb: str, **arrays: Any) -> dict[str, Tensor]:
        case, result = self.folder / "case", self.folder / "result"
        case.write_bytes(b"".join(pack(name, x) for name, x in arrays.items() if x is not None))
        done = subprocess.run([*self.command, case, result, verb], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{verb}: the driver ended with {done.returncode}: {done.stderr}"
        return unpack(result.read_bytes())

    def run_in_place(self, verb: str, written: dict[str, Tensor], **arrays: Any) -> None:
        before = {name: span(x).copy() for name, x in written.items()}
        for name, x in self.run(verb, **written, **arrays).items():
            changed = span(x) != before[name]  # only these: pools may share their memory
            span(written[name])[changed] = span(x)[changed]

    def append(self, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        pools = {"k_cache": k_cache, "v_cache": v_cache}
        self.run_in_place("append", pools, key=key, value=value, slot_mapping=slot_mapping)

    def summarise(
        self, k_cache: Tensor, page_min: Tensor, page_max: Tensor, table: Tensor, seq_lens: Tensor, num_new: Tensor
    ) -> None:
        arrays = {"block_table": table, "seq_lens": seq_lens, "num_new": num_new}
        sizes = {"page_size": k_cache.shape[2] // page_min.shape[2], "window": -1}
        pools = {"page_min": page_min, "page_max": page_max}
        self.run_in_place("summarise", pools, k_cache=k_cache, **arrays, **sizes)

    def score(
        self,
        query: Tensor,
        page_min: Tensor,
        page_max: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        *,
        page_size: int,
        softmax_scale: float | None = None,
        slack: float = 1.0,
        group_rule: str = "softmax",
        window: int | None = None,
        pages_per_task: int = 48,
    ) -> Tensor:
        pools = {"page_min": page_min, "page_max": page_max, "block_table": block_table, "seq_lens": seq_lens}
        return self.run(
            "score",
            query=query,
            **pools,
            page_size=page_size,
            softmax_scale=softmax_scale or query.shape[-1] ** -0.5,
            slack=float(slack),
            group_rule=RULES.index(group_rule),
            window=window or -1,
            pages_per_task=pages_per_task,
        )["scores"]

    def pack(self, packed: Tensor, packing: Packing, sink_pages: int, **rows: Tensor) -> None:
        sizes = {"page_size": packing.page_size, "coarse_size": packing.coarse_size or 0, "bits": packing.bits}
        self.run_in_place("pack", {"packed": packed}, sink_pages=sink_pages, window=-1, **rows, **sizes)

    def score_packed(self, packing: Packing, *, group_rule: str, window: int | None, **arrays: Any) -> Tensor:
        sizes = {"page_size": packing.page_size, "coarse_size": packing.coarse_size or 0, "bits": packing.bits}
        rule = RULES.index(group_rule)
        return self.run("score_packed", group_rule=rule, window=window or -1, **arrays, **sizes)["scores"]

    def select(
        self,
        scores: Tensor,
        seq_lens: Tensor,
        *,
        page_size: int,
        budget: int | float,
        sink_tokens: int = 0,
        recent_tokens: int = 1,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        sink, recent = forced_pages(sink_tokens, recent_tokens, page_size)
        tokens, fraction = split_budget(budget)
        result = self.run(
            "select",
            scores=scores.contiguous(),
            seq_lens=seq_lens,
            page_size=page_size,
            budget=tokens,
            budget_fraction=fraction,
            sink_pages=sink,
            recent_pages=recent,
            window=window or -1,
            max_selected=max_selected(scores.shape[-1], scores.shape[1], page_size, budget, sink, recent, window),
        )
        return result["page_idx"], result["counts"]

    def attend(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        page_idx: Tensor | None = None,
        *,
        page_size: int,
        softmax_scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        window: int | None = None,
        num_splits: int = 1,
    ) -> tuple[Tensor, Tensor]:
        cache = {"k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "seq_lens": seq_lens}
        result = self.run(
            "attend",
            query=query,
            **cache,
            page_idx=page_idx,
            page_size=page_size,
            softmax_scale=softmax_scale or query.shape[-1] ** -0.5,
            softcap=softcap or 0.0,
            sinks=None if sinks is None else sinks.float(),
            window=window or -1,
            num_splits=num_splits,
        )
        return result["out"], result["lse"]

    def merge(self, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
        result = self.run("merge", out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
        return result["out"], result["lse"]


def flags() -> list[str]:
    """What setup.py compiles kernels with."""
    lists = {}
    for line in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) in ("COMMON", "KERNEL"):
            lists[ast.unparse(line.targets[0])] = ast.literal_eval(line.value)
    return [*lists["COMMON"], *lists["KERNEL"], "-DQUEST_ISA=neon", "-DQUEST_HAVE_NEON"]


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that runs the driver, which is built once, for all processes of pytest-xdist too."""
    if platform.machine() in ("aarch64", "arm64"):
        pytest.skip("this machine has NEON: the tests of the verbs run these kernels without an emulator")
    if not shutil.which(COMPILER):
        pytest.skip(f"{COMPILER} is missing: install a cross compiler for aarch64 (Debian: g++-aarch64-linux-gnu)")
    emulator = next(filter(None, map(shutil.which, EMULATORS)), None)
    if not emulator:
        pytest.skip(f"{' or '.join(EMULATORS)} is missing: install an emulator for aarch64 (Debian: qemu-user)")
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    target = folder / "neon-kernels"
    with (folder / "neon-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            sources = [ROOT / "tests/native/kernels.cpp", *sorted((ROOT / "csrc/cpu").glob("*.cpp"))]
            built = subprocess.run(
                [COMPILER, *flags(), "-static", *sources, "-o", target], cwd=ROOT, capture_output=True, text=True
            )
            assert built.returncode == 0, built.stderr
    return [emulator, str(target)]


@pytest.fixture
def neon(driver: list[str], tmp_path: Path) -> Emulated:
    return Emulated(driver, tmp_path)


# ---- cases ----


def grid() -> list[Shape]:
    """Group sizes, odd widths and types, each with another page size and memory layout."""
    pages, layouts = cycle([1, 5, 16, 3, 8, 2, 7, 12]), cycle(["padded", "token_major", "interleaved", "plain"])
    lengths = cycle([(37, 0, 5), (130,), (61, 1, 16), (75, 33)])
    shapes = []
    for group in (1, 3, 4, 7, 8):
        for head_dim, dtype in ((33, torch.float32), (80, BF16), (33, F16), (80, torch.float32), (33, BF16), (80, F16)):
            page_size = next(pages)
            shapes.append(
                Shape(
                    f"group_{group}_dim_{head_dim}_page_{page_size}_{str(dtype).removeprefix('torch.')}",
                    seq_lens=next(lengths),
                    num_heads=2 * group,
                    head_dim=head_dim,
                    page_size=page_size,
                    block_size=page_size * (1 + len(shapes) % 3),
                    dtype=dtype,
                    layout=next(layouts),
                )
            )
    return shapes


def attend(neon: Emulated, case: Case, page_idx: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    return neon.attend(case.query, *case.cache, page_idx, page_size=case.page_size, **options)


@pytest.mark.parametrize("shape", [*SHAPES, *grid()], ids=str)
def test_step(neon: Emulated, shape: Shape) -> None:
    """All of a step: rows and summaries to the bit, scores and attention to rounding, pages exactly."""
    case = make(shape)
    got, expected = case.before(), case.before()
    neon.append(case.key, case.value, got.k_cache, got.v_cache, case.slot_mapping)
    reference.append(case.key, case.value, expected.k_cache, expected.v_cache, case.slot_mapping)
    num_new = (case.slot_mapping >= 0).any(1).int() * shape.q_len
    neon.summarise(got.k_cache, got.page_min, got.page_max, case.block_table, case.seq_lens, num_new)
    reference.summarise(
        expected.k_cache, expected.page_min, expected.page_max, case.block_table, case.seq_lens, num_new
    )
    assert memory(*got.pools) == memory(*expected.pools)  # the memory between rows too

    for rule, slack, pages_per_task in (("relative", 0.4, 5), ("per_head", 0.0, 48), ("softmax", 1.0, 3)):
        options = {"group_rule": rule, "slack": slack}
        scores = neon.score(
            case.query, *case.summary, page_size=case.page_size, pages_per_task=pages_per_task, **options
        )
        check_score(scores, case, **options)
    options = {"page_size": case.page_size, "budget": 3 * case.page_size, "sink_tokens": 1}
    page_idx, counts = neon.select(scores, case.seq_lens, **options)
    assert all(map(torch.equal, (page_idx, counts), reference.select(scores, case.seq_lens, **options)))

    for chosen, num_splits in ((None, 1), (page_idx, 3), (pages_of(case, shape.num_kv_heads), 2)):
        check_attend(attend(neon, case, chosen, num_splits=num_splits), case, chosen)


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 3.0},
        {"window": 20},
        {"sinks": True},
        {"softmax_scale": 0.5, "softcap": 2.0, "sinks": True, "window": 18},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", ["ragged", "group_7", "group_6", "many_tokens"])
def test_attend_options(neon: Emulated, shape: str, options: dict[str, Any], num_splits: int) -> None:
    case = make(shape)
    if "sinks" in options:
        sinks = torch.randn(case.shape.num_heads, generator=torch.Generator().manual_seed(1))
        options = options | {"sinks": sinks.to(case.query.dtype)}
    for page_idx in (None, pages_of(case, case.shape.num_heads)):
        check_attend(attend(neon, case, page_idx, num_splits=num_splits, **options), case, page_idx, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unwritten_slots_do_not_change_a_bit(neon: Emulated, dtype: torch.dtype) -> None:
    for shape in ("ragged", "many_tokens", "page_24"):
        results = [attend(neon, make(shape, poison=poison, dtype=dtype)) for poison in (0.0, NAN, INF)]
        for result in results:
            assert all(map(torch.equal, result, results[0]))
            assert result[0].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_rows(neon: Emulated, dtype: torch.dtype) -> None:
    """Splits with a window that starts inside of one; logits of both signs, large ones too."""
    case = make("group_7", seq_lens=(700, 2), dtype=dtype)
    for options in ({"window": 500}, {"softmax_scale": 3.0}):
        for num_splits in (1, 7):
            check_attend(attend(neon, case, num_splits=num_splits, **options), case, **options)


def test_nan_and_infinity_where_they_are_read(neon: Emulated) -> None:
    """They reach the heads that read them and no others. A key with logit -inf weighs nothing."""
    case = make("group_3", num_kv_heads=2, num_heads=6, seq_lens=(45,))
    block = case.block_table[0, 1]
    case.v_cache[block, 0, 3, 0] = INF
    case.k_cache[block, 1, 2, 1] = NAN
    out, lse = (x[0, 0] for x in attend(neon, case))
    assert out[:3].isfinite().logical_not().nonzero()[:, 1].tolist() == [0, 0, 0]
    assert out[3:].isnan().all()
    assert lse.isnan().tolist() == [False] * 3 + [True] * 3

    for num_splits in (1, 2):
        case = make("ragged", seq_lens=(37,), num_heads=2)
        case.query[..., 0] = 1.0
        case.k_cache[case.block_table[0, 0], :, 15, 0] = -INF
        check_attend(attend(neon, case, num_splits=num_splits), case)
        case.k_cache[..., 0] = -INF
        out, lse = attend(neon, case, num_splits=num_splits)
        assert not out.any()
        assert (lse == -INF).all()


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_conversions(neon: Emulated, dtype: torch.dtype) -> None:
    """All 65536 values of 16 bits pass unchanged; between any two of them, rounding is to nearest, ties to even."""

    def read_back(values: Tensor, query_dtype: torch.dtype) -> Tensor:
        rows, dim = values.shape
        table, lens = torch.arange(rows, dtype=torch.int32)[:, None], torch.ones(rows, dtype=torch.int32)
        k_cache = torch.zeros(rows, 1, 1, 8, dtype=values.dtype)
        query = torch.zeros(rows, 1, 1, 8, dtype=query_dtype)
        return neon.attend(query, k_cache, values[:, None, None], table, lens, page_size=1)[0].view(rows, dim)

    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(64, 1024)
    assert same(read_back(values, dtype), values)
    assert same(read_back(values, torch.float32), values.float())
    low = values.flatten()[2**15 :]
    low = low[low.isfinite()].double()
    high = torch.cat([low[1:], low[-1:] * 2 - low[-2:-1]])
    middle = ((low + high) / 2).float()
    near = torch.cat([middle, *(torch.nextafter(middle, torch.tensor(x)) for x in (0.0, INF))])
    near = torch.nn.functional.pad(torch.cat([near, -near]), (0, -2 * len(near) % 512)).view(-1, 512)
    assert same(read_back(near, dtype), near.to(dtype))


@pytest.mark.parametrize("rule", GROUP_RULES)
def test_score_windows_and_special_values(neon: Emulated, rule: str) -> None:
    for window in (1, 17, 33):
        options = {"window": window, "group_rule": rule, "softmax_scale": 0.3}
        for shape in ("ragged", "many_tokens"):
            case = make(shape)
            check_score(neon.score(case.query, *case.summary, page_size=16, **options), case, **options)
    case = make(Shape("", seq_lens=(16 * 12,), num_heads=6, num_kv_heads=2, head_dim=24))
    pages = case.block_table[0].long()
    case.page_max[pages[2], 0, 0, 5] = NAN
    case.page_min[pages[3], 1, 0, 7] = NAN
    case.page_max[pages[5], :, 0, 1], case.page_min[pages[5], :, 0, 1] = INF, INF
    case.page_max[pages[7], :, 0, 2], case.page_min[pages[7], :, 0, 2] = -INF, -INF
    got, expected = (v.score(case.query, *case.summary, page_size=16, group_rule=rule) for v in (neon, reference))
    assert torch.allclose(got, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert got.isnan().any()


@pytest.mark.parametrize(
    ("packing", "options"),
    [
        (Packing(1, 64, 16, 2), dict(num_heads=7, num_kv_heads=1, head_dim=64, dtype=BF16)),
        (Packing(1, 128, 32, 4), dict(num_heads=6, num_kv_heads=2, head_dim=33, dtype=F16, q_len=2)),
        (Packing(1, 48, None, 8), dict(num_heads=3, num_kv_heads=3, head_dim=80, dtype=torch.float32)),
        (Packing(2, 128, 16, 8), dict(num_heads=8, num_kv_heads=1, head_dim=40, dtype=BF16)),
        (Packing(4, 64, 16, 4), dict(num_heads=4, num_kv_heads=2, head_dim=7, dtype=torch.float32, q_len=3)),
        (Packing(4, 16, None, 2), dict(num_heads=5, num_kv_heads=1, head_dim=128, dtype=F16)),
    ],
    ids=str,
)
def test_packed(neon: Emulated, packing: Packing, options: dict[str, Any]) -> None:
    """Codes to the bit, those of a sink too, and scores of both levels and of the open block to rounding."""
    case = case_of(packing, **options)
    rows = {"k_cache": case.k_cache, "block_table": case.block_table, "seq_lens": case.seq_lens}
    sink = 5 * packing.page_size
    expected, got = packed_of(case, packing, sink), packed_of(case.replace(seq_lens=case.seq_lens * 0), packing)
    neon.pack(got, packing, 5, num_new=case.seq_lens, **rows)
    assert memory(got) == memory(expected)

    forced = dict(budget=sink + 64, coarse_keep=0.1, coarse_limit=1 << 20, slack=0.4, coarse_slack=0.2)
    for rule, window in (("per_head", None), ("relative", 200), ("softmax", None)):
        like: dict[str, Any] = dict(group_rule=rule, window=window, softmax_scale=0.2, **forced)
        places = case.query, case.k_cache, expected, case.block_table, case.seq_lens
        pages = dict(packing=packing, sink_tokens=sink, recent_tokens=packing.page_size)
        wanted = reference_packed.score_packed(*places, **pages, **like)
        if rule == "per_head":
            size = wanted[wanted.isfinite()].abs().max().item()
        scores = neon.score_packed(
            packing, query=case.query, packed=expected, sink_pages=5, recent_pages=1, **rows, **like
        )
        assert_near(scores, wanted.double(), wanted, rule, size=128 * size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values_in_keys(neon: Emulated, dtype: torch.dtype) -> None:
    """NaN stays in its channel; infinities, zeros of both signs and subnormals are numbers like others."""
    keys = torch.randn(1, 2, 16, 37, generator=torch.Generator().manual_seed(0)).to(dtype)
    tiny = torch.finfo(dtype).smallest_normal / 4
    keys[0, :, 3, 0] = NAN
    keys[0, :, 5, 1], keys[0, :, 6, 1] = INF, -INF
    keys[0, :, ::2, 2], keys[0, :, 1::2, 2] = 0.0, -0.0
    keys[0, :, :, 36], keys[0, :, 9, 36] = tiny, -tiny
    lens, table = torch.tensor([15], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    got, expected = (torch.zeros(2, 1, 2, 4, 37, dtype=dtype) for _ in range(2))
    neon.summarise(keys, *got, table, lens, lens)
    reference.summarise(keys, *expected, table, lens, lens)
    assert same(got, expected)


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize(
    ("lengths", "page_size", "options"),
    [
        ((128, 127, 113, 1, 0), 16, {"budget": 64, "sink_tokens": 17, "recent_tokens": 30}),
        ((128, 64, 113, 33, 16), 16, {"budget": 50, "window": 50, "sink_tokens": 16}),
        ((128, 127, 113, 40, 16), 16, {"budget": 0.3}),
        ((500, 499, 1), 5, {"budget": 250, "window": 333}),
        ((1000, 77), 1, {"budget": 130, "recent_tokens": 3}),
    ],
    ids=str,
)
def test_select(neon: Emulated, lengths: tuple[int, ...], page_size: int, options: dict[str, Any], q_len: int) -> None:
    """Ties, NaN and infinities among the scores; scores that differ in the last bit."""
    lens, pages = torch.tensor(lengths, dtype=torch.int32), -(-max(lengths) // page_size) + 2
    scores = random_scores(len(lengths), q_len, 2, pages)
    close = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).int().add(0x3F800000).view(torch.float32)
    for x in (scores, close.expand(scores.shape), -close.expand(scores.shape)):
        got, expected = (v.select(x, lens, page_size=page_size, **options) for v in (neon, reference))
        assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge(neon: Emulated, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(0)
    out_a, out_b = (torch.randn(5, 7, 33, generator=rng).to(dtype) for _ in range(2))
    lse_a, lse_b = (torch.randn(5, 7, generator=rng) * 20 for _ in range(2))
    lse_a[0, 0], lse_b[0, 1], out_a[0, 0] = -INF, -INF, NAN  # no part of it
    out, lse = neon.merge(out_a, lse_a, out_b, lse_b)
    truth, truth_lse = reference.merge(out_a.double(), lse_a.double(), out_b.double(), lse_b.double())
    plain, plain_lse = reference.merge(out_a, lse_a, out_b, lse_b)
    assert_near(out, truth, plain, "out", dtype)
    assert_near(lse, truth_lse, plain_lse, "lse")

    values = torch.tensor([-INF, -1e30, -5.0, 0.0, 5.0, 1e30, INF, NAN])
    lse_a, lse_b = (x.flatten() for x in torch.meshgrid(values, values, indexing="ij"))
    out_a, out_b = (torch.full((64, 3), x, dtype=dtype) for x in (1.0, 2.0))
    for got, expected in zip(*(v.merge(out_a, lse_a, out_b, lse_b) for v in (neon, reference))):
        assert torch.allclose(got, expected, equal_nan=True, rtol=2 * torch.finfo(got.dtype).eps)
