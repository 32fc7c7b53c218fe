"""Errors that Python or torch raise in a step get a note that says what to change."""

from __future__ import annotations

import copy
import multiprocessing
import time
from multiprocessing import resource_sharer

import pytest
import torch
from torch import nn

from fabricamp import Callback, ConfigError, Trainer, TrainingModule
from tests.small import QUIET


class Line(TrainingModule):
    """A linear module with a step that logs as a test needs it."""

    def __init__(self, dtype=torch.float32, layer=None, **options):
        super().__init__()
        self.layer = nn.Linear(2, 1, dtype=dtype) if layer is None else layer
        self.options = options

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).sum()
        self.log("loss", loss, **self.options)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def notes_of(module, batch, kind, **arguments):
    with pytest.raises(kind) as error:
        Trainer(**{**QUIET, "max_steps": 1, **arguments}).fit(module, [batch])
    return getattr(error.value, "__notes__", [])


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("on_stp", "self.log has no argument 'on_stp'; did you mean 'on_step'?"),
        ("progress_bar", "self.log has no argument 'progress_bar'; write prog_bar="),
        ("sync_dist_op", "self.log has no argument 'sync_dist_op'; write reduce_fx="),
        ("zz", "self.log has no argument 'zz' (known: name, value, prog_bar, logger"),
    ],
)
def test_an_option_that_log_does_not_take(option, words):
    (note,) = notes_of(Line(**{option: True}), torch.ones(1, 2), TypeError)
    assert note.startswith(f"fabricamp: {words}")


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float64, "64-true"), (torch.float16, "16-true"), (torch.bfloat16, "bf16-true")]
)
def test_a_module_that_is_not_float32_at_full_precision(dtype, name):
    (note,) = notes_of(Line(dtype), torch.ones(1, 2), RuntimeError)
    assert note.startswith(f"fabricamp: Line has {dtype} parameters")
    assert f"Trainer(precision={name!r})" in note
    Trainer(**{**QUIET, "max_steps": 1, "precision": name}).fit(Line(dtype), [torch.ones(1, 2)])


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
@pytest.mark.parametrize("copied", [False, True])
def test_a_half_module_that_is_called_outside_of_a_step(level, copied):
    class Averages(Callback):
        through = False

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            net = copy.deepcopy(module.layer) if copied else module.layer
            forward = trainer.precision_plugin.forward
            self.result = forward(net, batch) if self.through else net(batch)

    own = Averages()
    (note,) = notes_of(Line(), torch.ones(1, 2), RuntimeError, precision=level, callbacks=own)
    assert note.startswith(
        f"fabricamp: Line is torch.{'bfloat16' if level == 'O5' else 'float16'} at precision={level!r}"
    )
    assert "write trainer.precision_plugin.forward(net, x) for net(x)" in note
    own.through = True
    Trainer(**{**QUIET, "max_steps": 1, "precision": level, "callbacks": own}).fit(Line(), [torch.ones(1, 2)])
    assert own.result.dtype is torch.float32


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(2, 1),
        nn.Conv1d(1, 1, 1),
        nn.Bilinear(2, 2, 1),
        nn.MultiheadAttention(2, 1),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_batch_of_float64(layer):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = layer

        def forward(self, batch):
            if isinstance(layer, nn.MultiheadAttention | nn.Bilinear):
                found = self.inner(*[batch] * (3 if isinstance(layer, nn.MultiheadAttention) else 2))
            else:
                found = self.inner(batch[None] if isinstance(layer, nn.Conv1d) else batch)
            return found[0] if isinstance(found, tuple) else found

    batch = torch.ones(1, 2, dtype=torch.float64)
    (note,) = notes_of(Line(layer=Net()), batch, RuntimeError)
    assert "it was given float64, which is numpy's default; convert that with .float()" in note


def test_a_schedule_that_is_at_its_end():
    class Cycle(Line):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()
            self.lr_schedulers().step()

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            steps = self.options.pop("steps", None) or self.trainer.estimated_stepping_batches
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    (note,) = notes_of(Cycle(steps=2), torch.ones(1, 2), ValueError, max_epochs=4, max_steps=-1)
    assert note == (
        "fabricamp: a OneCycleLR of 2 steps was stepped once more; build it with "
        "total_steps=self.trainer.estimated_stepping_batches, or train with max_steps=2"
    )
    Trainer(**{**QUIET, "max_epochs": 4}).fit(Cycle(), [torch.ones(1, 2)])


class Dies(torch.utils.data.Dataset):
    """At the third sample the worker closes its connections but keeps running, as in the moment of its death."""

    def __init__(self):
        self.gone = multiprocessing.Event()

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2:
            while not resource_sharer._resource_sharer._cache:  # until the second sample waits to be received
                time.sleep(0.01)
            resource_sharer.stop()
            self.gone.set()
        return torch.ones(2)


def test_a_batch_whose_worker_is_gone():
    data = Dies()

    class Slow(Line):
        def training_step(self, batch, batch_idx):
            assert data.gone.wait(60)  # the worker reaches its third sample before the second is received
            return super().training_step(batch, batch_idx)

    with pytest.raises(OSError) as failure:  # the subclass depends on the timing of the worker's end
        Trainer(**QUIET, max_epochs=1).fit(Slow(), torch.utils.data.DataLoader(data, num_workers=1))
    assert "a DataLoader worker exited unexpectedly before its batch was taken" in failure.value.__notes__[0]


def test_other_errors_get_no_note():
    assert notes_of(Line(), torch.ones(1, 3), RuntimeError) == []
    assert notes_of(Line(on_step="yes"), torch.ones(1, 2), ConfigError) == []


def test_trainer_and_state_say_where_they_stand():
    trainer = Trainer(**{**QUIET, "max_epochs": 3, "precision": "16-mixed"})
    assert repr(trainer) == (
        "<Trainer: initializing, current_epoch=0, global_step=0, 1 process on cpu, strategy='single', precision='16-mixed'>"
    )
    assert repr(trainer.state) == "<RunState: initializing, epoch=0, global_step=0>"
    trainer.fit(Line(), [torch.ones(1, 2)] * 2)
    assert f"finished, current_epoch={trainer.current_epoch}, global_step=6, " in repr(trainer)
    assert repr(trainer.state) == f"<RunState: fit, finished, epoch={trainer.current_epoch}, global_step=6>"
    trainer.stop("enough")
    assert repr(trainer.state).endswith("global_step=6, enough>")
