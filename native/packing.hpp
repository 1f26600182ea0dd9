// Packs numbers of given bit widths without coding, lowest bit first.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace deltawire {

class BitPacker {
 public:
  void put(std::uint64_t bits, unsigned count) {  // count <= 64, and no bits above them
    if (count > 32) {
      put_some(bits & 0xFFFFFFFF, 32);
      bits >>= 32;
      count -= 32;
    }
    put_some(bits, count);
  }

  const std::vector<std::uint8_t>& finish() {
    for (; fill_ > 0; held_ >>= 8, fill_ -= std::min(fill_, 8U)) {
      bytes_.push_back(static_cast<std::uint8_t>(held_));
    }
    return bytes_;
  }

 private:
  void put_some(std::uint64_t bits, unsigned count) {
    held_ |= bits << fill_;
    fill_ += count;
    if (fill_ < 32) return;
    const std::size_t at = bytes_.size();
    bytes_.resize(at + 4);
    std::memcpy(bytes_.data() + at, &held_, 4);
    held_ >>= 32;
    fill_ -= 32;
  }

  std::vector<std::uint8_t> bytes_;
  std::uint64_t held_ = 0;
  unsigned fill_ = 0;
};

// Reads the output of BitPacker; after the end it yields zeros, and ok() is false.
class BitTaker {
 public:
  BitTaker(const std::uint8_t* bytes, std::size_t size) : at_(bytes), end_(bytes + size) {}

  std::uint64_t take(unsigned count) {  // count <= 64
    const std::uint64_t low = take_some(std::min(count, 32U));
    return count > 32 ? low | take_some(count - 32) << 32 : low;
  }

  bool ok() const { return ok_; }
  // Returns whether all bits were read, except the zeros that pad the last byte.
  bool finished() const { return ok_ && at_ == end_ && fill_ < 8 && held_ == 0; }

 private:
  std::uint64_t take_some(unsigned count) {
    if (fill_ < count) refill(count);
    const std::uint64_t bits = held_ & ((std::uint64_t{1} << count) - 1);
    held_ >>= count;
    fill_ -= count;
    return bits;
  }

  void refill(unsigned count) {
    if (end_ - at_ >= 4) {
      std::uint32_t word;
      std::memcpy(&word, at_, 4);
      held_ |= std::uint64_t{word} << fill_;
      at_ += 4;
      fill_ += 32;
      return;
    }
    for (; fill_ < count; fill_ += 8) {
      if (at_ < end_) {
        held_ |= std::uint64_t{*at_++} << fill_;
      } else {
        ok_ = false;
      }
    }
  }

  const std::uint8_t* at_;
  const std::uint8_t* end_;
  std::uint64_t held_ = 0;
  unsigned fill_ = 0;
  bool ok_ = true;
};

}  // namespace deltawire
