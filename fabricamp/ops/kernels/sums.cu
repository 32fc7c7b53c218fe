// Sums of two columns of tensors: alpha x + beta y.
// ops: accumulate, axpby
#include "common.cuh"

#ifndef KINDS  // rows that most runs have
#define KINDS KIND(0, __half, float, float)
#endif

template <typename X, typename Y, typename O> struct Sum {
  typedef typename CommonMath<X, Y>::type M;
  const X* x;
  const Y* y;
  O* out;
  M alpha, beta;
  template <int N> __device__ __forceinline__ void run(int64 i) {
    M left[N], right[N];
    load<N>(x + i, left);
    load<N>(y + i, right);
#pragma unroll
    for (int j = 0; j < N; ++j) left[j] = alpha * left[j] + beta * right[j];
    store<N>(out + i, left);
  }
};

template <typename X, typename Y, typename O>
__device__ __forceinline__ void sum_chunk(const Table& table, const Chunk& chunk, double alpha, double beta) {
  typedef Sum<X, Y, O> Body;
  typedef typename Body::M M;
  Body body{column<const X>(table, chunk, 0), column<const Y>(table, chunk, 1), column<O>(table, chunk, 2), (M)alpha, (M)beta};
  each<4>(chunk, body);
}

// Column 2 = alpha * column 0 + beta * column 1; a factor is read from device memory if its address is given.
extern "C" __global__ void __launch_bounds__(512)
axpby(Table table, const float* alpha_at, double alpha, const float* beta_at, double beta) {
  Chunk chunk;
  if (!locate(table, chunk)) return;
  double left = alpha_at ? *alpha_at : alpha, right = beta_at ? *beta_at : beta;
  switch (chunk.kind) {
#define KIND(index, ...) case index: sum_chunk<__VA_ARGS__>(table, chunk, left, right); break;
    KINDS
#undef KIND
  }
}
