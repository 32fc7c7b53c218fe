"""``amp_C``: functions on lists of tensors, with apex's order of arguments, implemented with :mod:`fabricamp.ops`.

The first three arguments are ``chunk_size`` (no effect), ``noop_flag`` (one int32 on the device of the tensors: some functions set
it, and 1 makes others skip, as their docstrings say) and ``tensor_lists``.  CPU tensors work as well as CUDA tensors.  fp64 tensors
are computed in fp32, as in apex.  The host reads nothing from a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fabricamp import ops
from fabricamp.apex._multi_tensor.lamb import multi_tensor_lamb as multi_tensor_lamb
from fabricamp.apex._multi_tensor.lamb import multi_tensor_lamb_mp as multi_tensor_lamb_mp
from fabricamp.apex._multi_tensor.lamb import multi_tensor_lamb_stage1_cuda as multi_tensor_lamb_stage1_cuda
from fabricamp.apex._multi_tensor.lamb import multi_tensor_lamb_stage2_cuda as multi_tensor_lamb_stage2_cuda
from fabricamp.apex._multi_tensor.lists import checked, flag_where_not_finite, in_fp32, numbers, verdict
from fabricamp.apex._multi_tensor.norms import multi_tensor_l2norm as multi_tensor_l2norm
from fabricamp.apex._multi_tensor.norms import multi_tensor_l2norm_mp as multi_tensor_l2norm_mp
from fabricamp.apex._multi_tensor.norms import multi_tensor_l2norm_scale as multi_tensor_l2norm_scale
from fabricamp.apex._multi_tensor.norms import multi_tensor_unscale_l2norm as multi_tensor_unscale_l2norm


@torch.no_grad()
def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], scale: Tensor | float
) -> None:
    """Writes list 0 times ``scale`` into list 1; sets the flag if list 0 holds inf or nan."""
    sources, destinations = checked("multi_tensor_scale", noop_flag, tensor_lists, 2)
    flag_where_not_finite(noop_flag, sources)
    ops.scale(sources, destinations, scale)


@torch.no_grad()
def multi_tensor_axpby(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    a: float,
    b: float,
    arg_to_check: int = -1,
) -> None:
    """Writes ``a * list 0 + b * list 1`` into list 2; sets the flag if list ``arg_to_check`` (-1: 0 or 1) holds inf or nan."""
    x, y, out = checked("multi_tensor_axpby", noop_flag, tensor_lists, 3)
    watched = {0: [x], 1: [y]}.get(arg_to_check, [x, y])
    flag_where_not_finite(noop_flag, *watched)
    ops.axpby(a, x, b, y, out)


@torch.no_grad()
def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """Makes an SGD step: updates parameters (list 1) and momentum (2) by gradients (0) times ``scale``.

    Copies the parameters to list 3 if there is one.  Has no effect if the flag is set.
    """
    lists = checked("multi_tensor_sgd", noop_flag, tensor_lists, 3, 4)
    with in_fp32(lists) as (gradients, parameters, buffers, *copies):
        if first_run:
            torch._foreach_zero_(buffers)  # they are uninitialised in the first run
        ops.sgd(
            gradients,
            parameters,
            buffers,
            numbers(0.0 if first_run else 1.0, len(gradients), noop_flag.device),
            ops.SgdRule(lr, momentum, dampening, wd, nesterov=nesterov, decay_after_momentum=wd_after_momentum),
            copies=copies[0] if copies else None,
            state=verdict(noop_flag, scale),
        )


@torch.no_grad()
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Makes step number ``step`` of Adam (``mode`` 0) or AdamW (1), and ignores the flag.

    Lists: gradients, parameters, averages, squares.
    """
    lists = checked("multi_tensor_adam", noop_flag, tensor_lists, 4)
    rule = _adam_rule(lr, beta1, beta2, eps, mode, bias_correction, weight_decay)
    with in_fp32(lists) as (gradients, parameters, averages, squares):
        steps = numbers(step - 1, len(gradients), noop_flag.device)
        ops.adam(gradients, parameters, averages, squares, steps, rule)


@torch.no_grad()
def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    """Does the same as :func:`multi_tensor_adam`, with gradients multiplied by ``inv_scale`` in place.

    Has no effect if the flag is set.
    """
    lists = checked("multi_tensor_adam_capturable", noop_flag, tensor_lists, 4)
    rule = _adam_rule(lr, beta1, beta2, eps, mode, bias_correction, weight_decay)
    _adam_on_device(noop_flag, lists, step, inv_scale, rule)


@torch.no_grad()
def multi_tensor_adam_capturable_master(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    """Does the same as :func:`multi_tensor_adam_capturable` on masters (list 4), and copies them into the parameters (list 1)."""
    lists = checked("multi_tensor_adam_capturable_master", noop_flag, tensor_lists, 5)
    gradients, parameters, averages, squares, masters = lists
    rule = _adam_rule(lr, beta1, beta2, eps, mode, bias_correction, weight_decay)
    _adam_on_device(noop_flag, [gradients, masters, averages, squares, parameters], step, inv_scale, rule)


def _adam_on_device(
    noop_flag: Tensor, lists: list[list[Tensor]], step: Tensor, inv_scale: Tensor, rule: ops.AdamRule
) -> None:
    """Makes an Adam step with numbers on the device; lists: gradients, parameters, averages, squares, copies (optional)."""
    with in_fp32(lists) as (gradients, parameters, averages, squares, *copies):
        unscaling = torch.where(noop_flag.reshape(()) != 0, 1.0, inv_scale.reshape(()).float())
        ops.scale(gradients, gradients, unscaling)
        steps = numbers(step - 1, len(gradients), noop_flag.device)
        written = copies[0] if copies else None
        ops.adam(gradients, parameters, averages, squares, steps, rule, copies=written, state=verdict(noop_flag))


def _adam_rule(
    lr: Tensor | float, beta1: float, beta2: float, eps: float, mode: int, bias_correction: int, weight_decay: float
) -> ops.AdamRule:
    # A tensor is passed on, so that its value is read on the device.
    lr = lr.reshape(()) if isinstance(lr, Tensor) else lr
    return ops.AdamRule(lr, beta1, beta2, eps, weight_decay, bias_correction=bool(bias_correction), decoupled=mode == 1)


@torch.no_grad()
def multi_tensor_adagrad(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    lr: float,
    eps: float,
    mode: int,
    weight_decay: float,
) -> None:
    """Makes an Adagrad step; lists: gradients, parameters, sums of squares; weight decay is L2 (``mode`` 0) or decoupled (1)."""
    lists = checked("multi_tensor_adagrad", noop_flag, tensor_lists, 3)
    rule = ops.AdagradRule(lr, eps, weight_decay, decoupled=mode == 1)
    with in_fp32(lists) as (gradients, parameters, sums):
        ops.adagrad(gradients, parameters, sums, numbers(0.0, len(gradients), noop_flag.device), rule)


@torch.no_grad()
def multi_tensor_novograd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    grad_norms: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    norm_type: int,
) -> None:
    """Makes a NovoGrad step; lists: gradients, parameters, averages.

    Updates the running norms ``grad_norms``, one per tensor: 2-norms, or largest absolute values with ``norm_type`` 0.
    """
    lists = checked("multi_tensor_novograd", noop_flag, tensor_lists, 3)
    rule = ops.NovoGradRule(
        lr,
        beta1,
        beta2,
        eps,
        weight_decay,
        bias_correction=bool(bias_correction),
        inside=mode == 0,
        grad_averaging=bool(grad_averaging),
        largest=norm_type == 0,
        from_zero=True,  # callers initialise the norms themselves
    )
    with in_fp32(lists) as (gradients, parameters, averages):
        norms = grad_norms.float()  # the same tensor if it is fp32
        steps = numbers(step - 1, len(gradients), noop_flag.device)
        ops.novograd(gradients, parameters, averages, steps, list(norms.unbind()), rule)
        if norms is not grad_norms:
            grad_norms.copy_(norms)


@torch.no_grad()
def update_scale_hysteresis(
    current_scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> Tensor:
    """Returns ``current_scale``, updated in place with both trackers: it backs off when overflows have used up ``hysteresis``.

    The scale can fall to 0 but not to a subnormal number, and never grows to inf.  Only a positive ``found_inf`` uses up
    hysteresis; nan and negative values back off at once.
    """
    scale, growth, left = (one.view(()) for one in (current_scale, growth_tracker, hysteresis_tracker))
    found = found_inf.view(())
    overflow = found > 0
    left.sub_(overflow.to(left.dtype))
    waits = overflow & (left > 0)
    backs_off = (found != 0) & ~waits
    clean = found == 0
    count = growth + 1
    due = clean & (count == growth_interval)
    grown = _product(scale, growth_factor)
    scale.copy_(torch.where(due & torch.isfinite(grown), grown, scale))
    scale.copy_(torch.where(backs_off, _product(scale, backoff_factor), scale))
    growth.copy_(torch.where(clean & ~due, count, 0))
    left.copy_(torch.where(found <= 0, hysteresis, left))
    return current_scale


def _product(scale: Tensor, factor: float) -> Tensor:
    """Returns ``scale * factor`` as apex's kernel does: in fp64, rounded once; with fast math, it treats subnormals as 0."""
    smallest = torch.finfo(torch.float32).smallest_normal
    product = (torch.where(scale.abs() < smallest, 0.0, scale).double() * factor).float()
    return torch.where(product.abs() < smallest, 0.0, product)
