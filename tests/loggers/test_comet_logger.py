"""CometLogger: the real package writes experiments offline, and their archives are read back."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import random
import sys
import threading
import zipfile

import pytest
import torch

from fabricamp import Callback
from fabricamp.callbacks import ModelCheckpoint
from fabricamp.errors import ConfigError
from fabricamp.loggers import CometLogger
from fabricamp.loggers import comet as own
from tests.small import Classifier, loader, quiet_trainer

SMALL = {"log_env_details": False, "log_code": False, "log_git_metadata": False, "log_git_patch": False}
SMALL |= {"display_summary_level": 0}


@pytest.fixture(autouse=True, scope="module")
def _imported():
    """Imports the package here, as each worker collects this file and few run its tests."""
    global comet_ml  # noqa: PLW0603 - the name of a package that is imported here
    os.environ["COMET_INTERNAL_SENTRY_DSN"] = ""  # no reports to Comet
    os.environ["COMET_DISABLE_AUTO_LOGGING"] = "1"  # no patches of libraries that other tests import later
    comet_ml = pytest.importorskip("comet_ml", reason="needs the package comet_ml")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch, tmp_path):
    for name in ("COMET_API_KEY", "COMET_EXPERIMENT_KEY", "COMET_PROJECT_NAME", "COMET_OFFLINE_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def offline(folder, **options):
    return CometLogger(**{"online": False, "offline_directory": str(folder), **SMALL, **options})


class Written:
    """The content of the newest archive below a folder, after its experiment has ended."""

    def __init__(self, folder, count=1):
        files = sorted(folder.glob("*.zip"), key=lambda file: file.stat().st_mtime_ns)
        assert len(files) == count
        with zipfile.ZipFile(files[-1]) as archive:
            self.experiment = json.loads(archive.read("experiment.json"))
            lines = archive.read("messages.json").splitlines()
        self.messages = [json.loads(line) for line in lines]

    def rows(self, name):
        metrics = [one["payload"]["metric"] for one in self.messages if one["type"] == "metric_msg"]
        return [(one["step"], one["epoch"]) for one in metrics if one["metricName"] == name]

    def parameters(self):
        found = [one["payload"]["param"] for one in self.messages if one["type"] == "parameter_msg"]
        return {one["paramName"]: one["paramValue"] for one in found}

    def graphs(self):
        return [one["payload"]["graph"] for one in self.messages if one["type"] == "graph"]


class Owner(Classifier):
    def __init__(self, width=3):
        super().__init__()
        self.save_hyperparameters({"width": width, "net": {"depth": 2}})


def fit(logger, *callbacks, model=None, ckpt_path=None, **options):
    options = {"max_steps": 4, "log_every_n_steps": 1, "enable_checkpointing": bool(callbacks), **options}
    trainer = quiet_trainer(logger=logger, callbacks=list(callbacks), **options)
    trainer.fit(model or Classifier(), loader(8), ckpt_path=ckpt_path)
    return trainer


class Threads(Callback):
    """Records the threads that call the package."""

    def __init__(self, monkeypatch):
        self.seen = set()
        start, log = comet_ml.start, comet_ml.OfflineExperiment.log_metrics

        def started(**options):
            self.seen.add(threading.current_thread().name)
            return start(**options)

        def logged(experiment, *args, **options):
            self.seen.add(threading.current_thread().name)
            return log(experiment, *args, **options)

        monkeypatch.setattr(comet_ml, "start", started)
        monkeypatch.setattr(comet_ml.OfflineExperiment, "log_metrics", logged)


def test_a_fit_is_an_experiment_that_a_thread_writes(tmp_path, monkeypatch):
    logger = offline(tmp_path / "out", project="digits", prefix="p", name="first", tags=["a"])
    threads = Threads(monkeypatch)
    fit(logger, threads, model=Owner(), enable_checkpointing=False)
    assert threads.seen == {"fabricamp-write-queue"}
    assert (logger.name, logger.save_dir) == ("digits", str(tmp_path / "out"))
    assert logger.experiment.get_key() == logger.version
    logger.experiment.log_other("behind", "fit")
    logger.experiment.end()
    written = Written(tmp_path / "out")
    assert (written.experiment["offline_id"], written.experiment["project_name"]) == (logger.version, "digits")
    assert written.experiment["tags"] == ["a"]
    assert written.rows("p-loss") == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert {"width": 3, "net/depth": 2}.items() <= written.parameters().items()
    assert "Linear(in_features=8" in written.graphs()[0]


def test_archives_of_an_experiment_are_several_whatever_the_seed(tmp_path, monkeypatch):
    start = comet_ml.start

    def resumes_meanwhile(**options):
        random.seed(7)  # the training thread may restore the generator while this thread opens the experiment
        return start(**options)

    monkeypatch.setattr(comet_ml, "start", resumes_meanwhile)
    first, again = offline(tmp_path / "out"), offline(tmp_path / "out")
    for logger in (first, again):
        logger.begin()
        logger.barrier(0)
        assert random.random() == random.Random(7).random()  # nothing was drawn from Python's generator
        logger.experiment.end()
        again.load_state_dict(first.state_dict())
    assert again.version == first.version
    assert Written(tmp_path / "out", 2).experiment["offline_id"] == first.version


def test_a_resumed_fit_goes_on_in_its_experiment(tmp_path):
    first = offline(tmp_path / "out")
    fit(first, ModelCheckpoint(tmp_path / "saved", every_n_train_steps=2, save_last=True), max_steps=2)
    first.experiment.end()
    again = offline(tmp_path / "out")
    fit(again, ckpt_path=tmp_path / "saved" / "last.ckpt")
    assert again.version == first.version
    again.experiment.end()
    written = Written(tmp_path / "out", 2)
    assert written.experiment["offline_id"] == first.version
    assert [step for step, _ in written.rows("loss")] == [1, 2, 3]  # step 1 was after the checkpoint
    assert written.graphs() == []
    own = offline(tmp_path / "own", experiment_key="a" * 32)
    fit(own, ckpt_path=tmp_path / "saved" / "last.ckpt")
    own.experiment.end()
    assert own.version == "a" * 32


def test_processes_of_the_trainer_have_one_experiment_which_rank_0_writes(tmp_path):
    logger = offline(tmp_path / "out")
    fit(logger, devices=2, strategy="ddp", start_method="fork", precision="O1")
    written = Written(tmp_path / "out")
    assert written.experiment["offline_id"] == logger.version
    assert [step for step, _ in written.rows("loss")] == [0, 1, 2, 3]


def test_a_server_that_cannot_be_reached_costs_values_and_no_step_waits(monkeypatch):
    waits = threading.Event()

    class Unreachable:
        alive, disabled = False, False

    def start(**options):
        waits.wait(100)
        return Unreachable()

    class Releases(Classifier):
        def on_train_end(self):
            waits.set()

    monkeypatch.setattr(comet_ml, "start", start)
    logger = CometLogger(api_key="a" * 25)
    with pytest.warns(RuntimeWarning) as told:
        assert fit(logger, model=Releases()).global_step == 4
    assert "4 rows are lost, of the steps 0 to 3: Comet's server cannot be reached" in str(told[-1].message)


def test_no_save_waits_while_the_package_fails(monkeypatch):
    over, ended = threading.Event(), []

    class Fails:
        alive, disabled = True, False

        def log_metrics(self, values, *, step, epoch):
            if step:
                over.wait(60)
                ended.append(step)
            raise ConnectionError("refused")

        def flush(self):
            raise AssertionError("waits for the server")

    monkeypatch.setattr(comet_ml, "start", lambda **options: Fails())
    logger = CometLogger(api_key="a" * 25)
    logger.log_metrics({"loss": 0.0}, 0)
    logger.barrier(0)
    with pytest.warns(RuntimeWarning, match="refused"):
        logger.log_metrics({"loss": 1.0}, 1)
    logger.barrier(1)
    assert ended == []
    over.set()
    logger.close()


class Opened:
    """An experiment that may be used only in the process that opened it."""

    alive, disabled = True, False

    def __init__(self):
        self.process, self.ended = os.getpid(), False

    def flush(self):
        assert self.process == os.getpid()

    def end(self):
        self.flush()
        self.ended = True


def test_after_a_close_that_timed_out_there_is_still_one_experiment(tmp_path, monkeypatch):
    opened, found = [], []
    begun, waits = threading.Event(), threading.Event()

    def start(**options):
        begun.set()
        waits.wait(100)
        opened.append(Opened())
        return opened[-1]

    monkeypatch.setattr(comet_ml, "start", start)
    monkeypatch.setattr(own, "LAST_SECONDS", 0.1)
    logger = offline(tmp_path)
    logger.begin()
    assert begun.wait(100)
    with pytest.warns(RuntimeWarning, match="no answer within"):
        logger.close()
    begun.clear()
    user = threading.Thread(target=lambda: found.append(logger.experiment))
    user.start()
    assert not begun.wait(1)
    waits.set()
    user.join(100)
    assert len(opened) == 1
    assert found == opened


def use_in_a_fork(logger, parents):
    logger.barrier(0)
    assert logger._experiment is None
    assert logger.experiment.process == os.getpid()
    used = logger.experiment
    logger.close()
    assert used.ended
    assert not parents.ended


def close_in_a_fork(logger, parents):
    logger.close()
    assert not parents.ended


@pytest.mark.parametrize("use", [use_in_a_fork, close_in_a_fork])
def test_a_forked_process_leaves_the_experiment_to_the_one_that_opened_it(tmp_path, monkeypatch, use):
    monkeypatch.setattr(comet_ml, "start", lambda **options: Opened())
    logger = offline(tmp_path)
    process = multiprocessing.get_context("fork").Process(target=use, args=(logger, logger.experiment))
    process.start()
    process.join(100)
    assert process.exitcode == 0


def test_what_others_may_not_see_is_not_sent(tmp_path):
    logger = offline(tmp_path / "out")
    logger.private = True
    fit(logger, model=Owner())
    logger.experiment.end()
    assert "width" not in Written(tmp_path / "out").parameters()


def test_a_copy_writes_to_the_same_experiment(tmp_path):
    logger = offline(tmp_path / "out")
    key = logger.identity()
    twin = pickle.loads(pickle.dumps(logger))
    twin.log_metrics({"there": 1.0, "epoch": 0}, 1)
    twin.barrier(1)
    twin.experiment.end()
    assert Written(tmp_path / "out").experiment["offline_id"] == twin.version == key


def test_what_it_does_not_take_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no API key: set COMET_API_KEY.*online=False"):
        CometLogger()
    with pytest.raises(ConfigError, match="no option 'tag'; did you mean 'tags'"):
        CometLogger(online=False, tag=["a"])
    assert list(tmp_path.iterdir()) == []


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "comet_ml", None)
    with pytest.raises(ConfigError, match=r"pip install comet-ml"):
        CometLogger(online=False)


def test_it_changes_nothing_of_the_run(tmp_path):
    torch.manual_seed(0)
    one, two = Classifier(), Classifier()
    fit(offline(tmp_path / "out"), model=one)
    fit(False, model=two)
    assert all(torch.equal(first, second) for first, second in zip(one.parameters(), two.parameters(), strict=True))
