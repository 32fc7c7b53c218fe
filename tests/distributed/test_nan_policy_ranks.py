"""A gradient that is not finite on one rank ends all of them at the same step, with the same weights."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fabricamp import Callback, NonFiniteError, OptLevel
from tests.distributed.ranks import run_ranks, side_by_side
from tests.small import Classifier, loader, quiet_trainer


class SpoilsRankOne(Callback):
    def on_before_backward(self, trainer, module, loss):
        if trainer.global_rank == 1 and trainer.global_step == 3:
            loss.register_hook(lambda gradient: gradient * float("inf"))


class Adam(Classifier):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-4, fused=True)


class ManualAdam(Adam):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


MODULES, LEVELS, POLICIES = (Classifier, Adam, ManualAdam), ("O0", "O1", "O2", "O5"), ("stop", "raise")


def ends(strategy, parity):
    """Runs every second case: each ``parity`` has every pair of options, and both together have every case."""
    found = []
    for number, module in enumerate(MODULES):
        for place, level in enumerate(LEVELS):
            for one, policy in enumerate(POLICIES):
                if parity is not None and (number + place + one) % 2 != parity:
                    continue
                precision = OptLevel(level, max_loss_scale=4.0) if level in ("O1", "O2") else level
                trainer = quiet_trainer(
                    strategy=strategy,
                    devices="auto",
                    precision=precision,
                    nan_policy=policy,
                    max_epochs=9,
                    callbacks=[SpoilsRankOne()],
                )
                own, message = module(), ""
                try:
                    trainer.fit(own, loader(64))
                except NonFiniteError as error:
                    message = str(error)
                    trainer.strategy.teardown()
                weights = torch.cat([p.detach().flatten() for p in own.parameters()])
                found.append((trainer.global_step, trainer.state.stop_explanation or message, weights))
    return found


def all_ranks_end_at_the_same_step_for_one_of_them(strategy, parity=None):
    first, second = run_ranks(ends, 2, strategy, parity)
    assert len(first) == (12 if parity is not None else 24)
    for (step, said, weights), (other_step, other_said, other_weights) in zip(first, second, strict=True):
        assert step == other_step == 6
        assert "of net.0.weight" in said
        assert "of net.0.weight" in other_said
        assert "not finite at step 3" in said
        assert torch.isfinite(weights).all()
        assert torch.equal(weights, other_weights)


def test_all_ranks_end_at_the_same_step_for_one_of_them():
    # Run concurrently, because each end of a run waits for a while.
    cases = (("ddp", 0), ("delayed_ddp", 1))
    side_by_side(*(partial(all_ranks_end_at_the_same_step_for_one_of_them, *case) for case in cases))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "delayed_ddp"])
def test_all_ranks_end_at_the_same_step_in_every_case(strategy):
    all_ranks_end_at_the_same_step_for_one_of_them(strategy)
