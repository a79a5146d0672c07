/* The C interface of specdec-kernels. docs/c.md explains it with an example.
 *
 * A function reads a struct of arguments: tensors as a pointer with a dtype, sizes and strides, and
 * numbers. `specdec_..._init` sets every number to its default and every tensor to none, then the
 * caller sets what it has. Memory stays the caller's, outputs too; nothing is kept after a call. A
 * function returns SPECDEC_OK, or another code and a message in specdec_last_error().
 *
 * Each op has one function that runs on the processor, and one whose name ends in _cuda, which
 * starts kernels on a stream of the current CUDA device and returns. All pointers of a call are to
 * memory of that device then, and so is the workspace. It allocates nothing and waits for nothing.
 *
 * The ABI: later versions add fields to the end of a struct and never move one. `struct_size` says
 * which fields the caller knows; those that it does not know have their defaults. */
#ifndef SPECDEC_SPECDEC_H
#define SPECDEC_SPECDEC_H

#include <stddef.h>
#include <stdint.h>

#include "specdec/version.h"

#define SPECDEC_VERSION \
  (SPECDEC_VERSION_MAJOR * 10000 + SPECDEC_VERSION_MINOR * 100 + SPECDEC_VERSION_PATCH)

#if defined(__GNUC__)
#define SPECDEC_API __attribute__((visibility("default")))
#else
#define SPECDEC_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum specdec_code {
  SPECDEC_OK = 0,
  SPECDEC_INVALID_ARGUMENT = 1,
  SPECDEC_WITHOUT_CUDA = 2, /* the library was built without CUDA kernels */
  SPECDEC_CUDA_ERROR = 3,
  SPECDEC_OUT_OF_MEMORY = 4,
  SPECDEC_INTERNAL_ERROR = 5
} specdec_code;

/* Why the last call of this thread that failed did so, naming the argument, the rule and the value.
 * The text is valid until the next call of this thread that fails. Empty if none has. */
SPECDEC_API const char* specdec_last_error(void);

/* SPECDEC_VERSION of the library, which may be newer than that of the header. */
SPECDEC_API int32_t specdec_version(void);
SPECDEC_API int32_t specdec_has_cuda(void);           /* 1 or 0 */
SPECDEC_API const char* specdec_cpu_capability(void); /* the instruction set that is used */

/* The threads that a call on the processor uses, the caller's included: at first OMP_NUM_THREADS,
 * or where that is not set the number of processors. They serve one call at a time; a call that
 * comes meanwhile runs on the thread of its caller. No result depends on their number. */
SPECDEC_API int32_t specdec_get_num_threads(void);
SPECDEC_API specdec_code specdec_set_num_threads(int32_t threads); /* 1 to 1024 */

enum specdec_dtype {                   /* of `dtype` in a tensor */
                     SPECDEC_NONE = 0, /* there is no tensor */
                     SPECDEC_FLOAT32 = 1,
                     SPECDEC_FLOAT64 = 2,
                     SPECDEC_FLOAT16 = 3,
                     SPECDEC_BFLOAT16 = 4,
                     SPECDEC_INT32 = 5,
                     SPECDEC_INT64 = 6,
                     SPECDEC_BYTE = 7 /* any type of one byte, for caches */
};

#define SPECDEC_MAX_DIMS 4

typedef struct specdec_tensor {
  void* data; /* aligned to its elements; read only, unless an op says that it writes */
  int32_t dtype;
  int32_t ndim;
  int64_t sizes[SPECDEC_MAX_DIMS];
  int64_t strides[SPECDEC_MAX_DIMS]; /* elements */
} specdec_tensor;

/* Contiguous tensors. Set `strides` afterwards for one that is not. */
static inline specdec_tensor specdec_tensor_4d(const void* data, int32_t dtype, int64_t n0,
                                               int64_t n1, int64_t n2, int64_t n3) {
  specdec_tensor t;
  t.data = (void*)data;
  t.dtype = dtype;
  t.ndim = 4;
  t.sizes[0] = n0, t.sizes[1] = n1, t.sizes[2] = n2, t.sizes[3] = n3;
  t.strides[0] = n1 * n2 * n3, t.strides[1] = n2 * n3, t.strides[2] = n3, t.strides[3] = 1;
  return t;
}
static inline specdec_tensor specdec_tensor_3d(const void* data, int32_t dtype, int64_t n0,
                                               int64_t n1, int64_t n2) {
  specdec_tensor t = specdec_tensor_4d(data, dtype, n0, n1, n2, 1);
  t.ndim = 3;
  return t;
}
static inline specdec_tensor specdec_tensor_2d(const void* data, int32_t dtype, int64_t n0,
                                               int64_t n1) {
  specdec_tensor t = specdec_tensor_3d(data, dtype, n0, n1, 1);
  t.ndim = 2;
  return t;
}
static inline specdec_tensor specdec_tensor_1d(const void* data, int32_t dtype, int64_t n0) {
  specdec_tensor t = specdec_tensor_2d(data, dtype, n0, 1);
  t.ndim = 1;
  return t;
}

/* In the comments below
 *   floats    float32, bfloat16 or float16, with a contiguous last dimension
 *   integers  int32 or int64
 *   words     int32, one bit for each token: that of token v is bit v % 32 of word v / 32
 *   or none   a tensor that may be left out
 * B sequences, V tokens of the vocabulary. On the processor every stride may be any number but that
 * of the last dimension of floats and words. On CUDA, tensors of one dimension, draft_ids,
 * draft_logsumexp, draft_threshold, draft_rows, uniforms, bias_ids and biases are contiguous, and
 * seeds, positions, eos_token_ids, max_new_tokens and min_new_tokens are int64. */

/* Bits of `status`: faults of data, which are never an error of the call. docs/ops.md */
enum specdec_status {
  SPECDEC_TARGET_INVALID = 1,     /* a target row holds no distribution; -1 is emitted there */
  SPECDEC_DRAFT_INVALID = 2,      /* a draft row holds none; it counts as no draft */
  SPECDEC_EMPTY_RESIDUAL = 4,     /* the recovered token was drawn from the target */
  SPECDEC_DRAFT_OUT_OF_RANGE = 8, /* a drafted id is out of range; it counts as no draft */
  SPECDEC_BAD_PARAMETER = 16,     /* a sampling parameter or uniform is; nothing is emitted */
  SPECDEC_NOTHING_ALLOWED = 32    /* token_bitmask allows no token of a row; -1 is emitted there */
};

enum specdec_noise { /* of `noise` */
                     SPECDEC_NOISE_RESIDUAL = 0,
                     SPECDEC_NOISE_DRAFT = 1,
                     SPECDEC_NOISE_SHARED = 2 /* that of rule match */
};
enum specdec_method { SPECDEC_CDF = 0, SPECDEC_GUMBEL = 1 };           /* of `method` */
enum specdec_kind { SPECDEC_KIND_LOGITS = 0, SPECDEC_KIND_PROBS = 1 }; /* of `kind` */
enum specdec_rule { /* of `rule` of a chain; docs/rules.md */
                    SPECDEC_RULE_TOKEN = 0,
                    SPECDEC_RULE_BLOCK = 1,
                    SPECDEC_RULE_GREEDY = 2,
                    SPECDEC_RULE_MATCH = 3,
                    SPECDEC_RULE_TYPICAL = 4,
                    SPECDEC_RULE_LENIENT = 5,
                    SPECDEC_RULE_SYNTHETIC = 6,
                    SPECDEC_RULE_TOP_BETA = 7
};
enum specdec_tree_rule { /* of `rule` of a tree */
                         SPECDEC_TREE_GREEDY = 0,
                         SPECDEC_TREE_MATCH = 1,
                         SPECDEC_TREE_TARGET_ONLY = 2,
                         SPECDEC_TREE_MULTI_DRAFT = 3,
                         SPECDEC_TREE_MULTI_DRAFT_WOR = 4,
                         SPECDEC_TREE_TOP_K_PLUS_ONE = 5,
                         SPECDEC_TREE_K_SEQ = 6,
                         SPECDEC_TREE_TRAVERSAL = 7,
                         SPECDEC_TREE_TYPICAL = 8
};

/* Samples one token from each of R rows of logits, as the drafter does. */
typedef struct specdec_sample_args {
  size_t struct_size;
  specdec_tensor logits;    /* [R, V] floats */
  specdec_tensor seeds;     /* [R] integers */
  specdec_tensor positions; /* [R] integers: the absolute index of each token */
  int64_t* tokens;          /* [R] out; -1 where status is not 0 */
  float* logprobs;          /* [R] out */
  double* logsumexp;        /* [R] out: with threshold, what a sampled draft hands on */
  float* threshold;         /* [R] out */
  int32_t* status;          /* [R] out */
  /* Sampling parameters: a vector for all rows, or where it is none the number beside it. */
  specdec_tensor temperatures;  /* [R] float32, or none */
  double temperature;           /* 1; 0 takes the most probable token */
  specdec_tensor top_ks;        /* [R] int32, or none */
  int64_t top_k;                /* 0, which keeps all */
  specdec_tensor top_ps;        /* [R] float32, or none */
  double top_p;                 /* 1 */
  specdec_tensor min_ps;        /* [R] float32, or none */
  double min_p;                 /* 0 */
  specdec_tensor token_bitmask; /* [R, ceil(V/32)] words: the tokens that are allowed, or none */
  int64_t noise;                /* SPECDEC_NOISE_DRAFT */
  int64_t method;               /* SPECDEC_CDF */
} specdec_sample_args;

/* Decides how many tokens of a drafted chain are accepted, and samples the one that follows them.
 * The target is [B, gamma+1, V]; with target_indptr it is ragged, [R, V]. */
typedef struct specdec_verify_chain_args {
  size_t struct_size;
  specdec_tensor target;          /* [B, gamma+1, V] or [R, V] floats */
  specdec_tensor draft_token_ids; /* [B, gamma] integers; -1: no draft from here on */
  specdec_tensor seeds;           /* [B] integers */
  specdec_tensor positions;       /* [B] integers: the absolute index of the first drafted token */
  void* tokens;                   /* [B, gamma+1] out, in the dtype of draft_token_ids: the accepted
                                     drafts, a recovered or bonus token, -1 */
  int32_t* num_accepted;          /* [B] out */
  int32_t* status;                /* [B] out */
  float* logprobs;                /* [B, gamma+1] out, may be null */
  float* accept_probs;            /* [B, gamma] out, may be null */
  /* The distribution that was drafted from. None: the draft was deterministic. `draft` alone:
   * logits or probabilities, as `kind` says. With draft_logsumexp and draft_threshold: the logits
   * and what specdec_sample gave of them. With draft_ids: the probabilities of these ids. */
  specdec_tensor draft;              /* [B, gamma, D], [R-B, D] if ragged, or see draft_rows */
  specdec_tensor draft_ids;          /* as draft, integers, or none */
  specdec_tensor draft_columns;      /* [V] int32: the column of each token in a draft over another
                                        vocabulary, outside [0, D) if it has none; or none */
  specdec_tensor draft_logsumexp;    /* [B, gamma] float64, or none */
  specdec_tensor draft_threshold;    /* [B, gamma] float32, or none */
  specdec_tensor draft_temperatures; /* [B] float32, or none: those of a sampled draft */
  double draft_temperature;          /* 1 */
  specdec_tensor draft_bitmask;      /* words for the rows of a sampled draft, or none */
  specdec_tensor draft_rows;         /* [B, gamma] integers: the row of draft [B, M, D] or [M, D]
                                        that each token was drawn from, or none */
  int64_t kind;                      /* SPECDEC_KIND_LOGITS */
  int64_t rule;                      /* SPECDEC_RULE_TOKEN */
  specdec_tensor temperatures;       /* [B] float32, or none; as in specdec_sample_args */
  double temperature;                /* 1 */
  specdec_tensor top_ks;             /* [B] int32, or none */
  int64_t top_k;                     /* 0 */
  specdec_tensor top_ps;             /* [B] float32, or none */
  double top_p;                      /* 1 */
  specdec_tensor min_ps;             /* [B] float32, or none */
  double min_p;                      /* 0 */
  specdec_tensor token_bitmask;      /* words for the rows of the target, or none */
  specdec_tensor target_indptr;      /* [B+1] integers: the first row of each sequence, or none */
  specdec_tensor uniforms;           /* [B, gamma+1] float64 in [0, 1) in place of noise, or none */
  double lenience;                   /* 1; rule lenient */
  double typical_epsilon;            /* 0.09; rule typical */
  double typical_delta;              /* 0.3; rule typical */
  int64_t top_beta_rank;             /* 1; rule top_beta */
  double top_beta_distance;          /* 0; rule top_beta */
  specdec_tensor synthetic_rates;    /* [gamma] float32; rule synthetic, else none */
  specdec_tensor eos_token_ids;      /* [E] integers, or none: nothing is emitted after one */
  specdec_tensor max_new_tokens;     /* [B] integers, or none */
} specdec_verify_chain_args;

/* The same of a drafted tree. The parent of node n is a node before it, or -1, the root. Row 0 of
 * the target follows the root, and row n+1 node n. */
typedef struct specdec_verify_tree_args {
  size_t struct_size;
  specdec_tensor target;      /* [B, N+1, V], or [R, V] with target_indptr: floats */
  specdec_tensor tree_tokens; /* [B, N] integers; -1: no node */
  specdec_tensor parents;     /* [B, N] integers */
  specdec_tensor seeds;       /* [B] integers */
  specdec_tensor positions;   /* [B] integers: the absolute index of the tokens of depth 0 */
  int64_t rule;               /* no default */
  int64_t max_depth;          /* no default; at most N, deeper nodes are ignored */
  void* path;                 /* [B, max_depth] out, in the dtype of parents: the accepted nodes,
                                 then -1 */
  void* tokens;               /* [B, max_depth+1] out, in the dtype of tree_tokens */
  int32_t* num_accepted;      /* [B] out */
  int32_t* status;            /* [B] out */
  float* logprobs;            /* [B, max_depth+1] out, may be null */
  float* accept_probs;        /* [B, N] out, may be null */
  specdec_tensor draft;       /* as in specdec_verify_chain_args, with N in place of gamma */
  specdec_tensor draft_ids;
  specdec_tensor draft_columns;
  specdec_tensor draft_logsumexp;
  specdec_tensor draft_threshold;
  specdec_tensor draft_temperatures;
  double draft_temperature;
  specdec_tensor draft_bitmask;
  specdec_tensor draft_rows;
  int64_t kind;
  specdec_tensor temperatures;
  double temperature;
  specdec_tensor top_ks;
  int64_t top_k;
  specdec_tensor top_ps;
  double top_p;
  specdec_tensor min_ps;
  double min_p;
  specdec_tensor token_bitmask;
  specdec_tensor target_indptr;
  specdec_tensor uniforms; /* [B, 2N+1] */
  double typical_epsilon;
  double typical_delta;
  specdec_tensor eos_token_ids;
  specdec_tensor max_new_tokens;
} specdec_verify_tree_args;

/* Changes rows of logits in place by repetition, presence and frequency penalties, biases, bans and
 * a least number of tokens. Row i counts what the text holds and the drafts before it. docs/ops.md
 */
typedef struct specdec_apply_penalties_args {
  size_t struct_size;
  specdec_tensor target;          /* [B, N+1, V], or [R, V] with target_indptr: floats, written */
  specdec_tensor draft_token_ids; /* [B, N] integers */
  specdec_tensor parents;         /* [B, N] integers of a tree, or none: a chain */
  specdec_tensor target_indptr;   /* [B+1] integers, or none */
  specdec_tensor token_counts;    /* [B, V] int32: how often the output holds each token, or none */
  specdec_tensor prompt_mask;     /* [B, ceil(V/32)] words: the tokens of the prompt, or none */
  specdec_tensor repetition_penalties; /* [B] float32, or none */
  double repetition_penalty;           /* 1 */
  specdec_tensor presence_penalties;   /* [B] float32, or none */
  double presence_penalty;             /* 0 */
  specdec_tensor frequency_penalties;  /* [B] float32, or none */
  double frequency_penalty;            /* 0 */
  specdec_tensor bias_ids;             /* [B, K] integers, or none; unused where outside [0, V) */
  specdec_tensor biases;               /* [B, K] float32, with bias_ids; -inf bans a token */
  specdec_tensor min_new_tokens;       /* [B] integers, or none */
  specdec_tensor eos_token_ids;        /* [E] integers, with min_new_tokens */
} specdec_apply_penalties_args;

/* Key-value caches, all of a call at once, changed in place: dense ones are [B, H, S, D], pools of
 * blocks are [num_blocks, block_size, H, D], with any strides but that of the last dimension, and
 * of any dtype. Each struct has its lists on the host, on CUDA too. docs/ops.md */

/* Writes entries from slot positions[b] on. Those without a slot are dropped. */
typedef struct specdec_kv_append_args {
  size_t struct_size;
  const specdec_tensor* caches; /* [num_caches] of [B, H, S, D], written */
  int64_t num_caches;
  const specdec_tensor* entries; /* [num_entries] of [B, H, n, D], in the dtype of its cache */
  int64_t num_entries;           /* as many as caches */
  specdec_tensor positions;      /* [B] integers */
} specdec_kv_append_args;

/* lengths = clamp(min(lengths, new_lengths), 0). */
typedef struct specdec_kv_truncate_args {
  size_t struct_size;
  const specdec_tensor* caches; /* [num_caches] of [B, H, S, D], written if zero_fill */
  int64_t num_caches;
  specdec_tensor lengths;     /* [B] integers, written */
  specdec_tensor new_lengths; /* [B] integers */
  int64_t zero_fill;          /* 0; else the slots that are dropped become 0 */
} specdec_kv_truncate_args;

/* Moves the entry in slot base[b] + path[b, j] to slot base[b] + j, as a tree's accepted path asks.
 */
typedef struct specdec_kv_compact_args {
  size_t struct_size;
  const specdec_tensor* caches; /* [num_caches] of [B, H, S, D], written */
  int64_t num_caches;
  specdec_tensor base; /* [B] integers: the slot of node 0 */
  specdec_tensor path; /* [B, P] integers that rise; -1 ends a path */
} specdec_kv_compact_args;

/* As kv_append; token t of sequence b is in block block_tables[b, t / block_size]. */
typedef struct specdec_paged_append_args {
  size_t struct_size;
  const specdec_tensor* caches; /* [num_caches] of [num_blocks, block_size, H, D], written */
  int64_t num_caches;
  const specdec_tensor* entries; /* [num_entries] of [B, n, H, D], in the dtype of its cache */
  int64_t num_entries;           /* as many as caches */
  specdec_tensor block_tables;   /* [B, M] integers */
  specdec_tensor positions;      /* [B] integers */
  specdec_tensor counts;         /* [B] integers: how many entries are written, or none: all */
} specdec_paged_append_args;

/* As kv_truncate, and removes the blocks that are no longer needed from the block tables. */
typedef struct specdec_paged_truncate_args {
  size_t struct_size;
  specdec_tensor block_tables; /* [B, M] integers, written: -1 where a block was removed */
  specdec_tensor lengths;      /* [B] integers, written */
  specdec_tensor new_lengths;  /* [B] integers */
  int64_t block_size;
  void* blocks;       /* [B, M] out, in the dtype of block_tables: the removed blocks, then -1 */
  int32_t* num_freed; /* [B] out */
} specdec_paged_truncate_args;

/* As kv_compact. */
typedef struct specdec_paged_compact_args {
  size_t struct_size;
  const specdec_tensor* caches; /* [num_caches] of [num_blocks, block_size, H, D], written */
  int64_t num_caches;
  specdec_tensor block_tables; /* [B, M] integers */
  specdec_tensor base;         /* [B] integers */
  specdec_tensor path;         /* [B, P] integers */
} specdec_paged_compact_args;

/* init takes sizeof(*args). The workspace of a call on CUDA is device memory that need not be
 * cleared and is used until the kernels have run; `stream` is a cudaStream_t, null for the default
 * one. */

SPECDEC_API specdec_code specdec_sample_init(specdec_sample_args* args, size_t struct_size);
SPECDEC_API specdec_code specdec_sample(const specdec_sample_args* args);
SPECDEC_API specdec_code specdec_sample_cuda_workspace_bytes(const specdec_sample_args* args,
                                                             int64_t* bytes);
SPECDEC_API specdec_code specdec_sample_cuda(const specdec_sample_args* args, void* workspace,
                                             int64_t workspace_bytes, void* stream);

SPECDEC_API specdec_code specdec_verify_chain_init(specdec_verify_chain_args* args,
                                                   size_t struct_size);
SPECDEC_API specdec_code specdec_verify_chain(const specdec_verify_chain_args* args);
SPECDEC_API specdec_code
specdec_verify_chain_cuda_workspace_bytes(const specdec_verify_chain_args* args, int64_t* bytes);
SPECDEC_API specdec_code specdec_verify_chain_cuda(const specdec_verify_chain_args* args,
                                                   void* workspace, int64_t workspace_bytes,
                                                   void* stream);

SPECDEC_API specdec_code specdec_verify_tree_init(specdec_verify_tree_args* args,
                                                  size_t struct_size);
SPECDEC_API specdec_code specdec_verify_tree(const specdec_verify_tree_args* args);
SPECDEC_API specdec_code
specdec_verify_tree_cuda_workspace_bytes(const specdec_verify_tree_args* args, int64_t* bytes);
SPECDEC_API specdec_code specdec_verify_tree_cuda(const specdec_verify_tree_args* args,
                                                  void* workspace, int64_t workspace_bytes,
                                                  void* stream);

/* Those of the ops that need no workspace. */

SPECDEC_API specdec_code specdec_apply_penalties_init(specdec_apply_penalties_args* args,
                                                      size_t struct_size);
SPECDEC_API specdec_code specdec_apply_penalties(const specdec_apply_penalties_args* args);
SPECDEC_API specdec_code specdec_apply_penalties_cuda(const specdec_apply_penalties_args* args,
                                                      void* stream);

SPECDEC_API specdec_code specdec_kv_append_init(specdec_kv_append_args* args, size_t struct_size);
SPECDEC_API specdec_code specdec_kv_append(const specdec_kv_append_args* args);
SPECDEC_API specdec_code specdec_kv_append_cuda(const specdec_kv_append_args* args, void* stream);

SPECDEC_API specdec_code specdec_kv_truncate_init(specdec_kv_truncate_args* args,
                                                  size_t struct_size);
SPECDEC_API specdec_code specdec_kv_truncate(const specdec_kv_truncate_args* args);
SPECDEC_API specdec_code specdec_kv_truncate_cuda(const specdec_kv_truncate_args* args,
                                                  void* stream);

SPECDEC_API specdec_code specdec_kv_compact_init(specdec_kv_compact_args* args, size_t struct_size);
SPECDEC_API specdec_code specdec_kv_compact(const specdec_kv_compact_args* args);
SPECDEC_API specdec_code specdec_kv_compact_cuda(const specdec_kv_compact_args* args, void* stream);

SPECDEC_API specdec_code specdec_paged_append_init(specdec_paged_append_args* args,
                                                   size_t struct_size);
SPECDEC_API specdec_code specdec_paged_append(const specdec_paged_append_args* args);
SPECDEC_API specdec_code specdec_paged_append_cuda(const specdec_paged_append_args* args,
                                                   void* stream);

SPECDEC_API specdec_code specdec_paged_truncate_init(specdec_paged_truncate_args* args,
                                                     size_t struct_size);
SPECDEC_API specdec_code specdec_paged_truncate(const specdec_paged_truncate_args* args);
SPECDEC_API specdec_code specdec_paged_truncate_cuda(const specdec_paged_truncate_args* args,
                                                     void* stream);

SPECDEC_API specdec_code specdec_paged_compact_init(specdec_paged_compact_args* args,
                                                    size_t struct_size);
SPECDEC_API specdec_code specdec_paged_compact(const specdec_paged_compact_args* args);
SPECDEC_API specdec_code specdec_paged_compact_cuda(const specdec_paged_compact_args* args,
                                                    void* stream);

#ifdef __cplusplus
}
#endif

#endif
