// Tensors without arithmetic: making, viewing and resizing them.
#pragma once

#include <c10/core/StorageImpl.h>

namespace torch_virtual {

// Keeps the bytes that fit; new memory comes from the current stream of the storage's device.
void resize_storage(c10::StorageImpl& storage, size_t bytes);

}  // namespace torch_virtual
