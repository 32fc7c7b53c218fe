// Sums of squares: norm and overflow check in one pass, because a non-finite value makes its chunk's sum non-finite.
// ops: gradient_statistics, l2norm
#include "common.cuh"
#include "rows.cuh"

#ifndef KINDS  // rows that most runs have
#define KINDS KIND(0, float) KIND(1, __half)
#endif

template <typename T> struct Squares {
  typedef typename MathOf<T>::type M;
  const T* values;
  M multiplier;
  M sum;
  template <int N> __device__ __forceinline__ void run(int64 i) {
    M value[N];
    load<N>(values + i, value);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      M scaled = value[j] * multiplier;
      sum += scaled * scaled;
    }
  }
};

template <typename T, typename... Others>
__device__ __forceinline__ float squares(const Table& table, const Chunk& chunk, float multiplier) {
  Squares<T> body{column<const T>(table, chunk, 0), multiplier, 0};
  each<(sizeof(T) == 2 ? 8 : 4)>(chunk, body);
  return (float)block_sum(body.sum);
}

// partial[chunk] = sum of (column 0 / (scale * divisor))^2; 0 for skipped rows.
extern "C" __global__ void __launch_bounds__(512)
sum_squares(Table table, const float* scale, double divisor, float* partial) {
  Chunk chunk;
  float sum = 0.f;
  if (locate(table, chunk)) {
    float multiplier = 1.f / (scale ? *scale * (float)divisor : (float)divisor);
    switch (chunk.kind) {
#define KIND(index, ...) case index: sum = squares<__VA_ARGS__>(table, chunk, multiplier); break;
      KINDS
#undef KIND
    }
  }
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// One block per row: norms[row] = the root of its chunks' partial sums; norms may be null.  Block `rows` computes the total.
extern "C" __global__ void __launch_bounds__(512) norms(Table table, const float* partial, int64 chunks, float* each, float* total) {
  bool all = blockIdx.x == table.rows;
  int64 first = all ? 0 : line_word(table, FIRST_CHUNK, blockIdx.x);
  int64 last = all || blockIdx.x + 1 == table.rows ? chunks : line_word(table, FIRST_CHUNK, blockIdx.x + 1);
  double sum = 0;
  for (int64 i = first + threadIdx.x; i < last; i += blockDim.x) sum += partial[i];
  sum = block_sum(sum);
  if (threadIdx.x != 0) return;
  if (all) *total = (float)sqrt(sum);
  else each[blockIdx.x] = (float)sqrt(sum);
}

// One block per row: sums[row] = the sum of its chunks' partial sums.
extern "C" __global__ void __launch_bounds__(512) row_squares(Table table, const float* partial, float* sums) {
  Span span = chunks_of(table, blockIdx.x);
  double sum = 0;
  for (int64 i = span.first + threadIdx.x; i < span.last; i += blockDim.x) sum += partial[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = (float)sum;
}

// One block per row: sums[row * each + i] = the sum over the row's chunks of their number i; a chunk has `each` numbers.
extern "C" __global__ void __launch_bounds__(512) row_sums(Table table, const double* numbers, int64 each, double* sums) {
  Span span = chunks_of(table, blockIdx.x);
  for (int64 i = 0; i < each; ++i) {
    double sum = sum_of(span, numbers + i, (int)each);
    if (threadIdx.x == 0) sums[(int64)blockIdx.x * each + i] = sum;
  }
}
