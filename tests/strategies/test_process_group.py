"""Rendezvous, exchange of values and teardown, over real Gloo processes."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout

from fabricamp.errors import CheckpointError, ConfigError, DistributedError, FabricampError, NonFiniteError
from fabricamp.optimizers import UnsupportedError
from fabricamp.strategies import DDP, Environment, Strategy
from tests.distributed.ranks import run_ranks, side_by_side

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
    # The sum exceeds fp16's range, the mean does not.
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
    assert strategy.broadcast({"from": rank}, src=1) == {"from": 1}
    assert strategy.all_gather_object(["x"] * rank) == [["x"] * other for other in range(strategy.world_size)]
    strategy.barrier("the end of a check")


def check_store(strategy):
    """Each thread needs its own clone; a run does not see keys of an earlier run."""
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


def lonely_barrier(folder):
    strategy = DDP(timeout=100)
    strategy.setup_environment(environment(), CPU)
    strategy.barrier("all are here")
    if strategy.rank == 0:
        _set_pg_timeout(timedelta(seconds=1))  # long enough, because the other rank never comes
        with pytest.raises(DistributedError, match="rank 0 waited in vain for the others at the checkpoint"):
            strategy.barrier("the checkpoint")
        (folder / "raised").touch()
    else:
        wait_for(folder / "raised")
    strategy.teardown()


def wait_for(file):
    while not file.exists():
        time.sleep(0.01)


def barrier_between_runs(folder):
    strategy = DDP(timeout=100)
    strategy.barrier("before a run there are no others")
    for turn in range(2):
        strategy.setup_environment(environment(), CPU)
        strategy.barrier("all are connected")  # an earlier exit of a rank would break the other's connection
        strategy.teardown()
        if strategy.rank == 1:
            threading.Event().wait(0.5)
            (folder / str(turn)).touch()
        strategy.barrier("after a run")
        assert (folder / str(turn)).exists()
    if strategy.rank == 0:
        strategy.timeout = timedelta(seconds=1)
        with pytest.raises(DistributedError, match="waited in vain for the others at nobody comes"):
            strategy.barrier("nobody comes")
        (folder / "raised").touch()
    else:
        wait_for(folder / "raised")


def test_a_barrier_that_fails_says_where_and_ranks_of_a_run_that_is_over_meet_at_its_store(tmp_path):
    for name in ("lonely", "between"):
        (tmp_path / name).mkdir()
    side_by_side(
        partial(run_ranks, lonely_barrier, 2, tmp_path / "lonely", backend=None),
        partial(run_ranks, barrier_between_runs, 2, tmp_path / "between", backend=None),
    )


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


def lazy_somewhere():
    strategy = DDP(timeout=20)
    strategy.setup_environment(environment(), CPU)
    module = nn.LazyLinear(2) if strategy.rank == 1 else nn.Linear(2, 2)
    with pytest.raises(ConfigError) as caught:
        strategy.check_same_module(module)
    strategy.barrier("after the error")
    strategy.teardown()
    return str(caught.value)


def test_no_rank_waits_for_one_with_lazy_parameters():
    first, other = run_ranks(lazy_somewhere, 2, backend=None)
    assert first == other
    assert first.startswith("weight, bias have no shape yet")
    with pytest.raises(ConfigError, match="weight, bias have no shape yet"):
        DDP().share_module(nn.LazyLinear(2))


class UsersError(ConfigError):
    """An error that cannot be rebuilt from its message in another process."""

    def __init__(self, name, value):
        super().__init__(f"{name}={value}")
        self.value = lambda: value


RAISED = [
    (CheckpointError("no room"), CheckpointError, "no room"),
    (ConfigError("odd"), ConfigError, "odd"),
    (DistributedError("gone"), DistributedError, "gone"),
    (NonFiniteError("nan"), NonFiniteError, "nan"),
    (UnsupportedError("fp8"), ConfigError, "fp8"),
    (UsersError("size", 3), ConfigError, "size=3"),
    (
        OSError(28, "No space left on device"),
        DistributedError,
        "rank 0 failed: OSError: [Errno 28] No space left on device",
    ),
]


def raised_by(call):
    with pytest.raises(FabricampError) as caught:
        call()
    return caught.value


def rank_zero_tries():
    strategy = DDP(timeout=50)
    strategy.setup_environment(environment(), CPU)
    ran = []
    assert strategy.on_rank_zero(lambda: ran.append(strategy.rank) or ("folder", 7)) == ("folder", 7)
    assert ran == [0] * (strategy.rank == 0)
    for error, kind, words in RAISED:

        def fail(error=error):
            raise error

        found = raised_by(lambda: strategy.on_rank_zero(fail))
        assert isinstance(found, kind)
        assert str(found) == words
        if strategy.rank == 0:
            assert (found if isinstance(error, FabricampError) else found.__cause__) is error
    strategy.agree(None)
    for here in (0, 1):
        found = raised_by(lambda: strategy.agree(UsersError("rank", 1) if strategy.rank == here else None))
        assert (type(found), str(found)) == (ConfigError, "rank=1")
    found = raised_by(lambda: strategy.agree(CheckpointError(f"file{strategy.rank % 2}")))
    assert (type(found), str(found)) == (CheckpointError, "file0; file1")
    strategy.teardown()


def test_what_rank_0_cannot_do_is_raised_by_every_rank_in_class_and_words():
    run_ranks(rank_zero_tries, 3, backend=None)


def test_one_process_raises_what_it_is():
    strategy = Strategy()
    assert strategy.on_rank_zero(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        strategy.on_rank_zero(lambda: 1 / 0)
    strategy.agree(None)
    with pytest.raises(CheckpointError, match=r"^damaged$"):
        strategy.agree(CheckpointError("damaged"))
