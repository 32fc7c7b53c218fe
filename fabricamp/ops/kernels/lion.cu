// Lion: columns gradient, parameter, exp_avg, half copy or remainder; cell 0 is the scales of averages that are codes, or counts the
// steps of those that are rounded stochastically.
// ops: lion
#include "common.cuh"
#include "codes.cuh"

#ifndef KINDS  // rows that most runs have
#define KINDS KIND(0, float, float, float, None) KIND(1, __half, float, float, __half)
#endif

enum Scalar { LR, BETA1, BETA2, WEIGHT_DECAY };

// The sign; 0 and NaN are returned unchanged, so that a NaN is not lost.
template <typename M> __device__ __forceinline__ M sign_of(M value) {
  return value > 0 ? (M)1 : (value < 0 ? (M)-1 : value);
}

template <typename G, typename P, typename A, typename C> struct Lion {
  typedef typename MathOf<P>::type M;
  const G* gradients;
  P* parameters;
  A* averages;
  C* copies;
  Draws draws;
  Gradient<M> gradient;
  M lr, keep, beta1, new1, beta2, new2;

  __device__ __forceinline__ void step(M g, M& p, M& average) {
    M value = gradient.of(g);
    p = keep * p - lr * sign_of(beta1 * average + new1 * value);
    average = beta2 * average + new2 * value;
  }

  template <int N> __device__ __forceinline__ void run(int64 i) {
    M g[N], p[N], average[N];
    load<N>(gradients + i, g);
    load_parameters<N>(parameters + i, copies + i, p);
    load<N>(averages + i, average);
#pragma unroll
    for (int j = 0; j < N; ++j) step(g[j], p[j], average[j]);
    store_values<N>(parameters + i, copies + i, p);
    if constexpr (IsDrawn<A>::value) {
      unsigned bits[N];
#pragma unroll
      for (int j = 0; j < N; ++j) bits[j] = draws.of(i + j) >> 16;
      store_state<N>(averages + i, average, bits, draws.active);
    } else {
      store<N>(averages + i, average);
    }
    store_copies<N>(copies + i, p);
  }

  // A block of averages that are codes.
  const float* values;
  float* scales;

  template <int N> __device__ __forceinline__ void prefetch(const Part<N>& part) const {
    part.prefetch(gradients);
    part.prefetch(parameters);
    part.prefetch(copies);
    part.prefetch(averages);
  }

  template <int N> __device__ __forceinline__ void block(const Part<N>& part, int number) {
    float g[EACH], p[EACH], average[EACH];
    part.load(gradients, g);
    part.load_parameters(parameters, copies, p);
    decode<Signed>(values, part.load_codes(averages), block_scales(0)[number], average);
#pragma unroll
    for (int j = 0; j < EACH; ++j) step(g[j], p[j], average[j]);
    part.store_parameters(parameters, copies, p);
    float scale;
    part.store_codes(averages, encode<Signed>(average, scale));
    if ((threadIdx.x & 31) == 0) block_scales(0)[number] = scale;
  }
};

template <typename G, typename P, typename A, typename C>
__device__ __forceinline__ void update(const Table& table, const Chunk& chunk, const StepState* state, double limit) {
  typedef Lion<G, P, A, C> Body;
  typedef typename Body::M M;
  const double* s = chunk.scalars;
  __shared__ Body shared;  // see adam.cu
  Body own;
  Body& body = IsCode<A>::value ? shared : own;
  body.gradients = column<const G>(table, chunk, 0);
  body.parameters = column<P>(table, chunk, 1);
  body.averages = column<A>(table, chunk, 2);
  body.copies = column<C>(table, chunk, 3);
  if constexpr (IsCode<A>::value) prefetch_first<P>(chunk, body);
  if constexpr (IsDrawn<A>::value) body.draws = draws_counted_in(table, chunk, 0);
  body.gradient = gradient_of<M>(state, limit);
  body.lr = (M)s[LR];
  body.keep = (M)(1.0 - s[LR] * s[WEIGHT_DECAY]);
  body.beta1 = (M)s[BETA1];
  body.new1 = (M)(1.0 - s[BETA1]);
  body.beta2 = (M)s[BETA2];
  body.new2 = (M)(1.0 - s[BETA2]);
  if constexpr (IsCode<A>::value) {
    body.scales = scales_of(table, chunk, 0);
    read_scales(body.scales, chunk, 0);
    body.values = code_values();
    each_block<P>(chunk, body);
    __syncthreads();
    write_scales(body.scales, chunk, 0);
  } else {
    each<4>(chunk, body);
  }
}

extern "C" __global__ void __launch_bounds__(512) lion(Table table, const StepState* state, double limit, int64 skips) {
  Chunk chunk;
  if (skipped(state, skips) || !locate(table, chunk)) return;
  switch (chunk.kind) {
#define KIND(index, ...) case index: update<__VA_ARGS__>(table, chunk, state, limit); break;
    KINDS
#undef KIND
  }
#define KIND(index, G, P, A, C) || IsDrawn<A>::value
  const bool draws = false KINDS;
#undef KIND
  if constexpr (draws) {
    if (table.first_number != 0 && last_of_row(table, chunk)) *cell<float>(table, chunk, 0) += 1.f;
  }
}
