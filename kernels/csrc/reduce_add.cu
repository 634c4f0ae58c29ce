// The sum of several arrays in one pass, scaled.
//
// Access pattern: thread t of the grid takes the packs t, t + (threads of the grid), ... of 16
// bytes, so that a warp reads 512 bytes in a row from each source and writes as many. Writes are
// always aligned: the few elements before the first aligned one, and those after the last, are
// taken one by one. A source that is aligned otherwise than `out` is read by elements, which costs
// more instructions, but the same traffic. GROUP sources are read before the first of them is
// added, which keeps that many reads in flight for each thread.
#include "kernel.cuh"

constexpr int MAX_INPUTS = 64;

struct ReduceAdd {
  const void* inputs[MAX_INPUTS];
  void* out;
  i64 size;
  double scale;
  i64 num_inputs;
};

template <typename T>
__device__ inline T sum_of_one(const ReduceAdd& p, i64 i) {
  using Wide = typename Element<T>::Wide;
  Wide sum = Element<T>::widen(static_cast<const T*>(p.inputs[0])[i]);
  for (int n = 1; n < p.num_inputs; ++n) {
    sum += Element<T>::widen(static_cast<const T*>(p.inputs[n])[i]);
  }
  return Element<T>::narrow(sum * static_cast<Wide>(p.scale));
}

template <typename T, int GROUP, bool ALIGNED>
__device__ inline Pack<T> sum_of_pack(const ReduceAdd& p, i64 i) {
  using Wide = typename Element<T>::Wide;
  Wide sum[Pack<T>::SIZE];
  for (int base = 0; base < p.num_inputs; base += GROUP) {
    Pack<T> term[GROUP];
#pragma unroll
    for (int n = 0; n < GROUP; ++n) {
      if (base + n < p.num_inputs) {
        const T* from = static_cast<const T*>(p.inputs[base + n]) + i;
        term[n] = ALIGNED ? load_aligned(from) : load_pack(from);
      }
    }
#pragma unroll
    for (int n = 0; n < GROUP; ++n) {
      if (base + n < p.num_inputs) {
#pragma unroll
        for (int j = 0; j < Pack<T>::SIZE; ++j) {
          Wide value = Element<T>::widen(term[n].at[j]);
          // Not 0 + value: the sum of negative zeros is negative.
          sum[j] = base + n == 0 ? value : sum[j] + value;
        }
      }
    }
  }
  Pack<T> result;
#pragma unroll
  for (int j = 0; j < Pack<T>::SIZE; ++j) {
    result.at[j] = Element<T>::narrow(sum[j] * static_cast<Wide>(p.scale));
  }
  return result;
}

// True if the packs of `out` are packs of all sources too.
template <typename T>
__device__ inline bool all_lie_alike(const ReduceAdd& p) {
  bool alike = true;
  for (int n = 0; n < p.num_inputs; ++n) {
    alike &= ((reinterpret_cast<u64>(p.inputs[n]) ^ reinterpret_cast<u64>(p.out)) & 15) == 0;
  }
  return alike;
}

template <typename T, int GROUP, bool ALIGNED>
__device__ inline void reduce_add(const ReduceAdd& p) {
  constexpr int SIZE = Pack<T>::SIZE;
  T* out = static_cast<T*>(p.out);
  const i64 thread = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
  const i64 num_threads = static_cast<i64>(gridDim.x) * THREADS;
  const i64 head = head_of(out, p.size);
  const i64 packs = (p.size - head) / SIZE;
  const i64 rest = p.size - packs * SIZE;
  for (i64 pack = thread; pack < packs; pack += num_threads) {
    const i64 i = head + pack * SIZE;
    store_aligned(out + i, sum_of_pack<T, GROUP, ALIGNED>(p, i));
  }
  for (i64 i = thread; i < rest; i += num_threads) {
    const i64 place = i < head ? i : i + packs * SIZE;
    out[place] = sum_of_one<T>(p, place);
  }
}

template <typename T, int GROUP>
__device__ inline void reduce_add(const ReduceAdd& p) {
  if (all_lie_alike<T>(p)) {
    reduce_add<T, GROUP, true>(p);
  } else {
    // Reading by elements takes so many instructions that more reads in flight do not help.
    reduce_add<T, 2, false>(p);
  }
}

#define REDUCE_ADD(name, T, GROUP) \
  KERNEL(reduce_add_##name##_##GROUP, ReduceAdd) { reduce_add<T, GROUP>(p); }
#define FOR_GROUPS(name, T) REDUCE_ADD(name, T, 2) REDUCE_ADD(name, T, 4) REDUCE_ADD(name, T, 8)

FOR_GROUPS(f32, float)
FOR_GROUPS(f64, double)
FOR_GROUPS(f16, Half)
FOR_GROUPS(bf16, BFloat)
FOR_GROUPS(i32, int)
FOR_GROUPS(i64, i64)
