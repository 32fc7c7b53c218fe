"""The benchmark of losses with compact states trains each kind from the same weights."""

from __future__ import annotations

import pytest

from benchmarks import state_losses


def test_each_kind_trains():
    sizes = state_losses.QUICK._replace(width=64)
    rows = {kind: state_losses.row_of(kind, 0, sizes, 3, 1e-3) for kind in ("fp32", "control", "bf16", "compact")}
    first = rows["fp32"]["losses"]
    assert len(first) == 3
    assert rows["control"]["losses"] != first
    for kind in ("bf16", "compact"):
        assert rows[kind]["losses"][0] == pytest.approx(first[0], abs=2e-3)
        assert rows[kind]["losses"] == pytest.approx(first, abs=0.05)
