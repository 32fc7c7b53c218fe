"""The options of ``Trainer(cuda_graph=...)``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fabricamp.errors import ConfigError
from fabricamp.keywords import NamesKeywords

if TYPE_CHECKING:
    from fabricamp.strategies.base import Strategy
    from fabricamp.trainer.arguments import Settings

_FEWEST_WARMUPS = 3


@dataclass(init=False)
class CudaGraph(NamesKeywords):
    """How a training step is captured as a CUDA graph.

    Args:
        warmup: the batch of a shape at which it is captured; those before it run eagerly, as ordinary steps.
        shapes: how many shapes of batches are captured at most; others run eagerly.
        steps: how many steps one launch makes if nothing has to happen between them; other steps are launched one by one.
        check_every: compares a replay with an eager step, bit by bit, every so many replays, at the same one on all ranks; 0:
            only the first of a shape.
        required: a step that cannot be captured: False runs it eagerly, and says why; True raises an error.

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
        self.warmup, self.shapes, self.steps = warmup, shapes, steps
        self.check_every, self.required = check_every, required

    def one_by_one(self) -> CudaGraph:
        """Returns these options with a launch for each step: for runs whose hooks look at every one."""
        return CudaGraph(warmup=self.warmup, shapes=self.shapes, check_every=self.check_every, required=self.required)


def as_cuda_graph(value: Any) -> CudaGraph | None:
    """Returns the options that the Trainer's ``cuda_graph`` stands for; None where nothing is captured."""
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
    """Raises :class:`ConfigError` where the Trainer's other arguments leave no step to capture, and one is required."""
    if settings.cuda_graph is not None and settings.cuda_graph.required:
        reason = reason_against(device_type, strategy, settings)
        if reason:
            raise ConfigError(f"cuda_graph: {reason}; or give cuda_graph='auto', which runs eagerly there")


def reason_against(device_type: str, strategy: Strategy, settings: Settings) -> str:
    """Returns why no step of a Trainer with these arguments can be captured, and what to give; else an empty string."""
    if device_type != "cuda":
        return f"a CUDA graph needs a CUDA GPU, and this run is on {device_type!r}; give accelerator='gpu'"
    if refusal := strategy.refuses_graph():
        return refusal
    if settings.detect_anomaly:
        return "detect_anomaly=True reads each operation's result on the host; leave one of them out"
    return ""
