/* One round of speculative decoding for a batch, on the processor: a drafter samples four tokens
 * for each of three sequences, and the target verifies them. The logits of both models are
 * formulas.
 *
 *   cc verify_chain.c $(pkg-config --cflags --libs specdec-kernels) -o verify_chain */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "specdec/specdec.h"

enum { B = 3, GAMMA = 4, V = 16 };

static void check(specdec_code code) {
  if (code == SPECDEC_OK) return;
  fprintf(stderr, "code %d: %s\n", (int)code, specdec_last_error());
  exit(EXIT_FAILURE);
}

int main(void) {
  static float target[B][GAMMA + 1][V], draft[B][GAMMA][V];
  for (int b = 0; b < B; ++b) {
    for (int i = 0; i <= GAMMA; ++i) {
      for (int v = 0; v < V; ++v) {
        target[b][i][v] = 0.5f * (float)((7 * b + 5 * i + 3 * v * v) % 11);
        if (i < GAMMA) draft[b][i][v] = target[b][i][v] + 0.125f * (float)((v + b) % 3);
      }
    }
  }

  /* The drafter. Each drafted token has a row, and the noise of its own position. */
  int64_t seeds[B] = {1, 2, 3}, positions[B] = {10, 20, 30};
  int64_t row_seeds[B][GAMMA], row_positions[B][GAMMA], drafted[B][GAMMA];
  for (int b = 0; b < B; ++b) {
    for (int i = 0; i < GAMMA; ++i) {
      row_seeds[b][i] = seeds[b];
      row_positions[b][i] = positions[b] + i;
    }
  }
  float draft_logprobs[B][GAMMA], threshold[B][GAMMA];
  double logsumexp[B][GAMMA];
  int32_t draft_status[B][GAMMA];
  specdec_sample_args sample;
  check(specdec_sample_init(&sample, sizeof sample));
  sample.logits = specdec_tensor_2d(draft, SPECDEC_FLOAT32, B * GAMMA, V);
  sample.seeds = specdec_tensor_1d(row_seeds, SPECDEC_INT64, B * GAMMA);
  sample.positions = specdec_tensor_1d(row_positions, SPECDEC_INT64, B * GAMMA);
  sample.top_p = 0.9;
  sample.tokens = &drafted[0][0];
  sample.logprobs = &draft_logprobs[0][0];
  sample.logsumexp = &logsumexp[0][0];
  sample.threshold = &threshold[0][0];
  sample.status = &draft_status[0][0];
  check(specdec_sample(&sample));

  /* The target. */
  int64_t tokens[B][GAMMA + 1];
  int32_t num_accepted[B], status[B];
  float logprobs[B][GAMMA + 1];
  specdec_verify_chain_args verify;
  check(specdec_verify_chain_init(&verify, sizeof verify));
  verify.target = specdec_tensor_3d(target, SPECDEC_FLOAT32, B, GAMMA + 1, V);
  verify.draft_token_ids = specdec_tensor_2d(drafted, SPECDEC_INT64, B, GAMMA);
  verify.draft = specdec_tensor_3d(draft, SPECDEC_FLOAT32, B, GAMMA, V);
  verify.draft_logsumexp = specdec_tensor_2d(logsumexp, SPECDEC_FLOAT64, B, GAMMA);
  verify.draft_threshold = specdec_tensor_2d(threshold, SPECDEC_FLOAT32, B, GAMMA);
  verify.seeds = specdec_tensor_1d(seeds, SPECDEC_INT64, B);
  verify.positions = specdec_tensor_1d(positions, SPECDEC_INT64, B);
  verify.tokens = tokens;
  verify.num_accepted = num_accepted;
  verify.status = status;
  verify.logprobs = &logprobs[0][0];
  check(specdec_verify_chain(&verify));

  for (int b = 0; b < B; ++b) {
    printf("sequence %d: drafted", b);
    for (int i = 0; i < GAMMA; ++i) printf(" %" PRId64, drafted[b][i]);
    printf(", accepted %d, tokens", (int)num_accepted[b]);
    for (int i = 0; i <= num_accepted[b]; ++i) printf(" %" PRId64, tokens[b][i]);
    printf(", status %d\n", (int)status[b]);
  }
  return EXIT_SUCCESS;
}
