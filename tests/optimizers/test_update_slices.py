"""A slice of an update writes its rows alone, in eager steps and in replays; afterwards the whole update is as before."""

from __future__ import annotations

import pytest
import torch

from fabricamp.engine.graph.update_slices import UpdateSlices
from fabricamp.optimizers import (
    LARC,
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedLion,
    FusedNovoGrad,
    FusedSGD,
)
from tests.cuda_on_cpu.capture import graphs
from tests.cuda_on_cpu.compiler import kernel_device, one_order

__all__ = ["graphs", "kernel_device"]

SIZES = [(70,), (3, 5), (), (200,), (1,), (33, 2)]
MAKES = {
    "FusedAdagrad": lambda rows: FusedAdagrad(rows, lr=0.1),
    "FusedAdam": lambda rows: FusedAdam(rows, lr=0.1),
    "FusedLAMB": lambda rows: FusedLAMB(rows, lr=0.1),
    "FusedLion": lambda rows: FusedLion(rows, lr=0.1),
    "FusedNovoGrad": lambda rows: FusedNovoGrad(rows, lr=0.1),
    "FusedSGD": lambda rows: FusedSGD(rows, lr=0.1, momentum=0.9),
    "LARC": lambda rows: LARC(FusedSGD(rows, lr=0.1, momentum=0.9)),
}
BY_THEMSELVES = {"FusedAdagrad", "FusedAdam", "FusedLion", "FusedSGD"}
"""The rules whose rows do not depend on other rows or on norms."""


def parameters(device):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(size, generator=generator).to(device).requires_grad_() for size in SIZES]
    for one in made:
        one.grad = torch.randn(one.shape, generator=generator).to(device)
    return made


def state_of(optimizer):
    """Returns copies of all that an update writes, by parameter."""
    rows = [row for group in optimizer.param_groups for row in group["params"]]
    return [[row.detach().clone(), *(one.clone() for one in optimizer.state[row].values())] for row in rows]


def changed(before, after):
    return [not all(map(torch.equal, *pair)) for pair in zip(before, after, strict=True)]


@one_order
@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_slice_writes_its_rows_alone(kernel_device, graphs, name, count):
    rows = parameters(kernel_device)
    optimizer = MAKES[name](rows)
    optimizer.step()
    graph = graphs()
    with graph:
        optimizer.step()
    twin_rows = parameters(kernel_device)
    twin = MAKES[name](twin_rows)
    twin.step()
    kept = [one.grad.clone() for one in rows]
    slices = UpdateSlices(optimizer)
    assert not slices.why_not
    parts = slices.split(count)
    assert sorted(row.number for part in parts for row in part) == list(range(len(SIZES)))
    for part in parts:
        chosen = [number in {row.number for row in part} for number in range(len(SIZES))]
        for run in (optimizer.step, graph.replay):
            before = state_of(optimizer)
            with slices.only(part):
                run()
            after = state_of(optimizer)
            assert changed(before, after) == chosen
            for one, values in zip(rows, before, strict=True):
                with torch.no_grad():
                    for tensor, value in zip([one, *optimizer.state[one].values()], values, strict=True):
                        tensor.copy_(value)
            if name in BY_THEMSELVES:
                whole = state_of(twin)
                twin.step()
                for number, moved in enumerate(state_of(twin)):
                    assert all(map(torch.equal, moved, after[number])) is chosen[number]
                for one, values in zip(twin_rows, whole, strict=True):
                    with torch.no_grad():
                        for tensor, value in zip([one, *twin.state[one].values()], values, strict=True):
                            tensor.copy_(value)
            for one, value in zip(rows, kept, strict=True):  # LARC scales them in place
                one.grad.copy_(value)
    for run in (optimizer.step, graph.replay, optimizer.step):
        run()
        twin.step()
        assert changed(state_of(optimizer), state_of(twin)) == [False] * len(SIZES)
        for one, other, value in zip(rows, twin_rows, kept, strict=True):
            one.grad.copy_(value)
            other.grad.copy_(value)


def test_slices_have_about_as_many_bytes():
    slices = object.__new__(UpdateSlices)
    slices._rows = [
        type("Row", (), {"bytes": size, "number": number}) for number, size in enumerate([4, 4, 8, 0, 16, 2, 2])
    ]
    for count in (1, 2, 3, 8):
        parts = slices.split(count)
        assert len(parts) == count
        assert [row.number for part in parts for row in part] == list(range(7))
    assert [sum(row.bytes for row in part) for part in slices.split(2)] == [16, 20]
    slices._rows = []
    assert slices.split(2) == [[], []]


def test_why_an_update_has_no_slices():
    weight = torch.nn.Parameter(torch.ones(2))
    assert UpdateSlices(torch.optim.SGD([weight], lr=0.1)).why_not.startswith("no part of SGD's update can be left out")
    weight.grad = torch.ones(2)
    optimizer = FusedAdam([weight], lr=0.1)
    optimizer.step()
    assert (
        UpdateSlices(optimizer).why_not
        == "no part of FusedAdam's update can be left out of a replay without kernels; install CuPy"
    )
