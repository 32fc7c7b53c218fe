// SGD with momentum: columns gradient, parameter, momentum buffer, half copy or remainder; cell 0 is 1 once the buffer holds a
// gradient, and cell 1 is the scales of buffers that are codes, or counts the steps of those that are rounded stochastically.
// ops: sgd
#include "common.cuh"
#include "codes.cuh"

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
  Draws draws;
  Gradient<M> gradient;
  M lr, momentum, fresh, decay_before, decay_after;
  bool nesterov;

  __device__ __forceinline__ void step(M g, M& p, M& buffer) {
    M value = gradient.of(g) + decay_before * p;
    buffer = momentum * buffer + fresh * value;
    value = nesterov ? value + momentum * buffer : buffer;
    p -= lr * (value + decay_after * p);
  }

  template <int N> __device__ __forceinline__ void run(int64 i) {
    M g[N], p[N], buffer[N];
    load<N>(gradients + i, g);
    load_parameters<N>(parameters + i, copies + i, p);
    load<N>(buffers + i, buffer);
#pragma unroll
    for (int j = 0; j < N; ++j) step(g[j], p[j], buffer[j]);
    store_values<N>(parameters + i, copies + i, p);
    if constexpr (IsDrawn<B>::value) {
      unsigned bits[N];
#pragma unroll
      for (int j = 0; j < N; ++j) bits[j] = draws.of(i + j) >> 16;
      store_state<N>(buffers + i, buffer, bits, draws.active);
    } else {
      store<N>(buffers + i, buffer);
    }
    store_copies<N>(copies + i, p);
  }

  // A block of buffers that are codes.
  const float* values;
  float* scales;

  template <int N> __device__ __forceinline__ void prefetch(const Part<N>& part) const {
    part.prefetch(gradients);
    part.prefetch(parameters);
    part.prefetch(copies);
    part.prefetch(buffers);
  }

  template <int N> __device__ __forceinline__ void block(const Part<N>& part, int number) {
    float g[EACH], p[EACH], buffer[EACH];
    part.load(gradients, g);
    part.load_parameters(parameters, copies, p);
    decode<Signed>(values, part.load_codes(buffers), block_scales(0)[number], buffer);
#pragma unroll
    for (int j = 0; j < EACH; ++j) step(g[j], p[j], buffer[j]);
    part.store_parameters(parameters, copies, p);
    float scale;
    part.store_codes(buffers, encode<Signed>(buffer, scale));
    if ((threadIdx.x & 31) == 0) block_scales(0)[number] = scale;
  }
};

template <typename G, typename P, typename B, typename C>
__device__ __forceinline__ void update(const Table& table, const Chunk& chunk, const StepState* state, double limit,
                                       float filled) {
  typedef Sgd<G, P, B, C> Body;
  typedef typename Body::M M;
  const double* s = chunk.scalars;
  bool moves = s[MOMENTUM] != 0, after = s[DECAY_AFTER_MOMENTUM] != 0;
  __shared__ Body shared;  // see adam.cu
  Body own;
  Body& body = IsCode<B>::value ? shared : own;
  body.gradients = column<const G>(table, chunk, 0);
  body.parameters = column<P>(table, chunk, 1);
  body.buffers = column<B>(table, chunk, 2);
  body.copies = column<C>(table, chunk, 3);
  if constexpr (IsCode<B>::value) prefetch_first<P>(chunk, body);
  if constexpr (IsDrawn<B>::value) body.draws = draws_counted_in(table, chunk, 1);
  body.gradient = gradient_of<M>(state, limit);
  if (s[MAXIMIZE] != 0) body.gradient.multiplier = -body.gradient.multiplier;
  body.lr = (M)s[LR];
  body.momentum = (M)s[MOMENTUM];
  body.fresh = moves ? (M)(1.0 - s[DAMPENING] * filled) : (M)1;  // the first gradient is not dampened
  body.decay_before = after ? (M)0 : (M)s[WEIGHT_DECAY];
  body.decay_after = after ? (M)s[WEIGHT_DECAY] : (M)0;
  body.nesterov = s[NESTEROV] != 0;
  if constexpr (IsCode<B>::value) {
    body.scales = scales_of(table, chunk, 1);
    read_scales(body.scales, chunk, 0);
    body.values = code_values();
    each_block<P>(chunk, body);
    __syncthreads();
    write_scales(body.scales, chunk, 0);
  } else {
    each<4>(chunk, body);
  }
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
#define KIND(index, G, P, B, C) || IsDrawn<B>::value
  const bool draws = false KINDS;
#undef KIND
  // `filled` is the same in all blocks of a row: the last block to arrive writes the cell after all have read it.
  if constexpr (draws) {
    if ((table.first_number != 0 || filled == 0.f) && last_of_row(table, chunk)) {
      if (filled == 0.f) *cell<float>(table, chunk, 0) = 1.f;
      if (table.first_number != 0) *cell<float>(table, chunk, 1) += 1.f;
    }
    return;
  }
  if (filled == 0.f && last_of_row(table, chunk)) *cell<float>(table, chunk, 0) = 1.f;
}
