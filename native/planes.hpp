// The entropy coder: planes of yes-or-no decisions, by interleaved asymmetric numeral systems.
//
// A plane is a list of bits, each with a context from 0 to 15. The odds of a context are fixed
// within a plane. Decision i is coded by lane i mod `lanes`; each lane is a 32-bit rANS
// state over two symbols, and all share one stream of 16-bit words. Source: Duda, "Asymmetric
// numeral systems", arXiv 1311.2540; interleaving after Giesen, arXiv 1402.3392.
//
// The coder is last-in, first-out: the writer processes a plane upwards and the reader downwards,
// and neither branches on a bit. src/deltawire/codec/reference.py is the twin.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "room.hpp"
#include "simd.hpp"

namespace deltawire {

constexpr unsigned kContexts = 16;
constexpr unsigned kOddsBits = 15;
constexpr std::uint32_t kCertain = 1U << kOddsBits;  // the odds of a certain event
constexpr std::uint32_t kLowest = 1U << 15;          // states lie in kLowest <= x < 2^31
constexpr unsigned kMostLanes = 64;
constexpr std::uint8_t kFlipped = 0x80;
constexpr std::uint8_t kTopLevel = 96;

// The odds of a one in each context, in parts of kCertain: 0 (never), or 1 to kCertain - 1.
struct Odds {
  alignas(64) std::uint32_t ones[kContexts] = {};

  // One byte each: a level, flipped for odds above one half. A level is the number itself below 8,
  // above it three bits after a leading one, and an exponent.
  static std::uint8_t level_of(std::uint64_t ones, std::uint64_t total);
  static std::uint32_t odds_of(std::uint8_t level);

  // Sets the odds of a context from counts, rounded to a level as the reader will see them.
  void set(unsigned context, std::uint64_t ones_seen, std::uint64_t total);
  // Writes a mask of the contexts in use, two bytes, then a level for each.
  void write(std::vector<std::uint8_t>& out) const;
  // Reads the output of write(); returns false if `at` does not hold it.
  bool read(const std::uint8_t*& at, const std::uint8_t* end);

  std::uint8_t levels[kContexts] = {};
};

// Bits are kept 64 to a word: bit i of a plane is bit i % 64 of word i / 64.
class PlaneWriter {
 public:
  // Collects the words in `room`, which must outlive the writer.
  PlaneWriter(unsigned lanes, Simd simd, Room<std::uint16_t>& room);

  // Writes decisions `begin` to `end` of a plane; `begin` is a multiple of the lanes. `contexts`
  // starts at decision `begin`, `bits` at the plane's first.
  void put(const std::uint8_t* contexts, const std::uint64_t* bits, std::size_t begin,
           std::size_t end, const Odds& odds);

  // Appends the words, then the lanes' states.
  void finish(std::vector<std::uint8_t>& out) const;
  std::size_t bytes() const { return 2 * fill_ + 4 * lanes_; }

 private:
  void put_each(const std::uint8_t* contexts, const std::uint64_t* bits, std::size_t begin,
                std::size_t end, const Odds& odds);

  unsigned lanes_;
  Simd simd_;
  std::size_t fill_ = 0;
  Room<std::uint16_t>& room_;
  alignas(64) std::uint32_t states_[kMostLanes];
};

class PlaneReader {
 public:
  // Reads the output of PlaneWriter::finish. Check ok() before anything else.
  PlaneReader(const std::uint8_t* bytes, std::size_t size, unsigned lanes, Simd simd);

  // Reads the decisions `begin` to `end` of a plane, highest first, into `bits`, whose words from
  // `begin` on must be zero. A plane must be read from its end to its beginning.
  void take(const std::uint8_t* contexts, std::uint64_t* bits, std::size_t begin, std::size_t end,
            const Odds& odds);

  bool ok() const { return ok_; }
  // Returns whether the input was complete and is used up: then every state is back at its start.
  bool finished() const;

 private:
  void take_each(const std::uint8_t* contexts, std::uint64_t* bits, std::size_t begin,
                 std::size_t end, const Odds& odds);

  unsigned lanes_;
  Simd simd_;
  bool ok_;
  const std::uint8_t* words_;
  std::size_t left_;  // words not yet read
  alignas(64) std::uint32_t states_[kMostLanes];
};

}  // namespace deltawire
