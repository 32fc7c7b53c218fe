"""cast_floating keeps types and values in all kinds of containers."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fabricamp.precision.casting import cast_floating


class Pair(NamedTuple):
    left: object
    right: object


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@dataclass
class Record:
    left: object
    right: object
    note: str = field(default="note", init=False)


@dataclass(frozen=True, slots=True)
class Frozen:
    left: object
    right: object


def containers(children):
    pairs = st.tuples(children, children)
    return st.one_of(
        st.lists(children, max_size=3),
        pairs,
        pairs.map(lambda two: Pair(*two)),
        pairs.map(lambda two: Record(*two)),
        pairs.map(lambda two: Frozen(*two)),
        st.dictionaries(st.text(max_size=2), children, max_size=3),
        st.dictionaries(st.text(max_size=2), children, max_size=3).map(OrderedDict),
    )


leaves = st.one_of(
    st.sampled_from([*FLOATS, torch.int64, torch.bool, torch.complex64]).map(lambda dtype: torch.ones(2, dtype=dtype)),
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    st.just(np.ones(2)),
)


def check(old, new, dtype):
    assert type(old) is type(new)
    if isinstance(old, torch.Tensor):
        assert new.dtype is (dtype if old.is_floating_point() else old.dtype)
        assert torch.equal(old.to(new.dtype), new)
    elif isinstance(old, dict):
        assert list(old) == list(new)
        for key in old:
            check(old[key], new[key], dtype)
    elif isinstance(old, (list, tuple)):
        assert len(old) == len(new)
        for one, two in zip(old, new, strict=True):
            check(one, two, dtype)
    elif isinstance(old, (Record, Frozen)):
        check(old.left, new.left, dtype)
        check(old.right, new.right, dtype)
    else:
        assert old is new


@settings(max_examples=80, deadline=None)
@given(st.recursive(leaves, containers, max_leaves=8), st.sampled_from(FLOATS))
def test_types_stay_and_floats_are_cast(value, dtype):
    cast = cast_floating(value, dtype)
    check(value, cast, dtype)
    assert cast_floating(cast, dtype) is cast  # nothing left to change


def test_special_containers():
    default = defaultdict(list, x=torch.ones(1))
    cast = cast_floating(default, torch.float16)
    assert cast["x"].dtype is torch.float16
    assert cast["new"] == []
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    cast = cast_floating(packed, torch.float16)
    assert isinstance(cast, nn.utils.rnn.PackedSequence)
    assert (cast.data.dtype, cast.batch_sizes.dtype) == (torch.float16, torch.int64)
    assert cast_floating(torch.ones(2, 2).max(0), torch.float16).values.dtype is torch.float16
    module = nn.Linear(2, 2)
    assert cast_floating([module], torch.float16)[0].weight.dtype is torch.float32
    assert cast_floating(range(3), torch.float16) == range(3)
    assert cast_floating(torch.Size([1, 2]), torch.float16) == torch.Size([1, 2])


def test_objects_with_to():
    class Batch:
        def __init__(self, x):
            self.x = x

        def to(self, target):
            return Batch(self.x.to(target))

    class OnlyDevices:
        def to(self, target):
            raise TypeError("not a device")

    assert cast_floating({"b": Batch(torch.ones(1))}, torch.bfloat16)["b"].x.dtype is torch.bfloat16
    with pytest.raises(ValueError, match=r"OnlyDevices\.to"):
        cast_floating([OnlyDevices()], torch.float16)


def test_gradients_flow_through_the_cast():
    x = torch.ones(2, requires_grad=True)
    cast_floating({"x": x}, torch.float16)["x"].sum().backward()
    assert x.grad.dtype is torch.float32
