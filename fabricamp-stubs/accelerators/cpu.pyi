from fabricamp.launch.devices import CPUAccelerator as CPUAccelerator
