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

from torch.utils.data import IterableDataset

from fabricamp._utils.types import has_state


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


def forget_loaded_state(loader: object) -> None:
    """Makes streams of datasets' within ``loader`` begin their next pass at its beginning.

    They begin each pass with the number of an epoch at the state that was last loaded for it: a second run, too.
    """
    if "datasets" not in sys.modules:
        return
    for part in _stateful_parts(loader, {}):
        if library_of(part) == "datasets" and isinstance(part, IterableDataset) and has_state(part):
            part.load_state_dict(None)  # type: ignore[arg-type]


def _untried_within(source: object) -> str | None:
    among_nodes = None  # the name of a node of torchdata's
    streams = None  # the name of a part of datasets'
    for part in _stateful_parts(source, {}):
        library = library_of(part)
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


def library_of(part: object) -> str:
    """Returns the name of the package that defines the type of ``part``."""
    return type(part).__module__.partition(".")[0]


@functools.cache
def _version_of(library: str) -> tuple[int, ...]:
    """Returns the numbers of the version of an imported ``library``."""
    numbers = getattr(sys.modules[library], "__version__", "").partition("+")[0].split(".")
    return tuple(int(number) for number in numbers if number.isdigit())
