// The sum over ranks of half values, in fp32 and in the order of the ranks, times a factor.
#include "common.cuh"

#ifndef HALF
#define HALF __nv_bfloat16
#endif

constexpr int kElements = 8;

// The part of this rank is in `own`, those of the others are in `others`, one after the other; all are `elements` long.
extern "C" __global__ void __launch_bounds__(256) rank_sums(
    const HALF* own, const HALF* others, float* to, int64 elements, int64 rank, int64 ranks, double factor) {
  bool aligned = ((int64)own | (int64)others | (int64)to | elements * (int64)sizeof(HALF)) % 16 == 0;
  int64 thread = (int64)blockIdx.x * blockDim.x + threadIdx.x, threads = (int64)gridDim.x * blockDim.x;
  int64 whole = aligned ? elements : 0;
  float share = (float)factor;
  for (int64 place = thread * kElements; place < whole; place += threads * kElements) {
    float sums[kElements] = {};
#pragma unroll 1
    for (int from = 0; from < (int)ranks; ++from) {
      const HALF* part = from == rank ? own : others + (from - (from > rank)) * elements;
      float values[kElements];
      load<kElements>(part + place, values);
#pragma unroll
      for (int j = 0; j < kElements; ++j) sums[j] += values[j];
    }
#pragma unroll
    for (int j = 0; j < kElements; ++j) sums[j] *= share;
    store<kElements>(to + place, sums);
  }
  for (int64 place = whole + thread; place < elements; place += threads) {
    float sum = 0.f;
    for (int from = 0; from < (int)ranks; ++from) {
      const HALF* part = from == rank ? own : others + (from - (from > rank)) * elements;
      sum += widen(part[place]);
    }
    to[place] = sum * share;
  }
}
