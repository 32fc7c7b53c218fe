"""Keeps torch's compiler out of processes that compile nothing: its import takes 2 s of a processor in each of them.

torch imports ``torch._dynamo`` to tell it of functions that are not to be traced: an optimizer's constructor, ``step``,
``zero_grad`` and methods for its state, and the constructor and the first forward of DistributedDataParallel.  While it is not
loaded, nothing is traced.  Here these functions run without that mark until it is loaded; from then on torch's own run.  Their
results are the same.

What still imports it: ``torch.compile``, ``fully_shard`` (strategy "fsdp"), and activations that are computed again.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, SimpleNamespace
from typing import Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fabricamp.torch_private import DISABLED_FORM, optimizer_step_breaks_graphs

_METHODS: Final = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
"""The methods of Optimizer that are not to be traced."""
_OF_TORCH: Final = optimizer_step_breaks_graphs(lambda: None).__code__
"""The code of each ``step`` that torch has decorated."""


def is_loaded() -> bool:
    """Returns whether torch's compiler is loaded."""
    return "torch._dynamo" in sys.modules


def let_optimizers_work() -> None:
    """Lets optimizers be made, step and be saved without an import of torch's compiler, in this process from now on."""
    if is_loaded():
        return
    for name in _METHODS:
        _run_unmarked(getattr(Optimizer, name))
    for kind in _kinds(Optimizer):
        step = vars(kind).get("step")
        if isinstance(step, FunctionType) and step.__code__ is _OF_TORCH:
            kind.step = _unbroken(step)  # type: ignore[method-assign]


@contextlib.contextmanager
def making_ddp() -> Iterator[None]:
    """A context within which DistributedDataParallel is made, and later called, without an import of torch's compiler.

    Its constructor asks the compiler for the option ``optimize_ddp``, which nobody can have set before the import: the default is
    given.
    """
    if is_loaded():
        yield
        return
    _run_unmarked(getattr(DistributedDataParallel._inside_ddp_forward, "__wrapped__", None))
    default = SimpleNamespace(utils=SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer"))
    vars(torch)["_dynamo"] = default
    try:
        yield
    finally:
        if vars(torch).get("_dynamo") is default:
            del vars(torch)["_dynamo"]


def _kinds(kind: type[Optimizer]) -> Iterator[type[Optimizer]]:
    yield kind
    for one in kind.__subclasses__():
        yield from _kinds(one)


def _run_unmarked(marked: Any) -> None:
    """Makes ``marked``, which torch does not want traced, run its own function until the compiler is loaded.

    torch keeps the form for the compiler in an attribute of the function, which it fills at the first call.
    """
    function = getattr(marked, "__wrapped__", None)
    if function is None or hasattr(function, DISABLED_FORM):
        return

    def run(*args: Any, **options: Any) -> Any:
        if not is_loaded():
            return function(*args, **options)
        vars(function).pop(DISABLED_FORM, None)
        return marked(*args, **options)

    setattr(function, DISABLED_FORM, run)


def _unbroken(torchs: Any) -> Callable[..., Any]:
    """Returns the ``step`` that runs as torch's own, which breaks a graph where one is traced, and breaks none."""
    step = torchs.__wrapped__

    @functools.wraps(step)
    def run(optimizer: Optimizer, *args: Any, **options: Any) -> Any:
        if is_loaded():
            return torchs(optimizer, *args, **options)
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            return step(optimizer, *args, **options)

    return run
