"""A nan of any rank is the largest and the smallest value over all ranks: of reductions, shards' norms, clipping and logs."""

from __future__ import annotations

import itertools
import math
import os

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fabricamp import Callback, TrainingModule, clip_grad_norm_
from fabricamp.errors import NonFiniteError
from fabricamp.gradients.norms import norms_of
from fabricamp.ops.shards import SharedRows, norm_of, whole
from fabricamp.strategies import DDP, Environment
from tests.distributed.ranks import run_ranks
from tests.small import loader, quiet_trainer

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
ODD = (0.0, -0.0, math.inf, -math.inf, 1.5, -1.5, 6e-8, -6e-8)
AS_TORCH = {"max": torch.amax, "min": torch.amin}
SIZES = pytest.mark.parametrize("size", [2, 3])


def joined(kind):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    strategy = DDP()
    device = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")
    strategy.setup_environment(Environment(rank=rank, local_rank=rank, world_size=size), device)
    return strategy


def different(one, other):
    return not torch.equal(one.nan_to_num(nan=7.0), other.nan_to_num(nan=7.0)) or one.dtype != other.dtype


def values(kind="cpu"):
    """Returns the reductions of the strategy that differ from torch's of all ranks' values, on one of which is nan."""
    strategy = joined(kind)
    rank, size = strategy.rank, strategy.world_size
    generator = torch.Generator().manual_seed(1)
    wrong = []
    for dtype, op, bad in itertools.product(FLOATS, AS_TORCH, range(size)):
        # In the last columns every value beside the nan is infinite, or of one sign.
        everyone = torch.randn(size, 12, generator=generator, dtype=torch.float64)
        everyone[:, :8] = torch.tensor(ODD)[torch.randint(0, 8, (size, 8), generator=generator)]
        everyone[:, 8:10], everyone[:, 10], everyone[:, 11] = math.inf, everyone[:, 10].abs(), -everyone[:, 11].abs()
        everyone[:, 9] *= -1
        everyone = everyone.to(dtype)
        for columns in ((), (0, 3, 8), (5, 9, 10, 11)):
            for column in columns:
                everyone[bad, column] = -math.nan if column % 2 else math.nan
            wrong += [
                (dtype, op, bad, columns, tuple(view.shape))
                for view in (everyone, everyone.view(size, 3, 4).mT, everyone[:, -1])
                if different(strategy.reduce(view[rank], op), AS_TORCH[op](view, 0))
            ]
    for dtype, op in itertools.product(INTEGERS, AS_TORCH):
        limits = torch.iinfo(torch.uint8 if dtype == torch.bool else dtype)
        everyone = torch.randint(limits.min, limits.max, (size, 6), generator=generator).to(dtype)
        if different(strategy.reduce(everyone[rank], op), AS_TORCH[op](everyone, 0)):
            wrong.append((dtype, op))
    own = torch.tensor(math.nan if rank == size - 1 else 1.0)
    wrong += [op for op in ("mean", "sum") if not strategy.reduce(own, op).isnan()]
    strategy.teardown()
    return wrong


@SIZES
def test_max_and_min_of_a_strategy_are_torchs_of_all_values(size):
    assert run_ranks(values, size, backend=None) == [[]] * size


def shards():
    """Returns what lost the nan of one rank's shard; norms, clipping and reductions of shards over a mesh."""
    size = int(os.environ["WORLD_SIZE"])
    mesh, lost = init_device_mesh("cpu", (size,)), []
    for dtype, bad in itertools.product(FLOATS[:2], range(size)):
        full = torch.arange(4.0 * size, dtype=dtype).view(size, 4) - 3
        full[bad, 1] = math.nan
        part = distribute_tensor(full, mesh, [Shard(0)])
        one = {"max": whole(part.max()), "min": whole(part.min()), "halves": whole(part.bfloat16().min())}
        norms, one["total"] = norms_of({"weight": part}, math.inf)
        one["norm"] = norms["weight"]
        one["smallest"] = norm_of(part, -math.inf)
        weight, other = nn.Parameter(part), nn.Parameter(torch.zeros(2, dtype=dtype))
        weight.grad, other.grad = part.clone(), torch.ones(2, dtype=dtype)
        with pytest.raises(NonFiniteError, match="the norm of 2 gradients is nan"):
            clip_grad_norm_([weight, other], 1.0, "inf", error_if_nonfinite=True)
        one["clipped norm"] = clip_grad_norm_([weight, other], 1.0, math.inf)
        one["clipped"] = other.grad[0]
        one["row"] = SharedRows.of([weight]).largest(part.to_local().abs().amax().reshape(1))[0]
        lost += [(dtype, bad, name) for name, value in one.items() if not value.isnan()]
    return lost


@SIZES
def test_extremes_norms_and_clipping_of_shards_keep_the_nan(size):
    assert run_ranks(shards, size) == [[]] * size


def finite_shards():
    size = int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh("cpu", (size,))
    generator = torch.Generator().manual_seed(2)
    full = [torch.randn(rows, 4, generator=generator) for rows in (5, 1, 2)]  # some ranks have an empty shard
    plain = [nn.Parameter(one) for one in full]
    parts = [nn.Parameter(distribute_tensor(one.clone(), mesh, [Shard(0)])) for one in full]
    for one, part in zip(plain, parts, strict=True):
        one.grad = torch.randn(one.shape, generator=generator)
        part.grad = distribute_tensor(one.grad.clone(), mesh, [Shard(0)])
    norms = nn.utils.clip_grad_norm_(plain, 0.5, math.inf), clip_grad_norm_(parts, 0.5, math.inf)
    assert torch.equal(*norms)
    for one, part in zip(plain, parts, strict=True):
        assert torch.equal(one.grad, whole(part.grad))
        for order in (math.inf, -math.inf, 1.0, 2.0):
            torch.testing.assert_close(norm_of(part.grad, order), norm_of(one.grad, order))


@SIZES
def test_finite_extremes_of_shards_are_those_of_the_whole(size):
    run_ranks(finite_shards, size)


class Logs(TrainingModule):
    """Logs the extremes of values that are nan on one rank, as tensors, numbers and halves."""

    def __init__(self, bad):
        super().__init__()
        self.net = nn.Linear(8, 3)
        self.bad = bad

    def training_step(self, batch, batch_idx):
        value = math.nan if self.global_rank == self.bad and batch_idx == 1 else self.global_rank + batch_idx
        kinds = {"number": value, "tensor": torch.tensor(value), "half": torch.tensor(value, dtype=torch.bfloat16)}
        for (name, one), mode in itertools.product(kinds.items(), AS_TORCH):
            self.log(f"{name} {mode}", one, on_step=False, on_epoch=True, reduce_fx=mode)
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Known(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        self.values = {name: float(value) for name, value in trainer.callback_metrics.items()}


def logged(bad):
    known = Known()
    trainer = quiet_trainer(strategy="ddp", devices="auto", max_epochs=1, callbacks=[known])
    trainer.fit(Logs(bad), loader(4 * 3 * trainer.world_size, 4))
    return known.values


def logs_of_each():
    return [logged(bad) for bad in range(int(os.environ["WORLD_SIZE"]))]


@SIZES
def test_logged_extremes_keep_the_nan(size):
    for ranks in run_ranks(logs_of_each, size, backend=None):
        for values in ranks:
            assert len(values) == 6
            assert all(math.isnan(value) for value in values.values()), values
