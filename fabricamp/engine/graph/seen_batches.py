"""Reports why batches run eagerly although the step could be captured: differing values, too many shapes, too few batches."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from fabricamp.engine.graph.batches import constants_of, tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from fabricamp._utils.types import Batch
    from fabricamp.cuda_graph import CudaGraph

_MOST_SIGNATURES: Final = 1000
"""Batches of further signatures are not counted: with another string in each batch, memory would grow with every one of them."""


class SeenBatches:
    """Counts the eager batches of one method of the module, named ``step``, and reports by ``say`` why they are not captured.

    Each reason is reported once.
    """

    def __init__(self, step: str, options: CudaGraph, say: Callable[[str], None]) -> None:
        self._step = step
        self._options = options
        self._say = say
        self._batches = 0
        self._eager: Counter[Hashable] = Counter()
        self._combinations: dict[Hashable, set[tuple[Any, ...]]] = {}
        """The values of the batches' constants, by the names and types of these."""
        self._has_named_values = False
        self._has_named_shapes = False
        self.captured = False
        """Whether a graph was captured."""

    def counts(self, signature: Hashable, batch: Batch) -> bool:
        """Counts an eager batch; returns False if there are too many signatures to count it; it is never captured then."""
        self._batches += 1
        if signature not in self._eager:
            if len(self._eager) >= _MOST_SIGNATURES:
                return False
            self._look_at_values(batch)
        self._eager[signature] += 1
        return True

    def _look_at_values(self, batch: Batch) -> None:
        """Reports which strings and numbers differ between batches, once there are more combinations than graphs are allowed."""
        constants = dict(constants_of(batch))
        if self._has_named_values or not constants:
            return
        form = tuple((name, type(value)) for name, value in constants.items())
        combinations = self._combinations.setdefault(form, set())
        combinations.add(tuple(constants.values()))
        if len(combinations) <= self._options.shapes:
            return
        self._has_named_values = True
        differing = [
            place for place, values in zip(form, zip(*combinations, strict=True), strict=True) if len(set(values)) > 1
        ]
        names = ", ".join(f"{name} ({kind.__name__})" for name, kind in differing)
        self._combinations.clear()
        self._say(
            f"{self._step}: batches differ in {names}, each combination needs a graph of its own, and CudaGraph(shapes="
            f"{self._options.shapes}) allows {self._options.shapes}; the other batches run eagerly. If only hooks read such an "
            "entry, name it in CudaGraph(hook_entries=[...]); else give it as a tensor"
        )

    def note_full(self, batch: Batch) -> None:
        """Reports a batch that was seen often enough for a capture, but has one shape more than graphs are allowed."""
        if self._has_named_shapes:
            return
        self._has_named_shapes = True
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors_of(batch))
        self._say(
            f"{self._step} runs eagerly for batches {shapes} and other new shapes: CudaGraph(shapes={self._options.shapes}) allows "
            "no further graph; give a larger number, or pad the batches"
        )

    def end(self) -> None:
        """Reports at the end of a run why no step was captured, unless a reason was reported before."""
        if self.captured or self._has_named_values or not self._batches:
            return
        warmup = self._options.warmup
        batches = "1 batch" if self._batches == 1 else f"{self._batches} batches"
        shapes = "1 shape" if len(self._eager) == 1 else f"{len(self._eager)} shapes"
        if max(self._eager.values()) < warmup:
            self._say(
                f"every {self._step} ran eagerly: a step is captured at batch {warmup} of a shape, and the run had {batches} of "
                f"{shapes}; give CudaGraph(warmup=...) a smaller number for short runs"
            )
        else:
            self._say(
                f"every {self._step} ran eagerly: the {batches} ended before all ranks, and all micro-batches of an accumulation, "
                f"had run {warmup} batches of a shape together"
            )
