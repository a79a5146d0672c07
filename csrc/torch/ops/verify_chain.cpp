#include "arguments/chain.h"
#include "torch/arguments/out.h"
#include "torch/register.h"

namespace specdec {
namespace {

int64_t verify_chain_workspace_bytes(int64_t batch, int64_t gamma, int64_t vocab, int64_t rule) {
  check_call_size("batch", batch, "gamma", gamma, vocab);
  auto p = most_demanding<ChainParams>(vocab);
  p.batch = batch;
  p.gamma = gamma;
  p.rule = enum_of("rule", rule, kLastRule);
  return workspace_bytes(p, SPECDEC_LAUNCHERS(ChainParams, verify_chain));
}

int64_t needed_by_chain(const ChainArguments& a) {
  return verify_chain_workspace_bytes(a.drafted.size(0), a.drafted.size(1), a.widest_row(), a.rule);
}
using ChainWithOut = OutArguments<ChainArguments, needed_by_chain>;

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  define_with_out<ChainArguments, ChainWithOut>(m, "verify_chain");
  m.def("verify_chain_workspace_bytes(int batch, int gamma, int vocab, int rule) -> int");
}
constexpr auto& verify_chain = Op<ChainArguments>::run;
constexpr auto& verify_chain_out = Op<ChainWithOut>::run;
SPECDEC_IMPLEMENT(verify_chain)
SPECDEC_IMPLEMENT(verify_chain_out)
SPECDEC_IMPLEMENT_ANYWHERE(verify_chain_workspace_bytes)
SPECDEC_VALIDATE(verify_chain, Op<ChainArguments>::validate)
SPECDEC_VALIDATE(verify_chain_out, Op<ChainWithOut>::validate)

}  // namespace
}  // namespace specdec
