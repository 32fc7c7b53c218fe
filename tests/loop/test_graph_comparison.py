"""The comparison of a replay with eager steps reports wrong replays, but not kernels that are not deterministic."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
import torchmetrics
from torch import nn

from fabricamp import OptLevel
from fabricamp.engine.graph.comparison import REPEATED_STEPS, ComparedState, compare
from fabricamp.metrics.replay import MetricStates


class Number:
    """A state that consists of one number."""

    def __init__(self, value):
        self.value = value

    def copy(self):
        return self.value

    def put_back(self, value):
        self.value = value

    def difference(self, value):
        return "" if self.value == value else "the number"


def found(replayed, eager_values, everywhere=bool):
    """Returns the result of ``compare``, the state afterwards, and the number of eager steps that it made."""
    state = Number(replayed)
    values = iter(eager_values)
    steps = []

    def eager():
        state.value += next(values)
        steps.append(state.value)

    return compare(state, 0, eager, everywhere), state.value, len(steps)


def test_a_replay_that_equals_an_eager_step_is_kept():
    assert found(5, [5]) == ("", 5, 1)


@pytest.mark.parametrize("alike", range(1, REPEATED_STEPS + 1))
def test_eager_steps_that_differ_at_last_are_no_error(alike):
    assert found(5, [4] * alike + [3]) == ("", 5, alike + 1)


def test_a_wrong_replay_is_named_and_taken_back():
    assert found(5, itertools.repeat(4)) == ("the number", 0, 1 + REPEATED_STEPS)


def test_a_wrong_replay_of_another_rank_is_taken_back_here_too():
    assert found(5, itertools.repeat(5), everywhere=lambda _: False) == (
        "a value of another rank",
        0,
        1 + REPEATED_STEPS,
    )


def test_every_tensor_of_a_module_is_compared_and_put_back():
    """A step may write to a tensor that is neither a parameter nor a buffer, and so does the eager step of the comparison."""
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), torchmetrics.MeanMetric())
    module[0].average = torch.zeros(2)
    generators = SimpleNamespace(states=list, put_back=lambda states: None, are=lambda states: True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    state = ComparedState(
        module,
        optimizer,
        OptLevel("O0"),
        torch.device("cpu"),
        MetricStates(module),
        generators,
        written={"0.average": module[0].average},
    )
    written = {
        "0.weight": module[0].weight.data,
        "1.running_mean": module[1].running_mean,
        "0.average": module[0].average,
        "the state 'mean_value' of a MeanMetric": module[2].mean_value,
    }
    for name, tensor in written.items():
        before = state.copy()
        assert state.difference(before) == ""
        value = tensor.clone()
        tensor.add_(1)
        assert state.difference(before) == name
        state.put_back(before)
        assert torch.equal(tensor, value)
