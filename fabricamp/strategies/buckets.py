"""Which tensors travel together: pure planning from sizes and kinds, the same on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Sequence

__all__ = ["Bucket", "Piece", "plan_buckets", "plan_messages"]


class Piece(NamedTuple):
    """What planning has to know of one tensor; only pieces of one ``kind`` (dtype and device) share a bucket."""

    elements: int
    itemsize: int
    kind: Hashable


class Bucket(NamedTuple):
    """Pieces that travel as one flat tensor: their positions in the given sequence, and their lengths in elements."""

    indices: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The length of the flat tensor."""
        return sum(self.lengths)


def plan_buckets(pieces: Sequence[Piece], capacity: int) -> list[Bucket]:
    """Returns buckets of at most ``capacity`` bytes that together hold each piece once; a larger piece travels alone.

    Pieces keep their order within a kind, and buckets are ordered by their first piece, so ranks that hold the same
    pieces start the same exchanges in the same order.

    >>> plan_buckets([Piece(3, 4, "fp32"), Piece(2, 2, "fp16"), Piece(2, 4, "fp32")], capacity=16)
    [Bucket(indices=(0,), lengths=(3,)), Bucket(indices=(1,), lengths=(2,)), Bucket(indices=(2,), lengths=(2,))]
    """
    members: list[list[int]] = []
    open_bucket: dict[Hashable, int] = {}
    room: dict[Hashable, int] = {}
    for index, piece in enumerate(pieces):
        size = piece.elements * piece.itemsize
        if piece.kind not in open_bucket or size > room[piece.kind]:
            open_bucket[piece.kind] = len(members)
            room[piece.kind] = capacity
            members.append([])
        room[piece.kind] -= size
        members[open_bucket[piece.kind]].append(index)
    return [Bucket(tuple(indices), tuple(pieces[index].elements for index in indices)) for indices in members]


def plan_messages(pieces: Sequence[Piece], elements: float, triggers: Collection[int] = ()) -> list[Bucket]:
    """Returns buckets that together hold each piece once, in the order in which they are full as pieces come in order.

    A bucket is full with the piece that brings it to so many ``elements``; with ``triggers`` (positions of pieces), however, with
    one of these and with nothing else.  Those that never fill are the last ones.

    >>> plan_messages([Piece(3, 4, "fp32"), Piece(2, 2, "fp16"), Piece(2, 4, "fp32")], elements=3)
    [Bucket(indices=(0,), lengths=(3,)), Bucket(indices=(1,), lengths=(2,)), Bucket(indices=(2,), lengths=(2,))]
    """
    full: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    for index, piece in enumerate(pieces):
        members = filling.setdefault(piece.kind, [])
        members.append(index)
        held = sum(pieces[member].elements for member in members)
        if (index in triggers) if triggers else held >= elements:
            full.append(filling.pop(piece.kind))
    rest = [filling[kind] for kind in filling]
    return [Bucket(tuple(indices), tuple(pieces[index].elements for index in indices)) for indices in [*full, *rest]]
