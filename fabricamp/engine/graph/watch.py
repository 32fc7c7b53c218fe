"""Watches a step while it runs eagerly for side effects in Python that a replay would not repeat."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Final

import torch

from fabricamp.engine.graph.batches import NotCapturableError
from fabricamp.engine.graph.effects import Attributes, host_generators
from fabricamp.engine.graph.logs import LogWatch
from fabricamp.engine.graph.refusals import refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fabricamp.engine.session import Session

FEWEST_SIGHTS: Final = 2
"""The smallest number of eager calls of a kind: the first creates state, the second is checked for waits."""
MOST_IN_A_ROW: Final = 3
"""The largest number of captures in a row without a replay in between."""


class StepWatch:
    """Runs and watches calls of the module's method named ``step``."""

    def __init__(self, session: Session, step: str) -> None:
        self._session = session
        self._step = step
        self._metrics = session.metrics
        options = session.settings.cuda_graph
        self._refuses_logs = options is not None and options.required
        """Whether logged values are already checked in eager steps; otherwise the capture finds bad ones."""

    def log_watch(self) -> Any:
        """Returns the object that replaces the metrics of the run while a step is watched or captured."""
        return LogWatch(self._metrics, self._step)

    def run(self, call: Callable[[], Any], *, compares: bool, looks: bool) -> tuple[Any, str]:
        """Returns the result of ``call``, and why it cannot be captured, or an empty string.

        ``compares`` compares the attributes before and after; not for the first call of a shape, which may set some.  ``looks``
        also looks for waits for the device.
        """
        attributes = Attributes(self._owners()) if compares else None
        generators = host_generators()
        try:
            if self._refuses_logs:
                self._session.attachment.metrics = self.log_watch()
            outputs, waits = _looked_at(call) if looks else (call(), "")
        except NotCapturableError as error:
            raise refused(str(error)) from None
        finally:
            self._session.attachment.metrics = self._metrics
        effect = None if attributes is None else attributes.changed()
        if effect is not None:
            return (
                outputs,
                f"{self._step} changes {effect}, which a replay would not; keep it in a buffer on the device",
            )
        drawn = next((name for name, state in host_generators().items() if generators[name] != state), "")
        if drawn:
            return outputs, f"{self._step} draws from {drawn}, which a replay would not; draw on the device"
        return outputs, f"{self._step} waits for the device: {waits}; leave the host out of it" if waits else ""

    def _owners(self) -> Iterator[object]:
        yield from self._session.module.modules()
        for one in self._session.trainer.callbacks:
            if not type(one).__module__.startswith("fabricamp."):  # the progress bar changes in its own thread
                yield one


def _looked_at(call: Callable[[], Any]) -> tuple[Any, str]:
    """Returns the result of ``call``, and the file and line of its first wait for the device, or an empty string."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            outputs = call()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    waits = [one for one in caught if "called a synchronizing CUDA operation" in str(one.message)]
    for one in caught:
        if one not in waits and "Synchronization debug mode" not in str(one.message):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    return outputs, f"{waits[0].filename}:{waits[0].lineno}" if waits else ""
