// LAMB: columns gradient, parameter, exp_avg, exp_avg_sq, half copy; cell 0 is the step count.
//
// `moments` and `update` both compute the direction of a step, so that the direction need not be stored: this reads and writes as
// many bytes, needs no extra memory, and leaves gradients unchanged.  Between the two, `trust_ratios` compares norms.
// ops: lamb
#include "common.cuh"
#include "rows.cuh"

#ifndef KINDS  // rows that most runs have
#define KINDS KIND(0, float, float, float, float, None) KIND(1, __half, float, float, float, __half)
#endif

enum Scalar { LR, BETA1, BETA2, NEW1, EPS, WEIGHT_DECAY, LOG_BETA1, LOG_BETA2, DECOUPLED, ADAPTS, MAX_NORM };

template <typename G, typename M> struct Squares {
  const G* gradients;
  Gradient<M> gradient;
  M sum;
  template <int N> __device__ __forceinline__ void run(int64 i) {
    M g[N];
    load<N>(gradients + i, g);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      M value = gradient.of(g[j]);
      sum += value * value;
    }
  }
};

template <typename G, typename P, typename... Others>
__device__ __forceinline__ double squares(const Table& table, const Chunk& chunk, const StepState* state, double limit) {
  typedef typename MathOf<P>::type M;
  Squares<G, M> body{column<const G>(table, chunk, 0), gradient_of<M>(state, limit), 0};
  each<(sizeof(G) == 2 ? 8 : 4)>(chunk, body);
  return block_sum(body.sum);
}

// numbers[chunk] = the sum of squares of the gradients as an update reads them; 0 for skipped rows.
extern "C" __global__ void __launch_bounds__(512)
gradient_squares(Table table, const StepState* state, double limit, double* numbers) {
  Chunk chunk;
  double sum = 0;
  if (locate(table, chunk)) {
    switch (chunk.kind) {
#define KIND(index, ...) case index: sum = squares<__VA_ARGS__>(table, chunk, state, limit); break;
      KINDS
#undef KIND
    }
  }
  if (threadIdx.x == 0) numbers[blockIdx.x] = sum;
}

// *norm = the root of the sum of all numbers; with `scale`: from state's norm, scaled back, then times state's multiplier.
extern "C" __global__ void __launch_bounds__(512)
total(Table table, const StepState* state, const double* numbers, int64 count, const float* scale, double divisor,
      double* norm) {
  double sum = scale ? 0 : sum_of(Span{0, count}, numbers, 1);
  if (threadIdx.x != 0) return;
  *norm = scale ? (double)state->norm * *scale * divisor * state->multiplier : sqrt(sum);
}

template <typename M> struct Direction {
  M correction1, correction2, eps, decay;
  __device__ __forceinline__ M of(M average, M square, M parameter) const {
    return average * correction1 / (sqrt(square) * correction2 + eps) + decay * parameter;
  }
};

template <typename M> __device__ __forceinline__ Direction<M> direction_of(const Table& table, const Chunk& chunk) {
  const double* s = chunk.scalars;
  M step = (M)(*cell<const float>(table, chunk, 0) + 1.f);
  // 1 - beta^step without cancellation; a logarithm of -inf stands for no bias correction.
  return Direction<M>{(M)1 / -expm1(step * (M)s[LOG_BETA1]), (M)1 / sqrt(-expm1(step * (M)s[LOG_BETA2])), (M)s[EPS],
                      s[DECOUPLED] != 0 ? (M)s[WEIGHT_DECAY] : (M)0};
}

template <typename G, typename P, typename M1, typename M2> struct Moments {
  typedef typename MathOf<P>::type M;
  const G* gradients;
  const P* parameters;
  M1* averages;
  M2* squares;
  Gradient<M> gradient;
  Direction<M> direction;
  M clip, decay, beta1, new1, beta2, new2;
  M parameter_sum, direction_sum;

  template <int N> __device__ __forceinline__ void run(int64 i) {
    M g[N], p[N], average[N], square[N];
    load<N>(gradients + i, g);
    load<N>(parameters + i, p);
    load<N>(averages + i, average);
    load<N>(squares + i, square);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      M value = gradient.of(g[j]) * clip + decay * p[j];
      average[j] = beta1 * average[j] + new1 * value;
      square[j] = beta2 * square[j] + new2 * value * value;
      M towards = direction.of(average[j], square[j], p[j]);
      parameter_sum += p[j] * p[j];
      direction_sum += towards * towards;
    }
    store<N>(averages + i, average);
    store<N>(squares + i, square);
  }
};

template <typename G, typename P, typename M1, typename M2, typename C>
__device__ __forceinline__ void take_in(const Table& table, const Chunk& chunk, const StepState* state, double limit,
                                        const double* norm, double* numbers) {
  typedef Moments<G, P, M1, M2> Body;
  typedef typename Body::M M;
  const double* s = chunk.scalars;
  Body body;
  body.gradients = column<const G>(table, chunk, 0);
  body.parameters = column<const P>(table, chunk, 1);
  body.averages = column<M1>(table, chunk, 2);
  body.squares = column<M2>(table, chunk, 3);
  body.gradient = gradient_of<M>(state, limit);
  body.direction = direction_of<M>(table, chunk);
  body.clip = norm && s[MAX_NORM] > 0 && *norm > s[MAX_NORM] ? (M)(s[MAX_NORM] / *norm) : (M)1;
  body.decay = s[DECOUPLED] != 0 ? (M)0 : (M)s[WEIGHT_DECAY];
  body.beta1 = (M)s[BETA1];
  body.new1 = (M)s[NEW1];
  body.beta2 = (M)s[BETA2];
  body.new2 = (M)(1.0 - s[BETA2]);
  body.parameter_sum = body.direction_sum = 0;
  each<4>(chunk, body);
  double of_parameters = block_sum(body.parameter_sum), of_directions = block_sum(body.direction_sum);
  if (threadIdx.x != 0) return;
  numbers[2 * (int64)blockIdx.x] = of_parameters;
  numbers[2 * (int64)blockIdx.x + 1] = of_directions;
}

// First pass: both averages, and per chunk the sums of squares of the parameters and of their directions.
extern "C" __global__ void __launch_bounds__(512)
moments(Table table, const StepState* state, double limit, int64 skips, const double* norm, double* numbers) {
  Chunk chunk;
  if (skipped(state, skips) || !locate(table, chunk)) return;
  switch (chunk.kind) {
#define KIND(index, ...) case index: take_in<__VA_ARGS__>(table, chunk, state, limit, norm, numbers); break;
    KINDS
#undef KIND
  }
}

// One block per row: ratios[row] = lr, times the norm of the parameter over that of its direction if the group adapts.
// `whole` holds the sums of full rows, two per row, if rows are sharded over ranks; else it is null.
extern "C" __global__ void __launch_bounds__(512)
trust_ratios(Table table, const StepState* state, int64 skips, const double* numbers, const double* whole, double* ratios) {
  Chunk chunk;
  if (skipped(state, skips) || !locate_row(table, blockIdx.x, chunk)) return;
  Span span = whole ? Span{chunk.row, chunk.row + 1} : chunks_of(table, chunk.row);
  if (whole) numbers = whole;
  double of_parameter = sum_of(span, numbers, 2), of_direction = sum_of(span, numbers + 1, 2);
  if (threadIdx.x != 0) return;
  bool adapts = chunk.scalars[ADAPTS] != 0 && of_parameter != 0 && of_direction != 0;
  ratios[chunk.row] = chunk.scalars[LR] * (adapts ? sqrt(of_parameter) / sqrt(of_direction) : 1.0);
}

template <typename P, typename M1, typename M2, typename C> struct Update {
  typedef typename MathOf<P>::type M;
  P* parameters;
  const M1* averages;
  const M2* squares;
  C* copies;
  Direction<M> direction;
  M ratio;
  template <int N> __device__ __forceinline__ void run(int64 i) {
    M p[N], average[N], square[N];
    load<N>(parameters + i, p);
    load<N>(averages + i, average);
    load<N>(squares + i, square);
#pragma unroll
    for (int j = 0; j < N; ++j) p[j] -= ratio * direction.of(average[j], square[j], p[j]);
    store<N>(parameters + i, p);
    store<N>(copies + i, p);
  }
};

template <typename G, typename P, typename M1, typename M2, typename C>
__device__ __forceinline__ void go(const Table& table, const Chunk& chunk, const double* ratios) {
  typedef typename MathOf<P>::type M;
  Update<P, M1, M2, C> body{column<P>(table, chunk, 1), column<const M1>(table, chunk, 2), column<const M2>(table, chunk, 3),
                            column<C>(table, chunk, 4), direction_of<M>(table, chunk), (M)ratios[chunk.row]};
  each<4>(chunk, body);
}

// Second pass: parameters, copies, and with `counts` the steps.  Bounds ask for one block only: for two, registers spill.
extern "C" __global__ void __launch_bounds__(512, 1)
update(Table table, const StepState* state, int64 skips, int64 counts, const double* ratios) {
  Chunk chunk;
  if (skipped(state, skips) || !locate(table, chunk)) return;
  switch (chunk.kind) {
#define KIND(index, ...) case index: go<__VA_ARGS__>(table, chunk, ratios); break;
    KINDS
#undef KIND
  }
  if (counts && last_of_row(table, chunk)) *cell<float>(table, chunk, 0) += 1.f;
}
