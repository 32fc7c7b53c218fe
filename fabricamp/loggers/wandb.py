"""Logs to Weights & Biases."""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import os
import secrets
import string
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from fabricamp._utils.optional_packages import load
from fabricamp.arguments.checks import check_names
from fabricamp.checkpoint import plain
from fabricamp.errors import ConfigError
from fabricamp.loggers.base import Logger, give_numbers_of_its_own
from fabricamp.loggers.dummy import Silent
from fabricamp.loggers.run_folder import edges_of, name_of_runs, showable, writes
from fabricamp.loggers.uploads import Uploads
from fabricamp.loggers.write_queue import Call, WriteQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn

    from fabricamp._utils.types import StateDict
    from fabricamp.loggers.uploads import Saved

LAST_SECONDS = 30.0
"""How long the end of a fit waits for unsent values."""

_AXIS = "trainer/global_step"
_OWN = (
    "name", "save_dir", "version", "offline", "dir", "id", "anonymous", "project", "log_model", "experiment", "prefix",
    "checkpoint_name", "add_file_policy",
)  # fmt: skip


class _Config(Protocol):
    def update(self, values: object, *, allow_val_change: bool) -> object: ...


class _Run(Protocol):
    """What is asked of the package's run."""

    id: str

    @property
    def config(self) -> _Config: ...

    def log(self, row: Mapping[str, object]) -> object: ...

    def define_metric(self, name: str, step_metric: str | None = None, *, step_sync: bool | None = None) -> object: ...

    def watch(self, model: nn.Module, **options: Any) -> object: ...

    def unwatch(self, model: nn.Module | None) -> object: ...

    def log_artifact(self, artifact: object, *, aliases: list[str]) -> object: ...

    def finish(self, *, exit_code: int) -> object: ...


class WandbLogger(Logger):
    """Logs to a run of Weights & Biases, which rank 0 opens before the first step and leaves open after ``fit``.

    In a fit a background thread passes the values to the package, so no step waits for the package.  Training continues if the
    server cannot be reached; ``offline=True`` or ``WANDB_MODE=offline`` needs no server.  A resumed fit continues its run, unless
    ``id`` is given; values after the checkpoint appear twice.  A run that the script opened by ``wandb.init`` is used as it is.
    Needs ``pip install wandb``.

    Args:
        name: the run's name on its page.
        save_dir: the folder for ``wandb``'s files, and for checkpoints in ``project/id``.
        version: another name of ``id``.
        offline: writes below ``save_dir`` only; ``wandb sync`` uploads it.
        dir: used as ``save_dir``, if ``save_dir`` is None.
        id: the run to continue, or to create; None uses ``WANDB_RUN_ID``, else creates a new run.
        anonymous: allows users without an account, if the package still offers that.
        project: the project of the run; None uses ``WANDB_PROJECT``, else "fabricamp_logs".
        log_model: True uploads ModelCheckpoint's best and last files as artifacts when a fit ends, "all" each when it is saved.
        experiment: a run that is open already.
        prefix: a text before each metric's name.
        checkpoint_name: the name of these artifacts; None means ``model-`` and the run's id.
        add_file_policy: "mutable" copies a file before the upload, "immutable" reads the file in place.
        **kwargs: options of ``wandb.init``, such as ``entity``, ``group`` and ``tags``.

    Raises:
        ConfigError: the package is not installed, ``log_model`` has another value, or ``wandb.init`` has no such option.

    Example:
        >>> logger = WandbLogger(project="digits", offline=True)
    """

    _queue: WriteQueue[Call[_Run]] | None = None
    """The thread's queue during a fit."""

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | os.PathLike[str] | None = ".",
        version: str | None = None,
        offline: bool = False,
        dir: str | os.PathLike[str] | None = None,  # noqa: A002 - Lightning's
        id: str | None = None,  # noqa: A002 - Lightning's
        anonymous: bool | None = None,
        project: str | None = None,
        log_model: Literal["all"] | bool = False,
        experiment: Any = None,
        prefix: str = "",
        checkpoint_name: str | None = None,
        add_file_policy: str = "mutable",
        **kwargs: Any,
    ) -> None:
        self._uploads = Uploads("WandbLogger", log_model, self._upload)
        if add_file_policy not in ("mutable", "immutable"):
            raise ConfigError(f"WandbLogger(add_file_policy={add_file_policy!r}): choose 'mutable' or 'immutable'")
        self._checkpoint_name = checkpoint_name
        self._add_file_policy = add_file_policy
        known = inspect.signature(_package().init).parameters
        check_names("WandbLogger has no option", kwargs, (*_OWN, *known), where="WandbLogger")
        self.save_dir = os.fspath(save_dir or dir or os.environ.get("WANDB_DIR") or ".")
        self._folder = Path(self.save_dir).expanduser().absolute()
        project = project or os.environ.get("WANDB_PROJECT") or name_of_runs()
        self._options = {"name": name, "project": project, "dir": str(self._folder), "resume": "allow"}
        if anonymous:
            self._options["anonymous"] = "allow"
        if offline:
            self._options["mode"] = "offline"
        self._options |= kwargs
        vars(self)["name"] = project  # past a subclass's property, which may have no setter
        self._root = self._folder / project
        wanted = version or id or os.environ.get("WANDB_RUN_ID")
        self._id = None if wanted is None else str(wanted)
        self._id_given = wanted is not None
        self._folder_name = self._id
        self._prefix = prefix
        self._experiment: _Run | None = experiment
        self._attach_id: str | None = None
        self._opened_by: int | None = None
        self._unreachable: str | None = None
        self._status = "success"
        self._watched: list[tuple[nn.Module, dict[str, Any]]] = []

    @property
    def experiment(self) -> Any:
        """The run, for calls without a method here; does nothing on ranks other than 0."""
        if not writes():
            return Silent()
        if self._experiment is None:
            self._experiment = self._run()
            self._id = str(self._experiment.id)
        watched = self._watched
        self._watched = []
        for model, options in watched:
            self._experiment.watch(model, **options)
        return self._experiment

    @property
    def version(self) -> str | None:
        """The id of the run; None until a run or the first use chooses one."""
        return self._id if self._experiment is None else str(self._experiment.id)

    @property
    def log_dir(self) -> str | None:
        """The folder of this run, ``save_dir/project/id``, once the id is known; wandb's own files are beside this folder."""
        return None if self._folder_name is None else str(self._root / self._folder_name)

    def run_folders(self) -> list[Path]:
        """Returns the folders of this run and of the project's other runs, newest first."""
        own = super().run_folders()
        folders = [folder for folder in self._root.glob("*") if folder.is_dir()]
        return list(dict.fromkeys([*own, *sorted(folders, key=_changed, reverse=True)]))

    def identity(self) -> str:
        """Returns the run's id; the run is opened later, because a checkpoint may name another."""
        self._id = self.version
        if self._id is None:
            run = _package().run
            self._id = _new_id() if run is None else str(run.id)
        self._folder_name = self._folder_name or self._id
        return self._id

    def join(self, identity: str) -> None:
        """Adopts rank 0's id."""
        self._id = identity
        self._folder_name = self._folder_name or identity

    def begin(self) -> None:
        """Opens the run, which takes a minute and a half if the server cannot be reached; later calls go through the thread."""
        if writes():
            with self._reaches():
                _ = self.experiment
            self._queue = WriteQueue(self._send, most_at_once=1)  # so only the failed steps are reported as lost
            self._queue.start()

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Logs one row of the run's history; ``step`` is ``trainer/global_step``, the axis of all charts."""
        self._log(self._named(metrics), step)

    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        """Writes the hyper-parameters to the run's ``config``; writes none if the environment decides one that is no string.

        Such values may only go into files that only this user reads, but a server shows a run to others.
        """
        if not writes():
            return
        if self.private:
            warnings.warn(
                "WandbLogger sends no hyper-parameters: the environment decides numbers, flags or keys among them, which others "
                "would see; send what they may see by logger.experiment.config.update({...})",
                stacklevel=2,
            )
            return
        values = showable(plain(params))
        self._do(lambda run: run.config.update(values, allow_val_change=True))

    def watch(
        self, model: nn.Module, log: str | None = "gradients", log_freq: int = 100, log_graph: bool = True
    ) -> None:
        """Logs histograms of gradients, parameters or "all", every ``log_freq`` batches, by hooks that slow each step.

        If no run is open yet, takes effect once one is: a checkpoint may name the run to continue.
        """
        if not writes():
            return
        self._watched.append((model, {"log": log, "log_freq": log_freq, "log_graph": log_graph}))
        if self._experiment is not None or self._attach_id is not None or _package().run is not None:
            _ = self.experiment

    def unwatch(self, model: nn.Module | None = None) -> None:
        """Ends :meth:`watch` for ``model``; for every model if None."""
        if model is None:
            self._watched = []
        else:
            self._watched = [(other, options) for other, options in self._watched if other is not model]
        if self._experiment is not None:
            self._experiment.unwatch(model)

    def log_table(
        self,
        key: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Logs a table: ``columns`` and the rows of ``data``, or a ``dataframe``."""
        if writes():
            self._log({key: _package().Table(columns=columns, data=data, dataframe=dataframe)}, step)

    log_text = log_table
    """Logs texts, as a table."""

    def log_histogram(
        self, name: str, counts: Sequence[float], limits: tuple[float, float], sums: tuple[float, float], step: int
    ) -> None:
        """Logs a histogram of equal bins between the limits."""
        if writes():
            self._log({name: _package().Histogram(np_histogram=(counts, edges_of(counts, limits)))}, step)

    def log_image(self, key: str, images: list[Any], step: int | None = None, **kwargs: list[Any]) -> None:
        """Logs images: tensors, arrays, PIL images or paths; ``kwargs`` are lists with one item per image (``caption``)."""
        self._log_media("image", key, images, step, kwargs)

    def log_audio(self, key: str, audios: list[Any], step: int | None = None, **kwargs: list[Any]) -> None:
        """Logs sounds: arrays or paths; ``kwargs`` are lists with one item per sound (``caption``, ``sample_rate``)."""
        self._log_media("audio", key, audios, step, kwargs)

    def log_video(self, key: str, videos: list[Any], step: int | None = None, **kwargs: list[Any]) -> None:
        """Logs videos: arrays or paths; ``kwargs`` are lists with one item per video (``caption``, ``fps``, ``format``)."""
        self._log_media("video", key, videos, step, kwargs)

    def _log_media(self, kind: str, key: str, given: object, step: int | None, options: dict[str, list[Any]]) -> None:
        """Logs a list of the package's objects of ``kind``: "image", "audio" or "video"."""
        if not isinstance(given, list) or any(len(values) != len(given) for values in options.values()):
            raise ConfigError(
                f"log_{kind}({key!r}): give a list of {kind}s, and options such as caption as lists as long"
            )
        if writes():
            of_each = [dict(zip(options, values, strict=True)) for values in zip(*options.values(), strict=True)]
            media = getattr(_package(), kind.capitalize())
            logged = [media(one, **more) for one, more in zip(given, of_each or [{}] * len(given), strict=True)]
            self._log({key: logged}, step)

    def use_artifact(self, artifact: str, artifact_type: str | None = None) -> Any:
        """Notes that the run uses an artifact, and returns the package's object of it."""
        return self.experiment.use_artifact(artifact, type=artifact_type)

    @staticmethod
    def download_artifact(
        artifact: str,
        save_dir: str | Path | None = None,
        artifact_type: str | None = None,
        use_artifact: bool | None = True,
    ) -> str | None:
        """Downloads an artifact to ``save_dir`` on rank 0 and returns its folder; other ranks get None.

        ``use_artifact``: a run that is open in this process notes that it uses the artifact.
        """
        if not writes():
            return None
        package = _package()
        if package.run is not None and use_artifact:
            found = package.run.use_artifact(artifact)
        else:
            found = package.Api().artifact(artifact, type=artifact_type)
        folder: str = found.download(root=None if save_dir is None else str(save_dir))
        return folder

    def state_dict(self) -> StateDict:
        """Returns the run's id."""
        return {"id": self.version}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continues that run, if no id was given and no run is open yet."""
        if state_dict.get("id") and not self._id_given and self._experiment is None and self._attach_id is None:
            self._id = state_dict["id"]

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Uploads the file if ``log_model="all"``; with True, files that are still kept are uploaded at the end."""
        if writes():
            self._uploads.after_save(checkpoint_callback, self.trouble)

    def barrier(self, step: int) -> None:
        """Returns once the package's service, which outlives a killed process, has all values so far; at once while it fails."""
        if self._queue is not None:
            self._queue.wait_unless_failing()

    def finalize(self, status: str) -> None:
        """Leaves the run open for use after ``fit``; the package ends the run with the process."""
        self._status = status

    def close(self) -> None:
        """Waits up to 30 seconds for unsent values; ends the run in a process that was started only for this fit."""
        queue = self._queue
        self._queue = None
        answers = True
        if queue is not None:
            answers = queue.close(LAST_SECONDS)
            queue.report(self.trouble)
        self._uploads.finish(self.trouble, succeeded=answers and self._status == "success")
        opened_here = self._opened_by == os.getpid() and multiprocessing.parent_process() is not None
        if self._experiment is not None and opened_here and answers:  # else finish would wait for ever
            self._experiment.finish(exit_code=int(self._status != "success"))
            self._experiment = None
        self._unreachable = None

    def _log(self, values: Mapping[str, object], step: int | None) -> None:
        row = values if step is None else {**values, _AXIS: step}
        if values and writes():
            self._do(lambda run: run.log(row), step)

    def _do(self, call: Callable[[_Run], object], step: int | None = None) -> None:
        """Calls ``call`` with the run: in a fit in the thread, otherwise at once."""
        if self._queue is not None:
            self._queue.put(Call(call, step))
            self._queue.report(self.trouble)
            return
        with self._reaches():
            call(self.experiment)

    def _send(self, calls: Sequence[Call[_Run]]) -> None:
        for call in calls:
            call.call(self.experiment)

    def _upload(self, saved: Saved) -> None:
        run: _Run = self.experiment
        name = self._checkpoint_name or f"model-{run.id}"
        artifact = _package().Artifact(name=name, type="model", metadata=saved.metadata)
        if not saved.is_local:
            artifact.add_reference(saved.path)
        elif Path(saved.path).is_dir():
            artifact.add_dir(saved.path, policy=self._add_file_policy)
        else:
            artifact.add_file(saved.path, name="model.ckpt", policy=self._add_file_policy)
        run.log_artifact(artifact, aliases=saved.aliases)

    def _run(self) -> _Run:
        """Returns the run that is open in this process or in the process that started it, else a new run."""
        package = _package()
        give_numbers_of_its_own("wandb", "urllib3")
        if self._attach_id is not None:
            attached: _Run = package._attach(self._attach_id)
            return attached
        if package.run is not None:
            warnings.warn(
                f"WandbLogger continues the run {package.run.id}, which is open in this process; call wandb.finish() before for a "
                "separate run",
                stacklevel=4,
            )
            running: _Run = package.run
            return running
        run: _Run = package.init(**{"id": self.identity(), **self._options})
        self._opened_by = os.getpid()
        run.define_metric(_AXIS)
        run.define_metric("*", step_metric=_AXIS, step_sync=True)
        return run

    @contextlib.contextmanager
    def _reaches(self) -> Iterator[None]:
        """Returns a context that raises ``ConnectionError`` (an ``OSError``) if the server cannot be reached.

        If opening the run failed, the next attempt is in the next fit, because each attempt waits for a minute and a half.
        """
        if self._unreachable is not None:
            raise ConnectionError(self._unreachable)
        errors = _package().errors
        try:
            yield
        except errors.AuthenticationError:
            raise
        except errors.CommError as error:
            if self._experiment is None:
                self._unreachable = str(error)
            raise ConnectionError(str(error)) from error

    def __getstate__(self) -> StateDict:
        run = self._experiment  # stays in this process; the other one attaches by its id
        attach_id = self._attach_id if run is None else getattr(run, "_attach_id", None)
        own = {"_experiment": None, "_attach_id": attach_id, "_id": self.version, "_opened_by": None, "_queue": None}
        return {**self.__dict__, **own}


def _package() -> Any:
    return load("wandb", "WandbLogger needs the package wandb: pip install wandb")


def _new_id() -> str:
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))


def _changed(folder: Path) -> float:
    """Returns when a run's folder, or that of its checkpoints, got or lost a file."""
    folders = (path for path in (folder, folder / "checkpoints") if path.exists())
    return max((path.stat().st_mtime for path in folders), default=0.0)
