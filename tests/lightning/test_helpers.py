"""Names of the alias: helpers return Lightning's results, and classes that are not offered can only be named."""

from __future__ import annotations

import itertools
import os
import pickle
import pkgutil
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import fabricamp
from fabricamp.lightning import aliases
from fabricamp.strategies import STRATEGIES
from tests.lightning.run import nearly
from tests.lightning.test_door import DOOR, run
from tests.lightning.test_names import alias as alias  # noqa: PLC0414 - a fixture

HERE = Path(__file__).parent
ROWS = tomllib.loads(Path(aliases.TABLE).read_text())
REFUSED = [(path.removeprefix("lightning."), name) for path, row in ROWS.items() for name in row.get("refused", [])]
BY_HAND = [
    ("fabric.plugins.precision.precision", "Precision"),
]


def test_helpers_give_what_lightnings_give(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("PYTHONPATH", f"{HERE.parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    shown, _ = run(tmp_path, *DOOR, str(HERE / "helpers_program.py"))
    expected = (HERE / "helpers_printed.txt").read_text()
    pairs = itertools.zip_longest(expected.splitlines(), shown.splitlines(), fillvalue="(no line)")
    different = [f"\nLightning  {one}\nfabricamp  {two}" for one, two in pairs if not nearly(one, two, 1e-6)]
    assert not different, "".join(different)


def test_classes_that_are_not_offered_can_be_named_but_not_constructed(alias):
    for path, name in [*REFUSED, *BY_HAND]:
        kind = getattr(alias(f"lightning.{path}"), name)
        derived = type("Mine", (kind,), {"__init__": lambda self, size=3: None})
        assert not isinstance(fabricamp.Callback(), kind)
        for one, words in ((kind, "Lightning's "), (derived, "Mine cannot be constructed: Lightning's ")):
            with pytest.raises(
                fabricamp.ConfigError,
                match=rf"^{words}.*{name} is not offered by fabricamp: [a-z'].*fabricamp help from-lightning",
            ):
                one(size=4)


def test_both_paths_of_a_fabric_module_are_one_object(alias):
    listed = [one.name for one in pkgutil.walk_packages(alias("lightning.fabric").__path__, "lightning.fabric.")]
    for name in listed:
        assert alias(name.replace("lightning.fabric", "lightning_fabric", 1)) is alias(name)
    assert {f"lightning.fabric.{one}" for one in PATHS} <= {*listed}


PATHS = (
    "accelerators.cuda", "loggers", "plugins.environments", "plugins.io", "utilities.cloud_io", "utilities.data",
    "utilities.distributed", "utilities.enums", "utilities.exceptions", "utilities.rank_zero", "utilities.seed", "utilities.types",
)  # fmt: skip


def test_no_variable_lets_a_file_run_code(alias, tmp_path, monkeypatch):
    torch.save({"x": Unallowed()}, tmp_path / "a.ckpt")
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    load = alias("lightning.fabric.utilities.cloud_io")._load
    with pytest.raises(pickle.UnpicklingError):
        load(tmp_path / "a.ckpt")
    assert type(load(tmp_path / "a.ckpt", weights_only=False)["x"]) is Unallowed


class Unallowed:
    pass


def test_one_class_has_one_object_at_all_its_paths(alias):
    trees = ("lightning.pytorch", "pytorch_lightning")
    assert len({alias(f"{tree}.callbacks.callback").Callback for tree in trees}) == 1
    assert len({alias(f"{tree}.plugins.environments").SLURMEnvironment for tree in (*trees, "lightning.fabric")}) == 1
    assert len({alias(f"{tree}.plugins.io").CheckpointIO for tree in (*trees, "lightning_fabric")}) == 1
    assert alias("lightning.fabric.utilities.rank_zero").rank_zero_only is fabricamp.utilities.rank_zero_only
    assert alias("lightning.fabric.utilities.exceptions").MisconfigurationException is fabricamp.ConfigError
    assert alias("lightning.fabric.utilities.seed").seed_everything is fabricamp.seed_everything


def test_a_strategy_that_a_library_registers_is_known_to_the_trainer(alias, monkeypatch):
    monkeypatch.setattr(STRATEGIES, "_builders", {**STRATEGIES._builders})
    registry = alias("lightning.pytorch.strategies").StrategyRegistry

    class Mine(fabricamp.strategies.SingleDeviceStrategy):
        pass

    registry.register("mine", Mine)
    trainer = fabricamp.Trainer(strategy="mine", accelerator="cpu", logger=False)
    registry.remove("mine")
    assert type(trainer.strategy) is Mine


def test_the_precision_of_a_trainer_is_of_lightnings_base(alias):
    trainer = fabricamp.Trainer(accelerator="cpu", logger=False)
    assert isinstance(trainer.precision_plugin, alias("lightning.pytorch.plugins.precision").Precision)


def test_the_name_of_the_exception_of_sigterm(alias):
    kind = alias("lightning.pytorch.utilities.exceptions").SIGTERMException
    assert issubclass(kind, SystemExit)
    assert kind is sys.modules["fabricamp.utilities.exceptions"].SIGTERMException


def test_plugins_for_checkpoints_have_four_methods(alias):
    kind = alias("lightning.fabric.plugins.io").CheckpointIO
    assert kind.__abstractmethods__ == {"save_checkpoint", "load_checkpoint", "remove_checkpoint"}
    assert callable(kind.teardown)
