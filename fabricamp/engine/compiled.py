"""Compiles the steps of a session: the complete step, or the modules that it calls; does not change the user's module.

``Trainer(compile=...)`` and ``fit(torch.compile(module))`` switch this on.
"""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fabricamp.engine.compilation_watch import CompilationWatch
from fabricamp.engine.compiled_calls import CompiledCalls, called_modules, repeated_blocks
from fabricamp.engine.compiled_code import CompiledCode
from fabricamp.errors import ConfigError
from fabricamp.torch_private import (
    compiled_by_user,
    compiler_of,
    compiler_options,
    dispatch_modes,
    guarded_hooks,
    is_sharded,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from fabricamp._utils.types import Batch, Output, Step
    from fabricamp.compilation import Part
    from fabricamp.engine.session import Session

_LOG = logging.getLogger("fabricamp")


class HeldLogs:
    """Replaces the metrics of a run while compiled code runs: logging only appends to a list and causes no graph break."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], Any, int | None]] = []

    def keep(self, call: tuple[Any, ...], value: Any, batch_size: int | None = None) -> None:
        """Notes a call of ``self.log``, with a copy of the value: the step may change it."""
        self.calls.append((call, value.detach().clone() if isinstance(value, Tensor) else value, batch_size))


class Compilation:
    """Compiles the steps of a session; does nothing if that was not asked for.

    Code that the user has compiled keeps the user's options and is not compiled a second time.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._options = session.settings.compile
        self._compiler = session.source.compiler
        self._part: Part | None = None
        self._calls: CompiledCalls | None = None
        self._code: CompiledCode | None = None
        self._watch = CompilationWatch(session.trainer.state, speaks=session.trainer.is_global_zero)
        self._changed = contextlib.ExitStack()
        self._looks_for_graphs = session.settings.cuda_graph is not None
        """Whether what the user compiled is still to be looked at: once, as a fit asks for its steps again and again."""

    @property
    def compiles(self) -> bool:
        """Whether parts of the steps are compiled, here or by the user."""
        asked = self._options is not None or self._compiler is not None
        return asked or any(map(compiled_by_user, self._session.module.modules()))

    # -- what is compiled ---------------------------------------------------------------------------------------------------------

    def training_step(self) -> Step:
        """Returns the module's ``training_step``, compiled if that was asked for.

        If it cannot be compiled, ``Trainer(compile=...)`` raises :class:`ConfigError`, and a module that was compiled trains
        uncompiled.
        """
        step: Step = self._session.module.training_step
        self._check_graph()
        if self._options is None and self._compiler is None:
            return step
        try:
            self._open()
        except ConfigError as error:
            if self._options is not None:
                raise
            name = type(self._session.module).__name__
            self._session.run_summary.say(f"{name}, compiled by torch.compile, trains uncompiled: {error}")
            return step
        armed = self._armed(step, "training")
        return armed if self._code is None else self._code.watching(armed)

    def evaluation_step(self, step: Step) -> Step:
        """Returns a step of an evaluation, compiled if the options say so."""
        self._check_graph()
        if self._options is None or not self._options.evaluation:
            return step
        if self._part is None:
            self._open()
        return self._armed(step, "evaluation")

    def _open(self) -> None:
        """Chooses the part, and compiles it unless it is "step"; raises :class:`ConfigError` if it cannot be compiled."""
        session = self._session
        part = self._options.part if self._options is not None else None
        against: dict[Part, Callable[[], str]] = {  # the largest part first
            "step": partial(_against_step, session),
            "modules": partial(_against_modules, session),
            "blocks": partial(_against_blocks, session.module),
        }
        reasons = {name: reason() for name, reason in against.items() if part in (None, name)}
        chosen = next((name for name, reason in reasons.items() if not reason), None)
        if chosen is None:
            raise ConfigError(f"compile{'' if part is None else f'={part!r}'}: {next(iter(reasons.values()))}")
        self._part = chosen
        if part is None and chosen != "step":
            session.run_summary.say(f"compile takes {_WORDS[chosen]}: {reasons['step']}")
        self._say_inexact()
        self._find_code(chosen)
        # Hooks registered later on a module within compiled code run too: torch recompiles for them.
        self._changed.enter_context(guarded_hooks())
        if chosen == "step":
            return
        calls = CompiledCalls(self._compile, self._watch)
        self._changed.callback(calls.take_off)
        self._calls = calls
        modules = called_modules(session.module) if chosen == "modules" else repeated_blocks(session.module)
        calls.put_on(modules, shared=chosen == "blocks")

    def _find_code(self, part: Part) -> None:
        """Looks in the folder of ``Compile(cache=...)`` for compiled code."""
        if self._options is None or self._options.cache is False:
            return
        session = self._session
        self._code = CompiledCode(self._options, part, session.module, trainer=session.trainer)
        self._code.load()
        self._changed.callback(self._code.save)

    def _compile(self, function: Step) -> Step:
        if self._compiler is not None:
            return self._compiler(function)
        assert self._options is not None
        return torch.compile(function, **self._options.for_torch())

    def _check_graph(self) -> None:
        """Raises :class:`ConfigError` if the user has compiled a part of the module with torch's own CUDA graphs."""
        if not self._looks_for_graphs:
            return
        self._looks_for_graphs = False
        compilers = {"a module": self._compiler, **_compilers_of(self._session.module)}
        for what, compiler in compilers.items():
            if compiler is not None and compiler_options(compiler).own_graphs:
                raise ConfigError(
                    f"cuda_graph with {what} compiled by a mode, option or backend with CUDA graphs of torch's own: the step is "
                    "captured as a whole; leave the mode out, or cuda_graph"
                )

    def _say_inexact(self) -> None:
        if self._compiler is not None:
            dynamic = compiler_options(self._compiler).dynamic
            reason = (
                "" if dynamic is False else f"torch.compile(dynamic={dynamic}) compiles by the sizes of earlier batches"
            )
        else:
            assert self._options is not None
            reason = self._options.inexact()
        if reason and self._session.trainer.is_global_zero:
            _LOG.info("compile: a resumed run may differ in bits from one that was never cut: %s", reason)

    # -- a step -------------------------------------------------------------------------------------------------------------------

    def _armed(self, step: Step, kind: str) -> Step:
        """Returns a function that runs ``step`` with the compiled code, and logs the values of its ``self.log`` calls after it."""
        run_context = self._session.run_context
        held = HeldLogs()
        stand_in: Any = held
        calls = self._calls
        compiled = (
            self._watched(self._compile(step), step.__name__) if calls is None else partial(_arm, calls, kind, step)
        )

        def run(*batch: Batch) -> Output:
            if dispatch_modes():  # these, such as a counter of FLOPs, have to see the uncompiled step
                return step(*batch)
            metrics = run_context.metrics
            run_context.metrics = stand_in
            try:
                output = compiled(*batch)
            finally:
                run_context.metrics = metrics
                logged = held.calls
                held.calls = []
            if metrics is not None:  # else nothing is logged
                for call in logged:
                    metrics.keep(*call)
            return output

        return run

    def _watched(self, compiled: Step, name: str) -> Step:
        def run(*batch: Batch) -> Output:
            self._watch.name = name
            with self._watch:
                return compiled(*batch)

        return run

    def close(self) -> None:
        """Leaves the module and torch's settings as they were."""
        self._changed.close()


def _arm(calls: CompiledCalls, kind: str, step: Step, *batch: Batch) -> Any:
    calls.armed = kind
    try:
        return step(*batch)
    finally:
        calls.armed = ""


def _compilers_of(root: nn.Module) -> dict[str, Any]:
    """Returns the compilers of what the user has compiled in ``root``, by names: modules, functions in attributes, and methods."""
    found: dict[str, Any] = {}
    classes: dict[type, None] = {}
    for path, module in root.named_modules():
        own = f"self.{path}" if path else "self"
        found[own] = compiler_of(module)
        found.update((f"{own}.{name}", compiler_of(value)) for name, value in vars(module).items() if callable(value))
        classes.update(dict.fromkeys(type(module).__mro__))
    for owner in classes:
        methods = vars(owner).items()
        found.update((f"{owner.__name__}.{name}", compiler_of(value)) for name, value in methods)
    return {name: compiler for name, compiler in found.items() if compiler is not None}


# -- what cannot be compiled -------------------------------------------------------------------------------------------------------


def _against_step(session: Session) -> str:
    module, strategy, precision = session.module, session.strategy, session.precision
    if not module.automatic_optimization:
        return "manual optimization calls backward and updates within training_step; give compile='modules' or 'blocks'"
    if strategy.name == "fsdp":
        return "strategy 'fsdp' gathers parameters in hooks, which break a compiled step; give compile='blocks'"
    level: Any = getattr(precision, "level", None)
    casts = level is not None and not level.whole_step and (level.cast_model_type or level.cast_model_outputs)
    if casts:
        return (
            f"precision {precision.name!r} casts at the modules that the step calls, and the casts stay outside of "
            "compiled code; give compile='modules' or 'blocks'"
        )
    return _against_offload(session)


def _against_modules(session: Session) -> str:
    if session.strategy.name == "fsdp":
        return "strategy 'fsdp' gathers parameters within the modules that the step calls; give compile='blocks'"
    return _against_offload(session)


def _against_offload(session: Session) -> str:
    activations = session.settings.activations
    if activations is not None and activations.offload:
        return (
            f"Activations(offload={activations.offload}) moves what is saved between blocks, which then have to be compiled by "
            "themselves; give compile='blocks'"
        )
    return ""


def _against_blocks(module: nn.Module) -> str:
    name = type(module).__name__
    blocks = repeated_blocks(module)
    if not blocks:
        return (
            f"{name} has no repeated blocks (modules with submodules, and with a sibling of the same class, as in a ModuleList), "
            "or they are compiled already; give compile='modules'"
        )
    outer = next((block for block in blocks if any(map(is_sharded, _inner(block)))), None)
    if outer is not None:
        return (
            f"strategy 'fsdp' gathers parameters within {type(outer).__name__}; give FSDP(units=[...]) its class, so that a block "
            "is gathered as a whole"
        )
    return ""


def _inner(block: nn.Module) -> list[nn.Module]:
    return [module for module in block.modules() if module is not block]


_WORDS: dict[Part, str] = {"modules": "the modules that the step calls", "blocks": "the repeated blocks"}
