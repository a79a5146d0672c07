#pragma once
// The verifier as a state machine: one thread of each block decides, then all threads of the group
// carry out the action it asks for, until the action is kDone. All blocks decide alike, because
// they decide from the same reductions.
#include <cstdint>

namespace specdec::cuda {

// An action that all threads carry out together; ResidualScan does those from kScanResidual on.
enum class TreeAction : int32_t {
  kContinue,          // nothing: the verifier goes on to its next state
  kMeasure,           // row statistics of a target or draft row
  kLookUpSparse,      // the probability of the child's token in a sparse draft
  kFindChild,         // rule traversal: the next child of the current node
  kCompareChildren,   // the child that holds the target's token, or the likeliest typical one
  kSumResidualOfFew,  // sums of a residual from the few tokens of the draft
  kDone,
  kScanResidual,  // sums over the whole row
  kReadResidual,  // the residual at the child's token
  kDraw           // a token from the target row or from the residual
};

// The verifier's next decision. One that several others lead to has a state of its own, so that its
// code is inlined once.
enum class TreeState : int32_t {
  kEnterNode,         // starts at a node or at the root
  kTargetMeasured,    // has the statistics of its target row
  kNextChild,         // looks for a child to try
  kOpenDraft,         // prepares the draft distribution of that child
  kDraftMeasured,     // has the draft distribution
  kTest,              // tests the child against P and a multiple of Q
  kResidualRead,      // tests the child against the residual at its token
  kReject,            // rejects: subtracts the draft
  kAcceptChild,       // accepts: the child is the next node of the path
  kSubtracted,        // has the sums of the residual after a rejection
  kRemainingMass,     // top_k_plus_one: has the mass of Q outside the top tokens
  kOverlapsMeasured,  // k_seq: has the overlaps of P and Q at some factors
  kEntropyMeasured,   // typical: has the entropy of the row
  kChildrenCompared,  // knows which child holds the target's token, if any
  kTestNode,          // traversal: all children were rejected; tests the node itself
  kAcceptPath,        // traversal: accepts the path to the current node
  kParentMeasured,    // traversal: has the residual of the parent of a rejected node
  kRescanned,         // has the sums of the residual once more, to draw from it
  kReadRowAgain,      // asks for the statistics of the row once more, to draw from P
  kRowReadAgain,      // has these statistics
  kDrawn,             // has a token drawn from P or the residual
  kEmit               // emits the token that ends the path
};

// The sums that a scan computes from P and Q.
enum class ScanKind : int32_t {
  kResidual,       // cP less the drafts; for rule traversal also where the last draft exceeds that
  kExcluding,      // the same with Q zeroed at the excluded tokens, and the mass of that Q
  kRemainingMass,  // that mass alone
  kOverlaps,       // k_seq: sums of min(Q, P / rho) at some factors rho
  kKSeqResidual,   // k_seq: P less a share of min(Q, P / rho)
  kEntropy
};

}  // namespace specdec::cuda
