// The extension as Python sees it; distributed_autograd/extension.py has the types.
#include <pybind11/functional.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "context.h"
#include "pass.h"

namespace dataparallel {

std::string describe(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (python_error& caught) {
    const pybind11::gil_scoped_acquire gil;
    const auto borrow = [](PyObject* object) -> pybind11::object {
      return object ? pybind11::reinterpret_borrow<pybind11::object>(object) : pybind11::none();
    };
    try {
      auto lines = pybind11::module_::import("traceback").attr("format_exception")(
          borrow(caught.type), borrow(caught.value), borrow(caught.traceback));
      // Text that cannot be encoded, as some file names cannot, must not stop the report.
      auto text = pybind11::str("").attr("join")(lines).attr("encode")("utf-8", "backslashreplace");
      return text.cast<std::string>();
    } catch (const std::exception&) {
      return caught.what();
    }
  } catch (const c10::Error& caught) {
    return caught.what_without_backtrace();
  } catch (const std::exception& caught) {
    return caught.what();
  }
}

} // namespace dataparallel

namespace py = pybind11;
using namespace dataparallel;

// No thread may hold the interpreter while it waits for our locks: nodes and tensors may want it.
using NoGil = py::call_guard<py::gil_scoped_release>;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  // Translate errors of torch, and of Python code below it, as torch does elsewhere.
  py::register_local_exception_translator([](std::exception_ptr error) {
    if (error) {
      torch::translate_exception_to_python(error);
    }
  });

  py::class_<Pass, std::shared_ptr<Pass>>(module, "Pass")
      .def("wait", &Pass::wait, NoGil())
      .def("missing", &Pass::missing, NoGil())
      .def("failed_worker", &Pass::failed_worker, NoGil())
      .def("fail", [](Pass& pass, const std::string& text) { pass.fail(text); }, NoGil())
      .def("context", &Pass::context)
      .def(
          "describe_error",
          [](const Pass& pass) { return pass.error() ? describe(pass.error()) : std::string(); },
          NoGil())
      .def("raise_error", [](const Pass& pass) {
        std::exception_ptr error;
        {
          const py::gil_scoped_release release;
          error = pass.error();
        }
        if (error) {
          std::rethrow_exception(error);
        }
      });

  py::class_<Context, std::shared_ptr<Context>>(module, "Context")
      .def("id", &Context::id)
      .def("send", &Context::send, NoGil())
      .def("receive", &Context::receive, NoGil())
      .def("reached_by", &Context::reached_by, NoGil())
      .def("start", &Context::start, NoGil())
      .def("gradients", &Context::gradients, NoGil())
      .def(
          "gradient",
          [](const Context& context, const at::Tensor& variable) -> std::optional<at::Tensor> {
            auto gradient = context.gradient(variable);
            return gradient.defined() ? std::optional<at::Tensor>(gradient) : std::nullopt;
          },
          NoGil())
      .def(
          "set_gradient",
          [](Context& context, const at::Tensor& variable, std::optional<at::Tensor> gradient) {
            context.set_gradient(variable, gradient.value_or(at::Tensor()));
          },
          NoGil())
      .def("released", &Context::released)
      .def(
          "learn",
          [](Context& context, const std::vector<int64_t>& news, WorkerId from) {
            context.knowledge().learn(news, from);
          },
          NoGil())
      .def(
          "origins",
          [](Context& context, PartId part) { return context.knowledge().origins(part); },
          NoGil())
      .def(
          "close",
          [](Context& context, const std::vector<PartId>& start) {
            std::vector<PartId> live;
            std::vector<PartId> unknown;
            context.knowledge().close(start, live, unknown);
            return std::make_pair(std::move(live), std::move(unknown));
          },
          NoGil());

  py::class_<Worker, std::shared_ptr<Worker>>(module, "Worker")
      .def(py::init<std::string, WorkerId>())
      .def("name", &Worker::name)
      .def("id", &Worker::id)
      .def("new_context", &Worker::new_context, NoGil())
      .def("obtain", &Worker::obtain, NoGil())
      .def("find", &Worker::find, NoGil())
      .def(
          "release",
          [](Worker& worker, ContextId id, double timeout) { worker.release(id, timeout); },
          NoGil())
      .def("debug_info", &Worker::debug_info, NoGil());

  module.def("wait_for_threads", &wait_for_threads, NoGil());
  module.def("set_process_worker", &set_process_worker, NoGil());
  module.def("current_pass", &Pass::current, NoGil());
  module.def("maker", &maker);
}
