// LayerNorm and RMSNorm of rows that are too wide for registers: a block reads its row for the mean, for the variance and to
// normalise it, from the cache after the first time.
#include "common.cuh"
#include "norm.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1) norm_forward_wide(
    const INPUT* __restrict__ input, const PARAMETER* __restrict__ weight, const PARAMETER* __restrict__ bias,
    OUTPUT* __restrict__ output, float* __restrict__ means, float* __restrict__ roots, int64 rows, double eps) {
  int turn = 0;
  const INPUT* from = input + (int64)blockIdx.x * WIDTH;
  OUTPUT* to = output + (int64)blockIdx.x * WIDTH;
  float value[VECTOR], mean = 0, squares = 0;
#if CENTER
#pragma unroll 4
  for (int pack = threadIdx.x; pack < kPacks; pack += LANES) {
    load<VECTOR>(from + (int64)pack * VECTOR, value);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) mean += value[j];
  }
  mean = row_sum(mean, turn) * kShare;
#endif
#pragma unroll 4
  for (int pack = threadIdx.x; pack < kPacks; pack += LANES) {
    load<VECTOR>(from + (int64)pack * VECTOR, value);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) squares += (value[j] - mean) * (value[j] - mean);
  }
  float root = rsqrtf(row_sum(squares, turn) * kShare + (float)eps);
  if (threadIdx.x == 0) {
    roots[blockIdx.x] = root;
    if (CENTER) means[blockIdx.x] = mean;
  }
#pragma unroll 2
  for (int pack = threadIdx.x; pack < kPacks; pack += LANES) {
    int64 column = (int64)pack * VECTOR;
    float factor[VECTOR], shift[VECTOR];
    load<VECTOR>(from + column, value);
    if (WEIGHT) load<VECTOR>(weight + column, factor);
    if (BIAS) load<VECTOR>(bias + column, shift);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      value[j] = (value[j] - mean) * root;
      if (WEIGHT) value[j] *= factor[j];
      if (BIAS) value[j] += shift[j];
    }
    store<VECTOR>(to + column, value);
  }
}
