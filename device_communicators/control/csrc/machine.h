#pragma once

#include <cstdint>
#include <mutex>
#include <utility>

#include "frame.h"

namespace parallel_state::control {

Nanos monotonic_now();

Bytes random_bytes(std::size_t count);

// Held during changes that fork must not split. A forked child has a new mutex.
std::recursive_mutex& fork_mutex();

// Calls `forget` in each forked child, after its descriptors are closed.
void in_forked_child(void (*forget)());

// `probes` without an answer end the connection.
void keep_alive(int socket, int idle_s, int interval_s, int probes);

// Owns a descriptor; forked children close it, and find it closed.
class Descriptor {
 public:
  Descriptor() = default;
  // `open` returns a close-on-exec descriptor, or -1 and errno.
  template <typename Open>
  static Descriptor of(Open open) {
    const std::lock_guard<std::recursive_mutex> lock(fork_mutex());
    return Descriptor(open());
  }
  Descriptor(Descriptor&& other) noexcept { *this = std::move(other); }
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    std::swap(process_, other.process_);
    return *this;
  }
  ~Descriptor() { close(); }

  void close();
  int operator*() const { return number_; }
  explicit operator bool() const;

 private:
  explicit Descriptor(int number);

  int number_ = -1;
  const void* process_ = nullptr;
};

// `host`: a numeric address. Returns no descriptor, and sets errno, if it fails.
Descriptor begin_dial(const std::string& host, int port);
int dial_error(int socket);
// Sets `port` to the listener's. Fails as begin_dial.
Descriptor listen_at(const std::string& address, int* port);

class Wake {
 public:
  bool make();
  void set();
  void clear();
  int number() const { return *reader_; }

 private:
  Descriptor reader_, writer_;
};

// Head of a nameless file, which the watch domain opens through /proc. States alternate between two areas, so that a
// kill during a write leaves the other. Bytes 64 to 4095: the endpoint as JSON, which plane.py writes.
struct BoardHead {
  Proc proc = 0;
  std::uint64_t beat = 0;
  std::uint64_t generation = 0;  // the state is in area generation % 2
  std::uint32_t sizes[2] = {0, 0};
  std::uint64_t has_met = 0;  // all others' boards are open
};

class Board {
 public:
  bool make(Proc proc);
  bool publish(const Bytes& state);
  void beat();
  void note_met();
  int number() const { return *file_; }
  void close() { file_.close(); }

 private:
  bool write_head();

  Descriptor file_;
  BoardHead head_;
};

class PeerBoard {
 public:
  bool open(int pid, int number, Proc proc);
  // Returns true if the beat moved. `is_new`: `state` was set.
  bool read(Bytes* state, bool* is_new);
  bool has_met() const { return head_.has_met != 0; }
  explicit operator bool() const { return static_cast<bool>(file_); }

 private:
  bool read_head(BoardHead* head) const;

  Descriptor file_;
  BoardHead head_;
};

// A pidfd, or /proc/PID/stat, which must be polled. Neither refers to a later process with the same PID.
class ProcessWatch {
 public:
  enum Found { kRuns, kExited, kUnknown };
  Found open(int pid, std::uint64_t began);
  bool is_polled() const { return polled_; }
  bool has_exited() const;
  int number() const { return *file_; }

 private:
  Descriptor file_;
  bool polled_ = false;
};

// True if the process exited, or each thread of it is exiting or has a pending SIGKILL.
bool is_ending(int pid);

}  // namespace parallel_state::control
