// Whether tensors differ from others that are rounded to their dtype; no column is written.
#include "common.cuh"

#ifndef KINDS  // rows that most runs have
#define KINDS KIND(0, float, __half) KIND(1, float, __nv_bfloat16)
#endif

template <typename S, typename D> struct Differs {
  typedef typename CommonMath<S, D>::type M;
  const S* wide;
  const D* rounded;
  bool found;
  template <int N> __device__ __forceinline__ void run(int64 i) {
    M value[N], other[N];
    load<N>(wide + i, value);
    load<N>(rounded + i, other);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      M own = (M)widen(Narrow<D>::of(value[j]));
      found |= own != other[j] && !(own != own && other[j] != other[j]);  // a nan equals a nan
    }
  }
};

template <typename S, typename D>
__device__ __forceinline__ void note_chunk(const Table& table, const Chunk& chunk, int* flags) {
  Differs<S, D> body{column<const S>(table, chunk, 0), column<const D>(table, chunk, 1), false};
  each<4>(chunk, body);
  if (body.found) flags[chunk.row] = 1;  // by any number of threads: all write the same
}

// Sets the flag of each row in which column 1 is not the rounded column 0; the other flags stay as they are.
extern "C" __global__ void __launch_bounds__(512) note_differences(Table table, int* flags) {
  Chunk chunk;
  if (!locate(table, chunk)) return;
  switch (chunk.kind) {
#define KIND(index, ...) case index: note_chunk<__VA_ARGS__>(table, chunk, flags); break;
    KINDS
#undef KIND
  }
}
