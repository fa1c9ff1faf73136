// The control plane of one process as a value without I/O: a world's members, their exits, their agreements.
//
// A driver passes every event to `step`, carries out the returned actions, and calls `step` again by `wake_at`. Copies
// of a core are independent. docs/protocol.md describes the frames and walks through a takeover.
//
// The driver promises:
//   - Bytes of a connection arrive in order. After kClose or kClosed nothing more arrives.
//   - All that the domain published before a kBeat arrives before the kBeats that answers it.
//   - A state on a domain process's board (machine.h) arrives before the kEnded of that process.
//   - kRefused means that no process listens. A process listens from before it publishes its endpoint until `is_over`.
//   - kAcked counts every acknowledgement: of bytes, window probes and keepalives (Linux: tcpi_last_ack_recv).
//   - `step` is called at least once a second: the clock may go back, and `wake_at` with it.
//   - Connection numbers are not negative. A number may be reused once its connection is closed on this side.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "frame.h"
#include "store.h"

namespace parallel_state::control {

inline constexpr Nanos kMillisecond = 1'000'000;
inline constexpr Nanos kSecond = 1'000 * kMillisecond;
inline constexpr Nanos kNever = INT64_MAX;
inline constexpr std::size_t kMostDomains = 512;
inline constexpr std::uint64_t kEmptyDigest = 1;  // of a state without ends

struct Endpoint {
  std::string host;
  std::uint16_t port = 0;
  // The listener's secret, at most 64 bytes; peers prove by HMAC that they have it. Never part of a record.
  std::string token;
  PARALLEL_STATE_FIELDS(host, port)
};

struct Member {
  int rank = 0;
  Proc proc = 0;
  // Equal for processes that can watch each other: equal boot id and PID, time and network namespaces.
  std::uint64_t domain = 0;
  Endpoint endpoint;
  int pid = 0;
  std::uint64_t began = 0;  // start time, field 22 of /proc/PID/stat; 0: unknown
  PARALLEL_STATE_FIELDS(rank, proc, domain, endpoint, pid, began)
};

// The members of a world, in rank order. Copies of a core share it.
struct Roster {
  explicit Roster(std::vector<Member> all);
  int index_of(Proc proc) const;  // -1: no member

  std::vector<Member> members;
  std::vector<std::vector<int>> domains;  // indices into `members`, ascending
  std::vector<int> domain_of, place_of;   // by index; `place_of`: in its domain
  std::unordered_map<Proc, int> indices;
};

template <typename Sink>
void put(Sink* sink, const std::shared_ptr<const Roster>& roster) {
  put(sink, roster == nullptr ? std::vector<Member>() : roster->members);
}
inline void get(Reader* reader, std::shared_ptr<const Roster>* roster) {
  std::vector<Member> members;
  get(reader, &members);
  if (!members.empty()) *roster = std::make_shared<const Roster>(std::move(members));
}

struct Config {
  Nanos tick = 200 * kMillisecond;   // interval of board beats and timer checks
  Nanos stale = 500 * kMillisecond;  // without a board beat for this long, the next rank acts as the lead
  Nanos beat = kSecond;              // between two beats or states on a watched connection
  Nanos limit = 20 * kSecond;        // a domain without a sign of life for this long is unreachable; at least 4 beats
  Nanos patience = 600 * kMillisecond;  // time before a lead that left is replaced, or a silent domain redialed
  Nanos settle = 300 * kMillisecond;    // refused dials count as exits if no process of the domain answers in this time
  Nanos redial = 20 * kMillisecond;     // between two dials of one process
  // The decider decides this long before the earliest deadline, or a quarter of the timeout if that is less.
  Nanos margin = 500 * kMillisecond;
  Nanos pause = 500 * kMillisecond;  // a process whose step is this late was paused
  Nanos stranger = 5 * kSecond;      // time for an accepted connection to identify itself
  std::uint32_t build = 0;
  PARALLEL_STATE_FIELDS(tick, stale, beat, limit, patience, settle, redial, margin, pause, stranger, build)
};

enum EndFlag : std::uint8_t {
  kLeft = 1,
  kExited = 2,
  kUnreachable = 4,  // no sign of life within the limit
  kFailed = 8,
  kStopped = 32  // its kernel responds, but no process of its domain sent bytes within the limit
};

// A process's exit, as known here. Each field is a join: states merge in any order with the same result.
struct End {
  std::uint8_t flags = 0;
  Proc reporter = 0;  // the lowest one
  std::string text;   // the greatest cause
  PARALLEL_STATE_FIELDS(flags, reporter, text)

  // An exit after leaving is no death.
  bool is_death() const {
    return (flags & kFailed) != 0 || ((flags & (kExited | kUnreachable | kStopped)) != 0 && (flags & kLeft) == 0);
  }
};

using Ends = std::vector<std::pair<Proc, End>>;  // sorted

struct AgreementKey {
  std::uint64_t members = 0;  // digest
  std::string purpose;
  std::uint32_t attempt = 0;
  PARALLEL_STATE_FIELDS(members, purpose, attempt)

  bool operator<(const AgreementKey& other) const { return fields() < other.fields(); }
};

struct Verdict {
  enum Kind : std::uint8_t {
    kAgreed,  // `values` has one per member
    kEnded,
    kMissing,   // had not called by the earliest deadline
    kUndecided  // local: no answer by this call's deadline
  } kind = kUndecided;
  std::vector<Bytes> values;
  std::vector<Proc> culprits;
  PARALLEL_STATE_FIELDS(kind, values, culprits)
};

// All frames of an agreement have this layout. Unused fields are zero or empty.
struct Message {
  AgreementKey key;
  std::uint32_t seat = 0;    // the sender's index
  std::uint32_t ballot = 0;  // of the ask that this answers
  Nanos remaining = 0;
  Bytes value = {};
  std::vector<Proc> members = {};  // for receivers that may not know the agreement
  std::shared_ptr<const Verdict> verdict = {};
  PARALLEL_STATE_FIELDS(key, seat, ballot, remaining, value, members, verdict)
};

struct Call {
  std::string purpose;
  std::uint32_t attempt = 0;  // a key is never reused
  std::vector<Proc> members;  // in rank order, equal on all
  Bytes value;
  Nanos deadline = 0;
  PARALLEL_STATE_FIELDS(purpose, attempt, members, value, deadline)
};

struct Event {
  enum Kind {
    kTick,      // at `wake_at`
    kMeet,      // joins a world, once: `world`, `roster`
    kDialed,    // `proc`, `connection`, `nonce`
    kRefused,   // no process listens at the endpoint of `proc`
    kNoAnswer,  // a dial of `proc` failed otherwise
    kAccepted,  // `connection`, `nonce`
    kClosed,    // by the peer, or broken
    kBytes,     // `connection`, `bytes`
    kAcked,     // answers kProbe: the peer's kernel last acknowledged something `age` ago
    kBoard,     // `proc` of this domain published the state `bytes`
    kBeats,     // always answers kBeat: `procs` of this domain whose board beats moved since the last time
    kEnded,     // `proc` of this domain exited
    kExiting,   // answers kLook: `proc` is exiting, with descriptors still open
    kCall,      // `call`
    kCancel,    // ends an undecided `call`
    kReport,    // this process failed, or `proc` is unreachable: `flags`; `bytes`: the cause
    kAsk,       // sends `bytes` to `proc`; `id`, `deadline`
    kReply,     // `bytes` answers question `id` of `proc`
    kLeave      // this process leaves; the core is over by `deadline`
  } kind = kTick;
  int connection = -1;
  Proc proc = 0;
  std::uint64_t world = 0, id = 0;
  std::uint8_t flags = 0;
  Nanos deadline = 0, age = 0;
  Bytes bytes;
  Bytes nonce;  // 16 random bytes
  std::vector<Proc> procs;
  std::shared_ptr<const Roster> roster;
  std::shared_ptr<const Call> call;
  PARALLEL_STATE_FIELDS(kind, connection, proc, world, id, flags, deadline, age, bytes, nonce, procs, roster, call)
};

struct Action {
  enum Kind {
    kDial,   // `proc` at `endpoint`; answered by kDialed, kRefused or kNoAnswer
    kClose,  // after its bytes were sent
    kSend,
    kProbe,  // answered by kAcked
    kBoard,  // publish the state `bytes` to the domain
    kBeat,   // move the board beat; answered by kBeats
    kLook,   // answered by kExiting if `proc` is exiting
    kDoom,   // `proc` died: `flags`; `bytes`: the cause; `id`: the reporter
    kLeft,   // `proc` left
    kVerdict,
    kQuestion,  // of `proc`: `id`, `bytes`; answered by kReply
    kReply,     // to question `id` of this process: `bytes`; flags 1: none by the deadline
    kRefuse,    // `bytes`: why the configuration, or the call with `key`, is wrong
    kGuest,     // `connection` becomes the store's; `bytes`: both nonces and what followed; see store.h
    kLog        // `bytes`; of `proc`, or of the peer of `connection`
  } kind = kLog;
  int connection = -1;
  Proc proc = 0;
  std::uint64_t id = 0;
  std::uint8_t flags = 0;
  Bytes bytes;
  std::shared_ptr<Bytes> shared;  // kSend: these bytes instead, shared by connections
  const Endpoint* endpoint = nullptr;
  AgreementKey key;
  std::shared_ptr<const Verdict> verdict;
  PARALLEL_STATE_FIELDS(flags, proc, id, bytes, key, verdict)  // for the program

  const Bytes& sent() const { return shared != nullptr ? *shared : bytes; }
};

class Core {
 public:
  // `self`: this process's number in one world. `token`: the listener's secret. Replays of records, which have no
  // token, pass an empty one; every known peer then counts as identified.
  Core(Proc self, std::string token, Config config);

  // `now`: a clock that is equal in all processes of the domain. Never blocks.
  void step(Nanos now, const Event& event, std::vector<Action>* actions);
  // When to send kTick if nothing else happens, or kNever.
  Nanos wake_at() const { return alarm_ == kNever ? kNever : alarm_ - skew_; }
  // A digest of all that later steps depend on.
  std::uint64_t digest() const;

  const Ends& ends() const { return ends_; }
  bool is_gone(Proc proc) const { return end_of(proc) != nullptr; }
  // Returns the ranks lost after a kDoom or kLeft. If another domain declared a process of this one unreachable or
  // stopped, these are all ranks of that other domain.
  std::vector<int> lost_by(const Action& end) const;
  // Once over, the core only answers this process's own calls.
  bool is_over() const { return left_; }
  std::size_t rounds() const { return rounds_.size(); }
  static std::uint64_t digest_of(const std::vector<Proc>& members);
  // Serializes all state except the token.
  void write(Writer* writer) const;
  void read(Reader* reader);
  const Roster* roster() const { return roster_.get(); }

 private:
  enum class Source { kOwn, kPeer, kBoard };

  struct Link {
    Proc proc = 0;        // unverified until `identified`
    Bytes nonce, theirs;  // of this side, and of the peer
    bool dialed = false;
    bool for_watch = false;   // dialed by a lead, and used only to watch
    bool identified = false;  // the peer proved that it has the token
    bool beating = false;     // one side watches it
    Nanos opened = 0, watched = 0;
    Nanos heard = 0;                           // last bytes arrived
    Nanos sign = 0;                            // last sign of life of the peer's kernel
    Nanos beaten = 0;                          // last beat or state sent
    std::uint64_t peer_digest = kEmptyDigest;  // of the peer's state
    Parser parser;
    PARALLEL_STATE_FIELDS(proc, nonce, theirs, dialed, for_watch, identified, beating, opened, watched, heard, sign,
                          beaten, peer_digest, parser)
  };

  // Connections with one process, at most one per direction.
  struct Peer {
    int out = -1, in = -1;
    bool dialing = false;
    bool for_watch = false;
    Nanos refused = kNever;  // when its port first refused in this hunt
    Nanos next_dial = 0;
    PARALLEL_STATE_FIELDS(out, in, dialing, for_watch, refused, next_dial)
  };

  // Another domain's liveness, as a lead knows it. A *hunt* dials all living processes of a domain at once.
  struct Watch {
    Nanos sign = 0;   // last sign of life of a kernel of the domain
    Nanos heard = 0;  // last bytes arrived
    Nanos dial_at = 0;
    Nanos hunt = -1;      // start of the hunt; -1: none
    int link = -1;        // the connection to the lowest process that isn't silent
    bool linked = false;  // a connection exists, silent or not
    PARALLEL_STATE_FIELDS(sign, heard, dial_at, hunt, link, linked)
  };

  // One agreement. A member's index is its ballot when it decides.
  struct Round {
    std::vector<Proc> members;
    int me = -1;
    std::uint64_t number = 0;
    bool called = false, delivered = false;
    int promised = 0;  // highest ballot answered; lower ones are ignored
    Nanos deadline = 0;
    Nanos decide_by = 0;     // the deadline less the margin
    Nanos expires = kNever;  // when the decider stops waiting for values
    Bytes value;
    std::shared_ptr<const Verdict> verdict;
    std::shared_ptr<const Verdict> hint;  // names silent members; decides nothing
    int sent_on = -1;                     // connection on which the value, or done, was sent to `sent_to`
    int sent_to = -1;
    bool sent_done = false;
    struct Seat {
      bool has_value = false, answered = false, done = false;
      bool told = false;
      int connection = -1;  // of the member's last frame of this round
      int asked_on = -1;
      Bytes value;
      PARALLEL_STATE_FIELDS(has_value, answered, done, told, connection, asked_on, value)
    };
    std::vector<Seat> seats;  // at the decider, by index
    std::size_t values = 0, bytes = 0;
    bool hinted = false;
    std::uint64_t checked = 0;  // digest of the ends when last compared with the members
    PARALLEL_STATE_FIELDS(members, me, number, called, delivered, promised, deadline, decide_by, expires, value,
                          verdict, hint, sent_on, sent_to, sent_done, seats, values, bytes, hinted, checked)
    // True if this process's caller no longer needs it. It is kept for members without the verdict.
    bool is_over() const { return called ? delivered : verdict != nullptr; }
  };

  struct Question {
    Proc proc = 0;
    std::uint64_t id = 0;
    Nanos deadline = 0;
    Bytes bytes;
    int sent_on = -1;
    PARALLEL_STATE_FIELDS(proc, id, deadline, bytes, sent_on)
  };

  using RoundEntry = std::pair<const AgreementKey, Round>;

  Action& act(Action::Kind kind, int connection = -1);
  void log(Proc proc, std::string text);
  void wake_by(Nanos time) { alarm_ = time < alarm_ ? time : alarm_; }
  Nanos own_time(Nanos time) const { return time > kNever - skew_ ? kNever : time + skew_; }
  void handle(const Event& event);

  // State of ends.
  const End* end_of(Proc proc) const;
  bool is_dead(Proc proc) const { return is_gone(proc) && end_of(proc)->is_death(); }
  void report(Proc proc, std::uint8_t flags, const std::string& text);
  void join(const Ends& other, Source source);
  void announce(Proc proc, const End& end, const End& before);
  void publish();
  void flood();

  // Connections.
  int index_of(Proc proc) const { return roster_ == nullptr ? -1 : roster_->index_of(proc); }
  int domain_of(Proc proc) const;
  bool is_stranger(const Link& link) const;
  void dial(Proc proc, bool for_watch);
  int link_to(Proc proc) const;
  int connect(Proc proc);
  void send(int connection, FrameKind kind, Bytes body);
  void send_state(int connection);
  void send_beat(int connection);
  void greet(int connection, const Bytes& nonce);
  Bytes proof(const Link& link, bool of_dialer) const;
  void on_accepted(const Event& event);
  void on_dialed(const Event& event);
  void on_no_dial(const Event& event);
  void on_bytes(const Event& event);
  bool on_hello(int connection, const Hello& hello);
  bool on_nonce(int connection, const Frame& frame);
  bool on_identity(int connection, const Frame& frame);
  bool on_frame(int connection, const Frame& frame);
  void drop(int connection, bool by_peer);
  void close(int connection);
  void refuse(int connection, const char* reason);

  // Membership and liveness.
  void meet(const Event& event);
  bool owes_farewell();
  void try_leave();
  void excuse(Nanos late);
  const std::vector<int>& own_domain() const { return roster_->domains[roster_->domain_of[me_]]; }
  bool is_alone() const { return seen_.size() < 2; }
  Proc proc_at(int index) const { return roster_->members[index].proc; }
  bool all_gone(const std::vector<int>& indices) const;
  bool is_alert() const { return now_ < alert_ + kAlert; }
  bool is_stale(int index) const;
  bool is_lead() const;
  bool may_not_yield() const;
  void start_leading();
  void tend();
  void ask_beats();
  void tend_domains(bool ticked);
  void find_watched_links();
  void tend_domain(int domain);
  void judge_refused(int domain);
  void dial_domain(int domain);
  void watch_link(int connection);
  void start_hunt(int domain);
  void tend_links();
  void forget_peers();

  // Agreement and status.
  void on_call(const Call& call, bool cancel);
  void cancel_call(RoundEntry* entry);
  void tell_verdict(const AgreementKey& key, std::shared_ptr<const Verdict> verdict);
  void end_calls();
  RoundEntry* open_round(const AgreementKey& key, std::vector<Proc> members);
  void forget_rounds();
  bool has_room(std::size_t bytes) const;
  Bytes round_frame(FrameKind kind, const Message& message) const;
  void send_round(int connection, FrameKind kind, const Message& message);
  bool on_round(int connection, const Frame& frame);
  void take(int connection, FrameKind kind, Message* message, RoundEntry* entry);
  static Message message_of(const RoundEntry& entry);
  int first_living(const Round& round) const;
  bool advance(RoundEntry* entry);  // false if the agreement was erased
  void reach_verdict(Round* round);
  bool ask_all(RoundEntry* entry);
  void conclude(Round* round, Verdict::Kind kind, std::vector<Proc> culprits);
  std::vector<Proc> silent_members(const Round& round) const;
  void tell_hint(RoundEntry* entry);
  void deliver(RoundEntry* entry);
  void serve(RoundEntry* entry, int target);
  bool decide(RoundEntry* entry);
  void advance_all();
  void on_ask(const Event& event);
  void advance_questions();
  void answer_question(const Question& question, const Bytes* bytes);
  bool on_question(int connection, const Frame& frame);

  static constexpr Nanos kAlert = kSecond;

  Proc self_;
  std::string token_;
  Config config_;
  Nanos now_ = 0;  // the driver's time + `skew_`; never decreases
  Nanos skew_ = 0;
  Nanos alarm_ = kNever;
  Nanos next_tick_ = 0;
  Nanos alert_ = -kAlert;                          // a death in this domain; beats are faster for a while
  Nanos leaving_ = kNever, waits_until_ = kNever;  // latest time to leave; to wait for its domain
  int beats_asked_ = 0;
  bool said_left_ = false;      // on the board
  bool farewell_sent_ = false;  // by the domain's first process, for this one too
  bool left_ = false;
  bool dirty_ = false;                                  // ends or connections changed
  bool urgent_ = false;                                 // this domain has a death to report
  bool unpublished_ = false, publish_at_once_ = false;  // an end isn't on the board
  Ends ends_;
  std::uint64_t ends_digest_ = kEmptyDigest;
  std::uint64_t world_ = 0;
  std::shared_ptr<const Roster> roster_;  // null before kMeet
  int me_ = -1;
  bool leading_ = false;
  Nanos led_ = 0;               // when is_lead() was last true
  std::vector<Watch> watches_;  // by domain
  std::map<int, Link> links_;
  std::map<Proc, Peer> peers_;
  std::vector<Nanos> seen_;  // by place in this domain: last move of the board beat
  std::map<AgreementKey, Round> rounds_;
  std::uint64_t rounds_opened_ = 0;
  std::vector<Question> questions_;
  std::uint64_t refused_ = 0;           // strangers
  std::vector<Action>* out_ = nullptr;  // in `step` only

 public:
  PARALLEL_STATE_FIELDS(self_, skew_, alarm_, next_tick_, alert_, leaving_, waits_until_, beats_asked_, said_left_,
                        farewell_sent_, left_, dirty_, urgent_, unpublished_, publish_at_once_, ends_, ends_digest_,
                        world_, leading_, led_, watches_, links_, peers_, seen_, rounds_, questions_, refused_)
};

}  // namespace parallel_state::control
