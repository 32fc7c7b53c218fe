// Lets a stream wait for the streams of other ranks.
#include "clock.cuh"

typedef long long int64;

// `peers`: the address of each rank's words, one for each rank that arrives; `own`: those of this rank; `count`: barriers so far.
extern "C" __global__ void peer_barrier(int64** peers, volatile int64* own, int* count, int64 rank, int64 ranks, int64 timeout,
                                        volatile int64* failed, volatile int64* host_failed) {
  int64 number = *count + 1;
  __threadfence_system();
  for (int64 to = threadIdx.x; to < ranks; to += blockDim.x) ((volatile int64*)peers[to])[rank] = number;
  __syncthreads();
  int64 began = 0;
  for (int64 from = threadIdx.x; from < ranks; from += blockDim.x) {
    for (int polls = 1; own[from] < number; ++polls) {
      if (polls % 64 != 0) continue;
      int64 now = nanoseconds();
      if (began == 0) began = now;
      if (*failed != 0) break;
      if (now - began <= timeout) continue;
      *failed = from + 1;
      *host_failed = from + 1;
      break;
    }
  }
  __threadfence_system();
  if (threadIdx.x == 0) *count = (int)number;
}
