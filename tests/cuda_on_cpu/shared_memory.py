"""Memory that several processes map, in place of GPUs that write each other's: kernels that exchange inside run on the CPU so."""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist

from fabricamp.ops import bridge, peer_memory
from fabricamp.ops.batch_norm import kernels as batch_norm_kernels
from tests.cuda_on_cpu.compiler import compiler

__all__ = ["use_kernels"]


def map_words(words, group, device):
    """What ``peer_memory.ALLOCATORS`` holds for a kind of device."""
    own = tempfile.NamedTemporaryFile(dir="/dev/shm")  # noqa: SIM115  # it goes with what is mapped
    own.truncate(8 * words)
    names = [None] * dist.get_world_size(group)
    dist.all_gather_object(names, own.name, group=group)
    mapped = [torch.from_file(name, shared=True, size=words, dtype=torch.int64) for name in names]
    dist.barrier(group=group)  # all have mapped it: the files may go
    return peer_memory.Mapped([one.data_ptr() for one in mapped], mapped[dist.get_rank(group)], (own, mapped))


def use_kernels(reverse=False):
    """From now on, in this process, tensors on the CPU run kernels, and ranks share memory."""
    bridge.COMPILERS["cpu"] = compiler(reverse)
    peer_memory.ALLOCATORS["cpu"] = map_words
    batch_norm_kernels.THREADS = 64
    batch_norm_kernels.WAITING_SHARE = 3  # two of six
    bridge.kernel.cache_clear()
