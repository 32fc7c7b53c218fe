"""Loads the state dict of a fused optimizer: of its own, of torch's optimizers or of apex's, without rounding to half."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabricamp._utils.first_rank import started_rank
from fabricamp.errors import CheckpointError
from fabricamp.ops import codes
from fabricamp.ops.shards import is_shard, local
from fabricamp.optimizers.refusals import owned_parameters

if TYPE_CHECKING:
    from fabricamp._utils.types import StateDict
    from fabricamp.optimizers.base import FusedOptimizer

_LOG: Final = logging.getLogger("fabricamp")
_TORCHS_OWN: Final = {"foreach", "fused", "capturable", "differentiable", "amsgrad", "decoupled_weight_decay"}
"""Group options of torch's optimizers only.  ``fused=None`` would even tell a Precision that a step cannot skip by itself."""

_NAMES: Final = {torch.float32: "fp32", torch.bfloat16: "bf16", codes.DTYPE: "8-bit"}
"""Formats of states, in messages."""


def as_cell(value: Tensor | float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a number as a 0-dim tensor in device memory: ``value`` itself if it already is one."""
    if isinstance(value, Tensor) and (value.shape, value.dtype, value.device) == ((), dtype, device):
        return value
    return torch.as_tensor(value, dtype=dtype, device=device).detach().reshape(()).clone()


def load_state(
    optimizer: Optimizer,
    load: Callable[[StateDict], None],
    state_dict: StateDict,
    states: Sequence[str],
    cells: Sequence[str],
    narrow_cells: Sequence[str],
) -> None:
    """Loads a state dict, maybe torch's or apex's, by torch's ``load``; raises CheckpointError if none of ``states`` is in it.

    ``narrow_cells`` become fp32; other floating tensors get their parameter's dtype, but at least fp32.  Options that the state
    dict does not have keep their values.
    """
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    normalised: list[StateDict] = []

    def normalise(_: Optimizer, given: StateDict) -> StateDict:
        _refuse_other_states(given, type(optimizer).__name__, states)
        normalised.append(_with_steps_by_parameter(given, type(optimizer).__name__, cells=cells))
        return normalised[0]

    # Registered last, so that it sees the state dict as other hooks have left it.
    handle = optimizer.register_load_state_dict_pre_hook(normalise)
    try:
        load(state_dict)
    finally:
        handle.remove()
    for group, before in zip(optimizer.param_groups, options, strict=True):
        for key, value in before.items():
            group.setdefault(key, value)
    _restore_full_precision(optimizer, normalised[0], states, narrow_cells)


def name_of_scales(name: str) -> str:
    """Returns the name of the scales of the state ``name``, which are kept beside its codes."""
    return f"{name}_scales"


@torch.no_grad()
def keep_as(dtype: torch.dtype, entry: dict[str, Any], name: str, parameter: Tensor, *, squares: bool) -> bool:
    """Makes codes in ``entry`` values, or values codes or bf16, if states of ``parameter`` are kept so here.

    Returns whether codes of other shards were rounded again.  A tensor that is no state of ``parameter`` stays, to be refused.
    """
    value = entry[name]
    scales = entry.get(name_of_scales(name))
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return False
    own = codes.scales_for(parameter) if dtype is codes.DTYPE else None
    coded = codes.is_coded(value)
    if coded:
        if not isinstance(scales, Tensor):
            raise CheckpointError(
                f"the state has codes of 8 bits as {name!r} and no {name_of_scales(name)!r}, without which they mean nothing; give "
                "the whole state dict"
            )
        if own is not None and codes.has_same_blocks(value.shape, len(scales), len(own)):
            if scales.shape != own.shape or is_shard(scales) != is_shard(own):
                entry[name_of_scales(name)] = codes.moved(scales, value, own)
            return False
        values = codes.decoded(value, scales, squares=squares)
        del entry[name_of_scales(name)]
    elif own is not None or (dtype is torch.bfloat16 and value.dtype is torch.float32):
        values = local(value)
    else:
        return False
    entry[name] = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
    if own is None:
        local(entry[name]).copy_(values)
    else:
        codes.encode_into(values.float(), local(entry[name]), local(own), squares=squares)
        entry[name_of_scales(name)] = own
    return coded and own is not None


def keep_loaded(optimizer: FusedOptimizer, state_dict: StateDict, kept: Callable[[Tensor], torch.dtype]) -> None:
    """Makes the states just loaded those of the optimizer's format, and logs a line if the saved ones were of another.

    ``kept`` returns the dtype of a parameter's states.
    """
    rule = optimizer.rule
    changes = set()
    again = False
    saved = [key for group in state_dict["param_groups"] for key in group["params"]]
    for key, parameter in zip(saved, owned_parameters(optimizer), strict=True):
        entry = optimizer.state.get(parameter) or {}
        given = state_dict["state"].get(key, {})
        for name in rule.states:
            if isinstance(entry.get(name), Tensor) and isinstance(given.get(name), Tensor):
                again |= keep_as(kept(parameter), entry, name, parameter, squares=name in rule.squares)
                changes.add((given[name].dtype, entry[name].dtype))
    if started_rank() != 0:
        return
    name = type(optimizer).__name__
    form = optimizer.state_format
    changed = {before for before, after in changes if before is not after and after in _NAMES}
    names = [known for dtype, known in _NAMES.items() if dtype in changed]
    if again:
        _LOG.info(
            "%s(state='8bit') rounds the 8-bit states of the checkpoint again: its shards begin at other elements", name
        )
    elif names and form == "fp32":
        _LOG.info(
            "%s goes on in fp32 from %s states of the checkpoint, with the same values", name, " and ".join(names)
        )
    elif names:
        to = "8 bits" if form == "8bit" else form
        _LOG.info(
            "%s(state=%r) rounds the %s states of the checkpoint to %s, to nearest", name, form, " and ".join(names), to
        )


@torch.no_grad()
def load_into(own: Mapping[Any, Any], loaded: Mapping[Any, Any]) -> None:
    """Copies each loaded tensor into the tensor of ``own`` that it would replace, and stores the latter in ``loaded``."""
    for key, entry in own.items():
        for name, tensor in entry.items():
            value = loaded[key].get(name) if key in loaded else None
            if isinstance(tensor, Tensor) and isinstance(value, Tensor) and tensor.shape == value.shape:
                loaded[key][name] = tensor.copy_(value)


def _refuse_other_states(state_dict: StateDict, name: str, states: Sequence[str]) -> None:
    for key, entry in state_dict["state"].items():
        if entry and not any(state in entry for state in states):
            raise CheckpointError(
                f"the state of parameter {key} has {', '.join(map(repr, entry))}, and {name} reads {', '.join(map(repr, states))}: "
                "it is the state of another optimizer"
            )


def _with_steps_by_parameter(state_dict: StateDict, name: str, *, cells: Sequence[str]) -> StateDict:
    """Returns ``state_dict`` with a ``step`` for each parameter, where apex has one per group.

    Options that only torch's optimizers have are left out.  Raises CheckpointError for amsgrad, and for a state without ``step``
    if the optimizer needs one.
    """
    result = {**state_dict, "state": dict(state_dict["state"]), "param_groups": []}
    for group in state_dict["param_groups"]:
        if group.get("amsgrad", False):
            raise CheckpointError(
                f"this state was saved with amsgrad=True, which {name} does not have; load it into torch.optim.Adam"
            )
        own = {key: value for key, value in group.items() if key not in _TORCHS_OWN}
        step = own.pop("step", None)
        result["param_groups"].append(own)
        if "step" not in cells:
            continue
        for key in own["params"]:
            entry = result["state"].get(key)
            if not entry or "step" in entry:
                continue
            if step is None:
                raise CheckpointError(
                    f"the state of parameter {key} has no 'step', nor has its group; {name} needs one"
                )
            result["state"][key] = {**entry, "step": step}
    return result


def _restore_full_precision(
    optimizer: Optimizer, state_dict: StateDict, states: Sequence[str], cells: Sequence[str]
) -> None:
    """Restores the saved values that ``Optimizer.load_state_dict`` rounded to half: at least fp32, on the parameter's device."""
    saved = [key for group in state_dict["param_groups"] for key in group["params"]]
    parameters = owned_parameters(optimizer)
    for key, parameter in zip(saved, parameters, strict=True):
        wide = torch.promote_types(parameter.dtype, torch.float32)
        for name, value in state_dict["state"].get(key, {}).items():
            if name in cells:
                number = value.detach() if isinstance(value, Tensor) else float(value)
                loaded = torch.as_tensor(number, dtype=torch.float32, device=parameter.device).reshape(()).clone()
            elif isinstance(value, Tensor) and value.is_floating_point():
                loaded = value.detach().to(parameter.device, wide, copy=True)
            elif codes.is_coded(value) and name in states:
                loaded = value.detach().to(parameter.device, copy=True)
            else:
                continue
            optimizer.state[parameter][name] = loaded
