"""Builds the checkpoint of a run from a list of sections; each section saves and restores one part of the run's state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fabricamp.callbacks.base import matched_states
from fabricamp.checkpoint.foreign import lightning_keys
from fabricamp.checkpoint.record import Part, Record, Section
from fabricamp.checkpoint.sections import DataModuleState, Optimizers, Schedules, Weights
from fabricamp.engine.kernel_choice import KernelChoice
from fabricamp.engine.saved.world_change import StepSizes
from fabricamp.errors import CheckpointError, ConfigError
from fabricamp.state import NON_FINITE, Scope, TrainerFn

if TYPE_CHECKING:
    from fabricamp._utils.types import StateDict
    from fabricamp.engine.saved.accumulation_state import AccumulationState
    from fabricamp.engine.session import Session
    from fabricamp.engine.source import DataSource
    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer
    from fabricamp.trainer.arguments import Settings


# Section names: first those of a file without training state, then those that a resumed fit restores, in this order.
WEIGHTS_ONLY = ("weights", "counters")
CALLBACKS = ("counters", "callbacks")
TRAINING = ("optimizers", "learning-rate schedules", "precision", "choice of kernels", "loggers")
POSITION = ("open window", "position in training")
_COMPLETE = ("epoch", "global_step", "loops", "optimizer_states", "lr_schedulers", "amp", "callbacks", "data")


def record_of(session: Session) -> Record:
    """Returns the record of a run; each save and restore is of the state that the run then has."""
    resume_point = session.resume_point
    source = session.source
    return Record(
        session.strategy,
        [
            Weights(
                session.module,
                session.strategy,
                lambda: session.conversion,
                source.datamodule,
                objects=session.settings.checkpoint_objects,
                trained=session.trained,
            ),
            Counters(session.trainer, resume_point.accumulation, session.settings, session.module, session.data),
            StepSizes(session.settings, session.strategy, session.data),
            Optimizers(session.optimizers, session.module),
            Schedules(session.schedulers),
            Part("precision", "amp", session.precision),
            KernelChoice(),
            CallbackSection(session.trainer, session.fn),
            DataModuleState(source.datamodule),
            resume_point.loggers,
            resume_point.accumulation,  # before the position: it decides whether its micro-batches are repeated
            resume_point,
        ],
    )


@dataclass
class Counters(Section):
    """The run's counters; a finished epoch counts as the beginning of the next one."""

    name = "counters"

    trainer: Trainer
    """Its state is that of the run, unless ``Trainer.reset`` has replaced it since."""
    accumulation: AccumulationState
    settings: Settings
    module: TrainingModule
    data: DataSource

    def save(self) -> StateDict:
        """Returns the counters of a run resumed from here; ``epoch`` is the running epoch, as in Lightning's files."""
        state = self.trainer.state
        repeated = self.accumulation.repeated_batches()
        # In the end hooks of a validation within fit all its batches are done, so a resumed run does not repeat the validation.
        validation_ends = state.validating_in_fit and state.user_call.scope is Scope.NOWHERE
        epochs = state.epoch + state.epoch_ended
        batches = 0 if state.epoch_ended else state.batch_idx - repeated
        done = state.batches_done - repeated
        repeats_stop = state.should_stop and state.stop_request.reason != NON_FINITE
        return {
            "epoch": state.epoch,
            "global_step": state.global_step,
            **lightning_keys(
                epochs=epochs,
                batches=batches,
                batches_in_all=done,
                steps=state.global_step,
                automatic=self.module.automatic_optimization,
                ended=state.epoch_ended,
                ending=self.data.is_trained_on(batches),
            ),
            "loops.fit.epoch": epochs,
            "loops.fit.batch_idx": batches,
            "loops.fit.batches_done": done,
            "loops.fit.validations": state.validations + validation_ends,
            "loops.fit.skipped_before": state.skipped_before,
            "loops.fit.stop_reason": state.stop_request.reason if repeats_stop else "",
            "loops.fit.interrupted": state.interrupted,
            "loops.fit.epoch_ended": state.epoch_ended or state.closed_at == state.batches_done,
            "loops.fit.validated": state.epoch_ended or validation_ends or state.validated_at == state.batches_done,
        }

    def restore(self, checkpoint: StateDict, path: str) -> None:
        """Restores the counters, and a request to stop that was not fulfilled.

        The request is repeated if it was still waiting for ``min_steps`` or ``min_epochs``, or if a signal came first.  A request
        that has ended its run is not repeated, so that run can be resumed.
        """
        missing = [name for name in _COMPLETE if name not in checkpoint]
        if missing and "source" not in checkpoint and "optimizer_states" in checkpoint:
            raise CheckpointError(f"{path} is incomplete: it has no {', '.join(map(repr, missing))}; use another one")
        state = self.trainer.state
        settings = self.settings
        position = checkpoint.get("loops", {}).get("fit", {})
        _counter(checkpoint, "epoch", path)
        state.epoch = _counter(position, "epoch", path, within="loops.fit.")
        if 0 <= settings.max_epochs < state.epoch:
            raise ConfigError(
                f"{path} has {state.epoch} finished epochs, more than max_epochs={settings.max_epochs}; give Trainer a higher "
                "max_epochs, or begin a new run with its weights: load_from_checkpoint(...) and fit without ckpt_path"
            )
        state.global_step = _counter(checkpoint, "global_step", path)
        state.batch_idx = _counter(position, "batch_idx", path, within="loops.fit.")
        state.batches_done = _counter(position, "batches_done", path, within="loops.fit.")
        state.validations = _counter(position, "validations", path, within="loops.fit.")
        state.skipped_before = _counter(position, "skipped_before", path, within="loops.fit.")
        state.validated_at = state.batches_done if position.get("validated", True) else -1
        state.closed_at = state.batches_done if position.get("epoch_ended", True) else -1
        too_early = state.global_step < settings.min_steps or state.epoch < settings.min_epochs
        if position.get("stop_reason") and (too_early or position.get("interrupted")):
            state.ask(str(position["stop_reason"]))


@dataclass
class CallbackSection(Section):
    """The states of callbacks that have one."""

    name = "callbacks"

    trainer: Trainer
    fn: TrainerFn

    def save(self) -> StateDict:
        """Returns their state dicts by ``state_key``."""
        states = {callback.state_key: state for callback in self.trainer.callbacks if (state := callback.state_dict())}
        return {"callbacks": states}

    def restore(self, checkpoint: StateDict, path: str) -> None:
        """Loads the callbacks' states; an evaluation skips fabricamp's own callbacks, because their states are about training."""
        for callback, state in matched_states(self.trainer.callbacks, checkpoint.get("callbacks", {})):
            ours = type(callback).load_state_dict.__module__.startswith("fabricamp.")
            if self.fn is TrainerFn.FITTING or not ours:
                callback.load_state_dict(state)


def _counter(values: dict[str, Any], name: str, path: str, within: str = "") -> int:
    """Returns the counter, 0 if another library's file has none; raises :class:`CheckpointError` unless it is an int >= 0."""
    value = values.get(name, 0)
    if type(value) is not int or value < 0:
        raise CheckpointError(
            f"{path}: its {within}{name} is {value!r}, not a whole number from 0; use an older checkpoint"
        )
    return value
