// Parses the bytes of a fuzz input; shared by all targets.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "delta.hpp"
#include "whole.hpp"

namespace deltawire::fuzz {

constexpr std::size_t kMostElements = 3 * kBlock;

// The names of the vector paths; a machine that lacks one uses its best.
constexpr std::array<const char*, 3> kPaths{"portable", "avx2", "avx512"};

inline void take_path(const char* path) { setenv("DELTAWIRE_SIMD", path, 1); }

// Ends the process, so that the fuzzer keeps the input.
inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", what);
  std::abort();
}

// Reads numbers from the front; yields zeros after the end.
class Input {
 public:
  Input(const std::uint8_t* bytes, std::size_t size) : at_(bytes), left_(size) {}

  template <typename Number>
  Number take() {
    Number number = 0;
    const std::size_t size = std::min(sizeof(number), left_);
    if (size > 0) std::memcpy(&number, at_, size);
    at_ += size;
    left_ -= size;
    return number;
  }

  // Returns up to `size` of the next bytes, in an allocation of exactly their size.
  std::vector<std::uint8_t> bytes(std::size_t size) {
    size = std::min(size, left_);
    std::vector<std::uint8_t> taken(at_, at_ + size);
    taken.shrink_to_fit();
    at_ += size;
    left_ -= size;
    return taken;
  }

  std::size_t left() const { return left_; }

 private:
  const std::uint8_t* at_;
  std::size_t left_;
};

// Returns the valid layouts for elements of each width, the integers' first.
inline Layout layout_for(unsigned width, unsigned choice) {
  switch (width) {
    case 8:
      return std::array<Layout, 3>{{{0, 0}, {3, 4}, {2, 5}}}[choice % 3];
    case 16:
      return std::array<Layout, 3>{{{0, 0}, {10, 5}, {7, 8}}}[choice % 3];
    case 32:
      return choice % 2 == 0 ? Layout{0, 0} : Layout{23, 8};
    default:
      return choice % 2 == 0 ? Layout{0, 0} : Layout{52, 11};
  }
}

// Returns `count` elements: a repeated tile of bytes, raised by `drift` at each repetition.
template <typename Bits>
std::vector<Bits> tiled(const std::vector<std::uint8_t>& tile, std::size_t count, Bits drift) {
  std::vector<Bits> elements(count);
  const std::size_t period = tile.size() / sizeof(Bits);
  for (std::size_t i = 0; i < count && period > 0; ++i) {
    std::memcpy(&elements[i], tile.data() + i % period * sizeof(Bits), sizeof(Bits));
    elements[i] = Bits(elements[i] + Bits(drift * Bits(i / period)));
  }
  return elements;
}

// Splits the lengths and the blocks after a payload's header as codec/delta.py does.
struct Split {
  std::vector<std::uint32_t> lengths;
  std::vector<std::uint8_t> bytes;

  Split(Input& input, std::size_t blocks) {
    for (std::size_t b = 0; b < blocks; ++b) lengths.push_back(input.take<std::uint32_t>());
    bytes = input.bytes(input.left());
  }
  Body body() const { return {bytes.data(), bytes.size(), lengths.data(), lengths.size()}; }
};

// Writes the format that Input reads, for seeds.
class Output {
 public:
  template <typename Number>
  Output& put(Number number) {
    const std::size_t at = bytes_.size();
    bytes_.resize(at + sizeof(number));
    std::memcpy(bytes_.data() + at, &number, sizeof(number));
    return *this;
  }
  Output& put(const std::vector<std::uint8_t>& bytes) {
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
    return *this;
  }
  Output& put(const std::vector<std::vector<std::uint8_t>>& blocks) {
    for (const auto& block : blocks) put(static_cast<std::uint32_t>(block.size()));
    for (const auto& block : blocks) put(block);
    return *this;
  }
  const std::vector<std::uint8_t>& bytes() const { return bytes_; }

 private:
  std::vector<std::uint8_t> bytes_;
};

// Calls visit with a zero of the unsigned type that `choice` picks.
template <typename Visit>
void with_width(unsigned choice, const Visit& visit) {
  switch (choice % 4) {
    case 0:
      return visit(std::uint8_t{0});
    case 1:
      return visit(std::uint16_t{0});
    case 2:
      return visit(std::uint32_t{0});
    default:
      return visit(std::uint64_t{0});
  }
}

// The first fields of a delta's input.
struct DeltaCase {
  std::uint8_t width, layout;
  std::uint32_t columns;
  std::uint16_t count;
  std::uint64_t drift;
  std::vector<std::uint8_t> tile;

  static DeltaCase take(Input& input) {
    DeltaCase taken{};
    taken.width = input.take<std::uint8_t>();
    taken.layout = input.take<std::uint8_t>();
    taken.columns = input.take<std::uint32_t>();
    taken.count = input.take<std::uint16_t>();
    taken.drift = input.take<std::uint64_t>();
    taken.tile = input.bytes(input.take<std::uint16_t>());
    return taken;
  }
  void put(Output& output) const {
    output.put(width).put(layout).put(columns).put(count).put(drift);
    output.put(static_cast<std::uint16_t>(tile.size())).put(tile);
  }
  std::size_t elements() const { return count % (kMostElements + 1); }
  Layout its_layout(unsigned bits) const { return layout_for(bits, layout); }
  template <typename Bits>
  std::vector<Bits> base() const {
    return tiled<Bits>(tile, elements(), static_cast<Bits>(drift));
  }
};

// The first fields of an anchor's input.
struct WholeCase {
  std::uint8_t width, low, bits;
  std::uint16_t count;

  static WholeCase take(Input& input) {
    WholeCase taken{};
    taken.width = input.take<std::uint8_t>();
    taken.low = input.take<std::uint8_t>();
    taken.bits = input.take<std::uint8_t>();
    taken.count = input.take<std::uint16_t>();
    return taken;
  }
  void put(Output& output) const { output.put(width).put(low).put(bits).put(count); }
  std::size_t elements() const { return count % (kMostElements + 1); }
};

}  // namespace deltawire::fuzz
