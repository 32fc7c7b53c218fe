"""The lines that tell how a fit begins and why it ended."""

import io
import re
import signal
import sys

import pytest
from torch.utils.data import DataLoader

from fabricamp import Callback
from fabricamp.callbacks import EarlyStopping, ModelCheckpoint
from fabricamp.engine import notices
from fabricamp.loggers import CSVLogger
from tests.small import Classifier, data, loader, quiet_trainer


class AtStep(Callback):
    """Sends a signal behind a step."""

    def __init__(self, step, number):
        self.step, self.number = step, number

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            signal.raise_signal(self.number)


@pytest.fixture
def lines(capfd, tmp_path, monkeypatch):
    """Fits in a folder of its own; returns what was printed beside the bar's and the summary's lines."""
    monkeypatch.chdir(tmp_path)

    def run(*callbacks, ckpt_path=None, **options):
        shows = {"enable_model_summary": True, "enable_checkpointing": True, "logger": True}
        trainer = quiet_trainer(callbacks=list(callbacks), **{**shows, **options})
        trainer.fit(Classifier(), loader(16), loader(8), ckpt_path=ckpt_path)
        printed = capfd.readouterr().out.splitlines()
        others = re.compile(r"(Name|net|---|epoch| *[\d,]+ parameters|Memory)")
        return [line for line in printed if not others.match(line)]

    return run


def test_a_fit_says_what_it_runs_on_where_its_files_are_and_why_it_ended(lines):
    assert lines(max_epochs=2, precision="O1") == [
        "CPU, 1 process, strategy single, precision O1",
        "Logs and checkpoints: fabricamp_logs/version_0",
        "Ended at step 8: max_epochs=2 reached; checkpoint: fabricamp_logs/version_0/checkpoints/epoch=1-step=8.ckpt",
    ]
    resumed = "Resumed from fabricamp_logs/version_0/checkpoints/epoch=1-step=8.ckpt: epoch 3/9, step 8"
    assert lines(max_epochs=9, max_steps=9, ckpt_path="last")[2:3] == [resumed]
    again = lines(max_epochs=2, ckpt_path="fabricamp_logs/version_0/checkpoints/epoch=1-step=8.ckpt")
    assert again[2].endswith("version_0/checkpoints/epoch=1-step=8.ckpt: epoch 2/2, step 8")
    assert again[3].startswith("Nothing left to train at step 8: max_epochs=2 reached already; checkpoint: ")


def test_the_best_checkpoint_is_named_with_its_score(lines):
    *_, end = lines(
        ModelCheckpoint("kept", monitor="step", mode="max"),
        EarlyStopping("val_loss", patience=0, min_delta=9),
        max_steps=9,
    )
    assert re.fullmatch(r"Ended at step 8: .*val_loss.*; best checkpoint \(step 8\): kept/epoch=1-step=8\.ckpt", end)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"max_time": {"seconds": 0}}, "Ended at step 1: max_time"),
        ({"limit_train_batches": 0}, "Nothing was trained: limit_train_batches=0"),
        ({"max_steps": 3, "logger": False}, "Checkpoints: checkpoints"),
        ({"max_steps": 3, "enable_checkpointing": False}, "Logs: fabricamp_logs/version_0"),
        ({"fast_dev_run": 2}, "fast_dev_run: 2 batches of each loader, without logs and checkpoints"),
    ],
)
def test_other_ends_and_places(lines, options, line):
    assert line in [one.split(";")[0] for one in lines(**options)]


def test_a_run_that_begins_behind_the_values_of_another_says_so(lines):
    def beginning(**options):
        return [one for one in lines(logger=CSVLogger("csv", version=0), **options) if one.startswith("An earlier run")]

    assert beginning(max_epochs=1) == []
    (line,) = beginning(max_epochs=1)
    assert "csv/fabricamp_logs/version_0" in line
    assert beginning(max_epochs=2, ckpt_path="last") == []


def test_the_number_of_epochs_that_nobody_gave_is_said(lines):
    class Stop(Callback):
        def on_train_epoch_end(self, trainer, module):
            trainer.should_stop = True

    said = lines(Stop(), logger=False, enable_checkpointing=False)
    assert said[1:] == [
        "max_epochs was not given: 1000 epochs (-1 for no limit)",
        "Ended at step 4: should_stop was set",
    ]


def test_a_reader_that_is_gone_is_no_reason_for_a_run_to_fail(monkeypatch):
    class Gone(io.StringIO):
        def flush(self):
            raise BrokenPipeError

    class Leave(Callback):
        def on_train_start(self, trainer, module):
            monkeypatch.setattr(sys, "stdout", Gone())

    trainer = quiet_trainer(callbacks=Leave(), max_epochs=2, enable_progress_bar=True)
    trainer.fit(Classifier(), loader(16))
    assert "Ended at step 8" in sys.stdout.getvalue()
    assert trainer.state.status == "finished"


def test_an_interruption_at_a_prompt_says_how_to_go_on(lines):
    *_, end = lines(AtStep(6, signal.SIGINT), max_epochs=3)
    assert re.fullmatch(r'Interrupted at step 6; ckpt_path="last" goes on from .*epoch=1-step=6\.ckpt', end)


def test_nothing_is_said_where_bar_and_summary_are_switched_off_and_once_of_two_processes(lines):
    assert lines(max_epochs=1, enable_model_summary=False) == []
    two = lines(max_epochs=1, devices=2, start_method="fork", logger=False)
    assert two[0] == "CPU, 2 processes, strategy ddp, precision O0"
    assert [line.split()[0] for line in two] == ["CPU,", "Checkpoints:", "Ended"]


def test_an_evaluation_says_whose_weights_it_takes(lines, capfd):
    lines(max_epochs=1)
    trainer = quiet_trainer(enable_progress_bar=True)
    trainer.test(Classifier(), loader(8), ckpt_path="fabricamp_logs/version_0/checkpoints/epoch=0-step=4.ckpt")
    out = capfd.readouterr().out
    assert out.startswith("Weights from fabricamp_logs/version_0/checkpoints/epoch=0-step=4.ckpt, step 4\n")
    assert out.count("test_loss") == 1


def test_on_a_terminal_a_line_is_broken_between_words(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    notices.say("Ended at step 8: max_epochs=2 reached; checkpoint: a/version_0/checkpoints/epoch=1-step=8.ckpt")
    assert capsys.readouterr().out.splitlines() == [
        "Ended at step 8: max_epochs=2 reached;",
        "  checkpoint:",
        "  a/version_0/checkpoints/epoch=1-step=8.ckpt",
    ]


@pytest.mark.parametrize(("workers", "epochs", "said"), [(0, 2, False), (2, 2, True), (2, 1, False)])
def test_workers_that_start_anew_in_each_epoch_are_said(workers, epochs, said, capfd):
    train = DataLoader(data(8), batch_size=4, num_workers=workers)
    quiet_trainer(enable_model_summary=True, max_epochs=epochs).fit(Classifier(), train)
    line = "2 workers of the train loader: started anew in each epoch (persistent_workers=True keeps them)"
    assert (line in capfd.readouterr().out.splitlines()) == said


def test_workers_that_stay_by_themselves_are_said(capfd):
    train = DataLoader(data(8), batch_size=4, num_workers=1)
    quiet_trainer(enable_model_summary=True, max_epochs=2, per_sample_seed=True).fit(Classifier(), train)
    line = "1 worker of the train loader: kept over the epochs (per_sample_seed), with the dataset as it is now"
    assert line in capfd.readouterr().out.splitlines()
