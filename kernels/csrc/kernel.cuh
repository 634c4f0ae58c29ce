// The common part of all kernels: declarations, element types, accesses of 16 bytes.
//
// No header is included, not even CUDA's own. So the runtime compiler needs nothing else, and any
// C++ compiler will do that is told what the words of CUDA mean.
#pragma once

// Note [One struct for each kernel]
// A kernel has one parameter, a struct that the launcher passes by value. Its fields are mirrored
// by a ctypes.Structure in Python, in the same order: pointers and long long first, so that there
// is no padding on which two compilers could disagree.
constexpr int THREADS = 256;

#ifndef KERNELS_ON_HOST
#define KERNEL(name, Parameters) \
  extern "C" __global__ void __launch_bounds__(THREADS) name(const __grid_constant__ Parameters p)
#endif

// Shifts and sums that wrap are those of unsigned numbers; signed ones may not wrap.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// --- numbers of 16 bits ---------------------------------------------------------------------

struct Half {
  u16 bits;
};
struct BFloat {
  u16 bits;
};

__device__ inline float as_float(u32 bits) {
#ifdef KERNELS_ON_HOST
  return host::bits_to_float(bits);
#else
  return __uint_as_float(bits);
#endif
}

__device__ inline u32 as_bits(float value) {
#ifdef KERNELS_ON_HOST
  return host::float_to_bits(value);
#else
  return __float_as_uint(value);
#endif
}

__device__ inline float widen(Half value) {
#ifdef KERNELS_ON_HOST
  return host::half_to_float(value.bits);
#else
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return wide;
#endif
}

__device__ inline Half to_half(float value) {
  Half half;
#ifdef KERNELS_ON_HOST
  half.bits = host::float_to_half(value);
#else
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half.bits) : "f"(value));
#endif
  return half;
}

__device__ inline float widen(BFloat value) {
  return as_float(static_cast<u32>(value.bits) << 16);
}

// Round to the nearest, ties to even. Only sm_80 and later ones have an instruction for it.
__device__ inline BFloat to_bfloat(float value) {
  u32 bits = as_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return {static_cast<u16>(0x7fc0u | (bits >> 16 & 0x8000u))};
  }
  return {static_cast<u16>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

// --- what each element type is computed in --------------------------------------------------

// `Wide` holds products with a scale.
template <typename T>
struct Element;

template <>
struct Element<float> {
  using Wide = float;
  __device__ static Wide widen(float value) { return value; }
  __device__ static float narrow(Wide value) { return value; }
};
template <>
struct Element<double> {
  using Wide = double;
  __device__ static Wide widen(double value) { return value; }
  __device__ static double narrow(Wide value) { return value; }
};
template <>
struct Element<Half> {
  using Wide = float;
  __device__ static Wide widen(Half value) { return ::widen(value); }
  __device__ static Half narrow(Wide value) { return to_half(value); }
};
template <>
struct Element<BFloat> {
  using Wide = float;
  __device__ static Wide widen(BFloat value) { return ::widen(value); }
  __device__ static BFloat narrow(Wide value) { return to_bfloat(value); }
};

// --- 16 bytes at a time ---------------------------------------------------------------------

template <typename T>
struct alignas(16) Pack {
  static constexpr int SIZE = 16 / sizeof(T);
  T at[SIZE];
};

template <typename T>
__device__ inline bool is_aligned(const T* address) {
  return (reinterpret_cast<u64>(address) & 15) == 0;
}

// Addresses must be aligned. Left alone, a compiler would store computed elements one by one.
template <typename T>
__device__ inline Pack<T> load_aligned(const T* from) {
  Pack<T> pack;
  *reinterpret_cast<uint4*>(&pack) = *reinterpret_cast<const uint4*>(from);
  return pack;
}

template <typename T>
__device__ inline void store_aligned(T* to, const Pack<T>& pack) {
  const uint4 words = *reinterpret_cast<const uint4*>(&pack);
#ifdef KERNELS_ON_HOST
  *reinterpret_cast<uint4*>(to) = words;
#else
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y),
               "r"(words.z), "r"(words.w)
               : "memory");
#endif
}

// Return the number of elements before the first that lies on a multiple of 16 bytes.
template <typename T>
__device__ inline i64 head_of(const T* address, i64 size) {
  i64 head = static_cast<i64>((16 - (reinterpret_cast<u64>(address) & 15)) & 15) / sizeof(T);
  return head < size ? head : size;
}

// --- many tensors in one launch -------------------------------------------------------------

// A row of the table that says which block does what; see Note [Lists of tensors] of tables.py.
struct Chunk {
  int tensor;
  int number;
};
