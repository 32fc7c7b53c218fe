from tests.cuda_on_cpu.compiler import kernel_device

__all__ = ["kernel_device"]
