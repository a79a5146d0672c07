#include "arguments/tree.h"
#include "torch/arguments/out.h"
#include "torch/register.h"

namespace specdec {
namespace {

int64_t verify_tree_workspace_bytes(int64_t batch, int64_t nodes, int64_t vocab, int64_t rule) {
  check_call_size("batch", batch, "nodes", nodes, vocab);
  auto p = most_demanding<TreeParams>(vocab);
  p.batch = batch;
  p.nodes = nodes;
  p.rule = enum_of("rule", rule, TreeRule::kTypical);
  return workspace_bytes(p, SPECDEC_LAUNCHERS(TreeParams, verify_tree));
}

int64_t needed_by_tree(const TreeArguments& a) {
  return verify_tree_workspace_bytes(a.drafted.size(0), a.drafted.size(1), a.widest_row(), a.rule);
}
using TreeWithOut = OutArguments<TreeArguments, needed_by_tree>;

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  define_with_out<TreeArguments, TreeWithOut>(m, "verify_tree");
  m.def("verify_tree_workspace_bytes(int batch, int nodes, int vocab, int rule) -> int");
}
constexpr auto& verify_tree = Op<TreeArguments>::run;
constexpr auto& verify_tree_out = Op<TreeWithOut>::run;
SPECDEC_IMPLEMENT(verify_tree)
SPECDEC_IMPLEMENT(verify_tree_out)
SPECDEC_IMPLEMENT_ANYWHERE(verify_tree_workspace_bytes)
SPECDEC_VALIDATE(verify_tree, Op<TreeArguments>::validate)
SPECDEC_VALIDATE(verify_tree_out, Op<TreeWithOut>::validate)

}  // namespace
}  // namespace specdec
