"""The base of the fused optimizers: rows of tensors laid out once, one launch per step, a step that a Precision can control."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import required

from fabricamp import ops
from fabricamp.errors import ConfigError
from fabricamp.keywords import NamesKeywords
from fabricamp.ops.shards import SharedRows, any_shard, local, local_gradient
from fabricamp.ops.table import Table
from fabricamp.optimizers import refusals
from fabricamp.optimizers.grad_scaler import from_grad_scaler
from fabricamp.optimizers.idle_hooks import let_hooks_idle
from fabricamp.optimizers.parameters import owned_parameters
from fabricamp.optimizers.refusals import UnsupportedError
from fabricamp.optimizers.rows import LAST, DeviceParams, RowsCacheKey, set_scalars, zero_gradients
from fabricamp.optimizers.state_dicts import as_cell, load_into, load_state
from fabricamp.optimizers.watched_state import ParameterState, WatchedState, watched

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

    A step can be captured in a CUDA graph after one step outside of it; eager steps and replays may alternate.  ``gather()``
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
    _parts: list[DeviceParams] | None = None
    _known: RowsCacheKey | None = None
    _copies: Sequence[Tensor | None] | None = None
    _flags: Sequence[Tensor | None] | None = None
    _explicit = False
    _steering: ops.Steering | None = None
    _own_state: ops.StepState | None = None
    _watched: WatchedState | None = None
    _changes = 0
    _grad_of: Callable[[Any], Any] = _grad

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        _check(type(self).__name__, params, defaults)
        super().__init__(params, defaults)

    # -- what a subclass writes ------------------------------------------------------------------------------------------------

    def _rule(self, group: dict[str, Any]) -> ops.Rule:
        """Returns the update rule of the rows of ``group``."""
        raise NotImplementedError

    def _before_rows(self) -> None:
        """Runs before the rows of a step are checked: a subclass looks here at what else its rows depend on.  Does nothing here."""

    def _measure(self, steering: ops.Steering) -> Mapping[torch.device, Tensor]:
        """Returns the norm of all gradients on each device if the rule needs it, else an empty mapping."""
        return {}

    # -- a step ----------------------------------------------------------------------------------------------------------------

    def gather(
        self,
        gradients: Sequence[Tensor | None] | None = None,
        copies: Sequence[Tensor | None] | None = LAST,
        flags: Sequence[Tensor | None] | None = LAST,
    ) -> None:
        """Sets the tensors that the next step reads and writes, one entry per parameter in the order of ``param_groups``.

        ``gradients``: None takes each parameter's ``.grad``; the same tuple as in the last call is assumed to be the same memory.
        ``copies``: tensors into which the step also writes the rounded parameters.  ``flags``: fp32 numbers in device memory; the
        step skips a parameter if its flag is 0.  Pass the same list of ``copies`` and of ``flags`` each time; a list that is left
        out is that of the last call.

        Raises UnsupportedError if the rows of a captured step would have to be rebuilt, or if the first step is in a capture.
        """
        self._before_rows()
        copies = self._copies if copies is LAST else copies
        flags = self._flags if flags is LAST else flags
        groups = self.param_groups
        parameters = groups[0]["params"] if len(groups) == 1 else list(chain.from_iterable(map(_params, groups)))
        explicit = gradients is not None
        if gradients is None:
            gradients = list(map(self._grad_of, parameters))
        parts, known, state = self._parts, self._known, self._watched
        if (
            parts is None
            or known is None
            or not known.holds(parameters, gradients, copies, flags)
            or state is None
            or (
                (self.state is not state or state.changes.count != self._changes)
                and not self._holds_state(parts, parameters)
            )
        ):
            refusals.refuse_rebuild(self, parts, parameters)
            parts = self._parts = self._build(parameters, gradients, copies, flags)
            self._known = RowsCacheKey(parameters, parts, copies, flags)
            self._copies, self._flags = copies, flags
            self._watch()
        for part in parts:
            self._refresh(part, gradients, trust=explicit == self._explicit)
        set_scalars(parts, self._rule, self.param_groups)
        self._explicit = explicit

    def upload(self) -> bool:
        """Uploads changed numbers (lr and its like) before a replay; returns whether nothing else has changed.

        The rest of :meth:`gather` is for gradients at new addresses; those of a graph do not move.
        """
        self._before_rows()
        parts, state = self._parts, self._watched
        if parts is None or self._known is None or state is None:
            return False
        if self.state is not state or state.changes.count != self._changes:
            return False
        set_scalars(parts, self._rule, self.param_groups)
        return True

    def numbers(self, groups: Sequence[dict[str, Any]]) -> list[float | Tensor]:
        """Returns the numbers that a step reads from ``groups`` (like ``param_groups``), in the order of the tables' scalars."""
        return [one for group in groups for one in self._rule(group).scalars()]

    @property
    def tables(self) -> list[Table]:
        """The tables that a step's kernels work on, one per device; empty where the torch references run."""
        return [part.table for part in self._parts or () if part.table is not None]

    def _refresh(self, part: DeviceParams, every: Sequence[Tensor | None], *, trust: bool) -> None:
        gradients = part.take(every)
        try:
            part.refresh(gradients, trust=trust)
        except (RuntimeError, ValueError):  # a sparse gradient has no address, a wrapper has address 0
            refusals.refuse_unreadable(self, every, "gradient")
            raise

    def _holds_state(self, parts: Sequence[DeviceParams], parameters: Sequence[Tensor]) -> bool:
        """Whether the rows still hold the tensors of the state, after the state was changed."""
        state = self.state
        names = (*self.rule.states, *self.rule.cells)
        for part in parts:
            for row, place in enumerate(part.places):
                entry = state.get(parameters[place]) or {}
                target = local(entry.get("master_param", parameters[place]))
                if not part.has(row, target, [local(entry.get(name)) for name in names]):
                    return False
        self._watch()
        return True

    def _watch(self) -> None:
        """Makes the state count the writes to it from now on."""
        self.state = self._watched = watched(self.state)
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
        places: dict[torch.device, list[int]] = {}
        for place, parameter in enumerate(parameters):
            if gradients[place] is not None or self.state.get(parameter):
                self._fill_state(parameter)
                refusals.refuse_state(self, parameter, place, (*self.rule.states, "master_param"))
                places.setdefault(parameter.device, []).append(place)
        groups = [index for index, group in enumerate(self.param_groups) for _ in group["params"]]
        parts = []
        for device, own in places.items():
            states = [self.state[parameters[place]] for place in own]
            rows = [self._targets(parameters[place], None if copies is None else copies[place]) for place in own]
            part = DeviceParams(
                device,
                own,
                [groups[place] for place in own],
                parameters=[local(target) for target, _ in rows],
                states=[[local(state[name]) for state in states] for name in self.rule.states],
                cells=[[state[name] for state in states] for name in self.rule.cells],
                copies=[local(copy) for _, copy in rows],
                flags=None if flags is None else [flags[place] for place in own],
                shared=SharedRows.of([parameters[place] for place in own]),
            )
            parts.append(part)
        return parts

    def _targets(self, parameter: Tensor, copy: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns (tensor to update, half-precision copy or None); if the state has a master: (fp32 master, parameter)."""
        master = self.state[parameter].get("master_param")
        return (parameter, copy) if master is None else (master, parameter)

    def _fill_state(self, parameter: Tensor) -> None:
        """Creates the missing state tensors of a parameter."""
        if not parameter.is_floating_point():
            raise UnsupportedError(
                f"{type(self).__name__} got a parameter of {parameter.dtype}; it updates fp32, fp16, bf16 and fp64"
            )
        state, wide = self.state[parameter], torch.promote_types(parameter.dtype, torch.float32)
        for name in self.rule.states:
            if name not in state:
                state[name] = torch.zeros_like(parameter, dtype=wide, memory_format=torch.preserve_format)
        for name in self.rule.cells:
            state[name] = as_cell(
                state.get(name, 0.0), wide if name in self.rule.wide_cells else torch.float32, parameter.device
            )
        if self.master_weights and wide != parameter.dtype and "master_param" not in state:
            state["master_param"] = parameter.detach().to(wide)

    def statistics(self, scale: Tensor, divisor: float = 1.0) -> Tensor:
        """Returns the input of ``ops.finish``: sums of squares of the gathered gradients divided by ``scale * divisor``.

        For sharded parameters these are the sums over full gradients: a collective of the ranks that hold the shards.
        """
        pieces = [part.statistics(scale, divisor) for part in self._parts or ()]
        if len(pieces) == 1:
            return pieces[0]
        return (
            torch.cat([one.to(scale.device) for one in pieces])
            if pieces
            else torch.zeros(1, dtype=torch.float32, device=scale.device)
        )

    def parameter_of_statistic(self, index: int) -> Tensor:
        """Returns the parameter whose gradient entry ``index`` of the last :meth:`statistics` belongs to."""
        parameters = owned_parameters(self)
        for part in self._parts or ():
            if index < part.entries:
                found: Tensor = parameters[part.place_of_statistic(index)]
                return found
            index -= part.entries
        raise IndexError(index)

    def steer(self, state: ops.StepState | None, *, limit: float | None = None, skips: bool = True) -> None:
        """Makes the next step use the gradients of :meth:`gather`, times ``state.multiplier``, each value clamped to +-``limit``.

        The step changes nothing if ``state.found_inf`` is set, unless ``skips`` is False.
        """
        self._steering = ops.Steering(state, limit, skips)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters that have a gradient; returns what ``closure`` (forward and backward) returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.is_grad_enabled():
            with torch.no_grad():
                self._update()
        else:  # a Precision has switched it off; the check is cheaper than no_grad()
            self._update()
        return loss

    def _update(self) -> None:
        steering, self._steering = self._steering, None
        handed_over = None
        if steering is None:
            handed_over = from_grad_scaler(self, self._own_state)
            self._own_state = handed_over or self._own_state
            steering = ops.Steering(handed_over)
            self.gather(None, None, None)
        else:
            refusals.refuse_rows_of_eager_steps(self, self._parts)
        norms = self._measure(steering)
        for part in self._parts or ():
            state = None if steering.state is None else steering.state.seen_from(part.device)
            own = ops.Steering(state, steering.limit, steering.skips, norms.get(part.device))
            if part.table is not None:
                self.rule.launch(part.table, own)
                part.mark_written(part.table)
            else:
                for index, group in enumerate(self.param_groups):
                    self._rule(group).reference(part.of_group(index), own)
            part.release()
        if handed_over is not None and getattr(self, "grad_scale", None) is not None:
            self._unscale_gradients(handed_over)

    def _unscale_gradients(self, state: ops.StepState) -> None:
        """Unscales ``.grad`` after a step that torch's GradScaler did not skip, as torch's fused optimizers do.

        Unscaling comes after the update, because the update multiplies half gradients in full precision, without rounding them.
        """
        factor = torch.where(state.found_inf == 0, state.multiplier, 1.0)
        for device in {part.device for part in self._parts or ()}:
            gradients = [one for one in self._gradients() if one.device == device]
            ops.scale(gradients, gradients, factor.to(device, non_blocking=True))

    def _gradients(self) -> list[Tensor]:
        parameters = chain.from_iterable(map(_params, self.param_groups))
        return [one for one in map(self._grad_of, parameters) if one is not None]

    def own_state(self, device: torch.device) -> ops.StepState:
        """Returns the optimizer's own step state, for steps without a loss scaler; its scale is 1."""
        if self._own_state is None or self._own_state.words.device != device:
            self._own_state = ops.StepState.on(device)
        return self._own_state

    def _patch_step_function(self) -> None:
        let_hooks_idle(type(self))
        super()._patch_step_function()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Sets the gradients to None, or to zero; ``set_to_none=None`` takes the constructor's ``set_grad_none``."""
        if self.set_grad_none if set_to_none is None else set_to_none:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        else:
            zero_gradients(owned_parameters(self))

    # -- state -----------------------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Makes the next step rebuild its rows; graphs that captured a step must not be replayed afterwards.

        After replacing a tensor of the state, this call is not needed.
        """
        self._parts = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters; also possible during training."""
        if isinstance(param_group, dict):
            _check(type(self).__name__, (), param_group)
        super().add_param_group(param_group)
        self._known = None
        parameters = owned_parameters(self)
        refusals.refuse_unreadable(self, parameters, "parameter")
        if any_shard(parameters):
            self._grad_of = local_gradient

    def state_dict(self) -> dict[str, Any]:
        """Returns groups and state in plain dicts; as in torch, the tensors are the optimizer's own, not copies."""
        found: dict[str, Any] = super().state_dict()
        entries = found["state"].items()
        plain = {key: dict(entry) if isinstance(entry, ParameterState) else entry for key, entry in entries}
        return {**found, "state": plain}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this optimizer, of torch's optimizer of the same rule, or of apex's; never casts state to half."""
        replaced = self.state if any(part.captured for part in self._parts or ()) else None
        rule = self.rule
        narrow = [name for name in rule.cells if name not in rule.wide_cells]
        load_state(self, super().load_state_dict, state_dict, rule.cells, narrow)
        if replaced is not None:
            load_into(replaced, self.state)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self.options}}


def _check(name: str, params: object, defaults: dict[str, Any]) -> None:
    if isinstance(params, torch.nn.Module) and not isinstance(params, torch.nn.ParameterList):
        raise ConfigError(
            f"{name} got a {type(params).__name__}; give its parameters: {name}(module.parameters(), ...)"
        )
    for key in ("lr", "eps", "weight_decay"):
        value = defaults.get(key, 0.0)
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ConfigError(f"{name} got {key}={value!r}; a tensor has to have one element")
        if value is not required and not isinstance(value, Tensor) and not refusals.at_least_0(value):
            raise ConfigError(f"{name} got {key}={value!r}; it has to be a number from 0 on")
    betas = defaults.get("betas", (0.0, 0.0))
    two = isinstance(betas, (tuple, list)) and len(betas) == 2
    if not two or not all(refusals.at_least_0(beta) and beta < 1 for beta in betas):
        raise ConfigError(f"{name} got betas={betas!r}; it has to be two numbers, each at least 0 and less than 1")
