#pragma once

#include "backend.h"

#ifdef C10D_BACKEND_HAS_WINDOW

namespace parallel_state {

class Window final : public c10d::Window {
 public:
  using Started = Backend::Started;

  Window(c10::intrusive_ptr<Backend> backend, std::shared_ptr<const Library> library, std::uint64_t group)
      : backend_(std::move(backend)), library_(std::move(library)), group_(group) {}

  // A tensor that the host's ranks don't map is copied: puts write to the copy, and `get_attr` returns SEPARATE.
  void tensor_register(const at::Tensor& tensor, bool owning) override;
  void tensor_deregister() override;
  Started put(const at::Tensor& tensor, std::int64_t dst, std::int64_t first_element, bool is_async,
              const c10d::PutOptions& options) override;
  at::Tensor map_remote_tensor(std::int64_t rank) override;
  Started signal(std::int64_t peer, bool is_async, const c10d::SignalOptions& options) override;
  Started wait_signal(std::int64_t peer, bool is_async, const c10d::WaitSignalOptions& options) override;
  c10d::WindowAttr get_attr(std::int64_t peer) override;

 private:
  class Signalled;
  template <typename Options>
  void check(const char* method, const Options& options);
  void check(const char* method);
  // Without the interpreter's lock.
  int take(int src, double timeout_s);
  void done(int status, const char* method, std::int64_t rank, Clock::time_point started, double timeout_s = 0);

  const c10::intrusive_ptr<Backend> backend_;
  const std::shared_ptr<const Library> library_;
  const std::uint64_t group_;
  std::shared_ptr<void> opened_;
  std::vector<std::int64_t> parts_;
  at::Tensor tensor_;
};

}  // namespace parallel_state

#endif  // C10D_BACKEND_HAS_WINDOW
