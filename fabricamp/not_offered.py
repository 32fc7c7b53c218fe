"""Names that Lightning has and fabricamp does not, with the error messages for their import."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Final

from fabricamp.errors import nearest

_SHARDED: Final = "give Trainer(strategy='fsdp'), or FSDP(units=[...]) of fabricamp.strategies"
_LOG_SERVER: Final = "write a Logger around its package (docs/architecture.md, A logger)"
_OWN_LOOP: Final = (
    "override the hooks of a LightningModule, or set automatic_optimization = False and step in training_step"
)
_NO_FABRIC: Final = "write the loop around torch, or a LightningModule with automatic_optimization = False"
_ONE_FILE: Final = "a checkpoint is one file here, whole already"
_HARDWARE: Final = "give Trainer(accelerator='cpu' or 'gpu')"

NOT_OFFERED: Final = {
    "Fabric": _NO_FABRIC,
    "accelerators.MPSAccelerator": _HARDWARE,
    "accelerators.XLAAccelerator": _HARDWARE,
    "callbacks.ModelPruning": "call torch.nn.utils.prune in a Callback",
    "callbacks.SpikeDetection": "use Trainer(nan_policy=...) for what is not finite",
    "cli.LightningCLI": "name module and data by _target_ in a YAML file, and run `fabricamp fit config.yaml trainer.max_epochs=3 "
    "module.lr=1e-3` (`fabricamp fit config.yaml --help` lists every argument; docs/configuration.md)",
    "cli.LightningArgumentParser": "write a YAML file for the command 'fabricamp fit' (docs/configuration.md)",
    "cli.SaveConfigCallback": "'fabricamp fit' writes config.yaml beside the logs by itself",
    "demos": "write the module into your test: a linear layer is ten lines",
    "fabric": f"{_NO_FABRIC}; rank_zero_only and the like are in fabricamp.utilities, seed_everything is in fabricamp",
    "loggers.LitLogger": _LOG_SERVER,
    "loggers.NeptuneLogger": _LOG_SERVER,
    "core.hooks": "the hooks are methods of LightningModule, LightningDataModule and Callback",
    "core.saving": "a module's class has load_from_checkpoint, and a logger writes hparams.yaml",
    "loops": _OWN_LOOP,
    "overrides": _OWN_LOOP,
    "plugins": "give Trainer(precision=...) and strategy= a name or an object, such as OptLevel('O2') or DDP(bucket_cap_mb=50); "
    "torchrun and SLURM are found by themselves",
    "profilers.AdvancedProfiler": "run python -m cProfile, or give Trainer(profiler='pytorch')",
    "profilers.XLAProfiler": _HARDWARE,
    "serve": "export the trained module with torch.export or torch.onnx",
    "strategies.DeepSpeedStrategy": _SHARDED,
    "strategies.FSDPStrategy": _SHARDED,
    "strategies.ModelParallelStrategy": _SHARDED,
    "strategies.ParallelStrategy": "derive from fabricamp.strategies.ProcessGroupStrategy",
    "strategies.SingleDeviceXLAStrategy": _HARDWARE,
    "strategies.XLAStrategy": _HARDWARE,
    "strategies.launchers": "give Trainer(start_method='spawn' or 'fork'), or start the script by torchrun",
    "trainer.call": _OWN_LOOP,
    "trainer.connectors": "what a connector holds is an attribute of the Trainer (docs/from-lightning.md)",
    "utilities.argparse": "write a YAML file for the command 'fabricamp fit' (docs/configuration.md)",
    "utilities.cloud_io": "read a checkpoint with torch.load(path, weights_only=True), a remote one through fsspec",
    "utilities.compile": "call torch.compile on what the step calls, or module.compile()",
    "utilities.consolidate_checkpoint": _ONE_FILE,
    "utilities.data": "a DataLoader has its own batch size; self.log(batch_size=...) says it where it cannot be seen",
    "utilities.deepspeed": _ONE_FILE,
    "utilities.enums": "give strings, such as gradient_clip_algorithm='norm'",
    "utilities.find_shared_parameters": "shared parameters stay shared",
    "utilities.imports": "ask importlib.util.find_spec whether a package is there",
    "utilities.memory": "call gc.collect() and torch.cuda.empty_cache()",
    "utilities.migration": "Lightning 2's files load as they are (docs/reliability.md)",
    "utilities.model_helpers": "compare the methods of the classes",
    "utilities.model_registry": "upload ModelCheckpoint's best_model_path after fit",
    "utilities.set_shared_parameters": "shared parameters stay shared",
    "utilities.signature_utils": "call inspect.signature",
    "utilities.testing": "use pytest.mark.skipif",
    "utilities.upgrade_checkpoint": "Lightning 2's files load as they are (docs/reliability.md)",
    "utilities.warnings": "filter by message; warnings of fabricamp begin with 'fabricamp'",
}
"""What to do instead, by the name without ``fabricamp.``."""

_PATHS: Final = {
    "accelerators.mps": "accelerators.MPSAccelerator",
    "accelerators.xla": "accelerators.XLAAccelerator",
    "callbacks.pruning": "callbacks.ModelPruning",
    "callbacks.spike": "callbacks.SpikeDetection",
    "LightningCLI": "cli.LightningCLI",
    "cli.ArgsType": "cli.LightningCLI",
    "cli.LRSchedulerCallable": "cli.LightningCLI",
    "cli.OptimizerCallable": "cli.LightningCLI",
    "cli.ReduceLROnPlateau": "cli.LightningCLI",
    "cli.instantiate_class": "cli.LightningCLI",
    "profilers.advanced": "profilers.AdvancedProfiler",
    "profilers.xla": "profilers.XLAProfiler",
    "loggers.litlogger": "loggers.LitLogger",
    "loggers.neptune": "loggers.NeptuneLogger",
    "strategies.deepspeed": "strategies.DeepSpeedStrategy",
    "strategies.fsdp": "strategies.FSDPStrategy",
    "strategies.model_parallel": "strategies.ModelParallelStrategy",
    "strategies.parallel": "strategies.ParallelStrategy",
    "strategies.single_xla": "strategies.SingleDeviceXLAStrategy",
    "strategies.xla": "strategies.XLAStrategy",
    "utilities.cli": "cli.LightningCLI",
    "utilities.parameter_tying": "utilities.find_shared_parameters",
}
"""Other paths of Lightning to the names in ``NOT_OFFERED``."""


def words_for(name: str) -> str | None:
    """Returns the message that ``name``, such as "fabricamp.loops", is not offered and what to do instead; None for other names."""
    below = name.removeprefix("fabricamp.")
    below = _PATHS.get(below, below)
    if below not in NOT_OFFERED:
        return None
    return f"Lightning's {below} is not offered by fabricamp: {NOT_OFFERED[below]} (docs/from-lightning.md)"


_PARTS: Final = ("callbacks", "loggers", "profilers", "strategies", "tuner")
_HOMES: Final = ("fabricamp", *(f"fabricamp.{part}" for part in _PARTS))
"""The packages that have classes with Lightning's names."""

_LIGHTNING: Final = ("lightning", "pytorch_lightning", "lightning_fabric")


def lightnings(value: object) -> str | None:
    """Returns the message for an object or class that is, or derives from, one of Lightning's; None for any other."""
    kind = value if isinstance(value, type) else type(value)
    bases = [one for one in kind.__mro__ if one.__module__.split(".")[0] in _LIGHTNING]
    if not bases:
        return None
    for base in bases:
        path = next((path for path in _HOMES if base.__name__ in importlib.import_module(path).__all__), None)
        if path is not None:
            whose = "is Lightning's" if base is kind else f"derives from Lightning's {base.__name__}"
            return f"{kind.__name__} {whose}; change the import: from {path} import {base.__name__}"
        section = base.__module__.split(".")[2:3]
        if words := words_for(".".join([*section, base.__name__])):
            return words
    return f"{kind.__name__} is Lightning's, of {bases[0].__module__}, and is not known here (docs/from-lightning.md)"


def is_lightnings(value: object) -> bool:
    """Returns whether the class of ``value`` is, or derives from, one of Lightning's."""
    return any(one.__module__.split(".")[0] in _LIGHTNING for one in type(value).__mro__)


def mixed_with_lightnings_trainer(callback: str) -> str:
    """Returns the message for Lightning's Trainer that got fabricamp's callback class named ``callback``."""
    home = importlib.import_module("fabricamp.callbacks")
    own = "fabricamp.callbacks" if callback in home.__all__ else "fabricamp"
    theirs = sys.modules.get("lightning.pytorch.callbacks") or sys.modules.get("pytorch_lightning.callbacks")
    other = ""
    if theirs is not None and hasattr(theirs, callback):
        other = f", or {callback} of Lightning: from {theirs.__name__} import {callback}"
    return (
        f"{callback} of {own} was given to Lightning's Trainer, and a run is of one package; change the import of the Trainer: "
        f"from fabricamp import Trainer (and of the module: LightningModule){other}"
    )


def refuse_import(name: str) -> None:
    """Raises :class:`ModuleNotFoundError` if the module ``name``, which no other finder has found, is not offered."""
    words = words_for(name)
    # A caller of importlib.util.find_spec only asks whether the module exists, and expects None.
    if words is None or sys._getframe(3).f_globals.get("__name__") == "importlib.util":
        return
    # The error has another name than the module: `from fabricamp.callbacks import Timer` swallows an error of the module's name.
    raise ModuleNotFoundError(words, name=name.removeprefix("fabricamp."))


def missing(module: str, name: str, known: Iterable[str]) -> AttributeError:
    """Returns the AttributeError for a name that ``module`` does not have."""
    words = words_for(f"{module}.{name}".removeprefix("fabricamp."))
    return AttributeError(words or f"module {module!r} has no attribute {name!r}{nearest(name, known)}")


def part_of(package: str, name: str, known: Iterable[str] = ()) -> ModuleType:
    """Imports and returns the module ``package.name``; raises AttributeError if there is none.

    Packages call it on attribute access, because Lightning's packages import their submodules.
    """
    if not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}") is not None:
        return importlib.import_module(f"{package}.{name}")
    raise missing(package, name, known)
