// The step of stochastic gradient descent on lists of tensors; see optimizers.cuh for how it goes
// through memory. The operations and their order are those of torch.optim.SGD.
#include "optimizers.cuh"

template <int STATES>
struct FusedSgd {
  Lists<STATES> lists;
  const Chunk* chunks;
  i64 nesterov;
  i64 first_step;
  double scale;  // Negative to maximize.
  double lr;
  double momentum;
  double dampening;
  double weight_decay;
};

template <typename Wide, int STATES>
struct SgdUpdate {
  const FusedSgd<STATES>& p;

  __device__ void operator()(Wide gradient, Wide (&states)[STATES]) const {
    gradient *= static_cast<Wide>(p.scale);
    if (p.weight_decay != 0) {
      gradient = multiply_add(static_cast<Wide>(p.weight_decay), states[0], gradient);
    }
    if constexpr (STATES == 2) {
      const Wide momentum = static_cast<Wide>(p.momentum);
      Wide& buffer = states[1];
      // Before the first step the buffer may hold anything.
      buffer = p.first_step ? gradient
                            : multiply_add(static_cast<Wide>(1 - p.dampening), gradient,
                                           buffer * momentum);
      gradient = p.nesterov ? multiply_add(momentum, buffer, gradient) : buffer;
    }
    states[0] = multiply_add(-static_cast<Wide>(p.lr), gradient, states[0]);
  }
};

template <typename T, typename G, int STATES>
__device__ inline void fused_sgd(const FusedSgd<STATES>& p) {
  const Part<T, G, STATES> part(p.lists, p.chunks[blockIdx.x]);
  part.step(SgdUpdate<typename Element<T>::Wide, STATES>{p});
}

#define FUSED_SGD(name, T, G)                                        \
  KERNEL(fused_sgd_##name##_1, FusedSgd<1>) { fused_sgd<T, G>(p); }  \
  KERNEL(fused_sgd_##name##_2, FusedSgd<2>) { fused_sgd<T, G>(p); }

FOR_TYPES(FUSED_SGD)
