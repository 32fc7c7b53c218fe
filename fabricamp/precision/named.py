"""Precisions by name, and by the policy that a Trainer has for what is not finite."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fabricamp.errors import ConfigError, nearest
from fabricamp.precision.base import PRECISIONS, Precision
from fabricamp.precision.level import OptLevel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["precision_from"]


def precision_from(value: str | int | Precision, nan_policy: str | None = None) -> Precision:
    """Returns the Precision that ``value`` names (32 and 16 as Lightning means them), or ``value`` itself where it is one.

    ``nan_policy`` is what it does about non-finite gradients.  Raises :class:`ConfigError` for names that are not known, and for
    a precision that knows no policy.
    """
    precision = value if isinstance(value, Precision) else _by_name(value)
    if type(precision) is Precision and nan_policy is not None:
        precision = OptLevel("O0")
    if isinstance(precision, OptLevel):
        precision.take_nan_policy(nan_policy)
    elif nan_policy is not None:
        raise ConfigError(
            f"nan_policy={nan_policy!r} with {type(precision).__name__}, which knows no policy; leave it out, or use an OptLevel"
        )
    return precision


def _by_name(value: str | int) -> Precision:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ConfigError(
            f"precision={value!r} is not allowed; give a name ({', '.join(map(repr, PRECISIONS.names()))}) or an object such as "
            "OptLevel('O2', loss_scale=128.0)"
        )
    name = str(value)
    if name.upper() in PRECISIONS.names() and name not in PRECISIONS.names():
        raise ConfigError(f"precision={name!r} is not known{nearest(name.upper(), PRECISIONS.names())}")
    return PRECISIONS.build(name)


def _register(names: Sequence[str], build: Callable[[], Precision]) -> None:
    for name in names:
        PRECISIONS.add(name, build)


_register(("O0", "32-true", "32"), Precision)
_register(("O1", "16-mixed", "16"), lambda: OptLevel("O1"))
_register(("O2",), lambda: OptLevel("O2"))
_register(("O3", "16-true"), lambda: OptLevel("O3"))
_register(("O4", "bf16-mixed", "bf16"), lambda: OptLevel("O4"))
_register(("O5",), lambda: OptLevel("O5"))
_register(("bf16-true",), lambda: OptLevel("O3", cast_model_type=torch.bfloat16))
_register(("64-true", "64"), lambda: OptLevel("O3", cast_model_type=torch.float64))
