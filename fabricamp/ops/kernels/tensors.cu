// Element-wise operations on lists of tensors; the last column is written.
// ops: copy_cast, scale
#include "common.cuh"

#ifndef KINDS  // rows that most runs have
#define KINDS KIND(0, float, float) KIND(1, float, __half)
#endif

template <typename S, typename D> struct Scale {
  typedef typename CommonMath<S, D>::type M;
  const S* sources;
  D* destinations;
  Gradient<M> gradient;
  template <int N> __device__ __forceinline__ void run(int64 i) {
    M value[N];
    load<N>(sources + i, value);
#pragma unroll
    for (int j = 0; j < N; ++j) value[j] = gradient.of(value[j]);
    store<N>(destinations + i, value);
  }
};

template <typename S, typename D>
__device__ __forceinline__ void scale_chunk(const Table& table, const Chunk& chunk, double multiplier, double limit) {
  typedef typename CommonMath<S, D>::type M;
  Scale<S, D> body{column<const S>(table, chunk, 0), column<D>(table, chunk, 1), {(M)multiplier, (M)limit}};
  each<4>(chunk, body);
}

// Column 1 = column 0 * multiplier (`factor` if its address is null), clamped; a factor of 1 copies and casts.
extern "C" __global__ void __launch_bounds__(512) scale(Table table, const float* multiplier, double factor, double limit) {
  Chunk chunk;
  if (!locate(table, chunk)) return;
  double times = multiplier ? *multiplier : factor;
  switch (chunk.kind) {
#define KIND(index, ...) case index: scale_chunk<__VA_ARGS__>(table, chunk, times, limit); break;
    KINDS
#undef KIND
  }
}
