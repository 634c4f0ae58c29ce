// The words of CUDA with a meaning on the host, so that kernels run where there is no GPU.
//
// See block.h for how threads run.
#pragma once
#define KERNELS_ON_HOST

#include <cmath>
#include <cstdint>
#include <cstring>

#include "block.h"

#define __device__
#define __forceinline__ inline
#define __restrict__
#define __shared__ static thread_local

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

#define threadIdx host::launch.thread_index
#define blockIdx host::launch.block_index
#define blockDim host::launch.block_size
#define gridDim host::launch.grid_size

namespace host {

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float half_to_float(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16;
  const uint32_t exponent = half >> 10 & 31u;
  const uint32_t fraction = half & 1023u;
  if (exponent == 31) {
    return bits_to_float(sign | 0x7f800000u | fraction << 13);
  }
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(fraction), -24)
                              : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  return sign ? -magnitude : magnitude;
}

// Round to the nearest, ties to even.
inline uint16_t float_to_half(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint16_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return sign | 0x7e00u;
  }
  if (magnitude >= 0x477ff000u) {
    return sign | 0x7c00u;  // From half way between the largest half and the next on.
  }
  if (magnitude < 0x38800000u) {
    // Below the smallest normal half: a multiple of 2^-24.
    const double scaled = std::ldexp(static_cast<double>(bits_to_float(magnitude)), 24);
    return sign | static_cast<uint16_t>(std::nearbyint(scaled));
  }
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
  return sign | static_cast<uint16_t>((rounded - 0x38000000u) >> 13);
}

}  // namespace host

inline void __syncthreads(int place = __builtin_LINE()) {
  host::launch.block->wait(host::State::AT_BARRIER, place);
}

inline void __syncwarp(unsigned = 0xffffffffu, int place = __builtin_LINE()) {
  host::launch.block->wait(host::State::AT_WARP_BARRIER, place);
}

// Every thread of the warp has to take part.
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int place = __builtin_LINE()) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  host::Block& block = *host::launch.block;
  const unsigned thread = threadIdx.x;
  std::memcpy(&block.slot(thread), &value, sizeof value);
  __syncwarp(mask, place);
  T result;
  std::memcpy(&result, &block.slot(thread ^ lanes), sizeof result);
  __syncwarp(mask, place);
  return result;
}

// Blocks and threads run one at a time.
template <typename T>
T atomicAdd(T* address, T value) {
  const T before = *address;
  *address = before + value;
  return before;
}

#define HOST_EXPORT extern "C" __attribute__((visibility("default")))

// Declare a kernel that is found by name, and launched with a grid and its parameters.
#define KERNEL(name, Parameters)                                                \
  static void name##_body(const Parameters& p);                                 \
  HOST_EXPORT int name(unsigned blocks, unsigned schedule, const Parameters* p) { \
    return host::run_grid(blocks, THREADS, schedule, [p] { name##_body(*p); }); \
  }                                                                             \
  HOST_EXPORT size_t name##_bytes() { return sizeof(Parameters); }              \
  static void name##_body(const Parameters& p)
