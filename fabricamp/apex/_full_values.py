"""fp32 full values of half models in scripts, which save, wrap and edit these models without a call to fabricamp."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from fabricamp._utils.say_once import say_once
from fabricamp.ops.tensors import HALF_DTYPES
from fabricamp.precision.master_weights import FullValue, MasterWeights

_known: WeakSet[ScriptMasters] = WeakSet()


class ScriptMasters(MasterWeights):
    """Master weights that appear in state dicts, detect edited half weights, and are broadcast by wrappers."""

    def __init__(self) -> None:
        super().__init__()
        self.has_taken = False
        """Whether a full value was taken again from its half copy, because a script had written into the copy."""
        _known.add(self)

    def watch_saving(self, modules: Iterable[nn.Module], *, exact: bool) -> None:
        """Registers hooks so that state dicts of ``modules`` hold fp32: full values with ``exact``, else half values cast up."""
        hook = _FullOnSave(self if exact else MasterWeights())
        self.handles += [module.register_state_dict_post_hook(hook) for module in modules]

    @torch.no_grad()
    def edited(self) -> list[Tensor]:
        """Returns the half weights that differ from their rounded masters.  The host waits once."""
        masters = [(tensor, full.value) for tensor, full in self.full_values.items() if full.is_master]
        differs = [(tensor != master.to(tensor)).any() for tensor, master in masters]
        flags = torch.stack([differ.to(differs[0].device) for differ in differs]).tolist() if differs else []
        return [tensor for (tensor, _), flag in zip(masters, flags, strict=True) if flag]

    @torch.no_grad()
    def refresh(self, tensors: Iterable[Tensor] | None = None) -> None:
        """Copies the converted tensors into their fp32 values: all, or only ``tensors``."""
        for tensor in self.full_values if tensors is None else tensors:
            full = self.full_values[tensor]
            full.value.copy_(tensor)
            full.version = tensor._version

    def settle(self) -> None:
        """Does nothing: edits are found by :meth:`edited`, and count as in apex."""

    def checked(self, tensor: Tensor, full: FullValue) -> Tensor:
        """Returns the full value of ``tensor``; takes it again from the half copy if they differ, and then sets ``has_taken``."""
        if full.version != tensor._version:
            current = tensor.detach()
            if not torch.equal(current, full.value.to(current.device, current.dtype)):
                full.value.copy_(current)
                self.has_taken = True
            full.version = tensor._version
        return full.value


@torch.no_grad()
def share_full_values(module: nn.Module, broadcast: Callable[[list[Tensor]], None]) -> None:
    """Broadcasts the full values of ``module``; ``broadcast`` works in place, and was just called with the module's tensors.

    Otherwise each rank would keep its own full values, which can differ between ranks although the half values are equal.
    """
    tensors = [*module.parameters(), *module.buffers()]
    # In the order of the tensors, which is the same on every rank; the order of a set is not.
    pairs = []
    for tensor in tensors:
        for masters in _known:
            full = masters.full_values.get(tensor)
            if full is not None:
                pairs.append((tensor, full))
    values = [full.value.detach().to(tensor.device) for tensor, full in pairs]
    if values:
        broadcast(values)
    for (tensor, full), value in zip(pairs, values, strict=True):
        full.value.copy_(value)
        full.version = tensor._version


class _FullOnSave:
    """A state-dict hook that replaces half tensors by fp32 ones.

    A copy or pickle of the module has no full values, so its copy of the hook casts half values up.
    """

    def __init__(self, full: MasterWeights) -> None:
        self._full = full
        self._widened: Tensor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _FullOnSave, (MasterWeights(),)

    @torch.no_grad()
    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            saved = state.get(prefix + name)
            if saved is None or saved is tensor or tensor.dtype not in HALF_DTYPES:
                continue  # the caller asked for the tensor itself (keep_vars), or the tensor is not half
            full = self._full.value_of(tensor)
            if full is None:
                self._warn_if_written()
                full = saved.float()
                self._widened = full
            state[prefix + name] = full.to(tensor.device)

    def _warn_if_written(self) -> None:
        """Warns once if a script wrote into a state dict's fp32 copies, most likely to average weights: the model keeps its own."""
        if self._widened is not None and self._widened._version:
            say_once(
                "the state dict of a half model returns fp32 copies, and writing into them does not change the model; "
                "average the weights in a copy.deepcopy(model) made before the model became half"
            )
