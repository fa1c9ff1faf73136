// A message goes to the oldest receive of its tag and its source, or of any source; a receive takes the oldest held
// message that fits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <list>
#include <optional>
#include <utility>
#include <vector>

namespace parallel_state {

template <typename Receive, typename Message>
class Matcher {
 public:
  using Tag = std::uint64_t;
  static constexpr int kAnySource = -1;

  explicit Matcher(int sources) : by_source_(static_cast<std::size_t>(sources)) {}

  std::optional<Message> post(int source, Tag tag, const Receive& receive) {
    Side* const from = source == kAnySource ? oldest_with(tag) : &side(source);
    if (from != nullptr) {
      const auto at = find(from->messages, tag);
      if (at != from->messages.end()) {
        std::optional<Message> found(std::move(at->what));
        from->messages.erase(at);
        return found;
      }
    }
    (source == kAnySource ? any_source_ : side(source).receives).push_back({++order_, tag, receive});
    return std::nullopt;
  }

  template <typename Make>
  std::optional<Receive> arrive(int source, Tag tag, Make make) {
    Side& from = side(source);
    const auto own = find(from.receives, tag), any = find(any_source_, tag);
    const bool has_own = own != from.receives.end(), has_any = any != any_source_.end();
    if (!has_own && !has_any) {
      from.messages.push_back({++order_, tag, make()});
      return std::nullopt;
    }
    const bool is_own = has_own && (!has_any || own->order < any->order);
    std::optional<Receive> found(std::move(is_own ? own->what : any->what));
    is_own ? from.receives.erase(own) : any_source_.erase(any);
    return found;
  }

  bool wants(int source) const { return !any_source_.empty() || !side(source).receives.empty(); }
  bool is_idle(int source) const { return !wants(source) && side(source).messages.empty(); }
  bool holds(int source) const { return !side(source).messages.empty(); }

  bool cancel(const Receive& receive) {
    const auto remove = [&](std::list<Item<Receive>>& receives) {
      const auto at =
          std::find_if(receives.begin(), receives.end(), [&](const auto& item) { return item.what == receive; });
      if (at == receives.end()) return false;
      receives.erase(at);
      return true;
    };
    return remove(any_source_) ||
           std::any_of(by_source_.begin(), by_source_.end(), [&](Side& each) { return remove(each.receives); });
  }

  template <typename Visit>
  void for_each_held(int source, Visit visit) const {
    for (const auto& item : side(source).messages) visit(item.what);
  }

  void clear() {
    any_source_.clear();
    for (Side& each : by_source_) each = Side();
  }

 private:
  template <typename What>
  struct Item {
    std::uint64_t order;
    Tag tag;
    What what;
  };
  struct Side {
    std::list<Item<Receive>> receives;
    std::list<Item<Message>> messages;
  };

  template <typename Items>
  static auto find(Items& items, Tag tag) {
    return std::find_if(items.begin(), items.end(), [tag](const auto& item) { return item.tag == tag; });
  }

  Side& side(int source) { return by_source_[static_cast<std::size_t>(source)]; }
  const Side& side(int source) const { return by_source_[static_cast<std::size_t>(source)]; }

  Side* oldest_with(Tag tag) {
    Side* found = nullptr;
    std::uint64_t oldest = UINT64_MAX;
    for (Side& each : by_source_) {
      const auto at = find(each.messages, tag);
      if (at == each.messages.end() || at->order >= oldest) continue;
      oldest = at->order;
      found = &each;
    }
    return found;
  }

  std::vector<Side> by_source_;
  std::list<Item<Receive>> any_source_;
  std::uint64_t order_ = 0;
};

}  // namespace parallel_state
