"""What `import quest` needs: no GPU, no Triton, no transformers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

IMPORT = """
import sys
for name in {missing!r}:
    sys.modules[name] = None  # as if it were not installed
import torch
import quest
assert not torch.cuda.is_initialized()
assert not any(name == "transformers" or name.startswith("transformers.") for name in sys.modules if sys.modules[name])
pools = [torch.zeros(1, 1, 4, 4) for _ in range(2)]
quest.append(torch.ones(1, 1, 4), torch.ones(1, 1, 4), *pools, torch.tensor([2]))
assert pools[0].sum() == 4 and pools[0][0, 0, 2].sum() == 4  # once, on a fresh shape
print(quest.__version__, torch.ops.quest.isa())
"""


@pytest.mark.parametrize("missing", [(), ("triton", "transformers", "matplotlib", "typer", "rich")], ids=str)
def test_c44_import_without_gpu_and_extras(missing):
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT.format(missing=missing)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_public_names():
    import quest

    verbs = {"append", "summarise", "score", "select", "attend", "merge", "decode"}
    packed = {"pack", "score_packed", "decode_packed", "Packing", "packing_of"}
    cache = {"Offload", "OutOfBlocks", "PagedKVCache", "Pools", "QuestConfig"}
    assert set(quest.__all__) == verbs | packed | cache | {"reference"}
    assert all(hasattr(quest, name) for name in quest.__all__)
