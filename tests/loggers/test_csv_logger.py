"""CSVLogger: the file after every kind of run."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fabricamp.errors import ConfigError
from fabricamp.loggers import CSVLogger, TensorBoardLogger
from fabricamp.strategies import DDP
from tests.distributed.ranks import run_ranks
from tests.small import Classifier, loader, quiet_trainer


def rows(logger) -> list[dict[str, str]]:
    with logger.metrics_file.open(newline="") as file:
        return list(csv.DictReader(file))


def test_new_metrics_become_new_columns(tmp_path):
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    logger.log_metrics({"loss": 1.5}, 1)
    logger.log_metrics({"loss": 0.5, "acc": 0.25}, 2)
    logger.log_metrics({"lr": 0.1}, 3)
    logger.save()
    assert logger.metrics_file.read_text() == "step,loss,acc,lr\n1,1.5,,\n2,0.5,0.25,\n3,,,0.1\n"
    assert [path.name for path in logger.folder.iterdir()] == ["metrics.csv"]


def test_it_writes_every_n_steps_and_at_the_end(tmp_path):
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=100)
    for step in (50, 48):
        logger.log_metrics({"loss": 1.0}, step)
    assert not logger.metrics_file.exists()
    logger.log_metrics({"loss": 1.0}, 100)
    logger._backlog.wait()
    assert len(rows(logger)) == 3
    logger.log_metrics({"loss": 1.0}, 150)
    logger._backlog.wait()
    assert len(rows(logger)) == 3
    logger.close()
    assert len(rows(logger)) == 4


def test_a_resumed_run_appends_after_what_a_killed_one_left(tmp_path):
    first = CSVLogger(tmp_path, version="run", flush_logs_every_n_steps=1)
    first.log_metrics({"loss": 1.0}, 1)
    first.save()
    with first.metrics_file.open("a") as file:
        file.write("2,0.")
    second = CSVLogger(tmp_path, version="run")
    second.log_metrics({"loss": 0.5, "acc": 1.0}, 2)
    second.close()
    assert rows(second) == [{"step": "1", "loss": "1.0", "acc": ""}, {"step": "2", "loss": "0.5", "acc": "1.0"}]


def test_a_second_run_gets_the_next_version(tmp_path):
    for version in range(2):
        logger = CSVLogger(tmp_path, name="digits", prefix="p")
        logger.log_metrics({"loss": 1.0}, 1)
        logger.log_hyperparams({"lr": 0.1})
        logger.close()
        assert logger.folder == tmp_path / "digits" / f"version_{version}"
        assert rows(logger) == [{"step": "1", "p-loss": "1.0"}]
        assert (logger.folder / "hparams.yaml").read_text() == "lr: 0.1\n"


@given(
    calls=st.lists(
        st.tuples(st.dictionaries(st.sampled_from('abc,"d é'), st.floats(), min_size=1), st.booleans()), max_size=12
    )
)
@settings(max_examples=50, deadline=None)
def test_whatever_is_logged_is_in_the_file(tmp_path_factory, calls):
    logger = CSVLogger(tmp_path_factory.mktemp("csv"))
    for step, (metrics, save) in enumerate(calls):
        logger.log_metrics(metrics, step)
        if save:
            logger.save()
    logger.close()
    back = rows(logger) if calls else []
    found = [{name: float(text) for name, text in row.items() if text and name != "step"} for row in back]
    assert repr(found) == repr(
        [
            {name: metrics[name] for name in one if name in metrics}
            for one, (metrics, _) in zip(found, calls, strict=True)
        ]
    )
    assert [set(one) for one in found] == [set(metrics) for metrics, _ in calls]


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    logger.log_metrics({"loss": 1.0}, 1)
    logger.close()
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments(tmp_path):
    with pytest.raises(ConfigError, match="flush_logs_every_n_steps=0"):
        CSVLogger(tmp_path, flush_logs_every_n_steps=0)
    with pytest.raises(ConfigError, match="save_dir=None"):
        CSVLogger(None)
    with pytest.raises(ConfigError, match=r"version=1\.5"):
        CSVLogger(tmp_path, version=1.5)


def test_a_folder_that_cannot_be_made_is_an_error_with_the_cure(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"cannot make a folder for this run in .*file.*: Not a directory; give another"
    ):
        _ = CSVLogger(tmp_path / "file").version


def test_a_folder_that_rank_0_cannot_make_ends_every_rank(tmp_path):
    (tmp_path / "file").write_text("no folder")

    def work():
        trainer = quiet_trainer(
            strategy=DDP(timeout=60), devices="auto", max_steps=1, logger=CSVLogger(tmp_path / "file")
        )
        with pytest.raises(ConfigError, match="cannot make a folder for this run") as caught:
            trainer.fit(Classifier(), loader(16))
        return str(caught.value)

    first, other = run_ranks(work, 2, backend=None)
    assert first == other


def test_the_experiment_has_the_rows_that_are_not_written(tmp_path, monkeypatch):
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"a": torch.tensor(1.0)}, 3)
    assert logger.experiment.metrics == [{"a": 1.0, "step": 3}]
    assert list(logger.experiment.metrics[0]) == ["a", "step"]
    logger.save()
    assert logger.experiment.metrics == []


@pytest.mark.parametrize("params", [{"lr": 0.1}, {}])
def test_the_folder_is_there_after_the_hyperparameters(tmp_path, params):
    logger = CSVLogger(tmp_path, version="mine")
    logger.log_hyperparams(params)
    assert (tmp_path / "fabricamp_logs" / "mine").is_dir()
    logger.close()


def test_the_experiment_takes_what_lightnings_takes(tmp_path, monkeypatch):
    logger = CSVLogger(tmp_path)
    logger.experiment.log_metrics({"a": 1.0}, 3)
    logger.experiment.save()
    logger.log_graph(None)
    assert (logger.folder / "metrics.csv").read_text().split() == ["step,a", "3,1.0"]
    monkeypatch.setenv("RANK", "1")
    logger.experiment.log_metrics({"a": 2.0}, 4)
    monkeypatch.delenv("RANK")
    logger.save()
    assert len((logger.folder / "metrics.csv").read_text().split()) == 2


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_hyper_parameters_that_have_no_equality_are_logged_again_where_they_changed(tmp_path, kind):
    logger = kind(tmp_path, version="run")
    file = logger.folder / "hparams.yaml"

    def written(values):
        file.unlink(missing_ok=True)
        logger.log_hyperparams(values)
        logger.save()
        return file.exists()

    values = {"array": np.ones(2), "tensors": [torch.ones(2), {"scalar": np.float32(1)}]}
    assert written(values)
    assert not written({"array": np.ones(2), "tensors": [torch.ones(2), {"scalar": np.float32(1)}]})
    assert not written({"array": np.ones(2)})
    assert written({"array": np.zeros(2)})
    assert written({"frame": np.array([[float("nan")]])})
    assert not written({"frame": np.array([[float("nan")]])})
    logger.close()
