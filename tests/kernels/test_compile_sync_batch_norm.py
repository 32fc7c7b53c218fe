"""SyncBatchNorm's kernels compile for what layers make of them, without spills; test_compile.py has every architecture."""

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


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_compiles_without_spills(kind):
    names = ("VALUE", "PARAMETER", "VECTOR", "PLANES", "RELU", "RESIDUAL")
    text = bridge.source(
        "sync_batch_norm", (), tuple((name, str(value)) for name, value in zip(names, kind, strict=True))
    )
    for architecture in (90, architectures()[-1]):
        log = compile_for(text, architecture)
        spills = [int(number) for number in re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log)]
        assert len(spills) == 15, log  # three figures a kernel
        assert not any(spills), f"sm_{architecture}: {log}"
