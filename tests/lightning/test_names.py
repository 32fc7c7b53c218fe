"""Modules under Lightning's names are separate module objects, with fabricamp's classes and the version 2.6.6."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
import pydoc
import sys
from unittest import mock

import pytest

import fabricamp
from fabricamp import ConfigError, habits
from fabricamp.lightning import names
from tests.lightning.test_door import DOOR, run
from tests.small import quiet_trainer

TOPS = ("lightning", "lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric")


def _of_lightning(modules):
    return {name: one for name, one in modules.items() if name.split(".")[0] in names.PACKAGES}


@pytest.fixture
def alias(monkeypatch):
    """Installs the alias in this process; restores the modules of an installed Lightning afterwards."""
    before = _of_lightning(sys.modules)
    for name in before:
        del sys.modules[name]
    monkeypatch.setattr(habits, "_present", habits.NATIVE)  # set by the installation
    monkeypatch.setattr(sys, "path", [sys.path[0], names.PATH, *sys.path[1:]])
    names.install()
    yield importlib.import_module
    sys.meta_path.remove(names.LightningFinder)
    for name in _of_lightning(sys.modules):
        del sys.modules[name]
    sys.modules.update(before)


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_module_is_an_object_of_its_own_with_the_same_classes(alias, package):
    module = alias(package)
    callbacks = alias(f"{package}.callbacks")
    assert module is not fabricamp
    assert callbacks is module.callbacks is not fabricamp.callbacks
    assert (module.__name__, callbacks.__name__) == (package, f"{package}.callbacks")
    assert module.Trainer is fabricamp.Trainer
    assert module.LightningModule is fabricamp.TrainingModule
    assert callbacks.ModelCheckpoint is fabricamp.callbacks.ModelCheckpoint
    assert alias(f"{package}.callbacks.early_stopping").EarlyStopping is callbacks.EarlyStopping


def test_what_is_set_in_one_module_is_not_in_the_other(alias):
    ours, theirs, second = fabricamp, alias("lightning.pytorch"), alias("pytorch_lightning")
    trainer = ours.Trainer
    theirs.mine = 1
    assert not hasattr(ours, "mine")
    assert not hasattr(second, "mine")
    with mock.patch("lightning.pytorch.Trainer", "patched"):
        assert (theirs.Trainer, ours.Trainer, second.Trainer) == ("patched", trainer, trainer)
    assert theirs.Trainer is trainer
    with mock.patch("fabricamp.Trainer", "patched"):
        assert theirs.Trainer is trainer
    del theirs.Trainer
    assert not hasattr(theirs, "Trainer")
    assert ours.Trainer is second.Trainer is trainer
    importlib.reload(theirs)
    assert theirs.Trainer is trainer


@pytest.mark.parametrize(
    "path", ["callbacks.ModelCheckpoint", "loggers.CSVLogger", "utilities.rank_zero.rank_zero_only"]
)
def test_names_in_submodules_are_patched_and_deleted_alone(alias, path):
    path, _, name = path.rpartition(".")
    ours, theirs = importlib.import_module(f"fabricamp.{path}"), alias(f"pytorch_lightning.{path}")
    value = getattr(ours, name)
    with mock.patch(f"pytorch_lightning.{path}.{name}", None):
        assert (getattr(theirs, name), getattr(ours, name)) == (None, value)
    with mock.patch(f"fabricamp.{path}.{name}", None):
        assert getattr(theirs, name) is value
    delattr(theirs, name)
    assert not hasattr(theirs, name)
    assert getattr(ours, name) is value


def test_a_deleted_submodule_stays_deleted(alias):
    theirs = alias("lightning.pytorch")
    assert theirs.callbacks
    del theirs.callbacks
    assert not hasattr(theirs, "callbacks")


def test_a_package_imported_once_more_has_its_submodules(alias):
    callbacks = alias("lightning.pytorch.callbacks")
    del sys.modules["lightning.pytorch"]
    assert alias("lightning.pytorch").callbacks is callbacks


def test_both_names_of_fabric_are_one_module(alias):
    assert alias("lightning.fabric") is alias("lightning_fabric") is alias("lightning").fabric
    for path in ("__version__", "fabric", "wrappers"):
        assert alias(f"lightning_fabric.{path}") is alias(f"lightning.fabric.{path}")
    assert alias("lightning_fabric.fabric").Fabric is alias("lightning").Fabric


@pytest.mark.parametrize("name", TOPS)
def test_the_version_is_lightnings(alias, name):
    module = alias(name)
    assert module.__version__ == "2.6.6"
    assert alias(f"{name}.__version__").version == "2.6.6"
    assert alias(f"{name}.__about__").__version__ == "2.6.6"
    assert module.__version__ == "2.6.6"  # not replaced by the submodule of the same name
    assert fabricamp.__version__ != "2.6.6"


@pytest.mark.parametrize(
    "name", ["lightning", "pytorch-lightning", "pytorch_lightning", "lightning-fabric", "lightning_fabric"]
)
def test_the_distribution_is_lightnings(alias, name):
    assert importlib.metadata.version(name) == "2.6.6"
    assert importlib.metadata.metadata(name)["Name"] == name.replace("_", "-")
    assert importlib.metadata.distribution(name).version == "2.6.6"


def test_every_form_of_import(alias):
    space = {}
    exec(
        "import lightning.pytorch.callbacks as c; from lightning.pytorch import callbacks; assert c is callbacks", space
    )
    space = {}
    exec("from lightning.pytorch import *", space)
    assert {*space} - {"__builtins__"} == {
        "Callback",
        "LightningDataModule",
        "LightningModule",
        "Trainer",
        "seed_everything",
    }
    space = {}
    exec("from pytorch_lightning.callbacks import *", space)
    assert {"Timer", "ModelPruning"} <= {*space}


@pytest.mark.parametrize("name", [*TOPS, "lightning.pytorch.callbacks", "pytorch_lightning.trainer.trainer"])
def test_python_can_inspect_a_module(alias, name):
    module = alias(name)
    assert inspect.getsource(module)
    assert inspect.getmodule(fabricamp.Trainer).__name__ == fabricamp.Trainer.__module__
    assert importlib.util.find_spec(name) is module.__spec__
    assert importlib.reload(module) is module
    assert pydoc.render_doc(module)
    members = dict(inspect.getmembers(module))
    assert members.keys() >= set(getattr(module, "__all__", ()))


@pytest.mark.parametrize("name", TOPS)
def test_every_module_that_pkgutil_lists_can_be_imported(alias, name):
    listed = [one.name for one in pkgutil.walk_packages(alias(name).__path__, f"{name}.", onerror=pytest.fail)]
    for one in listed:
        assert alias(one)
        assert importlib.util.find_spec(one) is not None
    assert f"{name}.__version__" in listed
    if name == "lightning.pytorch":
        assert {f"{name}.callbacks.timer", f"{name}.callbacks.pruning", f"{name}.strategies.ddp"} <= {*listed}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lightning.pytorch.trainer.call", "Lightning's trainer.call is not offered by fabricamp: override"),
        ("pytorch_lightning.trainer.call", "Lightning's trainer.call is not offered by fabricamp: override"),
        (
            "lightning.pytorch.utilities.migration.utils",
            "Lightning's utilities.migration is not offered by fabricamp: Lightning 2",
        ),
        ("lightning.pytorch.engine", "No module named 'lightning.pytorch.engine'"),
        ("lightning.app", "No module named 'lightning.app'"),
        ("lightning_fabric.none", "No module named 'lightning_fabric.none'"),
    ],
)
def test_a_missing_module_says_what_to_write(alias, name, message):
    with pytest.raises(ModuleNotFoundError, match=message):
        alias(name)
    if not name.endswith("migration.utils"):  # Python raises for the parent
        assert importlib.util.find_spec(name) is None
    package, _, part = name.rpartition(".")
    if package in (*TOPS, "lightning.pytorch.trainer"):
        with pytest.raises(AttributeError):
            getattr(alias(package), part)


def test_fabric_can_be_subclassed_and_named(alias):
    fabric = alias("lightning").Fabric

    class Mine(fabric):
        def __init__(self, size: fabric | None = None):
            super().__init__(accelerator="cpu", devices=1)
            self.size = size

    assert not isinstance(fabricamp.Trainer(logger=False, accelerator="cpu"), fabric)
    assert isinstance(Mine(size=3), fabric)


ALL_FORMS = """
    import lightning as L
    import lightning.pytorch as pl
    import pytorch_lightning
    from lightning import Callback, LightningModule as One
    from lightning.pytorch import LightningModule, callbacks
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
    from lightning.pytorch.callbacks.model_checkpoint import ModelCheckpoint as Deep
    from pytorch_lightning.callbacks.progress.rich_progress import RichProgressBar
    from pytorch_lightning.utilities.types import STEP_OUTPUT
    import importlib.util, fabricamp
    assert pl is L.pytorch is not pytorch_lightning and pl is not fabricamp
    assert One is LightningModule is pl.LightningModule is pytorch_lightning.LightningModule is fabricamp.TrainingModule
    assert Deep is ModelCheckpoint is callbacks.ModelCheckpoint is fabricamp.callbacks.ModelCheckpoint
    assert importlib.import_module("lightning.pytorch.trainer.trainer").Trainer is fabricamp.Trainer
    assert L.Trainer is fabricamp.Trainer and L.pytorch.callbacks.EarlyStopping is EarlyStopping
    assert importlib.util.find_spec("lightning.pytorch.trainer.call") is None and importlib.util.find_spec("lightning.app") is None
    assert fabricamp.__spec__.name == "fabricamp" and fabricamp.__name__ == "fabricamp"
    for name in ("lightning.pytorch.trainer.call", "pytorch_lightning.utilities.migration", "lightning.pytorch.non"):
        try:
            __import__(name)
        except ModuleNotFoundError as error:
            print(error)
    for arguments in ({"gpus": 2}, {"resume_from_checkpoint": "x.ckpt"}, {"amp_level": "O2"}):
        try:
            L.Trainer(**arguments)
        except TypeError as error:
            print(error)
    print(L.Trainer(precision=16, accelerator="cpu", logger=False).precision)
"""


NOT_INSTALLED = """
    import sys

    class Nowhere:
        def find_spec(self, name, *_):
            here = [one for one in sys.path if one.endswith("_path")]  # of the alias, in a spawned process
            if name in ("lightning", "pytorch_lightning", "lightning_fabric") and not here:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Nowhere())
"""


FILES = """
    import importlib.metadata, importlib.util, multiprocessing, os, sys

    assert not [name for name in sys.modules if name.split(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric")]
    assert importlib.metadata.version("lightning-fabric") == "2.6.6"
    assert importlib.util.find_spec("lightning_fabric") is not None
    import lightning.pytorch as pl

    def files(_):
        import lightning_fabric, pytorch_lightning, lightning.fabric
        from lightning.pytorch import callbacks, loggers, strategies
        from pytorch_lightning.callbacks import ModelCheckpoint
        assert pl is lightning.pytorch and pl.__name__ == "lightning.pytorch"
        assert lightning_fabric is lightning.fabric and ModelCheckpoint is callbacks.ModelCheckpoint
        assert lightning_fabric.__version__ == pytorch_lightning.__version__ == importlib.metadata.version("lightning") == "2.6.6"
        found = [one.__file__ for name, one in sys.modules.items() if name.split(".")[0] in PACKAGES]
        return [file for file in found if f"{os.sep}fabricamp{os.sep}" not in file], len(found) > 10

    PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric")

    if __name__ == "__main__":
        print(files(0))
        with multiprocessing.get_context("spawn").Pool(1) as workers:  # a loader's workers are started so
            print(workers.map(files, [1])[0])
        import forms
"""


@pytest.mark.parametrize("installed", [True, False])
def test_every_form_of_import_runs_nothing_of_an_installed_lightning(tmp_path, monkeypatch, installed):
    path = str(next(iter(fabricamp.__path__)).removesuffix("fabricamp"))
    other = tmp_path / "other"
    for package in (*names.PACKAGES, "lightning/app", "lightning/pytorch", "lightning/pytorch/trainer"):
        (other / package).mkdir(parents=True)
        (other / package / "__init__.py").write_text("raise SystemExit('an installed one')")
    (other / "lightning" / "pytorch" / "trainer" / "call.py").write_text("raise SystemExit('an installed one')")
    if installed:
        (other / "lightning-2.1.0.dist-info").mkdir()
        (other / "lightning-2.1.0.dist-info" / "METADATA").write_text("Name: lightning\nVersion: 2.1.0\n")
        monkeypatch.setenv("PYTHONPATH", f"{other}:{path}")
        found = "an installed one"
    else:
        (tmp_path / "sitecustomize.py").write_text(inspect.cleandoc(NOT_INSTALLED))  # Python imports it when it starts
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{path}")
        found = "No module named 'lightning'"
    assert found in run(tmp_path, "-c", "import lightning", code=1)[1]
    (tmp_path / "forms.py").write_text(inspect.cleandoc(ALL_FORMS))
    here, worker, *lines = run(tmp_path, *DOOR, "script.py", text=FILES)[0].splitlines()
    assert here == worker == "([], True)"
    assert lines[0].startswith("Lightning's trainer.call is not offered by fabricamp: override the hooks")
    assert lines[1].startswith("Lightning's utilities.migration is not offered by fabricamp: ")
    assert lines[2] == "No module named 'lightning.pytorch.non'"
    assert "devices=2" in lines[3]
    assert "ckpt_path" in lines[4]
    assert "precision" in lines[5]
    assert lines[6] == "bf16-mixed"  # on a CPU


def test_an_evaluation_loop_may_print_and_override_nothing_else(alias):
    base = alias("lightning.pytorch.loops").evaluation_loop._EvaluationLoop
    stages = alias("lightning.pytorch.trainer.states")

    def loop(**members):
        kind = type("Loop", (base,), {"_print_results": staticmethod(print), "of_its_own": print, **members})
        return kind(quiet_trainer(), stages.TrainerFn.TESTING, stages.RunningStage.TESTING, inference_mode=False)

    assert not loop().inference_mode
    with pytest.raises(ConfigError, match=r"Loop overrides on_run_end, run of Lightning's evaluation loop"):
        loop(run=print, on_run_end=print)
