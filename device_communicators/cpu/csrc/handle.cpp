#include "handle.h"

#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <new>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

#include "forks.h"

namespace parallel_state {
namespace {

struct Tables {
  std::shared_mutex mutex;
  std::uint64_t last_number = 0;
  std::unordered_map<std::uint64_t, std::shared_ptr<Handle>> by_number;
  std::unordered_map<std::string, std::shared_ptr<Served>> by_key;
  std::atomic<std::uint64_t> version{1};
};

std::atomic<bool> measured{false};

constexpr std::size_t kFirstWindowBytes = 8 << 20;

std::atomic<Tables*>& current_tables();

// Inherited groups are leaked: a thread of the parent may have held the lock.
void forget_all() {
  Tables* const inherited = current_tables().load(std::memory_order_relaxed);
  auto* const fresh = new Tables;
  fresh->last_number = inherited->last_number;
  fresh->version.store(inherited->version.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  current_tables().store(fresh, std::memory_order_relaxed);
}

// Never destroyed: threads may be in a call at exit.
std::atomic<Tables*>& current_tables() {
  static std::atomic<Tables*> current{(in_forked_children(forget_all), new Tables)};
  return current;
}

Tables& tables() { return *current_tables().load(std::memory_order_relaxed); }

}  // namespace

namespace {

void* private_memory(std::size_t bytes) {
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return memory;
}

}  // namespace

Handle::Handle(void* memory, std::size_t bytes, int rank, int size, WaitPolicy policy, double timeout_s)
    : memory_(memory == nullptr ? private_memory(segment_bytes(size)) : memory),
      bytes_(memory == nullptr ? segment_bytes(size) : bytes),
      policy_(policy),
      timeout_s_(std::min(timeout_s, kLongestS)),
      liveness_(reinterpret_cast<Member*>(static_cast<char*>(memory_) + members_offset(size)),
                reinterpret_cast<ReportedEnds*>(static_cast<char*>(memory_) + ends_offset(size)), size, rank),
      host_group_(memory_, rank, size, liveness_, policy),
      group_(&host_group_),
      meter_(std::make_unique<Meter>(size)),
      queues_(size) {}

void Handle::span(int rank, std::vector<int> host_of_rank, std::unique_ptr<Connections> connections, bool meshed,
                  bool rounded) {
  meter_ = std::make_unique<Meter>(static_cast<int>(host_of_rank.size()));
  hosts_ = std::make_unique<HostsGroup>(host_group_, liveness_, rank, std::move(host_of_rank), std::move(connections),
                                        meshed, rounded, policy_);
  group_ = hosts_.get();
}

void Handle::listen_to(const std::shared_ptr<control::EndListeners>& source, std::vector<int> ranks,
                       std::vector<int> domain) {
  std::vector<int> local = ranks;
  if (hosts_ != nullptr) {
    local.clear();
    for (const int rank : hosts_->local_ranks()) local.push_back(ranks[static_cast<std::size_t>(rank)]);
    // First: a wait that detects a death in the domain must know whether the rank is in the group.
    hosts_->listen_to(source, std::move(ranks));
  }
  liveness_.listen_to(source, std::move(local), std::move(domain));
}

Loss Handle::loss(int rank) const {
  if (hosts_ == nullptr) return liveness_.loss(rank);
  return hosts_->loss(rank);
}

void Handle::leave_group() {
  liveness_.leave();
  if (hosts_ == nullptr || !enter()) return;
  hosts_->connections().leave();
  leave();
}

void Handle::fail(int status, int suspect) {
  liveness_.fail(status, suspect);
  if (hosts_ == nullptr || !enter()) return;
  hosts_->fail(static_cast<Status>(status), suspect);
  leave();
}

bool Handle::has_left(int rank) const { return hosts_ == nullptr ? liveness_.has_left(rank) : hosts_->has_left(rank); }

Handle::~Handle() {
  liveness_.stop_listening();  // the control plane's thread writes to this memory
  if (hosts_ != nullptr) hosts_->stop_listening();
  munmap(memory_, bytes_);
}

void Handle::set_arenas(void* const* first_pages, std::size_t bytes, int descriptor, std::size_t file_offset) {
  for (int rank = 0; rank < host_group_.size(); ++rank) {
    windows_.push_back(std::make_unique<Windows>(first_pages[rank], bytes, std::min(bytes, kFirstWindowBytes)));
  }
  host_group_.set_arenas(windows_);
  arena_ = std::make_unique<Arena>(*windows_[host_group_.rank()], descriptor, file_offset);
  lender_ = std::make_unique<Lender>(*arena_, *windows_[host_group_.rank()]);
}

Windows* Handle::windows_of(int rank) const {
  const int place = hosts_ == nullptr ? rank : hosts_->place_of(rank);
  return place < 0 ? nullptr : arena_of(place);
}

void Handle::note(Status status, double elapsed_s) {
  {
    const std::lock_guard<std::mutex> lock(failure_mutex_);
    failure_ = {group_->failure(), elapsed_s, group_->text()};
    failure_.status = static_cast<int>(status);
    failed_ = true;
  }
  // This host's ranks don't know yet that a rank of another host left.
  const bool is_known = failure_.reporter >= 0 && (hosts_ == nullptr || hosts_->is_here(failure_.reporter));
  const int suspect = failure_.suspect;
  const bool has_left = hosts_ != nullptr && suspect >= 0 && suspect < hosts_->size() && !hosts_->is_here(suspect) &&
                        hosts_->has_left(suspect);
  if (!is_known && (status != Status::kPeerDied || has_left)) {
    const bool has_calls = status == Status::kMismatch;
    liveness_.fail(static_cast<int>(status), failure_.suspect, has_calls ? failure_.expected.told : Told{},
                   has_calls ? failure_.found.told : Told{}, failure_.misfit);
  }
  group_->give_up(status);
  if (arena_ != nullptr) arena_->retire();
}

void Handle::doom() {
  if (failed_) return;
  failed_ = true;
  const std::lock_guard<std::mutex> lock(failure_mutex_);
  failure_.status = static_cast<int>(Status::kPeerDied);
  failure_.suspect = liveness_.loss(host_group_.rank()).rank;
  if (hosts_ != nullptr) {
    hosts_->blame_dead();
    failure_.suspect = hosts_->failure().suspect;
    hosts_->give_up(Status::kPeerDied);
  }
  if (arena_ != nullptr) arena_->retire();
}

void measure_calls(bool on) { measured.store(on, std::memory_order_relaxed); }

bool calls_are_measured() { return measured.load(std::memory_order_relaxed); }

void Meter::note(const Group& group, std::int64_t took_ns) {
  const auto add = [](std::atomic<std::uint64_t>& to, std::uint64_t what) {
    to.store(to.load(std::memory_order_relaxed) + what, std::memory_order_relaxed);
  };
  Row& row = rows[group.method()];
  add(row.calls, 1);
  add(row.took_ns, took_ns);
  add(row.waited_ns, group.waited_ns());
  add(last[group.last()], 1);
}

double coarse_now_s() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

void Record::begin(std::uint64_t number, Counted what) {
  constexpr auto relaxed = std::memory_order_relaxed;
  ended_s.store(0, relaxed);
  sequence.store(number, relaxed);
  operation.store(static_cast<int>(what), relaxed);
  dims.store(0, relaxed);
  started_s.store(coarse_now_s(), relaxed);
}

void Record::describe(int tensor_dtype, const std::int64_t* tensor_sizes, std::size_t tensor_dims) {
  constexpr auto relaxed = std::memory_order_relaxed;
  dtype.store(tensor_dtype, relaxed);
  dims.store(static_cast<std::int64_t>(tensor_dims), relaxed);
  for (std::size_t dim = 0; dim < tensor_dims && dim < kDims; ++dim) sizes[dim].store(tensor_sizes[dim], relaxed);
}

Record& Served::begin(Counted operation, Told told) {
  const std::uint64_t sequence = next();
  Record& record = records_[sequence % kRecords];
  record.begin(sequence, operation);
  record.method.store(static_cast<std::int64_t>(told.word), std::memory_order_relaxed);
  return record;
}

Record& Served::begin_transfer(Counted operation, int peer, int method) {
  transfers_under_way_.fetch_add(1, std::memory_order_relaxed);
  Record& record = transfers_[next_transfer_.fetch_add(1, std::memory_order_relaxed) % kRecords];
  record.begin(sequence_.load(std::memory_order_relaxed), operation);
  record.peer.store(peer, std::memory_order_relaxed);
  record.method.store(method, std::memory_order_relaxed);
  return record;
}

std::uint64_t keep(std::shared_ptr<Handle> handle) {
  const std::unique_lock<std::shared_mutex> lock(tables().mutex);
  const std::uint64_t number = ++tables().last_number;
  tables().by_number.emplace(number, std::move(handle));
  return number;
}

std::shared_ptr<Handle> find(std::uint64_t number) {
  const std::shared_lock<std::shared_mutex> lock(tables().mutex);
  const auto found = tables().by_number.find(number);
  return found == tables().by_number.end() ? nullptr : found->second;
}

void forget(std::uint64_t number) {
  std::shared_ptr<Handle> last;
  const std::unique_lock<std::shared_mutex> lock(tables().mutex);
  const auto found = tables().by_number.find(number);
  if (found == tables().by_number.end()) return;
  last = std::move(found->second);
  tables().by_number.erase(found);
}

namespace {

thread_local const Handle* overlapped = nullptr;
thread_local std::uint64_t called_as = 0;
thread_local double began_s = 0;
thread_local double left_to_op_s = 0;
thread_local const Handle* held = nullptr;

}  // namespace

bool Handle::is_held() const { return held == this; }

bool Handle::hold() {
  if (!enter()) return false;
  held = this;
  return true;
}

void Handle::release() {
  held = nullptr;
  leave();
}

void note_overlap(const Handle* handle) { overlapped = handle; }

bool take_overlap(const Handle* handle) {
  if (overlapped == nullptr) return false;
  const bool found = overlapped == handle;
  overlapped = nullptr;
  return found;
}

Repetition::Repetition(double began) : outer_s_(began_s) {
  if (began_s == 0) began_s = began;
}

Repetition::~Repetition() {
  began_s = outer_s_;
  note_overlap(nullptr);
}

double repeated_since_s() { return began_s; }

void leave_to_op(double began) { left_to_op_s = began; }

double take_left_to_op() { return std::exchange(left_to_op_s, 0); }

void call_as(int method) { called_as = static_cast<std::uint64_t>(method); }

Told as_called(Told told) {
  if (called_as != 0 && ((called_as ^ told.word) & 255 & ~kVariants) == 0) {
    told.word = (told.word & ~std::uint64_t{255}) | called_as;
  }
  return told;
}

void serve(const std::string& key, std::shared_ptr<Handle> handle) {
  const std::unique_lock<std::shared_mutex> lock(tables().mutex);
  tables().by_key[key] = std::make_shared<Served>(std::move(handle));
  tables().version.fetch_add(1, std::memory_order_release);
}

void stop_serving(const std::string& key) {
  std::shared_ptr<Served> last;
  const std::unique_lock<std::shared_mutex> lock(tables().mutex);
  const auto found = tables().by_key.find(key);
  if (found == tables().by_key.end()) return;
  last = std::move(found->second);
  tables().by_key.erase(found);
  tables().version.fetch_add(1, std::memory_order_release);
}

std::shared_ptr<Served> find_served(std::string_view key) {
  thread_local std::string last_key;
  thread_local std::weak_ptr<Served> last;
  thread_local std::uint64_t last_version = 0;
  const std::uint64_t version = tables().version.load(std::memory_order_acquire);
  if (version == last_version && key == last_key) return last.lock();
  const std::shared_lock<std::shared_mutex> lock(tables().mutex);
  const std::size_t size_at = key.rfind('/'), rank_at = key.rfind('@');
  const bool is_ranked = size_at != key.npos && rank_at != key.npos && size_at < rank_at;
  const auto found = tables().by_key.find(std::string(is_ranked ? key.substr(0, rank_at) : key));
  std::shared_ptr<Served> served = found == tables().by_key.end() ? nullptr : found->second;
  last_key = key;
  last = served;
  last_version = version;
  return served;
}

}  // namespace parallel_state
