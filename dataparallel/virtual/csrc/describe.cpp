#include "describe.h"

#include "fallback.h"

#include <c10/core/DefaultDtype.h>

#include <string>
#include <unordered_map>

namespace vdev {
namespace {

// Many meta kernels are written in Python, and a training loop repeats the same shapes.
constexpr size_t kMaxCached = 16384;

// Everything that a description depends on, as bytes. Incomplete if an argument has a value that
// is not known to be comparable.
class Key {
 public:
  void add(const c10::IValue& value) {
    add_raw(value.isTensor() ? 1 : static_cast<int>(std::hash<std::string>()(value.tagKind())));
    if (value.isTensor()) {
      add(value.toTensor());
    } else if (value.isTensorList()) {
      add_all(value.toTensorVector());
    } else if (value.isOptionalTensorList()) {
      for (const auto& tensor : value.toOptionalTensorVector()) {
        add(tensor.value_or(at::Tensor()));
      }
    } else if (value.isInt()) {
      add_raw(value.toInt());
    } else if (value.isDouble()) {
      add_raw(value.toDouble());
    } else if (value.isBool()) {
      add_raw(value.toBool());
    } else if (value.isIntList()) {
      add_all(value.toIntVector());
    } else if (value.isDoubleList()) {
      add_all(value.toDoubleVector());
    } else if (value.isBoolList()) {
      for (bool flag : value.toBoolList()) {
        add_raw(flag);
      }
    } else if (value.isString()) {
      bytes += value.toStringRef();
    } else {
      complete &= value.isNone() || value.isDevice();
    }
  }

  template <typename Plain>
  void add_raw(Plain value) {
    bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }

  std::string bytes;
  bool complete = true;

 private:
  template <typename List>
  void add_all(const List& list) {
    add_raw(list.size());
    for (const auto& value : list) {
      if constexpr (std::is_same_v<std::decay_t<decltype(value)>, at::Tensor>) {
        add(value);
      } else {
        add_raw(value);
      }
    }
  }

  void add(const at::Tensor& tensor) {
    add_raw(tensor.defined() ? tensor.dim() : int64_t{-1});
    if (!tensor.defined()) {
      return;
    }
    // A number on the host may matter by its value.
    complete &= is_virtual(tensor) || tensor.dim() > 0;
    add_raw(tensor.scalar_type());
    add_raw(tensor.storage_offset());
    add_raw(tensor.is_conj() + 2 * tensor.is_neg());
    bytes.append(
        reinterpret_cast<const char*>(tensor.sizes().data()), tensor.dim() * sizeof(int64_t));
    bytes.append(
        reinterpret_cast<const char*>(tensor.strides().data()), tensor.dim() * sizeof(int64_t));
  }
};

TensorDescription description_of(const at::Tensor& tensor) {
  TensorDescription made;
  made.defined = tensor.defined();
  if (made.defined) {
    made.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
    made.strides.assign(tensor.strides().begin(), tensor.strides().end());
    made.type = tensor.dtype();
  }
  return made;
}

Description description_of(const OperatorInfo& info, const torch::jit::Stack& results) {
  Description made(info.returns.size());
  for (size_t i = 0; i < made.size(); ++i) {
    if (results[i].isTensor()) {
      made[i].push_back(description_of(results[i].toTensor()));
    } else if (results[i].isTensorList()) {
      for (const at::Tensor& tensor : results[i].toTensorVector()) {
        made[i].push_back(description_of(tensor));
      }
    }
  }
  return made;
}

std::shared_ptr<const Description> run_meta_kernel(
    const c10::OperatorHandle& op, const OperatorInfo& info,
    at::ArrayRef<c10::IValue> arguments) {
  torch::jit::Stack stack(arguments.begin(), arguments.end());
  for (const auto& argument : info.tensors) {
    change_tensors(stack[static_cast<size_t>(argument.index)], [](const at::Tensor& tensor) {
      const bool host_scalar = !is_virtual(tensor) && tensor.dim() == 0;
      return host_scalar ? tensor : meta_alias(tensor);
    });
  }
  for (int index : info.device_arguments) {
    if (stack[static_cast<size_t>(index)].isDevice()) {
      stack[static_cast<size_t>(index)] = c10::Device(c10::kMeta);
    }
  }
  try {
    KernelScope scope;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
  } catch (const std::exception&) {
    return nullptr;
  }
  return std::make_shared<const Description>(description_of(info, stack));
}

}  // namespace

std::shared_ptr<const Description> describe(
    const c10::OperatorHandle& op, const OperatorInfo& info, at::ArrayRef<c10::IValue> arguments) {
  if (!info.has_meta_kernel) {
    return nullptr;
  }
  thread_local std::unordered_map<std::string, std::shared_ptr<const Description>> cache;
  Key key;
  key.add_raw(&info);
  key.add_raw(c10::typeMetaToScalarType(c10::get_default_dtype()));
  for (const auto& argument : arguments) {
    key.add(argument);
  }
  if (!key.complete) {
    return run_meta_kernel(op, info, arguments);
  }
  if (auto found = cache.find(key.bytes); found != cache.end()) {
    return found->second;
  }
  auto made = run_meta_kernel(op, info, arguments);
  if (cache.size() >= kMaxCached) {
    cache.clear();
  }
  cache.emplace(std::move(key.bytes), made);
  return made;
}

}  // namespace vdev
