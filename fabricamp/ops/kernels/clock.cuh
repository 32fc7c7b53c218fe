// The GPU's clock, which all streams and kernels share; a CPU's runner brings its own.
#pragma once

#ifdef __CUDACC__
__device__ __forceinline__ long long nanoseconds() {
  long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
#endif
