// The gradients of LayerNorm and RMSNorm, for rows that fit into the registers of their threads.  SUMS: a block goes over rows and
// keeps the sums of its columns, so that one reading serves input, weight and bias; AHEAD: it reads the next row before it
// computes this one.  norm_columns.cu makes the sums where they do not fit.
#include "common.cuh"
#include "norm.cuh"

constexpr int kSums = WEIGHT + BIAS;

template <typename T> struct Tile {
  Pack<T, VECTOR> item[ITEMS];
  __device__ __forceinline__ void read(const T* row, int lane, bool there) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
      if (there && inside(i, lane)) item[i] = pack_at(row, column_of(i, lane));
      else item[i] = Pack<T, VECTOR>{};
  }
  __device__ __forceinline__ float at(int i, int j) const { return widen(item[i].value[j]); }
};

struct Held {
  Tile<SAVED> saved;
  Tile<OUTPUT> gradient;
  Row row;
};

// Sums of columns over the rows of this block.
struct Columns {
  float weight[SUMS && WEIGHT ? ITEMS : 1][VECTOR];
  float bias[SUMS && BIAS ? ITEMS : 1][VECTOR];
};

#if SUMS
__device__ __forceinline__ void keep(float* totals, const float (&sums)[VECTOR], int column, bool first) {
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) totals[column + j] = first ? sums[j] : totals[column + j] + sums[j];
}

// Writes the block's sums, those of its groups of threads added one after another: kSums rows of WIDTH.
__device__ __forceinline__ void write_sums(const Columns& columns, float* partials, int lane, int group) {
  float* own = partials + (int64)blockIdx.x * kSums * WIDTH;
#if GROUPS > 1
  __shared__ float totals[kSums * WIDTH];
#else
  float* totals = own;
#endif
  for (int turn = 0; turn < GROUPS; ++turn) {
    if (GROUPS > 1) __syncthreads();
    if (turn != group) continue;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (!inside(i, lane)) continue;
      if (WEIGHT) keep(totals, columns.weight[i], column_of(i, lane), turn == 0);
      if (BIAS) keep(totals + WEIGHT * WIDTH, columns.bias[i], column_of(i, lane), turn == 0);
    }
  }
  if (GROUPS == 1) return;
  __syncthreads();
  for (int i = threadIdx.x; i < kSums * WIDTH; i += kThreads) own[i] = totals[i];
}
#endif

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS) norm_backward(
    const OUTPUT* __restrict__ gradients, const SAVED* __restrict__ saved, const float* __restrict__ means,
    const float* __restrict__ roots, const PARAMETER* __restrict__ weight, const PARAMETER* __restrict__ bias,
    INPUT* __restrict__ out, float* __restrict__ partials, int64 rows, double eps) {
  int lane = threadIdx.x % LANES, group = threadIdx.x / LANES, turn = 0;
  float least = (float)eps;
  Tile<PARAMETER> weights, biases;
  if (WEIGHT) weights.read(weight, lane, true);
  if (EFFICIENT && BIAS) biases.read(bias, lane, true);
  Columns columns;
#if SUMS
#pragma unroll
  for (int i = 0; i < ITEMS; ++i)
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      if (WEIGHT) columns.weight[i][j] = 0;
      if (BIAS) columns.bias[i][j] = 0;
    }
#endif
  auto fetch = [&](Held& held, int64 row) {
    bool there = row < rows;
    held.saved.read(saved + row * WIDTH, lane, there);
    held.gradient.read(gradients + row * WIDTH, lane, there);
    held.row.root = there ? roots[row] : 0.f;
    held.row.mean = CENTER && !EFFICIENT && there ? means[row] : 0.f;
  };
  auto factor_of = [&](int i, int j) { return WEIGHT ? weights.at(i, j) : 1.f; };
  auto normalised_of = [&](const Held& held, int i, int j) {
    return normalised(held.saved.at(i, j), held.row, factor_of(i, j), EFFICIENT && BIAS ? biases.at(i, j) : 0.f, least);
  };
  int64 step = (int64)gridDim.x * GROUPS;
  Held held, next;
  if (AHEAD) fetch(next, (int64)blockIdx.x * GROUPS + group);
  // All groups take the same number of turns: there are barriers inside.
  for (int64 first = (int64)blockIdx.x * GROUPS; first < rows; first += step) {
    int64 row = first + group;
    if (AHEAD) {
      held = next;
      fetch(next, row + step);
    } else {
      fetch(held, row);
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)  // or they would be widened before the loop, into twice the registers
      if (WEIGHT) forget(weights.item[i]);
    float sums[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) {
        float gradient = held.gradient.at(i, j) * factor_of(i, j);
        if (CENTER) sums[0] += gradient;
        if (inside(i, lane)) sums[1] += gradient * normalised_of(held, i, j);
      }
    if (CENTER) row_sums(sums, turn);
    else sums[1] = row_sum(sums[1], turn);
    if (row >= rows) continue;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      forget(held.saved.item[i]);
      forget(held.gradient.item[i]);
    }
    float shift = sums[0] * kShare, slope = sums[1] * kShare;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (!inside(i, lane)) continue;
      float result[VECTOR];
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) {
        float gradient = held.gradient.at(i, j), value = normalised_of(held, i, j);
        result[j] = (gradient * factor_of(i, j) - shift - value * slope) * held.row.root;
        if (SUMS && WEIGHT) columns.weight[i][j] += gradient * value;
        if (SUMS && BIAS) columns.bias[i][j] += gradient;
      }
      store<VECTOR>(out + row * WIDTH + column_of(i, lane), result);
    }
  }
#if SUMS
  write_sums(columns, partials, lane, group);
#endif
}
