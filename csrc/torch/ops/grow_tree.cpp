#include "specdec/grow_tree.h"

#include <algorithm>

#include "specdec/expand_tree.h"
#include "torch/arguments/decoder_layer.h"
#include "torch/register.h"

namespace specdec {
namespace {

// A table [rows, columns] without gaps, as kernels gather from it.
void check_table(const char* name, const char* shape, const Tensor& t, int64_t columns,
                 const Tensor& of) {
  SPECDEC_CHECK(t.dim() == 2 && t.size(0) >= 1 && t.size(1) == columns, name, " must be ", shape,
                " with ", columns, " columns, got ", shape_of(t));
  check_like(name, t, of, "hidden");
}

Extents check_grow_tree(
    const Tensor& hidden, const Tensor& tokens, const Tensor& counts, const Tensor& starts,
    const Tensor& limits, const Tensor& embeddings, const std::vector<Tensor>& norms,
    const std::vector<Tensor>& weights, const std::vector<int64_t>& in_features,
    const std::vector<int64_t>& out_features, const std::vector<Tensor>& qkv_biases,
    const std::vector<Tensor>& output_biases, const std::vector<Tensor>& mlp_biases,
    const std::vector<Tensor>& head_norms, const Tensor& norm, const Tensor& output,
    int64_t outputs, const std::optional<Tensor>& draft_tokens, const Tensor& cos,
    const Tensor& sin, const std::vector<Tensor>& caches, double scale, double epsilon,
    int64_t width, int64_t size, double min_probability) {
  check_hidden("hidden", hidden);
  const int64_t batch = hidden.size(0), pairs = hidden.size(1), features = hidden.size(2);
  SPECDEC_CHECK(pairs >= 1, "hidden must hold at least one pair, got ", shape_of(hidden));
  SPECDEC_CHECK(tokens.dim() == 2 && tokens.size(0) == batch && tokens.size(1) == pairs,
                "tokens must be [B, n] = [", batch, ", ", pairs, "], got ", shape_of(tokens));
  check_ids("tokens", tokens);
  check_same_device("tokens", tokens, hidden, "hidden");
  check_integers("counts", counts, batch, hidden, "hidden");
  check_integers("starts", starts, batch, hidden, "hidden");
  check_integers("limits", limits, batch, hidden, "hidden");
  check_table("embeddings", "[V, C]", embeddings, features, hidden);
  SPECDEC_CHECK(cos.dim() == 2 && cos.size(1) >= 2 && cos.size(1) % 2 == 0,
                "cos must be [P, D] with an even D, got ", shape_of(cos));
  check_table("cos", "[P, D]", cos, cos.size(1), hidden);
  check_table("sin", "[P, D]", sin, cos.size(1), hidden);
  SPECDEC_CHECK(sin.size(0) == cos.size(0), "sin must have the shape of cos, ", shape_of(cos),
                ", got ", shape_of(sin));
  check_vector("norm", norm, features, hidden.scalar_type(), hidden, "hidden");
  check_weight("output", output, outputs, features, hidden, "hidden");
  if (draft_tokens) {
    check_integers("draft_tokens", *draft_tokens, outputs, hidden, "hidden");
  } else {
    SPECDEC_CHECK(outputs <= embeddings.size(0),
                  "output must have at most as many outputs as embeddings has rows, ",
                  embeddings.size(0), ", where no draft_tokens are given, got ", outputs);
  }
  SPECDEC_CHECK(width >= 1 && width <= kMaxWidth, "width must be in [1, ", kMaxWidth, "], got ",
                width);
  SPECDEC_CHECK(size >= 1, "size must be at least 1, got ", size);
  SPECDEC_CHECK(min_probability >= 0 && min_probability <= 1,
                "min_probability must be in [0, 1], got ", min_probability);
  check_entries("size", "the tree", "[B, size]", {batch, size});
  SPECDEC_CHECK(!norms.empty() && norms[0].dim() == 2 && norms[0].size(0) == 2,
                "norms[0] must be [2, C] = [2, ", features,
                "], of embeddings and hidden states, got ",
                norms.empty() ? "none" : shape_of(norms[0]));
  // The layers are checked with one pair of an embedding and a hidden state a sequence.
  const Tensor x = torch::stable::new_empty(hidden, {batch, 1, 2 * features});
  const Tensor angles = torch::stable::new_empty(cos, {1, 1, cos.size(1)});
  const Tensor mask = torch::stable::new_empty(hidden, {batch, 1, 1, 0}, ScalarType::Bool);
  return check_decoder_layers(x, norms, weights, in_features, out_features, qkv_biases,
                              output_biases, mlp_biases, head_norms, angles, angles, caches, starts,
                              mask, scale, epsilon, false);
}

// The numbers of a call, which say how long its tables and caches must be.
struct CallNumbers {
  const int64_t *counts, *starts, *limits;
  int64_t batch, pairs, width;

  void check(const Tensor& cos, const Tensor& cache) const {
    int64_t depth = 0;
    for (int64_t b = 0; b < batch; ++b) {
      SPECDEC_CHECK(counts[b] >= 1 && counts[b] <= pairs, "counts must be in [1, n] = [1, ", pairs,
                    "], got ", counts[b]);
      SPECDEC_CHECK(starts[b] >= 0 && starts[b] < cos.size(0), "starts must be in [0, P) = [0, ",
                    cos.size(0), "), got ", starts[b]);
      depth = std::max(depth, limits[b]);
    }
    SPECDEC_CHECK(depth <= cos.size(0), "limits must be at most P = ", cos.size(0), ", got ",
                  depth);
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t text = starts[b] + counts[b];
      const int64_t places = std::max(starts[b] + pairs, text + std::max<int64_t>(depth - 1, 0));
      SPECDEC_CHECK(places <= cos.size(0), "cos must have a row for each of ", places,
                    " places, got ", shape_of(cos));
      const int64_t slots = std::max(starts[b] + pairs, text + fed_nodes(depth, width));
      SPECDEC_CHECK(slots <= cache.size(2), "caches must have ", slots, " slots, got ",
                    shape_of(cache));
    }
    check_entries("limits", "the candidates", "[B, M]", {batch, candidates(depth, width)});
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor> grow_tree_(
    Tensor hidden, Tensor tokens, Tensor counts, Tensor starts, Tensor limits, Tensor embeddings,
    std::vector<Tensor> norms, std::vector<Tensor> weights, std::vector<int64_t> in_features,
    std::vector<int64_t> out_features, std::vector<Tensor> qkv_biases,
    std::vector<Tensor> output_biases, std::vector<Tensor> mlp_biases,
    std::vector<Tensor> head_norms, Tensor norm, Tensor output, int64_t outputs,
    std::optional<Tensor> draft_tokens, Tensor cos, Tensor sin, std::vector<Tensor> caches,
    double scale, double epsilon, int64_t width, int64_t size, double min_probability) {
  const Extents written = check_grow_tree(
      hidden, tokens, counts, starts, limits, embeddings, norms, weights, in_features, out_features,
      qkv_biases, output_biases, mlp_biases, head_norms, norm, output, outputs, draft_tokens, cos,
      sin, caches, scale, epsilon, width, size, min_probability);
  const int64_t batch = hidden.size(0), pairs = hidden.size(1);
  std::vector<Tensor> read = {hidden, embeddings, norm,   output, cos,
                              sin,    tokens,     counts, starts, limits};
  read = read_first(read, written);
  if (draft_tokens) draft_tokens = read_first({*draft_tokens}, written)[0];
  for (size_t i = 0; i < 6; ++i) read[i] = dense(read[i]);
  for (size_t i = 7; i < 10; ++i) read[i] = dense_int64(read[i]);
  const int64_t* const drafted = int64s(draft_tokens);
  const CallNumbers numbers = {read[7].const_data_ptr<int64_t>(),
                               read[8].const_data_ptr<int64_t>(),
                               read[9].const_data_ptr<int64_t>(),
                               batch,
                               pairs,
                               width};
  numbers.check(cos, caches[0]);
  const Ids ids = ids_of(read[6]);
  const auto check_token = [&](const char* name, int64_t token) {
    SPECDEC_CHECK(token >= 0 && token < embeddings.size(0), name, " must be in [0, ",
                  embeddings.size(0), "), got ", token);
  };
  for (int64_t i = 0; i < batch * pairs; ++i) check_token("tokens", ids.at(i / pairs, i % pairs));
  for (int64_t i = 0; drafted != nullptr && i < outputs; ++i) {
    check_token("draft_tokens", drafted[i]);
  }

  const auto result = [&](std::initializer_list<int64_t> shape, ScalarType dtype) {
    return torch::stable::new_empty(hidden, shape, dtype);
  };
  Tensor out_tokens = result({batch, size}, ScalarType::Long),
         out_parents = result({batch, size}, ScalarType::Long),
         scores = result({batch, size}, ScalarType::Float),
         levels = result({batch}, ScalarType::Long);
  const DecoderLayers layers(written, norms, weights, out_features, qkv_biases, output_biases,
                             mlp_biases, head_norms, caches);
  GrowTreeParams p = {};
  layers.set(p.head);
  p.head.dtype = row_dtype(hidden);
  p.head.batch = batch;
  p.head.hidden = hidden.size(2);
  p.head.head_size = cos.size(1);
  p.head.scale = static_cast<float>(scale);
  p.head.epsilon = static_cast<float>(epsilon);
  p.hidden = read[0].const_data_ptr();
  p.embeddings = read[1].const_data_ptr();
  p.norm = read[2].const_data_ptr();
  p.output = weight_of(read[3], nullptr, outputs);
  p.cos = read[4].const_data_ptr();
  p.sin = read[5].const_data_ptr();
  p.draft_tokens = drafted;
  p.tokens = ids;
  p.counts = numbers.counts;
  p.starts = numbers.starts;
  p.limits = numbers.limits;
  p.pairs = pairs;
  p.width = width;
  p.size = size;
  p.min_probability = static_cast<float>(min_probability);
  p.out_tokens = out_tokens.mutable_data_ptr<int64_t>();
  p.out_parents = out_parents.mutable_data_ptr<int64_t>();
  p.out_scores = scores.mutable_data_ptr<float>();
  p.levels = levels.mutable_data_ptr<int64_t>();
  cpu::grow_tree(p, torch_parallel());
  return {out_tokens, out_parents, scores, levels};
}

// The layers as those of decoder_layers_; `outputs` are those of `output`.
#define SPECDEC_GROW_TREE_ARGUMENTS(caches)                                                   \
  "Tensor hidden, Tensor tokens, Tensor counts, Tensor starts, Tensor limits, "               \
  "Tensor embeddings, Tensor[] norms, Tensor[] weights, SymInt[] in_features, "               \
  "SymInt[] out_features, Tensor[] qkv_biases, Tensor[] output_biases, Tensor[] mlp_biases, " \
  "Tensor[] head_norms, Tensor norm, Tensor output, SymInt outputs, Tensor? draft_tokens, "   \
  "Tensor cos, Tensor sin, " caches                                                           \
  " caches, float scale, float epsilon, int width, int size, "                                \
  "float min_probability"

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  m.def("grow_tree_(" SPECDEC_GROW_TREE_ARGUMENTS(
      "Tensor(a!)[]") ") -> (Tensor tokens_out, Tensor parents, Tensor scores, Tensor levels)");
  m.def("validate_grow_tree_(" SPECDEC_GROW_TREE_ARGUMENTS("Tensor[]") ") -> ()");
}
SPECDEC_IMPLEMENT_CPU(grow_tree_)
SPECDEC_VALIDATE(grow_tree_, check_grow_tree)

}  // namespace
}  // namespace specdec
