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
from fabricamp.lightning.bases import lightnings_base, own_class, place_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_AS_THEY_ARE: Final = {
    ("callbacks.callback", "Callback"),
    ("callbacks.lambda_function", "LambdaCallback"),
    ("callbacks.prediction_writer", "BasePredictionWriter"),
}
"""Lightning classes that work with fabricamp's Trainer as they are; users' subclasses of them run."""

_ANSWERS: Final = {
    "callbacks.BaseFinetuning": {"freeze_before_training", "finetune_function"},
    "callbacks.EMAWeightAveraging": {"should_update"},
    "callbacks.RichProgressBar": {"get_metrics"},
    "callbacks.TQDMProgressBar": {"get_metrics"},
    "callbacks.WeightAveraging": {"should_update"},
}
"""Methods that fabricamp's class calls, and that a user's subclass of Lightning's class may override."""

_FINDINGS: Final = {
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
    users: Any = type(value)
    base = own_class(value)
    name = _name_of(base)
    if base is None or name is None:
        return value
    module, _, known = name.partition(".")
    kind = getattr(importlib.import_module(f"fabricamp.{module}"), known)
    arguments = arguments_of(value, name, kind)
    answers = _answers(value, base, kind, name)
    if arguments is None or answers is None:
        return value
    ours = (kind if users is base else _named_as(users, kind))(**arguments)
    vars(ours).update({one: functools.partial(_answer, value, kind, one) for one in answers})
    _GIVEN[ours] = value
    hidden = module == "loggers"  # an address may hold a password
    shown = ", ".join(f"{key}=..." if hidden else f"{key}={one!r}" for key, one in arguments.items())
    whose = f"Lightning's {known}" if users is base else f"{users.__name__}, of Lightning's {known},"
    asked = f", which calls its {', '.join(answers)}" if answers else ""
    told = "; the given object gets the results at the end of the run" if name in _FINDINGS else ""
    vars(ours)[_LINE] = f"{whose} runs as fabricamp.{name}({shown}) in trainer.{module}{asked}{told}"
    return ours


def lines_of(parts: Iterable[object]) -> list[str]:
    """Returns the messages about callbacks and loggers that replace Lightning's; each message only once."""
    return [vars(one).pop(_LINE) for one in parts if _LINE in vars(one)]


def hand_back(parts: Iterable[object]) -> None:
    """Writes the results of callbacks and loggers into the Lightning objects that they replace."""
    there = {id(one) for one in parts}  # by id, because users' objects may be unhashable
    for ours, given in [*_GIVEN.items()]:
        for name in _FINDINGS.get(_name_of(own_class(given)) or "", ()) if id(ours) in there else ():
            vars(given)[name] = getattr(ours, name)


def _name_of(base: type | None) -> str | None:
    """Returns the key in migration.toml of a class of Lightning, or None."""
    place = None if base is None else place_of(base)
    name = "" if place is None else f"{place[0].partition('.')[0]}.{place[1]}"
    return name if name in lightning_constructors() else None


def _answers(value: Any, base: type, kind: type, name: str) -> list[str] | None:
    """Returns the methods that a user's subclass overrides, or None if one of them cannot be forwarded.

    A method can be forwarded if ``_ANSWERS`` has it, or if it is a hook that is empty in Lightning's class and in fabricamp's.
    """
    classes = type(value).__mro__
    own = {one for part in classes[: classes.index(base)] for one in vars(part) if hasattr(base, one)}
    found = sorted(one for one in own if not one.startswith("__") and one != "_abc_impl")
    theirs = lightnings_base(base)
    for one in found:
        empty = getattr(base, one) is getattr(theirs, one, None) and getattr(kind, one) is getattr(Callback, one, None)
        if one not in _ANSWERS.get(name, ()) and not (empty and callable(getattr(base, one))):
            return None
    return found


def _answer(given: Any, kind: type, name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls a user's method; meanwhile its inherited helpers are fabricamp's, which handle master parameters."""
    with _helped(given, kind):
        return getattr(given, name)(*args, **kwargs)


@contextlib.contextmanager
def _helped(given: Any, kind: type) -> Iterator[None]:
    base = own_class(given)
    helpers = [one for one, value in vars(kind).items() if isinstance(value, staticmethod)]
    lent = {one: getattr(kind, one) for one in helpers if getattr(type(given), one) is getattr(base, one, None)}
    vars(given).update(lent)
    try:
        yield
    finally:
        for one in lent:
            vars(given).pop(one, None)


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
    if place_of(type(value)) != ("utilities.combined_loader", "CombinedLoader"):
        return value
    return CombinedLoader(value.iterables, vars(value)["_mode"])


def runs_as_it_is(callback: object) -> bool:
    """Returns whether ``callback`` is a user's callback on a Lightning base class that needs nothing else of Lightning."""
    kind = own_class(callback)
    return kind is not None and place_of(kind) in _AS_THEY_ARE


def writes_predictions(callback: object) -> bool:
    """Returns whether ``callback`` derives from Lightning's BasePredictionWriter."""
    return any(
        place_of(one) == ("callbacks.prediction_writer", "BasePredictionWriter") for one in type(callback).__mro__
    )
