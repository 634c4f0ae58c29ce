// Operators that neither the dispatcher nor our own kernels handle: nested tensors, as the fast
// path of the transformer modules makes them, and operators that would be decomposed.
#include "fallback.h"
#include "hooks.h"

#include <ATen/ops/_nested_tensor_size_native.h>
#include <ATen/ops/_nested_tensor_storage_offsets_native.h>
#include <ATen/ops/_nested_tensor_strides_native.h>
#include <ATen/ops/_nested_view_from_buffer_native.h>

namespace vdev {
namespace {

TORCH_LIBRARY_IMPL(_, NestedTensorPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&any_layout_fallback>());
}

// The data that describes a nested tensor is on the host, and stays there.
TORCH_LIBRARY_IMPL(aten, NestedTensorPrivateUse1, m) {
  m.impl("_nested_tensor_size", &at::native::_nested_tensor_size);
  m.impl("_nested_tensor_strides", &at::native::_nested_tensor_strides);
  m.impl("_nested_tensor_storage_offsets", &at::native::_nested_tensor_storage_offsets);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_nested_view_from_buffer", &at::native::_nested_view_from_buffer);
}

using c10::DispatchKey;

// The dispatcher prefers a decomposition to a fallback. If the CPU has a kernel of its own, that is
// faster, and its results are the ones to compare with.
bool would_be_decomposed(const c10::OperatorHandle& op, DispatchKey cpu, DispatchKey own) {
  return op.hasKernelForDispatchKey(cpu) && !op.hasKernelForDispatchKey(own) &&
      (op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
       op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional));
}

// True for questions about host memory: the answer is the same for every device.
bool concerns_host_memory(const std::string& name) {
  return name == "aten::_pin_memory" || name == "aten::is_pinned";
}

}  // namespace

void register_cpu_kernels() {
  // The library is never destroyed: that would unregister the kernels.
  static auto* library = new torch::Library(
      torch::Library::IMPL, "aten", std::nullopt, __FILE__, static_cast<uint32_t>(__LINE__));
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (!op.has_value() || name.getNamespace() != std::string_view("aten") ||
        concerns_host_memory(name.name)) {
      continue;
    }
    const std::string full = c10::toString(name);
    if (would_be_decomposed(*op, DispatchKey::CPU, DispatchKey::PrivateUse1)) {
      library->impl(
          full.c_str(),
          torch::dispatch(
              DispatchKey::PrivateUse1,
              torch::CppFunction::makeFromBoxedFunction<&cpu_kernel_fallback>()));
    }
    const std::pair<DispatchKey, DispatchKey> layouts[] = {
        {DispatchKey::SparseCPU, DispatchKey::SparsePrivateUse1},
        {DispatchKey::NestedTensorCPU, DispatchKey::NestedTensorPrivateUse1}};
    for (const auto& [cpu, own] : layouts) {
      if (would_be_decomposed(*op, cpu, own)) {
        library->impl(
            full.c_str(),
            torch::dispatch(
                own, torch::CppFunction::makeFromBoxedFunction<&any_layout_fallback>()));
      }
    }
  }
}

}  // namespace vdev
