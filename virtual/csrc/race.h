// The race detector: happens-before over streams, events and the host's own waiting.
//
// Whether two accesses race is a question of logic here, never of timing: every stream and every host clock carries
// the list of what it knows to be over, a launch, a wait or a synchronization hands that knowledge on, and an access
// that meets an older one which its actor does not know to be over is a race, however long ago the older one ended.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

namespace torch_virtual {

using Actor = uint32_t;  // who accesses memory: a stream, or a host clock
using Epoch = uint64_t;  // counts an actor's accesses

// For each actor, how far its work is known to be over.
class Clock {
 public:
  Epoch of(Actor actor) const { return actor < known_.size() ? known_[actor] : 0; }
  void set(Actor actor, Epoch epoch);
  void join(const Clock& other);

 private:
  std::vector<Epoch> known_;
};

// An operator's name and overload, or a plain phrase. The strings outlive the process's use of them: they belong to
// an operator's schema, to the program's text, or to the detector's table.
struct Operation {
  const char* name = "";
  const char* overload = "";
};

struct Access {
  Actor actor = 0;
  Epoch epoch = 0;  // 0: no access
  Operation what;
};

enum class Use : uint8_t { Read, Write };

// Who last wrote each byte of an allocation and who read it since. Guarded by the detector's lock.
struct History {
  struct Span {
    size_t lo, hi;
    Access write;
    std::vector<Access> reads;  // the latest of each actor
  };
  struct Label {
    size_t lo, hi;
    std::string name;
  };
  std::string place;        // "virtual:0" or "pinned host memory"
  std::vector<Span> spans;  // sorted, disjoint
  std::vector<Label> labels;
};

struct Touch {
  History* history;
  size_t lo, hi;
  Use use;
};

class Detector {
 public:
  static Detector& get();

  Actor add_stream(std::string name);

  // An operation begins on a stream: check all that it touches, then remember it. Raises in strict mode.
  Access launch(Actor stream, Operation what, const Touch* touches, size_t count);
  // Memory that did not exist before the operation that wrote it: nothing to check.
  void created(History& history, size_t bytes, const Access& by);
  // Memory given back by the host; `kept` are the streams that the allocator itself waits for (record_stream).
  void freed(History& history, Actor stream, const std::vector<Actor>& kept);
  // Memory allocated for a stream. It may be any that was freed there before, and that may still be in use by the
  // stream's earlier work: other streams must wait for that work, wherever the memory really comes from.
  void allocated(History& history, size_t bytes, Actor stream);

  Clock record(Actor stream);
  void wait(Actor stream, const Clock& event);
  void host_wait(const Clock& event);
  Clock clock_of(Actor stream);
  // Host code says that it reads or writes pinned memory.
  void host_use(const Touch& touch, const std::string& what);

  // Host clocks. Threads share one clock unless they ask for their own; then what they wait for is known to nobody
  // else until it is handed over (now -> host_wait).
  void push_host_clock(const std::string& name);
  void pop_host_clock();
  Clock now();

  void label(History& history, size_t lo, size_t hi, std::string name);
  std::string set_strict(bool strict);  // returns what is still to be raised
  bool strict() const { return strict_; }
  uint64_t count();
  std::vector<std::string> reports();
  void clear();

 private:
  Detector();
  Actor add_actor(std::string name);
  Actor host() const;
  bool check(const Touch& touch, const Clock& clock, const Access& by, std::vector<std::string>& found);
  void remember(const Touch& touch, const Access& by);
  void keep(std::vector<std::string>&& found);
  void raise_if_strict(const std::vector<std::string>& found);
  std::string describe(const Access& access) const;
  std::string describe(const Touch& touch, const History::Span& span) const;
  const char* intern(const std::string& text);

  std::mutex mutex_;
  std::vector<Clock> clocks_;       // by actor
  std::vector<Epoch> last_freed_;   // by actor: how far a stream was when memory of its own was last freed
  std::vector<std::string> names_;  // by actor
  std::vector<Actor> idle_hosts_;   // host clocks given back, to be used again
  std::unordered_set<std::string> phrases_;
  std::vector<std::string> reports_;
  std::string pending_;  // a race found where nothing can be raised (a destructor): raised at the next launch
  uint64_t count_ = 0;
  bool strict_ = false;
};

}  // namespace torch_virtual
