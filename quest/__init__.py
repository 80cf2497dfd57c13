"""Query-aware sparse-read attention: every token stays in the KV cache, a decode step reads only the best pages.

Start with `quest.decode` (the verbs in order), `quest.ops` (what each verb takes and gives) and `QuestConfig`.
"""

from importlib.metadata import PackageNotFoundError, version

from quest import reference
from quest._host import OutOfBlocks
from quest.cache import PagedKVCache
from quest.config import QuestConfig
from quest.decode import decode, decode_packed
from quest.offload import Offload
from quest.ops import append, attend, merge, score, select, summarise
from quest.ops_packed import pack, score_packed
from quest.packing import Packing, packing_of
from quest.pools import Pools

try:
    __version__ = version("quest-attention")
except PackageNotFoundError:  # a source tree on the path, not installed
    __version__ = "0+unknown"

__all__ = [
    "Offload",
    "OutOfBlocks",
    "Packing",
    "PagedKVCache",
    "Pools",
    "QuestConfig",
    "append",
    "attend",
    "decode",
    "decode_packed",
    "merge",
    "pack",
    "packing_of",
    "reference",
    "score",
    "score_packed",
    "select",
    "summarise",
]
