"""Hyper-parameters in checkpoints and logs, and their way back: plain data, and no name in a file makes code run."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import functools
import typing
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from omegaconf import DictConfig, OmegaConf
from torch import nn

import fabricamp as pl
from fabricamp import CheckpointError, ConfigError
from fabricamp.arguments.environment import FromEnvironment
from fabricamp.checkpoint import plain, write_checkpoint
from fabricamp.checkpoint.plain import described
from fabricamp.loggers import CSVLogger
from tests.small import Classifier, loader, quiet_trainer

if typing.TYPE_CHECKING:
    from tests.nowhere import Unknown

HERE = "tests.checkpoint.test_hyperparameters_in_a_file"


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 3


class Word(enum.StrEnum):
    YES = "yes"


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


@dataclasses.dataclass
class Inner:
    color: Color = Color.RED
    folder: Path | None = None


@dataclasses.dataclass(frozen=True)
class Options:
    width: int
    inner: Inner = dataclasses.field(default_factory=Inner)
    area: int = dataclasses.field(init=False, default=0)

    def __post_init__(self):
        object.__setattr__(self, "area", self.width**2)


class Size(typing.NamedTuple):
    height: int
    width: int


class Anything(Classifier):
    def __init__(self, **values):
        super().__init__()
        self.save_hyperparameters()


class Annotated(Classifier):
    def __init__(
        self,
        color: Color | None = None,
        colors: list[Color] = (),
        options: Options | None = None,
        folder: str | Path = "",
        rights: Rights = Rights.READ,
        size: Size | None = None,
        level: Level = Level.LOW,
        unknown: Unknown | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()


def saved(module, tmp_path, **options):
    """Returns the path of a checkpoint of the module after one step."""
    trainer = quiet_trainer(max_steps=1, default_root_dir=tmp_path, **options)
    trainer.fit(module, loader(8))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt"


def test_a_file_holds_plain_data_and_the_types_names(tmp_path):
    values = {
        "net": nn.Linear(1, 1),
        "act": nn.functional.relu,
        "kind": nn.ReLU,
        "opt": functools.partial(torch.optim.SGD, lr=0.1, betas=(Color.RED,)),
        "color": Color.BLUE,
        "level": Level.LOW,
        "word": Word.YES,
        "rights": Rights.READ | Rights.WRITE,
        "options": Options(3, Inner(folder=Path("a/b"))),
        "size": Size(1, 2),
        "half": np.float64(0.5),
        "true": np.bool_(True),
        "array": np.arange(3),
        "texts": np.array(["a"]),
        "bytes": b"1",
        "set": {1, 2},
        "strange": {object: 1},
        "strange_set": {Color.RED},
        "counts": {np.int64(3): 1, Level.LOW: 2, Word.YES: 3},
        "complex": 1j,
        "dtype": torch.float16,
        "meta": torch.ones(1, device="meta"),
    }
    path = saved(Anything(**values), tmp_path, logger=CSVLogger(tmp_path))
    held = torch.load(path, weights_only=True)["hyper_parameters"]
    assert torch.equal(held.pop("array"), torch.arange(3))
    assert held == {
        "net": "torch.nn.modules.linear.Linear",
        "act": "torch.nn.functional.relu",
        "kind": "torch.nn.modules.activation.ReLU",
        "opt": {"partial": "torch.optim.sgd.SGD", "args": [], "keywords": {"lr": 0.1, "betas": ("RED",)}},
        "color": "BLUE",
        "level": 3,
        "word": "yes",
        "rights": 3,
        "options": {"width": 3, "inner": {"color": "RED", "folder": "a/b"}, "area": 9},
        "size": (1, 2),
        "half": 0.5,
        "true": True,
        "texts": "numpy.ndarray",
        "bytes": "builtins.bytes",
        "set": {1, 2},
        "strange": "builtins.dict",
        "strange_set": "builtins.set",
        "counts": {3: 2, "yes": 3},
        "complex": 1j,
        "dtype": torch.float16,
        "meta": "torch.Tensor",
    }
    assert [type(held[name]) for name in ("half", "true", "level", "word")] == [float, bool, int, str]
    shown = yaml.safe_load((tmp_path / "fabricamp_logs/version_0/hparams.yaml").read_text())
    assert (shown["color"], shown["net"], shown["opt"]["keywords"]["lr"]) == ("BLUE", held["net"], 0.1)


def test_what_the_environment_says_is_nowhere_a_value():
    secret = FromEnvironment("hunter2", "${oc.env:TOKEN}")
    values = {
        "partial": functools.partial(print, secret, token=secret),
        "options": Inner(folder=secret),
        "namespace": argparse.Namespace(token=secret),
        "set": {secret},
        "tuple": Size(secret, 1),
        "keys": {secret: 1},
    }
    assert "hunter2" not in repr(plain(values))


def test_a_value_that_holds_itself_is_named():
    options = Inner()
    options.folder = [options]
    assert plain(options) == {"color": "RED", "folder": [f"{HERE}.Inner"]}


def test_types_of_annotations_come_back(tmp_path):
    options = Options(3, Inner(Color.BLUE, Path("c")))
    given = {
        "color": Color.RED,
        "colors": [Color.RED, Color.BLUE],
        "options": options,
        "folder": Path("a"),
        "rights": Rights.READ | Rights.WRITE,
        "size": Size(1, 2),
        "level": Level.LOW,
    }
    back = Annotated.load_from_checkpoint(saved(Annotated(**given), tmp_path)).hparams
    assert back == {**given, "unknown": None}
    assert [type(back[name]) for name in given] == [type(value) for value in given.values()]
    assert Annotated.load_from_checkpoint(tmp_path / "a.ckpt", color=None).hparams.color is None


def test_types_that_are_given_come_back(tmp_path):
    values = {"color": Color.RED, "options": Options(2), "folder": Path("a"), "word": Word.YES}
    path = saved(Anything(**values), tmp_path)
    back = Anything.load_from_checkpoint(path, types=[Color, Options, Path, Word]).hparams
    assert back == values
    assert [type(one) for one in back.values()] == [type(one) for one in values.values()]
    as_text = Anything.load_from_checkpoint(path, types=[Color], options=None).hparams
    assert (as_text.folder, as_text.word, type(as_text.word)) == ("a", "yes", str)
    with pytest.raises(ConfigError, match="give a list of classes"):
        Anything.load_from_checkpoint(path, types=Color)


def test_what_comes_back_by_itself(tmp_path):
    values = {
        "array": np.arange(3),
        "args": argparse.Namespace(a=[1]),
        "config": OmegaConf.create({"a": [1], "b": {"c": "${a}"}}),
        "set": {1},
        "ordered": collections.OrderedDict(a=1),
    }
    back = Anything.load_from_checkpoint(saved(Anything(**values), tmp_path)).hparams
    assert np.array_equal(back.array, values["array"])
    assert (back.args, back.set, back.ordered) == (values["args"], {1}, {"a": 1})
    assert type(back.config) is DictConfig
    assert back.config.b.c == [1]


def test_objects_have_to_be_given(tmp_path):
    path = saved(Anything(lr=1, net=nn.Linear(1, 1), inner={"act": nn.functional.relu}, color=Color.RED), tmp_path)
    with pytest.raises(CheckpointError) as raised:
        Anything.load_from_checkpoint(path)
    for words in (
        "'net' was an object of torch.nn.modules.linear.Linear, of which a checkpoint holds only the name",
        "'inner.act' was the class or function torch.nn.functional.relu",
        f"'color' was of {HERE}.Color: name this enum in the annotation of that argument, or give types=[...]",
        "Anything.load_from_checkpoint(path, net=..., inner=..., color=...)",
    ):
        assert words in str(raised.value)
    net = nn.Linear(1, 1)
    loaded = Anything.load_from_checkpoint(path, net=net, inner={}, color=Color.BLUE)
    assert (loaded.hparams.net, loaded.hparams.lr) == (net, 1)


def test_a_changed_class_is_told_of(tmp_path, monkeypatch):
    path = saved(Annotated(options=Options(2), color=Color.RED), tmp_path)
    monkeypatch.setattr(Options, "__init__", lambda self, breadth: None)
    with pytest.raises(
        CheckpointError, match=r"'options' was of .*Options, which cannot be built from .*options=\.\.\."
    ):
        Annotated.load_from_checkpoint(path)


@pytest.mark.parametrize("kind", ["name", "object", "partial", "dataclass", "enum", "config"])
def test_no_file_names_code_to_run(tmp_path, kind, monkeypatch):
    """Whatever a file contains, only classes that the loading code names are called."""
    ran = []
    monkeypatch.setattr(dataclasses, "dataclass", lambda *_: ran.append(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its name differs between versions
        OmegaConf.register_new_resolver("run_code", lambda: ran.append(1), replace=True)
    path = tmp_path / "a.ckpt"
    value = {"a": "${run_code:}"} if kind == "config" else "dataclasses.dataclass"
    notes = [{"at": ("value",), "kind": kind, "type": "dataclasses.dataclass"}]
    state = {
        "state_dict": Anything().state_dict(),
        "hyper_parameters": {"value": value},
        "hyper_parameter_types": notes,
    }
    write_checkpoint(path, state)
    with pytest.raises(CheckpointError, match=r"'value' was .*(dataclasses\.dataclass|\$\{run_code:\})"):
        Anything.load_from_checkpoint(path)
    assert not ran
    OmegaConf.clear_resolver("run_code")


def test_notes_that_are_not_laid_out_as_such(tmp_path):
    state = {"state_dict": {}, "hyper_parameters": {"value": 1}, "hyper_parameter_types": [{"at": 3}]}
    write_checkpoint(tmp_path / "a.ckpt", state)
    with pytest.raises(CheckpointError, match=r"a\.ckpt: its recorded types"):
        Anything.load_from_checkpoint(tmp_path / "a.ckpt")


class Whole(Classifier):
    def __init__(self, cfg, width=1):
        super().__init__()
        self.width = width
        self.save_hyperparameters(cfg)


@pytest.mark.parametrize("make", [OmegaConf.create, dict, lambda values: argparse.Namespace(**values)])
def test_one_argument_is_a_whole_container(tmp_path, make):
    path = saved(Whole(make({"net": {"depth": 2}, "lr": 0.1})), tmp_path)
    back = Whole.load_from_checkpoint(path)
    assert (back.hparams.net.depth, back.hparams.lr) == (2, 0.1)
    assert isinstance(back.hparams, DictConfig) == (make is OmegaConf.create)
    assert Whole.load_from_checkpoint(path, lr=0.2).hparams == {"net": {"depth": 2}, "lr": 0.2}
    assert Whole.load_from_checkpoint(path, cfg={"lr": 3}).hparams == {"lr": 3}
    beside = Whole.load_from_checkpoint(path, width=4)
    assert (beside.width, beside.hparams.lr, "width" in beside.hparams) == (4, 0.1, False)


def test_a_container_that_cannot_be_resolved_is_written_as_it_is(tmp_path):
    config = OmegaConf.create({"folder": "${hydra:runtime.cwd}", "lr": 0.1})
    path = saved(Whole(config), tmp_path)
    assert torch.load(path, weights_only=True)["hyper_parameters"] == {"folder": "${hydra:runtime.cwd}", "lr": 0.1}
    with pytest.raises(
        CheckpointError, match=r"'folder' was .*hydra.*could not resolve.*load_from_checkpoint\(path, folder="
    ):
        Whole.load_from_checkpoint(path)


def test_modules_of_a_data_module(tmp_path):
    class Data(pl.LightningDataModule):
        def __init__(self, transform, size=8):
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self):
            return loader(self.hparams.size)

    trainer = quiet_trainer(max_steps=1)
    trainer.fit(Classifier(), datamodule=Data(nn.Identity()))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    held = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert held["datamodule_hyper_parameters"] == {"transform": "torch.nn.modules.linear.Identity", "size": 8}
    assert described({"size": 8}).notes == []


def test_a_module_that_loads_not_strictly(tmp_path):
    class Less(Classifier):
        strict_loading = False

        def __init__(self):
            super().__init__()
            self.more = nn.Linear(1, 1)

    path = saved(Classifier(), tmp_path)
    trainer = quiet_trainer(max_steps=1)
    trainer.validate(Less(), loader(8), ckpt_path=path)
    assert torch.equal(Less.load_from_checkpoint(path).net[0].bias, Classifier.load_from_checkpoint(path).net[0].bias)
    with pytest.raises(CheckpointError, match="does not fit the model"):
        Less.load_from_checkpoint(path, strict=True)
