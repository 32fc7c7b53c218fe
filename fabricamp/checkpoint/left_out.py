"""Checkpoints without the frozen parameters of a base model, and the check that the base model is the same at the load.

Such a file names the parameters that it lacks, with two sums of each one's values.  The sums are of values in bf16, so they are the
same for every precision in which a run may hold them; other weights, drawn or downloaded, differ far beyond their tolerance.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fabricamp.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from fabricamp._utils.types import StateDict

_LOG = logging.getLogger("fabricamp")

LEFT_OUT: Final = "left_out"
"""The key of a checkpoint for what it lacks: ``names``, by name its row in ``sums``, of shape (parameters, 2), fp32."""
_TOLERANCE: Final = 0.02
"""The largest difference of two sums, in the norm of the values: rounding makes a thousandth, other random values make one."""


class Trained:
    """The names of the parameters that files without frozen ones have to hold: those that were trained, or came from a file."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._told = False

    def restored(self, checkpoint: StateDict) -> None:
        """Notes the parameters that a run takes from ``checkpoint``: its constructor may give them other values."""
        self._names |= checkpoint["state_dict"].keys()

    def leave_out_others(self, checkpoint: StateDict, module: nn.Module) -> None:
        """Removes frozen parameters that were never trained from ``checkpoint``; every rank calls it, as shards are summed."""
        state = checkpoint["state_dict"]
        parameters = dict(module.named_parameters(remove_duplicate=False))
        self._names |= {name for name, parameter in parameters.items() if parameter.requires_grad}
        frozen = {name: parameter for name, parameter in parameters.items() if not parameter.requires_grad}
        names = [name for name in frozen if name not in self._names and name in state]
        if frozen and not names and not self._told:
            self._told = True
            _LOG.info(
                "trainable_only leaves nothing out: all weights were trained, or came from a file that has them all"
            )
        for name in names:
            del state[name]
        rows = {name: row for row, name in enumerate(names)}
        checkpoint[LEFT_OUT] = {"names": rows, "sums": _sums([frozen[name] for name in names])}


def with_base(state: StateDict, left_out: Mapping[str, Any], module: nn.Module, path: str) -> StateDict:
    """Returns the weights ``state`` with the module's own in place of those that were left out.

    Raises :class:`CheckpointError` if the module lacks one of them, or has other values than the run that wrote the file.
    """
    rows = left_out["names"]
    own = module.state_dict()
    parameters = dict(module.named_parameters(remove_duplicate=False))
    cure = "build the module with the base model that it was trained on"
    missing = [name for name in rows if name not in own or name not in parameters]
    if missing:
        raise CheckpointError(
            f"{path} has only what was trained, and this {type(module).__name__} has no {', '.join(missing[:5])}: {cure}"
        )
    differing = _differing(_sums([parameters[name] for name in rows]), left_out["sums"])
    names = [name for name, row in rows.items() if differing[row]]
    if names:
        raise CheckpointError(
            f"{path} has only what was trained, and of the rest {len(names)} of {len(rows)} parameters have other values in this "
            f"{type(module).__name__} ({', '.join(names[:5])}): {cure}"
        )
    return {**{name: own[name] for name in rows}, **state}


def _sums(parameters: Sequence[Tensor]) -> Tensor:
    """Returns the sum and the sum of squares of each parameter's values, of whole parameters where ranks have shards."""
    rows = [_sums_of(parameter) for parameter in parameters]
    return torch.stack(rows) if rows else torch.zeros(0, 2, dtype=torch.float32, device="cpu")


def _sums_of(parameter: Tensor) -> Tensor:
    values = parameter.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    values = values.to(torch.bfloat16)
    sums = [values.sum(dtype=torch.float32), values.square().sum(dtype=torch.float32)]
    return torch.stack([one.full_tensor() if hasattr(one, "full_tensor") else one for one in sums])


def _differing(own: Tensor, saved: Tensor) -> list[bool]:
    """Returns for each row whether the values behind its sums are others."""
    own, saved = own.to("cpu", torch.float64), saved.to("cpu", torch.float64)
    squares = torch.maximum(own[:, 1], saved[:, 1])
    near = (own[:, 0] - saved[:, 0]).abs() <= _TOLERANCE * squares.sqrt()
    alike = (own[:, 1] - saved[:, 1]).abs() <= _TOLERANCE * squares
    both_nan = own.isnan().any(1) & saved.isnan().any(1)
    return (~((near & alike) | both_nan)).tolist()
