from fabricamp.launch.devices import Accelerator as Accelerator
from fabricamp.launch.devices import CPUAccelerator as CPUAccelerator
from fabricamp.launch.devices import CUDAAccelerator as CUDAAccelerator
from fabricamp.launch.devices import find_usable_cuda_devices as find_usable_cuda_devices

__all__ = ["Accelerator", "CPUAccelerator", "CUDAAccelerator", "find_usable_cuda_devices"]
