// Decodes arbitrary anchors: every path gives the same result and stays in bounds.
#include <optional>

#include "input.hpp"

namespace deltawire::fuzz {
namespace {

template <typename Bits>
std::optional<std::vector<Bits>> decoded(const Split& split, std::size_t count, Field field) {
  std::vector<Bits> bits(count);
  try {
    decode_whole(split.body(), count, field, 1, bits.data());
  } catch (const std::invalid_argument&) {
    return {};
  }
  return bits;
}

template <typename Bits>
void run(const WholeCase& its, Input& input) {
  const std::size_t count = its.elements();
  const Split split(input, (count + kWholeBlock - 1) / kWholeBlock);
  take_path(kPaths[0]);
  const auto found = decoded<Bits>(split, count, {its.low, its.bits});
  for (const char* path : kPaths) {
    take_path(path);
    require(decoded<Bits>(split, count, {its.low, its.bits}) == found, "every path says the same");
  }
}

}  // namespace
}  // namespace deltawire::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  using namespace deltawire::fuzz;
  Input input(bytes, size);
  const WholeCase its = WholeCase::take(input);
  with_width(its.width, [&](auto zero) { run<decltype(zero)>(its, input); });
  return 0;
}
