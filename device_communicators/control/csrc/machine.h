// What the driver takes from Linux: descriptors that no forked child keeps, boards, and the ends of processes.
#pragma once

#include <cstdint>
#include <mutex>
#include <utility>

#include "frame.h"

namespace parallel_state::control {

// The clock of a core: equal for all processes of a watch domain.
Nanos monotonic_now();

Bytes random_bytes(std::size_t count);

// Held while something changes that a forked child must find whole; a fork waits for it. A child has a new one.
std::recursive_mutex& fork_mutex();

// Calls `forget` in each forked child, once its descriptors are closed. Called once.
void in_forked_child(void (*forget)());

// Owns a descriptor, which is closed in each forked child.
class Descriptor {
 public:
  Descriptor() = default;
  // `open` returns a descriptor with close-on-exec, or -1 and sets errno.
  template <typename Open>
  static Descriptor of(Open open) {
    const std::lock_guard<std::recursive_mutex> lock(fork_mutex());
    return Descriptor(keep(open()));
  }
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor() { close(); }

  void close();
  int operator*() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }

 private:
  explicit Descriptor(int number) : number_(number) {}
  static int keep(int number);

  int number_ = -1;
};

// Wakes a thread that polls `number()`: an eventfd, or a pipe where a sandbox refuses one.
class Wake {
 public:
  bool make();  // false and errno if there can be none
  void set();
  void clear();
  int number() const { return *reader_; }

 private:
  Descriptor reader_, writer_;
};

// A file without a name, which its process writes and the others of its watch domain open through /proc: so nothing is
// left of it when they exit, however they do. It has two areas for the state, used in turn: a reader finds the last one
// whole whatever becomes of the writer.
struct BoardHead {
  Proc proc = 0;
  std::uint64_t beat = 0;
  std::uint64_t generation = 0;  // its state is in area generation % 2
  std::uint32_t sizes[2] = {0, 0};
  std::uint64_t has_met = 0;  // 1: it has opened the boards of all others
};

class Board {
 public:
  // Returns false and sets errno if there can be none.
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
  // `number` is the descriptor of the board in process `pid`, `proc` who must have made it.
  bool open(int pid, int number, Proc proc);
  // Reads the board; returns true if its beat moved. `state` is set if there is another one than before.
  bool read(Bytes* state, bool* is_new);
  bool has_met() const { return head_.has_met != 0; }
  explicit operator bool() const { return static_cast<bool>(file_); }

 private:
  bool read_head(BoardHead* head) const;

  Descriptor file_;
  BoardHead head_;
};

// Watches one process: by a pidfd, which becomes readable when it exits, or by an open /proc/PID/stat, which never is
// another process' either and must be read now and then.
class ProcessWatch {
 public:
  enum Found { kRuns, kExited, kUnknown };
  // `began`: its start time as in field 22 of /proc/PID/stat; 0: unknown.
  Found open(int pid, std::uint64_t began);
  bool is_polled() const { return polled_; }
  bool has_exited() const;
  int number() const { return *file_; }

 private:
  Descriptor file_;
  bool polled_ = false;
};

// Returns true for a process whose threads all have a SIGKILL to come or are in their exit, which takes a while.
bool is_ending(int pid);

}  // namespace parallel_state::control
