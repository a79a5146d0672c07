#include "specdec/tree_layout.h"

#include "arguments/checks.h"
#include "torch/parallel.h"
#include "torch/register.h"

namespace specdec {
namespace {

void check_shape(const char* name, const Tensor& t, const Tensor& tokens) {
  SPECDEC_CHECK(t.dim() == 2 && t.size(0) == tokens.size(0) && t.size(1) == tokens.size(1), name,
                " must be [B, M] = ", shape_of(tokens), ", got ", shape_of(t));
}

void check_float32(const char* name, const Tensor& t) {
  SPECDEC_CHECK(t.scalar_type() == ScalarType::Float, name, " must be float32, got ",
                dtype_name(t.scalar_type()));
}

// Node numbers are int32.
void check_size(int64_t size) {
  SPECDEC_CHECK(size >= 0 && size < (int64_t{1} << 31), "size must be in [0, 2147483647], got ",
                size);
}

void check_tree_attention(const Tensor& parents, const Tensor& lengths, int64_t slots,
                          int64_t window) {
  SPECDEC_CHECK(parents.dim() == 2, "parents must be [B, N], got ", shape_of(parents));
  check_ids("parents", parents);
  const int64_t batch = parents.size(0), nodes = parents.size(1);
  check_entries("parents", "the positions", "[B, N]", {batch, nodes});
  check_integers("lengths", lengths, batch, parents, "parents");
  SPECDEC_CHECK(slots >= 0, "slots must be at least 0, got ", slots);
  SPECDEC_CHECK(window >= 0, "window must be at least 0 (0 sees every key), got ", window);
  check_entries("slots", "the mask", "[B, N+1, S]", {batch, nodes + 1, slots});
}

std::tuple<Tensor, Tensor> tree_attention(Tensor parents, Tensor lengths, int64_t slots,
                                          int64_t window) {
  check_tree_attention(parents, lengths, slots, window);
  const int64_t batch = parents.size(0), nodes = parents.size(1);
  Tensor mask = torch::stable::new_empty(parents, {batch, nodes + 1, slots}, ScalarType::Bool);
  Tensor positions = torch::stable::new_empty(parents, {batch, nodes + 1}, ScalarType::Long);
  lengths = dense_int64(lengths);
  const TreeAttentionParams p = {ids_of(parents),
                                 lengths.const_data_ptr<int64_t>(),
                                 mask.mutable_data_ptr<bool>(),
                                 positions.mutable_data_ptr<int64_t>(),
                                 batch,
                                 nodes,
                                 slots,
                                 window};
  cpu::tree_attention(p, torch_parallel());
  return {mask, positions};
}

void check_rerank_tree(const Tensor& tokens, const Tensor& parents, const Tensor& scores,
                       int64_t size) {
  SPECDEC_CHECK(tokens.dim() == 2, "tokens must be [B, M], got ", shape_of(tokens));
  check_ids("tokens", tokens);
  check_shape("parents", parents, tokens);
  check_ids("parents", parents);
  check_same_device("parents", parents, tokens, "tokens");
  check_shape("scores", scores, tokens);
  check_float32("scores", scores);
  check_same_device("scores", scores, tokens, "tokens");
  check_size(size);
  check_entries("size", "the tree", "[B, size]", {tokens.size(0), size});
}

std::tuple<Tensor, Tensor, Tensor> rerank_tree(Tensor tokens, Tensor parents, Tensor scores,
                                               int64_t size) {
  check_rerank_tree(tokens, parents, scores, size);
  const int64_t batch = tokens.size(0), candidates = tokens.size(1);
  const auto output = [&](const Tensor& like) {
    return torch::stable::new_empty(like, {batch, size});
  };
  Tensor out_tokens = output(tokens), out_parents = output(parents), nodes = output(parents);
  const RerankTreeParams p = {ids_of(tokens),
                              ids_of(parents),
                              scores.const_data_ptr<float>(),
                              scores.stride(0),
                              scores.stride(1),
                              ids_out(out_tokens),
                              ids_out(out_parents),
                              ids_out(nodes),
                              batch,
                              candidates,
                              size};
  cpu::rerank_tree(p, torch_parallel());
  return {out_tokens, out_parents, nodes};
}

void check_build_trie(const Tensor& sequences, int64_t size, bool /*merge*/) {
  SPECDEC_CHECK(sequences.dim() == 3, "sequences must be [B, K, L], got ", shape_of(sequences));
  check_ids("sequences", sequences);
  check_size(size);
  check_entries("size", "the tree", "[B, size]", {sequences.size(0), size});
  check_entries("sequences", "the nodes", "[B, K, L]",
                {sequences.size(0), sequences.size(1), sequences.size(2)});
}

std::tuple<Tensor, Tensor, Tensor, Tensor> build_trie(Tensor sequences, int64_t size, bool merge) {
  check_build_trie(sequences, size, merge);
  const int64_t batch = sequences.size(0), branches = sequences.size(1), length = sequences.size(2);
  Tensor tokens = torch::stable::new_empty(sequences, {batch, size});
  const auto output = [&](std::initializer_list<int64_t> shape) {
    return torch::stable::new_empty(sequences, shape, ScalarType::Int);
  };
  Tensor parents = output({batch, size}), nodes = output({batch, branches, length}),
         num_nodes = output({batch});
  const BuildTrieParams p = {ids_of(sequences),
                             ids_out(tokens),
                             parents.mutable_data_ptr<int32_t>(),
                             nodes.mutable_data_ptr<int32_t>(),
                             num_nodes.mutable_data_ptr<int32_t>(),
                             batch,
                             branches,
                             length,
                             size,
                             merge};
  cpu::build_trie(p, torch_parallel());
  return {tokens, parents, nodes, num_nodes};
}

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  m.def(
      "tree_attention(Tensor parents, Tensor lengths, SymInt slots, int window) -> "
      "(Tensor mask, Tensor positions)");
  m.def("validate_tree_attention(Tensor parents, Tensor lengths, int slots, int window) -> ()");
  m.def(
      "rerank_tree(Tensor tokens, Tensor parents, Tensor scores, SymInt size) -> "
      "(Tensor tokens_out, Tensor parents_out, Tensor nodes)");
  m.def("validate_rerank_tree(Tensor tokens, Tensor parents, Tensor scores, int size) -> ()");
  m.def(
      "build_trie(Tensor sequences, SymInt size, bool merge) -> "
      "(Tensor tokens, Tensor parents, Tensor nodes, Tensor num_nodes)");
  m.def("validate_build_trie(Tensor sequences, int size, bool merge) -> ()");
}
SPECDEC_IMPLEMENT_CPU(tree_attention)
SPECDEC_VALIDATE(tree_attention, check_tree_attention)
SPECDEC_IMPLEMENT_CPU(rerank_tree)
SPECDEC_VALIDATE(rerank_tree, check_rerank_tree)
SPECDEC_IMPLEMENT_CPU(build_trie)
SPECDEC_VALIDATE(build_trie, check_build_trie)

}  // namespace
}  // namespace specdec
