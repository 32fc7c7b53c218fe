"""Plans which tensors share a bucket and its collective; depends only on sizes, dtypes and devices, so all ranks agree."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """Size and ``kind`` (dtype and device) of one tensor; only pieces of one kind share a bucket."""

    elements: int
    kind: Hashable


class Bucket(NamedTuple):
    """Pieces that are exchanged as one flat tensor: their positions in the given sequence, and their lengths in elements."""

    indices: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The length of the flat tensor."""
        return sum(self.lengths)


def plan_messages(pieces: Sequence[Piece], elements: float, triggers: Collection[int] = ()) -> list[Bucket]:
    """Returns buckets that together hold each piece once, in the order in which they become full.

    Pieces are added in order.  A bucket is full when it holds at least ``elements`` elements.  With ``triggers`` (positions of
    pieces) it is full only when it gets one of these.  Buckets that never become full come last.

    >>> plan_messages([Piece(3, "fp32"), Piece(2, "fp16"), Piece(2, "fp32")], elements=3)
    [Bucket(indices=(0,), lengths=(3,)), Bucket(indices=(1,), lengths=(2,)), Bucket(indices=(2,), lengths=(2,))]
    """
    full: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    held: dict[Hashable, int] = {}
    for index, piece in enumerate(pieces):
        filling.setdefault(piece.kind, []).append(index)
        held[piece.kind] = held.get(piece.kind, 0) + piece.elements
        if (index in triggers) if triggers else held[piece.kind] >= elements:
            full.append(filling.pop(piece.kind))
            del held[piece.kind]
    rest = [filling[kind] for kind in filling]
    return [Bucket(tuple(indices), tuple(pieces[index].elements for index in indices)) for indices in [*full, *rest]]
