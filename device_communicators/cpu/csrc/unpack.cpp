#include "unpack.h"

#include <algorithm>
#include <cstring>

namespace parallel_state {
namespace {

constexpr std::uint64_t kHeaderBytes = 32, kMetadataBytes = 5;
constexpr std::uint8_t kFormatVersion = 1, kTensorCode = 9;
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 48;  // MAX_TENSOR_BYTES of the codec
constexpr std::uint64_t kMostDims = 32;

std::uint64_t little_endian(const std::uint8_t* at, int bytes) {
  std::uint64_t found = 0;
  while (bytes-- > 0) found = found << 8 | at[bytes];
  return found;
}

}  // namespace

bool Unpacker::read(const Python& python, const char* head, std::uint64_t bytes, std::uint64_t tensor_bytes,
                    std::uint64_t slices) {
  python_ = &python;
  tensors_.clear();
  const auto* const start = reinterpret_cast<const std::uint8_t*>(head);
  constexpr unsigned char kValue[6] = {'P', 'S', 'M', '1', 0, 0};
  if (bytes < kHeaderBytes + kMetadataBytes || std::memcmp(start, kValue, sizeof kValue) != 0) return false;
  const std::uint64_t told_slices = little_endian(start + 6, 2), count = little_endian(start + 8, 4),
                      body_bytes = little_endian(start + 16, 8), told_bytes = little_endian(start + 24, 8);
  if (body_bytes != bytes - kHeaderBytes || count > body_bytes - kMetadataBytes) return false;
  at_ = start + kHeaderBytes;
  body_end_ = start + bytes - count;
  const std::uint64_t table_bytes = little_endian(at_ + 1, 4);
  if (*at_ != kFormatVersion || table_bytes > body_bytes - kMetadataBytes - count) return false;
  at_ += kMetadataBytes;
  body_ = end_ = at_ + table_bytes;
  if (count == 0) return table_bytes == 0 && told_bytes == 0 && tensor_bytes == 0;
  if (python.make_tensor == nullptr || !read_table(count)) return false;
  std::uint64_t whole_bytes = 0, sent_bytes = 0;
  for (std::size_t index = 0; index < count; ++index) {
    Tensor& tensor = tensors_[index];
    whole_bytes += tensor.bytes;
    if (body_end_[index] != 0) {
      std::uint64_t numel = 1;
      for (const std::int64_t size : tensor.sizes) numel *= static_cast<std::uint64_t>(size);
      if (told_slices < 2 || told_slices != slices || numel == 0 || numel % told_slices != 0) return false;
      tensor.cut = true;
      tensor.bytes /= told_slices;
      tensor.slice = static_cast<std::int64_t>(numel / told_slices);
    }
    sent_bytes += tensor.bytes;
  }
  return whole_bytes == told_bytes && sent_bytes == tensor_bytes;
}

bool Unpacker::read_table(std::uint64_t count) {
  std::uint64_t rows = 0, claimed_bytes = 0;
  if (at_ == end_) return false;
  const std::uint8_t tag = *at_++;
  if (!size_of(tag, 0x90, 16, 0xdc, &rows) || rows != count) return false;
  tensors_.reserve(std::min<std::uint64_t>(count, Packer::kMostTensors));
  while (rows-- > 0) {
    if (!read_tensor(&claimed_bytes)) return false;
  }
  return at_ == end_;
}

bool Unpacker::read_tensor(std::uint64_t* claimed_bytes) {
  const Python& python = *python_;
  const char* text = nullptr;
  std::size_t text_bytes = 0;
  Tensor tensor{-1, {}, 0};
  if (at_ == end_ || *at_++ != 0x93 || !short_text(&text, &text_bytes)) return false;
  for (std::ptrdiff_t dtype = 0; dtype < python.dtype_count && tensor.dtype < 0; ++dtype) {
    const char* const name = python.dtype_names[dtype];
    const bool same = name != nullptr && std::strlen(name) == text_bytes && std::memcmp(name, text, text_bytes) == 0;
    if (same) tensor.dtype = dtype;
  }
  if (tensor.dtype < 0 || at_ == end_) return false;
  std::uint64_t dims = 0;
  const std::uint8_t tag = *at_++;
  if (!size_of(tag, 0x90, 16, 0xdc, &dims) || dims > kMostDims) return false;
  // Torch multiplies the nonzero dims, even of an empty tensor.
  std::uint64_t bytes = static_cast<std::uint64_t>(python.dtype_bytes[tensor.dtype]);
  bool empty = false;
  while (dims-- > 0) {
    std::uint64_t size = 0;
    if (!unsigned_number(&size) || size >= kMostBytes) return false;
    empty = empty || size == 0;
    if (__builtin_mul_overflow(bytes, size == 0 ? 1 : size, &bytes) || bytes >= kMostBytes) return false;
    tensor.sizes.push_back(static_cast<std::int64_t>(size));
  }
  *claimed_bytes += bytes;
  tensor.bytes = empty ? 0 : bytes;
  tensors_.push_back(std::move(tensor));
  return *claimed_bytes < kMostBytes && short_text(&text, &text_bytes) && text_bytes == 3 &&
         std::memcmp(text, "cpu", 3) == 0;
}

TensorForm Unpacker::form(std::size_t index) const {
  const Tensor& tensor = tensors_[index];
  const bool cut = tensor.cut;
  return {nullptr, tensor.bytes, tensor.dtype, cut ? 1 : static_cast<std::int64_t>(tensor.sizes.size()),
          cut ? &tensor.slice : tensor.sizes.data()};
}

bool Unpacker::number(int bytes, std::uint64_t* found) {
  if (bytes > end_ - at_) return false;
  for (*found = 0; bytes > 0; --bytes) *found = *found << 8 | *at_++;
  return true;
}

bool Unpacker::unsigned_number(std::uint64_t* found) {
  if (at_ == end_) return false;
  const std::uint8_t tag = *at_++;
  *found = tag;
  return tag <= 0x7f || (tag >= 0xcc && tag <= 0xcf && number(1 << (tag - 0xcc), found));
}

bool Unpacker::size_of(std::uint8_t tag, std::uint8_t few_tag, std::uint8_t few, std::uint8_t tag_16,
                       std::uint64_t* size) {
  *size = tag & (few - 1);
  if ((tag & ~(few - 1)) == few_tag) return true;
  return (tag == tag_16 && number(2, size)) || (tag == tag_16 + 1 && number(4, size));
}

bool Unpacker::short_text(const char** text, std::size_t* bytes) {
  if (at_ == end_ || *at_ < 0xa0 || *at_ > 0xbf) return false;
  *bytes = *at_++ & 0x1f;
  if (*bytes > static_cast<std::size_t>(end_ - at_)) return false;
  *text = reinterpret_cast<const char*>(at_);
  at_ += *bytes;
  return true;
}

void* Unpacker::build(Tensors& tensors) {
  found_ = &tensors;
  at_ = body_;
  end_ = body_end_;
  items_left_ = static_cast<std::uint64_t>(end_ - at_);
  void* const made = value(python_->depth, nullptr);
  if (made != nullptr && at_ == end_) return made;
  if (made != nullptr) calling.let_go(made);
  python_->forget_error();
  return nullptr;
}

void* Unpacker::value(int depth, void* key) {
  const Python& python = *python_;
  if (at_ == end_) return nullptr;
  const std::uint8_t tag = *at_++;
  if (tag <= 0x7f) return calling.make_integer(tag);
  if (tag >= 0xe0) return calling.make_integer(static_cast<std::int8_t>(tag));
  if (tag >= 0xa0 && tag <= 0xbf) return text(tag & 0x1f);
  std::uint64_t found = 0;
  switch (tag) {
    case 0xc0: return python.keep(python.none_object);
    case 0xc2: return python.keep(python.false_object);
    case 0xc3: return python.keep(python.true_object);
    case 0xc4:
    case 0xc5:
    case 0xc6: return number(1 << (tag - 0xc4), &found) ? bytes(found) : nullptr;
    case 0xcb: {
      double real = 0;
      if (!number(8, &found)) return nullptr;
      std::memcpy(&real, &found, sizeof real);
      return python.make_number(real);
    }
    case 0xcc:
    case 0xcd:
    case 0xce:
    case 0xcf: return number(1 << (tag - 0xcc), &found) ? python.make_unsigned(found) : nullptr;
    case 0xd0: return number(1, &found) ? calling.make_integer(static_cast<std::int8_t>(found)) : nullptr;
    case 0xd1: return number(2, &found) ? calling.make_integer(static_cast<std::int16_t>(found)) : nullptr;
    case 0xd2: return number(4, &found) ? calling.make_integer(static_cast<std::int32_t>(found)) : nullptr;
    case 0xd3: return number(8, &found) ? calling.make_integer(static_cast<std::int64_t>(found)) : nullptr;
    case 0xd6: return tensor(key);
    case 0xd9:
    case 0xda:
    case 0xdb: return number(1 << (tag - 0xd9), &found) ? text(found) : nullptr;
    default: break;
  }
  if (depth == 0) return nullptr;
  if (size_of(tag, 0x90, 16, 0xdc, &found)) return list(found, depth - 1);
  return size_of(tag, 0x80, 16, 0xde, &found) ? dict(found, depth - 1) : nullptr;
}

void* Unpacker::text(std::uint64_t bytes) {
  if (bytes > static_cast<std::uint64_t>(end_ - at_)) return nullptr;
  const auto* const text = reinterpret_cast<const char*>(at_);
  at_ += bytes;
  return python_->make_text(text, static_cast<std::ptrdiff_t>(bytes), nullptr);
}

void* Unpacker::bytes(std::uint64_t bytes) {
  if (bytes > static_cast<std::uint64_t>(end_ - at_)) return nullptr;
  const auto* const data = reinterpret_cast<const char*>(at_);
  at_ += bytes;
  return calling.make_bytes(data, static_cast<std::ptrdiff_t>(bytes));
}

void* Unpacker::list(std::uint64_t size, int depth) {
  if (size > items_left_) return nullptr;
  items_left_ -= size;
  void* const made = python_->make_list(static_cast<std::ptrdiff_t>(size));
  for (std::uint64_t index = 0; made != nullptr && index < size; ++index) {
    void* const item = value(depth, nullptr);
    if (item == nullptr || python_->set_item(made, static_cast<std::ptrdiff_t>(index), item) != 0) {
      calling.let_go(made);
      return nullptr;
    }
  }
  return made;
}

// Guards against colliding keys; see KeyCheck in plain_tree.cpp.
void* Unpacker::dict(std::uint64_t size, int depth) {
  const Python& python = *python_;
  void* const made = python.make_dict();
  const bool outermost = depth + 1 == python.depth;
  const bool large = size > static_cast<std::uint64_t>(python.most_other_keys);
  bool done = made != nullptr;
  while (done && size-- > 0) {
    const std::uint8_t tag = at_ == end_ ? 0xc1 : *at_;
    const bool is_text = (tag >= 0xa0 && tag <= 0xbf) || (tag >= 0xc4 && tag <= 0xc6) || (tag >= 0xd9 && tag <= 0xdb);
    const bool is_number = tag <= 0x7f || tag >= 0xe0 || (tag >= 0xc0 && tag <= 0xd3 && tag != 0xc1);
    void* const key = is_text || (is_number && !large) ? value(0, nullptr) : nullptr;
    void* const item = key == nullptr ? nullptr : value(depth, outermost ? key : nullptr);
    done = item != nullptr && python.set_key(made, key, item) == 0;
    if (item != nullptr) calling.let_go(item);
    if (key != nullptr) calling.let_go(key);
  }
  if (done || made == nullptr) return made;
  calling.let_go(made);
  return nullptr;
}

void* Unpacker::tensor(void* key) {
  if (end_ - at_ < 5 || *at_ != kTensorCode) return nullptr;
  const std::uint64_t index = little_endian(at_ + 1, 4);
  at_ += 5;
  if (index >= tensors_.size()) return nullptr;
  void* const found = found_->at(index, key);
  return found == nullptr ? nullptr : python_->keep(found);
}

}  // namespace parallel_state
