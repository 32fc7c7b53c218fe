"""Averages the weights after steps or epochs; the average is validated, saved, and left in the module after training."""

from __future__ import annotations

import contextlib
import inspect
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fabricamp.arguments.checks import check_kind
from fabricamp.callbacks._averages import (
    AveragedBuffer,
    Averages,
    Rule,
    averaged_buffers,
    in_state,
    mean,
    refuse_several,
)
from fabricamp.callbacks.base import Callback
from fabricamp.errors import ConfigError, UnknownArgumentError, nearest
from fabricamp.state import TrainerFn

if TYPE_CHECKING:
    from fabricamp._utils.types import AnyBatch, AnyOutput, StateDict
    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer

_LOG = logging.getLogger("fabricamp")
_FUNCTIONS = ("avg_fn", "multi_avg_fn")


class WeightAveraging(Callback):
    """Keeps an average of the weights, by default their mean over all steps.

    The average covers the parameters that the optimizers update (fp32 masters at O2 and O5), in fp32, and running statistics;
    frozen parameters and other buffers stay the module's.  Validation, test and prediction run with the average, and the module
    has the average at the end of training.  A checkpoint has both: the average as ``state_dict``, the weights as
    ``current_model_state``.  If every step since the last update was skipped for overflow, the average is not updated; the host
    does not wait for the device to know.

    Args:
        device: where the average is kept; None: where the weights are.
        use_buffers: the averaged buffers.  None: ``running_mean`` and ``running_var`` of each module that has both, without values
            that are not finite; a list of names: these too; True: all floating-point buffers in the state dict; False: none.  Of
            other buffers than running statistics, equal values keep their value, and inf and nan replace the average.
        **kwargs: ``avg_fn(average, weight, count)``, which returns the new average, or ``multi_avg_fn(averages, weights,
            count)``, which updates lists of averages in place; ``count`` is the number of updates so far.

    Raises:
        ConfigError: for wrong arguments, and with another callback that averages weights.

    Example:
        >>> class FromTheThirdEpoch(WeightAveraging):
        ...     def should_update(self, step_idx=None, epoch_idx=None):
        ...         return epoch_idx is not None and epoch_idx >= 2
    """

    averages_weights: ClassVar[bool] = True

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool | Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        are_names = isinstance(use_buffers, Sequence) and not isinstance(use_buffers, str)
        if not (use_buffers is None or isinstance(use_buffers, bool) or are_names):
            raise ConfigError(
                f"{name}(use_buffers={use_buffers!r}): give a list of buffers' names, True, False or None"
            )
        known = [key for key in inspect.signature(type(self).__init__).parameters if key not in ("self", "kwargs")]
        for key, value in kwargs.items():
            if key not in _FUNCTIONS:
                hint = nearest(key, [*known, *_FUNCTIONS]) or f" (known: {', '.join([*known, *_FUNCTIONS])})"
                raise UnknownArgumentError(f"{name} has no argument {key!r}{hint}")
            if not callable(value) and value is not None:
                raise ConfigError(f"{name}({key}={value!r}): give a function")
        functions = [kwargs.get(key) for key in _FUNCTIONS]
        if all(functions):
            raise ConfigError(f"{name} got avg_fn and multi_avg_fn; give one of them")
        self._rule = Rule(one=functions[0], many=functions[1]) if any(functions) else Rule(share=mean)
        self._device = None if device is None else torch.device(device)
        self._use_buffers = use_buffers
        self._latest_step = 0
        self._latest_epoch = -1
        self._forget()

    @property
    def averages_buffers(self) -> bool:
        """Whether buffers may be averaged too."""
        return self._use_buffers is not False

    def averaged_buffers(self, module: TrainingModule) -> dict[str, AveragedBuffer]:
        """Returns the buffers that are averaged, by name; raises :class:`ConfigError` for a name of ``use_buffers`` of no such."""
        return averaged_buffers(self, module, self._use_buffers)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Returns whether to update after this step or, with ``epoch_idx``, after this epoch; both count from 0."""
        return step_idx is not None

    def __getstate__(self) -> StateDict:
        """Returns the attributes without those of the current run."""
        own = ("_averages", "_raw", "_saved", "_applied_at_update", "_module")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: StateDict) -> None:
        self.__dict__.update(state)
        self._forget()

    def _forget(self) -> None:
        self._averages: Averages | None = None
        self._raw: dict[str, Tensor] | None = None  # the weights, while the average replaces them
        self._saved: StateDict | None = None
        self._warned = False
        self._applied_at_update: Tensor | None = None  # from the checkpoint of a resumed run
        self._module: Callable[[], TrainingModule | None] = lambda: None

    def _average_of(self, module: TrainingModule) -> Averages | None:
        """Returns the average of this module's weights; None before the first update."""
        averages = self._averages
        if averages is None or not averages.begun or self._module() is not module:
            return None
        return averages

    # -- training ----------------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        """Resets the average for each fit."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        refuse_several(self, trainer.callbacks)
        self._forget()
        self._latest_step = trainer.global_step
        self._latest_epoch = trainer.current_epoch - 1
        self._module = weakref.ref(pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Creates the average, from a checkpoint's average if there is one."""
        averages = Averages(self._rule, self._device)
        self._averages = averages
        saved = self._saved
        self._saved = None
        buffers = self.averaged_buffers(pl_module)
        averages.follow(pl_module, trainer.optimizers, trainer.strategy, buffers, saved and saved["average"])
        self._warned = False
        if trainer.is_global_zero:
            others = [name for name, _ in pl_module.named_buffers() if name not in buffers]
            _LOG.info(
                "%s averages %d parameters%s%s",
                type(self).__name__, len(averages.values) - len(buffers),
                f" and the buffers {_listed(buffers)}" if buffers else "",
                f"; other buffers stay the module's: {_listed(others)}" if others else "",
            )  # fmt: skip
        if saved is not None:
            averages.count = saved["count"]
            averages.begun = True
        applied = _applied(trainer)
        at_update = self._applied_at_update
        if applied is not None:
            averages.applied = applied.clone() if at_update is None else at_update.to(applied)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Registers the tensors that are trained from this epoch on."""
        if self._averages is not None:
            buffers = self.averaged_buffers(pl_module)
            self._averages.follow(pl_module, trainer.optimizers, trainer.strategy, buffers)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: AnyOutput, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Updates the average after a step, if ``should_update`` says so."""
        step = trainer.global_step
        if step <= self._latest_step:
            return
        self._latest_step = step
        if self._averages is not None and self.should_update(step_idx=step - 1):
            trainer.precision_plugin.take_edits()  # masters have not seen yet what other hooks have just written
            self._averages.update(_applied(trainer))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Updates the average after an epoch, if ``should_update`` says so."""
        epoch = trainer.current_epoch
        if epoch <= self._latest_epoch:
            return
        self._latest_epoch = epoch
        if self._averages is not None and self.should_update(epoch_idx=epoch):
            trainer.precision_plugin.take_edits()
            self._averages.update(_applied(trainer), anyway=True)

    def on_train_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Writes the average into the module; keeps the weights for later checkpoints."""
        averages = self._average_of(pl_module)
        if averages is not None and self._raw is None:
            self._raw = self._put_in(averages, trainer, pl_module)

    @contextlib.contextmanager
    def evaluation_context(self, trainer: Trainer, pl_module: TrainingModule) -> Iterator[None]:
        """Replaces the weights by the average within the context."""
        averages = self._average_of(pl_module)
        if averages is None or self._raw is not None:
            yield
            return
        raw = self._put_in(averages, trainer, pl_module)
        self._raw = raw
        try:
            yield
        finally:
            averages.put_back(raw, pl_module, trainer.optimizers, trainer.strategy)
            self._raw = None

    def _put_in(self, averages: Averages, trainer: Trainer, module: TrainingModule) -> dict[str, Tensor]:
        """Writes the average into the module; returns the weights, and warns once if their running statistics are not finite."""
        trainer.precision_plugin.take_edits()
        raw = averages.put_in(module, trainer.optimizers, trainer.strategy)
        names = averages.statistics
        if self._warned or not names or not trainer.is_global_zero:
            return raw
        finite = torch.stack([raw[name].isfinite().all() for name in names]).tolist()  # one wait for all
        lost = [name for name, is_finite in zip(names, finite, strict=True) if not is_finite]
        if lost:
            self._warned = True
            _LOG.warning(
                "%s: the running statistics %s are inf or nan since a forward that overflowed, and stay so; the average keeps "
                "their last finite values",
                type(self).__name__, _listed(lost),
            )  # fmt: skip
        return raw

    # -- checkpoints -------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Returns the last step and epoch considered, and the applied steps at the last update if steps may be skipped."""
        applied = None if self._averages is None else self._averages.applied
        state: StateDict = {"latest_update_step": self._latest_step, "latest_update_epoch": self._latest_epoch}
        if applied is not None:
            state["applied_steps"] = applied
        return state

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restores the result of :meth:`state_dict`."""
        self._latest_step = state_dict["latest_update_step"]
        self._latest_epoch = state_dict.get("latest_update_epoch", self._latest_epoch)
        self._applied_at_update = state_dict.get("applied_steps")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: TrainingModule, checkpoint: StateDict) -> None:
        """Saves the average as ``state_dict``, and the weights as ``current_model_state``."""
        averages = self._average_of(pl_module)
        if averages is None:
            return
        state = checkpoint["state_dict"]
        checkpoint["current_model_state"] = state if self._raw is None else in_state(pl_module, state, self._raw)
        checkpoint["state_dict"] = in_state(pl_module, state, averages.values)
        checkpoint["averaging_state"] = {
            "n_averaged": torch.tensor(int(averages.count), dtype=torch.int64, device="cpu")
        }

    def on_load_checkpoint(self, trainer: Trainer, pl_module: TrainingModule, checkpoint: StateDict) -> None:
        """Loads the weights in a fit; any other run with a checkpoint uses the average.

        Buffers that are not averaged are the newest in both, also if the average that was saved has other values.
        """
        if trainer.state.fn is not TrainerFn.FITTING:
            self._forget()
            newest = checkpoint.get("current_model_state", {})
            averaged = self.averaged_buffers(pl_module)
            others = [name for name, _ in pl_module.named_buffers() if name in newest and name not in averaged]
            checkpoint["state_dict"] = in_state(
                pl_module, checkpoint["state_dict"], {name: newest[name] for name in others}
            )
        elif "current_model_state" in checkpoint and "averaging_state" in checkpoint:
            count = int(checkpoint["averaging_state"]["n_averaged"])
            self._saved = {"average": checkpoint["state_dict"], "count": count}
            checkpoint["state_dict"] = checkpoint.pop("current_model_state")


class EMAWeightAveraging(WeightAveraging):
    """Keeps an exponential moving average of the weights, with Lightning's arguments; :class:`EMA` has shorter ones.

    Args:
        device: where the average is kept; None: where the weights are.
        use_buffers: the averaged buffers, as in :class:`WeightAveraging`.
        decay: the share of the old average that each update keeps.
        update_every_n_steps: number of steps between two updates; the first update is after step 0.
        update_starting_at_step: the first step, from 0, that may update.
        update_starting_at_epoch: the first epoch, from 0, after which the average is also updated.

    Raises:
        ConfigError: for wrong arguments, and with another callback that averages weights.

    Example:
        >>> averaging = EMAWeightAveraging(decay=0.99, update_starting_at_step=100)
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool | Sequence[str] | None = None,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        **kwargs: Any,
    ) -> None:
        for name in kwargs:
            if name in _FUNCTIONS:
                raise ConfigError(
                    f"{type(self).__name__}({name}=...): its average follows from decay; use WeightAveraging"
                )
        super().__init__(device, use_buffers, **kwargs)
        self._rule = exponential(self, decay)
        check_kind(self, "a whole number", update_every_n_steps=update_every_n_steps)
        check_kind(self, "a whole number", optional=True, update_starting_at_step=update_starting_at_step)
        check_kind(self, "a whole number", optional=True, update_starting_at_epoch=update_starting_at_epoch)
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Returns whether the arguments ask for an update after this step or epoch."""
        if step_idx is not None:
            every = self.update_every_n_steps
            start = self.update_starting_at_step
            return every > 0 and step_idx % every == 0 and (start is None or step_idx >= start)
        first = self.update_starting_at_epoch
        return epoch_idx is not None and first is not None and epoch_idx >= first


def _applied(trainer: Trainer) -> Tensor | None:
    """Returns the number of applied steps, on the device; None if no step can be skipped."""
    verdicts = trainer.precision_plugin.verdicts
    return None if verdicts is None else verdicts.applied_on_device


def _listed(names: Iterable[str]) -> str:
    """Returns the first three names, and how many there are besides."""
    first = list(names)
    rest = len(first) - 3
    return ", ".join(first[:3]) + (f" and {rest} more" if rest > 0 else "")


def exponential(owner: object, decay: float) -> Rule:
    """Returns the rule of an exponential moving average; raises :class:`ConfigError` for an invalid ``decay``."""
    check_kind(owner, "a number", decay=decay)
    if not 0 <= decay <= 1:
        raise ConfigError(f"{type(owner).__name__}(decay={decay!r}): give a number from 0 to 1, such as 0.999")
    return Rule(share=_Share(1 - decay))


class _Share(float):
    """Returns the same share at any count; a class instead of a closure, because the callback must pickle."""

    def __call__(self, count: object) -> float:
        return float(self)
