// The control plane of one process as a value without I/O. docs/protocol.md describes the frames and a takeover.
//
// The driver passes every event to `step`, carries out the actions, and calls `step` again by `wake_at`. It promises:
// - Bytes of a connection arrive in order. After kClose or kClosed nothing more arrives.
// - What the domain published before an action kBeat arrives before the event kBeats, which answers the action.
// - A state on a board arrives before the kEnded of its process.
// - A process listens from before it publishes its endpoint until `is_over`.
// - kAcked counts acknowledgements of bytes, window probes and keepalives.
// - `step` is called each second, because the clock and `wake_at` may go back.
// - Connection numbers aren't negative, and may be reused once closed on this side.
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
inline constexpr std::uint64_t kEmptyDigest = 1;

struct Endpoint {
  std::string host;
  std::uint16_t port = 0;
  // At most 64 bytes; never part of a record.
  std::string token;
  PARALLEL_STATE_FIELDS(host, port)
};

struct Member {
  int rank = 0;
  Proc proc = 0;
  // Equal for processes that can watch each other.
  std::uint64_t domain = 0;
  Endpoint endpoint;
  int pid = 0;
  std::uint64_t began = 0;  // field 22 of /proc/PID/stat; 0: unknown
  PARALLEL_STATE_FIELDS(rank, proc, domain, endpoint, pid, began)
};

struct Roster {
  explicit Roster(std::vector<Member> all);
  int index_of(Proc proc) const;

  std::vector<Member> members;
  std::uint64_t world = 0;  // a digest
  std::vector<std::vector<int>> domains;
  std::vector<int> domain_of, place_of;  // by index; `place_of`: in its domain
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
  Nanos tick = 200 * kMillisecond;      // between two beats of a board
  Nanos stale = 500 * kMillisecond;     // without a board beat for this long, the next rank acts as the lead
  Nanos beat = kSecond;                 // between two beats of a watched connection
  Nanos limit = 20 * kSecond;           // a domain silent for this long is unreachable; at least 4 beats
  Nanos patience = 600 * kMillisecond;  // before a lead that left is replaced, or a silent domain redialed
  Nanos settle = 300 * kMillisecond;    // refused dials count as exits if no process of the domain answers meanwhile
  Nanos redial = 20 * kMillisecond;
  // The decider decides this long, or a quarter of the timeout, before the earliest deadline.
  Nanos margin = 500 * kMillisecond;
  Nanos pause = 500 * kMillisecond;  // a process whose step is this late was paused
  Nanos stranger = 5 * kSecond;      // for an accepted connection to identify itself
  std::uint32_t build = 0;
  PARALLEL_STATE_FIELDS(tick, stale, beat, limit, patience, settle, redial, margin, pause, stranger, build)
};

enum EndFlag : std::uint8_t {
  kLeft = 1,
  kExited = 2,
  kUnreachable = 4,
  kFailed = 8,
  kStopped = 32  // its kernel responds, but no process of its domain
};

// States merge in any order with the same result.
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
    kMissing,
    kUndecided  // no answer by the deadline; never sent
  } kind = kUndecided;
  std::vector<Bytes> values;
  std::vector<Proc> culprits;
  PARALLEL_STATE_FIELDS(kind, values, culprits)
};

// All frames of an agreement have this layout. Unused fields are empty.
struct Message {
  AgreementKey key;
  std::uint32_t seat = 0;
  std::uint32_t ballot = 0;
  Nanos remaining = 0;
  Bytes value = {};
  std::vector<Proc> members = {};  // for receivers that may not know the agreement
  std::shared_ptr<const Verdict> verdict = {};
  PARALLEL_STATE_FIELDS(key, seat, ballot, remaining, value, members, verdict)
};

struct Call {
  std::string purpose;
  std::uint32_t attempt = 0;  // keys are never reused
  std::vector<Proc> members;  // in rank order
  Bytes value;
  Nanos deadline = 0;
  PARALLEL_STATE_FIELDS(purpose, attempt, members, value, deadline)
};

struct Event {
  enum Kind {
    kTick,
    kMeet,     // once: `roster`
    kDialed,   // `proc`, `connection`, `nonce`
    kRefused,  // no process listens at the endpoint of `proc`
    kNoAnswer,
    kAccepted,  // `connection`, `nonce`
    kClosed,
    kBytes,    // `connection`, `bytes`
    kAcked,    // answers kProbe: time since the last acknowledgement in `age`
    kBoard,    // `proc` of this domain published `bytes`
    kBeats,    // answers each kBeat: `procs` whose board beats moved
    kEnded,    // `proc` of this domain
    kExiting,  // answers kLook: `proc` is exiting, with descriptors still open
    kCall,
    kCancel,
    kReport,  // of `proc` or this process: `flags`; `bytes`: the cause
    kLeave    // over by `deadline`
  } kind = kTick;
  int connection = -1;
  Proc proc = 0;
  std::uint8_t flags = 0;
  Nanos deadline = 0, age = 0;
  Bytes bytes;
  Bytes nonce;
  std::vector<Proc> procs;
  std::shared_ptr<const Roster> roster;
  std::shared_ptr<const Call> call;
  PARALLEL_STATE_FIELDS(kind, connection, proc, flags, deadline, age, bytes, nonce, procs, roster, call)
};

struct Action {
  enum Kind {
    kDial,   // `proc`, `endpoint`
    kClose,  // after its bytes were sent
    kSend,   // `frames`
    kProbe,
    kBoard,
    kBeat,
    kLook,
    kDoom,  // `proc`, `flags`; `bytes`: the cause; `id`: the reporter
    kLeft,
    kVerdict,
    kRefuse,  // `bytes`: the cause; `key`: of the call, if any
    kGuest,   // `connection` becomes the store's; `bytes`: both nonces and the following bytes
    kLog      // `bytes`; of `proc`, or of the peer of `connection`
  } kind = kLog;
  int connection = -1;
  Proc proc = 0;
  std::uint64_t id = 0;
  std::uint8_t flags = 0;
  Bytes bytes;
  std::shared_ptr<const Bytes> frames;
  const Endpoint* endpoint = nullptr;
  AgreementKey key;
  std::shared_ptr<const Verdict> verdict;
  PARALLEL_STATE_FIELDS(flags, proc, id, bytes, verdict)
};

class Core {
 public:
  // For replays `token` is empty: every known peer then counts as identified.
  Core(Proc self, std::string token, Config config);

  // `now`: equal in all processes of the domain.
  void step(Nanos now, const Event& event, std::vector<Action>* actions);
  Nanos wake_at() const { return alarm_ == kNever ? kNever : alarm_ - skew_; }
  std::uint64_t digest() const;

  const Ends& ends() const { return ends_; }
  bool is_gone(Proc proc) const { return end_of(proc) != nullptr; }
  // Returns the ranks lost by a kDoom or kLeft: all of another domain, if that declared a process of this one
  // unreachable or stopped.
  std::vector<int> lost_by(const Action& end) const;
  // Once over, the core only answers this process's own calls.
  bool is_over() const { return left_; }
  std::size_t rounds() const { return rounds_.size(); }
  // Leaves out the token.
  void write(Writer* writer) const;
  void read(Reader* reader);
  const Roster* roster() const { return roster_.get(); }

 private:
  enum class Source { kOwn, kPeer, kBoard };

  struct Link {
    Proc proc = 0;
    Bytes nonce, theirs;  // this side's, the peer's
    bool dialed = false;
    bool for_watch = false;  // and used for nothing else
    bool identified = false;
    bool beating = false;
    Nanos opened = 0, watched = 0;
    Nanos heard = 0;  // last bytes arrived
    Nanos sign = 0;
    Nanos beaten = 0;
    std::uint64_t peer_digest = kEmptyDigest;
    Parser parser;
    PARALLEL_STATE_FIELDS(proc, nonce, theirs, dialed, for_watch, identified, beating, opened, watched, heard, sign,
                          beaten, peer_digest, parser)
  };

  struct Peer {
    int out = -1, in = -1;
    bool dialing = false;
    bool for_watch = false;
    Nanos refused = kNever;  // when its port first refused in this hunt
    Nanos next_dial = 0;
    PARALLEL_STATE_FIELDS(out, in, dialing, for_watch, refused, next_dial)
  };

  // Liveness of another domain. A *hunt* dials all living processes of a domain at once.
  struct Watch {
    Nanos sign = 0;
    Nanos heard = 0;
    Nanos dial_at = 0;
    Nanos hunt = -1;  // start; -1: none
    int link = -1;    // to the lowest process that isn't silent
    bool linked = false;
    PARALLEL_STATE_FIELDS(sign, heard, dial_at, hunt, link, linked)
  };

  // Published by leads when a domain becomes silent or answers again, so that the next lead doesn't measure from zero.
  // The latest one counts.
  struct Silence {
    Nanos heard = 0;      // when the last bytes arrived
    bool silent = false;  // none arrived for `unheard`
    PARALLEL_STATE_FIELDS(heard, silent)

    bool operator<(const Silence& other) const { return fields() < other.fields(); }
  };

  // A member's index is its ballot.
  struct Round {
    std::vector<Proc> members;
    int me = -1;
    std::uint64_t number = 0;
    bool called = false, delivered = false;
    int promised = 0;  // highest ballot answered
    Nanos deadline = 0;
    Nanos decide_by = 0;
    Nanos expires = kNever;  // when the decider stops waiting for values
    Bytes value;
    std::shared_ptr<const Verdict> verdict;
    std::shared_ptr<const Verdict> hint;  // names silent members; decides nothing
    int sent_on = -1;                     // connection that carried the value, or done, to `sent_to`
    int sent_to = -1;
    bool sent_done = false;
    struct Seat {
      bool has_value = false, answered = false, done = false;
      bool told = false;
      int connection = -1;
      int asked_on = -1;
      Bytes value;
      PARALLEL_STATE_FIELDS(has_value, answered, done, told, connection, asked_on, value)
    };
    std::vector<Seat> seats;
    std::size_t values = 0, bytes = 0;
    bool hinted = false;
    std::uint64_t checked = 0;  // digest of the ends when last compared with the members
    PARALLEL_STATE_FIELDS(members, me, number, called, delivered, promised, deadline, decide_by, expires, value,
                          verdict, hint, sent_on, sent_to, sent_done, seats, values, bytes, hinted, checked)
    // It is kept for members without the verdict.
    bool is_over() const { return called ? delivered : verdict != nullptr; }
  };

  using RoundEntry = std::pair<const AgreementKey, Round>;

  Action& act(Action::Kind kind, int connection = -1);
  void send(int connection, std::shared_ptr<const Bytes> frames) {
    act(Action::kSend, connection).frames = std::move(frames);
  }
  void log(Proc proc, std::string text);
  void wake_by(Nanos time) { alarm_ = time < alarm_ ? time : alarm_; }
  Nanos own_time(Nanos time) const { return time > kNever - skew_ ? kNever : time + skew_; }
  void handle(const Event& event);

  const End* end_of(Proc proc) const;
  bool is_dead(Proc proc) const { return is_gone(proc) && end_of(proc)->is_death(); }
  void report(Proc proc, std::uint8_t flags, const std::string& text);
  void join(const Ends& other, Source source);
  void announce(Proc proc, const End& end, const End& before);
  void on_board(const Event& event);
  void note_silences();
  void publish();
  void flood();

  std::uint64_t world() const { return roster_ == nullptr ? 0 : roster_->world; }
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

  void meet(const Event& event);
  bool owes_farewell();
  void try_leave();
  void excuse(Nanos late);
  const std::vector<int>& own_domain() const { return roster_->domains[roster_->domain_of[me_]]; }
  bool is_alone() const { return seen_.size() < 2; }
  Proc proc_at(int index) const { return roster_->members[index].proc; }
  bool all_gone(const std::vector<int>& indices) const;
  Nanos unheard() const { return config_.beat * 3 / 2; }
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

  void on_call(const Call& call, bool cancel);
  void cancel_call(RoundEntry* entry);
  void tell_verdict(const AgreementKey& key, std::shared_ptr<const Verdict> verdict);
  void end_calls();
  RoundEntry* open_round(const AgreementKey& key, std::vector<Proc> members);
  void forget_rounds();
  bool has_room(std::size_t bytes) const;
  void send(int connection, FrameKind kind, const Message& message);
  bool on_round(int connection, const Frame& frame);
  void take(int connection, FrameKind kind, Message* message, RoundEntry* entry);
  static Message message_of(const RoundEntry& entry);
  int first_living(const Round& round) const;
  bool advance(RoundEntry* entry);
  void reach_verdict(Round* round);
  bool ask_all(RoundEntry* entry);
  void conclude(Round* round, Verdict::Kind kind, std::vector<Proc> culprits);
  std::vector<Proc> silent_members(const Round& round) const;
  void tell_hint(RoundEntry* entry);
  void deliver(RoundEntry* entry);
  void serve(RoundEntry* entry, int target);
  bool decide(RoundEntry* entry);
  bool owes_verdict() const;

  static constexpr Nanos kAlert = kSecond;

  Proc self_;
  std::string token_;
  Config config_;
  Nanos now_ = 0;  // time of the driver + `skew_`; never decreases
  Nanos skew_ = 0;
  Nanos alarm_ = kNever;
  Nanos next_tick_ = 0;
  Nanos alert_ = -kAlert;
  Nanos leaving_ = kNever, waits_until_ = kNever;  // latest time to leave; to wait for the domain
  int beats_asked_ = 0;
  bool said_left_ = false;      // on the board
  bool farewell_sent_ = false;  // by the domain's first process, for this one too
  bool left_ = false;
  bool dirty_ = false;
  bool urgent_ = false;  // a death of this domain is unreported
  bool unpublished_ = false, publish_at_once_ = false;
  Ends ends_;
  std::uint64_t ends_digest_ = kEmptyDigest;
  std::shared_ptr<const Roster> roster_;  // null before kMeet
  int me_ = -1;
  bool leading_ = false;
  Nanos led_ = 0;
  std::vector<Watch> watches_;
  std::vector<Silence> silences_;  // by domain
  std::map<int, Link> links_;
  std::map<Proc, Peer> peers_;
  std::vector<Nanos> seen_;  // last move of each board beat, by place in the domain
  std::map<AgreementKey, Round> rounds_;
  std::uint64_t rounds_opened_ = 0;
  std::uint64_t refused_ = 0;
  std::vector<Action>* out_ = nullptr;

 public:
  PARALLEL_STATE_FIELDS(self_, skew_, alarm_, next_tick_, alert_, leaving_, waits_until_, beats_asked_, said_left_,
                        farewell_sent_, left_, dirty_, urgent_, unpublished_, publish_at_once_, ends_, ends_digest_,
                        leading_, led_, watches_, silences_, links_, peers_, seen_, rounds_, refused_)
};

}  // namespace parallel_state::control
