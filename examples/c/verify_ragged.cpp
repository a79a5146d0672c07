// Sequences with drafts of different lengths verified in one call, with a temperature and a limit
// of new tokens for each of them. The drafts are deterministic, as those that prompt lookup copies.
//
//   c++ -std=c++17 verify_ragged.cpp $(pkg-config --cflags --libs specdec-kernels) -o verify_ragged
#include <algorithm>
#include <cstdint>
#include <iostream>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "specdec/specdec.h"

namespace {

constexpr int64_t kVocab = 16;

void check(specdec_code code) {
  if (code != SPECDEC_OK) throw std::runtime_error(specdec_last_error());
}

template <class T>
specdec_tensor vector_of(const std::vector<T>& values) {
  constexpr int32_t dtype = std::is_same_v<T, float>     ? SPECDEC_FLOAT32
                            : std::is_same_v<T, int32_t> ? SPECDEC_INT32
                                                         : SPECDEC_INT64;
  return specdec_tensor_1d(values.data(), dtype, static_cast<int64_t>(values.size()));
}

}  // namespace

int main() try {
  const std::vector<std::vector<int32_t>> drafts = {{5, 3, 0}, {}, {14}};
  const auto batch = static_cast<int64_t>(drafts.size());
  const int64_t gamma = 3;

  // Sequence b has a row for each of its drafts and one for the token that follows them.
  std::vector<int32_t> padded(static_cast<size_t>(batch * gamma), -1), target_indptr = {0};
  for (size_t b = 0; b < drafts.size(); ++b) {
    std::copy(drafts[b].begin(), drafts[b].end(), padded.begin() + static_cast<int64_t>(b) * gamma);
    target_indptr.push_back(target_indptr.back() + static_cast<int32_t>(drafts[b].size()) + 1);
  }
  const int64_t rows = target_indptr.back();
  std::vector<float> target(static_cast<size_t>(rows * kVocab));
  for (int64_t at = 0; at < rows * kVocab; ++at) {
    const int64_t row = at / kVocab, token = at % kVocab;
    target[static_cast<size_t>(at)] = static_cast<float>((5 * row + 3 * token * token) % 11);
  }

  const std::vector<int64_t> seeds = {1, 2, 3}, positions = {10, 20, 30}, limits = {2, 100, 100};
  const std::vector<float> temperatures = {0.0f, 0.7f, 1.5f};
  std::vector<int32_t> tokens(static_cast<size_t>(batch * (gamma + 1)));
  std::vector<int32_t> num_accepted(drafts.size()), status(drafts.size());

  specdec_verify_chain_args args;
  check(specdec_verify_chain_init(&args, sizeof args));
  args.target = specdec_tensor_2d(target.data(), SPECDEC_FLOAT32, rows, kVocab);
  args.draft_token_ids = specdec_tensor_2d(padded.data(), SPECDEC_INT32, batch, gamma);
  args.target_indptr = vector_of(target_indptr);
  args.temperatures = vector_of(temperatures);
  args.max_new_tokens = vector_of(limits);
  args.seeds = vector_of(seeds);
  args.positions = vector_of(positions);
  args.tokens = tokens.data();
  args.num_accepted = num_accepted.data();
  args.status = status.data();
  check(specdec_verify_chain(&args));

  for (size_t b = 0; b < drafts.size(); ++b) {
    std::cout << "sequence " << b << ": drafted";
    for (const int32_t token : drafts[b]) std::cout << ' ' << token;
    std::cout << ", accepted " << num_accepted[b] << ", tokens";
    for (int64_t i = 0; i <= gamma; ++i) {
      const int32_t token = tokens[b * static_cast<size_t>(gamma + 1) + static_cast<size_t>(i)];
      if (token >= 0) std::cout << ' ' << token;
    }
    std::cout << ", status " << status[b] << '\n';
  }

  args.temperatures = vector_of(std::vector<float>(1));  // one of too few: a mistake
  if (specdec_verify_chain(&args) == SPECDEC_INVALID_ARGUMENT) {
    std::cout << "refused: " << specdec_last_error() << '\n';
  }
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
