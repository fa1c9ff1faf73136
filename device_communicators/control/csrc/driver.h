// Drives the cores of this process: one thread with one epoll, which takes no interpreter lock.
//
// The thread runs while any `Stay`, a membership in one world, exists. A forked child starts without them.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core.h"
#include "end_listeners.h"
#include "machine.h"
#include "store.h"
#include "record.h"

namespace parallel_state::control {

// Passes verdicts to waiting Python threads, other news to a queue. Thread-safe.
class Inbox {
 public:
  enum Kind : std::uint8_t { kDied = 1, kLeft, kVerdict, kQuestion, kRefused, kLog, kOver };
  bool make() { return wake_.make(); }
  // Drops logs and questions when full.
  void push(Kind kind, const Action& news);
  // Makes `news` the last of the queue. Allocates no memory.
  void end(Bytes news) noexcept;
  // Returns the size of the next news; removes it if it fits.
  std::size_t take(char* buffer, std::size_t capacity);
  int number() const { return wake_.number(); }

  bool expect(const AgreementKey& key);
  void give(Kind kind, const Action& news);
  // Returns the size, 0 if it hasn't arrived, or -1 if the stay is over. Copies what fits.
  std::int64_t await(const AgreementKey& key, Nanos wait, char* buffer, std::size_t capacity);
  void forget(const AgreementKey& key);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<AgreementKey, Bytes> verdicts_;  // empty: expected
  bool over_ = false;
  Wake wake_;
  std::deque<Bytes> news_;
  Bytes last_;
};

struct Unsent {
  std::deque<std::shared_ptr<const Bytes>> parts;
  std::size_t at = 0;
  std::size_t size = 0;

  bool empty() const { return size == 0; }
  void add(std::shared_ptr<const Bytes> part);
  void take(std::size_t count);
  void clear() { *this = Unsent(); }
};

struct Connection {
  Descriptor socket;
  Proc dialed = 0;  // 0 once open
  bool closing = false;
  bool is_guest = false;
  bool hung_up = false;  // can't write, but still reads
  bool polls_out = false;
  Nanos until = kNever;
  Unsent out;
  bool is_dialing() const { return dialed != 0; }
};

struct Neighbour {
  Member member;
  int board_number = -1;
  ProcessWatch watch;
  PeerBoard board;
  bool watched = false;
  bool ended = false;
  bool warned = false;
  Nanos attach_at = kNever;
};

struct Stay {
  // Set by `open_stay`:
  Proc proc = 0;
  std::string token;
  int port = 0;
  int limit_s = 0;
  Descriptor listener;
  Board board;
  Bytes without_memory;  // last news if memory runs out
  Inbox inbox;
  const std::shared_ptr<EndListeners> listeners = std::make_shared<EndListeners>();
  // Guarded by the fork mutex:
  bool over = false;
  std::condition_variable_any ended;
  // Guarded by `stepping`:
  std::mutex stepping;
  std::unique_ptr<Core> core;  // other threads may only record it
  Store store;
  Record record;
  // Used by the thread only:
  int rank = -1;
  bool has_met = false;  // neighbours are known, and their boards open if possible
  bool noted_met = false;
  std::map<int, Connection> connections;
  std::map<int, Neighbour> neighbours;
  std::deque<Event> events;
  bool feeding = false;
  Nanos leave_by = kNever;
  int listener_number = -1;
  bool listens = true;
  bool accepts = true;    // false while descriptors are short
  Nanos quiet_until = 0;  // no shortage is logged before
};

// Returns a handle or the negative errno. Port 0: any. `token`: random if empty.
std::int64_t open_stay(const std::string& address, int first, int last, const std::string& token, Config config,
                       std::shared_ptr<Stay>* made);
std::shared_ptr<Stay> find_stay(std::int64_t handle);
void close_stay(std::int64_t handle);
// Returns false and sets errno if the stay is over. `boards`: descriptors of the members' boards, with kMeet.
bool post(const std::shared_ptr<Stay>& stay, Event event, std::vector<int> boards = {});
bool post_reply(const std::shared_ptr<Stay>& stay, int guest, Bytes reply);
Bytes record_of(Stay* stay);
// Returns when other hosts' kernels have the farewell, at most 1 s after the deadline.
void leave_stay(const std::shared_ptr<Stay>& stay, Nanos deadline);

}  // namespace parallel_state::control
