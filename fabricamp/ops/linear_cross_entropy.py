"""Cross-entropy of a linear layer's outputs that are never stored: rows are done in at most eight chunks, each with its products.

Where the loss is one number in fp32 or bf16, the forward makes the gradients, for an upstream gradient of 1, while a chunk's
logits are there; backward multiplies them by the one that came.  That takes the products of the stored way.  In fp16 most of
these gradients would be zeros: the loss scale comes with the upstream gradient.  So in fp16, and where each row has an
upstream gradient, backward computes the logits again, one product more, and the gradients with the scale in them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from operator import index
from typing import Any, Final, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from fabricamp.arguments.checks import check_choice
from fabricamp.errors import ConfigError
from fabricamp.ops.bridge import runs_kernels
from fabricamp.ops.context import Context
from fabricamp.ops.cross_entropy import (
    LOGITS,
    TOO_WIDE,
    CrossEntropyRule,
    check_classes,
    check_labels,
    check_rule,
    cross_entropy_backward,
    cross_entropy_forward,
    cross_entropy_reference,
    cross_entropy_rescale,
)
from fabricamp.ops.dispatch import is_batch, recorded, torch_alone
from fabricamp.ops.shards import is_shard
from fabricamp.ops.tensors import HALF_DTYPES

_ACCUMULATE: Final = ("weight", "fp32")
_MOST_CHUNKS: Final = 8  # each reads and writes the gradient of the weight
_LOGITS_OF_A_CHUNK: Final = 256 * 2**20  # bytes from which on there is one more chunk
_ROWS: Final = 128  # a chunk's rows are a multiple: products of other sizes are slower
_FIRST_PIECE: Final = 2**20
_PLAIN: Final = frozenset({Tensor, torch.nn.Parameter})
_RULE: Final = "float label_smoothing, int ignore_index, str reduction, float z_loss, float softcap"
_OPERANDS: Final = "Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? factors"
_SCHEMA: Final = f"{_RULE}, ScalarType dtype, ScalarType sums, bool[] wanted"


class _Way(NamedTuple):
    """How a loss is computed."""

    rule: CrossEntropyRule
    dtype: torch.dtype
    """Of operands and logits."""
    sums: torch.dtype
    """In which the weight's gradients of the chunks are added."""
    wanted: tuple[bool, bool, bool]
    """Whether hidden states, weight and bias need gradients."""

    @property
    def early(self) -> bool:
        """Whether the forward makes the gradients."""
        return any(self.wanted) and self.rule.reduction != "none" and self.dtype != torch.float16

    def flat(self) -> tuple[Any, ...]:
        """Returns the values as a registered operation takes them."""
        return (*self.rule, self.dtype, self.sums, list(self.wanted))

    @staticmethod
    def of(values: Any) -> _Way:
        """Returns the way of :meth:`flat`."""
        *rule, dtype, sums, wanted = values
        return _Way(CrossEntropyRule(*rule), dtype, sums, tuple(wanted))


class _Operands(NamedTuple):
    """Hidden states in rows, the head, and for each row a target and what its loss is multiplied by (fp32, 0 if it is ignored)."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    factors: Tensor | None
    """None: without class weights."""


def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    z_loss: float = 0.0,
    softcap: float = 0.0,
    class_weight: Tensor | None = None,
    accumulate: str = "weight",
) -> Tensor:
    """Returns the fp32 cross-entropy of the logits ``hidden @ weight.T + bias``, of which one chunk of rows is in memory at a time.

    ``hidden`` has any leading shape, ``target`` (int64 or int32) has the same, ``weight`` is ``(classes, width)`` and ``bias``
    ``(classes,)``; the options are those of :func:`fused_cross_entropy`.  Products are in the weight's dtype, or autocast's:
    hidden states of fp32 meet a half weight.  What a row with ``ignore_index`` holds, nan too, goes nowhere.  The gradient of a
    half weight is added up over the chunks in its dtype, or with ``accumulate="fp32"`` in fp32, which takes its bytes twice.
    ``class_weight``, one number a class, multiplies the loss of a row by that of its target, and ``"mean"`` divides by the sum of
    these, as torch's ``weight`` does; it has no gradient.
    fp64, and what :func:`fused_cross_entropy` leaves to torch, such as ``torch.func``, stores the logits.

    A head that ``fsdp`` gathers by itself has to be called: :class:`fabricamp.nn.FusedLinearCrossEntropy`.  Raises ConfigError
    for sharded weights, as of a vocabulary-parallel head, for operands whose dtypes, shapes or devices do not fit, for
    ``class_weight`` with ``label_smoothing``, and on a CPU for a target that names no class (on a GPU the loss is NaN).

    >>> hidden, weight = torch.zeros(2, 3, requires_grad=True), torch.zeros(4, 3)
    >>> fused_linear_cross_entropy(hidden, weight, torch.tensor([1, -100]))
    tensor(1.3863, grad_fn=...)
    """
    rule = CrossEntropyRule(label_smoothing, ignore_index, reduction, z_loss, softcap)
    check_rule(rule)
    check_accumulate(accumulate)
    _check(hidden, weight, target, bias)
    check_class_weight(class_weight, label_smoothing, index(weight.shape[0]), target.device)
    dtype = _dtype_of_products(hidden, weight)
    classes = index(weight.shape[0])  # a constant for torch.compile
    plain = all(one is None or type(one) in _PLAIN for one in (hidden, weight, target, bias, class_weight))
    if dtype not in LOGITS or classes >= TOO_WIDE or torch_alone() or not (plain or torch.compiler.is_compiling()):
        return linear_cross_entropy_reference(hidden, weight, target, bias, class_weight=class_weight, **rule._asdict())
    if not recorded() and not runs_kernels(target.device):  # a compiler cannot trace what asks for installed packages
        check_classes(target, classes, ignore_index)
    enabled = torch.is_grad_enabled()
    wanted = (
        enabled and hidden.requires_grad,
        enabled and weight.requires_grad,
        enabled and bias is not None and bias.requires_grad,
    )
    sums = torch.float32 if accumulate == "fp32" else weight.dtype
    way = _Way(rule, dtype, sums, wanted)
    rows = target.reshape(-1)
    factors = None if class_weight is None else _factors(class_weight.float(), rows, ignore_index)
    operands = _Operands(hidden.reshape(-1, hidden.shape[-1]), weight, bias, rows, factors)
    if recorded():
        loss = torch.ops.fabricamp.linear_cross_entropy(*operands, *way.flat())[0]
    else:
        loss = _LinearCrossEntropy.apply(*operands, way)  # type: ignore[no-untyped-call]
    return cast("Tensor", loss.reshape(target.shape) if reduction == "none" else loss)


def check_accumulate(accumulate: str) -> None:
    """Raises ConfigError if ``accumulate`` is not known."""
    check_choice("accumulate", accumulate, _ACCUMULATE)


def check_class_weight(
    class_weight: Tensor | None, label_smoothing: float, classes: int, device: torch.device | None = None
) -> None:
    """Raises ConfigError if ``class_weight`` is not a number for each class, or cannot be taken with the other options."""
    if class_weight is None:
        return
    if class_weight.shape != (classes,) or not class_weight.dtype.is_floating_point or class_weight.requires_grad:
        given = (
            "one that requires grad"
            if class_weight.requires_grad
            else f"{class_weight.dtype} of shape {tuple(class_weight.shape)}"
        )
        raise ConfigError(
            f"class_weight is {given}; give a floating tensor of shape ({classes},) without a gradient, a number a class"
        )
    if label_smoothing:
        raise ConfigError(
            f"class_weight with label_smoothing={label_smoothing} is not offered: torch weights the smoothed part by every class; "
            "leave one of them out, or store the logits, with torch's F.cross_entropy(logits, target, weight, label_smoothing=...)"
        )
    if device is not None and class_weight.device != device:
        raise ConfigError(f"class_weight is on {class_weight.device} and targets on {device}: move one of them")


def _factors(class_weight: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Returns the weight of each target's class; 0 for a row that does not count, and any for a target that names no class."""
    places = target.clamp(0, class_weight.shape[0] - 1).long()  # on a GPU another index would end the process
    return class_weight[places].masked_fill(target == ignore_index, 0)


def linear_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    **rule: Any,
) -> Tensor:
    """Computes :func:`fused_linear_cross_entropy` in torch's own operations, with all logits: it has a second derivative."""
    ignore_index = rule.get("ignore_index", CrossEntropyRule().ignore_index)
    factors = None
    if class_weight is not None:
        wide = class_weight.double() if torch.float64 in {hidden.dtype, weight.dtype} else class_weight.float()
        factors = _factors(wide, target, ignore_index)
    return _reference(hidden, weight, target, bias, factors, **rule)


def _reference(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, factors: Tensor | None, **rule: Any
) -> Tensor:
    ignored = target == rule.get("ignore_index", CrossEntropyRule().ignore_index)
    rows = hidden.masked_fill(ignored[..., None], 0).to(_dtype_of_products(hidden, weight))
    logits = F.linear(rows, weight, bias)
    if factors is None:
        return cross_entropy_reference(logits, target, **rule)
    reduction = rule.pop("reduction", CrossEntropyRule().reduction)
    losses = cross_entropy_reference(logits, target, reduction="none", **rule) * factors
    if reduction == "none":
        return losses
    return losses.sum() / factors.sum() if reduction == "mean" else losses.sum()


def _dtype_of_products(hidden: Tensor, weight: Tensor) -> torch.dtype:
    if torch.float64 not in {hidden.dtype, weight.dtype} and _is_under_autocast(hidden):
        return torch.get_autocast_dtype(hidden.device.type)
    return weight.dtype


def _is_under_autocast(hidden: Tensor) -> bool:
    kind = hidden.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def _as_given(one: Tensor) -> AbstractContextManager[Any]:
    """Returns a context in which autocast changes no operand: they have the dtype of the products, also in backward."""
    kind = one.device.type
    return contextlib.nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)


def _check(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
    for name, one in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if one is None:
            continue
        check_whole(name, one)
        if not one.dtype.is_floating_point:
            raise ConfigError(
                f"{name} of {one.dtype}: give a floating dtype (hidden and weight come first, then targets)"
            )
        if one.device != target.device:
            raise ConfigError(f"{name} is on {one.device} and targets on {target.device}: move one of them")
    check_labels(target)
    if weight.dim() != 2 or weight.shape[0] == 0 or hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1]:
        raise ConfigError(
            f"hidden of shape {tuple(hidden.shape)} and weight of shape {tuple(weight.shape)}: the weight is (classes, width), as "
            "nn.Linear's, and the width is the last dimension of hidden"
        )
    if hidden.shape[:-1] != target.shape:
        raise ConfigError(
            f"hidden of shape {tuple(hidden.shape)} and targets of shape {tuple(target.shape)}: the targets' shape is that of "
            "hidden without the last dimension"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ConfigError(f"bias of shape {tuple(bias.shape)}: the weight has {weight.shape[0]} classes")
    if _is_under_autocast(hidden):
        return
    meets_half = hidden.dtype == torch.float32 and weight.dtype in HALF_DTYPES
    if hidden.dtype != weight.dtype and not meets_half:
        raise ConfigError(
            f"hidden of {hidden.dtype} and weight of {weight.dtype}: give both in one dtype, or hidden in fp32 and a half weight"
        )
    if bias is not None and bias.dtype != weight.dtype:
        raise ConfigError(f"bias of {bias.dtype} and weight of {weight.dtype}: give both in one dtype")


def check_whole(name: str, tensor: Any) -> None:
    """Raises ConfigError if ``tensor`` is sharded over ranks."""
    if is_shard(tensor):
        raise ConfigError(
            f"fused_linear_cross_entropy: {name} is sharded over ranks ({', '.join(map(str, tensor.placements))}). Under fsdp call "
            "the head, which gathers its weight: head = FusedLinearCrossEntropy.of(head), then head(hidden, target). A "
            "vocabulary-parallel head is not offered: leave it out of the plan of tensor parallelism, or store its logits, with "
            "torch's loss_parallel"
        )


class _Gradients:
    """The gradients of hidden states, weight and bias, or None for what needs none; filled chunk by chunk."""

    def __init__(self, operands: _Operands, way: _Way) -> None:
        hidden, weight, bias, *_ = operands
        self.hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if way.wanted[0] else None
        self.weight = weight.new_empty(weight.shape, dtype=way.sums) if way.wanted[1] else None
        self.bias = bias.new_zeros(bias.shape, dtype=torch.float32) if way.wanted[2] and bias is not None else None

    def add(self, chunk: _Chunk, logits: Tensor, weight: Tensor) -> None:
        """Adds what follows from the gradient of a chunk's ``logits``."""
        if self.hidden is not None:
            to = self.hidden[chunk.place]
            if to.dtype == logits.dtype:
                torch.mm(logits, weight, out=to)
            else:
                to.copy_(logits @ weight)
        if self.weight is not None:
            beta = 0 if chunk.place.start == 0 else 1
            _add_product(self.weight, logits.t(), chunk.hidden, beta)
        if self.bias is not None:
            self.bias.add_(logits.sum(0, dtype=torch.float32))

    def times(self, factor: Tensor) -> None:
        """Multiplies all by ``factor``, an fp32 number on the device."""
        for one in (self.hidden, self.weight, self.bias):
            if one is not None:
                cross_entropy_rescale(one, factor)

    def of(self, operands: _Operands) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Returns them in the dtypes of the operands; they are no longer here."""
        hidden, weight, bias = self.hidden, self.weight, self.bias
        self.hidden = self.weight = self.bias = None
        if weight is not None:
            weight = _narrowed(weight, operands.weight.dtype)
        if bias is not None:
            bias = bias.to(cast("Tensor", operands.bias).dtype)
        return hidden, weight, bias


def _add_product(to: Tensor, left: Tensor, right: Tensor, beta: int) -> None:
    if to.dtype == left.dtype:
        to.addmm_(left, right, beta=beta)
    elif to.device.type == "cuda":
        torch.ops.aten.addmm.dtype_out(to, left, right, to.dtype, beta=beta, out=to)
    else:
        to.addmm_(left.to(to.dtype), right.to(to.dtype), beta=beta)


def _narrowed(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns ``wide`` in ``dtype``, in the same memory: a copy would be a third of the peak more.

    What is read last is written over first, so pieces double: each ends before the bytes of the next one begin.
    """
    if wide.dtype == dtype:
        return wide
    narrow = wide.new_empty(0, dtype=dtype)
    narrow.set_(wide.untyped_storage(), 0, wide.shape, wide.stride())
    source, to = wide.view(-1), narrow.view(-1)
    end = min(_FIRST_PIECE, source.numel())
    to[:end] = source[:end].clone()
    while end < source.numel():
        start, end = end, min(2 * end, source.numel())
        to[start:end] = source[start:end]
    return narrow


class _Chunk(NamedTuple):
    """Some of the rows; those that do not count are zeros in ``hidden``, which is in the dtype of the products."""

    place: slice
    hidden: Tensor
    target: Tensor

    def logits(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the logits of the chunk."""
        return F.linear(self.hidden, weight, bias)


def _chunks(operands: _Operands, way: _Way) -> Iterator[_Chunk]:
    rows = len(operands.target)
    memory = rows * len(operands.weight) * way.dtype.itemsize
    number = min(_MOST_CHUNKS, max(-(-memory // _LOGITS_OF_A_CHUNK), 1))
    size = max(-(-rows // number), 1)
    if number > 1:
        size = -(-size // _ROWS) * _ROWS
    for start in range(0, max(rows, 1), size):
        place = slice(start, start + size)
        target = operands.target[place]
        ignored = (target == way.rule.ignore_index)[:, None]
        yield _Chunk(place, operands.hidden[place].to(way.dtype).masked_fill(ignored, 0), target)


def linear_cross_entropy_forward(operands: _Operands, way: _Way) -> tuple[Tensor, Tensor, _Gradients | None]:
    """Returns the loss, the fp32 statistics for backward, and the gradients at an upstream gradient of 1 if the way is early.

    The statistics are two numbers per row, as those of a loss with stored logits, and the number of rows that count, or the sum of
    their factors.
    """
    weight, bias = _in_dtype(operands, way)
    target, factors = operands.target, operands.factors
    each = way.rule._replace(reduction="none")
    count = (target != way.rule.ignore_index if factors is None else factors).sum(dtype=torch.float32)
    gradients = _Gradients(operands, way) if way.early else None
    upstream = _upstream(torch.ones_like(count), count, operands, way)
    losses, statistics = [], []
    for chunk in _chunks(operands, way):
        logits = chunk.logits(weight, bias)
        some, numbers = cross_entropy_forward(logits, chunk.target, each)
        losses.append(some)
        statistics.append(numbers)
        if gradients is not None:
            made = upstream[chunk.place]
            logits = cross_entropy_backward(made, logits, chunk.target, numbers, each, in_place=True)
            gradients.add(chunk, logits, weight)
        del logits  # before the next chunk's
    loss = torch.cat(losses)
    if factors is not None:
        loss = loss * factors
    if way.rule.reduction != "none":
        total = loss.sum(dtype=torch.float64)
        loss = (total / count if way.rule.reduction == "mean" else total).float()
    return loss, torch.cat([*statistics, count.reshape(1)]), gradients


def linear_cross_entropy_backward(gradient: Tensor, operands: _Operands, statistics: Tensor, way: _Way) -> _Gradients:
    """Returns the gradients; computes the logits again."""
    weight, bias = _in_dtype(operands, way)
    each = way.rule._replace(reduction="none")
    gradients = _Gradients(operands, way)
    upstream = _upstream(gradient.float(), statistics[-1], operands, way)
    of_rows = statistics[:-1].view(-1, 2)
    for chunk in _chunks(operands, way):
        logits = chunk.logits(weight, bias)
        made, numbers = upstream[chunk.place], of_rows[chunk.place].reshape(-1)
        logits = cross_entropy_backward(made, logits, chunk.target, numbers, each, in_place=True)
        gradients.add(chunk, logits, weight)
        del logits
    return gradients


def _in_dtype(operands: _Operands, way: _Way) -> tuple[Tensor, Tensor | None]:
    """Returns weight and bias in the dtype of the products."""
    bias = operands.bias
    return operands.weight.to(way.dtype), None if bias is None else bias.to(way.dtype)


def _upstream(gradient: Tensor, count: Tensor, operands: _Operands, way: _Way) -> Tensor:
    """Returns the upstream gradient of each row's loss, as it is without class weights."""
    if way.rule.reduction == "mean":
        gradient = gradient / count
    rows = gradient.expand(operands.target.shape)
    return rows if operands.factors is None else rows * operands.factors


class _Saved(Context, Protocol):
    @property
    def saved_tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Tensor]: ...


class _EagerContext(_Saved, Protocol):
    way: _Way
    made: _Gradients | None


class _OperationContext(Context, Protocol):
    way: list[Any]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...


class _LinearCrossEntropy(torch.autograd.Function):
    """Runs in eager mode.

    The gradients of the forward serve one backward, which hands their memory on; a further one (``retain_graph=True``) makes its
    own.
    """

    @staticmethod
    def forward(
        ctx: _EagerContext,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        factors: Tensor | None,
        way: _Way,
    ) -> Tensor:
        operands = _Operands(hidden, weight, bias, target, factors)
        with _as_given(hidden):
            loss, statistics, made = linear_cross_entropy_forward(operands, way)
        ctx.save_for_backward(*operands, statistics)
        ctx.way = way
        ctx.made = made
        return loss

    @staticmethod
    def backward(ctx: _EagerContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        hidden, weight, bias, target, factors, statistics = ctx.saved_tensors
        operands = _Operands(hidden, weight, bias, target, factors)
        if torch.is_grad_enabled():  # create_graph: the operation refuses a second derivative in its backward
            made = torch.ops.fabricamp.linear_cross_entropy_backward(gradient, *operands, statistics, *ctx.way.flat())
            return *_present(made, ctx.way), None, None, None
        if is_batch(gradient):
            return *_of_a_batch(gradient, operands, ctx.way), None, None, None
        early, ctx.made = ctx.made, None
        with _as_given(gradient):
            if early is None:
                early = linear_cross_entropy_backward(gradient, operands, statistics, ctx.way)
            else:
                early.times(_factor(gradient, statistics))
            return *early.of(operands), None, None, None


def _factor(gradient: Tensor, statistics: Tensor) -> Tensor:
    """Returns what gradients of the forward are multiplied by: 0 if no row counts, whatever the upstream gradient is."""
    return torch.where(statistics[-1] != 0, gradient.float(), 0.0)


def _present(gradients: tuple[Tensor, ...], way: _Way) -> tuple[Tensor | None, ...]:
    """Returns an operation's gradients with None for those that nothing needs."""
    return tuple(one if wanted else None for one, wanted in zip(gradients, way.wanted, strict=True))


def _of_a_batch(gradient: Tensor, operands: _Operands, way: _Way) -> tuple[Tensor | None, ...]:
    """Returns the gradients for a batch of upstream gradients, with all logits."""
    needed = [one for one, wanted in zip(operands[:3], way.wanted, strict=True) if wanted and one is not None]
    with torch.enable_grad(), _as_given(gradient):
        weight, bias = _in_dtype(operands, way)
        hidden = operands.hidden.to(way.dtype)
        loss = _reference(hidden, weight, operands.target, bias, operands.factors, **way.rule._asdict())
    found = iter(torch.autograd.grad(loss, needed, gradient))
    return tuple(next(found) if wanted else None for wanted in way.wanted)


@torch.library.custom_op(
    "fabricamp::linear_cross_entropy",
    mutates_args=(),
    schema=f"({_OPERANDS}, {_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _forward_operation(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, factors: Tensor | None, *values: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    operands = _Operands(hidden, weight, bias, target, factors)
    with _as_given(hidden):
        loss, statistics, made = linear_cross_entropy_forward(operands, _Way.of(values))
        found = (None, None, None) if made is None else made.of(operands)
    return loss, statistics, *_filled(found, hidden)


def _filled(gradients: tuple[Tensor | None, ...], like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns gradients with an empty tensor for None: an operation returns tensors."""
    hidden, weight, bias = (like.new_empty(0) if one is None else one for one in gradients)
    return hidden, weight, bias


@_forward_operation.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, _factors: Tensor | None, *values: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    way = _Way.of(values)
    loss = target.new_empty(target.shape if way.rule.reduction == "none" else (), dtype=torch.float32)
    statistics = target.new_empty(2 * target.shape[0] + 1, dtype=torch.float32)
    wanted = way.wanted if way.early else (False, False, False)
    return loss, statistics, *_like(wanted, hidden, weight, bias)


def _like(wanted: Any, *operands: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    made = [
        torch.empty_like(one, memory_format=torch.contiguous_format) if needed and one is not None else None
        for needed, one in zip(wanted, operands, strict=True)
    ]
    return _filled(tuple(made), cast("Tensor", operands[0]))


@torch.library.custom_op(
    "fabricamp::linear_cross_entropy_backward",
    mutates_args=(),
    schema=f"(Tensor gradient, {_OPERANDS}, Tensor statistics, {_SCHEMA}) -> (Tensor, Tensor, Tensor)",
)
def _backward_operation(
    gradient: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    factors: Tensor | None,
    statistics: Tensor,
    *values: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    operands = _Operands(hidden, weight, bias, target, factors)
    with _as_given(hidden):
        made = linear_cross_entropy_backward(gradient, operands, statistics, _Way.of(values)).of(operands)
    return _filled(made, hidden)


@_backward_operation.register_fake
def _(
    _gradient: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    _target: Tensor,
    _factors: Tensor | None,
    _statistics: Tensor,
    *values: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(_Way.of(values).wanted, hidden, weight, bias)


def _keep(ctx: _OperationContext, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    operands, values = inputs[:5], inputs[5:]
    _, statistics, *made = output
    ctx.save_for_backward(*operands, statistics, *made)
    ctx.way = list(values)


def _gradients(ctx: _OperationContext, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    way = _Way.of(ctx.way)
    operands, (statistics, *made) = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
    found: Any
    if way.early:
        factor = _factor(gradient, statistics)
        found = tuple((one.float() * factor).to(one.dtype) for one in made)
    else:
        found = torch.ops.fabricamp.linear_cross_entropy_backward(gradient, *operands, statistics, *way.flat())
    return *_present(found, way), *[None] * (2 + len(ctx.way))


def _refuse_second_derivative(*_: Any) -> tuple[Tensor | None, ...]:
    raise ConfigError(
        "fused_linear_cross_entropy has no second derivative (something differentiates its gradient: create_graph=True); use "
        "linear_cross_entropy_reference, or torch's F.linear and F.cross_entropy, in this loss"
    )


_forward_operation.register_autograd(_gradients, setup_context=_keep)
_backward_operation.register_autograd(_refuse_second_derivative)
