"""Callbacks in a validation see the values that the step before it has logged, also between two flushes."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from fabricamp import Callback, TrainingModule
from fabricamp.callbacks import ModelCheckpoint
from tests.distributed.ranks import run_ranks
from tests.inside import session
from tests.small import quiet_trainer

HOOKS = ("on_validation_start", "on_validation_epoch_end", "on_validation_end")


class Counts(TrainingModule):
    """Logs the number of its micro-batch in four ways; rank 1 adds a hundred."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.batches = 0

    def training_step(self, batch, batch_idx):
        self.batches += 1
        value = float(self.batches + 100 * self.global_rank)
        self.log("number", value)
        self.log("tensor", torch.tensor(value))
        self.log("both", value, on_step=True, on_epoch=True)
        if self.batches != 6:  # not logged in the last step
            self.log("some", value)
        return self.layer(batch).sum()

    def validation_step(self, batch, batch_idx):
        self.log("val", 1.0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Looks(Callback):
    """Records the values that callbacks and monitors see in a validation within the fit."""

    def __init__(self):
        self.seen = {name: [] for name in HOOKS}

    def _look(self, trainer, name):
        if trainer.sanity_checking:
            return
        values = {key: float(value) for key, value in trainer.callback_metrics.items() if not key.startswith("val")}
        monitored = {key: float(value) for key, value in trainer.monitored_metrics.items() if not key.startswith("val")}
        assert monitored == values
        self.seen[name].append(values)


for hook in HOOKS:
    setattr(Looks, hook, lambda self, trainer, pl_module, hook=hook: self._look(trainer, hook))


def expected(batch, some=None):
    return {"number": batch, "tensor": batch, "both": batch, "both_step": batch, "some": some or batch}


def looked(**options):
    looks = Looks()
    trainer = quiet_trainer(max_epochs=1, val_check_interval=3, callbacks=looks, **options)
    trainer.fit(Counts(), DataLoader(torch.zeros(6 * trainer.world_size, 1)), DataLoader(torch.zeros(2, 1)))
    return looks.seen


@pytest.mark.parametrize("options", [{}, {"log_every_n_steps": 1}, {"log_every_n_steps": 2}, {"log_every_n_steps": 3}])
def test_callbacks_see_the_last_step(options):
    assert looked(**options) == {name: [expected(3), expected(6, 5)] for name in HOOKS}


def test_within_a_window_too():
    assert looked(accumulate_grad_batches=2)["on_validation_end"] == [expected(3), expected(6, 5)]


def test_ranks_see_the_mean_of_all():
    def ranks():
        return looked(devices="auto", log_every_n_steps=2)

    for seen in run_ranks(ranks, 2, backend=None):
        assert seen == {name: [expected(53), expected(56, 55)] for name in HOOKS}


def test_loggers_get_the_rows_that_they_got(tmp_path):
    """Reading values makes no flush: rows are written every log_every_n_steps steps, as without it."""
    rows = []

    def noting(trainer):
        session(trainer).metrics.sinks.append(lambda values, step: rows.append((step, values.get("number"))))

    class Notes(Callback):
        def on_train_start(self, trainer, pl_module):
            noting(trainer)

    trainer = quiet_trainer(max_epochs=1, val_check_interval=3, log_every_n_steps=2, callbacks=Notes())
    trainer.fit(Counts(), DataLoader(torch.zeros(6, 1)), DataLoader(torch.zeros(2, 1)))
    assert [row for row in rows if row[1] is not None] == [(2, 2.0), (4, 4.0), (6, 6.0)]


def test_a_checkpoint_behind_a_validation_is_judged_by_the_step_before_it(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, monitor="number", mode="max")
    trainer = quiet_trainer(max_epochs=1, val_check_interval=3, enable_checkpointing=True, callbacks=checkpoint)
    trainer.fit(Counts(), DataLoader(torch.zeros(7, 1)), DataLoader(torch.zeros(2, 1)))
    assert float(checkpoint.best_model_score) == 6
