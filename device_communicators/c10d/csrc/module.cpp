#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <cstring>

#include "../../cpu/csrc/signals.h"
#include "control_store.h"
#include "reconfigurable.h"

namespace py = pybind11;

namespace parallel_state {
namespace {

// Carries a Python exception through C++, where torch catches it as a DistBackendError.
class PythonError : public c10::DistBackendError {
 public:
  PythonError(const std::string& text, PyObject* error)
      : c10::DistBackendError(text, nullptr, nullptr), error_(error, release) {}
  PyObject* get() const { return error_.get(); }

 private:
  static void release(PyObject* error) {
    if (Py_IsInitialized() == 0) return;
    const py::gil_scoped_acquire gil;
    Py_DECREF(error);
  }
  std::shared_ptr<PyObject> error_;
};

bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

std::exception_ptr python_error(const char* otherwise, const std::function<py::object()>& make) {
  if (Py_IsInitialized() == 0 || is_finalizing()) {
    return std::make_exception_ptr(c10::DistBackendError(otherwise, nullptr, nullptr));
  }
  const py::gil_scoped_acquire gil;
  py::object error;
  try {
    error = make();
  } catch (py::error_already_set& raised) {
    error = raised.value();
  }
  if (error.is_none()) return nullptr;
  const std::string text = py::str(error);
  return std::make_exception_ptr(PythonError(text, error.release().ptr()));
}

// Never releases the object once the interpreter ends.
std::shared_ptr<py::object> held(py::object object) {
  return std::shared_ptr<py::object>(new py::object(std::move(object)), [](py::object* last) {
    if (Py_IsInitialized() == 0 || is_finalizing()) return;
    const py::gil_scoped_acquire gil;
    delete last;
  });
}

struct Method {
  std::shared_ptr<py::object> owner;
  const char* name;

  template <typename Result, typename... Arguments>
  operator std::function<Result(Arguments...)>() const {
    return [owner = owner, name = name](Arguments... arguments) {
      const py::gil_scoped_acquire gil;
      return owner->attr(name)(arguments...).template cast<Result>();
    };
  }
};

// A method that returns an error.
struct ErrorMethod {
  std::shared_ptr<py::object> owner;
  const char* name;
  const char* otherwise;

  template <typename... Arguments>
  operator std::function<std::exception_ptr(Arguments...)>() const {
    return [owner = owner, name = name, otherwise = otherwise](Arguments... arguments) {
      return python_error(otherwise, [&] { return owner->attr(name)(arguments...); });
    };
  }
};

// Called while objects end: ignores exceptions.
std::function<void()> last_method(const std::shared_ptr<py::object>& owner, const char* name) {
  return [owner, name] {
    if (Py_IsInitialized() == 0 || is_finalizing()) return;
    const py::gil_scoped_acquire gil;
    try {
      owner->attr(name)();
    } catch (py::error_already_set& raised) {
      raised.discard_as_unraisable(name);
    }
  };
}

Callbacks callbacks_of(const py::object& python) {
  const std::shared_ptr<py::object> owner = held(python);
  Callbacks made;
  made.collective_error = ErrorMethod{owner, "collective_error", "a collective failed"};
  made.window_error = ErrorMethod{owner, "window_error", "a call of a window failed"};
  made.pair_error = [owner](const TransferFailure& failure) {
    std::vector<std::int64_t> words(sizeof failure / sizeof(std::int64_t));
    std::memcpy(words.data(), &failure, sizeof failure);
    return python_error("a transfer failed", [&] { return owner->attr("transfer_error")(py::cast(words)); });
  };
  const auto main_thread = py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>();
  const auto* const signals = reinterpret_cast<const SignalPipe*>(owner->attr("signal_pipe").cast<std::uintptr_t>());
  made.interruption = [main_thread, signals]() -> std::exception_ptr {
    if (PyThread_get_thread_ident() != main_thread) return nullptr;
    if (signals != nullptr && !has_signal(*signals)) return nullptr;
    return python_error("interrupted", []() -> py::object {
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      return py::none();
    });
  };
  made.usage_error = [owner](const std::string& text, bool is_forked) {
    return python_error(text.c_str(), [&] { return owner->attr("usage_error")(text, is_forked); });
  };
  made.monitored_barrier = Method{owner, "monitored_barrier"};
  made.failed = ErrorMethod{owner, "failed", "the group failed earlier"};
  made.leave = last_method(owner, "leave");
  python.attr("note_failure") =
      py::cpp_function([error = made.error](int type) { *error = static_cast<c10d::ErrorType>(type); });
  made.gloo_error = [owner](const char* text, const char* method, int peer, double elapsed_s) {
    return python_error(text, [&] { return owner->attr("gloo_error")(text, method, peer, elapsed_s); });
  };
  made.set_timeout = Method{owner, "set_timeout"};
  made.suspend = Method{owner, "suspend"};
  made.resume = Method{owner, "resume"};
  made.memory_stats = Method{owner, "memory_stats"};
  made.group_of_one = Method{owner, "group_of_one"};
  made.without_interpreter = [](const std::function<void()>& run) {
    if (Py_IsInitialized() == 0 || is_finalizing() || PyGILState_Check() == 0) return run();
    const py::gil_scoped_release released;
    run();
  };
  made.make_gloo = Method{owner, "make_gloo"};
  made.split = Method{owner, "split"};
  made.merge = Method{owner, "merge"};
  made.shrink = Method{owner, "shrink"};
  return made;
}

c10::intrusive_ptr<Backend> make(int rank, int size, const std::string& name, std::vector<std::uint64_t> global_ranks,
                                 const std::string& library, std::uint64_t group, std::uintptr_t transfers,
                                 std::chrono::milliseconds timeout, const py::object& python) {
  const auto loaded = library.empty() ? nullptr : std::make_shared<const Library>(library);
  c10::intrusive_ptr<Backend> made = c10::make_intrusive<Backend>(
      rank, size, loaded, group, reinterpret_cast<void*>(transfers), timeout, callbacks_of(python));
  made->options()->group_name = name;
  made->options()->global_ranks_in_group = std::move(global_ranks);
  made->options()->apply_timeout = [weak = c10::weak_intrusive_ptr<Backend>(made)](std::chrono::milliseconds timeout) {
    if (const auto backend = weak.lock()) backend->setTimeout(timeout);
  };
  python.attr("logged_calls") = py::cpp_function([calls = made->calls()] {
    py::list found;
    for (const CallLog::Entry& entry : calls->entries()) {
      py::object dtype = py::none();
      if (entry.dtype >= 0) dtype = py::cast(static_cast<at::ScalarType>(entry.dtype));
      const std::vector<std::int64_t> sizes(entry.sizes.begin(), entry.sizes.end());
      found.append(py::make_tuple(entry.sequence, entry.method, dtype, py::tuple(py::cast(sizes)), entry.began_s,
                                  entry.ended_s, entry.peer));
    }
    return found;
  });
  // The Python object of a backend ends with its last user in Python, the backend with its process group.
  python.attr("shut_down") = py::cpp_function(
      [weak = c10::weak_intrusive_ptr<Backend>(made)] {
        if (const auto backend = weak.lock()) backend->shutdown();
      },
      py::call_guard<py::gil_scoped_release>());
  return made;
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE
ReconfigurableBackend::Membership membership_of(const py::object& python) {
  const std::shared_ptr<py::object> owner = held(python);
  ReconfigurableBackend::Membership made;
  made.handle = Method{owner, "handle"};
  made.reconfigure = [owner](const c10d::ReconfigureOptions& options) {
    const py::gil_scoped_acquire gil;
    const bool is_ordered = std::holds_alternative<ReconfigurableBackend::Handles>(options.handles);
    const py::object handles = std::visit([](const auto& each) { return py::cast(each); }, options.handles);
    return owner->attr("reconfigure")(options.uuid, handles, is_ordered, options.timeout, options.hints)
        .cast<ReconfigurableBackend::Group>();
  };
  made.no_group = ErrorMethod{owner, "no_group", "the group was not made yet"};
  made.revoke = last_method(owner, "revoke");
  made.close = last_method(owner, "close");
  return made;
}

c10::intrusive_ptr<ReconfigurableBackend> make_reconfigurable(int rank, int size, const std::string& name,
                                                              std::chrono::milliseconds timeout,
                                                              const py::object& python) {
  auto made = c10::make_intrusive<ReconfigurableBackend>(rank, size, timeout, membership_of(python));
  const c10::weak_intrusive_ptr<ReconfigurableBackend> weak(made);
  made->options()->group_name = name;
  made->options()->enable_reconfigure = true;
  made->options()->apply_timeout = [weak](std::chrono::milliseconds timeout) {
    if (const auto backend = weak.lock()) backend->setTimeout(timeout);
  };
  python.attr("end_group") = py::cpp_function(
      [weak] {
        if (const auto backend = weak.lock()) backend->end_group();
      },
      py::call_guard<py::gil_scoped_release>());
  return made;
}
#endif  // C10D_BACKEND_HAS_RECONFIGURE

// Checks torch's build before types are registered, which works only once: torch and a module for another build would
// call each other's virtual functions.
class FirstCall final : public c10d::Backend {
 public:
  static void check() {
    const auto made = c10::make_intrusive<FirstCall>();
    const py::object backend = py::cast(c10::intrusive_ptr<c10d::Backend>(made));
    const py::object x = py::module_::import("torch").attr("ones")(py::make_tuple(2, 3));
    const py::object options = py::module_::import("torch._C._distributed_c10d").attr("AllreduceOptions")();
    options.attr("timeout") = std::chrono::milliseconds(7);
    py::list tensors;
    tensors.append(x);
    backend.attr("allreduce")(tensors, options);
    const bool is_right = backend.attr("rank")().cast<int>() == 1 && backend.attr("size")().cast<int>() == 5 &&
                          backend.attr("name")().cast<std::string>() == "first call" &&
                          x.attr("sum")().attr("item")().cast<double>() == 30 && made->is_called_right_;
    if (!is_right) throw std::runtime_error("its first call gave a wrong result: it was compiled for another torch");
  }

  FirstCall() : Backend(/*rank=*/1, /*size=*/5) {}
  const std::string getBackendName() const override { return "first call"; }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    at::Tensor& x = tensors.at(0);
    is_called_right_ = x.sizes() == at::IntArrayRef({2, 3}) && x.scalar_type() == at::kFloat &&
                       options.timeout == std::chrono::milliseconds(7);
    if (is_called_right_) {
      for (int i = 0; i < 6; ++i) x.data_ptr<float>()[i] = static_cast<float>(getSize());
    }
    return nullptr;
  }

 private:
  bool is_called_right_ = false;
};

}  // namespace
}  // namespace parallel_state

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using parallel_state::Backend;
  py::module_::import("torch._C._distributed_c10d");
  parallel_state::FirstCall::check();
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const parallel_state::PythonError& raised) {
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.get())), raised.get());
    }
  });
  module.def("extend_deadlines", [](double seconds) {
    Backend::extended_ms.store(static_cast<std::int64_t>(1e3 * seconds), std::memory_order_relaxed);
  });
  using Options = Backend::Options;
  py::class_<Options, c10d::Backend::Options, c10::intrusive_ptr<Options>>(module, "Options")
      .def_property(
          "_timeout", [](const Options& self) { return self.timeout; },
          [](Options& self, std::chrono::milliseconds timeout) {
            self.timeout = timeout;
            if (self.apply_timeout) self.apply_timeout(timeout);
          })
      .def("__copy__", &Options::clone)
      .def("__deepcopy__", [](const Options& self, const py::dict&) { return self.clone(); });
  py::class_<Backend, c10d::Backend, c10::intrusive_ptr<Backend>>(module, "Backend")
      .def_property_readonly("options", &Backend::options)
      .def("_set_default_timeout", &Backend::setTimeout, py::arg("timeout"), py::call_guard<py::gil_scoped_release>())
      .def("suspend", &Backend::suspend, py::call_guard<py::gil_scoped_release>())
      .def("resume", &Backend::resume, py::call_guard<py::gil_scoped_release>())
      .def("memory_stats", &Backend::getMemoryStats, py::call_guard<py::gil_scoped_release>())
      .def("shutdown", &Backend::shutdown, py::call_guard<py::gil_scoped_release>())
      .def("abort", &Backend::abort, py::call_guard<py::gil_scoped_release>());
  module.def("make", &parallel_state::make, py::arg("rank"), py::arg("size"), py::arg("name"), py::arg("global_ranks"),
             py::arg("library"), py::arg("group"), py::arg("transfers"), py::arg("timeout"), py::arg("python"));
  module.def("wait_for_failure_hooks", &parallel_state::Hooks::wait_for_failed, py::arg("limit"),
             py::call_guard<py::gil_scoped_release>());
  parallel_state::add_control_store(module);
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  using Reconfigurable = parallel_state::ReconfigurableBackend;
  py::class_<Reconfigurable, c10d::Backend, c10::intrusive_ptr<Reconfigurable>>(module, "ReconfigurableBackend")
      .def_property_readonly("options", &Reconfigurable::options)
      .def("_set_default_timeout", &Reconfigurable::setTimeout, py::arg("timeout"),
           py::call_guard<py::gil_scoped_release>())
      .def("shutdown", &Reconfigurable::shutdown, py::call_guard<py::gil_scoped_release>())
      .def("abort", &Reconfigurable::abort, py::call_guard<py::gil_scoped_release>());
  module.def("make_reconfigurable", &parallel_state::make_reconfigurable, py::arg("rank"), py::arg("size"),
             py::arg("name"), py::arg("timeout"), py::arg("python"));
#endif
}
