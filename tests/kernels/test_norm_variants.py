"""LayerNorm and RMSNorm compile without spills as they are laid out for wide rows; test_compile.py has every architecture."""

from __future__ import annotations

import re

import pytest
import torch

from fabricamp.ops import bridge, norm_kernels
from tests.kernels.nvrtc import compile_for

B, S = torch.bfloat16, torch.float32
SHARED_MEMORY, PROCESSORS = 228 * 1024, 132  # of an H200


@pytest.fixture
def texts(monkeypatch):
    """The sources that would be compiled for a large GPU, instead of kernels."""
    made = []

    def note(file, function, kinds, device, defines, shared=0):
        made.append(bridge.source(file, kinds, defines))
        assert shared <= SHARED_MEMORY - 1024

    monkeypatch.setattr(norm_kernels, "kernel", note)
    monkeypatch.setattr(norm_kernels, "_shared_memory", lambda device: SHARED_MEMORY)
    monkeypatch.setattr(norm_kernels, "_processors", lambda device: PROCESSORS)
    norm_kernels.forget()
    yield made
    norm_kernels.forget()


@pytest.mark.parametrize(
    ("width", "center", "dtype", "wide"),
    [
        (4096, False, B, False),
        (8192, True, B, False),
        (16384, True, B, False),
        (16384, True, S, False),
        (65536, True, B, True),
    ],
)
def test_no_variant_spills(texts, width, center, dtype, wide):
    norm = norm_kernels.Norm(width, center, dtype, dtype, dtype, True, center, False, torch.device("cpu"))
    norm_kernels._forward(norm, True)
    assert (norm_kernels._backward(norm, True, True) is None) is wide
    if wide:
        norm_kernels._wide(norm, True, True)
    for text in texts:
        log = compile_for(text, 90)
        spills = [int(number) for number in re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log)]
        assert spills, log
        assert not any(spills), log
