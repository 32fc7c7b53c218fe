// The second half of the backward pass of LayerNorm and RMSNorm over rows that are too wide for registers: one pass computes the
// gradient of the input, from the results of norm_row_sums.cu, and with SUMS the column sums.  A block has a tile of columns,
// 32 threads wide, and a part of the rows; its GROUPS of threads process the rows in turn.
#include "common.cuh"
#include "norm.cuh"

constexpr int kTile = 32 * VECTOR;
constexpr int kTiles = (WIDTH + kTile - 1) / kTile;

// Adds the sums of the block's groups one after another and writes them: a row of WIDTH for each of weight and bias.
__device__ __forceinline__ void write_sums(const float (&sums)[2][VECTOR], float* own, int lane, int group, int first) {
  constexpr int kSums = WEIGHT + BIAS;
  __shared__ float totals[kSums + 1][kTile];
  for (int turn = 0; turn < GROUPS; ++turn) {
    if (turn == group)
#pragma unroll
      for (int k = 0; k < kSums; ++k)
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
          float& total = totals[k][lane * VECTOR + j];
          total = turn == 0 ? sums[k][j] : total + sums[k][j];
        }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < kSums * kTile; i += kThreads)
    if (first + i % kTile < WIDTH) own[(int64)(i / kTile) * WIDTH + first + i % kTile] = totals[i / kTile][i % kTile];
}

// Loops from the last row to the first: the rows that norm_row_sums.cu read last are still in the cache.
extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS) norm_columns(
    const OUTPUT* __restrict__ gradients, const SAVED* __restrict__ saved, const float* __restrict__ means,
    const float* __restrict__ roots, const PARAMETER* __restrict__ weight, const PARAMETER* __restrict__ bias,
    const float* __restrict__ shares, INPUT* __restrict__ out, float* __restrict__ partials, int64 rows, double eps) {
  int lane = threadIdx.x % 32, group = threadIdx.x / 32;
  int column = (int)(blockIdx.x % kTiles) * kTile + lane * VECTOR;
  int64 part = blockIdx.x / kTiles, step = (int64)(gridDim.x / kTiles) * GROUPS;
  float factor[VECTOR], shift[VECTOR], sums[2][VECTOR];
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) factor[j] = 1.f, shift[j] = sums[0][j] = sums[1][j] = 0.f;
  if (WEIGHT && column < WIDTH) load<VECTOR>(weight + column, factor);
  if (EFFICIENT && BIAS && column < WIDTH) load<VECTOR>(bias + column, shift);
#pragma unroll 4
  for (int64 row = rows - 1 - part * GROUPS - group; row >= 0; row -= step) {
    if (column >= WIDTH) break;
    float gradient[VECTOR], value[VECTOR];
    load<VECTOR>(gradients + row * WIDTH + column, gradient);
    load<VECTOR>(saved + row * WIDTH + column, value);
    Row about{CENTER && !EFFICIENT ? means[row] : 0.f, roots[row]};
    float mean = CENTER ? shares[2 * row] : 0.f, slope = shares[2 * row + 1];
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      float normal = normalised(value[j], about, factor[j], shift[j], (float)eps);
      value[j] = (gradient[j] * factor[j] - mean - normal * slope) * about.root;
      if (SUMS && WEIGHT) sums[0][j] += gradient[j] * normal;
      if (SUMS && BIAS) sums[WEIGHT][j] += gradient[j];
    }
    put(out + row * WIDTH + column, value);
  }
  if (SUMS) write_sums(sums, partials + part * (WEIGHT + BIAS) * WIDTH, lane, group, column - lane * VECTOR);
}
