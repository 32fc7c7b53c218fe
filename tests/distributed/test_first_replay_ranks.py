"""Comparisons of replays on two ranks, emulated on CPUs over Gloo: each rank runs the same steps, whatever memory each has."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

from fabricamp import CudaGraph
from fabricamp.engine.graph.comparison import ReplayCheck
from tests.cuda_on_cpu.fits import install
from tests.distributed.ranks import run_ranks
from tests.loop.test_graphed_fits import Deep, fit
from tests.pairs import pairs

STRATEGIES = ["delayed_ddp", "ddp"]
SHARES = [(2.5, 2.5), (1.5, 1.5), (2.5, 1.5), (1.2, 0.7), (0.7, 0.7)]
"""What each rank finds as free memory, in copies of its state."""


class Wrong(Deep):
    """Computes something else on rank 1 while it is captured."""

    def __init__(self, card):
        super().__init__("FusedSGD")
        self.card = [card]

    def training_step(self, batch, batch_idx):
        outputs = super().training_step(batch, batch_idx)
        is_wrong = self.card[0].is_capturing and dist.get_rank() == 1
        return {**outputs, "loss": outputs["loss"] * (1.5 if is_wrong else 1)}


def plans_with(shares):
    """Lets each rank find its share as free memory; returns the list of the plans that its comparisons make."""
    plans = []
    plan = ReplayCheck._plan

    def planned(self, step, state, free):
        plans.append(plan(self, step, state, int(shares[dist.get_rank()] * state.bytes)))
        return plans[-1]

    ReplayCheck._plan = planned
    return plans


def run(shares, make, *, keeps=False, graph=None, **options):
    card = install(pytest.MonkeyPatch())
    plans = plans_with(shares)
    eager = fit(None, make(card), devices=2, max_epochs=2, **options)
    card.keeps = keeps and dist.get_rank() == 1
    graphed = fit(graph or CudaGraph(warmup=4, check_every=4), make(card), devices=2, max_epochs=2, **options)
    same = all(map(torch.equal, eager.state.values(), graphed.state.values())) and eager.logged == graphed.logged
    counts = [(plan.copies, len(plan.slices), plan.why_not) for plan in plans]
    return same, counts, card.replays, card.events.count("capture"), graphed.why_eager


@pytest.mark.parametrize(
    ("strategy", "precision", "accumulate", "shares"), pairs(STRATEGIES, ["O0", "O1", "O5"], [1, 2], SHARES)
)
def test_the_bits_are_those_of_eager_runs(strategy, precision, accumulate, shares):
    options = {
        "strategy": strategy,
        "precision": precision,
        "accumulate_grad_batches": accumulate,
        "gradient_clip_val": 0.5,
    }
    first, second = run_ranks(partial(run, **options), 2, shares, lambda card: Deep("FusedSGD"))
    for same, plans, replays, _, why_eager in (first, second):
        assert same
        assert not why_eager
        assert replays >= 2  # torch's wrapper takes statistics in eleven of twelve steps
        assert plans == first[1]
        assert plans
        assert not any(why_not for *_, why_not in plans)


@pytest.mark.parametrize("shares", [(2.5, 2.5), (1.5, 1.5), (0.7, 0.7)])
def test_a_wrong_replay_of_one_rank_is_taken_back_on_both(shares):
    graph = CudaGraph(warmup=4, required=False)
    first, second = run_ranks(partial(run, graph=graph, strategy="delayed_ddp"), 2, shares, Wrong)
    for same, *_, why_eager in (first, second):
        assert same
        assert why_eager.startswith("a replay differs bitwise from an eager step, first in")


@pytest.mark.parametrize("shares", [(0.7, 0.7)])
def test_memory_that_one_rank_keeps_makes_both_capture_again(shares):
    keeping = partial(run, keeps=True, strategy="delayed_ddp")
    for same, plans, replays, captures, why_eager in run_ranks(keeping, 2, shares, lambda card: Deep("FusedSGD")):
        assert same
        assert not why_eager
        assert captures == 2
        assert len(plans) > 1
        assert replays > 5
