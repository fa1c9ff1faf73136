#include "frame.h"

#include <utility>

namespace parallel_state::control {
namespace {

constexpr std::uint64_t kMagic = 0x314c525443535000;  // "\0PSCTRL1": text never begins with 0

}  // namespace

Bytes encode(const Hello& hello) {
  return Writer().number(kMagic).number(hello.version).number(hello.oldest).number(hello.build).number(0U).take();
}

Bytes encode(const Frame& frame) {
  Bytes bytes = Writer()
                    .number(static_cast<std::uint32_t>(frame.body.size()))
                    .number(kVersion)
                    .number(static_cast<std::uint16_t>(frame.kind))
                    .number(frame.world)
                    .number(frame.from)
                    .take();
  bytes += frame.body;
  return bytes;
}

Parser::Result Parser::next(Hello* hello, Frame* frame) {
  if (malformed_) return Result::kMalformed;
  Reader reader(rest());
  if (!has_hello_) {
    if (rest().size() < kHelloBytes) {
      // A foreign peer may never send the rest.
      const Bytes magic = Writer().number(kMagic).take();
      const std::string_view known = rest().substr(0, magic.size());
      malformed_ = known != std::string_view(magic).substr(0, known.size());
      return malformed_ ? Result::kMalformed : Result::kNeedsMore;
    }
    malformed_ = reader.number<std::uint64_t>() != kMagic;
    if (malformed_) return Result::kMalformed;
    hello->version = reader.number<std::uint16_t>();
    hello->oldest = reader.number<std::uint16_t>();
    hello->build = reader.number<std::uint32_t>();
    has_hello_ = true;
    offset_ += kHelloBytes;
    return Result::kHello;
  }
  const auto wait = [&] {
    buffer_.erase(0, offset_);
    offset_ = 0;
    return Result::kNeedsMore;
  };
  if (rest().size() < kHeadBytes) return wait();
  const auto size = reader.number<std::uint32_t>();
  const auto version = reader.number<std::uint16_t>();
  const auto kind = reader.number<std::uint16_t>();
  malformed_ = size > most_body_bytes_ || version != kVersion || kind < static_cast<int>(FrameKind::kNonce) ||
               kind > static_cast<int>(FrameKind::kStoreReply);
  if (malformed_) return Result::kMalformed;
  if (rest().size() < kHeadBytes + size) return wait();
  frame->kind = static_cast<FrameKind>(kind);
  frame->world = reader.number<std::uint64_t>();
  frame->from = reader.number<Proc>();
  frame->body.assign(rest().substr(kHeadBytes, size));
  offset_ += kHeadBytes + size;
  return Result::kFrame;
}

}  // namespace parallel_state::control
