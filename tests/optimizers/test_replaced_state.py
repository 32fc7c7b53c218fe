"""State that is cleared, replaced, or moved away and back between steps: the same results as with torch's AdamW."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import weakref
from collections import defaultdict

import pytest
import torch
from torch import nn

from fabricamp import ops
from fabricamp.optimizers import FusedAdam, FusedMixedPrecisionLamb, FusedNovoGrad, FusedSGD, UnsupportedError
from fabricamp.optimizers.base import ParameterState, WatchedState
from tests.cuda_on_cpu.compiler import one_order, references

SHAPES = (3, 4), (70,), (2, 3, 2, 2)


class Pair:
    """Equal parameters for FusedAdam and for torch's AdamW, given equal gradients."""

    def __init__(self, device):
        self.device, self.steps = device, 0
        self.mine, self.theirs = (
            [nn.Parameter(torch.ones(shape, device=device)) for shape in SHAPES] for _ in range(2)
        )
        self.optimizer = FusedAdam(self.mine, lr=0.1, weight_decay=0.1)
        self.reference = torch.optim.AdamW(self.theirs, lr=0.1, weight_decay=0.1)

    def both(self):
        return (self.optimizer, self.mine), (self.reference, self.theirs)

    def step(self, times=1):
        for _ in range(times):
            self.steps += 1
            generator = torch.Generator().manual_seed(self.steps)
            for own, other in zip(self.mine, self.theirs, strict=True):
                own.grad = torch.randn(own.shape, generator=generator).to(self.device)
                other.grad = own.grad.clone()
            self.optimizer.step()
            self.reference.step()
            for own, other in zip(self.mine, self.theirs, strict=True):
                torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
            mine, theirs = self.optimizer.state_dict()["state"], self.reference.state_dict()["state"]
            assert mine.keys() == theirs.keys()
            for key, entry in theirs.items():
                assert mine[key].keys() == entry.keys()
                for name, tensor in entry.items():
                    torch.testing.assert_close(mine[key][name].cpu(), tensor.cpu(), rtol=1e-5, atol=1e-6)


def clear(optimizer, _):
    optimizer.state.clear()


def take_another(optimizer, _):
    optimizer.state = defaultdict(dict)


def delete_one(optimizer, parameters):
    del optimizer.state[parameters[1]]


def pop_one(optimizer, parameters):
    optimizer.state.pop(parameters[1])


def pop_any(optimizer, _):
    while optimizer.state:
        optimizer.state.popitem()


def replace_a_tensor(optimizer, parameters):
    optimizer.state[parameters[0]]["exp_avg"] = torch.zeros_like(parameters[0])


def replace_by_update(optimizer, parameters):
    optimizer.state[parameters[1]].update(exp_avg_sq=torch.full_like(parameters[1], 0.25))
    optimizer.state[parameters[2]] |= {"exp_avg": torch.ones_like(parameters[2])}


def replace_an_entry(optimizer, parameters):
    entry = {}
    optimizer.state[parameters[1]] = entry
    entry["step"] = torch.tensor(5.0)  # written before anything has read the entry
    entry["exp_avg"] = torch.ones_like(parameters[1])
    entry["exp_avg_sq"] = torch.ones_like(parameters[1])


def count_anew(optimizer, parameters):
    optimizer.state[parameters[0]]["step"] = torch.tensor(0.0)


def move_away_and_back(optimizer, parameters):
    """Moves the moments to the host and back, as offloading programs do; the moved values have to be used."""
    for parameter in parameters:
        entry = optimizer.state[parameter]
        for name in ("exp_avg", "exp_avg_sq"):
            entry[name] = entry[name].to("cpu", copy=True) * 0.5
    for parameter in parameters:
        entry = optimizer.state[parameter]
        for name in ("exp_avg", "exp_avg_sq"):
            entry[name] = entry[name].to(parameter.device, copy=True)


def copy_everything(optimizer, _):
    optimizer.state = copy.copy(optimizer.state)
    for parameter, entry in optimizer.state.items():
        optimizer.state[parameter] = {name: tensor * 0.5 for name, tensor in entry.items()}


CHANGES = [
    clear,
    take_another,
    delete_one,
    pop_one,
    pop_any,
    replace_a_tensor,
    replace_by_update,
    replace_an_entry,
    count_anew,
    move_away_and_back,
    copy_everything,
]


@pytest.mark.parametrize("by_kernels", [True, False])
@pytest.mark.parametrize("change", CHANGES)
@one_order
def test_what_was_changed_is_what_the_next_step_reads(kernel_device, change, by_kernels):
    with contextlib.nullcontext() if by_kernels else references(kernel_device):
        pair = Pair(kernel_device)
        pair.step(2)
        for _ in range(2):
            for optimizer, parameters in pair.both():
                change(optimizer, parameters)
            pair.step(2)


@one_order
def test_a_change_between_gather_and_step_waits_for_the_next_gather(kernel_device):
    pair = Pair(kernel_device)
    pair.step(2)
    state = ops.StepState.on(kernel_device)
    for own, other in zip(pair.mine, pair.theirs, strict=True):
        own.grad = torch.ones_like(own)
        other.grad = torch.ones_like(other)
    for optimizer, parameters in pair.both():
        clear(optimizer, parameters)
    pair.optimizer.gather()
    pair.optimizer.steer(state)
    pair.optimizer.step()
    pair.reference.step()
    pair.step()


@one_order
def test_copies_and_pickles_are_plain_and_go_on(kernel_device):
    pair = Pair(kernel_device)
    pair.step(2)
    assert type(pair.optimizer.state) is WatchedState
    assert {type(entry) for entry in pair.optimizer.state.values()} == {ParameterState}
    saved = pair.optimizer.state_dict()
    assert {type(entry) for entry in saved["state"].values()} == {dict}
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    for state in (copy.deepcopy(pair.optimizer.state), pickle.loads(pickle.dumps(pair.optimizer.state))):
        assert type(state) is defaultdict
        assert state["new"] == {}
        assert {type(entry) for entry in state.values()} == {dict}
    twins = copy.deepcopy(pair.optimizer), pickle.loads(pickle.dumps(pair.optimizer))
    for twin in twins:
        own = twin.param_groups[0]["params"]
        for one, mine in zip(own, pair.mine, strict=True):
            assert torch.equal(twin.state[one]["exp_avg"], pair.optimizer.state[mine]["exp_avg"])
    fresh = FusedAdam([nn.Parameter(one.detach().clone()) for one in pair.mine], lr=0.1, weight_decay=0.1)
    fresh.load_state_dict(loaded)
    pair.step()
    for twin in (*twins, fresh):
        own = twin.param_groups[0]["params"]
        for one, mine in zip(own, pair.mine, strict=True):
            one.grad = mine.grad.clone()
        twin.step()
        assert all(torch.equal(one, mine) for one, mine in zip(own, pair.mine, strict=True))
        twin.state.clear()  # does not clear the others' state
        twin.step()
        assert {entry["step"].item() for entry in twin.state.values()} == {1.0}
    pair.step()


@one_order
def test_notes_of_others_cost_no_new_rows(kernel_device, monkeypatch):
    pair = Pair(kernel_device)
    pair.step(2)
    monkeypatch.setattr(FusedAdam, "_build", None)
    for number in range(2):
        for parameter in pair.mine:
            pair.optimizer.state[parameter]["note"] = number
        before = pair.optimizer.state
        for one in pair.mine:
            one.grad = torch.ones_like(one)
        pair.optimizer.step()
        assert pair.optimizer.state is before
    assert pair.optimizer.state_dict()["state"][0]["note"] == 1


@one_order
def test_state_goes_with_the_optimizer(kernel_device):
    weight = nn.Parameter(torch.ones(3, device=kernel_device))
    weight.grad = torch.ones_like(weight)
    optimizer = FusedAdam([weight])
    optimizer.step()
    average = weakref.ref(optimizer.state[weight]["exp_avg"])
    gc.disable()  # without reference cycles, deleting the optimizer frees its memory at once
    try:
        del optimizer
        assert average() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("by_kernels", [True, False])
@one_order
def test_other_kinds_of_state(kernel_device, by_kernels):
    """A removed buffer starts again; a cell may be any number; groups apply to their own parameters."""
    with contextlib.nullcontext() if by_kernels else references(kernel_device):
        mine, theirs = (nn.Parameter(torch.ones(5, device=kernel_device)) for _ in range(2))
        one = FusedSGD([mine], lr=0.1, momentum=0.9, dampening=0.5)
        other = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, dampening=0.5)
        for step in range(5):
            mine.grad, theirs.grad = torch.full_like(mine, step + 1.0), torch.full_like(theirs, step + 1.0)
            if step == 2:
                one.state.clear()
                other.state.clear()
            if step == 3:
                one.state[mine]["momentum_buffer"] = torch.full_like(mine, 2.0)
                other.state[theirs]["momentum_buffer"] = torch.full_like(theirs, 2.0)
            one.step()
            other.step()
            torch.testing.assert_close(mine, theirs)
        novograd = FusedNovoGrad([mine], lr=0.1)
        lamb = FusedMixedPrecisionLamb([mine], lr=0.1)
        for optimizer in (novograd, lamb):
            optimizer.step()
            optimizer.step()
        novograd.state[mine]["step"] = 7
        novograd.state[mine]["exp_avg_norm"] = torch.tensor([4], dtype=torch.int32)
        novograd.step()
        assert novograd.state[mine]["step"].item() == 8.0
        assert 3.5 < novograd.state[mine]["exp_avg_norm"].item() < 11.2
        lamb.state.clear()
        lamb.step()
        assert lamb.state[mine]["step"] is lamb.param_groups[0]["step"]
        assert lamb.param_groups[0]["step"].item() == 3.0


@pytest.mark.parametrize("by_kernels", [True, False])
@pytest.mark.parametrize(
    ("bad", "found"),
    [
        (lambda p: torch.zeros(3), r"shape \(3,\)"),
        (lambda p: torch.zeros_like(p, device="meta"), "on meta"),
        (lambda p: torch.zeros_like(p, dtype=torch.int32), "torch.int32"),
        (lambda p: "gone", "'gone'"),
    ],
)
@one_order
def test_a_state_that_a_step_cannot_read_is_refused_by_name(kernel_device, bad, found, by_kernels):
    with contextlib.nullcontext() if by_kernels else references(kernel_device):
        pair = Pair(kernel_device)
        pair.step()
        pair.optimizer.state[pair.mine[1]]["exp_avg"] = bad(pair.mine[1])
        with pytest.raises(UnsupportedError, match=f"{found}.* as 'exp_avg' in the state of parameter 1 of group 0"):
            pair.optimizer.step()
        pair.optimizer.state[pair.mine[1]]["exp_avg"] = pair.reference.state[pair.theirs[1]]["exp_avg"].clone()
        pair.step()
