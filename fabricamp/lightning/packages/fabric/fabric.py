"""Lightning's Fabric over a :class:`fabricamp.Loop`: a loop of one's own by Lightning's names."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabricamp._utils.containers import with_parts
from fabricamp.data import move_to_device, wire_loader
from fabricamp.errors import ConfigError
from fabricamp.lightning.packages.fabric.wrappers import (
    _FabricDataLoader,
    _FabricModule,
    _FabricOptimizer,
    _unwrap_objects,
)
from fabricamp.own_loop import Loop
from fabricamp.precision.level import OptLevel
from fabricamp.rng import global_seed, seed_everything

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from fabricamp._utils.types import StateDict


class Fabric:
    """Lightning's names of a loop of one's own; ``fabricamp.Loop`` makes the steps.

    ``setup`` returns modules and optimizers to use in place of the given ones.  They are prepared together at the first forward:
    all calls of ``setup`` come before it.  Ranks exchange gradients in ``optimizer.step()``, which also clears them.

    Args:
        accelerator: "cpu", "gpu" or "auto".
        strategy: "auto", "ddp", "delayed_ddp" or an object; ``fsdp`` is for :class:`Loop`.
        devices: the number of processes on this machine.
        num_nodes: the number of machines.
        precision: Lightning's names, or "O0" to "O5".
        plugins: a precision, an environment or a list of them.
        callbacks: objects whose methods :meth:`call` calls.
        loggers: a logger or a list of them.

    Raises:
        ConfigError: for what cannot work, with what to change.
    """

    def __init__(
        self,
        accelerator: str = "auto",
        strategy: Any = "auto",
        devices: Any = "auto",
        num_nodes: int = 1,
        precision: Any = None,
        plugins: Any = None,
        callbacks: Any = None,
        loggers: Any = None,
    ) -> None:
        self._loop = Loop(
            accelerator=accelerator,
            strategy=strategy,
            devices=devices,
            num_nodes=num_nodes,
            precision="32-true" if precision is None else precision,
            plugins=plugins,
        )
        if self._loop._strategy.sharding.shards:
            self._loop.close()
            raise ConfigError(
                f"Fabric(strategy={strategy!r}): shards are gathered for forward and backward of a whole step, which "
                "fabricamp.Loop makes by step(fn, batch); give 'ddp', or write the loop with fabricamp.Loop"
            )
        self._callbacks = _listed(callbacks)
        self._loggers = _listed(loggers)
        self._modules: list[nn.Module] = []
        self._optimizers: list[Optimizer] = []
        self._prepared = False
        precision_plugin = self._loop._trainer.precision_plugin
        level = precision_plugin.level if isinstance(precision_plugin, OptLevel) else None
        self._input_dtype = None if level is None else level.cast_model_type
        self._casts_outputs = level is not None and (level.autocast is not None or level.cast_model_type is not None)

    # -- what a script sets up -----------------------------------------------------------------------------------------------------

    def launch(self, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Calls ``function(fabric, ...)``, if there is one; the processes have started when Fabric was constructed."""
        return None if function is None else function(self, *args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Override it in a subclass, for all code of a run."""

    def setup(self, module: nn.Module, *optimizers: Optimizer, move_to_device: bool = True, **_: Any) -> Any:
        """Returns the module, and its optimizers, to use in the loop."""
        wrapped = self.setup_module(module, move_to_device=move_to_device)
        if not optimizers:
            return wrapped
        return (wrapped, *map(self._wrapped, optimizers))

    def setup_module(self, module: nn.Module, move_to_device: bool = True, **_: Any) -> _FabricModule:
        """Returns the module to use in the loop."""
        self._check_setup(module, _FabricModule)
        self._modules.append(module)
        if move_to_device:
            module.to(self.device)
        return _FabricModule(self, module)

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Returns the optimizers to use in the loop: one, or a tuple."""
        wrapped = tuple(map(self._wrapped, optimizers))
        return wrapped[0] if len(wrapped) == 1 else wrapped

    def _wrapped(self, optimizer: Optimizer) -> _FabricOptimizer:
        self._check_setup(optimizer, _FabricOptimizer)
        self._optimizers.append(optimizer)
        return _FabricOptimizer(self, optimizer)

    def _check_setup(self, given: object, kind: type) -> None:
        if isinstance(given, kind):
            raise ConfigError(f"setup got a {type(given).__name__} that setup has returned; give each object once")
        if self._prepared:
            raise ConfigError(
                "setup after the first forward: modules and optimizers are prepared together there; call setup for all of them "
                "before it"
            )

    def setup_dataloaders(
        self, *loaders: Any, use_distributed_sampler: bool = True, move_to_device: bool = True
    ) -> Any:
        """Returns the loaders, each rank's share, with batches on the device: one, or a list."""
        strategy = self._loop._strategy
        wired = [
            wire_loader(
                loader,
                train=True,
                rank=strategy.data_rank,
                world_size=strategy.data_ranks,
                seed=global_seed(),
                distributed_sampler=use_distributed_sampler,
                device=self.device,
                from_first=strategy.broadcast if strategy.world_size > 1 else None,
                gather=strategy.all_gather_object,
            )
            for loader in loaders
        ]
        wrapped = [_FabricDataLoader(one, self.device if move_to_device else None) for one in wired]
        return wrapped[0] if len(wrapped) == 1 else wrapped

    def _loop_of_steps(self) -> Loop:
        """Returns the Loop, with all modules and optimizers prepared."""
        if not self._prepared and self._optimizers:
            self._prepared = True
            self._loop.prepare(*dict.fromkeys(self._modules), *self._optimizers)
        return self._loop

    # -- steps ---------------------------------------------------------------------------------------------------------------------

    def backward(self, tensor: Tensor, *_: Any, model: object = None, **kwargs: Any) -> None:
        """Runs backward on the scaled loss."""
        self._loop_of_steps().backward(tensor, **kwargs)

    def clip_gradients(
        self,
        module: nn.Module,
        optimizer: Any,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor | None:
        """Clips by value or norm; returns the norm where gradients are complete and unscaled, else clips in the next step."""
        if (clip_val is None) == (max_norm is None):
            raise ConfigError("clip_gradients takes one of clip_val and max_norm")
        inner = _unwrap_objects(optimizer)
        loop = self._loop_of_steps()
        precision = loop._trainer.precision_plugin
        plain = not isinstance(precision, OptLevel) or (
            precision.level.loss_scale == 1.0 and not precision.level.master_weights
        )
        if loop.world_size > 1 or not plain:
            if norm_type != 2.0:
                raise ConfigError(
                    f"clip_gradients(norm_type={norm_type}) is not offered at this precision or on several ranks"
                )
            if max_norm is not None:
                loop.clip_next(inner, max_norm)
            elif clip_val is not None:
                loop.clip_next(inner, clip_val, "value")
            return None
        parameters = [one for group in inner.param_groups for one in group["params"]]
        if clip_val is not None:
            nn.utils.clip_grad_value_(parameters, clip_val)
            return None
        assert max_norm is not None
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    @contextlib.contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> Iterator[None]:
        """A context for accumulation; ranks exchange gradients in ``optimizer.step()`` in any case."""
        yield

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """The precision's autocast, for code outside of a module's forward."""
        precision = self._loop._trainer.precision_plugin
        dtype = precision.level.autocast if isinstance(precision, OptLevel) else None
        with torch.autocast(self.device.type, dtype) if dtype is not None else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        """Makes modules within on the device."""
        with self.device:
            yield

    init_tensor = init_module

    # -- files ---------------------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, state: Mapping[str, Any], filter: Mapping[str, Any] | None = None) -> None:  # noqa: A002
        """Writes ``state``, with the state dicts of what has one, atomically on rank 0; ``filter`` is by name of entries."""
        content = {name: _state_of(one, (filter or {}).get(name)) for name, one in _unwrap_objects(dict(state)).items()}

        def write() -> None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            part = f"{path}.part"
            torch.save(content, part)
            Path(part).replace(path)

        self._loop._strategy.on_rank_zero(write)

    def load(
        self, path: str | Path, state: Any = None, strict: bool = True, *, weights_only: bool | None = None
    ) -> StateDict:
        """Loads what ``state`` names from a file of :meth:`save`; returns the rest."""
        content: StateDict = torch.load(path, map_location="cpu", weights_only=weights_only is not False)
        if state is None:
            return content
        objects = _unwrap_objects(state)
        if isinstance(objects, nn.Module):
            objects.load_state_dict(content, strict=strict)
            return {}
        missing = sorted(name for name in objects if name not in content)
        if missing and strict:
            raise KeyError(
                f"{path} has no {missing}; it has {sorted(content)}; leave them out of state, or give strict=False"
            )
        for name, one in objects.items():
            if name not in content:
                continue
            value = content.pop(name)
            if isinstance(one, nn.Module):
                one.load_state_dict(value, strict=strict)
            elif hasattr(one, "load_state_dict"):
                one.load_state_dict(value)
            else:
                state[name] = value
        return content

    def load_raw(self, path: str | Path, obj: Any, strict: bool = True) -> None:
        """Loads the state dict in a file into a module or an optimizer."""
        inner = _unwrap_objects(obj)
        value = torch.load(path, map_location="cpu", weights_only=True)
        inner.load_state_dict(value, strict=strict) if isinstance(inner, nn.Module) else inner.load_state_dict(value)

    # -- ranks, values, words ------------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """This process's device."""
        return self._loop.device

    @property
    def global_rank(self) -> int:
        """The number of this process among all."""
        return self._loop.rank

    @property
    def local_rank(self) -> int:
        """The number of this process among those of this machine."""
        return self._loop.local_rank

    @property
    def node_rank(self) -> int:
        """The number of this machine."""
        return self._loop._strategy.environment.node_rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self._loop.world_size

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self._loop.is_global_zero

    @property
    def loggers(self) -> list[Any]:
        """The loggers."""
        return self._loggers

    @property
    def logger(self) -> Any:
        """The first logger."""
        return self._loggers[0]

    def to_device(self, obj: Any) -> Any:
        """Returns the module or the batch on the device."""
        return obj.to(self.device) if isinstance(obj, nn.Module) else move_to_device(obj, self.device)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints once, not once per process."""
        self._loop.print(*args, **kwargs)

    def barrier(self, name: str | None = None) -> None:
        """Waits for every rank."""
        self._loop.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns rank ``src``'s object on every rank."""
        return self._loop.broadcast(obj, src)

    def all_gather(self, data: Any, group: object = None, sync_grads: bool = False) -> Any:
        """Returns every rank's tensors, stacked; in one process the tensors themselves."""
        if sync_grads:
            raise ConfigError("all_gather(sync_grads=True) is not offered; gather by torch.distributed.nn.all_gather")
        return data if self.world_size == 1 else _of_tensors(data, self._loop.all_gather)

    def all_reduce(self, data: Any, group: object = None, reduce_op: str = "mean") -> Any:
        """Returns the tensors reduced over the ranks."""
        op = {"avg": "mean"}.get(str(reduce_op).lower(), str(reduce_op).lower())
        return data if self.world_size == 1 else _of_tensors(data, lambda tensor: self._loop.all_reduce(tensor, op))

    @contextlib.contextmanager
    def rank_zero_first(self, local: bool = False) -> Iterator[None]:
        """A context whose body rank 0 (of each machine with ``local``) runs before the others."""
        first = (self.local_rank if local else self.global_rank) == 0
        if not first:
            self.barrier()
        yield
        if first:
            self.barrier()

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Calls the callbacks' method of this name, of those that have one."""
        for callback in self._callbacks:
            method = getattr(callback, hook_name, None)
            if callable(method):
                method(*args, **kwargs)

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Gives the loggers a value."""
        self.log_dict({name: value}, step)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Gives the loggers of rank 0 the values; tensors are read, which waits for the device."""
        if not self.is_global_zero:
            return
        values = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}
        for logger in self._loggers:
            logger.log_metrics(values, self._loop.global_step if step is None else step)

    @staticmethod
    def seed_everything(seed: int | None = None, workers: bool | None = None, verbose: bool = True) -> int:
        """Seeds Python, NumPy and torch."""
        return seed_everything(seed, workers=bool(workers), verbose=verbose)


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _of_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return change(value) if isinstance(value, Tensor) else with_parts(value, lambda one: _of_tensors(one, change))


def _state_of(value: Any, keep: Callable[[str, Any], bool] | None) -> Any:
    """Returns an entry's state dict, of which ``keep(name, value)`` keeps a part; other entries as they are."""
    found = value.state_dict() if hasattr(value, "state_dict") else value
    return {name: one for name, one in found.items() if keep(name, one)} if keep is not None else found
