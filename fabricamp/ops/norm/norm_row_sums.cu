// The first half of the backward pass of LayerNorm and RMSNorm over rows that are too wide for registers: computes for each row
// the mean of its gradients times the weight, and the mean of the products of these with the normalised values.
#include "common.cuh"
#include "norm.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1) norm_row_sums(
    const OUTPUT* __restrict__ gradients, const SAVED* __restrict__ saved, const float* __restrict__ means,
    const float* __restrict__ roots, const PARAMETER* __restrict__ weight, const PARAMETER* __restrict__ bias,
    float* __restrict__ shares, double eps) {
  int turn = 0;
  int64 row = blockIdx.x, start = row * WIDTH;
  Row about{CENTER && !EFFICIENT ? means[row] : 0.f, roots[row]};
  float sums[2] = {0, 0};
#pragma unroll 4
  for (int pack = threadIdx.x; pack < kPacks; pack += LANES) {
    int column = pack * VECTOR;
    float gradient[VECTOR], value[VECTOR], factor[VECTOR], shift[VECTOR];
    load<VECTOR>(gradients + start + column, gradient);
    load<VECTOR>(saved + start + column, value);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) factor[j] = 1.f, shift[j] = 0.f;
    if (WEIGHT) load<VECTOR>(weight + column, factor);
    if (EFFICIENT && BIAS) load<VECTOR>(bias + column, shift);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      float product = gradient[j] * factor[j];
      if (CENTER) sums[0] += product;
      sums[1] += product * normalised(value[j], about, factor[j], shift[j], (float)eps);
    }
  }
  row_sums(sums, turn);
  if (threadIdx.x == 0) {
    shares[2 * row] = sums[0] * kShare;
    shares[2 * row + 1] = sums[1] * kShare;
  }
}
