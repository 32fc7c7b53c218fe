"""A loss as (sum, weight) on two ranks: one division by the weight of all micro-batches of both."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist

from fabricamp import Callback, ConfigError
from fabricamp.strategies import DelayedDDP
from tests.distributed.ranks import run_ranks
from tests.weighted import PAIRS, TOLERANCE, Tokens, apart, batches, by_hand, fitted

STRATEGIES = {
    "ddp": lambda: "ddp",
    "delayed_ddp": lambda: "delayed_ddp",
    "in messages": lambda: DelayedDDP(message_size=100),
    "fsdp": lambda: "fsdp",
}
# Each strategy has a third of the pairs; all have the accumulating ones of O0 and O2, which keep gradients in other memory.
CASES = [
    (strategy, one)
    for number, strategy in enumerate([*STRATEGIES][:3])
    for place, one in enumerate(PAIRS)
    if place % 3 == number or (one[0] in ("O0", "O2") and one[1] == 3)
]
# Sharded gradients, with the levels that support them.
CASES += [
    ("fsdp", one)
    for one in (
        ("O0", 3, ("norm", 0.3), "adamw"),
        ("O0", 3, None, "fused_sgd"),
        ("O4", 1, None, "sgd"),
        ("O5", 3, ("norm", 0.3), "fused_adam"),
    )
]
CARRIED = ("O0", 3, None, "sgd")
RESUMED = ("O2", 3, ("norm", 0.3), "sgd")


class Saves(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.fit_loop.total_batch_idx == 4:
            trainer.save_checkpoint(self.path)


class Nothing(Tokens):
    """Rank 1 has no valid tokens."""

    def training_step(self, batch, batch_idx):
        total, weight = self.summed(batch)
        return total * (1 - dist.get_rank()), weight * (1 - dist.get_rank())


class OneHasNone(Tokens):
    """Rank 1 returns the mean without a weight."""

    def training_step(self, batch, batch_idx):
        total, weight = self.summed(batch)
        return total / weight if dist.get_rank() else (total, weight)


def refused(strategy, module=None):
    with pytest.raises(ConfigError) as error:
        fitted(("O0", 3, None, "sgd"), strategy, batches(dist.get_rank()), module=module)
    return str(error.value)


def on_two_ranks(folder):
    own = batches(dist.get_rank())
    found = {case: fitted(case[1], STRATEGIES[case[0]](), own) for case in CASES}
    for strategy, make in STRATEGIES.items():
        found["carried", strategy] = fitted(CARRIED, make(), own, partial_window="carry")
    found["alone"] = fitted(("O0", 3, None, "sgd"), "ddp", own, module=Nothing())
    path = folder / "open.ckpt"
    _, found["straight"] = fitted(RESUMED, "ddp", own, callbacks=[Saves(path)])
    _, found["resumed"] = fitted(RESUMED, "ddp", own, ckpt_path=path)
    found["sum"] = refused(DelayedDDP(gradient_average=False))
    found["one has none"] = [refused(make(), OneHasNone()) for make in STRATEGIES.values()]
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run_ranks(on_two_ranks, 2, tmp_path_factory.mktemp("weighted"))


def test_both_ranks_end_with_the_same_bits(ranks):
    first, second = ranks
    whole = [case for case in CASES if case[0] != "fsdp"]  # after a sharded fit only rank 0 has the module
    assert [case for case in whole if not torch.equal(first[case][1], second[case][1])] == []


def test_a_window_is_the_joined_batch_of_both_ranks(ranks):
    far = {}
    for case in CASES:
        before, after = ranks[0][case]
        if (share := apart(before, after, by_hand(case[1], [batches(0), batches(1)]))) > TOLERANCE[case[1][0]]:
            far[case] = share
    assert far == {}


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_windows_are_carried_into_the_next_epoch(ranks, strategy):
    before, after = ranks[0]["carried", strategy]
    assert apart(before, after, by_hand(CARRIED, [batches(0), batches(1)], carries=True)) < 1e-5


def test_a_rank_without_weight_takes_part(ranks):
    before, after = ranks[0]["alone"]
    assert apart(before, after, by_hand(("O0", 3, None, "sgd"), [batches(0)])) < 1e-5


def test_a_run_that_goes_on_within_a_window_has_the_bits_of_the_straight_one(ranks):
    assert [torch.equal(one["straight"], one["resumed"]) for one in ranks] == [True, True]


def test_a_sum_over_the_ranks_is_refused(ranks):
    assert "leave gradient_average out" in ranks[1]["sum"]


def test_a_rank_without_weights_among_others_is_refused_on_all(ranks):
    words = "training_step returned (sum, weight) on rank 0 and a loss without a weight on rank 1; return"
    assert [[one.startswith(words) for one in rank["one has none"]] for rank in ranks] == [[True] * len(STRATEGIES)] * 2
