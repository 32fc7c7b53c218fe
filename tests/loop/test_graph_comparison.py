"""The comparison of a replay with eager steps reports wrong replays, but not kernels that are not deterministic."""

from __future__ import annotations

import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torchmetrics
from torch import nn

from fabricamp import OptLevel
from fabricamp.engine.graph import compared_state
from fabricamp.engine.graph.compared_state import ComparedState
from fabricamp.engine.graph.comparison import REPEATED_STEPS, GraphsDroppedError, compare
from fabricamp.errors import NotCapturableError
from fabricamp.metrics.replay import MetricStates
from fabricamp.ops.tensors import differing

memory = partial(torch.empty, dtype=torch.uint8, device="cpu")


class Number:
    """A state that consists of one number."""

    def __init__(self, value):
        self.value = value
        self.copies = 0

    def copy(self, allocate):
        self.copies += 1
        return self.value

    def put_back(self, value):
        self.value = value

    def digests(self):
        return self.value

    def difference(self, value):
        return "" if self.value == value else "the number"


def found(replays, eager_values, everywhere=bool, *, copies=2):
    """Returns what ``compare`` has found, the state afterwards, and the number of replays that it made."""
    state = Number(0)
    replayed = iter(replays)
    values = iter(eager_values)
    made = []

    def replay():
        assert state.value == 0
        state.value = next(replayed)
        made.append("replay")

    def eager():
        assert state.value == 0
        state.value = next(values)

    result = compare(state, replay, eager, everywhere, memory, copies=copies)
    assert state.copies == (copies if not result.difference else state.copies) <= copies
    return result, state.value, len(made)


def test_a_replay_that_equals_an_eager_step_is_kept():
    assert found([5], [5]) == (("", 1, True), 5, 1)
    assert found([5], [5], copies=1) == (("", 1, False), 5, 1)


@pytest.mark.parametrize("alike", range(1, REPEATED_STEPS + 1))
def test_eager_steps_that_differ_at_last_are_no_error(alike):
    assert found([5], [4] * alike + [3]) == (("", alike + 1, True), 5, 1)


@pytest.mark.parametrize("alike", range(1, REPEATED_STEPS + 1))
def test_with_one_copy_the_replay_is_made_again_after_eager_steps_that_differ(alike):
    assert found([5, 6], [4] * alike + [3], copies=1) == (("", alike + 1, True), 6, 2)


@pytest.mark.parametrize("copies", [1, 2])
def test_a_wrong_replay_is_named_and_taken_back(copies):
    assert found([5], itertools.repeat(4), copies=copies) == (("the number", 1 + REPEATED_STEPS, False), 0, 1)


@pytest.mark.parametrize("copies", [1, 2])
def test_a_wrong_replay_of_another_rank_is_taken_back_here_too(copies):
    result = found([5], itertools.repeat(5), everywhere=lambda _: False, copies=copies)
    assert result == (("a value of another rank", 1 + REPEATED_STEPS, False), 0, 1)


def test_ranks_whose_replay_was_equal_make_it_again_with_the_others():
    """A replay exchanges gradients, so all ranks make the same number of them."""
    answers = iter([False, False, True])
    assert found([5, 5], [5, 5, 5], everywhere=lambda _: next(answers), copies=1) == (("", 3, True), 5, 2)


def test_graphs_that_are_dropped_before_the_second_replay_leave_the_state_from_before():
    state, values, replays = Number(0), iter([4, 3]), []

    def replay():
        if replays:
            raise GraphsDroppedError("a tensor is kept")
        replays.append(1)
        state.value = 5

    def eager():
        state.value = next(values)

    with pytest.raises(GraphsDroppedError):
        compare(state, replay, eager, bool, memory, copies=1)
    assert state.value == 0


# -- the state ---------------------------------------------------------------------------------------------------------------------


def compared(module, optimizer=None, **options):
    generators = SimpleNamespace(states=list, put_back=lambda states: None, are=lambda states: True)
    optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=0.1)
    device = options.pop("device", torch.device("cpu"))
    return ComparedState(module, optimizer, OptLevel("O0"), device, MetricStates(module), generators, **options)


def test_every_tensor_of_a_module_is_compared_and_put_back():
    """A step may write to a tensor that is neither a parameter nor a buffer, and so does the eager step of the comparison."""
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), torchmetrics.MeanMetric())
    module[0].average = torch.zeros(2)
    module[0].register_buffer("flags", torch.tensor([True, False, True]))
    module[0].register_buffer("turned", torch.randn(3, 4).t())
    module[0].register_buffer("gaps", torch.randn(3, 4)[:, ::2])
    module[0].register_buffer("conjugate", torch.randn(3, dtype=torch.complex64).conj())
    state = compared(module, written={"0.average": module[0].average})
    written = {
        "0.weight": module[0].weight.data,
        "1.running_mean": module[1].running_mean,
        "1.num_batches_tracked": module[1].num_batches_tracked,
        "0.average": module[0].average,
        "0.flags": module[0].flags,
        "0.turned": module[0].turned,
        "0.gaps": module[0].gaps,
        "0.conjugate": module[0].conjugate,
        "the state 'mean_value' of a MeanMetric": module[2].mean_value,
    }
    for name, tensor in written.items():
        before = state.copy(memory)
        digests = state.digests()
        assert (state.difference(before), state.difference(digests)) == ("", "")
        value = tensor.clone()
        tensor.copy_(~tensor if tensor.dtype == torch.bool else tensor + 1)
        assert (state.difference(before), state.difference(digests)) == (name, name)
        state.put_back(before)
        assert torch.equal(tensor, value)
        assert (state.difference(before), state.difference(digests)) == ("", "")


def test_a_copy_takes_the_bytes_that_it_says():
    module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    module[0].weight.grad = torch.ones(5, 3)
    state = compared(module, accumulates=True)
    sizes = []
    state.copy(lambda size: sizes.append(size) or memory(size))
    largest = state.bytes
    module[0].bias.grad = torch.ones(5)
    for one in module[1].parameters():
        one.grad = torch.ones(5)
    state.copy(lambda size: sizes.append(size) or memory(size))
    assert sizes[0] < sizes[1] == largest == state.bytes


def test_gradients_are_compared_and_put_back():
    module = nn.Linear(2, 2)
    module.weight.grad = gradient = torch.ones(2, 2)
    state = compared(module, accumulates=True)
    before, digests = state.copy(memory), state.digests()
    gradient.add_(1)
    assert state.difference(before) == state.difference(digests) == "the gradient of parameter 0"
    module.weight.grad = None
    assert state.difference(before) == state.difference(digests) == "whether there is a gradient of parameter 0"
    module.bias.grad = torch.ones(2)
    module.weight.grad = gradient
    assert state.difference(before) == state.difference(digests) == "whether there is a gradient of parameter 1"
    state.put_back(before)
    assert module.bias.grad is None
    assert module.weight.grad is gradient
    assert torch.equal(gradient, torch.ones(2, 2))


@pytest.mark.parametrize("counts", [False, True])
def test_what_is_on_another_device_is_compared(counts, monkeypatch):
    """A replay writes nothing on the host, where an eager step may count."""
    if counts:
        monkeypatch.setattr(compared_state, "_MOST_ELSEWHERE", 7)
    module = nn.Linear(2, 2)
    module.register_buffer("seen", torch.zeros(2))
    state = compared(module, device=torch.device("meta"))
    before, digests = state.copy(memory), state.digests()
    assert (state.difference(before), state.difference(digests)) == ("", "")
    module.seen.add_(1)
    assert state.difference(before) == state.difference(digests) == "seen, which is on cpu"
    if not counts:
        state.put_back(before)
        assert module.seen.tolist() == [0, 0]


def test_a_sparse_state_is_refused_by_name():
    module = nn.Linear(2, 2)
    module.register_buffer("few", torch.eye(3).to_sparse())
    with pytest.raises(NotCapturableError, match=r"few has the layout torch.sparse_coo, .* CudaGraph\(compare=False\)"):
        compared(module)


def test_tensors_that_differ_in_a_byte_are_found(monkeypatch):
    monkeypatch.setattr("fabricamp.ops.tensors._SLICE", 16)
    rows = [
        torch.zeros(9),
        torch.zeros(5, dtype=torch.bfloat16),
        torch.zeros(3, 4).t(),
        torch.zeros(0),
        torch.zeros(8)[::2],
    ]
    assert differing(rows, [row.clone() for row in rows]) == [False] * 5
    others = [row.clone() for row in rows]
    others[0][8] = -0.0
    others[1][4] = torch.nan
    others[2][3, 2] = 1
    others[4][3] = 1
    assert differing(rows, others) == [True, True, True, False, True]
    assert differing([], []) == []


@pytest.mark.parametrize("place", [0, 1, 3])
def test_bytes_at_other_addresses_are_compared(place):
    values = torch.arange(40, dtype=torch.float32)
    elsewhere = torch.zeros(44)[place : place + 40]
    elsewhere.copy_(values)
    assert differing([values, elsewhere], [elsewhere, values]) == [False, False]
    elsewhere[7] = -1
    assert differing([values, elsewhere], [elsewhere, values]) == [True, True]
