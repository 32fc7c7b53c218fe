"""``amp_C``: functions on lists of tensors, with apex's order of arguments, implemented with :mod:`fabricamp.ops`.

The first three arguments are ``chunk_size`` (no effect), ``noop_flag`` (one int32 on the device of the tensors: some functions set
it, and 1 makes others skip, as their docstrings say) and ``tensor_lists``.  CPU tensors work as well as CUDA tensors.  fp64 tensors
are computed in fp32, as in apex.  The host reads nothing from a GPU.

In order: sums and norms, the updates of the optimizers, the scale with hysteresis, and the checks of flag and lists.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from fabricamp import ops
from fabricamp.errors import ConfigError
from fabricamp.ops.layouts import is_dense

_Lists = list[list[Tensor]]
_FLOATING: Final = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})


@torch.no_grad()
def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], scale: Tensor | float
) -> None:
    """Writes list 0 times ``scale`` into list 1; sets the flag if list 0 holds inf or nan."""
    sources, destinations = _checked("multi_tensor_scale", noop_flag, tensor_lists, 2)
    _flag_where_not_finite(noop_flag, sources)
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
    x, y, out = _checked("multi_tensor_axpby", noop_flag, tensor_lists, 3)
    lists = {0: [x], 1: [y]}.get(arg_to_check, [x, y])
    _flag_where_not_finite(noop_flag, *lists)
    ops.axpby(a, x, b, y, out)


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the norm of all tensors (one fp32) and, with ``per_tensor``, of each; sets the flag if the norm is not finite."""
    (tensors,) = _checked("multi_tensor_l2norm", noop_flag, tensor_lists, 1)
    norm, each = ops.l2norm(tensors)
    noop_flag.logical_or_(torch.isfinite(norm).logical_not_())
    return norm.reshape(1), each if per_tensor else each.new_empty(0)


@torch.no_grad()
def multi_tensor_l2norm_mp(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the same as :func:`multi_tensor_l2norm`, but zeros if the flag is set already."""
    skipped = noop_flag.reshape(()) != 0
    norm, each = multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor)
    return norm.masked_fill(skipped, 0.0), each.masked_fill(skipped, 0.0)


@torch.no_grad()
def multi_tensor_l2norm_scale(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    scale: float,
    per_tensor: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Writes list 0 times ``scale`` into list 1, and returns the norms of list 0; sets the flag if they are not finite."""
    sources, destinations = _checked("multi_tensor_l2norm_scale", noop_flag, tensor_lists, 2)
    norms = multi_tensor_l2norm(chunk_size, noop_flag, [sources], per_tensor)
    ops.scale(sources, destinations, scale)
    return norms


@torch.no_grad()
def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    inv_scale: Tensor,
    per_tensor: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the norms of the tensors times ``inv_scale``; sets the flag if the norms of the tensors are not finite."""
    norm, each = multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor)
    factor = inv_scale.reshape(1).to(norm)
    return norm * factor, each * factor


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
    lists = _checked("multi_tensor_sgd", noop_flag, tensor_lists, 3, 4)
    with _in_fp32(lists) as (gradients, parameters, buffers, *copies):
        if first_run:
            torch._foreach_zero_(buffers)  # they are uninitialised in the first run
        ops.sgd(
            gradients,
            parameters,
            buffers,
            _numbers(0.0 if first_run else 1.0, len(gradients), noop_flag.device),
            ops.SgdRule(lr, momentum, dampening, wd, nesterov=nesterov, decay_after_momentum=wd_after_momentum),
            copies=copies[0] if copies else None,
            state=_state_of(noop_flag, scale),
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
    lists = _checked("multi_tensor_adam", noop_flag, tensor_lists, 4)
    rule = _adam_rule(lr, beta1, beta2, eps, mode, bias_correction, weight_decay)
    with _in_fp32(lists) as (gradients, parameters, averages, squares):
        steps = _numbers(step - 1, len(gradients), noop_flag.device)
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
    lists = _checked("multi_tensor_adam_capturable", noop_flag, tensor_lists, 4)
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
    lists = _checked("multi_tensor_adam_capturable_master", noop_flag, tensor_lists, 5)
    gradients, parameters, averages, squares, masters = lists
    rule = _adam_rule(lr, beta1, beta2, eps, mode, bias_correction, weight_decay)
    _adam_on_device(noop_flag, [gradients, masters, averages, squares, parameters], step, inv_scale, rule)


def _adam_on_device(
    noop_flag: Tensor, lists: list[list[Tensor]], step: Tensor, inv_scale: Tensor, rule: ops.AdamRule
) -> None:
    """Makes an Adam step with numbers on the device; lists: gradients, parameters, averages, squares, copies (optional)."""
    with _in_fp32(lists) as (gradients, parameters, averages, squares, *copies):
        unscaling = torch.where(noop_flag.reshape(()) != 0, 1.0, inv_scale.reshape(()).float())
        ops.scale(gradients, gradients, unscaling)
        steps = _numbers(step - 1, len(gradients), noop_flag.device)
        written = copies[0] if copies else None
        ops.adam(gradients, parameters, averages, squares, steps, rule, copies=written, state=_state_of(noop_flag))


def _adam_rule(
    lr: Tensor | float, beta1: float, beta2: float, eps: float, mode: int, bias_correction: int, weight_decay: float
) -> ops.AdamRule:
    # A tensor is passed on, so that its value is read on the device.
    lr = lr.reshape(()) if isinstance(lr, Tensor) else lr
    return ops.AdamRule(lr, beta1, beta2, eps, weight_decay, bias_correction=bool(bias_correction), decoupled=mode == 1)


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
    lists = _checked("multi_tensor_lamb", noop_flag, tensor_lists, 4)
    moments = beta1, beta2, epsilon
    rule = _lamb_rule(lr, moments, weight_decay, bias_correction, grad_averaging, mode, max_grad_norm, use_nvlamb)
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
    lists = _checked("multi_tensor_lamb_mp", noop_flag, tensor_lists, 4, 5)
    moments = beta1, beta2, epsilon
    # Only the device knows the limit: the norm is divided by it, and compared with 1.
    rule = _lamb_rule(lr.reshape(()), moments, weight_decay, bias_correction, grad_averaging, mode, 1.0, use_nvlamb)
    norm = global_grad_norm.reshape(()) / max_grad_norm.reshape(())
    state = _state_of(noop_flag.reshape(()).logical_or(found_inf.reshape(())), inv_scale)
    _lamb(noop_flag, lists, step, rule, norm, state)


def _lamb_rule(
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
    lists: _Lists,
    step: Tensor | int,
    rule: ops.LambRule,
    norm: Tensor,
    state: ops.StepState | None,
) -> None:
    with _in_fp32(lists) as (gradients, parameters, averages, squares, *copies):
        steps = _numbers(step - 1, len(gradients), noop_flag.device)
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
    lists = _checked("multi_tensor_lamb_stage1_cuda", noop_flag, tensor_lists, 5)
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
    parameters, directions = _checked("multi_tensor_lamb_stage2_cuda", noop_flag, tensor_lists, 2)
    ratios = torch.ones_like(per_tensor_param_norm)
    if use_nvlamb or weight_decay != 0:
        both = (per_tensor_param_norm != 0) & (per_tensor_update_norm != 0)
        ratios = torch.where(both, per_tensor_param_norm / per_tensor_update_norm, ratios)
    for parameter, direction, ratio in zip(parameters, directions, (lr * ratios).unbind(), strict=True):
        parameter.copy_(parameter.float() - ratio * direction.float())


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
    lists = _checked("multi_tensor_adagrad", noop_flag, tensor_lists, 3)
    rule = ops.AdagradRule(lr, eps, weight_decay, decoupled=mode == 1)
    with _in_fp32(lists) as (gradients, parameters, sums):
        ops.adagrad(gradients, parameters, sums, _numbers(0.0, len(gradients), noop_flag.device), rule)


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
    lists = _checked("multi_tensor_novograd", noop_flag, tensor_lists, 3)
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
    with _in_fp32(lists) as (gradients, parameters, averages):
        norms = grad_norms.float()  # the same tensor if it is fp32
        steps = _numbers(step - 1, len(gradients), noop_flag.device)
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
    scale = current_scale.view(())
    growth = growth_tracker.view(())
    left = hysteresis_tracker.view(())
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


class TensorListError(ConfigError, RuntimeError):
    """A function of ``amp_C`` cannot take these lists of tensors; this error is a ``RuntimeError`` too, as in apex."""


def _checked(name: str, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], *depths: int) -> _Lists:
    """Returns the lists; raises :class:`TensorListError` unless their number is in ``depths`` and their tensors match."""
    lists = [list(tensors) for tensors in tensor_lists]
    if len(lists) not in depths:
        wanted = " or ".join(map(str, depths))
        raise TensorListError(f"{name} takes {wanted} lists of tensors, and got {len(lists)}")
    lengths = [len(tensors) for tensors in lists]
    if not lengths[0]:
        raise TensorListError(f"{name} got an empty list of tensors; give at least one, or do not call it")
    if len(set(lengths)) > 1:
        raise TensorListError(f"{name} got lists of different lengths ({', '.join(map(str, lengths))})")
    device = lists[0][0].device
    for number, tensors in enumerate(lists):
        for index, tensor in enumerate(tensors):
            obstacle = _obstacle(tensor, lists[0][index], device)
            if obstacle is not None:
                raise TensorListError(f"{name}: tensor {index} of list {number} {obstacle}")
    if noop_flag.device != device or noop_flag.numel() != 1:
        raise TensorListError(
            f"{name}: the flag is a tensor of {noop_flag.numel()} elements on {noop_flag.device}; give one int32 on {device}"
        )
    return lists


def _obstacle(tensor: Tensor, first: Tensor, device: torch.device) -> str | None:
    """Returns why ``tensor`` does not match ``first``, the tensor of list 0 at the same index; None if it does."""
    if tensor.device != device:
        return f"is not on the same device as the first one ({tensor.device}, {device})"
    if tensor.numel() != first.numel():
        return f"has {tensor.numel()} elements, the one of the first list has {first.numel()}"
    if tensor.dtype not in _FLOATING:
        return f"is of {tensor.dtype}; it has to be fp32, fp16, bf16 or fp64"
    if not is_dense(tensor):
        return "is neither contiguous nor channels last"
    return None


def _flag_where_not_finite(noop_flag: Tensor, *lists: Sequence[Tensor]) -> None:
    """Sets the flag if a tensor holds inf or nan; the host reads nothing."""
    same: dict[torch.dtype, list[Tensor]] = {}
    for tensor in (one for tensors in lists for one in tensors if one.numel() > 0):
        same.setdefault(tensor.dtype, []).append(tensor)
    for tensors in same.values():
        largest = torch.stack(list(torch._foreach_norm(tensors, torch.inf)))  # nan if the tensor holds a nan
        noop_flag.logical_or_(torch.isfinite(largest).all().logical_not_())


def _state_of(noop_flag: Tensor, multiplier: Tensor | float = 1.0) -> ops.StepState:
    """Returns a StepState that makes an op skip if the flag is set, and multiply gradients by ``multiplier``."""
    state = ops.StepState.on(noop_flag.device)
    state.found_inf.copy_(noop_flag.reshape(()) != 0)
    if isinstance(multiplier, Tensor):
        state.multiplier.copy_(multiplier.reshape(()))
    else:
        state.multiplier.fill_(multiplier)
    return state


def _numbers(value: Tensor | float, count: int, device: torch.device) -> list[Tensor]:
    """Returns ``count`` 0-dim fp32 tensors with ``value`` on ``device``."""
    if isinstance(value, Tensor):
        return list(value.reshape(1).to(device, torch.float32).repeat(count).unbind())
    return list(torch.full((count,), float(value), dtype=torch.float32, device=device).unbind())


@contextlib.contextmanager
def _in_fp32(lists: _Lists) -> Iterator[_Lists]:
    """Yields the lists with fp32 copies in place of fp64 tensors, and writes the copies back at exit: apex's rule for fp64."""
    narrow = [[one.float() if one.dtype is torch.float64 else one for one in tensors] for tensors in lists]
    yield narrow
    for tensors, copies in zip(lists, narrow, strict=True):
        for tensor, copy in zip(tensors, copies, strict=True):
            if tensor is not copy:
                tensor.copy_(copy)
