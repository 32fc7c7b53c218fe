"""A step of a Loop has the bits of the Trainer's: weights, optimizer states, masters, loss scale."""

from __future__ import annotations

import pytest
import torch

from fabricamp import Compile
from tests.own_loop.same import OPTIMIZERS, by_loop, by_trainer, difference
from tests.pairs import pairs

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5", "bf16-mixed", "64-true"]
CLIPS = [{}, {"gradient_clip_val": 0.5}, {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}]
PARTIAL = ["step", "carry", "drop"]


@pytest.mark.parametrize(
    ("level", "optimizer", "accumulate", "clip", "partial"), pairs(LEVELS, OPTIMIZERS, [1, 3], CLIPS, PARTIAL)
)
def test_one_process(level, optimizer, accumulate, clip, partial):
    options = {"precision": level, "accumulate_grad_batches": accumulate, "partial_window": partial, **clip}
    assert difference(by_trainer(optimizer, **options), by_loop(optimizer, **options)) == ""


@pytest.mark.parametrize(("part", "level"), [("step", "O4"), ("modules", "O5")])
def test_compiled(part, level):
    options = {"precision": level, "compile": Compile(part, backend="eager"), "epochs": 1, "dropout": 0.0}
    expected = by_trainer("fused_adam", **options)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    assert difference(expected, by_loop("fused_adam", **options)) == ""
    # A new function of the same code in each step is compiled once.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch.compiler.reset()
