"""Replaces callbacks, loggers and loaders of Lightning's classes by fabricamp's of the same name and arguments."""

from __future__ import annotations

import contextlib
import functools
import importlib
import weakref
from typing import TYPE_CHECKING, Any, Final

from fabricamp.arguments.migration import lightning_constructors
from fabricamp.callbacks.base import Callback
from fabricamp.data import CombinedLoader
from fabricamp.lightning.arguments import arguments_of
from fabricamp.lightning.bases import lightnings_base, own_class, path_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_AS_THEY_ARE: Final = {
    ("callbacks.callback", "Callback"),
    ("callbacks.lambda_function", "LambdaCallback"),
    ("callbacks.prediction_writer", "BasePredictionWriter"),
}
"""Lightning classes that work with fabricamp's Trainer as they are; users' subclasses of them run."""

_FORWARDED: Final = {
    "callbacks.BaseFinetuning": {"freeze_before_training", "finetune_function"},
    "callbacks.EMAWeightAveraging": {"should_update"},
    "callbacks.RichProgressBar": {"get_metrics"},
    "callbacks.TQDMProgressBar": {"get_metrics"},
    "callbacks.WeightAveraging": {"should_update"},
}
"""Methods that fabricamp's class calls, and that a user's subclass of Lightning's class may override."""

_RESULTS: Final = {
    "callbacks.BatchSizeFinder": ("optimal_batch_size",),
    "callbacks.EarlyStopping": ("best_score", "stopped_epoch", "wait_count"),
    "callbacks.LearningRateFinder": ("optimal_lr",),
    "callbacks.ModelCheckpoint": (
        "best_k_models", "best_model_path", "best_model_score", "current_score", "dirpath", "kth_best_model_path", "kth_value",
        "last_model_path",
    ),
    "callbacks.Timer": ("start_time", "end_time", "time_elapsed", "time_remaining"),
    "loggers.CometLogger": ("_experiment", "_experiment_key"),
    "loggers.CSVLogger": ("_version",),
    "loggers.MLFlowLogger": ("_experiment_id", "_run_id"),
    "loggers.TensorBoardLogger": ("_version",),
    "loggers.WandbLogger": ("_experiment", "_id"),
}  # fmt: skip
"""Attributes that scripts read from the Lightning object after the run."""

_FINDERS: Final = ("callbacks.BatchSizeFinder", "callbacks.LearningRateFinder")

_GIVEN: Final[weakref.WeakKeyDictionary[Any, Any]] = weakref.WeakKeyDictionary()
"""Maps fabricamp's objects to the Lightning objects that they replace; not an attribute, so that copies and pickles lack it."""
_LINE: Final = "_line_on_lightnings"


def adopted(value: Any) -> Any:
    """Returns fabricamp's callback or logger of the same name and arguments for one of Lightning's.

    A user's subclass is replaced too, if fabricamp's class calls every method that the subclass overrides.  Any other value is
    returned as it is.
    """
    user_class: Any = type(value)
    base = own_class(value)
    name = _name_of(base)
    if base is None or name is None:
        return value
    module, _, class_name = name.partition(".")
    kind = getattr(importlib.import_module(f"fabricamp.{module}"), class_name)
    arguments = arguments_of(value, name, kind)
    methods = _methods_to_forward(value, base, kind, name)
    if arguments is None or methods is None:
        return value
    if user_class is base:
        ours = kind(**arguments)
        given = f"Lightning's {class_name}"
    else:
        ours = _named_as(user_class, kind)(**arguments)
        given = f"{user_class.__name__}, of Lightning's {class_name},"
    vars(ours).update({method: functools.partial(_call_given, value, kind, method) for method in methods})
    _GIVEN[ours] = value
    hidden = module == "loggers"  # an address may hold a password
    shown = ", ".join(f"{key}=..." if hidden else f"{key}={argument!r}" for key, argument in arguments.items())
    calls = f", which calls its {', '.join(methods)}" if methods else ""
    results = "; the given object gets the results at the end of the run" if name in _RESULTS else ""
    vars(ours)[_LINE] = f"{given} runs as fabricamp.{name}({shown}) in trainer.{module}{calls}{results}"
    return ours


def lines_of(parts: Iterable[object]) -> list[str]:
    """Returns the messages about callbacks and loggers that replace Lightning's; each message only once."""
    return [vars(one).pop(_LINE) for one in parts if _LINE in vars(one)]


def hand_back(parts: Iterable[object]) -> None:
    """Writes the results of callbacks and loggers into the Lightning objects that they replace."""
    ids = {id(part) for part in parts}  # by id, because users' objects may be unhashable
    for ours, given in [*_GIVEN.items()]:
        if id(ours) not in ids:  # of another Trainer
            continue
        for name in _RESULTS.get(_name_of(own_class(given)) or "", ()):
            vars(given)[name] = getattr(ours, name)


def _name_of(base: type | None) -> str | None:
    """Returns the key in migration.toml of a class of Lightning, or None."""
    path_and_name = None if base is None else path_of(base)
    if path_and_name is None:
        return None
    path, class_name = path_and_name
    name = f"{path.partition('.')[0]}.{class_name}"
    return name if name in lightning_constructors() else None


def _methods_to_forward(value: Any, base: type, kind: type, name: str) -> list[str] | None:
    """Returns the methods that a user's subclass overrides, or None if one of them cannot be forwarded.

    A method can be forwarded if ``_FORWARDED`` has it, or if it is a hook that is empty in Lightning's class and in fabricamp's.
    """
    classes = type(value).__mro__
    user_classes = classes[: classes.index(base)]
    overridden = {method for part in user_classes for method in vars(part) if hasattr(base, method)}
    methods = sorted(method for method in overridden if not method.startswith("__") and method != "_abc_impl")
    root = lightnings_base(base)
    for method in methods:
        if method in _FORWARDED.get(name, ()):
            continue
        if getattr(base, method) is not getattr(root, method, None):
            return None
        # Here ``method`` is one of Lightning's empty hooks.  fabricamp's Callback has all of them, so the attribute exists.
        empty_in_ours = getattr(kind, method) is getattr(Callback, method, None)
        if not (empty_in_ours and callable(getattr(base, method))):
            return None
    return methods


def _call_given(given: Any, kind: type, name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls a user's method; meanwhile its inherited helpers are fabricamp's, which handle master parameters."""
    with _helpers_of(kind, given):
        return getattr(given, name)(*args, **kwargs)


@contextlib.contextmanager
def _helpers_of(kind: type, given: Any) -> Iterator[None]:
    """A context in which ``given`` has the static methods of ``kind``, except those that the user overrides."""
    base = own_class(given)
    names = [name for name, value in vars(kind).items() if isinstance(value, staticmethod)]
    helpers = {name: getattr(kind, name) for name in names if getattr(type(given), name) is getattr(base, name, None)}
    vars(given).update(helpers)
    try:
        yield
    finally:
        for name in helpers:
            vars(given).pop(name, None)


@functools.cache
def _named_as(given: Any, kind: Any) -> Any:
    """Returns a subclass of fabricamp's ``kind`` with the name of the user's class ``given``.

    Checkpoints store callback states under the class name, and a module's callback replaces the Trainer's of the same class.
    """
    return type(
        given.__name__,
        (kind,),
        {"__qualname__": given.__qualname__, "__reduce__": _reduced, "_named_as": (given, kind)},
    )


def _reduced(ours: Any) -> tuple[Any, ...]:
    return _blank, type(ours)._named_as, ours.__getstate__()


def _blank(given: Any, kind: Any) -> Any:
    return object.__new__(_named_as(given, kind))


def searches_alone(callback: object) -> bool:
    """Returns whether Lightning's Tuner added ``callback`` to the Trainer for a search without a fit after it."""
    return _name_of(own_class(callback)) in _FINDERS and bool(vars(callback).get("_early_exit"))


def own_loader(value: Any) -> Any:
    """Returns fabricamp's CombinedLoader for one of Lightning's; any other loader as it is."""
    if path_of(type(value)) != ("utilities.combined_loader", "CombinedLoader"):
        return value
    return CombinedLoader(value.iterables, vars(value)["_mode"])


def runs_as_it_is(callback: object) -> bool:
    """Returns whether ``callback`` is a user's callback on a Lightning base class that needs nothing else of Lightning."""
    kind = own_class(callback)
    return kind is not None and path_of(kind) in _AS_THEY_ARE


def writes_predictions(callback: object) -> bool:
    """Returns whether ``callback`` derives from Lightning's BasePredictionWriter."""
    return any(
        path_of(one) == ("callbacks.prediction_writer", "BasePredictionWriter") for one in type(callback).__mro__
    )
