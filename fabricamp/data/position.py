"""Where in a loader a pass stands, as plain values that another process can go on from.

A place is a dict: ``batches`` that this rank got; for a loader with fabricamp's sampler also ``samples``, those of all ranks,
so that other batch sizes and other numbers of ranks go on behind the same sample, and the ``draws`` that the order came from;
for one with :class:`LengthGroups` also ``groups``, the batches of all ranks; for one that keeps its own position ``state``.
``begun`` stands in a place without batches, of a pass whose order is drawn: its first batch is out, and not done.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from fabricamp.data.length_groups import LengthGroups
from fabricamp.data.orders import Draw
from fabricamp.data.resident import ResidentLoader
from fabricamp.data.samplers import TrainSampler
from fabricamp.data.seeding import SeededDataset
from fabricamp.rng import capture_rng, isolate_rng, restore_rng

BEGUN = "begun"
"""In a place without batches: the pass was begun, its order is drawn, and its first batch is out but not done."""


def own_sampler(loader: Any) -> TrainSampler | None:
    """Returns the sampler by which a pass can begin anywhere."""
    sampler = getattr(loader, "sampler", None)
    return sampler if isinstance(sampler, TrainSampler) else None


def is_enterable(loader: Any) -> bool:
    """Whether a pass can begin anywhere without reading what lies before."""
    return own_sampler(loader) is not None or _groups_of(loader) is not None


def is_stateful(loader: Any) -> bool:
    """Whether ``loader`` keeps its own position (``state_dict`` and ``load_state_dict``, its own or its stream's)."""
    return _stateful_part(loader) is not None


def goes_on_behind_a_pass(loader: Any) -> bool:
    """Whether a pass that a number ended may be gone on behind by the next one, as a stream is."""
    return is_stateful(loader) and own_sampler(loader) is None


def is_read_past(loader: Any) -> bool:
    """Whether nothing but reading leads to a place in ``loader``."""
    return not is_enterable(loader) and not is_stateful(loader) and type(loader) not in (list, tuple)


def place_of(loader: Any, entered: dict[str, Any], given: int) -> dict[str, Any]:
    """Returns the place of a pass that began at ``entered`` and has handed out ``given`` batches since."""
    place: dict[str, Any] = {"batches": entered.get("batches", 0) + given}
    sampler, part = own_sampler(loader), _stateful_part(loader)
    if sampler is not None:
        place["samples"] = entered.get("samples", 0) + given * _samples_of_a_batch(loader, sampler)
        place["draws"] = [draw._asdict() for draw in sampler.order.draws]
    elif part is not None:
        place["state"] = copy.deepcopy(part.state_dict())
    elif (groups := _groups_of(loader)) is not None:
        place["groups"] = _batches_of_all(groups, entered) + given * groups.num_replicas
    return place


def begin(loader: Any, *, again: bool) -> Any:
    """Returns a new pass over ``loader``; ``again`` where the run has begun one before, in this process or in an earlier one.

    Torch draws a seed where it starts workers; persistent ones, which a resumed run starts again, have had theirs.  Those that a
    loader keeps because each sample has its own seed draw as new ones would.
    """
    if (sampler := own_sampler(loader)) is not None:
        sampler.order.together = True
    if keeps_workers(loader):
        if loader._iterator is not None:
            draw_seed(loader)
        return iter(loader)
    if not again or not isinstance(loader, DataLoader) or not loader.persistent_workers or loader._iterator is not None:
        return iter(loader)
    generator = loader.generator
    loader.generator = (torch.default_generator if generator is None else generator).clone_state()
    try:
        return iter(loader)
    finally:
        loader.generator = generator


def keeps_workers(loader: Any) -> bool:
    """Whether the workers of one of torch's loaders outlive an epoch because each sample is seeded by itself."""
    sampler = own_sampler(loader)
    return sampler is not None and sampler.tags and bool(loader.persistent_workers)


def draw_seed(loader: DataLoader[Any]) -> None:
    """Draws what torch does where a pass begins: the seed that it gives to workers."""
    torch.empty((), dtype=torch.int64, device="cpu").random_(generator=loader.generator)


def enter(loader: Any, place: dict[str, Any]) -> int:
    """Makes the next pass over ``loader`` begin at ``place``; returns how many batches have to be read past instead."""
    sampler, part = own_sampler(loader), _stateful_part(loader)
    if sampler is not None and not sampler.read_past:
        samples = _samples(loader, sampler, place)
        # Where nothing of a pass lies behind, the draws are those of the pass before, unless it was begun.
        sampler.enter(samples, draws_of(place) if samples or place.get(BEGUN) else [])
        return 0
    if sampler is None and part is not None and "state" in place:
        part.load_state_dict(place["state"])
        return 0
    if part is None and (groups := _groups_of(loader)) is not None:
        groups.start = _batches_of_all(groups, place)
        return 0
    if sampler is not None:
        sampler.read_past = False
    return int(place.get("batches", 0))


def draws_of(place: dict[str, Any]) -> list[Draw]:
    """Returns the draws that the order of the pass came from."""
    return [Draw(**draw) for draw in place.get("draws", ())]


def batches_behind(loader: Any, place: dict[str, Any]) -> int:
    """Returns the number of ``loader``'s batches that lie behind ``place``, whoever counted them."""
    sampler, groups = own_sampler(loader), _groups_of(loader)
    order: Any = groups if sampler is None else sampler
    if order is None or (sampler is not None and sampler.read_past):
        return int(place.get("batches", 0))
    whole, before = len(loader), order.start
    order.start = _batches_of_all(order, place) if sampler is None else _samples(loader, sampler, place)
    left = len(loader)
    order.start = before
    return whole - left


def draws_while_reading(loader: Any) -> bool:
    """Whether reading a batch may draw from this process's generators, and a resumed pass could draw the same again."""
    if not is_enterable(loader):
        return is_stateful(loader)
    if isinstance(loader, ResidentLoader):
        return loader.transform is not None
    known = isinstance(loader.dataset, TensorDataset | SeededDataset) and loader.collate_fn is default_collate
    return loader.num_workers == 0 and not known


def without_first(batches: Any, unread: int) -> Any:
    """``batches`` without the first ``unread``."""
    next(itertools.islice(batches, unread, unread), None)
    return batches


def end_workers(loader: Any, batches: Any) -> None:
    """Ends the workers of one pass now: left to the collector, a traceback that is kept would keep them too."""
    shut_down = getattr(batches, "_shutdown_workers", None)
    if shut_down is not None and not loader.persistent_workers:
        shut_down()


def generators_of(loaders: Sequence[Any]) -> list[Generator]:
    """Returns the generators that ``loaders`` were built with, each once."""
    found: dict[int, Generator] = {}
    for loader in loaders:
        batch_sampler = getattr(loader, "batch_sampler", None)
        for part in (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
            generator = getattr(part, "generator", None)
            if isinstance(generator, Generator):
                found[id(generator)] = generator
    return list(found.values())


def states_of(generators: Sequence[Generator]) -> list[Tensor]:
    """Returns what :func:`restore_states` takes."""
    return [generator.get_state() for generator in generators]


def restore_states(generators: Sequence[Generator], states: Sequence[Tensor]) -> None:
    """Gives generators their states back, as far as there are as many as before."""
    for generator, state in zip(generators, states, strict=False):
        generator.set_state(state.cpu())


def as_saved(mark: dict[str, Any]) -> dict[str, Any]:
    """A mark as a checkpoint holds it."""
    rng = mark["drawn"]["rng"]
    return {**mark, "drawn": {**mark["drawn"], "rng": None if rng is None else capture_rng(rng)}}


def restore(drawn: dict[str, Any], generators: Sequence[Generator]) -> None:
    """Takes back what was noted of the global generators (``rng``, or None) and of ``generators``."""
    if drawn.get("rng"):
        restore_rng(drawn["rng"])
    restore_states(generators, drawn.get("generators", []))


@contextlib.contextmanager
def isolate(generators: Sequence[Generator]) -> Iterator[None]:
    """A context that leaves the global generators and ``generators`` as it found them."""
    before = states_of(generators)
    with isolate_rng():
        try:
            yield
        finally:
            restore_states(generators, before)


def _stateful_part(loader: Any) -> Any:
    parts = [loader]
    # Worker processes have the stream's copies, whose positions are not known here.
    if isinstance(loader, DataLoader) and loader.num_workers == 0 and isinstance(loader.dataset, IterableDataset):
        parts.append(loader.dataset)
    for part in parts:
        if all(callable(getattr(part, name, None)) for name in ("state_dict", "load_state_dict")):
            return part
    return None


def _groups_of(loader: Any) -> LengthGroups | None:
    batches = getattr(loader, "batch_sampler", None)
    return batches if type(loader) is DataLoader and isinstance(batches, LengthGroups) else None


def _batches_of_all(groups: LengthGroups, place: dict[str, Any]) -> int:
    """The batches of all ranks behind ``place``."""
    return int(place.get("groups", place.get("batches", 0) * groups.num_replicas))


def _samples(loader: Any, sampler: TrainSampler, place: dict[str, Any]) -> int:
    """The samples behind ``place``; a file of another program tells batches only."""
    return int(place.get("samples", place.get("batches", 0) * _samples_of_a_batch(loader, sampler)))


def _samples_of_a_batch(loader: Any, sampler: TrainSampler) -> int:
    return (loader.batch_size or 1) * sampler.world_size
