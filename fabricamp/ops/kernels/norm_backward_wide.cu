// The gradient of the input of LayerNorm and RMSNorm, for rows that are too wide for registers: a block reads its row twice, the
// second time from the cache.
#include "common.cuh"
#include "norm.cuh"

struct Part {
  float value[VECTOR], gradient[VECTOR];  // normalised; times the weight
};

__device__ __forceinline__ void read(
    Part& part, const OUTPUT* gradients, const SAVED* saved, const PARAMETER* weight, const PARAMETER* bias, Row row, float least) {
  float factor[VECTOR], shift[VECTOR];
  load<VECTOR>(gradients, part.gradient);
  load<VECTOR>(saved, part.value);
  if (WEIGHT) load<VECTOR>(weight, factor);
  if (EFFICIENT && BIAS) load<VECTOR>(bias, shift);
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) {
    part.value[j] = normalised(part.value[j], row, WEIGHT ? factor[j] : 1.f, EFFICIENT && BIAS ? shift[j] : 0.f, least);
    if (WEIGHT) part.gradient[j] *= factor[j];
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) norm_backward_wide(
    const OUTPUT* __restrict__ gradients, const SAVED* __restrict__ saved, const float* __restrict__ means,
    const float* __restrict__ roots, const PARAMETER* __restrict__ weight, const PARAMETER* __restrict__ bias,
    INPUT* __restrict__ out, float* __restrict__ partials, int64 rows, double eps) {
  int turn = 0;
  int64 start = (int64)blockIdx.x * WIDTH;
  Row row{CENTER && !EFFICIENT ? means[blockIdx.x] : 0.f, roots[blockIdx.x]};
  Part part;
  float sums[2] = {0, 0};
#pragma unroll 2
  for (int pack = threadIdx.x; pack < kPacks; pack += LANES) {
    int64 column = (int64)pack * VECTOR;
    read(part, gradients + start + column, saved + start + column, weight + column, bias + column, row, (float)eps);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      if (CENTER) sums[0] += part.gradient[j];
      sums[1] += part.gradient[j] * part.value[j];
    }
  }
  row_sums(sums, turn);
  float shift = sums[0] * kShare, slope = sums[1] * kShare;
#pragma unroll 2
  for (int pack = threadIdx.x; pack < kPacks; pack += LANES) {
    int64 column = (int64)pack * VECTOR;
    read(part, gradients + start + column, saved + start + column, weight + column, bias + column, row, (float)eps);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) part.gradient[j] = (part.gradient[j] - shift - part.value[j] * slope) * row.root;
    store<VECTOR>(out + start + column, part.gradient);
  }
}
