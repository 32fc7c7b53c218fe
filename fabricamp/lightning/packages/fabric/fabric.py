"""Lightning's Fabric over a :class:`fabricamp.Loop`: a loop of one's own by Lightning's names."""

from __future__ import annotations

import atexit
import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabricamp.data import move_to_device, wire_loader
from fabricamp.errors import ConfigError
from fabricamp.launch.devices import CPUAccelerator, CUDAAccelerator
from fabricamp.lightning.packages.fabric.arguments import (
    as_tensors,
    check_filter,
    from_environment,
    in_signature,
    listed,
    number_of,
    of_tensors,
    state_of,
)
from fabricamp.lightning.packages.fabric.contexts import ConvertedAtSetup, EmptyInit, default_dtype
from fabricamp.lightning.packages.fabric.lightning_modules import attach
from fabricamp.lightning.packages.fabric.wrappers import (
    _FabricDataLoader,
    _FabricModule,
    _FabricOptimizer,
    _unwrap_objects,
)
from fabricamp.loggers import Logger
from fabricamp.module import TrainingModule
from fabricamp.own_loop import Loop
from fabricamp.precision.level import OptLevel
from fabricamp.precision.named import TruePrecision, precision_from
from fabricamp.rng import global_seed, seed_everything
from fabricamp.strategies import SingleDeviceStrategy
from fabricamp.torch_private import uncompiled

_LOG = logging.getLogger("fabricamp")
_LOGGERS: dict[int, Any] = {}
"""Loggers that were used."""

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from fabricamp._utils.types import StateDict


class Fabric:
    """Lightning's names of a loop of one's own; ``fabricamp.Loop`` makes the steps.

    ``setup`` returns modules and optimizers to use in place of the given ones.  Optimizers, and the modules whose parameters they
    have, are prepared together at the first forward of one of these modules; later ones in a Loop of their own.  A module without
    an optimizer computes at the precision.  Ranks exchange gradients in ``optimizer.step()``, which also clears them.

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
        *,
        accelerator: Any = "auto",
        strategy: Any = "auto",
        devices: Any = "auto",
        num_nodes: int = 1,
        precision: Any = None,
        plugins: Any = None,
        callbacks: Any = None,
        loggers: Any = None,
    ) -> None:
        if precision is None and isinstance(strategy, SingleDeviceStrategy):
            precision = strategy.given_precision
        self._options: dict[str, Any] = {
            "accelerator": from_environment("accelerator", accelerator, "auto"),
            "strategy": from_environment("strategy", strategy, "auto"),
            "devices": from_environment("devices", devices, "auto"),
            "num_nodes": int(from_environment("num_nodes", num_nodes, 1)),
            "precision": from_environment("precision", precision, None) or "32-true",
            "plugins": plugins,
        }
        self._loop = self._new_loop()
        if self._loop._strategy.sharding.shards:
            self._loop.close()
            raise ConfigError(
                f"Fabric(strategy={strategy!r}): shards are gathered for forward and backward of a whole step, which "
                "fabricamp.Loop makes by step(fn, batch); give 'ddp', or write the loop with fabricamp.Loop"
            )
        self._callbacks = listed(callbacks)
        self._loggers = listed(loggers)
        self._modules: list[nn.Module] = []
        self._pending: list[Optimizer] = []
        self._loops: dict[int, Loop] = {}  # of modules and optimizers, once they are prepared
        self._held: list[object] = []  # so that no identity is given to another object
        self._last: Loop | None = None  # of the last forward with gradients
        precision_plugin = self._loop._trainer.precision_plugin
        level = precision_plugin.level if isinstance(precision_plugin, OptLevel) else None
        self._precision = precision_plugin
        vars(self.strategy)["precision"] = precision_plugin  # as strategies of Lightning have it
        self._input_dtype = None if level is None else level.cast_model_type or level.autocast
        self._casts_outputs = level is not None and (level.autocast is not None or level.cast_model_type is not None)

    def _new_loop(self) -> Loop:
        built = precision_from(self._options["precision"])
        if type(built) is not TruePrecision:
            return Loop(**self._options)
        return Loop(**{**self._options, "precision": ConvertedAtSetup(built.dtype)})

    # -- what a script sets up -----------------------------------------------------------------------------------------------------

    def launch(self, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Calls ``function(fabric, ...)``, if there is one; the processes have started when Fabric was constructed."""
        return None if function is None else function(self, *args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Override it in a subclass, for all code of a run."""

    def setup(
        self, module: nn.Module, *optimizers: Optimizer, scheduler: Any = None, move_to_device: bool = True, **_: Any
    ) -> Any:
        """Returns the module, its optimizers and a scheduler, to use in the loop."""
        wrapped = self._wrapped_module(module, move_to_device=move_to_device)
        stepped = list(map(self._wrapped, optimizers))
        if isinstance(module, TrainingModule):
            attach(module, self, stepped)
            if not any(one is module for one in self._callbacks):
                self._callbacks.append(module)
        self.call("on_after_setup", fabric=self, module=wrapped)
        if not optimizers:
            return wrapped
        return (wrapped, *stepped) if scheduler is None else (wrapped, *stepped, scheduler)

    def setup_module(self, module: nn.Module, move_to_device: bool = True, **_: Any) -> _FabricModule:
        """Returns the module to use in the loop."""
        found: _FabricModule = self.setup(module, move_to_device=move_to_device)
        return found

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Returns the optimizers to use in the loop: one, or a tuple."""
        wrapped = tuple(map(self._wrapped, optimizers))
        return wrapped[0] if len(wrapped) == 1 else wrapped

    def _wrapped_module(self, module: nn.Module, *, move_to_device: bool) -> _FabricModule:
        _check_given_once(module)
        inner, _ = uncompiled(module)
        if isinstance(self._precision, TruePrecision):
            inner.to(self._precision.dtype)
        if move_to_device:
            inner.to(self.device)
        self._modules.append(inner)
        return _FabricModule(self, module, inner)

    def _wrapped(self, optimizer: Optimizer) -> _FabricOptimizer:
        _check_given_once(optimizer)
        self._pending.append(optimizer)
        return _FabricOptimizer(self, optimizer)

    def setup_dataloaders(
        self, *loaders: Any, use_distributed_sampler: bool = True, move_to_device: bool = True
    ) -> Any:
        """Returns the loaders, each rank's share, with batches on the device: one, or a list."""
        if not loaders:
            raise ConfigError("setup_dataloaders got no loader; give it one or more")
        for one in loaders:
            _check_given_once(one)
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

    def _loop_of(self, one: nn.Module | Optimizer) -> Loop | None:
        """Returns the Loop of a module or an optimizer, prepared now if need be; None for a module that is not trained."""
        loop = self._loops.get(id(one))
        if loop is None and self._pending:
            trained = one.parameters() if isinstance(one, nn.Module) else _parameters_of([one])
            pending = {id(parameter) for parameter in _parameters_of(self._pending)}
            if any(id(parameter) in pending for parameter in trained):
                return self._prepare()
        return loop

    def _prepare(self) -> Loop:
        """Prepares the optimizers that were set up since the last time, and the modules whose parameters they have."""
        loop = self._new_loop() if self._loops else self._loop
        loose = {id(parameter): parameter for parameter in _parameters_of(self._pending)}
        modules: list[nn.Module] = []
        for module in dict.fromkeys(self._modules):
            own = [id(parameter) for parameter in module.parameters()]
            if any(number in loose for number in own):
                modules.append(module)
                for number in own:
                    loose.pop(number, None)
        if self._casts_outputs and any(id(module) in self._loops for module in modules):
            raise ConfigError(
                f"setup_optimizers, at precision {self._precision.name!r}, after the first forward of a module that has an "
                "optimizer already; set up all optimizers of a module before it"
            )
        if loose:  # parameters of modules that were not set up, such as a temperature
            modules.append(nn.ParameterList(loose.values()))
        parts = [*modules, *self._pending]
        loop.prepare(*parts)
        self._loops |= dict.fromkeys(map(id, parts), loop)
        self._held += parts
        self._pending = []
        self._last = loop
        return loop

    def _forward(self, module: nn.Module, function: Callable[[], Any]) -> Any:
        """Runs ``function``, which calls ``module`` or a method of it, at the precision."""
        loop = self._loop_of(module)
        if loop is not None:
            if torch.is_grad_enabled():
                self._last = loop
            return loop.forward(function)
        if isinstance(self._precision, TruePrecision):
            return self._precision.forward(function)
        with self.autocast():
            return function()

    # -- steps ---------------------------------------------------------------------------------------------------------------------

    def backward(self, tensor: Tensor, *_: Any, model: object = None, **kwargs: Any) -> None:
        """Runs backward on the scaled loss."""
        loop = self._prepare() if self._last is None and self._pending else self._last
        if loop is None:
            tensor.backward(**kwargs)
        else:
            loop.backward(tensor, **kwargs)

    def _update(self, optimizer: Optimizer) -> None:
        """Makes the step of an optimizer, and calls the callbacks' hook after it."""
        loop = self._loop_of(optimizer)
        assert loop is not None
        loop.update(optimizer)
        self.call("on_after_optimizer_step", strategy=self.strategy, optimizer=optimizer)

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
        loop = self._loop_of(inner)
        assert loop is not None
        precision = self._precision
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
        parameters = _parameters_of([inner])
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
        dtype = self._precision.level.autocast if isinstance(self._precision, OptLevel) else None
        with torch.autocast(self.device.type, dtype) if dtype is not None else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        """Makes modules within on the device, in the precision's dtype; ``empty_init`` leaves out torch's initializations."""
        with self.init_tensor(), EmptyInit() if empty_init else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def init_tensor(self) -> Iterator[None]:
        """Makes tensors within on the device, in the precision's dtype."""
        dtype = self._precision.dtype if isinstance(self._precision, TruePrecision) else torch.get_default_dtype()
        with self.device, default_dtype(dtype):
            yield

    # -- files ---------------------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, state: Mapping[str, Any], filter: Mapping[str, Any] | None = None) -> None:  # noqa: A002
        """Writes ``state``, with the state dicts of what has one, atomically on rank 0; ``filter`` is by name of entries."""
        chosen = check_filter(filter, state)
        content = {name: state_of(one, chosen.get(name)) for name, one in _unwrap_objects(dict(state)).items()}

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

    def load_raw(self, path: str | Path, obj: Any, strict: bool = True, *, weights_only: bool | None = None) -> None:
        """Loads the state dict in a file into a module or an optimizer."""
        inner = _unwrap_objects(obj)
        value = torch.load(path, map_location="cpu", weights_only=weights_only is not False)
        inner.load_state_dict(value, strict=strict) if isinstance(inner, nn.Module) else inner.load_state_dict(value)

    # -- ranks, values, words ------------------------------------------------------------------------------------------------------

    @property
    def strategy(self) -> Any:
        """The strategy, an object of fabricamp."""
        return self._loop._strategy

    @property
    def accelerator(self) -> Any:
        """The accelerator: a CPU or GPUs."""
        return CUDAAccelerator() if self.device.type == "cuda" else CPUAccelerator()

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
        """The loggers, which are closed when the program ends."""
        _LOGGERS.update((id(one), one) for one in self._loggers)
        return self._loggers

    @property
    def logger(self) -> Any:
        """The first logger."""
        return self.loggers[0]

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
        """Returns every rank's tensors or numbers, stacked; in one process as tensors."""
        if sync_grads:
            raise ConfigError("all_gather(sync_grads=True) is not offered; gather by torch.distributed.nn.all_gather")
        tensors = as_tensors(data, self.device)
        return tensors if self.world_size == 1 else of_tensors(tensors, self._loop.all_gather)

    def all_reduce(self, data: Any, group: object = None, reduce_op: str = "mean") -> Any:
        """Returns the tensors or numbers reduced over the ranks."""
        op = {"avg": "mean"}.get(str(reduce_op).lower(), str(reduce_op).lower())
        tensors = as_tensors(data, self.device)
        return (
            tensors if self.world_size == 1 else of_tensors(tensors, lambda tensor: self._loop.all_reduce(tensor, op))
        )

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
        """Calls the callbacks' method of this name, of those that have one, with the keywords that it takes."""
        for callback in self._callbacks:
            method = getattr(callback, hook_name, None)
            if callable(method):
                method(*args, **in_signature(method, kwargs))
            elif method is not None:
                _LOG.warning("%s.%s is no method, and is not called", type(callback).__name__, hook_name)

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Gives the loggers a value."""
        self.log_dict({name: value}, step)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Gives the loggers of rank 0 the values; tensors are read, which waits for the device."""
        if self._loggers and self.is_global_zero:
            values = {name: number_of(name, value) for name, value in metrics.items()}
            for one in self.loggers:
                one.log_metrics(metrics=values, step=step)

    @staticmethod
    def seed_everything(seed: int | None = None, workers: bool | None = None, verbose: bool = True) -> int:
        """Seeds Python, NumPy and torch; ``workers`` None seeds the loaders' workers by rank too."""
        return seed_everything(seed, workers=workers is not False, verbose=verbose)


def _parameters_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    return [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]


def _check_given_once(given: object) -> None:
    if isinstance(given, _FabricModule | _FabricOptimizer | _FabricDataLoader):
        raise ConfigError(f"setup got a {type(given).__name__} that setup has returned; give each object once")


@atexit.register
def _close_loggers() -> None:
    """Writes what loggers of this package still hold in memory."""
    for one in _LOGGERS.values():
        if isinstance(one, Logger):
            one.finalize("success")
            one.close()
