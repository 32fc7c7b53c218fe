"""Writes what is logged for TensorBoard."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fabricamp.errors import ConfigError, nearest
from fabricamp.loggers.run_folder import RunFolderLogger, writes

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from torch.utils.tensorboard import SummaryWriter

__all__ = ["TensorBoardLogger"]

_OWN = ("save_dir", "name", "version", "prefix", "default_hp_metric")
_OPTIONS = ("comment", "purge_step", "max_queue", "flush_secs", "filename_suffix")
"""What torch's SummaryWriter takes beside the folder; asking it would import all of TensorBoard."""


class TensorBoardLogger(RunFolderLogger):
    """Logs to ``save_dir/name/version_N``; ``tensorboard --logdir save_dir`` shows it.

    ``default_hp_metric`` logs a ``hp_metric`` beside the hyper-parameters, without which TensorBoard's HPARAMS page stays empty.
    Further ``options`` are those of torch's ``SummaryWriter``, whose own thread writes the file.

    Example:
        >>> logger = TensorBoardLogger("runs", name="digits")
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "fabricamp_logs",
        version: int | str | None = None,
        prefix: str = "",
        default_hp_metric: bool = True,
        **options: Any,
    ) -> None:
        for option in options:
            if option not in _OPTIONS:
                raise ConfigError(
                    f"TensorBoardLogger has no option {option!r}{nearest(option, (*_OPTIONS, *_OWN))} (known: "
                    f"{', '.join((*_OWN, *_OPTIONS))})"
                )
        super().__init__(save_dir, name, version, prefix)
        self._default_hp_metric = default_hp_metric
        # A killed run loses what was logged since the last flush.
        self._options = {"flush_secs": 30, **options}
        self._writer: SummaryWriter | None = None

    @property
    def experiment(self) -> SummaryWriter:
        """The ``SummaryWriter`` of this run, for what has no method here; does nothing on ranks other than 0."""
        if not writes():
            return _Silent()  # type: ignore[return-value]
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.log_dir), **self._options)
        return self._writer

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """One point in each metric's curve."""
        if not metrics or not writes():
            return
        # One event for all of them: SummaryWriter.add_scalar makes one each, which costs several times as much.
        summary: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        values = [summary.Value(tag=name, simple_value=value) for name, value in self._named(metrics).items()]
        self._add(summary(value=values), step)

    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        """Shows them on TensorBoard's HPARAMS page, with ``metrics`` as the columns beside them."""
        before = dict(self._hyperparameters)
        super().log_hyperparams(params, metrics)
        if self._hyperparameters == before:
            return
        if metrics is None:
            metrics = {"hp_metric": -1.0} if self._default_hp_metric else {}
        summaries: Any = importlib.import_module("torch.utils.tensorboard.summary")
        for part in summaries.hparams(_flat(self._hyperparameters), dict(metrics)):
            self._add(part, 0)
        self.log_metrics(metrics, 0)

    def log_image(self, name: str, image: Any, step: int, dataformats: str = "CHW") -> None:
        """An image: a tensor or array in ``dataformats`` (floats in 0..1 or bytes)."""
        self.experiment.add_image(name, image, step, dataformats=dataformats)

    def log_figure(self, name: str, figure: Any, step: int) -> None:
        """A matplotlib figure."""
        self.experiment.add_figure(name, figure, step)

    def log_text(self, name: str, text: str, step: int) -> None:
        """A text, shown as Markdown."""
        self.experiment.add_text(name, text, step)

    def save(self) -> None:
        """Waits until all of it is in the file."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Closes the file; what is logged afterwards goes into a new one beside it."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add(self, summary: Any, step: int) -> None:
        writer: Any = self.experiment
        writer.file_writer.add_summary(summary, step)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_writer": None}  # its thread stays in this process


class _Silent:
    """Takes any call and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def _flat(params: Mapping[str, Any], above: str = "") -> dict[str, bool | float | str]:
    """Nested parameters as ``outer/inner``; what TensorBoard has no type for as its ``str``."""
    flat: dict[str, bool | float | str] = {}
    for key, value in params.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{above}{key}/")
        else:
            flat[f"{above}{key}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat
