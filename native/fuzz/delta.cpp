// Decodes arbitrary payloads: every path gives the same result and stays in bounds.
#include <algorithm>
#include <optional>

#include "input.hpp"

namespace deltawire::fuzz {
namespace {

template <typename Bits>
struct Decoded {
  std::vector<std::int64_t> positions;
  std::vector<Bits> bits;
  bool operator==(const Decoded&) const = default;
};

template <typename Bits>
std::optional<Decoded<Bits>> decoded(const Sections& sections, const std::vector<Bits>& base,
                                     std::size_t columns, Layout layout) {
  Decoded<Bits> result{std::vector<std::int64_t>(sections.changed),
                       std::vector<Bits>(sections.changed)};
  if (!decode(sections.all, base.data(), columns, layout, 1, result.positions.data(),
              result.bits.data())) {
    return {};
  }
  return result;
}

template <typename Bits>
void check(const Decoded<Bits>& found, const Sections& sections, const std::vector<Bits>& base,
           std::size_t columns, Layout layout) {
  std::int64_t above = 0;
  std::vector<Bits> target = base;
  for (std::size_t k = 0; k < found.positions.size(); ++k) {
    require(found.positions[k] >= above, "positions ascend");
    require(found.positions[k] < static_cast<std::int64_t>(base.size()), "positions are in bounds");
    above = found.positions[k] + 1;
    target[static_cast<std::size_t>(found.positions[k])] = found.bits[k];
  }
  std::vector<Bits> advanced = base;
  require(advance(sections.all, advanced.data(), columns, layout, 1), "advance takes it too");
  require(advanced == target, "advance does what decode says");
}

template <typename Bits>
void run(const DeltaCase& its, Input& input, std::uint8_t first, std::uint8_t last) {
  const std::vector<Bits> base = its.base<Bits>();
  const Shape shape{base.size(), its.columns};
  if (shape.columns > kBlock) return;  // codec/delta.py refuses it by its header
  const Split split(input, shape.blocks());
  Sections sections;
  try {
    sections = sections_of(split.body(), shape, first, std::min<std::size_t>(last, shape.blocks()));
  } catch (const std::invalid_argument&) {
    return;
  }
  require(sections.changed <= base.size(), "no more changes than elements");
  const Layout layout = its.its_layout(8 * sizeof(Bits));
  take_path(kPaths[0]);
  const auto found = decoded(sections, base, shape.columns, layout);
  for (const char* path : kPaths) {
    take_path(path);
    require(decoded(sections, base, shape.columns, layout) == found, "every path says the same");
    if (found) check(*found, sections, base, shape.columns, layout);
  }
}

}  // namespace
}  // namespace deltawire::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  using namespace deltawire::fuzz;
  Input input(bytes, size);
  const DeltaCase its = DeltaCase::take(input);
  const auto first = input.take<std::uint8_t>(), last = input.take<std::uint8_t>();
  with_width(its.width, [&](auto zero) { run<decltype(zero)>(its, input, first, last); });
  return 0;
}
