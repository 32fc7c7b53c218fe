"""``partial_window``: an incomplete accumulation at the end of an epoch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fabricamp import Callback, ConfigError, OptLevel
from tests.small import Classifier, loader, quiet_trainer

EPOCHS, BATCHES, WINDOW = 3, 4, 3
STEPS = {"step": 6, "carry": 4, "drop": 3}


def windows(partial):
    """Returns the micro-batches of each step."""
    if partial == "carry":
        return [range(first, first + WINDOW) for first in range(0, EPOCHS * BATCHES, WINDOW)]
    ends = {"step": (WINDOW, BATCHES), "drop": (WINDOW,)}[partial]
    return [
        range(epoch * BATCHES + (end - 1) // WINDOW * WINDOW, epoch * BATCHES + end)
        for epoch in range(EPOCHS)
        for end in ends
    ]


def by_hand(partial):
    module = Classifier().double()
    optimizer = module.configure_optimizers()
    batches = list(loader(16)) * EPOCHS
    for window in windows(partial):
        optimizer.zero_grad()
        for number in window:
            x, y = batches[number]
            (F.cross_entropy(module.net(x.double()), y) / WINDOW).backward()
        optimizer.step()
    return flat(module)


def flat(module):
    return torch.cat([value.flatten().double() for value in module.state_dict().values()])


def fitted(partial, *, module=None, ckpt_path=None, **options):
    module = module or Classifier()
    settings = {"max_epochs": EPOCHS, "accumulate_grad_batches": WINDOW, "partial_window": partial}
    trainer = quiet_trainer(**{**settings, **options})
    trainer.fit(module, loader(16), ckpt_path=ckpt_path)
    return trainer, module


@pytest.mark.parametrize("precision", ["O0", "O2", "O5"])
@pytest.mark.parametrize("partial", list(STEPS))
def test_windows_are_those_of_a_loop_by_hand(partial, precision):
    level = OptLevel("O2", max_loss_scale=256.0) if precision == "O2" else precision
    trainer, module = fitted(partial, precision=level)
    assert trainer.global_step == STEPS[partial] == len(windows(partial))
    wanted, before = by_hand(partial), flat(Classifier())
    apart = (flat(module) - wanted).norm() / (wanted - before).norm()
    assert apart < {"O0": 1e-5, "O2": 0.02, "O5": 0.08}[precision]


class Saves(Callback):
    """Saves after some micro-batches, and at the end of an epoch."""

    def __init__(self, folder, batches, hook="on_train_batch_end"):
        self.folder, self.batches = folder, batches

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.save(trainer, trainer.fit_loop.total_batch_idx)

    def on_train_epoch_end(self, trainer, pl_module):
        self.save(trainer, f"epoch{trainer.current_epoch}")

    def save(self, trainer, place):
        if place in self.batches:
            trainer.save_checkpoint(self.folder / f"{place}.ckpt")


@pytest.mark.parametrize("precision", ["O0", "O2"])
@pytest.mark.parametrize("partial", list(STEPS))
def test_a_run_that_goes_on_has_the_bits_of_the_straight_one(partial, precision, tmp_path):
    places = [3, 4, 5, "epoch0"]
    _, straight = fitted(partial, precision=precision, callbacks=[Saves(tmp_path, places)])
    for place in places:
        trainer, resumed = fitted(partial, precision=precision, ckpt_path=tmp_path / f"{place}.ckpt")
        assert trainer.global_step == STEPS[partial]
        assert torch.equal(flat(straight), flat(resumed)), place


def test_what_is_left_at_the_end_makes_no_step_and_can_be_gone_on_with(tmp_path):
    trainer, _ = fitted("carry", max_epochs=1, callbacks=[Saves(tmp_path, ["epoch0"])])
    assert trainer.global_step == 1
    trainer.save_checkpoint(tmp_path / "behind.ckpt")  # without gradients: the next epoch begins a new accumulation
    assert fitted("carry", ckpt_path=tmp_path / "epoch0.ckpt")[0].global_step == 4
    assert fitted("carry", ckpt_path=tmp_path / "behind.ckpt")[0].global_step == 3


def test_a_second_fit_begins_with_a_window_of_its_own():
    trainer, module = fitted("carry", max_epochs=1)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(16))
    assert trainer.global_step == 2


@pytest.mark.parametrize("partial", list(STEPS))
def test_schedules_can_ask_for_the_number_of_steps(partial):
    class Asks(Classifier):
        def on_train_start(self):
            self.asked = self.trainer.estimated_stepping_batches

    trainer, module = fitted(partial, module=Asks())
    assert module.asked == trainer.global_step


def test_windows_larger_than_an_epoch_are_carried_or_refused(caplog):
    trainer, _ = fitted("carry", accumulate_grad_batches=6)
    assert trainer.global_step == 2
    assert "ended without a step" not in caplog.text
    with pytest.raises(ConfigError, match=r"'drop' with 4 batches an epoch and accumulate_grad_batches=6 would never"):
        fitted("drop", accumulate_grad_batches=6)


def test_an_epoch_that_is_skipped_carries_nothing():
    class Skips(Classifier):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 2 and self.trainer.current_epoch == 0 else None

    assert fitted("carry", module=Skips())[0].global_step == 2  # 8 batches from the second epoch on
