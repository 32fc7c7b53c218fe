"""The options of ``Trainer(performance=...)``: TF32, cuDNN's search, memory formats, garbage collection."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from fabricamp.arguments.checks import check_choice, check_flag, check_names
from fabricamp.errors import ConfigError, nearest

_PRECISIONS: Final = ("highest", "high", "medium")
_FLAGS: Final = ("tf32", "benchmark", "channels_last", "hold_gc")
_NAMES: Final = (*_FLAGS, "matmul_precision")
PROFILES: Final[dict[str, dict[str, Any]]] = {
    "safe": {"hold_gc": True},
    "max": {"tf32": True, "benchmark": True, "channels_last": True, "hold_gc": True},
}
"""The settings of each profile; ``safe`` changes no bit of the results."""
_ALLOCATIONS: Final = 100_000
"""Net number of new objects (created minus freed) before Python's gc looks for cycles; the default is some hundred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Performance:
    """The settings of a profile; None leaves a setting unchanged."""

    given: str
    matmul_precision: str | None = None
    tf32: bool | None = None
    benchmark: bool | None = None
    channels_last: bool = False
    hold_gc: bool = False

    @property
    def line(self) -> str:
        """One line on what the profile sets."""
        parts = []
        if self.tf32 is not None:
            parts.append(f"TF32 in convolutions {'on' if self.tf32 else 'off'}")
        if self.matmul_precision is not None:
            parts.append(f"matmul precision {self.matmul_precision!r}")
        if self.benchmark is not None:
            parts.append(f"cudnn.benchmark {'on' if self.benchmark else 'off'}")
        parts += ["convolutions channels_last"] if self.channels_last else []
        parts += ["garbage collection held off"] if self.hold_gc else []
        return f"performance={self.given}: {', '.join(parts) or 'nothing is set'}"

    @contextlib.contextmanager
    def mode(self) -> Iterator[None]:
        """A context that applies the process-wide settings; restores the earlier ones afterwards."""
        cudnn = torch.backends.cudnn.benchmark
        with contextlib.ExitStack() as stack:
            if self.matmul_precision is not None or self.tf32 is not None:
                stack.enter_context(_precision_of_fp32(self.matmul_precision, self.tf32))
            if self.benchmark is not None:
                stack.callback(setattr, torch.backends.cudnn, "benchmark", cudnn)
                torch.backends.cudnn.benchmark = self.benchmark
            if self.hold_gc:
                stack.enter_context(_collection_held_off())
            yield

    def convert(self, module: nn.Module) -> list[nn.Parameter]:
        """Converts the weights of 2-d convolutions to channels_last; returns the converted ones, for :func:`give_back`."""
        kinds = (nn.Conv2d, nn.ConvTranspose2d)
        found = [one.weight for one in module.modules() if isinstance(one, kinds)] if self.channels_last else []
        own = [one for one in found if type(one) is nn.Parameter]  # lazy ones have no format yet
        weights = [one for one in own if one.is_contiguous()]
        for one in weights:
            one.data = one.data.contiguous(memory_format=torch.channels_last)
        return weights


def give_back(weights: list[nn.Parameter]) -> None:
    """Converts weights back to their original memory format."""
    for one in weights:
        one.data = one.data.contiguous()


def as_performance(name: str, value: Any) -> Performance | None:
    """Returns the profile for the Trainer's ``performance``; None if nothing is set."""
    if value is None:
        return None
    options = PROFILES.get(value) if isinstance(value, str) else value
    if not isinstance(options, Mapping):
        hint = nearest(value, list(PROFILES)) if isinstance(value, str) else ""
        raise ConfigError(
            f"{name}={value!r} is not known{hint} (known: 'max', 'safe', None, or a dict with some of {', '.join(_NAMES)})"
        )
    check_names(f"{name} has no option", options, _NAMES)
    for key, option in options.items():
        if key in _FLAGS:
            check_flag(f"{name}: {key}", option)
        else:
            check_choice(f"{name}: {key}", option, _PRECISIONS)
    tf32 = options.get("tf32")
    precision = options.get("matmul_precision")
    if tf32 is not None and precision is not None and tf32 is (precision == "highest"):
        raise ConfigError(
            f"{name}: tf32={tf32} and matmul_precision={precision!r} contradict each other: tf32 speaks of products too; leave one "
            "of them out"
        )
    if precision is None and tf32 is not None:
        precision = "high" if tf32 else "highest"
    return Performance(given=repr(value), **{**options, "matmul_precision": precision})


def check_performance(performance: Performance | None, benchmark: bool | None, deterministic: bool | str) -> None:
    """Raises :class:`ConfigError` if another argument of the Trainer contradicts the profile."""
    if performance is None or performance.benchmark is None:
        return
    cure = "; leave it out, or give performance={...} without benchmark"
    if benchmark is not None and benchmark is not performance.benchmark:
        raise ConfigError(
            f"benchmark={benchmark} contradicts performance={performance.given}, which sets it to {performance.benchmark}{cure}"
        )
    if deterministic and performance.benchmark:
        raise ConfigError(
            f"deterministic={deterministic!r} contradicts performance={performance.given}: cuDNN's search takes what is fastest, "
            f"which may be a different algorithm in each run{cure}"
        )


@contextlib.contextmanager
def _precision_of_fp32(matmul: str | None, convolutions: bool | None) -> Iterator[None]:
    """A context with torch's fp32 precision settings; sets them under their old names, which most programs read."""
    backends: Any = torch.backends  # a type checker does not know these attributes
    settings = (backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    before = [setting.fp32_precision for setting in settings]
    old_name: str | None = None
    with contextlib.suppress(RuntimeError):  # raised if somebody has set them under their new names
        old_name = torch.get_float32_matmul_precision()
    try:
        if matmul is not None:
            torch.set_float32_matmul_precision(matmul)
        if convolutions is not None:
            backends.cudnn.allow_tf32 = convolutions
        yield
    finally:
        if matmul is not None and old_name is not None:
            torch.set_float32_matmul_precision(old_name)
        if convolutions is not None:
            backends.cudnn.allow_tf32 = before[2] == "tf32"
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value


@contextlib.contextmanager
def _collection_held_off() -> Iterator[None]:
    """A context in which Python's gc never scans the objects that exist already, and seldom scans new ones."""
    threshold = gc.get_threshold()
    frozen = gc.get_freeze_count() > 0  # by the user's program: its objects stay frozen
    if not frozen:
        gc.collect()
        gc.freeze()
    if threshold[0]:  # 0: the user has switched collection off
        gc.set_threshold(max(threshold[0], _ALLOCATIONS), *threshold[1:])
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        if not frozen:
            gc.unfreeze()
