"""What compiled blocks keep for backward and write to memory: torch's own partition of a block, run without values.

The block is traced and divided as ``torch.compile`` divides it; no kernel is made.  Of the operations that a compiler fuses only
those count whose result is read by something that is not fused, or leaves the graph.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from fabricamp._utils.containers import tensors_within
from fabricamp.engine.planning.tracing import tracing_program
from fabricamp.precision.casting import cast_tensors
from fabricamp.torch_private import compiled_in_two_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fabricamp.engine.planning.tracing import Recorder

_PRODUCTS: Final = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "attention",
    "cross_entropy",
    "norm_forward",
    "norm_backward",
    "embedding",
)
"""Parts of the names of operations that a compiler calls as they are."""


class CompiledBlocks:
    """Runs blocks of one class by one traced program, as ``Trainer(compile="blocks")`` does."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._programs: dict[object, Callable[..., Any] | None] = {}
        self._first: dict[type, nn.Module] = {}
        self.uncompiled: set[str] = set()
        """Names of classes whose calls could not be traced, which run eagerly."""

    def put_on(self, blocks: Sequence[nn.Module]) -> None:
        """Makes the calls of ``blocks`` run their programs."""
        for block in blocks:
            self._first.setdefault(type(block), block)
            vars(block)["_compiled_call_impl"] = _Call(self, block)

    def run(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        """Runs the program of the block's class with the block's own tensors; eagerly if that could not be traced."""
        given = list(tensors_within((args, kwargs)))
        own = {**dict(block.named_parameters()), **dict(block.named_buffers())}
        key = (type(block), tuple((one.shape, one.dtype, one.requires_grad) for one in (*given, *own.values())))
        if key not in self._programs:
            self._programs[key] = compiled_in_two_parts(self._call(type(block), args, kwargs), self._executed)
        program = self._programs[key]
        if program is not None:
            try:
                with tracing_program(), self._recorder.silent():
                    return program(own, given)
            except (RuntimeError, AssertionError, TypeError, ValueError, AttributeError, NotImplementedError):
                self._programs[key] = None
                self.uncompiled.add(type(block).__name__)
        return _uncompiled(block, args, kwargs)

    def _call(self, kind: type, args: Any, kwargs: Any) -> Callable[..., Any]:
        """Returns a function of a block's own tensors and those among its arguments; all other arguments are constants."""
        first = self._first[kind]

        def call(own: dict[str, Tensor], given: list[Tensor]) -> Any:
            # Copies of the others: a cache of keys would keep what belongs to the trace.
            places = list(tensors_within((args, kwargs)))
            copied = copy.deepcopy((args, kwargs), {id(one): one for one in places})
            tensors = iter(given)
            new_args, new_kwargs = cast_tensors(copied, lambda _: next(tensors), None)
            held = vars(first).pop("_compiled_call_impl")
            try:
                return functional_call(first, own, new_args, new_kwargs)
            finally:
                vars(first)["_compiled_call_impl"] = held

        return call

    def _executed(self, graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        recorder = self._recorder

        def run(arguments: list[Any]) -> Any:
            inputs = list(arguments)
            arguments.clear()
            with recorder.silent():
                return _Fused(graph, recorder).run(*inputs)

        return run


class _Call:
    """A module's call, by the program of its class."""

    def __init__(self, blocks: CompiledBlocks, module: nn.Module) -> None:
        self._blocks = blocks
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._blocks.run(self._module, args, kwargs)


def _uncompiled(block: nn.Module, args: Any, kwargs: Any) -> Any:
    held = vars(block).pop("_compiled_call_impl")
    try:
        return block(*args, **kwargs)
    finally:
        vars(block)["_compiled_call_impl"] = held


class _Fused(fx.Interpreter):
    """Runs a graph, and records those results that fused kernels write to memory."""

    def __init__(self, graph: fx.GraphModule, recorder: Recorder) -> None:
        super().__init__(graph)
        self._recorder = recorder
        self._written = {node for node in graph.graph.nodes if _is_written(node)}

    def run_node(self, n: fx.Node) -> Any:
        """Runs an operation, and records its result if it is written."""
        result = super().run_node(n)
        if n in self._written:
            self._recorder.note(list(tensors_within(result)), f"compiled {n.target}")
        return result


def _is_written(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if _is_called(node):
        return True
    return any(
        user.op == "output" or _is_called(user) or (_is_view(user) and _is_written_view(user)) for user in node.users
    )


def _is_written_view(node: fx.Node) -> bool:
    return any(
        user.op == "output" or _is_called(user) or (_is_view(user) and _is_written_view(user)) for user in node.users
    )


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return (
        node.op == "call_function" and schema is not None and any(one.alias_info is not None for one in schema.returns)
    )


def _is_called(node: fx.Node) -> bool:
    name = str(getattr(node.target, "__name__", node.target))
    return (
        node.op == "call_function"
        and any(part in name for part in _PRODUCTS)
        and isinstance(node.target, torch._ops.OpOverload)
    )
