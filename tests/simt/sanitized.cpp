// Calls the CUDA kernels in the emulator on arrays of exactly the right size, for a sanitizer to
// watch. tests/simt/sanitize.py builds and runs it.
//   sanitized list      the names of the cases
//   sanitized NAME...   runs these
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "cuda/kv/append.cu"
#include "cuda/kv/compact.cu"
#include "cuda/kv/paged_append.cu"
#include "cuda/kv/paged_truncate.cu"
#include "cuda/kv/realign.cu"
#include "cuda/kv/ring_truncate.cu"
#include "cuda/kv/truncate.cu"
#include "cuda_runtime.h"
#include "specdec/chain.h"
#include "specdec/kept_tokens.h"
#include "specdec/ngram_propose.h"
#include "specdec/sample.h"
#include "specdec/tree.h"

namespace specdec {
namespace {

// The arrays of a case, and its random numbers.
class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
    for (void* p : arrays_) std::free(p);
  }

  // The array ends where its memory does. It begins `skip` elements after a multiple of 16 bytes.
  template <class T>
  T* array(int64_t size, int skip = 0) {
    arrays_.push_back(std::malloc((size + skip) * sizeof(T)));
    return static_cast<T*>(arrays_.back()) + skip;
  }
  template <class T>
  T* filled(int64_t size, T value) {
    T* const out = array<T>(size);
    for (int64_t i = 0; i < size; ++i) out[i] = value;
    return out;
  }

  double uniform() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<double>(state_ >> 11) * 0x1p-53;
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(uniform() * static_cast<double>(n)); }

  // Rows one after the other.
  Rows rows(const std::vector<float>& values, int64_t vocab, int64_t rows_of_sequence, DType dtype,
            bool odd) {
    const auto size = static_cast<int64_t>(values.size());
    const void* data = nullptr;
    if (dtype == DType::kFloat32) {
      float* const out = array<float>(size, odd);
      std::memcpy(out, values.data(), size * sizeof(float));
      data = out;
    } else {
      auto* const out = array<uint16_t>(size, odd);
      for (int64_t i = 0; i < size; ++i) {
        uint32_t bits;
        std::memcpy(&bits, &values[i], 4);
        // Of float16 the exponent has another bias; the values are from 1 up.
        const uint32_t half = (bits >> 13) - (112 << 10);
        out[i] = static_cast<uint16_t>(dtype == DType::kBFloat16 ? bits >> 16 : half);
      }
      data = out;
    }
    return {data, dtype, rows_of_sequence * vocab, vocab, {}};
  }

 private:
  std::vector<void*> arrays_;
  uint64_t state_ = 0x9e3779b97f4a7c15u;
};

struct Setting {
  int64_t batch, vocab;
  DType dtype = DType::kBFloat16;
  bool odd = false;         // rows begin at odd addresses
  int multiprocessors = 4;  // with one, one block reads a row
};

void require(bool good, const char* what) {
  if (good) return;
  std::printf("FAILED: %s %s\n", what, simt::scheduler.failure.c_str());
  std::fflush(stdout);
  std::_Exit(3);
}

// Values in [1, 4), or if `probs` rows that add up to 1.
std::vector<float> random_rows(Memory& m, int64_t rows, int64_t vocab, bool probs) {
  std::vector<float> values(rows * vocab);
  for (int64_t r = 0; r < rows; ++r) {
    double sum = 0;
    for (int64_t i = r * vocab; i < (r + 1) * vocab; ++i) {
      values[i] = static_cast<float>(1 + 3 * m.uniform());
      if (probs) values[i] = std::exp(values[i]);
      sum += values[i];
    }
    if (!probs) continue;
    for (int64_t i = r * vocab; i < (r + 1) * vocab; ++i) values[i] /= static_cast<float>(sum);
  }
  return values;
}

SamplingParams scalar_sampling(float temperature, int64_t top_k = 0, float top_p = 1) {
  SamplingParams s = {};
  s.temperature = temperature;
  s.top_k = top_k;
  s.top_p = top_p;
  return s;
}

template <class Params>
void launch(Memory& m, const Setting& s, const Params& p, int (*op)(const Params&, void*, void*)) {
  simt::multiprocessors = s.multiprocessors;
  const int64_t bytes = cuda::workspace_bytes(p);
  auto* const workspace = m.array<unsigned char>(bytes);
  std::memset(workspace, 0x5a, bytes);
  require(op(p, workspace, nullptr) == 0, "launch");
}

void run_sample(const Setting& s, bool gumbel, SamplingParams sampling) {
  Memory m;
  SampleParams p = {};
  std::vector<float> values = random_rows(m, s.batch, s.vocab, false);
  p.logits = m.rows(values, s.vocab, 1, s.dtype, s.odd);
  p.sampling = sampling;
  p.seeds = m.filled<int64_t>(s.batch, 7);
  p.positions = m.filled<int64_t>(s.batch, 100);
  p.tokens = m.filled<int64_t>(s.batch, -1);
  p.logprobs = m.array<float>(s.batch);
  p.logsumexp = m.array<double>(s.batch);
  p.threshold = m.array<float>(s.batch);
  p.status = m.filled<int32_t>(s.batch, -1);
  p.num_rows = s.batch;
  p.vocab = s.vocab;
  p.gumbel = gumbel;
  launch(m, s, p, cuda::sample);
  for (int64_t r = 0; r < s.batch; ++r) {
    require(p.status[r] == 0 && p.tokens[r] >= 0 && p.tokens[r] < s.vocab, "sample");
  }
}

void run_kept(const Setting& s, int64_t max_kept, SamplingParams sampling) {
  Memory m;
  KeptTokensParams p = {};
  p.target = m.rows(random_rows(m, s.batch, s.vocab, false), s.vocab, 1, s.dtype, s.odd);
  p.sampling = sampling;
  p.ids = m.filled<int64_t>(s.batch * max_kept, -2);
  p.logprobs = m.array<float>(s.batch * max_kept);
  p.counts = m.filled<int32_t>(s.batch, -1);
  p.status = m.filled<int32_t>(s.batch, -1);
  p.batch = s.batch;
  p.rows_each = p.num_rows = 1;
  p.vocab = s.vocab;
  p.max_kept = max_kept;
  launch(m, s, p, cuda::kept_tokens);
  for (int64_t i = 0; i < s.batch * max_kept; ++i) {
    require(p.counts[i / max_kept] > 0 && p.ids[i] >= -1 && p.ids[i] < s.vocab, "kept tokens");
  }
}

// What the verifiers have in common: the target's rows, drafted tokens, and the draft's rows, which
// are near the target's.
void set_verification(Memory& m, const Setting& s, VerifyParams& p, int64_t rows, int64_t drafts,
                      int64_t most_tokens) {
  const bool probs = p.kind == Kind::kProbs;
  std::vector<float> target = random_rows(m, s.batch * rows, s.vocab, probs);
  std::vector<float> draft(s.batch * drafts * s.vocab);
  auto* const ids = m.array<int64_t>(s.batch * drafts);
  for (int64_t d = 0; d < s.batch * drafts; ++d) {
    const float* const from = &target[(d / drafts * rows + d % drafts) * s.vocab];
    float* const to = &draft[d * s.vocab];
    double sum = 0;
    for (int64_t x = 0; x < s.vocab; ++x) {
      to[x] = static_cast<float>(probs ? from[x] * (0.5 + m.uniform()) : from[x] + m.uniform());
      sum += to[x];
    }
    for (int64_t x = 0; probs && x < s.vocab; ++x) to[x] /= static_cast<float>(sum);
    ids[d] = m.below(s.vocab);
  }
  p.target = m.rows(target, s.vocab, rows, s.dtype, s.odd);
  p.draft.rows = m.rows(draft, s.vocab, drafts, s.dtype, s.odd);
  p.draft.kind = p.kind;
  p.draft.num_rows = drafts;
  p.draft.vocab = s.vocab;
  p.draft.temperature = 1;
  p.draft_token_ids = ids;
  p.stride_token_sequence = drafts;
  p.stride_token = 1;
  p.ids_are_int64 = true;
  p.seeds = m.filled<int64_t>(s.batch, 3);
  p.positions = m.filled<int64_t>(s.batch, 50);
  p.tokens = m.filled<int64_t>(s.batch * most_tokens, -2);
  p.num_accepted = m.filled<int32_t>(s.batch, -1);
  p.status = m.filled<int32_t>(s.batch, -1);
  p.logprobs = m.array<float>(s.batch * most_tokens);
  p.accept_probs = m.array<float>(s.batch * drafts);
  p.batch = s.batch;
  p.vocab = s.vocab;
  p.typical_epsilon = 0.3f;
  p.typical_delta = 0.1f;
}

void check_verification(const VerifyParams& p, int64_t drafts) {
  for (int64_t b = 0; b < p.batch; ++b) {
    require(p.status[b] == 0, "status");
    require(p.num_accepted[b] >= 0 && p.num_accepted[b] <= drafts, "num_accepted");
  }
}

void run_chain(const Setting& s, int64_t gamma, Rule rule, SamplingParams sampling,
               Kind kind = Kind::kLogits, DraftForm form = DraftForm::kRows) {
  Memory m;
  ChainParams p = {};
  p.kind = kind;
  set_verification(m, s, p, gamma + 1, gamma, gamma + 1);
  p.draft.form = form;
  p.sampling = sampling;
  p.gamma = gamma;
  p.lenience = 1;
  p.rule = rule;
  if (form == DraftForm::kSparse) {
    constexpr int64_t kListed = 5;
    const int64_t listed = s.batch * gamma * kListed;
    auto* const ids = m.array<int32_t>(listed);
    std::vector<float> probs(listed, 1.0f / kListed);
    for (int64_t i = 0; i < listed; ++i) ids[i] = static_cast<int32_t>(i % kListed * 7);
    for (int64_t d = 0; d < s.batch * gamma; ++d) {
      const_cast<int64_t*>(static_cast<const int64_t*>(p.draft_token_ids))[d] = d % kListed * 7;
    }
    p.draft.rows = m.rows(probs, kListed, gamma, DType::kFloat32, false);
    p.draft.kind = Kind::kProbs;
    p.draft.ids = ids;
    p.draft.vocab = kListed;
  }
  launch(m, s, p, cuda::verify_chain);
  check_verification(p, gamma);
}

void run_tree(const Setting& s, TreeRule rule, Kind kind) {
  constexpr int64_t kNodes = 5, kDepth = 3;
  constexpr int64_t kParents[kNodes] = {-1, -1, 0, 0, 2};
  Memory m;
  TreeParams p = {};
  p.kind = kind;
  set_verification(m, s, p, kNodes + 1, kNodes, kDepth + 1);
  auto* const parents = m.array<int64_t>(s.batch * kNodes);
  for (int64_t i = 0; i < s.batch * kNodes; ++i) parents[i] = kParents[i % kNodes];
  p.draft.form = DraftForm::kRows;
  p.sampling = scalar_sampling(kind == Kind::kProbs ? 1.0f : 0.8f);
  p.parents = parents;
  p.path = m.array<int64_t>(s.batch * kDepth);
  p.nodes = kNodes;
  p.max_depth = kDepth;
  p.stride_parent_sequence = kNodes;
  p.stride_parent = 1;
  p.parents_are_int64 = true;
  p.rule = rule;
  launch(m, s, p, cuda::verify_tree);
  check_verification(p, kDepth);
}

void run_ngram() {
  constexpr int64_t kBatch = 3, kColumns = 777, kGamma = 6;
  Memory m;
  auto* const history = m.array<int64_t>(kBatch * kColumns);
  for (int64_t i = 0; i < kBatch * kColumns; ++i) history[i] = m.below(5);
  NgramProposeParams p = {};
  p.history = {history, true, kColumns, 0, 1};
  p.lengths = m.filled<int64_t>(kBatch, kColumns);
  p.tokens = {m.array<int64_t>(kBatch * kGamma), true};
  p.counts = m.filled<int32_t>(kBatch, -1);
  p.batch = kBatch;
  p.columns = kColumns;
  p.gamma = kGamma;
  p.max_ngram = 4;
  p.min_ngram = 1;
  require(cuda::ngram_propose(p, nullptr) == 0, "launch");
  for (int64_t b = 0; b < kBatch; ++b) require(p.counts[b] == kGamma, "counts");
}

void run_caches() {
  constexpr int64_t kBatch = 3, kHeads = 2, kSlots = 41, kBytes = 34, kCount = 5;
  Memory m;
  KvTensor t = {};
  t.cache = m.filled<char>(kBatch * kHeads * kSlots * kBytes, 1);
  t.entries = m.filled<char>(kBatch * kHeads * kCount * kBytes, 2);
  t.cache_stride = {kHeads * kSlots * kBytes, kSlots * kBytes, kBytes};
  t.entry_stride = {kHeads * kCount * kBytes, kCount * kBytes, kBytes};
  t.heads = kHeads;
  t.slots = kSlots;
  t.count = kCount;
  t.entry_bytes = kBytes;
  const auto each = [&](int64_t value) { return KvVector<void>{m.filled(kBatch, value), true, 1}; };
  const auto given = [&](int64_t value) {
    return KvVector<const void>{m.filled(kBatch, value), true, 1};
  };
  require(cuda::kv_append({&t, 1, kBatch, given(kSlots - 3)}, nullptr) == 0, "append");
  require(cuda::kv_truncate({&t, 1, kBatch, each(kSlots), given(9), true}, nullptr) == 0,
          "truncate");
  auto* const path = m.array<int32_t>(kBatch * 3);
  for (int64_t i = 0; i < kBatch * 3; ++i) path[i] = static_cast<int32_t>(i % 3 * 4 + 1);
  const KvTable<const void> nodes = {path, false, 3, 1, 3};
  require(cuda::kv_compact({&t, 1, kBatch, given(20), nodes}, nullptr) == 0, "compact");
  for (const int64_t shift : {7, -4}) {
    require(
        cuda::kv_realign({&t, 1, kBatch, given(5), given(30), given(shift), true}, nullptr) == 0,
        "realign");
  }
  auto* const status = m.array<int32_t>(kBatch);
  require(cuda::ring_truncate(
              {&t, 1, kBatch, kSlots, 8, each(kSlots + 9), given(kSlots + 2), status, true},
              nullptr) == 0,
          "ring truncate");

  // A sequence has three blocks of kBlock slots.
  constexpr int64_t kBlock = 8, kBlocks = 3 * kBatch;
  KvTensor paged = t;
  paged.cache = m.filled<char>(kBlocks * kBlock * kHeads * kBytes, 3);
  paged.cache_stride = {kBlock * kHeads * kBytes, kBytes, kHeads * kBytes};
  paged.slots = kBlock;
  auto* const table = m.array<int32_t>(kBlocks);
  for (int64_t i = 0; i < kBlocks; ++i) table[i] = static_cast<int32_t>(kBlocks - 1 - i);
  const PagedSlots slots = {{table, false, 3, 1, 3}, kBlocks};
  KvTensor paged_new = paged;
  paged_new.entry_stride = {kHeads * kCount * kBytes, kBytes, kHeads * kBytes};
  require(cuda::paged_append({&paged_new, 1, kBatch, given(21), given(4), slots}, nullptr) == 0,
          "paged append");
  require(cuda::paged_compact({{&paged, 1, kBatch, given(10), nodes}, slots}, nullptr) == 0,
          "paged compact");
  require(cuda::paged_truncate({{table, false, 3, 1, 3},
                                kBatch,
                                kBlock,
                                each(20),
                                given(6),
                                {m.array<int32_t>(kBlocks), false},
                                m.array<int32_t>(kBatch)},
                               nullptr) == 0,
          "paged truncate");
}

using Case = std::pair<std::string, std::function<void()>>;

std::vector<Case> cases() {
  constexpr DType kBf16 = DType::kBFloat16, kF16 = DType::kFloat16, kF32 = DType::kFloat32;
  std::vector<Case> all;
  const auto sample = [&](const char* name, Setting s, bool gumbel, SamplingParams sampling) {
    all.emplace_back(std::string("sample ") + name, [=] { run_sample(s, gumbel, sampling); });
  };
  const SamplingParams plain = scalar_sampling(0.8f), greedy = scalar_sampling(0);
  const SamplingParams filters = scalar_sampling(0.8f, 40, 0.9f), as_is = scalar_sampling(1);
  sample("B1 V4097 bf16 odd split", {1, 4097, kBf16, true}, false, plain);
  sample("B1 V16001 f32 split", {1, 16001, kF32, false}, false, plain);
  sample("B3 V9001 f32 split", {3, 9001, kF32, false}, false, plain);
  sample("B3 V4097 f16 odd", {3, 4097, kF16, true, 1}, false, plain);
  sample("B3 V1031 bf16 gumbel", {3, 1031, kBf16, true, 1}, true, plain);
  sample("B1 V4097 bf16 filters split", {1, 4097, kBf16, true}, false, filters);
  sample("B3 V4097 f32 filters", {3, 4097, kF32, true, 1}, true, filters);
  sample("B1 V9001 bf16 greedy split", {1, 9001, kBf16, false}, false, greedy);

  const auto kept = [&](const char* name, Setting s, int64_t max_kept, SamplingParams sampling) {
    all.emplace_back(std::string("kept ") + name, [=] { run_kept(s, max_kept, sampling); });
  };
  kept("B1 V9001 bf16 ties split", {1, 9001, kBf16, true}, 1000, plain);
  kept("B3 V4097 f32 split", {3, 4097, kF32, false}, 20, plain);
  kept("B3 V4097 f16 filters", {3, 4097, kF16, true, 1}, 20, filters);

  const auto chain = [&](const char* name, auto... args) {
    all.emplace_back(std::string("chain ") + name, [=] { run_chain(args...); });
  };
  constexpr Kind kLogits = Kind::kLogits, kProbs = Kind::kProbs;
  chain("logits B1 g3 V4097 bf16 odd split", Setting{1, 4097, kBf16, true}, int64_t{3},
        Rule::kToken, plain);
  chain("logits B3 g2 V1031 bf16 odd split", Setting{3, 1031, kBf16, true}, int64_t{2},
        Rule::kToken, plain);
  chain("logits B3 g1 V4097 f32", Setting{3, 4097, kF32, false, 1}, int64_t{1}, Rule::kToken,
        plain);
  chain("logits B3 g4 V1031 f16 odd", Setting{3, 1031, kF16, true, 1}, int64_t{4}, Rule::kToken,
        plain);
  chain("logits B1 g1 V4097 bf16 one-hot split", Setting{1, 4097, kBf16, true}, int64_t{1},
        Rule::kToken, plain, kLogits, DraftForm::kOneHot);
  chain("logits B3 g2 V1031 f32 greedy split", Setting{3, 1031, kF32, true}, int64_t{2},
        Rule::kGreedy, greedy);
  chain("probs B1 g3 V4097 f32 split", Setting{1, 4097, kF32, true}, int64_t{3}, Rule::kToken,
        as_is, kProbs);
  chain("probs B3 g2 V9001 f32 split", Setting{3, 9001, kF32, false}, int64_t{2}, Rule::kToken,
        as_is, kProbs);
  chain("probs B3 g2 V1031 f32", Setting{3, 1031, kF32, true, 1}, int64_t{2}, Rule::kToken, as_is,
        kProbs);
  chain("B1 g2 V4097 bf16 odd filters split", Setting{1, 4097, kBf16, true}, int64_t{2},
        Rule::kToken, filters);
  chain("B3 g1 V1031 f32 filters", Setting{3, 1031, kF32, true, 1}, int64_t{1}, Rule::kToken,
        filters);
  chain("B1 g3 V4097 bf16 odd block split", Setting{1, 4097, kBf16, true}, int64_t{3}, Rule::kBlock,
        plain);
  chain("B3 g2 V1031 f32 block", Setting{3, 1031, kF32, false, 1}, int64_t{2}, Rule::kBlock, as_is,
        kProbs);
  chain("B1 g2 V4097 f16 odd match split", Setting{1, 4097, kF16, true}, int64_t{2}, Rule::kMatch,
        plain);
  chain("B3 g2 V1031 bf16 odd typical", Setting{3, 1031, kBf16, true, 1}, int64_t{2},
        Rule::kTypical, plain);
  chain("B1 g2 V1031 bf16 odd sparse split", Setting{1, 1031, kBf16, true}, int64_t{2},
        Rule::kToken, plain, kLogits, DraftForm::kSparse);

  const auto tree = [&](const char* name, Setting s, TreeRule rule, Kind kind) {
    all.emplace_back(std::string("tree ") + name, [=] { run_tree(s, rule, kind); });
  };
  tree("B1 V4097 bf16 odd multi_draft", {1, 4097, kBf16, true, 1}, TreeRule::kMultiDraft, kLogits);
  tree("B3 V1031 f32 traversal", {3, 1031, kF32, true, 1}, TreeRule::kTraversal, kProbs);
  tree("B1 V1031 f16 odd match", {1, 1031, kF16, true, 1}, TreeRule::kMatch, kLogits);
  all.emplace_back("ngram_propose", run_ngram);
  all.emplace_back("caches", run_caches);
  return all;
}

}  // namespace
}  // namespace specdec

int main(int count, char** names) {
  simt::blocks_at_once = 64;
  simt::shuffle_seed = 1;
  const bool lists = count == 2 && std::strcmp(names[1], "list") == 0;
  int found = 0;
  for (const auto& [name, run] : specdec::cases()) {
    if (lists) std::printf("%s\n", name.c_str());
    if (std::find(names + 1, names + count, name) == names + count) continue;
    std::fprintf(stderr, "case: %s\n", name.c_str());
    run();
    ++found;
  }
  return lists || found == count - 1 ? 0 : 2;
}
