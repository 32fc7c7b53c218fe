"""Cross-entropy of class indices: reads the logits once forward and once backward, and saves a few bytes per row in between."""

from __future__ import annotations

import math
from operator import index
from typing import Any, Final, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import functional as F

from fabricamp.arguments.checks import check_choice
from fabricamp.errors import ConfigError
from fabricamp.ops.bridge import Kernel, c_type, kernel, runs_kernels
from fabricamp.ops.context import Context
from fabricamp.ops.dispatch import chosen, is_batch, recorded, torch_alone

_REDUCTIONS: Final = ("mean", "sum", "none")
_LABELS: Final = {torch.int64: "int64", torch.int32: "int"}
LOGITS: Final = (torch.float32, torch.float16, torch.bfloat16)
_NAME: Final = "cross_entropy"
TOO_WIDE: Final = 2**30  # the kernels count the elements of a row in 32 bits
_WARP: Final = 32
_ROWS_IN_A_BLOCK: Final = 8  # if one warp does a row
_ROWS_OF_A_SUM: Final = 4096
_MOST_SUMS: Final = 256  # the threads of the block that adds the sums
_MOST_BLOCKS: Final = 8192  # of a pass over a gradient
_NOT_A_CLASS: Final = -100
_SCHEMA: Final = "float label_smoothing, int ignore_index, str reduction, float z_loss, float softcap"


class CrossEntropyRule(NamedTuple):
    """The options of a loss."""

    label_smoothing: float = 0.0
    ignore_index: int = -100
    reduction: str = "mean"
    z_loss: float = 0.0
    softcap: float = 0.0


def fused_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    z_loss: float = 0.0,
    softcap: float = 0.0,
    in_place: bool = False,
) -> Tensor:
    """Returns the fp32 cross-entropy of ``logits`` (any shape, classes last) and ``target`` (its leading shape; int64 or int32).

    The loss of a row is torch's, plus ``z_loss * logsumexp(row)**2``; rows with ``ignore_index`` do not count.  A ``softcap`` above
    0 makes logits ``softcap * tanh(logits / softcap)`` first.  Half logits stay half, also under autocast, and all arithmetic is
    fp32 (for fp64 logits arithmetic and loss are fp64).  ``in_place`` gives up the logits' memory: backward may overwrite the
    logits with their gradient; torch then refuses a second backward, and the backward of any other operation that needs the
    logits.  Torch's operations and torch.compile overwrite nothing.

    An invalid target class raises ConfigError on a CPU.  On a GPU, where the check would make the host wait, the loss and the
    gradient of its row are NaN.

    >>> logits = torch.zeros(2, 4, requires_grad=True)
    >>> fused_cross_entropy(logits, torch.tensor([1, -100]))
    tensor(1.3863, grad_fn=...)
    """
    rule = CrossEntropyRule(label_smoothing, ignore_index, reduction, z_loss, softcap)
    check_rule(rule)
    _check(logits, target)
    if in_place and logits.requires_grad and _is_of_a_leaf(logits):
        raise ConfigError(
            "in_place=True writes the gradient over the logits, but these are a leaf that requires grad, or a view of one, "
            "and other code still has it; give the output of an operation, or in_place=False"
        )
    classes = index(logits.shape[-1])  # a constant for torch.compile, which treats the choice as a constant
    by_kernel = logits.dtype in LOGITS and classes < TOO_WIDE and chosen(_NAME, logits.dtype, classes, logits.device)
    if by_kernel and not torch_alone():
        # A subclass may have no memory of its own.
        if torch.compiler.is_compiling() or (type(logits) is Tensor and recorded()):
            return cast("Tensor", torch.ops.fabricamp.cross_entropy(logits, target, *rule)[0])
        if type(logits) is Tensor:
            return cast("Tensor", _CrossEntropy.apply(logits, target, rule, in_place))  # type: ignore[no-untyped-call]
    return cross_entropy_reference(logits, target, **rule._asdict())


def check_rule(rule: CrossEntropyRule) -> None:
    """Raises ConfigError if ``rule`` has an invalid option."""
    check_choice("reduction", rule.reduction, _REDUCTIONS)
    if not 0 <= rule.label_smoothing <= 1:
        raise ConfigError(f"label_smoothing={rule.label_smoothing} is a share of the target: give a number from 0 to 1")
    if not 0 <= rule.z_loss < math.inf:
        raise ConfigError(f"z_loss={rule.z_loss} is the weight of a penalty: give 0 or a positive number")
    if not 0 <= rule.softcap < math.inf:
        raise ConfigError(
            f"softcap={rule.softcap} is the size that logits approach: give a positive number, or 0 for none"
        )


def _is_of_a_leaf(logits: Tensor) -> bool:
    if logits.is_leaf or torch.compiler.is_compiling():  # compiled code overwrites nothing
        return logits.is_leaf
    base = logits._base
    return base is not None and base.is_leaf


def _check(logits: Tensor, target: Tensor) -> None:
    if not logits.dtype.is_floating_point:
        raise ConfigError(f"logits of {logits.dtype}: give a floating dtype (logits come first, then targets)")
    check_labels(target)
    if logits.dim() == 0 or logits.shape[:-1] != target.shape or logits.shape[-1] == 0:
        raise ConfigError(
            f"logits of shape {tuple(logits.shape)} and targets of shape {tuple(target.shape)}: classes are the last dimension "
            "of the logits, and the targets' shape is that of the others (torch's F.cross_entropy has classes second)"
        )
    if logits.device != target.device:
        raise ConfigError(f"logits are on {logits.device} and targets on {target.device}: move one of them")


def check_labels(target: Tensor) -> None:
    """Raises ConfigError if ``target`` has not the dtype of class indices."""
    if target.dtype not in _LABELS:
        raise ConfigError(
            f"targets of {target.dtype}: give class indices of int64 or int32 (probabilities are torch's F.cross_entropy)"
        )


class _Saved(Context, Protocol):
    """The logits, the targets and the statistics of each row."""

    @property
    def saved_tensors(self) -> tuple[Tensor, Tensor, Tensor]: ...


class _EagerContext(_Saved, Protocol):
    rule: CrossEntropyRule
    in_place: bool


class _OperationContext(_Saved, Protocol):
    rule: list[float]
    """The values of a ``CrossEntropyRule``, as the operation takes them."""


class _CrossEntropy(torch.autograd.Function):
    """Runs the kernels in eager mode: the registered operation, which torch.compile needs, costs the host 200 us more."""

    @staticmethod
    def forward(ctx: _EagerContext, logits: Tensor, target: Tensor, rule: CrossEntropyRule, in_place: bool) -> Tensor:
        loss, statistics = cross_entropy_forward(logits, target, rule)
        ctx.save_for_backward(logits, target, statistics)
        ctx.rule = rule
        ctx.in_place = in_place
        return loss

    @staticmethod
    def backward(ctx: _EagerContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        logits, target, statistics = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: the operation refuses a second derivative in its backward
            result = torch.ops.fabricamp.cross_entropy_backward(gradient, logits, target, statistics, *ctx.rule)
        elif is_batch(gradient):
            result = _backward_by_torch(gradient, logits, target, statistics, ctx.rule)
        else:
            result = cross_entropy_backward(gradient, logits, target, statistics, ctx.rule, in_place=ctx.in_place)
        return result, None, None, None


class _RowStrides(NamedTuple):
    """The memory layout of rows: row r starts at ``r // inner * outer_stride + r % inner * inner_stride``."""

    inner: int
    outer_stride: int
    inner_stride: int


def _row_strides(logits: Tensor) -> _RowStrides | None:
    """Returns the layout of the rows of ``logits``, or None if it needs more than two strides."""
    classes = logits.shape[-1]
    if logits.is_contiguous():
        return _RowStrides(max(logits.numel() // classes, 1), 0, classes)
    if logits.stride(-1) != 1:
        return None
    groups: list[tuple[int, int]] = []  # sizes and strides; dimensions that are contiguous with each other are merged
    for size, stride in zip(logits.shape[:-1], logits.stride()[:-1], strict=True):
        if size == 1:
            continue
        if groups and groups[-1][1] == size * stride:
            groups[-1] = (groups[-1][0] * size, stride)
        else:
            groups.append((size, stride))
    if len(groups) > 2:
        return None
    inner, inner_stride = groups[-1] if groups else (1, 0)
    outer_stride = groups[0][1] if len(groups) == 2 else 0
    return _RowStrides(inner, outer_stride, inner_stride)


def _in_rows(logits: Tensor) -> tuple[Tensor, _RowStrides]:
    """Returns the logits, or a contiguous copy if their rows need more than two strides, and the layout of the rows."""
    layout = _row_strides(logits)
    if layout is None:
        logits = logits.contiguous()
        layout = _row_strides(logits)
        assert layout is not None
    return logits, layout


def cross_entropy_rescale(gradient: Tensor, factor: Tensor) -> None:
    """Multiplies ``gradient`` in place by ``factor`` (fp32, no dimensions), in fp32; a kernel reads nothing if that is 1."""
    if not runs_kernels(gradient.device):
        gradient.copy_(gradient * factor if gradient.dtype == torch.float32 else gradient.float() * factor)
        return
    defines = (("LOGIT", c_type(gradient.dtype)), ("LABEL", "int64"), ("LANES", str(_WARP)))
    run = kernel(_NAME, "cross_entropy_rescale", (), gradient.device, defines)
    packs = gradient.numel() * gradient.element_size() // 16
    run(min(max(-(-packs // 256), 1), _MOST_BLOCKS), 256, gradient, factor, gradient.numel())


def _is_writable(layout: _RowStrides, rows: int, classes: int) -> bool:
    """Whether no two rows share memory."""
    dimensions = [(layout.inner_stride, layout.inner), (layout.outer_stride, rows // layout.inner)]
    extent = classes
    for stride, size in sorted(dimensions):
        if size <= 1:
            continue
        if stride < extent:
            return False
        extent = stride * size
    return True


def _lanes(logits: Tensor) -> int:
    """Returns the number of threads per row: each thread does about eight loads of 16 bytes."""
    packs = logits.shape[-1] * logits.element_size() // 16
    if packs <= 256:
        return _WARP
    return 128 if packs <= 1024 else 512


def _kernel(function: str, logits: Tensor, target: Tensor, lanes: int, *, softcap: float = 0.0) -> Kernel:
    defines: tuple[tuple[str, str], ...] = (
        ("LOGIT", c_type(logits.dtype)),
        ("LABEL", _LABELS[target.dtype]),
        ("LANES", str(lanes)),
    )
    if softcap:
        defines = (*defines, ("SOFTCAP", "1"))
    return kernel(_NAME, function, (), logits.device, defines)


def _grid(rows: int, lanes: int) -> tuple[int, int]:
    """Returns blocks and threads per block."""
    if lanes == _WARP:
        return -(-rows // _ROWS_IN_A_BLOCK), _ROWS_IN_A_BLOCK * _WARP
    return rows, lanes


def _factors(rule: CrossEntropyRule) -> tuple[float, float, float]:
    return float(rule.label_smoothing), float(rule.z_loss), float(rule.softcap)


def _statistics_size(rows: int, reduction: str) -> int:
    return 2 * rows + (1 if reduction == "mean" else 0)  # rows may be symbolic, and a symbolic int cannot add a bool


def cross_entropy_forward(logits: Tensor, target: Tensor, rule: CrossEntropyRule) -> tuple[Tensor, Tensor]:
    """Returns the loss and the fp32 statistics for backward.

    The statistics are two numbers per row: their sum is the row's logsumexp (both are 0 for an ignored row).  For a mean,
    1 / (number of rows that count) follows.
    """
    if not runs_kernels(logits.device):
        return _forward_by_torch(logits, target, rule)
    logits, layout = _in_rows(logits)
    target = target.contiguous()
    rows = target.numel()
    lanes = _lanes(logits)
    losses = torch.empty(target.shape, dtype=torch.float32, device=logits.device)
    statistics = torch.empty(_statistics_size(rows, rule.reduction), dtype=torch.float32, device=logits.device)
    run = _kernel("cross_entropy_forward", logits, target, lanes, softcap=rule.softcap)
    numbers = (rows, logits.shape[-1], *layout, rule.ignore_index)
    run(*_grid(rows, lanes), logits, target, losses, statistics, *numbers, *_factors(rule))
    if rule.reduction == "none":
        return losses, statistics
    loss = torch.empty((), dtype=torch.float32, device=logits.device)
    blocks = min(_MOST_SUMS, -(-rows // _ROWS_OF_A_SUM))
    sums = torch.empty(2 * blocks, dtype=torch.float64, device=logits.device)
    add = _kernel("cross_entropy_sums", logits, target, lanes)
    add(blocks, 512, losses, target, sums, rows, rule.ignore_index)
    total = _kernel("cross_entropy_total", logits, target, lanes)
    total(1, _MOST_SUMS, sums, loss, statistics, blocks, rows, int(rule.reduction == "mean"))
    return loss, statistics


def cross_entropy_backward(
    gradient: Tensor,
    logits: Tensor,
    target: Tensor,
    statistics: Tensor,
    rule: CrossEntropyRule,
    *,
    in_place: bool = False,
) -> Tensor:
    """Returns the gradient of the logits, in their dtype; ``statistics`` are those of :func:`cross_entropy_forward`.

    ``in_place`` overwrites the logits with their gradient, unless two rows share memory, and marks the logits as written.
    """
    if not runs_kernels(logits.device):
        return _backward_by_torch(gradient, logits, target, statistics, rule)
    logits, layout = _in_rows(logits)
    target = target.contiguous()
    rows = target.numel()
    classes = logits.shape[-1]
    lanes = _lanes(logits)
    gradient = gradient.reshape(-1).float()
    if in_place and _is_writable(layout, rows, classes):
        output = logits.detach()
        strides = layout[1:]
        increment_version(logits)
    else:
        output = torch.empty_like(logits, memory_format=torch.contiguous_format)
        strides = (layout.inner * classes, classes)
    run = _kernel("cross_entropy_backward", logits, target, lanes, softcap=rule.softcap)
    stride = gradient.stride(0) if rule.reduction == "none" else 0
    numbers = (stride, rows, classes, *layout, *strides, rule.ignore_index, int(rule.reduction == "mean"))
    pointers = (gradient, logits, target, statistics, output)
    run(*_grid(rows, lanes), *pointers, *numbers, *_factors(rule))
    return output


def cross_entropy_reference(
    logits: Tensor,
    target: Tensor,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    z_loss: float = 0.0,
    softcap: float = 0.0,
) -> Tensor:
    """Computes :func:`fused_cross_entropy` in torch's own operations: its backward can be differentiated again."""
    wide, labels, wrong = _rows(logits, target, ignore_index)
    wide = _capped(wide, softcap)
    check_classes(target, logits.shape[-1], ignore_index)
    classes = labels.masked_fill(wrong, 0)
    losses = F.cross_entropy(
        wide, classes, reduction="none", label_smoothing=label_smoothing, ignore_index=_NOT_A_CLASS
    )
    counts = labels != _NOT_A_CLASS
    if z_loss:
        losses = losses + z_loss * torch.where(counts, wide.logsumexp(-1).square(), 0)
    # NaN as a factor, so that the gradient is NaN too.
    losses = losses * torch.where(wrong, math.nan, torch.ones_like(losses))
    if reduction == "none":
        return losses.reshape(target.shape)
    return losses.sum() / counts.sum() if reduction == "mean" else losses.sum()


def _capped(wide: Tensor, softcap: float) -> Tensor:
    return softcap * (wide / softcap).tanh() if softcap else wide


def _rows(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the logits as fp32 or fp64 rows, the targets with -100 for ignored rows, and a mask of invalid targets."""
    wide = logits.reshape(-1, logits.shape[-1])
    if wide.dtype != torch.float64:
        wide = wide.float()
    labels = target.reshape(-1).long()
    counts = labels != ignore_index
    wrong = counts & ((labels < 0) | (labels >= logits.shape[-1]))
    return wide, labels.masked_fill(~counts, _NOT_A_CLASS), wrong


def check_classes(target: Tensor, classes: int, ignore_index: int) -> None:
    """Raises ConfigError if a target on a CPU names no class; on a GPU the check would make the host wait."""
    if target.device.type == "cpu" and type(target) is Tensor and not (recorded() or torch_alone()):
        _refuse(target, (target != ignore_index) & ((target < 0) | (target >= classes)), classes)


def _refuse(target: Tensor, wrong: Tensor, classes: int) -> None:
    if bool(wrong.any()):
        position = tuple(wrong.nonzero()[0].tolist())
        raise ConfigError(
            f"target{list(position) if position else ''} is {int(target[position])}, but there are {classes} classes: targets are "
            f"0 to {classes - 1}, or ignore_index for rows that do not count"
        )


def _forward_by_torch(logits: Tensor, target: Tensor, rule: CrossEntropyRule) -> tuple[Tensor, Tensor]:
    loss = cross_entropy_reference(logits, target, **rule._asdict())
    wide, labels, _ = _rows(logits, target, rule.ignore_index)
    sums = _capped(wide, rule.softcap).logsumexp(-1)
    counts = labels != _NOT_A_CLASS
    statistics = [torch.stack((sums, torch.zeros_like(sums)), 1).masked_fill_(~counts[:, None], 0).reshape(-1)]
    if rule.reduction == "mean":
        statistics.append(counts.sum().float().reciprocal().reshape(1))
    return loss, torch.cat(statistics).float()


def _backward_by_torch(
    gradient: Tensor, logits: Tensor, target: Tensor, statistics: Tensor, rule: CrossEntropyRule
) -> Tensor:
    wide, labels, wrong = _rows(logits, target, rule.ignore_index)
    wide = _capped(wide, rule.softcap)
    sums = statistics[: 2 * len(labels)].view(-1, 2).sum(1)
    factor = gradient.reshape(-1).to(wide.dtype) * (statistics[-1] if rule.reduction == "mean" else 1.0)
    factor = torch.where(wrong, math.nan, factor)
    # The product is not in place, because the gradient may be a batch while the logits are not.
    result = (wide - sums[:, None]).exp_() * (factor * (1 + 2 * rule.z_loss * sums))[:, None]
    result.sub_((factor * rule.label_smoothing / wide.shape[-1])[:, None])
    at_label = (factor * (rule.label_smoothing - 1))[:, None]
    result.scatter_add_(1, labels.clamp(0, wide.shape[-1] - 1)[:, None], at_label)
    if rule.softcap:
        result.mul_(1 - (wide / rule.softcap).square())
    result.masked_fill_(((labels == _NOT_A_CLASS) & ~wrong)[:, None], 0)
    return result.to(logits.dtype).reshape(logits.shape)


@torch.library.custom_op(
    "fabricamp::cross_entropy", mutates_args=(), schema=f"(Tensor logits, Tensor target, {_SCHEMA}) -> (Tensor, Tensor)"
)
def _forward_operation(logits: Tensor, target: Tensor, *rule: Any) -> tuple[Tensor, Tensor]:
    return cross_entropy_forward(logits, target, CrossEntropyRule(*rule))


@_forward_operation.register_fake
def _(logits: Tensor, target: Tensor, *rule: Any) -> tuple[Tensor, Tensor]:
    loss = target.new_empty(target.shape if rule[2] == "none" else (), dtype=torch.float32)
    return loss, logits.new_empty(_statistics_size(target.numel(), rule[2]), dtype=torch.float32)


@torch.library.custom_op(
    "fabricamp::cross_entropy_backward",
    mutates_args=(),
    schema=f"(Tensor gradient, Tensor logits, Tensor target, Tensor statistics, {_SCHEMA}) -> Tensor",
)
def _backward_operation(gradient: Tensor, logits: Tensor, target: Tensor, statistics: Tensor, *rule: Any) -> Tensor:
    return cross_entropy_backward(gradient, logits, target, statistics, CrossEntropyRule(*rule))


@_backward_operation.register_fake
def _(_gradient: Tensor, logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _keep(ctx: _OperationContext, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target, *rule = inputs
    ctx.save_for_backward(logits, target, output[1])
    ctx.rule = rule


def _gradients(ctx: _OperationContext, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    result = torch.ops.fabricamp.cross_entropy_backward(gradient, *ctx.saved_tensors, *ctx.rule)
    return result, *[None] * (1 + len(ctx.rule))


def _refuse_second_derivative(*_: Any) -> tuple[Tensor | None, ...]:
    raise ConfigError(
        "fused_cross_entropy has no second derivative (something differentiates its gradient: create_graph=True); use "
        "cross_entropy_reference or torch's F.cross_entropy in this loss"
    )


_forward_operation.register_autograd(_gradients, setup_context=_keep)
_backward_operation.register_autograd(_refuse_second_derivative)
