"""Steps in a CUDA graph: changes by schedulers, eager steps between replays, and memory that the graph keeps using.

On a CPU the graph is a list of launches (see ``tests.cuda_on_cpu.capture``), on a GPU a real one.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fabricamp import ops
from fabricamp.ops import table as tables
from fabricamp.optimizers import (
    LARC,
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedLion,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
    UnsupportedError,
)
from tests.cuda_on_cpu.capture import graphs
from tests.cuda_on_cpu.compiler import one_order

__all__ = ["graphs"]

KINDS = {
    "adam": lambda p: FusedAdam(p, lr=0.1, weight_decay=0.1),
    "sgd": lambda p: FusedSGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "lamb": lambda p: FusedLAMB(p, lr=0.1),
    "novograd": lambda p: FusedNovoGrad(p, lr=0.1, weight_decay=0.1),
    "adagrad": lambda p: FusedAdagrad(p, lr=0.1),
    "lion": lambda p: FusedLion(p, lr=0.01, weight_decay=0.1),
    "larc": lambda p: LARC(FusedSGD(p, lr=0.1, momentum=0.9, weight_decay=0.1)),
    "mixed precision lamb": lambda p: FusedMixedPrecisionLamb(p, lr=0.1),
}
FEW = ["adam", "sgd", "lamb"]
SHAPES = (3, 40), (70,), (2, 3, 2, 2), ()


class Run:
    """Parameters, a loss of the parameters and of ``x`` (at a fixed address), and an optimizer."""

    def __init__(self, device, kind):
        generator = torch.Generator().manual_seed(1)
        self.weights = [nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in SHAPES]
        self.x = torch.ones((), device=device)
        self.optimizer = KINDS[kind](self.weights)

    def backward(self):
        """Computes gradients in new memory, as after ``zero_grad(set_to_none=True)``."""
        for one in self.weights:
            one.grad = None
        torch.stack([(one * self.x).sin().mul(one).sum() for one in self.weights]).sum().backward()

    def step(self):
        self.backward()
        self.optimizer.step()

    def set(self, lr=None, x=None):
        if x is not None:
            self.x.fill_(x)
        for group in self.optimizer.param_groups:
            if lr is None:
                continue
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr


def runs(device, kind, steps=2):
    """Returns two equal runs after some steps."""
    made = Run(device, kind), Run(device, kind)
    for run in made:
        for number in range(steps):
            run.set(x=number + 1.0)
            run.step()
    return made


def captured(graphs, run):
    if run.x.device.type == "cuda":
        torch.cuda.synchronize()
    graph = graphs()
    with graph:
        run.step()
    return graph


def replay(graph, run):
    run.optimizer.gather()  # uploads the changed values
    graph.replay()


def check(one, other):
    for own, expected in zip(one.weights, other.weights, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("uploads_first", [True, False])
@one_order
def test_a_rate_that_changed_before_the_capture(kernel_device, graphs, kind, uploads_first):
    run, eager = runs(kernel_device, kind)
    for one in (run, eager):
        one.set(lr=0.01, x=3.0)
    graph = captured(graphs, run)
    for x, lr in ((3.0, 0.01), (4.0, 0.01), (5.0, 0.05), (6.0, 0.02)):
        for one in (run, eager):
            one.set(lr=lr, x=x)
        if uploads_first or lr != 0.01:
            run.optimizer.gather()
        graph.replay()
        eager.step()
        check(run, eager)


@pytest.mark.parametrize("kind", KINDS)
@one_order
def test_eager_steps_and_replays_take_turns(kernel_device, graphs, kind):
    """Each reads its own gradients: a replay those in the graph's memory, an eager step those at any address."""
    run, eager = runs(kernel_device, kind)
    graph = captured(graphs, run)
    kept = []
    for number, replays in enumerate((True, False, True, True, False, False, True)):
        for one in (run, eager):
            one.set(lr=0.1 / (number + 1), x=number + 2.0)
        if replays:
            replay(graph, run)  # does not depend on .grad
        else:
            run.step()
            kept.append([one.grad for one in run.weights])  # kept alive, so that the next gradients get other addresses
        eager.step()
        check(run, eager)


@pytest.mark.parametrize("kind", FEW)
@one_order
def test_two_graphs_of_one_optimizer(kernel_device, graphs, kind):
    run, eager = runs(kernel_device, kind)
    pair = [captured(graphs, run) for _ in range(2)]
    for number in range(4):
        for one in (run, eager):
            one.set(lr=0.1 / (number + 1), x=number + 2.0)
        replay(pair[number % 2], run)
        eager.step()
        check(run, eager)


def steered(run, state, copies):
    """Runs a step with the calls of a Precision."""
    run.backward()
    run.optimizer.gather([one.grad for one in run.weights], copies)
    ops.finish(state, run.optimizer.statistics(state.scale), scale=state.scale, max_norm=1.0)
    run.optimizer.steer(state)
    run.optimizer.step()


@pytest.mark.parametrize("kind", FEW)
@one_order
def test_gather_repeats_the_half_copies(kernel_device, graphs, kind):
    made = Run(kernel_device, kind), Run(kernel_device, kind)
    states = [ops.StepState.on(kernel_device) for _ in made]
    copies = [[one.detach().half() for one in run.weights] for run in made]
    for run, state, own in zip(made, states, copies, strict=True):
        steered(run, state, own)
    graph = graphs()
    with graph:
        steered(made[0], states[0], copies[0])
    parts = made[0].optimizer._parts
    for number in range(3):
        for run in made:
            run.set(lr=0.1 / (number + 2), x=number + 2.0)
        replay(graph, made[0])
        steered(made[1], states[1], copies[1])
        check(*made)
        assert all(torch.equal(one, other) for one, other in zip(*copies, strict=True))
        assert all(torch.equal(one, own.half()) for one, own in zip(copies[0], made[0].weights, strict=True))
    assert made[0].optimizer._parts is parts


@pytest.mark.parametrize("kind", KINDS)
@one_order
def test_a_state_loaded_after_the_capture_is_what_replays_go_on_with(kernel_device, graphs, kind):
    run, eager = runs(kernel_device, kind)
    saved = {"state": {}, "param_groups": eager.optimizer.state_dict()["param_groups"]}
    for key, entry in eager.optimizer.state_dict()["state"].items():
        saved["state"][key] = {name: value.clone() if value is not None else None for name, value in entry.items()}
    weights = [one.detach().clone() for one in eager.weights]
    graph = captured(graphs, run)
    for number in range(3):
        run.set(x=number + 5.0)
        replay(graph, run)
    for one in (run, eager):
        with torch.no_grad():
            for own, value in zip(one.weights, weights, strict=True):
                own.copy_(value)
        one.optimizer.load_state_dict(saved)
    for number, replays in enumerate((True, True, False, True)):
        for one in (run, eager):
            one.set(lr=0.05, x=number + 2.0)
        if replays:
            replay(graph, run)
        else:
            run.step()
        eager.step()
        check(run, eager)


@pytest.mark.parametrize("kind", FEW)
@one_order
def test_other_rows_after_a_capture_are_refused_until_it_is_forgotten(kernel_device, graphs, kind):
    run, eager = runs(kernel_device, kind)
    graph = captured(graphs, run)
    replay(graph, run)
    eager.step()
    for one in (run, eager):
        one.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5, device=kernel_device))], "lr": 0.1})
    before = [one.detach().clone() for one in run.weights]
    for call in (run.optimizer.gather, run.step):
        with pytest.raises(UnsupportedError, match=r"captured in a CUDA graph.*optimizer.forget\(\)"):
            call()
    assert all(torch.equal(one, other) for one, other in zip(run.weights, before, strict=True))
    run.optimizer.forget()
    run.step()
    eager.step()
    check(run, eager)
    graph = captured(graphs, run)
    replay(graph, run)
    eager.step()
    check(run, eager)
    run.optimizer.state.clear()
    with pytest.raises(UnsupportedError, match="state tensors"):
        run.step()


@pytest.mark.parametrize("kind", [*FEW, "larc"])
@one_order
def test_parameters_in_other_memory_are_found_before_a_replay(kernel_device, graphs, kind):
    run, _ = runs(kernel_device, kind)
    captured(graphs, run)
    assert run.optimizer.upload()
    run.weights[1].data = run.weights[1].data.clone()
    assert not run.optimizer.upload()


@one_order
def test_momentum_that_comes_after_a_capture_is_refused(kernel_device, graphs):
    run, _ = runs(kernel_device, "sgd")
    captured(graphs, run)
    run.optimizer.param_groups[0]["momentum"] = 0.0
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="momentum"):
            run.step()
    run.optimizer.param_groups[0]["momentum"] = 0.9
    run.optimizer.forget()
    run.step()


@pytest.mark.parametrize("kind", KINDS)
@one_order
def test_a_first_step_in_a_capture_is_refused(kernel_device, graphs, kind):
    run = Run(kernel_device, kind)
    graph = graphs()
    with pytest.raises(UnsupportedError, match="run a step before the capture"), graph:
        run.step()


@one_order
def test_gather_belongs_into_the_capture(kernel_device, graphs):
    run, _ = runs(kernel_device, "adam")
    state = ops.StepState.on(kernel_device)
    run.backward()
    run.optimizer.gather()
    run.optimizer.steer(state)
    with pytest.raises(UnsupportedError, match="call gather within the capture"), graphs():
        run.optimizer.step()


@one_order
def test_lists_that_an_op_first_meets_in_a_capture(kernel_device, graphs):
    sources = [torch.ones(size, device=kernel_device) for size in (70, 3)]
    results = [torch.zeros(size, device=kernel_device) for size in (70, 3)]
    ops.scale([torch.ones(1, device=kernel_device)], [torch.ones(1, device=kernel_device)], 1.0)  # compiled
    if kernel_device.type == "cuda":
        torch.cuda.synchronize()
    graph = graphs()
    with graph:
        ops.scale(sources, results, 2.0)
    for one in results:
        one.zero_()
    ops.scale(sources, results, 3.0)  # before the first replay
    assert [one.unique().item() for one in results] == [3.0, 3.0]
    others = [torch.ones(size, device=kernel_device) for size in range(1, tables._MOST_TABLES + 3)]
    for one in others:
        ops.scale([one], [one], 1.0)
    graph.replay()
    assert [one.unique().item() for one in results] == [2.0, 2.0]
    assert [one.unique().item() for one in others] == [1.0] * len(others)


@one_order
def test_slots_are_filled_from_where_each_step_has_its_gradients(kernel_device, graphs):
    slots = torch.zeros(8, device=kernel_device).split([5, 3])
    gather, source = ops.Gather(slots), torch.ones(8, device=kernel_device)

    def run():
        made = source * 2  # in the graph's own memory
        gather(made.split([5, 3]))

    run()
    if kernel_device.type == "cuda":
        torch.cuda.synchronize()
    graph = graphs()
    with graph:
        run()
    kept = []
    for number in range(2, 6):
        source.fill_(number)
        if number % 2:
            graph.replay()
        else:
            elsewhere = source * 2
            kept.append(elsewhere)
            gather(elsewhere.split([5, 3]))
            source.fill_(0)
        assert [one.unique().item() for one in slots] == [2.0 * number] * 2
