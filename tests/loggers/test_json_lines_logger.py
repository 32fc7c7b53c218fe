"""JSONLinesLogger: strict JSON, complete lines, and removal of the lines after a checkpoint."""

from __future__ import annotations

import json
import math
import time

import pytest

from fabricamp import ConfigError
from fabricamp.loggers import JSONLinesLogger
from tests.small import Classifier, loader, quiet_trainer


def rows(logger):
    return [json.loads(line, parse_constant=pytest.fail) for line in logger.metrics_file.read_text().splitlines()]


def without_time(lines):
    return [{name: value for name, value in line.items() if name != "time"} for line in lines]


def test_a_line_for_each_call_in_strict_json(tmp_path):
    logger = JSONLinesLogger(tmp_path, "digits", prefix="a", flush_logs_every_n_steps=3)
    began = time.time()
    logger.log_metrics({"loss": 0.5}, 0)
    ended = time.time()
    logger.log_metrics({"loss": math.nan, "x": -math.inf}, 1)
    assert logger.metrics_file == tmp_path / "digits" / "version_0" / "metrics.jsonl"
    assert not logger.metrics_file.exists(), "both wait"
    logger.close()
    assert without_time(rows(logger)) == [{"step": 0, "a-loss": 0.5}, {"step": 1, "a-loss": "nan", "a-x": "-inf"}]
    assert began - 0.001 <= rows(logger)[0]["time"] <= ended + 0.001
    assert math.isnan(float(rows(logger)[1]["a-loss"]))


def test_what_a_killed_run_left_unfinished_is_cut_and_later_lines_follow(tmp_path):
    first = JSONLinesLogger(tmp_path, version="run")
    first.log_metrics({"loss": 1.0}, 0)
    first.close()
    first.metrics_file.write_text(first.metrics_file.read_text() + '{"step": 1, "lo')
    second = JSONLinesLogger(tmp_path, version="run")
    second.log_metrics({"loss": 2.0}, 1)
    second.close()
    assert without_time(rows(second)) == [{"step": 0, "loss": 1.0}, {"step": 1, "loss": 2.0}]


def test_a_resumed_run_takes_the_lines_behind_its_checkpoint_back(tmp_path):
    def train(steps, **options):
        logger = JSONLinesLogger(tmp_path, version="run", flush_logs_every_n_steps=1)
        trainer = quiet_trainer(max_steps=steps, log_every_n_steps=1, logger=logger)
        trainer.fit(Classifier(), loader(), **options)
        return trainer, logger

    trainer, logger = train(3)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    train(8, ckpt_path=tmp_path / "a.ckpt")
    assert [line["step"] for line in rows(logger)] == list(range(8))
    train(6, ckpt_path=tmp_path / "a.ckpt")
    assert [line["step"] for line in rows(logger)] == list(range(6))


def test_another_runs_file_is_left_alone(tmp_path):
    one, other = JSONLinesLogger(tmp_path, version="one"), JSONLinesLogger(tmp_path, version="other")
    one.log_metrics({"loss": 1.0}, 0)
    for step in range(3):
        other.log_metrics({"loss": 2.0}, step)
    other.save()
    other.load_state_dict(one.state_dict())
    assert len(rows(other)) == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"flush_logs_every_n_steps": 0}, "flush_logs_every_n_steps=0 is not allowed; give a whole number from 1"),
        ({"flush_logs_every_n_steps": "often"}, "flush_logs_every_n_steps='often' is not allowed"),
        ({"flush_logs_every_n_steps": 1.5}, "flush_logs_every_n_steps=1.5 is not allowed"),
        ({"name": 1.5}, r"\(name=1.5\): give a string or None"),
        ({"prefix": 3}, r"\(prefix=3\): give a string or None"),
    ],
)
def test_wrong_arguments(options, words):
    with pytest.raises(ConfigError, match=f"JSONLinesLogger.*{words}"):
        JSONLinesLogger("runs", **options)
