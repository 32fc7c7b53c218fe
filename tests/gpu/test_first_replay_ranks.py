"""The comparison of a replay on two ranks, with one copy of the state and in slices of the update: all ranks run the same steps."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabricamp import CudaGraph
from fabricamp.engine.graph.comparison import ReplayCheck
from fabricamp.optimizers import FusedSGD
from fabricamp.strategies import DDP, DelayedDDP
from tests.distributed.ranks import run_ranks
from tests.gpu import test_cuda_graph_ranks as ranks
from tests.gpu import test_cuda_graph_sharded as sharded
from tests.gpu.test_cuda_graph import equal

pytestmark = [
    pytest.mark.gpu2,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]

CASES = {
    "delayed O0": (DelayedDDP, {}),
    "delayed O5": (DelayedDDP, {"level": "O5"}),
    "delayed O1 torch": (DelayedDDP, {"level": "O1", "optimizer": torch.optim.AdamW, "sync": False}),
    "delayed O2 windows": (DelayedDDP, {"level": "O2", "accumulate": 3, "spikes": True}),
    "ddp O2": (DDP, {"level": "O2", "optimizer": FusedSGD}),
}


class Even(ranks.Net):
    """Has weights of about the same size, so that an update has slices."""

    def __init__(self, *given):
        super().__init__(*given)
        torch.manual_seed(0)
        self.net = nn.Sequential(
            *self.net[:3],
            nn.Conv2d(16, 8, 3),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(64, 5),
        )


def leave(shares):
    """Lets the comparisons of this rank find its share of the copies of the state as free memory; returns their plans."""
    plans = []
    plan = ReplayCheck._plan

    def planned(self, step, state, free):
        plans.append(plan(self, step, state, int(shares[dist.get_rank()] * state.bytes)))
        return plans[-1]

    ReplayCheck._plan = planned
    return plans


def runs(shares):
    ranks.join()
    ranks.Net = Even
    plans = leave(shares)
    found = {}
    for name, (strategy, options) in CASES.items():
        plans.clear()
        graphs = (False, CudaGraph(warmup=4, check_every=4))
        pair = [ranks.fitted(strategy(), graph, **options) for graph in graphs]
        found[name] = pair, [(plan.copies, len(plan.slices), bool(plan.why_not)) for plan in plans]
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("shares", [(1.5, 1.5), (2.5, 1.5), (1.2, 0.7), (0.7, 0.7)])
def test_the_bits_of_eager_steps(shares):
    first, second = run_ranks(runs, 2, shares, backend=None, start_method="spawn", timeout=280)
    for name in CASES:
        (pair, plans), (_, others) = first[name], second[name]
        assert plans == others, name  # alike on both ranks
        assert all(map(equal, pair[0][0], pair[1][0])), name
        assert equal(pair[0][1], pair[1][1]), name
        assert pair[1][2] > 15, name
        if min(shares) < 1 and "torch" not in name:
            assert any(slices > 1 for _, slices, _ in plans), name
            assert not any(left_out for _, _, left_out in plans), name


def sharded_runs(shares):
    ranks.join()
    plans = leave(shares)
    case = {"precision": "O5", "gradient_clip_val": 0.5}
    found = [sharded.fitted(graph, **case) for graph in (None, CudaGraph(warmup=4, check_every=4))]
    dist.destroy_process_group()
    return found, [(plan.copies, len(plan.slices)) for plan in plans]


@pytest.mark.parametrize("shares", [(1.5, 1.5), (0.7, 0.7)])
def test_sharded_weights(shares):
    for (eager, graphed), plans in run_ranks(sharded_runs, 2, shares, backend=None, start_method="spawn", timeout=280):
        assert plans
        assert all((copies, slices > 1) == (1, shares[0] < 1) for copies, slices in plans)
        assert torch.equal(eager["losses"], graphed["losses"])
        assert eager["weights"] is None or torch.equal(eager["weights"], graphed["weights"])
        assert (eager["logged"], eager["skipped"]) == (graphed["logged"], graphed["skipped"])
        assert graphed["replays"] > 5
