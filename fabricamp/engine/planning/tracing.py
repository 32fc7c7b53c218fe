"""Runs a step on tensors without memory, and records what a GPU's allocator would be asked for, in order.

The tensors are fake ones of the host: autograd keeps and frees them as it does a GPU's.  Where an operation keeps other tensors on
a GPU than on the host, :func:`as_on_a_gpu` puts the GPU's form in its place: what autocast widens, fused attention, masks of
dropout, RMSNorm, cuDNN's recurrent layers, and this package's kernels.
"""

from __future__ import annotations

import contextlib
import importlib
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from fabricamp._utils.containers import tensors_within
from fabricamp.precision.casting import cast_tensors
from fabricamp.torch_private import (
    TorchDispatchMode,
    fake_tensor_types,
    fused_attention,
    has_kernel,
    replaced_operations,
    storage_key,
    without_autocast_of_host,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

FakeTensorMode, FakeTensor, NEEDS_VALUES = fake_tensor_types()

_cross_entropy: Final = importlib.import_module("fabricamp.ops.cross_entropy")
_linear: Final = importlib.import_module("fabricamp.ops.linear_cross_entropy")
_HALF: Final = (torch.float16, torch.bfloat16)


class Event(NamedTuple):
    """A request for ``size`` bytes under a number, or with size 0 its end."""

    number: int
    size: int


class Recorder(TorchDispatchMode):
    """Records in ``events`` when storages that operations make begin and end; not those of ``known`` tensors."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.what: dict[int, str] = {}
        """By number: shape, dtype and operation of the tensor that began the storage."""
        self._numbers: dict[int, int] = {}
        self._ended = False
        self._silent = False
        self._known = known  # keeps their storages, and so these addresses
        for tensor in known:
            self._numbers[storage_key(tensor)] = -1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, and records the storages that it has made."""
        output = func(*args, **(kwargs or {}))
        if self._silent:
            return output
        name = func.__name__ if hasattr(func, "__name__") else str(func)
        if name.startswith("linear_cross_entropy."):
            self._pulse(args)
        for tensor in tensors_within(output):
            self._note(tensor, name)
        return output

    def note(self, tensors: Sequence[Tensor], name: str) -> list[int]:
        """Records storages of ``tensors`` as new ones; returns their numbers."""
        return [number for tensor in tensors if (number := self._note(tensor, name)) is not None]

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """A context in which operations are not recorded; :meth:`note` is."""
        before, self._silent = self._silent, True
        try:
            yield
        finally:
            self._silent = before

    def end(self) -> None:
        """Ends the recording: what is freed later counts as kept."""
        self._ended = True

    def _note(self, tensor: Tensor, name: str) -> int | None:
        address = storage_key(tensor)
        if address in self._numbers:
            return None
        storage = tensor.untyped_storage()
        number = len(self.what)
        self._numbers[address] = number
        self.what[number] = f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        self.events.append(Event(number, storage.nbytes()))
        weakref.finalize(storage, self._free, address, number).atexit = False
        return number

    def _free(self, address: int, number: int) -> None:
        if self._numbers.get(address) == number:
            del self._numbers[address]
        if not self._ended:
            self.events.append(Event(number, 0))

    def _pulse(self, args: Sequence[Any]) -> None:
        """Records the logits of one chunk, and their fp32 form, which the operation makes and frees itself."""
        hidden, weight = args[:2]
        rows = -(-hidden.shape[0] // 8)
        number = len(self.what)
        self.what[number] = f"a chunk of logits ({rows}, {weight.shape[0]})"
        self.events += [Event(number, rows * weight.shape[0] * weight.element_size()), Event(number, 0)]


# -- operations in a GPU's form ------------------------------------------------------------------------------------------------

_WIDE: Final = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh", "tan",
    "softplus", "layer_norm", "native_layer_norm", "group_norm", "cosine_similarity", "poisson_nll_loss",
    "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss",
    "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss",
    "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp", "rms_norm",
    "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "norm.Scalar", "norm.ScalarOpt_dim", "norm.names_ScalarOpt_dim",
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "sum", "sum.dim_IntList",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d",
    "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_nearest_exact2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
)  # fmt: skip
"""What autocast on a GPU computes in fp32."""


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,  # noqa: ARG001 - torch's signature
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: ARG001
) -> Tensor:
    """Fused attention, which keeps its inputs, its output and one number a row: the host's has the same form as a GPU's."""
    if attn_mask is not None and attn_mask.requires_grad:  # a learned bias
        result: Tensor = _BiasedAttention.apply(query, key, value, attn_mask)  # type: ignore[no-untyped-call]
        return result
    return fused_attention(query, key, value, is_causal=is_causal, mask=attn_mask, scale=scale)


class _BiasedAttention(torch.autograd.Function):
    """Fused attention with a bias that has a gradient."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        batch, heads, rows, _ = query.shape
        output = query.new_empty((batch, rows, heads, value.shape[-1])).transpose(1, 2)
        ctx.save_for_backward(
            query, key, value, bias, output, query.new_empty((batch, heads, rows), dtype=torch.float32)
        )
        return output

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        query, key, value, bias, *_rest = ctx.saved_tensors
        whole = bias.new_empty((*query.shape[:2], query.shape[2], key.shape[2]))
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), whole.sum_to_size(bias.shape)


class _RMSNorm(torch.autograd.Function):
    """The fused norm: keeps its input, its weight and one number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[: x.dim() - dims], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _rows = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    # A compiler fuses the parts itself; torch's fused norm takes one dtype.
    if _programs.traced or (weight is not None and weight.dtype != x.dtype):
        wide = x.float()
        dims = tuple(range(x.dim() - len(shape), x.dim()))
        scaled = wide * torch.rsqrt(wide.pow(2).mean(dims, keepdim=True) + (eps or 1e-6))
        return (scaled if weight is None else scaled * weight).to(x.dtype)
    result: Tensor = _RMSNorm.apply(x, weight, len(shape))  # type: ignore[no-untyped-call]
    return result


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    return x if not train or p == 0 else torch.native_dropout(x, p, train)[0]


class _Recurrent(torch.autograd.Function):
    """cuDNN's recurrent layers: keep inputs, outputs, weights, and a reserve with the gates of all layers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, hidden: int, layers: int, directions: int, gates: int, *weights: Tensor) -> Tensor:
        rows = x.shape[0] * x.shape[1]
        reserve = x.new_empty(layers * directions * rows * hidden * (gates + 2))
        output = x.new_empty((*x.shape[:2], hidden * directions))
        ctx.save_for_backward(x, output, reserve, *weights)
        return output

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, _output, _reserve, *weights = ctx.saved_tensors
        return torch.empty_like(x), None, None, None, None, *map(torch.empty_like, weights)


def _recurrent(gates: int) -> Callable[..., Any]:
    """Returns what stands for torch's layers with this many gates; only for batches that are not packed."""

    def run(x: Tensor, state: Any, weights: Sequence[Tensor], *options: Any) -> Any:
        _, layers, _, _, bidirectional, _ = options
        first = state[0] if isinstance(state, (list, tuple)) else state
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            x, weights = x.to(dtype), [one.to(dtype) for one in weights]
        output = _Recurrent.apply(x, first.shape[-1], layers, 1 + bidirectional, gates, *weights)  # type: ignore[no-untyped-call]
        return (output, *(x.new_empty(first.shape) for _ in range(2 if gates == 4 else 1)))

    return run


class _Programs:
    """Whether the program of a compiled block is traced or runs: there operations keep the form that a compiler sees."""

    traced = False

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """A context around a program's trace."""
        before, self.traced = self.traced, True
        try:
            yield
        finally:
            self.traced = before


_programs: Final = _Programs()
tracing_program: Final = _programs.tracing


def _in_fp32(operation: Any) -> Callable[..., Any]:
    """Returns the operation with its floating operands in fp32, as autocast on a GPU computes it."""

    def widened(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype in _HALF else tensor

    def run(*args: Any, **kwargs: Any) -> Any:
        with without_autocast_of_host():
            return operation(*cast_tensors(args, widened, None), **cast_tensors(kwargs, widened, None))

    return run


def _logits_forward(logits: Tensor, target: Tensor, rule: Any) -> tuple[Tensor, Tensor]:
    statistics = logits.new_empty(2 * target.numel() + 1, dtype=torch.float32)
    return target.new_empty(target.shape if rule.reduction == "none" else (), dtype=torch.float32), statistics


def _logits_backward(
    gradient: Tensor,  # noqa: ARG001 - as the function that it stands for
    logits: Tensor,
    target: Tensor,  # noqa: ARG001
    statistics: Tensor,  # noqa: ARG001
    rule: Any,  # noqa: ARG001
    *,
    in_place: bool = False,
) -> Tensor:
    return logits.detach() if in_place else torch.empty_like(logits)


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """A context in which operations on the host's fake tensors keep and make what they would on a GPU."""
    autograd = {
        "scaled_dot_product_attention": _attention,
        "rms_norm": _rms_norm,
        "dropout": _dropout,
        "lstm.input": _recurrent(4),
        "gru.input": _recurrent(3),
        "rnn_tanh.input": _recurrent(1),
        "rnn_relu.input": _recurrent(1),
    }
    changed: list[tuple[Any, str, Any]] = [
        (_cross_entropy, "Tensor", FakeTensor),
        (_cross_entropy, "recorded", lambda: False),
        (_cross_entropy, "chosen", lambda *_: True),
        (_cross_entropy, "cross_entropy_forward", _logits_forward),
        (_cross_entropy, "cross_entropy_backward", _logits_backward),
        (_linear, "_PLAIN", (*_linear._PLAIN, FakeTensor)),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changed]
    with replaced_operations() as library:
        for name, function in autograd.items():
            library.impl(name, function, "AutogradCPU")
        for name in _WIDE:
            packet, _, overload = name.partition(".")
            operation = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            if operation is None:  # of another version of torch
                continue
            if has_kernel(operation.name(), "AutocastCUDA") and not has_kernel(operation.name(), "AutocastCPU"):
                library.impl(name, _in_fp32(operation), "AutocastCPU")
        for owner, name, value in changed:
            setattr(owner, name, value)
        try:
            yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)
