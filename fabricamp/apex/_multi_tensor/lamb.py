"""LAMB as in ``amp_C``: the caller passes the norm of all gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from fabricamp import ops
from fabricamp.apex._multi_tensor.lists import Lists, checked, in_fp32, numbers, verdict


@torch.no_grad()
def multi_tensor_lamb(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: float,
    use_nvlamb: bool = False,
) -> None:
    """Makes step number ``step`` of LAMB; lists: gradients (not changed), parameters, averages, squares."""
    lists = checked("multi_tensor_lamb", noop_flag, tensor_lists, 4)
    moments = beta1, beta2, epsilon
    rule = _rule(lr, moments, weight_decay, bias_correction, grad_averaging, mode, max_grad_norm, use_nvlamb)
    _lamb(noop_flag, lists, step, rule, global_grad_norm.reshape(()), None)


@torch.no_grad()
def multi_tensor_lamb_mp(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: Tensor,
    use_nvlamb: bool,
    found_inf: Tensor,
    inv_scale: Tensor,
) -> None:
    """Does the same as :func:`multi_tensor_lamb`, with numbers on the device.

    Copies the parameters to list 4 if there is one.  Has no effect if the flag or ``found_inf`` is set.
    """
    lists = checked("multi_tensor_lamb_mp", noop_flag, tensor_lists, 4, 5)
    moments = beta1, beta2, epsilon
    # Only the device knows the limit: the norm is divided by it, and compared with 1.
    rule = _rule(lr.reshape(()), moments, weight_decay, bias_correction, grad_averaging, mode, 1.0, use_nvlamb)
    norm = global_grad_norm.reshape(()) / max_grad_norm.reshape(())
    state = verdict(noop_flag.reshape(()).logical_or(found_inf.reshape(())), inv_scale)
    _lamb(noop_flag, lists, step, rule, norm, state)


def _rule(
    lr: float | Tensor,
    moments: tuple[float, float, float],
    weight_decay: float,
    bias_correction: int,
    grad_averaging: int,
    mode: int,
    max_norm: float,
    use_nvlamb: bool,
) -> ops.LambRule:
    """Returns the rule for apex's arguments; ``moments`` are beta1, beta2 and epsilon."""
    return ops.LambRule(
        lr,
        *moments,
        weight_decay,
        bias_correction=bool(bias_correction),
        decoupled=mode == 1,
        grad_averaging=bool(grad_averaging),
        max_norm=max_norm,
        nvlamb=bool(use_nvlamb),
    )


def _lamb(
    noop_flag: Tensor,
    lists: Lists,
    step: Tensor | int,
    rule: ops.LambRule,
    norm: Tensor,
    state: ops.StepState | None,
) -> None:
    with in_fp32(lists) as (gradients, parameters, averages, squares, *copies):
        steps = numbers(step - 1, len(gradients), noop_flag.device)
        rows = ops.Rows(gradients, parameters, (averages, squares), (steps,), copies[0] if copies else None)
        ops.update(rule, rows, state, norm=norm.to(gradients[0].device, torch.float64, non_blocking=True))


@torch.no_grad()
def multi_tensor_lamb_stage1_cuda(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    per_tensor_decay: Tensor,
    step: int,
    beta1: float,
    beta2: float,
    epsilon: float,
    global_grad_norm: Tensor,
    max_global_grad_norm: float,
) -> None:
    """Updates averages (list 2) and squares (3) from gradients (0), and writes the directions of parameters (1) into list 4.

    ``step`` is the number of steps before this one; ``per_tensor_decay`` is the weight decay of each tensor.
    """
    lists = checked("multi_tensor_lamb_stage1_cuda", noop_flag, tensor_lists, 5)
    norm = global_grad_norm.reshape(()).to(noop_flag.device, torch.float32)
    clip = torch.where(norm > max_global_grad_norm, max_global_grad_norm / norm, torch.ones_like(norm))
    decays = per_tensor_decay.to(noop_flag.device, torch.float32).unbind()
    for gradient, parameter, average, square, direction, decay in zip(*lists, decays, strict=True):
        value = gradient.float() * clip
        mean = average.float().lerp(value, 1 - beta1)
        spread = (square.float() * beta2).addcmul_(value, value, value=1 - beta2)
        root = (spread / (1 - beta2 ** (step + 1))).sqrt_().add_(epsilon)
        direction.copy_(mean / (1 - beta1 ** (step + 1)) / root + decay * parameter.float())
        average.copy_(mean)
        square.copy_(spread)


@torch.no_grad()
def multi_tensor_lamb_stage2_cuda(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    per_tensor_param_norm: Tensor,
    per_tensor_update_norm: Tensor,
    lr: float,
    weight_decay: float,
    use_nvlamb: bool = False,
) -> None:
    """Moves parameters (list 0) along their directions (1) by ``lr``, times the ratio of their norms if both are above 0."""
    parameters, directions = checked("multi_tensor_lamb_stage2_cuda", noop_flag, tensor_lists, 2)
    ratios = torch.ones_like(per_tensor_param_norm)
    if use_nvlamb or weight_decay != 0:
        both = (per_tensor_param_norm != 0) & (per_tensor_update_norm != 0)
        ratios = torch.where(both, per_tensor_param_norm / per_tensor_update_norm, ratios)
    for parameter, direction, ratio in zip(parameters, directions, (lr * ratios).unbind(), strict=True):
        parameter.copy_(parameter.float() - ratio * direction.float())
