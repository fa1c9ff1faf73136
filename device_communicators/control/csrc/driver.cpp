#ifdef __linux__
#include "driver.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <linux/sockios.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <stdexcept>
#include <tuple>

namespace parallel_state::control {
namespace {

constexpr Nanos kDialTime = 2 * kSecond;
constexpr Nanos kCloseTime = 2 * kSecond;
constexpr Nanos kPoll = 5 * kMillisecond;  // acknowledgements and boards raise no event
constexpr Nanos kShortage = kSecond / 10;  // of accept, after descriptors ran out
constexpr Nanos kQuiet = 60 * kSecond;
constexpr Nanos kAttach = kSecond;
constexpr std::size_t kMostUnsent = 64U << 20;
constexpr std::size_t kReadBytes = 64U << 10;
constexpr int kReads = 4;  // of one connection before others are read
constexpr int kAccepts = 64;
constexpr std::size_t kMostNews = 4096;
constexpr std::size_t kStackBytes = 1U << 20;  // includes libraries' thread-local storage

struct Command {
  std::shared_ptr<Stay> stay;
  Event event;
  std::vector<int> boards;
  int guest = 0;  // `event.bytes` answer its question
};

void send_at_once(int socket) {
  const int on = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

// A FIN counts as one byte.
int unacknowledged(int socket) {
  int count = 0;
  return ioctl(socket, SIOCOUTQ, &count) == 0 ? count : 0;
}

std::string peer_of(int socket) {
  sockaddr_storage peer{};
  socklen_t size = sizeof(peer);
  char host[NI_MAXHOST] = "?", port[NI_MAXSERV] = "?";
  if (getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &size) == 0) {
    getnameinfo(reinterpret_cast<sockaddr*>(&peer), size, host, sizeof(host), port, sizeof(port),
                NI_NUMERICHOST | NI_NUMERICSERV);
  }
  return std::string(host) + ":" + port;
}

Event event_of(Event::Kind kind, Proc proc, int connection = -1) {
  Event event;
  event.kind = kind;
  event.proc = proc;
  event.connection = connection;
  return event;
}

Action news_of(const char* text, bool is_warning) {
  Action news;
  news.flags = is_warning;
  news.bytes = text;
  return news;
}

Bytes last_news(const char* cause) {
  return packed(Inbox::kOver, news_of(cause == nullptr ? "" : cause, cause != nullptr));
}

class Driver;

struct Plane {
  std::map<std::int64_t, std::shared_ptr<Stay>> stays;
  Driver* driver = nullptr;
};

Plane* plane = nullptr;        // guarded by the fork mutex
std::int64_t next_handle = 1;  // kept over a fork, so that a child's handles differ

Plane& own_plane() {
  if (plane == nullptr) {
    plane = new Plane;
    in_forked_child([] { plane = nullptr; });
  }
  return *plane;
}

using Lock = std::unique_lock<std::recursive_mutex>;

class Driver {
 public:
  enum Source { kListener, kConnection, kNeighbour };

  static Driver* start() {
    auto driver = std::make_unique<Driver>();
    driver->epoll_ = Descriptor::of([] { return epoll_create1(EPOLL_CLOEXEC); });
    if (!driver->epoll_ || !driver->wake_.make()) return nullptr;
    if (!driver->control(EPOLL_CTL_ADD, 0, driver->wake_.number(), EPOLLIN)) return nullptr;
    // The thread must not run signal handlers.
    sigset_t all, before;
    sigfillset(&all);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, kStackBytes);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    const int code = pthread_create(&thread, &attributes, run_thread, driver.get());
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_attr_destroy(&attributes);
    errno = code;
    return code == 0 ? driver.release() : nullptr;
  }

  static void* run_thread(void* given) {
    const std::unique_ptr<Driver> driver(static_cast<Driver*>(given));
    pthread_setname_np(pthread_self(), "ps-control");
    try {
      driver->run();
    } catch (const std::exception& error) {
      driver->break_down(error.what());
    } catch (...) {
      driver->break_down("an unknown exception");
    }
    return nullptr;
  }

  void run() {
    epoll_event ready[64];
    while (true) {
      std::vector<Command> commands;
      {
        const Lock lock(fork_mutex());
        commands.swap(commands_);
      }
      for (Command& command : commands) obey(std::move(command));
      commands.clear();
      check_timed(monotonic_now());
      for (auto at = stays_.begin(); at != stays_.end();) tend((at++)->first);
      if (stays_.empty() && retire()) return;
      const int count = epoll_wait(*epoll_, ready, 64, wait_ms());
      if (count < 0 && errno != EINTR) throw std::runtime_error(std::string("epoll_wait: ") + std::strerror(errno));
      for (int i = 0; i < count; ++i) on_ready(static_cast<int>(ready[i].data.u64), ready[i].events);
    }
  }

  bool retire() {
    const Lock lock(fork_mutex());
    if (!commands_.empty()) return false;
    own_plane().driver = nullptr;
    return true;
  }

  void break_down(const char* cause) noexcept {
    const Lock lock(fork_mutex());
    plane->driver = nullptr;
    for (auto& [stay, shared] : stays_) end(stay, cause);
    for (Command& command : commands_) end(command.stay.get(), cause);
  }

  // `cause`: null after a farewell.
  static void end(Stay* stay, const char* cause) noexcept {
    const Lock lock(fork_mutex());
    if (std::exchange(stay->over, true)) return;
    stay->connections.clear();
    stay->neighbours.clear();
    stay->listener.close();
    stay->board.close();
    try {
      if (cause != nullptr && stay->rank >= 0) stay->listeners->report(stay->rank, true);
      stay->inbox.end(last_news(cause));
    } catch (...) {
      stay->inbox.end(std::move(stay->without_memory));
    }
    stay->ended.notify_all();
  }

  void post(Command command) {
    commands_.push_back(std::move(command));
    wake_.set();
  }

  int wait_ms() const {
    const Nanos now = monotonic_now();
    Nanos next = kNever;
    for (const auto& [number, stay] : timed_) {
      const Connection& connection = stay->connections.at(number);
      next = std::min(next, connection.is_dialing() ? connection.until : now + kPoll);
    }
    for (const auto& [stay, shared] : stays_) {
      next = std::min(next, stay->core->wake_at());
      if (stay->leave_by != kNever) next = std::min(next, now + kPoll);
      if (!stay->accepts) next = std::min(next, std::max(shortage_until_, now + kPoll));
    }
    if (next == kNever) return -1;
    return static_cast<int>(std::clamp<Nanos>((next - now + kMillisecond - 1) / kMillisecond, 0, 60'000));
  }

  void on_ready(int number, std::uint32_t events) {
    if (number == 0) {
      wake_.clear();
      return;
    }
    const auto found = sources_.find(number);
    if (found == sources_.end()) return;
    const auto [stay, source] = found->second;
    if (source == kListener) accept(stay);
    else if (source == kConnection) on_connection(stay, number, events);
    else on_end(stay, &stay->neighbours.at(number));
  }

  void obey(Command command) {
    Stay* stay = command.stay.get();
    if (stay->over) return;
    if (stays_.emplace(stay, command.stay).second) {
      stay->listener_number = add(stay, kListener, *stay->listener, EPOLLIN);
      if (stay->listener_number < 0) {
        end(stay, (std::string("epoll_ctl for the listener: ") + std::strerror(errno)).c_str());
        stays_.erase(stay);
        return;
      }
    }
    if (command.event.kind == Event::kMeet) return meet(stay, command.event, command.boards);
    if (command.event.kind == Event::kLeave) stay->leave_by = command.event.deadline;
    if (command.guest != 0) {
      std::vector<Store::Output> replies;
      stay->store.answer(command.guest, command.event.bytes, &replies);
      reply(stay, replies);
      return flush_all();
    }
    feed(stay, std::move(command.event));
  }

  void tend(Stay* stay) {
    const Nanos now = monotonic_now();
    if (now >= stay->core->wake_at()) feed(stay, Event{});
    if (!stay->accepts && stay->listens && now >= shortage_until_) {
      stay->accepts = control(EPOLL_CTL_MOD, stay->listener_number, *stay->listener, EPOLLIN);
    }
    if (stay->leave_by == kNever) return;
    if (stay->core->is_over() && stay->listens) {
      // Closing connections still have bytes to send; the others end now.
      stay->listens = !control(EPOLL_CTL_DEL, 0, *stay->listener, 0);
      stay->store = Store();
      for (auto at = stay->connections.begin(); at != stay->connections.end();) {
        const int number = at->first;
        const bool closing = at->second.closing;
        ++at;
        if (!closing) erase(stay, number);
      }
    }
    const bool said = stay->core->is_over() && stay->connections.empty() && may_close_board(stay);
    if (said || now >= stay->leave_by) finish(stay);
  }

  int add(Stay* stay, Source source, int descriptor, std::uint32_t events) {
    do last_number_ = last_number_ % INT_MAX + 1;
    while (sources_.count(last_number_) != 0);
    if (descriptor >= 0 && !control(EPOLL_CTL_ADD, last_number_, descriptor, events)) return -1;
    sources_[last_number_] = {stay, source};
    return last_number_;
  }

  bool control(int operation, int number, int descriptor, std::uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = static_cast<std::uint64_t>(number);
    return epoll_ctl(*epoll_, operation, descriptor, &event) == 0;
  }

  void feed(Stay* stay, Event event) {
    stay->events.push_back(std::move(event));
    if (stay->feeding) return;
    stay->feeding = true;
    std::vector<Action> actions;
    while (!stay->events.empty()) {
      const Event next = std::move(stay->events.front());
      stay->events.pop_front();
      actions.clear();
      {
        const std::lock_guard<std::mutex> lock(stay->stepping);
        const Nanos now = monotonic_now();
        stay->record.add(*stay->core, now, next);
        stay->core->step(now, next, &actions);
      }
      for (const Action& action : actions) act(stay, action);
    }
    stay->feeding = false;
    flush_all();
  }

  void flush_all() {
    const auto unsent = std::exchange(unsent_, {});
    for (const auto& [of, number] : unsent) {
      Connection* const connection = find(of, number);
      if (connection == nullptr) continue;
      flush(number, connection);
      if (connection->closing && is_closed(connection, 0)) erase(of, number);
    }
  }

  void act(Stay* stay, const Action& action) {
    switch (action.kind) {
      case Action::kDial: dial(stay, action); break;
      case Action::kClose: close(stay, action.connection); break;
      case Action::kSend: send(stay, action.connection, action.frames); break;
      case Action::kProbe: probe(stay, action.connection); break;
      case Action::kBoard:
        if (!stay->board.publish(action.bytes)) log(stay, "can't write the board of this process");
        break;
      case Action::kBeat: beat(stay); break;
      case Action::kLook:
        for (const auto& [number, neighbour] : stay->neighbours) {
          if (neighbour.member.proc != action.proc || neighbour.ended || !is_ending(neighbour.member.pid)) continue;
          stay->events.push_back(event_of(Event::kExiting, action.proc));
        }
        break;
      case Action::kDoom:
      case Action::kLeft: {
        const bool died = action.kind == Action::kDoom;
        for (const int rank : stay->core->lost_by(action)) stay->listeners->report(rank, died);
        stay->inbox.push(died ? Inbox::kDied : Inbox::kLeft, action);
        break;
      }
      case Action::kVerdict: stay->inbox.give(Inbox::kVerdict, action); break;
      case Action::kRefuse:
        if (action.key.members != 0) stay->inbox.give(Inbox::kRefused, action);
        else stay->inbox.push(Inbox::kRefused, action);
        break;
      case Action::kGuest: serve(stay, action.connection, action.bytes); break;
      case Action::kLog: {
        Action named = action;
        if (const Connection* const from = find(stay, action.connection)) {
          named.bytes += " (from " + peer_of(*from->socket) + ")";
        }
        stay->inbox.push(Inbox::kLog, named);
        break;
      }
    }
  }

  void log(Stay* stay, const std::string& text, bool is_warning = false) {
    stay->inbox.push(Inbox::kLog, news_of(text.c_str(), is_warning));
  }

  static Connection* find(Stay* stay, int number) {
    const auto found = stay->connections.find(number);
    return found == stay->connections.end() ? nullptr : &found->second;
  }

  void no_dial(Stay* stay, int number, Proc proc, Event::Kind kind) {
    if (number >= 0) erase(stay, number);
    feed(stay, event_of(kind, proc));
  }

  void dial(Stay* stay, const Action& action) {
    Connection connection;
    connection.dialed = action.proc;
    connection.until = monotonic_now() + kDialTime;
    connection.socket = begin_dial(action.endpoint->host, action.endpoint->port);
    const bool refused = !connection.socket && errno == ECONNREFUSED;
    const int number = connection.socket ? add(stay, kConnection, *connection.socket, EPOLLOUT) : -1;
    if (number < 0) return no_dial(stay, -1, action.proc, refused ? Event::kRefused : Event::kNoAnswer);
    stay->connections[number] = std::move(connection);
    timed_[number] = stay;
  }

  void on_dialed(Stay* stay, int number) {
    Connection& connection = stay->connections.at(number);
    const int code = dial_error(*connection.socket);
    const Proc proc = connection.dialed;
    if (code != 0) return no_dial(stay, number, proc, code == ECONNREFUSED ? Event::kRefused : Event::kNoAnswer);
    connection.dialed = 0;
    connection.until = kNever;
    timed_.erase(number);
    control(EPOLL_CTL_MOD, number, *connection.socket, EPOLLIN);
    Event dialed = event_of(Event::kDialed, proc, number);
    dialed.nonce = random_bytes(16);
    feed(stay, std::move(dialed));
  }

  void accept(Stay* stay) {
    for (int i = 0; i < kAccepts; ++i) {
      Connection connection;
      connection.socket =
          Descriptor::of([&] { return accept4(*stay->listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC); });
      if (!connection.socket) {
        if (errno != EMFILE && errno != ENFILE && errno != ENOMEM && errno != ENOBUFS) return;
        // epoll is level-triggered: the thread would spin.
        control(EPOLL_CTL_MOD, stay->listener_number, *stay->listener, 0);
        stay->accepts = false;
        const Nanos now = monotonic_now();
        shortage_until_ = now + kShortage;
        if (now < std::exchange(stay->quiet_until, std::max(stay->quiet_until, now + kQuiet))) return;
        return log(stay, "can't accept connections: no free descriptors or memory; retried every 0.1 s", true);
      }
      send_at_once(*connection.socket);
      const int number = add(stay, kConnection, *connection.socket, EPOLLIN);
      if (number < 0) continue;
      stay->connections[number] = std::move(connection);
      Event event = event_of(Event::kAccepted, 0, number);
      event.nonce = random_bytes(16);
      feed(stay, std::move(event));
    }
  }

  void on_connection(Stay* stay, int number, std::uint32_t events) {
    Connection* connection = &stay->connections.at(number);
    if (connection->is_dialing()) return on_dialed(stay, number);
    if (connection->closing) {
      flush(number, connection);
      if (drain(connection) || is_closed(connection, 0)) erase(stay, number);
      return;
    }
    if ((events & EPOLLOUT) != 0) flush(number, connection);
    Bytes bytes;
    for (int i = 0; i < kReads; ++i) {
      bytes.resize(kReadBytes);
      const ssize_t size = recv(*connection->socket, bytes.data(), bytes.size(), 0);
      if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
      Event event = event_of(size > 0 ? Event::kBytes : Event::kClosed, 0, number);
      if (size > 0) event.bytes.assign(bytes, 0, static_cast<std::size_t>(size));
      if (size > 0 && connection->is_guest) {
        serve(stay, number, event.bytes);
        flush_all();
      } else {
        if (size <= 0) erase(stay, number);
        feed(stay, std::move(event));
      }
      connection = find(stay, number);
      if (size < static_cast<ssize_t>(kReadBytes) || connection == nullptr || connection->closing) return;
    }
  }

  void serve(Stay* stay, int number, const Bytes& bytes) {
    Connection* const connection = find(stay, number);
    if (connection == nullptr) return;
    std::vector<Store::Output> replies;
    const bool admitted = std::exchange(connection->is_guest, true);
    // A vanished host's held keys end with the heartbeat limit.
    if (!admitted) keep_alive(*connection->socket, stay->limit_s / 2, std::max(1, stay->limit_s / 4), 2);
    const bool fine =
        admitted ? stay->store.take(number, bytes, &replies) : stay->store.admit(number, stay->token, bytes, &replies);
    reply(stay, replies);
    if (fine || stay->connections.count(number) == 0) return;
    log(stay, "closed a connection to the store: malformed bytes");
    erase(stay, number);
  }

  void reply(Stay* stay, const std::vector<Store::Output>& replies) {
    for (const auto& [guest, bytes, is_question] : replies) {
      if (!is_question) {
        send(stay, guest, std::make_shared<Bytes>(bytes));
        continue;
      }
      Action question;
      question.id = static_cast<std::uint64_t>(guest);
      question.bytes = bytes;
      stay->inbox.push(Inbox::kQuestion, question);
    }
  }

  static bool drain(Connection* connection) {
    char bytes[4096];
    for (int i = 0; i < 64; ++i) {
      const ssize_t size = recv(*connection->socket, bytes, sizeof(bytes), 0);
      if (size <= 0) return size == 0 || (errno != EAGAIN && errno != EINTR);
    }
    return false;
  }

  void send(Stay* stay, int number, std::shared_ptr<const Bytes> bytes) {
    Connection* const connection = find(stay, number);
    if (connection == nullptr || connection->closing) return;
    connection->out.add(std::move(bytes));
    unsent_.emplace_back(stay, number);
    if (connection->out.size <= kMostUnsent) return;
    log(stay, "closed a connection: its peer doesn't read");
    erase(stay, number);
    stay->events.push_back(event_of(Event::kClosed, 0, number));
  }

  void flush(int number, Connection* connection) {
    Unsent& out = connection->out;
    while (!out.empty() && !connection->hung_up) {
      const Bytes& part = *out.parts.front();
      const ssize_t size =
          ::send(*connection->socket, part.data() + out.at, part.size() - out.at, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (size > 0) out.take(static_cast<std::size_t>(size));
      else if (errno == EAGAIN || errno == EINTR) break;
      else connection->hung_up = true;  // kClosed follows after all received bytes
    }
    if (connection->hung_up) out.clear();
    const bool polls_out = !out.empty();
    if (polls_out != connection->polls_out) {
      control(EPOLL_CTL_MOD, number, *connection->socket, polls_out ? EPOLLIN | EPOLLOUT : EPOLLIN);
      connection->polls_out = polls_out;
    }
  }

  void probe(Stay* stay, int number) {
    Connection* const connection = find(stay, number);
    tcp_info info{};
    socklen_t size = sizeof(info);
    if (connection == nullptr || getsockopt(*connection->socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return;
    Event event = event_of(Event::kAcked, 0, number);
    // Infinite while bytes are unacknowledged: the peer's segments repeat old acknowledgements. With a full window, all
    // bytes in flight are acknowledged.
    event.age = info.tcpi_unacked > 0 ? monotonic_now() : info.tcpi_last_ack_recv * kMillisecond;
    stay->events.push_back(std::move(event));
  }

  // Waits until all bytes are acknowledged: closing with unread input makes Linux drop unsent bytes, such as a
  // farewell.
  void close(Stay* stay, int number) {
    Connection* const connection = find(stay, number);
    if (connection == nullptr || connection->closing) return;
    connection->closing = true;
    connection->until = monotonic_now() + kCloseTime;
    timed_[number] = stay;
    unsent_.emplace_back(stay, number);
  }

  bool is_closed(Connection* connection, Nanos now) {
    if (now >= connection->until || connection->hung_up) return true;
    if (!connection->out.empty()) return false;
    if (unacknowledged(*connection->socket) == 0) return true;
    shutdown(*connection->socket, SHUT_WR);
    return false;
  }

  void erase(Stay* stay, int number) {
    // A forked child may have a copy, so close() alone doesn't remove it from epoll.
    control(EPOLL_CTL_DEL, number, *stay->connections.at(number).socket, 0);
    sources_.erase(number);
    timed_.erase(number);
    const bool was_guest = stay->connections.at(number).is_guest;
    stay->connections.erase(number);
    if (!was_guest) return;
    std::vector<Store::Output> replies;
    stay->store.drop(number, &replies);
    reply(stay, replies);
  }

  void check_timed(Nanos now) {
    for (auto at = timed_.begin(); at != timed_.end();) {
      const auto [number, stay] = *at++;
      Connection& connection = stay->connections.at(number);
      if (connection.is_dialing()) {
        if (now >= connection.until) no_dial(stay, number, connection.dialed, Event::kNoAnswer);
      } else if (is_closed(&connection, now)) {
        erase(stay, number);
      }
      at = timed_.upper_bound(number);
    }
  }

  void meet(Stay* stay, const Event& event, const std::vector<int>& boards) {
    const int me = event.roster->index_of(stay->proc);
    feed(stay, event);
    if (me < 0 || stay->has_met) return;
    stay->rank = event.roster->members[me].rank;
    for (const int index : event.roster->domains[event.roster->domain_of[me]]) {
      const Member& member = event.roster->members[index];
      if (index != me) watch(stay, member, boards[index]);
    }
    stay->has_met = true;
    note_met(stay);
  }

  // Publishes that all neighbours' boards are open here, so that they may close them.
  void note_met(Stay* stay) {
    if (!stay->has_met || stay->noted_met) return;
    for (const auto& [number, neighbour] : stay->neighbours) {
      if (!neighbour.board && !neighbour.ended && !stay->core->is_gone(neighbour.member.proc)) return;
    }
    stay->board.note_met();
    stay->noted_met = true;
  }

  void watch(Stay* stay, const Member& member, int board) {
    const int number = add(stay, kNeighbour, -1, 0);
    Neighbour& neighbour = stay->neighbours[number];
    neighbour.member = member;
    neighbour.board_number = board;
    attach(stay, number, &neighbour);
  }

  // Retries each second: descriptors may have run out.
  void attach(Stay* stay, int number, Neighbour* neighbour) {
    const Member& member = neighbour->member;
    neighbour->attach_at = kNever;
    std::string problem;
    errno = 0;
    if (!neighbour->board && !neighbour->board.open(member.pid, neighbour->board_number, member.proc)) {
      problem = "'s board can't be opened, so its farewell can't be read";
    }
    int code = errno;
    if (!neighbour->watched) {
      const ProcessWatch::Found found = neighbour->watch.open(member.pid, member.began);
      // An exited process's pidfd stays readable: it isn't polled.
      if (found == ProcessWatch::kExited) return on_end(stay, neighbour);
      neighbour->watched =
          found == ProcessWatch::kRuns &&
          (!neighbour->watch.is_polled() || control(EPOLL_CTL_ADD, number, neighbour->watch.number(), EPOLLIN));
      if (!neighbour->watched) {
        code = errno;
        problem = " can't be watched, so its exit isn't detected";
      }
    }
    if (problem.empty() || stay->core->is_gone(member.proc)) return;
    neighbour->attach_at = monotonic_now() + kAttach;
    if (std::exchange(neighbour->warned, true)) return;
    if (code != 0) problem += std::string(": ") + std::strerror(code);
    const std::string name = "rank " + std::to_string(member.rank) + " (pid " + std::to_string(member.pid) + ")";
    log(stay, name + problem + "; tried again each second", true);
  }

  void on_end(Stay* stay, Neighbour* neighbour) {
    if (neighbour->ended) return;
    neighbour->ended = true;
    read_board(stay, neighbour, nullptr);
    if (neighbour->watched && neighbour->watch.is_polled()) control(EPOLL_CTL_DEL, 0, neighbour->watch.number(), 0);
    feed(stay, event_of(Event::kEnded, neighbour->member.proc));
  }

  void read_board(Stay* stay, Neighbour* neighbour, std::vector<Proc>* moved) {
    Event event = event_of(Event::kBoard, neighbour->member.proc);
    bool is_new = false;
    if (neighbour->board.read(&event.bytes, &is_new) && moved != nullptr) moved->push_back(neighbour->member.proc);
    if (is_new) feed(stay, std::move(event));
  }

  void beat(Stay* stay) {
    stay->board.beat();
    Event event = event_of(Event::kBeats, 0);
    for (auto& [number, neighbour] : stay->neighbours) {
      if (neighbour.ended) continue;
      if (monotonic_now() >= neighbour.attach_at) attach(stay, number, &neighbour);
      if (neighbour.ended) continue;
      if (neighbour.watched && !neighbour.watch.is_polled() && neighbour.watch.has_exited()) on_end(stay, &neighbour);
      else read_board(stay, &neighbour, &event.procs);
    }
    note_met(stay);
    stay->events.push_back(std::move(event));
  }

  // Neighbours read the farewell from the board, so it stays until they have opened it.
  bool may_close_board(Stay* stay) {
    for (auto& [number, neighbour] : stay->neighbours) {
      if (neighbour.ended || !neighbour.board || neighbour.board.has_met()) continue;
      read_board(stay, &neighbour, nullptr);
      if (!neighbour.board.has_met()) return false;
    }
    return true;
  }

  void finish(Stay* stay) {
    stay->store = Store();
    while (!stay->connections.empty()) erase(stay, stay->connections.begin()->first);
    for (const auto& [number, neighbour] : stay->neighbours) sources_.erase(number);
    sources_.erase(stay->listener_number);
    end(stay, nullptr);
    stays_.erase(stay);
  }

 private:
  Descriptor epoll_;
  Wake wake_;
  std::vector<Command> commands_;  // guarded by the fork mutex
  std::map<Stay*, std::shared_ptr<Stay>> stays_;
  std::map<int, std::pair<Stay*, Source>> sources_;
  std::map<int, Stay*> timed_;
  std::vector<std::pair<Stay*, int>> unsent_;
  Nanos shortage_until_ = 0;
  int last_number_ = 0;
};

bool post(Command command) {
  const Lock lock(fork_mutex());
  Plane& own = own_plane();
  if (command.stay->over) return errno = ESHUTDOWN, false;
  if (own.driver == nullptr) own.driver = Driver::start();
  if (own.driver == nullptr) return false;
  own.driver->post(std::move(command));
  return true;
}

}  // namespace

void Unsent::add(std::shared_ptr<const Bytes> part) {
  size += part->size();
  if (!part->empty()) parts.push_back(std::move(part));
}

void Unsent::take(std::size_t count) {
  at += count;
  size -= count;
  if (at < parts.front()->size()) return;
  parts.pop_front();
  at = 0;
}

void Inbox::push(Kind kind, const Action& news) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if ((kind == kLog || kind == kQuestion) && news_.size() >= kMostNews) return;
  news_.push_back(packed(kind, news));
  wake_.set();
}

void Inbox::end(Bytes news) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  last_ = std::move(news);
  over_ = true;
  wake_.set();
  changed_.notify_all();
}

bool Inbox::expect(const AgreementKey& key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return verdicts_.emplace(key, Bytes()).second;
}

void Inbox::give(Kind kind, const Action& news) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = verdicts_.find(news.key);
  if (found == verdicts_.end()) return;  // the caller was interrupted, and called `forget`
  found->second = packed(kind, news);
  changed_.notify_all();
}

std::int64_t Inbox::await(const AgreementKey& key, Nanos wait, char* buffer, std::size_t capacity) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto found = verdicts_.find(key);
  if (found == verdicts_.end()) return -1;
  const Bytes& news = found->second;
  changed_.wait_for(lock, std::chrono::nanoseconds(wait), [&] { return over_ || !news.empty(); });
  if (news.empty()) return over_ ? -1 : 0;
  std::memcpy(buffer, news.data(), std::min(news.size(), capacity));
  return static_cast<std::int64_t>(news.size());
}

void Inbox::forget(const AgreementKey& key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  verdicts_.erase(key);
}

std::size_t Inbox::take(char* buffer, std::size_t capacity) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Bytes& next = news_.empty() ? last_ : news_.front();
  if (next.empty()) return wake_.clear(), 0;
  const std::size_t size = next.size();
  if (size > capacity) return size;
  std::memcpy(buffer, next.data(), size);
  if (news_.empty()) last_.clear();
  else news_.pop_front();
  return size;
}

std::int64_t open_stay(const std::string& address, int first, int last, const std::string& token, Config config,
                       std::shared_ptr<Stay>* made) {
  auto stay = std::make_shared<Stay>();
  const Bytes random = random_bytes(8);
  std::memcpy(&stay->proc, random.data(), sizeof(stay->proc));
  stay->proc |= 1;  // never 0
  stay->token = token;
  for (const char byte : token.empty() ? random_bytes(16) : Bytes()) {
    stay->token += "0123456789abcdef"[static_cast<unsigned char>(byte) >> 4];
    stay->token += "0123456789abcdef"[byte & 15];
  }
  stay->core = std::make_unique<Core>(stay->proc, stay->token, config);
  stay->limit_s = static_cast<int>(std::clamp<Nanos>(config.limit / kSecond, 2, 3600));
  stay->without_memory = last_news("memory ran out");
  errno = EADDRINUSE;
  const int count = last - first + 1, begin = static_cast<int>(stay->proc % static_cast<Proc>(std::max(count, 1)));
  for (int i = 0; i < count && !stay->listener && errno == EADDRINUSE;
       ++i) {  // ranks of a host start at different ports
    stay->port = first + (begin + i) % count;
    stay->listener = listen_at(address, &stay->port);
  }
  if (!stay->listener) return -errno;
  if (!stay->board.make(stay->proc) || !stay->inbox.make()) return -errno;
  if (!post(stay, Event{})) return -errno;
  const Lock lock(fork_mutex());
  own_plane().stays[next_handle] = stay;
  *made = std::move(stay);
  return next_handle++;
}

std::shared_ptr<Stay> find_stay(std::int64_t handle) {
  const Lock lock(fork_mutex());
  const auto found = own_plane().stays.find(handle);
  return found == own_plane().stays.end() ? nullptr : found->second;
}

void close_stay(std::int64_t handle) {
  const Lock lock(fork_mutex());
  own_plane().stays.erase(handle);
}

bool post(const std::shared_ptr<Stay>& stay, Event event, std::vector<int> boards) {
  return post(Command{stay, std::move(event), std::move(boards)});
}

bool post_reply(const std::shared_ptr<Stay>& stay, int guest, Bytes reply) {
  Command command{stay, {}, {}, guest};
  command.event.bytes = std::move(reply);
  return post(std::move(command));
}

Bytes record_of(Stay* stay) {
  const std::lock_guard<std::mutex> lock(stay->stepping);
  return stay->record.bytes(*stay->core);
}

void leave_stay(const std::shared_ptr<Stay>& stay, Nanos deadline) {
  Lock lock(fork_mutex());
  Event event = event_of(Event::kLeave, 0);
  event.deadline = deadline;
  if (!post(stay, std::move(event))) return;
  const auto patience = std::chrono::nanoseconds(std::max<Nanos>(deadline - monotonic_now(), 0) + kSecond);
  stay->ended.wait_for(lock, patience, [&] { return stay->over; });
}

}  // namespace parallel_state::control
#endif
