from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fabricamp.strategies.buckets import Bucket, Piece, plan_buckets

kinds = st.sampled_from([("fp32", 4), ("fp16", 2), ("fp64", 8)])
pieces = st.lists(
    st.tuples(st.integers(0, 40), kinds).map(lambda drawn: Piece(drawn[0], drawn[1][1], drawn[1][0])), max_size=30
)


@given(pieces, st.integers(1, 200))
def test_every_piece_travels_once_with_its_kind_and_within_capacity(pieces, capacity):
    buckets = plan_buckets(pieces, capacity)

    assert sorted(index for bucket in buckets for index in bucket.indices) == list(range(len(pieces)))
    for bucket in buckets:
        assert bucket.lengths == tuple(pieces[index].elements for index in bucket.indices)
        assert len({pieces[index].kind for index in bucket.indices}) == 1
        size = sum(pieces[index].elements * pieces[index].itemsize for index in bucket.indices)
        heavy = [index for index in bucket.indices if pieces[index].elements * pieces[index].itemsize > capacity]
        assert size <= capacity or (heavy and heavy[0] == bucket.indices[0])


@given(pieces, st.integers(1, 200))
def test_order_is_that_of_the_pieces(pieces, capacity):
    buckets = plan_buckets(pieces, capacity)

    assert [bucket.indices[0] for bucket in buckets] == sorted(bucket.indices[0] for bucket in buckets)
    for kind in {piece.kind for piece in pieces}:
        order = [index for bucket in buckets for index in bucket.indices if pieces[index].kind == kind]
        assert order == sorted(order)


@given(pieces, st.integers(1, 200))
def test_no_two_buckets_in_a_row_of_one_kind_would_fit_together(pieces, capacity):
    last = {}
    for bucket in plan_buckets(pieces, capacity):
        kind = pieces[bucket.indices[0]].kind
        if kind in last:
            first = pieces[bucket.indices[0]]
            assert last[kind] + first.elements * first.itemsize > capacity
        last[kind] = sum(pieces[index].elements * pieces[index].itemsize for index in bucket.indices)


def test_a_piece_above_capacity_travels_alone():
    buckets = plan_buckets([Piece(2, 4, "a"), Piece(100, 4, "a"), Piece(2, 4, "a")], capacity=16)
    assert buckets == [Bucket((0,), (2,)), Bucket((1,), (100,)), Bucket((2,), (2,))]
    assert [bucket.elements for bucket in buckets] == [2, 100, 2]


def test_nothing_to_send_needs_no_bucket():
    assert plan_buckets([], 100) == []
