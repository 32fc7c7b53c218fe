"""Reads the arguments of constructors from their frames, and attributes from a module, its hyper-parameters and its data."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import MutableMapping
from types import FrameType
from typing import Any

from fabricamp.checkpoint.hyperparameters import HyperparametersMixin
from fabricamp.utilities import AttributeDict as AttributeDict
from fabricamp.utilities.rank_zero import rank_zero_warn


def is_picklable(obj: object) -> bool:
    """Returns whether ``obj`` can be pickled."""
    try:
        pickle.dumps(obj)
    except (pickle.PickleError, AttributeError, RuntimeError, TypeError):
        return False
    return True


def clean_namespace(hparams: MutableMapping[str, Any]) -> None:
    """Removes values that cannot be pickled, with a warning for each."""
    for key in [key for key, value in hparams.items() if not is_picklable(value)]:
        rank_zero_warn(f"{key!r} is left out of the hyper-parameters: it cannot be pickled")
        del hparams[key]


def parse_class_init_keys(cls: type) -> tuple[str, str | None, str | None]:
    """Returns the names of ``self``, ``*args`` and ``**kwargs`` in a class's constructor; None for a missing parameter."""
    parameters = [*inspect.signature(cls.__init__).parameters.values()]  # type: ignore[misc]
    names = {parameter.kind: parameter.name for parameter in parameters}
    return parameters[0].name, names.get(inspect.Parameter.VAR_POSITIONAL), names.get(inspect.Parameter.VAR_KEYWORD)


def get_init_args(frame: FrameType) -> dict[str, Any]:
    """Returns the arguments of the constructor that runs in ``frame``; {} in any other function."""
    return _get_init_args(frame)[1]


def _get_init_args(frame: FrameType) -> tuple[Any, dict[str, Any]]:
    """Returns the object that the constructor running in ``frame`` initialises, and the constructor's arguments."""
    values = inspect.getargvalues(frame).locals
    if "__class__" not in values or frame.f_code.co_name != "__init__":
        return None, {}
    kind = values["__class__"]
    names = parse_class_init_keys(kind)
    arguments = {name: values[name] for name in inspect.signature(kind.__init__).parameters}
    arguments |= arguments.get(names[2] or "", {})
    left_out = (*names, "__class__", "frame", "frame_args")
    return values.get(names[0]), {name: value for name, value in arguments.items() if name not in left_out}


def collect_init_args(
    frame: FrameType, path_args: list[dict[str, Any]], inside: bool = False, classes: tuple[type, ...] = ()
) -> list[dict[str, Any]]:
    """Returns the arguments of the constructors that call each other up to ``frame``, the innermost first."""
    found = [*path_args]
    current: FrameType | None = frame
    while current is not None and current.f_back is not None:
        owner, arguments = _get_init_args(current)
        constructs = "__class__" in current.f_locals and (not classes or isinstance(owner, classes))
        if inside and not constructs:
            break
        if constructs:
            found.append(arguments)
        inside = constructs
        current = current.f_back
    return found


def save_hyperparameters(
    obj: Any,
    *args: Any,
    ignore: Any = None,
    frame: FrameType | None = None,
    given_hparams: dict[str, Any] | None = None,
) -> None:
    """Calls ``obj.save_hyperparameters``, with the arguments of the constructor that runs in ``frame``, or in the caller's."""
    if given_hparams is not None:
        HyperparametersMixin.save_hyperparameters(obj, given_hparams, ignore=ignore)
        return
    current = inspect.currentframe()
    HyperparametersMixin.save_hyperparameters(obj, *args, ignore=ignore, frame=frame or (current and current.f_back))


def lightning_hasattr(model: Any, attribute: str) -> bool:
    """Returns whether the module, its DataModule, or the hyper-parameters of one of them have ``attribute``."""
    return bool(_holders(model, attribute))


def lightning_getattr(model: Any, attribute: str) -> Any:
    """Returns ``attribute`` of its last holder: module, its hyper-parameters, DataModule, its hyper-parameters.

    Raises AttributeError if none of these has the attribute.
    """
    holder = _found_holders(model, attribute)[-1]
    return holder[attribute] if isinstance(holder, dict) else getattr(holder, attribute)


def lightning_setattr(model: Any, attribute: str, value: Any) -> None:
    """Sets ``attribute`` wherever :func:`lightning_hasattr` looks and it exists; raises AttributeError if it exists nowhere."""
    for holder in _found_holders(model, attribute):
        if isinstance(holder, dict):
            holder[attribute] = value
        else:
            setattr(holder, attribute, value)


def _found_holders(model: Any, attribute: str) -> list[Any]:
    holders = _holders(model, attribute)
    if not holders:
        raise AttributeError(f"neither the module nor its hyper-parameters nor the DataModule have {attribute!r}")
    return holders


def _holders(model: Any, attribute: str) -> list[Any]:
    trainer = getattr(model, "_trainer", None)
    owners = [model, None if trainer is None else trainer.datamodule]
    holders = []
    for owner in owners:
        if owner is not None and hasattr(owner, attribute):
            holders.append(owner)
        if attribute in getattr(owner, "hparams", ()):
            holders.append(owner.hparams)
    return holders
