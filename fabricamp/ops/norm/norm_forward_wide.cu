// LayerNorm and RMSNorm of rows that are too wide for registers: a block reads its row for mean and variance, then again, from
// the cache, to normalise it.
#include "common.cuh"
#include "norm.cuh"

// Adds a pack to a thread's statistics of its row: mean, sum of squared distances from the mean, number of packs so far.
__device__ __forceinline__ void add(const float (&value)[VECTOR], float& mean, float& squares, float& packs) {
  float own = 0, rest = 0;
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) own += value[j];
  own *= 1.f / VECTOR;
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) rest += (value[j] - own) * (value[j] - own);
  float apart = own - mean, share = 1.f / (packs + 1);
  mean += apart * share;
  squares += rest + apart * apart * (VECTOR * packs * share);
  packs += 1;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) norm_forward_wide(
    const INPUT* __restrict__ input, const PARAMETER* __restrict__ weight, const PARAMETER* __restrict__ bias,
    OUTPUT* __restrict__ output, float* __restrict__ means, float* __restrict__ roots, int64 rows, double eps) {
  const INPUT* from = input + (int64)blockIdx.x * WIDTH;
  OUTPUT* to = output + (int64)blockIdx.x * WIDTH;
  float value[VECTOR];
#if CENTER
  float mean[1] = {0}, squares[1] = {0}, packs = 0;
#pragma unroll 4
  for (int pack = threadIdx.x; pack < kPacks; pack += LANES) {
    load<VECTOR>(from + (int64)pack * VECTOR, value);
    add(value, mean[0], squares[0], packs);
  }
  // From the statistics of the threads to those of the warp.
  float own = mean[0], count = packs * VECTOR;
  mean[0] *= count;
  team_sums(mean);
  mean[0] /= elements_of(threadIdx.x / 32);
  squares[0] += (own - mean[0]) * (own - mean[0]) * count;
  team_sums(squares);
  Row about = merged(mean[0], squares[0], (float)eps);
#else
  int turn = 0;
  float squares[1] = {0};
#pragma unroll 4
  for (int pack = threadIdx.x; pack < kPacks; pack += LANES) {
    load<VECTOR>(from + (int64)pack * VECTOR, value);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) squares[0] += value[j] * value[j];
  }
  row_sums(squares, turn);
  Row about{0.f, rsqrtf(squares[0] * kShare + (float)eps)};
#endif
  if (threadIdx.x == 0) {
    roots[blockIdx.x] = about.root;
    if (CENTER) means[blockIdx.x] = about.mean;
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
      value[j] = (value[j] - about.mean) * about.root;
      if (WEIGHT) value[j] *= factor[j];
      if (BIAS) value[j] += shift[j];
    }
    put(to + column, value);
  }
}
