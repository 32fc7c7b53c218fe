"""Logs to Comet."""

from __future__ import annotations

import importlib
import inspect
import multiprocessing
import os
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

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

__all__ = ["CometLogger"]

LAST_SECONDS = 30.0
"""How long the end of a fit waits for unsent values."""

_OWN = ("api_key", "workspace", "project", "experiment_key", "mode", "online", "prefix")
_QUIET = {"auto_metric_logging": False, "auto_output_logging": False}
"""Disables the package's own logging of torch metrics and of output: each would slow steps, or disturb the progress bar."""


class CometLogger(Logger):
    """Logs to an experiment of Comet, from a background thread: no step waits for the server.

    If the server cannot be reached, values are lost with a warning, and the run continues.  ``online=False`` needs no server: the
    logger leaves an archive for ``comet upload`` when the experiment ends.  A resumed run continues its experiment, unless
    ``experiment_key`` is given; values after the checkpoint appear twice.  The experiment stays open after ``fit``, and ends with
    the process.  Needs ``pip install "fabricamp[comet]"``.

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
        check_names("CometLogger has no option", kwargs, (*_OWN, *known), where="CometLogger")
        settings = package.get_config()
        online = settings["comet.start.online"] if online is None else online
        if online is not False and not (api_key or settings["comet.api_key"]):
            raise ConfigError(
                "CometLogger has no API key: set COMET_API_KEY, give api_key=..., or online=False, which needs none"
            )
        self._given = experiment_key or settings["comet.experiment_key"]
        self._experiment_key = self._given
        self._goes_on = False
        self._where = {"api_key": api_key, "workspace": workspace, "project": project, "online": online}
        self._where["mode"] = mode or "get_or_create"
        self._config = {**_QUIET, **kwargs}
        self.save_dir = kwargs.get("offline_directory") if online is False else None
        # Past a subclass's property, which may have no setter.
        vars(self)["name"] = project or settings["comet.project_name"]
        self._prefix = prefix or ""
        self._experiment: Any = None
        self._clear()

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
        """Returns the experiment's key; the experiment is opened later, because a checkpoint may name another."""
        self._experiment_key = self._experiment_key or _package().generate_guid()
        return self._experiment_key

    def join(self, identity: str) -> None:
        """Adopts rank 0's key."""
        self._experiment_key = identity

    def state_dict(self) -> dict[str, Any]:
        """Returns the experiment's key."""
        return {"experiment_key": self._experiment_key}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues that experiment, if no key was given and no experiment is open yet."""
        key = state_dict.get("experiment_key")
        if key and not self._given and self._experiment is None:
            self._goes_on = True
            self._experiment_key = key

    # -- logging -----------------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Lets the thread open the experiment."""
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

        Logs none if a number or a flag among them comes from the environment, because others would see that value.
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
        """Returns once the package has stored all values so far, on disk or on the server."""
        self._queue.wait()
        if self._experiment is not None:
            self._experiment.flush()

    def close(self) -> None:
        """Waits up to 30 seconds for unsent values; ends the experiment in a process that was started only for this fit."""
        self._queue.close(LAST_SECONDS)
        self._queue.report(self.trouble)
        if self._experiment is not None and multiprocessing.parent_process() is not None:
            self._experiment.end()
            self._experiment = None
        self._clear()

    # -- called by the thread ----------------------------------------------------------------------------------------------------

    def _opened(self) -> Any:
        with self._lock:
            if self._experiment is None:
                package = _package()
                config = package.ExperimentConfig(**self._config)
                start = partial(package.start, experiment_key=self.identity(), experiment_config=config, **self._where)
                experiment = start()
                if experiment.disabled:  # Lightning's logger opened it offline and disabled it
                    experiment.end()
                    experiment = start()
                self._experiment = experiment
            return self._experiment

    def _send(self, items: Sequence[Call]) -> None:
        experiment = self._opened()
        if not experiment.alive:
            raise ConnectionError("Comet's server cannot be reached, or refuses the experiment")
        for item in items:
            item.call(experiment)

    def _put(self, item: Call) -> None:
        if not writes():
            return
        if self._process != os.getpid():  # forked: neither this thread nor the experiment's exist here
            self._experiment = None
            self._clear()
        self._queue.put(item)
        self._queue.report(self.trouble)

    def _clear(self) -> None:
        self._lock = threading.RLock()
        self._queue: WriteQueue[Call] = WriteQueue(self._send)
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        own = ("_lock", "_queue", "_process")  # one of each per process
        return {name: value for name, value in self.__dict__.items() if name not in own} | {"_experiment": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._clear()


def _package() -> Any:
    try:
        package = importlib.import_module("comet_ml")
    except ModuleNotFoundError as error:
        raise ConfigError('CometLogger needs the package comet_ml: pip install "fabricamp[comet]"') from error
    give_numbers_of_its_own("comet_ml", "urllib3")
    return package
