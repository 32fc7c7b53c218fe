// Rounds a tensor to the dtype ROUNDED, multiplies by a scale in fp32, and casts to e4m3fn: reads 4 bytes an element, writes one.
#include "common.cuh"

#ifndef ROUNDED
#define ROUNDED __nv_bfloat16
#endif

constexpr int kPacks = 4;  // of four elements, by each thread

// The byte of a value, rounded to nearest even; values beyond 448 become 448, as torchao's cast has it.
__device__ __forceinline__ unsigned int e4m3(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  unsigned short both;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(0.f), "f"(value));
  return both;
#else
  unsigned int sign = value < 0 || (value == 0 && 1 / value < 0) ? 0x80u : 0u;
  if (value != value) return 0x7fu;
  float size = fabsf(value);
  if (size > 448.f) return sign | 0x7eu;
  int exponent = size < 0.015625f ? -6 : ilogbf(size);
  // Eights of a power of two; a value that rounds up to the next power has its bits by the same sum.
  return sign | (unsigned int)((exponent + 6) * 8 + (int)rintf(ldexpf(size, 3 - exponent)));
#endif
}

// `elements` is a multiple of 4, and the addresses are multiples of 16.
extern "C" __global__ void __launch_bounds__(256) to_float8(const float* from, const float* scale, unsigned char* to, int64 elements) {
  float factor = *scale;
  int64 first = (int64)blockIdx.x * (blockDim.x * kPacks) + threadIdx.x;
#pragma unroll
  for (int pack = 0; pack < kPacks; ++pack) {
    int64 place = 4 * (first + (int64)pack * blockDim.x);
    if (place < elements) {
      float values[4];
      load<4>(from + place, values);
      unsigned int bytes = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) bytes |= e4m3(widen(Narrow<ROUNDED>::of(values[j])) * factor) << (8 * j);
      *(unsigned int*)(to + place) = bytes;
    }
  }
}
