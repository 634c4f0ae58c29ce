// The frames of Python that a thread is in, and the node of a backward that it runs.
#include <torch/csrc/utils/pybind.h>

#include "places.h"

#include <c10/util/Type.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/function.h>

#include <array>
#include <mutex>

namespace vdev {
namespace {

constexpr size_t kMostFrames = 24;
constexpr int kShownFrames = 5;

// The code is never freed, so that a place can be dropped without the interpreter's lock.
PyCodeObject* kept(PyCodeObject* code) {
  static auto* mutex = new std::mutex();
  static auto* codes = new ska::flat_hash_set<PyCodeObject*>();
  std::lock_guard<std::mutex> lock(*mutex);
  if (codes->insert(code).second) {
    Py_INCREF(code);
  }
  return code;
}

struct Frame {
  PyCodeObject* code;
  int offset;
};

class PythonPlace final : public Place {
 public:
  PythonPlace() {
    if (const auto node = torch::autograd::get_current_node()) {
      const auto& actual = *node;
      node_ = &typeid(actual);
    }
    // A thread of the engine has no state of Python where it runs nodes of C++.
    if (Py_IsInitialized() == 0 || PyGILState_GetThisThreadState() == nullptr) {
      return;
    }
    const pybind11::gil_scoped_acquire gil;
    PyFrameObject* frame = PyEval_GetFrame();
    Py_XINCREF(frame);
    while (frame != nullptr) {
      if (count_ < kMostFrames) {
        PyCodeObject* code = PyFrame_GetCode(frame);
#if PY_VERSION_HEX >= 0x030B0000
        frames_[count_++] = {kept(code), PyFrame_GetLasti(frame)};
#else
        frames_[count_++] = {kept(code), frame->f_lasti * 2};
#endif
        Py_DECREF(code);
      }
      PyFrameObject* outer = count_ < kMostFrames ? PyFrame_GetBack(frame) : nullptr;
      Py_DECREF(frame);
      frame = outer;
    }
  }

  std::string describe() const override {
    std::string text;
    if (node_ != nullptr) {
      text += "\n      in the backward of " + c10::demangle(node_->name());
    }
    if (count_ == 0 || Py_IsInitialized() == 0) {
      return text;
    }
    const pybind11::gil_scoped_acquire gil;
    int shown = 0;
    for (const bool inside : {false, true}) {
      for (size_t i = 0; i < count_ && shown < kShownFrames; ++i) {
        const auto file = text_of(frames_[i].code->co_filename);
        if (inside || file.find("/site-packages/") == std::string::npos) {
          text += "\n      " + file + ":" +
              std::to_string(PyCode_Addr2Line(frames_[i].code, frames_[i].offset)) + " in " +
              text_of(frames_[i].code->co_name);
          ++shown;
        }
      }
      if (shown > 0) {
        break;  // Those of installed packages are shown where there are no others.
      }
    }
    return text;
  }

 private:
  static std::string text_of(PyObject* string) {
    const char* text = PyUnicode_AsUTF8(string);
    return text == nullptr ? "?" : text;
  }

  const std::type_info* node_ = nullptr;
  size_t count_ = 0;
  std::array<Frame, kMostFrames> frames_;
};

}  // namespace

std::shared_ptr<const Place> Place::here() {
  return std::make_shared<const PythonPlace>();
}

}  // namespace vdev
