"""The table of opt levels (mixed precision as in apex), and the checks of a caller's overrides."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from fabricamp.arguments.checks import check_number
from fabricamp.errors import ConfigError, nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DEFAULT_FLOOR: Final = 2.0**-14
"""The lowest value of a dynamic scale, unless ``min_loss_scale`` is given."""
DEFAULT_CEILING: Final = 2.0**24
"""The highest value of a dynamic scale, unless ``max_loss_scale`` is given."""
DEFAULT_WINDOW: Final = 2000
"""The number of steps without an overflow after which a dynamic scale is doubled, unless ``scale_window`` is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The settings of an opt level: a row of the table, with or without overrides."""

    name: str
    autocast: torch.dtype | None = None
    cast_model_type: torch.dtype | None = None
    keep_batchnorm_fp32: bool = False
    master_weights: bool = False
    loss_scale: float | Literal["dynamic"] = 1.0
    min_loss_scale: float = DEFAULT_FLOOR
    max_loss_scale: float = DEFAULT_CEILING
    scale_window: int = DEFAULT_WINDOW
    cast_model_outputs: torch.dtype | None = None
    num_losses: int = 1
    whole_step: bool = False
    """Whether the complete step, with losses, is in ``cast_model_type``; else module outputs are fp32 in the step."""

    @property
    def dynamic(self) -> bool:
        """Whether the loss scale is dynamic."""
        return self.loss_scale == "dynamic"

    def check_device(self, device_type: str) -> None:
        """Raises :class:`ConfigError` if devices of ``device_type`` ("cpu" or "cuda") do not support this level."""
        dtype = self.autocast or self.cast_model_type
        if self.autocast is not None and not torch.amp.is_autocast_available(device_type):
            raise ConfigError(
                f"precision {self.name!r} needs torch.autocast, which {device_type!r} lacks; use 'O0', 'O2' or 'O3'"
            )
        if dtype is torch.float64 and device_type == "mps":
            raise ConfigError(f"precision {self.name!r} is set to float64, which {device_type!r} lacks; use 'O0'")
        if (
            dtype is torch.bfloat16
            and device_type == "cuda"
            and not torch.cuda.is_bf16_supported(including_emulation=False)
        ):
            raise ConfigError(
                f"precision {self.name!r} needs bfloat16, which {torch.cuda.get_device_name()} lacks; use 'O1' or 'O2' (fp16)"
            )


LEVELS: Final[Mapping[str, Level]] = {
    level.name: level
    for level in (
        Level(name="O0"),
        Level(name="O1", autocast=torch.float16, loss_scale="dynamic"),
        Level(
            name="O2",
            cast_model_type=torch.float16,
            keep_batchnorm_fp32=True,
            master_weights=True,
            loss_scale="dynamic",
        ),
        Level(name="O3", cast_model_type=torch.float16),
        Level(name="O4", autocast=torch.bfloat16),
        Level(name="O5", cast_model_type=torch.bfloat16, keep_batchnorm_fp32=True, master_weights=True),
    )
}

_DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
_FLAGS: Final = {"True": True, "False": False}


def resolve(name: str, overrides: Mapping[str, Any]) -> Level:
    """Returns the level ``name`` with ``overrides`` (None: the level's default).

    Raises :class:`ConfigError` for an unknown level and for overrides that it does not allow.
    """
    level = LEVELS.get(name)
    if level is None:
        raise ConfigError(
            f"OptLevel({name!r}) is not known{nearest(name, LEVELS)} "
            f"(known: {', '.join(LEVELS)}; the prefix is the letter O, not zero)"
        )
    overrides = {key: value for key, value in overrides.items() if value is not None}
    if level.autocast is not None:
        _check_autocast_overrides(name, overrides)
    checked: dict[str, Any] = {key: _CHECKS[key](key, value) for key, value in overrides.items()}
    if level.autocast is not None:
        checked.pop("cast_model_type", None)  # a value that passed the check leaves the weights fp32
    level = replace(level, **checked)
    if level.min_loss_scale > level.max_loss_scale:
        raise ConfigError(
            f"min_loss_scale={level.min_loss_scale:g} is above max_loss_scale={level.max_loss_scale:g}; swap or widen them"
        )
    if level.master_weights and level.cast_model_type is None:
        level = replace(level, master_weights=False)  # fp32 weights need no masters
    return level


def _check_autocast_overrides(name: str, overrides: Mapping[str, Any]) -> None:
    """Raises :class:`ConfigError` for overrides that convert weights: O1 and O4 keep fp32 weights."""
    allowed = (False, "False", torch.float32, "float32", "torch.float32")
    if "cast_model_type" in overrides and overrides["cast_model_type"] not in allowed:
        raise ConfigError(
            f"cast_model_type={overrides['cast_model_type']!r} at {name!r}, which keeps fp32 weights and casts operations; "
            "leave it out, or use 'O2' or 'O3'"
        )
    for key in ("keep_batchnorm_fp32", "master_weights"):
        if key in overrides:
            raise ConfigError(
                f"{key}={overrides[key]!r} at {name!r}, where all weights (BatchNorm's too) are fp32 and need no masters; "
                f"leave {key} out, or use 'O2'"
            )


def _dtype(key: str, value: Any) -> torch.dtype | None:
    if value is False or value == "False":
        return None
    known = _DTYPES.get(value.removeprefix("torch.")) if isinstance(value, str) else value
    if known not in _DTYPES.values():
        hint = nearest(value, _DTYPES) if isinstance(value, str) else ""
        raise ConfigError(
            f"{key}={value!r} is not a floating dtype{hint} (known: {', '.join(_DTYPES)}; False or None for none)"
        )
    return known


def _flag(key: str, value: Any) -> bool:
    value = _FLAGS.get(value, value) if isinstance(value, str) else value
    if not isinstance(value, bool):
        raise ConfigError(
            f"{key}={value!r} is not allowed; give True, False, 'True', 'False' or None for the level's own"
        )
    return value


def _number(key: str, value: Any) -> float:
    try:
        number = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not (math.isfinite(number) and number > 0):
        also = " or 'dynamic'" if key == "loss_scale" else ""
        raise ConfigError(f"{key}={value!r} is not allowed; give a positive finite number{also}")
    return number


def _scale(key: str, value: Any) -> float | str:
    return "dynamic" if value == "dynamic" else _number(key, value)


_COUNT: Final = functools.partial(check_number, least=1)
_CHECKS: Final[Mapping[str, Callable[[str, Any], Any]]] = {
    "cast_model_type": _dtype,
    "keep_batchnorm_fp32": _flag,
    "master_weights": _flag,
    "loss_scale": _scale,
    "min_loss_scale": _number,
    "max_loss_scale": _number,
    "scale_window": _COUNT,
    "cast_model_outputs": _dtype,
    "num_losses": _COUNT,
}
