"""The position of a pass within a loader, as plain values from which another process can resume.

A position is a dict with these keys:

- ``batches``: the number of batches that this rank got.
- ``samples``, for a loader with fabricamp's sampler: the number of samples of all ranks (batches, if it shares those of a batch
  sampler), so that a run with another batch size or another number of ranks resumes after the same sample.
- ``draws``, for the same loaders: the RNG draws that the order came from.
- ``batches_of_all_ranks``, for a loader with :class:`LengthGroups`: the number of batches of all ranks.
- ``state``, for a loader that keeps its own position; ``stream_samples``, if the samples of its stream are counted.
- ``begun``, with ``batches`` 0: the order of the pass is drawn; its first batch is out, but not done.
- ``rounds`` and ``ending``, for one of several loaders: see :class:`fabricamp.data.combined._Source`.

In the order of the file: how a position in a loader can be reached, the position itself, the opening and the end of a pass, and the
generators that a pass draws from.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import warnings
import weakref
from collections.abc import Iterator, Sequence, Sized
from typing import Any, TypeGuard, cast

import torch
from torch import Generator, Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset, default_collate

from fabricamp._utils.containers import tensors_within
from fabricamp._utils.first_rank import started_rank
from fabricamp._utils.types import Batch, Loader, StateDict, Stateful, has_state
from fabricamp.data.kept_positions import forget_loaded_state, untried_part
from fabricamp.data.length_groups import LengthGroups
from fabricamp.data.lengths import ends_by_samples, is_sized_stream, known_length, most_batches_of
from fabricamp.data.orders import GIVEN, Draw
from fabricamp.data.resident import ResidentLoader
from fabricamp.data.sample_seeds import SeededDataset
from fabricamp.data.samplers import GivenSampler, TrainSampler
from fabricamp.errors import CheckpointError
from fabricamp.rng import capture_rng, isolate_rng, restore_rng

_LOG = logging.getLogger("fabricamp")
_TOLD: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()
_LOOKED_BEHIND: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()

_END = object()

BEGUN = "begun"
"""Key of a position with 0 batches: the pass has begun, its order is drawn, and its first batch is out but not done."""


# -- how a position in a loader can be reached -----------------------------------------------------------------------------------


def own_sampler(loader: Loader) -> TrainSampler | None:
    """Returns the loader's :class:`TrainSampler`, with which a pass can begin at any position; None if it has none."""
    for name in ("sampler", "batch_sampler"):
        sampler = getattr(loader, name, None)
        if isinstance(sampler, TrainSampler):
            return sampler
    return None


def is_enterable(loader: Loader) -> bool:
    """Whether a pass can begin at any position without reading the batches before it."""
    return own_sampler(loader) is not None or _groups_of(loader) is not None


def _groups_of(loader: Loader) -> LengthGroups | None:
    batch_sampler = getattr(loader, "batch_sampler", None)
    return batch_sampler if type(loader) is DataLoader and isinstance(batch_sampler, LengthGroups) else None


def is_stateful(loader: Loader) -> bool:
    """Whether ``loader`` keeps its own position: it or its stream has ``state_dict`` and ``load_state_dict``.

    Not those of another library that are not known to continue exactly: see :mod:`fabricamp.data.kept_positions`.
    """
    return _stateful_part(loader) is not None


def _stateful_part(loader: Loader) -> Stateful | None:
    for part in _parts_with_state(loader):
        if untried_part(part) is None:
            return part
    return None


def _parts_with_state(loader: Loader) -> list[Stateful]:
    parts: list[object] = [loader]
    # With workers, the copies of the stream are in their processes, and their positions are not known here.
    if isinstance(loader, DataLoader) and loader.num_workers == 0 and isinstance(loader.dataset, IterableDataset):
        parts.append(loader.dataset)
    return [part for part in parts if has_state(part)]


def continues_after_limit(loader: Loader) -> bool:
    """Whether the next pass may continue where a limit ended the one before, as with a stream."""
    return is_stateful(loader) and own_sampler(loader) is None


def is_read_past(loader: Loader) -> bool:
    """Whether a position in ``loader`` can only be reached by reading the batches before it."""
    return not is_enterable(loader) and not is_stateful(loader) and type(loader) not in (list, tuple)


def why_read_past(loader: Loader) -> str:
    """Returns the type name of a loader that is read past, and which part of it has a state that is not used."""
    untried = (untried_part(part) for part in _parts_with_state(loader))
    reasons = [f" (the state of {name} is not known to continue exactly)" for name in untried if name is not None]
    return type(loader).__name__ + "".join(reasons[:1])


def is_drawn_again(loader: Loader) -> bool:
    """Whether a resumed pass over ``loader`` needs the RNG states of its beginning, from which a user's sampler draws again."""
    return is_read_past(loader) or isinstance(own_sampler(loader), GivenSampler)


def draw_order(loader: Loader) -> None:
    """Draws the order of an entered pass over ``loader`` under the present RNG states, if it is a user's sampler that draws."""
    sampler = own_sampler(loader)
    if isinstance(sampler, GivenSampler):
        sampler.order.draw()


def draws_while_reading(loader: Loader) -> bool:
    """Whether reading a batch may consume random numbers of this process, and a resumed pass can repeat these draws."""
    if not is_enterable(loader):
        return is_stateful(loader)
    if isinstance(loader, ResidentLoader):
        return loader.transform is not None
    plain = cast("DataLoader[Batch]", loader)  # as every other loader with a sampler of fabricamp's
    draws_nothing = isinstance(plain.dataset, TensorDataset | SeededDataset) and plain.collate_fn is default_collate
    return plain.num_workers == 0 and not draws_nothing


# -- the position ----------------------------------------------------------------------------------------------------------------


def position_of(loader: Loader, entered: StateDict, read: int) -> StateDict:
    """Returns the position of a pass that began at ``entered`` and has yielded ``read`` batches since."""
    position: StateDict = {"batches": entered.get("batches", 0) + read}
    sampler = own_sampler(loader)
    if sampler is not None:
        position["samples"] = entered.get("samples", 0) + read * _samples_of_a_batch(loader, sampler)
        position["draws"] = [draw._asdict() for draw in sampler.order.draws]
        return position
    stateful = _stateful_part(loader)
    groups = _groups_of(loader)
    if stateful is not None:
        position["state"] = copy.deepcopy(stateful.state_dict())
    elif groups is not None:
        position["batches_of_all_ranks"] = _batches_of_all_ranks(groups, entered) + read * groups.num_replicas
    return position


def draws_of(position: StateDict) -> list[Draw]:
    """Returns the RNG draws in ``position`` that the order of the pass came from."""
    return [Draw(**draw) for draw in position.get("draws", ())]


def enter(loader: Loader, position: StateDict) -> int:
    """Makes the next pass over ``loader`` begin at ``position``.

    Returns how many batches the caller has to read and drop for it.
    """
    batches = int(position.get("batches", 0))
    sampler = own_sampler(loader)
    if sampler is not None:
        samples = _samples(loader, sampler, position)
        # At the beginning of a pass that has not begun, the draws in the position are those of the pass before.
        sampler.enter(samples, draws_of(position) if samples or position.get(BEGUN) else [])
        return 0
    stateful = _stateful_part(loader)
    if stateful is not None:
        if "state" not in position:
            return batches
        stateful.load_state_dict(position["state"])
        return 0
    groups = _groups_of(loader)
    if groups is None:
        return batches
    groups.start = _batches_of_all_ranks(groups, position)
    return 0


def batches_before(loader: Loader, position: StateDict) -> int:
    """Returns the number of ``loader``'s batches before ``position``, also for one from another batch size or world size."""
    sampler = own_sampler(loader)
    groups = _groups_of(loader)
    order: TrainSampler | LengthGroups
    if sampler is not None:
        order = sampler
        start = _samples(loader, sampler, position)
        if known_length(loader) == math.inf:
            return start // _samples_of_a_batch(loader, sampler)
    elif groups is not None:
        order = groups
        start = _batches_of_all_ranks(groups, position)
    else:
        return int(position.get("batches", 0))
    # The loader's own len() counts: it leaves out what is before the start.
    sized = cast("Sized", loader)
    whole = len(sized)
    present_start = order.start
    order.start = start
    left = len(sized)
    order.start = present_start
    return whole - left


def convert(loader: Loader, order: StateDict | None, position: StateDict) -> None:
    """Converts ``position``, at which a run in ``order`` stopped, between a user's sampler as it is and one that ranks share.

    ``order``: the state of the loader's order in that run; None if the loader was used as it is.

    Raises:
        CheckpointError: for a position within a batch of a loader that is used as it is.
    """
    batches = int(position.get("batches", 0))
    sampler = own_sampler(loader)
    if isinstance(sampler, GivenSampler):
        if (
            order is None and "samples" not in position
        ):  # each rank, or the only one, read batches of the complete order
            position["samples"] = batches * batch_size_of(loader)
    elif sampler is None and order is not None and order["rule"] == GIVEN and batches:
        samples = int(position["samples"])
        size = batch_size_of(loader)
        if samples % size:
            raise CheckpointError(
                f"the checkpoint was written after {samples} samples of an epoch, and {type(loader).__name__} is read here in "
                f"batches of {size}, so that the run would continue within a batch; give a batch_size that divides {samples}, or "
                "a checkpoint from the end of an epoch"
            )
        position["batches"] = samples // size


def _samples(loader: Loader, sampler: TrainSampler, position: StateDict) -> int:
    """Returns the number of samples before ``position``; another program's checkpoint may only have the number of batches."""
    return int(position.get("samples", position.get("batches", 0) * _samples_of_a_batch(loader, sampler)))


def _samples_of_a_batch(loader: Loader, sampler: TrainSampler) -> int:
    return batch_size_of(loader) * sampler.world_size


def batch_size_of(loader: Loader) -> int:
    """Returns the number of samples in a batch; 1 for a user's batch sampler, whose batches are counted."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    if type(batch_sampler) is BatchSampler:
        return batch_sampler.batch_size
    return getattr(loader, "batch_size", None) or 1


def _batches_of_all_ranks(groups: LengthGroups, position: StateDict) -> int:
    return int(position.get("batches_of_all_ranks", position.get("batches", 0) * groups.num_replicas))


# -- the opening and the end of a pass -------------------------------------------------------------------------------------------


def begin(loader: Loader, *, again: bool) -> Iterator[Batch]:
    """Returns a new pass over ``loader``; ``again``: the run has begun an earlier pass, in this or in an earlier process.

    Torch draws a seed when it starts workers.  Persistent workers that a resumed run starts again draw none from the run's
    generator, since the run has drawn theirs before.  Workers that are kept because each sample has its own seed
    (:func:`keeps_workers`) draw one in each pass, as new workers would.
    """
    sampler = own_sampler(loader)
    if sampler is not None:
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


def keeps_workers(loader: Loader) -> TypeGuard[DataLoader[Batch]]:
    """Whether a loader's workers persist across epochs because each sample is seeded by itself."""
    sampler = own_sampler(loader)
    return sampler is not None and sampler.tags and cast("DataLoader[Batch]", loader).persistent_workers


def draw_seed(loader: DataLoader[Any]) -> None:
    """Consumes the random number that torch draws at the beginning of a pass: the base seed of the workers."""
    torch.empty((), dtype=torch.int64, device="cpu").random_(generator=loader.generator)


class StreamPass:
    """A pass over torch's DataLoader of a stream with a ``len()``; tells once if the stream has not as many samples as that says.

    If workers share the stream, the pass is ``complete`` when so many samples came.  ``ends``: it ends there, else only with the
    stream.  Samples are counted where all tensors of a batch have one length; where they have not, the pass is complete after the
    most batches that so many samples make.  ``position``: where the pass begins.
    """

    def __init__(self, loader: DataLoader[Any], batches: Iterator[Batch], position: StateDict, *, ends: bool) -> None:
        self.opened = batches
        self.samples = int(position.get("stream_samples", 0))
        self._count = int(position.get("batches", 0))
        self._loader = loader
        self._said = known_length(loader.dataset)
        self._most = most_batches_of(loader) if ends_by_samples(loader) else math.inf
        self._ends = ends

    @property
    def complete(self) -> bool:
        """Whether the stream has given all that its ``len()`` says, as far as workers share it."""
        return self._count >= self._most or (self._most < math.inf and self.samples >= self._said)

    def __iter__(self) -> StreamPass:
        return self

    def __next__(self) -> Batch:
        if self._ends and self.complete:
            self._look_behind()
            raise StopIteration
        try:
            batch = next(self.opened)
        except StopIteration:
            self._look_before()
            raise
        self._count += 1
        self.samples += samples_in(batch, self._loader.batch_size)
        return batch

    def _look_behind(self) -> None:
        """Tells, once, if the stream goes on: reads one more batch, unless the loader would then go on behind it."""
        if self._loader in _LOOKED_BEHIND or is_stateful(self._loader):
            return
        _LOOKED_BEHIND.add(self._loader)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own: it compares the number of batches with that of samples
            try:
                next(self.opened)
            except Exception:  # noqa: BLE001 - StopIteration, or an error behind the end, which is nobody's batch
                return
        self._tell("ends there, and the stream goes on: the rest is left out")

    def _look_before(self) -> None:
        """Tells, once, if the stream has ended early."""
        counts = self.samples > 0 and not self._loader.drop_last  # which drops the incomplete batch of each worker
        short = self.samples < self._said if counts else self._count < known_length(self._loader)
        if short:
            self._tell("ends there with the stream, earlier than schedules expect")

    def _tell(self, what: str) -> None:
        if self._loader in _TOLD or started_rank() != 0:
            return
        _TOLD.add(self._loader)
        name = type(self._loader.dataset).__name__
        came = f"{self._count} batches" + (f" of {self.samples} samples" if self.samples else "")
        said = f"{known_length(self._loader)} batches" + (f" of {self._said} samples" if self._said < math.inf else "")
        _LOG.warning(
            "%s says %s by its len(), and gave %s: an epoch %s; let __len__ say what the stream gives, or leave it out",
            name, said, came, what,
        )  # fmt: skip


def samples_in(batch: Batch, batch_size: int | None) -> int:
    """Returns the number of samples in a batch of at most ``batch_size`` (None: each is one sample); 0 if it does not show."""
    if batch_size is None:
        return 1
    lengths = {tensor.shape[0] for tensor in tensors_within(batch) if tensor.ndim}
    length = lengths.pop() if len(lengths) == 1 else 0
    return length if length <= batch_size else 0


def begin_stream(loader: Loader, position: StateDict, *, again: bool, ends: bool = True) -> Iterator[Batch]:
    """Returns what :func:`begin` does, as a :class:`StreamPass` if the loader is torch's over a stream with a ``len()``."""
    batches = begin(loader, again=again)
    return StreamPass(loader, batches, position, ends=ends) if is_sized_stream(loader) else batches


def without_first(batches: Iterator[Batch], unread: int) -> Iterator[Batch]:
    """Reads and drops the first ``unread`` of ``batches``; returns ``batches``.

    Without ``iter(batches)``, as everywhere in a pass: the iterator of a loader of the user's may be the loader, which then starts
    anew.
    """
    for _ in range(unread):
        if next(batches, _END) is _END:
            break
    return batches


def end_pass(loader: Loader, batches: object) -> None:
    """Ends the workers of one pass now, unless they are persistent: a kept traceback would keep them from the garbage collector.

    A stream that was entered at a saved state begins its next pass at the beginning.
    """
    forget_loaded_state(loader)
    if isinstance(batches, StreamPass):
        batches = batches.opened
    shut_down = getattr(batches, "_shutdown_workers", None)
    if shut_down is not None and not cast("DataLoader[Batch]", loader).persistent_workers:
        shut_down()


# -- the generators --------------------------------------------------------------------------------------------------------------


def generators_of(loaders: Sequence[Loader]) -> list[Generator]:
    """Returns the generators of ``loaders``, their samplers and batch samplers, each once."""
    generators: dict[int, Generator] = {}
    for loader in loaders:
        batch_sampler = getattr(loader, "batch_sampler", None)
        for part in (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
            generator = getattr(part, "generator", None)
            if isinstance(generator, Generator):
                generators[id(generator)] = generator
    return list(generators.values())


def states_of(generators: Sequence[Generator]) -> list[Tensor]:
    """Returns the states of ``generators``, for :func:`restore_states`."""
    return [generator.get_state() for generator in generators]


def restore_states(generators: Sequence[Generator], states: Sequence[Tensor]) -> None:
    """Restores the states of generators, pairwise; surplus generators or states are left out."""
    for generator, state in zip(generators, states, strict=False):
        generator.set_state(state.cpu())


def as_saved(snapshot: StateDict) -> StateDict:
    """Returns a snapshot of positions and RNG states (``rng_states``) in the form that a checkpoint stores."""
    rng = snapshot["rng_states"]["rng"]
    if isinstance(rng, tuple):  # else it is in that form already, or nothing was drawn
        rng = capture_rng(rng)
    return {**snapshot, "rng_states": {**snapshot["rng_states"], "rng": rng}}


def restore(drawn: StateDict, generators: Sequence[Generator]) -> None:
    """Restores the recorded states of the global generators (``rng``, may be None) and of ``generators``."""
    if drawn.get("rng"):
        restore_rng(drawn["rng"])
    restore_states(generators, drawn.get("generators", []))


@contextlib.contextmanager
def isolate(generators: Sequence[Generator]) -> Iterator[None]:
    """A context that restores the global generators and ``generators`` at its end."""
    before = states_of(generators)
    with isolate_rng():
        try:
            yield
        finally:
            restore_states(generators, before)
