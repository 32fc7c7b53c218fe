// The gradients of LayerNorm and RMSNorm over wide rows, for cards with clusters: a block, or a cluster of blocks, loops over rows
// and keeps the sums of its columns in registers.  Rows pass through a ring in shared memory (ring.cuh).  A row's sums are
// exchanged while those of the next row are computed, so no block waits for them.
#define MAILBOXES 4  // the sums of a row are posted before those of the previous row are read
#include "cluster.cuh"
#include "common.cuh"
#include "norm.cuh"
#include "ring.cuh"

constexpr int kSums = WEIGHT + BIAS;
constexpr int kRowSums = CENTER ? 2 : 1;
constexpr int kGradientBytes = kSlice * sizeof(OUTPUT), kStageBytes = kGradientBytes + kSlice * sizeof(SAVED);

struct Operands {
  const OUTPUT* gradients;
  const SAVED* saved;
  const float* means;
  const float* roots;
  int64 first, step;
  int turns;
  __device__ __forceinline__ int64 row(int turn) const { return first + turn * step; }
  __device__ __forceinline__ Row about(int turn) const {
    return Row{CENTER && !EFFICIENT ? means[row(turn)] : 0.f, roots[row(turn)]};
  }
};

__device__ __forceinline__ char* stage_of(int turn) {
  extern __shared__ uint4 stages[];
  return (char*)stages + turn % STAGES * kStageBytes;
}

// Starts the copy of the row of a turn, if there is one.
__device__ __forceinline__ void ask(const Operands& all, int turn) {
  if (threadIdx.x != 0 || turn >= all.turns) return;
  int stage = turn % STAGES;
  expect(stage, kStageBytes);
  bring(stage, stage_of(turn), all.gradients + all.row(turn) * WIDTH, kGradientBytes);
  bring(stage, stage_of(turn) + kGradientBytes, all.saved + all.row(turn) * WIDTH, kStageBytes - kGradientBytes);
}

// A thread's parameters.
struct Parameters {
  float factor[ITEMS][VECTOR], shift[EFFICIENT && BIAS ? ITEMS : 1][VECTOR];
  __device__ __forceinline__ float factor_at(int i, int j) const { return WEIGHT ? factor[i][j] : 1.f; }
  __device__ __forceinline__ float shift_at(int i, int j) const { return EFFICIENT && BIAS ? shift[i][j] : 0.f; }
};

__device__ __forceinline__ void own_items(int turn, int i, float (&gradient)[VECTOR], float (&value)[VECTOR]) {
  const char* stage = stage_of(turn);
  int column = column_of(i, threadIdx.x);
  load<VECTOR>((const OUTPUT*)stage + column, gradient);
  load<VECTOR>((const SAVED*)(stage + kGradientBytes) + column, value);
}

typedef Pack<float, kRowSums> Sums;

__device__ __forceinline__ Sums* posted(int turn) {
  __shared__ Sums inbox[MAILBOXES][CLUSTER];
  return inbox[turn % MAILBOXES];
}

// Sends the block's share of a row's sums to all blocks of the row.
__device__ __forceinline__ void send(const Operands& all, const Parameters& parameters, int turn, float least) {
  __shared__ Sums warps[2][kTeams];
  Row about = EFFICIENT ? all.about(turn) : Row{0.f, 0.f};
  arrived(turn % STAGES, turn / STAGES);
  float sums[kRowSums];
#pragma unroll
  for (float& sum : sums) sum = 0;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    if (!inside(i, threadIdx.x)) continue;
    float gradient[VECTOR], value[VECTOR];
    own_items(turn, i, gradient, value);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      float factor = parameters.factor_at(i, j), product = gradient[j] * factor;
      if (CENTER) sums[0] += product;
      sums[kRowSums - 1] += product * summed(value[j], about, factor, parameters.shift_at(i, j), least);
    }
  }
  team_sums(sums);
  if ((threadIdx.x & 31) == 0)
#pragma unroll
    for (int n = 0; n < kRowSums; ++n) warps[turn & 1][threadIdx.x / 32].value[n] = sums[n];
  __syncthreads();  // all threads are done with the row of two turns ago: its buffer is free
  if (turn >= 2) ask(all, turn - 2 + STAGES);
  if (threadIdx.x >= 32) return;
  int rank = threadIdx.x;
#pragma unroll
  for (int n = 0; n < kRowSums; ++n) sums[n] = rank < kTeams ? warps[turn & 1][rank].value[n] : 0.f;
  team_sums<32>(sums);
  if (rank < CLUSTER) post(turn, posted(turn) + blockIdx.x % CLUSTER, rank, sums);
}

__device__ __forceinline__ Sums total(int turn) {
  receive(turn, sizeof(Sums) * CLUSTER);
  Sums sum = posted(turn)[0];
#pragma unroll
  for (int block = 1; block < CLUSTER; ++block)
#pragma unroll
    for (int n = 0; n < kRowSums; ++n) sum.value[n] += posted(turn)[block].value[n];
  return sum;
}

extern "C" CLUSTERED __global__ void __launch_bounds__(kThreads, BLOCKS) norm_backward_ring(
    const OUTPUT* __restrict__ gradients, const SAVED* __restrict__ saved, const float* __restrict__ means,
    const float* __restrict__ roots, const PARAMETER* __restrict__ weight, const PARAMETER* __restrict__ bias,
    INPUT* __restrict__ out, float* __restrict__ partials, int64 rows, double eps) {
#if !(defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900)  // older cards never launch it, but every file must compile for them
  cluster_start();
  ring_start();
  int lane = threadIdx.x, start = slice_start();
  int64 first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
  Operands all{gradients + start, saved + start, means, roots, first, step, (int)((rows - first + step - 1) / step)};
#pragma unroll
  for (int turn = 0; turn < STAGES; ++turn) ask(all, turn);
  float least = (float)eps;
  Parameters parameters;
  float columns[2][ITEMS][VECTOR];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    if (WEIGHT && inside(i, lane)) load<VECTOR>(weight + start + column_of(i, lane), parameters.factor[i]);
    if constexpr (EFFICIENT && BIAS)
      if (inside(i, lane)) load<VECTOR>(bias + start + column_of(i, lane), parameters.shift[i]);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) columns[0][i][j] = columns[1][i][j] = 0;
  }
  cluster_started();
  send(all, parameters, 0, least);
  for (int turn = 0; turn < all.turns; ++turn) {
    Row about = all.about(turn);
    if (turn + 1 < all.turns) send(all, parameters, turn + 1, least);
    Sums sum = total(turn);
    float mean = CENTER ? sum.value[0] * kShare : 0.f;
    float slope = second_sum(sum.value[0], sum.value[kRowSums - 1], about) * kShare;
    INPUT* row = out + start + all.row(turn) * WIDTH;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (!inside(i, lane)) continue;
      float gradient[VECTOR], value[VECTOR];
      own_items(turn, i, gradient, value);
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) {
        float factor = parameters.factor_at(i, j);
        float normal = normalised(value[j], about, factor, parameters.shift_at(i, j), least);
        value[j] = (gradient[j] * factor - mean - normal * slope) * about.root;
        if (WEIGHT) columns[0][i][j] += gradient[j] * normal;
        if (BIAS) columns[WEIGHT][i][j] += gradient[j];
      }
      put(row + column_of(i, lane), value);
    }
  }
  float* own = partials + first * kSums * WIDTH + start;
#pragma unroll
  for (int sum = 0; sum < kSums; ++sum)
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
      if (inside(i, lane)) store<VECTOR>(own + (int64)sum * WIDTH + column_of(i, lane), columns[sum][i]);
#endif
}
