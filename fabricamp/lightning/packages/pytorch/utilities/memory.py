"""Detaches nested tensors, frees memory, and tells errors of too little memory from others."""

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
    """Returns whether memory was too small."""
    return is_cuda_out_of_memory(exception) or is_cudnn_snafu(exception) or is_out_of_cpu_memory(exception)


def is_cuda_out_of_memory(exception: BaseException) -> bool:
    """Returns whether the GPU's memory was too small."""
    return _says(exception, "CUDA") and _says(exception, "out of memory")


def is_cudnn_snafu(exception: BaseException) -> bool:
    """Returns whether cuDNN refused, which it does for lack of memory."""
    return _says(exception, "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.")


def is_out_of_cpu_memory(exception: BaseException) -> bool:
    """Returns whether the host's memory was too small."""
    return _says(exception, "DefaultCPUAllocator: can't allocate memory")


def _says(exception: BaseException, words: str) -> bool:
    return isinstance(exception, RuntimeError) and len(exception.args) == 1 and words in str(exception.args[0])


def garbage_collection_cuda() -> None:
    """Collects garbage, and gives cached memory of GPUs back."""
    gc.collect()
    torch.cuda.empty_cache()
