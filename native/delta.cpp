#include "delta.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string_view>
#include <type_traits>

#include "bitstream.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
#define DELTAWIRE_X86 1
#include <immintrin.h>
#endif

namespace deltawire {
namespace {

constexpr std::size_t kGroup = 64;
constexpr std::uint8_t kHasLarge = 0x10;

template <typename Bits>
constexpr Bits kSign = Bits(Bits{1} << (8 * sizeof(Bits) - 1));

// The integer order of floats; -0 lies just below +0. Integers are their own order.
template <typename Bits>
Bits ordered(Bits u, Layout layout) {
  if (layout.exponent == 0) return u;
  return u & kSign<Bits> ? Bits(~u) : Bits(u | kSign<Bits>);
}

template <typename Bits>
Bits unordered(Bits o, Layout layout) {
  if (layout.exponent == 0) return o;
  return o & kSign<Bits> ? Bits(o & Bits(~kSign<Bits>)) : Bits(~o);
}

template <typename Bits>
unsigned exponent_of(Bits u, Layout layout) {
  return static_cast<unsigned>(u >> layout.mantissa) & ((1U << layout.exponent) - 1);
}

inline unsigned class_of(unsigned exponent, unsigned top) {
  if (exponent >= top) return 0;
  return std::min(top - exponent, kClasses - 1);
}

// One changed element: how many unchanged ones of its class lie before it, and its move.
struct Change {
  std::uint32_t gap;
  bool negative;
  std::uint64_t excess;  // magnitude - 1
};

template <typename Bits>
void move_of(Bits before, Bits after, Layout layout, Change& change) {
  const Bits step = Bits(ordered(after, layout) - ordered(before, layout));
  change.negative = (step & kSign<Bits>) != 0;
  change.excess = std::uint64_t{change.negative ? Bits(Bits{0} - step) : step} - 1;
}

template <typename Bits>
Bits moved(Bits before, bool negative, std::uint64_t excess, Layout layout) {
  const Bits size = Bits(excess + 1);
  const Bits from = ordered(before, layout);
  return unordered(negative ? Bits(from - size) : Bits(from + size), layout);
}

// --- group masks ---------------------------------------------------------------------------------
//
// A masker looks at 64 neighbouring elements at a time and says, as bits, which have changed and
// which belong to a class.

template <typename Bits>
struct PortableMasker {
  Layout layout;
  unsigned top;
  std::uint64_t masks[kClasses];

  static std::uint64_t changed(const Bits* base, const Bits* target) {
    std::uint64_t mask = 0;
    if (std::memcmp(base, target, kGroup * sizeof(Bits)) == 0) return 0;
    for (std::size_t i = 0; i < kGroup; ++i) {
      mask |= std::uint64_t{base[i] != target[i]} << i;
    }
    return mask;
  }

  void load(const Bits* base) {
    std::fill(masks, masks + kClasses, 0);
    for (std::size_t i = 0; i < kGroup; ++i) {
      masks[class_of(exponent_of(base[i], layout), top)] |= std::uint64_t{1} << i;
    }
  }

  std::uint64_t members(unsigned number) const { return masks[number]; }
};

#ifdef DELTAWIRE_X86

#define DELTAWIRE_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,bmi,bmi2,popcnt,lzcnt")))
#define DELTAWIRE_AVX2 __attribute__((target("avx2,bmi,bmi2,popcnt,lzcnt")))

struct Avx512Masker {
  Layout layout;
  unsigned top;
  __m512i low, high;

  DELTAWIRE_AVX512 static std::uint64_t changed(const std::uint16_t* base,
                                                const std::uint16_t* target) {
    const std::uint64_t first = _mm512_cmpneq_epi16_mask(_mm512_loadu_si512(base),
                                                         _mm512_loadu_si512(target));
    const std::uint64_t second = _mm512_cmpneq_epi16_mask(_mm512_loadu_si512(base + 32),
                                                          _mm512_loadu_si512(target + 32));
    return first | (second << 32);
  }

  DELTAWIRE_AVX512 void load(const std::uint16_t* base) {
    const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(layout.mantissa));
    const __m512i mask = _mm512_set1_epi16(static_cast<short>((1 << layout.exponent) - 1));
    low = _mm512_and_si512(_mm512_srl_epi16(_mm512_loadu_si512(base), shift), mask);
    high = _mm512_and_si512(_mm512_srl_epi16(_mm512_loadu_si512(base + 32), shift), mask);
  }

  DELTAWIRE_AVX512 std::uint64_t members(unsigned number) const {
    const int at = static_cast<int>(top) - static_cast<int>(number);
    const __m512i value = _mm512_set1_epi16(static_cast<short>(at));
    std::uint64_t first, second;
    if (number == 0) {
      first = _mm512_cmpge_epi16_mask(low, value);
      second = _mm512_cmpge_epi16_mask(high, value);
    } else if (number == kClasses - 1) {
      first = _mm512_cmple_epi16_mask(low, value);
      second = _mm512_cmple_epi16_mask(high, value);
    } else {
      first = _mm512_cmpeq_epi16_mask(low, value);
      second = _mm512_cmpeq_epi16_mask(high, value);
    }
    return first | (second << 32);
  }
};

struct Avx2Masker {
  Layout layout;
  unsigned top;
  __m256i exponents[4];

  // Two masks of 16 lanes as one of 32 bits.
  DELTAWIRE_AVX2 static std::uint64_t bits_of(__m256i first, __m256i second) {
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(first, second), 0xD8);
    return static_cast<std::uint32_t>(_mm256_movemask_epi8(bytes));
  }

  DELTAWIRE_AVX2 static __m256i load16(const std::uint16_t* at) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
  }

  DELTAWIRE_AVX2 static std::uint64_t changed(const std::uint16_t* base,
                                              const std::uint16_t* target) {
    __m256i same[4];
    for (int i = 0; i < 4; ++i) {
      same[i] = _mm256_cmpeq_epi16(load16(base + 16 * i), load16(target + 16 * i));
    }
    return ~(bits_of(same[0], same[1]) | (bits_of(same[2], same[3]) << 32));
  }

  DELTAWIRE_AVX2 void load(const std::uint16_t* base) {
    const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(layout.mantissa));
    const __m256i mask = _mm256_set1_epi16(static_cast<short>((1 << layout.exponent) - 1));
    for (int i = 0; i < 4; ++i) {
      exponents[i] = _mm256_and_si256(_mm256_srl_epi16(load16(base + 16 * i), shift), mask);
    }
  }

  DELTAWIRE_AVX2 std::uint64_t members(unsigned number) const {
    const int at = static_cast<int>(top) - static_cast<int>(number);
    const __m256i value = _mm256_set1_epi16(static_cast<short>(at));
    __m256i in[4];
    for (int i = 0; i < 4; ++i) {
      in[i] = _mm256_cmpeq_epi16(exponents[i], value);
      if (number == 0) in[i] = _mm256_or_si256(in[i], _mm256_cmpgt_epi16(exponents[i], value));
      if (number == kClasses - 1) {
        in[i] = _mm256_or_si256(in[i], _mm256_cmpgt_epi16(value, exponents[i]));
      }
    }
    return bits_of(in[0], in[1]) | (bits_of(in[2], in[3]) << 32);
  }
};

#endif  // DELTAWIRE_X86

// --- encoding ------------------------------------------------------------------------------------

struct ClassChanges {
  std::vector<Change> changes;
  std::uint64_t run = 0;   // members seen
  std::uint64_t next = 0;  // rank behind the last change
};

void put_varint(std::vector<std::uint8_t>& out, std::uint64_t value) {
  while (value >= 0x80) {
    out.push_back(static_cast<std::uint8_t>(value | 0x80));
    value >>= 7;
  }
  out.push_back(static_cast<std::uint8_t>(value));
}

std::uint8_t mean_byte(std::uint64_t sum, std::uint64_t count) {
  const std::uint64_t bounded = std::min(sum, std::uint64_t{1} << 50);
  return count == 0 ? 0 : byte_of_mean((bounded << kMeanBits) / count);
}

// A class's stream, behind its line in the block's header.
void encode_class(unsigned number, const std::vector<Change>& changes,
                  std::vector<std::uint8_t>& header, std::vector<std::uint8_t>& body) {
  std::uint64_t gaps = 0, larges = 0, excess = 0;
  for (const Change& change : changes) {
    gaps += change.gap;
    larges += change.excess > 0;
    excess += change.excess > 0 ? std::min(change.excess - 1, std::uint64_t{1} << 40) : 0;
  }
  const std::uint64_t count = changes.size();
  const std::uint8_t gap_byte = mean_byte(gaps, count);
  const std::uint8_t run_byte = mean_byte(count - larges, larges + 1);
  const std::uint8_t excess_byte = mean_byte(excess, larges);
  RiceState gap{mean_of_byte(gap_byte)};
  RiceState run{mean_of_byte(run_byte)};
  RiceState size{mean_of_byte(excess_byte)};
  BitWriter writer;
  std::size_t large = 0;  // index of the next change of more than one unit
  const auto put_run = [&](std::size_t from) {
    for (large = from; large < count && changes[large].excess == 0; ++large) {
    }
    writer.rice(run, large - from);
  };
  if (larges > 0) put_run(0);
  for (std::size_t i = 0; i < count; ++i) {
    writer.rice(gap, changes[i].gap);
    writer.put(changes[i].negative, 1);
    if (larges > 0 && i == large) {
      writer.rice(size, changes[i].excess - 1);
      if (i + 1 < count) put_run(i + 1);
    }
  }
  const std::vector<std::uint8_t>& stream = writer.finish();
  header.push_back(static_cast<std::uint8_t>(number | (larges > 0 ? kHasLarge : 0)));
  header.push_back(gap_byte);
  if (larges > 0) {
    header.push_back(run_byte);
    header.push_back(excess_byte);
  }
  put_varint(header, count);
  put_varint(header, stream.size());
  body.insert(body.end(), stream.begin(), stream.end());
}

template <typename Masker, typename Bits>
inline __attribute__((always_inline)) void rank_group(Masker& masker, std::uint64_t changed,
                                                      const Bits* base, const Bits* target,
                                                      Layout layout, const unsigned* active,
                                                      std::size_t actives, ClassChanges* classes) {
  masker.load(base);
  for (std::size_t a = 0; a < actives; ++a) {
    const std::uint64_t members = masker.members(active[a]);
    ClassChanges& mine = classes[active[a]];
    for (std::uint64_t left = members & changed; left != 0; left &= left - 1) {
      const auto i = static_cast<unsigned>(std::countr_zero(left));
      const std::uint64_t below = members & ((std::uint64_t{1} << i) - 1);
      const std::uint64_t rank = mine.run + static_cast<std::uint64_t>(std::popcount(below));
      Change change{};
      change.gap = static_cast<std::uint32_t>(rank - mine.next);
      move_of(base[i], target[i], layout, change);
      mine.changes.push_back(change);
      mine.next = rank + 1;
    }
    mine.run += static_cast<std::uint64_t>(std::popcount(members));
  }
}

template <typename Masker, typename Bits>
inline __attribute__((always_inline)) std::vector<std::uint8_t> encode_with(
    const Bits* base, const Bits* target, std::size_t count, Layout layout,
    std::uint64_t& total) {
  // The last, partial group is coded from a copy filled up with elements that have not changed.
  Bits base_tail[kGroup] = {}, target_tail[kGroup] = {};
  const std::size_t whole = count / kGroup, rest = count % kGroup;
  std::memcpy(base_tail, base + whole * kGroup, rest * sizeof(Bits));
  std::memcpy(target_tail, target + whole * kGroup, rest * sizeof(Bits));
  const std::size_t groups = whole + (rest != 0);
  std::vector<std::uint64_t> changed(groups);
  std::array<bool, 4096> seen{};
  unsigned top = 0;
  for (std::size_t g = 0; g < groups; ++g) {
    const Bits* from = g < whole ? base + g * kGroup : base_tail;
    const Bits* to = g < whole ? target + g * kGroup : target_tail;
    changed[g] = Masker::changed(from, to);
    for (std::uint64_t left = changed[g]; left != 0; left &= left - 1) {
      const unsigned exponent = exponent_of(from[std::countr_zero(left)], layout);
      seen[exponent] = true;
      top = std::max(top, exponent);
      ++total;
    }
  }
  std::array<bool, kClasses> used{};
  for (unsigned e = 0; e <= top; ++e) {
    if (seen[e]) used[class_of(e, top)] = true;
  }
  unsigned active[kClasses];
  std::size_t actives = 0;
  for (unsigned c = 0; c < kClasses; ++c) {
    if (used[c]) active[actives++] = c;
  }
  ClassChanges classes[kClasses];
  Masker masker{};
  masker.layout = layout;
  masker.top = top;
  for (std::size_t g = 0; g < groups && actives > 0; ++g) {
    const Bits* from = g < whole ? base + g * kGroup : base_tail;
    const Bits* to = g < whole ? target + g * kGroup : target_tail;
    rank_group(masker, changed[g], from, to, layout, active, actives, classes);
  }
  std::vector<std::uint8_t> header, body;
  header.push_back(static_cast<std::uint8_t>(actives));
  header.push_back(static_cast<std::uint8_t>(top));
  header.push_back(static_cast<std::uint8_t>(top >> 8));
  for (std::size_t a = 0; a < actives; ++a) {
    encode_class(active[a], classes[active[a]].changes, header, body);
  }
  header.insert(header.end(), body.begin(), body.end());
  return header;
}

// --- decoding ------------------------------------------------------------------------------------

struct ClassReader {
  BitReader bits;
  RiceState gap{0}, run_state{0}, size{0};
  std::uint64_t left = 0;       // changes not yet placed
  std::uint64_t next = 0;       // rank of the next one
  std::uint64_t run = 0;        // members seen
  std::uint64_t units = 0;      // changes of one unit before the next larger one
  bool larges = false;
  unsigned number = 0;

  void begin() {
    if (larges) units = bits.rice(run_state);
    next = bits.rice(gap);
  }

  // Takes the change at `next`, and reads on to the one behind it.
  void take(bool& negative, std::uint64_t& excess) {
    negative = bits.take(1) != 0;
    excess = 0;
    --left;
    if (larges) {
      if (units == 0) {
        excess = 1 + bits.rice(size);
        if (left > 0) units = bits.rice(run_state);
      } else {
        --units;
      }
    }
    if (left > 0) {
      const std::uint64_t gap_now = bits.rice(gap);
      next = gap_now < kBlock ? next + 1 + gap_now : std::numeric_limits<std::uint64_t>::max();
    } else {
      next = std::numeric_limits<std::uint64_t>::max();
    }
  }
};

bool get_varint(const std::uint8_t*& at, const std::uint8_t* end, std::uint64_t& value) {
  value = 0;
  for (unsigned shift = 0; shift < 63; shift += 7) {
    if (at == end) return false;
    const std::uint8_t byte = *at++;
    value |= std::uint64_t{byte & 0x7FU} << shift;
    if ((byte & 0x80) == 0) return true;
  }
  return false;
}

// Reads a block's header; false if it does not fit the payload.
bool read_header(const std::uint8_t* payload, std::size_t size, std::size_t count, unsigned& top,
                 ClassReader* readers, std::size_t& actives) {
  if (size < 3 || payload[0] > kClasses) return false;
  actives = payload[0];
  top = payload[1] | (static_cast<unsigned>(payload[2]) << 8);
  const std::uint8_t* at = payload + 3;
  const std::uint8_t* end = payload + size;
  std::uint64_t lengths[kClasses] = {};
  int before = -1;
  for (std::size_t a = 0; a < actives; ++a) {
    ClassReader& reader = readers[a];
    if (end - at < 2) return false;
    reader.larges = (*at & kHasLarge) != 0;
    reader.number = *at & 0x0F;
    if ((*at & 0xE0) != 0 || reader.number >= kClasses) return false;
    if (static_cast<int>(reader.number) <= before) return false;
    before = static_cast<int>(reader.number);
    ++at;
    reader.gap.mean64 = mean_of_byte(*at++);
    if (reader.larges) {
      if (end - at < 2) return false;
      reader.run_state.mean64 = mean_of_byte(*at++);
      reader.size.mean64 = mean_of_byte(*at++);
    }
    if (!get_varint(at, end, reader.left) || !get_varint(at, end, lengths[a])) return false;
    if (reader.left == 0 || reader.left > count) return false;
  }
  for (std::size_t a = 0; a < actives; ++a) {
    if (lengths[a] > static_cast<std::uint64_t>(end - at)) return false;
    readers[a].bits = BitReader(at, lengths[a]);
    readers[a].begin();
    at += lengths[a];
  }
  return at == end;
}

template <typename Masker, typename Bits>
inline __attribute__((always_inline)) std::int64_t decode_with(
    const std::uint8_t* payload, std::size_t size, const Bits* base, std::size_t count,
    Layout layout, std::int64_t start, std::int64_t* positions, Bits* bits, std::size_t room) {
  ClassReader readers[kClasses];
  std::size_t actives = 0;
  unsigned top = 0;
  if (!read_header(payload, size, count, top, readers, actives)) return -1;
  if (top >= (1U << layout.exponent)) return -1;
  Bits tail[kGroup] = {};
  const std::size_t whole = count / kGroup, rest = count % kGroup;
  std::memcpy(tail, base + whole * kGroup, rest * sizeof(Bits));
  const std::size_t groups = whole + (rest != 0);
  Masker masker{};
  masker.layout = layout;
  masker.top = top;
  std::size_t found = 0;
  for (std::size_t g = 0; g < groups && actives > 0; ++g) {
    const Bits* from = g < whole ? base + g * kGroup : tail;
    std::uint64_t changed = 0;
    Bits fresh[kGroup];
    masker.load(from);
    for (std::size_t a = 0; a < actives; ++a) {
      ClassReader& reader = readers[a];
      const std::uint64_t members = masker.members(reader.number);
      const std::uint64_t end =
          reader.run + static_cast<std::uint64_t>(std::popcount(members));
      std::uint64_t unpassed = members;
      std::uint64_t passed = reader.run;
      while (reader.next < end) {
        for (; passed < reader.next; ++passed) unpassed &= unpassed - 1;
        const auto i = static_cast<unsigned>(std::countr_zero(unpassed));
        bool negative;
        std::uint64_t excess;
        reader.take(negative, excess);
        fresh[i] = moved(from[i], negative, excess, layout);
        changed |= std::uint64_t{1} << i;
      }
      reader.run = end;
    }
    if (changed == 0) continue;
    if (found + static_cast<std::size_t>(std::popcount(changed)) > room) return -1;
    if (g == whole && (changed >> rest) != 0) return -1;
    for (std::uint64_t left = changed; left != 0; left &= left - 1) {
      const auto i = static_cast<unsigned>(std::countr_zero(left));
      positions[found] = start + static_cast<std::int64_t>(g * kGroup + i);
      bits[found++] = fresh[i];
    }
  }
  for (std::size_t a = 0; a < actives; ++a) {
    if (readers[a].left != 0 || readers[a].bits.overrun()) return -1;
  }
  return static_cast<std::int64_t>(found);
}

#ifdef DELTAWIRE_X86

DELTAWIRE_AVX512 std::vector<std::uint8_t> encode_avx512(const std::uint16_t* base,
                                                         const std::uint16_t* target,
                                                         std::size_t count, Layout layout,
                                                         std::uint64_t& changed) {
  return encode_with<Avx512Masker>(base, target, count, layout, changed);
}

DELTAWIRE_AVX2 std::vector<std::uint8_t> encode_avx2(const std::uint16_t* base,
                                                     const std::uint16_t* target,
                                                     std::size_t count, Layout layout,
                                                     std::uint64_t& changed) {
  return encode_with<Avx2Masker>(base, target, count, layout, changed);
}

DELTAWIRE_AVX512 std::int64_t decode_avx512(const std::uint8_t* payload, std::size_t size,
                                            const std::uint16_t* base, std::size_t count,
                                            Layout layout, std::int64_t start,
                                            std::int64_t* positions, std::uint16_t* bits,
                                            std::size_t room) {
  return decode_with<Avx512Masker>(payload, size, base, count, layout, start, positions, bits,
                                   room);
}

DELTAWIRE_AVX2 std::int64_t decode_avx2(const std::uint8_t* payload, std::size_t size,
                                        const std::uint16_t* base, std::size_t count,
                                        Layout layout, std::int64_t start,
                                        std::int64_t* positions, std::uint16_t* bits,
                                        std::size_t room) {
  return decode_with<Avx2Masker>(payload, size, base, count, layout, start, positions, bits,
                                 room);
}

#endif  // DELTAWIRE_X86

Simd best_path() {
#ifdef DELTAWIRE_X86
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
    return Simd::avx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")) return Simd::avx2;
#endif
  return Simd::portable;
}

}  // namespace

Simd simd_path() {
  const char* wish = std::getenv("DELTAWIRE_SIMD");
  const Simd best = best_path();
  if (wish == nullptr) return best;
  const std::string_view name(wish);
  if (name == "portable") return Simd::portable;
  if (name == "avx2") return std::min(best, Simd::avx2);
  return best;
}

template <typename Bits>
std::vector<std::uint8_t> encode_block(const Bits* base, const Bits* target, std::size_t count,
                                       Layout layout, std::uint64_t& changed, Simd simd) {
#ifdef DELTAWIRE_X86
  // The vector paths compare exponents as signed 16-bit lanes.
  if constexpr (std::is_same_v<Bits, std::uint16_t>) {
    if (simd == Simd::avx512) return encode_avx512(base, target, count, layout, changed);
    if (simd == Simd::avx2) return encode_avx2(base, target, count, layout, changed);
  }
#endif
  (void)simd;
  return encode_with<PortableMasker<Bits>>(base, target, count, layout, changed);
}

template <typename Bits>
std::int64_t decode_block(const std::uint8_t* payload, std::size_t size, const Bits* base,
                          std::size_t count, Layout layout, std::int64_t start,
                          std::int64_t* positions, Bits* bits, std::size_t room, Simd simd) {
#ifdef DELTAWIRE_X86
  if constexpr (std::is_same_v<Bits, std::uint16_t>) {
    if (simd == Simd::avx512) {
      return decode_avx512(payload, size, base, count, layout, start, positions, bits, room);
    }
    if (simd == Simd::avx2) {
      return decode_avx2(payload, size, base, count, layout, start, positions, bits, room);
    }
  }
#endif
  (void)simd;
  return decode_with<PortableMasker<Bits>>(payload, size, base, count, layout, start, positions,
                                           bits, room);
}

#define DELTAWIRE_INSTANTIATE(Bits)                                                              \
  template std::vector<std::uint8_t> encode_block<Bits>(const Bits*, const Bits*, std::size_t,   \
                                                        Layout, std::uint64_t&, Simd);           \
  template std::int64_t decode_block<Bits>(const std::uint8_t*, std::size_t, const Bits*,        \
                                           std::size_t, Layout, std::int64_t, std::int64_t*,     \
                                           Bits*, std::size_t, Simd);
DELTAWIRE_INSTANTIATE(std::uint8_t)
DELTAWIRE_INSTANTIATE(std::uint16_t)
DELTAWIRE_INSTANTIATE(std::uint32_t)
DELTAWIRE_INSTANTIATE(std::uint64_t)

}  // namespace deltawire
