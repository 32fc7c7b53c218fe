"""The options of ``Trainer(cuda_graph=...)``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fabricamp._utils.keywords import NamesKeywords
from fabricamp.arguments.checks import check_flag, check_number
from fabricamp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabricamp.strategies.base import Strategy
    from fabricamp.trainer.arguments import Settings

_FEWEST_WARMUPS = 3  # two eager steps before the capture: the first creates state, the second is checked for waits


@dataclass(init=False)
class CudaGraph(NamesKeywords):
    """Options for the capture of a training step as a CUDA graph.

    Args:
        warmup: the step is captured at batch number ``warmup`` of a shape; earlier batches run eagerly, as ordinary steps.
        shapes: the largest number of batch shapes to capture; batches of other shapes run eagerly.
        steps: number of steps per launch if nothing has to happen between them; other steps are launched one by one.
        check_every: compares every n-th further replay with an eager step, bit by bit, at the same replay on all ranks; 0: only the
            first replay of a shape.
        compare: the first replay of a shape is compared with an eager step; False leaves that out. What a step does on the host,
            and what has changed since the capture, is found as always.
        required: for a step that cannot be captured, True raises an error; False logs the reason and runs it eagerly.
        hook_entries: entries of a batch that the step does not read, such as the names of its files: an index, a key, or a tuple of
            these for an entry within an entry. Only hooks get them, so they may differ in every batch.

    Raises:
        ConfigError: for numbers out of range, for entries that are no index and no key, for ``check_every`` without ``compare``.

    Example:
        >>> CudaGraph(warmup=5).shapes
        4
        >>> CudaGraph(hook_entries=[2]).hook_entries  # of batches (x, y, path)
        ((2,),)
    """

    warmup: int
    shapes: int
    steps: int
    check_every: int
    compare: bool
    required: bool
    hook_entries: tuple[tuple[str | int, ...], ...]

    def __init__(
        self,
        *,
        warmup: int = 11,
        shapes: int = 4,
        steps: int = 1,
        check_every: int = 0,
        compare: bool = True,
        required: bool = True,
        hook_entries: Sequence[str | int | Sequence[str | int]] = (),
    ) -> None:
        self.warmup = check_number("warmup", warmup, owner="CudaGraph", least=_FEWEST_WARMUPS)
        self.shapes = check_number("shapes", shapes, owner="CudaGraph", least=1)
        self.steps = check_number("steps", steps, owner="CudaGraph", least=1)
        self.check_every = check_number("check_every", check_every, owner="CudaGraph", least=0)
        self.compare = check_flag("compare", compare, owner="CudaGraph")
        if self.check_every and not self.compare:
            raise ConfigError(
                f"CudaGraph(compare=False, check_every={self.check_every}) is not allowed: check_every repeats the comparison that "
                "compare=False leaves out; leave one of them out"
            )
        self.required = check_flag("required", required, owner="CudaGraph")
        self.hook_entries = _entries_of(hook_entries)

    def one_by_one(self) -> CudaGraph:
        """Returns these options with one launch per step, for runs with hooks that look at each step."""
        return CudaGraph(
            warmup=self.warmup,
            shapes=self.shapes,
            check_every=self.check_every,
            compare=self.compare,
            required=self.required,
            hook_entries=self.hook_entries,
        )


def _entries_of(given: Any) -> tuple[tuple[str | int, ...], ...]:
    """Returns the entries as tuples of keys and indices; raises :class:`ConfigError` for anything else."""
    entries = []
    for entry in given if isinstance(given, list | tuple) else [None]:
        path = tuple(entry) if isinstance(entry, list | tuple) else (entry,)
        if not path or not all(isinstance(key, str | int) and not isinstance(key, bool) for key in path):
            raise ConfigError(
                f"CudaGraph(hook_entries={given!r}) is not allowed; give a list of indices and keys, such as [2] for batches "
                "(x, y, path), ['path'], or [('target', 'path')] for an entry within an entry"
            )
        entries.append(path)
    return tuple(entries)


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
    if strategy.sharding.shards and settings.most_accumulated > 1:
        return f"accumulation is not captured with strategy {strategy.name!r}; take one micro-batch a step"
    if settings.detect_anomaly:
        return "detect_anomaly=True reads each operation's result on the host; leave one of them out"
    return ""
