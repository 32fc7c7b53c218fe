"""The ends of the graph at the parameters are made once, though each step's graph is gone before the next one is built."""

from torch.autograd.graph import get_gradient_edge

from tests.small import Classifier, loader, quiet_trainer


class Marked(Classifier):
    """Marks the ends of the first step's graph and counts the steps that pass through a marked one."""

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
