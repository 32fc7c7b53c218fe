// The gradients of LayerNorm and RMSNorm, for rows that fit into the registers of their threads.  SUMS: a block loops over rows
// and keeps the sums of its columns, so that one pass serves input, weight and bias: 1 in registers, 2 in dynamic shared memory
// (then GROUPS is 1).  AHEAD: a block reads the next row before it computes this row, else each pack as soon as this row's pack is
// used.  If the sums do not fit, norm_columns.cu computes them.
#include "cluster.cuh"
#include "common.cuh"
#include "norm.cuh"

constexpr int kSums = WEIGHT + BIAS;
constexpr bool kShared = SUMS == 2;
constexpr bool kRefill = SUMS && !AHEAD;

// The type of row counts: no memory holds 2^31 wide rows, and their kernels are short of registers.
#if WIDTH >= 4096
typedef int Count;
#else
typedef int64 Count;
#endif

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
  Packed<SAVED> saved[ITEMS];
  Packed<OUTPUT> gradient[ITEMS];
};

// Column sums over the rows of this block.
struct Columns {
  float weight[SUMS == 1 && WEIGHT ? ITEMS : 1][VECTOR];
  float bias[SUMS == 1 && BIAS ? ITEMS : 1][VECTOR];
};

#if SUMS == 1
__device__ __forceinline__ void clear(Columns& columns, int lane) {
#pragma unroll
  for (int i = 0; i < ITEMS; ++i)
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      if (WEIGHT) columns.weight[i][j] = 0;
      if (BIAS) columns.bias[i][j] = 0;
    }
}

__device__ __forceinline__ void keep(float* totals, const float (&sums)[VECTOR], int column, bool first) {
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) totals[column + j] = first ? sums[j] : totals[column + j] + sums[j];
}

// Writes the block's sums, adding its groups of threads one after another: kSums rows of WIDTH.
__device__ __forceinline__ void write_sums(const Columns& columns, float* own, int lane, int group) {
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
#elif SUMS == 2
// A thread only accesses its own sums: no barriers.  Its 16 bytes are next to its neighbours', so that no two share a bank.
constexpr int kPart = VECTOR < 4 ? VECTOR : 4;
constexpr int kParts = VECTOR / kPart;

__device__ __forceinline__ Pack<float, kPart>& part_of(int sum, int i, int k, int lane) {
  extern __shared__ Pack<float, kPart> totals[];
  return totals[((sum * ITEMS + i) * kParts + k) * LANES + lane];
}

__device__ __forceinline__ void clear(Columns&, int lane) {
#pragma unroll
  for (int i = 0; i < kSums * ITEMS * kParts; ++i) part_of(0, 0, i, lane) = Pack<float, kPart>{};
}

__device__ __forceinline__ void add(int sum, int i, int lane, const float (&value)[VECTOR]) {
#pragma unroll
  for (int k = 0; k < kParts; ++k) {
    Pack<float, kPart> part = part_of(sum, i, k, lane);
#pragma unroll
    for (int j = 0; j < kPart; ++j) part.value[j] += value[k * kPart + j];
    part_of(sum, i, k, lane) = part;
  }
}

// Writes the block's sums: kSums rows of WIDTH.
__device__ __forceinline__ void write_sums(const Columns&, float* own, int lane, int group) {
  for (int sum = 0; sum < kSums; ++sum)
    for (int i = 0; i < ITEMS; ++i) {
      if (!inside(i, lane)) continue;
#pragma unroll
      for (int k = 0; k < kParts; ++k)
#pragma unroll
        for (int j = 0; j < kPart; ++j)
          own[(int64)sum * WIDTH + column_of(i, lane) + k * kPart + j] = part_of(sum, i, k, lane).value[j];
    }
}
#endif

extern "C" CLUSTERED __global__ void __launch_bounds__(kThreads, BLOCKS) norm_backward(
    const OUTPUT* __restrict__ gradients, const SAVED* __restrict__ saved, const float* __restrict__ means,
    const float* __restrict__ roots, const PARAMETER* __restrict__ weight, const PARAMETER* __restrict__ bias,
    INPUT* __restrict__ out, float* __restrict__ partials, int64 rows, double eps) {
  cluster_start();
  int lane = lane_of_row(), group = group_of_block(), turn = 0, start = slice_start();
  gradients += start, saved += start, weight += start, bias += start, out += start;
  float least = (float)eps;
  Tile<PARAMETER> weights, biases;
  if (WEIGHT && !kShared) weights.read(weight, lane, true);
  if (EFFICIENT && BIAS && !kShared) biases.read(bias, lane, true);
  Columns columns;
#if SUMS
  clear(columns, lane);
#endif
  // Beyond the last row this reads the last row again, without using it: without a branch fewer registers are needed.
  auto fetch_item = [&](Held& held, int64 row, int i) {
    row = row < rows ? row : rows - 1;
    if (!inside(i, lane)) return;
    held.saved[i] = streamed_at(saved + row * WIDTH, column_of(i, lane));
    held.gradient[i] = streamed_at(gradients + row * WIDTH, column_of(i, lane));
  };
  auto fetch = [&](Held& held, int64 row) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) fetch_item(held, row, i);
  };
  // With the sums in shared memory, registers are kept for rows: weight and bias are read from the cache each time.
  auto parameters_of = [&](int i, float (&factor)[VECTOR], float (&shift)[VECTOR]) {
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) factor[j] = 1.f, shift[j] = 0.f;
    if (WEIGHT && kShared) load<VECTOR>(unknown(weight) + column_of(i, lane), factor);
    if (EFFICIENT && BIAS && kShared) load<VECTOR>(unknown(bias) + column_of(i, lane), shift);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      if (WEIGHT && !kShared) factor[j] = weights.at(i, j);
      if (EFFICIENT && BIAS && !kShared) shift[j] = biases.at(i, j);
    }
  };
  Count begin = (Count)(blockIdx.x / CLUSTER) * GROUPS, step = (Count)(gridDim.x / CLUSTER) * GROUPS, last = (Count)rows;
  Held held, next;
  fetch(AHEAD ? next : held, begin + group);
  cluster_started();
  // All groups do the same number of iterations, because there are barriers inside.
  for (Count first = begin; first < last; first += step) {
    int64 row = first + group;
    if (AHEAD) {
      held = next;
      fetch(next, row + step);
    }
    int64 known = GROUPS == 1 || row < rows ? row : rows - 1;
    Row about{CENTER && !EFFICIENT ? means[known] : 0.f, roots[known]};  // first needed after the row's sums
    float sums[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (!inside(i, lane)) continue;
      auto value = unpacked<SAVED>(held.saved[i]);
      auto upper = unpacked<OUTPUT>(held.gradient[i]);
      if (WEIGHT && !kShared) forget(weights.item[i]);  // or it would be widened before the loop, into twice the registers
      float factor[VECTOR], shift[VECTOR];
      parameters_of(i, factor, shift);
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) {
        float gradient = widen(upper.value[j]) * factor[j];
        if (CENTER) sums[0] += gradient;
        sums[1] += gradient * summed(widen(value.value[j]), about, factor[j], shift[j], least);
      }
    }
    if (CENTER) row_sums(sums, turn);
    else sums[1] = row_sum(sums[1], turn);
    if (row >= rows) continue;
    float mean = sums[0] * kShare, slope = second_sum(sums[0], sums[1], about) * kShare;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (!inside(i, lane)) continue;
      auto value = unpacked<SAVED>(held.saved[i]);
      auto upper = unpacked<OUTPUT>(held.gradient[i]);
      float factor[VECTOR], shift[VECTOR], result[VECTOR], gradient[VECTOR];
      parameters_of(i, factor, shift);
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) {
        gradient[j] = widen(upper.value[j]);
        float normal = normalised(widen(value.value[j]), about, factor[j], shift[j], least);
        result[j] = (gradient[j] * factor[j] - mean - normal * slope) * about.root;
#if SUMS == 1
        if (WEIGHT) columns.weight[i][j] += gradient[j] * normal;
        if (BIAS) columns.bias[i][j] += gradient[j];
#endif
        factor[j] = gradient[j] * normal;
      }
#if SUMS == 2
      if (WEIGHT) add(0, i, lane, factor);
      if (BIAS) add(WEIGHT, i, lane, gradient);
#endif
      if (kRefill) fetch_item(held, row + step, i);
      put(out + row * WIDTH + column_of(i, lane), result);
    }
  }
#if SUMS
  write_sums(columns, partials + (int64)(blockIdx.x / CLUSTER) * kSums * WIDTH + start, lane, group);
#endif
}
