"""LayerNorm and RMSNorm compile without spills in the layouts for wide rows; test_compile.py has every architecture."""

from __future__ import annotations

import re

import pytest
import torch

from fabricamp.ops import bridge
from fabricamp.ops.norm import kernels as norm_kernels
from fabricamp.ops.norm import plans as norm_plans
from tests.kernels.nvrtc import architectures, compile_for, version

B, S = torch.bfloat16, torch.float32
SHARED_MEMORY, PROCESSORS = 228 * 1024, 132  # of an H200
SIZES = (1, 2, 4, 8)  # of its clusters

# With column sums in shared memory and the next row loaded ahead, compilers before NVRTC 13.3 (13.0.88 comes with torch for CUDA
# 13.0) keep some of a thread's values in local memory.  Cards with clusters, as Hopper, take the ring instead.
OLDER_SPILL, WITHOUT_SPILLS = 56, (13, 3)


@pytest.fixture
def texts(monkeypatch):
    """Collects the sources that would be compiled for a large GPU, in place of compiling them."""
    made = []

    def note(file, function, kinds, device, defines, shared=0):
        made.append(bridge.source(file, kinds, defines))
        assert shared <= SHARED_MEMORY - 1024

    monkeypatch.setattr(norm_kernels, "kernel", note)
    monkeypatch.setattr(norm_plans, "_shared_memory", lambda device: SHARED_MEMORY)
    monkeypatch.setattr(norm_plans, "processors", lambda device: PROCESSORS)
    norm_kernels.forget()
    yield made
    norm_kernels.forget()


@pytest.mark.parametrize(
    ("width", "center", "dtype", "sizes", "wide"),
    [
        (4096, False, B, SIZES, False),
        (8192, True, B, SIZES, False),
        (16384, True, B, (1,), False),
        (16384, True, B, SIZES, False),
        (16384, True, S, (1,), False),
        (16384, True, S, SIZES, False),
        (32768, True, B, SIZES, False),
        (65536, True, B, (1,), True),
        (65536, True, B, SIZES, False),
        (65536, True, S, SIZES, False),
    ],
)
def test_no_variant_spills(texts, monkeypatch, width, center, dtype, sizes, wide):
    monkeypatch.setattr(norm_plans, "cluster_sizes", lambda device: sizes)
    norm = norm_plans.Norm(width, center, dtype, dtype, dtype, True, center, False, torch.device("cpu"))
    norm_kernels._forward(norm, True)
    assert (norm_kernels._backward(norm, True, True) is None) is wide
    assert ("norm_backward_ring(" in texts[-1]) is (len(sizes) > 1)  # without clusters the ring kernel is not used
    if wide:
        norm_kernels._wide(norm, True, True)
    else:
        norm_kernels._backward(norm, True, False)
    crowded = (width, dtype, sizes) == (16384, B, (1,)) and version() < WITHOUT_SPILLS
    for text in texts:
        without_spills(text, 90, OLDER_SPILL if crowded else 0)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_clusters_compile_for_the_architectures_that_have_them(texts, monkeypatch, every):
    monkeypatch.setattr(norm_plans, "cluster_sizes", lambda device: SIZES)
    norm = norm_plans.Norm(32768, True, B, B, B, True, True, False, torch.device("cpu"))
    norm_kernels._forward(norm, True)
    norm_kernels._backward(norm, True, True)
    norm_kernels._backward(norm, False, True)
    assert ["norm_backward_ring(" in text for text in texts] == [False, True, False]
    having = [one for one in architectures() if one >= 90]
    for architecture in having if every else (having[0], having[-1]):
        for text in texts:
            without_spills(text, architecture)


@pytest.mark.parametrize(
    ("width", "output", "parameter", "efficient"),
    [(4096, B, S, False), (65536, S, S, False), (4096, B, B, True), (65536, S, S, True)],
)
def test_no_ring_spills(texts, monkeypatch, width, output, parameter, efficient):
    monkeypatch.setattr(norm_plans, "cluster_sizes", lambda device: SIZES)
    norm = norm_plans.Norm(width, True, B, output, parameter, True, True, efficient, torch.device("cpu"))
    norm_kernels._backward(norm, True, True)
    (text,) = texts
    assert "norm_backward_ring(" in text
    without_spills(text, 90)


def without_spills(text, architecture, most=0):
    log = compile_for(text, architecture)
    spills = [int(number) for number in re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log)]
    assert spills, log
    assert max(spills) <= most, f"sm_{architecture}, NVRTC {version()}: {log}"
