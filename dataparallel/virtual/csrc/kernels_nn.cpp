// Operators that torch calls by another name on an accelerator than on the CPU.
#include "fallback.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/TensorBody.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>

#include <tuple>

namespace vdev {
namespace {

c10::OperatorHandle find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

void convolution(const c10::OperatorHandle& /*op*/, torch::jit::Stack* stack) {
  static const auto* op = new c10::OperatorHandle(find_operator("aten::convolution"));
  OperatorCall(*op, *stack).run();
}

void convolution_backward(const c10::OperatorHandle& /*op*/, torch::jit::Stack* stack) {
  static const auto* op = new c10::OperatorHandle(find_operator("aten::convolution_backward"));
  constexpr size_t kArguments = 10;
  constexpr size_t kGradOutput = 0;
  constexpr size_t kTransposed = 6;
  constexpr size_t kGroups = 8;
  constexpr size_t kWeight = 2;
  const auto first = stack->end() - static_cast<std::ptrdiff_t>(kArguments);
  const at::Tensor weight = first[kWeight].toTensor();
  // The CPU's operator also gets the size of the bias: one element per output channel.
  const bool transposed = first[kTransposed].toBool();
  const int64_t channels =
      transposed ? weight.size(1) * first[kGroups].toInt() : weight.size(0);
  const bool batched = first[kGradOutput].toTensor().dim() == weight.dim();
  TORCH_CHECK(batched, "the gradient of a convolution needs a batch dimension");
  stack->insert(first + 3, c10::IValue(std::vector<int64_t>{channels}));
  OperatorCall(*op, *stack).run();
}

// The noise is drawn as dropout on the CPU draws it: one seed gives one mask on both.
std::tuple<at::Tensor, at::Tensor> native_dropout(
    const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) {
    return {input.clone(), at::empty_like(input, input.options().dtype(at::kBool)).fill_(true)};
  }
  if (p >= 1) {
    return {input * 0, at::empty_like(input, input.options().dtype(at::kBool)).fill_(false)};
  }
  at::Tensor noise = at::empty_like(input).bernoulli_(1 - p);
  at::Tensor mask = noise.to(at::kBool);
  noise.div_(1 - p);
  return {input * noise, mask};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& cx,
    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  at::Tensor gates = input_gates + hidden_gates;
  if (input_bias.has_value() && input_bias->defined()) {
    gates = gates + *input_bias + *hidden_bias;
  }
  const auto parts = gates.chunk(4, 1);
  const at::Tensor in = parts[0].sigmoid();
  const at::Tensor forget = parts[1].sigmoid();
  const at::Tensor cell = parts[2].tanh();
  const at::Tensor out = parts[3].sigmoid();
  const at::Tensor cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(
    const std::optional<at::Tensor>& grad_hy, const std::optional<at::Tensor>& grad_cy,
    const at::Tensor& cx, const at::Tensor& cy, const at::Tensor& workspace, bool has_bias) {
  const bool from_hy = grad_hy.has_value() && grad_hy->defined();
  const bool from_cy = grad_cy.has_value() && grad_cy->defined();
  if (!from_hy && !from_cy) {
    return {};
  }
  const auto parts = workspace.chunk(4, 1);
  const at::Tensor& in = parts[0];
  const at::Tensor& forget = parts[1];
  const at::Tensor& cell = parts[2];
  const at::Tensor& out = parts[3];
  const at::Tensor tanh_cy = cy.tanh();
  const at::Tensor grad_h = from_hy ? *grad_hy : at::empty_like(cy).zero_();
  at::Tensor grad_c = grad_h * out * (1 - tanh_cy * tanh_cy);
  if (from_cy) {
    grad_c = grad_c + *grad_cy;
  }
  const at::Tensor grad_gates = at::cat(
      {grad_c * cell * in * (1 - in), grad_c * cx * forget * (1 - forget),
       grad_c * in * (1 - cell * cell), grad_h * tanh_cy * out * (1 - out)},
      1);
  return {grad_gates, grad_c * forget, has_bias ? grad_gates.sum(0) : at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& hx,
    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  const bool biased = input_bias.has_value() && input_bias->defined();
  const auto from_input = (biased ? input_gates + *input_bias : input_gates).chunk(3, 1);
  const auto from_hidden = (biased ? hidden_gates + *hidden_bias : hidden_gates).chunk(3, 1);
  const at::Tensor reset = (from_input[0] + from_hidden[0]).sigmoid();
  const at::Tensor update = (from_input[1] + from_hidden[1]).sigmoid();
  const at::Tensor fresh = (from_input[2] + reset * from_hidden[2]).tanh();
  return {
      (hx - fresh) * update + fresh,
      at::cat({reset, update, fresh, hx, from_hidden[2]}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(
    const at::Tensor& grad_hy, const at::Tensor& workspace, bool has_bias) {
  const auto parts = workspace.chunk(5, 1);
  const at::Tensor& reset = parts[0];
  const at::Tensor& update = parts[1];
  const at::Tensor& fresh = parts[2];
  const at::Tensor& hx = parts[3];
  const at::Tensor& from_hidden = parts[4];
  const at::Tensor grad_update = grad_hy * (hx - fresh) * (1 - update) * update;
  const at::Tensor grad_fresh = grad_hy * (1 - update) * (1 - fresh * fresh);
  const at::Tensor grad_reset = grad_fresh * from_hidden * (1 - reset) * reset;
  const at::Tensor grad_input = at::cat({grad_reset, grad_update, grad_fresh}, 1);
  const at::Tensor grad_hidden = at::cat({grad_reset, grad_update, grad_fresh * reset}, 1);
  return {
      grad_input, grad_hidden, grad_hy * update, has_bias ? grad_input.sum(0) : at::Tensor(),
      has_bias ? grad_hidden.sum(0) : at::Tensor()};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl(
      "convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl(
      "convolution_backward_overrideable",
      torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  m.impl("native_dropout", &native_dropout);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
}

}  // namespace
}  // namespace vdev
