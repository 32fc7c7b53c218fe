// Adds the column sums of the blocks, always in the same order: GROUPS warps process the rows of sums in turn.
#include "common.cuh"
#include "norm.cuh"

extern "C" __global__ void __launch_bounds__(kThreads) norm_finish(
    const float* __restrict__ partials, PARAMETER* __restrict__ weight, PARAMETER* __restrict__ bias, int64 parts, int64 width) {
  int64 columns = (WEIGHT + BIAS) * width;
  __shared__ float totals[GROUPS][32];
  int lane = threadIdx.x % 32, group = threadIdx.x / 32;
  int64 column = (int64)blockIdx.x * 32 + lane;
  float sum = 0;
  if (column < columns) {
#pragma unroll 4
    for (int64 part = group; part < parts; part += GROUPS) sum += partials[part * columns + column];
  }
  totals[group][lane] = sum;
  __syncthreads();
  if (group != 0 || column >= columns) return;
  for (int other = 1; other < GROUPS; ++other) sum += totals[other][lane];
  if (WEIGHT && column < width) weight[column] = Narrow<PARAMETER>::of(sum);
  else if (BIAS) bias[column - WEIGHT * width] = Narrow<PARAMETER>::of(sum);
}
