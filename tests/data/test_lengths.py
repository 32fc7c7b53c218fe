"""Lengths, limits, and the errors for unusable loaders."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fabricamp.data import CombinedLoader, check_equal_lengths, check_limit, limit_batches, loader_length, wire_loader
from fabricamp.errors import ConfigError, DistributedError
from fabricamp.strategies.base import Strategy


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


class Ranks(Strategy):
    """A strategy in which the other ranks answer with given values."""

    def __init__(self, *others):
        super().__init__()
        self.others = others

    def all_gather_object(self, value):
        return [value, *self.others]


def test_length_of_what_has_one():
    assert loader_length([1, 2, 3], "train_dataloaders") == 3
    assert loader_length(DataLoader(range(10), batch_size=4), "train_dataloaders") == 3
    assert loader_length(DataLoader(Stream()), "train_dataloaders") == math.inf
    assert loader_length(iter([1]), "train_dataloaders") == math.inf


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        ([], "no batches"),
        (DataLoader([]), "no batches"),
        (DataLoader(range(3), batch_size=4, drop_last=True), "drop_last"),
        (3, "int gives no batches"),
        (None, "NoneType gives no batches"),
        ("data", "str gives no batches"),
        (torch.zeros(3), "Tensor gives no batches"),
        (TensorDataset(torch.zeros(3)), "wrap it: DataLoader"),
    ],
)
def test_what_cannot_be_used_is_named(loader, said):
    with pytest.raises(ConfigError, match=said) as caught:
        loader_length(loader, "val_dataloaders")
    assert str(caught.value).startswith("val_dataloaders: ")


def test_a_rank_may_have_no_sample_to_evaluate_but_the_ranks_together_not():
    place = {"train": False, "rank": 1, "world_size": 2, "seed": 0}
    assert loader_length(wire_loader(DataLoader(range(1)), **place), "val_dataloaders") == 0
    with pytest.raises(ConfigError, match="no batches"):
        loader_length(wire_loader(DataLoader([]), **place), "val_dataloaders")


@pytest.mark.parametrize(
    ("length", "limit", "expected"),
    [
        (10, 1.0, 10),
        (10, 1, 1),
        (10, 3, 3),
        (10, 30, 10),
        (10, 0, 0),
        (10, 0.0, 0),
        (10, 0.25, 2),
        (math.inf, 1.0, math.inf),
        (math.inf, 4, 4),
        (math.inf, 0.0, 0),
        (0, 0.5, 0),
    ],
)
def test_limits(length, limit, expected):
    assert limit_batches(length, limit, "limit_train_batches") == expected


@given(length=st.integers(1, 1000), fraction=st.floats(0, 1))
def test_fractions_never_ask_for_more_and_never_silently_for_none(length, fraction):
    if int(length * fraction) > 0 or fraction == 0:
        assert limit_batches(length, fraction, "limit_val_batches") == int(length * fraction)
        return
    with pytest.raises(ConfigError, match="less than one batch") as caught:
        limit_batches(length, fraction, "limit_val_batches")
    smallest = float(str(caught.value).split("at least ")[1].split(",")[0])
    assert limit_batches(length, smallest, "limit_val_batches") >= 1


@pytest.mark.parametrize(
    ("limit", "said"),
    [(1.5, "outside"), (-0.1, "outside"), (-2, "negative"), (True, "bool"), ("3", "str"), (math.nan, "outside")],
)
def test_wrong_limits_are_refused(limit, said):
    with pytest.raises(ConfigError, match=f"limit_test_batches=.*{said}"):
        check_limit(limit, "limit_test_batches")


def test_a_fraction_of_an_unknown_length_is_refused():
    with pytest.raises(ConfigError, match=r"limit_train_batches=0\.5 is a fraction of a loader that has no len"):
        limit_batches(math.inf, 0.5, "limit_train_batches")


def test_ranks_with_different_lengths_are_named():
    check_equal_lengths(Ranks((4, [])), 4, "train_dataloaders")
    with pytest.raises(DistributedError, match=r"train_dataloaders .*rank 0: 4, rank 1: 5, rank 2: unknown"):
        check_equal_lengths(Ranks((5, []), (math.inf, [])), 4, "train_dataloaders")


def test_ranks_with_different_data_or_seeds_are_named():
    loader = wire_loader(DataLoader(range(10), shuffle=True), train=True, rank=0, world_size=2, seed=7)
    check_equal_lengths(Ranks((5, [(10, 7)])), 5, "train_dataloaders", loader)
    with pytest.raises(DistributedError, match="rank 0: 10 samples, seed 7, rank 1: 9 samples, seed 7"):
        check_equal_lengths(Ranks((5, [(9, 7)])), 5, "train_dataloaders", loader)
    with pytest.raises(DistributedError, match="rank 1: its own sampler"):
        check_equal_lengths(Ranks((5, [])), 5, "train_dataloaders", loader)
    both = CombinedLoader([loader, loader])
    with pytest.raises(
        DistributedError, match=r"10 samples, seed 7 and 10 samples, seed 7, rank 1: 10 samples, seed 7 and 10 .* 8"
    ):
        check_equal_lengths(Ranks((5, [(10, 7), (10, 8)])), 5, "train_dataloaders", both)
