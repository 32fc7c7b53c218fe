"""The checkpoint sections for weights, optimizers and learning-rate schedules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from fabricamp.checkpoint.compiled_names import with_names_of
from fabricamp.checkpoint.foreign import fit_names
from fabricamp.checkpoint.form import form_of
from fabricamp.checkpoint.hyperparameters import DATA, MODULE, saved_hyperparameters
from fabricamp.checkpoint.identities import (
    OPTIMIZERS,
    SCHEDULES,
    check_class,
    decouples,
    given_names,
    identity,
    in_own_order,
    keep_weight_decay,
    names_of_parameters,
    refuse_lost_options,
    same_options,
    saved_identities,
    saved_names,
)
from fabricamp.checkpoint.left_out import LEFT_OUT, Trained, with_base
from fabricamp.checkpoint.packing import unpack_optimizers
from fabricamp.checkpoint.plain import PRIVATE, with_numpy, without_numpy
from fabricamp.checkpoint.record import Section, WholeKey
from fabricamp.checkpoint.shard_loading import sharded_states
from fabricamp.errors import CheckpointError, FabricampError, WeightsOnlyError
from fabricamp.strategies.meta_init import leave_meta

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fabricamp._utils.types import OptimizerFace, StateDict, Stateful
    from fabricamp.data import DataModule
    from fabricamp.module import TrainingModule
    from fabricamp.precision.base import Conversion
    from fabricamp.strategies.base import Strategy

_LIKE_THE_PARAMETER = frozenset(
    {
        "exp_avg",
        "exp_avg_sq",
        "exp_inf",
        "max_exp_avg_sq",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "acc_delta",
        "sum",
        "ax",
        "master_param",
    }
)
"""Names of optimizer state with the parameter's shape; torch's and fabricamp's ``load_state_dict`` do not check that shape."""


@dataclass
class Weights(Section):
    """The module's weights (the masters' values at O2 and O5), and the hyper-parameters of its constructor."""

    name = "weights"

    module: TrainingModule
    strategy: Strategy
    conversion: Callable[[], Conversion]
    """Returns the module's present conversion: a resumed run converts the module after its weights are restored."""
    datamodule: DataModule | None
    objects: bool = False
    """Whether hyper-parameters without a plain form are saved as objects, and not as their names."""
    trained: Trained = field(default_factory=Trained)

    def save(self) -> StateDict:
        """Returns full weights, equal on every rank, or this rank's shards if the module is sharded; and hyper-parameters."""
        module = self.module
        datamodule = self.datamodule
        values: StateDict = {"state_dict": self.conversion().full_state(self.strategy.module_state(module))}
        values |= MODULE.entries(module, objects=self.objects)
        if datamodule is not None:
            values |= DATA.entries(datamodule, objects=self.objects)
        owners = [owner for owner in (module, datamodule) if owner is not None]
        if any(saved_hyperparameters(owner).private for owner in owners):
            values[PRIVATE] = True
        return values

    def restore(self, checkpoint: StateDict, path: str) -> None:
        """Loads the weights; if the module is sharded, only this rank's shards."""
        checkpoint = form_of(self.strategy).place_weights(checkpoint, path, self.module)
        restore_weights(self.module, checkpoint, path)
        self.trained.restored(checkpoint)


@dataclass
class DataModuleState(Section):
    """The state of the DataModule, also under the name of its class, where Lightning has it."""

    name = "datamodule"

    datamodule: Stateful | None
    """A DataModule of fabricamp's or Lightning's, or None."""

    def save(self) -> StateDict:
        """Returns its ``state_dict()`` under both keys."""
        state = {} if self.datamodule is None else self.datamodule.state_dict()
        values = {"data.datamodule": state}
        if state:
            values[WholeKey(type(self.datamodule).__qualname__)] = state
        return values

    def restore(self, checkpoint: StateDict, path: str) -> None:
        """Passes the saved state to ``load_state_dict`` unless it is missing or empty."""
        if self.datamodule is None:
            return
        state = data_state(checkpoint, type(self.datamodule))
        if state:
            self.datamodule.load_state_dict(state)


def data_state(checkpoint: StateDict, kind: type) -> StateDict | None:
    """Returns the saved state of a DataModule of class ``kind``; None if the file has none."""
    # fabricamp's key first: a class may have been renamed since.
    return checkpoint.get("data", {}).get("datamodule") or checkpoint.get(kind.__qualname__)


def restore_weights(module: TrainingModule, checkpoint: StateDict, path: str, *, strict: bool | None = None) -> None:
    """Loads the weights; those of an apex script's network go into the submodule that they fit.

    ``strict`` None means the module's ``strict_loading``.
    Raises a :class:`CheckpointError` that says whether the file is of another model or has no weights.
    """
    state = checkpoint.get("state_dict")
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path} holds no 'state_dict' (it has {sorted(checkpoint)}); it is not a checkpoint of a Trainer"
        )
    if checkpoint.get("source") == "apex":
        state = fit_names(state, set(module.state_dict()))
    renamed = with_names_of(
        {"state_dict": state, LEFT_OUT: checkpoint.get(LEFT_OUT)}, module
    )  # hooks may have renamed them
    state = renamed["state_dict"]
    unfilled = leave_meta(module, loaded=state)
    if unfilled:
        raise CheckpointError(
            f"{path} has no {', '.join(unfilled):.300}, which {type(module).__name__} builds on the meta device without values; "
            "give the class that owns it reset_parameters(self)"
        )
    if renamed[LEFT_OUT]:
        state = with_base(state, renamed[LEFT_OUT], module, path)
    try:
        module.load_state_dict(state, strict=module.strict_loading if strict is None else strict)
    except FabricampError:  # some are RuntimeErrors too: an override of load_state_dict that asks for self.trainer
        raise
    except RuntimeError as error:
        own = module.state_dict()
        missing = sorted(own.keys() - state.keys())
        unexpected = sorted(state.keys() - own.keys())
        shapes = [
            f"{name}: {tuple(state[name].shape)} in the file, {tuple(own[name].shape)} here"
            for name in own.keys() & state.keys()
            if isinstance(own[name], torch.Tensor) and own[name].shape != state[name].shape
        ]
        differences = {"missing": missing, "unexpected": unexpected, "other shape": sorted(shapes)}
        details = "; ".join(f"{label} {_first_five(names)}" for label, names in differences.items() if names)
        fitting = "the file's entries of the shapes here" if shapes else "the weights of the same names"
        raise CheckpointError(
            f"{path} does not fit the model of this {type(module).__name__}: {details or error}; give a checkpoint of this class, "
            f"or load {fitting} with load_state_dict(..., strict=False); a new run leaves ckpt_path out, or has a "
            "default_root_dir of its own, in which 'auto' and 'last' find no other model's files"
        ) from (None if details else error)  # torch's own words say the same again


def _first_five(names: list[str]) -> str:
    return ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")


@dataclass
class Optimizers(Section):
    """The optimizers' states, and beside them what they are of: classes, and names of parameters."""

    name = "optimizers"

    optimizers: Sequence[OptimizerFace]
    module: TrainingModule

    def save(self) -> StateDict:
        """Returns their state dicts; what is NumPy's in them, such as a rate that a hook has set, has notes."""
        states = _noted("optimizer_states", [optimizer.state_dict() for optimizer in self.optimizers])
        identities = [
            {
                **identity(optimizer),
                "parameters": names_of_parameters(optimizer, self.module),
                "decoupled_weight_decay": decouples(optimizer),
            }
            for optimizer in self.optimizers
        ]
        return {**states, f"loops.fit.{OPTIMIZERS}": identities}

    def restore(self, checkpoint: StateDict, path: str) -> None:
        """Loads the states; raises if their number differs, or if they are those of another class.

        Also raises if elementwise state has another shape than its parameter.
        """
        states = checkpoint.get("optimizer_states")
        if states is None:
            raise WeightsOnlyError(
                f"{path} holds weights only, and training cannot resume from it; load the weights with "
                "TrainingModule.load_from_checkpoint and start from the beginning, or give a checkpoint saved with "
                "save_weights_only=False"
            )
        unpack_optimizers(checkpoint, path)
        _check_number(path, "optimizers", states, self.optimizers)
        identities = saved_identities(checkpoint, OPTIMIZERS, len(states))
        states = [
            self._matched(number, state, identity, path)
            for number, (state, identity) in enumerate(zip(states, identities, strict=True))
        ]
        states = sharded_states(checkpoint, path, self.optimizers, states)
        states = with_numpy(states, _notes(checkpoint, "optimizer_states"))
        for number, (optimizer, state) in enumerate(zip(self.optimizers, states, strict=True)):
            own_decay = decouples(optimizer)
            optimizer.load_state_dict(state)
            _check_shapes(optimizer, number, path)
            if identities[number]:
                keep_weight_decay(optimizer, number, identities[number]["decoupled_weight_decay"], own_decay)

    def _matched(self, number: int, state: StateDict, saved: StateDict, path: str) -> StateDict:
        """Returns a state in the order of this optimizer's parameters; raises if its class is another one."""
        optimizer = self.optimizers[number]
        if not saved:
            names = given_names(state.get("param_groups", []))
            own_names = given_names(optimizer.param_groups)
            return in_own_order(state, names, optimizer, own_names, path) if names and own_names else state
        check_class(f"optimizer {number}", saved, optimizer, path, alike=same_options(optimizer, state))
        refuse_lost_options(optimizer, number, state, path)
        return in_own_order(state, saved_names(saved), optimizer, names_of_parameters(optimizer, self.module), path)


def _noted(key: str, states: list[StateDict]) -> StateDict:
    """Returns ``states`` as plain values under ``key``, and the notes of what was NumPy's, if anything was."""
    values, notes = without_numpy(states)
    return {key: values, f"numpy.{key}": notes} if notes else {key: values}


def _notes(checkpoint: StateDict, key: str) -> list[StateDict]:
    notes: list[StateDict] = checkpoint.get("numpy", {}).get(key, [])
    return notes


class ScheduleConfig(Protocol):
    """What a fit keeps of a schedule."""

    scheduler: Any
    """Torch's scheduler, or any object."""


@dataclass
class Schedules(Section):
    """The learning-rate schedules' states."""

    name = "learning-rate schedules"

    configs: Sequence[ScheduleConfig]

    def save(self) -> StateDict:
        """Returns their state dicts, noted as the optimizers', empty for a scheduler without one."""
        schedulers = self._schedulers()
        states = [scheduler.state_dict() if hasattr(scheduler, "state_dict") else {} for scheduler in schedulers]
        identities = [identity(scheduler) for scheduler in schedulers]
        return {**_noted("lr_schedulers", states), f"loops.fit.{SCHEDULES}": identities}

    def restore(self, checkpoint: StateDict, path: str) -> None:
        """Loads the states; raises if their number or a class differs; a file without schedulers (apex's) changes nothing."""
        if "lr_schedulers" not in checkpoint:
            return
        schedulers = self._schedulers()
        _check_number(path, "schedulers", checkpoint["lr_schedulers"], schedulers)
        states = with_numpy(checkpoint["lr_schedulers"], _notes(checkpoint, "lr_schedulers"))
        identities = saved_identities(checkpoint, SCHEDULES, len(states))
        for number, (scheduler, state) in enumerate(zip(schedulers, states, strict=True)):
            if not hasattr(scheduler, "load_state_dict"):
                continue
            if state and identities[number]:
                alike = not hasattr(scheduler, "state_dict") or state.keys() == scheduler.state_dict().keys()
                check_class(f"schedule {number}", identities[number], scheduler, path, alike=alike)
            scheduler.load_state_dict(state)

    def _schedulers(self) -> list[Any]:
        return [config.scheduler for config in self.configs]


def _check_number(path: str, label: str, saved: Sequence[object], here: Sequence[object]) -> None:
    if len(saved) != len(here):
        raise CheckpointError(
            f"{path} holds {len(saved)} {label}, configure_optimizers returned {len(here)}; they have to match"
        )


def _check_shapes(optimizer: OptimizerFace, number: int, path: str) -> None:
    for parameter, state in getattr(optimizer, "state", {}).items():
        if not isinstance(state, dict) or not isinstance(parameter, Tensor):
            continue
        for name, value in state.items():
            if name in _LIKE_THE_PARAMETER and isinstance(value, Tensor) and value.shape != parameter.shape:
                raise CheckpointError(
                    f"{path}: {name} of optimizer {number} ({type(optimizer).__name__}) has shape {tuple(value.shape)} for a "
                    f"parameter of shape {tuple(parameter.shape)}; give the checkpoint that this script wrote"
                )
