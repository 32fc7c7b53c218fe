"""Fully sharded data parallel (torch's ``fully_shard``): each rank holds a shard of parameters, gradients and optimizer states.

In this order: the strategy; the full gradients that it keeps during an accumulation; the root
module in a training step; the way back to a plain module after a run; the checks of its options.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fabricamp.arguments.checks import check_flag, check_number
from fabricamp.errors import ConfigError
from fabricamp.ops.bridge import runs_kernels
from fabricamp.ops.peer_memory import NO_TURN
from fabricamp.ops.shards import is_shard
from fabricamp.ops.shards import whole as full_tensor
from fabricamp.strategies.capabilities import Sharding
from fabricamp.strategies.exchange import DEFAULT_BUCKET_MB, Exchange
from fabricamp.strategies.fsdp_collectives import ComputesMemory, asked_exchange, peer_memory_of, replace_collectives
from fabricamp.strategies.fsdp_units import (
    Unit,
    described,
    layers_to_name,
    own_modules,
    refuse_second_order,
    stays_gathered,
    units_of,
)
from fabricamp.strategies.meta_init import FirstValues, digest_of, refuse_unfilled
from fabricamp.strategies.process_group import ProcessGroupStrategy
from fabricamp.strategies.tensor_parallel import TENSOR, checked_tensor_parallel, split_layers
from fabricamp.strategies.unused_parameters import listed
from fabricamp.torch_private import (
    abandon_sharded_step,
    current_stream_is_capturing,
    keep_whole_gradient,
    sharded_modules,
    sharded_parameters,
    streams_of_sharding,
    whole_gradient,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from datetime import timedelta

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

    from fabricamp._utils.types import Step
    from fabricamp.gradients.flat import Gradients
    from fabricamp.gradients.memory import GradientMemory
    from fabricamp.ops.peer_memory import PeerBuffers
    from fabricamp.strategies.capabilities import ShardPlan
    from fabricamp.strategies.fsdp_collectives import PeerMemory


_CPU: Final = torch.device("cpu")
_LIGHTNINGS: Final = ("lightning", "pytorch_lightning")
_STEPS: Final = ("training_step", "validation_step", "test_step", "predict_step")


class FSDP(ProcessGroupStrategy, Sharding):
    """Every process holds a shard of the module; a unit's parameters are gathered when it runs, and gradients are scattered.

    The engine is torch's ``fully_shard`` over all processes.  Updates, clipping and loss scaling work on the local shards, with
    one exchange of one number.  A checkpoint is a folder that all processes write; any number of processes can resume from it.
    After a run rank 0 has the full parameters, in host memory; the other ranks have them on the meta device.

    GPUs of one machine that reach each other's memory exchange weights and gradients by it; the environment variable
    ``FABRICAMP_FSDP_EXCHANGE=collective`` leaves this to NCCL.

    Args:
        units: "auto" finds repeated layers by structure; or a list of the units' classes, and names of single ones as in
            ``named_modules()``.  The rest is gathered for a whole step.
        replicate: number of copies of the module, each sharded over an equal number of ranks (HSDP); copies exchange only
            gradients.
        reshard_after_forward: True (or "zero3") frees a unit's gathered parameters between forward and backward; False ("zero2")
            keeps them; a number reshards over this number of ranks, which keeps a larger shard.
        offload: keeps shards, gradients and optimizer states in host memory, and runs the update there; weights are moved to the
            GPU unit by unit.  Without loss scaling: at O0, O3, O4 and O5.
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
    shards: ClassVar[bool] = True
    owns_master_weights: ClassVar[bool] = True

    def __init__(
        self,
        units: Literal["auto"] | Sequence[type[nn.Module] | str] = "auto",
        *,
        replicate: int = 1,
        reshard_after_forward: bool | int | Literal["zero2", "zero3"] = True,
        offload: bool = False,
        parallelize: Callable[[nn.Module, DeviceMesh], object] | None = None,
        tensor_parallel: int = 1,
        timeout: float | timedelta | None = None,
    ) -> None:
        super().__init__(timeout=timeout)
        asked_exchange()  # raises for a wrong value
        self.units = _checked_units(units)
        self.replicate = check_number("replicate", replicate, owner="FSDP", least=1)
        self.offload = check_flag("offload", offload, owner="FSDP")
        self.parallelize = parallelize
        self.tensor_parallel = checked_tensor_parallel(parallelize, tensor_parallel)
        if self.offload and parallelize is not None:
            raise ConfigError("FSDP(offload=True, parallelize=...) is not offered: leave one of them out")
        self.reshard_after_forward = _checked_reshard(reshard_after_forward)
        self._undo: Undo | None = None
        self._steps: dict[str, Step | None] = {}
        self._module: nn.Module | None = None
        self._trained: dict[str, bool] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._mesh: DeviceMesh | None = None
        self._meshes: list[DeviceMesh] = []
        self._cast_units: list[tuple[Any, torch.dtype]] = []
        """The units whose parameters are gathered in a dtype of the precision's, and this dtype."""
        self._whole: WholeGradients | None = None
        self._last: Any = None
        """A unit that a training step leaves gathered between forward and backward, which begins with it; or None."""
        self._of_computes: ComputesMemory | None = None
        """Where gradients are scattered to; None: in memory of torch's stream for it."""
        self._peers: PeerMemory | None = None
        """The memory that the ranks read of each other; None if they do not."""

    def shard_module(self, module: nn.Module, plan: ShardPlan) -> str:
        """Shards ``module`` unit by unit: fills meta tensors, broadcasts rank 0's other values, then keeps this rank's shard.

        Returns a line for the log.
        """
        self._check_new(module)
        self._check_ranks()
        self.check_same_module(module)
        units = units_of(module, self.units)
        # Taken before fully_shard, which gives each sharded module a class of its own.
        module_class = type(module).__name__
        unit_classes = described(units)
        to_name = layers_to_name(units)

        self._undo = Undo(module)
        self._cast_units = []
        self._peers = None
        self._of_computes = None
        self._last = stays_gathered(units, self.units) if self.reshard_after_forward is True else None
        self._module = module
        self._trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
        self._dtypes = {name: parameter.dtype for name, parameter in module.named_parameters()}

        first_values = FirstValues.together(module, self)
        self._mesh = self._mesh_of_ranks()
        sizes = []
        for unit in units:
            modules = own_modules(unit, units)
            self._share(modules, first_values.fill(modules))
            self._cast(modules, plan)
            sizes.append(unit.size)
            if self.parallelize is None:
                self._shard(unit, modules, plan, is_root=unit is units[-1])
        if self.parallelize is not None:
            # parallelize gets the full module; fully_shard then shards the tensors that it has split.
            self._undo.also(split_layers(module, self._meshes[1], self.parallelize))
            for unit in units:
                self._shard(unit, own_modules(unit, units), plan, is_root=unit is units[-1])

        if not plan.filled_later:
            refuse_unfilled(first_values.unfilled, module_class)
        self._undo.note()
        self._undo.also(refuse_second_order(units))
        self._wrap_steps(module)
        line = self._log_line(module, unit_classes, sizes, to_name)
        return line + self._choose_accumulation(module) if plan.accumulates else line

    def _check_new(self, module: nn.Module) -> None:
        if _sharded_units(module):
            raise ConfigError(
                f"{type(module).__name__} is sharded already, by fully_shard or a run that has failed; build it anew, and leave "
                "the sharding to FSDP(units=[...])"
            )
        scalars = [name for name, parameter in module.named_parameters() if parameter.ndim == 0]
        if scalars:
            raise ConfigError(
                f"fsdp shards parameters along their first dimension, and {', '.join(scalars):.300} of {type(module).__name__} "
                "has none; give it one element, as nn.Parameter(torch.zeros(1)), or take strategy='ddp'"
            )

    def _check_ranks(self) -> None:
        sharing, remainder = divmod(self.world_size, self.replicate * self.tensor_parallel)
        if remainder:
            split = f", tensor_parallel={self.tensor_parallel}" if self.tensor_parallel > 1 else ""
            raise ConfigError(
                f"FSDP(replicate={self.replicate}{split}) has to divide the number of ranks, {self.world_size}; replicate is that "
                "of machines"
            )
        after = self.reshard_after_forward
        if not isinstance(after, bool) and (after >= sharing or sharing % after):
            raise ConfigError(
                f"FSDP(reshard_after_forward={after}) has to divide the number of ranks that share a copy, {sharing}, and be less; "
                "or give True or False"
            )

    def _mesh_of_ranks(self) -> DeviceMesh:
        """Returns the mesh of the ranks; neighbouring ranks share a copy of the module."""
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        sharing = self.world_size // (self.replicate * self.tensor_parallel)
        sizes = {"replicate": self.replicate, "shard": sharing, TENSOR: self.tensor_parallel}
        names = tuple(name for name, size in sizes.items() if size > 1 or name == "shard")
        if len(names) == 1:
            self._meshes = [init_device_mesh(self.device.type, (sharing,), mesh_dim_names=names)]
            return self._meshes[0]
        ranks = torch.arange(self.world_size, dtype=torch.int64, device="cpu").view([sizes[name] for name in names])
        # init_device_mesh would split NCCL's group, which crashes in a process that had another group before (pytorch#192109).
        groups = [
            dist.new_subgroups_by_enumeration(_neighbours_along(ranks, dimension), timeout=self.timeout)[0]
            for dimension in range(len(names))
        ]
        mesh = DeviceMesh.from_group(groups, self.device.type, mesh=ranks, mesh_dim_names=names)
        if names[-1] == TENSOR:
            self._meshes = [mesh[names[:-1]], mesh[TENSOR], mesh]
        else:
            self._meshes = [mesh]
        return self._meshes[0]

    def _share(self, modules: Sequence[nn.Module], filled: Sequence[Tensor]) -> None:
        """Broadcasts rank 0's values of the modules' own tensors, on the device; with ``parallelize`` they end in host memory.

        Those that every rank has ``filled`` itself are broadcast only where ranks differ.
        """
        # By id, because modules may share a tensor.
        tensors = {}
        for module in modules:
            # Not by parameters() and buffers(): a user's class may override these, and leave some out.
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    tensors[id(tensor)] = tensor
        for tensor in tensors.values():
            tensor.data = tensor.data.to(self.device)
        if self.world_size > 1:
            equal = set(map(id, self._equal_everywhere(filled)))
            different = [tensor.detach() for tensor in tensors.values() if id(tensor) not in equal]
            if different:
                # Each time a new one: it holds what it has exchanged, and a unit's full values are dropped when it is sharded.
                Exchange(1, DEFAULT_BUCKET_MB).broadcast(different)
        if self.parallelize is not None:
            # Sharding starts only when all units have their values, and the device may be too small for all of them.
            for tensor in tensors.values():
                tensor.data = tensor.data.to(_CPU)

    def _equal_everywhere(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns those of ``tensors`` of which all ranks have the same bits; every rank calls it with as many."""
        if not tensors:
            return []
        digests = self.all_gather(torch.stack([digest_of(tensor) for tensor in tensors]))
        equal = (digests == digests[0]).all(dim=0).tolist()
        return [tensor for tensor, is_equal in zip(tensors, equal, strict=True) if is_equal]

    def _cast(self, modules: Sequence[nn.Module], plan: ShardPlan) -> None:
        """Casts the modules' own trained parameters to ``stored_dtype``; frozen ones keep their dtype."""
        if plan.stored_dtype is None:
            return
        kept = {id(parameter) for module in plan.kept for parameter in module.parameters(recurse=False)}
        for module in modules:
            for parameter in module.parameters(recurse=False):
                narrow = parameter.is_floating_point() and parameter.dtype != torch.float64
                if parameter.requires_grad and narrow and id(parameter) not in kept:
                    parameter.data = parameter.data.to(plan.stored_dtype)

    def _shard(self, unit: Unit, modules: Sequence[nn.Module], plan: ShardPlan, *, is_root: bool) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if self.offload else OffloadPolicy()
        half = MixedPrecisionPolicy(
            param_dtype=plan.compute_dtype,
            reduce_dtype=plan.compute_dtype and torch.promote_types(plan.compute_dtype, torch.float32),
            cast_forward_inputs=False,  # the precision casts inputs
        )
        full = MixedPrecisionPolicy(cast_forward_inputs=False)
        after: bool | int | None = self.reshard_after_forward
        # torch gathers the parameters of one call in one dtype: modules that keep theirs get a call of their own.
        together = []
        for module in modules:
            has_parameters = next(module.parameters(recurse=False), None) is not None
            if module in plan.kept and module is not unit.module and has_parameters:
                self._refuse_several_dtypes([module])
                fully_shard(
                    module, mesh=self._mesh, reshard_after_forward=after, mp_policy=full, offload_policy=offload
                )
            else:
                together.append(module)
        self._refuse_several_dtypes(together)
        if is_root and after is not False:
            # The root's parameters are needed again when backward begins; None lets torch keep them gathered.
            after = None
        policy = full if unit.module in plan.kept else half
        if policy.param_dtype is not None:
            self._cast_units.append((unit.module, policy.param_dtype))
        fully_shard(unit.module, mesh=self._mesh, reshard_after_forward=after, mp_policy=policy, offload_policy=offload)

    def _refuse_several_dtypes(self, modules: Sequence[nn.Module]) -> None:
        """Raises :class:`ConfigError` if trained parameters of ``modules`` themselves, gathered by one call, differ in dtype."""
        of_dtype: dict[torch.dtype, Tensor] = {}
        for module in modules:
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad:
                    of_dtype.setdefault(parameter.dtype, parameter)
        if len(of_dtype) < 2:
            return
        assert self._module is not None
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        listed_names = " and ".join([f"{names[id(parameter)]} ({dtype})" for dtype, parameter in of_dtype.items()])
        raise ConfigError(
            f"strategy='fsdp' gathers {listed_names} together, which takes one dtype; give complex parameters a module of their "
            "own (with a forward) and others the same dtype, or use strategy='ddp'"
        )

    def _wrap_steps(self, module: nn.Module) -> None:
        """Makes each of the user's steps gather the parameters outside of all units, as a forward does."""
        from torch.distributed.fsdp import register_fsdp_forward_method

        for name in _STEPS:
            if callable(getattr(module, name, None)) and _is_written(module, name):
                self._steps[name] = vars(module).get(name)
                written = getattr(module, name)
                if name == "training_step":
                    root = RootOfSteps(module, self._left_gathered(module), self._begin_step, self._last)
                    vars(module)[name] = root.without_hooks(written)
                    register_fsdp_forward_method(module, name)
                    wrapped = root.gathered_for(getattr(module, name))
                else:
                    register_fsdp_forward_method(module, name)
                    wrapped = functools.partial(getattr(module, name))
                # With the step's own signature: torch's wrapper shows one argument less.
                vars(module)[name] = functools.wraps(written)(wrapped)

    def _left_gathered(self, module: Any) -> list[FSDPModule]:
        """Returns the units that a forward without a backward leaves gathered, or in larger shards."""
        if self.reshard_after_forward is not True:
            return _sharded_units(module)
        return [module] if self._last is None else [module, self._last]

    def _choose_accumulation(self, module: nn.Module) -> str:
        """Decides when gradients of an accumulation are exchanged: at its end or per micro-batch; returns words for the log."""
        trained = sum(
            max(4, parameter.element_size()) * parameter.numel()
            for parameter in module.parameters()
            if parameter.requires_grad
        )
        memory = memory_of(self.device, self.environment.local_world_size)
        possible = not self.offload and self.parallelize is None
        fit = possible and fits(trained, self.world_size // self.replicate, memory)
        # Machines may have different memory, and all ranks have to exchange alike.
        if not min(self.all_gather_object(fit)):
            return f"; gradients are exchanged after each micro-batch: full gradients would take {_bytes(trained)}"
        assert self._mesh is not None, "shard_module has made it"
        self._whole = WholeGradients(module, self._mesh)
        return f"; full gradients are accumulated, {_bytes(trained)}, and exchanged at the end of a step"

    def _log_line(self, module: nn.Module, unit_classes: str, sizes: Sequence[int], to_name: Sequence[str]) -> str:
        local = sum(parameter._local_tensor.nbytes for parameter in module.parameters())  # type: ignore[attr-defined]  # DTensors
        options = ""
        if self.reshard_after_forward is not True:
            options += f", reshard_after_forward={self.reshard_after_forward}"
        if self.replicate > 1:
            options += f", {self.replicate} copies"
        if self.tensor_parallel > 1:
            options += f", layers split over {self.tensor_parallel} ranks"
        if self.offload:
            options += ", shards in host memory"
        if to_name:
            # Not by themselves: a step may read a weight of the rest outside of its layer's forward, as a tied head does.
            options += (
                f"; the rest, {_bytes(sizes[-1])}, stays gathered for a whole step: if layers in it are only called, name them, "
                f"FSDP(units=[..., {', '.join(map(repr, to_name))}])"
            )
        return (
            f"fsdp: {unit_classes}; {_bytes(local)} of {_bytes(sum(sizes))} of weights on rank 0, at most {_bytes(max(sizes))} "
            f"gathered at once{options}"
        )

    def place_module(self, module: nn.Module) -> None:
        """Moves the module to the device; offloaded shards stay in host memory."""
        if not self.offload:
            super().place_module(module)

    def share_module(self, module: nn.Module) -> None:
        """Broadcasts rank 0's buffers; parameters are sharded already, and from now on their shards stay the same tensors."""
        self.share_buffers(module)
        self._replace_collectives()

    def _replace_collectives(self) -> None:
        """Makes kernels cast shards and gradients where they are copied, and the ranks read each other's memory."""
        sharing = self.world_size // (self.replicate * self.tensor_parallel)
        # torch takes larger shards, offloaded ones and parts of split layers through other functions.
        plain = isinstance(self.reshard_after_forward, bool) and not self.offload and self.parallelize is None
        if sharing == 1 or not plain or not self._cast_units or not runs_kernels(self.device):
            return
        assert self._undo is not None, "shard_module has made it"
        assert self._mesh is not None
        peers = peer_memory_of(self._cast_units, self._mesh.get_group("shard"), self.device)
        # With copies, gradients cross a third stream.
        self._of_computes = ComputesMemory() if self.replicate == 1 and self.device.type == "cuda" else None
        self._undo.also(replace_collectives(self._cast_units, peers, self._of_computes))
        self._peers = peers

    def allows_inference_mode(self) -> bool:
        """Returns False where a shard is the whole parameter: torch then reads version counters, which that mode leaves out."""
        return self.world_size > self.replicate * self.tensor_parallel

    def settle_module(self, module: nn.Module) -> None:
        """Reshards parameters that a forward without a backward has left gathered."""
        _reshard(module)

    def wrap_module(self, module: nn.Module, step: Step, *, automatic: bool, accumulates: bool = False) -> Step:
        """Returns ``step``, which gathers parameters itself; raises :class:`ConfigError` for manual optimization."""
        if not automatic:
            raise ConfigError(
                "strategy='fsdp' with automatic_optimization=False is not offered: backward has to come after the step; leave "
                "backward and step to the Trainer, or use strategy='ddp'"
            )
        return step

    def rewrap_module(self, step: Step) -> Step:
        """Returns ``step``; raises :class:`ConfigError` if parameters were frozen or unfrozen since they were sharded."""
        assert self._module is not None
        _reshard(self._module)  # a validation may have left parameters gathered
        changed = [
            name
            for name, parameter in self._module.named_parameters()
            if parameter.requires_grad != self._trained.get(name)
        ]
        if changed:
            raise ConfigError(
                f"{listed(changed)} changed requires_grad after the run began, which strategy='fsdp' does not support: freeze in "
                "__init__ or configure_model, or use strategy='ddp'"
            )
        return step

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context that keeps full gradients local if memory allows; else they are exchanged after each micro-batch."""
        return contextlib.nullcontext() if self._whole is None else self._whole

    def note_window(self, *, begun: bool) -> None:
        """Drops the full gradients of a dropped accumulation."""
        if self._whole is not None and not begun:
            self._whole.drop()

    def whole_gradients(self) -> dict[str, Tensor]:
        """Returns the full gradients of the accumulation in progress, by name, stacked over the ranks."""
        return {} if self._whole is None else self._whole.stacked()

    def places_of_whole_gradients(self) -> dict[str, Tensor]:
        """Returns tensors like those of :meth:`whole_gradients`, without values; empty if full gradients are not kept."""
        return {} if self._whole is None else self._whole.placeholders()

    def take_whole_gradients(self, stacked: dict[str, Tensor]) -> None:
        """Resumes an accumulation from the result of :meth:`whole_gradients` on the same number of ranks."""
        if self._whole is not None:
            self._whole.restore(stacked)

    def refuses_float8_gather(self) -> str:
        """Returns the option under which torch gathers weights in their own dtypes alone; an empty string without one."""
        if self.offload:
            return "weights in host memory are not gathered in FP8; leave FSDP(offload=True) out, or all_gather"
        if self.parallelize is not None:
            return "layers that are split are not gathered in FP8; leave FSDP(parallelize=...) out, or all_gather"
        after = self.reshard_after_forward
        if not isinstance(after, bool):
            return (
                f"FSDP(reshard_after_forward={after}) keeps larger shards, which are not gathered in FP8; give True or False, or "
                "leave all_gather out"
            )
        return ""

    def refuses_offload(self) -> str:
        """Returns the option whose activations have parts on several ranks; an empty string without it."""
        if self.parallelize is not None:
            return "activations of layers that are split are not moved; leave FSDP(parallelize=...) out, or give save='inputs'"
        return ""

    def refuses_graph(self) -> str:
        """Returns the option with which steps are not captured, and what to change; an empty string without one."""
        if self.offload:
            return (
                "FSDP(offload=True) updates in host memory, and a graph holds the GPU's work alone; leave offload out"
            )
        if self.parallelize is not None:
            return "steps of layers that are split are not captured; leave FSDP(parallelize=...) out"
        after = self.reshard_after_forward
        if not isinstance(after, bool):
            return f"steps of FSDP(reshard_after_forward={after}) are not captured; give True or False"
        return ""

    @contextlib.contextmanager
    def captured(self) -> Iterator[Callable[[], None]]:
        """A context for the launches of a captured step; joins the streams of torch's FSDP to the current one at its end."""
        assert self._module is not None, "shard_module has been called"
        turns: list[int] = []

        def take_turns() -> None:
            # Else a rank that replays and one that runs the step eagerly would use different buffers afterwards.
            for buffers, turn in zip(self._buffers(), turns, strict=True):
                buffers.turn = turn

        # A capture cannot wait for an event from before it, and later streams cannot wait for one of the capture.
        self._forget_uses()
        try:
            yield take_turns
        except BaseException:
            abandon_sharded_step(self._module)
            if self._peers is not None:
                self._peers.gather.forget_given()  # the exception may keep what the step has gathered alive
            raise
        finally:
            self._forget_uses()
        current = torch.cuda.current_stream(self.device)
        for stream in streams_of_sharding(self._module):
            with torch.cuda.stream(stream):
                belongs_to_capture = current_stream_is_capturing()
            if belongs_to_capture:
                current.wait_stream(stream)
        turns.extend(buffers.turn for buffers in self._buffers())

    def _buffers(self) -> tuple[PeerBuffers, ...]:
        return () if self._peers is None else (self._peers.gather.peers, self._peers.scatter)

    def _forget_uses(self) -> None:
        for buffers in self._buffers():
            buffers.forget_uses()

    def _begin_step(self) -> None:
        # Captured steps, and those that run eagerly on another rank, have to use the same buffers for the same unit.
        for buffers in self._buffers():
            buffers.turn = NO_TURN
        if self._of_computes is not None and self._module is not None:
            self._of_computes.wait(streams_of_sharding(self._module))

    def reduce_gradients(self, memory: GradientMemory | None = None) -> Gradients:
        """Returns the gradients, which backward has exchanged."""
        if self._of_computes is not None:
            self._of_computes.forget()  # torch has made the current stream wait for them at the end of backward
        return super().reduce_gradients(memory)

    def unshard_module(self, module: nn.Module, *, whole: bool = True) -> None:
        """Restores the plain module; with ``whole`` rank 0 has the full parameters, in host memory."""
        undo = self._undo
        self._undo = None
        self._module = None
        self._whole = None
        self._peers = None
        self._of_computes = None
        self._last = None
        self._cast_units = []
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
            id(parameter): torch.promote_types(parameter.dtype, self._dtypes[name])
            for name, parameter in module.named_parameters()
        }

        def plain(parameter: Any) -> Tensor:
            dtype = dtypes[id(parameter)]
            full = full_tensor(parameter.detach()) if whole else None  # a collective: every rank takes part
            if full is None or self.rank != 0:
                return torch.empty(parameter.shape, dtype=dtype, device="meta")
            return full.to("cpu", dtype)

        replace_shards(module, plain)
        undo.undo()

    def teardown(self) -> None:
        """Drops the module, and destroys the process group if :meth:`setup_environment` made it."""
        self._undo = None
        self._module = None
        self._whole = None
        self._peers = None
        self._of_computes = None
        self._last = None
        self._cast_units = []
        self._steps = {}
        # No reference to the group may remain: torch's FSDP states are reference cycles, and optimizers hold the mesh too.
        gc.collect()
        for mesh in self._meshes:
            vars(mesh).get("_pg_registry", {}).clear()  # in newer versions of torch
        self._mesh = None
        self._meshes = []
        super().teardown()


def _neighbours_along(ranks: Tensor, dimension: int) -> list[list[int]]:
    """Returns groups of ranks that differ only in this dimension of the mesh."""
    groups: list[list[int]] = ranks.transpose(dimension, -1).reshape(-1, ranks.shape[dimension]).tolist()
    return groups


def _reshard(module: nn.Module) -> None:
    for unit in _sharded_units(module):
        unit.reshard()


def _sharded_units(module: nn.Module) -> list[FSDPModule]:
    from torch.distributed.fsdp import FSDPModule

    return [submodule for submodule in module.modules() if isinstance(submodule, FSDPModule)]


def _is_written(module: nn.Module, name: str) -> bool:
    """Returns whether a class defines this step that is not only fabricamp's or Lightning's base class."""
    owner = next((base for base in type(module).__mro__ if name in vars(base)), None)
    return name in vars(module) or (owner is not None and not _is_base(owner.__module__))


def _is_base(home: str) -> bool:
    """Returns whether the base classes of users' modules are in the Python module ``home``."""
    return home == "fabricamp.module" or home.partition(".")[0] in _LIGHTNINGS


def _bytes(number: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number} bytes"


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

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self._module = module
        self._mesh = mesh
        self._units = _sharded_units(module)

    def __enter__(self) -> None:
        for unit in self._units:
            unit.set_requires_gradient_sync(False, recurse=False)

    def __exit__(self, *_: object) -> None:
        for unit in self._units:
            unit.set_requires_gradient_sync(True, recurse=False)

    def stacked(self) -> dict[str, Tensor]:
        """Returns the kept gradients by name, each stacked over the ranks as a DTensor with one entry per rank."""
        stacked = {}
        for name, record in self._records():
            gradient = whole_gradient(record)
            if gradient is None:
                continue
            exchanged: Any = record.sharded_param.grad
            if exchanged is not None:  # resumed from an accumulation of another number of ranks, exchanged already
                gradient = gradient + exchanged.full_tensor()
            stacked[name] = self._stack(gradient.detach())
        return stacked

    def placeholders(self) -> dict[str, Tensor]:
        """Returns tensors like those of :meth:`stacked`, for all parameters, without values."""
        stacked = {}
        for name, record in self._records():
            parameter = record.sharded_param
            stacked[name] = self._stack(torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device))
        return stacked

    def restore(self, stacked: Mapping[str, Any]) -> None:
        """Resumes an accumulation from the result of :meth:`stacked`."""
        for unit in self._units:
            unit.unshard()  # creates the gathered parameters: from torch 2.15 on they hold the gradients
            unit.reshard()
        for name, record in self._records():
            keep_whole_gradient(record, stacked[name].to_local()[0] if name in stacked else None)

    def drop(self) -> None:
        """Drops the kept gradients."""
        for _, record in self._records():
            keep_whole_gradient(record, None)

    def _records(self) -> Iterator[tuple[str, Any]]:
        """Yields the names of the parameters with torch's record of each."""
        for unit in self._units:
            unit.reshard()  # after it named_parameters() yields the shards
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        for unit in self._units:
            for record in sharded_parameters(unit):
                yield names[id(record.sharded_param)], record

    def _stack(self, gradient: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Shard

        own = gradient.unsqueeze(0)
        shape = torch.Size((self._mesh.size(), *gradient.shape))
        stride = torch.empty(shape, device="meta", dtype=own.dtype).stride()
        placements = [Shard(0)] * self._mesh.ndim
        return DTensor.from_local(own, self._mesh, placements, run_check=False, shape=shape, stride=stride)


class RootOfSteps:
    """Gathers the root module's parameters once for a training step, for its forward and backward.

    torch takes the end of a forward within the step for that of the step: it would free the root's parameters, gather them again
    when backward begins, and gather the last unit only after that.  So the hooks of the root's forward do nothing within a step.
    """

    def __init__(
        self,
        module: nn.Module,
        left_gathered: Sequence[FSDPModule],
        begin: Callable[[], None],
        last: FSDPModule | None = None,
    ) -> None:
        self._last = last
        """A unit that a step leaves gathered for its backward; other forwards free it."""
        self._left_gathered = left_gathered
        self._begin = begin
        """Called at the start of a step."""
        self._steps = 0
        """The number of steps that run now: a step may call itself."""
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in hooks.items():
                if str(hook.__module__).startswith(_FSDP):
                    hooks[key] = _OutsideSteps(self, hook)

    @property
    def in_a_step(self) -> bool:
        """Whether a step runs."""
        return self._steps > 0

    def without_hooks(self, step: Step) -> Step:
        """Returns ``step``; while it runs the hooks do nothing."""

        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._steps += 1
            if self._last is not None:
                self._last.set_reshard_after_forward(False, recurse=False)
            try:
                return step(*args, **kwargs)
            finally:
                self._steps -= 1
                if self._last is not None and not self._steps:
                    self._last.set_reshard_after_forward(True, recurse=False)

        return run

    def gathered_for(self, step: Step) -> Step:
        """Returns ``step``, which gathers the root's parameters; what a forward has left gathered may be older than an update."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.in_a_step:  # a step that calls itself needs them
                for unit in self._left_gathered:
                    unit.reshard()
                self._begin()
            return step(*args, **kwargs)

        return run


class _OutsideSteps:
    def __init__(self, root: RootOfSteps, hook: Callable[..., Any]) -> None:
        self._root = root
        self.hook = hook

    def __call__(self, *arguments: Any) -> Any:
        return None if self._root.in_a_step else self.hook(*arguments)


_FSDP: Final = "torch.distributed.fsdp."
_TORCHS: Final = (_FSDP, "torch.distributed._composable.", "torch.distributed.tensor.")
_HOOKS: Final = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_HOOK_OPTIONS: Final = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


class Undo:
    """Remembers the classes and attributes of modules before sharding, and restores them; parameters keep their values."""

    def __init__(self, module: nn.Module) -> None:
        self._before = [(submodule, type(submodule), set(vars(submodule))) for submodule in module.modules()]
        self._added: list[set[str]] = []
        self._callbacks: list[Callable[[], None]] = []

    def also(self, restore: Callable[[], None]) -> None:
        """Makes :meth:`undo` call ``restore`` at its end."""
        self._callbacks.append(restore)

    def note(self) -> None:
        """Records the attributes added by sharding; call it right after sharding, so attributes added later stay."""
        self._added = [set(vars(submodule)) - before for submodule, _, before in self._before]

    def undo(self) -> None:
        """Restores the modules and removes torch's hooks; torch adds some of these only in the first forward."""
        for (submodule, original_class, _), added in zip(self._before, self._added, strict=True):
            sharded_modules().pop(submodule, None)
            submodule.__class__ = original_class
            for name in added:
                vars(submodule).pop(name, None)
            torchs = {key for table in _HOOKS for key, hook in vars(submodule)[table].items() if _is_torchs(hook)}
            for table in (*_HOOKS, *_HOOK_OPTIONS):
                for key in torchs:
                    vars(submodule)[table].pop(key, None)
        for restore in self._callbacks:
            restore()


def _is_torchs(hook: object) -> bool:
    """Returns whether ``fully_shard`` registered the hook."""
    return str(getattr(getattr(hook, "hook", hook), "__module__", "")).startswith(_TORCHS)


def replace_shards(module: nn.Module, make: Callable[[Any], Tensor]) -> None:
    """Replaces each sharded parameter by a plain one from ``make``; shared parameters stay shared."""
    replaced: dict[int, nn.Parameter] = {}
    old = []  # keeps the old tensors alive, so their ids stay unique
    for submodule in module.modules():
        for name, parameter in submodule._parameters.items():
            if parameter is None or not is_shard(parameter):
                continue
            if id(parameter) not in replaced:
                old.append(parameter)
                replaced[id(parameter)] = nn.Parameter(make(parameter), requires_grad=parameter.requires_grad)
            submodule._parameters[name] = replaced[id(parameter)]


_ZERO_NAMES: Final = {"zero3": True, "zero2": False}


def _checked_units(value: object) -> Literal["auto"] | list[type[nn.Module] | str]:
    """Returns ``units``; raises :class:`ConfigError` for anything but "auto" or a list of module classes and names."""
    if value == "auto":
        return "auto"
    if isinstance(value, (list, tuple, set)) and value:
        given = list(value)
        if all(isinstance(item, str) or _is_module_class(item) for item in given):
            return given
    raise ConfigError(
        f"FSDP(units={value!r:.200}) has to be 'auto', or a list of classes of submodules, such as units=[Block], and of names of "
        "single ones, such as 'net.head'"
    )


def _is_module_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _checked_reshard(value: object) -> bool | int:
    """Returns ``reshard_after_forward`` in torch's form; raises :class:`ConfigError` for a wrong value."""
    named = _ZERO_NAMES.get(value, value) if isinstance(value, str) else value
    if isinstance(named, bool) or (isinstance(named, int) and named > 1):
        return named
    raise ConfigError(
        f"FSDP(reshard_after_forward={value!r}) has to be True ('zero3'), False ('zero2'), or a number of ranks above 1 that "
        "divides that of all"
    )
