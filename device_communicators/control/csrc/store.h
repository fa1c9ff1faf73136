// The key-value service of a world's listener, as a value without I/O.
//
// A guest is no member. The core checks its proof of the token. A guest sends one call at a time. Calls and replies end
// with a MAC over a counter and the body. Nothing is encrypted.
#pragma once

#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "frame.h"

namespace parallel_state::control {

inline constexpr std::size_t kMostStoreBytes = kMostBodyBytes - 4096;  // without head and MAC
inline constexpr std::size_t kMostParts = 1U << 17;
inline constexpr std::size_t kSealBytes = 32;

Bytes prove(std::string_view token, bool is_dialer, std::string_view nonce_of_dialer,
            std::string_view nonce_of_listener, Proc dialer, Proc listener);

class Seal {
 public:
  Seal() = default;
  Seal(std::string_view token, bool to_listener, std::string_view nonce_of_guest, std::string_view nonce_of_listener);
  Bytes seal(Bytes body);
  bool open(Bytes* body);
  std::uint64_t number() const { return number_; }

 private:
  Bytes mac(std::string_view body);

  Bytes key_;
  std::uint64_t number_ = 0;
};

// Codes of replies. Parts: the answer, a problem's text, or none.
inline constexpr std::uint8_t kReplied = 0, kProblem = 1, kCancelled = 2;

enum class StoreCall : std::uint8_t {
  kSet = 1,     // keys and values in turn
  kGet,         // keys; returns their values once all are set
  kAdd,         // key, number; returns the sum
  kWait,        // keys; returns once all are set
  kCheck,       // keys; returns "1" or "0"
  kCompareSet,  // key, expected, desired; returns the resulting value
  kDelete,      // key; returns "1" if it was set
  kCount,
  kAppend,  // key, bytes
  kHold,    // key, value; gone/KEY replaces KEY when the connection ends
  kQuestion,
  kCancel  // ends kGet or kWait; no reply if that was answered
};

inline Bytes encode_store(std::uint8_t code, const std::vector<Bytes>& parts) { return packed(code, parts); }

inline bool decode_store(std::string_view body, std::uint8_t* code, std::vector<Bytes>* parts) {
  Reader reader(body, kMostStoreBytes, kMostParts);
  get(&reader, code);
  get(&reader, parts);
  return reader.finished();
}

class Store {
 public:
  struct Output {
    int guest;
    Bytes bytes;
    bool is_question = false;
  };
  // Each method appends replies to `out`, also to guests whose last missing key was set.

  // Returns false if the connection must be closed.
  bool admit(int guest, std::string_view token, std::string_view handed, std::vector<Output>* out);
  bool take(int guest, std::string_view bytes, std::vector<Output>* out);
  void answer(int guest, const Bytes& bytes, std::vector<Output>* out);
  void drop(int guest, std::vector<Output>* out);

 private:
  struct Guest {
    Parser parser;
    Seal in, out;
    bool asks = false;
    bool gets = false;
    std::vector<Bytes> keys;
    std::set<Bytes> missing;
  };

  bool ask(int guest, std::string_view request, std::vector<Output>* out);
  std::vector<Bytes> carry_out(StoreCall call, const std::vector<Bytes>& parts, int guest, std::vector<Output>* out);
  void wait_for(int guest, std::vector<Output>* out);
  bool end_wait(int guest);
  void set(const Bytes& key, Bytes value, std::vector<Output>* out);
  void reply(int guest, Bytes body, std::vector<Output>* out);

  std::map<int, Guest> guests_;
  std::map<Bytes, Bytes> values_;
  std::map<Bytes, int> holders_;
  std::map<Bytes, std::set<int>> waiting_;
};

}  // namespace parallel_state::control
