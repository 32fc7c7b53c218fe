"""Checks for every fused optimizer, whatever its rule; each test passes its own optimizer."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import nn

from fabricamp import ops
from tests.optimizers.twins import assert_same, gradients


def follow(one, other, steps, *, alternate=False):
    """Steps two pairs of module and optimizer on equal gradients; with ``alternate`` every other one of the first is contiguous."""
    (mine, optimizer), (twin, reference) = one, other
    for step in range(steps):
        gradients(mine, step, contiguous=alternate and step % 2 == 0)
        gradients(twin, step)
        optimizer.step()
        reference.step()


def check_closures_copies_and_pickles(module, optimizer, schedule=None, steps=5, **kept):
    """Checks that closures run and lower the loss, and that copies and pickles have the attributes ``kept`` and can step."""
    device = next(module.parameters()).device
    x = torch.randn(3, 2, 6, 6, device=device)

    def closure():
        optimizer.zero_grad()
        loss = module(x).square().sum()
        loss.backward()
        return loss

    losses = []
    for _ in range(steps):
        losses.append(optimizer.step(closure).item())
        if schedule is not None:
            schedule.step()
    assert losses[-1] < losses[0]
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert {name: getattr(other, name) for name in kept} == kept
        own = [p for group in other.param_groups for p in group["params"]]
        assert own[0] is not next(module.parameters())
        before = [p.clone() for p in own]
        gradients(nn.ParameterList(own), 3)
        other.step()
        assert not any(torch.equal(one, two) for one, two in zip(before, own, strict=True))


def check_zeroing(module, optimizer):
    """Checks that ``zero_grad`` zeroes if ``set_grad_none`` is False, and sets gradients to None if asked to."""
    optimizer.zero_grad()
    assert all(p.grad is not None and not p.grad.any() for p in module.parameters())
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in module.parameters())


def check_steering(device, one, other):
    """Checks that a step reads multiplier and flag from device memory (the first step is skipped) and also writes half copies."""
    (module, optimizer), (twin, reference) = one, other
    state = ops.StepState.on(device, scale=4.0)
    halves = [torch.zeros_like(p, dtype=torch.float16) for p in module.parameters()]
    for step in range(3):
        gradients(twin, step)
        values = [p.grad * 8 for p in twin.parameters()]
        if step == 0:
            values[1][0] = float("inf")
        else:
            reference.step()
        optimizer.gather(values, halves)
        ops.finish(state, optimizer.statistics(state.scale, 2.0), scale=state.scale, divisor=2.0)
        optimizer.steer(state)
        optimizer.step()
        assert state.found_inf.item() == float(step == 0)
        for own, expected in zip(module.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(own.to(expected.dtype), expected, rtol=1e-6, atol=1e-6)
        assert step == 0 or all(torch.equal(h, p.half()) for h, p in zip(halves, module.parameters(), strict=True))


def check_grad_scaler(device, pairs, overflow):
    """Checks that a step skips if torch's GradScaler passes its overflow flag; ``overflow`` is the step that overflows."""
    for module, optimizer in pairs:
        scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
        for step in range(3):
            gradients(module, step, scale=float(scaler.scale(torch.ones((), device=device))))
            if step == overflow:
                next(module.parameters()).grad[0, 0, 0, 2] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == (1024.0 if overflow is None else 512.0)
    assert_same(pairs[0][0], pairs[1][0], 1e-5)
