"""What the fused optimizers share: rows of tensors found once, one launch a step, a step that a Precision can steer."""

from __future__ import annotations

import operator
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import required

from fabricamp import ops
from fabricamp.errors import ConfigError
from fabricamp.optimizers.idle_hooks import let_hooks_idle
from fabricamp.optimizers.rows import Known, Part, Rows, zero_gradients
from fabricamp.optimizers.state_dicts import restore_full_precision, with_steps_by_parameter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from fabricamp.ops.table import Table

__all__ = ["FusedOptimizer", "UnsupportedError"]

_grad: Final = operator.attrgetter("grad")
_params: Final = operator.itemgetter("params")


class UnsupportedError(ConfigError, RuntimeError):
    """What a fused optimizer refuses; a ``RuntimeError`` too, as apex's users expect."""


class Steering(NamedTuple):
    """How a step reads its gradients: see :meth:`FusedOptimizer.steer`."""

    state: ops.StepState | None = None
    limit: float | None = None
    skips: bool = True


class FusedOptimizer(Optimizer):
    """A ``torch.optim.Optimizer`` whose step is one pass over memory.

    A subclass names its state (``state_names``: tensors like the parameter; ``cell_names``: one fp32 number a parameter), and
    writes :meth:`_rule`, :meth:`_launch` and :meth:`_reference`.  State is fp32 for half and fp32 parameters, fp64 for fp64 ones.

    Alone, ``step()`` reads each ``.grad``.  A Precision steers it instead::

        optimizer.gather(gradients, copies)              # which memory; nothing is moved, nothing waits
        statistics = optimizer.statistics(scale)         # first launch
        ops.finish(state, statistics, scale=scale)       # second launch
        optimizer.steer(state)                           # the next step reads multiplier and found_inf from ``state``
        optimizer.step()                                 # third launch

    Under torch's GradScaler a step reads ``found_inf`` and ``grad_scale`` on the device too.
    """

    state_names: ClassVar[tuple[str, ...]] = ()
    cell_names: ClassVar[tuple[str, ...]] = ()
    wide_cells: ClassVar[tuple[str, ...]] = ()
    """Cells that are as wide as the state: fp64 for fp64 parameters."""
    options: ClassVar[tuple[str, ...]] = ("set_grad_none", "master_weights")
    """Attributes that a copy or pickle of the optimizer keeps."""
    reads_scale: ClassVar[bool] = False
    """Whether a step reads the scale that its statistics were taken with again: no window may end before it."""
    _step_supports_amp_scaling = True  # torch's GradScaler then hands its flag over instead of reading it

    set_grad_none = True
    master_weights = False
    _parts: list[Part] | None = None
    _known: Known | None = None
    _explicit = False
    _steering: Steering | None = None
    _own_state: ops.StepState | None = None

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        _check(type(self).__name__, defaults)
        super().__init__(params, defaults)

    # -- what a subclass writes ------------------------------------------------------------------------------------------------

    def _rule(self, group: dict[str, Any]) -> Any:
        """What the rows of ``group`` share: a NamedTuple with ``scalars()``, which the kernel reads."""
        raise NotImplementedError

    def _prepare(self, steering: Steering) -> None:
        """Finds what the rows of a step have in common, such as the norm of all gradients; nothing by default."""

    def _launch(self, table: Table, state: ops.StepState | None, limit: float | None, *, skips: bool) -> None:
        """Updates ``table``: columns gradient, parameter, ``state_names``, half copy; cells ``cell_names``."""
        raise NotImplementedError

    def _reference(
        self, rows: Rows, rule: Any, state: ops.StepState | None, limit: float | None, *, skips: bool
    ) -> None:
        """Does the same to the rows of one group, in torch's operations."""
        raise NotImplementedError

    # -- a step ----------------------------------------------------------------------------------------------------------------

    def gather(
        self,
        gradients: Sequence[Tensor | None] | None = None,
        copies: Sequence[Tensor | None] | None = None,
        flags: Sequence[Tensor | None] | None = None,
    ) -> None:
        """Finds what the next step reads and writes, one entry a parameter in the order of ``param_groups``.

        ``gradients`` None: each parameter's ``.grad``; a tuple that comes again is taken to be the same memory.  ``copies``:
        tensors that get the rounded parameters in the same pass.  ``flags``: fp32 numbers in device memory, 0 where the parameter
        takes no part after all.  Give the same list of these each time.
        """
        groups = self.param_groups
        parameters = groups[0]["params"] if len(groups) == 1 else list(chain.from_iterable(map(_params, groups)))
        explicit = gradients is not None
        if gradients is None:
            gradients = list(map(_grad, parameters))
        parts, known = self._parts, self._known
        if parts is None or known is None or not known.holds(parameters, gradients, copies, flags):
            parts = self._parts = self._build(parameters, gradients, copies, flags)
            self._known = Known(parameters, parts, copies, flags)
        rules: list[Any] | None = None
        for part in parts:
            self._refresh(part, part.take(gradients), trust=explicit == self._explicit)
            if part.table is not None:
                rules = rules or [self._rule(group).scalars() for group in groups]
                part.table.set_scalars(rules)
        self._explicit = explicit

    def _refresh(self, part: Part, gradients: Sequence[Tensor | None], *, trust: bool) -> None:
        try:
            part.refresh(gradients, trust=trust)
        except RuntimeError:  # a sparse one has no address
            self._refuse_sparse(gradients)
            raise

    def _refuse_sparse(self, gradients: Sequence[Tensor | None]) -> None:
        if any(one is not None and one.layout is not torch.strided for one in gradients):
            raise UnsupportedError(
                f"{type(self).__name__} got a sparse gradient; use sparse=False in the embedding, or torch.optim.SparseAdam"
            )

    def _build(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        copies: Sequence[Tensor | None] | None,
        flags: Sequence[Tensor | None] | None,
    ) -> list[Part]:
        """One part a device, of the parameters that have a gradient or state."""
        self._refuse_sparse(gradients)
        places: dict[torch.device, list[int]] = {}
        for place, parameter in enumerate(parameters):
            if gradients[place] is not None or self.state.get(parameter):
                self._fill_state(parameter)
                places.setdefault(parameter.device, []).append(place)
        groups = [index for index, group in enumerate(self.param_groups) for _ in group["params"]]
        parts = []
        for device, own in places.items():
            states = [self.state[parameters[place]] for place in own]
            rows = [self._targets(parameters[place], None if copies is None else copies[place]) for place in own]
            part = Part(
                device,
                own,
                [groups[place] for place in own],
                parameters=[target for target, _ in rows],
                states=[[state[name] for state in states] for name in self.state_names],
                cells=[[state[name] for state in states] for name in self.cell_names],
                copies=[copy for _, copy in rows],
                flags=None if flags is None else [flags[place] for place in own],
            )
            parts.append(part)
        return parts

    def _targets(self, parameter: Tensor, copy: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What is updated, and what it is rounded to: where the optimizer keeps a master itself, that and the parameter."""
        master = self.state[parameter].get("master_param")
        return (parameter, copy) if master is None else (master, parameter)

    def _fill_state(self, parameter: Tensor) -> None:
        """Gives a parameter the state that it lacks."""
        if not parameter.is_floating_point():
            raise UnsupportedError(
                f"{type(self).__name__} got a parameter of {parameter.dtype}; it updates fp32, fp16, bf16 and fp64"
            )
        state, wide = self.state[parameter], torch.promote_types(parameter.dtype, torch.float32)
        for name in self.state_names:
            if name not in state:
                state[name] = torch.zeros_like(parameter, dtype=wide, memory_format=torch.preserve_format)
        for name in self.cell_names:
            if name not in state:
                dtype = wide if name in self.wide_cells else torch.float32
                state[name] = torch.zeros((), dtype=dtype, device=parameter.device)
        if self.master_weights and wide != parameter.dtype and "master_param" not in state:
            state["master_param"] = parameter.detach().to(wide)

    def statistics(self, scale: Tensor, divisor: float = 1.0) -> Tensor:
        """Returns what ``ops.finish`` takes: sums of squares of the gathered gradients divided by ``scale * divisor``."""
        pieces = [part.statistics(scale, divisor) for part in self._parts or ()]
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat([one.to(scale.device) for one in pieces]) if pieces else torch.zeros(1, device=scale.device)

    def parameter_of_statistic(self, index: int) -> Tensor:
        """Returns the parameter whose gradient entry ``index`` of the last :meth:`statistics` belongs to."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for part in self._parts or ():
            if index < part.entries:
                found: Tensor = parameters[part.place_of_statistic(index)]
                return found
            index -= part.entries
        raise IndexError(index)

    def steer(self, state: ops.StepState | None, *, limit: float | None = None, skips: bool = True) -> None:
        """Makes the next step use what :meth:`gather` found, times ``state.multiplier``, each value limited to +-``limit``.

        It changes nothing where ``state.found_inf`` is set, unless ``skips`` is False.
        """
        self._steering = Steering(state, limit, skips)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters that have a gradient; returns what ``closure`` (forward and backward) returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.is_grad_enabled():
            with torch.no_grad():
                self._update()
        else:  # as under a Precision; asking is cheaper than switching off what is off
            self._update()
        return loss

    def _update(self) -> None:
        steering, self._steering = self._steering, None
        if steering is None:
            steering = Steering(self._from_grad_scaler())
            self.gather()
        self._prepare(steering)
        for part in self._parts or ():
            state = None if steering.state is None else steering.state.seen_from(part.device)
            if part.table is not None:
                self._launch(part.table, state, steering.limit, skips=steering.skips)
                part.mark_written()
            else:
                for index, group in enumerate(self.param_groups):
                    self._reference(
                        part.of_group(index), self._rule(group), state, steering.limit, skips=steering.skips
                    )
            part.release()

    def _from_grad_scaler(self) -> ops.StepState | None:
        """What torch's GradScaler hands over, in attributes that exist for the length of the step."""
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        scale: Tensor | None = getattr(self, "grad_scale", None)
        given = found_inf if found_inf is not None else scale
        if given is None:
            return None
        state = self.own_state(given.device)
        if found_inf is None:
            state.found_inf.zero_()
        else:
            state.found_inf.copy_(found_inf.reshape(()))
        if scale is None:
            state.multiplier.fill_(1.0)
        else:
            state.multiplier.copy_(scale.reshape(()).reciprocal())
        return state

    def own_state(self, device: torch.device) -> ops.StepState:
        """Returns a struct of the optimizer's own, for steps that no loss scaler has one for; its scale is 1."""
        if self._own_state is None or self._own_state.words.device != device:
            self._own_state = ops.StepState.on(device)
        return self._own_state

    def _patch_step_function(self) -> None:
        let_hooks_idle(type(self))
        super()._patch_step_function()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Forgets the gradients, or zeroes them; None means what ``set_grad_none`` was given at construction."""
        if self.set_grad_none if set_to_none is None else set_to_none:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        else:
            zero_gradients([parameter for group in self.param_groups for parameter in group["params"]])

    # -- state -----------------------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Lets the next step find all memory anew, after state tensors were replaced by hand."""
        self._parts = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, mid-training too."""
        super().add_param_group(param_group)
        self.forget()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back its own state, that of torch's optimizer of the same rule, or apex's; never cast to half."""
        own = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        seen: list[dict[str, Any]] = []

        def normalise(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            seen.append(with_steps_by_parameter(given, type(self).__name__, cells=self.cell_names))
            return seen[0]

        handle = self.register_load_state_dict_pre_hook(
            normalise
        )  # the last one: it sees what others made of the state
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for group, before in zip(self.param_groups, own, strict=True):
            for key, value in before.items():
                group.setdefault(key, value)
        restore_full_precision(self, seen[0], [name for name in self.cell_names if name not in self.wide_cells])
        self.forget()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self.options}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.forget()


def _check(name: str, defaults: dict[str, Any]) -> None:
    for key in ("lr", "eps", "weight_decay"):
        value = defaults.get(key, 0.0)
        if value is not required and not isinstance(value, Tensor) and not value >= 0:
            raise ConfigError(f"{name} got {key}={value!r}; it has to be 0 or more")
    for beta in defaults.get("betas", ()):
        if not 0 <= beta < 1:
            raise ConfigError(f"{name} got betas={defaults['betas']!r}; each has to be at least 0 and less than 1")
