"""Adversarial inputs for the verbs, and the tolerance that kernels are held to.

Everything a verb must not read is poison (NaN unless a test says otherwise): free blocks, slots behind a row's length,
the summaries of both, and the memory between the rows of a tensor. Block tables are shuffled.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quest import reference

NAN = float("nan")
INF = float("inf")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Shape:
    """One named situation."""

    name: str
    seq_lens: tuple[int, ...] = (37, 5)
    q_len: int = 1
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    v_head_dim: int | None = None
    page_size: int = 16
    block_size: int | None = None
    dtype: torch.dtype = torch.float32
    query_dtype: torch.dtype | None = None
    layout: str = "padded"

    def __str__(self) -> str:
        return self.name


BF16, F16 = torch.bfloat16, torch.float16
SHAPES = [
    Shape("ragged", seq_lens=(1, 16, 17, 100, 0)),
    Shape("ragged_bf16", seq_lens=(1, 16, 17, 100, 0), dtype=BF16, layout="interleaved"),
    Shape("all_rows_empty", seq_lens=(0, 0)),
    Shape("group_1", num_heads=3, num_kv_heads=3, head_dim=40, dtype=F16),
    Shape("group_3", num_heads=9, num_kv_heads=3, dtype=BF16, seq_lens=(45, 7), layout="token_major"),
    Shape("group_5", num_heads=10, num_kv_heads=2, head_dim=100),
    Shape("group_6", num_heads=12, num_kv_heads=2, head_dim=80, dtype=F16, layout="interleaved"),
    Shape("group_7", num_heads=28, num_kv_heads=4, head_dim=128, dtype=BF16),
    Shape("group_8", num_heads=8, num_kv_heads=1, head_dim=96, dtype=F16, seq_lens=(130,)),
    Shape("group_16", num_heads=16, num_kv_heads=1, head_dim=128, dtype=BF16, seq_lens=(37,)),
    Shape("group_64", num_heads=64, num_kv_heads=1, head_dim=64, seq_lens=(37,)),
    Shape("dim_2", head_dim=2, seq_lens=(33, 4)),
    Shape("dim_7", head_dim=7, seq_lens=(33, 4), dtype=BF16),
    Shape("dim_8", head_dim=8, v_head_dim=24, dtype=F16),
    Shape("dim_32", head_dim=32, seq_lens=(33, 4), layout="plain"),
    Shape("dim_192", head_dim=192, seq_lens=(33,), dtype=BF16),
    Shape("dim_256", head_dim=256, seq_lens=(33,), dtype=F16),
    Shape("mla", num_heads=2, head_dim=192, v_head_dim=128, seq_lens=(33,)),
    Shape("mla_absorbed", num_heads=16, num_kv_heads=1, head_dim=576, v_head_dim=512, seq_lens=(33,), dtype=BF16),
    Shape("page_1", page_size=1, block_size=16, head_dim=32, dtype=BF16),
    Shape("page_8", page_size=8, block_size=64, head_dim=48, seq_lens=(100, 61)),
    Shape("page_24", page_size=24, block_size=48, head_dim=32, seq_lens=(121, 24), dtype=F16),
    Shape("page_64", page_size=64, head_dim=32, seq_lens=(150, 64), layout="token_major"),
    Shape("page_512", page_size=512, head_dim=16, seq_lens=(600, 3), num_heads=2),
    Shape("many_tokens", q_len=5, seq_lens=(3, 5, 20, 33, 0), num_heads=6, head_dim=32),
    Shape("many_tokens_bf16", q_len=19, seq_lens=(19, 40, 7), page_size=4, block_size=8, head_dim=16, dtype=BF16),
    Shape("query_bf16_cache_f32", query_dtype=BF16),
    Shape("query_f32_cache_f16", query_dtype=torch.float32, dtype=F16),
    Shape("no_rows", seq_lens=()),
]
BY_NAME = {shape.name: shape for shape in SHAPES}


@dataclass(frozen=True)
class Case:
    """Tensors of one decode step, the new tokens already in the cache and its summaries."""

    query: Tensor
    key: Tensor
    value: Tensor
    k_cache: Tensor
    v_cache: Tensor
    page_min: Tensor
    page_max: Tensor
    block_table: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor
    shape: Shape

    @property
    def page_size(self) -> int:
        return self.shape.page_size

    @property
    def pools(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.k_cache, self.v_cache, self.page_min, self.page_max

    @property
    def cache(self) -> tuple[Tensor, ...]:
        """What `attend` takes after the query."""
        return self.k_cache, self.v_cache, self.block_table, self.seq_lens

    @property
    def summary(self) -> tuple[Tensor, ...]:
        """What `score` takes after the query."""
        return self.page_min, self.page_max, self.block_table, self.seq_lens

    @property
    def step(self) -> tuple[Tensor, ...]:
        """What `decode` takes."""
        return (self.query, self.key, self.value, *self.pools, self.block_table, self.seq_lens, self.slot_mapping)

    def replace(self, **changes: Any) -> Case:
        return dataclasses.replace(self, **changes)

    def copy(self) -> Case:
        """The same with pools of its own, at the same strides and with the same memory in between."""
        return self.replace(**dict(zip(("k_cache", "v_cache", "page_min", "page_max"), copy_pools(self.pools))))

    def before(self, poison: float = NAN) -> Case:
        """The state before the step: poison in the new tokens' slots and in the summaries of their pages."""
        case, block_size = self.copy(), self.k_cache.shape[2]
        for slot in self.slot_mapping.flatten().tolist():
            if slot >= 0:
                block, offset = divmod(slot, block_size)
                for pool, row in zip(case.pools, (offset, offset, *[offset // self.page_size] * 2)):
                    pool[block, :, row] = poison
        return case


def make(shape: Shape | str, seed: int = 0, poison: float = NAN, **changes: Any) -> Case:
    """A case of random keys (some channels constant or one-sided, as real ones are), values and queries."""
    shape = dataclasses.replace(BY_NAME[shape] if isinstance(shape, str) else shape, **changes)
    rng = torch.Generator().manual_seed(seed)
    block_size, batch = shape.block_size or shape.page_size, len(shape.seq_lens)
    v_head_dim = shape.v_head_dim or shape.head_dim
    blocks = [-(-length // block_size) for length in shape.seq_lens]
    num_blocks, heads = sum(blocks) + 3, shape.num_kv_heads

    order = torch.randperm(num_blocks, generator=rng).int()
    block_table = torch.full((batch, max(blocks, default=0) + 2), -1, dtype=torch.int32)
    for row, count in enumerate(blocks):
        block_table[row, :count], order = order[:count], order[count:]

    k_cache, v_cache = torch.full((2, num_blocks, heads, block_size, 1), poison).unbind()
    k_cache = k_cache.repeat(1, 1, 1, shape.head_dim).to(shape.dtype)
    v_cache = v_cache.repeat(1, 1, 1, v_head_dim).to(shape.dtype)
    page_min = k_cache[:, :, :: shape.page_size].clone()
    page_max = page_min.clone()
    shift = torch.randn(heads, 1, shape.head_dim, generator=rng) * 2
    for row, length in enumerate(shape.seq_lens):
        keys = torch.randn(heads, length, shape.head_dim, generator=rng) + shift
        keys[..., 0] = 1.5
        values = torch.randn(heads, length, v_head_dim, generator=rng)
        for start in range(0, length, block_size):
            block, count = int(block_table[row, start // block_size]), min(block_size, length - start)
            k_cache[block, :, :count] = keys[:, start : start + count].to(shape.dtype)
            v_cache[block, :, :count] = values[:, start : start + count].to(shape.dtype)
    seq_lens = torch.tensor(shape.seq_lens, dtype=torch.int32)
    reference.summarise(k_cache, page_min, page_max, block_table, seq_lens, seq_lens)

    positions = seq_lens[:, None].long() - shape.q_len + torch.arange(shape.q_len)
    block = block_table.gather(1, positions.clamp_min(0) // block_size).long()
    slots = torch.where(positions < 0, -1, block * block_size + positions % block_size)
    at = slots.clamp_min(0)
    key, value = (pool[at // block_size, :, at % block_size] for pool in (k_cache, v_cache))
    query = torch.randn(batch, shape.q_len, shape.num_heads, shape.head_dim, generator=rng)
    pools = lay_out((k_cache, v_cache, page_min, page_max), shape.layout, poison)
    query, key, value = (between_rows(x, poison) for x in (query.to(shape.query_dtype or shape.dtype), key, value))
    return Case(query, key, value, *pools, block_table, seq_lens, slots, shape)


# ---- memory ----


def between_rows(x: Tensor, poison: float = NAN) -> Tensor:
    """`x` with three elements of poison behind every row."""
    room = x.new_full((*x.shape[:-1], x.shape[-1] + 3), poison)
    room[..., : x.shape[-1]] = x
    return room[..., : x.shape[-1]]


def lay_out(pools: tuple[Tensor, ...], layout: str, poison: float = NAN) -> list[Tensor]:
    """The pools in another memory layout: as an engine may keep them."""
    if layout == "plain":
        return [x.clone() for x in pools]
    if layout == "padded":
        return [between_rows(x, poison) for x in pools]
    if layout == "token_major":  # [num_blocks, block_size, num_kv_heads, head_dim]
        return [between_rows(x.transpose(1, 2), poison).transpose(1, 2) for x in pools]
    assert layout == "interleaved"  # everything of a block together, summaries at the end
    room = pools[0].new_full((pools[0].shape[0], sum(x[0].numel() for x in pools) + 5), poison)
    views, at = [], 0
    for x in pools:
        strides = (room.shape[1], x[0, 0].numel(), x.shape[3], 1)
        views.append(room.as_strided(x.shape, strides, at))
        views[-1].copy_(x)
        at += x[0].numel()
    return views


def copy_pools(pools: tuple[Tensor, ...]) -> list[Tensor]:
    """Copies at the same places of a copied storage; pools that share one storage share one again."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in pools}
    storages = {at: storage.clone() for at, storage in storages.items()}
    return [
        torch.empty(0, dtype=x.dtype).set_(
            storages[x.untyped_storage().data_ptr()], x.storage_offset(), x.size(), x.stride()
        )
        for x in pools
    ]


def memory(*tensors: Tensor) -> list[bytes]:
    """Every byte of the tensors' storages, the memory between rows included."""
    return [torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).numpy().tobytes() for x in tensors]


def same(a: Tensor, b: Tensor) -> bool:
    """Equal values, NaN equal to NaN."""
    return a.shape == b.shape and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0), b.nan_to_num(0))


# ---- tolerance ----


def assert_near(
    got: Tensor, truth: Tensor, plain: Tensor, what: str, dtype: torch.dtype | None = None, size: float | None = None
) -> None:
    """The error against `truth` (fp64) is at most twice that of plain PyTorch in the same precision, plus eps.

    eps is relative to `size`, the magnitude of what was added up: by default the largest result.
    """
    assert got.shape == truth.shape, f"{what}: shape {list(got.shape)}, not {list(truth.shape)}"
    got, plain = got.double(), plain.double()
    infinite = truth.isinf()
    assert torch.equal(got[infinite], truth[infinite]), f"{what}: infinities differ"
    got, truth, plain = got[~infinite], truth[~infinite], plain[~infinite]
    if not truth.numel():
        return
    size = max(1e-3, truth.abs().max().item()) if size is None else size
    yardstick = (plain - truth).abs().nan_to_num(0, 0, 0).max().item()
    limit = 2 * yardstick + 4 * torch.finfo(dtype or torch.float32).eps * size
    error = (got - truth).abs().max().item()
    assert error <= limit, f"{what}: error {error:.3g} above {limit:.3g} (plain PyTorch {yardstick:.3g})"


def plain_attend(case: Case, page_idx: Tensor | None, **options: Any) -> Tensor:
    """Attention by plain PyTorch in the query's own precision: the yardstick of `out`."""
    dtype = case.query.dtype
    if dtype == torch.float32:
        return reference.attend(case.query, *case.cache, page_idx, page_size=case.page_size, **options)[0]
    scale = options.get("softmax_scale") or case.query.shape[-1] ** -0.5
    batch, q_len, num_heads, _ = case.query.shape
    block_size, num_kv_heads = case.k_cache.shape[2], case.k_cache.shape[1]
    out = case.query.new_zeros(batch, q_len, num_heads, case.v_cache.shape[-1])
    for b, length in enumerate(case.seq_lens.tolist()):
        for t in range(q_len):
            pos = length - q_len + t
            tokens = torch.arange(max(0, pos - (options.get("window") or pos + 1) + 1), max(0, pos + 1))
            for h in range(num_heads):
                seen = tokens
                if page_idx is not None:
                    pages = page_idx[b, t, h * page_idx.shape[2] // num_heads]
                    seen = tokens[torch.isin(tokens // case.page_size, pages)]
                if not len(seen):
                    continue
                at = (case.block_table[b, seen // block_size].long(), h * num_kv_heads // num_heads, seen % block_size)
                logits = case.k_cache[at].to(dtype) @ case.query[b, t, h] * scale
                if cap := options.get("softcap"):
                    logits = cap * torch.tanh(logits / cap)
                weight = logits
                if options.get("sinks") is not None:
                    weight = torch.cat([logits, options["sinks"][h, None].to(dtype)])
                out[b, t, h] = weight.softmax(0)[: len(seen)] @ case.v_cache[at].to(dtype)
    return out


def check_attend(result: tuple[Tensor, Tensor], case: Case, page_idx: Tensor | None = None, **options: Any) -> None:
    """Hold (out, lse) to the reference in fp64."""
    assert result[0].dtype == case.query.dtype
    assert result[1].dtype == torch.float32
    options_64 = {k: v.double() if isinstance(v, Tensor) else v for k, v in options.items()}
    out, lse = reference.attend(case.query.double(), *case.cache, page_idx, page_size=case.page_size, **options_64)
    lse_32 = reference.attend(case.query.float(), *case.cache, page_idx, page_size=case.page_size, **options)[1]
    assert_near(result[0], out, plain_attend(case, page_idx, **options), "out", case.query.dtype)
    assert_near(result[1], lse, lse_32, "lse")
    assert not result[0][result[1] == -INF].any(), "a token that sees nothing must give 0"


def check_score(scores: Tensor, case: Case, **options: Any) -> None:
    """Hold scores to the reference in fp64."""
    assert scores.dtype == torch.float32
    wide = (case.query.double(), *case.summary)
    truth = reference.score(*wide, page_size=case.page_size, **options)
    plain = reference.score(case.query.float(), *case.summary, page_size=case.page_size, **options)
    raw = reference.score(*wide, page_size=case.page_size, **options | {"group_rule": "per_head"})
    size = raw[raw.isfinite()].abs().max().item() if raw.isfinite().any() else 0.0
    if options.get("group_rule", "softmax") == "softmax":  # an error of a logit is a relative one of its exponential
        size = 1 + size * (options.get("softmax_scale") or case.query.shape[-1] ** -0.5)
    assert_near(scores, truth, plain, "score", size=size)
