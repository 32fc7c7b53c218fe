"""`fabricamp runs` lists every run below a folder, with the values of its run file or logs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from fabricamp import Callback
from fabricamp.callbacks import EarlyStopping, ModelCheckpoint
from fabricamp.cli import main
from fabricamp.loggers import CSVLogger, JSONLinesLogger
from fabricamp.runs.reading import find_runs
from tests.small import Classifier, loader, quiet_trainer


def test_runs_with_their_best_values_and_how_they_ended(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    for options in (
        {"max_steps": 3},
        {"max_epochs": 1, "callbacks": ModelCheckpoint(monitor="val_loss"), "enable_checkpointing": True},
    ):
        quiet_trainer(logger=CSVLogger("runs", name="small"), **options).fit(Classifier(), loader(), loader())
    old = Path("runs/of_another_trainer")
    old.mkdir()
    (old / "metrics.csv").write_text("step,val_loss,loss\n0,,4\n7,0.25,1\n9,0.5,nan\n")
    assert main(["runs", "runs"]) == 0
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in capsys.readouterr().out.splitlines()
        if "│" in line
    ]
    ended = "unknown: no run.json: another trainer's"
    assert rows[2][0::2] == ["runs/of_another_trainer", "10", ended]
    # Nobody has monitored it: the lowest is no checkpoint's.
    assert rows[2][3] == "min val_loss 0.25"
    assert [row[0] for row in rows[:2]] == ["runs/small/version_0", "runs/small/version_1"]
    assert [row[2] for row in rows[:2]] == ["3", "8"]
    assert [row[4] for row in rows[:2]] == ["max_steps=3 reached", "max_epochs=1 reached"]
    assert rows[1][3].startswith("val_loss ")


def test_an_evaluation_stands_where_its_time_is(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    logger = CSVLogger("runs")
    quiet_trainer(logger=logger, max_steps=1, log_every_n_steps=1).fit(Classifier(), loader())
    quiet_trainer(logger=CSVLogger("runs")).test(Classifier(), loader())
    fit, evaluation = Path(logger.log_dir), Path(logger.log_dir).with_name("version_1")
    tomorrow = datetime.fromisoformat(json.loads((fit / "run.json").read_text())["started"]) + timedelta(days=1)
    (evaluation / "run_test.json").unlink()  # as if it had been killed
    for file in evaluation.iterdir():
        os.utime(file, (tomorrow.timestamp(), tomorrow.timestamp()))
    assert main(["runs", "runs"]) == 0
    first, second = (line for line in capsys.readouterr().out.splitlines() if "version_" in line)
    assert ("version_0" in first, "version_1" in second) == (True, True)
    assert tomorrow.isoformat(sep=" ")[:16] in second
    assert "unknown: no run.json" in second


def test_a_run_with_several_loggers_is_one_row(tmp_path, capsys):
    loggers = [
        CSVLogger(tmp_path, name="first"),
        JSONLinesLogger(tmp_path, name="second"),
        CSVLogger(tmp_path / "third"),
    ]
    quiet_trainer(logger=loggers, max_steps=1, log_every_n_steps=1).fit(Classifier(), loader())
    assert len(find_runs(tmp_path)) == 3
    assert main(["runs", str(tmp_path)]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "version_0" in line)
    assert "first/version_0" in row


def test_names_and_times_stay_in_one_line_of_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for folder in ("digits/version_10", "digits/version_11"):
        Path(folder).mkdir(parents=True)
        Path(folder, "metrics.csv").write_text("step,validation_loss\n7,0.2525\n")
        ended = {"started": "2026-11-23T15:27:00", "status": "finished", "reason": "max_epochs=20 reached"}
        Path(folder, "run.json").write_text(json.dumps(ended))
    assert main(["runs", "."]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("digits/version_1" in line and "2026-11-23 15:27" in line for line in lines) == 2
    assert sum("validation_loss" in line for line in lines) == 2


def test_a_resumed_run_began_with_its_first_fit(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    folder = Path("runs/version_0")
    folder.mkdir(parents=True)
    # The first fit began at the latest local time: the offsets differ by a change of the clock.
    starts = {
        "run-1.json": "2026-10-25T02:50:00+02:00",
        "run-2.json": "2026-10-25T02:10:00+01:00",
        "run.json": "2026-10-25T02:20:00+01:00",
    }
    for name, started in starts.items():
        ended = {"started": started, "status": "interrupted", "reason": "interrupted", "step": 5}
        (folder / name).write_text(json.dumps(ended))
    (folder / "run-3.json").write_text("cut off")
    assert main(["runs", "runs"]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "version_0" in line)
    cells = [cell.strip() for cell in row.split("│")]
    assert (cells[1], cells[4]) == ("2026-10-25 02:50", "interrupted")


@pytest.mark.parametrize("name", ["val_accuracy", "val_precision_at_recall_0.95", "v"])
@pytest.mark.parametrize("columns", [80, 100, 140])
def test_the_name_of_a_metric_is_in_one_line(name, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    folder = Path("digits/version_10")
    folder.mkdir(parents=True)
    best = {name: 0.9722, "val_loss": 0.1454}
    reason = "val_loss has not improved on 0.1454 in 2 checks"
    ended = {"started": "2026-11-23T15:27:00", "status": "finished", "reason": reason, "step": 4380, "best": best}
    (folder / "run.json").write_text(json.dumps(ended))
    assert main(["runs", "."]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    heads = [head.strip() for head in lines[0].split("┃")]
    cells = [[cell.strip() for cell in line.split("│")] for line in lines if "│" in line]
    best = heads.index("best")
    assert any(name in row[best].split() for row in cells)
    assert any("0.9722" in row[best].split() for row in cells)
    assert ("started" in heads) == (cells[0][1] == "2026-11-23 15:27")
    assert ("started" in heads) == ("without: started" not in lines[-1])


@pytest.mark.parametrize("columns", [30, 60, 80, 100])
def test_no_word_is_broken(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    folder = Path("fabricamp_logs/of_a_long_name/version_10")
    folder.mkdir(parents=True)
    reason = "val_loss has not improved on 0.1454 in 12 checks"
    ended = {"started": "2026-11-23T15:27:00", "status": "finished", "reason": reason, "step": 4380}
    (folder / "run.json").write_text(json.dumps({**ended, "best": {"val_loss": 0.1454}}))
    assert main(["runs", "."]) == 0
    out = capsys.readouterr().out
    words = out.replace("│", " ").replace("┃", " ").split()
    assert {str(folder), *reason.split()} <= set(words)
    dropped = {30: "started, steps, best", 60: "started, steps, best", 80: "started", 100: ""}[columns]
    assert (f"in {columns} columns without: {dropped}" in out) == (dropped != "")
    assert ("0.1454" in words, "2026-11-23" in words) == (True, columns == 100)


def test_a_pipe_gets_a_line_for_each_run(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    folder = Path("fabricamp_logs/version_0")
    folder.mkdir(parents=True)
    reason = "ValueError: " + "a long message " * 20
    content = {"status": "failed", "reason": reason, "step": 4, "best": {"val_loss": 0.5, "f1": 0.25}}
    (folder / "run.json").write_text(json.dumps(content))
    assert main(["runs", "."]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split("\t") == ["run", "started", "steps", "best", "how it ended"]
    name, _, steps, best, ended = row.split("\t")
    assert (name, steps, best) == (str(folder), "4", "val_loss 0.5, f1 0.25")
    assert ended == f"failed: {reason}".rstrip()


@pytest.mark.parametrize("into", ["file", "pipe"])
def test_columns_ask_for_the_table_in_a_pipe_and_never_in_a_file(into):
    """`watch` shows what comes through a pipe."""
    folder = Path("logs/version_0")
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"status": "finished", "reason": "max_steps=4 reached", "step": 4}))
    shell = f"{sys.executable} -m fabricamp runs logs {'> out; cat out' if into == 'file' else '| cat'}"
    environment = {**os.environ, "COLUMNS": "60"}
    text = subprocess.run(shell, shell=True, env=environment, capture_output=True, text=True, check=True).stdout
    assert ("\t" in text.splitlines()[0]) == (into == "file")


def test_programs_read_the_list_in_a_pipe():
    folder = Path("logs/version_0")
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"status": "finished", "reason": "max_steps=4 reached", "step": 4}))
    (folder / "run_test.json").write_text(json.dumps({"status": "finished", "ckpt_path": "a/b.ckpt"}))
    shell = f"{sys.executable} -m fabricamp runs logs | cut -f 1,3,5"
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    listed = subprocess.run(shell, shell=True, env=environment, capture_output=True, text=True, check=True).stdout
    assert listed.splitlines() == [
        "run\tsteps\thow it ended",
        "logs/version_0\t4\tmax_steps=4 reached",
        "logs/version_0\t\ttest of b.ckpt",
    ]


def test_evaluations_stand_below_the_run_whose_checkpoint_they_loaded(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    logs = {"save_dir": "runs", "name": ""}
    first = quiet_trainer(
        logger=CSVLogger(**logs), max_steps=4, enable_checkpointing=True, callbacks=ModelCheckpoint(filename="four")
    )
    first.fit(Classifier(), loader())
    first.validate(Classifier(), loader(), ckpt_path="last")
    quiet_trainer(logger=CSVLogger(**logs), max_steps=1).fit(Classifier(), loader())
    loggers = [CSVLogger(**logs), JSONLinesLogger("runs", name="lines")]
    path = next(str(file) for file in Path("runs").rglob("four.ckpt"))
    quiet_trainer(logger=loggers).test(Classifier(), loader(), ckpt_path=path)
    quiet_trainer(logger=CSVLogger(**logs)).test(Classifier(), loader())
    assert main(["runs", "runs"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "version_" in line]
    rows = [[cell.strip() for cell in line.split("│")] for line in lines]
    assert [(line[:2] == "  ", row[0], row[2], row[4]) for line, row in zip(lines, rows, strict=True)] == [
        (False, "runs/version_0", "4", "max_steps=4 reached"),
        (True, "runs/version_0", "", "validate of four.ckpt"),
        (True, "runs/version_2", "", "test of four.ckpt"),
        (False, "runs/version_1", "1", "max_steps=1 reached"),
        (False, "runs/version_3", "", "test"),
    ]
    assert [row[3].split()[0] for row in (*rows[1:3], rows[4])] == ["val_loss", "test_loss", "test_loss"]


def saving(**options):
    """Returns a Trainer that logs into the next folder and saves."""
    logger = CSVLogger("runs", name=None)
    return quiet_trainer(logger=logger, enable_checkpointing=True, log_every_n_steps=1, **options)


def newest(folder):
    return max(Path(folder).rglob("*.ckpt"), key=lambda file: int(file.stem.partition("step=")[2]))


def names_in(folder):
    return sorted(one.name for one in Path(folder).iterdir())


class Described(Classifier):
    def __init__(self, lr=0.1):
        super().__init__(lr)
        self.save_hyperparameters()


@pytest.fixture
def listed(capsys, monkeypatch):
    """Returns the rows of a folder, as a pipe gets them."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def rows(folder):
        assert main(["runs", folder]) == 0
        return [line.split("\t") for line in capsys.readouterr().out.splitlines()[1:]]

    return rows


def test_a_run_that_goes_on_in_a_folder_of_its_own_says_of_which(listed, capsys, monkeypatch):
    saving(max_steps=2).fit(Described(), loader())
    saving(max_steps=4).fit(Described(), loader(), ckpt_path="last")
    Path("elsewhere").symlink_to("runs")
    first, second = listed("runs")
    assert (first[0], first[2], first[4]) == ("runs/version_0", "2", "max_steps=2 reached")
    assert (second[0], second[2]) == ("runs/version_1", "4")
    assert second[4] == "resumes version_0: max_steps=4 reached"
    logger = CSVLogger("runs", name=None, version=1)  # and once more, in its own folder
    quiet_trainer(logger=logger, max_steps=5).fit(Described(), loader(), ckpt_path=newest("runs/version_1"))
    assert listed("runs")[1][4] == "resumes version_0: max_steps=5 reached"
    for columns in ("40", "60", "80"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["runs", str(Path("runs").absolute())]) == 0
        shown = capsys.readouterr().out
        assert "…" not in shown
        assert "version_0:" in shown.split()  # no word is broken
    monkeypatch.delenv("COLUMNS")
    # plot takes each name as it is printed.
    for folder in ("runs", ".", "runs/version_1"):
        assert main(["plot", *(row[0] for row in listed(folder))]) == 0
        assert "loss" in capsys.readouterr().out


def stops(**options):
    """Returns an EarlyStopping that ends a run after its first validation."""
    return EarlyStopping("val_loss", divergence_threshold=0.0, **options)


@pytest.mark.parametrize("limits", [{"max_steps": 2}, {"max_epochs": 1}, {}], ids=["steps", "epochs", "EarlyStopping"])
def test_a_start_with_nothing_left_to_train_is_no_run(limits, listed, caplog):
    more = {} if limits else {"callbacks": stops(), "max_epochs": 9}
    saving(**limits, **more).fit(Described(), loader(8), loader(8))
    caplog.clear()
    more = {} if limits else {"callbacks": stops(), "max_epochs": 9}
    trainer = saving(enable_model_summary=True, **limits, **more)
    trainer.fit(Described(), loader(8), loader(8), ckpt_path="auto")
    assert "Nothing left to train at step 2" in caplog.text
    assert "Logs and checkpoints" not in caplog.text
    assert [row[0] for row in listed("runs")] == ["runs/version_0"]
    assert names_in("runs") == ["version_0"]
    trainer = saving(max_epochs=3, min_epochs=3, callbacks=[] if limits else [stops()])
    trainer.fit(Described(), loader(8), loader(8), ckpt_path="auto")  # min_epochs keeps the stop waiting
    assert trainer.current_epoch == 3
    assert names_in("runs") == ["version_0", "version_1"]


@pytest.mark.parametrize("version", ["mine", None])
def test_where_it_logs_nevertheless_its_folder_stays(version, listed):
    saving(max_steps=2).fit(Described(), loader())

    class Logs(Callback):
        def on_fit_start(self, trainer, module):
            trainer.logger.log_metrics({"seen": 1.0}, 2)

    for callbacks, rows in (([], 1), ([Logs()], 2)):
        logger = CSVLogger("runs", name=None, version=version)
        quiet_trainer(logger=logger, max_steps=2, callbacks=callbacks).fit(
            Described(), loader(), ckpt_path="runs/version_0/checkpoints/epoch=0-step=2.ckpt"
        )
        assert len(listed("runs")) == len(names_in("runs")) == rows


def test_a_second_fit_with_nothing_left_keeps_the_record_of_the_first():
    trainer = saving(max_steps=2)
    trainer.fit(Classifier(), loader())
    before = Path("runs/version_0/run.json").read_text()
    trainer.fit(Classifier(), loader())
    assert names_in("runs/version_0") == ["checkpoints", "metrics.csv", "run.json"]
    assert Path("runs/version_0/run.json").read_text() == before


def test_an_evaluation_that_fails_says_so(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")

    class Fails(Classifier):
        def test_step(self, batch, batch_idx):
            raise ValueError("a bug")

    logger = CSVLogger("runs")
    with pytest.raises(ValueError, match="a bug"):
        quiet_trainer(logger=logger).test(Fails(), loader())
    assert main(["runs", "runs"]) == 0
    assert "failed: test: ValueError: a bug" in capsys.readouterr().out


@pytest.mark.parametrize("options", [{"logger": False}, {"fast_dev_run": True, "logger": CSVLogger("runs")}])
def test_an_evaluation_that_logs_nothing_records_nothing(options):
    quiet_trainer(**options).predict(Classifier(), loader())
    assert not list(Path.cwd().rglob("run*.json"))


DAMAGED = {
    "best is a number": '{"best": 3}',
    "a best value is text": '{"best": {"loss": "low"}}',
    "a best value is huge": '{"best": {"loss": 1%s}}' % ("0" * 400),
    "a step is text": '{"step": "x", "best": {"a": 1}}',
    "a step is huge": '{"step": 1%s}' % ("0" * 400),
    "a number of 5000 digits": '{"step": %s}' % ("9" * 5000),
    "other folders are null": '{"other_log_folders": null}',
    "other folders are a number": '{"other_log_folders": 3}',
    "other folders are numbers": '{"other_log_folders": [3, "\\u0000"]}',
    "nested too deep": '{"step": %s' % ("[" * 100_000),
    "a list": "[]",
    "null": "null",
    "no JSON": "\x00",
    "texts are numbers": '{"status": 1, "reason": [], "started": {}}',
    "no time": '{"started": "yesterday", "status": "finished"}',
    "a time before all": '{"started": "0001-01-01T00:00:00", "status": "finished"}',
    "a strange process": '{"status": "running", "process": {"pid": 99999999999999999999, "host": 3}}',
    "no process": '{"status": "running", "process": []}',
}


@pytest.mark.parametrize("file", ["run.json", "run-1.json", "run_test.json"])
@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_hides_no_run(content, file, capsys):
    for name in ("damaged", "whole"):
        Path(name).mkdir()
        Path(name, "run.json").write_text('{"status": "finished", "step": 8, "reason": "max_epochs=1 reached"}')
    Path("damaged", file).write_text(content)
    Path("damaged/metrics.csv").write_text("step,loss\n0,1\n")
    assert main(["runs", "."]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("damaged") for line in lines)
    assert any(line.startswith("whole") and "max_epochs=1 reached" in line for line in lines)
    assert main(["plot", "damaged"]) == 0


def test_control_characters_are_shown_and_not_sent(capsys):
    folder = Path("a\x1b[2Jb\nc")
    folder.mkdir()
    ended = {"status": "\x1b[31mred", "reason": "bell\a", "started": "2026\x9b1m", "best": {"lo\rss": 1.0}}
    (folder / "run.json").write_text(json.dumps(ended))
    (folder / "metrics.csv").write_text("step,\x1b[31mloss\n0,1\n1,2\n")
    assert main(["runs", "."]) == 0
    assert main(["plot", str(folder)]) == 0
    assert main(["plot", str(folder), "--metric", "\x1b[31mloss"]) == 0
    assert main(["plot", str(folder), "--metric", "other"]) == 2
    captured = capsys.readouterr()
    for text in (captured.out, captured.err):
        assert [one for one in text if not one.isprintable() and one not in "\n\t"] == []
    for shown in (r"a\x1b[2Jb\nc", r"\x1b[31mred: bell\x07", r"2026\x9b1m", r"lo\rss 1", r"\x1b[31mloss  last 2"):
        assert shown in captured.out
    assert r"(logged: \x1b[31mloss)" in captured.err


@pytest.mark.parametrize(
    ("words", "message"), [(["."], "'.' holds no run"), (["nowhere"], "'nowhere' is not a folder")]
)
def test_where_there_are_none(words, message, capsys):
    assert main(["runs", *words]) == 2
    assert f"{message}; give the folder of runs" in capsys.readouterr().err
