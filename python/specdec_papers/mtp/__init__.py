"""Native multi-token prediction: layers of a checkpoint that draft, which Transformers drops."""
