"""The verbs as Triton kernels: the arguments of the ops of csrc/registration.cpp, tensors on a GPU."""

from .append import append, append_summarise, summarise
from .attend import attend
from .merge import merge
from .move import move
from .pack import pack, pack_new
from .score import score
from .score_packed import score_packed, select_packed
from .select import select

__all__ = [
    "append",
    "append_summarise",
    "attend",
    "merge",
    "move",
    "pack",
    "pack_new",
    "score",
    "score_packed",
    "select",
    "select_packed",
    "summarise",
]
