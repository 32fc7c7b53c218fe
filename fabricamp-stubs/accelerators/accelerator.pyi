from fabricamp.launch.devices import Accelerator as Accelerator
