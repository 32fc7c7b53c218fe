"""A loss as (sum, weight) on two GPUs, over NCCL: the numbers of the joined batch of both, without a wait, as a graph too."""

from __future__ import annotations

import os

import pytest
import torch

from tests.distributed.ranks import run_ranks
from tests.gpu.test_weighted_loss_gpu import ErrorOnWait, fitted, graph_and_eager
from tests.weighted import TOLERANCE, apart, batches, by_hand

pytestmark = [pytest.mark.gpu2, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")]

CASES = [
    ("ddp", "O0", 1, "adamw"),
    ("ddp", "O0", 3, "fused_adam"),
    ("ddp", "O2", 3, "fused_sgd"),
    ("ddp", "O1", 1, "fused_adam"),
    ("delayed_ddp", "O0", 3, "fused_sgd"),
    ("delayed_ddp", "O2", 1, "fused_adam"),
    ("delayed_ddp", "O5", 3, "fused_adam"),
]


GRAPHS = [("ddp", "O0", 3), ("ddp", "O1", 1), ("delayed_ddp", "O2", 3), ("delayed_ddp", "O0", 1)]


def on_two_gpus():
    rank = int(os.environ["RANK"])
    options = {"devices": 2, "use_distributed_sampler": False}
    found = [
        fitted(level, accumulate, optimizer, batches(rank), strategy=strategy, **options)[:2]
        for strategy, level, accumulate, optimizer in CASES
    ]
    for strategy, level, accumulate in GRAPHS:
        given = {"strategy": strategy, "max_epochs": 3, **options}
        (eager, *_), (graph, _, replays, _) = graph_and_eager(level, accumulate, "fused_adam", rank=rank, **given)
        found.append((torch.equal(eager, graph), replays > 9))
    for strategy in ("ddp", "delayed_ddp"):
        one = {**options, "strategy": strategy, "max_epochs": 1, "callbacks": [ErrorOnWait()]}
        fitted("O1", 1, "fused_adam", batches(rank, count=80), **one)  # ErrorOnWait looks at 30 to 70
    return found


def test_a_window_is_the_joined_batch_of_both():
    first, second = run_ranks(on_two_gpus, 2, backend=None, start_method="spawn", timeout=200.0)
    assert first[len(CASES) :] == second[len(CASES) :] == [(True, True)] * len(GRAPHS)
    for (_, level, accumulate, optimizer), (before, after), (_, other) in zip(CASES, first, second, strict=False):
        assert torch.equal(after, other)
        wanted = by_hand((level, accumulate, ("norm", 0.3), optimizer), [batches(0), batches(1)])
        assert apart(before.cpu(), after, wanted) < TOLERANCE[level]
