"""`run.json`: how and on which machine a fit was started, how it ended, and that an error in it never ends a fit."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from fabricamp._utils.files import replace_text
from fabricamp.callbacks import ModelCheckpoint
from fabricamp.engine.report import environment_info
from fabricamp.engine.report.run_file import process_start
from fabricamp.loggers import CSVLogger, run_folder
from fabricamp.runs.listing import summarise
from fabricamp.runs.reading import find_runs
from tests.distributed.forked import start_forked
from tests.distributed.scripts import finish
from tests.small import Classifier, loader, quiet_trainer


def fit(module=None, **options):
    """Runs a fit of 8 steps that logs into ``run``; returns the content of its file."""
    options = {"max_epochs": 1, "logger": CSVLogger(".", name="", version="run"), **options}
    quiet_trainer(**options).fit(module or Classifier(), loader(), loader())
    return written()


def written():
    return json.loads(Path("run/run.json").read_text())


def test_what_a_fit_was_started_as_and_on():
    content = fit(callbacks=[ModelCheckpoint(monitor="val_loss")], enable_checkpointing=True, precision="O4")
    assert content["command"] == sys.orig_argv
    assert content["folder"] == str(Path.cwd())
    assert content["trainer"]["precision"] == "O4"
    assert content["trainer"]["max_epochs"] == 1
    assert content["trainer"]["callbacks"] == ["ModelCheckpoint"]
    assert content["module"] == "tests.small.Classifier"
    assert content["packages"]["torch"] == torch.__version__
    assert content["machine"]["cpus"] == os.cpu_count()
    assert not content["git"] or len(content["git"]["revision"]) == 40, "the tests lie in a repository, or in none"
    assert (content["status"], content["reason"]) == ("finished", "max_epochs=1 reached")
    assert (content["step"], content["epoch"]) == (8, 1)
    assert list(content["best"]) == ["val_loss"]


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        (["--api-key", "geheim", "--lr", "1"], ["--api-key", "***", "--lr", "1"]),
        (["--wandb_api_key=geheim"], ["--wandb_api_key=***"]),
        (["-password", "geheim"], ["-password", "***"]),
        (["module.hfToken=geheim"], ["module.hfToken=***"]),
        (["+data.db.PASSWORD=a=b"], ["+data.db.PASSWORD=***"]),
        (["--storage", "postgresql://me:geheim@host/db"], ["--storage", "postgresql://me:***@host/db"]),
        (["--storage", "postgresql://me:ge@heim@host/db"], ["--storage", "postgresql://me:***@host/db"]),
        (["--token", "--lr", "1"], ["--token", "--lr", "1"]),
        (["--max-tokens", "512", "--tokenizer=gpt2"], ["--max-tokens", "512", "--tokenizer=gpt2"]),
        (["--monkey", "a", "--key=b", "https://host:80/a@b"], ["--monkey", "a", "--key=b", "https://host:80/a@b"]),
    ],
)
def test_secrets_of_the_command_line_are_not_written(monkeypatch, typed, kept):
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", *typed])
    assert fit()["command"] == ["python", "train.py", *kept]


def test_secrets_among_the_hyperparameters_are_not_written():
    class Keeps(Classifier):
        def __init__(self, login, api_key, pad_token, storage):
            super().__init__()
            self.save_hyperparameters()

    login = {"user": "me", "tokens": [["geheim"]], "token": ["geheim", "${oc.env:TOKEN}"]}
    content = fit(Keeps(login, "geheim", 0, "s3://me:geheim@host/runs"))
    assert content["hyperparameters"] == {
        "login": {"user": "me", "tokens": [["geheim"]], "token": ["***", "${oc.env:TOKEN}"]},
        "api_key": "***",
        "pad_token": 0,
        "storage": "s3://me:***@host/runs",
    }


def test_while_it_runs_and_after_a_failure():
    class Fails(Classifier):
        def training_step(self, batch, batch_idx):
            self.seen = summarise(Path("run"))
            raise ValueError("a bug\nin two lines")

    module = Fails()
    with pytest.raises(ValueError, match="a bug"):
        fit(module)
    assert module.seen.status == "running"
    assert (written()["status"], written()["reason"]) == ("failed", "ValueError: a bug")


def test_after_a_signal():
    class Signalled(Classifier):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                signal.raise_signal(signal.SIGTERM)
            return super().training_step(batch, batch_idx)

    with pytest.raises(SystemExit):
        fit(Signalled())
    assert (written()["status"], written()["reason"]) == ("interrupted", "SIGTERM")


def test_a_process_that_is_gone_was_killed():
    fit()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:  # runs until the block ends
        start = process_start(process.pid)
        running = written() | {
            "status": "running",
            "process": written()["process"] | {"pid": process.pid, "start": start},
        }
        Path("run/run.json").write_text(json.dumps(running))
        assert summarise(Path("run")).status == "running"
        process.kill()
    assert summarise(Path("run")).status == "killed"
    other = running | {"process": running["process"] | {"host": "elsewhere"}}
    Path("run/run.json").write_text(json.dumps(other))
    assert summarise(Path("run")).reason == "runs on elsewhere, or was killed there"


def test_a_second_fit_in_the_folder_keeps_the_first_ones_file():
    fit()
    assert fit(max_epochs=2)["trainer"]["max_epochs"] == 2
    assert json.loads(Path("run/run-1.json").read_text())["trainer"]["max_epochs"] == 1


@pytest.mark.parametrize("options", [{"logger": False}, {"fast_dev_run": True}])
def test_what_logs_nothing_writes_nothing(options):
    quiet_trainer(**{"max_epochs": 1, "logger": CSVLogger("."), **options}).fit(Classifier(), loader())
    assert not list(Path.cwd().rglob("run.json"))


def test_what_cannot_be_written_costs_a_line(caplog):
    Path("run/.run.json.partial/in the way").mkdir(parents=True)
    with caplog.at_level("WARNING", "fabricamp"):
        trainer = quiet_trainer(max_epochs=1, logger=CSVLogger(".", name="", version="run"))
        trainer.fit(Classifier(), loader())
    assert caplog.text.count("run.json is not written") == 1
    assert trainer.global_step == 8


def test_values_of_the_environment_are_for_the_user_alone():
    logger = CSVLogger(".", name="", version="run")
    logger.private = True
    fit(logger=logger)
    assert stat.S_IMODE(Path("run/run.json").stat().st_mode) == 0o600


class FailsBeforeItTrains(Classifier):
    """Fails in the sanity check, or where ``place`` says."""

    def __init__(self, place="validation_step"):
        super().__init__()
        self.save_hyperparameters()

    def validation_step(self, batch, batch_idx):
        self._fail("validation_step")

    def configure_optimizers(self):
        self._fail("configure_optimizers")
        return super().configure_optimizers()

    def _fail(self, place):
        if self.hparams.place == place:
            raise ValueError(f"no {place}")


def test_a_fit_that_fails_before_its_first_step_is_a_run_that_failed():
    with pytest.raises(ValueError, match="no validation_step"):
        fit(FailsBeforeItTrains())
    content = written()
    assert (content["status"], content["reason"]) == ("failed", "ValueError: no validation_step")
    assert (content["step"], content["hyperparameters"]) == (0, {"place": "validation_step"})
    listed = summarise(Path("run"))
    assert (listed.status, listed.reason) == ("failed", "ValueError: no validation_step")


def test_a_fit_that_fails_waits_for_what_its_logger_is_about_to_write(monkeypatch):
    asked = threading.Event()

    class Slow(CSVLogger):
        def save(self):
            asked.set()
            super().save()

    def write(path, text, **options):
        assert asked.wait(10.0)
        replace_text(path, text, **options)

    monkeypatch.setattr(run_folder, "replace_text", write)
    with pytest.raises(ValueError, match="no validation_step"):
        fit(FailsBeforeItTrains(), logger=Slow(".", name="", version="run"))
    assert written()["status"] == "failed"
    assert Path("run/hparams.yaml").is_file()


def test_a_failure_before_the_first_step_makes_no_folder_and_replaces_no_record():
    logger = CSVLogger(".", name="made")
    with pytest.raises(ValueError, match="no configure_optimizers"):
        fit(FailsBeforeItTrains("configure_optimizers"), logger=[logger])
    assert not list(Path("made").iterdir())
    fit()
    with pytest.raises(ValueError, match="no validation_step"):
        fit(FailsBeforeItTrains())
    assert written()["status"] == "finished"
    assert not list(Path("run").glob("run-*.json"))


KILLED = """
import os, signal, sys
from fabricamp.loggers import CSVLogger, TensorBoardLogger
from tests.small import Classifier, loader, quiet_trainer

class Killed(Classifier):
    def on_fit_start(self):
        self.die("on_fit_start")
    def configure_optimizers(self):
        self.die("configure_optimizers")
        return super().configure_optimizers()
    def setup(self, stage):
        self.die("setup")
    def validation_step(self, batch, batch_idx):
        self.die("validation_step")
    def die(self, place):
        if place == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGKILL)

logger = {"csv": CSVLogger, "tb": TensorBoardLogger}[sys.argv[2]](".", name="killed")
quiet_trainer(max_epochs=1, logger=logger).fit(Killed(), loader(), loader())
"""


@pytest.mark.parametrize(
    ("place", "logger"),
    [("setup", "csv"), ("configure_optimizers", "tb"), ("on_fit_start", "csv"), ("validation_step", "tb")],
)
def test_a_process_that_is_killed_before_the_first_step_is_a_run_that_was_killed(place, logger):
    Path("train.py").write_text(KILLED)
    code, _, err = finish(start_forked(Path.cwd(), "train.py", place, logger))
    assert code == -signal.SIGKILL, err
    assert find_runs(Path("killed")) == [Path("killed/version_0")]
    listed = summarise(Path("killed/version_0"))
    assert (listed.status, listed.steps, listed.best) == ("killed", None, {})
    assert listed.started
    content = json.loads(Path("killed/version_0/run.json").read_text())
    assert content["module"].endswith(".Killed")
    assert content["command"][-2:] == [place, logger]


def test_the_early_record_of_a_fit_gives_way_to_the_whole_one_and_keeps_no_other_from_its_name():
    seen = []

    class Looks(Classifier):
        def setup(self, stage):
            seen.append(written())

    content = fit(Looks())
    assert seen[0]["status"] == "running"
    assert "first_step" not in seen[0]
    assert content["first_step"] == 0
    assert not list(Path("run").glob("run-*.json"))
    fit(Looks())
    assert seen[1] == content  # of the earlier fit, until this one trains
    assert json.loads(Path("run/run-1.json").read_text()) == content


def test_a_signal_before_the_first_step_is_recorded():
    def interrupted(self, batch, batch_idx):
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        fit(type("Interrupted", (FailsBeforeItTrains,), {"validation_step": interrupted})("nowhere"))
    content = written()
    assert (content["status"], content["reason"], content["step"]) == ("interrupted", "SIGTERM", 0)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Creates a repository with one commit of ``train.py`` and ``data.txt``."""
    environment_info._repository.cache_clear()
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "train.py").write_text("lr = 1\n")
    (folder / "data.txt").write_text("0\n" * 9000)
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-C", str(folder))
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "first")):
        subprocess.run(["git", *identity, *words], check=True)
    monkeypatch.chdir(folder)
    yield folder
    environment_info._repository.cache_clear()


def test_the_revision_and_what_was_changed_since(repository):
    (repository / "train.py").write_text("lr = 2\n")
    (repository / "new.py").write_text("")
    found = environment_info.code_of(object())
    assert found["folder"] == str(repository)
    assert sorted(found["status"]) == [" M train.py", "?? new.py"]
    assert found["diff"][-2:] == ["-lr = 1", "+lr = 2"]


def test_a_huge_diff_is_cut_with_a_line_that_says_so(repository):
    (repository / "data.txt").write_text("1\n" * 9000)
    diff = environment_info.code_of(object())["diff"]
    assert len(diff) == 5001
    assert diff[-1] == "... cut here by fabricamp: the first 5000 lines are kept"


def test_without_git_or_a_repository_nothing_is_said(repository, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert environment_info.code_of(object()) == {}
    monkeypatch.undo()
    environment_info._repository.cache_clear()
    os.chdir(tmp_path)
    assert environment_info.code_of(object()) == {}
