"""What heads share that draft a block of mask tokens in one pass: sizes, files and drafter."""
