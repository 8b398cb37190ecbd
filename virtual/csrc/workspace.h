// Workspaces of matrix products, as cuBLAS has them.
//
// A thread that runs a matrix product has a handle, and each pair of handle and stream has a workspace, which stays. A
// thread that ends gives its handle back, and the next new thread takes it over. So device memory grows with the number
// of threads that run matrix products at the same time.
#pragma once

#include <map>
#include <mutex>

#include <c10/core/Allocator.h>

#include "stream.h"

namespace torch_virtual {

class Workspaces {
 public:
  size_t size();
  void set_size(size_t bytes);  // of each; 0: none. Those that are there go.
  void use(Stream& stream);     // by the calling thread: allocates its workspace if there is none

 private:
  std::mutex mutex_;
  size_t size_ = 0;
  std::map<std::pair<int, Stream*>, c10::DataPtr> taken_;  // by handle and stream
};

// Whether an operator runs matrix products by way of such a library.
bool is_matrix_product(const std::string& name);

}  // namespace torch_virtual
