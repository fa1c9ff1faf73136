// torch defers conjugations, negations and zeros: a tensor's memory has other numbers or none. A call uses copies with
// the values.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <utility>
#include <vector>

namespace parallel_state {

using Targets = std::vector<std::pair<at::Tensor, at::Tensor>>;  // deferred tensors that are written to; their copies

bool is_deferred(const at::Tensor& x);
at::Tensor with_values(const at::Tensor& x);
at::Tensor staged(const at::Tensor& x, Targets* targets);

template <typename Each>
bool is_deferred(const std::vector<Each>& list) {
  for (const Each& each : list) {
    if (is_deferred(each)) return true;
  }
  return false;
}

template <typename Each>
std::vector<Each> with_values(const std::vector<Each>& list) {
  std::vector<Each> found;
  for (const Each& each : list) found.push_back(with_values(each));
  return found;
}

template <typename Each>
std::vector<Each> staged(const std::vector<Each>& list, Targets* targets) {
  std::vector<Each> found;
  for (const Each& each : list) found.push_back(staged(each, targets));
  return found;
}

// Copies the results to `targets` when `work` is done.
c10::intrusive_ptr<c10d::Work> fill_when_done(int rank, c10::intrusive_ptr<c10d::Work> work, Targets targets);

}  // namespace parallel_state
