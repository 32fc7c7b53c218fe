"""`fabricamp runs`: every run below a folder, with what its file or its logs say."""

from __future__ import annotations

import json
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
    assert rows[0][0::2] == ["of_another_trainer", "10", "unknown: no run.json"]
    assert rows[0][3] == "val_loss 0.25"
    assert [row[0] for row in rows[1:]] == ["small/version_0", "small/version_1"]
    assert [row[2] for row in rows[1:]] == ["3", "8"]
    assert [row[4] for row in rows[1:]] == ["max_steps=3 reached", "max_epochs=1 reached"]
    assert rows[2][3].startswith("val_loss ")


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


@pytest.mark.parametrize(("words", "message"), [(["."], "'.' holds no run"), (["nowhere"], "'nowhere' is no folder")])
def test_where_there_are_none(words, message, capsys):
    assert main(["runs", *words]) == 2
    assert f"{message}; give the folder of runs" in capsys.readouterr().err
