// IEEE half, rounded to nearest even as the hardware does.
#pragma once
#include "cuda_on_cpu.h"

struct __half {
  uint16_t bits;
};

inline __half __float2half_rn(float value) {
  uint32_t word;
  memcpy(&word, &value, 4);
  uint32_t sign = (word >> 16) & 0x8000, size = word & 0x7fffffff;
  if (size > 0x7f800000) return {0x7fff};
  if (size >= 0x477ff000) return {uint16_t(sign | 0x7c00)};  // 65520 and above
  if (size < 0x38800000) {                                   // below the smallest normal number
    float positive;
    memcpy(&positive, &size, 4);
    return {uint16_t(sign | uint32_t(nearbyintf(positive * 16777216.f)))};
  }
  size += 0xfff + ((size >> 13) & 1);
  return {uint16_t(sign | ((size - 0x38000000) >> 13))};
}

inline float __half2float(__half value) {
  uint32_t sign = uint32_t(value.bits & 0x8000) << 16, exponent = (value.bits >> 10) & 31, fraction = value.bits & 1023;
  float result;
  if (exponent == 0) {
    result = fraction / 16777216.f;
    return sign ? -result : result;
  }
  uint32_t word = sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | (fraction << 13);
  memcpy(&result, &word, 4);
  return result;
}

inline __half __float2half(float value) { return __float2half_rn(value); }
