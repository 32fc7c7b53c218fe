"""Modules that have moved, under the names by which pickles and plug-ins of earlier versions import them."""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import ModuleType

_MOVED: Final[dict[str, dict[str, str]]] = {
    "fabricamp.callbacks._cadence": {"Cadence": "fabricamp.arguments.cadence", "Every": "fabricamp.arguments.cadence"},
    "fabricamp.callbacks._lineage": {"Lineage": "fabricamp.callbacks._checkpoint_files"},
    "fabricamp.callbacks._rotation": {"Kept": "fabricamp.callbacks._checkpoint_files:KeptFiles"},
    "fabricamp.engine.attachment": {"Attachment": "fabricamp.engine.run_context:RunContext"},
    "fabricamp.hyperparameters": {"Hyperparameters": "fabricamp.checkpoint.hyperparameters"},
    "fabricamp.loggers.backlog": {"Record": "fabricamp.loggers.write_queue"},
    "fabricamp.loggers.growing_file": {"GrowingFile": "fabricamp.loggers.append_file:AppendFile"},
    "fabricamp.loggers.trouble": {"Trouble": "fabricamp.loggers.logger_errors:LoggerErrors"},
    "fabricamp.precision.plain_step": {"Stepper": "fabricamp.precision.update_plan:Stages"},
    "fabricamp.precision.scaling": {
        "ConstantScale": "fabricamp.precision.level",
        "DynamicScale": "fabricamp.precision.level",
        "JudgedScale": "fabricamp.precision.level",
    },
    "fabricamp.strategies.overlapped": {"Local": "fabricamp.strategies.overlapped_allreduce"},
    "fabricamp.precision.true": {
        "TruePrecision": "fabricamp.precision.named",
        "_DefaultDtype": "fabricamp.precision.named",
    },
}
"""Maps each earlier module to its names and the modules that have them now; "module:name" if the name has changed too."""


class _EarlierNames(MetaPathFinder, Loader):
    """Makes a module of :data:`_MOVED` when it is imported; Python asks this finder last, so that other imports cost nothing."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Returns a spec for an earlier module."""
        return ModuleSpec(fullname, self) if fullname in _MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        """Fills the module with the objects that its names have now."""
        for name, target in _MOVED[module.__name__].items():
            moved_to, _, new_name = target.partition(":")
            setattr(module, name, getattr(importlib.import_module(moved_to), new_name or name))


def install() -> None:
    """Makes the earlier names importable."""
    if not any(isinstance(finder, _EarlierNames) for finder in sys.meta_path):
        sys.meta_path.append(_EarlierNames())
