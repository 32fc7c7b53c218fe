// Adagrad: columns gradient, parameter, sum of squares, half copy; cell 0 is the step count.
// ops: adagrad
#include "common.cuh"

#ifndef KINDS  // rows that most runs have
#define KINDS KIND(0, float, float, float, None) KIND(1, __half, float, float, __half)
#endif

enum Scalar { LR, EPS, WEIGHT_DECAY, LR_DECAY, DECOUPLED, MAXIMIZE };

template <typename G, typename P, typename S, typename C> struct Adagrad {
  typedef typename MathOf<P>::type M;
  const G* gradients;
  P* parameters;
  S* sums;
  C* copies;
  Gradient<M> gradient;
  M rate, keep, eps, decay;

  template <int N> __device__ __forceinline__ void run(int64 i) {
    M g[N], p[N], sum[N];
    load<N>(gradients + i, g);
    load<N>(parameters + i, p);
    load<N>(sums + i, sum);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      M value = gradient.of(g[j]) + decay * p[j];
      sum[j] += value * value;
      p[j] = keep * p[j] - rate * (value / (sqrt(sum[j]) + eps));
    }
    store<N>(parameters + i, p);
    store<N>(sums + i, sum);
    store<N>(copies + i, p);
  }
};

template <typename G, typename P, typename S, typename C>
__device__ __forceinline__ void update(const Table& table, const Chunk& chunk, const StepState* state, double limit) {
  typedef Adagrad<G, P, S, C> Body;
  typedef typename Body::M M;
  const double* s = chunk.scalars;
  bool decoupled = s[DECOUPLED] != 0;
  double rate = s[LR] / (1.0 + *cell<const float>(table, chunk, 0) * s[LR_DECAY]);
  Body body;
  body.gradients = column<const G>(table, chunk, 0);
  body.parameters = column<P>(table, chunk, 1);
  body.sums = column<S>(table, chunk, 2);
  body.copies = column<C>(table, chunk, 3);
  body.gradient = gradient_of<M>(state, limit);
  if (s[MAXIMIZE] != 0) body.gradient.multiplier = -body.gradient.multiplier;
  body.rate = (M)rate;
  body.keep = decoupled ? (M)(1.0 - rate * s[WEIGHT_DECAY]) : (M)1;
  body.decay = decoupled ? (M)0 : (M)s[WEIGHT_DECAY];
  body.eps = (M)s[EPS];
  each<(sizeof(M) == 8 ? 2 : 4)>(chunk, body);  // four fp64 elements at once spill registers
}

extern "C" __global__ void __launch_bounds__(512) adagrad(Table table, const StepState* state, double limit, int64 skips) {
  Chunk chunk;
  if (skipped(state, skips) || !locate(table, chunk)) return;
  switch (chunk.kind) {
#define KIND(index, ...) case index: update<__VA_ARGS__>(table, chunk, state, limit); break;
    KINDS
#undef KIND
  }
  if (last_of_row(table, chunk)) *cell<float>(table, chunk, 0) += 1.f;
}
