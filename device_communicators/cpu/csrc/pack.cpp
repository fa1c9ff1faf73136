#include "pack.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace parallel_state {
namespace {

constexpr std::size_t kHeaderBytes = 32, kMetadataBytes = 5;
constexpr std::uint8_t kFormatVersion = 1, kTensorCode = 9;
constexpr std::size_t kShortString = 32;
constexpr std::size_t kKeptBytes = 4 << 20;
constexpr std::size_t kLongBytes = 4 << 10;

template <typename T>
bool little_endian(Bytes& to, T value) {
  char* const at = to.add(sizeof value);
  if (at == nullptr) return false;
  for (std::size_t byte = 0; byte < sizeof value; ++byte) {
    at[byte] = static_cast<char>(static_cast<std::uint64_t>(value) >> 8 * byte);
  }
  return true;
}

bool tagged(Bytes& to, std::uint8_t tag, std::uint64_t value, int bytes) {
  char* const at = to.add(1 + static_cast<std::size_t>(bytes));
  if (at == nullptr) return false;
  at[0] = static_cast<char>(tag);
  for (int byte = 0; byte < bytes; ++byte) at[1 + byte] = static_cast<char>(value >> 8 * (bytes - 1 - byte));
  return true;
}

bool integer(Bytes& to, std::int64_t value) {
  const auto bits = static_cast<std::uint64_t>(value);
  if (value >= 0) {
    if (bits <= 0x7f) return tagged(to, static_cast<std::uint8_t>(bits), 0, 0);
    if (bits <= 0xff) return tagged(to, 0xcc, bits, 1);
    if (bits <= 0xffff) return tagged(to, 0xcd, bits, 2);
    if (bits <= 0xffff'ffff) return tagged(to, 0xce, bits, 4);
    return tagged(to, 0xcf, bits, 8);
  }
  if (value >= -32) return tagged(to, static_cast<std::uint8_t>(bits), 0, 0);
  if (value >= INT8_MIN) return tagged(to, 0xd0, bits, 1);
  if (value >= INT16_MIN) return tagged(to, 0xd1, bits, 2);
  if (value >= INT32_MIN) return tagged(to, 0xd2, bits, 4);
  return tagged(to, 0xd3, bits, 8);
}

// A tag of 0: msgpack has none.
bool sized(Bytes& to, std::uint64_t size, std::uint8_t tag, std::uint64_t few, std::uint8_t tag_8,
           std::uint8_t tag_16) {
  if (size < few) return tagged(to, static_cast<std::uint8_t>(tag | size), 0, 0);
  if (tag_8 != 0 && size <= 0xff) return tagged(to, tag_8, size, 1);
  if (size <= 0xffff) return tagged(to, tag_16, size, 2);
  return size <= 0xffff'ffff && tagged(to, static_cast<std::uint8_t>(tag_16 + 1), size, 4);
}

bool array(Bytes& to, std::uint64_t size) { return sized(to, size, 0x90, 16, 0, 0xdc); }

bool copied(Bytes& to, const char* data, std::size_t bytes) {
  char* const at = to.add(bytes);
  if (at != nullptr && bytes != 0) std::memcpy(at, data, bytes);
  return at != nullptr;
}

bool short_string(Bytes& to, const char* data, std::size_t bytes) {
  char* const at = to.add(1 + bytes);
  if (at == nullptr) return false;
  at[0] = static_cast<char>(0xa0 | bytes);
  std::memcpy(at + 1, data, bytes);
  return true;
}

}  // namespace

bool is_among(const void* type, const void* const* types, std::ptrdiff_t count) {
  for (std::ptrdiff_t index = 0; index < count; ++index) {
    if (types[index] == type) return true;
  }
  return false;
}

const void* type_of(const Python& python, void* object) {
  if (python.type_at != 0) return *reinterpret_cast<void**>(static_cast<char*>(object) + python.type_at);
  void* const type = python.type_of(object);
  calling.let_go(type);
  return type;
}

Bytes::~Bytes() { std::free(data_); }

char* Bytes::add(std::size_t bytes) {
  if (bytes > capacity_ - size_ || data_ == nullptr) {
    const std::size_t wanted = 2 * (size_ + bytes) + 256;
    void* const grown = std::realloc(data_, wanted);
    if (grown == nullptr) return nullptr;
    data_ = static_cast<char*>(grown);
    capacity_ = wanted;
  }
  char* const at = data_ + size_;
  size_ += bytes;
  return at;
}

void Bytes::trim(std::size_t most) {
  if (capacity_ <= most) return;
  std::free(data_);
  data_ = nullptr;
  size_ = capacity_ = 0;
}

bool Packer::pack(const Python& python, void* object, int depth, std::uint64_t limit, const Cut& cut) {
  if (is_held_ || cut.slices > UINT16_MAX) return false;
  python_ = &python;
  limit_ = limit;
  cut_ = cut;
  body_.trim(kKeptBytes);
  for (Bytes* const each : {&front_, &rows_, &body_}) each->clear();
  seen_.clear();
  sliced_.clear();
  for (void* const object : take_held()) calling.let_go(object);
  long_.clear();
  tensors_.clear();
  long_bytes_ = tensor_bytes_ = 0;
  return value(object, depth) && finish();
}

void Packer::hold() {
  is_held_ = true;
  for (const Long& each : long_) {
    calling.hold(each.object);
    held_.push_back(each.object);
  }
  for (void* const tensor : seen_) {
    calling.hold(tensor);
    held_.push_back(tensor);
  }
}

Packer& packer() {
  static thread_local Packer made;
  return made;
}

bool Packer::begin_known(const Python& python, Piece head) {
  if (is_held_) return false;
  python_ = &python;
  pieces_.assign(1, head);
  heads_ = 1;
  head_bytes_ = head.bytes;
  tensor_bytes_ = 0;
  long_.clear();
  seen_.clear();
  return true;
}

bool Packer::add_plain(void* item, TensorForm* form) {
  const Python& python = *python_;
  if (item == nullptr || !is_among(type_of(python, item), python.others, python.other_count)) return false;
  if (!describe(python, item, form)) return false;
  seen_.push_back(item);
  if (form->bytes != 0) pieces_.push_back({form->data, form->bytes});
  tensor_bytes_ += form->bytes;
  return true;
}

bool Packer::gather(const Python& python, void* list, Piece head) {
  if (!begin_known(python, head) || type_of(python, list) != python.list) return false;
  for (std::ptrdiff_t index = 0; index < python.list_size(list); ++index) {
    TensorForm form{};
    if (!add_plain(python.list_item(list, index), &form)) return false;
  }
  return true;
}

bool Packer::gather(const Python& python, void* dict, const Form& known, Piece head) {
  if (!begin_known(python, head) || type_of(python, dict) != python.dict) return false;
  if (python.dict_size(dict) != known.entries) return false;
  const std::int64_t* at = known.layout;
  const std::int64_t* const end = at + known.words;
  for (std::int64_t index = 0; index < known.count; ++index) {
    TensorForm form{};
    if (!add_plain(python.dict_item(dict, python.tuple_item(known.keys, index)), &form)) return false;
    if (end - at < 2 + form.dims || at[0] != form.dtype || at[1] != form.dims) return false;
    if (!std::equal(form.sizes, form.sizes + form.dims, at + 2)) return false;
    at += 2 + form.dims;
  }
  return at == end;
}

bool Packer::value(void* object, int depth) {
  const Python& python = *python_;
  if (object == nullptr) python.forget_error();  // another thread changed the list
  if (object == nullptr || body_.size() + long_bytes_ > limit_) return false;
  const void* const type = type_of(python, object);
  if (type == python.str_type) return text(object);
  if (type == python.int_type) {
    int overflow = 0;
    const long long number = python.integer(object, &overflow);
    return overflow == 0 && integer(body_, number);
  }
  if (type == python.list) return depth > 0 && list(object, depth - 1);
  if (type == python.dict) return depth > 0 && dict(object, depth - 1);
  if (type == python.bool_type) return tagged(body_, object == python.true_object ? 0xc3 : 0xc2, 0, 0);
  if (type == python.none_type) return tagged(body_, 0xc0, 0, 0);
  if (type == python.float_type) {
    const double number = python.number(object);
    std::uint64_t bits = 0;
    std::memcpy(&bits, &number, sizeof bits);
    return tagged(body_, 0xcb, bits, 8);
  }
  if (type == python.bytes_type) {
    const auto size = static_cast<std::size_t>(calling.bytes_size(object));
    return sized(body_, size, 0, 0, 0xc4, 0xc5) && content(object, calling.as_bytes(object), size);
  }
  return is_among(type, python.others, python.other_count) && tensor(object, false);
}

bool Packer::text(void* object) {
  std::ptrdiff_t size = 0;
  const char* const data = python_->utf8(object, &size);
  const auto bytes = static_cast<std::size_t>(size);
  if (data != nullptr && bytes < kShortString) return short_string(body_, data, bytes);
  if (data != nullptr) return sized(body_, bytes, 0xa0, kShortString, 0xd9, 0xda) && content(object, data, bytes);
  python_->forget_error();  // a lone surrogate
  return false;
}

bool Packer::content(void* object, const char* data, std::size_t bytes) {
  if (bytes <= kLongBytes) return copied(body_, data, bytes);
  if (long_.size() == kMostLong) return false;
  long_.push_back({body_.size(), {const_cast<char*>(data), bytes}, object});
  long_bytes_ += bytes;
  return true;
}

// Without a GIL another thread may change the list: a missing item is null.
bool Packer::list(void* object, int depth) {
  const std::ptrdiff_t size = python_->list_size(object);
  if (!array(body_, static_cast<std::uint64_t>(size))) return false;
  for (std::ptrdiff_t index = 0; index < size; ++index) {
    if (!value(python_->list_item(object, index), depth)) return false;
  }
  return python_->list_size(object) == size;
}

bool Packer::dict(void* object, int depth) {
  const Python& python = *python_;
  const std::ptrdiff_t size = python.dict_size(object);
  if (!sized(body_, static_cast<std::uint64_t>(size), 0x80, 16, 0, 0xde)) return false;
  const bool large = size > python.most_other_keys;
  std::ptrdiff_t position = 0, count = 0;
  void* key = nullptr;
  void* item = nullptr;
  while (python.dict_next(object, &position, &key, &item) != 0) {
    const void* const type = type_of(python, key);
    if (type == python.str_type) {
      if (++count > size || !text(key)) return false;
      const bool whole = cut_.whole != nullptr && depth + 1 == python.depth && python.dict_item(cut_.whole, key) &&
                         is_among(type_of(python, item), python.others, python.other_count);
      if (!(whole ? tensor(item, true) : value(item, depth))) return false;
      continue;
    }
    const bool fit =
        large ? is_among(type, python.texts, python.text_count) : is_among(type, python.leaves, python.leaf_count);
    if (!fit || ++count > size || !value(key, 0) || !value(item, depth)) return false;
  }
  return count == size;
}

bool describe(const Python& python, void* object, TensorForm* form) {
  if (python.describe == nullptr || python.tensor_at == 0) return false;
  const void* const tensor = *reinterpret_cast<void**>(static_cast<char*>(object) + python.tensor_at);
  return tensor != nullptr && python.describe(tensor, form) != 0;
}

bool Packer::tensor(void* object, bool whole) {
  TensorForm form{};
  const std::size_t index = seen_.size();
  if (index == kMostTensors || std::find(seen_.begin(), seen_.end(), object) != seen_.end()) return false;
  if (!describe(*python_, object, &form) || form.dtype < 0 || form.dtype >= python_->dtype_count) return false;
  const char* const name = python_->dtype_names[form.dtype];
  if (name == nullptr) return false;
  seen_.push_back(object);
  tensor_bytes_ += form.bytes;
  std::uint64_t numel = 1;
  for (std::int64_t dim = 0; dim < form.dims; ++dim) numel *= static_cast<std::uint64_t>(form.sizes[dim]);
  const bool sliced = cut_.slices > 1 && !whole && numel != 0 && numel % cut_.slices == 0;
  sliced_.push_back(sliced ? 1 : 0);
  const std::uint64_t sent_bytes = sliced ? form.bytes / cut_.slices : form.bytes;
  char* const from = static_cast<char*>(form.data) + (sliced ? cut_.mine * sent_bytes : 0);
  if (sent_bytes != 0) tensors_.push_back({from, sent_bytes});
  bool done = array(rows_, 3) && short_string(rows_, name, std::strlen(name));
  done = done && array(rows_, static_cast<std::uint64_t>(form.dims));
  for (std::int64_t dim = 0; dim < form.dims && done; ++dim) done = integer(rows_, form.sizes[dim]);
  done = done && short_string(rows_, "cpu", 3);
  const char code[] = {static_cast<char>(0xd6), kTensorCode};
  return done && copied(body_, code, sizeof code) && little_endian(body_, static_cast<std::uint32_t>(index));
}

bool Packer::finish() {
  const auto tensors = static_cast<std::uint32_t>(seen_.size());
  char* const cut = body_.add(tensors);
  if (cut == nullptr) return false;
  std::copy(sliced_.begin(), sliced_.end(), cut);
  const std::uint64_t table_bytes = (tensors == 0 ? 0 : tensors < 16 ? 1 : 3) + rows_.size();
  const std::uint64_t body_bytes = kMetadataBytes + table_bytes + body_.size() + long_bytes_;
  if (body_bytes > limit_ || body_bytes > UINT32_MAX) return false;
  const char start[] = {'P', 'S', 'M', '1', 0, 0};
  const bool done = copied(front_, start, sizeof start) &&
                    little_endian(front_, static_cast<std::uint16_t>(cut_.slices)) && little_endian(front_, tensors) &&
                    little_endian(front_, std::uint32_t{0}) && little_endian(front_, body_bytes) &&
                    little_endian(front_, tensor_bytes_) && little_endian(front_, kFormatVersion) &&
                    little_endian(front_, static_cast<std::uint32_t>(table_bytes)) &&
                    (tensors == 0 || array(front_, tensors)) && copied(front_, rows_.data(), rows_.size());
  pieces_.assign(1, {front_.data(), front_.size()});
  std::size_t from = 0;
  for (const Long& each : long_) {
    pieces_.push_back({body_.data() + from, each.at - from});
    pieces_.push_back(each.piece);
    from = each.at;
  }
  pieces_.push_back({body_.data() + from, body_.size() - from});
  heads_ = static_cast<int>(pieces_.size());
  head_bytes_ = front_.size() + body_.size() + long_bytes_;
  pieces_.insert(pieces_.end(), tensors_.begin(), tensors_.end());
  return done;
}

}  // namespace parallel_state
