"""Moving batches: containers keep their types, and tensors that are on the device already are not copied."""

from __future__ import annotations

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from fabricamp.data import move_to_device
from fabricamp.data.transfer import is_small, lies_on_gpu, record_stream

CPU, META = torch.device("cpu"), torch.device("meta")


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Sample:
    image: Any
    label: Any = "cat"
    derived: Any = dataclasses.field(init=False, default=3)


class Graph:
    """Has a ``to`` that changes the object in place, like the data classes of graph libraries."""

    def __init__(self):
        self.nodes = torch.zeros(2)

    def to(self, device):
        self.nodes = self.nodes.to(device)


class Words(collections.UserDict):
    pass


def tensors():
    return {
        "list": [torch.zeros(1), 3],
        "tuple": (torch.zeros(1), "word", None),
        "flat": [torch.zeros(1), torch.zeros(2)],
        "flat tuple": (torch.zeros(1), torch.zeros(2)),
        "pair": Pair(torch.zeros(1), [torch.zeros(1)]),
        "ordered": collections.OrderedDict(a=torch.zeros(1), b=1.5),
        "default": collections.defaultdict(list, a=torch.zeros(1)),
        "user": Words(a=torch.zeros(1)),
        "proxy": types.MappingProxyType({"a": torch.zeros(1)}),
        "sample": Sample(torch.zeros(1)),
        "integers": torch.zeros(2, dtype=torch.int64),
    }


def test_every_container_moves_and_keeps_its_type():
    batch = tensors()
    moved = move_to_device(batch, META)
    assert {name: type(value) for name, value in moved.items()} == {name: type(value) for name, value in batch.items()}
    assert moved["list"][0].is_meta
    assert moved["list"][1] == 3
    assert moved["tuple"][0].is_meta
    assert moved["tuple"][1:] == ("word", None)
    assert [one.shape for one in moved["flat"] if one.is_meta] == [(1,), (2,)]
    assert [one.shape for one in moved["flat tuple"] if one.is_meta] == [(1,), (2,)]
    assert moved["pair"].x.is_meta
    assert moved["pair"].y[0].is_meta
    assert all(moved[name]["a"].is_meta for name in ("ordered", "default", "user", "proxy"))
    assert moved["default"].default_factory is list
    assert moved["sample"].image.is_meta
    assert (moved["sample"].label, moved["sample"].derived) == ("cat", 3)
    assert moved["integers"].dtype == torch.int64


def test_the_given_batch_is_left_alone():
    batch = tensors()
    move_to_device(batch, META)
    assert not any(
        tensor.is_meta
        for tensor in (batch["list"][0], batch["ordered"]["a"], batch["user"]["a"], batch["sample"].image)
    )


@pytest.mark.parametrize("name", list(tensors()))
def test_what_does_not_move_is_the_same_object(name):
    batch = tensors()[name]
    assert move_to_device(batch, CPU) is batch


def test_nested_batch_that_does_not_move_is_the_same_object():
    batch = tensors()
    assert move_to_device(batch, CPU) is batch


def test_objects_with_to():
    graph = Graph()
    assert move_to_device(graph, META) is graph
    assert graph.nodes.is_meta
    packed = move_to_device(pack_sequence([torch.ones(2), torch.ones(1)]), META)
    assert packed.data.is_meta


@pytest.mark.parametrize("value", ["word", b"raw", 3, 2.5, None, Graph, Sample, object()])
def test_anything_else_passes_through(value):
    assert move_to_device(value, META) is value


def test_which_batches_are_small():
    small, large = torch.zeros(1 << 13), torch.zeros(1 << 14, dtype=torch.int64)
    assert all(map(is_small, (small, [small, small], (small, 1 * small), {"x": small}, [])))
    others = (
        large,
        [small, large],
        {"x": large},
        [small] * 3,
        [[small]],
        [small, 3],
        small.to(META),
        Pair(small, small),
    )
    assert not any(map(is_small, (*others, small.to_sparse(), {"x": {"y": small}}, torch.nn.Parameter(small), "word")))


def test_record_stream_asks_objects_that_know_streams_once():
    class Store:
        def __init__(self):
            self.streams = []

        def record_stream(self, stream):
            self.streams.append(stream)

    store = Store()
    graph = Graph()
    graph.store, graph.itself = [store], graph
    record_stream({"a": (Pair(graph, torch.zeros(1)), Sample(store)), "b": 3}, "stream")
    assert store.streams == ["stream"]


class OnGpu:
    """Replaces an object with ``record_stream``."""

    def record_stream(self, stream):
        pass

    def to(self, device):
        return self


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ([torch.zeros(1), torch.zeros(1)], False),
        ((torch.zeros(1), OnGpu()), True),
        ([torch.zeros(1), {"a": (OnGpu(), 3)}], True),
        ([torch.zeros(1), {"a": 3}, "word"], False),
        (OnGpu(), True),
        ([], False),
        ("word", False),
        ({"a": torch.zeros(1)}, False),
    ],
)
def test_what_lies_on_a_gpu(batch, expected):
    assert lies_on_gpu(batch) is expected
