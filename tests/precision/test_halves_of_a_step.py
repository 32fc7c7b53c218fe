"""The launches of a step, and the host's work after them; after the replay of a CUDA graph only the second half runs."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fabricamp.optimizers import FusedAdam
from fabricamp.precision import Clip, OptLevel
from fabricamp.strategies.base import Strategy
from tests.precision.test_optimizer_step import OPTIMIZERS, batches, start, task, window
from tests.windows import add_up


class Launches(TorchDispatchMode):
    """Records every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def in_halves(precision, module, optimizer, micro_batches, launched):
    for index, batch in enumerate(micro_batches):
        loss = precision.forward(module.training_step, batch)
        if index == 0:
            optimizer.zero_grad()
        precision.backward(loss / len(micro_batches))
        add_up(precision, optimizer)
    loss = loss.detach()
    step = precision.step_of(optimizer, Strategy(), Clip(0.05))
    step.run(loss)
    with torch.no_grad(), launched:
        step.after()
        return precision.verdicts.note_end()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", ["FusedAdam", "adam_fused"])
def test_the_host_s_half_launches_nothing(level, name, accumulate):
    make = {**OPTIMIZERS, "FusedAdam": lambda parameters: FusedAdam(parameters, lr=0.01)}[name]
    halves, whole, launched = (OptLevel(level), task()), (OptLevel(level), task()), Launches()
    optimizers = [start(precision, module, make, accumulate) for precision, module in (halves, whole)]
    data = batches(5 * accumulate)
    for index in range(5):
        micro_batches = data[index * accumulate : (index + 1) * accumulate]
        verdict = in_halves(*halves, optimizers[0], micro_batches, launched)
        assert verdict == window(*whole, optimizers[1], micro_batches, Clip(0.05))
    assert launched.seen == []
    assert all(map(torch.equal, halves[1].state_dict().values(), whole[1].state_dict().values()))
