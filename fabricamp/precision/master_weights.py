"""The fp32 values behind a converted module: masters of what is trained, originals of the rest; nothing of them is lost."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from fabricamp import ops
from fabricamp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

__all__ = ["MasterWeights", "share_full_values"]

logger = logging.getLogger("fabricamp")

_known: WeakSet[MasterWeights] = WeakSet()


class _FullValue:
    """The fp32 value of a converted tensor.

    While only the half copy is used (frozen weights, buffers, levels without masters) it waits in host memory, and ``version``
    is the tensor's version at which both were last known to agree; ``is_stale`` is known of one that no longer agrees.
    """

    __slots__ = ("is_master", "is_stale", "value", "version")

    def __init__(self, value: Tensor, version: int) -> None:
        self.value = value
        self.version = version
        self.is_master = False
        self.is_stale = False


class MasterWeights:
    """Full values by converted parameter or buffer.  Conversion changes ``.data`` only: every tensor stays the object it was."""

    def __init__(self) -> None:
        self._full: dict[Tensor, _FullValue] = {}
        self._handles: list[RemovableHandle] = []
        self.has_taken = False
        """Whether a full value was taken from its half copy, which somebody had written into."""
        _known.add(self)

    def convert(self, tensors: Iterable[Tensor], dtype: torch.dtype) -> None:
        """Rounds ``tensors`` to ``dtype`` in place and keeps their full values."""
        for tensor in tensors:
            full = tensor.data  # detach() would share its version: writing into the full value would look like an edit
            # What is wider than it came in (fp64) stays so: rounded back it would not be what was trained.
            full = full.to(torch.promote_types(full.dtype, torch.promote_types(dtype, torch.float32)))
            # A copy only where memory is shared: `.data = ` leaves the old storage to us.
            full = full.clone() if tensor.dtype == dtype and full.dtype == dtype else full
            tensor.grad = None
            tensor.data = tensor.detach().to(dtype)
            if isinstance(tensor, nn.Parameter):
                # Half weights may hold the fp32 gradient that hooks look at; backward still fills in half.
                tensor.grad_dtype = None
            self._full[tensor] = _FullValue(full.cpu(), tensor._version)

    def watch_loading(self, modules: Iterable[nn.Module]) -> None:
        """Lets every way of loading a state dict into ``modules`` reach the full values, low bits included."""
        hook = _RefreshOnLoad(self._full)
        self._handles += [module.register_load_state_dict_pre_hook(hook) for module in modules]

    def watch_saving(self, modules: Iterable[nn.Module], *, exact: bool) -> None:
        """Lets every way of taking the state dict of ``modules`` give fp32: with ``exact`` full values, else widened ones."""
        hook = _FullOnSave(self if exact else MasterWeights())
        self._handles += [module.register_state_dict_post_hook(hook) for module in modules]

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._full

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """Returns the fp32 value behind ``tensor``, where it is; None where it was not converted."""
        full = self._full.get(tensor)
        if full is None:
            return None
        return (full.value if full.is_master else self._checked(tensor, full)).detach()

    @torch.no_grad()
    def edited(self) -> list[Tensor]:
        """Returns the half weights with masters that are no longer what these are rounded to.  The host waits once."""
        masters = [(tensor, full.value) for tensor, full in self._full.items() if full.is_master]
        differs = [(tensor != master.to(tensor)).any() for tensor, master in masters]
        flags = torch.stack([one.to(differs[0].device) for one in differs]).tolist() if differs else []
        return [tensor for (tensor, _), flag in zip(masters, flags, strict=True) if flag]

    @torch.no_grad()
    def take(self, tensors: Iterable[Tensor]) -> None:
        """Takes the full values of some converted tensors anew."""
        for tensor in tensors:
            full = self._full[tensor]
            full.value.copy_(tensor)
            full.version = tensor._version

    @torch.no_grad()
    def master_of(self, parameter: Tensor) -> Tensor:
        """Returns the fp32 parameter that is updated instead of ``parameter`` (itself where it was not converted)."""
        full = self._full.get(parameter)
        if full is None:
            return parameter
        if not full.is_master:
            value = self._checked(parameter, full).to(parameter.device)
            # Its memory is its own: an optimizer writes into it.
            full.value = nn.Parameter(value.clone(), requires_grad=parameter.requires_grad)
            full.is_master = True
        return full.value

    def refresh(self) -> None:
        """Takes all full values anew from the converted tensors."""
        self.take(self._full)

    def in_state(self, module: nn.Module, state: dict[str, Any], *, written: bool = True) -> dict[str, Any]:
        """Returns ``state`` with full values for rounded ones; without ``written`` only for what was not written into since."""
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
        """The full value behind a tensor that still is what it was rounded to; each is compared until it no longer is."""
        full = self._full.get(tensor)
        if full is None or full.is_stale:
            return None
        # Versions do not tell: kernels write through pointers.
        full.is_stale = not torch.equal(tensor.detach(), full.value.to(tensor.device, tensor.dtype))
        return None if full.is_stale else full.value

    def restore(self) -> None:
        """Puts the full values back into the converted tensors, except where these were changed since; forgets them."""
        with torch.no_grad():
            for tensor, full in self._full.items():
                full.version = -1
                tensor.grad = None
                tensor.data = self._checked(tensor, full).detach().to(tensor.device)
                if isinstance(tensor, nn.Parameter):
                    tensor.grad_dtype = tensor.dtype
        self._full.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _checked(self, tensor: Tensor, full: _FullValue) -> Tensor:
        """The full value of ``tensor``, which is its own widened where somebody wrote into it."""
        if full.version != tensor._version:
            current = tensor.detach()
            if not torch.equal(current, full.value.to(current.device, current.dtype)):
                full.value.copy_(current)
                self.has_taken = True
            full.version = tensor._version
        return full.value


@torch.no_grad()
def share_full_values(module: nn.Module, broadcast: Callable[[list[Tensor]], None]) -> None:
    """Lets ``broadcast``, which works in place and was just used on the tensors of ``module``, share what is behind them too.

    Without it ranks would keep full values of their own, and the fp32 values would differ in what half ones do not show.
    """
    tensors = [*module.parameters(), *module.buffers()]
    behind = [(tensor, full) for one in _known for tensor in tensors if (full := one._full.get(tensor)) is not None]
    values = [full.value.detach().to(tensor.device) for tensor, full in behind]
    if values:
        broadcast(values)
    for (tensor, full), value in zip(behind, values, strict=True):
        full.value.copy_(value)
        full.version = tensor._version


class _RefreshOnLoad:
    """A hook before loading; a copy or pickle of its module has no masters, so the hook's copy knows none."""

    def __init__(self, full: dict[Tensor, _FullValue]) -> None:
        self._full = full

    def __deepcopy__(self, memo: dict[int, Any]) -> _RefreshOnLoad:
        return _RefreshOnLoad({})

    def __reduce__(self) -> tuple[Any, ...]:
        return _RefreshOnLoad, ({},)

    @torch.no_grad()
    def __call__(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
    ) -> None:
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in own:
            full, incoming = self._full.get(tensor), state.get(prefix + name)
            if full is None or not isinstance(incoming, Tensor):
                continue
            if metadata.get("assign_to_params_buffers", False):
                raise ConfigError(
                    f"load_state_dict(assign=True) would replace {prefix}{name}, of which fp32 master weights are kept; "
                    "load without assign"
                )
            if incoming.shape == full.value.shape:
                full.value.copy_(incoming)
                full.is_stale = False


class _FullOnSave:
    """A hook on state dicts; a copy or pickle of its module has no full values, so the hook's copy knows none and widens."""

    def __init__(self, full: MasterWeights) -> None:
        self._full = full
        self._widened: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _FullOnSave:
        return _FullOnSave(MasterWeights())

    def __reduce__(self) -> tuple[Any, ...]:
        return _FullOnSave, (MasterWeights(),)

    @torch.no_grad()
    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            given = state.get(prefix + name)
            if given is None or given is tensor or tensor.dtype not in (torch.float16, torch.bfloat16):
                continue  # the tensor itself was asked for (keep_vars), or it is wide enough
            full = self._full.value_of(tensor)
            if full is None:
                self._tell_if_written()
                full = self._widened = given.float()
            state[prefix + name] = full.to(tensor.device)

    def _tell_if_written(self) -> None:
        """Says once that somebody, who averages weights most likely, wrote into what a state dict gave, which ends there."""
        if self._widened is not None and self._widened._version and not _told:
            _told.append(True)
            logger.warning(
                "fabricamp: the state dict of a half model has fp32 copies, and what was written into them does not reach the "
                "model; average the weights in a copy.deepcopy(model) of before the model became half"
            )


_told: list[bool] = []


def adopt(masters: MasterWeights, optimizer: Optimizer) -> None:
    """Puts masters into the optimizer's own ``param_groups`` lists and moves the state it has to them, fp32."""
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
    """Makes each half weight the rounded master again."""
    pairs = [pair for pair in zip(masters, parameters, strict=True) if pair[0] is not pair[1]]
    ops.copy_cast([master for master, _ in pairs], [parameter for _, parameter in pairs])
