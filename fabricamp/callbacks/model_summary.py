"""Summarizes a module: a table of its submodules, and their memory at an opt level."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fabricamp.callbacks.base import Callback
from fabricamp.errors import ConfigError
from fabricamp.habits import habits
from fabricamp.messages import on_screen
from fabricamp.optimizers import FusedOptimizer
from fabricamp.optimizers.refusals import owned_parameters
from fabricamp.optimizers.state_sizes import states_of
from fabricamp.precision import OptLevel
from fabricamp.precision.casting import convertible_modules, tensors_to_convert
from fabricamp.precision.named import precision_from
from fabricamp.precision.opt_levels import LEVELS, Level

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from fabricamp.module import TrainingModule
    from fabricamp.precision.base import Precision
    from fabricamp.trainer import Trainer

_LOG = logging.getLogger("fabricamp")

_COLUMNS = ("Name", "Type", "Params", "Trainable", "Size")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(slots=True)
class Count:
    """Elements and bytes of some parameters and buffers, shared ones counted once."""

    params: int = 0
    trainable: int = 0
    size: int = 0
    lazy: int = 0
    """Number of parameters and buffers without a shape yet; the other numbers do not include them."""


@dataclass(frozen=True, slots=True)
class LayerSummary:
    """One submodule; its count includes its own submodules."""

    name: str
    type: str
    count: Count

    def cells(self) -> tuple[str, ...]:
        """Returns the texts of the row, in the order of the columns."""
        count = self.count
        unknown = " + ?" if count.lazy else ""
        return (
            self.name,
            self.type,
            f"{count.params:,}{unknown}",
            f"{count.trainable:,}{unknown}",
            _size(count.size) + unknown,
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of :func:`summarize`; ``str`` gives plain text."""

    rows: list[LayerSummary]
    total: Count
    opt_level: str
    memory: dict[str, int]
    """Bytes by kind: weights, buffers, masters, gradients; in a fit of known optimizers their states too."""
    tied: list[str] = field(default_factory=list)

    @property
    def frozen(self) -> int:
        """Number of elements of frozen parameters."""
        return self.total.params - self.total.trainable

    @property
    def total_parameters(self) -> int:
        """Number of elements of all parameters."""
        return self.total.params

    @property
    def trainable_parameters(self) -> int:
        """Number of elements of trained parameters."""
        return self.total.trainable

    def notes(self) -> list[str]:
        """Returns the lines below the table."""
        parts = " + ".join(f"{_size(size)} {name}" for name, size in self.memory.items() if size)
        parameters = "1 parameter" if self.total.params == 1 else f"{self.total.params:,} parameters"
        memory = f"{parts or '0 B'} = {_size(sum(self.memory.values()))}"
        lines = [
            f"{parameters}: {self.total.trainable:,} trainable, {self.frozen:,} frozen",
            # Adam's state is often the largest part of all, so the line says whether it is in the sum.
            f"Memory at {self.opt_level}: {memory} without {self._left_out()}",
        ]
        if self.tied:
            more = f" and {len(self.tied) - 3} more" if len(self.tied) > 3 else ""
            lines.append(f"Tied, counted once: {', '.join(self.tied[:3])}{more}")
        if self.total.lazy:
            lines.append(
                f"{self.total.lazy} lazy parameters or buffers get their shape in the first forward; not counted"
            )
        return lines

    def _left_out(self) -> str:
        if "optimizer states" in self.memory:
            return "activations; Trainer.plan(module, loader) tells them"
        return "optimizer state and activations"

    def __str__(self) -> str:
        lines = [row.cells() for row in self.rows]
        widths = [max(map(len, column)) for column in zip(_COLUMNS, *lines, strict=True)]
        table = ["  ".join(_aligned(line, widths)).rstrip() for line in [_COLUMNS, *lines]] if lines else []
        return "\n".join([*table, *self.notes()])

    def show(self) -> None:
        """Shows a table on a terminal and in a notebook, elsewhere plain lines through logger ``fabricamp``."""
        from rich import box, get_console
        from rich.table import Table
        from rich.text import Text

        if not on_screen():
            for line in str(self).splitlines():
                _LOG.info(line)
            return
        console = get_console()
        if self.rows:
            table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
            for index, column in enumerate(_COLUMNS):
                table.add_column(column, justify="right" if index > 1 else "left", overflow="fold")
            for row in self.rows:
                table.add_row(*map(Text, row.cells()))
            console.print(table)
        console.print(Text("\n".join(self.notes())))


class ModelSummary(Callback):
    """Shows the module's submodules and their memory, on rank 0 when ``fit`` starts.

    Args:
        max_depth: the depth of the listed submodules: 1 lists the direct children, 0 only totals, -1 all.

    Example:
        >>> trainer = Trainer(callbacks=[ModelSummary(max_depth=2)])
    """

    def __init__(self, max_depth: int = 1) -> None:
        super().__init__()
        _check_depth(max_depth)
        self.max_depth = max_depth

    def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Shows the summary of the converted module, including its optimizers' masters."""
        if self.max_depth and habits().summaries_read_example_inputs:
            _read_example_inputs(pl_module)
        if not trainer.is_global_zero:
            return
        memory = _memory_as_it_is(pl_module)
        own = {id(parameter) for parameter in pl_module.parameters()}
        updated = [tensor for optimizer in trainer.optimizers for tensor in owned_parameters(optimizer)]
        memory["masters"] = sum(_bytes(tensor) for tensor in _once(updated) if id(tensor) not in own)
        memory["masters"] += sum(
            _bytes(remainder)
            for optimizer in trainer.optimizers
            if isinstance(optimizer, FusedOptimizer)
            for remainder in optimizer.remainders.values()
        )
        memory["gradient sums"] = sum(
            _bytes(gradient)
            for optimizer in trainer.optimizers
            for gradient in trainer.precision_plugin.gradients(optimizer).tensors
        )
        states = [states_of(optimizer) for optimizer in trainer.optimizers]
        if None not in states:
            memory["optimizer states"] = sum(size for sizes in states for size in sizes or ())
        Summary(
            rows=_rows(pl_module, self.max_depth),
            total=_count(pl_module),
            opt_level=trainer.precision_plugin.name,
            memory=memory,
            tied=_tied(pl_module),
        ).show()


def summarize(module: nn.Module, max_depth: int = 1, opt_level: str | Precision = "O0") -> Summary:
    """Returns the submodules of ``module`` and its memory at ``opt_level``, whether it is converted already or not.

    ``opt_level`` is any value of ``Trainer(precision=...)``, including an ``OptLevel`` with options.  The memory includes weights
    and buffers in their dtype at that level, fp32 masters of the trainable half weights (O2, O5), and one gradient for each
    trainable weight in the weight's dtype.  Raises :class:`ConfigError` for an unknown name.

    Example:
        >>> print(summarize(torch.nn.Linear(32, 2), opt_level="O2"))
    """
    _check_depth(max_depth)
    precision = precision_from(opt_level)
    level = precision.level if isinstance(precision, OptLevel) else LEVELS["O0"]
    name = opt_level if isinstance(opt_level, str) else precision.name
    return Summary(_rows(module, max_depth), _count(module), name, _predicted_memory(module, level), _tied(module))


def _check_depth(max_depth: int) -> None:
    if not isinstance(max_depth, int) or isinstance(max_depth, bool) or max_depth < -1:
        raise ConfigError(
            f"max_depth={max_depth!r} has to be an int: 0 for the totals only, 1, 2, ... for this number of levels, -1 for all"
        )


def _rows(module: nn.Module, max_depth: int) -> list[LayerSummary]:
    if max_depth == 0:
        return []
    rows = [
        LayerSummary(name, type(part).__name__, _count(part))
        for name, part in module.named_modules(remove_duplicate=False)
        if name and (max_depth == -1 or name.count(".") < max_depth)
    ]
    own = _count(module, recurse=False)
    if own.params or own.size or own.lazy:
        # Without this row for the module's own parameters the rows would not add up to the total.
        rows.insert(0, LayerSummary("(own)", type(module).__name__, own))
    return rows


def _count(module: nn.Module, *, recurse: bool = True) -> Count:
    count = Count()
    for tensor in (*module.parameters(recurse), *module.buffers(recurse)):
        if not _has_shape(tensor):
            count.lazy += 1
            continue
        count.size += _bytes(tensor)
        if isinstance(tensor, nn.Parameter):
            count.params += tensor.numel()
            if tensor.requires_grad:
                count.trainable += tensor.numel()
    return count


def _read_example_inputs(module: nn.Module) -> None:
    """Reads the attribute as often as Lightning's summary, in case it is a property that draws random numbers."""
    if getattr(module, "example_input_array", None) is not None:
        for _ in range(2):
            _ = module.example_input_array


def _memory_as_it_is(module: nn.Module) -> dict[str, int]:
    parameters = [parameter for parameter in module.parameters() if _has_shape(parameter)]
    return {
        "weights": sum(map(_bytes, parameters)),
        "buffers": sum(_bytes(buffer) for buffer in module.buffers() if _has_shape(buffer)),
        "gradients": sum(_bytes(parameter) for parameter in parameters if parameter.requires_grad),
    }


def _predicted_memory(module: nn.Module, level: Level) -> dict[str, int]:
    choice = {"keep_batchnorm_fp32": level.keep_batchnorm_fp32, "whole_step": level.whole_step}
    modules = list(convertible_modules(module, **choice))
    dtype = level.cast_model_type
    converted = set() if dtype is None else {id(tensor) for tensor in tensors_to_convert(module, modules)}
    memory = Counter(weights=0, buffers=0, gradients=0, masters=0)
    for tensor in (*module.parameters(), *module.buffers()):
        if not _has_shape(tensor):
            continue
        size = _bytes(tensor)
        is_converted = dtype is not None and id(tensor) in converted
        if dtype is not None and is_converted:
            size = tensor.numel() * dtype.itemsize
        if not isinstance(tensor, nn.Parameter):
            memory["buffers"] += size
            continue
        memory["weights"] += size
        if tensor.requires_grad:
            memory["gradients"] += size
            if is_converted and level.master_weights:
                memory["masters"] += tensor.numel() * torch.float32.itemsize
    return dict(memory)


def _tied(module: nn.Module) -> list[str]:
    """Returns a text such as ``"decoder.weight = embedding.weight"`` for each further name of a parameter."""
    first: dict[int, str] = {}
    tied = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        before = first.setdefault(id(parameter), name)
        if before != name:
            tied.append(f"{name} = {before}")
    return tied


def _once(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _has_shape(tensor: Tensor) -> bool:
    return not is_lazy(tensor)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _size(size: float) -> str:
    index = 0
    while size >= 1024 and index + 1 < len(_UNITS):
        size /= 1024
        index += 1
    return f"{size:.0f} B" if index == 0 else f"{size:.1f} {_UNITS[index]}"


def _aligned(cells: Iterable[str], widths: list[int]) -> list[str]:
    """Aligns names and types to the left, numbers to the right."""
    return [
        cell.rjust(width) if index > 1 else cell.ljust(width)
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
