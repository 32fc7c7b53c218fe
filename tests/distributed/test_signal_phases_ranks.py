"""Signals before the first batch and after the last one, on some or all ranks: every rank ends soon, and in the same way."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from fabricamp import Callback, launch
from fabricamp.callbacks import ModelCheckpoint
from fabricamp.watchdog import watch
from tests.distributed.ranks import side_by_side
from tests.kill.attempts import attempt, import_everything
from tests.small import Classifier, loader, quiet_trainer


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory):
    import_everything(tmp_path_factory.mktemp("warm"))


def handles(pid, number):
    """Returns whether the process has a handler for the signal."""
    caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return int(caught.split()[1], 16) >> (number - 1) & 1


LATE = ("on_train_end", "on_fit_end", "teardown")


class Sends(Callback):
    """Sends a signal to the processes of ``targets`` in one hook of rank 0, which then waits until the signal ends it."""

    def __init__(self, folder, hook, targets, number):
        self.folder, self.hook, self.targets, self.number = folder, hook, targets, number

    def pass_by(self, hook, rank):
        (self.folder / f"attempt-{hook}-{rank}").touch()
        if hook == self.hook and rank == 0:
            for target in self.targets:
                pid = int((self.folder / f"attempt-pid-{target}").read_text())
                while not handles(pid, signal.SIGTERM):  # its handler is set last
                    time.sleep(0.01)
                os.kill(pid, self.number)
            (self.folder / "attempt-sent").touch()
        if hook == self.hook and hook in LATE:
            while not (self.folder / "attempt-sent").exists():
                time.sleep(0.01)
        elif hook == self.hook and rank == 0:
            threading.Event().wait()  # forever

    def setup(self, trainer, module, stage):
        self.pass_by("setup", trainer.global_rank)

    def on_train_start(self, trainer, module):
        self.pass_by("on_train_start", trainer.global_rank)

    def on_train_end(self, trainer, module):
        self.pass_by("on_train_end", trainer.global_rank)

    def on_fit_end(self, trainer, module):
        self.pass_by("on_fit_end", trainer.global_rank)

    def teardown(self, trainer, module, stage):
        self.pass_by("teardown", trainer.global_rank)


class Net(Classifier):
    def __init__(self, sends):
        super().__init__()
        self.sends = sends

    def prepare_data(self):
        self.sends.pass_by("prepare_data", 0)


def run(folder, hook, targets, number):
    def job(_armed):
        launch.interactive = lambda: False  # an interactive session would continue after Ctrl-C
        rank = int(os.environ["RANK"])
        (folder / f"attempt-pid-{rank}.part").write_text(str(os.getpid()))
        (folder / f"attempt-pid-{rank}.part").rename(folder / f"attempt-pid-{rank}")
        while not (folder / f"attempt-pid-{1 - rank}").exists():
            time.sleep(0.01)
        sends = Sends(folder, hook, targets, number)
        callbacks = [sends, ModelCheckpoint(folder / "checkpoints")]
        before = signal.getsignal(number)
        trainer = quiet_trainer(
            devices="auto", strategy="ddp", max_epochs=1, callbacks=callbacks, enable_checkpointing=True
        )
        try:
            trainer.fit(Net(sends), loader(32, 4), loader(8, 4))
        finally:
            assert signal.getsignal(number) is before

    return attempt(job, folder)


BEFORE = [
    ("prepare_data", (0,), signal.SIGTERM),
    # Rank 1 waits for rank 0 in compiled code.
    ("prepare_data", (1,), signal.SIGTERM),
    ("prepare_data", (0, 1), signal.SIGINT),
    ("setup", (0, 1), signal.SIGTERM),
    ("setup", (1,), signal.SIGINT),
    ("on_train_start", (0,), signal.SIGTERM),
]


def all_end_at_once(folder, hook, targets, number):
    watch._GRACE_SECONDS = 2.0  # for ranks that never end by themselves
    ended = run(folder, hook, targets, number)
    assert ended.codes == [128 + number] * 2, ended.failures
    assert not (folder / "checkpoints").exists() or not list((folder / "checkpoints").rglob("*.ckpt"))
    assert not list(folder.glob("attempt-on_train_end-*"))


def test_before_the_first_batch_all_end_at_once(tmp_path):
    side_by_side(*(partial(all_end_at_once, tmp_path / str(index), *case) for index, case in enumerate(BEFORE)))


@pytest.mark.parametrize(
    ("hook", "targets", "number"),
    [
        ("on_train_end", (0, 1), signal.SIGTERM),
        ("on_train_end", (0,), signal.SIGTERM),
        ("on_fit_end", (1,), signal.SIGINT),
        ("teardown", (0, 1), signal.SIGTERM),
    ],
)
def test_behind_the_last_batch_all_is_given_back_first(tmp_path, hook, targets, number):
    ended = run(tmp_path, hook, targets, number)
    assert ended.codes == [128 + number] * 2, ended.failures
    assert len(list(tmp_path.glob("attempt-on_fit_end-*"))) == 2
    assert len(list(tmp_path.glob("attempt-teardown-*"))) == 2
    (file,) = (tmp_path / "checkpoints").rglob("*.ckpt")
    assert torch.load(file, weights_only=True)["global_step"] == 4
