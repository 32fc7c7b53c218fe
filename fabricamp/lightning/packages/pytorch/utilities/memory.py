"""Detaches nested tensors, frees memory, and recognises out-of-memory errors."""

from __future__ import annotations

import gc
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor


def recursive_detach(in_dict: Any, to_cpu: bool = False) -> Any:
    """Returns the container with detached tensors, on the CPU if ``to_cpu``."""
    return apply_to_collection(in_dict, Tensor, lambda value: value.detach().cpu() if to_cpu else value.detach())


def is_oom_error(exception: BaseException) -> bool:
    """Returns whether the error is an out-of-memory error of any kind below."""
    return is_cuda_out_of_memory(exception) or is_cudnn_snafu(exception) or is_out_of_cpu_memory(exception)


def is_cuda_out_of_memory(exception: BaseException) -> bool:
    """Returns whether the error says that GPU memory was exhausted."""
    return _says(exception, "CUDA") and _says(exception, "out of memory")


def is_cudnn_snafu(exception: BaseException) -> bool:
    """Returns whether the error is cuDNN's "not supported", which it also raises if memory is exhausted."""
    return _says(exception, "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.")


def is_out_of_cpu_memory(exception: BaseException) -> bool:
    """Returns whether the error says that host memory was exhausted."""
    return _says(exception, "DefaultCPUAllocator: can't allocate memory")


def _says(exception: BaseException, words: str) -> bool:
    return isinstance(exception, RuntimeError) and len(exception.args) == 1 and words in str(exception.args[0])


def garbage_collection_cuda() -> None:
    """Runs the garbage collector, and frees torch's cached GPU memory."""
    gc.collect()
    torch.cuda.empty_cache()
