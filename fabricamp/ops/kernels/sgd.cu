// SGD with momentum: columns gradient, parameter, momentum buffer, half copy; cell 0 is 1 once the buffer holds a gradient.
// ops: sgd
#include "common.cuh"

#ifndef KINDS  // rows that most runs have
#define KINDS KIND(0, float, float, float, None) KIND(1, __half, float, float, __half)
#endif

enum Scalar { LR, MOMENTUM, DAMPENING, WEIGHT_DECAY, NESTEROV, DECAY_AFTER_MOMENTUM, MAXIMIZE };

// Without momentum the buffer's type is None: it reads as zeros, and `fresh` = 1 passes the gradient unchanged.
template <typename G, typename P, typename B, typename C> struct Sgd {
  typedef typename MathOf<P>::type M;
  const G* gradients;
  P* parameters;
  B* buffers;
  C* copies;
  Gradient<M> gradient;
  M lr, momentum, fresh, decay_before, decay_after;
  bool nesterov;

  template <int N> __device__ __forceinline__ void run(int64 i) {
    M g[N], p[N], buffer[N];
    load<N>(gradients + i, g);
    load<N>(parameters + i, p);
    load<N>(buffers + i, buffer);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      M value = gradient.of(g[j]) + decay_before * p[j];
      buffer[j] = momentum * buffer[j] + fresh * value;
      value = nesterov ? value + momentum * buffer[j] : buffer[j];
      p[j] -= lr * (value + decay_after * p[j]);
    }
    store<N>(parameters + i, p);
    store<N>(buffers + i, buffer);
    store<N>(copies + i, p);
  }
};

template <typename G, typename P, typename B, typename C>
__device__ __forceinline__ void update(const Table& table, const Chunk& chunk, const StepState* state, double limit,
                                       float filled) {
  typedef Sgd<G, P, B, C> Body;
  typedef typename Body::M M;
  const double* s = chunk.scalars;
  bool moves = s[MOMENTUM] != 0, after = s[DECAY_AFTER_MOMENTUM] != 0;
  Body body;
  body.gradients = column<const G>(table, chunk, 0);
  body.parameters = column<P>(table, chunk, 1);
  body.buffers = column<B>(table, chunk, 2);
  body.copies = column<C>(table, chunk, 3);
  body.gradient = gradient_of<M>(state, limit);
  if (s[MAXIMIZE] != 0) body.gradient.multiplier = -body.gradient.multiplier;
  body.lr = (M)s[LR];
  body.momentum = (M)s[MOMENTUM];
  body.fresh = moves ? (M)(1.0 - s[DAMPENING] * filled) : (M)1;  // the first gradient is not dampened
  body.decay_before = after ? (M)0 : (M)s[WEIGHT_DECAY];
  body.decay_after = after ? (M)s[WEIGHT_DECAY] : (M)0;
  body.nesterov = s[NESTEROV] != 0;
  each<4>(chunk, body);
}

// A group's momentum may become 0 while the buffer of earlier steps still exists.
template <typename G, typename P, typename B, typename C>
__device__ __forceinline__ void choose(const Table& table, const Chunk& chunk, const StepState* state, double limit,
                                       float filled) {
  if (chunk.scalars[MOMENTUM] != 0) update<G, P, B, C>(table, chunk, state, limit, filled);
  else update<G, P, None, C>(table, chunk, state, limit, filled);
}

extern "C" __global__ void __launch_bounds__(512) sgd(Table table, const StepState* state, double limit, int64 skips) {
  Chunk chunk;
  if (skipped(state, skips) || !locate(table, chunk)) return;
  bool moves = chunk.scalars[MOMENTUM] != 0;
  float filled = moves ? *cell<const float>(table, chunk, 0) : 1.f;
  switch (chunk.kind) {
#define KIND(index, ...) case index: choose<__VA_ARGS__>(table, chunk, state, limit, filled); break;
    KINDS
#undef KIND
  }
  // `filled` is the same in all blocks of a row: the last block to arrive writes the cell after all have read it.
  if (filled == 0.f && last_of_row(table, chunk)) *cell<float>(table, chunk, 0) = 1.f;
}
