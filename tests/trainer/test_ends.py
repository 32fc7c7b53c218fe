"""Hooks at the end of a run that a signal, ``nan_policy="stop"`` or a limit ends, and the resumed run after each."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from fabricamp import Callback
from fabricamp.callbacks import EarlyStopping, ModelCheckpoint
from fabricamp.state import NON_FINITE
from tests.small import Classifier, loader, quiet_trainer


class Diary(Callback):
    """Records the hooks of epochs and of the end with their steps; requests an end at step ``at`` in ``hook``."""

    def __init__(self, hook="", at=0, ask=None):
        self.notes = []
        self.hook, self.at, self._ask = hook, at, ask

    def note(self, name, trainer):
        self.notes.append((name, trainer.global_step))
        self.ask(name, trainer)

    def ask(self, name, trainer):
        if name == self.hook and trainer.global_step == self.at:
            self._ask(trainer)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.ask("batch", trainer)

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        self.ask("validation batch", trainer)

    def on_validation_end(self, trainer, module):
        self.note("validated", trainer)

    def on_train_epoch_end(self, trainer, module):
        self.note("epoch", trainer)

    def on_train_end(self, trainer, module):
        self.note("train", trainer)

    def on_fit_end(self, trainer, module):
        self.note("fit", trainer)

    def on_exception(self, trainer, module, exception):
        self.note(type(exception).__name__, trainer)


class Means(Classifier):
    """Logs each batch's number for the epoch's mean."""

    def training_step(self, batch, batch_idx):
        self.log("number", float(batch_idx), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def terminate(_trainer):
    os.kill(os.getpid(), signal.SIGTERM)


def stop(trainer):
    trainer.should_stop = True


def fit(folder, diary, *more, path="auto", **options):
    """Four steps an epoch, validation at its end; returns (trainer, module, what it ended with)."""
    checkpoint = ModelCheckpoint(folder, save_last=True, every_n_epochs=1)
    trainer = quiet_trainer(
        **{"max_epochs": 3, "num_sanity_val_steps": 0, **options},
        enable_checkpointing=True,
        callbacks=[diary, *more, checkpoint],
    )
    module, code = Means(), None
    try:
        trainer.fit(module, loader(16), loader(8), ckpt_path=path)
    except SystemExit as ended:
        code = ended.code
    return trainer, module, code


WHOLE = [("validated", 4), ("epoch", 4), ("validated", 8), ("epoch", 8), ("validated", 12), ("epoch", 12)]
END = [("train", 12), ("fit", 12)]


@pytest.mark.parametrize(
    ("hook", "at", "cut", "goes_on"),
    [
        ("batch", 6, WHOLE[:2], WHOLE[2:]),
        # After an epoch's last batch (before the validation), in the validation, after it, at the end of the epoch.
        ("batch", 8, WHOLE[:2], WHOLE[2:]),
        ("validation batch", 8, WHOLE[:2], WHOLE[2:]),
        ("validated", 8, WHOLE[:3], WHOLE[3:]),
        ("epoch", 8, WHOLE[:4], WHOLE[4:]),
        ("batch", 12, WHOLE[:4], WHOLE[4:]),
        ("validation batch", 12, WHOLE[:4], WHOLE[4:]),
        ("validated", 12, WHOLE[:5], WHOLE[5:]),
        ("epoch", 12, WHOLE, []),
    ],
)
@pytest.mark.parametrize("limit", [{"max_epochs": 3}, {"max_epochs": -1, "max_steps": 12}])
def test_what_a_signal_cuts_has_no_end(tmp_path, hook, at, cut, goes_on, limit):
    """The resumed run calls the hooks of the end, each once."""
    if (hook, at) == ("validated", 12) and "max_steps" in limit:
        cut, goes_on = WHOLE, []  # after its last step the run ends by itself
    first, second = Diary(hook, at, terminate), Diary()
    _, _, code = fit(tmp_path, first, **limit)
    assert code == 143
    assert first.notes == [*cut, ("KeyboardInterrupt", at)]
    trainer, resumed, code = fit(tmp_path, second, **limit)
    assert (code, second.notes) == (None, [*goes_on, *END])
    straight, module, _ = fit(tmp_path / "straight", Diary(), **limit)
    assert (trainer.global_step, trainer.current_epoch) == (straight.global_step, straight.current_epoch) == (12, 3)
    assert all(map(torch.equal, module.parameters(), resumed.parameters()))
    assert trainer.callback_metrics.keys() == straight.callback_metrics.keys()
    for key, value in straight.callback_metrics.items():
        assert torch.equal(value, trainer.callback_metrics[key]), key


@pytest.mark.parametrize(
    ("options", "diary"),
    [
        ({"max_steps": 6}, Diary()),
        ({}, Diary("batch", 6, stop)),
        ({"max_time": {"seconds": 0}, "min_steps": 6}, Diary()),
    ],
    ids=["max_steps", "should_stop", "max_time"],
)
def test_a_limit_within_an_epoch_ends_it_once_and_more_goes_on_within_it(tmp_path, options, diary):
    trainer, _, code = fit(tmp_path, diary, **options)
    assert code is None
    assert diary.notes == [*WHOLE[:2], ("epoch", 6), ("train", 6), ("fit", 6)]
    assert float(trainer.callback_metrics["number"]) == 0.5  # batches 0 and 1
    # With the same limits there is nothing to do, and no epoch ends again.
    if "max_steps" in options:
        again = Diary()
        trainer, _, _ = fit(tmp_path, again, **options)
        assert again.notes == [("train", 6), ("fit", 6)]
        assert float(trainer.callback_metrics["number"]) == 0.5
    # With higher limits the epoch continues, and ends a second time with the values of all its batches.
    again = Diary()
    trainer, resumed, _ = fit(tmp_path, again)
    assert again.notes == [*WHOLE[2:], *END]
    assert float(trainer.callback_metrics["number"]) == 1.5
    _, module, _ = fit(tmp_path / "straight", Diary())
    assert all(map(torch.equal, module.parameters(), resumed.parameters()))


def test_a_signal_is_heeded_while_a_stop_waits_for_min_steps_and_the_stop_is_kept(tmp_path):
    first, second = Diary("batch", 2, stop), Diary()
    terminating = Diary("batch", 5, terminate)
    trainer, _, code = fit(tmp_path, first, terminating, min_steps=10)
    assert (code, trainer.global_step) == (143, 5)
    trainer, _, code = fit(tmp_path, second, min_steps=10)
    assert (code, trainer.global_step, trainer.state.stop_reason) == (None, 10, "should_stop was set")
    assert second.notes[-3:] == [("epoch", 10), ("train", 10), ("fit", 10)]


class Spoils(Callback):
    def on_after_backward(self, trainer, module):
        if trainer.global_step == 4:
            next(module.parameters()).grad.fill_(float("nan"))


def test_nan_policy_stop_judges_no_epoch_and_ends_training(tmp_path):
    """The epoch's end is left out, as its values are not finite; the hooks of training's end run, because ``fit`` returns."""
    diary = Diary()
    trainer, _, code = fit(tmp_path, diary, Spoils(), nan_policy="stop")
    step = trainer.global_step
    assert (code, trainer.state.stop_reason) == (None, NON_FINITE)
    assert diary.notes == [*WHOLE[:2], ("NonFiniteError", step), ("train", step), ("fit", step)]


class Scripted(Classifier):
    values = (5.0, 4.0, 4.5, 4.5, 3.0, 2.0)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.values[self.current_epoch])


def early(folder, patience=2, *more, path="auto"):
    stopping = EarlyStopping("val_loss", patience=patience)
    trainer = quiet_trainer(
        max_epochs=6, enable_checkpointing=True, callbacks=[stopping, *more, ModelCheckpoint(folder)]
    )
    try:
        trainer.fit(Scripted(), loader(8), loader(4), ckpt_path=path)
    except SystemExit as ended:
        return ended.code, stopping
    return trainer.global_step, stopping


def test_what_early_stopping_ended_stays_ended_unless_it_is_given_more(tmp_path):
    step, stopping = early(tmp_path)
    assert step == 8
    step, again = early(tmp_path)
    assert step == 8
    assert again.state_dict() == stopping.state_dict()
    step, more = early(tmp_path, patience=3)
    assert step == 12
    assert more.best_score == 2.0
    assert early(tmp_path / "other", path=None)[0] == 8


def test_an_interrupted_evaluation_has_no_end():
    class Ends(Diary):
        def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
            if batch_idx == 1:
                terminate(trainer)

    diary = Ends()
    trainer = quiet_trainer(callbacks=diary)
    with pytest.raises(SystemExit) as ended:
        trainer.validate(Classifier(), [loader(16), loader(16)], verbose=False)
    assert ended.value.code == 143
    assert diary.notes == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
