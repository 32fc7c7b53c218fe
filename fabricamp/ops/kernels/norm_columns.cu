// The gradients of the weight and the bias of LayerNorm and RMSNorm where norm_backward.cu does not make them: a block sums a
// tile of columns over a part of the rows.  A tile is 32 threads wide, GROUPS of them take rows in turn.
#include "common.cuh"
#include "norm.cuh"

constexpr int kTile = 32 * VECTOR;
constexpr int kTiles = (WIDTH + kTile - 1) / kTile;

// Writes kSums rows of WIDTH for each part of the rows.
extern "C" __global__ void __launch_bounds__(kThreads, 1) norm_columns(
    const OUTPUT* __restrict__ gradients, const SAVED* __restrict__ saved, const float* __restrict__ means,
    const float* __restrict__ roots, const PARAMETER* __restrict__ weight, const PARAMETER* __restrict__ bias,
    float* __restrict__ partials, int64 rows, double eps) {
  __shared__ float totals[WEIGHT + BIAS][kTile];
  int lane = threadIdx.x % 32, group = threadIdx.x / 32;
  int column = (int)(blockIdx.x % kTiles) * kTile + lane * VECTOR;
  int64 part = blockIdx.x / kTiles, parts = gridDim.x / kTiles;
  bool there = column < WIDTH;
  float factor[VECTOR], shift[VECTOR], sums[2][VECTOR];
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) factor[j] = 1.f, shift[j] = sums[0][j] = sums[1][j] = 0.f;
  if (EFFICIENT && WEIGHT && there) load<VECTOR>(weight + column, factor);
  if (EFFICIENT && BIAS && there) load<VECTOR>(bias + column, shift);
  if (there) {
#pragma unroll 4
    for (int64 row = part * GROUPS + group; row < rows; row += parts * GROUPS) {
      float gradient[VECTOR], value[VECTOR];
      load<VECTOR>(gradients + row * WIDTH + column, gradient);
      load<VECTOR>(saved + row * WIDTH + column, value);
      Row about{CENTER && !EFFICIENT ? means[row] : 0.f, roots[row]};
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) {
        if (WEIGHT) sums[0][j] += gradient[j] * normalised(value[j], about, factor[j], shift[j], (float)eps);
        if (BIAS) sums[WEIGHT][j] += gradient[j];
      }
    }
  }
  for (int turn = 0; turn < GROUPS; ++turn) {
    if (turn == group)
#pragma unroll
      for (int k = 0; k < WEIGHT + BIAS; ++k)
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
          float& total = totals[k][lane * VECTOR + j];
          total = turn == 0 ? sums[k][j] : total + sums[k][j];
        }
    __syncthreads();
  }
  float* own = partials + part * (WEIGHT + BIAS) * WIDTH;
  int first = column - lane * VECTOR;
  for (int i = threadIdx.x; i < (WEIGHT + BIAS) * kTile; i += kThreads)
    if (first + i % kTile < WIDTH) own[(int64)(i / kTile) * WIDTH + first + i % kTile] = totals[i / kTile][i % kTile];
}
