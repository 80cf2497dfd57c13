"""What is particular to Triton's kernels: they need no device to import or compile, and their limits."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import triton_bounds
from cases import INF, NAN, make, same

import quest

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")
SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def triton():
    """The kernels, interpreted, every address checked, NaN and infinity as silent as on a device."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    with triton_bounds.checked(), np.errstate(all="ignore"):
        yield importlib.import_module("quest.triton_kernels")


def in_fresh_python(code: str, **environment: str) -> str:
    """What the code prints in a Python where kernels are compiled, not interpreted."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, env=environ | environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_touches_no_device():
    code = "import torch, quest.triton_kernels; print(torch.cuda.is_initialized())"
    assert in_fresh_python(code, CUDA_VISIBLE_DEVICES="").strip() == "False"


@pytest.mark.slow
def test_every_kernel_compiles_for_every_architecture():
    """One configuration of each; scripts/gpu_report.py has them all."""
    if not SCRIPTS.exists():
        pytest.skip("the scripts are not installed")
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPTS)!r})\n"
        "import gpu_report, json\n"
        "if __name__ == '__main__': print(json.dumps(gpu_report.triton_rows(first_only=True)))"
    )
    rows = json.loads(in_fresh_python(code))
    kernels = {row[0] for row in rows}
    assert {"append_rows", "summarise_pages", "score_pages", "agree", "select_pages", "attend_pages"} <= kernels
    assert {row[2] for row in rows} == {80, 90, 100, 120}
    assert len(rows) == 4 * len(kernels)
    assert not [row for row in rows if row[4]], "registers spill"


def test_select_of_300_000_pages(triton):
    """More than one chunk can hold; ties, NaN and infinities across the edges of chunks."""
    rng = torch.Generator().manual_seed(0)
    scores = torch.randn(300_000, generator=rng)
    special = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 2.0, 2.0, 2.0])
    places = torch.rand(300_000, generator=rng) < 0.3
    scores[places] = special[torch.randint(8, (300_000,), generator=rng)][places]
    lens = torch.tensor([300_000], dtype=torch.int32)
    for count in (5, 20_000, 250_000):  # infinities, ties at 2, some NaN
        page_idx, counts = triton.select(scores[None, None, None], lens, 1, count, 0.0, 2, 3, -1, count)
        rank = torch.where(scores.isnan(), -INF, torch.where(scores == -INF, -3e38, scores))  # NaN below -inf
        rank[:2], rank[-3:] = INF, INF  # forced; some places are at infinity too, ties to the lower
        forced = torch.tensor([0, 1, 299_997, 299_998, 299_999])
        free = rank[2:-3].sort(descending=True, stable=True).indices[: count - 5] + 2
        assert page_idx.flatten().tolist() == torch.cat([forced, free]).sort().values.tolist()
        assert counts.item() == count


def test_fraction_of_the_context_in_double_precision(triton):
    """0.07 * 100 is above 7 in fp64, which makes it 8 tokens, and 7 in fp32."""
    lens = torch.tensor([1, 50, 99, 100, 101, 128], dtype=torch.int32)
    scores = torch.arange(128.0).expand(6, 1, 1, 128)
    expected = quest.reference.select(scores, lens, page_size=1, budget=0.07)
    assert expected[1][3] == 8
    got = triton.select(scores, lens, 1, 0, 0.07, 0, 1, -1, expected[0].shape[3])
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("shape", ["many_tokens", "many_tokens_bf16", "page_8", "page_24", "mla", "ragged_bf16"])
def test_append_and_summarise_in_one_launch(triton, shape):
    case = make(shape)
    before = case.before()
    triton.append_summarise(case.key, case.value, *before.pools, case.block_table, case.seq_lens, case.slot_mapping)
    assert all(map(same, before.pools, case.pools))


def test_a_row_that_stores_nothing_keeps_its_summaries(triton):
    case = make("many_tokens")
    slots = case.slot_mapping.clone()
    slots[2] = -1
    before = case.before()
    expected = before.copy()
    stored = [*range(2), *range(3, len(slots))]
    quest.append(case.key, case.value, expected.k_cache, expected.v_cache, slots)
    rows = case.block_table[stored], case.seq_lens[stored]
    num_new = torch.full((len(stored),), case.shape.q_len, dtype=torch.int32)
    quest.summarise(expected.k_cache, expected.page_min, expected.page_max, *rows, num_new)
    triton.append_summarise(case.key, case.value, *before.pools, case.block_table, case.seq_lens, slots)
    assert all(map(same, before.pools, expected.pools))


HOSTILE = (-(2**31), -5, -1, 0, 1, 3, 10**6, 2**31 - 1)


@pytest.mark.parametrize("seed", range(6))
def test_no_value_leads_out_of_bounds(triton, seed):
    """Any lengths, block ids, slots, pages and numbers of new tokens."""
    case = make(("page_8", "many_tokens", "page_24")[seed % 3])
    rng = torch.Generator().manual_seed(seed)

    def hostile(like):
        return torch.tensor(HOSTILE)[torch.randint(len(HOSTILE), like.shape, generator=rng)].to(like.dtype)

    rows = hostile(case.block_table[:, :3]), hostile(case.seq_lens)
    slots = hostile(case.slot_mapping) * (1 + 2 * seed)
    triton.append(case.key, case.value, case.k_cache, case.v_cache, slots)
    triton.append_summarise(case.key, case.value, *case.pools, *rows, slots)
    triton.summarise(case.k_cache, case.page_min, case.page_max, *rows, hostile(case.seq_lens))
    window = (-1, 1, 20)[seed // 2]
    for rule in ("softmax", "per_head"):
        triton.score(case.query, case.page_min, case.page_max, *rows, case.page_size, 0.1, 1.0, rule, window)
    scores = torch.randn(*case.query.shape[:2], 2, 7, generator=rng)
    page_idx, counts = triton.select(scores, rows[1], case.page_size, 0, 0.4, 1, 2, window, 3)
    assert page_idx.max() < 7
    assert counts.equal((page_idx >= 0).sum(-1).int())
    for pages in (None, hostile(page_idx)):
        triton.attend(case.query, case.k_cache, case.v_cache, *rows, pages, case.page_size, 0.1, 0.0, None, window)


def test_too_many_channels(triton):
    cache = torch.zeros(1, 1, 4, 1040)
    with pytest.raises(ValueError, match="attend: v_cache: Triton's kernel takes up to 1024 channels, got 1040"):
        triton.attend(
            torch.zeros(1, 1, 1, 1040), cache, cache, torch.zeros(1, 1, dtype=torch.int32),
            torch.ones(1, dtype=torch.int32), None, 4, 1.0,
        )  # fmt: skip
