"""Wrapper tensors without memory of their own are refused by name, except shards (DTensors)."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor

from fabricamp import ops
from fabricamp.optimizers import (
    LARC,
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedLion,
    FusedNovoGrad,
    FusedSGD,
    UnsupportedError,
)
from tests.cuda_on_cpu.compiler import one_order, references

KINDS = [FusedAdagrad, FusedAdam, FusedLAMB, FusedLion, FusedNovoGrad, FusedSGD]


@pytest.fixture(scope="module")
def mesh():
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield torch.distributed.init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_around_others_are_refused(kind):
    plain, other = nn.Parameter(torch.ones(3)), nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2)))
    with pytest.raises(UnsupportedError, match=r"parameter 1 of group 0 as TwoTensor.*torch.optim.AdamW"):
        kind([plain, other], lr=0.1)
    with pytest.raises(UnsupportedError, match=r"parameter 1 of group 0 \('late'\) as TwoTensor"):
        kind([("early", plain), ("late", other)], lr=0.1)
    optimizer = kind([plain], lr=0.1)
    with pytest.raises(UnsupportedError, match=r"parameter 0 of group 1 as TwoTensor"):
        optimizer.add_param_group({"params": [other]})


@pytest.mark.parametrize("kind", KINDS)
@one_order
def test_of_shards_a_rank_updates_its_part(mesh, kernel_device, kind):
    here = mesh if kernel_device.type == "cpu" else torch.distributed.init_device_mesh("cuda", (2,))

    def stepped(make):
        own = torch.arange(6.0, device=kernel_device).view(2, 3)
        weights = [nn.Parameter(make(own)), nn.Parameter(torch.ones(3, device=kernel_device))]
        optimizer = kind(weights, lr=0.1)
        for _ in range(2):
            for one in weights:
                one.grad = torch.ones_like(one)
            optimizer.step()
        return [getattr(one, "_local_tensor", one).detach() for one in weights]

    parts = stepped(lambda own: DTensor.from_local(own, here, [Shard(0)]))
    assert all(map(torch.equal, parts, stepped(lambda own: own)))
    # A rank may have an empty shard of a parameter.
    none = torch.ones(0, 3, device=kernel_device)
    nothing = nn.Parameter(DTensor.from_local(none, here, [Shard(0)], shape=(1, 3), stride=(3, 1)))
    nothing.grad = torch.ones_like(nothing)
    optimizer = kind([nothing], lr=0.1)
    optimizer.step()
    assert optimizer.state_dict()


@pytest.mark.parametrize("by_kernels", [True, False])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("larc", [True, False])
@one_order
def test_gradients_around_others_are_refused(mesh, kernel_device, first, larc, by_kernels):
    with contextlib.nullcontext() if by_kernels else references(kernel_device):
        weights = [nn.Parameter(torch.ones(4, 3, device=kernel_device)) for _ in range(2)]
        optimizer = FusedAdam(weights, lr=0.1)
        stepped = LARC(optimizer) if larc else optimizer
        for one in weights:
            one.grad = torch.ones_like(one)
        if not first:
            stepped.step()
        before = weights[0].clone()
        here = mesh if kernel_device.type == "cpu" else torch.distributed.init_device_mesh("cuda", (2,))
        weights[1].grad = DTensor.from_local(torch.ones(2, 3, device=kernel_device), here, [Shard(0)])
        with pytest.raises(UnsupportedError, match="got the gradient of parameter 1 of group 0 as DTensor"):
            stepped.step()
        assert torch.equal(weights[0], before)
        weights[1].grad = torch.ones_like(weights[1])
        stepped.step()
        assert not torch.equal(weights[0], before)


@one_order
def test_elements_without_memory_are_an_error_in_every_table(mesh, kernel_device):
    whole = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
    plain = torch.ones(4, 3, device=kernel_device)
    if kernel_device.type == "cpu":
        for call in (lambda: ops.l2norm([plain, whole]), lambda: ops.copy_cast([plain], [whole])):
            with pytest.raises(ValueError, match="DTensor on cpu whose 12 elements are not in memory of its own"):
                call()
    freed = torch.ones(5, device=kernel_device)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="not in memory of its own"):
        ops.l2norm([freed])
    # Also if it replaces a valid tensor of an earlier call.
    gather, source = ops.Gather(plain.view(-1).clone().split([6, 6])), list(plain.view(-1).split([6, 6]))
    gather(source)
    empty = torch.ones(6, device=kernel_device)
    empty.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="no memory of its own"):
        gather([source[0], empty])
    ops.l2norm([torch.ones(0, device=kernel_device), plain])  # no elements: nothing to read
