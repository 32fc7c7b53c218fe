// How the ranks of a SyncBatchNorm meet: what a channel's thread sends, and how all ranks' parts become one.
//
// Across ranks travel words of a value, half of the count of values, and the exchange's number: a word that has the number has
// arrived, so no fence is needed.  Each channel counts its own exchanges, since a layer may be tiled one way now and another way
// then.  Two buffers take turns: who writes the next but one has read the next from a peer that was done with this one.
#pragma once

#ifdef __CUDACC__
__device__ __forceinline__ int64 nanoseconds() {
  int64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
#endif

// Where rank `from` puts word `index` of exchange `number`: two buffers of one row a rank.
__device__ __forceinline__ int64 mailbox(const Layer& a, unsigned number, int64 from, int64 index) {
  return ((number & 1) * a.ranks + from) * 2 * a.channels + index;
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

// 16 bits of the number are enough to tell it from the last but one, which the word had before.
__device__ __forceinline__ Word word_of(unsigned number, float value, unsigned half_count) {
  return (Word)(number << 16 | half_count) << 32 | bits_of(value);
}

__device__ __forceinline__ bool is_of(Word word, unsigned number) {
  return (unsigned)(word >> 48) == (number & 0xffffu);
}

// What threads below the tile's width need for sending, on its way before there is anything to send.
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

  // A channel's two values and their count, after which its exchange has its number.
  __device__ __forceinline__ void send(const Layer& a, int64 channel, Pair pair, float count, bool counted) const {
    if (!a.peers) {
      a.local[channel] = pair.first;
      a.local[a.channels + channel] = pair.second;
      if (counted && channel == 0) a.local[2 * a.channels] = count;
      return;
    }
    Word first = word_of(number, pair.first, bits_of(count) & 0xffffu);
    Word second = word_of(number, pair.second, bits_of(count) >> 16);
    int64 where = mailbox(a, number, a.rank, channel);
#pragma unroll 1
    for (int i = 0; i < (int)a.ranks; ++i) {
      int to = (int)a.rank + i;  // not all to one at once
      if (to >= (int)a.ranks) to -= (int)a.ranks;
      volatile Word* row = to < kRanks ? early[to] : a.peers[to];
      row[where] = first;
      row[where + a.channels] = second;
    }
    a.exchanges[channel] = number;
  }
};

// Waits for a word, which was read before; gives up where its sender does not come in time, or where one did not before.
__device__ __forceinline__ Word await(const Layer& a, unsigned number, int from, volatile Word* where, Word word) {
  int64 began = 0;
  for (int polls = 1; !is_of(word, number); ++polls) {
    if (polls % 64 == 0) {
      int64 now = nanoseconds();
      if (began == 0) began = now;
      if (*a.failed != 0) break;
      if (now - began > a.timeout) {
        *a.failed = from + 1;
        *a.host_failed = from + 1;
        __threadfence_system();
        break;
      }
    }
    word = *where;
  }
  return word;
}

// What the ranks have sent for the tile's channels.  A thread looks after one word, in both buffers at once before it is known
// which takes its turn.
template <typename Rule> struct Letters {
  Word even, odd;
  unsigned number;

  // Of item i, of the ranks from `base` on: the rank and the word's place in its row.  All items of a thread are of one channel.
  __device__ __forceinline__ int rank_of(const Place& place, int base, int i) const { return base + (i >> (place.width_bits + 1)); }

  __device__ __forceinline__ int64 index_of(const Layer& a, const Place& place, int i) const {
    return (i >> place.width_bits & 1 ? a.channels : 0) + place.channel(i & (place.width - 1));
  }

  __device__ __forceinline__ bool serves(const Layer& a, const Place& place) const {
    return place.channel(threadIdx.x & (place.width - 1)) < a.channels;
  }

  __device__ __forceinline__ void look(const Layer& a, const Place& place, int base, int i) {
    int from = rank_of(place, base, i);
    if (from >= a.ranks || !serves(a, place)) return;
    int64 index = index_of(a, place, i);
    if (a.peers) {
      number = a.exchanges[place.channel(i & (place.width - 1))];
      even = a.own[mailbox(a, 0, from, index)];
      odd = a.own[mailbox(a, 1, from, index)];
    } else {
      const float* row = a.gathered + from * (2 * a.channels + 1);
      unsigned count = Rule::kCounted ? bits_of(row[2 * a.channels]) : 0;
      number = 0;
      even = word_of(0, row[index], i >> place.width_bits & 1 ? count >> 16 : count & 0xffffu);
    }
  }

  // Right in threads below the tile's width: the pair of all ranks, merged in their order, and for a rule that counts the number of
  // values.  False there, and no numbers, where a rank did not come.
  __device__ __forceinline__ bool read(const Layer& a, const Place& place, Pair& pair, float& count) {
    __shared__ Word kept[2 * kRanks * kTile];
    Rule all;
    bool came = true;
    for (int base = 0; base < a.ranks; base += kRanks) {
      int ranks = (int)a.ranks - base < kRanks ? (int)a.ranks - base : kRanks;
      if (base) __syncthreads();
      for (int i = threadIdx.x; i < ranks << (place.width_bits + 1) && serves(a, place); i += blockDim.x) {
        if (base || i != threadIdx.x) look(a, place, base, i);
        int from = rank_of(place, base, i);
        Word word = number & 1 ? odd : even;
        volatile Word* where = a.own + mailbox(a, number, from, index_of(a, place, i));
        kept[i] = a.peers ? await(a, number, from, where, word) : word;
      }
      __syncthreads();
      if (threadIdx.x >= place.width) continue;
#pragma unroll 2
      for (int i = 0; i < ranks; ++i) {
        Word first = kept[2 * i * place.width + threadIdx.x], second = kept[(2 * i + 1) * place.width + threadIdx.x];
        came &= is_of(first, number) & is_of(second, number);
        float values = float_of((unsigned)(first >> 32 & 0xffff) | (unsigned)(second >> 32 & 0xffff) << 16);
        all.add(Pair{float_of((unsigned)first), float_of((unsigned)second)}, values);
      }
    }
    pair = came ? all.result() : Pair{nanf(""), nanf("")};
    count = all.count;
    return came;
  }
};
