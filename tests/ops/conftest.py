from tests.cuda_on_cpu.compiler import kernels_on_cpu

__all__ = ["kernels_on_cpu"]
