// Builds the Python object of a message, and the tensors that its bytes go to, from the message's head: the reverse of
// pack.h, whose format it is.
//
// A head is a peer's bytes: all of it is checked. What `Packer` doesn't make is left to the codec in Python, which
// reads more types and says what is wrong. The caller holds the GIL, and nothing here runs Python code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pack.h"

namespace parallel_state {

// Tensors of a message, by their index in its head. A borrowed reference; null with or without an error of Python's.
class Tensors {
 public:
  virtual ~Tensors() = default;
  // `key`: where the tensor stands in a dict that is the whole object; else null.
  virtual void* at(std::size_t index, void* key) = 0;
};

class Unpacker {
 public:
  // Takes in a head, which outlives this. False where it is left to Python: no object's head, tensors of devices, or
  // others than the `tensor_bytes` that follow it, or slices for another number of ranks than `slices`.
  bool read(const Python& python, const char* head, std::uint64_t bytes, std::uint64_t tensor_bytes,
            std::uint64_t slices);

  std::size_t count() const { return tensors_.size(); }
  // A tensor as it is sent: flat and a part of the whole where it is cut. Its sizes live as long as this.
  TensorForm form(std::size_t index) const;
  bool is_cut(std::size_t index) const { return tensors_[index].cut; }
  const std::vector<std::int64_t>& sizes(std::size_t index) const { return tensors_[index].sizes; }  // of the whole

  // The object, a new reference. Null, and no error of Python's, where it is left to Python.
  void* build(Tensors& tensors);

 private:
  struct Tensor {
    std::int64_t dtype;
    std::vector<std::int64_t> sizes;
    std::uint64_t bytes;  // as it is sent
    bool cut = false;
    std::int64_t slice = 0;  // elements of it
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
  const std::uint8_t* body_ = nullptr;  // the object's bytes
  const std::uint8_t* body_end_ = nullptr;
  std::uint64_t items_left_ = 0;  // that its lists may have in total: each is a byte at least
  std::vector<Tensor> tensors_;
};

}  // namespace parallel_state
