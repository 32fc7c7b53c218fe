"""``amp.initialize`` and its options, ``amp.state_dict`` and ``load_state_dict`` of the scalers, ``amp.shutdown``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

import torch

from fabricamp.apex.amp._amp_state import AmpError, _amp_state, maybe_print, warn_or_err
from fabricamp.apex.amp._initialize import AmpTypeError, as_list, begin, release_all, stop_casts
from fabricamp.errors import CheckpointError, ConfigError, nearest
from fabricamp.precision.opt_levels import LEVELS, resolve

_UNSET: Final = {
    "enabled": False,
    "opt_level": None,
    "cast_model_type": None,
    "patch_torch_functions": False,
    "keep_batchnorm_fp32": None,
    "master_weights": None,
    "loss_scale": 1.0,
}
"""The options before an opt level sets them."""


class OptionAssertionError(ConfigError, AssertionError):
    """An option has a value that is not allowed; this error is an ``AssertionError``, as apex's users expect."""


class Properties:
    """The options of an opt level; setting an option checks its value.

    >>> properties = O2()(Properties())
    >>> properties.keep_batchnorm_fp32 = "False"
    >>> properties.keep_batchnorm_fp32
    False
    """

    def __init__(self) -> None:
        self.__dict__["options"] = dict(_UNSET)

    def _update_options_dict(self, new_options: Mapping[str, Any]) -> None:
        """Sets several options."""
        for name, value in new_options.items():
            if name not in _UNSET:
                raise OptionAssertionError(f"Tried to set unexpected option {name}{nearest(name, _UNSET)}")
            self.options[name] = value

    def __getattr__(self, name: str) -> Any:
        options = self.__dict__.get("options", {})
        if name in options:
            return options[name]
        raise AttributeError(f"Properties has no option {name!r}{nearest(name, _UNSET)}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _UNSET:
            raise AttributeError(f"Properties has no option {name!r}{nearest(name, _UNSET)}")
        check = getattr(self, f"_checked_{name}", None)
        self.options[name] = value if check is None else check(value)

    @property
    def _casts_functions(self) -> bool:
        return self.opt_level in ("O1", "O4")

    def _checked_cast_model_type(self, value: Any) -> Any:
        if self._casts_functions and value not in (None, False, torch.float32):
            warn_or_err(
                f"{self.opt_level} inserts casts around functions, so with {self.opt_level} the model weights stay fp32; "
                f"cast_model_type={value!r} belongs to O2 or O3"
            )
        return value

    def _checked_patch_torch_functions(self, value: Any) -> Any:
        if not self._casts_functions and value:
            warn_or_err(
                "Currently, patch_torch_functions=True should only be set by selecting opt_level='O1' (or 'O4' for bfloat16)"
            )
        return value

    def _checked_keep_batchnorm_fp32(self, value: Any) -> Any:
        if self._casts_functions and value is not None:
            warn_or_err(
                f"With opt_level {self.opt_level}, batchnorm functions are fp32 by themselves; leave keep_batchnorm_fp32 at None"
            )
        known = {"False": False, "True": True}
        value = known.get(value, value) if isinstance(value, str) else value
        if value not in (True, False, None):
            raise OptionAssertionError(
                f"keep_batchnorm_fp32 must be a boolean, the string 'True' or 'False', or None, found {value!r}"
            )
        return value

    def _checked_master_weights(self, value: Any) -> Any:
        if self._casts_functions and value is not None:
            warn_or_err(
                f"With opt_level {self.opt_level} weights are fp32 and need no masters; leave master_weights out"
            )
        return value

    def _checked_loss_scale(self, value: Any) -> Any:
        return resolve("O0", {"loss_scale": value}).loss_scale


class _Level:
    """An opt level: sets apex's options from fabricamp's row of the same name."""

    name: str
    brief: str
    more: str = ""

    def __call__(self, properties: Properties) -> Properties:
        """Returns ``properties`` with the options of this level set."""
        row = LEVELS[self.name]
        patches = row.autocast is not None
        converts = row.cast_model_type is not None
        properties._update_options_dict(
            {
                "enabled": True,
                "opt_level": self.name,
                "cast_model_type": None if patches else row.cast_model_type or torch.float32,
                "patch_torch_functions": patches,
                "keep_batchnorm_fp32": row.keep_batchnorm_fp32 if converts else None,
                "master_weights": None if patches else row.master_weights,
                "loss_scale": row.loss_scale,
            }
        )
        return properties


class O0(_Level):
    """Pure fp32 training: the baseline."""

    name = "O0"
    brief = "O0:  Pure FP32 training."


class O1(_Level):
    """fp32 weights; casts around individual functions."""

    name = "O1"
    brief = "O1:  Insert automatic casts around Pytorch functions and Tensor methods."


class O2(_Level):
    """A half model with fp32 BatchNorms and fp32 masters."""

    name = "O2"
    brief = "O2:  FP16 training with FP32 batchnorm and FP32 master weights."


class O3(_Level):
    """A half model without masters or fp32 BatchNorms."""

    name = "O3"
    brief = "O3:  Pure FP16 training."


class O4(_Level):
    """O1 with bfloat16, which needs no loss scale."""

    name = "O4"
    brief = "O4:  Insert automatic casts to BFLOAT16 around Pytorch functions and Tensor methods."


class O5(_Level):
    """O2 with bfloat16, which needs no loss scale."""

    name = "O5"
    brief = "O5:  BFLOAT16 training with FP32 batchnorm and FP32 master weights."


opt_levels: Final[dict[str, _Level]] = {level.name: level() for level in (O3, O2, O1, O0, O4, O5)}


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: Any = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    allow_banned: bool = False,
) -> Any:
    """Returns models and optimizers (single or lists, as passed), ready for ``scale_loss``; without optimizers the models alone.

    The objects are changed in place.  A second call with the same objects first undoes the changes of the earlier call, but keeps
    the current values.  ``allow_banned`` lets O1 run ``binary_cross_entropy`` on half values, in fp32.  Works on any device.

    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model, optimizer = initialize(model, optimizer, opt_level="O2", verbosity=0)
    >>> model.weight.dtype, optimizer.param_groups[0]["params"][0].dtype
    (torch.float16, torch.float32)
    >>> shutdown()
    """
    if isinstance(enabled, str):
        raise AmpTypeError(f"enabled={enabled!r}, the third argument, is True or False; write opt_level={enabled!r}")
    _amp_state.verbosity = verbosity
    if not enabled:
        stop_casts()
        _amp_state.opt_properties = Properties()
        return models if optimizers is None else (models, optimizers)
    properties = _chosen(
        opt_level,
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
    )
    model_list, optimizer_list = as_list(models, "model"), as_list(optimizers, "optimizer")
    # The options that fabricamp's table of opt levels takes.
    names = ["loss_scale"]
    if not properties._casts_functions:
        names += ["cast_model_type", "keep_batchnorm_fp32", "master_weights"]
    level = resolve(
        opt_level,
        {
            **{name: getattr(properties, name) for name in names},
            "cast_model_outputs": cast_model_outputs,
            "num_losses": num_losses,
            "min_loss_scale": min_loss_scale or None,
            "max_loss_scale": max_loss_scale,
        },
    )
    _amp_state.min_loss_scale, _amp_state.max_loss_scale = min_loss_scale, max_loss_scale
    patches = bool(properties.patch_torch_functions)
    begin(model_list, optimizer_list, level, patches=patches, allow_banned=allow_banned)
    _amp_state.opt_properties = properties
    return models if optimizers is None else (models, optimizers)


def _chosen(opt_level: str, **overrides: Any) -> Properties:
    """Returns the options of a level, updated by the overrides that are not None; checks and prints them."""
    if opt_level not in opt_levels:
        raise AmpError(
            f"Unexpected optimization level {opt_level!r}. Options are 'O0', 'O1', 'O2', 'O3' (and 'O4', 'O5' for bfloat16). "
            'Note that in `O0`, `O1`, etc., the prefix O is the letter "O", not the number zero.'
        )
    properties = opt_levels[opt_level](Properties())
    maybe_print(f"Selected optimization level {opt_levels[opt_level].brief}", rank0=True)
    _print_options("Defaults for this optimization level are:", properties)
    maybe_print("Processing user overrides (additional kwargs that are not None)...", rank0=True)
    for name, value in overrides.items():
        if value is not None:
            setattr(properties, name, value)
    _print_options("After processing overrides, optimization options are:", properties)
    return properties


def _print_options(title: str, properties: Properties) -> None:
    lines = [title, *(f"{name:22} : {value}" for name, value in properties.options.items())]
    maybe_print("\n".join(lines), rank0=True)


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns each loss's scale and the number of backward passes since its last change: ``{"loss_scaler0": {...}}``.

    Empty before ``initialize``, or if ``initialize`` was called with ``enabled=False``.  Waits for the device.
    """
    result: dict[str, Any] = OrderedDict() if destination is None else destination
    for index, scaler in enumerate(_amp_state.__dict__.get("loss_scalers", ())):
        result[f"loss_scaler{index}"] = scaler.state_dict()
    return result


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Loads the result of :func:`state_dict`, of fabricamp or apex; prints a warning if the number of scalers differs.

    Raises :class:`CheckpointError`, a ``RuntimeError``, for keys that do not belong to a scaler.
    """
    unknown = [key for key in state_dict if not key.startswith("loss_scaler")]
    if unknown:
        raise CheckpointError(
            f"Unexpected key(s) in amp's state_dict: {', '.join(map(repr, unknown))}; give amp.load_state_dict what "
            "amp.state_dict() returned"
        )
    scalers = _amp_state.__dict__.get("loss_scalers", [])
    if len(state_dict) != len(scalers):
        maybe_print(
            f"Warning:  state_dict contains {len(state_dict)} entries, while {len(scalers)} loss_scalers are used",
            rank0=True,
        )
    for index, (key, saved) in enumerate(state_dict.items()):
        if index < len(scalers):
            scalers[index].load_state_dict(saved)
        else:
            maybe_print(f"Skipping {key}, since num_losses is {len(scalers)}", rank0=True)


def shutdown() -> None:
    """Undoes every ``initialize``: turns casts off, restores functions and optimizers, and models in fp32 (the masters' values)."""
    release_all()
