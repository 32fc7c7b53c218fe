"""torch's ``fully_shard`` as a strategy: each rank holds a shard of every parameter, gradient and optimizer state."""

from __future__ import annotations

import contextlib
import gc
import os
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fabricamp.errors import ConfigError
from fabricamp.ops.shards import is_shard
from fabricamp.ops.shards import whole as all_of
from fabricamp.strategies.exchange import DEFAULT_BUCKET_MB, Exchange
from fabricamp.strategies.fsdp_units import (
    Unit,
    described,
    gathering,
    of_classes,
    own_modules,
    refuse_second_order,
    units_of,
)
from fabricamp.strategies.meta_init import FirstValues, fills_others
from fabricamp.strategies.process_group import ProcessGroupStrategy
from fabricamp.strategies.tensor_parallel import TENSOR, checked, split_layers
from fabricamp.strategies.unused_parameters import listed
from fabricamp.torch_private import (
    checkpoint_activations,
    keep_whole_gradient,
    sharded_modules,
    sharded_parameters,
    whole_gradient,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from datetime import timedelta

    from fabricamp.strategies.base import ShardPlan


# ~~~ from strategies.fsdp_options: Checks of ``FSDP``'s options, before any process starts.


_ZERO_NAMES: Final = {"zero3": True, "zero2": False}


def checked_classes(name: str, given: object) -> list[type[nn.Module]]:
    """Returns the list of classes of option ``name``; raises :class:`ConfigError` for anything but module classes."""
    listed = list(given) if isinstance(given, (list, tuple, set)) else []
    wrong = [one for one in listed if not (isinstance(one, type) and issubclass(one, nn.Module))]
    if wrong or not isinstance(given, (list, tuple, set)) or (name == "units" and not listed):
        also = "'auto', or " if name == "units" else ""
        raise ConfigError(
            f"FSDP({name}={given!r:.200}) has to be {also}a list of classes of submodules, such as {name}=[Block]"
        )
    return listed


def checked_flag(value: object) -> bool:
    """Returns ``offload``; raises :class:`ConfigError` unless it is True or False."""
    if isinstance(value, bool):
        return value
    raise ConfigError(f"FSDP(offload={value!r}) has to be True (shards are in host memory) or False")


def checked_copies(value: object) -> int:
    """Returns ``replicate``; raises :class:`ConfigError` unless it is a whole number from 1."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise ConfigError(
        f"FSDP(replicate={value!r}) has to be a whole number from 1: how many copies of the module there are"
    )


def checked_reshard(value: object) -> bool | int:
    """Returns ``reshard_after_forward`` in torch's form; raises :class:`ConfigError` for a wrong value."""
    named = _ZERO_NAMES.get(value, value) if isinstance(value, str) else value
    if isinstance(named, bool) or (isinstance(named, int) and named > 1):
        return named
    raise ConfigError(
        f"FSDP(reshard_after_forward={value!r}) has to be True ('zero3'), False ('zero2'), or a number of ranks above 1 that "
        "divides that of all"
    )


# ~~~ from strategies.sharding: Undoes the changes of torch's ``fully_shard`` to a module after the run.


_TORCHS: Final = ("torch.distributed.fsdp.", "torch.distributed._composable.", "torch.distributed.tensor.")
_HOOKS: Final = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_OPTIONS: Final = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


class Undo:
    """Remembers the classes and attributes of modules before sharding, and restores them; parameters keep their values."""

    def __init__(self, module: nn.Module) -> None:
        self._before = [(one, type(one), set(vars(one))) for one in module.modules()]
        self._added: list[set[str]] = []
        self._also: list[Callable[[], None]] = []

    def also(self, give_back: Callable[[], None]) -> None:
        """Makes :meth:`undo` call ``give_back`` at its end."""
        self._also.append(give_back)

    def note(self) -> None:
        """Records the attributes added by sharding; call it right after sharding, so attributes added later stay."""
        self._added = [set(vars(one)) - names for one, _, names in self._before]

    def undo(self) -> None:
        """Restores the modules and removes torch's hooks; torch adds some of these only in the first forward."""
        for (one, kind, _), names in zip(self._before, self._added, strict=True):
            sharded_modules().pop(one, None)
            one.__class__ = kind
            for name in names:
                vars(one).pop(name, None)
            torchs = {key for table in _HOOKS for key, hook in vars(one)[table].items() if _is_torchs(hook)}
            for table in (*_HOOKS, *_OPTIONS):
                for key in torchs:
                    vars(one)[table].pop(key, None)
        for give_back in self._also:
            give_back()


def _is_torchs(hook: Any) -> bool:
    """Returns whether ``fully_shard`` or activation checkpointing registered the hook."""
    return str(getattr(getattr(hook, "hook", hook), "__module__", "")).startswith(_TORCHS)


def replace_shards(module: nn.Module, make: Callable[[Any], Tensor]) -> None:
    """Replaces each sharded parameter by a plain one from ``make``; shared parameters stay shared."""
    made: dict[int, nn.Parameter] = {}
    held = []  # keeps the old tensors alive, so their ids stay unique
    for one in module.modules():
        for name, parameter in one._parameters.items():
            if parameter is None or not is_shard(parameter):
                continue
            if id(parameter) not in made:
                held.append(parameter)
                made[id(parameter)] = nn.Parameter(make(parameter), requires_grad=parameter.requires_grad)
            one._parameters[name] = made[id(parameter)]


# ~~~ from strategies.whole_gradients: Full gradients, kept by each process during an accumulation if memory allows; one exchange at its end is then enough.


_SHARE: Final = 1 / 4
"""Fraction of the memory for full gradients, shards, their gradients and optimizer states; the rest is for activations."""
_BYTES_OF_PARTS: Final = 16
"""Bytes of a shard per parameter: value, gradient and two optimizer moments, in fp32."""


def memory_of(device: torch.device, processes: int) -> int:
    """Returns the bytes of a GPU, or of the host divided by its ``processes``; total memory, so a resumed run decides the same."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // processes


def fits(trained: int, sharing: int, memory: int) -> bool:
    """Returns whether ``trained`` bytes of full gradients (fp32 or wider) fit, if ``sharing`` ranks share a copy of the module."""
    return trained + _BYTES_OF_PARTS * trained / 4 / sharing <= _SHARE * memory


class WholeGradients:
    """A context in which backward keeps full gradients; also saves and restores them for an accumulation in progress."""

    def __init__(self, module: nn.Module, mesh: Any) -> None:
        from torch.distributed.fsdp import FSDPModule

        self._module = module
        self._mesh = mesh
        self._units: list[Any] = [one for one in module.modules() if isinstance(one, FSDPModule)]

    def __enter__(self) -> None:
        for one in self._units:
            one.set_requires_gradient_sync(False, recurse=False)

    def __exit__(self, *_: object) -> None:
        for one in self._units:
            one.set_requires_gradient_sync(True, recurse=False)

    def _named(self) -> Iterator[tuple[str, Any]]:
        for one in self._units:
            one.reshard()  # after it named_parameters() yields the shards
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        for one in self._units:
            for record in sharded_parameters(one):
                yield names[id(record.sharded_param)], record

    def stacked(self) -> dict[str, Tensor]:
        """Returns the kept gradients by name, each stacked over the ranks as a DTensor with one entry per rank."""
        found = {}
        for name, record in self._named():
            gradient = whole_gradient(record)
            if gradient is None:
                continue
            exchanged: Any = record.sharded_param.grad
            if exchanged is not None:  # resumed from an accumulation of another number of ranks, exchanged already
                gradient = gradient + exchanged.full_tensor()
            found[name] = self._stack(gradient.detach())
        return found

    def places(self) -> dict[str, Tensor]:
        """Returns tensors like those of :meth:`stacked`, for all parameters, without values."""
        found = {}
        for name, record in self._named():
            one = record.sharded_param
            found[name] = self._stack(torch.empty(one.shape, dtype=one.dtype, device=one.device))
        return found

    def take(self, stacked: Mapping[str, Any]) -> None:
        """Resumes an accumulation from the result of :meth:`stacked`."""
        for one in self._units:
            one.unshard()  # creates the gathered parameters: from torch 2.15 on they hold the gradients
            one.reshard()
        for name, record in self._named():
            keep_whole_gradient(record, stacked[name].to_local()[0] if name in stacked else None)

    def forget(self) -> None:
        """Drops the kept gradients."""
        for _, record in self._named():
            keep_whole_gradient(record, None)

    def _stack(self, gradient: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Shard

        own = gradient.unsqueeze(0)
        shape = torch.Size((self._mesh.size(), *gradient.shape))
        stride = torch.empty(shape, device="meta", dtype=own.dtype).stride()
        placements = [Shard(0)] * self._mesh.ndim
        return DTensor.from_local(own, self._mesh, placements, run_check=False, shape=shape, stride=stride)


_CPU: Final = torch.device("cpu")
_BASES: Final = ("fabricamp", "lightning", "pytorch_lightning")
_STEPS: Final = ("training_step", "validation_step", "test_step", "predict_step")


class FSDP(ProcessGroupStrategy):
    """Every process holds a shard of the module; a unit's parameters are gathered when it runs, and gradients are scattered.

    The engine is torch's ``fully_shard`` over all processes.  Updates, clipping and loss scaling work on the local shards, with
    one exchange of one number.  A checkpoint is a folder that all processes write; any number of processes can resume from it.
    After a run rank 0 has the full parameters, in host memory; the other ranks have them on the meta device.

    Args:
        units: "auto" finds repeated layers by structure; or a list of the units' classes.
        replicate: number of copies of the module, each sharded over an equal number of ranks (HSDP); copies exchange only
            gradients.
        reshard_after_forward: True (or "zero3") frees a unit's gathered parameters between forward and backward; False ("zero2")
            keeps them; a number reshards over this number of ranks, which keeps a larger shard.
        offload: keeps shards, gradients and optimizer states in host memory, and runs the update there; weights are moved to the
            GPU unit by unit.  Without loss scaling: at O0, O4 and O5.
        activation_checkpointing: classes of modules that recompute their activations in backward.
        parallelize: a function of the module and a mesh that splits layers with torch's ``parallelize_module``; numbers of
            modules that it changes (heads of an attention) are restored after the run.
        tensor_parallel: number of neighbouring ranks to split the layers over; they compute one batch together.
        timeout: seconds (or a timedelta) that a rank waits for the others; None is half an hour.

    Raises:
        ConfigError: for unknown options or wrong values.

    Example:
        >>> FSDP(reshard_after_forward="zero2").name
        'fsdp'
    """

    name: ClassVar[str] = "fsdp"
    owns_master_weights: ClassVar[bool] = True
    checkpoint_form: ClassVar[Literal["file", "folder"]] = "folder"

    def __init__(
        self,
        units: Literal["auto"] | Sequence[type[nn.Module]] = "auto",
        *,
        replicate: int = 1,
        reshard_after_forward: bool | int | Literal["zero2", "zero3"] = True,
        offload: bool = False,
        activation_checkpointing: Sequence[type[nn.Module]] = (),
        parallelize: Callable[[nn.Module, Any], object] | None = None,
        tensor_parallel: int = 1,
        timeout: float | timedelta | None = None,
    ) -> None:
        super().__init__(timeout=timeout)
        self.units = units if units == "auto" else checked_classes("units", units)
        self.activation_checkpointing = checked_classes("activation_checkpointing", activation_checkpointing)
        self.replicate, self.offload = checked_copies(replicate), checked_flag(offload)
        self.parallelize, self.tensor_parallel = parallelize, checked(parallelize, tensor_parallel)
        if self.offload and parallelize is not None:
            raise ConfigError("FSDP(offload=True, parallelize=...) is not offered: leave one of them out")
        self.reshard_after_forward = checked_reshard(reshard_after_forward)
        self._undo: Undo | None = None
        self._steps: dict[str, Any] = {}
        self._module: nn.Module | None = None
        self._trained: dict[str, bool] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._mesh: Any = None
        self._meshes: list[Any] = []
        self._whole: WholeGradients | None = None

    def shard_module(self, module: nn.Module, plan: ShardPlan) -> str:
        """Shards ``module`` unit by unit: fills meta tensors, broadcasts rank 0's values, then keeps this rank's shard.

        Returns a line for the log.
        """
        self._check_new(module)
        self._check_ranks()
        kind = type(module).__name__
        self.check_same_module(module)
        units = units_of(module, self.units)
        self._undo, self._module = Undo(module), module
        self._trained = {name: one.requires_grad for name, one in module.named_parameters()}
        self._dtypes = {name: one.dtype for name, one in module.named_parameters()}
        for _, one in of_classes(module, self.activation_checkpointing, "activation_checkpointing"):
            checkpoint_activations(one)  # before the hooks that gather
        missing = self.broadcast([name for name, one in _tensors_of(module) if one.is_meta])
        together = self.rank == 0 and bool(missing) and fills_others(module, {one.module for one in units})
        first = FirstValues(module, _CPU if together else self.device, fills=self.rank == 0)
        if together:
            first.give(module.modules())  # in host memory
        exchange = Exchange(1, DEFAULT_BUCKET_MB)
        sizes, kinds = [], described(units)
        self._mesh = self._mesh_of_ranks()
        for unit in units:
            modules = own_modules(unit, units)
            first.give(modules)
            self._share(modules, exchange)
            self._cast(modules, plan)
            sizes.append(unit.size)
            if self.parallelize is None:
                self._shard(unit, modules, plan, is_root=unit is units[-1])
        if self.parallelize is not None:
            self._undo.also(split_layers(module, self._meshes[1], self.parallelize))
            for unit in units:
                self._shard(unit, own_modules(unit, units), plan, is_root=unit is units[-1])
        unfilled = self.broadcast(first.unfilled)
        if not plan.filled_later:
            _refuse_unfilled(unfilled, kind)
        self._undo.note()
        self._undo.also(refuse_second_order(units))
        self._wrap_steps(module)
        accumulation = self._choose_accumulation(module) if plan.accumulates else ""
        return self._told(module, kinds, sizes) + accumulation

    def unshard_module(self, module: nn.Module, *, whole: bool = True) -> None:
        """Restores the plain module; with ``whole`` rank 0 has the full parameters, in host memory."""
        undo, self._undo, self._module, self._whole = self._undo, None, None, None
        if undo is None:
            return
        for name, before in self._steps.items():
            vars(module).pop(name, None)
            if before is not None:
                vars(module)[name] = before
        self._steps = {}
        _reshard(module)
        # As precisions restore a module: parameters are at least as wide as originally and as in training.
        dtypes = {
            id(one): torch.promote_types(one.dtype, self._dtypes[name]) for name, one in module.named_parameters()
        }

        def plain(parameter: Any) -> Tensor:
            full, dtype = all_of(parameter.detach()) if whole else None, dtypes[id(parameter)]
            if full is None or self.rank != 0:
                return torch.empty(parameter.shape, dtype=dtype, device="meta")
            return full.to("cpu", dtype)

        replace_shards(module, plain)
        undo.undo()

    def place_module(self, module: nn.Module) -> None:
        """Moves the module to the device; offloaded shards stay in host memory."""
        if not self.offload:
            super().place_module(module)

    def share_module(self, module: nn.Module) -> None:
        """Broadcasts rank 0's buffers; parameters are sharded already."""
        self.share_buffers(module)

    def settle_module(self, module: nn.Module) -> None:
        """Reshards parameters that a forward without a backward has left gathered."""
        _reshard(module)

    def wrap_module(
        self, module: nn.Module, step: Callable[..., Any], *, automatic: bool, accumulates: bool = False
    ) -> Callable[..., Any]:
        """Returns ``step``, which gathers parameters itself; raises :class:`ConfigError` for manual optimization."""
        if not automatic:
            raise ConfigError(
                "strategy='fsdp' with automatic_optimization=False is not offered: backward has to come after the step; leave "
                "backward and step to the Trainer, or use strategy='ddp'"
            )
        return step

    def rewrap_module(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``step``; raises :class:`ConfigError` if parameters were frozen or unfrozen since they were sharded."""
        assert self._module is not None
        _reshard(self._module)  # a validation may have left parameters gathered
        changed = [
            name for name, one in self._module.named_parameters() if one.requires_grad != self._trained.get(name)
        ]
        if changed:
            raise ConfigError(
                f"{listed(changed)} got another requires_grad since the run began, which strategy='fsdp' cannot follow: freeze in "
                "__init__ or configure_model, or use strategy='ddp'"
            )
        return step

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context that keeps full gradients local if memory allows; else they are exchanged after each micro-batch."""
        return contextlib.nullcontext() if self._whole is None else self._whole

    def note_window(self, *, begun: bool) -> None:
        """Drops the full gradients of a dropped accumulation."""
        if self._whole is not None and not begun:
            self._whole.forget()

    def whole_gradients(self) -> dict[str, Tensor]:
        """Returns the full gradients of the accumulation in progress, by name, stacked over the ranks."""
        return {} if self._whole is None else self._whole.stacked()

    def places_of_whole_gradients(self) -> dict[str, Tensor]:
        """Returns tensors like those of :meth:`whole_gradients`, without values; empty if full gradients are not kept."""
        return {} if self._whole is None else self._whole.places()

    def take_whole_gradients(self, stacked: dict[str, Tensor]) -> None:
        """Resumes an accumulation from the result of :meth:`whole_gradients` on the same number of ranks."""
        if self._whole is not None:
            self._whole.take(stacked)

    def refuses_graph(self) -> str:
        """Returns the reason: steps are never captured with this strategy."""
        return "strategy 'fsdp' is not captured: its exchanges are torch's; leave cuda_graph out"

    def teardown(self) -> None:
        """Drops the module, and destroys the process group if :meth:`setup_environment` made it."""
        self._undo, self._module, self._whole, self._steps = None, None, None, {}
        # No reference to the group may remain: torch's FSDP states are reference cycles, and optimizers hold the mesh too.
        gc.collect()
        for mesh in self._meshes:
            vars(mesh).get("_pg_registry", {}).clear()  # in newer versions of torch
        self._mesh, self._meshes = None, []
        super().teardown()

    def _check_new(self, module: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        if any(isinstance(one, FSDPModule) for one in module.modules()):
            raise ConfigError(
                f"{type(module).__name__} is sharded already, by fully_shard or a run that has failed; build it anew, and leave "
                "the sharding to FSDP(units=[...])"
            )

    def _check_ranks(self) -> None:
        copies = self.replicate * self.tensor_parallel
        after, (sharing, rest) = self.reshard_after_forward, divmod(self.world_size, copies)
        if rest:
            split = f", tensor_parallel={self.tensor_parallel}" if self.tensor_parallel > 1 else ""
            raise ConfigError(
                f"FSDP(replicate={self.replicate}{split}) has to divide the number of ranks, {self.world_size}; replicate is that "
                "of machines"
            )
        if not isinstance(after, bool) and (after >= sharing or sharing % after):
            raise ConfigError(
                f"FSDP(reshard_after_forward={after}) has to divide the number of ranks that share a copy, {sharing}, and be less; "
                "or give True or False"
            )

    def _mesh_of_ranks(self) -> Any:
        """Returns the mesh of the ranks; neighbouring ranks share a copy of the module."""
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        sharing = self.world_size // (self.replicate * self.tensor_parallel)
        sizes = {"replicate": self.replicate, "shard": sharing, TENSOR: self.tensor_parallel}
        names = tuple(name for name, size in sizes.items() if size > 1 or name == "shard")
        if len(names) == 1:
            self._meshes = [init_device_mesh(self.device.type, (sharing,), mesh_dim_names=names)]
            return self._meshes[0]
        ranks = torch.arange(self.world_size, dtype=torch.int64, device="cpu").view([sizes[one] for one in names])
        # init_device_mesh would split NCCL's group, which crashes in a process that had another group before (pytorch#192109).
        groups = [
            dist.new_subgroups_by_enumeration(_neighbours_along(ranks, place), timeout=self.timeout)[0]
            for place in range(len(names))
        ]
        mesh = DeviceMesh.from_group(groups, self.device.type, mesh=ranks, mesh_dim_names=names)
        self._meshes = [mesh] if names[-1] != TENSOR else [mesh[names[:-1]], mesh[TENSOR], mesh]
        return self._meshes[0]

    def _share(self, modules: Sequence[nn.Module], exchange: Exchange) -> None:
        """Broadcasts rank 0's values of the modules' own tensors, on the device; with ``parallelize`` they end in host memory."""
        own = {id(one): one for module in modules for one in (*_own(module._parameters), *_own(module._buffers))}
        for tensor in own.values():
            tensor.data = tensor.data.to(self.device)
        if own and self.world_size > 1:
            exchange.broadcast([one.detach() for one in own.values()])
        if self.parallelize is not None:
            for tensor in own.values():
                tensor.data = tensor.data.to(_CPU)

    def _cast(self, modules: Sequence[nn.Module], plan: ShardPlan) -> None:
        """Casts the modules' own trained parameters to ``stored_dtype``; frozen ones keep their dtype."""
        if plan.stored_dtype is None:
            return
        kept = {id(one) for module in plan.kept for one in module.parameters(recurse=False)}
        for module in modules:
            for one in module.parameters(recurse=False):
                narrow = one.is_floating_point() and one.dtype != torch.float64
                if one.requires_grad and narrow and id(one) not in kept:
                    one.data = one.data.to(plan.stored_dtype)

    def _shard(self, unit: Unit, modules: Sequence[nn.Module], plan: ShardPlan, *, is_root: bool) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        place = CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if self.offload else OffloadPolicy()
        half = MixedPrecisionPolicy(
            param_dtype=plan.compute_dtype,
            reduce_dtype=plan.compute_dtype and torch.promote_types(plan.compute_dtype, torch.float32),
            cast_forward_inputs=False,  # the precision casts inputs
        )
        full = MixedPrecisionPolicy(cast_forward_inputs=False)
        after: bool | int | None = self.reshard_after_forward
        for one in modules:
            if one in plan.kept and one is not unit.module and next(one.parameters(recurse=False), None) is not None:
                fully_shard(one, mesh=self._mesh, reshard_after_forward=after, mp_policy=full, offload_policy=place)
        # The root's parameters are needed again when backward begins; None lets torch keep them gathered.
        after = None if is_root and after is not False else after
        policy = full if unit.module in plan.kept else half
        options = {"mesh": self._mesh, "reshard_after_forward": after, "mp_policy": policy, "offload_policy": place}
        fully_shard(unit.module, **options)

    def _wrap_steps(self, module: nn.Module) -> None:
        """Makes each of the user's steps gather the parameters outside of all units, as a forward does."""
        for name in _STEPS:
            if callable(getattr(module, name, None)) and _is_written(module, name):
                self._steps[name] = vars(module).get(name)
                vars(module)[name] = gathering(module, name)

    def _choose_accumulation(self, module: nn.Module) -> str:
        """Decides when gradients of an accumulation are exchanged: at its end or per micro-batch; returns words for the log."""
        trained = sum(max(4, one.element_size()) * one.numel() for one in module.parameters() if one.requires_grad)
        memory = memory_of(self.device, self.environment.local_world_size)
        here = not self.offload and self.parallelize is None
        fit = here and fits(trained, self.world_size // self.replicate, memory)
        if not min(self.all_gather_object(fit)):
            return f"; gradients are exchanged after each micro-batch: full gradients would take {_bytes(trained)}"
        self._whole = WholeGradients(module, self._mesh)
        return f"; full gradients are accumulated, {_bytes(trained)}, and exchanged at the end of a step"

    def _told(self, module: nn.Module, kinds: str, sizes: Sequence[int]) -> str:
        here = sum(one._local_tensor.nbytes for one in module.parameters())  # type: ignore[attr-defined]  # DTensors
        kept = "" if self.reshard_after_forward is True else f", reshard_after_forward={self.reshard_after_forward}"
        kept += f", {self.replicate} copies" if self.replicate > 1 else ""
        kept += f", layers split over {self.tensor_parallel} ranks" if self.tensor_parallel > 1 else ""
        kept += ", shards in host memory" if self.offload else ""
        return (
            f"fsdp: {kinds}; {_bytes(here)} of {_bytes(sum(sizes))} of weights on rank 0, at most {_bytes(max(sizes))} "
            f"gathered at once{kept}"
        )


def _neighbours_along(ranks: Tensor, dimension: int) -> list[list[int]]:
    """Returns groups of ranks that differ only in this dimension of the mesh."""
    found: list[list[int]] = ranks.transpose(dimension, -1).reshape(-1, ranks.shape[dimension]).tolist()
    return found


def _refuse_unfilled(names: Sequence[str], kind: str) -> None:
    if names:
        raise ConfigError(
            f"{listed(names)} of {kind} were built on the meta device, and no module gives them values: "
            "write reset_parameters(self), or init_weights(self), in the class that owns them, or give ckpt_path"
        )


def _tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _own(table: dict[str, Any]) -> list[Tensor]:
    return [one for one in table.values() if one is not None]


def _reshard(module: nn.Module) -> None:
    from torch.distributed.fsdp import FSDPModule

    for one in module.modules():
        if isinstance(one, FSDPModule):
            one.reshard()


def _is_written(module: nn.Module, name: str) -> bool:
    """Returns whether the user's class defines this step, not only fabricamp's or Lightning's base class."""
    owner = next((one for one in type(module).__mro__ if name in vars(one)), None)
    return name in vars(module) or (owner is not None and owner.__module__.split(".")[0] not in _BASES)


def _bytes(number: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number} bytes"
