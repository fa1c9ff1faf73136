// Drives the cores of this process: one thread with one epoll, which never takes Python's lock and makes no decisions.
//
// A `Stay` is this process's membership in one world, from `open_stay` to `leave_stay`. The thread runs while any stay
// exists. A forked child starts without stays and thread, and may open stays of its own.
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

// Passes results of a stay to Python: verdicts to the threads that wait for them, and a queue of other news. Any thread
// may call any function.
class Inbox {
 public:
  enum Kind : std::uint8_t { kDied = 1, kLeft, kVerdict, kQuestion, kReply, kRefused, kLog, kOver };
  bool make() { return wake_.make(); }
  // Drops logs and questions when full, because a peer can cause any number.
  void push(Kind kind, Bytes news);
  // Makes `news` the last news of the queue. Allocates no memory.
  void end(Bytes news) noexcept;
  // Returns the size of the next news, and removes it if it fits into `capacity`; 0: there is none.
  std::size_t take(char* buffer, std::size_t capacity);
  int number() const { return wake_.number(); }  // readable while there is news

  // Expects a verdict of the call; returns false if one is expected already.
  bool expect(const AgreementKey& key);
  // Passes a verdict to the thread that expects it.
  void give(const AgreementKey& key, Bytes news);
  // Waits at most `wait` for the verdict, and copies as much of it as fits. Returns its size, 0 if it has not arrived,
  // or -1 if the stay is over. The verdict is kept until `forget`.
  std::int64_t await(const AgreementKey& key, Nanos wait, char* buffer, std::size_t capacity);
  void forget(const AgreementKey& key);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;         // a verdict arrived, or the stay is over
  std::map<AgreementKey, Bytes> verdicts_;  // empty: expected
  bool over_ = false;
  Wake wake_;
  std::deque<Bytes> news_;
  Bytes last_;
};

// Bytes not yet written to a socket. Connections can share parts.
struct Unsent {
  std::deque<std::shared_ptr<Bytes>> parts;
  std::size_t at = 0;  // bytes of the first part that are written
  std::size_t size = 0;

  bool empty() const { return size == 0; }
  void add(const Bytes& bytes);
  void add(std::shared_ptr<Bytes> part);
  void take(std::size_t count);  // from the front, which has that many
  void clear() { *this = Unsent(); }
};

// A connection, or a dial.
struct Connection {
  Descriptor socket;
  Proc dialed = 0;  // target of the dial; 0 once open
  bool closing = false;
  bool is_guest = false;  // the store serves it
  bool hung_up = false;   // writing failed; reading goes on
  bool polls_out = false;
  Nanos until = kNever;  // deadline of the dial or close
  Unsent out;
  bool is_dialing() const { return dialed != 0; }
};

// Another process of this watch domain.
struct Neighbour {
  Proc proc = 0;
  int pid = 0;
  std::uint64_t began = 0;
  int board_number = -1;  // in its process
  std::string name;
  ProcessWatch watch;
  PeerBoard board;
  bool watched = false;
  bool ended = false;
  bool warned = false;
  Nanos attach_at = kNever;  // when to retry watching it or opening its board
};

struct Stay {
  // Set by `open_stay`:
  Proc proc = 0;
  std::string token;
  int port = 0;
  int limit_s = 0;  // the heartbeat limit
  Descriptor listener;
  Board board;
  Bytes without_memory;  // the last news if there is no memory for any other
  Inbox inbox;
  const std::shared_ptr<EndListeners> listeners = std::make_shared<EndListeners>();
  // Guarded by the fork mutex:
  bool over = false;
  std::condition_variable_any ended;  // with the fork mutex: `over`
  // Guarded by `stepping`:
  std::mutex stepping;
  std::unique_ptr<Core> core;  // another thread may only record it
  Store store;
  Record record;
  // Used by the thread only:
  int rank = -1;         // of this process; -1 until the world is met
  bool has_met = false;  // its neighbours are known, and those boards that could be opened are open
  bool noted_met = false;
  std::map<int, Connection> connections;
  std::map<int, Neighbour> neighbours;
  std::deque<Event> events;
  bool feeding = false;
  Nanos leave_by = kNever;
  int listener_number = -1;
  bool listens = true;
  bool accepts = true;    // false for 0.1 s after descriptors ran out
  Nanos quiet_until = 0;  // shortages aren't logged before this time
};

// Opens a stay that listens at `address`; returns its handle or the negative errno. `first` to `last`: the allowed
// ports; 0: any. `token`: the listener's secret; if empty, a random one.
std::int64_t open_stay(const std::string& address, int first, int last, const std::string& token, Config config,
                       std::shared_ptr<Stay>* made);
std::shared_ptr<Stay> find_stay(std::int64_t handle);
void close_stay(std::int64_t handle);
// Hands an event to the thread; returns false and sets errno if the stay is over. `boards`, with kMeet: the descriptors
// of the members' boards, in rank order.
bool post(const std::shared_ptr<Stay>& stay, Event event, std::vector<int> boards = {});
// Returns the record of the last events.
Bytes record_of(Stay* stay);
// Leaves the world. Returns when other hosts' kernels have the farewell and this host's ranks can read it, at most 1 s
// after the deadline.
void leave_stay(const std::shared_ptr<Stay>& stay, Nanos deadline);

}  // namespace parallel_state::control
