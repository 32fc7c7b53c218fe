"""Meeting, values between ranks, and parting, over real Gloo processes."""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabricamp.errors import ConfigError, DistributedError
from fabricamp.strategies import DDP, Environment
from tests.distributed.ranks import run_ranks

CPU = torch.device("cpu")


def environment():
    rank = int(os.environ["RANK"])
    return Environment(rank=rank, local_rank=rank, world_size=int(os.environ["WORLD_SIZE"]))


def check_reductions(strategy):
    rank, size = strategy.rank, strategy.world_size
    values = {
        torch.float32: ("mean", (size - 1) / 2),
        torch.float64: ("sum", size * (size - 1) / 2),
        torch.float16: ("max", size - 1),
        torch.bfloat16: ("min", 0),
        torch.complex64: ("sum", size * (size - 1) / 2),
    }
    for dtype, (op, expected) in values.items():
        result = strategy.reduce(torch.full((2, 3), rank, dtype=dtype), op)
        assert result.dtype == dtype
        assert torch.equal(result, torch.full((2, 3), expected, dtype=dtype))
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
        value = torch.tensor(100 + rank, dtype=dtype)
        assert strategy.reduce(value, "sum").item() == 100 * size + size * (size - 1) // 2
        assert strategy.reduce(value, "sum").dtype == torch.int64
        assert strategy.reduce(value, "mean").dtype == torch.float64
        assert strategy.reduce(value, "min").dtype == dtype
        assert strategy.reduce(value, "max").item() == 100 + size - 1
        assert value.item() == 100 + rank
    big = 2**60 + 1
    assert strategy.reduce(torch.tensor(big), "sum").item() == big * size
    assert strategy.reduce(torch.tensor(rank == 1), "max").item() is True
    assert strategy.reduce(torch.tensor(rank == 1), "sum").item() == 1
    # A sum beyond fp16's range, whose mean is not.
    assert strategy.reduce(torch.tensor(60000.0, dtype=torch.float16)).item() == 60000.0


def check_odd_tensors(strategy):
    rank = strategy.rank
    slanted = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(strategy.reduce(slanted, "mean"), slanted)
    attached = torch.ones(2, requires_grad=True)
    assert not strategy.reduce(attached * 2).requires_grad
    assert strategy.reduce(torch.empty(0), "sum").shape == (0,)
    for value in (
        torch.tensor(rank),
        torch.tensor(rank == 1),
        torch.full((2, 3), rank, dtype=torch.bfloat16).t(),
        torch.full((2,), rank * 1j),
        torch.full((3,), rank, dtype=torch.int16),
        torch.empty(0, 4),
    ):
        everyone = strategy.all_gather(value)
        assert everyone.shape == (strategy.world_size, *value.shape)
        assert everyone.dtype == value.dtype
        assert torch.equal(everyone[rank], value)
        if value.numel():
            one = 1j if value.is_complex() else 1
            assert everyone[1].flatten()[0].item() == torch.tensor(one).to(value.dtype).item()


def check_objects(strategy):
    rank = strategy.rank
    assert strategy.broadcast({"from": rank}) == {"from": 0}
    assert strategy.broadcast({"from": rank}, source=1) == {"from": 1}
    assert strategy.all_gather_object(["x"] * rank) == [["x"] * other for other in range(strategy.world_size)]
    strategy.barrier("the end of a check")


def check_store(strategy):
    """Each thread its own clone; what one run left is not seen by the next."""
    seen = []

    def read():
        seen.append(strategy.store.clone().get("word"))

    if strategy.rank == 0:
        strategy.store.set("word", "said")
    reader = threading.Thread(target=read)
    reader.start()
    reader.join()
    assert seen == [b"said"]
    strategy.barrier()
    key = "left behind"
    assert not strategy.store.check([key])
    strategy.barrier()
    strategy.store.set(key, "yes")


def value_checks():
    for _ in range(3):
        strategy = DDP(timeout=50)
        strategy.setup_environment(environment(), CPU)
        assert dist.get_backend() == "gloo"
        check_objects(strategy)
        check_store(strategy)
        strategy.teardown()
        assert not dist.is_initialized()
    strategy.setup_environment(environment(), CPU)
    check_reductions(strategy)
    check_odd_tensors(strategy)
    strategy.teardown()


@pytest.mark.parametrize("world_size", [2, 3])
def test_values_travel_and_groups_end(world_size):
    run_ranks(value_checks, world_size, backend=None)


def existing_group():
    strategy = DDP()
    own = environment()
    with pytest.raises(ConfigError, match=r"rank \d of 2.*this run is rank 0 of 5"):
        strategy.setup_environment(Environment(rank=0, world_size=5), CPU)
    strategy.setup_environment(own, CPU)
    assert strategy.store is not None
    assert strategy.reduce(torch.tensor(1.0), "sum").item() == 2
    strategy.teardown()
    assert dist.is_initialized()


def test_an_existing_group_is_used_as_it_is_and_survives():
    run_ranks(existing_group, 2)


def lonely_barrier():
    strategy = DDP(timeout=1.0)
    strategy.setup_environment(environment(), CPU)
    if strategy.rank == 0:
        with pytest.raises(DistributedError, match="rank 0 waited in vain for the others at the checkpoint"):
            strategy.barrier("the checkpoint")
    else:
        threading.Event().wait(2.0)
    strategy.teardown()


def test_a_barrier_that_fails_says_where():
    run_ranks(lonely_barrier, 2, backend=None)


def test_without_an_address_several_processes_cannot_meet(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ConfigError, match="MASTER_ADDR is not set; start with torchrun"):
        DDP().setup_environment(Environment(rank=0, world_size=2), CPU)


def frozen_somewhere():
    strategy = DDP()
    strategy.setup_environment(environment(), CPU)
    module = nn.Linear(2, 2)
    strategy.check_same_module(module)
    module.bias.requires_grad_(requires_grad=strategy.rank != 2)
    with pytest.raises(DistributedError) as caught:
        strategy.check_same_module(module)
    strategy.teardown()
    return str(caught.value)


def test_every_rank_gets_the_same_error_about_different_modules():
    first, *others = run_ranks(frozen_somewhere, 3, backend=None)
    assert others == [first, first]
    assert "ranks 0 and 2 built different modules" in first
    assert "'bias (2,) torch.float32', rank 2 has 'bias (2,) torch.float32 frozen'" in first
