"""Memory shared by processes, in place of GPU peer memory: kernels that exchange values between ranks then run on the CPU."""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist

from fabricamp.ops import bridge, peer_memory
from fabricamp.ops.batch_norm import kernels as batch_norm_kernels
from tests.cuda_on_cpu.compiler import compiler

__all__ = ["use_kernels"]


def map_words(words, group, device):
    """Maps shared memory; an entry for ``peer_memory.ALLOCATORS``."""
    own = tempfile.NamedTemporaryFile(dir="/dev/shm")  # noqa: SIM115  # deleted when the mapping is gone
    own.truncate(8 * words)
    names = [None] * dist.get_world_size(group)
    dist.all_gather_object(names, own.name, group=group)
    mapped = [torch.from_file(name, shared=True, size=words, dtype=torch.int64) for name in names]
    dist.barrier(group=group)  # all ranks have mapped the files, so these may be deleted
    return peer_memory.Mapped([one.data_ptr() for one in mapped], mapped[dist.get_rank(group)], mapped, own)


def use_kernels(reverse=False):
    """Makes CPU tensors run kernels and ranks share memory, for the rest of this process."""
    bridge.COMPILERS["cpu"] = compiler(reverse)
    peer_memory.ALLOCATORS["cpu"] = map_words
    batch_norm_kernels.THREADS = 64
    batch_norm_kernels.WAITING_SHARE = 3  # two of six blocks may wait
    bridge.kernel.cache_clear()
