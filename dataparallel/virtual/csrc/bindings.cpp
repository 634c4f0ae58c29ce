// The extension as Python sees it.
#include <torch/csrc/Generator.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/utils/pybind.h>

#include "hooks.h"
#include "memory.h"
#include "schedule.h"

#include <map>

namespace py = pybind11;

namespace vdev {
namespace {

const std::array<const char*, kNumCounters> kCounterNames{
    "kernels",
    "copies_host_to_device",
    "bytes_host_to_device",
    "copies_device_to_host",
    "bytes_device_to_host",
    "copies_device_to_device",
    "bytes_device_to_device",
    "allocations",
    "allocated_bytes",
    "host_waits",
};

std::map<std::string, int64_t> read_counters(int device) {
  std::map<std::string, int64_t> result;
  for (int which = 0; which < kNumCounters; ++which) {
    auto& total = result[kCounterNames[static_cast<size_t>(which)]];
    for (int index = 0; index < device_count(); ++index) {
      if (device == -1 || device == index) {
        total += counters(static_cast<c10::DeviceIndex>(index))
                     .values[static_cast<size_t>(which)]
                     .load();
      }
    }
  }
  return result;
}

void reset_counters(int device) {
  for (int index = 0; index < device_count(); ++index) {
    if (device == -1 || device == index) {
      for (auto& value : counters(static_cast<c10::DeviceIndex>(index)).values) {
        value.store(0);
      }
      for (int to = 0; to < device_count(); ++to) {
        route(static_cast<c10::DeviceIndex>(index), static_cast<c10::DeviceIndex>(to)).store(0);
      }
    }
  }
}

std::map<std::pair<int, int>, int64_t> read_routes() {
  std::map<std::pair<int, int>, int64_t> result;
  for (int from = 0; from < device_count(); ++from) {
    for (int to = 0; to < device_count(); ++to) {
      const int64_t bytes =
          route(static_cast<c10::DeviceIndex>(from), static_cast<c10::DeviceIndex>(to)).load();
      if (bytes != 0) {
        result[{from, to}] = bytes;
      }
    }
  }
  return result;
}

py::list default_generators() {
  py::list result;
  for (int index = 0; index < device_count(); ++index) {
    result.append(py::reinterpret_steal<py::object>(
        THPGenerator_initDefaultGenerator(default_generator(static_cast<c10::DeviceIndex>(index)))));
  }
  return result;
}

// The first backward makes the pool, together with a thread for each device that there is then.
struct Engine : torch::autograd::Engine {
  static bool has_pool(torch::autograd::Engine& engine) {
    return engine.*(&Engine::thread_pool_shared_) != nullptr;
  }
};

bool autograd_has_started() {
  return Engine::has_pool(torch::autograd::Engine::get_default_engine());
}

void initialize(int count) {
  set_device_count(count);
  watch_for_fork();
  register_hooks();
  register_cpu_kernels();
}

py::list entries_of(const std::vector<Note>& notes) {
  py::list result;
  for (const Note& note : notes) {
    result.append(py::make_tuple(
        note.kind, note.name, note.device, note.stream, note.read, note.written, note.flops,
        note.source, note.destination, note.id, note.replayed, note.thread, note.seconds));
  }
  return result;
}

}  // namespace

// No function relies on the interpreter's lock: docs/free_threading.md says what guards each state.
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m, py::mod_gil_not_used()) {
  m.def("autograd_has_started", &autograd_has_started);
  m.def("initialize", &initialize);
  m.def("device_count", [] { return static_cast<int>(device_count()); });
  m.def("strict", &strict);
  m.def("set_strict", &set_strict);
  m.def("checks_races", &checks_races);
  m.def("set_checks_races", &set_checks_races);
  m.def("raise_late", &raise_late);
  m.def("set_schedule", &set_schedule);
  m.def("in_forked_child", &in_forked_child);
  m.def("counters", &read_counters);
  m.def("reset_counters", &reset_counters);
  m.def("routes", &read_routes);
  m.def("is_dry", &is_dry);
  m.def("set_dry", &set_dry);
  m.def("begin_trace", &begin_trace);
  m.def("end_trace", [] { return entries_of(end_trace()); });
  m.def("trace_length", &trace_length);
  m.def("mark", &note_mark);
  m.def("is_capturing", [](int device) {
    return current_stream(static_cast<c10::DeviceIndex>(device)).capturing();
  });
  py::class_<Graph>(m, "Graph")
      .def(py::init<>())
      .def("begin", [](Graph& graph, int device, int64_t stream) {
        graph.begin(stream_at(static_cast<c10::DeviceIndex>(device), stream));
      })
      .def("end", &Graph::end)
      .def("replay", &Graph::replay);
  m.def("default_generators", &default_generators);
  m.def("pending_on_stream", [](int device, int64_t stream) {
    return stream_at(static_cast<c10::DeviceIndex>(device), stream).pending();
  });
  m.def("pending_on_device", [](int device) {
    return pending_on_device(static_cast<c10::DeviceIndex>(device));
  });
  m.def("memory_info", [](int device) {
    return memory_info(static_cast<c10::DeviceIndex>(device));
  });
  m.def("set_memory_limit", [](int device, std::optional<int64_t> bytes) {
    set_memory_limit(static_cast<c10::DeviceIndex>(device), bytes);
  });
}

}  // namespace vdev
