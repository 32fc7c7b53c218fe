"""The Trainer's arguments as properties: readable, and settable for the next run; limits can be set in a running fit too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from fabricamp.trainer.arguments import CHECKS, as_clip, check_cadence, check_schedule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabricamp.engine.runner import Runner
    from fabricamp.state import RunState

Value = TypeVar("Value")


class _Setting(Generic[Value]):
    """A descriptor for one argument of the Trainer: setting it stores the value that the argument's check returns."""

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: TrainerLimits | None, owner: type | None = None) -> Value:
        if trainer is None:  # read on the class, as help() does
            return cast("Value", self)
        return cast("Value", getattr(trainer._runner.settings, self._name))

    def __set__(self, trainer: TrainerLimits, value: Value) -> None:
        setattr(trainer._runner.settings, self._name, CHECKS[self._name](self._name, value))
        trainer.state.agenda.look()  # a running fit has to ask anew when it ends, logs and validates


class TrainerLimits:
    """The Trainer's limits: when training ends, the share of the data to use, and how often validation and logging happen."""

    state: RunState
    _runner: Runner

    max_epochs = _Setting[int](
        "The epoch at which training ends; -1 for no limit.  May be set in a running fit, as the next three, "
        "``log_every_n_steps``, ``val_check_interval`` and ``check_val_every_n_epoch``."
    )
    max_steps = _Setting[int]("The step at which training ends; -1 for no limit.")
    min_epochs = _Setting[int]("The epochs that training lasts at least: a stop request waits for them.")
    min_steps = _Setting[int]("The steps that training lasts at least: a stop request waits for them.")
    accumulate_grad_batches = _Setting[int]("The number of micro-batches in a step.")
    log_every_n_steps = _Setting[int]("The number of steps between two flushes of logged values.")
    limit_train_batches = _Setting[float](
        "How many batches an epoch has at most (int), or which share of the loader's (float)."
    )
    limit_val_batches = _Setting[float]("The same for each validation loader.")
    limit_test_batches = _Setting[float]("The same for each test loader.")
    limit_predict_batches = _Setting[float]("The same for each prediction loader.")

    @property
    def gradient_clip_val(self) -> float | None:
        """The largest norm, or value, of gradients; None for no limit."""
        clip = self._runner.settings.clip
        return None if clip is None else clip.value

    @gradient_clip_val.setter
    def gradient_clip_val(self, value: float | None) -> None:
        self._runner.settings.clip = as_clip(value, self.gradient_clip_algorithm)

    @property
    def gradient_clip_algorithm(self) -> str | None:
        """The clipping algorithm: "norm" (of all gradients together) or "value" (of each element); None for no limit."""
        clip = self._runner.settings.clip
        return None if clip is None else clip.algorithm

    @gradient_clip_algorithm.setter
    def gradient_clip_algorithm(self, value: str | None) -> None:
        self._runner.settings.clip = as_clip(self.gradient_clip_val, value)

    @property
    def accumulation_schedule(self) -> Mapping[int, int] | None:
        """Maps an epoch to ``accumulate_grad_batches`` from then on; None: the same in all.  Set it before optimizers are built."""
        return self._runner.settings.accumulation_schedule

    @accumulation_schedule.setter
    def accumulation_schedule(self, schedule: Mapping[int, int] | None) -> None:
        settings = self._runner.settings
        if schedule is not None:
            settings.accumulation_schedule = check_schedule(settings, schedule)
        elif settings.accumulation_schedule is not None:
            settings.accumulation_schedule = None
            settings.left_by_schedule = settings.accumulate_grad_batches  # the schedule's value stays, as in Lightning

    @property
    def val_check_interval(self) -> Any:
        """The interval between validations: micro-batches (int), a fraction of an epoch (float), or a number of steps or a time."""
        return self._runner.settings.val_check_interval

    @val_check_interval.setter
    def val_check_interval(self, value: Any) -> None:
        self._runner.settings.val_check_interval, _ = check_cadence(value, self.check_val_every_n_epoch)
        self.state.agenda.look()

    @property
    def check_val_every_n_epoch(self) -> int | None:
        """Validation runs in every n-th epoch; None: ``val_check_interval`` counts micro-batches across epochs."""
        return self._runner.settings.check_val_every_n_epoch

    @check_val_every_n_epoch.setter
    def check_val_every_n_epoch(self, value: int | None) -> None:
        _, self._runner.settings.check_val_every_n_epoch = check_cadence(self.val_check_interval, value)
        self.state.agenda.look()

    @property
    def num_sanity_val_steps(self) -> float:
        """The number of batches of each validation loader that run before training; infinity for all."""
        return self._runner.settings.num_sanity_val_steps

    @property
    def fast_dev_run(self) -> int:
        """The number of batches of a trial run; 0 for a normal run."""
        return self._runner.settings.fast_dev_run

    @property
    def overfit_batches(self) -> float:
        """The number of batches (int), or fraction of them (float), that training and validation use; 0 for all."""
        return self._runner.settings.overfit_batches

    @property
    def default_root_dir(self) -> str:
        """The default folder for logs and checkpoints."""
        return self._runner.settings.default_root_dir

    @property
    def root_folder(self) -> str:
        """``default_root_dir`` as an absolute path, resolved when the Trainer was made."""
        return self._runner.root_folder

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return self._runner.settings.num_nodes
