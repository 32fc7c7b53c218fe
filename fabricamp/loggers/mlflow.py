"""Logs to MLflow."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from fabricamp._utils.optional_packages import load
from fabricamp._utils.say_once import say_once
from fabricamp._utils.types import StateDict
from fabricamp.checkpoint import plain
from fabricamp.errors import ConfigError, NoThreadError
from fabricamp.loggers.base import Logger, give_numbers_of_its_own
from fabricamp.loggers.dummy import Silent
from fabricamp.loggers.run_folder import flattened, writes
from fabricamp.loggers.uploads import Saved, Uploads
from fabricamp.loggers.write_queue import WriteQueue, in_time

ANSWER_SECONDS = 10.0
"""How long the start of a run waits for the server; logged values wait for the server in memory."""
LAST_SECONDS = 30.0
"""How long the end of a run waits for unsent values."""

_STATUS = {"success": "FINISHED", "finished": "FINISHED", "failed": "FAILED"}
_UNREACHABLE = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "RESOURCE_EXHAUSTED")
"""MLflow's error codes for temporary problems; MLflow has no special code for a server that cannot be reached."""


class _Item(NamedTuple):
    """The values of a step, or hyper-parameters, or the final status of the run."""

    step: int = 0
    milliseconds: int = 0
    metrics: Mapping[str, float] = {}
    params: Mapping[str, str] = {}
    status: str = ""


class _RunInfo(Protocol):
    run_id: str
    experiment_id: str
    lifecycle_stage: str


class _Run(Protocol):
    info: _RunInfo


class _Experiment(Protocol):
    experiment_id: str
    lifecycle_stage: str


class _Pending(Protocol):
    def wait(self) -> object: ...


class _Client(Protocol):
    """What is asked of MLflow's client; each call may wait for the server for minutes."""

    def get_experiment_by_name(self, name: str) -> _Experiment | None: ...

    def create_experiment(self, name: str, artifact_location: str | None) -> str: ...

    def create_run(self, experiment_id: str, *, tags: object) -> _Run: ...

    def get_run(self, run_id: str) -> _Run: ...

    def update_run(self, run_id: str, *, status: str) -> object: ...

    def delete_run(self, run_id: str) -> object: ...

    def log_batch(self, run_id: str, **values: Any) -> _Pending | None:
        """Logs metrics or parameters; returns an object if it sends them in the background."""
        ...

    def log_artifact(self, run_id: str, local_path: str, artifact_path: str) -> object: ...

    def log_artifacts(self, run_id: str, local_dir: str, artifact_path: str) -> object: ...

    def set_tag(self, run_id: str, key: str, value: str) -> object: ...

    def set_terminated(self, run_id: str, status: str) -> object: ...


class MLFlowLogger(Logger):
    """Logs to MLflow: a tracking server, or files below ``save_dir`` that ``mlflow ui`` shows.

    A background thread sends the values, so no step waits for a server.  If the server cannot be reached, values are lost with a
    warning, and the run continues.  A resumed run continues the same run of MLflow, where steps after the checkpoint have two
    points.  Newer versions of MLflow refuse files unless the variable ``MLFLOW_ALLOW_FILE_STORE`` is "true": if the variable is
    not set, this logger sets it for its process.

    Args:
        experiment_name: the experiment; created if it does not exist.
        run_name: the name of the run; None lets MLflow choose.
        tracking_uri: the server's address; None uses ``MLFLOW_TRACKING_URI``, and without that variable files in ``save_dir``.
        tags: tags of the run.
        save_dir: the folder of the files, if there is no ``tracking_uri``.
        log_model: True uploads ModelCheckpoint's best and last files as artifacts when a fit ends, "all" each when it is saved.
        prefix: a text before each metric's name.
        artifact_location: where a new experiment keeps its artifacts; None lets MLflow choose.
        run_id: a run to continue; None creates a new one.
        synchronous: passed to MLflow; False uses MLflow's own queue.

    Raises:
        ModuleNotFoundError: MLflow is not installed.
        ConfigError: ``log_model`` has another value, or there is neither ``tracking_uri`` nor ``save_dir``.

    Example:
        >>> logger = MLFlowLogger("digits", run_name="first", save_dir="mlruns")  # doctest: +SKIP
    """

    def __init__(
        self,
        experiment_name: str = "lightning_logs",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, Any] | None = None,
        save_dir: str | os.PathLike[str] | None = "./mlruns",
        log_model: Literal["all"] | bool = False,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        synchronous: bool | None = None,
    ) -> None:
        self._uploads = Uploads("MLFlowLogger", log_model, self._upload)
        _import_mlflow("mlflow.tracking")
        address = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._uri = address or _files_in(save_dir)
        self.save_dir = _folder_of(self._uri) if address or save_dir is None else os.fspath(save_dir)
        self.tags = dict(tags or {}) | ({} if run_name is None else {"mlflow.runName": run_name})
        self._experiment_name = experiment_name
        self._artifact_location = artifact_location
        self._prefix = prefix
        self._options = {} if synchronous is None else {"synchronous": synchronous}
        self._run_id = run_id
        self._given = run_id is not None
        self._experiment_id: str | None = None
        self._asked = False  # whether the run was requested
        self._made = False  # whether this logger created the run, and the run is still empty
        self._goes_on = False
        self._clear()

    def _clear(self) -> None:
        self._lock = threading.RLock()
        self._queue: WriteQueue[_Item] = WriteQueue(self._send)
        self._mlflow_client: _Client | None = None
        self._begun = False

    # -- the run -----------------------------------------------------------------------------------------------------------------

    @property
    def experiment(self) -> Any:
        """The ``MlflowClient``, for calls without a method here; does nothing on ranks other than 0."""
        if not writes():
            return Silent()
        self.identity()
        return self._client()

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run; the first use on rank 0 creates the run.  None while the server cannot be reached."""
        if writes():
            self.identity()
        return self._run_id

    @property
    def experiment_id(self) -> str | None:
        """MLflow's id of the experiment; known whenever :attr:`run_id` is."""
        if writes():
            self.identity()
        return self._experiment_id

    @property
    def name(self) -> str | None:  # type: ignore[override]
        """The ``experiment_id``."""
        return self.experiment_id

    @property
    def version(self) -> str | None:
        """The ``run_id``."""
        return self.run_id

    def identity(self) -> tuple[str | None, str | None]:
        """Returns the ids of experiment and run; the first call creates both, if the server answers in time."""
        if not self._asked:
            self._asked = True
            with self.trouble.guard():
                self._ask(self._begin)
        return self._experiment_id, self._run_id

    def join(self, identity: tuple[str | None, str | None]) -> None:
        """Adopts rank 0's experiment and run."""
        self._experiment_id, self._run_id = identity
        self._asked = True

    def give_back(self) -> None:
        """Deletes a run that nothing was logged to."""
        if self._made:
            with contextlib.suppress(ConfigError):  # the run has failed for another reason
                self._ask(self._delete)
            self._run_id = None
            self._made = False
            self._asked = False

    def state_dict(self) -> StateDict:
        """Returns the run's id."""
        return {"run_id": self._run_id} if self._run_id is not None and writes() else {}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continues that run, if it is in this experiment and no ``run_id`` was given."""
        run_id = state_dict.get("run_id")
        if run_id is not None and run_id != self._run_id and not self._given and writes():
            self._ask(lambda: self._move_to(run_id))

    # -- logging -----------------------------------------------------------------------------------------------------------------

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Logs a point for each metric; removes characters that MLflow does not allow from names."""
        if metrics and writes():
            values = {_allowed(name): float(value) for name, value in self._named(metrics).items()}
            self._put(_Item(self._at(step), int(time.time() * 1000), metrics=values))

    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        """Logs the hyper-parameters as texts, nested ones as ``outer/inner``, each cut to the length that MLflow allows.

        Logs none if a number or a flag among them comes from the environment, because a server may show them to others.
        """
        if not writes() or self._goes_on:
            return
        if self.private:
            say_once(
                "MLFlowLogger leaves the hyper-parameters out: a number or a flag among them comes from the environment, and "
                "MLflow may show it to others"
            )
            return
        texts = {_allowed(name): str(value) for name, value in flattened(plain(params)).items()}
        self._put(_Item(params=texts))

    def barrier(self, step: int) -> None:
        """Returns once the server has all values so far, or at once while its requests fail."""
        self._queue.wait_unless_failing()

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Uploads the file if ``log_model="all"``; with True, files that are still kept are uploaded at the end."""
        if writes():
            self._uploads.after_save(checkpoint_callback, self.trouble)

    def finalize(self, status: str) -> None:
        """Sets the run's final status: "success" is FINISHED, "failed" FAILED; others, such as "killed", are upper-cased."""
        if self._asked and writes():
            self._uploads.finish(self.trouble, succeeded=status == "success", answers=not self._queue.failing)
            self._put(_Item(status=_STATUS.get(status, status.upper())))

    def close(self) -> None:
        """Waits up to 30 seconds for unsent values."""
        self._queue.close(LAST_SECONDS)
        self._report_failures()
        self._clear()

    # -- calls to MLflow; each may wait for the server for minutes ---------------------------------------------------------------

    def _ask(self, call: Callable[[], object]) -> None:
        """Calls ``call``; raises :class:`ConfigError` if MLflow refuses, ``OSError`` if MLflow cannot be reached in time."""
        try:
            in_time(call, ANSWER_SECONDS, self._uri)
        except (TimeoutError, NoThreadError):
            raise
        except Exception as error:
            words = str(error) or type(error).__name__
            if self.save_dir is None and getattr(error, "error_code", None) in _UNREACHABLE:
                raise ConnectionError(words) from error
            raise ConfigError(
                f"MLFlowLogger cannot log to {self._uri}: {words}; give another tracking_uri, save_dir or run_id, or logger=False"
            ) from error

    def _client(self) -> _Client:
        if self._mlflow_client is None:
            if self.save_dir is not None:
                os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            client: _Client = _import_mlflow("mlflow.tracking").MlflowClient(self._uri)
            self._mlflow_client = client
        return self._mlflow_client

    def _begin(self) -> str:
        """Creates the run, or sets the given run to RUNNING, unless that is done; returns the run's id."""
        with self._lock:
            if self._begun and self._run_id is not None:
                return self._run_id
            client = self._client()
            if self._run_id is None:
                self._experiment_id = self._find_experiment(client)
                context = _import_mlflow("mlflow.tracking.context.registry")
                run = client.create_run(self._experiment_id, tags=context.resolve_tags(self.tags))
                self._run_id = run.info.run_id
                self._made = True
            else:
                self._experiment_id = client.get_run(self._run_id).info.experiment_id
                client.update_run(self._run_id, status="RUNNING")
            self._begun = True
            return self._run_id

    def _find_experiment(self, client: _Client) -> str:
        experiment = client.get_experiment_by_name(self._experiment_name)
        if experiment is None or experiment.lifecycle_stage == "deleted":
            try:
                created = client.create_experiment(self._experiment_name, self._artifact_location)
            except Exception:
                # Another run may have created the experiment meanwhile.
                experiment = client.get_experiment_by_name(self._experiment_name)
                if experiment is None or experiment.lifecycle_stage == "deleted":
                    raise
            else:
                return created
        return str(experiment.experiment_id)

    def _move_to(self, run_id: str) -> None:
        with self._lock:
            client = self._client()
            try:
                info = client.get_run(run_id).info
            except Exception as error:
                if getattr(error, "error_code", None) == "RESOURCE_DOES_NOT_EXIST":  # the run is from another store
                    return
                raise
            if info.lifecycle_stage == "deleted" or info.experiment_id != self._experiment_id:
                return
            if self._made:
                self._delete()
            self._run_id = run_id
            self._begun = False
            self._goes_on = True
            self._begin()

    def _delete(self) -> None:
        if self._run_id is not None:
            self._client().delete_run(self._run_id)
        self._made = False

    def _send(self, items: Sequence[_Item]) -> None:
        run_id = self._begin()
        entities = importlib.import_module("mlflow.entities")
        validation = importlib.import_module("mlflow.utils.validation")
        metrics = [
            entities.Metric(name, value, item.milliseconds, item.step)
            for item in items
            for name, value in item.metrics.items()
        ]
        longest = validation.MAX_PARAM_VAL_LENGTH
        params = [entities.Param(name, text[:longest]) for item in items for name, text in item.params.items()]
        for kind, values, most in (("params", params, 100), ("metrics", metrics, 1000)):  # MLflow's limits
            for first in range(0, len(values), most):
                self._made = False
                pending = self._client().log_batch(run_id, **{kind: values[first : first + most]}, **self._options)
                if pending is not None:
                    pending.wait()
        for item in items:
            if item.status:
                self._client().set_terminated(run_id, item.status)

    def _upload(self, saved: Saved) -> None:
        """Uploads a file to ``model/checkpoints``, into a folder of its name; tags the run with the path of the best file."""
        run_id = self._begin()
        client = self._client()
        folder = f"model/checkpoints/{saved.name}"
        if not saved.is_local:
            raise ConfigError(f"MLflow takes local files, not {saved.path}; leave log_model out")
        upload = client.log_artifacts if Path(saved.path).is_dir() else client.log_artifact
        upload(run_id, saved.path, folder)
        if "best" in saved.aliases:
            client.set_tag(run_id, "best_checkpoint", f"{folder}/{Path(saved.path).name}")

    # -- the queue ---------------------------------------------------------------------------------------------------------------

    def _put(self, item: _Item) -> None:
        self._asked = True
        self._queue.put(item)
        self._report_failures()

    def _report_failures(self) -> None:
        for reason, items, _ in self._queue.failures():
            self.trouble.tell(reason)
            steps = [item.step for item in items if isinstance(item, _Item) and item.metrics]
            self.trouble.lose(len(steps), steps)

    def __getstate__(self) -> StateDict:
        own = ("_mlflow_client", "_lock", "_queue", "_begun")  # one of each per process
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: StateDict) -> None:
        self.__dict__.update(state)
        self._clear()


def _import_mlflow(module: str) -> Any:
    imported = load(module, "MLFlowLogger needs MLflow, which is not installed: pip install mlflow-skinny")
    give_numbers_of_its_own("mlflow", "urllib3", "databricks")
    return imported


def _files_in(save_dir: str | os.PathLike[str] | None) -> str:
    if save_dir is None:
        raise ConfigError("MLFlowLogger(tracking_uri=None, save_dir=None): give one of them, such as save_dir='mlruns'")
    return Path(save_dir).expanduser().absolute().as_uri()


def _folder_of(uri: str) -> str | None:
    """Returns the folder of a ``file:`` address or a path; None for a server or a database."""
    uris: Any = _import_mlflow("mlflow.utils.uri")
    if not uris.is_local_uri(uri):
        return None
    paths: Any = _import_mlflow("mlflow.utils.file_utils")
    return str(Path(paths.local_file_uri_to_path(uri)).absolute())


def _allowed(name: str) -> str:
    return re.sub(r"[^\w/. -]+", "", name, flags=re.ASCII)[:250]
