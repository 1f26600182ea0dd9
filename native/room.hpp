// A reusable buffer that grows but is never shrunk or cleared.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>

namespace deltawire {

template <typename Value>
class Room {
 public:
  // Makes room for `size` elements and preserves the first `keep`.
  Value* of(std::size_t size, std::size_t keep = 0) {
    if (size > capacity_) {
      const std::size_t larger = std::max(size, capacity_ + capacity_ / 2);
      std::unique_ptr<Value[]> fresh(new Value[larger]);
      std::copy(data_.get(), data_.get() + keep, fresh.get());
      data_ = std::move(fresh);
      capacity_ = larger;
    }
    return data_.get();
  }
  Value* get() const { return data_.get(); }

 private:
  std::unique_ptr<Value[]> data_;
  std::size_t capacity_ = 0;
};

}  // namespace deltawire
