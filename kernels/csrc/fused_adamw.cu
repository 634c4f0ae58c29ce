// The step of Adam and AdamW on lists of tensors; see optimizers.cuh for how it goes through
// memory. The operations and their order are those of torch.optim.AdamW.
#include "optimizers.cuh"

template <int STATES>
struct FusedAdamW {
  Lists<STATES> lists;
  const Chunk* chunks;
  double scale;  // Negative to maximize.
  double shrink;  // What the parameter is multiplied with: decoupled weight decay.
  double weight_decay;  // What of the parameter is added to the gradient: Adam's weight decay.
  double one_minus_beta1;
  double beta2;
  double one_minus_beta2;
  double correction2_root;
  double eps;
  double step_size;
};

__device__ inline float square_root(float value) { return sqrtf(value); }
__device__ inline double square_root(double value) { return sqrt(value); }

// Exact at either end, as torch's.
template <typename Wide>
__device__ inline Wide interpolate(Wide from, Wide to, Wide weight) {
  const bool is_small = weight < static_cast<Wide>(0.5);
  return multiply_add(is_small ? weight : weight - 1, to - from, is_small ? from : to);
}

template <typename Wide, int STATES>
struct AdamWUpdate {
  const FusedAdamW<STATES>& p;

  __device__ void operator()(Wide gradient, Wide (&states)[STATES]) const {
    gradient *= static_cast<Wide>(p.scale);
    Wide& parameter = states[0];
    Wide& average = states[1];
    Wide& average_square = states[2];
    parameter *= static_cast<Wide>(p.shrink);
    if (p.weight_decay != 0) {
      gradient = multiply_add(static_cast<Wide>(p.weight_decay), parameter, gradient);
    }
    average = interpolate(average, gradient, static_cast<Wide>(p.one_minus_beta1));
    average_square = multiply_add(static_cast<Wide>(p.one_minus_beta2) * gradient, gradient,
                                  average_square * static_cast<Wide>(p.beta2));
    Wide square = average_square;
    if constexpr (STATES == 4) {
      Wide& largest = states[3];
      // What is no number stays none.
      largest = largest > square || largest != largest ? largest : square;
      square = largest;
    }
    const Wide denominator =
        square_root(square) / static_cast<Wide>(p.correction2_root) + static_cast<Wide>(p.eps);
    parameter += -static_cast<Wide>(p.step_size) * average / denominator;
  }
};

template <typename T, typename G, int STATES>
__device__ inline void fused_adamw(const FusedAdamW<STATES>& p) {
  const Part<T, G, STATES> part(p.lists, p.chunks[blockIdx.x]);
  part.step(AdamWUpdate<typename Element<T>::Wide, STATES>{p});
}

#define FUSED_ADAMW(name, T, G)                                            \
  KERNEL(fused_adamw_##name##_3, FusedAdamW<3>) { fused_adamw<T, G>(p); }  \
  KERNEL(fused_adamw_##name##_4, FusedAdamW<4>) { fused_adamw<T, G>(p); }

FOR_TYPES(FUSED_ADAMW)
