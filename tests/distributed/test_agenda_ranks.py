"""Entries of the agenda on two ranks: a signal to one rank in each phase, clocks that differ, and requests beside signals."""

from __future__ import annotations

import datetime as dt
import os
import signal
from types import SimpleNamespace

from fabricamp import Callback
from fabricamp.callbacks import ModelCheckpoint
from tests.distributed.ranks import run_ranks
from tests.small import Classifier, loader, quiet_trainer


class Notes(Callback):
    """Notes the position of each micro-batch and validation; sends a signal to this process in one hook of one rank."""

    def __init__(self, hook="", at=0, rank=1):
        self.seen = []
        self.hook, self.at, self.rank = hook, at, rank

    def pass_by(self, hook, trainer):
        state = trainer.state
        self.seen.append((hook, state.epoch, state.global_step, state.batches_done))
        if (hook, state.batches_done, trainer.global_rank) == (self.hook, self.at, self.rank):
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_epoch_start(self, trainer, module):
        self.pass_by("epoch_start", trainer)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.pass_by("batch_start", trainer)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.pass_by("batch_end", trainer)

    def on_validation_start(self, trainer, module):
        self.pass_by("validation_start", trainer)

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        self.pass_by("validation_batch_end", trainer)

    def on_validation_end(self, trainer, module):
        self.pass_by("validation_end", trainer)

    def on_train_epoch_end(self, trainer, module):
        self.pass_by("epoch_end", trainer)


class Asks(Callback):
    """Asks to stop on rank 0, while rank 1 gets its signal."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_rank == 0 and trainer.state.batches_done == 4:
            trainer.should_stop = True


OPTIONS = {
    "strategy": "ddp",
    "devices": "auto",
    "max_epochs": 40,
    "accumulate_grad_batches": 2,
    "log_every_n_steps": 2,
    "val_check_interval": 5,
    "num_sanity_val_steps": 0,
}


def cut(folder, notes, *others):
    """Returns where a run with a signal ended, and what was written there."""
    keeper = ModelCheckpoint(folder)
    trainer = quiet_trainer(callbacks=[notes, keeper, *others], enable_checkpointing=True, **OPTIONS)
    try:
        trainer.fit(Classifier(), loader(40), loader(16))
    except SystemExit as end:
        code = end.code
    else:
        code = 0
    state = trainer.state
    position = (code, state.interruption, state.epoch, state.batch_idx, state.global_step, state.batches_done)
    return position, state.validated_at, keeper.best_model_path


PHASES = {
    "at an epoch's start": ("epoch_start", 0),
    "within an accumulation": ("batch_start", 2),
    "after a step": ("batch_end", 4),
    "before a validation": ("batch_end", 5),
    "at a validation's start": ("validation_start", 5),
    "in a validation": ("validation_batch_end", 5),
    "after a validation": ("validation_end", 5),
    "at an epoch's end": ("epoch_end", 5),
}


def each_phase(folder):
    return {phase: cut(folder / hook / str(at), Notes(hook, at)) for phase, (hook, at) in PHASES.items()}


def beside_a_request(folder):
    return cut(folder / "request", Notes("batch_end", 4), Asks())


def test_one_rank_signalled_in_each_phase_stops_both_at_one_position(tmp_path):
    first, second = run_ranks(each_phase, 2, tmp_path)
    for phase in PHASES:
        position, validated_at, path = first[phase]
        assert (position, validated_at) == second[phase][:2], phase
        assert position[:2] == (143, "SIGTERM"), phase
        assert PHASES[phase][1] <= position[5] < 400, phase
        assert path or position[4] == 0, phase


def test_a_signal_beside_a_request_of_the_other_rank_ends_both_alike(tmp_path):
    first, second = run_ranks(beside_a_request, 2, tmp_path)
    assert first[:2] == second[:2]
    assert 4 <= first[0][5] < 400


# -- clocks ------------------------------------------------------------------------------------------------------------------------


class Clock:
    """Stands in for the module ``time``: a step takes a second; the clock of rank 1 is set 5 s ahead in the first epoch."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


class Ticks(Callback):
    def __init__(self, clock):
        self.clock = clock

    def on_fit_start(self, trainer, module):
        trainer.state.started = self.clock.now

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.clock.now += 1 + 5 * (trainer.global_rank == 1 and trainer.global_step == 2)


def by_time(folder):
    """Returns the steps of validations, saves and the end, for times of which the ranks' clocks are 5 s apart."""
    from fabricamp.arguments import cadence
    from fabricamp.engine import entries

    ended = {}
    for name, options in {
        "validation": {"val_check_interval": {"seconds": 4}},
        "max_time": {"max_time": {"seconds": 12}},
    }.items():
        clock = Clock()
        cadence.time = entries.time = SimpleNamespace(monotonic=clock.monotonic)
        notes = Notes()
        keeper = ModelCheckpoint(folder / name, train_time_interval=dt.timedelta(seconds=3), save_top_k=-1)
        trainer = quiet_trainer(
            strategy="ddp", devices="auto", max_epochs=2, num_sanity_val_steps=0, enable_checkpointing=True,
            callbacks=[Ticks(clock), notes, keeper], **options,
        )  # fmt: skip
        trainer.fit(Classifier(), loader(80), loader(8))
        validated = [step for hook, _, step, _ in notes.seen if hook == "validation_end"]
        saved = sorted(int(path.stem.split("step=")[1]) for path in (folder / name).glob("*.ckpt"))
        ended[name] = (validated, saved, trainer.global_step, trainer.state.stop_reason)
    return ended


def test_clocks_5_s_apart_give_every_rank_the_same_steps(tmp_path):
    first, second = run_ranks(by_time, 2, tmp_path)
    assert first == second
    assert first["validation"][0] == [4, 8, 12, 16, 20]  # by the clock of rank 0
    assert first["validation"][1][0] == 3
    assert first["validation"][2] == 20
    # Rank 1's time is over first, and it asks; both stop after the same step.
    assert 7 <= first["max_time"][2] < 12
    assert first["max_time"][3] == "max_time"
