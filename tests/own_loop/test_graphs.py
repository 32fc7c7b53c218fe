"""Steps of a Loop as CUDA graphs, emulated on a CPU: the bits of eager steps, and no value of the function stays a capture's."""

from __future__ import annotations

import functools
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from fabricamp import ConfigError, CudaGraph
from tests.cuda_on_cpu.fits import card
from tests.own_loop.same import by_loop, by_trainer, difference, prepared
from tests.pairs import pairs

__all__ = ["card"]

GRAPH = {"warmup": 4}
WEIGHT = 1.0


@pytest.mark.parametrize(
    ("precision", "optimizer", "accumulate", "clip"),
    pairs(["O0", "O2", "O4", "O5"], ["fused_adam", "fused_sgd", "sgd", "adamw"], [1, 3], [None, 0.5]),
)
def test_graphs_have_the_bits_of_eager_steps_and_of_the_trainer(precision, optimizer, accumulate, clip, card):
    options = {"precision": precision, "accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    options |= {"epochs": 4, "dropout": 0.0}
    eager = by_loop(optimizer, **options)
    graphed = by_loop(optimizer, cuda_graph=CudaGraph(**GRAPH), **options)
    replays = card.replays
    assert replays > 3
    assert difference(eager, graphed) == ""
    assert difference(by_trainer(optimizer, cuda_graph=CudaGraph(**GRAPH), **options), graphed) == ""
    assert card.replays == 2 * replays


class Changing:
    """A value that a step's function reads in one of several ways, and that changes after some steps."""

    def __init__(self):
        self.value = 1.0


def of_cell():
    w = 1.0

    def make(model):
        return lambda b: w * loss_of(model, b)

    def change(value):
        nonlocal w
        w = value

    return make, change


def of_new_cell():
    state = [1.0]

    def make(model):
        w = state[0]
        return lambda b: w * loss_of(model, b)

    return make, functools.partial(state.__setitem__, 0)


def of_default():
    state = [1.0]

    def make(model):
        def step(b, w=state[0]):
            return w * loss_of(model, b)

        return step

    return make, functools.partial(state.__setitem__, 0)


def of_list():
    state = [1.0]
    return lambda model: lambda b: state[0] * loss_of(model, b), functools.partial(state.__setitem__, 0)


def of_global():
    def change(value):
        global WEIGHT  # noqa: PLW0603 - what is tested
        WEIGHT = value

    change(1.0)
    return lambda model: lambda b: WEIGHT * loss_of(model, b), change


def of_helper():
    state = {"temperature": 1.0}

    def helper(loss):
        return loss * state["temperature"]

    return lambda model: lambda b: helper(loss_of(model, b)), functools.partial(state.__setitem__, "temperature")


def of_object():
    options = SimpleNamespace(inner=Changing())

    def change(value):
        options.inner.value = value

    return lambda model: lambda b: options.inner.value * loss_of(model, b), change


def of_partial():
    state = [1.0]

    def step(w, b, *, model):
        return w * loss_of(model, b)

    return lambda model: functools.partial(step, state[0], model=model), functools.partial(state.__setitem__, 0)


def of_method():
    class Steps(Changing):
        def step(self, b):
            return self.value * loss_of(self.model, b)

    steps = Steps()

    def make(model):
        steps.model = model
        return steps.step

    return make, functools.partial(setattr, steps, "value")


def of_module():
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.0)
    criterion.factor = 1.0
    return (
        lambda model: lambda b: criterion.factor * criterion(model(b[0]), b[1]),
        functools.partial(setattr, criterion, "factor"),
    )


def of_tensor():
    state = [torch.tensor(1.0)]

    def change(value):
        state[0] = torch.tensor(value)

    def make(model):
        w = state[0]
        return lambda b: w * loss_of(model, b)

    return make, change


def of_tensor_in_place():
    w = torch.tensor(1.0)
    return lambda model: lambda b: w * loss_of(model, b), w.fill_


def of_partial_in_a_cell():
    state = [1.0]

    def weighted(state, loss):
        return state[0] * loss

    weigh = functools.partial(weighted, state)
    return lambda model: lambda b: weigh(loss_of(model, b)), functools.partial(state.__setitem__, 0)


def of_bound_method():
    criterion = torch.nn.CrossEntropyLoss()
    criterion.label_smoothing = 1.0
    call = criterion.forward
    return lambda model: lambda b: call(model(b[0]), b[1]), functools.partial(setattr, criterion, "label_smoothing")


def of_method_of_a_dict():
    options = {"weight": 1.0}
    get = options.get
    return lambda model: lambda b: get("weight") * loss_of(model, b), functools.partial(options.__setitem__, "weight")


def of_base_class():
    class Base:
        value = 1.0

    class Steps(Base):
        def step(self, b):
            return self.value * loss_of(self.model, b)

    steps = Steps()

    def make(model):
        steps.model = model
        return steps.step

    return make, functools.partial(setattr, Base, "value")


def of_another_method():
    class Steps:
        def step(self, b):
            return self.weigh(loss_of(self.model, b))

        def weigh(self, loss):
            return loss * WEIGHT

    steps = Steps()

    def make(model):
        steps.model = model
        return steps.step

    return make, of_global()[1]


def of_function_in_a_module():
    helpers = ModuleType("helpers")
    exec("weight = 1.0\n\ndef weigh(loss):\n    return weight * loss\n", vars(helpers))
    return lambda model: lambda b: helpers.weigh(loss_of(model, b)), functools.partial(setattr, helpers, "weight")


def of_item_that_moves():
    first, second = [1.0], [0.5, 2.0]

    def change(_):
        first.append(second.pop(0))

    return lambda model: lambda b: len(first) * loss_of(model, b) + second[-1] - 2.0, change


def of_code():
    state = [1.0]

    def make(model):
        if state[0] == 1.0:
            return lambda b: loss_of(model, b)
        return lambda b: 0.25 * loss_of(model, b)

    return make, functools.partial(state.__setitem__, 0)


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


WAYS = [
    of_cell,
    of_new_cell,
    of_default,
    of_list,
    of_global,
    of_helper,
    of_object,
    of_partial,
    of_method,
    of_module,
    of_tensor,
    of_tensor_in_place,
    of_partial_in_a_cell,
    of_bound_method,
    of_method_of_a_dict,
    of_base_class,
    of_another_method,
    of_function_in_a_module,
    of_item_that_moves,
    of_code,
]


def trained(way, graph, changes):
    """Returns the losses and last weights of 28 steps; before the steps in ``changes`` the value changes."""
    run, model, _, train = prepared("fused_sgd", cuda_graph=graph, dropout=0.0)
    make, change = way()
    losses = []
    with run:
        for _ in range(4):
            for batch in train:
                if run.global_step in changes:
                    change(changes[run.global_step])
                losses.append(run.step(make(model), batch))
    return torch.stack(losses), model[0].weight.detach().clone()


@pytest.mark.parametrize("way", WAYS)
def test_a_changed_value_is_a_new_capture(way, card):
    changes = {14: 0.25}
    losses, weight = trained(way, None, changes)
    graphed, graphed_weight = trained(way, CudaGraph(**GRAPH), changes)
    assert card.replays > 10
    assert torch.equal(losses, graphed)
    assert torch.equal(weight, graphed_weight)
    assert card.events.count("capture") == (1 if way is of_tensor_in_place else 2)


@pytest.mark.parametrize("way", [of_cell, of_global, of_object])
def test_a_value_that_changes_in_each_step_is_refused_by_name(way, card):
    changes = {step: 1 / (1 + step) for step in range(28)}
    names = {of_cell: "w", of_global: "WEIGHT", of_object: "options"}
    with pytest.raises(ConfigError, match=f"{names[way]}, which step's function reads"):
        trained(way, CudaGraph(**GRAPH), changes)
    losses, weight = trained(way, None, changes)
    graphed, graphed_weight = trained(way, CudaGraph(required=False, **GRAPH), changes)
    assert torch.equal(losses, graphed)
    assert torch.equal(weight, graphed_weight)


def test_a_list_that_the_function_appends_to_is_refused_by_name(card):
    seen = []

    def way():
        def make(model):
            def step(b):
                seen.append(1)
                return loss_of(model, b)

            return step

        return make, None

    with pytest.raises(ConfigError, match="seen, which step's function reads"):
        trained(way, CudaGraph(**GRAPH), {})


def test_a_new_function_of_the_same_code_and_values_keeps_the_graph(card):
    trained(lambda: (lambda model: lambda b: loss_of(model, b), None), CudaGraph(**GRAPH), {})
    assert card.events.count("capture") == 1


def test_the_count_of_steps_is_no_constant(card):
    run, model, _, train = prepared("fused_sgd", cuda_graph=CudaGraph(**GRAPH), dropout=0.0)

    def loop():
        for _ in range(4):
            for batch in train:
                run.step(lambda b: loss_of(model, b) / (1 + run.global_step), batch)

    with run, pytest.raises(ConfigError, match="run, which step's function reads"):
        loop()


def test_a_function_that_reads_everything_is_refused(card):
    table = list(range(3000))
    way = (lambda model: lambda b: loss_of(model, b) * table[1], None)
    with pytest.raises(ConfigError, match="reads 'table', and with it more than 2000 values"):
        trained(lambda: way, CudaGraph(**GRAPH), {})
