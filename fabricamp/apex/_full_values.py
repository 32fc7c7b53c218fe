"""Full values for scripts, which save, wrap and edit half models without telling anybody."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from fabricamp.ops.dtypes import HALF_DTYPES
from fabricamp.precision.master_weights import FullValue, MasterWeights
from fabricamp.say_once import say_once

_known: WeakSet[ScriptMasters] = WeakSet()


class ScriptMasters(MasterWeights):
    """Master weights that show in state dicts, know which half weights were edited, and are shared by wrappers."""

    def __init__(self) -> None:
        super().__init__()
        self.has_taken = False
        """Whether a full value was taken from its half copy, which somebody had written into."""
        _known.add(self)

    def watch_saving(self, modules: Iterable[nn.Module], *, exact: bool) -> None:
        """Lets every way of taking the state dict of ``modules`` give fp32: with ``exact`` full values, else widened ones."""
        hook = _FullOnSave(self if exact else MasterWeights())
        self.handles += [module.register_state_dict_post_hook(hook) for module in modules]

    @torch.no_grad()
    def edited(self) -> list[Tensor]:
        """Returns the half weights with masters that are no longer what these are rounded to.  The host waits once."""
        masters = [(tensor, full.value) for tensor, full in self.full_values.items() if full.is_master]
        differs = [(tensor != master.to(tensor)).any() for tensor, master in masters]
        flags = torch.stack([one.to(differs[0].device) for one in differs]).tolist() if differs else []
        return [tensor for (tensor, _), flag in zip(masters, flags, strict=True) if flag]

    def checked(self, tensor: Tensor, full: FullValue) -> Tensor:
        """Returns the full value of ``tensor``, and takes note where that had to be taken anew."""
        version = full.value._version
        value = super().checked(tensor, full)
        self.has_taken |= value._version != version
        return value


@torch.no_grad()
def share_full_values(module: nn.Module, broadcast: Callable[[list[Tensor]], None]) -> None:
    """Lets ``broadcast``, which works in place and was just used on the tensors of ``module``, share what is behind them too.

    Without it ranks would keep full values of their own, and the fp32 values would differ in what half ones do not show.
    """
    tensors = [*module.parameters(), *module.buffers()]
    # In the order of the tensors, which is that of every rank: a set's is not.
    behind = [
        (tensor, full) for tensor in tensors for one in _known if (full := one.full_values.get(tensor)) is not None
    ]
    values = [full.value.detach().to(tensor.device) for tensor, full in behind]
    if values:
        broadcast(values)
    for (tensor, full), value in zip(behind, values, strict=True):
        full.value.copy_(value)
        full.version = tensor._version


class _FullOnSave:
    """A hook on state dicts; a copy or pickle of its module has no full values, so the hook's copy knows none and widens."""

    def __init__(self, full: MasterWeights) -> None:
        self._full = full
        self._widened: Tensor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _FullOnSave, (MasterWeights(),)

    @torch.no_grad()
    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            given = state.get(prefix + name)
            if given is None or given is tensor or tensor.dtype not in HALF_DTYPES:
                continue  # the tensor itself was asked for (keep_vars), or it is wide enough
            full = self._full.value_of(tensor)
            if full is None:
                self._tell_if_written()
                full = self._widened = given.float()
            state[prefix + name] = full.to(tensor.device)

    def _tell_if_written(self) -> None:
        """Says once that somebody, who averages weights most likely, wrote into what a state dict gave, which ends there."""
        if self._widened is not None and self._widened._version:
            say_once(
                "the state dict of a half model has fp32 copies, and what was written into them does not reach the "
                "model; average the weights in a copy.deepcopy(model) of before the model became half"
            )
