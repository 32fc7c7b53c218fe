"""What the blocks of a network keep for backward (``Trainer(activations=...)``): which blocks, and what cannot work.

How a block is called then: :mod:`fabricamp.engine.block_calls`.  What waits in host memory: :mod:`fabricamp.engine.offloading`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Final

import torch

from fabricamp.engine.block_calls import BlockCall, would_change_twice
from fabricamp.engine.compiled_calls import repeated_blocks
from fabricamp.engine.offloading import Offloading
from fabricamp.errors import ConfigError
from fabricamp.precision import Float8
from fabricamp.strategies.fsdp_units import given_modules
from fabricamp.torch_private import AnyBatchNorm, compiled_by_user, is_sharded, memory_budget

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor, nn

    from fabricamp._utils.types import Batch, Output, Step
    from fabricamp.activations import Activations
    from fabricamp.engine.session import Session


class BlockActivations:
    """The blocks of a session's module, with calls of their own during a fit; does nothing if all activations are kept."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._options = session.settings.activations
        self._changed = contextlib.ExitStack()

    def put_on(self) -> None:
        """Gives the blocks their calls; raises :class:`ConfigError` for what cannot work."""
        options = self._options
        if options is None:
            return
        session = self._session
        lines = []
        if options.changes_blocks:
            blocks = _blocks_of(session.module, options)
            refuse_second_changes(blocks, options)
            offloading = self._offloading(blocks, options)
            for _, block in blocks:
                call = BlockCall(block, options, offloading)
                vars(block)["forward"] = call
                self._changed.callback(call.leave)
            where = f", {options.offload:.0%} of it in host memory" if options.offload else ""
            lines.append(f"{_described(block for _, block in blocks)} {_KEEP[options.save]}{where}")
        if options.memory_budget is not None:
            if refusal := self._refuses_budget(options):
                raise ConfigError(f"Activations(memory_budget={options.memory_budget}): {refusal}")
            self._changed.enter_context(memory_budget(options.memory_budget))
            lines.append(
                f"each compiled region keeps at most {options.memory_budget:.0%} of what the compiler would keep for backward"
            )
        session.run_summary.say(f"activations: {'; '.join(lines)}")

    def _offloading(self, blocks: Sequence[tuple[str, nn.Module]], options: Activations) -> Offloading | None:
        """Returns what moves activations to host memory, if anything does; raises :class:`ConfigError` if it cannot."""
        if not options.offload:
            return None
        strategy = self._session.strategy
        beginning = f"Activations(offload={options.offload})"
        if refusal := strategy.sharding.refuses_offload():
            raise ConfigError(f"{beginning}: {refusal}")
        precision = self._session.precision
        if isinstance(precision, Float8) and precision.all_gather:
            raise ConfigError(
                f"{beginning}: weights that are gathered in FP8 are freed between forward and backward, and would be taken for "
                "activations; leave all_gather out, or give save='inputs'"
            )
        compiled = {
            id(part) for one in self._session.module.modules() if compiled_by_user(one) for part in one.modules()
        }
        for path, block in blocks:
            if id(block) in compiled:
                raise ConfigError(
                    f"{beginning}: {path} is within code that you have compiled, which keeps its activations itself; give "
                    "Trainer(compile='blocks') in place of it, or save='inputs'"
                )
            if any(is_sharded(inner) for inner in block.modules() if inner is not block):
                raise ConfigError(
                    f"{beginning}: strategy 'fsdp' gathers parameters within {path}, whose weights are then no activations; give "
                    f"FSDP(units=[...]) its class, {_class_of(block)}, so that a block is gathered as a whole"
                )
        offloading = Offloading(
            options.offload,
            strategy.device,
            processes=strategy.environment.local_world_size,
            compiles=self._session.compilation.compiles,
            say=self._session.run_summary.say,
        )
        self._changed.callback(offloading.close)
        return offloading

    def watching(self, step: Step) -> Step:
        """Returns ``step``; under a budget its first call raises :class:`ConfigError` if it draws random numbers of torch.

        The compiler draws other numbers when it computes a dropout again within a budget, so that gradients would be wrong.
        """
        options = self._options
        if options is None or options.memory_budget is None:
            return step
        seen = False
        device = self._session.strategy.device

        def run(*batch: Batch) -> Output:
            nonlocal seen
            if seen:
                return step(*batch)
            before = _states(device)
            output = step(*batch)
            if not all(map(torch.equal, before, _states(device))):
                raise ConfigError(
                    f"Activations(memory_budget={options.memory_budget}): training_step draws random numbers, as dropout does, and "
                    "the compiler would draw others where it computes them again, for wrong gradients; give save='inputs' or "
                    "'products' in place of it, set dropout to 0, or draw what is not dropout before the step"
                )
            seen = True
            return output

        return run

    def _refuses_budget(self, options: Activations) -> str:
        """Returns why no compiled code has a budget, and what to change; empty if some has."""
        compiling = self._session.settings.compile
        if not self._session.compilation.compiles:
            return "the number is for the compiler, and nothing is compiled; give compile=True, or save='inputs' in its place"
        backend = "inductor" if compiling is None else compiling.options.get("backend", "inductor")
        if backend not in _WITH_BUDGET:
            return f"code of the backend {backend!r} keeps what it keeps, whatever the budget; leave one of them out"
        return ""

    def take_off(self) -> None:
        """Leaves the blocks, and torch's settings, as they were."""
        self._changed.close()


_WITH_BUDGET: Final = ("inductor", "aot_eager_decomp_partition")
"""The backends of torch.compile that choose what backward keeps."""
_KEEP: Final = {
    "all": "keep all of it",
    "products": "keep products and attention, and compute the rest again in backward",
    "inputs": "keep their inputs, and compute the rest again in backward",
}


def _states(device: torch.device) -> list[Tensor]:
    """Returns the states of torch's generators of the host and of ``device``."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


# -- which blocks ------------------------------------------------------------------------------------------------------------------


def _blocks_of(module: nn.Module, options: Activations) -> list[tuple[str, nn.Module]]:
    """Returns the blocks with their names; raises :class:`ConfigError` if there are none, or if one is within another."""
    name = type(module).__name__
    if options.blocks == "auto":
        blocks = set(repeated_blocks(module))
        found = [(path, one) for path, one in module.named_modules() if one in blocks]
        if not found:
            raise ConfigError(
                f"activations: {name} has no repeated blocks (modules with submodules, and with a sibling of the same class, as in "
                "a ModuleList), or they are compiled already; name them by Activations(blocks=[...]), or give activations='keep'"
            )
        return found
    found = given_modules(module, options.blocks, "Activations(blocks=")
    own = {id(one) for _, one in found}
    for path, one in found:
        inner = next((inner for inner in one.modules() if inner is not one and id(inner) in own), None)
        if inner is not None:
            raise ConfigError(
                f"Activations(blocks=[...]): {path} is a block, and has another in it ({_class_of(inner)}); name one of them"
            )
    return found


def refuse_second_changes(blocks: Sequence[tuple[str, nn.Module]], options: Activations) -> None:
    """Raises :class:`ConfigError` for running statistics, which a second forward would update again."""
    for path, block in blocks if options.recomputes else ():
        for name, layer in block.named_modules():
            if isinstance(layer, AnyBatchNorm) and layer.track_running_stats and layer.training:
                what = f"the running statistics of {_class_of(layer)} {f'{path}.{name}'.strip('.')!r}"
                raise ConfigError(would_change_twice(path, what, options))


def _described(blocks: Iterable[nn.Module]) -> str:
    counts = Counter(map(_class_of, blocks))
    return ", ".join(f"{number} {name}" for name, number in counts.items())


def _class_of(module: nn.Module) -> str:
    """Returns the name of the module's class, without what ``fully_shard`` makes of it."""
    kinds = (kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch.distributed.fsdp"))
    return next(kinds).__name__
