"""Of an installed quest, without a GPU: that it imports, says what it is, and that a full budget equals dense."""

import importlib.util

import torch

import quest
from quest import PagedKVCache, QuestConfig, backends

cuda = importlib.util.find_spec("quest._C_cuda") is not None
print(f"quest {quest.__version__}, torch {torch.__version__}, {torch.ops.quest.build()}")
if cuda:
    import quest._C_cuda

    print(f"CUDA code for {torch.ops.quest_cuda.archs()}")
assert ("+cu" in quest.__version__) == cuda
assert not torch.cuda.is_initialized()
assert importlib.util.find_spec("quest.triton_kernels") is not None

torch.manual_seed(0)
length, heads, kv_heads, dim = 300, 8, 2, 64
for config in (QuestConfig(budget=64), QuestConfig(budget=4096), QuestConfig(page_size=16, budget=4096)):
    cache = PagedKVCache(1, config=config)
    key, value = torch.randn(2, 1, length, kv_heads, dim)
    cache.append(0, key[:, :-1], value[:, :-1], cache.extend(length - 1))
    query = torch.randn(1, 1, heads, dim)
    out, _ = cache.decode(0, query, key[:, -1:], value[:, -1:], cache.extend(1))
    k, v = (x.transpose(1, 2).repeat_interleave(heads // kv_heads, 1) for x in (key, value))
    dense = torch.nn.functional.scaled_dot_product_attention(query.transpose(1, 2), k, v).transpose(1, 2)
    error = (out - dense).abs().max().item()
    assert out.isfinite().all()
    assert config.layer(0).budget < length or error < 1e-5, error
for backend in backends.available():
    print(f"  {backend.name}: {'yes' if not backend.reasons else '; '.join(backend.reasons)}")
print("ok")
