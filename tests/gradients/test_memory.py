"""Sums of gradients in flat memory: the sums, the parameters with gradients, and the number of operations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fabricamp.gradients.flat import IN_PLACE
from fabricamp.gradients.memory import GradientMemory

SHAPES = [(3, 4), (), (5,), (2, 3, 4, 5), (0,), (70,)]
DTYPES = [torch.float16, torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.float64]


def parameters():
    made = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in zip(SHAPES, DTYPES, strict=True)]
    made[3].data = made[3].data.to(memory_format=torch.channels_last)
    return made


def backward(owners, seed, skip=()):
    generator = torch.Generator().manual_seed(seed)
    for index, one in enumerate(owners):
        if index not in skip:
            one.grad = torch.randn(one.shape, generator=generator).to(one.dtype)


def test_micro_batches_are_summed_in_fp32_at_least():
    owners = parameters()
    memory = GradientMemory(owners, sums=True)
    for window in range(2):
        expected = [torch.zeros(one.shape, dtype=torch.promote_types(one.dtype, torch.float32)) for one in owners]
        for micro in range(3):
            backward(owners, 10 * window + micro)
            for total, one in zip(expected, owners, strict=True):
                total.add_(one.grad.to(total.dtype))
            memory.add()
            assert all(one.grad is None for one in owners)
        found = memory.local()
        assert found.tensors is memory.flat.tensors
        for total, one, owner in zip(expected, found.tensors, owners, strict=True):
            assert torch.equal(total, one)
            assert one.stride() == owner.stride()
        assert memory.flat.flags.tolist() == [1.0] * len(owners)
        memory.clear()
        assert all(not tensor.any() for tensor in memory.tensors)


def test_a_parameter_takes_part_that_any_micro_batch_reached():
    owners = parameters()
    memory = GradientMemory(owners, sums=True)
    for skip in ((0, 3), (0, 1, 2)):
        backward(owners, 1, skip)
        memory.add()
    assert [one is not None for one in memory.local().tensors] == [False, True, True, True, True, True]
    assert memory.flat.flags.tolist() == [0, 1, 1, 1, 1, 1]
    other = GradientMemory(parameters(), sums=True)
    other.take([tensor.clone() for tensor in memory.tensors])
    for mine, theirs in zip(memory.local().tensors, other.local().tensors, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine, theirs)


def test_parameters_that_come_later_leave_the_sums_as_they_are():
    owners = parameters()
    memory = GradientMemory(owners[2:], sums=True)
    backward(owners[2:], 1, skip=(1,))
    memory.add()
    before = [None if one is None else one.clone() for one in memory.local().tensors]
    memory.hold(owners)
    for one, kept in zip(memory.local().tensors, [None, None, *before], strict=True):
        assert (one is None) == (kept is None)
        assert one is None or torch.equal(one, kept)
    assert memory.flat.flags.tolist() == [0, 0, 1, 0, 1, 1]


def test_without_sums_gradients_stay_where_autograd_left_them():
    memory = GradientMemory(parameters())
    assert memory.local() is IN_PLACE
    assert memory.tensors == []


class Fills(TorchDispatchMode):
    """Counts the operations that write one number into a tensor."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "fill_" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("count", [2, 40])
def test_a_window_begins_with_one_fill_for_all_flags(count):
    owners = [nn.Parameter(torch.zeros(3, dtype=torch.float16)) for _ in range(count)]
    memory = GradientMemory(owners, sums=True)
    fills = []
    for micro in range(3):
        backward(owners, micro)
        with Fills() as seen:
            memory.add()
        fills.append(seen.count)
    assert fills == [1, 0, 0]


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=12),
    st.integers(1, 400),
    st.sets(st.integers(0, 11)),
)
@settings(max_examples=60, deadline=None)
def test_pieces_of_a_message_hold_each_slot_once_and_are_full(sizes, elements, triggers):
    parameters = [torch.zeros(size) for size in sizes]
    chosen = {id(parameters[index]) for index in triggers if index < len(sizes)}
    memory = GradientMemory(parameters, sums=True)
    (message,) = memory.flat.messages
    covered = 0
    pieces = message.pieces(elements, chosen)
    for piece in pieces:
        assert piece.start == covered
        assert piece.stop > piece.start
        covered = piece.stop
    assert covered == message.flat.numel()
    ends = [view.data_ptr() + view.nbytes for view in message.views]
    starts = [view.data_ptr() for view in message.views]
    for piece in pieces[:-1]:
        own = message.flat[piece]
        within = [index for index, start in enumerate(starts) if own.data_ptr() <= start < own.data_ptr() + own.nbytes]
        assert ends[within[-1]] <= own.data_ptr() + own.nbytes  # no slot is cut
        if chosen:
            assert id(message.members[within[-1]]) in chosen
        else:
            assert own.numel() >= elements
