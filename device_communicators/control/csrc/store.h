// The key-value service at a world's listener, as a value without I/O.
//
// A guest is a process that is not a member but proves that it has the listener's token. Its process number is 0. The
// core checks the proof and passes the connection to the store. The guest sends one call at a time. Each call and reply
// ends with a MAC over a counter and the body, so changed, repeated and missing frames are detected. Nothing is
// encrypted.
#pragma once

#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "frame.h"

namespace parallel_state::control {

inline constexpr std::size_t kMostStoreBytes = kMostBodyBytes - 4096;  // of a request or reply without its head and MAC
inline constexpr std::size_t kMostParts = 1U << 17;                    // of a request or reply
inline constexpr std::size_t kSealBytes = 32;

// Returns the HMAC by which one side of a connection proves that it has the listener's token.
Bytes prove(std::string_view token, bool is_dialer, std::string_view nonce_of_dialer,
            std::string_view nonce_of_listener, Proc dialer, Proc listener);

// One direction of a guest's connection. A value.
class Seal {
 public:
  Seal() = default;
  Seal(std::string_view token, bool to_listener, std::string_view nonce_of_guest, std::string_view nonce_of_listener);
  // Appends the MAC to the next body.
  Bytes seal(Bytes body);
  // Removes the MAC; returns false if the peer did not seal this body next.
  bool open(Bytes* body);
  std::uint64_t number() const { return number_; }

 private:
  Bytes mac(std::string_view body);

  Bytes key_;
  std::uint64_t number_ = 0;
};

// A call has a kind and parts. A reply has one of these codes and parts: the answer, a text that names the problem, or
// none.
inline constexpr std::uint8_t kReplied = 0, kProblem = 1, kCancelled = 2;

enum class StoreCall : std::uint8_t {
  kSet = 1,     // parts: keys and values in turn
  kGet,         // keys; answered with their values once all are set
  kAdd,         // key, number; answered with the sum
  kWait,        // keys; answered once all are set
  kCheck,       // keys; answered with "1" if all are set, else "0"
  kCompareSet,  // key, expected, desired; answered with the resulting value
  kDelete,      // key; answered with "1" if it was set, else "0"
  kCount,       // no parts; answered with the number of keys
  kAppend,      // key, bytes to append
  kHold,        // key, value; like kSet, but when the connection ends, gone/KEY replaces KEY
  kQuestion,    // question; answered by the program, not by the table
  kCancel  // no parts; ends this client's kGet or kWait with kCancelled. No reply if that call was answered already
};

// Returns the body of a request or reply.
inline Bytes encode_store(std::uint8_t code, const std::vector<Bytes>& parts) {
  Writer writer;
  put(&writer, std::tie(code, parts));
  return writer.take();
}

// Returns false if the body is malformed.
inline bool decode_store(std::string_view body, std::uint8_t* code, std::vector<Bytes>* parts) {
  Reader reader(body, kMostStoreBytes, kMostParts);
  get(&reader, code);
  get(&reader, parts);
  return reader.finished();
}

// Keys, values, and the clients that wait for keys. Replies as torch's TCPStore does. A value without I/O.
class Table {
 public:
  struct Reply {
    int client;
    Bytes body;
  };
  // Handles a request. Appends its reply, and replies to waiting clients whose keys it sets. Returns false if the
  // request is malformed, or if `client` still waits for a reply and the request is no kCancel.
  bool ask(int client, std::string_view request, std::vector<Reply>* replies);
  bool waits(int client) const { return waits_.count(client) != 0; }
  // Removes a client: drops its wait, and replaces each KEY that it holds by gone/KEY.
  void drop(int client, std::vector<Reply>* replies);

 private:
  struct Wait {
    bool gets = false;
    std::vector<Bytes> keys;
    std::set<Bytes> missing;
  };

  Bytes answer(StoreCall call, const std::vector<Bytes>& parts, int client, std::vector<Reply>* replies);
  void wait_for(int client, bool gets, std::vector<Bytes> keys, std::vector<Reply>* replies);
  bool end_wait(int client);  // returns false if the client does not wait
  void set(const Bytes& key, Bytes value, std::vector<Reply>* replies);

  std::map<Bytes, Bytes> values_;
  std::map<Bytes, int> holders_;            // the client whose end deletes the key
  std::map<int, Wait> waits_;               // by client
  std::map<Bytes, std::set<int>> waiting_;  // clients, by missing key
};

// The guests of a listener, by connection, and their table.
class Store {
 public:
  struct Output {
    int guest;
    Bytes bytes;
    bool is_question = false;  // true: `bytes` is for the program, which answers; false: send it to the guest
  };
  // Adds a guest. `handed`: the bytes of the action kGuest. Returns false if the connection must be closed.
  bool admit(int guest, std::string_view token, std::string_view handed, std::vector<Output>* out);
  // Handles bytes from a guest. Returns false if the connection must be closed.
  bool take(int guest, std::string_view bytes, std::vector<Output>* out);
  // Sends the program's answer to a guest that waits for it.
  void answer(int guest, const Bytes& bytes, std::vector<Output>* out);
  void drop(int guest, std::vector<Output>* out);

 private:
  struct Guest {
    Parser parser;
    Seal in, out;
    bool asks = false;  // waits for the program's answer
  };

  void send(const std::vector<Table::Reply>& replies, std::vector<Output>* out);

  std::map<int, Guest> guests_;
  Table table_;
};

}  // namespace parallel_state::control
