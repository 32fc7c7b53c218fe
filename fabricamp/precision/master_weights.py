"""The fp32 values of a converted module: master weights of trained parameters, originals of the other tensors.

An optimizer with ``masters="remainder"`` has remainders in place of masters: 16 bits for each of its bf16 weights, which make the
fp32 value of it (:mod:`fabricamp.ops.remainders`).
"""

from __future__ import annotations

import contextlib
import copy
import operator
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from fabricamp import ops
from fabricamp.errors import ConfigError
from fabricamp.ops.remainders import DTYPE as REMAINDER
from fabricamp.ops.remainders import is_remainder, joined, part_into
from fabricamp.ops.uploads import is_capturing
from fabricamp.optimizers import FusedOptimizer
from fabricamp.precision.unseen_edits import UnseenEdits

if TYPE_CHECKING:
    from fabricamp._utils.types import StateDict

_version: Final = operator.attrgetter("_version")

_PARAMETERS: Final = WeakTensorKeyDictionary()
"""The module parameter of each master, for callers that only have the optimizer."""


def module_parameter(updated: Tensor) -> Tensor:
    """Returns the module's parameter of a tensor that an optimizer updates: the half parameter of an fp32 master."""
    parameter = _PARAMETERS.get(updated, lambda: None)()
    return updated if parameter is None else parameter


class FullValue:
    """The fp32 value of a converted tensor.

    While only the half copy is used (frozen weights, buffers, levels without masters), the value is kept in host memory.
    ``version`` is the tensor's version when both last agreed.  ``is_stale`` is set once they are known to differ.  With
    ``has_remainder``, ``value`` is no value but the remainder of the half weight.
    """

    __slots__ = ("has_remainder", "is_master", "is_stale", "value", "version")

    def __init__(self, value: Tensor, version: int) -> None:
        self.value = value
        self.version = version
        self.is_master = False
        self.has_remainder = False
        self.is_stale = False


class MasterWeights:
    """The fp32 values, by converted parameter or buffer.  Conversion changes ``.data`` only: every tensor stays the same object.

    Programs edit half weights in place (clipping, projections) and masters (by ``param_groups``).  Both are found by version
    counters; :meth:`note` says after each update that its own writes are no edits.  Who writes values with a remainder writes both
    tensors; a half weight alone is refused, since which of its elements were edited is not known.
    """

    def __init__(self) -> None:
        self.full_values: dict[Tensor, FullValue] = {}
        self.handles: list[RemovableHandle] = []
        self._halves: list[Tensor] = []
        """The parameters with masters, or with remainders."""
        self._masters: list[Tensor] = []
        """Their masters, or remainders."""
        self._half_versions: list[int] = []
        self._master_versions: list[int] = []
        self._half_sum = 0
        """Counters only grow, so an equal sum means that none has moved."""
        self._master_sum = 0
        self._moved = 0
        """How much the counters of all half weights have moved since ``_half_versions``, by updates."""
        self.module: nn.Module | None = None
        """The converted module, for messages."""
        self._unseen = UnseenEdits()

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state without what belongs to a fit that is under way."""
        return {**self.__dict__, "module": None, "_unseen": UnseenEdits()}

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
        if full.has_remainder:
            return joined(tensor, full.value).cpu()  # a save must not need memory of a GPU for all masters
        return (full.value if full.is_master else self.checked(tensor, full)).detach()

    @torch.no_grad()
    def master_of(self, parameter: Tensor) -> Tensor:
        """Returns the fp32 master of ``parameter``, created on first use; ``parameter`` itself if it was not converted."""
        full = self.full_values.get(parameter)
        if full is None:
            return parameter
        self._check_kind(full, remainder=False)
        if not full.is_master:
            value = self.checked(parameter, full).to(parameter.device)
            # A clone, because the optimizer writes into it.
            full.value = nn.Parameter(value.clone(), requires_grad=parameter.requires_grad)
            full.is_master = True
            _PARAMETERS[full.value] = weakref.ref(parameter)
            self._watch(parameter, full.value)
        return full.value

    @torch.no_grad()
    def remainder_of(self, parameter: Tensor) -> Tensor:
        """Returns the remainder of a converted bf16 ``parameter``, created on first use: the parameter is then rounded ties up."""
        full = self.full_values[parameter]
        self._check_kind(full, remainder=True)
        if not full.has_remainder:
            value = self.checked(parameter, full).to(parameter.device, torch.float32)
            full.value = torch.zeros_like(parameter, dtype=REMAINDER, memory_format=torch.preserve_format)
            part_into(value, parameter, full.value)
            full.has_remainder = True
            self._watch(parameter, full.value)
        return full.value

    @staticmethod
    def _check_kind(full: FullValue, *, remainder: bool) -> None:
        if full.is_master if remainder else full.has_remainder:
            raise ConfigError(
                "two optimizers update the same half weight, one with masters='remainder' and one with an fp32 master; give both "
                "the same masters"
            )

    def _watch(self, half: Tensor, master: Tensor) -> None:
        self._halves.append(half)
        self._masters.append(master)
        self._half_versions.append(half._version - self._moved)
        self._master_versions.append(master._version)
        self._half_sum += half._version
        self._master_sum += master._version

    # -- edits -------------------------------------------------------------------------------------------------------------------

    def note(self) -> None:
        """Notes that half weights and masters agree: what was written until now is no edit."""
        self._moved = 0
        self._half_versions = list(map(_version, self._halves))
        self._master_versions = list(map(_version, self._masters))
        self._half_sum = sum(self._half_versions)
        self._master_sum = sum(self._master_versions)

    def note_update(self, only: bool, complete: bool, by_kernels: bool) -> None:
        """Notes that an update has written, which is no edit.

        ``only``: the fit has no other optimizer.  ``complete``: each of its parameters had a gradient.
        """
        if not (only and complete):
            self.round_edits()  # the update has rounded no master without a gradient
        elif by_kernels:
            # Each kernel moves the counter of a half weight by one, and no other: they need not be read.
            self._moved += 1
            self._half_sum += len(self._halves)
            return
        self.note()

    def take_edits(self) -> None:
        """Lets the masters of edited half weights take the elements that were changed, before an update; waits for nothing.

        Where both were edited the masters count, and are rounded into the half weights.  Raises :class:`ConfigError` for an edited
        half weight with a remainder.
        """
        if sum(map(_version, self._halves)) != self._half_sum:
            for half, master in self._edited_halves():
                if is_remainder(master):
                    raise self._edit_refused(half)
                take_changed(half, master)
            self.round_edits()
            self.note()

    def settle(self) -> None:
        """Brings half weights and masters to agree again, whichever were edited."""
        # Asked here too, since nearly every replay ends here: each call costs as much as the sum over a few layers.
        if sum(map(_version, self._masters)) != self._master_sum:
            self.round_edits()
        if sum(map(_version, self._halves)) != self._half_sum:
            self.take_edits()

    def round_edits(self) -> None:
        """Rounds edited masters into the half weights, before a forward reads these."""
        if sum(map(_version, self._masters)) == self._master_sum:
            return
        edited = [
            index
            for index, (master, version) in enumerate(zip(self._masters, self._master_versions, strict=True))
            if master._version != version
        ]
        # Of a weight with a remainder nothing is rounded: who writes its value writes both.
        round_to([self._masters[index] for index in edited], [self._halves[index] for index in edited])
        for index in edited:
            self._master_versions[index] = self._masters[index]._version
            self._half_versions[index] = self._halves[index]._version - self._moved
        self._half_sum = sum(self._half_versions) + self._moved * len(self._halves)
        self._master_sum = sum(self._master_versions)

    def _edited_halves(self) -> list[tuple[Tensor, Tensor]]:
        """Returns the half weights that were written since both agreed, with their masters, which were not."""
        versions = zip(self._half_versions, self._master_versions, strict=True)
        return [
            (half, master)
            for half, master, (half_version, master_version) in zip(self._halves, self._masters, versions, strict=True)
            if half._version != half_version + self._moved and master._version == master_version
        ]

    @torch.no_grad()
    def look_for_unseen_edits(self) -> None:
        """Compares half weights with their masters, which agree unless an edit moved no version counter.

        Raises :class:`ConfigError` if they differ: at once on a CPU, else in a later call, when the device has compared them.
        """
        if not self._halves or is_capturing(self._halves[0].device):
            return
        self._refuse_unseen_edit()
        masters = [index for index, master in enumerate(self._masters) if not is_remainder(master)]
        if masters:
            self._unseen.begin([self._halves[index] for index in masters], [self._masters[index] for index in masters])
            self._refuse_unseen_edit()

    def _refuse_unseen_edit(self) -> None:
        index = self._unseen.found()
        if index is None:
            return
        compared = [half for half, master in zip(self._halves, self._masters, strict=True) if not is_remainder(master)]
        raise ConfigError(
            f"the half weight {self._name_of(compared[index])!r} differs from its rounded fp32 master, by an edit that no version "
            "counter shows (through .data, or by a kernel), and updates drop such edits; edit under torch.no_grad() without .data, "
            "or the fp32 values in `with self.trainer.precision_plugin.fp32_values(self)`, or call "
            "self.trainer.precision_plugin.refresh_masters() after each"
        )

    def _name_of(self, half: Tensor) -> str:
        named = () if self.module is None else self.module.named_parameters()
        return next((name for name, parameter in named if parameter is half), "of a module")

    def _edit_refused(self, half: Tensor) -> ConfigError:
        return ConfigError(
            f"the half weight {self._name_of(half)!r} was edited in place, and with masters='remainder' an edit has to reach its "
            "other 16 bits too; edit the fp32 values in `with self.trainer.precision_plugin.fp32_values(self)`, or call "
            "self.trainer.precision_plugin.refresh_masters() after the edit, which takes the whole weight as it is, rounded to bf16"
        )

    def _drop_remainders(self) -> None:
        """Makes each edited half weight with a remainder its own fp32 value."""
        for _, master in self._edited_halves():
            if is_remainder(master):
                master.zero_()  # moves its counter: both tensors were written

    @torch.no_grad()
    def refresh(self) -> None:
        """Takes every element that was changed in a converted tensor into its fp32 value, also what no version counter shows.

        Of weights with remainders it takes those that a counter shows, whole.
        """
        self._drop_remainders()
        self.round_edits()
        for tensor, full in self.full_values.items():
            if full.has_remainder:
                continue
            full.version = -1
            self.checked(tensor, full)
        self.note()

    @contextlib.contextmanager
    def editable(self, module: nn.Module) -> Iterator[dict[str, Tensor]]:
        """Yields the fp32 values of the parameters of ``module`` by name, and rounds them into half weights at the end."""
        self.settle()
        values: dict[str, Tensor] = {}
        copies: list[tuple[Tensor, FullValue, Tensor]] = []
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for name, parameter in module.named_parameters():
            full = self.full_values.get(parameter)
            if full is None:
                values[name] = parameter
            elif full.is_master:
                values[name] = full.value
            elif full.has_remainder:
                values[name] = joined(parameter, full.value)
                parts.append((values[name], parameter, full.value))
            else:
                values[name] = self.checked(parameter, full).to(parameter.device, copy=True)
                copies.append((parameter, full, values[name]))
        with torch.no_grad():
            try:
                yield values
            finally:
                # All masters: an edit through their .data moves no version counter.
                round_to(self._masters, self._halves)
                for value, half, remainder in parts:
                    part_into(value, half, remainder)
                for tensor, full, value in copies:
                    tensor.copy_(value)
                    full.value.copy_(value)
                    full.version = tensor._version
                self.note()

    def in_state(self, module: nn.Module, state: StateDict, *, written: bool = True) -> StateDict:
        """Returns ``state`` with fp32 values instead of rounded ones; ``written`` False leaves out tensors written since."""
        result = copy.copy(state)
        edited = {half: master for half, master in self._edited_halves() if written}

        def look_up(tensor: Tensor) -> Tensor | None:
            if not written:
                return self._unwritten(tensor)
            if tensor in edited and is_remainder(edited[tensor]):
                return tensor.detach().float()
            if tensor in edited:
                # A copy: an edit that is taken back before the next update (averages in a validation) leaves the master as it is.
                return with_changed(tensor.detach(), edited[tensor].detach())
            return self.value_of(tensor)

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
        self._drop_remainders()
        self.settle()
        self._halves.clear()
        self._masters.clear()
        with torch.no_grad():
            for tensor, full in self.full_values.items():
                full.version = -1  # version counters do not show all edits
                tensor.grad = None
                if full.has_remainder:
                    tensor.data = joined(tensor, full.value)
                    del full.value  # whole modules may not fit twice
                else:
                    tensor.data = self.checked(tensor, full).detach().to(tensor.device)
                if isinstance(tensor, nn.Parameter):
                    tensor.grad_dtype = tensor.dtype
        self.full_values.clear()
        self._unseen = UnseenEdits()
        self.module = None
        self.note()
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def checked(self, tensor: Tensor, full: FullValue) -> Tensor:
        """Returns the fp32 value of ``tensor``; if the tensor was written since, the value is first set to the tensor's.

        A master takes the elements that differ alone.
        """
        if full.version != tensor._version:
            current = tensor.detach()
            if full.is_master:
                take_changed(current, full.value)
            elif not torch.equal(current, full.value.to(current.device, current.dtype)):
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
            if incoming.shape != full.value.shape:
                continue
            if full.has_remainder:
                value = incoming.detach().to(tensor.device, torch.float32)
                part_into(value, tensor, full.value)
                state[prefix + name] = tensor.detach().clone()  # what is loaded next: it would round ties to even
            else:
                full.value.copy_(incoming)
                full.is_stale = False


def adopt(masters: MasterWeights, optimizer: Optimizer) -> None:
    """Puts masters into the optimizer's own ``param_groups`` lists, and moves existing optimizer state to them in fp32.

    An optimizer with ``masters="remainder"`` keeps bf16 weights there, and gets their remainders.
    """
    remainders: dict[Tensor, Tensor] = {}
    for group in optimizer.param_groups:
        parameters = group["params"]
        for index, parameter in enumerate(parameters):
            if parameter not in masters:
                continue
            if _keeps_remainders(optimizer) and parameter.dtype is torch.bfloat16:
                remainders[parameter] = masters.remainder_of(parameter)
            else:
                # In place: schedulers hold the dicts, and LBFGS holds the list.
                master = parameters[index] = masters.master_of(parameter)
                if isinstance(optimizer, FusedOptimizer) and optimizer.names is not None:
                    optimizer.names.setdefault(master, optimizer.names.get(parameter, ""))
                if parameter in optimizer.state:
                    optimizer.state[master] = _widened(optimizer.state.pop(parameter), parameter)
    if remainders and isinstance(optimizer, FusedOptimizer):
        optimizer.remainders = remainders


def _keeps_remainders(optimizer: Optimizer) -> bool:
    return isinstance(optimizer, FusedOptimizer) and optimizer.masters == "remainder"


def _widened(state: Any, parameter: Tensor) -> Any:
    return {
        key: value.float() if isinstance(value, Tensor) and value.dtype == parameter.dtype else value
        for key, value in state.items()
    }


def with_changed(half: Tensor, full: Tensor) -> Tensor:
    """Returns ``full`` with the elements of ``half`` that differ from the rounded ``full``."""
    half = half.to(full.device)
    return torch.where(full.to(half.dtype) == half, full, half.to(full.dtype))


@torch.no_grad()
def take_changed(half: Tensor, full: Tensor) -> None:
    """Writes the elements of ``half`` that differ from the rounded ``full`` into ``full``; the others keep their bits."""
    full.copy_(with_changed(half, full))


def round_to(masters: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    """Rounds each master into its half parameter, unless it is the parameter itself, or in place of a master the remainder."""
    pairs = [
        pair for pair in zip(masters, parameters, strict=True) if pair[0] is not pair[1] and not is_remainder(pair[0])
    ]
    ops.copy_cast([master for master, _ in pairs], [parameter for _, parameter in pairs])
