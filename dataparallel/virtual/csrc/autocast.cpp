// Autocast with the lists of operators that torch uses on its own accelerators.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace {

// The lists name types of this namespace.
using namespace at;  // NOLINT(google-build-using-namespace)

Tensor binary_cross_entropy_banned(
    const Tensor& /*input*/, const Tensor& /*target*/, const std::optional<Tensor>& /*weight*/,
    int64_t /*reduction*/) {
  TORCH_CHECK(
      false,
      "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast: "
      "most models use a Sigmoid right before them, so combine the two layers with "
      "torch.nn.functional.binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss, "
      "which are safe to autocast");
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define VDEV_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define VDEV_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define VDEV_FP32_SET_OPT_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define VDEV_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(VDEV_LOWER_PRECISION)
  AT_FORALL_FP32(VDEV_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(VDEV_FP32_SET_OPT_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(VDEV_PROMOTE)
  m.impl("binary_cross_entropy", &binary_cross_entropy_banned);
}

}  // namespace
