#include "operators.h"

#include "fallback.h"

#include <ATen/core/enum_tag.h>
#include <ATen/core/jit_type.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <mutex>
#include <unordered_set>
#include <c10/core/DefaultDtype.h>
#include <string>
#include <unordered_map>

namespace vdev {
namespace {

// Operators whose meta kernels do not describe what their CPU kernels return.
const std::unordered_set<std::string>& undescribed() {
  static const auto* names = new std::unordered_set<std::string>{
      "aten::_embedding_bag", "aten::_embedding_bag_forward_only", "aten::_embedding_bag_backward"};
  return *names;
}

bool starts_with_any(const std::string& name, std::initializer_list<const char*> starts) {
  return std::any_of(
      starts.begin(), starts.end(), [&](const char* start) { return name.rfind(start, 0) == 0; });
}

bool is_tensor_like(const c10::TypePtr& type) {
  if (type->kind() == c10::TypeKind::TensorType) {
    return true;
  }
  if (auto optional = type->cast<c10::OptionalType>()) {
    return is_tensor_like(optional->getElementType());
  }
  if (auto list = type->cast<c10::ListType>()) {
    return is_tensor_like(list->getElementType());
  }
  return false;
}

bool is_index_list(const c10::TypePtr& type) {
  auto list = type->cast<c10::ListType>();
  return list && list->getElementType()->kind() == c10::TypeKind::OptionalType;
}

bool holds(const c10::TypePtr& type, c10::TypeKind kind) {
  if (auto optional = type->cast<c10::OptionalType>()) {
    return holds(optional->getElementType(), kind);
  }
  return type->kind() == kind;
}

ReturnKind kind_of(const c10::TypePtr& type) {
  if (type->kind() == c10::TypeKind::TensorType) {
    return ReturnKind::kTensor;
  }
  return is_tensor_like(type) ? ReturnKind::kTensorList : ReturnKind::kOther;
}

// Most schemas of batch normalization do not say that they write running statistics.
bool is_statistic(const std::string& op, const std::string& argument) {
  const auto has = [&](const char* part) { return op.find(part) != std::string::npos; };
  return has("batch_norm") && argument.rfind("running_", 0) == 0 && !has("backward") &&
      !has("no_update") && !has("functional");
}

int find_written(const c10::FunctionSchema& schema, const c10::AliasInfo& alias) {
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::AliasInfo* own = schema.arguments()[i].alias_info();
    if (own != nullptr && own->isWrite() && own->beforeSets() == alias.beforeSets()) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

// Many meta kernels are written in Python, and a training loop repeats the same shapes.
constexpr size_t kMaxCached = 16384;

// Everything that a description depends on, as bytes. It is incomplete if an argument has a value
// that is not known to be comparable.
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

OperatorInfo::OperatorInfo(const c10::OperatorHandle& op)
    : schema(&op.schema()), op_name(op.operator_name()), name(c10::toString(op.operator_name())) {
  const auto& arguments = schema->arguments();
  num_arguments = static_cast<int>(arguments.size());
  bool only_writes = true;
  for (int i = 0; i < num_arguments; ++i) {
    const auto& argument = arguments[static_cast<size_t>(i)];
    const auto& type = argument.real_type();
    if (is_tensor_like(type)) {
      const bool is_hidden = is_statistic(name, argument.name());
      const bool writes =
          is_hidden || (argument.alias_info() != nullptr && argument.alias_info()->isWrite());
      const auto training = is_hidden ? schema->argumentIndexWithName("training") : std::nullopt;
      tensors.push_back({i, writes, is_index_list(type), training.value_or(-1)});
      has_writes |= writes;
      only_writes &= writes;
      has_out_arguments |= writes && argument.is_out();
    } else if (holds(type, c10::TypeKind::GeneratorType)) {
      generator_argument = i;
    } else if (holds(type, c10::TypeKind::DeviceObjType)) {
      device_arguments.push_back(i);
    }
  }
  for (const auto& value : schema->returns()) {
    const c10::AliasInfo* alias = value.alias_info();
    const ReturnKind kind = kind_of(value.real_type());
    const bool written = alias != nullptr && alias->isWrite();
    returns.push_back({kind, written ? find_written(*schema, *alias) : -1});
    returns_other |= kind == ReturnKind::kOther;
    is_view |= alias != nullptr && !alias->isWrite();
    has_new_outputs |= returns.back().written_argument < 0;
  }
  is_sampler = generator_argument >= 0 && has_writes && only_writes && !has_new_outputs;
  has_cpu_kernel = op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
  is_composite = !op.hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
      op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  has_meta_kernel = op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta);
  runs_at_once = returns_other || (generator_argument >= 0 && !is_sampler) ||
      undescribed().count(op_name.name) > 0;
  host_waits = op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  const std::string base = name.substr(name.find("::") + 2);
  const std::string overloaded = base.substr(0, base.find('.'));
  reads_nothing = starts_with_any(base, {"new_", "resize_", "is_", "set_"}) ||
      (overloaded.size() > 5 && overloaded.rfind("_like") == overloaded.size() - 5);
  is_partial = starts_with_any(
      base, {"index", "_index", "_unsafe_index", "gather", "scatter", "masked_scatter", "put_",
             "take", "embedding"});
}

const OperatorInfo& info_of(const c10::OperatorHandle& op) {
  // Each thread looks up in a map of its own; only a miss takes the lock.
  thread_local ska::flat_hash_map<const void*, const OperatorInfo*> mine;
  const OperatorInfo*& found = mine[&op.schema()];
  // An operator that was unregistered may have left its address to another one.
  if (found == nullptr || !(found->op_name == op.operator_name())) {
    static auto* mutex = new std::mutex();
    static auto* all = new std::unordered_map<std::string, const OperatorInfo*>();
    const std::string key = c10::toString(op.operator_name());
    std::lock_guard<std::mutex> lock(*mutex);
    const OperatorInfo*& shared = (*all)[key];
    if (shared == nullptr || shared->schema != &op.schema()) {
      shared = new OperatorInfo(op);
    }
    found = shared;
  }
  return *found;
}

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
