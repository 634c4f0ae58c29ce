// What an operator's results will look like, as its meta kernel tells, without running it.
#pragma once

#include "operators.h"

#include <ATen/core/stack.h>
#include <c10/util/DimVector.h>

namespace vdev {

struct TensorDescription {
  bool defined = false;
  c10::DimVector sizes;
  c10::DimVector strides;
  caffe2::TypeMeta type;
};

// Per return value the tensors in it: one, or those of a list.
using Description = std::vector<std::vector<TensorDescription>>;

// Null if only running the operator can tell, or if running it will tell what is wrong with it.
std::shared_ptr<const Description> describe(
    const c10::OperatorHandle& op, const OperatorInfo& info, at::ArrayRef<c10::IValue> arguments);

}  // namespace vdev
