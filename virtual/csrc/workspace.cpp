#include "workspace.h"

#include <set>
#include <string>
#include <unordered_set>

#include "device.h"

namespace torch_virtual {

namespace {

std::mutex g_mutex;

std::set<int>& idle_handles() {
  static auto* handles = new std::set<int>;  // outlives the threads that give theirs back at exit
  return *handles;
}

struct Handle {
  Handle() {
    std::lock_guard lock(g_mutex);
    static int made = 0;
    auto& idle = idle_handles();
    number = idle.empty() ? made++ : idle.extract(idle.begin()).value();
  }
  ~Handle() {
    std::lock_guard lock(g_mutex);
    idle_handles().insert(number);
  }
  int number;
};

}  // namespace

size_t Workspaces::size() {
  std::lock_guard lock(mutex_);
  return size_;
}

void Workspaces::set_size(size_t bytes) {
  std::map<std::pair<int, Stream*>, c10::DataPtr> gone;
  std::lock_guard lock(mutex_);
  size_ = bytes;
  gone.swap(taken_);
}

void Workspaces::use(Stream& stream) {
  {
    std::lock_guard lock(mutex_);
    if (size_ == 0) return;
  }
  thread_local const Handle handle;
  std::lock_guard lock(mutex_);
  auto& workspace = taken_[{handle.number, &stream}];
  if (!workspace) workspace = as_data_ptr(device(stream.device).memory.allocate(size_, stream));
}

bool is_matrix_product(const std::string& name) {
  static const std::unordered_set<std::string> products = {
      "aten::mm", "aten::addmm", "aten::addmm_", "aten::_addmm_activation", "aten::bmm", "aten::baddbmm",
      "aten::baddbmm_", "aten::addbmm", "aten::addbmm_", "aten::mv", "aten::addmv", "aten::addmv_", "aten::dot",
      "aten::linear", "aten::linear_backward", "aten::mkldnn_linear", "aten::_grouped_mm",
  };
  return products.count(name) > 0;
}

}  // namespace torch_virtual
