// The facts about an operator that the fallback needs, worked out once for each; and a description
// of its results, from its meta kernel, without running it.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/DimVector.h>

#include <string>
#include <vector>

namespace vdev {

struct TensorArgument {
  int index;
  bool writes;
  bool may_be_on_host;  // Index tensors may stay on the CPU, as they may on a GPU.
  int written_if;  // The argument without which it is only read; -1 for none.
};

enum class ReturnKind { kTensor, kTensorList, kOther };

struct ReturnValue {
  ReturnKind kind;
  int written_argument;  // The argument it returns; -1 for a new value.
};

struct OperatorInfo {
  explicit OperatorInfo(const c10::OperatorHandle& op);

  const c10::FunctionSchema* schema;
  c10::OperatorName op_name;
  std::string name;
  int num_arguments;
  std::vector<TensorArgument> tensors;
  std::vector<int> device_arguments;
  std::vector<ReturnValue> returns;
  int generator_argument = -1;
  bool has_writes = false;
  bool has_new_outputs = false;
  bool has_out_arguments = false;
  bool returns_other = false;
  bool is_view = false;
  bool is_composite = false;  // Other operators do its work.
  bool is_sampler = false;  // Draws random numbers that depend on no tensor's contents.
  bool has_cpu_kernel = false;
  bool has_meta_kernel = false;
  bool runs_at_once = false;
  // Its result has a size, or is a number, that the host has to wait for.
  bool host_waits = false;
  // It looks at shapes only.
  bool reads_nothing = false;
  // Values choose which elements it reads or writes.
  bool is_partial = false;
};

const OperatorInfo& info_of(const c10::OperatorHandle& op);

struct TensorDescription {
  bool defined = false;
  c10::DimVector sizes;
  c10::DimVector strides;
  caffe2::TypeMeta type;
};

// For each return value the tensors in it: one, or those of a list.
using Description = std::vector<std::vector<TensorDescription>>;

// Describe the results; null if only running the operator tells them, or what is wrong with it.
std::shared_ptr<const Description> describe(
    const c10::OperatorHandle& op, const OperatorInfo& info, at::ArrayRef<c10::IValue> arguments);

}  // namespace vdev
