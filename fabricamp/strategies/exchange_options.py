"""Checks of the delayed exchange's options, shared by the strategy and apex's wrapper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn

from fabricamp.errors import ConfigError, nearest
from fabricamp.gradients.flat import Transport

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def checked_switch(name: str, value: object) -> bool:
    """Returns ``value``; raises :class:`ConfigError` unless it is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} has to be True or False")
    return value


def checked_count(name: str, value: object) -> int:
    """Returns ``value``; raises :class:`ConfigError` unless it is a whole number above 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r} has to be a whole number of at least 1")
    return value


def checked_transport(dtype: object, *, always_fp32: object, average: object, predivide: object) -> Transport:
    """Returns the transport (dtype and division) of gradients; raises :class:`ConfigError` for wrong options."""
    always_fp32 = checked_switch("allreduce_always_fp32", always_fp32)
    if not (dtype is None or (isinstance(dtype, torch.dtype) and dtype in _DTYPES)):
        raise ConfigError(
            f"allreduce_dtype={dtype!r} has to be torch.float16, torch.bfloat16, torch.float32, or None for the gradients' own"
        )
    if always_fp32 and dtype not in (None, torch.float32):
        raise ConfigError(
            f"allreduce_always_fp32=True and allreduce_dtype={dtype} contradict each other; leave one out"
        )
    if not (predivide is None or (_is_number(predivide) and 0 < predivide < math.inf)):
        raise ConfigError(
            f"gradient_predivide_factor={predivide!r} has to be a number above 0, or None for the whole average"
        )
    return Transport(
        dtype=dtype,
        always_fp32=always_fp32,
        average=checked_switch("gradient_average", average),
        predivide=None if predivide is None else float(predivide),
    )


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def checked_triggers(triggers: object) -> list[Any]:
    """Returns parameters, or names of parameters, as a list; raises :class:`ConfigError` for an empty or wrong one."""
    if triggers is None:
        return []
    if isinstance(triggers, Sequence) and not isinstance(triggers, str):
        given = list(triggers)
        if given and all(isinstance(one, (str, Tensor)) for one in given):
            return given
    raise ConfigError(
        "allreduce_trigger_params has to be a list of parameters or of their names, and not empty; leave it out to go by size"
    )


def checked_communicators(communicators: object, num_streams: int) -> tuple[list[Any], list[Any]] | None:
    """Returns (groups, streams) of ``num_streams`` entries each; raises :class:`ConfigError` for other values."""
    if communicators is None:
        return None
    if isinstance(communicators, Sequence) and len(communicators) == 2:
        groups, streams = (list(one) for one in communicators)
        if len(groups) == len(streams) == num_streams:
            return groups, streams
    raise ConfigError(
        f"allreduce_communicators has to be (process groups, streams), with num_allreduce_streams={num_streams} of each (None as "
        "stream on CPUs)"
    )


def indices_of_triggers(triggers: Sequence[Any], module: nn.Module, parameters: Sequence[Tensor]) -> list[int]:
    """Returns the positions of ``triggers`` in ``parameters``, without those that are not in it.

    Raises :class:`ConfigError` for names and tensors that are no parameters of ``module``.
    """
    named = dict(module.named_parameters())
    for trigger in triggers:
        if isinstance(trigger, str) and trigger not in named:
            raise ConfigError(
                f"allreduce_trigger_params names {trigger!r}, which {type(module).__name__} lacks{nearest(trigger, named)}"
            )
    wanted = {id(named[one] if isinstance(one, str) else one) for one in triggers}
    known = set(map(id, named.values()))
    if not wanted <= known:
        raise ConfigError(f"allreduce_trigger_params has a tensor that is no parameter of {type(module).__name__}")
    return [index for index, parameter in enumerate(parameters) if id(parameter) in wanted]


def marked(name: str, device: torch.device) -> AbstractContextManager[Any]:
    """Returns a context that profilers show as ``name``: an NVTX range on a GPU, else a range of torch's profiler."""
    if device.type == "cuda":
        return cast("AbstractContextManager[Any]", torch.cuda.nvtx.range(name))
    return torch.profiler.record_function(name)
