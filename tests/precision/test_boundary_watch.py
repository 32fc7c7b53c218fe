"""The calls at which the boundary casts: every call from the step, from any step on, and none inside a forward."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.utils.checkpoint import checkpoint

import fabricamp
from fabricamp.precision import OptLevel

PACKAGE = str(Path(fabricamp.__file__).parent)


class Block(nn.Module):
    """A linear layer that records the dtypes of inputs and outputs; ``scale`` is a keyword argument."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.reentrant = reentrant
        self.seen = []

    def run(self, x):
        y = self.linear(x)
        self.seen.append((x.dtype, y.dtype))
        return y.sigmoid()  # the last tensor that a recomputation needs: torch stops the recomputation there

    def forward(self, x, *, scale=None):
        y = self.run(x) if self.reentrant is None else checkpoint(self.run, x, use_reentrant=self.reentrant)
        if scale is None:
            return y
        assert scale.dtype is y.dtype
        return y * scale


class Net(nn.Module):
    def __init__(self, depth=3, **options):
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.blocks = nn.Sequential(*[Block(**options) for _ in range(depth)])
        self.fails = None
        self.then = None

    def forward(self, x):
        x = self.blocks(x)
        if self.fails is not None:
            raise self.fails
        if self.then is not None:
            self.then()
        return x


def converted(module, level="O2"):
    precision = OptLevel(level, loss_scale=1.0)
    precision.convert_module(module)
    return precision


def x():
    return torch.ones(2, 4)


def own_calls(function):
    """Returns the Python calls of the package's functions that ``function()`` makes."""
    calls = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(calls)


@pytest.fixture(autouse=True)
def _nothing_stays():
    yield
    assert not torch_modules._global_forward_pre_hooks
    assert torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_own_calls_do_not_grow_with_depth(level):
    counts = []
    for depth in (2, 50):
        net = Net(depth)
        precision = converted(net, level)
        precision.forward(net, x())
        counts.append(own_calls(lambda precision=precision, net=net: precision.forward(net, x())))
        assert not any(block._forward_pre_hooks or block.linear._forward_hooks for block in net.blocks)
    assert counts[0] == counts[1] <= 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_a_module_that_a_later_step_calls_first(dtype):
    net = Net()
    precision = converted(net)
    for _ in range(3):
        precision.forward(net, x())
    values = x().to(dtype)
    for _ in range(2):
        block = net.blocks[1]
        assert precision.forward(lambda: net.blocks[1].linear(values)).dtype is torch.float32
        assert precision.forward(lambda: net.table(torch.tensor([1, 2]))).dtype is torch.float32
        assert precision.forward(lambda block=block: block(values, scale=values[0])).dtype is torch.float32
        assert precision.forward(lambda: net.blocks[2](x=values)).dtype is torch.float32
        assert precision.forward(net, values).dtype is torch.float32
    assert {seen for block in net.blocks for seen in block.seen} == {(torch.float16, torch.float16)}


def test_a_shared_module_inside_a_forward_and_from_the_step():
    net = nn.ModuleList([Net(), Net()])
    net[1].blocks[0] = net[0].blocks[0]
    precision = converted(net)
    shared = net[0].blocks[0]

    def step():
        return [net[0](x()), shared(x()), net[1](x()), shared.linear(x()), net[0](x())]

    for _ in range(2):
        assert {output.dtype for output in precision.forward(step)} == {torch.float32}
    assert set(shared.seen) == {(torch.float16, torch.float16)}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_raise_in_the_first_call(error):
    net = Net()
    precision = converted(net)
    net.fails = error("on purpose")
    for _ in range(2):
        with pytest.raises(error, match="on purpose"):
            precision.forward(net, x())
        assert not torch_modules._global_forward_pre_hooks

    def step():
        with pytest.raises(ValueError, match="on purpose"):
            net(x())
        return net.blocks[0](x())

    net.fails = ValueError("on purpose")
    assert precision.forward(step).dtype is torch.float32
    net.fails = None
    assert precision.forward(net, x()).dtype is precision.forward(net.blocks[1].linear, x()).dtype is torch.float32


# Nested checkpoints: while the outer one computes without gradients, the inner one's input has none.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False, None])
def test_recomputation_of_what_a_later_step_calls_first(outer, inner):
    gradients = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        net = Net(reentrant=inner if recomputed else None)
        precision = converted(net, "O5")
        precision.backward(precision.forward(net, x().requires_grad_()).sum())
        net.zero_grad()
        part, values = net.blocks[1], x().requires_grad_()

        def later(part=part, values=values, net=net, recomputed=recomputed):
            y = (
                checkpoint(lambda one: part(one).cos(), values, use_reentrant=outer)
                if recomputed
                else part(values).cos()
            )
            return (y + net(values)).square().mean()

        for _ in range(2):
            loss = precision.forward(later)
            assert loss.dtype is torch.float32
            precision.backward(loss)
        assert set(part.seen) == {(torch.bfloat16, torch.bfloat16)}
        gradients.append([values.grad, *(one.grad for one in net.blocks.parameters())])
    for once, again in zip(*gradients, strict=True):
        assert once.dtype is again.dtype
        torch.testing.assert_close(once, again, rtol=2**-7, atol=0.0)  # half gradients, summed in another order


def test_a_gradient_taken_within_the_step_recomputes_what_a_forward_called():
    net = Net(reentrant=False)
    precision = converted(net)

    def penalty():
        values = x().requires_grad_()
        (gradient,) = torch.autograd.grad(net(values).sum(), values, create_graph=True)
        return gradient.square().sum() + net.blocks[0].linear(x()).sum()

    for _ in range(2):
        precision.backward(precision.forward(penalty))
    assert not net.blocks[1].linear._forward_hooks  # its recomputation does not count as a call from the step
    assert {seen for block in net.blocks for seen in block.seen} == {(torch.float16, torch.float16)}


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("when", ["before", "after", "within"])
def test_copies_made_before_the_first_call_after_it_and_within_it(how, when):
    net = Net()
    precision = converted(net)
    twins = []
    if when == "within":
        net.then = lambda: twins.append(how(net.blocks))
    if when != "before":
        precision.forward(net, x())
        precision.forward(net.blocks, x())
    twin = twins[0] if twins else how(net.blocks)
    for call in (twin[1].linear, twin[0], twin, net.blocks[1].linear):
        assert precision.forward(call, x()).dtype is torch.float32
    assert {seen for block in twin for seen in block.seen} == {(torch.float16, torch.float16)}
    again = how(twin)  # a copy of a module that the step has called
    assert precision.forward(again, x()).dtype is precision.forward(again[1].linear, x()).dtype is torch.float32


def test_hooks_of_the_user_on_the_same_modules():
    # Pre-hooks, and forward hooks registered before the conversion, see the forward's values; later forward hooks see the step's.
    net = Net()
    seen = {}

    def note(when):
        net.blocks.register_forward_pre_hook(lambda _, args: seen.setdefault(f"{when} in", []).append(args[0].dtype))
        net.blocks.register_forward_hook(lambda *call: seen.setdefault(f"{when} out", []).append(call[-1].dtype))

    note("before the conversion")
    precision = OptLevel("O2", loss_scale=1.0)
    conversion = precision.convert_module(net)
    note("before the first call")
    precision.forward(net.blocks, x())
    note("after it")
    precision.forward(net.blocks, x())
    half, full = torch.float16, torch.float32
    assert seen == {
        "before the conversion in": [half, half],
        "before the conversion out": [half, half],
        "before the first call in": [half, half],
        "before the first call out": [full, full],
        "after it in": [half],
        "after it out": [full],
    }
    conversion.undo()
    assert len(net.blocks._forward_pre_hooks) == len(net.blocks._forward_hooks) == 3


def test_a_hook_of_all_modules_that_the_user_has_stays():
    net, called = Net(), []
    precision = converted(net)
    handle = torch_modules.register_module_forward_pre_hook(lambda module, _: called.append(module))
    try:
        precision.forward(net, x())
        assert called.count(net) == 1
        assert len(called) == sum(1 for _ in net.modules()) - 1  # all modules except the table, which is not called
        assert len(torch_modules._global_forward_pre_hooks) == 1
    finally:
        handle.remove()


def test_threads_each_in_a_step_of_its_own():
    nets = [Net(), Net()]
    precisions = [converted(net) for net in nets]
    watching, inside, first_call_is_done = threading.Event(), threading.Event(), threading.Event()
    nets[0].then = lambda: (inside.set(), first_call_is_done.wait(60))
    dtypes = {}

    def run(which, call):
        dtypes[which] = precisions[which].forward(call).dtype

    def first():
        watching.wait(60)
        return nets[0](x())

    def second():
        watching.set()
        inside.wait(60)
        try:
            return nets[1].blocks[1](x())  # while the other thread is inside a forward, where no calls are watched
        finally:
            first_call_is_done.set()

    threads = [
        threading.Thread(target=run, args=(0, first)),
        threading.Thread(target=run, args=(1, second)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert dtypes == {0: torch.float32, 1: torch.float32}


def test_a_thread_that_is_in_no_step_is_left_alone():
    net, outputs = Net(), []
    precision = converted(net)

    def step():
        thread = threading.Thread(target=lambda: outputs.append(net.blocks(x().half())))
        thread.start()
        thread.join(60)
        return net.blocks(x())

    for _ in range(2):
        assert precision.forward(step).dtype is torch.float32
    assert [output.dtype for output in outputs] == [torch.float16] * 2


def test_restoring_takes_everything_off():
    net = Net()
    precision = OptLevel("O2", loss_scale=1.0)
    conversion = precision.convert_module(net)
    precision.forward(lambda: (net(x()), net.blocks[0](x())))
    conversion.undo()
    for module in net.modules():
        assert not module._forward_pre_hooks and not module._forward_hooks  # noqa: PT018
        assert not module._forward_pre_hooks_with_kwargs and not module._forward_hooks_always_called  # noqa: PT018
    assert precision.forward(net, x()).dtype is torch.float32


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_part_inside_a_forward_and_from_the_step(in_place):
    torch.compiler.reset()
    net = Net()
    if in_place:
        net.blocks[1].linear.compile(backend="eager")
    else:
        net.blocks[1].linear = torch.compile(net.blocks[1].linear, backend="eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*global hooks")
        precision = converted(net)
        for _ in range(2):
            for call in (lambda: net(x()), lambda: net.blocks[1].linear(x()), lambda: net.blocks[1].linear(x().half())):
                assert precision.forward(call).dtype is torch.float32
    assert set(net.blocks[1].seen) == {(torch.float16, torch.float16)}
