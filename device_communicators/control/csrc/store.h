// The key-value service at a world's listener, as a value without I/O.
//
// A guest is a process that proves the listener's token but is not a member. Its process number is 0. The core checks
// the proof and hands the connection over. The guest sends one call at a time. Each call and reply ends with a MAC over
// a counter and the body, so changed, repeated and missing frames are detected. Nothing is encrypted.
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

// Returns the HMAC with the listener's token by which one side of a connection proves to hold it.
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

// A call is its kind and its parts. A reply is one of these and parts: those of the answer, a text that names the
// problem, or none.
inline constexpr std::uint8_t kReplied = 0, kProblem = 1, kCancelled = 2;

enum class StoreCall : std::uint8_t {
  kSet = 1,     // keys and values in turn
  kGet,         // keys; answered with their values once all are set
  kAdd,         // key, number; the sum
  kWait,        // keys; answered once all are set
  kCheck,       // keys; "1" if all are set, else "0"
  kCompareSet,  // key, expected, desired; the value after that
  kDelete,      // key; "1" if it was set, else "0"
  kCount,       // the number of keys
  kAppend,      // key, more
  kHold,        // key, value; as kSet, and when the connection ends, gone/KEY replaces KEY
  kQuestion,    // question; answered by the program, not by the table
  kCancel       // none; ends this client's kGet or kWait with kCancelled. Not answered if it is answered already
};

// Returns the body of a request or reply.
Bytes encode_store(std::uint8_t code, const std::vector<Bytes>& parts);
// Returns false if the body is malformed.
bool decode_store(std::string_view body, std::uint8_t* code, std::vector<Bytes>* parts);

// Keys, values, and the clients that wait for keys. Gives the answers of torch's TCPStore. A value without I/O.
class Table {
 public:
  struct Reply {
    int client;
    Bytes body;
  };
  // Takes in a request. Appends its reply, and those that it causes for waiting clients. Returns false if it is
  // malformed, or if `client` still waits for a reply and does not cancel.
  bool ask(int client, std::string_view request, std::vector<Reply>* replies);
  bool waits(int client) const { return waits_.count(client) != 0; }
  // Forgets a client: drops its wait, and replaces each KEY that it holds by gone/KEY.
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
    Bytes bytes;               // to send
    bool is_question = false;  // or to hand to the program, which answers
  };
  // Adds a guest. `handed`: the bytes of kGuest. Like `take`, returns false if the connection must be closed.
  bool admit(int guest, std::string_view token, std::string_view handed, std::vector<Output>* out);
  // Takes in bytes of a guest.
  bool take(int guest, std::string_view bytes, std::vector<Output>* out);
  // Sends the program's answer to a guest that waits for it.
  void answer(int guest, const Bytes& bytes, std::vector<Output>* out);
  void drop(int guest, std::vector<Output>* out);

 private:
  struct Guest {
    Parser parser;
    Seal in, out;
    bool asks = false;  // the program, which has not answered yet
  };

  void send(const std::vector<Table::Reply>& replies, std::vector<Output>* out);

  std::map<int, Guest> guests_;
  Table table_;
};

}  // namespace parallel_state::control
