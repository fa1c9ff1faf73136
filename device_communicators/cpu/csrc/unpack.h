// Builds the Python object and the tensors of a message from its head, which comes from a peer: all of it is checked.
// What `Packer` doesn't write is left to Python's codec. The caller holds the GIL; no Python code runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pack.h"

namespace parallel_state {

// Returns a borrowed reference; null with or without a Python error.
class Tensors {
 public:
  virtual ~Tensors() = default;
  // `key`: of the tensor in an outermost dict; else null.
  virtual void* at(std::size_t index, void* key) = 0;
};

class Unpacker {
 public:
  // The head must outlive this. False if it is left to Python: tensors of devices or of other than `tensor_bytes`, or
  // slices for another number of ranks.
  bool read(const Python& python, const char* head, std::uint64_t bytes, std::uint64_t tensor_bytes,
            std::uint64_t slices);

  std::size_t count() const { return tensors_.size(); }
  // As sent: flat, and a part if sliced. This object owns the sizes.
  TensorForm form(std::size_t index) const;
  bool is_cut(std::size_t index) const { return tensors_[index].cut; }
  const std::vector<std::int64_t>& sizes(std::size_t index) const { return tensors_[index].sizes; }

  // A new reference. Null, without a Python error, if it is left to Python.
  void* build(Tensors& tensors);

 private:
  struct Tensor {
    std::int64_t dtype;
    std::vector<std::int64_t> sizes;
    std::uint64_t bytes;
    bool cut = false;
    std::int64_t slice = 0;
  };

  bool read_table(std::uint64_t count);
  bool read_tensor(std::uint64_t* claimed_bytes);
  bool number(int bytes, std::uint64_t* found);
  bool unsigned_number(std::uint64_t* found);
  bool size_of(std::uint8_t tag, std::uint8_t few_tag, std::uint8_t few, std::uint8_t tag_16, std::uint64_t* size);
  bool short_text(const char** text, std::size_t* bytes);
  void* value(int depth, void* key);
  void* text(std::uint64_t bytes);
  void* bytes(std::uint64_t bytes);
  void* list(std::uint64_t size, int depth);
  void* dict(std::uint64_t size, int depth);
  void* tensor(void* key);

  const Python* python_ = nullptr;
  Tensors* found_ = nullptr;
  const std::uint8_t* at_ = nullptr;
  const std::uint8_t* end_ = nullptr;
  const std::uint8_t* body_ = nullptr;
  const std::uint8_t* body_end_ = nullptr;
  std::uint64_t items_left_ = 0;  // each item takes a byte at least
  std::vector<Tensor> tensors_;
};

}  // namespace parallel_state
