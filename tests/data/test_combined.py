"""Several loaders as one: modes, lengths, collections."""

from __future__ import annotations

import itertools
from collections import UserDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from fabricamp.data import CombinedLoader, combine, wire_loader
from fabricamp.errors import ConfigError

LISTS = {"a": [0, 1, 2, 3, 4], "b": [10, 11]}


class Unsized:
    """Can be iterated again, but has no length."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


@pytest.mark.parametrize("kind", [list, Unsized])
@pytest.mark.parametrize(
    ("mode", "b"),
    [("max_size_cycle", [10, 11, 10, 11, 10]), ("max_size", [10, 11, None, None, None]), ("min_size", [10, 11])],
)
def test_modes(mode, b, kind):
    combined = CombinedLoader({name: kind(items) for name, items in LISTS.items()}, mode)
    expected = [{"a": first, "b": second} for first, second in zip(LISTS["a"], b, strict=False)]
    assert list(combined.batches()) == expected
    assert list(combined.batches()) == expected
    if kind is list:
        assert len(combined) == len(expected)
    else:
        with pytest.raises(TypeError, match="no len"):
            len(combined)


def test_sequential():
    combined = CombinedLoader(LISTS, "sequential")
    assert list(combined.batches()) == [0, 1, 2, 3, 4, 10, 11]
    assert len(combined) == 7


def test_by_hand_each_batch_has_its_number_and_that_of_its_loader():
    assert list(CombinedLoader(LISTS, "min_size")) == [({"a": 0, "b": 10}, 0, 0), ({"a": 1, "b": 11}, 1, 0)]
    assert list(CombinedLoader([[5, 6], [7]], "sequential")) == [(5, 0, 0), (6, 1, 0), (7, 0, 1)]
    collection = {"a": [range(1), range(2, 4)], "b": range(4, 5)}
    nested = CombinedLoader(collection, "sequential")
    assert list(nested) == [(0, 0, 0), (2, 0, 1), (3, 1, 1), (4, 0, 2)]
    assert (nested.iterables, nested.flattened) == (collection, [range(1), range(2, 4), range(4, 5)])


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.sampled_from(["max_size_cycle", "max_size", "min_size"]))
def test_sized_and_unsized_loaders_combine_alike(lengths, mode):
    items = [list(range(length)) for length in lengths]
    sized = CombinedLoader(items, mode)
    assert list(sized.batches()) == list(CombinedLoader([Unsized(one) for one in items], mode).batches())
    assert len(list(sized)) == len(sized)


def test_by_default_the_shortest_ends_it_but_fit_begins_shorter_ones_again():
    assert len(CombinedLoader(iterables=[[1, 2], [3]])) == 1  # as in Lightning
    assert combine([DataLoader(range(2)), DataLoader(range(1))]).mode == "max_size_cycle"


def test_collections_keep_their_kind():
    assert next(CombinedLoader([[1], [2]]).batches()) == [1, 2]
    assert next(CombinedLoader(([1], [2])).batches()) == (1, 2)


def test_collections_in_collections():
    combined = CombinedLoader({"a": [DataLoader([1, 2], batch_size=None), range(3)], "b": {"c": [7]}}, "max_size_cycle")
    assert len(combined) == 3
    assert [batch["a"] for batch in combined.batches()] == [[1, 0], [2, 1], [1, 2]]
    assert [batch["b"] for batch in combined.batches()] == [{"c": 7}] * 3
    shortest = combine([range(3), (range(1), range(2))], "min_size")
    assert list(shortest.batches()) == [[0, (0, 0)]]


def test_a_shorter_loader_that_starts_again_is_shuffled_anew():
    def pass_over(epoch):
        loaders = {"long": range(12), "short": DataLoader(range(6), shuffle=True, batch_size=None)}
        combined = wire_loader(combine(loaders), train=True, rank=0, world_size=1, seed=0)
        torch.manual_seed(epoch)
        drawn = [batch["short"] for batch in combined.batches()]
        return drawn[:6], drawn[6:]

    first, second = pass_over(1)
    assert sorted(first) == sorted(second) == list(range(6))
    assert first != second
    assert pass_over(1) == (first, second)
    assert pass_over(2) != (first, second)


def test_nothing_is_drawn_past_a_known_end():
    drawn = []

    class Loader:
        def __init__(self, name, length):
            self.name, self.length = name, length

        def __len__(self):
            return self.length

        def __iter__(self):
            for index in range(self.length):
                drawn.append((self.name, index))
                yield index

    list(CombinedLoader([Loader("a", 3), Loader("b", 2)], "max_size_cycle"))
    assert drawn == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 0)]


def test_wrong_ones_are_refused():
    with pytest.raises(ConfigError, match="did you mean 'max_size'"):
        CombinedLoader(LISTS, "max-size")
    with pytest.raises(ConfigError, match="empty collection"):
        CombinedLoader({})
    with pytest.raises(ConfigError, match=r"CombinedLoader\['b'\].*no batches"):
        CombinedLoader({"a": [1], "b": []})
    with pytest.raises(ConfigError, match="Tensor gives no batches"):
        CombinedLoader([[1], torch.zeros(2)])


def test_a_loader_that_cannot_start_again_is_named():
    with pytest.raises(ConfigError, match="cannot start again"):
        list(CombinedLoader([[1, 2, 3], iter([1])], "max_size_cycle"))


def test_streams_end_with_the_longest():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(5))

    combined = CombinedLoader({"stream": DataLoader(Stream(), batch_size=None), "list": [7, 8]}, "max_size_cycle")
    assert [batch["stream"] for batch in combined.batches()] == [0, 1, 2, 3, 4]
    endless = CombinedLoader({"stream": itertools.count(), "list": [7, 8]}, "min_size")
    assert list(endless.batches()) == [{"stream": 0, "list": 7}, {"stream": 1, "list": 8}]


def test_combine_tells_loaders_from_batches():
    loader = DataLoader(range(3))
    for collection in ({"a": loader, "b": [1, 2]}, [loader, range(2)], (loader,)):
        combined = combine(collection)
        assert isinstance(combined, CombinedLoader)
        assert combined.loaders is collection
    batches = [(torch.zeros(2), torch.zeros(2))] * 3
    of_numpy, of_texts = [(np.zeros(2), np.zeros(2))] * 3, [UserDict(text=torch.zeros(2))] * 3
    for as_it_is in (loader, batches, of_numpy, of_texts, [torch.zeros(2)], [np.zeros(2)], [], iter([1]), None):
        assert combine(as_it_is) is as_it_is
    with pytest.raises(ConfigError, match="DataLoader, Tensor"):
        combine([loader, torch.zeros(2)])
