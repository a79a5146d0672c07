// apply_penalties.
#include "arguments/penalties.h"

#include "c/call.h"

namespace specdec::c {
namespace {

struct Penalties {
  using Args = specdec_apply_penalties_args;
  using Arguments = PenaltyArguments;
  static constexpr size_t kRequired = offsetof(Args, parents);

  static auto fields(Args& a) {
    return std::tie(a.target, a.draft_token_ids, a.parents, a.target_indptr, a.token_counts,
                    a.prompt_mask, a.repetition_penalties, a.repetition_penalty,
                    a.presence_penalties, a.presence_penalty, a.frequency_penalties,
                    a.frequency_penalty, a.bias_ids, a.biases, a.min_new_tokens, a.eos_token_ids);
  }
  static void set_defaults(Arguments&) {}
  static void call(Args& a, const Device& device) {
    Arguments given{};
    fill<Penalties>(given, a, device);
    given.run();
  }
};

}  // namespace
}  // namespace specdec::c

SPECDEC_DEFINE_PLAIN(apply_penalties, specdec::c::Penalties)
