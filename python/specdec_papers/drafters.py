"""The names of the drafters of papers, for ``generate(drafter=...)`` and the command line."""

from __future__ import annotations

from specdec_hf.arguments import PARAMETERS
from specdec_hf.drafting.entry import FOLDER, DrafterEntry, entry_of_head

DRAFTERS: dict[str, DrafterEntry] = {
    "ngram": DrafterEntry(
        "specdec_papers.ngram:NgramDrafter",
        "n-gram model of the text so far, with n-grams of N tokens; or also of the text that FILE "
        "was built from",
        value="N|FILE",
        check_file="specdec_papers.ngram_table:read_metadata",
        draws=True,
    ),
    "random": DrafterEntry(
        "specdec_papers.ngram:RandomDrafter",
        "draws tokens uniformly at random, a baseline",
        draws=True,
    ),
    "nasd": DrafterEntry(
        "specdec_papers.nasd:NasdDrafter",
        "counts n-grams of the text and of the target's most likely next tokens",
        several=True,
    ),
    "layers": DrafterEntry(
        "specdec_papers.layers:LayersDrafter",
        "the model's first N layers as a draft model with a cache of its own",
        value="N",
        needs_value=True,
        options=tuple(PARAMETERS),
        is_model=True,
        draws=True,
    ),
    "early_exit": DrafterEntry(
        "specdec_papers.own_layers:EarlyExitDrafter",
        "the model's first N layers, which the verification does not run again",
        value="N",
        needs_value=True,
        makes_forward=True,
        draws=True,
    ),
    "layer_skip": DrafterEntry(
        "specdec_papers.own_layers:LayerSkipDrafter",
        "the model without its layers A to B, counted from 0, or without the attention and MLP "
        "sublayers that FILE lists; the layers before them run once",
        value="A-B|FILE",
        needs_value=True,
        makes_forward=True,
        draws=True,
    ),
    "sparse_cache": DrafterEntry(
        "specdec_papers.sparse_cache:SparseCacheDrafter",
        "the model itself over the first tokens, the last ones and the chunks of the text that it "
        "attends to most, N tokens in all",
        value="budget=N",
        options=("chunk", "sinks", "recent", "interval"),
        leads_cascade=True,
        makes_forward=True,
        draws=True,
    ),
    "eagle": entry_of_head(
        "specdec_papers.eagle:EagleDrafter",
        "trees of a head of the first EAGLE in a folder, which predicts hidden states",
        own_tree=True,
    ),
    "eagle_chain": entry_of_head(
        "specdec_papers.eagle:EagleChainDrafter", "chains of such a head", draws=True
    ),
    "peagle": entry_of_head(
        "specdec_papers.peagle:PEagleDrafter",
        "chains of a P-EAGLE head in a folder, which drafts at mask tokens in one pass",
        draws=True,
        marks=("peagle",),
    ),
    "dflash": entry_of_head(
        "specdec_papers.dflash:DFlashDrafter",
        "chains of a DFlash head in a folder, a block of mask tokens in one pass",
        draws=True,
        marks=("dflash",),
    ),
    "mtp": DrafterEntry(
        "specdec_papers.mtp.drafter:MtpDrafter",
        "chains of the layers of multi-token prediction in the model's own folder, or in FOLDER, "
        "which Transformers leaves out",
        value=FOLDER,
        serves_all=False,
        draws=True,
    ),
    "mtp_tree": DrafterEntry(
        "specdec_papers.mtp.drafter:MtpTreeDrafter",
        "trees of such a layer",
        value=FOLDER,
        own_tree=True,
        serves_all=False,
    ),
    "medusa": entry_of_head(
        "specdec_papers.medusa:MedusaDrafter",
        "trees of Medusa heads in a folder",
        own_tree=True,
        marks=("medusa_num_heads",),
    ),
    "blockwise": entry_of_head(
        "specdec_papers.blockwise:BlockwiseDrafter",
        "chains of the heads of blockwise parallel decoding in a folder",
        marks=("BlockwiseHeads",),
    ),
    "exit_head": entry_of_head(
        "specdec_papers.exit_head:ExitHeadDrafter",
        "the model's first layers and a trained exit in a folder",
        makes_forward=True,
        draws=True,
        marks=("ExitHead",),
    ),
    "pass_head": entry_of_head(
        "specdec_papers.pass_head:PassHeadDrafter",
        "the model itself at look-ahead embeddings in a folder, which follow the text",
        makes_forward=True,
        draws=True,
        marks=("PassHead",),
    ),
    "token_recycling": DrafterEntry(
        "specdec_papers.token_recycling:TokenRecyclingDrafter",
        "trees of the target's latest most likely next tokens after each token",
        own_tree=True,
    ),
    "lookahead": DrafterEntry(
        "specdec_papers.lookahead:LookaheadDrafter",
        "a window of W columns of guesses, and G of the N-grams that it has made",
        value="W,N,G",
        own_tree=True,
    ),
}
