"""SIGTERM, Ctrl-C and SIGUSR1 in every phase of fit: it ends soon, and the resumed run ends as an uninterrupted one."""

from __future__ import annotations

import copy
import os
import random
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from fabricamp import Callback, DataModule
from fabricamp.callbacks import EarlyStopping, ModelCheckpoint
from fabricamp.callbacks import base as callback_base
from fabricamp.loggers import Logger
from fabricamp.rng import isolate_rng
from tests.small import Classifier, data, quiet_trainer

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGUSR1: 143}

# With patience 2 the run ends after epoch 6 of 9; if EarlyStopping judged an interrupted epoch, it would end after epoch 3.
VALUES = (5.0, 3.0, 4.0, 2.0, 1.0, 1.5, 1.5, 0.5, 0.1)
STEPS = 7 * 4

HOOKS = {
    "prepare_data": ("prepare_data",),
    "setup": ("setup", "configure_optimizers", "on_fit_start", "on_train_start"),
    "sanity check": ("on_sanity_check_start", "on_sanity_check_end"),
    "step": ("training_step", "on_before_backward", "on_before_optimizer_step"),
    "between steps": ("on_train_batch_start", "on_train_batch_end", "data"),
    "validation": ("on_validation_start", "validation_step", "on_validation_batch_end", "on_validation_end"),
    "flush": ("log_metrics",),
    "checkpoint save": ("on_save_checkpoint", "state_dict"),
    "epoch start": ("on_train_epoch_start",),
    "epoch end": ("on_train_epoch_end", "on_validation_epoch_end"),
    "on_train_end": ("on_train_end",),
    "on_fit_end": ("on_fit_end",),
    "teardown": ("teardown", "close"),
}


class Fuse:
    """Sends this process a signal at the ``when``-th call of ``place``, or of any Python function between two hooks."""

    def __init__(self, place="", when=0, number=signal.SIGTERM):
        self.place, self.when, self.number = place, when, number
        self.counts = {}
        self.sent = False

    def pass_by(self, place):
        self.counts[place] = self.counts.get(place, 0) + 1
        if place == self.place and self.counts[place] == self.when:
            self.sent = True
            sys.setprofile(None)
            os.kill(os.getpid(), self.number)

    def on_call(self, _frame, event, _argument):
        if event == "call":
            self.pass_by("any call")

    def arm(self, *, calls):
        sys.setprofile(self.on_call if calls and self.place in ("", "any call") else None)


class Everywhere(Callback):
    """Triggers the fuse in every hook, and counts epochs, batches and validations: none may be repeated or lost."""

    def __init__(self, fuse):
        self.fuse = fuse
        self.counts = {"epochs": 0, "begun": 0, "batches": 0, "validations": 0, "validated": 0}

    def state_dict(self):
        self.fuse.pass_by("state_dict")
        return {"counts": dict(self.counts)}

    def load_state_dict(self, state):
        self.counts = dict(state["counts"])

    def setup(self, trainer, module, stage):
        self.fuse.arm(calls=True)

    def on_train_epoch_start(self, trainer, module):
        self.counts["begun"] += 1

    def on_train_epoch_end(self, trainer, module):
        self.counts["epochs"] += 1

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.counts["batches"] += 1

    def on_validation_start(self, trainer, module):
        self.counts["validations"] += not trainer.sanity_checking

    def on_validation_end(self, trainer, module):
        self.counts["validated"] += not trainer.sanity_checking

    def teardown(self, trainer, module, stage):
        self.fuse.arm(calls=False)


def _passing(name, function):
    def hook(self, *arguments, **options):
        self.fuse.pass_by(name)
        return function(self, *arguments, **options)

    return hook


for _name in [name for name in vars(callback_base.Callback) if name.startswith("on_") or name in ("setup", "teardown")]:
    setattr(Everywhere, _name, _passing(_name, getattr(Everywhere, _name)))


class Averaging(Callback):
    """Averages the weights over epochs like SWA, and writes the average into the module when training has ended."""

    def __init__(self):
        self.averages, self.number = [], 0

    def state_dict(self):
        return {"averages": self.averages, "number": self.number}

    def load_state_dict(self, state):
        self.averages, self.number = [one.clone() for one in state["averages"]], state["number"]

    def on_train_epoch_end(self, trainer, module):
        self.number += 1
        weights = [one.detach().clone() for one in module.parameters()]
        self.averages = self.averages or [torch.zeros_like(one) for one in weights]
        for average, weight in zip(self.averages, weights, strict=True):
            average.add_((weight - average) / self.number)

    def on_train_end(self, trainer, module):
        with torch.no_grad():
            for average, weight in zip(self.averages, module.parameters(), strict=True):
                weight.copy_(average)


class Book(Logger):
    """A logger that keeps its values in memory."""

    log_dir = None

    def __init__(self, fuse):
        self.fuse, self.closed = fuse, False

    def log_metrics(self, metrics, step=None):
        self.fuse.pass_by("log_metrics")

    def log_hyperparams(self, params):
        pass

    def save(self):
        pass

    def close(self):
        self.fuse.pass_by("close")
        self.closed = True


class Samples(DataModule):
    """Shuffled batches; reading a sample triggers the fuse."""

    def __init__(self, fuse):
        super().__init__()
        self.fuse = fuse

    def prepare_data(self):
        self.fuse.pass_by("prepare_data")

    def train_dataloader(self):
        def collate(samples):
            self.fuse.pass_by("data")
            return torch.utils.data.default_collate(samples)

        return DataLoader(data(16), 4, shuffle=True, collate_fn=collate)

    def val_dataloader(self):
        return DataLoader(data(12, seed=1), 4)


class Net(Classifier):
    def __init__(self, fuse):
        super().__init__()
        self.fuse = fuse
        self.net.insert(1, torch.nn.Dropout(0.2))

    def training_step(self, batch, batch_idx):
        self.fuse.pass_by("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.fuse.pass_by("validation_step")
        self.log("val_loss", VALUES[self.current_epoch])

    def configure_optimizers(self):
        self.fuse.pass_by("configure_optimizers")
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def fit(folder, fuse):
    """Starts or resumes a run; returns (exit code or None, final state, logger)."""
    everywhere, book, module = Everywhere(fuse), Book(fuse), Net(fuse)
    best = ModelCheckpoint(folder, monitor="val_loss", every="3 steps, 1 epoch")
    stopping, averaging = EarlyStopping("val_loss", patience=2), Averaging()
    trainer = quiet_trainer(
        max_epochs=9,
        callbacks=[everywhere, averaging, stopping, best],
        enable_checkpointing=True,
        logger=book,
        log_every_n_steps=3,
        num_sanity_val_steps=1,
    )
    code = None
    try:
        trainer.fit(module, datamodule=Samples(fuse), ckpt_path="auto")
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.setprofile(None)
    state = {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "optimizer": copy.deepcopy(trainer.optimizers[0].state_dict()) if trainer.optimizers else None,
        "random": torch.get_rng_state(),
        "counts": everywhere.counts,
        "averages": averaging.state_dict(),
        "stopping": stopping.state_dict(),
        # A suffix is added if the interrupted run left a file of this name.
        "best": (Path(best.best_model_path).name.replace("-v1", "").replace("-v2", ""), best.best_model_score),
        "position": (trainer.global_step, trainer.current_epoch),
    }
    return code, state, book


def differences(one, other, name="state"):
    if isinstance(one, torch.Tensor):
        return [] if isinstance(other, torch.Tensor) and torch.equal(one, other) else [name]
    if isinstance(one, dict) and isinstance(other, dict):
        return [
            found
            for key in one.keys() | other.keys()
            for found in differences(one.get(key), other.get(key), f"{name}.{key}")
        ]
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        return [
            found
            for index, pair in enumerate(zip(one, other, strict=True))
            for found in differences(*pair, f"{name}[{index}]")
        ]
    return [] if one == other else [f"{name}: {one!r} and {other!r}"]


@pytest.fixture
def straight(tmp_path, monkeypatch):
    """Returns the final state of an uninterrupted run, and the number of its calls at each place."""
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("fabricamp.launch.interactive", lambda: False)  # a prompt would continue after Ctrl-C
    with isolate_rng():
        for folder in ("warm", "straight"):  # the first run makes further calls for imports
            torch.manual_seed(1)
            fuse = Fuse()
            code, state, book = fit(tmp_path / folder, fuse)
    assert code is None
    assert book.closed
    assert state["position"] == (STEPS, 7)
    assert state["counts"] == {"epochs": 7, "begun": 7, "batches": STEPS, "validations": 7, "validated": 7}
    return state, fuse.counts


def attempt(folder, fuse, straight):
    """Interrupts and resumes a run; returns the differences from the uninterrupted one."""
    handlers = [signal.getsignal(number) for number in NUMBERS]
    with isolate_rng():
        torch.manual_seed(1)
        code, _, book = fit(folder, fuse)
        wrong = [] if fuse.sent else ["no signal was sent"]
        wrong += [] if code == CODES[fuse.number] else [f"exit code {code}"]
        wrong += [] if book.closed else ["the logger is open"]
        wrong += [] if [signal.getsignal(number) for number in NUMBERS] == handlers else ["other handlers than before"]
        # A run that was interrupted before any checkpoint starts again, with the same random numbers.
        torch.manual_seed(1)
        code, state, _ = fit(folder, Fuse())
        wrong += [] if code is None else [f"exit code {code} of the run that goes on"]
    return wrong + differences(state, straight)


def attempts(folder, straight, per_phase, generator):
    state, counts = straight
    wrong, number = {}, 0
    for phase, places in {**HOOKS, "any moment": ("any call",)}.items():
        for _ in range(per_phase):
            place = generator.choice(places)
            fuse = Fuse(place, generator.randint(1, counts[place]), NUMBERS[number % 3])
            number += 1
            if found := attempt(folder / str(number), fuse, state):
                wrong[f"{phase}: {fuse.number.name} at {place} {fuse.when} of {counts[place]}"] = found
    return wrong


def test_what_goes_on_ends_as_the_run_that_nobody_cut(tmp_path, straight):
    wrong = attempts(tmp_path, straight, 2, random.Random(1))
    assert not wrong, "\n".join(f"{name}: {found}" for name, found in wrong.items())


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_hundred_signals_in_every_phase(tmp_path, straight):
    """A hundred signals of each kind."""
    wrong = attempts(tmp_path, straight, 300, random.Random(2))
    assert not wrong, "\n".join(f"{name}: {found}" for name, found in wrong.items())
