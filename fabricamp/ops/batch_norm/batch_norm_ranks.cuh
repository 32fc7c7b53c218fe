// The exchange between the ranks of a SyncBatchNorm: a channel's thread sends, and the values of all ranks are merged.
//
// Ranks send words of a value, half of the count of values, and the exchange's number.  A word with the expected number has
// arrived, so no fence is needed.  Each channel counts its own exchanges; the receiving thread increments the count.  Two buffers
// alternate.  That is enough, because every launch sends and receives: a rank that sends exchange n + 2 has received n + 1 from
// each peer, so the peer's launch of n, which received n, was over.
//
// Every tile sends, but only one block per group of tiles waits: the last block to arrive, so that no block waits for one that has
// not started.  There are few groups (ops/batch_norm/kernels.py): the waiting blocks leave room for any other kernel.
#pragma once

// The index at which rank `from` writes the two words of a channel in exchange `number`: two buffers of one row per rank.
__device__ __forceinline__ int64 mailbox(const Layer& a, unsigned number, int64 from, int64 channel) {
  return 2 * (((number & 1) * a.ranks + from) * a.channels + channel);
}

__device__ __forceinline__ float float_of(unsigned bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

__device__ __forceinline__ unsigned bits_of(float value) {
  unsigned bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

// 16 bits of the number are enough: the word held number - 2 before.
__device__ __forceinline__ Word word_of(unsigned number, float value, unsigned half_count) {
  return (Word)(number << 16 | half_count) << 32 | bits_of(value);
}

__device__ __forceinline__ bool is_of(Word word, unsigned number) {
  return (unsigned)(word >> 48) == (number & 0xffffu);
}

// The data that threads below the tile's width need for sending, loaded before there is anything to send.
struct Sender {
  unsigned number = 0;
  volatile Word* const* early;  // addresses of the first ranks, in shared memory

  // A barrier has to follow before anything is sent.
  __device__ __forceinline__ Sender(const Layer& a, const Place& place, volatile Word** addresses) : early(addresses) {
    if (!a.peers) return;
    int64 channel = place.channel(threadIdx.x);
    if (threadIdx.x < place.width && channel < a.channels) number = a.exchanges[channel] + 1;
    for (int i = threadIdx.x; i < a.ranks && i < kRanks; i += blockDim.x) addresses[i] = a.peers[i];
  }

  // Sends a channel's two values and their count to every rank.
  __device__ __forceinline__ void send(const Layer& a, int64 channel, Pair pair, float count) const {
    Word first = word_of(number, pair.first, bits_of(count) & 0xffffu);
    Word second = word_of(number, pair.second, bits_of(count) >> 16);
    int64 where = mailbox(a, number, a.rank, channel);
#pragma unroll 1
    for (int i = 0; i < (int)a.ranks; ++i) {
      int to = (int)a.rank + i;  // ranks start with different receivers
      if (to >= (int)a.ranks) to -= (int)a.ranks;
      volatile Word* row = to < kRanks ? early[to] : a.peers[to];
      row[where] = first;
      row[where + 1] = second;
    }
  }
};

// Calls body(channel) for the channels of the tile's group, one thread each, in the last block of the group to arrive.
template <typename Body> __device__ __forceinline__ void each_met(const Layer& a, const Place& place, const Body& body) {
  int shift = (int)a.group_bits - place.width_bits, group = place.tile >> shift;
  int tiles = (int)a.sums.tiles - (group << shift);
  if (tiles > 1 << shift) tiles = 1 << shift;
  if (tiles > 1) {
    __shared__ bool last;
    if (threadIdx.x == 0) {
      int* ticket = a.tickets + a.channels + group;  // only counts blocks: the words themselves show that they have arrived
      last = atomicAdd(ticket, 1) + 1 == tiles;
      if (last) *ticket = 0;
    }
    __syncthreads();
    if (!last) return;
  }
  int64 first = (int64)group << a.group_bits, end = first + (1ll << a.group_bits);
  if (end > a.channels) end = a.channels;
  for (int64 channel = first + threadIdx.x; channel < end; channel += blockDim.x) body(channel);
}

// Whether to stop waiting for rank `from`: it has timed out, or another rank has before.
__device__ __forceinline__ bool gives_up(const Layer& a, int64& began, int from) {
  int64 now = nanoseconds();
  if (began == 0) began = now;
  if (*a.failed != 0) return true;
  if (now - began <= a.timeout) return false;
  *a.failed = from + 1;
  *a.host_failed = from + 1;
  __threadfence_system();
  return true;
}

// Waits until both words of a channel have arrived from each of up to kRanks ranks; returns false on a timeout.
__device__ __forceinline__ bool await(const Layer& a, unsigned number, int base, int ranks, volatile Word* row,
                                      Word (&first)[kRanks], Word (&second)[kRanks]) {
  int64 began = 0, next = 2 * a.channels;
  for (int polls = 1;; ++polls) {
    // All loads are issued before the first word is checked.
#pragma unroll
    for (int i = 0; i < kRanks; ++i) {
      if (i >= ranks) continue;
      first[i] = row[i * next];
      second[i] = row[i * next + 1];
    }
    int missing = -1;
#pragma unroll
    for (int i = kRanks - 1; i >= 0; --i) {
      if (i < ranks && !(is_of(first[i], number) && is_of(second[i], number))) missing = base + i;
    }
    if (missing < 0) return true;
    if (polls % 64 == 0 && gives_up(a, began, missing)) return false;
  }
}

// Merges the values of all ranks for a channel, in rank order; returns false if a rank timed out.
template <typename Rule> __device__ __forceinline__ bool receive(const Layer& a, int64 channel, Rule& all) {
  unsigned number = a.exchanges[channel] + 1;
  bool came = true;
#pragma unroll 1
  for (int base = 0; base < a.ranks; base += kRanks) {
    int ranks = (int)a.ranks - base < kRanks ? (int)a.ranks - base : kRanks;
    Word first[kRanks], second[kRanks];
    came &= await(a, number, base, ranks, a.own + mailbox(a, number, base, channel), first, second);
#pragma unroll
    for (int i = 0; i < kRanks; ++i) {
      if (i >= ranks) continue;
      float values = float_of((unsigned)(first[i] >> 32 & 0xffff) | (unsigned)(second[i] >> 32 & 0xffff) << 16);
      all.add(Pair{float_of((unsigned)first[i]), float_of((unsigned)second[i])}, values);
    }
  }
  a.exchanges[channel] = number;
  return came;
}
