"""Logs to TensorBoard's event files."""

from __future__ import annotations

import importlib
import os
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch

from fabricamp.errors import ConfigError
from fabricamp.loggers.dummy import Silent
from fabricamp.loggers.run_folder import RUNS, RunFolderLogger, edges_of, flattened, writes
from fabricamp.loggers.write_queue import Record
from fabricamp.precision.float8_linears import plain_linears
from fabricamp.rng import isolate_rng

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import nn
    from torch.utils.tensorboard import SummaryWriter

    from fabricamp._utils.types import StateDict
    from fabricamp.loggers.event_file import EventFile, FilePosition, Scalars, WrittenEvent

_BYTES_OF_A_POINT = 64


class TensorBoardLogger(RunFolderLogger["WrittenEvent | Scalars", "FilePosition"]):
    """Logs to ``save_dir/name/version_N``; ``tensorboard --logdir save_dir`` shows it.

    Events are written every ``flush_secs`` (30) seconds or after ``max_queue`` (10) events, before a checkpoint gets its name, and
    at the end.  A resumed run in the same folder hides the events after its checkpoint.  Events that the disk refuses wait in
    memory.

    Args:
        save_dir: the folder of all runs.
        name: the folder of this experiment's runs in it.
        version: the number or name of this run; None is the next free number.
        prefix: a text before each metric's name.
        default_hp_metric: logs ``hp_metric`` with the hyper-parameters; False leaves TensorBoard's HPARAMS page empty.
        sub_dir: a folder within ``version_N`` for all files of the run, checkpoints too; None: ``version_N`` itself.
        log_graph: draws ``forward`` of the module, for its ``example_input_array``, on TensorBoard's GRAPHS page.
        comment: changes nothing, as in Lightning.
        purge_step: hides the events of this folder from this step on.
        max_queue: the number of events that wait at most.
        flush_secs: the number of seconds between two writes.
        filename_suffix: the end of the files' names.

    Example:
        >>> logger = TensorBoardLogger("runs", name="digits")
    """

    MOST_WAITING = 64 * 2**20
    """The largest size of the events that wait in memory, in bytes."""

    _writer: SummaryWriter | None
    _file: EventFile | None

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = RUNS,
        version: int | str | None = None,
        prefix: str = "",
        default_hp_metric: bool = True,
        *,
        sub_dir: str | os.PathLike[str] | None = None,
        log_graph: bool = False,
        comment: str = "",
        purge_step: int | None = None,
        max_queue: int = 10,
        flush_secs: int = 30,
        filename_suffix: str = "",
    ) -> None:
        if not isinstance(sub_dir, (str, os.PathLike, type(None))):
            raise ConfigError(f"TensorBoardLogger(sub_dir={sub_dir!r}): give a folder, such as 'rank_0', or None")
        super().__init__(save_dir, name, version, prefix)
        self.sub_dir = None if sub_dir is None else os.fspath(sub_dir)
        self._default_hp_metric = default_hp_metric
        self.draws_graph = log_graph
        self._flushed_at = time.monotonic()
        self._purge_step = purge_step
        self._max_queue = max_queue
        self._flush_secs = flush_secs
        self._filename_suffix = filename_suffix
        self._goes_on = False

    @property
    def experiment(self) -> SummaryWriter:
        """The ``SummaryWriter`` of this run, for calls without a method here; does nothing on ranks other than 0."""
        if not writes():
            return Silent()  # type: ignore[return-value]
        queue = self._backlog
        if self._file is not None and self.private and not self._file.private:
            self.close()
        if self._writer is None:
            from fabricamp.loggers.event_file import EventFile, EventWriter

            self._file = EventFile(self.folder, queue.lose, suffix=self._filename_suffix, private=self.private)
            self._writer = EventWriter(self.folder, self._take, self.save, self._purge_step)
        return self._writer

    def begin(self) -> None:
        """Imports the writer, and starts the thread that writes, before the first step."""
        super().begin()
        _ = self.experiment

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Adds a point to each metric's curve."""
        if not metrics or not writes():
            return
        _ = self.experiment
        files: Any = importlib.import_module("fabricamp.loggers.event_file")
        values = {name: float(value) for name, value in self._named(metrics).items()}
        step = self._at(step)
        self._put(Record(step, files.Scalars(step, time.time(), values), weight=len(values) * _BYTES_OF_A_POINT))

    def log_hyperparams(
        self, params: Mapping[str, Any] | None = None, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Shows the hyper-parameters on TensorBoard's HPARAMS page, with ``metrics`` as columns beside them."""
        before = self._hyperparameters_text
        super().log_hyperparams(params, metrics)
        # A fit logs those of the module first: metrics that a program then gives with them are new.
        is_new = bool(self._hyperparameters) and self._hyperparameters_text != before
        if not (is_new or metrics) or self._goes_on:
            return
        if metrics is None:
            metrics = {"hp_metric": -1.0} if self._default_hp_metric else {}
        summaries: Any = importlib.import_module("torch.utils.tensorboard.summary")
        writer: Any = self.experiment
        for part in summaries.hparams(flattened(self._hyperparameters), dict(metrics)):
            writer.file_writer.add_summary(part, 0)
        self.log_metrics(metrics, 0)

    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        """Draws ``forward`` in evaluation mode, as the precision runs it, if ``log_graph=True``; a fit calls this method itself.

        ``input_array`` is a tensor or a tuple of arguments; None means the module's ``example_input_array``.
        """
        if not self.draws_graph or self._goes_on or not writes():
            return
        module: Any = model
        inputs = module.example_input_array if input_array is None else input_array
        if inputs is None:
            raise ConfigError(
                f"TensorBoardLogger(log_graph=True) needs an example of what forward takes, and {type(model).__name__} has none: "
                "set self.example_input_array in __init__, or leave log_graph out"
            )
        precision = module.trainer.precision_plugin
        inputs = module.transfer_batch_to_device(module.on_before_batch_transfer(inputs, 0), module.device, 0)
        inputs = precision.convert_input(module.on_after_batch_transfer(inputs, 0))
        modes = [(submodule, submodule.training) for submodule in model.modules()]
        try:
            with torch.no_grad(), isolate_rng(), plain_linears(model), warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # torch's writer traces by TorchScript
                precision.forward(self._trace, model.eval(), inputs)
        except RuntimeError as error:
            error.add_note(
                f"fabricamp: TensorBoardLogger(log_graph=True) could not trace {type(model).__name__}.forward"
            )
            raise
        finally:
            for submodule, training in modes:
                submodule.training = training

    def _trace(self, model: nn.Module, inputs: object) -> None:
        kind = next((parameter.device.type for parameter in model.parameters()), "cpu")
        autocast: dict[str, Any] = {"dtype": torch.get_autocast_dtype(kind), "enabled": torch.is_autocast_enabled(kind)}
        with torch.autocast(kind, **autocast, cache_enabled=False):  # a trace cannot hold cached weights
            self.experiment.add_graph(model, inputs, use_strict_trace=False)

    def log_image(self, name: str, image: Any, step: int, dataformats: str = "CHW") -> None:
        """Logs an image: a tensor or array in ``dataformats`` (floats in 0..1 or bytes)."""
        self.experiment.add_image(name, image, step, dataformats=dataformats)

    def log_figure(self, name: str, figure: Any, step: int) -> None:
        """Logs a matplotlib figure."""
        self.experiment.add_figure(name, figure, step)

    def log_histogram(
        self, name: str, counts: Sequence[float], limits: tuple[float, float], sums: tuple[float, float], step: int
    ) -> None:
        """Logs a histogram of equal bins between the limits, with the sum of the values and of their squares."""
        if not writes():
            return
        edges = edges_of(counts, limits)[1:]
        self.experiment.add_histogram_raw(
            name, *limits, sum(counts), *sums, bucket_limits=edges, bucket_counts=counts, global_step=step
        )

    def log_text(self, name: str, text: str, step: int) -> None:
        """Logs a text, shown as Markdown."""
        self.experiment.add_text(name, text, step)

    def state_dict(self) -> StateDict:
        """Returns the event file's name and its length in bytes, including events that wait in memory."""
        _ = self.experiment
        if self._file is None:
            return {}
        position, waiting = self._backlog.state()
        files: Any = importlib.import_module("fabricamp.loggers.event_file")
        return {"file": position.file, "bytes": position.bytes + sum(map(files.size_of, waiting))}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Hides the events after that position in this folder; the hyper-parameters are there already."""
        if not state_dict or not writes():
            return
        _ = self.experiment
        file = self._file
        assert file is not None
        self._backlog.write_soon()
        events = self._backlog.call_and_wait(
            lambda: file.continue_from(state_dict["file"], state_dict["bytes"]), patient=True
        )
        self._goes_on = events is not None
        for event in events or ():
            self._take(event)

    def close(self) -> None:
        """Writes the waiting events, for up to 30 seconds; values logged later go into a new file in the same folder."""
        super().close()
        self._writer = None
        self._file = None
        self._goes_on = False

    def _take(self, event: WrittenEvent) -> None:
        self._put(Record(event.step, event, weight=event.ByteSize()))

    def _put(self, record: Record[WrittenEvent | Scalars]) -> None:
        queue = self._backlog
        waiting = queue.add(record)
        now = time.monotonic()
        if waiting > self._max_queue or now >= self._flushed_at + self._flush_secs:
            self._flushed_at = now
            queue.write_soon()
            queue.report(self.trouble)

    def _look(self) -> FilePosition:
        assert self._file is not None
        return self._file.look()

    def _append(self, records: list[WrittenEvent | Scalars]) -> FilePosition:
        assert self._file is not None
        return self._file.append(records)

    def _sync(self) -> None:
        if self._file is not None:
            self._file.sync()

    def _begin_anew(self, records: Iterable[Record[WrittenEvent | Scalars]] = ()) -> None:
        super()._begin_anew(records)
        self._writer = None
        self._file = None  # one file per process

    def __getstate__(self) -> StateDict:
        return {**super().__getstate__(), "_writer": None, "_file": None}
