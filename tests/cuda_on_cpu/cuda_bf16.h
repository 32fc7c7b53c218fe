// bfloat16: the upper half of a float, rounded to nearest even.
#pragma once
#include "cuda_on_cpu.h"

struct __nv_bfloat16 {
  uint16_t bits;
};

inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  uint32_t word;
  memcpy(&word, &value, 4);
  if ((word & 0x7fffffff) > 0x7f800000) return {0x7fff};
  return {uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16)};
}

inline float __bfloat162float(__nv_bfloat16 value) {
  uint32_t word = uint32_t(value.bits) << 16;
  float result;
  memcpy(&result, &word, 4);
  return result;
}

inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return {bits}; }

inline __nv_bfloat16 __float2bfloat16(float value) { return __float2bfloat16_rn(value); }
