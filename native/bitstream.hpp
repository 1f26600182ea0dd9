// Adaptive Rice codes in a little-endian bit stream; src/deltawire/codec/reference.py is the twin.
//
// A value v under parameter k is q = v >> k zeros, a one, and the k low bits of v. If q reaches
// kEscape, kEscape zeros, a one and all 64 bits of v are written instead.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace deltawire {

constexpr unsigned kEscape = 24;
constexpr unsigned kMeanBits = 6;   // fractional bits of a running mean, and its decay
constexpr unsigned kLargestK = 30;
constexpr std::uint64_t kLargestSample = std::uint64_t{1} << 40;

// The running mean of what was coded, in 1/64, and the Rice parameter that suits it.
struct RiceState {
  std::uint64_t mean64;

  // The parameter of a geometric source of mean m: the bit width of 0.4812 (m + 1/2). Source:
  // Kiely, "Selecting the Golomb parameter in Rice coding", IPN progress report 42-159, 2004.
  unsigned k() const {
    const auto scaled = ((mean64 + 32) * 1971) >> (12 + kMeanBits);
    const auto width = static_cast<unsigned>(std::bit_width(scaled));
    return width < kLargestK ? width : kLargestK;
  }

  void update(std::uint64_t value) {
    mean64 += (value < kLargestSample ? value : kLargestSample) - (mean64 >> kMeanBits);
  }
};

// One byte for a starting mean: three bits behind the leading one, five of exponent.
inline std::uint64_t mean_of_byte(std::uint8_t byte) {
  return ((std::uint64_t{8} + (byte & 7)) << (byte >> 3)) >> 3;
}

inline std::uint8_t byte_of_mean(std::uint64_t mean64) {
  for (unsigned byte = 0; byte < 255; ++byte) {
    if (mean_of_byte(static_cast<std::uint8_t>(byte)) >= mean64) {
      return static_cast<std::uint8_t>(byte);
    }
  }
  return 255;
}

class BitWriter {
 public:
  void put(std::uint64_t bits, unsigned count) {  // count <= 32
    held_ |= bits << fill_;
    fill_ += count;
    if (fill_ >= 32) {
      append(static_cast<std::uint32_t>(held_));
      held_ >>= 32;
      fill_ -= 32;
    }
  }

  void rice(RiceState& state, std::uint64_t value) {
    const unsigned k = state.k();
    const std::uint64_t q = value >> k;
    if (q < kEscape) {
      put(std::uint64_t{1} << q, static_cast<unsigned>(q) + 1);
      put(value & ((std::uint64_t{1} << k) - 1), k);
    } else {
      put(std::uint64_t{1} << kEscape, kEscape + 1);
      put(value & 0xFFFFFFFF, 32);
      put(value >> 32, 32);
    }
    state.update(value);
  }

  const std::vector<std::uint8_t>& finish() {
    while (fill_ > 0) {
      bytes_.push_back(static_cast<std::uint8_t>(held_));
      held_ >>= 8;
      fill_ = fill_ > 8 ? fill_ - 8 : 0;
    }
    return bytes_;
  }

 private:
  void append(std::uint32_t word) {
    const std::size_t at = bytes_.size();
    bytes_.resize(at + 4);
    std::memcpy(bytes_.data() + at, &word, 4);
  }

  std::vector<std::uint8_t> bytes_;
  std::uint64_t held_ = 0;
  unsigned fill_ = 0;
};

// Reads what BitWriter wrote. Behind the end it reads zeros and notes that it did.
class BitReader {
 public:
  BitReader() = default;
  BitReader(const std::uint8_t* bytes, std::size_t size) : at_(bytes), end_(bytes + size) {}

  std::uint64_t take(unsigned count) {  // count <= 32
    if (fill_ < count) refill();
    const std::uint64_t bits = held_ & ((std::uint64_t{1} << count) - 1);
    held_ >>= count;
    consume(count);
    return bits;
  }

  std::uint64_t rice(RiceState& state) {
    if (fill_ < kEscape + 1) refill();
    const unsigned k = state.k();
    const auto q = static_cast<unsigned>(std::countr_zero(held_));
    std::uint64_t value;
    if (q < kEscape) {
      held_ >>= q + 1;
      consume(q + 1);
      value = (std::uint64_t{q} << k) | take(k);
    } else {
      held_ >>= kEscape + 1;
      consume(kEscape + 1);
      const std::uint64_t low = take(32);
      value = low | (take(32) << 32);
    }
    state.update(value);
    return value;
  }

  bool overrun() const { return overrun_; }

 private:
  void consume(unsigned count) {
    if (count > fill_) {
      overrun_ = true;
      fill_ = 0;
      held_ = 0;
    } else {
      fill_ -= count;
    }
  }

  void refill() {
    if (end_ - at_ >= 8) {
      std::uint64_t word;
      std::memcpy(&word, at_, 8);
      held_ |= word << fill_;
      const unsigned bytes = (63 - fill_) >> 3;
      at_ += bytes;
      fill_ += 8 * bytes;
      held_ &= fill_ < 64 ? (std::uint64_t{1} << fill_) - 1 : ~std::uint64_t{0};
      return;
    }
    while (fill_ <= 56 && at_ < end_) {
      held_ |= std::uint64_t{*at_++} << fill_;
      fill_ += 8;
    }
  }

  const std::uint8_t* at_ = nullptr;
  const std::uint8_t* end_ = nullptr;
  std::uint64_t held_ = 0;
  unsigned fill_ = 0;
  bool overrun_ = false;
};

}  // namespace deltawire
