// States of eight bits (ops/codes.py): a warp works on a block of 256 elements, which share the scales of their codes.
#pragma once

typedef unsigned char Code;

template <typename T> struct IsCode { static const bool value = false; };
template <> struct IsCode<Code> { static const bool value = true; };

const int CODES = 256;  // elements of a block, and of a table of values
const int EACH = CODES / 32;  // elements of a thread

// The root and the quotient of states in few bits, in the hardware's accuracy: 1e-6 where a code or a bf16 has 1e-2.
__device__ __forceinline__ float fast_root(float x) {
#ifdef __CUDACC__
  float root;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x));
  return root;
#else
  return sqrtf(x);
#endif
}

__device__ __forceinline__ float fast_quotient(float a, float b) {
#ifdef __CUDACC__
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(b));
  return a * inverse;
#else
  return a / b;
#endif
}

// The largest of a warp's words, in all threads.
__device__ __forceinline__ unsigned warp_largest(unsigned word) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xffffffffu, word);
#else
  for (int step = 16; step > 0; step >>= 1) {
    unsigned other = __shfl_xor_sync(0xffffffffu, word, step);
    word = word > other ? word : other;
  }
  return word;
#endif
}

// LEVELS levels, each of which spans a factor of 8 and has half as many codes as the one above.
template <int LEVELS> __device__ __forceinline__ float value_of(int code) {
  float count = (float)(code + 1);
  unsigned level = (__float_as_uint(count) >> 23) - 127;
  float within = __uint_as_float(__float_as_uint(count) - (level << 23));  // from 1 to 2
  return (7 * within - 6) / 8 * __uint_as_float((127 + 3 * (level + 1 - LEVELS)) << 23);
}

// The nearest code, in the lowest byte, of a share of the scale.
template <int LEVELS> __device__ __forceinline__ unsigned code_of(float share) {
  share = fmaxf(share, __uint_as_float((127 - 3 * LEVELS) << 23));  // a nan becomes the smallest
  unsigned bits = __float_as_uint(share);
  unsigned level = (((bits >> 23) - (127 - 3 * LEVELS)) * 11) >> 5;  // the exponent, divided by 3
  float within = __uint_as_float(bits - level * (3u << 23));  // a factor of 8 in all levels
  float place = multiply_add(within, 8 / 7.f * (1u << 3 * (LEVELS - 1)), 6 / 7.f);  // from 1 to 2
  // Where one unit is the last place, a sum rounds to nearest.
  return __float_as_uint(__uint_as_float(__float_as_uint(place) + (level << 23)) + 8388607.f);
}

// The values of all codes at scale 1, in shared memory: those of signed states, then those of squares.  It ends with a barrier.
__device__ __forceinline__ const float* code_values() {
  __shared__ float values[2 * CODES];
  for (int i = threadIdx.x; i < CODES; i += blockDim.x) {
    float magnitude = (i & 127) ? value_of<7>(i & 127) : 0.f;
    float root = value_of<8>(i);
    values[i] = i < 128 ? magnitude : -magnitude;
    values[CODES + i] = root * root;
  }
  __syncthreads();
  return values;
}

// The lowest bytes of four words, or the highest, in one.
template <bool HIGHEST> __device__ __forceinline__ unsigned bytes_of(unsigned a, unsigned b, unsigned c, unsigned d) {
  const unsigned from = HIGHEST ? 0x73 : 0x40;
  return __byte_perm(__byte_perm(a, b, from), __byte_perm(c, d, from), 0x5410);
}

// A state without signs, kept as codes of its values' roots.
struct Squares {
  static const int offset = CODES;
  __device__ static __forceinline__ unsigned magnitude(float value) { return __float_as_uint(value); }
  __device__ static __forceinline__ unsigned codes(const float* value, float inverse) {
    unsigned word[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) word[j] = code_of<8>(fast_root(value[j] * inverse));
    return bytes_of<false>(word[0], word[1], word[2], word[3]);
  }
};

// Any state.
struct Signed {
  static const int offset = 0;
  __device__ static __forceinline__ unsigned magnitude(float value) { return __float_as_uint(value) & 0x7fffffffu; }
  __device__ static __forceinline__ unsigned codes(const float* value, float inverse) {
    unsigned word[4], sign[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      word[j] = code_of<7>(fabsf(value[j]) * inverse);
      sign[j] = __float_as_uint(value[j]);
    }
    unsigned signs = bytes_of<true>(sign[0], sign[1], sign[2], sign[3]) & 0x80808080u;
    return signs | (bytes_of<false>(word[0], word[1], word[2], word[3]) & 0x7f7f7f7fu);
  }
};

// Brings what is read later into the L2 cache.
__device__ __forceinline__ void prefetch(const void* address) {
#ifdef __CUDACC__
  asm volatile("prefetch.global.L2 [%0];" : : "l"(address));
#endif
}

// A thread's part of a block: EACH elements, in packs of N neighbours, which lie side by side with those of the warp's other threads.
// With N = 1 they are neighbours, those from `count` on do not exist, and addresses need no alignment.
template <int N> struct Part {
  int first;
  int count;

  // Where pack k begins.
  __device__ __forceinline__ int at(int k) const { return first + k * (N > 1 ? 32 * N : 1); }
  __device__ __forceinline__ bool has(int k) const { return N > 1 || k < count; }

  template <typename T> __device__ __forceinline__ void prefetch(const T* from) const {
#pragma unroll
    for (int k = 0; k < EACH / N; ++k) ::prefetch(from + at(k));
  }
  __device__ __forceinline__ void prefetch(const None*) const {}

  template <typename T> __device__ __forceinline__ void load(const T* from, float (&to)[EACH]) const {
#pragma unroll
    for (int k = 0; k < EACH / N; ++k) {
      float pack[N] = {};
      if (has(k)) ::load<N>(from + at(k), pack);
#pragma unroll
      for (int j = 0; j < N; ++j) to[k * N + j] = pack[j];
    }
  }

  template <typename P, typename C>
  __device__ __forceinline__ void load_parameters(const P* parameters, const C* copies, float (&to)[EACH]) const {
#pragma unroll
    for (int k = 0; k < EACH / N; ++k) {
      float pack[N] = {};
      if (has(k)) ::load_parameters<N>(parameters + at(k), copies + at(k), pack);
#pragma unroll
      for (int j = 0; j < N; ++j) to[k * N + j] = pack[j];
    }
  }

  template <typename P, typename C>
  __device__ __forceinline__ void store_parameters(P* parameters, C* copies, const float (&from)[EACH]) const {
#pragma unroll
    for (int k = 0; k < EACH / N; ++k) {
      float pack[N];
#pragma unroll
      for (int j = 0; j < N; ++j) pack[j] = from[k * N + j];
      if (has(k)) ::store_parameters<N>(parameters + at(k), copies + at(k), pack);
    }
  }

  // The codes as they are, four to a word.
  __device__ __forceinline__ uint2 load_codes(const Code* from) const {
    if constexpr (N == 8) return *(const uint2*)(from + first);
    if constexpr (N == 4) return uint2{*(const unsigned*)(from + at(0)), *(const unsigned*)(from + at(1))};
    uint2 words = {0, 0};
    if constexpr (N == 1) {
#pragma unroll
      for (int k = 0; k < EACH; ++k) {
        if (has(k)) (k < 4 ? words.x : words.y) |= (unsigned)from[at(k)] << 8 * (k & 3);
      }
    }
    return words;
  }

  __device__ __forceinline__ void store_codes(Code* to, uint2 words) const {
    if constexpr (N == 8) {
      *(uint2*)(to + first) = words;
    } else if constexpr (N == 4) {
      *(unsigned*)(to + at(0)) = words.x;
      *(unsigned*)(to + at(1)) = words.y;
    } else {
#pragma unroll
      for (int k = 0; k < EACH; ++k) {
        if (has(k)) to[at(k)] = (Code)((k < 4 ? words.x : words.y) >> 8 * (k & 3));
      }
    }
  }
};

// Codes become values.
template <typename State>
__device__ __forceinline__ void decode(const float* values, uint2 words, float scale, float (&to)[EACH]) {
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
    unsigned code = __byte_perm(j < 4 ? words.x : words.y, 0, 0x4440 + (j & 3));
    to[j] = values[State::offset + code] * scale;
  }
}

// Values become codes; the scale of the block, and its inverse, are those of its largest magnitude.
template <typename State> __device__ __forceinline__ uint2 encode(const float (&from)[EACH], float& scale) {
  unsigned largest = 0;
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
    unsigned magnitude = State::magnitude(from[j]);
    largest = magnitude > largest ? magnitude : largest;
  }
  largest = warp_largest(largest);
  bool finite = largest < 0x7f800000u, some = finite && largest >= 0x00800000u;
  scale = some ? __uint_as_float(largest) : finite ? 0.f : __uint_as_float(0x7fc00000u);
  float inverse = some ? 1.f / scale : 0.f;
  return uint2{State::codes(from, inverse), State::codes(from + 4, inverse)};
}

// The scales of a chunk's blocks, of state 0 or 1.  They are in shared memory while the chunk is worked on: written as single words, a
// thousandth of an update's bytes, they would take a tenth of its time.
__device__ __forceinline__ float* block_scales(int state) {
  __shared__ float scales[2][512];  // as many blocks as the longest chunks have (chunk_size_for in ops/rules.py)
  return scales[state];
}

// Where they are kept between updates; `index` is their cell.
__device__ __forceinline__ float* scales_of(const Table& table, const Chunk& chunk, int index) {
  return cell<float>(table, chunk, index) + chunk.offset / CODES;
}

// Before a barrier.
__device__ __forceinline__ void read_scales(const float* from, const Chunk& chunk, int state) {
  for (int i = threadIdx.x; i * CODES < chunk.count; i += blockDim.x) block_scales(state)[i] = from[i];
}

// After a barrier.
__device__ __forceinline__ void write_scales(float* to, const Chunk& chunk, int state) {
  for (int i = threadIdx.x; i * CODES < chunk.count; i += blockDim.x) to[i] = block_scales(state)[i];
}

// This thread's part of block `number`, with packs of 16 bytes of parameters.
template <typename P> __device__ __forceinline__ Part<16 / sizeof(P)> part_of(int number) {
  int lane = threadIdx.x & 31;
  return Part<16 / sizeof(P)>{number * CODES + lane * (int)(16 / sizeof(P)), EACH};
}

// The number of blocks that are read in packs.
__device__ __forceinline__ int whole_blocks(const Chunk& chunk) { return chunk.aligned ? chunk.count / CODES : 0; }

// Prefetches the blocks that the chunk's warps begin with.
template <typename P, typename Body> __device__ __forceinline__ void prefetch_first(const Chunk& chunk, const Body& body) {
  int i = threadIdx.x >> 5;
  if (i < whole_blocks(chunk)) body.prefetch(part_of<P>(i));
}

// Runs body.block(part, number) for every block of the chunk, each in a warp.  While it works on one, the next one is on its way: a
// warp has too few registers to load it.
template <typename P, typename Body> __device__ __forceinline__ void each_block(const Chunk& chunk, Body& body) {
  int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
  int whole = whole_blocks(chunk), i = threadIdx.x >> 5;
  for (; i < whole; i += warps) {
    if (i + warps < whole) body.prefetch(part_of<P>(i + warps));
    body.block(part_of<P>(i), i);
  }
  for (; i * CODES < chunk.count; i += warps) {
    int first = i * CODES + lane * EACH;
    body.block(Part<1>{first, chunk.count - first}, i);
  }
}
