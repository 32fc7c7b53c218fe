"""apex's DistributedDataParallel over NCCL on two GPUs: torch's bits, with any number of streams."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as OfTorch

from fabricamp.apex.parallel import DistributedDataParallel
from tests.distributed.ranks import run_ranks
from tests.strategies.test_delayed_ddp_nccl import STEPS, Deep, join, own_device

pytestmark = [
    pytest.mark.gpu2,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]


def script(options):
    """Checks that both models' gradients have equal bits after each of several steps."""
    device = own_device()
    torch.manual_seed(dist.get_rank())
    ours = DistributedDataParallel(Deep().to(device), **options)
    theirs = OfTorch(copy.deepcopy(ours.module), device_ids=[device.index], broadcast_buffers=False)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True) for model in (ours, theirs)]
    for index in range(STEPS):
        batch = torch.randn(32, 64, device=device)
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=index % 5 != 4)
            model(batch).square().mean().backward()
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad), (options, index)
        for optimizer in optimizers:
            optimizer.step()
        junk = [torch.full((size,), float("nan"), device=device) for size in (512 * 96, 1024, 33 * 700)]
        del junk


def scripts():
    join()
    groups = [dist.new_group() for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    for options in (
        {"delay_allreduce": True},
        {},
        {"message_size": 1, "num_allreduce_streams": 4},
        {"message_size": 1, "num_allreduce_streams": 2, "allreduce_communicators": (groups, streams)},
        {"message_size": 50_000},
    ):
        script(options)
    dist.destroy_process_group()


def test_scripts_have_torchs_bits_whatever_the_streams():
    run_ranks(scripts, 2, backend=None, start_method="spawn", timeout=150)
