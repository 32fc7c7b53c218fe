"""The precisions by name: Lightning's "true" precisions, the lookup of a name, and the table of names.

The lookup also sets the Trainer's ``nan_policy``.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from fabricamp._utils.say_once import say_once
from fabricamp.errors import ConfigError, meant, nearest
from fabricamp.habits import habits
from fabricamp.precision.base import PRECISIONS, Precision
from fabricamp.precision.casting import cast_floating
from fabricamp.precision.float8 import Float8
from fabricamp.precision.level import OptLevel

if TYPE_CHECKING:
    from fabricamp._utils.types import Batch, Step


class TruePrecision(OptLevel):
    """O3 without the fp32 boundary: batches are cast to ``dtype``, and module outputs keep their dtype.

    >>> TruePrecision(torch.bfloat16).convert_input(torch.ones(2)).dtype
    torch.bfloat16
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__("O3", cast_model_type=dtype)
        self.level = dataclasses.replace(self.level, whole_step=True)
        self.dtype = dtype
        self._default = _DefaultDtype(dtype)

    def convert_input(self, batch: Batch) -> Batch:
        """Casts the floating tensors of a batch to the module's dtype."""
        return cast_floating(batch, self.dtype)

    def forward(self, step: Step, *args: Any) -> Any:
        """Runs the user's step with ``dtype`` as torch's default dtype."""
        with self._default:
            return step(*args)

    def _add_boundaries(self, module: nn.Module, converted: set[int]) -> None:
        """Adds no boundaries, so no call is cast."""


class _DefaultDtype:
    """A context that sets torch's default dtype; it can be nested."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._before: list[torch.dtype] = []

    def __enter__(self) -> None:
        self._before.append(torch.get_default_dtype())
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self._before.pop())


_LIGHTNINGS_NAMES = {"O0": "32-true", "O1": "16-mixed", "O4": "bf16-mixed"}
_FP16_NAMES = ("16-mixed", "16")
_TRUE_NAMES = {torch.float16: "16-true", torch.bfloat16: "bf16-true", torch.float64: "64-true"}


def precision_from(
    value: str | int | Precision, nan_policy: str | None = None, device_type: str | None = None
) -> Precision:
    """Returns the Precision with the name ``value`` (32 and 16 mean the same as in Lightning), or ``value`` if it is a Precision.

    ``nan_policy`` is the policy for non-finite gradients.  Raises :class:`ConfigError` for unknown names, for a precision without
    policies, and for an opt level that ``device_type`` ("cpu" or "cuda") does not support.
    """
    if device_type == "cpu" and str(value) in _FP16_NAMES and habits().fp16_is_bf16_on_a_cpu:
        value = "bf16-mixed"
        say_once(
            "precision='16-mixed' on a CPU is 'bf16-mixed', as in Lightning; give OptLevel('O1') for fp16", logging.INFO
        )
    precision = value if isinstance(value, Precision) else _by_name(value)
    if type(precision) is Precision and nan_policy is not None:
        precision = OptLevel("O0")
    if isinstance(precision, OptLevel):
        precision.take_nan_policy(nan_policy)
        if device_type is not None:
            precision.check_device(device_type)
    elif nan_policy is not None:
        raise ConfigError(
            f"nan_policy={nan_policy!r} with {type(precision).__name__}, which has no nan_policy; leave it out, or use an OptLevel"
        )
    return precision


def precision_name(precision: Precision) -> str:
    """Returns Lightning's name of a precision if there is one, else the precision's own."""
    if isinstance(precision, TruePrecision):
        return _TRUE_NAMES[precision.dtype]
    return _LIGHTNINGS_NAMES.get(precision.name, precision.name)


def _by_name(value: str | int) -> Precision:
    if isinstance(value, torch.dtype) and (cure := meant("precision", value)):
        raise ConfigError(f"precision={value!r} is not allowed{cure}")
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ConfigError(
            f"precision={value!r} is not allowed; give a name ({', '.join(map(repr, PRECISIONS.names()))}) or an object such as "
            "OptLevel('O2', loss_scale=128.0)"
        )
    name = str(value)
    if isinstance(value, int) and name not in PRECISIONS.names():
        _refuse_number(value)
    known = {_spelt(one): one for one in PRECISIONS.names()}.get(_spelt(name), name)
    if known != name:
        raise ConfigError(f"precision={name!r} is not known{nearest(known, PRECISIONS.names())}")
    return PRECISIONS.build(name)


def _refuse_number(value: int) -> NoReturn:
    """Raises ConfigError with the numbers that are names, and the nearest if it is within a quarter of its bits."""
    names = [one for one in PRECISIONS.names() if not one.isdecimal()]
    numbers = sorted(int(one) for one in PRECISIONS.names() if one.isdecimal())
    nearby = min(numbers, key=lambda one: abs(one - value))
    near = f"; did you mean {nearby}?" if abs(nearby - value) <= nearby / 4 else ""
    hint = meant("precision", value) or near
    known = f"numbers: {', '.join(map(str, numbers))}; names: {', '.join(map(repr, names))}"
    raise ConfigError(f"precision={value!r} is not known{hint} ({known}; or pass an object with options)")


def _spelt(name: str) -> str:
    """Returns the name in small letters, with zeros for its letters O: both are typed for each other."""
    return name.lower().replace("o", "0")


def _register(names: Sequence[str], build: Callable[[], Precision]) -> None:
    for name in names:
        PRECISIONS.add(name, build)


_register(("O0", "32-true", "32"), Precision)
_register(("O1", "16-mixed", "16"), lambda: OptLevel("O1"))
_register(("O2",), lambda: OptLevel("O2"))
_register(("O3",), lambda: OptLevel("O3"))
_register(("16-true",), lambda: TruePrecision(torch.float16))
_register(("O4", "bf16-mixed", "bf16"), lambda: OptLevel("O4"))
_register(("O5",), lambda: OptLevel("O5"))
_register(("bf16-true",), lambda: TruePrecision(torch.bfloat16))
_register(("fp8-mixed",), lambda: Float8(base="O4"))
_register(("fp8",), Float8)
_register(("64-true", "64"), lambda: TruePrecision(torch.float64))
