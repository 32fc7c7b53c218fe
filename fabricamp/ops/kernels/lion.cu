// Lion: columns gradient, parameter, exp_avg, half copy.
// ops: lion
#include "common.cuh"

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
  Gradient<M> gradient;
  M lr, keep, beta1, new1, beta2, new2;

  template <int N> __device__ __forceinline__ void run(int64 i) {
    M g[N], p[N], average[N];
    load<N>(gradients + i, g);
    load<N>(parameters + i, p);
    load<N>(averages + i, average);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      M value = gradient.of(g[j]);
      p[j] = keep * p[j] - lr * sign_of(beta1 * average[j] + new1 * value);
      average[j] = beta2 * average[j] + new2 * value;
    }
    store<N>(parameters + i, p);
    store<N>(averages + i, average);
    store<N>(copies + i, p);
  }
};

template <typename G, typename P, typename A, typename C>
__device__ __forceinline__ void update(const Table& table, const Chunk& chunk, const StepState* state, double limit) {
  typedef Lion<G, P, A, C> Body;
  typedef typename Body::M M;
  const double* s = chunk.scalars;
  Body body;
  body.gradients = column<const G>(table, chunk, 0);
  body.parameters = column<P>(table, chunk, 1);
  body.averages = column<A>(table, chunk, 2);
  body.copies = column<C>(table, chunk, 3);
  body.gradient = gradient_of<M>(state, limit);
  body.lr = (M)s[LR];
  body.keep = (M)(1.0 - s[LR] * s[WEIGHT_DECAY]);
  body.beta1 = (M)s[BETA1];
  body.new1 = (M)(1.0 - s[BETA1]);
  body.beta2 = (M)s[BETA2];
  body.new2 = (M)(1.0 - s[BETA2]);
  each<4>(chunk, body);
}

extern "C" __global__ void __launch_bounds__(512) lion(Table table, const StepState* state, double limit, int64 skips) {
  Chunk chunk;
  if (skipped(state, skips) || !locate(table, chunk)) return;
  switch (chunk.kind) {
#define KIND(index, ...) case index: update<__VA_ARGS__>(table, chunk, state, limit); break;
    KINDS
#undef KIND
  }
}
