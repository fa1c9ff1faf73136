// Explores the message queue: queue.cpp and the waiting in wait.cpp.
//
//   queue_explorer --readers R --slots S --messages 0,64,100
//
//   --way fit            messages are written at once if there is room
//   --way poll           calls don't wait; the process sleeps as the thread of started calls does
//   --leaver writer      the writer leaves after the last message
//   --leaver reader      readers leave after the first
//   --barriers fail      the kernel has no membarrier
//   --barriers unsure    it registers processes, but can't run one
//   --weaken SITE=ORDER  the operations of that site have this order
//
// Messages are of so many bytes; a slot has room for 64. Checked: readers receive what was sent, nobody accesses a slot
// while it is written, and no process sleeps forever.
#include <sys/uio.h>

#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <unordered_map>

#include "interleavings.h"

#include "wait.cpp"

#include "queue.cpp"

using namespace parallel_state;
using interleavings::machine;

bool parallel_state::interrupted(bool) { return false; }
char* Windows::at(std::uint64_t, std::size_t) { return nullptr; }
bool Lender::lend(const Piece*, int, std::uint64_t, std::vector<LoanRecord>*) { return false; }
void Lender::take_back(const std::vector<LoanRecord>&) {}

namespace {

constexpr std::uint64_t kRoom = 64;
constexpr double kTimeoutS = 1e6;

struct NoLosses : Losses {
  Loss loss(int) const override { return Loss(); }
};

struct Case {
  int readers = 1;
  std::uint64_t slots = 2;
  std::vector<std::uint64_t> messages = {64, 64, 64};
  bool fits = false, polls = false;
  std::string leaver;
};

const NoLosses kNoLosses;
const Case* given = nullptr;

char byte_of(std::uint64_t message, std::uint64_t at) { return static_cast<char>(message * 31 + at + 1); }

void expect(bool holds, const char* what) {
  if (!holds) machine.fail(what);
}

// As the thread of started calls does.
void sleep_until_moved(RingEnd* end) {
  std::uint64_t target = 0, seen = 0;
  Counter* const counter = end->awaited(&target);
  if (!counter->begin_sleep(target, &seen)) return;
  syscall(SYS_futex, counter->word(), FUTEX_WAIT, static_cast<std::uint32_t>(seen), nullptr, nullptr, 0);
  counter->end_sleep();
}

template <typename Try>
QueueStatus until_done(RingEnd* end, Try attempt) {
  if (!given->polls) return attempt(kTimeoutS);
  QueueStatus status = attempt(0);
  while (status == QueueStatus::kTimedOut) {
    sleep_until_moved(end);
    status = attempt(0);
  }
  return status;
}

void write_all(QueueWriter* writer) {
  for (std::uint64_t message = 0; message < given->messages.size(); ++message) {
    char bytes[4 * kRoom];
    const std::uint64_t size = given->messages[message];
    for (std::uint64_t at = 0; at < size; ++at) bytes[at] = byte_of(message, at);
    const Piece piece = {bytes, size};
    if (given->fits && writer->fit(&piece, 1, 1)) {
      writer->write(message);
      continue;
    }
    bool begun = false;
    const QueueStatus status = until_done(writer, [&](double timeout_s) {
      if (begun) return writer->resume(timeout_s);
      begun = true;
      return writer->send(&piece, 1, 1, message, timeout_s);
    });
    if (given->leaver == "reader" && message > given->slots) {  // the readers read the first chunk
      expect(status == QueueStatus::kPeerDied, "a reader that left isn't missed");
      return;
    }
    expect(status == QueueStatus::kDone, "a message can't be sent");
  }
  if (given->leaver == "writer") writer->leave();
}

void read_all(QueueReader* reader) {
  for (std::uint64_t message = 0; message < given->messages.size(); ++message) {
    const std::uint64_t size = given->messages[message];
    QueueStatus status = until_done(reader, [&](double timeout_s) { return reader->next(timeout_s); });
    expect(status == QueueStatus::kDone, "a message can't be received");
    expect(reader->header().fingerprint == message && reader->bytes_left() == size, "another message is received");
    char bytes[4 * kRoom];
    std::uint64_t left = size;
    status = until_done(reader, [&](double timeout_s) {
      // After a timeout the rest is read.
      const Piece piece = {bytes + (size - left), left};
      const QueueStatus found = reader->read(&piece, 1, timeout_s);
      left = reader->bytes_left();
      return found;
    });
    expect(status == QueueStatus::kDone, "a message's rest can't be received");
    for (std::uint64_t at = 0; at < size; ++at) expect(bytes[at] == byte_of(message, at), "other bytes are received");
    if (given->leaver == "reader") return reader->leave();
  }
  if (given->leaver != "writer") return;
  const QueueStatus status = until_done(reader, [&](double timeout_s) { return reader->next(timeout_s); });
  expect(status == QueueStatus::kPeerDied, "a writer that left isn't missed");
}

void set_up() {
  const RingShape shape = {sizeof(ChunkHeader) + kRoom, given->slots, given->readers};
  char* const control = machine.shared();
  char* const data = control + interleavings::kSharedBytes / 2;
  machine.set_data(data, shape.chunk_bytes, shape.chunks);
  machine.name(control, "left");
  auto* const counters = reinterpret_cast<Counter*>(control + shape.control_bytes()) - given->readers - 1;
  for (int each = 0; each <= given->readers; ++each) {
    machine.name(&counters[each].value, "value");
    machine.name(&counters[each].sleepers, "sleepers");
    machine.name(&counters[each].core, "core");
  }
  const int ranks[] = {0, 1, 2, 3};
  WaitPolicy policy;
  policy.spin_ns = 0;
  machine.add("writer", [&] {
    auto* const writer = new QueueWriter(control, data, shape, ranks, 0, kNoLosses, policy);
    return [writer] { write_all(writer); };
  });
  for (int me = 1; me <= given->readers; ++me) {
    machine.add("reader", [&] {
      auto* const reader = new QueueReader(control, data, shape, ranks, me, kNoLosses, policy);
      return [reader] { read_all(reader); };
    });
  }
}

}  // namespace

int main(int count, char** arguments) {
  static Case chosen;
  auto& options = machine.options;
  using interleavings::Options;
  for (int at = 1; at + 1 < count; at += 2) {
    const std::string name = arguments[at], value = arguments[at + 1];
    if (name == "--readers") chosen.readers = std::stoi(value);
    else if (name == "--slots") chosen.slots = std::stoul(value);
    else if (name == "--messages") {
      chosen.messages.clear();
      std::istringstream sizes(value);
      for (std::string size; std::getline(sizes, size, ',');) chosen.messages.push_back(std::stoul(size));
    } else if (name == "--way") {
      chosen.fits = value == "fit";
      chosen.polls = value == "poll";
    } else if (name == "--leaver") {
      chosen.leaver = value;
      options.sleeps_time_out = true;
    } else if (name == "--barriers") {
      options.barriers = value == "fail"     ? Options::kFail
                         : value == "unsure" ? Options::kFailAfterRegistration
                                             : Options::kWork;
    } else if (name == "--weaken") {
      options.weakened = value;
    } else return std::fprintf(stderr, "unknown argument %s\n", arguments[at]), 2;
  }
  given = &chosen;
  const bool holds = machine.explore(set_up);
  if (!holds) machine.print_failure();
  for (const std::string& site : machine.sites()) std::printf("site: %s\n", site.c_str());
  std::printf("%zu states%s\n", machine.states(), holds ? ", all holds" : "");
  return holds ? 0 : 1;
}
