// Encodes a Python object as the bytes of a message, equal to those of `wire.encode`, and lists its tensors:
//
// header    32 bytes: magic, kind, slices, tensors, unused, bytes of the body, bytes of the tensors
// metadata  format version, length of the table; table: [dtype, shape, device type] of each tensor; the object
// slices    for each tensor whether a slice of it is sent
//
// Header and metadata are little-endian; table and object are msgpack. Other types than None, bool, int, float, str,
// bytes, list, dict and plain CPU tensors, and tensors that occur twice, are left to Python. The caller holds the GIL.
// No Python code runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "calling.h"
#include "queue.h"

namespace parallel_state {

// The tensor owns `sizes`.
struct TensorForm {
  void* data;
  std::uint64_t bytes;
  std::int64_t dtype;
  std::int64_t dims;
  const std::int64_t* sizes;
};

// Set by `plain_tree.py`; beside `Calling`.
struct Python {
  void* (*type_of)(void*);  // a new reference
  std::ptrdiff_t (*list_size)(void*);
  void* (*list_item)(void*, std::ptrdiff_t);                 // borrowed
  int (*dict_next)(void*, std::ptrdiff_t*, void**, void**);  // borrowed
  const void* list;
  const void* dict;
  const void* const* leaves;  // most frequent first
  std::ptrdiff_t leaf_count;
  const void* const* others;
  std::ptrdiff_t other_count;
  std::ptrdiff_t (*dict_size)(void*);
  const void* const* texts;  // of keys of any dict
  std::ptrdiff_t text_count;
  std::ptrdiff_t most_other_keys;               // larger dicts have texts as keys
  std::ptrdiff_t type_at;                       // offset; 0: unknown
  const char* (*utf8)(void*, std::ptrdiff_t*);  // kept by the object
  long long (*integer)(void*, int*);
  double (*number)(void*);
  void (*forget_error)();
  const void* str_type;
  const void* int_type;
  const void* float_type;
  const void* none_type;
  const void* bool_type;
  const void* bytes_type;
  const void* true_object;
  int (*describe)(const void*, TensorForm*);  // 0: not plain; null without torch
  std::ptrdiff_t tensor_at;                   // offset; 0: unknown
  const char* const* dtype_names;             // by number; null: none
  std::ptrdiff_t dtype_count;
  void* (*tuple_item)(void*, std::ptrdiff_t);  // borrowed
  void* (*dict_item)(void*, void*);            // borrowed; null without an error
  int depth;
  void* (*make_text)(const char*, std::ptrdiff_t, const char*);
  void* (*make_unsigned)(unsigned long long);
  void* (*make_number)(double);
  void* (*make_list)(std::ptrdiff_t);
  int (*set_item)(void*, std::ptrdiff_t, void*);  // takes the item
  void* (*make_dict)();
  int (*set_key)(void*, void*, void*);
  void* (*call)(void*, void* const*, std::size_t, void*);
  const void* none_object;
  const void* false_object;
  const void* not_implemented;
  const std::int64_t* dtype_bytes;
  // `group`: a `shared_ptr<Handle>*`, or null. Return a new reference; null without memory. Both are null in the plain
  // build.
  void* (*make_tensor)(const void* group, TensorForm*, void* (*wrap)(const void*));
  void* (*view_tensor)(const void* group, const TensorForm*, const Loan*, void* (*wrap)(const void*));
  void* (*wrap)(const void*);

  void* keep(const void* object) const {
    void* const kept = const_cast<void*>(object);
    calling.hold(kept);
    return kept;
  }
};

// Each rank sends its slice of the tensors that can be divided evenly.
struct Cut {
  std::uint64_t slices = 0;  // 0: whole tensors
  std::uint64_t mine = 0;
  void* whole = nullptr;  // a dict with keys of tensors that are sent whole; null: none
};

struct Form {
  void* keys;                  // a tuple of str
  const std::int64_t* layout;  // of each: dtype, number of dims, sizes
  std::int64_t count;
  std::int64_t words;
  std::int64_t entries;
};

bool is_among(const void* type, const void* const* types, std::ptrdiff_t count);

const void* type_of(const Python& python, void* object);

class Bytes {
 public:
  Bytes() = default;
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  ~Bytes();

  void clear() { size_ = 0; }
  std::size_t size() const { return size_; }
  char* data() const { return data_; }
  void trim(std::size_t most);
  char* add(std::size_t bytes);

 private:
  char* data_ = nullptr;
  std::size_t size_ = 0;
  std::size_t capacity_ = 0;
};

// Not thread-safe. Results are valid until the next `pack`, tensors while the object has them.
class Packer {
 public:
  static constexpr std::size_t kMostTensors = 64, kMostLong = 64;

  // False if the object is left to Python, or the body exceeds `limit` bytes.
  bool pack(const Python& python, void* object, int depth, std::uint64_t limit, const Cut& cut = {});
  // For a message whose head is known. False if the list is left to Python.
  bool gather(const Python& python, void* list, Piece head);
  bool gather(const Python& python, void* dict, const Form& form, Piece head);

  // Long texts and bytes of the object are pieces of the head.
  const std::vector<Piece>& pieces() const { return pieces_; }
  int heads() const { return heads_; }
  // Keeps long texts and tensors alive until the next `pack` or `take_held`. Until `free`, this thread's other
  // messages, those of a signal handler, are left to Python.
  void hold();
  void free() { is_held_ = false; }
  std::vector<void*> take_held() { return std::exchange(held_, {}); }
  void take_back(std::vector<void*> held) { held_ = std::move(held); }
  std::uint64_t head_bytes() const { return head_bytes_; }
  std::uint64_t tensor_bytes() const { return tensor_bytes_; }

 private:
  bool begin_known(const Python& python, Piece head);
  bool add_plain(void* item, TensorForm* form);
  bool value(void* object, int depth);
  bool list(void* object, int depth);
  bool dict(void* object, int depth);
  bool text(void* object);
  bool content(void* object, const char* data, std::size_t bytes);
  bool tensor(void* object, bool whole);
  bool finish();

  const Python* python_ = nullptr;
  std::uint64_t limit_ = 0;
  Bytes front_, rows_, body_;
  std::vector<void*> seen_;
  std::vector<char> sliced_;
  Cut cut_;
  struct Long {
    std::size_t at;
    Piece piece;
    void* object;
  };
  std::vector<Long> long_;
  std::vector<void*> held_;
  bool is_held_ = false;
  std::vector<Piece> tensors_, pieces_;
  int heads_ = 1;
  std::uint64_t long_bytes_ = 0, head_bytes_ = 0, tensor_bytes_ = 0;
};

bool describe(const Python& python, void* object, TensorForm* form);

Packer& packer();

}  // namespace parallel_state
