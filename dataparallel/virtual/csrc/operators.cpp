#include "operators.h"

#include <ATen/core/jit_type.h>
#include <c10/util/flat_hash_map.h>

#include <mutex>
#include <unordered_set>

namespace vdev {
namespace {

// Their meta kernels do not describe what their CPU kernels return.
const std::unordered_set<std::string>& undescribed() {
  static const auto* names = new std::unordered_set<std::string>{
      "aten::_embedding_bag", "aten::_embedding_bag_forward_only"};
  return *names;
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

int find_written(const c10::FunctionSchema& schema, const c10::AliasInfo& alias) {
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::AliasInfo* own = schema.arguments()[i].alias_info();
    if (own != nullptr && own->isWrite() && own->beforeSets() == alias.beforeSets()) {
      return static_cast<int>(i);
    }
  }
  return -1;
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
      const bool writes = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
      tensors.push_back({i, writes, is_index_list(type)});
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
  has_meta_kernel = op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta);
  runs_at_once = returns_other || (generator_argument >= 0 && !is_sampler) ||
      undescribed().count(op_name.name) > 0;
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

}  // namespace vdev
