"""SyncBatchNorm's kernels compile without spills for the variants that layers use; test_compile.py has every architecture."""

from __future__ import annotations

import re

import pytest

from fabricamp.ops import bridge
from tests.kernels.nvrtc import architectures, compile_for

HALF, BRAIN, FULL = "__half", "__nv_bfloat16", "float"
# Value, parameter, vector, planes, ReLU, residual.
KINDS = [
    (HALF, FULL, 8, 0, 1, 0),
    (BRAIN, FULL, 8, 0, 0, 1),
    (FULL, FULL, 4, 0, 0, 0),
    (FULL, FULL, 4, 1, 1, 1),
]


# Variants and architectures hardly interact: the short version has each of them twice, the long version all combinations.
PAIRS = [(KINDS[0], 90), (KINDS[1], -1), (KINDS[2], 90), (KINDS[3], -1)]
OTHERS = [(KINDS[0], -1), (KINDS[1], 90), (KINDS[2], -1), (KINDS[3], 90)]


@pytest.mark.parametrize(
    ("kind", "architecture"), [*PAIRS, *(pytest.param(*one, marks=pytest.mark.slow) for one in OTHERS)], ids=str
)
def test_compiles_without_spills(kind, architecture):
    names = ("VALUE", "PARAMETER", "VECTOR", "PLANES", "RELU", "RESIDUAL")
    text = bridge.source(
        "sync_batch_norm", (), tuple((name, str(value)) for name, value in zip(names, kind, strict=True))
    )
    architecture = architectures()[-1] if architecture == -1 else architecture
    log = compile_for(text, architecture)
    spills = [int(number) for number in re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log)]
    assert len(spills) == 15, log  # three figures a kernel
    assert not any(spills), f"sm_{architecture}: {log}"
