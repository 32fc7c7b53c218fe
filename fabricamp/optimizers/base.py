"""The base of the fused optimizers: rows of tensors laid out once, one launch per step, a step that a Precision can control.

In order: :class:`FusedOptimizer`, the check of its options, what torch's GradScaler hands over for a step, torch's hooks of a step,
and the state that counts its changes.
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import required

from fabricamp import ops
from fabricamp._utils.keywords import NamesKeywords
from fabricamp.arguments.checks import check_choice
from fabricamp.errors import ConfigError
from fabricamp.ops import codes
from fabricamp.ops.draws import Source, key_of
from fabricamp.ops.shards import SharedRows, any_shard, first_element, local, local_gradient
from fabricamp.ops.table import Table
from fabricamp.ops.uploads import is_capturing
from fabricamp.optimizers import refusals
from fabricamp.optimizers.refusals import UnsupportedError, owned_parameters
from fabricamp.optimizers.rows import LAST, DeviceParams, GroupScalars, RowsCacheKey, zero_gradients
from fabricamp.optimizers.state_dicts import as_cell, keep_as, keep_loaded, load_into, load_state, name_of_scales
from fabricamp.torch_private import global_optimizer_post_hooks, global_optimizer_pre_hooks, profiler_enabled

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

    from fabricamp._utils.types import Closure, ParamGroup, StateDict

KEEPING: Final = ("masters", "state_format", "seed")
"""The options of an optimizer that keeps masters and states in several ways."""
_grad: Final = operator.attrgetter("grad")
_params: Final = operator.itemgetter("params")


class FusedOptimizer(NamesKeywords, Optimizer):
    """A ``torch.optim.Optimizer`` whose step is one pass over memory.

    A subclass sets the class attribute ``rule`` (a rule names the state tensors and has a kernel and a reference), and returns
    the rule of one group in :meth:`_rule`.  State is fp32 for half and fp32 parameters, fp64 for fp64 parameters.

    By itself, ``step()`` reads each ``.grad``.  A Precision controls the step instead::

        optimizer.gather(gradients, copies)              # sets the memory to use; nothing is copied, nothing waits
        statistics = optimizer.statistics(scale)         # first launch
        ops.finish(state, statistics, scale=scale)       # second launch
        optimizer.steer(state)                           # the next step reads multiplier and found_inf from ``state``
        optimizer.step()                                 # third launch

    Under torch's GradScaler, too, a step reads ``found_inf`` and ``grad_scale`` on the device.

    A step can be captured in a CUDA graph after one step outside of it; eager steps and replays may alternate.  ``upload()``
    before a replay uploads changed numbers (lr and the other options of a group).  A graph keeps using the memory of its capture:
    ``load_state_dict`` then writes into the existing state tensors, and a step that would need other rows raises until
    :meth:`forget` is called.
    """

    rule: ClassVar[type[ops.Rule]]
    options: ClassVar[tuple[str, ...]] = ("set_grad_none", "master_weights")
    """Names of attributes that are kept in a copy or pickle of the optimizer."""
    reads_scale: ClassVar[bool] = False
    """Whether ``step`` reads the loss scale of its statistics again; the scale must then not be updated before the step."""
    _step_supports_amp_scaling = True  # torch's GradScaler then passes found_inf instead of reading it

    set_grad_none = True
    master_weights = False
    masters = "fp32"
    """How a Precision keeps masters of half weights: "fp32", or "remainder" (see :class:`FusedAdam`)."""
    remainders: Mapping[Tensor, Tensor] = MappingProxyType({})
    """For each bf16 parameter the bits that it lacks (int16), which a step updates too: set by a Precision."""
    state_format = "fp32"
    """How states with the parameter's shape are kept: "fp32", "bf16" or "8bit" (see :class:`FusedAdam`)."""
    names: MutableMapping[Tensor, str] | None = None
    """The parameters' names in the module, which with ``seed`` choose the bits of stochastic rounding; None: their numbers here."""
    seed = 0
    wide_names: frozenset[str] = frozenset()
    """Names of the parameters of embeddings and norms, whose states "8bit" keeps in fp32."""
    _parts: list[DeviceParams] | None = None  # the rows, one part per device; None: the next step builds them
    _rows_key: RowsCacheKey | None = None
    _copies: Sequence[Tensor | None] | None = None
    _flags: Sequence[Tensor | None] | None = None
    _explicit = False  # whether the last gradients were given to gather()
    _grad_of: Callable[[Tensor], Tensor | None] = _grad
    _steering: ops.Steering | None = None  # of the next step; None: the step is not controlled by a Precision
    after_update: Callable[[bool, bool], object] | None = None
    """Called at the end of an update, before the hooks of the step: whether all parameters had a gradient, and kernels ran."""
    leaves_gradients = False
    """Whether the Precision's update leaves in ``.grad`` what it has used, unscaled and clipped: set while hooks may look there."""
    _own_state: ops.StepState | None = None
    _watched: WatchedState | None = None  # the state whose tensors the rows hold, and the count of its changes then
    _changes = 0
    _scalars: GroupScalars  # made with the rows
    _option_values: Callable[[FusedOptimizer], tuple[object, ...]]

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        # With the package's own names first: for a single name attrgetter would return a value in place of a tuple.
        cls._option_values = operator.attrgetter(*dict.fromkeys((*FusedOptimizer.options, *cls.options)))

    def __init__(self, params: ParamsT, defaults: ParamGroup) -> None:
        _check(type(self).__name__, params, defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Adds a group of parameters; also possible during training."""
        if isinstance(param_group, dict):
            _check(type(self).__name__, (), param_group)
        super().add_param_group(param_group)
        self._rows_key = None
        parameters = owned_parameters(self)
        refusals.refuse_unreadable(self, parameters, "parameter")
        if any_shard(parameters):
            self._grad_of = local_gradient

    def _patch_step_function(self) -> None:
        let_hooks_idle(type(self))
        super()._patch_step_function()

    # -- what a subclass writes ------------------------------------------------------------------------------------------------

    def _rule(self, group: ParamGroup) -> ops.Rule:
        """Returns the update rule of the rows of ``group``."""
        raise NotImplementedError

    def _before_rows(self) -> None:
        """Runs before the rows of a step are checked, for a subclass with rows that depend on more; does nothing here."""

    def _measure(self, steering: ops.Steering) -> Mapping[torch.device, Tensor]:
        """Returns the norm of all gradients on each device if the rule needs it, else an empty mapping."""
        return {}

    # -- a step: gather, statistics, steer, step ---------------------------------------------------------------------------------

    def gather(
        self,
        gradients: Sequence[Tensor | None] | None = None,
        copies: Sequence[Tensor | None] | None = LAST,
        flags: Sequence[Tensor | None] | None = LAST,
        *,
        parameters: Sequence[Tensor] | None = None,
    ) -> None:
        """Sets the tensors that the next step reads and writes, one entry per parameter in the order of ``param_groups``.

        ``gradients``: None takes each parameter's ``.grad``; the same tuple as in the last call is assumed to be the same memory.
        The caller keeps them until the step has been launched, which reads them by their addresses.
        ``copies``: tensors into which the step also writes the rounded parameters.  ``flags``: fp32 numbers in device memory; the
        step skips a parameter if its flag is 0.  Pass the same list of ``copies`` and of ``flags`` each time; a list that is left
        out is that of the last call.  ``parameters``: those of ``param_groups``, from a caller that has just read them; the tuple
        of the last call is not compared one by one.

        Raises UnsupportedError if the rows of a captured step would have to be rebuilt, or if the first step is in a capture.
        """
        # Called only if overridden, as _measure below: a Python call less in nearly every step.
        if type(self)._before_rows is not FusedOptimizer._before_rows:
            self._before_rows()
        if copies is LAST:
            copies = self._copies
        if flags is LAST:
            flags = self._flags
        groups = self.param_groups
        if parameters is None:
            parameters = groups[0]["params"] if len(groups) == 1 else list(chain.from_iterable(map(_params, groups)))
        explicit = gradients is not None
        if gradients is None:
            gradients = list(map(self._grad_of, parameters))
        parts = self._parts
        key = self._rows_key
        state = self._watched
        if parts is None or key is None or state is None or not key.holds(parameters, gradients, copies, flags):
            valid = False
        elif self.state is state and state.changes.count == self._changes:
            valid = True
        else:  # the state was written to, maybe with the same tensors
            valid = self._holds_state(parts, parameters)
        if parts is None or not valid:
            refusals.refuse_rebuild(self, parts, parameters)
            parts = self._build(parameters, gradients, copies, flags)
            self._parts = parts
            self._rows_key = RowsCacheKey(parameters, parts, copies, flags)
            self._scalars = GroupScalars(type(self)._rule, self.rule)
            self._copies = copies
            self._flags = flags
            self._watch()
        for part in parts:
            try:
                # Gradients of another source may have the same addresses and other dtypes.
                own = gradients if len(gradients) == len(part.indices) else part.take(gradients)
                if part.table is None:
                    part.refresh(own)
                else:
                    part.table.refresh(own, trust=explicit == self._explicit)
            except (RuntimeError, ValueError):  # a sparse gradient has no address, a wrapper has address 0
                refusals.refuse_unreadable(self, gradients, "gradient")
                raise
        self._scalars.upload(parts, self._rule, self.param_groups, self._option_values(self))
        self._explicit = explicit

    def _holds_state(self, parts: Sequence[DeviceParams], parameters: Sequence[Tensor]) -> bool:
        """Whether the rows still hold the tensors of the state, after the state was changed."""
        state = self.state
        names = (*self.rule.states, *self.rule.cells, *self._names_beside)
        for part in parts:
            for row, index in enumerate(part.indices):
                entry = state.get(parameters[index]) or {}
                updated = local(entry.get("master_param", parameters[index]))
                if not part.has(row, updated, [local(entry.get(name)) for name in names]):
                    return False
        self._watch()
        return True

    def _watch(self) -> None:
        """Makes the state count the writes to it from now on."""
        self._watched = watched(self.state)
        self.state = self._watched
        self._changes = self._watched.changes.count

    def _build(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        copies: Sequence[Tensor | None] | None,
        flags: Sequence[Tensor | None] | None,
    ) -> list[DeviceParams]:
        """Returns the rows of each device: one row for each parameter that has a gradient or state."""
        refusals.refuse_unreadable(self, parameters, "parameter")
        refusals.refuse_unreadable(self, gradients, "gradient")
        refusals.refuse_without_remainders(self, parameters)
        indices_of: dict[torch.device, list[int]] = {}
        for index, parameter in enumerate(parameters):
            if gradients[index] is not None or self.state.get(parameter):
                self._fill_state(parameter)
                refusals.refuse_state(self, parameter, index, (*self.rule.states, "master_param"))
                indices_of.setdefault(parameter.device, []).append(index)
        groups = [number for number, group in enumerate(self.param_groups) for _ in group["params"]]
        parts = []
        for device, indices in indices_of.items():
            entries = [self.state[parameters[index]] for index in indices]
            updated: list[Tensor] = []
            rounded: list[Tensor | None] = []
            for index, entry in zip(indices, entries, strict=True):
                master = entry.get("master_param")
                remainder = self.remainders.get(parameters[index])
                if remainder is not None:
                    updated.append(parameters[index])
                    rounded.append(remainder)
                elif master is not None:  # the optimizer's own master is updated, and the parameter is its half copy
                    updated.append(local(master))
                    rounded.append(local(parameters[index]))
                else:
                    updated.append(local(parameters[index]))
                    rounded.append(None if copies is None else local(copies[index]))
            part = DeviceParams(
                device,
                indices,
                [groups[index] for index in indices],
                parameters=updated,
                states=[[local(entry[name]) for entry in entries] for name in self.rule.states],
                cells=[[entry[name] for entry in entries] for name in self.rule.cells],
                copies=rounded,
                flags=None if flags is None else [flags[index] for index in indices],
                shared=SharedRows.of([parameters[index] for index in indices]),
                sources=self._sources_of(parameters, indices),
                counts=[entry["step"] for entry in entries] if self._counts_steps else None,
                scales=[[local(entry.get(name)) for entry in entries] for name in self._scale_names],
            )
            parts.append(part)
        return parts

    def _sources_of(self, parameters: Sequence[Tensor], indices: Sequence[int]) -> list[Source] | None:
        """Returns where the bits come from that round the states of these parameters; None for states that need none."""
        if self.state_format != "bf16":
            return None
        given = [name for group in self.param_groups for name in group.get("param_names", ())]
        own = given if len(given) == len(parameters) else list(map(str, range(len(parameters))))
        names = self.names or {}
        return [
            Source(key_of(names.get(parameters[index], own[index]), self.seed), first_element(parameters[index]))
            for index in indices
        ]

    def _keep(self, masters: str, state: str, *, own_masters: bool = False) -> None:
        """Checks and sets how masters and states are kept; ``own_masters``: the optimizer has fp32 masters in its state."""
        check_choice("state", state, ("fp32", "bf16", "8bit"))
        refusals.check_masters(type(self).__name__, masters, own=own_masters)
        self.masters = masters
        self.state_format = state

    @property
    def _counts_steps(self) -> bool:
        """Whether the state has a number of steps for the bits of stochastic rounding alone."""
        return self.state_format == "bf16" and "step" not in self.rule.cells

    @property
    def _names_beside(self) -> list[str]:
        """The names of what the state has beside the rule's states and cells."""
        return ["step", *self._scale_names] if self._counts_steps else self._scale_names

    @property
    def _scale_names(self) -> list[str]:
        """The names of the scales of states that are codes; empty if no state may be."""
        return list(map(name_of_scales, self.rule.states)) if self.state_format == "8bit" else []

    def _kept(self, parameter: Tensor) -> torch.dtype:
        """Returns the dtype of the states of ``parameter``."""
        wide = torch.promote_types(parameter.dtype, torch.float32)
        if wide is not torch.float32 or self.state_format == "fp32":
            return wide
        if self.state_format == "bf16":
            return torch.bfloat16
        named = self.names is not None and self.names.get(parameter) in self.wide_names
        return codes.DTYPE if codes.fits(parameter) and not named else wide

    def _fill_state(self, parameter: Tensor) -> None:
        """Creates the missing state tensors of a parameter, and those that are kept otherwise here."""
        if not parameter.is_floating_point():
            raise UnsupportedError(
                f"{type(self).__name__} got a parameter of {parameter.dtype}; it updates fp32, fp16, bf16 and fp64"
            )
        state = self.state[parameter]
        wide = torch.promote_types(parameter.dtype, torch.float32)
        kept = self._kept(parameter)
        for name in self.rule.states:
            if name not in state:
                state[name] = torch.zeros_like(parameter, dtype=kept, memory_format=torch.preserve_format)
                if kept is codes.DTYPE:
                    state[name_of_scales(name)] = codes.scales_for(parameter)
            else:
                keep_as(kept, state, name, parameter, squares=name in self.rule.squares)
        for name in self.rule.cells:
            dtype = wide if name in self.rule.wide_cells else torch.float32
            state[name] = as_cell(state.get(name, 0.0), dtype, parameter.device)
        if self._counts_steps:
            state["step"] = as_cell(state.get("step", 0.0), torch.float32, parameter.device)
        elif "step" not in self.rule.cells:
            state.pop("step", None)
        if self.master_weights and wide != parameter.dtype and "master_param" not in state:
            state["master_param"] = parameter.detach().to(wide)

    def statistics(self, scale: Tensor, divisor: float = 1.0) -> Tensor:
        """Returns the input of ``ops.finish``: sums of squares of the gathered gradients divided by ``scale * divisor``.

        For sharded parameters these are the sums over full gradients: a collective of the ranks that hold the shards.
        """
        parts = self._parts
        if not parts:
            return torch.zeros(1, dtype=torch.float32, device=scale.device)
        if len(parts) == 1:  # all parameters are on one device
            return parts[0].statistics(scale, divisor)
        return torch.cat([part.statistics(scale, divisor).to(scale.device) for part in parts])

    def parameter_of_statistic(self, index: int) -> Tensor:
        """Returns the parameter whose gradient entry ``index`` of the last :meth:`statistics` belongs to."""
        for part in self._parts or ():
            if index < part.entries:
                parameter: Tensor = owned_parameters(self)[part.index_of_statistic(index)]
                return parameter
            index -= part.entries
        raise IndexError(index)

    def steer(self, state: ops.StepState | None, *, limit: float | None = None, skips: bool = True) -> None:
        """Makes the next step use the gradients of :meth:`gather`, times ``state.multiplier``, each value clamped to +-``limit``.

        The step changes nothing if ``state.found_inf`` is set, unless ``skips`` is False.
        """
        self._steering = ops.Steering(state, limit, skips)

    def step(self, closure: Closure | None = None) -> Any:
        """Updates the parameters that have a gradient; returns what ``closure`` (forward and backward) returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.is_grad_enabled():
            with torch.no_grad():
                self._update()
        else:  # a Precision has turned gradients off; the check is cheaper than no_grad()
            self._update()
        return loss

    def _update(self) -> None:
        steering = self._steering
        self._steering = None
        scaler_state = None
        if steering is None:
            scaler_state = from_grad_scaler(self, self._own_state)
            self._own_state = scaler_state or self._own_state
            steering = ops.Steering(scaler_state)
            self.gather(None, None, None)
        else:
            for part in self._parts or ():
                if is_capturing(part.device) and not part.holds_captured:
                    raise refusals.rows_of_eager_steps(self)
        measures = type(self)._measure is not FusedOptimizer._measure
        norms = self._measure(steering) if measures else {}
        updated = 0
        by_kernels = True
        for part in self._parts or ():
            own = steering
            if norms:
                own = own._replace(norm=norms.get(part.device))
            if own.state is not None and own.state.words.device != part.device:
                own = own._replace(state=own.state.seen_from(part.device))
            if part.table is not None:
                self.rule.launch(part.table, own)
                part.mark_written(part.table)
                updated += len(part.indices if part.table.present is None else part.table.present)
            else:
                by_kernels = False
                for number, rule in enumerate(self._scalars.rules):
                    rows = part.of_group(number)
                    rule.reference(rows, own)
                    updated += len(rows.parameters)
            part.release()
        if scaler_state is not None and getattr(self, "grad_scale", None) is not None:
            self._unscale_gradients(scaler_state)
        if self.after_update is not None and self._rows_key is not None:
            self.after_update(updated == self._rows_key.count, by_kernels)

    def _unscale_gradients(self, state: ops.StepState) -> None:
        """Unscales ``.grad`` after a step that torch's GradScaler did not skip, as torch's fused optimizers do.

        Unscaling comes after the update, because the update multiplies half gradients in full precision, without rounding them.
        """
        factor = torch.where(state.found_inf == 0, state.multiplier, 1.0)
        gradients = [gradient for gradient in map(self._grad_of, owned_parameters(self)) if gradient is not None]
        for device in {part.device for part in self._parts or ()}:
            own = [gradient for gradient in gradients if gradient.device == device]
            ops.scale(own, own, factor.to(device, non_blocking=True))

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Sets the gradients to None, or to zero; ``set_to_none=None`` takes the constructor's ``set_grad_none``."""
        if set_to_none is None:
            set_to_none = self.set_grad_none
        if set_to_none:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        else:
            zero_gradients(owned_parameters(self))

    # -- for graphs and a Precision ----------------------------------------------------------------------------------------------

    def upload(self) -> bool:
        """Uploads changed numbers (lr and its like) before a replay; returns whether nothing else has changed.

        The rest of :meth:`gather` is for gradients at new addresses; those of a graph do not move.  The memory of copies is not
        compared: they are weights of a module, and the graph of a module's step compares these itself.
        """
        if type(self)._before_rows is not FusedOptimizer._before_rows:
            self._before_rows()
        parts = self._parts
        state = self._watched
        if parts is None or self._rows_key is None or state is None:
            return False
        if self.state is not state or state.changes.count != self._changes:
            return False
        if not self._rows_key.are_parameters(list(chain.from_iterable(map(_params, self.param_groups)))):
            return False  # a parameter was put into a group, taken out of it, or given other memory
        self._scalars.upload(parts, self._rule, self.param_groups, self._option_values(self))
        return True

    def numbers(self, groups: Sequence[ParamGroup]) -> list[float | Tensor]:
        """Returns the numbers that a step reads from ``groups`` (like ``param_groups``), in the order of the tables' scalars."""
        return [number for group in groups for number in self._rule(group).scalars()]

    @property
    def tables(self) -> list[Table]:
        """The tables that a step's kernels work on, one per device; empty where the torch references run."""
        return [part.table for part in self._parts or () if part.table is not None]

    @property
    def device_rows(self) -> Sequence[DeviceParams]:
        """The rows of each device; empty before the first step."""
        return self._parts or ()

    def own_state(self, device: torch.device) -> ops.StepState:
        """Returns the optimizer's own step state, for steps without a loss scaler; its scale is 1."""
        if self._own_state is None or self._own_state.words.device != device:
            self._own_state = ops.StepState.on(device)
        return self._own_state

    def forget(self) -> None:
        """Makes the next step rebuild its rows; graphs that captured a step must not be replayed afterwards.

        After replacing a tensor of the state, this call is not needed.
        """
        self._parts = None

    # -- state -----------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Returns groups and state in plain dicts; as in torch, the tensors are the optimizer's own, not copies."""
        state_dict: StateDict = super().state_dict()
        entries = state_dict["state"].items()
        plain = {key: dict(entry) if isinstance(entry, ParameterState) else entry for key, entry in entries}
        return {**state_dict, "state": plain}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads a state of this optimizer, of torch's optimizer of the same rule, or of apex's; never casts state to half."""
        # A graph keeps using the tensors of its capture: the values go into those.
        captured = self.state if any(part.captured for part in self._parts or ()) else None
        rule = self.rule
        narrow_cells = [name for name in rule.cells if name not in rule.wide_cells]
        load_state(self, super().load_state_dict, state_dict, rule.states, rule.cells, narrow_cells)
        keep_loaded(self, state_dict, self._kept)
        if captured is not None:
            load_into(captured, self.state)

    def __getstate__(self) -> StateDict:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self.options}}


def _check(name: str, params: object, defaults: ParamGroup) -> None:
    if isinstance(params, torch.nn.Module) and not isinstance(params, torch.nn.ParameterList):
        raise ConfigError(
            f"{name} got a {type(params).__name__}; give its parameters: {name}(module.parameters(), ...)"
        )
    for key in ("lr", "eps", "weight_decay"):
        value = defaults.get(key, 0.0)
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ConfigError(f"{name} got {key}={value!r}; a tensor has to have one element")
        if value is not required and not isinstance(value, Tensor) and not refusals.at_least_0(value):
            raise ConfigError(f"{name} got {key}={value!r}; it has to be a number, 0 or more")
    betas = defaults.get("betas", (0.0, 0.0))
    two = isinstance(betas, (tuple, list)) and len(betas) == 2
    if not two or not all(refusals.at_least_0(beta) and beta < 1 for beta in betas):
        raise ConfigError(f"{name} got betas={betas!r}; it has to be two numbers, each at least 0 and less than 1")


def from_grad_scaler(optimizer: Optimizer, own: ops.StepState | None) -> ops.StepState | None:
    """Returns a step state with ``found_inf`` and the multiplier ``1 / grad_scale``, or None if neither attribute is set.

    The state is ``own`` if this is on the attributes' device, else a new one.  Without ``found_inf`` the step is not skipped;
    without ``grad_scale`` the multiplier is 1.
    """
    attributes = vars(optimizer)
    found_inf: Tensor | None = attributes.get("found_inf")
    scale: Tensor | None = attributes.get("grad_scale")
    attribute = found_inf if found_inf is not None else scale
    if attribute is None:
        return None
    device = attribute.device
    state = own if own is not None and own.words.device == device else ops.StepState.on(device)
    if found_inf is None:
        state.found_inf.zero_()
    else:
        state.found_inf.copy_(found_inf.reshape(()))
    if scale is None:
        state.multiplier.fill_(1.0)
    else:
        state.multiplier.copy_(scale.reshape(()).reciprocal())
    return state


def let_hooks_idle(kind: type[Optimizer]) -> None:
    """Wraps ``kind.step``, once per class: steps with hooks or a profiler run torch's wrapper, all others bypass it.

    torch's wrapper takes 10 us per step.
    """
    step: Callable[..., Any] = kind.step
    if getattr(step, "hooked", False):
        return
    with_hooks = Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def run(self: Any, *args: Any, **options: Any) -> Any:
        if (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or global_optimizer_pre_hooks
            or global_optimizer_post_hooks
            or profiler_enabled()
        ):
            return with_hooks(self, *args, **options)
        return step(self, *args, **options)

    run.hooked = True  # type: ignore[attr-defined]  # tells torch that the wrapper is already there
    kind.step = run  # type: ignore[method-assign]


class Changes:
    """Counts the writes to a state and its entries; an object of its own, so that an entry needs no reference to the state."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


def _counted(name: str) -> Any:
    method: Callable[..., Any] = getattr(dict, name)

    def change(self: Any, *args: Any, **options: Any) -> Any:
        self.changes.count += 1
        return method(self, *args, **options)

    change.__name__ = name
    return change


class _Counts:
    """Mixin for a dict: counts every change."""

    changes: Changes
    __setitem__ = _counted("__setitem__")
    __delitem__ = _counted("__delitem__")
    __ior__ = _counted("__ior__")
    clear = _counted("clear")
    pop = _counted("pop")
    popitem = _counted("popitem")
    setdefault = _counted("setdefault")
    update = _counted("update")


class ParameterState(_Counts, dict[str, Any]):
    """The state of one parameter; its copies and pickles are plain dicts."""

    def __init__(self, entries: dict[str, Any], changes: Changes) -> None:
        self.changes = changes
        super().__init__(entries)

    def __reduce__(self) -> Any:
        return dict, (), None, None, iter(self.items())


class WatchedState(_Counts, defaultdict[Any, Any]):
    """The state of an optimizer; its copies and pickles are plain defaultdicts.

    From the count a step sees at once whether a tensor of the state may have been replaced.
    """

    def __init__(self, *args: Any) -> None:
        self.changes = Changes()
        super().__init__(*args)

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())


def watched(state: Any) -> WatchedState:
    """Returns ``state`` itself if it counts its changes, else a counting copy with the same tensors."""
    counting = state if type(state) is WatchedState else WatchedState(dict, state)
    for key, entry in counting.items():
        if isinstance(entry, dict) and getattr(entry, "changes", None) is not counting.changes:
            counting[key] = ParameterState(entry, counting.changes)
    return counting
