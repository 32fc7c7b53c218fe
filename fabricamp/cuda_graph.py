"""The options of ``Trainer(cuda_graph=...)``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fabricamp._utils.keywords import NamesKeywords
from fabricamp.errors import ConfigError

if TYPE_CHECKING:
    from fabricamp.strategies.base import Strategy
    from fabricamp.trainer.arguments import Settings

_FEWEST_WARMUPS = 3  # two eager steps before the capture: the first creates state, the second is checked for waits


@dataclass(init=False)
class CudaGraph(NamesKeywords):
    """Options for the capture of a training step as a CUDA graph.

    Args:
        warmup: number of the batch of a shape at which the step is captured; earlier batches run eagerly, as ordinary steps.
        shapes: the largest number of batch shapes to capture; batches of other shapes run eagerly.
        steps: number of steps per launch if nothing has to happen between them; other steps are launched one by one.
        check_every: compares every n-th replay with an eager step, bit by bit, at the same replay on all ranks; 0: only the first
            replay of a shape.
        required: for a step that cannot be captured, True raises an error; False logs the reason and runs it eagerly.

    Raises:
        ConfigError: for numbers out of range.

    Example:
        >>> CudaGraph(warmup=5).shapes
        4
    """

    warmup: int
    shapes: int
    steps: int
    check_every: int
    required: bool

    def __init__(
        self, *, warmup: int = 11, shapes: int = 4, steps: int = 1, check_every: int = 0, required: bool = True
    ) -> None:
        for name, value, least in (
            ("warmup", warmup, _FEWEST_WARMUPS),
            ("shapes", shapes, 1),
            ("steps", steps, 1),
            ("check_every", check_every, 0),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"CudaGraph({name}={value!r}) is not allowed; give a whole number from {least}")
        if not isinstance(required, bool):
            raise ConfigError(f"CudaGraph(required={required!r}) is not allowed (allowed: True, False)")
        self.warmup = warmup
        self.shapes = shapes
        self.steps = steps
        self.check_every = check_every
        self.required = required

    def one_by_one(self) -> CudaGraph:
        """Returns these options with one launch per step, for runs with hooks that look at each step."""
        return CudaGraph(warmup=self.warmup, shapes=self.shapes, check_every=self.check_every, required=self.required)


def as_cuda_graph(value: Any) -> CudaGraph | None:
    """Returns the options for the Trainer's argument ``cuda_graph``; None if nothing is captured."""
    if value is None or value is False:
        return None
    if value is True:
        return CudaGraph()
    if value == "auto":
        return CudaGraph(required=False)
    if isinstance(value, CudaGraph):
        return value
    raise ConfigError(f"cuda_graph={value!r} is not allowed (allowed: True, False, 'auto', CudaGraph(...))")


def check_cuda_graph(settings: Settings, device_type: str, strategy: Strategy) -> None:
    """Raises :class:`ConfigError` if a graph is required and the Trainer's other arguments rule out a capture."""
    if settings.cuda_graph is not None and settings.cuda_graph.required:
        reason = reason_against(device_type, strategy, settings)
        if reason:
            raise ConfigError(f"cuda_graph: {reason}; or give cuda_graph='auto', which runs eagerly there")


def reason_against(device_type: str, strategy: Strategy, settings: Settings) -> str:
    """Returns why no step can be captured with these arguments, and what to change; an empty string if one can be."""
    if device_type != "cuda":
        return f"a CUDA graph needs a CUDA GPU, and this run is on {device_type!r}; give accelerator='gpu'"
    if refusal := strategy.refuses_graph():
        return refusal
    if settings.detect_anomaly:
        return "detect_anomaly=True reads each operation's result on the host; leave one of them out"
    return ""
