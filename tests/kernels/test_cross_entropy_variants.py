"""Cross-entropy compiles without spills for dtypes and numbers of threads other than the defaults in its file."""

from __future__ import annotations

import re

import pytest

from fabricamp.ops import bridge
from tests.kernels.nvrtc import architectures, compile_for

LARGEST, *OTHERS = [("__nv_bfloat16", "int64", "512"), ("__half", "int", "128"), ("float", "int64", "32")]


@pytest.mark.parametrize(
    ("variant", "place"), [(LARGEST, 0), (LARGEST, None), (LARGEST, -1), *((one, None) for one in OTHERS)]
)
@pytest.mark.parametrize("softcap", ["0", "1"])
def test_no_variant_spills(variant, place, softcap):
    architecture = 90 if place is None else architectures()[place]
    defines = tuple(zip(("LOGIT", "LABEL", "LANES", "SOFTCAP"), (*variant, softcap), strict=True))
    log = compile_for(bridge.source("cross_entropy", (), defines), architecture)
    spills = [int(number) for number in re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log)]
    assert spills, log
    assert not any(spills), f"sm_{architecture}: {log}"
