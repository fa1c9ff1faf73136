// Explores all interleavings of a few processes that run C++ of csrc, with the reorderings that C++ allows. A process
// is a fiber that stops before each operation on a shared atomic variable and before each system call. A state is not
// entered twice.
//
// Include the standard headers that the code needs, then this header, then the code: its atomics, fences, memcpy and
// system calls come here.
//
// An atomic variable is the list of its stores. A process's view is the oldest store of each variable that it may still
// load, and the accesses to each block of data that happened before. An acquire load joins the view that a release
// store left. A store may be delayed past later loads, as by a compiler. Weaker than C++: fences, membarrier and the
// kernel order atomic variables, but not data.
#pragma once

#include <linux/futex.h>
#include <linux/membarrier.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace interleavings {

constexpr int kProcesses = 4;
constexpr int kVariables = 40;
constexpr int kAccesses = 56;
constexpr int kMostStores = 24;
constexpr std::size_t kStackBytes = 32 << 10;
constexpr std::size_t kHeapBytes = 8 << 10;
constexpr std::size_t kSharedBytes = 4 << 10;
constexpr std::size_t kClearedBytes = 4 << 10;
constexpr std::uint64_t kAll = 1 << 30;

using Word = std::uint64_t;
using Change = Word (*)(Word, Word);

struct View {
  std::uint8_t stores[kVariables];
  std::uint8_t accesses[kAccesses];

  void join_stores(const View& other) {
    for (int i = 0; i < kVariables; ++i) stores[i] = std::max(stores[i], other.stores[i]);
  }
  void join(const View& other) {
    join_stores(other);
    for (int i = 0; i < kAccesses; ++i) accesses[i] = std::max(accesses[i], other.accesses[i]);
  }
};

struct Store {
  Word value;
  View view;
};

enum class Kind { kNothing, kLoad, kStore, kChange, kFence, kBarrier, kSleep, kWake };

struct Operation {
  Kind kind = Kind::kNothing;
  const char* name = "";
  int variable = 0;
  std::memory_order order = std::memory_order_relaxed;
  bool times_out = false;
  Word value = 0;
  Change change = nullptr;
};

struct Process {
  enum State { kReady, kAsleep, kDone } state = kReady;
  bool has_news = false;  // since it fell asleep
  Operation next;
  Word result = 0;
  int delayed = -1;  // the variable of a store that nobody can load yet
  Store delayed_store{};
  View view{};
  std::size_t heap_used = 0;
  void* resume[5] = {};
};

struct Options {
  enum Barriers { kWork, kFail, kFailAfterRegistration } barriers = kWork;
  bool sleeps_time_out = false;  // all; else those of less than 20 ms
  std::string weakened;          // SITE=relaxed or SITE=acq_rel
};

class Machine {
 public:
  Options options;

  Machine() { std::fill_n(variable_at_, kSharedBytes, -1); }

  // `set_up` calls the four functions that follow.
  bool explore(const std::function<void()>& set_up) {
    do {
      learned_ = false;
      seen_.assign(1 << 16, 0);
      states_ = 0;
    } while (!explore_from(set_up) && learned_);
    return failure_.empty();
  }
  template <typename Construct>
  void add(const std::string& role, Construct construct) {
    constructing_ = count_++;
    roles_[constructing_] = role;
    bodies_[constructing_] = construct();
    constructing_ = -1;
  }
  void name(const void* variable, const char* name) { names_[offset(variable)] = name; }
  void set_data(const char* data, std::size_t block_bytes, std::size_t blocks) {
    data_ = data;
    block_bytes_ = block_bytes;
    data_bytes_ = block_bytes * blocks;
  }
  char* shared() { return memory_.shared; }

  std::size_t states() const { return states_; }
  // Operations with an order, as "ROLE VARIABLE.OPERATION in FUNCTION".
  const std::set<std::string>& sites() const { return sites_; }
  void print_failure() {
    for (const Frame& frame : path_) {
      if (frame.next == 0) continue;
      restore(frame.state);
      std::printf("  %s\n", describe(frame.choices[frame.next - 1]).c_str());
    }
    std::printf("broken: %s\n", failure_.c_str());
  }

  // By processes:

  void fail(const std::string& what) {
    failure_ = what;
    if (running_ >= 0) jump(scheduler_);
  }

  // False: the caller uses its memory, because no process stores what another loads.
  bool access(Operation operation, const void* address, std::size_t bytes, const char* function, Word* result) {
    if (running_ < 0 || !is_shared(address)) return false;
    const Inside inside(this);
    const std::size_t at = offset(address);
    bytes_at_[at] = bytes;
    learn(at, operation.kind);
    if (variable_at_[at] < 0) return false;
    operation.variable = variable_at_[at];
    if (operation.order != std::memory_order_relaxed) {
      operation.order = order_at({operation.name, function, at, running_}, operation.order);
    }
    Process& me = processes_[running_];
    if (operation.kind != Kind::kStore) {
      *result = perform(operation);
      return true;
    }
    if (operation.order == std::memory_order_seq_cst) fail("a seq_cst store isn't supported");
    if (me.delayed >= 0) perform({});
    me.delayed = operation.variable;
    me.delayed_store = {operation.value, is_release(operation.order) ? me.view : View{}};
    return true;
  }

  void access_data(std::uintptr_t at, bool writes) {
    const auto data = reinterpret_cast<std::uintptr_t>(data_);
    if (running_ < 0 || at < data || at >= data + data_bytes_) return;
    const Inside inside(this);
    const int block = static_cast<int>((at - data) / block_bytes_);
    const auto index = [&](int process, bool is_write) { return 2 * (block * count_ + process) + (is_write ? 1 : 0); };
    if (index(count_, false) > kAccesses) fail("too many blocks");
    View& view = processes_[running_].view;
    for (int other = 0; other < count_; ++other) {
      for (const bool is_write : {true, false}) {
        const int i = index(other, is_write);
        if (other == running_ || !(writes || is_write) || view.accesses[i] == accesses_[i]) continue;
        fail(role(running_) + (writes ? " writes" : " reads") + " block " + std::to_string(block) + " while " +
             role(other) + (is_write ? " writes it" : " reads it"));
      }
    }
    const int mine = index(running_, writes);
    view.accesses[mine] = ++accesses_[mine];
    if (accesses_[mine] == 0) fail("too many accesses");
  }

  // Ends the delay of a store.
  void order() { perform_if_running({}); }
  void fence() { perform_if_running({Kind::kFence, "fence"}); }
  bool membarrier(int command) {
    if (command == MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED) return options.barriers != Options::kFail;
    if (options.barriers != Options::kWork) return false;
    perform_if_running({Kind::kBarrier, "membarrier"});
    return true;
  }
  // Returns an errno.
  int futex_wait(const void* word, std::uint32_t seen, bool times_out) {
    Operation operation{Kind::kSleep, "sleep"};
    operation.times_out = times_out || options.sleeps_time_out;
    operation.value = seen;
    return static_cast<int>(perform_on(word, operation));
  }
  // `count`: 1 or kAll.
  void futex_wake(const void* word, Word count) {
    Operation operation{Kind::kWake, "wake"};
    operation.value = count;
    perform_on(word, operation);
  }
  int core() {
    order();
    return running_;
  }

  void* allocate(std::size_t bytes) {
    const int process = running_ >= 0 && !is_inside_ ? running_ : constructing_;
    if (process < 0) return std::malloc(bytes);
    std::size_t& used = processes_[process].heap_used;
    char* const block = memory_.of[process].heap + used;
    used += (bytes + 63) / 64 * 64;
    return used <= kHeapBytes ? block : nullptr;
  }
  void release(void* block) {
    const char* const at = static_cast<const char*>(block);
    if (at < memory_.shared || at >= memory_.shared + sizeof memory_) std::free(block);
  }

 private:
  struct Site {
    const char* operation;
    const char* function;
    std::size_t offset;
    int process;

    bool operator==(const Site& other) const {
      return operation == other.operation && function == other.function && offset == other.offset &&
             process == other.process;
    }
  };

  using Choice = std::pair<int, int>;  // a process and one of its possible steps

  struct Frame {
    std::string state;
    std::vector<Choice> choices;
    std::size_t next = 0;
  };

  // Allocations aren't those of the process.
  class Inside {
   public:
    explicit Inside(Machine* machine) : machine_(machine) { machine_->is_inside_ = true; }
    ~Inside() { machine_->is_inside_ = false; }

   private:
    Machine* const machine_;
  };

  static bool is_acquire(std::memory_order order) {
    return order != std::memory_order_relaxed && order != std::memory_order_release;
  }
  static bool is_release(std::memory_order order) {
    return order != std::memory_order_relaxed && order != std::memory_order_acquire;
  }
  bool is_shared(const void* address) const {
    const char* const at = static_cast<const char*>(address);
    return at >= memory_.shared && at < memory_.shared + kSharedBytes;
  }
  std::size_t offset(const void* address) const {
    return static_cast<std::size_t>(static_cast<const char*>(address) - memory_.shared);
  }
  std::string role(int process) const { return roles_[process] + (process == 0 ? "" : " " + std::to_string(process)); }
  bool loads(int process, int variable) const { return (loaded_by_[offsets_[variable]] >> process & 1) != 0; }

  // If another process turns out to use a variable, the exploration starts again.
  void learn(std::size_t at, Kind kind) {
    unsigned& users = kind == Kind::kLoad || kind == Kind::kSleep ? loaded_by_[at] : stored_by_[at];
    const bool is_futex = kind == Kind::kSleep || kind == Kind::kWake;
    const bool is_known = (users >> running_ & 1) != 0;
    users |= 1U << running_;
    const unsigned all = loaded_by_[at] | stored_by_[at];
    const bool is_of_several = stored_by_[at] != 0 && (all & (all - 1)) != 0;
    if (variable_at_[at] < 0 ? !is_futex && !is_of_several : is_known) return;
    if (variable_at_[at] < 0) {
      if (variables_ == kVariables) fail("too many variables");
      offsets_[variables_] = at;
      variable_at_[at] = variables_++;
    }
    learned_ = true;
    jump(scheduler_);
  }

  std::memory_order order_at(const Site& site, std::memory_order order) {
    for (const auto& [known, known_order] : orders_) {
      if (known == site) return known_order;
    }
    const std::string name =
        roles_[site.process] + " " + names_[site.offset] + "." + site.operation + " in " + site.function;
    sites_.insert(name);
    if (options.weakened == name + "=relaxed") order = std::memory_order_relaxed;
    if (options.weakened == name + "=acq_rel") order = std::memory_order_acq_rel;
    orders_.emplace_back(site, order);
    return order;
  }

  void perform_if_running(const Operation& operation) {
    if (running_ >= 0) perform(operation);
  }
  Word perform_on(const void* word, Operation operation) {
    learn(offset(word), operation.kind);
    operation.variable = variable_at_[offset(word)];
    return perform(operation);
  }
  Word perform(const Operation& operation) {
    Process& me = processes_[running_];
    me.next = operation;
    const bool is_own =
        operation.kind == Kind::kLoad && (stored_by_[offsets_[operation.variable]] & ~(1U << running_)) == 0;
    if (is_own && me.delayed != operation.variable) {
      take(&me, 0);
    } else if (operation.kind != Kind::kNothing || me.delayed >= 0) {
      stop();
    }
    return std::exchange(processes_[running_].result, 0);
  }

  __attribute__((noinline)) void stop() {
    if (__builtin_setjmp(processes_[running_].resume) == 0) jump(scheduler_);
    asm volatile("" ::: "memory");
  }
  __attribute__((noinline)) void run(int process) {
    running_ = process;
    if (__builtin_setjmp(scheduler_) == 0) {
      char* const top = static_cast<char*>(processes_[process].resume[2]);
      std::memset(top - kClearedBytes, 0, kClearedBytes);  // equal states have equal bytes
      jump(processes_[process].resume);
    }
    asm volatile("" ::: "memory");
    running_ = -1;
  }
  [[noreturn]] __attribute__((noinline)) static void jump(void** to) { __builtin_longjmp(to, 1); }

  __attribute__((noinline)) void start(int process) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = memory_.of[process].stack;
    context_.uc_stack.ss_size = kStackBytes;
    makecontext(&context_, &Machine::enter, 0);
    running_ = process;
    is_inside_ = false;
    if (__builtin_setjmp(scheduler_) == 0) setcontext(&context_);
    asm volatile("" ::: "memory");
    running_ = -1;
  }
  static void enter();

  int steps(const Process& me) const {
    if (me.state == Process::kDone) return 0;
    if (me.state == Process::kAsleep) return me.next.times_out && me.has_news ? 1 : 0;
    if (stores_first(me)) return 1;
    int own = 1;
    if (me.next.kind == Kind::kLoad || me.next.kind == Kind::kSleep) own = counts_[me.next.variable] - oldest(me);
    if (me.next.kind == Kind::kWake && me.next.value != kAll) own = std::max(1, sleepers(me.next.variable));
    return own + (me.delayed >= 0 ? 1 : 0);
  }
  static bool stores_first(const Process& me) {
    return me.delayed >= 0 && (me.next.kind != Kind::kLoad || me.next.variable == me.delayed);
  }
  int oldest(const Process& me) const {
    const int variable = me.next.variable;
    int found = me.view.stores[variable];
    if (me.next.order == std::memory_order_seq_cst) found = std::max<int>(found, ordered_.stores[variable]);
    if (me.next.kind == Kind::kSleep) found = std::max<int>(found, kernel_.stores[variable]);
    return found;
  }
  bool sleeps_on(const Process& process, int variable) const {
    return process.state == Process::kAsleep && process.next.variable == variable;
  }
  int sleepers(int variable) const {
    int found = 0;
    for (int each = 0; each < count_; ++each) found += sleeps_on(processes_[each], variable);
    return found;
  }

  void step(int process, int which) {
    Process& me = processes_[process];
    woken_.clear();
    if (me.delayed >= 0 && which == 0) {
      const bool continues = me.next.kind == Kind::kNothing;
      store_delayed(&me);
      if (continues) run(process);
    } else {
      take(&me, which - (me.delayed >= 0 ? 1 : 0));
      if (me.state == Process::kReady) run(process);
    }
    for (const int each : woken_) {
      if (failure_.empty() && !learned_) run(each);
    }
    if (failure_.empty() && !learned_) forget_old_stores();
  }

  void take(Process* me, int which) {
    const int variable = me->next.variable;
    switch (me->next.kind) {
      case Kind::kNothing:
      case Kind::kStore: break;
      case Kind::kLoad: load(me, which); break;
      case Kind::kChange: change(me); break;
      case Kind::kFence:
        me->view.join_stores(ordered_);
        ordered_.join_stores(me->view);
        break;
      case Kind::kBarrier:
        for (Process& each : processes_) {
          if (each.state == Process::kDone) continue;
          for (int i = 0; i < variables_; ++i) each.view.stores[i] = static_cast<std::uint8_t>(counts_[i] - 1);
        }
        break;
      case Kind::kSleep: sleep(me, which); break;
      case Kind::kWake:
        kernel_.stores[variable] = std::max(kernel_.stores[variable], me->view.stores[variable]);
        for (int each = 0, at = 0; each < count_; ++each) {
          if (!sleeps_on(processes_[each], variable) || (me->next.value != kAll && at++ != which)) continue;
          wake(&processes_[each]);
          woken_.push_back(each);
        }
        break;
    }
  }

  void load(Process* me, int which) {
    const int variable = me->next.variable, at = oldest(*me) + which;
    me->view.stores[variable] = static_cast<std::uint8_t>(at);
    if (is_acquire(me->next.order)) me->view.join(stores_[variable][at].view);
    me->result = stores_[variable][at].value;
  }

  void change(Process* me) {
    const int variable = me->next.variable;
    Store store = stores_[variable][counts_[variable] - 1];
    me->result = store.value;
    if (is_acquire(me->next.order)) me->view.join(store.view);
    if (is_release(me->next.order)) store.view.join(me->view);
    store.value = me->next.change(store.value, me->next.value);
    add_store(me, variable, store);
    if (me->next.order == std::memory_order_seq_cst) ordered_.stores[variable] = me->view.stores[variable];
  }

  void store_delayed(Process* me) {
    add_store(me, me->delayed, me->delayed_store);
    me->delayed = -1;
    me->delayed_store = {};
  }

  void add_store(Process* me, int variable, Store store) {
    const int at = counts_[variable];
    if (at == kMostStores) return fail("too many stores");
    store.view.stores[variable] = me->view.stores[variable] = static_cast<std::uint8_t>(at);
    stores_[variable][at] = store;
    ++counts_[variable];
    for (int each = 0; each < count_; ++each) {
      if (processes_[each].state == Process::kAsleep && loads(each, variable)) processes_[each].has_news = true;
    }
  }

  void sleep(Process* me, int which) {
    if (me->state == Process::kAsleep) {
      wake(me);
      me->result = ETIMEDOUT;
      return;
    }
    load(me, which);
    if (static_cast<std::uint32_t>(me->result) != me->next.value) {
      me->result = EAGAIN;
      return;
    }
    me->result = 0;
    me->state = Process::kAsleep;
    for (int variable = 0; variable < variables_; ++variable) {
      const bool is_newest = me->view.stores[variable] + 1 == counts_[variable];
      if (!is_newest && loads(static_cast<int>(me - processes_), variable)) me->has_news = true;
    }
  }
  static void wake(Process* process) {
    process->state = Process::kReady;
    process->has_news = false;
  }

  // Removes stores that nobody can load any more, so that the number of states is finite.
  void forget_old_stores() {
    for (int variable = 0; variable < variables_; ++variable) {
      int base = counts_[variable] - 1;
      for (int each = 0; each < count_; ++each) {
        const Process& process = processes_[each];
        if (process.state != Process::kDone && loads(each, variable)) {
          base = std::min<int>(base, process.view.stores[variable]);
        }
      }
      if (base == 0) continue;
      counts_[variable] -= base;
      std::copy_n(stores_[variable] + base, counts_[variable], stores_[variable]);
      const auto shift = [&](View* view) {
        std::uint8_t& at = view->stores[variable];
        at = static_cast<std::uint8_t>(std::max(0, at - base));
      };
      for (int each = 0; each < count_; ++each) {
        shift(&processes_[each].view);
        shift(&processes_[each].delayed_store.view);
      }
      for (int other = 0; other < variables_; ++other) {
        for (int at = 0; at < counts_[other]; ++at) shift(&stores_[other][at].view);
      }
      shift(&ordered_);
      shift(&kernel_);
    }
  }

  // All that a state consists of.
  template <typename Use>
  void for_each_part(Use use) {
    use(memory_.shared, kSharedBytes);
    for (int each = 0; each < count_; ++each) {
      Process& process = processes_[each];
      use(&process, sizeof process);
      if (process.state == Process::kDone) continue;
      use(memory_.of[each].heap, process.heap_used);
      char* const end = memory_.of[each].stack + kStackBytes;
      char* const top = static_cast<char*>(process.resume[2]);
      use(top, static_cast<std::size_t>(end - top));
    }
    use(counts_, sizeof counts_);
    for (int variable = 0; variable < variables_; ++variable) {
      use(stores_[variable], static_cast<std::size_t>(counts_[variable]) * sizeof(Store));
    }
    use(accesses_, sizeof accesses_);
    use(&ordered_, sizeof ordered_);
    use(&kernel_, sizeof kernel_);
  }
  void restore(const std::string& state) {
    const char* from = state.data();
    for_each_part([&](void* to, std::size_t bytes) {
      std::memcpy(to, from, bytes);
      from += bytes;
    });
  }

  bool explore_from(const std::function<void()>& set_up) {
    failure_.clear();
    path_.clear();
    orders_.clear();
    std::memset(&memory_, 0, sizeof memory_);
    std::memset(accesses_, 0, sizeof accesses_);
    std::fill_n(processes_, kProcesses, Process());
    ordered_ = kernel_ = View{};
    count_ = 0;
    set_up();
    for (int variable = 0; variable < variables_; ++variable) {
      counts_[variable] = 1;
      stores_[variable][0] = Store{};
      std::memcpy(&stores_[variable][0].value, memory_.shared + offsets_[variable], bytes_at_[offsets_[variable]]);
    }
    for (int each = 0; each < count_; ++each) {
      start(each);
      if (learned_ || !failure_.empty()) return false;
    }
    enter_state();
    while (!path_.empty() && failure_.empty()) {
      Frame& top = path_.back();
      if (top.next == top.choices.size()) {
        path_.pop_back();
        continue;
      }
      if (&top != current_ || top.next != 0) restore(top.state);
      const auto [process, which] = top.choices[top.next++];
      step(process, which);
      if (learned_) return false;
      if (failure_.empty()) enter_state();
    }
    return failure_.empty();
  }

  void enter_state() {
    current_ = nullptr;
    std::string state;
    for_each_part([&](const void* at, std::size_t bytes) { state.append(static_cast<const char*>(at), bytes); });
    if (!insert(digest(state))) return;
    Frame frame;
    bool all_done = true;
    for (int each = 0; each < count_; ++each) {
      all_done = all_done && processes_[each].state == Process::kDone;
      const int count = steps(processes_[each]);
      for (int which = 0; which < count; ++which) frame.choices.emplace_back(each, which);
    }
    if (frame.choices.empty() && !all_done) failure_ = "nobody moves any more";
    frame.state = std::move(state);
    path_.push_back(std::move(frame));
    current_ = &path_.back();
  }

  static Word digest(const std::string& state) {
    Word digest = state.size();
    for (std::size_t at = 0; at < state.size(); at += sizeof(Word)) {
      Word word = 0;
      std::memcpy(&word, state.data() + at, std::min(sizeof word, state.size() - at));
      digest = (digest ^ word) * 0x9e3779b97f4a7c15;
      digest ^= digest >> 29;
    }
    return std::max<Word>(digest, 1);
  }
  bool insert(Word digest) {
    if (2 * (states_ + 1) > seen_.size()) {
      std::vector<Word> before(2 * seen_.size(), 0);
      before.swap(seen_);
      for (const Word each : before) {
        if (each != 0) *find(each) = each;
      }
    }
    Word* const at = find(digest);
    if (*at != 0) return false;
    *at = digest;
    ++states_;
    return true;
  }
  Word* find(Word digest) {
    std::size_t at = digest & (seen_.size() - 1);
    while (seen_[at] != 0 && seen_[at] != digest) at = (at + 1) & (seen_.size() - 1);
    return &seen_[at];
  }

  std::string describe(const Choice& choice) {
    const Process& me = processes_[choice.first];
    std::string text = role(choice.first) + ": ";
    const auto variable = [&](int index) { return names_[offsets_[index]] + " @" + std::to_string(offsets_[index]); };
    if (me.state == Process::kAsleep) return text + "timeout";
    if (me.delayed >= 0 && choice.second == 0) {
      return text + "store " + variable(me.delayed) + " = " + std::to_string(me.delayed_store.value);
    }
    text += me.next.name;
    if (me.next.kind == Kind::kNothing || me.next.kind == Kind::kFence || me.next.kind == Kind::kBarrier) return text;
    text += " " + variable(me.next.variable);
    if (me.next.kind != Kind::kLoad && me.next.kind != Kind::kSleep) return text;
    const int at = oldest(me) + choice.second - (me.delayed >= 0 ? 1 : 0);
    return text + ": " + std::to_string(stores_[me.next.variable][at].value);
  }

  struct {
    alignas(4096) char shared[kSharedBytes];
    struct {
      alignas(64) char heap[kHeapBytes];
      alignas(64) char stack[kStackBytes];
    } of[kProcesses];
  } memory_;

  int count_ = 0;
  std::string roles_[kProcesses];
  std::function<void()> bodies_[kProcesses];
  Process processes_[kProcesses];
  int running_ = -1, constructing_ = -1;
  bool is_inside_ = false;
  void* scheduler_[5];
  ucontext_t context_;

  int counts_[kVariables] = {};
  Store stores_[kVariables][kMostStores];
  std::uint8_t accesses_[kAccesses];
  View ordered_;  // by operations that are seq_cst
  View kernel_;   // passed from a process that wakes others to those that fall asleep
  std::vector<int> woken_;
  const char* data_ = nullptr;
  std::size_t block_bytes_ = 1, data_bytes_ = 0;

  bool learned_ = false;
  int variables_ = 0;
  std::size_t offsets_[kVariables];
  int variable_at_[kSharedBytes];
  std::size_t bytes_at_[kSharedBytes] = {};
  unsigned loaded_by_[kSharedBytes] = {}, stored_by_[kSharedBytes] = {};  // a bit per process
  std::string names_[kSharedBytes];
  std::vector<std::pair<Site, std::memory_order>> orders_;
  std::set<std::string> sites_;

  std::vector<Word> seen_;
  std::size_t states_ = 0;
  std::vector<Frame> path_;
  const Frame* current_ = nullptr;
  std::string failure_;
};

inline Machine machine;

inline void Machine::enter() {
  machine.bodies_[machine.running_]();
  machine.order();
  Process& me = machine.processes_[machine.running_];
  me = Process();
  me.state = Process::kDone;
  jump(machine.scheduler_);
}

template <typename T>
class Atomic {
 public:
  Atomic() = default;
  constexpr Atomic(T value) : value_(value) {}
  Atomic(const Atomic&) = delete;
  Atomic& operator=(const Atomic&) = delete;

  T load(std::memory_order order = std::memory_order_seq_cst, const char* function = __builtin_FUNCTION()) const {
    Word found = 0;
    return use({Kind::kLoad, "load"}, order, 0, nullptr, function, &found) ? from(found) : value_;
  }
  void store(T value, std::memory_order order = std::memory_order_seq_cst,
             const char* function = __builtin_FUNCTION()) {
    if (!use({Kind::kStore, "store"}, order, to(value), nullptr, function, nullptr)) value_ = value;
  }
  T fetch_add(T by, std::memory_order order, const char* function = __builtin_FUNCTION()) {
    return change("add", by, order, function,
                  [](Word value, Word by) { return to(static_cast<T>(from(value) + from(by))); });
  }
  T fetch_sub(T by, std::memory_order order, const char* function = __builtin_FUNCTION()) {
    return change("sub", by, order, function,
                  [](Word value, Word by) { return to(static_cast<T>(from(value) - from(by))); });
  }
  T fetch_or(T bits, std::memory_order order, const char* function = __builtin_FUNCTION()) {
    return change("or", bits, order, function, [](Word value, Word by) { return value | by; });
  }
  T fetch_and(T bits, std::memory_order order, const char* function = __builtin_FUNCTION()) {
    return change("and", bits, order, function, [](Word value, Word by) { return value & by; });
  }

 private:
  static Word to(T value) {
    Word word = 0;
    std::memcpy(&word, &value, sizeof value);
    return word;
  }
  static T from(Word word) {
    T value{};
    std::memcpy(&value, &word, sizeof value);
    return value;
  }
  bool use(Operation operation, std::memory_order order, Word value, Change change, const char* function,
           Word* result) const {
    operation.order = order;
    operation.value = value;
    operation.change = change;
    return machine.access(operation, this, sizeof(T), function, result);
  }
  T change(const char* name, T by, std::memory_order order, const char* function, Change change) {
    Word found = 0;
    if (use({Kind::kChange, name}, order, to(by), change, function, &found)) return from(found);
    const T before = value_;
    value_ = from(change(to(before), to(by)));
    return before;
  }

  T value_;
};

inline void* copy(void* to, const void* from, std::size_t bytes) {
  machine.access_data(reinterpret_cast<std::uintptr_t>(from), false);
  machine.access_data(reinterpret_cast<std::uintptr_t>(to), true);
  return std::memcpy(to, from, bytes);
}

inline int read_clock(int, timespec* now) {
  now->tv_sec = 1;
  now->tv_nsec = 0;
  return 0;
}

inline long call_system(long, int command, int, int) { return machine.membarrier(command) ? 0 : -1; }

// Sleeps of less than 20 ms are those of a process that may not be woken.
inline long call_system(long, const std::uint32_t* word, int operation, std::uint32_t value, const timespec* limit,
                        std::nullptr_t, int) {
  if (operation == FUTEX_WAKE) return machine.futex_wake(word, value), 0;
  errno = machine.futex_wait(word, value, limit != nullptr && limit->tv_sec == 0 && limit->tv_nsec < 20'000'000);
  return errno == 0 ? 0 : -1;
}

}  // namespace interleavings

__attribute__((noinline)) void* operator new(std::size_t bytes) {
  void* const block = interleavings::machine.allocate(bytes);
  return block != nullptr ? block : throw std::bad_alloc();
}
void* operator new(std::size_t bytes, std::align_val_t) { return operator new(bytes); }  // at most 64
void operator delete(void* block, std::align_val_t) noexcept { operator delete(block); }
void operator delete(void* block, std::size_t, std::align_val_t) noexcept { operator delete(block); }
__attribute__((noinline)) void operator delete(void* block) noexcept { interleavings::machine.release(block); }
void operator delete(void* block, std::size_t) noexcept { operator delete(block); }

namespace std {
template <typename T>
using explored_atomic = interleavings::Atomic<T>;
inline void explored_thread_fence(memory_order) { interleavings::machine.fence(); }
inline void explored_signal_fence(memory_order) { interleavings::machine.order(); }
inline void* explored_copy(void* to, const void* from, size_t bytes) { return interleavings::copy(to, from, bytes); }
}  // namespace std

#define atomic explored_atomic
#define atomic_thread_fence explored_thread_fence
#define atomic_signal_fence explored_signal_fence
#define memcpy explored_copy
#define syscall(...) interleavings::call_system(__VA_ARGS__)
#define sched_getcpu() interleavings::machine.core()
#define clock_gettime(...) interleavings::read_clock(__VA_ARGS__)
