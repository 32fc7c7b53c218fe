// A digest of each row's bytes: 128 bits in two sums of integers, so that no order of threads and blocks changes them.
#include "common.cuh"

typedef unsigned long long Word;

// Each line is undone by another, so that no change of one word leaves the digest as it is.
__device__ __forceinline__ Word mixed(Word bits, Word place, Word row) {
  Word key = place * 0x9e3779b97f4a7c15ull + row * 0xd1b54a32d192ed03ull;
  Word word = bits ^ key ^ (key >> 32);
  word ^= word >> 32;
  word *= 0xd6e8feb86659fd93ull;
  word ^= word >> 32;
  word *= 0xd6e8feb86659fd93ull;
  return word ^ (word >> 32);
}

// The second sum is one of squares: where the first is kept by two changes, this one is not.
struct Digest {
  Word row;
  Word first;
  Word second;
  __device__ __forceinline__ void add(Word bits, Word place) {
    Word word = mixed(bits, place, row);
    Word turned = (word << 32) | (word >> 32);
    first += word;
    second += turned * (2 * turned + 1);
  }
};

// The next eight bytes, read by units of the alignment that the address has.
template <typename Unit> __device__ __forceinline__ Word word_at(const Unit* units) {
  Word bits = 0;
#pragma unroll
  for (int j = 0; j < 8 / (int)sizeof(Unit); ++j) bits |= (Word)units[j] << (8 * (int)sizeof(Unit) * j);
  return bits;
}

template <typename Unit>
__device__ __forceinline__ void add_words(Digest& digest, const unsigned char* from, int64 place, int words) {
#pragma unroll 4
  for (int i = threadIdx.x; i < words; i += blockDim.x) digest.add(word_at((const Unit*)(from + (int64)i * 8)), place + i);
}

__device__ __forceinline__ void add_pairs(Digest& digest, const unsigned char* from, int64 place, int words) {
#pragma unroll 4
  for (int i = threadIdx.x; i < words / 2; i += blockDim.x) {
    Pack<Word, 2> pair = ((const Pack<Word, 2>*)from)[i];
    digest.add(pair.value[0], place + 2 * i);
    digest.add(pair.value[1], place + 2 * i + 1);
  }
  if (words % 2 && threadIdx.x == 0) digest.add(((const Word*)from)[words - 1], place + words - 1);
}

// Adds the digest of each row's column 0 to two words of `to`, which are 0 before; the last word is filled up with zeros.
extern "C" __global__ void __launch_bounds__(512) digests(Table table, unsigned long long* to) {
  Chunk chunk;
  if (!locate(table, chunk)) return;
  const unsigned char* from = column<const unsigned char>(table, chunk, 0);
  int64 place = chunk.offset / 8;
  int words = chunk.count / 8, rest = chunk.count % 8;
  Digest digest{(Word)chunk.row, 0, 0};
  if ((int64)from % 16 == 0) add_pairs(digest, from, place, words);
  else if ((int64)from % 8 == 0) add_words<Word>(digest, from, place, words);
  else if ((int64)from % 4 == 0) add_words<unsigned int>(digest, from, place, words);
  else if ((int64)from % 2 == 0) add_words<unsigned short>(digest, from, place, words);
  else add_words<unsigned char>(digest, from, place, words);
  if (rest && threadIdx.x == 0) {
    Word bits = 0;
    for (int j = 0; j < rest; ++j) bits |= (Word)from[words * 8 + j] << (8 * j);
    digest.add(bits, place + words);
  }
  Word first = block_sum(digest.first);
  Word second = block_sum(digest.second);
  if (threadIdx.x != 0) return;
  atomicAdd(to + 2 * chunk.row, first);
  atomicAdd(to + 2 * chunk.row + 1, second);
}
