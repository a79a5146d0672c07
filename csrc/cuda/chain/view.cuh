#pragma once
// What a kernel of verify_chain is compiled for. All kernels come from the same code; what a
// variant excludes is left out of its kernel at compile time.
#include "cuda/chain/sequence.cuh"
#include "cuda/plan.cuh"

namespace specdec::cuda {

// The chains that a kernel serves. One that serves fewer is smaller and needs fewer registers.
enum class Variant {
  kGeneral,  // all
  kLogits,   // rules token, lenient and greedy without filters, from logits
  kProbs     // the same from probabilities that are P as they are
};

// How many blocks run at once on a multiprocessor: the registers of a thread are limited to that.
constexpr int blocks_per_processor(Variant variant) {
  return variant == Variant::kGeneral ? 2 : kBlocksWithFewRegisters;
}

// The kernel without filters that serves a call, or the general one. The latter serves drafts that
// are sparse, have a map from tokens to columns, or rows of another dtype than the target's.
inline Variant variant_of(const ChainParams& p) {
  const SamplingParams& s = p.sampling;
  const bool ratio_test =
      p.rule == Rule::kToken || p.rule == Rule::kLenient || p.rule == Rule::kGreedy;
  const bool needs_any_reader =
      p.draft.columns != nullptr || p.draft.form == DraftForm::kSparse ||
      (p.draft.form != DraftForm::kOneHot && p.draft.rows.dtype != p.target.dtype);
  if (!ratio_test || may_filter(s, p.vocab) || needs_any_reader) return Variant::kGeneral;
  if (p.kind == Kind::kLogits) return Variant::kLogits;
  const bool as_they_are = p.rule == Rule::kGreedy || (s.temperatures == nullptr &&
                                                       (s.temperature == 1 || s.temperature == 0));
  // A draft with the statistics of `sample` has rows of logits.
  return as_they_are && p.draft.form != DraftForm::kSampled ? Variant::kProbs : Variant::kGeneral;
}

// The task as the code of a variant sees it: answers that the variant implies are constants.
template <Variant kVariant>
class ChainView {
 protected:
  static constexpr bool kGeneral = kVariant == Variant::kGeneral;
  // How rows are read. A row that is not the target's is never read as something else.
  using Reads =
      std::conditional_t<kGeneral, AnyRead,
                         KnownRead<kVariant == Variant::kLogits ? Read::kLogits : Read::kProbs>>;

  __device__ ChainView(const ChainJob& job, ChainTask& task) : job_(job), p_(job.p), t_(task) {}

  // Read anew at each use, because it would occupy a register throughout.
  __device__ bool action_is(Action action) const {
    return *static_cast<const volatile Action*>(&t_.action) == action;
  }
  __device__ bool rule_is(Rule rule) const {
    const bool served =
        kGeneral || rule == Rule::kToken || rule == Rule::kLenient || rule == Rule::kGreedy;
    return served && p_.rule == rule;
  }
  __device__ bool reads_draft() const {
    return kGeneral ? p_.reads_draft() : !rule_is(Rule::kGreedy);
  }
  __device__ bool filtered() const { return kGeneral && t_.filtered; }
  __device__ bool direct() const {
    return kGeneral ? t_.direct : kVariant == Variant::kProbs && !t_.greedy;
  }
  __device__ bool sparse() const { return kGeneral && t_.draft.form == DraftForm::kSparse; }
  __device__ bool sparse_source() const { return kGeneral && p_.draft.form == DraftForm::kSparse; }

  // The current row.
  __device__ RowView row() const {
    RowView row = t_.row;
    row.read = Reads::of(row.read);
    return row;
  }

  // The draft's rows.
  __device__ DraftParams draft_source() const {
    DraftParams source = p_.draft;
    if (!kGeneral) {
      source.kind = kVariant == Variant::kLogits ? Kind::kLogits : Kind::kProbs;
      source.columns = nullptr;
      source.form = form_of(source.form);
    }
    return source;
  }

  // Q of draft i at the drafted token x.
  __device__ void open_draft(int64_t i, int64_t x, DraftDistribution& d) const {
    cuda::open_draft(draft_source(), t_.b, draft_row(p_, t_, i), draft_statistic(p_, t_, i), x,
                     t_.draft_temperature, d);
  }

  // Whether the current row must be measured, or its draft row.
  __device__ bool measures(int which) const {
    return which == kTarget ? !t_.reads_one_entry : t_.has_draft && t_.draft.unmeasured();
  }

  // Whether the current row was measured together with all others.
  __device__ bool knows_row() const { return t_.prefilled && t_.all_measured; }

  // Whether all drafts are tested side by side: then what a test needs is a single entry of each
  // row, or all rows are measured.
  __device__ bool tests_side_by_side() const {
    const bool by_ratio =
        !kGeneral || rule_is(Rule::kToken) || rule_is(Rule::kLenient) || rule_is(Rule::kGreedy);
    return by_ratio && !sparse_source() && (t_.all_measured || direct());
  }

  // The statistics of all rows lie where a top-k or top-p selection has its histogram, which is
  // free because all rows are measured at once only without filters.
  __device__ MeasuredRow* measured_row(int64_t row, int which) const {
    return reinterpret_cast<MeasuredRow*>(shared_memory()->bins) + slot_of(row, which);
  }
  __device__ int64_t slot_of(int64_t row, int which) const {
    return row + (which == kTarget ? 0 : job_.row_tile_stats());
  }

  // The draft of the current row.
  __device__ DraftDistribution draft() const {
    DraftDistribution d = t_.draft;
    if (!kGeneral) {
      d.columns = nullptr;
      d.ids = nullptr;
      d.probs = kVariant == Variant::kProbs;
      d.row.read = Reads::of(d.row.read);
      d.form = form_of(d.form);
      d.row.dtype = t_.row.dtype;
    }
    return d;
  }

  static __device__ DraftForm form_of(DraftForm form) {
    if (kGeneral || form == DraftForm::kOneHot) return form;
    return kVariant == Variant::kLogits && form == DraftForm::kSampled ? form : DraftForm::kRows;
  }

  const ChainJob& job_;
  const ChainParams& p_;
  ChainTask& t_;
};

// Makes the names of the base class known to a class template that inherits it.
#define SPECDEC_CHAIN_VIEW(variant)   \
  using View = ChainView<variant>;    \
  using View::kGeneral;               \
  using Reads = typename View::Reads; \
  using View::job_;                   \
  using View::p_;                     \
  using View::t_;                     \
  using View::action_is;              \
  using View::rule_is;                \
  using View::reads_draft;            \
  using View::filtered;               \
  using View::direct;                 \
  using View::sparse;                 \
  using View::sparse_source;          \
  using View::row;                    \
  using View::draft_source;           \
  using View::open_draft;             \
  using View::measures;               \
  using View::knows_row;              \
  using View::tests_side_by_side;     \
  using View::measured_row;           \
  using View::slot_of;                \
  using View::draft

}  // namespace specdec::cuda
