"""SIGTERM and SIGUSR1 on any rank: all save at the same step and exit with 143, in validation and in a wait for data too."""

from __future__ import annotations

import os
import re
import signal
import stat
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from fabricamp import Callback
from fabricamp.callbacks import ModelCheckpoint
from tests.distributed.forked import start_forked
from tests.distributed.scripts import end, finish, start, wait_for_line
from tests.inside import session
from tests.kill.attempts import attempt, import_everything
from tests.small import Classifier, data, loader, quiet_trainer


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory):
    import_everything(tmp_path_factory.mktemp("warm"))


class Late:
    """A data set with a sample that comes only after all ranks agreed to stop; reading this sample may request the stop."""

    def __init__(self, ask, number, trainer):
        self._data = data(64)
        self._ask = ask
        self._number = number
        self._trainer = trainer

    def __len__(self):
        return len(self._data)

    def __getitem__(self, index):
        if index == self._number:
            self._ask()
            wait_until_settled(self._trainer)
        return self._data[index]


def wait_until_settled(trainer):
    """Waits until the common stop position is known."""
    while not session(trainer).agreement.settled:
        time.sleep(0.01)


def wait_for(file):
    while not file.exists():
        time.sleep(0.01)


class Asked(Classifier):
    """Sends itself a signal at a step or in a validation batch, and records its position."""

    def __init__(self, where, ask, folder):
        super().__init__()
        self.where, self.ask, self.folder = where, ask, folder

    def note(self, word):
        with (self.folder / f"attempt-progress-{self.global_rank}").open("a") as file:
            file.write(f"{word}\n")

    def training_step(self, batch, batch_idx):
        self.note("t")
        time.sleep(0.01)
        if self.where == "training" and self.global_step == 5:
            self.ask()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.note("v")
        time.sleep(0.005)
        if self.where == "validating" and batch_idx == (30, 20)[self.global_rank]:
            (self.folder / f"attempt-ahead-{self.global_rank}").touch()
            wait_for(self.folder / "attempt-ahead-0")  # so rank 1 asks when rank 0 is further ahead
            self.ask()
            wait_until_settled(self.trainer)
        super().validation_step(batch, batch_idx)


def run(folder, where, *, rank=1, number=signal.SIGTERM, group=False, handler=None, codes=(143, 143), **variables):
    """Fits until rank ``rank`` gets the signal; ``handler`` is a handler that was set before the fit."""

    def job(_armed):
        os.environ.update(variables)
        own = int(os.environ["RANK"])
        if handler is not None:
            signal.signal(number, handler)

        def ask():
            if own == rank:
                os.killpg(os.getpgrp(), number) if group else os.kill(os.getpid(), number)

        trainer = quiet_trainer(
            devices="auto",
            strategy="ddp",
            max_epochs=10**6,  # without the signal it ends at the limit of ``attempt``
            min_epochs=3,
            enable_checkpointing=True,
            callbacks=[ModelCheckpoint(folder / "checkpoints", every_n_epochs=1000)],
            val_check_interval=8,
            num_sanity_val_steps=0,
        )
        training = loader(64, 4)
        if where == "waiting":
            training = DataLoader(Late(ask, 40 + own, trainer), batch_size=4)
        if where == "workers":
            training = DataLoader(data(64), batch_size=4, num_workers=1)
        trainer.fit(Asked("training" if where == "workers" else where, ask, folder), training, loader(1604, 4))

    ended = attempt(job, folder)
    assert ended.codes == [*codes], ended.failures
    (file,) = (folder / "checkpoints").rglob("*.ckpt")
    done = [(folder / f"attempt-progress-{one}").read_text().split() for one in range(2)]
    steps = torch.load(file, weights_only=True)["global_step"]
    assert done[0].count("t") == done[1].count("t") == steps
    return steps, [one.count("v") for one in done]


@pytest.mark.parametrize("rank", [0, 1])
def test_in_training(tmp_path, rank):
    steps, _ = run(tmp_path, "training", rank=rank)
    assert steps >= 6


def test_in_validation_of_unequal_length(tmp_path):
    steps, batches = run(tmp_path, "validating")
    assert steps == 8
    assert batches == [31, 31]


def test_in_a_validation_that_is_over_for_another_rank(tmp_path):
    """The rank without a further batch learns that the validation is incomplete, and calls no hook of its end."""
    batch = next(iter(loader(4, 4)))

    class Ends(Callback):
        def on_validation_end(self, trainer, module):
            (tmp_path / f"attempt-ended-{trainer.global_rank}").touch()

    class Net(Classifier):
        def validation_step(self, batch, batch_idx):
            if batch_idx == 40:
                (tmp_path / f"attempt-last-{self.global_rank}").touch()
            if batch_idx == 42:
                wait_for(tmp_path / "attempt-last-0")
                os.kill(os.getpid(), signal.SIGTERM)
                wait_until_settled(self.trainer)

    def job(_armed):
        checkpoint = ModelCheckpoint(tmp_path / "checkpoints", every_n_epochs=1000)
        options = {"devices": "auto", "strategy": "ddp", "num_sanity_val_steps": 0, "max_epochs": 2}
        trainer = quiet_trainer(**options, callbacks=[checkpoint, Ends()], enable_checkpointing=True)
        trainer.fit(Net(), loader(32, 4), [batch] * (41 + 9 * int(os.environ["RANK"])))

    ended = attempt(job, tmp_path)
    assert ended.codes == [143, 143], ended.failures
    assert list(tmp_path.glob("attempt-ended-*")) == []
    (file,) = (tmp_path / "checkpoints").iterdir()
    assert torch.load(file, weights_only=True)["global_step"] == 4


def test_a_validation_that_was_cut_is_run_again(tmp_path):
    """At the end of an epoch, the resumed run first repeats the validation and only then ends the epoch."""

    class Net(Classifier):
        def __init__(self, *, ask):
            super().__init__()
            self.ask, self.seen = ask, []

        def on_validation_start(self):
            self.seen.append(f"validation at {self.global_step}")

        def validation_step(self, batch, batch_idx):
            if self.ask and self.current_epoch == 1 and batch_idx == 1:
                os.kill(os.getpid(), signal.SIGINT)
            super().validation_step(batch, batch_idx)

        def on_validation_end(self):
            self.seen.append(f"whole {float(self.trainer.callback_metrics['val_loss']):.6f}")

        def on_train_epoch_start(self):
            self.seen.append(f"epoch {self.current_epoch}")

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}

    def fit(folder, *, ask=False):
        module = Net(ask=ask)
        checkpoint = ModelCheckpoint(tmp_path / folder, every_n_epochs=1000)
        trainer = quiet_trainer(max_epochs=3, num_sanity_val_steps=0, enable_checkpointing=True, callbacks=[checkpoint])
        trainer.fit(module, loader(16, 4), loader(16, 4), ckpt_path="auto")
        return trainer.global_step, module

    _, straight = fit("straight")
    step, cut = fit("cut", ask=True)
    assert step == 8
    assert cut.seen == straight.seen[:5]  # up to the start of the second validation
    step, resumed = fit("cut")
    assert step == 12
    assert [line for line in resumed.seen if line != "epoch 1"] == straight.seen[4:]
    for one, other in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_in_a_wait_for_data(tmp_path):
    # Batch 5 of each rank is late, and the other rank waits for its gradients.
    steps, _ = run(tmp_path, "waiting")
    assert steps == 6


def test_to_the_whole_process_group_with_loader_workers(tmp_path):
    steps, _ = run(tmp_path, "workers", group=True)
    assert steps >= 6


FAKE = """#!/bin/sh
echo "$@" >> {calls}
exit {code}
"""


@pytest.mark.parametrize(
    ("number", "job", "code", "said"),
    [
        (signal.SIGUSR1, {"SLURM_JOB_ID": "4711"}, 0, "job 4711 is requeued"),
        (
            signal.SIGUSR2,
            {"SLURM_JOB_ID": "4712", "SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "3"},
            0,
            "job 4711_3 is requeued",
        ),
        (signal.SIGUSR1, {"SLURM_JOB_ID": "4711"}, 1, "job 4711 is not requeued: scontrol ended with exit code 1"),
    ],
)
def test_sigusr1_requeues_the_job(tmp_path, capfd, number, job, code, said):
    calls, folder = tmp_path / "calls", tmp_path / "bin"
    folder.mkdir()
    command = folder / "scontrol"
    command.write_text(FAKE.format(calls=calls, code=code))
    command.chmod(command.stat().st_mode | stat.S_IEXEC)
    # The signal goes to loader workers too, as SLURM sends it.
    run(tmp_path / "run", "workers", number=number, group=True, PATH=f"{folder}:{os.environ['PATH']}", **job)
    name = said.split()[1]
    assert calls.read_text() == f"requeue {name}\n"
    assert f"{said}\n" in capfd.readouterr().err


def test_sigterm_requeues_nothing_and_without_scontrol_it_is_said(tmp_path, capfd):
    run(tmp_path / "a", "training", PATH="/nowhere", SLURM_JOB_ID="4711")
    assert "requeued" not in capfd.readouterr().err
    run(tmp_path / "b", "training", number=signal.SIGUSR1, PATH="/nowhere", SLURM_JOB_ID="4711")
    assert "job 4711 is not requeued: there is no scontrol on the PATH" in capfd.readouterr().err


@pytest.mark.parametrize("variables", [{}, {"SUBMITIT_PREEMPT_SIGNAL": "USR1", "SLURM_JOB_ID": "4711"}])
def test_submitits_handler_requeues_once_all_ranks_have_saved(tmp_path, capfd, variables):
    number = signal.SIGUSR1 if variables else signal.SIGUSR2

    def requeue(given, _frame):
        """Acts as submitit's handler: rank 0 pickles the function, requests a requeue and exits; other ranks return."""
        assert given == number
        assert len(list((tmp_path / "checkpoints").rglob("*.ckpt"))) == 1
        other = tmp_path / "attempt-process-of-rank-1"
        if os.environ["RANK"] == "1":
            other.write_text(f"{os.getpid()}\n")
            return
        wait_for_line(other)
        time.sleep(0.3)
        state = Path(f"/proc/{other.read_text().strip()}/stat").read_text().rpartition(")")[2].split()[0]
        assert state != "Z"  # rank 1 waits until the job is requeued
        raise SystemExit(-1)

    more = {"SUBMITIT_EXECUTOR": "slurm", "PATH": "/nowhere", **variables}
    run(tmp_path, "training", number=number, handler=requeue, codes=(255, 143), **more)
    assert "requeued" not in capfd.readouterr().err


SCRIPT = """
import json, os, signal, sys
from fabricamp import Trainer
from tests.small import Classifier, loader

class Net(Classifier):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 0:
            with open("progress", "a") as file:
                file.write("step\\n")
        return super().training_step(batch, batch_idx)

if __name__ == "__main__":
    trainer = Trainer(accelerator="cpu", devices=2, max_epochs=10**6, logger=False, enable_progress_bar="bar" in sys.argv,
                      enable_model_summary=False, start_method=sys.argv[1])
    trainer.fit(Net(), loader(64, 4))
    print("after", flush=True)
"""


def trained_by(folder, method, begin=start):
    """Returns the starter of two ranks that have made some steps."""
    (folder / "train.py").write_text(SCRIPT)
    process = begin(folder, "train.py", method, "bar")
    wait_for_line(folder / "progress", 5, process=process)
    return process


@pytest.mark.parametrize("method", ["fork", pytest.param("script", marks=pytest.mark.slow)])
def test_sigterm_to_the_starter(tmp_path, method):
    """The starter passes the signal on, and exits when all ranks have saved; tests/launch tests the ranks of a script too."""
    process = trained_by(tmp_path, method, start_forked if method == "fork" else start)
    try:
        process.send_signal(signal.SIGTERM)
        code, out, err = finish(process)
    finally:
        end(process)
    assert code == 143, (out, err)
    assert "after" not in out
    assert "Traceback" not in err
    steps = len((tmp_path / "progress").read_text().split())
    said = re.search(rf'Ended by SIGTERM at step {steps}; ckpt_path="last" resumes from (.*\.ckpt)\n', err)
    assert torch.load(tmp_path / said[1], weights_only=True)["global_step"] == steps


@pytest.mark.slow
def test_workers_whose_starter_is_killed_are_killed_too(tmp_path):
    """A short version is in tests/launch."""
    process = trained_by(tmp_path, "spawn")
    process.kill()
    finish(process)  # returns only when its workers have ended, because they keep its pipes open
