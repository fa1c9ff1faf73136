// All orders of posts, arrivals and cancels in small cases of the matcher of transfers.
//
//   matcher_explorer --messages M --receives R
//
// Checked after each step:
//
//   - a match has one source and tag, and uses each message and each receive once;
//   - a message is matched before any later one of its source and tag;
//   - a receive is matched before any later one that accepts the same message;
//   - no held message fits a posted receive;
//   - the matcher's reports about sources are true.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "matcher.h"

using parallel_state::Matcher;

namespace {

constexpr int kSources = 2, kTags = 2, kAny = -1;

struct Step {
  int source, tag;
  int cancels = -1;
};

struct Message {
  int source, number, tag;
};

struct State {
  State() : matcher(kSources) {}
  Matcher<int, int> matcher;
  std::vector<Message> messages;
  std::vector<bool> message_matched;
  std::vector<Step> receives;
  std::vector<bool> receive_open;
  std::string log;
};

class Explorer {
 public:
  Explorer(int messages, int receives) : most_messages_(messages), most_receives_(receives) {}

  void run() {
    std::vector<std::vector<int>> lists;
    for (int length = 0; length <= most_messages_; ++length) add_lists(length, {}, &lists);
    for (const auto& first : lists) {
      for (const auto& second : lists) {
        sent_[0] = first;
        sent_[1] = second;
        choose_steps(0);
      }
    }
    std::printf("%lld orders, all holds\n", orders_);
  }

 private:
  void add_lists(int length, std::vector<int> made, std::vector<std::vector<int>>* lists) {
    if (static_cast<int>(made.size()) == length) return lists->push_back(made);
    for (int tag = 0; tag < kTags; ++tag) {
      made.push_back(tag);
      add_lists(length, made, lists);
      made.pop_back();
    }
  }

  void choose_steps(int posts) {
    explore(State(), 0, 0, 0);
    if (posts == most_receives_) return;
    for (int source = kAny; source < kSources; ++source) {
      for (int tag = 0; tag < kTags; ++tag) {
        steps_.push_back({source, tag});
        choose_steps(posts + 1);
        steps_.pop_back();
      }
    }
    if (has_cancel_) return;
    has_cancel_ = true;
    for (int number = 0; number < posts; ++number) {
      steps_.push_back({0, 0, number});
      choose_steps(posts);
      steps_.pop_back();
    }
    has_cancel_ = false;
  }

  void explore(State state, std::size_t step, std::size_t first, std::size_t second) {
    const std::size_t next[] = {first, second};
    bool is_end = true;
    for (int source = 0; source < kSources; ++source) {
      if (next[source] == sent_[source].size()) continue;
      is_end = false;
      State then = state;
      arrive(&then, source, sent_[source][next[source]]);
      explore(std::move(then), step, first + (source == 0), second + (source == 1));
    }
    if (step < steps_.size()) {
      is_end = false;
      take(&state, steps_[step]);
      explore(std::move(state), step + 1, first, second);
    }
    if (is_end) ++orders_;
  }

  static bool fit(const Step& receive, const Message& message) {
    return (receive.source == kAny || receive.source == message.source) && receive.tag == message.tag;
  }

  void arrive(State* state, int source, int tag) {
    const int number = static_cast<int>(state->messages.size());
    state->messages.push_back({source, number, tag});
    state->message_matched.push_back(false);
    state->log += "message " + std::to_string(number) + " of source " + std::to_string(source) + ", tag " +
                  std::to_string(tag) + "; ";
    bool is_held = false;
    const auto receive = state->matcher.arrive(source, static_cast<std::uint64_t>(tag), [&] {
      is_held = true;
      return number;
    });
    hold(is_held != receive.has_value(), *state, "a message is matched or held");
    if (receive) match(state, *receive, number);
    check(*state);
  }

  void take(State* state, const Step& step) {
    if (step.cancels >= 0) {
      state->log += "cancel " + std::to_string(step.cancels) + "; ";
      const bool was_open = state->receive_open[static_cast<std::size_t>(step.cancels)];
      hold(state->matcher.cancel(step.cancels) == was_open, *state, "a cancel finds a receive that is posted");
      state->receive_open[static_cast<std::size_t>(step.cancels)] = false;
    } else {
      const int number = static_cast<int>(state->receives.size());
      state->receives.push_back(step);
      state->receive_open.push_back(true);
      state->log += "receive " + std::to_string(number) + " of source " + std::to_string(step.source) + ", tag " +
                    std::to_string(step.tag) + "; ";
      const auto message = state->matcher.post(step.source, static_cast<std::uint64_t>(step.tag), number);
      if (message) match(state, number, *message);
    }
    check(*state);
  }

  void match(State* state, int receive_number, int message_number) {
    state->log += "(" + std::to_string(receive_number) + " gets " + std::to_string(message_number) + "); ";
    const auto receive = static_cast<std::size_t>(receive_number), message = static_cast<std::size_t>(message_number);
    hold(receive < state->receives.size() && message < state->messages.size(), *state, "a match is of what there is");
    hold(state->receive_open[receive] && !state->message_matched[message], *state, "a match is made once");
    const Message& matched = state->messages[message];
    hold(fit(state->receives[receive], matched), *state, "a match is of one source and tag");
    for (std::size_t other = 0; other < message; ++other) {
      const Message& before = state->messages[other];
      if (before.source == matched.source && before.tag == matched.tag) {
        hold(state->message_matched[other], *state, "messages are matched in order");
      }
    }
    for (std::size_t other = 0; other < receive; ++other) {
      if (fit(state->receives[other], matched)) {
        hold(!state->receive_open[other], *state, "receives are matched in order");
      }
    }
    state->receive_open[receive] = false;
    state->message_matched[message] = true;
  }

  void check(const State& state) {
    for (int source = 0; source < kSources; ++source) {
      bool holds = false, wants = false;
      for (const Message& message : state.messages) {
        if (message.source == source && !state.message_matched[static_cast<std::size_t>(message.number)]) holds = true;
      }
      for (std::size_t number = 0; number < state.receives.size(); ++number) {
        const int from = state.receives[number].source;
        if (state.receive_open[number] && (from == kAny || from == source)) wants = true;
      }
      hold(state.matcher.holds(source) == holds, state, "held messages are known");
      hold(state.matcher.wants(source) == wants, state, "posted receives are known");
      hold(state.matcher.is_idle(source) == (!holds && !wants), state, "idleness is known");
    }
    for (const Message& message : state.messages) {
      for (std::size_t number = 0; number < state.receives.size(); ++number) {
        const bool both =
            state.receive_open[number] && !state.message_matched[static_cast<std::size_t>(message.number)];
        hold(!both || !fit(state.receives[number], message), state, "nothing that fits is left apart");
      }
    }
  }

  void hold(bool holds, const State& state, const char* what) {
    if (holds) return;
    std::printf("broken: %s\n%s\n", what, state.log.c_str());
    std::exit(1);
  }

  const int most_messages_, most_receives_;
  std::vector<int> sent_[kSources];
  std::vector<Step> steps_;
  bool has_cancel_ = false;
  long long orders_ = 0;
};

}  // namespace

int main(int count, char** given) {
  int messages = 2, receives = 3;
  for (int at = 1; at + 1 < count; at += 2) {
    if (std::strcmp(given[at], "--messages") == 0) messages = std::atoi(given[at + 1]);
    if (std::strcmp(given[at], "--receives") == 0) receives = std::atoi(given[at + 1]);
  }
  Explorer(messages, receives).run();
}
