"""The fp32 values of a converted module: master weights of trained parameters, originals of the other tensors."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from fabricamp import ops
from fabricamp.errors import ConfigError

if TYPE_CHECKING:
    from fabricamp._utils.types import StateDict

_PARAMETERS: Final = WeakTensorKeyDictionary()
"""The module parameter of each master, for callers that only have the optimizer."""


def module_parameter(updated: Tensor) -> Tensor:
    """Returns the module's parameter of a tensor that an optimizer updates: the half parameter of an fp32 master."""
    parameter = _PARAMETERS.get(updated, lambda: None)()
    return updated if parameter is None else parameter


class FullValue:
    """The fp32 value of a converted tensor.

    While only the half copy is used (frozen weights, buffers, levels without masters), the value is kept in host memory.
    ``version`` is the tensor's version when both last agreed.  ``is_stale`` is set once they are known to differ.
    """

    __slots__ = ("is_master", "is_stale", "value", "version")

    def __init__(self, value: Tensor, version: int) -> None:
        self.value = value
        self.version = version
        self.is_master = False
        self.is_stale = False


class MasterWeights:
    """The fp32 values, by converted parameter or buffer.  Conversion changes ``.data`` only: every tensor stays the same object."""

    def __init__(self) -> None:
        self.full_values: dict[Tensor, FullValue] = {}
        self.handles: list[RemovableHandle] = []

    def convert(self, tensors: Iterable[Tensor], dtype: torch.dtype) -> None:
        """Rounds ``tensors`` to ``dtype`` in place and keeps their fp32 values."""
        for tensor in tensors:
            full = tensor.data  # detach() would share the version: a write into the full value would look like an edit
            # A full value wider than the original (fp64) stays wide: rounding it back would lose trained bits.
            full = full.to(torch.promote_types(full.dtype, torch.promote_types(dtype, torch.float32)))
            # Copied only if memory would be shared: `.data = ` leaves the old storage to us.
            full = full.clone() if tensor.dtype == dtype and full.dtype == dtype else full
            tensor.grad = None
            tensor.data = tensor.detach().to(dtype)
            if isinstance(tensor, nn.Parameter):
                # Half weights may hold an fp32 gradient for hooks; backward still writes half gradients.
                tensor.grad_dtype = None
            self.full_values[tensor] = FullValue(full.cpu(), tensor._version)

    def watch_loading(self, modules: Iterable[nn.Module]) -> None:
        """Registers hooks on ``modules`` so that loading a state dict also sets the fp32 values, with all their bits."""
        hook = _RefreshOnLoad(self.full_values)
        self.handles += [module.register_load_state_dict_pre_hook(hook) for module in modules]

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self.full_values

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """Returns the fp32 value of ``tensor``, on its current device; None if ``tensor`` was not converted."""
        full = self.full_values.get(tensor)
        if full is None:
            return None
        return (full.value if full.is_master else self.checked(tensor, full)).detach()

    @torch.no_grad()
    def master_of(self, parameter: Tensor) -> Tensor:
        """Returns the fp32 master of ``parameter``, created on first use; ``parameter`` itself if it was not converted."""
        full = self.full_values.get(parameter)
        if full is None:
            return parameter
        if not full.is_master:
            value = self.checked(parameter, full).to(parameter.device)
            # A clone, because the optimizer writes into it.
            full.value = nn.Parameter(value.clone(), requires_grad=parameter.requires_grad)
            full.is_master = True
            _PARAMETERS[full.value] = weakref.ref(parameter)
        return full.value

    @torch.no_grad()
    def refresh(self, tensors: Iterable[Tensor] | None = None) -> None:
        """Copies the converted tensors into their fp32 values: all, or only ``tensors``."""
        for tensor in self.full_values if tensors is None else tensors:
            full = self.full_values[tensor]
            full.value.copy_(tensor)
            full.version = tensor._version

    def in_state(self, module: nn.Module, state: StateDict, *, written: bool = True) -> StateDict:
        """Returns ``state`` with fp32 values instead of rounded ones; ``written`` False leaves out tensors written since."""
        result = copy.copy(state)
        look_up = self.value_of if written else self._unwritten
        for name, tensor in [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]:
            if name in result and (value := look_up(tensor)) is not None:
                result[name] = value
        return result

    def _unwritten(self, tensor: Tensor) -> Tensor | None:
        """Returns the fp32 value of a tensor that still equals its rounded value; None after the first difference."""
        full = self.full_values.get(tensor)
        if full is None or full.is_stale:
            return None
        # Version counters are not enough: kernels write through pointers.
        full.is_stale = not torch.equal(tensor.detach(), full.value.to(tensor.device, tensor.dtype))
        return None if full.is_stale else full.value

    def restore(self) -> None:
        """Puts the fp32 values back into the converted tensors and drops them; keeps changes made to the tensors since."""
        with torch.no_grad():
            for tensor, full in self.full_values.items():
                full.version = -1
                tensor.grad = None
                tensor.data = self.checked(tensor, full).detach().to(tensor.device)
                if isinstance(tensor, nn.Parameter):
                    tensor.grad_dtype = tensor.dtype
        self.full_values.clear()
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def checked(self, tensor: Tensor, full: FullValue) -> Tensor:
        """Returns the fp32 value of ``tensor``; if the tensor was written since, the value is first set to the tensor's."""
        if full.version != tensor._version:
            current = tensor.detach()
            if not torch.equal(current, full.value.to(current.device, current.dtype)):
                full.value.copy_(current)
            full.version = tensor._version
        return full.value


class _RefreshOnLoad:
    """A pre-hook for loading state dicts; its copy or pickle is empty, because a copied module has no masters."""

    def __init__(self, full: dict[Tensor, FullValue]) -> None:
        self._full = full

    def __reduce__(self) -> tuple[Any, ...]:
        return _RefreshOnLoad, ({},)

    @torch.no_grad()
    def __call__(self, module: nn.Module, state: StateDict, prefix: str, metadata: StateDict, *_: Any) -> None:
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in own:
            full, incoming = self._full.get(tensor), state.get(prefix + name)
            if full is None or not isinstance(incoming, Tensor):
                continue
            if metadata.get("assign_to_params_buffers", False):
                raise ConfigError(
                    f"load_state_dict(assign=True) would replace {prefix}{name}, which has fp32 master weights; "
                    "load without assign"
                )
            if incoming.shape == full.value.shape:
                full.value.copy_(incoming)
                full.is_stale = False


def adopt(masters: MasterWeights, optimizer: Optimizer) -> None:
    """Puts masters into the optimizer's own ``param_groups`` lists, and moves existing optimizer state to them in fp32."""
    for group in optimizer.param_groups:
        parameters = group["params"]
        for index, parameter in enumerate(parameters):
            if parameter in masters:
                # In place: schedulers hold the dicts, and LBFGS holds the list.
                master = parameters[index] = masters.master_of(parameter)
                if parameter in optimizer.state:
                    optimizer.state[master] = _widened(optimizer.state.pop(parameter), parameter)


def _widened(state: Any, parameter: Tensor) -> Any:
    return {
        key: value.float() if isinstance(value, Tensor) and value.dtype == parameter.dtype else value
        for key, value in state.items()
    }


def round_to(masters: list[Tensor], parameters: list[Tensor]) -> None:
    """Rounds each master into its half parameter."""
    pairs = [pair for pair in zip(masters, parameters, strict=True) if pair[0] is not pair[1]]
    ops.copy_cast([master for master, _ in pairs], [parameter for _, parameter in pairs])
