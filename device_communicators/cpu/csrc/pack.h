// Takes a Python object apart into the bytes of a message and the tensors that travel beside them, in one walk.
//
// The bytes are those that `wire.encode` of parallel_state.messages makes of the same object, which tests compare:
//
//   header    32 bytes: magic, kind, slices, tensors, unused, bytes of the body, bytes of the tensors
//   metadata  format version, length of the table; table: [dtype, shape, device type] of each tensor; the object
//   slices    for each tensor whether a slice of it is sent
//
// Numbers of header and metadata are little-endian, table and object are msgpack. What is not made of None, bool, int,
// float, str, bytes, list, dict and dense, contiguous CPU tensors is left to Python, as is a tensor that occurs twice.
//
// The library is linked with no Python; the few functions it needs, all of the stable ABI, are given by who calls it,
// and that one holds the GIL. No Python code runs meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "queue.h"

namespace parallel_state {

// What a message tells of a tensor. `sizes` are the tensor's own.
struct TensorForm {
  void* data;
  std::uint64_t bytes;
  std::int64_t dtype;  // c10::ScalarType
  std::int64_t dims;
  const std::int64_t* sizes;
};

// As `plain_tree.py` fills it in.
struct Python {
  void* (*type_of)(void*);                                   // PyObject_Type: a new reference
  void (*let_go)(void*);                                     // Py_DecRef
  std::ptrdiff_t (*list_size)(void*);                        // PyList_Size
  void* (*list_item)(void*, std::ptrdiff_t);                 // PyList_GetItem: borrowed
  int (*dict_next)(void*, std::ptrdiff_t*, void**, void**);  // PyDict_Next: borrowed
  const void* list;
  const void* dict;
  const void* const* leaves;  // types, the most frequent first
  std::ptrdiff_t leaf_count;
  const void* const* others;  // leaves that are no keys: types of tensors
  std::ptrdiff_t other_count;
  std::ptrdiff_t (*dict_size)(void*);  // PyDict_Size
  const void* const* texts;            // leaves that a dict of any size may have as keys
  std::ptrdiff_t text_count;
  std::ptrdiff_t most_other_keys;               // a larger dict has texts for keys
  std::ptrdiff_t type_at;                       // where an object has its type; 0 where that isn't known
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
  int (*describe)(const void*, TensorForm*);  // of a tensor's TensorImpl: 0 where it isn't plain; null without torch
  std::ptrdiff_t tensor_at;                   // where a tensor's object has its TensorImpl; 0 where that isn't known
  const char* const* dtype_names;             // by number; null where there is none
  std::ptrdiff_t dtype_count;
  void* (*tuple_item)(void*, std::ptrdiff_t);  // PyTuple_GetItem: borrowed
  void* (*dict_item)(void*, void*);            // PyDict_GetItem: borrowed; null, and no error, where there is none
  int depth;                                   // containers may be within each other
  void (*hold)(void*);                         // Py_IncRef
  // What unpack.h makes objects by:
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
  const std::int64_t* dtype_bytes;  // of an element, by number
  // Makes a tensor, a new reference, and fills in where it is: in the memory of a group, of which this is the address
  // of a shared pointer to its Handle, or null; and what is lent by a rank of it. Null where there is no memory, and
  // in place of both functions in the plain build.
  void* (*make_tensor)(const void* group, TensorForm*, void* (*wrap)(const void*));
  void* (*view_tensor)(const void* group, const TensorForm*, const Loan*, void* (*wrap)(const void*));
  void* (*wrap)(const void*);  // THPVariable_Wrap

  void* keep(const void* object) const {
    void* const kept = const_cast<void*>(object);
    hold(kept);
    return kept;
  }
};

// Which part of each tensor is sent: this rank's slice of those that divide evenly.
struct Cut {
  std::uint64_t slices = 0;  // 0: all of it, and the message tells of none
  std::uint64_t mine = 0;
  void* whole = nullptr;  // a dict with the keys of those tensors that are sent whole of a dict; null: none
};

// What is known beforehand of a dict's tensors: the message of a dict of this form has a head that both sides know.
struct Form {
  void* keys;                  // of all tensors, a tuple of str
  const std::int64_t* layout;  // of each: number of the dtype, number of dims, sizes
  std::int64_t count;          // of tensors
  std::int64_t words;          // of the layout
  std::int64_t entries;        // of the dict, which may have other values, too
};

bool is_among(const void* type, const void* const* types, std::ptrdiff_t count);

// The address of a type that somebody else keeps alive: the object has it.
const void* type_of(const Python& python, void* object);

// Bytes that grow, in memory that is kept for the next ones.
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
  // Room for so many more bytes, which count from now on; null where there is no memory.
  char* add(std::size_t bytes);

 private:
  char* data_ = nullptr;
  std::size_t size_ = 0;
  std::size_t capacity_ = 0;
};

// The message of one object. Not thread-safe. What it tells of lives until the next `pack`, and the tensors as long as
// the object has them.
class Packer {
 public:
  static constexpr std::size_t kMostTensors = 64, kMostLong = 64;

  // Takes the object apart, its containers at most `depth` within each other. False where that is left to Python, or
  // the body would have more than `limit` bytes.
  bool pack(const Python& python, void* object, int depth, std::uint64_t limit, const Cut& cut = {});
  // Takes in the tensors of a list, for a message whose head is known. False where that is left to Python.
  bool gather(const Python& python, void* list, Piece head);
  // Takes in the tensors of a dict, for a message whose head is known. False where it isn't of the form.
  bool gather(const Python& python, void* dict, const Form& form, Piece head);

  // The first `heads()` of the pieces are the message's head: what was written here, and between it the long texts and
  // bytes of the object where they are. The others are its tensors.
  const std::vector<Piece>& pieces() const { return pieces_; }
  int heads() const { return heads_; }
  // Keeps the objects that long texts are in, and the tensors, for a message that is sent later; they are let go by the
  // next `pack`, or by who takes them. Until `free`, whatever else this thread packs is left to Python: it comes of a
  // signal handler.
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
  std::vector<char> sliced_;  // of each tensor whether a slice of it is sent
  Cut cut_;
  struct Long {
    std::size_t at;  // bytes of the body before it
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

// What a message tells of a tensor's object. False where it isn't plain.
bool describe(const Python& python, void* object, TensorForm* form);

// One for each thread: messages are short, and threads send to several ranks.
Packer& packer();

}  // namespace parallel_state
