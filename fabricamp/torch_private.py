"""Every private name of torch that the package uses, and why: the one place to look when a torch release breaks something.

All of them exist in torch 2.11 (the oldest supported) and 2.13, where the tests check each of them; a test fails for a private name
that is used in the package and is missing here.  Functions and classes are imported from here.  Attributes of torch's objects
cannot be imported, so :data:`ATTRIBUTES` lists them.  ``torch._foreach_...`` is left out: torch documents these functions.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import inspect
import operator
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Final, NamedTuple, Protocol, cast

import torch
from torch import _weights_only_unpickler as weights_only_pickle
from torch._C import _disabled_torch_function_impl as unwatched_operations
from torch._C._autograd import _profiler_enabled as profiler_enabled
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch._weights_only_unpickler import Unpickler as WeightsOnlyUnpickler
from torch.autograd import Variable, forward_ad
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
from torch.nn.modules.loss import _Loss as AnyLoss
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
)
from torch.nn.modules.module import _global_forward_pre_hooks as global_forward_pre_hooks
from torch.optim.optimizer import _global_optimizer_post_hooks as global_optimizer_post_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks as global_optimizer_pre_hooks
from torch.optim.optimizer import _use_grad_for_differentiable as optimizer_step_breaks_graphs
from torch.serialization import _load as load_zipfile
from torch.serialization import _open_zipfile_reader as open_zipfile_reader
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

__all__ = [
    "ATTRIBUTES",
    "DISABLED_FORM",
    "AnyBatchNorm",
    "AnyLoss",
    "Compilation",
    "HashStore",
    "Lookups",
    "PrefixStore",
    "Store",
    "TCPStore",
    "TorchDispatchMode",
    "WeightsOnlyUnpickler",
    "abandon_sharded_step",
    "allocating_in_pool",
    "allocator",
    "any_autocast",
    "cache_lookups",
    "call_at_end_of_backward",
    "compilations_since",
    "compiled_by_user",
    "compiled_in_two_parts",
    "compiler_of",
    "compiler_options",
    "current_backward",
    "current_device",
    "current_stream",
    "current_stream_is_capturing",
    "default_store",
    "dispatch_modes",
    "end_failed_capture",
    "exporting",
    "fake_tensor_types",
    "forget_memory",
    "forward_derivative_level",
    "fsdp_copy_ops",
    "functorch_active",
    "fused_attention",
    "global_forward_pre_hooks",
    "global_hooks",
    "global_optimizer_post_hooks",
    "global_optimizer_pre_hooks",
    "guarded_hooks",
    "has_kernel",
    "is_batched_gradient",
    "is_limit_hit",
    "is_sharded",
    "is_traceable_wrapper_subclass",
    "keep_whole_gradient",
    "last_compilation",
    "left_by_functorch",
    "load_zipfile",
    "memory_budget",
    "observed",
    "open_zipfile_reader",
    "optimizer_step_breaks_graphs",
    "profiler_enabled",
    "record_memory",
    "replaced_operations",
    "segments_of_pool",
    "sharded_modules",
    "sharded_parameters",
    "sleep_on_gpu",
    "starts_workers",
    "storage_key",
    "stream_in_use",
    "streams_of_sharding",
    "symmetric_memory",
    "tracing_state",
    "tree_map_only",
    "uncompiled",
    "unobserved_apply",
    "unwatched_operations",
    "weights_only_pickle",
    "whole_gradient",
    "with_part",
    "without_autocast_of_host",
    "without_dispatch_modes",
    "wrapper_tensor",
    "write_memory",
    "written_arguments",
]

# AnyBatchNorm, AnyLoss: the base classes of all BatchNorms and of all losses have no public name.
# HashStore, PrefixStore, Store, TCPStore: torch.distributed has them too, but type checkers do not see them there.
# global_forward_pre_hooks: the public register_module_forward_pre_hook leaves out keyword arguments, which a boundary casts too.
# global_optimizer_*_hooks, profiler_enabled: the conditions that Optimizer.step's wrapper checks; a step without hooks and
#   profiler bypasses the wrapper (10 us).
# optimizer_step_breaks_graphs: the decorator of torch's ``step`` methods, which imports torch's compiler in the first call.
# WeightsOnlyUnpickler: the bytes of a checkpoint's objects are a part of its file, and torch.load reads whole files.
# load_zipfile and open_zipfile_reader: torch.load with an unpickler of ours also takes TorchScript archives and tar files, whose
# loaders run code or write files; and it opens a file itself, where a checkpoint is read once, by one rank of a host.
# weights_only_pickle: the module that torch.load(weights_only=True) gives to load_zipfile in the place of Python's pickle.
# unwatched_operations: a class whose tensors have no memory has operations of its own below autograd only, at __torch_dispatch__.
# TorchDispatchMode: sees each operation of a module's own code, those on ``.data`` and in torch.nn.init too.
# tree_map_only: an operation's arguments have tensors in lists and dictionaries.
# is_traceable_wrapper_subclass: kernels cannot read a DTensor or another wrapper subclass; fused optimizers refuse them.

DISABLED_FORM: Final = "__dynamo_disable"
"""The attribute in which torch keeps the form of a function that its compiler does not trace, from the first call on."""

functorch_active: Final[Callable[[], bool]] = torch._C._are_functorch_transforms_active
"""Returns whether vmap, grad or another transform is active: kernels have no rule for transforms, so torch's operations run."""

left_by_functorch: Final[Callable[[torch.Tensor], bool]] = torch._C._functorch.is_functorch_wrapped_tensor
"""Returns whether a tensor is functorch's wrapper; such a tensor that outlives its transform has no memory."""

is_batched_gradient: Final[Callable[[torch.Tensor], bool]] = torch._C._functorch.is_legacy_batchedtensor
"""Returns whether a gradient is a batch of gradients, as under ``torch.autograd.grad(is_grads_batched=True)``."""

tracing_state: Final[Callable[[], Any]] = torch._C._get_tracing_state
"""Returns the state of ``torch.jit.trace``; None if it is not running."""

dispatch_modes: Final[Callable[[], int]] = torch._C._len_torch_dispatch_stack
"""Returns the number of active TorchDispatchModes (make_fx, fake tensors): these have to see a registered operator."""

current_backward: Final[Callable[[], int]] = torch._C._current_graph_task_id
"""Returns the id of the backward that runs in this thread: apex's DistributedDataParallel starts one exchange per backward."""


def _public_current_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


current_stream: Final[Callable[[int], int]] = getattr(torch._C, "_cuda_getCurrentRawStream", _public_current_stream)
"""Returns the address of the current CUDA stream, needed at every launch: takes 0.1 us, the public function 9.5 us."""


current_device: Final[Callable[[], int]] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""Returns the index of the current CUDA device, needed at every launch: the public function first checks for initialised CUDA."""


_STREAMS: Final[dict[tuple[int, int], torch.cuda.Stream]] = {}


def stream_in_use(device: torch.device) -> torch.cuda.Stream:
    """Returns the current CUDA stream of ``device``, faster than ``torch.cuda.current_stream``; ``device`` has to have an index."""
    index = device.index
    address = current_stream(index)
    stream = _STREAMS.get((index, address))
    if stream is None:
        stream = _STREAMS[index, address] = torch.cuda.current_stream(device)
    return stream


current_stream_is_capturing: Final[Callable[[], bool]] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
"""Returns whether a CUDA graph is being captured, needed in every step: the public function around it takes twice as long."""


def _are_at(tensors: list[torch.Tensor], addresses: list[int], positions: list[int]) -> bool:
    return [tensors[position].data_ptr() for position in positions] == [addresses[position] for position in positions]


are_at: Final[Callable[[list[torch.Tensor], list[int], list[int]], bool]] = getattr(
    torch._C, "_tensors_data_ptrs_at_indices_equal", _are_at
)
"""Returns whether the ``tensors`` at these positions are at these addresses, in one call; builds for CPUs do not have it."""


def end_failed_capture(device: torch.device, pool: tuple[int, int]) -> None:
    """Removes a failed capture from the allocator; torch does not.

    Until then memory that was used on several streams is not freed, and a memory pool cannot be released.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    torch._C._cuda_endAllocateToPool(index, pool)
    torch._C._cuda_releasePool(index, pool)


@contextlib.contextmanager
def allocating_in_pool(device: torch.device, pool: tuple[int, int]) -> Iterator[None]:
    """A context within which all memory on ``device`` is allocated in ``pool``, by all threads.

    The public ``torch.cuda.use_mem_pool`` leaves out the thread that runs backward.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    torch._C._cuda_beginAllocateToPool(index, pool)
    try:
        yield
    finally:
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)


class _OwnNumber(int):
    """A number that is an object of its own; equal small ints are one object."""


def segments_of_pool(pool: tuple[int, int]) -> list[dict[str, Any]]:
    """Returns what ``torch.cuda.memory_snapshot`` says of one memory pool, given by its id.

    For a pool, torch gives up a reference to each number of the id that it does not own (2.11 to 2.13; ``MemPool.snapshot``, too).
    From the 257th pool of a process on, these numbers are objects of their own, which would be freed while the id still uses them.
    """
    numbers = [_OwnNumber(number) for number in pool]
    name = (numbers[0], numbers[1])  # keeps each number while torch gives up the reference of the list
    before = [sys.getrefcount(number) for number in numbers]
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot(name, include_traces=False)
    after = [sys.getrefcount(number) for number in numbers]
    for number, lost in zip(numbers, map(operator.sub, before, after), strict=True):
        for _ in range(lost):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(number))
    return segments


def forward_derivative_level() -> int:
    """Returns the current level of forward-mode differentiation; -1 outside of it, and only there kernels may run."""
    level: int = forward_ad._current_level
    return level


any_autocast: Final[Callable[[], bool]] = torch._C._is_any_autocast_enabled
"""Returns whether autocast is on for any device type: the public function asks about one type, and takes three times as long."""


def allocator(kind: str) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]:
    """Returns a function (sizes, strides, dtype) -> uninitialised tensor on the current device of type ``kind``.

    It takes half the time of ``torch.empty``; the programs that torch.compile generates call it.
    """
    found: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor] = getattr(
        torch._C._dynamo.guards, f"_empty_strided_{kind}"
    )
    return found


def observed() -> bool:
    """Returns whether a transform, dispatch mode or tracer is active: these have to see torch's or registered operations."""
    return functorch_active() or dispatch_modes() > 0 or forward_ad._current_level >= 0 or tracing_state() is not None


def exporting() -> bool:
    """Returns whether ``torch.export`` is running; in torch 2.11 the public ``is_exporting()`` is True in any compilation."""
    return bool(torch.compiler._is_exporting_flag)


def uncompiled(module: Any) -> tuple[Any, Callable[[Any], Any] | None]:
    """Returns the module that ``torch.compile`` was given, and its compiler of functions; any other module as it is, and None."""
    frames = sys.modules.get("torch._dynamo.eval_frame")  # an import would take seconds if nothing is compiled
    if frames is None or not isinstance(module, frames.OptimizedModule):
        return module, None
    return module._orig_mod, module.dynamo_ctx


def compiled_by_user(module: torch.nn.Module) -> bool:
    """Returns whether ``torch.compile(module)`` or ``module.compile()`` has made the module's calls."""
    return module._compiled_call_impl is not None or uncompiled(module)[0] is not module


def inner_schedules(schedule: object) -> list[Any]:
    """Returns the schedules within torch's SequentialLR or ChainedScheduler; none within any other."""
    return list(getattr(schedule, "_schedulers", ()))


def milestones_of(schedule: Any) -> list[int]:
    """Returns the steps at which torch's SequentialLR goes on to its next schedule."""
    return list(schedule._milestones)


class CompilerOptions(NamedTuple):
    """Options that a module was compiled with."""

    dynamic: bool | None
    own_graphs: bool
    """Whether inductor captures CUDA graphs of its own."""


def compiler_options(compiler: Any) -> CompilerOptions:
    """Returns options of the compiler of functions that :func:`uncompiled` returns."""
    config = compiler.compiler_config or {}
    backend = sys.modules["torch._dynamo.eval_frame"].innermost_backend(compiler.callback)
    own_graphs = bool(config.get("triton.cudagraphs")) or getattr(backend, "compiler_name", "") == "cudagraphs"
    return CompilerOptions(compiler._dynamic, own_graphs)


def compiler_of(compiled: Any) -> Any:
    """Returns the compiler of what ``torch.compile`` or ``module.compile()`` has made; None if neither has made ``compiled``.

    torch keeps the compiler of a function nowhere but in the function that returns its options.
    """
    if isinstance(compiled, torch.nn.Module):
        if compiled._compiled_call_impl is not None:
            return compiler_of(compiled._compiled_call_impl)
        return uncompiled(compiled)[1]
    config_of = getattr(compiled, "get_compiler_config", None) if isinstance(compiled, FunctionType) else None
    return None if config_of is None else inspect.getclosurevars(config_of).nonlocals["self"]


class Compilation(Protocol):
    """What is read of torch's record of a compilation."""

    @property
    def co_name(self) -> str | None:
        """The function's name."""
        ...

    @property
    def recompile_reason(self) -> str | None:
        """The guard that did not hold; None for a function's first compilation."""
        ...

    @property
    def fail_type(self) -> str | None:
        """The name of the error's class; None if it succeeded."""
        ...

    @property
    def fail_reason(self) -> str | None:
        """The error's text; None if it succeeded."""
        ...


def last_compilation() -> Compilation | None:
    """Returns torch's record of its last compilation, one that failed too; None if there was none."""
    utils = sys.modules["torch._dynamo.utils"]  # needed around each call of compiled code, when it is imported
    records = utils._compilation_metrics
    last: Compilation | None = records[-1] if records else None
    return last


def compilations_since(record: Compilation | None) -> list[Compilation]:
    """Returns torch's records of the compilations after ``record``, at most 64; a record names the function and the reason."""
    records: list[Compilation] = list(sys.modules["torch._dynamo.utils"]._compilation_metrics)
    known = next((number + 1 for number, one in enumerate(records) if one is record), 0)
    return records[known:]


def is_limit_hit(error: BaseException) -> bool:
    """Returns whether torch would have compiled a function, under ``fullgraph``, more often than it allows."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    return isinstance(error, FailOnRecompileLimitHit)


class Lookups(NamedTuple):
    """How often torch's caches of compiled code had what was asked for, and had not."""

    hit: int
    missed: int

    def __sub__(self, other: Lookups) -> Lookups:
        return Lookups(self.hit - other.hit, self.missed - other.missed)


def cache_lookups() -> Lookups:
    """Returns the lookups of this process, of graphs of forward and backward; torch counts them nowhere else."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return Lookups(0, 0)
    counts = utils.counters["inductor"]
    return Lookups(counts["fxgraph_cache_hit"], counts["fxgraph_cache_miss"])


def memory_budget(share: float) -> AbstractContextManager[None]:
    """Returns a context in which the compiler keeps this share of what backward reads; public alone for a region in a forward."""
    from torch._functorch import config

    patched: AbstractContextManager[None] = config.patch(activation_memory_budget=share)
    return patched


def guarded_hooks() -> AbstractContextManager[None]:
    """Returns a context in which compiled code checks the hooks of the modules within it; torch leaves them out by default."""
    from torch._dynamo import config

    patched: AbstractContextManager[None] = config.patch(skip_nnmodule_hook_guards=False)
    return patched


def global_hooks() -> int:
    """Returns the number of hooks that are registered for the calls of all modules."""
    return sum(
        map(len, (_global_forward_hooks, global_forward_pre_hooks, _global_backward_hooks, _global_backward_pre_hooks))
    )


def is_sharded(module: torch.nn.Module) -> bool:
    """Returns whether ``fully_shard`` was called on the module."""
    return "torch.distributed._composable_state" in sys.modules and module in sharded_modules()


def unobserved_apply(function: Any) -> Callable[..., Any]:
    """Returns ``function.apply`` without its handling of functorch's transforms; that saves 4 us.

    The caller has to have checked that no transform is active.  The autograd node calls ``backward`` directly, without a search for
    other methods of the class; that saves 0.6 us.
    """
    function._backward_cls.apply = function.backward
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply
    return apply


def starts_workers(iterator: object) -> bool:
    """Returns whether ``iterator`` reads from loader workers that have returned no batch yet."""
    return isinstance(iterator, _MultiProcessingDataLoaderIter) and not getattr(iterator, "_rcvd_idx", 0)


def sleep_on_gpu(cycles: int) -> None:
    """Keeps the GPU busy, so kernels that are timed after it are queued in time and do not wait for the host."""
    torch.cuda._sleep(cycles)


def record_memory(max_entries: int) -> None:
    """Keeps the last ``max_entries`` allocations and frees of all GPUs, with the Python frames of each."""
    torch.cuda.memory._record_memory_history(max_entries=max_entries, stacks="python")


def write_memory(path: Path) -> None:
    """Writes what was recorded, and what is allocated, as a pickle that https://pytorch.org/memory_viz reads."""
    torch.cuda.memory._dump_snapshot(str(path))


def forget_memory() -> None:
    """Ends the recording."""
    torch.cuda.memory._record_memory_history(enabled=None)


def symmetric_memory() -> ModuleType:
    """Returns torch's module for symmetric memory; through it the SyncBatchNorm kernels of several ranks write to each other."""
    import torch.distributed._symmetric_memory as symmetric

    return symmetric


def sharded_modules() -> MutableMapping[torch.nn.Module, Any]:
    """Returns the registry of modules that ``fully_shard`` was called on; remove a module from it to shard it again."""
    from torch.distributed import _composable_state

    found: MutableMapping[torch.nn.Module, Any] = _composable_state._module_state_mapping
    return found


def sharded_parameters(module: Any) -> list[Any]:
    """Returns torch's records of the parameters that ``fully_shard`` gathers with ``module``."""
    group = module._get_fsdp_state()._fsdp_param_group
    return [] if group is None else list(group.fsdp_params)


def streams_of_sharding(module: Any) -> list[torch.cuda.Stream]:
    """Returns the streams on which torch gathers and reduces for ``module``, the root that ``fully_shard`` was called on."""
    context = module._get_fsdp_state()._comm_ctx
    names = ("all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream", "all_reduce_stream")
    return [getattr(context, name) for name in names if hasattr(context, name)]


def abandon_sharded_step(module: Any) -> None:
    """Makes torch forget a step of ``module`` that an exception has ended, with its events and what it has gathered.

    Waits for nothing, so the step's launches have to be those of a capture.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    root = module._get_fsdp_state()
    context = root._comm_ctx
    context.all_gather_state = None
    context.post_forward_order.clear()
    if hasattr(context, "reduce_scatter_states"):  # in newer versions of torch
        context.reduce_scatter_states.clear()
        getattr(context, "_last_post_reduce_events", {}).clear()
    else:
        context.reduce_scatter_state = None
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False
    for state in root._state_ctx.all_states:
        state._training_state = TrainingState.IDLE
        state._modules_to_run_forward.clear()
        group = state._fsdp_param_group
        if group is None:
            continue
        group._training_state = TrainingState.IDLE
        group._all_gather_result = None
        group._post_reduce_event = None
        group._all_reduce_state = None
        group._post_forward_indices.clear()
        group._to_sharded()
        for record in group.fsdp_params:
            keep_whole_gradient(record, None)


class CopyOps(NamedTuple):
    """torch's operations that copy before FSDP's collectives; None: this torch has no such operation."""

    all_gather_copy_in: Any
    chunk_cat: Any


@functools.cache
def fsdp_copy_ops() -> CopyOps:
    """Returns the operations."""
    importlib.import_module("torch.distributed.fsdp")  # defines them
    packets = [getattr(torch.ops.fsdp, name, None) for name in CopyOps._fields]
    return CopyOps(*[getattr(packet, "default", None) for packet in packets])


def wrapper_tensor(kind: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """Returns a tensor of class ``kind`` without memory."""
    return torch.Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)


def storage_key(tensor: torch.Tensor) -> int:
    """Returns a number that tensors with the same memory have in common, on the meta device too; valid while one of them lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


def fake_tensor_types() -> tuple[Any, Any, tuple[type[Exception], ...]]:
    """Returns the mode under which tensors have no memory, their class, and the errors of operations that need values.

    torch documents the mode, and its module begins with an underscore; it is imported when a plan is made (0.3 s).
    """
    fake = importlib.import_module("torch._subclasses.fake_tensor")
    errors = (fake.DataDependentOutputException, fake.DynamicOutputShapeException)
    return fake.FakeTensorMode, fake.FakeTensor, errors


def compiled_in_two_parts(function: Callable[..., Any], compiler: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``function`` traced with its backward and divided as torch.compile does; ``compiler`` makes code of each graph.

    Code takes one list of arguments, which it may clear.
    """
    aot = importlib.import_module("torch._functorch.aot_autograd")
    divide = importlib.import_module("torch._functorch.partitioners").min_cut_rematerialization_partition
    passes = importlib.import_module("torch._inductor.fx_passes.joint_graph").joint_graph_passes
    inductor = importlib.import_module("torch._inductor.virtualized").V
    decompositions = importlib.import_module("torch._inductor.decomposition").select_decomp_table()

    def boxed(graph: Any, inputs: Any) -> Callable[..., Any]:
        code: Any = compiler(graph, inputs)
        code._boxed_call = True
        return cast("Callable[..., Any]", code)

    def parts(joint: Any, inputs: Any, **options: Any) -> Any:
        with inductor.set_fake_mode(torch._guards.detect_fake_mode(inputs)):
            passes(joint)  # masks of dropout are drawn again in backward, and are not kept
        return divide(joint, inputs, compiler="inductor", **options)

    traced: Callable[..., Any] = aot.aot_function(
        function,
        fw_compiler=boxed,
        bw_compiler=boxed,
        partition_fn=parts,
        decompositions=decompositions,
    )
    return traced


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Returns a context without the dispatch modes that are active, as for tensors with values under fake ones."""
    context: AbstractContextManager[Any] = importlib.import_module(
        "torch.utils._python_dispatch"
    )._disable_current_modes()
    return context


def replaced_operations() -> AbstractContextManager[Any]:
    """Returns a context whose value registers functions for torch's own operations until the context ends."""
    context: AbstractContextManager[Any] = torch.library._scoped_library("aten", "IMPL")
    return context


def fused_attention(
    *operands: torch.Tensor, is_causal: bool, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """Returns the host's fused attention of query, key and value: it keeps what a GPU's keeps, and has no public name."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output: torch.Tensor = attend(*operands, 0.0, is_causal, attn_mask=mask, scale=scale)[0]
    return output


def has_kernel(operation: str, key: str) -> bool:
    """Returns whether an operation has a kernel of its own for a dispatch key such as "AutocastCPU"."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operation, key))


def without_autocast_of_host() -> AbstractContextManager[Any]:
    """Returns a context in which operations are not cast by autocast of the host, within a function that does so itself."""
    context: AbstractContextManager[Any] = torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    )
    return context


def written_arguments(operation: Any) -> tuple[str, frozenset[int | str]]:
    """Returns the name of an operation of a TorchDispatchMode, and what it writes to: places and names of arguments."""
    schema = operation._schema
    written: set[int | str] = set()
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {place, argument.name}
    return schema.name.rpartition("::")[2], frozenset(written)


def whole_gradient(record: Any) -> torch.Tensor | None:
    """Returns the unsharded gradient that a backward without an exchange has left; None if there is none."""
    kept: torch.Tensor | None = record.unsharded_accumulated_grad
    unsharded = getattr(record, "_unsharded_param", None)
    return kept if kept is not None or unsharded is None else unsharded.grad


def keep_whole_gradient(record: Any, gradient: torch.Tensor | None) -> None:
    """Sets the unsharded gradient, or removes it for None.  The parameter has to have been gathered before."""
    unsharded = getattr(record, "_unsharded_param", None)
    on_parameter = isinstance(getattr(type(record), "unsharded_accumulated_grad", None), property)  # from torch 2.15 on
    if not on_parameter:
        record.unsharded_accumulated_grad = gradient
    if unsharded is not None:
        unsharded.grad = gradient if on_parameter else None


def with_part(shard: Any, part: torch.Tensor) -> torch.Tensor:
    """Returns a sharded tensor with the layout of ``shard`` and the local shard ``part``, which may be on any device."""
    from torch.distributed.tensor import DTensor

    return DTensor(part, shard._spec, requires_grad=False)


def default_store() -> Store:
    """Returns the store of the default process group's rendezvous; heartbeats and agreements between ranks use it."""
    from torch.distributed import distributed_c10d

    store: Store = distributed_c10d._get_default_store()
    return store


def call_at_end_of_backward(function: Callable[[], None]) -> None:
    """Runs ``function`` at the end of the current backward, as torch's DistributedDataParallel does."""
    Variable._execution_engine.queue_callback(function)


ATTRIBUTES: Final[dict[str, str]] = {
    "torch.nn.Module._modules": "a layer is replaced in its place (SyncBatchNorm), whatever the names of its parents",
    "torch.nn.Module._parameters": "a replaced layer's tensors are moved to the new layer as the same objects",
    "torch.nn.Module._buffers": "the same",
    "torch.nn.Module._forward_hooks": (
        "a replaced layer's hooks are moved, so their handles still remove them; the same for the next ones"
    ),
    "torch.nn.Module._forward_hooks_with_kwargs": "the same",
    "torch.nn.Module._forward_hooks_always_called": "the same",
    "torch.nn.Module._forward_pre_hooks": "the same",
    "torch.nn.Module._forward_pre_hooks_with_kwargs": "the same; a half module's boundary is kept there, see precision/boundary.py",
    "torch.nn.Module._backward_hooks": "the same",
    "torch.nn.Module._backward_pre_hooks": "the same",
    "torch.nn.Module._is_full_backward_hook": "the same",
    "torch.nn.Module._non_persistent_buffers_set": "the same",
    "torch.nn.Module._state_dict_hooks": "the same",
    "torch.nn.Module._state_dict_pre_hooks": "the same",
    "torch.nn.Module._load_state_dict_pre_hooks": "the same",
    "torch.nn.Module._load_state_dict_post_hooks": "the same",
    "torch.nn.Module._call_impl": (
        "a search of the frames finds out whether a forward is running (apex's scripts); a compiled call runs hooks by it"
    ),
    "torch.nn.Module._compiled_call_impl": "torch's place for the compiled form of a module's call",
    "torch.nn.parallel.DistributedDataParallel._active_ddp_module": "finds the wrapper of a module that apex's scripts wrap late",
    "torch.nn.parallel.DistributedDataParallel._inside_ddp_forward": "imports torch's compiler in the first forward",
    "torch.nn.parallel.DistributedDataParallel.reducer._remove_autograd_hooks": "a dropped wrapper's hooks are removed too",
    "torch.nn.parallel.DistributedDataParallel.reducer._check_reducer_finalized": "names parameters without a gradient",
    "torch.nn.parallel.DistributedDataParallel.reducer._set_ddp_runtime_logging_sample_rate": (
        "its statistics of every hundredth step cannot be captured as a CUDA graph"
    ),
    "torch.distributed.checkpoint.FileSystemReader._slice_file": "one tensor of a folder's file, which is read alone",
    "torch.optim.Optimizer._optimizer_step_pre_hooks": "a step without hooks bypasses torch's wrapper",
    "torch.optim.Optimizer._optimizer_step_post_hooks": "the same",
    "torch.amp.GradScaler._per_optimizer_states": "torch hands the scaler to optimizers that unscale by themselves",
    "torch.amp.GradScaler._check_inf_per_device": "the same",
    "torch.amp.GradScaler._get_scale_async": "the same",
    "torch.storage.TypedStorage._untyped_storage": "the public methods warn that the class is deprecated",
    "torch.Tensor._version": "detects whether a tensor was written to since it was read",
    "torch.Tensor._base": "in-place cross-entropy must not overwrite a view of a leaf",
    "torch.Tensor._is_view": "gradients that a wrapper shows as views of its buckets are copied before they are kept",
    "torch.UntypedStorage._cdata": "tensors that share memory are copied once into a snapshot",
    "torch.distributed.tensor.DTensor._local_tensor": "updates and statistics use the local shard, read in every step",
    "torch.distributed.tensor.DTensor._spec": "a copy of a local shard in host memory has the same layout",
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._rcvd_idx": (
        "workers that have returned no batch yet may still be starting, and get more time"
    ),
    "torch.utils.data.DataLoader._iterator": (
        "persistent workers are ended; it shows whether they run, which decides whether their seed is drawn"
    ),
    "torch.utils.tensorboard.SummaryWriter._get_file_writer": (
        "replaced by the logger's own file, because a full disk would end torch's thread"
    ),
    "torch.distributed.ProcessGroup._get_backend": "the timeout of a group has no public name",
    "torch.distributed.ProcessGroup.Options._timeout": "the same",
}
"""Private attributes of torch's objects, by class, with the reason for their use."""
