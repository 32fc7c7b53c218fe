"""Orders of workers, and of WebDataset's, that no other process can repeat: a run cannot be resumed exactly within an epoch."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import DataLoader

from fabricamp.data.kept_positions import library_of
from fabricamp.data.sharding import Sharded


def unrepeatable_order(loader: object) -> str | None:
    """Returns what makes an order that no other process can repeat, and what to write instead; None if nothing does."""
    goes_on = True  # from pass to pass, unless each of them begins with new workers
    for stage in _stages_of(loader):
        if isinstance(stage, DataLoader):
            goes_on = stage.num_workers == 0 or stage.persistent_workers
            if stage.num_workers > 1 and not getattr(stage, "in_order", True):
                return (
                    f"{type(stage).__name__} hands out batches as its workers finish; give in_order=True, the default"
                )
            continue
        name = type(stage).__name__
        if name == "ResampledShards" and not getattr(stage, "deterministic", True):
            return "WebDataset draws shards from the process's number and the time; give ResampledShards(..., deterministic=True)"
        if name in ("ResampledShards", "detshuffle") and goes_on:
            return f"WebDataset counts the passes of this process in {name}; give the loader workers that are not persistent"
        if getattr(getattr(stage, "f", None), "__name__", "") != "_shuffle":
            continue
        given = dict(zip(("bufsize", "initial", "rng", "seed"), getattr(stage, "args", ()), strict=False))
        given.update(getattr(stage, "kw", {}))
        if given.get("seed") is not None:
            continue
        if given.get("rng") is None:
            return "WebDataset shuffles by the process's number and the time; give shuffle(..., seed=...)"
        if goes_on:
            return "WebDataset goes on with the rng of shuffle(..., rng=...) from pass to pass; give shuffle(..., seed=...)"
    return None


def _stages_of(part: object) -> Iterator[object]:
    """Yields the loaders, and the stages of the pipelines of WebDataset's, that ``part`` reads from, outer ones first."""
    if isinstance(part, DataLoader | Sharded):
        yield part
        yield from _stages_of(part.dataset)
    elif library_of(part) == "webdataset":
        yield part
        for stage in getattr(part, "pipeline", ()):
            yield from _stages_of(stage)
