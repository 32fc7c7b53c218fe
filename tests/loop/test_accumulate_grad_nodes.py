"""AccumulateGrad nodes are created once, although each step's graph is freed before the next one is built."""

import torch
from torch.autograd.graph import get_gradient_edge

from tests.small import Classifier, loader, quiet_trainer


class Marked(Classifier):
    """Marks the AccumulateGrad nodes of the first step and counts the steps that pass through a marked one."""

    def __init__(self, frozen=False):
        super().__init__()
        self.passed = {name: 0 for name, _ in self.named_parameters()}
        self.net[0].requires_grad_(not frozen)

    def on_train_epoch_start(self):
        self.net[0].requires_grad_(True)

    def on_before_backward(self, loss):
        if self.global_step:
            return
        for name, parameter in self.named_parameters():

            def count(_, name=name):
                self.passed[name] += 1

            get_gradient_edge(parameter).node.register_prehook(count)


def test_the_same_nodes_serve_every_step():
    module = Marked()
    quiet_trainer(max_epochs=1).fit(module, loader(32))
    assert set(module.passed.values()) == {8}


def test_those_of_parameters_that_are_unfrozen_too():
    module = Marked(frozen=True)
    quiet_trainer(max_epochs=1).fit(module, loader(32))
    assert set(module.passed.values()) == {8}


class WithoutViews(torch.Tensor):
    """Supports computations but no ``view_as``, like some quantised or sharded weights."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        assert function is not torch.Tensor.view_as
        return super().__torch_function__(function, types, args, kwargs or {})


def test_other_kinds_of_parameters_are_left_alone():
    module = Classifier()
    before = module.net[0].weight.detach().clone()
    module.net[0].weight = torch.nn.Parameter(before.clone().as_subclass(WithoutViews))
    assert type(module.net[0].weight) is WithoutViews
    quiet_trainer(max_epochs=1).fit(module, loader(32))
    assert not torch.equal(module.net[0].weight.detach().as_subclass(torch.Tensor), before)
