// Thread-block clusters (compute capability 9.0 and later): CLUSTER neighbouring blocks of a grid run at the same time and write
// into each other's shared memory.  A file that uses them is compiled with CLUSTER; with 1 nothing here costs anything.
//
// Not by the cluster's barrier: it would wait for all earlier memory operations, also the loads of the next row and the stores
// of the last, and it empties the L1 cache.  Instead a post signals its receiver, through one of MAILBOXES (mbarriers) in turn:
//   cluster_start()                     at the kernel's start
//   cluster_started()                   before the first post: all blocks run and have initialised their mailboxes
//   post(turn, place, rank, value)      writes `value` to block `rank`, at the shared address that `place` has in this block
//   receive(turn, bytes)                by all threads: waits for this number of bytes from all posts of `turn` to this block
// `turn` counts from 0.  In each turn each block posts to every block, itself included, but only after it has received turn - 1
// and has read the values of turn - 2: so two buffers, used alternately, are enough.  A file that posts a turn before it has
// received turn - 1 defines MAILBOXES as 4, has as many buffers, and posts to itself even if CLUSTER is 1.
#pragma once

#ifndef MAILBOXES
#define MAILBOXES (CLUSTER > 1 ? 2 : 0)
#endif

#if MAILBOXES && !(defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900)
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif

#ifndef __CUDACC__
// The tests provide their own functions.
#elif !MAILBOXES
__device__ __forceinline__ void cluster_start() {}
__device__ __forceinline__ void cluster_started() {}
#else
__device__ __forceinline__ unsigned shared_address(const void* place) { return (unsigned)__cvta_generic_to_shared(place); }

__device__ __forceinline__ unsigned address_in_peer(unsigned own, int rank) {
  unsigned there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(own), "r"(rank));
  return there;
}

__device__ __forceinline__ unsigned mailbox(unsigned turn) {
  __shared__ unsigned long long boxes[MAILBOXES];
  return shared_address(boxes + turn % MAILBOXES);
}

__device__ __forceinline__ void cluster_start() {
  if (threadIdx.x == 0) {
    for (int turn = 0; turn < MAILBOXES; ++turn) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" : : "r"(mailbox(turn)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_started() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ void post(int turn, const void* place, int rank, const float (&value)[1]) {
  unsigned there = address_in_peer(shared_address(place), rank), box = address_in_peer(mailbox(turn), rank);
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];"
               : : "r"(there), "f"(value[0]), "r"(box) : "memory");
}

__device__ __forceinline__ void post(int turn, const void* place, int rank, const float (&value)[2]) {
  unsigned there = address_in_peer(shared_address(place), rank), box = address_in_peer(mailbox(turn), rank);
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
               : : "r"(there), "f"(value[0]), "f"(value[1]), "r"(box) : "memory");
}

__device__ __forceinline__ void receive(int turn, int bytes) {
  unsigned box = mailbox(turn), parity = (unsigned)turn / MAILBOXES & 1, done;
  if (threadIdx.x == 0)
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(box), "r"(bytes) : "memory");
  do {
    asm volatile("{ .reg .pred here; mbarrier.try_wait.parity.shared::cta.b64 here, [%1], %2; selp.u32 %0, 1, 0, here; }"
                 : "=r"(done) : "r"(box), "r"(parity) : "memory");
  } while (!done);
}
#endif
