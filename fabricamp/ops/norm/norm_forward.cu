// LayerNorm and RMSNorm of rows that fit into the registers of their threads: one read, one write.  The pointers of the
// last loop are not __restrict__: the compiler would load weight and bias of all items first, into twice the registers.
// ops: layer_norm, rms_norm
#include "cluster.cuh"
#include "common.cuh"
#include "norm.cuh"

extern "C" CLUSTERED __global__ void __launch_bounds__(kThreads, BLOCKS) norm_forward(
    const INPUT* __restrict__ input, const PARAMETER* weight, const PARAMETER* bias,
    OUTPUT* output, float* __restrict__ means, float* __restrict__ roots, int64 rows, double eps) {
  cluster_start();
  int lane = lane_of_row(), turn = 0, start = slice_start();
  input += start, weight += start, bias += start, output += start;
  int64 row = (int64)(blockIdx.x / CLUSTER) * GROUPS + group_of_block();
  bool there = GROUPS == 1 || row < rows;
  Packed<INPUT> values[ITEMS];
#pragma unroll
  for (int item = 0; item < ITEMS; ++item)
    if (there && inside(item, lane)) values[item] = streamed_at(input + row * WIDTH, column_of(item, lane));
    else values[item] = Packed<INPUT>{};

  float mean[1] = {0}, squares[1] = {0};
#if CENTER  // statistics of the warp, so that one barrier is enough
#pragma unroll
  for (int item = 0; item < ITEMS; ++item) {
    auto own = unpacked<INPUT>(values[item]);
    float sum = 0;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) sum += widen(own.value[j]);
    mean[0] += sum;
  }
  team_sums(mean);
  mean[0] /= elements_of(lane / 32);
#endif
#pragma unroll
  for (int item = 0; item < ITEMS; ++item) {
    if (!inside(item, lane)) continue;
    auto own = unpacked<INPUT>(values[item]);
    float sum = 0;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      float distance = widen(own.value[j]) - mean[0];
      sum += distance * distance;
    }
    squares[0] += sum;
  }
  cluster_started();
#if CENTER
  team_sums(squares);
  Row about = merged(mean[0], squares[0], (float)eps);
#else
  row_sums(squares, turn);
  Row about{0.f, rsqrtf(squares[0] * kShare + (float)eps)};
#endif
  if (!there) return;
  if (lane == 0 && start == 0) {
    roots[row] = about.root;
    if (CENTER) means[row] = about.mean;
  }
#pragma unroll
  for (int item = 0; item < ITEMS; ++item) {
    if (!inside(item, lane)) continue;
    int column = column_of(item, lane);
    auto own = unpacked<INPUT>(values[item]);
    float result[VECTOR], factor[VECTOR], shift[VECTOR];
    if (WEIGHT) load<VECTOR>(weight + column, factor);
    if (BIAS) load<VECTOR>(bias + column, shift);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      result[j] = (widen(own.value[j]) - about.mean) * about.root;
      if (WEIGHT) result[j] *= factor[j];
      if (BIAS) result[j] += shift[j];
    }
    put(output + row * WIDTH + column, result);
  }
}
