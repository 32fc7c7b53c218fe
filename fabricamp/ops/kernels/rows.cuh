// For kernels with one block per row: they combine the results of the row's chunks, always in the same order.
#pragma once

struct Span {
  int64 first, last;
};

__device__ __forceinline__ Span chunks_of(const Table& table, int row) {
  int64 first = line_word(table, FIRST_CHUNK, row), size = line_word(table, SIZE, row);
  return Span{first, first + (size + table.chunk_size - 1) / table.chunk_size};
}

// The sum of every `stride`-th number; valid in thread 0.
__device__ __forceinline__ double sum_of(Span span, const double* numbers, int stride) {
  double sum = 0;
  for (int64 i = span.first + threadIdx.x; i < span.last; i += blockDim.x) sum += numbers[i * stride];
  return block_sum(sum);
}
