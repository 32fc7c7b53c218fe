"""DDP over NCCL on two GPUs: a few of the same checks, and that the host does not wait for the exchange."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fabricamp.gradients.memory import GradientMemory
from fabricamp.strategies import DDP, Environment
from fabricamp.strategies.host_ranks import host_ranks
from tests.distributed import test_nan_of_a_rank as nan_of_a_rank
from tests.distributed.ranks import run_ranks
from tests.windows import summed

pytestmark = [
    pytest.mark.gpu2,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]


def started(**options):
    rank = int(os.environ["RANK"])
    strategy = DDP(timeout=60, **options)
    environment = Environment(rank=rank, local_rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    strategy.setup_environment(environment, torch.device("cuda", rank))
    return strategy


def check_bitwise(strategy):
    torch.manual_seed(strategy.rank)
    ours = nn.Sequential(nn.Linear(64, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 10)).to(strategy.device)
    theirs = DistributedDataParallel(copy.deepcopy(ours), device_ids=[strategy.rank])
    step = strategy.wrap_module(ours, lambda batch: ours(batch).square().mean(), automatic=True, accumulates=True)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]
    for _ in range(4):
        batches = torch.randn(2, 16, 64, device=strategy.device)
        for optimizer in optimizers:
            optimizer.zero_grad()
        with strategy.no_sync(), theirs.no_sync():
            step(batches[0]).backward()
            theirs(batches[0]).square().mean().backward()
        step(batches[1]).backward()
        theirs(batches[1]).square().mean().backward()
        strategy.reduce_gradients()
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(ours.state_dict().values(), theirs.module.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def check_values(strategy):
    rank = strategy.rank
    assert strategy.reduce(torch.tensor(2.0 * rank)).item() == 1.0  # NCCL itself refuses host memory
    assert strategy.reduce(torch.tensor(rank == 1, device=strategy.device), "max").item() is True
    assert strategy.reduce(torch.tensor(2**60 + rank, device=strategy.device), "sum").item() == 2**61 + 1
    assert strategy.all_gather(torch.tensor([rank], dtype=torch.int16)).tolist() == [[0], [1]]
    assert strategy.broadcast({"rank": rank}, src=1) == {"rank": 1}
    assert strategy.all_gather_object(rank) == [0, 1]
    strategy.barrier()


def check_manual(strategy):
    parameters = [
        nn.Parameter(torch.zeros(9, 3, device=strategy.device, dtype=dtype)) for dtype in (torch.half, torch.float)
    ]
    strategy.wrap_module(nn.ParameterList(parameters), len, automatic=False)
    for window in range(3):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 2.0 * strategy.rank + window)
        sums = summed(*(torch.full((1000,), float(strategy.rank), device=strategy.device) for _ in range(3)))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if window else "default")
        strategy.reduce_gradients(GradientMemory(parameters))
        strategy.reduce_gradients(sums)
        torch.cuda.set_sync_debug_mode("default")
        assert all(parameter.grad.eq(1.0 + window).all() for parameter in parameters)
        assert all(total.eq(0.5).all() for total in sums.flat.tensors)
    parameters[0].grad = None
    if strategy.rank == 0:
        parameters[1].grad = None
    strategy.reduce_gradients(GradientMemory(parameters))
    assert parameters[0].grad is None
    assert parameters[1].grad.eq(1.5).all()


def nccl_checks():
    for _ in range(2):
        strategy = started()
        assert dist.get_backend() == "nccl"
        check_values(strategy)
        check_bitwise(strategy)
        check_manual(strategy)
        strategy.teardown()


def test_ddp_over_nccl():
    run_ranks(nccl_checks, 2, backend=None, start_method="spawn", timeout=120)


def check_filling():
    strategy = started()
    whole = torch.arange(9_000_000, dtype=torch.float32)  # 36 MB: two pieces
    memories = [torch.zeros(36_000_000, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8)]

    def read(index, start, stop):
        assert strategy.rank == 0
        memories[index][start:stop] = whole.view(torch.uint8)[start:stop] if index == 0 else 7

    with host_ranks(strategy, "file") as host:
        host.fill(memories, read)
    strategy.teardown()
    return torch.equal(memories[0].view(torch.float32), whole) and memories[1].eq(7).all().item()


def test_what_one_rank_reads_comes_to_the_other_over_nccl():
    assert run_ranks(check_filling, 2, backend=None, start_method="spawn") == [True, True]


def test_a_nan_of_any_gpu_is_the_largest_and_the_smallest_value():
    assert run_ranks(nan_of_a_rank.values, 2, "cuda", backend=None, start_method="spawn") == [[], []]
