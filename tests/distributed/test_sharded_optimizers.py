"""Fused optimizers with norms of full parameters, on local shards: four ranks, uneven and empty shards, replicated copies."""

from __future__ import annotations

import contextlib
import itertools
import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fabricamp import ops
from fabricamp.ops import bridge, table
from fabricamp.optimizers import LARC, FusedAdam, FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad, FusedSGD
from tests.cuda_on_cpu.compiler import compiler
from tests.distributed.ranks import run_ranks

SIZES = [(33, 3), (1,), (5,), (16, 2), (4,)]
"""Over four ranks the shards differ in size and some are empty; the last parameter has no gradient in the first step."""
KINDS = {
    "LAMB": lambda given: FusedLAMB(given, lr=0.1, eps=1e-3),
    "LAMB l2": lambda given: FusedLAMB(given, lr=0.1, eps=1e-3, adam_w_mode=False, max_grad_norm=None),
    "NVLAMB": lambda given: FusedLAMB(given, lr=0.1, eps=1e-3, weight_decay=0.0, use_nvlamb=True),
    "mixed precision LAMB": lambda given: FusedMixedPrecisionLamb(given, lr=0.1, eps=1e-3),
    "NovoGrad": lambda given: FusedNovoGrad(given, lr=0.1, weight_decay=0.1),
    "NovoGrad of both norms": lambda given: FusedNovoGrad(
        [{"params": given[:2], "norm_type": 0}, {"params": given[2:], "reg_inside_moment": True}], lr=0.1
    ),
    "LARC": lambda given: LARC(FusedSGD(given, lr=0.1, momentum=0.9, weight_decay=0.1)),
    "LARC without a limit": lambda given: LARC(torch.optim.SGD(given, lr=0.1, weight_decay=0.1), clip=False),
    "Adam": lambda given: FusedAdam(given, lr=0.1),
}
PLACES = {
    "parts": ((4,), [[Shard(0)]]),
    "copies of parts": ((2, 2), [[Replicate(), Shard(0)]]),
    "parts of parts, and of some": ((2, 2), [[Shard(0), Shard(0)], [Shard(0), Replicate()]]),
}


def trained(kind, share, steered):
    """Returns parameters and state after some steps; ``share`` shards a full tensor."""
    generator = torch.Generator().manual_seed(3)
    whole = [torch.randn(size, generator=generator, dtype=torch.float64) for size in SIZES]
    weights = [nn.Parameter(share(index, one)) for index, one in enumerate(whole)]
    optimizer = KINDS[kind](weights)
    for number in range(3):
        for index, one in enumerate(weights):
            gradient = torch.randn(SIZES[index], generator=generator, dtype=torch.float64)
            one.grad = None if number == 0 and index == len(SIZES) - 1 else share(index, gradient)
        if steered and not isinstance(optimizer, LARC):
            state = ops.StepState.on(torch.device("cpu"))
            state.found_inf.fill_(float(number == 1))
            state.multiplier.fill_(0.5)
            optimizer.gather()
            optimizer.steer(state, limit=0.3)
        optimizer.step()
    states = [value for one in weights for _, value in sorted(optimizer.state[one].items()) if value is not None]
    return [one.detach() for one in (*weights, *states)]


def distance(part, whole):
    """Returns the largest difference of this rank's values from those of ``whole``."""
    if isinstance(part, DTensor):
        part, whole = (one.to_local() for one in (part, parts_of(whole, part.device_mesh, part.placements)))
    return float((part - whole).abs().max()) if part.numel() else 0.0


def parts_of(whole, mesh, placements):
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def full(by_kernels):
    """Returns full parameters and states of one process, by optimizer and whether it is steered."""
    with by_kernels_on_cpu() if by_kernels else contextlib.nullcontext():
        return {cell: trained(cell[0], lambda _, one: one, cell[1]) for cell in itertools.product(KINDS, (False, True))}


def furthest(by_kernels, alone):
    """Returns the largest difference of sharded from full parameters, by optimizer and placements."""
    found = {}
    with by_kernels_on_cpu() if by_kernels else contextlib.nullcontext():
        for place, (shape, placements) in PLACES.items():
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])

            def share(index, one, mesh=mesh, placements=placements):
                return parts_of(one, mesh, placements[index % len(placements)])

            for kind in KINDS:
                for steered in (False, True) if place == "parts" else (False,):
                    parts = trained(kind, share, steered)
                    found[place, kind, steered] = max(map(distance, parts, alone[kind, steered]))
    return found


@contextlib.contextmanager
def by_kernels_on_cpu():
    before = table.CHUNK_SIZE, table.THREADS
    bridge.COMPILERS["cpu"] = compiler(False)
    table.CHUNK_SIZE, table.THREADS = 8, 64
    try:
        yield
    finally:
        del bridge.COMPILERS["cpu"]
        table.CHUNK_SIZE, table.THREADS = before


def on_each_rank(references, kernels):
    return {"references": furthest(False, references), "kernels": furthest(True, kernels), "bad": overflown()}


def overflown():
    """Returns NovoGrad's averaged norm (with the infinity norm) of a gradient that has a nan or an inf on one rank."""
    mesh, found = init_device_mesh("cpu", (4,)), {}
    for bad in (math.nan, math.inf):
        for by_kernels in (False, True):
            with by_kernels_on_cpu() if by_kernels else contextlib.nullcontext():
                weight = nn.Parameter(parts_of(torch.ones(8), mesh, [Shard(0)]))
                weight.grad = parts_of(torch.tensor([1.0] * 7 + [bad]), mesh, [Shard(0)])
                optimizer = FusedNovoGrad([weight], lr=0.1, norm_type=0)
                optimizer.step()
                found[str(bad), by_kernels] = float(optimizer.state[weight]["exp_avg_norm"])
    return found


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(on_each_rank, 4, full(False), full(True))


@pytest.mark.parametrize("by", ["references", "kernels"])
def test_parts_are_updated_as_the_whole_is(ranks, by):
    for one in ranks:
        assert len(one[by]) == len(KINDS) * (len(PLACES) + 1)
        assert {cell: apart for cell, apart in one[by].items() if not apart < 1e-12} == {}


def test_a_value_of_one_rank_that_is_not_finite_reaches_the_norm_of_all(ranks):
    for one in ranks:
        assert [str(value) for value in one["bad"].values()] == ["nan", "nan", "inf", "inf"]
