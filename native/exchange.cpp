#include "exchange.hpp"

#include <algorithm>
#include <atomic>
#include <vector>

#include "parallel.hpp"

namespace deltawire {
namespace {

// So many changes are checked, written and read back at a time, so that the lines that they touch
// come from memory once and are in the first cache the second and third time.
constexpr std::size_t kBlock = 256;
constexpr std::size_t kAhead = 64;
// Below this, starting a thread costs more than it saves.
constexpr std::size_t kShare = std::size_t{1} << 15;

struct Nothing {};

inline void prefetch(const void* place) {
#if defined(__GNUC__) || defined(__clang__)
  __builtin_prefetch(place, 1);
#else
  (void)place;
#endif
}

// Changes `first` to `last`; `written` says how many of them may have been written.
template <typename Bits>
Exchanged exchange_range(Bits* live, std::size_t size, const std::int64_t* index, const Bits* old,
                         const Bits* fresh, std::size_t first, std::size_t last,
                         std::size_t& written) {
  for (std::size_t start = first; start < last; start += kBlock) {
    const std::size_t stop = std::min(start + kBlock, last);
    bool outside = false;
    for (std::size_t i = start; i < stop; ++i) {
      outside |= static_cast<std::uint64_t>(index[i]) >= size;
    }
    if (outside) return Exchanged::outside;
    Bits differing = 0;
    for (std::size_t i = start; i < stop; ++i) {
      if (i + kAhead < last) {
        const auto ahead = static_cast<std::uint64_t>(index[i + kAhead]);
        if (ahead < size) prefetch(live + ahead);
      }
      differing |= static_cast<Bits>(live[index[i]] ^ old[i]);
    }
    if (differing != 0) return Exchanged::not_old;
    written = stop - first;
    for (std::size_t i = start; i < stop; ++i) live[index[i]] = fresh[i];
    const volatile Bits* landed = live;
    for (std::size_t i = start; i < stop; ++i) {
      differing |= static_cast<Bits>(landed[index[i]] ^ fresh[i]);
    }
    if (differing != 0) return Exchanged::not_new;
  }
  return Exchanged::done;
}

}  // namespace

template <typename Bits>
Exchanged exchange(Bits* live, std::size_t size, const std::int64_t* index, const Bits* old,
                   const Bits* fresh, std::size_t count, unsigned threads) {
  const std::size_t shares = std::clamp<std::size_t>(count / kShare, 1, std::max(threads, 1u));
  const auto bound = [&](std::size_t share) { return count / shares * share +
                                                     std::min(share, count % shares); };
  std::vector<std::size_t> written(shares, 0);
  std::atomic<Exchanged> outcome{Exchanged::done};
  parallel<Nothing>(shares, threads, [&](std::size_t share, Nothing&) {
    const Exchanged found = exchange_range(live, size, index, old, fresh, bound(share),
                                           bound(share + 1), written[share]);
    if (found != Exchanged::done) outcome = found;
  });
  if (outcome != Exchanged::done) {
    for (std::size_t share = 0; share < shares; ++share) {
      const std::size_t first = bound(share);
      for (std::size_t i = first; i < first + written[share]; ++i) live[index[i]] = old[i];
    }
  }
  return outcome;
}

#define DELTAWIRE_INSTANTIATE(Bits)                                                            \
  template Exchanged exchange<Bits>(Bits*, std::size_t, const std::int64_t*, const Bits*,      \
                                    const Bits*, std::size_t, unsigned);
DELTAWIRE_INSTANTIATE(std::uint8_t)
DELTAWIRE_INSTANTIATE(std::uint16_t)
DELTAWIRE_INSTANTIATE(std::uint32_t)
DELTAWIRE_INSTANTIATE(std::uint64_t)
#undef DELTAWIRE_INSTANTIATE

}  // namespace deltawire
