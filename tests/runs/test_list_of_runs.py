"""`fabricamp runs` lists every run below a folder, with the values of its run file or logs."""

from __future__ import annotations

import json
import os
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from fabricamp.callbacks import ModelCheckpoint
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
    assert rows[2][0::2] == ["of_another_trainer", "10", "unknown: an evaluation or another trainer's (no run.json)"]
    assert rows[2][3] == "val_loss 0.25"
    assert [row[0] for row in rows[:2]] == ["small/version_0", "small/version_1"]
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
    for file in evaluation.iterdir():
        os.utime(file, (tomorrow.timestamp(), tomorrow.timestamp()))
    assert main(["runs", "runs"]) == 0
    first, second = (line for line in capsys.readouterr().out.splitlines() if "version_" in line)
    assert ("version_0" in first, "version_1" in second) == (True, True)
    assert tomorrow.isoformat(sep=" ")[:16] in second
    assert "unknown: an evaluation" in second


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
    cells = [[cell.strip() for cell in line.split("│")] for line in lines if "│" in line]
    assert any(name in row[3].split() for row in cells)
    assert any("0.9722" in row[3].split() for row in cells)
    assert cells[0][1] == "2026-11-23 15:27"


@pytest.mark.parametrize(
    ("words", "message"), [(["."], "'.' holds no run"), (["nowhere"], "'nowhere' is not a folder")]
)
def test_where_there_are_none(words, message, capsys):
    assert main(["runs", *words]) == 2
    assert f"{message}; give the folder of runs" in capsys.readouterr().err
