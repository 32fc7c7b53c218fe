"""GradientAccumulationScheduler: its steps equal a loop by hand, in every precision, on several ranks and after a resume."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fabricamp import Callback, ConfigError
from fabricamp.callbacks import GradientAccumulationScheduler
from tests.distributed.ranks import run_ranks
from tests.small import Classifier, loader, quiet_trainer

SCHEDULE = {1: 4, 3: 2}
COUNTS = [1, 4, 4, 2]
STEPS = [6, 2, 2, 3]


class Weighted(Classifier):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y, reduction="sum"), len(y)


class Seen(Callback):
    def __init__(self):
        self.counts, self.steps, self.estimated = [], [], 0

    def on_train_epoch_start(self, trainer, pl_module):
        self.counts.append(trainer.accumulate_grad_batches)
        self.steps.append(trainer.global_step)
        self.estimated = trainer.estimated_stepping_batches


def fit(module=None, ckpt_path=None, schedule=SCHEDULE, **options):
    module, seen = module or Classifier(), Seen()
    callbacks = [GradientAccumulationScheduler(schedule), seen] if schedule else [seen]
    trainer = quiet_trainer(callbacks=callbacks, **{"max_epochs": 4, **options})
    trainer.fit(module, loader(24), ckpt_path=ckpt_path)
    return trainer, module, seen


def by_hand(*, weighted=False):
    """Trains by hand; if ``weighted``, an epoch's shorter last step is a mean over the micro-batches that it has."""
    module, batches = Classifier(), list(loader(24))
    optimizer = module.configure_optimizers()
    for count in COUNTS:
        for index, (x, y) in enumerate(batches):
            begun = index - index % count
            divisor = min(count, len(batches) - begun) if weighted else count
            (F.cross_entropy(module.net(x), y) / divisor).backward()
            if (index + 1) % count == 0 or index == len(batches) - 1:
                optimizer.step()
                optimizer.zero_grad()
    return module


def same(one, two, **tolerance):
    for first, second in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(first, second, **tolerance)


def test_each_epoch_has_steps_of_its_own_size():
    trainer, module, seen = fit()
    assert seen.counts == COUNTS
    assert seen.steps == [0, 6, 8, 10]
    assert trainer.global_step == sum(STEPS) == seen.estimated
    same(module, by_hand(), rtol=0, atol=0)
    assert (trainer.accumulate_grad_batches, trainer.accumulation_schedule) == (COUNTS[-1], None)
    trainer.fit_loop.max_epochs = 5
    trainer.fit(module, loader(24))
    assert (trainer.global_step, seen.counts[-1]) == (sum(STEPS) + 3, 2)


@pytest.mark.parametrize(
    ("precision", "kind"), [("O0", Weighted), ("O1", Classifier), ("O2", Weighted), ("O5", Classifier)]
)
def test_other_precisions_follow(precision, kind):
    trainer, module, _ = fit(kind(), precision=precision)
    assert trainer.global_step == sum(STEPS)
    same(module, by_hand(weighted=kind is Weighted), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("precision", "step", "partial"), [("O0", 7, "step"), ("O2", 9, "step"), ("O1", 12, "drop")])
def test_a_run_goes_on_bit_for_bit(tmp_path, precision, step, partial):
    options = {"precision": precision, "partial_window": partial}
    _, straight, _ = fit(**options)
    saves = SavesBehindBatch(tmp_path / "cut.ckpt", step)
    trainer = quiet_trainer(max_epochs=4, callbacks=[GradientAccumulationScheduler(SCHEDULE), saves], **options)
    trainer.fit(Classifier(), loader(24))
    _, again, _ = fit(ckpt_path=tmp_path / "cut.ckpt", **options)
    same(straight, again, rtol=0, atol=0)


class SavesBehindBatch(Callback):
    """Saves after a micro-batch of the run, also in the middle of an accumulation."""

    def __init__(self, path, batches):
        self.path, self.batches = path, batches

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.state.batches_done == self.batches:
            trainer.save_checkpoint(self.path)


def on_a_rank(strategy, precision, kind):
    trainer, module, seen = fit(kind(), strategy=strategy, precision=precision, devices="auto", schedule={1: 2, 3: 3})
    return trainer.global_step, seen.counts, [one.detach() for one in module.parameters()]


@pytest.mark.parametrize(
    ("strategy", "precision", "kind"),
    [("ddp", "O2", Classifier), ("delayed_ddp", "O0", Weighted), ("fsdp", "O1", Classifier)],
)
def test_ranks_step_together(strategy, precision, kind):
    (steps, counts, weights), (other, _, same_weights) = run_ranks(on_a_rank, 2, strategy, precision, kind)
    assert counts == [1, 2, 2, 3]
    assert steps == other == 3 + 2 + 2 + 1
    if strategy != "fsdp":  # with fsdp only rank 0 has the weights afterwards
        assert all(torch.equal(one, two) for one, two in zip(weights, same_weights, strict=True))


class Manual(Classifier):
    automatic_optimization = False


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"accumulate_grad_batches": 2}, "cannot work with accumulate_grad_batches=2; leave one of them out"),
        ({"partial_window": "carry"}, "cannot work with partial_window='carry'"),
        ({"module": Manual()}, "automatic optimization only"),
    ],
)
def test_what_cannot_work_beside_it_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        fit(**options)


@pytest.mark.parametrize("scheduling", [{}, {0: 0}, {-1: 2}, {1: 2.0}, {"0": 2}, 4, None])
def test_what_is_no_schedule_is_refused(scheduling):
    with pytest.raises(ConfigError, match="give a dict from an epoch"):
        GradientAccumulationScheduler(scheduling)


def test_after_a_raise_the_schedule_is_gone_and_its_number_stays():
    class Raises(Classifier):
        def on_train_epoch_end(self):
            raise RuntimeError("here")

    trainer = quiet_trainer(max_epochs=1, callbacks=GradientAccumulationScheduler({0: 4}))
    with pytest.raises(RuntimeError, match="here"):
        trainer.fit(Raises(), loader(24))
    assert (trainer.accumulate_grad_batches, trainer.accumulation_schedule) == (4, None)


def test_the_last_number_stays_and_the_next_fit_has_its_own():
    trainer, module, seen = fit()
    assert trainer.accumulate_grad_batches == COUNTS[-1] == 2
    trainer.fit_loop.max_epochs = 5
    trainer.fit(module, loader(24))  # the last entry of the schedule is valid in the fifth epoch too
    assert seen.counts == [*COUNTS, 2]
    trainer.reset()
    seen.counts.clear()
    trainer.fit(module, loader(24))
    assert seen.counts == [*COUNTS, 2]

    trainer.callbacks[:] = [seen]
    trainer.reset()
    seen.counts.clear()
    trainer.fit(module, loader(24))
    assert (seen.counts, seen.steps[-1]) == ([2] * 5, 12)

    trainer.callbacks[:] = [seen, GradientAccumulationScheduler({0: 4})]
    trainer.accumulate_grad_batches = 1
    trainer.fit_loop.max_epochs = 6
    trainer.fit(module, loader(24))
    assert (seen.counts[-1], trainer.accumulate_grad_batches) == (4, 4)
    trainer.accumulate_grad_batches = 3
    with pytest.raises(ConfigError, match="cannot work with accumulate_grad_batches=3"):
        trainer.fit(module, loader(24))
