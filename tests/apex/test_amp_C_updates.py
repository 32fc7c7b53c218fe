"""The updates of amp_C, compared with torch's optimizers in fp64 or with the rule in Python."""

import math

import pytest
import torch

from fabricamp.apex._extensions import amp_C
from tests.apex.tensor_lists import DOUBLE, FULL, HALF, SHAPES, close, copies, device, flag, same, tensors

__all__ = ["device", "flag"]


def run_torch(kind, gradients, parameters, steps, **options):
    """Returns the result of a torch optimizer's step on fp64 copies of the parameters."""
    twins = [one.double().clone().requires_grad_() for one in parameters]
    optimizer = kind(twins, **options)
    for step in range(steps):
        for twin, gradient in zip(twins, gradients(step), strict=True):
            twin.grad = gradient.double()
        optimizer.step()
    return [one.detach() for one in twins]


@pytest.mark.parametrize(("mode", "kind"), [(0, torch.optim.Adam), (1, torch.optim.AdamW)])
@pytest.mark.parametrize("correct", [1, 0])
def test_adam(device, flag, mode, kind, correct):
    parameters, averages, squares = tensors(1), [torch.zeros(s) for s in SHAPES], [torch.zeros(s) for s in SHAPES]
    start = copies([parameters])[0]
    flag.fill_(1)  # has no effect on this function
    for step in (1, 2, 3):
        lists = [tensors(10 + step), parameters, averages, squares]
        amp_C.multi_tensor_adam(65536, flag, lists, 0.1, 0.9, 0.99, 1e-8, step, mode, correct, 0.05)
    options = {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.05}
    if correct:
        close(parameters, run_torch(kind, lambda step: tensors(11 + step), start, 3, **options))
        return
    value, m, v = start[0].double(), 0.0, 0.0  # by hand, because torch always applies the bias correction
    for step in (1, 2, 3):
        g = tensors(10 + step)[0].double() + (0.05 * value if mode == 0 else 0.0)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        value = value - 0.1 * (m / (v.sqrt() + 1e-8) + (0.05 * value if mode == 1 else 0.0))
    close(parameters[:1], [value])


def test_adam_computes_fp64_in_fp32(flag):
    lists = [tensors(2, DOUBLE), tensors(1, DOUBLE), [torch.zeros(s) for s in SHAPES], [torch.zeros(s) for s in SHAPES]]
    twin = [tensors(2), tensors(1), *copies(lists[2:])]
    for columns in (lists, twin):
        amp_C.multi_tensor_adam(65536, flag, columns, 0.1, 0.9, 0.99, 1e-8, 1, 1, 1, 0.05)
    assert lists[1][0].dtype == DOUBLE
    same([one.float() for one in lists[1]], twin[1])


@pytest.mark.parametrize("masters", [False, True])
def test_capturable_adam_reads_the_device_and_unscales_gradients(device, flag, masters):
    dtype = HALF if masters else FULL
    gradients = [one * 8 for one in tensors(2, dtype)]
    lists = [gradients, tensors(1, dtype), [torch.zeros(s) for s in SHAPES], [torch.zeros(s) for s in SHAPES]]
    function = amp_C.multi_tensor_adam_capturable
    if masters:
        function = amp_C.multi_tensor_adam_capturable_master
        lists.append([one.float() for one in lists[1]])
    start = copies(lists)
    lr, step, inverse = torch.tensor(0.1), torch.tensor([1], dtype=torch.int32), torch.tensor([0.125])
    flag.fill_(1)
    function(65536, flag, lists, lr, 0.9, 0.99, 1e-8, step, 1, 1, 0.05, inverse)
    for now, before in zip(lists, start, strict=True):
        same(now, before)
    flag.fill_(0)
    function(65536, flag, lists, lr, 0.9, 0.99, 1e-8, step, 1, 1, 0.05, inverse)
    same(lists[0], [one / 8 for one in start[0]])
    options = {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.05}
    expected = run_torch(torch.optim.AdamW, lambda _: lists[0], start[-1] if masters else start[1], 1, **options)
    close(lists[-1] if masters else lists[1], expected)
    if masters:
        same(lists[1], [one.half() for one in lists[4]])


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("half_copies", [False, True])
def test_sgd(device, flag, nesterov, half_copies):
    parameters, momenta = tensors(1), [torch.full(shape, math.nan) for shape in SHAPES]  # not initialised yet
    start = copies([parameters])[0]
    lists = [None, parameters, momenta, *([tensors(3, HALF)] if half_copies else [])]
    for step in range(3):
        lists[0] = [one * 4 for one in tensors(10 + step)]
        amp_C.multi_tensor_sgd(65536, flag, lists, 0.05, 0.9, 0.0, 0.1, nesterov, step == 0, False, 0.25)
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05, "nesterov": nesterov}
    close(parameters, run_torch(torch.optim.SGD, lambda step: tensors(10 + step), start, 3, **options))
    if half_copies:
        same(lists[3], [one.half() for one in parameters])
    before = copies(lists[1:])
    flag.fill_(1)
    amp_C.multi_tensor_sgd(65536, flag, lists, 0.05, 0.9, 0.0, 0.1, nesterov, False, False, 0.25)
    for now, old in zip(lists[1:], before, strict=True):
        same(now, old)


def test_sgd_decays_after_momentum(device, flag):
    parameters, momenta, gradients = tensors(1), tensors(2), tensors(3)
    start = copies([parameters, momenta])
    amp_C.multi_tensor_sgd(65536, flag, [gradients, parameters, momenta], 0.05, 0.9, 0.2, 0.1, False, False, True, 1.0)
    moved = [0.9 * m + 0.8 * g for m, g in zip(start[1], gradients, strict=True)]
    close(parameters, [p - 0.1 * (m + 0.05 * p) for p, m in zip(start[0], moved, strict=True)])


@pytest.mark.parametrize("mode", [0, 1])
def test_adagrad(device, flag, mode):
    parameters, sums, gradients = tensors(1), [one.abs() for one in tensors(2)], tensors(3)
    start = copies([parameters, sums])
    amp_C.multi_tensor_adagrad(65536, flag, [gradients, parameters, sums], 0.1, 1e-10, mode, 0.05)
    expected = []
    for p, h, g in zip(*start, gradients, strict=True):
        value = g + 0.05 * p if mode == 0 else g
        update = value / ((h + value * value).sqrt() + 1e-10)
        expected.append(p - 0.1 * (update + (0.05 * p if mode == 1 else 0.0)))
    close(parameters, expected)


@pytest.mark.parametrize("norm_type", [0, 2])
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("step", [1, 3])
def test_novograd(device, flag, mode, norm_type, step):
    parameters, averages, gradients = tensors(1), tensors(2), tensors(3)
    start = copies([parameters, averages])
    before = torch.tensor([1.0, 2.0, 0.5, 3.0])
    blended = before.clone()
    lists = [gradients, parameters, averages]
    amp_C.multi_tensor_novograd(65536, flag, lists, blended, 0.1, 0.9, 0.98, 1e-8, step, 1, 0.05, 1, mode, norm_type)
    expected = []
    for place, (p, m, g) in enumerate(zip(*start, gradients, strict=True)):
        old = before[place].item()
        norm = g.abs().max().item() if norm_type == 0 else g.norm().item()
        new = 0.98 * old + 0.02 * norm if norm_type == 0 else math.sqrt(0.98 * old**2 + 0.02 * norm**2)
        assert blended[place].item() == pytest.approx(new, rel=1e-5)
        below, c1 = new / math.sqrt(1 - 0.98**step) + 1e-8, 1 - 0.9**step
        if mode == 0:
            expected.append(p - 0.1 * (0.9 * m + 0.1 * (g / below + 0.05 * p)) / c1)
        else:
            expected.append(p - 0.1 * ((0.9 * m + 0.1 * g) / c1 / below + 0.05 * p))
    close(parameters, expected)


def lamb_by_hand(start, gradients, *, step, norm, limit, decay, nvlamb=False, lr=0.1):
    expected = []
    clip = norm / limit if norm > limit else 1.0
    for gradient, p, average, square in zip(gradients, *start, strict=True):
        g = gradient.double() / clip
        m, v = 0.9 * average.double() + 0.1 * g, 0.99 * square.double() + 0.01 * g * g
        update = m / (1 - 0.9**step) / ((v / (1 - 0.99**step)).sqrt() + 1e-6) + decay * p.double()
        ratio = (p.double().norm() / update.norm()).item() if decay or nvlamb else 1.0
        expected.append(p.double() - lr * ratio * update)
    return expected


@pytest.mark.parametrize("limit", [1.0, 1e6])
@pytest.mark.parametrize(("decay", "nvlamb"), [(0.0, False), (0.0, True), (0.05, False)])
def test_lamb(device, flag, limit, decay, nvlamb):
    gradients, start = tensors(2), [tensors(1), tensors(3), [one.abs() for one in tensors(4)]]
    norm = amp_C.multi_tensor_l2norm(65536, flag, [gradients])[0]
    lists = copies([gradients, *start])
    amp_C.multi_tensor_lamb(65536, flag, lists, 0.1, 0.9, 0.99, 1e-6, 2, 1, decay, 1, 1, norm, limit, nvlamb)
    close(lists[1], lamb_by_hand(start, gradients, step=2, norm=norm.item(), limit=limit, decay=decay, nvlamb=nvlamb))


def test_lamb_mp_reads_the_device(device, flag):
    gradients, start = tensors(2), [tensors(1), tensors(3), [one.abs() for one in tensors(4)]]
    scaled = [one * 4 for one in gradients]
    norm = amp_C.multi_tensor_l2norm(65536, flag, [scaled])[0]
    found_inf, words = torch.ones(1), (torch.tensor(0.1), torch.tensor([2]), torch.tensor(4.0), torch.tensor(0.25))
    lr, step, limit, inverse = words
    lists = copies([scaled, *start, [one.half() for one in start[0]]])

    def run():
        arguments = (lr, 0.9, 0.99, 1e-6, step, 1, 0.05, 1, 1, norm, limit, False, found_inf, inverse)
        amp_C.multi_tensor_lamb_mp(65536, flag, lists, *arguments)

    run()
    for now, before in zip(lists[1:4], start, strict=True):
        same(now, before)
    found_inf.zero_()
    run()
    # The limit applies to scaled gradients, like the norm.
    close(lists[1], lamb_by_hand(start, gradients, step=2, norm=norm.item() / 4, limit=1.0, decay=0.05))
    same(lists[4], [one.half() for one in lists[1]])


def test_the_two_stages_of_lamb_are_one_step(flag):
    gradients, start = tensors(2), [tensors(1), tensors(3), [one.abs() for one in tensors(4)]]
    norm = amp_C.multi_tensor_l2norm(65536, flag, [gradients])[0]
    parameters, averages, squares = copies(start)
    directions = [torch.empty_like(one) for one in gradients]
    lists = [gradients, parameters, averages, squares, directions]
    decays = torch.full((len(SHAPES),), 0.05)
    # One step is done, so the bias correction is that of the second step.
    amp_C.multi_tensor_lamb_stage1_cuda(65536, flag, lists, decays, 1, 0.9, 0.99, 1e-6, norm, 1.0)
    _, of_parameters = amp_C.multi_tensor_l2norm(65536, flag, [parameters], True)
    _, of_directions = amp_C.multi_tensor_l2norm(65536, flag, [directions], True)
    amp_C.multi_tensor_lamb_stage2_cuda(
        65536, flag, [parameters, directions], of_parameters, of_directions, 0.1, 0.05, False
    )
    close(parameters, lamb_by_hand(start, gradients, step=2, norm=norm.item(), limit=1.0, decay=0.05))


@pytest.mark.gpu
def test_on_a_gpu_the_host_waits_for_nothing():
    lists = [[one.cuda() for one in tensors(seed)] for seed in range(4)]
    flag, lr = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.tensor(0.1, device="cuda")
    step, inverse = torch.ones(1, dtype=torch.int32, device="cuda"), torch.ones(1, device="cuda")

    def run():
        amp_C.multi_tensor_scale(65536, flag, lists[:2], 0.5)
        norm, _ = amp_C.multi_tensor_l2norm(65536, flag, lists[:1], True)
        amp_C.multi_tensor_lamb(65536, flag, lists, 0.1, 0.9, 0.99, 1e-6, 1, 1, 0.01, 1, 1, norm, 1.0)
        amp_C.multi_tensor_sgd(65536, flag, lists[:3], 0.0, 0.9, 0.0, 0.1, False, False, False, 1.0)
        amp_C.multi_tensor_adam_capturable(65536, flag, lists, lr, 0.9, 0.99, 1e-8, step, 1, 1, 0.01, inverse)

    lists[3] = [one.abs() for one in lists[3]]
    run()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(one).all() for one in lists[1])
