// Prefetch of rows (compute capability 9.0 and later): the copy engine fills a ring of STAGES buffers in dynamic shared memory, so
// that rows in flight take no registers and no instructions.  One thread starts the copies, all threads wait:
//   ring_start()                          by all threads, before anything else of the ring
//   expect(stage, bytes)                  by one thread: announces the number of bytes to come
//   bring(stage, place, from, bytes)      by the same thread: at least 16 bytes; addresses and size are multiples of 16
//   arrived(stage, round)                 by all threads: waits for the copies of the `round`-th use of this stage, from 0
#pragma once

#ifdef __CUDACC__
__device__ __forceinline__ unsigned stage_barrier(int stage) {
  __shared__ unsigned long long barriers[STAGES];
  return (unsigned)__cvta_generic_to_shared(barriers + stage);
}

__device__ __forceinline__ void ring_start() {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" : : "r"(stage_barrier(stage)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
}

__device__ __forceinline__ void expect(int stage, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(stage_barrier(stage)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void bring(int stage, void* place, const void* from, int bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               : : "r"((unsigned)__cvta_generic_to_shared(place)), "l"(__cvta_generic_to_global(from)), "r"(bytes),
                   "r"(stage_barrier(stage)) : "memory");
}

__device__ __forceinline__ void arrived(int stage, int round) {
  unsigned done;
  do {
    asm volatile("{ .reg .pred here; mbarrier.try_wait.parity.shared::cta.b64 here, [%1], %2; selp.u32 %0, 1, 0, here; }"
                 : "=r"(done) : "r"(stage_barrier(stage)), "r"(round & 1) : "memory");
  } while (!done);
}
#endif
