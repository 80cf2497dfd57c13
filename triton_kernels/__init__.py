"""The verbs as Triton kernels: the arguments of the ops of csrc/registration.cpp, tensors on a GPU."""

from .select import select

__all__ = ["select"]
