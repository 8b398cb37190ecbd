#include "stream.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>

#include <pthread.h>
#include <sys/prctl.h>

#include "clock.h"
#include "device.h"

namespace torch_virtual {

void Moment::pass(double when) {
  std::lock_guard lock(mutex_);
  when_ = when;
  passed_ = true;
  changed_.notify_all();
}

bool Moment::passed() {
  std::lock_guard lock(mutex_);
  return passed_;
}

double Moment::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return passed_; });
  return when_;
}

Stream::Stream(c10::DeviceIndex device, c10::StreamId id)
    : device(device),
      id(id),
      actor(Detector::get().add_stream(
          (id == 0 ? std::string("the default stream") : "stream " + std::to_string(id)) + " of virtual:" +
          std::to_string(device))) {}

void Stream::enqueue(Work work, Launch launch) {
  refuse_after_fork();
  std::lock_guard lock(mutex_);
  launch();
  push(std::move(work));
}

void Stream::push(Work work, std::shared_ptr<Moment> moment) {
  queue_.push_back({++submitted_, seconds(), std::move(work), std::move(moment)});
  if (!has_thread_) {
    has_thread_ = true;
    std::thread([this] { run(); }).detach();  // streams live as long as the process
  }
  has_work_.notify_one();
}

void Stream::run() {
  pthread_setname_np(pthread_self(), ("virtual" + std::to_string(device) + "." + std::to_string(id)).c_str());
  prctl(PR_SET_TIMERSLACK, 1000UL);  // wake within a microsecond of a copy's end, not fifty
  std::unique_lock lock(mutex_);
  for (;;) {
    has_work_.wait(lock, [&] { return !busy_ && !queue_.empty() && queue_.front().work; });
    auto task = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    const double ready = std::max(task.enqueued, ended_);
    lock.unlock();
    const double end = task.work(ready);
    task.work = nullptr;  // drop what it kept alive before the work counts as done
    lock.lock();
    busy_ = false;
    ended_ = end;
    ++completed_;
    if (task.moment) task.moment->pass(end);
    changed_.notify_all();
  }
}

void Stream::begin_kernel(Launch launch) {
  refuse_after_fork();
  std::unique_lock lock(mutex_);
  launch();
  const auto number = ++submitted_;
  if (!idle()) {
    queue_.push_back({number, 0, nullptr, nullptr});
    changed_.wait(lock, [&] { return !busy_ && queue_.front().number == number; });
    queue_.pop_front();
  }
  busy_ = true;
}

void Stream::end_kernel() {
  std::lock_guard lock(mutex_);
  busy_ = false;
  ended_ = seconds();
  ++completed_;
  changed_.notify_all();
  if (!queue_.empty()) has_work_.notify_one();
}

std::shared_ptr<Moment> Stream::record() {
  refuse_after_fork();
  std::lock_guard lock(mutex_);
  auto moment = std::make_shared<Moment>(Detector::get().record(actor));
  if (idle()) {
    moment->pass(seconds());
  } else {
    push([](double ready) { return ready; }, moment);
  }
  return moment;
}

void Stream::wait(const std::shared_ptr<Moment>& moment) {
  refuse_after_fork();
  std::lock_guard lock(mutex_);
  Detector::get().wait(actor, moment->clock);
  if (moment->passed()) return;
  push([moment](double ready) { return std::max(ready, moment->wait()); });
}

void Stream::synchronize() {
  Clock clock;  // as of now: other threads may launch more meanwhile, and that is not waited for
  {
    std::unique_lock lock(mutex_);
    clock = Detector::get().clock_of(actor);
    const auto last = submitted_;
    changed_.wait(lock, [&] { return completed_ >= last; });
  }
  Detector::get().host_wait(clock);
}

bool Stream::drain(double deadline) {
  std::unique_lock lock(mutex_);
  const auto last = submitted_;
  const auto patience = std::chrono::duration<double>(std::max(0.0, deadline - seconds()));
  return changed_.wait_for(lock, patience, [&] { return completed_ >= last; });
}

bool Stream::query() {
  std::lock_guard lock(mutex_);
  if (completed_ < submitted_) return false;
  Detector::get().host_wait(Detector::get().clock_of(actor));
  return true;
}

}  // namespace torch_virtual
