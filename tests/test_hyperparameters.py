"""Hyper-parameters: which arguments are saved, and which cannot be."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import enum
import functools
import inspect
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from fabricamp.checkpoint.hyperparameters import Hyperparameters, HyperparametersMixin
from fabricamp.errors import ConfigError


class Base(HyperparametersMixin):
    def __init__(self, lr=0.1, depth=2):
        self.save_hyperparameters()


class Everything(HyperparametersMixin):
    def __init__(self, first, *rest, named=1, **others):
        local = first  # noqa: F841
        self.save_hyperparameters()


def test_all_arguments_and_nothing_else_are_kept():
    assert Base(lr=0.5).hparams == {"lr": 0.5, "depth": 2}
    assert Everything(1, 2, 3, named=4, other=5).hparams == {"first": 1, "named": 4, "other": 5}
    assert Base().hparams_name is None
    assert Base().logs_hyperparameters


def test_nothing_is_kept_where_nothing_was_asked():
    class Plain(HyperparametersMixin):
        pass

    assert Plain().hparams == {}
    assert not Plain().logs_hyperparameters


def test_names_and_ignore():
    class Chosen(HyperparametersMixin):
        def __init__(self, lr, net, width, logger=False):
            self.save_hyperparameters("lr", "width", logger=logger)

    class Ignoring(HyperparametersMixin):
        def __init__(self, lr, net, act=None, ignore=("net", "act")):
            self.save_hyperparameters(ignore=ignore)

    assert Chosen(1, nn.Linear(1, 1), 2).hparams == {"lr": 1, "width": 2}
    assert not Chosen(1, None, 2).logs_hyperparameters
    assert Ignoring(1, nn.Linear(1, 1), print).hparams == {"lr": 1, "ignore": ("net", "act")}
    assert Ignoring(1, nn.Linear(1, 1), ignore="net").hparams == {"lr": 1, "act": None, "ignore": "net"}


@pytest.mark.parametrize("early", [False, True])
def test_class_and_base_both_save_and_the_classs_values_win(early):
    class Derived(Base):
        def __init__(self, lr, width=8):
            if early:
                self.save_hyperparameters()
            super().__init__(lr=lr * 10, depth=5)
            if not early:
                self.save_hyperparameters()

    assert Derived(1.0).hparams == {"lr": 1.0, "width": 8, "depth": 5}


def test_a_base_keeps_the_arguments_of_the_derived_classes():
    class Derived(Base):
        def __init__(self, width, lr=0.2, **others):
            super().__init__(lr=lr * 2)

    class Further(Derived):
        def __init__(self, layers=7):
            super().__init__(width=layers)

    class Named(HyperparametersMixin):
        def __init__(self, lr, depth=2):
            self.save_hyperparameters("lr")

    class DerivedOfNamed(Named):
        def __init__(self, width, lr):
            super().__init__(lr * 2)

    class Holder:
        def __init__(self, lr):
            self.held = Derived(4, lr)

    assert Derived(3, other=1).hparams == {"lr": 0.2, "depth": 2, "width": 3, "other": 1}
    assert Further().hparams == {"lr": 0.2, "depth": 2, "width": 7, "layers": 7}
    assert DerivedOfNamed(3, 0.1).hparams == {"lr": 0.1}
    assert Holder(0.5).held.hparams == {"lr": 0.5, "depth": 2, "width": 4}


def test_modules_and_closures():
    class Net(HyperparametersMixin, nn.Module):
        def __init__(self, width, scale=2):
            self.save_hyperparameters()
            super().__init__()
            self.layer = nn.Linear(width, width)
            self.factor = lambda: scale * width

    net = Net(3)
    assert net.hparams == {"width": 3, "scale": 2}
    assert list(net.state_dict()) == ["layer.weight", "layer.bias"]
    del net.factor
    assert copy.deepcopy(net).hparams == net.hparams
    assert copy.deepcopy(net).hparams is not net.hparams


def test_dataclasses():
    @dataclasses.dataclass
    class Data(HyperparametersMixin):
        folder: str
        batch_size: int = 4
        salt: dataclasses.InitVar[int] = 1
        derived: int = dataclasses.field(init=False, default=0)

        def __post_init__(self, salt):
            self.save_hyperparameters(ignore="folder")

    assert Data("here", salt=7).hparams == {"batch_size": 4, "salt": 7}


@pytest.mark.parametrize(
    "config",
    [
        {"lr": 1, "net": {"width": 2}},
        argparse.Namespace(lr=1, net={"width": 2}),
        OmegaConf.create({"lr": 1, "net": {"width": "${width}"}, "width": 2}),
        Hyperparameters({"lr": 1, "net": {"width": 2}}),
    ],
    ids=lambda config: type(config).__name__,
)
def test_containers(config):
    class Configured(HyperparametersMixin):
        def __init__(self, config, other=3):
            self.save_hyperparameters(config, ignore="width")

    configured = Configured(config)
    assert configured.hparams == {"lr": 1, "net": {"width": 2}}
    assert configured.hparams.net.width == 2
    assert configured.hparams_name == "config"
    assert type(configured.hparams["net"]) is Hyperparameters


class Anything(HyperparametersMixin):
    def __init__(self, **values):
        self.save_hyperparameters()


def test_omegaconf_containers_stay_what_they_are():
    config = OmegaConf.create({"betas": [0.9, 0.99], "twice": "${width}", "width": 2})
    assert Anything(optimizer=config).hparams.optimizer is config

    class Whole(HyperparametersMixin):
        def __init__(self, config, extra=None):
            self.save_hyperparameters(config)
            if extra:
                self.save_hyperparameters("extra")

    whole = Whole(config)
    assert whole.hparams is config
    assert whole.hparams_name == "config"
    config.width = 3
    assert (whole.hparams.twice, whole.hparams_initial.twice) == (3, 2)
    assert type(whole.hparams_initial) is type(config)
    together = Whole(config, extra=nn.ReLU()).hparams
    assert (together.twice, type(together.extra)) == (3, nn.ReLU)


class Level(enum.IntEnum):
    LOW = 3


@dataclasses.dataclass
class Options:
    width: int = 2


OBJECTS = {
    "module": nn.Linear(1, 1),
    "function": print,
    "lambda": lambda: 0,
    "class": nn.ReLU,
    "partial": functools.partial(torch.optim.SGD, lr=0.1),
    "enum": Level.LOW,
    "dataclass": Options(),
    "path": Path("here"),
    "array": np.zeros(2),
    "scalar": np.float64(0.5),
    "namespace": argparse.Namespace(a=1),
    "dtype": torch.float16,
    "bytes": b"1",
}


def test_in_memory_objects_stay():
    hparams = Anything(**OBJECTS).hparams
    assert all(hparams[name] is value for name, value in OBJECTS.items())
    assert Anything(objects=list(OBJECTS.values())).hparams.objects[0] is OBJECTS["module"]
    inner = Anything(inner={"net": OBJECTS["module"]}).hparams.inner
    assert inner.net is OBJECTS["module"]
    assert copy.deepcopy(Anything(**OBJECTS)).hparams.module is not OBJECTS["module"]


def test_as_they_were_saved():
    layers = [1, [2]]
    one = Anything(layers=layers, net=OBJECTS["module"], lr=1, inner={"a": 1}, args=argparse.Namespace(b=[1]))
    layers[1].append(3)
    one.hparams.lr, one.hparams.inner.a = 2, 2
    one.hparams.layers.append(4)
    one.hparams.args.b.append(2)
    initial = one.hparams_initial
    assert (initial.layers, initial.lr, initial.inner.a, initial.args.b) == ([1, [2]], 1, 1, [1])
    assert initial.net is OBJECTS["module"]
    initial.lr = 5
    assert one.hparams_initial.lr == 1
    assert HyperparametersMixin().hparams_initial == {}


def test_a_function_in_between_gives_the_frame():
    class Between(HyperparametersMixin):
        def __init__(self, lr, width=2):
            self._keep_arguments()

        def _keep_arguments(self):
            self.save_hyperparameters(frame=inspect.currentframe().f_back)

    assert Between(0.1).hparams == {"lr": 0.1, "width": 2}


def test_misuse_is_named():
    class Named(HyperparametersMixin):
        def __init__(self, learning_rate, *names):
            self.save_hyperparameters(*names)

        def later(self):
            self.save_hyperparameters()

    with pytest.raises(ConfigError, match="did you mean 'learning_rate'"):
        Named(1, "lerning_rate")
    with pytest.raises(ConfigError, match="got a int"):
        Named(1, 3)
    with pytest.raises(ConfigError, match=r"called in later\(\); call it in the __init__"):
        Named(1).later()


def test_they_print_as_lightnings_do():
    assert str(Hyperparameters({"warmup": 4, "lr": 0.02})) == '"lr":     0.02\n"warmup": 4'
    assert str(Hyperparameters()) == ""
    assert repr(Hyperparameters({"lr": 1})) == "{'lr': 1}"


def test_attributes():
    hparams = Hyperparameters({"lr": 0.1, "net": {"width": 2}})
    hparams.lr = 0.2
    hparams.extra = {"a": 1}
    assert hparams == {"lr": 0.2, "net": {"width": 2}, "extra": {"a": 1}}
    assert hparams.extra.a == 1
    del hparams.extra
    with pytest.raises(AttributeError, match="did you mean 'net'"):
        _ = hparams.nett
    assert not hasattr(hparams, "extra")
    for copied in (copy.deepcopy(hparams), pickle.loads(pickle.dumps(hparams)), copy.copy(hparams)):
        assert copied == hparams
        assert type(copied) is Hyperparameters
        assert copied.net.width == 2


def test_a_closed_configuration_is_saved_although_another_argument_is_ignored():
    """Hydra's configurations are in struct mode."""

    class Net(HyperparametersMixin):
        def __init__(self, config, net=None):
            self.save_hyperparameters(config, ignore="net")

    config = OmegaConf.create({"lr": 0.1})
    OmegaConf.set_struct(config, True)
    assert Net(config).hparams.lr == 0.1
    OmegaConf.set_readonly(config, True)
    assert Net(config).hparams.lr == 0.1
