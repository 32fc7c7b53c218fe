"""Gather by its kernel, against float64: sources with new addresses, missing, in other memory orders, or already in their slots."""

from __future__ import annotations

import pytest
import torch

from fabricamp import ops
from tests.ops.lists import FLOATS, all_pairs, assert_near, tensors


def test_all_pairs_of_dtypes(kernel_device):
    sources, slots = all_pairs(kernel_device)
    ops.Gather(slots)(sources, 0.375)
    for source, slot in zip(sources, slots, strict=True):
        assert_near(slot, source.double() * 0.375)


@pytest.mark.parametrize("dtype", FLOATS)
def test_sources_move_and_come_in_any_layout(kernel_device, dtype):
    like = tensors(kernel_device, dtype)
    slots = [torch.empty_like(one) for one in like]
    gather = ops.Gather(slots)
    for seed in range(1, 5):
        sources = tensors(kernel_device, dtype, seed=seed)
        if seed == 3:
            sources = [one.t().contiguous().t() if one.dim() == 2 else one for one in sources]
        if seed == 4:
            sources = [one.float() for one in sources]
        gather(sources, 0.5)
        for source, slot in zip(sources, slots, strict=True):
            assert_near(slot, source.double() * 0.5)


def test_missing_sources_leave_their_slots(kernel_device):
    slots = list(torch.ones(300, device=kernel_device).split([100, 150, 50]))
    gather = ops.Gather(slots)
    for missing in ((1,), (), (0, 2), (0, 1, 2), (1,)):
        sources = [None if place in missing else torch.full_like(slot, 6.0) for place, slot in enumerate(slots)]
        for slot in slots:
            slot.fill_(1.0)
        gather(sources, 0.5)
        for place, slot in enumerate(slots):
            assert slot.eq(1.0 if place in missing else 3.0).all()


def test_what_is_in_its_slot_already_is_multiplied_there(kernel_device):
    flat = torch.arange(200.0, device=kernel_device)
    slots = list(flat.split([70, 130]))
    gather = ops.Gather(slots)
    gather([slots[0], torch.ones(130, device=kernel_device)], 2.0)
    gather([torch.ones(70, device=kernel_device), slots[1]], 2.0)
    assert flat[:70].eq(2.0).all()
    assert flat[70:].eq(4.0).all()


def test_nothing_to_gather(kernel_device):
    ops.Gather([])([])


def test_infinities_and_nans_arrive(kernel_device):
    slot = torch.zeros(3, device=kernel_device, dtype=torch.float16)
    ops.Gather([slot])([torch.tensor([float("inf"), float("nan"), 1e6], device=kernel_device)], 1.0)
    assert slot.isinf().tolist() == [True, False, True]
    assert slot.isnan().tolist() == [False, True, False]
