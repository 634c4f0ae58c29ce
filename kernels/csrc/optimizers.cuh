// Which elements of lists of tensors a block of an optimizer's step takes, and how.
//
// Access pattern: a block takes one chunk of one tensor. Of each pack its thread reads the values
// of the parameter, of its states and of its gradient, all before the first is used, and writes the
// parameter and the states to where they were: each value goes through memory once. A pack has 16
// bytes of the wider one of two types, the parameter's and the gradient's, so that neighbouring
// threads take neighbouring bytes of both. Elements before the first that lies on a multiple of its
// pack, and those after the last pack, are taken one by one. A gradient that lies differently to
// its packs, as most in a flat bucket do, is read by elements; a parameter and states that lie
// differently to each other are wholly taken by elements.
#pragma once
#include "kernel.cuh"

constexpr int CHUNK = 8192;

// Torch's operations round a product and a sum once, and so does this, in spite of the option that
// keeps a compiler from it elsewhere.
__device__ inline float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ inline double multiply_add(double a, double b, double c) { return fma(a, b, c); }

// STATES arrays for each tensor: of the parameter first. As many tensors as 3840 bytes hold.
template <int STATES>
struct Lists {
  static constexpr int MOST = 3840 / (8 * (STATES + 2));
  void* states[STATES][MOST];
  const void* gradients[MOST];
  i64 sizes[MOST];
};

// 8 or 16 bytes.
template <typename T, int SIZE>
struct alignas(SIZE * sizeof(T)) Few {
  T at[SIZE];
};

template <typename T, int SIZE>
__device__ inline bool lies_on_few(const T* address) {
  return (reinterpret_cast<u64>(address) & (sizeof(Few<T, SIZE>) - 1)) == 0;
}

template <bool ALIGNED, typename T, int SIZE>
__device__ inline void load_few(Few<T, SIZE>& few, const T* from) {
  if constexpr (ALIGNED && sizeof(few) == 16) {
    *reinterpret_cast<uint4*>(&few) = *reinterpret_cast<const uint4*>(from);
  } else if constexpr (ALIGNED) {
    *reinterpret_cast<uint2*>(&few) = *reinterpret_cast<const uint2*>(from);
  } else {
#pragma unroll
    for (int j = 0; j < SIZE; ++j) {
      few.at[j] = from[j];
    }
  }
}

// The address must be a multiple of the size.
template <typename T, int SIZE>
__device__ inline void store_few(T* to, const Few<T, SIZE>& few) {
  if constexpr (sizeof(few) == 16) {
    store_aligned(to, *reinterpret_cast<const Pack<T>*>(&few));
  } else {
    const uint2 words = *reinterpret_cast<const uint2*>(&few);
#ifdef KERNELS_ON_HOST
    *reinterpret_cast<uint2*>(to) = words;
#else
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(words.x), "r"(words.y)
                 : "memory");
#endif
  }
}

// A chunk of T with gradients of G. `update(gradient, states)` changes the states of one element,
// in the wide type of T.
template <typename T, typename G, int STATES>
struct Part {
  using Wide = typename Element<T>::Wide;
  static constexpr int SIZE = 16 / (sizeof(T) > sizeof(G) ? sizeof(T) : sizeof(G));

  T* states[STATES];
  const G* gradient;
  int size;

  __device__ Part(const Lists<STATES>& lists, Chunk chunk) {
    const i64 begin = static_cast<i64>(chunk.number) * CHUNK;
    const i64 left = lists.sizes[chunk.tensor] - begin;
    size = static_cast<int>(left < CHUNK ? left : CHUNK);
#pragma unroll
    for (int n = 0; n < STATES; ++n) {
      states[n] = static_cast<T*>(lists.states[n][chunk.tensor]) + begin;
    }
    gradient = static_cast<const G*>(lists.gradients[chunk.tensor]) + begin;
  }

  // How many elements come before those of the packs: all, if the states have no packs in common.
  __device__ int head() const {
    int head = 0;
    while (head < SIZE - 1 && !lies_on_few<T, SIZE>(states[0] + head)) {
      ++head;
    }
    bool alike = head < size;
#pragma unroll
    for (int n = 0; n < STATES; ++n) {
      alike = alike && lies_on_few<T, SIZE>(states[n] + head);
    }
    return alike ? head : size;
  }

  template <typename Update>
  __device__ void step(const Update& update) const {
    const int head = this->head();
    const int packs = (size - head) / SIZE;
    if (lies_on_few<G, SIZE>(gradient + head)) {
      step_packs<true>(update, head, packs);
    } else {
      step_packs<false>(update, head, packs);
    }
    for (int i = threadIdx.x; i < size - packs * SIZE; i += THREADS) {
      step_element(update, i < head ? i : i + packs * SIZE);
    }
  }

  template <bool ALIGNED, typename Update>
  __device__ void step_packs(const Update& update, int head, int packs) const {
    for (int pack = threadIdx.x; pack < packs; pack += THREADS) {
      const int i = head + pack * SIZE;
      Few<T, SIZE> values[STATES];
      Few<G, SIZE> gradients;
#pragma unroll
      for (int n = 0; n < STATES; ++n) {
        load_few<true>(values[n], states[n] + i);
      }
      load_few<ALIGNED>(gradients, gradient + i);
#pragma unroll
      for (int j = 0; j < SIZE; ++j) {
        Wide wide[STATES];
#pragma unroll
        for (int n = 0; n < STATES; ++n) {
          wide[n] = Element<T>::widen(values[n].at[j]);
        }
        update(static_cast<Wide>(Element<G>::widen(gradients.at[j])), wide);
#pragma unroll
        for (int n = 0; n < STATES; ++n) {
          values[n].at[j] = Element<T>::narrow(wide[n]);
        }
      }
#pragma unroll
      for (int n = 0; n < STATES; ++n) {
        store_few(states[n] + i, values[n]);
      }
    }
  }

  template <typename Update>
  __device__ void step_element(const Update& update, int i) const {
    Wide wide[STATES];
#pragma unroll
    for (int n = 0; n < STATES; ++n) {
      wide[n] = Element<T>::widen(states[n][i]);
    }
    update(static_cast<Wide>(Element<G>::widen(gradient[i])), wide);
#pragma unroll
    for (int n = 0; n < STATES; ++n) {
      states[n][i] = Element<T>::narrow(wide[n]);
    }
  }
};

// The types of a parameter and its gradient.
#define FOR_TYPES(MACRO)           \
  MACRO(f32_f32, float, float)     \
  MACRO(f32_f16, float, Half)      \
  MACRO(f32_bf16, float, BFloat)   \
  MACRO(f64_f64, double, double)   \
  MACRO(f16_f16, Half, Half)       \
  MACRO(f16_f32, Half, float)      \
  MACRO(bf16_bf16, BFloat, BFloat) \
  MACRO(bf16_f32, BFloat, float)
