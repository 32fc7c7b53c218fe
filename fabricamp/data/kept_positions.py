"""Which streams and loaders of other libraries continue exactly from a state of their own: a table of what was tried.

A state may leave out what the rest of a pass depends on (a shuffle buffer, say), and no check at the start of a run sees it.  So a
library's part is read from its saved state only if its version and its type are in :data:`EXACT`; a run with any other part reads
again from the beginning of the pass.  The user's own classes keep their own promise.

``tests/data/test_kept_positions.py`` resumes a pass over each entry at five positions, across two refills of a buffer.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterator
from typing import NamedTuple

from torch.utils.data import DataLoader


class Tried(NamedTuple):
    """What of a library continues exactly: the ``versions`` (major and minor number) that were tried, and the names of types."""

    versions: tuple[tuple[int, int], ...]
    types: frozenset[str]


EXACT = {
    # Not BufferShuffledExamplesIterable (shuffle): the examples in its buffer are no part of its state.
    "datasets": Tried(
        versions=((5, 1), (5, 2)),
        types=frozenset(
            {
                "ArrowExamplesIterable",
                "CyclingMultiSourcesExamplesIterable",
                "ExamplesIterable",
                "FilteredExamplesIterable",
                "FormattedExamplesIterable",
                "HorizontallyConcatenatedMultiSourcesExamplesIterable",
                "IterableDataset",
                "MappedExamplesIterable",
                "RandomlyCyclingMultiSourcesExamplesIterable",
                "RebatchedArrowExamplesIterable",
                "RepeatExamplesIterable",
                "SelectColumnsIterable",
                "SkipExamplesIterable",
                "TakeExamplesIterable",
                "VerticallyConcatenatedMultiSourcesExamplesIterable",
            }
        ),
    ),
    "torchdata": Tried(
        versions=((0, 11),),
        types=frozenset(
            {
                "Batcher",
                "IterableWrapper",
                "Loader",
                "LoaderIterator",
                "MultiNodeWeightedSampler",
                "ParallelMapper",
                "Prefetcher",
                "SamplerWrapper",
                "StatefulDataLoader",
                "Unbatcher",
            }
        ),
    ),
}
"""By library."""

_LOOKED_AT: weakref.WeakKeyDictionary[object, str | None] = weakref.WeakKeyDictionary()


def untried_part(source: object) -> str | None:
    """Returns the name of a part of ``source`` (a loader or a stream) that is not known to continue exactly; None if all do."""
    try:
        if source not in _LOOKED_AT:
            _LOOKED_AT[source] = _untried_within(source)
        return _LOOKED_AT[source]
    except TypeError:  # of a class without a hash, or without weak references
        return _untried_within(source)


def _untried_within(source: object) -> str | None:
    among_nodes = None  # the name of a node of torchdata's
    streams = None  # the name of a part of datasets'
    for part in _stateful_parts(source, {}):
        library = _library_of(part)
        name = type(part).__name__
        among_nodes = among_nodes or (name if type(part).__module__.startswith("torchdata.nodes") else None)
        streams = streams or (name if library == "datasets" else None)
        tried = EXACT.get(library)
        if tried is None or name.startswith("_"):  # the user's, or an inner part of one that is looked at
            continue
        version = _version_of(library)
        if version[:2] not in tried.versions or name not in tried.types:
            return f"{name} of {library} {'.'.join(map(str, version))}"
    # A stream of datasets' begins every later pass at the state that a node has loaded into it.
    return f"{streams} of datasets within {among_nodes} of torchdata" if streams and among_nodes else None


def _stateful_parts(part: object, seen: dict[int, object]) -> Iterator[object]:
    """Yields ``part`` and, of the objects that it holds, those with a ``state_dict`` in turn."""
    if id(part) in seen:
        return
    seen[id(part)] = part
    yield part
    for value in getattr(part, "__dict__", {}).values():
        within = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        for one in within:
            if callable(getattr(one, "state_dict", None)):
                yield from _stateful_parts(one, seen)


def _library_of(part: object) -> str:
    return type(part).__module__.partition(".")[0]


@functools.cache
def _version_of(library: str) -> tuple[int, ...]:
    """Returns the numbers of the version of an imported ``library``."""
    numbers = getattr(sys.modules[library], "__version__", "").partition("+")[0].split(".")
    return tuple(int(number) for number in numbers if number.isdigit())


# -- orders that cannot be repeated ----------------------------------------------------------------------------------------------


def unrepeatable_order(loader: object) -> str | None:
    """Returns what of WebDataset's draws an order that no other process can draw, and what to write instead; None if nothing."""
    stream = loader.dataset if isinstance(loader, DataLoader) else loader
    workers = loader.num_workers if isinstance(loader, DataLoader) else 0
    goes_on = workers == 0 or getattr(loader, "persistent_workers", False)
    for stage in _stages_of(stream):
        name = type(stage).__name__
        if name == "ResampledShards" and not getattr(stage, "deterministic", True):
            return "draws shards from the process's number and the time; give ResampledShards(..., deterministic=True)"
        if name == "detshuffle" and goes_on:
            return "counts the passes of this process in detshuffle(); give shuffle(..., seed=...)"
        if getattr(getattr(stage, "f", None), "__name__", "") != "_shuffle":
            continue
        given = dict(zip(("bufsize", "initial", "rng", "seed"), getattr(stage, "args", ()), strict=False))
        given.update(getattr(stage, "kw", {}))
        if given.get("seed") is not None:
            continue
        if given.get("rng") is None:
            return "shuffles by the process's number and the time; give shuffle(..., seed=...)"
        if goes_on:
            return "goes on with the rng of shuffle(..., rng=...) from pass to pass; give shuffle(..., seed=...)"
    return None


def _stages_of(stream: object) -> Iterator[object]:
    """Yields the stages of a pipeline of WebDataset's, and those of the pipelines within."""
    if _library_of(stream) != "webdataset":
        return
    yield stream
    for stage in getattr(stream, "pipeline", ()):
        yield from _stages_of(stage)
