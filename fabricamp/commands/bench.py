"""Breaks down the time of a batch: measures a few steps of a configured training, eagerly and as a CUDA graph."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any, Final

import torch

from fabricamp.callbacks import ModelCheckpoint, ProgressBar
from fabricamp.callbacks.base import decides_by_metrics
from fabricamp.config import SaveConfig, build_parts, check_config, read_config, refusals_explained
from fabricamp.errors import ConfigError
from fabricamp.loggers.dummy import DummyLogger
from fabricamp.profilers import Profiler
from fabricamp.profilers.phases import Breakdown, PhaseClock, bars

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

WARMUP: Final = 30
"""Number of unmeasured batches at the start: kernels are chosen in them, and a graph is captured and compared."""
_OVERRIDES: Final = (
    "trainer.max_epochs=-1",
    "trainer.max_time=null",
    "trainer.min_epochs=null",
    "trainer.min_steps=null",
    "trainer.fast_dev_run=false",
    "trainer.num_sanity_val_steps=0",
    "trainer.logger=false",
    "trainer.profiler=null",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
)


class StepProfiler(Profiler):
    """Measures the phases of the batches after :data:`WARMUP`: on a GPU with events, without waiting before the end."""

    def __init__(self, title: str, *, on_gpu: bool, graph: bool) -> None:
        super().__init__()
        self.breakdown: Breakdown | None = None
        self._title = title
        self._on_gpu = on_gpu
        self.clock = PhaseClock(_event, _seconds, graph=graph) if on_gpu else PhaseClock(graph=graph)
        self._warm = False

    def start(self, action_name: str) -> None:
        """Notes the start of an action."""
        self.clock.start(action_name)

    def stop(self, action_name: str) -> None:
        """Notes the end of an action; after the warm-up, drops all measurements."""
        self.clock.stop(action_name)
        if not self._warm and self.clock.batches == WARMUP:
            self._warm = True
            self.clock.restart()

    def describe(self) -> None:
        """Computes the mean batch, and prints nothing."""
        if self._on_gpu:
            torch.cuda.synchronize()
        self.breakdown = self.clock.breakdown(self._title) if self._warm else None


def bench(path: Path, overrides: Sequence[str], *, steps: int = 100, out: str | None = None) -> list[str]:
    """Returns lines that break down the time of a batch, and draws them into the file ``out`` if given.

    Trains ``steps`` steps after :data:`WARMUP` others, without logs, checkpoints and anything that ends a training early; on a
    GPU once more as a CUDA graph.  Raises :class:`ConfigError` for a configuration that cannot be run this way.
    """
    from fabricamp.runs.image import check_out, save_bars

    if steps < 1:
        raise ConfigError(f"--steps {steps} is not allowed; give a whole number from 1")
    if out is not None:
        check_out(out)
    notes = []
    eager, on_gpu = _measured(path, [*overrides, "trainer.cuda_graph=false"], steps, "eager", graph=False)
    breakdowns = [eager]
    if on_gpu:
        try:
            graph, _ = _measured(path, [*overrides, "trainer.cuda_graph=true"], steps, "graph", graph=True)
            breakdowns.append(graph)
        except ConfigError as error:
            notes.append(f"graph: {error}")
    shown = [breakdown for breakdown in breakdowns if breakdown is not None]
    if out is not None and shown:
        save_bars(shown, out)
        notes.append(f"picture: {out}")
    return [*(bars(shown).splitlines() if shown else []), *notes]


def _measured(
    path: Path, overrides: Sequence[str], steps: int, title: str, *, graph: bool
) -> tuple[Breakdown | None, bool]:
    """Trains; returns the mean batch (None except on rank 0), and whether it ran on a GPU."""
    with tempfile.TemporaryDirectory(prefix="fabricamp-bench-") as folder:
        own = (f"trainer.max_steps={WARMUP + steps}", f"trainer.default_root_dir={folder}", *_OVERRIDES)
        # Schedulers may follow a validation metric: validate one batch, which is not measured.
        validates = (read_config(path, overrides).get("trainer") or {}).get("limit_val_batches") != 0
        content = read_config(path, [*overrides, *own, f"trainer.limit_val_batches={int(validates)}"])
        check_config(content)
        trainer, module, data, _ = build_parts(content)
        if trainer._runner.launches:
            raise ConfigError(
                f"bench starts no processes, and this configuration asks for {trainer.world_size}; give "
                "trainer.devices=1, or: torchrun --nproc-per-node 2 -m fabricamp bench ..."
            )
        on_gpu = trainer.device_type == "cuda"
        profiler = StepProfiler(title, on_gpu=on_gpu, graph=graph)
        left_out = (ModelCheckpoint, ProgressBar, SaveConfig)
        trainer.callbacks[:] = [
            callback
            for callback in trainer.callbacks
            if not isinstance(callback, left_out) and not decides_by_metrics(callback)
        ]
        trainer.loggers[:] = [DummyLogger()]
        trainer.profiler = profiler
        with refusals_explained(content):
            trainer.fit(module, datamodule=data)
    if profiler.breakdown is None:
        raise ConfigError(
            f"the training ended within its first {WARMUP} batches, which bench does not measure; give it more batches, or "
            "raise its limits"
        )
    return (profiler.breakdown if trainer.is_global_zero else None), on_gpu


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(begin: Any, end: Any) -> float:
    return float(begin.elapsed_time(end)) / 1e3
