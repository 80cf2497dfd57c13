"""The verbs as Triton kernels: the arguments of the ops of csrc/registration.cpp, tensors on a GPU."""

from .append import append, append_summarise, summarise
from .attend import attend
from .merge import merge
from .score import score
from .select import select

__all__ = ["append", "append_summarise", "attend", "merge", "score", "select", "summarise"]
