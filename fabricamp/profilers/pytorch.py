"""Runs torch's profiler over some steps: writes a trace file, and a table of operations."""

from __future__ import annotations

import inspect
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile, schedule

from fabricamp.arguments.checks import check_choice, check_names
from fabricamp.errors import ConfigError
from fabricamp.profilers.profiler import BATCHES, Profiler

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from fabricamp._utils.types import StateDict

_TIMES = ("cpu_time", "cuda_time", "cpu_time_total", "cuda_time_total", "cpu_memory_usage", "cuda_memory_usage")
_SORT_KEYS = (*_TIMES, *(f"self_{name}" for name in _TIMES[2:]), "count")


class PyTorchProfiler(Profiler):
    """Records a few steps with ``torch.profiler``: writes a trace for chrome://tracing, and shows the operations that took longest.

    By default it records the third to fifth step.  ``schedule=torch.profiler.schedule(wait=100, warmup=1, active=5, repeat=1)``
    records other steps, ``schedule=None`` the complete run.

    Args:
        dirpath: the folder of its files; None means the folder of the run's logs.
        filename: writes the table to this file, with the entry point's name before it and ".txt" after it; None prints it.
        group_by_input_shapes: a row for each shape of an operation's inputs; needs ``record_shapes=True``.
        emit_nvtx: marks operations for NVIDIA's tools instead of recording them.
        export_to_chrome: writes the trace, one file per recorded window: ``fit-trace.0.pt.trace.json``.
        row_limit: number of rows in the table; -1: all.
        sort_by_key: the sort key of the table; None means the time on the GPU if there is one, else on the CPU.
        record_module_names: shows in the trace which submodule runs.
        table_kwargs: further arguments of torch's table.
        record_shapes: records the shapes of operations' inputs.
        **profiler_kwargs: further arguments of ``torch.profiler.profile``, such as ``schedule`` and ``profile_memory``.

    Raises:
        ConfigError: for an unknown ``sort_by_key`` or keyword, or a ``schedule`` that is no function.

    Example:
        >>> trainer = Trainer(profiler=PyTorchProfiler(profile_memory=True, row_limit=10))
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        group_by_input_shapes: bool = False,
        emit_nvtx: bool = False,
        export_to_chrome: bool = True,
        row_limit: int = 20,
        sort_by_key: str | None = None,
        record_module_names: bool = True,
        table_kwargs: dict[str, Any] | None = None,
        record_shapes: bool = False,
        **profiler_kwargs: Any,
    ) -> None:
        super().__init__(dirpath, filename)
        check_choice("sort_by_key", sort_by_key, (*_SORT_KEYS, None))
        arguments = [name for kind in (PyTorchProfiler, profile) for name in inspect.signature(kind).parameters]
        arguments.remove("profiler_kwargs")
        check_names("PyTorchProfiler has no argument", profiler_kwargs, arguments)
        steps = profiler_kwargs.get("schedule")
        if steps is not None and not callable(steps):
            raise ConfigError(
                f"schedule={steps!r} is not a function; give torch.profiler.schedule(...), or None for the whole run"
            )
        self.profiler: Any = None
        """torch's profiler; None before a run."""
        self.function_events: Any = None
        """torch's list of the events that were recorded last; None before."""
        self._group_by_input_shapes = group_by_input_shapes
        self._emit_nvtx = emit_nvtx
        self._export_to_chrome = export_to_chrome
        self._row_limit = row_limit
        self._sort_by_key = sort_by_key
        self._record_module_names = record_module_names
        self._table_kwargs = table_kwargs or {}
        self._profiler_kwargs = {"record_shapes": record_shapes, **profiler_kwargs}
        self._ranges: dict[str, list[record_function]] = {}
        self._handles: list[RemovableHandle] = []
        self._table = ""

    def watch(self, module: nn.Module) -> None:
        """Adds hooks that mark the start and end of each submodule's forward."""
        if not self._record_module_names:
            return
        for name, part in module.named_modules():
            if name:
                label = f"[module] {name}: {type(part).__name__}"
                self._handles += [
                    part.register_forward_pre_hook(lambda *_, label=label: self._enter(label)),
                    part.register_forward_hook(lambda *_, label=label: self._leave(label), always_call=True),
                ]

    def start(self, action_name: str) -> None:
        """Opens a range with this name; the first call also starts torch's profiler."""
        if self.profiler is None:
            self._open()
        self._enter(action_name)

    def stop(self, action_name: str) -> None:
        """Closes the range; after the action of a batch, advances torch's profiler by one step."""
        self._leave(action_name)
        step = BATCHES.get(self._stage or "", "")
        if step and action_name.endswith(step) and isinstance(self.profiler, profile):
            self.profiler.step()

    def summary(self) -> str:
        """Ends the recording; returns the table of the last window, or why there is none."""
        self._close()
        if self._emit_nvtx or self._table:
            return self._table
        return "torch's profiler recorded no step: the run was too short for its schedule; give schedule=None, or a shorter one"

    def teardown(self, stage: str | None) -> None:
        """Ends the recording, and removes the hooks from the module."""
        self._close()
        self.profiler = None
        self._table = ""
        self._ranges.clear()
        while self._handles:
            self._handles.pop().remove()

    def __getstate__(self) -> StateDict:
        return {**self.__dict__, "profiler": None, "function_events": None, "_handles": [], "_ranges": {}}

    def _open(self) -> None:
        if self._emit_nvtx:
            self.profiler = torch.autograd.profiler.emit_nvtx()
            self.profiler.__enter__()
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        defaults = {
            "activities": activities,
            "schedule": schedule(wait=1, warmup=1, active=3, repeat=1),
            "acc_events": True,  # the table covers all windows
        }
        options = {**defaults, **self._profiler_kwargs}
        users_handler = options.pop("on_trace_ready", None)
        windows = itertools.count()

        def ready(profiled: profile) -> None:
            self._take_table(profiled)
            self.function_events = profiled.events()
            if self._export_to_chrome:
                profiled.export_chrome_trace(str(self._file(f"trace.{next(windows)}.pt.trace.json")))
            if users_handler is not None:
                users_handler(profiled)

        self.profiler = profile(**options, on_trace_ready=ready)
        self.profiler.start()

    def _close(self) -> None:
        opened = self.profiler
        self.profiler = None
        if isinstance(opened, profile):
            opened.stop()
        elif opened is not None:
            opened.__exit__(None, None, None)

    def _take_table(self, profiled: profile) -> None:
        on_gpu = ProfilerActivity.CUDA in profiled.activities
        longest = "cuda_time_total" if on_gpu else "cpu_time_total"
        averages = profiled.key_averages(group_by_input_shape=self._group_by_input_shapes)
        table = averages.table(sort_by=self._sort_by_key or longest, row_limit=self._row_limit, **self._table_kwargs)
        self._table = table.strip()

    def _enter(self, name: str) -> None:
        opened = record_function(name)
        opened.__enter__()
        self._ranges.setdefault(name, []).append(opened)

    def _leave(self, name: str) -> None:
        if self._ranges.get(name):
            self._ranges[name].pop().__exit__(None, None, None)
