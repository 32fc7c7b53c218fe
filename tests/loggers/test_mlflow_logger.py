"""MLFlowLogger with the real MLflow: files that a new client reads back, servers that refuse or never answer."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import random
import socket
import threading
import time
import warnings
from pathlib import Path

import pytest

import fabricamp.loggers.mlflow as own
from fabricamp import Callback
from fabricamp.callbacks import ModelCheckpoint
from fabricamp.errors import ConfigError
from fabricamp.loggers import CSVLogger, MLFlowLogger, logger_collection
from fabricamp.loggers.write_queue import WriteQueue
from tests.small import Classifier, loader, quiet_trainer


@pytest.fixture(autouse=True, scope="module")
def _imported():
    """Imports the package here, as each worker collects this file and few run its tests."""
    global FileStore, MlflowClient  # noqa: PLW0603 - names of a package that is imported here
    store = pytest.importorskip("mlflow.store.tracking.file_store", reason="needs the package mlflow")
    FileStore = store.FileStore
    MlflowClient = pytest.importorskip("mlflow.tracking", reason="needs the package mlflow").MlflowClient


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "")  # so the test's end removes the logger's value
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def fresh_client(folder):
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # loggers in workers set it in their own process
    return MlflowClient(Path(folder).as_uri())


def runs_of(folder, name="lightning_logs"):
    client = fresh_client(folder)
    return client.search_runs([client.get_experiment_by_name(name).experiment_id])


def steps_of(folder, run_id, metric):
    return [one.step for one in fresh_client(folder).get_metric_history(run_id, metric)]


class WithArguments(Classifier):
    def __init__(self, lr=0.1, sizes=(1, 2), net=None):
        super().__init__(lr)
        self.save_hyperparameters()


def test_a_run_comes_back(tmp_path):
    logger = MLFlowLogger("digits", "first", save_dir=tmp_path, tags={"who": "me"}, prefix="p")
    assert list(tmp_path.iterdir()) == []  # the constructor creates no folder
    trainer = quiet_trainer(max_epochs=2, log_every_n_steps=2, logger=logger)
    trainer.fit(WithArguments(net={"act": "relu"}), loader(32, 4), loader(8, 4))
    (run,) = runs_of(tmp_path, "digits")
    assert (run.info.run_id, run.info.experiment_id) == (logger.run_id, logger.experiment_id)
    assert (logger.name, logger.version, logger.save_dir) == (logger.experiment_id, logger.run_id, str(tmp_path))
    assert (run.info.run_name, run.data.tags["who"], run.info.status) == ("first", "me", "FINISHED")
    assert run.data.params == {"lr": "0.1", "sizes": "(1, 2)", "net/act": "relu"}
    assert steps_of(tmp_path, logger.run_id, "p-loss") == [1, 3, 5, 7, 9, 11, 13, 15]
    assert steps_of(tmp_path, logger.run_id, "p-val_loss") == [7, 15]
    last = trainer.callback_metrics["val_loss"].item()
    assert run.data.metrics["p-val_loss"] == pytest.approx(last)


@pytest.mark.parametrize(("log_model", "steps"), [(False, []), (True, [8]), ("all", [2, 4, 6, 8])])
def test_checkpoints_as_artifacts(tmp_path, log_model, steps):
    class WaitsForUploads(Callback):
        """Waits for uploads: on a busy machine rotation would remove older files before they are read."""

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            logger._uploads._queue.wait()

    logger = MLFlowLogger(save_dir=tmp_path / "runs", log_model=log_model)
    checkpoint = ModelCheckpoint(tmp_path / "files", "{step}", monitor="step", mode="max", every_n_train_steps=2)
    trainer = quiet_trainer(
        logger=logger, callbacks=[checkpoint, WaitsForUploads()], max_epochs=1, enable_checkpointing=True
    )
    trainer.fit(Classifier(), loader(32, 4))
    client = fresh_client(tmp_path / "runs")
    folders = [one.path for one in client.list_artifacts(logger.run_id, "model/checkpoints")]
    assert folders == [f"model/checkpoints/step={step}" for step in steps]
    if steps:
        tag = client.get_run(logger.run_id).data.tags["best_checkpoint"]
        assert tag == f"{folders[-1]}/step=8.ckpt"
        there = Path(client.download_artifacts(logger.run_id, tag))
        assert there.read_bytes() == Path(checkpoint.best_model_path).read_bytes()


def test_an_upload_that_fails_costs_the_file_and_not_the_run(tmp_path, monkeypatch):
    def refuses(*args):
        raise ConnectionError("the store is full")

    monkeypatch.setattr(MlflowClient, "log_artifact", refuses)
    logger = MLFlowLogger(save_dir=tmp_path / "runs", log_model=True)
    with pytest.warns(RuntimeWarning, match="MLFlowLogger: the store is full; training continues"):
        quiet_trainer(
            max_epochs=1, logger=logger, callbacks=[ModelCheckpoint(tmp_path / "files")], enable_checkpointing=True
        ).fit(Classifier(), loader(32, 4))
    (run,) = runs_of(tmp_path / "runs")
    assert run.info.status == "FINISHED"


def test_names_and_values_are_made_such_as_mlflow_takes(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRUNCATE_LONG_VALUES", "false")  # a server may refuse long values
    logger = MLFlowLogger(save_dir=tmp_path)
    logger.log_metrics({"a(b)/c d-e.f:g": 1.0, "n" * 300: 2.0}, 3)
    logger.log_hyperparams({"text": "x" * 9000, **{f"p{number}": number for number in range(150)}})
    logger.close()
    (run,) = runs_of(tmp_path)
    assert run.data.metrics == {"ab/c d-e.fg": 1.0, "n" * 250: 2.0}
    assert len(run.data.params) == 151
    assert run.data.params["text"] == "x" * 6000


def test_what_the_environment_says_is_not_shown(tmp_path, monkeypatch, caplog):
    from omegaconf import OmegaConf

    monkeypatch.setenv("MY_KEY", "secret")
    monkeypatch.setenv("MY_NUMBER", "4711")
    texts = {"key": "${oc.env:MY_KEY}"}
    for number, config in enumerate([texts, {**texts, "number": "${oc.decode:${oc.env:MY_NUMBER}}"}]):
        module = Classifier()
        module.save_hyperparameters(OmegaConf.create(config))
        quiet_trainer(max_steps=1, logger=MLFlowLogger(save_dir=tmp_path / str(number))).fit(module, loader())
    (run,) = runs_of(tmp_path / "0")
    assert run.data.params == {"key": "${oc.env:MY_KEY}"}
    (run,) = runs_of(tmp_path / "1")
    assert run.data.params == {}
    assert "leaves the hyper-parameters out" in caplog.text


class Notes(Callback):
    """Writes each rank's run id, and sets a tag on every rank: only rank 0's call may have an effect."""

    def __init__(self, folder):
        self.folder = folder

    def on_fit_start(self, trainer, module):
        logger = trainer.logger
        trainer.logger.experiment.set_tag(logger.run_id, "rank", str(trainer.global_rank))
        seen = [logger.experiment_id, logger.run_id]
        (self.folder / f"rank{trainer.global_rank}").write_text(json.dumps(seen))


def test_two_ranks_make_one_run_and_a_resumed_fit_goes_on_in_it(tmp_path):
    store, seen = tmp_path / "store", []
    for epochs, path in ((1, None), (2, str(tmp_path / "checkpoints" / "last.ckpt"))):
        logger = MLFlowLogger(save_dir=store)
        trainer = quiet_trainer(
            max_epochs=epochs, devices=2, start_method="fork", strategy="ddp", log_every_n_steps=1, logger=logger,
            enable_checkpointing=True, callbacks=[Notes(tmp_path), ModelCheckpoint(tmp_path / "checkpoints", save_last=True)],
        )  # fmt: skip
        trainer.fit(WithArguments(), loader(32, 4), ckpt_path=path)
        seen += [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
        seen.append([logger.experiment_id, logger.run_id])
    assert all(one == seen[0] for one in seen)
    (run,) = runs_of(store)
    assert run.info.run_id == seen[0][1]
    assert (run.info.status, run.data.tags["rank"]) == ("FINISHED", "0")
    assert steps_of(store, run.info.run_id, "loss") == list(range(8))


def test_a_resumed_run_goes_on_but_not_in_another_experiment_nor_beside_a_run_id(tmp_path):
    def fit(logger, epochs, path=None):
        checkpoint = ModelCheckpoint(tmp_path / "checkpoints", filename=str(epochs))
        trainer = quiet_trainer(
            max_epochs=epochs, log_every_n_steps=1, logger=logger, enable_checkpointing=True, callbacks=[checkpoint]
        )
        trainer.fit(Classifier(), loader(8, 4), ckpt_path=path)
        return logger.run_id, checkpoint.best_model_path

    first, path = fit(MLFlowLogger(save_dir=tmp_path / "store"), 1)
    assert fit(MLFlowLogger(save_dir=tmp_path / "store"), 2, path)[0] == first
    assert fit(MLFlowLogger("other", save_dir=tmp_path / "store"), 2, path)[0] != first
    assert fit(MLFlowLogger(save_dir=tmp_path / "elsewhere"), 2, path)[0] != first
    second = fit(MLFlowLogger(save_dir=tmp_path / "store"), 1)[0]
    assert second != first
    assert fit(MLFlowLogger(save_dir=tmp_path / "store", run_id=second), 2, path)[0] == second
    assert {one.info.run_id for one in runs_of(tmp_path / "store")} == {first, second}
    assert steps_of(tmp_path / "store", first, "loss") == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="run_id"):
        fit(MLFlowLogger(save_dir=tmp_path / "store", run_id="0" * 32), 1)


def test_the_last_status(tmp_path):
    class Fails(Classifier):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 2:
                raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        quiet_trainer(max_epochs=1, log_every_n_steps=1, logger=MLFlowLogger(save_dir=tmp_path)).fit(Fails(), loader())
    (run,) = runs_of(tmp_path)
    assert run.info.status == "FAILED"
    for status in ("killed", "finished"):
        logger = MLFlowLogger(save_dir=tmp_path, run_id=run.info.run_id)
        logger.log_metrics({"a": 1.0}, 0)
        logger.barrier(1)
        assert runs_of(tmp_path)[0].info.status == "RUNNING"
        logger.finalize(status)
        logger.close()
        assert runs_of(tmp_path)[0].info.status == status.upper()


def test_a_run_that_never_began_is_deleted(tmp_path):
    class Broken(Classifier):
        def configure_optimizers(self):
            raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        quiet_trainer(max_epochs=1, logger=MLFlowLogger(save_dir=tmp_path)).fit(Broken(), loader())
    assert runs_of(tmp_path) == []


@pytest.fixture
def patient(monkeypatch):
    """Raises the time limits, so a slow refusal by a local server is not taken for a missing answer."""
    monkeypatch.setattr(own, "ANSWER_SECONDS", 60)
    monkeypatch.setattr(own, "LAST_SECONDS", 60)


def fit_with_trouble(uri, *callbacks):
    """Trains and logs eight steps; returns the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        trainer = quiet_trainer(
            max_epochs=1, log_every_n_steps=1, logger=MLFlowLogger(tracking_uri=uri), callbacks=list(callbacks)
        )
        trainer.fit(Classifier(), loader(32, 4))
    assert trainer.global_step == 8
    return [str(one.message) for one in caught if one.category is RuntimeWarning]


def test_a_server_that_refuses_costs_the_rows(tmp_path, patient):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: the port is taken, and connections are refused
        first, last = fit_with_trouble(f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert first.startswith("MLFlowLogger: API request to ")
    assert "refused" in first
    assert first.endswith("training continues, and lost values are reported at its end")
    assert last.startswith("MLFlowLogger: 8 rows are lost, of the steps 0 to 7")


def test_nothing_is_drawn_from_pythons_generator(tmp_path, monkeypatch, patient):
    """Neither run names, which the next seeded run would draw again, nor pauses between attempts use Python's generator."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", "0.001")
    random.seed(7)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        fit_with_trouble(f"http://127.0.0.1:{taken.getsockname()[1]}")
    names = []
    for folder in ("a", "b"):
        logger = MLFlowLogger(save_dir=tmp_path / folder)
        names.append(logger.experiment.get_run(logger.run_id).info.run_name)
        logger.close()
    assert random.random() == random.Random(7).random()
    assert names[0] != names[1]


def senders():
    """Returns the threads that wait for a server's answer."""
    return {one for one in threading.enumerate() if one.name in ("fabricamp-question", "fabricamp-write-queue")}


class Unanswered(Callback):
    """Asserts after the last step that the server has not answered yet, so no step can have waited for it."""

    def on_train_end(self, trainer, module):
        assert not trainer.logger._queue.wait(0)


def test_a_server_that_never_answers_holds_no_step_up(monkeypatch):
    monkeypatch.setattr(own, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(own, "LAST_SECONDS", 0.2)
    earlier = senders()
    with socket.create_server(("127.0.0.1", 0)) as server:
        first, last = fit_with_trouble(f"http://127.0.0.1:{server.getsockname()[1]}", Unanswered())
    for one in senders() - earlier:
        one.join(60)  # the closed server ends these threads; their error must not reach a later test
    assert "has not answered within 0.2 s" in first
    assert "8 rows are lost, of the steps 0 to 7: no answer within 0.2 s" in last


def test_no_save_waits_for_a_server_whose_requests_fail(tmp_path, monkeypatch):
    """Each request after the first takes until training is over, then fails."""
    monkeypatch.setattr(logger_collection, "BARRIER_SECONDS", 600)
    over = threading.Event()
    logger = MLFlowLogger(save_dir=tmp_path / "runs")
    asked = []

    def fails(*values, **named):
        asked.append(named)
        if len(asked) > 1:
            over.wait(300)
        raise ConnectionError("refused")

    monkeypatch.setattr(logger.experiment, "log_batch", fails)

    class Ends(Classifier):
        def on_train_end(self):
            over.set()

    checkpoint = ModelCheckpoint(tmp_path / "files", "{step}", every_n_train_steps=1, save_top_k=-1)
    options = {"logger": logger, "callbacks": checkpoint, "enable_checkpointing": True, "log_every_n_steps": 1}
    with pytest.warns(RuntimeWarning) as told:
        quiet_trainer(max_epochs=1, **options).fit(Ends(), loader(32, 4))
    assert len([*(tmp_path / "files").glob("*.ckpt")]) == 8
    assert "8 rows are lost, of the steps 0 to 7: refused" in str(told[-1].message)


@pytest.mark.parametrize(("fails", "seconds"), [(False, 600.0), (True, 30.0)])
def test_the_end_waits_for_uploads_as_long_as_the_server_answers(tmp_path, monkeypatch, fails, seconds):
    waited = []
    close = WriteQueue.close

    def remember(queue, limit):
        waited.append(limit)
        return close(queue, limit)

    monkeypatch.setattr(WriteQueue, "close", remember)
    logger = MLFlowLogger(save_dir=tmp_path / "runs", log_model=True)
    if fails:
        monkeypatch.setattr(logger.experiment, "log_batch", lambda *_, **named: 1 / 0)
    with pytest.warns(RuntimeWarning) if fails else contextlib.nullcontext():
        logger.log_metrics({"loss": 1.0}, 0)
        logger.barrier(1)
        logger.finalize("success")
        assert waited == [seconds]
        logger.close()


def test_no_step_waits_while_values_are_sent(tmp_path, monkeypatch):
    logger = MLFlowLogger(save_dir=tmp_path)
    client, free = logger.experiment, threading.Event()
    send = client.log_batch
    set_in_time = []

    def held_up(*values, **named):
        set_in_time.append(free.wait(60))  # a step that waits would never set it
        return send(*values, **named)

    monkeypatch.setattr(client, "log_batch", held_up)
    for step in range(100):
        logger.log_metrics({"loss": 1.0}, step)
    assert fresh_client(tmp_path).get_run(logger.run_id).data.metrics == {}
    free.set()
    logger.barrier(100)
    assert steps_of(tmp_path, logger.run_id, "loss") == list(range(100))
    assert all(set_in_time)
    logger.close()


@pytest.mark.parametrize("synchronous", [True, False])
def test_a_checkpoint_waits_for_mlflows_own_queue(tmp_path, synchronous, monkeypatch):
    log = FileStore.log_batch
    monkeypatch.setattr(FileStore, "log_batch", lambda *values, **named: (time.sleep(0.5), log(*values, **named))[1])
    logger = MLFlowLogger(save_dir=tmp_path, synchronous=synchronous)
    logger.log_metrics({"loss": 1.0}, 4)
    logger.barrier(5)
    assert steps_of(tmp_path, logger.run_id, "loss") == [4]
    logger.close()


def test_a_store_that_refuses_ends_the_run_before_it_begins(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"MLFlowLogger cannot log to file:.*save_dir"):
        quiet_trainer(max_epochs=1, logger=MLFlowLogger(save_dir=tmp_path / "file")).fit(Classifier(), loader())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "false")  # the user's value is kept
    with pytest.raises(ConfigError, match="MLFLOW_ALLOW_FILE_STORE"):
        _ = MLFlowLogger(save_dir=tmp_path / "no").experiment


def test_arguments(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="log_model='best'.*'all'.*or False"):
        MLFlowLogger(save_dir=tmp_path, log_model="best")
    with pytest.raises(ConfigError, match="save_dir='mlruns'"):
        MLFlowLogger(save_dir=None)
    monkeypatch.chdir(tmp_path)
    logger = MLFlowLogger()
    assert logger.save_dir == "./mlruns"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert logger.version is not None
    assert (tmp_path / "mlruns").is_dir()
    assert list(Path.cwd().iterdir()) == []
    monkeypatch.chdir(tmp_path)
    assert MLFlowLogger(tracking_uri="file:./here").save_dir == str(tmp_path / "here")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:1")
    assert MLFlowLogger().save_dir is None
    logger = MLFlowLogger(tracking_uri=str(tmp_path / "own"), artifact_location=str(tmp_path / "artifacts"))
    artifacts = logger.experiment.get_run(logger.run_id).info.artifact_uri
    assert artifacts.startswith(str(tmp_path / "artifacts"))


def test_other_ranks_write_nothing_and_are_told_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    logger = MLFlowLogger(save_dir=tmp_path)
    assert (logger.run_id, logger.name) == (None, None)
    logger.join(("3", "abc"))
    logger.log_metrics({"loss": 1.0}, 1)
    logger.log_hyperparams({"lr": 1})
    logger.experiment.log_text(logger.run_id, "hello", "a.txt")
    logger.finalize("success")
    logger.close()
    assert (logger.experiment_id, logger.run_id, logger.state_dict()) == ("3", "abc", {})
    assert list(tmp_path.iterdir()) == []


def test_it_travels_to_workers(tmp_path):
    logger = MLFlowLogger(save_dir=tmp_path)
    logger.log_metrics({"loss": 1.0}, 1)
    logger.barrier(1)
    for step, twin in enumerate((pickle.loads(pickle.dumps(logger)), copy.deepcopy(logger))):
        twin.log_metrics({"loss": 2.0}, 2 + step)
        twin.close()
        assert twin.run_id == logger.run_id
    assert steps_of(tmp_path, logger.run_id, "loss") == [1, 2, 3]
    logger.close()


def test_beside_another_logger_and_under_lightnings_path(tmp_path):
    from fabricamp.loggers.mlflow import MLFlowLogger as Same

    assert Same is MLFlowLogger
    loggers = [CSVLogger(tmp_path / "csv"), MLFlowLogger(save_dir=tmp_path / "store")]
    trainer = quiet_trainer(max_epochs=1, log_every_n_steps=1, logger=loggers)
    trainer.fit(Classifier(), loader(8, 4))
    assert trainer.log_dir == loggers[0].log_dir
    assert steps_of(tmp_path / "store", loggers[1].run_id, "loss") == [0, 1]
