// LayerNorm and RMSNorm of rows that fit into the registers of their threads: one reading, one writing.
#include "common.cuh"
#include "norm.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1) norm_forward(
    const INPUT* __restrict__ input, const PARAMETER* __restrict__ weight, const PARAMETER* __restrict__ bias,
    OUTPUT* __restrict__ output, float* __restrict__ means, float* __restrict__ roots, int64 rows, double eps) {
  int lane = threadIdx.x % LANES, turn = 0;
  int64 row = (int64)blockIdx.x * GROUPS + threadIdx.x / LANES;
  bool there = row < rows;
  Pack<INPUT, VECTOR> values[ITEMS];
#pragma unroll
  for (int item = 0; item < ITEMS; ++item)
    if (there && inside(item, lane)) values[item] = pack_at(input + row * WIDTH, column_of(item, lane));
    else values[item] = Pack<INPUT, VECTOR>{};

  float mean = 0, squares = 0;
#if CENTER
#pragma unroll
  for (int item = 0; item < ITEMS; ++item)
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) mean += widen(values[item].value[j]);
  mean = row_sum(mean, turn) * kShare;
#endif
#pragma unroll
  for (int item = 0; item < ITEMS; ++item)
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      float distance = widen(values[item].value[j]) - mean;
      squares += inside(item, lane) ? distance * distance : 0.f;
    }
  float root = rsqrtf(row_sum(squares, turn) * kShare + (float)eps);
  if (!there) return;
#pragma unroll
  for (int item = 0; item < ITEMS; ++item) forget(values[item]);
  if (lane == 0) {
    roots[row] = root;
    if (CENTER) means[row] = mean;
  }
#pragma unroll
  for (int item = 0; item < ITEMS; ++item) {
    if (!inside(item, lane)) continue;
    int column = column_of(item, lane);
    float result[VECTOR], factor[VECTOR], shift[VECTOR];
    if (WEIGHT) load<VECTOR>(weight + column, factor);
    if (BIAS) load<VECTOR>(bias + column, shift);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      result[j] = (widen(values[item].value[j]) - mean) * root;
      if (WEIGHT) result[j] *= factor[j];
      if (BIAS) result[j] += shift[j];
    }
    store<VECTOR>(output + row * WIDTH + column, result);
  }
}
