// LARC: columns gradient, parameter; computes sums, then one rate per row, then the gradients times the rate.
// ops: larc
#include "common.cuh"
#include "rows.cuh"

#ifndef KINDS  // rows that most runs have
#define KINDS KIND(0, float, float, None)
#endif

enum Scalar { LR, WEIGHT_DECAY, TRUST, EPS, CLIP };

template <typename G, typename P> struct Squares {
  typedef typename CommonMath<G, P>::type M;
  const G* gradients;
  const P* parameters;
  M multiplier;
  M gradient_sum, parameter_sum;
  template <int N> __device__ __forceinline__ void run(int64 i) {
    M g[N], p[N];
    load<N>(gradients + i, g);
    load<N>(parameters + i, p);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      M value = g[j] * multiplier;
      gradient_sum += value * value;
      parameter_sum += p[j] * p[j];
    }
  }
};

template <typename G, typename P, typename... Others>
__device__ __forceinline__ void sum_up(const Table& table, const Chunk& chunk, const StepState* state, double* numbers) {
  typedef Squares<G, P> Body;
  typedef typename Body::M M;
  Body body{column<const G>(table, chunk, 0), column<const P>(table, chunk, 1), gradient_of<M>(state, -1).multiplier, 0, 0};
  each<4>(chunk, body);
  double of_gradients = block_sum(body.gradient_sum), of_parameters = block_sum(body.parameter_sum);
  if (threadIdx.x != 0) return;
  numbers[2 * (int64)blockIdx.x] = of_gradients;
  numbers[2 * (int64)blockIdx.x + 1] = of_parameters;
}

// Computes per chunk the sums of squares of the gradients (times the multiplier) and of the parameters.
extern "C" __global__ void __launch_bounds__(512) sums(Table table, const StepState* state, double* numbers) {
  Chunk chunk;
  if (skipped(state, 1) || !locate(table, chunk)) return;
  switch (chunk.kind) {
#define KIND(index, ...) case index: sum_up<__VA_ARGS__>(table, chunk, state, numbers); break;
    KINDS
#undef KIND
  }
}

// One block per row: the factor of the row's gradients, and the share of the parameter that is added to them before.
// `whole` holds the sums of full rows, two per row, if rows are sharded over ranks; else it is null.
extern "C" __global__ void __launch_bounds__(512)
rates(Table table, const StepState* state, const double* numbers, const double* whole, double* results) {
  Chunk chunk;
  if (skipped(state, 1) || !locate_row(table, blockIdx.x, chunk)) return;
  Span span = whole ? Span{chunk.row, chunk.row + 1} : chunks_of(table, chunk.row);
  if (whole) numbers = whole;
  double of_gradient = sqrt(sum_of(span, numbers, 2)), of_parameter = sqrt(sum_of(span, numbers + 1, 2));
  if (threadIdx.x != 0) return;
  const double* s = chunk.scalars;
  double rate = 1, decay = 0;
  if (of_gradient != 0 && of_parameter != 0) {
    decay = s[WEIGHT_DECAY];
    rate = s[TRUST] * of_parameter / (of_gradient + decay * of_parameter + s[EPS]);
    if (s[CLIP] != 0) rate = rate / s[LR] > 1 ? 1 : rate / s[LR];  // fmin would lose a NaN
  }
  results[2 * (int64)chunk.row] = rate;
  results[2 * (int64)chunk.row + 1] = decay;
}

template <typename G, typename P> struct Larc {
  typedef typename CommonMath<G, P>::type M;
  G* gradients;
  const P* parameters;
  M multiplier, rate, decay;
  template <int N> __device__ __forceinline__ void run(int64 i) {
    M g[N], p[N];
    load<N>(gradients + i, g);
    load<N>(parameters + i, p);
#pragma unroll
    for (int j = 0; j < N; ++j) g[j] = (g[j] * multiplier + decay * p[j]) * rate;
    store<N>(gradients + i, g);
  }
};

template <typename G, typename P, typename... Others>
__device__ __forceinline__ void adapt(const Table& table, const Chunk& chunk, const StepState* state, const double* rates) {
  typedef Larc<G, P> Body;
  typedef typename Body::M M;
  Body body{column<G>(table, chunk, 0), column<const P>(table, chunk, 1), gradient_of<M>(state, -1).multiplier,
            (M)rates[2 * (int64)chunk.row], (M)rates[2 * (int64)chunk.row + 1]};
  each<4>(chunk, body);
}

// gradient = (gradient * multiplier + decay * parameter) * rate, in place.
extern "C" __global__ void __launch_bounds__(512) larc(Table table, const StepState* state, const double* rates) {
  Chunk chunk;
  if (skipped(state, 1) || !locate(table, chunk)) return;
  switch (chunk.kind) {
#define KIND(index, ...) case index: adapt<__VA_ARGS__>(table, chunk, state, rates); break;
    KINDS
#undef KIND
  }
}
