// Adam and AdamW: columns gradient, parameter, exp_avg, exp_avg_sq, half copy or remainder; cell 0 is the step count, and cells 1 and 2
// are the scales of averages that are codes.
// ops: adam
#include "common.cuh"
#include "codes.cuh"

#ifndef KINDS  // rows that most runs have
#define KINDS KIND(0, float, float, float, float, None) KIND(1, __half, float, float, float, __half)
#endif

enum Scalar { LR, BETA1, BETA2, EPS, WEIGHT_DECAY, LOG_BETA1, LOG_BETA2, DECOUPLED, MAXIMIZE };

template <typename G, typename P, typename M1, typename M2, typename C> struct Adam {
  typedef typename MathOf<P>::type M;
  const G* gradients;
  P* parameters;
  M1* averages;
  M2* squares;
  C* copies;
  Draws draws;
  Gradient<M> gradient;
  M step_size, keep, beta1, new1, beta2, new2, eps, decay, correction2;

  __device__ __forceinline__ void average_in(M g, M p, M& average, M& square) {
    M value = multiply_add(decay, p, gradient.of(g));
    average = multiply_add(beta1, average, new1 * value);
    square = multiply_add(beta2, square, new2 * value * value);
  }

  // States that are rounded stochastically have an accuracy of 1e-2.
  __device__ static __forceinline__ M root_of(M value) {
    if constexpr (IsDrawn<M2>::value) return fast_root(value);
    return sqrt(value);
  }

  __device__ static __forceinline__ M quotient(M a, M b) {
    if constexpr (IsDrawn<M2>::value) return fast_quotient(a, b);
    return a / b;
  }

  template <int N> __device__ __forceinline__ void run(int64 i) {
    M g[N], p[N], average[N], square[N];
    load<N>(gradients + i, g);
    load_parameters<N>(parameters + i, copies + i, p);
    load<N>(averages + i, average);
    load<N>(squares + i, square);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      average_in(g[j], p[j], average[j], square[j]);
      M root = multiply_add(root_of(square[j]), correction2, eps);
      p[j] = multiply_add(-step_size, quotient(average[j], root), keep * p[j]);
    }
    store_parameters<N>(parameters + i, copies + i, p);
    unsigned first[N], second[N];
    if constexpr (IsDrawn<M1>::value || IsDrawn<M2>::value) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        second[j] = draws.of(i + j);
        first[j] = second[j] >> 16;
      }
    }
    store_state<N>(averages + i, average, first, draws.active);
    store_state<N>(squares + i, square, second, draws.active);
  }

  // A block of averages that are codes.
  const float* values;
  float *average_scales, *square_scales;

  template <int N> __device__ __forceinline__ void prefetch(const Part<N>& part) const {
    part.prefetch(gradients);
    part.prefetch(parameters);
    part.prefetch(copies);
    part.prefetch(averages);
    part.prefetch(squares);
  }

  template <int N> __device__ __forceinline__ void block(const Part<N>& part, int number) {
    float g[EACH], p[EACH], average[EACH], square[EACH];
    part.load(gradients, g);
    part.load_parameters(parameters, copies, p);
    decode<Signed>(values, part.load_codes(averages), block_scales(0)[number], average);
    decode<Squares>(values, part.load_codes(squares), block_scales(1)[number], square);
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      average_in(g[j], p[j], average[j], square[j]);
      float root = multiply_add(fast_root(square[j]), correction2, eps);
      p[j] = multiply_add(-step_size, fast_quotient(average[j], root), keep * p[j]);
    }
    part.store_parameters(parameters, copies, p);
    float of_averages, of_squares;
    part.store_codes(averages, encode<Signed>(average, of_averages));
    part.store_codes(squares, encode<Squares>(square, of_squares));
    if ((threadIdx.x & 31) == 0) {
      block_scales(0)[number] = of_averages;
      block_scales(1)[number] = of_squares;
    }
  }
};

template <typename G, typename P, typename M1, typename M2, typename C>
__device__ __forceinline__ void update(const Table& table, const Chunk& chunk, const StepState* state, double limit) {
  typedef Adam<G, P, M1, M2, C> Body;
  typedef typename Body::M M;
  const double* s = chunk.scalars;
  M step = (M)(*cell<const float>(table, chunk, 0) + 1.f);
  bool decoupled = s[DECOUPLED] != 0;
  // In registers the constants of a block of codes would leave too few for its elements.
  __shared__ Body shared;
  Body own;
  Body& body = IsCode<M1>::value ? shared : own;
  body.gradients = column<const G>(table, chunk, 0);
  body.parameters = column<P>(table, chunk, 1);
  body.averages = column<M1>(table, chunk, 2);
  body.squares = column<M2>(table, chunk, 3);
  body.copies = column<C>(table, chunk, 4);
  if constexpr (IsCode<M1>::value) prefetch_first<P>(chunk, body);
  body.draws = draws_of(table, chunk, (float)step);
  body.gradient = gradient_of<M>(state, limit);
  if (s[MAXIMIZE] != 0) body.gradient.multiplier = -body.gradient.multiplier;
  // 1 - beta^step without cancellation; a logarithm of 0 stands for no bias correction (log_beta = -inf gives 1).
  body.step_size = (M)s[LR] / -expm1(step * (M)s[LOG_BETA1]);
  body.correction2 = (M)1 / sqrt(-expm1(step * (M)s[LOG_BETA2]));
  body.keep = decoupled ? (M)(1.0 - s[LR] * s[WEIGHT_DECAY]) : (M)1;
  body.decay = decoupled ? (M)0 : (M)s[WEIGHT_DECAY];
  body.beta1 = (M)s[BETA1];
  body.new1 = (M)(1.0 - s[BETA1]);
  body.beta2 = (M)s[BETA2];
  body.new2 = (M)(1.0 - s[BETA2]);
  body.eps = (M)s[EPS];
  if constexpr (IsCode<M1>::value) {
    body.average_scales = scales_of(table, chunk, 1);
    body.square_scales = scales_of(table, chunk, 2);
    read_scales(body.average_scales, chunk, 0);
    read_scales(body.square_scales, chunk, 1);
    body.values = code_values();
    each_block<P>(chunk, body);
    __syncthreads();
    write_scales(body.average_scales, chunk, 0);
    write_scales(body.square_scales, chunk, 1);
  } else {
    each<4>(chunk, body);
  }
}

extern "C" __global__ void __launch_bounds__(512) adam(Table table, const StepState* state, double limit, int64 skips) {
  Chunk chunk;
  if (skipped(state, skips) || !locate(table, chunk)) return;
  switch (chunk.kind) {
#define KIND(index, ...) case index: update<__VA_ARGS__>(table, chunk, state, limit); break;
    KINDS
#undef KIND
  }
  if (last_of_row(table, chunk)) *cell<float>(table, chunk, 0) += 1.f;
}
