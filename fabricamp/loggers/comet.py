"""Logs to Comet."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

from fabricamp._utils.optional_packages import load
from fabricamp._utils.say_once import say_once
from fabricamp.arguments.checks import check_names
from fabricamp.checkpoint import plain
from fabricamp.errors import ConfigError
from fabricamp.loggers.base import Logger, give_numbers_of_its_own
from fabricamp.loggers.dummy import Silent
from fabricamp.loggers.run_folder import flattened, writes
from fabricamp.loggers.write_queue import Call, WriteQueue

if TYPE_CHECKING:
    from torch import nn

    from fabricamp._utils.types import StateDict

__all__ = ["CometLogger"]

LAST_SECONDS = 30.0
"""How many seconds the end of a fit waits for unsent values."""

_ARGUMENTS = ("api_key", "workspace", "project", "experiment_key", "mode", "online", "prefix")
_QUIET = {"auto_metric_logging": False, "auto_output_logging": False}
"""Disables the package's own logging of torch metrics and of output: each would slow steps, or disturb the progress bar."""


class _Experiment(Protocol):
    """What is asked of the package's experiment."""

    @property
    def alive(self) -> bool:
        """Whether the server takes its values."""
        ...

    @property
    def disabled(self) -> bool: ...

    def log_metrics(self, values: Mapping[str, float], *, step: int | None, epoch: int | None) -> object: ...

    def log_parameters(self, values: Mapping[str, object]) -> object: ...

    def set_model_graph(self, graph: str) -> object: ...

    def flush(self) -> object: ...

    def end(self) -> object: ...


class CometLogger(Logger):
    """Logs to an experiment of Comet, from a background thread: no step waits for the server.

    If the server cannot be reached, values are lost with a warning, and the run continues.  ``online=False`` needs no server: the
    logger leaves an archive for ``comet upload`` when the experiment ends.  A resumed run continues its experiment, unless
    ``experiment_key`` is given; it logs the steps after the checkpoint once more, so their values appear twice.  The
    experiment stays open after ``fit``, and ends with the process.  Needs ``pip install comet-ml``.

    A run begins with four calls: :meth:`identity` chooses a key on rank 0, :meth:`join` gives it to every rank,
    :meth:`load_state_dict` may replace it by the key in a checkpoint, and :meth:`begin` opens the experiment.

    A pickle of the logger contains ``api_key`` if it was given: processes that the Trainer starts need it.

    Args:
        api_key: the key; None uses the one in the environment or in the package's configuration.
        workspace: the workspace; None uses the default one.
        project: the project; None uses Comet's default.
        experiment_key: the experiment to continue, or to create; None creates a new one.
        mode: "get", "create" or "get_or_create", as in ``comet_ml.start``.
        online: False writes an archive; None follows the package's configuration.
        prefix: a text before each metric's name.
        **kwargs: options of ``comet_ml.ExperimentConfig``, such as ``name``, ``tags`` and ``offline_directory``.

    Raises:
        ConfigError: the package is not installed, there is no API key, or ``ExperimentConfig`` has no such option.

    Example:
        >>> logger = CometLogger(project="digits", online=False)  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        api_key: str | None = None,
        workspace: str | None = None,
        project: str | None = None,
        experiment_key: str | None = None,
        mode: Literal["get_or_create", "get", "create"] | None = None,
        online: bool | None = None,
        prefix: str | None = None,
        **kwargs: Any,
    ) -> None:
        package = _package()
        known = inspect.signature(package.ExperimentConfig).parameters
        check_names("CometLogger has no option", kwargs, (*_ARGUMENTS, *known), where="CometLogger")
        settings = package.get_config()
        online = settings["comet.start.online"] if online is None else online
        if online is not False and not (api_key or settings["comet.api_key"]):
            raise ConfigError(
                "CometLogger has no API key: set COMET_API_KEY, give api_key=..., or online=False, which needs none"
            )
        self._given = experiment_key or settings["comet.experiment_key"]
        """The key that the user gave; None if the logger chooses one, or a checkpoint does."""
        self._experiment_key = self._given
        self._goes_on = False
        """Whether the run continues the experiment of a checkpoint."""
        # Arguments of comet_ml.start; those of its ExperimentConfig are in _config.
        self._where = {"api_key": api_key, "workspace": workspace, "project": project, "online": online}
        self._where["mode"] = mode or "get_or_create"
        self._config = {**_QUIET, **kwargs}
        self.save_dir = kwargs.get("offline_directory") if online is False else None
        # Past a subclass's property, which may have no setter.
        vars(self)["name"] = project or settings["comet.project_name"]
        self._prefix = prefix or ""
        self._experiment: _Experiment | None = None
        self._set_up_process()

    def _set_up_process(self) -> None:
        """Creates what each process has for itself: a lock, and the queue with its thread."""
        self._process = os.getpid()
        # Guards the opening of the experiment.  It stays for later fits: after a close that timed out, the earlier thread may still
        # be opening the experiment, and a second one must not be opened beside it.
        self._lock = threading.RLock()
        self._queue: WriteQueue[Call[_Experiment]] = WriteQueue(self._send)

    def _leave_parent(self) -> None:
        """In a forked process, leaves the experiment, the lock and the queue to the parent: their threads do not exist here."""
        if self._process != os.getpid():
            self._experiment = None
            self._set_up_process()

    # -- the experiment ----------------------------------------------------------------------------------------------------------

    @property
    def experiment(self) -> Any:
        """The package's experiment, for calls without a method here; does nothing on ranks other than 0.

        The first use opens the experiment, and waits for that.
        """
        return self._opened() if writes() else Silent()

    @property
    def version(self) -> str | None:
        """The key of the experiment; None until a run or the first use chooses one."""
        return self._experiment_key

    def identity(self) -> str:
        """Returns the experiment's key, and chooses one if there is none.

        Does not open the experiment: :meth:`load_state_dict` comes later and may set another key.
        """
        self._experiment_key = self._experiment_key or _package().generate_guid()
        return self._experiment_key

    def join(self, identity: str) -> None:
        """Adopts rank 0's key."""
        self._experiment_key = identity

    def state_dict(self) -> StateDict:
        """Returns the experiment's key."""
        return {"experiment_key": self._experiment_key}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Sets the key in ``state_dict``, to continue its experiment, if no key was given and no experiment is open yet."""
        key = state_dict.get("experiment_key")
        if key and not self._given and self._experiment is None:
            self._goes_on = True
            self._experiment_key = key

    # -- logging -----------------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Makes the thread open the experiment, by a call that does nothing else."""
        self._put(Call(lambda _: None))

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Logs a point for each metric, by step and epoch."""
        values = self._named({name: float(value) for name, value in metrics.items() if name != "epoch"})
        epoch = int(metrics["epoch"]) if "epoch" in metrics else None
        if values:
            step = self._at(step)
            self._put(Call(lambda experiment: experiment.log_metrics(values, step=step, epoch=epoch), step))

    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        """Logs the hyper-parameters, nested ones as ``outer/inner``.

        A number or a flag that comes from the environment may be a secret that others would see at Comet; then none are logged.
        """
        if self.private:
            say_once(
                "CometLogger sends no hyper-parameters: a number or a flag among them comes from the environment, and Comet shows "
                "it to others"
            )
            return
        values = flattened(plain(params))
        self._put(Call(lambda experiment: experiment.log_parameters(values)))

    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        """Logs the module's printed form."""
        if not self._goes_on:
            text = str(model)
            self._put(Call(lambda experiment: experiment.set_model_graph(text)))

    def barrier(self, step: int) -> None:
        """Returns once the package has stored all values so far, on disk or on the server; at once while that fails."""
        self._leave_parent()
        if self._queue.wait_unless_failing() and self._experiment is not None:
            self._experiment.flush()

    def close(self) -> None:
        """Waits up to 30 seconds for unsent values.

        Ends the experiment in a process that the Trainer started, which ends with the fit.  In the user's process it stays open.
        """
        self._leave_parent()
        self._queue.close(LAST_SECONDS)
        self._queue.report(self.trouble)
        if self._experiment is not None and multiprocessing.parent_process() is not None:
            self._experiment.end()
            self._experiment = None
        self._queue = WriteQueue(self._send)

    # -- the experiment and the queue --------------------------------------------------------------------------------------------

    def _opened(self) -> _Experiment:
        """Returns the experiment, opened on the first call; called by the queue's thread and by :attr:`experiment`."""
        self._leave_parent()
        with self._lock:
            if self._experiment is None:
                package = _package()
                config = package.ExperimentConfig(**self._config)
                start = partial(package.start, experiment_key=self.identity(), experiment_config=config, **self._where)
                experiment: _Experiment = start()
                if experiment.disabled:  # Lightning's logger opened it offline and disabled it
                    experiment.end()
                    experiment = start()
                self._experiment = experiment
            return self._experiment

    def _send(self, items: Sequence[Call[_Experiment]]) -> None:
        """Makes the calls on the experiment; called by the queue's thread."""
        experiment = self._opened()
        if not experiment.alive:
            raise ConnectionError("Comet's server cannot be reached, or refuses the experiment")
        for item in items:
            item.call(experiment)

    def _put(self, item: Call[_Experiment]) -> None:
        """Queues a call for the thread, on rank 0; reports calls that have failed meanwhile."""
        if not writes():
            return
        self._leave_parent()
        self._queue.put(item)
        self._queue.report(self.trouble)

    # -- pickles -----------------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> StateDict:
        own = ("_lock", "_queue", "_process")  # see _set_up_process
        return {name: value for name, value in self.__dict__.items() if name not in own} | {"_experiment": None}

    def __setstate__(self, state: StateDict) -> None:
        self.__dict__.update(state)
        self._set_up_process()


def _package() -> Any:
    package = load("comet_ml", "CometLogger needs the package comet_ml: pip install comet-ml")
    # Its threads draw random numbers, which must not change those that the run draws from Python's generator.
    give_numbers_of_its_own("comet_ml", "urllib3")
    return package
