#ifdef __linux__
#include "machine.h"

#include <dirent.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace parallel_state::control {
namespace {

constexpr off_t kAreaBytes = 2 << 20;  // exceeds a state of 4,096 members with causes
constexpr off_t kFirstArea = 4096;
constexpr int kExitingFlag = 4;
#ifndef SYS_pidfd_open
constexpr long SYS_pidfd_open = 434;
#endif

struct Open {
  std::recursive_mutex mutex;
  std::set<int> descriptors;
};

// Never freed: threads may use it at exit.
std::atomic<Open*> open_now{nullptr};
std::atomic<void (*)()> forget_in_child{nullptr};

void before_fork() { open_now.load()->mutex.lock(); }
void after_fork() { open_now.load()->mutex.unlock(); }
void in_child() {
  for (const int number : open_now.load()->descriptors) ::close(number);
  open_now = new Open;
  if (void (*forget)() = forget_in_child.load()) forget();
}

Open& open_descriptors() {
  static const bool once = [] {
    open_now = new Open;
    pthread_atfork(before_fork, after_fork, in_child);
    return true;
  }();
  static_cast<void>(once);
  return *open_now.load();
}

// From the third field on; none if the process has exited.
std::vector<std::string> stat_fields(int file) {
  char text[1024];
  const ssize_t size = pread(file, text, sizeof(text), 0);
  std::vector<std::string> fields;
  if (size <= 0) return fields;
  const std::string all(text, static_cast<std::size_t>(size));
  std::size_t at = all.rfind(") ");
  if (at == std::string::npos) return fields;
  at += 2;
  while (at < all.size()) {
    const std::size_t end = std::min(all.find(' ', at), all.size());
    fields.push_back(all.substr(at, end - at));
    at = end + 1;
  }
  return fields;
}

Descriptor open_file(const std::string& path) {
  return Descriptor::of([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY); });
}

bool is_thread_ending(const std::string& path) {
  const Descriptor file = open_file(path);
  if (!file) return errno == ENOENT || errno == ESRCH;
  const auto fields = stat_fields(*file);
  if (fields.size() < 29) return true;
  const unsigned long pending = std::strtoul(fields[28].c_str(), nullptr, 10);
  return (std::strtoul(fields[6].c_str(), nullptr, 10) & kExitingFlag) != 0 || (pending >> (SIGKILL - 1) & 1) != 0;
}

}  // namespace

Nanos monotonic_now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * Nanos{1'000'000'000} + time.tv_nsec;
}

Bytes random_bytes(std::size_t count) {
  Bytes bytes(count, '\0');
  if (getrandom(bytes.data(), count, 0) == static_cast<ssize_t>(count)) return bytes;
  std::random_device device;  // if a sandbox refuses getrandom
  for (char& byte : bytes) byte = static_cast<char>(device());
  return bytes;
}

std::recursive_mutex& fork_mutex() { return open_descriptors().mutex; }

void in_forked_child(void (*forget)()) {
  open_descriptors();
  forget_in_child = forget;
}

void keep_alive(int socket, int idle_s, int interval_s, int probes) {
  const int on = 1;
  setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof(idle_s));
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof(interval_s));
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
}

Descriptor::Descriptor(int number) : number_(number), process_(&open_descriptors()) {
  if (number >= 0) open_descriptors().descriptors.insert(number);
}

Descriptor::operator bool() const { return number_ >= 0 && process_ == &open_descriptors(); }

void Descriptor::close() {
  if (!*this) return;
  const std::lock_guard<std::recursive_mutex> lock(fork_mutex());
  open_descriptors().descriptors.erase(number_);
  ::close(std::exchange(number_, -1));
}

namespace {

// `use(socket, address, size)` returns 0 if it succeeds.
template <typename Use>
Descriptor open_socket(const std::string& host, int port, Use use) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0)
    return errno = EADDRNOTAVAIL, Descriptor();
  auto made = Descriptor::of([&] { return socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); });
  const bool fine = made && use(*made, found->ai_addr, found->ai_addrlen) == 0;
  const int code = errno;
  freeaddrinfo(found);
  if (!fine) made.close();
  errno = code;
  return made;
}

}  // namespace

Descriptor begin_dial(const std::string& host, int port) {
  return open_socket(host, port, [](int socket, const sockaddr* address, socklen_t size) {
    const int on = 1;
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    return connect(socket, address, size) == 0 || errno == EINPROGRESS ? 0 : -1;
  });
}

int dial_error(int socket) {
  int code = 0;
  socklen_t size = sizeof(code);
  getsockopt(socket, SOL_SOCKET, SO_ERROR, &code, &size);
  if (code != 0) return code;
  // A dialed closed local port can connect to itself (TCP simultaneous open).
  sockaddr_storage own{}, peer{};
  socklen_t own_size = sizeof(own), peer_size = sizeof(peer);
  const bool is_known = getsockname(socket, reinterpret_cast<sockaddr*>(&own), &own_size) == 0 &&
                        getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &peer_size) == 0;
  return is_known && own_size == peer_size && std::memcmp(&own, &peer, own_size) == 0 ? ECONNREFUSED : 0;
}

Descriptor listen_at(const std::string& address, int* port) {
  return open_socket(address, *port, [port](int socket, const sockaddr* at, socklen_t at_size) {
    sockaddr_storage own{};
    socklen_t size = sizeof(own);
    // Closed connections occupy their port for a minute. Another listener still makes bind or listen fail.
    const int on = 1;
    setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (bind(socket, at, at_size) != 0 || listen(socket, 4096) != 0) return -1;
    if (getsockname(socket, reinterpret_cast<sockaddr*>(&own), &size) != 0) return -1;
    *port = ntohs(own.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(own).sin6_port
                                            : reinterpret_cast<sockaddr_in&>(own).sin_port);
    return 0;
  });
}

bool Wake::make() {
  reader_ = Descriptor::of([] { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); });
  if (reader_) return true;
  int ends[2] = {-1, -1};
  reader_ = Descriptor::of([&] { return pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0 ? ends[0] : -1; });
  writer_ = Descriptor::of([&] { return ends[1]; });
  return static_cast<bool>(reader_);
}

void Wake::set() {
  const std::uint64_t one = 1;
  static_cast<void>(!write(writer_ ? *writer_ : *reader_, &one, sizeof(one)));
}

void Wake::clear() {
  char bytes[512];
  while (read(*reader_, bytes, sizeof(bytes)) == sizeof(bytes)) continue;
}

bool Board::make(Proc proc) {
  head_.proc = proc;
  file_ = Descriptor::of([] { return memfd_create("ps-control", MFD_CLOEXEC); });
  if (!file_) file_ = Descriptor::of([] { return ::open("/dev/shm", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600); });
  return file_ && write_head();
}

bool Board::write_head() { return pwrite(*file_, &head_, sizeof(head_), 0) == static_cast<ssize_t>(sizeof(head_)); }

bool Board::publish(const Bytes& state) {
  const std::uint64_t area = (head_.generation + 1) % 2;
  const off_t at = kFirstArea + static_cast<off_t>(area) * kAreaBytes;
  if (static_cast<off_t>(state.size()) > kAreaBytes ||
      pwrite(*file_, state.data(), state.size(), at) != static_cast<ssize_t>(state.size())) {
    return false;
  }
  head_.sizes[area] = static_cast<std::uint32_t>(state.size());
  ++head_.generation;
  return write_head();
}

void Board::beat() {
  ++head_.beat;
  write_head();
}

void Board::note_met() {
  head_.has_met = 1;
  write_head();
}

bool PeerBoard::open(int pid, int number, Proc proc) {
  // The process may have reused the number.
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(number);
  struct stat info;
  if (stat(path.c_str(), &info) != 0 || !S_ISREG(info.st_mode)) return false;
  file_ = open_file(path);
  BoardHead head;
  if (file_ && (!read_head(&head) || head.proc != proc)) file_.close();
  return static_cast<bool>(file_);
}

bool PeerBoard::read_head(BoardHead* head) const {
  return pread(*file_, head, sizeof(*head), 0) == static_cast<ssize_t>(sizeof(*head));
}

bool PeerBoard::read(Bytes* state, bool* is_new) {
  *is_new = false;
  BoardHead head, again;
  if (!file_ || !read_head(&head)) return false;
  const bool moved = head.beat != head_.beat;
  const std::uint64_t known = head_.generation;
  const std::uint64_t area = head.generation % 2;
  head_ = head;
  head_.generation = known;
  if (head.generation == known || head.sizes[area] > kAreaBytes) return moved;
  state->resize(head.sizes[area]);
  const off_t at = kFirstArea + static_cast<off_t>(area) * kAreaBytes;
  if (pread(*file_, state->data(), state->size(), at) != static_cast<ssize_t>(state->size())) return moved;
  // If the writer is overwriting this area, the next read returns the new state.
  if (!read_head(&again) || again.generation != head.generation || again.sizes[area] != head.sizes[area]) return moved;
  head_.generation = head.generation;
  *is_new = true;
  return moved;
}

ProcessWatch::Found ProcessWatch::open(int pid, std::uint64_t began) {
  if (pid <= 0) return kUnknown;
  const std::string path = "/proc/" + std::to_string(pid) + "/stat";
  file_ = Descriptor::of([&] { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); });
  if (!file_ && errno == ESRCH) return kExited;
  polled_ = static_cast<bool>(file_);
  // Kernels before 5.3 and sandboxes have no pidfds. A stat read after the pidfd was opened is of the same process.
  Descriptor stat = open_file(path);
  if (!stat) return !polled_ && (errno == ENOENT || errno == ESRCH) ? kExited : polled_ ? kRuns : kUnknown;
  const auto fields = stat_fields(*stat);
  if (fields.empty() || (began != 0 && fields.size() > 19 && std::to_string(began) != fields[19])) return kExited;
  if (!polled_) file_ = std::move(stat);
  return kRuns;
}

bool ProcessWatch::has_exited() const {
  if (polled_) {
    pollfd exit{*file_, POLLIN, 0};
    return poll(&exit, 1, 0) > 0 && (exit.revents & POLLIN) != 0;
  }
  char byte;
  if (pread(*file_, &byte, 1, 0) < 0 && errno == ESRCH) return true;
  const auto fields = stat_fields(*file_);
  // State is Z, too, if only the main thread exited.
  return fields.size() > 17 && (fields[0] == "Z" || fields[0] == "X" || fields[0] == "x") &&
         std::strtol(fields[17].c_str(), nullptr, 10) <= 1;
}

bool is_ending(int pid) {
  const std::string folder = "/proc/" + std::to_string(pid) + "/task";
  const std::lock_guard<std::recursive_mutex> lock(fork_mutex());  // or a forked child keeps the folder open
  DIR* tasks = opendir(folder.c_str());
  if (tasks == nullptr) return (errno == ENOENT || errno == ESRCH) && access("/proc/self/task", F_OK) == 0;
  bool all = true;
  while (const dirent* task = readdir(tasks)) {
    if (task->d_name[0] != '.') all = all && is_thread_ending(folder + "/" + task->d_name + "/stat");
  }
  closedir(tasks);
  return all;
}

}  // namespace parallel_state::control
#endif
