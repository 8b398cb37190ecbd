#include "race.h"

#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>

namespace torch_virtual {

namespace {

constexpr Actor kSharedHost = 0;
constexpr size_t kReportsKept = 1000;  // all races are counted; this many are described

thread_local std::vector<Actor> t_host_clocks;

bool known(const Access& access, const Clock& clock) {
  return access.epoch <= clock.of(access.actor);
}

// Calls `visit` for each span of [lo, hi), after cutting spans at its ends and filling gaps.
template <typename Visit>
void for_spans(std::vector<History::Span>& spans, size_t lo, size_t hi, Visit visit) {
  auto it = std::partition_point(spans.begin(), spans.end(), [&](const auto& s) { return s.hi <= lo; });
  while (lo < hi) {
    if (it == spans.end() || it->lo >= hi) {
      it = spans.insert(it, {lo, hi, {}, {}});
    } else if (it->lo > lo) {
      it = spans.insert(it, {lo, it->lo, {}, {}});
    } else {
      if (it->lo < lo) {
        auto head = *it;
        head.hi = lo;
        it->lo = lo;
        it = spans.insert(it, std::move(head)) + 1;
      }
      if (it->hi > hi) {
        auto head = *it;
        head.hi = hi;
        it->lo = hi;
        it = spans.insert(it, std::move(head));
      }
    }
    visit(*it);
    lo = it->hi;
    ++it;
  }
}

}  // namespace

void Clock::set(Actor actor, Epoch epoch) {
  if (actor >= known_.size()) known_.resize(actor + 1, 0);
  known_[actor] = epoch;
}

void Clock::join(const Clock& other) {
  if (other.known_.size() > known_.size()) known_.resize(other.known_.size(), 0);
  for (size_t i = 0; i < other.known_.size(); ++i) known_[i] = std::max(known_[i], other.known_[i]);
}

Detector& Detector::get() {
  static auto* detector = new Detector;  // never destroyed: streams may outlive static objects
  return *detector;
}

Detector::Detector() {
  add_actor("the host");
}

Actor Detector::add_actor(std::string name) {
  clocks_.emplace_back();
  last_freed_.push_back(0);
  names_.push_back(std::move(name));
  return static_cast<Actor>(clocks_.size() - 1);
}

Actor Detector::add_stream(std::string name) {
  std::lock_guard lock(mutex_);
  return add_actor(std::move(name));
}

Actor Detector::host() const {
  return t_host_clocks.empty() ? kSharedHost : t_host_clocks.back();
}

Access Detector::launch(Actor stream, Operation what, const Touch* touches, size_t count) {
  std::lock_guard lock(mutex_);
  auto& clock = clocks_[stream];
  clock.join(clocks_[host()]);
  Access access{stream, clock.of(stream) + 1, what};
  std::vector<std::string> found;
  const History* reported = nullptr;  // one report a tensor, in however many pieces it lies
  for (size_t i = 0; i < count; ++i) {
    if (touches[i].history == reported) continue;
    if (check(touches[i], clock, access, found)) reported = touches[i].history;
  }
  raise_if_strict(found);
  clock.set(stream, access.epoch);
  for (size_t i = 0; i < count; ++i) remember(touches[i], access);
  keep(std::move(found));
  return access;
}

void Detector::created(History& history, size_t bytes, const Access& by) {
  std::lock_guard lock(mutex_);
  history.spans.clear();
  history.spans.push_back({0, bytes, by, {}});
}

void Detector::freed(History& history, Actor stream, const std::vector<Actor>& kept) {
  std::lock_guard lock(mutex_);
  Clock clock = clocks_[stream];
  clock.join(clocks_[host()]);
  std::vector<std::string> found;
  auto look = [&](const Access& access, const History::Span& span) {
    if (known(access, clock)) return;
    if (std::find(kept.begin(), kept.end(), access.actor) != kept.end()) return;
    found.push_back(
        "race: " + describe(Touch{&history, span.lo, span.hi, Use::Write}, span) + " was freed while " +
        describe(access) + " still needs it: nothing orders that before " + names_[stream] +
        ", where the memory will be used again. Keep the tensor until the event was waited for, or call record_stream");
  };
  for (const auto& span : history.spans) {
    look(span.write, span);
    for (const auto& read : span.reads) look(read, span);
    if (!found.empty()) break;  // one report an allocation
  }
  if (strict_ && !found.empty()) pending_ = found.front();
  keep(std::move(found));
  last_freed_[stream] = clocks_[stream].of(stream);
}

void Detector::allocated(History& history, size_t bytes, Actor stream) {
  std::lock_guard lock(mutex_);
  if (last_freed_[stream] == 0) return;
  history.spans.push_back({0, bytes, {stream, last_freed_[stream], {"an earlier owner of the memory"}}, {}});
}

Clock Detector::record(Actor stream) {
  std::lock_guard lock(mutex_);
  clocks_[stream].join(clocks_[host()]);
  return clocks_[stream];
}

void Detector::wait(Actor stream, const Clock& event) {
  std::lock_guard lock(mutex_);
  clocks_[stream].join(clocks_[host()]);
  clocks_[stream].join(event);
}

void Detector::host_wait(const Clock& event) {
  std::lock_guard lock(mutex_);
  clocks_[host()].join(event);
}

Clock Detector::clock_of(Actor stream) {
  std::lock_guard lock(mutex_);
  return clocks_[stream];
}

void Detector::host_use(const Touch& touch, const std::string& what) {
  std::lock_guard lock(mutex_);
  auto& clock = clocks_[host()];
  Access access{host(), clock.of(host()) + 1, {intern(what)}};
  std::vector<std::string> found;
  check(touch, clock, access, found);
  raise_if_strict(found);
  clock.set(host(), access.epoch);
  remember(touch, access);
  keep(std::move(found));
}

void Detector::push_host_clock(const std::string& name) {
  std::lock_guard lock(mutex_);
  Clock clock = clocks_[host()];
  // A clock given back serves again where all that its last owner did is known here anyway: epochs go on, and to
  // itself an actor's own accesses are never a race.
  auto idle = std::find_if(idle_hosts_.begin(), idle_hosts_.end(), [&](Actor actor) {
    return clocks_[actor].of(actor) <= clock.of(actor);
  });
  Actor actor;
  if (idle == idle_hosts_.end()) {
    actor = add_actor(name);
  } else {
    actor = *idle;
    idle_hosts_.erase(idle);
    names_[actor] = name;
  }
  clocks_[actor] = std::move(clock);
  t_host_clocks.push_back(actor);
}

void Detector::pop_host_clock() {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(!t_host_clocks.empty(), "this thread has no host clock of its own to give back");
  idle_hosts_.push_back(t_host_clocks.back());
  t_host_clocks.pop_back();
}

Clock Detector::now() {
  std::lock_guard lock(mutex_);
  return clocks_[host()];
}

void Detector::label(History& history, size_t lo, size_t hi, std::string name) {
  std::lock_guard lock(mutex_);
  auto& labels = history.labels;
  labels.erase(
      std::remove_if(labels.begin(), labels.end(), [&](const auto& l) { return l.lo == lo && l.hi == hi; }),
      labels.end());
  labels.push_back({lo, hi, std::move(name)});
}

std::string Detector::set_strict(bool strict) {
  std::lock_guard lock(mutex_);
  strict_ = strict;
  return std::exchange(pending_, {});
}

uint64_t Detector::count() {
  std::lock_guard lock(mutex_);
  return count_;
}

std::vector<std::string> Detector::reports() {
  std::lock_guard lock(mutex_);
  return reports_;
}

void Detector::clear() {
  std::lock_guard lock(mutex_);
  count_ = 0;
  reports_.clear();
  pending_.clear();
}

bool Detector::check(const Touch& touch, const Clock& clock, const Access& by, std::vector<std::string>& found) {
  if (touch.lo >= touch.hi) return false;
  const auto& spans = touch.history->spans;
  auto it = std::partition_point(spans.begin(), spans.end(), [&](const auto& s) { return s.hi <= touch.lo; });
  const char* verb = touch.use == Use::Write ? " writes what " : " reads what ";
  auto report = [&](const History::Span& span, const Access& earlier, const char* deed) {
    found.push_back(
        "race: " + describe(by) + verb + describe(earlier) + deed + ", and no event, wait or synchronization orders " +
        "the two, at " + describe(touch, span));
    return true;
  };
  for (; it != spans.end() && it->lo < touch.hi; ++it) {
    if (!known(it->write, clock)) return report(*it, it->write, " wrote");
    if (touch.use == Use::Read) continue;
    for (const auto& read : it->reads) {
      if (!known(read, clock)) return report(*it, read, " reads");
    }
  }
  return false;
}

void Detector::remember(const Touch& touch, const Access& by) {
  if (touch.lo >= touch.hi) return;
  auto& spans = touch.history->spans;
  if (touch.use == Use::Read) {
    for_spans(spans, touch.lo, touch.hi, [&](History::Span& span) {
      for (auto& read : span.reads) {
        if (read.actor == by.actor) {
          read = by;
          return;
        }
      }
      span.reads.push_back(by);
    });
    return;
  }
  // A write makes one span of its whole range, so that histories do not grow with the number of writes.
  for_spans(spans, touch.lo, touch.hi, [](History::Span&) {});
  auto first = std::partition_point(spans.begin(), spans.end(), [&](const auto& s) { return s.hi <= touch.lo; });
  auto last = std::partition_point(first, spans.end(), [&](const auto& s) { return s.lo < touch.hi; });
  *first = {touch.lo, touch.hi, by, {}};
  spans.erase(first + 1, last);
}

void Detector::keep(std::vector<std::string>&& found) {
  count_ += found.size();
  for (auto& text : found) {
    if (reports_.size() < kReportsKept) reports_.push_back(std::move(text));
  }
}

void Detector::raise_if_strict(const std::vector<std::string>& found) {
  if (!strict_ || (pending_.empty() && found.empty())) return;
  auto copy = found;
  keep(std::move(copy));
  const auto earlier = std::exchange(pending_, {});
  TORCH_CHECK(false, earlier.empty() ? found.front() : earlier);
}

std::string Detector::describe(const Access& access) const {
  std::string text = access.what.name;
  if (*access.what.overload) text += std::string(".") + access.what.overload;
  return "'" + text + "' on " + names_[access.actor];
}

std::string Detector::describe(const Touch& touch, const History::Span& span) const {
  const size_t lo = std::max(touch.lo, span.lo), hi = std::min(touch.hi, span.hi);
  std::string name = "an unlabeled tensor";
  size_t best = SIZE_MAX;  // the narrowest label says most
  for (const auto& label : touch.history->labels) {
    if (label.lo < hi && lo < label.hi && label.hi - label.lo < best) {
      best = label.hi - label.lo;
      name = "'" + label.name + "'";
    }
  }
  return name + " (bytes " + std::to_string(lo) + " to " + std::to_string(hi) + " of its allocation in " +
      touch.history->place + ")";
}

const char* Detector::intern(const std::string& text) {
  return phrases_.insert(text).first->c_str();
}

}  // namespace torch_virtual
