"""Values that a configuration takes from the environment are used, and never written into a file of the run."""

from __future__ import annotations

import copy
import os
import pickle
import stat
import sys
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from fabricamp import CheckpointError
from fabricamp.arguments.environment import FromEnvironment, exposes, resolved
from fabricamp.checkpoint import copy_checkpoint, plain, write_checkpoint
from fabricamp.cli import main
from fabricamp.config import SaveConfig, read_config
from fabricamp.loggers import CSVLogger, TensorBoardLogger
from tests.small import Classifier, loader, quiet_trainer

SECRET = "hunter2-and-more"

CONFIG = """
trainer: {max_steps: 1, accelerator: cpu, devices: "${oc.decode:${oc.env:RANKS}}", enable_progress_bar: false,
          default_root_dir: "${oc.env:ROOT}", enable_model_summary: false}
module:
  _target_: secret_parts.Net
  token: ${variables.token}
  address: https://user:${oc.env:TOKEN}@host/
  keys: ${oc.decode:${oc.env:KEYS}}
  config: {inner: ["${oc.env:TOKEN}"], width: "${variables.width}"}
data: {_target_: secret_parts.Data, token: "${oc.env:TOKEN}"}
variables: {token: "${oc.env:TOKEN}", width: 4}
"""

PARTS = """
import torch
from fabricamp import DataModule, TrainingModule

class Net(TrainingModule):
    def __init__(self, token, address, keys, config):
        super().__init__()
        self.save_hyperparameters()
        assert token == self.hparams.token == SECRET, token
        assert address == "https://user:" + SECRET + "@host/"
        assert keys == ["hunter2-and-more-1", "hunter2-and-more-2"]
        assert self.hparams.config == {"inner": [SECRET], "width": 4}
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

class Data(DataModule):
    def __init__(self, token):
        super().__init__()
        self.save_hyperparameters()
        assert self.hparams.token == SECRET

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(4, 2), 2)
"""


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.setenv("TOKEN", SECRET)
    monkeypatch.setenv("KEYS", f"[{SECRET}-1, {SECRET}-2]")
    monkeypatch.setenv("RANKS", "1")


def holding(folder, text):
    return [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file() and text in file.read_bytes()]


def test_no_file_of_a_run_holds_the_value(tmp_path, monkeypatch, environment):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROOT", str(tmp_path / "runs"))
    monkeypatch.syspath_prepend(tmp_path)
    Path("config.yaml").write_text(CONFIG)
    monkeypatch.delitem(sys.modules, "secret_parts", raising=False)  # imported by an earlier test
    Path("secret_parts.py").write_text(f"SECRET = {SECRET!r}\n{PARTS}")
    assert main(["fit", "config.yaml"]) == 0
    assert holding(tmp_path, SECRET.encode()) == ["secret_parts.py"] + [
        name for name in holding(tmp_path, SECRET.encode()) if name.startswith("__pycache__")
    ]
    (written,) = tmp_path.glob("runs/**/config.yaml")
    assert yaml.safe_load(written.read_text())["module"]["address"] == "https://user:${oc.env:TOKEN}@host/"
    (saved,) = tmp_path.glob("runs/**/*.ckpt")
    parameters = torch.load(saved, weights_only=True)["hyper_parameters"]
    assert parameters["token"] == "${oc.env:TOKEN}"
    assert parameters["config"] == {"inner": ["${oc.env:TOKEN}"], "width": 4}
    assert main(["fit", str(written), f"ckpt_path={saved}", "trainer.max_steps=2"]) == 0, "what was written runs again"


@pytest.mark.parametrize("given", [f"module.token={SECRET}", f"trainer.default_root_dir=file://me:{SECRET}@/runs"])
def test_a_secret_that_is_typed_is_in_the_file_that_runs_again_and_that_is_yours_alone(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("module: {_target_: tests.small.Classifier}\ntrainer: {}\n")
    plain, secret = read_config(Path("config.yaml")), read_config(Path("config.yaml"), [given])
    modes = []
    for number, content in enumerate((plain, secret)):
        logger, saves = (
            CSVLogger(tmp_path, "", version=f"run{number}"),
            SaveConfig(content.written, private=content.private),
        )
        trainer = quiet_trainer(max_steps=1, logger=logger, callbacks=[saves])
        trainer.fit(Classifier(), loader(4))
        file = Path(trainer.log_dir, "config.yaml")
        modes.append(stat.S_IMODE(file.stat().st_mode))
        assert read_config(file)["module"] == content["module"]
    umask = os.umask(0)
    os.umask(umask)
    assert modes == [0o666 & ~umask, 0o600]


def test_what_is_kept_and_what_is_used(environment):
    content = OmegaConf.create(
        {
            "token": "${oc.env:TOKEN}",
            "again": "${token}",
            "all": "${inner}",
            "inner": {"list": ["${...token}", 1], "missing": "???"},
            "number": "${oc.decode:${oc.env:RANKS}}",
            "fallback": "${oc.env:NOT_THERE,7}",
            "plain": "${twice:3}",
            "twice": "${twice:${oc.env:RANKS}}",
            "shouted": "${shout:${oc.env:TOKEN}}",
            "as_shouted": "${shouted}",
            "with_number": "${numbers}",
            "numbers": {"number": "${oc.decode:${oc.env:RANKS}}"},
        }
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its name differs between versions
        OmegaConf.register_new_resolver("twice", lambda number: 2 * int(number), replace=True)
        OmegaConf.register_new_resolver("shout", str.upper, replace=True)
    values, written = resolved(content)
    reference = "${oc.env:TOKEN}"
    assert values["all"] == {"list": [SECRET, 1], "missing": "???"}
    assert (values["number"], values["twice"], values["plain"], values["fallback"]) == (1, 2, 6, "7")
    assert written == {
        "token": reference,
        "again": reference,
        "all": {"list": [reference, 1], "missing": "???"},
        "inner": {"list": [reference, 1], "missing": "???"},
        "number": "${oc.decode:${oc.env:RANKS}}",
        "fallback": "${oc.env:NOT_THERE,7}",
        "plain": 6,
        "twice": "${twice:${oc.env:RANKS}}",
        "shouted": "${shout:${oc.env:TOKEN}}",
        "as_shouted": "${shouted}",
        "with_number": {"number": "${oc.decode:${oc.env:RANKS}}"},
        "numbers": {"number": "${oc.decode:${oc.env:RANKS}}"},
    }
    assert values["shouted"] == values["as_shouted"] == SECRET.upper()
    assert values["with_number"] == {"number": 1}
    assert plain(values)["shouted"] == "${shout:${oc.env:TOKEN}}"
    assert plain(values)["as_shouted"] == reference
    assert plain(content) == written
    assert plain(values)["again"] == reference
    for same in (copy.deepcopy(values["again"]), pickle.loads(pickle.dumps(values["again"]))):
        assert (type(same), same, same.reference) == (FromEnvironment, SECRET, reference)
    assert OmegaConf.to_container(content, resolve=True)["token"] == SECRET, "the resolver is as it was"


class Keeps(Classifier):
    def __init__(self, config=None):
        super().__init__()
        self.save_hyperparameters(config or {})


@pytest.mark.parametrize("logger", [CSVLogger, TensorBoardLogger])
def test_loggers_and_checkpoints_get_references_of_containers_too(tmp_path, environment, logger):
    module = Keeps(OmegaConf.create({"login": {"token": "${oc.env:TOKEN}", "name": "me"}}))
    assert module.hparams.login.token == SECRET
    trainer = quiet_trainer(max_steps=1, logger=logger(tmp_path), enable_checkpointing=True, default_root_dir=tmp_path)
    trainer.fit(module, loader(8))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert holding(tmp_path, SECRET.encode()) == []
    with pytest.raises(
        CheckpointError, match=r"holds \$\{oc\.env:TOKEN\} for the hyper-parameter 'login'.*login=\.\.\."
    ):
        Keeps.load_from_checkpoint(tmp_path / "a.ckpt")
    loaded = Keeps.load_from_checkpoint(tmp_path / "a.ckpt", login={"token": "given"})
    assert loaded.hparams.login.token == "given"


# -- numbers and flags, which keep no reference: files readable only by their owner ------------------------------------------------

NUMBERS = """
trainer: {max_steps: 1, accelerator: cpu, devices: 1, log_every_n_steps: 1, enable_progress_bar: false, enable_model_summary: false,
          logger: [{_target_: fabricamp.loggers.TensorBoardLogger, save_dir: runs, name: a, version: 0},
                   {_target_: fabricamp.loggers.CSVLogger, save_dir: runs, name: b, version: 0}]}
module: {_target_: number_parts.Net, port: 1}
data: {_target_: number_parts.Data, port: 1}
"""

NUMBER_PARTS = """
from fabricamp import DataModule
from tests.small import Classifier, loader

class Net(Classifier):
    def __init__(self, port):
        super().__init__()
        self.save_hyperparameters()
        assert port in (1, 4711, True), port

class Data(DataModule):
    def __init__(self, port):
        super().__init__()
        self.save_hyperparameters(logger=False)

    def train_dataloader(self):
        return loader(8)
"""

PORT = "${oc.decode:${oc.env:PORT}}"


@pytest.fixture
def numbers(tmp_path, monkeypatch):
    """Prepares a folder for runs, and checks that private files are private from their creation."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PORT", "4711")
    monkeypatch.delitem(sys.modules, "number_parts", raising=False)  # imported by an earlier test
    Path("config.yaml").write_text(NUMBERS)
    Path("number_parts.py").write_text(NUMBER_PARTS)

    def chmod(*_):
        raise AssertionError("made for all to read, and changed later")

    for name in ("chmod", "fchmod"):
        monkeypatch.setattr(os, name, chmod)
    before = os.umask(0o022)
    yield Path("runs")
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def modes(folder):
    """Returns the modes of a run's files by kind."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            found.setdefault(
                "events" if "tfevents" in path.name else path.suffix if path.suffix == ".ckpt" else path.name, set()
            ).add(mode(path))
    return {name: [oct(one) for one in sorted(each)] for name, each in found.items()}


OPEN, CLOSED = ["0o644"], ["0o600"]


@pytest.mark.parametrize("value", ["4711", "true", "[4711, 5]", "{a: 4711}"])
def test_files_that_hold_a_number_of_the_environment_are_their_owners_alone(numbers, monkeypatch, value):
    monkeypatch.setenv("PORT", value)
    Path("number_parts.py").write_text(NUMBER_PARTS.replace("assert", "#"))
    assert main(["fit", "config.yaml", f"module.port={PORT}"]) == 0
    assert modes(numbers) == {
        "hparams.yaml": CLOSED,
        "events": CLOSED,
        ".ckpt": CLOSED,
        "config.yaml": OPEN,
        "metrics.csv": OPEN,
        "run.json": CLOSED,
    }
    assert holding(numbers / "a", PORT.encode()) == ["version_0/config.yaml"]


def test_a_number_of_the_data_closes_what_shows_it(numbers):
    assert main(["fit", "config.yaml", f"data.port={PORT}"]) == 0
    assert modes(numbers) == {
        "hparams.yaml": OPEN,
        "events": OPEN,
        ".ckpt": CLOSED,
        "config.yaml": OPEN,
        "metrics.csv": OPEN,
        "run.json": OPEN,
    }


def test_files_of_before_and_of_later_runs(numbers):
    assert main(["fit", "config.yaml"]) == 0
    assert set(map(tuple, modes(numbers).values())) == {tuple(OPEN)}, "nothing comes from the environment"
    (saved,) = numbers.rglob("*.ckpt")
    again = ["fit", "config.yaml", f"ckpt_path={saved}", f"module.port={PORT}", "trainer.max_steps=2"]
    assert main(again) == 0
    found = modes(numbers)
    assert found.pop("events") == found.pop(".ckpt") == ["0o600", "0o644"], "those of before are as they were"
    assert found == {
        "hparams.yaml": CLOSED,
        "config.yaml": OPEN,
        "metrics.csv": OPEN,
        "run.json": CLOSED,
        "run-1.json": OPEN,
    }
    assert all(mode(numbers / name) == 0o600 for name in holding(numbers, b"4711"))
    assert main(["fit", "config.yaml", "trainer.logger.0.version=1", "trainer.logger.1.version=1"]) == 0
    assert set(map(tuple, modes(numbers / "a/version_1").values())) == {tuple(OPEN)}, "another run in the same process"


def test_folders_of_the_environment_close_the_configuration(numbers, monkeypatch):
    monkeypatch.setenv("CODE", str(Path.cwd()))
    assert main(["fit", "config.yaml", "import_from=['${oc.env:CODE}']"]) == 0
    assert modes(numbers)["config.yaml"] == CLOSED
    assert modes(numbers)["hparams.yaml"] == OPEN


def test_containers_close_files_too_and_so_does_what_was_loaded(numbers, tmp_path):
    config = {"port": PORT, "name": "me"}
    module = pickle.loads(pickle.dumps(Keeps(OmegaConf.create(config))))
    logger = TensorBoardLogger(numbers)
    logger.log_text("note", "before", 0)
    trainer = quiet_trainer(max_steps=1, logger=logger)
    trainer.fit(module, loader(8))
    trainer.save_checkpoint("a.ckpt")
    assert modes(numbers) == {"hparams.yaml": CLOSED, "events": ["0o600", "0o644"], "run.json": CLOSED}
    assert mode(Path("a.ckpt")) == 0o600
    loaded = Keeps.load_from_checkpoint("a.ckpt")
    other = quiet_trainer(max_steps=1, logger=CSVLogger(numbers, name="other"))
    other.fit(loaded, loader(8))
    other.save_checkpoint("b.ckpt")
    assert mode(Path("b.ckpt")) == 0o600
    assert modes(numbers / "other")["hparams.yaml"] == CLOSED
    quiet_trainer(max_steps=1).fit(Keeps(OmegaConf.create({"port": 4711})), loader(8))


def test_a_copy_is_as_closed_as_what_it_copies(numbers, monkeypatch):
    def refuse(*_, **__):
        raise OSError(1, "no second names here")

    monkeypatch.setattr(os, "link", refuse)
    for private in (False, True):
        write_checkpoint("a.ckpt", {"state_dict": {}, "private": private})
        copy_checkpoint("a.ckpt", "b.ckpt")
        assert mode(Path("a.ckpt")) == mode(Path("b.ckpt")) == (0o600 if private else 0o644)


def test_what_shows_a_value(environment, monkeypatch):
    monkeypatch.setenv("MAPPING", "{secret: text}")
    shown = {"number": "${oc.decode:${oc.env:RANKS}}", "made": "${oc.decode:${oc.env:MAPPING}}"}
    hidden = {
        "text": "${oc.env:TOKEN}",
        "list": ["${oc.env:TOKEN}", 1],
        "keys": "${oc.decode:${oc.env:KEYS}}",
        "number": 1,
        "none": None,
    }
    assert not exposes(*resolved(OmegaConf.create(hidden)))
    assert not exposes(*resolved(OmegaConf.create({"none": "${oc.decode:${oc.env:NOT_THERE,null}}"})))
    for name in ("number", "made"):
        assert exposes(*resolved(OmegaConf.create({name: shown[name]})))
    assert exposes(*resolved(OmegaConf.create({"a": ["b", {"c": shown["number"]}]})))


@pytest.mark.parametrize("parameters", [[1, 2], 3, "text", {1: 2}, None, torch.zeros(2)])
def test_hyper_parameters_that_are_no_arguments_are_an_error(tmp_path, parameters):
    torch.save({"state_dict": Classifier().state_dict(), "hyper_parameters": parameters}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"a\.ckpt: its 'hyper_parameters' are .*not a dict of arguments"):
        Classifier.load_from_checkpoint(tmp_path / "a.ckpt")
    content = {"state_dict": {}, "hyper_parameters": {"a": 1}, "hparams_name": [1]}
    torch.save(content, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="its 'hparams_name' is"):
        Classifier.load_from_checkpoint(tmp_path / "a.ckpt")


def test_a_pipe_is_no_checkpoint_to_load_from(tmp_path):
    os.mkfifo(tmp_path / "pipe.ckpt")
    with pytest.raises(CheckpointError, match="is a pipe"):
        Classifier.load_from_checkpoint(tmp_path / "pipe.ckpt")
