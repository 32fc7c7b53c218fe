"""The log lines at the start and at the end of a fit."""

import re
import signal

import pytest
from torch import nn
from torch.utils.data import DataLoader

from fabricamp import Callback, Compile
from fabricamp.callbacks import DeviceStatsMonitor, EarlyStopping, GradientMonitor, LearningRateMonitor, ModelCheckpoint
from fabricamp.loggers import CSVLogger, TensorBoardLogger
from fabricamp.nn import fuse
from tests.small import Classifier, data, loader, quiet_trainer


class AtStep(Callback):
    """Sends a signal after a step."""

    def __init__(self, step, number):
        self.step, self.number = step, number

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            signal.raise_signal(self.number)


@pytest.fixture
def lines(caplog, tmp_path, monkeypatch):
    """Runs a fit in a new folder; returns the log lines without those of the bar and the model summary."""
    monkeypatch.chdir(tmp_path)

    def run(*callbacks, ckpt_path=None, **options):
        shows = {"enable_model_summary": True, "enable_checkpointing": True, "logger": True, "log_every_n_steps": 1}
        trainer = quiet_trainer(callbacks=list(callbacks), **{**shows, **options})
        caplog.clear()
        trainer.fit(Classifier(), loader(16), loader(8), ckpt_path=ckpt_path)
        others = re.compile(r"(Name|net|---|epoch| *[\d,]+ parameters|Memory)")
        return [line for line in caplog.messages if not others.match(line)]

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
    assert again[1].endswith("version_0/checkpoints/epoch=1-step=8.ckpt: epoch 2/2, step 8")
    assert again[2].startswith("Nothing left to train at step 8: max_epochs=2 reached already; checkpoint: ")


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


def test_every_folder_of_logs_and_checkpoints_is_named(lines):
    loggers = [
        CSVLogger("csv", name="net"),
        CSVLogger("more", name="net"),
        TensorBoardLogger("csv", name="net", version=0),
    ]
    assert lines(logger=loggers, max_steps=1)[1:3] == [
        "Logs and checkpoints: csv/net/version_0",
        "Logs: more/net/version_0",
    ]
    elsewhere = [ModelCheckpoint("kept"), ModelCheckpoint("also", monitor="val_loss")]
    assert lines(*elsewhere, logger=loggers[1], max_steps=1)[1:3] == [
        "Logs: more/net/version_0",
        "Checkpoints: kept, also",
    ]


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


def test_an_interruption_at_a_prompt_says_how_to_go_on(lines):
    *_, end = lines(AtStep(6, signal.SIGINT), max_epochs=3)
    assert (
        end
        == 'Interrupted at step 6; ckpt_path="last" resumes from fabricamp_logs/version_0/checkpoints/epoch=1-step=6.ckpt'
    )


def test_nothing_is_said_where_bar_and_summary_are_switched_off(lines):
    """tests/test_messages.py tests that only one of several processes logs."""
    assert lines(max_epochs=1, enable_model_summary=False) == []


def test_an_evaluation_says_whose_weights_it_takes(lines, caplog):
    lines(max_epochs=1)
    caplog.clear()
    trainer = quiet_trainer(enable_progress_bar=True)
    trainer.test(Classifier(), loader(8), ckpt_path="fabricamp_logs/version_0/checkpoints/epoch=0-step=4.ckpt")
    first, *others = caplog.messages
    assert first == "Weights from fabricamp_logs/version_0/checkpoints/epoch=0-step=4.ckpt, step 4"
    assert sum("test_loss" in line for line in others) == 1


@pytest.mark.parametrize("monitor", [None, "val_loss"])
def test_best_without_a_monitor_is_said_to_be_the_newest(monitor, lines, caplog):
    kept = ModelCheckpoint("kept", monitor=monitor, filename="one")
    lines(kept, max_epochs=1)
    trainer = quiet_trainer(max_epochs=1, enable_progress_bar=True, enable_checkpointing=True, callbacks=[kept])
    for ckpt_path, newest in (("best", monitor is None), ("kept/one.ckpt", False)):
        caplog.clear()
        trainer.test(Classifier(), loader(8), ckpt_path=ckpt_path)
        why = ": the newest, as ModelCheckpoint has no monitor" if newest else ""
        assert caplog.messages[0] == f"Weights from kept/one.ckpt, step 4{why}"
    trainer.fit(Classifier(), loader(8), loader(8))
    caplog.clear()
    trainer.test(dataloaders=loader(8))
    assert f": the {'newest' if monitor is None else 'best'} of the last fit (" in caplog.text


@pytest.mark.parametrize(("workers", "epochs", "said"), [(0, 2, False), (2, 2, True), (2, 1, False)])
def test_workers_that_start_anew_in_each_epoch_are_said(workers, epochs, said, caplog):
    train = DataLoader(data(8), batch_size=4, num_workers=workers)
    quiet_trainer(enable_model_summary=True, max_epochs=epochs).fit(Classifier(), train)
    line = "2 workers of the train loader: started anew in each epoch (persistent_workers=True keeps them)"
    assert (line in caplog.messages) == said


def test_workers_that_stay_by_themselves_are_said(caplog):
    train = DataLoader(data(8), batch_size=4, num_workers=1)
    quiet_trainer(enable_model_summary=True, max_epochs=2, per_sample_seed=True).fit(Classifier(), train)
    line = "1 worker of the train loader: kept over the epochs (per_sample_seed), with the dataset as it is now"
    assert line in caplog.messages


NO_ROW = "log_every_n_steps={} is more than the {} of this run: only values of epochs will be logged"

FEW_ROWS = "log_every_n_steps=50 logs {} of the {} steps of this run: log_every_n_steps={} shows its course"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_epochs": 2, "log_every_n_steps": 50}, NO_ROW.format(50, "8 steps")),
        ({"max_epochs": 2, "log_every_n_steps": 9}, NO_ROW.format(9, "8 steps")),
        ({"max_steps": 1, "log_every_n_steps": 2}, NO_ROW.format(2, "1 step")),
        ({"max_epochs": 2, "accumulate_grad_batches": 2, "log_every_n_steps": 5}, NO_ROW.format(5, "4 steps")),
        (
            {"max_epochs": 2, "log_every_n_steps": 50, "enable_progress_bar": False, "enable_model_summary": False},
            NO_ROW.format(50, "8 steps"),
        ),
        ({"max_epochs": 2, "log_every_n_steps": 8}, ""),
        ({"max_epochs": 2, "log_every_n_steps": 0}, ""),
        ({"max_epochs": 2, "log_every_n_steps": 50, "logger": False}, ""),
        ({"fast_dev_run": 2, "log_every_n_steps": 50}, ""),
        ({"limit_train_batches": 0, "max_epochs": 1, "log_every_n_steps": 50}, ""),
        ({"max_epochs": 24, "log_every_n_steps": 50}, FEW_ROWS.format(1, 96, 10)),
        ({"max_steps": 249, "max_epochs": -1, "log_every_n_steps": 50}, FEW_ROWS.format(4, 249, 20)),
        ({"max_steps": 250, "max_epochs": -1, "log_every_n_steps": 50}, ""),
        ({"max_epochs": 24, "log_every_n_steps": 49}, ""),
    ],
)
def test_a_run_that_will_log_no_or_few_steps_says_so_before_it_begins(lines, caplog, options, said):
    class Begun(Callback):
        def on_train_start(self, trainer, module):
            self.before = list(caplog.messages)

    begun = Begun()
    begun.before = []
    found = [line for line in lines(begun, **options) if "log_every_n_steps" in line]
    assert found == ([said] if said else [])
    assert set(found) <= set(begun.before)


def test_a_resumed_run_is_asked_for_its_own_steps(lines):
    lines(max_steps=6)
    for last, said in ((9, 1), (10, 0)):
        found = lines(max_steps=last, max_epochs=-1, ckpt_path="last", log_every_n_steps=10)
        assert sum("log_every_n_steps=10 is more than the 3 steps of this run" in line for line in found) == said
        lines(max_steps=6)


@pytest.mark.parametrize("every", [0, 50])
def test_without_rows_only_values_of_epochs_are_logged(every, tmp_path):
    monitors = [LearningRateMonitor("step"), GradientMonitor(), DeviceStatsMonitor(cpu_stats=True)]
    logger = CSVLogger(tmp_path)
    trainer = quiet_trainer(logger=logger, max_epochs=2, log_every_n_steps=every, callbacks=monitors, precision="O1")
    trainer.fit(Classifier(), loader(16), loader(8))
    (file,) = tmp_path.rglob("metrics.csv")
    names, *rows = file.read_text().splitlines()
    assert set(names.split(",")) == {"epoch", "step", "val_loss"}
    assert len(rows) == 2


class WithNorms(Classifier):
    def __init__(self):
        super().__init__()
        self.net.insert(0, nn.RMSNorm(8))
        self.net.insert(2, nn.RMSNorm(16))
        self.net.insert(1, nn.RMSNorm(8, elementwise_affine=False))


SLOW_NORMS = (
    "2 RMSNorms have fp32 weights and, at precision 'LEVEL', inputs in DTYPE: torch takes several operations for each; "
    "fabricamp.nn.fuse(module) before the fit, or in configure_model(), makes them one"
)


@pytest.mark.parametrize(
    ("level", "dtype"), [("O1", "float16"), ("O4", "bfloat16"), ("O0", ""), ("O2", ""), ("O5", ""), ("bf16-true", "")]
)
def test_norms_that_autocast_makes_slow_are_told_with_their_cure(caplog, level, dtype):
    def said(module, **options):
        caplog.clear()
        with caplog.at_level("INFO", logger="fabricamp"):
            quiet_trainer(max_steps=1, precision=level, **options).fit(module, loader(16))
        lines = [
            record.getMessage() for record in caplog.records if record.name == "fabricamp"
        ]  # not of torch's compiler
        return [line for line in lines if "RMSNorms have" in line]

    expected = [SLOW_NORMS.replace("LEVEL", level).replace("DTYPE", dtype)] if dtype else []
    assert said(WithNorms()) == expected
    assert said(fuse(WithNorms())) == []
    assert said(WithNorms(), compile=Compile("modules", backend="eager")) == []
    assert said(Classifier()) == []
