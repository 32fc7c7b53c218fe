"""Errors for tensors that a fused optimizer's kernel cannot read, raised before the launch, with the parameter's name.

The helpers at the end are shared by the optimizers' own checks.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fabricamp.arguments.checks import check_choice
from fabricamp.errors import ConfigError, NotCapturableError
from fabricamp.ops.codes import is_coded
from fabricamp.ops.shards import first_element, is_shard, local
from fabricamp.ops.tensors import HALF_DTYPES
from fabricamp.ops.uploads import is_capturing
from fabricamp.torch_private import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from fabricamp._utils.types import OptimizerFace
    from fabricamp.optimizers.base import FusedOptimizer
    from fabricamp.optimizers.rows import DeviceParams


_LOG = logging.getLogger("fabricamp")

_WEIGHTS_OF: Final = {
    torch.float16: "at precision {!r} weights are fp16, which with 16 bits more are not every fp32 value",
    torch.bfloat16: "at precision {!r} bf16 weights have no masters",
    torch.float64: "at precision {!r} weights are fp64",
    torch.float32: "at precision {!r} weights are fp32",
}
"""Why there are no remainders, by the narrowest dtype of weights."""

_WITH_MOMENTUM_IN_GRADIENTS: Final = frozenset({("pytorch_optimizer", "SCIONLight"), ("scion", "ScionLight")})
"""Package and class of optimizers that are to be called without ``zero_grad``."""


class UnsupportedError(ConfigError, RuntimeError):
    """Raised for tensors, options and calls that a fused optimizer refuses; also a ``RuntimeError``, as apex's users expect."""


class UnsupportedInCaptureError(UnsupportedError, NotCapturableError):
    """Raised for a step within a CUDA graph's capture, or for one that a captured step has made impossible."""


def refuse_unreadable(optimizer: Optimizer, tensors: Sequence[Tensor | None], role: str) -> None:
    """Raises UnsupportedError for the first of ``tensors``, one per parameter, that kernels cannot read.

    Kernels cannot read a wrapper around other tensors or a sparse tensor.  ``role`` is "parameter" or "gradient".  Of a sharded
    parameter, kernels read this rank's shard.
    """
    for index, whole in enumerate(tensors):
        if whole is None:
            continue
        tensor = local(whole) if role == "parameter" else whole
        if is_wrapper(tensor):
            name = name_of(optimizer, index)
            raise UnsupportedError(
                f"{type(optimizer).__name__} got {name if role == 'parameter' else f'the gradient of {name}'} as "
                f"{type(tensor).__name__}, a wrapper tensor without memory of its own; it updates plain tensors: give it the local "
                "ones, or take torch.optim.AdamW(..., fused=True) or another of torch's for sharded parameters"
            )
        if tensor.layout is not torch.strided:
            raise UnsupportedError(
                f"{type(optimizer).__name__} got a sparse {role} ({name_of(optimizer, index)}); use sparse=False in the embedding, "
                "or torch.optim.SparseAdam"
            )


def refuse_momentum_in_gradients(optimizer: OptimizerFace, *, automatic: bool) -> None:
    """Raises :class:`ConfigError` for an optimizer whose momentum is what it leaves in ``.grad``, which is cleared after a step.

    Under manual optimization, where the user clears gradients, warns that no checkpoint has it.
    """
    package = type(optimizer).__module__.partition(".")[0]
    name = type(optimizer).__name__
    if (package, name) not in _WITH_MOMENTUM_IN_GRADIENTS:
        return
    if automatic:
        raise ConfigError(
            f"{name} keeps its momentum in .grad, which is cleared after each step: it would train without momentum; take "
            f"{name.removesuffix('Light')}, whose momentum is state, or step it by hand and clear no gradients "
            "(self.automatic_optimization = False)"
        )
    _LOG.warning(
        "%s keeps its momentum in .grad, which no checkpoint holds: a resumed run begins without momentum", name
    )


def check_masters(name: str, masters: object, *, own: bool) -> None:
    """Raises :class:`ConfigError` unless ``masters`` is "fp32" or "remainder"; ``own``: the optimizer has masters in its state."""
    check_choice("masters", masters, ("fp32", "remainder"))
    if masters == "remainder" and own:
        raise ConfigError(
            f"{name} got masters='remainder' and master_weights=True, which keeps fp32 masters in its state; leave one of them out"
        )


def refuse_masters(optimizer: OptimizerFace, module: nn.Module, precision: str, shards_in: str = "") -> None:
    """Raises :class:`ConfigError` for ``masters="remainder"`` where no weight is a bf16 copy of an fp32 master.

    ``shards_in``: the strategy, if it shards fp32 weights.
    """
    candidates: list[Any] = [optimizer, *getattr(optimizer, "__dict__", {}).values()]
    for one in candidates:
        if getattr(type(one), "masters", None) is None or one.masters == "fp32":
            continue
        if one is not optimizer:
            reason = f"{type(optimizer).__name__} around it reads no such weights"
        elif getattr(one, "remainders", None):
            return
        elif shards_in:
            reason = f"strategy {shards_in!r} shards fp32 weights, which need no masters"
        else:
            reason = _WEIGHTS_OF[_narrowest(module)].format(precision)
        raise ConfigError(
            f"{type(one).__name__}(masters='remainder') keeps the 16 bits that bf16 copies of fp32 masters lack; {reason}: give "
            "masters='fp32', or precision='O5' without sharding (fabricamp help memory: the bytes of each)"
        )


def refuse_strided_states(optimizer: OptimizerFace) -> None:
    """Raises :class:`ConfigError` for states that are not fp32 of shards that are no range of elements of their parameter."""
    candidates: list[Any] = [optimizer, *getattr(optimizer, "__dict__", {}).values()]
    for one in candidates:
        if not hasattr(type(one), "state_format") or one.state_format == "fp32":
            continue
        for index, parameter in enumerate(owned_parameters(one)):
            if first_element(parameter) < 0:
                raise ConfigError(
                    f"{type(one).__name__}(state={one.state_format!r}) numbers the elements of whole parameters, and "
                    f"{name_of(one, index)} is sharded as {getattr(parameter, 'placements', ())}: give state='fp32', or shard "
                    "along the first dimension alone, as strategy='fsdp' does"
                )


def refuse_masters_of_scripts(optimizer: OptimizerFace, owner: str) -> None:
    """Raises UnsupportedError for ``masters="remainder"`` under ``owner``, which gives scripts fp32 masters to read and edit."""
    if getattr(optimizer, "masters", "fp32") != "fp32":
        raise UnsupportedError(
            f"{owner} keeps fp32 masters, which scripts read and edit, and {type(optimizer).__name__} has masters='remainder'; "
            "give masters='fp32', or train at precision 'O5' of a Trainer"
        )


def _narrowest(module: nn.Module) -> torch.dtype:
    dtypes = {parameter.dtype for parameter in module.parameters()}
    return next((dtype for dtype in _WEIGHTS_OF if dtype in dtypes), torch.float32)


def refuse_without_remainders(optimizer: FusedOptimizer, parameters: Sequence[Tensor]) -> None:
    """Raises UnsupportedError for ``masters="remainder"`` without a Precision that keeps the remainders of these ``parameters``."""
    if optimizer.masters == "fp32":
        return
    for index, parameter in enumerate(parameters):
        if not optimizer.remainders or (parameter.dtype in HALF_DTYPES and parameter not in optimizer.remainders):
            raise UnsupportedError(
                f"{type(optimizer).__name__}(masters='remainder') has no remainder of {name_of(optimizer, index)}, a "
                f"{parameter.dtype} tensor: precision 'O5' keeps them, in a Trainer or as OptLevel('O5') with "
                "setup_optimizers(...); take masters='fp32' in a loop without a precision"
            )


def refuse_state(optimizer: Optimizer, parameter: Tensor, index: int, names: Iterable[str]) -> None:
    """Raises UnsupportedError for a user's state tensor that does not match its parameter in shape, device or sharding."""
    entry = optimizer.state[parameter]
    for name in names:
        value = entry.get(name)
        if value is None or _is_alike(value, parameter):
            continue
        if isinstance(value, Tensor):
            description = f"a {value.dtype} tensor of shape {tuple(value.shape)} on {value.device}"
        else:
            description = repr(value)
        raise UnsupportedError(
            f"{type(optimizer).__name__} found {description} as {name!r} in the state of {name_of(optimizer, index)}; it takes a "
            f"floating tensor of shape {tuple(parameter.shape)} on {parameter.device}: move it there before the step"
        )


def _is_alike(value: object, parameter: Tensor) -> bool:
    if is_shard(value) != is_shard(parameter):
        return False
    own = local(value)
    if not isinstance(own, Tensor) or is_wrapper(own) or not (own.is_floating_point() or is_coded(own)):
        return False
    shard = local(parameter)
    return (own.shape, own.device) == (shard.shape, shard.device)


def refuse_rebuild(optimizer: Optimizer, parts: Sequence[DeviceParams] | None, parameters: Sequence[Tensor]) -> None:
    """Raises UnsupportedError if rows cannot be built: during a capture, or if a captured graph still uses the present rows."""
    name = type(optimizer).__name__
    if any(part.captured for part in parts or ()):
        raise UnsupportedInCaptureError(
            f"a step of this {name} was captured in a CUDA graph, which keeps using the memory of its capture, but its "
            "parameters, state tensors, half copies or momentum were replaced: delete the graph, call optimizer.forget(), "
            "then capture again"
        )
    if any(is_capturing(device) for device in {parameter.device for parameter in parameters}):
        raise UnsupportedInCaptureError(
            f"the first step of this {name}, or of one of its parameters, is inside a CUDA graph's capture, which would create its "
            "state again in every replay: run a step before the capture"
        )


def rows_of_eager_steps(optimizer: Optimizer) -> UnsupportedError:
    """Returns the error for a captured step that would read the gradients which :meth:`gather` set for eager steps."""
    return UnsupportedInCaptureError(
        f"{type(optimizer).__name__}.gather ran before the capture of a CUDA graph and step within it: eager steps would "
        "write over what the graph reads; call gather within the capture too"
    )


def name_of(optimizer: Optimizer, index: int) -> str:
    """Returns the name, for messages, of the parameter at position ``index`` among the parameters of all groups."""
    for number, group in enumerate(optimizer.param_groups):
        if index < len(group["params"]):
            names = group.get("param_names")
            named = f" ({names[index]!r})" if names else ""
            return f"parameter {index} of group {number}{named}"
        index -= len(group["params"])
    return f"parameter {index}"


def owned_parameters(optimizer: OptimizerFace) -> list[Tensor]:
    """Returns every tensor that ``optimizer`` updates, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def is_wrapper(tensor: Tensor | None) -> bool:
    """Returns whether ``tensor`` is a wrapper around other tensors, like a DTensor."""
    return is_traceable_wrapper_subclass(tensor)


def at_least_0(value: Any) -> bool:
    """Whether ``value`` is a number, or a tensor with one number, that is not negative and not nan."""
    try:
        return bool(value >= 0)
    except (TypeError, ValueError, RuntimeError):  # text, or a tensor of several elements
        return False
