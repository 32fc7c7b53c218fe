from fabricamp.launch.devices import CUDAAccelerator as CUDAAccelerator
