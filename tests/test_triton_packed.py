"""Triton's `pack` and `score_packed`, interpreted, against the reference: small shapes, many of them adversarial."""

from __future__ import annotations

import pytest
import torch
from cases import BF16, F16, memory
from test_packed import FORMATS, case_of, packed_of

from quest import Packing, gpu_kernels
