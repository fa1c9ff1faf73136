// Encodes a Python object as the bytes of a message, and lists the tensors that are sent beside them.
//
// The bytes equal those of `wire.encode` in parallel_state.messages:
//
//   header    32 bytes: magic, kind, slices, tensors, unused, bytes of the body, bytes of the tensors
//   metadata  format version, length of the table; table: [dtype, shape, device type] of each tensor; the object
//   slices    for each tensor whether a slice of it is sent
//
// Header and metadata are little-endian; table and object are msgpack. Objects may contain None, bool, int, float, str,
// bytes, list, dict and dense, contiguous CPU tensors. Others, and tensors that occur twice, are left to Python. The
// caller holds the GIL. No Python code runs meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "queue.h"

namespace parallel_state {

// The tensor owns `sizes`.
struct TensorForm {
  void* data;
  std::uint64_t bytes;
  std::int64_t dtype;  // c10::ScalarType
  std::int64_t dims;
  const std::int64_t* sizes;
};

// Set by `plain_tree.py`.
struct Python {
  void* (*type_of)(void*);                                   // PyObject_Type: a new reference
  void (*let_go)(void*);                                     // Py_DecRef
  std::ptrdiff_t (*list_size)(void*);                        // PyList_Size
  void* (*list_item)(void*, std::ptrdiff_t);                 // PyList_GetItem: borrowed
  int (*dict_next)(void*, std::ptrdiff_t*, void**, void**);  // PyDict_Next: borrowed
  const void* list;
  const void* dict;
  const void* const* leaves;  // types, most frequent first
  std::ptrdiff_t leaf_count;
  const void* const* others;  // types of tensors, which are no keys
  std::ptrdiff_t other_count;
  std::ptrdiff_t (*dict_size)(void*);  // PyDict_Size
  const void* const* texts;            // types of keys of any dict
  std::ptrdiff_t text_count;
  std::ptrdiff_t most_other_keys;               // dicts with more entries have texts as keys
  std::ptrdiff_t type_at;                       // offset of an object's type; 0: unknown
  const char* (*utf8)(void*, std::ptrdiff_t*);  // PyUnicode_AsUTF8AndSize: kept by the object
  long long (*integer)(void*, int*);            // PyLong_AsLongLongAndOverflow
  double (*number)(void*);                      // PyFloat_AsDouble
  std::ptrdiff_t (*bytes_size)(void*);          // PyBytes_Size
  const char* (*bytes)(void*);                  // PyBytes_AsString
  void (*forget_error)();                       // PyErr_Clear
  const void* str_type;
  const void* int_type;
  const void* float_type;
  const void* none_type;
  const void* bool_type;
  const void* bytes_type;
  const void* true_object;
  int (*describe)(const void*, TensorForm*);  // 0: not plain; null without torch
  std::ptrdiff_t tensor_at;                   // offset of a tensor's TensorImpl; 0: unknown
  const char* const* dtype_names;             // by number; null: none
  std::ptrdiff_t dtype_count;
  void* (*tuple_item)(void*, std::ptrdiff_t);  // PyTuple_GetItem: borrowed
  void* (*dict_item)(void*, void*);            // PyDict_GetItem: borrowed; null without an error
  int depth;
  void (*hold)(void*);  // Py_IncRef
  // For unpack.h:
  void* (*make_text)(const char*, std::ptrdiff_t, const char*);  // PyUnicode_DecodeUTF8
  void* (*make_bytes)(const char*, std::ptrdiff_t);              // PyBytes_FromStringAndSize
  void* (*make_integer)(long long);                              // PyLong_FromLongLong
  void* (*make_unsigned)(unsigned long long);                    // PyLong_FromUnsignedLongLong
  void* (*make_number)(double);                                  // PyFloat_FromDouble
  void* (*make_list)(std::ptrdiff_t);                            // PyList_New
  int (*set_item)(void*, std::ptrdiff_t, void*);                 // PyList_SetItem: takes the item
  void* (*make_dict)();                                          // PyDict_New
  int (*set_key)(void*, void*, void*);                           // PyDict_SetItem
  void* (*call)(void*, void* const*, std::size_t, void*);        // PyObject_Vectorcall
  const void* none_object;
  const void* false_object;
  const void* not_implemented;
  const std::int64_t* dtype_bytes;  // per element, by number
  // Makes a tensor in the memory of `group` (a `shared_ptr<Handle>*`, or null), or of a loan of its ranks. Returns a
  // new reference and fills in `data`; null without memory. Both are null in the plain build.
  void* (*make_tensor)(const void* group, TensorForm*, void* (*wrap)(const void*));
  void* (*view_tensor)(const void* group, const TensorForm*, const Loan*, void* (*wrap)(const void*));
  void* (*wrap)(const void*);  // THPVariable_Wrap

  void* keep(const void* object) const {
    void* const kept = const_cast<void*>(object);
    hold(kept);
    return kept;
  }
};

// Each rank sends its slice of the tensors that can be divided evenly.
struct Cut {
  std::uint64_t slices = 0;  // 0: whole tensors
  std::uint64_t mine = 0;
  void* whole = nullptr;  // a dict whose keys are tensors sent whole; null: none
};

// A dict with known tensors, so both sides know its message's head.
struct Form {
  void* keys;                  // of all tensors, a tuple of str
  const std::int64_t* layout;  // of each: dtype, number of dims, sizes
  std::int64_t count;
  std::int64_t words;    // of the layout
  std::int64_t entries;  // of the dict, with other values
};

bool is_among(const void* type, const void* const* types, std::ptrdiff_t count);

// A borrowed reference.
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
  // Returns room for more bytes; null without memory.
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

  // Returns false if the object is left to Python, or the body exceeds `limit` bytes.
  bool pack(const Python& python, void* object, int depth, std::uint64_t limit, const Cut& cut = {});
  // Takes a list's tensors, for a message whose head is known. Returns false if it is left to Python.
  bool gather(const Python& python, void* list, Piece head);
  // Returns false if the dict hasn't this form.
  bool gather(const Python& python, void* dict, const Form& form, Piece head);

  // `heads()` pieces of head, including the object's long texts and bytes in place; then its tensors.
  const std::vector<Piece>& pieces() const { return pieces_; }
  int heads() const { return heads_; }
  // Keeps long texts and tensors alive until the next `pack` or `take_held`. Until `free`, this thread's other
  // messages, those of a signal handler, are encoded by Python.
  void hold();
  void free() { is_held_ = false; }
  std::vector<void*> take_held() { return std::exchange(held_, {}); }
  void take_back(std::vector<void*> held) { held_ = std::move(held); }
  std::uint64_t head_bytes() const { return head_bytes_; }
  std::uint64_t tensor_bytes() const { return tensor_bytes_; }

 private:
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

// False if it isn't plain.
bool describe(const Python& python, void* object, TensorForm* form);

Packer& packer();

}  // namespace parallel_state
