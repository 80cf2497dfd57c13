"""Query-aware sparse-read attention: every token stays in the KV cache, a decode step reads only the best pages.

Start with `quest.decode` (the verbs in order), `quest.ops` (what each verb takes and gives) and `QuestConfig`.
"""

from importlib.metadata import PackageNotFoundError, version

from quest import reference
from quest.cache import PagedKVCache
from quest.config import QuestConfig
from quest.decode import decode
from quest.ops import append, attend, merge, score, select, summarise

try:
    __version__ = version("quest-attention")
except PackageNotFoundError:  # a source tree on the path, not installed
    __version__ = "0+unknown"

__all__ = [
    "PagedKVCache",
    "QuestConfig",
    "append",
    "attend",
    "decode",
    "merge",
    "reference",
    "score",
    "select",
    "summarise",
]
