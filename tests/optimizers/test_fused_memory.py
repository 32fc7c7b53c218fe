"""Changes between two steps that a fused optimizer detects: gradients and parameters in other memory or layouts, or missing."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from fabricamp import ops
from fabricamp.apex.contrib.optimizers import FusedAdam as OldAdam
from fabricamp.ops.table import Table
from fabricamp.optimizers import FusedAdam, FusedSGD
from tests.cuda_on_cpu.compiler import one_order, references


class Pair:
    """Equal parameters for FusedAdam and for torch's AdamW, given equal gradients."""

    def __init__(self, device, *tensors):
        self.device = device
        self.mine, self.theirs = ([nn.Parameter(one.clone().to(device)) for one in tensors] for _ in range(2))
        self.optimizer = FusedAdam(self.mine, lr=0.1, weight_decay=0.1)
        self.reference = torch.optim.AdamW(self.theirs, lr=0.1, weight_decay=0.1)

    def step(self, *gradients):
        for own, other, gradient in zip(self.mine, self.theirs, gradients, strict=True):
            own.grad = gradient
            other.grad = None if gradient is None else gradient.clone(memory_format=torch.contiguous_format)
        self.optimizer.step()
        self.reference.step()
        self.check()

    def check(self):
        for own, other in zip(self.mine, self.theirs, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


def numbers(device, *shape):
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), device=device).view(shape)


def orders(memory):
    """Yields (name, shape, strides) of tensors that all start at the address of ``memory``, of 36 elements."""
    yield "matrix", (3, 6), [(6, 1), (1, 3), (6, 1), (2, 6), (1, 3), (0, 1)]
    yield "vector", (12,), [(1,), (3,), (1,), (0,), (2,), (1,)]
    yield "images", (2, 3, 2, 3), [(18, 6, 3, 1), (18, 1, 9, 3), (18, 6, 3, 1), (1, 2, 6, 12), (18, 1, 9, 3)]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("kind", ["matrix", "vector", "images"])
@one_order
def test_the_same_address_holds_another_layout(kernel_device, kind, channels_last):
    if channels_last and kind != "images":
        pytest.skip("four dimensions only")
    memory = numbers(kernel_device, 36)
    shape, layouts = next((shape, layouts) for name, shape, layouts in orders(memory) if name == kind)
    weight = torch.ones(shape)
    if channels_last:
        weight = weight.to(memory_format=torch.channels_last)
    pair = Pair(kernel_device, weight, torch.ones(5))
    other = numbers(kernel_device, 5)
    for strides in layouts:
        gradient = torch.as_strided(memory, shape, strides)
        assert gradient.data_ptr() == memory.data_ptr()
        pair.step(gradient, other)


@one_order
def test_the_same_order_written_with_other_strides_needs_no_stand_in(kernel_device, monkeypatch):
    # The stride of a dimension of size 1 has no meaning, so libraries may set any number.
    weight = torch.ones(4, 3, 1, 7).to(memory_format=torch.channels_last)
    pair = Pair(kernel_device, weight)
    memory = numbers(kernel_device, 84)
    gradients = [torch.as_strided(memory, (4, 3, 1, 7), strides) for strides in ((21, 1, 21, 3), (21, 1, 5, 3))]
    for gradient in gradients:
        pair.step(gradient)
    monkeypatch.setattr(Table, "_set_unknown", None)
    pair.step(gradients[1])


@one_order
def test_gradients_that_only_moved_are_not_looked_at_one_by_one(kernel_device, monkeypatch):
    weights = (
        torch.ones(3, 4),
        torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.ones(7),
        torch.ones(0),
    )
    pair = Pair(kernel_device, *weights)
    memory = [numbers(kernel_device, 100) for _ in range(3)]

    def at(step):
        """Returns gradients that start ``step`` elements later in the same memory, so that they are aligned or not."""
        first, second, third = (one[step : step + size] for one, size in zip(memory, (12, 24, 7), strict=True))
        images = second.view(2, 2, 2, 3).permute(0, 3, 1, 2)
        return first.view(3, 4), images, third, torch.ones(0, device=kernel_device)

    pair.step(*at(0))
    monkeypatch.setattr(Table, "_set_unknown", None)
    for step in (1, 2, 3, 4, 0, 0):
        pair.step(*at(step))
    assert {pair.optimizer.state[one]["step"].item() for one in pair.mine} == {7.0}


@one_order
def test_a_moved_gradient_of_another_dtype_is_seen(kernel_device):
    pair = Pair(kernel_device, torch.ones(70))
    state = ops.StepState.on(kernel_device)
    for dtype in (torch.float32, torch.float16, torch.float64):
        gradient = numbers(kernel_device, 70)
        given = gradient.to(dtype)
        pair.optimizer.gather([given])
        pair.optimizer.steer(state)
        pair.optimizer.step()
        pair.theirs[0].grad = gradient
        pair.reference.step()
        pair.check()


@one_order
def test_a_gradient_becomes_none_and_comes_back(kernel_device):
    pair = Pair(kernel_device, torch.ones(3, 4), torch.ones(70), torch.ones(0), torch.ones(2))
    full = [numbers(kernel_device, *one.shape) for one in pair.mine]
    for missing in ((), (1,), (1,), (2,), (), (0, 1, 2), (3,), ()):
        pair.step(*[None if place in missing else one for place, one in enumerate(full)])
    counts = [pair.optimizer.state[one]["step"].item() for one in pair.mine]
    assert counts == [7.0, 5.0, 6.0, 7.0]
    # Also if the others get new addresses, and if a gradient of another layout replaces None.
    pair.step(None, *[one.clone() for one in full[1:]])
    pair.step(numbers(kernel_device, 4, 3).t(), *full[1:])


@one_order
def test_parameters_whose_data_is_replaced(kernel_device):
    pair = Pair(kernel_device, torch.ones(3, 4), torch.ones(70))
    full = [numbers(kernel_device, *one.shape) for one in pair.mine]
    for step in range(4):
        if step == 1:  # replaces the data of one parameter by other values
            for own in (pair.mine, pair.theirs):
                own[1].data = torch.full((70,), 5.0, device=kernel_device)
        if (
            step == 2
        ):  # replaces a parameter in the group by another tensor with the same memory, which gets a new state
            alias = nn.Parameter(pair.mine[0].data)
            assert alias.data_ptr() == pair.mine[0].data_ptr()
            pair.mine[0] = pair.optimizer.param_groups[0]["params"][0] = alias
            pair.theirs[0] = pair.reference.param_groups[0]["params"][0] = nn.Parameter(pair.theirs[0].data)
        pair.step(*full)
    assert [pair.optimizer.state[one]["step"].item() for one in pair.mine] == [2.0, 4.0]


@one_order
def test_gradients_that_apexs_old_adam_makes_live_until_the_step_has_read_them(kernel_device):
    made = []

    class Looks(OldAdam):
        def gather(self, gradients, *copies):
            made.extend(map(weakref.ref, gradients))
            super().gather(gradients, *copies)

        def steer(self, state):
            assert [one() is None for one in made] == [False]
            super().steer(state)

    weight = nn.Parameter(torch.ones(70, device=kernel_device))
    Looks([weight]).step(grads=[numbers(kernel_device, 70)], scale=2.0)
    assert len(made) == 1


@one_order
def test_a_half_copy_whose_data_is_replaced_gets_the_next_weights(kernel_device):
    """A graph of the module compares its weights itself, so that :meth:`FusedAdam.upload` does not look at them."""
    master = nn.Parameter(torch.ones(70, device=kernel_device))
    copies = [torch.ones(70, dtype=torch.float16, device=kernel_device)]
    optimizer = FusedAdam([master], lr=0.1)
    state = ops.StepState.on(kernel_device)
    gradient = numbers(kernel_device, 70)
    for step in range(3):
        optimizer.gather([gradient], copies)
        optimizer.steer(state)
        optimizer.step()
        assert torch.equal(copies[0], master.detach().half())
        if step == 0:
            copies[0].data = torch.zeros(70, dtype=torch.float16, device=kernel_device)
            assert optimizer.upload()
    master.data = master.data.clone()
    assert not optimizer.upload()


@one_order
def test_parameters_are_added_frozen_and_thawed(kernel_device):
    pair = Pair(kernel_device, torch.ones(3, 4), torch.ones(70))
    late = [torch.ones(6), torch.ones(2, 2)]
    for step in range(8):
        if step == 2:
            for own, one in ((pair.mine, pair.optimizer), (pair.theirs, pair.reference)):
                added = [nn.Parameter(tensor.clone().to(kernel_device)) for tensor in late]
                added[1].requires_grad_(False)
                own.extend(added)
                one.add_param_group({"params": added, "lr": 0.03})
        for own in (pair.mine, pair.theirs):
            own[0].requires_grad_(step not in (3, 4))
            if step >= 6:
                own[-1].requires_grad_(True)
            for one in own:
                one.grad = None
            sum((index + 1) * one.square().sum() for index, one in enumerate(own) if one.requires_grad).backward()
        pair.optimizer.step()
        pair.reference.step()
        pair.check()
    assert [pair.optimizer.state[one]["step"].item() for one in pair.mine] == [6.0, 8.0, 6.0, 2.0]


@one_order
def test_weights_that_need_no_gradient_are_marked_as_written_too(kernel_device):
    # Backward of earlier layers reads a frozen weight.
    weight, x = (
        nn.Parameter(torch.ones(3, device=kernel_device)),
        torch.ones(3, device=kernel_device, requires_grad=True),
    )
    weight.grad = torch.ones_like(weight)
    optimizer = FusedAdam([weight])
    optimizer.step()
    weight.requires_grad_(False)
    before, product = weight._version, (weight * x).sum()
    optimizer.step()
    assert weight._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("kind", [FusedAdam, FusedSGD])
@one_order
def test_zero_grad(kernel_device, kind):
    def grown():
        made = [nn.Parameter(torch.ones(size, device=kernel_device, dtype=dtype)) for size, dtype in SIZES]
        for one in made[:-1]:
            one.grad = torch.ones_like(one)
        return made

    SIZES = (3, torch.float32), (5, torch.float16), (2, torch.float32), (1, torch.float32)
    weights = grown()
    table = nn.Embedding(5, 2, sparse=True, device=kernel_device)
    table(torch.tensor([1], device=kernel_device)).sum().backward()
    square = (weights[0] ** 3).sum()
    (weights[0].grad,) = torch.autograd.grad(square, weights[0], create_graph=True)
    weights[2].grad.requires_grad_(True)
    held = [one.grad for one in weights]
    optimizer = kind([*weights, table.weight], lr=0.1)
    optimizer.zero_grad(set_to_none=False)
    assert [one.grad is gradient for one, gradient in zip(weights, held, strict=True)] == [True] * 4
    assert all(not one.any() and one.grad_fn is None and not one.requires_grad for one in held[:-1])
    assert weights[-1].grad is None
    assert table.weight.grad.is_sparse
    assert not table.weight.grad.to_dense().any()
    optimizer.zero_grad(set_to_none=True)
    assert all(one.grad is None for one in (*weights, table.weight))
    weights[0].grad = torch.ones_like(weights[0])
    optimizer.zero_grad()  # as in apex: FusedAdam sets gradients to None, FusedSGD zeroes them
    assert (weights[0].grad is None) == (kind is FusedAdam)


@one_order
def test_references_see_the_same(kernel_device):
    with references(kernel_device):
        pair = Pair(kernel_device, torch.ones(3, 4), torch.ones(7))
        full = [numbers(kernel_device, *one.shape) for one in pair.mine]
        pair.step(*full)
        pair.step(None, full[1])
        for own in (pair.mine, pair.theirs):
            own[1].data = torch.full((7,), 5.0, device=kernel_device)
        pair.step(full[0].t().contiguous().t(), full[1][:].clone())


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("on_device", [False, True])
@one_order
def test_a_learning_rate_in_a_tensor_of_one_element(kernel_device, shape, on_device):
    pair = Pair(kernel_device, torch.ones(3, 4), torch.ones(70))
    lr = torch.full(shape, 0.1, device=kernel_device if on_device else "cpu")
    pair.optimizer = FusedAdam(pair.mine, lr=lr, weight_decay=0.1)
    full = [numbers(kernel_device, *one.shape) for one in pair.mine]
    for rate in (0.1, 0.03, 0.03):
        lr.fill_(rate)
        pair.reference.param_groups[0]["lr"] = rate
        pair.step(*full)


@one_order
def test_two_losses_whose_parameters_one_optimizer_has(kernel_device):
    """A step without a gradient for a parameter does not write it, so an autograd graph built before stays valid."""

    def trained(kind):
        left, right = (nn.Parameter(torch.full((3,), value, device=kernel_device)) for value in (1.0, 2.0))
        optimizer = kind([left, right], lr=0.1)
        left.grad, right.grad = torch.ones_like(left), torch.ones_like(right)
        optimizer.step()
        first, second = left.square().sum(), right.square().sum()
        for loss in (first, second):
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        return left, right

    mine, theirs = trained(FusedAdam), trained(torch.optim.Adam)
    for own, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
    left = nn.Parameter(torch.ones(3, device=kernel_device))
    optimizer, loss = FusedAdam([left, nn.Parameter(torch.ones(3, device=kernel_device))]), left.square().sum()
    left.grad = torch.ones_like(left)
    optimizer.step()  # writes the parameter
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
