"""Calls of blocks that keep less for backward: :class:`BlockCall`, the ``forward`` of a block during a fit.

It is an attribute of the instance, so that the block's hooks run around it, once: the casts of a half module and the gathers of
a shard are among them.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fabricamp.engine.graph.host_effects import generators_of_others
from fabricamp.errors import ConfigError
from fabricamp.torch_private import current_backward

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from fabricamp.activations import Activations
    from fabricamp.engine.offloading import Offloading


class _Repeating(threading.local):
    """Whether this thread computes a block again that ran uncompiled: what it calls has to run uncompiled too."""

    on = False


REPEATING: Final = _Repeating()


class BlockCall:
    """The ``forward`` of a block during a fit; a copy or a pickle of the block has its own ``forward`` instead."""

    def __init__(self, block: nn.Module, options: Activations, offloading: Offloading | None) -> None:
        self._block = block
        self._own = vars(block).get("forward")
        self._forward = block.forward
        self.__wrapped__ = block.forward  # for inspect.signature
        self._options = options
        self._offloading = offloading
        self._checked = not options.recomputes
        self._failure: BaseException | None = None
        """What a forward has raised, until torch's checkpoint has ended."""
        self._how: dict[str, Any] = {"context_fn": products_kept} if options.save == "products" else {}

    def __reduce__(self) -> tuple[Any, ...]:
        if self._own is not None:
            return _as_it_is, (self._own,)
        return getattr, (self._block, "forward")  # asked of the new module while it has no attributes yet

    def leave(self) -> None:
        """Gives the block its own ``forward`` back."""
        if self._own is None:
            del vars(self._block)["forward"]
        else:
            vars(self._block)["forward"] = self._own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls ``forward``; what backward needs of it is computed again, or moved, where the options say so."""
        # Each condition on the compiler is a constant while torch compiles the call.
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        if self._offloading is not None and not torch.compiler.is_compiling():
            return self._offloading.run(self._block, self._keeping, *args, **kwargs)
        return self._keeping(*args, **kwargs)

    def around(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``program``, compiled code of this block, so that what it saves may be moved."""
        if self._offloading is None or not torch.is_grad_enabled():
            return program
        return partial(self._offloading.run, self._block, program)

    def _keeping(self, *args: Any, **kwargs: Any) -> Any:
        if not self._options.recomputes:
            return self._forward(*args, **kwargs)
        if not torch.compiler.is_compiling() and not self._checked:
            return self._first_call(args, kwargs)
        return self._computed_again(args, kwargs)

    def _computed_again(self, args: Any, kwargs: Any) -> Any:
        forward: Callable[..., Any] = self._forward_or_repeated
        if kwargs:  # torch keeps positional tensors alone where hooks of saved tensors see them
            forward = partial(_by_keyword, forward, tuple(kwargs))
            args = (*args, *kwargs.values())
        output = checkpoint(forward, *args, use_reentrant=False, **self._how)
        if self._failure is not None:
            self._raise_failure()
        return output

    def _forward_or_repeated(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the repetition becomes a part of the code
            return self._forward(*args, **kwargs)
        before = REPEATING.on
        repeats = current_backward() != -1
        REPEATING.on = repeats
        try:
            return self._forward(*args, **kwargs)
        except BaseException as error:
            if repeats:
                raise
            # Before 2.13, torch's hooks of saved tensors stay on after an error, for as long as its traceback lives.
            self._failure = error
            return None
        finally:
            REPEATING.on = before

    def _raise_failure(self) -> None:
        failure = self._failure
        self._failure = None
        assert failure is not None
        try:
            raise failure
        finally:
            del failure  # its traceback holds this frame

    def _first_call(self, args: Any, kwargs: Any) -> Any:
        """Raises :class:`ConfigError` if ``forward`` changes what a second one would find changed."""
        before = _changing(self._block)
        output = self._computed_again(args, kwargs)
        after = _changing(self._block)
        changed = next((what for what, value in after.items() if before.get(what) != value), "")
        if changed:
            raise ConfigError(would_change_twice(type(self._block).__name__, changed, self._options))
        self._checked = True
        return output


def would_change_twice(name: str, what: str, options: Activations) -> str:
    """Returns why block ``name`` cannot compute its activations again, and what to change."""
    return (
        f"Activations(save={options.save!r}): {name} computes its activations again in backward, which would change {what} a "
        "second time; leave this block out by blocks=[...], or give Activations(offload=...), which computes nothing again"
    )


def _as_it_is(value: Any) -> Any:
    return value


def _by_keyword(forward: Callable[..., Any], names: tuple[str, ...], *values: Any) -> Any:
    split = len(values) - len(names)
    return forward(*values[:split], **dict(zip(names, values[split:], strict=True)))


def _changing(block: nn.Module) -> dict[str, object]:
    """Returns what tells whether ``block`` has changed its buffers, or drawn numbers that torch does not restore for it."""
    found: dict[str, object] = {
        f"its buffer {name!r}": (id(buffer), 0 if buffer.is_inference() else buffer._version)
        for name, buffer in block.named_buffers()
    }
    for name, module in block.named_modules():
        own = {key: value for key, value in vars(module).items() if isinstance(value, torch.Generator)}
        prefix = f"{name}." if name else ""
        found.update((f"its generator {prefix + key!r}", one.get_state().tolist()) for key, one in own.items())
    found.update((f"the state of {name}", state) for name, state in generators_of_others().items())
    return found


# -- what is kept of a block that computes the rest again --------------------------------------------------------------------------

_PRODUCTS: Final = frozenset(
    {
        "mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "_int_mm",
        "convolution", "linear", "matmul", "_addmm_activation",
    }
)  # fmt: skip
"""Names of torch's operators that are kept beside those of attention."""


def products_kept() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Returns torch's contexts for a forward and its repetition, between which results of products and attention are kept."""
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(_policy)
    return contexts


def _policy(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    name = getattr(operation, "__name__", str(operation)).partition(".")[0]
    kept = name in _PRODUCTS or "attention" in name or "attn" in name
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
