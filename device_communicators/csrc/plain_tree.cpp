// Whether a Python object is a tree of nothing but a few types, exactly: what takes a third of a microsecond here takes
// fifteen in Python. The library is linked with no Python; the few functions it needs, all of the stable ABI, are given
// by who calls it, and that one holds the GIL.

#include <cstddef>
#include <cstdint>

namespace {

// As `plain_tree.py` fills it in.
struct Python {
  void* (*type_of)(void*);                                            // PyObject_Type: a new reference
  void (*let_go)(void*);                                              // Py_DecRef
  std::ptrdiff_t (*list_size)(void*);                                 // PyList_Size
  void* (*list_item)(void*, std::ptrdiff_t);                          // PyList_GetItem: borrowed
  int (*dict_next)(void*, std::ptrdiff_t*, void**, void**);           // PyDict_Next: borrowed
  const void* list;
  const void* dict;
  const void* const* leaves;                                          // types, the most frequent first
  std::ptrdiff_t leaf_count;
  const void* const* others;                                          // leaves that are no keys
  std::ptrdiff_t other_count;
};

bool is_among(const void* type, const void* const* types, std::ptrdiff_t count) {
  for (std::ptrdiff_t index = 0; index < count; ++index) {
    if (types[index] == type) return true;
  }
  return false;
}

// The address of a type that somebody else keeps alive: the object has it.
const void* type_of(const Python& python, void* object) {
  void* const type = python.type_of(object);
  python.let_go(type);
  return type;
}

// 0: no. 1: yes. 2: yes, and there are others among the leaves.
int look(const Python& python, void* object, int depth) {
  const void* const type = type_of(python, object);
  if (is_among(type, python.leaves, python.leaf_count)) return 1;
  int found = 1;
  if (type == python.list && depth > 0) {
    // The size is asked for again and again: nothing here runs Python code, but without a GIL another thread might.
    for (std::ptrdiff_t index = 0; index < python.list_size(object) && found != 0; ++index) {
      const int item = look(python, python.list_item(object, index), depth - 1);
      found = item == 0 ? 0 : found | item;
    }
    return found == 3 ? 2 : found;
  }
  if (type == python.dict && depth > 0) {
    std::ptrdiff_t position = 0;
    void* key = nullptr;
    void* value = nullptr;
    while (found != 0 && python.dict_next(object, &position, &key, &value) != 0) {
      const bool fit = is_among(type_of(python, key), python.leaves, python.leaf_count);
      const int item = fit ? look(python, value, depth - 1) : 0;
      found = item == 0 ? 0 : found | item;
    }
    return found == 3 ? 2 : found;
  }
  return is_among(type, python.others, python.other_count) ? 2 : 0;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Whether `object` is lists and dicts, at most `depth` within each other, of leaves: see `look`.
int ps_plain_tree(void* object, const void* python, int depth) {
  return look(*static_cast<const Python*>(python), object, depth);
}

}  // extern "C"
#pragma GCC visibility pop
