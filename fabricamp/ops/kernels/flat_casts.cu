// Casts pieces of tensors into flat memory: a unit's shards before FSDP gathers them, its gradients before they are scattered.
#include "common.cuh"

#ifndef FROM
#define FROM float
#endif
#ifndef TO
#define TO __nv_bfloat16
#endif

constexpr int kElements = 8;  // neighbours that a thread casts at once
constexpr int kPacks = 2;     // of these, by each thread

// The lines of the layout, `pieces` words each, as ops/flat_casts.py writes them.
enum PieceLine { TENSOR, FIRST, PLACE, COUNT, SCALE, FIRST_BLOCK };

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

struct Plain {
  TO* to;
  template <int N> __device__ void write(int64 place, const float (&values)[N]) { store<N>(to + place, values); }
};

// Rounded to TO first, then times the scale in fp32.
struct Scaled {
  unsigned char* to;
  float scale;
  template <int N> __device__ void write(int64 place, const float (&values)[N]) {
    Pack<unsigned char, N> bytes;
#pragma unroll
    for (int j = 0; j < N; ++j) bytes.value[j] = (unsigned char)e4m3(widen(Narrow<TO>::of(values[j])) * scale);
    *(Pack<unsigned char, N>*)(to + place) = bytes;
  }
};

// Casts this block's part of a piece: by kElements where both addresses allow it.
template <typename Target> __device__ __forceinline__ void cast(const FROM* from, Target target, int64 begin, int64 count, bool aligned) {
  int64 end = begin + (int64)blockDim.x * kElements * kPacks;
  if (end > count) end = count;
  int64 whole = aligned ? begin + (end - begin) / kElements * kElements : begin;
#pragma unroll
  for (int pack = 0; pack < kPacks; ++pack) {
    int64 place = begin + ((int64)pack * blockDim.x + threadIdx.x) * kElements;
    if (place < whole) {
      float values[kElements];
      load<kElements>(from + place, values);
      target.template write<kElements>(place, values);
    }
  }
  for (int64 place = whole + threadIdx.x; place < end; place += blockDim.x) {
    float values[1];
    load<1>(from + place, values);
    target.template write<1>(place, values);
  }
}

// `blocks`: the piece of each block.
extern "C" __global__ void __launch_bounds__(256) flat_casts(
    const int64* layout, const int* blocks, int64 pieces, unsigned char* flat, const FROM* a0, const FROM* a1, const FROM* a2,
    const FROM* a3, const FROM* a4, const FROM* a5, const FROM* a6, const FROM* a7, const FROM* a8, const FROM* a9,
    const FROM* a10, const FROM* a11, const FROM* a12, const FROM* a13, const FROM* a14, const FROM* a15) {
  int piece = blocks[blockIdx.x];
  int tensor = (int)layout[TENSOR * pieces + piece];
  const FROM* low = tensor < 4 ? (tensor < 2 ? (tensor == 0 ? a0 : a1) : (tensor == 2 ? a2 : a3))
                               : (tensor < 6 ? (tensor == 4 ? a4 : a5) : (tensor == 6 ? a6 : a7));
  const FROM* high = tensor < 12 ? (tensor < 10 ? (tensor == 8 ? a8 : a9) : (tensor == 10 ? a10 : a11))
                                 : (tensor < 14 ? (tensor == 12 ? a12 : a13) : (tensor == 14 ? a14 : a15));
  const FROM* from = (tensor < 8 ? low : high) + layout[FIRST * pieces + piece];
  unsigned char* to = flat + layout[PLACE * pieces + piece];
  const float* scale = (const float*)layout[SCALE * pieces + piece];
  int64 count = layout[COUNT * pieces + piece];
  int64 begin = (blockIdx.x - layout[FIRST_BLOCK * pieces + piece]) * blockDim.x * kElements * kPacks;
  bool aligned = ((int64)from | (int64)to) % 16 == 0;
  if (scale == nullptr) cast(from, Plain{(TO*)to}, begin, count, aligned);
  else cast(from, Scaled{to, *scale}, begin, count, aligned);
}
