// NovoGrad: columns gradient, parameter, exp_avg, half copy; cell 0 is the step count, cell 1 the average of the gradient's norm.
// ops: novograd
#include "common.cuh"
#include "rows.cuh"

#ifndef KINDS  // rows that most runs have
#define KINDS KIND(0, float, float, float, None) KIND(1, __half, float, float, __half)
#endif

enum Scalar { LR, BETA1, BETA2, NEW1, EPS, WEIGHT_DECAY, LOG_BETA1, LOG_BETA2, INSIDE, LARGEST, FROM_ZERO };

// The larger of two; unlike fmax it keeps a NaN.
template <typename T> __device__ __forceinline__ T larger(T one, T other) {
  return other > one || other != other ? other : one;
}

// The largest over a block, valid in thread 0.
template <typename T> __device__ __forceinline__ T block_max(T value) {
  __shared__ T warps[32];
  for (int step = 16; step > 0; step >>= 1) value = larger(value, __shfl_down_sync(0xffffffffu, value, step));
  __syncthreads();  // the memory of an earlier call may still be read
  if ((threadIdx.x & 31) == 0) warps[threadIdx.x >> 5] = value;
  __syncthreads();
  if (threadIdx.x < 32) {
    value = threadIdx.x < (blockDim.x + 31) / 32 ? warps[threadIdx.x] : T(0);
    for (int step = 16; step > 0; step >>= 1) value = larger(value, __shfl_down_sync(0xffffffffu, value, step));
  }
  return value;
}

template <typename G, typename M, bool largest> struct Size {
  const G* gradients;
  Gradient<M> gradient;
  M size;
  template <int N> __device__ __forceinline__ void run(int64 i) {
    M g[N];
    load<N>(gradients + i, g);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      M value = gradient.of(g[j]);
      size = largest ? larger(size, value < 0 ? -value : value) : size + value * value;
    }
  }
};

template <bool largest, typename G, typename P>
__device__ __forceinline__ double size_of(const Table& table, const Chunk& chunk, const StepState* state, double limit) {
  typedef typename MathOf<P>::type M;
  Size<G, M, largest> body{column<const G>(table, chunk, 0), gradient_of<M>(state, limit), 0};
  each<(sizeof(G) == 2 ? 8 : 4)>(chunk, body);
  return largest ? block_max(body.size) : block_sum(body.size);
}

template <typename G, typename P, typename... Others>
__device__ __forceinline__ double measure(const Table& table, const Chunk& chunk, const StepState* state, double limit) {
  if (chunk.scalars[LARGEST] != 0) return size_of<true, G, P>(table, chunk, state, limit);
  return size_of<false, G, P>(table, chunk, state, limit);
}

// First pass: numbers[chunk] = the sum of squares of the gradients as an update reads them, or the largest of them.
extern "C" __global__ void __launch_bounds__(512)
gradient_sizes(Table table, const StepState* state, double limit, int64 skips, double* numbers) {
  Chunk chunk;
  if (skipped(state, skips) || !locate(table, chunk)) return;
  double size = 0;
  switch (chunk.kind) {
#define KIND(index, ...) case index: size = measure<__VA_ARGS__>(table, chunk, state, limit); break;
    KINDS
#undef KIND
  }
  if (threadIdx.x == 0) numbers[blockIdx.x] = size;
}

// The sum of squares of a row's gradients, or the largest of them.
__device__ __forceinline__ double size_in(const Table& table, const Chunk& chunk, const double* numbers) {
  Span span = chunks_of(table, chunk.row);
  if (chunk.scalars[LARGEST] == 0) return sum_of(span, numbers, 1);
  double largest = 0;
  for (int64 i = span.first + threadIdx.x; i < span.last; i += blockDim.x) largest = larger(largest, numbers[i]);
  return block_max(largest);
}

// One block per row, for rows sharded over ranks: writes the sum of squares to `sums`; or with LARGEST, the largest value to
// `largest`, and to `sums` nan if this is nan, else 0.
extern "C" __global__ void __launch_bounds__(512)
row_sizes(Table table, const StepState* state, int64 skips, const double* numbers, double* sums, double* largest) {
  Chunk chunk;
  bool found = !skipped(state, skips) && locate_row(table, blockIdx.x, chunk);
  double size = found ? size_in(table, chunk, numbers) : 0;
  if (threadIdx.x != 0) return;
  bool takes_largest = found && chunk.scalars[LARGEST] != 0;
  sums[blockIdx.x] = takes_largest && size == size ? 0 : size;  // a maximum over ranks may lose a nan, a sum does not
  largest[blockIdx.x] = takes_largest ? size : 0;
}

template <typename G, typename P, typename... Others>
__device__ __forceinline__ void blend(const Table& table, const Chunk& chunk, double norm) {
  typedef typename MathOf<P>::type M;
  float* step = cell<float>(table, chunk, 0);
  M* average = cell<M>(table, chunk, 1);
  const double* s = chunk.scalars;
  double old = *average, beta = s[BETA2];
  bool first = *step == 0.f && s[FROM_ZERO] == 0;  // the average starts at the first norm
  if (!first) norm = s[LARGEST] != 0 ? beta * old + (1 - beta) * norm : sqrt(beta * old * old + (1 - beta) * norm * norm);
  *average = (M)norm;
  *step += 1.f;
}

// One block per row: updates the average with the gradient's norm, and counts the step.  `sums` and `largest` are those of full
// rows if rows are sharded over ranks, else null.
extern "C" __global__ void __launch_bounds__(512)
average_norms(Table table, const StepState* state, int64 skips, const double* numbers, const double* sums,
              const double* largest) {
  Chunk chunk;
  if (skipped(state, skips) || !locate_row(table, blockIdx.x, chunk)) return;
  bool takes_largest = chunk.scalars[LARGEST] != 0;
  double norm = !sums ? size_in(table, chunk, numbers)
                      : takes_largest ? sums[chunk.row] + largest[chunk.row] : sums[chunk.row];
  if (threadIdx.x != 0) return;
  if (!takes_largest) norm = sqrt(norm);
  switch (chunk.kind) {
#define KIND(index, ...) case index: blend<__VA_ARGS__>(table, chunk, norm); break;
    KINDS
#undef KIND
  }
}

template <typename G, typename P, typename M1, typename C> struct NovoGrad {
  typedef typename MathOf<P>::type M;
  const G* gradients;
  P* parameters;
  M1* averages;
  C* copies;
  Gradient<M> gradient;
  // If gradients are divided by the norm, `share` is its inverse and `keep` is 1; else `step_size` contains it, and `decay` is 0.
  M share, decay, beta1, new1, keep, step_size;

  template <int N> __device__ __forceinline__ void run(int64 i) {
    M g[N], p[N], average[N];
    load<N>(gradients + i, g);
    load<N>(parameters + i, p);
    load<N>(averages + i, average);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      M value = gradient.of(g[j]) * share + decay * p[j];
      average[j] = beta1 * average[j] + new1 * value;
      p[j] = keep * p[j] - step_size * average[j];
    }
    store<N>(parameters + i, p);
    store<N>(averages + i, average);
    store<N>(copies + i, p);
  }
};

template <typename G, typename P, typename M1, typename C>
__device__ __forceinline__ void go(const Table& table, const Chunk& chunk, const StepState* state, double limit) {
  typedef NovoGrad<G, P, M1, C> Body;
  typedef typename Body::M M;
  const double* s = chunk.scalars;
  M step = (M)*cell<const float>(table, chunk, 0);
  // 1 - beta^step without cancellation; a logarithm of -inf stands for no bias correction.
  M inverse = (M)1 / (*cell<const M>(table, chunk, 1) / sqrt(-expm1(step * (M)s[LOG_BETA2])) + (M)s[EPS]);
  bool inside = s[INSIDE] != 0;
  Body body;
  body.gradients = column<const G>(table, chunk, 0);
  body.parameters = column<P>(table, chunk, 1);
  body.averages = column<M1>(table, chunk, 2);
  body.copies = column<C>(table, chunk, 3);
  body.gradient = gradient_of<M>(state, limit);
  body.share = inside ? inverse : (M)1;
  body.decay = inside ? (M)s[WEIGHT_DECAY] : (M)0;
  body.beta1 = (M)s[BETA1];
  body.new1 = (M)s[NEW1];
  body.keep = inside ? (M)1 : (M)(1.0 - s[LR] * s[WEIGHT_DECAY]);
  body.step_size = (M)s[LR] / -expm1(step * (M)s[LOG_BETA1]) * (inside ? (M)1 : inverse);
  each<4>(chunk, body);
}

// Second pass: averages, parameters and their copies.
extern "C" __global__ void __launch_bounds__(512) update(Table table, const StepState* state, double limit, int64 skips) {
  Chunk chunk;
  if (skipped(state, skips) || !locate(table, chunk)) return;
  switch (chunk.kind) {
#define KIND(index, ...) case index: go<__VA_ARGS__>(table, chunk, state, limit); break;
    KINDS
#undef KIND
  }
}
