// torch's threads call this client also while Python exits or another thread holds the interpreter lock: only the main
// thread takes it, after a signal.

#include "control_store.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <pybind11/chrono.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../../control/csrc/store.h"
#include "library.h"

namespace py = pybind11;

namespace parallel_state {
namespace {

using control::StoreCall;
using Value = std::vector<std::uint8_t>;
using Milliseconds = std::chrono::milliseconds;

constexpr double kSliceSeconds = 0.05;
constexpr double kConnectSeconds = 2.0;

class Store : public c10d::Store {
 public:
  struct Facts {
    std::string name;
    std::pair<std::string, int> address;
    std::optional<int> served_by;
    std::string access;
  };

  Store(const std::string& library, std::int64_t client, Facts facts, unsigned long main_thread, Milliseconds timeout)
      : c10d::Store(timeout),
        facts(std::move(facts)),
        library_(library),
        client_(client),
        name_(this->facts.name),
        main_thread_(main_thread) {}

  const Facts facts;

  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::intrusive_ptr<c10d::Store>::unsafe_reclaim_from_nonowning(this);  // requests don't wait for each other
  }
  void set(const std::string& key, const Value& value) override { ask(StoreCall::kSet, {key, text(value)}); }
  Value compareSet(const std::string& key, const Value& expected, const Value& desired) override {
    return value(ask(StoreCall::kCompareSet, {key, text(expected), text(desired)}).at(0));
  }
  Value get(const std::string& key) override { return value(ask(StoreCall::kGet, {key}).at(0)); }
  std::int64_t add(const std::string& key, std::int64_t amount) override {
    return std::stoll(ask(StoreCall::kAdd, {key, std::to_string(amount)}).at(0));
  }
  bool deleteKey(const std::string& key) override { return ask(StoreCall::kDelete, {key}).at(0) == "1"; }
  bool check(const std::vector<std::string>& keys) override { return ask(StoreCall::kCheck, keys).at(0) == "1"; }
  std::int64_t getNumKeys() override { return std::stoll(ask(StoreCall::kCount, {}).at(0)); }
  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys, const Milliseconds& timeout) override {
    ask(StoreCall::kWait, keys, timeout);
  }
  void append(const std::string& key, const Value& more) override { ask(StoreCall::kAppend, {key, text(more)}); }
  std::vector<Value> multiGet(const std::vector<std::string>& keys) override {
    std::vector<Value> values;
    for (const std::string& part : ask(StoreCall::kGet, keys)) values.push_back(value(part));
    return values;
  }
  void multiSet(const std::vector<std::string>& keys, const std::vector<Value>& values) override {
    TORCH_CHECK_VALUE(keys.size() == values.size(), "multi_set needs a value for each key");
    std::vector<std::string> parts;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      parts.push_back(keys[i]);
      parts.push_back(text(values[i]));
    }
    ask(StoreCall::kSet, parts);
  }
  bool hasExtendedApi() const override { return true; }

 private:
  static std::string text(const Value& value) { return {value.begin(), value.end()}; }
  static Value value(const std::string& text) { return {text.begin(), text.end()}; }

  std::vector<std::string> ask(StoreCall call, const std::vector<std::string>& parts) {
    return ask(call, parts, timeout_);
  }

  // Raises DistStoreError for an invalid request or missing keys, DistNetworkError if the server doesn't answer.
  std::vector<std::string> ask(StoreCall call, const std::vector<std::string>& parts, Milliseconds timeout) {
    const std::string content = control::encode_store(static_cast<std::uint8_t>(call), parts);
    TORCH_CHECK_VALUE(content.size() <= control::kMostStoreBytes && parts.size() <= control::kMostParts,
                      "one call to the store must have at most ", control::kMostParts, " keys and values, with ",
                      control::kMostStoreBytes, " bytes in total, but has ", parts.size(), " with ", content.size(),
                      " bytes; send large data through a group");
    const double timeout_s = static_cast<double>(timeout.count()) / 1000;
    const std::chrono::duration<double> own_timeout = timeout_;
    const double connect_s = call == StoreCall::kWait ? std::min(kConnectSeconds, own_timeout.count()) : 0.0;
    const std::int64_t request = library_.store_ask(client_, content.data(), content.size(), timeout_s, connect_s);
    if (request < 0) C10_THROW_ERROR(DistNetworkError, name_ + ": " + std::strerror(static_cast<int>(-request)));
    struct End {
      const Library& library;
      std::int64_t request;
      ~End() { library.store_end(request); }
    } end{library_, request};
    int code = 0;
    while ((code = -library_.store_wait(request, kSliceSeconds)) == EAGAIN) check_signals();
    std::string reply(library_.store_take(request, nullptr, 0), '\0');
    library_.store_take(request, reply.data(), reply.size());
    if (code == ETIME) {
      std::string keys;
      for (std::size_t i = 0; i < parts.size() && i < 8; ++i) keys += (i == 0 ? "" : ", ") + parts[i];
      C10_THROW_ERROR(DistStoreError, "wait timeout after " + std::to_string(timeout.count()) + " ms, keys: " + keys +
                                          (parts.size() > 8 ? ", …" : "") + " (" + name_ + ")");
    }
    if (code == ETIMEDOUT) {
      C10_THROW_ERROR(DistNetworkError, name_ + " did not answer within " + std::to_string(timeout.count()) + " ms");
    }
    if (code != 0) C10_THROW_ERROR(DistNetworkError, name_ + " can't be reached: " + reply);
    std::uint8_t kind = 0;
    std::vector<std::string> answer;
    if (!control::decode_store(reply, &kind, &answer) || (kind != control::kReplied && answer.empty())) {
      C10_THROW_ERROR(DistNetworkError, name_ + " sent a malformed reply");
    }
    if (kind != control::kReplied) C10_THROW_ERROR(DistStoreError, name_ + ": " + answer[0]);
    return answer;
  }

  void check_signals() const {
    if (PyThread_get_thread_ident() != main_thread_ || library_.has_signal() == 0) return;
    if (Py_IsInitialized() == 0) return;
    const py::gil_scoped_acquire lock;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }

  const Library library_;
  const std::int64_t client_;
  const std::string& name_;
  const unsigned long main_thread_;
};

}  // namespace

void add_control_store(py::module_& module) {
  py::class_<Store, c10d::Store, c10::intrusive_ptr<Store>>(module, "Store")
      .def(py::init([](const std::string& library, std::int64_t client, const std::string& name,
                       const std::pair<std::string, int>& address, std::optional<int> served_by,
                       const std::string& access, unsigned long main_thread, std::chrono::milliseconds timeout) {
             return c10::make_intrusive<Store>(library, client, Store::Facts{name, address, served_by, access},
                                               main_thread, timeout);
           }),
           py::arg("library"), py::arg("client"), py::arg("name"), py::arg("address"), py::arg("served_by"),
           py::arg("access"), py::arg("main_thread"), py::arg("timeout"))
      .def_property_readonly("address", [](const Store& self) { return self.facts.address; })
      .def_property_readonly("served_by", [](const Store& self) { return self.facts.served_by; })
      .def_property_readonly("access", [](const Store& self) { return self.facts.access; })
      .def("__str__", [](const Store& self) { return self.facts.name; });
}

}  // namespace parallel_state
